"""Assignment of a mixture's windows to its members: the member of window n, for any n, without a state.

It is the order in which seats of a parliament go to parties by the method of Webster and Sainte-Lague (Balinski and
Young, "Fair Representation", 1982). Of weights 3 and 1 the first member's windows are due at 1/6, 3/6 and 5/6 of a
round of four, and the second's at 1/2; of two that are due at once the first member's comes first. So a round is of the
members 0, 0, 1, 0, and every later one, too.
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
"""Windows of the longest round. That a window is due at is a fraction ``(2k + 1) / p`` below 2; of two members ``p``
and ``p'`` add up to this at most, so that two of their fractions differ by ``1 / (p * p')``, 2**-50, or not at all:
float64 keeps them in order."""

# So many windows are handed out by one call, so that mostly no round ends in between.
_SHORTEST_ROUND = 4096


@dataclass(frozen=True)
class Shares:
    """The number of windows that each member gets in a round, and their order.

    Args:
        windows: Of a round for each member, from 0; 1 to ``LONGEST_ROUND`` in all.
    """

    windows: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[Fraction]) -> Shares:
        """The shares of weights from 0, not all 0: their exact ratio, where that makes no longer round.

        Otherwise they are rounded to multiples of about 1 in ``LONGEST_ROUND``, and no weight goes without.
        Of weights 0.7 and 0.3 a round has 7 and 3 windows.
        """
        total = sum(weights, Fraction(0))
        shares = [weight / total for weight in weights]
        windows = lcm(*(share.denominator for share in shares))
        if windows <= LONGEST_ROUND:
            return cls(tuple(int(share * windows) for share in shares))
        room = LONGEST_ROUND - len(shares)  # for those that are rounded up
        return cls(tuple(max(1, round(share * room)) if share else 0 for share in shares))

    @memo
    def _of_round(self) -> Int64s:
        """The windows of one or several rounds, which are as good as one that is longer."""
        rounds = -(-_SHORTEST_ROUND // sum(self.windows))
        return np.array(self.windows, np.int64) * rounds

    def counts(self, n: int) -> list[int]:
        """Return how many of the first ``n`` windows each member gets.

        With M members that have a share, w being a member's, that is at most ``1/2 + w (M - 2) / 2`` from ``w n``:
        every member's count is within 1/2 of ``w t`` at the time ``t`` when the n-th window is due, and n is the sum.
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
        """Return the windows due in a round before window ``last``.

        The counts, int64 ``[M]``, are each member's windows up to a time at which window ``first`` is not due yet. The
        members of the windows after these are int64 ``[n]``, in order.

        Of 3 and 1 windows a round has 4. By time 2 of it ``floor(2 * 3/4 + 1/2) = 2`` and ``floor(2 * 1/4 + 1/2) = 1``
        are due, 3 in all. That is never more than M / 2 from the time.
        """
        of_round, members = self._of_round, len(self._of_round)
        windows = int(of_round.sum())
        early, late = max(first - members, 0), min(last + members, windows)
        counts = (2 * early * of_round + windows) // (2 * windows)
        more = (2 * late * of_round + windows) // (2 * windows) - counts
        member = np.repeat(np.arange(members), more)
        number = np.arange(len(member)) - np.repeat(np.cumsum(more) - more - counts, more)
        due = (2 * number + 1) / of_round[member]
        # Stable, so that of those that are due at once the first member's comes first.
        order = np.argsort(due, kind="stable")[: last - int(counts.sum())]
        return counts, member[order]


class StagedShares:
    """Shares that change with the number of the window.

    Args:
        first: The window with which each stage begins, ascending, 0 first.
        shares: Gives those of a stage, when windows of it or of a later one are asked for.
    """

    def __init__(self, first: Sequence[int], shares: Callable[[int], Shares]) -> None:
        self._first, self._shares = first, shares

    def counts(self, n: int) -> list[int]:
        """Return how many of the first ``n`` windows each member gets, over all stages; see ``Shares.counts``."""
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
        """The stages that some windows lie in, and which windows of each."""
        while begin < end:
            stage = bisect_right(self._first, begin) - 1
            last = min([end, *self._first[stage + 1 : stage + 2]])
            yield stage, begin, last
            begin = last


@dataclass(frozen=True)
class Schedule:
    """Weights that change with the number of the batch, in stages.

    Args:
        weights: By the number of the first batch of each stage, 0 among them: for each member a number from 0, in the
            members' order or by their names.

    Raises:
        ConfigError: Numbers of batches that are none, or no 0 among them.

    Example:
        Recorded data alone for 1,000 batches, then half of each batch from fresh ones:

            Schedule({0: {"offline": 1, "online": 0}, 1000: {"offline": 1, "online": 1}})
    """

    weights: Mapping[int, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping) or 0 not in self.weights:
            raise ConfigError(f"schedule: expected weights by number of batch, from 0 on, found {self.weights!r:.200}")
        for number in self.weights:
            check_count("schedule", number, lowest=0)
        object.__setattr__(self, "weights", dict(sorted(self.weights.items())))

    @classmethod
    def linear(cls, begin: Sequence[float], end: Sequence[float], *, batches: int, stages: int = 20) -> Schedule:
        """Return a schedule that goes from ``begin`` to ``end`` in steps of equal size, and stays there.

        Of ``[1, 0]`` to ``[0.5, 0.5]`` in 100 batches and 2 stages it is ``[1, 0]``, from batch 50 on
        ``[0.75, 0.25]``, and from batch 100 on ``[0.5, 0.5]``.

        Args:
            begin, end: Weights in the members' order, of which only the ratio counts.
            batches: The number of the first batch with the shares ``end``.
            stages: How many stages come before that one.

        Raises:
            ConfigError: No batches or stages, more stages than batches, or weights that are none.
        """
        if check_count("stages", stages) > check_count("batches", batches):
            raise ConfigError(f"stages: expected at most {batches}, as many as batches, found {stages}")
        if len(begin) != len(end):
            raise ConfigError(f"schedule: expected weights of as many members, found {begin!r} and {end!r}")
        edges = [_normalised(weights) for weights in (begin, end)]
        made = {}
        for stage in range(stages + 1):
            part = Fraction(stage, stages)
            made[-(-batches * stage // stages)] = tuple(
                one + (two - one) * part for one, two in zip(*edges, strict=True)
            )
        return cls(made)

    def at(self, batch: int) -> Any:
        """The weights that hold for a batch."""
        return self.weights[max(first for first in self.weights if first <= batch)]


def exact(weight: Any) -> Fraction:
    """Return a weight as the fraction that is written: 0.7 is 7/10, which no float equals exactly."""
    return Fraction(str(weight))


def _normalised(weights: Sequence[Any]) -> list[Fraction]:
    """Return weights that add up to 1, or raise ConfigError."""
    try:
        shares = [exact(weight) for weight in weights]
    except ValueError as error:
        raise ConfigError(f"schedule: expected weights from 0, found {weights!r:.200}") from error
    if min(shares, default=-1) < 0 or not any(shares):
        raise ConfigError(f"schedule: expected weights from 0, not all 0, found {weights!r:.200}")
    return [share / sum(shares) for share in shares]
