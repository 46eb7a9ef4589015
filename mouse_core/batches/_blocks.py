"""Which batches are planned together, as they are asked for, and which of these blocks are kept."""

from __future__ import annotations

from collections import Counter, deque

from mouse_core._base.locks import ProcessLock
from mouse_core.batches._planner import Block, Planner

# The first batch is planned alone, so that it is there soon; a block has so many times the batches of the one before.
_GROWTH = 8
# One of n workers asks for every n-th batch, and gets blocks of these, where n is at most this.
_MOST_WORKERS = 64
# The batches between those of such a block are drawn, too: so many times those of the longest block at most.
_MOST_SKIPPED = 4
# Blocks that are kept of one kind: of batches planned alone, and of blocks that follow each other.
_BLOCKS_KEPT = 2
# Whoever asks in no order has so many bytes of blocks kept, and so many blocks.
_KEPT_BYTES, _MOST_KEPT = 32 << 20, 48
# A run of batches is planned as a whole where so many of it are among the latest that were in no block,
_ALONE_FIRST, _MISSES_KNOWN = 2, 32
# and, as a block may have to go for it once the bytes are used up, so many were planned alone since the last one.
_ALONE_BETWEEN = 16
# The kind of a block is the index at which those that follow each other began; of a run it is a number below these.
_ALONE = -1


class Blocks:
    """The blocks of one source over one snapshot: from a block of one batch to long ones, while a loop goes on.

    Whoever asks for batches 0, 1, 2, .. has blocks of 1, 8 and 64 planned, which begin at 0, 1 and 9.

    Args:
        planner: Makes them.
        lock: Held by whoever plans a block.
    """

    def __init__(self, planner: Planner, lock: ProcessLock) -> None:
        self.planner, self._lock = planner, lock
        # The latest comes first; replaced, never changed, so that it can be read without the lock.
        self.kept: tuple[Block, ...] = ()
        # How many batches are planned at first.
        self.begin_with = 1
        # The indices that were in no block, the latest last, and how many since one was made of a run.
        self._missed: deque[int] = deque(maxlen=_MISSES_KNOWN)
        self._alone = 0

    def block_with(self, index: int) -> tuple[Block, int]:
        """The block that batch ``index`` is in, planned if there is none, and its number there.

        Raises:
            IndexError: The index lies before the first batch.
            Exception: Whatever the sampler raises for this batch.
        """
        if (found := self._known(index)) is not None:
            return found
        if index < self.planner.epoch_start:
            raise IndexError(f"batch index: expected at least {self.planner.epoch_start}, found {index}")
        with self._lock:
            if (found := self._known(index)) is None:  # another thread may have made it meanwhile
                block = self._make(index)
                self.kept = self._kept_with(block)
                found = block, (index - block.first) // block.step
        return found

    def _known(self, index: int) -> tuple[Block, int] | None:
        """The same, if there is such a block."""
        for block in self.kept:
            if block.first <= index < block.end and not (index - block.first) % block.step:
                return block, (index - block.first) // block.step
        return None

    def _make(self, index: int) -> Block:
        first, step, batches, kind = self._choose(index)
        self._missed.append(index)
        if batches > 1:
            try:
                return self.planner.block(first, step, batches, kind)
            except Exception:
                # Some batch of the block cannot be planned. If it is this one, the error comes again.
                self._missed.clear()
        self._alone += 1
        return self.planner.block(index, 1, 1, _ALONE)

    def _choose(self, index: int) -> tuple[int, int, int, int]:
        """What to plan together with a batch: the first batch, how far they are apart, how many, and their kind."""
        longest = self.planner.longest
        for block in self.kept:
            # Whoever asks for what comes after a block, maybe not at once, will go on so.
            number, rest = divmod(index - block.end, block.step)
            batches = self._limited(_GROWTH * len(block.sizes), block.step)
            if not rest and 0 <= number < (min(_GROWTH, batches) if len(block.sizes) > 1 else 1):
                return block.end, block.step, batches, block.end if block.kind < 0 else block.kind
        if not self.kept:
            return index, 1, min(self.begin_with, longest), index
        before = [*self._missed][-2:]
        step = index - before[-1] if len(before) == 2 else 0
        if 1 < step <= _MOST_WORKERS and step == before[1] - before[0]:
            return index, step, self._limited(_GROWTH, step), index
        # Batches in no order, or backwards.
        run = (index - self.planner.epoch_start) // longest
        alone = sum((missed - self.planner.epoch_start) // longest == run for missed in self._missed)
        kept = sum(block.nbytes for block in self.kept)
        if alone >= _ALONE_FIRST and (self._alone >= _ALONE_BETWEEN or kept < _KEPT_BYTES):
            self._alone = 0
            return self.planner.epoch_start + run * longest, 1, longest, _ALONE - 1 - run
        return index, 1, 1, _ALONE

    def _limited(self, batches: int, step: int) -> int:
        """So many batches, or as many as a block may have."""
        return max(1, min(batches, self.planner.longest, _MOST_SKIPPED * self.planner.longest // step))

    def _kept_with(self, block: Block) -> tuple[Block, ...]:
        """A new block and those to keep beside it."""
        kept, kinds, room = [block], Counter([block.kind]), _KEPT_BYTES
        for other in self.kept:
            kinds[other.kind] += 1
            room -= other.nbytes
            fits = room >= 0 and len(kept) < _MOST_KEPT
            if kinds[other.kind] <= _BLOCKS_KEPT and (fits or len(kept) < _BLOCKS_KEPT):
                kept.append(other)
        return tuple(kept)
