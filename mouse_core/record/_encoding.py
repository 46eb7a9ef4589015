"""A row as bytes: a line of JSON that says which columns there are, and behind it their values in that order."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np

from mouse_core.errors import DataError
from mouse_core.record._columns import Row
from mouse_core.spec import check_dtype

_INT, _FLOAT, _BOOL, _LENGTH = (struct.Struct(f"<{code}") for code in "qd?Q")
_IMAGE = {"bytes", "path"}


def _text(value: str) -> bytes:
    content = value.encode()
    return _LENGTH.pack(len(content)) + content


def _image(value: dict[str, Any]) -> bytes:
    if value.keys() != _IMAGE:
        raise KeyError
    return _LENGTH.pack(len(value["bytes"])) + bytes(value["bytes"])


def _json(value: Any) -> bytes:
    if _code_of(value) != "json":
        raise KeyError
    content = json.dumps(value).encode()
    return _LENGTH.pack(len(content)) + content


_WRITERS: dict[str, Callable[[Any], bytes]] = {
    "none": lambda _: b"",
    "bool": _BOOL.pack,
    "int": _INT.pack,
    "float": _FLOAT.pack,
    "array": methodcaller("tobytes"),
    "text": _text,
    "image": _image,
    "json": _json,
}
_CODES = {type(None): "none", bool: "bool", float: "float", str: "text"}


class RowEncoder:
    """Makes bytes of rows. Those of one recording are mostly alike, so what they say of columns is made once."""

    def __init__(self) -> None:
        # Of each column: name, type, what makes bytes of its values, dtype and shape of an array.
        self._alike: list[tuple[str, Any, Callable[[Any], bytes], Any, Any]] = []
        self._head = b""

    def encoded(self, row: Row) -> bytes:
        """A row as bytes.

        Raises:
            DataError: It has something else than numbers, arrays and texts.
        """
        try:
            parts = self._parts(row)
            if parts is None:
                self._look_at(row)
                parts = self._parts(row)
            assert parts is not None
        except (TypeError, ValueError) as error:
            raise DataError(f"record: expected numbers, arrays and texts, found {row!r:.200}") from error
        return b"".join(parts)

    def _look_at(self, row: Row) -> None:
        self._alike, said = [], []
        for name, value in row.items():
            code = _code_of(value)
            dtype, shape = (value.dtype, value.shape) if code == "array" else (None, None)
            self._alike.append((name, type(value), _WRITERS[code], dtype, shape))
            said.append([name, code] if dtype is None else [name, code, dtype.str, list(value.shape)])
        self._head = json.dumps(said).encode() + b"\n"

    def _parts(self, row: Row) -> list[bytes] | None:
        """What a row consists of; None where it is not like the one that was looked at."""
        if len(row) != len(self._alike):
            return None
        parts = [self._head]
        try:
            for (name, value), (expected, kind, write, dtype, shape) in zip(row.items(), self._alike, strict=True):
                if type(value) is not kind or name != expected:
                    return None
                if dtype is not None and (value.dtype != dtype or value.shape != shape):
                    return None
                parts.append(write(value))
        except (struct.error, KeyError):
            return None  # more than 64 bits; a dict that is a picture where none was, or the other way round
        return parts


def _code_of(value: Any) -> str:
    """How a value becomes bytes."""
    kind = type(value)
    if kind is int:
        return "int" if -(2**63) <= value < 2**63 else "json"
    if kind is dict:
        return "image" if value.keys() == _IMAGE else "json"
    is_array = isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf"
    return "array" if is_array else _CODES.get(kind, "json")


def decoded(record: bytes) -> Row:
    """The row that ``RowEncoder.encoded`` was given.

    Raises:
        DataError: Something else.
    """
    head, _, rest = record.partition(b"\n")
    row: Row = {}
    for name, code, *more in json.loads(head):
        row[name], rest = _value(rest, name, code, more)
    if rest or not {"reward", "done", "episode_step"} <= row.keys():
        raise DataError(f"expected a row, found {head!r:.80} and {len(rest)} bytes behind it")
    return row


def _value(rest: bytes, name: str, code: str, more: list[Any]) -> tuple[Any, bytes]:
    """A value, and what stands behind it."""
    if code == "none":
        return None, rest
    if code == "bool":
        return rest[0] == 1, rest[1:]
    if code in ("int", "float"):
        (number,) = (_INT if code == "int" else _FLOAT).unpack_from(rest)
        return number, rest[8:]
    if code == "array":
        dtype, shape = check_dtype(more[0], where=name), tuple(more[1])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return np.frombuffer(rest[:size], dtype).reshape(shape)[()], rest[size:]
    (length,) = _LENGTH.unpack_from(rest)
    content, rest = rest[8 : 8 + length], rest[8 + length :]
    if code == "image":
        return {"bytes": content, "path": None}, rest
    return (content.decode() if code == "text" else json.loads(content)), rest
