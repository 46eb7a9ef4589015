"""Appended rows: extents of column memory that are written in place and read as Arrow without a copy.

An extent is never moved or resized. Rows below its count are final, so an Arrow array over them is immutable although
the extent is still being filled; that is what lets a snapshot share memory with a store that is appended to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy import ndarray

from mouse_core.dtypes import convert
from mouse_core.store._tail.columns import ColumnExtent, ObjectExtent, ScalarExtent, VectorExtent, column_extents
from mouse_core.store._tail.values import (
    TailColumn,
    as_array,
    at_row,
    check_kind,
    check_object,
    check_values,
    check_vector,
)

_B = TypeVar("_B", ScalarExtent, VectorExtent)

_FIRST_ROWS = 1024
_MOST_ROWS = 65_536
_MOST_BYTES = 16 << 20


class Extent:
    """Room for some rows of all columns.

    Args:
        columns: How each column is kept, by name.
        before: Rows of the extent before this one; a new extent is twice as large, up to a limit.
        coming: Rows that are known to come.
    """

    def __init__(self, columns: Mapping[str, TailColumn], before: int = 0, coming: int = 0) -> None:
        widest = max((column.row_bytes for column in columns.values()), default=1)
        most = max(16, min(_MOST_ROWS, _MOST_BYTES // max(widest, 1)))
        rows = min(most, max(_FIRST_ROWS, 2 * before, coming))
        self._hold(columns, rows, column_extents(columns, rows))
        self._sort()

    def _hold(
        self, columns: Mapping[str, TailColumn], rows: int, extents: dict[str, ColumnExtent], count: int = 0
    ) -> None:
        """Take memory for ``rows`` rows, of which ``count`` are there already."""
        self.columns, self.rows, self.extents, self.count = dict(columns), rows, extents, count
        # Stands for its memory, which it does not keep alive.
        self.token = object()

    def append(self, row: Mapping[str, Any]) -> bool:
        """Take a row if it is a dict with the extent's columns; False, and nothing has changed, if ``put`` has to say
        what is wrong with it. There must be room.
        """
        at = self.count
        if type(row) is not dict or len(row) != self._names:
            return False
        unusual = False
        try:
            values = self._values_of(row)
            for number, cells, kind, plain in self._cells:
                value = values[number]
                if type(value) is kind or type(value) in plain:
                    cells[at] = value
                else:
                    unusual = True
            for number, lowest, highest, plain in self._bounded:
                # What is of another type is put, which looks at this as well.
                if type(values[number]) in plain and not lowest <= values[number] <= highest:
                    return False
            for number, cells, width, dtype in self._runs:
                value = values[number]
                if type(value) is ndarray and value.dtype is dtype:
                    # Memory takes only memory of the same kind and length.
                    cells[at * width : (at + 1) * width] = value
                else:
                    unusual = True
            for number, put in self._others:
                put(at, values[number])
            if unusual:
                self._put_unusual(at, values)
        except Exception:  # values may be anything, and so may what they raise
            return False
        self.count = at + 1
        return True

    def _put_unusual(self, at: int, values: Sequence[Any]) -> None:
        """Write those values that ``append`` leaves."""
        for number, _, _, plain in self._cells:
            if type(values[number]) not in plain:
                self._ordered[number].put(at, values[number])
        for number, _, _, dtype in self._runs:
            value = values[number]
            if type(value) is not ndarray or value.dtype is not dtype:
                self._ordered[number].put(at, value)
        self._settle()

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
        """Take ``rows`` rows, from row ``done`` on, of what ``prepare`` gave; return how many fit."""
        for name, extent in self.extents.items():
            values = prepared[name]
            if isinstance(values, np.ndarray):
                extent.put_many(self.count, values[done : done + rows])  # type: ignore[arg-type]
            else:
                for row in range(rows):
                    extent.put(self.count + row, values[done + row])
        self.count += rows
        self._settle()
        return rows

    def _settle(self) -> None:
        if not all(extent.takes_memory for extent in self._filled):
            self._sort()

    def _sort(self) -> None:
        """Say how ``append`` is to write each column: as a cell, as a run of cells, or by ``put``."""
        cells = _some(self.extents, ScalarExtent, lambda extent: not extent.is_checked)
        runs = _some(self.extents, VectorExtent, lambda extent: extent.takes_memory)
        names = [*cells, *runs, *(name for name in self.extents if name not in cells and name not in runs)]
        self._ordered = [self.extents[name] for name in names]
        self._names = len(names)
        # A single name gets the value itself from an itemgetter.
        getter: Any = itemgetter(*names) if len(names) > 1 else lambda row: tuple(row[name] for name in names)
        self._values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]] = getter
        self._filled = list(runs.values())
        # By the number of the value among ``names``.
        scalars = list(enumerate(cells.values()))
        self._cells = [(number, extent.cells, extent.kind, extent.plain) for number, extent in scalars]
        self._bounded = [
            (number, *extent.usual, extent.plain) for number, extent in scalars if extent.usual is not None
        ]
        vectors = enumerate(self._filled, len(cells))
        self._runs = [(number, extent.cells, extent.width, extent.dtype) for number, extent in vectors]
        first = len(cells) + len(runs)
        self._others = [(number, extent.put) for number, extent in enumerate(self._ordered[first:], first)]

    def dense(self) -> dict[str, ScalarExtent | VectorExtent]:
        """The columns whose values so far lie in memory as Arrow has them."""
        extents = self.extents.items()
        return {name: one for name, one in extents if not isinstance(one, ObjectExtent) and one.is_dense}

    def to_table(self, rows: int) -> pa.Table:
        """The first ``rows`` rows that were written; later ones never change it."""
        return pa.table({name: extent.to_arrow(rows) for name, extent in self.extents.items()})


def _some(extents: Mapping[str, ColumnExtent], kind: type[_B], chosen: Callable[[_B], bool]) -> dict[str, _B]:
    """The extents of a kind that are chosen."""
    return {name: extent for name, extent in extents.items() if isinstance(extent, kind) and chosen(extent)}


class Refused(Exception):
    """A row is refused for the value of the column of this name; the cause says why."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def prepare(values: Any, column: TailColumn) -> npt.NDArray[Any] | list[Any]:
    """Check many values at once; the result goes to ``put_many``, or is a list for ``put`` where rows differ.

    Raises:
        RowError: A value does not fit the column.
        ValueError, TypeError: None of them does.
    """
    if column.arrow_type is not None:
        return [at_row(row, check_object, value, column) for row, value in enumerate(values)]
    if isinstance(values, pa.Array | pa.ChunkedArray):
        values = values.to_pylist() if values.null_count or column.shape else np.asarray(values)
    try:
        array = as_array(values)
    except ValueError:  # rows of differing lengths
        array = np.empty(0, object)
    if array.dtype == object:
        extent = column_extents({"": column}, 1)[""]
        for row, value in enumerate(values):
            at_row(row, extent.put, 0, value)
        return list(values)
    if column.single and array.shape[1:] in ((), (1,)):
        array = array.reshape(-1, *column.shape)
    if column.shape:
        if array.ndim < 2:
            found = f"{array.dtype} {list(array.shape[1:])}"
            raise ValueError(f"expected arrays of shape {list(column.shape)}, found {found}")
        check_vector(array[0], column)
    elif array.ndim != 1:
        raise ValueError(f"expected one number a row, found arrays of shape {list(array.shape[1:])}")
    array = convert(check_kind(array, column), column.kind.dtype)
    check_values(array, column)
    return array
