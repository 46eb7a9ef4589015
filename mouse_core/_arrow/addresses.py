"""Addresses of values in Arrow's memory, and flat views of memory, with which NumPy gathers from many buffers in one
call.

A table of a thousand record batches has a thousand buffers for each column, usually in one mapped file, sometimes in
several files or on the heap. NumPy gathers fastest from *one* array, with one index for each window. Therefore the
address space of the process is viewed as one read-only array, in which the index of an element is its address divided
by the item size. Creating the view reads no memory; only elements at addresses of a live ``pyarrow.Buffer`` are read.
The code that computes an index, such as ``ColumnPart``, keeps the buffer alive. Bounds come from Arrow's own lengths
and offsets, which ``locate_values`` checks when a chunk is first used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import as_strided

from mouse_core._arrow.column_types import NUMPY_NAMES, is_list
from mouse_core.errors import DataError

# User addresses end below 2**48 on every 64-bit system that Arrow supports. The first page is never mapped; the view
# begins after it, so that the view's pointer is not null.
_FIRST_ADDRESS = 1 << 12
_END_OF_ADDRESSES = 1 << 48
# NumPy rejects arrays of 2**63 bytes or more, and counts overlapping windows of a view in full.
LONGEST_WINDOW = (1 << 14) - 1
# Runs with more bytes are not scanned for the few rows of a window; shorter runs are scanned together, up to this
# number of bytes.
_MOST_BYTES, _LOOKED_THROUGH = 1 << 14, 1 << 18


class _AddressSpace:
    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": ((_END_OF_ADDRESSES - _FIRST_ADDRESS) // dtype.itemsize,),
            "typestr": dtype.str,
            "data": (_FIRST_ADDRESS, True),
        }


def element_of(address: int, itemsize: int) -> int | None:
    """Return the index in ``flat_view`` of the item at ``address``; None if the address is not a multiple of the item
    size.
    """
    index, rest = divmod(address - _FIRST_ADDRESS, itemsize)
    return None if rest or not _FIRST_ADDRESS <= address < _END_OF_ADDRESSES else index


def octets_at(addresses: npt.NDArray[np.int64], within: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the bytes at the addresses ``addresses + within`` (int64 ``[n]`` and int64 ``[n, k]``), uint8
    ``[n, k]``.
    """
    octets: npt.NDArray[Any] = flat_view(np.dtype(np.uint8))
    found: npt.NDArray[np.uint8] = octets[(addresses - _FIRST_ADDRESS)[:, None] + within]
    return found


def element_of_all(addresses: npt.NDArray[np.int64], itemsize: int) -> npt.NDArray[np.int64]:
    """Return the indices in ``flat_view`` of the items at ``addresses``, which are multiples of the item size."""
    return (addresses - _FIRST_ADDRESS) // itemsize


def address_of_all(elements: npt.NDArray[np.int64], itemsize: int) -> npt.NDArray[np.int64]:
    """Return the addresses of items from their indices in ``flat_view``."""
    return elements * itemsize + _FIRST_ADDRESS


@lru_cache(maxsize=64)
def flat_view(dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """Return the address space as a read-only array of ``dtype``."""
    return np.asarray(_AddressSpace(dtype))


@lru_cache(maxsize=1024)
def _window_view(dtype: np.dtype[np.generic], length: int) -> npt.NDArray[np.generic]:
    flat = flat_view(dtype)
    step = dtype.itemsize
    return as_strided(flat, (flat.size - length + 1, length), (step, step), writeable=False)


def copy_runs(dtype: np.dtype[np.generic], elements: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.generic]:
    """Copy runs of ``length`` items of ``dtype`` that begin at ``elements`` (int64 ``[n]``) to an array ``[n,
    length]``.
    """
    if length == 1:
        return flat_view(dtype).take(elements)[:, None]
    if length <= LONGEST_WINDOW:
        return _window_view(dtype, length)[elements]
    target = np.empty((len(elements), length), dtype)
    flat = flat_view(dtype)
    for row, first in enumerate(elements.tolist()):
        target[row] = flat[first : first + length]
    return target


def largest_in_runs(dtype: np.dtype[np.generic], begin: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return, for each address, the largest of the ``count`` integers from this address on. A negative integer counts
    as the largest int64.

    The largest int64 is also returned for a run that is so long that scanning the run is too slow for the few rows of a
    batch.
    """
    limit, item = np.iinfo(np.int64).max, dtype.itemsize
    largest = np.full(len(begin), limit)
    together = _LOOKED_THROUGH // max(count * item, 1) if count * item <= _MOST_BYTES else 0
    first = element_of_all(begin, item)
    for number in range(0, len(begin), together) if together else ():
        codes = copy_runs(dtype, first[number : number + together], count).view(f"u{item}")
        found = codes.max(axis=1, initial=0).astype(np.uint64)
        largest[number : number + together] = np.minimum(found, np.uint64(limit))
    return largest


def copy_bits(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return the bits at ``positions`` (8 times the address, plus the index of the bit; any shape) as booleans."""
    octets = flat_view(np.dtype(np.uint8))[(positions >> 3) - _FIRST_ADDRESS]
    bits: npt.NDArray[np.bool_] = (octets >> (positions & 7).astype(np.uint8) & 1).astype(np.bool_)
    return bits


def runs_equal(elements: npt.NDArray[np.int64], wanted: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Return whether the run of items at each of ``elements`` (int64 ``[n]``) equals ``wanted``, bool ``[n]``."""
    equal: npt.NDArray[np.bool_] = (copy_runs(wanted.dtype, elements, len(wanted)) == wanted).all(axis=1)
    return equal


def locate_values(array: pa.Array) -> tuple[int, tuple[int, ...]] | None:
    """Return the address of ``array``'s values and the shape of a row, if rows are contiguous and have no gaps or
    nulls.

    Returns:
        ``(address, shape)``: the address in bytes of the first value (in *bits* for booleans) and the sizes of the
        list levels; None if rows differ in length, contain nulls, or are encoded.

    Raises:
        ValueError: The array is damaged: lists or values lie outside the array's memory.
    """
    n = len(array)
    first = array.offset
    shape: list[int] = []
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
        first = array.offset
    if not n or array.null_count:
        return None
    while is_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
            first *= size
        else:
            ends = _offsets(array, first, n + 1)
            size = int(ends[1] - ends[0])
            if not (np.diff(ends) == size).all():
                # Later reads trust the array's offsets.
                array.validate(full=True)
                return None
            first = int(ends[0])
        if not size:
            return None
        n *= size
        shape.append(size)
        array = array.values
        if first < 0 or first + n > len(array):
            raise ValueError(
                f"expected lists within {len(array)} values, found a list that ends at {first + n}; the "
                "column is damaged"
            )
        if array.null_count and array.slice(first, n).null_count:
            return None
        first += array.offset
    return _first_value(array, first, n, tuple(shape))


def locate_checked(array: pa.Array) -> tuple[int, tuple[int, ...]] | None:
    """Return the result of ``locate_values``; also validate the offsets of values that are not contiguous."""
    located = locate_values(array)
    if located is None:
        array.validate(full=True)
    return located


def check_rows(rows: pa.Table | pa.RecordBatch | pa.ChunkedArray | pa.Array, label: str, *, whole: bool = True) -> None:
    """Check that all values of rows are inside the memory of their columns.

    Reading a list or a text with a damaged offset would crash the process. Arrow checks offsets only on request.
    Arrow's check also reads values of the column that are outside of a slice.

    Args:
        rows: The rows.
        label: The start of the error message.
        whole: Whether the rows are complete columns. In a slice, only the values of the slice's rows are read.

    Raises:
        DataError: A value lies outside the memory of its column, or a text is not UTF-8.
    """
    try:
        rows.validate(full=whole)
        if not whole:
            for column in getattr(rows, "columns", [rows]):
                for array in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
                    _check_values(array)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{label}: expected readable rows, found damaged data: {error}") from error


def _check_values(array: pa.Array) -> None:
    """Check the values of an array and all nested levels; raises Arrow's error or ValueError."""
    kind, types = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        array, kind = array.storage, kind.storage_type
    nested = is_list(kind) or types.is_map(kind) or types.is_struct(kind) or types.is_dictionary(kind)
    array.validate(full=not nested)
    if not nested or not len(array):
        return
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            _check_values(array.field(number))
    elif types.is_fixed_size_list(kind):
        _check_values(array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size))
    elif types.is_dictionary(kind):
        array.indices.validate(full=True)
        codes = array.indices.drop_null().to_numpy()
        first, last = int(codes.min(initial=0)), int(codes.max(initial=-1))
        if first < 0 or last >= len(array.dictionary):
            raise ValueError(f"expected codes in 0..{len(array.dictionary) - 1}, found {first}..{last}")
        _check_values(array.dictionary.slice(first, last + 1 - first))
    else:
        ends = _offsets(array, array.offset, len(array) + 1)
        first, last = int(ends[0]), int(ends[-1])
        if first < 0 or last > len(array.values) or (np.diff(ends) < 0).any():
            found = f"{ends.min()}..{ends.max()}"
            raise ValueError(f"expected ascending offsets of lists in 0..{len(array.values)}, found {found}")
        _check_values(array.values.slice(first, last - first))


def list_offsets(array: pa.Array) -> Iterator[tuple[int, int, np.dtype[Any]]]:
    """Yield the address, count and dtype of ``array``'s list offsets, for each nested level that has offsets.

    The offsets of a level are read when the next level is requested.
    """
    n, first = len(array), array.offset
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
        first = array.offset
    while is_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            n, first = n * array.type.list_size, first * array.type.list_size
        else:
            ends = _offsets(array, first, n + 1)
            yield array.buffers()[1].address + first * ends.itemsize, n + 1, ends.dtype
            first, n = int(ends[0]), int(ends[-1] - ends[0])
        array = array.values
        first += array.offset


def ranges_in(rows: Sequence[tuple[pa.Array, int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the byte ranges of rows, one nested level after another, as begin and end addresses.

    The ranges of a level are computed from types, or, for lists, strings and bytes, from the offsets in the previous
    level. The offsets of a level are read when the next level is requested.

    Args:
        rows: Tuples of three: an array, the first row, and the number of rows.

    Raises:
        DataError: Offsets point outside the memory of their values.
    """
    while rows:
        ranges, level, open_rows = [], [], [one for one in rows if one[2]]
        while open_rows:
            array, first, count = open_rows.pop()
            array = array.storage if isinstance(array, pa.ExtensionArray) else array
            data_type, buffers, begin = array.type, array.buffers(), array.offset + first
            if buffers and buffers[0] is not None:
                ranges.append(_bits_of(buffers[0], begin, count, 1))
            if pa.types.is_struct(data_type):
                open_rows += [(array.field(number), first, count) for number in range(data_type.num_fields)]
            elif pa.types.is_fixed_size_list(data_type):
                size = data_type.list_size
                open_rows += [(array.values, begin * size, count * size)] if size else []
            elif len(buffers) > 1 and buffers[1] is not None:
                if width := _offset_bytes(data_type):
                    ranges.append(_bits_of(buffers[1], begin, count + 1, 8 * width))
                    level.append((array, begin, count))
                elif len(buffers) == 2:
                    ranges.append(_bits_of(buffers[1], begin, count, data_type.bit_width))
        yield ranges
        rows = [_values_of(*one) for one in level]


def _values_of(array: pa.Array, begin: int, count: int) -> tuple[pa.Array, int, int]:
    """Return the values of lists, or the bytes of strings, for a range of rows, with the position of the first value
    and the number of values.

    Args:
        array: The lists or strings.
        begin: The position of the first row in the offsets.
        count: Number of rows.
    """
    buffers = array.buffers()
    try:
        low, high = _offsets(array, begin, count + 1)[[0, count]].tolist()
    except ValueError as error:
        raise DataError(
            f"expected offsets of {begin + count} rows, found fewer: {error}; the offsets are damaged"
        ) from error
    if is_list(array.type):
        values = array.values
    else:
        memory = pa.py_buffer(b"") if buffers[2] is None else buffers[2]
        values = pa.Array.from_buffers(pa.uint8(), memory.size, [None, memory])
    if not 0 <= low <= high <= len(values):
        raise DataError(f"expected rows among {len(values)} values, found rows at {low}..{high}; the column is damaged")
    return values, low, high - low


def _bits_of(buffer: pa.Buffer, first: int, count: int, bits: int) -> tuple[int, int]:
    """Return the start and end address of ``count`` values of ``bits`` bits each, from value ``first`` on."""
    return buffer.address + first * bits // 8, buffer.address + ((first + count) * bits + 7) // 8


def _offset_bytes(data_type: pa.DataType) -> int:
    """Return the size in bytes of a type's offsets; 0 for types without offsets."""
    types = pa.types
    if types.is_large_list(data_type) or types.is_large_string(data_type) or types.is_large_binary(data_type):
        return 8
    return 4 if types.is_list(data_type) or types.is_string(data_type) or types.is_binary(data_type) else 0


def _first_value(array: pa.Array, first: int, n: int, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    name = NUMPY_NAMES.get(str(array.type))
    if name is None:
        return None
    buffer = array.buffers()[-1]
    bits = 1 if name == "bool" else 8 * np.dtype(name).itemsize
    if (first + n) * bits > 8 * buffer.size:
        raise ValueError(
            f"expected {(first + n) * bits // 8} bytes of values, found {buffer.size}; the column is damaged"
        )
    address = buffer.address
    if name == "bool":
        return address * 8 + first, shape
    return address + first * np.dtype(name).itemsize, shape


def _offsets(array: pa.Array, first: int, count: int) -> npt.NDArray[Any]:
    """Return a view of ``count`` offsets of lists, maps, strings or bytes, from offset ``first`` on.

    Raises:
        ValueError: The array is damaged, because it has too few offsets.
    """
    width = _offset_bytes(array.type) or 4  # maps also have offsets
    return np.frombuffer(array.buffers()[1], f"i{width}", count, first * width)
