"""The pipeline of a source. The pipeline plans, locates and copies several batches together, and returns them one by
one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.column import Growth
from mouse_core._arrow.gathering import ranges_of
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core._base.memory import BatchMemory, layout_of
from mouse_core.batches._plan import BatchForm, MaskReader, Readers, copied_fields
from mouse_core.batches._planner import Block, PlannedBlocks, Planner
from mouse_core.dtypes import RowError, convert_to
from mouse_core.errors import DataError, StorageError
from mouse_core.randomness import Key, Purpose
from mouse_core.sampling.plan import Plan
from mouse_core.store.fields import FieldReader
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core._arrow.byte_views import ByteViews, CopiedField, FieldChunks
    from mouse_core.readahead import ReadAhead

Batch = dict[str, npt.NDArray[Any]]

# Small batches that are requested in order are copied together, up to 6 MB: one call takes 5 us, as long as copying 40
# KB, and allocating the arrays of one batch takes as long as allocating the arrays of three batches.
_JOINT_BYTES, _MOST_JOINT = 6 << 20, 64
_FIRST_JOINT = 4
# The latest 16 batches that were copied individually are recorded, because up to 16 threads may request neighbours at
# once.
_REMEMBERED_ALONE = 16


class Pipeline:
    """Computes the batches of one source over one snapshot. The state of a pipeline is only a cache: every batch can be
    computed again from its index.

    The pipeline's lock is held while a block is planned or located, and while batches are copied together. The lock is
    not held while a single batch is copied, converted, or read from irregular chunks.

    Args:
        planner: The planner, which chooses and locates the windows of the batches.
        readers: Readers by field.
        form: The dtypes and shapes of the fields.
        fields: The fields that can be copied directly from the stored bytes; None: these fields are determined from
            ``readers``.
        chunks: The addresses of the fields' chunks that the pipeline over the earlier snapshot has already found.
        memory, lock: The memory for batches and the lock of the pipeline over the earlier snapshot.
        blocks: The object that plans the blocks; by default ``PlannedBlocks`` of ``planner``.
    """

    def __init__(
        self,
        planner: Planner,
        readers: Readers,
        form: BatchForm,
        *,
        fields: Sequence[CopiedField] | None = None,
        chunks: FieldChunks | None = None,
        memory: BatchMemory | None = None,
        lock: ProcessLock | None = None,
        blocks: PlannedBlocks | None = None,
    ) -> None:
        self.planner, self.readers, self.form = planner, readers, form
        self._fields = copied_fields(readers, form.shapes) if fields is None else fields
        self._chunks = chunks
        self._masks = [name for name, reader in readers.items() if isinstance(reader, MaskReader)]
        self._memory = BatchMemory() if memory is None else memory
        self._lock = ProcessLock() if lock is None else lock
        self.blocks = PlannedBlocks(planner, self._lock) if blocks is None else blocks
        # By index: batches that were copied together with another batch and not returned yet; their values were
        # checked.
        self._ready: dict[int, Batch] = {}
        # The indices of the latest batches that were copied individually: they were returned, so joint copies skip
        # them.
        self._copied_alone: tuple[int, ...] = ()

    def forward(self, snapshot: Snapshot, growth: Growth, *, seed: int, epoch_start: int) -> Pipeline:
        """Return the pipeline over a later snapshot with appended rows; cached values for the earlier rows are kept."""
        planner = replace(self.planner, snapshot=snapshot, seed=seed, epoch_start=epoch_start)
        planner.check()
        return self.over(planner, growth)

    def over(self, planner: Planner, growth: Growth, blocks: PlannedBlocks | None = None) -> Pipeline:
        """Return the pipeline with another planner, whose snapshot has appended rows."""
        snapshot = planner.snapshot
        readers = {name: snapshot.readers.get(name, reader) for name, reader in self.readers.items()}
        columns = {name: reader.column for name, reader in readers.items() if isinstance(reader, FieldReader)}
        fields = [field._replace(column=columns[field.name]) for field in self._fields]
        with self._lock:  # both pipelines share the lock from now on
            chunks = None if self._chunks is None else self._chunks.forward(fields, growth)
        known: dict[str, Any] = {"chunks": chunks, "memory": self._memory, "lock": self._lock}
        pipeline = Pipeline(planner, readers, self.form, fields=fields, blocks=blocks, **known)
        if (ahead := self.__dict__.get("_readahead")) is not None:  # otherwise it is created on first use
            pipeline.__dict__["_readahead"] = ahead.forward(growth, snapshot, *pipeline._readahead_arguments())
        return pipeline

    # ------------------------------------------------------------------ batches

    def plan(self, index: int) -> Plan:
        """Return the plan of batch ``index``; raise the errors of ``take``."""
        index = operator.index(index)
        block, number = self.blocks.block_with(index)
        windows, size = block.windows.planned, block.sizes[number]
        part = slice(*windows.bounds[number : number + 2])
        return Plan(
            windows.rows[part],
            self.planner.sampler.sequence_length,
            Key(self.planner.seed, Purpose.AUGMENT, index),
            size,
            self.planner.own(size)[0],
            None if windows.lengths is None else windows.lengths[part],
            block,
            number,
        )

    def take(self, index: int) -> Batch:
        """Return batch ``index`` in the delivered dtypes, before any stage is applied.

        Raises:
            IndexError: The index lies before the first batch.
            DataError: A value is outside the bounds of its field.
            TypeError: The index is not an integer.
            Exception: The error that the sampler raises for this batch.
        """
        index = operator.index(index)  # a NumPy integer could overflow, and would be a key of a dict
        ready = self._ready.pop(index, None)
        if ready is not None and self.form.is_copied[False] and len(ready) == len(self.readers):
            return ready
        block, number = self.blocks.block_with(index)
        return self.finish(block, number, ready, stored=False, out=None)

    def take_of(self, plan: Plan) -> Batch:
        """Return the batch of a plan of this pipeline; see ``take``."""
        return self.take_from(*self.block_of(plan))

    def take_from(self, block: Block, number: int) -> Batch:
        """Return the batch with index ``number`` in a block of ``blocks``; see ``take``."""
        if not self.readers:
            return {}
        ready = self._ready.pop(block.first + number * block.step, None)
        return self.finish(block, number, ready, stored=False, out=None)

    def gather(self, plan: Plan, *, stored: bool, out: Mapping[str, npt.NDArray[Any]] | None = None) -> Batch:
        """Return the values of a plan's windows, in the delivered or the stored dtypes."""
        return self.finish(*self.block_of(plan), None, stored=stored, out=out)

    def block_of(self, plan: Plan) -> tuple[Block, int]:
        """Return the block that contains the batch of a plan, and the batch's index in the block. If another pipeline
        created the plan, the block is a new block.
        """
        if isinstance(plan.block, Block) and plan.block.planner is self.planner:
            return plan.block, plan.number
        return self.planner.of_plan(plan), 0

    def finish(
        self, block: Block, number: int, copied: Batch | None, *, stored: bool, out: Mapping[str, Any] | None
    ) -> Batch:
        """Complete a batch: convert dtypes, and read the fields that cannot be copied. ``copied`` contains the fields
        that were copied.
        """
        form, allowed = self.form, True
        if copied is None:
            copied, allowed = self._copy(block, number)
        if out is None:
            if allowed and form.is_copied[stored] and len(copied) == len(self.readers):
                return copied
            names = [name for name in self.readers if name not in copied or name in form.converted[stored]]
            size = block.windows.bounds[number + 1] - block.windows.bounds[number], block.windows.length
            out = self._memory.arrays(layout_of(names, size, form.shapes, form.dtypes[stored]))
        batch: Batch = {}
        for name, reader in self.readers.items():
            values, target, dtype = copied.get(name), out.get(name), form.dtypes[stored][name]
            if isinstance(reader, MaskReader):
                values = convert_to(block.absent.there(number) if values is None else values, dtype, target)
            elif values is None:
                values = reader.read(block.part(number), dtype, target)
            else:
                if target is not None or name in form.converted[stored]:
                    values = self._converted(values, name, (block, number), dtype, target)
                if not allowed or name in form.checked:
                    reader.check(values, block.part(number))
            batch[name] = values
        if not copied.keys() & self._masks:
            self._settle_absent(batch, block, number)
        return batch

    def _converted(
        self, values: npt.NDArray[Any], name: str, batch: tuple[Block, int], dtype: np.dtype[Any], target: Any
    ) -> npt.NDArray[Any]:
        """Convert a copied field to another dtype, or write it to the array ``target``; return the result."""
        try:
            return convert_to(values, dtype, target)
        except RowError as error:
            block, number = batch
            reader = self.readers[name]
            assert isinstance(reader, FieldReader)
            raise reader.error(error, block.part(number)) from error

    def _settle_absent(self, batch: Batch, block: Block, number: int) -> None:
        """Fill the missing steps of a batch, and mask windows that belong to other shards."""
        for name in batch.keys() - self._masks if self.form.is_padded else ():
            block.absent.fill(batch[name], number, self.form.fill)
        self._mask_others(batch, block.sizes[number])

    def _mask_others(self, batch: Batch, size: int) -> None:
        """Mask the additional window, which belongs to another shard, in a batch of ``size`` windows over all
        shards.
        """
        if self.planner.uneven == "pad":
            (first, end), (begin, behind) = self.planner.own(size), self.planner.delivered(size)
            for name in self._masks:
                mask = batch[name]
                mask[(end - first) * (len(mask) // (behind - begin)) :] = 0

    def _copy(self, block: Block, number: int) -> tuple[Batch, bool]:
        """Copy the fields of a batch, ``[n, S, *shape]``. Return the copied fields, and whether all values are valid.

        Small batches are copied together if their rows are in memory and the batches are requested in order. Batches
        that are not requested yet are cached, except if much of the memory that these batches share is still in use.
        """
        index = block.first + number * block.step
        byte_views = self._byte_views(block)
        if byte_views is None:
            if self._readahead is not None:
                self._readahead.reach(block, number, 1)
            return {}, True
        if block.together > 1:
            with self._lock:
                if (ready := self._ready.pop(index, None)) is not None:  # another thread copied it meanwhile
                    return ready, True
                # The first batch of a block is returned sooner if only a few batches are copied with it.
                most = min(block.together, _FIRST_JOINT) if number == 0 else block.together
                first, count = byte_views.choose_copied(number, 1 if self._memory.is_kept else most)
                if count > 1 and (self._readahead is None or self._readahead.there(byte_views, first, count)):
                    with suppress(
                        DataError, StorageError
                    ):  # if another batch is damaged, the caller that requests it gets the error
                        return self._copy_together(block, byte_views, first, count, number)
        self._copied_alone = (*self._copied_alone[1 - _REMEMBERED_ALONE :], index)
        alone = self._copy_batches(block, byte_views, number, 1)[0]
        self._ready.pop(index, None)  # another thread may have copied it before the line above
        return alone

    def _copy_together(self, block: Block, views: ByteViews, first: int, count: int, number: int) -> tuple[Batch, bool]:
        """Copy the batch with index ``number`` in a block together with its neighbours: ``count`` batches from index
        ``first`` on. Return the batch; the other batches are cached until they are requested.
        """
        surplus = max(0, len(self._ready) + count - 1 - 2 * block.together)
        for unwanted in [*self._ready][:surplus]:  # the oldest batches, which were not requested
            self._ready.pop(unwanted, None)
        copied = self._copy_batches(block, views, first, count)
        for other, (batch, allowed) in enumerate(copied, first):
            waiting = block.first + other * block.step
            if allowed and other != number and waiting not in self._copied_alone:
                self._ready[waiting] = batch
        return copied[number - first]

    def _copy_batches(self, block: Block, byte_views: ByteViews, first: int, count: int) -> list[tuple[Batch, bool]]:
        self._memory.hold(())
        ahead = self._readahead
        copied = byte_views.copy(first, count) if ahead is None else ahead.copied(block, byte_views, first, count)
        self._memory.hold(copied.values())
        if count > 1:
            self._memory.share(copied.values())
        allowed = byte_views.allowed(copied, count).tolist() if byte_views.unsure else repeat(True)
        if self._masks and not byte_views.unsure and all(self.form.is_copied):
            copied = self._with_masks(copied, block, first, count)
        batches = zip(*copied.values(), strict=True)
        return [(dict(zip(copied, batch, strict=True)), fine) for batch, fine in zip(batches, allowed, strict=False)]

    def _with_masks(self, copied: Batch, block: Block, first: int, count: int) -> Batch:
        """Add masks to batches that were copied together, and fill their missing steps; ``copied`` has arrays ``[count,
        n, S, ...]`` by field.
        """
        if len(copied) + len(self._masks) < len(self.readers):
            return copied
        batches, there = dict(copied), block.absent.there(first, count)
        for name in self._masks:
            batches[name] = there.astype(self.form.dtypes[False][name]).reshape(count, -1, block.windows.length)
        if self.form.is_padded:
            for values in copied.values():
                # If the array is C-contiguous, all batches are filled together; otherwise one by one.
                together = count if values.flags.c_contiguous else 1
                for number in range(0, count, together):
                    part = values[number : number + together].reshape(-1, *values.shape[2:])
                    block.absent.fill(part, first + number, self.form.fill, together)
        for number in range(count) if self.planner.uneven == "pad" else ():
            self._mask_others({name: batches[name][number] for name in self._masks}, block.sizes[first + number])
        return {name: batches[name] for name in self.readers}

    @memo
    def _readahead(self) -> ReadAhead | None:
        """The object that reads rows in advance; None if all rows are in memory."""
        snapshot = self.planner.snapshot
        if not any(part.backing is not None or part.is_mapped or part.sealed_files for part in snapshot.segments):
            return None
        from mouse_core.readahead import ReadAhead

        return ReadAhead.of(snapshot, *self._readahead_arguments())

    def _readahead_arguments(self) -> tuple[Any, ...]:
        """Return all arguments of ``ReadAhead`` except the files."""
        from mouse_core.readahead import weakly  # imported only if rows are read ahead

        # Weak references: a reference cycle would keep this pipeline and its files open until garbage collection.
        views, gathered = weakly(self._byte_views, None), weakly(self._ranges_not_copied, ())
        return self.blocks, views, gathered, self.planner.read

    def _ranges_not_copied(
        self, block: Block, number: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield the byte ranges of a batch that are read but not copied; see ``ReadAhead``."""
        copied = () if block.byte_views is None else {field.name for field in block.byte_views.fields}
        readers = [
            field for name, field in self.readers.items() if name not in copied and isinstance(field, FieldReader)
        ]
        return ranges_of([reader.column for reader in readers], block.part(number)) if readers else iter(())

    def _byte_views(self, block: Block) -> ByteViews | None:
        """Return the views of stored bytes from which the fields of a block are copied; None if no field of the block
        can be copied.
        """
        if not block.together:
            with self._lock:
                if not block.together:
                    block.byte_views = self._make_byte_views(block)
                    size = 0 if block.byte_views is None else block.byte_views.batch_bytes
                    together = _MOST_JOINT if self._readahead is None else self._readahead.together(block, _MOST_JOINT)
                    block.together = max(1, min(_JOINT_BYTES // max(size, 1), together, len(block.sizes)))
        return block.byte_views

    def _make_byte_views(self, block: Block) -> ByteViews | None:
        if not self._fields or not len(block.windows):
            return None
        if self._chunks is None:
            from mouse_core._arrow.byte_views import FieldChunks  # a slow import of Arrow's functions

            self._chunks = FieldChunks.of(self._fields)
        try:
            byte_views = self._chunks.byte_views(block.windows, later=bool(self._readahead and self._readahead.is_on()))
        except DataError:
            return None  # a chunk is damaged: reading its rows raises the error
        if byte_views is not None and len(byte_views.fields) == len(self._fields):
            block.windows.forget()
        return byte_views
