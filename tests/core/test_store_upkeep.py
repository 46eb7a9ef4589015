"""Old rows are dropped, small files are put together, and readers keep what they look at."""

import json
import os
import pickle
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, DatasetStore, PrefetchBatchifier
from mouse_core.errors import StateError
from mouse_core.store.disk import rows as sealing_module
from mouse_core.store.disk.folder import Lease, Sealed, Unneeded
from mouse_core.store.disk.rows import ALL, Limits, small_run
from mouse_core.store.disk.segments import SealedFile
from tests.core.disk_cases import check_batches, leftovers, numbers_in, rows_of, table_of


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(8, 200), st.integers(0, 30))
def test_the_oldest_are_dropped_and_no_more_than_need_be(sizes: list[int], most: int, coming: int) -> None:
    files = [(size, 10_000 * size) for size in sizes]
    by_rows = Limits(max_rows=most).too_many(files, rows=coming)
    by_bytes = Limits(max_bytes=10_000 * most).too_many(files, size=10_000 * coming)
    for dropped in (by_rows, by_bytes):
        kept = sizes[dropped:]
        assert sum(kept) + coming <= most or len(kept) <= 1
        assert not dropped or sum(sizes[dropped - 1 :]) + coming > most
    assert ALL.too_many(files, rows=coming) == 0


def test_writing_small_files_writes_no_row_often() -> None:
    """Ten thousand files of a row each: each row goes into a file twice as large every time."""
    segments: list[Sealed] = []
    written, most = 0, 1000
    for number in range(10_000):
        segments.append(Sealed(number, 1, 1, "", 0))
        while run := small_run(segments, most):
            size = sum(segments[at].bytes for at in run)
            assert size <= most
            written += size
            segments[run.start : run.stop] = [Sealed(number, size, size, "", 0)]
    assert sum(one.rows for one in segments) == 10_000
    assert len(segments) < 60
    assert written <= 10_000 * 10


def test_only_like_files_are_put_together() -> None:
    like = [Sealed(number, 1, 1, "", 0) for number in range(20)]
    assert small_run(like, 1000) == range(20)
    assert small_run(like, 10) == range(10, 20)
    assert small_run(like, 1000, 9) == range(11, 20)
    assert not small_run(like[:7], 1000)
    assert small_run([*like[:5], like[0]._replace(schema=1), *like[5:]], 1000) == range(6, 21)
    assert not small_run([like[0]._replace(bytes=500), *like[:7]], 1000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_reader_that_looks_at_a_state_keeps_its_files(tmp_path: Path) -> None:
    asked = Unneeded(tmp_path)
    lease, later = Lease(tmp_path, 7), Lease(tmp_path, 9)
    assert asked.is_free(0, 6)
    assert asked.is_free(8, 8)
    assert asked.is_free(9, 8)
    assert not asked.is_free(5, 7)
    lease.close()
    assert asked.is_free(0, 8)
    assert not asked.is_free(0, 9)
    # A child that closes its copy, or ends, lets go of nothing.
    if not (child := os.fork()):
        later.close()
        os._exit(0)
    os.waitpid(child, 0)  # other tests of this process may have children, too
    assert not asked.is_free(9, 9)
    assert type(pickle.loads(pickle.dumps(later))) is Lease
    del later
    assert asked.is_free(0, 9)


def test_files_of_many_short_runs_are_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows_of("mixed", 0, 5))
    early = DatasetStore.open(folder)
    had, most = early.snapshot(), 0
    for first in range(5, 85, 5):
        with DatasetStore.open(folder, "a") as store:
            store.extend(rows_of("mixed", first, 5))
        most = max(most, len(DatasetStore.open(folder).snapshot().segments))
    with DatasetStore.open(folder, "a") as store:
        assert numbers_in(store) == range(85)
        check_batches(store)
    assert most <= 12
    # As of the same rows in memory, and a reader that was there all along has lost nothing.
    assert had.rows(range(5))["number"] == [*range(5)]
    assert numbers_in(early) == range(85)
    whole = DatasetStore()
    whole.extend(rows_of("mixed", 0, 85))
    assert early.snapshot().fingerprint == whole.snapshot().fingerprint
    assert len(files(folder)) > len(early.snapshot().segments)
    del had
    with DatasetStore.open(folder, "a"):
        pass
    assert not leftovers(folder)


def test_a_loader_goes_on_where_files_were_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for first in range(0, 50, 10):
        with DatasetStore.open(folder, "a") as store:
            store.extend(rows_of("numbers", first, 10))
    reader = DatasetStore.open(folder)
    with PrefetchBatchifier(reader, 4, 8, seed=3) as loader:
        state, expected = loader.state_dict(), [batch["reward"] for batch in islice(loader, 4)]
        for first in range(50, 200, 10):
            with DatasetStore.open(folder, "a") as store:
                store.extend(rows_of("numbers", first, 10))
        loader.refresh()
        assert max(batch["obs_continuous"][..., 0].max() for batch in islice(loader, 20)) > 150
    with PrefetchBatchifier(DatasetStore.open(folder), 4, 8, seed=3) as loader:
        loader.load_state_dict(state)
        for batch, values in zip(loader, expected, strict=False):
            assert (batch["reward"] == values).all()


def test_nothing_is_put_together_once_a_store_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetStore.open(tmp_path / "store", "a") as store:
        for first in range(0, 100, 10):
            store.from_dataset(table_of("numbers", first, 10))
    del store
    names = []

    def slowly(file: int) -> None:
        time.sleep(0.03)
        names.append(threading.current_thread().name)

    monkeypatch.setattr(os, "fsync", slowly)
    DatasetStore.open(tmp_path / "store", "a").close()
    assert "mouse-sealing" not in {thread.name for thread in threading.enumerate()}
    assert "mouse-sealing" in names
    assert len(list((tmp_path / "store" / "segments").iterdir())) == 1


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "segments").iterdir())


@pytest.mark.parametrize(
    ("limit", "at_once"),
    [({"max_rows": 800}, 1), ({"max_bytes": 120_000}, 37), ({"max_rows": 800}, 1000), ({"max_bytes": 120_000}, 5000)],
)
def test_the_newest_rows_stay(limit: dict[str, int], at_once: int, tmp_path: Path) -> None:
    rows = 1500 if at_once == 1 else 5000
    with DatasetStore.open(tmp_path / "store", "a", **limit) as store:
        for first in range(0, rows, at_once):
            if at_once == 1000:
                store.from_dataset(table_of("numbers", first, at_once))
            else:
                store.extend(rows_of("numbers", first, min(at_once, rows - first)))
            assert len(store) <= limit.get("max_rows", rows)
            if first % 100 == 0:
                store.flush()
        assert numbers_in(store).stop == rows
        check_batches(store)
    with DatasetStore.open(tmp_path / "store") as store:
        found = numbers_in(store)
        assert found.stop == rows
        assert len(found) < rows
        if "max_rows" in limit:
            assert 0.7 * 800 <= len(found) <= 800
        else:
            assert sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.arrow")) <= limit["max_bytes"]
    with DatasetStore.open(tmp_path / "store", "a") as store:
        assert (len(store), store.written) == (len(found), rows)
        store.extend(rows_of("numbers", rows, 1))
        assert numbers_in(store) == range(found.start, rows + 1)


@pytest.mark.parametrize(
    ("limit", "closed", "begun"),
    [
        ({"max_rows": 300}, True, 4000),
        ({"max_rows": 300}, False, 20),
        ({"max_bytes": 1 << 17}, True, 20),
        ({"max_bytes": 1 << 17}, False, 4000),
    ],
)
def test_a_smaller_limit_keeps_the_newest_rows_of_large_files(
    limit: dict[str, int], closed: bool, begun: int, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    store = DatasetStore.open(folder, "a")
    store.extend(rows_of("numbers", 0, begun))
    if closed:
        store.close()
    del store
    with DatasetStore.open(folder, "a", **limit) as store:
        if "max_rows" in limit and begun > 300:  # as soon as it is open
            assert numbers_in(store) == range(begun - 300, begun)
        reader = DatasetStore.open(folder)
        first_row = numbers_in(reader)[:1]
        had = reader.snapshot()
        for first in range(begun, begun + 500, 20):
            assert len(store) <= limit.get("max_rows", begun + 500)
            store.extend(rows_of("numbers", first, 20))
            assert numbers_in(store).stop == first + 20
            assert "max_rows" not in limit or len(store) >= min(first + 20, 300 * 3 // 4)
        check_batches(store)
        assert had.rows(range(len(first_row)))["number"] == list(first_row)
    found = numbers_in(DatasetStore.open(folder))
    assert found.stop == begun + 500
    assert len(found) >= (300 * 3 // 4 if "max_rows" in limit else 400)
    if "max_bytes" in limit:
        # Readers may keep others.
        named = json.loads((folder / "manifest.json").read_text())["mouse_store"]["segments"]
        assert sum(nbytes for _, _, nbytes, *_ in named) <= limit["max_bytes"]


def test_a_state_from_before_rows_were_dropped_says_so(tmp_path: Path) -> None:
    with DatasetStore.open(tmp_path / "store", "a", max_rows=200) as store:
        store.extend(rows_of("numbers", 0, 150))
        with PrefetchBatchifier(store, 4, 4) as loader:
            loader.next_batch()
            state = loader.state_dict()
            for first in range(150, 1000, 20):
                store.extend(rows_of("numbers", first, 20))
        with (
            PrefetchBatchifier(store, 4, 4) as loader,
            pytest.raises(StateError, match=r"found a state of other rows.*has dropped its \d+ oldest rows"),
        ):
            loader.load_state_dict(state)


@pytest.mark.parametrize("limit", [{"max_rows": 8}, {"max_bytes": 2_000_000}])
def test_rows_of_datasets_that_are_not_to_stay_are_not_kept_meanwhile(
    limit: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, most = sealing_module.write_segment, []

    def measured(*arguments: Any) -> Any:
        written = write(*arguments)
        most.append(size_of(tmp_path / "store" / "segments"))
        return written

    monkeypatch.setattr(sealing_module, "write_segment", measured)
    rows = {"action": list(range(40)), "reward": [0.0] * 40, "done": [0] * 40, "metadata_text": ["x" * 500_000] * 40}
    with DatasetStore.open(tmp_path / "store", "a", **limit) as store:
        store.from_dataset(pa.table({**rows, "action": [-1] * 40}).slice(0, 2))
        store.from_dataset(pa.table(rows))
        assert max(most) <= 2 * 8 * 500_000
        kept = store[:]
        assert 2 <= len(kept) <= 8
        assert store.written == 42
        assert [row["action"] for row in kept] == list(range(40))[-len(kept) :]
    again = DatasetStore.open(tmp_path / "store")
    assert (again[:], again.written) == (kept, 42)


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.*"):
        with suppress(OSError):  # removed meanwhile
            total += path.stat().st_size
    return total


@pytest.mark.parametrize(("kind", "at_once"), [("text", 1), ("list", 40), ("array", 1)])
def test_bytes_of_large_rows_count(kind: str, at_once: int, tmp_path: Path) -> None:
    values: dict[str, Any] = {"text": "x" * 200_000, "list": [["x" * 100_000] * 2], "array": np.full(25_000, 7)}
    value = values[kind]
    row = {"action": 0, "reward": 0.0, "done": 0, "metadata_value": value}
    most, limit = 0, 800_000
    with DatasetStore.open(tmp_path / "store", "a", max_bytes=limit, sync="none") as store:
        for number in range(40 // at_once):
            rows = [{**row, "action": number * at_once + k} for k in range(at_once)]
            store.append(rows[0]) if at_once == 1 else store.extend(rows)
            most = max(most, size_of(tmp_path))
        assert (store[-1]["action"], list(store[-1]["metadata_value"])) == (39, list(value))
        assert len(store) <= 4
    # While files are sealed their rows lie in two; all rows have ten times as many bytes.
    assert most <= 4 * limit
    store = DatasetStore.open(tmp_path / "store")
    assert 2 <= len(store) <= 4
    assert [found["action"] for found in store[:]] == list(range(40))[-len(store) :]


def test_who_has_rows_keeps_them(tmp_path: Path) -> None:
    """Rows that were never looked at are there when the reader that has a snapshot of them asks."""
    folder = tmp_path / "store"
    with DatasetStore.open(folder, "a", max_rows=80) as writer:
        writer.extend(rows_of("numbers", 0, 80))
    for who in ("reader", "writer"):
        writer = DatasetStore.open(folder, "a", max_rows=80)
        other = DatasetStore.open(folder) if who == "reader" else writer
        had, oldest = other.snapshot(), files(folder)[0]
        first = numbers_in(other).start
        for number in range(first + len(had), first + len(had) + 300, 20):
            writer.extend(rows_of("numbers", number, 20))
            writer.flush()
        assert numbers_in(other).start > first
        assert oldest in files(folder)
        assert had.rows(range(len(had)))["number"] == list(range(first, first + len(had)))
        del had
        # Files are sealed, and dropped, in the background.
        for _ in range(500):
            len(other)
            writer.flush()
            if oldest not in files(folder):
                break
            time.sleep(0.01)
        assert oldest not in files(folder)
        del other
        writer.close()
    assert not leftovers(folder)


@pytest.mark.parametrize("who", ["reader", "writer"])
def test_rows_that_are_dropped_are_there_for_whoever_is_sent_them_later(who: str, tmp_path: Path) -> None:
    """By one that has a snapshot of them from when they were the newest ones."""
    folder = tmp_path / "store"
    with DatasetStore.open(folder, "a", max_rows=80) as writer:
        writer.extend(rows_of("mixed", 0, 10))
        writer.flush()
        had = (DatasetStore.open(folder) if who == "reader" else writer).snapshot()
        for number in range(10, 210, 20):
            writer.extend(rows_of("mixed", number, 20))
            writer.flush()
    assert numbers_in(DatasetStore.open(folder)).start > 10
    assert pickle.loads(pickle.dumps(had)).rows(range(10))["text"] == rows_of("mixed", 0, 10)["text"]
    del had, writer
    with DatasetStore.open(folder, "a"):
        pass
    assert not leftovers(folder)


@pytest.mark.parametrize("sync", ["none", "flush"])
def test_rows_that_are_sent_are_on_the_disk_before_readers_see_them(
    sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store promises that of what readers see."""
    with DatasetStore.open(tmp_path / "store", "a", sync=sync) as writer:
        writer.extend(rows_of("numbers", 0, 10))
        had, seen = writer.snapshot(), []
        monkeypatch.setattr(os, "fdatasync", lambda file: seen.append(len(DatasetStore.open(tmp_path / "store"))))
        sent = pickle.dumps(had)
        assert seen == ([0] if sync == "flush" else [])
        assert len(DatasetStore.open(tmp_path / "store")) == 10
        assert pickle.loads(sent).rows(range(10))["number"] == [*range(10)]


@pytest.mark.parametrize("limit", [{"max_rows": 0}, {"max_rows": 7}, {"max_bytes": 10}, {"max_rows": 2.5}])
def test_a_limit_is_a_number_for_a_writer(limit: dict[str, int], tmp_path: Path) -> None:
    wanted = f"{next(iter(limit))}: expected an integer of at least (8|65536)"
    with pytest.raises(ConfigError, match=wanted):
        DatasetStore.open(tmp_path / "store", "a", **limit)
    with pytest.raises(ConfigError, match="expected mode 'a', found 'r'"):
        DatasetStore.open(tmp_path / "store", max_rows=100)
    assert not (tmp_path / "store").exists()


def small_files(folder: Path, count: int, first: int = 0, rows: int = 10) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mouse_core.store.disk.rows.small_run", lambda *_: range(0))
        for number in range(first, first + count):
            with DatasetStore.open(folder, "a") as store:
                store.extend(rows_of("numbers", rows * number, rows))


def test_beside_a_damaged_file_others_are_put_together(tmp_path: Path) -> None:
    small_files(tmp_path, 4)
    hurt = tmp_path / "segments" / files(tmp_path)[2]
    hurt.write_bytes(hurt.read_bytes()[:-1] + b"?")
    small_files(tmp_path, 14, first=4)
    with DatasetStore.open(tmp_path, "a") as store:
        store.flush()
        store._rows.seal_waiting()
        assert len(files(tmp_path)) <= 3 + 8
    assert hurt.exists()
    with pytest.raises(DataError, match=str(hurt)):
        numbers_in(DatasetStore.open(tmp_path))


def test_what_is_put_together_stays_until_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are dropped after the files were chosen, and before they are opened."""
    small_files(tmp_path, 10, rows=4)
    chosen, read = threading.Event(), threading.Event()
    real: Any = SealedFile.table

    def late(self: SealedFile) -> Any:
        if threading.current_thread().name == "mouse-sealing" and not chosen.is_set():
            chosen.set()
            assert read.wait(20)
            assert self.path.exists()
        return real.fget(self)

    monkeypatch.setattr(SealedFile, "table", property(late))
    with DatasetStore.open(tmp_path, "a", max_rows=400) as store:
        try:
            assert chosen.wait(20)
            store.from_dataset(table_of("numbers", 40, 600))
        finally:
            read.set()
        store._rows._wait_for_sealing()
        assert 300 < len(store) <= 400
        assert numbers_in(store) == range(640 - len(store), 640)
        store.flush()
        assert not store._rows._damaged
    assert not leftovers(tmp_path)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")
def test_a_writer_that_drops_rows_and_a_loader_that_follows_keep_no_more_files(tmp_path: Path) -> None:
    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").count(str(tmp_path))
        return len(os.listdir("/proc/self/fd")), maps, len(list(tmp_path.rglob("*")))

    counts = []
    with DatasetStore.open(tmp_path / "store", "a", max_rows=400) as writer:
        writer.extend(rows_of("numbers", 0, 100))
        writer.flush()
        with PrefetchBatchifier(DatasetStore.open(tmp_path / "store"), 8, 16) as loader:
            for first in range(100, 3600, 100):
                writer.extend(rows_of("numbers", first, 100))
                writer.flush()
                loader.refresh()
                number = loader.next_batch()["obs_continuous"][..., 0]
                assert (np.diff(number, axis=1) == 1).all()
                counts.append(held())
    early, late = np.max(counts[5:20], axis=0), np.max(counts[20:], axis=0)
    assert (late <= early + 6).all(), (early, late)
