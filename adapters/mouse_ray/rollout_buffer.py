"""``mouse_core.groups.RolloutBuffer`` as an actor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from mouse_core import groups
from mouse_core.groups import RLExample, RolloutRecord


class RolloutBufferActor(groups.RolloutBuffer):
    """A ``RolloutBuffer`` in a process of its own, for many producers and many trainers.

    It has the same arguments and methods. These attributes are methods here: ``batches``, ``digest``, ``num_groups``,
    ``num_waiting``, ``num_ahead``; and ``size()`` is its length. An actor that dies is started again, and finds in its
    folder everything that ``add_rollouts`` was answered for. Calls that were under way are repeated, which changes
    nothing for rollouts that arrived before, except ``create_and_store_batch``: it fails, and ``batches`` says whether
    there is one more. ``batch_at`` is repeated, and gives the same batch.

    Calls of several producers run at the same time and share their waiting for the disk. Send many rollouts a call:
    their arrays then travel in shared memory and are not copied, and stay there while the rollouts wait for their group
    or to be drawn (``memory_bytes`` limits that).

    The folder is on a disk that every node sees if the actor may be started on another one.
    """

    # Producers who are held back keep nobody else from the actor.
    @ray.method(concurrency_group="producers")
    def add_rollout(self, rollout: RolloutRecord, *, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Add one rollout; whether it was new. See ``add_rollouts``."""
        return super().add_rollouts([rollout], timeout=timeout) == 1

    @ray.method(concurrency_group="producers")
    def add_rollouts(self, rollouts: Iterable[RolloutRecord], *, timeout: float | None = None) -> int:  # type: ignore[override]
        """Add rollouts; when this is answered, they are on the disk.

        How many were new: fewer than arrived now, where a call was repeated that a dying actor had carried out.
        """
        return super().add_rollouts(rollouts, timeout=timeout)

    @ray.method(max_task_retries=0)
    def create_and_store_batch(self, batch_size: int) -> str | None:  # type: ignore[override]
        """Let the batch maker make a batch, and store it; its id, or None while there are too few rollouts."""
        return super().create_and_store_batch(batch_size)

    # Callers of an actor reach methods alone: the getter of each of these properties is a method here.
    batches, digest, num_groups, num_waiting, num_ahead = (
        vars(groups.RolloutBuffer)[name].fget
        for name in ("batches", "digest", "num_groups", "num_waiting", "num_ahead")
    )

    def size(self) -> int:
        """Rollouts, sealed or waiting."""
        return len(self)


class ActorBatches:
    """A ``RolloutBuffer`` actor's batches for a ``RolloutStream``, on a node that need not see its folder.

    Args:
        buffer: The actor's handle.
        batch_size: How many examples the batches have that are made, which any rank may ask for; None: none are made.

    Example:
        stream = RolloutStream(ActorBatches(buffer, batch_size=512), max_tokens=8192, shard="auto")
    """

    def __init__(self, buffer: Any, batch_size: int | None = None) -> None:
        self._buffer, self._size = buffer, batch_size

    def __repr__(self) -> str:
        return f"the actor {self._buffer!r}"

    def batch_at(self, index: int) -> str | None:
        """The id of a batch; None while there are too few rollouts."""
        found: str | None = ray.get(self._buffer.batch_at.remote(index, self._size))
        return found

    def read_batch(self, batch_id: str) -> list[RLExample]:
        """Return the batch's examples."""
        examples: list[RLExample] = ray.get(self._buffer.read_batch.remote(batch_id))
        return examples

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """Return how many versions each example was behind."""
        behind: npt.NDArray[np.float64] = ray.get(self._buffer.batch_staleness.remote(batch_id))
        return behind


# Ray's types do not know the options of actors.
_actor: Any = ray.remote

RolloutBuffer = _actor(max_restarts=-1, max_task_retries=-1, max_concurrency=8, concurrency_groups={"producers": 8})(
    RolloutBufferActor
)
"""The actor class: ``mouse_ray.RolloutBuffer.remote(...)``; ``.options(...)`` changes how it is run."""
