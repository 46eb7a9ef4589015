"""The GRPO example learns to count."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mouse_core.groups import open_rollouts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.slow
def test_the_reward_rises(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "grpo_letters.py"), "--steps", "30", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"first 5 steps ([\d.]+), of the last 5 ([\d.]+)", run.stdout)
    assert found, run.stdout
    first, last = float(found[1]), float(found[2])
    # Answers at random earn 0.2, and the same answer to every question at most 0.55.
    assert first < 0.35
    assert last > first + 0.15
    stored = open_rollouts(tmp_path)
    assert len(stored) == 30 * 2 * 32 * 8
    assert stored.policy_versions == [str(version) for version in range(30)]
