"""Results of studies that did not run."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from mouse_study import SCHEMA, Results, Run


def table_of(rows: Sequence[tuple[Run, int, str, float]]) -> pa.Table:
    """The table of single values."""
    listed = [(run.run, run.variant, run.framework, run.seed, *value) for run, *value in rows]
    columns = dict(zip(SCHEMA.names, zip(*listed, strict=True) if listed else [()] * len(SCHEMA), strict=True))
    return pa.table(columns, SCHEMA).sort_by([(name, "ascending") for name in ("run", "step", "name")])


def planted(
    *,
    variants: tuple[str, ...] = ("default",),
    frameworks: tuple[str, ...] = ("torch", "jax"),
    seeds: int,
    unlike: dict[str, dict[str, Any]] | None = None,
) -> Results:
    """Finished runs of 20 steps without values, whose digests are equal for equal seeds.

    ``unlike`` has other facts of a run, by its name.
    """
    runs = []
    for variant in variants:
        for framework in frameworks:
            for seed in range(seeds):
                name = f"{variant}/{framework}/{seed}"
                facts: dict[str, Any] = {"status": "done", "steps": 20, "digest": f"{seed:02x}" * 16}
                facts |= (unlike or {}).get(name, {})
                runs.append(Run(run=name, variant=variant, framework=framework, seed=seed, **facts))
    return Results("planted study", 20, tuple(runs), table_of([]))
