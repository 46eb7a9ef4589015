"""Where the columns of a record batch lie in its file, as its head says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.files.ipc.metadata import Flat

Read = Callable[[int, int], Any]
"""Gives the bytes ``begin .. end`` of a file, as something that is a buffer."""

_V5 = 4


class Memory(NamedTuple):
    """A piece of memory of a column.

    Args:
        kind: "nulls" (a bit a value; of no bytes where none is null), "ends" (of lists, texts and bytes), or "values".
        begin: At which byte of the file it begins.
        size: How many bytes it has.
    """

    kind: str
    begin: int
    size: int


@dataclass(frozen=True)
class ColumnPlace:
    """Where one column of a record batch lies in its file.

    Args:
        type: Its Arrow type.
        levels: Of the column and what it consists of, lists before what is in them, how many there are and how many of
            them are null.
        memory: What it consists of, in the order in which Arrow has it.
    """

    type: pa.DataType
    levels: tuple[tuple[int, int], ...]
    memory: tuple[Memory, ...]

    @property
    def values(self) -> tuple[int, int] | None:
        """At which byte of the file the values begin, and how many a row has, where all are numbers side by side.

        None where some are null, or booleans, or where only "ends" say how long a row is: read these first.
        """
        data_type, width = self.type, 1
        while pa.types.is_fixed_size_list(data_type):
            data_type, width = data_type.value_type, width * data_type.list_size
        if any(nulls for _, nulls in self.levels) or not _is_number(data_type) or not width:
            return None
        rows, (count, _), values = self.levels[0][0], self.levels[-1], self.memory[-1]
        if count < rows * width or values.size < count * data_type.bit_width // 8:
            raise DataError(
                f"expected {rows} rows of {width} values, found memory of {values.size} bytes; it is damaged"
            )
        return values.begin, width

    def array(self, read: Read) -> pa.Array:
        """The column itself; reads all of its memory.

        Args:
            read: Gives the bytes ``begin .. end`` of the file as a ``pyarrow.Buffer``, which the array is made over.

        Raises:
            DataError: It is damaged.
        """
        buffers = iter([read(one.begin, one.begin + one.size) if one.size else None for one in self.memory])
        try:
            return _array(self.type, iter(self.levels), buffers)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError(f"expected values of type {self.type}, found damaged ones: {error}") from error


class Head(NamedTuple):
    """What the head of a record batch says of its body.

    Args:
        rows: How many it has.
        levels: For each column, and what it consists of, how many there are and how many are null, int64 ``[n, 2]``.
        memory: At which byte of the body each piece of memory begins, and how many bytes it has, int64 ``[m, 2]``.
        compressed: Whether the memory is compressed, so that values do not lie there as they are.
    """

    rows: int
    levels: npt.NDArray[np.int64]
    memory: npt.NDArray[np.int64]
    compressed: bool

    @classmethod
    def of(cls, table: Flat, size: int, version: int = _V5) -> Head:
        """That of a table of metadata whose body has ``size`` bytes."""
        pair = np.dtype(("<i8", (2,)))
        rows, levels, memory = table.number(0, "<q"), table.rows(1, pair), table.rows(2, pair)
        if version < _V5 - 1 or rows < 0 or (levels < 0).any() or (memory < 0).any():
            raise DataError(f"expected a record batch, found one of {rows} rows; it is damaged")
        if len(memory) and (memory[:, 0] > size - np.minimum(memory[:, 1], size + 1)).any():
            raise DataError(f"expected memory of columns in a body of {size} bytes, found it to end behind it")
        return cls(rows, levels, memory, table.table(3) is not None)

    def columns(self, schema: pa.Schema, body: int) -> dict[str, ColumnPlace]:
        """Where columns lie, by name.

        Those that are not there are read with Arrow's own reader, in whole record batches: compressed ones,
        dictionaries, and what stands behind types that are rarely stored.

        Args:
            schema: Of the file.
            body: At which byte of it the body begins.

        Raises:
            DataError: The head is not that of such columns.
        """
        found: dict[str, ColumnPlace] = {}
        level = piece = 0
        for name, data_type in zip(schema.names, schema.types, strict=True) if not self.compressed else ():
            form = _form(data_type)
            if form is None:
                break
            levels, kinds = form
            there, memory = (
                self.levels[level : level + levels].tolist(),
                self.memory[piece : piece + len(kinds)].tolist(),
            )
            if len(there) < levels or len(memory) < len(kinds) or there[0][0] != self.rows:
                raise DataError(f"expected {self.rows} rows of the column {name!r}, found others; it is damaged")
            level, piece = level + levels, piece + len(kinds)
            pieces = [Memory(kind, body + at, size) for kind, (at, size) in zip(kinds, memory, strict=True)]
            if not isinstance(data_type, pa.DictionaryType):
                found[name] = ColumnPlace(data_type, tuple(map(tuple, there)), tuple(pieces))
        return found


def _is_number(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_floating(data_type))


def _form(data_type: pa.DataType) -> tuple[int, tuple[str, ...]] | None:
    """How many levels a column of a type has, and which pieces of memory; None where that is not known."""
    is_of = pa.types
    if is_of.is_null(data_type):
        return 1, ()
    if isinstance(data_type, pa.BaseExtensionType):
        return _form(data_type.storage_type)
    if is_of.is_struct(data_type):
        return _with(("nulls",), [field.type for field in data_type])
    if is_of.is_fixed_size_list(data_type):
        return _with(("nulls",), [data_type.value_type])
    if is_of.is_list(data_type) or is_of.is_large_list(data_type):
        return _with(("nulls", "ends"), [data_type.value_type])
    if any(
        test(data_type) for test in (is_of.is_string, is_of.is_binary, is_of.is_large_string, is_of.is_large_binary)
    ):
        return 1, ("nulls", "ends", "values")
    fixed = is_of.is_primitive(data_type) or is_of.is_fixed_size_binary(data_type) or is_of.is_decimal(data_type)
    return (1, ("nulls", "values")) if fixed or is_of.is_dictionary(data_type) else None


def _with(own: tuple[str, ...], within: list[pa.DataType]) -> tuple[int, tuple[str, ...]] | None:
    """The form of what has memory of its own, and other columns within it."""
    levels, kinds = 1, own
    for data_type in within:
        form = _form(data_type)
        if form is None or isinstance(data_type, pa.DictionaryType):
            return None
        levels, kinds = levels + form[0], kinds + form[1]
    return levels, kinds


def _array(data_type: pa.DataType, levels: Iterator[tuple[int, int]], buffers: Iterator[pa.Buffer | None]) -> pa.Array:
    """An array over some memory, which is taken in Arrow's order; Arrow validates it."""
    if isinstance(data_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(data_type, _array(data_type.storage_type, levels, buffers))
    rows, nulls = next(levels)
    if pa.types.is_null(data_type):
        return pa.nulls(rows)
    is_list = pa.types.is_list(data_type) or pa.types.is_large_list(data_type)
    own, within = [next(buffers)], []
    if pa.types.is_struct(data_type):
        within = [field.type for field in data_type]
    elif pa.types.is_fixed_size_list(data_type) or is_list:
        within = [data_type.value_type]
        own += [next(buffers)] if is_list else []
    else:
        own += [next(buffers) for _ in range(data_type.num_buffers - 1)]
    # A buffer of no bytes is not there, which Arrow takes for none only where values may be null.
    own = [own[0], *(pa.py_buffer(b"") if one is None else one for one in own[1:])]
    children = [_array(one, levels, buffers) for one in within]
    return pa.Array.from_buffers(data_type, rows, own, nulls, 0, children)
