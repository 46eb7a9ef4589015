"""The command ``mouse study``."""

from __future__ import annotations

import argparse

from mouse_core.cli import Command
from mouse_core.errors import ConfigError
from mouse_study.comparing import pairs, verdict


def _declare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        help="a Python file with a Study at its top level (FILE.py:NAME if it has several)",
    )
    add("--out", metavar="FOLDER", help="folder of logs, checkpoints and results")
    add("--jobs", metavar="N", type=int, default=1, help="number of concurrent runs (1)")
    add(
        "--only",
        action="append",
        metavar="VARIANT/FRAMEWORK/SEED",
        default=[],
        help="only these runs; * matches anything, the end may be omitted; may be given several times",
    )


def _run(chosen: argparse.Namespace) -> int:
    """Train in several frameworks, variants and seeds, each in a separate process, and record all runs.

    examples:
      mouse study my_study.py --out out/my_study             all runs, one after another; repeated: the remaining runs
      mouse study my_study.py --out out/my_study --jobs 4    four runs at a time
      mouse study my_study.py --out out/my_study --only small/torch --only '*/jax/0'

    After Ctrl-C, a crash or kill -9 the same command continues, with equal results.

    status: 0 all selected runs are done, 1 some runs failed or were killed, 2 the study cannot be run
    """
    from mouse_study._running.jobs import selected
    from mouse_study.results import FILE
    from mouse_study.study import load_study

    if chosen.out is None:
        raise ConfigError("study: expected --out FOLDER, where runs are kept, found none")
    study = load_study(chosen.file)
    names = selected(study.runs, chosen.only)
    results = study.run(chosen.out, jobs=chosen.jobs, only=chosen.only)
    runs = {run.run: run.status for run in results.runs}
    done = sum(runs.get(name) == "done" for name in names)
    print(f"{study.name}: {done} of {len(names)} runs done, recorded in {chosen.out}/{FILE}")  # noqa: T201
    if results.table.num_rows:
        print(verdict(pairs(results), results.missing).reason)  # noqa: T201
    return 0 if done == len(names) else 1


STUDY: Command = (_declare, _run)
