"""Batches are, to the byte, what a plain-Python oracle says, however the steps came to the store."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, PrefetchBatchifier
from mouse_core.sampling import SAMPLERS
from mouse_core.testing import example_columns, example_store
from tests.core.oracle import assert_same, field_arrays, last_starts, windows
from tests.core.worlds import CUSTOM_RULES, Part, World, build, parts, worlds
from tests.raising import assert_raises

NARROWER = {"obs_continuous": "float32", "obs_image": "uint8", "time": "float64", "done": "int8"}


def expected_arrays(world: World, rows: list[dict[str, Any]], dtypes: dict[str, str] | None = None) -> dict[str, Any]:
    return field_arrays(rows, widths=world.widths, custom=CUSTOM_RULES, dtypes=dtypes)


@st.composite
def configurations(draw: st.DrawFn, rows: int) -> dict[str, Any]:
    length = draw(st.one_of(st.integers(1, min(rows, 12)), st.integers(1, min(rows, 200))))
    sampling = draw(st.sampled_from(list(SAMPLERS)))
    most = 7 if sampling in ("random", "batch", "blocks") else min(7, rows // length)
    return {
        "sequence_length": length,
        "batch_size": draw(st.integers(1, most)),
        "sampling": sampling,
        "seed": draw(st.integers(0, 2**64 - 1)),
        "drop_last": draw(st.booleans()),
    }


def assert_starts(source: BatchSource, index: int, rows: int, drop_last: bool, sampling: str) -> np.ndarray:
    starts = source.plan(index).starts
    length, batch_size = source.sequence_length, source.batch_size
    assert starts.dtype == np.int64
    assert starts.ndim == 1
    short = sampling == "sequential" and not drop_last
    assert len(starts) == batch_size or (short and 0 < len(starts) < batch_size)
    assert (starts >= 0).all()
    assert (starts <= rows - length).all()
    if sampling == "last":
        assert starts.tolist() == last_starts(rows, length, batch_size)
    if sampling in ("sequential", "batch"):
        assert (starts % length == 0).all()
    return starts


@given(data=st.data(), world=worlds(), wanted=parts())
def test_any_store_gives_what_the_oracle_says(data: st.DataObject, world: World, wanted: list[Part]) -> None:
    """Also where this pyarrow does not copy all fields in one call, and each field is gathered by itself."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr("mouse_core._arrow.byte_views.cast_copies", lambda: False)
        built = build(world, wanted, Path(folder))
        rows = built.rows
        assert len(built.store) == len(rows)
        assume(rows)
        configuration = data.draw(configurations(len(rows)))
        dtypes = data.draw(st.sampled_from([None, NARROWER]))
        arrays = expected_arrays(world, rows, dtypes)
        dtypes = {name: dtype for name, dtype in (dtypes or {}).items() if name in arrays}
        source = BatchSource(built.store, dtypes=dtypes, **configuration)
        assert list(source.spec) == list(arrays)
        for name, array in arrays.items():
            assert source.spec[name].dtype == array.dtype
            assert source.spec[name].shape == array.shape[1:]
        for index in {0, 1, len(source) - 1, len(source), 3 * len(source) + 1}:
            starts = assert_starts(source, index, len(rows), configuration["drop_last"], configuration["sampling"])
            assert_same(source[index], windows(arrays, starts, source.sequence_length), (index, starts))


def test_no_shard_gets_fewer_windows_than_the_others() -> None:
    store = example_store(96)
    options: dict[str, Any] = {"sampling": "sequential", "drop_last": False, "shard": (3, 4)}
    with pytest.raises(ConfigError, match=r"4 shards divide evenly, found batch 1 with 2 windows; .*drop_last=True"):
        BatchSource(store, 16, 4, **options)
    assert_raises(ConfigError, "found batch 3 with 1 windows", BatchSource, store, 7, 4, epoch_start=0, **options)
    for maker in (BatchSource, PrefetchBatchifier):
        assert_raises(ConfigError, "shards divide evenly", maker, store, 16, 4, **options)
    source = BatchSource(store, 12, 4, **options)  # 8 windows
    assert [len(batch["reward"]) for batch in source] == [1, 1]
    store.extend(example_columns(12, first=96))
    assert_raises(ConfigError, "found batch 4 with 1 windows", source.with_snapshot, store.snapshot(), epoch_start=2)
    with PrefetchBatchifier(store, 12, 4, **{**options, "shard": (0, 1)}) as loader:
        assert len([*loader][-1]["reward"]) == 1

    class Uneven:
        sequence_length, batch_size = 2, 4

        def batches_per_epoch(self, snapshot: Any) -> int:
            return 3

        def starts(self, seed: int, index: int, snapshot: Any, epoch_start: int) -> Any:
            return np.arange(3 if index % 3 == 1 else 4)

    source = BatchSource(example_store(20), sampling=Uneven(), shard=(0, 2))
    assert len(source[0]["reward"]) == 2
    with pytest.raises(ConfigError, match="found batch 1 with 3 windows"):
        source[1]
    assert len(source[2]["reward"]) == 2


@given(data=st.data(), world=worlds(), wanted=parts(max_parts=2))
def test_gathering_into_given_memory_and_in_stored_dtypes(
    data: st.DataObject, world: World, wanted: list[Part]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        built = build(world, wanted, Path(folder))
        assume(built.rows)
        source = BatchSource(built.store, **data.draw(configurations(len(built.rows))))
        plan = source.plan(0)
        batch = source.gather(plan)
        shape = (len(plan.starts), source.sequence_length)
        out = {name: np.zeros((*shape, *spec.shape), spec.dtype) for name, spec in source.spec.items()}
        written = source.gather(plan, out)
        for name, array in out.items():
            assert np.shares_memory(written[name], array)
        assert_same(out, batch)
        narrow = {name: np.zeros((*shape, *spec.shape), spec.stored_dtype) for name, spec in source.spec.items()}
        source.gather(plan, narrow, stored=True)
        fresh = source.gather(plan, stored=True)
        assert_same(narrow, fresh)
        assert_same({name: array.astype(source.spec[name].dtype) for name, array in fresh.items()}, batch)
        for name, spec in source.spec.items():
            assert spec.stored_dtype.itemsize <= spec.dtype.itemsize, name


@given(
    world=worlds(),
    wanted=parts(max_parts=2, counts=st.integers(150, 400)),
    length=st.integers(70, 300),
    sampling=st.sampled_from(list(SAMPLERS)),
    seed=st.integers(0, 99),
)
def test_long_windows(world: World, wanted: list[Part], length: int, sampling: str, seed: int) -> None:
    """Windows of several chunks, which are copied in long pieces and not step by step."""
    with tempfile.TemporaryDirectory() as folder:
        built = build(world, wanted, Path(folder))
        length = min(length, len(built.rows))
        arrays = expected_arrays(world, built.rows)
        batch_size = 1 if sampling == "last" else 5
        source = BatchSource(built.store, length, batch_size, sampling, seed, drop_last=False)
        for index in range(4):
            starts = source.plan(index).starts
            assert_same(source[index], windows(arrays, starts, length), (index, starts))
