"""A ``DatasetStore`` that a Ray actor writes, for collectors on any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray

from mouse_core import DatasetStore
from mouse_core.collect import SharedStore, StoreClient


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


# Ray's type annotations lack the options of actors.
_actor: Any = ray.remote

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
