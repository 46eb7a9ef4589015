"""Tools for threads: calls in several threads whose results are returned in order, and calls at a set time."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = min(16, max(2, os.cpu_count() or 1))
"""Number of threads, one for each core. More threads would spend more time waiting for each other than for files."""


def in_order(pool: ThreadPoolExecutor, call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield a function's result for every item, in order; the first error ends the iteration.

    Only a few items are processed before their results are requested, so neither items nor results accumulate.

    Args:
        pool: The thread pool. After an error, some of its threads can still be working.
        call: The function.
        items: The arguments. The thread that requests results takes the arguments from the iterable one after the
            other.
    """
    coming: deque[Future[R]] = deque()
    try:
        for item in items:
            coming.append(pool.submit(call, item))
            if len(coming) > 3 * THREADS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        for future in coming:
            future.cancel()


class Alarm:
    """Calls a function with an object at a set time, unless the object was garbage-collected before.

    The alarm has a thread only while a time is set. The thread refers to the object weakly, and ends when the object is
    garbage-collected.

    Args:
        target: The object.
        ring: The function to call with the object.
        name: The name of the thread.
    """

    def __init__(self, target: Any, ring: Callable[[Any], None], name: str) -> None:
        self._name = name
        self._target = weakref.ref(target)
        self._ring = ring
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._due = math.inf
        self._closed = False
        weakref.finalize(target, self.close).atexit = False

    def set(self, due: float) -> None:
        """Set the time of the call (in seconds since 1970), unless an earlier time is set already."""
        with self._lock:
            if self._closed or due >= self._due:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            wait = min(max(0.0, due - time.time()), threading.TIMEOUT_MAX)
            self._timer = threading.Timer(wait, _ring, (weakref.ref(self),))
            self._timer.daemon = True
            self._timer.name = self._name
            self._timer.start()

    def ring(self) -> None:
        """Call the function and unset the time."""
        with self._lock:
            self._due, self._timer = math.inf, None
        target = self._target()
        if target is not None:
            self._ring(target)

    def close(self) -> None:
        """Unset the time, without waiting for a call that has begun."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


def _ring(alarm: weakref.ref[Alarm]) -> None:
    strong = alarm()
    if strong is not None:
        strong.ring()
