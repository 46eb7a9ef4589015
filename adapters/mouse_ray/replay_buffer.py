"""``mouse_core.replay.ReplayBuffer`` as an actor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from mouse_core import replay
from mouse_core.digest import StreamDigest


class ReplayBufferActor(replay.ReplayBuffer):
    """A ``ReplayBuffer`` in a process of its own, for many producers and many trainers.

    It has the same arguments and methods; ``digest`` is a method here, ``get``, ``set`` and ``size`` are
    ``buffer[index]``, ``buffer[index] = rows`` and its length. Rows and batches travel in shared memory: write many
    rows a call with ``extend``; a batch's arrays can be read and not written to.

    Rows in a ``MemmapStorage`` outlive an actor that dies: it is started again and finds them in its folder. Those of
    other storages are gone with it, but for a ``checkpoint``. A call that was under way fails and is not repeated, for
    rows that arrived before would be written twice.

    Args:
        *given: As there.
        checkpoint: A file of ``dumps``, which is loaded whenever the actor starts and it is there.
        **options: As there.
    """

    def __init__(self, *given: Any, checkpoint: str | Path | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        if checkpoint is not None and Path(checkpoint).exists():
            self.loads(checkpoint)

    def get(self, index: Any) -> Any:
        """Rows as they are stored: ``buffer[index]``."""
        return self[index]

    def set(self, index: Any, rows: Any) -> None:
        """Write over rows: ``buffer[index] = rows``."""
        self[index] = rows

    def size(self) -> int:
        """Rows there are."""
        return len(self)

    def digest(self) -> StreamDigest:  # type: ignore[override]
        """The 128-bit digest of all batches from ``sample``, to any caller; see the core's."""
        return super().digest


# Ray's types do not know the options of actors.
_actor: Any = ray.remote

ReplayBuffer = _actor(max_restarts=-1)(ReplayBufferActor)
"""The actor class: ``mouse_ray.ReplayBuffer.remote(...)``; ``.options(...)`` changes how it is run."""
