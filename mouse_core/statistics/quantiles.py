"""Quantiles of numbers that come in parts, in memory that hardly grows, within an error of rank that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A level holds fewer numbers than this; half of them go to the next when it is full.
_FULL = 8192


class Sketch:
    """A few numbers of many, each of which stands for a power of two of them (Munro and Paterson, 1980).

    Numbers on level 3 stand for 8 each. When a level is full it is sorted, and every second number goes to the next
    level. Whoever counts how many numbers lie below some value is then wrong by what one number stands for, at most;
    ``error`` adds that up, so it is a bound for these numbers, not for chance. Below 8,192 numbers nothing is left out;
    of ten million it is 0.06%, of a thousand million 0.13%.

    Attributes:
        count: How many finite numbers came.
        error: By how many numbers a rank may be wrong.
        turns: A bit for each level: whether it is the upper of two numbers whose turn it is to be kept.
        levels: What is kept, float64 ``[n]`` each.
    """

    def __init__(self) -> None:
        self.count = self.error = self.turns = 0
        self.levels: list[Floats] = []

    def copy(self) -> Sketch:
        """The same, to which more may be added."""
        made = Sketch()
        made.count, made.error, made.turns = self.count, self.error, self.turns
        made.levels = list(self.levels)
        return made

    def add(self, ordered: npt.NDArray[Any]) -> None:
        """Take in finite numbers ``[n]`` in ascending order.

        Of 30,001 numbers every fourth goes to level 2, from the third on. Five are up to the 19th number, which say 20:
        a rank is wrong by 2 at most. The one that is left over behind them goes to level 0.
        """
        self.count += len(ordered)
        level = (len(ordered) // _FULL).bit_length()
        step = 1 << level
        whole = len(ordered) // step * step
        self._put(level, ordered[step // 2 : whole : step].astype(np.float64))
        self._put(0, ordered[whole:].astype(np.float64))
        self.error += step // 2

    def merge(self, other: Sketch) -> None:
        """Take in what another has; ranks may then be wrong by as much as both together."""
        self.count += other.count
        self.error += other.error
        for level, numbers in enumerate(other.levels):
            self._put(level, numbers)

    def _put(self, level: int, numbers: Floats) -> None:
        self.levels += [np.empty(0)] * (level + 1 - len(self.levels))
        held = np.concatenate([self.levels[level], numbers])
        if len(held) < _FULL:
            self.levels[level] = held
            return
        held.sort()
        pairs = len(held) // 2 * 2
        self.levels[level] = held[pairs:]
        # The lower of two now, the upper of two the next time: on the whole neither is preferred.
        upper = (self.turns >> level) & 1
        self.turns ^= 1 << level
        self.error += 1 << level
        self._put(level + 1, held[upper:pairs:2])

    @property
    def rank_error(self) -> float:
        """By what share of all numbers the rank of a quantile may be wrong, at most; 0 where all are kept."""
        if len(self.levels) <= 1:
            return 0.0
        return (self.error + (1 << (len(self.levels) - 1))) / max(self.count, 1)

    def quantiles(self, shares: Sequence[float], low: float, high: float) -> Floats:
        """The numbers below which some shares of all lie, as ``numpy.quantile`` has them where all are kept.

        Args:
            shares: Within 0 and 1.
            low, high: The lowest and the highest of all numbers.

        Returns:
            float64 ``[len(shares)]``, NaN where nothing came.
        """
        if not self.count:
            return np.full(len(shares), np.nan)
        values = np.concatenate(self.levels)
        weights = np.repeat(2.0 ** np.arange(len(self.levels)), [len(level) for level in self.levels])
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        # Numbers that stand for 1, 1 and 4 are in the middle of ranks 0, 1 and 2 to 5.
        ranks = np.cumsum(weights) - (weights + 1) / 2
        asked = np.asarray(shares, np.float64) * (self.count - 1)
        # By differences that cannot overflow, halves are taken of large ones.
        scale = 2.0 if max(abs(low), abs(high)) > 1e300 else 1.0
        found = np.interp(asked, [0.0, *ranks, self.count - 1.0], np.array([low, *values, high]) / scale) * scale
        return np.clip(found, low, high)


class Tally:
    """How often each of 256 whole numbers came: quantiles of bytes are exact.

    Attributes:
        counts: int64 ``[256]``.
    """

    rank_error = 0.0

    def __init__(self, counts: npt.NDArray[np.int64] | None = None) -> None:
        self.counts = np.zeros(256, np.int64) if counts is None else counts

    def copy(self) -> Tally:
        """The same, to which more may be added."""
        return Tally(self.counts.copy())

    def add(self, numbers: npt.NDArray[np.uint8]) -> None:
        """Take in bytes ``[n]``."""
        self.counts = self.counts + np.bincount(numbers, minlength=256)

    def merge(self, other: Tally) -> None:
        """Take in what another has."""
        self.counts = self.counts + other.counts

    def quantiles(self, shares: Sequence[float], low: float, high: float) -> Floats:
        """As those of ``Sketch``."""
        ends = np.cumsum(self.counts)
        if not ends[-1]:
            return np.full(len(shares), np.nan)
        ranks = np.asarray(shares, np.float64) * (ends[-1] - 1)
        lower, upper = (np.searchsorted(ends, whole(ranks), side="right") for whole in (np.floor, np.ceil))
        return np.asarray(lower + (upper - lower) * (ranks - np.floor(ranks)))
