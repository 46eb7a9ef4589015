"""Columns, which consist of chunks (the record batches of all segments of a store in order), and the addresses of
chunks.

The address of a chunk's values is looked up at the first access and cached. With these addresses, ``ByteViews`` copies
contiguous values from the chunk or from a dense copy of the chunk, and ``gathering`` gathers all other values.
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
    from mouse_core.readahead import RemoteMemory

# ---------------------------------------------------------------------- record batches with equal layouts
#
# In Arrow's IPC format, a record batch is a metadata message and a body. The metadata contain, for each column, the
# number of rows, nulls and bytes, and the offsets of the column's buffers in the body. If two batches have equal
# metadata, every value has the same offset in both bodies. Only the offsets of lists are data, and must be compared. A
# file of ``datasets`` has a record batch for every 1,000 rows, so a hundred million rows have 100,000 batches. Locating
# each column of each batch through pyarrow takes ten times as long as reading the windows.

# Metadata have some 60 bytes for each column; for tables with hundreds of columns, batches are looked up one by one.
_LONGEST_METADATA = 1 << 14
_UNKNOWN = np.iinfo(np.int64).min
_NOT_ALIKE = _UNKNOWN + 1


class EqualLayouts:
    """The record batches of a table whose metadata equal the metadata of one batch, the template.

    Args:
        table: A table from mapped files; all columns of a chunk belong to one record batch.
        starts: The first row of every chunk, followed by the number of rows, int64 ``[chunks + 1]``.
    """

    def __init__(self, table: pa.Table, starts: Int64s) -> None:
        self._table = table
        self._sizes = np.diff(starts)
        # The first chunk of a slice is often short.
        self.template = 1 if len(self._sizes) > 2 and self._sizes[0] != self._sizes[1] else 0
        self._distance = np.full(len(self._sizes), _UNKNOWN, np.int64)
        self._lock = ProcessLock()
        # List offsets of the template with which other batches were compared: their addresses and sizes in bytes.
        self._lists: dict[int, int] = {}
        # Begins and ends of the address ranges of known files.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._metadata = self._find_metadata()

    def distances(self, chunks: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return the distance in bytes of each chunk from the template, and whether each chunk has the template's
        layout.
        """
        with self._lock:
            unknown = chunks[self._distance[chunks] == _UNKNOWN]
            if len(unknown):
                self._distance[unknown] = self._compare(unknown)
            found = self._distance[chunks]
        return found, found != _NOT_ALIKE

    def same_lists(
        self, column: pa.ChunkedArray, distance: Int64s, alike: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Return whether each of the given chunks with the template's layout also has the template's list offsets in
        ``column``.
        """
        from mouse_core.readahead import in_parts  # loaded when chunks are compared

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
        """Whether the column's values are stored in the template's body; after a cast, the values are stored in other
        memory."""
        if self._metadata is None:
            return False
        buffers = [buffer for buffer in column.chunk(self.template).buffers() if buffer is not None and buffer.size]
        parents = [buffer.parent for buffer in buffers]
        return all(parent is not None and parent.address == self._address for parent in parents)

    def _find_metadata(self) -> Int64s | None:
        """Return the metadata message of the template as int64 words; None if the template is not an uncompressed IPC
        message.
        """
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
        """Return the template's body, and record the column and the buffer from which the bodies of other batches are
        found.
        """
        for column in self._table.columns:
            if not pa.types.is_dictionary(column.type):
                for number, buffer in enumerate(column.chunk(self.template).buffers()):
                    if buffer is not None and buffer.size:
                        self._column, self._buffer = column, number
                        return self._body(self.template)
        return None

    def _body(self, chunk: int) -> pa.Buffer | None:
        """Return the body of a chunk's record batch: the parent of the buffer with its values."""
        values = self._column.chunk(chunk)
        buffer = None if values.offset else values.buffers()[self._buffer]
        return None if buffer is None else buffer.parent

    def _in_file(self, body: pa.Buffer) -> bool:
        """Whether a body is part of a file; a new file is recorded."""
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
        """Return the distance of each chunk from the template, or ``_NOT_ALIKE``."""
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
            from mouse_core.readahead import in_parts

            bodies, same = np.array(found), np.zeros(len(found), np.bool_)
            lists = [(bodies + (address - self._address), nbytes) for address, nbytes in list(self._lists.items())]
            for some in in_parts(bodies - length, length, lists):
                same[some] = runs_equal(element_of_all(bodies[some] - length, 8), self._metadata)
            distance[np.array(positions)[same]] = bodies[same] - self._address
        return distance


# Up to this number, chunks are looked up one by one.
_FEW = 8


@dataclass(frozen=True)
class ReadOptions:
    """The options for reading a column, which do not depend on segments.

    Args:
        name: The name of the column, for error messages.
        kind: The type of the column.
        shape: The shape of one row; for images ``(H, W, C)``.
        fill, pad: See ``spec.Field``.
        budget: The limit for dense copies; None: no dense copies are made.
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
        """Number of values in a row."""
        return prod(self.shape)

    @memo
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of stored values."""
        return self.kind.dtype

    @memo
    def is_plain(self) -> bool:
        """Whether values can be stored in NumPy's layout."""
        return self.kind.kind in ("scalar", "list")

    @memo
    def dense_budget(self) -> DenseBudget | None:
        """The budget if dense copies are allowed, else None."""
        # Dense copies have the stored dtype for every delivered dtype, so the stored dtype must represent fill and pad
        # exactly.
        specials = [value for value in (self.fill, self.pad) if value is not None]
        return self.budget if self.is_plain and all(_is_exact(value, self.dtype) for value in specials) else None

    @memo
    def copies_key(self) -> str:
        """The key by which columns share dense copies."""
        return repr((self.shape, self.fill, self.pad))


def _is_exact(value: float, dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` represents a number exactly; NaN counts as exact in any float dtype."""
    with np.errstate(all="ignore"):
        held = np.asarray(value).astype(dtype)
    return bool(held.item() == value) or bool(dtype.kind == "f" and np.isnan(value))


class ColumnPart:
    """One column of one segment, and the addresses of its chunks, which are located on demand and shared by snapshots.

    Args:
        column: Function that returns the values of the column; returns None if the segment lacks the column, which is
            then read as nulls.
        starts: The first row of every chunk of the segment, followed by the number of rows, int64 ``[chunks + 1]``.
        same_chunks: Whether the column's chunks begin at ``starts``; otherwise each range of ``starts`` lies within one
            chunk.
        alike: The object that finds chunks with equal layouts.
        image_roots: Allowed folders for images that rows name by path.
    """

    # The remote memory that contains the addresses; readers of an address must wait for it. The values that ``chunk``
    # returns stay valid.
    backing: RemoteMemory | None = None
    videos: Any = None  # the videos of a column of frames, ``video.frames.VideoFiles``
    # Number of chunks up to which looking up one by one is as fast.
    few = _FEW

    def __init__(
        self,
        column: Callable[[], pa.ChunkedArray | None],
        starts: Int64s,
        *,
        same_chunks: bool,
        alike: EqualLayouts | None = None,
        image_roots: Sequence[str] = (),
    ) -> None:
        self._make_column, self._starts, self._same_chunks, self._alike = column, starts, same_chunks, alike
        self.image_roots = image_roots
        self.lock = ProcessLock()
        self._copies: dict[str, DenseCopies] = {}

    @memo
    def _column(self) -> pa.ChunkedArray | None:
        return self._make_column()

    # For each chunk, computed on demand: number of rows, start of the values, values per row, largest integer.
    rows = memo(lambda part: np.diff(part._starts))
    begin = memo(lambda part: sparse_zeros(len(part._starts) - 1, np.int64))
    width = memo(lambda part: sparse_zeros(len(part._starts) - 1, np.int64))
    largest = memo(lambda part: np.full(len(part._starts) - 1, -1, np.int64))

    def chunk(self, number: int) -> pa.Array:
        """Return the values of one chunk, without a copy."""
        first, end = self._starts[number : number + 2].tolist()
        if self._column is None:
            return pa.nulls(end - first)
        return self._column.chunk(number) if self._same_chunks else self._column.slice(first, end - first).chunk(0)

    def slices(self, wanted: Sequence[tuple[int, int, int]]) -> list[pa.Array]:
        """Return the rows of several ranges; each item of ``wanted`` is the index of a chunk, the first row and the
        number of rows.
        """
        return [self.chunk(number).slice(row, count) for number, row, count in wanted]

    def prepare(self, numbers: Sequence[int]) -> None:
        """Read, for all given chunks together, the metadata that are needed to locate the chunks. Metadata in memory
        are not read again.
        """

    def locate(self, number: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the start of a chunk's values and the shape of a row; see ``locate_checked``."""
        return locate_checked(self.chunk(number))

    def alike(self, chunks: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield groups of chunks with equal layouts; a group can include chunks that are not in ``chunks``.

        Yields:
            The index of a template chunk; the indices of the chunks with the template's layout; the distance in bytes
            of each chunk from the template.
        """
        if self._alike is not None and self._column is not None:
            distance, alike = self._alike.distances(chunks)
            alike = self._alike.same_lists(self._column, distance, alike)
            yield self._alike.template, chunks[alike], distance[alike]

    def has_copies(self, reading: ReadOptions) -> bool:
        """Whether ``copies`` was already called with these reading options."""
        return reading.copies_key in self._copies

    def copies(self, reading: ReadOptions) -> DenseCopies:
        """Return the dense copies of the chunks, which all readers with equal shape, fill and pad share."""
        with self.lock:
            if reading.copies_key not in self._copies:
                self._copies[reading.copies_key] = DenseCopies(self.rows, reading.width * reading.dtype.itemsize)
            return self._copies[reading.copies_key]

    def known(self) -> tuple[Int64s, Int64s]:
        """Return the start of every chunk's values, ``UNKNOWN`` if not looked up, and the number of values per row."""
        with self.lock:
            return self.begin.copy(), self.width.copy()


class Growth(NamedTuple):
    """The difference between the segments of a later and an earlier snapshot, where the later segments extend the
    earlier segments.

    Args:
        kept: The number of unchanged segments.
        appended: The other segments (``store._segments.Segment``), each of one chunk. The first of these segments may
            be the last earlier segment, with appended rows.
        replaced: The earlier segments that are not kept, each of one chunk; usually at most one.
    """

    kept: int
    appended: Sequence[Any]
    replaced: Sequence[Any]


class Column:
    """A column over all segments of a snapshot, and the addresses of its chunks' values.

    Args:
        reading: The options for reading the column.
        parts: The column's parts in the first segments.
        later: The later segments, whose parts are created on demand.
    """

    def __init__(self, reading: ReadOptions, parts: Sequence[ColumnPart], later: Sequence[Any] = ()) -> None:
        self.reading = reading
        self.name, self.kind, self.shape, self.width = reading.name, reading.kind, reading.shape, reading.width
        self._stored = reading.dtype
        self._known_parts, self._later = parts, later

    def forward(self, growth: Growth) -> Column:
        """Return the column for a snapshot with appended rows. The properties of each segment are looked up on
        demand.
        """
        if "_parts" in self.__dict__:
            return Column(self.reading, self._parts[: growth.kept], growth.appended)
        later = [*self._later[: max(0, growth.kept - len(self._known_parts))], *growth.appended]
        return Column(self.reading, self._known_parts[: growth.kept], later)

    @memo
    def _parts(self) -> Sequence[ColumnPart]:
        """Return the column's part in every segment."""
        return [*self._known_parts, *(segment.part(self.name) for segment in self._later)]

    @memo
    def backings(self) -> Sequence[RemoteMemory]:
        """Return the remote memories that contain addresses of the column."""
        return tuple({id(part.backing): part.backing for part in self._parts if part.backing is not None}.values())

    @memo
    def _lock(self) -> ProcessLock:
        """The lock of the tables; if the column has a single part, the lock of that part."""
        return self._parts[0].lock if len(self._parts) == 1 else ProcessLock()

    @memo
    def _first_chunk(self) -> Int64s:
        return np.cumsum([0, *(len(part._starts) - 1 for part in self._parts)])

    @memo
    def _tables(self) -> tuple[Int64s, Int64s]:
        """Return the start of every chunk's values, ``UNKNOWN`` if not looked up, and the number of values per row."""
        if len(self._parts) == 1:
            return self._parts[0].begin, self._parts[0].width
        begins, widths = zip(*(part.known() for part in self._parts), strict=True)
        return np.concatenate(begins), np.concatenate(widths)

    def begins_so_far(self) -> Int64s | None:
        """Return ``begins`` of all chunks, with ``UNKNOWN`` for chunks that were not looked up; None if no chunk was
        looked up.
        """
        if not any("begin" in part.__dict__ for part in self._parts):
            return None
        begin, width = self._tables
        with self._lock:
            return np.where((begin != UNKNOWN) & (width != self.width), IRREGULAR, begin)

    def begins(self, chunks: Int64s, rows: int = 0) -> Int64s:
        """Return the address of the first value of each given chunk, or of its dense copy.

        The address is ``IRREGULAR`` if rows are not contiguous, and ``UNKNOWN`` if a later call can return a dense
        copy.

        Args:
            chunks: The indices of the chunks, ascending, int64 ``[n]``.
            rows: Largest number of rows to make dense.
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
        """Convert values to dense rows ``[n, width]`` of a dtype, by default the stored dtype; see ``dense_rows``."""
        reading = self.reading
        return dense_rows(values, self.shape, dtype or self._stored, fill=reading.fill, pad=reading.pad)

    def largest(self, chunks: Int64s) -> Int64s:
        """Return the largest integer in each of the given regular chunks; a negative integer counts as the largest
        int64.

        A long chunk is not searched, because a batch reads only a few of its rows; its result is the largest int64.

        Args:
            chunks: The indices of the chunks, ascending, int64 ``[n]``.
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
            return np.full(len(chunks), np.iinfo(np.int64).max)  # a remote chunk is not read for this purpose
        with table.lock:
            unknown = chunks[table.largest[chunks] < 0]
            for rows in np.unique(table.rows[unknown]).tolist():
                of = unknown[table.rows[unknown] == rows]
                table.largest[of] = largest_in_runs(self._stored, table.begin[of], rows * self.width)
            return table.largest[chunks]

    def _is_in_place(self, width: Int64s) -> npt.NDArray[np.bool_]:
        """Return whether chunks with `width` values per row can be copied from their addresses, bool ``[n]``."""
        in_place: npt.NDArray[np.bool_] = (width == self.width) & (self.kind.value_type != "bool")
        return in_place

    def can_copy_from(self, segment: Any) -> bool:
        """Whether the values of a segment of appended rows can be copied from their addresses."""
        return self.name in segment.addresses and bool(self._is_in_place(np.array(segment.addresses[self.name][1])))

    def _by_part(self, chunks: Int64s) -> Iterator[tuple[ColumnPart, slice, Int64s]]:
        """Yield each part that contains some of ``chunks`` (ascending), with the slice of these chunks and the indices
        of the chunks in the part.
        """
        ends = np.searchsorted(chunks, self._first_chunk[1:]).tolist()
        for number, (begin, end) in enumerate(pairwise([0, *ends])):
            if begin < end:
                yield self._parts[number], slice(begin, end), chunks[begin:end] - self._first_chunk[number]

    def addresses(self, chunk: Int64s) -> tuple[Int64s, Int64s]:
        """Return the start of each chunk's values, or ``IRREGULAR``, and the number of values per row.

        The start is an address; for booleans, 8 times the address plus the index of the bit.
        """
        if len(chunk) <= _FEW and self._later and "_tables" not in self.__dict__:
            # The tables have a row for each chunk of the snapshot, and the next snapshot may follow soon, so they are
            # not created here.
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
        """Locate chunks of one part whose layout equals the layout of a located chunk; the part's chunks are numbered
        from ``first``.

        Example: if record batches have a distance of 13,000 bytes, and the values of the first start at address 70,400,
        the values of the third begin at 96,400.
        """
        scale = 8 if self.kind.value_type == "bool" else 1
        for template, chunks, distance in part.alike(local):
            begin, width = self._locate_chunk(first + template)
            fits = (distance % self._stored.itemsize == 0) & (begin > 0)
            chunks, begins = chunks[fits], begin + scale * distance[fits]
            with part.lock:
                # A reader that sees the start must also see the width, even in a child that is forked in between.
                part.width[chunks], part.begin[chunks] = width, begins
            with self._lock:
                self._tables[1][first + chunks], self._tables[0][first + chunks] = width, begins

    def _locate_chunk(self, number: int) -> tuple[int, int]:
        """Return the start of one chunk's values and the number of values per row."""
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
        """Return the number of values per row of a chunk, and where the chunk's values begin; ``IRREGULAR`` if rows are
        not contiguous.
        """
        try:
            located = part.locate(number)
        except DataError:
            raise  # errors of derived columns and of columns in files already name the place
        except ValueError as error:
            raise DataError(f"column {self.name!r}: {error}") from error
        if located is None:
            return 0, IRREGULAR
        address, shape = located
        # Rows of nested lists must have the declared shape, not only the right number of values.
        if len(shape) > 1 and shape != self.shape and (*shape, 1) != self.shape:
            return 0, IRREGULAR
        if self.kind.value_type != "bool" and element_of(address, self._stored.itemsize) is None:
            return 0, IRREGULAR
        return prod(shape), address

    def part_of(self, number: int) -> tuple[ColumnPart, int]:
        """Return the part that holds a chunk, and the index of the chunk in that part."""
        part = int(np.searchsorted(self._first_chunk, number, side="right")) - 1
        return self._parts[part], number - int(self._first_chunk[part])
