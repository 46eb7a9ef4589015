"""What was learnt: curves, and where they end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from mouse_study._page.cards import Cards, by_variant, legend, title
from mouse_study._page.groups import Curve, Floats, Group, Series, curve, final_values, pooled, trained_names
from mouse_study._page.html import interval, number, table, text
from mouse_study._page.pictures import BEYOND, Line, curves, profiles, thinned
from mouse_study.results import Results
from mouse_study.statistics import band, meaning, probability_above, profile

_MOST_POINTS = 150
_THRESHOLDS = 121
# Relative difference of two ends that may be rounding: runs that are one training do not end above each other.
_TIE = 1e-6


def learning(results: Results, members: Sequence[Group], cards: Cards) -> str:
    """Curves of all that the training recorded."""
    parts = []
    for name in trained_names(results):
        series = results.series(name)
        shown = [_curves_card(name, variant, its, series) for variant, its in by_variant(members)]
        parts.append(f"<h2>{text(title(name))}</h2>{legend(members)}{cards.grid([card for card in shown if card])}")
    fewest = min((len(group.done) for group in members), default=0)
    return f'<section id="curves">{"".join(parts)}<p class="dim small">{_how_bands(fewest)}</p></section>'


def _curves_card(name: str, variant: str, members: Sequence[Group], series: Series) -> tuple[str, str, str] | None:
    lines, notes, size = [], [], 1
    for group in members:
        found = curve(group, series)
        if found is not None:
            line, points = _band_line(found, group.colour)
            lines.append(line)
            size = max(size, points)
        for run in group.runs:
            if run.status != "done" and run.run in series:
                steps, values, _ = thinned(*series[run.run], _MOST_POINTS)
                lines.append(Line(steps, values, group.colour, dashed=True))
    if not lines:
        return None
    if any(line.dashed for line in lines):
        notes.append("Dashed: runs that did not finish, which no band counts.")
    if size > 1:
        notes.append(f"Each point is the mean of {size} steps.")
    picture = curves(lines, label=f"{name} of {variant} by step", logarithmic=_spans_decades(lines))
    return variant, picture, f"<p>{' '.join(notes)}</p>" if notes else ""


def _band_line(found: Curve, place: int) -> tuple[Line, int]:
    steps, values, size = thinned(found.steps, found.values, _MOST_POINTS)
    bands = band([values])
    return Line(steps, bands.value, place, bands.low, bands.high), size


def _spans_decades(lines: Sequence[Line]) -> bool:
    """Whether values are all above 0 and spread so far that only their order of magnitude can be shown."""
    values = np.concatenate([part for line in lines for part in (line.y, line.low, line.high) if part is not None])
    values = values[np.isfinite(values)]
    return bool(len(values)) and bool(values.min() > 0.0) and bool(values.max() > 100.0 * values.min())


def _how_bands(fewest: int) -> str:
    return (
        "Lines are interquartile means over seeds (with fewer than four seeds, means). A band is a bootstrap interval "
        f"of 95%: seeds are drawn again and again from those that there are, within their variant. {meaning(fewest)}"
    )


def ends(results: Results, members: Sequence[Group], cards: Cards) -> str:
    """Where the runs ended: a table and performance profiles of each name."""
    parts = []
    for name in trained_names(results):
        series = results.series(name)
        rows = [_end_row(group, series) for group in members]
        rows += _pooled_rows(members, series)
        head = ("variant", "framework", "runs", "IQM", "95% band", "lowest", "highest")
        parts.append(f"<h3>{text(title(name))}</h3>{table(head, rows, texts=2)}")
        parts.append(_probabilities(members, series))
        shown = [_profile_card(name, variant, its, series) for variant, its in by_variant(members)]
        found = [card for card in shown if card]
        if found:
            parts.append(legend(members) + cards.grid(found))
    return (
        '<section id="ends"><h2>Where the runs ended</h2><p class="dim">The end of a run is the mean of the last tenth '
        "of the values that it recorded. The interquartile mean (IQM) leaves out the lowest and the highest quarter of "
        "the runs; a performance profile shows, for each value, the share of runs that ended above it."
        f"</p>{''.join(parts)}</section>"
    )


def _end_row(group: Group, series: Series) -> tuple[str, ...]:
    values = final_values(group.done, series)
    counted = f"{len(values)} of {len(group.runs)}" if len(values) < len(group.runs) else number(len(values))
    if not len(values):
        return (text(group.variant), text(group.framework), counted, *["–"] * 4)
    found = band([values])
    spread = (number(float(values.min())), number(float(values.max())))
    return (text(group.variant), text(group.framework), counted, number(float(found.value)), interval(found), *spread)


def _pooled_rows(members: Sequence[Group], series: Series) -> list[tuple[str, ...]]:
    """Over all variants, which are the strata, where there are several."""
    variants = len(by_variant(members))
    rows: list[tuple[str, ...]] = []
    for framework in sorted({group.framework for group in members}):
        its = [group for group in members if group.framework == framework]
        found = pooled(its, series) if variants > 1 and len(its) == variants else None
        if found is not None:
            values = np.concatenate([final_values(group.done, series) for group in its])
            spread = (number(float(values.min())), number(float(values.max())))
            cells = (number(len(values)), number(float(found.value)), interval(found), *spread)
            rows.append(("<i>all variants</i>", text(framework), *cells))
    return rows


def _probabilities(members: Sequence[Group], series: Series) -> str:
    """How often a run of one framework ends above one of the other."""
    said = []
    for variant, its in by_variant(members):
        for left, right in combinations(its, 2):
            ones, others = final_values(left.done, series), final_values(right.done, series)
            if min(len(ones), len(others)) < 2 or np.isnan(ones).any() or np.isnan(others).any():
                continue
            cells = (text(variant), text(left.framework), text(right.framework))
            share = f"{100 * probability_above(ones, others, tie=_TIE):.0f}%"
            said.append((*cells, share, number(len(ones) * len(others))))
    if not said:
        return ""
    head = ("variant", "a run of", "ends above one of", "how often", "pairs of runs")
    return f'{table(head, said, texts=3)}<p class="dim small">Ends that differ by a millionth at most count half.</p>'


def _profile_card(name: str, variant: str, members: Sequence[Group], series: Series) -> tuple[str, str, str] | None:
    ended = [final_values(group.done, series) for group in members]
    finite = np.concatenate([values[np.abs(values) < BEYOND] for values in ended])
    if max(map(len, ended)) < 2 or not len(finite) or finite.min() == finite.max():
        return None  # of single runs there is no profile
    margin = 0.05 * (finite.max() - finite.min())
    edges: Floats = np.linspace(finite.min() - margin, finite.max() + margin, _THRESHOLDS)
    lines = []
    for group, values in zip(members, ended, strict=True):
        if len(values):
            found = band([values], profile(edges))
            lines.append(Line(edges, found.value, group.colour, found.low, found.high))
    picture = profiles(lines, label=f"share of runs of {variant} whose {name} ended above each value")
    return f"{variant}: share of runs that ended above", picture, ""
