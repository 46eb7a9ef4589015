"""When what a process asked for will be read, in the time that all who share a mirror have in common."""

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
        # Of each batch its number and its blocks, by which it is known when it is read.
        self._asked: deque[tuple[int, Int64s]] = deque(maxlen=_MOST)
        self._uses: dict[int, list[int]] = {}
        self._at: int | None = None
        self._ticks = 1.0
        self._last = 0
        self.blocks_ahead = 0
        """How many blocks are asked for and not read yet, those that several batches read as often."""

    def ahead(self, batch: int, blocks: Int64s, now: int) -> int:
        """When a batch will be read that is asked for at a time.

        Args:
            batch: Its number.
            blocks: What it reads, ascending, int64 ``[n]``.
            now: The time.
        """
        with self._lock:
            if self._at is None:
                self._at = batch - 1
            if len(self._asked) == _MOST:
                self.blocks_ahead -= len(self._asked[0][1])
            self._asked.append((batch, blocks))
            self.blocks_ahead += len(blocks)
            when = now + max(1, round(min(max(batch - self._at, 1), _FAR) * self._ticks))
            for block in blocks.tolist():
                uses = self._uses.setdefault(block, [])
                while uses and uses[0] <= now:
                    uses.pop(0)
                uses.append(when)
            return when

    def awaits(self, blocks: Int64s) -> bool:
        """Whether a batch is still to be read that was asked for with this very array of blocks."""
        with self._lock:
            return any(asked is blocks for _, asked in self._asked)

    def read(self, blocks: Int64s, now: int) -> tuple[int, Int64s]:
        """Note that some blocks (ascending, int64 ``[n]``) are read, at a time.

        Returns:
            Of how many batches they are, as far as that is known, at least 1; and when each block will be read again,
            int64 ``[n]``: ``now`` where nobody asked for it.
        """
        with self._lock:
            count = self._arrive(blocks, now)
            again = np.full(len(blocks), now)
            for number, block in enumerate(blocks.tolist()):
                uses = self._uses.get(block)
                if uses is None:
                    continue
                uses.pop(0)
                while uses and uses[0] < now + count:
                    uses.pop(0)
                if uses:
                    again[number] = uses[0]
                else:
                    del self._uses[block]
            return count, again

    def _arrive(self, blocks: Int64s, now: int) -> int:
        """Find the batches that are read, and forget them, and those that were asked for before."""
        # What was asked for before the first of them is not read any more.
        skipped = next((number for number, (_, asked) in enumerate(self._asked) if _has(blocks, asked)), None)
        if skipped is None:
            return 1
        count = 0
        # Several batches may be read at once: 5, 6 and 7, if all three were asked for one after the other.
        while skipped or (self._asked and _has(blocks, self._asked[0][1])):
            self._at, asked = self._asked.popleft()
            self.blocks_ahead -= len(asked)
            skipped, count = max(0, skipped - 1), count + (not skipped)
        if self._last:
            self._ticks += _WEIGHT * (max(1.0, (now - self._last) / count) - self._ticks)
        self._last = now
        return count


def _has(blocks: Int64s, some: Int64s) -> bool:
    """Whether some blocks are all among others; both ascend, int64 ``[n]``."""
    if len(some) > len(blocks):
        return False
    found = blocks[np.minimum(np.searchsorted(blocks, some[:1]), len(blocks) - 1)] == some[:1]
    return bool(found.all()) and bool(np.isin(some, blocks, assume_unique=True).all())
