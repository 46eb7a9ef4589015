"""tf.train.Example, read from its bytes without protobuf.

The wire format is that of protocol buffers: tagged fields of numbers in base 128, fixed 32 or 64 bits, or lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError

Feature = npt.NDArray[Any] | list[bytes]
"""A feature's values: int64 or float32 ``[n]``, or byte strings."""

Read = Callable[[int, int], bytes]
"""Gives the bytes between two places of a record."""

# As long as the head of a field can be: two numbers of 10 bytes.
_HEAD = 20


def parse_example(data: bytes) -> dict[str, Feature]:
    """Return all features of an Example, by name.

    Raises:
        DataError: The bytes are no Example.
    """
    places = feature_places(lambda begin, end: data[begin:end], len(data))
    return {name: parse_feature(data, begin, end) for name, (begin, end) in places.items()}


def feature_places(read: Read, length: int) -> dict[str, tuple[int, int]]:
    """Where the values of each feature of an Example begin and end, without reading them.

    Args:
        read: Gives the bytes between two places of it.
        length: How many bytes it has.

    Raises:
        DataError: It is not one.
    """
    found: dict[str, tuple[int, int]] = {}
    for number, start, stop in _messages(read, 0, length):
        if number != 1:
            raise DataError(f"expected an Example of features, found field {number} besides")
        for _, begin, end in _messages(read, start, stop):
            name, span = "", None
            for inner, first, last in _messages(read, begin, end):
                if inner == 1:
                    name = _name(read(first, last))
                elif inner == 2:
                    span = first, last
            if span is not None:
                found[name] = span
    return found


def value_places(read: Read, start: int, stop: int) -> list[tuple[int, int]]:
    """Where each of a feature's byte strings begins and ends; see ``feature_places``."""
    found: list[tuple[int, int]] = []
    for number, first, last in _messages(read, start, stop):
        if number != 1:
            raise DataError("expected byte strings, found numbers")
        found += [(begin, end) for inner, begin, end in _messages(read, first, last) if inner == 1]
    return found


def parse_feature(data: bytes, start: int = 0, stop: int | None = None) -> Feature:
    """Return the values of a feature, from its bytes ``start..stop - 1`` in ``data``; by default all of ``data``."""
    stop = len(data) if stop is None else stop
    for number, value in _fields(data, start, stop):
        first, last = _span(value, "a list of values")
        if number == 1:
            items = [_span(item, "a byte string") for inner, item in _fields(data, first, last) if inner == 1]
            return [data[begin:end] for begin, end in items]
        if number == 2:
            return _floats(data, first, last)
        if number == 3:
            return _integers(data, first, last)
    return []


def _messages(read: Read, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The fields of a message that are messages, texts or bytes: their number, and where they begin and end."""
    place = start
    while place < stop:
        head = read(place, min(place + _HEAD, stop))
        tag, at = _varint(head, 0, len(head))
        if tag & 7 != 2:
            raise DataError(f"expected a message at byte {place}, found a field of kind {tag & 7}")
        length, at = _varint(head, at, len(head))
        begin = place + at
        place = begin + length
        if place > stop:
            raise DataError(f"expected a message that ends at byte {stop}, found a field that ends at byte {place}")
        yield tag >> 3, begin, place


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError("expected a feature's name as UTF-8") from error


def _floats(data: bytes, start: int, stop: int) -> npt.NDArray[np.float32]:
    parts = []
    for number, value in _fields(data, start, stop):
        if number != 1:
            continue
        if isinstance(value, bytes):
            parts.append(np.frombuffer(value, "<f4"))
            continue
        first, last = _span(value, "packed floats")
        if (last - first) % 4:
            raise DataError(f"expected floats of 4 bytes, found {last - first} bytes")
        parts.append(np.frombuffer(data, "<f4", (last - first) // 4, first))
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.float32), *parts])


def _integers(data: bytes, start: int, stop: int) -> npt.NDArray[np.int64]:
    parts: list[npt.NDArray[np.int64]] = []
    for number, value in _fields(data, start, stop):
        if number != 1:
            continue
        if isinstance(value, int):
            parts.append(np.array([value], np.uint64).view(np.int64))
        else:
            parts.append(_varints(np.frombuffer(data, np.uint8)[slice(*_span(value, "packed integers"))]))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _varints(octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Numbers in base 128, all at once: as many passes as the longest has digits."""
    ends = np.flatnonzero(octets < 0x80)
    if len(ends) == len(octets):
        return octets.astype(np.int64)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise DataError("expected packed integers, found one that does not end")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise DataError("expected integers of at most 10 bytes, found a longer one")
    values = np.zeros(len(ends), np.uint64)
    for digit in range(int(lengths.max())):
        some = lengths > digit
        values[some] |= (octets[starts[some] + digit].astype(np.uint64) & np.uint64(0x7F)) << np.uint64(7 * digit)
    return values.view(np.int64)


def _span(value: Any, what: str) -> tuple[int, int]:
    if not isinstance(value, tuple):
        raise DataError(f"expected {what}, found a single number")
    return value


def _fields(data: bytes, start: int, stop: int) -> list[tuple[int, Any]]:
    """The fields of a message: numbers as int, 4 or 8 bytes as bytes, everything else as where it begins and ends."""
    found: list[tuple[int, Any]] = []
    place = start
    while place < stop:
        tag, place = _varint(data, place, stop)
        kind = tag & 7
        value: Any
        if kind == 0:
            value, place = _varint(data, place, stop)
        elif kind == 2:
            length, place = _varint(data, place, stop)
            value = (place, place + length)
            place += length
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value = data[place : place + width]
            place += width
        else:
            raise DataError(f"expected a message at byte {start}, found a field of kind {kind} at byte {place}")
        if place > stop:
            raise DataError(f"expected a message that ends at byte {stop}, found a field that ends at byte {place}")
        found.append((tag >> 3, value))
    return found


def _varint(data: bytes, place: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while place < stop:
        octet = data[place]
        place += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
        shift += 7
        if shift > 63:
            break
    raise DataError(f"expected a number, found none that ends before byte {place}")
