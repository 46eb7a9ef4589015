"""Histograms of numbers that arrive in batches and whose range is not known beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_BINS = 64
# What lies beyond counts as this, so that ranges and their widths stay finite.
_MOST = 1e300


class Histogram:
    """Counts in 64 bins of equal width; the bins grow, two into one, until they cover every value that came.

    Exact: each value is counted once, in the bin that it lies in (up to rounding at the edges of bins).
    """

    def __init__(self) -> None:
        self.low = 0.0
        self.width = 0.0
        self.counts = np.zeros(_BINS, np.int64)
        # While there is one value only, there is no range to divide.
        self._only: float | None = None
        self._only_count = 0

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count finite values, any shape."""
        values = np.clip(np.asarray(values, np.float64).reshape(-1), -_MOST, _MOST)
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        if not self.width:
            if low == high and self._only in (None, low):
                self._only, self._only_count = low, self._only_count + values.size
                return
            first = low if self._only is None else min(low, self._only)
            last = high if self._only is None else max(high, self._only)
            # Halves first: the difference of two floats may overflow.
            width = last / _BINS - first / _BINS
            self.low, self.width = first, max(width, float(np.spacing(max(abs(first), abs(last)))))
            self._cover(first, last)
            if self._only is not None:
                self._count(np.full(1, self._only), self._only_count)
        self._cover(low, high)
        self._count(values, 1)

    def _count(self, values: npt.NDArray[np.float64], weight: int) -> None:
        places = np.clip(values / self.width - self.low / self.width, 0, _BINS - 1).astype(np.int64)
        self.counts += weight * np.bincount(places, minlength=_BINS)

    def _cover(self, low: float, high: float) -> None:
        while high / self.width - self.low / self.width >= _BINS * (1 + 1e-12):
            self._widen()
        while low < self.low:
            # Growing downwards: the range is extended to the left by as much as it spans.
            self.low -= self.width * _BINS
            self.counts = np.concatenate([np.zeros(_BINS, np.int64), self.counts])
            self.counts = self.counts.reshape(_BINS, 2).sum(axis=1)
            self.width *= 2

    def _widen(self) -> None:
        joined = self.counts.reshape(_BINS // 2, 2).sum(axis=1)
        self.counts = np.concatenate([joined, np.zeros(_BINS // 2, np.int64)])
        self.width *= 2

    def bars(self) -> tuple[list[float], list[int]]:
        """Edges ``[k + 1]`` and counts ``[k]``, empty bins at both ends left out; ``([], [])`` without values."""
        if not self.width:
            return ([], []) if self._only is None else ([self._only, self._only], [self._only_count])
        (filled,) = np.nonzero(self.counts)
        first, end = int(filled[0]), int(filled[-1]) + 1
        edges = [self.low + self.width * place for place in range(first, end + 1)]
        return edges, self.counts[first:end].tolist()
