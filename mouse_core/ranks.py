"""The rank of this process, the meaning of ``shard="auto"``, and the exchange of notes between ranks.

The module imports no framework. The ranks are read from a framework that the program has imported and initialised.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mouse_core.errors import ConfigError

__all__ = ["Board", "Ranks", "Shard", "Uneven", "find_ranks"]

# Environment variables that torchrun, and launchers like it, set.
_RANK, _COUNT = "RANK", "WORLD_SIZE"

# Classes that divide a dataset or loader among processes, by module.
_SHARDING = {
    "torch.utils.data.distributed": ("DistributedSampler",),
    "accelerate.data_loader": ("BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher"),
    "transformers.trainer_pt_utils": ("IterableDatasetShard", "ShardSampler", "DistributedLengthGroupedSampler"),
    "datasets.iterable_dataset": ("StepExamplesIterable",),
}


class Board(Protocol):
    """A key-value store for short texts (notes) that all processes of a run can read."""

    @property
    def seconds(self) -> float:
        """The time to wait for a process, in seconds."""
        ...

    def put(self, name: str, note: str) -> None:
        """Store a note; replace a note of the same name."""
        ...

    def get(self, name: str) -> str | None:
        """Return the note with a name, without waiting; None if no note has this name."""
        ...

    def remove(self, name: str) -> None:
        """Remove a note."""
        ...


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the number of processes that train together.

    Args:
        rank: The index of this process, from 0.
        count: Number of processes.
        found_in: Name of the framework or other source from which ``rank`` and ``count`` come, for messages.
        board: The board on which loaders exchange notes, to check that the processes agree; None: no check.
        process: Id of the process that has this rank. The worker processes of this process store no notes.

    Raises:
        ConfigError: ``rank`` is not in ``[0, count)``.
    """

    rank: int
    count: int
    found_in: str = "the caller"
    board: Board | None = field(default=None, compare=False, repr=False)
    process: int = field(default_factory=os.getpid, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ConfigError(f"shard: expected 0 <= rank < count, found {self.shard} in {self.found_in}")

    @property
    def shard(self) -> tuple[int, int]:
        """``(rank, count)``."""
        return self.rank, self.count

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, (self.rank, self.count, self.found_in, None, self.process)


# Types of the arguments ``shard`` and ``uneven`` of sources and loaders; ``uneven`` applies to batches that the shards
# do not divide evenly.
Shard = tuple[int, int] | Ranks | Literal["auto"]
Uneven = Literal["refuse", "pad"]


def find_ranks(first: str = "torch") -> Ranks:
    """Return the rank of this process and the number of processes, as the launcher or framework states them.

    The source ``first`` is tried before all others; then the sources are tried in this order: "torch"
    (``torch.distributed``, if initialised), "accelerate" (Accelerate's state), "jax" (``jax.distributed``, if
    initialised) and "environment" (the variables RANK and WORLD_SIZE, as torchrun sets them). If no source has ranks,
    the result is rank 0 of 1 process.

    Args:
        first: The source to try first; the loader of a framework passes the name of this framework.

    Raises:
        ConfigError: Only one of the variables RANK and WORLD_SIZE is set, or their values are not valid numbers.
    """
    for name in sorted(_SOURCES, key=lambda name: name != first):
        found = _SOURCES[name]()
        if found is not None:
            return found
    return Ranks(0, 1, "a single process")


def ranks_of(shard: Any) -> Ranks | None:
    """Return the ranks that the shard "auto" stands for; return a ``Ranks`` unchanged, and None for a pair of
    numbers.
    """
    if isinstance(shard, tuple | list):
        return None
    if isinstance(shard, str) and shard == "auto":
        return find_ranks()
    return shard if isinstance(shard, Ranks) else None


def check_shard(shard: Any, batch_size: int, uneven: Uneven) -> tuple[int, int]:
    """Return ``shard`` as a pair. Raise ConfigError if the pair is invalid, or if the batch size must be a multiple of
    the number of shards and is not.
    """
    if uneven not in ("refuse", "pad"):
        raise ConfigError(f"uneven: expected 'refuse' or 'pad', found {uneven!r}")
    try:
        rank, count = (operator.index(part) for part in shard)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"shard: expected (rank, count), found {shard!r}; shard='auto' determines both") from error
    if not 0 <= rank < count:
        raise ConfigError(f"shard: expected 0 <= rank < count, found {(rank, count)}")
    if batch_size % count and uneven == "refuse":
        raise ConfigError(
            f"shard: expected a count that divides batch_size {batch_size}, found {count}; "
            "uneven='pad' accepts any count"
        )
    return rank, count


def check_even(shard: tuple[int, int], uneven: Uneven, index: int, size: int) -> None:
    """Raise ConfigError if batch ``index`` must be divided evenly, but its ``size`` windows are not a multiple of the
    number of shards.
    """
    count = shard[1]
    if size % count and uneven == "refuse":
        raise ConfigError(
            f"shard: expected batches that {count} shards divide evenly, found batch {index} with {size} windows; "
            "leave the rest of an epoch out with drop_last=True, choose a batch_size and a count that divide it, "
            "or pass uneven='pad', which adds masked windows"
        )


def check_sharded_once(shard: tuple[int, int]) -> None:
    """Raise an error if the source is a shard already, and a caller on the stack divides the source among processes
    again.

    Fabric replaces the sampler of a DataLoader by a sampler that gives each process every ``count``-th index.
    Accelerate does the same, or distributes the batches that the first process reads. If the source is a shard already,
    a part of the data is then never read. The requested indices do not reveal this mistake. But such a sampler first
    requests the length of the source, and this function then searches the call stack for the classes of such samplers.

    Raises:
        ConfigError: A class on the stack divides the shard again.
    """
    frame = sys._getframe(1) if shard[1] > 1 else None
    while frame is not None:
        names = _SHARDING.get(frame.f_globals.get("__name__", ""), ())
        kind = frame.f_code.co_qualname.partition(".")[0]
        if kind in names:
            raise ConfigError(
                f"shard: expected a source that is sharded once, found shard {shard} inside a {kind}, which divides "
                "the shard again, so most data would never be used. Leave shard out, or turn off the other sharding: "
                "trainers do not shard a mouse_torch.DataLoader again; for another loader, pass "
                "use_distributed_sampler=False to Fabric's setup_dataloaders or to Lightning's Trainer"
            )
        frame = frame.f_back


def _torch() -> Ranks | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    group: Any = getattr(getattr(distributed, "group", None), "WORLD", None)
    board = _TorchBoard(group.get_group_store()) if hasattr(group, "get_group_store") else None
    return Ranks(distributed.get_rank(), distributed.get_world_size(), "torch.distributed", board)


def _accelerate() -> Ranks | None:
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    # All instances share one dict; creating an instance would initialise Accelerate.
    said = getattr(state, "_shared_state", {})
    if "num_processes" not in said or "process_index" not in said:
        return None
    return Ranks(said["process_index"], said["num_processes"], "Accelerate's state")


def _jax() -> Ranks | None:
    jax: Any = sys.modules.get("jax")
    # ``process_count`` starts JAX's backends; after that, ``jax.distributed`` can no longer be initialised.
    if jax is None or not hasattr(jax, "distributed") or not jax.distributed.is_initialized():
        return None
    # Orbax uses this private name too; JAX has no public one.
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    client = getattr(state, "client", None)
    board = None if client is None else _JaxBoard(client)
    return Ranks(jax.process_index(), jax.process_count(), "jax.distributed", board)


def _environment() -> Ranks | None:
    said = {name: os.environ[name] for name in (_RANK, _COUNT) if os.environ.get(name)}
    if not said:
        return None
    try:
        return Ranks(int(said[_RANK]), int(said[_COUNT]), "the environment")
    except (KeyError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"shard: expected {_RANK} and {_COUNT} as numbers in the environment, found {said}") from None


_SOURCES: dict[str, Callable[[], Ranks | None]] = {
    "torch": _torch,
    "accelerate": _accelerate,
    "jax": _jax,
    "environment": _environment,
}


class _TorchBoard:
    """The key-value store of a torch process group as a ``Board``; storing a note takes 5 us.

    With a static rendezvous, the store and its notes survive a restart by torchrun. So the names of notes begin with
    the index of the attempt.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._attempt = store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    @property
    def seconds(self) -> float:
        """The timeout of the group."""
        seconds: float = self._store.timeout.total_seconds()
        return seconds

    def put(self, name: str, note: str) -> None:
        self._store.set(f"{self._attempt}/{name}", note)

    def get(self, name: str) -> str | None:
        name = f"{self._attempt}/{name}"
        return self._store.get(name).decode() if self._store.check([name]) else None

    def remove(self, name: str) -> None:
        self._store.delete_key(f"{self._attempt}/{name}")


class _JaxBoard:
    """The key-value store of ``jax.distributed`` as a ``Board``; storing a note takes 150 us."""

    seconds = 1800.0

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, name: str, note: str) -> None:
        self._client.key_value_set(name, note, allow_overwrite=True)

    def get(self, name: str) -> str | None:
        try:
            note: str = self._client.key_value_try_get(name)
        except RuntimeError as error:  # JAX's error
            if "NOT_FOUND" in str(error):
                return None
            raise
        return note

    def remove(self, name: str) -> None:
        self._client.key_value_delete(name)
