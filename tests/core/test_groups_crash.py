"""Nothing that was acknowledged is lost, and nothing comes twice, wherever the process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.killing import run_program


@pytest.mark.parametrize(
    ("first", "stride", "kills"),
    [
        pytest.param(3, 61, 6, marks=pytest.mark.slow, id="some steps"),
        pytest.param(1, 7, 50, marks=pytest.mark.long, id="many steps"),
    ],
)
def test_a_kill(tmp_path: Path, first: int, stride: int, kills: int) -> None:
    assert int(run_program("groups_crash", tmp_path, first, stride)) >= kills
