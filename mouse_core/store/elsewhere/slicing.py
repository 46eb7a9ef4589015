"""Some rows of a column whose place is known, read as few bytes as they have; and where values lie side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import NUMPY_NAMES
from mouse_core.errors import DataError
from mouse_core.files.ipc.columns import ColumnPlace, Memory
from mouse_core.store.elsewhere.asking import Asking, Range, together

_WIDE = (pa.types.is_large_list, pa.types.is_large_string, pa.types.is_large_binary)
_TEXTS = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)


def rows_of(place: ColumnPlace, number: int, row: int, count: int) -> Asking[pa.Array]:
    """The rows ``row .. row + count`` of a column.

    Args:
        place: Where the column lies.
        number: Of the object that it lies in.
        row: The first.
        count: How many.

    Raises:
        DataError: It is damaged.
    """
    part = _Part(number, iter(place.levels), iter(place.memory))
    try:
        array = yield from part.rows(place.type, row, count)
        array.validate(full=True)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"expected values of type {place.type}, found damaged ones: {error}") from error
    return array


class _Part:
    """A column, of which levels and memory are taken in Arrow's order.

    Args:
        number: Of its object.
        levels: How many values each level has, and how many of them are null.
        memory: Its pieces.
    """

    def __init__(self, number: int, levels: Iterator[tuple[int, int]], memory: Iterator[Memory]) -> None:
        self.number, self.levels, self.memory = number, levels, memory

    def rows(self, data_type: pa.DataType, row: int, count: int) -> Asking[pa.Array]:
        """Some rows; what follows in Arrow's order comes next then."""
        return self._read(self._described(data_type), row, count)

    def _described(self, data_type: pa.DataType) -> _Described:
        """The level that comes next, with all below it."""
        if isinstance(data_type, pa.BaseExtensionType):
            return _Described(data_type, 0, 0, [], [self._described(data_type.storage_type)])
        total, nulls = next(self.levels)
        if pa.types.is_null(data_type):
            return _Described(data_type, total, nulls, [], [])
        has_ends = _is_list(data_type) or any(test(data_type) for test in _TEXTS)
        pieces = [next(self.memory)]
        if pa.types.is_struct(data_type):
            within = [field.type for field in data_type]
        elif _is_list(data_type) or pa.types.is_fixed_size_list(data_type):
            within = [data_type.value_type]
            pieces += [next(self.memory)] if has_ends else []
        else:
            within = []
            pieces += [next(self.memory) for _ in range(1 + has_ends)]
        return _Described(data_type, total, nulls, pieces, [self._described(one) for one in within])

    def _read(self, level: _Described, row: int, count: int) -> Asking[pa.Array]:
        data_type = level.type
        if isinstance(data_type, pa.BaseExtensionType):
            storage = yield from self._read(level.within[0], row, count)
            return pa.ExtensionArray.from_storage(data_type, storage)
        if not 0 <= row <= row + count <= level.total:
            raise DataError(
                f"expected {level.total} values, found rows {row}..{row + count - 1} of them; it is damaged"
            )
        if pa.types.is_null(data_type):
            return pa.nulls(count)
        wanted, rest = self._wanted(level, row, count), level.memory[1:]
        found = iter((yield wanted) if wanted else ())
        valid = _shifted(next(found), row, count) if level.nulls else None
        nulls = -1 if level.nulls else 0
        if pa.types.is_boolean(data_type):
            return pa.Array.from_buffers(data_type, count, [valid, _shifted(next(found), row, count)], nulls)
        if not rest:
            size = data_type.list_size if pa.types.is_fixed_size_list(data_type) else 1
            within = yield from together([self._read(one, row * size, count * size) for one in level.within])
            return pa.Array.from_buffers(data_type, count, [valid], nulls, 0, within)
        if len(rest) == 1 and not _is_list(data_type):
            return pa.Array.from_buffers(data_type, count, [valid, pa.py_buffer(next(found))], nulls)
        ends = ends_of(next(found), data_type)
        first, last = int(ends[0]), int(ends[-1])
        own = pa.py_buffer(np.ascontiguousarray(ends - first))
        if _is_list(data_type):
            values = yield from self._read(level.within[0], first, last - first)
            return pa.Array.from_buffers(data_type, count, [valid, own], nulls, 0, [values])
        (content,) = yield [self._items(rest[1], 1, first, last - first)]
        return pa.Array.from_buffers(data_type, count, [valid, own, pa.py_buffer(content)], nulls)

    def _wanted(self, level: _Described, row: int, count: int) -> list[Range]:
        """What of a level's own memory some rows have: which are null, and their values or ends."""
        wanted = [self._bits(level.memory[0], row, count)] if level.nulls else []
        data_type, rest = level.type, level.memory[1:]
        if pa.types.is_boolean(data_type):
            wanted.append(self._bits(rest[0], row, count))
        elif len(rest) == 1 and not _is_list(data_type):
            wanted.append(self._items(rest[0], data_type.bit_width // 8, row, count))
        elif rest:
            wanted.append(self._items(rest[0], _ends_dtype(data_type).itemsize, row, count + 1))
        return wanted

    def _items(self, piece: Memory, size: int, first: int, count: int) -> Range:
        if (first + count) * size > piece.size:
            raise DataError(f"expected {(first + count) * size} bytes of a column, found {piece.size}; it is damaged")
        return Range(self.number, piece.begin + first * size, piece.begin + (first + count) * size)

    def _bits(self, piece: Memory, row: int, count: int) -> Range:
        """The bytes in which some bits lie: those of rows 5 to 18, of 14 rows, are bytes 0 to 2."""
        begin, end = row // 8, -(-(row + count) // 8)
        return self._items(piece, 1, begin, end - begin)


class _Described:
    """A level of a column: its type, values, nulls, pieces of memory, and the levels below it."""

    def __init__(
        self, data_type: pa.DataType, total: int, nulls: int, memory: list[Memory], within: list[_Described]
    ) -> None:
        self.type, self.total, self.nulls, self.memory, self.within = data_type, total, nulls, memory, within


def _is_list(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_list(data_type) or pa.types.is_large_list(data_type))


def _ends_dtype(data_type: pa.DataType) -> np.dtype[Any]:
    return np.dtype(np.int64 if any(test(data_type) for test in _WIDE) else np.int32)


def ends_of(content: Any, data_type: pa.DataType) -> npt.NDArray[Any]:
    """Where each row begins, and the last ends, among the values of lists or texts; DataError if that cannot be."""
    ends = np.frombuffer(content, _ends_dtype(data_type))
    if len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any()):
        raise DataError("expected rows that end where they begin or behind it, found others; it is damaged")
    return ends


def _shifted(content: Any, row: int, count: int) -> pa.Buffer:
    """Bits of ``count`` rows of which the first is a byte's first, from bytes of which it is the bit ``row % 8``."""
    bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")[row % 8 : row % 8 + count]
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


# ---------------------------------------------------------------------- where values lie side by side


def lying(place: ColumnPlace, number: int) -> Asking[tuple[int, tuple[int, ...]] | None]:
    """Where a column's values begin in its object, and the shape of a row, as ``addresses.locate_values`` says it.

    Of lists the ends are read, all of the column's; of what cannot lie side by side nothing is.

    Returns:
        The byte (of booleans 8 times that) and the sizes of the lists; None where rows differ in length, some are
        null, or they are no numbers.

    Raises:
        DataError: It is damaged.
    """
    data_type = place.type
    while isinstance(data_type, pa.BaseExtensionType):
        data_type = data_type.storage_type
    levels, memory = iter(place.levels), iter(place.memory)
    count, nulls = next(levels)
    first, shape = 0, []
    while not nulls and count and (_is_list(data_type) or pa.types.is_fixed_size_list(data_type)):
        next(memory)
        if pa.types.is_fixed_size_list(data_type):
            size = data_type.list_size
            first *= size
        else:
            ends = yield from _ends_at(data_type, number, next(memory), first, count)
            size = int(ends[1] - ends[0])
            if not (np.diff(ends) == size).all():
                return None
            first = int(ends[0])
        shape.append(size)
        count *= size
        total, nulls = next(levels)
        if first + count > total:
            raise DataError(f"expected lists of {total} values, found some that end at {first + count}; it is damaged")
        data_type = data_type.value_type
    name = NUMPY_NAMES.get(str(data_type))
    if nulls or not count or name is None:
        return None
    next(memory)
    piece = next(memory)
    bits = 1 if name == "bool" else 8 * np.dtype(name).itemsize
    if (first + count) * bits > 8 * piece.size:
        raise DataError(f"expected {(first + count) * bits // 8} bytes of values, found {piece.size}; it is damaged")
    if name == "bool":
        return piece.begin * 8 + first, tuple(shape)
    return piece.begin + first * bits // 8, tuple(shape)


def _ends_at(data_type: pa.DataType, number: int, piece: Memory, first: int, count: int) -> Asking[npt.NDArray[Any]]:
    """Where ``count`` lists from a ``first`` one on begin, and the last ends."""
    item = _ends_dtype(data_type).itemsize
    if (first + count + 1) * item > piece.size:
        raise DataError(f"expected the ends of {count} rows, found {piece.size} bytes; it is damaged")
    begin = piece.begin + first * item
    (content,) = yield [Range(number, begin, begin + (count + 1) * item)]
    return ends_of(content, data_type)


def whole(place: ColumnPlace, number: int) -> Asking[pa.Array]:
    """All of a column."""
    wanted = [Range(number, one.begin, one.begin + one.size) for one in place.memory]
    found: Sequence[Any] = yield wanted
    by_begin = {one.begin: content for one, content in zip(place.memory, found, strict=True) if one.size}
    return place.array(lambda begin, end: pa.py_buffer(by_begin[begin]))
