"""Compiled training steps that draw: the draws of an eager one, or an error that says what to do."""

from collections.abc import Callable, Iterator
from itertools import islice
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


def _forever(again: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from again()


def _buffer() -> Draw:
    buffer = _rows(ReplayBuffer)
    return lambda: buffer.sample()["x"]


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


def _slices() -> Draw:
    buffer = _rows(ReplayBuffer, SliceSampler(sequence_length=2))
    return lambda: buffer.sample()["x"]


def _ensemble() -> Draw:
    ensemble = ReplayBufferEnsemble(_rows(ReplayBuffer), _rows(PrioritizedReplayBuffer), batch_size=4)
    return lambda: ensemble.sample()["x"]


def _loader() -> Draw:
    loader = PrefetchBatchifier(_store(), 4, 4, num_workers=0)
    return lambda: loader.next_batch()["reward"]


def _buffer_loader() -> Draw:
    loader = PrefetchBatchifier(_rows(ReplayBuffer), num_workers=0)
    return lambda: loader.next_batch()["x"]


def _mini_batches() -> Draw:
    storage = _rollout()
    batches = _forever(lambda: storage.mini_batch_generator(2, 1))
    return lambda: next(batches).returns


def _augmented() -> Draw:
    loader = PrefetchBatchifier(_store(), 4, 4, num_workers=0)
    batch = loader.next_batch()
    augmenter = TokenAugmenter(AugmentTokensConfig(scale_reward=AugmentScalarSpec(mean=2.0, std=1.0)))

    def draw() -> torch.Tensor:
        augmenter.update_augmentations(batch)
        return augmenter(batch)["reward"]

    return draw


DRAWS = [
    *(_buffer, _prioritized, _ensemble, _loader, _mini_batches, _augmented),
    *(pytest.param(draw, marks=pytest.mark.slow) for draw in (_iterated, _slices, _buffer_loader)),
]


def _step(draw: Draw) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(weight: torch.Tensor) -> torch.Tensor:
        return (weight * draw()).sum() + weight

    return step


@pytest.mark.parametrize("made", DRAWS)
def test_a_compiled_step_draws_what_an_eager_one_does(made: Callable[[], Draw]) -> None:
    torch.compiler.reset()
    eager, weight = _step(made()), torch.tensor(2.0)
    compiled: Any = torch.compile(_step(made()), backend="eager")
    assert [float(compiled(weight)) for _ in range(3)] == [float(eager(weight)) for _ in range(3)]


@pytest.mark.parametrize("made", [_buffer, _loader, _augmented])
def test_one_graph_of_everything_is_refused_with_what_to_do(made: Callable[[], Draw]) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(_step(made()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="compile the step that takes a batch"):
        compiled(torch.tensor(2.0))
