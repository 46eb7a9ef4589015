"""Checks of single dimensions, and comparisons of parts of the data that should be similar.

Correct recordings also contain unusual values. For example, Humanoid-v5 has 24 constant dimensions of 348, and scales
that differ by a factor of 1e15. For this reason, a value that is only unusual is reported as a note. A value is
reported as a warning if it contradicts the other dimensions of its column (siblings), other rows, or the nature of an
action.

A part of the data is a segment of adjacent rows, or an episode. In a correct recording, every episode can have a
different goal, and the agent touches an object in some episodes only. So a part is reported only if two conditions
hold: it has several episodes, and it differs from the other parts by more than the other parts differ from each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mouse_core.episodes import sums_by_episode
from mouse_core.inspect.report import Finding, of_dimension, ratio, some
from mouse_core.inspect.sampling import PIECE, Bools, Floats, Int64s, Sampled, SampledColumn, UInt64s, quantiles

# With fewer rows, the usual range cannot be estimated.
FEWEST = 200
# Factor between the distance of an outlier and of the furthest other value from the median.
_OUTLYING, _OUTLYING_REWARD = 12.0, 1e4
_RARE = 0.02
# Range of a dimension at rest, as a share of its siblings' range.
_AT_REST = 1e-2
# Factor between the range of a dimension and of its next widest sibling; larger for actions, and for a single sibling.
_APART, _FAR_APART, _FAR_APART_ACTION, _ONE_SIBLING = 100.0, 700.0, 3000.0, 10.0
_SATURATED_ACTION, _SATURATED = 0.6, 0.3
_STUCK = 64
_BYTE = 255.0


def about_dimensions(sampled: Sampled) -> Iterator[Finding]:
    """Yield findings about each dimension of actions, rewards and observations."""
    for column in sampled.columns.values():
        if len(column.values) < FEWEST:
            continue
        yield from _constant_actions(column)
        if column.continuous:
            low, middle, high = quantiles(column.values, (0.01, 0.5, 0.99))
            spread = high - low  # range of the middle 98%
            yield from _outliers(column, sampled, middle, spread)
            yield from _scales(column, spread)
            yield from _saturated(column, sampled)
            yield from _times_255(column)
            yield from _stuck(column, sampled)


def _constant_actions(column: SampledColumn) -> Iterator[Finding]:
    still = column.low == column.high
    if not column.name.startswith("action") or column.width < 2 or still.all():
        return
    for place in np.flatnonzero(still).tolist():
        where = _at(column.low_at, place)
        message = f"always {column.low[place]:g}, while the other dimensions change: probably not recorded"
        yield of_dimension("constant-action", "warning", message, column, place, where)


def _outliers(column: SampledColumn, sampled: Sampled, middle: Floats, spread: Floats) -> Iterator[Finding]:
    """Yield findings about a few values that are separated from all other values by a large gap."""
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
        # A dimension at rest (except for rounding) that moved a few times does not move further than others.
        inner = np.where(tail[:-1] < _AT_REST * usual, max(usual, 1e-300), tail[:-1])
        ratios = tail[1:] / inner
        at = int(ratios.argmax())
        if ratios[at] < limit or tail[-1] <= 0:
            continue
        upper = column.high[place] - middle[place] == furthest
        value = column.high[place] if upper else column.low[place]
        episode, step = _at(column.high_at if upper else column.low_at, place)
        message = f"{value:g} in episode {episode}, step {step}, is {ratio(furthest / tail[at])} times as far from the "
        message += f"median {middle[place]:g} as all values except {_few(len(tail) - 1 - at, sampled)}"
        odd = every > tail[at]
        where = some(np.append(sampled.episode[odd], episode))
        # A reset sets the first row of an episode; steps need not reach such values.
        level = "note" if len(where) > 2 and step <= 1 and (sampled.step[odd] <= 1).all() else "warning"
        yield of_dimension("outlier", level, message, column, place, (episode, step), where)


def _at(places: npt.NDArray[np.int64], place: int) -> tuple[int, int]:
    """Return the episode and the step of a dimension's lowest or highest value."""
    episode, step = places[place].tolist()
    return episode, step


def _few(count: int, sampled: Sampled) -> str:
    if len(sampled.row) == sampled.rows:
        return "a value" if count <= 2 else f"{count} values"
    return "a few values"


def _scales(column: SampledColumn, spread: Floats) -> Iterator[Finding]:
    """Yield findings about dimensions that vary much more than all other dimensions of the column."""
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
            message = f"varies {times} times as much as {'the other dimension' if more > 1 else 'any other dimension'}"
            where = _at(column.high_at, place)
            yield of_dimension("scale-apart", level, message, column, place, where)
    lowest = order[: max(1, len(order) // 4) + 1]
    ratios = spread[lowest[1:]] / spread[lowest[:-1]]
    at = int(ratios.argmax())
    if ratios[at] >= _APART and len(known) > 2:
        for place in lowest[: at + 1].tolist():
            message = f"varies {ratio(ratios[at])} times less than any other dimension"
            where = _at(column.high_at, place)
            yield of_dimension("scale-apart", "note", message, column, place, where)


def _saturated(column: SampledColumn, sampled: Sampled) -> Iterator[Finding]:
    """Yield findings about dimensions whose value is often the lowest or the highest value of the dimension."""
    if column.name == "reward":
        return
    there = np.isfinite(column.values)
    count = np.maximum(there.sum(axis=0), 1)
    # The scale is the range of most values: with one outlier, all other values would be near the lowest.
    most = np.quantile(np.where(there, column.values, column.low), [0.05, 0.95], axis=0)
    near = 1e-6 * (most[1] - most[0])
    lowest, highest = there & (column.values <= column.low + near), there & (column.values >= column.high - near)
    low, high = lowest.sum(axis=0) / count, highest.sum(axis=0) / count
    action = column.name.startswith("action")
    for place in np.flatnonzero((column.high > column.low) & (low + high >= _SATURATED)).tolist():
        if _values_between(column.values[:, place]) < 20 or (not action and (low[place] == 0 or high[place] == 0)):
            continue
        both = low[place] + high[place]
        # Environments often clip observations; for example, Walker2d clips speeds at 10.
        level = "warning" if action and both >= _SATURATED_ACTION else "note"
        message = (
            f"{both:.0%} of the values equal the lowest ({column.low[place]:g}) or the highest ({column.high[place]:g})"
        )
        rows = np.flatnonzero(lowest[:, place] | highest[:, place])
        where = sampled.where(int(rows[0])), some(sampled.episode[rows])
        yield of_dimension("saturated", level, message, column, place, *where)


def _values_between(values: Floats) -> int:
    """Return the number of distinct values between the lowest and the highest value. Only the first few hundred of the
    values between them are counted.
    """
    values = values[np.isfinite(values)]
    inside = values[(values > values.min(initial=np.inf)) & (values < values.max(initial=-np.inf))]
    return len(np.unique(inside[:500]))


def _times_255(column: SampledColumn) -> Iterator[Finding]:
    """Yield findings about fractional actions that reach 255 times a usual limit (1, 2, 0.5 or 0.4)."""
    if not column.name.startswith("action"):
        return
    for place in range(column.width):
        reach = max(abs(column.low[place]), abs(column.high[place]))
        one_sided = abs(column.low[place]) < 0.01 * reach
        even = abs(column.low[place] + column.high[place]) < 0.03 * reach
        values = column.values[:500, place]
        fits = any(0.97 <= reach / (_BYTE * unit) <= 1.0001 for unit in (0.4, 0.5, 1.0, 2.0, 3.0))
        if fits and (one_sided or even) and np.isfinite(values).any() and (np.nan_to_num(values) % 1 != 0).any():
            message = f"ranges from {column.low[place]:g} to {column.high[place]:g}: probably multiplied by 255"
            at = column.high_at if column.high[place] == reach else column.low_at
            yield of_dimension("times-255", "warning", message, column, place, _at(at, place))


def _stuck(column: SampledColumn, sampled: Sampled) -> Iterator[Finding]:
    """Yield findings about dimensions that usually change, but stay constant for many rows while siblings change."""
    if not column.name.startswith("observation") or column.width < 2:
        return
    follows = np.diff(sampled.row) == 1  # also across episodes, between which a repeated value is even less likely
    same = (np.diff(column.values, axis=0) == 0) & follows[:, None]
    changes = (~same).sum(axis=1)
    moving = follows & (changes >= max(1.0, 0.5 * float(np.median(changes[follows])) if follows.any() else 1.0))
    for place in range(column.width):
        kept = same[:, place] & moving
        share = kept.mean()
        if not 0 < share < 0.5:
            continue
        edges = np.flatnonzero(np.diff(kept, prepend=False, append=False))
        begins, lengths = edges[::2], edges[1::2] - edges[::2]  # first row and length of the runs of equal values
        at = int(lengths.argmax())
        first, length = int(begins[at]), int(lengths[at])
        elsewhere = (kept.sum() - lengths[lengths >= max(8, length // 4)].sum()) / max(1, len(kept))
        long = begins[lengths >= _STUCK]
        if length < _STUCK or elsewhere >= 0.02 or _rests(column, place, first, length, long, sampled):
            continue
        episode, step = sampled.where(first)
        steps = f"{length} {'steps' if length < PIECE - 1 else 'steps and more'}"
        message = f"stays {column.values[first, place]:g} for {steps} from episode {episode}, step {step}"
        where = some(sampled.episode[first : first + length + 1])
        yield of_dimension(
            "stuck", "warning", f"{message}, while other dimensions change", column, place, (episode, step), where
        )


def _rests(
    column: SampledColumn, place: int, first: int, length: int, long: npt.NDArray[np.int64], sampled: Sampled
) -> bool:
    """Whether a run of equal values is explained by an object that rests or is at its limit, and not by a failed
    sensor.

    Args:
        column, place: The column, and the index of the dimension.
        first, length: First row of the run of equal values, and its number of rows.
        long: First rows of all long runs of equal values.
        sampled: The rows.
    """
    values = column.values[:, place]
    # For example, a lidar with no object in its range.
    at_limit = values[first] in (column.low[place], column.high[place])
    # An untouched object rests until the episode ends, or starts to move gradually; it does not jump.
    after = min(first + length + 1, len(values) - 1)
    same_episode = sampled.episode[first] == sampled.episode[after - 1]
    untouched = sampled.step[first] == 0 and same_episode and not _jumps(values, after, sampled)
    places = len(np.unique(values[long]))
    return at_limit or bool(untouched) or places > 2 or _came_to_rest(values, first)


def _jumps(values: Floats, row: int, sampled: Sampled) -> bool:
    """Whether a value changes at a row by much more than usual, inside an episode."""
    changes = np.abs(np.diff(values))
    usual = float(np.quantile(changes[changes > 0], 0.9)) if (changes > 0).any() else np.inf
    return bool(sampled.episode[row] == sampled.episode[row - 1]) and float(changes[row - 1]) > 3 * usual


def _came_to_rest(values: Floats, first: int) -> bool:
    """Whether a value changed only little before its run of equal values, as when an object comes to rest. The value of
    a failed sensor stops abruptly.
    """
    changes = np.abs(np.diff(values))
    usual = float(np.median(changes[changes > 0])) if (changes > 0).any() else 0.0
    return first > 0 and float(changes[max(0, first - 3) : first].max(initial=0.0)) < 0.1 * usual


_PARTS = 8
_FEWEST_ROWS = 150
_FEWEST_IN_EPISODE = 16
# Smallest distance between the values of some parts and the values of the other parts that counts, as a multiple of the
# larger of the two ranges, by the number of episodes in the smaller group. With few episodes, two groups may differ by
# chance.
_BESIDE = {2: 50.0, 3: 1.5, 4: 1.0}
# Smallest number of episodes in each part, if the parts that differ are not one contiguous stretch.
_FEWEST_SCATTERED = 3
_WIDER = 100.0
_WIDER_EPISODES = 30.0
# Factor by which most episodes of the parts with the larger range vary more; the least and the most variable episodes
# are left out.
_EACH_WIDER = 10.0
_NEGLIGIBLE, _NEGLIGIBLE_SEEN = 1e-4, 1e-2
# If a larger share of dimensions differs at once, the behaviour differs, not a sensor.
_MOST_AT_ONCE = 0.25


@dataclass(frozen=True)
class _Parts:
    """Sampled rows in two groupings: by segments of equal length, and by episodes.

    Args:
        sampled: The rows.
        count: Number of segments.
        part: The segment of each row, ``[n]``.
        begins, length: First row and number of rows of each sampled episode.
    """

    sampled: Sampled
    count: int
    part: Int64s
    begins: Int64s
    length: Int64s

    def rows(self, parts: Int64s) -> Bools:
        """Return a mask of the rows in the given segments."""
        return np.asarray(np.isin(self.part, parts))

    def episodes(self, parts: Int64s) -> tuple[Int64s, Int64s]:
        """Return the indices into ``begins`` of two groups of long episodes: the episodes that lie mostly in the given
        segments, and all other long episodes.
        """
        share = np.add.reduceat(self.rows(parts).astype(np.float64), self.begins) / self.length
        enough = self.length >= _FEWEST_IN_EPISODE
        return np.flatnonzero(enough & (share >= 0.5)), np.flatnonzero(enough & (share < 0.5))

    def smaller_group(self, parts: Int64s) -> int:
        """Return the size of the smaller of the two groups that ``episodes`` returns; 0 if the segments are scattered
        and there are too few long episodes.
        """
        odd, rest = self.episodes(parts)
        one_stretch = int(parts.max()) - int(parts.min()) + 1 in (len(parts), self.count)
        whole = one_stretch or len(odd) + len(rest) >= _FEWEST_SCATTERED * self.count
        return min(len(odd), len(rest)) if whole else 0

    def finding(self, message: str, column: SampledColumn, place: int, parts: Int64s, *, warns: bool) -> Finding:
        """Return a finding about the given segments: a warning if ``warns``, else a note."""
        rows = np.flatnonzero(self.rows(parts))
        where, level = self.sampled.where(int(rows[0])), "warning" if warns else "note"
        return of_dimension("drift", level, message, column, place, where, some(self.sampled.episode[rows]))


def about_parts(sampled: Sampled) -> Iterator[Finding]:
    """Yield findings about dimensions whose values in some parts of the data contradict all other parts."""
    count = min(_PARTS, len(sampled.row) // _FEWEST_ROWS)
    if not len(sampled.row):
        return
    part = np.arange(len(sampled.row)) * count // len(sampled.row)
    begins = np.flatnonzero(np.diff(sampled.episode, prepend=-1))
    parts = _Parts(sampled, count, part, begins, np.diff(np.append(begins, len(sampled.row))))
    for column in sampled.columns.values():
        if not column.continuous or column.name == "reward":
            continue
        found = list(_between(column, parts)) if count >= 2 else []
        yield from _as_notes_if_many(found, column)
        known = {finding.dimension for finding in found}
        more = [finding for finding in _between_episodes(column, parts) if finding.dimension not in known]
        yield from _as_notes_if_many(more, column)


def _as_notes_if_many(found: list[Finding], column: SampledColumn) -> Iterator[Finding]:
    """Change the level of findings to "note" if observations differ between parts in many dimensions at once."""
    many = column.name.startswith("observation") and len(found) > max(1, _MOST_AT_ONCE * column.width)
    for finding in found:
        yield replace(finding, level="note") if many else finding


def _between(column: SampledColumn, parts: _Parts) -> Iterator[Finding]:
    shares = (0.01, 0.99)
    found = [quantiles(column.values[parts.part == number], shares) for number in range(parts.count)]
    low, high = (np.stack([one[which] for one in found]) for which in (0, 1))
    spread = high - low
    least = _rounding(spread)
    usual = _together(spread) if column.name.startswith("observation") else spread
    for place in range(column.width):
        if not np.isfinite(spread[:, place]).all():
            continue
        finding = _beside(column, place, low[:, place], high[:, place], parts)
        finding = finding or _still(column, place, spread[:, place], parts)
        finding = finding or _wider(column, place, usual[:, place], parts, least)
        if finding is not None:
            yield finding


def _together(spread: Floats) -> Floats:
    """Return the range of each dimension in each part, divided by the ranges of the other dimensions in this part. The
    division compensates for parts with little motion, in which all ranges are small.
    """
    moving = (spread > 0).all(axis=0)
    if moving.sum() < 4:
        return spread
    logs = np.log(spread[:, moving])
    logs = logs - logs.mean(axis=0)
    return np.asarray(spread / np.exp(np.median(logs, axis=1))[:, None])


def _rounding(sizes: Floats, negligible: float = _NEGLIGIBLE) -> float:
    """Return the largest range that rounding errors can cause: a share of the median of positive ``sizes``, or 0 if no
    size is positive.
    """
    known = sizes[np.isfinite(sizes) & (sizes > 0)]
    return negligible * float(np.median(known)) if len(known) else 0.0


def _beside(column: SampledColumn, place: int, low: Floats, high: Floats, parts: _Parts) -> Finding | None:
    """Return a finding if all values of some parts are below, or above, all values of the other parts."""
    order = np.argsort(low)
    reach = np.maximum.accumulate(high[order])
    gaps = low[order][1:] - reach[:-1]
    at = int(gaps.argmax())
    spread = float(np.median(high - low))
    if spread <= 0 or gaps[at] <= spread:
        return None
    odd = order[at + 1 :] if len(order) - at - 1 <= at + 1 else order[: at + 1]
    rest = np.setdiff1d(order, odd)
    widest = max(float(high[some_of].max() - low[some_of].min()) for some_of in (odd, rest))
    message = (
        f"between {low[odd].min():g} and {high[odd].max():g} in {_said(odd, len(low))}, and between "
        f"{low[rest].min():g} and {high[rest].max():g} in all other rows"
    )
    warns = gaps[at] > _BESIDE.get(min(parts.smaller_group(odd), max(_BESIDE)), np.inf) * widest
    return parts.finding(message, column, place, odd, warns=warns)


def _gap(ordered: Floats, inside: slice, factor: float, least: float) -> int | None:
    """Return the position of the only large gap in ascending positive numbers; None if there is no such gap.

    If some parts use another unit of measurement, their ranges differ by a constant factor, so all ranges form two
    groups. If a door is opened in some episodes and stays closed (except for rounding) in others, each episode has a
    different range, and there are no two groups.

    Args:
        ordered: The numbers, ascending.
        inside: The candidate positions; the gap lies directly after one of these positions.
        factor: A gap is reported if the number above it is at least ``factor`` times the number below it.
        least: Numbers below ``least`` are treated as rounding errors.
    """
    ratios = ordered[1:] / np.maximum(ordered[:-1], 1e-300)
    at = int(ratios[inside].argmax()) + inside.start
    below, above = ordered[: at + 1], ordered[at + 1 :]
    within = max(_reach(below), _reach(above))
    return at if ratios[at] >= max(factor, within) and float(np.median(below)) > least else None


def _reach(ordered: Floats) -> float:
    """Return the ratio of the highest to the lowest number. If there are many numbers, the lowest 10% and the highest
    10% are ignored.
    """
    cut = len(ordered) // 10
    return float(ordered[len(ordered) - 1 - cut] / max(ordered[cut], 1e-300))


def _still(column: SampledColumn, place: int, spread: Floats, parts: _Parts) -> Finding | None:
    """Return a finding if values never change in some parts, and nearly always change in the other parts."""
    still = np.flatnonzero(spread <= 0)
    if not len(still) or len(still) > len(spread) // 2 + 1 or len(still) == len(spread):
        return None
    kept = [column.values[parts.part == number, place] for number in still]
    if not all((one == one[0]).all() for one in kept):
        return None
    moves = [np.diff(column.values[parts.part == number, place]) for number in np.flatnonzero(spread > 0)]
    if min(float((one != 0).mean()) for one in moves) < 0.5:
        return None  # the dimension also rests in the other parts
    value = kept[0][0]
    elsewhere = column.values[~parts.rows(still), place]
    # An open gripper, or a lidar without an object, is at a limit that its values also reach in other rows.
    at_limit = value in (column.low[place], column.high[place]) and bool((elsewhere == value).any())
    message = f"always {value:g} in {_said(still, len(spread))}, and changes in all other rows"
    return parts.finding(
        message, column, place, still, warns=parts.smaller_group(still) >= min(_BESIDE) and not at_limit
    )


def _wider(column: SampledColumn, place: int, spread: Floats, parts: _Parts, least: float) -> Finding | None:
    """Return a finding if values have a much larger range in some parts than in the other parts."""
    order = np.argsort(spread)
    ordered = spread[order]
    if ordered[0] <= 0:
        return None
    factor = _WIDER * (3 if column.name.startswith("observation") else 1)
    at = _gap(ordered, slice(0, len(ordered) - 1), factor, least)
    if at is None:
        return None
    odd = order[at + 1 :] if len(order) - at - 1 <= at + 1 else order[: at + 1]
    more = "more" if odd[0] in order[at + 1 :] else "less"
    times = ratio(ordered[at + 1] / ordered[at])
    message = f"varies {times} times {more} in {_said(odd, len(spread))} than in all other rows"
    wide, narrow = (_spans(column, place, parts, which) for which in parts.episodes(order[at + 1 :]))
    # No goal causes such large actions, in any episode.
    few = parts.smaller_group(odd) if column.name.startswith("observation") else min(map(len, parts.episodes(odd)))
    warns = few >= min(_BESIDE) and _inner(wide)[0] > (_EACH_WIDER if few > 2 else _WIDER) * _inner(narrow)[1]
    return parts.finding(message, column, place, odd, warns=warns)


def _spans(column: SampledColumn, place: int, parts: _Parts, episodes: Int64s) -> Floats:
    """Return the range of a dimension's values in each given episode."""
    ends = parts.begins + parts.length
    rows = [column.values[parts.begins[one] : ends[one], place] for one in episodes]
    return np.sort([float(np.nanmax(one) - np.nanmin(one)) for one in rows if np.isfinite(one).any()])


def _inner(ordered: Floats) -> tuple[float, float]:
    """Return the lowest and the highest number, or NaN if there are no numbers. If there are many numbers, the lowest
    10% and the highest 10% are ignored.
    """
    if not len(ordered):
        return np.nan, np.nan
    cut = len(ordered) // 10
    return float(ordered[cut]), float(ordered[len(ordered) - 1 - cut])


def _said(parts: Int64s, count: int) -> str:
    """Describe segments as a text: adjacent segments as a range of rows in percent; otherwise, how many segments there
    are.
    """
    first, last = int(parts.min()), int(parts.max())
    if last - first + 1 == len(parts):
        return f"the rows from {first / count:.0%} to {(last + 1) / count:.0%} of the data"
    return f"{len(parts)} of {count} equal parts of the data"


def _between_episodes(column: SampledColumn, parts: _Parts) -> Iterator[Finding]:
    """Yield findings about dimensions whose range is much larger in some episodes than in all other episodes."""
    seen = column.name.startswith("observation")
    enough = parts.length >= _FEWEST_IN_EPISODE
    if (seen and column.width > 64) or enough.sum() < (12 if seen else 8):
        return
    away = np.abs(np.nan_to_num(column.values - np.nan_to_num(np.nanmedian(column.values, axis=0))))
    begins = parts.begins[enough]
    reach = np.maximum.reduceat(away, parts.begins, axis=0)[enough]
    least = _rounding(reach, _NEGLIGIBLE_SEEN if seen else _NEGLIGIBLE)
    for place in range(column.width):
        order = np.argsort(reach[:, place])
        ordered = reach[order, place]
        fewest = max(3 if seen else 2, len(ordered) // 20)
        # Observed objects rest in some episodes, and move in others.
        factor = _WIDER_EPISODES * (10 if seen else 1)
        at = _gap(ordered, slice(fewest - 1, len(ordered) - fewest), factor, least)
        if at is None:
            continue
        wide = np.sort(begins[order[at + 1 :]])
        episode, step = parts.sampled.where(int(wide[0]))
        where = f"{len(wide)} of {int(enough.sum())} sampled episodes, such as episode {episode}"
        message = (
            f"has {ratio(ordered[at + 1] / ordered[at])} times larger values in {where}, than in the other episodes"
        )
        odd = some(parts.sampled.episode[wide])
        yield of_dimension("scale-by-episode", "warning", message, column, place, (episode, step), odd)


# A sketch has 8 sums over the observations of an episode: two mixtures of dimensions, weighted by four waves each.
_MIXTURES, _WAVES = 2, 4
_PERIOD = 4096
_SHORTEST = 6
_FEWEST, _NEIGHBOURS = 3, 8
# Largest distance of similar episodes, relative to the spread of episodes; and the smallest factor by which other
# distances are larger.
_NEAR, _NEARER = 0.01, 100.0
_NEARER_ON_A_LINE, _SPREAD_OUT = 1000.0, 0.3
# The share of episodes that is no coincidence.
_MANY = 0.05


class Sketches:
    """Computes a sketch of each episode: a few numbers. Nearly equal episodes have nearly equal sketches."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        waves = np.arange(_PERIOD)[:, None] * random.uniform(0.05, 1.5, _WAVES) + random.uniform(0, 6.28, _WAVES)
        self._waves = np.cos(waves)
        self._weights: dict[str, Floats] = {}
        self._middles: dict[str, Floats] = {}
        self._random = random
        self._open = np.zeros(_MIXTURES * _WAVES)
        self._rows = 0
        self._kept: list[Floats] = []
        self._lengths: list[Int64s] = []
        self.usable = True

    def add(self, numbers: Mapping[str, npt.NDArray[np.floating]], start: Bools, step: Int64s) -> None:
        """Add rows: columns of floats, a mask of rows that begin an episode, and each row's index in its episode."""
        if not numbers or (self._weights and self._weights.keys() != numbers.keys()):
            self.usable = False
        if not self.usable or not len(start):
            return
        mixed = np.zeros((len(start), _MIXTURES))
        for name, found in numbers.items():
            flat = found.reshape(len(found), -1)
            if name not in self._weights:
                self._scales_of(name, flat)
            if flat.shape[1] != len(self._middles[name]):
                self.usable = False
                return
            # Computed in the dtype of the rows, which takes half the time; the precision suffices.
            away = (flat - self._middles[name].astype(flat.dtype)) @ self._weights[name].astype(flat.dtype)
            mixed += np.nan_to_num(away, nan=0.0, posinf=0.0, neginf=0.0)
        waved = (mixed[:, :, None] * self._waves[step % _PERIOD][:, None, :]).reshape(len(start), -1)
        sums, lengths = sums_by_episode(start, waved, self._open, self._rows)
        self._keep(sums[:-1], lengths[:-1])
        self._open, self._rows = sums[-1], int(lengths[-1])

    def _scales_of(self, name: str, flat: npt.NDArray[np.floating]) -> None:
        """Estimate the centre and the scale of each dimension from the first rows, so that all dimensions have equal
        weight in a sketch.
        """
        finite = np.where(np.isfinite(flat), flat, 0.0).astype(np.float64)
        self._middles[name] = np.median(finite, axis=0)
        scale = np.abs(finite - self._middles[name]).mean(axis=0)
        weights = self._random.normal(size=(flat.shape[1], _MIXTURES))
        self._weights[name] = weights / np.where(scale > 0, scale, np.inf)[:, None]

    def _keep(self, sums: Floats, lengths: Int64s) -> None:
        self._kept.append((sums / np.sqrt(lengths)[:, None]).astype(np.float32))
        self._lengths.append(lengths)

    def findings(self, hashes: UInt64s) -> Iterator[Finding]:
        """Yield findings about pairs of nearly equal episodes. Pairs with equal ``hashes`` are left out."""
        if not self.usable or not self._rows:
            return
        lengths = np.append(np.concatenate([*self._lengths, np.zeros(0, np.int64)]), self._rows)
        last = (self._open / np.sqrt(self._rows))[None].astype(np.float32)
        pairs, certain = _near(np.concatenate([*self._kept, last]), lengths.astype(np.int64), hashes)
        if not len(pairs):
            return
        later = np.unique(pairs.max(axis=1))
        first = int(pairs[0].min()), int(pairs[0].max())
        many = len(later) >= max(1 if certain else 3, _MANY * len(lengths))
        level = "warning" if many else "note"
        message = (
            f"{len(later):,} of {len(lengths):,} episodes nearly equal another episode, such as episodes "
            f"{first[0]} and {first[1]}: probably the same recording with noise or rounding"
        )
        yield Finding("near-duplicates", level, message, None, None, None, first[1], 0, some(later))


def _near(sketches: Floats, lengths: Int64s, hashes: UInt64s) -> tuple[Int64s, bool]:
    """Return pairs of close episodes of equal length, and whether they are too close to be a coincidence.

    Episodes are sorted by length, and episodes of equal length by one number of their sketches. The sorting is repeated
    for three numbers of the sketch, and each episode is compared with the next episodes in each order.
    """
    count = len(lengths)
    nothing = np.zeros((0, 2), np.int64)
    if count < _FEWEST or len(hashes) != count or not np.isfinite(sketches).all():
        return nothing, False
    low, high = np.quantile(sketches, [0.1, 0.9], axis=0)
    scaled = sketches / np.where(high > low, (high - low) / 2.56, np.inf)
    nearest = np.full((count, 3 * 2 * _NEIGHBOURS), np.inf, np.float32)
    which = np.zeros(nearest.shape, np.int64)
    for turn in range(3):
        order = np.lexsort((scaled[:, 3 * turn % scaled.shape[1]], lengths))
        for apart in range(1, _NEIGHBOURS + 1):
            one, other = order[:-apart], order[apart:]
            away = np.sqrt(((scaled[one] - scaled[other]) ** 2).mean(axis=1))
            # Exact copies are left out, as another check reports them; so are short episodes, which have too few
            # variants.
            fits = (lengths[one] == lengths[other]) & (hashes[one] != hashes[other]) & (lengths[one] >= _SHORTEST)
            place = 2 * (_NEIGHBOURS * turn + apart - 1)
            nearest[one, place], which[one, place] = np.where(fits, away, np.inf), other
            nearest[other, place + 1], which[other, place + 1] = np.where(fits, away, np.inf), one
    best = nearest.argmin(axis=1)
    least = nearest[np.arange(count), best]
    others = np.where(np.isfinite(nearest), nearest, np.nan)
    with np.errstate(all="ignore"):
        usual = np.array(_medians(others))
    known = np.isfinite(usual)
    if not known.any():
        # If no other episodes have their length, the absolute distance decides.
        usual = np.where(np.isfinite(least), 1.0, np.nan)
    middle = float(np.nanmedian(usual)) if np.isfinite(usual).any() else 0.0
    certain = middle > _SPREAD_OUT
    usual = np.where(np.isfinite(least), np.maximum(np.nan_to_num(usual), middle), np.inf)
    # With few episodes, the distances that occur by chance cannot be estimated.
    nearer = _NEARER if certain and count >= _NEIGHBOURS else _NEARER_ON_A_LINE
    near = (least < _NEAR) & (least * nearer < usual)
    found = np.flatnonzero(near)
    return np.stack([found, which[found, best[found]]], axis=1), certain


def _medians(rows: Floats) -> Floats:
    """Return the median of the numbers in each row that are not NaN; NaN for a row without such numbers."""
    ordered = np.sort(rows, axis=1)  # sorting puts NaN last
    count = np.isfinite(rows).sum(axis=1)
    found = ordered[np.arange(len(rows)), np.maximum(count // 2, 0).clip(max=rows.shape[1] - 1)]
    return np.where(count > 1, found, np.nan)


def about_splits(hashes: UInt64s, lengths: Int64s, first_rows: Int64s, splits: Mapping[str, int]) -> Iterator[Finding]:
    """Yield findings about episodes that occur in two splits.

    Args:
        hashes, lengths, first_rows: Hash, length and first row of each episode.
        splits: Number of rows of each split, in the order of the splits in the data.
    """
    if len(splits) < 2:
        return
    names, ends = list(splits), np.cumsum(list(splits.values()))
    split = np.searchsorted(ends, first_rows, side="right")
    known: dict[int, int] = {}
    shared: dict[tuple[int, int], list[int]] = {}
    for episode in np.flatnonzero(lengths >= _SHORTEST).tolist():
        first = known.setdefault(int(hashes[episode]), int(split[episode]))
        if first != split[episode]:
            shared.setdefault((first, int(split[episode])), []).append(episode)
    for (first, second), episodes in shared.items():
        message = (
            f"{len(episodes):,} of the episodes of the split {names[second]!r} are in {names[first]!r}, too, such as "
            f"episode {episodes[0]}: held-out episodes are also used for training"
        )
        where = some(episodes)
        yield Finding("splits-share-episodes", "warning", message, None, None, None, episodes[0], 0, where)
