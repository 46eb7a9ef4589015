"""Deciding how a column of appended rows is kept, from its first value, its field and what the store holds already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.column_types import ColumnType, column_type
from mouse_core.dtypes import is_beyond_floats, is_hidden, is_ml_float
from mouse_core.images.pixels import image_shape, is_encoded
from mouse_core.spec import Field
from mouse_core.store._tail.values import TailColumn, as_array, check_object, is_empty

# What an object takes, at least, where the first says no more.
_OBJECT_BYTES = 64
_IMAGE_STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def tail_column(
    value: Any,
    field: Field | None,
    *,
    known: pa.DataType | None,
    shape: tuple[int, ...] | None,
    image_roots: tuple[str, ...] = (),
) -> TailColumn:
    """How to keep a column whose first appended value is ``value``.

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
    pixel = np.dtype(np.uint8) if field is None else field.pixel_dtype
    column = TailColumn(kind, nullable=nullable, pixel=pixel, image_roots=image_roots)
    return _of_kind(column, value, field, known=known, shape=shape) or unknown  # nothing says how wide it is


def _of_kind(
    column: TailColumn, value: Any, field: Field | None, *, known: pa.DataType | None, shape: tuple[int, ...] | None
) -> TailColumn | None:
    """The column with what its kind needs besides; None where nothing says how wide a row is."""
    if hasattr(value, "__array__") and not isinstance(value, np.generic) and not is_encoded(value):
        value = as_array(value)  # of whatever framework
    if column.kind.kind == "scalar":
        return _of_numbers(column, field, shape)
    if column.kind.kind == "list" and (field is not None or isinstance(value, np.ndarray)):
        return _of_arrays(column, value, field, shape)
    if column.kind.kind == "video":
        raise ValueError(
            "expected pictures in a store of their own, as frames of videos are not appended; `mouse convert --images "
            "video` makes videos of them, and mouse_core.mixtures mixes both"
        )
    is_image = field is not None and field.image
    if column.kind.kind == "image" and not is_image and not pa.types.is_struct(known or _object_type(value)):
        return replace(column, arrow_type=known or pa.binary(), any_bytes=True, object_bytes=_size_of(value))
    if column.kind.kind == "image":
        return _of_images(replace(column, shape=shape or (), arrow_type=known or _IMAGE_STRUCT), value)
    return replace(column, arrow_type=known or _object_type(value), object_bytes=_size_of(value))


def _size_of(value: Any) -> int:
    """About how many bytes a Python object takes."""
    return max(len(value) if isinstance(value, str | bytes) else 0, _OBJECT_BYTES)


def _of_numbers(column: TailColumn, field: Field | None, shape: tuple[int, ...] | None) -> TailColumn:
    if field is None:
        return column
    single = _is_single(field, shape) or (shape is None and field.min_ndim > 0)
    return _bounded(replace(column, single=single), field, field.bounds_of(0), vectors=False)


def _bounded(column: TailColumn, field: Field, bounds: tuple[int, int] | None, *, vectors: bool) -> TailColumn:
    """The column with what its field allows: values within bounds, and whole ones where it delivers integers."""
    wanted = _wanted_dtype(field, vectors=vectors)
    whole = column.kind.dtype.kind == "f" and wanted is not None and wanted.kind in "iu"
    floats = column.kind.dtype.kind in "iu" and wanted is not None and wanted.kind == "f"
    return replace(
        column, whole=whole, whole_floats=floats, bounds=bounds, allowed="" if bounds is None else field.shown(bounds)
    )


def _of_arrays(column: TailColumn, value: Any, field: Field | None, shape: tuple[int, ...] | None) -> TailColumn | None:
    """The column of arrays; None where nothing says how wide a row is."""
    single = _is_single(field, shape)
    row = _shape_of(value, column.kind, (1,) if single and column.kind.depth == 1 else shape)
    if row is None:
        return None
    is_padded = field is not None and field.pad is not None
    widths = (0 if is_padded else row[0], row[0]) if len(row) == 1 else None
    column = replace(column, shape=row, widths=widths, single=single and row == (1,))
    if field is None:
        return column
    return _bounded(replace(column, image=field.image), field, None if field.image else field.bounds, vectors=True)


def _shape_of(value: Any, kind: ColumnType, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape of a row of arrays, known or that of the first value; None where nothing says it."""
    row = tuple(shape if shape is not None and len(shape) == kind.depth else np.shape(value))
    if value is None and len(row) != kind.depth:
        return None
    if 0 in row or len(row) != kind.depth:
        raise ValueError(f"expected a first value of {kind}, found {value!r:.80}")
    return row


def _of_images(column: TailColumn, value: Any) -> TailColumn:
    """The column of encoded images, of the shape that is known or that of the first."""
    item = check_object(value, replace(column, arrow_type=_IMAGE_STRUCT, nullable=True))
    if item is None:
        return replace(column, object_bytes=_size_of(value))
    shape = column.shape or image_shape(item, dtype=column.pixel, image_roots=column.image_roots)
    return replace(column, shape=shape, object_bytes=_size_of(item.get("bytes")))


def _is_single(field: Field | None, shape: tuple[int, ...] | None) -> bool:
    """Whether a number may be written as a vector of one, and the other way round."""
    return field is not None and not field.image and shape in ((), (1,))


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
        image_shape(value, dtype=field.pixel_dtype)  # refuses what is none
        return field.pixel_dtype
    wanted = _wanted_dtype(field, vectors=bool(array.ndim))
    if wanted is None:
        return dtype
    if wanted.kind == "f" and dtype.kind in "biu":
        vectors = field is not None and (array.ndim or field.min_ndim)
        kept = vectors and dtype.kind != "b" and (hasattr(value, "dtype") or is_beyond_floats(array))
        return dtype if kept else np.dtype(np.float64)
    if wanted.kind in "iu" and dtype.kind == "b":
        return wanted
    return dtype


def _object_type(value: Any) -> pa.DataType:
    try:
        return pa.array([value]).type
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(
            f"expected a number, an array, an image, or a value Arrow can hold, found {value!r}"
        ) from error
