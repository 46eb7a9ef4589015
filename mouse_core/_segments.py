"""Segments: the immutable stretches of steps that a store consists of."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._layout import column_type
from mouse_core.columns import IRREGULAR, Column, Layout, Windows


class Segment:
    """A table of steps and, optionally, which of its rows count and in which order. Making one reads nothing.

    Args:
        table: The steps.
        indices: Row numbers into ``table`` (one uint64 column), as ``datasets`` keeps them after a shuffle or a filter.
        origin: The ``datasets.Dataset`` that the table came from, if any. Pickling a segment pickles this instead
            of the table, which for a dataset on disk is a path.
    """

    def __init__(self, table: pa.Table, indices: pa.Table | None = None, origin: Any = None) -> None:
        self.table = table
        self.indices = indices
        self.origin = origin
        self.num_rows: int = table.num_rows if indices is None else indices.num_rows
        self._parts: dict[str, SegmentColumn] = {}

    @classmethod
    def from_dataset(cls, dataset: Any) -> Segment:
        """The segment of a ``datasets.Dataset``, which stays where it is."""
        indices = dataset._indices
        return cls(dataset.data.table, None if indices is None else indices.table, dataset)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return dict(zip(self.table.schema.names, self.table.schema.types, strict=True))

    @cached_property
    def chunk_starts(self) -> npt.NDArray[np.int64]:
        """The first row of every chunk, and the end, int64 ``[chunks + 1]``; one for all columns."""
        columns = self.table.columns
        if self._same_chunks:
            # Tables read from files have record batches, the same for all columns; SegmentColumn checks each.
            lengths = [len(chunk) for chunk in columns[0].iterchunks()]
            return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ends = [np.cumsum([len(chunk) for chunk in column.iterchunks()]) for column in columns]
        return np.union1d(np.concatenate(ends), [0]).astype(np.int64)

    @cached_property
    def _same_chunks(self) -> bool:
        return len({column.num_chunks for column in self.table.columns}) == 1

    def part(self, name: str) -> SegmentColumn:
        """One column; all null if the segment has no such column."""
        if name not in self._parts:
            column = self.table.column(name) if name in self.table.schema.names else None
            self._parts[name] = SegmentColumn(column, self.chunk_starts)
        return self._parts[name]

    @cached_property
    def _indices_starts(self) -> npt.NDArray[np.int64]:
        chunks = [] if self.indices is None else self.indices.column(0).iterchunks()
        return np.concatenate([[0], np.cumsum([len(chunk) for chunk in chunks])]).astype(np.int64)

    @cached_property
    def _indices_column(self) -> Column | None:
        if self.indices is None:
            return None
        numbers = self.indices.column(0)
        part = SegmentColumn(numbers, self._indices_starts)
        return Column(column_type(numbers.type), (), [part], dtype=np.dtype(np.uint64), fill=None, pad=None)

    def row_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The table's rows behind the segment's ``rows`` (int64 ``[n]``); only where there are row numbers."""
        if self._indices_column is None:
            return rows
        windows = Windows(self._indices_starts, rows, 1)
        return self._indices_column.gather(windows).reshape(-1).astype(np.int64)

    def first_value(self, name: str, rows: int) -> Any:
        """The first value among the first ``rows`` rows that is not null, as Python; None where all are."""
        if name not in self.table.schema.names:
            return None
        column = self.table.column(name)
        if column.null_count == len(column):
            return None
        if self.indices is not None:
            numbers = self.indices.column(0).slice(0, rows)
            return next((value for n in numbers if (value := column[n.as_py()].as_py()) is not None), None)
        for chunk in column.slice(0, rows).iterchunks():
            if chunk.null_count < len(chunk):
                return chunk[int(np.argmin(chunk.is_null()))].as_py()
        return None

    def take(self, row: int) -> pa.Table:
        """One row, as a table of one."""
        if self.indices is not None:
            row = self.indices.column(0)[row].as_py()
        return self.table.slice(row, 1)

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
    """

    def __init__(self, column: pa.ChunkedArray | None, chunk_starts: npt.NDArray[np.int64]) -> None:
        self._column = column
        self._starts = chunk_starts
        self._kept: dict[int, pa.Array] = {}
        self.layout = Layout(len(chunk_starts) - 1)
        if column is None:
            self.layout.element[:] = IRREGULAR

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self._starts) - 1

    def chunk(self, number: int) -> pa.Array:
        """The values of one chunk, without a copy wherever the column's own chunks allow it."""
        first, n = int(self._starts[number]), int(self._starts[number + 1] - self._starts[number])
        if self._column is None:
            return pa.nulls(n)
        if number in self._kept:
            return self._kept[number]
        if self._column.num_chunks == self.chunks:
            array = self._column.chunk(number)
            if len(array) == n:
                return array
        sliced = self._column.slice(first, n)
        if sliced.num_chunks == 1:
            return sliced.chunk(0)
        # As many chunks as the other columns, of other lengths: no file does that. The copy must outlive the addresses
        # that were taken from it.
        self._kept[number] = pa.concat_arrays(sliced.chunks)
        return self._kept[number]
