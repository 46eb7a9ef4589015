"""Extents of appended rows: column memory that is written in place and read as Arrow without a copy.

An extent is never moved or resized. Rows below its count are final, so an Arrow array over them is immutable although
the extent is still being filled; that is what lets a snapshot share memory with a store that is appended to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy import ndarray

from mouse_core._base.memo import memo
from mouse_core._base.memory import BatchLayout
from mouse_core.columns.appended import TailColumn, checked

_FIRST_ROWS = 1024
_MOST_ROWS = 65_536
_MOST_BYTES = 16 << 20


class NumbersExtent:
    """The memory of a column of numbers, or of arrays of numbers, which may differ in length.

    Args:
        column: How values are kept.
        values: Their memory, ``[rows * width]``, the values of a row behind those of the row before.
        nulls: Which rows are null, bool ``[rows]``; None: allocated for the first null, as most columns have none.
        ends: Where rows that differ in length begin and end among the values, int32 ``[rows + 1]``; None: likewise.
        since: int64 ``[1]``, with ``ends``: 0 while all rows have one length; else the first row that may not, plus 1.
        count: Rows that are there already.
    """

    def __init__(
        self,
        column: TailColumn,
        values: npt.NDArray[Any],
        nulls: npt.NDArray[np.bool_] | None = None,
        ends: npt.NDArray[np.int32] | None = None,
        since: npt.NDArray[np.int64] | None = None,
        count: int = 0,
    ) -> None:
        self.column, self._values, self._memory = column, values, (nulls, ends, since)
        self.address, self.width, self.dtype = values.ctypes.data, column.width, values.dtype
        self._nulls = nulls if nulls is not None and nulls[:count].any() else None
        self.is_regular = True
        if ends is not None and since is not None and 0 < since[0] <= count:
            self._ends, self.is_regular = ends, False
        # Writing through a memoryview, which knows no float16, is three times as fast as through NumPy.
        self.cells: Any = values if values.dtype == np.float16 else memoryview(cast("Any", values))

    @memo
    def _ends(self) -> npt.NDArray[np.int32]:
        # Row n ends where row n + 1 begins. Most often all rows have one length, and no extent needs its own.
        return _equal_ends(len(self._values) // self.width, self.width)

    @property
    def is_dense(self) -> bool:
        """Whether Arrow has the values as they lie here, and all are there."""
        is_flat = not self.column.shape or (self._is_flat and self.is_regular)
        return is_flat and self.dtype != np.bool_ and self._nulls is None

    @property
    def takes_runs(self) -> bool:
        """Whether ``cells`` take an array that has the dtype and shape of a row, and refuse all others."""
        return self._is_flat and self.is_regular and not self.column.is_checked

    @property
    def _is_flat(self) -> bool:
        return len(self.column.shape) == 1 and self.dtype != np.float16

    def put(self, row: int, value: Any) -> None:
        """Check a value and write it; raises as ``checked``."""
        self.write(row, checked(value, self.column))

    def write(self, row: int, value: Any) -> None:
        """Write a value that was checked."""
        if value is None:
            if self._nulls is None:
                kept = self._memory[0]
                self._nulls = np.zeros(len(self._values) // self.width, np.bool_) if kept is None else kept
            self._nulls[row] = True
        if not self.column.shape:
            if value is not None:
                self.cells[row] = value
            return
        values = self._values[:0] if value is None else value.reshape(-1)
        begin = row * self.width if self.is_regular else self._ends[row]
        self._values[begin : begin + values.size] = values
        if values.size != self.width or not self.is_regular:
            self._make_irregular(row)
            self._ends[row + 1] = self._ends[row] + values.size

    def write_many(self, row: int, values: npt.NDArray[Any]) -> None:
        """Write values ``[n, *shape]`` that were checked."""
        begin, width = row * self.width if self.is_regular else int(self._ends[row]), prod(values.shape[1:])
        self._values[begin : begin + values.size] = values.reshape(-1)
        if width != self.width or not self.is_regular:
            self._make_irregular(row)
            self._ends[row + 1 : row + len(values) + 1] = begin + width * np.arange(1, len(values) + 1)

    def _make_irregular(self, row: int) -> None:
        """From this row on, rows may differ in length."""
        if not self.is_regular:
            return
        equal, (_, ends, since) = self._ends, self._memory
        if ends is None or since is None:
            self._ends = equal.copy()
        else:
            ends[: row + 1] = equal[: row + 1]
            since[0] = row + 1
            self._ends = ends
        self.is_regular = False

    def forget(self, row: int) -> None:
        """Take back the nulls of a row that does not count, and of those behind it."""
        if self._nulls is not None:
            self._nulls[row:] = False

    def to_arrow(self, rows: int) -> pa.Array:
        """The first ``rows`` values, as (nested) lists where they are arrays, sharing memory; booleans are copied."""
        shape = self.column.shape
        ends = self._ends[: rows + 1] if shape else None
        values = self._values[: rows if ends is None else int(ends[-1])]
        memory = pa.array(values).buffers()[1] if self.dtype == np.bool_ else pa.py_buffer(values)
        validity = None  # Arrow's bits
        if self._nulls is not None and self._nulls[:rows].any():
            validity = pa.py_buffer(np.packbits(~self._nulls[:rows], bitorder="little"))
        data_type = pa.from_numpy_dtype(self.dtype)
        if ends is None:
            return pa.Array.from_buffers(data_type, rows, [validity, memory])
        leaves = pa.Array.from_buffers(data_type, len(values), [None, memory])
        for size in reversed(shape[1:]):
            leaves = pa.FixedSizeListArray.from_arrays(leaves, size)
        per_item = prod(shape[1:])
        buffers = [validity, pa.py_buffer(ends if per_item == 1 else ends // per_item)]
        return pa.Array.from_buffers(pa.list_(leaves.type), rows, buffers, children=[leaves])


class ObjectExtent:
    """A column of what else Arrow can hold: strings, structs, encoded images.

    Args:
        column: How values are kept.
    """

    def __init__(self, column: TailColumn) -> None:
        self.column = column
        self._items: list[Any] = []

    def put(self, row: int, value: Any) -> None:
        """Check a value and write it; raises as ``checked``."""
        self.write(row, checked(value, self.column))

    def write(self, row: int, value: Any) -> None:
        """Write a value that was checked."""
        del self._items[row:]
        self._items.append(value)

    def forget(self, row: int) -> None:
        """Take back a row that does not count, and those behind it."""
        del self._items[row:]

    def to_arrow(self, rows: int) -> pa.Array:
        """The first ``rows`` values, copied."""
        return pa.array(self._items[:rows], self.column.arrow_type)


ColumnExtent = NumbersExtent | ObjectExtent


class Extent:
    """Memory for some rows of all columns; ``allocate`` makes one that takes rows.

    Args:
        columns: How each column is kept, by name.
        rows: How many rows there is memory for.
        extents: The memory of each column.
        count: Rows that are there already.
    """

    def __init__(
        self, columns: Mapping[str, TailColumn], rows: int, extents: dict[str, ColumnExtent], count: int = 0
    ) -> None:
        self.columns, self.rows, self.extents, self.count = dict(columns), rows, extents, count
        # Stands for its memory, which it does not keep alive.
        self.token = object()

    @classmethod
    def allocate(cls, columns: Mapping[str, TailColumn], before: int = 0, coming: int = 0) -> Self:
        """An extent without rows, of one stretch of Arrow's memory, whose allocator has large pages.

        Args:
            columns: How each column is kept, by name.
            before: Rows of the extent before this one; a new extent is twice as large, up to a limit.
            coming: Rows that are known to come.
        """
        widest = max((column.row_bytes for column in columns.values()), default=1)
        most = max(16, min(_MOST_ROWS, _MOST_BYTES // max(widest, 1)))
        rows = min(most, max(_FIRST_ROWS, 2 * before, coming))
        numbers = {name: column for name, column in columns.items() if not column.is_object}
        layout = BatchLayout({name: ((rows * one.width,), one.kind.dtype) for name, one in numbers.items()})
        values = layout.arrays(pa.allocate_buffer(layout.nbytes)) if layout.fields else {}
        extents: dict[str, ColumnExtent] = {
            name: NumbersExtent(column, values[name]) if name in values else ObjectExtent(column)
            for name, column in columns.items()
        }
        made = cls(columns, rows, extents)
        made._sort()
        return made

    def append(self, row: Mapping[str, Any]) -> bool:
        """Take a row if it is a dict with the extent's columns; False, and nothing has changed, if ``put`` has to say
        what is wrong with it. There must be room.
        """
        at = self.count
        if type(row) is not dict or len(row) != self._names:
            return False
        try:
            values = self._values_of(row)
            for number, cells, plain, lowest, highest, put in self._cells:
                value = values[number]
                if type(value) in plain and lowest <= value <= highest:
                    cells[at] = value
                else:
                    put(at, value)
            for number, put in self._others:
                put(at, values[number])
            for number, cells, width, dtype, put in self._runs:
                value = values[number]
                if type(value) is ndarray and value.dtype is dtype:
                    # Memory takes only memory of the same kind and length.
                    cells[at * width : (at + 1) * width] = value
                else:
                    put(at, value)
                    self._settle()  # numbers the values anew, hence runs come last
        except Exception:  # values may be anything, and so may what they raise
            return False
        self.count = at + 1
        return True

    def put(self, row: Mapping[str, Any]) -> None:
        """Take a row with the columns' names.

        Raises:
            Refused: A value does not fit; nothing has changed.
        """
        name = ""
        try:
            for name, extent in self.extents.items():
                extent.put(self.count, row[name])
        except Exception as error:  # values may be anything, and so may what they raise
            self.forget_parts()
            raise Refused(name) from error
        self.count += 1
        self._settle()

    def forget_parts(self) -> None:
        """Have nothing behind the last row, where only a part of another came."""
        for extent in self.extents.values():
            extent.forget(self.count)
        self._sort()

    def put_many(self, prepared: Mapping[str, Any], done: int, rows: int) -> int:
        """Take ``rows`` rows, from row ``done`` on, of what ``checked_rows`` gave; return how many fit."""
        for name, extent in self.extents.items():
            values = prepared[name]
            if isinstance(values, ndarray) and isinstance(extent, NumbersExtent):
                extent.write_many(self.count, values[done : done + rows])
            else:
                for row in range(rows):
                    extent.write(self.count + row, values[done + row])
        self.count += rows
        self._settle()
        return rows

    def _settle(self) -> None:
        """Note where the rows of a column differ in length from now on."""
        if not all(extent.takes_runs for extent in self._filled):
            self._sort()

    def _sort(self) -> None:
        """Decide how ``append`` writes each column: as a cell, as a run of cells, or by ``put``."""
        numbers = {name: extent for name, extent in self.extents.items() if isinstance(extent, NumbersExtent)}
        cells = {name: extent for name, extent in numbers.items() if extent.column.limits is not None}
        runs = {name: extent for name, extent in numbers.items() if extent.takes_runs}
        names = [*cells, *runs, *(name for name in self.extents if name not in cells and name not in runs)]
        self._names, self._filled = len(names), list(runs.values())
        # A single name gets the value itself from an itemgetter.
        getter: Any = itemgetter(*names) if len(names) > 1 else lambda row: tuple(row[name] for name in names)
        self._values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]] = getter
        # By the number of the value among ``names``.
        place = {name: number for number, name in enumerate(names)}
        self._cells = [
            (place[name], one.cells, one.column.plain, *(one.column.limits or (0, 0)), one.put)
            for name, one in cells.items()
        ]
        self._runs = [(place[name], one.cells, one.width, one.dtype, one.put) for name, one in runs.items()]
        self._others = [(place[name], self.extents[name].put) for name in names[len(cells) + len(runs) :]]

    def dense(self) -> dict[str, NumbersExtent]:
        """The columns whose values so far lie in memory as Arrow has them."""
        extents = self.extents.items()
        return {name: one for name, one in extents if isinstance(one, NumbersExtent) and one.is_dense}

    def to_table(self, rows: int) -> pa.Table:
        """The first ``rows`` rows that were written; later ones never change it."""
        return pa.table({name: extent.to_arrow(rows) for name, extent in self.extents.items()})


class Refused(Exception):
    """A row is refused for the value of the column of this name; the cause says why."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@lru_cache(maxsize=16)
def _equal_ends(rows: int, width: int) -> npt.NDArray[np.int32]:
    """Return the begins and the last end of ``rows`` rows of ``width`` values, int32 ``[rows + 1]``."""
    ends = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    ends.flags.writeable = False
    return ends
