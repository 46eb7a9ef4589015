"""What a run found: tables of contenders and single figures, as plain values that JSON holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mouse_core.bench import Timing

Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Row:
    """One contender of a table.

    Args:
        name, kind: The contender's.
        seconds: Quartiles of the time a batch takes.
        ratio: Quartiles of that time over the reference's, round by round.
        rounds: In how many it took part.
    """

    name: str
    kind: str
    seconds: Quartiles
    ratio: Quartiles
    rounds: int


@dataclass(frozen=True)
class Table:
    """Contenders measured in turns.

    Args:
        key: For goals to refer to.
        title: What was measured.
        rows: The contenders; ratios are over the first of them.
        nbytes: What the first moves for a batch.
        notes: What a reader should know.
        units: How many of `unit` a batch has.
        unit: What else is counted, "images" for one.
    """

    key: str
    title: str
    rows: Sequence[Row]
    nbytes: int = 0
    notes: Sequence[str] = ()
    units: int = 0
    unit: str = ""

    def row(self, start: str) -> Row | None:
        """The first row whose name begins so."""
        return next((row for row in self.rows if row.name.startswith(start)), None)

    def times(self, slower: str, faster: str) -> float | None:
        """How many times as long the median of one takes as that of another; None where one did not take part."""
        above, below = self.row(slower), self.row(faster)
        return None if above is None or below is None else above.ratio[1] / below.ratio[1]


@dataclass(frozen=True)
class Figure:
    """A single number.

    Args:
        key: For goals to refer to.
        name: What it is.
        value: How much.
        unit: Of what.
        quartiles: Lower and upper quartile, where it was taken many times.
    """

    key: str
    name: str
    value: float
    unit: str
    quartiles: tuple[float, float] | None = None


@dataclass
class Results:
    """Everything that one run found."""

    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def table(self, key: str) -> Table | None:
        """The table of that key."""
        return next((table for table in self.tables if table.key == key), None)

    def figure(self, key: str) -> float | None:
        """The figure of that key."""
        return next((figure.value for figure in self.figures if figure.key == key), None)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(asdict(self)), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what `save` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        tables = [
            Table(**{**table, "rows": [Row(**_tuples(row)) for row in table["rows"]]}) for table in found["tables"]
        ]
        figures = [Figure(**_tuples(figure)) for figure in found["figures"]]
        return cls(found["machine"], found["versions"], found["settings"], tables, figures)


def table_of(key: str, title: str, timings: Sequence[Timing], **options: Any) -> Table:
    """The table of some timings, the first of which is the reference."""
    rows = [
        Row(
            timing.contender.name,
            timing.contender.kind,
            timing.quartiles,
            timing.ratio(timings[0]),
            int(sum(not math.isnan(value) for value in timing.seconds)),
        )
        for timing in timings
    ]
    return Table(key, title, rows, **options)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
