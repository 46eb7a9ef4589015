"""Planning batches: which windows each consists of, and where they lie, for several batches at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._locks import ProcessLock
from mouse_core._windows import Windows
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling.plan import Plan, Sampler
from mouse_core.snapshot import Snapshot

# Windows of consecutive batches are located together, about so many: the few dozen array operations that it takes
# cost the same for 32 windows as for 1,024.
_WINDOWS_PER_BLOCK = 1024
_STEPS_PER_BLOCK = 1 << 17
_BLOCKS_KEPT = 4


class _Block(NamedTuple):
    """Some consecutive batches: their windows, and the sizes of the whole batches."""

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
        windows = min(_WINDOWS_PER_BLOCK, _STEPS_PER_BLOCK // sampler.sequence_length)
        self._batches_per_block = max(1, windows * shard[1] // sampler.batch_size)
        self._blocks: dict[int, _Block] = {}
        self._lock = ProcessLock()

    def plan(self, index: int) -> Plan:
        """The plan of batch ``index``; raises IndexError before the first, and whatever the sampler raises for it."""
        index = operator.index(index)
        if index < self._epoch_start:
            raise IndexError(f"batch index: expected at least {self._epoch_start}, found {index}")
        number, within = divmod(index - self._epoch_start, self._batches_per_block)
        try:
            block = self._block(number)
        except Exception:
            # Some batch of the block cannot be planned. If it is this one, the error comes again.
            block, within = self._compute(index, 1), 0
        part = block.windows.part(within)
        rank, count = self._shard
        return Plan(
            block.windows.rows[part.begin : part.end],
            self._sampler.sequence_length,
            Key(self._seed, Purpose.AUGMENT, index),
            block.sizes[within],
            block.sizes[within] * rank // count,
            part,
        )

    def locate(self, starts: npt.NDArray[np.int64], bounds: Sequence[int] | None = None) -> Windows:
        """See ``Snapshot.locate``; raises ConfigError if some windows are not in the snapshot."""
        last = self._snapshot.num_rows - self._sampler.sequence_length
        if len(starts) and not (starts.min() >= 0 and starts.max() <= last):
            raise ConfigError(f"sampler: expected starts in 0..{last}, found {int(starts.min())}..{int(starts.max())}")
        return self._snapshot.locate(starts, self._sampler.sequence_length, bounds)

    def _block(self, number: int) -> _Block:
        block = self._blocks.get(number)
        if block is None:
            with self._lock:
                block = self._blocks.get(number)
                if block is None:
                    block = self._compute(self._epoch_start + number * self._batches_per_block, self._batches_per_block)
                    if len(self._blocks) >= _BLOCKS_KEPT:
                        self._blocks.pop(next(iter(self._blocks)))
                    self._blocks[number] = block
        return block

    def _compute(self, first: int, batches: int) -> _Block:
        """The batches ``first .. first + batches - 1``, located together."""
        rank, count = self._shard
        parts, sizes = [], []
        for index in range(first, first + batches):
            starts = self._starts(index)
            sizes.append(len(starts))
            parts.append(starts[len(starts) * rank // count : len(starts) * (rank + 1) // count])
        bounds = [0, *np.cumsum([len(part) for part in parts]).tolist()]
        rows = np.concatenate(parts)
        rows.flags.writeable = False
        return _Block(self.locate(rows, bounds), sizes)

    def _starts(self, index: int) -> npt.NDArray[np.int64]:
        starts = np.asarray(self._sampler.starts(self._seed, index, self._snapshot, self._epoch_start))
        if starts.ndim != 1 or starts.dtype.kind not in "iu" or not 1 <= len(starts) <= self._sampler.batch_size:
            raise ConfigError(
                f"sampler: expected 1..{self._sampler.batch_size} starts as integers [b] for batch {index}, "
                f"found {starts.dtype} {list(starts.shape)}"
            )
        return starts.astype(np.int64, copy=False)
