"""What is read as a whole of files that do not fit in memory, in memory of this process's own."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock, forks
from mouse_core.readahead.backing import Int64s, ragged
from mouse_core.readahead.maps import Maps, most_open

# The numbers of the calls io_setup, io_destroy, io_getevents and io_submit.
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
# Reads that are under way at a time, at most.
_MOST = 1024
# A read as the kernel is told of it, and one that is done, as linux/aio_abi.h has them. The first word is the caller's
# own: whose read it is, and how many bytes it is to bring at least, 32 bits each.
_READ = np.dtype(
    {
        "names": ["own", "file", "target", "size", "place"],
        "formats": ["u8", "u4", "u8", "u8", "i8"],
        "offsets": [0, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_DONE = np.dtype([("own", "u8"), ("read", "u8"), ("brought", "i8"), ("more", "i8")])


class DirectReads:
    """Reads that are begun many at a time, without waiting for them.

    Raises:
        OSError: The system has none such, or lets this process have none.
    """

    def __init__(self) -> None:
        calls = _CALLS.get(os.uname().machine) if sys.platform == "linux" and sys.byteorder == "little" else None
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        setup, self._destroy, self._getevents, self._submit = calls
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        context = ctypes.c_ulong()
        self._call(setup, _MOST, ctypes.addressof(context))
        self._context, self._done = context.value, np.zeros(_MOST, _DONE)
        self._came: list[npt.NDArray[np.void]] = []
        self.under_way = 0
        """How many are begun and not done."""

    def begin(self, whose: Int64s, files: Int64s, places: Int64s, targets: Int64s, sizes: Int64s, least: Int64s) -> int:
        """Begin with some reads; waits for others where too many are under way.

        Args:
            whose: A number below 2**32 for each that ``done`` says again; int64 ``[n]``, as all that follow.
            files: Its descriptor, opened with ``O_DIRECT``.
            places: Where it begins in the file, a multiple of what the disk asks for, as the next two.
            targets: The address that the bytes are written to.
            sizes: Bytes.
            least: Bytes that are wanted: at the end of a file it has no more.

        Returns:
            With how many it was begun, from the first on; less than n where the system refuses one.
        """
        reads = np.zeros(len(files), _READ)
        reads["own"] = whose << 32 | least
        reads["file"], reads["place"], reads["target"], reads["size"] = files, places, targets, sizes
        pointers, begun = reads.ctypes.data + reads.itemsize * np.arange(len(reads)), 0
        while begun < len(reads):
            if self.under_way >= _MOST:
                self._collect(1)
                continue
            some = pointers[begun : begun + _MOST - self.under_way]
            try:
                count = self._call(self._submit, self._context, len(some), some.ctypes.data)
            except OSError as error:
                if error.errno != errno.EAGAIN or not self.under_way:
                    break
                self._collect(1)
                continue
            begun += count
            self.under_way += count
        return begun

    def done(self, *, wait: bool) -> list[tuple[int, bool]]:
        """Those that are done and were not said yet: whose each is, and whether it brought what was wanted.

        Args:
            wait: Whether there is to be one at least, if any is under way.
        """
        if self.under_way:
            self._collect(int(wait and not self._came))
        came, self._came = self._came, []
        found: list[tuple[int, bool]] = []
        for some in came:
            fine = some["brought"] >= (some["own"] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            found += zip((some["own"] >> np.uint64(32)).tolist(), fine.tolist(), strict=True)
        return found

    def _collect(self, least: int) -> None:
        """Take what is done from the kernel, and wait for so many."""
        count = self._call(self._getevents, self._context, least, _MOST, self._done.ctypes.data, 0)
        if count:
            self.under_way -= count
            self._came.append(self._done[:count].copy())

    def close(self) -> None:
        """Wait for all that are under way, and begin none any more."""
        self._call(self._destroy, self._context)
        self.under_way = 0

    def _call(self, *numbers: int) -> int:
        """A system call, made again where a signal came."""
        while True:
            found = int(self._syscall(*map(ctypes.c_long, numbers)))
            if found >= 0:
                return found
            if (code := ctypes.get_errno()) != errno.EINTR:
                raise OSError(code, os.strerror(code))


_PAGE = mmap.PAGESIZE
# Bytes of one read: of a longer range several parts come at the same time.
_READ_BYTES = 256 << 10
# What is read from more than so many batches on is of somebody who reads at another place.
_NEAR = 1024
# A range of one part may lie in another's, with so many between where they begin.
_WITHIN = 2
_SHIFT, _WHOSE, _UNTIL = 2, 3, 4
# linux/mman.h: a forked child finds zeros. It has no reads under way, and a hole would be given to others, and then be
# taken from them when the child lets go of it.
_WIPE_ON_FORK = 18


@dataclass
class ReadRange:
    """Ranges that were asked for together.

    Args:
        memory: What they have of it: where it begins, and ends.
        first, until: They are read from batch ``first`` on, by nobody from batch ``until`` on.
        keeps: Keeps the files mapped, so that the addresses are of no others.
        coming: Reads that are not done.
        is_whole: Whether all that are done brought what was wanted.
        users: How many are copying from it.
    """

    memory: list[tuple[int, int]]
    first: int
    until: int
    keeps: object
    coming: int = 0
    is_whole: bool = True
    users: int = 0


class DirectReadBuffer:
    """Ranges of mapped files, read past the page cache, and where they are found instead of there.

    The page cache keeps what it is asked for by pages, of each of which somebody must find out when it may go, and of
    what is read once and as a whole nobody else has any use. Here a range takes one call to come and none to go.

    Args:
        most: Bytes that are kept at most.

    Raises:
        OSError: The system cannot read so.
    """

    def __init__(self, most: int) -> None:
        self._reads, self._forks = DirectReads(), forks()
        weakref.finalize(self, _close, self._reads, self._forks)
        self._most = most // _PAGE * _PAGE
        self._memory = mmap.mmap(-1, self._most, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(_WIPE_ON_FORK)
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to look up
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._free = [(0, self._most)]
        self.parts: dict[int, ReadRange] = {}
        """What is kept, by number."""
        self.batch = 0
        """The batch that came last."""
        self._next = 0
        # Of ranges, ascending: where they begin, and end; how much further on they are here; their part, and its end.
        self._ranges = np.zeros((5, 0), np.int64)
        self._lock, self._is_known = ProcessLock(), True

    @contextmanager
    def _held(self) -> Iterator[bool]:
        """The lock, and whether anything is read here: not in a forked child, nor when somebody was interrupted who
        had the lock, since when nobody knows what is under way.
        """
        with self._lock:
            is_known, self._is_known = self._is_known, False
            yield is_known and self._forks == forks()
            self._is_known = is_known

    def take(
        self, maps: Maps, begins: Int64s, ends: Int64s, until: Int64s, first: int, keeps: object
    ) -> npt.NDArray[np.bool_] | None:
        """Begin to read some ranges.

        Args:
            maps: What is mapped, as it is now where the ranges are.
            begins, ends: The ranges, int64 ``[n]``: they ascend and do not touch among those with one ``until``.
            until: The batch from which on nobody reads them, ascending, int64 ``[n]``.
            first: The batch from which on they are read.
            keeps: Keeps the files mapped; it is let go of with the ranges.

        Returns:
            Which are taken, bool ``[n]``: not those that are in no file that can be read so, or find no room. None:
            nothing is read here any more.
        """
        with self._held() as is_fine:
            if not is_fine:
                return None
            found, taken = maps.of(begins), np.zeros(len(begins), np.bool_)
            numbers, which = np.unique(found, return_inverse=True)
            for number in range(0, len(numbers), most := most_open()):
                rows = np.flatnonzero(which // most == number // most)
                opened = maps.direct([one for one in numbers[number : number + most].tolist() if one >= 0])
                if opened:
                    ranges = begins[rows], ends[rows], until[rows]
                    taken[rows] = self._take(
                        maps, opened, found[rows], *ranges, ReadRange([], first, 0, keeps, users=1)
                    )
        return taken

    def _take(
        self,
        maps: Maps,
        opened: dict[int, tuple[int, int]],
        found: Int64s,
        begins: Int64s,
        ends: Int64s,
        until: Int64s,
        like: ReadRange,
    ) -> npt.NDArray[np.bool_]:
        """The same of ranges in some files that are open: ``found`` has which; ``like`` is a part without memory."""
        sector = max(one[1] for one in opened.values())
        at, known = self._find(begins, ends)
        known[known] = self._ranges[_UNTIL, at[known]] >= until[known]
        taken = np.isin(found, list(opened)) & (ends <= maps.ends[found]) & ~known
        froms = begins & -sector
        sizes = (ends - froms + sector - 1) & -sector
        targets, whose = np.zeros(len(begins), np.int64), np.zeros(len(begins), np.int64)
        for last in np.unique(until[taken]).tolist():
            some = np.flatnonzero(taken & (until == last))
            if (memory := self._room_for(sizes[some])) is None:
                taken[some] = False
                continue
            targets[some], whose[some] = self._address + memory[0], self._next
            self.parts[self._next] = replace(like, memory=memory[1], until=last)
            self._next = (self._next + 1) % (1 << 32)
        rows = np.flatnonzero(taken)
        if len(rows):
            files = np.array([opened[one][0] for one in found[rows].tolist()])
            places = froms[rows] - maps.origins[found[rows]]
            self._read(whose[rows], files, places, targets[rows], sizes[rows], (ends - froms)[rows])
            self._note(np.stack([begins, ends, targets - froms, whose, until])[:, rows])
            for number in np.unique(whose[rows]).tolist():
                self.parts[number].users -= 1  # so that it did not go for the others
        return taken | known

    def _read(
        self, whose: Int64s, files: Int64s, places: Int64s, targets: Int64s, sizes: Int64s, least: Int64s
    ) -> None:
        """Begin to read ranges, of which longer ones come in several parts; see ``DirectReads.begin``."""
        each, within = ragged(-(-sizes // _READ_BYTES))
        within *= _READ_BYTES
        least = np.minimum(least[each] - within, _READ_BYTES)
        sizes, whose = np.minimum(sizes[each] - within, _READ_BYTES), whose[each]
        for number, count in zip(*np.unique(whose, return_counts=True), strict=True):
            self.parts[int(number)].coming = int(count)
        begun = self._reads.begin(whose, files[each], places[each] + within, targets[each] + within, sizes, least)
        for number in whose[begun:].tolist():
            self.parts[number].coming -= 1
            self.parts[number].is_whole = False

    @contextmanager
    def moved(self) -> Iterator[Callable[[Int64s, Int64s], Int64s]]:
        """Gives who says, of ranges, where they can be read: here, when they have come, or where they are mapped.

        They stay there until the end.
        """
        used: list[ReadRange] = []

        def places(begins: Int64s, ends: Int64s) -> Int64s:
            with self._held() as is_fine:
                if not is_fine or not self._ranges.size:
                    return begins
                at, inside = self._find(begins, ends)
                for number in np.unique(self._ranges[_WHOSE, at[inside]]).tolist():
                    part = self.parts[number]
                    while part.coming and self._reads.under_way:
                        self._look(wait=True)
                    if part.is_whole and not part.coming:
                        part.users += 1
                        used.append(part)
                    else:
                        inside &= self._ranges[_WHOSE, at] != number
                return np.where(inside, begins + self._ranges[_SHIFT, at], begins)

        try:
            yield places
        finally:
            with self._held():
                for part in used:
                    part.users -= 1

    def let_go(self, batch: int) -> None:
        """Batch ``batch`` comes: keep what nobody reads any more no longer."""
        with self._held() as is_fine:
            self.batch = batch
            if is_fine:
                # What is read from further back on is of somebody who reads at another place.
                parts = self.parts.items()
                self._drop([number for number, one in parts if one.until <= batch < 2 * one.until - one.first])

    def _find(self, begins: Int64s, ends: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """The row of each range, and whether it is there at all."""
        firsts, behind = self._ranges[:2]
        at = np.searchsorted(firsts, begins, side="right") - 1
        inside = at >= 0
        inside[inside] = ends[inside] <= behind[at[inside]]
        for _ in range(_WITHIN):
            outside = np.flatnonzero(~inside & (at > 0))
            at[outside] -= 1
            inside[outside] = ends[outside] <= behind[at[outside]]
        return at, inside

    def _room_for(self, sizes: Int64s) -> tuple[Int64s, list[tuple[int, int]]] | None:
        """Where there is room for ranges of so many bytes, and all that it takes; None where there is not so much."""
        behind = np.cumsum(sizes)
        for _ in range(2):
            places, used, first = np.empty_like(sizes), list[tuple[int, int, int]](), 0
            # What nobody had yet comes last, as it takes memory of the machine's from then on.
            for begin, end in sorted(self._free, key=lambda one: (one[1] == self._most, one[0] - one[1])):
                if first == len(sizes):
                    break
                before = int(behind[first - 1]) if first else 0
                last = int(np.searchsorted(behind, before + end - begin, side="right"))
                places[first:last] = begin + behind[first:last] - sizes[first:last] - before
                used.append((begin, begin + int(behind[last - 1]) - before if last > first else begin, end))
                first = last
            if first == len(sizes):
                for begin, place, end in used:
                    self._free.remove((begin, end))
                    self._free += [(place, end)] if place < end else []
                return places, [(begin, place) for begin, place, _ in used if begin < place]
            # Of somebody who reads at another place, and may have gone.
            parts = self.parts.items()
            self._drop([number for number, one in parts if not one.first - _NEAR <= self.batch < one.until])
        return None

    def _note(self, ranges: Int64s) -> None:
        """Find some ranges here from now on, int64 ``[5, n]``."""
        ranges = ranges[:, np.argsort(ranges[0], kind="stable")]  # those of one part ascend
        places = np.searchsorted(self._ranges[0], ranges[0], side="right")
        self._ranges = np.insert(self._ranges, places, ranges, axis=1)

    def _drop(self, numbers: list[int]) -> None:
        """Give back the memory of those of some parts that nobody reads and that have come."""
        if numbers:
            self._look(wait=False)
        gone = [number for number in numbers if not self.parts[number].users and not self.parts[number].coming]
        for number in gone:
            self._free += self.parts.pop(number).memory
        if gone:
            self._ranges = self._ranges[:, ~np.isin(self._ranges[_WHOSE], gone)]
            whole: list[tuple[int, int]] = []
            for begin, end in sorted(self._free):
                if whole and whole[-1][1] == begin:
                    begin = whole.pop()[0]
                whole.append((begin, end))
            self._free = whole

    def _look(self, *, wait: bool) -> None:
        """Take note of what has come."""
        for number, fine in self._reads.done(wait=wait):
            part = self.parts[number]
            part.coming -= 1
            part.is_whole &= fine


def _close(reads: DirectReads, made: int) -> None:
    """Wait for what is under way before the memory goes; a forked child has nothing to wait for."""
    if made == forks():
        reads.close()
