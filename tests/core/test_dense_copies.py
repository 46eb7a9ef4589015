"""Stretches that are made dense once, whoever reads. `test_orders` has the same batches with any limit."""

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DatasetStore, Field
from mouse_core.errors import ConfigError, DataError
from tests.core.killing import in_child
from tests.waiting import together

ROWS = 6000


def recording(**columns: Any) -> dict[str, Any]:
    rows = np.arange(ROWS)
    return {"action": rows % 3, "reward": rows * 0.5, "done": rows % 100 == 99, **columns}


def chunked(columns: dict[str, Any], chunk: int = 100) -> pa.Table:
    """In chunks of so many rows."""
    return pa.concat_tables([pa.table(columns).slice(first, chunk) for first in range(0, ROWS, chunk)])


def with_nulls(every: int = 7, dtype: str = "int64") -> pa.Array:
    rows = np.arange(ROWS)
    return pa.array(rows.astype(dtype), mask=rows % every == 3)


def read(source: BatchSource, indices: range = range(100)) -> list[Any]:
    return [source[index] for index in indices]


def expect_rows(source: BatchSource, batch: Any, index: int) -> None:
    """What ``recording(episode_step=with_nulls())`` holds."""
    at = source.plan(index).starts[:, None] + np.arange(source.sequence_length)
    assert (batch["time"] == np.where(at % 7 == 3, -1, at)).all()
    assert (batch["done"] == (at % 100 == 99)).all()


def test_sources_of_a_store_share_copies_and_pickles_have_none() -> None:
    store = DatasetStore().from_dataset(chunked(recording(episode_step=with_nulls())))
    read(BatchSource(store, 8, 16))
    used = store._budget.used
    # Every row once: eight bytes of time, one of done.
    assert used == 9 * ROWS
    read(BatchSource(store, 16, 8, seed=5))
    read(BatchSource(store.snapshot(ROWS - 10), 16, 8))
    other = pickle.loads(pickle.dumps(BatchSource(store, 8, 16)))
    assert store._budget.used == used
    assert other.snapshot.budget.used == 0
    assert other.snapshot.budget.nbytes == store._budget.nbytes
    for index, batch in enumerate(read(other)):
        expect_rows(other, batch, index)


def test_what_is_gone_leaves_room() -> None:
    store = DatasetStore(fields=[Field("code", fill=-1)])
    store.extend(
        {"action": np.zeros(500, int), "reward": np.zeros(500), "done": np.zeros(500, int), "code": np.ones(500, int)}
    )
    for _ in range(20):
        store.append({"action": 0, "reward": 0.0, "done": 0, "code": None})
        source = BatchSource(store, 8, 64)
        read(source, range(20))
        assert store._budget.used <= 8 * 2 * 521
    assert store._budget.used > 0


def test_a_column_that_a_part_lacks_takes_one_chunk() -> None:
    with_time = chunked(recording(episode_step=np.arange(ROWS)))
    without = chunked(recording())
    store = DatasetStore().from_dataset(with_time).from_dataset(without)
    source = BatchSource(store, 8, 64)
    for index, batch in enumerate(read(source)):
        at = source.plan(index).starts[:, None] + np.arange(8)
        assert (batch["time"] == np.where(at < ROWS, at, -1)).all()
    assert store._budget.used == 2 * ROWS + 8 * 100


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_row_that_is_not_allowed_is_named_where_it_is_read_and_nowhere_else(limit: int) -> None:
    rewards = pa.array(np.arange(ROWS) * 0.5, mask=np.arange(ROWS) == 1234)
    observations = pa.array([[float(row)] * (5 if row == 4321 else 1 + row % 3) for row in range(ROWS)])
    store = DatasetStore(max_obs_continuous_dim=3, dense_bytes=limit)
    store.from_dataset(chunked(recording() | {"reward": rewards, "observation": observations}))
    source = BatchSource(store, 8, 8)
    refused = 0
    for index in range(400):
        starts = source.plan(index).starts
        at = starts[:, None] + np.arange(8)
        bad = [row for row in (1234, 4321) if (at == row).any()]
        if bad:
            refused += 1
            with pytest.raises(DataError, match=f"at row ({'|'.join(map(str, bad))}) "):
                source[index]
            continue
        batch = source[index]
        assert (batch["reward"] == at * 0.5).all()
        within = np.arange(3) <= at[..., None] % 3
        assert (batch["obs_continuous"] == np.where(within, at[..., None], 0)).all()
    assert refused > 2


def test_codes_in_copies_are_checked() -> None:
    codes = np.arange(ROWS) % 4
    codes[2500] = 9
    column = pa.array(codes, mask=np.arange(ROWS) % 7 == 3)
    store = DatasetStore(fields=[Field("code", fill=1, bounds=(0, 3))])
    store.from_dataset(chunked(recording(code=column)))
    source = BatchSource(store, 8, 8, fields=["code"])
    for index in range(200):
        at = source.plan(index).starts[:, None] + np.arange(8)
        if (at == 2500).any():
            with pytest.raises(DataError, match=r"code: expected 0\.\.3, found 9 at row 2500 "):
                source[index]
        else:
            assert (source[index]["code"] == np.where(at % 7 == 3, 1, at % 4)).all()


@pytest.mark.parametrize(
    ("stored", "fill", "dtype"), [("uint8", -1, "int64"), ("int32", 0.5, "float64"), ("float16", np.nan, "float32")]
)
def test_fills_that_the_stored_dtype_cannot_hold(stored: str, fill: float, dtype: str) -> None:
    store = DatasetStore(fields=[Field("x", fill=fill, dtype=dtype)])
    store.from_dataset(
        chunked(recording(x=with_nulls(dtype="uint8").cast(stored if stored != "float16" else "halffloat")))
    )
    source = BatchSource(store, 8, 64, fields=["x"])
    for index, batch in enumerate(read(source)):
        at = source.plan(index).starts[:, None] + np.arange(8)
        wanted = np.where(at % 7 == 3, fill, at % 256).astype(dtype)
        np.testing.assert_array_equal(batch["x"], wanted)


def test_threads_share_copies() -> None:
    store = DatasetStore().from_dataset(chunked(recording(episode_step=with_nulls())))

    def work(seed: int) -> None:
        source = BatchSource(store, 8, 16, seed=seed)
        for index in range(200):
            expect_rows(source, source[index], index)

    together([partial(work, number // 2) for number in range(4)])
    assert store._budget.used == 9 * ROWS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_reads_on(tmp_path: Path) -> None:
    datasets.Dataset(chunked(recording(episode_step=with_nulls()))).save_to_disk(str(tmp_path / "d"))
    store = DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "d")))
    source = BatchSource(store, 8, 16)
    read(source, range(3))

    def check() -> None:
        for index, batch in enumerate(read(source)):
            expect_rows(source, batch, index)

    in_child(check)
    check()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1"])
def test_a_limit_is_a_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="dense_bytes: expected an integer of at least 0"):
        DatasetStore(dense_bytes=wrong)
