"""How the windows of a mixture are handed out to its members: which member window n is of, for any n, without a state.

It is the order in which seats of a parliament go to parties by the method of Webster and Sainte-Lague (Balinski and
Young, "Fair Representation", 1982). Of weights 3 and 1 the first member's windows are due at 1/6, 3/6 and 5/6 of a
round of four, and the second's at 1/2; of two that are due at once the first member's comes first. So a round is of the
members 0, 0, 1, 0, and every later one, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Literal

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]
Per = Literal["member", "trajectory", "step"]

LONGEST_ROUND = 1 << 26
"""Windows of the longest round. That a window is due at is a fraction ``(2k + 1) / p`` below 2; of two members ``p``
and ``p'`` add up to this at most, so that two of their fractions differ by ``1 / (p * p')``, 2**-50, or not at all:
float64 keeps them in order."""

# So many windows are handed out by one call, so that mostly no round ends in between.
_SHORTEST_ROUND = 4096


@dataclass(frozen=True)
class Shares:
    """How many windows of a round each member gets, and in which order.

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
        """How many of the first ``n`` windows are of each member.

        With M members that have a share, w being a member's, that is at most ``1/2 + w (M - 2) / 2`` from ``w n``:
        every member's count is within 1/2 of ``w t`` at the time ``t`` when the n-th window is due, and n is the sum.
        """
        rounds, rest = divmod(n, int(self._of_round.sum()))
        first, members = self._due(rest, rest)
        counted = first + np.bincount(members, minlength=len(first))
        return [rounds * whole + more for whole, more in zip(self._of_round.tolist(), counted.tolist(), strict=True)]

    def members(self, begin: int, end: int) -> Int64s:
        """Of which member each of the windows ``begin .. end - 1`` is, int64 ``[n]``."""
        parts, windows = [np.zeros(0, np.int64)], int(self._of_round.sum())
        while begin < end:
            first = begin % windows
            last = min(first + end - begin, windows)
            counts, members = self._due(first, last)
            parts.append(members[first - int(counts.sum()) :])
            begin += last - first
        return np.concatenate(parts)

    def _due(self, first: int, last: int) -> tuple[Int64s, Int64s]:
        """What is due in a round before window ``last``: how many windows of each member, int64 ``[M]``, up to a time
        when window ``first`` is not due yet; and of which members those behind these are, int64 ``[n]``, in order.

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


@dataclass(frozen=True, repr=False)
class Mix:
    """What a mixture was told of its members; see ``Mixture``.

    Args:
        names: Those of the members.
        weights: A number for each, from 0.
        per: What a weight is for.
        temperature: How far shares are evened out.
        field: The field that says which member a window is of; None: there is none.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    per: Per = "member"
    temperature: float = 1.0
    field: str | None = "member"

    def __repr__(self) -> str:
        """Short, as it says in states what a mixture is."""
        even = "" if self.temperature == 1 else f" at temperature {self.temperature}"
        return f"{dict(zip(self.names, self.weights, strict=True))} per {self.per}{even}"

    def shares(self, members: Sequence[Snapshot]) -> Shares:
        """The members' shares of the windows.

        Raises:
            ConfigError: A member with a weight has no rows, or no member has both.
        """
        sizes = [1] * len(members)
        if self.per == "step":
            sizes = [member.num_rows for member in members]
        elif self.per == "trajectory":
            sizes = [len(member.episode_starts) if member.num_rows else 0 for member in members]
        for name, weight, member in zip(self.names, self.weights, members, strict=True):
            if self.per == "member" and weight and not member.num_rows:
                raise ConfigError(f"mixture: expected rows in every member with a weight, found {name!r} empty")
        # A number as it is written: 0.7 is 7/10, of which a float is not quite that.
        shares = [Fraction(str(weight)) * size for weight, size in zip(self.weights, sizes, strict=True)]
        if self.temperature != 1:
            shares = [Fraction(float(share) ** (1 / self.temperature)) for share in shares]
        if not any(shares):
            raise ConfigError(f"mixture: expected rows in a member with a weight, found weights {self.weights}")
        return Shares.of(shares)
