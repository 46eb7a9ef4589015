"""Stores of many sealed files: the same rows as in memory, and work for what is touched and not for what is there."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DatasetStore
from mouse_core._arrow.column import ColumnPart
from tests.core.disk_cases import rows_of

_FEW_ROWS = 40


def batches_of(source: BatchSource, count: int = 3) -> list[dict[str, bytes]]:
    """The bytes of some batches."""
    return [{name: values.tobytes() for name, values in source[number].items()} for number in range(count)]


def files_of(snapshot: Any) -> list[int]:
    """How many files each segment that has many holds."""
    return [len(one.sealed_files) for one in snapshot.segments if len(one.sealed_files) > 1]


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are not put together, and eight of them are one segment."""
    monkeypatch.setattr("mouse_core.store.disk.rows.small_run", lambda *_: range(0))
    monkeypatch.setattr("mouse_core.store.disk.segments.FEWEST", 8)


def tables_of(files: int) -> dict[str, pa.Table]:
    """Rows that follow each other, as so many tables."""
    rows = DatasetStore()
    rows.extend(rows_of("numbers", 0, _FEW_ROWS * files))
    whole = rows.to_dataset().data.table
    return {str(number): whole.slice(_FEW_ROWS * number, _FEW_ROWS) for number in range(files)}


def filled(folder: Path, files: int) -> None:
    """A store of so many files."""
    with DatasetStore.open(folder, "a") as writer:
        writer.from_dataset(tables_of(files))


@pytest.mark.parametrize(
    ("kind", "max_rows", "merges", "layout"),
    [
        ("numbers", None, True, "columns"),
        ("numbers", None, False, "windows"),
        pytest.param("numbers", 1_200, True, "columns", marks=pytest.mark.slow),
        pytest.param("mixed", 1_200, False, "windows", marks=pytest.mark.slow),
    ],
)
def test_growing_over_many_files_gives_the_batches_of_the_same_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, max_rows: int | None, merges: bool, layout: str
) -> None:
    """Rows are sealed, put together and dropped between one look and the next; sources take over what they know."""
    monkeypatch.setattr("mouse_core.store.disk.segments.FEWEST", 2)
    for limit in ("_FEWEST_ROWS", "_MOST_ROWS"):
        monkeypatch.setattr(f"mouse_core.store.disk.segments.{limit}", 16)
    if not merges:
        monkeypatch.setattr("mouse_core.store.disk.rows.small_run", lambda *_: range(0))
    options: dict[str, Any] = {"seed": 5, "fields": ["reward", "obs_image" if kind == "mixed" else "obs_continuous"]}
    draw = np.random.default_rng(1)
    number, files = 90, 0
    with DatasetStore.open(tmp_path / "store", "a", max_rows=max_rows, layout=layout) as writer:
        writer.extend(rows_of(kind, 0, number))
    reader = DatasetStore.open(tmp_path / "store")
    followed = BatchSource(reader, 8, 6, **options)
    for _ in range(3):
        late_reader = DatasetStore.open(tmp_path / "store")
        late = BatchSource(late_reader, 8, 6, **options)
        batches_of(late)
        with DatasetStore.open(tmp_path / "store", "a", max_rows=max_rows) as writer:
            own = BatchSource(writer, 8, 6, **options)
            for count in (*draw.integers(1, 90, 2).tolist(), 0):
                if count:
                    writer.extend(rows_of(kind, number, count))
                    writer.flush()
                else:
                    writer.close()
                number += count
                dropped = writer.written - len(writer)
                memory = DatasetStore()
                memory.extend(rows_of(kind, dropped, number - dropped))
                wanted = BatchSource(memory, 8, 6, **options)
                own, followed, late = (
                    source.with_snapshot(store.snapshot(), epoch_start=0)
                    for source, store in ((own, writer), (followed, reader), (late, late_reader))
                )
                for source in (own, followed, late):
                    assert source.fingerprint == wanted.fingerprint
                    assert batches_of(source) == batches_of(wanted)
                files = max([files, *files_of(reader.snapshot())])
    assert files > 1, "no files were one segment"


def test_what_does_not_follow_from_segments_is_the_same(tmp_path: Path, unmerged: None) -> None:
    filled(tmp_path / "store", 9)
    store, memory = DatasetStore.open(tmp_path / "store"), DatasetStore()
    memory.extend(rows_of("numbers", 0, 9 * _FEW_ROWS))
    assert files_of(store.snapshot()) == [9]
    assert store[:] == memory[:]
    assert store.to_dataset().to_list() == memory.to_dataset().to_list()
    assert store.snapshot().episode_starts.tolist() == memory.snapshot().episode_starts.tolist()
    for rows in (8, 41, 330):
        assert store.snapshot(rows).fingerprint == memory.snapshot(rows).fingerprint
        some = [BatchSource(one.snapshot(rows), 8, 1) for one in (store, memory)]
        assert batches_of(some[0]) == batches_of(some[1])
    sent = pickle.loads(pickle.dumps(store.snapshot()))
    assert sent.rows([0, 39, 40, 41, 359]) == memory.snapshot().rows([0, 39, 40, 41, 359])
    assert batches_of(BatchSource(sent, 8, 6)) == batches_of(BatchSource(memory, 8, 6))


def test_files_that_arrive_one_by_one_become_few_segments(tmp_path: Path, unmerged: None) -> None:
    reader, found = None, []
    for number in range(20):
        with DatasetStore.open(tmp_path / "store", "a") as writer:
            writer.extend(rows_of("numbers", _FEW_ROWS * number, _FEW_ROWS))
        reader = reader or DatasetStore.open(tmp_path / "store")
        found.append(len(reader.snapshot().segments))
    # A joined segment includes earlier joined segments that are not larger.
    assert found == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5]


def test_columns_that_only_some_files_have_values_of_are_found(tmp_path: Path, unmerged: None) -> None:
    """Of the first files that are one segment, none has a value of a field that the others have."""
    tables = tables_of(12)
    for number, (name, table) in enumerate(tables.items()):
        values = [None if number < 8 else float(number)] * _FEW_ROWS
        tables[name] = table.append_column("metadata_q_star", pa.array(values, pa.float64()))
    memory = DatasetStore().from_dataset(tables)
    with DatasetStore.open(tmp_path / "store", "a") as store:
        store.from_dataset(tables)
    store = DatasetStore.open(tmp_path / "store")
    assert files_of(store.snapshot()) == [12]
    assert store.snapshot(8 * _FEW_ROWS).spec == memory.snapshot(8 * _FEW_ROWS).spec
    assert store.snapshot().spec == memory.snapshot().spec != store.snapshot(8 * _FEW_ROWS).spec
    assert batches_of(BatchSource(store, 8, 6)) == batches_of(BatchSource(memory, 8, 6))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the files that are opened, and the columns of segments that are made."""
    done: Counter[str] = Counter()

    def count(what: str, owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            done[what] += 1
            return before(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count("opened", pa, "memory_map")
    count("made", ColumnPart, "__init__")
    return done


def test_work_follows_what_is_touched_and_not_the_number_of_files(
    tmp_path: Path, unmerged: None, work: Counter[str]
) -> None:
    needed = []
    for files in (33, 49):
        folder = tmp_path / str(files)
        filled(folder, files)
        store = DatasetStore.open(folder)
        with DatasetStore.open(folder, "a") as writer:
            work.clear()
            assert len(store) == files * _FEW_ROWS
            assert not work
            source = BatchSource(store, 4, 3, fields=["reward", "done"])
            assert work["opened"] <= 2
            found = [work["made"]]
            source[0]
            assert work["opened"] <= 2 + 2 * 3
            assert work["opened"]
            for number in range(5):
                work.clear()
                writer.extend(rows_of("numbers", (files + number) * _FEW_ROWS, _FEW_ROWS))
                writer.flush()
                work.clear()
                source = source.with_snapshot(store.snapshot(), epoch_start=0)
                assert not work["opened"]
                source[0]
                assert work["opened"] <= 2 * 3
                found.append(work["made"])
        needed.append(found)
    assert needed[0] == needed[1]
