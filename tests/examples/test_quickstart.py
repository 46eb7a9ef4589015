"""The quickstart as a newcomer runs it, and the rows that it records."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import gymnasium as gym
import numpy as np
import pytest

from mouse_core import DatasetStore
from mouse_core.record import Recorder
from tests.programs import run_example

NAMES = [
    "episodes recorded",
    "steps recorded",
    "dataset",
    "training steps",
    "final loss",
    "batches per second",
    "waiting for data",
    "return recorded",
    "return untrained",
    "return trained",
    "plot",
]

EXAMPLE = "lunar_lander"
LITTLE = ("--episodes", "4", "--steps", "6", "--seed", "5")


def run_quickstart(output: Path, *options: str) -> dict[str, str]:
    return run_example("quickstart.py", "--output", str(output), *options)


def number(value: str) -> float:
    return float(value.removesuffix(" %"))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run on little data prints; its output folder did not exist before."""
    return run_quickstart(tmp_path_factory.mktemp("quickstart") / "new" / "folder", *LITTLE)


@pytest.mark.slow
def test_the_script_prints_its_figures(printed: dict[str, str]) -> None:
    assert list(printed) == NAMES
    assert printed["episodes recorded"] == "4"
    assert printed["training steps"] == "6"
    assert 0.0 <= number(printed["waiting for data"]) <= 100.0
    assert number(printed["batches per second"]) > 0.0
    assert np.isfinite([number(printed[name]) for name in NAMES if name.startswith("return")]).all()


@pytest.mark.slow
def test_the_script_leaves_the_dataset_and_the_plot(printed: dict[str, str]) -> None:
    dataset = datasets.load_from_disk(printed["dataset"])
    assert len(dataset) == number(printed["steps recorded"])
    assert {"observation", "action", "reward", "done", "episode_step"} <= set(dataset.column_names)
    assert list(dataset["episode_step"]).count(0) == 4
    assert sum(code in (1, 2) for code in dataset["done"]) == 4
    assert sum(dataset["reward"]) / 4 == pytest.approx(number(printed["return recorded"]), abs=0.1)

    assert Path(printed["plot"]).read_bytes().startswith(b"\x89PNG")
    assert Path(printed["plot"]).parent == Path(printed["dataset"]).parent


@pytest.mark.slow
def test_a_seed_decides_everything_but_the_speed(printed: dict[str, str], tmp_path: Path) -> None:
    again = run_quickstart(tmp_path, *LITTLE)
    for name in NAMES:
        if name not in ("batches per second", "waiting for data", "dataset", "plot"):
            assert again[name] == printed[name], name


def flown(example: ModuleType, *, noise: float, seed: int, **options: int) -> list[dict[str, Any]]:
    """The rows of one recorded episode."""
    environment = Recorder(gym.make(example.ENVIRONMENT, **options), store := DatasetStore())
    example.fly(environment, noise=noise, seed=seed)
    environment.close()
    return store[:]


def test_another_seed_records_another_episode(example: ModuleType) -> None:
    actions = [[row["action"] for row in flown(example, noise=1.0, seed=seed)] for seed in (3, 3, 4)]
    assert actions[0] == actions[1]
    assert actions[0] != actions[2]


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_a_row_holds_the_action_that_led_to_it(example: ModuleType, noise: float) -> None:
    rows = flown(example, noise=noise, seed=3)
    environment = gym.make(example.ENVIRONMENT)
    replayed, _ = environment.reset(seed=3)
    assert rows[0] == {"observation": pytest.approx(replayed), "action": 0, "reward": 0.0, "done": 0} | {
        "episode_step": 0,
        "metadata_episode_seed": 3,
    }
    for step, row in enumerate(rows[1:], start=1):
        replayed, reward, terminated, truncated, _ = environment.step(row["action"])
        np.testing.assert_array_equal(row["observation"], replayed)
        assert row["reward"] == reward
        assert row["done"] == (1 if terminated else 2 if truncated else 0)
        assert row["episode_step"] == step
    assert rows[-1]["done"] != 0
    environment.close()


def test_an_episode_that_runs_out_of_time_is_truncated(example: ModuleType) -> None:
    rows = flown(example, noise=0.0, seed=0, max_episode_steps=7)
    assert [row["done"] for row in rows] == [0] * 7 + [2]


def test_playing_counts_each_episode_once(example: ModuleType) -> None:
    # The vector environment starts an ended episode anew while others still fly.
    def fall(observations: np.ndarray) -> np.ndarray:
        return np.zeros(len(observations), dtype=np.int64)

    together = example.play(fall, episodes=3, seed=20)
    alone = [example.play(fall, episodes=1, seed=20 + i)[0] for i in range(3)]
    np.testing.assert_allclose(together, alone)


@pytest.mark.long
@pytest.mark.slow
def test_the_trained_policy_flies_better_than_what_it_learnt_from(tmp_path: Path) -> None:
    printed = run_quickstart(tmp_path)
    assert number(printed["return trained"]) > 100.0
    assert number(printed["return trained"]) > number(printed["return recorded"]) + 50.0
    assert number(printed["return untrained"]) < 0.0
