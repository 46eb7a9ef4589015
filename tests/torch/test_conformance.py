"""The PyTorch adapter does what an adapter must do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import mouse_torch
from mouse_core.replay import Slices
from mouse_core.testing import (
    AdapterConformance,
    DeviceReplayConformance,
    ReplayAdapterConformance,
    RolloutAdapterConformance,
)
from mouse_torch.device import Replay, RolloutStorage


class TestTorch(AdapterConformance):
    loader_class = mouse_torch.PrefetchBatchifier


class InTorch:
    def from_numpy(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values))


class TestTorchReplay(InTorch, ReplayAdapterConformance):
    buffer_class = mouse_torch.ReplayBuffer
    ensemble_class = mouse_torch.ReplayBufferEnsemble


class TestTorchRollouts(InTorch, RolloutAdapterConformance):
    storage_class = mouse_torch.RolloutStorage


class TestTorchDeviceRollouts(InTorch, RolloutAdapterConformance):
    storage_class = RolloutStorage


@pytest.mark.cuda
class TestCudaReplay(TestTorchReplay):
    options: ClassVar[dict[str, Any]] = {"device": "cuda"}


class TestTorchDevice(InTorch, DeviceReplayConformance):
    options: ClassVar[dict[str, Any]] = {}

    def init(self, example: Any, capacity: int, *, slices: Any, **options: Any) -> Replay:
        return Replay(example, capacity, slices=slices and Slices(**slices), **options, **self.options)

    def add(self, state: Replay, rows: Any) -> Replay:
        state.extend(rows)
        return state

    def sample(self, state: Replay, index: int) -> tuple[Replay, Any]:
        return state, state.sample(index)

    def set_priorities(self, state: Replay, indices: Any, priorities: Any) -> Replay:
        state.set_priorities(indices, priorities)
        return state

    def can_sample(self, state: Replay) -> Any:
        return state.can_sample()

    def dumps(self, state: Replay, path: Path, samples: int) -> None:
        state.samples.fill_(samples)
        state.dumps(path)

    def loads(self, state: Replay, path: Path) -> tuple[Replay, int]:
        state.loads(path)
        return state, int(state.samples)


@pytest.mark.cuda
class TestCudaDevice(TestTorchDevice):
    options: ClassVar[dict[str, Any]] = {"device": "cuda"}
