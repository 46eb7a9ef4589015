"""Count, mean, variance and range of numbers that come in parts, place by place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import is_ml_float

Numbers = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

# So many numbers are added side by side, so many rows of them at a time: what is being added lies in the cache.
_LANES, _ROWS = 8192, 16
# What float32 can square and add up without losing all of it.
_NARROWEST, _WIDEST = 1e-12, 1e15
# A sum of squares around a point further from the mean than so many deviations is made again, around the mean.
_FAR = 4.0
_NARROW = ("f", "b", "B", "h", "H", "?")


class Moments:
    """Count, mean, squared deviation and range by place; of two parts together by Chan, Golub and LeVeque (1979).

    NaN and infinities count for nothing. Mean and deviation are those of float64 up to ``1e-6`` of the deviation:
    numbers that fit float32 are added in it, around a number near them, sixteen at a time.

    Args:
        width: How many numbers there are in a row, each of which has its own.

    Attributes:
        count: int64 ``[width]``.
        mean, squares: float64 ``[width]``, ``squares`` being the sum of squared deviations from the mean.
        low, high: float64 ``[width]``; infinite where nothing was counted.
    """

    def __init__(self, width: int) -> None:
        self.count = np.zeros(width, np.int64)
        self.mean, self.squares = np.zeros(width), np.zeros(width)
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)

    def copy(self) -> Moments:
        """The same, to which more may be added."""
        made = Moments(len(self.count))
        made.merge(self)
        return made

    def add(self, rows: Numbers) -> None:
        """Take in ``[n, width]``, C-contiguous."""
        if not len(rows):
            return
        with np.errstate(all="ignore"):  # what comes of infinities is looked at
            found = _moments_of(rows)
        self._take(*found)

    def add_counts(self, counts: npt.NDArray[np.int64]) -> None:
        """Take in whole numbers from 0 by how often each came, ``[width, k]``, of which some did at every place."""
        values, there = np.arange(counts.shape[1], dtype=np.float64), counts > 0
        count = counts.sum(axis=1)
        mean = (counts @ values) / count
        squares = (counts * (values - mean[:, None]) ** 2).sum(axis=1)
        low, high = there.argmax(axis=1), counts.shape[1] - 1 - there[:, ::-1].argmax(axis=1)
        self._take(count, mean, squares, low.astype(np.float64), high.astype(np.float64))

    def weigh(self, numbers: int) -> None:
        """Count ``numbers`` as one: those of a picture, say."""
        self.count, self.squares = self.count // numbers, self.squares / numbers

    def merge(self, other: Moments) -> None:
        """Take in what another has counted."""
        self._take(other.count, other.mean, other.squares, other.low, other.high)

    def _take(self, count: npt.NDArray[np.int64], mean: Floats, squares: Floats, low: Floats, high: Floats) -> None:
        """Take in a part.

        Of 3 numbers with mean 2 and 1 number with mean 6, the mean is 2 + (6 - 2) * 1/4 = 3, and the squares grow by
        those of the part and by (6 - 2)^2 * 3 * 1/4 = 12. Where the lowest is the highest, that is the mean: a
        thousand times a thousandth of 0.1 is not quite 0.1, and a constant must have no deviation at all.
        """
        total = self.count + count
        share = count / np.maximum(total, 1)
        change = mean - self.mean
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        same = self.low == self.high
        self.squares = np.where(same, 0.0, self.squares + squares + change**2 * self.count * share)
        self.mean = np.where(same, self.low + 0.0, self.mean + change * share)  # which makes 0.0 of -0.0
        self.count = total

    @property
    def deviation(self) -> Floats:
        """The standard deviation of all that came, float64 ``[width]``; NaN where nothing did."""
        with np.errstate(invalid="ignore"):
            return np.sqrt(self.squares / np.where(self.count, self.count, np.nan))


_Part = tuple[npt.NDArray[np.int64], Floats, Floats, Floats, Floats]


def _moments_of(rows: Numbers) -> _Part:
    """Count, mean, squares, lowest and highest of some rows, float64 ``[width]`` each."""
    if rows.dtype == np.float16 or is_ml_float(rows.dtype):
        rows = rows.astype(np.float32)  # which is fast, unlike comparing such numbers
    n, width = rows.shape
    # The median of a few rows is near the most of them, however far away some are.
    around = np.median(rows[:: max(1, n // 32)][:33].astype(np.float64), axis=0)
    around = np.where(np.isfinite(around), around, 0.0)
    narrow = rows.dtype.char in _NARROW
    total, squares, low, high = _sums(rows, around, np.dtype(np.float32 if narrow else np.float64))
    if narrow:
        around = around.astype(np.float32).astype(np.float64)
        spread = high - low  # NaN or infinite where a number is
        if not ((spread == 0) | ((spread > _NARROWEST) & (spread < _WIDEST)) | ~np.isfinite(spread)).all():
            total, squares, low, high = _sums(rows, around, np.dtype(np.float64))
    odd = ~(np.isfinite(total) & np.isfinite(squares))
    mean = np.where(odd, 0.0, total / n)
    deviations = squares - total * mean
    if (~odd & (mean**2 * n > _FAR**2 * deviations)).any():
        around = around + mean
        total, squares, low, high = _sums(rows, around, np.dtype(np.float64))
        mean = total / n
        deviations = squares - total * mean
    found = np.full(width, n), around + mean, np.maximum(deviations, 0), low, high
    if odd.any():  # only these places are looked at number by number
        for one, exact in zip(found, _finite_moments(rows[:, odd]), strict=True):
            one[odd] = exact
    return found


def _sums(rows: Numbers, around: Floats, dtype: np.dtype[Any]) -> tuple[Floats, Floats, Floats, Floats]:
    """Sum and sum of squares of ``rows - around``, the lowest and the highest, ``[width]`` each.

    Rows of 3 numbers lie side by side as ``lanes`` of 8190, of which 16 are added at a time: so a sum of float32 has 16
    terms, and those sums are added in float64.
    """
    n, width = rows.shape
    beside = min(max(1, _LANES // width), n)
    lanes, whole = beside * width, n // beside
    laid = rows[: whole * beside].reshape(whole, lanes)
    near = np.tile(around, beside).astype(dtype)
    total, squares = np.zeros(lanes), np.zeros(lanes)
    low, high = laid[0].copy(), laid[0].copy()
    away, sums, most = np.empty((min(_ROWS, whole), lanes), dtype), np.empty(lanes, dtype), np.empty_like(low)
    for first in range(0, whole, _ROWS):
        part = laid[first : first + _ROWS]
        there = np.subtract(part, near, out=away[: len(part)], casting="unsafe")
        total += np.add.reduce(there, axis=0, out=sums)
        np.multiply(there, there, out=there)
        squares += np.add.reduce(there, axis=0, out=sums)
        np.minimum(low, np.minimum.reduce(part, axis=0, out=most), out=low)
        np.maximum(high, np.maximum.reduce(part, axis=0, out=most), out=high)
    found = [fold(one.reshape(beside, width), axis=0) for fold, one in _folds(total, squares, low, high)]
    rest = rows[whole * beside :]
    if len(rest):
        away = rest.astype(np.float64) - near[:width]
        more = (away.sum(axis=0), (away**2).sum(axis=0), rest.min(axis=0), rest.max(axis=0))
        found = [fold(np.stack(pair), axis=0) for fold, pair in zip(_FOLDS, zip(found, more, strict=True), strict=True)]
    total, squares, low, high = (np.asarray(one, np.float64) for one in found)
    return total, squares, low, high


_FOLDS: tuple[Any, ...] = (np.add.reduce, np.add.reduce, np.minimum.reduce, np.maximum.reduce)


def _folds(*sums: Numbers) -> zip[tuple[Any, Numbers]]:
    return zip(_FOLDS, sums, strict=True)


def _finite_moments(rows: Numbers) -> _Part:
    """The same where some numbers are not finite, or too large to be squared."""
    numbers = rows.astype(np.float64)
    there = np.isfinite(numbers)
    count = there.sum(axis=0)
    low, high = (fold(np.where(there, numbers, none), axis=0) for fold, none in ((np.min, np.inf), (np.max, -np.inf)))
    known = np.where(there, numbers, 0)
    mean = (known / np.maximum(count, 1)).sum(axis=0)
    squares = (np.where(there, known - mean, 0) ** 2).sum(axis=0)
    return count, mean, squares, low, high
