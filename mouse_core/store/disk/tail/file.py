"""Files that appended rows lie in while a store is open: an extent's memory, mapped; one process writes, others read.

A row is the system's as soon as it counts, without a call: it survives the process, however that ends. It survives the
machine once a commit that was synced says so.
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
from mouse_core.files.writing import remove, storing, sync_folders
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
    read_objects_of,
)
from mouse_core.store.disk.tail.layout import PAGE, TailLayout, check_rows, read_layout, usual_block_rows

# So many rows are without a checksum at most; writing it costs as much as some twenty rows.
_NOTED_ROWS = 1024
_NO_NULLS = np.zeros(0, np.bool_)


class _TailMemory:
    """The memory of a tail file, part by part.

    Args:
        path: The file.
        layout: Where what lies.
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
        committed: How many rows were committed.
        synced: How many rows are on the disk.
    """

    extent: TailExtent

    def __init__(
        self, path: Path, opened: Descriptor, layout: TailLayout, memory: mmap.mmap, objects: ObjectsFile | None
    ) -> None:
        super().__init__(path, layout, memory, objects)
        self._since = layout.live(memory)[-len(layout.columns) :]
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
        self._number = max((commit.number + 1 for commit in commits), default=0)
        self._next = next_places(commits)
        commit, self._sums = self._newest(commits, promise)
        rows = self._sums.rows
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
            # What was committed and is not there any more must never seem to be.
            if int(place[1]) > rows:
                place[:] = 0
        live.origin = here

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
        self.extent = TailExtent(layout, extents, rows, self._live.words, self._objects, end)
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
            self._live.synced = self.synced = rows
        fence()
        self._next[sync] = place_after(number)
        self._live.committed = self.committed = rows

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
        now = Commit(0, self._sums.rows, self._since.copy(), self._sums.now)
        check_rows_of(str(self.path), self.layout, self._table, self._new_sums(), now)

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


class TailReader(_TailMemory):
    """The rows of a tail file that were committed; nothing is written to it.

    Args:
        path: The file.
        image_roots: Folders in which images that are named by path may lie.
        identity: What its head must say that no other file's does; "" is any.

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
        """How many rows were committed so far; costs what is new of them, whose checksums are checked.

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
                _, values = read_objects_of(self._objects, self.layout, self._arrays, at, begin, commit.rows)
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
                    _, values = read_objects_of(self._objects, self.layout, self._arrays, at, begin, end)
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
        ends = [Commit(0, full, commits[0].since, block)] if full <= most else []
        ends += [commit for commit in commits if begin < commit.rows < min(full, most + 1)]
        for end in ends:
            found, now = list[list[int]](), sums.copy()
            with suppress(DataError, OSError, ValueError):
                now.advance(end.rows, end.since, lambda _, block: found.append(block[0].tolist()))  # noqa: B023
                if (found[0] if found else now.now) == end.sums:
                    return end.rows
        return begin

    def told_of(self) -> int:
        """How many rows were committed, or seem to have been, be they whole or not."""
        numbers = [commit.rows for commit in read_commits(self._places, self.layout)]
        with suppress(DataError):
            numbers.append(self._live.committed)
        return min(max(numbers, default=0), self.layout.rows)

    def not_flushed(self) -> int:
        """How many rows were written behind those ``committed`` speaks of; 0 for a copy, of which that is not known."""
        with reading(self.path):
            if not self._promised(self._origin)[0]:
                return 0
            written = min(self._live.counted, self.layout.rows)
            return max(0, written - self._look())

    def extent(self, rows: int) -> TailExtent:
        """The first ``rows`` rows, of those ``committed`` spoke of."""
        since = np.where(self._since > rows, 0, self._since)
        extents = column_extents_of(self.layout, self._arrays, since, self._values, rows, self._same(since, rows))
        self._made = rows, since, extents
        extent = TailExtent(self.layout, extents, rows)
        extent.token = self.token
        return extent

    def _same(self, since: npt.NDArray[np.int64], rows: int) -> dict[str, ColumnExtent]:
        """The columns that were made last and are the same with other rows: no null came, nor the first of another
        length.
        """
        before, then, known = self._made
        return {
            name: known[name]
            for (name, column), nulls, now, was in zip(
                self.layout.columns.items(), self._nulls, since.tolist(), then.tolist(), strict=True
            )
            if name in known and not column.is_object and now == was and not nulls[before:rows].any()
        }

    def close(self) -> None:
        """Let go of the files; what was read of them stays."""
        if self._objects is not None:
            self._objects.close()


def _map_layout(
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
