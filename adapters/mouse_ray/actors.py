"""Buffers and writers of ``mouse_core`` as Ray actors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import ray

from mouse_core import DatasetStore, groups, replay
from mouse_core.collect import SharedStore, StoreClient
from mouse_core.groups import RLExample, RolloutRecord

# Ray's type annotations lack the options of actors.
_actor: Any = ray.remote


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


ReplayBuffer = _actor(max_restarts=-1)(ReplayBufferActor)
"""The actor class: ``mouse_ray.ReplayBuffer.remote(...)``; ``.options(...)`` changes Ray's options of the actor."""


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


RolloutBuffer = _actor(max_restarts=-1, max_task_retries=-1, max_concurrency=8, concurrency_groups={"producers": 8})(
    RolloutBufferActor
)
"""The actor class: ``mouse_ray.RolloutBuffer.remote(...)``; ``.options(...)`` changes Ray's options of the actor."""


class StoreWriterActor:
    """The single writer of a store in a folder, as an actor; ``store_client`` creates a client of the actor.

    If the actor dies, Ray restarts the actor and repeats the calls that were in progress. The folder records the calls
    whose rows are in the store, for each client, so rows are written only once. A trainer can open the folder directly
    for reading, if its node has access to the folder.

    Args:
        path: The folder. If the actor can restart on another node, the folder must be on a disk that all nodes can
            access.
        sync, max_rows, max_bytes, options: The arguments of ``DatasetStore.open``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        sync: Literal["none", "flush", "append"] = "flush",
        max_rows: int | None = None,
        max_bytes: int | None = None,
        **options: Any,
    ) -> None:
        self._store = DatasetStore.open(path, "a", sync=sync, max_rows=max_rows, max_bytes=max_bytes, **options)
        self._shared = SharedStore(self._store)

    def answer(self, call: Mapping[str, Any], *parts: Any) -> dict[str, Any]:
        """Return the answer to a client's call; see ``SharedStore.answer``."""
        body = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
        return self._shared.answer(call, body.data)

    def flush(self) -> None:
        """Flush the store."""
        self._shared.flush()

    def size(self) -> int:
        """Return the number of rows."""
        return len(self._store)

    def clients(self) -> dict[str, int]:
        """Return for each client the number of its writes that are in the store."""
        return self._shared.counts

    def close(self) -> None:
        """Seal the rows, and release the store for another writer."""
        self._shared.close()
        self._store.close()


StoreWriter = _actor(max_restarts=-1, max_task_retries=-1)(StoreWriterActor)
"""The actor class: ``mouse_ray.StoreWriter.remote(folder)``; ``.options(...)`` changes Ray's options of the actor."""


class _ActorChannel:
    """A ``mouse_core.collect.Channel`` to the actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __repr__(self) -> str:
        return repr(self._actor)

    def connect(self, timeout_s: float) -> None:
        """Do nothing, because Ray connects to the actor."""

    def exchange(self, call: Mapping[str, Any], parts: Sequence[memoryview]) -> Mapping[str, Any]:
        """Return the actor's answer to a call; Ray passes large data in shared memory."""
        try:
            answer: Mapping[str, Any] = ray.get(
                self._actor.answer.remote(dict(call), *[np.frombuffer(part, np.uint8) for part in parts])
            )
        except ray.exceptions.RayActorError as error:
            raise ConnectionError(f"the Ray actor has ended: {error}") from error
        return answer

    def close(self) -> None:
        """Do nothing, because the channel holds no connection."""


def store_client(writer: Any, name: str, *, timeout_s: float = 30.0) -> StoreClient:
    """Return a client of a ``StoreWriter``, which behaves like the client of a ``StoreServer``.

    Args:
        writer: The handle of the actor, from ``mouse_ray.StoreWriter.remote(...)`` in this or another process.
        name: The unique name of this client; see ``StoreClient``.
        timeout_s: How many seconds to wait for an actor that restarts.

    Raises:
        ConfigError, StorageError: See ``StoreClient``.
    """
    return StoreClient(_ActorChannel(writer), name, timeout_s=timeout_s)
