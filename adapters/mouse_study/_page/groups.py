"""The numbers behind the page of a study: groups of runs, their curves, final values and times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from mouse_study.results import Results, Run
from mouse_study.statistics import Band, band

Floats = NDArray[np.float64]
Series = Mapping[str, tuple[NDArray[np.int64], Floats]]

#: What says where time and memory went; all other names are values of the training.
COSTS = ("wait", "compute", "memory", "setup")
#: The last tenth of what a run recorded counts as its end.
_END = 10


@dataclass(frozen=True)
class Group:
    """The runs of one variant in one framework, which only their seeds tell apart.

    Attributes:
        variant: the variant.
        framework: the framework.
        colour: the framework's place among all.
        runs: all of them, by seed.
    """

    variant: str
    framework: str
    colour: int
    runs: tuple[Run, ...]

    @property
    def done(self) -> tuple[Run, ...]:
        """The runs that finished: statistics are over these."""
        return tuple(run for run in self.runs if run.status == "done")


@dataclass(frozen=True)
class Times:
    """The time of one run by part, in seconds.

    Attributes:
        wait: waiting for batches, after the first step.
        compute: computing steps, after the first step.
        first: the first step, including compilation and other one-time work.
        rest: everything outside steps: start, evaluations, checkpoints.
        per_second: steps per second after the first, waiting included; None for fewer than two steps.
    """

    wait: float
    compute: float
    first: float
    rest: float
    per_second: float | None


def groups(results: Results) -> list[Group]:
    """The runs by variant and framework, in the order of their names, whatever the order of the runs is."""
    frameworks = sorted({run.framework for run in results.runs})
    found = []
    for variant in sorted({run.variant for run in results.runs}):
        for place, framework in enumerate(frameworks):
            runs = [run for run in results.runs if (run.variant, run.framework) == (variant, framework)]
            if runs:
                found.append(Group(variant, framework, place, tuple(sorted(runs, key=lambda run: run.seed))))
    return found


def trained_names(results: Results) -> list[str]:
    """The names of values of the training: the loss, then evaluations, then what else there is."""
    names = [name for name in results.names if name not in COSTS]
    return sorted(names, key=lambda name: (name != "loss", not name.startswith("eval"), name))


def curve(group: Group, series: Series) -> tuple[NDArray[np.int64], Floats] | None:
    """Return the steps ``[n]`` that all finished runs of a group recorded, and their values ``[runs, n]``; or None."""
    found = [series[run.run] for run in group.done if run.run in series]
    if not found:
        return None
    steps = reduce(np.intersect1d, [steps for steps, _ in found])
    if not len(steps):
        return None
    return steps, np.stack([values[np.isin(its, steps)][: len(steps)] for its, values in found])


def final_values(runs: Sequence[Run], series: Series) -> Floats:
    """Return the final value of each run: the mean of the last tenth of its recorded values, at least one.

    For 300 losses it is the mean of the last 30, for 5 evaluations the last one. Runs without values are left out.
    """
    found = [series[run.run][1] for run in runs if run.run in series]
    with np.errstate(over="ignore", invalid="ignore"):
        ends = [values[-max(1, len(values) // _END) :].mean() for values in found if len(values)]
    return np.array(ends, np.float64)


def pooled(members: Sequence[Group], series: Series) -> Band | None:
    """The band over all variants of a framework, which are the strata; None where a variant has no finished run."""
    strata = [final_values(group.done, series) for group in members]
    return band(strata) if strata and all(len(stratum) for stratum in strata) else None


def times(run: Run, wait: Series, compute: Series) -> Times:
    """Return the time of a run by part.

    Args:
        run: the run.
        wait: the recorded waiting times.
        compute: the recorded computing times.
    """
    waited, computed = (series[run.run][1] if run.run in series else np.empty(0) for series in (wait, compute))
    first = run.first_step_seconds if run.first_step_seconds is not None else float(computed[:1].sum())
    first = first if math.isfinite(first) else 0.0
    waited, computed = (np.where(np.isfinite(values), values, 0.0) for values in (waited, computed))
    after = float(waited[1:].sum()), float(computed[1:].sum())
    steps = len(computed) - 1
    return Times(
        wait=after[0],
        compute=after[1],
        first=first,
        rest=max(0.0, run.seconds - first - sum(after)) if math.isfinite(run.seconds) else 0.0,
        per_second=steps / sum(after) if steps > 0 and sum(after) > 0.0 else None,
    )
