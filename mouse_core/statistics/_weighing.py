"""Statistics of parts of which some are drawn more often than others: each row counts as often as it is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mouse_core.statistics._counting import Counted, Part
from mouse_core.statistics.moments import Floats, Moments
from mouse_core.statistics.quantiles import Sketch, Tally


def weighed(parts: Sequence[Part], weights: Sequence[float], shares: Sequence[float]) -> Part:
    """What several parts have together, of one field.

    Args:
        parts: What was counted of each.
        weights: How much a row of each counts, above 0.
        shares: Of the quantiles.

    Returns:
        A part that cannot be counted on.
    """
    first, counts = parts[0], np.stack([part.all.moments.count for part in parts])
    # How much all numbers of each part count, [P, width]: 30 rows of weight 2 as much as 60 of weight 1.
    sizes = counts * np.asarray(weights, np.float64)[:, None]
    moments = _moments([part.all.moments for part in parts], sizes)
    spreads = [part.all.spread for part in parts]
    known = [spread for spread in spreads if spread]
    said, error = None, 0.0
    if shares and len(known) == len(parts):
        ends = zip(moments.low.tolist(), moments.high.tolist(), strict=True)
        found = [
            _quantiles([spread[place] for spread in known], weights, shares, *low_high)
            for place, low_high in enumerate(ends)
        ]
        values = np.stack([one for one, _ in found], axis=1)
        said = {share: one.reshape(first.layout.shape) for share, one in zip(shares, values, strict=True)}
        error = max((wrong for _, wrong in found), default=0.0)
    return Part(first.layout, None, Counted(moments, None), first.is_image, said, said_error=error)


def _moments(parts: Sequence[Moments], sizes: Floats) -> Moments:
    """Mean, deviation and range of several parts that count for so much.

    Of means 2 and 6 that count for 3 and 1, the mean is 3; deviations of 0 make a variance of (3 * 1 + 1 * 9) / 4 = 3.
    """
    made = Moments(sizes.shape[1])
    made.count = np.sum([one.count for one in parts], axis=0)
    made.low, made.high = (
        np.min([one.low for one in parts], axis=0),
        np.max([one.high for one in parts], axis=0),
    )
    portion = sizes / np.where(sizes.any(axis=0), sizes.sum(axis=0), 1.0)
    means = np.stack([one.mean for one in parts])
    variances = np.stack([one.squares / np.maximum(one.count, 1) for one in parts])
    mean = (portion * means).sum(axis=0)
    variance = (portion * (variances + (means - mean) ** 2)).sum(axis=0)
    same = made.low == made.high
    made.mean, made.squares = np.where(same, made.low, mean), np.where(same, 0.0, variance * made.count)
    return made


def _quantiles(
    spread: Sequence[Sketch | Tally], weights: Sequence[float], shares: Sequence[float], low: float, high: float
) -> tuple[Floats, float]:
    """Quantiles at one place, and the share of all by which their ranks may be wrong.

    Numbers 1, 2 and 3 that count for 1, 1 and 2 lie in the middle of what they count for: at 1/8, 3/8 and 3/4 of all.
    """
    kept = [_numbers(one) for one in spread]
    values = np.concatenate([numbers for numbers, _ in kept])
    counting = np.concatenate([each * weight for (_, each), weight in zip(kept, weights, strict=True)])
    if not counting.sum():
        return np.full(len(shares), np.nan), 0.0
    order = np.argsort(values, kind="stable")
    values, counting = values[order], counting[order]
    total = counting.sum()
    middles = (np.cumsum(counting) - counting / 2) / total
    scale = 2.0 if max(abs(low), abs(high)) > 1e300 else 1.0  # see Sketch.quantiles
    asked = np.asarray(shares, np.float64)
    found = np.interp(asked, [0.0, *middles, 1.0], np.array([low, *values, high]) / scale) * scale
    wrong = sum(one.error * weight for one, weight in zip(spread, weights, strict=True) if isinstance(one, Sketch))
    return np.clip(found, low, high), float((wrong + counting.max() / 2) / total)


def _numbers(one: Sketch | Tally) -> tuple[Floats, npt.NDArray[np.float64]]:
    """The numbers that are kept, and for how many each stands."""
    if isinstance(one, Tally):
        there = np.flatnonzero(one.counts)
        return there.astype(np.float64), one.counts[there].astype(np.float64)
    lengths = [len(level) for level in one.levels]
    return np.concatenate([np.empty(0), *one.levels]), np.repeat(2.0 ** np.arange(len(lengths)), lengths)
