"""Studies as files would hold them, made up: what each number of theirs is, is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_study import SCHEMA, Results, Run

NASTY = '</script><script>window.evil = 1</script><img src="https://example.invalid/x.png" onerror="window.evil=1">'


def table_of(rows: Sequence[tuple[Run, int, str, float]]) -> pa.Table:
    """The table of single values: of each the run, the step, the name and the value."""
    listed = [(run.run, run.variant, run.framework, run.seed, *value) for run, *value in rows]
    columns = dict(zip(SCHEMA.names, zip(*listed, strict=True) if listed else [()] * len(SCHEMA), strict=True))
    return pa.table(columns, SCHEMA).sort_by([(name, "ascending") for name in ("run", "step", "name")])


def planted(
    *,
    variants: tuple[str, ...] = ("default",),
    frameworks: tuple[str, ...] = ("torch", "jax"),
    seeds: int = 3,
    steps: int = 300,
    unlike: dict[str, dict[str, Any]] | None = None,
) -> Results:
    """A study whose losses fall, agree to rounding, and part in the second half.

    Args:
        variants: names.
        frameworks: names.
        seeds: how many.
        steps: of each run.
        unlike: other facts of a run, by its name.
    """
    runs, rows = [], []
    for level, variant in enumerate(variants):
        for place, framework in enumerate(frameworks):
            for seed in range(seeds):
                facts: dict[str, Any] = {
                    "run": f"{variant}/{framework}/{seed}",
                    "variant": variant,
                    "framework": framework,
                    "seed": seed,
                    "status": "done",
                    "steps": steps,
                    "seconds": 12.0 + 5.0 * place + seed,
                    "compile_seconds": 1.25 if framework == "jax" else None,
                    "first_step_seconds": 0.2 + 1.5 * place,
                    "peak_memory": (600 + 150 * place) * 2**20,
                    "versions": {"python": "3.11.9", framework: f"{2 + place}.1.0"},
                    "fingerprint": "0123456789abcdef",
                    "digest": f"{seed:02x}" * 16,
                    "machine": {"processor": "made up", "cores": 8},
                }
                run = Run(**facts | (unlike or {}).get(facts["run"], {}))
                runs.append(run)
                rows += values_of(run, level, place)
    return Results("planted study", steps, tuple(runs), table_of(rows))


def values_of(run: Run, level: int, place: int) -> list[tuple[Run, int, str, float]]:
    """The values of a run: losses, costs, an evaluation every 50 steps."""
    random = np.random.default_rng([run.seed, level])
    at = np.arange(run.steps)
    losses = (2 + level) * np.exp(-at / 80) + 0.3 + 0.05 * random.normal(size=run.steps) ** 2 + 0.02 * run.seed
    own = np.random.default_rng([run.seed, level, place])
    apart = np.where(at < run.steps // 2, 1e-7, 1e-7 * np.exp((at - run.steps // 2) / 12))
    losses = losses * (1.0 + place * np.minimum(apart, 0.1) * own.normal(size=run.steps))
    rows: list[tuple[Run, int, str, float]] = []
    for step in at.tolist():
        rows.append((run, step, "loss", float(losses[step])))
        rows.append((run, step, "wait", 0.002 if step else 0.1))
        rows.append((run, step, "compute", 0.02 + 0.01 * place))
        if step % 50 == 49:
            rows.append((run, step, "evaluation", float(200 - 60 * losses[step] + own.normal())))
            rows.append((run, step, "memory", (500.0 + 150 * place) * 2**20))
    return rows
