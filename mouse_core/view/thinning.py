"""Reduces the number of points of curves; every spike and every gap stays visible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

# Number of values that are read at a time.
_VALUES = 1 << 22


@dataclass(frozen=True)
class Curve:
    """The points of a curve.

    Args:
        steps: The steps of the points, int64 ``[n]``, ascending.
        values: The values of the points, float64 ``[n]``; NaN where the curve has a gap.
    """

    steps: Int64s
    values: Floats


def thinned(read: Callable[[int, int], Floats], begin: int, end: int, buckets: int, width: int = 1) -> list[Curve]:
    """Return the curves of some columns over the steps ``begin .. end - 1``; each curve is reduced to a few points per
    bucket.

    The steps are divided into ``buckets`` ranges of equal length. In each bucket, the steps with the smallest and the
    largest value are kept. So the kept points have the same range as the complete curve. Values that are not finite
    (NaN, infinite) are gaps; in each bucket, the first and the last gap are kept. If there are few steps, all steps are
    kept.

    Args:
        read: A function that takes ``first`` and ``last``, and returns the values of the steps ``first .. last - 1``,
            float64 ``[n, columns]``.
        begin, end: The first step, and the step after the last step.
        buckets: Number of buckets, at least 1; usually about the width of the plot in pixels.
        width: Number of values that are read for each step, which determines how many steps are read at a time.
    Returns:
        A curve for each column.
    """
    count = end - begin
    if count <= 3 * buckets:
        values = _finite(read(begin, end))
        steps = np.arange(begin, begin + len(values))
        return [Curve(steps, column) for column in values.T]
    edges = begin + np.arange(buckets + 1) * count // buckets
    most = max(_VALUES // width, 1)
    places: list[Int64s] = []
    found: list[Floats] = []
    at = 0
    while at < buckets:
        upto = max(int(edges.searchsorted(edges[at] + most, side="right")) - 1, at + 1)
        values = _finite(read(int(edges[at]), int(edges[upto])))
        for one in range(at, upto):
            first, last = int(edges[one] - edges[at]), int(edges[one + 1] - edges[at])
            kept = _marked(values[first:last])
            places.append(kept + int(edges[one]))
            found.append(np.take_along_axis(values[first:last], kept, axis=0))
        at = upto
    points = zip(np.concatenate(places).T, np.concatenate(found).T, strict=True)
    return [_unique(np.asarray(at), np.asarray(value)) for at, value in points]


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)


def _marked(values: Floats) -> Int64s:
    """Return the steps of the smallest value, the largest value, the first gap and the last gap, sorted.

    The result is int64 ``[4, columns]``.
    """
    gaps = np.isnan(values)
    low = np.where(gaps, np.inf, values).argmin(axis=0)
    high = np.where(gaps, -np.inf, values).argmax(axis=0)
    # Without a gap, the place of the smallest value is used instead.
    some = gaps.any(axis=0)
    first = np.where(some, gaps.argmax(axis=0), low)
    last = np.where(some, len(values) - 1 - gaps[::-1].argmax(axis=0), low)
    marked: Int64s = np.sort(np.stack([low, high, first, last]), axis=0)
    return marked


def _unique(steps: Int64s, values: Floats) -> Curve:
    kept = np.append(True, steps[1:] > steps[:-1])
    return Curve(steps[kept], values[kept])
