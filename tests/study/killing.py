"""A study in two frameworks that is killed again and again, beside one that nobody killed.

python -m tests.study.killing OUT [STEPS]
"""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mouse_study
from mouse_study import Results
from scripts.house import ROOT
from tests.study import networks


def values_of(results: Results) -> dict[tuple[str, int, str], float]:
    """What a study had that does not depend on how long anything took."""
    rows = results.table.to_pylist()
    return {
        (row["run"], row["step"], row["name"]): row["value"] for row in rows if row["name"] in ("loss", "evaluation")
    }


def children_of(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


def killed(folder: Path, steps: int, seeds: int, seconds: float, draw: random.Random) -> tuple[int, int]:
    """Run the study, and kill the study or one of its runs whenever; how often each.

    The first two kills fall within the ``seconds`` that a whole study takes, however fast the machine is; later ones
    become rarer, so that it ends on a slow one, too.
    """
    studies, runs = 0, 0

    def next_kill() -> float:
        # Of 10 s: the first after 0.5 to 4 s, the second 0.5 to 6.5 s later, the third 0.5 to 9 s.
        return time.monotonic() + seconds * draw.uniform(0.05, 0.4 + 0.25 * (studies + runs))

    while True:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.study.networks", folder, str(steps), str(seeds)], cwd=ROOT
        )
        until = next_kill()
        while process.poll() is None:
            if time.monotonic() > until:
                children = children_of(process.pid)
                if children and draw.random() < 0.5:
                    os.kill(draw.choice(children), signal.SIGKILL)
                    runs += 1
                    until = next_kill()
                else:
                    process.kill()
                    process.wait()
                    studies += 1
            time.sleep(0.01)
        if (folder / "study.json").exists():
            done = [run.status for run in mouse_study.collect(folder).runs]
            if done == ["done"] * (2 * seeds):
                return studies, runs


@dataclass
class Compared:
    """How often was killed, how many values are equal, and which are not."""

    studies: int
    runs: int
    equal: int
    different: list[tuple[str, int, str]]
    same_data: bool
    seeds_differ: bool


def compare(folder: Path, steps: int, seeds: int, seed: int) -> Compared:
    begin = time.monotonic()
    whole = networks.study(steps=steps, seeds=seeds).run(folder / "whole", jobs=2)
    seconds = time.monotonic() - begin
    studies, runs = killed(folder / "killed", steps, seeds, seconds, random.Random(seed))
    again = mouse_study.collect(folder / "killed")
    expected, found = values_of(whole), values_of(again)
    digests = {run.run: run.digest for run in whole.runs}
    of_seeds = {(run.seed, run.digest) for run in whole.runs}
    return Compared(
        studies,
        runs,
        sum(found.get(place) == value for place, value in expected.items()),
        sorted(place for place in expected.keys() | found.keys() if expected.get(place) != found.get(place)),
        digests == {run.run: run.digest for run in again.runs} and len(of_seeds) == seeds,
        len({values[0] for _, values in whole.series("loss").values()}) == 2 * seeds,
    )


if __name__ == "__main__":
    print(compare(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 600, seeds=3, seed=0))
