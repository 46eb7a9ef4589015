"""Conversion of Arrow rows that are ragged, null or packed in bits to dense NumPy rows.

``dense_rows`` converts rows. ``DenseCopies`` caches complete converted chunks within a limit (``DenseBudget``), because
conversion for every batch would be slow. A dense copy has the layout of a regular chunk, and all sources of a store
share it. Example: a chunk of 1,000 booleans has 125 bytes; its copy has 1,000 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import is_list
from mouse_core._arrow.windows import Int64s
from mouse_core._base.checks import values_of
from mouse_core._base.locks import ProcessLock
from mouse_core.dtypes import RowError, convert
from mouse_core.spec import check_count

UNKNOWN = 0
"""Address value for a chunk that was not located yet."""
IRREGULAR = -1
"""Address value for a chunk whose rows are not contiguous."""
# The default limit of a store: two million rows of 16 floats, or 16 million rows of one number.
DENSE_BYTES = 128 << 20
# Number of rows that are converted together, which bounds temporary memory.
_PART_ROWS = 1 << 15

Dense = npt.NDArray[Any]
_Bools = npt.NDArray[np.bool_]


class DenseBudget:
    """The limit for the total size of a store's dense copies.

    Args:
        nbytes: The limit in bytes.

    Raises:
        ConfigError: ``nbytes`` is not a valid number of bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = check_count("dense_bytes", nbytes, 0)
        self._takers: WeakSet[DenseCopies] = WeakSet()
        self._lock = ProcessLock()

    def __reduce__(self) -> tuple[type[DenseBudget], tuple[int]]:
        return DenseBudget, (self.nbytes,)

    @property
    def used(self) -> int:
        """Return the present total size of dense copies in bytes."""
        with self._lock:
            return sum(copies.nbytes for copies in self._takers)

    def take(self, copies: DenseCopies, nbytes: int) -> bool:
        """Reserve ``nbytes`` more bytes for the lifetime of ``copies``; return False if the limit would be exceeded."""
        with self._lock:
            if self.used + nbytes > self.nbytes:
                return False
            copies.nbytes += nbytes
            self._takers.add(copies)
            return True


class DenseCopies:
    """The dense copies of the chunks of one column in one segment, for one set of reading options. Copies are never
    dropped.

    Args:
        rows: The number of rows of each chunk, int64 ``[chunks]``.
        row_bytes: Size of a dense row in bytes.
    """

    def __init__(self, rows: Int64s, row_bytes: int) -> None:
        self.rows = rows
        # The address of each copy; UNKNOWN if no copy was made yet, IRREGULAR if a copy is impossible.
        self.begin = np.zeros(len(rows), np.int64)
        self.largest = np.full(len(rows), -1, np.int64)
        self.lock = ProcessLock()
        self.nbytes = 0
        self._row_bytes = row_bytes
        self._kept: list[Dense] = []
        self._null: Dense | None = None
        self._allowed = 0

    def begins(
        self,
        chunks: Int64s,
        rows: int,
        budget: DenseBudget,
        values: Callable[[int], pa.Array],
        dense: Callable[[pa.Array], Dense],
    ) -> Int64s:
        """Return the addresses of the copies of chunks; missing copies are created if ``rows`` and ``budget`` allow it.

        Args:
            chunks: The indices of the chunks.
            rows: Largest number of further rows to make dense. The numbers of several calls are added until the sum
                suffices for a chunk.
            budget: The limit for dense copies.
            values: Function that returns the values of a chunk.
            dense: Function that converts values to rows ``[n, width]`` of a dtype; raises RowError for invalid values.
        """
        with self.lock:
            missing = chunks[self.begin[chunks] == UNKNOWN]
            if len(missing):
                self._allowed += rows
            for number in missing.tolist():
                count = int(self.rows[number])
                if count > self._allowed:
                    break
                self._allowed -= count
                self.begin[number] = self._copy(values(number), budget, dense)
            return self.begin[chunks]

    def _copy(self, values: pa.Array, budget: DenseBudget, dense: Callable[[pa.Array], Dense]) -> int:
        """Make and keep a copy of a chunk's values, and return its address; ``IRREGULAR`` if a copy is impossible."""
        count = len(values)
        only_nulls = values.null_count == count
        if only_nulls and self._null is not None and len(self._null) >= count:
            return self._null.ctypes.data
        if not budget.take(self, count * self._row_bytes):
            return IRREGULAR
        try:
            copy = dense(values.slice(0, _PART_ROWS))
            if count > _PART_ROWS:
                first, copy = copy, np.empty((count, *copy.shape[1:]), copy.dtype)
                copy[:_PART_ROWS] = first
                for begin in range(_PART_ROWS, count, _PART_ROWS):
                    copy[begin : begin + _PART_ROWS] = dense(values.slice(begin, _PART_ROWS))
        except BaseException as error:
            self.nbytes -= count * self._row_bytes
            if isinstance(error, RowError):  # raised again when the row is read
                return IRREGULAR
            raise
        self._kept.append(copy)
        if only_nulls:
            self._null = copy
        return copy.ctypes.data


def plain(array: pa.Array) -> pa.Array:
    """Return the storage of an extension array, or the decoded values of a dictionary array."""
    while isinstance(array, pa.ExtensionArray | pa.DictionaryArray):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.dictionary_decode()
    return array


def without_nulls(array: pa.Array) -> pa.Array:
    """Return the values that are not null. This function exists because pyarrow 26 returns wrong values for sliced
    nested fixed-size lists."""
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
    """Convert the rows of ``array`` to ``[n, prod(shape)]`` of ``dtype``.

    Args:
        array: Valid rows of one column: damage is not detected.
        shape: The shape of one row.
        dtype: The dtype of the result.
        fill: The value that replaces a null row or value; None: a null raises RowError.
        pad: The value that pads rows shorter than ``shape``; None: a shorter row raises RowError.

    Raises:
        RowError: A row is null and ``fill`` is None, a row is wider than ``shape``, a row is shorter and ``pad`` is
            None, or a value does not fit ``dtype``.
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
        raise RowError(0, f"expected {width} values, found a single value")
    else:
        out[:, :1] = convert(_numbers(array, nulls), dtype)[:, None]
        out[:, 1:] = 0 if pad is None else pad
        if nulls is not None:
            out[nulls] = fill
    return out


def _nulls(array: pa.Array) -> _Bools | None:
    """Return whether each item is null, ``[n]``; None if no item is null."""
    if not array.null_count:
        return None
    bits = array.buffers()[0]
    return np.ones(len(array), np.bool_) if bits is None else ~_bits(bits, array)


def _bits(bits: pa.Buffer, array: pa.Array) -> _Bools:
    """Return the bits of the array's items from a buffer with a bit for each item."""
    first, end = array.offset, array.offset + len(array)
    octets = np.frombuffer(bits, np.uint8)[first // 8 : -(-end // 8)]
    begin = first % 8
    return np.unpackbits(octets, bitorder="little")[begin : begin + len(array)].view(np.bool_)


def _numbers(array: pa.Array, nulls: _Bools | None) -> npt.NDArray[Any]:
    """Return a primitive array as a read-only NumPy array, with 0 for nulls."""
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
    """Write rows that are lists to ``out``, ``[n, width]``; ``nulls`` marks null rows."""
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
        # Example: lengths 1 and 3 with a width of 4 give [[x, -, -, -], [x, x, x, -]], in the order of the values.
        out[np.arange(width) < lengths[:, None]] = values
    if nulls is not None:
        out[nulls] = fill


def _values_of_lists(array: pa.Array, nulls: _Bools | None) -> tuple[npt.NDArray[Any], _Bools | None, Int64s]:
    """Return the values of all lists in sequence, their null mask (None if no value is null), and the length of each
    row."""
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
        # Null rows may have values in memory.
        if lengths[nulls].any():
            there = np.repeat(~nulls, lengths)
            values, inner_nulls = values[there], None if inner_nulls is None else inner_nulls[there]
        lengths = np.where(nulls, 0, lengths)
    return values, inner_nulls if inner_nulls is not None and inner_nulls.any() else None, lengths


def _check_widths(lengths: Int64s, nulls: _Bools | None, width: int, *, is_padded: bool) -> None:
    """Raise RowError if a row has more values than ``width``, or if rows are not padded and a row has fewer values."""
    wrong = lengths > width
    if not is_padded and not wrong.any():
        wrong = lengths < width if nulls is None else (lengths < width) & ~nulls
    if wrong.any():
        row = int(wrong.argmax())
        raise RowError(row, f"expected {'at most ' * is_padded}{values_of(width)}, found {int(lengths[row])}")


def _row_of(position: int, lengths: npt.NDArray[np.int64]) -> int:
    """Return the row of a value, given its ``position`` in the values of all rows."""
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
