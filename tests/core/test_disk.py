"""Stores in folders: what was written is what is read, by whomever, and one process writes."""

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DatasetStore, Field, formats
from mouse_core.errors import ClosedError, ConfigError, DataError, ForkError, SchemaError, StorageError
from mouse_core.files.checksum import json_with_digest
from mouse_core.files.writing import sync_folders
from mouse_core.store.disk import folder as folder_module
from mouse_core.store.disk.checking import check_store, repair
from mouse_core.store.disk.folder import Manifest
from tests.core.disk_cases import rows_of, table_of
from tests.core.killing import in_child

ROOT = Path(__file__).resolve().parents[2]


def rows(count: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """Episodes of 50 rows."""
    draw = np.random.default_rng(seed)
    number = np.arange(count) % 50
    return {
        "observation": draw.normal(size=(count, 4)).astype(np.float32),
        "action": draw.integers(0, 3, count),
        "reward": draw.normal(size=count),
        "done": (number == 49).astype(np.int64),
        "episode_step": number,
        **more,
    }


def failing(error: BaseException) -> Callable[..., None]:
    """A call that always raises an error."""

    def fail(*args: Any) -> None:
        raise error

    return fail


def assert_same(one: DatasetStore, other: DatasetStore) -> None:
    """Rows, fingerprints, batches and shards of both are the same."""
    assert one[:] == other[:]
    assert one.metadata == other.metadata
    assert one.snapshot().fingerprint == other.snapshot().fingerprint
    for options in ({}, {"shard": (1, 2)}, {"sampling": "sequential"}):
        sources = [BatchSource(store, 16, 8, seed=3, **options) for store in (one, other)]
        for number in range(2):
            first, second = (source[number] for source in sources)
            assert first.keys() == second.keys()
            assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_what_was_written_is_what_is_read(folder: Path) -> None:
    memory = DatasetStore()
    with DatasetStore.open(folder, "a") as writer:
        for seed, count in enumerate((700, 1, 2500)):
            for store in (writer, memory):
                store.extend(rows(count, seed))
                store.append({name: values[0] for name, values in rows(1, seed).items()})
            writer.flush()
            assert_same(writer, memory)
            assert_same(DatasetStore.open(folder), memory)
        data = in_memory(rows(900)).to_dataset()
        for store in (writer, memory):
            assert store.from_dataset(data.shuffle(seed=0)).from_dataset(data) is store
            store.extend(rows(10, 1))
        assert_same(writer, memory)
    assert_same(DatasetStore.open(folder), memory)
    assert writer.path == str(folder)
    assert memory.path is None


def test_what_the_rows_say_of_themselves_is_kept(folder: Path) -> None:
    options: dict[str, Any] = {"fields": [Field("extra", "metadata_extra", fill=7)], "max_action_dim": 5}
    with DatasetStore.open(folder, "a", alignment="outgoing", **options) as writer:
        writer.extend(rows(200, metadata_extra=np.arange(200)))
    reader = DatasetStore.open(folder)
    assert reader.alignment == "outgoing"
    assert reader.metadata.max_action_dim == 5
    assert "extra" in reader.snapshot().spec
    with pytest.raises(SchemaError, match="alignment 'arrived', found 'outgoing'"):
        DatasetStore.open(folder, alignment="arrived")


def test_a_folder_has_one_writer(folder: Path) -> None:
    writer = DatasetStore.open(folder, "a")
    with pytest.raises(ConfigError, match=f"only writer of .*, found process {os.getpid()} on"):
        DatasetStore.open(folder, "a")
    writer.close()
    writer.close()
    with pytest.raises(ClosedError, match="found a closed store"):
        writer.append({})
    DatasetStore.open(folder, "a").close()


ANOTHER_PROCESS = """
import sys, numpy as np
from mouse_core import DatasetStore
from mouse_core.errors import ConfigError

taken, kept, sealed = sys.argv[1:]
try:
    DatasetStore.open(taken, "a")
except ConfigError as error:
    print(error)
sys.kept = [DatasetStore.open(kept, "a"), DatasetStore.open(kept)]  # longer than modules have what they are made of
sys.kept[0].append({"observation": [1.0], "action": 0, "reward": 0.0, "done": 0})
store = DatasetStore.open(sealed, "a")
for number in range(45):
    zeros = {name: np.zeros(5000, int) for name in ("action", "reward", "done")}
    store.extend({"observation": np.zeros((5000, 4)), **zeros})
"""


def test_another_process_is_no_writer_and_ends_quietly_whatever_it_left_open(tmp_path: Path) -> None:
    """Writers that nobody closed, also while rows are sealed."""
    folders = [tmp_path / name for name in ("taken", "kept", "sealed")]
    with DatasetStore.open(folders[0], "a"):
        command = [sys.executable, "-c", ANOTHER_PROCESS, *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"found process {os.getpid()} on" in done.stdout
    assert [len(DatasetStore.open(folder, "a")) for folder in folders[1:]] == [1, 45 * 5000]


def test_a_writer_whose_folder_is_gone_says_so_and_leaves_another_its_own(folder: Path) -> None:
    first = DatasetStore.open(folder, "a")
    first.extend(rows(10))
    first.flush()
    moved = folder.rename(folder.with_name("moved"))
    first.extend(rows(5))
    with pytest.raises(StorageError, match="found none at this path"):
        first.flush()
    assert len(DatasetStore.open(moved)) == 15
    moved.rename(folder)
    first.flush()
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match="found none at this path"):
        first.flush()
    with DatasetStore.open(folder, "a") as second:
        second.extend(rows(20, 1))
        second.flush()
        for refused in (first.flush, first.close, first.clear):
            with pytest.raises(StorageError, match="found another folder at this path"):
                refused()
        del first
        second.extend(rows(20, 2))
    memory = DatasetStore()
    memory.extend(rows(20, 1))
    memory.extend(rows(20, 2))
    assert DatasetStore.open(folder)[:] == memory[:]


def test_a_folder_that_is_being_made_has_no_store_yet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens it in between is told to wait, and not that something is lost."""
    write, told = folder_module.write_manifest, []

    def write_later(path: Path, manifest: Manifest) -> None:
        if not told:
            told.append(path)
            with pytest.raises(ConfigError, match="found a folder whose writer has not created the store yet"):
                DatasetStore.open(folder)
        write(path, manifest)

    monkeypatch.setattr(folder_module, "write_manifest", write_later)
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows(10))
    assert told
    assert len(DatasetStore.open(folder)) == 10


def test_a_manifest_that_was_removed_is_written_again(folder: Path) -> None:
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows(10))
        for write in (store.flush, store.flush, store.close):
            (folder / "manifest.json").unlink()
            write()
            assert len(DatasetStore.open(folder)) == 10


def test_too_many_open_files_are_no_damage(folder: Path) -> None:
    resource = pytest.importorskip("resource")
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows(10, metadata_text=["a"] * 10))
        store.flush()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        kept: list[DatasetStore] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 8, hard))
        try:
            with pytest.raises(StorageError, match="Too many open files"):
                kept.extend(DatasetStore.open(folder) for _ in range(40))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(DatasetStore.open(folder)) == 10


def test_files_that_cannot_be_opened_now_are_not_put_aside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows(10))
    with monkeypatch.context() as patched:
        patched.setattr(pa, "memory_map", failing(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        for use in (check_store, repair):
            with pytest.raises(StorageError, match=r"000001\.arrow: cannot be read: Too many open files"):
                use(folder)
    assert not (folder / "damaged").exists()
    assert len(DatasetStore.open(folder)) == 10


def test_a_reader_refuses_to_write(folder: Path) -> None:
    with DatasetStore.open(folder, "a") as writer:
        writer.extend(rows(10))
        reader = DatasetStore.open(folder)
        for refused in (
            lambda: reader.append({"observation": [1.0]}),
            lambda: reader.extend(rows(1)),
            lambda: reader.from_dataset(pa.table({"observation": [[1.0]]})),
            reader.clear,
        ):
            with pytest.raises(ConfigError, match="found a store opened for reading"):
                refused()


def test_a_forked_child_reads_the_rows_of_its_parent_and_refuses_to_write(folder: Path) -> None:
    with DatasetStore.open(folder, "a", sync="append") as writer:
        for number in range(3):
            writer.extend(rows(10))
            len(writer[:number])  # what was looked at before is remembered

            def child(rows_there: int = 10 * (number + 1)) -> None:
                found = writer[:]
                assert len(writer) == len(found) == writer.snapshot().num_rows == rows_there
                assert writer[-1]["episode_step"] == found[-1]["episode_step"] == rows(10)["episode_step"][-1]
                with pytest.raises(ForkError):
                    writer.append({name: values[0] for name, values in rows(1).items()})

            in_child(child)
    assert len(DatasetStore.open(folder)) == 30


def test_what_is_no_store_is_refused(folder: Path, tmp_path: Path) -> None:
    other, empty = tmp_path / "other", tmp_path / "empty"
    for path in (other, empty):
        path.mkdir()
    (other / "notes.txt").write_text("mine")
    makes_one = r"; DatasetStore.open\('.*', 'a'\) makes one"
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (folder, {}, f"expected a folder with a store .*found nothing{makes_one}"),
        (empty, {}, f"found an empty folder{makes_one}"),
        (other, {}, r"no format recognised in a folder of \['notes.txt'\]"),
        (folder, {"final": "drop"}, "expected a file or folder, found none"),
        (folder, {"mode": "a", "final": "drop"}, r"expected options of DatasetStore, found \['final'\]"),
        (other, {"mode": "a"}, r"or an empty folder, found \['notes.txt'\]"),
        (folder, {"mode": "w"}, "open: expected"),
        (folder, {"mode": "a", "sync": "always"}, "open: sync: expected"),
    ]
    for path, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            DatasetStore.open(path, **options)
    assert os.listdir(other) == ["notes.txt"]


def test_readers_and_snapshots_travel_as_paths(folder: Path) -> None:
    with DatasetStore.open(folder, "a") as writer:
        writer.extend(rows(20_000))
        writer.flush()
        reader = DatasetStore.open(folder)
        for whole in (reader, reader.snapshot(), writer, writer.snapshot()):
            sent = pickle.dumps(whole)
            assert len(sent) < 20_000
            received = pickle.loads(sent)
            again = received.snapshot() if isinstance(received, DatasetStore) else received
            assert again.fingerprint == writer.snapshot().fingerprint


def test_forgotten_rows_are_gone(folder: Path) -> None:
    with DatasetStore.open(folder, "a") as writer:
        writer.extend(rows(300))
        writer.flush()
        reader = DatasetStore.open(folder)
        kept = reader.snapshot()
        kept.rows([0])
        writer.clear()
        assert len(reader) == len(writer) == 0
        assert kept.rows([299])["reward"] == [rows(300)["reward"][299]]
        del kept
        writer.flush()
        assert not list((folder / "segments").iterdir())
        writer.extend(rows(200, 1))
    assert_same(DatasetStore.open(folder), in_memory(rows(200, 1)))


def in_memory(columns: dict[str, Any]) -> DatasetStore:
    store = DatasetStore()
    store.extend(columns)
    return store


def test_a_newer_format_is_refused_by_name(folder: Path) -> None:
    DatasetStore.open(folder, "a").close()
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 3'))
    for mode in ("r", "a"):
        with pytest.raises(DataError, match="version 1 at most, found version 3, which a newer mouse-data wrote"):
            DatasetStore.open(folder, mode)


@pytest.mark.parametrize(
    ("text", "found"), [(b"", "an empty file"), (b"\0" * 9, "an empty file"), (b"a", "another text")]
)
def test_a_text_that_is_no_manifest_is_named(text: bytes, found: str) -> None:
    with pytest.raises(DataError, match=f"expected the manifest of a store, found {found}; "):
        folder_module.parse_manifest("manifest.json", text)


@pytest.mark.parametrize("version", [0, -1, True, "1", 1.0, None])
def test_a_version_is_a_positive_integer(folder: Path, version: Any) -> None:
    DatasetStore.open(folder, "a").close()
    (folder / "manifest.json.copy").unlink(missing_ok=True)
    file = folder / "manifest.json"
    content = {name: value for name, value in json.loads(file.read_text()).items() if name != "digest"}
    content["mouse_store"]["format"] = version
    file.write_bytes(json_with_digest(content))
    with pytest.raises(DataError, match=rf"manifest\.json: expected version 1, found {re.escape(repr(version))}"):
        DatasetStore.open(folder)


def test_formats_and_datasets_know_the_folder(folder: Path, tmp_path: Path) -> None:
    memory = in_memory(rows_of("mixed", 0, 300))
    with DatasetStore.open(folder, "a") as writer:
        writer.extend(rows_of("mixed", 0, 150))
        writer.flush()
        opened = formats.open(folder)
        assert (opened.format, opened.rows) == ("store", 150)
        writer.from_dataset(table_of("mixed", 150, 150))
    opened = formats.open(folder)
    assert opened.to_table().to_pylist() == memory[:]
    taken = opened.to_store()
    assert taken.path == str(folder)
    assert taken[:] == memory[:]
    opened.save(tmp_path / "written")
    assert formats.open(tmp_path / "written").digest() == opened.digest()
    DatasetStore.open(folder).save(tmp_path / "saved")
    assert DatasetStore.open(tmp_path / "saved")[:] == memory[:]


def test_a_row_that_the_disk_did_not_confirm_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one error of an append after which the store has the row."""
    with DatasetStore.open(folder, "a", sync="append") as writer:
        writer.extend(rows(10))
        with monkeypatch.context() as broken:
            for name in ("fsync", "fdatasync"):
                broken.setattr(os, name, failing(OSError(errno.EIO, "Input/output error")))
            with pytest.raises(StorageError, match="Input/output"):
                writer.extend(rows(10, 1))
            assert len(writer) == len(writer[:]) == 20
            assert len(DatasetStore.open(folder)) == 10
        writer.extend(rows(10, 2))
        assert len(writer) == len(DatasetStore.open(folder)) == 30


def test_a_full_disk_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetStore.open(folder, "a") as writer:
        writer.extend(rows(100))
        with monkeypatch.context() as full:
            for name in ("posix_fallocate", "fsync", "fdatasync"):
                full.setattr(os, name, failing(OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(StorageError, match="No space left"):
                writer.extend(rows(100_000, 1))
            with pytest.raises(StorageError, match="No space left"):
                writer.flush()
            assert len(writer) == len(writer.snapshot()) == 100
        writer.extend(rows(100_000, 1))
        writer.flush()
        assert len(DatasetStore.open(folder)) == 100_100
    memory = in_memory(rows(100))
    memory.extend(rows(100_000, 1))
    assert DatasetStore.open(folder).snapshot().fingerprint == memory.snapshot().fingerprint


def test_rows_that_wait_for_a_failed_sealing_stay_in_the_manifest_when_rows_are_appended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from_dataset`` seals appended rows first; if this fails, the next row is appended to a new file."""
    expected = in_memory(rows(10))
    expected.extend(rows(3, 1))
    with DatasetStore.open(folder, "a") as writer:
        writer.extend(rows(10))
        with monkeypatch.context() as full:
            full.setattr("mouse_core.store.disk.rows.write_segment", failing(StorageError("No space left")))
            with pytest.raises(StorageError, match="No space left"):
                writer.from_dataset(in_memory(rows(5, 2)).to_dataset())
            writer.extend(rows(3, 1))
            writer.flush()
            assert DatasetStore.open(folder)[:] == writer[:] == expected[:]
            copy = folder.with_name("copy")
            shutil.copytree(folder, copy)  # what a kill would leave
        writer.flush()
        writer._rows.seal_waiting()
        assert DatasetStore.open(folder)[:] == writer[:] == expected[:]
    assert DatasetStore.open(folder)[:] == expected[:]
    with DatasetStore.open(copy, "a") as again:
        assert again[:] == expected[:]


def test_rows_that_were_taken_count_although_old_rows_cannot_be_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would make the caller add the same rows again."""
    real = folder_module.write_manifest

    def only_added(path: Path, manifest: Manifest) -> None:
        if manifest.dropped:
            raise StorageError("No space left")
        real(path, manifest)

    with DatasetStore.open(folder, "a", max_rows=80) as writer:
        writer.from_dataset(in_memory(rows(80)).to_dataset())
        with monkeypatch.context() as full:
            full.setattr(folder_module, "write_manifest", only_added)
            writer.from_dataset(in_memory(rows(10, 1)).to_dataset())
            assert writer[80:] == in_memory(rows(10, 1))[:]
            writer.extend(rows(10, 2))
            assert writer[90:] == in_memory(rows(10, 2))[:]
        writer.extend(rows(40, 3))
        assert len(writer) <= 80
        assert writer.written == 140
        assert writer[-40:] == in_memory(rows(40, 3))[:]


def test_files_that_no_manifest_could_name_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetStore.open(folder, "a") as writer:
        writer.extend(rows(10))
        writer.from_dataset(in_memory(rows(10, 1)).to_dataset())
        before = sorted(folder.rglob("*.arrow"))
        with monkeypatch.context() as full:
            full.setattr(folder_module, "write_manifest", failing(StorageError("No space left")))
            for _ in range(3):
                with pytest.raises(StorageError, match="No space left"):
                    writer.from_dataset(in_memory(rows(10, 2)).to_dataset())
        assert sorted(folder.rglob("*.arrow")) == before
        assert len(writer) == 20


@pytest.mark.parametrize("filled", [0, 3])
def test_rows_whose_texts_find_no_space_are_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, filled: int
) -> None:
    """Texts lie in a file of their own, which is written after the numbers of their rows."""

    def texts(count: int, begin: int = 0) -> dict[str, Any]:
        numbers = np.arange(begin, begin + count)
        return {"action": numbers % 4, "reward": numbers * 0.5, "done": numbers * 0, "task": [f"t{n}" for n in numbers]}

    with DatasetStore.open(folder, "a") as writer:
        writer.extend(texts(filled + 1))
        with monkeypatch.context() as full:
            error = OSError(errno.ENOSPC, "No space left on device")
            full.setattr("mouse_core.store.disk.tail.write_at", failing(error))
            with pytest.raises(StorageError, match="No space left"):
                writer.extend(texts(5, 100))
            assert len(writer) == filled + 1
        writer.flush()
        assert [row["task"] for row in DatasetStore.open(folder)[:]] == texts(filled + 1)["task"]
        writer.extend(texts(4, filled + 1))
        assert [row["task"] for row in writer[:]] == texts(filled + 5)["task"]
    reopened = DatasetStore.open(folder)[:]
    assert [row["task"] for row in reopened] == texts(filled + 5)["task"]
    assert [row["reward"] for row in reopened] == texts(filled + 5)["reward"].tolist()


@pytest.mark.parametrize(("number", "is_error"), [(errno.EIO, True), (errno.EINVAL, False), (errno.ENOTSUP, False)])
def test_a_folder_that_the_disk_does_not_sync_is_an_error_where_folders_can_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_error: bool
) -> None:
    monkeypatch.setattr(os, "fsync", failing(OSError(number, "no")))
    with pytest.raises(OSError, match="no") if is_error else nullcontext():
        sync_folders([tmp_path])


class _Interrupted(BaseException):
    """What an interrupt raises, here."""


@pytest.mark.parametrize("fails", [OSError(errno.EIO, "an error of the disk"), _Interrupted()])
def test_a_manifest_that_failed_on_its_way_to_the_disk_names_no_file_that_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: BaseException
) -> None:
    with DatasetStore.open(folder, "a") as store:
        store.extend(rows(50))
    store = DatasetStore.open(folder, "a")
    replace = os.replace

    def failing(*paths: Any) -> None:
        replace(*paths)
        monkeypatch.setattr(os, "replace", replace)
        raise fails

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises((StorageError, _Interrupted)):
        store.extend(rows(50, seed=1))
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    assert len(DatasetStore.open(copy)) == 50
    assert len(DatasetStore.open(copy, "a")) == 50
    store.extend(rows(50, seed=2))
    store.close()
    assert DatasetStore.open(folder)[50:] == in_memory(rows(50, seed=2))[:]


@pytest.mark.parametrize(
    ("objects", "stride"),
    [(True, 31), *(pytest.param(objects, 1, marks=pytest.mark.long) for objects in (False, True))],
)
def test_an_interrupt_between_any_two_lines_leaves_what_is_counted(folder: Path, objects: bool, stride: int) -> None:
    """Of what writes rows: what the store says that it has is there for whoever opens the folder next."""
    left, after = 0, 0
    writers = ("NumbersExtent.", "ObjectExtent.", "Extent.", "ObjectsFile.", "FiledObjects.", "TailExtent.")

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_qualname.startswith(writers):
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise _Interrupted
        return trace

    notes = {"metadata_note": ["some", "words"]} if objects else {}
    for place in range(1, 10_000, stride):
        store = DatasetStore.open(folder, "a", sync="none")
        before, left = len(store), place
        assert before == after
        columns = {**rows(2, observation=np.arange(before, before + 2)[:, None] * np.ones(2)), **notes}
        try:
            sys.settrace(trace)
            store.extend(columns)
        except _Interrupted:
            pass
        finally:
            sys.settrace(None)
        after = len(store)
        assert after in (before, before + 2)
        del store
        if left > 0:
            break
    assert place > 20
    kept = list(DatasetStore.open(folder, "a")[:])
    assert [row["observation"][1] for row in kept] == list(range(after))
    if objects:
        assert [row["metadata_note"] for row in kept] == [("some", "words")[number % 2] for number in range(after)]


def test_a_store_that_is_let_go_of_can_be_opened_again_at_once(folder: Path) -> None:
    store = DatasetStore.open(folder, "a")
    for number in range(40):
        store.extend(rows(5000, seed=number))
    del store
    assert len(DatasetStore.open(folder, "a")) == 40 * 5000


def _killed_writer(folder: Path, **columns: Any) -> None:
    """Rows that were acknowledged and not flushed, whose writer was killed."""

    def written() -> None:
        store = DatasetStore.open(folder, "a", sync="none")
        for number in range(100):
            store.extend(rows(50, seed=number, **columns))

    in_child(written)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_reader_of_a_folder_that_was_made_anew_is_refused(folder: Path) -> None:
    def made(seed: int) -> DatasetStore:
        with DatasetStore.open(folder, "a") as store:
            store.extend(rows(50, seed=seed))
        store = DatasetStore.open(folder, "a")
        store.extend(rows(50, seed=seed + 1))
        store.flush()
        return store

    store = made(1)
    reader = DatasetStore.open(folder)
    snapshot, sent = reader.snapshot(), pickle.dumps(reader.snapshot())
    before = reader[:]
    del store
    shutil.rmtree(folder)
    later = made(11)
    for _ in range(2):
        with pytest.raises(DataError, match="created again or repaired; open it again"):
            reader.snapshot()
    assert snapshot.rows(range(100))["reward"] == [row["reward"] for row in before]
    with pytest.raises(DataError):
        pickle.loads(sent).rows(range(100))
    assert len(DatasetStore.open(folder)) == len(later) == 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("more", [{}, {"weight": np.ones(50)}])
def test_a_file_of_rows_of_another_store_is_refused(folder: Path, more: dict[str, Any]) -> None:
    other = folder.with_name("other")
    _killed_writer(folder)
    _killed_writer(other, **more)
    shutil.copy(other / "tail-000000.rows", folder / "tail-000000.rows")
    for mode in "ra":
        with pytest.raises(DataError, match="expected the file with the identity"):
            DatasetStore.open(folder, mode)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files there")
@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.filterwarnings("ignore:.*rows that were not sealed")
def test_files_of_a_store_lie_in_its_folder(by_address: bool, tmp_path: Path) -> None:
    """A folder that somebody else made may have links to anything, and pipes."""
    with DatasetStore.open(tmp_path / "store", "a") as first:
        first.extend(rows(50))
    writer = DatasetStore.open(tmp_path / "store", "a")
    writer.extend(rows(50))
    writer.flush()

    def read() -> Any:
        path = (tmp_path / "store").as_uri() if by_address else tmp_path / "store"
        options = {"cache": tmp_path / "cache", "cache_bytes": 4 << 20} if by_address else {}
        return DatasetStore.open(path, **options).snapshot().rows([0, 49] if by_address else [0, 99])

    assert read()["episode_step"] == [0, 49]
    outside = tmp_path / "outside"
    kinds = (".json", ".arrow") if by_address else (".json", ".arrow", ".rows")
    files = [file for file in (tmp_path / "store").rglob("*") if file.suffix in kinds]
    assert {file.suffix for file in files} == {*kinds}
    for file in files:
        file.rename(outside)
        file.symlink_to(outside)
        with pytest.raises(DataError, match=r"expected a file inside of .*, found a link to"):
            read()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(DataError, match="expected a regular file"):
            read()
        file.unlink()
        outside.rename(file)
    writer.close()
