"""``mouse_core.groups.RolloutBuffer`` as a Ray actor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from mouse_core import groups
from mouse_core.groups import RLExample, RolloutRecord


class RolloutBufferActor(groups.RolloutBuffer):
    """A ``RolloutBuffer`` in a separate process, for many producers and many trainers.

    The actor has the arguments and methods of ``RolloutBuffer``. The attributes ``batches``, ``num_groups``,
    ``num_waiting`` and ``num_ahead`` are methods of the actor, and ``size()`` replaces ``len(buffer)``. If the actor
    dies, Ray restarts the actor. The actor then finds in its folder all rollouts of the ``add_rollouts`` calls that had
    returned. Ray repeats calls in progress; this does not duplicate rollouts, and a repeated ``batch_at`` returns the
    same batch. A call of ``create_and_store_batch`` is not repeated but raises an error; ``batches`` shows whether the
    batch was stored.

    Calls of several producers run concurrently, and one sync of the disk can serve several calls. Send many rollouts in
    each call: Ray then passes their arrays in shared memory without a copy. The arrays stay in shared memory while the
    rollouts wait for their group or to be drawn (``memory_bytes`` limits this memory).

    If the actor can restart on another node, the folder must be on a disk that all nodes can access.
    """

    # Producers that wait for free space do not block other callers of the actor.
    @ray.method(concurrency_group="producers")
    def add_rollout(self, rollout: RolloutRecord, *, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Add one rollout; return whether the rollout was new. See ``add_rollouts``."""
        return super().add_rollouts([rollout], timeout=timeout) == 1

    @ray.method(concurrency_group="producers")
    def add_rollouts(self, rollouts: Iterable[RolloutRecord], *, timeout: float | None = None) -> int:  # type: ignore[override]
        """Add rollouts; when the call returns, they are on the disk.

        The result is the number of new rollouts. If the actor dies during a call, Ray repeats the call; rollouts that
        the actor had stored before it died are then not counted.
        """
        return super().add_rollouts(rollouts, timeout=timeout)

    @ray.method(max_task_retries=0)
    def create_and_store_batch(self, batch_size: int) -> str | None:  # type: ignore[override]
        """Create a batch by the batch maker, and store it; return its id, or None if too few rollouts are available."""
        return super().create_and_store_batch(batch_size)

    # Callers of an actor can use only methods, so the getter of each of these properties becomes a method.
    batches, num_groups, num_waiting, num_ahead = (
        vars(groups.RolloutBuffer)[name].fget for name in ("batches", "num_groups", "num_waiting", "num_ahead")
    )

    def size(self) -> int:
        """Return the number of rollouts, sealed or waiting."""
        return len(self)


class ActorBatches:
    """The batches of a ``RolloutBuffer`` actor for a ``RolloutStream``, on a node that needs no access to the actor's
    folder.

    Args:
        buffer: The handle of the actor.
        batch_size: The number of examples in a new batch; any rank can request a new batch. None: no batches are
            created.

    Example:
        stream = RolloutStream(ActorBatches(buffer, batch_size=512), max_tokens=8192, shard="auto")
    """

    def __init__(self, buffer: Any, batch_size: int | None = None) -> None:
        self._buffer, self._size = buffer, batch_size

    def __repr__(self) -> str:
        return f"the actor {self._buffer!r}"

    def batch_at(self, index: int) -> str | None:
        """Return the id of a batch; None if too few rollouts are available."""
        found: str | None = ray.get(self._buffer.batch_at.remote(index, self._size))
        return found

    def read_batch(self, batch_id: str) -> list[RLExample]:
        """Return the batch's examples."""
        examples: list[RLExample] = ray.get(self._buffer.read_batch.remote(batch_id))
        return examples

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """Return how many policy versions each example was behind the newest version when the batch was created."""
        behind: npt.NDArray[np.float64] = ray.get(self._buffer.batch_staleness.remote(batch_id))
        return behind


# Ray's type annotations lack the options of actors.
_actor: Any = ray.remote

RolloutBuffer = _actor(max_restarts=-1, max_task_retries=-1, max_concurrency=8, concurrency_groups={"producers": 8})(
    RolloutBufferActor
)
"""The actor class: ``mouse_ray.RolloutBuffer.remote(...)``; ``.options(...)`` changes Ray's options of the actor."""
