"""``mouse_core.replay.ReplayBuffer`` as a Ray actor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from mouse_core import replay


class ReplayBufferActor(replay.ReplayBuffer):
    """A ``ReplayBuffer`` in a separate process, for many producers and many trainers.

    The actor has the arguments and methods of ``ReplayBuffer``. ``get``, ``set`` and ``size``
    replace ``buffer[index]``, ``buffer[index] = rows`` and ``len(buffer)``. Ray passes rows and batches in shared
    memory, so write many rows in each call of ``extend``. The arrays of a batch are read-only.

    Rows in a ``MemmapStorage`` survive the death of an actor: Ray restarts the actor, which finds the rows in the
    folder. Rows of other storages are lost, except the rows in a ``checkpoint``. A call that was in progress when the
    actor died raises an error. The call is not repeated, because a repetition could write rows twice.

    Args:
        *given: The positional arguments of ``ReplayBuffer``.
        checkpoint: A file that ``dumps`` wrote. If the file exists, it is loaded each time the actor starts.
        **options: The other arguments of ``ReplayBuffer``.
    """

    def __init__(self, *given: Any, checkpoint: str | Path | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        if checkpoint is not None and Path(checkpoint).exists():
            self.loads(checkpoint)

    def get(self, index: Any) -> Any:
        """Return stored rows: ``buffer[index]``."""
        return self[index]

    def set(self, index: Any, rows: Any) -> None:
        """Overwrite rows: ``buffer[index] = rows``."""
        self[index] = rows

    def size(self) -> int:
        """Return the number of rows."""
        return len(self)


# Ray's type annotations lack the options of actors.
_actor: Any = ray.remote

ReplayBuffer = _actor(max_restarts=-1)(ReplayBufferActor)
"""The actor class: ``mouse_ray.ReplayBuffer.remote(...)``; ``.options(...)`` changes Ray's options of the actor."""
