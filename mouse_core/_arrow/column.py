"""Columns: rows of chunks (record batches, one after another, over all segments of a store), and where these lie.

Where a chunk's values begin is looked up the first time that a window touches it, and kept. From then on ``ByteViews``
copies what lies there side by side, or in a dense copy of the chunk; everything else is gathered by ``gathering``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import (
    element_of,
    element_of_all,
    flat_view,
    largest_in_runs,
    list_offsets,
    locate_checked,
    runs_equal,
)
from mouse_core._arrow.column_types import ColumnType
from mouse_core._arrow.dense import IRREGULAR, UNKNOWN, DenseBudget, DenseCopies, dense_rows
from mouse_core._arrow.windows import Int64s, distinct
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core._base.memory import sparse_zeros
from mouse_core.errors import DataError

if TYPE_CHECKING:
    from mouse_core.readahead.backing import RemoteMemory

# ---------------------------------------------------------------------- record batches that are laid out alike
#
# In Arrow's IPC format a record batch is a message of metadata, which says how many rows, nulls and bytes each column
# has and at which offsets, and a body with the bytes. Batches with the same metadata have every value at the same
# distance from the body's beginning; what remains to be compared is the offsets of lists, which are data. A file of
# ``datasets`` has such a batch for every 1,000 rows, 100,000 of them in a hundred million steps: asking pyarrow about
# each of them, column by column, takes ten times as long as reading their windows.

# Metadata takes some 60 bytes a column; tables of hundreds of columns are looked up one by one.
_LONGEST_METADATA = 1 << 14
_UNKNOWN = np.iinfo(np.int64).min
_NOT_ALIKE = _UNKNOWN + 1


class Alike:
    """The record batches of a table that have the metadata of one of them, the template.

    Args:
        table: Read from mapped files; all columns of a chunk are of one record batch.
        starts: The first row of every chunk, and the end, int64 ``[chunks + 1]``.
    """

    def __init__(self, table: pa.Table, starts: Int64s) -> None:
        self._table = table
        self._sizes = np.diff(starts)
        # The first chunk of a slice is often short.
        self.template = 1 if len(self._sizes) > 2 and self._sizes[0] != self._sizes[1] else 0
        self._distance = np.full(len(self._sizes), _UNKNOWN, np.int64)
        self._lock = ProcessLock()
        # The template's list offsets that others' were compared with, by address, and their bytes.
        self._lists: dict[int, int] = {}
        # Address ranges of files that were met: where each begins, and where it ends.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._metadata = self._find_metadata()

    def distances(self, chunks: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return the distance in bytes of each chunk from the template, and a mask of chunks with an equal layout."""
        with self._lock:
            unknown = chunks[self._distance[chunks] == _UNKNOWN]
            if len(unknown):
                self._distance[unknown] = self._compare(unknown)
            found = self._distance[chunks]
        return found, found != _NOT_ALIKE

    def same_lists(
        self, column: pa.ChunkedArray, distance: Int64s, alike: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the alike chunks that also have the template's list offsets in ``column``."""
        from mouse_core.readahead.local import in_parts  # loaded when chunks are compared

        if not self._holds(column):
            return np.zeros(len(alike), np.bool_)
        alike = alike.copy()
        for address, count, dtype in list_offsets(column.chunk(self.template)):
            first = element_of(address, dtype.itemsize)
            if first is None or (distance[alike] % dtype.itemsize).any():
                return np.zeros(len(alike), np.bool_)
            wanted = flat_view(dtype)[first : first + count]
            self._lists[address] = wanted.nbytes
            (positions,) = np.nonzero(alike)
            for part in in_parts(address + distance[positions], wanted.nbytes):
                some = positions[part]
                alike[some] = runs_equal(first + distance[some] // dtype.itemsize, wanted)
        return alike

    def _holds(self, column: pa.ChunkedArray) -> bool:
        """Whether the template's body is where the column's values lie: not those of one that was cast."""
        if self._metadata is None:
            return False
        buffers = [buffer for buffer in column.chunk(self.template).buffers() if buffer is not None and buffer.size]
        parents = [buffer.parent for buffer in buffers]
        return all(parent is not None and parent.address == self._address for parent in parents)

    def _find_metadata(self) -> Int64s | None:
        """The template's message before its body, in words; None if it is not a message in uncompressed IPC."""
        body = self._find_body() if len(self._sizes) else None
        if body is None or not self._in_file(body):
            return None
        self._address, self._size = body.address, body.size
        before = min(_LONGEST_METADATA, self._address - self._begins[-1]) // 8
        element = element_of(self._address, 8)
        if element is None:
            return None
        words = flat_view(np.dtype(np.int64))[element - before : element]
        # A message is a continuation mark, the metadata's length, and the metadata.
        marks = words.view(np.int32).reshape(-1, 2)
        (marked,) = np.nonzero((marks[:, 0] == -1) & (marks[:, 1] == 8 * np.arange(before - 1, -1, -1)))
        return None if not len(marked) else words[int(marked[-1]) :].astype(np.int64)

    def _find_body(self) -> pa.Buffer | None:
        """The template's body, through a column and a buffer that are there to find those of other chunks."""
        for column in self._table.columns:
            if not pa.types.is_dictionary(column.type):
                for number, buffer in enumerate(column.chunk(self.template).buffers()):
                    if buffer is not None and buffer.size:
                        self._column, self._buffer = column, number
                        return self._body(self.template)
        return None

    def _body(self, chunk: int) -> pa.Buffer | None:
        """The body of a chunk's record batch, which is what its values' memory is a part of."""
        values = self._column.chunk(chunk)
        buffer = None if values.offset else values.buffers()[self._buffer]
        return None if buffer is None else buffer.parent

    def _in_file(self, body: pa.Buffer) -> bool:
        """Whether a body lies in a file that was met, which it is made to be."""
        file = bisect_right(self._begins, body.address) - 1
        if file < 0 or body.address + body.size > self._ends[file]:
            root = body
            while root.parent is not None:
                root = root.parent
            if root.size <= body.size:
                return False
            file = bisect_right(self._begins, root.address)
            self._begins.insert(file, root.address)
            self._ends.insert(file, root.address + root.size)
        return True

    def _compare(self, chunks: Int64s) -> Int64s:
        """The distance of each chunk, or ``_NOT_ALIKE``."""
        distance = np.full(len(chunks), _NOT_ALIKE, np.int64)
        if self._metadata is None:
            return distance
        length = self._metadata.nbytes
        positions, found = [], []
        (candidates,) = np.nonzero(self._sizes[chunks] == self._sizes[self.template])
        for position, chunk in zip(candidates.tolist(), chunks[candidates].tolist(), strict=True):
            body = self._body(chunk)
            if body is not None and body.size == self._size and self._in_file(body):
                address = body.address
                if not address % 8 and address - length >= self._begins[bisect_right(self._begins, address) - 1]:
                    positions.append(position)
                    found.append(address)
        if positions:
            from mouse_core.readahead.local import in_parts

            bodies, same = np.array(found), np.zeros(len(found), np.bool_)
            lists = [(bodies + (address - self._address), nbytes) for address, nbytes in list(self._lists.items())]
            for some in in_parts(bodies - length, length, lists):
                same[some] = runs_equal(element_of_all(bodies[some] - length, 8), self._metadata)
            distance[np.array(positions)[same]] = bodies[same] - self._address
        return distance


# So many chunks are looked up one by one.
_FEW = 8


@dataclass(frozen=True)
class Reading:
    """The options for reading a column, independent of its segments.

    Args:
        name: The column's name, for error messages.
        kind: Its type.
        shape: The shape of one row, images as ``(H, W, C)``.
        fill, pad: See ``spec.Field``.
        budget: The limit of dense copies; None for no dense copies.
        crop, decoder: See ``spec.Field``.
    """

    name: str
    kind: ColumnType
    shape: tuple[int, ...]
    fill: float | None = None
    pad: float | None = None
    budget: DenseBudget | None = None
    crop: tuple[int, int, int, int] | None = None
    decoder: Any = None

    @memo
    def width(self) -> int:
        """Values of a row."""
        return prod(self.shape)

    @memo
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of stored values."""
        return self.kind.dtype

    @memo
    def is_plain(self) -> bool:
        """Whether values may lie in memory as NumPy has them."""
        return self.kind.kind in ("scalar", "list")

    @memo
    def dense_budget(self) -> DenseBudget | None:
        """``budget``, where there may be dense copies."""
        # Copies have the stored dtype, even if another one is delivered: fill and pad must be exact in it.
        specials = [value for value in (self.fill, self.pad) if value is not None]
        return self.budget if self.is_plain and all(_is_exact(value, self.dtype) for value in specials) else None

    @memo
    def copies_key(self) -> str:
        """The key under which columns share dense copies."""
        return repr((self.shape, self.fill, self.pad))


def _is_exact(value: float, dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` holds a number as it is, or as any float does."""
    with np.errstate(all="ignore"):
        held = np.asarray(value).astype(dtype)
    return bool(held.item() == value) or bool(dtype.kind == "f" and np.isnan(value))


class ColumnPart:
    """One column of one segment, and where its chunks lie; filled in as chunks are touched, and shared by snapshots.

    Args:
        column: Gives the values; None where the segment has no such column, which reads as nulls.
        starts: The first row of every chunk of the segment, and the end, int64 ``[chunks + 1]``.
        same_chunks: Whether the column's own chunks begin there; otherwise each of them lies in one of the column's.
        alike: Which chunks are laid out alike.
        image_roots: The folders in which images that it names by path may lie.
    """

    # What its addresses are backed by. Whoever reads there waits for it; ``chunk`` gives values that stay.
    backing: RemoteMemory | None = None
    videos: Any = None  # that its frames are of: ``video.frames.VideoFiles``
    # How many chunks are looked up one by one, where that is no slower.
    few = _FEW

    def __init__(
        self,
        column: Callable[[], pa.ChunkedArray | None],
        starts: Int64s,
        *,
        same_chunks: bool,
        alike: Alike | None = None,
        image_roots: Sequence[str] = (),
    ) -> None:
        self._make_column, self._starts, self._same_chunks, self._alike = column, starts, same_chunks, alike
        self.image_roots = image_roots
        self.lock = ProcessLock()
        self._copies: dict[str, DenseCopies] = {}

    @memo
    def _column(self) -> pa.ChunkedArray | None:
        return self._make_column()

    # Of each chunk, made when asked for: its rows, where its values begin, how many a row has, the largest integer.
    rows = memo(lambda part: np.diff(part._starts))
    begin = memo(lambda part: sparse_zeros(len(part._starts) - 1, np.int64))
    width = memo(lambda part: sparse_zeros(len(part._starts) - 1, np.int64))
    largest = memo(lambda part: np.full(len(part._starts) - 1, -1, np.int64))

    def chunk(self, number: int) -> pa.Array:
        """The values of one chunk, without a copy."""
        first, end = self._starts[number : number + 2].tolist()
        if self._column is None:
            return pa.nulls(end - first)
        return self._column.chunk(number) if self._same_chunks else self._column.slice(first, end - first).chunk(0)

    def slices(self, wanted: Sequence[tuple[int, int, int]]) -> list[pa.Array]:
        """Return the row ranges of chunks: each chunk's number, first row and row count."""
        return [self.chunk(number).slice(row, count) for number, row, count in wanted]

    def prepare(self, numbers: Sequence[int]) -> None:
        """Have at once what it takes to locate some chunks, where it is not at hand."""

    def locate(self, number: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the begin of a chunk's values, and the shape of a row; see ``locate_checked``."""
        return locate_checked(self.chunk(number))

    def alike(self, chunks: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Chunks, among ``chunks`` or beside them, that are laid out as another one is.

        Yields:
            That one; the chunks; how many bytes behind it the values of each lie.
        """
        if self._alike is not None and self._column is not None:
            distance, alike = self._alike.distances(chunks)
            alike = self._alike.same_lists(self._column, distance, alike)
            yield self._alike.template, chunks[alike], distance[alike]

    def has_copies(self, reading: Reading) -> bool:
        """Whether somebody has asked for such ``copies``."""
        return reading.copies_key in self._copies

    def copies(self, reading: Reading) -> DenseCopies:
        """The dense copies of its chunks for those who read them in the same way."""
        with self.lock:
            if reading.copies_key not in self._copies:
                self._copies[reading.copies_key] = DenseCopies(self.rows, reading.width * reading.dtype.itemsize)
            return self._copies[reading.copies_key]

    def known(self) -> tuple[Int64s, Int64s]:
        """Return the begin of every chunk's values and the number per row, as far as known now."""
        with self.lock:
            return self.begin.copy(), self.width.copy()


class Growth(NamedTuple):
    """The difference between segments and the earlier ones that they extend.

    Args:
        kept: The number of unchanged segments.
        appended: The other segments (``store._segments.Segment``), each of one chunk. The first may be the last earlier
            one, grown.
        replaced: The earlier segments that are not kept, each of one chunk; most often one, or none.
    """

    kept: int
    appended: Sequence[Any]
    replaced: Sequence[Any]


class Column:
    """A column over all segments of a snapshot, and where the values of its chunks lie.

    Args:
        reading: How it is read.
        parts: The column in segments.
        later: The segments behind them, whose parts are made when they are asked for.
    """

    def __init__(self, reading: Reading, parts: Sequence[ColumnPart], later: Sequence[Any] = ()) -> None:
        self.reading = reading
        self.name, self.kind, self.shape, self.width = reading.name, reading.kind, reading.shape, reading.width
        self._stored = reading.dtype
        self._known_parts, self._later = parts, later

    def forward(self, growth: Growth) -> Column:
        """Return the column with appended rows. The properties of each segment are looked up on demand."""
        if "_parts" in self.__dict__:
            return Column(self.reading, self._parts[: growth.kept], growth.appended)
        later = [*self._later[: max(0, growth.kept - len(self._known_parts))], *growth.appended]
        return Column(self.reading, self._known_parts[: growth.kept], later)

    @memo
    def _parts(self) -> Sequence[ColumnPart]:
        """The column in every segment."""
        return [*self._known_parts, *(segment.part(self.name) for segment in self._later)]

    @memo
    def backings(self) -> Sequence[RemoteMemory]:
        """The remote memories behind some of the column's addresses."""
        return tuple({id(part.backing): part.backing for part in self._parts if part.backing is not None}.values())

    @memo
    def _lock(self) -> ProcessLock:
        """Whoever holds it may look at the tables; those of a single part are the part's."""
        return self._parts[0].lock if len(self._parts) == 1 else ProcessLock()

    @memo
    def _first_chunk(self) -> Int64s:
        return np.cumsum([0, *(len(part._starts) - 1 for part in self._parts)])

    @memo
    def _tables(self) -> tuple[Int64s, Int64s]:
        """The begin of every chunk's values and the number per row, as far as known."""
        if len(self._parts) == 1:
            return self._parts[0].begin, self._parts[0].width
        begins, widths = zip(*(part.known() for part in self._parts), strict=True)
        return np.concatenate(begins), np.concatenate(widths)

    def begins_so_far(self) -> Int64s | None:
        """``begins`` of all chunks, ``UNKNOWN`` for those that nobody has looked at; None where they are all."""
        if not any("begin" in part.__dict__ for part in self._parts):
            return None
        begin, width = self._tables
        with self._lock:
            return np.where((begin != UNKNOWN) & (width != self.width), IRREGULAR, begin)

    def begins(self, chunks: Int64s, rows: int = 0) -> Int64s:
        """The address of the first value of each of some chunks, or of their dense copies.

        ``IRREGULAR`` where rows do not lie side by side, ``UNKNOWN`` where a copy can be had by asking again.

        Args:
            chunks: Their numbers, ascending, int64 ``[n]``.
            rows: How many rows may be made dense.
        """
        first, width = self.addresses(chunks)
        found, budget = np.where(self._is_in_place(width), first, IRREGULAR), self.reading.dense_budget
        if budget is not None and len(irregular := np.flatnonzero(found == IRREGULAR)):
            for part, among, local in self._by_part(chunks[irregular]):
                allowed = -(-rows * len(local) // len(irregular))
                copied = part.copies(self.reading).begins(local, allowed, budget, part.chunk, self.dense)
                found[irregular[among]] = copied
        return found

    def dense(self, values: pa.Array, dtype: np.dtype[Any] | None = None) -> npt.NDArray[Any]:
        """Rows made dense, ``[n, width]`` of a dtype, by default the stored one; see ``dense_rows``."""
        reading = self.reading
        return dense_rows(values, self.shape, dtype or self._stored, fill=reading.fill, pad=reading.pad)

    def largest(self, chunks: Int64s) -> Int64s:
        """The largest integer in each of some regular chunks, where negative ones count as the largest int64.

        So do all of a chunk that is too long to be looked through for the few rows of a batch.

        Args:
            chunks: Their numbers, ascending, int64 ``[n]``.
        """
        found = np.empty(len(chunks), np.int64)
        for part, among, local in self._by_part(chunks):
            found[among] = self._largest_in_part(part, local)
        return found

    def _largest_in_part(self, part: ColumnPart, chunks: Int64s) -> Int64s:
        if not part.has_copies(self.reading):
            return self._largest_in_chunks(part, chunks)
        copies = part.copies(self.reading)
        copied = copies.begin[chunks] > 0
        found = np.empty(len(chunks), np.int64)
        found[copied] = self._largest_in_chunks(copies, chunks[copied])
        found[~copied] = self._largest_in_chunks(part, chunks[~copied])
        return found

    def _largest_in_chunks(self, table: ColumnPart | DenseCopies, chunks: Int64s) -> Int64s:
        if isinstance(table, ColumnPart) and table.backing is not None:
            return np.full(len(chunks), np.iinfo(np.int64).max)  # which nobody reads for that
        with table.lock:
            unknown = chunks[table.largest[chunks] < 0]
            for rows in np.unique(table.rows[unknown]).tolist():
                of = unknown[table.rows[unknown] == rows]
                table.largest[of] = largest_in_runs(self._stored, table.begin[of], rows * self.width)
            return table.largest[chunks]

    def _is_in_place(self, width: Int64s) -> npt.NDArray[np.bool_]:
        """Whether chunks that begin somewhere, with so many values a row, can be copied from there."""
        in_place: npt.NDArray[np.bool_] = (width == self.width) & (self.kind.value_type != "bool")
        return in_place

    def lies_in(self, segment: Any) -> bool:
        """Whether the values of a segment of appended rows are copied from where they lie."""
        return self.name in segment.addresses and bool(self._is_in_place(np.array(segment.addresses[self.name][1])))

    def _by_part(self, chunks: Int64s) -> Iterator[tuple[ColumnPart, slice, Int64s]]:
        """The parts that some chunks (ascending) belong to, where these are among them, and their numbers there."""
        ends = np.searchsorted(chunks, self._first_chunk[1:]).tolist()
        for number, (begin, end) in enumerate(pairwise([0, *ends])):
            if begin < end:
                yield self._parts[number], slice(begin, end), chunks[begin:end] - self._first_chunk[number]

    def addresses(self, chunk: Int64s) -> tuple[Int64s, Int64s]:
        """Return the begin of each chunk's values (an address; for booleans 8 times the address plus the bit's number),
        or ``IRREGULAR``, and the number of values per row.
        """
        if len(chunk) <= _FEW and self._later and "_tables" not in self.__dict__:
            # The tables are as long as the snapshot, of which there may be another soon.
            found = np.array([self._locate_chunk(number) for number in chunk.tolist()], np.int64).reshape(-1, 2)
            return found[:, 0], found[:, 1]
        begins, widths = self._tables
        unknown = begins[chunk] == UNKNOWN
        new = distinct(chunk[unknown], len(begins)) if unknown.any() else chunk[:0]
        for part, _, local in self._by_part(new) if len(new) else ():
            part.prepare(local.tolist())
        if len(new) > _FEW:
            for part, among, local in self._by_part(new):
                if len(local) > part.few:
                    self._locate_alike(part, int(new[among][0] - local[0]), local)
            new = new[begins[new] == UNKNOWN]
        for number in new.tolist():
            self._locate_chunk(number)
        with self._lock:
            return begins[chunk], widths[chunk]

    def _locate_alike(self, part: ColumnPart, first: int, local: Int64s) -> None:
        """Locate those of some chunks of one part, whose chunks are numbered from ``first`` on, that are like another.

        Of record batches 13,000 bytes after each other, of which the values of the first begin at address 70,400, those
        of the third begin at 96,400.
        """
        scale = 8 if self.kind.value_type == "bool" else 1
        for template, chunks, distance in part.alike(local):
            begin, width = self._locate_chunk(first + template)
            fits = (distance % self._stored.itemsize == 0) & (begin > 0)
            chunks, begins = chunks[fits], begin + scale * distance[fits]
            with part.lock:
                # Whoever sees where they begin must find how wide they are, also in a child forked in between.
                part.width[chunks], part.begin[chunks] = width, begins
            with self._lock:
                self._tables[1][first + chunks], self._tables[0][first + chunks] = width, begins

    def _locate_chunk(self, number: int) -> tuple[int, int]:
        """Return the begin of one chunk's values and the number per row."""
        part, local = self.part_of(number)
        with part.lock:
            if part.begin[local] == UNKNOWN:
                part.width[local], part.begin[local] = self._first_value_of(part, local)
            begin, width = int(part.begin[local]), int(part.width[local])
        if (tables := self.__dict__.get("_tables")) is not None:
            with self._lock:
                tables[1][number], tables[0][number] = width, begin
        return begin, width

    def _first_value_of(self, part: ColumnPart, number: int) -> tuple[int, int]:
        """The values in a row of a chunk and where they begin, ``IRREGULAR`` if rows do not lie in order."""
        try:
            located = part.locate(number)
        except DataError:
            raise  # what is computed, or lies in a file, says itself where it is wrong
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

    def part_of(self, number: int) -> tuple[ColumnPart, int]:
        """The part that a chunk is in, and its number there."""
        part = int(np.searchsorted(self._first_chunk, number, side="right")) - 1
        return self._parts[part], number - int(self._first_chunk[part])
