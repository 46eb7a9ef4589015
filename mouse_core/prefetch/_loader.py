"""What the loaders of all frameworks have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np

from mouse_core._base.ordered import OrderedPrefetcher, Prefetcher
from mouse_core._base.tracing import refuse_traced
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ClosedError, ConfigError, ForkError, StateError, WorkerError
from mouse_core.images._decoding import DecodePool, decoding_by
from mouse_core.prefetch._resuming import check_source, numbers_of, state_of
from mouse_core.randomness import check_seed
from mouse_core.sampling.plan import WindowSampler
from mouse_core.spec import Spec
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:  # buffers are loaded where there are some: `import mouse_core` is without them
    from mouse_core.replay.source import BufferSource, Staleness

T = TypeVar("T")


class Loader(Generic[T]):
    """What the loaders of all frameworks have in common; see ``PrefetchBatchifier``.

    Args:
        source: Where batches come from; of a replay buffer, a ``BufferSource``.
        store: The store to refresh from; None where there is none.
        maker: Gives, for a source, the function from an index to a batch, or to what ``hand_over`` makes one of. It
            runs in the worker threads, and must not hold on to the loader.
        hand_over: Runs in the caller's thread for every batch that is delivered.
        prefetcher: What computes ahead, called as ``OrderedPrefetcher`` is.
        prefetch: Batches to compute ahead.
        num_workers: Threads that compute; 0: the caller's.
    """

    def __init__(
        self,
        source: BatchSource | BufferSource,
        store: DatasetStore | None,
        *,
        maker: Callable[[Any], Callable[[int], Any]],
        hand_over: Callable[[Any], T] | None = None,
        prefetcher: Callable[..., Prefetcher] = OrderedPrefetcher,
        prefetch: int = 4,
        num_workers: int = 2,
    ) -> None:
        # Typed as what it nearly always is; what a BufferSource does otherwise is asked for by ``_buffer``.
        self._source: BatchSource = source  # type: ignore[assignment]
        self._store = store
        self._maker = maker
        self._hand_over = hand_over
        self._prefetcher = prefetcher
        self._prefetch = check_count("prefetch", prefetch, lowest=1)
        self._num_workers = check_count("num_workers", num_workers, lowest=0)
        self._next_index = source.epoch_start
        self._make: Callable[[int], Any] | None = None
        self._ahead: Prefetcher | None = None
        self._decoders: DecodePool | None = None
        self._failure: WorkerError | None = None
        self._closed = False
        self._process: int | None = None

    # ------------------------------------------------------------------ batches

    def next_batch(self) -> T:
        """The next batch, in index order.

        Raises:
            WorkerError: Computing it failed; the cause is chained. The same error is raised on every later call,
                and the loader's state stays at the index that failed.
            ClosedError: After ``close()``.
            ForkError: In a forked child of the process that began to use the loader.
            ConfigError: Inside a function that JAX traces, where it would be the same batch for ever.
        """
        self._check_usable()
        if self._failure is not None:
            raise self._failure
        if self._buffer is not None:  # an empty buffer is an error that passes
            self._buffer.prepare(self._next_index)
        elif self._make is None:
            len(self._source)  # which sees that nobody shards a shard again
        try:
            made = self._compute_or_wait()
            batch: T = made if self._hand_over is None else self._hand_over(made)
        except ClosedError:
            raise
        except Exception as error:
            message = f"batch {self._next_index}: {type(error).__name__}: {error}"
            self._failure = WorkerError(message)
            raise self._failure from error
        if self._buffer is not None:
            self._buffer.delivered(self._next_index)
        self._next_index += 1
        return batch

    @property
    def _buffer(self) -> BufferSource | None:
        source: Any = self._source
        return None if isinstance(source, BatchSource) else source

    @property
    def staleness(self) -> Staleness:
        """How old the last batch was, in batches, rows written and updates of priorities since it was drawn.

        Only batches of a replay buffer can be old: they are drawn ``prefetch`` calls before they are delivered.
        """
        from mouse_core.replay.source import Staleness

        return Staleness() if self._buffer is None else self._buffer.staleness

    def _compute_or_wait(self) -> Any:
        if self._process is None:
            self._process = os.getpid()
        if self._make is None:
            self._make = self._maker(self._source)
            if self._num_workers:
                self._decoders = self._decoders or DecodePool(self._num_workers)
                self._make = decoding_by(self._decoders, self._make)
        if not self._num_workers:
            return self._make(self._next_index)
        ahead = self._ahead
        if ahead is not None and ahead.next_index != self._next_index:
            # Ctrl-C came between an item's leaving the queue and its being counted.
            ahead.close()
            ahead = None
        if ahead is None:
            ahead = self._prefetcher(self._make, self._next_index, workers=self._num_workers, ahead=self._prefetch)
            self._ahead = ahead
            if self._closed:  # by another thread, which did not see it
                ahead.close()
        return ahead.get()

    def __iter__(self) -> Iterator[T]:
        """The batches up to the end of the current epoch; the next ``for`` loop runs over the next epoch.

        After ``refresh()`` within a loop that is the end of the epoch which began there.
        """
        ends = False
        while not ends:
            source = self._source
            yield self.next_batch()
            ends = self._source is source and self._epoch_ended()

    def _epoch_ended(self) -> bool:
        if self._buffer is not None:
            return self._buffer.ends_at(self._next_index)
        return (self._next_index - self._source.epoch_start) % len(self) == 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._source)

    def __repr__(self) -> str:
        return (
            f"{type(self).__module__.partition('.')[0]}.{type(self).__name__}({self._source!r}, at={self._next_index})"
        )

    @property
    def source(self) -> BatchSource:
        """Where the batches come from."""
        return self._source

    @property
    def spec(self) -> Spec:
        """The fields of a batch.

        Raises:
            ConfigError: Of a replay buffer, which learns them from what is written.
        """
        if self._buffer is not None:
            raise ConfigError("spec: expected a loader over a store, found one over a replay buffer")
        return self._source.spec

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on with the next batch, here or elsewhere: plain integers and strings.

        ``seed``, ``next_index``, ``rows`` (of the snapshot), ``epoch_start`` (the index at which the first epoch over
        the snapshot began), ``fingerprint`` (of data and configuration) and ``configuration`` (in words, to say what
        differs). The same in every framework, for every shard and any number of workers.

        Over a replay buffer it is ``next_index`` and the batches that were drawn and not yet delivered, as arrays; the
        buffer has a state of its own.
        """
        if self._buffer is not None:
            return self._buffer.state(self._next_index)
        return state_of(self._source, self._next_index)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state`` was taken, with its seed; the store may have grown since.

        Raises:
            StateError: The state is of another dataset or configuration, or damaged; nothing has changed then.
            ClosedError, ForkError: As ``next_batch``.
        """
        self._check_usable()
        if self._buffer is not None:
            restored: Any = self._buffer.restored(state)
            self._restart(*restored)
            return
        numbers = numbers_of(state)
        try:
            seed = check_seed(numbers["seed"])
            source = self._source.with_snapshot(
                self._snapshot(numbers["rows"]), epoch_start=numbers["epoch_start"], seed=seed
            )
        except (ConfigError, KeyError) as error:
            raise StateError(f"state: expected one of this dataset and configuration, found: {error}") from error
        check_source(source, state)
        self._restart(source, numbers["next_index"])

    def refresh(self) -> None:
        """Take a new snapshot of the store; a new epoch over it starts at the next batch.

        Raises:
            ConfigError: The loader was made from a snapshot, not from a store.
            ClosedError, ForkError: As ``next_batch``.
        """
        self._check_usable()
        if self._store is None:
            raise ConfigError(
                "refresh: expected a loader over a DatasetStore, found one over a snapshot or a replay buffer"
            )
        source = self._source.with_snapshot(self._store.snapshot(), epoch_start=self._next_index)
        self._restart(source, self._next_index)

    def _snapshot(self, rows: int) -> Snapshot:
        if self._store is not None:
            return self._store.snapshot(rows)
        whole = self._source.snapshot
        return Snapshot(whole.segments, whole.config, rows, budget=whole.budget)

    def _restart(self, source: BatchSource, next_index: int) -> None:
        self._stop()
        self._source, self._next_index = source, next_index
        self._make, self._failure = None, None

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Stop the threads and drop prefetched batches; ``next_batch`` raises from now on. May be called twice."""
        self._closed = True
        self._stop()
        if self._decoders is not None:
            self._decoders.close()

    def _stop(self) -> None:
        if self._ahead is not None and self._process == os.getpid():
            self._ahead.close()
        self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        refuse_traced("loader")
        if self._closed:
            raise ClosedError("loader: expected an open loader, found it closed")
        if self._process is not None and self._process != os.getpid():
            raise ForkError(
                f"loader: expected to be used in process {self._process}, found the forked child {os.getpid()}; "
                "make a loader of its own there"
            )


def make_source(
    store: Any,
    sequence_length: int,
    batch_size: int | None,
    sampling: str | WindowSampler,
    seed: int,
    shard: tuple[int, int],
    *,
    ahead: int,
    **options: Any,
) -> BatchSource | BufferSource:
    """Where a loader's batches come from, by the arguments of ``PrefetchBatchifier``.

    Args:
        store: A store or a snapshot; or a replay buffer, of which ``ahead`` batches are drawn in advance.
        batch_size: None: 32, or that of the buffer.
        options: Further arguments of ``BatchSource``.

    Raises:
        ConfigError: For a replay buffer, an argument that only stores have; else see ``BatchSource``.
    """
    if not is_buffer(store):
        size = 32 if batch_size is None else batch_size
        return BatchSource(store, sequence_length, size, sampling, seed, shard, **options)
    given = {"sequence_length": sequence_length, "sampling": sampling, "seed": seed, "shard": shard, **options}
    for name, value in given.items():
        if value not in (_STORES_ONLY[name], None) if name in _STORES_ONLY else False:
            raise ConfigError(
                f"{name}: expected none for a replay buffer, which has a sampler, a seed and transforms of its own, "
                f"found {value!r}"
            )
    from mouse_core.replay.source import BufferSource

    return BufferSource(store, batch_size, check_count("prefetch", ahead, lowest=1))


def is_buffer(store: Any) -> bool:
    """Whether batches come from a replay buffer, or an ensemble of them."""
    if isinstance(store, DatasetStore | Snapshot):
        return False
    from mouse_core.replay.base import BaseBuffer

    return isinstance(store, BaseBuffer)


# Arguments that say nothing about the batches of a replay buffer, and their defaults.
_STORES_ONLY: dict[str, Any] = {
    "sequence_length": 64,
    "sampling": "random",
    "seed": 0,
    "shard": (0, 1),
    "dtypes": None,
    "required_fields": (),
    "fields": None,
    "drop_last": True,
    "augment": None,
    "views": 1,
    "boundary": "stream",
    "weighting": "step",
    "pad": None,
}


def check_count(name: str, value: Any, *, lowest: int) -> int:
    """``value`` if it is an integer from ``lowest``, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < lowest:
        raise ConfigError(f"{name}: expected an integer from {lowest}, found {value!r}")
    return int(value)
