"""Windows by field: batches of which some fields are delivered at offsets around anchors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.column import Growth
from mouse_core._base.locks import ProcessLock
from mouse_core.batches._mask import as_items, check_fill
from mouse_core.batches._pipeline import Batch, Pipeline, PlannedBlocks
from mouse_core.batches._plan import BatchForm, MaskReader, Readers, copied_fields
from mouse_core.batches._planner import Block, Planner
from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.sampling.offsets import (
    Anchors,
    FieldWindows,
    OffsetRows,
    Offsets,
    Seconds,
    clock_of,
    field_windows,
    mask_of,
    rows_at,
    rows_of,
    times_of,
)
from mouse_core.sampling.plan import Blocks, Plan, Sampling, WindowSampler
from mouse_core.sampling.windows import Boundary, EpisodeAnchors, Weighting, sampler_of
from mouse_core.spec import FieldSpec
from mouse_core.store.fields import FieldReader, meant_by
from mouse_core.store.snapshot import Snapshot


class AbsentAround:
    """The rows around the anchors of a block that are not there, and those to put right; stands for ``Absent``.

    Args:
        rows: What is read, and put right; counted from the first row of the block.
        bounds: The first row read of each batch, and the end.
    """

    def __init__(self, rows: OffsetRows, bounds: npt.NDArray[np.int64]) -> None:
        self._rows, self._begins = rows, bounds.tolist()
        # Of both the first in each batch, and the end.
        self._moved: list[int] = np.searchsorted(rows.target, bounds).tolist()
        self._missing: list[int] = np.searchsorted(rows.missing, bounds).tolist()

    def there(self, number: int, count: int = 1) -> npt.NDArray[np.bool_]:
        """See ``Absent.there``: ``[runs, unit]``."""
        there = np.ones(self._begins[number + count] - self._begins[number], np.bool_)
        there[self._missing_of(number, count)] = False
        return there.reshape(-1, self._rows.unit)

    def fill(self, values: npt.NDArray[Any], number: int, fill: float | None, count: int = 1) -> None:
        """Put the rows of a field in some batches where they belong, and fill those that are missing.

        Args:
            values: What was read, ``[runs, unit, ...]``, C-contiguous.
            number: The first of these batches.
            fill: What values become for which there is no row; None: those of the row next to it.
            count: How many batches.
        """
        begin, end = self._moved[number], self._moved[number + count]
        missing = self._missing_of(number, count)
        if not values.size or (begin == end and not len(missing)):
            return
        rows = values.reshape(values.shape[0] * values.shape[1], -1)
        items = as_items(rows)
        if begin < end:
            first = self._begins[number]
            items[self._rows.target[begin:end] - first] = items.take(self._rows.source[begin:end] - first)
        if fill is not None:
            items[missing] = as_items(np.full((1, rows.shape[1]), fill, rows.dtype))[0]

    def _missing_of(self, number: int, count: int) -> npt.NDArray[np.int64]:
        """The rows of some batches that are missing, counted from their first."""
        missing = self._rows.missing[self._missing[number] : self._missing[number + count]]
        within: npt.NDArray[np.int64] = missing - self._begins[number]
        return within


@dataclass(eq=False, kw_only=True)
class BlockAround(Block):
    """The rows around the anchors of a block, as a block whose windows are the runs of rows that are read.

    Args:
        absent: What of these is not there.
        refused: What is wrong, by the number of the batch.
    """

    absent: AbsentAround  # type: ignore[assignment]
    refused: Mapping[int, str]

    def check(self, number: int) -> None:
        """Raise DataError if rows of batch ``number`` are not where time stamps must be."""
        if number in self.refused:
            raise DataError(self.refused[number])


class BlocksAround:
    """The rows around the anchors of a source's blocks; stands for ``Blocks``.

    Args:
        anchors: Where the anchors' blocks come from.
        offsets: Which rows.
        shift: How many rows after the anchor the one at offset 0 lies: 1 where a transition stands in the row that it
            leads to, else 0.
        number: Tells the blocks of several such from each other.
        single: Whether no rows are read but those that are asked for, each for itself, and not as runs.
    """

    def __init__(
        self, anchors: PlannedBlocks, offsets: Offsets, shift: int, number: int, *, single: bool = False
    ) -> None:
        self.anchors, self.offsets, self.shift, self.number, self.single = anchors, offsets, shift, number, single
        self.planner, self.begin_with, self.most = anchors.planner, 1, 0
        self._lock = ProcessLock()

    def on(self, anchors: PlannedBlocks) -> BlocksAround:
        """Return the blocks around other anchors."""
        return BlocksAround(anchors, self.offsets, self.shift, self.number, single=self.single)

    @property
    def singly(self) -> BlocksAround:
        """Return the blocks with every row read separately."""
        return BlocksAround(self.anchors, self.offsets, self.shift, ~self.number, single=True)

    def block_with(self, index: int) -> tuple[BlockAround, int]:
        """See ``Blocks.block_with``."""
        block, number = self.anchors.block_with(index)
        return self.around(block), number

    def behind(self, block: Block) -> BlockAround:
        """See ``Blocks.behind``."""
        return self.around(self.anchors.behind(block))

    def around(self, block: Block) -> BlockAround:
        """The rows around the anchors of a block."""
        known = block.around.get(self.number)
        if known is None:
            with self._lock:
                known = block.around.get(self.number)
                if known is None:
                    known = block.around[self.number] = self._make(block)
        assert isinstance(known, BlockAround)
        return known

    def _make(self, block: Block) -> BlockAround:
        snapshot, windows = self.planner.snapshot, block.windows
        anchors = block.anchors = Anchors.of(windows, snapshot) if block.anchors is None else block.anchors
        if isinstance(self.offsets, Seconds):
            rows = rows_at(anchors, self.offsets, self.shift, times_of(snapshot, self.offsets))
        else:
            rows = rows_of(anchors, self.offsets, self.shift, single=self.single)
        # Runs for an anchor, and for a window.
        runs = len(rows.start) // len(windows) if len(windows) else 1
        bounds = [first * runs for first in windows.bounds]
        ends = np.asarray(bounds) * rows.unit
        refused: dict[int, str] = {}
        for row, why in rows.refused:
            refused.setdefault(int(np.searchsorted(ends, row, side="right")) - 1, why)
        return BlockAround(
            first=block.first,
            end=block.end,
            step=block.step,
            kind=block.kind,
            windows=snapshot.locate(rows.start, rows.unit, bounds),
            sizes=block.sizes,
            planner=self.planner,
            absent=AbsentAround(rows, ends),
            refused=refused,
        )


Arrays = Mapping[str, npt.NDArray[Any]]


class ReaderAround:
    """The reader of a field at K offsets: like a step's reader, with an axis in front.

    Args:
        reader: The field's reader.
        windows: The requested offsets.
    """

    def __init__(self, reader: FieldReader, windows: FieldWindows) -> None:
        name = reader.spec.name
        self.reader, self._identity = reader, windows.identity(name)
        self.spec = replace(reader.spec, shape=(windows.count(name), *reader.spec.shape))

    @property
    def identity(self) -> list[Any]:
        """Return the properties that determine the field's values and rows, except the delivered dtype."""
        return [*self.reader.identity, self._identity]

    def check_fills(self, dtype: np.dtype[Any]) -> None:
        """See ``FieldReader.check_fills``."""
        self.reader.check_fills(dtype)

    def stored_dtype(self, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
        """See ``FieldReader.stored_dtype``."""
        return self.reader.stored_dtype(dtype)


@dataclass(frozen=True, eq=False)
class Group:
    """The fields that are delivered at the same offsets.

    Args:
        pipeline: Of these fields and their masks, over blocks of the rows around anchors.
        blocks: Those blocks.
    """

    pipeline: Pipeline
    blocks: BlocksAround

    def take(self, anchors: Block, number: int) -> Batch:
        """These fields of batch ``number`` of a block of anchors, ``[runs, unit, ...]``, and masks ``[runs, unit]``."""
        block = self.blocks.around(anchors)
        block.check(number)
        try:
            return self.pipeline.take_from(block, number)
        except DataError:
            return self.pipeline.finish(self._singly(anchors), number, None, stored=False, out=None)

    def gather(self, anchors: Block, number: int, *, stored: bool, out: Arrays | None) -> Batch:
        """Gather the batch in the delivered or the stored dtypes, optionally into given arrays."""
        block = self.blocks.around(anchors)
        block.check(number)
        try:
            return self._gathered(block, number, stored=stored, out=out)
        except DataError:
            return self._gathered(self._singly(anchors), number, stored=stored, out=out)

    def _singly(self, anchors: Block) -> BlockAround:
        """Return the block without rows that are read only alongside, so that faults in those rows do not matter."""
        return self.blocks.singly.around(anchors)

    def _gathered(self, block: BlockAround, number: int, *, stored: bool, out: Arrays | None) -> Batch:
        targets = None
        if out is not None:
            rows = len(block.part(number)), block.windows.length
            targets = {name: out[name].reshape(*rows, *shape) for name, shape in self.pipeline.form.shapes.items()}
        return self.pipeline.finish(block, number, None, stored=stored, out=targets)

    def forward(self, anchors: PlannedBlocks, growth: Growth) -> Group:
        """Return the group around anchors in a grown snapshot."""
        blocks = self.blocks.on(anchors)
        return Group(self.pipeline.over(anchors.planner, growth, blocks), blocks)


class PipelineAround:
    """Batches of which some fields are delivered at offsets around anchors; stands for ``Pipeline``.

    Args:
        anchors: The pipeline of the other fields.
        groups: Those with offsets.
        readers: All fields.
        form: What batches are like.
        windows: What was asked for.
    """

    def __init__(
        self, anchors: Pipeline, groups: Sequence[Group], readers: Readers, form: BatchForm, windows: FieldWindows
    ) -> None:
        self._anchors, self._groups, self._windows = anchors, groups, windows
        self.planner, self.readers, self.form = anchors.planner, readers, form

    @classmethod
    def of(cls, planner: Planner, readers: Readers, form: BatchForm, windows: FieldWindows) -> PipelineAround:
        """The pipeline of some fields.

        Args:
            planner: Of the anchors.
            readers: By field; those with offsets are ``ReaderAround``.
            form: What batches are like.
            windows: The requested offsets.

        Raises:
            ConfigError: A number to pad with that a field does not hold.
            MissingFieldError: Time stamps that are not there.
        """
        if windows.fill is not None:
            check_fill(windows.fill, {name: form.dtypes[True][name] for name in windows.offsets})
        snapshot = planner.snapshot
        chosen: dict[tuple[Offsets, int], dict[str, FieldReader]] = {}
        for name, reader in readers.items():
            if isinstance(reader, ReaderAround):
                key = windows.offsets[name], shift_of(snapshot, name)
                chosen.setdefault(key, {})[name] = reader.reader
        for offsets in windows.offsets.values():
            if isinstance(offsets, Seconds):
                clock_of(snapshot, offsets)
        masks = {mask_of(name) for name in windows.offsets}
        plain = {
            name: reader
            for name, reader in readers.items()
            if not isinstance(reader, ReaderAround) and name not in masks
        }
        part = BatchForm.of(plain, form.dtypes, form.shapes, form.fill, is_padded=form.is_padded)
        anchors = Pipeline(planner, plain, part, fields=copied_fields(plain, part.shapes))
        groups = []
        for number, ((offsets, shift), fields) in enumerate(chosen.items()):
            # Decoding costs more than finding rows one by one.
            encoded = any(reader.column.kind.is_encoded for reader in fields.values())
            blocks = BlocksAround(anchors.blocks, offsets, shift, number, single=encoded)
            masked: dict[str, FieldReader | MaskReader] = {**fields}
            masked |= {mask: MaskReader(FieldSpec(mask, np.dtype(np.bool_), ())) for mask in map(mask_of, fields)}
            shapes = {name: one.spec.shape for name, one in masked.items()}  # of one row around an anchor
            part = BatchForm.of(masked, form.dtypes, shapes, windows.fill, is_padded=True)
            pipeline = Pipeline(planner, masked, part, fields=copied_fields(fields, part.shapes), blocks=blocks)
            groups.append(Group(pipeline, blocks))
        return cls(anchors, groups, readers, form, windows)

    def forward(self, snapshot: Snapshot, growth: Growth, *, seed: int, epoch_start: int) -> PipelineAround:
        """See ``Pipeline.forward``."""
        anchors = self._anchors.forward(snapshot, growth, seed=seed, epoch_start=epoch_start)
        groups = [group.forward(anchors.blocks, growth) for group in self._groups]
        readers: dict[str, Any] = {**self.readers, **anchors.readers}
        for group in groups:
            for name, reader in group.pipeline.readers.items():
                readers |= {name: ReaderAround(reader, self._windows)} if isinstance(reader, FieldReader) else {}
        return PipelineAround(anchors, groups, readers, self.form, self._windows)

    def begin_with(self, batches: int) -> None:
        """See ``Pipeline.begin_with``."""
        self._anchors.begin_with(batches)

    def plan(self, index: int) -> Plan:
        """See ``Pipeline.plan``: the plan of the anchors."""
        return self._anchors.plan(index)

    def take(self, index: int) -> Batch:
        """See ``Pipeline.take``."""
        return self._take_from(*self._anchors.blocks.block_with(operator.index(index)))

    def take_of(self, plan: Plan) -> Batch:
        """See ``Pipeline.take_of``."""
        return self._take_from(*self._anchors.block_of(plan))

    def _take_from(self, block: Block, number: int) -> Batch:
        made = self._anchors.take_from(block, number)
        for group in self._groups:
            made |= group.take(block, number)
        return self._with_axes(made, block, number)

    def gather(self, plan: Plan, *, stored: bool, out: Arrays | None = None) -> Batch:
        """See ``Pipeline.gather``."""
        block, number = self._anchors.block_of(plan)
        targets = None
        if out is not None:
            rows = len(block.windows.part(number)), block.windows.length
            shapes = self._anchors.form.shapes
            targets = {name: out[name].reshape(*rows, *shapes[name]) for name in self._anchors.readers}
        batch = self._anchors.finish(block, number, None, stored=stored, out=targets)
        for group in self._groups:
            batch |= group.gather(block, number, stored=stored, out=out)
        return self._with_axes(batch, block, number)

    def _with_axes(self, batch: Batch, block: Block, number: int) -> Batch:
        """All fields in their order, with ``[b]`` or ``[b, S]`` in front instead of windows and runs."""
        bounds = block.windows.bounds
        axes = (bounds[number + 1] - bounds[number], block.windows.length)[: self._windows.batch_dims]
        made = {}
        for name, shape in self.form.shapes.items():
            values = batch[name]
            made[name] = values if values.shape == (*axes, *shape) else values.reshape(*axes, *shape)
        return made


def anchors_of(
    windows: Any,
    snapshot: Snapshot,
    sampling: Sampling,
    sequence_length: int | None,
    batch_size: int,
    drop_last: bool,
    boundary: Boundary,
    weighting: Weighting,
    pad: bool | float | None,
) -> tuple[WindowSampler, FieldWindows]:
    """The sampler of anchors, and what is asked for around them; see ``BatchSource``.

    Raises:
        ConfigError: Options that are none, or do not go with each other.
    """
    if isinstance(windows, FieldWindows):
        found = windows
    else:
        single = sequence_length is None and (isinstance(sampling, str | Blocks) or sampling.sequence_length == 1)
        found = field_windows(windows, pad, 1 if single else 2)
    length = 1 if sequence_length is None else sequence_length
    if not isinstance(sampling, str | Blocks):
        if found.pad is False and not isinstance(windows, FieldWindows):
            raise ConfigError(
                "pad: expected True or a number with a sampler of one's own, which chooses the anchors, found False"
            )
        return sampler_of(sampling, length, batch_size, drop_last, boundary, weighting, None), found
    of_steps = pad if boundary != "stream" else None
    sampler = sampler_of(sampling, length, batch_size, drop_last, boundary, weighting, of_steps)
    if found.pad is not False:
        return sampler, found
    if found.batch_dims == 2 and boundary == "stream":
        raise ConfigError(
            "pad: expected boundary='episode' with pad=False, as no window that goes on in another episode has all its "
            f"rows in one, found {boundary!r}"
        )
    if boundary not in ("stream", "episode"):
        raise ConfigError(
            f"pad: expected True or a number with boundary={boundary!r}, as anchors that are left out are those of "
            "episodes, found False"
        )
    before, behind = found.reach({name: shift_of(snapshot, name) for name in found.offsets})
    return EpisodeAnchors(length, batch_size, sampling, weighting, False, drop_last, before, behind), found


def readers_around(readers: Readers, windows: FieldWindows, snapshot: Snapshot) -> dict[str, Any]:
    """The readers of a source whose fields have offsets, with the masks behind their fields.

    Args:
        readers: Of all fields that are delivered.
        windows: The offsets.
        snapshot: Has the columns of which fields could be made.

    Raises:
        MissingFieldError: A field with offsets that is not delivered.
        ConfigError: A field of the name that the mask of another has.
    """
    for name in windows.offsets:
        if not isinstance(readers.get(name), FieldReader):
            raise MissingFieldError(
                f"windows: expected fields that are delivered, among {list(readers)}, found {name!r}"
                f"{meant_by(name, readers, snapshot.config.types)}"
            )
        if mask_of(name) in readers:
            raise ConfigError(f"windows: expected a store without a field {mask_of(name)!r}, which batches get")
    found: dict[str, Any] = {}
    for name, reader in readers.items():
        if name in windows.offsets and isinstance(reader, FieldReader):
            found[name] = ReaderAround(reader, windows)
            shape = (windows.count(name),)
            found[mask_of(name)] = MaskReader(FieldSpec(mask_of(name), np.dtype(np.bool_), shape))
        else:
            found[name] = reader
    return found


def shift_of(snapshot: Snapshot, name: str) -> int:
    """Return the distance from an anchor to the row at offset 0: 1 for a transition in the row that it leads to."""
    field = snapshot.config.fields.get(name)
    return int(snapshot.alignment == "arrived" and field is not None and field.is_of_transition)
