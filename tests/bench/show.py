"""Results as tables of text, as a page of the documentation, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.bench.goals import SCALES, goals
from tests.bench.history import panels
from tests.bench.results import Figure, Quartiles, Results, Row, Table

_GOAL_HEAD = ("work", "goal", "found", "met")


def goal_rows(results: Results) -> list[tuple[str, str, str, str]]:
    """The table of goals as text."""
    rows = []
    for goal in goals(int(results.machine.get("cores", "1"))):
        value = goal.value(results)
        shown = "not measured" if value is None else f"{number(value)}{goal.unit}"
        met = "" if value is None else "yes" if goal.met(value) else "**no**"
        rows.append((_measured(goal.work, results), goal.goal, shown, met))
    return rows


def _measured(work: str, results: Results) -> str:
    """What was measured, where that may be another size than the goal's."""
    table = next((results.table(key) for key, named in SCALES.items() if named == work), None)
    if table is not None:
        return table.title
    if work.startswith("first batch after from_dataset"):
        return next((figure.name for figure in results.figures if figure.key == "scale-first"), work)
    return work


def number(value: float) -> str:
    """Three digits, thousands separated."""
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def _spread(values: Quartiles, scale: float = 1.0) -> str:
    low, middle, high = (number(value * scale) for value in values)
    return f"{middle} ({low} to {high})"


def _head(table: Table) -> tuple[str, ...]:
    counted = f"{table.unit}/s" if table.unit else "batches/s"
    return ("", "times the first row", "us a batch", counted, *(("GB/s",) if table.nbytes else ()))


def _cells(table: Table, row: Row) -> tuple[str, ...]:
    median = row.seconds[1]
    cells = [row.name, _spread(row.ratio), _spread(row.seconds, 1e6), number(max(table.units, 1) / median)]
    if table.nbytes:
        cells.append(number(table.nbytes / median / 1e9))
    return tuple(cells)


def show(found: Table | Figure) -> None:
    """Print a table, or a single figure."""
    print(
        "\n".join(_lines(found)) if isinstance(found, Table) else " | ".join(filter(None, _figure(found))), flush=True
    )


def show_goals(results: Results) -> None:
    """Print the goals that were measured."""
    print(_markdown(_GOAL_HEAD, [row for row in goal_rows(results) if row[3]]))


def _lines(table: Table) -> list[str]:
    rows = [_cells(table, row) for row in table.rows]
    notes = [f"- {note}" for note in table.notes]
    return [f"## {table.title}\n", _markdown(_head(table), rows), *notes, *([""] if notes else [])]


def _figure(figure: Figure) -> tuple[str, str, str]:
    spread = f"{number(figure.quartiles[0])} to {number(figure.quartiles[1])}" if figure.quartiles else ""
    return figure.name, f"{number(figure.value)} {figure.unit}", spread


# ---------------------------------------------------------------------- page

_INTRODUCTION = """\
# Benchmarks

`make bench` writes this page (and `make bench-scale` measures the largest data). Compare ratios rather than times,
since the machine in the table is small and was shared with other work. Run `make bench` to measure your own machine.

{machine}

![Time of a batch, divided by the time of the floor](assets/benchmarks.svg)

A complete run of `make bench` adds a line to `benchmarks/history.jsonl`. In the next image, each dot is one goal in
one of the latest runs; a dot to the right of 1 is a missed goal:

![For each run and goal, the measured figure divided by the limit of the goal](assets/benchmarks-history.svg)

## How to read this

- The **floor** is a loop in C that copies the same windows with `memcpy` into allocated memory. On one core, no reader
  of these data can be faster. Ratios compare each row of a table with the first row.
- In one process, the compared programs alternate every few milliseconds. A ratio is computed for each pair of turns, so
  a slow phase of the machine affects both programs alike. Tables show medians, with quartiles in brackets.
- The time of a program is its processor time or the wall-clock time, whichever is less, so other work on the machine
  does not count. For programs with several processes, or decoding on several cores, the time is the wall-clock time.
- Every program runs on one core, except where threads or processes are measured. torch uses one thread, the fastest
  setting for TorchRL on this machine.
- Other libraries run with their fastest settings. They read arrays in memory or mapped flat files instead of record
  batches, and keep the bounds of trajectories in a cache. The compilation time of jitted functions is not counted.
- In rows named `mouse source[i]`, batches have the stored dtypes, as in other libraries
  (`dtypes={{"obs_continuous": "float32"}}`).
"""


def page(results: Results) -> str:
    """docs/benchmarks.md."""
    facts = {**results.machine, **results.versions}
    machine = _markdown(("", ""), list(facts.items()))
    parts = [_INTRODUCTION.format(machine=machine)]
    parts += ["## Goals\n", _markdown(_GOAL_HEAD, goal_rows(results))]
    for table in results.tables:
        parts += _lines(table)
    parts += ["## Single figures\n", _markdown(("", "", "quartiles"), list(map(_figure, results.figures)))]
    return "\n".join(parts).rstrip() + "\n"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- picture


def picture(results: Results, path: Path) -> None:
    """Bars of the ratios to the floor, a panel for each of the tables that have a floor and peers."""
    tables = [table for table in results.tables if table.nbytes and any(row.kind == "peer" for row in table.rows)]
    if not tables:
        return
    colours = {"floor": "#7a8a99", "ours": "#2a9d5c", "peer": "#c9a26b"}
    inches = [0.26 * len(table.rows) + 0.75 for table in tables]
    with panels(path, "times the floor (logarithmic)", inches) as drawn:
        for panel, table in zip(drawn, tables, strict=True):
            rows = list(reversed(table.rows))
            ratios = [row.ratio[1] for row in rows]
            panel.barh([row.name for row in rows], ratios, color=[colours[row.kind] for row in rows])
            panel.set_xlim(0.5, max(ratios) * 3)
            panel.set_title(table.title, loc="left", fontsize=9)
            panel.tick_params(axis="y", labelsize=7)
            for place, ratio in enumerate(ratios):
                panel.text(ratio * 1.08, place, number(ratio), va="center", fontsize=7)
