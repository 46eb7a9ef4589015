"""Appended rows: blocks of column memory that are written in place and read as Arrow without a copy.

A block is never moved or resized. Rows below its count are final, so an Arrow array over them is immutable although
the block is still being filled; that is what lets a snapshot share memory with a store that is appended to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._convert import RowError, convert
from mouse_core._layout import ColumnType
from mouse_core.images import decode_image, encode_png, encoded_shape

_FIRST_ROWS = 1024
_MOST_ROWS = 65_536
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class TailColumn:
    """How one column of appended rows is kept.

    Args:
        kind: The column's type.
        shape: The shape of a row; ``()`` for scalars.
        arrow_type: The Arrow type of values that are kept as Python objects (strings, encoded images); else None.
        nullable: Whether None is allowed.
        widths: Narrowest and widest row allowed, both included, for vectors of one dimension.
        bounds: Lowest and highest value allowed; None: any.
        image: Whether values are images, kept as arrays of pixels.
        whole: Whether single numbers must be whole, although the column holds floats.
        object_bytes: About how many bytes a Python object takes; snapshots copy those of the open block.
    """

    kind: ColumnType
    shape: tuple[int, ...] = ()
    arrow_type: pa.DataType | None = None
    nullable: bool = False
    widths: tuple[int, int] | None = None
    bounds: tuple[int, int] | None = None
    image: bool = False
    whole: bool = False
    object_bytes: int = 64

    @property
    def row_bytes(self) -> int:
        """About how many bytes a row takes."""
        return self.object_bytes if self.arrow_type is not None else int(np.prod(self.shape)) * self.kind.dtype.itemsize


class ScalarBlock:
    """Numbers, one a row."""

    def __init__(self, column: TailColumn, rows: int) -> None:
        self._values = np.empty(rows, column.kind.dtype)
        self._nulls = np.zeros(rows, np.bool_) if column.nullable else None
        # Writing through a memoryview, which knows no float16, is three times as fast as through NumPy.
        self._cells: Any = self._values
        if column.kind.dtype != np.float16:
            self._cells = memoryview(cast("Any", self._values))
        self._plain = _plain_types(column.kind.dtype)
        self._bounds = column.bounds
        self._whole = column.whole
        if column.bounds is None and column.kind.dtype in (np.float16, np.float32):
            # Python floats are wider than these dtypes; they would become infinite.
            self._largest = float(np.finfo(self._values.dtype.type(0)).max)
        else:
            self._largest = inf

    def put(self, row: int, value: Any) -> None:
        """Write one value; raises ValueError, TypeError or OverflowError where it does not fit."""
        if self._nulls is not None:
            self._nulls[row] = value is None
            if value is None:
                return
        if type(value) not in self._plain:
            value = _scalar(value, self._values.dtype)
        if self._bounds is not None and not self._bounds[0] <= value <= self._bounds[1]:
            raise ValueError(f"expected {self._bounds[0]}..{self._bounds[1]}, found {value}")
        if self._whole and not (isfinite(value) and value == int(value)):
            raise ValueError(f"expected a whole number, found {value}")
        if self._largest is not inf and not -self._largest <= value <= self._largest and isfinite(value):
            raise ValueError(f"expected a value that fits {self._values.dtype}, found {value}")
        try:
            self._cells[row] = value
        except ValueError as error:
            raise ValueError(f"expected a value that fits {self._values.dtype}, found {value}") from error

    def put_many(self, row: int, values: npt.NDArray[Any]) -> None:
        """Write values that ``prepare`` has checked."""
        self._values[row : row + len(values)] = values
        if self._nulls is not None:
            self._nulls[row : row + len(values)] = False

    def to_arrow(self, rows: int) -> pa.Array:
        """The first ``rows`` values, sharing their memory (booleans are packed, hence copied)."""
        values = self._values[:rows]
        validity = _validity(self._nulls, rows)
        if values.dtype == np.bool_:
            return pa.array(values, mask=None if self._nulls is None else self._nulls[:rows])
        return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), rows, [validity, pa.py_buffer(values)])


class VectorBlock:
    """Arrays of numbers, one a row; rows of one dimension may differ in length."""

    def __init__(self, column: TailColumn, rows: int) -> None:
        self._column = column
        # Row n ends where row n + 1 begins.
        self._ends = np.zeros(rows + 1, np.int32)
        self._end_cells = memoryview(cast("Any", self._ends))
        # Arrays of this shape need no check; images always do.
        self._plain_shape = None if column.image else column.shape
        widest = column.widths[1] if column.widths else int(np.prod(column.shape))
        self._values = np.empty(rows * widest, column.kind.dtype)
        self._nulls = np.zeros(rows, np.bool_) if column.nullable else None

    def put(self, row: int, value: Any) -> None:
        """Write one array; raises ValueError or TypeError where it does not fit."""
        begin = self._end_cells[row]
        if self._nulls is not None:
            self._nulls[row] = value is None
            if value is None:
                self._end_cells[row + 1] = begin
                return
        values = self._values
        if type(value) is not np.ndarray or value.dtype != values.dtype or value.shape != self._plain_shape:
            value = convert(check_vector(value, self._column), values.dtype)
        if value.ndim > 1:
            value = value.reshape(-1)
        end = begin + value.size
        values[begin:end] = value
        self._end_cells[row + 1] = end

    def put_many(self, row: int, values: npt.NDArray[Any]) -> None:
        """Write arrays ``[n, *shape]`` that ``prepare`` has checked."""
        begin, width = int(self._ends[row]), int(np.prod(values.shape[1:]))
        self._values[begin : begin + values.size] = values.reshape(-1)
        self._ends[row + 1 : row + len(values) + 1] = begin + width * np.arange(1, len(values) + 1)
        if self._nulls is not None:
            self._nulls[row : row + len(values)] = False

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
        per_item = int(np.prod(self._column.shape[1:]))
        ends = self._ends[: rows + 1] if per_item == 1 else self._ends[: rows + 1] // per_item
        buffers = [_validity(self._nulls, rows), pa.py_buffer(ends)]
        return pa.Array.from_buffers(pa.list_(leaves.type), rows, buffers, children=[leaves])


class ObjectBlock:
    """Anything else that Arrow can hold: strings, structs, encoded images."""

    def __init__(self, column: TailColumn, rows: int) -> None:
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

    def to_arrow(self, rows: int) -> pa.Array:
        """The first ``rows`` values, copied."""
        return pa.array(self._items[:rows], self._column.arrow_type)


ColumnBlock = ScalarBlock | VectorBlock | ObjectBlock


class Block:
    """Room for some rows of all columns.

    Args:
        columns: How each column is kept, by name.
        rows: Rows of the block before this one; a new block is twice as large, up to a limit.
    """

    def __init__(self, columns: Mapping[str, TailColumn], rows: int = 0) -> None:
        self.columns = dict(columns)
        widest = max((column.row_bytes for column in columns.values()), default=1)
        most = max(16, min(_MOST_ROWS, _MOST_BYTES // max(widest, 1)))
        self.rows = min(most, max(_FIRST_ROWS, 2 * rows))
        self.count = 0
        self.blocks: dict[str, ColumnBlock] = {
            name: _block_type(column)(column, self.rows) for name, column in columns.items()
        }
        self.puts: list[tuple[str, Callable[[int, Any], None]]] = [
            (name, block.put) for name, block in self.blocks.items()
        ]

    def to_table(self) -> pa.Table:
        """The rows written so far; later rows never change it."""
        return pa.table({name: block.to_arrow(self.count) for name, block in self.blocks.items()})


def prepare(values: Any, column: TailColumn) -> npt.NDArray[Any] | list[Any]:
    """Check many values at once; the result goes to ``put_many``, or is a list for ``put`` where rows differ.

    Raises:
        RowError: A value does not fit the column.
        ValueError, TypeError: None of them does.
    """
    if column.arrow_type is not None:
        return [_at_row(row, check_object, value, column) for row, value in enumerate(values)]
    if isinstance(values, pa.Array | pa.ChunkedArray):
        values = values.to_pylist() if values.null_count or column.shape else values.to_numpy()
    try:
        array = np.asarray(values)
    except ValueError:  # rows of differing lengths
        array = np.empty(0, object)
    if array.dtype == object:
        block = Block({"": column}).blocks[""]
        for row, value in enumerate(values):
            _at_row(row, block.put, 0, value)
        return list(values)
    if column.shape:
        if array.ndim < 2:
            found = f"{array.dtype} {list(array.shape[1:])}"
            raise ValueError(f"expected arrays of shape {list(column.shape)}, found {found}")
        check_vector(array[0], column)
    elif array.ndim != 1:
        raise ValueError(f"expected one number a row, found arrays of shape {list(array.shape[1:])}")
    array = convert(_check_kind(array, column.kind.dtype), column.kind.dtype)
    if column.whole:
        convert(array, np.dtype(np.int64))
    bounds = (0, 255) if column.image else column.bounds
    if bounds is not None and not (array.min() >= bounds[0] and array.max() <= bounds[1]):
        outside = ~((array >= bounds[0]) & (array <= bounds[1]))
        place = int(outside.argmax())
        row = place * len(array) // array.size
        raise RowError(row, f"expected {bounds[0]}..{bounds[1]}, found {array.flat[place].item()}")
    return array


def _at_row(row: int, check: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return check(*arguments)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise RowError(row, str(error)) from error


def check_vector(value: Any, column: TailColumn) -> npt.NDArray[Any]:
    """``value`` as an array whose kind and shape fit the column, or ValueError."""
    if column.image:
        pixels = decode_image(value)
        value = pixels[:, :, 0] if pixels.shape == (*column.shape, 1) else pixels
    array = value if type(value) is np.ndarray else np.asarray(value)
    if column.widths is not None and array.ndim == 1:
        narrowest, widest = column.widths
        if not narrowest <= array.size <= widest:
            wanted = str(widest) if narrowest == widest else f"{narrowest} to {widest}"
            raise ValueError(f"expected {wanted} values, found {array.size}")
    elif array.shape != column.shape:
        raise ValueError(f"expected shape {list(column.shape)}, found {list(array.shape)}")
    return _check_kind(array, column.kind.dtype)


def check_object(value: Any, column: TailColumn) -> Any:
    """``value`` as an item of an ObjectBlock, or ValueError or a pyarrow error."""
    if value is None:
        if not column.nullable:
            raise ValueError("expected a value, found None")
        return None
    if column.kind.kind == "image":
        item = value if isinstance(value, bytes | Mapping) else encode_png(value)
        item = item if isinstance(item, Mapping) else {"bytes": item, "path": None}
        found = encoded_shape(item)
        if column.shape and found != column.shape:
            raise ValueError(f"expected shape {list(column.shape)}, found {list(found)}")
        return item if pa.types.is_struct(column.arrow_type) else item["bytes"]
    if column.kind.kind == "null":
        raise ValueError(f"expected None, found {value!r}")
    pa.scalar(value, column.arrow_type)
    return value


def _check_kind(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    # Whole numbers may go to float columns, never fractions to integer columns.
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and dtype.kind != "f"):
        raise TypeError(f"expected {dtype}, found {array.dtype}")
    return array


def _scalar(value: Any, dtype: np.dtype[Any]) -> Any:
    """A number that is none of the usual Python types (a NumPy scalar, a 0-d array) as one."""
    if value is None:
        raise ValueError("expected a value, found None")
    array = np.asarray(value)
    if array.ndim:
        raise ValueError(f"expected a single number, found shape {list(array.shape)}")
    return convert(_check_kind(array, dtype), dtype)[()]


def _plain_types(dtype: np.dtype[Any]) -> frozenset[type]:
    """Types whose values a memoryview of ``dtype`` takes as they are, or refuses."""
    types: list[type] = [bool] if dtype.kind == "b" else [bool, int, np.int32, np.int64]
    return frozenset([*types, float, np.float32, np.float64] if dtype.kind == "f" else types)


def _validity(nulls: npt.NDArray[np.bool_] | None, rows: int) -> pa.Buffer | None:
    if nulls is None or not nulls[:rows].any():
        return None
    return pa.py_buffer(np.packbits(~nulls[:rows], bitorder="little"))


def _block_type(column: TailColumn) -> type[ColumnBlock]:
    if column.arrow_type is not None:
        return ObjectBlock
    return VectorBlock if column.shape else ScalarBlock
