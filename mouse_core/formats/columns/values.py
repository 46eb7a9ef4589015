"""The values of a column of a record batch as NumPy arrays, whatever their Arrow type, and hashes of its rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import ColumnType, column_type, is_list
from mouse_core._arrow.dense import plain

UInt64s = npt.NDArray[np.uint64]

# Rows of more bytes are hashed one by one, by a hash that is fast on long inputs.
_LONG_ROW = 512


@dataclass(frozen=True)
class Values:
    """One column of some rows.

    Args:
        kind: The column's type.
        rows: Number of rows.
        numbers: The values, ``[rows, ...]`` if all rows have one shape and none is null, else flat; None if the column
            holds no numbers.
        shape: The shape of a row; None if rows differ, or hold no numbers.
        lengths: The number of values in every row, if rows differ.
        present: Whether each row is not null, bool ``[rows]``; None if no row is null.
        inner_nulls: Number of nulls inside rows.
        array: The Arrow values.
    """

    kind: ColumnType
    rows: int
    numbers: npt.NDArray[Any] | None
    shape: tuple[int, ...] | None
    lengths: npt.NDArray[np.int64] | None
    present: npt.NDArray[np.bool_] | None
    inner_nulls: int
    array: pa.Array

    @property
    def nulls(self) -> int:
        """Number of null rows, plus nulls inside other rows."""
        return self.inner_nulls + (0 if self.present is None else int((~self.present).sum()))


def read_values(array: pa.Array) -> Values:
    """Return the values of a column of a record batch, which must be valid (``array.validate(full=True)``)."""
    array = plain(array)
    kind = column_type(array.type)
    rows = len(array)
    present = None if not array.null_count else np.asarray(array.is_valid())
    if kind.kind not in ("scalar", "list"):
        return Values(kind, rows, None, None, None, present, 0, array)
    inner, shape, lengths = _without_lists(array)
    inner_nulls = inner.null_count if is_list(array.type) else 0
    if inner.null_count:
        inner, shape = inner.drop_null(), None
    numbers = np.asarray(inner.to_numpy(zero_copy_only=False))
    if shape is not None and rows:
        return Values(kind, rows, numbers.reshape(rows, *shape), shape, None, present, inner_nulls, array)
    return Values(kind, rows, numbers, None, lengths, present, inner_nulls, array)


def _without_lists(array: pa.Array) -> tuple[pa.Array, tuple[int, ...] | None, npt.NDArray[np.int64] | None]:
    """Return the values in the lists of a column, the shape of a row (None if rows differ), and the values per row.

    Of ``[[[1, 2], [3, 4]], [[5]]]`` the values are 1 to 5, and the rows have 4 and 1.
    """
    shape: tuple[int, ...] | None = ()
    lengths: npt.NDArray[np.int64] | None = None
    while is_list(array.type):
        counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if lengths is None:
            lengths = counts
        else:  # of the lists, how many values each row's lists have together
            lengths = np.diff(_ends(counts)[_ends(lengths)])
        same = len(counts) > 0 and not array.null_count and bool((counts == counts[0]).all())
        shape = (*shape, int(counts[0])) if same and shape is not None else None
        array = array.flatten()
    return array, shape, lengths


def _ends(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return 0 and the end of each of several adjacent stretches."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


# ---------------------------------------------------------------------- hashes of rows


def hash_rows(values: Values) -> UInt64s:
    """Return a hash of every row, ``[rows]``: equal for rows of equal bytes, and by chance alone for others."""
    numbers = values.numbers
    if numbers is None or values.shape is None:
        return _hash_each(values)
    flat = np.ascontiguousarray(numbers.reshape(values.rows, -1))
    row_bytes = flat.shape[1] * flat.itemsize
    if row_bytes > _LONG_ROW:
        packed = flat.view(np.uint8).reshape(values.rows, row_bytes)
        return np.array([_hash_bytes(row) for row in packed], np.uint64)
    hashed = np.full(values.rows, row_bytes, np.uint64)
    if flat.itemsize == 8:
        words = flat.view(np.uint64)
    else:
        padded = np.zeros((values.rows, -(-row_bytes // 8) * 8), np.uint8)
        padded[:, :row_bytes] = flat.view(np.uint8).reshape(values.rows, row_bytes)
        words = padded.view(np.uint64)
    for place in range(words.shape[1]):
        hashed = mixed(hashed * np.uint64(0x9E3779B97F4A7C15) ^ words[:, place])
    return hashed


def mixed(words: UInt64s) -> UInt64s:
    """Mix 64-bit values, so that every bit affects all 64."""
    words = words ^ (words >> np.uint64(32))
    words = words * np.uint64(0xD6E8FEB86659FD93)
    words = words ^ (words >> np.uint64(29))
    words = words * np.uint64(0xA5A5A5A5A5A5A5A5 | 1)
    return np.asarray(words ^ (words >> np.uint64(32)))


def combined(hashes: list[UInt64s], rows: int) -> UInt64s:
    """Combine several hashes of each row to one hash."""
    found = np.zeros(rows, np.uint64)
    for one in hashes:
        found = mixed(found * np.uint64(0x9E3779B97F4A7C15) + one)
    return found


def _hash_each(values: Values) -> UInt64s:
    array = values.array
    if values.kind.kind == "image" and pa.types.is_struct(array.type):
        pixels = array.field("bytes")
        array = pixels if pixels.null_count < len(pixels) else array.field("path")
    found = np.empty(values.rows, np.uint64)
    is_bytes = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
    for row, value in enumerate(array):
        data = value.as_buffer() if is_bytes else repr(value.as_py()).encode()
        found[row] = 0 if data is None else _hash_bytes(data)
    return found


def _hash_bytes(data: Any) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
