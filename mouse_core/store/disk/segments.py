"""Segments over the files of a folder: over one that rows are appended to, and over many sealed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.column import ColumnPart
from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.windows import Int64s
from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError, DataError
from mouse_core.store._segments import Segment
from mouse_core.store._tail.rows import Extent
from mouse_core.store.disk.leases import Lease
from mouse_core.store.disk.sealed import SealedFile, rows_of
from mouse_core.store.disk.tail import TailReader

FEWEST = 64
"""Sealed files that are one segment together, at least; fewer are a segment each, but for those of many record batches,
of which two are one: what is known of their chunks is kept once.
"""


class TailSegment(Segment):
    """Rows of a file that is appended to, as many as there were."""

    # Keeps the file where it lies, for other processes that open it later.
    lease = Lease()
    _where: tuple[Path, str, int, str, str]
    _show: Callable[[], None] | None = None

    @classmethod
    def of(
        cls,
        extent: Extent,
        image_roots: tuple[str, ...],
        place: tuple[object, int],
        where: tuple[Path, str, int, str, str],
        show: Callable[[], None] | None = None,
        lease: Lease | None = None,
    ) -> TailSegment:
        """The rows that an extent has now.

        Args:
            extent: It.
            image_roots: See ``Segment``.
            place: See ``Segment``.
            where: The folder, the name of the file, how many rows of the folder were before its first, and the
                identities of file and store.
            show: Lets other processes see the rows.
            lease: Of the state of the folder that names the file.
        """
        segment = cls.of_extent(extent, image_roots)
        assert isinstance(segment, TailSegment)
        segment.place, segment._where, segment._show = place, where, show
        if lease is not None:
            segment.lease = lease
        return segment

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the file, or the one that has the rows by then.
        if self._show is not None:
            self._show()
        return rows_at, (self._where, self.num_rows, self._named_roots)


def rows_at(where: tuple[Path, str, int, str, str], count: int, image_roots: tuple[str, ...]) -> Segment:
    """Rows of a folder, wherever they lie by now.

    Args:
        where: See ``TailSegment.of``.
        count: How many they are.
        image_roots: See ``Segment``.

    Raises:
        DataError: They are not kept any more.
    """
    folder, name, first, file_identity, identity = where
    try:
        tail = TailReader(folder / name, identity=file_identity)
        if tail.committed() >= count:
            return TailSegment.of(tail.extent(count), image_roots, (tail.token, first), where)
    except (ConfigError, DataError):
        pass  # it was sealed since, or another store is there
    segment = Segment(rows_of(folder, first, count, identity), image_roots=image_roots)
    segment.extent = object()  # appended rows, which go on from those before
    return segment


class PartOfFiles(ColumnPart):
    """One column of some files; a file is opened, and a record batch made, when a chunk of it is touched.

    Args:
        files: They; not their segments, see ``SealedSegment``.
        first: The number of the first chunk of each, int64 ``[files]``.
        name: The column's.
        segment: Which it is a part of.
    """

    few = 1

    def __init__(self, files: Sequence[SealedFile], first: Int64s, name: str, segment: Segment) -> None:
        is_image = column_type(segment.types[name]).is_encoded
        roots = segment.image_roots if is_image else ()
        super().__init__(_no_column, segment.chunk_starts, same_chunks=True, image_roots=roots)
        self._files, self._first, self._name = files, first, name
        self.videos = segment._videos

    def _of(self, chunk: int) -> int:
        """Which file a chunk is in."""
        return int(np.searchsorted(self._first, chunk, side="right")) - 1

    def chunk(self, number: int) -> pa.Array:
        """See ``ColumnPart``."""
        file = self._of(number)
        return self._files[file].chunk(self._name, number - int(self._first[file]))

    def alike(self, chunks: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """See ``ColumnPart``; those of each file."""
        ends = np.searchsorted(chunks, [*self._first[1:], len(self._starts) - 1])
        for file, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
            if begin < end:
                first = int(self._first[file])
                there, distance = self._files[file].strides(chunks[begin:end] - first)
                if len(there):
                    yield first, there + first, distance


def _no_column() -> None:
    """What stands for a column that lies in no table."""


class SealedSegment(Segment):
    """The rows of a sealed file, in one chunk; making one opens nothing.

    Args:
        file: The file.
        image_roots: Folders in which images that rows name by path may lie, and videos.
        folder: What stands for the store's folder; see ``Segment.place``.
        videos: Those that frames are of, if there are any.
    """

    def __init__(self, file: SealedFile, image_roots: tuple[str, ...], folder: object, videos: Any = None) -> None:
        self.file, self.num_rows, self.place = file, file.sealed.rows, (folder, file.first)
        self.extent = object() if file.sealed.appended else None
        self._named_roots, self.sealed_bytes, self._videos = image_roots, file.sealed.bytes, videos
        self._parts, self._first_values = {}, {}
        size = self.file.sealed.batch_rows or self.num_rows
        starts = np.append(np.arange(0, self.num_rows, size), self.num_rows)
        self.__dict__.update(chunk_starts=starts, _same_chunks=True, is_mapped=False)

    @property
    def recording(self) -> object:
        """See ``Segment``."""
        return self.file.sealed.load or None

    @property
    def table(self) -> pa.Table:
        """The steps."""
        return self.file.table

    def column(self, name: str) -> pa.ChunkedArray | None:
        """See ``Segment``."""
        return self.file.column(name) if name in self.types else None

    def part(self, name: str) -> ColumnPart:
        """See ``Segment``; a record batch is made when it is touched."""
        if self.file.sealed.batch_rows and name not in self._parts and name in self.types:
            self._parts.setdefault(name, PartOfFiles([self.file], np.zeros(1, np.int64), name, self))
        return super().part(name)

    @memo
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return dict(zip(self.file.schema.names, self.file.schema.types, strict=True))

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """See ``Segment``; a column that is known to be null throughout is not looked into."""
        return None if name in self.file.sealed.nulls else super().first_value(name, rows)

    def _find_first(self, name: str) -> int | None:
        for number, first in enumerate(self.chunk_starts[:-1].tolist()):
            chunk = self.file.chunk(name, number)
            if chunk.null_count < len(chunk):
                return int(first + np.argmin(chunk.is_null()))
        return None

    def _slice(self, row: int, count: int) -> pa.Table:
        return self.file.take(row, count)

    def has_value(self, name: str, rows: int) -> bool:
        """See ``Segment``; whether all values of a column are null is known of the whole file."""
        if rows != self.num_rows or name not in self.types:
            return super().has_value(name, rows)
        return name not in self.file.sealed.nulls

    @memo
    def _make_columns(self) -> dict[str, Callable[[], pa.ChunkedArray]]:  # type: ignore[override]
        # Of the file, not of the segment: a part that refers to its segment would keep the file mapped for too long.
        return {name: partial(self.file.column, name) for name in self.file.schema.names}

    def __reduce__(self) -> tuple[Any, ...]:
        return SealedSegment, (self.file, self._named_roots, self.place, self._videos)


class SealedSegments(Segment):
    """The rows of many sealed files that follow each other; making one opens none.

    What a loader does once for every segment it does here once for ten thousand files.

    Args:
        members: The files' segments, of the same columns.
        earlier: Others that may have some of these members: where their values lie is known from then on.
    """

    def __init__(self, members: Sequence[SealedSegment], earlier: Sequence[SealedSegments] = ()) -> None:
        first = members[0]
        self.members, self.place = list(members), first.place
        self.extent = None if first.extent is None else object()
        self._named_roots, self.sealed_bytes = first.image_roots, sum(one.sealed_bytes for one in members)
        self._videos = first._videos
        self._parts, self._first_values = {}, {}
        # The first row of each, and the end; the first chunk of each, and how many there are.
        self._starts = np.cumsum([0, *(one.num_rows for one in members)], dtype=np.int64)
        self._first_chunk = np.cumsum([0, *(len(one.chunk_starts) - 1 for one in members)], dtype=np.int64)
        self.num_rows = int(self._starts[-1])
        starts = self._starts
        if self._first_chunk[-1] > len(members):
            parts = [one.chunk_starts[:-1] + first for one, first in zip(members, starts[:-1].tolist(), strict=True)]
            starts = np.concatenate([*parts, starts[-1:]])
        self.__dict__.update(chunk_starts=starts, _same_chunks=True, is_mapped=False)
        for other in earlier:
            self._take_over(other)

    def _take_over(self, other: SealedSegments) -> None:
        """Know of members what another one knows of them."""
        numbers = {id(one): number for number, one in enumerate(self.members)}
        common = [(theirs, numbers[id(one)]) for theirs, one in enumerate(other.members) if id(one) in numbers]
        theirs, ours = np.array(common, np.int64).reshape(-1, 2).T
        if len(self.chunk_starts) > len(self.members) + 1:
            theirs, ours = _chunks_of(other._first_chunk, theirs), _chunks_of(self._first_chunk, ours)
        for name, part in list(other._parts.items()):
            known = self.part(name)
            with part.lock:
                for table in {"begin", "width", "largest"} & part.__dict__.keys():
                    getattr(known, table)[ours] = getattr(part, table)[theirs]

    @property
    def recording(self) -> object:
        """See ``Segment``."""
        return self.members[0].recording

    @property
    def table(self) -> pa.Table:
        """The steps; opens every file."""
        return pa.concat_tables([one.table for one in self.members])

    @memo
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return self.members[0].types

    @memo
    def _files(self) -> list[SealedFile]:
        return [one.file for one in self.members]

    def part(self, name: str) -> ColumnPart:
        """See ``Segment``; a file is opened when a chunk of it is touched."""
        if name not in self._parts and name in self.types:
            self._parts.setdefault(name, PartOfFiles(self._files, self._first_chunk[:-1], name, self))
        return super().part(name)

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """See ``Segment``; opens the files up to the one that has it."""
        for first, one, count in self._pieces(0, min(rows, self.num_rows)):
            found = one.first_value(name, count)
            if found is not None:
                return first + found[0], found[1]
        return None

    def has_value(self, name: str, rows: int) -> bool:
        """See ``Segment``."""
        if name not in self.types:
            return False
        return not rows or any(one.has_value(name, count) for _, one, count in self._pieces(0, rows))

    def take(self, row: int, count: int = 1) -> pa.Table:
        """See ``Segment``; opens the files that these rows are in."""
        parts = [one.take(max(row - first, 0), count) for first, one, count in self._pieces(row, count)]
        return parts[0] if len(parts) == 1 else pa.concat_tables(parts)

    def _pieces(self, row: int, count: int) -> Iterator[tuple[int, SealedSegment, int]]:
        """Which members some rows are in: the first row of each, and how many of the rows it has."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        while count > 0 and number < len(self.members):
            first, end = self._starts[number : number + 2].tolist()
            there = min(count, end - max(row, first))
            yield first, self.members[number], there
            number, count = number + 1, count - there

    def __reduce__(self) -> tuple[Any, ...]:
        return SealedSegments, (self.members,)


def _chunks_of(first: Int64s, members: Int64s) -> Int64s:
    """The chunks of some members; where theirs begin at 0, 3, 5 and 9, members 1 and 2 have 3, 4, 5, 6, 7, 8."""
    parts = [np.arange(first[member], first[member + 1]) for member in members.tolist()]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def together(segments: Sequence[Segment], before: Sequence[Segment] = ()) -> list[Segment]:
    """Segments, of which sealed ones that follow each other are one where they are many.

    New files are segments of their own, until there are enough of them for one more. Such a one takes in those before
    it that are not larger, so that there are few, and a row is taken into another one few times.

    Args:
        segments: A segment for each file.
        before: What was made of the segments that there were earlier; what is still the same is used again.
    """
    earlier = [one for one in before if isinstance(one, SealedSegments)]
    made: list[Segment] = []
    at = 0
    for one in earlier:
        if segments[at : at + len(one.members)] != one.members:
            break
        made.append(one)
        at += len(one.members)
    for key, some in groupby(segments[at:], _alike):
        alike = list(some)
        members = [one for one in alike if isinstance(one, SealedSegment)]
        if key is None or len(members) < (2 if key[-1] else FEWEST):
            made += alike
            continue
        while made and isinstance(last := made[-1], SealedSegments) and len(last.members) <= len(members):
            if _alike(last.members[0]) != key:
                break
            members = [*last.members, *members]
            del made[-1]
        made.append(SealedSegments(members, earlier))
    return made


def _alike(segment: Segment) -> tuple[int, bool, int, bool] | None:
    """What sealed segments have in common that can be one; last, whether they have many record batches."""
    sealed = segment.file.sealed if isinstance(segment, SealedSegment) else None
    return None if sealed is None else (sealed.schema, sealed.appended, sealed.load, sealed.batch_rows > 0)
