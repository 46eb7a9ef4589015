"""What differs between parts of the data that should be alike: stretches of rows, and episodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mouse_core.inspect._checks.finding import Finding, of_dimension
from mouse_core.inspect._checks.sampling import Floats, Int64s, Sampled, SampledColumn, quantiles

_PARTS = 8
_FEWEST_ROWS = 150
_FEWEST_IN_EPISODE = 16
# Where the values of some parts lie wholly beside those of the others, by so many times what a part spans.
_BESIDE = 1.0
_WIDER = 100.0
_WIDER_EPISODES = 30.0
_NEGLIGIBLE = 1e-4
# Where more of the dimensions differ at once, it is what was done that differs, not a sensor.
_MOST_AT_ONCE = 0.25


def about_parts(sampled: Sampled) -> Iterator[Finding]:
    """Findings about dimensions that another part of the data contradicts."""
    count = min(_PARTS, len(sampled.row) // _FEWEST_ROWS)
    part = np.arange(len(sampled.row)) * count // max(1, len(sampled.row))
    for column in sampled.columns.values():
        if not column.continuous or column.name == "reward":
            continue
        found = list(_between(column, part, count, sampled)) if count >= 2 else []
        yield from _less_loud(found, column)
        known = {finding.dimension for finding in found}
        more = [finding for finding in _between_episodes(column, sampled) if finding.dimension not in known]
        yield from _less_loud(more, column)


def _less_loud(found: list[Finding], column: SampledColumn) -> Iterator[Finding]:
    """The same, as notes where observations differ in many dimensions at once."""
    many = column.name.startswith("observation") and len(found) > max(1, _MOST_AT_ONCE * column.width)
    for finding in found:
        yield replace(finding, level="note") if many else finding


def _between(column: SampledColumn, part: Int64s, count: int, sampled: Sampled) -> Iterator[Finding]:
    shares = (0.01, 0.99)
    found = [quantiles(column.values[part == number], shares) for number in range(count)]
    low, high = (np.stack([one[which] for one in found]) for which in (0, 1))
    spread = high - low
    least = _rounding(spread)
    usual = _together(spread) if column.name.startswith("observation") else spread
    for place in range(column.width):
        if not np.isfinite(spread[:, place]).all():
            continue
        finding = _beside(column, place, low[:, place], high[:, place], part, sampled) or _wider(
            column, place, usual[:, place], part, sampled, least
        )
        if finding is not None:
            yield finding


def _together(spread: Floats) -> Floats:
    """What dimensions span in each part, beside what their siblings do: all span less where nothing much happens."""
    moving = (spread > 0).all(axis=0)
    if moving.sum() < 4:
        return spread
    logs = np.log(spread[:, moving])
    logs = logs - logs.mean(axis=0)
    return np.asarray(spread / np.exp(np.median(logs, axis=1))[:, None])


def _rounding(sizes: Floats) -> float:
    """What is small beside that which dimensions usually span, ``sizes`` being positive where they do."""
    known = sizes[np.isfinite(sizes) & (sizes > 0)]
    return _NEGLIGIBLE * float(np.median(known)) if len(known) else 0.0


def _beside(
    column: SampledColumn, place: int, low: Floats, high: Floats, part: Int64s, sampled: Sampled
) -> Finding | None:
    """Values of some parts wholly below those of the others."""
    order = np.argsort(low)
    reach = np.maximum.accumulate(high[order])
    gaps = low[order][1:] - reach[:-1]
    at = int(gaps.argmax())
    spread = float(np.median(high - low))
    if spread <= 0 or gaps[at] <= _BESIDE * spread:
        return None
    odd = order[at + 1 :] if len(order) - at - 1 <= at + 1 else order[: at + 1]
    where = _first_of(odd, part, sampled)
    rest = np.setdiff1d(order, odd)
    message = (
        f"between {low[odd].min():g} and {high[odd].max():g} in {_said(odd, len(low))}, and between "
        f"{low[rest].min():g} and {high[rest].max():g} elsewhere"
    )
    return of_dimension("drift", "warning", message, column, place, where)


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


def _wider(
    column: SampledColumn, place: int, spread: Floats, part: Int64s, sampled: Sampled, least: float
) -> Finding | None:
    """Values that spread over much more in some parts than in others, or over nothing."""
    order = np.argsort(spread)
    ordered = spread[order]
    if ordered[0] <= 0 < ordered[-1]:
        still = np.flatnonzero(spread <= 0)
        kept = [column.values[part == number, place] for number in still]
        if not all((one == one[0]).all() for one in kept) or len(still) > len(spread) // 2 + 1:
            return None
        moves = [np.diff(column.values[part == number, place]) for number in np.flatnonzero(spread > 0)]
        if min(float((one != 0).mean()) for one in moves) < 0.5:
            return None  # it rests elsewhere, too
        message = f"always {kept[0][0]:g} in {_said(still, len(spread))}, and changes elsewhere"
        return of_dimension("drift", "warning", message, column, place, _first_of(still, part, sampled))
    if ordered[0] <= 0:
        return None
    factor = _WIDER * (3 if column.name.startswith("observation") else 1)
    at = _gap(ordered, slice(0, len(ordered) - 1), factor, least)
    if at is None:
        return None
    ratios = ordered[1:] / ordered[:-1]
    odd = order[at + 1 :] if len(order) - at - 1 <= at + 1 else order[: at + 1]
    more = "more" if odd[0] in order[at + 1 :] else "less"
    message = f"varies {ratios[at]:,.0f} times {more} in {_said(odd, len(spread))} than elsewhere"
    return of_dimension("drift", "warning", message, column, place, _first_of(odd, part, sampled))


def _first_of(odd: Int64s, part: Int64s, sampled: Sampled) -> tuple[int, int]:
    return sampled.where(int(np.flatnonzero(part == odd.min())[0]))


def _said(parts: Int64s, count: int) -> str:
    """Parts of the data in words, as from where to where they reach."""
    first, last = int(parts.min()), int(parts.max())
    if last - first + 1 == len(parts):
        return f"the rows from {first / count:.0%} to {(last + 1) / count:.0%} of the data"
    return f"{len(parts)} of {count} equal parts of the data"


def _between_episodes(column: SampledColumn, sampled: Sampled) -> Iterator[Finding]:
    """Values that reach much further in some episodes than in all others."""
    if column.name.startswith("observation") and column.width > 64:
        return
    begins = np.flatnonzero(np.diff(sampled.episode, prepend=-1))
    length = np.diff(np.append(begins, len(sampled.episode)))
    enough = length >= _FEWEST_IN_EPISODE
    if enough.sum() < 8:
        return
    away = np.abs(np.nan_to_num(column.values - np.nan_to_num(np.nanmedian(column.values, axis=0))))
    reach = np.maximum.reduceat(away, begins, axis=0)[enough]
    least = _rounding(reach)
    for place in range(column.width):
        order = np.argsort(reach[:, place])
        ordered = reach[order, place]
        fewest = max(2, len(ordered) // 20)
        # Things that are seen lie still in some episodes, and are moved in others.
        factor = _WIDER_EPISODES * (10 if column.name.startswith("observation") else 1)
        at = _gap(ordered, slice(fewest - 1, len(ordered) - fewest), factor, least)
        if at is None:
            continue
        wide = begins[enough][order[at + 1 :]]
        episode, step = sampled.where(int(wide.min()))
        some = f"{len(wide)} of {int(enough.sum())} episodes that were sampled, such as {episode}"
        message = f"reaches {ordered[at + 1] / ordered[at]:,.0f} times as far in {some}, as in the others"
        yield of_dimension("scale-by-episode", "warning", message, column, place, (episode, step))
