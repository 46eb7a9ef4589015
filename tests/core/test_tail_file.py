"""The file that appended rows lie in: whole after a kill, of every kind of value, and never wrong.

Stores are held to the same in ``test_store_crash`` and ``tests.simulate``, where the power fails, too.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core.columns.appended import Extent, tail_column
from mouse_core.errors import ConfigError, DataError, StorageError, StoreWarning
from mouse_core.files import locking
from mouse_core.store.disk import tail as tails
from mouse_core.store.disk.tail import TailFile, TailReader
from tests.core.damaged_files import damaged_copies
from tests.core.killing import in_child

Row = dict[str, Any]


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def row(number: int) -> Row:
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


def made(path: Path, rows: int = 1000, *, waits: bool = True) -> TailFile:
    return TailFile.create(path, COLUMNS, rows, waits=waits)


def read_all(path: Path) -> Extent:
    reader = TailReader(path)
    return reader.extent(reader.committed())


def left(path: Path) -> Extent:
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
    return [
        {name: getattr(value, "tolist", lambda v=value: v)() for name, value in row(i).items()} for i in range(count)
    ]


def test_all_rows_that_count_survive_the_process_and_a_copy_has_what_was_committed(tmp_path: Path) -> None:
    """Whoever copied it may have met the writer at work."""
    path = tmp_path / "tail"

    def work() -> None:
        tail = made(path, waits=False)
        put(tail, 0, 300)
        tail.commit()
        put(tail, 300, 500)

    in_child(work)
    assert rows_of(read_all(path)) == expected(300)
    assert rows_of(left(path)) == expected(500)
    shutil.copy(path, tmp_path / "copy")
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


def test_damage_is_an_error_that_names_file_rows_and_column(tmp_path: Path) -> None:
    path = tmp_path / "tail"
    tail = made(path)
    put(tail, 0, 800)
    tail.commit()
    whole = path.read_bytes()
    content = bytearray(whole)
    content[content.index(np.arange(4, dtype=np.float32).tobytes())] ^= 1
    path.write_bytes(content)
    for opened in (read_all, left):
        with pytest.raises(DataError, match=r"tail, rows 0\.\.348, column 'observation': .*damage"):
            opened(path)
    content = bytearray(whole)
    sizes = next(name for name in tail.layout.arrays(content) if name.endswith(".sizes"))
    tail.layout.arrays(content)[sizes][7] |= 1 << 62
    path.write_bytes(content)
    for opened in (read_all, left):
        with pytest.raises(DataError, match="objects: expected"):
            opened(path)
    content = bytearray(whole)
    for place in tail.layout.places(content):
        place[:] = 0
    path.write_bytes(content)
    for opened in (read_all, left):
        with pytest.raises(DataError, match="expected a commit of 800 rows, found a commit of 0 rows"):
            opened(path)
    content = bytearray(whole)
    tail.layout.live(content)[-len(COLUMNS) + list(COLUMNS).index("history")] = 700
    path.write_bytes(content)
    with pytest.raises(DataError, match="lengths that differ from row 1 on, found such lengths from row 700 on"):
        left(path)


def test_damage_is_refused_or_has_not_met_a_row(tmp_path: Path) -> None:
    folder, whole = tmp_path / "whole", expected(1000)
    folder.mkdir()
    tail = made(folder / "tail", 1500)
    for end in (300, 700, 1000):
        put(tail, tail.extent.count, end)
        tail.commit()
    tail.close()
    named = list[bool]()

    def look() -> None:
        (tmp_path / "copies").mkdir()
        for copy in damaged_copies(folder, tmp_path / "copies", count=12):
            for opened in (read_all, left):
                try:
                    assert rows_of(opened(copy / "tail")) == whole, copy
                except (DataError, ConfigError) as error:
                    named.append(str(copy) in str(error))
        assert all(named)
        assert len(named) > 8  # other copies were damaged where no committed row lies

    in_child(look)  # in a process of its own, where a signal would be seen


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


@contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """No file may become longer, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def test_what_could_not_be_synced_is_written_and_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail, objects, synced = made(tmp_path / "tail"), tmp_path / "tail.objects", list[Path]()
    put(tail, 0, 100)
    with monkeypatch.context() as patch:
        patch.setattr(tails, "sync_mapped", lambda *_: (_ for _ in ()).throw(OSError("no such luck")))
        with pytest.raises(StorageError, match="no such luck"):
            tail.commit()
    assert (tail.committed, rows_of(read_all(tmp_path / "tail"))) == (0, [])
    content = objects.read_bytes()
    objects.write_bytes(bytes(len(content)))  # the system dropped the pages from memory
    with pytest.raises(DataError, match="damaged rows"):
        tail.commit()
    objects.write_bytes(content)
    monkeypatch.setattr(tails.ObjectsFile, "sync", lambda file: synced.append(file.path))
    tail.commit()
    assert synced == [objects]
    assert (tail.committed, rows_of(read_all(tmp_path / "tail"))) == (100, expected(100))


def test_systems_that_lack_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("posix_fallocate", "fdatasync"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(locking, "_BOOT", tmp_path / "none")
    path = tmp_path / "tail"
    tail = made(path)
    for end in (300, 400):
        put(tail, tail.extent.count, end)
        tail.commit()
    put(tail, 400, 500)
    tail.close()
    assert rows_of(read_all(path)) == expected(400)
    # Nothing says that the machine was not restarted.
    with pytest.warns(StoreWarning, match="its last 100 rows of 500 are dropped"):
        assert rows_of(left(path)) == expected(400)
