"""The assignment of a mixture's windows to its members: a pure function of the window's index returns the member from
which the window is drawn.

Windows are assigned to members by the method of Webster and Sainte-Lague, which assigns the seats of a parliament to
parties (Balinski and Young, "Fair Representation", 1982). Example: with weights 3 and 1, a round has four windows. The
windows of member 0 are due at the times 1/6, 3/6 and 5/6 of the round, and the window of member 1 is due at the time
1/2. If two windows are due at the same time, the window of the member with the lower index is first. So the windows of
every round belong to the members 0, 0, 1, 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError
from mouse_core.spec import check_count

Int64s = npt.NDArray[np.int64]

LONGEST_ROUND = 1 << 26
"""Number of windows in the longest round. If times are measured in half rounds, the windows of a member with ``p``
windows in a round are due at the times ``(2k + 1) / p`` below 2. For two members, ``p + p'`` is at most this number. So
two due times are equal or differ by at least ``1 / (p * p')``, which is at least 2**-50, and float64 preserves their
order.
"""

# Number of windows that one call assigns, so that most calls stay within one round.
_SHORTEST_ROUND = 4096


@dataclass(frozen=True)
class Shares:
    """The number of windows of each member in a round, and the order of the windows.

    Args:
        windows: Number of windows of each member in a round, at least 0; the sum is between 1 and ``LONGEST_ROUND``.
    """

    windows: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[Fraction]) -> Shares:
        """Return the shares for ``weights``, numbers of at least 0 that are not all 0.

        The shares are the exact ratio of the weights if the round is not longer than ``LONGEST_ROUND``. Otherwise, the
        shares are rounded to multiples of about 1 / ``LONGEST_ROUND``, and every positive weight gets at least one
        window. With weights 0.7 and 0.3, a round has 7 windows of the first member and 3 windows of the second member.
        """
        total = sum(weights, Fraction(0))
        shares = [weight / total for weight in weights]
        windows = lcm(*(share.denominator for share in shares))
        if windows <= LONGEST_ROUND:
            return cls(tuple(int(share * windows) for share in shares))
        room = LONGEST_ROUND - len(shares)  # reserve one window for each share that is rounded up
        return cls(tuple(max(1, round(share * room)) if share else 0 for share in shares))

    @memo
    def _of_round(self) -> Int64s:
        """Number of windows of each member in one or several rounds; the order of windows is the same for any number of
        rounds."""
        rounds = -(-_SHORTEST_ROUND // sum(self.windows))
        return np.array(self.windows, np.int64) * rounds

    def counts(self, n: int) -> list[int]:
        """Return the number of windows of each member among the first ``n`` windows.

        If M members have a share, the count of a member with weight w differs from ``w n`` by at most ``1/2 + w (M - 2)
        / 2``. Proof: let ``t`` be the time at which the n-th window is due. At this time, every member's count differs
        from ``w t`` by at most 1/2, and the sum of all counts is n.
        """
        rounds, rest = divmod(n, int(self._of_round.sum()))
        first, members = self._due(rest, rest)
        counted = first + np.bincount(members, minlength=len(first))
        return [rounds * whole + more for whole, more in zip(self._of_round.tolist(), counted.tolist(), strict=True)]

    def members(self, begin: int, end: int) -> Int64s:
        """Return the member of each of the windows ``begin .. end - 1``, int64 ``[n]``."""
        parts, windows = [np.zeros(0, np.int64)], int(self._of_round.sum())
        while begin < end:
            first = begin % windows
            last = min(first + end - begin, windows)
            counts, members = self._due(first, last)
            parts.append(members[first - int(counts.sum()) :])
            begin += last - first
        return np.concatenate(parts)

    def _due(self, first: int, last: int) -> tuple[Int64s, Int64s]:
        """Return the number of windows of each member up to a certain time, and the members of the windows that are due
        after this time and before window ``last``.

        The first result, int64 ``[M]``, counts the windows of each member up to a time at which window ``first`` is not
        yet due. The second result, int64 ``[n]``, lists the members of the windows that are due after this time, in
        order.

        Example: members with 3 and 1 windows have a round of 4 windows. By time 2, ``floor(2 * 3/4 + 1/2) = 2`` windows
        of member 0 and ``floor(2 * 1/4 + 1/2) = 1`` window of member 1 are due, 3 in total. The total never differs
        from the time by more than M / 2.
        """
        of_round, members = self._of_round, len(self._of_round)
        windows = int(of_round.sum())
        early, late = max(first - members, 0), min(last + members, windows)
        counts = (2 * early * of_round + windows) // (2 * windows)
        more = (2 * late * of_round + windows) // (2 * windows) - counts
        member = np.repeat(np.arange(members), more)
        number = np.arange(len(member)) - np.repeat(np.cumsum(more) - more - counts, more)
        due = (2 * number + 1) / of_round[member]
        # The sort is stable: among windows that are due at the same time, the lowest member is first.
        order = np.argsort(due, kind="stable")[: last - int(counts.sum())]
        return counts, member[order]


class StagedShares:
    """Shares that change with the index of the window, in stages.

    Args:
        first: The index of the first window of each stage, in ascending order; the first stage begins with window 0.
        shares: Function that returns the shares of a stage; it is called when windows of the stage or of a later stage
            are requested.
    """

    def __init__(self, first: Sequence[int], shares: Callable[[int], Shares]) -> None:
        self._first, self._shares = first, shares

    def counts(self, n: int) -> list[int]:
        """Return the number of windows of each member among the first ``n`` windows, over all stages; see
        ``Shares.counts``.
        """
        parts = [self._shares(stage).counts(end - begin) for stage, begin, end in self._stages(0, n)]
        return [sum(some) for some in zip(*parts, strict=True)] or self._shares(0).counts(0)

    def members(self, begin: int, end: int) -> Int64s:
        """Return the member of each of the windows ``begin .. end - 1``, int64 ``[n]``."""
        parts = [
            self._shares(stage).members(some - self._first[stage], last - self._first[stage])
            for stage, some, last in self._stages(begin, end)
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _stages(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield each stage that contains any of the windows ``begin .. end - 1``, with the range of these windows in
        the stage.
        """
        while begin < end:
            stage = bisect_right(self._first, begin) - 1
            last = min([end, *self._first[stage + 1 : stage + 2]])
            yield stage, begin, last
            begin = last


@dataclass(frozen=True)
class Schedule:
    """Weights that change with the index of the batch, in stages.

    Args:
        weights: A dict from the index of a stage's first batch to the weights of the stage; index 0 must be a key. The
            weights of a stage are a number of at least 0 for each member, as a list in the members' order or as a
            mapping by name.

    Raises:
        ConfigError: A key is not the index of a batch, or the key 0 is missing.

    Example:
        The first 1,000 batches contain only recorded data; half of the windows of later batches are fresh data:

            Schedule({0: {"offline": 1, "online": 0}, 1000: {"offline": 1, "online": 1}})
    """

    weights: Mapping[int, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping) or 0 not in self.weights:
            raise ConfigError(
                f"schedule: expected a dict from batch indices (including 0) to weights, found {self.weights!r:.200}"
            )
        for number in self.weights:
            check_count("schedule", number, lowest=0)
        object.__setattr__(self, "weights", dict(sorted(self.weights.items())))

    def at(self, batch: int) -> Any:
        """Return the weights of the stage that contains ``batch``."""
        return self.weights[max(first for first in self.weights if first <= batch)]


def exact(weight: Any) -> Fraction:
    """Return a weight as an exact decimal fraction: the float 0.7 becomes 7/10."""
    return Fraction(str(weight))
