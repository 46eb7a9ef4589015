"""Report of an inspection."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mouse_core.inspect._checks.finding import Finding


@dataclass(frozen=True)
class ColumnReport:
    """Figures of a column over all rows.

    Args:
        name: Its name.
        dtype: Type of its values: "float32", "int64", "image", "string" and so on.
        shape: The shape of a row; a text where rows differ in length; None where a row is no array.
        rows: Number of rows.
        nulls: Values that are null, also inside rows.
        nans, infinite: Values that are NaN; that are infinite.
        low, high, mean, deviation: Over all finite values; None without any, or where values are no numbers.
        constant: Whether all rows are the same.
        whole: Whether all values are whole numbers.
        values: How often the most frequent values occur, of columns of few texts; else None.
        histogram: ``edges`` and ``counts`` of all finite values; None where none was kept.
        places: ``low``, ``high``, ``mean``, ``deviation`` and ``histograms`` of each place of vectors; else None.
        spec: Which values the data say that it has, as ``mouse_core.spec`` writes them down; None: any.
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
    values: Mapping[str, int] | None = None
    histogram: Mapping[str, Any] | None = None
    places: Mapping[str, Any] | None = None
    spec: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Distribution:
    """Numbers of which there is one for every episode.

    Args:
        low, high, mean, deviation: Of all; None without episodes.
        quantiles: The 5th, 25th, 50th, 75th and 95th percentile; empty without episodes.
        edges, counts: A histogram.
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
        count: How many.
        found_by: What told where they begin and end: columns, in words.
        transitions: Over all.
        lengths: Transitions of an episode.
        returns: Sum of the rewards of an episode's transitions.
        terminated, truncated, open: How many end with done 1, with done 2, with neither.
        duplicates: How many are, step by step, the same as an earlier one.
        done_codes: How many rows have each done code.
        repeated_observations: Transitions whose observation is the one before.
        anomalies: How often other things occur that should not, or that tell of such; see ``warnings``.
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
    """Usage of actions, without the placeholder actions in first rows of episodes.

    Args:
        kind: "discrete" or "continuous".
        counts: How often each discrete action occurs, by action; None for others, or where there are too many.
        places: For every place of a vector ``low``, ``high``, ``mean``, ``deviation`` and ``histograms``, or None.
    """

    kind: str
    counts: Mapping[str, int] | None
    places: Mapping[str, Any] | None


@dataclass(frozen=True)
class Report:
    """Report of ``inspect``.

    Args:
        source: As it was asked for.
        format: The format in words.
        alignment: "arrived" or "outgoing": how the rows stand.
        alignment_found: How that was found out, in words.
        rows: Number of rows.
        columns: The columns, in their order.
        episodes: The episodes; None where the rows have no ``done``.
        actions: How actions are used; None without the column.
        findings: Errors, warnings and notes, in this order.
        metadata: The metadata of the data, as ``mouse_core.metadata`` writes it: ``environments``, ``tasks``, ...
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
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def warnings(self) -> list[Finding]:
        """The findings that are errors or warnings."""
        return [finding for finding in self.findings if finding.level != "note"]

    def column(self, name: str) -> ColumnReport | None:
        """The column of this name, if there is one."""
        return next((column for column in self.columns if column.name == name), None)

    def to_json(self) -> str:
        """Everything as JSON; numbers that JSON has no sign for are texts ("inf")."""
        return json.dumps(_plain(asdict(self)), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
