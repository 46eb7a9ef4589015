"""Locks that a forked child can take."""

from __future__ import annotations

import os
import threading


class ProcessLock:
    """A lock that is new in a forked child, where the thread that held the parent's does not exist."""

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            self._renew()
        self._lock.acquire()

    def __exit__(self, *details: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()
