"""Computing items ahead in threads and handing them out in order."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from mouse_core.errors import ClosedError

T = TypeVar("T")

_JOIN_SECONDS = 0.25


class Prefetcher(Protocol):
    """What a loader asks of whatever computes ahead for it: ``OrderedPrefetcher``, or a framework's own pipeline."""

    @property
    def next_index(self) -> int:
        """The index of the item that ``get`` gives next."""
        ...

    def get(self) -> Any:
        """The next item in order; an error stays at the item where it happened."""
        ...

    def close(self) -> None:
        """Stop, and drop what is waiting."""
        ...


class OrderedPrefetcher(Generic[T]):
    """Computes ``make(i)`` for ``i = first, first + 1, ...`` ahead of the caller, who gets them in that order.

    Threads only decide who computes an item. They hold on to ``make``, not to this object, so one that is dropped
    without ``close()`` is closed by the garbage collector, and one that lives to the interpreter's exit there.

    Args:
        make: Computes an item; must be thread-safe, and must not refer to this object.
        first: The first index.
        workers: Number of threads, at least 1.
        ahead: How many items may be computed or waiting beyond those handed out, at least 1.
    """

    def __init__(self, make: Callable[[int], T], first: int, *, workers: int, ahead: int) -> None:
        self._queue: _Queue[T] = _Queue(first, ahead)
        self._threads = [
            threading.Thread(target=_work, args=(self._queue, make), name=f"mouse-prefetch-{number}", daemon=True)
            for number in range(min(workers, ahead))
        ]
        self._close = weakref.finalize(self, _close, self._queue, self._threads)
        for thread in self._threads:
            thread.start()

    @property
    def next_index(self) -> int:
        """The index of the item that ``get`` gives next."""
        return self._queue.next_wanted

    def get(self) -> T:
        """The next item, waiting for it if need be.

        Raises:
            ClosedError: ``close()`` was called.
            BaseException: What ``make`` raised for this item; raised again on every later call.
        """
        return self._queue.get()

    def close(self) -> None:
        """Stop the threads and drop what is waiting; waits for items being computed, a quarter of a second at most."""
        self._close()


class _Queue(Generic[T]):
    """What the threads share: which index comes next, and what is ready."""

    def __init__(self, first: int, ahead: int) -> None:
        # One lock, two reasons to wait for it, so that an item handed out wakes one worker and no more.
        # It may be taken again by the garbage collector, which may close this from any line of any thread.
        lock = threading.RLock()
        self.room = threading.Condition(lock)
        self.arrived = threading.Condition(lock)
        self.ahead = ahead
        self.process = os.getpid()
        self.next_claimed = first
        self.next_wanted = first
        self.ready: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}
        self.closed = False

    def claim(self) -> int | None:
        """The index to compute next, waiting for room; None when closed, or when one has failed."""
        with self.room:
            # After an error nobody asks for more.
            while not self.closed and not self.errors:
                if self.next_claimed < self.next_wanted + self.ahead:
                    self.next_claimed += 1
                    return self.next_claimed - 1
                self.room.wait()
        return None

    def put(self, index: int, item: T) -> None:
        with self.arrived:
            if not self.closed:
                self.ready[index] = item
                self.arrived.notify_all()

    def fail(self, index: int, error: BaseException) -> None:
        with self.arrived:
            self.errors[index] = error
            self.arrived.notify_all()
            self.room.notify_all()

    def get(self) -> T:
        with self.arrived:
            while True:
                if self.closed:
                    raise ClosedError("loader: expected an open loader, found it closed")
                if self.next_wanted in self.ready:
                    item = self.ready.pop(self.next_wanted)
                    self.next_wanted += 1
                    self.room.notify()
                    return item
                if self.next_wanted in self.errors:
                    raise self.errors[self.next_wanted]
                self.arrived.wait()


def _work(queue: _Queue[T], make: Callable[[int], T]) -> None:
    while (index := queue.claim()) is not None:
        try:
            queue.put(index, make(index))
        except BaseException as error:  # whatever it was, the caller must hear of it
            queue.fail(index, error)


def _close(queue: _Queue[T], threads: list[threading.Thread]) -> None:
    if os.getpid() != queue.process:
        return  # a forked child has neither the threads nor a use for their locks
    with queue.room:
        queue.closed = True
        queue.ready.clear()
        queue.room.notify_all()
        queue.arrived.notify_all()
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(_JOIN_SECONDS / len(threads))
