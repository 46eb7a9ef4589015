"""Samplers: pure functions that take (seed, index, snapshot) and return a plan, which lists the windows of a batch."""

from mouse_core.sampling.blocks import BlockWindows, Pool
from mouse_core.sampling.offsets import Seconds
from mouse_core.sampling.plan import (
    Blocks,
    ManyStarts,
    PaddedSampler,
    Plan,
    ReadsBlocks,
    Sampling,
    Stretches,
    WindowSampler,
)
from mouse_core.sampling.windows import (
    SAMPLERS,
    Boundary,
    Column,
    CyclicWindows,
    EpisodeWindows,
    LastWindows,
    RandomWindows,
    SequentialWindows,
    StretchWindows,
    Weighting,
    window_sampler,
)

__all__ = [
    "SAMPLERS",
    "BlockWindows",
    "Blocks",
    "Boundary",
    "Column",
    "CyclicWindows",
    "EpisodeWindows",
    "LastWindows",
    "ManyStarts",
    "PaddedSampler",
    "Plan",
    "Pool",
    "RandomWindows",
    "ReadsBlocks",
    "Sampling",
    "Seconds",
    "SequentialWindows",
    "StretchWindows",
    "Stretches",
    "Weighting",
    "WindowSampler",
    "window_sampler",
]
