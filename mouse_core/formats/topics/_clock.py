"""Ticks of a clock, and which message each topic has at each of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]
# Ticks that no message is at are what damaged times make, where there are many more of them than messages.
_MOST_EMPTY, _MOST_A_MESSAGE = 1 << 20, 1000


def ticks_of(times: Sequence[Times], rate: float) -> Times:
    """Ticks of a rate, of which one is where the last topic begins; from the first message to the last.

    Messages at 0 and 90 ms, and others from 40 ms on, at 20 a second: ticks at 40 and 90 ms, and none at -10.

    Args:
        times: Of the messages of each topic, in nanoseconds.
        rate: Ticks a second.

    Raises:
        ValueError: Ticks without end.
    """
    first, last = min(int(some.min()) for some in times), max(int(some.max()) for some in times)
    anchor = max(int(some.min()) for some in times)
    # In numbers of any size: nanoseconds since 1970 are more than a float can tell apart.
    before, after = int((anchor - first) * rate // 1e9), int((last - anchor) * rate // 1e9)
    if before + after > _MOST_EMPTY + _MOST_A_MESSAGE * sum(map(len, times)):
        raise ValueError(
            f"expected about as many ticks as messages, found {before + after} ticks of {rate} a second in "
            f"{(last - first) / 1e9:.3f} s"
        )
    steps = np.round(np.arange(-before, after + 1) * (1e9 / rate)).astype(np.int64)
    return anchor + steps


def matched(times: Times, ticks: Times, match: str, tolerance: float) -> tuple[Times, Times]:
    """Which message a topic has at each tick, and how far away it is, int64 ``[ticks]`` each.

    Messages at 10, 20 and 30: a tick at 19 has the second by "nearest", and the first by "hold"; one at 15 the first,
    since of two that are equally near the earlier one is taken.

    Args:
        times: Of its messages, ascending, at least one.
        ticks: The ticks, in nanoseconds.
        match: "nearest" or "hold".
        tolerance: In seconds.

    Returns:
        The place of the message, -1 where none is within the tolerance; and nanoseconds to the one that is nearest
        (held: to the last one before; to the first, where there is none).
    """
    # The last one up to the tick; of several at one time the last.
    held = np.searchsorted(times, ticks, side="right") - 1
    found = np.maximum(held, 0)
    if match == "nearest":
        after = np.minimum(held + 1, len(times) - 1)
        nearer = times[after] - ticks < ticks - times[found]
        found = np.where((held < 0) | nearer, after, found)
        found = np.where(held < 0, 0, found)
    away = np.abs(times[found] - ticks)
    most = np.inf if np.isinf(tolerance) else tolerance * 1e9
    inside = away <= most
    if match == "hold":
        inside &= held >= 0
    return np.where(inside, found, -1), away


def runs_of(whole: npt.NDArray[np.bool_], numbers: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Ticks from and up to which an episode runs, each of two at least.

    Args:
        whole: Whether everything is there at a tick.
        numbers: Of the episode at each tick, 0 for none.
    """
    running = np.where(whole, numbers, 0)
    edges = np.flatnonzero(np.diff(running, prepend=0, append=0))
    return [(int(first), int(stop)) for first, stop in pairwise(edges) if running[first] and stop - first > 1]
