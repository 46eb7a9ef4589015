"""Examples as users run them: what they count, draw, learn and keep."""

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

from examples import augmentation, count_visits
from mouse_core import AugmentTokensConfig, DatasetStore
from mouse_core.groups import open_rollouts
from tests.core.object_server import ObjectServer
from tests.programs import EXAMPLES, run_program


def test_a_bonus_for_what_was_seldom_seen_finds_the_goal() -> None:
    found = count_visits.explore(150, seed=0)
    assert found.goals > 0
    assert found.states == len(found.visits)
    assert int(found.visits.values().sum()) == 150 * 16
    without = count_visits.explore(150, bonus=0, seed=0)
    assert without.goals == 0
    assert without.states < found.states


@pytest.fixture(scope="module")
def lake() -> DatasetStore:
    return augmentation.record_lake()


def test_the_recorded_values_are_optimal(lake: DatasetStore) -> None:
    import gymnasium as gym

    with gym.make("FrozenLake-v1", map_name="8x8") as environment:
        values = augmentation.frozen_lake_values(environment)
        model: Any = environment.unwrapped
        residual = [
            abs(
                values[state, action]
                - sum(p * (r + augmentation.DISCOUNT * values[s].max() * (not over)) for p, s, r, over in moves)
            )
            for state in range(augmentation.STATES)
            for action, moves in model.P[state].items()
        ]
    assert max(residual) < 1e-9
    assert 0 < values[0].max() < values[62].max() < 1


def test_a_window_before_and_after(lake: DatasetStore) -> None:
    before = augmentation.window(lake, None)
    after = augmentation.window(lake, AugmentTokensConfig(permute_action="both"))
    steps = np.arange(augmentation.STEPS)
    assert not np.array_equal(before["action"], after["action"])
    np.testing.assert_array_equal(before["q_star"][steps, before["action"]], after["q_star"][steps, after["action"]])


@pytest.mark.slow
def test_it_draws(lake: DatasetStore, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "picture.png"
    augmentation.draw(augmentation.record_lander(), lake, output)
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_was_collected_is_trained_on_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    options = ("--episodes", "30", "--epochs", "3")
    done = run_program(EXAMPLES / "collect_and_train.py", str(folder), *options, frameworks=True, seconds=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"rows: {len(DatasetStore.open(folder))}"
    assert DatasetStore.open(folder).episodes.num_rows == 30


@pytest.mark.parametrize("example", ["from_object_storage"], indirect=True)
def test_pushes_are_learnt_and_the_second_run_reads_the_cache(example, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(example, "BATCHES", 40)
    with ObjectServer() as server:
        for name, value in server.options.items():
            monkeypatch.setenv(name.upper(), value)
        told = ["--url", "s3://data/runs/carts", "--output", str(tmp_path)]
        sent = []
        for _ in range(2):
            monkeypatch.setattr(sys, "argv", ["from_object_storage.py", *told])
            example.main()
            said = capsys.readouterr().out
            agreed = [float(line.split(": ")[1]) for line in said.splitlines() if line.startswith("pushes")]
            # A fifth of the recorded pushes are at random: no policy chooses more than four fifths of them.
            assert 0.7 < agreed[1] < 0.85
            sent.append(server.sent("segments"))
        size = sum(one.size for path, one in server.objects.items() if path.endswith(".arrow"))
    assert 0 < sent[0] <= 1.5 * size
    assert sent[1] == sent[0]  # all of it was in the cache


ASYNC_GRPO = Path(__file__).resolve().parents[2] / "examples" / "async_grpo_ray.py"
RANKS = (0, 1)


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ASYNC_GRPO), "--output", str(folder), "--steps", str(steps)],
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
