"""The places of objects in a mirror, and the work of one process on its bytes: claim, evict, write and verify pages."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core._base.memory import sparse_zeros
from mouse_core.errors import DataError, StorageError
from mouse_core.files.checksum import PAGE, PageChecksums, checksum, digest, page_checksums
from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import open_file
from mouse_core.files.writing import write_all
from mouse_core.remote.clients.options import ObjectClient, ObjectInfo
from mouse_core.remote.mirror.table import (
    ALL_PAGES,
    BLOCK,
    PAGES,
    Int64s,
    Sharer,
    SparseFile,
    Table,
    is_full,
    masks_of,
    pages_of,
    runs,
    same_pages,
)

# More pages than any mirror has.
_APART = 1 << 40


class PageSums(Protocol):
    """Source of the digests of an object's pages; it can be pickled. Several threads may call it at once."""

    def __call__(self) -> PageChecksums:
        """Return the digests, as ``page_checksums`` does.

        Raises:
            DataError: The object is damaged.
            StorageError: A request failed, and may succeed later.
        """
        ...

    def find(self, others: Sequence[Any]) -> None:
        """Find the digests of ``others``, sources of the same class, with as few requests as possible.

        Raises:
            StorageError: A request failed, and may succeed later.
        """
        ...

    def named(self, message: str) -> str:
        """Return the message with the name of the object."""
        ...


@dataclass(eq=False)
class Placed:
    """An object with its place in a mirror.

    Args:
        client: The client that reads it.
        info: The object.
        begin: Offset of its first byte in the mirror; zeros follow its end up to the end of a block.
        salt: 32 bits that are combined with the digests in the table, so that bytes of another object do not match.
        sums: Source of the digests of its pages; None: pages are not compared.
    """

    client: ObjectClient
    info: ObjectInfo
    begin: int
    salt: int
    sums: PageSums | None = None
    error: Exception | None = field(default=None)

    @property
    def end(self) -> int:
        """Offset of the end of the object in the mirror."""
        return self.begin + self.info.size

    @property
    def page(self) -> int:
        """Number of its first page in the mirror."""
        return self.begin // PAGE

    def known_sums(self) -> PageChecksums | None:
        """Return the digests of its pages; None without a source. Errors as ``PageSums``."""
        return None if self.sums is None else self.sums()

    def damaged(self, page: int) -> DataError:
        """Return the error for a damaged page, counted from the beginning of the object."""
        assert self.sums is not None
        begin = page * PAGE
        end = min(begin + PAGE, self.info.size)
        return DataError(
            self.sums.named(f"expected the bytes {begin}..{end - 1} as were written, found others; it is damaged")
        )


class Runs:
    """Runs of pages of several objects, which are fetched together.

    Args:
        objects: The objects.
        whose: Number of the object of each run, int64 ``[n]``.
        firsts, ends: Number of the first page of each run in the mirror, and of the page behind it, int64 ``[n]``.
    """

    def __init__(self, objects: Sequence[Placed], whose: Int64s, firsts: Int64s, ends: Int64s) -> None:
        self.objects, self.whose, self.firsts, self.ends = objects, whose, firsts, ends
        self.counts = ends - firsts
        self.bounds = np.append(0, np.cumsum(self.counts))
        """Number of each run's first page among all pages of the runs, and of all pages, int64 ``[n + 1]``."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Placed, slice]], blocks: Int64s, masks: Int64s) -> Runs:
        """Return the runs that bring pages of blocks, given the objects of ``Known.of``."""
        # The offset between objects keeps runs from continuing into the next object.
        numbers = np.repeat(np.arange(len(parts)), [part.stop - part.start for _, part in parts])
        firsts, ends = runs(pages_of(blocks + numbers * (_APART // PAGES), masks))
        whose = firsts // _APART
        return cls([placed for placed, _ in parts], whose, firsts - whose * _APART, ends - whose * _APART)

    def bytes(self) -> tuple[Int64s, Int64s]:
        """Return the first byte of each run in its object, and the one behind its last, int64 ``[n]``."""
        begins = np.array([one.begin for one in self.objects])[self.whose]
        ends = np.array([one.end for one in self.objects])[self.whose]
        return self.firsts * PAGE - begins, np.minimum(self.ends * PAGE, ends) - begins

    @memo
    def pages(self) -> Int64s:
        """Numbers of all pages, int64 ``[m]``."""
        pages: Int64s = np.repeat(self.firsts - self.bounds[:-1], self.counts) + np.arange(self.bounds[-1])
        return pages

    def digests(self, contents: Sequence[memoryview]) -> PageChecksums:
        """Return the digests of all pages from the bytes of the runs, as ``page_checksums`` does, uint32 ``[m]``."""
        begins = np.array([one.page for one in self.objects])[self.whose]
        return page_checksums(contents, (self.firsts - begins).tolist())

    def salts(self) -> PageChecksums:
        """Return the ``salt`` of each page's object, uint32 ``[m]``."""
        return np.repeat(np.array([one.salt for one in self.objects], np.uint32)[self.whose], self.counts)

    def _parts(self) -> list[slice]:
        """Return the slice of all pages for each object; runs ascend, so an object's pages are neighbours."""
        cuts = self.bounds[np.searchsorted(self.whose, np.arange(len(self.objects) + 1))].tolist()
        return [slice(*cut) for cut in pairwise(cuts)]

    def find_sums(self) -> None:
        """Find the digests of all objects that have a source; errors as ``PageSums``."""
        known = [placed.sums for placed in self.objects if placed.sums is not None]
        if len(known) > 1:
            known[0].find(known)
        for placed in self.objects:
            placed.known_sums()

    def wrong(self, digests: PageChecksums) -> DataError | None:
        """Return the error for pages whose checksums differ from the known ones; None: all are right."""
        pages = self.pages
        for placed, mine in zip(self.objects, self._parts(), strict=True):
            sums = placed.known_sums()
            if sums is None:
                continue
            known = pages[mine] - placed.page
            if known[-1] >= len(sums):
                return placed.damaged(len(sums))
            others = sums[known] != digests[mine]
            if others.any():
                return placed.damaged(int(known[others][0]))
        return None


class Places(Descriptor):
    """The file with the place of each object: lines of three numbers and their checksum.

    The caller holds the mirror's lock, so that one process at a time calls the methods.

    Args:
        path: The file; created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, create=not path.exists())
        self._read = 0
        self._known: dict[int, tuple[int, int]] = {}
        self.blocks = 0
        """Number of blocks given to objects."""

    def follow(self) -> None:
        """Read lines that other processes added. A last line that a power cut tore is removed."""
        content = os.pread(self._file, os.fstat(self._file).st_size - self._read, self._read)
        for line in content.splitlines(keepends=True):
            found = _parsed(line)
            if found is None:
                os.ftruncate(self._file, self._read)
                return
            key, begin, blocks = found
            self._known[key] = (begin, blocks)
            self.blocks = max(self.blocks, begin + blocks)
            self._read += len(line)

    def place(self, keys: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return the first block of each object; new objects get a place behind all others, which is written."""
        lines = []
        for key, size in zip(keys, sizes, strict=True):
            if key not in self._known:
                blocks = max(1, -(-size // BLOCK))
                lines.append(_line(key, self.blocks, blocks))
                self._known[key] = (self.blocks, blocks)
                self.blocks += blocks
        if lines:
            content = b"".join(lines)
            os.lseek(self._file, self._read, os.SEEK_SET)
            try:
                write_all(self._file, content)
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._read)
                self.blocks, self._known, self._read = 0, {}, 0
                raise
            self._read += len(content)
        return [self._known[key][0] for key in keys]


def key_of(url: str, info: ObjectInfo, *, verified: bool = False) -> int:
    """Return the key of an object's content, 128 bits; verified and unverified content lie apart."""
    said = [url, info.path, info.version, str(info.size), *(["verified"] if verified else [])]
    return int(digest("\0".join(said).encode()), 16)


def _line(key: int, begin: int, blocks: int) -> bytes:
    said = f"{key:032x} {begin:x} {blocks:x}"
    return f"{said} {checksum(said.encode()):016x}\n".encode()


def _parsed(line: bytes) -> tuple[int, int, int] | None:
    """Return the numbers of a line; None if it is damaged."""
    said, _, check = line.rstrip(b"\n").rpartition(b" ")
    if not line.endswith(b"\n") or f"{checksum(said):016x}".encode() != check:
        return None
    key, begin, blocks = (int(number, 16) for number in said.split())
    return key, begin, blocks


class Known:
    """The objects of a mirror that a process reads, by their places."""

    def __init__(self) -> None:
        self._ordered: tuple[Int64s, list[Placed]] = (np.empty(0, np.int64), [])
        self._by_block: dict[int, Placed] = {}
        self.blocks = 0
        """Number of blocks of all objects."""

    def add(self, objects: Sequence[Placed]) -> None:
        """Add objects; one thread at a time calls it."""
        known = self._by_block | {one.begin // BLOCK: one for one in objects}
        begins = sorted(known)
        # One assignment, as other threads read it meanwhile.
        self._ordered = (np.array(begins, np.int64), [known[begin] for begin in begins])
        self._by_block = known
        self.blocks = sum(-(-one.info.size // BLOCK) for one in known.values())

    def get(self, block: int) -> Placed | None:
        """Return the object that begins with a block."""
        return self._by_block.get(block)

    def pages(self, blocks: Int64s) -> Int64s:
        """Return masks of all pages of blocks (ascending, int64 ``[n]``); the last block of an object has fewer."""
        begins, objects = self._ordered
        ends = np.array([objects[int(number)].end for number in np.searchsorted(begins, blocks, "right") - 1], np.int64)
        masks: Int64s = (1 << np.minimum(PAGES, -((blocks * BLOCK - ends) // PAGE))) - 1
        return masks

    def of(self, blocks: Int64s) -> list[tuple[Placed, slice]]:
        """Return the objects of some blocks (ascending, int64 ``[n]``), each with the slice of its blocks."""
        begins, objects = self._ordered
        numbers = np.searchsorted(begins, blocks, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(blocks)]
        return [(objects[int(numbers[first])], slice(first, end)) for first, end in pairwise(cuts) if end > first]

    def calls(self, blocks: Int64s, *, alone: bool) -> list[slice]:
        """Group blocks into requests: with a client that takes several objects, consecutive objects share a request.

        Args:
            blocks: Blocks, ascending, int64 ``[n]``.
            alone: Whether each object has a request of its own.
        """
        found: list[slice] = []
        before: Placed | None = None
        paths: set[str] = set()
        for placed, part in self.of(blocks):
            path = placed.info.path
            joins = before is not None and before.client is placed.client and path not in paths
            if joins and not alone and hasattr(placed.client, "get_all"):
                found[-1] = slice(found[-1].start, part.stop)
            else:
                found.append(part)
                paths = set()
            paths.add(path)
            before = placed
        return found


@dataclass
class Counters:
    """Sums since the mirror was opened here; bytes are those of whole pages.

    Args:
        read: Bytes that were read, whether they were there or not.
        fetched: Bytes that came over the network.
        wanted: Fetched bytes that this process had requested.
        evicted: Evicted bytes.
        requests: Requested ranges.
        retries: Repeated requests after a failure.
        damaged: Blocks of the cache, and requests, with other bytes than were written.
        waits: Reads of pages that were not there yet.
        seconds: Seconds of waiting in these reads.
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
        """Add to some counters."""
        with self._lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def said(self) -> dict[str, float]:
        """Return the counters by name."""
        with self._lock:
            return {name: value for name, value in vars(self).items() if name[0] != "_"}


# More pages are evicted than the next ones need, as the choice looks at every block.
_SPARE = 128
# In a full mirror, at most this part of all pages is in flight.
_COMING = 32
# On a full disk, at least so many pages are evicted at once; without any, another process may be evicting.
_FEW, _TRIES, _PAUSE = 64, 20, 0.02


@dataclass(frozen=True)
class Limits:
    """Limits of a mirror.

    Args:
        pages: The most pages that are kept.
        fail: Whether requests that fail are made again for ever ("retry"), or for ``patience`` seconds ("raise").
        patience: Seconds.
    """

    pages: int
    fail: Literal["raise", "retry"]
    patience: float


class Keeper:
    """Writes pages of one process into a mirror.

    Args:
        table: The table of blocks and pages.
        file: The file of bytes.
        memory: The mapped file; None without blocks.
        known: The objects.
        sharer: This process.
        limits: The limits of the mirror.
        counters: The counters of this process.
    """

    def __init__(
        self,
        table: Table,
        file: SparseFile,
        memory: mmap.mmap | None,
        known: Known,
        sharer: Sharer,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self.table, self._file, self.memory, self.known = table, file, memory, known
        self.sharer, self.limits, self.counters = sharer, limits, counters
        self._lock = threading.Lock()
        self._most = limits.pages
        self.in_flight = 0
        """Number of pages being fetched."""
        self.whole = False
        """Whether blocks are fetched as a whole in a full mirror."""
        self._verified = np.zeros(0, np.int64)  # states in which blocks were verified

    def is_full(self) -> bool:
        """Whether new pages replace others, or will soon."""
        # The margin makes the answer stay the same after an eviction.
        return self.table.pages + self.in_flight > self._most - self._most // 8

    def pages(self, blocks: Int64s, masks: Int64s) -> int:
        """Return how many pages the mirror keeps for a request."""
        return len(blocks) * PAGES if self.whole else self.table.count(masks)

    def claim(
        self, blocks: Int64s, masks: Int64s, when: int, *, urgent: bool, steal: bool
    ) -> tuple[Int64s, Int64s] | None:
        """Claim blocks that no process fetches, and make room for them.

        Args:
            blocks: Blocks, ascending, int64 ``[n]``.
            masks: The pages wanted of each, int64 ``[n]``.
            when: The time at which they are read; pages that are needed before stay.
            urgent: Whether a reader waits for them, so that they are fetched without room.
            steal: Whether to take over blocks that another process has been fetching for too long.

        Returns:
            The claimed blocks, ascending, int64 ``[m]``, and the pages to fetch of each; None without room.
        """
        table, me = self.table, self.sharer.number
        if not (masks & ~table.state[blocks]).any():
            return blocks[:0], masks[:0]
        with table.lock:
            table.follow()
            mine = table.claim_for(me, blocks, masks, self.sharer.lives, steal=steal)
            held = blocks[mine]
            masks = masks[mine] & ~table.state[held]
            wanted = table.count(masks)
            if self.whole and self.is_full():
                masks = self.known.pages(held) & ~table.state[held]
            count = table.count(masks)
            gone = self._let_go(count, table.clock + 1 if urgent else when, all_or_none=not urgent)
            if gone is None:
                table.unclaim(me, held)
                return None
            self.in_flight += count
        self.counters.add(wanted=wanted * PAGE)
        self._empty(*gone)
        return held, masks

    def _let_go(self, pages: int, before: int, *, all_or_none: bool) -> tuple[Int64s, Int64s] | None:
        """Evict the pages that are needed last, if the mirror gets too large; the caller holds the table's lock.

        Args:
            pages: Number of new pages.
            before: Pages that are needed until this time stay.
            all_or_none: Whether no page is evicted if that is not enough.

        Returns:
            Blocks, and masks of their pages to be emptied; None if too few pages may be evicted.
        """
        over = self.table.pages + self.in_flight + pages - self._most
        if over <= 0 or not pages:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if all_or_none and self.in_flight > self._most // _COMING:
            return None  # pages that were evicted for more would be fetched again
        most = over + self._most // _SPARE
        blocks, masks = self.table.needed_last(self.sharer.number, most, before, self.sharer.lives)
        freed = self.table.count(self.table.state[blocks] & masks)
        if all_or_none and freed < over:
            return None
        self.table.let_go(self.sharer.number, blocks, masks)
        self.counters.add(evicted=freed * PAGE)
        return blocks, masks

    def _empty(self, blocks: Int64s, masks: Int64s) -> None:
        """Free the disk space of evicted pages; of blocks without pages, all of it."""
        if len(blocks):
            none_left = (self.table.state[blocks] & ALL_PAGES) == 0
            self._file.empty(pages_of(blocks, np.where(none_left, ALL_PAGES, masks)))
            with self.table.lock:
                self.table.unclaim(self.sharer.number, blocks)

    def failed(self, held: Int64s, masks: Int64s) -> None:
        """Give up claimed blocks whose request failed."""
        with self.table.lock:
            self.in_flight -= self.table.count(masks)
            self.table.unclaim(self.sharer.number, held)

    # ------------------------------------------------------------------ bytes

    def store(
        self, held: Int64s, masks: Int64s, came: Runs, contents: Sequence[memoryview], digests: PageChecksums
    ) -> None:
        """Write fetched pages of claimed blocks to their places, and mark them as there.

        Args:
            held: Blocks from ``claim``, ascending, int64 ``[n]``.
            masks: The pages from ``claim``.
            came: The fetched runs of pages.
            contents: The bytes of each run.
            digests: Digests of all pages of the runs, uint32 ``[m]``.
        """
        self._follow()
        before = self.table.state[held]
        # For all pages at once, as most runs are short: their numbers, and the rows of their blocks in ``held``.
        pages = came.pages
        rows = np.minimum(np.searchsorted(held, pages // PAGES), len(held) - 1)
        is_held = held[rows] == pages // PAGES
        places, noted = rows * PAGES + pages % PAGES, digests ^ came.salts()
        if not is_held.all():
            places, noted = places[is_held], noted[is_held]
        self._write(_together(is_held, came, contents))
        checks, is_new = np.zeros((len(held), PAGES), np.uint32), np.zeros((len(held), PAGES), np.bool_)
        checks.reshape(-1)[places], is_new.reshape(-1)[places] = noted, True
        fresh = masks_of(is_new) & ~before
        with self.table.lock:
            after = self.table.arrived(self.sharer.number, held, fresh, checks)
            self.in_flight -= self.table.count(masks)
        known = same_pages(self._verified[held], before, before & ALL_PAGES)
        known &= after == (before | fresh)
        self._verified[held[known]] = after[known]

    def _write(self, parts: list[tuple[memoryview, int]]) -> None:
        """Write bytes to their places; on a full disk, evict pages and lower the limit."""
        tries = _TRIES
        while True:
            try:
                return self._file.write(parts)
            except OSError as error:
                if not is_full(error):
                    raise StorageError(f"cache: expected to write into it, found {error}") from error
                if not tries:
                    raise StorageError(f"cache: expected room on its disk, found it full: {error}") from error
            with self.table.lock:
                # Some room is left: in a file system in memory, even reading a hole takes some.
                self._most = min(self._most, self.table.pages) * 7 // 8
                gone = self._let_go(max(_FEW, self._most // 8), self.table.clock + 1, all_or_none=False)
            if gone is not None and len(gone[0]):
                self._empty(*gone)
            else:
                # Another process is freeing space, or no page is left.
                tries -= 1
                time.sleep(_PAUSE)

    def unverified(self, blocks: Int64s, states: Int64s, masks: Int64s) -> Int64s:
        """Return the blocks with pages that were not verified since they came."""
        self._follow()
        found: Int64s = blocks[~same_pages(self._verified[blocks], states, masks & states)]
        return found

    def _follow(self) -> None:
        """Extend the array to blocks that objects got meanwhile."""
        if len(self._verified) < len(self.table.rows):
            with self._lock:
                self._verified = longer(self._verified, len(self.table.rows))

    def verify(self, blocks: Int64s) -> None:
        """Compare the bytes of some blocks with their digests; evict damaged blocks."""
        states = self.table.state[blocks]
        blocks = self.unverified(blocks, states, states & ALL_PAGES)
        for placed, part in self.known.of(blocks):
            for block in blocks[part].tolist():
                if not self._is_whole(placed, block):
                    self._drop(placed, block)

    def _drop(self, placed: Placed, block: int) -> None:
        """Evict a damaged block, unless a process is fetching pages of it."""
        one, table = np.array([block]), self.table
        with table.lock:
            # Without a claim, no process is changing the digests.
            holder = int(table.claim[block])
            is_free = not holder or not self.sharer.lives(holder)
            damaged = is_free and not self._is_whole(placed, block)
            if damaged:
                table.let_go(self.sharer.number, one, np.array([ALL_PAGES]))
        if damaged:
            self.counters.add(damaged=1)
            self._empty(one, np.array([ALL_PAGES]))

    def _is_whole(self, placed: Placed, block: int) -> bool:
        """Whether the pages of a block have the noted digests; the result is kept."""
        state, checks = int(self.table.state[block]), self.table.check[block].tolist()
        assert self.memory is not None  # as there are blocks
        with memoryview(self.memory) as memory:
            for page, check in enumerate(checks, block * PAGES):
                if state >> page % PAGES & 1:
                    content = memory[page * PAGE : min((page + 1) * PAGE, placed.end)]
                    if int(page_checksums([content], [page - placed.page])[0]) ^ placed.salt != check:
                        return int(self.table.state[block]) & ALL_PAGES == 0
        self._verified[block] = state
        return True


def _together(
    is_held: npt.NDArray[np.bool_], came: Runs, contents: Sequence[memoryview]
) -> list[tuple[memoryview, int]]:
    """Return the held stretches of the received pages: the bytes of each, and their begin.

    For held pages 1, 1, 0, 1, 1, of which one run has four and another run one, the result is pages 0..2 and 3..4 of
    the first run, and the page of the second run.
    """
    if is_held.all():
        return list(zip(contents, (came.firsts * PAGE).tolist(), strict=True))
    begins = np.zeros(len(is_held) + 1, np.bool_)
    begins[came.bounds] = True
    there, before = np.append(is_held, False), np.append(False, is_held)
    firsts = np.flatnonzero(there & (begins | ~before))
    ends = np.flatnonzero(before & (begins | ~there))
    runs = np.searchsorted(came.bounds, firsts, "right") - 1
    skipped = came.bounds[runs]
    places = ((came.firsts[runs] + firsts - skipped) * PAGE).tolist()
    cuts = zip(runs.tolist(), ((firsts - skipped) * PAGE).tolist(), ((ends - skipped) * PAGE).tolist(), strict=True)
    return [(contents[run][begin:end], place) for (run, begin, end), place in zip(cuts, places, strict=True)]


def longer(values: Int64s, size: int) -> Int64s:
    """Return the values with zeros behind them, int64 ``[size]``; zeros take no memory until they are written."""
    found: Int64s = sparse_zeros(max(size, len(values)), np.int64)
    found[: len(values)] = values
    return found
