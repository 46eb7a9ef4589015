"""Batches in which some fields are delivered at offsets around anchor rows; batches of transitions are a special case.

A sampler draws anchors. With offsets -1, 0, 1 for a field, the batch has the rows before, at and after each anchor.
Fields with equal offsets share a pipeline. Neighbouring offsets are read as one "run" of rows: for anchor 7 and the
offsets -1 to 1, the run is the rows 6, 7, 8. A run may extend beyond the episode of its anchor. Rows outside the
episode are masked as missing and replaced by the nearest row of the episode: if the episode ends with row 7, the values
come from the rows 6, 7, 7.

Each class of this module has the same interface as a class for batches without offsets: ``OffsetBlocks`` as
``PlannedBlocks``, ``OffsetPipeline`` as ``Pipeline``, ``OffsetReader`` as ``FieldReader``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mouse_core._arrow.column import Growth
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.batches._mask import Absent, check_fill
from mouse_core.batches._pipeline import Batch, Pipeline
from mouse_core.batches._plan import BatchForm, MaskReader, Readers, choose_readers
from mouse_core.batches._planner import Block, PlannedBlocks, Planner
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.sampling.offsets import (
    Anchors,
    FieldWindows,
    Offsets,
    Seconds,
    clock_of,
    field_windows,
    mask_of,
    rows_at,
    rows_of,
    times_of,
)
from mouse_core.sampling.plan import MASK, Blocks, Plan, Sampling, WindowSampler
from mouse_core.sampling.windows import (
    Boundary,
    EpisodeAnchors,
    TransitionWindows,
    Weighting,
    sampler_of,
    terminal_codes,
)
from mouse_core.spec import FieldSpec, codes_called
from mouse_core.store.fields import FieldReader, meant_by
from mouse_core.store.snapshot import Snapshot


class OffsetBlocks(PlannedBlocks):
    """Blocks in which each window is a run of rows around an anchor.

    Args:
        anchors: The blocks of anchors.
        offsets: The offsets of the rows from their anchor.
        shift: The number of rows from the anchor to the row at offset 0; see ``shift_of``.
        number: The index of this group of fields, which is the key of the group in ``block.around``.
        single: Whether each row is read individually instead of in runs; if True, rows outside the episode are never
            read.
    """

    def __init__(
        self, anchors: PlannedBlocks, offsets: Offsets, shift: int, number: int, *, single: bool = False
    ) -> None:
        super().__init__(anchors.planner, ProcessLock())
        self._anchors, self._offsets, self._shift, self._number, self._single = anchors, offsets, shift, number, single

    def on(self, anchors: PlannedBlocks) -> OffsetBlocks:
        """Return blocks with the same options around the anchors ``anchors``."""
        return OffsetBlocks(anchors, self._offsets, self._shift, self._number, single=self._single)

    def block_with(self, index: int) -> tuple[Block, int]:
        """See ``PlannedBlocks.block_with``."""
        block, number = self._anchors.block_with(index)
        return self.around(block), number

    def behind(self, block: Block) -> Block:
        """See ``PlannedBlocks.behind``."""
        return self.around(self._anchors.behind(block))

    def around(self, block: Block, *, single: bool = False) -> Block:
        """Return the block of rows around the anchors of ``block``; the result is cached in ``block.around``."""
        key = ~self._number if single else self._number
        known = block.around.get(key)
        if known is None:
            with self._lock:
                known = block.around.get(key)
                if known is None:
                    known = block.around[key] = self._make_around(block, single=single or self._single)
        return known

    def _make_around(self, block: Block, *, single: bool) -> Block:
        snapshot, windows = self.planner.snapshot, block.windows
        anchors = block.anchors = Anchors.of(windows, snapshot) if block.anchors is None else block.anchors
        if isinstance(self._offsets, Seconds):
            rows = rows_at(anchors, self._offsets, self._shift, times_of(snapshot, self._offsets))
        else:
            rows = rows_of(anchors, self._offsets, self._shift, single=single)
        # All windows have the same number of runs: with 20 runs and window bounds 0, 2, 4, each window has 5 runs, and
        # the bounds of runs are 0, 10, 20.
        runs = len(rows.start) // len(windows) if len(windows) else 1
        bounds = [first * runs for first in windows.bounds]
        ends = np.asarray(bounds) * rows.unit
        refused: dict[int, str] = {}
        for row, message in rows.refused:
            refused.setdefault(int(np.searchsorted(ends, row, side="right")) - 1, message)
        located = snapshot.locate(rows.start, rows.unit, bounds)
        made = Block(
            block.first, block.end, block.step, block.kind, located, block.sizes, self.planner, refused=refused
        )
        made.__dict__["absent"] = Absent(rows.unit, ends, rows.missing, rows.target, rows.source)
        return made


Arrays = Mapping[str, npt.NDArray[Any]]


class OffsetReader:
    """The reader of a field at K offsets. The reader makes the same checks as ``FieldReader``; the shape in its
    ``spec`` is ``[K, ...]``.

    Args:
        reader: The reader of the field.
        windows: The offsets of all fields.
    """

    def __init__(self, reader: FieldReader, windows: FieldWindows) -> None:
        name = reader.spec.name
        self.reader, self._identity = reader, windows.identity(name)
        self.spec = replace(reader.spec, shape=(*windows.axes(name), *reader.spec.shape))
        self.check_fills, self.stored_dtype = reader.check_fills, reader.stored_dtype

    @property
    def identity(self) -> list[Any]:
        """Return the values that determine the field's content, without the delivered dtype."""
        return [*self.reader.identity, self._identity]


class OffsetPipeline:
    """The pipeline of batches in which some fields are delivered at offsets. The class has the interface of
    ``Pipeline``.

    Args:
        anchors: The pipeline of the fields without offsets.
        groups: For each group of fields with equal offsets: the pipeline that reads the fields and their masks, and the
            blocks of rows that this pipeline reads.
        readers: The readers of all fields.
        form: The dtypes and shapes of all fields.
        windows: The offsets.
    """

    def __init__(
        self,
        anchors: Pipeline,
        groups: Sequence[tuple[Pipeline, OffsetBlocks]],
        readers: Readers,
        form: BatchForm,
        windows: FieldWindows,
    ) -> None:
        self._anchors, self._groups, self._windows = anchors, groups, windows
        self.planner, self.readers, self.form, self.blocks = anchors.planner, readers, form, anchors.blocks

    @classmethod
    def of(cls, planner: Planner, readers: Readers, form: BatchForm, windows: FieldWindows) -> Self:
        """Return a pipeline for the fields of ``readers``.

        Args:
            planner: The planner that draws and locates the anchors.
            readers: Readers by field; the reader of a field with offsets is an ``OffsetReader``.
            form: The dtypes and shapes of all fields.
            windows: The offsets.

        Raises:
            ConfigError: The dtype of a field cannot represent the padding value.
            MissingFieldError: Offsets are in seconds, and the store has no time stamps.
        """
        if windows.fill is not None:
            check_fill(windows.fill, {name: form.dtypes[True][name] for name in windows.offsets})
        snapshot = planner.snapshot
        chosen: dict[tuple[Offsets, int], dict[str, FieldReader]] = {}
        for name, reader in readers.items():
            if isinstance(reader, OffsetReader):
                offsets, shift = windows.offsets[name], shift_of(snapshot, name)
                if not isinstance(offsets, Seconds) and min(offsets) >= 0:
                    # With alignment "arrived", the action at offset 0 and the observation at offset 1 share a row.
                    offsets, shift = tuple(offset + shift for offset in offsets), 0
                chosen.setdefault((offsets, shift), {})[name] = reader.reader
        for offsets in windows.offsets.values():
            if isinstance(offsets, Seconds):
                clock_of(snapshot, offsets)
        masks = {mask_of(name) for name in windows.offsets}
        plain = {
            name: reader
            for name, reader in readers.items()
            if not isinstance(reader, OffsetReader) and name not in masks
        }
        part = BatchForm.of(plain, form.dtypes, form.shapes, form.fill, is_padded=form.is_padded)
        anchors = Pipeline(planner, plain, part)
        groups = []
        for number, ((offsets, shift), fields) in enumerate(chosen.items()):
            # Decoding rows that are not delivered takes longer than locating each row individually.
            encoded = any(reader.column.kind.is_encoded for reader in fields.values())
            blocks = OffsetBlocks(anchors.blocks, offsets, shift, number, single=encoded)
            masked: dict[str, FieldReader | MaskReader] = {**fields}
            masked |= {mask: MaskReader(FieldSpec(mask, np.dtype(np.bool_), ())) for mask in map(mask_of, fields)}
            shapes = {name: one.spec.shape for name, one in masked.items()}  # the shape of one row
            part = BatchForm.of(masked, form.dtypes, shapes, windows.fill, is_padded=True)
            pipeline = Pipeline(planner, masked, part, blocks=blocks)
            groups.append((pipeline, blocks))
        return cls(anchors, groups, readers, form, windows)

    def forward(self, snapshot: Snapshot, growth: Growth, *, seed: int, epoch_start: int) -> Self:
        """See ``Pipeline.forward``."""
        anchors = self._anchors.forward(snapshot, growth, seed=seed, epoch_start=epoch_start)
        grown = [(group, blocks.on(anchors.blocks)) for group, blocks in self._groups]
        groups = [(group.over(anchors.planner, growth, blocks), blocks) for group, blocks in grown]
        readers: dict[str, Any] = {**self.readers, **anchors.readers}
        for group, _ in groups:
            for name, reader in group.readers.items():
                readers |= {name: OffsetReader(reader, self._windows)} if isinstance(reader, FieldReader) else {}
        readers = {name: readers[name] for name in self.readers}
        return type(self)(anchors, groups, readers, self.form, self._windows)

    def plan(self, index: int) -> Plan:
        """Return the plan of the anchors; see ``Pipeline.plan``."""
        return self._anchors.plan(index)

    def take(self, index: int) -> Batch:
        """See ``Pipeline.take``."""
        return self._batch(*self._anchors.blocks.block_with(operator.index(index)), Pipeline.take_from)

    def take_of(self, plan: Plan) -> Batch:
        """See ``Pipeline.take_of``."""
        return self._batch(*self._anchors.block_of(plan), Pipeline.take_from)

    def gather(self, plan: Plan, *, stored: bool, out: Arrays | None = None) -> Batch:
        """See ``Pipeline.gather``."""

        def read(fields: Pipeline, block: Block, number: int) -> Batch:
            targets = None
            if out is not None:
                axes = len(block.part(number)), block.windows.length
                shapes = {name: shape for name, shape in fields.form.shapes.items() if name in fields.readers}
                targets = {name: out[name].reshape(*axes, *shape) for name, shape in shapes.items()}
            return fields.finish(block, number, None, stored=stored, out=targets)

        return self._batch(*self._anchors.block_of(plan), read)

    def _batch(self, block: Block, number: int, read: Callable[[Pipeline, Block, int], Batch]) -> Batch:
        """Return the batch with index ``number`` in a block of anchors; ``read`` is a function that returns the fields.

        A run can include rows that are not delivered. If reading a row raises DataError, all rows of this group of
        fields are read individually instead of in runs.
        """
        batch = read(self._anchors, block, number)
        for group, blocks in self._groups:
            around = blocks.around(block)
            if number in around.refused:
                raise DataError(around.refused[number])
            try:
                batch |= read(group, around, number)
            except DataError:
                batch |= read(group, blocks.around(block, single=True), number)
        return self._with_axes(batch, block, number)

    def _with_axes(self, batch: Batch, block: Block, number: int) -> Batch:
        """Return all fields in the order of the batch, with the axes of windows and runs reshaped to ``[b]`` or ``[b,
        S]``.
        """
        bounds = block.windows.bounds
        axes = (bounds[number + 1] - bounds[number], block.windows.length)[: self._windows.batch_dims]
        reshaped = {}
        for name, shape in self.form.shapes.items():
            values = batch[name]
            reshaped[name] = values if values.shape == (*axes, *shape) else values.reshape(*axes, *shape)
        return reshaped


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
    *,
    transitions: bool,
) -> tuple[WindowSampler, FieldWindows]:
    """Return the sampler of anchors, and the offsets around them; see ``BatchSource`` for the arguments.

    Raises:
        ConfigError: An option is invalid, or options contradict each other.
    """
    length, batch_dims = (1, 1) if sequence_length is None else (sequence_length, 2)
    if isinstance(windows, FieldWindows):  # from a source that is restored with its sampler
        found = windows
    elif transitions:
        if windows is not None:
            raise ConfigError("transitions: expected windows=None, since transitions have fixed windows, found windows")
        if boundary not in ("stream", "episode"):
            raise ConfigError(f"transitions: expected windows within episodes, found boundary={boundary!r}")
        if not isinstance(pad, bool | None):
            raise ConfigError(f"pad: when transitions are read, expected True or False, found {pad!r}")
        offsets: dict[str, tuple[int, ...]] = {}
        for name, field in snapshot.config.fields.items():
            if name.startswith("next_"):
                offsets[name] = (1,)
            elif snapshot.alignment == "arrived" and field.is_of_transition:
                offsets[name] = (0,)  # the row of the transition that leaves the anchor's observation
        found = FieldWindows(offsets, True, batch_dims, has_axis=False)
    else:
        several = not isinstance(sampling, str | Blocks) and sampling.sequence_length > 1
        found = field_windows(windows, pad, 2 if several else batch_dims)
        if found.pad is False and not isinstance(sampling, str | Blocks):
            raise ConfigError(
                "pad: with a custom sampler, which chooses the anchors itself, expected True or a fill number, "
                "found False"
            )
    if not isinstance(sampling, str | Blocks):
        return sampler_of(sampling, length, batch_size, drop_last, boundary, weighting, None), found
    if transitions:
        padded = sequence_length is not None and pad is not False
        return TransitionWindows(length, batch_size, sampling, weighting, padded, drop_last), found
    step_pad = pad if boundary != "stream" else None
    sampler = sampler_of(sampling, length, batch_size, drop_last, boundary, weighting, step_pad)
    if found.pad is not False:
        return sampler, found
    if found.batch_dims == 2 and boundary == "stream":
        raise ConfigError(
            "pad: with pad=False, expected boundary='episode', because a window that crosses the end of an episode has "
            f"missing rows, found {boundary!r}"
        )
    if boundary not in ("stream", "episode"):
        raise ConfigError(
            f"pad: with boundary={boundary!r}, expected True or a number, because anchors can only be left out within "
            "episodes, found False"
        )
    before, behind = found.reach({name: shift_of(snapshot, name) for name in found.offsets})
    return EpisodeAnchors(length, batch_size, sampling, weighting, False, drop_last, before, behind), found


def readers_around(readers: Readers, windows: FieldWindows, snapshot: Snapshot) -> dict[str, Any]:
    """Return the readers of a source in which some fields are delivered at offsets. The reader of each field with
    offsets is followed by the reader of the field's mask.

    Args:
        readers: The readers of all delivered fields.
        windows: The offsets.
        snapshot: The snapshot; error messages suggest names of its columns.

    Raises:
        MissingFieldError: A field with offsets is not delivered.
        ConfigError: A stored field has the name of a mask.
    """
    for name in windows.offsets:
        if not isinstance(readers.get(name), FieldReader):
            raise MissingFieldError(
                f"windows: expected only fields of the batches, {list(readers)}, found {name!r}"
                f"{meant_by(name, readers, snapshot.config.types)}"
            )
        if mask_of(name) in readers:
            raise ConfigError(
                f"windows: expected a store without a field {mask_of(name)!r}, since batches get a mask of this name"
            )
    by_name: dict[str, Any] = {}
    for name, reader in readers.items():
        if name in windows.offsets and isinstance(reader, FieldReader):
            by_name[name] = OffsetReader(reader, windows)
            shape = (windows.count(name),)
            by_name[mask_of(name)] = MaskReader(FieldSpec(mask_of(name), np.dtype(np.bool_), shape))
        else:
            by_name[name] = reader
    return by_name


def shift_of(snapshot: Snapshot, name: str) -> int:
    """Return the number of rows from an anchor to the row at offset 0 of a field.

    The result is 1 for actions, rewards and done with alignment "arrived": there, the action that follows the
    observation of row 7 is stored in row 8. Otherwise the result is 0.
    """
    field = snapshot.config.fields.get(name)
    return int(snapshot.alignment == "arrived" and field is not None and field.is_of_transition)


# ---------------------------------------------------------------------- transitions

# Transitions are implemented as anchors. Each observation column has a second field, ``next_...``. With alignment
# "arrived" and the anchor in row t, the observation is in row t, and all other fields are in row t + 1. With
# "outgoing", the next observation is in row t + 1, and all other fields are in row t.
_FLAGS = ("terminated", "truncated")
# Fields that are read but not delivered by default: done codes, and whether the next observation is missing.
_READ = ("done", "next_done", "next_observation_missing")


def transition_readers(
    snapshot: Snapshot, names: tuple[str, ...] | None, required: tuple[str, ...], windows: FieldWindows
) -> Readers:
    """Return the readers of the fields of which transitions consist.

    Raises:
        MissingFieldError: A named field does not exist.
        SchemaError: A flag, such as ``terminated``, has one value per agent instead of one value per step.
    """
    made = (*_FLAGS, MASK)
    own = None
    if names is not None:
        own = (*(name for name in names if name not in made), *(name for name in _READ if name in snapshot.readers))
    found = choose_readers(snapshot, own, tuple(name for name in required if name not in made), masked=True)
    delivered: dict[str, Any] = {}
    for name, reader in _with_offsets(found, windows).items():
        if name not in _READ or (names is not None and name in names):
            delivered[name] = reader
        if name in _FLAGS and reader.spec.shape:
            raise SchemaError(
                f"transitions: expected one flag per step in {name!r}, found shape {list(reader.spec.shape)}; "
                "store ends of agents in a field 'agent_done'"
            )
        if name == "done":
            flags = [flag for flag in _FLAGS if names is None or flag in names]
            delivered |= {flag: MaskReader(FieldSpec(flag, np.dtype(np.bool_), ())) for flag in flags}
    return delivered


def _with_offsets(readers: Mapping[str, Any], windows: FieldWindows) -> dict[str, Any]:
    return {name: OffsetReader(one, windows) if name in windows.offsets else one for name, one in readers.items()}


def also_next(options: Any, fields: Container[str]) -> Any:
    """Return options by field, in which each field ``next_<name>`` has the option of the observation ``<name>``."""
    from mouse_core.statistics.normalizer import Normalizer  # loaded on demand

    names = {name: f"next_{name}" for name in options}
    more = {other: options[name] for name, other in names.items() if other in fields and other not in options}
    if not more:
        return options
    return Normalizer({**options, **more}) if isinstance(options, Normalizer) else {**options, **more}


class TransitionPipeline(OffsetPipeline):
    """The pipeline of batches of transitions. The class has the interface of ``Pipeline``."""

    @classmethod
    def of(cls, planner: Planner, readers: Readers, form: BatchForm, windows: FieldWindows) -> Self:
        """Return a pipeline for the fields of ``readers``. The pipeline also reads the fields from which the flags and
        the mask are computed.
        """
        own = {name: reader for name, reader in planner.snapshot.readers.items() if name in _READ}
        delivered = {name: reader for name, reader in readers.items() if name not in _FLAGS}
        read: dict[str, Any] = {**_with_offsets(own, windows), **delivered}
        dtypes, shapes = [dict(one) for one in form.dtypes], dict(form.shapes)
        for name, reader in read.items():
            for one, dtype in zip(dtypes, (reader.spec.dtype, reader.spec.stored_dtype), strict=True):
                one.setdefault(name, dtype)
                one[mask_of(name)] = np.dtype(np.bool_)
            shapes.setdefault(name, reader.spec.shape)
        whole = replace(form, dtypes=(dtypes[0], dtypes[1]), shapes=shapes)
        pipeline = super().of(planner, read, whole, windows)
        pipeline.readers, pipeline.form = readers, form
        return pipeline

    def gather(self, plan: Plan, *, stored: bool, out: Arrays | None = None) -> Batch:
        """See ``Pipeline.gather``."""
        if out is None:
            return super().gather(plan, stored=stored)
        axes = (len(plan.starts), plan.length)[: self._windows.batch_dims]
        targets = dict(out)
        for part in (self._anchors, *(group for group, _ in self._groups)):
            for name, dtype in part.form.dtypes[stored].items():
                if name not in out or name == MASK:
                    targets[name] = np.empty((*axes, *part.form.shapes[name]), dtype)
        batch = super().gather(plan, stored=stored, out=targets)
        for name in batch.keys() & {*_FLAGS, MASK}:
            np.copyto(out[name], batch[name])
            batch[name] = out[name]
        return batch

    @memo
    def _codes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the codes of ``done`` that mark a terminal step, and the codes that mark a truncated step."""
        config = self.planner.snapshot.config
        return terminal_codes(config), codes_called(config.fields["done"], "truncated") or (2,)

    def _with_axes(self, batch: Batch, block: Block, number: int) -> Batch:
        done, there = batch["done"].reshape(-1), batch[mask_of("next_done")].reshape(-1)
        terminal, truncated = (reduce(or_, [done == code for code in codes]) for codes in self._codes)
        if self.planner.snapshot.alignment == "outgoing":
            there = there | (terminal & batch[MASK].reshape(-1))
        missing = batch.get("next_observation_missing")
        if missing is not None:
            there = there & (terminal | (missing.reshape(-1) == 0))
        batch |= {"terminated": terminal & there, "truncated": truncated & there, MASK: there}
        return super()._with_axes(batch, block, number)
