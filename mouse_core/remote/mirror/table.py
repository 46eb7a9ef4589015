"""The state that processes share for a mirror, and the work of one process on it.

The state consists of the numbers of processes, a sparse file of bytes, a table of its blocks, and the offsets of
objects. A process claims blocks, evicts pages, writes bytes, and verifies pages that other processes wrote.

A mirror is divided into blocks of 64 KB, and each block into 16 pages of 4 KB. Presence and eviction are tracked per
page, by one bit in the block's mask; fetches in progress are tracked per block.

Rows of the table are changed under a lock and read without one; each word is written atomically. A process that fetches
a block claims it, writes the bytes, and then marks the pages as present. A process that is killed in between leaves a
claim, which is void, as no process has its number.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo
from mouse_core._base.memory import sparse_zeros
from mouse_core.errors import DataError, StorageError
from mouse_core.files.checksum import PAGE, PageChecksums, checksum, digest, page_checksums
from mouse_core.files.locking import Descriptor, FileLock, is_at, lock
from mouse_core.files.mapped import fence, mapped, open_file, set_aside
from mouse_core.files.writing import write_all
from mouse_core.readahead import ragged
from mouse_core.remote.clients import ObjectClient, ObjectInfo

Int64s = npt.NDArray[np.int64]

PAGES = 16
BLOCK = PAGE * PAGES
ALL_PAGES = (1 << PAGES) - 1
# Two pages with at most this number of pages between them are fetched by one request, as a second request would take
# longer.
_GAP_PAGES = 16
# The most pages of a request: one connection is slower than several together.
_LONGEST_RUN = 256


def touched(begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """Return the blocks that ranges of bytes touch, and the masks of the touched pages.

    Bytes 5,000 to 9,000 lie in pages 1 and 2 of block 0: its mask is 0b110. Bytes 65,540 to 65,550 lie in page 16, the
    first of block 1: its mask is 0b1.

    Args:
        begins: The begins of the ranges, ascending, int64 ``[n]``.
        ends: The ends of the ranges. Each end is behind the begin of its range, and not behind the end of the next
            range.

    Returns:
        Blocks, ascending, int64 ``[m]``, and masks, int64 ``[m]``.
    """
    # Computed per range, as there are many more pages than ranges.
    first, last = begins // PAGE, (ends - 1) // PAGE
    blocks, low, high = first // PAGES, first % PAGES, last % PAGES
    more = last // PAGES - blocks
    if more.any():
        whose, number = ragged(more + 1)
        blocks = blocks[whose] + number
        low, high = np.where(number == 0, low[whose], 0), np.where(number == more[whose], high[whose], PAGES - 1)
    return _united(blocks, (2 << high) - (1 << low))


def by_block(pages: Int64s) -> tuple[Int64s, Int64s]:
    """Return the blocks of ``pages`` (ascending, int64 ``[n]``), and the mask of these pages in each block."""
    return _united(pages // PAGES, 1 << pages % PAGES)


def _united(blocks: Int64s, masks: Int64s) -> tuple[Int64s, Int64s]:
    """Return each of ``blocks`` (ascending, int64 ``[n]``) once, with the union of its masks."""
    if len(blocks) < 2:
        return blocks, masks
    is_head = np.empty(len(blocks), np.bool_)
    is_head[0] = True
    np.not_equal(blocks[1:], blocks[:-1], out=is_head[1:])
    (heads,) = is_head.nonzero()
    return (blocks, masks) if len(heads) == len(blocks) else (blocks[heads], np.bitwise_or.reduceat(masks, heads))


def joined(parts: Sequence[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    """Return the union of several pairs of blocks and masks, ascending: (2, 0b1) and (2, 0b100) become (2, 0b101)."""
    if len(parts) == 1:
        return parts[0]
    blocks, masks = (np.concatenate(some) for some in zip(*parts, strict=True))
    order = np.argsort(blocks, kind="stable")
    return _united(blocks[order], masks[order])


def bits(masks: Int64s) -> npt.NDArray[np.bool_]:
    """Return the bits of masks, a bool for each page, ``[n, 16]``."""
    each: npt.NDArray[Any] = np.unpackbits(masks.astype("<u2").view(np.uint8), bitorder="little")
    return each.view(np.bool_).reshape(-1, PAGES)


def masks_of(bits: npt.NDArray[np.bool_]) -> Int64s:
    """Return the masks with these bits, int64 ``[n]``; the inverse of the function ``bits``."""
    masks: Int64s = np.packbits(bits, bitorder="little").view("<u2").astype(np.int64)
    return masks


def pages_of(blocks: Int64s, masks: Int64s) -> Int64s:
    """Return the pages in masks, ascending if ``blocks`` are: pages 32 and 34 for block 2 and mask 0b101."""
    (place,) = bits(masks).reshape(-1).nonzero()
    found: Int64s = (blocks * PAGES)[place // PAGES] + place % PAGES
    return found


def runs(pages: Int64s) -> tuple[Int64s, Int64s]:
    """Return runs that contain ``pages`` (ascending, int64 ``[n]``): the first page of each, and the page behind its
    last.

    Pages 3, 4, 9 and 40 are two runs, 3 to 10 and 40 to 41: between 4 and 9 lie fewer than 16 pages.
    """
    ends = np.flatnonzero(np.diff(pages) > _GAP_PAGES + 1)
    firsts = pages[np.concatenate([[0], ends + 1])]
    behind = pages[np.concatenate([ends, [len(pages) - 1]])] + 1
    pieces = -((firsts - behind) // _LONGEST_RUN)
    if (pieces == 1).all():
        return firsts, behind
    run, number = ragged(pieces)
    cut = firsts[run] + number * _LONGEST_RUN
    return cut, np.minimum(cut + _LONGEST_RUN, behind[run])


def ascending(begins: Sequence[int] | Int64s, ends: Sequence[int] | Int64s) -> tuple[Int64s, Int64s]:
    """Return ranges sorted by their begin, without empty ranges; ranges that touch are merged."""
    first, last = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
    order = np.argsort(first, kind="stable")
    order = order[last[order] > first[order]]
    first, reached = first[order], np.maximum.accumulate(last[order])
    heads = np.flatnonzero(np.concatenate([[len(first) > 0], first[1:] > reached[:-1]]))
    return first[heads], np.maximum.reduceat(reached, heads) if len(heads) else heads


def pieces(sizes: Int64s, most: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive groups of ``sizes`` that sum to at most ``most``: the index of the first, and the index behind
    the last. A larger size is a group of its own.
    """
    first = 0
    reached = np.cumsum(sizes)
    while first < len(sizes):
        before = int(reached[first] - sizes[first])
        behind = max(first + 1, int(np.searchsorted(reached, before + most, "right")))
        yield first, behind
        first = behind


# Seconds for which the finding that another process lives is reused.
_SECONDS = 0.05


class Sharer(Descriptor):
    """A process that shares a mirror, represented by a locked file whose name is the number of the process.

    A forked child closes the file of its parent; otherwise the lock would outlive the parent.

    Args:
        folder: The folder of the files of all sharers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked: dict[int, float] = {}
        folder.mkdir(exist_ok=True)
        while True:
            self.number = random.SystemRandom().getrandbits(62) + 1
            self._path = folder / f"{self.number:x}"
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
            lock(self._file, wait=True)
            if is_at(self._path, self._file):  # no other process removed the file as that of a dead process
                break
            self.close()
        _MINE.add(self)

    def lives(self, number: int) -> bool:
        """Whether the process with this number still runs; the file of an ended process is removed."""
        if number == self.number:
            return True
        now = time.monotonic()
        if now - self._looked.get(number, -_SECONDS) < _SECONDS:
            return True
        path = self._folder / f"{number:x}"
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            self._looked.pop(number, None)
            return False
        try:
            if lock(file, wait=False) is False:
                self._looked[number] = now
                return True
            path.unlink(missing_ok=True)
        finally:
            os.close(file)
        self._looked.pop(number, None)
        return False

    def remove_dead(self) -> None:
        """Remove the files of processes that were killed."""
        for path in self._folder.iterdir():
            with suppress(ValueError):
                self.lives(int(path.name, 16))

    def leave(self) -> None:
        """Remove the file of this process, which no longer shares the mirror."""
        if self._file >= 0:
            with suppress(OSError):
                self._path.unlink()
            self.close()


_MINE: weakref.WeakSet[Sharer] = weakref.WeakSet()


def _forked() -> None:
    for sharer in list(_MINE):
        sharer.close()
    _MINE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MACOS_PUNCH = 99
# FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE: free disk space, and keep the size of the file.
_LINUX_PUNCH = 3


class SparseFile(Descriptor):
    """A file with holes.

    Args:
        path: The file; created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, create=not path.exists())

    @property
    def size(self) -> int:
        """The size of the file in bytes, including holes."""
        return os.fstat(self._file).st_size

    def lengthen(self, size: int) -> None:
        """Extend the file to ``size`` bytes by a hole; a longer file stays."""
        os.ftruncate(self._file, max(size, self.size))

    def map(self) -> mmap.mmap:
        """Map the whole file as memory without readahead; later writes are visible in it."""
        # No code writes to the map, but the system frees parts of writable maps only.
        memory = mmap.mmap(self._file, self.size)
        if hasattr(memory, "madvise"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_RANDOM)
        return memory

    def write(self, parts: list[tuple[memoryview, int]]) -> None:
        """Write pairs of bytes and offset; written pairs are removed from the list.

        Raises:
            OSError: The disk is full.
        """
        while parts:
            content, begin = parts.pop()
            try:
                written = os.pwrite(self._file, content, begin)
            except OSError:
                parts.append((content, begin))
                raise
            if written < len(content):
                parts.append((content[written:], begin + written))

    def empty(self, pages: Int64s) -> None:
        """Free the disk space of ``pages`` (ascending, int64 ``[n]``), which become zeros, if the system supports
        holes.
        """
        if not len(pages):
            return
        heads = np.concatenate([[0], np.flatnonzero(np.diff(pages) > 1) + 1])
        behind = np.concatenate([heads[1:], [len(pages)]])
        for first, last in zip(pages[heads].tolist(), pages[behind - 1].tolist(), strict=True):
            self._punch(first * PAGE, (last + 1 - first) * PAGE)

    def _punch(self, begin: int, size: int) -> None:
        # On other systems, the space is reused when the page is fetched again.
        if sys.platform == "linux":
            if (punch := _fallocate()) is not None:
                # ``madvise`` cannot free parts of system pages, which are larger than 4 KB on some machines.
                punch(self._file, _LINUX_PUNCH, begin, size)
        elif sys.platform == "darwin":
            import fcntl

            with suppress(OSError):
                fcntl.fcntl(self._file, _MACOS_PUNCH, struct.pack("IIqq", 0, 0, begin, size))


@cache
def _fallocate() -> Any:
    """Return the system function ``fallocate``; None if the system lacks it."""
    library = ctypes.CDLL(None)
    found = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, a quota or a file is full."""
    return error.errno in _FULL


def address_of(memory: mmap.mmap) -> int:
    """Return the address of mapped memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


FORMAT = 1
_MAGIC = int.from_bytes(b"mousepg1", "little")
_HEADER = 4096
# state: the lowest 16 bits are the mask of present pages; above them, 3 bits for each page count its evictions, modulo
# 8. claim: the number of the process that fetches the block. when: the lowest 32 bits of the time of each page's next
# use if it was requested, else a time long ago, later for pages used later. check: each page's digest XOR its object's
# salt.
_ROW = np.dtype([("state", "<i8"), ("claim", "<i8"), ("when", "<i4", PAGES), ("check", "<u4", PAGES)])
_SMALLEST = (1 << 30) // BLOCK
# Larger than every distance between two times.
_FAR = (1 << 31) - 1
# How late a page may be read, in batches: its reader may be slower than others, or may have waited.
_LATE = 512
# The number of batches for which pages that were read may still be copied by their reader.
_COPIED = 16
# Pages to evict are searched in at most this many blocks: a longer search would hardly find better pages.
_LOOKED_AT = 1 << 17
# The highest bit of each 3-bit counter of ``state``.
_HIGH = np.uint64(0x9249249249240000)


def folder_of(cache: Path) -> Path:
    """Return the folder of a mirror of this format in a cache."""
    return cache / f"mirror-{FORMAT}"


class Table(Descriptor):
    """The shared table of a mirror.

    Args:
        folder: The folder of the table; an empty table is created if there is none.
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
            # The clock starts late enough that time 0, of pages that were never used, is long ago.
            self.header[1:] = [_LATE + 1, *([0] * (len(self.header) - 2))]
            self.header[0] = _MAGIC

    def _map(self) -> None:
        size = os.fstat(self._file).st_size
        self._memory: mmap.mmap = mapped(self._file, size, write=True)
        self.header: Int64s = np.frombuffer(self._memory, np.int64, 8)
        rows: npt.NDArray[Any] = np.frombuffer(self._memory, _ROW, (size - _HEADER) // _ROW.itemsize, _HEADER)
        self.rows = rows
        self.state: Int64s = rows["state"]
        self.claim: Int64s = rows["claim"]
        self.when: npt.NDArray[np.int32] = rows["when"]
        self.check: npt.NDArray[np.uint32] = rows["check"]

    @property
    def clock(self) -> int:
        """The time: the number of batches that all processes have read."""
        return int(self.header[1])

    def tick(self, count: int) -> None:
        """Count ``count`` read batches; of two concurrent calls, one may be lost."""
        self.header[1] += count

    @property
    def pages(self) -> int:
        """Number of present pages."""
        return int(self.header[2])

    @property
    def blocks(self) -> int:
        """Number of blocks given to objects."""
        return int(self.header[3])

    @property
    def room(self) -> int:
        """Size of the file of bytes, in blocks."""
        return int(self.header[4])

    def grow(self, blocks: int, lengthen: Callable[[int], None]) -> None:
        """Raise the number of blocks of objects to ``blocks``; the caller holds the lock.

        Args:
            blocks: The new number of blocks.
            lengthen: Extends the file of bytes to a number of blocks.
        """
        if blocks > self.room:
            room = max(_SMALLEST, 1 << (blocks - 1).bit_length())
            lengthen(room)
            # Disk space for the rows is reserved before objects get the blocks, so writes to mapped rows never fail.
            os.ftruncate(self._file, max(_HEADER + room * _ROW.itemsize, os.fstat(self._file).st_size))
            self.header[4] = room
        set_aside(self._file, _HEADER + blocks * _ROW.itemsize, begin=_HEADER + self.blocks * _ROW.itemsize)
        self.header[3] = blocks
        self.follow()

    def follow(self) -> None:
        """Map rows that other processes added."""
        if len(self.rows) < self.room:
            self._map()

    @staticmethod
    def count(masks: Int64s) -> int:
        """Return the number of pages of all masks."""
        return int(_sizes()[masks].sum(dtype=np.int64))

    @staticmethod
    def sizes(masks: Int64s) -> Int64s:
        """Return the number of pages of each mask, int64 ``[n]``."""
        return _sizes()[masks].astype(np.int64)

    # ------------------------------------------------------------------ fetching

    def claim_for(
        self, me: int, blocks: Int64s, masks: Int64s, lives: Callable[[int], bool], *, steal: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Claim the blocks that lack wanted pages and that no process fetches; the caller holds the lock.

        Args:
            me: The number of the calling process.
            blocks: The blocks, ascending, int64 ``[n]``.
            masks: The pages wanted of each, int64 ``[n]``.
            lives: Returns whether a process still runs, so that its claim holds.
            steal: Whether to take over blocks that running processes have claimed.

        Returns:
            Whether each block was claimed, bool ``[n]``.
        """
        holder = self.claim[blocks]
        free: npt.NDArray[np.bool_] = holder == 0
        for other in np.unique(holder[~free & (holder != me)]).tolist():
            if steal or not lives(other):
                free |= holder == other
        free &= (masks & ~self.state[blocks]) != 0
        self.claim[blocks[free]] = me
        return free

    def arrived(self, me: int, blocks: Int64s, masks: Int64s, checks: npt.NDArray[np.uint32]) -> Int64s:
        """Mark pages of claimed blocks as present, and release the claims; the caller holds the lock.

        Args:
            me: The number of the process that claimed the blocks.
            blocks: The blocks, ascending, int64 ``[n]``.
            masks: The new pages, int64 ``[n]``, without pages that were present.
            checks: The entry ``check`` of each page, uint32 ``[n, 16]``.

        Returns:
            The states of the blocks, int64 ``[n]``; 0 for blocks that another process had taken over.
        """
        mine = self.claim[blocks] == me
        blocks, masks = blocks[mine], masks[mine]
        came = bits(masks)
        self.check[blocks] = np.where(came, checks[mine], self.check[blocks])
        # Pages that no process requested count as used now.
        unused = came & (self._until(blocks) <= -_LATE)
        self.when[blocks] = np.where(unused, _low(self.clock - _LATE), self.when[blocks])
        fence()
        self.state[blocks] |= masks
        self.header[2] += self.count(masks)
        self.claim[blocks] = 0
        states = np.zeros(len(mine), np.int64)
        states[mine] = self.state[blocks]
        return states

    def unclaim(self, me: int, blocks: Int64s) -> None:
        """Release claims of this process on ``blocks``; the caller holds the lock."""
        self.claim[blocks[self.claim[blocks] == me]] = 0

    # ------------------------------------------------------------------ using

    def ask(self, pages: Int64s, when: int | Int64s) -> None:
        """Record the time of the next use of pages: one time for all, or one for each. Of a repeated page the last one
        counts.

        Other processes may write at the same moment, without a lock, as the times are estimates.
        """
        place = pages // PAGES, pages % PAGES
        known = self.when[place] - _low(self.clock)
        self.when[place] = np.where((known > 0) & (known < when - self.clock), self.when[place], _low(when))

    def use(self, pages: Int64s, again: Int64s) -> None:
        """Record that pages were used, and the time of the next use of each, int64 ``[n]``: the current time if
        unknown.
        """
        now = self.clock
        self.when[pages // PAGES, pages % PAGES] = _low(np.where(again > now, again, now - _LATE + _COPIED))

    def _until(self, blocks: Int64s) -> npt.NDArray[np.int32]:
        """Return the number of batches until the next use of each page, int32 ``[n, 16]``.

        The number is below 0 for an overdue use, and -512 or less some time after the last use.
        """
        until: npt.NDArray[np.int32] = self.when[blocks] - _low(self.clock)  # correct across wrap-around
        return until

    # ------------------------------------------------------------------ letting go

    def needed_last(self, me: int, pages: int, before: int, lives: Callable[[int], bool]) -> tuple[Int64s, Int64s]:
        """Return up to ``pages`` pages to evict, least needed first; the caller holds the lock.

        Pages of unknown next use come first, beginning with the longest unused. Pages with the latest next use follow.
        Pages whose next use was expected not long ago come last, as their reader may be late. Pages of blocks that a
        dead process had claimed are returned in addition.

        Example, at time 100: three pages of unknown next use were last used at 40, 70 and 95, and three pages have the
        next use 109, 112 and 130. The order is 40, 70, 130, 112, 109, 95, as the last page may still be copied.

        Args:
            me: The number of the calling process.
            pages: The number of pages.
            before: Pages whose next use is at this time or earlier stay.
            lives: Returns whether a process's claim holds.

        Returns:
            The blocks of the pages, ascending, int64 ``[n]``, and their masks.
        """
        states, claims = self.state[: self.blocks], self.claim[: self.blocks]
        sizes = _sizes()[states & ALL_PAGES]
        # A killed process may have changed a state and not the sum.
        self.header[2] = int(sizes.sum(dtype=np.int64))
        claimed = np.flatnonzero(claims)
        dead = [claimed[claims[claimed] == one] for one in np.unique(claims[claimed]).tolist() if not lives(one)]
        left = np.concatenate([np.zeros(0, np.int64), *dead])
        blocks = np.flatnonzero((sizes > 0) & (claims == 0))
        if len(blocks) > _LOOKED_AT:
            # Each search begins where the last one ended.
            blocks = np.roll(blocks, -(int(self.header[5]) % len(blocks)))[:_LOOKED_AT]
            self.header[5] += _LOOKED_AT
        until = self._until(blocks).reshape(-1)
        allowed = (until <= 0) | (until > before - self.clock)
        found = np.flatnonzero(allowed & bits(states[blocks]).reshape(-1))
        if pages < len(found):
            until = until[found]
            # Smaller values are evicted first: a late next use gives a small value.
            order = np.where(until > -_LATE, _FAR - np.maximum(until, 0), until)
            found = found[np.argpartition(order, pages)[:pages]]
        gone, masks = by_block(np.sort(blocks[found // PAGES] * PAGES + found % PAGES))
        gone, masks = np.append(gone, left), np.append(masks, np.full(len(left), ALL_PAGES))
        order = np.argsort(gone)
        return gone[order], masks[order]

    def let_go(self, me: int, blocks: Int64s, masks: Int64s) -> None:
        """Mark pages as absent, and claim their blocks until their bytes are freed; the caller holds the lock."""
        self.claim[blocks] = me
        state = self.state[blocks]
        self.header[2] -= self.count(state & masks)
        counts = (state & _counts()[masks]).view(np.uint64)
        # Each counter grows by one, without a carry into the next counter.
        more = (counts & ~_HIGH) + _ones()[masks] ^ (counts & _HIGH)
        self.state[blocks] = (state & ~(masks | _counts()[masks])) | more.view(np.int64)
        fence()


def same_pages(states: Int64s, others: Int64s, masks: Int64s) -> npt.NDArray[np.bool_]:
    """Whether both states agree on the presence and the evictions of the pages in ``masks``, bool ``[n]``."""
    same: npt.NDArray[np.bool_] = (states ^ others) & (masks | _counts()[masks]) == 0
    return same


def _low(times: Any) -> Any:
    """Return the lowest 32 bits of times, int32."""
    return np.asarray(times, np.int64).astype(np.int32)


@cache
def _sizes() -> npt.NDArray[np.uint8]:
    """Return the number of pages of every possible mask, uint8 ``[65536]``."""
    sizes = np.zeros(ALL_PAGES + 1, np.uint8)
    for page in range(PAGES):
        sizes += (np.arange(ALL_PAGES + 1) >> page & 1).astype(np.uint8)
    return sizes


@cache
def _ones() -> npt.NDArray[np.uint64]:
    """Return for every mask the lowest bit of the counters of its pages, uint64 ``[65536]``."""
    ones = np.zeros(ALL_PAGES + 1, np.uint64)
    for page in range(PAGES):
        ones |= (np.arange(ALL_PAGES + 1) >> page & 1).astype(np.uint64) << np.uint64(PAGES + 3 * page)
    return ones


@cache
def _counts() -> Int64s:
    """Return for every mask all three bits of the counters of its pages, int64 ``[65536]``."""
    return (_ones() * np.uint64(7)).view(np.int64)


# A number of pages that exceeds every mirror.
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

    def add(self, objects: Sequence[Placed]) -> None:
        """Add objects; one thread at a time calls it."""
        known = self._by_block | {one.begin // BLOCK: one for one in objects}
        begins = sorted(known)
        # One assignment, as other threads read it meanwhile.
        self._ordered = (np.array(begins, np.int64), [known[begin] for begin in begins])
        self._by_block = known

    def get(self, block: int) -> Placed | None:
        """Return the object that begins with a block."""
        return self._by_block.get(block)

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
    """Sums since this process opened the mirror; bytes count whole pages.

    Args:
        read: Bytes that were read, present or not.
        fetched: Bytes that came over the network.
        wanted: Fetched bytes that this process had requested.
        evicted: Evicted bytes.
        requests: Requested ranges.
        retries: Repeated requests after a failure.
        damaged: Blocks of the cache, and requests, whose bytes differ from the written bytes.
        waits: Reads that waited for absent pages.
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
# On a full disk, at least this many pages are evicted at once; if none can be evicted, another process may be evicting.
_FEW, _TRIES, _PAUSE = 64, 20, 0.02


@dataclass(frozen=True)
class Limits:
    """Limits of a mirror.

    Args:
        pages: The most pages that are kept.
        fail: Whether failed requests are repeated without end ("retry"), or for ``patience`` seconds ("raise").
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
        self._verified = np.zeros(0, np.int64)  # states in which blocks were verified

    def is_full(self) -> bool:
        """Whether new pages replace others, or will soon."""
        # The margin makes the answer stay the same after an eviction.
        return self.table.pages + self.in_flight > self._most - self._most // 8

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
            count = table.count(masks)
            gone = self._let_go(count, table.clock + 1 if urgent else when, all_or_none=not urgent)
            if gone is None:
                table.unclaim(me, held)
                return None
            self.in_flight += count
        self.counters.add(wanted=count * PAGE)
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
        assert self.memory is not None  # one entry for each block
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
