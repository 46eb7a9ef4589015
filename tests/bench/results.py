"""How thorough a run is, contenders measured in turns, and tables and figures as plain values that JSON holds."""

from __future__ import annotations

import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.bench.measuring import Contender, Timing, interleave

Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Settings:
    """How thorough a run is."""

    folder: Path  # for datasets and the peers' copies of them
    rounds: int  # turns of a fast contender
    budget: float  # seconds that a contender may take in a table, about
    rows: int  # steps of the datasets of numbers
    images: int  # steps of the datasets of images
    cores: int  # that this process may use
    quick: bool  # whether to leave out what takes long


@dataclass(frozen=True)
class Row:
    """One contender of a table."""

    name: str
    kind: str
    seconds: Quartiles  # of the time a batch takes
    ratio: Quartiles  # of that time over the reference's, round by round
    rounds: int  # in how many it took part


@dataclass(frozen=True)
class Table:
    """Contenders measured in turns."""

    key: str  # for goals to refer to
    title: str  # what was measured
    rows: Sequence[Row]  # ratios are over the first of them
    nbytes: int = 0  # what the first moves for a batch
    notes: Sequence[str] = ()  # what a reader should know
    units: int = 0  # how many of `unit` a batch has
    unit: str = ""  # what else is counted, "images" for one

    def row(self, start: str) -> Row | None:
        """The first row whose name begins so."""
        return next((row for row in self.rows if row.name.startswith(start)), None)


@dataclass(frozen=True)
class Figure:
    """A single number."""

    key: str  # for goals to refer to
    name: str
    value: float
    unit: str
    quartiles: tuple[float, float] | None = None  # where it was taken many times


def figure_of(key: str, name: str, quartiles: Quartiles, unit: str = "", scale: float = 1.0) -> Figure:
    """The figure of a median, with the quartiles beside it."""
    low, middle, high = (scale * value for value in quartiles)
    return Figure(key, name, middle, unit, (low, high))


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


def contenders(
    calls: Mapping[str, Callable[[int], Any]], *, first: str = "", kind: str = "", **options: Any
) -> list[Contender]:
    """Contenders by their names.

    Args:
        calls: What each does for a batch.
        first: The kind of the first, where it is another than that of the rest.
        kind: Their kind; by default "ours" of those whose name begins with "mouse", else "peer".
        **options: Of all contenders.
    """
    kinds = [kind or ("ours" if name.startswith("mouse") else "peer") for name in calls]
    kinds[:1] = [first or kinds[0]]
    return [Contender(name, call, of, **options) for (name, call), of in zip(calls.items(), kinds, strict=True)]


def peers(modules: Sequence[str], work: str, *arguments: Any) -> Iterator[Contender | str]:
    """Contenders that the function ``work`` of modules of ``tests.bench.peers`` makes, or notes why they lack."""
    for module in modules:
        name = module.removeprefix("of_")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield from getattr(importlib.import_module(f"tests.bench.peers.{module}"), work)(*arguments)
        except ImportError as error:
            yield f"{name} did not take part: {error}"
        except RuntimeError as error:
            yield f"{name} raised an error, {str(error).partition(chr(10))[0].partition('. ')[0]}"


def compare(
    settings: Settings,
    key: str,
    title: str,
    given: Iterable[Contender | str],
    *,
    rounds: int | None = None,
    budget: float = 1.0,
    slice_seconds: float = 0.008,
    notes: Sequence[str] = (),
    **options: Any,
) -> Table:
    """The table of contenders measured in turns, the first of which is the reference.

    Args:
        settings: How thorough it is.
        key: For goals to refer to.
        title: What is measured.
        given: Contenders, and notes about those that do not take part.
        rounds: Turns of a fast contender, if others than the settings'.
        budget: How many times the settings' seconds a contender may take.
        slice_seconds: How long a turn lasts, about.
        notes: What a reader should know.
        **options: As ``Table`` takes them.
    """
    every = list(given)
    taking_part = [one for one in every if isinstance(one, Contender)]
    timings = interleave(
        taking_part,
        rounds=rounds or settings.rounds,
        slice_seconds=slice_seconds,
        budget_seconds=budget * settings.budget,
    )
    notes = [*notes, *(one for one in every if isinstance(one, str))]
    return table_of(key, title, timings, notes=notes, **options)


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


def compare_on(device: str, settings: Settings, key: str, title: str, given: Iterable[Contender | str]) -> list[Table]:
    """The table of contenders on a device, with the wall clock where it is no CPU: waiting takes no processor time.

    Args:
        device: "cpu", or what else it runs on.
        settings: How thorough it is.
        key: Of the table, after ``on-device-``.
        title: What is measured.
        given: Contenders, and notes about those that do not take part; without contenders there is no table.
    """
    every = [one if isinstance(one, str) else replace(one, wall=device != "cpu") for one in given]
    if all(isinstance(one, str) for one in every):
        print(*every, sep="\n")
        return []
    for one in every:
        # A first call that compiles for more than a second would have turns of one call each, which finds caches cold.
        if isinstance(one, Contender):
            one.call(0)
    place = "" if device == "cpu" else "gpu-"
    return [compare(settings, f"on-device-{place}{key}", f"{title} ({device})", every, budget=2)]


def peer(package: str, name: str, make: Callable[[], Callable[[int], Any]]) -> Iterator[Contender | str]:
    """Somebody else's, or a note that says why it is not there."""
    if find_spec(package) is None:
        yield f"{name}: not measured, since {package} is not installed"
        return
    try:
        call = make()
        call(0)
    except Exception as error:
        yield f"{name}: not measured, {type(error).__name__}: {str(error).partition(chr(10))[0].partition('. ')[0]}"
        return
    yield Contender(name, call)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
