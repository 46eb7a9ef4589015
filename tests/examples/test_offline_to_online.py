"""A Q-network that learns from recorded transitions, then from fresh ones, too: what it is given, and how it does."""

from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
import torch

from mouse_core import DatasetStore
from mouse_core.mixtures import Mixture
from mouse_torch import PrefetchBatchifier
from tests.programs import run_example

EXAMPLE = "offline_to_online"


def recorded(example: ModuleType, episodes: int) -> DatasetStore:
    random, store = np.random.default_rng(0), DatasetStore()
    environment = gym.make(example.ENVIRONMENT)
    for _ in range(episodes):
        store.extend(example.episode_of(environment, example.clumsy, example.CLUMSINESS, random))
    environment.close()
    return store


def test_transitions_are_those_of_the_environment(example: ModuleType) -> None:
    with PrefetchBatchifier(recorded(example, 20), seed=0, **example.TRANSITIONS) as loader:
        batches = [loader.next_batch() for _ in range(20)]
    batch = torch.cat([one[one["action_mask"][:, 0]] for one in batches])
    before, after = batch["obs_continuous"].unbind(dim=1)
    assert torch.equal(after[:, 1] > before[:, 1], batch["action"][:, 0] == 1)
    fallen = (after[:, 2].abs() > 0.2095) | (after[:, 0].abs() > 2.4)
    assert torch.equal(fallen, batch["done"][:, 0] == 1)
    assert (batch["reward"] == 1).all()
    assert fallen.any()


def test_shares_follow_the_schedule(example: ModuleType) -> None:
    stores = {"recorded": recorded(example, 5), "fresh": recorded(example, 5)}
    mixture = Mixture(stores, weights=example.shares_by_batch(3, 4))
    with PrefetchBatchifier(mixture, **example.TRANSITIONS) as loader:
        fresh = [int(loader.next_batch()["member"].sum()) for _ in range(7)]
    assert fresh == [0, 0, 0, 16, 16, 32, 32]


@pytest.mark.slow
def test_it_runs_and_learns() -> None:
    printed = {name: float(value) for name, value in run_example("offline_to_online.py", "--online", "400").items()}
    assert printed["share of fresh transitions"] == 0.375
    assert printed["rows fresh"] >= 400
    assert max(printed["return offline"], printed["return online"]) > 2 * printed["return recorded"]
