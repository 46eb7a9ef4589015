"""Checks of parts of the data that should be alike: stretches of rows, and episodes.

Every episode of a recording that is right may have its own goal, and a thing that is touched in it or not. So a part is
odd only if it has several episodes, and if what tells it from the rest is more than what tells these from each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mouse_core.inspect._checks.finding import Finding, of_dimension, ratio, some
from mouse_core.inspect._checks.sampling import Bools, Floats, Int64s, Sampled, SampledColumn, quantiles

_PARTS = 8
_FEWEST_ROWS = 150
_FEWEST_IN_EPISODE = 16
# Where the values of some parts lie wholly beside those of the others: by so many times what either of them span, by
# the number of episodes on the side that has fewer. Of few episodes chance sets two halves apart.
_BESIDE = {2: 50.0, 3: 1.5, 4: 1.0}
# Episodes of each part, where those that differ are not one stretch of the data.
_FEWEST_SCATTERED = 3
_WIDER = 100.0
_WIDER_EPISODES = 30.0
# Most episodes of the parts that vary more do so by this factor, those that vary least and most left out.
_EACH_WIDER = 10.0
_NEGLIGIBLE, _NEGLIGIBLE_SEEN = 1e-4, 1e-2
# Where more of the dimensions differ at once, it is what was done that differs, not a sensor.
_MOST_AT_ONCE = 0.25


@dataclass(frozen=True)
class _Parts:
    """Sampled rows, cut into stretches of equal length, and into episodes.

    Args:
        sampled: The rows.
        count: How many stretches there are.
        part: Which of them each row lies in, ``[n]``.
        begins, length: Of each episode that was sampled, the first of its rows, and how many there are.
    """

    sampled: Sampled
    count: int
    part: Int64s
    begins: Int64s
    length: Int64s

    def rows(self, parts: Int64s) -> Bools:
        """Return the rows of some stretches as a mask."""
        return np.asarray(np.isin(self.part, parts))

    def episodes(self, parts: Int64s) -> tuple[Int64s, Int64s]:
        """Return long episodes that lie mostly in some stretches, and the others, as places in ``begins``."""
        share = np.add.reduceat(self.rows(parts).astype(np.float64), self.begins) / self.length
        enough = self.length >= _FEWEST_IN_EPISODE
        return np.flatnonzero(enough & (share >= 0.5)), np.flatnonzero(enough & (share < 0.5))

    def tell(self, parts: Int64s) -> int:
        """Return the smaller of the numbers of odd and of usual episodes; 0 if neither is informative."""
        odd, rest = self.episodes(parts)
        one_stretch = int(parts.max()) - int(parts.min()) + 1 in (len(parts), self.count)
        whole = one_stretch or len(odd) + len(rest) >= _FEWEST_SCATTERED * self.count
        return min(len(odd), len(rest)) if whole else 0

    def finding(self, message: str, column: SampledColumn, place: int, parts: Int64s, *, loud: bool) -> Finding:
        """A finding about some stretches, as a note unless it is loud."""
        rows = np.flatnonzero(self.rows(parts))
        where, level = self.sampled.where(int(rows[0])), "warning" if loud else "note"
        return of_dimension("drift", level, message, column, place, where, some(self.sampled.episode[rows]))


def about_parts(sampled: Sampled) -> Iterator[Finding]:
    """Findings about dimensions that another part of the data contradicts."""
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
        yield from _less_loud(found, column)
        known = {finding.dimension for finding in found}
        more = [finding for finding in _between_episodes(column, parts) if finding.dimension not in known]
        yield from _less_loud(more, column)


def _less_loud(found: list[Finding], column: SampledColumn) -> Iterator[Finding]:
    """Lower findings to notes if observations differ in many dimensions at once."""
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
    """Return the ranges of dimensions in each part, relative to their siblings; all shrink where little happens."""
    moving = (spread > 0).all(axis=0)
    if moving.sum() < 4:
        return spread
    logs = np.log(spread[:, moving])
    logs = logs - logs.mean(axis=0)
    return np.asarray(spread / np.exp(np.median(logs, axis=1))[:, None])


def _rounding(sizes: Floats, negligible: float = _NEGLIGIBLE) -> float:
    """Return sizes that are small beside the usual range of the dimension; ``sizes`` are positive if it has a range."""
    known = sizes[np.isfinite(sizes) & (sizes > 0)]
    return negligible * float(np.median(known)) if len(known) else 0.0


def _beside(column: SampledColumn, place: int, low: Floats, high: Floats, parts: _Parts) -> Finding | None:
    """Values of some parts wholly below those of the others."""
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
        f"{low[rest].min():g} and {high[rest].max():g} elsewhere"
    )
    loud = gaps[at] > _BESIDE.get(min(parts.tell(odd), max(_BESIDE)), np.inf) * widest
    return parts.finding(message, column, place, odd, loud=loud)


def _gap(ordered: Floats, inside: slice, factor: float, least: float) -> int | None:
    """Behind which of some positive numbers, in order, there is a gap of a factor, and hardly one on either side of it.

    What is measured in another unit differs by one factor. Of a door that is opened in some episodes, and at rest but
    for rounding in others, every episode has another number: those are no two groups.

    Args:
        ordered: The numbers.
        inside: Behind which of them the gap may be.
        factor: How large it is at least.
        least: Of the lower numbers, what is not merely rounding.
    """
    ratios = ordered[1:] / np.maximum(ordered[:-1], 1e-300)
    at = int(ratios[inside].argmax()) + inside.start
    below, above = ordered[: at + 1], ordered[at + 1 :]
    within = max(_reach(below), _reach(above))
    return at if ratios[at] >= max(factor, within) and float(np.median(below)) > least else None


def _reach(ordered: Floats) -> float:
    """The highest over the lowest, but for a tenth at both ends where there are many."""
    cut = len(ordered) // 10
    return float(ordered[len(ordered) - 1 - cut] / max(ordered[cut], 1e-300))


def _still(column: SampledColumn, place: int, spread: Floats, parts: _Parts) -> Finding | None:
    """Values that never change in some parts, and nearly always do in the others."""
    still = np.flatnonzero(spread <= 0)
    if not len(still) or len(still) > len(spread) // 2 + 1 or len(still) == len(spread):
        return None
    kept = [column.values[parts.part == number, place] for number in still]
    if not all((one == one[0]).all() for one in kept):
        return None
    moves = [np.diff(column.values[parts.part == number, place]) for number in np.flatnonzero(spread > 0)]
    if min(float((one != 0).mean()) for one in moves) < 0.5:
        return None  # it rests elsewhere, too
    value = kept[0][0]
    elsewhere = column.values[~parts.rows(still), place]
    # A gripper that is open, or a lidar that sees nothing, is at its limit, where it has been elsewhere, too.
    at_limit = value in (column.low[place], column.high[place]) and bool((elsewhere == value).any())
    message = f"always {value:g} in {_said(still, len(spread))}, and changes elsewhere"
    return parts.finding(message, column, place, still, loud=parts.tell(still) >= min(_BESIDE) and not at_limit)


def _wider(column: SampledColumn, place: int, spread: Floats, parts: _Parts, least: float) -> Finding | None:
    """Values that spread over much more in some parts than in others."""
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
    message = f"varies {ratio(ordered[at + 1] / ordered[at])} times {more} in {_said(odd, len(spread))} than elsewhere"
    wide, narrow = (_spans(column, place, parts, which) for which in parts.episodes(order[at + 1 :]))
    # No goal has it that actions are so much larger, in whichever episodes.
    few = parts.tell(odd) if column.name.startswith("observation") else min(map(len, parts.episodes(odd)))
    loud = few >= min(_BESIDE) and _inner(wide)[0] > (_EACH_WIDER if few > 2 else _WIDER) * _inner(narrow)[1]
    return parts.finding(message, column, place, odd, loud=loud)


def _spans(column: SampledColumn, place: int, parts: _Parts, episodes: Int64s) -> Floats:
    """Return the range of a dimension in each of some episodes, in order."""
    ends = parts.begins + parts.length
    rows = [column.values[parts.begins[one] : ends[one], place] for one in episodes]
    return np.sort([float(np.nanmax(one) - np.nanmin(one)) for one in rows if np.isfinite(one).any()])


def _inner(ordered: Floats) -> tuple[float, float]:
    """The lowest and the highest, but for a tenth at both ends; NaN of nothing."""
    if not len(ordered):
        return np.nan, np.nan
    cut = len(ordered) // 10
    return float(ordered[cut]), float(ordered[len(ordered) - 1 - cut])


def _said(parts: Int64s, count: int) -> str:
    """Parts of the data in words, as from where to where they reach."""
    first, last = int(parts.min()), int(parts.max())
    if last - first + 1 == len(parts):
        return f"the rows from {first / count:.0%} to {(last + 1) / count:.0%} of the data"
    return f"{len(parts)} of {count} equal parts of the data"


def _between_episodes(column: SampledColumn, parts: _Parts) -> Iterator[Finding]:
    """Values that reach much further in some episodes than in all others."""
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
        # Things that are seen lie still in some episodes, and are moved in others.
        factor = _WIDER_EPISODES * (10 if seen else 1)
        at = _gap(ordered, slice(fewest - 1, len(ordered) - fewest), factor, least)
        if at is None:
            continue
        wide = np.sort(begins[order[at + 1 :]])
        episode, step = parts.sampled.where(int(wide[0]))
        where = f"{len(wide)} of {int(enough.sum())} episodes that were sampled, such as {episode}"
        message = f"reaches {ratio(ordered[at + 1] / ordered[at])} times as far in {where}, as in the others"
        odd = some(parts.sampled.episode[wide])
        yield of_dimension("scale-by-episode", "warning", message, column, place, (episode, step), odd)
