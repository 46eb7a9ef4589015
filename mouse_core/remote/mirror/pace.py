"""When a batch that was asked for will be read, in the time that all who share a mirror have in common."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from mouse_core.remote.mirror.pages import Int64s

# Asked for and not read; of a loader that was given up they are never read.
_MOST = 512
_FAR = 4096
# How much the last wait counts.
_WEIGHT = 0.1


class Pace:
    """Tells by what is read which batch a process is at, and so how far ahead others are.

    Time is what ``Table.tick`` counts: the batches of all processes. Where four read equally fast, a batch that is 10
    ahead of the one that is read will be read in 40.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[tuple[int, int]] = deque(maxlen=_MOST)
        self._at: int | None = None
        self._ticks = 1.0
        self._last = 0

    def ahead(self, batch: int, block: int) -> int:
        """In how much time a batch will be read, at least 1.

        Args:
            batch: Its number.
            block: One of the blocks that it reads, by which it is known when it is read.
        """
        with self._lock:
            if self._at is None:
                self._at = batch - 1
            self._asked.append((batch, block))
            return max(1, round(min(max(batch - self._at, 1), _FAR) * self._ticks))

    def read(self, blocks: Int64s, now: int) -> int:
        """Note that some blocks (ascending, int64 ``[n]``) are read, at a time.

        Returns:
            Of how many batches they are, as far as that is known, at least 1.
        """
        with self._lock:
            asked = [block for _, block in self._asked]
            found = np.searchsorted(blocks, asked)
            there = blocks[np.minimum(found, len(blocks) - 1)] == asked
            first = int(np.argmax(there)) if len(asked) else 0
            if not len(asked) or not there[first]:
                return 1
            # Several batches may be read at once: 5, 6 and 7, if all three were asked for one after the other.
            count = 1
            while first + count < len(asked) and there[first + count]:
                count += 1
            self._at = self._asked[first + count - 1][0]
            for _ in range(first + count):
                self._asked.popleft()
            if self._last:
                self._ticks += _WEIGHT * (max(1.0, (now - self._last) / count) - self._ticks)
            self._last = now
            return count
