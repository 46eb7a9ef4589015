"""PPO on CartPole: as a user runs it, and what could go wrong in it unseen."""

from types import ModuleType

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mouse_torch import RolloutStorage
from tests.programs import run_example

EXAMPLE = "ppo_cartpole"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_it_reaches_475(framework: str) -> None:
    printed = run_example("ppo_cartpole.py", "--framework", framework, seconds=1200)
    assert printed["steps"] == "245760"
    assert float(printed["return"]) >= 475.0


@pytest.mark.slow
def test_it_runs_as_a_user_runs_it() -> None:
    printed = run_example("ppo_cartpole.py", "--framework", "jax", "--iterations", "2", "--episodes", "2")
    assert list(printed) == ["steps", "steps per second", "return", "lowest return"]
    assert printed["steps"] == "4096"
    assert float(printed["return"]) >= 1.0


def test_it_trains_in_torch(example: ModuleType) -> None:
    returns = example.play(example.train_in_torch(2, 0), 2)
    assert returns.shape == (2,)
    assert (returns >= 1.0).all()


def test_carts_move_as_those_of_gymnasium(example: ModuleType) -> None:
    random = np.random.default_rng(0)
    environment = gym.make("CartPole-v1").unwrapped
    states = (random.normal(size=(200, 4)) * [1.5, 1.0, 0.12, 1.0]).astype(np.float32)
    actions = random.integers(0, 2, 200)
    moved = example.move(np, states, actions)
    np.testing.assert_allclose(example.move(jnp, states, actions), moved, rtol=1e-4, atol=1e-5)
    for place in range(200):
        environment.reset()
        environment.state = tuple(float(number) for number in states[place])
        observation, _, terminated, _, _ = environment.step(int(actions[place]))
        np.testing.assert_allclose(moved[place], observation, rtol=1e-4, atol=1e-5)
        assert terminated == example.has_fallen(np, moved[place : place + 1])[0]


def test_truncated_episodes_are_worth_what_would_have_followed(example: ModuleType) -> None:
    """All carts run out of time in the same row; its return holds the value of the observation with which it ended."""
    torch.manual_seed(0)
    agent, carts = example.Agent(), example.Carts(0)
    carts.ages[:] = example.TIME_LIMIT - 3
    storage = RolloutStorage(example.ENVS, example.STEPS, example.FIELDS)
    seen = []
    step = carts.step
    carts.step = lambda actions: seen.append(step(actions)) or seen[-1]
    example.collect(agent, carts, storage)
    truncated = seen[2].truncated
    assert truncated.any()
    with torch.no_grad():
        values = agent(torch.from_numpy(seen[2].final_observations))[1]
    np.testing.assert_allclose(
        storage.returns[2, truncated, 0], 1.0 + example.DISCOUNT * values[truncated], rtol=1e-5, atol=1e-5
    )
    assert storage.dones[2, truncated].all()
