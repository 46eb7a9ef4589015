"""Segments: the immutable stretches of steps that a store consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._alike import Alike
from mouse_core._column_chunks import Layout
from mouse_core._dense_copies import IRREGULAR
from mouse_core._layout import column_type
from mouse_core._memo import memo
from mouse_core._windows import Chunks, Windows, cut_at_chunks
from mouse_core.columns import Column
from mouse_core.errors import DataError

_LOOKED_AT = 1 << 16
# Runs of rows are kept, in 24 bytes each, where they are so long on average and not more than these.
_SHORTEST_RUNS, _MOST_RUNS = 4, 1 << 21


class Segment:
    """A table of steps and, optionally, which of its rows count and in which order. Making one reads nothing.

    Args:
        table: The steps.
        indices: Row numbers into ``table`` (one uint64 column), as ``datasets`` keeps them after a shuffle or a filter.
        origin: The ``datasets.Dataset`` that the table came from, if any. Pickling a segment pickles this instead
            of the table, which for a dataset on disk is a path.
    """

    # What stands for the memory that appended rows are in: segments of the same block have the same first rows.
    block: object = None
    # For appended rows, where the values of some columns begin, and how many a row has; others are to be looked up.
    places: Mapping[str, tuple[int, int]] = MappingProxyType({})
    _make_table: Callable[[], pa.Table] | None = None

    def __init__(self, table: pa.Table, indices: pa.Table | None = None, origin: Any = None) -> None:
        self.__dict__["table"] = table
        self.indices = indices
        self.origin = origin
        self.num_rows: int = table.num_rows if indices is None else indices.num_rows
        self._parts: dict[str, SegmentColumn] = {}
        self._first_values: dict[str, tuple[int, Any] | None] = {}

    @classmethod
    def of_block(
        cls, rows: int, block: object, places: Mapping[str, tuple[int, int]], make_table: Callable[[], pa.Table]
    ) -> Segment:
        """Appended rows, in one chunk.

        Args:
            rows: How many.
            block, places: As in the class.
            make_table: Gives the rows as a table; called when it is asked for, as few that are sampled from are.
        """
        segment = cls.__new__(cls)
        segment.indices = segment.origin = None
        segment.num_rows, segment.block, segment.places, segment._make_table = rows, block, places, make_table
        segment._parts, segment._first_values = {}, {}
        segment.__dict__.update(chunk_starts=np.array([0, rows]), _same_chunks=True, _is_mapped=False)
        return segment

    @memo
    def table(self) -> pa.Table:
        """The steps."""
        assert self._make_table is not None
        return self._make_table()

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return self.num_rows if self.indices is None else self.table.num_rows

    def seal(self) -> None:
        """Make the table, and let go of what it is made from."""
        if self.table is not None:
            self._make_table = None

    @classmethod
    def from_dataset(cls, dataset: Any) -> Segment:
        """The segment of a ``datasets.Dataset``, which stays where it is."""
        indices = dataset._indices
        return cls(dataset.data.table, None if indices is None else indices.table, dataset)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return dict(zip(self.table.schema.names, self.table.schema.types, strict=True))

    @memo
    def chunk_starts(self) -> npt.NDArray[np.int64]:
        """The first row of every chunk, and the end, int64 ``[chunks + 1]``; one for all columns."""
        columns = self.table.columns
        if self._same_chunks:
            return _chunk_starts(columns[0])
        return np.unique(np.concatenate([_chunk_starts(column) for column in columns]))

    @memo
    def _same_chunks(self) -> bool:
        """Whether all columns are cut at the same rows, so that chunk ``k`` of each holds the same rows."""
        if self._is_mapped:
            return True  # record batches; looking at each of them would take longer than the first batch
        first, *others = (_chunk_starts(column) for column in self.table.columns)
        return all(np.array_equal(first, starts) for starts in others)

    def part(self, name: str) -> SegmentColumn:
        """One column; all null if the segment has no such column."""
        if name not in self._parts:
            column = self.table.column(name) if name in self.table.schema.names else None
            alike = self._alike if self._is_mapped else None
            part = SegmentColumn(column, self.chunk_starts, same_chunks=self._same_chunks, alike=alike)
            if name in self.places:
                part.layout.begin[0], part.layout.width[0] = self.places[name]
            # One part for all, as addresses in it outlive the snapshot that asked for it.
            self._parts.setdefault(name, part)
        return self._parts[name]

    @memo
    def _is_mapped(self) -> bool:
        """Whether the table consists of mapped files below each other."""
        data = None if self.origin is None else self.origin.data
        blocks = getattr(data, "blocks", [[data]])
        return all(len(row) == 1 and type(row[0]).__name__ == "MemoryMappedTable" for row in blocks)

    @memo
    def _alike(self) -> Alike:
        return Alike(self.table, self.chunk_starts)

    @memo
    def _indices_starts(self) -> npt.NDArray[np.int64]:
        return np.zeros(1, np.int64) if self.indices is None else _chunk_starts(self.indices.column(0))

    @memo
    def _indices_column(self) -> Column | None:
        if self.indices is None:
            return None
        numbers = self.indices.column(0)
        part = SegmentColumn(numbers, self._indices_starts, same_chunks=True)
        return Column("indices", column_type(numbers.type), (), [part], fill=None, pad=None)

    @memo
    def runs(self) -> Chunks | None:
        """Stretches of rows whose numbers follow each other, as a filter leaves them, each in one chunk; None where
        there are no row numbers, or where they are in no such order.
        """
        if self.indices is None:
            return None
        numbers = self.indices.column(0)
        try:
            numbers.validate()
        except pa.ArrowException:
            return None  # whoever reads the rows is told
        starts, firsts, known, last = [], [], 0, -2
        for begin in range(0, self.num_rows, _LOOKED_AT):
            found = numbers.slice(begin, _LOOKED_AT).to_numpy()
            if found.dtype.kind not in "iu" or found.max() >= self.table.num_rows or found.min() < 0:
                return None
            found = found.astype(np.int64)
            (new,) = np.nonzero(np.diff(found, prepend=last) != 1)
            known += len(new)
            if known > _MOST_RUNS or _SHORTEST_RUNS * known > begin + len(found) + _LOOKED_AT:
                return None
            starts.append(new + begin)
            firsts.append(found[new])
            last = int(found[-1])
        begins = np.concatenate([*starts, [self.num_rows]])
        chunks = Chunks(self.chunk_starts)
        chunk, row, size, _ = cut_at_chunks(chunks, np.concatenate(firsts), np.diff(begins))
        return Chunks(np.concatenate([[0], np.cumsum(size)]), chunk, row, chunks.longest)

    def row_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The table's rows behind the segment's ``rows`` (int64 ``[n]``); only where there are row numbers."""
        if self._indices_column is None:
            return rows
        windows = Windows(Chunks(self._indices_starts), rows, 1).part(0)
        numbers = np.empty(len(rows), np.int64)
        self._indices_column.gather(windows, numbers.reshape(-1, 1, 1))
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.table.num_rows:
            raise DataError(
                f"dataset: expected row numbers 0..{self.table.num_rows - 1} among its indices, "
                f"found {int(numbers.min())}..{int(numbers.max())}; it is damaged"
            )
        return numbers

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """The first value among the first ``rows`` rows that is not null, and its row; None where all are."""
        if name not in self.table.schema.names:
            return None
        if name not in self._first_values:
            row = self._find_first(self.table.column(name))
            # Kept, as every snapshot of a store that grows asks for it.
            self._first_values[name] = None if row is None else (row, self.take(row).column(name)[0].as_py())
        found = self._first_values[name]
        return None if found is None or found[0] >= rows else found

    def _find_first(self, column: pa.ChunkedArray) -> int | None:
        """The first row whose value is not null."""
        if not self.num_rows or column.null_count == len(column):
            return None
        if self.indices is None:
            row = 0
            for chunk in column.iterchunks():
                if chunk.null_count < len(chunk):
                    return row + int(np.argmin(chunk.is_null()))
                row += len(chunk)
            return None
        if not column.null_count:
            return 0
        there = np.asarray(pc.is_valid(column))
        numbers = self.indices.column(0)
        try:
            numbers.validate()
        except pa.ArrowException as error:
            raise DataError(f"dataset: expected readable indices, found damaged data: {error}") from error
        for first in range(0, self.num_rows, _LOOKED_AT):
            (found,) = np.nonzero(there[numbers.slice(first, _LOOKED_AT).to_numpy()])
            if len(found):
                return first + int(found[0])
        return None

    def take(self, row: int) -> pa.Table:
        """One row, as a table of one."""
        if self.indices is not None:
            row = self.indices.column(0)[row].as_py()
        taken = self.table.slice(row, 1)
        try:
            taken.validate()
        except pa.ArrowException as error:
            raise DataError(f"dataset: expected a readable row {row}, found damaged data: {error}") from error
        return taken

    def __getstate__(self) -> dict[str, Any]:
        if self.origin is not None:
            return {"origin": self.origin}
        return {"table": self.table, "indices": self.indices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        restored = Segment.from_dataset(state["origin"]) if "origin" in state else Segment(**state)
        self.__dict__.update(restored.__dict__)


class SegmentColumn:
    """One column of one segment, cut at the segment's chunk starts.

    Args:
        column: The values; None where the segment has no such column, which reads as nulls.
        chunk_starts: See ``Segment.chunk_starts``.
        same_chunks: Whether the column's own chunks begin there; otherwise each of them lies in one of the column's.
        alike: Which chunks are laid out alike.
    """

    def __init__(
        self,
        column: pa.ChunkedArray | None,
        chunk_starts: npt.NDArray[np.int64],
        *,
        same_chunks: bool,
        alike: Alike | None = None,
    ) -> None:
        self._column = column
        self._starts = chunk_starts
        self._same_chunks = same_chunks
        self._alike = alike
        self.layout = Layout(np.diff(chunk_starts))
        if column is None:
            self.layout.begin[:] = IRREGULAR

    def chunk(self, number: int) -> pa.Array:
        """The values of one chunk, without a copy."""
        first, n = int(self._starts[number]), int(self._starts[number + 1] - self._starts[number])
        if self._column is None:
            return pa.nulls(n)
        return self._column.chunk(number) if self._same_chunks else self._column.slice(first, n).chunk(0)

    def alike(self, chunks: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None:
        """A chunk, how many bytes behind it the values of ``chunks`` lie, and for which of these that is so."""
        if self._alike is None or self._column is None:
            return None
        distance, alike = self._alike.distances(chunks)
        return self._alike.template, distance, self._alike.same_lists(self._column, distance, alike)


class Growth(NamedTuple):
    """How segments differ from earlier ones that rows were appended to.

    Args:
        kept: How many are the same.
        appended: The others, each of one chunk. The first may be the last of the earlier ones, grown.
        replaced: That one as it was; None if all of the earlier ones are kept.
    """

    kept: int
    appended: tuple[Segment, ...]
    replaced: Segment | None


def growth(before: tuple[Segment, ...], after: tuple[Segment, ...]) -> Growth | None:
    """What was appended to some segments; None where others are not the same with rows appended."""
    kept, last = len(before) - 1, before[-1:]
    appended = after[max(kept, 0) :]
    if not last or not appended or after[:kept] != before[:kept]:
        return None
    replaced = None
    if appended[0] is last[0]:
        kept, appended = kept + 1, appended[1:]
    elif appended[0].block is not None and appended[0].block is last[0].block:
        replaced = last[0]
    else:
        return None
    # Segments of datasets may say more about the shapes of rows.
    return Growth(kept, appended, replaced) if all(segment.block is not None for segment in appended) else None


def _chunk_starts(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    ends = np.cumsum([len(chunk) for chunk in column.iterchunks()])
    return np.concatenate([[0], ends]).astype(np.int64)
