"""The return-conditioned sequence model in both frameworks, on little data; and what it learns from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import mouse_jax
import mouse_torch
from mouse_core import BatchSource, DatasetStore
from mouse_core.spec import Alignment
from mouse_core.testing import stream_digest
from tests.programs import run_example


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_it_runs(framework: str) -> None:
    printed = run_example("return_conditioned.py", "--framework", framework, "--episodes", "6", "--steps", "30")
    assert int(printed["steps learned from"]) < int(printed["steps recorded"])
    assert float(printed["return learned from"]) > float(printed["return recorded"])
    assert float(printed["final loss"]) < float(printed["first loss"])


def recorded(alignment: Alignment) -> DatasetStore:
    """Episodes of 30 transitions, of which every second one earns 10 times as much.

    An observation says which action was taken there, so that it can be told whether a model is asked for that.
    """
    rng = np.random.default_rng(0)
    store = DatasetStore(alignment=alignment)
    for episode in range(8):
        chosen = rng.integers(0, 4, 31)
        observation = np.eye(8, dtype=np.float32)[chosen]
        rewards = np.ones(30) * (10.0 if episode % 2 else 1.0)
        arrived = alignment == "arrived"
        rows = 31 if arrived else 30
        ends = np.arange(rows) == rows - 1
        store.extend(
            {
                "observation": observation[:rows],
                "action": np.concatenate([[0], chosen[:30]]) if arrived else chosen[:30],
                "reward": np.concatenate([[0.0], rewards]) if arrived else rewards,
                "done": ends.astype(np.int64),
                "episode_step": np.arange(rows),
            }
        )
    return store


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
@pytest.mark.parametrize("framework", ["torch", "flax"])
def test_it_is_asked_for_the_action_that_leaves_each_observation(
    framework: str, alignment: Alignment, import_example: Callable[[str], Any]
) -> None:
    """A policy that reads it off the observation has no loss; what it is told beside is what is still to come."""
    shared, training = import_example("return_conditioned"), import_example(f"return_conditioned_{framework}")
    store = shared.learned_from(recorded(alignment), 0.5)
    package: Any = {"torch": mouse_torch, "flax": mouse_jax}[framework]
    seen: list[Any] = []

    def knowing(returns: Any, observation: Any, previous: Any) -> Any:
        seen.append((np.asarray(returns), np.asarray(previous)))
        known = 50.0 * observation[..., :4]
        return known.float() if framework == "torch" else known.astype(jnp.float32)

    with package.PrefetchBatchifier(store, seed=3, **shared.BATCHES) as loader:
        batch = loader.next_batch()
    assert float(training.cloning_loss(knowing, batch)) == pytest.approx(0.0, abs=1e-5)
    ((returns, previous),) = seen
    assert set(np.unique(returns)) <= {10.0 * left for left in range(31)}  # of the best episodes alone
    assert returns.max() > 200
    counts = np.asarray(batch["mask"])[:, 1:] & np.asarray(batch["mask"])[:, :-1]
    chosen = np.asarray(batch["action"])[..., 0]
    assert (previous[:, 1:] == chosen[:, :-1])[counts].all()


@pytest.mark.parametrize("framework", ["torch", pytest.param("flax", marks=pytest.mark.slow)])
def test_what_comes_later_is_not_looked_at(framework: str, import_example: Callable[[str], Any]) -> None:
    training = import_example(f"return_conditioned_{framework}")
    if framework == "torch":
        policy = training.Policy()
        to, back = torch.from_numpy, lambda values: values.detach().numpy()
    else:
        policy = partial(training.nnx.jit(training.Policy.__call__), training.Policy(training.nnx.Rngs(0)))
        to, back = jax.numpy.asarray, np.asarray
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(2, 20)).astype(np.float32), rng.normal(size=(2, 20, 8)).astype(np.float32)
    actions = rng.integers(0, 4, (2, 20))
    before = back(policy(*map(to, (*steps, actions))))
    for values in steps:
        values[:, 10:] += 1.0
    after = back(policy(*map(to, (*steps, actions))))
    np.testing.assert_allclose(before[:, :10], after[:, :10], rtol=1e-4, atol=1e-5)
    assert np.abs(before[:, 10:] - after[:, 10:]).max() > 1e-3


def test_both_frameworks_learn_from_the_same_batches(import_example: Callable[[str], Any]) -> None:
    shared = import_example("return_conditioned")
    store = shared.learned_from(recorded("arrived"), 0.5)
    options = shared.BATCHES | {"dtypes": {"obs_continuous": "float32"}}
    wanted = stream_digest(BatchSource(store, seed=3, **options), 5)
    for package in (mouse_torch, mouse_jax):
        with package.PrefetchBatchifier(store, seed=3, **options) as loader:
            assert stream_digest(loader, 5) == wanted
