"""Readahead: the bytes of the next batches are requested before the batches are copied.

The idea in three parts. Batches are planned in blocks, so the bytes of batch 7 are known while batch 3 is copied.
``ReadAhead.copied`` copies a batch and asks for the batches behind it, as many as ``LocalFiles.depth`` allows, or 64 MB
of remote memory. ``_asked`` counts bytes that were asked for and not copied yet. Example: with a depth of 4 MB and
batches of 400 KB, batches 4 to 13 are asked for when batch 3 is copied, and the next ones when 2 MB of these are left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.readahead.backing import Int64s, RemoteMemory, ask_backings, copied_when_there, in_backings
from mouse_core.readahead.local import LocalFiles

Block = Any
"""A ``batches._planner.Block``: batches that were planned together. That room lies above this one."""
Views = Any
"""An ``_arrow.byte_views.ByteViews``: how the batches of a block are copied."""

# Bytes of remote memory, and batches of any memory, that are requested ahead of the copies.
_FAR_BYTES, _AHEAD_BATCHES = 64 << 20, 64
# If a cache evicts by later reads, two more batches are requested with each batch that is copied.
_FURTHER = 2
# Nothing of mapped files is requested while more than half of the requested bytes are left, or before twice the batches
# of a copy fit: sorting the ranges of two batches takes hardly longer than those of one. It is at most twice, as the
# caller waits meanwhile.
_LEFT, _PACE = 0.5, 2
# Of batches from stretches that were read long before, 8 are copied at a time.
_OF_STRETCHES = 8
# 8 batches of remote memory are requested together, if as many are left, and are copied together.
_FAR_TOGETHER = 8
# 64 batches are planned together if pages come from a disk: so the data for planning are read at once.
_PLANNED, _MANY = 64, 1 << 30
# A caller has gone back when it reads 3 times a batch more than 16 before the requested ones: threads are less far
# apart, and two callers that take turns alternate.
_TURNS, _TIMES_BACK = 16, 3
_NOTHING = np.zeros(0, np.int64)
_NO_RANGES = _NOTHING, _NOTHING, _NOTHING


class ReadAhead:
    """Requests the bytes of a pipeline's batches ahead of the copies, and waits for remote bytes.

    Args:
        backings: Remote memory that may hold the bytes.
        files: Mapped local files, for all addresses outside of ``backings``; copies do not wait for them. None: none.
        blocks: Plans blocks of batches, as ``batches._planner.PlannedBlocks`` does.
        views: Returns the views by which a block is copied; None for a block that is not copied.
        gathered: Yields ranges of a batch that are read and not copied: first the known ones, then ranges that reading
            the first reveals.
        read: Returns the blocks that are read for a block: itself; or, if batches are drawn from stretches of rows that
            are read as a whole, a block of these stretches; or both, if stretches may be evicted early.
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
        # How often in turn a batch far before the requested ones was read; and the index behind the last batch read.
        self._back, self._behind = 0, -1
        self._lock = threading.Lock()

    @classmethod
    def of(cls, snapshot: Any, *planned: Any) -> ReadAhead:
        """Return the readahead for a ``Snapshot``; ``planned`` are the constructor's arguments behind the files."""
        return cls(snapshot.backings, LocalFiles.of(snapshot.segments), *planned)

    def forward(self, growth: Any, snapshot: Any, *planned: Any) -> ReadAhead:
        """Return the readahead for a snapshot that has grown, with the knowledge about its files."""
        files = self._files
        if files is None:
            files = LocalFiles.of(growth.appended)
        else:
            files.grow(growth.appended, growth.replaced)
        elsewhere = self._always or any(one.backing is not None for one in growth.appended)
        return type(self)(snapshot.backings if elsewhere else (), files, *planned)

    def is_on(self, batches: int = 0) -> bool:
        """Whether readahead is on, after ``batches`` more batches."""
        if self._files is not None:
            files = (self._files,) if self._files.look(batches) else ()
            self._backings = (*self._always, *files)
            self._blocks.most = _PLANNED if files else _MANY
        return bool(self._backings)

    def together(self, block: Block, most: int) -> int:
        """Return how many batches of a block are copied at once, at most ``most``.

        If pages come from a disk it is one, so that a reader does not wait for pages of other batches; it is more if
        most pages were read long before, as parts of stretches.
        """
        if not self.is_on():
            return most
        if self._always:
            return min(most, _FAR_TOGETHER)
        return min(most, _OF_STRETCHES if self._stretches(block) is not None else 1)

    def there(self, views: Views, first: int, count: int) -> bool:
        """Whether copying ``count`` batches of a block does not wait for remote bytes; False also if unknown."""
        if not self._always:
            return True
        parts = in_backings(self._always, *views.ranges(first, count)[:2])
        return all(backing.there(begins, ends) for backing, begins, ends in parts)

    def copied(self, block: Block, views: Views, first: int, count: int) -> dict[str, npt.NDArray[Any]]:
        """Return ``views.copy(first, count)`` once its bytes are present, and request the next batches."""
        copy: Callable[[], dict[str, npt.NDArray[Any]]] = partial(views.copy, first, count)
        if not self.reach(block, first, count):
            return copy()
        if not self._always:  # the processor waits itself
            return copy() if self._files is None else self._files.watched(copy, partial(views.ranges, first, count))
        begins, ends, _ = views.ranges(first, count)
        return copied_when_there(self._backings, begins, ends, copy)

    def reach(self, block: Block, first: int, count: int) -> bool:
        """Request ``count`` batches of a block, which are read now, and the next ones; return whether it is on."""
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
        """Request the batches behind some of a block, up to the end of the next block."""
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
            # As many as fit, if they are as large as the batches before them.
            count = int((most - asked) * len(self._asked) / max(asked, 1)) if self._asked else 1
            if far:
                count = min(count, _AHEAD_BATCHES - len(self._asked))
                if (count < _FAR_TOGETHER and asked > _LEFT * most) or 0 < count < _FAR_TOGETHER < len(self._asked):
                    break  # later, with the next ones: sorting the ranges of several takes hardly longer
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
        """Request more batches, if a cache uses them; return the block and number of the next one.

        They are planned again when they are near, as keeping their blocks would take much memory.
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
        """Return the number of requested bytes that are not copied yet, when batch ``index`` is copied next."""
        # Other threads remove entries meanwhile, so this iterates over a copy.
        asked = list(self._asked)
        self._back = self._back + 1 if asked and min(asked) > index + _TURNS * step else 0
        for old in asked if self._back == _TIMES_BACK else [one for one in asked if one < index]:
            self._asked.pop(old, None)
        return sum(list(self._asked.values()))

    def _most(self, some: int) -> int:
        """Return the number of bytes to request ahead: at least ``some``, if there is room."""
        if self._always or self._files is None:
            return _FAR_BYTES
        depth = self._files.depth
        return max(depth.nbytes, min(some, depth.most))

    def _by_views(self, read: Sequence[Block], first: int, count: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the ranges that copying some batches reads, and the number of the batch of each, from 0 on."""
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
        """Yield ``ranges`` with all other ranges of some batches, and then the ranges that reading these reveals."""
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
        """Return the stretches that the batches of a block open, where these stay in memory."""
        try:
            read = self._read(block)
        except (DataError, IndexError):
            return None  # the reader of damaged rows gets the error
        return read[0].stretches if len(read) == 1 else None

    def _block_behind(self, block: Block) -> Block | None:
        """Return the next block, if batches are read in order."""
        if len(block.sizes) == 1 and block.kind == block.first:
            return None  # the first batch: its successor is unknown
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
                if not self._always:  # the system sorts by no batch
                    numbers = np.zeros(len(begins), np.int64)
                batches = index + np.arange(count) * block.step
                nbytes += ask_backings(self._backings, begins, ends, numbers, batches)
        except (DataError, IndexError):
            pass  # the reader of damaged rows gets the error
        return nbytes


def _rows(block: Block, first: int, count: int) -> tuple[range, Int64s]:
    """Return the rows of a block that some batches read (its batches, or stretches), and the batch of each, from 0 on.

    Of stretches 0 and 1 of batch 0, none of batch 1, and stretch 2 of batch 2, two batches from 1 on have row 2, which
    is of number 1.
    """
    if block.stretches is None:
        return range(first, first + count), np.arange(count)
    firsts = block.stretches.firsts[first : first + count + 1]
    return range(int(firsts[0]), int(firsts[-1])), np.repeat(np.arange(count), np.diff(firsts))


def weakly(method: Callable[..., Any], gone: Any) -> Callable[..., Any]:
    """Return ``method`` as a function that does not keep its object alive, and returns ``gone`` once it is deleted."""
    reference = WeakMethod(method)

    def call(*given: Any) -> Any:
        alive = reference()
        return gone if alive is None else alive(*given)

    return call
