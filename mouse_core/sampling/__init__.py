"""Samplers: pure functions from (seed, index, snapshot) to a plan of which windows a batch consists of."""

from typing import TYPE_CHECKING

from mouse_core.sampling.episodes import Boundary, Column, EpisodeWindows, StretchWindows, Weighting
from mouse_core.sampling.plan import ManyStarts, PaddedSampler, Plan, WindowSampler
from mouse_core.sampling.windows import (
    CyclicWindows,
    LastWindows,
    RandomWindows,
    SequentialWindows,
    window_sampler,
)

if TYPE_CHECKING:
    from mouse_core.sampling.offsets import Seconds

__all__ = [
    "Boundary",
    "Column",
    "CyclicWindows",
    "EpisodeWindows",
    "LastWindows",
    "ManyStarts",
    "PaddedSampler",
    "Plan",
    "RandomWindows",
    "Seconds",
    "SequentialWindows",
    "StretchWindows",
    "Weighting",
    "WindowSampler",
    "window_sampler",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """What is loaded where fields have windows of their own."""
        if name == "Seconds":
            from mouse_core.sampling.offsets import Seconds

            return Seconds
        raise AttributeError(f"module 'mouse_core.sampling' has no attribute {name!r}")
