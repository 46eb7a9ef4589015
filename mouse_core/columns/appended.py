"""Columns of appended rows: how each is kept, as its first value and its field say, and which values it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import ColumnType, column_type
from mouse_core._base.checks import values_of
from mouse_core._base.memo import memo
from mouse_core.dtypes import (
    RowError,
    convert,
    is_beyond_floats,
    is_hidden,
    is_ml_float,
    largest_of,
    refuse_hidden,
    to_numpy,
    widened,
)
from mouse_core.errors import DataError
from mouse_core.images.pixels import check_image, decode_image, encode_png, image_shape, is_encoded
from mouse_core.spec import Field

_BYTE = np.dtype(np.uint8)
_IMAGE_STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_OBJECT_BYTES = 64  # the least that an object takes, where its first value does not say more


@dataclass(frozen=True)
class TailColumn:
    """The storage form of one column of appended rows.

    Args:
        kind: The column's type.
        shape: The shape of a row; ``()`` for scalars.
        arrow_type: The Arrow type of values that are kept as Python objects (strings, encoded images); else None.
        nullable: Whether None is allowed.
        widths: Narrowest and widest row allowed, both included, for vectors of one dimension.
        bounds: Lowest and highest value allowed; None: any.
        image: Whether values are images, kept as arrays of pixels.
        any_bytes: Whether bytes are any, as no field reads images from the column.
        pixel: The dtype of images' pixels.
        image_roots: Folders in which images that are named by path may lie.
        whole: Whether numbers must be whole, although the column holds floats.
        whole_floats: Whether floats that are whole go into a column of integers, as the field delivers floats.
        single: Whether a number and a vector of one value are the same.
        allowed: The values within ``bounds``, in words.
        domain: Which values rows may have, a spec of ``mouse_core.spec``; None: any.
        zeros: Whether a row of zeros is allowed as well, as where no action led to it.
        object_bytes: About how many bytes a Python object takes; snapshots copy those of the open extent.
    """

    kind: ColumnType
    shape: tuple[int, ...] = ()
    arrow_type: pa.DataType | None = None
    nullable: bool = False
    widths: tuple[int, int] | None = None
    bounds: tuple[int, int] | None = None
    image: bool = False
    any_bytes: bool = False
    pixel: np.dtype[Any] = _BYTE
    image_roots: tuple[str, ...] = ()
    whole: bool = False
    whole_floats: bool = False
    single: bool = False
    allowed: str = ""
    domain: Any = None
    zeros: bool = False
    object_bytes: int = _OBJECT_BYTES

    @memo
    def dtype(self) -> np.dtype[Any]:
        """The dtype of numbers."""
        return self.kind.dtype

    @memo
    def plain_dtype(self) -> np.dtype[Any]:
        """The dtype of arrays that are kept as they come, but for ``is_checked``; void where all pixels are checked."""
        return np.dtype(np.void) if self.image and self.dtype != np.uint8 else self.dtype

    @memo
    def is_object(self) -> bool:
        """Whether values are kept as Python objects."""
        return self.arrow_type is not None

    @property
    def width(self) -> int:
        """Numbers in a row, at most."""
        return self.widths[1] if self.widths else prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """About how many bytes a row takes."""
        return self.object_bytes if self.is_object else self.width * self.dtype.itemsize

    @memo
    def is_checked(self) -> bool:
        """Whether numbers of the column's dtype may be refused."""
        return self.whole or self.domain is not None or (self.bounds is not None and not self.image)

    @memo
    def limits(self) -> tuple[float, float] | None:
        """Between which single numbers of ``plain`` types need no check; None where every value needs one."""
        spec = self.domain
        of_spec: tuple[float, float] | None = (-inf, inf)
        if spec is not None:
            is_same = holds(spec.shape, self.shape) and (spec.dtype.kind == "f" or self.dtype.kind != "f")
            of_spec = spec.limits if is_same else None
        if self.is_object or self.shape or self.whole or of_spec is None:
            return None
        dtype = self.dtype
        limits = [of_spec, self.bounds or (-inf, inf)]
        if dtype.kind == "f":
            # Narrow dtypes do not hold all of Python's floats, and floats not all integers beyond 2**53.
            largest = min(largest_of(dtype), 2.0**53)
            limits.append((-largest, largest))
        elif dtype.kind != "b":
            limits.append((int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)))
        return max(low for low, _ in limits), min(high for _, high in limits)

    @memo
    def plain(self) -> frozenset[type]:
        """Types whose values a memoryview of the column's dtype takes as they are, or refuses."""
        dtype = self.dtype
        if dtype.kind == "b":
            return frozenset([bool, np.bool_])
        types: list[type] = [bool, int, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32]
        if dtype.kind == "f":  # which does not hold all integers of 64 bits
            return frozenset([*types, float, np.float16, np.float32, np.float64])
        return frozenset([*types, np.int64, np.uint64])


# ---------------------------------------------------------------------- values


def checked(value: Any, column: TailColumn) -> Any:
    """A value as the column keeps it: None for a null, a number or an array of the column's dtype, or an object.

    Raises:
        ValueError, TypeError, pyarrow.ArrowException: The column does not take the value.
    """
    if column.is_object:
        return _checked_object(value, column)
    if type(value) is np.ndarray and value.shape == column.shape != () and value.dtype == column.plain_dtype:
        return _checked_numbers(value, column) if column.is_checked else value
    if is_hidden(value):
        if column.nullable:
            return None
        if value is None:
            raise ValueError("expected a value, found None")
    return _checked_numbers(_in_row_shape(value, column), column)[()]


def checked_rows(values: Any, column: TailColumn) -> npt.NDArray[Any] | list[Any]:
    """The values of many rows as the column keeps them: an array, or a list with an item for each where rows differ.

    Raises:
        RowError: The column does not take a value.
        ValueError, TypeError: It takes none of them.
    """
    if column.is_object:
        return [at_row(row, checked, value, column) for row, value in enumerate(values)]
    if type(values) is np.ndarray and values.shape[1:] == column.shape and values.dtype == column.plain_dtype:
        return _checked_numbers(values, column) if column.is_checked else values
    if isinstance(values, pa.Array | pa.ChunkedArray):
        values = values.to_pylist() if values.null_count or column.shape else np.asarray(values)
    try:
        array = as_array(values)
    except ValueError:  # rows of differing lengths
        array = np.empty(0, object)
    if array.dtype == object:
        return [at_row(row, checked, value, column) for row, value in enumerate(values)]
    if column.single and array.shape[1:] in ((), (1,)):
        array = array.reshape(-1, *column.shape)
    if column.shape and array.ndim < 2:
        found = f"{array.dtype} {list(array.shape[1:])}"
        raise ValueError(f"expected arrays of shape {list(column.shape)}, found {found}")
    if column.shape:
        _in_row_shape(array[0], column)
    elif array.ndim != 1:
        raise ValueError(f"expected one number a row, found arrays of shape {list(array.shape[1:])}")
    return _checked_numbers(array, column)


def at_row(row: int, check: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a check; where it raises, a RowError that names the row."""
    try:
        return check(*arguments)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise RowError(row, str(error)) from error


def as_array(value: Any) -> npt.NDArray[Any]:
    """An array of any framework, or a sequence, as NumPy's; ValueError or TypeError where it cannot be one."""
    if type(value) is np.ndarray and not is_ml_float(value.dtype):
        return value
    try:
        return to_numpy(widened(value))  # Arrow has no bfloat16 and no 8-bit floats, but all of their values
    except RuntimeError as error:  # a tensor with a gradient, an array that was donated
        raise TypeError(f"expected numbers, found {type(value).__name__}: {error}") from error


def _in_row_shape(value: Any, column: TailColumn) -> npt.NDArray[Any]:
    """A value as an array that has the shape of a row."""
    if column.image:
        refuse_hidden(value)
        pixels = decode_image(value, dtype=column.pixel, image_roots=column.image_roots)
        value = pixels[:, :, 0] if pixels.shape == (*column.shape, 1) else pixels
    array = as_array(value)
    if column.single and array.shape in ((), (1,)):
        return array.reshape(column.shape)
    if not column.shape and array.ndim:
        raise ValueError(f"expected a single number, found shape {list(array.shape)}")
    if column.widths is not None and array.ndim == 1:
        narrowest, widest = column.widths
        if not narrowest <= array.size <= widest:
            wanted = "" if narrowest == widest else "at most "
            raise ValueError(f"expected {wanted}{values_of(widest)}, found {array.size}")
        return array if array.size else np.empty(0, column.dtype)  # NumPy's empty lists are floats
    if array.shape != column.shape:
        raise ValueError(f"expected shape {list(column.shape)}, found {list(array.shape)}")
    return array


def _checked_numbers(array: npt.NDArray[Any], column: TailColumn) -> npt.NDArray[Any]:
    """Rows ``[n, *shape]``, or one of them, in the column's dtype; TypeError or RowError where it does not take some.

    Whole numbers may go to columns of floats, fractions never to columns of integers.
    """
    dtype = column.dtype
    if array.dtype.kind == "f" and dtype.kind != "f":
        if not column.whole_floats or not (array == np.floor(array)).all():
            raise TypeError(f"expected {dtype}, found {array.dtype}; a column keeps the dtype of its first value")
    elif array.dtype.kind not in "biuf":
        raise TypeError(f"expected {dtype}, found {array.dtype}")
    low, high = column.bounds or (-inf, inf)
    if column.image and column.bounds is None and (array.dtype != column.pixel or array.dtype.kind != "u"):
        low, high = 0, int(np.iinfo(column.pixel.name).max)
    if (low, high) != (-inf, inf) and array.size and not (array.min() >= low and array.max() <= high):
        place = int((~((array >= low) & (array <= high))).argmax())
        row = place * len(array) // array.size if array.ndim else 0
        raise RowError(row, f"expected {column.allowed or f'{low}..{high}'}, found {array.flat[place].item()}")
    array = convert(array, dtype)
    if column.whole:
        convert(array, np.dtype(np.int64))
    if column.domain is not None:
        _check_domain(array, column)
    return array


def _check_domain(array: npt.NDArray[Any], column: TailColumn) -> None:
    """Raise RowError unless rows ``[n, *shape]``, or one of them, have values that the column's spec allows."""
    spec, of_row = column.domain, array.ndim - len(column.shape)
    of_spec: tuple[int, ...] = spec.shape
    shape = array.shape[of_row:]
    fits = shape == of_spec or not holds(of_spec, shape)
    rows = array if fits else array.reshape((*array.shape[:of_row], *of_spec))
    if spec.dtype == object:
        for row, value in enumerate(rows if of_row else rows[None]):
            at_row(row, _check_object_domain, value.tolist(), column)
        return
    try:
        if spec.contains_numbers(rows):
            return
        outside = ~np.atleast_1d(spec.contains_rows(rows))
    except DataError as error:
        raise RowError(0, str(error)) from error
    if outside.any() and column.zeros:
        outside &= array.reshape(len(outside), -1).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        raise RowError(row, str(spec.why_not_numbers(rows[row] if of_row else rows)))


def _checked_object(value: Any, column: TailColumn) -> Any:
    """A value that is kept as a Python object; see ``checked``."""
    if is_hidden(value):
        if not column.nullable:
            raise ValueError("expected a value, found None")
        return None
    refuse_hidden(value)
    if column.kind.kind == "image" and not column.any_bytes:
        item = value if isinstance(value, bytes | Mapping) else encode_png(value, dtype=column.pixel)
        item = item if isinstance(item, Mapping) else {"bytes": item, "path": None}
        check_image(item, column.shape or None, dtype=column.pixel, image_roots=column.image_roots)
        return item if pa.types.is_struct(column.arrow_type) else item["bytes"]
    if column.arrow_type == pa.null():
        raise ValueError(f"expected None, found {value!r}")
    try:
        pa.scalar(value, column.arrow_type)
    except pa.ArrowInvalid as error:
        if "null" not in str(column.arrow_type):
            raise
        raise ValueError(
            f"expected {column.arrow_type}, as the first value has nothing in it, found {value!r:.80}"
        ) from error
    if column.domain is not None:
        _check_object_domain(value, column)
    return value


def _check_object_domain(value: Any, column: TailColumn) -> None:
    """Raise ValueError unless a column's spec allows a value that is kept as an object, or a spec of objects any."""
    spec = column.domain
    given = value if spec.dtype == object else _in_shape(value, spec.shape)
    reason = spec.why_not(given) if spec.dtype == object else spec.why_not_numbers(given)
    if reason is not None and not (column.zeros and not np.any(value)):
        raise ValueError(reason)


def _in_shape(value: Any, shape: tuple[int, ...]) -> Any:
    """A list in the shape of a spec that has as many values; all else as it is."""
    if not isinstance(value, list | tuple | np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of differing lengths
        return value
    return array.reshape(shape) if array.dtype.kind in "biuf" and holds(shape, array.shape) else value


def holds(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a row of one shape has as many values as of another."""
    return -1 not in shape and prod(shape) == prod(other)


def is_empty(value: Any) -> bool:
    """Whether a value says nothing of what others may be: a null, or a list of nothing else, such as ``[]``."""
    return is_hidden(value) or (isinstance(value, list | tuple) and all(map(is_empty, value)))


# ---------------------------------------------------------------------- the first value


def tail_column(
    value: Any,
    field: Field | None,
    *,
    known: pa.DataType | None,
    shape: tuple[int, ...] | None,
    image_roots: tuple[str, ...] = (),
) -> TailColumn:
    """Return the storage form of a column whose first appended value is ``value``.

    Args:
        value: The first value; None says nothing about the type.
        field: The field that reads the column, if any. Its nulls are allowed only where it fills them.
        known: The column's Arrow type in the datasets of the store, if there are any.
        shape: The field's shape of a row, where it is known.
        image_roots: Folders in which images that are named by path may lie.

    Raises:
        ValueError: No Arrow type can hold the value.
    """
    value = None if is_hidden(value) else value
    nullable = field is None or field.fill is not None
    unknown = TailColumn(ColumnType("null"), arrow_type=pa.null(), nullable=nullable)
    kind = None if known is None else column_type(known)
    if kind is None or kind.kind == "null":
        if value is None:
            return unknown  # the first value will say what it is
        known, kind = None, _infer(value, field)
    if hasattr(value, "__array__") and not isinstance(value, np.generic) and not is_encoded(value):
        value = as_array(value)  # of whatever framework
    is_image = field is not None and field.image
    pixel = _BYTE if field is None else field.pixel_dtype
    column = TailColumn(kind, nullable=nullable, pixel=pixel, image_roots=image_roots)
    # Whether a number may be written as a vector of one, and the other way round.
    single = field is not None and not is_image and shape in ((), (1,))
    if kind.kind == "scalar":
        if field is None:
            return column
        single = single or (shape is None and field.min_ndim > 0)
        return _bounded(replace(column, single=single), field, field.bounds_of(0), vectors=False)
    if kind.kind == "list" and (field is not None or isinstance(value, np.ndarray)):
        row = _row_shape(value, kind, (1,) if single and kind.depth == 1 else shape)
        if row is None:
            return unknown
        widths = (0 if field is not None and field.pad is not None else row[0], row[0]) if len(row) == 1 else None
        column = replace(column, shape=row, widths=widths, single=single and row == (1,), image=is_image)
        return column if field is None else _bounded(column, field, None if is_image else field.bounds, vectors=True)
    if kind.kind == "video":
        raise ValueError(
            "expected pictures in a store of their own, as frames of videos are not appended; `mouse convert --images "
            "video` makes videos of them, and mouse_core.mixtures mixes both"
        )
    if kind.kind != "image" or (not is_image and not pa.types.is_struct(known or _object_type(value))):
        stored = known or (pa.binary() if kind.kind == "image" else _object_type(value))
        return replace(column, arrow_type=stored, any_bytes=kind.kind == "image", object_bytes=_size_of(value))
    column = replace(column, shape=shape or (), arrow_type=known or _IMAGE_STRUCT)
    item = checked(value, replace(column, arrow_type=_IMAGE_STRUCT, nullable=True))
    if item is None:
        return replace(column, object_bytes=_size_of(value))
    found = column.shape or image_shape(item, dtype=pixel, image_roots=image_roots)
    return replace(column, shape=found, object_bytes=_size_of(item.get("bytes")))


def _size_of(value: Any) -> int:
    """About how many bytes a Python object takes."""
    return max(len(value) if isinstance(value, str | bytes) else 0, _OBJECT_BYTES)


def _bounded(column: TailColumn, field: Field, bounds: tuple[int, int] | None, *, vectors: bool) -> TailColumn:
    """The column with what its field allows: values within bounds, and whole ones where it delivers integers."""
    stored, wanted = column.dtype.kind, _wanted_dtype(field, vectors=vectors)
    whole = stored == "f" and wanted is not None and wanted.kind in "iu"
    floats = stored in "iu" and wanted is not None and wanted.kind == "f"
    allowed = "" if bounds is None else field.shown(bounds)
    return replace(column, whole=whole, whole_floats=floats, bounds=bounds, allowed=allowed)


def _row_shape(value: Any, kind: ColumnType, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape of a row of arrays, known or that of the first value; None where nothing says it."""
    row = tuple(shape if shape is not None and len(shape) == kind.depth else np.shape(value))
    if value is None and len(row) != kind.depth:
        return None
    if 0 in row or len(row) != kind.depth:
        raise ValueError(f"expected a first value of {kind}, found {value!r:.80}")
    return row


def _wanted_dtype(field: Field | None, *, vectors: bool) -> np.dtype[Any] | None:
    if field is None:
        return None
    wanted = field.vector_dtype if vectors and field.vector_dtype is not None else field.dtype
    return None if wanted is None else np.dtype(wanted)


def _infer(value: Any, field: Field | None) -> ColumnType:
    if field is not None and field.image and is_encoded(value):
        return ColumnType("image", "image")
    if isinstance(value, Mapping | str | bytes) or (field is None and is_empty(value)):
        return column_type(_object_type(value))
    array = value if isinstance(value, np.ndarray | np.generic) and not is_ml_float(value.dtype) else as_array(value)
    if array.dtype.kind not in "biuf":
        return column_type(_object_type(value))
    data_type = pa.from_numpy_dtype(_kept_dtype(array, value, field))
    for _ in range(array.ndim):
        data_type = pa.list_(data_type)
    return column_type(data_type)


def _kept_dtype(array: Any, value: Any, field: Field | None) -> np.dtype[Any]:
    """The dtype to keep values in: the recorded one, unless a whole number stands for a float or a flag for a code.

    The first reward of an episode is often written as a plain 0; the column must still take 0.5. An array of integers
    says its dtype, and stays as it is: frames of uint8 take an eighth, and float64 does not hold all int64.
    """
    dtype: np.dtype[Any] = array.dtype
    if field is not None and field.image:
        image_shape(value, dtype=field.pixel_dtype)  # raises for a value that is no image
        return field.pixel_dtype
    wanted = _wanted_dtype(field, vectors=bool(array.ndim))
    if wanted is None:
        return dtype
    if wanted.kind == "f" and dtype.kind in "biu":
        vectors = field is not None and (array.ndim or field.min_ndim)
        kept = vectors and dtype.kind != "b" and (hasattr(value, "dtype") or is_beyond_floats(array))
        return dtype if kept else np.dtype(np.float64)
    return wanted if wanted.kind in "iu" and dtype.kind == "b" else dtype


def _object_type(value: Any) -> pa.DataType:
    try:
        return pa.array([value]).type
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(
            f"expected a number, an array, an image, or a value Arrow can hold, found {value!r}"
        ) from error
