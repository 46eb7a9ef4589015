"""Where the chunks of a column lie: looked up the first time that a window touches them, and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import element_of, locate_values
from mouse_core._arrow.column_types import Reading
from mouse_core._arrow.dense_copies import IRREGULAR, UNKNOWN, DenseCopies
from mouse_core._arrow.windows import Int64s, distinct
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.errors import DataError

# So many chunks are looked up one by one.
_FEW = 8


class ChunkPlaces:
    """Where the chunks of one column of one segment lie; filled in as chunks are touched, and shared by snapshots.

    Args:
        rows: The rows of each chunk, int64 ``[chunks]``.
    """

    def __init__(self, rows: Int64s) -> None:
        self.rows = rows
        self.begin = np.full(len(rows), UNKNOWN, np.int64)
        self.width = np.zeros(len(rows), np.int64)
        self.largest = np.full(len(rows), UNKNOWN, np.int64)
        self.lock = ProcessLock()
        self._copies: dict[str, DenseCopies] = {}

    def has_copies(self, reading: str) -> bool:
        """Whether somebody has asked for such ``copies``."""
        return reading in self._copies

    def copies(self, reading: str, row_bytes: int) -> DenseCopies:
        """The dense copies of its chunks for those who read them in the same way."""
        with self.lock:
            if reading not in self._copies:
                self._copies[reading] = DenseCopies(self.rows, row_bytes)
            return self._copies[reading]

    def __len__(self) -> int:
        return len(self.begin)

    def known(self) -> tuple[Int64s, Int64s]:
        """Where every chunk's values begin, and how many a row has, as far as that is known now."""
        with self.lock:
            return self.begin.copy(), self.width.copy()


class ColumnPart(Protocol):
    """One column of one segment, as ``Column`` needs it."""

    @property
    def places(self) -> ChunkPlaces:
        """Where its chunks lie."""
        ...

    @property
    def image_roots(self) -> Sequence[str]:
        """The folders in which images that it names by path may lie."""
        ...

    def chunk(self, number: int) -> pa.Array:
        """The values of one chunk."""
        ...

    def alike(self, chunks: Int64s) -> tuple[int, Int64s, npt.NDArray[np.bool_]] | None:
        """A chunk, how many bytes behind it the values of ``chunks`` lie, and for which of these that is so."""
        ...


class HasParts(Protocol):
    """A segment, as ``Column`` needs it."""

    @property
    def extent(self) -> object:
        """See ``Segment``."""
        ...

    @property
    def addresses(self) -> Mapping[str, tuple[int, int]]:
        """See ``Segment``."""
        ...

    def part(self, name: str) -> ColumnPart:
        """One of its columns."""
        ...


class Growth(NamedTuple):
    """How segments differ from earlier ones that rows were appended to.

    Args:
        kept: How many are the same.
        appended: The others, each of one chunk. The first may be the last of the earlier ones, grown.
        replaced: That one as it was; None if all of the earlier ones are kept.
    """

    kept: int
    appended: Sequence[HasParts]
    replaced: HasParts | None


class ColumnParts:
    """A column in every segment; those of segments that came later are made when they are asked for.

    Args:
        name: The column's name.
        parts: The column in segments.
        count: How many of these there are.
        later: The segments behind them.
    """

    def __init__(
        self, name: str, parts: Sequence[ColumnPart], count: int | None = None, later: Sequence[HasParts] = ()
    ) -> None:
        self._name, self._parts, self._later = name, parts, later
        self._count = len(parts) if count is None else count

    @memo
    def every(self) -> Sequence[ColumnPart]:
        """All of them."""
        return [*self._parts[: self._count], *(segment.part(self._name) for segment in self._later)]

    @property
    def has_grown(self) -> bool:
        """Whether some segments came later."""
        return bool(self._later)

    def forward(self, kept: int, segments: Sequence[HasParts]) -> ColumnParts:
        """The same over other segments, of which the first ``kept`` are the same and these the rest."""
        if "every" in self.__dict__:
            return ColumnParts(self._name, self.every, kept, segments)
        more = self._later[: max(0, kept - self._count)]
        return ColumnParts(self._name, self._parts, min(kept, self._count), [*more, *segments])


class ColumnChunks:
    """A column over all segments of a snapshot, and where the values of its chunks lie.

    Args:
        reading: How it is read.
        parts: The column in every segment.
    """

    def __init__(self, reading: Reading, parts: ColumnParts) -> None:
        self.reading = reading
        self.name, self.kind, self.shape, self.width = reading.name, reading.kind, reading.shape, reading.width
        self._stored = reading.dtype
        self._column_parts = parts
        self._lock = ProcessLock()

    def forward(self, growth: Growth) -> Self:
        """The same column with rows appended. What it knows of each segment is found when it is asked for."""
        return type(self)(self.reading, self._column_parts.forward(growth.kept, growth.appended))

    @property
    def _parts(self) -> Sequence[ColumnPart]:
        """The column in every segment."""
        return self._column_parts.every

    @memo
    def _first_chunk(self) -> Int64s:
        return np.cumsum([0, *(len(part.places) for part in self._parts)])

    @memo
    def _tables(self) -> tuple[Int64s, Int64s]:
        """Where the values of every chunk begin, and how many a row has, as far as that is known."""
        begins, widths = zip(*(part.places.known() for part in self._parts), strict=True)
        return np.concatenate(begins), np.concatenate(widths)

    def begins_so_far(self) -> Int64s:
        """``begins`` of all chunks, ``UNKNOWN`` for those that nobody has looked at."""
        begin, width = self._tables
        with self._lock:
            return np.where((begin != UNKNOWN) & (width != self.width), IRREGULAR, begin)

    def begins(self, chunks: Int64s) -> Int64s:
        """The address of the first value of each of some chunks; ``IRREGULAR`` where rows do not lie side by side."""
        begin, width = self._addresses(chunks)
        return np.where(self._is_in_place(width), begin, IRREGULAR)

    def _is_in_place(self, width: Int64s) -> npt.NDArray[np.bool_]:
        """Whether chunks that begin somewhere, with so many values a row, can be copied from there."""
        in_place: npt.NDArray[np.bool_] = (width == self.width) & (self.kind.value_type != "bool")
        return in_place

    def lies_in(self, segment: HasParts) -> bool:
        """Whether the values of a segment of appended rows are copied from where they lie."""
        return self.name in segment.addresses and bool(self._is_in_place(np.array(segment.addresses[self.name][1])))

    def _by_part(self, chunks: Int64s) -> Iterator[tuple[int, int, int]]:
        """The parts that some chunks (ascending) belong to: number, and where its chunks begin and end among these."""
        ends = np.searchsorted(chunks, self._first_chunk[1:]).tolist()
        for number, (begin, end) in enumerate(pairwise([0, *ends])):
            if begin < end:
                yield number, begin, end

    def _addresses(self, chunk: Int64s) -> tuple[Int64s, Int64s]:
        """Where each chunk's values begin (an address; for booleans 8 times that and the bit's number), or
        ``IRREGULAR``, and the values in a row.
        """
        if len(chunk) <= _FEW and self._column_parts.has_grown and "_tables" not in self.__dict__:
            # The tables are as long as the snapshot, of which there may be another soon.
            found = np.array([self._locate_chunk(number) for number in chunk.tolist()], np.int64).reshape(-1, 2)
            return found[:, 0], found[:, 1]
        begins, widths = self._tables
        unknown = begins[chunk] == UNKNOWN
        new = distinct(chunk[unknown], len(begins)) if unknown.any() else chunk[:0]
        if len(new) > _FEW:
            for number, begin, end in self._by_part(new):
                if end - begin > _FEW:
                    self._locate_alike(number, new[begin:end])
            new = new[begins[new] == UNKNOWN]
        for number in new.tolist():
            self._locate_chunk(number)
        with self._lock:
            return begins[chunk], widths[chunk]

    def _locate_alike(self, part_number: int, numbers: Int64s) -> None:
        """Locate those of some chunks of one part that are laid out like one that is known."""
        part, first = self._parts[part_number], int(self._first_chunk[part_number])
        found = part.alike(numbers - first)
        if found is None:
            return
        template, distance, alike = found
        self._locate_chunk(first + template)
        scale = 8 if self.kind.value_type == "bool" else 1
        with part.places.lock:
            begin, width = int(part.places.begin[template]), int(part.places.width[template])
            alike = alike & (distance % self._stored.itemsize == 0)
            if begin < 0 or not alike.any():
                return
            numbers, begins = numbers[alike], begin + scale * distance[alike]
            # Whoever sees where they begin must find how wide they are, also in a child forked in between.
            part.places.width[numbers - first], part.places.begin[numbers - first] = width, begins
        with self._lock:
            self._tables[1][numbers], self._tables[0][numbers] = width, begins

    def _locate_chunk(self, number: int) -> tuple[int, int]:
        """Where the values of one chunk begin, and how many a row has."""
        part_number = self._part_of(number)
        places = self._parts[part_number].places
        local = number - int(self._first_chunk[part_number])
        with places.lock:
            if places.begin[local] == UNKNOWN:
                places.width[local], places.begin[local] = self._first_value_of(self._chunk_values(number))
            begin, width = int(places.begin[local]), int(places.width[local])
        tables = self.__dict__.get("_tables")
        if tables is not None:
            with self._lock:
                tables[1][number], tables[0][number] = width, begin
        return begin, width

    def _first_value_of(self, values: pa.Array) -> tuple[int, int]:
        """The values in a row of a chunk and where they begin, ``IRREGULAR`` if rows do not lie in order."""
        try:
            located = locate_values(values)
            if located is None:
                values.validate(full=True)  # whoever reads it must be able to trust its offsets
        except ValueError as error:
            raise DataError(f"column {self.name!r}: {error}") from error
        if located is None:
            return 0, IRREGULAR
        address, shape = located
        # Rows of nested lists must have the declared shape, not only as many values.
        if len(shape) > 1 and shape != self.shape and (*shape, 1) != self.shape:
            return 0, IRREGULAR
        if self.kind.value_type != "bool" and element_of(address, self._stored.itemsize) is None:
            return 0, IRREGULAR
        return prod(shape), address

    def _chunk_values(self, number: int) -> pa.Array:
        part_number = self._part_of(number)
        return self._parts[part_number].chunk(number - int(self._first_chunk[part_number]))

    def _image_roots(self, number: int) -> Sequence[str]:
        """The folders in which the images that a chunk names by path may lie."""
        return self._parts[self._part_of(number)].image_roots

    def _part_of(self, number: int) -> int:
        return int(np.searchsorted(self._first_chunk, number, side="right")) - 1
