"""Samplers: pure functions from (seed, index, snapshot) to a plan of which windows a batch consists of."""

from mouse_core.sampling.episodes import Boundary, EpisodeWindows, Weighting
from mouse_core.sampling.plan import ManyStarts, PaddedSampler, Plan, WindowSampler
from mouse_core.sampling.windows import (
    CyclicWindows,
    LastWindows,
    RandomWindows,
    SequentialWindows,
    window_sampler,
)

__all__ = [
    "Boundary",
    "CyclicWindows",
    "EpisodeWindows",
    "LastWindows",
    "ManyStarts",
    "PaddedSampler",
    "Plan",
    "RandomWindows",
    "SequentialWindows",
    "Weighting",
    "WindowSampler",
    "window_sampler",
]
