"""Statistics of runs over several seeds: interquartile means, bands, and distances between curves.

The statistics follow Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS
2021, as rliable computes them. Unlike in rliable, draws are a pure function of a seed, groups may have different
numbers of runs, and complete curves are resampled together. The tests compare each statistic with the result of
rliable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mouse_core.errors import ConfigError, DataError
from mouse_core.randomness import Key, Purpose, check_seed

Floats = NDArray[np.float64]

REPETITIONS = 2000
CONFIDENCE = 0.95
# Number of values that are reduced at a time, 32 MiB.
_MOST_VALUES = 1 << 22


@dataclass(frozen=True)
class Band:
    """The interquartile mean of several runs, and its uncertainty over seeds.

    Attributes:
        value: the interquartile mean of all runs, float64 ``[...]``.
        low: the lower edge of the band, shaped like ``value``; None without a band.
        high: the upper edge.
        runs: the number of runs in each stratum.
    """

    value: Floats
    low: Floats | None
    high: Floats | None
    runs: tuple[int, ...]


def iqm(values: ArrayLike, *, axis: int = 0) -> Floats:
    """Return the interquartile mean: the mean of the values after the lowest and the highest quarter of the values were
    removed.

    Of n sorted values, the first ``n // 4`` and the last ``n // 4`` are left out: 2 + 2 of 8 values, and none of 3
    values. For up to 3 values, the result is the mean of all values.

    Args:
        values: the numbers, at least one along the axis.
        axis: the axis of the runs.

    Returns:
        float64, in the shape of ``values`` without the axis. NaN if a value is NaN, so that a diverged run is not left
        out silently.
    """
    array = np.moveaxis(np.asarray(values, np.float64), axis, 0)
    count = len(array)
    if not count:
        raise DataError("iqm: expected at least one value, found none")
    kept = np.sort(array, axis=0)[count // 4 : count - count // 4]
    # NaN would be sorted to the end, where a quarter is cut off.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isnan(array).any(axis=0), np.nan, kept.mean(axis=0))


def band(
    strata: Sequence[ArrayLike],
    *,
    repetitions: int = REPETITIONS,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Band:
    """Return the interquartile mean of runs, and its interval by the percentiles of a stratified bootstrap.

    A stratum is a group of runs that differ only in their seeds, for example the runs of a variant. Each resample
    draws, with replacement, as many runs from a stratum as the stratum has: for example 2, 0, 2 from the runs 0, 1, 2.
    For each drawn run, its complete curve is used.

    Args:
        strata: an array ``[runs, ...]`` for each stratum; only the number of runs may differ between strata.
        repetitions: the number of resamples.
        confidence: the share of the resamples that lie inside the band.
        seed: the seed of the resamples. Equal arguments give equal bands, bit by bit.

    Returns:
        The band. If a stratum has a single run, ``low`` and ``high`` are None.

    Raises:
        ConfigError: ``strata`` is empty, ``repetitions`` is below 1, or ``confidence`` is outside of (0, 1).
        DataError: a stratum has no runs.
    """
    if not strata or repetitions < 1 or not 0.0 < confidence < 1.0:
        raise ConfigError(
            "band: expected at least one stratum, repetitions of at least 1 and a confidence between 0 and 1, found "
            f"{len(strata)} strata, repetitions={repetitions} and confidence={confidence}"
        )
    check_seed(seed)
    runs = [np.asarray(stratum, np.float64) for stratum in strata]
    counts = tuple(len(stratum) for stratum in runs)
    if not all(counts):
        raise DataError(f"band: expected runs in each stratum, found {list(counts)}")
    together = np.concatenate(runs)
    value = iqm(together)
    if min(counts) == 1:
        return Band(value, None, None, counts)
    # Runs are numbered over all strata. For strata of 2 and 3 runs, a resample may be [1, 0 | 4, 2, 4].
    firsts = np.cumsum([0, *counts[:-1]])
    drawn = np.concatenate(
        [
            first + Key(seed, Purpose.BOOTSTRAP, place).integers(count, repetitions * count).reshape(repetitions, count)
            for place, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ],
        axis=1,
    )
    at_once = max(1, _MOST_VALUES // max(1, together.size))
    found = [iqm(together[drawn[first : first + at_once]], axis=1) for first in range(0, repetitions, at_once)]
    outside = (1.0 - confidence) / 2.0
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = np.quantile(np.concatenate(found), [outside, 1.0 - outside], axis=0)
    return Band(value, low, high, counts)


# ---------------------------------------------------------------------- two curves


def relative_difference(left: ArrayLike, right: ArrayLike) -> Floats:
    """Return the difference of two curves at each step, relative to the larger of the two absolute values.

    The relative difference of 2.0 and 1.5 is 0.25, and the relative difference of two zeros is 0. The result is
    infinite if a value is not finite, even if both values are equal.

    Args:
        left: values of one run, ``[n]``.
        right: values of the other run at the same steps, ``[n]``.

    Returns:
        float64 ``[n]``, from 0 (equal) to 2 (opposite signs), or infinite.
    """
    one, other = np.asarray(left, np.float64), np.asarray(right, np.float64)
    if one.shape != other.shape:
        raise DataError(f"relative_difference: expected curves of equal length, found {one.shape} and {other.shape}")
    finite = np.isfinite(one) & np.isfinite(other)
    found = np.full(one.shape, np.inf)
    # Both values are divided first, because the difference of two large numbers may overflow float64.
    larger = np.maximum(np.abs(one[finite]), np.abs(other[finite]))
    larger[larger == 0.0] = 1.0
    found[finite] = np.abs(one[finite] / larger - other[finite] / larger)
    return found


def parting(difference: ArrayLike, tolerance: float) -> int | None:
    """Return the first index at which two curves differ by more than the tolerance; None if there is no such index.

    Args:
        difference: the result of ``relative_difference``, ``[n]``.
        tolerance: the largest ignored difference; 0 finds the first index at which the curves are not equal bit by bit.
    """
    beyond = np.flatnonzero(np.asarray(difference, np.float64) > tolerance)
    return int(beyond[0]) if len(beyond) else None
