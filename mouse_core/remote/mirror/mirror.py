"""The local file that caches bytes of remote objects, and what each process that shares the file has of its own."""

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

from mouse_core._base.checks import is_whole
from mouse_core._base.locks import ProcessLock, forks
from mouse_core.errors import ConfigError, StorageError
from mouse_core.files.checksum import PAGE
from mouse_core.files.writing import make_folder
from mouse_core.remote.client import ObjectClient, ObjectInfo
from mouse_core.remote.mirror.fetching import Fetcher
from mouse_core.remote.mirror.keeping import Counters, Keeper, Limits
from mouse_core.remote.mirror.objects import Known, PageSums, Placed, Places, key_of
from mouse_core.remote.mirror.pace import Pace
from mouse_core.remote.mirror.pages import BLOCK, PAGES, Int64s, ascending, pages_of, pieces, touched
from mouse_core.remote.mirror.table import Sharer, SparseFile, Table, address_of, folder_of, same_pages

# Where every other block is asked for, blocks are brought whole: what else is in them will be read before long.
# Not so where less of all is kept than a part, or than some times what is read at once: much would go before that.
_DENSE, _KEPT, _TIMES = 0.5, 0.75, 4
# What several batches read is sorted at once, as if each had a mirror of its own, so many bytes long.
_APART = 1 << 48
_NONE = np.zeros(0, np.int64)


class Process:
    """The state of one process that shares a mirror."""

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


# What is copied at once of what is read privately.
_PIECE = 8 << 20
_LEAST_BYTES = 4 << 20
# What is to stay is chosen by what is read later, as far as it reads so many times as many pages as are kept: what is
# needed after that may go, of however much data they are a part.
_KNOWN = 4
VARIABLE = "MOUSE_CACHE"
"""The variable of the environment that names the folder."""


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of what was read of objects elsewhere: the one given, else the one that ``MOUSE_CACHE`` names, else
    ``mouse-data`` where the system has its caches.
    """
    named = cache or os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mouse-data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mouse-data"


class Mirror:
    """Objects elsewhere, laid one behind another in one sparse local file, whose bytes come when they are asked for.

    All processes of a machine share the file: each byte is fetched once, and what one of them reads soon is not let go
    of for another. It is known by content, so an object that changed is another one; what a folder holds is of use to
    the next run. Nothing in it is trusted: each process looks at the digest of what another wrote before it reads it.

    Args:
        cache: The folder in which it is kept, as ``cache_folder`` takes it; made if it is not there. It must be on a
            disk of this machine.
        cache_bytes: The most bytes that are kept, at least 4 MB; None: half of what is free on the disk. What is needed
            last by what was asked for is let go of first. What a single batch reads is kept though it be more.
        fail: What becomes of a request that failed in a way that may pass: it is made again for ``patience`` seconds,
            with growing pauses, before whoever waits for it gets the error ("raise"); or for ever ("retry").
        patience: Seconds.

    Raises:
        ConfigError: A limit that cannot be, or a system without file locks.
        StorageError: The folder cannot be made or written.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str] | None = None,
        *,
        cache_bytes: int | None = None,
        fail: Literal["raise", "retry"] = "raise",
        patience: float = 30.0,
    ) -> None:
        if fail not in ("raise", "retry"):
            raise ConfigError(f"fail: expected 'raise' or 'retry', found {fail!r}")
        if cache_bytes is not None and not (is_whole(cache_bytes) and cache_bytes >= _LEAST_BYTES):
            raise ConfigError(f"cache_bytes: expected an integer of {_LEAST_BYTES} or more, found {cache_bytes!r}")
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
            # The newest map as long as somebody has it: it knows the mirror, which is to end with its last user.
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
        """Give objects their places, and nothing else: no byte is fetched.

        Args:
            client: Who reads them.
            infos: What they are, as ``client.head`` says; what is returned has one for each.
            sums: Of each who knows the digests of its pages, against which they are held when they come; none: they
                are taken as they come.

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
                self._file.lengthen(self._table.room * BLOCK)  # which somebody may have removed or cut off
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
        """A map of so many bytes at least; those that others have stay, as addresses in them were given away."""
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
        """Fetch nothing more. What was mapped stays until nobody uses it."""
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
    """An object that lies in a mirror.

    Args:
        backing: The memory that it lies in; asked before bytes at its address are copied.
        address: Address of its first byte, as long as ``backing`` lives.
        info: What it is.
    """

    backing: _Map
    address: int
    info: ObjectInfo


class _Map:
    """The mirror's file as memory: the ``RemoteMemory`` of columns that lie in it."""

    # No page lies between such. The mirror itself knows what is better fetched as one.
    gap = PAGE - 1

    def __init__(self, mirror: Mirror, memory: mmap.mmap) -> None:
        self._mirror, self._table, self.memory = mirror, mirror._table, memory
        self.counted = mirror  # all maps have one set of counters
        self.begin, self.size = address_of(memory), len(memory)
        self.room: int | None = mirror._limits.pages * PAGE

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Fetch what batches will read: bytes at some addresses, as ``RemoteMemory.ask`` takes them."""
        if len(begins):
            self._mirror._process().ask(begins - self.begin, ends - self.begin, batches)

    def looks_further(self) -> bool:
        """Whether what stays would be better chosen if more was known of what is read later."""
        process = self._mirror._process()
        return process.keeper.is_full() and not process.pace.knows(_KNOWN * self._mirror._limits.pages)

    def there(self, begins: Int64s, ends: Int64s) -> bool:
        """Whether the bytes at some addresses are there."""
        process = self._mirror._process()
        if process.keeper.is_full():
            return False  # what comes just in time is counted batch by batch
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
                table.ask(pages, table.clock + 1)  # what is there of the same batches stays, too
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
        """Whether nothing that was waited for was let go of since."""
        blocks, masks, states = token
        return bool(same_pages(self._table.state[blocks], states, masks).all())

    def read(self, begins: Int64s, ends: Int64s) -> list[bytes]:
        """Private copies of the bytes at some addresses, in any order, of whichever objects."""
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
