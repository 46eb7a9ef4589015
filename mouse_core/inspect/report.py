"""The report of an inspection, and its text for a terminal."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import as_json
from mouse_core._base.progress import aligned, item
from mouse_core.metadata import DatasetMetadata
from mouse_core.spec import DIMS

# Largest number of episodes that a finding lists.
MOST = 1000


def some(episodes: npt.NDArray[np.int64] | Iterable[int]) -> tuple[int, ...]:
    """Return distinct episode indices, ascending, at most the first ``MOST``."""
    found = episodes if isinstance(episodes, np.ndarray) else np.array(list(episodes), np.int64)
    return tuple(np.unique(found)[:MOST].tolist())


class Places:
    """Collects the places (episodes and steps) of a finding, in the order of rows."""

    def __init__(self) -> None:
        self._first: tuple[int, int] | None = None
        self._episodes: list[int] = []
        self._dimensions: set[int] = set()

    def add(
        self,
        episode: npt.NDArray[np.int64],
        step: npt.NDArray[np.int64],
        dimensions: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Add the episodes and steps of the rows that have the finding, as arrays ``[n]``. ``dimensions`` has the index
        of each affected dimension of the column, without repetitions.
        """
        if not len(episode):
            return
        if self._first is None:
            self._first = int(episode[0]), int(step[0])
        if dimensions is not None:
            self._dimensions.update(dimensions[: 2 - len(self._dimensions)].tolist())
        if len(self._episodes) < MOST:
            last = self._episodes[-1] if self._episodes else -1
            self._episodes += [number for number in np.unique(episode).tolist() if number > last]

    def with_places(self, finding: Finding) -> Finding:
        """Return a copy of a finding with the collected places."""
        if self._first is None:
            return finding
        (dimension,) = self._dimensions if len(self._dimensions) == 1 else (finding.dimension,)
        episode, step = self._first
        return replace(finding, dimension=dimension, episode=episode, step=step, episodes=tuple(self._episodes[:MOST]))


LEVELS = ("error", "warning", "note")
_SHOWN = 8


@dataclass(frozen=True)
class Finding:
    """A fault or property of the data that users should know.

    Args:
        code: A short name that does not change between versions, such as "no-truncation".
        level: "error" for rows that cannot be used unchanged, "warning" for rows that are most likely wrong, or "note".
            With ``--strict``, the command fails if there are errors or warnings.
        message: The finding in one or two sentences.
        column: The column of the finding; None for a finding about no column or several columns.
        dimension: The index of the affected dimension of the column; None if the finding is not about a single
            dimension.
        name: The dimension's name in the data; None if the dimension has no name.
        episode: The index of an affected episode; None if unknown.
        step: The index of an affected step in the episode.
        episodes: The affected episodes among the checked episodes, ascending, at most the first 1,000; empty if
            unknown.
    """

    code: str
    level: str
    message: str
    column: str | None = None
    dimension: int | None = None
    name: str | None = None
    episode: int | None = None
    step: int | None = None
    episodes: tuple[int, ...] = ()

    @property
    def place(self) -> str | None:
        """The place of the finding, in the form that ``mouse view --at`` accepts, such as ``"e=12&s=40"``; None if no
        episode is known.
        """
        if self.episode is None:
            return None
        return f"e={self.episode}" if self.step is None else f"e={self.episode}&s={self.step}"


def sorted_by_level(findings: Sequence[Finding]) -> list[Finding]:
    """Return errors, then warnings, then notes; findings of equal level stay in their order."""
    return sorted(findings, key=lambda item: LEVELS.index(item.level))


def ratio(number: float) -> str:
    """Format a factor in at most nine characters: ``3,210``, ``1.2e+16``."""
    return f"{number:,.0f}" if number < 1e6 else f"{number:.2g}"


def of_dimension(
    code: str,
    level: str,
    message: str,
    column: Any,
    dimension: int,
    where: tuple[int, int],
    episodes: tuple[int, ...] = (),
) -> Finding:
    """Return a finding about one dimension of a column. The message begins with the column and the dimension, such as
    ``action[3] (elbow)``.

    Args:
        code, level, message: As in ``Finding``.
        column: The column, with the attributes ``name``, ``width`` and ``names``.
        dimension: The index of the dimension.
        where: The episode and the step of an affected row.
        episodes: All affected episodes; by default the episode of ``where``.
    """
    name = None if column.names is None else column.names[dimension]
    place = dimension if column.width > 1 else None
    label = column.name if place is None else f"{column.name}[{place}]{'' if name is None else f' ({name})'}"
    return Finding(code, level, f"{label}: {message}", column.name, place, name, *where, episodes or where[:1])


def capped(findings: Sequence[Finding], most: int) -> list[Finding]:
    """Return at most ``most`` findings for each pair of a code and a column; the last finding of a pair states how many
    findings were left out.
    """
    kept: list[Finding] = []
    total, count = Counter((finding.code, finding.column) for finding in findings), Counter[Any]()
    for finding in findings:
        key = finding.code, finding.column
        count[key] += 1
        if count[key] == most < total[key]:
            more = f"and {total[key] - most} more of {finding.column} likewise"
            finding = replace(finding, message=f"{finding.message}; {more}")
        kept += [finding] if count[key] <= most else []
    return kept


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: ``1 row``, ``2,000 rows``."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    """Return the noun in the plural, or in the singular for 1."""
    return noun if number == 1 else f"{noun}s"


def listed(items: Sequence[object]) -> str:
    """Return a text with the first few items and the number of further items."""
    shown = ", ".join(repr(item) for item in items[:_SHOWN])
    return shown + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


_COLUMN_HEAD = ("column", "type", "shape", "nulls", "NaN", "min", "max", "mean")
_EPISODE_HEAD = ("", "min", "5%", "median", "95%", "max", "mean")
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_ACTIONS = 12
_MOST_TASKS = 8


def show(report: Report, *, viewer: Sequence[str] = ()) -> None:
    """Print a report.

    Args:
        report: The report.
        viewer: The command, as a list of words, that shows the data with the same reading options; the place of a
            finding is appended to this command. By default ``mouse view`` with the source of the report.
    """
    print("\n".join(_lines(report, viewer)))  # noqa: T201


def _lines(report: Report, viewer: Sequence[str]) -> Iterator[str]:
    episodes = report.episodes
    counts = [f"{report.rows:,} rows"]
    if episodes is not None:
        counts += [f"{episodes.count:,} episodes", f"{episodes.transitions:,} transitions"]
    yield from (f"{report.source} ({report.format}): {', '.join(counts)}", "")
    yield from (*aligned([_COLUMN_HEAD, *map(_cells, report.columns)], left=len(_COLUMN_HEAD)), "")
    if episodes is not None and episodes.count:
        rows: list[tuple[str, ...]] = [_EPISODE_HEAD]
        for name, spread in (("length", episodes.lengths), ("return", episodes.returns)):
            quantiles = spread.quantiles or (None,) * 5
            shown = (spread.low, quantiles[0], quantiles[2], quantiles[4], spread.high, spread.mean)
            rows.append((name, *map(number, shown)))
        yield from ("episodes", *aligned(rows, left=len(_EPISODE_HEAD)), "")
    yield from _facts(report)
    for level in LEVELS:
        found = [finding for finding in report.findings if finding.level == level]
        if found:
            yield from ("", f"{level.capitalize()}s")
        for finding in found:
            place = "" if finding.place is None else f" [{finding.place}]"
            yield item(f"{finding.code}: {finding.message}{place}")
    places = [finding.place for finding in report.findings if finding.place is not None]
    if places:
        yield from ("", f"To see it: {shlex.join([*(viewer or ['mouse', 'view', report.source]), '--at', places[0]])}")
    if not report.warnings:
        yield from ("", "No warnings")


def _cells(column: ColumnReport) -> tuple[str, ...]:
    """Return the cells of a column in the table of columns, in the order of ``_COLUMN_HEAD``."""
    return (
        column.name,
        column.dtype,
        "" if column.shape is None else str(column.shape),
        f"{column.nulls:,}" if column.nulls else "",
        f"{column.nans:,}" if column.nans else "",
        number(column.low),
        number(column.high),
        number(column.mean),
    )


def _facts(report: Report) -> list[str]:
    """Return lines about the alignment, the other metadata, the ends of episodes and the actions."""
    lines = [f"alignment: {report.alignment} ({report.alignment_found})", *_said(report)]
    episodes = report.episodes
    if episodes is not None:
        codes = ", ".join(f"{code}: {count:,}" for code, count in episodes.done_codes.items())
        lines.append(f"done codes: {codes}")
        lines.append(
            f"episodes: {episodes.terminated:,} terminated, {episodes.truncated:,} truncated, {episodes.open:,} "
            f"without an end (found by {episodes.found_by})"
        )
        lines.append(f"returns: {_bars(episodes.returns.counts)}   lengths: {_bars(episodes.lengths.counts)}")
    if report.actions is not None:
        lines.append(f"actions: {_actions_text(report)}")
    return lines


def _said(report: Report) -> list[str]:
    """Return all metadata except the alignment, as lines of text."""
    metadata, lines = report.metadata, []
    if metadata.environments:
        lines.append(f"environment: {', '.join(metadata.environments)}")
    if metadata.tasks:
        shown = [f"{task}: {text}" for task, text in list(metadata.tasks.items())[:_MOST_TASKS]]
        more = len(metadata.tasks) - _MOST_TASKS
        lines.append("tasks: " + "; ".join(shown) + (f"; and {more:,} more" if more > 0 else ""))
    if metadata.fields:
        lines.append(f"fields of its own: {', '.join(item.name for item in metadata.fields)}")
    lines += [f"values of {name}: {spec!r}" for name, spec in (metadata.spec or {}).items()]
    dims = {name: getattr(metadata, name) for name in DIMS}
    return lines + [f"{name}: {dim}" for name, dim in dims.items() if dim is not None]


def _actions_text(report: Report) -> str:
    """Describe the usage of actions in one line."""
    actions = report.actions
    if actions is None:
        return ""
    if actions.counts is not None:
        total = max(1, sum(actions.counts.values()))
        return _some([f"{name}: {count / total:.1%}" for name, count in actions.counts.items()])
    places = actions.places
    if not places:
        return "continuous"
    spans = zip(places["low"], places["high"], strict=True)
    return _some([f"{place}: {number(low)} to {number(high)}" for place, (low, high) in enumerate(spans)])


def _some(items: Sequence[str]) -> str:
    more = len(items) - _MOST_ACTIONS
    return ", ".join(items[:_MOST_ACTIONS]) + (f" and {more} more" if more > 0 else "")


def _bars(counts: Sequence[int]) -> str:
    """Format a histogram as one line of text."""
    if not counts:
        return "-"
    highest = max(counts)
    return "".join(_BARS[0 if not count else 1 + round((len(_BARS) - 2) * count / highest)] for count in counts)


def number(value: float | None) -> str:
    """Format a number in about eight characters or fewer; None becomes an empty text."""
    if value is None:
        return ""
    if isinstance(value, int) and abs(value) < 10_000_000:
        return f"{int(value):,}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class ColumnReport:
    """Statistics of a column over all rows.

    Args:
        name: The name of the column.
        dtype: Type of the column's values: "float32", "int64", "image", "string" and so on.
        shape: The shape of a row; a text that describes the shapes if rows differ in length; None if a row is not an
            array.
        rows: Number of rows.
        nulls: Number of nulls, including nulls inside rows.
        nans, infinite: Number of NaN values, and number of infinite values.
        low, high, mean, deviation: Statistics of all finite values; None if the column has no finite values or no
            numbers.
        constant: Whether all rows are equal.
        whole: Whether all values are whole numbers.
        places: For a column of vectors, ``low``, ``high``, ``mean`` and ``deviation`` of each dimension; else None.
    """

    name: str
    dtype: str
    shape: list[int] | str | None
    rows: int
    nulls: int = 0
    nans: int = 0
    infinite: int = 0
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    deviation: float | None = None
    constant: bool = False
    whole: bool = False
    places: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Distribution:
    """Distribution of a number that each episode has, such as the return.

    Args:
        low, high, mean, deviation: Statistics over all episodes; None without episodes.
        quantiles: The 5th, 25th, 50th, 75th and 95th percentile; empty without episodes.
        edges, counts: The histogram.
    """

    low: float | None
    high: float | None
    mean: float | None
    deviation: float | None
    quantiles: Sequence[float]
    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True)
class EpisodesReport:
    """The episodes that were found.

    Args:
        count: Number of episodes.
        found_by: A text that names the columns from which the beginnings and ends of episodes were determined.
        transitions: Number of transitions in all episodes.
        lengths: Distribution of the number of transitions of an episode.
        returns: Distribution of the sum of the rewards of an episode's transitions.
        terminated, truncated, open: Number of episodes that end with ``done`` 1, with ``done`` 2, and with ``done`` 0.
        duplicates: Number of episodes whose steps all equal the steps of an earlier episode.
        done_codes: Number of rows with each done code.
        repeated_observations: Number of transitions whose observation equals the observation before.
        anomalies: Number of occurrences of each other anomaly, by a short name of the anomaly. Many findings are based
            on these numbers.
    """

    count: int
    found_by: str
    transitions: int
    lengths: Distribution
    returns: Distribution
    terminated: int
    truncated: int
    open: int
    duplicates: int
    done_codes: Mapping[str, int]
    repeated_observations: int
    anomalies: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ActionsReport:
    """Statistics of the actions, without the placeholder actions in first rows of episodes.

    Args:
        kind: "discrete" or "continuous".
        counts: Number of occurrences of each discrete action; None for continuous actions, or if there are too many
            distinct actions.
        places: For vectors, ``low``, ``high``, ``mean`` and ``deviation`` of each dimension; else None.
    """

    kind: str
    counts: Mapping[str, int] | None
    places: Mapping[str, Any] | None


@dataclass(frozen=True)
class Report:
    """Report of ``inspect``.

    Args:
        source: The name of the source, as the caller passed it.
        format: Name of the format.
        alignment: The alignment of the rows, "arrived" or "outgoing".
        alignment_found: A text that describes where the alignment comes from.
        rows: Number of rows.
        columns: The columns, in the order of the data.
        episodes: The episodes; None if the rows have no ``done``.
        actions: Statistics of the actions; None if there is no column of actions.
        findings: Errors, warnings and notes, in this order.
        metadata: Metadata of the dataset: environments, tasks, specs of columns, and other entries.
    """

    source: str
    format: str
    alignment: str
    alignment_found: str
    rows: int
    columns: Sequence[ColumnReport]
    episodes: EpisodesReport | None
    actions: ActionsReport | None
    findings: Sequence[Finding] = ()
    metadata: DatasetMetadata = field(default_factory=DatasetMetadata)

    @property
    def warnings(self) -> list[Finding]:
        """The findings that are errors or warnings."""
        return [finding for finding in self.findings if finding.level != "note"]

    def column(self, name: str) -> ColumnReport | None:
        """Return the report of the column with this name; None if there is no such column."""
        return next((column for column in self.columns if column.name == name), None)

    def to_json(self) -> str:
        """Return the report as JSON; numbers that JSON cannot represent become texts, such as "inf"."""
        content = asdict(replace(self, metadata=None)) | {"metadata": self.metadata.to_json()}  # type: ignore[arg-type]
        return json.dumps(as_json(content), indent=1, allow_nan=False) + "\n"
