"""Turning Arrow rows that are ragged, null or encoded into dense NumPy rows: slower, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._convert import RowError, convert
from mouse_core._layout import is_list


def plain(array: pa.Array) -> pa.Array:
    """What an extension array stores and what a dictionary array stands for."""
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def dense_rows(
    array: pa.Array,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    *,
    fill: float | None,
    pad: float | None,
) -> npt.NDArray[np.generic]:
    """The rows of ``array`` as ``[n, prod(shape)]`` of ``dtype``.

    Args:
        array: Rows of one column.
        shape: The shape of one row.
        dtype: Of the result.
        fill: What a null row or value becomes; None: an error.
        pad: What rows shorter than ``shape`` are filled up with; None: an error.

    Raises:
        RowError: A null without ``fill``, a row that is wider than ``shape``, or narrower without ``pad``, or a value
            that does not fit ``dtype``.
    """
    array = plain(array)
    nulls = np.asarray(array.is_null())
    if fill is None and nulls.any():
        raise RowError(int(nulls.argmax()), "expected a value, found null")
    width = int(np.prod(shape, dtype=np.int64))
    out = np.empty((len(array), width), dtype)
    if pa.types.is_null(array.type):
        out[:] = fill
    elif len(shape) > 1:
        _fill_row_by_row(array, shape, out, fill)
    elif is_list(array.type):
        _fill_lists(array, nulls, out, fill, pad)
    elif width > 1 and pad is None:
        raise RowError(0, f"expected {width} values, found a single one")
    else:
        out[:, :1] = convert(_numbers(array, fill), dtype)[:, None]
        out[:, 1:] = 0 if pad is None else pad
        if fill is not None:
            out[nulls] = fill
    return out


def _numbers(array: pa.Array, fill: float | None) -> npt.NDArray[Any]:
    """A primitive array as NumPy; nulls become 0 where the caller has a fill of its own to put there."""
    if array.null_count:
        if fill is None:
            raise RowError(0, "expected a number, found null inside a list")
        array = array.fill_null(pa.scalar(0, array.type) if not pa.types.is_boolean(array.type) else False)
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def _fill_lists(
    array: pa.Array,
    nulls: npt.NDArray[np.bool_],
    out: npt.NDArray[Any],
    fill: float | None,
    pad: float | None,
) -> None:
    width = out.shape[1]
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        lengths = np.where(nulls, 0, size)
    else:
        lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0))
    too_wide = lengths > width
    if too_wide.any():
        row = int(too_wide.argmax())
        raise RowError(row, f"expected at most {width} values, found {int(lengths[row])}")
    too_narrow = (lengths < width) & ~nulls
    if pad is None and too_narrow.any():
        row = int(too_narrow.argmax())
        raise RowError(row, f"expected {width} values, found {int(lengths[row])}")
    leaves = array.flatten()
    inner_nulls = np.asarray(leaves.is_null())
    row_of_leaf = np.repeat(np.arange(len(array)), lengths)
    if fill is None and inner_nulls.any():
        raise RowError(int(row_of_leaf[inner_nulls.argmax()]), "expected a number, found null inside a list")
    try:
        values = convert(_numbers(leaves, fill), out.dtype)
    except RowError as error:
        raise RowError(int(row_of_leaf[error.row]), str(error)) from error
    values = values.copy() if fill is not None else values
    if fill is not None:
        values[inner_nulls] = fill
    out[:] = 0 if pad is None else pad
    out[np.arange(width) < lengths[:, None]] = values
    if fill is not None:
        out[nulls] = fill


def _fill_row_by_row(array: pa.Array, shape: tuple[int, ...], out: npt.NDArray[Any], fill: float | None) -> None:
    for row, scalar in enumerate(array):
        value = scalar.as_py()
        if value is None:
            out[row] = fill
            continue
        try:
            found: npt.NDArray[Any] = np.array(value)
        except ValueError as error:
            raise RowError(row, str(error)) from error
        if found.shape != shape and (*found.shape, 1) != shape:
            raise RowError(row, f"expected shape {list(shape)}, found {list(found.shape)}")
        if found.dtype.kind not in "biuf":
            raise RowError(row, f"expected numbers, found {found.dtype}")
        try:
            out[row] = convert(found.reshape(-1), out.dtype)
        except RowError as error:
            raise RowError(row, str(error)) from error
