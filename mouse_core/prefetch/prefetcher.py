"""Computing items ahead and handing them out in order."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ClosedError

if TYPE_CHECKING:
    from mouse_core.ranks import Ranks

T = TypeVar("T")

# Seconds that closing waits for items that are being computed, and that the interpreter's exit does.
_CLOSE_SECONDS, _EXIT_SECONDS = 0.25, 2.0


def _as_it_is(gathered: Any) -> Any:
    return gathered


@dataclass(frozen=True)
class Staged:
    """A function from an index to a batch, in two stages: one on the host, one to where the batch belongs.

    A maker that a ``Delivery`` gives may be one, and should be where batches leave the host: a digest that runs along
    is of what the first stage made, and nothing comes back from a device for it.

    Args:
        gather: The first stage.
        transfer: The second one.
        arrays: Of what was gathered, the batch as it will be delivered, in arrays on the host.
        rows: Which rows of the whole batch those gathered are, or the first of them; None: those of the source.
    """

    gather: Callable[[int], Any]
    transfer: Callable[[Any], Any]
    arrays: Callable[[Any], Any] = _as_it_is
    rows: Callable[[int], int | Sequence[int] | npt.NDArray[np.int64]] | None = None

    def __call__(self, index: int) -> Any:
        """Make batch ``index``."""
        return self.transfer(self.gather(index))


class Prefetcher(Generic[T]):
    """Computes ``make(i)`` for ``i = first, first + 1, ...`` in threads, and returns the results in that order.

    Threads only decide who computes an item. They refer to the queue and never to this object, so that the garbage
    collector closes a prefetcher that was dropped without ``close()``.

    Args:
        make: Computes an item; must be thread-safe, and must not refer to this object.
        first: The first index.
        workers: Number of threads, at least 1.
        ahead: Largest number of items that are computed or wait, besides those that ``get`` returned; at least 1.
    """

    def __init__(self, make: Callable[[int], T], first: int, *, workers: int, ahead: int) -> None:
        self._next_index = first
        self._error: BaseException | None = None
        self._queue: _Queue[T] = _Queue(ahead)
        self._queue.begin(make, first, None)
        self._close = weakref.finalize(self, self._queue.close)
        self._close.atexit = False  # the queue waits longer at the interpreter's exit
        self._queue.start(min(workers, ahead))

    @property
    def next_index(self) -> int:
        """The index of the item that ``get`` returns next."""
        return self._next_index

    @property
    def ready(self) -> int:
        """Number of finished items that wait for the caller."""
        return len(self._queue.ready)

    def get(self) -> T:
        """Return the next item, and wait for it where it is not finished.

        Raises:
            ClosedError: ``close()`` was called, now or before.
            BaseException: ``make`` raised it for this item; every later call raises it again.
        """
        if self._error is not None:
            raise self._error
        # Counted first: a caller who is interrupted while waiting is then known to have lost an item.
        self._next_index += 1
        outcome = self._queue.take()
        if outcome is None:
            raise ClosedError("loader: expected an open loader, found it closed")
        made, self._error = outcome
        if self._error is not None:
            raise self._error
        return cast(T, made)

    def close(self) -> None:
        """Stop the threads and drop what is waiting; waits for items being computed, a quarter of a second at most."""
        self._close()

    def pause(self) -> None:
        """Drop what is waiting; the threads wait for ``begin``, and what they compute meanwhile is dropped."""
        self._queue.pause()

    def begin(self, make: Callable[[int], T], first: int, *, until: int | None = None) -> None:
        """Go on, after ``pause``, with ``make(first)``, ``make(first + 1)``, ...

        Args:
            make: Computes an item.
            first: The first index.
            until: The first index that is not computed before the caller asks for it; None: there is none.
        """
        self._next_index, self._error = first, None
        self._queue.begin(make, first, until)


class _Queue(Generic[T]):
    """The state that threads share: the next index, and the finished items with their errors."""

    def __init__(self, ahead: int) -> None:
        # One lock, two reasons to wait for it, so that an item handed out wakes one worker and no more.
        # It may be taken again by the garbage collector, which may close this from any line of any thread.
        lock = threading.RLock()
        self.room = threading.Condition(lock)
        self.arrived = threading.Condition(lock)
        self.ahead = ahead
        self.process = os.getpid()
        self.threads: list[threading.Thread] = []
        self.make: Callable[[int], T] | None = None
        # The number of ``begin`` calls: what is computed for an earlier ``make`` is dropped.
        self.turn = 0
        self.next_claimed = self.next_wanted = 0
        self.until: int | None = None
        self.ready: dict[int, tuple[T | None, BaseException | None]] = {}
        self.failed = False
        self.closed = False

    def start(self, count: int) -> None:
        self.threads = [
            threading.Thread(target=_work, args=(self,), name=f"mouse-prefetch-{number}", daemon=True)
            for number in range(count)
        ]
        # Before frameworks end their devices: a thread that returns from compiled code after that aborts the process.
        atexit.register(self.end)
        for thread in self.threads:
            thread.start()

    def begin(self, make: Callable[[int], T], first: int, until: int | None) -> None:
        with self.room:
            self.next_claimed = self.next_wanted = first
            self.make, self.until, self.failed = make, until, False
            self.turn += 1
            self.room.notify_all()

    def pause(self) -> None:
        with self.room:
            self.make = None
            self.ready.clear()

    def claim(self) -> tuple[int, int, Callable[[int], T]] | None:
        """Return the turn, index and function of the next item, and wait for room; None when closed."""
        with self.room:
            while not self.closed:
                index = self.next_claimed
                has_room = index < self.next_wanted + self.ahead and index != self.until
                # After an error the caller asks for no more.
                if self.make is not None and not self.failed and has_room:
                    self.next_claimed += 1
                    return self.turn, index, self.make
                self.room.wait()
        return None

    def put(self, turn: int, index: int, made: T | None, error: BaseException | None) -> None:
        with self.arrived:
            if self.closed or self.make is None or turn != self.turn:
                return
            self.ready[index] = made, error
            self.failed = self.failed or error is not None
            self.arrived.notify_all()

    def take(self) -> tuple[T | None, BaseException | None] | None:
        with self.arrived:
            if self.next_wanted == self.until:
                self.until = None
                self.room.notify_all()
            while not self.closed:
                if self.next_wanted in self.ready:
                    self.next_wanted += 1
                    self.room.notify()
                    return self.ready.pop(self.next_wanted - 1)
                self.arrived.wait()
        return None

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """End the threads, and wait for them ``seconds`` at most."""
        if os.getpid() != self.process:
            return  # a forked child has neither the threads nor a use for their locks
        with self.room:
            self.closed = True
            self.make = None
            self.ready.clear()
            self.room.notify_all()
            self.arrived.notify_all()
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self.threads):
            atexit.unregister(self.end)

    def end(self) -> None:
        """End the threads at the interpreter's exit, also those of a dropped prefetcher that still compute."""
        self.close(_EXIT_SECONDS)


def _work(queue: _Queue[Any]) -> None:
    while (claimed := queue.claim()) is not None:
        turn, index, make = claimed
        try:
            queue.put(turn, index, make(index), None)
        except BaseException as error:
            queue.put(turn, index, None, error)
        del claimed, make  # which may be an older one, of other rows


@dataclass(frozen=True)
class Delivery(Generic[T]):
    """The delivery of batches to a framework.

    Args:
        maker: Gives, for a source, the function from an index to a batch, or to what ``hand_over`` makes one of. That
            runs in the worker threads. It must not hold on to the loader, or one that is dropped never ends. It is
            asked for again after ``refresh()`` and ``load_state_dict()``.
        hand_over: Runs in the caller's thread for every delivered batch.
        in_caller: Whether the calling thread makes batches, however many workers there are.
        ranks: The processes that deliver parts of the same batches, and see that they agree; None: those that the
            source was cut for, where they were found.
    """

    maker: Callable[[Any], Callable[[int], Any]]
    hand_over: Callable[[Any], T] | None = None
    in_caller: bool = False
    ranks: Ranks | None = None
