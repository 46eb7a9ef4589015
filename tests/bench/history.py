"""The goals' figures of every whole run, a line a commit in benchmarks/history.jsonl, and their picture."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.bench.goals import goals
from tests.bench.results import Results

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = 6  # that the picture shows
HISTORY = ROOT / "benchmarks" / "history.jsonl"


def line_of(results: Results, commit: str, day: str) -> dict[str, Any]:
    """What is kept of a run: for each goal, the found value in units of the limit; above 1 the goal is missed."""
    shares = {}
    for goal in goals(int(results.machine.get("cores", "1"))):
        value = goal.value(results)
        if value:
            share = value / goal.limit if goal.at_most else goal.limit / value
            shares[f"{goal.work}: {goal.goal}"] = round(share, 3)
    return {"commit": commit, "date": day, "processor": results.machine.get("processor", ""), "shares": shares}


def append(results: Results, path: Path = HISTORY) -> None:
    """Add the line of this commit; a second run of a commit replaces its line."""
    asked = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    line = line_of(results, commit, datetime.now(UTC).date().isoformat())
    before = [one for one in read(path) if one["commit"] != commit]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in [*before, line]), encoding="utf-8")


def read(path: Path = HISTORY) -> list[dict[str, Any]]:
    """The lines, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def draw(path: Path, lines: list[dict[str, Any]]) -> None:
    """A row for each goal with a dot for each of the last runs: the darker, the later; right of 1 a goal is missed."""
    shown, names = lines[-RUNS:], list(reversed(lines[-1]["shares"]))
    with panels(path, "found, in units of the limit (left of 1: met)", [0.17 * len(names) + 0.8]) as (panel,):
        for age, line in enumerate(reversed(shown)):
            known = [(line["shares"][name], place) for place, name in enumerate(names) if name in line["shares"]]
            how = {"label": f"{line['date']} {line['commit']}", "c": [0.95 - 0.7 * age / RUNS] * len(known)}
            panel.scatter(*zip(*known, strict=True), s=14, cmap="Greens", vmin=0, vmax=1, zorder=RUNS - age, **how)
        panel.axvline(1, color="#7a8a99", linewidth=0.8, linestyle="--", zorder=0)
        panel.set_ylim(-1, len(names))
        panel.set_yticks(range(len(names)), names, fontsize=5)
        panel.grid(axis="y", linewidth=0.2)
        panel.legend(fontsize=6, loc="lower left")


@contextmanager
def panels(path: Path, label: str, inches: Sequence[float]) -> Iterator[Sequence[Any]]:
    """Panels with logarithmic axes, one below the other, so high each, which are written to a file at the end."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams |= {"svg.hashsalt": "benchmarks", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(inches), 1, figsize=(9, sum(inches)), height_ratios=inches, squeeze=False)
    every = grid[:, 0]
    for panel in every:
        panel.set_xscale("log")
        panel.tick_params(axis="x", labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    yield every
    every[-1].set_xlabel(label, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
