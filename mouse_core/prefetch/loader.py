"""The common base of the loaders of all frameworks, and feeds: how a loader follows each kind of source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from mouse_core._base.tracing import refuse_traced
from mouse_core.batches.source import BatchSource
from mouse_core.errors import ClosedError, ConfigError, ForkError, StateError, WorkerError
from mouse_core.prefetch.prefetcher import Delivery, Prefetcher
from mouse_core.randomness import check_seed
from mouse_core.spec import Spec, check_count
from mouse_core.store.views import Store

if TYPE_CHECKING:
    from mouse_core.digest import StreamDigest
    from mouse_core.images.decoding import DecodePool
    from mouse_core.prefetch._agreement import Agreement
    from mouse_core.prefetch.report import Counts, LoaderReport
    from mouse_core.replay.source import Staleness


class Feed:
    """Feed of a source of the caller's own, which never changes."""

    #: Whether there are images to decode; None: unknown.
    has_images: bool | None = None

    def __init__(self, source: Any) -> None:
        self.source = source
        #: The number of the first batch of an epoch.
        self.first_index: int = getattr(source, "epoch_start", 0)

    @property
    def staleness(self) -> Staleness:
        """The age of the last batch."""
        from mouse_core.replay.source import Staleness

        return Staleness()

    def prepare(self, index: int, *, first: bool) -> bool:
        """Prepare batch ``index`` in the caller's thread; ``first``: it is the first batch of this feed.

        Returns:
            Whether threads have to begin anew, as batches exist now that they may have missed.
        """
        if first:
            len(self.source)  # which sees that nobody shards a shard again
        return False

    def delivered(self, index: int) -> None:
        """Note that batch ``index`` was delivered."""

    def ends_at(self, index: int) -> bool:
        """Whether an epoch ended with batch ``index - 1``."""
        return (index - self.first_index) % len(self.source) == 0

    def state(self, next_index: int) -> dict[str, Any]:
        """The state of a loader that delivers batch ``next_index`` next."""
        return {"next_index": next_index, "fingerprint": self.source.fingerprint}

    def restored(self, state: Mapping[str, Any]) -> tuple[Any, int]:
        """Return the feed that ``state`` describes, and the number of its next batch.

        Raises:
            StateError: The state is of another source, or damaged.
        """
        from mouse_core.prefetch._resuming import numbers_of

        numbers = numbers_of(state, "next_index")
        if state["fingerprint"] != self.source.fingerprint:
            raise StateError(
                f"state: expected the fingerprint {self.source.fingerprint!r:.80} of this source, found "
                f"{state['fingerprint']!r:.80}"
            )
        return type(self)(self.source), numbers["next_index"]

    def refreshed(self, next_index: int) -> Any:
        """Return a feed with the store's current rows, whose first epoch begins at ``next_index``.

        Raises:
            ConfigError: There is no store to take them from.
        """
        raise ConfigError(
            "refresh: expected a loader over a DatasetStore, found one over a snapshot, a replay buffer or a source"
        )


class StoreFeed(Feed):
    """Feed of a snapshot's batches, which takes new snapshots of its store.

    Args:
        source: Of the snapshot.
        store: The store to refresh from; None where there is none.
    """

    source: BatchSource

    def __init__(self, source: BatchSource, store: Store | None) -> None:
        super().__init__(source)
        self._store = store
        self.has_images = any(field.image_shape is not None for field in source.spec.values())

    def state(self, next_index: int) -> dict[str, Any]:
        """The state of a loader that delivers batch ``next_index`` next."""
        from mouse_core.prefetch._resuming import state_of

        return state_of(self.source, next_index)

    def restored(self, state: Mapping[str, Any]) -> tuple[Any, int]:
        """A feed with the seed and the rows of a state; see ``Feed``."""
        from mouse_core.prefetch._resuming import check_decoder, check_source, dropped_of, numbers_of, rows_of

        numbers = numbers_of(state, "seed", "next_index", "epoch_start", others=("rows",))
        if numbers["next_index"] < numbers["epoch_start"]:
            raise StateError(f"state: expected next_index at or after epoch_start, found {numbers}")
        try:
            seed, begin = check_seed(numbers["seed"]), numbers["epoch_start"]
            rows = rows_of(state["rows"])
            snapshot = self.source.snapshot.of_rows(rows) if self._store is None else self._store.snapshot(rows)
            source = self.source.with_snapshot(snapshot, epoch_start=begin, seed=seed)
        except (ConfigError, KeyError) as error:
            raise StateError(
                f"state: expected one of this dataset and configuration, found: {error}{dropped_of(self._store)}"
            ) from error
        check_source(source, state, dropped_of(self._store))
        check_decoder(source, state)
        return StoreFeed(source, self._store), numbers["next_index"]

    def refreshed(self, next_index: int) -> Any:
        """A feed with the rows that the store has now; see ``Feed``."""
        if self._store is None:
            return super().refreshed(next_index)
        source = self.source.with_snapshot(self._store.snapshot(), epoch_start=next_index)
        return StoreFeed(source, self._store)


def feed_of(source: Any, store: Store | None) -> Any:
    """Return the feed of ``source``, which may be a ``BatchSource`` of ``store`` or a ``BufferSource``."""
    if isinstance(source, BatchSource):
        return StoreFeed(source, store)
    return source if hasattr(source, "prepare") else Feed(source)


T = TypeVar("T")

# Seconds after which what the calling thread has used is looked up before it makes a batch.
_OLD = 0.001


class Loader(Generic[T]):
    """Batches of a source in index order, made ahead; ``Batchifier`` is one that finds its source by arguments.

    Args:
        source: Where batches come from: a ``Source``, or of a replay buffer a ``BufferSource``.
        store: The store to refresh from; None where there is none.
        delivery: How batches are made.
        prefetch: Batches to make ahead.
        num_workers: Threads that make them; 0: the caller's.
        digest: Whether a digest of what is delivered runs along; see ``digest``.

    Raises:
        ConfigError: A number out of range.
    """

    #: Who is asked first which of several processes this is, for ``shard="auto"``; see ``mouse_core.ranks.find_ranks``.
    framework = "torch"

    def __init__(
        self,
        source: Any,
        store: Store | None = None,
        *,
        delivery: Delivery[T],
        prefetch: int = 4,
        num_workers: int = 2,
        digest: bool = False,
    ) -> None:
        self._feed = feed_of(source, store)
        self._delivery = delivery
        self._prefetch = check_count("prefetch", prefetch, lowest=1)
        self._num_workers = 0 if delivery.in_caller else check_count("num_workers", num_workers, lowest=0)
        self._next_index = self._feed.first_index
        # Where the feed took over, after how many batches of the one before, and where the next is expected.
        self._began, self._interval = self._next_index, 0
        self._expected: int | None = None
        self._make: Callable[[int], Any] | None = None
        self._counts: Counts | None = None
        self._ahead: Prefetcher[Any] | None = None
        self._decoders: DecodePool | None = None
        self._failure: WorkerError | None = None
        self._digest: StreamDigest | None = None
        if digest:
            from mouse_core.digest import StreamDigest

            self._digest = StreamDigest()
        self._closed = False
        self._process: int | None = None
        self._agreement: Agreement | None = None
        ranks = delivery.ranks or getattr(source, "ranks", None)
        if ranks is not None:
            from mouse_core.prefetch._agreement import Agreement  # loaded where there may be others

            self._agreement = Agreement(ranks, self.framework)

    # ------------------------------------------------------------------ batches

    def next_batch(self) -> T:
        """The next batch, in index order.

        Raises:
            WorkerError: Computing it failed; the cause is chained. The same error is raised on every later call,
                and the loader's state stays at the index that failed.
            ClosedError: After ``close()``.
            ForkError: In a forked child of the process that began to use the loader.
            ConfigError: Inside a function that JAX traces, where it would be the same batch for ever. Of several ranks
                that were found (``shard="auto"``), one is about to deliver other batches, before the first of them.
        """
        began = perf_counter()
        self._check_usable()
        if self._failure is not None:
            raise self._failure
        if self._agreement is not None:
            self._agreement.deliver(self._feed, self._next_index)
        if self._feed.prepare(self._next_index, first=self._make is None):
            self._begin_anew()
        try:
            made, took = self._made(began)
            made, digest = made if self._digest is not None else (made, None)
            batch: T = made if self._delivery.hand_over is None else self._delivery.hand_over(made)
        except ClosedError:
            raise
        except Exception as error:
            message = f"batch {self._next_index}: {type(error).__name__}: {error}"
            self._failure = WorkerError(message)
            raise self._failure from error
        self._feed.delivered(self._next_index)
        if (counts := self._counts) is not None:
            counts.ended = ended = perf_counter()
            counts.waited += ended - began
            counts.batches = number = counts.batches + 1
            if took is not None or ended - began > counts.slow or number % counts.weighed_every == 1:
                counts.add(ended - began, took, batch)
        self._next_index += 1
        if digest is not None and self._digest is not None:
            self._digest += digest
        return batch

    @property
    def digest(self) -> StreamDigest:
        """The batches that were delivered so far, in 128 bits; those of all ranks add up to that of the whole stream.

        It is equal in every framework and for every number of workers. The state holds it, and it goes on over a
        resumption; of several ranks that takes one state of all of them, see ``load_state_dict``. The thread that makes
        a batch digests it, before it goes to a device. Of batches that ``uneven="pad"`` fills up, the windows that fill
        up do not count, nor does a mask that says no more than which these are: the digest is that of any other number
        of ranks.

        Raises:
            ConfigError: The loader was made without ``digest=True``.
        """
        from mouse_core.digest import asked_for

        return asked_for(self._digest, "loader")

    @property
    def staleness(self) -> Staleness:
        """The age of the last batch, in batches, rows written and priority updates since its draw.

        Only batches of a replay buffer can be old: they are drawn ``prefetch`` calls before they are delivered.
        """
        staleness: Staleness = self._feed.staleness
        return staleness

    def report(self) -> LoaderReport:
        """Return the waiting times and bytes so far; ``later - earlier`` is the difference of two reports."""
        from mouse_core.prefetch.report import LoaderReport

        if self._counts is None:
            return LoaderReport()
        decoding = 0.0 if self._decoders is None else self._decoders.seconds
        ready = 0 if self._ahead is None else self._ahead.ready
        return self._counts.report(self._feed.source, decoding, ready, self._prefetch if self._num_workers else 0)

    def _making(self, began: float) -> Callable[[int], Any]:
        """Return the function that makes the source's batches; its modules load only when batches are made."""
        from mouse_core.prefetch.report import Counts, timed

        make = self._delivery.maker(self._feed.source)
        if self._digest is not None:
            from mouse_core.prefetch._digesting import digesting

            make = digesting(make, self._feed.source)
        has_images = self._feed.has_images
        if has_images or (has_images is None and self._num_workers):
            from mouse_core.images.decoding import DecodePool, decoding_by

            self._decoders = self._decoders or DecodePool(self._num_workers)
            make = decoding_by(self._decoders, make)
        self._counts = self._counts or Counts(self._feed.source, began)
        return timed(make) if self._num_workers else make

    def _made(self, began: float) -> tuple[Any, Any]:
        """The next batch, with its digest where there is one, and how long it took; None: as long as this takes."""
        if self._process is None:
            self._process = os.getpid()
        if self._make is None:
            self._make = self._making(began)
            if self._ahead is not None:
                self._ahead.begin(self._make, self._next_index, until=self._expected)
        if not self._num_workers:
            if self._counts is not None and began - self._counts.looked > _OLD:
                self._counts.look(began)
            return self._make(self._next_index), None
        ahead = self._ahead
        if ahead is not None and ahead.next_index != self._next_index:
            # Ctrl-C came between an item's leaving the queue and its being counted.
            ahead.close()
            ahead = None
        if ahead is None:
            prefetcher, workers = self._delivery.prefetcher, self._num_workers
            self._ahead = ahead = prefetcher(self._make, self._next_index, workers=workers, ahead=self._prefetch)
            if self._closed:  # by another thread, which did not see it
                ahead.close()
        made: tuple[Any, Any] = ahead.get()
        return made

    def __iter__(self) -> Iterator[T]:
        """The batches up to the end of the current epoch; the next ``for`` loop runs over the next epoch.

        After ``refresh()`` within a loop that is the end of the epoch which began there.
        """
        ends = False
        while not ends:
            feed = self._feed
            yield self.next_batch()
            ends = self._feed is feed and feed.ends_at(self._next_index)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._feed.source)

    def __repr__(self) -> str:
        package = type(self).__module__.partition(".")[0]
        return f"{package}.{type(self).__name__}({self._feed.source!r}, at={self._next_index})"

    @property
    def source(self) -> Any:
        """The source of the batches: a ``BatchSource``, a ``BufferSource``, or a user's own source."""
        return self._feed.source

    @property
    def spec(self) -> Spec:
        """The fields of a batch.

        Raises:
            ConfigError: Of a replay buffer, which learns them from what is written.
        """
        if not hasattr(self.source, "spec"):
            raise ConfigError("spec: expected a loader over a store, found one over a replay buffer")
        spec: Spec = self.source.spec
        return spec

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on with the next batch, here or elsewhere: plain integers and strings.

        ``seed``, ``next_index``, ``rows`` (of the snapshot; of a mixture a dict of them by its members' names),
        ``epoch_start`` (where the first epoch over the snapshot began), ``fingerprint`` (of data and configuration) and
        ``configuration`` (in words), with videos also ``decoder``. The same in every framework, shard and worker count.

        Over a source of one's own it is ``next_index`` and ``fingerprint``. Over a replay buffer it is ``next_index``
        and the batches that were drawn and not yet delivered, as arrays; the buffer has a state of its own.

        With ``digest=True`` there is ``digest``, too: of this rank, the only thing in it that ranks differ in.
        """
        state: dict[str, Any] = self._feed.state(self._next_index)
        if self._digest is not None:
            from mouse_core.digest import KEY, rank_state
            from mouse_core.prefetch._digesting import shard_of

            state[KEY] = rank_state(self._digest, shard_of(self._feed.source, self._delivery.ranks))
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, accept_decoder: bool = False) -> None:
        """Go on exactly where ``state`` was taken, with its seed; the store may have grown since.

        A digest goes on, too, where the state has that of a whole stream: of one process, or of all ranks together, as
        ``mouse_core.digest.whole_state`` makes it. Of several ranks rank 0 carries it on and the others begin with
        nothing, so that they add up to the stream's. With the state of one rank among several all begin with nothing.

        Frames of videos are to be decoded by the versions that the state names (``mouse_core.video.decoder_version``),
        or by others with ``accept_decoder=True``: the same frames, whose pixels may differ in their last bits.

        Raises:
            StateError: The state is of another dataset or configuration, or decoder, or damaged; nothing has changed
                then.
            ConfigError: Ranks that were found (``shard="auto"``) load other states; nothing has changed then.
            ClosedError, ForkError: As ``next_batch``.
        """
        self._check_usable()
        digest = None
        if isinstance(state, Mapping):
            state = dict(state)
            digest = state.pop("digest", None)
            if accept_decoder:
                state.pop("decoder", None)
        feed, next_index = self._feed.restored(state)
        if self._agreement is not None:
            self._agreement.hold("load_state_dict()", feed, next_index, self._next_index)
        if self._digest is not None:
            from mouse_core.digest import rank_digest
            from mouse_core.prefetch._digesting import shard_of

            self._digest = rank_digest(digest, shard_of(feed.source, self._delivery.ranks))
        self._restart(feed, next_index)

    def refresh(self) -> None:
        """Take a new snapshot of the store; a new epoch over it starts at the next batch.

        Raises:
            ConfigError: The loader was made from a snapshot, not from a store. Of several ranks that were found
                (``shard="auto"``), one has other rows, or goes on without; nothing has changed then.
            ClosedError, ForkError: As ``next_batch``.
        """
        self._check_usable()
        feed = self._feed.refreshed(self._next_index)
        if self._agreement is not None:
            self._agreement.hold("refresh()", feed, self._next_index, self._next_index)
        self._restart(feed, self._next_index)

    def _restart(self, feed: Any, next_index: int) -> None:
        interval = self._next_index - self._began
        # Whoever takes over new rows after as many batches each time gets none computed that are not delivered.
        self._expected = next_index + interval if interval == self._interval > 0 else None
        self._began, self._interval = next_index, interval
        self._feed, self._next_index = feed, next_index
        self._failure = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Drop the results and failures of threads; the next batch restarts them."""
        if self._ahead is not None and not self._ahead.pause():
            self._ahead = None
        self._make = None

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Stop the threads and drop prefetched batches; ``next_batch`` raises from now on. May be called twice."""
        self._closed = True
        if self._ahead is not None and self._process == os.getpid():
            self._ahead.close()
        self._ahead = None
        if self._decoders is not None:
            self._decoders.close()

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
