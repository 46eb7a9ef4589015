"""Compiled training steps that draw: the draws of an eager one, or an error that says what to do."""

from collections.abc import Callable
from itertools import chain, count, islice
from typing import Any

import numpy as np
import pytest
import torch

from mouse_core import AugmentTokensConfig, DatasetStore
from mouse_core.augment import AugmentScalarSpec
from mouse_core.replay import ArrayStorage, SliceSampler
from mouse_torch import (
    PrefetchBatchifier,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RolloutStorage,
    TokenAugmenter,
)

Draw = Callable[[], torch.Tensor]


def _rows(kind: type[ReplayBuffer], sampler: Any = None) -> ReplayBuffer:
    buffer = kind(storage=ArrayStorage(64), **({"sampler": sampler} if sampler else {}), batch_size=4)
    buffer.extend({"x": torch.arange(64.0), "done": torch.zeros(64, dtype=torch.bool)})
    return buffer


def _store() -> DatasetStore:
    store = DatasetStore()
    store.extend(
        {"action": np.arange(99) % 3, "reward": np.arange(99, dtype=np.float32), "done": np.zeros(99, np.int64)}
    )
    return store


def _rollout() -> RolloutStorage:
    storage = RolloutStorage(num_envs=2, num_transitions_per_env=4, fields={"values": ()})
    for step in range(4):
        now = torch.tensor([0.0, 10.0]) + step
        storage.add_transitions({"values": now, "rewards": now, "dones": torch.zeros(2)})
    storage.compute_returns(torch.zeros(2), gamma=0.9, lam=0.9)
    return storage


def _sampled(sampled: Any) -> Draw:
    return lambda: sampled.sample()["x"]


def _loaded(data: Any, name: str, **options: Any) -> Draw:
    loader = PrefetchBatchifier(data, num_workers=0, **options)
    return lambda: loader.next_batch()[name]


def _iterated() -> Draw:
    buffer = _rows(ReplayBuffer)
    return lambda: torch.stack([batch["x"] for batch in islice(buffer, 2)])


def _prioritized() -> Draw:
    buffer = _rows(PrioritizedReplayBuffer)

    def draw() -> torch.Tensor:
        batch = buffer.sample()
        buffer.update_priority(batch["index"], batch["x"] + 1)
        return batch["x"]

    return draw


def _mini_batches() -> Draw:
    storage = _rollout()
    batches = chain.from_iterable(storage.mini_batch_generator(2, 1) for _ in count())
    return lambda: next(batches).returns


def _augmented() -> Draw:
    batch = PrefetchBatchifier(_store(), 4, 4, num_workers=0).next_batch()
    augmenter = TokenAugmenter(AugmentTokensConfig(scale_reward=AugmentScalarSpec(mean=2.0, std=1.0)))

    def draw() -> torch.Tensor:
        augmenter.update_augmentations(batch)
        return augmenter(batch)["reward"]

    return draw


STEPS = {"sequence_length": 4, "batch_size": 4}
DRAWS: dict[str, Callable[[], Draw]] = {
    "buffer": lambda: _sampled(_rows(ReplayBuffer)),
    "loader": lambda: _loaded(_store(), "reward", **STEPS),
    "augmented": _augmented,
    "prioritized": _prioritized,
    "ensemble": lambda: _sampled(
        ReplayBufferEnsemble(_rows(ReplayBuffer), _rows(PrioritizedReplayBuffer), batch_size=4)
    ),
    "mini-batches": _mini_batches,
    "iterated": _iterated,
    "slices": lambda: _sampled(_rows(ReplayBuffer, SliceSampler(sequence_length=2))),
    "loader of a buffer": lambda: _loaded(_rows(ReplayBuffer), "x"),
}
SLOW = ("iterated", "slices", "loader of a buffer")


def _step(draw: Draw) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(weight: torch.Tensor) -> torch.Tensor:
        return (weight * draw()).sum() + weight

    return step


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in DRAWS])
def test_a_compiled_step_draws_what_an_eager_one_does(name: str) -> None:
    torch.compiler.reset()
    made = DRAWS[name]
    eager, weight = _step(made()), torch.tensor(2.0)
    compiled: Any = torch.compile(_step(made()), backend="eager")
    assert [float(compiled(weight)) for _ in range(3)] == [float(eager(weight)) for _ in range(3)]


@pytest.mark.parametrize("name", ["buffer", "loader", "augmented"])
def test_one_graph_of_everything_is_refused_with_what_to_do(name: str) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(_step(DRAWS[name]()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="compile the step that takes a batch"):
        compiled(torch.tensor(2.0))
