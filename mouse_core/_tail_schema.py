"""Deciding how a column of appended rows is kept, from its first value, its field and what the store holds already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._layout import ColumnType, column_type
from mouse_core._tail_values import TailColumn, check_object
from mouse_core.images import decode_image, encoded_shape
from mouse_core.spec import Field

_IMAGE_STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def tail_column(
    value: Any,
    field: Field | None,
    *,
    known: pa.DataType | None,
    shape: tuple[int, ...] | None,
    bounds: tuple[int, int] | None,
) -> TailColumn:
    """How to keep a column whose first appended value is ``value``.

    Args:
        value: The first value; None says nothing about the type.
        field: The field that reads the column, if any. Its nulls are allowed only where it fills them.
        known: The column's Arrow type in the datasets of the store, if there are any.
        shape: The field's shape of a row, where it is known.
        bounds: Lowest and highest value allowed, for single numbers.

    Raises:
        ValueError: No Arrow type can hold the value.
    """
    nullable = field is None or field.fill is not None
    kind = None if known is None else column_type(known)
    if kind is None or kind.kind == "null":
        if value is None:
            return TailColumn(ColumnType("null"), arrow_type=pa.null(), nullable=nullable)
        known, kind = None, _infer(value, field)
    if kind.kind == "scalar":
        coded = field is not None and field.dtype is not None and np.dtype(field.dtype).kind in "iu"
        return TailColumn(kind, nullable=nullable, bounds=bounds, whole=coded and kind.dtype.kind == "f")
    ragged = field is None and not isinstance(value, np.ndarray)
    if kind.kind == "list" and not ragged:
        row = shape if shape is not None and len(shape) == kind.depth else np.shape(value)
        if value is None and len(row) != kind.depth:
            # Nothing says how wide it is yet; the first value will.
            return TailColumn(ColumnType("null"), arrow_type=pa.null(), nullable=nullable)
        if 0 in row or len(row) != kind.depth:
            raise ValueError(f"expected a first value of {kind}, found {value!r:.80}")
        widths = None
        if len(row) == 1:
            padded = field is not None and field.pad is not None
            widths = (1 if padded else row[0], row[0])
        image = field is not None and field.image
        return TailColumn(kind, shape=tuple(row), nullable=nullable, widths=widths, image=image)
    size = len(value) if isinstance(value, str | bytes) else 64
    if kind.kind == "image":
        item = check_object(value, TailColumn(kind, arrow_type=_IMAGE_STRUCT, nullable=True))
        if item is not None:
            size = len(item["bytes"] or b"")
            shape = encoded_shape(item)
        return TailColumn(
            kind, shape=shape or (), arrow_type=known or _IMAGE_STRUCT, nullable=nullable, object_bytes=max(size, 64)
        )
    return TailColumn(kind, arrow_type=known or _object_type(value), nullable=nullable, object_bytes=max(size, 64))


def _infer(value: Any, field: Field | None) -> ColumnType:
    if field is not None and field.image and not isinstance(value, np.ndarray | list | tuple):
        return ColumnType("image", "image")
    if isinstance(value, Mapping | str | bytes):
        return column_type(_object_type(value))
    array = value if isinstance(value, np.ndarray | np.generic) else np.asarray(value)
    if array.dtype.kind not in "biuf":
        return column_type(_object_type(value))
    data_type = pa.from_numpy_dtype(_kept_dtype(array, value, field))
    for _ in range(array.ndim):
        data_type = pa.list_(data_type)
    return column_type(data_type)


def _kept_dtype(array: Any, value: Any, field: Field | None) -> np.dtype[Any]:
    """The dtype to keep values in: the recorded one, unless a whole number stands for a float or a flag for a code.

    The first reward of an episode is often written as a plain 0; the column must still take 0.5.
    """
    dtype: np.dtype[Any] = array.dtype
    if field is not None and field.image:
        decode_image(value)  # refuses what is none
        return np.dtype(np.uint8)
    wanted: npt.DTypeLike | None = None
    if field is not None:
        wanted = field.vector_dtype if array.ndim and field.vector_dtype is not None else field.dtype
    if wanted is None:
        return dtype
    if np.dtype(wanted).kind == "f" and dtype.kind in "biu":
        return np.dtype(np.float64)
    if np.dtype(wanted).kind in "iu" and dtype.kind == "b":
        return np.dtype(wanted)
    return dtype


def _object_type(value: Any) -> pa.DataType:
    try:
        return pa.array([value]).type
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(
            f"expected a number, an array, an image, or a value Arrow can hold, found {value!r}"
        ) from error
