"""Turning Arrow rows that are ragged, null or encoded into dense NumPy rows: slower, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import is_list
from mouse_core._base.checks import values_of
from mouse_core.dtypes import RowError, convert

_Bools = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]


def plain(array: pa.Array) -> pa.Array:
    """What an extension array stores and what a dictionary array stands for."""
    while isinstance(array, pa.ExtensionArray | pa.DictionaryArray):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.dictionary_decode()
    return array


def without_nulls(array: pa.Array) -> pa.Array:
    """The values that are not null; pyarrow (26) gives others of nested lists of fixed size that do not begin at 0."""
    if array.offset and pa.types.is_fixed_size_list(array.type):
        array = pa.concat_arrays([array, array.slice(0, 0)])
    return array.drop_null()


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
        array: Rows of one column, valid: what is damaged is not noticed.
        shape: The shape of one row.
        dtype: Of the result.
        fill: What a null row or value becomes; None: an error.
        pad: What rows shorter than ``shape`` are filled up with; None: an error.

    Raises:
        RowError: A null without ``fill``, a row that is wider than ``shape``, or narrower without ``pad``, or a value
            that does not fit ``dtype``.
    """
    array = plain(array)
    nulls = _nulls(array)
    if fill is None and nulls is not None:
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
        out[:, :1] = convert(_numbers(array, nulls), dtype)[:, None]
        out[:, 1:] = 0 if pad is None else pad
        if nulls is not None:
            out[nulls] = fill
    return out


def _nulls(array: pa.Array) -> _Bools | None:
    """Which items are null, ``[n]``; None if none is."""
    if not array.null_count:
        return None
    bits = array.buffers()[0]
    return np.ones(len(array), np.bool_) if bits is None else ~_bits(bits, array)


def _bits(bits: pa.Buffer, array: pa.Array) -> _Bools:
    """The array's part of a buffer that has a bit for each item."""
    first, end = array.offset, array.offset + len(array)
    octets = np.frombuffer(bits, np.uint8)[first // 8 : -(-end // 8)]
    begin = first % 8
    return np.unpackbits(octets, bitorder="little")[begin : begin + len(array)].view(np.bool_)


def _numbers(array: pa.Array, nulls: _Bools | None) -> npt.NDArray[Any]:
    """A primitive array as NumPy, 0 where it is null; not to be written to."""
    if pa.types.is_null(array.type) or not len(array):
        return np.zeros(len(array), np.bool_)
    memory = array.buffers()[1]
    if pa.types.is_boolean(array.type):
        values: npt.NDArray[Any] = _bits(memory, array)
    else:
        values = np.frombuffer(memory, array.type.to_pandas_dtype())[array.offset : array.offset + len(array)]
    return values if nulls is None else np.where(nulls, values.dtype.type(0), values)


def _fill_lists(
    array: pa.Array,
    nulls: _Bools | None,
    out: npt.NDArray[Any],
    fill: float | None,
    pad: float | None,
) -> None:
    """Write rows that are lists to ``out``, ``[n, width]``; ``nulls`` says which rows are null."""
    n, width = out.shape
    values, inner_nulls, lengths = _values_of_lists(array, nulls)
    _check_widths(lengths, nulls, width, is_padded=pad is not None)
    if fill is None and inner_nulls is not None:
        row = _row_of(int(inner_nulls.argmax()), lengths)
        raise RowError(row, "expected a number, found null inside a list")
    try:
        values = convert(values, out.dtype)
    except RowError as error:
        raise RowError(_row_of(error.row, lengths), str(error)) from error
    if inner_nulls is not None:
        values = np.where(inner_nulls, out.dtype.type(fill), values)
    lowest, highest = int(lengths.min(initial=width)), int(lengths.max(initial=0))
    if lowest == width:
        out[:] = values.reshape(n, width)
        return
    out[:] = 0 if pad is None else pad
    if nulls is None and lowest == highest:
        out[:, :highest] = values.reshape(n, highest)
    else:
        # Lengths 1 and 3 of a width of 4 are [[x, -, -, -], [x, x, x, -]], in the order of the values.
        out[np.arange(width) < lengths[:, None]] = values
    if nulls is not None:
        out[nulls] = fill


def _values_of_lists(array: pa.Array, nulls: _Bools | None) -> tuple[npt.NDArray[Any], _Bools | None, _Ints]:
    """The values of all lists one after the other, which of them are null if some are, and how many each row has."""
    n = len(array)
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        first, lengths = array.offset * size, np.full(n, size)
    else:
        ends = array.offsets.to_numpy()
        first, lengths = int(ends[0]), np.diff(ends)
    leaves = array.values.slice(first, int(lengths.sum()))
    inner_nulls = _nulls(leaves)
    values = _numbers(leaves, inner_nulls)
    if nulls is not None:
        # Rows that are null may have values all the same.
        if lengths[nulls].any():
            there = np.repeat(~nulls, lengths)
            values, inner_nulls = values[there], None if inner_nulls is None else inner_nulls[there]
        lengths = np.where(nulls, 0, lengths)
    return values, inner_nulls if inner_nulls is not None and inner_nulls.any() else None, lengths


def _check_widths(lengths: _Ints, nulls: _Bools | None, width: int, *, is_padded: bool) -> None:
    """Raise RowError if a row has more values than ``width``, or fewer where nothing fills it up."""
    wrong = lengths > width
    if not is_padded and not wrong.any():
        wrong = lengths < width if nulls is None else (lengths < width) & ~nulls
    if wrong.any():
        row = int(wrong.argmax())
        raise RowError(row, f"expected {'at most ' * is_padded}{values_of(width)}, found {int(lengths[row])}")


def _row_of(position: int, lengths: npt.NDArray[np.int64]) -> int:
    """Which row the value at ``position`` among those of all rows belongs to."""
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


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
