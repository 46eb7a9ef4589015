"""A call at a time, from a thread that keeps nothing alive."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any


class Alarm:
    """Calls a method of an object when its time has come, unless the object is gone.

    There is a thread only while a time is set, and it holds the object by a weak reference. It is stopped when the
    object is collected.

    Args:
        target: The object.
        ring: What is called with it.
    """

    def __init__(self, target: Any, ring: Callable[[Any], None]) -> None:
        self._target = weakref.ref(target)
        self._ring = ring
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._due = math.inf
        self._closed = False
        weakref.finalize(target, self.close).atexit = False

    def set(self, due: float) -> None:
        """Ring at this time (in seconds since 1970), or earlier if an earlier one is set already."""
        with self._lock:
            if self._closed or due >= self._due:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._due = due
            wait = min(max(0.0, due - time.time()), threading.TIMEOUT_MAX)
            self._timer = threading.Timer(wait, _ring, (weakref.ref(self),))
            self._timer.daemon = True
            self._timer.name = "rollout-buffer-timeout"
            self._timer.start()

    def ring(self) -> None:
        """Call the object; the time is no longer set."""
        with self._lock:
            self._due, self._timer = math.inf, None
        target = self._target()
        if target is not None:
            self._ring(target)

    def close(self) -> None:
        """Do not ring any more; a call that has begun is not waited for."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


def _ring(alarm: weakref.ref[Alarm]) -> None:
    strong = alarm()
    if strong is not None:
        strong.ring()
