"""Replay buffers with rows, and samplers by what they draw."""

from collections.abc import Callable
from typing import Any

from mouse_core.replay import (
    ArrayStorage,
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReverseSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

SAMPLERS: dict[str, Callable[[], Any]] = {
    "rows": RandomSampler,
    "every row once": lambda: SamplerWithoutReplacement(drop_last=True),
    "every row twice and no more": lambda: ConsumingSampler(2),
    "backwards": lambda: ReverseSampler(7),
    "priorities": lambda: PrioritizedSampler(alpha=0.8),
    "slices": lambda: SliceSampler(sequence_length=6, pad=False),
    "slices of one row": lambda: SliceSampler(sequence_length=1),
    "padded slices": lambda: SliceSampler(sequence_length=6),
    "padded with a number": lambda: SliceSampler(sequence_length=6, pad=1),
    "by trajectory": lambda: SliceSampler(sequence_length=6, weighting="trajectory", pad=False),
    "padded by trajectory": lambda: SliceSampler(sequence_length=40, weighting="trajectory"),
    "with a span": lambda: SliceSampler(sequence_length=6, span=True),
    "short": lambda: SliceSampler(sequence_length=6, strict_length=False, pad=False),
    "every slice once": lambda: SliceSamplerWithoutReplacement(sequence_length=4),
    "slices by priorities": lambda: PrioritizedSliceSampler(sequence_length=6),
    "slices by priorities, with a span": lambda: PrioritizedSliceSampler(sequence_length=6, span=(False, True)),
}


def filled(rows: Any, capacity: int, *parts: Any, **options: Any) -> ReplayBuffer:
    """A buffer in memory, of a capacity and with the sampler and options that are given, that has rows."""
    buffer = ReplayBuffer(ArrayStorage(capacity), *parts, **options)
    buffer.extend(rows)
    return buffer
