"""The PyTorch adapter does what an adapter must do."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import mouse_torch
from mouse_core.testing import AdapterConformance, ReplayAdapterConformance, RolloutAdapterConformance


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


@pytest.mark.cuda
class TestCudaReplay(TestTorchReplay):
    options: ClassVar[dict[str, Any]] = {"device": "cuda"}
