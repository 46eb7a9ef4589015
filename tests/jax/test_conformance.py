"""The JAX adapter does what an adapter must do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mouse_jax
from mouse_core.testing import (
    AdapterConformance,
    DeviceReplayConformance,
    ReplayAdapterConformance,
    RolloutAdapterConformance,
)
from mouse_jax import device, rollout_storage


class InJax:
    replaced_dtypes = mouse_jax.REPLACED_DTYPES

    def from_numpy(self, values: Any) -> jax.Array:
        return jnp.asarray(values)


class TestJax(AdapterConformance):
    loader_class = mouse_jax.PrefetchBatchifier
    replaced_dtypes = mouse_jax.REPLACED_DTYPES


class TestJaxReplay(InJax, ReplayAdapterConformance):
    buffer_class = mouse_jax.ReplayBuffer
    ensemble_class = mouse_jax.ReplayBufferEnsemble


class Kept:
    """The pure functions of rollouts, with the state kept between calls."""

    def __init__(self, num_envs: int, num_transitions_per_env: int, fields: Any, seed: int) -> None:
        self._rollout = rollout_storage.init(num_envs, num_transitions_per_env, fields, seed)

    def __getitem__(self, name: str) -> jax.Array:
        return self._rollout[name]

    def add_transitions(self, transition: Any) -> None:
        self._rollout = rollout_storage.append(self._rollout, transition)

    def compute_returns(self, last_values: Any, gamma: float, lam: float, *arguments: Any, **options: Any) -> None:
        self._rollout = rollout_storage.compute_returns(self._rollout, last_values, gamma, lam, *arguments, **options)

    def get_statistics(self) -> Any:
        return rollout_storage.get_statistics(self._rollout)

    def clear(self) -> None:
        self._rollout = rollout_storage.clear(self._rollout)

    def mini_batch_generator(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        self._rollout, batches = rollout_storage.mini_batches(self._rollout, *arguments, **options)
        return iter(batches)

    def recurrent_mini_batch_generator(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        self._rollout, batches = rollout_storage.recurrent_mini_batches(self._rollout, *arguments, **options)
        return iter(batches)


class TestJaxRollouts(InJax, RolloutAdapterConformance):
    storage_class = Kept


@pytest.mark.slow
class TestJaxDevice(DeviceReplayConformance):
    def init(self, example: Any, capacity: int, *, slices: Any, **options: Any) -> device.Replay:
        return device.init(example, capacity, slices=slices and device.Slices(**slices), **options)

    def add(self, state: device.Replay, rows: Any) -> device.Replay:
        return device.add(state, rows)

    def sample(self, state: device.Replay, index: int) -> tuple[device.Replay, Any]:
        return device.take(state, index)

    def set_priorities(self, state: device.Replay, indices: Any, priorities: Any) -> device.Replay:
        return device.set_priorities(state, indices, priorities)

    def can_sample(self, state: device.Replay) -> Any:
        return device.can_sample(state)

    def dumps(self, state: device.Replay, path: Path, samples: int) -> None:
        device.dumps(state, path, samples=samples)

    def loads(self, state: device.Replay, path: Path) -> tuple[device.Replay, int]:
        return device.loads(state, path)
