"""Estimates when the requested batches of a process will be read, in the common time of a mirror's processes."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import NamedTuple

import numpy as np

from mouse_core.remote.mirror.pages import Int64s

# Largest number of requested batches that are not read yet; those of an abandoned loader are never read.
_MOST, _MOST_PAGES = 4096, 1 << 18
_FAR = 4096
# The next batches count as read soon.
_SOON = 64
# Weight of the last measurement.
_WEIGHT = 0.1


class _Asked(NamedTuple):
    """A requested batch: its number, its blocks, the same as a list, its pages, and when it is read."""

    batch: int
    blocks: Int64s
    numbers: list[int]
    pages: Int64s
    when: int

    def among(self, blocks: set[int]) -> bool:
        """Whether all of its blocks are among ``blocks``."""
        return blocks.issuperset(self.numbers)


class Pace:
    """Finds by the blocks that are read which batch a process reads, and so when the next ones will be read.

    ``Table.tick`` counts the batches of all processes, which is the common time. If four processes read equally fast, a
    batch that is 10 ahead of the current one will be read in 40.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[_Asked] = deque()
        # By page: the times at which requested batches read it. None until the mirror is full, as it takes long.
        self._uses: dict[int, list[int]] | None = None
        self._at: int | None = None
        self._ticks = 1.0
        # When requested batches were last read, how many, and the number of unknown reads since then.
        self._last = self._count = self._unknown = 0
        self._read: Int64s | None = None
        self.pages_ahead = 0
        """Pages requested and not read yet, counted once for each batch that reads them."""

    def blocks_soon(self) -> int:
        """Return the blocks that the next batches read, counted once for each batch."""
        with self._lock:
            return sum(len(asked.blocks) for asked in islice(self._asked, _SOON))

    def knows(self, pages: int) -> bool:
        """Whether ``pages`` pages are requested and not read yet, or the largest number that is kept."""
        return self.pages_ahead >= min(pages, _MOST_PAGES) or len(self._asked) >= _MOST - _SOON

    def ahead(self, batch: int, blocks: Int64s, pages: Int64s, now: int) -> int:
        """Return the time at which a requested batch will be read.

        Args:
            batch: Number of the batch.
            blocks: Its blocks, ascending, int64 ``[n]``.
            pages: Its pages, int64 ``[m]``.
            now: The current time.
        """
        with self._lock:
            if self._at is None:
                self._at = batch - 1
            if len(self._asked) == _MOST:
                self._forget()
            when = now + max(1, round(min(max(batch - self._at, 1), _FAR) * self._ticks))
            self._asked.append(_Asked(batch, blocks, blocks.tolist(), pages, when))
            self.pages_ahead += len(pages)
            if self._uses is not None:
                for page in pages.tolist():
                    uses = self._uses.setdefault(page, [])
                    while uses and uses[0] <= now:
                        uses.pop(0)
                    uses.append(when)
            return when

    def choose(self) -> None:
        """Begin to record when pages will be read again."""
        if self._uses is None:
            with self._lock:
                if self._uses is None:
                    uses: dict[int, list[int]] = {}
                    for asked in self._asked:
                        for page in asked.pages.tolist():
                            uses.setdefault(page, []).append(asked.when)
                    self._uses = uses

    def awaits(self, blocks: Int64s) -> bool:
        """Whether the batch that was requested with this array object of blocks is not read yet."""
        with self._lock:
            return any(asked.blocks is blocks for asked in self._asked)

    def read(self, blocks: Int64s, pages: Int64s, now: int) -> tuple[int, Int64s]:
        """Note that blocks (ascending, int64 ``[n]``) and pages, int64 ``[m]``, are read now.

        Returns:
            The number of batches that were read, with skipped ones, at least 1; 0 if the same blocks were read just
            before, as after an eviction. And the time at which each page is read again, int64 ``[m]``: ``now`` if that
            is unknown, or ``choose`` was not called.
        """
        with self._lock:
            is_new = self._read is None or not np.array_equal(blocks, self._read)
            count, self._read = self._arrive(blocks, now) if is_new else 0, blocks
            again = np.full(len(pages), now)
            if self._uses is None:
                return count, again
            for number, page in enumerate(pages.tolist()):
                uses = self._uses.get(page)
                if uses is None:
                    continue
                while uses and uses[0] < now + count:
                    uses.pop(0)
                if uses:
                    again[number] = uses[0]
                else:
                    del self._uses[page]
            return count, again

    def _forget(self) -> int:
        """Forget the oldest requested batch, and return its number."""
        batch, _, _, pages, when = self._asked.popleft()
        self.pages_ahead -= len(pages)
        if self._uses is not None:
            for page in pages.tolist():
                uses = self._uses.get(page)
                if uses is not None:
                    if when in uses:
                        uses.remove(when)
                    if not uses:
                        del self._uses[page]
        return batch

    def _arrive(self, blocks: Int64s, now: int) -> int:
        """Forget the requested batches that read ``blocks``, and all earlier ones; return their number.

        Batches that share stretches cannot all be found by their blocks; they are skipped with the next one found.
        """
        # Batches before the first of them count as skipped.
        there = set(blocks.tolist())
        skipped = next((number for number, asked in enumerate(self._asked) if asked.among(there)), None)
        if skipped is None:
            self._unknown += 1
            return 1
        count = 0
        # Several batches may be read at once, such as 5, 6 and 7, if they were requested one after the other.
        while skipped or (self._asked and self._asked[0].among(there)):
            self._at = self._forget()
            skipped, count = max(0, skipped - 1), count + 1
        if self._count:
            took = (now - self._last - self._unknown) / self._count
            self._ticks += _WEIGHT * (max(1.0, took) - self._ticks)
        self._last, self._count, self._unknown = now, count, 0
        return count
