"""The memory of one column of an extent of appended rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.memo import memo
from mouse_core._base.memory import BatchLayout
from mouse_core.dtypes import convert, is_hidden
from mouse_core.store._tail.values import (
    TailColumn,
    check_object,
    check_scalar,
    check_values,
    check_vector,
    plain_types,
)


@dataclass(frozen=True)
class ColumnRoom:
    """The memory of a column of numbers; what most columns never need is there only where somebody else keeps it.

    Args:
        values: The numbers, ``[rows * width]``, those of a row behind those of the row before.
        nulls: Which rows are null, bool ``[rows]``.
        ends: Where rows that differ in length begin and end among the values, int32 ``[rows + 1]``.
        since: int64 ``[1]``: 0 while all rows are of one length; else the first row that may not be, plus 1.
    """

    values: npt.NDArray[Any]
    nulls: npt.NDArray[np.bool_] | None = None
    ends: npt.NDArray[np.int32] | None = None
    since: npt.NDArray[np.int64] | None = None


class NumbersExtent:
    """The memory of numbers, or arrays of numbers, and which rows are null; most often none.

    Args:
        column: How they are kept.
        room: The memory.
        count: Rows that are there already.
    """

    def __init__(self, column: TailColumn, room: ColumnRoom, count: int = 0) -> None:
        self._column, self._room, self._values = column, room, room.values
        values = room.values
        self.address, self.width = values.ctypes.data, column.width
        self._nulls: npt.NDArray[np.bool_] | None = None
        if room.nulls is not None and room.nulls[:count].any():
            self._nulls = room.nulls
        # Writing through a memoryview, which knows no float16, is three times as fast as through NumPy.
        self.cells: Any = values if values.dtype == np.float16 else memoryview(cast("Any", values))

    @property
    def is_dense(self) -> bool:
        """Whether Arrow has the values as they lie here, and all are there."""
        return self._values.dtype != np.bool_ and self._nulls is None

    def _put_null(self, row: int) -> None:
        if self._nulls is None:
            kept = self._room.nulls
            self._nulls = np.zeros(len(self._values) // self.width, np.bool_) if kept is None else kept
        self._nulls[row] = True

    def forget(self, row: int) -> None:
        """Whatever was put into a row that does not count, or behind it, put it as if it had not been."""
        if self._nulls is not None:
            self._nulls[row:] = False

    def _validity(self, rows: int) -> pa.Buffer | None:
        """Arrow's bits of the first ``rows`` rows; None where none of them is null."""
        if self._nulls is None or not self._nulls[:rows].any():
            return None
        return pa.py_buffer(np.packbits(~self._nulls[:rows], bitorder="little"))


class ScalarExtent(NumbersExtent):
    """Numbers, one a row."""

    def __init__(self, column: TailColumn, room: ColumnRoom, count: int = 0) -> None:
        super().__init__(column, room, count)
        # The type that most values have, and all those which need no conversion.
        self.kind = {"b": bool, "f": float}.get(column.kind.dtype.kind, int)
        self.plain = plain_types(column.kind.dtype)
        self.whole = column.whole
        self.bounds: tuple[float, float] | None = column.bounds
        self._largest = inf
        # The largest integer that is written as it comes.
        self._exact = 2.0**53 if column.kind.dtype.kind == "f" else inf
        #: Whether there is more to check than ``usual`` says.
        self.is_checked = column.whole or (column.domain is not None and column.domain_limits is None)
        if column.bounds is None and column.kind.dtype in (np.float16, np.float32):
            # Python floats are wider than these dtypes; they would become infinite.
            self._largest = float(np.finfo(self._values.dtype.type(0)).max)

    @property
    def usual(self) -> tuple[float, float] | None:
        """Between which numbers of a plain type nothing is left to check; None: there are no such limits."""
        largest = min(self._largest, self._exact)
        limits = self.bounds if largest is inf or self.bounds is not None else (-largest, largest)
        within = self._column.domain_limits
        return within if limits is None else limits if within is None else _common(limits, within)

    def put(self, row: int, value: Any) -> None:
        """Write one value; raises ValueError, TypeError or OverflowError where it does not fit."""
        if type(value) not in self.plain and self._column.nullable and is_hidden(value):
            self._put_null(row)
            return
        if type(value) not in self.plain or (type(value) is int and not -self._exact <= value <= self._exact):
            value = check_scalar(value, self._column)
        if self.bounds is not None and not self.bounds[0] <= value <= self.bounds[1]:
            raise ValueError(f"expected {self._column.allowed}, found {value}")
        if self.whole and not (isfinite(value) and value == int(value)):
            raise ValueError(f"expected a whole number, found {value}")
        if self._largest is not inf and not -self._largest <= value <= self._largest and isfinite(value):
            raise ValueError(f"expected a value that fits {self._values.dtype}, found {value}")
        if self._column.domain is not None:
            check_values(np.asarray(value), self._column)
        try:
            self.cells[row] = value
        except ValueError as error:
            raise ValueError(f"expected a value that fits {self._values.dtype}, found {value}") from error

    def put_many(self, row: int, values: npt.NDArray[Any]) -> None:
        """Write values that ``prepare`` has checked."""
        self._values[row : row + len(values)] = values

    def to_arrow(self, rows: int) -> pa.Array:
        """The first ``rows`` values, sharing their memory (booleans are packed, hence copied)."""
        values = self._values[:rows]
        memory = pa.array(values).buffers()[1] if values.dtype == np.bool_ else pa.py_buffer(values)
        return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), rows, [self._validity(rows), memory])


class VectorExtent(NumbersExtent):
    """Arrays of numbers, one a row; rows of one dimension may differ in length."""

    def __init__(self, column: TailColumn, room: ColumnRoom, count: int = 0) -> None:
        super().__init__(column, room, count)
        self.is_regular = True
        if room.ends is not None and room.since is not None and 0 < room.since[0] <= count:
            self._ends, self.is_regular = room.ends, False
        # Arrays of this shape need no check; images of other dtypes do.
        self._plain_shape = None if column.image and column.kind.dtype != np.uint8 else column.shape
        self.dtype: np.dtype[Any] = column.kind.dtype
        self._is_checked = column.whole or column.domain is not None or (column.bounds is not None and not column.image)

    @memo
    def _ends(self) -> npt.NDArray[np.int32]:
        # Row n ends where row n + 1 begins. Most often all rows are of one length, and no extent needs its own.
        return _equal_ends(len(self._values) // self.width, self.width)

    @property
    def is_dense(self) -> bool:
        """Whether Arrow has the values as they lie here, and all are there."""
        return self._is_flat and super().is_dense

    @property
    def takes_memory(self) -> bool:
        """Whether ``cells`` take an array, if its dtype and shape are those of a row, and refuse all others."""
        return self._is_flat and not self._is_checked

    @property
    def _is_flat(self) -> bool:
        return self.is_regular and len(self._column.shape) == 1 and self._values.dtype != np.float16

    def put(self, row: int, value: Any) -> None:
        """Write one array; raises ValueError or TypeError where it does not fit."""
        if type(value) is not np.ndarray and self._column.nullable and is_hidden(value):
            self._put_null(row)
            self._end(row, 0)
            return
        values = self._values
        if type(value) is not np.ndarray or value.dtype != values.dtype or value.shape != self._plain_shape:
            value = convert(check_vector(value, self._column), values.dtype)
        if self._is_checked:
            check_values(value, self._column)
        if value.ndim > 1:
            value = value.reshape(-1)
        begin = row * self.width if self.is_regular else self._ends[row]
        values[begin : begin + value.size] = value
        self._end(row, value.size)

    def _end(self, row: int, size: int) -> None:
        if size != self.width or not self.is_regular:
            self._make_irregular(row)
            self._ends[row + 1] = self._ends[row] + size

    def _make_irregular(self, row: int) -> None:
        if not self.is_regular:
            return
        room, equal = self._room, self._ends
        if room.ends is None or room.since is None:
            self._ends = equal.copy()
        else:
            room.ends[: row + 1] = equal[: row + 1]
            room.since[0] = row + 1
            self._ends = room.ends
        self.is_regular = False

    def put_many(self, row: int, values: npt.NDArray[Any]) -> None:
        """Write arrays ``[n, *shape]`` that ``prepare`` has checked."""
        begin, width = row * self.width if self.is_regular else int(self._ends[row]), prod(values.shape[1:])
        self._values[begin : begin + values.size] = values.reshape(-1)
        if width != self.width or not self.is_regular:
            self._make_irregular(row)
            self._ends[row + 1 : row + len(values) + 1] = begin + width * np.arange(1, len(values) + 1)

    def to_arrow(self, rows: int) -> pa.Array:
        """The first ``rows`` arrays as (nested) lists, sharing their memory."""
        used = int(self._ends[rows])
        data_type = pa.from_numpy_dtype(self._values.dtype)
        if self._values.dtype == np.bool_:
            leaves = pa.array(self._values[:used])
        else:
            leaves = pa.Array.from_buffers(data_type, used, [None, pa.py_buffer(self._values[:used])])
        for size in reversed(self._column.shape[1:]):
            leaves = pa.FixedSizeListArray.from_arrays(leaves, size)
        per_item = prod(self._column.shape[1:])
        ends = self._ends[: rows + 1] if per_item == 1 else self._ends[: rows + 1] // per_item
        buffers = [self._validity(rows), pa.py_buffer(ends)]
        return pa.Array.from_buffers(pa.list_(leaves.type), rows, buffers, children=[leaves])


class ObjectExtent:
    """Anything else that Arrow can hold: strings, structs, encoded images."""

    def __init__(self, column: TailColumn) -> None:
        self._column = column
        self._items: list[Any] = []

    def put(self, row: int, value: Any) -> None:
        """Write one value; raises ValueError or a pyarrow error where it does not fit the column's type."""
        item = check_object(value, self._column)
        del self._items[row:]
        self._items.append(item)

    def put_many(self, row: int, values: Sequence[Any]) -> None:
        """Write values that ``prepare`` has checked."""
        del self._items[row:]
        self._items.extend(values)

    def forget(self, row: int) -> None:
        """Whatever was put into a row that does not count, or behind it, put it as if it had not been."""
        del self._items[row:]

    def to_arrow(self, rows: int) -> pa.Array:
        """The first ``rows`` values, copied."""
        return pa.array(self._items[:rows], self._column.arrow_type)


ColumnExtent = ScalarExtent | VectorExtent | ObjectExtent


def column_extents(columns: Mapping[str, TailColumn], rows: int) -> dict[str, ColumnExtent]:
    """Room for ``rows`` rows of some columns.

    Their memory is one stretch of Arrow's, whose allocator has large pages: these are there sooner and read sooner.
    """
    layout = BatchLayout(
        {name: ((rows * column.width,), column.kind.dtype) for name, column in columns.items() if not column.is_object}
    )
    values = layout.arrays(pa.allocate_buffer(layout.nbytes)) if layout.fields else {}
    extents: dict[str, ColumnExtent] = {}
    for name, column in columns.items():
        if column.is_object:
            extents[name] = ObjectExtent(column)
        else:
            extents[name] = numbers_extent(column, ColumnRoom(values[name]))
    return extents


def numbers_extent(column: TailColumn, room: ColumnRoom, count: int = 0) -> ScalarExtent | VectorExtent:
    """Some memory as that of a column's numbers, of which ``count`` rows are there already."""
    return (VectorExtent if column.shape else ScalarExtent)(column, room, count)


def _common(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """What lies between both of two lowest and highest numbers."""
    return max(one[0], other[0]), min(one[1], other[1])


@lru_cache(maxsize=16)
def _equal_ends(rows: int, width: int) -> npt.NDArray[np.int32]:
    """Where ``rows`` rows of ``width`` values begin and end, int32 ``[rows + 1]``."""
    ends = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    ends.flags.writeable = False
    return ends
