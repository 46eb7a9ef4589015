"""What torch saves and loads with its defaults, and rows in the containers that users of torch have."""

import io
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from mouse_core import DatasetStore
from mouse_core.replay import ArrayStorage, ListStorage, SamplerWithoutReplacement, SliceSampler
from mouse_torch import (
    PrefetchBatchifier,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RolloutStorage,
    TensorStorage,
)


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def _filled(buffer: Any) -> Any:
    buffer.extend({"x": torch.arange(40.0), "n": {"i": torch.arange(40)}, "done": torch.arange(40) % 7 == 6})
    return buffer


def _ensemble() -> Any:
    members = _filled(PrioritizedReplayBuffer(storage=TensorStorage(50))), _filled(ReplayBuffer(ArrayStorage(64)))
    return ReplayBufferEnsemble(*members, batch_size=4)


BUFFERS: dict[str, Callable[[], Any]] = {
    "array": lambda: _filled(ReplayBuffer(ArrayStorage(64), SamplerWithoutReplacement(), batch_size=4)),
    "list": lambda: _filled(ReplayBuffer(ListStorage(64), batch_size=4)),
    "tensor": lambda: _filled(ReplayBuffer(TensorStorage(64), batch_size=4)),
    "prioritized": lambda: _filled(PrioritizedReplayBuffer(storage=ArrayStorage(64), batch_size=4)),
    "slices": lambda: _filled(ReplayBuffer(ArrayStorage(64), SliceSampler(sequence_length=3), batch_size=2)),
    "ensemble": _ensemble,
}


def _same(one: TensorDict, other: TensorDict) -> bool:
    assert set(one.keys(True)) == set(other.keys(True))
    return bool((one == other).all())


@pytest.mark.parametrize("name", BUFFERS)
def test_a_loader_goes_on_with_what_was_drawn_ahead(name: str) -> None:
    buffer, other = BUFFERS[name](), BUFFERS[name]()
    with PrefetchBatchifier(buffer, num_workers=0, prefetch=2) as loader:
        loader.next_batch()
        state = _saved({"loader": loader.state_dict(), "buffer": buffer.state_dict()})
        wanted = [loader.next_batch() for _ in range(4)]
    other.load_state_dict(state["buffer"])
    with PrefetchBatchifier(other, num_workers=0, prefetch=2) as loader:
        loader.load_state_dict(state["loader"])
        assert all(_same(loader.next_batch(), batch) for batch in wanted)


def test_states_of_loaders_and_rollouts_are_plain() -> None:
    store = DatasetStore()
    store.extend({"action": np.zeros(50, np.int64), "reward": np.arange(50.0), "done": np.zeros(50, np.int64)})
    with PrefetchBatchifier(store, 4, 4, num_workers=0) as loader:
        loader.next_batch()
        state = _saved(loader.state_dict())
        wanted = loader.next_batch()
        loader.load_state_dict(state)
        assert _same(loader.next_batch(), wanted)
    rollout = RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={})
    rollout.load_state_dict(_saved(rollout.state_dict()))
    # Torch has no dtype for some arrays.
    buffer, other = ReplayBuffer(ArrayStorage(4)), ReplayBuffer(ArrayStorage(4))
    when = np.array(["2026-01-01", "2027-02-03"], "datetime64[D]")
    buffer.extend({"when": when, "x": np.arange(2, dtype=np.uint16)})
    other.load_state_dict(_saved(buffer.state_dict()))
    np.testing.assert_array_equal(other.storage.get(np.arange(2))["when"], when, strict=True)


@tensorclass
class OfTensors:
    action: torch.Tensor
    reward: torch.Tensor
    done: torch.Tensor


@dataclass
class Plain:
    action: Any
    reward: Any
    done: Any


@tensorclass
class Moved:
    rewards: torch.Tensor
    dones: torch.Tensor


@pytest.mark.parametrize("kind", [OfTensors, Plain, namedtuple("Named", "action reward done"), TensorDict])
def test_a_store_takes_rows_in_records_of_any_kind(kind: Any) -> None:
    store = DatasetStore()
    store.append(kind(action=torch.tensor(1), reward=torch.tensor(0.5), done=torch.tensor(0)))
    store.extend(kind(action=torch.tensor([2, 0]), reward=torch.tensor([1.5, 2]), done=torch.tensor([0, 1])))
    assert [(store[row]["action"], store[row]["reward"]) for row in range(3)] == [(1, 0.5), (2, 1.5), (0, 2.0)]


@pytest.mark.parametrize("kind", [Moved, namedtuple("Pair", "rewards dones"), TensorDict])
def test_a_rollout_takes_steps_in_records_of_any_kind(kind: Any) -> None:
    storage = RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={})
    storage.add_transitions(kind(rewards=torch.tensor([1.0, 2.0]), dones=torch.zeros(2)))
    assert storage.rewards.tolist() == [[[1.0], [2.0]]]
