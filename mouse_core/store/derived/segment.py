"""Segments of another store, with columns beside theirs that are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column import ColumnPart
from mouse_core._arrow.dense_copies import UNKNOWN
from mouse_core._arrow.windows import Stretches
from mouse_core._base.memo import memo
from mouse_core.store._segments import Segment

Array = npt.NDArray[Any]


class DerivedSegment(Segment):
    """A segment of another snapshot, read as it is, and the derived columns for its rows.

    Args:
        segment: That one.
        number: Which one it is.
        derived: The Arrow types of the derived columns, by name.
        values: Gives the values of such a column for the rows of a segment's table, ``[rows, *shape]``.
    """

    def __init__(
        self, segment: Segment, number: int, derived: Mapping[str, pa.DataType], values: Callable[[str, int], Array]
    ) -> None:
        self.rows_of, self._number, self._derived, self._values = segment, number, derived, values
        self.num_rows, self.has_indices = segment.num_rows, segment.has_indices
        # Rows that are appended may change what is derived for the rows before: memory of its own for each snapshot.
        self.extent = None if segment.extent is None else object()
        self._parts, self._first_values = {}, {}
        # Where its own values lie: who copies them waits until they are here.
        self.backing, self.sealed_bytes = segment.backing, segment.sealed_bytes

    @property
    def fetched_by(self) -> Any:
        """As of that segment; see ``ElsewhereSegment``."""
        return getattr(self.rows_of, "fetched_by", None)

    @property
    def recorded(self) -> Segment:
        """The same rows without columns that are computed."""
        return self.rows_of.recorded

    @memo
    def table(self) -> pa.Table:
        """The steps, with the derived columns."""
        table = self.rows_of.table
        for name in self._derived:
            table = table.append_column(name, self._column(name))
        return table

    @memo
    def indices(self) -> pa.Table | None:
        """As those of the segment."""
        return self.rows_of.indices

    @memo
    def origin(self) -> Any:
        """As that of the segment."""
        return self.rows_of.origin

    def _slice(self, row: int, count: int) -> pa.Table:
        # Not of the table, which has all rows wherever they lie.
        taken = self.rows_of.take(row, count)
        for name in self._derived:
            taken = taken.append_column(name, self._column(name).slice(row, count))
        return taken

    def column(self, name: str) -> pa.ChunkedArray | None:
        """A column, of those of the segment without computing the others."""
        return self._column(name) if name in self._derived else self.rows_of.column(name)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return {**self.rows_of.types, **self._derived}

    @memo
    def chunk_starts(self) -> npt.NDArray[np.int64]:
        """As those of the segment."""
        return self.rows_of.chunk_starts

    @memo
    def image_roots(self) -> tuple[str, ...]:
        """As those of the segment."""
        return self.rows_of.image_roots

    @memo
    def runs(self) -> Stretches | None:
        """As those of the segment."""
        return self.rows_of.runs

    def row_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As those of the segment."""
        return self.rows_of.row_numbers(rows)

    def part(self, name: str) -> ColumnPart:
        """One column; of those of the segment its own part, which keeps what is known of its chunks."""
        if name not in self._derived:
            return self.rows_of.part(name)
        if name not in self._parts:
            values = partial(self._values, name, self._number)
            self._parts.setdefault(name, _DerivedPart(values, self.chunk_starts))
        return self._parts[name]

    def _column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([to_arrow(self._values(name, self._number))])

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """As that of the segment; what is derived is there for every row, and not computed to learn that."""
        if name not in self._derived:
            return self.rows_of.first_value(name, rows)
        return (0, 0) if rows > 0 else None

    def has_value(self, name: str, rows: int) -> bool:
        """Whether some value among the first ``rows`` rows is not null."""
        return name in self._derived or self.rows_of.has_value(name, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedSegment, (self.rows_of, self._number, self._derived, self._values)


class _DerivedPart(ColumnPart):
    """A derived column of one segment, which is one stretch of memory whatever chunks the segment has.

    Args:
        values: Gives that, ``[rows, *shape]``.
        starts: The first row of every chunk, and the end.
    """

    def __init__(self, values: Any, starts: npt.NDArray[np.int64]) -> None:
        super().__init__(lambda: pa.chunked_array([to_arrow(values())]), starts, same_chunks=False)
        self._values = values

    def known(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where every chunk's values begin, and how many a row has; all are computed for that."""
        if (self.begin == UNKNOWN).any():
            values: Array = self._values()
            with self.lock:
                self.width[:] = prod(values.shape[1:])
                self.begin[:] = values.ctypes.data + self._starts[:-1] * values.strides[0]
        return super().known()


def to_arrow(values: Array) -> pa.Array:
    """Values ``[n, *shape]`` as an Arrow array over the same memory."""
    flat = pa.array(values.reshape(-1))
    for size in values.shape[:0:-1]:
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat
