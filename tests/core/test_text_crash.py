"""A store of tokens is whole or not there, wherever the process that makes it is killed, and however many make it."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.house import ROOT
from tests.core.text_cases import examples
from tests.programs import run_module


@pytest.mark.long
def test_a_kill_at_some_steps(tmp_path: Path) -> None:
    assert int(run_module("tests.core.text_crash", tmp_path, 1, 5)) > 4


@pytest.mark.slow
def test_processes_that_want_the_same_wait_for_one(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{one["text"]}"}}\n' for one in examples() * 200))
    code = (
        "from mouse_core import text; from tests.core.text_cases import tokenizer; made = text.tokenize("
        f"{str(tmp_path / 'texts.jsonl')!r}, tokenizer(), {str(tmp_path / 'made')!r}, text.Tokens()); "
        "print(made.path, made.reopened)"
    )
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [one.communicate(timeout=100)[0] for one in running]
    assert [one.returncode for one in running] == [0, 0, 0]
    assert sum("True" in one for one in said) == 2
    assert len({one.split()[0] for one in said}) == 1
