"""The command ``mouse study``."""

from __future__ import annotations

import argparse

from mouse_core.cli import Command


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a Python file with a Study at its top (FILE.py:NAME where it has several), or YAML",
    )
    parser.add_argument("--out", metavar="FOLDER", required=True, help="where logs, checkpoints and results are kept")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="how many runs are at work at a time (1)")
    parser.add_argument(
        "--only",
        action="append",
        metavar="VARIANT/FRAMEWORK/SEED",
        default=[],
        help="only these runs; * stands for anything, the end may be left out; may be given several times",
    )


def _run(chosen: argparse.Namespace) -> int:
    """Train in several frameworks, variants and seeds, each in a process of its own, and record all of it.

    examples:
      mouse study my_study.py --out out/my_study             every run, one after the other; again: what is left of them
      mouse study my_study.yaml --out out/my_study --jobs 4
      mouse study my_study.py --out out/my_study --only small/torch --only '*/jax/0'

    After Ctrl-C, a crash or kill -9 the same command goes on, with equal results.

    status: 0 all of these runs are done, 1 some failed or were killed, 2 a study that cannot be run
    """
    from mouse_study._page.page import page
    from mouse_study._running.jobs import selected
    from mouse_study.results import FILE
    from mouse_study.study import load_study

    study = load_study(chosen.file)
    names = selected(study.runs, chosen.only)
    results = study.run(chosen.out, jobs=chosen.jobs, only=chosen.only)
    runs = {run.run: run.status for run in results.runs}
    done = sum(runs.get(name) == "done" for name in names)
    print(f"{study.name}: {done} of {len(names)} runs done, recorded in {chosen.out}/{FILE}")  # noqa: T201
    if results.table.num_rows:
        print(f"page: {page(results, chosen.out)}")  # noqa: T201
    return 0 if done == len(names) else 1


STUDY: Command = (_declare, _run)
