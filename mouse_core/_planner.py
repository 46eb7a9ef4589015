"""Planning batches: which windows each consists of, and where they lie, for several batches at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._locks import ProcessLock
from mouse_core._mask import remember_lengths
from mouse_core._windows import Windows
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling.plan import PaddedSampler, Plan, Sampler
from mouse_core.snapshot import Snapshot

# Windows of consecutive batches are located together, about so many: the few dozen array operations that it takes
# cost the same for 32 windows as for 1,024.
_MOST_WINDOWS = 8192
# Where rows have numbers of their own each step is located, and may be a piece by itself.
_MOST_NUMBERED_STEPS = 1 << 15
# The first batch is planned alone, so that it is there soon; a block is so many times as long as the one before.
_GROWTH = 8
_BLOCKS_KEPT = 3


class _Block(NamedTuple):
    """The batches ``first .. end - 1``: their windows, and the sizes of the whole batches."""

    first: int
    end: int
    windows: Windows
    sizes: list[int]


class Planner:
    """Plans by batch index, for one shard. What it keeps is a memo: any plan can be made again from its index.

    Args:
        sampler: Decides which windows a batch consists of.
        snapshot: The rows.
        seed: In ``[0, 2**64)``.
        shard: ``(rank, count)``.
        epoch_start: The index of the first batch drawn from the snapshot.
    """

    def __init__(
        self, sampler: Sampler, snapshot: Snapshot, *, seed: int, shard: tuple[int, int], epoch_start: int
    ) -> None:
        self._sampler = sampler
        self._snapshot = snapshot
        self._seed = seed
        self._shard = shard
        self._epoch_start = epoch_start
        self._padded = sampler if isinstance(sampler, PaddedSampler) else None
        windows = _MOST_WINDOWS
        if snapshot.has_row_numbers:
            windows = min(windows, _MOST_NUMBERED_STEPS // sampler.sequence_length)
        self._longest = max(1, windows * shard[1] // sampler.batch_size)
        self._first = 1
        self._latest = epoch_start
        # The latest comes first; replaced, never changed, so that it can be read without the lock.
        self._blocks: tuple[_Block, ...] = ()
        self._lock = ProcessLock()

    def find(self, index: int) -> tuple[Windows, int]:
        """The windows of batch ``index``, located together with those of others, and its number among these.

        Raises:
            IndexError: The index lies before the first batch.
            Exception: Whatever the sampler raises for this batch.
        """
        self._latest = index
        for first, end, windows, _ in self._blocks:
            if first <= index < end:
                return windows, index - first
        block = self._block(operator.index(index))
        return block.windows, index - block.first

    @property
    def used(self) -> int:
        """About how many batches were asked for, at least 1."""
        return max(1, self._latest + 1 - min((block.first for block in self._blocks), default=self._latest))

    def reached(self, index: int) -> None:
        """Count the batches before ``index`` as asked for."""
        self._latest = index

    def begin_with(self, batches: int) -> None:
        """Plan so many batches at once where a block stands alone, instead of one."""
        self._first = min(batches, self._longest)

    def plan(self, index: int) -> Plan:
        """The plan of batch ``index``; raises as ``find``."""
        block = self._block(operator.index(index))
        within = index - block.first
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

    def _block(self, index: int) -> _Block:
        """The block that batch ``index`` is in."""
        if index < self._epoch_start:
            raise IndexError(f"batch index: expected at least {self._epoch_start}, found {index}")
        block = _holding(self._blocks, index)
        if block is None:
            with self._lock:
                block = _holding(self._blocks, index)
                if block is None:
                    block = self._make_block(index)
                    self._blocks = (block, *self._blocks[: _BLOCKS_KEPT - 1])
        return block

    def _make_block(self, index: int) -> _Block:
        # Whoever asks for what comes after a block, maybe not at once, will go on so.
        before = next((block for block in self._blocks if 0 <= index - block.end < _GROWTH), None)
        batches = self._first if before is None else min(_GROWTH * (before.end - before.first), self._longest)
        if batches > 1:
            try:
                return self._compute(index, batches)
            except Exception:
                # Some batch of the block cannot be planned. If it is this one, the error comes again.
                pass
        return self._compute(index, 1)

    def _compute(self, first: int, batches: int) -> _Block:
        """The batches ``first .. first + batches - 1``, located together."""
        rank, count = self._shard
        whole = self._starts_together(first, batches)
        if whole is not None:
            size = whole.shape[1]
            rows = np.ascontiguousarray(whole[:, size * rank // count : size * (rank + 1) // count])
            sizes, bounds = [size] * batches, list(range(0, rows.size + 1, rows.shape[1]))
            rows = rows.reshape(-1)
        else:
            starts = [self._starts(index) for index in range(first, first + batches)]
            sizes = [len(part) for part in starts]
            parts = [part[len(part) * rank // count : len(part) * (rank + 1) // count] for part in starts]
            bounds = [0, *np.cumsum([len(part) for part in parts]).tolist()]
            rows = np.concatenate(parts)
        rows.flags.writeable = False
        return _Block(first, first + batches, self.locate(rows, bounds), sizes)

    def _starts_together(self, first: int, batches: int) -> npt.NDArray[np.int64] | None:
        """The starts of several batches, drawn by one call, int64 ``[batches, B]``; None if the sampler cannot."""
        draw = getattr(self._sampler, "starts_of_many", None)
        if draw is None or batches == 1:
            return None
        starts: npt.NDArray[np.int64] | None = draw(self._seed, first, batches, self._snapshot, self._epoch_start)
        return starts

    def _starts(self, index: int) -> npt.NDArray[np.int64]:
        starts = np.asarray(self._sampler.starts(self._seed, index, self._snapshot, self._epoch_start))
        if starts.ndim != 1 or starts.dtype.kind not in "iu" or not 1 <= len(starts) <= self._sampler.batch_size:
            raise ConfigError(
                f"sampler: expected 1..{self._sampler.batch_size} starts as integers [b] for batch {index}, "
                f"found {starts.dtype} {list(starts.shape)}"
            )
        return starts.astype(np.int64, copy=False)


def _holding(blocks: tuple[_Block, ...], index: int) -> _Block | None:
    return next((block for block in blocks if block.first <= index < block.end), None)
