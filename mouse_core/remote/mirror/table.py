"""The state that processes share for a mirror: their numbers, a sparse file of bytes, and a table of its blocks.

A mirror is divided into blocks of 64 KB, and each block into 16 pages of 4 KB. Presence and eviction are tracked per
page, by one bit in the block's mask; fetches in progress are tracked per block.

Rows of the table are changed under a lock and read without one: each word is written at once. A process that fetches a
block claims it, writes the bytes, and then marks the pages as there. A process that is killed in between leaves a
claim, which is void as its number is free.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.files.checksum import PAGE
from mouse_core.files.locking import Descriptor, FileLock, is_at, lock
from mouse_core.files.mapped import fence, mapped, open_file, set_aside
from mouse_core.readahead.backing import ragged

Int64s = npt.NDArray[np.int64]

PAGES = 16
BLOCK = PAGE * PAGES
ALL_PAGES = (1 << PAGES) - 1
# One request brings pages that lie so far apart, with those between them: another request would take longer.
_GAP_PAGES = 16
# A connection is slower than all together, so no request is longer.
_LONGEST_RUN = 256


def touched(begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """The blocks that some bytes lie in, and masks of the pages.

    Bytes 5,000 to 9,000 lie in pages 1 and 2 of block 0: its mask is 0b110. Bytes 65,540 to 65,550 lie in page 16, the
    first of block 1: its mask is 0b1.

    Args:
        begins: Where ranges of bytes begin, ascending, int64 ``[n]``.
        ends: Where they end, each behind its beginning and not behind the next one's.

    Returns:
        Blocks, ascending, int64 ``[m]``, and masks, int64 ``[m]``.
    """
    # Of ranges, and not of pages, which are many.
    first, last = begins // PAGE, (ends - 1) // PAGE
    blocks, low, high = first // PAGES, first % PAGES, last % PAGES
    more = last // PAGES - blocks
    if more.any():
        whose, number = ragged(more + 1)
        blocks = blocks[whose] + number
        low, high = np.where(number == 0, low[whose], 0), np.where(number == more[whose], high[whose], PAGES - 1)
    return _united(blocks, (2 << high) - (1 << low))


def by_block(pages: Int64s) -> tuple[Int64s, Int64s]:
    """The blocks that some pages (ascending, int64 ``[n]``) lie in, and a mask of those in each."""
    return _united(pages // PAGES, 1 << pages % PAGES)


def _united(blocks: Int64s, masks: Int64s) -> tuple[Int64s, Int64s]:
    """Each of some blocks (ascending, int64 ``[n]``) once, with all pages of its masks."""
    if len(blocks) < 2:
        return blocks, masks
    is_head = np.empty(len(blocks), np.bool_)
    is_head[0] = True
    np.not_equal(blocks[1:], blocks[:-1], out=is_head[1:])
    (heads,) = is_head.nonzero()
    return (blocks, masks) if len(heads) == len(blocks) else (blocks[heads], np.bitwise_or.reduceat(masks, heads))


def joined(parts: Sequence[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    """The blocks of several, ascending, and masks of the pages of any: 2, 0b1, and 2, 0b100 are 2 and 0b101."""
    if len(parts) == 1:
        return parts[0]
    blocks, masks = (np.concatenate(some) for some in zip(*parts, strict=True))
    order = np.argsort(blocks, kind="stable")
    return _united(blocks[order], masks[order])


def bits(masks: Int64s) -> npt.NDArray[np.bool_]:
    """Return the pages of masks, bool ``[n, 16]``."""
    each: npt.NDArray[Any] = np.unpackbits(masks.astype("<u2").view(np.uint8), bitorder="little")
    return each.view(np.bool_).reshape(-1, PAGES)


def masks_of(bits: npt.NDArray[np.bool_]) -> Int64s:
    """The masks of which ``bits`` says which pages they name, int64 ``[n]``."""
    masks: Int64s = np.packbits(bits, bitorder="little").view("<u2").astype(np.int64)
    return masks


def pages_of(blocks: Int64s, masks: Int64s) -> Int64s:
    """The pages that masks name, ascending where blocks are: of block 2 and mask 0b101, pages 32 and 34."""
    (place,) = bits(masks).reshape(-1).nonzero()
    found: Int64s = (blocks * PAGES)[place // PAGES] + place % PAGES
    return found


def runs(pages: Int64s) -> tuple[Int64s, Int64s]:
    """Return the runs that bring pages (ascending, int64 ``[n]``): first pages, and those behind the last ones.

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
    """Ranges in the order in which they begin, merged where they touch; empty ones left out."""
    first, last = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
    order = np.argsort(first, kind="stable")
    order = order[last[order] > first[order]]
    first, reached = first[order], np.maximum.accumulate(last[order])
    heads = np.flatnonzero(np.concatenate([[len(first) > 0], first[1:] > reached[:-1]]))
    return first[heads], np.maximum.reduceat(reached, heads) if len(heads) else heads


def pieces(sizes: Int64s, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of some sizes, by the first of them and the one behind the last, that have at most so many bytes together;
    one that has more for itself.
    """
    first = 0
    reached = np.cumsum(sizes)
    while first < len(sizes):
        before = int(reached[first] - sizes[first])
        behind = max(first + 1, int(np.searchsorted(reached, before + most, "right")))
        yield first, behind
        first = behind


# For so long what was found of another process is taken to hold.
_SECONDS = 0.05


class Sharer(Descriptor):
    """A process that shares a mirror, by a locked file whose name is its number.

    A forked child lets go of its parent's: it would keep the lock of a parent that ended.

    Args:
        folder: Where the files of all sharers are.
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
            if is_at(self._path, self._file):  # nobody took it for one that was left behind
                break
            self.close()
        _MINE.add(self)

    def lives(self, number: int) -> bool:
        """Whether the process with a number has not ended; what it left is removed otherwise."""
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
        """Remove what processes left that were killed."""
        for path in self._folder.iterdir():
            with suppress(ValueError):
                self.lives(int(path.name, 16))

    def leave(self) -> None:
        """Be a sharer no more."""
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
# Give room back, and keep the size.
_LINUX_PUNCH = 3


class SparseFile(Descriptor):
    """A file with holes.

    Args:
        path: The file, made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, create=not path.exists())

    @property
    def size(self) -> int:
        """Bytes from its beginning to its end, holes among them."""
        return os.fstat(self._file).st_size

    def lengthen(self, size: int) -> None:
        """Make it so long; what is new is one hole."""
        os.ftruncate(self._file, max(size, self.size))

    def map(self) -> mmap.mmap:
        """All of it as memory, which sees what is written later; nothing is read ahead."""
        # Written to by nobody, but the system lets go of parts of writable maps only.
        memory = mmap.mmap(self._file, self.size)
        if hasattr(memory, "madvise"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_RANDOM)
        return memory

    def write(self, parts: list[tuple[memoryview, int]]) -> None:
        """Write some bytes, each at a place; what was written is taken out of the list.

        Raises:
            OSError: There is no room.
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
        """Give back the room of some pages (ascending, int64 ``[n]``), where the system can; they are zeros then."""
        if not len(pages):
            return
        heads = np.concatenate([[0], np.flatnonzero(np.diff(pages) > 1) + 1])
        behind = np.concatenate([heads[1:], [len(pages)]])
        for first, last in zip(pages[heads].tolist(), pages[behind - 1].tolist(), strict=True):
            self._punch(first * PAGE, (last + 1 - first) * PAGE)

    def _punch(self, begin: int, size: int) -> None:
        # Where the system cannot, the room is used when the page comes again.
        if sys.platform == "linux":
            if (punch := _fallocate()) is not None:
                # Memory's own advice takes no parts of pages, which are longer than these on some machines.
                punch(self._file, _LINUX_PUNCH, begin, size)
        elif sys.platform == "darwin":
            import fcntl

            with suppress(OSError):
                fcntl.fcntl(self._file, _MACOS_PUNCH, struct.pack("IIqq", 0, 0, begin, size))


@cache
def _fallocate() -> Any:
    """The system's call that sets room aside and gives it back; None where there is none."""
    library = ctypes.CDLL(None)
    found = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def is_full(error: OSError) -> bool:
    """Whether a file could not be written for lack of room."""
    return error.errno in _FULL


def address_of(memory: mmap.mmap) -> int:
    """Return the address of mapped memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


FORMAT = 1
_MAGIC = int.from_bytes(b"mousepg1", "little")
_HEADER = 4096
# state: in the lowest 16 bits which of the block's pages are there, and behind them, in 3 bits each, how often each was
# let go of, modulo 8. claim: who fetches. when: the lowest 32 bits of the time at which each page is used next, as far
# as one was asked for, or long before it was used last. check: each page's digest and its object's salt, exclusive or.
_ROW = np.dtype([("state", "<i8"), ("claim", "<i8"), ("when", "<i4", PAGES), ("check", "<u4", PAGES)])
_SMALLEST = (1 << 30) // BLOCK
# Further away than every time.
_FAR = (1 << 31) - 1
# How much later than was thought something may be read: who was slower than others, or had to wait.
_LATE = 512
# What was read may be being copied for so long.
_COPIED = 16
# What goes is looked for among so many blocks: what is in others is hardly needed later, and finding it takes long.
_LOOKED_AT = 1 << 17
# Of three bits each that count.
_HIGH = np.uint64(0x9249249249240000)


def folder_of(cache: Path) -> Path:
    """Return the folder of a mirror of this format in a cache."""
    return cache / f"mirror-{FORMAT}"


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
            # A page that was never used has the time 0, which is to be long ago.
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
        """The time, in batches that were read by whoever."""
        return int(self.header[1])

    def tick(self, count: int) -> None:
        """Count ``count`` read batches; of two concurrent calls, one may be lost."""
        self.header[1] += count

    @property
    def pages(self) -> int:
        """Number of pages that are there."""
        return int(self.header[2])

    @property
    def blocks(self) -> int:
        """Number of blocks given to objects."""
        return int(self.header[3])

    @property
    def room(self) -> int:
        """Length of the file of bytes, in blocks."""
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

    def arrived(self, me: int, blocks: Int64s, masks: Int64s, checks: npt.NDArray[np.uint32]) -> Int64s:
        """Say that pages of blocks which ``me`` claimed are there, and claim them no more; under the lock.

        Args:
            me: Who claimed them.
            blocks: The blocks, ascending, int64 ``[n]``.
            masks: The pages, int64 ``[n]``; none of those that were there.
            checks: Of each page what is noted of its digest, uint32 ``[n, 16]``.

        Returns:
            The states of the blocks, int64 ``[n]``; 0 of those that another one had taken over.
        """
        mine = self.claim[blocks] == me
        blocks, masks = blocks[mine], masks[mine]
        came = bits(masks)
        self.check[blocks] = np.where(came, checks[mine], self.check[blocks])
        # What nobody asked for has been used as if now.
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
        """Fetch some blocks no more; under the lock."""
        self.claim[blocks[self.claim[blocks] == me]] = 0

    # ------------------------------------------------------------------ using

    def ask(self, pages: Int64s, when: int | Int64s) -> None:
        """Note that pages will be used at a time, or each at its own, of which the last one counts.

        Nobody is kept from noting other things at once: it is a guess.
        """
        place = pages // PAGES, pages % PAGES
        known = self.when[place] - _low(self.clock)
        self.when[place] = np.where((known > 0) & (known < when - self.clock), self.when[place], _low(when))

    def use(self, pages: Int64s, again: Int64s) -> None:
        """Note that pages were used, and when each will be the next time, int64 ``[n]``: now where nobody knows."""
        now = self.clock
        self.when[pages // PAGES, pages % PAGES] = _low(np.where(again > now, again, now - _LATE + _COPIED))

    def _until(self, blocks: Int64s) -> npt.NDArray[np.int32]:
        """Return the number of batches until the next use of each page, int32 ``[n, 16]``.

        The number is below 0 for an overdue use, and -512 or less some time after the last use.
        """
        until: npt.NDArray[np.int32] = self.when[blocks] - _low(self.clock)  # also when 32 bits have gone round
        return until

    # ------------------------------------------------------------------ letting go

    def needed_last(self, me: int, pages: int, before: int, lives: Callable[[int], bool]) -> tuple[Int64s, Int64s]:
        """Return up to ``pages`` pages to evict, least needed first; the caller holds the lock.

        Those whose next use nobody knows come first, longest unused ones before others; then those with the latest
        next use, and those of which it was not long ago, as it may be late. With them come those of blocks that someone
        claimed who died.

        At time 100, of pages that were used at 40, 70 and 95 and are at 109, 112 and 130, they are those of 40 and of
        70, then 130, 112 and 109, and then that of 95, which may be being copied.

        Args:
            me: The number of the calling process.
            pages: The number of pages.
            before: Pages whose next use is at this time or earlier stay.
            lives: Returns whether a process's claim holds.

        Returns:
            Their blocks, ascending, int64 ``[n]``, and masks.
        """
        states, claims = self.state[: self.blocks], self.claim[: self.blocks]
        sizes = _sizes()[states & ALL_PAGES]
        # Who was killed may have changed a state and not the sum.
        self.header[2] = int(sizes.sum(dtype=np.int64))
        claimed = np.flatnonzero(claims)
        dead = [claimed[claims[claimed] == one] for one in np.unique(claims[claimed]).tolist() if not lives(one)]
        left = np.concatenate([np.zeros(0, np.int64), *dead])
        blocks = np.flatnonzero((sizes > 0) & (claims == 0))
        if len(blocks) > _LOOKED_AT:
            # Each time others, from where the last look ended on.
            blocks = np.roll(blocks, -(int(self.header[5]) % len(blocks)))[:_LOOKED_AT]
            self.header[5] += _LOOKED_AT
        until = self._until(blocks).reshape(-1)
        allowed = (until <= 0) | (until > before - self.clock)
        found = np.flatnonzero(allowed & bits(states[blocks]).reshape(-1))
        if pages < len(found):
            until = until[found]
            # A time far ahead is soon in this order.
            order = np.where(until > -_LATE, _FAR - np.maximum(until, 0), until)
            found = found[np.argpartition(order, pages)[:pages]]
        gone, masks = by_block(np.sort(blocks[found // PAGES] * PAGES + found % PAGES))
        gone, masks = np.append(gone, left), np.append(masks, np.full(len(left), ALL_PAGES))
        order = np.argsort(gone)
        return gone[order], masks[order]

    def let_go(self, me: int, blocks: Int64s, masks: Int64s) -> None:
        """Take pages for not there, and claim their blocks until the bytes are gone; under the lock."""
        self.claim[blocks] = me
        state = self.state[blocks]
        self.header[2] -= self.count(state & masks)
        counts = (state & _counts()[masks]).view(np.uint64)
        # Each by one, and none carries into the next.
        more = (counts & ~_HIGH) + _ones()[masks] ^ (counts & _HIGH)
        self.state[blocks] = (state & ~(masks | _counts()[masks])) | more.view(np.int64)
        fence()


def same_pages(states: Int64s, others: Int64s, masks: Int64s) -> npt.NDArray[np.bool_]:
    """Whether pages that are there in some states are there in others, and were not let go of between, bool ``[n]``."""
    same: npt.NDArray[np.bool_] = (states ^ others) & (masks | _counts()[masks]) == 0
    return same


def _low(times: Any) -> Any:
    """The lowest 32 bits of times, int32."""
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
    """The lowest of the three bits that count for each page that a mask names, uint64 ``[65536]``."""
    ones = np.zeros(ALL_PAGES + 1, np.uint64)
    for page in range(PAGES):
        ones |= (np.arange(ALL_PAGES + 1) >> page & 1).astype(np.uint64) << np.uint64(PAGES + 3 * page)
    return ones


@cache
def _counts() -> Int64s:
    """All three of them, int64 ``[65536]``."""
    return (_ones() * np.uint64(7)).view(np.int64)
