"""``mouse_core.groups.RolloutBuffer`` as an actor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from mouse_core import groups
from mouse_core.digest import StreamDigest
from mouse_core.groups import Awaited, BatchMaker, RLExample, RolloutColumn, RolloutRecord, StoredRollouts


class RolloutBufferActor:
    """A ``RolloutBuffer`` in a process of its own, for many producers and many trainers.

    It has the same arguments and methods; what is an attribute there is a method here. An actor that dies is started
    again, and finds in its folder everything that ``add_rollouts`` was answered for. Calls that were under way are
    repeated, which changes nothing for rollouts that arrived before, except ``create_and_store_batch``: it fails, and
    ``batches`` says whether there is one more. ``batch_at`` is repeated, and gives the same batch.

    Calls of several producers run at the same time and share their waiting for the disk. Send many rollouts a call:
    their arrays then travel in shared memory and are not copied, and stay there while the rollouts wait for their group
    or to be drawn (``memory_bytes`` limits that).

    Args:
        root_path: The folder; on a disk that every node sees if the actor may be started on another one.
        group_size, min_group_size, seal_timeout, compression: As there.
        batch_maker, capacity, columns, max_ahead, memory_bytes, sync, digest: As there.
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
        max_ahead: int | None = None,
        memory_bytes: int = 2**30,
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
            max_ahead=max_ahead,
            memory_bytes=memory_bytes,
            sync=sync,
            digest=digest,
        )

    # Producers who are held back keep nobody else from the actor.
    @ray.method(concurrency_group="producers")
    def add_rollout(self, rollout: RolloutRecord, *, timeout: float | None = None) -> bool:
        """Add one rollout; whether it was new. See ``add_rollouts``."""
        return self._buffer.add_rollout(rollout, timeout=timeout)

    @ray.method(concurrency_group="producers")
    def add_rollouts(self, rollouts: Sequence[RolloutRecord], *, timeout: float | None = None) -> int:
        """Add rollouts; when this is answered, they are on the disk.

        How many were new: fewer than arrived now, where a call was repeated that a dying actor had carried out.
        """
        return self._buffer.add_rollouts(rollouts, timeout=timeout)

    def add_column(self, name: str, values: Mapping[str, Any]) -> int:
        """Add a late column's values by uid; when this is answered, they are on the disk, and how many were new."""
        return self._buffer.add_column(name, values)

    def waiting_for(self) -> dict[str, Awaited]:
        """Which rollouts each late column is awaited of."""
        return self._buffer.waiting_for()

    def rollout(self, rollout_uid: str) -> RolloutRecord:
        """A rollout, sealed or waiting, with the late columns that it has."""
        return self._buffer.rollout(rollout_uid)

    def flush(self) -> int:
        """Seal every group that waits; how many there were."""
        return self._buffer.flush()

    def set_policy_version(self, version: str | int) -> None:
        """Say which version is the latest; the folder keeps it."""
        self._buffer.set_policy_version(version)

    def give_up(self, rollout_uids: Sequence[str]) -> int:
        """Wait for some rollouts no more; how many are new."""
        return self._buffer.give_up(rollout_uids)

    def summary(self) -> dict[str, float]:
        """Numbers for a log: those of the batch maker, and how many rollouts there are."""
        return self._buffer.summary()

    @ray.method(max_task_retries=0)
    def create_and_store_batch(self, batch_size: int) -> str | None:
        """Let the batch maker make a batch, and store it; its id, or None while there are too few rollouts."""
        return self._buffer.create_and_store_batch(batch_size)

    def batch_at(self, index: int, batch_size: int | None = None) -> str | None:
        """The id of a stored batch, which is made if it comes next; several may ask, and it is the same one."""
        return self._buffer.batch_at(index, batch_size)

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How many versions older than the newest the examples of a batch were when it was made."""
        return self._buffer.batch_staleness(batch_id)

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
        example_id: str | int | Collection[str | int] | None = None,
        since: float | None = None,
        until: float | None = None,
        tokens: tuple[float | None, float | None] | None = None,
        rewards: tuple[float | None, float | None] | None = None,
    ) -> StoredRollouts:
        """The rollouts sealed so far; whoever asks reads them from the folder, where it sees it."""
        return self._buffer.rollouts(
            environment=environment,
            policy_version=policy_version,
            example_id=example_id,
            since=since,
            until=until,
            tokens=tokens,
            rewards=rewards,
        )

    def contains(self, rollout_uids: Sequence[str]) -> list[bool]:
        """Which rollouts are there, sealed or waiting."""
        return self._buffer.contains(rollout_uids)

    def size(self) -> int:
        """Rollouts, sealed or waiting."""
        return len(self._buffer)

    def num_groups(self) -> int:
        """Sealed groups."""
        return self._buffer.num_groups

    def num_waiting(self) -> int:
        """Rollouts whose groups are not sealed yet."""
        return self._buffer.num_waiting

    def num_ahead(self) -> int:
        """Rollouts that wait for their groups, and examples that batches could be made of now."""
        return self._buffer.num_ahead

    def close(self) -> None:
        """Stop; what waits is in the log."""
        self._buffer.close()


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
        """Its examples."""
        examples: list[RLExample] = ray.get(self._buffer.read_batch.remote(batch_id))
        return examples

    def batch_staleness(self, batch_id: str) -> npt.NDArray[np.float64]:
        """How far each was behind."""
        behind: npt.NDArray[np.float64] = ray.get(self._buffer.batch_staleness.remote(batch_id))
        return behind


# Ray's types do not know the options of actors.
_actor: Any = ray.remote

RolloutBuffer = _actor(max_restarts=-1, max_task_retries=-1, max_concurrency=8, concurrency_groups={"producers": 8})(
    RolloutBufferActor
)
"""The actor class: ``mouse_ray.RolloutBuffer.remote(...)``; ``.options(...)`` changes how it is run."""
