"""What usually goes wrong in recorded data, looked for in what was counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mouse_core.formats.columns.named import MISSING
from mouse_core.inspect._checks.finding import Finding
from mouse_core.inspect.report import ActionsReport, ColumnReport, EpisodesReport
from mouse_core.spec import Binary, Bounded, Categorical, MultiCategorical, from_json

# Shares from which on it is no coincidence. Pictures and small worlds do repeat themselves now and then.
_REPEATS_OF_VECTORS = 0.01
_REPEATS_OF_OTHERS = 0.5
_MOST = 0.5
_MANY_LONGEST = 0.05
_WIDEST_STATE = 16
_FEW_EPISODES = 5
_SHOWN = 8
_REQUIRED = ("action", "reward", "done")
_NULLABLE = ("episode_step", "metadata_q_star")
_NUMBERS = ("int", "uint", "float", "double", "halffloat", "bool")


def findings(
    columns: Sequence[ColumnReport],
    episodes: EpisodesReport | None,
    actions: ActionsReport | None,
    *,
    arrived: bool,
    rows: int,
) -> list[Finding]:
    """What is counted tells of.

    Args:
        columns, episodes, actions: What was counted.
        arrived: Whether rows stand as "arrived".
        rows: How many there are.
    """
    found = list(_about_columns(columns, rows, arrived=arrived))
    if episodes is not None:
        found += _about_ends(episodes, states=_are_states(columns))
        found += _about_alignment(episodes, arrived=arrived)
        found += _about_observations(columns, episodes)
    if actions is not None:
        found += _about_actions(actions)
    return found


def _warning(code: str, message: str) -> Finding:
    return Finding(code, "warning", message)


def _error(code: str, message: str) -> Finding:
    return Finding(code, "error", message)


def _note(code: str, message: str) -> Finding:
    return Finding(code, "note", message)


def _about_columns(columns: Sequence[ColumnReport], rows: int, *, arrived: bool) -> Iterator[Finding]:
    yield from _about_names({column.name for column in columns})
    if rows < 2:
        yield _error("no-rows", f"expected steps, found {rows} {'row' if rows == 1 else 'rows'}")
    for column in columns:
        if column.rows and column.nulls == column.rows and column.dtype == "null":
            yield _note("empty-column", f"{column.name}: null in every row, which counts as a missing column")
        else:
            yield from _about_values(column)
            yield from _about_variety(column, rows, arrived=arrived)
            yield from _about_shape(column)
        yield from _about_spec(column, arrived=arrived)


def _about_names(names: set[str]) -> Iterator[Finding]:
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        others = sorted(name for name in names if any(name.startswith(f"{wanted}_") for wanted in missing))
        hint = f" (there are {', '.join(others)})" if others else ""
        yield _error("missing-columns", f"no column {_listed(missing)}: a store cannot take the rows as they are{hint}")
    if not any(name.startswith("observation") for name in names):
        yield _warning("no-observation", "no column whose name begins with 'observation'")


def _level_of(column: ColumnReport) -> Callable[[str, str], Finding]:
    """What is wrong in metadata is worth a note."""
    return _note if column.name.startswith("metadata_") else _warning


def _about_values(column: ColumnReport) -> Iterator[Finding]:
    """Values that are no numbers, or none that can be trained on."""
    level = _level_of(column)
    if column.name in _REQUIRED and not column.dtype.startswith(_NUMBERS):
        yield _error("not-numbers", f"{column.name}: expected numbers, found {column.dtype}: a store refuses it")
    if column.nulls and column.name not in _NULLABLE:
        yield level("nulls", f"{column.name}: {_count(column.nulls, 'null')}")
    kinds = [f"{number:,} {kind}" for number, kind in ((column.nans, "NaN"), (column.infinite, "infinite")) if number]
    if kinds:
        values = _noun(column.nans + column.infinite, "value")
        level = _note if level is _note else _error
        yield level("not-finite", f"{column.name}: {' and '.join(kinds)} {values}")


def _about_variety(column: ColumnReport, rows: int, *, arrived: bool) -> Iterator[Finding]:
    """Columns, and places of vectors, that never change."""
    if column.constant and column.name not in ("done", MISSING):
        value = f", {column.low:g}" if column.low is not None and column.low == column.high else ""
        # A reward for every step there is, where rows hold what leaves them, is how many tasks are.
        for_living = column.name == "reward" and not arrived and bool(column.low)
        # Nor is one that nobody has reached, or that was not recorded for a robot that was shown what to do.
        unreached = column.name == "reward" and column.low == 0 == column.high
        level = _note if for_living or unreached else _level_of(column)
        yield level("constant-column", f"{column.name}: the same in every row{value}")
    elif column.places and rows > 1:
        bounds = list(zip(column.places["low"], column.places["high"], strict=True))
        still = [place for place, (low, high) in enumerate(bounds) if low is not None and low == high]
        if still:
            yield _note(
                "constant-places", f"{column.name}: {len(still)} of {len(bounds)} values never change: {_listed(still)}"
            )


def _about_spec(column: ColumnReport, *, arrived: bool) -> Iterator[Finding]:
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
            yield _warning("beyond-spec", f"{column.name}: {reason}, where the data say {spec!r:.120}")
            return


def _of_any_place(spec: Any) -> Any:
    """The spec of a single number that may be at any place of those of another."""
    if isinstance(spec, Bounded):
        return Bounded(spec.low.min(), spec.high.max(), (), spec.dtype)
    return Binary() if isinstance(spec, Binary) else Categorical(int(np.max(spec.nvec)))


def _about_shape(column: ColumnReport) -> Iterator[Finding]:
    if isinstance(column.shape, str):
        yield _note("ragged", f"{column.name}: rows of differing length, {column.shape}")
    if column.name == MISSING and column.mean:
        zeros = round(column.mean * column.rows)
        yield _note(
            "observations-missing", f"{zeros:,} rows hold zeros for an observation that the source did not store"
        )


def _are_states(columns: Sequence[ColumnReport]) -> bool:
    """Whether all that is seen is numbers of states, which come again, as whole episodes of them do."""
    seen = [column for column in columns if column.name.startswith("observation") and column.name != MISSING]
    return bool(seen) and all(
        isinstance(column.shape, list)
        and (not column.shape or (len(column.shape) == 1 and column.shape[0] <= _WIDEST_STATE))
        and column.dtype.startswith(("int", "uint", "bool"))
        for column in seen
    )


def _about_ends(episodes: EpisodesReport, *, states: bool) -> Iterator[Finding]:
    odd, count = episodes.anomalies, f"{episodes.count:,}"
    if episodes.count and not episodes.truncated:
        at_longest = odd.get("at-longest", 0)
        message = "no step is marked as truncated (done 2)"
        spike = at_longest > 1 and at_longest >= _MANY_LONGEST * episodes.count
        if spike:
            message += (
                f", and {at_longest:,} of {count} episodes have exactly the longest length, "
                f"{episodes.lengths.high:,} steps: was a time limit recorded as a terminal state, or not at all?"
            )
        else:
            message += ": right only if nothing but terminal states ended episodes; a time limit must not look like one"
        # Without episodes that are all cut off at one length, there may have been no limit, or none was reached.
        yield (_warning if spike else _note)("no-truncation", message)
    known = {**odd, "episodes-without-end": episodes.open - odd.get("ends-open", 0)}
    known["duplicate-episodes"] = episodes.duplicates
    more = f"followed by more of the same episode, by {episodes.found_by}"
    for code, noun, message in (
        ("unknown-done", "row", "done: expected 0 (alive), 1 (terminal) or 2 (truncated), found other codes in {}"),
        ("continues-after-terminal", "terminal row", f"{{}} (done 1) {more}"),
        ("continues-after-truncation", "truncated row", f"{{}} (done 2) {more}"),
        (
            "episodes-without-end",
            "episode",
            f"{{}} of {count} end without a done code, though another episode follows",
        ),
        ("duplicate-episodes", "episode", f"{{}} of {count} are, step by step, the same as an earlier one"),
        ("step-not-from-0", "episode", "episode_step: not 0 where {} begin: rows are missing"),
        ("step-jumps", "row", "episode_step: {} do not follow the row before: rows are missing"),
    ):
        if known.get(code):
            level = _note if states and code == "duplicate-episodes" else _warning
            level = _error if code == "unknown-done" else level
            yield level(code, message.format(_count(known[code], noun)))
    if odd.get("ends-open"):
        yield _note("ends-open", "the last episode has not ended where the data end")


def _about_alignment(episodes: EpisodesReport, *, arrived: bool) -> Iterator[Finding]:
    odd = episodes.anomalies
    if arrived and odd.get("reward-at-start"):
        yield _warning(
            "reward-at-start",
            f"reward is not 0 in {odd['reward-at-start']:,} of the {episodes.count:,} rows that episodes begin with: "
            "nothing "
            "has been done yet there, so rewards (and actions) may stand one row too early; rows that hold what "
            "*leaves* their observation have the alignment 'outgoing'",
        )
    if arrived and odd.get("done-at-start"):
        yield _warning(
            "done-at-start", f"done is not 0 in {_count(odd['done-at-start'], 'row')} that episodes begin with"
        )
    if odd.get("without-transitions"):
        rows = "of a single row, which hold no transition" if arrived else "without a step"
        yield _warning("without-transitions", f"{_count(odd['without-transitions'], 'episode')} {rows}")


def _about_observations(columns: Sequence[ColumnReport], episodes: EpisodesReport) -> Iterator[Finding]:
    seen = [column for column in columns if column.name.startswith("observation") and column.name != MISSING]
    if not seen or all(column.constant for column in seen):
        return
    vectors = any(column.dtype in ("float16", "float32", "float64") for column in seen)
    yield from _about_repeats(episodes, vectors=vectors, states=_are_states(columns))
    boundaries = max(episodes.count - 1, 0)
    equal = episodes.anomalies.get("final-is-next-first", 0)
    if boundaries and equal / boundaries > _MOST:
        yield _warning(
            "final-is-next-first",
            f"{equal:,} of {boundaries:,} episodes end with the observation that the next one begins with: it was "
            "recorded after the environment had been reset",
        )
    same, marked = episodes.anomalies.get("same-final", 0), _marked_rows(columns)
    if vectors and episodes.count > _FEW_EPISODES and same >= episodes.count - 1 and same > marked:
        yield _warning("same-final", f"all {episodes.count:,} episodes end with one and the same observation")


def _marked_rows(columns: Sequence[ColumnReport]) -> int:
    """Rows of zeros that a reader put there, and said so: these are no recording."""
    return sum(round(column.mean * column.rows) for column in columns if column.name == MISSING and column.mean)


def _about_repeats(episodes: EpisodesReport, *, vectors: bool, states: bool) -> Iterator[Finding]:
    """Observations that equal the one before; ``vectors`` of floats hardly ever do, ``states`` often.

    Args:
        episodes: What was counted.
        vectors: Whether there are floats among the observations.
        states: Whether they all are numbers of states.
    """
    transitions, repeats = episodes.transitions, episodes.repeated_observations
    finals = episodes.anomalies.get("final-repeats", 0)
    compared = episodes.anomalies.get("finals-compared", 0)
    threshold = _REPEATS_OF_VECTORS if vectors else _REPEATS_OF_OTHERS
    only_finals = compared and finals / compared > _MOST and repeats <= 1.5 * episodes.count
    if repeats:
        share = repeats / max(transitions, 1)
        many = bool(transitions) and share >= threshold and not only_finals and not states
        yield (_warning if many else _note)(
            "repeated-observation",
            f"the observation at t+1 equals that at t in {repeats:,} of {transitions:,} transitions "
            f"({share:{'.1%' if many else '.2%'}})",
        )
    if only_finals:
        yield (_note if states else _warning)(
            "final-repeats",
            f"{finals:,} of {compared:,} episodes end with the observation before the last, repeated: the final "
            "observation was not recorded",
        )


def _about_actions(actions: ActionsReport) -> Iterator[Finding]:
    if actions.kind != "discrete" or not actions.counts:
        return
    used = sorted(int(name) for name in actions.counts)
    if used[0] < 0:
        yield _error("negative-action", f"action: expected 0 or more, found {used[0]}")
    unused = sorted(set(range(used[-1])) - set(used)) if used[-1] < 10_000 else []
    if unused:
        yield _note("unused-actions", f"action: {_listed(unused)} of 0..{used[-1]} never occur")
    if len(used) == 1 and sum(actions.counts.values()) > 1:
        yield _warning("one-action", f"action: {used[0]} is the only one that is ever taken")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {_noun(number, noun)}"


def _noun(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"


def _listed(items: Sequence[object]) -> str:
    shown = ", ".join(repr(item) for item in items[:_SHOWN])
    return shown + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
