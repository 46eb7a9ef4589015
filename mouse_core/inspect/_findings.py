"""What usually goes wrong in recorded data, looked for in what was counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mouse_core.formats.columns.named import MISSING
from mouse_core.inspect._about_episodes import (
    about_alignment,
    about_ends,
    about_observations,
    are_states,
    same_again,
)
from mouse_core.inspect._checks.finding import Finding, counted, error, listed, note, plural, warning
from mouse_core.inspect._checks.places import Places
from mouse_core.inspect.report import ActionsReport, ColumnReport, EpisodesReport
from mouse_core.spec import Binary, Bounded, Categorical, MultiCategorical, from_json

_REQUIRED = ("action", "reward", "done")
_NULLABLE = ("episode_step", "metadata_q_star")
_NUMBERS = ("int", "uint", "float", "double", "halffloat", "bool")

# Adds to a finding where a dimension of its column, or any, is at its "low" or "high", if that is known.
Extremes = Callable[[Finding, int | None, str], Finding]


def findings(
    columns: Sequence[ColumnReport],
    episodes: EpisodesReport | None,
    actions: ActionsReport | None,
    *,
    arrived: bool,
    rows: int,
    places: Mapping[tuple[str, str | None], Places],
    extremes: Extremes,
) -> list[Finding]:
    """What is counted tells of.

    Args:
        columns, episodes, actions: What was counted.
        arrived: Whether rows stand as "arrived".
        rows: How many there are.
        places: Where what was counted is, by code and column.
        extremes: See ``Watch.extreme_at``.
    """
    found = list(_about_columns(columns, rows, extremes, arrived=arrived))
    if episodes is not None:
        found += about_ends(episodes, states=are_states(columns), again=same_again(columns, actions))
        found += about_alignment(episodes, arrived=arrived)
        found += about_observations(columns, episodes)
    if actions is not None:
        found += _about_actions(actions)
    return [_placed(one, places) for one in found]


def _placed(finding: Finding, places: Mapping[tuple[str, str | None], Places]) -> Finding:
    """A finding with the places that are known of it."""
    # That no time limit is marked is so everywhere, unless episodes end at one.
    code = "at-longest" if (finding.code, finding.level) == ("no-truncation", "warning") else finding.code
    known = places.get((code, finding.column))
    return finding if known is None else known.told(finding)


def _about_columns(
    columns: Sequence[ColumnReport], rows: int, extremes: Extremes, *, arrived: bool
) -> Iterator[Finding]:
    yield from _about_names({column.name for column in columns})
    if rows < 2:
        yield error("no-rows", f"expected steps, found {rows} {'row' if rows == 1 else 'rows'}")
    for column in columns:
        if column.rows and column.nulls == column.rows and column.dtype == "null":
            yield note(
                "empty-column", f"{column.name}: null in every row, which counts as a missing column", column.name
            )
        else:
            yield from _about_values(column)
            yield from _about_variety(column, rows, arrived=arrived)
            yield from _about_shape(column)
        yield from _about_spec(column, extremes, arrived=arrived)


def _about_names(names: set[str]) -> Iterator[Finding]:
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        others = sorted(name for name in names if any(name.startswith(f"{wanted}_") for wanted in missing))
        hint = f" (there are {', '.join(others)})" if others else ""
        yield error("missing-columns", f"no column {listed(missing)}: a store cannot take the rows as they are{hint}")
    if not any(name.startswith("observation") for name in names):
        yield warning("no-observation", "no column whose name begins with 'observation'")


def _level_of(column: ColumnReport) -> Callable[[str, str, str], Finding]:
    """What is wrong in metadata is worth a note."""
    return note if column.name.startswith("metadata_") else warning


def _about_values(column: ColumnReport) -> Iterator[Finding]:
    """Values that are no numbers, or none that can be trained on."""
    level = _level_of(column)
    if column.name in _REQUIRED and not column.dtype.startswith(_NUMBERS):
        said = f"{column.name}: expected numbers, found {column.dtype}: a store refuses it"
        yield error("not-numbers", said, column.name)
    if column.nulls and column.name not in _NULLABLE:
        yield level("nulls", f"{column.name}: {counted(column.nulls, 'null')}", column.name)
    kinds = [f"{number:,} {kind}" for number, kind in ((column.nans, "NaN"), (column.infinite, "infinite")) if number]
    if kinds:
        values = plural(column.nans + column.infinite, "value")
        level = note if level is note else error
        yield level("not-finite", f"{column.name}: {' and '.join(kinds)} {values}", column.name)


def _about_variety(column: ColumnReport, rows: int, *, arrived: bool) -> Iterator[Finding]:
    """Columns, and places of vectors, that never change."""
    if column.constant and column.name not in ("done", MISSING):
        value = f", {column.low:g}" if column.low is not None and column.low == column.high else ""
        # A reward for every step there is, where rows hold what leaves them, is how many tasks are.
        for_living = column.name == "reward" and not arrived and bool(column.low)
        # Nor is one that nobody has reached, or that was not recorded for a robot that was shown what to do.
        unreached = column.name == "reward" and column.low == 0 == column.high
        level = note if for_living or unreached else _level_of(column)
        yield level("constant-column", f"{column.name}: the same in every row{value}", column.name)
    elif column.places and rows > 1:
        bounds = list(zip(column.places["low"], column.places["high"], strict=True))
        still = [place for place, (low, high) in enumerate(bounds) if low is not None and low == high]
        if still:
            said = f"{column.name}: {len(still)} of {len(bounds)} values never change: {listed(still)}"
            yield note("constant-places", said, column.name)


def _about_spec(column: ColumnReport, extremes: Extremes, *, arrived: bool) -> Iterator[Finding]:
    """Values beyond those that the data say a column has; where no action may have led to a row, zeros are none."""
    if column.spec is None or column.low is None or column.high is None:
        return
    spec = from_json(column.spec)
    if not isinstance(spec, Binary | Bounded | Categorical | MultiCategorical) or -1 in spec.shape:
        return
    if not column.places and spec.shape:  # of wide rows only the lowest and the highest of all values are known
        spec = _of_any_place(spec)
    for which in ("low", "high"):
        found = column.places[which] if column.places else [getattr(column, which)]
        array = np.array([np.nan if one is None else one for one in found], np.float64)
        if array.size != math.prod(spec.shape):
            return
        unknown = np.isnan(array) | ((array == 0) & (arrived and column.name.startswith("action")))
        array = np.where(unknown, spec.project(np.zeros(spec.shape)).reshape(-1), array)
        reason = spec.why_not_numbers(array.reshape(spec.shape))
        if reason is not None:
            said = f"{column.name}: {reason}, where the data say {spec!r:.120}"
            beyond = array != np.broadcast_to(spec.project(array.reshape(spec.shape)), spec.shape).reshape(-1)
            place = int(beyond.argmax()) if column.places else None
            yield extremes(warning("beyond-spec", said, column.name), place, which)
            return


def _of_any_place(spec: Any) -> Any:
    """The spec of a single number that may be at any place of those of another."""
    if isinstance(spec, Bounded):
        return Bounded(spec.low.min(), spec.high.max(), (), spec.dtype)
    return Binary() if isinstance(spec, Binary) else Categorical(int(np.max(spec.nvec)))


def _about_shape(column: ColumnReport) -> Iterator[Finding]:
    if isinstance(column.shape, str):
        yield note("ragged", f"{column.name}: rows of differing length, {column.shape}", column.name)
    if column.name == MISSING and column.mean:
        zeros = round(column.mean * column.rows)
        yield note(
            "observations-missing", f"{zeros:,} rows hold zeros for an observation that the source did not store"
        )


def _about_actions(actions: ActionsReport) -> Iterator[Finding]:
    if actions.kind != "discrete" or not actions.counts:
        return
    used = sorted(int(name) for name in actions.counts)
    if used[0] < 0:
        yield error("negative-action", f"action: expected 0 or more, found {used[0]}", "action")
    unused = sorted(set(range(used[-1])) - set(used)) if used[-1] < 10_000 else []
    if unused:
        yield note("unused-actions", f"action: {listed(unused)} of 0..{used[-1]} never occur", "action")
    if len(used) == 1 and sum(actions.counts.values()) > 1:
        yield warning("one-action", f"action: {used[0]} is the only one that is ever taken", "action")
