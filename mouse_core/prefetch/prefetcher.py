"""The prefetcher, which computes items ahead and returns them in order, and the options of a delivery."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ClosedError

if TYPE_CHECKING:
    from mouse_core.ranks import Ranks

T = TypeVar("T")

# Seconds that ``close()`` and the exit of the interpreter wait for items that are being computed.
_CLOSE_SECONDS, _EXIT_SECONDS = 0.25, 2.0


def _as_it_is(gathered: Any) -> Any:
    return gathered


@dataclass(frozen=True)
class Staged:
    """A function that takes an index and returns a batch, in two stages: it gathers the batch on the host, and then
    transfers the batch to the device.

    If batches are transferred to a device, the maker of a ``Delivery`` should return a ``Staged``. The digest is then
    computed from the result of the first stage, and no data are copied back from a device.

    Args:
        gather: The first stage, from an index to a gathered batch.
        transfer: The second stage, from a gathered batch to a delivered batch.
        arrays: Function that converts the result of ``gather`` to the delivered batch as host arrays.
        rows: The position of the gathered rows in the batch over all shards: a range, or the first row. None: the rows
            of the source.
    """

    gather: Callable[[int], Any]
    transfer: Callable[[Any], Any]
    arrays: Callable[[Any], Any] = _as_it_is
    rows: Callable[[int], int | Sequence[int] | npt.NDArray[np.int64]] | None = None

    def __call__(self, index: int) -> Any:
        """Compute batch ``index``."""
        return self.transfer(self.gather(index))


class OrderedPrefetcher(Generic[T]):
    """Computes ``make(i)`` for ``i = first, first + 1, ...`` in its own threads, and returns the items in this order.

    Threads hold no reference to this object. So if the caller drops the object without ``close()``, the object is
    closed by the garbage collector or at the exit of the interpreter.

    Args:
        make: Function that computes an item; it must be thread-safe and must not refer to this object.
        first: The first index.
        workers: Number of threads, at least 1.
        ahead: Largest number of items that are being computed, or are finished and not yet returned; at least 1.
    """

    def __init__(self, make: Callable[[int], T], first: int, *, workers: int, ahead: int) -> None:
        self._queue: _Queue[T] = _Queue(ahead)
        self.next_index = first
        self._error: BaseException | None = None
        self._queue.begin(make, first)
        self._queue.start(min(workers, ahead))
        weakref.finalize(self, self._queue.close).atexit = False

    def get(self) -> T:
        """Wait for the next item and return it.

        Raises:
            ClosedError: ``close()`` was called.
            BaseException: The error that was raised for this item; every later call raises it again.
        """
        if self._error is not None:
            raise self._error
        # Count before waiting, so that after an interrupt the index shows a lost item.
        self.next_index += 1
        outcome = self._queue.take()
        if isinstance(outcome, _Failed):
            self._error = outcome.error
            raise self._error
        return outcome

    def close(self) -> None:
        """Stop the threads and drop finished items; wait at most 0.25 s for items that are being computed."""
        self._queue.close()

    def pause(self) -> None:
        """Drop finished items; the threads then wait for ``begin``. Items in progress are discarded."""
        self._queue.pause()

    def begin(self, make: Callable[[int], T], first: int) -> None:
        """Continue with the items ``make(first)``, ``make(first + 1)``, ..."""
        self.next_index, self._error = first, None
        self._queue.begin(make, first)


@dataclass(eq=False, slots=True)
class _Failed:
    """An exception of any type that was raised while an item was computed."""

    error: BaseException


class _Queue(Generic[T]):
    """The state that the threads share: the next index, and the finished items."""

    def __init__(self, ahead: int) -> None:
        # Two conditions share one lock, so that returning an item wakes exactly one worker. The lock is reentrant,
        # because the garbage collector may close this object at any line of any thread.
        lock = threading.RLock()
        self.room = threading.Condition(lock)
        self.arrived = threading.Condition(lock)
        self.ahead = ahead
        self.process = os.getpid()
        self.threads: list[threading.Thread] = []
        self.make: Callable[[int], T] | None = None
        # The index of the current ``make``; items computed by an earlier ``make`` are discarded.
        self.turn = 0
        self.next_claimed = self.next_wanted = 0
        self.ready: dict[int, T | _Failed] = {}
        self.failed = False
        self.closed = False

    def start(self, workers: int) -> None:
        self.threads = [
            threading.Thread(target=self.work, name=f"mouse-prefetch-{number}", daemon=True)
            for number in range(workers)
        ]
        # Functions at exit run in reverse order. Registered here, this one runs before a framework that was imported
        # earlier ends: a thread that returns from compiled code after that would abort the process.
        atexit.register(self.exit)
        for thread in self.threads:
            thread.start()

    def work(self) -> None:
        """Compute items until the queue is closed."""
        while (claimed := self.claim()) is not None:
            turn, index, make = claimed
            try:
                outcome: T | _Failed = make(index)
            except BaseException as error:
                outcome = _Failed(error)
            self.put(turn, index, outcome)
            del claimed, make, outcome  # drop references, because an older ``make`` keeps rows in memory
        with self.room:
            self.threads.remove(threading.current_thread())
            if not self.threads:
                atexit.unregister(self.exit)

    def begin(self, make: Callable[[int], T], first: int) -> None:
        with self.room:
            self.next_claimed = self.next_wanted = first
            self.make, self.failed = make, False
            self.turn += 1
            self.room.notify_all()

    def pause(self) -> None:
        with self.room:
            self.make = None
            self.ready.clear()

    def claim(self) -> tuple[int, int, Callable[[int], T]] | None:
        """Wait until the queue has room for another item. Return the index of the current ``make``, the index of the
        next item, and ``make``; or return None if the queue is closed.
        """
        with self.room:
            while not self.closed:
                index = self.next_claimed
                has_room = index < self.next_wanted + self.ahead
                # After an error the caller requests no further items.
                if self.make is not None and not self.failed and has_room:
                    self.next_claimed += 1
                    return self.turn, index, self.make
                self.room.wait()
        return None

    def put(self, turn: int, index: int, outcome: T | _Failed) -> None:
        with self.arrived:
            if self.closed or self.make is None or turn != self.turn:
                return
            self.ready[index] = outcome
            self.arrived.notify_all()
            if isinstance(outcome, _Failed):
                self.failed = True

    def take(self) -> T | _Failed:
        with self.arrived:
            while not self.closed:
                if self.next_wanted in self.ready:
                    self.next_wanted += 1
                    self.room.notify()
                    return self.ready.pop(self.next_wanted - 1)
                self.arrived.wait()
        raise ClosedError("loader: expected an open loader, found a closed loader")

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Stop the threads; wait at most ``seconds`` for items that are being computed."""
        if os.getpid() != self.process:
            return  # a forked child has no threads, and their locks may never be released
        with self.room:
            self.closed = True
            self.make = None
            self.ready.clear()
            self.room.notify_all()
            self.arrived.notify_all()
            threads = [*self.threads]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(seconds / len(threads))

    def exit(self) -> None:
        self.close(_EXIT_SECONDS)


@dataclass(frozen=True)
class Delivery(Generic[T]):
    """The functions and options that determine how batches are computed and delivered to a framework.

    Args:
        maker: Function that takes a source and returns a second function; the second function takes an index and
            returns the batch, or the input of ``hand_over``. The second function runs in the worker threads, and must
            not refer to the loader; otherwise a dropped loader is never closed. ``maker`` is called again after
            ``refresh()`` and ``load_state_dict()``.
        hand_over: Function that is called in the caller's thread for every delivered batch.
        in_caller: Whether the calling thread computes batches, even if there are workers.
        ranks: The processes that deliver parts of the same batches and check their agreement; None: the ranks of the
            source's shard, if known.
    """

    maker: Callable[[Any], Callable[[int], Any]]
    hand_over: Callable[[Any], T] | None = None
    in_caller: bool = False
    ranks: Ranks | None = None
