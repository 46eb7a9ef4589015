"""The file that appended rows lie in while a store is open: an extent's memory, mapped.

A row is the system's as soon as it counts, without a call: it survives the process, however that ends. It survives the
machine once a commit that was synced says so.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import StoreWarning
from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import fence, mapped, open_file, origin, set_aside, sync_mapped
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import remove, storing, sync_folders
from mouse_core.store._tail.values import TailColumn
from mouse_core.store.disk.tail.commits import (
    COMMITTED,
    COUNTED,
    ORIGIN,
    SYNCED,
    Commit,
    check_not_fewer,
    next_places,
    place_after,
    read_commits,
    tell,
    told,
    write_commit,
)
from mouse_core.store.disk.tail.extent import TailExtent, check_ends, column_extents_of, read_objects_of
from mouse_core.store.disk.tail.layout import PAGE, TailLayout, check_rows, read_layout, usual_block_rows
from mouse_core.store.disk.tail.objects import ObjectsFile, objects_path
from mouse_core.store.disk.tail.sums import Sums, check_rows_of, chosen_commit

# So many rows are without a checksum at most; writing it costs as much as some twenty rows.
_NOTED_ROWS = 1024


class TailFile(Descriptor):
    """A file of appended rows, written by one process; see ``create`` and ``recover``.

    Attributes:
        path: The file.
        extent: Takes rows.
        committed: How many rows were committed.
        synced: How many rows are on the disk.
    """

    extent: TailExtent

    def __init__(
        self, path: Path, opened: Descriptor, layout: TailLayout, memory: mmap.mmap, objects: ObjectsFile | None
    ) -> None:
        self.path, self.layout, self._memory, self._objects = path, layout, memory, objects
        self._arrays = layout.arrays(memory)
        self._live = layout.live(memory)
        self._since = self._live[-len(layout.columns) :]
        self._places, self._table = layout.places(memory), layout.table(memory)
        self._sums = Sums(layout, memory, None if objects is None else objects.read)
        self._number, self._next = 0, next_places([])
        self.committed = self.synced = 0
        self._failed = False  # the last time that the disk was waited for
        # From here on it is this object that closes the file, and nobody else.
        self._file, opened._file = opened._file, -1

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], columns: Mapping[str, TailColumn], rows: int, *, often: bool = False
    ) -> TailFile:
        """A new file, with room for so many rows.

        Args:
            path: Where it is to be; objects lie beside it.
            columns: How each column is kept, by name.
            rows: How many rows there is to be room for.
            often: Whether few rows at a time will wait for the disk, as those of 100 bytes do that are flushed every
                second. Making the file takes longer then, and waiting less.

        Raises:
            ConfigError: There cannot be room for so many.
            StorageError: It cannot be made, for the disk is full, or a file is there; nothing is left of it.
        """
        path = Path(path)
        check_rows(columns, rows)
        layout = TailLayout(dict(columns), rows, os.urandom(8).hex(), usual_block_rows(columns))
        with storing(f"tail {path}"):
            opened, tail = Descriptor(open_file(path, create=True)), None
            try:
                set_aside(opened.file, layout.nbytes, written=often)
                memory = mapped(opened.file, layout.nbytes, write=True)
                memory[: len(layout.head())] = layout.head()
                objects = ObjectsFile(objects_path(path), create=True) if layout.has_objects else None
                tail = cls(path, opened, layout, memory, objects)
                # Whoever names it may count on it.
                tail._sync()
                sync_folders([path.parent])
            except BaseException:
                opened.close()
                if tail is None:
                    remove(path)
                    remove(objects_path(path))
                else:
                    tail.remove()
                raise
            tell(tail._live, ORIGIN, origin(tail.file))
            tail._open(0)
            return tail

    @classmethod
    def recover(
        cls,
        path: str | os.PathLike[str],
        image_roots: tuple[str, ...] = (),
        *,
        identity: str = "",
        sync: bool = True,
    ) -> TailFile:
        """A file that was left, by a process that ended or a machine that was restarted, to go on with.

        All rows that counted are there if the machine was not restarted since. Otherwise those of the last commit that
        is whole are, which are at least those that were synced.

        Args:
            path: The file.
            image_roots: Folders in which images that are named by path may lie.
            identity: What its head must say that no other file's does; "" is any.
            sync: Whether to wait until the rows are on the disk; after a restart that is always done.

        Raises:
            DataError: Rows that were committed are damaged, or it is no such file, or a newer version wrote it.
            StorageError: It cannot be read or written.
        """
        path = Path(path)
        with reading(path), storing(f"tail {path}"):
            opened = Descriptor(open_file(path))
            layout, memory = map_layout(path, opened.file, image_roots, identity, write=True)
            objects = ObjectsFile(objects_path(path)) if layout.has_objects else None
            tail = cls(path, opened, layout, memory, objects)
            if sync:
                sync_folders([path.parent])
            tail._recover(sync=sync)
            return tail

    def _recover(self, *, sync: bool) -> None:
        name, layout, live = str(self.path), self.layout, self._live
        now = origin(self._file)
        same = now != 0 and told(name, live, ORIGIN) == now
        synced, committed, counted = (told(name, live, which) for which in (SYNCED, COMMITTED, COUNTED))
        commits = read_commits(self._places, layout)
        self._number = max((commit.number + 1 for commit in commits), default=0)
        self._next = next_places(commits)
        # What a machine wrote and did not wait for may be missing once it was restarted.
        whole = layout.rows if same else synced
        commit, sums = chosen_commit(
            commits, lambda found: check_rows_of(name, layout, self._table, self._sums, found), whole=whole
        )
        self._sums = sums or self._sums
        rows = 0 if commit is None else commit.rows
        check_not_fewer(name, rows, max(synced, committed) if same else synced)
        if same:
            if not rows <= counted <= layout.rows:
                raise damaged(self.path, f"expected {rows}..{layout.rows} rows, found {counted}")
            if commit is not None:
                self._check_since(commit)
            rows = counted
        else:
            self._take_back(rows, counted)
            self._since[:] = 0 if commit is None else commit.since
        self._forget_behind(rows)
        tell(live, COUNTED, rows)
        self._open(rows)
        self.synced = synced
        self._write(sync=sync or not same)
        for place in self._places:
            # What was committed and is not there any more must never seem to be.
            if int(place[1]) > rows:
                place[:] = 0
        tell(live, ORIGIN, now)

    def _take_back(self, rows: int, counted: int) -> None:
        """Say that rows that counted are dropped, if some are."""
        if counted > rows:
            warnings.warn(
                f"{self.path}: its last {counted - rows} rows of {counted} are dropped: it was copied, or the "
                "machine was restarted, and no checksum says that they are whole; what was flushed is there",
                StoreWarning,
                stacklevel=2,
            )

    def _forget_behind(self, rows: int) -> None:
        """Have room behind the last row as it was before any was put there."""
        self._since[self._since > rows] = 0
        check_ends(self.path, self.layout, self._arrays, self._since, rows)
        for part in self.layout.parts:
            if part.kind == "nulls":
                self._arrays[part.name][rows:] = False

    def _check_since(self, commit: Commit) -> None:
        """Raise DataError if rows of a commit differ in length from another row on than they did."""
        for before, now in zip(commit.since.tolist(), self._since.tolist(), strict=True):
            if before != now and (before or 0 < now <= commit.rows):
                raise damaged(self.path, f"expected rows that differ in length from {before} on, found {now}")

    def _open(self, rows: int) -> None:
        layout, end = self.layout, 0
        before: list[pa.Array] = []
        if self._objects is not None:
            end, before = read_objects_of(self._objects, layout, self._arrays, 0, 0, rows)
        extents = column_extents_of(layout, self._arrays, self._since, before, rows)
        told = memoryview(self._live[:1])  # type: ignore[arg-type]
        self.extent = TailExtent(layout, extents, rows, told, self._objects, end)
        # The extent must not keep the file open.
        self.extent.note, self.extent.note_at = partial(_note, weakref.ref(self)), rows + self._each

    @property
    def nbytes(self) -> int:
        """How many bytes both files have."""
        return self.layout.nbytes + self.extent.objects_end

    def note(self) -> None:
        """Write the checksums of all rows, for whoever finds a copy of the file; readers are shown nothing.

        It is the beginning of a commit that waits for the disk, in whose place the next one is written.
        """
        self._write_sums(sync=True)

    @property
    def _each(self) -> int:
        """How many rows may be without checksums."""
        return min(_NOTED_ROWS, self.layout.block_rows)

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
        number, rows = self._write_sums(sync=sync)
        if sync:
            with storing(f"tail {self.path}"):
                self._sync()
            tell(self._live, SYNCED, rows)
            self.synced = rows
        fence()
        self._next[sync] = place_after(number)
        tell(self._live, COMMITTED, rows)
        self.committed = rows

    def _write_sums(self, *, sync: bool) -> tuple[int, int]:
        """Write a commit of all rows; its place, and how many they are."""
        self.extent.settle()
        # All of this may be interrupted, and is done again then.
        rows, since, later = self.extent.count, self._since.copy(), self._sums.copy()

        def full(block: int, sums: npt.NDArray[np.uint64]) -> None:
            self._table[block : block + len(sums)] = sums

        later.advance(rows, since, full)
        self._sums = later
        number = self._next[sync]
        fence()
        write_commit(self._places[number], self.layout, Commit(self._number, rows, since, self._sums.now))
        self._number += 1
        self.extent.note_at = rows + self._each
        return number, rows

    def _sync(self) -> None:
        """Wait until all that was written is on the disk; raises OSError if it is not."""
        if self._failed:
            self._write_again()
        self._failed = True
        if self._objects is not None:
            self._objects.sync()
        sync_mapped(self._file, self._memory)
        self._failed = False

    def _write_again(self) -> None:
        """Write what is there once more: where a system failed to write it, it takes it for written afterwards."""
        pages = np.frombuffer(self._memory, np.uint8)[::PAGE]
        pages[:] = pages.copy()
        if self._objects is not None:
            self._objects.write(self._objects.read(0, self.extent.objects_end), 0)
        # It may also have thrown it away.
        fresh = Sums(self.layout, self._memory, None if self._objects is None else self._objects.read)
        now = Commit(0, self._sums.rows, self._since.copy(), self._sums.now)
        check_rows_of(str(self.path), self.layout, self._table, fresh, now)

    def close(self) -> None:
        """Let go of the files; may be called twice. Rows that count stay where they are."""
        super().close()
        if self._objects is not None:
            self._objects.close()

    def remove(self) -> None:
        """Close the file and remove it; who reads it keeps its rows."""
        self.close()
        remove(self.path)
        if self._objects is not None:
            remove(self._objects.path)


def _note(file: weakref.ref[TailFile]) -> None:
    tail = file()
    if tail is not None:
        tail.note()


def map_layout(
    path: Path, file: int, image_roots: tuple[str, ...] = (), identity: str = "", *, write: bool
) -> tuple[TailLayout, mmap.mmap]:
    """What an open file's head describes, and the file as memory.

    Raises:
        DataError: It is no tail file, or is damaged, or a newer version wrote it.
    """
    size = os.fstat(file).st_size
    layout = read_layout(str(path), lambda begin, count: os.pread(file, count, begin), image_roots)
    if identity and layout.identity != identity:
        raise damaged(path, f"expected the file {identity} that was made there, found {layout.identity}")
    if size != layout.nbytes:
        raise damaged(path, f"expected {layout.nbytes} bytes, found {size}")
    return layout, mapped(file, size, write=write)
