"""PrioritizedReplayBuffer: the shorthand for a buffer that is sampled by priority."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mouse_core.replay.base import Collate
from mouse_core.replay.buffer import ReplayBuffer
from mouse_core.replay.protocols import FieldKey, Transform, Writer
from mouse_core.replay.samplers.priorities import Beta, PrioritizedSampler


class PrioritizedReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` with a ``PrioritizedSampler``.

    Args:
        alpha, beta, eps: See ``PrioritizedSampler``.
        storage, writer, transform, batch_size, seed, collate_fn, priority_key, priority_reduction, generations, digest:
            See ``ReplayBuffer``.
    """

    def __init__(
        self,
        alpha: float = 0.6,
        beta: Beta = 0.4,
        *,
        eps: float = 1e-8,
        storage: Any = None,
        writer: Writer | None = None,
        transform: Transform | Sequence[Transform] | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        collate_fn: Collate | None = None,
        priority_key: FieldKey = "td_error",
        priority_reduction: str | None = None,
        generations: bool = False,
        digest: bool = False,
    ) -> None:
        super().__init__(
            storage,
            PrioritizedSampler(alpha, beta, eps),
            writer,
            transform,
            batch_size,
            seed,
            collate_fn=collate_fn,
            priority_key=priority_key,
            priority_reduction=priority_reduction,
            generations=generations,
            digest=digest,
        )
