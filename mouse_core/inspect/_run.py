"""Inspects recorded data in one pass over the rows, and derives the findings."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core._base.progress import progress_bar
from mouse_core.errors import MouseError
from mouse_core.files.reading import read_json_object
from mouse_core.formats.base import RowStream, stream_of
from mouse_core.formats.columns import MISSING, blocks, is_metadata
from mouse_core.inspect._scan import Scan
from mouse_core.inspect.dynamics import about_statistics
from mouse_core.inspect.report import (
    ActionsReport,
    ColumnReport,
    EpisodesReport,
    Finding,
    Report,
    counted,
    listed,
    plural,
    sorted_by_level,
)
from mouse_core.spec import STANDARD_FIELDS, Binary, Bounded, Categorical, MultiCategorical
from mouse_core.store.views import Store

# Shares above these limits are no coincidence.
_REPEATS_OF_VECTORS = 0.01
_BY_TURNS, _NEARLY_ALL = 0.4, 0.9
_MOST = 0.5
_MANY_LONGEST = 0.05
_WIDEST_STATE = 16
_FEW_EPISODES = 5
# Number of duplicates that chance may explain.
_CHANCE = 0.01
# In a small world, an almost deterministic policy often repeats the same few episodes. In files that were read twice,
# many episodes occur exactly twice.
_MANY_AGAIN = 0.2


def _observations(columns: Sequence[ColumnReport]) -> list[ColumnReport]:
    """Return the columns of observations, except the columns in which a reader marks missing observations."""
    return [column for column in columns if column.name.startswith("observation") and column.name != MISSING]


def are_states(columns: Sequence[ColumnReport]) -> bool:
    """Whether all observations are discrete states. Two discrete observations, and even two complete episodes of
    discrete observations, can be equal by chance.
    """
    seen = _observations(columns)
    return bool(seen) and all(
        isinstance(column.shape, list)
        and (not column.shape or (len(column.shape) == 1 and column.shape[0] <= _WIDEST_STATE))
        and column.dtype.startswith(("int", "uint", "bool"))
        for column in seen
    )


def same_again(columns: Sequence[ColumnReport], actions: ActionsReport | None) -> float:
    """Return the probability that two steps from the same state have equal actions. If observations have fractional
    values, return 0, because two such steps are almost never equal by chance.
    """
    seen = _observations(columns)
    whole = all(column.whole or column.dtype.startswith(("int", "uint", "bool")) for column in seen)
    if actions is None or not actions.counts or not whole:
        return 0.0
    total = sum(actions.counts.values())
    return sum((count / total) ** 2 for count in actions.counts.values())


def about_ends(episodes: EpisodesReport, *, states: bool, again: float) -> Iterator[Finding]:
    """Yield findings about the ends of episodes, and about episodes that equal other episodes.

    Args:
        episodes: The counts of episodes.
        states: Whether all observations are discrete states.
        again: The probability that ``same_again`` returns.
    """
    odd, count = episodes.anomalies, f"{episodes.count:,}"
    pairs = episodes.count * (episodes.count - 1) / 2
    chance = pairs * again ** odd.get("longest-duplicate", 0) > _CHANCE
    few = odd.get("come-again", 0) < max(_MOST * episodes.duplicates, _MANY_AGAIN * episodes.count)
    chance |= states or (bool(again) and few)
    if episodes.count and not episodes.truncated:
        at_longest = odd.get("at-longest", 0)
        message = "no step is marked as truncated (done 2)"
        longest = int(episodes.lengths.high or 0)
        # A time limit that a person chose is a round number; episodes that all end after 17 steps have no such limit.
        round_number = longest % 2 == 0 or longest % 5 == 0
        several = at_longest > 2 or at_longest == episodes.count > 1
        spike = several and at_longest >= _MANY_LONGEST * episodes.count and round_number
        if spike:
            message += (
                f", and {at_longest:,} of {count} episodes have exactly the longest length, "
                f"{episodes.lengths.high:,} steps; a time limit was probably recorded as terminal, or not at all"
            )
        else:
            message += "; this is right only if every episode ended in a terminal state, and none at a time limit"
        # If cut-off episodes differ in length, there may have been no time limit, or no episode reached it.
        yield Finding("no-truncation", "warning" if spike else "note", message)
    known = {**odd, "episodes-without-end": episodes.open - odd.get("ends-open", 0)}
    known["duplicate-episodes"] = episodes.duplicates
    more = f"followed by a row of the same episode, according to {episodes.found_by}"
    for code, noun, message in (
        ("unknown-done", "row", "done: expected 0 (alive), 1 (terminal) or 2 (truncated), found other codes in {}"),
        (
            "done-against-flags",
            "row",
            "done: the columns terminated and truncated contradict the done code in {}; the code is 1 if "
            "terminated, else 2 if truncated, else 0",
        ),
        ("continues-after-terminal", "terminal row", f"{{}} (done 1) {more}"),
        ("continues-after-truncation", "truncated row", f"{{}} (done 2) {more}"),
        (
            "episodes-without-end",
            "episode",
            f"{{}} of {count} end without a done code, although another episode follows",
        ),
        ("duplicate-episodes", "episode", f"{{}} of {count} equal an earlier episode in every step"),
        (
            "step-not-from-0",
            "episode",
            "episode_step: expected 0 in first rows, found other numbers in {}; rows are missing",
        ),
        (
            "step-jumps",
            "row",
            "episode_step: expected numbers that increase by 1, found other numbers in {}; rows are missing",
        ),
    ):
        if known.get(code):
            level = "note" if chance and code == "duplicate-episodes" else "warning"
            level = "error" if code in ("unknown-done", "done-against-flags") else level
            yield Finding(code, level, message.format(counted(known[code], noun)))
    if odd.get("ends-open"):
        yield Finding("ends-open", "note", "the last episode has no done code at its end")


def about_alignment(episodes: EpisodesReport, *, arrived: bool) -> Iterator[Finding]:
    odd = episodes.anomalies
    if arrived and odd.get("reward-at-start"):
        yield Finding(
            "reward-at-start",
            "warning",
            "reward: expected 0 in first rows of episodes, which no action precedes, found another reward in "
            f"{odd['reward-at-start']:,} of {episodes.count:,} first rows; rewards and actions may be one row too "
            "early; if the action of a row follows the row's observation, the alignment is 'outgoing'",
        )
    if arrived and odd.get("done-at-start"):
        yield Finding(
            "done-at-start",
            "warning",
            f"done: expected 0 in first rows of episodes, found another code in {counted(odd['done-at-start'], 'row')}",
        )
    if odd.get("without-transitions"):
        rows = "of a single row, which have no transition" if arrived else "without a step"
        yield Finding("without-transitions", "warning", f"{counted(odd['without-transitions'], 'episode')} {rows}")


def about_observations(columns: Sequence[ColumnReport], episodes: EpisodesReport) -> Iterator[Finding]:
    seen = _observations(columns)
    if not seen or all(column.constant for column in seen):
        return
    vectors = any(column.dtype in ("float16", "float32", "float64") and not column.whole for column in seen)
    yield from _about_repeats(episodes, vectors=vectors, states=are_states(columns))
    boundaries = max(episodes.count - 1, 0)
    equal = episodes.anomalies.get("final-is-next-first", 0)
    # In a small world, an episode may be cut off in its initial state; for terminal ends this would be an anomaly.
    counted_ends = equal - (episodes.truncated + episodes.open if are_states(columns) else 0)
    if boundaries and counted_ends / boundaries > _MOST:
        yield Finding(
            "final-is-next-first",
            "warning",
            f"{equal:,} of {boundaries:,} episodes end with the first observation of the next episode: the final "
            "observation was recorded after the environment had been reset",
        )
    same, marked = episodes.anomalies.get("same-final", 0), _marked_rows(columns)
    if vectors and episodes.count > _FEW_EPISODES and same >= episodes.count - 1 and same > marked:
        yield Finding("same-final", "warning", f"all {episodes.count:,} episodes end with the same observation")


def _marked_rows(columns: Sequence[ColumnReport]) -> int:
    """Return the number of rows whose observation was not recorded; a reader filled these rows with zeros."""
    return sum(round(column.mean * column.rows) for column in columns if column.name == MISSING and column.mean)


def _about_repeats(episodes: EpisodesReport, *, vectors: bool, states: bool) -> Iterator[Finding]:
    """Yield findings about observations that equal the previous observation.

    Such repetitions are rare for float vectors and common for discrete states. With images, and in small environments,
    any share of repetitions is possible: for example, the observation stays equal if an agent walks into a wall. But a
    repetition in every second row is an anomaly.

    Args:
        episodes: The counts of episodes.
        vectors: Whether at least one column of observations has floats with fractional values.
        states: Whether all observations are discrete states.
    """
    transitions, repeats = episodes.transitions, episodes.repeated_observations
    finals = episodes.anomalies.get("final-repeats", 0)
    compared = episodes.anomalies.get("finals-compared", 0)
    only_finals = compared and finals / compared > _MOST and repeats <= 1.5 * episodes.count
    if repeats:
        share = repeats / max(transitions, 1)
        by_turns = share >= _BY_TURNS and episodes.anomalies.get("repeated-once", 0) >= _NEARLY_ALL * repeats
        many = share >= _REPEATS_OF_VECTORS if vectors else by_turns
        many = bool(transitions) and many and not only_finals and not states
        yield Finding(
            "repeated-observation",
            "warning" if many else "note",
            f"the observation at t+1 equals the observation at t in {repeats:,} of {transitions:,} transitions "
            f"({share:{'.1%' if many else '.2%'}})",
        )
    if only_finals:
        yield Finding(
            "final-repeats",
            "note" if states else "warning",
            f"in {finals:,} of {compared:,} episodes the last two observations are equal: the final "
            "observation was not recorded",
        )


_REQUIRED = ("action", "reward", "done")
_NULLABLE = ("episode_step", "metadata_q_star")
_NUMBERS = ("int", "uint", "float", "double", "halffloat", "bool")


def _findings(
    scan: Scan,
    columns: Sequence[ColumnReport],
    episodes: EpisodesReport | None,
    actions: ActionsReport | None,
    specs: Mapping[str, Any],
) -> Iterator[Finding]:
    """Yield the findings that follow from the counts, with their episodes and steps; ``specs`` has the specs of columns
    by name.
    """
    found = list(_about_columns(scan, columns, specs))
    if episodes is not None:
        found += about_ends(episodes, states=are_states(columns), again=same_again(columns, actions))
        found += about_alignment(episodes, arrived=scan.arrived)
        found += about_observations(columns, episodes)
    if actions is not None:
        found += _about_actions(actions)
    places = scan.all_places()
    for one in found:
        # Whether time limits are marked concerns all rows, unless some episodes end at such a limit.
        code = "at-longest" if (one.code, one.level) == ("no-truncation", "warning") else one.code
        known = places.get((code, one.column))
        yield one if known is None else known.with_places(one)


def _about_columns(scan: Scan, columns: Sequence[ColumnReport], specs: Mapping[str, Any]) -> Iterator[Finding]:
    rows = scan.rows
    yield from _about_names({column.name for column in columns})
    if rows < 2:
        yield Finding("no-rows", "error", f"expected steps, found {rows} {'row' if rows == 1 else 'rows'}")
    for column in columns:
        if column.rows and column.nulls == column.rows and column.dtype == "null":
            said = f"{column.name}: all values are null, so the column counts as missing"
            yield Finding("empty-column", "note", said, column.name)
        else:
            yield from _about_values(column)
            yield from _about_variety(column, rows, arrived=scan.arrived)
            yield from _about_shape(column)
        yield from _about_spec(scan, column, specs.get(column.name))


def _about_names(names: set[str]) -> Iterator[Finding]:
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        others = sorted(name for name in names if any(name.startswith(f"{wanted}_") for wanted in missing))
        hint = f" (similar names: {', '.join(others)})" if others else ""
        yield Finding(
            "missing-columns",
            "error",
            f"expected columns of actions, rewards and done codes, found no column {listed(missing)}{hint}",
        )
    if not any(name.startswith("observation") for name in names):
        yield Finding("no-observation", "warning", "expected a column whose name begins with 'observation', found none")


def _level_of(column: ColumnReport) -> str:
    """Return the level of findings about the values of a column: "note" for a metadata column, else "warning"."""
    return "note" if is_metadata(column.name) else "warning"


def _about_values(column: ColumnReport) -> Iterator[Finding]:
    """Yield findings about NaN, infinite values, and other values that cannot be used for training."""
    level = _level_of(column)
    if column.name in _REQUIRED and not column.dtype.startswith(_NUMBERS):
        said = f"{column.name}: expected numbers, found {column.dtype}"
        yield Finding("not-numbers", "error", said, column.name)
    if column.nulls and column.name not in _NULLABLE:
        yield Finding("nulls", level, f"{column.name}: {counted(column.nulls, 'null')}", column.name)
    kinds = [f"{number:,} {kind}" for number, kind in ((column.nans, "NaN"), (column.infinite, "infinite")) if number]
    if kinds:
        values = plural(column.nans + column.infinite, "value")
        level = "note" if level == "note" else "error"
        yield Finding("not-finite", level, f"{column.name}: {' and '.join(kinds)} {values}", column.name)


def _about_variety(column: ColumnReport, rows: int, *, arrived: bool) -> Iterator[Finding]:
    """Yield findings about columns and dimensions of vectors that never change."""
    if column.constant and column.name not in ("done", MISSING):
        value = f", {column.low:g}" if column.low is not None and column.low == column.high else ""
        # In "outgoing" rows, a constant reward for every step is usual: many tasks are defined this way.
        for_living = column.name == "reward" and not arrived and bool(column.low)
        # A constant reward is no fault either if no episode reached the goal, or if demonstrations of a robot were
        # recorded without rewards.
        unreached = column.name == "reward" and column.low == 0 == column.high
        level = "note" if for_living or unreached else _level_of(column)
        yield Finding("constant-column", level, f"{column.name}: all rows are equal{value}", column.name)
    elif column.places and rows > 1:
        bounds = list(zip(column.places["low"], column.places["high"], strict=True))
        still = [place for place, (low, high) in enumerate(bounds) if low is not None and low == high]
        if still:
            said = f"{column.name}: {len(still)} of {len(bounds)} dimensions never change: {listed(still)}"
            yield Finding("constant-places", "note", said, column.name)


def _about_spec(scan: Scan, column: ColumnReport, spec: Any) -> Iterator[Finding]:
    """Yield findings about values outside of the dataset's spec.

    In the first row of an episode, an action of zeros is allowed, because no action led to this row.
    """
    if column.low is None or column.high is None:
        return
    if not isinstance(spec, Binary | Bounded | Categorical | MultiCategorical) or -1 in spec.shape:
        return
    if not column.places and spec.shape:  # for wide rows, only the lowest and highest of all values are known
        spec = _of_any_place(spec)
    for which in ("low", "high"):
        found = column.places[which] if column.places else [getattr(column, which)]
        array = np.array([np.nan if one is None else one for one in found], np.float64)
        if array.size != math.prod(spec.shape):
            return
        unknown = np.isnan(array) | ((array == 0) & (scan.arrived and column.name.startswith("action")))
        array = np.where(unknown, spec.project(np.zeros(spec.shape)).reshape(-1), array)
        reason = spec.why_not_numbers(array.reshape(spec.shape))
        if reason is not None:
            said = f"{column.name}: {reason}; the spec of the dataset is {spec!r:.120}"
            beyond = array != np.broadcast_to(spec.project(array.reshape(spec.shape)), spec.shape).reshape(-1)
            place = int(beyond.argmax()) if column.places else None
            yield scan.at_extreme(Finding("beyond-spec", "warning", said, column.name), place, which)
            return


def _of_any_place(spec: Any) -> Any:
    """Return a spec for single numbers; it allows each number that the vector's spec allows in at least one
    dimension.
    """
    if isinstance(spec, Bounded):
        return Bounded(spec.low.min(), spec.high.max(), (), spec.dtype)
    return Binary() if isinstance(spec, Binary) else Categorical(int(np.max(spec.nvec)))


def _about_shape(column: ColumnReport) -> Iterator[Finding]:
    if isinstance(column.shape, str):
        yield Finding("ragged", "note", f"{column.name}: rows have different lengths, {column.shape}", column.name)
    if column.name == MISSING and column.mean:
        zeros = round(column.mean * column.rows)
        yield Finding(
            "observations-missing",
            "note",
            f"{zeros:,} rows have zeros in place of an observation that the source did not store",
        )


def _about_actions(actions: ActionsReport) -> Iterator[Finding]:
    if actions.kind != "discrete" or not actions.counts:
        return
    used = sorted(int(name) for name in actions.counts)
    if used[0] < 0:
        yield Finding("negative-action", "error", f"action: expected 0 or more, found {used[0]}", "action")
    unused = sorted(set(range(used[-1])) - set(used)) if used[-1] < 10_000 else []
    if unused:
        yield Finding("unused-actions", "note", f"action: {listed(unused)} of 0..{used[-1]} never occur", "action")
    if len(used) == 1 and sum(actions.counts.values()) > 1:
        yield Finding("one-action", "warning", f"action: {used[0]} is the only action that occurs", "action")


def inspect(stream: RowStream | Store, *, ignore: Collection[str] = (), progress: bool = False) -> Report:
    """Inspect recorded steps in one pass, with memory that does not grow with the number of rows.

    Unreadable episodes of a LeRobotDataset become findings; all other episodes are inspected.

    Args:
        stream: The rows, as ``mouse_core.formats.open`` returns them for a path; or a store or view of a store.
        ignore: Codes of findings to leave out.
        progress: Whether to show a progress bar.

    Returns:
        The report. ``show`` prints the report.

    Raises:
        DataError: The data are damaged.
        SchemaError: Two columns have the same name.
    """
    if isinstance(stream, Store):
        stream = stream_of(stream)
    notes = [Finding("reader", "note", text) for text in stream.notes]
    found = Scan(stream.schema, arrived=stream.alignment == "arrived")
    with np.errstate(all="ignore"):  # infinities and huge values are counted, and NumPy must not warn about them
        with progress_bar("inspecting", total=stream.rows, unit="rows", enabled=progress) as advance:
            for block in blocks(stream):
                found.add(block)
                advance(block.num_rows)
        columns, episodes, actions = found.results()
        metadata = stream.metadata
        specs = {} if metadata.spec is None else metadata.spec.entries
        said = list(_findings(found, columns, episodes, actions, specs))
        said += found.findings(metadata.dimensions, stream.format_metadata.get("split_rows", {}))
        said += _about_statistics(stream, columns, actions)
    said += [Finding(*fault) for fault in stream.faults]
    return Report(
        source=stream.path,
        format=stream.format,
        alignment=stream.alignment,
        alignment_found=_alignment(stream, found),
        rows=found.rows,
        columns=columns,
        episodes=episodes,
        actions=actions,
        findings=sorted_by_level([finding for finding in said + notes if finding.code not in ignore]),
        metadata=metadata,
    )


def _about_statistics(
    stream: RowStream, columns: Sequence[ColumnReport], actions: ActionsReport | None
) -> Iterator[Finding]:
    """Yield findings about stored statistics that differ from computed statistics."""
    said = stream.format_metadata.get("stats") or _saved_statistics(stream.path)
    if not isinstance(said, Mapping):
        return
    columns_of = {field.name: field.column for field in STANDARD_FIELDS}
    stated = {columns_of.get(str(key), str(key)): one for key, one in said.items() if isinstance(one, Mapping)}
    seen = {one.name: one.places for one in columns if one.name.startswith(("action", "observation"))}
    found = list(about_statistics(stated, _counted(seen)))
    # Statistics of actions are skipped: they may or may not include the placeholders of first rows.
    taken = list(about_statistics(stated, _counted({"action": actions.places if actions is not None else None})))
    yield from (one for one in found if one.column != "action" or taken or not actions)


def _counted(places: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """Return the mean, deviation and range of each vector column whose dimensions all have at least one finite
    number.
    """
    numbers = ("mean", "deviation", "low", "high")
    return {
        name: {key: np.asarray(one[key], np.float64) for key in numbers}
        for name, one in places.items()
        if one is not None and one.get("mean") and None not in one["mean"]
    }


def _saved_statistics(path: str) -> Any:
    """Return the statistics that ``Statistics.save`` wrote into the folder of the dataset, if any."""
    file = Path(path) / "meta" / "stats.json"
    try:
        return read_json_object(file) if file.is_file() else None
    except (MouseError, OSError, ValueError):
        return None  # the statistics cannot be used


def _alignment(stream: RowStream, found: Scan) -> str:
    """Describe where the alignment comes from, and whether the rows agree with this alignment."""
    if stream.format not in ("datasets", "parquet"):
        how = f"the reader of {stream.format} defines it"
    elif stream.metadata.alignment is not None:
        how = "from the metadata"
    else:
        how = "assumed, because the metadata do not state it"
    if found.episodes is None or not found.rows:
        return f"{how}; not checked, because reward or done is missing"
    at_start = bool(found.episodes.anomalies["reward-at-start"])
    agree = {
        ("arrived", True): "rewards in first rows of episodes contradict it",
        ("arrived", False): "first rows of episodes have no reward",
        ("outgoing", True): "first rows have a reward",
        ("outgoing", False): "no first row has a reward",
    }
    return f"{how}; {agree[stream.alignment, at_start]}"
