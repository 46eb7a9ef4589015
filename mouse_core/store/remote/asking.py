"""Reading in rounds: what is to be read next may depend on what was read, and rounds of many are one request.

A function that reads is a generator: it gives the ranges that it needs, gets their bytes, and returns a value in the
end. A list of rows needs two rounds, as its values lie where its ends say; so do ten lists together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Range(NamedTuple):
    """Some bytes of an object: its number among those of a dataset, the first byte, and the one behind the last."""

    object: int
    begin: int
    end: int


Asking = Generator[list[Range], Sequence[Any], T]
"""Gives ranges, gets their bytes in return, and returns something of type ``T``."""


def together(readers: Sequence[Asking[T]]) -> Asking[list[T]]:
    """What several readers return; in each round all of them are asked what they need."""
    returned: dict[int, T] = {}
    waiting: dict[int, list[Range]] = {}
    for number, reader in enumerate(readers):
        try:
            waiting[number] = next(reader)
        except StopIteration as stop:
            returned[number] = stop.value
    while waiting:
        found = iter((yield [one for ranges in waiting.values() for one in ranges]))
        for number, ranges in list(waiting.items()):
            own = [next(found) for _ in ranges]
            try:
                waiting[number] = readers[number].send(own)
            except StopIteration as stop:
                returned[number] = stop.value
                del waiting[number]
    return [returned[number] for number in range(len(readers))]


def run(reader: Asking[T], read: Callable[[list[Range]], Sequence[Any]]) -> T:
    """What a reader returns.

    Args:
        reader: It.
        read: Gives the bytes of some ranges, at once; empty ones, and those that were given, are not asked for.
    """
    try:
        ranges = next(reader)
        while True:
            # Several columns may need the same head.
            wanted = list(dict.fromkeys(one for one in ranges if one.end > one.begin))
            found = dict(zip(wanted, read(wanted) if wanted else (), strict=True))
            ranges = reader.send([found.get(one, b"") for one in ranges])
    except StopIteration as stop:
        value: T = stop.value
        return value
