"""Files of appended rows while a store is open: the memory of an extent, mapped; one process writes, others read.

A row that counts is in the page cache without a system call: it survives the process, however that ends.
It survives the machine once a synced commit covers it.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.columns.appended import TailColumn
from mouse_core.columns.extent import ColumnExtent
from mouse_core.errors import DataError, StoreWarning
from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import fence, mapped, open_file, origin, set_aside, sync_mapped
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.files.writing import remove, storing, sync_folders, write_at
from mouse_core.store.disk.tail.commits import (
    Commit,
    LivePage,
    Sums,
    check_rows_of,
    next_places,
    place_after,
    read_commits,
    write_commit,
)
from mouse_core.store.disk.tail.extent import (
    ObjectsFile,
    TailExtent,
    check_ends,
    column_extents_of,
    objects_path,
    read_objects,
)
from mouse_core.store.disk.tail.layout import PAGE, TailLayout, check_rows, read_layout, usual_block_rows

# Rows without a checksum at most; writing a checksum costs as much as some twenty rows.
_NOTED_ROWS = 1024
_NO_NULLS = np.zeros(0, np.bool_)


class _TailMemory:
    """The memory of a tail file, part by part.

    Args:
        path: The file.
        layout: The layout of the file.
        memory: The file, mapped.
        objects: The file of objects, if some column has them.
    """

    def __init__(self, path: Path, layout: TailLayout, memory: mmap.mmap, objects: ObjectsFile | None) -> None:
        self.path, self.layout, self._memory, self._objects = path, layout, memory, objects
        self._arrays, self._live = layout.arrays(memory), LivePage(path, layout.live(memory))
        self._places, self._table = layout.places(memory), layout.table(memory)
        self._sums = self._new_sums()

    def _new_sums(self) -> Sums:
        return Sums(self.layout, self._memory, None if self._objects is None else self._objects.read)

    def _promised(self, origin: int) -> tuple[bool, int, int]:
        """Whether nothing can have been lost, how many rows are on the disk, and how many must be there.

        Args:
            origin: The origin of the file. A copy has another one, and so has a file after a restart of the machine:
                rows that did not wait for the disk may be missing there.
        """
        live = self._live
        is_same = origin != 0 and live.origin == origin
        synced = live.synced
        return is_same, synced, max(synced, live.committed) if is_same else synced

    def _newest(self, commits: Sequence[Commit], promise: tuple[bool, int, int]) -> tuple[Commit | None, Sums]:
        """Return the commit of most rows whose rows are those that were written, and their checksums.

        Args:
            commits: The commits that are whole, of most rows first.
            promise: See ``_promised``.

        Raises:
            DataError: Rows are damaged or missing that must be there.
        """
        (is_same, synced, promised), newest, sums = promise, None, self._sums
        for commit in commits:
            try:
                newest, sums = commit, check_rows_of(str(self.path), self.layout, self._table, self._sums, commit)
                break
            except DataError:
                if is_same or commit.rows <= synced:
                    raise
        if sums.rows < promised:
            raise damaged(self.path, f"expected a commit of {promised} rows, found one of {sums.rows}; it is damaged")
        return newest, sums


class TailFile(_TailMemory, Descriptor):
    """A file of appended rows, written by one process; see ``create`` and ``recover``.

    Attributes:
        path: The file.
        extent: Takes rows.
        committed: Rows that were committed.
        synced: Rows that are on the disk.
    """

    extent: TailExtent

    def __init__(
        self, path: Path, opened: Descriptor, layout: TailLayout, memory: mmap.mmap, objects: ObjectsFile | None
    ) -> None:
        super().__init__(path, layout, memory, objects)
        self._since = layout.live(memory)[-len(layout.columns) :]
        self._next = next_places([], 0, 0)
        self.committed = self.synced = 0
        self._failed = False  # the last time that the disk was waited for
        # From here on this object closes the file.
        self._file, opened._file = opened._file, -1

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], columns: Mapping[str, TailColumn], rows: int, *, often: bool = False
    ) -> TailFile:
        """Make a new file.

        Args:
            path: The file; objects lie beside it.
            columns: How each column is kept, by name.
            rows: Rows that the file has room for.
            often: Whether few rows at a time wait for the disk, as rows of 100 bytes that are flushed every second.
                Then making the file takes longer, and waiting takes less.

        Raises:
            ConfigError: No file has room for ``rows`` rows.
            StorageError: The file cannot be made, because the disk is full or a file is there; nothing is left of it.
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
                # The manifest may name the file from now on.
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
            tail._live.origin = origin(tail.file)
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
        """Open a file to go on with, which a process left that ended, or a machine that was restarted.

        If the machine was not restarted since, all rows that counted are there. Otherwise the rows of the last whole
        commit are there, at least those that were synced.

        Args:
            path: The file.
            image_roots: Folders in which images that are named by path may lie.
            identity: The identity that the head must have; "" is any.
            sync: Whether to wait until the rows are on the disk; after a restart, the writer always waits.

        Raises:
            DataError: Committed rows are damaged, or the file is no tail file, or a newer version wrote it.
            StorageError: The file cannot be read or written.
        """
        path = Path(path)
        with reading(path), storing(f"tail {path}"):
            opened = Descriptor(open_file(path))
            layout, memory = _map_layout(path, opened.file, image_roots, identity, write=True)
            objects = ObjectsFile(objects_path(path)) if layout.has_objects else None
            tail = cls(path, opened, layout, memory, objects)
            if sync:
                sync_folders([path.parent])
            tail._recover(sync=sync)
            return tail

    def _recover(self, *, sync: bool) -> None:
        live, here = self._live, origin(self._file)
        promise = is_same, synced, _ = self._promised(here)
        counted, commits = live.counted, read_commits(self._places, self.layout)
        commit, self._sums = self._newest(commits, promise)
        rows = self._sums.rows
        self._next = next_places(commits, rows, synced if is_same else rows)
        if is_same:
            if not rows <= counted <= self.layout.rows:
                raise damaged(self.path, f"expected {rows}..{self.layout.rows} rows, found {counted}")
            if commit is not None:
                self._check_since(commit)
            rows = counted
        else:
            self._take_back(rows, counted)
            self._since[:] = 0 if commit is None else commit.since
        self._forget_behind(rows)
        live.counted = rows
        self._open(rows)
        self.synced = synced
        self._write(sync=sync or not is_same)
        for place in self._places:
            # Rows that were committed and are gone must never seem to be there.
            if int(place[0]) > rows:
                place[:] = 0
        live.origin = here

    def _take_back(self, rows: int, counted: int) -> None:
        """Warn of rows that counted and are dropped, if there are any."""
        if counted > rows:
            warnings.warn(
                f"{self.path}: its last {counted - rows} rows of {counted} are dropped: it was copied, or the "
                "machine was restarted, and no checksum says that they are whole; what was flushed is there",
                StoreWarning,
                stacklevel=2,
            )

    def _forget_behind(self, rows: int) -> None:
        """Reset the room behind the last row."""
        self._since[self._since > rows] = 0
        check_ends(self.path, self.layout, self._arrays, self._since, rows)
        for part in self.layout.parts:
            if part.kind == "nulls":
                self._arrays[part.name][rows:] = False

    def _check_since(self, commit: Commit) -> None:
        """Raise DataError if rows of a commit now differ in length from another row on."""
        for before, now in zip(commit.since.tolist(), self._since.tolist(), strict=True):
            if before != now and (before or 0 < now <= commit.rows):
                raise damaged(self.path, f"expected rows that differ in length from {before} on, found {now}")

    def _open(self, rows: int) -> None:
        layout, end = self.layout, 0
        before: list[pa.Array] = []
        if self._objects is not None:
            end, before = read_objects(self._objects, layout, self._arrays, 0, 0, rows)
        extents = column_extents_of(layout, self._arrays, self._since, before, rows)
        self.extent = TailExtent(layout, extents, rows, self._live.words, self._objects, end)
        # The extent must not keep the file open.
        self.extent.note, self.extent.note_at = partial(_note, weakref.ref(self)), rows + self._each

    @property
    def nbytes(self) -> int:
        """Bytes of both files."""
        return self.layout.nbytes + self.extent.objects_end

    def note(self) -> None:
        """Write the checksums of all rows, for a copy of the file; readers see nothing of it.

        This is the first half of a commit that waits for the disk; the next such commit takes the same place.
        """
        self._write_sums(sync=True)

    @property
    def _each(self) -> int:
        """Rows without a checksum at most."""
        return min(_NOTED_ROWS, self.layout.block_rows)

    def commit(self, *, sync: bool) -> None:
        """Show the rows to readers, each with a checksum.

        Args:
            sync: Whether to wait until the rows are on the disk, before readers see them.

        Raises:
            StorageError: The rows cannot be brought to the disk. They are still there; the next call tries again.
        """
        if self.extent.count > self.committed or (sync and self.extent.count > self.synced):
            self._write(sync=sync)

    def _write(self, *, sync: bool) -> None:
        number, rows = self._write_sums(sync=sync)
        if sync:
            with storing(f"tail {self.path}"):
                self._sync()
            self._live.synced = self.synced = rows
        fence()
        self._next[sync] = place_after(number)
        self._live.committed = self.committed = rows

    def _write_sums(self, *, sync: bool) -> tuple[int, int]:
        """Write a commit of all rows; return its place, and the number of rows."""
        self.extent.settle()
        # After an interrupt, all of this is done again.
        rows, since, later = self.extent.count, self._since.copy(), self._sums.copy()

        def full(block: int, sums: npt.NDArray[np.uint64]) -> None:
            self._table[block : block + len(sums)] = sums

        later.advance(rows, since, full)
        self._sums = later
        number = self._next[sync]
        fence()
        write_commit(self._places[number], self.layout, Commit(rows, since, self._sums.now))
        self.extent.note_at = rows + self._each
        return number, rows

    def _sync(self) -> None:
        """Wait until all is on the disk; raises OSError if it is not."""
        if self._failed:
            self._write_again()
        self._failed = True
        if self._objects is not None:
            self._objects.sync()
        sync_mapped(self._file, self._memory)
        self._failed = False

    def _write_again(self) -> None:
        """Write all bytes again: a system that failed to write them once takes them for written."""
        pages = np.frombuffer(self._memory, np.uint8)[::PAGE]
        pages[:] = pages.copy()
        if self._objects is not None:
            write_at(self._objects.file, self._objects.read(0, self.extent.objects_end), 0)
        # The system may also have dropped them.
        now = Commit(self._sums.rows, self._since.copy(), self._sums.now)
        check_rows_of(str(self.path), self.layout, self._table, self._new_sums(), now)

    def close(self) -> None:
        """Close the files; may be called twice. Rows that count stay in them."""
        super().close()
        if self._objects is not None:
            self._objects.close()

    def remove(self) -> None:
        """Close the file and remove it; a process that reads it keeps its rows."""
        self.close()
        remove(self.path)
        if self._objects is not None:
            remove(self._objects.path)


def _note(file: weakref.ref[TailFile]) -> None:
    tail = file()
    if tail is not None:
        tail.note()


class TailReader(_TailMemory):
    """The committed rows of a tail file that another process may be writing.

    Args:
        path: The file.
        image_roots: Folders in which images that are named by path may lie.
        identity: The identity that the head must have; "" is any.

    Attributes:
        token: Stands for the file: extents of the same reader have the same first rows.

    Raises:
        DataError: It is no such file, or another one, or a newer version wrote it, or its head is damaged.
        ConfigError: It is not there.
    """

    def __init__(self, path: str | os.PathLike[str], image_roots: tuple[str, ...] = (), *, identity: str = "") -> None:
        path, objects = Path(path), None
        self.token = object()
        check_inside([path, objects_path(path)], path.parent)
        with reading(path):
            file = open_file(path, write=False)
            try:
                layout, memory = _map_layout(path, file, image_roots, identity, write=False)
                self._origin = origin(file)
                if layout.has_objects:
                    objects = ObjectsFile(objects_path(path), write=False)
            finally:
                os.close(file)
            super().__init__(path, layout, memory, objects)
        self._since = np.zeros(len(layout.columns), np.int64)
        self._values = [pa.array([], column.arrow_type) for column in layout.objects]
        self._nulls = [self._arrays.get(f"{number}.nulls", _NO_NULLS) for number in range(len(self.layout.columns))]
        # The columns that ``extent`` made last, of how many rows, and from which row on theirs differed in length.
        self._made: tuple[int, npt.NDArray[np.int64], dict[str, ColumnExtent]] = 0, self._since, {}

    def committed(self) -> int:
        """Return how many rows were committed so far, after checking the checksums of the new ones.

        Raises:
            DataError: Rows are damaged; the message names the file and the rows.
        """
        with reading(self.path):
            return self._look()

    def _look(self) -> int:
        # Before the commits: these are written first.
        promise = is_same, synced, promised = self._promised(self._origin)
        if promised == self._sums.rows and is_same:
            return promised
        fence()
        shown = [
            commit
            for commit in read_commits(self._places, self.layout, self._sums.rows)
            # After a restart nobody waits any more.
            if commit.rows <= synced or not commit.waited or not is_same
        ]
        commit, sums = self._newest(shown, promise)
        if commit is not None:
            check_ends(self.path, self.layout, self._arrays, commit.since, commit.rows)
            if self._objects is not None:
                begin, at = self._sums.rows, self._sums.objects_end
                _, values = read_objects(self._objects, self.layout, self._arrays, at, begin, commit.rows)
                self._values = [pa.concat_arrays(parts) for parts in zip(self._values, values, strict=True)]
            self._sums, self._since = sums, commit.since
        return sums.rows

    def whole(self) -> list[range]:
        """Return which rows are whole, of those that were committed; from here on ``extent`` has them.

        A stretch of rows begins and ends with a block, or ends with one of the last commits. Of 5000 rows in blocks of
        1024 with a flipped bit in row 1500, rows 0..1023 and 2048..4999 are whole. Rows between must not be believed.
        """
        commits, sums = read_commits(self._places, self.layout), self._sums
        most, size = commits[0].rows if commits else 0, self.layout.block_rows
        stretches: list[range] = []
        parts = [[values] for values in self._values]
        for begin in range(0, most, size):
            at, end = sums.objects_end, self._whole_end(sums, begin, commits)
            if end > begin:
                gap = begin - (stretches[-1].stop if stretches else 0)
                if self._objects is not None:
                    _, values = read_objects(self._objects, self.layout, self._arrays, at, begin, end)
                    for known, some in zip(parts, values, strict=True):
                        known += [pa.nulls(gap, some.type), some]
                first = stretches.pop().start if stretches and not gap else begin
                stretches.append(range(first, end))
            try:
                sums.skip(begin + size)
            except DataError:
                break
        self._values = [pa.concat_arrays(known) for known in parts]
        if commits:
            self._since = commits[0].since
        return stretches

    def _whole_end(self, sums: Sums, begin: int, commits: Sequence[Commit]) -> int:
        """Return where the whole rows of the block that begins with row ``begin`` end; ``begin`` if it has none."""
        most, full = commits[0].rows, begin + self.layout.block_rows
        block = self._table[begin // self.layout.block_rows].tolist()
        # Of the block in progress as many rows as one of the last commits has.
        ends = [Commit(full, commits[0].since, block)] if full <= most else []
        ends += [commit for commit in commits if begin < commit.rows < min(full, most + 1)]
        for end in ends:
            found, now = list[list[int]](), sums.copy()
            with suppress(DataError, OSError, ValueError):
                now.advance(end.rows, end.since, lambda _, block: found.append(block[0].tolist()))  # noqa: B023
                if (found[0] if found else now.now) == end.sums:
                    return end.rows
        return begin

    def told_of(self) -> int:
        """Return how many rows were committed, or seem to have been, whole or not."""
        numbers = [commit.rows for commit in read_commits(self._places, self.layout)]
        with suppress(DataError):
            numbers.append(self._live.committed)
        return min(max(numbers, default=0), self.layout.rows)

    def not_flushed(self) -> int:
        """Return how many rows were written behind the committed ones; 0 for a copy, where it is not known."""
        with reading(self.path):
            if not self._promised(self._origin)[0]:
                return 0
            written = min(self._live.counted, self.layout.rows)
            return max(0, written - self._look())

    def extent(self, rows: int) -> TailExtent:
        """Return the first ``rows`` of the committed rows."""
        since = np.where(self._since > rows, 0, self._since)
        extents = column_extents_of(self.layout, self._arrays, since, self._values, rows, self._same(since, rows))
        self._made = rows, since, extents
        extent = TailExtent(self.layout, extents, rows)
        extent.token = self.token
        return extent

    def _same(self, since: npt.NDArray[np.int64], rows: int) -> dict[str, ColumnExtent]:
        """Return the columns made last that have the same memory with ``rows`` rows: no null or other length came."""
        before, then, known = self._made
        return {
            name: known[name]
            for (name, column), nulls, now, was in zip(
                self.layout.columns.items(), self._nulls, since.tolist(), then.tolist(), strict=True
            )
            if name in known and not column.is_object and now == was and not nulls[before:rows].any()
        }

    def close(self) -> None:
        """Close the files; rows that were read stay."""
        if self._objects is not None:
            self._objects.close()


def _map_layout(
    path: Path, file: int, image_roots: tuple[str, ...] = (), identity: str = "", *, write: bool
) -> tuple[TailLayout, mmap.mmap]:
    """Return the layout of an open file, and the file as memory.

    Raises:
        DataError: The file is no tail file, or is damaged, or a newer version wrote it.
    """
    size = os.fstat(file).st_size
    layout = read_layout(str(path), lambda begin, count: os.pread(file, count, begin), image_roots)
    if identity and layout.identity != identity:
        raise damaged(path, f"expected the file {identity} that was made there, found {layout.identity}")
    if size != layout.nbytes:
        raise damaged(path, f"expected {layout.nbytes} bytes, found {size}")
    return layout, mapped(file, size, write=write)
