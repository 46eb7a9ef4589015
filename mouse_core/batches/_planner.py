"""Planning batches: which windows each consists of, and where they lie, for several batches at once."""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.windows import Windows
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.batches._mask import remember_lengths
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling.plan import PaddedSampler, Plan, WindowSampler
from mouse_core.store.snapshot import Snapshot

# Where rows have numbers of their own each step is located, and may be a piece by itself.
_MOST_NUMBERED_STEPS = 1 << 15
# The first batch is planned alone, so that it is there soon; a block is so many times as long as the one before.
_GROWTH = 8
# Batches further apart than this are not taken for those of a worker among others, each of which has its turn; and the
# batches between those of a block are drawn as well: so many times the longest block at most.
_MOST_WORKERS, _MOST_SKIPPED = 64, 4
# Of one kind: batches planned alone, and blocks that follow each other.
_BLOCKS_KEPT = 2
# Blocks that were asked for in no order are kept together up to this size. From then on a new one must be worth it.
_KEPT_BYTES, _MOST_KEPT = 32 << 20, 48
_ALONE_BETWEEN = 16
# A stretch of batches is planned as a whole where so many of it were planned alone among the latest few.
_ALONE_FIRST, _MISSES_KNOWN = 2, 32
# The kind of a block is the index at which those that follow each other began; of a stretch it is a number below these.
_ALONE = -1


class _Block(NamedTuple):
    """The batches ``first, first + step .. end - step``: their windows, and the sizes of the whole batches.

    Of blocks of one ``kind`` only the latest are kept.
    """

    first: int
    end: int
    step: int
    windows: Windows
    sizes: list[int]
    kind: int

    def number_of(self, index: int) -> int | None:
        """Which of its batches this is; None if it is not in it."""
        if self.first <= index < self.end:
            number, rest = divmod(index - self.first, self.step)
            return None if rest else number
        return None


class Planner:
    """Plans by batch index, for one shard. What it keeps is a memo: any plan can be made again from its index.

    Args:
        sampler: Decides which windows a batch consists of.
        snapshot: The rows.
        seed: In ``[0, 2**64)``.
        shard: ``(rank, count)``.
        epoch_start: The index of the first batch drawn from the snapshot.
        windows: Windows of several batches are located together, about so many.
    """

    def __init__(
        self,
        sampler: WindowSampler,
        snapshot: Snapshot,
        *,
        seed: int,
        shard: tuple[int, int],
        epoch_start: int,
        windows: int,
    ) -> None:
        self._sampler = sampler
        self._snapshot = snapshot
        self._seed = seed
        self._shard = shard
        self._epoch_start = epoch_start
        self._windows = windows
        self._padded = sampler if isinstance(sampler, PaddedSampler) else None
        self._first = 1
        self._latest = epoch_start
        # The latest comes first; replaced, never changed, so that it can be read without the lock.
        self._blocks: tuple[_Block, ...] = ()
        # The indices that were in no block, the latest last, and how many since one was made of a stretch.
        self._missed: deque[int] = deque(maxlen=_MISSES_KNOWN)
        self._alone = 0
        self._lock = ProcessLock()

    def over(self, snapshot: Snapshot, *, seed: int, epoch_start: int) -> Planner:
        """The same over other rows."""
        other = copy(self)
        other._snapshot, other._seed, other._epoch_start = snapshot, seed, epoch_start
        other._latest, other._blocks, other._lock = epoch_start, (), ProcessLock()
        other._missed, other._alone = deque(maxlen=_MISSES_KNOWN), 0
        other.check_last()
        return other

    def find(self, index: int) -> tuple[Windows, int, int]:
        """The windows of batch ``index``, located together with those of others, its number among these, and how far
        they are apart.

        Raises:
            IndexError: The index lies before the first batch.
            Exception: Whatever the sampler raises for this batch.
        """
        self._latest = index
        for first, end, step, windows, _, _ in self._blocks:
            if first <= index < end and not (index - first) % step:
                return windows, (index - first) // step, step
        block, number = self._block(operator.index(index))
        return block.windows, number, block.step

    @property
    def used(self) -> int:
        """About how many batches were asked for, at least 1."""
        first, step = min(((block.first, block.step) for block in self._blocks), default=(self._latest, 1))
        return max(1, (self._latest - first) // step + 1)

    def reached(self, index: int) -> None:
        """Count the batches before ``index`` as asked for."""
        self._latest = index

    def begin_with(self, batches: int) -> None:
        """Plan so many batches at once where a block stands alone, instead of one."""
        self._first = min(batches, self._longest)

    def plan(self, index: int) -> Plan:
        """The plan of batch ``index``; raises as ``find``."""
        block, within = self._block(operator.index(index))
        part = block.windows.part(within)
        rank, count = self._shard
        return Plan(
            block.windows.rows[part.begin : part.end],
            self._sampler.sequence_length,
            Key(self._seed, Purpose.AUGMENT, int(index)),
            block.sizes[within],
            block.sizes[within] * rank // count,
            part,
        )

    def check_last(self) -> None:
        """See that the last batch of the first epoch, which may be short, has as many windows for every shard.

        Raises:
            ConfigError: It has not. Some shards would get an empty batch, the mean of which is NaN, and the mean over
                shards would weigh windows differently.
        """
        if self._shard[1] > 1:
            last = self._epoch_start + self._sampler.batches_per_epoch(self._snapshot) - 1
            self._check_even(last, len(self._starts(last)))

    def _check_even(self, index: int, size: int) -> None:
        count = self._shard[1]
        if size % count:
            raise ConfigError(
                f"shard: expected batches that {count} shards divide evenly, found batch {index} with {size} windows; "
                "leave the rest of an epoch out with drop_last=True, or choose a batch_size and a count that divide it"
            )

    def locate(self, starts: npt.NDArray[np.int64], bounds: Sequence[int] | None = None) -> Windows:
        """See ``Snapshot.locate``; raises ConfigError if some windows are not in the snapshot."""
        length, lengths = self._sampler.sequence_length, None
        if self._padded is not None:
            lengths = self._padded.lengths(starts, self._snapshot)
        last = self._snapshot.num_rows - (length if lengths is None else lengths)
        if len(starts) and not (starts.min() >= 0 and (starts <= last).all()):
            last = int(np.min(last))
            raise ConfigError(f"sampler: expected starts in 0..{last}, found {int(starts.min())}..{int(starts.max())}")
        windows = self._snapshot.locate(starts, length, bounds)
        if lengths is not None:
            remember_lengths(windows, lengths)
        return windows

    @memo
    def _longest(self) -> int:
        """The most batches of a block."""
        windows = self._windows // self._snapshot.pieces_of(self._sampler.sequence_length)
        if self._snapshot.has_row_numbers:
            windows = min(windows, _MOST_NUMBERED_STEPS // self._sampler.sequence_length)
        return max(1, windows * self._shard[1] // self._sampler.batch_size)

    def _block(self, index: int) -> tuple[_Block, int]:
        """The block that batch ``index`` is in, and its number there."""
        if index < self._epoch_start:
            raise IndexError(f"batch index: expected at least {self._epoch_start}, found {index}")
        found = _holding(self._blocks, index)
        if found is None:
            with self._lock:
                found = _holding(self._blocks, index)
                if found is None:
                    block = self._make_block(index)
                    self._blocks = self._kept_with(block)
                    found = block, (index - block.first) // block.step
        return found

    def _make_block(self, index: int) -> _Block:
        first, step, batches, kind = self._choose(index)
        self._missed.append(index)
        if batches > 1:
            try:
                return self._compute(first, step, batches, kind)
            except Exception:
                # Some batch of the block cannot be planned. If it is this one, the error comes again.
                self._missed.clear()
        self._alone += 1
        return self._compute(index, 1, 1, _ALONE)

    def _choose(self, index: int) -> tuple[int, int, int, int]:
        """What to plan together with a batch: the first batch, how far they are apart, how many, and their kind."""
        for _, end, step, _, sizes, kind in self._blocks:
            # Whoever asks for what comes after a block, maybe not at once, will go on so.
            number, rest = divmod(index - end, step)
            batches = self._limited(_GROWTH * len(sizes), step)
            if not rest and 0 <= number < (min(_GROWTH, batches) if len(sizes) > 1 else 1):
                return end, step, batches, end if kind < 0 else kind
        if not self._blocks:
            return index, 1, self._first, index
        before = [*self._missed][-2:]
        step = index - before[-1] if len(before) == 2 else 0
        if 1 < step <= _MOST_WORKERS and step == before[1] - before[0]:
            return index, step, self._limited(_GROWTH, step), index
        # Batches in no order, or backwards.
        stretch = (index - self._epoch_start) // self._longest
        alone = sum((missed - self._epoch_start) // self._longest == stretch for missed in self._missed)
        if alone >= _ALONE_FIRST and (self._alone >= _ALONE_BETWEEN or self._nbytes < _KEPT_BYTES):
            self._alone = 0
            return self._epoch_start + stretch * self._longest, 1, self._longest, _ALONE - 1 - stretch
        return index, 1, 1, _ALONE

    def _limited(self, batches: int, step: int) -> int:
        """So many batches, or as many as a block may have."""
        return max(1, min(batches, self._longest, _MOST_SKIPPED * self._longest // step))

    @property
    def _nbytes(self) -> int:
        return sum(block.windows.nbytes for block in self._blocks)

    def _kept_with(self, block: _Block) -> tuple[_Block, ...]:
        """A new block and those to keep beside it."""
        kept, kinds, room = [block], Counter([block.kind]), _KEPT_BYTES
        for other in self._blocks:
            kinds[other.kind] += 1
            room -= other.windows.nbytes
            fits = room >= 0 and len(kept) < _MOST_KEPT
            if kinds[other.kind] <= _BLOCKS_KEPT and (fits or len(kept) < _BLOCKS_KEPT):
                kept.append(other)
        return tuple(kept)

    def _compute(self, first: int, step: int, batches: int, kind: int) -> _Block:
        """So many batches from ``first`` on, ``step`` apart, located together."""
        rank, count = self._shard
        end = first + step * batches
        whole = self._starts_together(first, end - step + 1 - first)
        if whole is not None:
            whole = whole[::step]
            size = whole.shape[1]
            rows = np.ascontiguousarray(whole[:, size * rank // count : size * (rank + 1) // count])
            sizes, bounds = [size] * batches, list(range(0, rows.size + 1, rows.shape[1]))
            rows = rows.reshape(-1)
        else:
            starts = self._starts_in_parts(first, end) if step == 1 else []
            starts = starts or [self._starts(index) for index in range(first, end, step)]
            sizes = [len(part) for part in starts]
            for number, size in enumerate(sizes):
                self._check_even(first + number * step, size)
            parts = [part[len(part) * rank // count : len(part) * (rank + 1) // count] for part in starts]
            bounds = [0, *np.cumsum([len(part) for part in parts]).tolist()]
            rows = np.concatenate(parts)
        rows.flags.writeable = False
        return _Block(first, end, step, self.locate(rows, bounds), sizes, kind)

    def _starts_together(self, first: int, batches: int) -> npt.NDArray[np.int64] | None:
        """The starts of several batches, drawn by one call, int64 ``[batches, B]``; None if the sampler cannot."""
        draw = getattr(self._sampler, "starts_of_many", None)
        if draw is None or batches == 1:
            return None
        starts: npt.NDArray[np.int64] | None = draw(self._seed, first, batches, self._snapshot, self._epoch_start)
        return starts

    def _starts_in_parts(self, first: int, end: int) -> list[npt.NDArray[np.int64]]:
        """The starts of several batches, of which the last one of an epoch may be short; none if the sampler draws
        them one by one.
        """
        epoch = self._sampler.batches_per_epoch(self._snapshot)
        starts: list[npt.NDArray[np.int64]] = []
        while first < end and epoch > 1:
            last = min(first + epoch - 1 - (first - self._epoch_start) % epoch, end)
            if last - first > 1:
                many = self._starts_together(first, last - first)
                if many is None:
                    return []
                starts += list(many)
            elif last > first:
                starts.append(self._starts(first))
            if last < end:
                starts.append(self._starts(last))
            first = last + 1
        return starts

    def _starts(self, index: int) -> npt.NDArray[np.int64]:
        starts = np.asarray(self._sampler.starts(self._seed, index, self._snapshot, self._epoch_start))
        if starts.ndim != 1 or starts.dtype.kind not in "iu" or not 1 <= len(starts) <= self._sampler.batch_size:
            raise ConfigError(
                f"sampler: expected 1..{self._sampler.batch_size} starts as integers [b] for batch {index}, "
                f"found {starts.dtype} {list(starts.shape)}"
            )
        return starts.astype(np.int64, copy=False)


def _holding(blocks: tuple[_Block, ...], index: int) -> tuple[_Block, int] | None:
    for block in blocks:
        number = block.number_of(index)
        if number is not None:
            return block, number
    return None
