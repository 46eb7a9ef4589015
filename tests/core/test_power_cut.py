"""What was promised is there after a power cut at any moment, and nothing that is there is torn.

``tests.simulate`` cuts the power of stores and mapped rows.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import ConfigError, DatasetStore, StorageError, formats
from mouse_core.files import writing
from mouse_core.files.log import Log, follow_log, read_log
from mouse_core.formats import RowStream
from mouse_core.formats.converting import convert
from mouse_core.formats.ted import write_ted
from mouse_core.replay import ArrayStorage, MemmapStorage, ReplayBuffer
from tests.core import golden, groups_crash
from tests.core.power_cut import Disk

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="files are told by their descriptors")


def test_the_disk_forgets_what_was_not_synced(disk: Disk) -> None:
    """The other tests can fail: a file that is not synced is torn, a name that is not synced is not there."""
    root = disk.root
    with disk.watched():
        (root / "beside").write_bytes(b"12345678")
        os.replace(root / "beside", root / "torn")
        (root / "lost").write_bytes(b"1234")
        for path in (root / "lost", root):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)
    after_replace, after_file, after_folder = (moment.found for moment in disk.moments)
    assert after_replace == ({}, {"torn": b"1234"})
    assert after_file == ({}, {"torn": b"1234", "lost": b"1234"})
    assert after_folder == ({"torn": b"", "lost": b"1234"}, {"torn": b"1234", "lost": b"1234"})


def test_files_are_removed_when_no_manifest_on_the_disk_names_them(tmp_path: Path) -> None:
    """A writer that died had another manifest in place, whose name was not on the disk yet."""
    folder = tmp_path / "disk" / "store"
    with DatasetStore.open(folder, "a") as store:
        store.extend({"action": [1, 2, 3], "reward": [0.0] * 3, "done": [0] * 3})
        wanted = store[:]
    shutil.copytree(folder, tmp_path / "copy")
    with DatasetStore.open(tmp_path / "copy", "a") as store:
        store.clear()
    disk = Disk(folder.parent)
    with disk.watched():
        with (folder / ".manifest.json.partial").open("wb") as file:
            file.write((tmp_path / "copy" / "manifest.json").read_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / ".manifest.json.partial", folder / "manifest.json")
        with DatasetStore.open(folder, "a") as store:
            assert not list((folder / "segments").iterdir())
            # The first folder that is synced from here on is the one that they are removed from.
            store.from_dataset(pa.table({"action": [4], "reward": [0.0], "done": [0]}))
            last = store[:]
    found = [DatasetStore.open(path / "store")[:] for _, path in disk.machines(tmp_path / "machines")]
    assert all(rows in ([], wanted, last) for rows in found)
    assert wanted in found
    assert last in found


@pytest.mark.parametrize("lost", ["cut", "zeros", "other"])
def test_the_last_record_of_a_log_may_be_torn(lost: str, tmp_path: Path) -> None:
    path, records = tmp_path / "log", [b"first", b"second record", b"the third of them" * 3]
    log = Log(path)
    for record in records:
        log.append(record, sync=False)
    log.close()
    whole = path.read_bytes()
    begin = len(whole) - len(records[-1]) - 24
    for end in range(begin, len(whole)):
        rest = len(whole) - end
        (tmp_path / "log.size").unlink(missing_ok=True)  # nobody was told of the record
        path.write_bytes(whole[:end] + {"cut": b"", "zeros": bytes(rest), "other": b"\xa5" * rest}[lost])
        assert read_log(path) == follow_log(path)[0] == records[:-1]
        log = Log(path)
        assert log.records == records[:-1]
        log.append(b"new", sync=True)
        log.close()
        assert read_log(path) == [*records[:-1], b"new"]


@pytest.mark.parametrize("answer", [OSError(errno.ENOLCK, "no locks"), False])
def test_without_locks_nobody_knows_what_is_left_over(
    answer: bool | OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(file: int, *, wait: bool) -> bool:
        if isinstance(answer, OSError):
            raise answer
        return answer

    left = tmp_path / ".saved.4711-a3f09c.partial"
    left.write_bytes(b"half of it")
    monkeypatch.setattr(writing, "lock", locked)
    assert writing.remove_leftovers(tmp_path, ["saved"]) == (4711 if answer is False else None)
    assert left.read_bytes() == b"half of it"
    monkeypatch.undo()
    assert writing.remove_leftovers(tmp_path, ["saved"]) is None
    assert not left.exists()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk")


def full(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def buffer_of(rows: int) -> ReplayBuffer:
    buffer = ReplayBuffer(ArrayStorage(50))
    if rows:
        buffer.extend({"a": np.arange(rows)})
    return buffer


def test_checkpoints(disk: Disk, tmp_path: Path) -> None:
    with disk.watched():
        for rows in (5, 20, 3):
            buffer_of(rows).dumps(disk.root / "saved")
            disk.promise(rows)
    for moment, machine in disk.machines(tmp_path / "machines"):
        order = [0, 5, 20, 3]
        at_least = order.index(moment.promised[-1]) if moment.promised else 0
        buffer = buffer_of(0)
        if at_least or (machine / "saved").exists():
            buffer.loads(machine / "saved")
        assert order.index(len(buffer)) in (at_least, at_least + 1), moment.change
        buffer.dumps(machine / "saved")
        assert os.listdir(machine) == ["saved"], f"{moment.change}: what was left over is removed"


def test_rollouts(disk: Disk, tmp_path: Path) -> None:
    with disk.watched(), groups_crash.opened(disk.root / "runs", sync=True) as buffer:
        for what, given in islice(groups_crash.script(), 5):
            disk.promise((what, groups_crash.act(buffer, what, given)))
    assert {what for what, _ in disk.moments[-1].promised} == {"add", "batch", "flush"}
    for moment, machine in disk.machines(tmp_path / "machines"):
        groups_crash.check(machine / "runs", moment.promised)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> RowStream:
    store = DatasetStore()
    columns = golden.columns(39)
    store.extend({name: columns[name] for name in ("observation", "action", "reward", "done", "episode_step")})
    folder = tmp_path_factory.mktemp("rows") / "saved"
    store.to_dataset().save_to_disk(str(folder))
    return formats.open(folder)


WRITERS: dict[str, Callable[[RowStream, Path], Any]] = {
    "saved": lambda rows, path: rows.save(path),
    "converted": lambda rows, path: convert(rows, path, shard_bytes=2000),
    "parts": lambda rows, path: convert(rows, path, to="parquet", shard_bytes=2000),
    "one.parquet": convert,
    "ted": write_ted,
}


EACH = ["saved", "converted", pytest.param("parts", marks=pytest.mark.slow), "one.parquet", "ted"]


@pytest.mark.parametrize("name", EACH)
def test_datasets_are_whole_or_not_there(name: str, rows: RowStream, disk: Disk, tmp_path: Path) -> None:
    write = WRITERS[name]
    with disk.watched():
        write(rows, disk.root / "deep" / name)
        disk.promise("written")
    whole = formats.open(disk.root / "deep" / name).digest()
    begun = 0
    for moment, machine in disk.machines(tmp_path / "machines"):
        path = machine / "deep" / name
        assert path.exists() or not moment.promised, moment.change
        if not path.exists():
            begun += 1
            write(rows, path)
            assert os.listdir(machine / "deep") == [name], f"{moment.change}: what was left over is removed"
        assert formats.open(path).digest() == whole, moment.change
    assert begun


@pytest.mark.parametrize("name", EACH)
def test_a_full_disk_leaves_no_part_of_a_dataset(
    name: str, rows: RowStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fails_at in ("fsync", "replace", "mkdir"):
        with monkeypatch.context() as patch:
            patch.setattr(os, fails_at, full)
            with pytest.raises(StorageError, match=f"{tmp_path / name}.*No space left on device"):
                WRITERS[name](rows, tmp_path / name)
        # A conversion goes on where it was.
        assert [found for found in os.listdir(tmp_path) if not found.endswith(".converting")] == []
    WRITERS[name](rows, tmp_path / name)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["saved", "converted"])
def test_of_two_writers_one_is_refused(name: str, rows: RowStream, tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from rows
        with pytest.raises(ConfigError, match=f"expected to be the only writer of .*, found process {os.getpid()}"):
            WRITERS[name](rows, tmp_path / name)

    WRITERS[name](rows.replace(batches=batches), tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_leftovers_of_writers_that_died_are_removed(rows: RowStream, tmp_path: Path) -> None:
    for left in (".saved.4711-a3f0.partial", ".saved.5-0af.partial"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "data").write_bytes(b"x")
    for mine in (".saved.partial.txt", ".saved2.4711-1.partial", "saved.partial"):
        (tmp_path / mine).write_bytes(b"x")
    rows.save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == [".saved.partial.txt", ".saved2.4711-1.partial", "saved", "saved.partial"]


@pytest.mark.parametrize("fails_at", ["open", "write", "fsync", "replace"])
def test_a_full_disk_names_the_path_and_loses_nothing(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = MemmapStorage(30, tmp_path / "rows")
    with monkeypatch.context() as patch:
        patch.setattr(os, fails_at, full)
        with pytest.raises(StorageError, match=f"{tmp_path}.*No space left on device"):
            storage.append({"a": np.arange(3)})
    assert len(storage) == 0
    assert not list((tmp_path / "rows").glob(".*"))
    storage.append({"a": np.arange(3)})
    assert MemmapStorage(30, tmp_path / "rows").get(np.arange(3))["a"].tolist() == [0, 1, 2]
