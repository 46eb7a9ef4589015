"""Planning of several batches together: the windows of each batch, and the locations of their rows in storage.

A ``Planner`` creates a ``Block`` for given batches; the block is a pure function of the indices of the batches.
``PlannedBlocks`` chooses the batches that are planned together, and caches some blocks. For requests of the batches 0,
1, 2, ... in order, ``PlannedBlocks`` plans blocks of 1, 8 and then 64 batches.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.windows import Windows, WindowsPart
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError, StoreWarning
from mouse_core.sampling.plan import PaddedSampler, Plan, Stretches, WindowSampler, remembered, starts_by_epochs
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core._arrow.byte_views import ByteViews
    from mouse_core.batches._mask import Absent
    from mouse_core.ranks import Uneven
    from mouse_core.sampling.offsets import Anchors

Int64s = npt.NDArray[np.int64]

# If other shards have at least 192 windows of a batch, only the shard's own windows are drawn, which takes 6 us more
# for each batch.
_MANY_OTHERS = 192
# Largest number of steps in a block whose rows are located through row numbers, where each step may be a separate
# piece.
_MOST_NUMBERED_STEPS = 1 << 15
# The first batch is planned individually, so that it is returned soon; each block has 8 times as many batches as the
# previous block.
_GROWTH = 8
# A worker that requests every n-th batch gets blocks of these batches, for n up to 64. The batches in between are also
# drawn, up to 4 times the batches of the longest block.
_MOST_WORKERS, _MOST_SKIPPED = 64, 4
# Largest number of cached blocks of one kind; and for unordered requests, largest size in bytes and number of all
# cached blocks.
_BLOCKS_KEPT, _KEPT_BYTES, _MOST_KEPT = 2, 32 << 20, 48
# A run of batches is planned together if 2 of its batches are among the latest 32 batches that were in no block,
_ALONE_FIRST, _MISSES_KNOWN = 2, 32
# and if 16 batches were planned individually since the last run, because a cached block may be dropped for the run.
_ALONE_BETWEEN = 16
# The key in ``block.around`` of the stretches that a block opens; no number of offsets equals it.
_OPENED = -1
# The kind of a block is the index at which consecutive requests began; runs have negative kinds.
_ALONE = -1


@dataclass(eq=False)
class Block:
    """A block: the batches ``first``, ``first + step``, ..., ``end - step`` of a source, which are planned together.

    Args:
        first, end, step: The indices of the batches, as described above.
        kind: The index of the batch with which a series of consecutive requests began; negative for single batches, and
            for blocks that are planned because of unordered requests. Of the blocks with the same kind, only the latest
            blocks are cached.
        windows: The windows of all batches, batch by batch.
        sizes: Number of windows of each batch over all shards.
        planner: The planner that created the block.
        byte_views: The views of stored bytes from which the windows are copied; None: no field can be copied, or
            ``together`` is 0.
        together: Number of batches that are copied together if batches are requested in order; 0: the windows are not
            located yet.
        anchors: The steps of the windows, if fields are delivered at offsets around these steps.
        around: A dict from the index of a group of offsets to the block of the rows around the anchors.
        stretches: The stretches of rows that are read completely, if the block has stretches instead of batches.
        refused: A dict from the index (in the block) of each batch that cannot be read to an error message.
    """

    first: int
    end: int
    step: int
    kind: int
    windows: Windows
    sizes: list[int]
    planner: object
    byte_views: ByteViews | None = None
    together: int = 0
    anchors: Anchors | None = None
    around: dict[int, Block] = field(default_factory=dict)
    stretches: Stretches | None = None
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The approximate size of the block in bytes, without the batches."""
        around = sum(block.nbytes for block in self.around.values())
        return self.windows.nbytes + (0 if self.byte_views is None else self.byte_views.words.nbytes) + around

    @memo
    def absent(self) -> Absent:
        """The missing steps of the windows."""
        from mouse_core.batches._mask import Absent

        return Absent.of(self.windows)

    def part(self, number: int) -> WindowsPart:
        """Return the windows of the batch with index ``number`` in the block."""
        return self.windows.part(number)


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans blocks of batches for one shard; a block is a pure function of the indices of its batches.

    Args:
        sampler: The sampler that chooses the windows of a batch.
        snapshot: The rows.
        seed: An integer in ``[0, 2**64)``.
        shard: ``(rank, count)``.
        epoch_start: The index of the first batch that is drawn from the snapshot.
        windows: The approximate number of windows that are located together.
        padded: The sampler if its windows can have missing steps; else None.
        uneven: See ``BatchSource``.
        packed: Whether windows are packed, so that only present steps are located.
    """

    sampler: WindowSampler
    snapshot: Snapshot
    seed: int
    shard: tuple[int, int]
    epoch_start: int
    windows: int
    padded: PaddedSampler | None
    uneven: Uneven = "refuse"
    packed: bool = False

    @memo
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self.sampler.batches_per_epoch(self.snapshot)

    @memo
    def longest(self) -> int:
        """The largest number of batches in a block."""
        windows = self.windows // self.snapshot.pieces_of(self.sampler.sequence_length)
        if self.snapshot.has_row_numbers:
            windows = min(windows, _MOST_NUMBERED_STEPS // self.sampler.sequence_length)
        return max(1, windows * self.shard[1] // self.sampler.batch_size)

    def check(self) -> None:
        """Check that the snapshot has enough rows, and that every shard gets the same number of windows.

        Raises:
            ConfigError: The snapshot has too few rows for a batch, or shards get different numbers of windows from the
                last batch of the first epoch. (With different numbers, the mean over a shard without windows would be
                NaN, and the windows of different shards would have unequal weights in a mean over shards.)
        """
        last = self.epoch_start + self.batches_per_epoch - 1
        if self.shard[1] > 1 and self.uneven == "refuse":
            self._check_even([len(self._starts(last))], last, 1)

    def _check_even(self, sizes: Sequence[int], first: int, step: int) -> None:
        if self.shard[1] > 1:
            from mouse_core.ranks import check_even

            for number, size in enumerate(sizes):
                check_even(self.shard, self.uneven, first + number * step, size)

    def own(self, size: int) -> tuple[int, int]:
        """Return this shard's range of windows in a batch of ``size`` windows: the first window, and the last window
        plus 1.

        Example: of 8 windows, three shards have the windows 0..1, 2..4 and 5..7.
        """
        return size * self.shard[0] // self.shard[1], size * (self.shard[0] + 1) // self.shard[1]

    def delivered(self, size: int) -> tuple[int, int]:
        """Return the range of windows that this shard delivers. With ``uneven="pad"``, the last window may be the first
        window of the next shard.

        Example: of 8 windows, three shards deliver 0..2, 2..4 and 5..7, and window 2 is masked in the first shard. The
        range never exceeds the batch, because the last shard has the largest number of windows and needs no padding
        window.
        """
        first, end = self.own(size)
        return first, first - -size // self.shard[1] if self.uneven == "pad" else end

    def lengths(self, plan: Plan) -> Int64s:
        """Return the number of present steps of each window of a plan, int64 ``[b]``; 0 for windows of other shards."""
        lengths = np.full(len(plan.starts), plan.length) if plan.lengths is None else plan.lengths
        own = self.own(plan.global_size)[1] - plan.first
        return lengths if own == len(lengths) else np.where(np.arange(len(lengths)) < own, lengths, 0)

    def of_plan(self, plan: Plan) -> Block:
        """Return a block of one batch with the windows of a plan."""
        return Block(0, 1, 1, 0, self.locate(plan.starts, None, plan.lengths), [plan.global_size], self)

    def block(self, first: int, step: int, batches: int, kind: int) -> Block:
        """Return a block of the batches ``first``, ``first + step``, ``first + 2 * step``, ...: in total ``batches``
        batches, which are located together.
        """
        end = first + step * batches
        delivered, size = self._own_together(first, end - step + 1 - first)
        if delivered is not None:
            rows = np.ascontiguousarray(delivered[::step])
            sizes, bounds, rows = [size] * batches, [*range(0, rows.size + 1, rows.shape[1])], rows.reshape(-1)
        else:
            many = partial(self._together, rows=slice(0, self.sampler.batch_size))
            epochs = (self.batches_per_epoch, self.epoch_start)
            starts = starts_by_epochs(first, end, *epochs, self._starts, many) if step == 1 < batches else []
            starts = starts or [*map(self._starts, range(first, end, step))]
            sizes = [len(part) for part in starts]
            parts = [part[slice(*self.delivered(len(part)))] for part in starts]
            bounds = [0, *np.cumsum([len(part) for part in parts]).tolist()]
            rows = np.concatenate(parts)
        self._check_even(sizes, first, step)
        lengths = None
        if (cut := getattr(self.sampler, "cut_many", None)) is not None:
            own = [slice(*self.delivered(size)) for size in sizes]
            rows, lengths = cut(self.seed, range(first, end, step), own, sizes, rows, self.snapshot)
        rows.flags.writeable = False
        return Block(first, end, step, kind, self.locate(rows, bounds, lengths), sizes, self)

    def read(self, block: Block) -> Sequence[Block]:
        """Return the blocks whose rows are read in advance for the batches of a block.

        If the sampler reads stretches of rows, the first returned block contains the stretches that the batches open.
        If stretches can be evicted from memory before all their windows are delivered, ``block`` is also returned.
        """
        draw = getattr(self.sampler, "starts_to_read", None)
        if draw is None or block.kind < 0 or block.stretches is not None:
            return [block]
        if _OPENED not in block.around:
            rows, batches = slice(*self.delivered(self.sampler.batch_size)), range(block.first, block.end, block.step)
            found = draw(self.seed, batches, self.snapshot, self.epoch_start, rows=rows, begun=block.kind)
            if found is None:
                return [block]
            windows, sizes = self.locate(found.starts, found.bounds.tolist(), None), np.diff(found.bounds).tolist()
            which = block.first, block.end, block.step, block.kind
            block.around[_OPENED] = Block(*which, windows, sizes, self, stretches=found)
        stays = remembered(self.snapshot, ("opened", id(self.sampler), self.shard[1]), self._stays)
        return [block.around[_OPENED]] if stays else [block.around[_OPENED], block]

    def _stays(self) -> bool:
        """Return whether stretches stay in memory or in a cache until all windows of the stretches are delivered; False
        if this is unknown.

        Evicted pages would be read again one by one. If memory is too small for the stretches, a ``StoreWarning`` is
        issued.
        """
        pool_of = getattr(self.sampler, "pool", None)
        pool = None if pool_of is None else pool_of(self.snapshot)
        if pool is None:
            return False
        from mouse_core._base.room import room_for_files  # loaded on demand

        nbytes = pool.nbytes // self.shard[1]
        found = [("the cache", one.room) for one in self.snapshot.backings]
        if any(one.is_mapped or one.sealed_files for one in self.snapshot.segments):
            found.append(("memory", room_for_files()))
        short = [(room, where) for where, room in found if room is not None and room < nbytes]
        if short:
            room, where = min(short)
            more = "cache_bytes= with more" if where == "the cache" else "more memory"
            warnings.warn(
                f"sampling 'blocks': expected {nbytes:,} free bytes in {where} for the pool of {pool.blocks:,} blocks, "
                f"found {room:,}, so blocks are read repeatedly; use {more}, or fewer blocks with Blocks(pool=...)",
                StoreWarning,
                stacklevel=2,
            )
        return not short and not self.snapshot.backings  # another process may evict pages of a shared cache

    def locate(self, starts: Int64s, bounds: Sequence[int] | None, lengths: Int64s | None) -> Windows:
        """See ``Snapshot.locate``. Raise ConfigError if a window is not in the snapshot."""
        length = self.sampler.sequence_length
        if self.padded is not None and lengths is None:
            lengths = self.padded.lengths(starts, self.snapshot)
        last = self.snapshot.num_rows - (length if lengths is None else lengths)
        if len(starts) and not (starts.min() >= 0 and (starts <= last).all()):
            last = int(np.min(last))
            raise ConfigError(f"sampler: expected starts in 0..{last}, found {int(starts.min())}..{int(starts.max())}")
        windows = self.snapshot.locate(starts, length, bounds, lengths)
        if self.packed:
            from mouse_core.batches._mask import PackedWindows  # loaded on demand

            return PackedWindows(windows)
        return windows

    def _own_together(self, first: int, batches: int) -> tuple[Int64s | None, int]:
        """Return this shard's windows of several batches, int64 ``[batches, n]``, and the size of a batch over all
        shards; None and 0 if the batches cannot be drawn together.
        """
        size = self.sampler.batch_size
        begin, end = self.delivered(size)
        few = size - (end - begin) >= _MANY_OTHERS
        if batches == 1 and not few:
            return None, 0
        drawn = self._together(first, batches, slice(begin, end) if few else slice(0, size))
        if drawn is None:
            return None, 0
        return drawn if few else drawn[:, begin:end], size

    def _together(self, first: int, count: int, rows: slice) -> Int64s | None:
        """Draw the windows at the positions ``rows`` of several batches together; return None if the sampler cannot
        draw several batches together.
        """
        draw = getattr(self.sampler, "starts_of_many", None)
        return None if draw is None else draw(self.seed, first, count, self.snapshot, self.epoch_start, rows)

    def _starts(self, index: int) -> Int64s:
        starts = np.asarray(self.sampler.starts(self.seed, index, self.snapshot, self.epoch_start))
        if starts.ndim != 1 or starts.dtype.kind not in "iu" or not 1 <= len(starts) <= self.sampler.batch_size:
            raise ConfigError(
                f"sampler: expected 1..{self.sampler.batch_size} starts as integers [b] for batch {index}, "
                f"found {starts.dtype} {list(starts.shape)}"
            )
        return starts.astype(np.int64, copy=False)


class PlannedBlocks:
    """Plans and caches the blocks of one source over one snapshot; consecutive blocks become longer.

    If the batches 0, 1, 2, ... are requested in order, the first blocks have 1, 8 and 64 batches, and begin at the
    batches 0, 1 and 9.

    Args:
        planner: The planner that creates the blocks.
        lock: The lock that is held while a block is planned.
    """

    def __init__(self, planner: Planner, lock: ProcessLock) -> None:
        self.planner, self._lock = planner, lock
        # The latest block comes first. The tuple is replaced, never changed, so that reads need no lock.
        self.kept: tuple[Block, ...] = ()
        # Number of batches in the first block, and largest number of windows in a block, if below the planner's limit.
        self.begin_with, self.most = 1, self.planner.windows
        # The indices of batches that were in no block, the latest last; and the number of batches planned individually
        # since the last run.
        self._missed: deque[int] = deque(maxlen=_MISSES_KNOWN)
        self._alone = 0

    def block_with(self, index: int) -> tuple[Block, int]:
        """Return the block that contains batch ``index``, and the batch's index in the block; a new block is planned if
        no cached block contains the batch.

        Raises:
            IndexError: The index lies before the first batch.
            Exception: The error that the sampler raises for this batch.
        """
        if (found := self._known(index)) is not None:
            return found
        if index < self.planner.epoch_start:
            raise IndexError(f"batch index: expected at least {self.planner.epoch_start}, found {index}")
        with self._lock:
            if (found := self._known(index)) is None:  # another thread may have planned it meanwhile
                self.kept = self._kept_with(block := self._make(index))
                found = block, (index - block.first) // block.step
        return found

    def behind(self, block: Block) -> Block:
        """Return a block of the batches after ``block``; the new block is not cached."""
        batches = self._limited(_GROWTH * len(block.sizes), block.step)
        return self.planner.block(block.end, block.step, batches, block.kind)

    def _known(self, index: int) -> tuple[Block, int] | None:
        """Return the cached block that contains batch ``index``, and the batch's index in the block; None if there is
        no such block.
        """
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
                # one of the batches cannot be planned; if it is the requested batch, the next call raises
                self._missed.clear()
        self._alone += 1
        return self.planner.block(index, 1, 1, _ALONE)

    def _choose(self, index: int) -> tuple[int, int, int, int]:
        """Choose the batches that are planned together with batch ``index``. Return the index of the first batch, the
        step, the number of batches, and the kind.
        """
        longest = self.planner.longest
        for block in self.kept:
            # A caller that requests a batch soon after the end of a block will probably continue in order.
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
        # Requests are unordered or backwards.
        run = (index - self.planner.epoch_start) // longest
        alone = sum((missed - self.planner.epoch_start) // longest == run for missed in self._missed)
        kept = sum(block.nbytes for block in self.kept)
        if alone >= _ALONE_FIRST and (self._alone >= _ALONE_BETWEEN or kept < _KEPT_BYTES):
            self._alone = 0
            return self.planner.epoch_start + run * longest, 1, longest, _ALONE - 1 - run
        return index, 1, 1, _ALONE

    def _limited(self, batches: int, step: int) -> int:
        """Return ``batches``, reduced to the largest number of batches in a block if necessary."""
        return max(1, min(batches, self.most, self.planner.longest, _MOST_SKIPPED * self.planner.longest // step))

    def _kept_with(self, block: Block) -> tuple[Block, ...]:
        """Return the blocks that are cached: the new block, and the earlier blocks that stay in the cache."""
        kept, kinds, room = [block], Counter([block.kind]), _KEPT_BYTES
        for other in self.kept:
            kinds[other.kind], room = kinds[other.kind] + 1, room - other.nbytes
            if kinds[other.kind] <= _BLOCKS_KEPT and len(kept) < (_MOST_KEPT if room >= 0 else _BLOCKS_KEPT):
                kept.append(other)
        return tuple(kept)
