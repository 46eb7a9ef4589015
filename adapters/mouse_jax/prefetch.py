"""PrefetchBatchifier for JAX."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from grain.experimental import ThreadPrefetchDatasetIterator
from jax.sharding import Sharding

from mouse_core import BatchSource, ConfigError, Spec
from mouse_core.prefetch import Batchifier, Delivery, Staged
from mouse_core.prefetch.prefetcher import Failed, Made, Outcome, Prefetcher, outcome_of
from mouse_core.ranks import find_ranks
from mouse_core.replay.source import BufferSource
from mouse_jax.dtypes import replaced_dtypes, x64_enabled
from mouse_jax.placement import Placement, find_placement, find_target
from mouse_jax.trees import as_jax, narrowed

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ArrayMaker:
    """Creates a batch from its index, in two stages.

    All threads use the thread-local settings of JAX from the thread that created this object.

    Args:
        sources: The sources of the shards that this process needs.
        placement: The placement of batches.
        spec: The spec of delivered batches.
        x64: Whether JAX has 64-bit numbers.
        default_device: JAX's default device, if it is set.
        rows: Number of this process's rows in a complete batch.
    """

    sources: tuple[BatchSource, ...]
    placement: Placement
    spec: Spec
    x64: bool
    default_device: Any
    rows: int

    def gather(self, index: int) -> Any:
        """Return this process's rows of batch ``index``, in new memory that is never modified later.

        On a host, rows have the delivered dtypes. For other devices they have the stored dtypes, so that fewer bytes
        are transferred.
        """
        if self.placement.on_host:
            parts = [source[index] for source in self.sources]
        else:
            parts = [source.gather(source.plan(index), stored=True) for source in self.sources]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def transfer(self, gathered: Any) -> Any:
        """Convert a gathered batch to JAX arrays with the requested placement and the delivered dtypes."""
        views: tuple[Arrays, ...] = gathered if isinstance(gathered, tuple) else (gathered,)
        rows = [values for view in views for values in view.values()]
        with settings(self.x64, self.default_device):
            placed = iter(self.placement.put(rows, recurring=len(rows[0]) == self.rows))
            made = tuple(self._delivered({name: next(placed) for name in view}) for view in views)
        return made if isinstance(gathered, tuple) else made[0]

    def delivered(self, gathered: Any) -> Any:
        """Convert a gathered batch to the delivered dtypes, on the host."""
        if isinstance(gathered, tuple):
            return tuple(map(self.delivered, gathered))
        kinds = {name: np.dtype(self.spec[name].dtype) for name in gathered}
        return {k: v if v.dtype.kind == kinds[k].kind else v.astype(kinds[k]) for k, v in gathered.items()}

    def rows_of(self, index: int) -> npt.NDArray[np.int64]:
        """Return the index of each gathered row in the complete batch; -1 for a padded row, which is a copy of another
        shard's row."""
        rows = []
        for source in self.sources:
            plan, (rank, count) = source.plan(index), source.shard
            own = np.arange(plan.first, plan.first + len(plan.starts))
            rows.append(np.where(own < plan.global_size * (rank + 1) // count, own, -1))
        return np.concatenate(rows)

    def _delivered(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            name: values if values.dtype == self.spec[name].dtype else values.astype(self.spec[name].dtype)
            for name, values in batch.items()
        }


def array_maker(source: BatchSource, *, placement: Placement, x64: bool, default_device: Any) -> Staged:
    """Return the function from an index to a batch of a source, in two stages.

    Raises:
        ConfigError: The placement's sharding does not divide a batch.
    """
    sources = placement.sources(source)
    rows = sum(-(-own.batch_size // own.shard[1]) for own in sources)
    if source.spec.is_packed:  # batches are padded to one size, or have varying sizes that rarely recur
        rows = 0 if isinstance(source.packed, bool) else source.packed
    make = ArrayMaker(sources, placement, source.spec, x64, default_device, rows)
    return Staged(make.gather, make.transfer, make.delivered, None if placement.parts is None else make.rows_of)


def whole_maker(source: Any, *, target: jax.Device | Sharding | None, x64: bool, default_device: Any) -> Staged:
    """Return the function from an index to a complete batch of a replay buffer or a custom source.

    Args:
        source: A ``BufferSource``, or a custom source.
        target: The device or sharding of batches; None: JAX's default device.
        x64, default_device: See ``thread_settings``.
    """

    def gather(index: int) -> Any:
        drawn = isinstance(source, BufferSource)
        return source.buffer.batch_of(source.drawn(index)) if drawn else source[index]

    def transfer(batch: Any) -> Any:
        with settings(x64, default_device):
            return as_jax(batch, target)

    def delivered(batch: Any) -> Any:
        with settings(x64, default_device):
            return narrowed(batch)

    return Staged(gather, transfer, delivered)


def thread_settings() -> dict[str, Any]:
    """Return the thread-local settings of JAX in this thread, which other threads do not inherit."""
    config: Any = jax.config
    return {"x64": x64_enabled(), "default_device": config.jax_default_device}


@contextmanager
def _changed(x64: bool, default_device: Any) -> Iterator[None]:
    with jax.enable_x64(x64), jax.default_device(default_device):
        yield


def settings(x64: bool, default_device: Any) -> AbstractContextManager[None]:
    """Return a context with the settings of ``thread_settings``; changing a setting costs 10 us."""
    if thread_settings() == {"x64": x64, "default_device": default_device}:
        return nullcontext()
    return _changed(x64, default_device)


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(views)) for views in zip(*parts, strict=True))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


_CLOSE_SECONDS = 0.25
# Seconds that the interpreter's exit waits for unfinished batches.
_EXIT_SECONDS = 2.0


class GrainPrefetcher(Prefetcher[Any]):
    """Computes ``make(i)`` for ``i = first, first + 1, ...`` in threads of grain.

    Besides returned items, at most ``ahead`` items (but at least two) exist at a time, including items in progress.

    Args:
        make: Computes an item; must be thread-safe, and must not refer to this object.
        first: The first index.
        workers: Number of threads, at least 1. At most ``ahead / 2`` threads are used, because each thread has one item
            in progress and one item that waits.
        ahead: Largest number of items in progress or waiting behind the requested item, at least 1.
    """

    def __init__(self, make: Callable[[int], Any], first: int, *, workers: int, ahead: int) -> None:
        self._work = _Work(make, first, workers, ahead)
        super().__init__(first, self._work.next)
        weakref.finalize(self, self._work.abandon).atexit = False
        # Runs before JAX ends its backends, and before modules are removed, after which grain cannot be closed.
        atexit.register(self._work.exit)

    @property
    def ready(self) -> int:
        """See ``Prefetcher``."""
        return self._work.ready

    def close(self) -> None:
        """Stop the threads and drop waiting items; see ``Prefetcher``."""
        self._work.stop()


# grain leaves out elements that are None.
_STOPPED: Outcome[Any] = Made(None)


class _Work:
    """The common state of the threads. Threads refer only to this object, never to the prefetcher."""

    def __init__(self, make: Callable[[int], Any], first: int, workers: int, ahead: int) -> None:
        self._make = make
        self._first = first
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._busy = 0
        self._stopped = False
        self._closer: threading.Thread | None = None
        self._failed_at = sys.maxsize
        self._taken = 0
        # Each thread holds the items in its queue, and one in progress or waiting for the queue: ``ahead`` in total.
        count = max(1, min(workers, ahead // 2))
        self._makings = [_Making(self, worker, count) for worker in range(count)]
        self._iterators = [
            ThreadPrefetchDatasetIterator(making, max(1, (ahead - 1 - worker) // count))
            for worker, making in enumerate(self._makings)
        ]
        for iterator in self._iterators:
            iterator.start_prefetch()

    def next(self) -> Outcome[Any] | None:
        """Return the next outcome in order; None after a stop."""
        if not self._enter():
            return None
        try:
            # Separate references, because stop() deletes the attributes of the object.
            iterators = self._iterators
            self._taken += 1
            outcome: Outcome[Any] = next(iterators[(self._taken - 1) % len(iterators)])
            return None if outcome is _STOPPED else outcome
        finally:
            self._leave()

    def outcome(self, position: int) -> Outcome[Any]:
        """Compute item ``first + position``; grain's threads call it."""
        if not self._enter():
            return _STOPPED
        try:
            if position > self._failed_at:  # no caller reads outcomes after an error
                return _STOPPED
            made = outcome_of(self._make, self._first + position)
            if isinstance(made, Failed):
                with self._changed:
                    self._failed_at = min(self._failed_at, position)
            return made
        finally:
            self._leave()

    @property
    def ready(self) -> int:
        """Number of computed outcomes that were not taken yet."""
        return max(0, sum(making.made for making in self._makings) - self._taken)

    def _enter(self) -> bool:
        """Return whether the object is still open; if so, add the caller to the number of callers inside."""
        with self._changed:
            if self._stopped:
                return False
            self._busy += 1
            return True

    def _leave(self) -> None:
        with self._changed:
            self._busy -= 1
            if self._stopped:
                self._changed.notify_all()

    def stop(self) -> None:
        """End the threads and drop all items; the method may be called twice, and does nothing in a forked child.

        grain's own close waits without limit for the element in progress, and never wakes a caller that waits in
        another thread. After ``stop``, every element is immediately ``_STOPPED``, and grain is closed when no caller is
        inside.
        """
        if self._mark_stopped():
            if self._wait(_CLOSE_SECONDS):
                self._end()
            else:
                self._end_later()

    def abandon(self) -> None:
        """Close without waiting; called by the garbage collector, which may run at any line of any thread."""
        if self._mark_stopped():
            self._end_later()

    def exit(self) -> None:
        """Close at the interpreter's exit, even if another thread is closing the object.

        A thread that returns from compiled code after the end of the interpreter would abort the process.
        """
        if os.getpid() == self._process:
            with self._changed:
                self._stopped = True
            if self._closer is not None:
                self._closer.join(_EXIT_SECONDS)
            elif self._wait(_EXIT_SECONDS):
                self._end()

    def _mark_stopped(self) -> bool:
        """Mark the object as stopped; return whether the caller has to end the threads."""
        if os.getpid() != self._process:
            # The locks may have been held when the process was forked. The registration at exit keeps this object
            # alive, so that the garbage collector does not close grain's iterator either.
            return False
        with self._changed:
            if self._stopped:
                return False
            self._stopped = True
        return True

    def _wait(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)

    def _end_later(self) -> None:
        def wait_and_end() -> None:
            self._wait(None)
            self._end()

        closer = threading.Thread(target=wait_and_end, name="mouse-jax-close", daemon=True)
        try:
            closer.start()
            self._closer = closer
        except RuntimeError:
            pass  # at exit no thread can start, and existing threads end with the process

    def _end(self) -> None:
        for iterator in self._iterators:
            iterator.close()  # waits for its thread; may be called twice
        self._iterators = []
        atexit.unregister(self.exit)


class _Making:
    """An iterator over the outcomes at every ``step``-th position, with the state that grain requires."""

    def __init__(self, work: _Work, position: int, step: int) -> None:
        self._work = work
        self._position = position
        self._step = step

    def __iter__(self) -> _Making:
        return self

    def __next__(self) -> Outcome[Any]:
        outcome = self._work.outcome(self._position)
        self._position += self._step
        return outcome

    @property
    def made(self) -> int:
        """Number of items computed so far."""
        return self._position // self._step

    def get_state(self) -> int:
        return self._position

    def set_state(self, state: int) -> None:
        self._position = state


class PrefetchBatchifier(Batchifier[dict[str, jax.Array]]):
    """Delivers batches in order as dicts of ``jax.Array`` ``[B, S, ...]``; a grain pipeline prefetches them.

    Without x64 (``jax_enable_x64``), 64-bit fields are converted to the dtypes in ``REPLACED_DTYPES``, which ``spec``
    shows; a value that does not fit raises an error. The setting of x64 is read when the loader is created.

    At most ``prefetch + 1`` batches exist in the pipeline at a time, and delivered batches never change.

    For the arguments of all loaders, see ``mouse_core.prefetch.Batchifier``.

    Args:
        num_workers: Number of threads that create batches and transfer them to the device (at most half of
            ``prefetch``), and of processes that decode encoded images; with 0 the calling thread does both. The stream
            of batches does not depend on this number.
        pin_memory: Ignored.
        device: A ``jax.Device``, a platform ("cpu", "gpu"), or a platform with a number ("gpu:1"); None: JAX's default
            device, or the device of the replay buffer's batches.
        sharding: The sharding of a complete batch over the devices of one or several processes, in place of a device;
            for example ``NamedSharding(mesh, P("data"))``. Each process gathers only the rows of its devices, and
            ``source`` must deliver complete batches. The processes check that they agree, as with ``shard="auto"``;
            ``shard="auto"`` may be combined with a sharding.

    Raises:
        ConfigError: The device does not exist; the sharding does not divide a batch evenly (``uneven="pad"`` pads it),
            or is combined with a device or a shard; else see ``mouse_core.prefetch.Batchifier``.
        MissingFieldError: See ``mouse_core.prefetch.Batchifier``.
    """

    framework = "jax"

    @property
    def replaced_dtypes(self) -> Mapping[np.dtype[Any], np.dtype[Any]]:
        """Return the dtypes that JAX lacks in this thread, with the dtypes that are delivered in their place."""
        return replaced_dtypes()

    def delivery(
        self, source: Any, *, device: Any, pin_memory: bool | None, sharding: Any
    ) -> Delivery[dict[str, jax.Array]]:
        """Return the converter of batches to JAX arrays on one or several devices; see
        ``mouse_core.prefetch.Batchifier``.
        """
        if isinstance(source, BatchSource):
            placement = find_placement(device, sharding, source)
            maker = partial(array_maker, placement=placement, **thread_settings())
            ranks = None if sharding is None or sharding.is_fully_addressable else find_ranks(self.framework)
            return Delivery(maker, prefetcher=GrainPrefetcher, ranks=ranks)
        if isinstance(source, BufferSource) and device is None and sharding is None:
            of_buffer = getattr(source.buffer, "device", None)
            target = of_buffer if isinstance(of_buffer, jax.Device | Sharding) else None
        else:
            target = find_target(device, sharding)
        whole = partial(whole_maker, target=target, **thread_settings())
        if isinstance(source, BufferSource):
            # The caller's thread draws batch by batch, so no threads of grain are used, which would request batches too
            # early.
            return Delivery(whole)
        if isinstance(target, Sharding) and not target.is_fully_addressable:
            raise ConfigError(
                "sharding: expected only devices of this process for a source of whole batches, found devices "
                "of other processes"
            )
        return Delivery(whole, prefetcher=GrainPrefetcher)
