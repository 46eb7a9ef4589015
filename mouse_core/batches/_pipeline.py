"""The pipeline of a source: a batch is planned, located and copied among others, and handed out once."""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from mouse_core._arrow.chunks import Growth
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memory import BatchMemory, known_layout
from mouse_core.batches._form import BatchForm, MaskReader, Readers
from mouse_core.batches._planner import Block, Planner
from mouse_core.dtypes import RowError, convert_to
from mouse_core.errors import DataError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling.plan import Plan
from mouse_core.store.fields import FieldReader
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core._arrow.byte_views import ByteViews, CopiedField
    from mouse_core._arrow.field_chunks import FieldChunks

Batch = dict[str, npt.NDArray[Any]]

# The first batch is planned alone, so that it is there soon; a block is so many times as long as the one before.
_GROWTH = 8
# Batches further apart than this are not taken for those of a worker among others, each of which has its turn.
_MOST_WORKERS = 64
# The batches between those of such a block are drawn as well: so many times the longest block at most.
_MOST_SKIPPED = 4
# Of one kind: batches planned alone, and blocks that follow each other.
_BLOCKS_KEPT = 2
# Blocks that were asked for in no order are kept together up to this size. From then on a new one must be worth it.
_KEPT_BYTES, _MOST_KEPT = 32 << 20, 48
_ALONE_BETWEEN = 16
# A stretch of batches is planned as a whole where so many of it were planned alone among the latest few.
_ALONE_FIRST, _MISSES_KNOWN = 2, 32
# The kind of a block is the index at which those that follow each other began; of a stretch it is a number below these.
_ALONE = -1
# Batches that are asked for in turn are copied several at a time up to this size: a call takes 5 us, as long as copying
# 40 KB, and making the arrays of one batch as long as those of three.
_TOGETHER_BYTES, _MOST_TOGETHER = 6 << 20, 64
# Whoever is this much ahead of the next batch is one of several who take turns.
_AHEAD = 3


class Pipeline:
    """The batches of one source over one snapshot. What it keeps is a memo: any batch can be made again from its index.

    One lock is held by whoever plans a block, looks up where its values lie, or copies batches that others wait for. A
    batch that is copied alone, converted, or read from irregular chunks, is so outside of it.

    Args:
        planner: Says which windows the batches consist of.
        readers: The fields.
        form: What batches are like.
        fields: Those that may be copied from where they lie.
        chunks: What an earlier pipeline, from which this one has grown, knows about where they lie.
        memory, lock: Those that it has.
    """

    def __init__(
        self,
        planner: Planner,
        readers: Readers,
        form: BatchForm,
        *,
        fields: Sequence[CopiedField],
        chunks: FieldChunks | None = None,
        memory: BatchMemory | None = None,
        lock: ProcessLock | None = None,
    ) -> None:
        self.planner, self.readers, self.form = planner, readers, form
        self._fields, self._chunks = fields, chunks
        self._memory = BatchMemory() if memory is None else memory
        self._lock = ProcessLock() if lock is None else lock
        # The latest comes first; replaced, never changed, so that it can be read without the lock.
        self._blocks: tuple[Block, ...] = ()
        # By index the batches that were copied together with another one, without values that are not allowed.
        self._ready: dict[int, Batch] = {}
        # How many batches are planned at first.
        self._begin_with = 1
        # The latest that was copied.
        self._latest = planner.epoch_start
        # The indices that were in no block, the latest last, and how many since one was made of a stretch.
        self._missed: deque[int] = deque(maxlen=_MISSES_KNOWN)
        self._alone = 0

    def forward(self, snapshot: Snapshot, growth: Growth, *, seed: int, epoch_start: int) -> Pipeline:
        """The same over a snapshot that has grown, with all that is known about the rows that are the same."""
        planner = replace(self.planner, snapshot=snapshot, seed=seed, epoch_start=epoch_start)
        planner.check()
        readers = {name: snapshot.readers.get(name, reader) for name, reader in self.readers.items()}
        columns = {name: reader.column for name, reader in readers.items() if isinstance(reader, FieldReader)}
        fields = [field._replace(column=columns[field.name]) for field in self._fields]
        with self._lock:  # which both have from now on
            chunks = None if self._chunks is None else self._chunks.forward(fields, growth)
        return Pipeline(planner, readers, self.form, fields=fields, chunks=chunks, memory=self._memory, lock=self._lock)

    def begin_with(self, batches: int) -> None:
        """Plan so many batches at once where a block stands alone, instead of one."""
        self._begin_with = batches

    @property
    def used(self) -> int:
        """About how many batches were asked for, at least 1."""
        first, step = min(((block.first, block.step) for block in self._blocks), default=(self._latest, 1))
        return max(1, (self._latest - first) // step + 1 - len(self._ready))

    # ------------------------------------------------------------------ batches

    def plan(self, index: int) -> Plan:
        """The plan of batch ``index``; raises as ``take``."""
        index = operator.index(index)
        block, number = self._block_with(index)
        windows, size, (rank, count) = block.part(number), block.sizes[number], self.planner.shard
        return Plan(
            block.windows.rows[windows.begin : windows.end],
            self.planner.sampler.sequence_length,
            Key(self.planner.seed, Purpose.AUGMENT, index),
            size,
            size * rank // count,
            block,
            number,
        )

    def take(self, index: int) -> Batch:
        """Batch ``index``, before it is augmented, in the delivered dtypes.

        Raises:
            IndexError: The index lies before the first batch.
            DataError: A value that its field does not allow.
            TypeError: The index is no integer.
            Exception: Whatever the sampler raises for this batch.
        """
        index = operator.index(index)  # NumPy's integers wrap, and would stay in what is kept
        ready = self._ready.pop(index, None)
        if ready is not None and self.form.is_copied[False] and len(ready) == len(self.readers):
            return ready
        block, number = self._block_with(index)
        return self._finish(block, number, ready, stored=False, out=None)

    def gather(self, plan: Plan, *, stored: bool, out: Mapping[str, npt.NDArray[Any]] | None = None) -> Batch:
        """The windows of a plan, whoever made it, in the delivered or the stored dtypes."""
        block, number = plan.block, plan.number
        if not isinstance(block, Block) or block.planner is not self.planner:
            block, number = self.planner.of_starts(plan.starts), 0
        return self._finish(block, number, None, stored=stored, out=out)

    def _finish(
        self, block: Block, number: int, copied: Batch | None, *, stored: bool, out: Mapping[str, Any] | None
    ) -> Batch:
        """A batch with what cannot be copied, in the dtypes it is to have; ``copied`` is what was, if it is ready."""
        form, allowed = self.form, True
        if copied is None:
            copied, allowed = self._copy(block, number)
        if out is None:
            if allowed and form.is_copied[stored] and len(copied) == len(self.readers):
                return copied
            out = self._memory_for(block, number, copied, stored)
        batch, dtypes, converted = {}, form.dtypes[stored], form.converted[stored]
        for name, reader in self.readers.items():
            values, target = copied.get(name), out.get(name)
            if values is None or isinstance(reader, MaskReader):
                values = reader.read(block.part(number), dtypes[name], target)
            else:
                if target is not None or name in converted:
                    try:
                        values = convert_to(values, dtypes[name], target)
                    except RowError as error:
                        raise reader.error(error, block.part(number)) from error
                if not allowed or name in form.checked:
                    reader.check(values, block.part(number))
            batch[name] = values
        if form.is_padded:
            block.absent.fill(batch, number, form.fill)
        return batch

    def _memory_for(self, block: Block, number: int, copied: Batch, stored: bool) -> Batch:
        """Memory for those fields of a batch that are converted or read, where it is large; else none."""
        first, end = block.windows.bounds[number : number + 2]
        size, shapes = (end - first, block.windows.length), self.form.shapes
        dtypes, converted = self.form.dtypes[stored], self.form.converted[stored]
        names = [name for name in self.readers if name not in copied or name in converted]
        layout = known_layout(tuple((name, (*size, *shapes[name]), dtypes[name]) for name in names))
        return self._memory.arrays(layout)

    # ------------------------------------------------------------------ copying

    def _copy(self, block: Block, number: int) -> tuple[Batch, bool]:
        """What can be copied of a batch, ``[n, S, *shape]`` by field, and whether all its values are allowed.

        Batches that are asked for in turn are copied several at a time where they are small; the others wait until they
        are asked for, unless much of the memory that they share is alive.
        """
        index = self._latest = block.first + number * block.step
        byte_views = self._byte_views(block)
        if byte_views is None:
            return {}, True
        if block.together == 1:
            return self._copy_some(byte_views, number, 1)[0]
        with self._lock:
            ready = self._ready.pop(index, None)  # another thread may have put it there meanwhile
            if ready is not None:
                return ready, True
            if len(self._ready) > 2 * block.together:  # nobody came for them
                self._ready.clear()
            first, count = self._choose_copied(block, number)
            copied = self._copy_some(byte_views, first, count)
            for other, (batch, allowed) in enumerate(copied, first):
                if allowed and other != number:
                    self._ready[block.first + other * block.step] = batch
            self._latest = block.first + (first + count - 1) * block.step
        return copied[number - first]

    def _copy_some(self, byte_views: ByteViews, first: int, count: int) -> list[tuple[Batch, bool]]:
        self._memory.hold(())
        copied = byte_views.copy(first, count)
        self._memory.hold(copied.values())
        if count > 1:
            self._memory.share(copied.values())
        allowed = byte_views.allowed(copied, count).tolist() if byte_views.unsure else repeat(True)
        batches = zip(*copied.values(), strict=True)
        return [(dict(zip(copied, batch, strict=True)), fine) for batch, fine in zip(batches, allowed, strict=False)]

    def _choose_copied(self, block: Block, number: int) -> tuple[int, int]:
        """Which batch of a block to copy first, and how many, where batch ``number`` is asked for.

        Those that follow each other are copied together, if they are of one size. After 0..7 it is 8..15 for whoever
        asks for 8, or for 10 while others are about to ask for 8 and 9; who asks for 40 gets it alone, and who asks for
        41 then gets what follows, too.
        """
        sizes = [] if block.byte_views is None else block.byte_views.sizes
        most = 1 if self._memory.is_kept else block.together
        for first in (block.behind, number):
            in_turn = first != number or number in (block.behind, block.alone + 1)
            if in_turn and 0 <= number - first < _AHEAD:
                count = 1
                while count < min(most, len(sizes) - first) and sizes[first + count] == sizes[first]:
                    count += 1
                if number < first + count:
                    block.behind, block.alone = first + count, number
                    return first, count
        block.alone = number
        return number, 1

    def _byte_views(self, block: Block) -> ByteViews | None:
        """How to copy a block; None if nothing in it can be copied."""
        if not block.together:
            with self._lock:
                if not block.together:
                    block.byte_views = self._make_byte_views(block)
                    size = 0 if block.byte_views is None else block.byte_views.batch_bytes
                    block.together = max(1, min(_TOGETHER_BYTES // max(size, 1), _MOST_TOGETHER, len(block.sizes)))
        return block.byte_views

    def _make_byte_views(self, block: Block) -> ByteViews | None:
        if not self._fields or not len(block.windows):
            return None
        if self._chunks is None:
            from mouse_core._arrow.field_chunks import FieldChunks  # with Arrow's functions, which take long to load

            self._chunks = FieldChunks.of(self._fields)
        try:
            byte_views = self._chunks.byte_views(block.windows)
        except DataError:
            return None  # some chunk is damaged: whoever reads it is told
        if byte_views is not None and len(byte_views.fields) == len(self._fields):
            block.windows.forget()
        return byte_views

    # ------------------------------------------------------------------ planning

    def _block_with(self, index: int) -> tuple[Block, int]:
        """The block that batch ``index`` is in, and its number there."""
        if (found := self._known_block_with(index)) is not None:
            return found
        if index < self.planner.epoch_start:
            raise IndexError(f"batch index: expected at least {self.planner.epoch_start}, found {index}")
        with self._lock:
            if (found := self._known_block_with(index)) is None:  # another thread may have made it meanwhile
                block = self._make_block(index)
                self._blocks = self._kept_with(block)
                found = block, (index - block.first) // block.step
        return found

    def _known_block_with(self, index: int) -> tuple[Block, int] | None:
        """The same, if there is such a block."""
        for block in self._blocks:
            if block.first <= index < block.end and not (index - block.first) % block.step:
                return block, (index - block.first) // block.step
        return None

    def _make_block(self, index: int) -> Block:
        first, step, batches, kind = self._choose_planned(index)
        self._missed.append(index)
        if batches > 1:
            try:
                return self.planner.block(first, step, batches, kind)
            except Exception:
                # Some batch of the block cannot be planned. If it is this one, the error comes again.
                self._missed.clear()
        self._alone += 1
        return self.planner.block(index, 1, 1, _ALONE)

    def _choose_planned(self, index: int) -> tuple[int, int, int, int]:
        """What to plan together with a batch: the first batch, how far they are apart, how many, and their kind."""
        longest = self.planner.longest
        for block in self._blocks:
            # Whoever asks for what comes after a block, maybe not at once, will go on so.
            number, rest = divmod(index - block.end, block.step)
            batches = self._limited(_GROWTH * len(block.sizes), block.step)
            if not rest and 0 <= number < (min(_GROWTH, batches) if len(block.sizes) > 1 else 1):
                return block.end, block.step, batches, block.end if block.kind < 0 else block.kind
        if not self._blocks:
            return index, 1, min(self._begin_with, longest), index
        before = [*self._missed][-2:]
        step = index - before[-1] if len(before) == 2 else 0
        if 1 < step <= _MOST_WORKERS and step == before[1] - before[0]:
            return index, step, self._limited(_GROWTH, step), index
        # Batches in no order, or backwards.
        stretch = (index - self.planner.epoch_start) // longest
        alone = sum((missed - self.planner.epoch_start) // longest == stretch for missed in self._missed)
        kept = sum(block.nbytes for block in self._blocks)
        if alone >= _ALONE_FIRST and (self._alone >= _ALONE_BETWEEN or kept < _KEPT_BYTES):
            self._alone = 0
            return self.planner.epoch_start + stretch * longest, 1, longest, _ALONE - 1 - stretch
        return index, 1, 1, _ALONE

    def _limited(self, batches: int, step: int) -> int:
        """So many batches, or as many as a block may have."""
        return max(1, min(batches, self.planner.longest, _MOST_SKIPPED * self.planner.longest // step))

    def _kept_with(self, block: Block) -> tuple[Block, ...]:
        """A new block and those to keep beside it."""
        kept, kinds, room = [block], Counter([block.kind]), _KEPT_BYTES
        for other in self._blocks:
            kinds[other.kind] += 1
            room -= other.nbytes
            fits = room >= 0 and len(kept) < _MOST_KEPT
            if kinds[other.kind] <= _BLOCKS_KEPT and (fits or len(kept) < _BLOCKS_KEPT):
                kept.append(other)
        return tuple(kept)
