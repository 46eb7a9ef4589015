"""Checks of single dimensions: constant, out of scale, outliers, saturated, times 255, stuck.

Recordings that are right are odd, too: Humanoid-v5 has 24 constant dimensions of 348, and scales that differ by 1e15.
So what only looks odd is a note, and what siblings, the rest of the rows or the nature of an action contradict is a
warning.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mouse_core.inspect._checks.finding import Finding, of_dimension, ratio, some
from mouse_core.inspect._checks.sampling import PIECE, Bools, Floats, Sampled, SampledColumn, quantiles

# Fewer rows say nothing about what is usual.
FEWEST = 200
# The furthest value lies so many times as far from the median as the last of the others.
_OUTLYING, _OUTLYING_REWARD = 12.0, 1e4
_RARE = 0.02
# What a dimension is at rest within, as a share of what its siblings span.
_AT_REST = 1e-2
# So much wider than the next widest sibling; of actions, and where there is but one sibling, more.
_APART, _FAR_APART, _FAR_APART_ACTION, _ONE_SIBLING = 100.0, 700.0, 3000.0, 10.0
_SATURATED_ACTION, _SATURATED = 0.6, 0.3
_STUCK = 64
_BYTE = 255.0


def about_dimensions(sampled: Sampled) -> Iterator[Finding]:
    """Findings about each dimension of actions, rewards and observations."""
    for column in sampled.columns.values():
        if len(column.values) < FEWEST:
            continue
        yield from _constant_actions(column)
        if column.continuous:
            middle, spread = _middle_and_spread(column)
            yield from _outliers(column, sampled, middle, spread)
            yield from _scales(column, spread)
            yield from _saturated(column, sampled)
            yield from _times_255(column)
            yield from _stuck(column, sampled)


def _middle_and_spread(column: SampledColumn) -> tuple[Floats, Floats]:
    """Median and width of the middle 98% of each dimension; NaN where there are no numbers."""
    low, middle, high = quantiles(column.values, (0.01, 0.5, 0.99))
    return middle, high - low


def _constant_actions(column: SampledColumn) -> Iterator[Finding]:
    still = column.low == column.high
    if not column.name.startswith("action") or column.width < 2 or still.all():
        return
    for place in np.flatnonzero(still).tolist():
        where = _at(column.low_at, place)
        message = f"always {column.low[place]:g}, while the others change: is it recorded?"
        yield of_dimension("constant-action", "warning", message, column, place, where)


def _outliers(column: SampledColumn, sampled: Sampled, middle: Floats, spread: Floats) -> Iterator[Finding]:
    """A few values far beyond a gap in which there are none."""
    limit = _OUTLYING_REWARD if column.name == "reward" else _OUTLYING
    usual = float(np.quantile(spread[spread > 0], 0.75)) if (spread > 0).any() else 0.0
    for place in range(column.width):
        every = np.abs(column.values[:, place] - middle[place])
        furthest = max(column.high[place] - middle[place], middle[place] - column.low[place])
        away = np.sort(every[np.isfinite(every) & (every > 0)])
        rare = max(3, int(_RARE * len(column.values)))
        if not np.isfinite(furthest) or furthest <= 0.1 * _AT_REST * usual or len(away) < 4 * rare:
            continue
        tail = np.append(away[-rare:], furthest)
        # A thing that is at rest, but for rounding, and moved a few times, moves no further than others do.
        inner = np.where(tail[:-1] < _AT_REST * usual, max(usual, 1e-300), tail[:-1])
        ratios = tail[1:] / inner
        at = int(ratios.argmax())
        if ratios[at] < limit or tail[-1] <= 0:
            continue
        upper = column.high[place] - middle[place] == furthest
        value = column.high[place] if upper else column.low[place]
        episode, step = _at(column.high_at if upper else column.low_at, place)
        message = (
            f"{value:g} in episode {episode}, step {step}, lies {ratio(furthest / tail[at])} times as far from the "
        )
        message += f"median, {middle[place]:g}, as all but {_few(len(tail) - 1 - at, sampled)} do"
        odd = every > tail[at]
        where = some(np.append(sampled.episode[odd], episode))
        # What episodes begin with is set, and need not be what steps lead to.
        level = "note" if len(where) > 2 and step <= 1 and (sampled.step[odd] <= 1).all() else "warning"
        yield of_dimension("outlier", level, message, column, place, (episode, step), where)


def _at(places: npt.NDArray[np.int64], place: int) -> tuple[int, int]:
    """Episode and step of a dimension's extreme."""
    episode, step = places[place].tolist()
    return episode, step


def _few(count: int, sampled: Sampled) -> str:
    if len(sampled.row) == sampled.rows:
        return "a value" if count <= 2 else f"{count} values"
    return "a few values"


def _scales(column: SampledColumn, spread: Floats) -> Iterator[Finding]:
    """A few dimensions that vary much more than all of their siblings."""
    known = np.flatnonzero(spread > 0)
    if len(known) < 2:
        return
    order = known[np.argsort(spread[known])]
    more = _ONE_SIBLING if len(known) == 2 else 1.0
    upper = max(1, len(order) // 4)
    ratios = spread[order[-upper:]] / spread[order[-upper - 1 : -1]]
    at = int(ratios.argmax())
    if ratios[at] >= _APART * more:
        far = _FAR_APART_ACTION if column.name.startswith("action") else _FAR_APART
        level = "warning" if ratios[at] >= far * more else "note"
        for place in order[-upper + at :].tolist():
            times = ratio(spread[place] / spread[order[-upper + at - 1]])
            message = f"varies {times} times as much as {'its sibling' if more > 1 else 'any sibling'} does"
            where = _at(column.high_at, place)
            yield of_dimension("scale-apart", level, message, column, place, where)
    lowest = order[: max(1, len(order) // 4) + 1]
    ratios = spread[lowest[1:]] / spread[lowest[:-1]]
    at = int(ratios.argmax())
    if ratios[at] >= _APART and len(known) > 2:
        for place in lowest[: at + 1].tolist():
            message = f"varies {ratio(ratios[at])} times less than any sibling does"
            where = _at(column.high_at, place)
            yield of_dimension("scale-apart", "note", message, column, place, where)


def _saturated(column: SampledColumn, sampled: Sampled) -> Iterator[Finding]:
    """Values that stand at their lowest or highest."""
    if column.name == "reward":
        return
    there = np.isfinite(column.values)
    count = np.maximum(there.sum(axis=0), 1)
    # Measured by what most values span: beside one outlier all others would be near the lowest.
    most = np.quantile(np.where(there, column.values, column.low), [0.05, 0.95], axis=0)
    near = 1e-6 * (most[1] - most[0])
    lowest, highest = there & (column.values <= column.low + near), there & (column.values >= column.high - near)
    low, high = lowest.sum(axis=0) / count, highest.sum(axis=0) / count
    action = column.name.startswith("action")
    for place in np.flatnonzero((column.high > column.low) & (low + high >= _SATURATED)).tolist():
        if _values_between(column.values[:, place]) < 20 or (not action and (low[place] == 0 or high[place] == 0)):
            continue
        both = low[place] + high[place]
        # What is seen is often cut off by its environment, as the speeds of Walker2d are at 10.
        level = "warning" if action and both >= _SATURATED_ACTION else "note"
        message = (
            f"{both:.0%} of the values are {column.low[place]:g} or {column.high[place]:g}, the lowest and highest"
        )
        rows = np.flatnonzero(lowest[:, place] | highest[:, place])
        where = sampled.where(int(rows[0])), some(sampled.episode[rows])
        yield of_dimension("saturated", level, message, column, place, *where)


def _values_between(values: Floats) -> int:
    """Number of different values among the first few hundred that are neither the lowest nor the highest."""
    values = values[np.isfinite(values)]
    inside = values[(values > values.min(initial=np.inf)) & (values < values.max(initial=-np.inf))]
    return len(np.unique(inside[:500]))


def _times_255(column: SampledColumn) -> Iterator[Finding]:
    """Actions that reach to 255 times 1, 2, a half or 0.4, where action spaces end, and are no whole numbers."""
    if not column.name.startswith("action"):
        return
    for place in range(column.width):
        reach = max(abs(column.low[place]), abs(column.high[place]))
        one_sided = abs(column.low[place]) < 0.01 * reach
        even = abs(column.low[place] + column.high[place]) < 0.03 * reach
        values = column.values[:500, place]
        fits = any(0.97 <= reach / (_BYTE * unit) <= 1.0001 for unit in (0.4, 0.5, 1.0, 2.0, 3.0))
        if fits and (one_sided or even) and np.isfinite(values).any() and (np.nan_to_num(values) % 1 != 0).any():
            message = f"reaches from {column.low[place]:g} to {column.high[place]:g}: was it multiplied by 255?"
            at = column.high_at if column.high[place] == reach else column.low_at
            yield of_dimension("times-255", "warning", message, column, place, _at(at, place))


def _stuck(column: SampledColumn, sampled: Sampled) -> Iterator[Finding]:
    """Dimensions of observations that hardly ever keep their value, and then do for long, while siblings change."""
    if not column.name.startswith("observation") or column.width < 2:
        return
    follows = np.diff(sampled.row) == 1  # also from one episode to the next, where a value is even less the same
    same = (np.diff(column.values, axis=0) == 0) & follows[:, None]
    changes = (~same).sum(axis=1)
    moving = follows & (changes >= max(1.0, 0.5 * float(np.median(changes[follows])) if follows.any() else 1.0))
    for place in range(column.width):
        kept = same[:, place] & moving
        share = kept.mean()
        if not 0 < share < 0.5:
            continue
        first, length = longest_run(kept)
        elsewhere = (kept.sum() - _in_long_runs(kept, length)) / max(1, len(kept))
        if length < _STUCK or elsewhere >= 0.02 or _rests(column, place, kept, first, sampled):
            continue
        episode, step = sampled.where(first)
        steps = f"{length} {'steps' if length < PIECE - 1 else 'steps and more'}"
        message = f"stays {column.values[first, place]:g} for {steps} from episode {episode}, step {step}"
        where = some(sampled.episode[first : first + length + 1])
        yield of_dimension("stuck", "warning", f"{message}, while others change", column, place, (episode, step), where)


def _rests(column: SampledColumn, place: int, kept: Bools, first: int, sampled: Sampled) -> bool:
    """Whether what stays the same from a row on is a thing at rest, or at its limit, and not a sensor that was lost."""
    values = column.values[:, place]
    # As a lidar without anything before it.
    at_limit = values[first] in (column.low[place], column.high[place])
    begins, ends = np.split(_edges(kept).reshape(-1, 2), 2, axis=1)
    long = (ends - begins >= _STUCK)[:, 0]
    # A thing that nobody has touched yet stays until the episode ends, or moves off; it does not jump.
    after = min(int(ends[begins[:, 0] == first][0, 0]) + 1, len(values) - 1)
    same_episode = sampled.episode[first] == sampled.episode[after - 1]
    untouched = sampled.step[first] == 0 and same_episode and not _jumps(values, after, sampled)
    places = len(np.unique(values[begins[long, 0]]))
    return at_limit or bool(untouched) or places > 2 or _came_to_rest(values, first)


def _jumps(values: Floats, row: int, sampled: Sampled) -> bool:
    """Whether a value changes to a row of the same episode by much more than it usually does."""
    changes = np.abs(np.diff(values))
    usual = float(np.quantile(changes[changes > 0], 0.9)) if (changes > 0).any() else np.inf
    return bool(sampled.episode[row] == sampled.episode[row - 1]) and float(changes[row - 1]) > 3 * usual


def _came_to_rest(values: Floats, first: int) -> bool:
    """Whether a value hardly changed any more before it stays: a thing that was let go, not a sensor that was lost."""
    changes = np.abs(np.diff(values))
    usual = float(np.median(changes[changes > 0])) if (changes > 0).any() else 0.0
    return first > 0 and float(changes[max(0, first - 3) : first].max(initial=0.0)) < 0.1 * usual


def longest_run(flags: Bools) -> tuple[int, int]:
    """Return the first place and the length of the longest run of True."""
    edges = _edges(flags)
    lengths = edges[1::2] - edges[::2]
    if not len(lengths):
        return 0, 0
    at = int(lengths.argmax())
    return int(edges[2 * at]), int(lengths[at])


def _in_long_runs(flags: Bools, longest: int) -> int:
    edges = _edges(flags)
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= max(8, longest // 4)].sum())


def _edges(flags: Bools) -> npt.NDArray[np.int64]:
    padded = np.concatenate([[False], flags, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1])
