"""Readahead, which requests the bytes of future batches before the batches are copied.

Batches are planned in blocks, so it is known which bytes batch 7 needs while batch 3 is copied. ``ReadAhead.copied``
copies a batch and requests the next batches: up to ``LocalFiles.depth`` bytes of local files, or 64 MB of remote
memory.
Example: with a depth of 4 MB and batches of 400 KB, batches 4 to 13 are requested when batch 3 is copied, and further
batches are requested when 2 MB of the requested bytes are not copied yet.

- ``RemoteMemory`` is memory whose bytes are fetched on request: a cache of remote objects, or ``LocalFiles``.
- ``LocalFiles`` requests pages of mapped files from the kernel (``MADV_WILLNEED``). Readahead starts when page faults
  wait for a disk, and stops when no bytes are read from a disk any more. If all data are in memory, readahead only
  reads a counter of page faults. The depth is 16 MB. If less than 256 MB of memory is available for files, the depth is
  a sixteenth of this memory, so that pages are not evicted before they are read.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt

from mouse_core._base.room import room_for_files as room_for_files
from mouse_core.errors import DataError

Int64s = npt.NDArray[np.int64]
Made = TypeVar("Made")

APART = 48
"""To sort the ranges of several batches at once, the addresses of batch n are increased by n times 2**48."""


class RemoteMemory(Protocol):
    """Memory whose bytes are fetched on request, at the addresses ``begin .. begin + size``.

    Arguments ``begins`` and ``ends`` are ranges of addresses, int64 ``[n]`` each, ascending and without overlap.
    Several threads can call the methods at the same time.
    """

    begin: int
    """The first address."""
    size: int
    """Number of bytes."""
    gap: int
    """Ranges with at most this number of bytes between them are requested as one range."""
    room: int | None
    """Largest number of bytes that can be present at once; None: unknown."""

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Request ranges that batches will read. The method returns at once and raises no errors.

        Args:
            begins, ends: The ranges, batch by batch; within a batch they ascend without overlap.
            batches: The index of the batch of each range, int64 ``[n]``.
        """
        ...

    def there(self, begins: Int64s, ends: Int64s) -> bool:
        """Whether the bytes of all ranges are present; False also if this is unknown."""
        ...

    def looks_further(self) -> bool:
        """Whether the memory can also request bytes that are not urgent, because only later batches need them."""
        ...

    def wait(self, begins: Int64s, ends: Int64s) -> object:
        """Wait until the bytes of all ranges are present; bytes that were not requested yet are requested now.

        Returns:
            A token for ``still``.

        Raises:
            Exception: The bytes cannot be fetched.
        """
        ...

    def still(self, token: object) -> bool:
        """Whether no byte of the ranges was evicted since the call of ``wait``. If a byte was evicted, copies made
        since that call are invalid.
        """
        ...


def merged(begins: Int64s, ends: Int64s, gap: int = 0) -> tuple[Int64s, Int64s]:
    """Return the ranges in ascending order, merged where at most ``gap`` bytes lie between two ranges; int64 ``[n]``
    each.

    Example: ranges 50..60, 0..10, 5..30 and 34..40 with a gap of 4 become 0..40 and 50..60. In ascending order, the
    running maxima of the ends are 10, 30, 40 and 60. Only the last range begins more than 4 bytes after the running
    maximum of the earlier ranges.
    """
    if not len(begins):
        return begins, ends
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    apart = np.flatnonzero(begins[1:] > ends[:-1] + gap)
    return begins[np.append(0, apart + 1)], ends[np.append(apart, len(ends) - 1)]


def by_batch(begins: Int64s, ends: Int64s, numbers: Int64s, gap: int = 0) -> tuple[Int64s, Int64s, Int64s]:
    """Merge the ranges of each batch separately; return the ranges of batch 0, then of batch 1, and so on.

    Args:
        begins, ends, numbers: The ranges in any order, and the index of the batch of each range, from 0; int64 ``[n]``.
        gap: See ``merged``.
    """
    apart = numbers << APART  # ranges of different batches lie far apart and do not merge
    begins, ends = merged(begins + apart, ends + apart, gap)
    numbers = begins >> APART
    apart = numbers << APART
    return begins - apart, ends - apart, numbers


def ragged(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Return pairs ``(e, 0 .. counts[e] - 1)`` in order: for ``[2, 0, 1]``, ``(0, 0), (0, 1), (2, 0)``."""
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - (np.cumsum(counts) - counts)[whose]


def _inside(
    backings: Sequence[RemoteMemory], begins: Int64s, ends: Int64s
) -> Iterator[tuple[RemoteMemory, npt.NDArray[np.bool_]]]:
    """Yield each remote memory, and a mask of the ranges in this memory. A range that lies in several memories is
    assigned to the first of them.
    """
    rest = ends > begins
    for backing in backings:
        inside = rest & (begins >= backing.begin) & (begins < backing.begin + backing.size)
        if inside.any():
            rest &= ~inside
            yield backing, inside


def in_backings(
    backings: Sequence[RemoteMemory], begins: Int64s, ends: Int64s
) -> Iterator[tuple[RemoteMemory, Int64s, Int64s]]:
    """Yield each remote memory, and the ranges in this memory; ranges are merged as the memory's ``gap`` allows."""
    for backing, inside in _inside(backings, begins, ends):
        yield backing, *merged(begins[inside], ends[inside], backing.gap)


def ask_backings(
    backings: Sequence[RemoteMemory], begins: Int64s, ends: Int64s, numbers: Int64s, batches: Int64s
) -> int:
    """Request the ranges that batches will read from remote memory; return the number of requested bytes.

    Args:
        backings: Memory mappings that can contain the ranges.
        begins, ends: The ranges, in any order.
        numbers: The position of each range's batch in ``batches``.
        batches: The indices of the batches.
    """
    nbytes = 0
    for backing, inside in _inside(backings, begins, ends):
        firsts, behind, whose = by_batch(begins[inside], ends[inside], numbers[inside], backing.gap)
        backing.ask(firsts, behind, batches[whose])
        nbytes += int((behind - firsts).sum())
    return nbytes


def copied_when_there(backings: Sequence[RemoteMemory], begins: Int64s, ends: Int64s, copy: Callable[[], Made]) -> Made:
    """Wait for ranges of memory and call ``copy()``; repeat both if a range was evicted during the copy.

    Args:
        backings: Memory mappings that can contain the ranges.
        begins, ends: The ranges, int64 ``[n]`` each, in any order.
        copy: Function that reads the ranges; it must keep no reference to the memory.
    """
    parts = list(in_backings(backings, begins, ends))
    while True:
        tokens = [backing.wait(first, end) for backing, first, end in parts]
        made = copy()
        if all(part[0].still(token) for part, token in zip(parts, tokens, strict=True)):
            return made


try:
    import resource
except ImportError:  # Windows: pages are not requested
    resource = None  # type: ignore[assignment]


# Bytes that are requested ahead: by default; if memory is short; and if batches are large.
_USUAL, _LEAST, _MOST = 16 << 20, 1 << 20, 64 << 20
# Requested pages take at most a sixteenth of the memory for files; more would be evicted before they are read.
_PART = 16
# Values of MADV_WILLNEED and MADV_RANDOM on Linux and macOS.
_WILL_NEED, _RANDOM = 3, 1
_PAGE = mmap.PAGESIZE
# The kernel reads at most its readahead size (128 KB by default) for one advice; the rest of a longer range is ignored.
_AT_ONCE = 128 << 10
# Readahead begins after 3 page faults that waited for a disk within 16 batches, and ends after 48 batches in which no
# block was read from a disk.
_FAULTS, _BATCHES_WATCHED, _BATCHES_READ = 3, 16, 48
# The room in memory is measured again when 64 MB and an eighth of the bytes were added since the last measurement.
_MORE_BYTES, _MORE_SHARE = 64 << 20, 8
# ``in_parts`` yields 2 ranges first, then 64 at a time.
_TRIED, _TOGETHER = 2, 64


class LocalFiles:
    """Memory-mapped files of this machine as a ``RemoteMemory`` that covers all addresses.

    ``ask`` has an effect only while readahead is on; see ``look``. If the files do not fit in memory, the kernel's own
    readahead is turned off as well (``MADV_RANDOM``).

    Args:
        segments: The segments (``Segment``) whose rows lie in files.
    """

    begin, size, gap, room = 0, (1 << 63) - 1, 8 << 10, None

    def __init__(self, segments: Sequence[Any]) -> None:
        self._bytes = self._fitting = 0
        # Mapped files, and sealed files that may not be open yet, for which the kernel's own readahead is on.
        self._read_by_kernel = list[Any]()
        # Disk activity at the last measurement, and the batches since.
        self._since, self._batches = usage(), 0
        self.is_on = self._is_short = False
        for segment in segments:
            self._count(segment, 1)
        self._measure_room()

    @classmethod
    def of(cls, segments: Sequence[Any]) -> LocalFiles | None:
        """Return the files of ``segments``; None if no segment is in a file, or if the system has no ``madvise``."""
        in_files = any(one.sealed_files or _mapped_files(one) for one in segments)
        return cls(segments) if resource is not None and hasattr(mmap.mmap, "madvise") and in_files else None

    def grow(self, appended: Sequence[Any], replaced: Sequence[Any]) -> None:
        """Add the files of the ``appended`` segments, and remove the files of the ``replaced`` segments.

        Measuring the free memory takes as long as computing several batches, so it is measured only after the files
        have grown considerably.
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
        """Turn readahead on if the files do not fit in the memory that is available now."""
        self._fitting, room = self._bytes, room_for_files()
        # The number of bytes to request ahead, and the largest number for large batches.
        self.most = _MOST if room is None else max(_LEAST, min(_MOST, room // _PART))
        self.depth = min(_USUAL, self.most)
        if room is not None and self._bytes > room:
            self.is_on = self._is_short = True
            self._turn_off_kernel()

    def _turn_off_kernel(self) -> None:
        """Turn off the kernel's own readahead for all files mapped so far."""
        places = [(one, one if isinstance(one, tuple) else one.mapped) for one in self._read_by_kernel]
        self._read_by_kernel = [one for one, place in places if place is None]
        begins, sizes = np.array([place for _, place in places if place], np.int64).reshape(-1, 2).T
        _advise(begins & ~(_PAGE - 1), sizes + begins % _PAGE, _RANDOM)

    def look(self, batches: int) -> bool:
        """Count ``batches`` more batches, and return whether readahead is on."""
        self._batches += batches
        if self.is_on:
            if self._batches >= _BATCHES_READ:
                before = self._since.ru_inblock
                self._restart()
                self.is_on = self._since.ru_inblock != before
        elif usage().ru_majflt - self._since.ru_majflt >= _FAULTS:
            self._restart()
            self.is_on = True
            if not self._is_short:
                self._measure_room()
        elif self._batches >= _BATCHES_WATCHED:
            self._restart()
        return self.is_on

    def _restart(self) -> None:
        """Restart the measurement of disk activity."""
        self._since, self._batches = usage(), 0

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
        """Return immediately, because reading a mapped page waits for the page."""
        return None

    def looks_further(self) -> bool:
        """Return False, because the kernel chooses which pages stay in memory."""
        return False

    def still(self, token: object) -> bool:
        """Return True: the system reads an evicted page again."""
        return True


def _cut(begins: Int64s, ends: Int64s, most: int) -> tuple[Int64s, Int64s]:
    """Split ranges into ranges of at most ``most`` bytes: with 4, 0..10 becomes 0..4, 4..8 and 8..10."""
    counts = -(-(ends - begins) // most)
    whose, number = ragged(counts)
    cut = begins[whose] + number * most
    return cut, np.minimum(cut + most, ends[whose])


def _mapped_files(segment: Any) -> list[tuple[int, int]]:
    """Return the first address and the bytes of each file that a segment's dataset is mapped from.

    The mapped files are the outermost buffers of each ``datasets.table.Table`` block.
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
    """Yield slices of ``begins``. Before the caller requests the next slice, the caller reads ``nbytes`` bytes at each
    address of the slice.

    When a read has waited for a disk once, all remaining ranges are requested together with the ranges ``later``. Each
    item of ``later`` is a pair: addresses, and the number of bytes at each address.
    """
    before: int | None = usage().ru_majflt if resource is not None else None
    first = 0
    while first < len(begins):
        end = first + (_TRIED if first == 0 else _TOGETHER)
        yield slice(first, end)
        first = end
        if before is not None and usage().ru_majflt > before:
            before, rest = None, [(begins[first:], nbytes), *later]
            pages = np.concatenate([some & ~(_PAGE - 1) for some, _ in rest])
            _advise(pages, np.concatenate([some + size for some, size in rest]) - pages, _WILL_NEED)


def _advise(begins: Int64s, sizes: Int64s, advice: int) -> None:
    """Give the kernel ``advice`` (``madvise``) about ranges of memory; ranges that the kernel rejects are ignored."""
    madvise = _madvise()
    for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        madvise(begin, size, advice)


@functools.cache
def _madvise() -> Any:
    """Return the C library's ``madvise``; Python's ``mmap.madvise`` does not accept memory that Arrow has mapped."""
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library.madvise


def usage() -> Any:
    """Return the resources that this process has used so far: ``ru_majflt``, the number of page faults that waited for
    a disk, and ``ru_inblock``, the number of blocks that were read.
    """
    return resource.getrusage(resource.RUSAGE_SELF)


Block = Any
"""A ``batches._planner.Block``: batches that were planned together. (This package must not import ``batches``.)"""
Views = Any
"""An ``_arrow.byte_views.ByteViews``: how the batches of a block are copied."""

# Bytes of remote memory, and batches of any memory, that are requested ahead of the copies.
_FAR_BYTES, _AHEAD_BATCHES = 64 << 20, 64
# If a cache evicts by later reads, two more batches are requested with each batch that is copied.
_FURTHER = 2
# For mapped files, no more bytes are requested while more than half of the requested bytes are left, or until two
# copies' worth of batches fit: sorting the ranges of two batches takes hardly longer than sorting those of one. More
# than two would make the caller wait.
_LEFT, _PACE = 0.5, 2
# Batches whose rows were read long before, as parts of stretches, are copied 8 at a time.
_OF_STRETCHES = 8
# 8 batches of remote memory are requested together, if as many are left, and are copied together.
_FAR_TOGETHER = 8
# 64 batches are planned together if pages come from a disk, so that the data for planning are read at once.
_PLANNED, _MANY = 64, 1 << 30
# A caller counts as gone back if it reads, 3 times in a row, a batch more than 16 before the requested ones. Threads
# are less far apart, and two callers that take turns alternate.
_TURNS, _TIMES_BACK = 16, 3
_NOTHING = np.zeros(0, np.int64)
_NO_RANGES = _NOTHING, _NOTHING, _NOTHING


class ReadAhead:
    """Requests the bytes of a pipeline's batches ahead of the copies, and waits for remote bytes.

    Args:
        backings: Remote memory that can contain the bytes.
        files: Mapped local files, for all addresses outside of ``backings``; copies do not wait for these files. None:
            no files.
        blocks: Object that plans blocks of batches, as ``batches._planner.PlannedBlocks`` does.
        views: Function that returns the views by which a block is copied; None for a block that is not copied.
        gathered: Function that yields the ranges of a batch that are read but not copied: first the ranges that are
            known already, then the ranges that become known when the first ranges are read.
        read: Function that takes a block of batches and returns the blocks whose rows must be read. If batches are
            drawn from stretches (runs of consecutive rows that are read at once), the function returns a block of
            stretches, and also the given block if stretches can be evicted early. Otherwise, the function returns the
            given block.
    """

    def __init__(
        self,
        backings: Sequence[RemoteMemory],
        files: LocalFiles | None,
        blocks: Any,
        views: Callable[[Block], Views],
        gathered: Callable[[Block, int], Iterator[tuple[Int64s, Int64s]]],
        read: Callable[[Block], Sequence[Block]] = lambda block: [block],
    ) -> None:
        self._always, self._files = tuple(backings), files
        self._backings, self._blocks, self._views = self._always, blocks, views
        self._gathered, self._read = gathered, read
        # Bytes of the requested batches that are not copied yet, by their index.
        self._asked: dict[int, int] = {}
        # The next batch to request: its block, and its number there.
        self._next: tuple[Block, int] | None = None
        # How many times in a row a batch far before the requested ones was read; and the index behind the last batch
        # read.
        self._back, self._behind = 0, -1
        self._lock = threading.Lock()

    @classmethod
    def of(cls, snapshot: Any, *planned: Any) -> ReadAhead:
        """Return the readahead for a ``Snapshot``; ``planned`` are the arguments that follow ``files`` in the
        constructor."""
        return cls(snapshot.backings, LocalFiles.of(snapshot.segments), *planned)

    def forward(self, growth: Any, snapshot: Any, *planned: Any) -> ReadAhead:
        """Return the readahead for a snapshot that has grown; the measurements of the files so far are kept."""
        files = self._files
        if files is None:
            files = LocalFiles.of(growth.appended)
        else:
            files.grow(growth.appended, growth.replaced)
        elsewhere = self._always or any(one.backing is not None for one in growth.appended)
        return type(self)(snapshot.backings if elsewhere else (), files, *planned)

    def is_on(self, batches: int = 0) -> bool:
        """Count ``batches`` more batches, and return whether readahead is on."""
        if self._files is not None:
            files = (self._files,) if self._files.look(batches) else ()
            self._backings = (*self._always, *files)
            self._blocks.most = _PLANNED if files else _MANY
        return bool(self._backings)

    def together(self, block: Block, most: int) -> int:
        """Return how many batches of a block are copied at once, at most ``most``.

        If pages are read from a disk, only one batch is copied, so that a reader does not wait for the pages of other
        batches. If stretches are used, most pages were read long before, so more batches are copied.
        """
        if not self.is_on():
            return most
        if self._always:
            return min(most, _FAR_TOGETHER)
        return min(most, _OF_STRETCHES if self._stretches(block) is not None else 1)

    def there(self, views: Views, first: int, count: int) -> bool:
        """Whether ``count`` batches of a block can be copied without waiting for remote bytes; False also if this is
        unknown.
        """
        if not self._always:
            return True
        parts = in_backings(self._always, *views.ranges(first, count)[:2])
        return all(backing.there(begins, ends) for backing, begins, ends in parts)

    def copied(self, block: Block, views: Views, first: int, count: int) -> dict[str, npt.NDArray[Any]]:
        """Return ``views.copy(first, count)`` once its bytes are present, and request the next batches."""
        copy: Callable[[], dict[str, npt.NDArray[Any]]] = partial(views.copy, first, count)
        if not (self.reach(block, first, count) and self._always):  # for local pages the processor waits by itself
            return copy()
        begins, ends, _ = views.ranges(first, count)
        return copied_when_there(self._backings, begins, ends, copy)

    def reach(self, block: Block, first: int, count: int) -> bool:
        """Request the bytes of ``count`` batches of a block, which are read now, and the bytes of later batches; return
        whether readahead is on.
        """
        if not self.is_on(count):
            return False
        for number in range(first, first + count):
            if self._asked.pop(block.first + number * block.step, None) is None:
                self._ask(block, number, 1)
        if self._lock.acquire(blocking=False):  # otherwise another thread requests batches
            try:
                self._reach(block, first, count)
            finally:
                self._lock.release()
        return True

    def _reach(self, block: Block, first: int, count: int) -> None:
        """Request the bytes of the batches after the given batches, up to the end of the next block."""
        begin, number, current, copied = block.first + first * block.step, first + count, block, count
        in_turn, self._behind = begin == self._behind, begin + count * block.step
        if block.kind < 0 and not in_turn:
            return  # in no order
        asked = self._left(block.first + number * block.step, block.step)
        if self._next is not None and self._asked:
            block, number = self._next
        far, pace = bool(self._always), _MANY if self._always else _PACE * count
        some = pace * asked // max(1, len(self._asked))
        most = self._most(some)
        if asked > max(_LEFT * most, most - some) and not far:
            return
        while asked < most and len(self._asked) < _AHEAD_BATCHES and pace > 0:
            if number == len(block.sizes):
                behind = self._block_behind(block) if block is current else None
                if behind is None:
                    break
                block, number = behind, 0
            # As many batches as fit, if they are as large as the batches before them.
            count = int((most - asked) * len(self._asked) / max(asked, 1)) if self._asked else 1
            if far:
                count = min(count, _AHEAD_BATCHES - len(self._asked))
                if (count < _FAR_TOGETHER and asked > _LEFT * most) or 0 < count < _FAR_TOGETHER < len(self._asked):
                    break  # requested later with further batches: sorting several takes hardly longer
                count = min(count, _FAR_TOGETHER)
            count = min(max(count, 1), pace, len(block.sizes) - number)
            nbytes = self._ask(block, number, count)
            for one in range(number, number + count):
                self._asked[block.first + one * block.step] = nbytes // count
            asked += nbytes
            number += count
            pace -= count
        self._next = self._further(block, number, copied) if far else (block, number)

    def _further(self, block: Block, number: int, copied: int) -> tuple[Block, int]:
        """Request the bytes of more batches, if a cache can hold them; return the block and the index of the next
        batch.

        These batches are planned a second time when they are read, because keeping their blocks would take much memory.
        """
        for _ in range(_FURTHER * copied):
            if not any(one.looks_further() for one in self._always):
                break
            if number == len(block.sizes):
                if len(block.sizes) == 1 and block.kind == block.first:
                    break
                try:
                    block, number = self._blocks.behind(block), 0
                except Exception:
                    break  # the reader of that batch gets the error
            self._asked[block.first + number * block.step] = self._ask(block, number, 1)
            number += 1
        return block, number

    def _left(self, index: int, step: int) -> int:
        """Return how many of the requested bytes are not copied yet, if batch ``index`` is the next batch to copy."""
        # Other threads remove entries meanwhile, so this iterates over a copy.
        asked = list(self._asked)
        self._back = self._back + 1 if asked and min(asked) > index + _TURNS * step else 0
        for old in asked if self._back == _TIMES_BACK else [one for one in asked if one < index]:
            self._asked.pop(old, None)
        return sum(list(self._asked.values()))

    def _most(self, some: int) -> int:
        """Return how many bytes to request ahead; if the memory has room, the number is at least ``some``."""
        if self._always or self._files is None:
            return _FAR_BYTES
        return max(self._files.depth, min(some, self._files.most))

    def _by_views(self, read: Sequence[Block], first: int, count: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the ranges that are read when some batches are copied, and the index of the batch of each range, from
        0."""
        found = [_NO_RANGES]
        for one in read:
            views, (rows, batches) = self._views(one), _rows(one, first, count)
            if views is not None and len(rows):
                begins, ends, numbers = views.ranges(rows.start, len(rows))
                found.append((begins, ends, batches[numbers]))
        begins, ends, numbers = (np.concatenate(some) for some in zip(*found, strict=True))
        return begins, ends, numbers

    def _stages(
        self, read: Sequence[Block], first: int, count: int, ranges: tuple[Int64s, Int64s, Int64s]
    ) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
        """Yield ``ranges`` and all other known ranges of the batches; then yield the ranges that become known when the
        first ranges are read.
        """
        begins, ends, numbers = ranges
        for one in read:
            rows, batches = _rows(one, first, count)
            for row, number in zip(rows, batches.tolist(), strict=True):
                for more in self._gathered(one, row):
                    whose = np.append(numbers, np.full(len(more[0]), number))
                    yield np.append(begins, more[0]), np.append(ends, more[1]), whose
                    begins, ends, numbers = _NO_RANGES
        yield begins, ends, numbers

    def _stretches(self, block: Block) -> Any:
        """Return the stretches of rows that the batches of a block begin to read, if stretches stay in memory."""
        try:
            read = self._read(block)
        except (DataError, IndexError):
            return None  # the reader of damaged rows gets the error
        return read[0].stretches if len(read) == 1 else None

    def _block_behind(self, block: Block) -> Block | None:
        """Return the next block, if batches are read in order."""
        if len(block.sizes) == 1 and block.kind == block.first:
            return None  # for the first batch, the next one is unknown
        try:
            return self._blocks.block_with(block.end)[0]
        except Exception:
            return None  # the reader of that batch gets the error

    def _ask(self, block: Block, number: int, count: int) -> int:
        """Request all ranges of some batches; return the number of bytes."""
        nbytes, index = 0, block.first + number * block.step
        try:
            read = self._read(block)
            ranges = self._by_views(read, number, count)
            for begins, ends, numbers in self._stages(read, number, count, ranges):
                if not self._always:  # the kernel does not distinguish batches
                    numbers = np.zeros(len(begins), np.int64)
                batches = index + np.arange(count) * block.step
                nbytes += ask_backings(self._backings, begins, ends, numbers, batches)
        except (DataError, IndexError):
            pass  # the reader of damaged rows gets the error
        return nbytes


def _rows(block: Block, first: int, count: int) -> tuple[range, Int64s]:
    """Return the rows (batches or stretches) of a block that some batches read, and the index of each row's batch, from
    0.

    Example: batch 0 has stretches 0 and 1, batch 1 has none, and batch 2 has stretch 2. For two batches from batch 1
    on, the result is row 2 with the batch index 1, because batch 2 is the second of the two.
    """
    if block.stretches is None:
        return range(first, first + count), np.arange(count)
    firsts = block.stretches.firsts[first : first + count + 1]
    return range(int(firsts[0]), int(firsts[-1])), np.repeat(np.arange(count), np.diff(firsts))


def weakly(method: Callable[..., Any], gone: Any) -> Callable[..., Any]:
    """Return a function that calls ``method`` but does not keep the method's object alive. After the object is deleted,
    the function returns ``gone``.
    """
    reference = WeakMethod(method)

    def call(*given: Any) -> Any:
        alive = reference()
        return gone if alive is None else alive(*given)

    return call
