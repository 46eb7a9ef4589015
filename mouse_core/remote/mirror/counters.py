"""What a process was given by a mirror, and what it waited for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Sums since the mirror was opened here; bytes are those of whole pages.

    Args:
        read: Bytes that were waited for, there or not.
        fetched: Bytes that came over the network.
        wanted: Those of them that somebody here had asked for.
        evicted: Bytes let go of for others.
        requests: Ranges asked for.
        retries: Requests that failed, and were made again.
        damaged: How often bytes were not what had been written: of a block in the cache, or of a request.
        waits: How often something was not there when it was to be read.
        seconds: Seconds that were waited for it.
    """

    read: int = 0
    fetched: int = 0
    wanted: int = 0
    evicted: int = 0
    requests: int = 0
    retries: int = 0
    damaged: int = 0
    waits: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **more: float) -> None:
        """Add to some of them."""
        with self._lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def said(self) -> dict[str, float]:
        """All of them by name."""
        with self._lock:
            return {name: value for name, value in vars(self).items() if name[0] != "_"}
