"""``mouse_core.groups.RolloutBuffer`` as an actor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import ray

from mouse_core import groups
from mouse_core.digest import StreamDigest
from mouse_core.groups import BatchMaker, RLExample, RolloutColumn, RolloutRecord, StoredRollouts


class RolloutBufferActor:
    """A ``RolloutBuffer`` in a process of its own, for many producers and many trainers.

    It has the same arguments and methods; what is an attribute there is a method here. An actor that dies is started
    again, and finds in its folder everything that ``add_rollouts`` was answered for. Calls that were under way are
    repeated, which changes nothing for rollouts that arrived before, except ``create_and_store_batch``: it fails, and
    ``batches`` says whether there is one more.

    Calls of several producers run at the same time and share their waiting for the disk. Send many rollouts a call:
    their arrays then travel in shared memory and are not copied, and stay there while the rollouts wait for their group
    or to be drawn (``capacity`` and the batch maker's ``capacity_bytes`` limit that).

    Args:
        root_path: The folder; on a disk that every node sees if the actor may be started on another one.
        group_size, min_group_size, seal_timeout, compression, batch_maker, capacity, columns, sync,
            digest: As there.
    """

    def __init__(
        self,
        root_path: str | Path,
        group_size: int = 8,
        min_group_size: int = 2,
        seal_timeout: float = 30.0,
        compression: str = "zstd",
        batch_maker: BatchMaker | None = None,
        capacity: int | None = None,
        *,
        columns: Sequence[RolloutColumn] | None = None,
        sync: bool = True,
        digest: bool = False,
    ) -> None:
        self._buffer = groups.RolloutBuffer(
            root_path,
            group_size,
            min_group_size,
            seal_timeout,
            compression,
            batch_maker,
            capacity,
            columns=columns,
            sync=sync,
            digest=digest,
        )

    def add_rollout(self, rollout: RolloutRecord) -> bool:
        """Add one rollout; whether it was new. See ``add_rollouts``."""
        return self._buffer.add_rollout(rollout)

    def add_rollouts(self, rollouts: Sequence[RolloutRecord]) -> int:
        """Add rollouts; when this is answered, they are on the disk.

        How many were new: fewer than arrived now, where a call was repeated that a dying actor had carried out.
        """
        return self._buffer.add_rollouts(rollouts)

    def flush(self) -> int:
        """Seal every group that waits; how many there were."""
        return self._buffer.flush()

    @ray.method(max_task_retries=0)
    def create_and_store_batch(self, batch_size: int) -> str | None:
        """Let the batch maker make a batch, and store it; its id, or None while there are too few rollouts."""
        return self._buffer.create_and_store_batch(batch_size)

    def batches(self) -> list[str]:
        """The ids of all stored batches, in order."""
        return self._buffer.batches

    def digest(self) -> StreamDigest:
        """What batches were stored, in 128 bits; see the core's."""
        return self._buffer.digest

    def read_batch(self, batch_id: str) -> list[RLExample]:
        """A stored batch."""
        return self._buffer.read_batch(batch_id)

    def batch_metadata(self, batch_id: str) -> dict[str, Any]:
        """What the batch maker said of a stored batch."""
        return self._buffer.batch_metadata(batch_id)

    def rollouts(
        self,
        *,
        environment: str | None = None,
        policy_version: str | int | Collection[str | int] | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> StoredRollouts:
        """The rollouts sealed so far; whoever asks reads them from the folder, where it sees it."""
        return self._buffer.rollouts(environment=environment, policy_version=policy_version, since=since, until=until)

    def contains(self, rollout_uids: Sequence[str]) -> list[bool]:
        """Which rollouts are there, sealed or waiting."""
        return [uid in self._buffer for uid in rollout_uids]

    def size(self) -> int:
        """Rollouts, sealed or waiting."""
        return len(self._buffer)

    def num_groups(self) -> int:
        """Sealed groups."""
        return self._buffer.num_groups

    def num_waiting(self) -> int:
        """Rollouts whose groups are not sealed yet."""
        return self._buffer.num_waiting

    def close(self) -> None:
        """Stop; what waits is in the log."""
        self._buffer.close()


# Ray's types do not know the options of actors.
_actor: Any = ray.remote

RolloutBuffer = _actor(max_restarts=-1, max_task_retries=-1, max_concurrency=8)(RolloutBufferActor)
"""The actor class: ``mouse_ray.RolloutBuffer.remote(...)``; ``.options(...)`` changes how it is run."""
