"""The local file that caches bytes of remote objects, and the state of each process that shares it."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mouse_core._base.checks import check_choice, check_count
from mouse_core._base.locks import ProcessLock, forks
from mouse_core.errors import StorageError
from mouse_core.files.checksum import PAGE
from mouse_core.files.writing import make_folder
from mouse_core.remote.clients.options import ObjectClient, ObjectInfo
from mouse_core.remote.mirror.fetching import Fetcher, Pace
from mouse_core.remote.mirror.keeping import Counters, Keeper, Known, Limits, PageSums, Placed, Places, key_of
from mouse_core.remote.mirror.table import (
    BLOCK,
    PAGES,
    Int64s,
    Sharer,
    SparseFile,
    Table,
    address_of,
    ascending,
    folder_of,
    pages_of,
    pieces,
    same_pages,
    touched,
)

# If batches soon read every other block, blocks are fetched as a whole, as their other pages will be read soon. Not if
# the mirror holds less than 3/4 of all blocks, or less than 4 times the blocks of a batch: they would be evicted first.
_DENSE, _KEPT, _TIMES = 0.5, 0.75, 4
# The ranges of several batches are sorted together, as if each batch had a mirror of its own of this size.
_APART = 1 << 48
_NONE = np.zeros(0, np.int64)


class Process:
    """The state of one process that shares a mirror."""

    def __init__(self, inside: Path, table: Table, file: SparseFile, memory: Any, known: Known, limits: Limits) -> None:
        self.sharer, self.counters, self.pace = Sharer(inside / "sharers"), Counters(), Pace()
        self.keeper = Keeper(table, file, memory, known, self.sharer, limits, self.counters)
        self.fetcher = Fetcher(self.keeper, self.pace)
        self._table, self._known, self._limits = table, known, limits
        self._forks, self.together = forks(), 0  # largest number of blocks read at once
        self._touched = (_NONE, _NONE), (_NONE, _NONE)

    def touched(self, begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
        """See ``pages.touched``; the last result is kept, as ``there`` and ``wait`` ask for the same ranges."""
        ranges, found = self._touched
        if not (np.array_equal(ranges[0], begins) and np.array_equal(ranges[1], ends)):
            found = touched(begins, ends)
            self._touched = (begins, ends), found
        return found

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Request ranges of the mirror that batches will read; see ``RemoteMemory.ask``."""
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
        # The first batch that reads a page is noted last, and counts.
        whens = np.repeat(np.array([when for when, _, _ in parts], np.int64), np.diff(by_page))
        self._table.ask(pages[::-1], whens[::-1])
        if self.keeper.is_full():
            self.pace.choose()
            is_dense = self.pace.blocks_soon() > self._known.blocks * _DENSE
            least = max(self._known.blocks * _KEPT, _TIMES * max(int(np.diff(by_block).max()), self.together))
            self.keeper.whole = is_dense and self._limits.pages > PAGES * least
        self.fetcher.ask(parts)

    def end(self) -> None:
        """Stop fetching, and leave the sharers; a forked child does nothing with the state of its parent."""
        if self._forks != forks():
            return
        self.fetcher.close()
        self.sharer.leave()


# Bytes of one piece of a private copy.
_PIECE = 8 << 20
_LEAST_BYTES = 4 << 20
# Eviction looks ahead over batches that read 4 times as many pages as the mirror holds; pages that are needed later may
# be evicted.
_KNOWN = 4
VARIABLE = "MOUSE_CACHE"
"""The environment variable with the folder of caches."""


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of caches: ``cache``, else the folder in ``MOUSE_CACHE``, else ``mouse-data`` in the system's
    folder of caches.
    """
    named = cache or os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mouse-data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mouse-data"


class Mirror:
    """Remote objects, one behind another in one sparse local file, whose pages are fetched on request.

    All processes of a machine share the file: each byte is fetched once, and no process evicts pages that another reads
    soon. An object is identified by its content, so a changed object is another one, and later runs use the same cache.
    Its content is not trusted: each process compares digests of pages that another one wrote before it reads them.

    Args:
        cache: The folder, as in ``cache_folder``, on a local disk; created if it is missing.
        cache_bytes: Largest size, at least 4 MB; None: half of the free space of the disk. The pages that the requested
            batches need last are evicted first. All pages of a single batch stay, even if these are more.
        fail: The effect of a temporary failure: the request is repeated for ``patience`` seconds, with growing pauses,
            before the reader gets the error ("raise"), or without end ("retry"). On a full disk, fewer pages are kept.
        patience: Seconds.

    Raises:
        ConfigError: An invalid limit, or a system without file locks.
        StorageError: The folder cannot be created or written.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str] | None = None,
        *,
        cache_bytes: int | None = None,
        fail: Literal["raise", "retry"] = "raise",
        patience: float = 30.0,
    ) -> None:
        check_choice("fail", fail, ("raise", "retry"))
        if cache_bytes is not None:
            check_count("cache_bytes", cache_bytes, _LEAST_BYTES)
        self.folder = cache_folder(cache).absolute()
        self._options: dict[str, Any] = {"cache_bytes": cache_bytes, "fail": fail, "patience": patience}
        inside = folder_of(self.folder)
        try:
            make_folder(inside, sync=False)
            self._table = Table(inside)
            self._file = SparseFile(inside / "bytes")
            self._places = Places(inside / "objects")
            if cache_bytes is None:
                cache_bytes = max(_LEAST_BYTES, shutil.disk_usage(inside).free // 2 + self._table.pages * PAGE)
            self._limits = Limits(cache_bytes // PAGE, fail, patience)
            self._inside, self._lock, self._known = inside, ProcessLock(), Known()
            # The newest map while it is in use. It refers to the mirror, which ends with its last user.
            self._memory: mmap.mmap | None = None
            self._newest: Callable[[], _Map | None] = lambda: None
            self._processes: dict[int, Process] = {}
            self._process().sharer.remove_dead()
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cache {str(self.folder)!r}: expected a folder to write to, found {error}") from error

    def add(
        self, client: ObjectClient, infos: Sequence[ObjectInfo], sums: Sequence[PageSums] = ()
    ) -> list[MirrorObject]:
        """Return objects with places in the mirror, without fetching any byte.

        Args:
            client: The client of the objects.
            infos: The objects, from ``client.head``.
            sums: For each object the source of the digests of its pages, with which fetched pages are compared; empty:
                pages are not compared.

        Raises:
            StorageError: The cache has no room for the list of objects.
        """
        known: Sequence[PageSums | None] = sums or [None] * len(infos)
        keys = [key_of(client.url, info, verified=bool(sums)) for info in infos]
        try:
            with self._lock, self._table.lock:
                self._places.follow()
                self._places.blocks = max(self._places.blocks, self._table.blocks)
                begins = self._places.place(keys, [info.size for info in infos])
                if self._places.blocks > self._table.blocks:
                    self._table.grow(self._places.blocks, lambda blocks: self._file.lengthen(blocks * BLOCK))
                self._table.follow()
                self._file.lengthen(self._table.room * BLOCK)  # another program may have removed or cut it
                placed = [
                    self._known.get(begin) or Placed(client, info, begin * BLOCK, key & 0xFFFFFFFF, found)
                    for begin, key, info, found in zip(begins, keys, infos, known, strict=True)
                ]
                for one in placed:
                    one.client, one.error = client, None
                self._known.add(placed)
                last = max((one.end for one in placed), default=0)
                found_map = self._map(last)
        except OSError as error:
            raise StorageError(f"cache {str(self.folder)!r}: expected room in it, found {error}") from error
        return [MirrorObject(found_map, found_map.begin + one.begin, one.info) for one in placed]

    def _map(self, size: int) -> _Map:
        """Return a map of at least ``size`` bytes; earlier maps stay, as their addresses are in use."""
        if self._memory is None or len(self._memory) < size:
            self._memory, self._newest = self._file.map(), lambda: None
            for process in self._processes.values():
                process.keeper.memory = self._memory
        found = self._newest()
        if found is None:
            found = _Map(self, self._memory)
            self._newest = weakref.ref(found)
        return found

    def counters(self) -> dict[str, float]:
        """Return this process's counters: the sums of ``Counters``, the bytes of requested pages that have not arrived
        (``queued``), and the bytes in the cache (``kept``).
        """
        process = self._process()
        more = {"queued": process.fetcher.queued() * PAGE, "kept": self._table.pages * PAGE}
        return process.counters.said() | more

    def close(self) -> None:
        """Stop fetching. Maps stay until their last user ends."""
        for process in self._processes.values():
            process.end()

    # ------------------------------------------------------------------ for maps and objects

    def _process(self) -> Process:
        """Return the state of this process; a forked child has its own."""
        found = self._processes.get(forks())
        if found is None:
            with self._lock:
                found = self._processes.get(forks())
                if found is None:
                    found = Process(self._inside, self._table, self._file, self._memory, self._known, self._limits)
                    weakref.finalize(self, found.end)
                    self._processes = {forks(): found}
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Mirror, str(self.folder), **self._options), ()


class MirrorObject(NamedTuple):
    """An object in a mirror.

    Args:
        backing: The memory of the object; its ``wait`` is called before bytes are copied.
        address: Address of the first byte, as long as ``backing`` lives.
        info: The object.
    """

    backing: _Map
    address: int
    info: ObjectInfo


class _Map:
    """The mirror's file as mapped memory, a ``RemoteMemory``."""

    # Ranges with a page between them stay apart; the mirror itself joins requests.
    gap = PAGE - 1

    def __init__(self, mirror: Mirror, memory: mmap.mmap) -> None:
        self._mirror, self._table, self.memory = mirror, mirror._table, memory
        self.counted = mirror  # all maps have one set of counters
        self.begin, self.size = address_of(memory), len(memory)
        self.room: int | None = mirror._limits.pages * PAGE

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Request ranges of addresses that batches will read; see ``RemoteMemory.ask``."""
        if len(begins):
            self._mirror._process().ask(begins - self.begin, ends - self.begin, batches)

    def looks_further(self) -> bool:
        """Whether knowledge of later batches would improve the choice of pages to evict."""
        process = self._mirror._process()
        return process.keeper.is_full() and not process.pace.knows(_KNOWN * self._mirror._limits.pages)

    def there(self, begins: Int64s, ends: Int64s) -> bool:
        """Whether the bytes at some addresses are there."""
        process = self._mirror._process()
        if process.keeper.is_full():
            return False  # in a full mirror, each batch waits by itself
        blocks, masks = process.touched(begins - self.begin, ends - self.begin)
        return not (masks & ~self._table.state[blocks]).any()

    def wait(self, begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Wait until the bytes at some addresses are there; return what ``still`` takes."""
        process, table = self._mirror._process(), self._table
        blocks, masks = process.touched(begins - self.begin, ends - self.begin)
        pages, waited = pages_of(blocks, masks), False
        while True:
            states = table.state[blocks]
            lacking = (masks & ~states) != 0
            if lacking.any():
                waited = True
                table.ask(pages, table.clock + 1)  # so that the other pages of these batches stay
                process.fetcher.bring(blocks[lacking], masks[lacking])
                continue
            unverified = process.keeper.unverified(blocks, states, masks)
            if not len(unverified):
                break
            process.keeper.verify(unverified)
        if not len(blocks):
            return blocks, blocks, blocks
        process.together = max(process.together, len(blocks))
        count, again = process.pace.read(blocks, pages, table.clock)
        table.tick(count)
        table.use(pages, again)
        if not waited:
            process.fetcher.in_time()
        process.fetcher.reach()
        process.counters.add(read=len(pages) * PAGE if count else 0)
        return blocks, masks, states

    def still(self, token: Any) -> bool:
        """Whether no page was evicted since ``wait``."""
        blocks, masks, states = token
        return bool(same_pages(self._table.state[blocks], states, masks).all())

    def read(self, begins: Int64s, ends: Int64s) -> list[bytes]:
        """Return copies of the bytes at some addresses, in any order, of any objects."""
        found: list[bytes] = []
        if len(begins) and int((ends - begins).sum()) > _PIECE:
            wanted = touched(*ascending(begins - self.begin, ends - self.begin))
            self._mirror._process().fetcher.ask([(self._table.clock + 1, *wanted)])
        for first, behind in pieces(ends - begins, _PIECE):
            if int(ends[first] - begins[first]) > _PIECE:
                cuts = np.append(np.arange(begins[first], ends[first], _PIECE), ends[first])
                found.append(b"".join(self.read(cuts[:-1], cuts[1:])))
                continue
            part = list(zip(begins[first:behind].tolist(), ends[first:behind].tolist(), strict=True))
            ranges = ascending(begins[first:behind], ends[first:behind])
            while True:
                token = self.wait(*ranges)
                copies = [self.memory[begin - self.begin : end - self.begin] for begin, end in part]
                if self.still(token):
                    break
            found += copies
        return found

    def counters(self) -> dict[str, float]:
        """As ``Mirror.counters``."""
        return self._mirror.counters()
