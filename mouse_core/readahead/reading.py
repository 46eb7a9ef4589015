"""Readahead: what the next batches read is asked for before they are copied.

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
"""A ``batches._planner.Block``, which lies above this room: batches that were planned together."""
Views = Any
"""An ``_arrow.byte_views.ByteViews``: how the batches of a block are copied."""

# Bytes of remote memory, and batches of any memory, that are asked for beyond those that are copied.
_FAR_BYTES, _AHEAD_BATCHES = 64 << 20, 64
# Where a cache chooses what stays by what is read later, two more batches are asked for with each that is copied.
_FURTHER = 2
# Of mapped files nothing is asked for while more than half of the bytes that were asked for are left, nor before twice
# the batches that are copied would fit: sorting the ranges of two takes hardly longer than of one. It is no more than
# twice, as the caller waits meanwhile.
_LEFT, _PACE = 0.5, 2
# Of batches from stretches that were read long before, 8 are copied at a time.
_OF_STRETCHES = 8
# 8 batches of remote memory are asked for together, where as many are still to come, and are copied together.
_FAR_TOGETHER = 8
# 64 batches are planned together where pages come from a disk: what it takes to find them is read at once.
_PLANNED, _MANY = 64, 1 << 30
# A caller has gone back when it asks 3 times for a batch more than 16 before those that were asked for: threads are
# less far apart, and two callers that take turns alternate.
_TURNS, _TIMES_BACK = 16, 3
_NOTHING = np.zeros(0, np.int64)
_NO_RANGES = _NOTHING, _NOTHING, _NOTHING


class ReadAhead:
    """Asks for what the batches of a pipeline read ahead of the copies, and waits for it where it is remote.

    Args:
        backings: Remote memory in which bytes may lie. Nothing waits for mapped files of this machine.
        files: Mapped files of this machine, asked for all addresses outside of ``backings``; None: there are none.
        blocks: Plans blocks of batches, as ``batches._planner.Blocks`` does.
        views: Returns how a block is copied; None: it is not.
        gathered: Yields ranges of a batch that are read and not copied: first those that are known, then those that are
            found by reading the first.
        read: Returns what is read for each batch of a block: the block itself, or, where batches are drawn from
            stretches of rows that are read as a whole, a block of those; both where stretches may be evicted early.
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
        # Bytes by the index of batches that were asked for and not copied yet.
        self._asked: dict[int, int] = {}
        # The batch behind them: its block, and its number there.
        self._next: tuple[Block, int] | None = None
        # How many times in turn somebody came for a batch far before them; and the batch behind the latest.
        self._back, self._behind = 0, -1
        self._lock = threading.Lock()

    @classmethod
    def of(cls, snapshot: Any, *planned: Any) -> ReadAhead:
        """Return the readahead for a ``Snapshot``; ``planned`` are the constructor's arguments behind the files."""
        return cls(snapshot.backings, LocalFiles.of(snapshot.segments), *planned)

    def forward(self, growth: Any, snapshot: Any, *planned: Any) -> ReadAhead:
        """Return the readahead for a snapshot that has grown, with all that is known of the files."""
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
        """Return how many batches of a block are copied at a time, at most ``most``.

        Where pages come from a disk it is one, lest whoever asks for it waits for those of others, too; but more where
        most were read as parts of stretches long ago.
        """
        if not self.is_on():
            return most
        if self._always:
            return min(most, _FAR_TOGETHER)
        return min(most, _OF_STRETCHES if self._stretches(block) is not None else 1)

    def there(self, views: Views, first: int, count: int) -> bool:
        """Whether copying ``count`` batches of a block waits for no remote bytes, as far as that is known."""
        if not self._always:
            return True
        parts = in_backings(self._always, *views.ranges(first, count)[:2])
        return all(backing.there(begins, ends) for backing, begins, ends in parts)

    def copied(self, block: Block, views: Views, first: int, count: int) -> dict[str, npt.NDArray[Any]]:
        """Return ``views.copy(first, count)`` once its bytes are there, and ask for the batches behind."""
        copy: Callable[[], dict[str, npt.NDArray[Any]]] = partial(views.copy, first, count)
        if not self.reach(block, first, count):
            return copy()
        if not self._always:  # the processor waits itself
            return copy() if self._files is None else self._files.watched(copy, partial(views.ranges, first, count))
        begins, ends, _ = views.ranges(first, count)
        return copied_when_there(self._backings, begins, ends, copy)

    def reach(self, block: Block, first: int, count: int) -> bool:
        """Ask for ``count`` batches of a block that are about to be read, and for those behind; whether it is on."""
        if not self.is_on(count):
            return False
        for number in range(first, first + count):
            if self._asked.pop(block.first + number * block.step, None) is None:
                self._ask(block, number, 1)
        if self._lock.acquire(blocking=False):  # otherwise another thread is at it
            try:
                self._reach(block, first, count)
            finally:
                self._lock.release()
        return True

    def _reach(self, block: Block, first: int, count: int) -> None:
        """Ask for the batches behind some of a block, up to the end of the next block."""
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
            # As many as are as large as those before them, where these are known.
            count = int((most - asked) * len(self._asked) / max(asked, 1)) if self._asked else 1
            if far:
                count = min(count, _AHEAD_BATCHES - len(self._asked))
                if (count < _FAR_TOGETHER and asked > _LEFT * most) or 0 < count < _FAR_TOGETHER < len(self._asked):
                    break  # later, with those behind it: sorting what several read takes hardly longer
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
        """Ask for more batches, where a cache wants to know of them; return the block and number of the next one.

        They are planned again when they are near: blocks that were kept till then would be many.
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
                    break  # whoever asks for that batch is told
            self._asked[block.first + number * block.step] = self._ask(block, number, 1)
            number += 1
        return block, number

    def _left(self, index: int, step: int) -> int:
        """Return the bytes that were asked for and not copied yet, where batch ``index`` is copied next."""
        # Other threads take out what they copy meanwhile, so that only copies can be gone through.
        asked = list(self._asked)
        self._back = self._back + 1 if asked and min(asked) > index + _TURNS * step else 0
        for old in asked if self._back == _TIMES_BACK else [one for one in asked if one < index]:
            self._asked.pop(old, None)
        return sum(list(self._asked.values()))

    def _most(self, some: int) -> int:
        """Return how many bytes to ask for ahead: at least ``some``, where there is room."""
        if self._always or self._files is None:
            return _FAR_BYTES
        depth = self._files.depth
        return max(depth.nbytes, min(some, depth.most))

    def _by_views(self, read: Sequence[Block], first: int, count: int) -> tuple[Int64s, Int64s, Int64s]:
        """The ranges that copying some batches reads, and the batch of each, from 0 on."""
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
        """Yield ``ranges`` with all else that some batches read, and then the ranges that reading these reveals."""
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
            return None  # whoever reads damaged rows is told
        return read[0].stretches if len(read) == 1 else None

    def _block_behind(self, block: Block) -> Block | None:
        """Return the block behind one, where batches are asked for in turn."""
        if len(block.sizes) == 1 and block.kind == block.first:
            return None  # the first one, of which nobody knows how it goes on
        try:
            return self._blocks.block_with(block.end)[0]
        except Exception:
            return None  # whoever asks for that batch is told

    def _ask(self, block: Block, number: int, count: int) -> int:
        """Ask for all that some batches read; return its bytes."""
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
            pass  # whoever reads damaged rows is told
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
