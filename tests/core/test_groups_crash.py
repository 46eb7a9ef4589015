"""Nothing that was acknowledged is lost, and nothing comes twice, wherever the process is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def kills(folder: Path, first: int, stride: int, program: str = "tests.core.groups_crash") -> int:
    run = subprocess.run(
        [sys.executable, "-m", program, str(folder), str(first), str(stride)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return int(run.stdout)


@pytest.mark.slow
def test_a_kill_at_some_steps(tmp_path: Path) -> None:
    assert kills(tmp_path, 2, 11) > 5


@pytest.mark.long
def test_a_kill_at_every_step(tmp_path: Path) -> None:
    assert kills(tmp_path, 1, 1) > 60


@pytest.mark.long
@pytest.mark.slow
def test_a_kill_at_some_steps_of_who_writes_late_columns(tmp_path: Path) -> None:
    assert kills(tmp_path, 3, 9, "tests.core.groups_late_crash") > 20
