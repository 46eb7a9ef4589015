"""Readahead of memory-mapped files on this machine by ``madvise``: it asks for the pages of future batches.

The idea in three parts. Batches are planned before they are copied, so ``LocalFiles.ask`` can tell the kernel which
pages come next (``MADV_WILLNEED``). ``LocalFiles.look`` turns this on when page faults wait for a disk, and off when
nothing is read from a disk any more: with data in memory it costs one look at a counter. ``ReadaheadWindow`` finds how
many bytes to ask for ahead. Example: with files of 2.8 GB and 900 MB of memory the window begins at 4 MB, some ten
batches of six columns.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, thread_time
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mouse_core.readahead.backing import Int64s, merged, ragged
from mouse_core.readahead.room import room_for_files

try:
    import resource
except ImportError:  # Windows, where nothing is asked for
    resource = None  # type: ignore[assignment]

Made = TypeVar("Made")

LEAST, FIRST, MOST = 1 << 20, 4 << 20, 64 << 20
"""Bytes that are asked for ahead: at least, at first, and at most."""

# Pages that were asked for take at most a sixteenth of the memory for files, or they are evicted before they are read.
_PART = 16
# Waiting for up to this share of the time counts as not waiting.
_CALM = 0.04
# Waiting counts as less below 0.8 times the earlier waiting, and as more above 1.25 times: measurements vary.
_LESS, _MORE = 0.8, 1.25
# Values of MADV_WILLNEED and MADV_RANDOM on Linux and macOS.
_WILL_NEED, _RANDOM = 3, 1
_PAGE = mmap.PAGESIZE
# The kernel reads at most its readahead size (128 KB by default) for one advice; the rest of a longer range is ignored.
_AT_ONCE = 128 << 10
# Ranges in one call of ``process_madvise``, at most.
_MOST_RANGES = 1024
# Readahead begins after 3 page faults that waited for a disk within 16 batches, and ends after 48 batches in which no
# block was read from a disk.
_FAULTS, _BATCHES_WATCHED, _BATCHES_READ = 3, 16, 48
# The room in memory is measured again when 64 MB and an eighth of the bytes were added since the last measurement.
_MORE_BYTES, _MORE_SHARE = 64 << 20, 8
# From 2 page faults a batch on, although all pages were asked for, pages are evicted before they are read. For the next
# 16 times 48 batches they are then asked for again, immediately before the copy.
_FAULTS_EACH, _TIMES_AGAIN = 2, 16
# ``in_parts`` gives 2 ranges first, then 64 at a time.
_TRIED, _TOGETHER = 2, 64


class ReadaheadWindow:
    """Number of bytes that are asked for ahead, adapted to how long batches wait for pages.

    A batch waits for one of three reasons: its pages have not come yet (more depth helps), its pages were evicted again
    (less depth helps), or the disk is at its limit (depth changes nothing). The reason is unknown, so the window is
    doubled or halved, and the next measurement decides: go on where waiting fell, go back where it rose, and return
    towards the first size where it stayed the same. From the first size the next try goes the other way. Where batches
    hardly wait the window stays.

    Args:
        room: Bytes of files that fit in memory; None: unknown.
    """

    def __init__(self, room: int | None = None) -> None:
        self.most = MOST if room is None else max(LEAST, min(MOST, room // _PART))
        self.nbytes = min(FIRST, self.most)
        self._first, self._out = self.nbytes, 0.5
        self._step, self._before = 2.0, 0.0

    def saw(self, batches: int, waited: float, seconds: float) -> None:
        """Adapt the window: ``batches`` were copied in ``seconds``, of which they waited ``waited`` for pages."""
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


class Usage(NamedTuple):
    """Disk activity of this process so far: page faults that waited for a disk, and blocks read."""

    faults: int
    blocks: int


class LocalFiles:
    """Memory-mapped files of this machine as a ``RemoteMemory`` that covers all addresses.

    ``ask`` has effect only while readahead is on; see ``look``. Where the files do not fit in memory, the kernel's own
    readahead is turned off as well (``MADV_RANDOM``).

    Args:
        segments: The ``Segment``s whose rows lie in files.
    """

    begin, size, gap, room = 0, (1 << 63) - 1, 8 << 10, None

    def __init__(self, segments: Sequence[Any]) -> None:
        self._bytes = self._fitting = 0
        # Mapped files, and sealed files that may not be open yet, for which the kernel's own readahead is on.
        self._read_by_kernel = list[Any]()
        # Since the last measurement: disk activity, batches, seconds of waiting, page faults, and its time.
        self._since, self._batches, self._waited, self._missed, self._looked = usage(), 0, 0.0, 0, perf_counter()
        # For how many more measurements pages are asked for again before the copy.
        self._again = 0
        self.is_on = self._is_short = False
        for segment in segments:
            self._count(segment, 1)
        self._measure_room()

    @classmethod
    def of(cls, segments: Sequence[Any]) -> LocalFiles | None:
        """Return the files of ``segments``; None where there are none, or where the system takes no advice."""
        in_files = any(one.sealed_files or _mapped_files(one) for one in segments)
        return cls(segments) if resource is not None and hasattr(mmap.mmap, "madvise") and in_files else None

    def grow(self, appended: Sequence[Any], replaced: Sequence[Any]) -> None:
        """Add the ``appended`` segments and remove the ``replaced`` ones.

        Measuring the room in memory takes as long as several batches, so it happens only after much growth.
        """
        for segment in appended:
            self._count(segment, 1)
        for segment in replaced:
            self._count(segment, -1)
        if not self._is_short and self._bytes - self._fitting > max(_MORE_BYTES, self._fitting // _MORE_SHARE):
            self._measure_room()

    def _count(self, segment: Any, sign: int) -> None:
        """Add the files of ``segment``, or with ``sign`` -1 remove them."""
        mapped = _mapped_files(segment)
        files = [*mapped, *segment.sealed_files]
        self._bytes += sign * (segment.sealed_bytes + sum(size for _, size in mapped))
        kept = [one for one in self._read_by_kernel if one not in files]
        self._read_by_kernel = [*kept, *files] if sign > 0 else kept

    def _measure_room(self) -> None:
        """Turn readahead on where the files do not fit in the memory that is available now."""
        self._fitting, room = self._bytes, room_for_files()
        self.depth = ReadaheadWindow(room)
        if room is not None and self._bytes > room:
            self.is_on = self._is_short = True
            self._turn_off_kernel()

    def _turn_off_kernel(self) -> None:
        """Turn off the kernel's own readahead for the files that are mapped by now."""
        places = [(one, one if isinstance(one, tuple) else one.mapped) for one in self._read_by_kernel]
        self._read_by_kernel = [one for one, place in places if place is None]
        begins, sizes = np.array([place for _, place in places if place], np.int64).reshape(-1, 2).T
        _advise(begins & ~(_PAGE - 1), sizes + begins % _PAGE, _RANDOM)

    def look(self, batches: int) -> bool:
        """Return whether readahead is on, after ``batches`` more batches."""
        self._batches += batches
        if self.is_on:
            if self._batches >= _BATCHES_READ:
                evicted = self._is_short and self._missed >= _FAULTS_EACH * self._batches
                self._again = _TIMES_AGAIN if evicted else max(0, self._again - 1)
                before, batches, waited, seconds = self._restart()
                self.is_on = self._since.blocks != before.blocks
                self.depth.saw(batches, waited, seconds)
        else:
            now = usage()
            if now.faults - self._since.faults >= _FAULTS:
                self._restart()
                self.is_on = True
                if not self._is_short:
                    self._measure_room()
            elif self._batches >= _BATCHES_WATCHED:
                self._since, self._batches = now, 0
        return self.is_on

    def _restart(self) -> tuple[Usage, int, float, float]:
        """Restart the measurement; return its earlier usage, batches, seconds of waiting, and seconds in all."""
        now = perf_counter()
        measured = self._since, self._batches, self._waited, now - self._looked
        self._since, self._batches, self._waited, self._missed, self._looked = usage(), 0, 0.0, 0, now
        return measured

    def watched(self, copy: Callable[[], Made], ranges: Callable[[], tuple[Int64s, Int64s, Int64s]]) -> Made:
        """Return ``copy()``, which reads ``ranges()``, and measure how long it waits for pages.

        New pages replace pages that were not read for long, among them pages that were in memory when they were asked
        for. Each of these would be a page fault of its own, so where there are many they are asked for again together.
        """
        if self._again:
            begins, ends, _ = ranges()
            begins, ends = merged(begins, ends, self.gap)
            self.ask(begins, ends, np.zeros(len(begins), np.int64))
        (faults, stops), began, computed = _own_faults(), perf_counter(), thread_time()
        made = copy()
        missed, stopped = (now - before for now, before in zip(_own_faults(), (faults, stops), strict=True))
        self._missed += missed
        if missed or stopped:
            self._waited += max(0.0, perf_counter() - began - (thread_time() - computed))
        return made

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """See ``RemoteMemory``."""
        if self._is_short and self._read_by_kernel:
            self._turn_off_kernel()
        begins = begins & ~(_PAGE - 1)
        if len(begins) and (ends - begins).max() > _AT_ONCE:
            begins, ends = _cut(begins, ends, _AT_ONCE)
        _advise(begins, ends - begins, _WILL_NEED)

    def there(self, begins: Int64s, ends: Int64s) -> bool:
        """See ``RemoteMemory``."""
        return True

    def wait(self, begins: Int64s, ends: Int64s) -> object:
        """See ``RemoteMemory``: the processor waits itself."""
        return None

    def looks_further(self) -> bool:
        """Return False: the kernel chooses which pages stay."""
        return False

    def still(self, token: object) -> bool:
        """See ``RemoteMemory``: an evicted page comes back when it is read."""
        return True


def _cut(begins: Int64s, ends: Int64s, most: int) -> tuple[Int64s, Int64s]:
    """Ranges in pieces of at most ``most`` bytes: 0..10 and 20..25 with 4 are 0..4, 4..8, 8..10, 20..24, 24..25."""
    counts = -(-(ends - begins) // most)
    whose, number = ragged(counts)
    cut = begins[whose] + number * most
    return cut, np.minimum(cut + most, ends[whose])


def _mapped_files(segment: Any) -> list[tuple[int, int]]:
    """Return the first address and the bytes of each file that a segment's dataset is mapped from.

    They are the outermost buffers of each ``datasets.table.Table`` block.
    """
    files = dict[int, int]()
    data = segment.origin.data if segment.is_mapped and segment.origin is not None else None
    for block in (one for row in getattr(data, "blocks", [[data]]) for one in row if one is not None):
        columns = block.table.columns
        for buffer in columns[0].chunk(0).buffers() if columns and columns[0].num_chunks else ():
            while buffer is not None and buffer.parent is not None:
                buffer = buffer.parent
            if buffer is not None and buffer.size:
                files[buffer.address] = buffer.size
    return [*files.items()]


def in_parts(begins: Int64s, nbytes: int, later: Sequence[tuple[Int64s, int]] = ()) -> Iterator[slice]:
    """Yield slices of ``begins`` to read one after the other, ``nbytes`` from each address on.

    Once reading waited for a disk, all ranges that are left are asked for together, and so are the ranges that are read
    ``later``: pairs of addresses, and bytes from each of them on.
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
            _advise(pages, np.concatenate([some + size for some, size in rest]) - pages, _WILL_NEED)


def _advise(begins: Int64s, sizes: Int64s, advice: int) -> None:
    """Give the kernel ``advice`` about ranges of memory; it ignores ranges that it refuses."""
    one, many = _system_calls()
    if many is not None and len(begins) > 1 and _advise_many(many, np.stack([begins, sizes], axis=1), advice):
        return
    for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        one(begin, size, advice)


def _advise_many(process_madvise: Any, ranges: Int64s, advice: int) -> bool:
    """Whether the kernel took ``advice`` about all ``ranges``, int64 ``[n, 2]``; it may allow a process one at a time.

    One call for 1,024 ranges takes half the processor time of a call for each.
    """
    try:
        this = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        parts = (ranges[first : first + _MOST_RANGES] for first in range(0, len(ranges), _MOST_RANGES))
        return all(process_madvise(this, one.ctypes.data, len(one), advice, 0) == one[:, 1].sum() for one in parts)
    finally:
        os.close(this)


@functools.cache
def _system_calls() -> tuple[Any, Any]:
    """The C library's ``madvise`` and ``process_madvise``, None where it has none (before glibc 2.36, and on macOS).

    Python's ``mmap.madvise`` takes no memory that Arrow has mapped.
    """
    library, size, number = ctypes.CDLL(None), ctypes.c_size_t, ctypes.c_int
    many: Any = getattr(library, "process_madvise", None)
    library.madvise.argtypes = [ctypes.c_void_p, size, number]
    if many is not None:
        many.argtypes, many.restype = [number, ctypes.c_void_p, size, number, ctypes.c_uint], ctypes.c_ssize_t
    return library.madvise, many


def usage() -> Usage:
    """Return the disk activity of this process so far."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(now.ru_majflt, now.ru_inblock)


def _own_faults() -> tuple[int, int]:
    """Return this thread's page faults that waited for a disk, and its voluntary waits, as for pages that are coming.

    Where the system counts by process only, they are the process's.
    """
    now = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return now.ru_majflt, now.ru_nvcsw
