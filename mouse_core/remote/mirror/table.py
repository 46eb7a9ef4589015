"""The state that the processes of a mirror share, and the operations of one process on this state.

The state consists of a number for each process that shares the mirror, a sparse file of bytes, a table of its blocks,
and the offsets of objects. A process claims blocks, evicts pages, writes bytes, and verifies pages of other processes.

A mirror is divided into blocks of 64 KB, and each block into 16 pages of 4 KB. Presence and eviction are tracked per
page, by one bit in the block's mask; fetches in progress are tracked per block.

Rows of the table are changed under a lock and read without a lock; each word is written atomically. A process that
fetches a block claims the block, writes the bytes, and then marks the pages as present. If a process is killed between
these steps, its claim is void, because the number in the claim belongs to no running process.
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
from mouse_core.remote.clients import ObjectInfo

Int64s = npt.NDArray[np.int64]

PAGES = 16
BLOCK = PAGE * PAGES
ALL_PAGES = (1 << PAGES) - 1
# Two pages with at most this number of pages between them are fetched by one request, because a second request would
# take longer.
_GAP_PAGES = 16
# Largest number of pages in a request, because several connections together are faster than one connection.
_LONGEST_RUN = 256


def touched(begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """Return the blocks that byte ranges touch, and the masks of the touched pages.

    Example: the bytes 5,000 to 9,000 lie in the pages 1 and 2 of block 0, whose mask is 0b110. The bytes 65,540 to
    65,550 lie in page 16, the first page of block 1, whose mask is 0b1.

    Args:
        begins: The starts of the ranges, ascending, int64 ``[n]``.
        ends: The ends of the ranges. Each end is larger than the start of its range, and at most the end of the next
            range.

    Returns:
        Blocks, ascending, int64 ``[m]``, and masks, int64 ``[m]``.
    """
    # Computed per range, because there are many more pages than ranges.
    first, last = begins // PAGE, (ends - 1) // PAGE
    blocks, low, high = first // PAGES, first % PAGES, last % PAGES
    more = last // PAGES - blocks
    if more.any():
        whose, number = ragged(more + 1)
        blocks = blocks[whose] + number
        low, high = np.where(number == 0, low[whose], 0), np.where(number == more[whose], high[whose], PAGES - 1)
    return _united(blocks, (2 << high) - (1 << low))


def by_block(pages: Int64s) -> tuple[Int64s, Int64s]:
    """Return the blocks of ``pages`` (ascending, int64 ``[n]``), and the mask of the pages in each block."""
    return _united(pages // PAGES, 1 << pages % PAGES)


def _united(blocks: Int64s, masks: Int64s) -> tuple[Int64s, Int64s]:
    """Return the distinct ``blocks`` (ascending, int64 ``[n]``), each with the union of all masks given for the
    block.
    """
    if len(blocks) < 2:
        return blocks, masks
    is_head = np.empty(len(blocks), np.bool_)
    is_head[0] = True
    np.not_equal(blocks[1:], blocks[:-1], out=is_head[1:])
    (heads,) = is_head.nonzero()
    return (blocks, masks) if len(heads) == len(blocks) else (blocks[heads], np.bitwise_or.reduceat(masks, heads))


def joined(parts: Sequence[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    """Return the union of several pairs of blocks and masks, with ascending blocks: (2, 0b1) and (2, 0b100) become (2,
    0b101).
    """
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
    """Return the masks with the given bits, int64 ``[n]``; the inverse of the function ``bits``."""
    masks: Int64s = np.packbits(bits, bitorder="little").view("<u2").astype(np.int64)
    return masks


def pages_of(blocks: Int64s, masks: Int64s) -> Int64s:
    """Return the pages in masks, ascending if ``blocks`` are ascending: block 2 with mask 0b101 has the pages 32 and
    34.
    """
    (place,) = bits(masks).reshape(-1).nonzero()
    found: Int64s = (blocks * PAGES)[place // PAGES] + place % PAGES
    return found


def runs(pages: Int64s) -> tuple[Int64s, Int64s]:
    """Return runs that contain ``pages`` (ascending, int64 ``[n]``): the first page of each run, and its end (one past
    its last page).

    Example: the pages 3, 4, 9 and 40 give two runs, 3 to 10 and 40 to 41, because fewer than 16 pages lie between 4 and
    9.
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
    """Return ranges sorted by their start, without empty ranges; adjacent and overlapping ranges are merged."""
    first, last = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
    order = np.argsort(first, kind="stable")
    order = order[last[order] > first[order]]
    first, reached = first[order], np.maximum.accumulate(last[order])
    heads = np.flatnonzero(np.concatenate([[len(first) > 0], first[1:] > reached[:-1]]))
    return first[heads], np.maximum.reduceat(reached, heads) if len(heads) else heads


def pieces(sizes: Int64s, most: int) -> Iterator[tuple[int, int]]:
    """Divide ``sizes`` into consecutive groups, each with a sum of at most ``most``; yield the first index and the end
    index of each group. A size above ``most`` is a separate group.
    """
    first = 0
    reached = np.cumsum(sizes)
    while first < len(sizes):
        before = int(reached[first] - sizes[first])
        behind = max(first + 1, int(np.searchsorted(reached, before + most, "right")))
        yield first, behind
        first = behind


# Seconds for which the result that another process is running is reused.
_SECONDS = 0.05


class Sharer(Descriptor):
    """A process that shares a mirror, represented by a locked file whose name is the process's number.

    A forked child closes the parent's file; otherwise the file would stay locked after the parent's end.

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
            # no other process removed the file, mistaking it for the file of a dead process
            if is_at(self._path, self._file):
                break
            self.close()
        _MINE.add(self)

    def lives(self, number: int) -> bool:
        """Return whether the process with this number is running; the file of an ended process is removed."""
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
        """Remove the file of this process; the process then no longer shares the mirror."""
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
# FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE: release disk space and keep the size of the file.
_LINUX_PUNCH = 3


class SparseFile(Descriptor):
    """A sparse file.

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
        """Extend the file to ``size`` bytes by a hole; a longer file is unchanged."""
        os.ftruncate(self._file, max(size, self.size))

    def map(self) -> mmap.mmap:
        """Map the complete file to memory without readahead; later writes to the file are visible in the map."""
        # No code writes to the map, but the system releases parts of writable maps only.
        memory = mmap.mmap(self._file, self.size)
        if hasattr(memory, "madvise"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_RANDOM)
        return memory

    def write(self, parts: list[tuple[memoryview, int]]) -> None:
        """Write pairs of bytes and offset to the file; written pairs are removed from the list.

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
        """If the system supports holes in files, release the disk space of ``pages`` (ascending, int64 ``[n]``); these
        pages then read as zeros.
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
# use if it was requested, else a time long ago, later for pages used later. check: the checksum of each page, XOR the
# salt of the page's object.
_ROW = np.dtype([("state", "<i8"), ("claim", "<i8"), ("when", "<i4", PAGES), ("check", "<u4", PAGES)])
_SMALLEST = (1 << 30) // BLOCK
# Larger than every distance between two times.
_FAR = (1 << 31) - 1
# The number of batches by which a page may be read late, because its reader may be slower than other readers or may
# have waited.
_LATE = 512
# The number of batches after a read during which the reader may still copy the pages.
_COPIED = 16
# Largest number of blocks in which pages to evict are searched; a longer search would hardly find better pages.
_LOOKED_AT = 1 << 17
# The highest bit of each 3-bit counter of ``state``.
_HIGH = np.uint64(0x9249249249240000)


def folder_of(cache: Path) -> Path:
    """Return the folder, in a cache, of a mirror in the present format."""
    return cache / f"mirror-{FORMAT}"


class Table(Descriptor):
    """The shared table of a mirror.

    Args:
        folder: The folder of the table; an empty table is created if the table is missing.
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
            # The clock starts late enough that time 0, the time of pages that were never used, is long ago.
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
        """The current time: the number of batches that all processes together have read."""
        return int(self.header[1])

    def tick(self, count: int) -> None:
        """Advance the time by ``count`` read batches; if two calls are concurrent, one of the calls can have no
        effect."""
        self.header[1] += count

    @property
    def pages(self) -> int:
        """Number of present pages."""
        return int(self.header[2])

    @property
    def blocks(self) -> int:
        """Number of blocks that are assigned to objects."""
        return int(self.header[3])

    @property
    def room(self) -> int:
        """Size of the sparse file in blocks."""
        return int(self.header[4])

    def grow(self, blocks: int, lengthen: Callable[[int], None]) -> None:
        """Increase the number of assigned blocks to ``blocks``; the caller holds the lock.

        Args:
            blocks: The new number of assigned blocks.
            lengthen: Function that extends the sparse file to a number of blocks.
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
        """Map the rows of the table that other processes added."""
        if len(self.rows) < self.room:
            self._map()

    @staticmethod
    def count(masks: Int64s) -> int:
        """Return the total number of pages in all masks."""
        return int(_sizes()[masks].sum(dtype=np.int64))

    @staticmethod
    def sizes(masks: Int64s) -> Int64s:
        """Return the number of pages in each mask, int64 ``[n]``."""
        return _sizes()[masks].astype(np.int64)

    # ------------------------------------------------------------------ fetching

    def claim_for(
        self, me: int, blocks: Int64s, masks: Int64s, lives: Callable[[int], bool], *, steal: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Claim the blocks that lack requested pages and that no process is fetching; the caller holds the lock.

        Args:
            me: The number of the calling process.
            blocks: The blocks, ascending, int64 ``[n]``.
            masks: A bit mask of the requested pages for each block, int64 ``[n]``.
            lives: Function that returns whether a process is running, so that its claim is valid.
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
            masks: The new pages of each block, int64 ``[n]``, without pages that were already present.
            checks: The entry ``check`` of each page, uint32 ``[n, 16]``.

        Returns:
            The states of the blocks, int64 ``[n]``; 0 for blocks that another process has taken over.
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
        """Release this process's claims on ``blocks``; the caller holds the lock."""
        self.claim[blocks[self.claim[blocks] == me]] = 0

    # ------------------------------------------------------------------ using

    def ask(self, pages: Int64s, when: int | Int64s) -> None:
        """Record the time of the next use of pages: one time for all pages, or a time for each page. If a page is given
        more than once, the last time is recorded.

        Other processes may write concurrently without a lock, because times are estimates.
        """
        place = pages // PAGES, pages % PAGES
        known = self.when[place] - _low(self.clock)
        self.when[place] = np.where((known > 0) & (known < when - self.clock), self.when[place], _low(when))

    def use(self, pages: Int64s, again: Int64s) -> None:
        """Record that pages were used, and the time of each page's next use, int64 ``[n]``: the current time if the
        next use is unknown.
        """
        now = self.clock
        self.when[pages // PAGES, pages % PAGES] = _low(np.where(again > now, again, now - _LATE + _COPIED))

    def _until(self, blocks: Int64s) -> npt.NDArray[np.int32]:
        """Return the number of batches until the next use of each page, int32 ``[n, 16]``.

        The number is negative if the expected use is overdue; -512 or less marks a page that no process expects to use.
        """
        until: npt.NDArray[np.int32] = self.when[blocks] - _low(self.clock)  # correct across wrap-around
        return until

    # ------------------------------------------------------------------ evicting

    def needed_last(self, me: int, pages: int, before: int, lives: Callable[[int], bool]) -> tuple[Int64s, Int64s]:
        """Return up to ``pages`` pages to evict, the least needed pages first; the caller holds the lock.

        The first pages are pages whose next use is unknown, longest unused first. The next pages in the order are pages
        whose next use is known, latest next use first. The last pages are pages whose next use was expected recently,
        because their reader may be late. In addition, pages of blocks that a dead process had claimed are returned.

        Example, at time 100: three pages of unknown next use were last used at 40, 70 and 95, and three pages have the
        next use 109, 112 and 130. The order is 40, 70, 130, 112, 109, 95: the page of time 95 is last, because its
        reader may still be copying it.

        Args:
            me: The number of the calling process.
            pages: The number of pages.
            before: Pages whose next use is at this time or earlier are not evicted.
            lives: Function that returns whether a process is running, so that its claim is valid.

        Returns:
            The blocks of the pages, ascending, int64 ``[n]``, and their masks.
        """
        states, claims = self.state[: self.blocks], self.claim[: self.blocks]
        sizes = _sizes()[states & ALL_PAGES]
        # A killed process may have changed a state without updating the sum.
        self.header[2] = int(sizes.sum(dtype=np.int64))
        claimed = np.flatnonzero(claims)
        dead = [claimed[claims[claimed] == one] for one in np.unique(claims[claimed]).tolist() if not lives(one)]
        left = np.concatenate([np.zeros(0, np.int64), *dead])
        blocks = np.flatnonzero((sizes > 0) & (claims == 0))
        if len(blocks) > _LOOKED_AT:
            # Each search begins where the previous search ended.
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

    def evict(self, me: int, blocks: Int64s, masks: Int64s) -> None:
        """Mark pages as absent, and claim their blocks until their bytes are released; the caller holds the lock."""
        self.claim[blocks] = me
        state = self.state[blocks]
        self.header[2] -= self.count(state & masks)
        counts = (state & _counts()[masks]).view(np.uint64)
        # Each counter is incremented, without a carry to the next counter.
        more = (counts & ~_HIGH) + _ones()[masks] ^ (counts & _HIGH)
        self.state[blocks] = (state & ~(masks | _counts()[masks])) | more.view(np.int64)
        fence()


def same_pages(states: Int64s, others: Int64s, masks: Int64s) -> npt.NDArray[np.bool_]:
    """Return, for each block, whether its states in ``states`` and ``others`` agree on the presence and the eviction
    counts of the pages in ``masks``, bool ``[n]``.
    """
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
    """Return, for every mask, a number in which the lowest bit of the counter of each page in the mask is set, uint64
    ``[65536]``.
    """
    ones = np.zeros(ALL_PAGES + 1, np.uint64)
    for page in range(PAGES):
        ones |= (np.arange(ALL_PAGES + 1) >> page & 1).astype(np.uint64) << np.uint64(PAGES + 3 * page)
    return ones


@cache
def _counts() -> Int64s:
    """Return, for every mask, a number in which all bits of the counter of each page in the mask are set, int64
    ``[65536]``.
    """
    return (_ones() * np.uint64(7)).view(np.int64)


# A number of pages that exceeds every mirror.
_APART = 1 << 40


class PageSums(Protocol):
    """A picklable source of the checksums of an object's pages. Several threads may call a source concurrently."""

    def __call__(self) -> PageChecksums:
        """Return the page checksums in the form of ``page_checksums``.

        Raises:
            DataError: The object is damaged.
            StorageError: A request failed; a later request can succeed.
        """
        ...

    def find(self, others: Sequence[Any]) -> None:
        """Find the checksums of all ``others`` (sources of the same class) with as few requests as possible.

        Raises:
            StorageError: A request failed; a later request can succeed.
        """
        ...

    def named(self, message: str) -> str:
        """Return an error message with the name of the object added."""
        ...


@dataclass(eq=False)
class Placed:
    """An object and its position in a mirror.

    Args:
        client: The client that reads the object.
        info: The object.
        begin: Offset of the object's first byte in the mirror; zeros fill the rest of the object's last block.
        salt: A number of 32 bits that is combined with the checksums in the table, so that bytes of another object do
            not match.
        sums: The source of the object's page checksums; None: pages are not compared.
    """

    client: Any
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
        """Number of the object's first page in the mirror."""
        return self.begin // PAGE

    def known_sums(self) -> PageChecksums | None:
        """Return the checksums of the object's pages; None if the object has no source of checksums. Raises the errors
        of ``PageSums``."""
        return None if self.sums is None else self.sums()

    def damaged(self, page: int) -> DataError:
        """Return the error for a damaged page; pages are counted from the beginning of the object."""
        assert self.sums is not None
        begin = page * PAGE
        end = min(begin + PAGE, self.info.size)
        return DataError(
            self.sums.named(f"expected the written bytes {begin}..{end - 1}, found other bytes; the file is damaged")
        )


class Runs:
    """Runs of pages of several objects, which are fetched together.

    Args:
        objects: The objects.
        whose: The index of the object of each run, int64 ``[n]``.
        firsts, ends: The first page of each run in the mirror, and its end (one past its last page), int64 ``[n]``.
    """

    def __init__(self, objects: Sequence[Placed], whose: Int64s, firsts: Int64s, ends: Int64s) -> None:
        self.objects, self.whose, self.firsts, self.ends = objects, whose, firsts, ends
        self.counts = ends - firsts
        self.bounds = np.append(0, np.cumsum(self.counts))
        """The position of each run's first page in the list of all pages, and the number of all pages, int64 ``[n +
        1]``.
        """

    @classmethod
    def of(cls, parts: Sequence[tuple[Placed, slice]], blocks: Int64s, masks: Int64s) -> Runs:
        """Return the runs that contain the pages of blocks, given the objects that ``Known.of`` returned."""
        # The offset between objects prevents runs across two objects.
        numbers = np.repeat(np.arange(len(parts)), [part.stop - part.start for _, part in parts])
        firsts, ends = runs(pages_of(blocks + numbers * (_APART // PAGES), masks))
        whose = firsts // _APART
        return cls([placed for placed, _ in parts], whose, firsts - whose * _APART, ends - whose * _APART)

    def bytes(self) -> tuple[Int64s, Int64s]:
        """Return the first byte and the end of each run in its object, int64 ``[n]``."""
        begins = np.array([one.begin for one in self.objects])[self.whose]
        ends = np.array([one.end for one in self.objects])[self.whose]
        return self.firsts * PAGE - begins, np.minimum(self.ends * PAGE, ends) - begins

    @memo
    def pages(self) -> Int64s:
        """The numbers of all pages, int64 ``[m]``."""
        pages: Int64s = np.repeat(self.firsts - self.bounds[:-1], self.counts) + np.arange(self.bounds[-1])
        return pages

    def checksums(self, contents: Sequence[memoryview]) -> PageChecksums:
        """Compute the checksums of all pages from the bytes of the runs, uint32 ``[m]``; see ``page_checksums``."""
        begins = np.array([one.page for one in self.objects])[self.whose]
        return page_checksums(contents, (self.firsts - begins).tolist())

    def salts(self) -> PageChecksums:
        """Return the ``salt`` of the object of each page, uint32 ``[m]``."""
        return np.repeat(np.array([one.salt for one in self.objects], np.uint32)[self.whose], self.counts)

    def _parts(self) -> list[slice]:
        """Return each object's slice of the list of all pages; runs are ascending, so an object's pages are
        adjacent.
        """
        cuts = self.bounds[np.searchsorted(self.whose, np.arange(len(self.objects) + 1))].tolist()
        return [slice(*cut) for cut in pairwise(cuts)]

    def find_sums(self) -> None:
        """Find the checksums of all objects that have a source; raises the errors of ``PageSums``."""
        known = [placed.sums for placed in self.objects if placed.sums is not None]
        if len(known) > 1:
            known[0].find(known)
        for placed in self.objects:
            placed.known_sums()

    def wrong(self, checksums: PageChecksums) -> DataError | None:
        """Return the error for pages whose checksums differ from the known checksums; None if all are equal."""
        pages = self.pages
        for placed, mine in zip(self.objects, self._parts(), strict=True):
            sums = placed.known_sums()
            if sums is None:
                continue
            known = pages[mine] - placed.page
            if known[-1] >= len(sums):
                return placed.damaged(len(sums))
            others = sums[known] != checksums[mine]
            if others.any():
                return placed.damaged(int(known[others][0]))
        return None


class Places(Descriptor):
    """The file with the position of each object: lines of three numbers and a checksum.

    Callers hold the mirror's lock, so only one process at a time calls a method.

    Args:
        path: The file; created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, create=not path.exists())
        self._read = 0
        self._known: dict[int, tuple[int, int]] = {}
        self.blocks = 0
        """Number of blocks that are assigned to objects."""

    def follow(self) -> None:
        """Read lines that other processes added. A last line that is incomplete after a power cut is removed."""
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
        """Return the first block of each object; a new object gets a position after all other objects, and this
        position is written to the file.
        """
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
    """Return the key of an object's content, 128 bits; verified and unverified contents have different keys."""
    said = [url, info.path, info.version, str(info.size), *(["verified"] if verified else [])]
    return int(digest("\0".join(said).encode()), 16)


def _line(key: int, begin: int, blocks: int) -> bytes:
    said = f"{key:032x} {begin:x} {blocks:x}"
    return f"{said} {checksum(said.encode()):016x}\n".encode()


def _parsed(line: bytes) -> tuple[int, int, int] | None:
    """Return the numbers of a line; None if the line is damaged."""
    said, _, check = line.rstrip(b"\n").rpartition(b" ")
    if not line.endswith(b"\n") or f"{checksum(said):016x}".encode() != check:
        return None
    key, begin, blocks = (int(number, 16) for number in said.split())
    return key, begin, blocks


class Known:
    """The objects of a mirror that a process reads, by position."""

    def __init__(self) -> None:
        self._ordered: tuple[Int64s, list[Placed]] = (np.empty(0, np.int64), [])
        self._by_block: dict[int, Placed] = {}

    def add(self, objects: Sequence[Placed]) -> None:
        """Add objects; only one thread at a time may call this method."""
        known = self._by_block | {one.begin // BLOCK: one for one in objects}
        begins = sorted(known)
        # A single assignment, because other threads read the attribute concurrently.
        self._ordered = (np.array(begins, np.int64), [known[begin] for begin in begins])
        self._by_block = known

    def get(self, block: int) -> Placed | None:
        """Return the object whose first block is given."""
        return self._by_block.get(block)

    def of(self, blocks: Int64s) -> list[tuple[Placed, slice]]:
        """Return the objects of the given blocks (ascending, int64 ``[n]``), each with the slice of its blocks."""
        begins, objects = self._ordered
        numbers = np.searchsorted(begins, blocks, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(blocks)]
        return [(objects[int(numbers[first])], slice(first, end)) for first, end in pairwise(cuts) if end > first]

    def calls(self, blocks: Int64s, *, alone: bool) -> list[slice]:
        """Group blocks into requests; consecutive objects share a request.

        Args:
            blocks: Blocks, ascending, int64 ``[n]``.
            alone: Whether each object has a separate request.
        """
        found: list[slice] = []
        before: Placed | None = None
        paths: set[str] = set()
        for placed, part in self.of(blocks):
            path = placed.info.path
            joins = before is not None and before.client is placed.client and path not in paths
            if joins and not alone:
                found[-1] = slice(found[-1].start, part.stop)
            else:
                found.append(part)
                paths = set()
            paths.add(path)
            before = placed
        return found


@dataclass
class Counters:
    """Counters of all operations since this process opened the mirror; numbers of bytes are multiples of the page size.

    Args:
        read: Bytes that were read, whether they were present or not.
        fetched: Bytes that were received over the network.
        wanted: Fetched bytes that this process had requested.
        evicted: Bytes that were evicted.
        retries: Requests that were repeated after a failure.
        damaged: Number of cache blocks and of requests whose bytes differ from the written bytes.
    """

    read: int = 0
    fetched: int = 0
    wanted: int = 0
    evicted: int = 0
    retries: int = 0
    damaged: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **more: float) -> None:
        """Add numbers to counters."""
        with self._lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)

    def said(self) -> dict[str, float]:
        """Return the counters by name."""
        with self._lock:
            return {name: value for name, value in vars(self).items() if name[0] != "_"}


# More pages are evicted than the next pages need, because choosing pages examines every block.
_SPARE = 128
# In a full mirror, at most this part of all pages is in flight.
_COMING = 32
# On a full disk, at least this many pages are evicted at once; if none can be evicted, another process may be evicting.
_FEW, _TRIES, _PAUSE = 64, 20, 0.02


@dataclass(frozen=True)
class Limits:
    """The limits of a mirror.

    Args:
        pages: The largest number of pages to keep.
        fail: With "retry", failed requests are repeated without end; with "raise", for ``patience`` seconds.
        patience: How long failed requests are repeated if ``fail`` is "raise", in seconds.
    """

    pages: int
    fail: Literal["raise", "retry"]
    patience: float


class Keeper:
    """Writes fetched pages of one process to a mirror, and evicts pages.

    Args:
        table: The table of blocks and pages.
        file: The sparse file.
        memory: The mapped sparse file; None if the file has no blocks.
        known: The objects that this process reads.
        sharer: This process as a sharer of the mirror.
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
        """Number of pages that are being fetched."""
        self._verified = np.zeros(0, np.int64)  # states in which blocks were verified

    def is_full(self) -> bool:
        """Whether new pages replace other pages now or soon."""
        # With this margin, the result stays the same after an eviction.
        return self.table.pages + self.in_flight > self._most - self._most // 8

    def claim(
        self, blocks: Int64s, masks: Int64s, when: int, *, urgent: bool, steal: bool
    ) -> tuple[Int64s, Int64s] | None:
        """Claim blocks that no process is fetching, and evict pages to make room.

        Args:
            blocks: Blocks, ascending, int64 ``[n]``.
            masks: A bit mask of the requested pages for each block, int64 ``[n]``.
            when: The time at which the blocks are read; pages that are needed earlier are not evicted.
            urgent: Whether a reader waits for the pages, so that they are fetched even without room.
            steal: Whether to take over blocks that another process has been fetching for too long.

        Returns:
            The claimed blocks, ascending, int64 ``[m]``, and the pages of each block to fetch; None if there is no
            room.
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
            gone = self._evict(count, table.clock + 1 if urgent else when, all_or_none=not urgent)
            if gone is None:
                table.unclaim(me, held)
                return None
            self.in_flight += count
        self.counters.add(wanted=count * PAGE)
        self._empty(*gone)
        return held, masks

    def _evict(self, pages: int, before: int, *, all_or_none: bool) -> tuple[Int64s, Int64s] | None:
        """Evict the pages that are needed last if the mirror would exceed its limit; the caller holds the table's lock.

        Args:
            pages: Number of new pages.
            before: Pages that are needed up to this time are not evicted.
            all_or_none: Whether to evict no page if evictions cannot make enough room.

        Returns:
            Blocks, and masks of their evicted pages, whose space must be released; None if too few pages can be
            evicted.
        """
        over = self.table.pages + self.in_flight + pages - self._most
        if over <= 0 or not pages:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if all_or_none and self.in_flight > self._most // _COMING:
            return None  # further evicted pages would have to be fetched again
        most = over + self._most // _SPARE
        blocks, masks = self.table.needed_last(self.sharer.number, most, before, self.sharer.lives)
        freed = self.table.count(self.table.state[blocks] & masks)
        if all_or_none and freed < over:
            return None
        self.table.evict(self.sharer.number, blocks, masks)
        self.counters.add(evicted=freed * PAGE)
        return blocks, masks

    def _empty(self, blocks: Int64s, masks: Int64s) -> None:
        """Release the disk space of evicted pages. If a block has no pages left, all disk space of the block is
        released.
        """
        if len(blocks):
            none_left = (self.table.state[blocks] & ALL_PAGES) == 0
            self._file.empty(pages_of(blocks, np.where(none_left, ALL_PAGES, masks)))
            with self.table.lock:
                self.table.unclaim(self.sharer.number, blocks)

    def failed(self, held: Int64s, masks: Int64s) -> None:
        """Release the claims on blocks whose request failed."""
        with self.table.lock:
            self.in_flight -= self.table.count(masks)
            self.table.unclaim(self.sharer.number, held)

    # ------------------------------------------------------------------ bytes

    def store(
        self, held: Int64s, masks: Int64s, came: Runs, contents: Sequence[memoryview], checksums: PageChecksums
    ) -> None:
        """Write fetched pages of claimed blocks to the file, and mark them as present.

        Args:
            held: The blocks that ``claim`` returned, ascending, int64 ``[n]``.
            masks: The pages that ``claim`` returned.
            came: The runs of fetched pages.
            contents: The bytes of each run.
            checksums: The checksums of all pages of the runs, uint32 ``[m]``.
        """
        self._follow()
        before = self.table.state[held]
        # Computed for all pages together, because most runs are short: numbers of pages, and the rows of their blocks
        # in ``held``.
        pages = came.pages
        rows = np.minimum(np.searchsorted(held, pages // PAGES), len(held) - 1)
        is_held = held[rows] == pages // PAGES
        places, noted = rows * PAGES + pages % PAGES, checksums ^ came.salts()
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
        """Write bytes to the file; on a full disk, evict pages and lower the limit."""
        tries = _TRIES
        while True:
            try:
                return self._file.write(parts)
            except OSError as error:
                if not is_full(error):
                    raise StorageError(f"cache: cannot be written: {error}") from error
                if not tries:
                    raise StorageError(f"cache: expected free space on its disk, found a full disk: {error}") from error
            with self.table.lock:
                # Some disk space is left free, because in a memory file system even reading a hole allocates space.
                self._most = min(self._most, self.table.pages) * 7 // 8
                gone = self._evict(max(_FEW, self._most // 8), self.table.clock + 1, all_or_none=False)
            if gone is not None and len(gone[0]):
                self._empty(*gone)
            else:
                # Another process is releasing space, or no page is left.
                tries -= 1
                time.sleep(_PAUSE)

    def unverified(self, blocks: Int64s, states: Int64s, masks: Int64s) -> Int64s:
        """Return the blocks with pages that were not verified since they were fetched."""
        self._follow()
        found: Int64s = blocks[~same_pages(self._verified[blocks], states, masks & states)]
        return found

    def _follow(self) -> None:
        """Extend the array to blocks that were assigned since the last call."""
        if len(self._verified) < len(self.table.rows):
            with self._lock:
                self._verified = longer(self._verified, len(self.table.rows))

    def verify(self, blocks: Int64s) -> None:
        """Compare the bytes of the given blocks with the recorded checksums; evict damaged blocks."""
        states = self.table.state[blocks]
        blocks = self.unverified(blocks, states, states & ALL_PAGES)
        for placed, part in self.known.of(blocks):
            for block in blocks[part].tolist():
                if not self._is_whole(placed, block):
                    self._drop(placed, block)

    def _drop(self, placed: Placed, block: int) -> None:
        """Evict a damaged block, unless a process is fetching pages of the block."""
        one, table = np.array([block]), self.table
        with table.lock:
            # Without a claim, no process changes the checksums.
            holder = int(table.claim[block])
            is_free = not holder or not self.sharer.lives(holder)
            damaged = is_free and not self._is_whole(placed, block)
            if damaged:
                table.evict(self.sharer.number, one, np.array([ALL_PAGES]))
        if damaged:
            self.counters.add(damaged=1)
            self._empty(one, np.array([ALL_PAGES]))

    def _is_whole(self, placed: Placed, block: int) -> bool:
        """Return whether the pages of a block match the recorded checksums; the result is cached."""
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
    """Return consecutive received pages that are held, joined to pieces: the bytes and the start of each piece.

    Example: five pages are received, four in one run and one in another run; all pages but the third are held (1, 1, 0,
    1, 1). The result has three pieces: the first two pages, the fourth page of the first run, and the page of the
    second run.
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
    """Return the values followed by zeros, int64 ``[size]``; zeros need no memory until they are written."""
    found: Int64s = sparse_zeros(max(size, len(values)), np.int64)
    found[: len(values)] = values
    return found
