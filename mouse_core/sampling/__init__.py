"""Samplers: pure functions from (seed, index, snapshot) to a plan of which windows a batch consists of."""

from mouse_core.sampling.episodes import EpisodeWindows
from mouse_core.sampling.plan import PaddedSampler, Plan, Sampler
from mouse_core.sampling.windows import (
    CyclicWindows,
    LastWindows,
    RandomWindows,
    SequentialWindows,
    window_sampler,
)

__all__ = [
    "CyclicWindows",
    "EpisodeWindows",
    "LastWindows",
    "PaddedSampler",
    "Plan",
    "RandomWindows",
    "Sampler",
    "SequentialWindows",
    "window_sampler",
]
