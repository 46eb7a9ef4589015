"""A store of tokens is whole or not there, wherever the process that makes it is killed, and however many make it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.text_cases import examples, tokenizer_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_a_kill_at_some_steps(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.core.text_crash", str(tmp_path), "1", "5"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert int(run.stdout) > 4


@pytest.mark.slow
def test_processes_that_want_the_same_wait_for_one(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{one["text"]}"}}\n' for one in examples() * 200))
    asked = ["tokenize", str(tmp_path / "texts.jsonl"), str(tmp_path / "made"), "--as", "tokens"]
    asked += ["--tokenizer", str(tokenizer_file(tmp_path))]
    command = [sys.executable, "-m", "mouse_core.cli", *asked]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [one.communicate(timeout=100)[0] for one in running]
    assert [one.returncode for one in running] == [0, 0, 0]
    assert sum("which were there" in one for one in said) == 2
    assert len({one.split(":")[0] for one in said}) == 1
