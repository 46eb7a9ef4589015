"""Locks that a forked child can take."""

from __future__ import annotations

import os
import threading


class ProcessLock:
    """A lock that is new in a forked child, where the thread that held the parent's does not exist."""

    def __init__(self) -> None:
        self._locks = {os.getpid(): threading.RLock()}

    def _lock(self) -> threading.RLock:
        process = os.getpid()
        # setdefault is one step, also when two threads of a child come here first.
        return self._locks.get(process) or self._locks.setdefault(process, threading.RLock())

    def __enter__(self) -> None:
        self._lock().acquire()

    def __exit__(self, *details: object) -> None:
        self._lock().release()

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()
