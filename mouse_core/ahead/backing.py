"""Memory whose bytes lie elsewhere until they are asked for, and copying from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Made = TypeVar("Made")


class Backing(Protocol):
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

    def ask(self, begins: Int64s, ends: Int64s, batch: int) -> None:
        """Say that batch number ``batch`` will read some ranges. Returns at once, and raises nothing."""
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


def in_backings(backings: Sequence[Backing], begins: Int64s, ends: Int64s) -> Iterator[tuple[Backing, Int64s, Int64s]]:
    """Of some ranges, in any order, those that lie in each of some backings, merged as it likes them.

    Of several that a range lies in the first has it.
    """
    rest = ends > begins
    for backing in backings:
        inside = rest & (begins >= backing.begin) & (begins < backing.begin + backing.size)
        rest &= ~inside
        if inside.any():
            yield backing, *merged(begins[inside], ends[inside], backing.gap)


def copied_when_there(backings: Sequence[Backing], begins: Int64s, ends: Int64s, copy: Callable[[], Made]) -> Made:
    """What ``copy()`` makes of some ranges of memory, called when they are there, and until nothing went meanwhile.

    Args:
        backings: Where they may lie.
        begins, ends: The ranges, int64 ``[n]`` each, in any order.
        copy: Reads them, and keeps no reference to the memory.
    """
    parts = list(in_backings(backings, begins, ends))
    while True:
        tokens = [backing.wait(first, end) for backing, first, end in parts]
        made = copy()
        if all(part[0].still(token) for part, token in zip(parts, tokens, strict=True)):
            return made
