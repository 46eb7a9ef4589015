"""A process that tokenises and is killed between any two of its steps, as a program of its own.

    python -m tests.core.text_crash FOLDER FIRST STRIDE

Every run is a forked child that kills itself at one of the calls that change files. The next run, which is not killed,
must find a whole store or make one, and have the rows that an undisturbed run has.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from mouse_core import BatchSource, text
from tests.core.killing import kill_at_every
from tests.core.text_cases import Called

STEPS = ("write", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "open")
TEXTS = ["words " * (n % 5) for n in range(1500)]


def run(folder: Path) -> text.Tokenized:
    return text.tokenize(TEXTS, Called(), folder, text.Tokens(eos_id=0))


def check(folder: Path, told: list[Any]) -> None:
    """What is there is whole, or nothing, and the next call has it all."""
    folder.mkdir(parents=True, exist_ok=True)
    made = run(folder)
    store = made.to_store()
    found = BatchSource(store, len(store), 1, "last")[0]["input_ids"][0].tolist()
    assert found == [token for one in TEXTS for token in [*(len(word) for word in one.split()), 0]]
    assert made.texts == len(TEXTS)
    assert run(folder).reopened
    assert folder.joinpath(f"{Path(made.path).name}.json").exists()
    left = [path.name for path in folder.iterdir() if path.is_dir() and path != Path(made.path)]
    assert not left
    shutil.rmtree(folder)


if __name__ == "__main__":
    folder, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(kill_at_every(folder, first, stride, steps=STEPS, run=lambda root, tell: run(root) and None, check=check))
