"""Columns of appended rows: the storage form of each column, the check of values, and the memory of rows.

An extent, the memory for a fixed number of rows, is never moved or resized. Rows that were added completely never
change, so an Arrow array over these rows is immutable although further rows are added to the extent. Therefore a
snapshot can share memory with a store while rows are appended.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf, prod
from operator import itemgetter
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy import ndarray

from mouse_core import dtypes
from mouse_core._arrow.column_types import NUMPY_NAMES, ColumnType, column_type, fixed_shape, is_list
from mouse_core._base.checks import is_text, values_of
from mouse_core._base.memo import memo
from mouse_core._base.memory import BatchLayout
from mouse_core.errors import DataError
from mouse_core.images.pixels import check_image, decode_image, encode_png, image_shape, is_encoded
from mouse_core.spec import Field

_BYTE = np.dtype(np.uint8)
_IMAGE_STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_OBJECT_BYTES = 64  # the least estimated size of an object


@dataclass(frozen=True)
class TailColumn:
    """The storage form of one column of appended rows.

    Args:
        kind: The column's type.
        shape: The shape of a row; ``()`` for scalars.
        arrow_type: The Arrow type of values that are stored as Python objects (strings, encoded images); else None.
        nullable: Whether None is allowed.
        widths: Smallest and largest allowed length of a row, inclusive, for vectors of one dimension.
        bounds: Lowest and highest allowed value; None: any value.
        image: Whether values are images, stored as arrays of pixels.
        any_bytes: Whether arbitrary bytes are allowed, because no field reads images from the column.
        pixel: The dtype of pixels.
        image_roots: Allowed folders of images that rows name by path.
        whole: Whether numbers must have integer values although the column's dtype is floating.
        whole_floats: Whether a column of integers accepts floats with integer values, because the column's field
            delivers floats.
        single: Whether a number is accepted as a vector of one value, and a vector of one value as a number.
        allowed: Description of the allowed values, for messages.
        domain: The allowed values, a spec of ``mouse_core.spec``; None: any value.
        zeros: Whether zeros are also allowed, for rows without a preceding action.
        object_bytes: Approximate size of a Python object in bytes; snapshots copy the objects of the open extent.
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
        """The dtype of arrays that are stored without conversion; void if all pixels are checked."""
        return np.dtype(np.void) if self.image and self.dtype != np.uint8 else self.dtype

    @memo
    def is_object(self) -> bool:
        """Whether values are stored as Python objects."""
        return self.arrow_type is not None

    @property
    def width(self) -> int:
        """Largest number of values in a row."""
        return self.widths[1] if self.widths else prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Approximate size of a row in bytes."""
        return self.object_bytes if self.is_object else self.width * self.dtype.itemsize

    @memo
    def is_checked(self) -> bool:
        """Whether numbers that already have the column's dtype need a check."""
        return self.whole or self.domain is not None or (self.bounds is not None and not self.image)

    @memo
    def limits(self) -> tuple[float, float] | None:
        """The range in which single numbers of ``plain`` types need no check; None if every value needs a check."""
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
            # Narrow dtypes cannot represent all Python floats, and floats cannot represent all integers beyond 2**53.
            largest = min(dtypes.largest_of(dtype), 2.0**53)
            limits.append((-largest, largest))
        elif dtype.kind != "b":
            limits.append((int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)))
        return max(low for low, _ in limits), min(high for _, high in limits)

    @memo
    def plain(self) -> frozenset[type]:
        """The Python types whose values can be written through a memoryview of the column's dtype, which accepts these
        values unchanged or raises an error.
        """
        dtype = self.dtype
        if dtype.kind == "b":
            return frozenset([bool, np.bool_])
        types: list[type] = [bool, int, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32]
        if dtype.kind == "f":  # floats cannot represent all 64-bit integers
            return frozenset([*types, float, np.float16, np.float32, np.float64])
        return frozenset([*types, np.int64, np.uint64])


# ---------------------------------------------------------------------- values


def checked(value: Any, column: TailColumn) -> Any:
    """Check a value and return its stored form: a number or an array of the column's dtype, or an object; None for a
    null.

    Raises:
        ValueError, TypeError, pyarrow.ArrowException: The column does not accept the value.
    """
    if column.is_object:
        return _checked_object(value, column)
    if type(value) is np.ndarray and value.shape == column.shape != () and value.dtype == column.plain_dtype:
        return _checked_numbers(value, column) if column.is_checked else value
    if dtypes.is_hidden(value):
        if column.nullable:
            return None
        if value is None:
            raise ValueError("expected a value, found None")
    return _checked_numbers(_in_row_shape(value, column), column)[()]


def checked_rows(values: Any, column: TailColumn) -> npt.NDArray[Any] | list[Any]:
    """Check the values of many rows and return their stored form: an array or, if rows differ in length or are objects,
    a list with an item for each row.

    Raises:
        RowError: The column does not accept a value.
        ValueError, TypeError: The column accepts none of the values, for example because their type is wrong.
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
        raise ValueError(f"expected one number per row, found arrays of shape {list(array.shape[1:])}")
    return _checked_numbers(array, column)


def at_row(row: int, check: Callable[..., Any], *arguments: Any) -> Any:
    """Run a check, and convert errors of the check to a RowError with the index of the row."""
    try:
        return check(*arguments)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise dtypes.RowError(row, str(error)) from error


def as_array(value: Any) -> npt.NDArray[Any]:
    """Convert an array of any framework, or a sequence, to NumPy; raise ValueError or TypeError if that fails."""
    if type(value) is np.ndarray and not dtypes.is_ml_float(value.dtype):
        return value
    try:
        # Arrow lacks bfloat16 and 8-bit floats, but wider dtypes represent all their values
        return dtypes.to_numpy(dtypes.widened(value))
    except RuntimeError as error:  # for example a tensor with a gradient, or a donated array
        raise TypeError(f"expected numbers, found {type(value).__name__}: {error}") from error


def _in_row_shape(value: Any, column: TailColumn) -> npt.NDArray[Any]:
    """Convert a value to an array with the shape of a row."""
    if column.image:
        dtypes.refuse_hidden(value)
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
    """Convert rows ``[n, *shape]``, or one row, to the column's dtype; raise TypeError or RowError for invalid values.

    Columns of floats accept integers; columns of integers never accept fractions.
    """
    dtype = column.dtype
    if array.dtype.kind == "f" and dtype.kind != "f":
        if not column.whole_floats or not (array == np.floor(array)).all():
            raise TypeError(f"expected {dtype}, as in the first value or in columns=, found {array.dtype}")
    elif array.dtype.kind not in "biuf":
        raise TypeError(f"expected {dtype}, found {array.dtype}")
    low, high = column.bounds or (-inf, inf)
    if column.image and column.bounds is None and (array.dtype != column.pixel or array.dtype.kind != "u"):
        low, high = 0, int(np.iinfo(column.pixel.name).max)
    if (low, high) != (-inf, inf) and array.size and not (array.min() >= low and array.max() <= high):
        place = int((~((array >= low) & (array <= high))).argmax())
        row = place * len(array) // array.size if array.ndim else 0
        raise dtypes.RowError(row, f"expected {column.allowed or f'{low}..{high}'}, found {array.flat[place].item()}")
    array = dtypes.convert(array, dtype)
    if column.whole:
        dtypes.convert(array, np.dtype(np.int64))
    if column.domain is not None:
        _check_domain(array, column)
    return array


def _check_domain(array: npt.NDArray[Any], column: TailColumn) -> None:
    """Raise RowError unless the column's spec allows the values of rows ``[n, *shape]``, or of one row."""
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
        raise dtypes.RowError(0, str(error)) from error
    if outside.any() and column.zeros:
        outside &= array.reshape(len(outside), -1).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        raise dtypes.RowError(row, str(spec.why_not_numbers(rows[row] if of_row else rows)))


def _checked_object(value: Any, column: TailColumn) -> Any:
    """Check a value that is stored as a Python object; see ``checked``."""
    if dtypes.is_hidden(value):
        if not column.nullable:
            raise ValueError("expected a value, found None")
        return None
    dtypes.refuse_hidden(value)
    if column.kind.kind == "image" and not column.any_bytes:
        item = value if isinstance(value, bytes | Mapping) else encode_png(value, dtype=column.pixel)
        item = item if isinstance(item, Mapping) else {"bytes": item, "path": None}
        check_image(item, column.shape or None, dtype=column.pixel, image_roots=column.image_roots)
        return item if pa.types.is_struct(column.arrow_type) else item["bytes"]
    if isinstance(value, pa.Scalar) and not pa.types.is_temporal(value.type):
        value = value.as_py()
    try:
        fitted = fitter(column.arrow_type)(value)
    except _REFUSED as error:
        message = f"expected {column.arrow_type}, found {value!r:.80} ({error})"
        had_no_type = "null" in str(column.arrow_type)
        raise ValueError(message + "; the first value had no type; columns= declares a type" * had_no_type) from error
    if column.domain is not None:
        _check_object_domain(value, column)
    return fitted


# Python types whose values an Arrow type represents exactly; Arrow converts other values.
_PYTHON_TYPES: dict[pa.DataType, Any] = dict.fromkeys((pa.string(), pa.large_string()), str)
_PYTHON_TYPES |= dict.fromkeys((pa.binary(), pa.large_binary()), (bytes, bytearray, memoryview))


@lru_cache(maxsize=256)
def fitter(data_type: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that copies a value of an Arrow type, and raises one of the errors ``_REFUSED`` for an invalid
    value.

    This check is needed because Arrow truncates fractions in lists of integers, drops unknown keys of structs, and
    converts text to bytes.
    """
    if isinstance(data_type, pa.BaseExtensionType):
        return fitter(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return fitter(data_type.value_type)
    if is_list(data_type):
        return partial(
            _fit_list, data_type, _fitter_of(data_type.value_field), NUMPY_NAMES.get(str(data_type.value_type))
        )
    if pa.types.is_struct(data_type):
        return partial(_fit_struct, {field.name: _fitter_of(field) for field in data_type})
    if str(data_type) in NUMPY_NAMES:
        return partial(_fit_number, NUMPY_NAMES[str(data_type)])
    return partial(_fit_other, data_type, _PYTHON_TYPES.get(data_type, object))


_REFUSED = (ValueError, TypeError, dtypes.RowError, OverflowError, pa.ArrowException)


def _fitter_of(field: pa.Field) -> Callable[[Any], Any]:
    return partial(_fit_child, fitter(field.type), field.nullable)


def _fit_child(fit: Callable[[Any], Any], nullable: bool, value: Any) -> Any:
    if not dtypes.is_hidden(value):
        return fit(value)
    if not nullable:
        raise ValueError("expected a value, found None")
    return None


def _fit_list(data_type: pa.DataType, fit: Callable[[Any], Any], dtype: str | None, value: Any) -> Any:
    if isinstance(value, str | bytes) or not (isinstance(value, Sequence) or hasattr(value, "__array__")):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    array = None
    if dtype is not None:
        with suppress(ValueError):  # lists of different lengths
            array = as_array(value)
    if array is not None and dtype is not None and array.ndim == 1 and array.dtype != object:
        items: Any = np.array(_numbers(array, dtype))
    else:  # also for a null among the numbers
        items = [fit(item) for item in value]
    if pa.types.is_fixed_size_list(data_type) and len(items) != data_type.list_size:
        raise ValueError(f"expected {values_of(data_type.list_size)}, found {len(items)}")
    return items


def _fit_struct(fields: Mapping[str, Callable[[Any], Any]], value: Any) -> Any:
    if not isinstance(value, Mapping) or not value.keys() <= fields.keys():
        raise ValueError(f"expected a mapping with keys among {list(fields)}")
    return {name: fit(value.get(name)) for name, fit in fields.items()}


def _fit_number(dtype: str, value: Any) -> Any:
    array = as_array(value)
    if array.ndim:
        raise ValueError(f"expected a single number, found shape {list(array.shape)}")
    return _numbers(array, dtype).item()


def _fit_other(data_type: pa.DataType, kinds: Any, value: Any) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"expected {data_type}, found {type(value).__name__}")
    if kinds is object or not (type(value) is bytes or is_text(value)):
        pa.scalar(value, data_type)
    return bytes(value) if isinstance(value, bytearray | memoryview) else copy.deepcopy(value)


def _numbers(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Convert numbers to the dtype with a given name; floats are not accepted as integers. Raises TypeError or
    RowError.
    """
    dtype = np.dtype(name)
    if array.size and (array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and dtype.kind != "f")):
        raise TypeError(f"expected {dtype}, found {array.dtype}")
    return dtypes.convert(array, dtype)


def _check_object_domain(value: Any, column: TailColumn) -> None:
    """Raise ValueError unless the column's spec allows a value that is stored as an object; object specs allow any
    value.
    """
    spec = column.domain
    given = value if spec.dtype == object else _in_shape(value, spec.shape)
    reason = spec.why_not(given) if spec.dtype == object else spec.why_not_numbers(given)
    if reason is not None and not (column.zeros and not np.any(value)):
        raise ValueError(reason)


def _in_shape(value: Any, shape: tuple[int, ...]) -> Any:
    """Reshape a list to the spec's shape if the number of values is equal; return other values unchanged."""
    if not isinstance(value, list | tuple | np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of differing lengths
        return value
    return array.reshape(shape) if array.dtype.kind in "biuf" and holds(shape, array.shape) else value


def holds(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether rows of both shapes have the same number of values."""
    return -1 not in shape and prod(shape) == prod(other)


def is_empty(value: Any) -> bool:
    """Return whether a value contains no type information: a null, or a list that contains only nulls or nothing, at
    any depth, such as ``[]`` or ``[None]``."""
    return dtypes.is_hidden(value) or (isinstance(value, list | tuple) and all(map(is_empty, value)))


# ---------------------------------------------------------------------- the first value


def tail_column(
    value: Any,
    field: Field | None,
    *,
    known: pa.DataType | None,
    shape: tuple[int, ...] | None,
    image_roots: tuple[str, ...] = (),
    declared: pa.Field | None = None,
) -> TailColumn:
    """Return the storage form of a column whose first appended value is ``value``.

    Args:
        value: The first value; None does not determine the type.
        field: The field that reads the column, if any. Nulls are allowed only if the field replaces nulls.
        known: The column's Arrow type in the datasets of the store, if any.
        shape: The shape of a row according to the field, if known.
        image_roots: Allowed folders of images that rows name by path.
        declared: The declared column, if the store declares it.

    Raises:
        ValueError: No Arrow type can represent the value.
    """
    value = None if dtypes.is_hidden(value) else value
    nullable = field is None or field.fill is not None
    is_fixed = False
    if declared is not None:
        known, nullable = declared.type, nullable and declared.nullable
        fixed = fixed_shape(known)
        is_fixed, shape = bool(fixed), fixed or shape
    unknown = TailColumn(ColumnType("null"), arrow_type=pa.null(), nullable=nullable)
    kind = None if known is None else column_type(known)
    if kind is None or kind.kind == "null":
        if value is None:
            return unknown  # a later value determines the type
        known, kind = None, _infer(value, field)
    if hasattr(value, "__array__") and not isinstance(value, np.generic) and not is_encoded(value):
        value = as_array(value)  # of whatever framework
    is_image = field is not None and field.image
    pixel = _BYTE if field is None else field.pixel_dtype
    column = TailColumn(kind, nullable=nullable, pixel=pixel, image_roots=image_roots)
    # Whether a number may be written as a vector of one value, and the reverse.
    single = field is not None and not is_image and (shape in ((), (1,)) or (shape is None and field.shape == ()))
    if kind.kind == "scalar":
        if field is None:
            return column
        single = single or (shape is None and field.min_ndim > 0)
        return _bounded(replace(column, single=single), field, field.bounds_of(0), vectors=False)
    # Without a field, rows of a declared list type may differ in length.
    if kind.kind == "list" and (field is not None or is_fixed or (declared is None and isinstance(value, np.ndarray))):
        row = _row_shape(value, kind, (1,) if shape == () and kind.depth == 1 else shape)
        if row is None:
            return unknown
        is_padded = field is not None and field.pad is not None and not is_fixed
        widths = (0 if is_padded else row[0], row[0]) if len(row) == 1 else None
        column = replace(column, shape=row, widths=widths, single=single and row == (1,), image=is_image)
        return column if field is None else _bounded(column, field, None if is_image else field.bounds, vectors=True)
    if kind.kind == "video":
        raise ValueError(
            "expected images in the rows, since video frames cannot be appended; `mouse convert --images "
            "video` converts images to videos, and mouse_core.mixtures mixes stores of images and of videos"
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
    """Return the approximate size of a Python object in bytes."""
    return max(len(value) if isinstance(value, str | bytes) else 0, _OBJECT_BYTES)


def _bounded(column: TailColumn, field: Field, bounds: tuple[int, int] | None, *, vectors: bool) -> TailColumn:
    """Return the column with the limits of the field: bounds, and a check for integer values if the field delivers
    integers.
    """
    stored, wanted = column.dtype.kind, _wanted_dtype(field, vectors=vectors)
    whole = stored == "f" and wanted is not None and wanted.kind in "iu"
    floats = stored in "iu" and wanted is not None and wanted.kind == "f"
    allowed = "" if bounds is None else field.shown(bounds)
    return replace(column, whole=whole, whole_floats=floats, bounds=bounds, allowed=allowed)


def _row_shape(value: Any, kind: ColumnType, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the shape of a row: the known shape, or the shape of the first value; None if undetermined."""
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
    array = (
        value if isinstance(value, np.ndarray | np.generic) and not dtypes.is_ml_float(value.dtype) else as_array(value)
    )
    if array.dtype.kind not in "biuf":
        return column_type(_object_type(value))
    data_type = pa.from_numpy_dtype(_kept_dtype(array, value, field))
    for _ in range(array.ndim):
        data_type = pa.list_(data_type)
    return column_type(data_type)


def _kept_dtype(array: Any, value: Any, field: Field | None) -> np.dtype[Any]:
    """Return the dtype of stored values: the dtype of the first value, unless that value is an integer in a float field
    or a bool in a field of codes.

    The first reward is often written as the integer 0, and the column must still accept 0.5 later. An array of integers
    has an explicit dtype, which is kept: uint8 images need an eighth of the memory of float64, and float64 cannot
    represent all int64.
    """
    dtype: np.dtype[Any] = array.dtype
    if field is not None and field.image:
        image_shape(value, dtype=field.pixel_dtype)  # raises for a value that is not an image
        return field.pixel_dtype
    wanted = _wanted_dtype(field, vectors=bool(array.ndim))
    if wanted is None:
        return dtype
    if wanted.kind == "f" and dtype.kind in "biu":
        vectors = field is not None and (array.ndim or field.min_ndim)
        kept = vectors and dtype.kind != "b" and (hasattr(value, "dtype") or dtypes.is_beyond_floats(array))
        return dtype if kept else np.dtype(np.float64)
    return wanted if wanted.kind in "iu" and dtype.kind == "b" else dtype


def _object_type(value: Any) -> pa.DataType:
    try:
        return pa.array([value]).type
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(
            f"expected a number, an array, an image, or a value that Arrow can represent, found {value!r}"
        ) from error


# ---------------------------------------------------------------------- extents
#
# An extent is never moved or resized. Rows below its count are final, so an Arrow array over them is immutable although
# the extent is still being filled; that is what lets a snapshot share memory with a store that is appended to.

_FIRST_ROWS = 1024
_MOST_ROWS = 65_536
_MOST_BYTES = 16 << 20


class NumbersExtent:
    """The memory of a column of numbers, or of arrays of numbers that can differ in length.

    Args:
        column: The storage form of values.
        values: The memory of the values, ``[rows * width]``, row after row.
        nulls: Whether a row is null, bool ``[rows]``; None until the first null is written, because most columns have
            no nulls.
        ends: For rows that can differ in length: bounds of the rows in ``values``, int32 ``[rows + 1]``; None: ``ends``
            is allocated when it is needed.
        since: int64 ``[1]``, only with ``ends``: 0 while all rows have equal length; else the index of the first row
            with another length, plus 1.
        count: Number of existing rows.
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
        # Writing through a memoryview, which does not support float16, is three times as fast as through NumPy.
        self.cells: Any = values if values.dtype == np.float16 else memoryview(cast("Any", values))

    @memo
    def _ends(self) -> npt.NDArray[np.int32]:
        # Row n ends where row n + 1 begins. Usually all rows have one length, and extents share these bounds.
        return _equal_ends(len(self._values) // self.width, self.width)

    @property
    def is_dense(self) -> bool:
        """Whether Arrow can use the values without a copy and no value is null."""
        is_flat = not self.column.shape or (self._is_flat and self.is_regular)
        return is_flat and self.dtype != np.bool_ and self._nulls is None

    @property
    def takes_runs(self) -> bool:
        """Whether values can be written to ``cells`` without a check, because ``cells`` accepts exactly the arrays with
        the dtype and shape of a row.
        """
        return self._is_flat and self.is_regular and not self.column.is_checked

    @property
    def _is_flat(self) -> bool:
        return len(self.column.shape) == 1 and self.dtype != np.float16

    def put(self, row: int, value: Any) -> None:
        """Check a value and write it; raises the errors of ``checked``."""
        self.write(row, checked(value, self.column))

    def write(self, row: int, value: Any) -> None:
        """Write a checked value."""
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
        """Write checked values ``[n, *shape]``."""
        begin, width = row * self.width if self.is_regular else int(self._ends[row]), prod(values.shape[1:])
        self._values[begin : begin + values.size] = values.reshape(-1)
        if width != self.width or not self.is_regular:
            self._make_irregular(row)
            self._ends[row + 1 : row + len(values) + 1] = begin + width * np.arange(1, len(values) + 1)

    def _make_irregular(self, row: int) -> None:
        """Allow rows to differ in length from this row on."""
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
        """Clear the null marks of ``row`` and of all later rows, none of which is counted."""
        if self._nulls is not None:
            self._nulls[row:] = False

    def to_arrow(self, rows: int) -> pa.Array:
        """Return the first ``rows`` values as an Arrow array that shares memory; arrays become (nested) lists, and
        booleans are copied.
        """
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
    """The values of a column of other Arrow types: strings, structs, encoded images.

    Args:
        column: The storage form of values.
    """

    def __init__(self, column: TailColumn) -> None:
        self.column = column
        self._items: list[Any] = []

    def put(self, row: int, value: Any) -> None:
        """Check a value and write it; raises the errors of ``checked``."""
        self.write(row, checked(value, self.column))

    def write(self, row: int, value: Any) -> None:
        """Write a checked value."""
        del self._items[row:]
        self._items.append(value)

    def forget(self, row: int) -> None:
        """Remove ``row`` and all later rows, none of which is counted."""
        del self._items[row:]

    def to_arrow(self, rows: int) -> pa.Array:
        """Return a copy of the first ``rows`` values."""
        return pa.array(self._items[:rows], self.column.arrow_type)


ColumnExtent = NumbersExtent | ObjectExtent


class Extent:
    """Memory for a fixed number of rows of all columns; ``allocate`` creates a writable extent.

    Args:
        columns: The storage form of each column, by name.
        rows: The capacity in rows.
        extents: The memory of each column.
        count: Number of existing rows.
    """

    def __init__(
        self, columns: Mapping[str, TailColumn], rows: int, extents: dict[str, ColumnExtent], count: int = 0
    ) -> None:
        self.columns, self.rows, self.extents, self.count = dict(columns), rows, extents, count
        # A token that identifies the memory without keeping it alive.
        self.token = object()

    @classmethod
    def allocate(cls, columns: Mapping[str, TailColumn], before: int = 0, coming: int = 0) -> Self:
        """Return an empty extent; its memory is one allocation from Arrow's allocator, which uses large pages.

        Args:
            columns: The storage form of each column, by name.
            before: Number of rows of the previous extent; a new extent is twice as large, up to a limit.
            coming: Number of rows that are certain to follow.
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
        """Add a row that is a dict with the extent's columns; the extent must have room. Return False, without any
        change, if ``put`` must handle the row.
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
                    # A memoryview only accepts memory of the same type and length.
                    cells[at * width : (at + 1) * width] = value
                else:
                    put(at, value)
                    self._settle()  # renumbers the values, so runs are written last
        except Exception:  # values may be any objects, and raise any errors
            return False
        self.count = at + 1
        return True

    def put(self, row: Mapping[str, Any]) -> None:
        """Check and add a row that has exactly the extent's columns.

        Raises:
            Refused: A value is invalid; nothing has changed.
        """
        name = ""
        try:
            for name, extent in self.extents.items():
                extent.put(self.count, row[name])
        except Exception as error:  # values may be any objects, and raise any errors
            self.forget_parts()
            raise Refused(name) from error
        self.count += 1
        self._settle()

    def forget_parts(self) -> None:
        """Remove values after the last counted row, if only a part of a row was written."""
        for extent in self.extents.values():
            extent.forget(self.count)
        self._sort()

    def put_many(self, prepared: Mapping[str, Any], done: int, rows: int) -> int:
        """Add ``rows`` rows of the results of ``checked_rows``, beginning with row ``done`` of these results; return
        the number of added rows.
        """
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
        """Update the set of columns whose rows differ in length."""
        if not all(extent.takes_runs for extent in self._filled):
            self._sort()

    def _sort(self) -> None:
        """Choose for each column how ``append`` writes a value: as a cell, as a run of cells, or with ``put``."""
        numbers = {name: extent for name, extent in self.extents.items() if isinstance(extent, NumbersExtent)}
        cells = {name: extent for name, extent in numbers.items() if extent.column.limits is not None}
        runs = {name: extent for name, extent in numbers.items() if extent.takes_runs}
        names = [*cells, *runs, *(name for name in self.extents if name not in cells and name not in runs)]
        self._names, self._filled = len(names), list(runs.values())
        # An itemgetter of a single name returns the value itself.
        getter: Any = itemgetter(*names) if len(names) > 1 else lambda row: tuple(row[name] for name in names)
        self._values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]] = getter
        # By the position of the value in ``names``.
        place = {name: number for number, name in enumerate(names)}
        self._cells = [
            (place[name], one.cells, one.column.plain, *(one.column.limits or (0, 0)), one.put)
            for name, one in cells.items()
        ]
        self._runs = [(place[name], one.cells, one.width, one.dtype, one.put) for name, one in runs.items()]
        self._others = [(place[name], self.extents[name].put) for name in names[len(cells) + len(runs) :]]

    def dense(self) -> dict[str, NumbersExtent]:
        """The columns whose present values are stored in Arrow's layout."""
        extents = self.extents.items()
        return {name: one for name, one in extents if isinstance(one, NumbersExtent) and one.is_dense}

    def to_table(self, rows: int) -> pa.Table:
        """Return the first ``rows`` rows as a table; later rows never change the table."""
        return pa.table({name: extent.to_arrow(rows) for name, extent in self.extents.items()})


class Refused(Exception):
    """Raised for a row with an invalid value in the named column; the error's cause contains the reason."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@lru_cache(maxsize=16)
def _equal_ends(rows: int, width: int) -> npt.NDArray[np.int32]:
    """Return the bounds of ``rows`` rows of ``width`` values each, int32 ``[rows + 1]``."""
    ends = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    ends.flags.writeable = False
    return ends
