"""Memory whose bytes are fetched on request, and copies from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Made = TypeVar("Made")

APART = 48
"""The ranges of several batches are sorted together; those of batch n are moved by n times 2**48 bytes."""


class RemoteMemory(Protocol):
    """Memory whose bytes are fetched on request, at the addresses ``begin .. begin + size``.

    Arguments ``begins`` and ``ends`` are ranges of addresses, int64 ``[n]`` each, ascending and apart. Many threads may
    call all methods.
    """

    begin: int
    """The first address."""
    size: int
    """Number of bytes."""
    gap: int
    """Ranges with at most this number of bytes between them are requested as one."""
    room: int | None
    """Largest number of bytes that can be present at once; None: unknown."""

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Request ranges that batches will read. Returns at once, and raises nothing.

        Args:
            begins, ends: The ranges of one batch after those of another; within a batch they ascend and are apart.
            batches: Number of the batch of each range, int64 ``[n]``.
        """
        ...

    def there(self, begins: Int64s, ends: Int64s) -> bool:
        """Whether the bytes of some ranges are present; False also if that is unknown."""
        ...

    def looks_further(self) -> bool:
        """Whether requests for still later batches help, although their bytes need not come yet."""
        ...

    def wait(self, begins: Int64s, ends: Int64s) -> object:
        """Wait until the bytes of some ranges are present, whether they were requested or not.

        Returns:
            A token for ``still``.

        Raises:
            Exception: The bytes cannot be fetched.
        """
        ...

    def still(self, token: object) -> bool:
        """Whether no byte of the ranges was evicted since ``wait``; otherwise copies made meanwhile are invalid."""
        ...


def merged(begins: Int64s, ends: Int64s, gap: int = 0) -> tuple[Int64s, Int64s]:
    """Return the ranges in ascending order, merged where at most ``gap`` bytes lie between; int64 ``[n]`` each.

    Ranges 50..60, 0..10, 5..30 and 34..40 with a gap of 4 are 0..40 and 50..60: in ascending order they end, taken
    together, at 10, 30, 40 and 60, and only the last begins more than 4 behind the end before it.
    """
    if not len(begins):
        return begins, ends
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    apart = np.flatnonzero(begins[1:] > ends[:-1] + gap)
    return begins[np.append(0, apart + 1)], ends[np.append(apart, len(ends) - 1)]


def by_batch(begins: Int64s, ends: Int64s, numbers: Int64s, gap: int = 0) -> tuple[Int64s, Int64s, Int64s]:
    """Merge the ranges of several batches, each separately: those of batch 0, of batch 1, and so on.

    Args:
        begins, ends, numbers: Ranges, and the number of the batch of each, from 0 on; int64 ``[n]``, in any order.
        gap: See ``merged``.
    """
    apart = numbers << APART  # so that ranges of different batches do not merge
    begins, ends = merged(begins + apart, ends + apart, gap)
    numbers = begins >> APART
    apart = numbers << APART
    return begins - apart, ends - apart, numbers


def ragged(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Return pairs ``(e, 0 .. counts[e] - 1)`` in order: for ``[2, 0, 1]``, ``(0, 0), (0, 1), (2, 0)``."""
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - (np.cumsum(counts) - counts)[whose]


def _inside(
    backings: Sequence[RemoteMemory], begins: Int64s, ends: Int64s
) -> Iterator[tuple[RemoteMemory, npt.NDArray[np.bool_]]]:
    """Yield each backing with the mask of its ranges; a range in several backings belongs to the first."""
    rest = ends > begins
    for backing in backings:
        inside = rest & (begins >= backing.begin) & (begins < backing.begin + backing.size)
        if inside.any():
            rest &= ~inside
            yield backing, inside


def in_backings(
    backings: Sequence[RemoteMemory], begins: Int64s, ends: Int64s
) -> Iterator[tuple[RemoteMemory, Int64s, Int64s]]:
    """Yield each backing with its ranges, merged by its gap."""
    for backing, inside in _inside(backings, begins, ends):
        yield backing, *merged(begins[inside], ends[inside], backing.gap)


def ask_backings(
    backings: Sequence[RemoteMemory], begins: Int64s, ends: Int64s, numbers: Int64s, batches: Int64s
) -> int:
    """Request the ranges that batches will read from their backings; return the number of bytes.

    Args:
        backings: The memories that may hold the ranges.
        begins, ends: The ranges, in any order.
        numbers: For each range the position of its batch in ``batches``.
        batches: The numbers of the batches.
    """
    nbytes = 0
    for backing, inside in _inside(backings, begins, ends):
        firsts, behind, whose = by_batch(begins[inside], ends[inside], numbers[inside], backing.gap)
        backing.ask(firsts, behind, batches[whose])
        nbytes += int((behind - firsts).sum())
    return nbytes


def copied_when_there(backings: Sequence[RemoteMemory], begins: Int64s, ends: Int64s, copy: Callable[[], Made]) -> Made:
    """Wait for ranges of memory, call ``copy()``, and repeat until none of them was evicted meanwhile.

    Args:
        backings: The memories that may hold the ranges.
        begins, ends: The ranges, int64 ``[n]`` each, in any order.
        copy: Reads them, and keeps no reference to the memory.
    """
    parts = list(in_backings(backings, begins, ends))
    while True:
        tokens = [backing.wait(first, end) for backing, first, end in parts]
        made = copy()
        if all(part[0].still(token) for part, token in zip(parts, tokens, strict=True)):
            return made
