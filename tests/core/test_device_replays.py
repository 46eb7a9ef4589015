"""The suite for replays on a device can be passed, by a buffer of the core, and finds what differs from it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import ConfigError, MouseError
from mouse_core.nested import copied, find, map_tree
from mouse_core.replay import (
    ArrayStorage,
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from mouse_core.testing import DeviceReplayConformance


def sampler_of(order: str, slices: Any, priorities: Any) -> Any:
    weighted: Any = {} if priorities is None else {name: getattr(priorities, name) for name in ("alpha", "beta", "eps")}
    if order == "queue":
        return ConsumingSampler(shuffle=False, drop_last=True)
    if order == "epochs":
        return (
            SamplerWithoutReplacement(drop_last=True)
            if slices is None
            else SliceSamplerWithoutReplacement(**slices, drop_last=True)
        )
    if slices is None:
        return PrioritizedSampler(**weighted) if weighted else RandomSampler()
    return PrioritizedSliceSampler(**weighted, **slices) if weighted else SliceSampler(**slices)


class TestOnTheHost(DeviceReplayConformance):
    """A buffer stands for a replay on a device."""

    def init(self, example: Any, capacity: int, **options: Any) -> Any:
        storage = ArrayStorage(capacity, ndim=1 if options["num_envs"] is None else 2)
        sampler = sampler_of(options["order"], options["slices"], options["priorities"])
        given = {name: options[name] for name in ("transform", "batch_size", "seed")}
        return ReplayBuffer(storage, sampler, **given)

    def add(self, state: Any, rows: Any) -> Any:
        one = np.ndim(find(rows, "done")) < state.storage.ndim
        if not one and len(find(rows, "done")) > state.storage.capacity // state.storage.num_envs:
            raise ConfigError("too many rows")
        rows = copied(rows)
        state.append(rows) if one else state.extend(rows)
        return state

    def sample(self, state: Any, index: int) -> tuple[Any, Any]:
        state.load_state_dict(state.state_dict() | {"samples": index})
        return state, state.sample()

    def set_priorities(self, state: Any, indices: Any, priorities: Any) -> Any:
        if not isinstance(state.sampler, PrioritizedSampler):
            raise ConfigError("expected priorities")
        state.update_priority(indices, priorities)
        return state

    def can_sample(self, state: Any) -> Any:
        tried = pickle.loads(pickle.dumps(state))
        try:
            tried.sample()
        except MouseError:
            return False
        return True

    def dumps(self, state: Any, path: Path, samples: int) -> None:
        state.load_state_dict(state.state_dict() | {"samples": samples})
        state.dumps(path)

    def loads(self, state: Any, path: Path) -> tuple[Any, int]:
        state.loads(path)
        return state, state.stats()["samples"]


class Unpadded(TestOnTheHost):
    """Slices that a field says are whole."""

    def sample(self, state: Any, index: int) -> tuple[Any, Any]:
        state, batch = super().sample(state, index)
        return state, batch | {"mask": np.ones_like(batch["mask"])} if "mask" in batch else batch


class Forgetful(TestOnTheHost):
    """Of a row that comes twice the first priority counts."""

    def set_priorities(self, state: Any, indices: Any, priorities: Any) -> Any:
        return super().set_priorities(state, indices[::-1], priorities[::-1])


class Elsewhere(TestOnTheHost):
    """A file does not say which sample comes next."""

    def dumps(self, state: Any, path: Path, samples: int) -> None:
        super().dumps(state, path, 0)


class Growing(TestOnTheHost):
    """Rows that do not fit are written as far as they go."""

    def add(self, state: Any, rows: Any) -> Any:
        try:
            return super().add(state, rows)
        except MouseError:
            super().add(state, map_tree(lambda leaf: leaf[:1], _good()))
            raise


def _good() -> Any:
    ones = np.ones(3, np.float32)
    obs = {"number": np.ones(3, np.int32), "vector": np.ones((3, 2), np.float32)}
    return {"obs": obs, "reward": ones, "done": np.ones(3, np.int8)}


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (Unpadded, "test_slices_are_those_of_the_host"),
        (Forgetful, "test_rows_by_priority_are_those_of_the_host"),
        (Elsewhere, "test_rows_of_one_stream_are_those_of_the_host"),
    ],
)
def test_what_is_wrong_is_found(wrong: type[DeviceReplayConformance], test: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        getattr(wrong(), test)(tmp_path)


def test_half_a_write_is_found() -> None:
    with pytest.raises(AssertionError, match="after what was refused"):
        Growing().test_what_is_refused_changes_nothing()
