"""The PyTorch adapter does what an adapter must do."""

from __future__ import annotations

import mouse_torch
from mouse_core.testing import AdapterConformance


class TestTorch(AdapterConformance):
    loader_class = mouse_torch.PrefetchBatchifier
