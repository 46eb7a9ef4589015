"""A DQN that is compiled as a whole: its environment is gymnasium's, and each seed trains as it would alone."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mouse_core.replay import ArrayStorage, NextView, ReplayBuffer

EXAMPLE = "dqn_in_jit"


def test_the_pole_is_that_of_gymnasium(example: ModuleType) -> None:
    """From the same state by the same actions until it falls; and it is out of time after so many steps."""
    step, key = jax.jit(example.step), jax.random.key(0)
    pole = example.CartPole(*jnp.array([0.01, -0.02, 0.03, 0.04]), jnp.int32(0))
    theirs: Any = gym.make("CartPole-v1").unwrapped
    theirs.reset(seed=0)
    theirs.state = np.array(pole.observation, np.float64)
    for number in range(100):
        before, (pole, done) = pole, step(pole, jnp.int32(number % 5 > 1), key)
        observation, _, terminated, _, _ = theirs.step(int(number % 5 > 1))
        assert (int(done) == 1) == terminated
        if terminated:
            break
        np.testing.assert_allclose(pole.observation, observation, rtol=1e-3, atol=1e-5)
    assert number > 10
    assert int(before.steps) == number
    assert int(pole.steps) == 0
    np.testing.assert_array_equal(pole.observation, example.reset(key).observation)
    late = example.CartPole(*jnp.zeros(4), jnp.int32(example.STEPS_OF_EPISODE - 1))
    assert int(step(late, jnp.int32(0), key)[1]) == 2


@pytest.mark.long
def test_each_seed_trains_as_it_would_alone(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a buffer on the host that is given the rows draws what the training drew."""
    for name, value in (("CAPACITY", 400), ("BATCH_SIZE", 16), ("LEARNING_STARTS", 20), ("SIZES", (4, 16, 2))):
        monkeypatch.setattr(example, name, value)
    drawn: dict[int, Any] = {}
    memory = example.on_device()

    def sample(replay: Any, number: Any, key: Any) -> Any:
        batch = memory.sample(replay, number, key)
        jax.debug.callback(lambda number, batch: drawn.update({int(number): batch}), number, batch)
        return batch

    together = jax.jit(jax.vmap(partial(example.train, steps=40, memory=memory)))
    watched = memory._replace(sample=sample)
    alone = jax.jit(partial(example.train, steps=40, memory=watched))
    _, figures = together(jnp.arange(8, dtype=jnp.uint32))
    run, expected = jax.block_until_ready(alone(jnp.uint32(3)))
    jax.effects_barrier()
    for name in ("steps", "ended"):
        np.testing.assert_array_equal(figures[name][3], expected[name])
    np.testing.assert_allclose(figures["loss"][3], expected["loss"], rtol=1e-3, atol=1e-5)
    assert len({tuple(losses.tolist()) for losses in figures["loss"]}) == 8
    assert (np.asarray(expected["loss"]) > 0).sum() == 39
    buffer = ReplayBuffer(ArrayStorage(400, ndim=2), transform=NextView(), batch_size=16, seed=3)
    rows: Any = jax.tree.map(np.asarray, run.replay.rows)
    for number in range(40):
        buffer.extend(jax.tree.map(lambda leaf, at=number: leaf[at : at + 1], rows))
        if number in drawn:
            buffer.load_state_dict(buffer.state_dict() | {"samples": number})
            host = buffer.sample()
            np.testing.assert_array_equal(host["mask"], drawn[number]["mask"])
            np.testing.assert_array_equal(host["observation"], drawn[number]["observation"])
    assert len(drawn) == 39
