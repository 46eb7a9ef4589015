"""Mapped files of this machine: the kernel is told what will be read, and does not read more where memory is short."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from time import perf_counter, thread_time
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mouse_core.readahead.backing import Int64s, by_group, merged, ragged
from mouse_core.readahead.maps import Maps
from mouse_core.readahead.own import DirectReadBuffer
from mouse_core.readahead.room import room_for_files

LEAST, FIRST, MOST = 1 << 20, 4 << 20, 64 << 20
"""Bytes that are asked for ahead: at least, at first, and at most."""

# Of what there is room for in memory pages that were asked for may take one part in so many, lest they go again before
# they are read.
_PART = 16
# Waiting for so much of the time is as good as not waiting.
_CALM = 0.04
# So many times less waiting than before is less, and so many times more is more: what is measured varies by itself.
_LESS, _MORE = 0.8, 1.25


class ReadaheadWindow:
    """How many bytes are asked for ahead, found by how long batches wait for pages all the same.

    A batch waits where its pages have not come yet, for which more depth helps, or have gone again, for which less
    does; or where the disk gives no more, whatever the depth. Nobody says which of them it is, so it goes one step,
    twice or half as far, and looks: on where that helped, back where it harmed, and towards where it began where it
    made no difference, as a disk that keeps up has slow reads, too; from there the one way and the other. Where hardly
    anybody waits it stays as it is.

    Args:
        room: Bytes of files that there is room for in memory; None: nobody says.
    """

    def __init__(self, room: int | None = None) -> None:
        self.most = MOST if room is None else max(LEAST, min(MOST, room // _PART))
        self.nbytes = min(FIRST, self.most)
        self._first, self._out = self.nbytes, 0.5
        self._step, self._before = 2.0, 0.0

    def saw(self, batches: int, waited: float, seconds: float) -> None:
        """So many batches were copied in some seconds, of which they waited for pages so many."""
        if not batches or waited <= _CALM * seconds:
            self._before = 0.0
            return
        each, before = waited / batches, self._before
        if before and each > _MORE * before:
            self._step = 1 / self._step
        elif before and each > _LESS * before:
            if self.nbytes == self._first:  # the other way than last time
                self._out = self._step = 1 / self._out
            else:
                self._step = 0.5 if self.nbytes > self._first else 2.0
        self._before = each
        self.nbytes = min(max(int(self.nbytes * self._step), LEAST), self.most)


try:
    import resource
except ImportError:  # Windows, where nothing is asked for
    resource = None  # type: ignore[assignment]

Made = TypeVar("Made")
Moved = Callable[[Int64s, Int64s], Int64s] | None
"""Says where ranges are, of which it is given where they begin and end, when they have come; None: where they were."""

_WILL_NEED, _RANDOM = 3, 1
_PAGE = mmap.PAGESIZE
_PROCESS_MADVISE, _MOST_RANGES = 440, 1024
_NOTHING = np.zeros(0, np.int64)
# So many page faults that wait for a disk, in so many batches, are a reason to ask ahead; and that no block was read
# from a disk for so many batches is one not to.
_FAULTS, _BATCHES_WATCHED, _BATCHES_READ = 3, 16, 48
# The room in memory is looked at again when so many bytes, and one in so many, have come since it was last.
_MORE_BYTES, _MORE_SHARE = 64 << 20, 8
# Where so many page faults a batch wait for a disk though all was asked for, what was there already goes before it is
# read. It is asked for again then, for so many times as many batches.
_FAULTS_EACH, _TIMES_AGAIN = 2, 16
# What is read as a whole may take one part in so many of what room there is in memory: no page of it goes for others.
_OWN_PART = 2
# Ranges are looked at so many at a time, and fewer at first.
_TOGETHER, _TRIED = 64, 2


class Usage(NamedTuple):
    """What this process has had of disks so far: page faults that waited for one, and blocks read."""

    faults: int
    blocks: int


class LocalFiles:
    """Stands behind all memory: asks the kernel to read those pages of mapped files that batches will read.

    It does so only while that helps: from when page faults wait for a disk until nothing is read from one any more.
    Where the files do not fit in memory the kernel is told, too, to read nothing else of them on its own.

    Args:
        begins, sizes: Where files are mapped, int64 ``[files]``.
        later: Bytes of those that are mapped when they are read.
    """

    begin, size, gap, room = 0, (1 << 63) - 1, 8 << 10, None

    def __init__(self, begins: Int64s, sizes: Int64s, later: int = 0) -> None:
        self._advice = _Advice()
        self._since, self._batches = usage(), 0
        # Seconds that copying stood still for pages since then, for how many, and when that was.
        self._waited, self._missed, self._looked = 0.0, 0, perf_counter()
        # For how many times to look from now on what is read is asked for once more before it is.
        self._again = 0
        self._bytes = int(sizes.sum()) + later
        self.is_on = self._is_short = self._exceed_room()
        self._maps: Maps | None = None
        # Where what is read as a whole is, from when something is, if it can be.
        self._own: DirectReadBuffer | None = None
        self._tried_own = False
        # The maps that were met, of which nothing is read that is not asked for.
        self._met: set[int] = set()
        if self._is_short:
            self._advice.give(begins, sizes, _RANDOM)

    @classmethod
    def of(cls, segments: Sequence[Any]) -> LocalFiles | None:
        """Of the files of some ``Segment``s; None where there are none, or where the system takes no advice."""
        begins, sizes, later = _files_of(segments)
        if resource is None or not hasattr(mmap.mmap, "madvise") or not (len(begins) or later):
            return None
        return cls(begins, sizes, later)

    def grow(self, appended: Sequence[Any], replaced: Sequence[Any]) -> None:
        """Some ``Segment``s have come, and others are not read any more.

        How much memory there is takes as long to find out as some batches, so it is asked where they are many more.
        """
        for sign, segments in ((1, appended), (-1, replaced)):
            _, sizes, later = _files_of(segments)
            self._bytes += sign * (int(sizes.sum()) + later)
        if not self._is_short and self._bytes - self._fitting > max(_MORE_BYTES, self._fitting // _MORE_SHARE):
            self._is_short = self._exceed_room()
            self.is_on = self.is_on or self._is_short

    def look(self, batches: int) -> bool:
        """Whether it is worth asking, where so many batches are copied now."""
        self._batches += batches
        if self.is_on:
            if self._batches >= _BATCHES_READ:
                has_gone = self._is_short and self._missed >= _FAULTS_EACH * self._batches
                self._again = _TIMES_AGAIN if has_gone else max(0, self._again - 1)
                before, batches, waited, seconds = self._begin_anew()
                self.is_on = self._since.blocks != before.blocks
                self.depth.saw(batches, waited, seconds)
        else:
            now = usage()
            if now.faults - self._since.faults >= _FAULTS:
                self._begin_anew()
                self.is_on = True
                self._is_short = self._is_short or self._exceed_room()
            elif self._batches >= _BATCHES_WATCHED:
                self._since, self._batches = now, 0
        return self.is_on

    def _begin_anew(self) -> tuple[Usage, int, float, float]:
        """Count from now on; the usage before, and the batches, the seconds of waiting and all seconds since."""
        now = perf_counter()
        found = self._since, self._batches, self._waited, now - self._looked
        self._since, self._batches, self._waited, self._missed, self._looked = usage(), 0, 0.0, 0, now
        return found

    def watched(self, copy: Callable[[Moved], Made], ranges: Callable[[], tuple[Int64s, Int64s, Int64s]]) -> Made:
        """What ``copy`` makes of some ranges where they are: how long it stands still says how far ahead to ask.

        What comes takes the room of what was not read for long, also of pages that were there when they were asked for:
        these are missed one by one when they are read. Where there are many they are asked for again, together.
        """
        if self._again and self._own is None:
            begins, ends, _ = ranges()
            begins, ends = merged(begins, ends, self.gap)
            self.ask(begins, ends, np.zeros(len(begins), np.int64))
        (faults, stops), began, computed = _own_faults(), perf_counter(), thread_time()
        with nullcontext() if self._own is None else self._own.moved() as moved:
            made = copy(moved)
        missed, stopped = (now - before for now, before in zip(_own_faults(), (faults, stops), strict=True))
        self._missed += missed
        if missed or stopped:
            self._waited += max(0.0, perf_counter() - began - (thread_time() - computed))
        return made

    def _exceed_room(self) -> bool:
        """Whether the files do not fit in what memory there is now."""
        self._fitting = self._bytes  # those that were there when it was looked at
        self._room = room_for_files()
        self.depth = ReadaheadWindow(self._room)
        return self._room is not None and self._bytes > self._room

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """See ``RemoteMemory``."""
        begins = begins & ~(_PAGE - 1)
        maps, found = self._known_maps(begins)
        if len(maps.begins):
            is_file = maps.in_file(found)
            found, begins, ends = found[is_file], begins[is_file], np.minimum(ends, maps.ends[found])[is_file]
            most = maps.at_once[found]
            if (ends - begins > most).any():
                begins, ends = _cut(begins, ends, most)
        if self._is_short:
            for number in set(found.tolist()) - self._met:
                self._met.add(number)
                begin = maps.begins[number : number + 1]
                self._advice.give(begin, maps.ends[number : number + 1] - begin, _RANDOM)
        self._advice.give(begins, ends - begins, _WILL_NEED)

    def _known_maps(self, addresses: Int64s) -> tuple[Maps, Int64s]:
        """What is mapped, and the map of each address; looked at again where one is in none."""
        maps, found = self._maps, _NOTHING
        if maps is None or (((found := maps.of(addresses)) < 0).any() and len(maps.begins)):
            maps = self._maps = Maps() if maps is None else Maps(maps.keeps, maps.begins[maps.sure])
            self._met, found = set(), maps.of(addresses)
        return maps, found

    def _sure_maps(self, addresses: Int64s, keeps: Any) -> Maps:
        """What is mapped, looked at since the files were there that these addresses are of and that ``keeps`` keeps:
        other files may have been there before.
        """
        maps, found = self._known_maps(addresses)
        if not maps.is_sure(keeps, found):
            before = maps.begins[maps.sure] if maps.keeps is keeps else _files_of(keeps.segments)[0]
            maps, self._met = Maps(keeps, np.concatenate([before, addresses])), set()
            self._maps = maps
        return maps

    def read_whole(
        self, begins: Int64s, ends: Int64s, until: Int64s, first: int, keeps: Any
    ) -> tuple[int, Int64s, Int64s]:
        """Have some ranges read as a whole into memory of this process's own, where files do not fit in memory.

        Args:
            begins, ends: The ranges, in any order, int64 ``[n]``.
            until: The batch from which on nobody reads each of them, int64 ``[n]``.
            first: The batch from which on they are read.
            keeps: The ``Snapshot``, which keeps the files mapped.

        Returns:
            How many bytes are; and the ranges that are not, as two arrays: they are to be asked for.
        """
        if self._is_short and not self._tried_own:
            self._tried_own = True
            with suppress(OSError, ValueError):
                self._own = DirectReadBuffer((self._room or 0) // _OWN_PART)
        if self._own is None:
            return 0, begins, ends
        begins, ends, until = by_group(begins, ends, until)
        taken = self._own.take(self._sure_maps(begins, keeps), begins, ends, until, first, keeps)
        if taken is None:
            self._own, self._tried_own = None, False  # another next time
            return 0, begins, ends
        return int((ends - begins)[taken].sum()), begins[~taken], ends[~taken]

    def let_go(self, batch: int) -> None:
        """Batch ``batch`` comes: what was read as a whole and nobody reads any more needs no memory."""
        if self._own is not None:
            self._own.let_go(batch)

    def there(self, begins: Int64s, ends: Int64s) -> bool:
        """See ``RemoteMemory``."""
        return True

    def wait(self, begins: Int64s, ends: Int64s) -> object:
        """See ``RemoteMemory``: the processor waits itself."""
        return None

    def looks_further(self) -> bool:
        """Never: the kernel chooses what stays."""
        return False

    def still(self, token: object) -> bool:
        """See ``RemoteMemory``: what goes away comes back when it is read."""
        return True


def _cut(begins: Int64s, ends: Int64s, most: Int64s) -> tuple[Int64s, Int64s]:
    """Ranges in pieces of at most so many bytes each: of 0..10 and 20..25 with 4, 0..4, 4..8, 8..10, 20..24, 24..25."""
    counts = -(-(ends - begins) // most)
    whose, number = ragged(counts)
    cut = begins[whose] + number * most[whose]
    return cut, np.minimum(cut + most[whose], ends[whose])


def _files_of(segments: Sequence[Any]) -> tuple[Int64s, Int64s, int]:
    """Where files of some ``Segment``s are mapped and their bytes, int64 ``[files]``; bytes of those mapped later."""
    data = [one.origin.data for one in segments if one.is_mapped and one.origin is not None]
    found = dict(pair for one in data for pair in _mapped_by(one))
    begins, sizes = np.array([*found.items()], np.int64).reshape(-1, 2).T
    pages = begins & ~(_PAGE - 1)
    return pages, sizes + begins - pages, sum(one.sealed_bytes for one in segments)


def _mapped_by(data: Any) -> Iterator[tuple[int, int]]:
    """Where the files begin, and their bytes, that a ``datasets.table.Table`` is mapped from."""
    for block in (one for row in getattr(data, "blocks", [[data]]) for one in row):
        columns = block.table.columns
        for buffer in columns[0].chunk(0).buffers() if columns and columns[0].num_chunks else ():
            while buffer is not None and buffer.parent is not None:
                buffer = buffer.parent
            if buffer is not None and buffer.size:
                yield buffer.address, buffer.size


def in_parts(begins: Int64s, nbytes: int, later: Sequence[tuple[Int64s, int]] = ()) -> Iterator[slice]:
    """Parts of some ranges of memory that are read one after the other, of so many bytes each from addresses on.

    Once reading them has waited for a disk, the kernel is asked for all that are left together, and for what is read
    ``later``: addresses, and bytes from each on.
    """
    before: int | None = usage().faults if resource is not None else None
    first = 0
    while first < len(begins):
        end = first + (_TRIED if first == 0 else _TOGETHER)
        yield slice(first, end)
        first = end
        if before is not None and usage().faults > before:
            before, rest = None, [(begins[first:], nbytes), *later]
            pages = np.concatenate([some & ~(_PAGE - 1) for some, _ in rest])
            _Advice().give(pages, np.concatenate([some + size for some, size in rest]) - pages, _WILL_NEED)


class _Advice:
    """Advice to the kernel about ranges of memory, many with one call where this process may do that."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._madvise, self._syscall = libc.madvise, libc.syscall
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        number, many, one = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
        self._syscall.argtypes = [number, one, many, ctypes.c_size_t, one, ctypes.c_uint]
        self._many = sys.platform == "linux" and hasattr(os, "pidfd_open")

    def give(self, begins: Int64s, sizes: Int64s, advice: int) -> None:
        """Advise on ranges; where it is refused things are as they were without it."""
        if self._many and len(begins) > 1:
            self._many = self._give_many(begins, sizes, advice)
            if self._many:
                return
        for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
            self._madvise(begin, size, advice)

    def _give_many(self, begins: Int64s, sizes: Int64s, advice: int) -> bool:
        """Whether the kernel takes many ranges at once, as Linux does of processes with the right to."""
        ranges = np.stack([begins, sizes], axis=1)
        try:
            this = os.pidfd_open(os.getpid())
        except OSError:
            return False
        try:
            for first in range(0, len(ranges), _MOST_RANGES):
                some = ranges[first : first + _MOST_RANGES]
                if self._syscall(_PROCESS_MADVISE, this, some.ctypes.data, len(some), advice, 0) < 0:
                    return False
        finally:
            os.close(this)
        return True


def usage() -> Usage:
    """What this process has had of disks so far."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(now.ru_majflt, now.ru_inblock)


def _own_faults() -> tuple[int, int]:
    """How many page faults of this thread had a page read, and how often it stood still, as it does for pages that are
    on their way; where the system does not say, of the process.
    """
    now = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return now.ru_majflt, now.ru_nvcsw
