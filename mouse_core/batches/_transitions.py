"""Transitions: an observation, the action that was taken there, its reward, and the next observation.

Transitions are windows by field (``_by_field``): each transition is an anchor. Each observation column has a second
field, ``next_...``. With alignment "arrived" and the anchor in row t, the observation is in row t, and all other fields
are in row t + 1. With "outgoing", the next observation is in row t + 1, and all other fields are in row t.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from mouse_core._base.memo import memo
from mouse_core.batches._by_field import Arrays, OffsetPipeline, OffsetReader
from mouse_core.batches._pipeline import Batch
from mouse_core.batches._plan import BatchForm, MaskReader, Readers, choose_readers
from mouse_core.batches._planner import Block, Planner
from mouse_core.sampling.offsets import FieldWindows, mask_of
from mouse_core.sampling.plan import MASK, Plan
from mouse_core.sampling.windows import terminal_codes
from mouse_core.spec import FieldSpec, codes_called
from mouse_core.statistics.normalizer import Normalizer
from mouse_core.store.snapshot import Snapshot

_FLAGS = ("terminated", "truncated")
# Fields that are read but not delivered by default: the ends of episodes, and whether the next observation is missing.
_READ = ("done", "next_done", "next_observation_missing")


def transition_readers(
    snapshot: Snapshot, names: tuple[str, ...] | None, required: tuple[str, ...], windows: FieldWindows
) -> tuple[Readers, dict[str, Any]]:
    """Return the readers of the delivered fields, and the readers of all fields that are read.

    Raises:
        MissingFieldError: A named field does not exist.
    """
    made = (*_FLAGS, MASK)
    own = None
    if names is not None:
        own = (*(name for name in names if name not in made), *(name for name in _READ if name in snapshot.readers))
    found = choose_readers(snapshot, own, tuple(name for name in required if name not in made), masked=True)
    read: dict[str, Any] = {
        name: OffsetReader(reader, windows) if name in windows.offsets else reader  # type: ignore[arg-type]
        for name, reader in found.items()
    }
    delivered: dict[str, Any] = {}
    for name, reader in read.items():
        if name not in _READ or (names is not None and name in names):
            delivered[name] = reader
        if name == "done":
            flags = [flag for flag in _FLAGS if names is None or flag in names]
            delivered |= {flag: MaskReader(FieldSpec(flag, np.dtype(np.bool_), ())) for flag in flags}
    return delivered, read


def also_next(options: Any, fields: Container[str]) -> Any:
    """Return options by field, in which the option of an observation also applies to its next observation."""
    names = {name: f"next_{name}" for name in options}
    more = {other: options[name] for name, other in names.items() if other in fields and other not in options}
    if not more:
        return options
    return Normalizer({**options, **more}) if isinstance(options, Normalizer) else {**options, **more}


class TransitionPipeline(OffsetPipeline):
    """The pipeline of batches of transitions; has the interface of ``Pipeline``."""

    @classmethod
    def of_transitions(
        cls, planner: Planner, delivered: Readers, read: Readers, form: BatchForm, windows: FieldWindows
    ) -> TransitionPipeline:
        """Return the pipeline of ``delivered``, with its ``form``; ``read`` has the readers of all fields."""
        dtypes, shapes = [dict(one) for one in form.dtypes], dict(form.shapes)
        for name, reader in read.items():
            for one, dtype in zip(dtypes, (reader.spec.dtype, reader.spec.stored_dtype), strict=True):
                one.setdefault(name, dtype)
                one[mask_of(name)] = np.dtype(np.bool_)
            shapes.setdefault(name, reader.spec.shape)
        whole = replace(form, dtypes=(dtypes[0], dtypes[1]), shapes=shapes)
        pipeline: Any = cls.of(planner, read, whole, windows)
        pipeline.readers, pipeline.form = delivered, form
        return pipeline  # type: ignore[no-any-return]

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
        """The codes of ``done`` that mark a terminal step, and the codes that mark a truncated one."""
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
