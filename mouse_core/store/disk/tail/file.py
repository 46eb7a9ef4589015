"""The file that appended rows lie in while a store is open: an extent's memory, mapped.

A row is the system's as soon as it counts, without a call: it survives the process, however that ends. It survives the
machine once a commit that was synced says so.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mouse_core.files.locking import Descriptor
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import remove, storing, sync_folders
from mouse_core.store._tail.columns import ColumnExtent, numbers_extent
from mouse_core.store._tail.rows import Extent
from mouse_core.store._tail.values import TailColumn
from mouse_core.store.disk.tail.commits import (
    Commit,
    Sums,
    check_rows_of,
    chosen_commit,
    confirm,
    place_of,
    read_commits,
    write_commit,
)
from mouse_core.store.disk.tail.layout import MOST_DESCRIBED, TailLayout, check_rows, read_layout
from mouse_core.store.disk.tail.mapping import mapped, open_file, origin, set_aside, sync_mapped

# The count is kept as a multiple of this prime, so a flipped bit makes it none.
_UNIT = 4294967291


class TailExtent(Extent):
    """Room for rows in a mapped file, and how many there are in the same file.

    Args:
        layout: Where what lies.
        extents: The columns, over the file's memory.
        told: Where the count stands, int64 ``[1]``; None: nobody is told.
        count: Rows that are there.
    """

    def __init__(self, layout: TailLayout, extents: dict[str, ColumnExtent], told: Any, count: int) -> None:
        self._hold(layout.columns, layout.rows, extents, count)
        self._told = told

    def append(self, row: Mapping[str, Any]) -> bool:
        """As for any extent."""
        if not Extent.append(self, row):
            return False
        self._told[0] = self.count * _UNIT
        return True

    def put(self, row: Mapping[str, Any]) -> None:
        """As for any extent."""
        Extent.put(self, row)
        self._told[0] = self.count * _UNIT

    def put_many(self, prepared: Mapping[str, Any], done: int, rows: int) -> None:
        """As for any extent."""
        Extent.put_many(self, prepared, done, rows)
        self._told[0] = self.count * _UNIT


class TailFile(Descriptor):
    """A file of appended rows, written by one process; see ``create`` and ``recover``.

    Attributes:
        path: The file.
        extent: Takes rows.
        committed: How many rows were committed.
        synced: How many rows are on the disk.
    """

    extent: TailExtent

    def __init__(self, path: Path, file: int, layout: TailLayout, memory: mmap.mmap) -> None:
        self.path, self._file, self.layout, self._memory = path, file, layout, memory
        self._arrays = layout.arrays(memory)
        self._live = layout.live(memory)
        self._since = self._live[-len(layout.columns) :]
        self._places, self._table = layout.slots(memory), layout.table(memory)
        self._sums = Sums(layout, self._arrays)
        self._number = 0
        self._named = False  # a process that made it may have died before its name was on the disk
        self.committed = self.synced = 0

    @classmethod
    def create(cls, path: str | os.PathLike[str], columns: Mapping[str, TailColumn], rows: int) -> TailFile:
        """A new file, with room for so many rows.

        Raises:
            ConfigError: There cannot be room for so many.
            StorageError: It cannot be made, for the disk is full, or a file is there; nothing is left of it.
        """
        path = Path(path)
        check_rows(columns, rows)
        layout = TailLayout(dict(columns), rows, os.urandom(8).hex())
        with storing(f"tail {path}"):
            file = open_file(path, create=True)
            try:
                set_aside(file, layout.nbytes)
                memory = mapped(file, layout.nbytes, write=True)
                memory[: len(layout.head())] = layout.head()
                tail = cls(path, file, layout, memory)
            except BaseException:
                os.close(file)
                remove(path)
                raise
            tail._live[0], tail._live[1] = 0, origin(file)
            tail._open(0)
            return tail

    @classmethod
    def recover(cls, path: str | os.PathLike[str]) -> TailFile:
        """A file that was left, by a process that ended or a machine that was restarted, to go on with.

        All rows that counted are there if the machine was not restarted since. Otherwise those of the last commit that
        is whole are, which are at least those that were synced.

        Raises:
            DataError: Rows that were committed are damaged, or it is no such file, or a newer version wrote it.
            StorageError: It cannot be read or written.
        """
        path = Path(path)
        with storing(f"tail {path}"), reading(path):
            file = open_file(path)
            try:
                layout, memory = map_layout(path, file, write=True)
                tail = cls(path, file, layout, memory)
            except BaseException:
                os.close(file)
                raise
            tail._recover()
            return tail

    def _recover(self) -> None:
        name, layout = str(self.path), self.layout
        now = origin(self._file)
        same = now != 0 and int(self._live[1]) == now
        self._number = max((commit.number + 1 for commit in read_commits(self._places, layout)), default=0)
        commit, sums = chosen_commit(
            layout,
            self._places,
            lambda found: check_rows_of(name, layout, self._table, self._sums, found),
            same=same,
        )
        self._sums = sums or self._sums
        rows = 0 if commit is None else commit.rows
        if same:
            counted, rest = divmod(int(self._live[0]), _UNIT)
            if rest or not rows <= counted <= layout.rows:
                raise damaged(self.path, f"expected {rows}..{layout.rows} rows, found a damaged count")
            rows = counted
        else:
            self._since[:] = 0 if commit is None else commit.since
        self._since[self._since > rows] = 0
        check_ends(self.path, layout, self._arrays, self._since, rows)
        for part in layout.parts:
            if part.kind == "nulls":
                self._arrays[part.name][rows:] = False
        self._live[0] = rows * _UNIT
        self._open(rows)
        self._write(sync=True)
        for place in self._places:
            # What was committed and is not there any more must never seem to be.
            if int(place[1]) > rows:
                place[:] = 0
        self._live[1] = now

    def _open(self, rows: int) -> None:
        rooms = self.layout.rooms(self._arrays, self._since)
        extents: dict[str, ColumnExtent] = {
            name: numbers_extent(self.layout.columns[name], room, rows) for name, room in rooms.items()
        }
        told = memoryview(self._live[:1])  # type: ignore[arg-type]
        self.extent = TailExtent(self.layout, extents, told, rows)

    def commit(self, *, sync: bool) -> None:
        """Let readers see the rows there are, each with a checksum.

        Args:
            sync: Whether to wait until they are on the disk, and only then let readers see them.

        Raises:
            StorageError: They cannot be brought to the disk. The rows are still there, and it can be tried again.
        """
        if self.extent.count > self.committed or (sync and self.extent.count > self.synced):
            self._write(sync=sync)

    def _write(self, *, sync: bool) -> None:
        rows, since = self.extent.count, self._since.copy()

        def full(block: int, sums: list[int]) -> None:
            self._table[block] = sums

        self._sums.advance(rows, since, full)
        place = self._places[place_of(self._number, sync=sync)]
        write_commit(place, self.layout, Commit(self._number, rows, since, self._sums.now, False, False))
        self._number += 1
        if sync:
            with storing(f"tail {self.path}"):
                sync_mapped(self._file, self._memory)
                if not self._named:
                    sync_folders([self.path.parent])
                    self._named = True
            confirm(place)
            self.synced = rows
        self.committed = rows

    def remove(self) -> None:
        """Close the file and remove it; who reads it keeps its rows."""
        self.close()
        remove(self.path)


def map_layout(path: Path, file: int, *, write: bool) -> tuple[TailLayout, mmap.mmap]:
    """What an open file's head describes, and the file as memory.

    Raises:
        DataError: It is no tail file, or is damaged, or a newer version wrote it.
    """
    size = os.fstat(file).st_size
    layout = read_layout(str(path), os.pread(file, MOST_DESCRIBED + 64, 0))
    if size != layout.nbytes:
        raise damaged(path, f"expected {layout.nbytes} bytes, found {size}")
    return layout, mapped(file, size, write=write)


def check_ends(path: Path, layout: TailLayout, arrays: Mapping[str, Any], since: Any, rows: int) -> None:
    """Raise DataError if rows that differ in length lie elsewhere than among the values."""
    for part in layout.parts:
        if part.kind == "ends" and since[part.column]:
            ends, most = arrays[part.name][: rows + 1], len(arrays[f"{part.column}.values"])
            if ends[0] != 0 or ends[-1] > most or (ends[1:] < ends[:-1]).any():
                name = list(layout.columns)[part.column]
                raise damaged(path, f"expected rows of column {name!r} among its values, found others")
