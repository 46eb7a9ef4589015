"""Segments: the immutable tables of steps that form a store, and the comparison of a store's earlier and later
segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import check_rows
from mouse_core._arrow.column import Column, ColumnPart, EqualLayouts, Growth, ReadOptions
from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.dense import IRREGULAR, plain
from mouse_core._arrow.gathering import gather
from mouse_core._arrow.windows import Stretches, Windows, cut_at_stretches
from mouse_core._base.memo import memo
from mouse_core.errors import DataError

if TYPE_CHECKING:  # loaded on demand: for appended or remote rows
    from mouse_core.columns.appended import ColumnExtent, Extent
    from mouse_core.readahead import RemoteMemory

_LOOKED_AT = 1 << 16
# Runs of rows are stored, in 24 bytes each, if their average length and their number are within these limits.
_SHORTEST_RUNS, _MOST_RUNS = 4, 1 << 21


def are_too_short(runs: int, rows: int) -> bool:
    """Return whether ``runs`` runs with a total of ``rows`` rows are too short or too many to be stored as runs."""
    return runs > _MOST_RUNS or _SHORTEST_RUNS * runs > rows + _LOOKED_AT


def runs_of(numbers: pa.ChunkedArray, rows: int, chunk_starts: npt.NDArray[np.int64]) -> Stretches | None:
    """Return row indices as runs of consecutive indices, each within one chunk; None if the runs are too short or too
    many.

    Args:
        numbers: Row indices in a table of ``rows`` rows.
        rows: The number of rows of the table.
        chunk_starts: The first row of every chunk of the table, followed by the number of rows.
    """
    try:
        numbers.validate()
    except pa.ArrowException:
        return None  # reading the rows raises the error
    starts, firsts, known, last = [], [], 0, -2
    for begin in range(0, len(numbers), _LOOKED_AT):
        found = numbers.slice(begin, _LOOKED_AT).to_numpy()
        if found.dtype.kind not in "iu" or found.max() >= rows or found.min() < 0:
            return None
        found = found.astype(np.int64)
        (new,) = np.nonzero(np.diff(found, prepend=last) != 1)
        known += len(new)
        if are_too_short(known, begin + len(found)):
            return None
        starts.append(new + begin)
        firsts.append(found[new])
        last = int(found[-1])
    begins = np.concatenate([*starts, [len(numbers)]])
    chunks = Stretches(chunk_starts)
    chunk, row, size, _ = cut_at_stretches(chunks, np.concatenate(firsts), np.diff(begins))
    return Stretches(np.concatenate([[0], np.cumsum(size)]), chunk, row, chunks.longest)


def first_picked(column: pa.ChunkedArray, numbers: pa.ChunkedArray) -> int | None:
    """Return the first of the picked rows in which the column's value is not null; None if the value is null in all
    picked rows.

    Raises:
        DataError: The row indices cannot be read.
    """
    if not column.null_count:
        return 0
    there = np.asarray(column.is_valid())
    try:
        numbers.validate()
    except pa.ArrowException as error:
        raise DataError(f"dataset: expected readable indices, found damaged data: {error}") from error
    for first in range(0, len(numbers), _LOOKED_AT):
        (found,) = np.nonzero(there[numbers.slice(first, _LOOKED_AT).to_numpy()])
        if len(found):
            return first + int(found[0])
    return None


class Segment:
    """A table of steps and, optionally, a selection and order of the table's rows. Creating a segment reads nothing.

    Args:
        table: The steps.
        indices: Row indices in ``table`` (one uint64 column), as ``datasets`` stores them after a shuffle or a filter.
        origin: The ``datasets.Dataset`` of the table, if any. A pickled segment contains the dataset instead of the
            table; a dataset on disk is pickled as a path.
        image_roots: Additional folders for images that rows name by path; the dataset's own folder is always allowed.
    """

    # Identity of the memory of appended rows: segments of the same extent have the same first rows.
    extent: object = None
    # For rows in a folder: identity of the folder, and number of rows before these; equal places have equal first rows.
    place: tuple[object, int] | None = None
    # The files of a store's folder that hold the rows (``SealedFile``); a file is opened when its rows are read.
    sealed_files: Sequence[Any] = ()
    # Fetches values that are neither in memory nor in a local file.
    backing: RemoteMemory | None = None
    # Whether rows of the table are found through row numbers.
    has_indices: bool = False
    # For appended rows: the address of the first value of some columns, and values per row; others are looked up.
    addresses: Mapping[str, tuple[int, int]] = MappingProxyType({})
    _videos: Any = None
    _make_table: Callable[[], pa.Table] | None = None
    _make_columns: Mapping[str, Callable[[], pa.ChunkedArray]] = MappingProxyType({})

    def __init__(
        self,
        table: pa.Table,
        indices: pa.Table | None = None,
        origin: Any = None,
        image_roots: tuple[str, ...] = (),
    ) -> None:
        self.__dict__.update(table=table, indices=indices, origin=origin)
        self.has_indices = indices is not None
        self._named_roots = image_roots
        self.num_rows: int = table.num_rows if indices is None else indices.num_rows
        self._parts: dict[str, ColumnPart] = {}
        self._first_values: dict[str, tuple[int, Any] | None] = {}

    @classmethod
    def of_extent(cls, extent: Extent, image_roots: tuple[str, ...]) -> Segment:
        """Return a segment of one chunk with the rows that an extent has now; the segment never includes later rows.

        The columns and the table are created on first use, because most segments are never sampled.
        """
        segment = cls.__new__(cls)
        segment._named_roots = image_roots
        rows, dense = extent.count, extent.dense()
        segment.num_rows, segment.extent = rows, extent.token
        segment.addresses = {name: (column.address, column.width) for name, column in dense.items()}
        segment._make_columns = {name: partial(_to_column, column, rows) for name, column in dense.items()}
        segment._make_table = partial(extent.to_table, rows)
        segment._parts, starts = {}, np.array([0, rows])
        segment.__dict__.update(_first_values={}, chunk_starts=starts, _same_chunks=True, is_mapped=False)
        return segment

    @memo
    def table(self) -> pa.Table:
        """The steps."""
        assert self._make_table is not None
        return self._make_table()

    @memo
    def indices(self) -> pa.Table | None:
        """Row indices in the table; None if the segment has all rows of the table in the order of the table."""
        return None

    @memo
    def origin(self) -> Any:
        """The dataset that consists of exactly these rows, if any."""
        return None

    @property
    def sealed_bytes(self) -> int:
        """Bytes of the sealed files."""
        return sum(file.sealed.bytes for file in self.sealed_files)

    @property
    def recording(self) -> object:
        """Identity of the dataset from which the rows were loaded; None for appended rows."""
        return self if self.extent is None and self.place is None else None

    def seal(self) -> None:
        """Create the table, and release the objects that the table is created from."""
        if self.table is not None:
            self._make_table = None

    @classmethod
    def from_dataset(cls, dataset: Any, image_roots: tuple[str, ...] = ()) -> Segment:
        """Return the segment of a ``datasets.Dataset``, without a copy."""
        indices = dataset._indices
        return cls(dataset.data.table, None if indices is None else indices.table, dataset, image_roots)

    @memo
    def image_roots(self) -> tuple[str, ...]:
        """Folders for images that rows name by path: absolute paths without symbolic links."""
        from mouse_core.images.files import dataset_folders

        return (*dataset_folders(self.origin), *self._named_roots)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return dict(zip(self.table.schema.names, self.table.schema.types, strict=True))

    def column(self, name: str) -> pa.ChunkedArray | None:
        """Return a column of the table as stored; None if no column has this name."""
        return self.table.column(name) if name in self.types else None

    @memo
    def chunk_starts(self) -> npt.NDArray[np.int64]:
        """First row of every chunk, followed by the number of rows, int64 ``[chunks + 1]``; equal for all columns."""
        columns = self.table.columns
        if self._same_chunks:
            return _chunk_starts(columns[0])
        return np.unique(np.concatenate([_chunk_starts(column) for column in columns]))

    @memo
    def _same_chunks(self) -> bool:
        """Return whether all columns have the same chunk boundaries, so that chunk ``k`` of each column holds the same
        rows.
        """
        if self.is_mapped:
            return True  # record batches; inspecting each of them would take longer than the first batch
        first, *others = (_chunk_starts(column) for column in self.table.columns)
        return all(np.array_equal(first, starts) for starts in others)

    def part(self, name: str) -> ColumnPart:
        """Return one column; all values are null if the segment has no such column."""
        if name not in self._parts:
            if name in self.addresses:
                part = ColumnPart(self._make_columns[name], self.chunk_starts, same_chunks=True)
                part.begin[0], part.width[0] = self.addresses[name]
            else:
                kind = column_type(self.types[name]) if name in self.types else None
                part = ColumnPart(
                    self._make_columns.get(name) or (no_column if kind is None else partial(self.table.column, name)),
                    self.chunk_starts,
                    same_chunks=self._same_chunks,
                    alike=self._alike if self.is_mapped else None,
                    image_roots=self.image_roots if kind is not None and kind.is_encoded else (),
                )
                part.backing = self.backing
                if kind is not None and kind.kind == "video":
                    from mouse_core.video.frames import videos_of

                    part.videos = self._videos = self._videos or videos_of(self.origin or self.table.schema)
                if kind is None:
                    part.begin[:] = IRREGULAR
            # All callers get one object, because its cached addresses outlive the snapshot that created it.
            return self._parts.setdefault(name, part)
        return self._parts[name]

    @memo
    def is_mapped(self) -> bool:
        """Whether the table consists of consecutive memory-mapped files."""
        data = None if self.origin is None else self.origin.data
        blocks = getattr(data, "blocks", [[data]])
        return all(len(row) == 1 and type(row[0]).__name__ == "MemoryMappedTable" for row in blocks)

    @memo
    def _alike(self) -> EqualLayouts:
        return EqualLayouts(self.table, self.chunk_starts)

    @memo
    def _indices_starts(self) -> npt.NDArray[np.int64]:
        return np.zeros(1, np.int64) if self.indices is None else _chunk_starts(self.indices.column(0))

    @memo
    def _indices_column(self) -> Column | None:
        if self.indices is None:
            return None
        part = ColumnPart(partial(self.indices.column, 0), self._indices_starts, same_chunks=True)
        return Column(ReadOptions("indices", column_type(self.indices.schema.types[0]), ()), [part])

    @memo
    def runs(self) -> Stretches | None:
        """Runs of consecutive row indices, each within one chunk, as a filter produces them. None if the segment has no
        row indices, or if the runs are too short or too many.
        """
        if self.indices is None:
            return None

        return runs_of(self.indices.column(0), self.table.num_rows, self.chunk_starts)

    def row_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row index in the table for each of ``rows``, which are row indices in this segment (int64
        ``[n]``). Call this method only for segments that have ``indices``.
        """
        if self._indices_column is None:
            return rows
        windows = Windows(Stretches(self._indices_starts), rows, 1).part(0)
        numbers = np.empty(len(rows), np.int64)
        gather(self._indices_column, windows, numbers.reshape(-1, 1, 1))
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.table.num_rows:
            raise DataError(
                f"dataset: expected row indices in 0..{self.table.num_rows - 1}, found "
                f"{int(numbers.min())}..{int(numbers.max())}; the dataset is damaged"
            )
        return numbers

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """Return the first non-null value among the first ``rows`` rows, and its row; None if all values are null."""
        if name not in self.types:
            return None
        if name not in self._first_values:
            self._first_values[name] = self._look_for_first(name)  # kept: every snapshot of a growing store needs it
        found = self._first_values[name]
        return None if found is None or found[0] >= rows else found

    @property
    def recorded(self) -> Segment:
        """The segment of the recorded rows, without derived columns."""
        return self

    def begins_as(self, other: Segment) -> bool:
        """Return whether this segment begins with all rows of the other segment, or the other segment with all rows of
        this segment.
        """
        same_place = self.place is not None and self.place == other.place
        return self is other or same_place or (self.extent is not None and self.extent is other.extent)

    def has_value(self, name: str, rows: int) -> bool:
        """Return whether a value among the first ``rows`` rows is not null."""
        if name not in self.types:
            return False
        if rows == self.num_rows and not self.has_indices:
            column = self.table.column(name)
            return not rows or column.null_count < len(column)
        return not rows or self.first_value(name, rows) is not None

    def _look_for_first(self, name: str) -> tuple[int, Any] | None:
        """Return the first row whose value is not null, and the value."""
        row = self._find_first(name)
        return None if row is None else (row, self.take(row).column(name)[0].as_py())

    def _find_first(self, name: str) -> int | None:
        """Return the first row whose value is not null."""
        column = self.table.column(name)
        if not self.num_rows or column.null_count == len(column):
            return None
        if not self.has_indices:
            row = 0
            for chunk in column.iterchunks():
                if chunk.null_count < len(chunk):
                    return row + int(np.argmin(chunk.is_null()))
                row += len(chunk)
            return None

        assert self.indices is not None  # rows are picked
        return first_picked(column, self.indices.column(0))

    def take(self, row: int, count: int = 1) -> pa.Table:
        """Return ``count`` consecutive rows as a table; by default one row."""
        if self.has_indices:
            # Not by take(): pyarrow's crashes on slices of nested fixed-size lists.
            taken = pa.concat_tables([self.table.slice(number, 1) for number in self._listed(row, count)])
        else:
            taken = self._slice(row, count)
        rows = f"row {row}" if count == 1 else f"rows {row}..{row + count - 1}"
        check_rows(taken, f"dataset, {rows}", whole=False)
        if taken.num_rows != count:
            raise DataError(f"dataset, {rows}: expected {count} rows, found {taken.num_rows}")
        return taken

    def _slice(self, row: int, count: int) -> pa.Table:
        """Return ``count`` rows of the table."""
        return self.table.slice(row, count)

    def _listed(self, row: int, count: int) -> list[int]:
        """Return the index in the table for each of ``count`` consecutive rows of the segment. The indices need not be
        ascending.
        """
        assert self.indices is not None
        listed: list[int] = self.indices.column(0).slice(row, count).to_pylist()
        return listed

    def __reduce__(self) -> tuple[Any, ...]:
        if self.origin is not None:
            return Segment.from_dataset, (self.origin, self._named_roots)
        return Segment, (self.table, self.indices, None, self._named_roots)


class FileSegment(Segment):
    """A segment of rows in files; each file is opened when rows of the file are read.

    Args:
        schema: The columns.
        chunk_starts: The first row of each chunk, followed by the number of rows, int64 ``[chunks + 1]``.
        image_roots: Folders for images and videos that rows name by path.
        place: See ``Segment``.
        entries: The manifest entry of each file; see ``store.disk.folder.Sealed``.
    """

    def __init__(
        self,
        schema: pa.Schema,
        chunk_starts: npt.NDArray[np.int64],
        image_roots: tuple[str, ...],
        place: tuple[object, int],
        entries: Sequence[Any],
    ) -> None:
        self.num_rows, self.place, self._entries = int(chunk_starts[-1]), place, entries
        self.extent = object() if entries[0].appended else None
        self._schema, self._named_roots = schema, image_roots
        self._parts, self._first_values = {}, {}
        self.__dict__.update(chunk_starts=chunk_starts, _same_chunks=True, is_mapped=False)

    @property
    def recording(self) -> object:
        """See ``Segment``."""
        return self._entries[0].load or None

    @memo
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return dict(zip(self._schema.names, self._schema.types, strict=True))

    def part(self, name: str) -> ColumnPart:
        """See ``Segment``. A chunk's file is opened, or the head of the file is read, when the chunk is first used."""
        if name not in self._parts and name in self.types:
            return self._parts.setdefault(name, self._file_part(name))
        return super().part(name)

    def _file_part(self, name: str) -> ColumnPart:
        """Return a column that is read chunk by chunk."""
        raise NotImplementedError

    def has_value(self, name: str, rows: int) -> bool:
        """See ``Segment``; the manifest records which columns are null throughout a file."""
        if rows != self.num_rows or name not in self.types:
            return super().has_value(name, rows)
        return any(name not in one.nulls for one in self._entries)


def _as_whole(name: str) -> Any:
    """Return a property or method that is taken from the underlying segment."""
    return property(lambda view: getattr(view.whole, name))


class SegmentView(Segment):
    """A view of another segment that shares the caches of that segment; subclasses select rows or add columns.

    Args:
        whole: The segment whose caches the view shares.
        num_rows: Number of rows of the view.
    """

    table, indices, origin, runs, chunk_starts, image_roots, types = map(
        _as_whole, ("table", "indices", "origin", "runs", "chunk_starts", "image_roots", "types")
    )
    # The parts cache knowledge of their chunks.
    column, part, row_numbers = map(_as_whole, ("column", "part", "row_numbers"))

    def __init__(self, whole: Segment, num_rows: int) -> None:
        self.whole, self.num_rows, self.has_indices = whole, num_rows, whole.has_indices
        self._parts, self._first_values = {}, {}
        # The origin of the values: a reader that copies them waits until they are loaded.
        self.backing, self.sealed_files = whole.backing, whole.sealed_files


def no_column() -> None:
    """Return None, because the segment lacks the column."""


def _to_column(extent: ColumnExtent, rows: int) -> pa.ChunkedArray:
    return pa.chunked_array([extent.to_arrow(rows)])


def _chunk_starts(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    ends = np.cumsum([len(chunk) for chunk in column.iterchunks()])
    return np.concatenate([[0], ends]).astype(np.int64)


# ---------------------------------------------------------------------- how stores grow


def growth_of(before: Sequence[Segment], after: Sequence[Segment]) -> Growth | None:
    """Return the rows that were appended between two lists of segments; None if the lists differ in more than appended
    rows.
    """
    kept = _same(before, after)
    appended = after[kept:]
    # New datasets may change the shapes of rows, and many files add many chunks.
    grew = all(segment.extent is not None for segment in appended) and not any(
        len(segment.chunk_starts) > 2 for segment in (*appended, *before[kept:])
    )
    return Growth(kept, appended, before[kept:]) if grew else None


def continues(before: Sequence[Segment], after: Sequence[Segment]) -> bool:
    """Return whether the rows of ``after`` begin with the rows of ``before``; False if ``before`` is empty.

    The result is also True if the last segment has grown, or if sealing or merging has moved the last rows of a store's
    folder to other files.
    """
    kept = _same(before, after)
    replaced, coming = before[kept:], after[kept:]
    if not before or not replaced:
        return bool(before)
    if not coming or not coming[0].begins_as(replaced[0]):
        return False
    return len(replaced) == 1 or _folders(replaced) == _folders(coming) != {None}


def _folders(segments: Sequence[Segment]) -> set[object]:
    """Return the identities of the folders that hold the segments; None stands for segments without a folder."""
    return {None if segment.place is None else segment.place[0] for segment in segments}


def _same(before: Sequence[Segment], after: Sequence[Segment]) -> int:
    """Return the number of equal segments at the beginning of both lists."""
    most = min(len(before), len(after))
    for known in (most, len(before) - 1):
        if 0 <= known <= most and after[:known] == before[:known]:
            return known
    return next(number for number in range(most) if before[number] is not after[number])


# ---------------------------------------------------------------------- runs of rows with one value of a column

Int64s = npt.NDArray[np.int64]

# Columns with the task of a row, as text or number; the readers of formats add the prefix "metadata_".
TASKS = ("task", "task_index", "metadata_task", "metadata_task_index")
TASK_NUMBERS = ("task_index", "metadata_task_index")

BLOCK = 1 << 17
"""Number of rows in a block of a comparison."""


def run_starts(segments: Sequence[Segment], rows: int, name: str) -> Int64s:
    """Return the rows at which a column's value differs from the previous row, int64 ``[n]``, ascending.

    Args:
        segments: The segments of the rows.
        rows: Number of leading rows to compare.
        name: A column of single numbers or texts; null is treated as a value.
    """
    return np.concatenate([np.nonzero(differs)[0] + at for _, differs, at in changes(segments, rows, name, 0)])


def is_single(data_type: pa.DataType) -> bool:
    """Return whether a column of this type has one number or text for each row."""
    plain, types = _plain_type(data_type), pa.types
    return any(test(plain) for test in (types.is_primitive, types.is_string, types.is_large_string, types.is_null))


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    if isinstance(data_type, pa.BaseExtensionType):
        return _plain_type(data_type.storage_type)
    return _plain_type(data_type.value_type) if pa.types.is_dictionary(data_type) else data_type


def blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut the rows ``begin .. end - 1`` into blocks; yield, for each block, the first row and the row after the last
    row.
    """
    return ((at, min(at + BLOCK, end)) for at in range(begin, end, BLOCK))


def changes(
    segments: Sequence[Segment], rows: int, name: str, first: int
) -> Iterator[tuple[pa.Array, npt.NDArray[np.bool_], int]]:
    """Yield blocks of a column from row ``first`` on: the values, whether each value differs from the previous value,
    and the block's first row.
    """
    types = [_plain_type(segment.types[name]) for segment in segments if name in segment.types]
    wanted = next((data_type for data_type in types if not pa.types.is_null(data_type)), pa.null())
    last: pa.Array | None = None
    for segment, own, begin, end in _segments_from(segments, rows, first):
        if segment.has_indices and (column := segment.column(name)) is not None:
            check_rows(column, f"column {name!r}")
        for at, stop in blocks(begin, end):
            found = _column(segment, name, at - own, stop - own).cast(wanted)
            yield found, _differs(found, last), at
            last = found.slice(len(found) - 1)


def _differs(values: pa.Array, before: pa.Array | None) -> npt.NDArray[np.bool_]:
    """Return whether each value differs from the previous value, bool ``[n]``; nulls are equal to each other, and so
    are NaNs.
    """
    if pa.types.is_null(values.type):
        return np.zeros(len(values), np.bool_)
    import pyarrow.compute as pc  # loaded on demand

    shifted = pa.concat_arrays([values.slice(0, 1) if before is None else before, values.slice(0, len(values) - 1)])
    differs = pc.or_(pc.fill_null(pc.not_equal(values, shifted), False), pc.xor(values.is_null(), shifted.is_null()))
    if pa.types.is_floating(values.type):
        both = pc.and_(pc.fill_null(pc.is_nan(values), False), pc.fill_null(pc.is_nan(shifted), False))
        differs = pc.and_not(differs, both)
    found: npt.NDArray[np.bool_] = differs.to_numpy(zero_copy_only=False)
    return np.array(found)


def _column(segment: Segment, name: str, begin: int, end: int) -> pa.Array:
    """Return rows ``begin .. end - 1`` of a segment's column, without dictionary encoding or extension types."""
    column = segment.column(name)
    if column is None:
        return pa.nulls(end - begin)
    if segment.has_indices:
        column = column.take(pa.array(segment.row_numbers(np.arange(begin, end))))
    else:
        column = column.slice(begin, end - begin)
        check_rows(column, f"column {name!r}, rows {begin}..{end - 1}", whole=False)
    wanted = _plain_type(column.type)
    return pa.concat_arrays([plain(chunk).cast(wanted) for chunk in column.chunks] or [pa.array([], wanted)])


def _segments_from(segments: Sequence[Segment], rows: int, first: int) -> Iterator[tuple[Segment, int, int, int]]:
    """Yield each segment that has rows from ``first`` on, the number of rows before the segment, and the range of its
    rows to inspect.
    """
    begin = 0
    for segment in segments:
        end = min(begin + segment.num_rows, rows)
        if end > first:
            yield segment, begin, max(first, begin), end
        begin = end
