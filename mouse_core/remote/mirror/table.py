"""What is in a mirror, block by block, in a file that all who share it have mapped.

Rows are changed under a lock, and read without one: each word is written at once. Whoever fetches a block claims it,
writes the bytes, and then says here that they are there; whoever is killed in between leaves a claim, which is void
when its process has ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.files.locking import Descriptor, FileLock
from mouse_core.files.mapped import fence, mapped, open_file, set_aside
from mouse_core.remote.mirror.pages import ALL_PAGES, BLOCK, PAGES, Int64s

FORMAT = 1
_MAGIC = int.from_bytes(b"mirror01", "little")
_HEADER = 4096
# state: how often the block was let go of, and in the lowest 16 bits which of its pages are there. when: the time of
# its next use, as far as one was asked for, or of its last. total: the sum of its pages' digests. claim: who fetches.
_ROW = np.dtype([("state", "<i8"), ("when", "<i8"), ("total", "<u8"), ("claim", "<i8")])
_SMALLEST = (1 << 30) // BLOCK
# Later than every time.
_FAR = 1 << 61


class Table(Descriptor):
    """The shared table of a mirror.

    Args:
        folder: Where it is; made as an empty one if there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = FileLock(folder / "lock")
        with self.lock:
            self._open(folder / "table")

    def _open(self, path: Path) -> None:
        self._file = open_file(path, create=not path.exists())
        if os.fstat(self._file).st_size < _HEADER:
            set_aside(self._file, _HEADER)
        self._map()
        if self.header[0] != _MAGIC:
            os.ftruncate(self._file, _HEADER)
            self._map()
            # The clock begins at 1: a block that was never used has the time 0.
            self.header[1:] = [1, *([0] * (len(self.header) - 2))]
            self.header[0] = _MAGIC

    def _map(self) -> None:
        size = os.fstat(self._file).st_size
        self._memory: mmap.mmap = mapped(self._file, size, write=True)
        self.header: Int64s = np.frombuffer(self._memory, np.int64, 8)
        rows: npt.NDArray[Any] = np.frombuffer(self._memory, _ROW, (size - _HEADER) // _ROW.itemsize, _HEADER)
        self.rows = rows
        self.state: Int64s = rows["state"]
        self.when: Int64s = rows["when"]
        self.claim: Int64s = rows["claim"]
        self.total: npt.NDArray[np.uint64] = rows["total"]

    @property
    def clock(self) -> int:
        """The time, in batches that were read by whoever."""
        return int(self.header[1])

    def tick(self, count: int) -> None:
        """So many batches were read. Where two say so at once, one of them may be lost."""
        self.header[1] += count

    @property
    def pages(self) -> int:
        """How many pages are there."""
        return int(self.header[2])

    @property
    def blocks(self) -> int:
        """How many blocks objects have been given."""
        return int(self.header[3])

    @property
    def room(self) -> int:
        """How many blocks the file of bytes is long."""
        return int(self.header[4])

    def grow(self, blocks: int, lengthen: Callable[[int], None]) -> None:
        """Give objects more blocks; under the lock.

        Args:
            blocks: How many there are to be.
            lengthen: Makes the file of bytes so many blocks long.
        """
        if blocks > self.room:
            room = max(_SMALLEST, 1 << (blocks - 1).bit_length())
            lengthen(room)
            # Rows have room on the disk when their blocks are given away: memory that is written never lacks it.
            os.ftruncate(self._file, max(_HEADER + room * _ROW.itemsize, os.fstat(self._file).st_size))
            self.header[4] = room
        set_aside(self._file, _HEADER + blocks * _ROW.itemsize, begin=_HEADER + self.blocks * _ROW.itemsize)
        self.header[3] = blocks
        self.follow()

    def follow(self) -> None:
        """Have those rows mapped that others made."""
        if len(self.rows) < self.room:
            self._map()

    @staticmethod
    def count(masks: Int64s) -> int:
        """How many pages some masks name."""
        return int(_sizes()[masks].sum(dtype=np.int64))

    # ------------------------------------------------------------------ fetching

    def claim_for(
        self, me: int, blocks: Int64s, masks: Int64s, lives: Callable[[int], bool], *, steal: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Claim those of some blocks that lack pages and that nobody fetches; under the lock.

        Args:
            me: Who claims.
            blocks: The blocks, ascending, int64 ``[n]``.
            masks: The pages wanted of each, int64 ``[n]``.
            lives: Whether someone else's claim holds.
            steal: Whether to take over what others claimed, though they live.

        Returns:
            Which of them are claimed now, bool ``[n]``.
        """
        holder = self.claim[blocks]
        free: npt.NDArray[np.bool_] = holder == 0
        for other in np.unique(holder[~free & (holder != me)]).tolist():
            if steal or not lives(other):
                free |= holder == other
        free &= (masks & ~self.state[blocks]) != 0
        self.claim[blocks[free]] = me
        return free

    def arrived(self, me: int, blocks: Int64s, masks: Int64s, totals: npt.NDArray[np.uint64]) -> Int64s:
        """Say that pages of blocks which ``me`` claimed are there, and claim them no more; under the lock.

        Args:
            me: Who claimed them.
            blocks: The blocks, ascending, int64 ``[n]``.
            masks: The pages, int64 ``[n]``; none of those that were there.
            totals: Sums of the pages' digests, uint64 ``[n]``.

        Returns:
            The states of the blocks, int64 ``[n]``; -1 of those that another one had taken over.
        """
        mine = self.claim[blocks] == me
        blocks, masks, totals = blocks[mine], masks[mine], totals[mine]
        self.total[blocks] += totals
        fence()
        self.state[blocks] |= masks
        self.header[2] += self.count(masks)
        self.claim[blocks] = 0
        states = np.full(len(mine), -1)
        states[mine] = self.state[blocks]
        return states

    def unclaim(self, me: int, blocks: Int64s) -> None:
        """Fetch some blocks no more; under the lock."""
        self.claim[blocks[self.claim[blocks] == me]] = 0

    # ------------------------------------------------------------------ using

    def ask(self, blocks: Int64s, when: int) -> None:
        """Note that blocks will be used at a time. Nobody is kept from noting other things at once: it is a guess."""
        known = self.when[blocks]
        self.when[blocks] = np.where(known > self.clock, np.minimum(known, when), when)

    # ------------------------------------------------------------------ letting go

    def needed_last(self, me: int, pages: int, before: int, lives: Callable[[int], bool]) -> Int64s:
        """Blocks that have at least so many pages, as far as there are; under the lock.

        Those whose next use nobody knows come first, longest unused ones before others; then those with the latest
        next use. With them come those that someone claimed who died.

        At time 10, of blocks with the times 4, 9, 12 and 30 they are the first, the second, the fourth, the third.

        Args:
            me: Who asks.
            pages: How many.
            before: Blocks whose next use is at this time or earlier stay.
            lives: Whether someone's claim holds.

        Returns:
            Blocks, ascending, int64 ``[n]``.
        """
        states, claims = self.state[: self.blocks], self.claim[: self.blocks]
        sizes = _sizes()[states & ALL_PAGES]
        # Who was killed may have changed a state and not the sum.
        self.header[2] = int(sizes.sum(dtype=np.int64))
        claimed = np.flatnonzero(claims)
        left = [claimed[claims[claimed] == one] for one in np.unique(claims[claimed]).tolist() if not lives(one)]
        blocks = np.flatnonzero((sizes > 0) & (claims == 0))
        when, now = self.when[blocks], self.clock
        # A time far ahead is soon in this order: at 10, 30 comes before 12.
        order = np.where(when > now, _FAR - when, when)
        allowed = (when <= now) | (when > before)
        blocks, order = blocks[allowed], order[allowed]
        if pages < len(blocks):
            first = np.argpartition(order, pages)[:pages]
            blocks, order = blocks[first], order[first]
        blocks = blocks[np.argsort(order, kind="stable")]
        enough = int(np.searchsorted(np.cumsum(sizes[blocks], dtype=np.int64), pages)) + 1
        return np.sort(np.concatenate([blocks[:enough], *left]))

    def let_go(self, me: int, blocks: Int64s) -> None:
        """Take blocks for not there, and claim them until their bytes are gone; under the lock."""
        self.claim[blocks] = me
        state = self.state[blocks]
        self.state[blocks] = ((state >> PAGES) + 1) << PAGES
        fence()
        self.total[blocks] = 0
        self.header[2] -= self.count(state & ALL_PAGES)


@cache
def _sizes() -> npt.NDArray[np.uint8]:
    """How many pages each mask names, uint8 ``[65536]``."""
    sizes = np.zeros(ALL_PAGES + 1, np.uint8)
    for page in range(PAGES):
        sizes += (np.arange(ALL_PAGES + 1) >> page & 1).astype(np.uint8)
    return sizes
