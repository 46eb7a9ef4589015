"""What is shown while a study runs: a line a run, drawn by rich, or plain lines where nobody looks on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Rows of a terminal that are left to other things.
_MARGIN = 4


@dataclass(frozen=True)
class Shown:
    """How far a run is: "waiting", "running", "done", "failed" or "stopped", its steps, and its last loss."""

    state: str
    step: int = 0
    loss: float | None = None
    said: str = ""


class Plain:
    """Lines on stderr: a run begins, a run ends."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._states: dict[str, str] = {}

    def show(self, runs: Mapping[str, Shown]) -> None:
        """Say what has changed."""
        for name, now in runs.items():
            before = self._states.get(name, "waiting")
            if now.state != before:
                self._states[name] = now.state
                at = f" at step {now.step}" if 0 < now.step < self._steps else ""
                loss = "" if now.loss is None or now.state == "running" else f", loss {now.loss:.6g}"
                said = f": {now.said}" if now.said else ""
                print(f"{name}: {now.state}{at}{loss}{said}", file=sys.stderr, flush=True)  # noqa: T201


class Drawn:
    """A line a run; where there are more than fit, those that are done share one."""

    def __init__(self, progress: Any, names: Sequence[str], steps: int) -> None:
        self._progress = progress
        self._steps = steps
        self._rest = progress.add_task("", total=len(names), state="done", loss="", visible=False)
        self._tasks = {name: progress.add_task(name, total=steps, state="waiting", loss="") for name in names}
        self._folded = len(names) > progress.console.height - _MARGIN

    def show(self, runs: Mapping[str, Shown]) -> None:
        """Draw how far they are."""
        for name, now in runs.items():
            task = self._tasks[name]
            if now.state == "running" and self._progress.tasks[task].fields["state"] == "waiting":
                self._progress.reset(task, state="running", loss="")
            self._progress.update(
                task,
                completed=now.step,
                state=now.said or now.state,
                loss="" if now.loss is None else f"loss {now.loss:.5g}",
                visible=not self._folded or now.state in ("running", "failed"),
            )
        if self._folded:
            done = sum(now.state == "done" for now in runs.values())
            self._progress.update(self._rest, description="all runs", completed=done, visible=True)


@contextmanager
def view(names: Sequence[str], steps: int, progress: bool | None) -> Iterator[Plain | Drawn]:
    """What shows how far runs are.

    Args:
        names: The runs.
        steps: Of each.
        progress: Whether to draw; None: where stderr is a terminal.
    """
    drawn = sys.stderr.isatty() if progress is None else progress
    if not drawn:
        yield Plain(steps)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TextColumn("{task.fields[loss]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as made:
        yield Drawn(made, names, steps)
