"""A process that tokenises and is killed between any two of its steps, as a program of its own.

    python -m tests.core.text_crash FOLDER FIRST STRIDE

Every run is a forked child that kills itself at one of the calls that change files. The next run, which is not killed,
must find a whole store or make one, and have the rows that an undisturbed run has.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from mouse_core import BatchSource, text
from tests.core.killing import forked, killed_at
from tests.core.text_cases import Called

STEPS = ("write", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "open")
TEXTS = ["words " * (n % 5) for n in range(1500)]


def run(folder: Path) -> text.Tokenized:
    return text.tokenize(TEXTS, Called(), folder, text.Tokens(eos_id=0))


def check(folder: Path, step: int) -> None:
    """What is there is whole, or nothing, and the next call has it all."""
    made = run(folder)
    store = made.to_store()
    found = BatchSource(store, len(store), 1, "last")[0]["input_ids"][0].tolist()
    wanted = [token for one in TEXTS for token in [*(len(word) for word in one.split()), 0]]
    assert found == wanted, f"step {step}"
    assert made.texts == len(TEXTS)
    assert run(folder).reopened
    assert folder.joinpath(f"{Path(made.path).name}.json").exists()
    left = [path.name for path in folder.iterdir() if path.is_dir() and path != Path(made.path)]
    assert not left, f"step {step}: {left}"


def main(root: Path, first: int, stride: int) -> int:
    """Kill at every so many steps until a run comes to its end; how many were killed."""
    step, kills = first, 0
    while True:
        folder = root / str(step)

        def killed(folder: Path = folder, step: int = step) -> None:
            killed_at(STEPS, step, step % 2 == 0)
            run(folder)

        status = os.waitpid(forked(killed), 0)[1]
        assert status in (0, signal.SIGKILL), f"step {step}: the process ended with status {status}"
        # In a child, too: nothing of Arrow's threads is in the process that forks.
        folder.mkdir(parents=True, exist_ok=True)
        checked = os.waitpid(forked(lambda folder=folder, step=step: check(folder, step)), 0)[1]  # type: ignore[misc]
        assert checked == 0, f"step {step}: what was left is not whole"
        shutil.rmtree(folder)
        if not status:
            return kills
        step, kills = step + stride, kills + 1


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
