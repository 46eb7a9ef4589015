"""Which episodes and steps a page keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mouse_core.inspect import Finding

Int64s = npt.NDArray[np.int64]

MOST_EPISODES = 10
"""So many at most."""

# Those that findings name are kept beside the first, best, median, worst, shortest and longest one.
_MOST_FOUND = 4


def chosen(
    lengths: Int64s, returns: npt.NDArray[np.float64] | None, findings: Sequence[Finding] = ()
) -> dict[int, list[str]]:
    """The episodes to keep, by number, with why each is: a few that stand for all, and those that findings name.

    Of up to ``MOST_EPISODES`` all are kept.

    Args:
        lengths: Rows of every episode, ``[n]``.
        returns: Their returns; None: there are no rewards.
        findings: What was found, the worst first.
    """
    found: dict[int, list[str]] = {}

    def keep(number: int, why: str) -> None:
        reasons = found.setdefault(number, [])
        if why not in reasons:
            reasons.append(why)

    if len(lengths):
        keep(0, "first")
        (known,) = np.nonzero(np.isfinite(returns)) if returns is not None else (np.zeros(0, np.int64),)
        if returns is not None and len(known):
            order = known[np.argsort(returns[known], kind="stable")]
            for why, place in (("highest return", -1), ("median return", (len(order) - 1) // 2), ("lowest return", 0)):
                keep(int(order[place]), why)
        keep(int(np.argmin(lengths)), "shortest")
        keep(int(np.argmax(lengths)), "longest")
    room = len(found) + _MOST_FOUND
    for finding in findings:
        number = finding.episode
        if number is not None and 0 <= number < len(lengths) and (number in found or len(found) < room):
            keep(number, finding.code)
    for number in range(len(lengths) if len(lengths) <= MOST_EPISODES else 0):
        found.setdefault(number, [])
    return dict(sorted(found.items()))


def spread(count: int, most: int, also: Iterable[int] = ()) -> Int64s:
    """At most so many of the numbers from 0 to below ``count``, evenly spread, and some beside these, ascending.

    Of 5 in 3 they are 0, 2 and 4.
    """
    found = np.linspace(0, count - 1, min(max(most, 1), count)).round().astype(np.int64)
    return np.unique(np.concatenate([found, np.array([one for one in also if 0 <= one < count], np.int64)]))


def shares(widths: Sequence[int], most: int) -> list[int]:
    """How many dimensions of each of some columns are kept, at most so many together but for one each.

    Of 3, 10 and 1,000 in 100 they are 3, 10 and 62: the widest are cut.
    """
    limit = max(widths, default=0)
    while limit > 1 and sum(min(width, limit) for width in widths) > most:
        limit //= 2
    return [min(width, limit) for width in widths]
