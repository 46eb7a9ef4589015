"""Memory whose bytes lie elsewhere until they are asked for, and copying from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Made = TypeVar("Made")

APART = 48
"""What several batches read is sorted at once: of number n as if it lay n times 2**48 bytes further on."""


class RemoteMemory(Protocol):
    """Memory whose bytes lie elsewhere until they are asked for: addresses ``begin .. begin + size``.

    Ranges are given by where they begin and end, int64 ``[n]`` addresses each; they ascend, and do not touch. All of it
    is called from many threads.
    """

    begin: int
    """The first address."""
    size: int
    """How many bytes."""
    gap: int
    """Ranges that are no further apart than so many bytes are better asked for as one."""
    room: int | None
    """How many bytes may be here at a time; None: nobody says."""

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Say which batch will read each of some ranges. Returns at once, and raises nothing.

        Args:
            begins, ends: Those of one batch ascend and do not touch, and are followed by those of another.
            batches: The numbers of the batches, int64 ``[n]``.
        """
        ...

    def there(self, begins: Int64s, ends: Int64s) -> bool:
        """Whether the bytes of some ranges are there now, as far as that is known at once."""
        ...

    def looks_further(self) -> bool:
        """Whether it helps to say what is read still later, though it need not come yet."""
        ...

    def wait(self, begins: Int64s, ends: Int64s) -> object:
        """Return when the bytes of some ranges are there, whether they were asked for or not.

        Returns:
            What ``still`` takes, about what is there.

        Raises:
            Exception: They cannot be had.
        """
        ...

    def still(self, token: object) -> bool:
        """Whether nothing of what was waited for has gone away since; else what was copied meanwhile is of no use."""
        ...


def merged(begins: Int64s, ends: Int64s, gap: int = 0) -> tuple[Int64s, Int64s]:
    """Some ranges ascending, with those as one that are no further apart than ``gap``; int64 ``[n]`` each.

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
        begins, ends, numbers: Ranges, and which batch, from 0 on, each is of; int64 ``[n]``, in any order.
        gap: As above.
    """
    apart = numbers << APART  # as if those of each lay in memory of its own
    begins, ends = merged(begins + apart, ends + apart, gap)
    numbers = begins >> APART
    apart = numbers << APART
    return begins - apart, ends - apart, numbers


def ragged(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Pairs ``(e, 0 .. counts[e] - 1)`` in order: of ``[2, 0, 1]`` it is ``(0, 0), (0, 1), (2, 0)``."""
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
    """Ask each of some backings for what batches will read of it; how many bytes that are.

    Args:
        backings: Where the ranges may lie.
        begins, ends: The ranges, in any order.
        numbers: Of which of the batches each is, from 0 on.
        batches: The numbers by which the backings know these.
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
