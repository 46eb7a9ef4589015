"""Samplers: pure functions from (seed, index, snapshot) to a plan of which windows a batch consists of."""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from mouse_core.sampling.blocks import BlockWindows, Pool
    from mouse_core.sampling.offsets import Seconds

__all__ = [
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

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the modules that only windows of fields and sampling from blocks need."""
        if name == "Seconds":
            from mouse_core.sampling.offsets import Seconds

            return Seconds
        if name in ("BlockWindows", "Pool"):
            from mouse_core.sampling import blocks

            return getattr(blocks, name)
        raise AttributeError(f"module 'mouse_core.sampling' has no attribute {name!r}")
