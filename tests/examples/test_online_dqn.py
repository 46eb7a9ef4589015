"""A DQN that learns while it acts, in both frameworks: briefly, and in the slow lane until it plays well.

Until the pole is balanced for good takes four times as long, and shows no more of the buffer and the loader.
"""

from __future__ import annotations

from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest

from tests.programs import run_example

EXAMPLE = "online_dqn"
NAMES = [
    "return untrained",
    "steps taken",
    "updates",
    "updates per second",
    "final error",
    "evaluations",
    "return trained",
]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_short_training(example: ModuleType, framework: str) -> None:
    """The same seed trains the same; the network changes; the buffer is learnt from as soon as it may be."""
    errors = []
    for _ in range(2):
        learner = example.LEARNERS[framework](3)
        observations = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        before = learner.act(observations)
        progress = example.train(learner, steps=1_600, seed=1)
        assert progress.steps == 1_600
        assert progress.updates == 2 * (200 - example.LEARNING_STARTS // 8 + 2)
        assert np.isfinite(progress.errors).all()
        assert (learner.act(observations) != before).any()
        errors.append(progress.errors)
    assert errors[0] == errors[1]


def test_rows_hold_what_led_to_them(example: ModuleType) -> None:
    """Two environments of which one is cut short: the row behind its end is the first of a new episode."""
    environments = gym.make_vec(example.ENVIRONMENT, num_envs=2, vectorization_mode="sync", max_episode_steps=3)
    environments.reset(seed=0)
    found = []
    for _ in range(5):
        observations, rewards, terminated, truncated, _ = environments.step(np.zeros(2, np.int64))
        found.append(example.rows_of(observations, np.zeros(2), rewards, terminated, truncated))
    environments.close()
    assert [row["done"][0] for row in found] == [0, 0, 2, 0, 0]
    assert [row["reward"][0] for row in found] == [1, 1, 1, 0, 1]
    assert found[0]["observation"].dtype == np.float32


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_it_learns_to_balance_the_pole(framework: str) -> None:
    printed = run_example("online_dqn.py", "--framework", framework, "--steps", "12000", seconds=1200)
    assert list(printed) == NAMES
    assert float(printed["return untrained"]) < 150
    assert float(printed["return trained"]) >= 200
