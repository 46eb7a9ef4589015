"""The asynchronous example, killed in the middle and started again: no rollout is lost, none is trained on twice."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core.groups import open_rollouts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "async_grpo_ray.py"
RANKS = (0, 1)


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--output", str(folder), "--steps", str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
    )


def kill(running: subprocess.Popen[str]) -> None:
    """Kill all of it at once: Ray's actors are of other process groups, and would train on for a while."""
    importlib.import_module("ray")  # brings psutil along
    psutil = importlib.import_module("psutil")
    of_it = psutil.Process(running.pid).children(recursive=True)
    os.killpg(running.pid, signal.SIGKILL)
    for one in of_it:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    running.communicate()


def trained(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank wrote down, but for a line that the kill cut off."""
    path = folder / f"trained-{rank}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


@pytest.mark.long
def test_killed_it_goes_on_where_it_was(tmp_path: Path) -> None:
    running, deadline = start(tmp_path, 100_000), time.monotonic() + 240
    while len(trained(tmp_path, 0)) < 5:
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill(running)
    # What waited for its reward or its group, and what no batch had: all of it must be there afterwards.
    before = set(open_rollouts(tmp_path / "rollouts").uids)
    done = max(one["step"] for rank in RANKS for one in trained(tmp_path, rank)) + 1

    resumed = start(tmp_path, done + 15)
    printed, problems = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, problems
    stored = open_rollouts(tmp_path / "rollouts")
    assert before <= set(stored.uids)
    assert len(set(stored.uids)) == len(stored)

    shares = [{one["step"]: one["uids"] for one in trained(tmp_path, rank)} for rank in RANKS]
    for rank in RANKS:
        # A step that was done again had the same rollouts, and no step is missing.
        assert all(shares[rank][one["step"]] == one["uids"] for one in trained(tmp_path, rank))
        assert sorted(shares[rank]) == list(range(done + 15))
    uids = [uid for share in shares for step in share.values() for uid in step]
    assert len(uids) == len(set(uids)) == 32 * (done + 15)
    assert set(uids) <= set(stored.uids)

    # Rewards are the judge's, of the tokens that were stored.
    for uid in uids[::50]:
        prompt, answer = stored.rollout(uid).turns
        assert stored.rollout(uid).reward == np.mean(answer.tokens == prompt.tokens[0])
    found = re.search(r"first tenth ([\d.]+), of the last ([\d.]+)", printed)
    assert found, printed
    # Answers at random earn 0.125.
    assert float(found[2]) > float(found[1]) + 0.1
