"""ReplayBuffer: a storage, a writer, a sampler and transforms behind one lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, Self

import numpy as np

from mouse_core._base.checks import check_numbers
from mouse_core._base.locks import TurnLock
from mouse_core._base.tracing import refuse_traced
from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError
from mouse_core.nested import find
from mouse_core.replay._assembly import REDUCTIONS, assemble, reduced
from mouse_core.replay._parts import BufferCore
from mouse_core.replay.base import Collate, Drawn
from mouse_core.replay.protocols import FieldKey, Sampler, Storage, Transform, Writer
from mouse_core.replay.rows import RowBuffer
from mouse_core.replay.samplers.rows import meant
from mouse_core.replay.samplers.weighing import priorities_like
from mouse_core.replay.storages._dataset import as_storage
from mouse_core.replay.storages.list import ListStorage

__all__ = ["Drawn", "ReplayBuffer"]


class ReplayBuffer(RowBuffer):
    """Transitions that are written while others are sampled.

    All methods may be called from several threads. A draw depends on the seed, the number of the sample and what is in
    the buffer, on nothing else.

    Args:
        storage: Where rows lie; a ``DatasetStore`` (see ``refresh``), a ``Snapshot``, a dataset or a table is one that
            cannot be written to. By default a ``ListStorage`` of 1000 rows.
        sampler: Which rows a batch consists of; by default a ``RandomSampler``.
        writer: Where rows go; by default a ring, or for a storage that cannot be written to an ``ImmutableWriter``.
        transform: A callable from batch to batch, or a list of them, applied in order; ``inverse`` of each, where it
            has one, is applied to what is written. See ``Transform``.
        batch_size: Windows in a batch, B (single rows, or slices), where ``sample`` is not told.
        seed: In ``[0, 2**64)``.
        collate_fn: Makes a batch of the list of rows, instead of stacking each field.
        priority_key: The field of a batch that ``update_priority(batch)`` reads. A row that is written with this field
            begins with this priority.
        priority_reduction: What makes one priority of several for a row, as of the steps of a row that is a whole
            trajectory: "max", "mean", "min", "median" or "sum"; None: several are refused.
        generations: Whether batches have a field ``generation``: how many rows were in the place of each before it.
            ``update_priority(batch)`` then leaves rows out that others have taken the place of since; see
            ``generation_of`` and ``update_if_present``.
        digest: Whether a digest of what is delivered runs along: off by default, as it takes some 40 us of a batch of
            256 small rows; see ``digest``.

    Raises:
        ConfigError: Parts that do not go together, or an argument out of range.
    """

    def __init__(
        self,
        storage: Any = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        transform: Transform | Sequence[Transform] | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        *,
        collate_fn: Collate | None = None,
        priority_key: FieldKey = "td_error",
        priority_reduction: str | None = None,
        generations: bool = False,
        digest: bool = False,
    ) -> None:
        if priority_reduction not in (None, *REDUCTIONS):
            raise ConfigError(f"priority_reduction: expected one of {[*REDUCTIONS]}, found {priority_reduction!r}")
        rows = self._as_storage(storage)
        super().__init__(transform, batch_size, seed, collate_fn, rows.alignment, digest)
        self._take_parts(BufferCore(rows, sampler, writer, self._transform, generations))
        self._priority_key, self._priority_reduction = priority_key, priority_reduction
        self._updates = 0

    def _as_storage(self, storage: Any) -> Storage:
        """Where rows lie, of what was given; for a subclass that places them."""
        return ListStorage() if storage is None else as_storage(storage)

    def _take_parts(self, parts: BufferCore) -> None:
        """Consist of these; for a subclass that needs more of them."""
        self._parts = parts
        self._inverse = getattr(self._transform, "inverse", None)
        self._grid = parts.storage.ndim == 2

    def with_parts(self, *, storage: Any = ..., sampler: Any = ..., writer: Any = ..., transform: Any = ...) -> Self:
        """A buffer with some other parts, and all the rest as it is here: the next sample's number, seed, and options.

        On the same storage both have the same rows, under one lock. What was kept of the sampler and the writer is a
        copy, priorities included. Of several buffers that write or change rows of one storage, none knows the
        priorities that rows of another begin with; so go on with one of them. Transforms are appended and inserted as
        in ``transform=[*buffer.transform.transforms, mine]``.

        Args:
            storage, sampler, writer, transform: As for the buffer; those that are not given are kept.

        Raises:
            ConfigError: Parts that do not go together; this buffer stays as it is, whatever is raised.
        """
        made = object.__new__(type(self))
        with self._lock, self._shared():
            self._parts.sync()
            vars(made).update(vars(self))
            same = storage is ... or storage is self.storage
            rows = self.storage if same else self._as_storage(storage)
            made._take_transform(self._transform if transform is ... else transform, rows.alignment)
            kept = sampler is ...
            if not same:
                made._lock = TurnLock()
                writer = None if writer is ... else writer
            parts = BufferCore(
                rows,
                deepcopy(self.sampler) if kept else sampler,
                deepcopy(self.writer) if writer is ... else writer,
                made._transform,
                self.generations,
            )
            if same:
                parts.go_on(self._parts, same_sampler=kept)
            made._take_parts(parts)
        return made

    # ------------------------------------------------------------------ what is there

    def __repr__(self) -> str:
        parts = f"{self.storage!r}, {self.sampler!r}, {self.writer!r}"
        return f"{type(self).__name__}({parts}, seed={self._seed})"

    @property
    def sampler(self) -> Sampler:
        """Which rows a batch consists of; it was told of all that was written."""
        with self._lock, self._shared():
            self._parts.sync()
        return self._parts.sampler

    @property
    def writer(self) -> Writer:
        """Where rows go."""
        return self._parts.writer

    @property
    def prioritized(self) -> bool:
        """Whether the sampler knows priorities."""
        return self._parts.prioritized

    @property
    def priority_reduction(self) -> str | None:
        """What makes one priority of several for a row."""
        return self._priority_reduction

    @property
    def generations(self) -> bool:
        """Whether batches have a field ``generation``."""
        return self._parts.generations is not None

    @property
    def priority_key(self) -> FieldKey:
        """The field of a batch that ``update_priority(batch)`` reads."""
        return self._priority_key

    def stats(self) -> dict[str, Any]:
        """Numbers about the buffer.

        ``size`` and ``capacity`` in rows; ``written``, rows ever written; ``samples``, batches ever drawn; ``updates``,
        updates of priorities; ``num_envs``; where the storage knows them, ``nbytes`` of memory, and ``synced``, how
        many of the rows written are on the disk.
        """
        with self._lock, self._shared():
            sizes = {name: getattr(self._parts.storage, name) for name in ("capacity", "written", "num_envs")}
            found = {"size": len(self), **sizes, "samples": self._samples, "updates": self._updates}
            known = ("nbytes", "synced")
            return found | {name: getattr(self.storage, name) for name in known if hasattr(self.storage, name)}

    # ------------------------------------------------------------------ batches

    def draw(self, batch_size: int | None = None, *, seed: int | None = None) -> Drawn:
        """The first half of ``sample``: choose the next batch's rows and gather them, under the lock.

        Args:
            batch_size: As for ``sample``.
            seed: Another seed than the buffer's; an ensemble gives each of its members one.

        Raises:
            ConfigError: As ``sample``.
        """
        refuse_traced("sample")
        size = self._size(batch_size)
        with self._lock.waited_for(), self._shared():
            key = self._next_key(seed)
            rows, draw = self._parts.draw(size, key, items=self._collate is not None)
            self._samples += 1
            return Drawn(rows, draw, key, *self.counts, self._parts.settled())

    def _mark(self) -> Any:
        return self._samples, self._parts.mark()

    def _rewind(self, mark: Any) -> None:
        self._samples, sampler = mark
        self._parts.rewind(sampler)

    def batch_of(self, drawn: Drawn) -> Any:
        """What ``draw`` gave as a batch, transformed, before it is handed to a framework."""
        return self._transformed(assemble(drawn.rows, drawn.draw, self._collate), drawn)

    def _refresh(self) -> None:
        self._parts.refresh(self._samples)

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last of its epoch; never with replacement."""
        return bool(getattr(self._parts.sampler, "ran_out", False))

    @property
    def counts(self) -> tuple[int, int]:
        """How many rows were ever written, and how often priorities were updated."""
        return self._parts.storage.written, self._updates

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Say how important rows are.

        Args:
            index: The ``index`` of a batch; or the batch itself, whose field ``priority_key`` has the priorities.
                What its ``mask`` leaves out, such as steps behind an episode's end, then keeps its priority.
            priority: One for every index, from 0; several become one as ``priority_reduction`` says.
            generation: The ``generation`` of the batch, which a batch given as ``index`` has itself: rows that others
                have taken the place of are left out.

        Raises:
            ConfigError: The sampler knows no priorities; or a generation, where the buffer counts none.
            MissingFieldError: A batch without ``index`` or ``priority_key``.
            DataError: A priority that is negative, NaN or infinite.
            IndexError: Out of range.

        After an error nothing has changed.
        """
        refuse_traced("update_priority")
        if priority is None:
            batch = self._accept(index)
            index, priority = (find(batch, key, where="update_priority") for key in ("index", self._priority_key))
            if self.generations and generation is None:
                generation = find(batch, "generation", where="update_priority")
            index = to_numpy(index)
            priority = priorities_like(index, reduced(priority, index.ndim, self._priority_reduction))
            there = meant(np.ones(index.shape, np.bool_), batch, self._parts.masks)
            if not there.all():
                index, priority = index[there], priority[there]
                generation = None if generation is None else np.asarray(generation)[there]
        priority = reduced(priority, np.ndim(index), self._priority_reduction)
        with self._lock, self._shared():
            self._parts.update_priority(index, priority, generation)
            self._updates += 1

    def check_update(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Raise what ``update_priority`` would, and change nothing."""
        priority = reduced(priority, np.ndim(index), self._priority_reduction)
        with self._lock, self._shared():
            self._parts.update_priority(index, priority, generation, check=True)

    # ------------------------------------------------------------------ state

    def _shared(self) -> AbstractContextManager[Any]:
        return self._parts.shared()

    def _own_state(self) -> dict[str, Any]:
        numbers = {"seed": self._seed, "samples": self._samples, "updates": self._updates}
        return {"kind": "buffer", **numbers, **self._parts.state()}

    def _load_own(self, state: Mapping[str, Any]) -> None:
        numbers = check_numbers(state, {"kind": "buffer"}, ("seed", "samples", "updates"))
        self._parts.load(state)
        self._seed, self._samples, self._updates = numbers["seed"], numbers["samples"], numbers["updates"]
