"""Where the bytes of rows and windows lie: chunks that are like another, pieces of windows, runs of row numbers.

That batches hold the right values is tested elsewhere, through sources. Here it is how they are found: how often a
chunk is looked up, in how few pieces windows come, what is copied once. No batch shows that, so these tests know the
rooms that do it.
"""

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DataError, DatasetStore, Field
from mouse_core._arrow.column import _FEW as FEW
from mouse_core._arrow.column import Column
from mouse_core._base.memory import sparse_zeros
from mouse_core.store import _segments

ROWS = 40  # of a record batch
BATCHES = 30
FIELDS = [Field("ok", dtype="bool"), Field("grid", max_ndim=2)]


def batch(number: int, **changes: Any) -> pa.RecordBatch:
    rows = np.arange(number * ROWS, (number + 1) * ROWS)
    columns = {
        "action": pa.array(rows % 5),
        "reward": pa.array(rows.astype(np.float32)),
        "done": pa.array(rows * 0),
        "observation": pa.array([[row, row + 0.5, -row] for row in rows.tolist()], pa.list_(pa.float32())),
        "ok": pa.array(rows % 3 == 0),
        "grid": pa.array([[[row, 1], [2, row]] for row in rows.tolist()], pa.list_(pa.list_(pa.int16()))),
    }
    return pa.RecordBatch.from_pydict(columns | changes)


def saved(path: Path, batches: list[pa.RecordBatch]) -> datasets.Dataset:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        for each in batches:
            writer.write_batch(each)
    return datasets.Dataset.from_file(str(path))


def regular(tmp_path: Path, name: str = "regular") -> datasets.Dataset:
    return saved(tmp_path / f"{name}.arrow", [batch(number) for number in range(BATCHES)])


def check(dataset: Any, *, pad: bool = False) -> None:
    """Every row of windows over the whole dataset is what pyarrow says."""
    fields = [*FIELDS, Field("obs_continuous", column="observation", shape=(4,) if pad else (3,), pad=0)]
    source = BatchSource(DatasetStore(fields=fields).from_dataset(dataset), 7, 64, seed=1)
    table = dataset.data.table if dataset._indices is None else dataset.with_format("arrow")[:]
    expected = {
        "reward": table["reward"].to_pylist(),
        "action": table["action"].to_pylist(),
        "ok": table["ok"].to_pylist(),
        "grid": table["grid"].to_pylist(),
        "obs_continuous": [row + [0] * (pad + 3 - len(row)) for row in table["observation"].to_pylist()],
    }
    for index in range(12):
        rows = source.plan(index).starts[:, None] + np.arange(7)
        for name, values in source[index].items():
            if name in expected:
                assert np.array_equal(values, np.array(expected[name])[rows]), name


@pytest.mark.parametrize("where", [0, 1, BATCHES - 1])
def test_batches_of_another_layout(tmp_path: Path, where: int) -> None:
    """Lists that are as many in all, which only the offsets tell; longer lists; and fewer rows."""
    batches = [batch(number) for number in range(BATCHES)]
    rows = [[number, 0.5, 1] for number in range(ROWS)]
    rows[5], rows[6] = rows[5][:2], [*rows[6], 9]
    wide = [[number, 1, 2, 3] for number in range(ROWS)]
    for name, values in (("ragged", rows), ("wide", wide)):
        batches[where] = batch(where, observation=pa.array(values, pa.list_(pa.float32())))
        check(saved(tmp_path / f"{name}.arrow", batches), pad=True)
    batches[where] = batch(where).slice(3, 20)
    check(saved(tmp_path / "short.arrow", batches))


def test_nulls_in_one_batch(tmp_path: Path) -> None:
    times = [pa.array(np.arange(ROWS)) for _ in range(BATCHES)]
    times[11] = pa.array([None if number == 4 else number for number in range(ROWS)], pa.int64())
    batches = [batch(number, episode_step=times[number]) for number in range(BATCHES)]
    source = BatchSource(DatasetStore().from_dataset(saved(tmp_path / "nulls.arrow", batches)), 1, 400, "sequential")
    found = np.concatenate([source[index]["time"][:, 0] for index in range(3)])
    assert found.min() == -1
    assert (found == -1).sum() == 1


def test_another_layout_of_as_many_bytes(tmp_path: Path) -> None:
    batches = [batch(number) for number in range(BATCHES)]
    rows = range(13 * ROWS, 14 * ROWS)
    shorter = pa.array([[row, 0.5] for row in rows], pa.list_(pa.float32()))
    longer = pa.array([[[row, 1, 1], [2, row, 1]] for row in rows], pa.list_(pa.list_(pa.int16())))
    batches[13] = batch(13, observation=shorter, grid=longer)
    dataset = saved(tmp_path / "other.arrow", batches)
    sizes = {dataset.data.table["action"].chunk(number).buffers()[1].parent.size for number in (12, 13)}
    assert len(sizes) == 1
    fields = [Field("obs_continuous", column="observation", shape=(3,), pad=0), Field("ok", dtype="bool")]
    source = BatchSource(DatasetStore(fields=fields).from_dataset(dataset), 1, 2000, "sequential", drop_last=False)
    found, order = source[0]["obs_continuous"][:, 0], np.argsort(source[0]["reward"][:, 0])
    expected = [row + [0] * (3 - len(row)) for row in dataset.data.table["observation"].to_pylist()]
    assert np.array_equal(found[order], np.array(expected, np.float32))
    assert np.array_equal(source[0]["ok"][order, 0], np.arange(BATCHES * ROWS) % 3 == 0)


def test_a_chunk_is_looked_up_once_unless_chunks_of_columns_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a table of columns of several files, a chunk of one column says nothing about those of the others."""
    one_by_one: list[int] = []
    locate = Column._first_value_of
    monkeypatch.setattr(Column, "_first_value_of", lambda *chunk: one_by_one.append(chunk[-1]) or locate(*chunk))
    one, two = regular(tmp_path, "one"), regular(tmp_path, "two")
    both = datasets.concatenate_datasets([one, two])
    check(both)
    assert len(one_by_one) <= 6 * FEW  # in the first batch
    one_by_one.clear()
    tables = [dataset.data.table for dataset in (one, two)]
    mixed = pa.table({name: tables[number % 2][name] for number, name in enumerate(tables[0].schema.names)})
    check(datasets.Dataset(mixed))
    assert len(one_by_one) == 6 * BATCHES
    check(both.select(range(ROWS // 2, 2 * ROWS * BATCHES - 3)))
    check(datasets.concatenate_datasets([both.select(range(ROWS, 12 * ROWS)), both.select(range(20 * ROWS))]))
    check(both.shuffle(seed=0))
    schema = tables[0].schema
    for place, other in ((0, pa.int32()), (1, pa.float64())):
        check(datasets.Dataset(one.data.cast(schema.set(place, pa.field(schema.names[place], other)))))


def test_row_numbers_beyond_the_table_are_an_error() -> None:
    from datasets import Dataset

    columns = {"action": np.zeros(90, np.int64), "reward": np.zeros(90, np.float32), "done": np.zeros(90, np.int64)}
    dataset = Dataset.from_dict(columns).select([*range(10, 40), *range(50, 90)], keep_in_memory=True)
    for wrong in (90, 2**40):
        numbers = dataset._indices.table.column(0).to_numpy().copy()
        numbers[33] = wrong
        table = pa.table({"n": pa.array(columns["reward"])})
        segment = _segments.Segment(table, pa.table({"indices": pa.array(numbers)}))
        assert segment.runs is None
        with pytest.raises(DataError, match=r"expected row indices in 0\.\.89, found"):
            segment.row_numbers(np.arange(70))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_known_of_a_few_of_millions_of_chunks_takes_little_memory() -> None:
    """Of 512 MB each value that is written takes a page of 4 KB, and none of 2 MB."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before, places = resident(), np.random.default_rng(0).integers(0, 1 << 23, 200)
    known = sparse_zeros((1 << 23, 8), np.int64)
    assert not known[places].any()
    known[places, 3] = places + 1
    assert (known[places, 3] == places + 1).all()
    assert known[places].sum() == (places + 1).sum()
    assert resident() - before < 32 << 20
