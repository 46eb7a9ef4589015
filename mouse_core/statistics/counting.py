"""Computes moments and sketches of quantiles for each field, one block of rows at a time; the results of several blocks
can be merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import is_ml_float
from mouse_core.spec import FieldSpec

Floats = npt.NDArray[np.float64]

Numbers = npt.NDArray[Any]

# Number of values that are added side by side, and number of rows that are added at a time, so that the values fit in
# the cache.
_LANES, _ROWS = 8192, 16
# Largest number that float32 can square and add up without overflow.
_NARROWEST, _WIDEST = 1e-12, 1e15
# A sum of squares around a point that is more than this number of deviations away from the mean is computed again
# around the mean.
_FAR = 4.0
_NARROW = ("f", "b", "B", "h", "H", "?")


class Moments:
    """Count, mean, sum of squared deviations, and range of each dimension; two ``Moments`` are merged as in Chan, Golub
    and LeVeque (1979).

    NaN and infinities are ignored. Mean and deviation differ from the results in float64 by at most ``1e-6`` of the
    deviation. Numbers that float32 can represent are added in float32, sixteen at a time, after a number near their
    mean was subtracted.

    Args:
        width: Number of dimensions of a row; each has its own moments.

    Attributes:
        count: int64 ``[width]``.
        mean, squares: float64 ``[width]``; ``squares`` is the sum of squared deviations from the mean.
        low, high: float64 ``[width]``; infinite where nothing was counted.
    """

    def __init__(self, width: int) -> None:
        self.count = np.zeros(width, np.int64)
        self.mean, self.squares = np.zeros(width), np.zeros(width)
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)

    def add(self, rows: Numbers) -> None:
        """Count rows ``[n, width]``, C-contiguous."""
        if not len(rows):
            return
        with np.errstate(all="ignore"):  # results with infinities are checked below
            found = _moments_of(rows)
        self._take(*found)

    def add_counts(self, counts: npt.NDArray[np.int64]) -> None:
        """Count the integers ``0 .. k - 1`` with the given frequencies, ``[width, k]``; in each row, at least one
        frequency must be above 0."""
        values, there = np.arange(counts.shape[1], dtype=np.float64), counts > 0
        count = counts.sum(axis=1)
        mean = (counts @ values) / count
        squares = (counts * (values - mean[:, None]) ** 2).sum(axis=1)
        low, high = there.argmax(axis=1), counts.shape[1] - 1 - there[:, ::-1].argmax(axis=1)
        self._take(count, mean, squares, low.astype(np.float64), high.astype(np.float64))

    def weigh(self, numbers: int) -> None:
        """Divide the count by ``numbers``. If ``numbers`` is the number of pixels of an image, each image then counts
        as one number.
        """
        self.count, self.squares = self.count // numbers, self.squares / numbers

    def merge(self, other: Moments) -> None:
        """Add the counts of another object of this class."""
        self._take(other.count, other.mean, other.squares, other.low, other.high)

    def _take(self, count: npt.NDArray[np.int64], mean: Floats, squares: Floats, low: Floats, high: Floats) -> None:
        """Add the moments of other rows.

        Example: 3 numbers with mean 2 and 1 number with mean 6 have the mean 2 + (6 - 2) * 1/4 = 3. The squares of the
        other rows, and (6 - 2)^2 * 3 * 1/4 = 12, are added to the squares. If the minimum equals the maximum, the mean
        is set to this value, so that rounding errors do not give equal numbers a deviation.
        """
        total = self.count + count
        share = count / np.maximum(total, 1)
        change = mean - self.mean
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        same = self.low == self.high
        self.squares = np.where(same, 0.0, self.squares + squares + change**2 * self.count * share)
        self.mean = np.where(same, self.low + 0.0, self.mean + change * share)  # converts -0.0 to 0.0
        self.count = total

    @property
    def deviation(self) -> Floats:
        """The standard deviation of all counted numbers, float64 ``[width]``; NaN if no number was counted."""
        with np.errstate(invalid="ignore"):
            return np.sqrt(self.squares / np.where(self.count, self.count, np.nan))


_Part = tuple[npt.NDArray[np.int64], Floats, Floats, Floats, Floats]


def _moments_of(rows: Numbers) -> _Part:
    """Return the count, mean, squares, minimum and maximum of the numbers in rows, float64 ``[width]`` each."""
    if rows.dtype == np.float16 or is_ml_float(rows.dtype):
        rows = rows.astype(np.float32)  # fast, unlike comparisons of such numbers
    n, width = rows.shape
    # The median of a few rows is near most numbers, however far away some numbers are.
    around = np.median(rows[:: max(1, n // 32)][:33].astype(np.float64), axis=0)
    around = np.where(np.isfinite(around), around, 0.0)
    narrow = rows.dtype.char in _NARROW
    total, squares, low, high = _sums(rows, around, np.dtype(np.float32 if narrow else np.float64))
    if narrow:
        around = around.astype(np.float32).astype(np.float64)
        spread = high - low  # NaN or infinite if any number is
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
    if odd.any():  # only these dimensions are checked number by number
        for one, exact in zip(found, _finite_moments(rows[:, odd]), strict=True):
            one[odd] = exact
    return found


def _sums(rows: Numbers, around: Floats, dtype: np.dtype[Any]) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the sum and the sum of squares of ``rows - around``, and the minimum and maximum of ``rows``, ``[width]``
    each.

    For example, rows of 3 numbers are arranged as lanes of 8190 numbers, and 16 lanes are added at a time. So each sum
    in float32 has 16 terms, and these sums are then added in float64.
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
    """Return the moments of dimensions with numbers that are not finite, or too large to be squared."""
    numbers = rows.astype(np.float64)
    there = np.isfinite(numbers)
    count = there.sum(axis=0)
    low, high = (fold(np.where(there, numbers, none), axis=0) for fold, none in ((np.min, np.inf), (np.max, -np.inf)))
    known = np.where(there, numbers, 0)
    mean = (known / np.maximum(count, 1)).sum(axis=0)
    squares = (np.where(there, known - mean, 0) ** 2).sum(axis=0)
    return count, mean, squares, low, high


# A level has fewer numbers than this; when it is full, half of its numbers go to the next level.
_FULL = 8192


class Sketch:
    """A sketch of quantiles, which keeps a part of the numbers; each kept number represents 1, 2, 4, ... numbers (Munro
    and Paterson, 1980).

    For example, a kept number on level 3 represents 8 numbers. When a level is full, its numbers are sorted, and every
    second number is moved to the next level; the others are dropped. If a kept number of a level represents k numbers,
    a move from this level changes the rank of a value by at most k. ``error`` is the sum of these changes, so no rank
    has a larger error. Below 8,192 numbers, all numbers are kept and ranks are exact. The error of ranks is 0.06% for
    10**7 numbers, and 0.13% for 10**9 numbers.

    Attributes:
        count: Number of counted finite numbers.
        error: Largest error of a rank.
        turns: An integer with one bit for each level; the bit is 1 if the next move keeps the larger number of each
            pair.
        levels: The kept numbers of each level, float64 ``[n]`` each.
    """

    def __init__(self) -> None:
        self.count = self.error = self.turns = 0
        self.levels: list[Floats] = []

    def add(self, ordered: npt.NDArray[Any]) -> None:
        """Count finite numbers ``[n]`` in ascending order.

        Example: of 30,001 numbers, the 3rd, 7th, 11th, ... are added to level 2, and each of them represents 4 numbers.
        Five of the first 19 numbers are added, so the estimated rank of the 19th number is 5 * 4 = 20. Ranks are wrong
        by at most 2. The last number, which is left over, is added to level 0.
        """
        self.count += len(ordered)
        level = (len(ordered) // _FULL).bit_length()
        step = 1 << level
        whole = len(ordered) // step * step
        self._put(level, ordered[step // 2 : whole : step].astype(np.float64))
        self._put(0, ordered[whole:].astype(np.float64))
        self.error += step // 2

    def merge(self, other: Sketch) -> None:
        """Add the numbers of another sketch; the errors of ranks add up."""
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
        # The lower number of each pair is kept now, the upper one the next time, so that ranks have no bias.
        upper = (self.turns >> level) & 1
        self.turns ^= 1 << level
        self.error += 1 << level
        self._put(level + 1, held[upper:pairs:2])

    @property
    def rank_error(self) -> float:
        """Largest error of the rank of a quantile, as a share of all numbers; 0 if all numbers are kept."""
        if len(self.levels) <= 1:
            return 0.0
        return (self.error + (1 << (len(self.levels) - 1))) / max(self.count, 1)

    def quantiles(self, shares: Sequence[float], low: float, high: float) -> Floats:
        """Return quantiles of the counted numbers; if all numbers are kept, the quantiles equal the results of
        ``numpy.quantile``.

        Args:
            shares: The shares, from 0 to 1.
            low, high: The lowest and the highest counted number.

        Returns:
            float64 ``[len(shares)]``; NaN if no number was counted.
        """
        if not self.count:
            return np.full(len(shares), np.nan)
        values = np.concatenate(self.levels)
        weights = np.repeat(2.0 ** np.arange(len(self.levels)), [len(level) for level in self.levels])
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        # Kept numbers that represent 1, 1 and 4 numbers get the middle ranks of 0, 1 and 2 to 5.
        ranks = np.cumsum(weights) - (weights + 1) / 2
        asked = np.asarray(shares, np.float64) * (self.count - 1)
        # Large numbers are halved, so that differences cannot overflow.
        scale = 2.0 if max(abs(low), abs(high)) > 1e300 else 1.0
        found = np.interp(asked, [0.0, *ranks, self.count - 1.0], np.array([low, *values, high]) / scale) * scale
        return np.clip(found, low, high)


class Tally:
    """Counts how often each of the 256 values of a byte occurs; quantiles are computed exactly from these counts.

    Attributes:
        counts: int64 ``[256]``.
    """

    rank_error = 0.0

    def __init__(self) -> None:
        self.counts = np.zeros(256, np.int64)

    def add(self, numbers: npt.NDArray[np.uint8]) -> None:
        """Count bytes ``[n]``."""
        self.counts = self.counts + np.bincount(numbers, minlength=256)

    def merge(self, other: Tally) -> None:
        """Add the counts of another object of this class."""
        self.counts = self.counts + other.counts

    def quantiles(self, shares: Sequence[float], low: float, high: float) -> Floats:
        """Return quantiles in the form of ``Sketch.quantiles``."""
        ends = np.cumsum(self.counts)
        if not ends[-1]:
            return np.full(len(shares), np.nan)
        ranks = np.asarray(shares, np.float64) * (ends[-1] - 1)
        lower, upper = (np.searchsorted(ends, whole(ranks), side="right") for whole in (np.floor, np.ceil))
        return np.asarray(lower + (upper - lower) * (ranks - np.floor(ranks)))


# Approximate number of values in a block; the number of its rows is a power of two.
_BLOCK = 1 << 20
# Longer rows have no quantiles, except images.
MOST_PLACES = 1024


class Layout(NamedTuple):
    """The layout of a field's numbers in a row.

    Args:
        shape: The shape of statistics: the shape of a step, or ``(C,)`` for images.
        beside: How many values of a row belong to each dimension: the number of pixels for images, else 1.
        counted: "bytes" (the occurrences of each byte value are counted), "numbers" (a sketch is computed), or "" (no
            quantiles).
    """

    shape: tuple[int, ...]
    beside: int
    counted: str

    @property
    def width(self) -> int:
        """Number of dimensions."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def block_rows(self) -> int:
        """Number of rows of a block."""
        fitting = max(64, _BLOCK // max(1, self.width * self.beside))
        return 1 << (fitting.bit_length() - 1)

    def stretches(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows that are counted together: for 300 rows in blocks of 128, two blocks and 44 rows.

        Args:
            begin: The first row of a block.
            end: The index after the last row.
        """
        for first in range(begin, end, self.block_rows):
            yield first, min(first + self.block_rows, end)


def layout_of(field: FieldSpec, stored: np.dtype[Any], *, quantiles: bool) -> Layout:
    """Return the layout of a field with a stored dtype."""
    image = field.image_shape
    shape = field.shape if image is None else image[2:]
    beside = 1 if image is None else image[0] * image[1]
    if image is not None and stored == np.uint8:
        return Layout(shape, beside, "bytes")  # pixels are always counted by value
    few = int(np.prod(shape, dtype=np.int64)) <= MOST_PLACES
    return Layout(shape, beside, "numbers" if quantiles and few else "")


@dataclass
class Counted:
    """The counts of some rows of a field.

    Args:
        moments: Moments by dimension.
        spread: The counts or the sketch of each dimension, for quantiles; None if unknown.
    """

    moments: Moments
    spread: Sequence[Sketch | Tally] | None

    @staticmethod
    def nothing(layout: Layout) -> Counted:
        """Return the counts of no rows."""
        kinds: dict[str, Any] = {"bytes": Tally, "numbers": Sketch}
        spread = [kinds[layout.counted]() for _ in range(layout.width)] if layout.counted else None
        return Counted(Moments(layout.width), spread)

    def merge(self, other: Counted) -> None:
        """Add the counts of other rows of the same field."""
        self.moments.merge(other.moments)
        for mine, more in zip(self.spread or (), other.spread or (), strict=True):
            mine.merge(more)  # type: ignore[arg-type]  # of one kind

    def quantiles(self, shares: Sequence[float]) -> dict[float, Floats]:
        """Return a dict from each share, such as 0.99, to its quantiles, float64 ``[width]``; empty if ``spread`` is
        unknown.
        """
        if not shares or not self.spread:
            return {}
        ends = zip(self.spread, self.moments.low.tolist(), self.moments.high.tolist(), strict=True)
        found = np.stack([one.quantiles(shares, low, high) for one, low, high in ends], axis=1)
        return dict(zip(shares, found, strict=True))


class PartialMoments(NamedTuple):
    """The counts of a field, for its complete blocks and for all rows.

    Args:
        layout: The layout of the numbers in a row.
        whole: The counts of all complete blocks, to which the counts of later rows can be added; None if unknown.
        all: The counts of all rows. While rows are being counted, these are only the rows after the last complete
            block.
        is_image: Whether the field has images.
        said_error: The largest error of the ranks of ``said``, as a share of all numbers.
        said: Quantiles by share from a file; None if the quantiles are not from a file.
        has_count: Whether the number of values is known; some files do not contain this number.
    """

    layout: Layout
    whole: Counted | None
    all: Counted
    is_image: bool
    said: Mapping[float, Floats] | None = None
    has_count: bool = True
    said_error: float = 0.0

    def with_stretch(self, found: Counted, rows: int) -> PartialMoments:
        """Return the counts after adding the counts ``found`` of the next ``rows`` rows."""
        if rows < self.layout.block_rows or self.whole is None:
            return self._replace(all=found)
        self.whole.merge(found)
        return self

    def summed(self) -> PartialMoments:
        """Return a copy in which ``all`` has the counts of all rows."""
        total = Counted.nothing(self.layout) if self.whole is None else deepcopy(self.whole)
        total.merge(self.all)
        return self._replace(all=total)


def count(layout: Layout, rows: npt.NDArray[Any]) -> Counted:
    """Count a block of rows ``[n, ...]``."""
    made = Counted.nothing(layout)
    if not len(rows):
        return made
    numbers = np.ascontiguousarray(rows).reshape(-1, layout.width)
    if layout.counted == "bytes":
        tallies: Any = made.spread
        for place, tally in enumerate(tallies):
            tally.add(numbers[:, place])
        made.moments.add_counts(np.stack([tally.counts for tally in tallies]))
    else:
        made.moments.add(numbers)
        if made.spread is not None:
            _sketch(made.spread, numbers)
    made.moments.weigh(layout.beside)
    return made


def _sketch(spread: Sequence[Any], numbers: npt.NDArray[Any]) -> None:
    if is_ml_float(numbers.dtype) or numbers.dtype == np.float16:
        numbers = numbers.astype(np.float32)
    places = np.sort(np.ascontiguousarray(numbers.T), axis=1)
    for sketch, ordered in zip(spread, places, strict=True):
        if ordered.dtype.kind == "f":  # NaN is sorted last
            ordered = ordered[ordered.searchsorted(-np.inf, "right") : ordered.searchsorted(np.inf, "left")]
        sketch.add(ordered)
