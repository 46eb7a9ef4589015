"""Samplers: pure functions from (seed, index, snapshot) to a plan of which windows a batch consists of."""

from mouse_core.sampling.plan import Plan, Sampler
from mouse_core.sampling.windows import (
    CyclicWindows,
    LastWindows,
    RandomWindows,
    SequentialWindows,
    window_sampler,
)

__all__ = [
    "CyclicWindows",
    "LastWindows",
    "Plan",
    "RandomWindows",
    "Sampler",
    "SequentialWindows",
    "window_sampler",
]
