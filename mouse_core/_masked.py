"""Gathering rows of chunks with nulls or with lists of differing lengths, all at once, where they lie.

Arrow keeps the values of such a chunk side by side as well, and beside them a bit for each that says whether it is
there, and for lists where each begins. Whatever is not allowed (a null without a fill, a row that is too wide or too
narrow) is left to ``_dense``, which says what is wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._convert import RowError, convert
from mouse_core._locks import ProcessLock
from mouse_core._memory import copy_bits, copy_runs, element_of, element_of_all, flat_view
from mouse_core._windows import Int64s

_UNKNOWN, _READABLE, _OTHER = 0, 1, 2
_NONE = -1


class _Places(NamedTuple):
    """Where the parts of a chunk lie, counted from its first row.

    Args:
        values: The address of its first value.
        offsets: The address of its first offset; ``_NONE`` where all rows have as many values.
        size: How many that is.
        valid, inner_valid: Where the bits of its rows and of its values begin (8 times the address, plus the bit's
            number); ``_NONE`` where all are there.
    """

    values: int
    offsets: int
    size: int
    valid: int
    inner_valid: int


class MaskedChunks:
    """The chunks of a column of numbers, or of lists of numbers.

    Args:
        count: Number of chunks.
        dtype: Of their values.
        width: Values of a row.
        fill, pad: See ``spec.Field``.
    """

    def __init__(self, count: int, dtype: np.dtype[Any], width: int, *, fill: float | None, pad: float | None) -> None:
        self._dtype = dtype
        self._width = width
        self._fill, self._pad = fill, pad
        self._state = np.full(count, _UNKNOWN, np.int8)
        self._places = np.full((5, count), _NONE, np.int64)
        self._offset_bytes = np.zeros(count, np.int64)
        self._lock = ProcessLock()

    def over(self, kept: int, count: int) -> MaskedChunks:
        """Those of a column of ``count`` chunks, of which the first ``kept`` are these."""
        other = MaskedChunks(count, self._dtype, self._width, fill=self._fill, pad=self._pad)
        with self._lock:
            other._state[:kept] = self._state[:kept]
            other._places[:, :kept] = self._places[:, :kept]
            other._offset_bytes[:kept] = self._offset_bytes[:kept]
        return other

    def unknown(self, chunks: Int64s) -> Int64s:
        """Those of some chunks that nobody has looked at."""
        new = self._state[chunks] == _UNKNOWN
        return np.unique(chunks[new]) if new.any() else chunks[:0]

    def look_up(self, number: int, values: pa.Array) -> None:
        """Find out where a chunk's values lie.

        Raises:
            pa.ArrowException: It is damaged.
        """
        found = _locate(values, self._dtype)
        with self._lock:
            if found is not None:
                self._places[:, number], self._offset_bytes[number] = found
            self._state[number] = _OTHER if found is None else _READABLE

    def gather(self, chunk: Int64s, row: Int64s, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """Rows as ``[n, width]`` of ``dtype``; None where ``_dense`` has to look at them."""
        if (self._state[chunk] != _READABLE).any():
            return None
        values, offsets, sizes, valid, inner_valid = self._places[:, chunk]
        there = _bits(valid, row)
        if there is not None and self._fill is None and not there.all():
            return None
        first = element_of_all(values, self._dtype.itemsize)
        ragged = offsets != _NONE
        begin = row * sizes
        for nbytes in np.unique(self._offset_bytes[chunk]).tolist():
            if nbytes:
                same = ragged & (self._offset_bytes[chunk] == nbytes)
                ends = flat_view(np.dtype(f"i{nbytes}"))
                place = element_of_all(offsets[same], nbytes) + row[same]
                begin[same] = ends[place]
                sizes[same] = ends[place + 1] - begin[same]
        if there is not None:
            sizes[~there] = 0
        if (sizes > self._width).any():
            return None
        short = sizes < self._width
        absent = np.zeros(len(row), np.bool_) if there is None else ~there
        if self._pad is None and (short & ~absent).any():
            return None
        first += begin
        try:
            return self._read(first, sizes, short, absent, np.where(inner_valid < 0, _NONE, inner_valid + begin), dtype)
        except RowError:
            return None

    def _read(
        self,
        first: Int64s,
        sizes: Int64s,
        short: npt.NDArray[np.bool_],
        absent: npt.NDArray[np.bool_],
        bits: Int64s,
        dtype: np.dtype[Any],
    ) -> npt.NDArray[Any] | None:
        found = np.zeros((len(first), self._width), self._dtype)
        (whole,) = np.nonzero(~short)
        found[whole] = copy_runs(self._dtype, first[whole], self._width)
        (some,) = np.nonzero(short & (sizes > 0))
        if len(some):
            steps = np.arange(self._width)
            within = steps < sizes[some, None]
            rows = np.zeros(within.shape, self._dtype)
            rows[within] = flat_view(self._dtype)[(first[some, None] + steps)[within]]
            found[some] = rows
        inner_absent = None
        if (bits >= 0).any():
            inside = np.arange(self._width) < np.where(bits >= 0, sizes, 0)[:, None]
            inner_absent = np.zeros(found.shape, np.bool_)
            inner_absent[inside] = ~copy_bits((bits[:, None] + np.arange(self._width))[inside])
            if self._fill is None and inner_absent.any():
                return None
            found[inner_absent] = 0
        out = convert(found, dtype)
        if self._pad is not None and short.any():
            out[np.arange(self._width) >= sizes[:, None]] = self._pad
        if inner_absent is not None:
            out[inner_absent] = self._fill
        if absent.any():
            out[absent] = self._fill
        return out


def _bits(begin: Int64s, row: Int64s) -> npt.NDArray[np.bool_] | None:
    """Whether each row is there; None if all are."""
    some = begin >= 0
    if not some.any():
        return None
    found = np.ones(len(row), np.bool_)
    found[some] = copy_bits(begin[some] + row[some])
    return found


def _locate(array: pa.Array, dtype: np.dtype[Any]) -> tuple[_Places, int] | None:
    """Where a chunk's parts lie, and bytes of an offset; None where it is of another kind."""
    kind, n = array.type, len(array)
    array.validate(full=True)  # whoever reads it must be able to trust its offsets
    valid = _bits_begin(array, array.offset, n)
    offsets, offset_bytes, size = _NONE, 0, 1
    first, leaves = array.offset, array
    if pa.types.is_fixed_size_list(kind):
        leaves, size = array.values, kind.list_size
        first, n = first * size + leaves.offset, n * size
        inner = _bits_begin(leaves, first, n)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        leaves = array.values
        offset_bytes = 4 if pa.types.is_list(kind) else 8
        offsets = array.buffers()[1].address + first * offset_bytes
        if element_of(offsets, offset_bytes) is None:
            return None
        first, n = leaves.offset, len(leaves)
        inner = _bits_begin(leaves, first, n)
    else:
        inner = _NONE
    if not pa.types.is_primitive(leaves.type) or pa.types.is_boolean(leaves.type):
        return None
    data = leaves.buffers()[1]
    if data is None or (first + n) * dtype.itemsize > data.size or leaves.type.bit_width != 8 * dtype.itemsize:
        return None
    values = data.address + first * dtype.itemsize
    if element_of(values, dtype.itemsize) is None:
        return None
    return _Places(values, offsets, size, valid, inner), offset_bytes


def _bits_begin(array: pa.Array, first: int, n: int) -> int:
    bits = array.buffers()[0]
    if not array.null_count or bits is None or 8 * bits.size < first + n:
        return _NONE
    return int(bits.address) * 8 + first
