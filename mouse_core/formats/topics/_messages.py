"""Messages, from their bytes: CDR of ROS 2, the plain layout of ROS 1, and JSON. No code is made of definitions."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from mouse_core.errors import DataError
from mouse_core.formats.topics._definitions import SIZES, TEXT, Definitions, Kind, parse_definitions

Decode = Callable[[Any], dict[str, Any]]
"""Bytes of a message to its fields by name: NumPy's numbers and arrays, texts, messages, and lists of such.

Numbers of JSON, which has but one type of them, are Python's.
"""

_LETTERS = {
    "bool": "?", "byte": "B", "char": "B", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i",
    "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip
_DTYPES = {"bool": "?", "byte": "u1", "char": "u1"} | {
    name: f"{'f' if name[0] == 'f' else name[0]}{size}" for name, size in SIZES.items() if name[-1].isdigit()
}
_SCALARS = {name: np.dtype(letters).type for name, letters in _DTYPES.items()}
_ENCODINGS = {"cdr": ("ros2msg", ""), "ros1": ("ros1msg", ""), "json": None}


def decoder(name: str, encoding: str, schema: str, definition: str, given: Mapping[str, str] | None = None) -> Decode:
    """What reads the messages of a topic.

    Args:
        name: Their type.
        encoding: "cdr", "ros1" or "json".
        schema: What the definition is written in: "ros2msg", "ros1msg" or nothing.
        definition: As ``parse_definitions`` takes it.
        given: Other definitions, by type.

    Raises:
        DataError: Messages that are not read, or a definition that is none.
    """
    if encoding not in _ENCODINGS:
        raise DataError(
            f"expected messages in one of {list(_ENCODINGS)}, found {encoding!r}; read them with the library that "
            "wrote them, and write those topics again"
        )
    schemas = _ENCODINGS[encoding]
    if schemas is None:
        return _from_json
    if schema not in schemas and name not in (given or {}):
        raise DataError(
            f"{name}: expected a definition as in .msg files, found one in {schema!r}; give one in the layout's "
            "definitions"
        )
    definitions = parse_definitions(name, definition if schema in schemas else "", given)
    return partial(_decode, definitions, next(iter(definitions)), encoding == "ros1")


def _from_json(data: Any) -> dict[str, Any]:
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"expected a JSON object, found {type(found).__name__}")
    return found


def _decode(definitions: Definitions, name: str, plain: bool, data: Any) -> dict[str, Any]:
    if plain:
        return _Reader(definitions, memoryview(data), 0, "<", aligned=False).message(name)
    # Two bytes say how what follows is laid out, and two more are options of that.
    kind = bytes(data[:2])
    if len(data) < 4 or kind not in (b"\0\0", b"\0\1"):
        raise DataError(f"expected a message in plain CDR, found one that begins with {bytes(data[:4]).hex()!r}")
    return _Reader(definitions, memoryview(data), 4, "<" if kind == b"\0\1" else ">", aligned=True).message(name)


class _Reader:
    """Reads a message, value by value.

    Args:
        definitions: Of it, and of what is in it.
        data: Its bytes.
        origin: Where its values begin; numbers are aligned as seen from there.
        order: "<" or ">".
        aligned: Whether numbers lie at multiples of their size.
    """

    def __init__(self, definitions: Definitions, data: memoryview, origin: int, order: str, *, aligned: bool) -> None:
        self._definitions, self._data, self._order = definitions, data, order
        self._origin, self._aligned, self._place = origin, aligned, origin

    def message(self, name: str) -> dict[str, Any]:
        """One, from where the last one ended. Every one takes a byte, so no number of them is believed for nothing."""
        return {field: self._value(kind) for field, kind in self._definitions[name]}

    def _value(self, kind: Kind) -> Any:
        if kind.many is None:
            return self._one(kind.name)
        count = int(self._number("uint32")) if kind.many < 0 else kind.many
        if kind.name in SIZES:
            return self._numbers(kind.name, count)
        if count > len(self._data) - self._place:
            raise DataError(f"expected {count} values of {kind.name}, found the message's end")
        return [self._one(kind.name) for _ in range(count)]

    def _one(self, name: str) -> Any:
        if name == TEXT:
            return self._text()
        return self._number(name) if name in SIZES else self.message(name)

    def _take(self, size: int) -> int:
        """Where the next ``size`` bytes begin."""
        first, self._place = self._place, self._place + size
        if self._place > len(self._data):
            raise DataError(f"expected {size} bytes at byte {first}, found the message's end at {len(self._data)}")
        return first

    def _align(self, size: int) -> None:
        if self._aligned:
            self._place += -(self._place - self._origin) % size

    def _number(self, name: str) -> Any:
        size = SIZES[name]
        self._align(size)
        return _SCALARS[name](struct.unpack_from(self._order + _LETTERS[name], self._data, self._take(size))[0])

    def _numbers(self, name: str, count: int) -> Any:
        size = SIZES[name]
        if count:
            self._align(size)
        first = self._take(size * count)
        return np.frombuffer(self._data, self._order + _DTYPES[name], count, first)

    def _text(self) -> str:
        length = int(self._number("uint32"))
        first = self._take(length)
        found = bytes(self._data[first : first + length])
        if self._aligned and length:  # with a zero behind it
            if found[-1]:
                raise DataError(f"expected a text that ends in a zero at byte {first + length - 1}, found none")
            found = found[:-1]
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"expected text in UTF-8 at byte {first}: {error.reason}") from error
