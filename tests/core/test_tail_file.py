"""The file that appended rows lie in: whole after a kill, after a power cut as far as it was synced, never wrong."""

import errno
import mmap
import os
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core.columns.appended import Extent, checked_rows, tail_column
from mouse_core.errors import ConfigError, DataError, StorageError, StoreWarning
from mouse_core.files import locking
from mouse_core.store.disk import tail as tails
from mouse_core.store.disk.tail import TailFile, TailReader
from tests.core.killing import forked

Row = dict[str, Any]


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def row(number: int) -> Row:
    """A row of which every value says which it is."""
    return {
        "observation": np.arange(4, dtype=np.float32) + number,
        "action": number % 5,
        "reward": number / 2,
        "done": number % 100 == 99,
        "episode_step": None if number % 7 == 3 else number % 100,
        "half": np.float16(number % 512),
        "history": np.arange(number % 4, dtype=np.int16) + number % 1000,
        "text": None if number % 11 == 5 else "é" * (number % 6) + str(number),
        "seen": b"" if number % 13 == 6 else bytes([number % 256]) * (number % 9),
        "info": {"lives": number % 3, "names": [str(number)] * (number % 3)},
        "frame": {
            "bytes": None if number % 5 else bytes([number % 256]),
            "path": None if number % 3 else f"{number}.png",
        },
        "unknown": None,
        "pixels": np.full((2, 3), number % 256, np.uint8),
    }


BINARY = {"seen": pa.binary(), "frame": IMAGE}
COLUMNS = {
    name: tail_column(value, None, known=None, shape=None) for name, value in row(107).items() if name not in BINARY
}
# Bytes that nobody takes for images.
COLUMNS |= {name: replace(COLUMNS["text"], arrow_type=arrow_type) for name, arrow_type in BINARY.items()}
COLUMNS["history"] = replace(COLUMNS["history"], widths=(0, 3))  # as a field says that fills up what is shorter


def made(path: Path, rows: int = 1000, *, waits: bool = True, often: bool = False) -> TailFile:
    return TailFile.create(path, COLUMNS, rows, waits=waits, often=often)


def left(path: Path) -> Extent:
    """The rows that the next writer keeps."""
    reader = TailReader(path)
    return reader.extent(reader.left())


def put(tail: TailFile, begin: int, end: int) -> None:
    for number in range(begin, end):
        if not tail.extent.append(row(number)):
            tail.extent.put(row(number))


def rows_of(extent: Extent) -> list[Row]:
    listed: list[Row] = extent.to_table(extent.count).to_pylist()
    return listed


def expected(count: int) -> list[Row]:
    listed = [
        {name: getattr(value, "tolist", lambda v=value: v)() for name, value in row(i).items()} for i in range(count)
    ]
    return listed


def test_rows_are_those_of_an_extent_in_memory(tmp_path: Path) -> None:
    memory, tail = Extent.allocate(COLUMNS), made(tmp_path / "tail")
    for number in range(300):
        for extent in (memory, tail.extent):
            if not extent.append(row(number)):
                extent.put(row(number))
    assert tail.extent.to_table(300).equals(memory.to_table(300))
    assert rows_of(tail.extent) == expected(300)


@pytest.mark.parametrize("waits", [True, False])
def test_readers_see_what_was_committed(tmp_path: Path, waits: bool) -> None:
    tail = made(tmp_path / "tail", waits=waits)
    reader = TailReader(tmp_path / "tail")
    assert reader.committed() == 0
    for end in (1, 2, 50, 400, 401, 1000):
        put(tail, tail.extent.count, end)
        before = reader.committed()
        tail.commit()
        assert before < reader.committed() == end
        assert rows_of(reader.extent(end)) == expected(end)
        assert rows_of(reader.extent(before)) == expected(before)
    assert rows_of(TailReader(tmp_path / "tail").extent(0)) == []


def test_a_reader_shares_memory_between_what_it_saw_and_sees(tmp_path: Path) -> None:
    tail = made(tmp_path / "tail")
    reader = TailReader(tmp_path / "tail")
    put(tail, 0, 10)
    tail.commit()
    early = reader.extent(reader.committed())
    put(tail, 10, 20)
    tail.commit()
    later = reader.extent(reader.committed())
    assert later.token is early.token
    assert later.dense()["reward"].address == early.dense()["reward"].address
    assert TailReader(tmp_path / "tail").extent(0).token is not early.token


def killed(path: Path, work: Callable[[], None]) -> None:
    """Do some work in a process that ends without any of Python's leave-taking."""
    assert os.waitpid(forked(work), 0)[1] == 0


@pytest.mark.parametrize("committed", [0, 300, 500])
def test_all_rows_that_count_survive_the_process(tmp_path: Path, committed: int) -> None:
    path = tmp_path / "tail"

    def work() -> None:
        tail = made(path, waits=False)
        put(tail, 0, committed)
        tail.commit()
        put(tail, committed, 500)

    killed(path, work)
    assert rows_of(read_all(path)) == expected(committed)
    assert rows_of(left(path)) == expected(500)


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_has_what_was_committed(tmp_path: Path, waits: bool) -> None:
    """Whoever copied it may have met the writer at work."""
    tail = made(tmp_path / "tail", waits=waits)
    put(tail, 0, 300)
    tail.commit()
    put(tail, 300, 500)
    shutil.copy(tmp_path / "tail", tmp_path / "copy")
    shutil.copy(tmp_path / "tail.objects", tmp_path / "copy.objects")
    with pytest.warns(StoreWarning, match="its last 200 rows of 500 are dropped: the file was copied"):
        assert rows_of(left(tmp_path / "copy")) == expected(300)


def test_a_commit_stays_until_the_next_one_is_whole(tmp_path: Path) -> None:
    """Whichever page is torn as a commit is written, the other one has the commit before."""
    path = tmp_path / "tail"
    tail = made(path)
    for end in (100, 200, 300):
        put(tail, end - 100, end)
        tail.commit()
        before = path.read_bytes()
    put(tail, 300, 400)
    tail.commit()
    after, at = path.read_bytes(), tail.layout.begins
    torn = [slice(at[name], at[name] + tails.PAGE) for name in ("place", "other place")]
    written = [page for page in torn if before[page] != after[page]]
    assert len(written) == 1
    mixed = bytearray(after)
    mixed[written[0]] = bytes(tails.PAGE)
    mixed[at["live"] : at["live"] + tails.PAGE] = before[at["live"] : at["live"] + tails.PAGE]
    (tmp_path / "copy").write_bytes(mixed)
    shutil.copy(tmp_path / "tail.objects", tmp_path / "copy.objects")
    assert rows_of(left(tmp_path / "copy")) == expected(300)


def test_many_rows_at_once(tmp_path: Path) -> None:
    tail = made(tmp_path / "tail")
    columns = {name: [row(number)[name] for number in range(600)] for name in COLUMNS}
    prepared = {name: checked_rows(columns[name], column) for name, column in COLUMNS.items()}
    tail.extent.put_many(prepared, 0, 600)
    tail.commit()
    assert rows_of(tail.extent) == expected(600)
    assert rows_of(left(tmp_path / "tail")) == expected(600)


def test_a_row_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    tail = made(tmp_path / "tail")
    put(tail, 0, 10)
    assert not tail.extent.append(row(10) | {"pixels": "none"})
    with pytest.raises(Exception, match="pixels"):
        tail.extent.put(row(10) | {"history": None, "pixels": "none"})
    tail.close()
    assert rows_of(left(tmp_path / "tail")) == expected(10)


def test_damage_is_an_error_that_names_file_rows_and_column(tmp_path: Path) -> None:
    path = tmp_path / "tail"
    tail = made(path)
    put(tail, 0, 800)
    tail.commit()
    content = bytearray(path.read_bytes())
    at = content.index(np.arange(4, dtype=np.float32).tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tail, rows 0\.\.348, column 'observation': .*damage"):
        TailReader(path).committed()
    with pytest.raises(DataError, match=r"tail, rows 0\.\.348, column 'observation': .*damage"):
        left(path)


def test_a_damaged_size_of_an_object_is_damage(tmp_path: Path) -> None:
    tail = made(tmp_path / "tail")
    put(tail, 0, 300)
    tail.commit()
    tail.close()
    layout = tail.layout
    content = bytearray((tmp_path / "tail").read_bytes())
    sizes = next(name for name in layout.arrays(content) if name.endswith(".sizes"))
    layout.arrays(content)[sizes][7] |= 1 << 62
    (tmp_path / "tail").write_bytes(content)
    for opened in (read_all, left):
        with pytest.raises(DataError, match="objects: expected"):
            opened(tmp_path / "tail")


def test_what_is_no_tail(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        TailReader(tmp_path / "tail")
    made(tmp_path / "tail").close()
    with pytest.raises(StorageError, match="exists"):
        made(tmp_path / "tail")
    content = (tmp_path / "tail").read_bytes()
    for damaged in (b"", content[:3], content[:200], content[:-1], content + b"x", b"x" + content[1:]):
        (tmp_path / "tail").write_bytes(damaged)
        with pytest.raises(DataError, match="tail"):
            TailReader(tmp_path / "tail")
    newer = bytearray(content)
    newer[8] = 9
    (tmp_path / "tail").write_bytes(newer)
    with pytest.raises(DataError, match="found 9: a newer release wrote it"):
        TailReader(tmp_path / "tail")


Files = dict[str, bytes]
SECTOR = 512


class Machine:
    """What a disk may hold of a tail file at any moment, of which memory is written back whenever the system likes.

    Of each sector it has what was synced last, or what was there at any moment since.

    Args:
        path: The file.
        random: Draws which.
    """

    def __init__(self, path: Path, random: np.random.Generator) -> None:
        self._path, self._random = path, random
        self.since: list[Files] = [self.now()]

    def now(self) -> Files:
        """What the system has of the files."""
        names = (self._path, self._path.with_suffix(".objects"))
        return {name.name: name.read_bytes() for name in names if name.exists()}

    def passes(self) -> None:
        """A moment at which the system may have written back anything."""
        self.since.append(self.now())

    def synced(self) -> None:
        """A moment at which all is on the disk."""
        self.since = [self.now()]

    def left(self, folder: Path) -> Path:
        """What a power cut leaves, in a new folder."""
        folder.mkdir()
        for name in self.since[-1]:
            versions = [files.get(name, b"") for files in self.since]
            size = len(versions[int(self._random.integers(len(versions)))])
            cut = [version.ljust(size, b"\0")[:size] for version in versions]
            # Most often the newest or the oldest, so that whole commits go missing as well.
            mixed, bias = bytearray(size), self._random.random()
            for at in range(0, size, SECTOR):
                which = -int(self._random.random() < bias)
                if self._random.random() < 0.2:
                    which = int(self._random.integers(len(versions)))
                mixed[at : at + SECTOR] = cut[which][at : at + SECTOR]
            (folder / name).write_bytes(mixed)
        return folder / self._path.name


def cuts(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the power so many times, and see what is there."""
    random = np.random.default_rng(count)
    for number in range(count):
        promised, machine = life(folder / f"tail-{number}", random, monkeypatch)
        reader = TailReader(machine.left(folder / str(number)))
        shown = reader.committed()
        assert shown >= promised
        assert rows_of(reader.extent(shown)) == expected(shown)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            assert reader.left() == shown


def life(path: Path, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Machine]:
    """Append and commit some rows; how many had reached the disk, and what it has."""
    waits, promised, real = bool(random.random() < 0.7), 0, tails.sync_mapped
    tail = made(path, 300, waits=waits)
    machine = Machine(path, random)

    def syncing(number: int, memory: mmap.mmap) -> None:
        machine.passes()  # which a cut in the middle of it may leave, too
        real(number, memory)
        machine.synced()

    with monkeypatch.context() as patch:
        patch.setattr(tails, "sync_mapped", syncing)
        for _ in range(int(random.integers(1, 12))):
            put(tail, tail.extent.count, min(tail.extent.rows, tail.extent.count + int(random.integers(1, 40))))
            machine.passes()
            tail.commit()
            promised = tail.extent.count if waits else 0
            machine.passes()
        if waits and random.random() < 0.3:  # in the middle of a commit that waits for the disk
            patch.setattr(tails, "sync_mapped", failing)
            put(tail, tail.extent.count, min(tail.extent.rows, tail.extent.count + 10))
            with suppress(StorageError):
                tail.commit()
            machine.passes()
    tail.close()
    return promised, machine


def failing(*_: Any) -> None:
    raise OSError(errno.EIO, "no such luck")


@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_power_cuts(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts(tmp_path, count, monkeypatch)


def damaged_copies(path: Path, folder: Path, random: np.random.Generator, count: int) -> Iterator[tuple[str, Path]]:
    """Copies of a file, and of its objects, each of which something is wrong with; and what."""
    folder.mkdir()
    names = (path.name, f"{path.stem}.objects")
    for number in range(count):
        copy = folder / str(number)
        copy.mkdir()
        contents = {name: bytearray((path.parent / name).read_bytes()) for name in names}
        name = names[int(random.random() < 0.2)]
        content = contents[name]
        # As often where the head and the commits are, which is little of it, as anywhere.
        at = int(random.integers(len(content) if random.random() < 0.5 else min(len(content), 9 * 4096)))
        what = ("bit", "bits", "page", "cut", "longer", "swapped")[
            int(random.choice(6, p=[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]))
        ]
        if what == "bit":
            content[at] ^= 1 << int(random.integers(8))
        elif what == "bits":
            content[at : at + 16] = random.bytes(len(content[at : at + 16]))
        elif what == "page":
            begin = at // 4096 * 4096
            content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))
        elif what == "cut":
            del content[at:]
        elif what == "longer":
            content += random.bytes(100)
        else:
            begin = at // 4096 * 4096
            content[begin : begin + 4096] = content[4096 : 4096 + len(content[begin : begin + 4096])]
        for name_, bytes_ in contents.items():
            (copy / name_).write_bytes(bytes_)
        yield f"{what} of {name} at {at}", copy / path.name


def found(path: Path, opened: Callable[[Path], Extent]) -> list[Row] | None:
    """The rows of a file; None where it is refused."""
    try:
        return rows_of(opened(path))
    except (DataError, ConfigError) as error:
        said = str(error)
    assert path.stem in said
    return None


def read_all(path: Path) -> Extent:
    reader = TailReader(path)
    return reader.extent(reader.committed())


def damages(folder: Path, count: int) -> None:
    random, path = np.random.default_rng(count), folder / "tail"
    tail = made(path, 1500)
    for end in (300, 700, 1000):
        put(tail, tail.extent.count, end)
        tail.commit()
    refused = 0

    def look() -> None:
        nonlocal refused
        for what, copy in damaged_copies(path, folder / "copies", random, count):
            for opened in (read_all, left):
                rows = found(copy, opened)
                refused += rows is None
                assert rows is None or rows == whole, what
        assert refused > count // 2

    whole = expected(1000)
    killed(path, look)  # in a process of its own, where a signal would be seen


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_damage_is_refused_or_has_not_met_a_row(count: int, tmp_path: Path) -> None:
    damages(tmp_path, count)


@contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """No file may become longer, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("often", [False, True])
def test_rows_that_are_flushed_often(tmp_path: Path, often: bool) -> None:
    tail = made(tmp_path / "tail", often=often)
    for end in range(10, 300, 10):
        put(tail, end - 10, end)
        tail.commit()
    assert rows_of(read_all(tmp_path / "tail")) == expected(290)


@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk_is_met_where_a_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserves: bool
) -> None:
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate")
    with full_beyond(50_000), pytest.raises(StorageError, match="tail"):
        made(tmp_path / "tail", 1000)
    assert not list(tmp_path.iterdir())
    made(tmp_path / "tail", 1000).close()


def test_a_full_disk_takes_no_row_whose_objects_do_not_fit(tmp_path: Path) -> None:
    tail = made(tmp_path / "tail")
    put(tail, 0, 100)
    size = (tmp_path / "tail.objects").stat().st_size
    with full_beyond(size + 3):
        with pytest.raises(StorageError, match="objects"):
            put(tail, 100, 110)
        assert tail.extent.count < 110
        many = {name: checked_rows([row(i)[name] for i in range(100, 120)], kept) for name, kept in COLUMNS.items()}
        begin = tail.extent.count
        with pytest.raises(StorageError, match="objects"):
            tail.extent.put_many(many, begin - 100, 20 - (begin - 100))
        assert rows_of(tail.extent) == expected(begin)
    put(tail, begin, 300)
    tail.commit()
    assert rows_of(read_all(tmp_path / "tail")) == expected(300)
    tail.close()
    assert rows_of(left(tmp_path / "tail")) == expected(300)


def test_what_could_not_be_synced_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = made(tmp_path / "tail")
    put(tail, 0, 100)
    tail.commit()
    put(tail, 100, 200)
    with monkeypatch.context() as patch:
        patch.setattr(tails, "sync_mapped", failing)
        for _ in range(2):
            with pytest.raises(StorageError, match="no such luck"):
                tail.commit()
    assert (tail.committed, rows_of(read_all(tmp_path / "tail"))) == (100, expected(100))
    tail.commit()
    assert (tail.committed, rows_of(read_all(tmp_path / "tail"))) == (200, expected(200))


def test_systems_that_lack_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("posix_fallocate", "fdatasync"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(locking, "_BOOT", tmp_path / "none")
    path = tmp_path / "tail"
    tail = made(path)
    put(tail, 0, 300)
    tail.commit()
    put(tail, 300, 400)
    tail.commit()
    put(tail, 400, 500)
    tail.close()
    assert rows_of(read_all(path)) == expected(400)
    # Nothing says that the machine was not restarted.
    with pytest.warns(StoreWarning, match="its last 100 rows of 500 are dropped"):
        assert rows_of(left(path)) == expected(400)
