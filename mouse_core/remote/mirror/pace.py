"""When what a process asked for will be read, in the time that all who share a mirror have in common."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import NamedTuple

import numpy as np

from mouse_core.remote.mirror.pages import Int64s

# Asked for and not read; of a loader that was given up they are never read.
_MOST, _MOST_PAGES = 4096, 1 << 18
_FAR = 4096
# So many batches are read soon.
_SOON = 64
# How much the last wait counts.
_WEIGHT = 0.1


class _Asked(NamedTuple):
    """A batch's number, its blocks, by which it is known, their numbers, its pages, and when it is read."""

    batch: int
    blocks: Int64s
    numbers: list[int]
    pages: Int64s
    when: int

    def among(self, blocks: set[int]) -> bool:
        """Whether its blocks are all among others."""
        return blocks.issuperset(self.numbers)


class Pace:
    """Tells by what is read which batch a process is at, and so how far ahead others are.

    Time is what ``Table.tick`` counts: the batches of all processes. Where four read equally fast, a batch that is 10
    ahead of the one that is read will be read in 40.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[_Asked] = deque()
        # By the page: when batches that are asked for read it. None as long as nothing has to go: it takes long.
        self._uses: dict[int, list[int]] | None = None
        self._at: int | None = None
        self._ticks = 1.0
        # When batches were last found among those that are read, how many, and how often none was since.
        self._last = self._count = self._unknown = 0
        self._read: Int64s | None = None
        self.pages_ahead = 0
        """Pages requested and not read yet, counted once for each batch that reads them."""

    def blocks_soon(self) -> int:
        """Return the blocks that the next batches read, counted once for each batch."""
        with self._lock:
            return sum(len(asked.blocks) for asked in islice(self._asked, _SOON))

    def knows(self, pages: int) -> bool:
        """Whether so many pages are asked for and not read yet, or as many as are kept in mind."""
        return self.pages_ahead >= min(pages, _MOST_PAGES) or len(self._asked) >= _MOST - _SOON

    def ahead(self, batch: int, blocks: Int64s, pages: Int64s, now: int) -> int:
        """When a batch will be read that is asked for at a time.

        Args:
            batch: Its number.
            blocks: What it reads, ascending, int64 ``[n]``.
            pages: The same by the page, int64 ``[m]``.
            now: The time.
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
        """From now on say when pages that are read will be read again."""
        if self._uses is None:
            with self._lock:
                if self._uses is None:
                    uses: dict[int, list[int]] = {}
                    for asked in self._asked:
                        for page in asked.pages.tolist():
                            uses.setdefault(page, []).append(asked.when)
                    self._uses = uses

    def awaits(self, blocks: Int64s) -> bool:
        """Whether a batch is still to be read that was asked for with this very array of blocks."""
        with self._lock:
            return any(asked.blocks is blocks for asked in self._asked)

    def read(self, blocks: Int64s, pages: Int64s, now: int) -> tuple[int, Int64s]:
        """Note that some blocks (ascending, int64 ``[n]``) are read, at a time, and which pages, int64 ``[m]``.

        Returns:
            How many batches were read, those that were passed over among them, at least 1, and 0 of what was read just
            before: who waits again because something went meanwhile is no further; and when each page is read again,
            int64 ``[m]``: ``now`` where nobody asked for it, or ``choose`` was not called.
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
        """Forget the batch that was asked for first, and when it was to be read; its number."""
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
        """Find the batches that are read, and forget them, and those that were asked for before; how many it were.

        Where batches open stretches that others read, too, few are known by their blocks: the others are passed over.
        """
        # What was asked for before the first of them is not read any more.
        there = set(blocks.tolist())
        skipped = next((number for number, asked in enumerate(self._asked) if asked.among(there)), None)
        if skipped is None:
            self._unknown += 1
            return 1
        count = 0
        # Several batches may be read at once: 5, 6 and 7, if all three were asked for one after the other.
        while skipped or (self._asked and self._asked[0].among(there)):
            self._at = self._forget()
            skipped, count = max(0, skipped - 1), count + 1
        if self._count:
            took = (now - self._last - self._unknown) / self._count
            self._ticks += _WEIGHT * (max(1.0, took) - self._ticks)
        self._last, self._count, self._unknown = now, count, 0
        return count
