"""What each of the processes that share a mirror has for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mouse_core._base.locks import forks
from mouse_core.files.checksum import PAGE
from mouse_core.remote.mirror.counters import Counters
from mouse_core.remote.mirror.fetching import Fetcher
from mouse_core.remote.mirror.keeping import Keeper, Limits
from mouse_core.remote.mirror.objects import Known
from mouse_core.remote.mirror.pace import Pace
from mouse_core.remote.mirror.shared.pages import BLOCK, PAGES, Int64s, pages_of, touched
from mouse_core.remote.mirror.shared.sharers import Sharer
from mouse_core.remote.mirror.shared.sparse import SparseFile
from mouse_core.remote.mirror.shared.table import Table

# Where every other block is asked for, blocks are brought whole: what else is in them will be read before long.
# Not so where less of all is kept than a part, or than some times what is read at once: much would go before that.
_DENSE, _KEPT, _TIMES = 0.5, 0.75, 4
# What several batches read is sorted at once, as if each had a mirror of its own, so many bytes long.
_APART = 1 << 48
_NONE = np.zeros(0, np.int64)


class Process:
    """What a process that shares a mirror has of its own."""

    def __init__(self, inside: Path, table: Table, file: SparseFile, memory: Any, known: Known, limits: Limits) -> None:
        self.sharer, self.counters, self.pace = Sharer(inside / "sharers"), Counters(), Pace()
        self.keeper = Keeper(table, file, memory, known, self.sharer, limits, self.counters)
        self.fetcher = Fetcher(self.keeper, self.pace)
        self._table, self._known, self._limits = table, known, limits
        self._forks, self.together = forks(), 0  # how many blocks were read at once, at most
        self._touched = (_NONE, _NONE), (_NONE, _NONE)

    def touched(self, begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
        """See ``pages.touched``; of the same bytes as the last time, as what is looked for is then waited for."""
        ranges, found = self._touched
        if not (np.array_equal(ranges[0], begins) and np.array_equal(ranges[1], ends)):
            found = touched(begins, ends)
            self._touched = (begins, ends), found
        return found

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Ask for what batches will read: bytes of the mirror, as ``RemoteMemory.ask`` takes them."""
        heads = np.flatnonzero(np.append(True, batches[1:] != batches[:-1]))
        apart = np.repeat(np.arange(len(heads)) * _APART, np.diff(np.append(heads, len(batches))))
        blocks, masks = touched(begins + apart, ends + apart)
        pages = pages_of(blocks, masks)
        firsts = np.arange(len(heads) + 1) * _APART
        by_block, by_page = np.searchsorted(blocks, firsts // BLOCK), np.searchsorted(pages, firsts // PAGE)
        blocks, pages = blocks % (_APART // BLOCK), pages % (_APART // PAGE)
        parts = []
        for number, batch in enumerate(batches[heads].tolist()):
            some, few = slice(*by_block[number : number + 2]), slice(*by_page[number : number + 2])
            when = self.pace.ahead(batch, blocks[some], pages[few], self._table.clock)
            parts.append((when, blocks[some], masks[some]))
        # Of a page that several read, the first is noted last.
        whens = np.repeat(np.array([when for when, _, _ in parts], np.int64), np.diff(by_page))
        self._table.ask(pages[::-1], whens[::-1])
        if self.keeper.is_full():
            self.pace.choose()
            is_dense = self.pace.blocks_soon() > self._known.blocks * _DENSE
            least = max(self._known.blocks * _KEPT, _TIMES * max(int(np.diff(by_block).max()), self.together))
            self.keeper.whole = is_dense and self._limits.pages > PAGES * least
        self.fetcher.ask(parts)

    def end(self) -> None:
        """Fetch nothing more, and share nothing; of a parent's, a forked child has nothing to end."""
        if self._forks != forks():
            return
        self.fetcher.close()
        self.sharer.leave()
