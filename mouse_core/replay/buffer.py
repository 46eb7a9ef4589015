"""Replay buffers: write rows, sample batches, update priorities, read rows back, save and restore.

A ``ReplayBuffer`` is a storage (where rows lie), a writer (which slot each row goes to), a sampler (which rows a batch
consists of) and transforms (what becomes of the batch), behind one lock. ``BaseBuffer`` is the part that an ensemble of
buffers shares: batches by number, digest, state.

The sampler, transforms with running numbers, and the episode index keep something of every row. They hear of rows late,
many at a time: before a draw, and before a row that they have not heard of is overwritten. ``_heard`` counts the rows
that sampler and transforms have heard of, and ``_indexed`` those of the episode index, which may wait longer. Of a ring
of 8 slots with ``_heard`` 5 and 7 rows written, rows 5 and 6 are news; 7 more rows would overwrite row 5 in slot 5, so
the news is told first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import check_numbers, part_of
from mouse_core._base.locks import TurnLock, forks
from mouse_core._base.tracing import refuse_traced
from mouse_core.columns.memory import ring_slots
from mouse_core.digest import StreamDigest, asked_for, digest_of, digest_state, host_array
from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, DataError, ForkError, MissingFieldError, SchemaError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.nested import as_lists, copied, find, flatten, is_varying, map_tree, opened
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.replay._assembly import (
    REDUCTIONS,
    Collate,
    assemble,
    check_names,
    count_steps,
    named_time,
    names_added,
    patched,
    priorities_in,
    reduced,
    row_of,
    rows_behind,
    slots_of,
    time_first,
)
from mouse_core.replay.generations import Generations, alike
from mouse_core.replay.protocols import (
    EPISODE,
    TRANSFORM_CALLS,
    Draw,
    FieldKey,
    Sampler,
    Slots,
    Storage,
    Transform,
    Write,
    Writer,
)
from mouse_core.replay.samplers.episodes import StorageEpisodes, find_fields, marks_of
from mouse_core.replay.samplers.priorities import Beta, PrioritizedSampler
from mouse_core.replay.samplers.rows import RandomSampler, meant
from mouse_core.replay.samplers.slices import SliceSampler
from mouse_core.replay.samplers.weighing import priorities_like
from mouse_core.replay.storages._dataset import DatasetStorage, as_storage, no_store
from mouse_core.replay.storages._recorded import RecordedSlices
from mouse_core.replay.storages.list import ListStorage
from mouse_core.replay.transforms.compose import Compose, delivered_alignment
from mouse_core.replay.transforms.hindsight import HindsightRelabel
from mouse_core.replay.transforms.transitions import NStep, ReturnsToGo
from mouse_core.replay.writers import ImmutableWriter, RoundRobinWriter, check_rows, check_writer
from mouse_core.spec import Alignment, check_count

if TYPE_CHECKING:
    from mouse_core.store.dataset_store import DatasetStore

EPISODE_FIELD = "episode"
"""The field of rows copied out of a store that holds the number of their episode; one of ``TRAJ_KEYS``."""

_MOST_UNHEARD = 1024
"""The most rows that are written before the sampler hears of them."""


@dataclass(slots=True)
class Drawn:
    """Rows that were drawn and gathered, before they become a batch.

    Args:
        rows: The rows as the storage returned them; for an ensemble, pairs of a member's number and its ``Drawn``.
        draw: The sampler's draw; for an ensemble, how many windows each member gives.
        key: Names the random numbers of the transforms.
        written: How many rows had been written when they were drawn.
        updates: How many updates of priorities had been made when they were drawn.
        settled: The state at that moment of each transform that keeps numbers of all rows; None without such a one.
    """

    rows: Any
    draw: Draw
    key: Key
    written: int
    updates: int
    settled: Mapping[str, Any] | None = None


class BaseBuffer:
    """The part that replay buffers and ensembles of buffers share: batches by number, from a seed.

    The buffers of a framework override two methods: ``_accept(rows)`` converts rows as users write them to trees of
    NumPy arrays, and ``_deliver(batch)`` converts a tree of NumPy arrays to a batch of the framework. An adapter puts
    both into one class, which its buffer and its ensemble derive from.

    Args:
        transform: Changes batches: one callable, or a list of callables.
        batch_size: Windows in a batch, B, where ``sample`` gets none.
        seed: In ``[0, 2**64)``.
        collate_fn: Makes one batch of a list of parts.
        alignment: Alignment of the rows before they are transformed.
        digest: Whether to keep a digest of the delivered batches; see ``digest``.

    Raises:
        ConfigError: An argument out of range, or a transform that takes rows of another alignment.
    """

    def __init__(
        self,
        transform: Transform | Sequence[Transform] | None,
        batch_size: int | None,
        seed: int,
        collate_fn: Collate | None,
        alignment: Alignment,
        digest: bool = False,
    ) -> None:
        self._take_transform(transform, alignment)
        self._batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        self._seed = check_seed(seed)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn: expected a function, found {collate_fn!r}")
        self._collate = collate_fn
        self._lock = TurnLock()
        self._samples = 0
        self._digest = StreamDigest() if digest else None

    def _take_transform(self, transform: Transform | Sequence[Transform] | None, alignment: Alignment) -> None:
        """Apply these transforms to batches of rows of this alignment."""
        transforms = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
        # Composed even where it is one: Compose handles rows that were read behind those that were drawn.
        self._transform = Compose(*transforms) if transforms else None
        self._alignment = delivered_alignment(self._transform, alignment)

    @property
    def transform(self) -> Transform | None:
        """The transforms of batches, composed."""
        return self._transform

    @property
    def batch_size(self) -> int | None:
        """Windows in a batch where ``sample`` gets none."""
        return self._batch_size

    @property
    def seed(self) -> int:
        """The seed of the draws."""
        return self._seed

    @property
    def alignment(self) -> Alignment:
        """The transition that the action, reward and done of a delivered row belong to."""
        return self._alignment

    @property
    def digest(self) -> StreamDigest:
        """A digest of 128 bits of the batches that ``sample`` and iteration have delivered, with their numbers.

        It is the sum of ``StreamDigest.of(i, batch)`` over the samples, the first with ``i = 0``, and is equal in every
        framework. The state holds it, and a restored buffer continues it. A loader draws ahead of what it delivers and
        keeps a digest of its own (``PrefetchBatchifier(buffer, digest=True)``): its batches have numbers, and are not
        part of this digest. The same holds for the members of an ensemble.

        With several processes each has a buffer and rows of its own. The sum of their digests covers all batches, in
        whatever process; it is equal in a second run of as many processes. It is not the digest of one process's
        stream: that equality holds where ranks draw parts of one stream, as loaders over a store do.

        Raises:
            ConfigError: The buffer was made without ``digest=True``.
        """
        return asked_for(self._digest, "buffer")

    @property
    def counts(self) -> tuple[int, int]:
        """The number of rows ever written, and of updates of priorities."""
        raise NotImplementedError

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last of its epoch; always False with replacement."""
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of rows."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Sizes and counters."""
        raise NotImplementedError

    # ------------------------------------------------------------------ batches

    def sample(self, batch_size: int | None = None) -> Any:
        """Return the next batch.

        Args:
            batch_size: Windows in it: single rows, or slices; by default that of the buffer.

        Returns:
            ``{field: [batch_size, ...]}``, slices as ``[B, S, ...]``, nested as the rows are, in
            memory that is never written to again; with ``index``, and the fields that the sampler adds
            (``priority_weight``, ``mask``, ``traj_id``). Rows that are not a dict are the field ``data``.

        Raises:
            ConfigError: No batch size, an empty buffer, or more rows than there are without replacement.
        """
        return self._handed_out(self.draw(batch_size))

    def __iter__(self) -> Iterator[Any]:
        """Yield batches of ``batch_size``: of one epoch without replacement, without end otherwise.

        Raises:
            ConfigError: As ``sample``.
        """
        ends = False
        while not ends:
            drawn = self.draw(None)
            ends = self.ran_out
            yield self._handed_out(drawn)

    def refresh(self) -> None:
        """Include the rows that a ``DatasetStore`` has now, where it is the storage; the next sample draws from them.

        Rows that were there keep their ``index`` and their priorities, and later ones get the largest priority, as
        rows that are written. An epoch without replacement starts again. Where the store dropped its oldest rows, the
        remaining ones keep their priorities, and their ``index`` is smaller by the number of dropped rows: set the
        priorities of batches that were drawn before it first. Where the store forgot all, as in ``clear()``, all
        priorities start again. The number of the next sample continues, and batches depend on where between two samples
        this was called, as they do on writes.

        Raises:
            ConfigError: No store: rows that are written, a snapshot or a dataset; of an ensemble, in all members.
        """
        with self._lock, self._shared():
            self._refresh()

    @property
    def _grows(self) -> bool:
        """Whether there is a store to take later rows from."""
        return bool(getattr(getattr(self, "storage", None), "grows", False))

    def _refresh(self) -> None:
        """Do what ``refresh`` says; the locks are held."""
        raise NotImplementedError

    def draw(self, batch_size: int | None = None, *, seed: int | None = None) -> Drawn:
        """Do the first half of ``sample``: choose the next batch's rows and gather them, under the lock.

        Args:
            batch_size: As for ``sample``.
            seed: Replaces the buffer's seed; an ensemble gives each of its members one.

        Raises:
            ConfigError: As ``sample``.
        """
        raise NotImplementedError

    def _mark(self) -> Any:
        """Return the position of the draws, for ``_rewind``."""
        raise NotImplementedError

    def _rewind(self, mark: Any) -> None:
        """Undo the draws since ``_mark()``."""
        raise NotImplementedError

    def finish(self, drawn: Drawn) -> Any:
        """Do the second half of ``sample``: make a batch of what ``draw`` returned. Safe in any thread, repeatedly."""
        return self._deliver(self.batch_of(drawn))

    def _handed_out(self, drawn: Drawn) -> Any:
        """Make a batch that counts in the digest."""
        if self._digest is None:
            return self.finish(drawn)
        batch = self.batch_of(drawn)
        # The digest is made first, on the host: the delivered batch belongs to the caller.
        part = StreamDigest.of(drawn.key.index, self._on_host(batch))
        delivered = self._deliver(batch)
        with self._lock:
            self._digest += part
        return delivered

    def batch_of(self, drawn: Drawn) -> Any:
        """Return the transformed batch of what ``draw`` returned, before it is converted for a framework."""
        raise NotImplementedError

    def _transformed(self, batch: Any, drawn: Drawn) -> Any:
        if self._transform is None:
            return batch
        return self._transform.at(drawn.settled)(batch, drawn.key.with_call(TRANSFORM_CALLS))

    def _next_key(self, seed: int | None) -> Key:
        return Key(self._seed if seed is None else seed, Purpose.REPLAY, self._samples)

    def _size(self, batch_size: int | None) -> int:
        if batch_size is not None:
            return check_count("batch_size", batch_size)
        if self._batch_size is None:
            raise ConfigError("batch_size: expected one for the buffer or for this sample, found none")
        return self._batch_size

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return rows, priorities, cursors, and the number of the next sample, as long as the data.

        Nested dicts of plain values and NumPy arrays, copied: later writes do not change them.
        """
        with self._lock, self._shared():
            state: dict[str, Any] = copied(self._state())
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state`` was taken: with its rows, its seed, and the sample that came next there.

        With ``digest=True`` the digest continues, too; with a state that has none a new one begins.

        Raises:
            StateError: The state is of other parts, or damaged; the buffer is unchanged then.
        """
        with self._lock, self._shared():
            self._load(state)

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save the state to a file, as long as the data.

        It is written beside ``path`` and renamed, so that a crash or a full disk leaves the file that was there.

        Args:
            path: A file; or a directory that exists, in which it is called ``replay.mouse``.

        Raises:
            StorageError: The file cannot be written (also an OSError).
        """
        with self._lock, self._shared():
            write_checkpoint(path, self._state())

    def loads(self, path: str | PathLike[str]) -> None:
        """Continue exactly where ``dumps`` was called.

        Raises:
            StateError: The file is damaged, or of other parts; the buffer is unchanged then.
            StorageError: It cannot be read (also an OSError).
        """
        self.load_state_dict(read_checkpoint(path))

    def _state(self) -> dict[str, Any]:
        return {**self._own_state(), **digest_state(self._digest)}

    def _load(self, state: Mapping[str, Any]) -> None:
        digest = digest_of(state, self._digest) if isinstance(state, Mapping) else None
        self._load_own(state)
        self._digest = digest

    def _own_state(self) -> dict[str, Any]:
        """Return the state without the digest."""
        raise NotImplementedError

    def _load_own(self, state: Mapping[str, Any]) -> None:
        """Restore a state without its digest, or raise StateError and change nothing."""
        raise NotImplementedError

    def _shared(self) -> AbstractContextManager[Any]:
        """The locks to hold beside the buffer's own."""
        return nullcontext()

    # ------------------------------------------------------------------ frameworks

    def _accept(self, rows: Any) -> Any:
        """Convert rows of a framework for the storage; a subclass overrides it."""
        return rows

    def _on_host(self, batch: Any) -> Any:
        """The values that a batch is delivered with, for a digest; a subclass that narrows them overrides it."""
        return batch

    def _deliver(self, batch: Any) -> Any:
        """Convert a batch, or rows, for a framework; a subclass overrides it."""
        return as_lists(batch)


_NO_LOCK: AbstractContextManager[Any] = nullcontext()


class ReplayBuffer(BaseBuffer):
    """Transitions that are written while others are sampled.

    All methods may be called from several threads. A draw depends on the seed, the number of the sample and the
    contents of the buffer alone.

    Args:
        storage: Where rows lie; a ``DatasetStore`` (see ``refresh``), a ``Snapshot``, a dataset or a table is one that
            cannot be written to. By default a ``ListStorage`` of 1000 rows.
        sampler: Chooses the rows of a batch; by default a ``RandomSampler``.
        writer: Chooses the slots of rows; by default a ring, or an ``ImmutableWriter`` for a storage that cannot be
            written to.
        transform: A callable from batch to batch, or a list of them, applied in order; ``inverse`` of each, where it
            has one, is applied to rows that are written. See ``Transform``.
        batch_size: Windows in a batch, B (single rows, or slices), where ``sample`` gets none.
        seed: In ``[0, 2**64)``.
        collate_fn: Makes a batch of the list of rows, instead of stacking each field.
        priority_key: The field of a batch that ``update_priority(batch)`` reads. A row that is written with this field
            begins with this priority.
        priority_reduction: Reduces several priorities of a row to one, as of the steps of a row that is a whole
            trajectory: "max", "mean", "min", "median" or "sum"; None: several raise an error.
        generations: Whether batches have a field ``generation``: the number of rows that were in the place of each
            before it. ``update_priority(batch)`` then skips rows that were overwritten since; see
            ``generation_of`` and ``update_if_present``.
        digest: Whether to keep a digest of the delivered batches: off by default, as it takes some 40 us of a batch of
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
        self._priority_key, self._priority_reduction = priority_key, priority_reduction
        self._generations = Generations() if generations else None
        self._updates = 0
        self._copies: tuple[Any, bool] = (None, False)  # a snapshot, and whether only it knows where episodes begin
        self._take_parts(rows, sampler, writer)

    def _as_storage(self, storage: Any) -> Storage:
        """The storage of the argument ``storage``; a subclass that places rows on a device overrides it."""
        return ListStorage() if storage is None else as_storage(storage)

    def _take_parts(self, storage: Storage, sampler: Sampler | None, writer: Writer | None) -> None:
        """Consist of these parts and the transforms; ConfigError where they do not go together."""
        sampler = RandomSampler() if sampler is None else sampler
        if writer is None:
            writer = RoundRobinWriter() if storage.writable else ImmutableWriter()
        for name, part, kind in (("sampler", sampler, Sampler), ("writer", writer, Writer)):
            if not isinstance(part, kind):
                raise ConfigError(f"{name}: expected a {kind.__name__}, found {part!r:.80}")
        transform = self._transform
        check_writer(writer, storage, sampler, transform)
        check_slices(sampler, () if transform is None else transform.transforms)
        self._storage, self._sampler, self._writer = storage, sampler, writer
        self._prioritized = hasattr(sampler, "update_priority")
        self._inverse: Callable[[Any], Any] | None = getattr(transform, "inverse", None)
        # Otherwise dicts go to the storage as they are.
        self._looks_into_rows = self._prioritized or self._inverse is not None
        self._reach: int = getattr(transform, "reach", 0)
        self._gather = getattr(transform, "gather", None)
        self._running: dict[str, Any] = getattr(transform, "watchers", {})  # transforms with numbers of all rows
        if transform is not None and (self._gather is not None or self._running):
            transform.check_gather()
        self._reserved = names_added(sampler, self._gather is not None, self._reach, self._generations is not None)
        self._masks = "mask" in self._reserved or self._reach > 0
        # The episodes of the rows, where a transform needs other rows of them and the sampler does not know them. A
        # ring keeps them also for a sampler of slices that comes later, and asks where its oldest episodes began.
        self._episodes: StorageEpisodes | None = None
        self._looks_around = self._gather is not None or self._reach > 0
        if self._looks_around:
            self._episodes = StorageEpisodes(done=transform.done)  # type: ignore[union-attr]
        elif storage.writable and storage.lock() is None and not hasattr(storage, "batch"):
            self._episodes = None if hasattr(sampler, "episodes") else StorageEpisodes(warns=False)
        if self._episodes is not None and self._episodes.is_like(self._sampler_episodes):
            self._episodes = None
        for part in self._running.values():
            part.watch(storage)
        self._recorded: RecordedSlices | None = None
        if type(sampler) is SliceSampler and sampler.gives_windows and isinstance(storage, DatasetStorage):
            # Slices of recorded rows that are windows depend on the number of the sample alone.
            self._recorded = RecordedSlices(storage, sampler)
        # A ring of single rows in the memory of this process is the commonest by far, and ``append`` has a short path.
        self._is_plain_ring = type(writer) is RoundRobinWriter and storage.ndim == 1 and storage.lock() is None
        # One row less than all, as rows must be heard of before they are overwritten.
        self._most_unheard = min(_MOST_UNHEARD, storage.capacity) - 1
        self._forks = forks()
        self._heard = self._indexed = 0
        self._changes = -1  # the changes of the storage when the sampler heard of rows last; -1: it looks at all first

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_forks": forks()})

    def with_parts(self, *, storage: Any = ..., sampler: Any = ..., writer: Any = ..., transform: Any = ...) -> Self:
        """Return a buffer with some other parts; the next sample's number, seed, and options are those of this one.

        On the same storage both have the same rows, under one lock. A sampler and a writer that are kept are copied,
        priorities included. Of several buffers that write or change rows of one storage, none knows the priorities that
        rows of another begin with; so go on with one of them. Transforms are appended and inserted as in
        ``transform=[*buffer.transform.transforms, mine]``.

        Args:
            storage, sampler, writer, transform: As for the buffer; those that are not given are kept.

        Raises:
            ConfigError: Parts that do not go together; this buffer stays as it is, whatever is raised.
        """
        made = object.__new__(type(self))
        with self._lock, self._shared():
            self._sync()
            vars(made).update(vars(self))
            same = storage is ... or storage is self._storage
            rows = self._storage if same else self._as_storage(storage)
            made._take_transform(self._transform if transform is ... else transform, rows.alignment)
            if same:
                made._generations = deepcopy(self._generations)
            else:
                made._generations = None if self._generations is None else Generations()
                made._lock = TurnLock()
                writer = None if writer is ... else writer
            made._take_parts(
                rows,
                deepcopy(self._sampler) if sampler is ... else sampler,
                deepcopy(self._writer) if writer is ... else writer,
            )
            if same:
                made._continue_after(self, same_sampler=sampler is ...)
        return made

    def _continue_after(self, before: ReplayBuffer, *, same_sampler: bool) -> None:
        """Start from the rows that a buffer of the same storage has heard of."""
        self._heard, self._changes = before._heard, before._changes
        before._index()
        known = [index for index in (before._episodes, before._sampler_episodes) if isinstance(index, StorageEpisodes)]
        for part in (*([] if same_sampler else [self._sampler]), self._writer, *self._running.values()):
            part.reset(self._storage)
        if self._episodes is not None:
            self._episodes.reset(self._storage)
        self._indexed = self._heard
        if not same_sampler and isinstance(self._sampler_episodes, StorageEpisodes):
            for index in known:
                self._sampler_episodes.go_on(index, self._storage)

    # ------------------------------------------------------------------ parts

    def __repr__(self) -> str:
        parts = f"{self._storage!r}, {self.sampler!r}, {self._writer!r}"
        return f"{type(self).__name__}({parts}, seed={self._seed})"

    def __len__(self) -> int:
        """The number of rows: all time steps of all environments."""
        return len(self._storage)

    @property
    def storage(self) -> Any:
        """The storage, where the rows lie."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """The sampler, up to date with the rows that were written."""
        with self._lock, self._shared():
            self._sync()
        return self._sampler

    @property
    def writer(self) -> Writer:
        """The writer, which chooses the slots of rows."""
        return self._writer

    @property
    def prioritized(self) -> bool:
        """Whether the sampler has priorities."""
        return self._prioritized

    @property
    def priority_key(self) -> FieldKey:
        """The field of a batch that ``update_priority(batch)`` reads."""
        return self._priority_key

    @property
    def priority_reduction(self) -> str | None:
        """The reduction of several priorities of a row to one."""
        return self._priority_reduction

    @property
    def generations(self) -> bool:
        """Whether batches have a field ``generation``."""
        return self._generations is not None

    @property
    def counts(self) -> tuple[int, int]:
        """The number of rows ever written, and of updates of priorities."""
        return self._storage.written, self._updates

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last of its epoch; always False with replacement."""
        return bool(getattr(self._sampler, "ran_out", False))

    def stats(self) -> dict[str, Any]:
        """Sizes and counters.

        ``size`` and ``capacity`` in rows; ``written``, rows ever written; ``samples``, batches ever drawn; ``updates``,
        updates of priorities; ``num_envs``; where the storage knows them, ``nbytes`` of memory, and ``synced``, how
        many of the rows written are on the disk.
        """
        with self._lock, self._shared():
            sizes = {name: getattr(self._storage, name) for name in ("capacity", "written", "num_envs")}
            found = {"size": len(self), **sizes, "samples": self._samples, "updates": self._updates}
            known = ("nbytes", "synced")
            return found | {name: getattr(self._storage, name) for name in known if hasattr(self._storage, name)}

    def _shared(self) -> AbstractContextManager[Any]:
        return self._storage.lock() or _NO_LOCK

    # ------------------------------------------------------------------ writing

    def append(self, row: Any) -> Any:
        """Write one row; with ``ndim=2`` one time step of all environments.

        Args:
            row: A tree of values, or for a ``ListStorage`` any object.

        Returns:
            Its index, an int, -1 if the writer did not keep it; with ``ndim=2`` int64 ``[num_envs]``.

        Raises:
            SchemaError: Another structure, dtype or shape than the first write's.
            DataError: Numbers that the field's dtype does not hold.
            ConfigError: The buffer is read-only.

        After an error the buffer is as it was.
        """
        if self._storage.ndim == 2:
            self._check_unnamed([row])
            return self._write(row, one=True)
        slots = self._write(row, one=True)
        return slots if isinstance(slots, int) else int(slots[0])

    def extend(self, rows: Any, *, names: Sequence[str] | None = None) -> Slots:
        """Write many rows.

        Args:
            rows: A tree (nested dicts, tuples) of arrays ``[n, ...]``, ``[time, env, ...]`` for ``ndim=2``; or a list
                of rows; or another buffer, whose rows are copied in the order of time. Where it names its batch axes,
                as TensorDicts do, the one called "time" is time for ``ndim=2``, wherever it stands, and all the others
                are environments.
            names: The names of the batch axes of rows that do not name them, for ``ndim=2``: ``("env", "time")``, or
                ``("time", "env", "agent")``, where every agent of every environment is a stream.

        Returns:
            Their indices, int64 ``[n]``, -1 for those that the writer did not keep; ``[time, env]`` for ``ndim=2``, or
            the named batch axes in the order in which they came.

        Raises:
            SchemaError, DataError, ConfigError: As ``append``; also ``names`` of which not exactly one is "time".
            ConfigError: A buffer of another alignment or ``ndim``.
            DataError: A buffer in which only a store knows where an episode begins, and rows have another "episode".

        After an error the buffer is as it was.
        """
        storage = self._storage
        if isinstance(rows, ReplayBuffer):
            rows = rows.rows_for("extend", storage.alignment, storage.ndim)
        grid = storage.ndim == 2
        if names is not None and (not grid or isinstance(names, str) or list(names).count("time") != 1):
            raise ConfigError(
                f"names: expected those of batch axes, one of them 'time', and a storage with ndim=2, found {names!r} "
                f"and ndim={storage.ndim}"
            )
        if not grid:
            slots: Slots = self._write(rows, one=False)
            return slots
        named = named_time(rows) if names is None else (list(names).index("time"), len(names))
        if named is None:
            self._check_unnamed(rows if isinstance(rows, list) else ())
            return self._write(rows, one=False).reshape(-1, storage.num_envs)  # type: ignore[no-any-return]
        turned, lengths = time_first(self._accept(rows), *named)
        return np.moveaxis(self._write(turned, one=False).reshape(lengths), 0, named[0])

    @staticmethod
    def _check_unnamed(steps: Iterable[Any]) -> None:
        """Raise SchemaError where one of several time steps names an axis of time."""
        if any(named_time(step) is not None for step in steps):
            raise SchemaError("append: expected one time step, [env, ...], found a time axis; extend takes [env, time]")

    def _write(self, rows: Any, *, one: bool) -> Any:
        """Write rows and return their slots, or of one row in a plain ring its slot."""
        refuse_traced("append" if one else "extend")
        rows = self._accept(rows)
        if type(rows) is list and not rows and not one:
            self._check_writable()
            return np.empty(0, np.int64)
        priority = None
        if self._looks_into_rows or type(rows) is not dict:
            rows, priority = self._prepared(rows, one=one)
        if self._lock.waiting:
            self._lock.give_way()
        if one and priority is None and self._is_plain_ring:
            with self._lock:
                return self._append(rows)
        with self._lock, self._shared():
            self._check_process()
            if priority is not None:
                self._check_priorities(None, priority)
            check_names(rows, self._reserved, one=one)
            return self._written(rows, priority, one=one)

    def _prepared(self, rows: Any, *, one: bool) -> tuple[Any, npt.NDArray[np.float64] | None]:
        """Rows as they are stored, and the priorities that they begin with, for a sampler that has priorities."""
        storage = self._storage
        if not one or type(rows) is not dict or self._inverse is not None:
            rows = self._opened(rows, one=one)
        if self._inverse is not None:
            rows = self._inverse(rows)
        if not self._prioritized:
            return rows, None
        reduction = self._priority_reduction
        return rows, priorities_in(rows, self._priority_key, one=one, ndim=storage.ndim, reduction=reduction)

    def _opened(self, rows: Any, *, one: bool) -> Any:
        """Rows whose lists are nodes or values, see ``mouse_core.nested.opened``; objects as they are."""
        storage = self._storage
        if hasattr(storage, "batch"):  # a storage of any objects
            if self._inverse is not None and hasattr(storage, "check"):
                storage.check([rows] if one else rows)  # a transform would not see what a mask hides
            return rows
        ragged = getattr(storage, "ragged", ())
        if isinstance(rows, list) and not one:
            return [opened(row, storage.ndim - 1, ragged) for row in rows]
        return opened(rows, storage.ndim - 1 if one else storage.ndim, ragged)

    def _append(self, row: Any) -> int:
        """Write one row to a plain ring, and return its slot."""
        if forks() != self._forks:
            self._check_process()
        storage = self._storage
        if type(row) is not dict or not self._reserved.isdisjoint(row):
            check_names(row, self._reserved, one=True)
        if self._changes != storage.changes:
            self._sync()
        first = storage.append(row, one=True)[0]
        if first - self._heard >= self._most_unheard:
            self._sync()
        return first % storage.capacity

    def _written(self, rows: Any, priority: npt.NDArray[np.float64] | None, *, one: bool) -> Slots:
        """Write rows by the writer, and tell the sampler where it cannot wait."""
        storage, ordered = self._storage, self._writer.ordered
        if self._changes != storage.changes or not ordered:
            self._sync()
        if not one and storage.written - self._indexed + count_steps(rows) * storage.num_envs > storage.capacity:
            self._sync()
            self._index()
        slots, kept, first = self._writer.write(storage, rows, one=one)
        if not ordered:
            self._tell(kept, first)
        elif len(slots) > len(kept):
            self._tell_lost(rows, len(slots) - len(kept))
        late = storage.written - self._heard >= min(self._most_unheard, storage.capacity - 1)
        if late or priority is not None or (self._running and not one):
            self._sync()
        if priority is not None:
            stored = slots >= 0
            self._sampler.update_priority(storage, slots[stored], priority[stored])  # type: ignore[attr-defined]
        return slots

    def check_extend(self, rows: Any) -> None:
        """Raise what ``extend(rows)`` would, and write nothing; a storage without ``check`` may raise later."""
        rows, priority = self._prepared(self._accept(rows), one=False)
        with self._lock, self._shared():
            self._check_process()
            self._check_writable()
            if priority is not None:
                self._check_priorities(None, priority)
            check_names(rows, self._reserved, one=False)
            check_rows(self._writer, self._storage, rows)

    def __setitem__(self, index: Any, rows: Any) -> None:
        """Overwrite rows in place, as they are stored, without inverse transforms; neither cursor nor length move.

        Args:
            index: As for ``buffer[index]``.
            rows: One row for an integer; else a tree with the axes of ``index`` in front, or a list of rows. For all
                rows of an ``ArrayStorage`` or a ``TensorStorage`` (``buffer[:]``) it may have fields that they did not
                have, which all rows written later have, too.

        Raises:
            IndexError: Out of range.
            SchemaError, DataError, ConfigError: As ``append``.
        """
        refuse_traced("buffer[index] = rows")
        rows = self._accept(rows)
        with self._lock, self._shared():
            self._check_writable()
            slots = slots_of(index, len(self))
            if slots.ndim > 1 and not isinstance(rows, list):
                rows = map_tree(lambda leaf: _flat(leaf, slots.ndim), rows)
            self._put(slots.reshape(-1), rows if slots.ndim else [rows])

    def _put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in these slots."""
        self._check_process()
        check_names(rows, self._reserved, one=False)
        self._sync()
        self._index()
        self._storage.put(slots, rows)
        self._tell(slots, None)
        self._writer.reset(self._storage)

    def update_if_present(self, index: Any, generation: Any, fields: Any) -> npt.NDArray[np.bool_]:
        """Overwrite some fields of those rows of a batch that were not overwritten since it was drawn.

        Rows keep their priorities and generations. Of an index that comes twice the last one counts.

        Args:
            index: Those of the batch, integers of any shape.
            generation: Those of the batch, of the same shape.
            fields: A tree of the fields to change, with the axes of ``index`` in front.

        Returns:
            Which rows were there and were changed, bool of the shape of ``index``.

        Raises:
            MissingFieldError: A field that rows do not have.
            SchemaError, DataError, ConfigError: As ``append`` and ``generation_of``.

        After an error nothing has changed.
        """
        refuse_traced("update_if_present")
        named = to_numpy(index)
        values = {key: _flat(leaf, named.ndim) for key, leaf in flatten(self._accept(fields)).items()}
        with self._lock, self._shared():
            self._check_writable()
            present = alike(self._generation_of(named), generation)
            places = np.flatnonzero(present)
            if not len(places):
                return present
            slots = named.astype(np.int64).reshape(-1)[places]
            rows = patched(self._storage.get(slots), values, places, present.size)
            sampler: Any = self._sampler
            weights = sampler.weights_at(self._storage, slots) if hasattr(sampler, "set_weights") else None
            self._put(slots, rows)
            if weights is not None:
                sampler.set_weights(self._storage, slots, weights)
        return present

    def empty(self) -> None:
        """Forget all rows and priorities. The number of the next sample goes on.

        Raises:
            ConfigError: The buffer is read-only.
        """
        refuse_traced("empty")
        with self._lock, self._shared():
            self._check_writable()
            self._check_process()
            self._storage.empty()
            self._sync()

    def observer(self) -> Callable[[Any], None]:
        """Return a function that writes a trajectory to the buffer.

        A trajectory is a tree of arrays ``[time, ...]``, a named tuple of such, whose names become those of the fields,
        or a list of rows. One that holds single values is one step, as RLDS and TF-Agents pass it.
        """

        def observe(trajectory: Any) -> None:
            rows = trajectory._asdict() if hasattr(trajectory, "_asdict") else trajectory
            single = not isinstance(rows, list) and any(not np.ndim(leaf) for leaf in flatten(rows).values())
            (self.append if single else self.extend)(rows)

        return observe

    def _check_writable(self) -> None:
        """Raise ConfigError where the buffer is read-only."""
        if isinstance(self._writer, ImmutableWriter):
            self._writer.write(self._storage, None)

    def _check_process(self) -> None:
        """Raise ForkError where a forked child changes its copy of rows."""
        if forks() != self._forks and self._storage.lock() is None:
            raise ForkError(
                "buffer: expected to be changed in the process that made it, found a forked child, which has a copy of "
                "its rows; give processes a MemmapStorage(capacity, path), or make the buffer in the child"
            )

    # ------------------------------------------------------------------ who hears of writes

    def _sync(self, sample: int | None = None) -> None:
        """Tell sampler, transforms and episode index of the rows written since they heard last, by any process.

        Args:
            sample: The number of the sample that is drawn next; None: unknown.
        """
        storage, written = self._storage, self._storage.written
        if self._changes != storage.changes:
            if self._recorded is not None:
                self._recorded.forget()
            self._changes, self._heard = storage.changes, written
            self._sampler.reset(storage)
            self._writer.reset(storage)
            self._reset_others()
        elif written != self._heard:
            n = min(written - self._heard, len(storage))
            if self._recorded is not None:
                self._recorded.grew(sample)
            self._tell(ring_slots(written - n, n, storage.capacity), written - n)

    def _tell(self, slots: Slots, first: int | None) -> None:
        """Tell sampler, transforms and episode index of rows in these slots, the first of which has this number."""
        storage = self._storage
        if slots.size:
            write = Write(slots, first, lambda key: storage.read(key, slots))
            grown = hasattr(storage, "refresh")  # rows of a store are more than there was room for
            sampler: Any = self._sampler
            if grown and not hasattr(sampler, "grew"):
                sampler.reset(storage)
            else:
                if grown:
                    sampler.grew(storage)
                sampler.wrote(storage, write)
            for part in self._counters:
                part.wrote(storage, write)
            if self._episodes is not None and first is None:
                self._episodes.wrote(storage, write)
        self._changes, self._heard = storage.changes, storage.written
        if self._episodes is None or self._heard - self._indexed >= self._most_unheard:
            self._index()

    def _index(self) -> None:
        """Tell the buffer's episode index of the rows written since it heard last."""
        storage, written = self._storage, self._storage.written
        if self._episodes is not None and written != self._indexed:
            n = min(written - self._indexed, len(storage))
            slots = ring_slots(written - n, n, storage.capacity)
            if hasattr(storage, "refresh"):
                self._episodes.grew(storage)
            self._episodes.wrote(storage, Write(slots, written - n, lambda key: storage.read(key, slots)))
        self._indexed = written

    def _tell_lost(self, rows: Any, count: int) -> None:
        """Tell the episode index of the first ``count`` of many rows, which the last of them overwrote at once."""
        storage = self._storage
        steps = count // storage.num_envs

        def read(key: FieldKey) -> npt.NDArray[Any]:
            many = [find(row, key) for row in rows[:steps]] if isinstance(rows, list) else find(rows, key)[:steps]
            values = host_array(many)
            return values.reshape(count, *values.shape[storage.ndim :])

        for index in (self._sampler_episodes, self._episodes):
            if isinstance(index, StorageEpisodes):
                index.wrote(storage, Write(np.zeros(count, np.int64), self._heard, read))
        self._heard += count
        self._indexed = self._heard

    def _reset_others(self) -> None:
        """Let transforms and episode index look at all rows again."""
        for part in self._counters:
            part.reset(self._storage)
        if self._episodes is not None:
            self._episodes.reset(self._storage)
        self._indexed = self._storage.written

    @property
    def _counters(self) -> list[Any]:
        """The transforms with running numbers, and the generations."""
        return [*self._running.values(), *([] if self._generations is None else [self._generations])]

    @property
    def _sampler_episodes(self) -> Any:
        """The episode index of the sampler; None where it has none."""
        return getattr(self._sampler, "episodes", None)

    def _refresh(self) -> None:
        storage: Any = self._storage
        if not hasattr(storage, "refresh"):
            raise no_store(f"{storage!r:.80}")
        self._sync()
        first, changes = len(storage), self._changes
        gone = storage.refresh()
        if changes != storage.changes:
            for part in self._running.values():
                part.dropped(storage, gone or first)
            if self._recorded is not None:
                self._recorded.forget()
            if gone and hasattr(self._sampler, "dropped"):
                self._sampler.dropped(storage, gone)
                self._reset_others()
                self._changes, self._heard = storage.changes, storage.written
        self._sync(self._samples)

    # ------------------------------------------------------------------ sampling

    def draw(self, batch_size: int | None = None, *, seed: int | None = None) -> Drawn:
        """Do the first half of ``sample``: choose the next batch's rows and gather them, under the lock.

        Args:
            batch_size: As for ``sample``.
            seed: Replaces the buffer's seed; an ensemble gives each of its members one.

        Raises:
            ConfigError: As ``sample``.
        """
        refuse_traced("sample")
        size = self._size(batch_size)
        with self._lock.waited_for(), self._shared():
            key = self._next_key(seed)
            rows, draw = self._drawn(size, key)
            self._samples += 1
            settled = {number: part.settled(self._storage) for number, part in self._running.items()}
            return Drawn(rows, draw, key, *self.counts, settled or None)

    def _drawn(self, batch_size: int, key: Key) -> tuple[Any, Draw]:
        """Choose rows and gather them."""
        storage: Any = self._storage
        self._sync(key.index)
        if not len(storage):
            raise ConfigError("sample: expected rows, found an empty buffer")
        collated, rows = self._collate is not None, None
        if self._recorded is not None and not collated and self._recorded.is_for_rows():
            rows, draw = self._recorded.draw(batch_size, key)
        else:
            draw = self._sampler.draw(storage, batch_size, key)
        slots = draw.index
        if self._looks_around:
            self._index()
        if self._gather is not None:
            episodes = (self._episodes or self._sampler_episodes).settled(storage)
            draw.extra = {**draw.extra, **self._gather(storage, slots, episodes, key)}
        if self._generations is not None:
            draw.extra = {**draw.extra, "generation": self._generations.of(storage, slots)}
        if self._reach and slots.ndim == 1:
            slots, draw.mask = rows_behind(slots, storage, self._reach, self._episodes_around())
        if rows is None:
            rows = (storage.get if collated else getattr(storage, "batch", storage.get))(slots)
        return rows, draw

    def _episodes_around(self) -> list[Any]:
        """The episodes that a drawn row and the rows behind it must share; none where no field marks their ends."""
        indexes = [index for index in (self._episodes, self._sampler_episodes) if isinstance(index, StorageEpisodes)]
        try:
            return [index.settled(self._storage) for index in indexes]
        except MissingFieldError:  # the transform raises it too, if it needs to know
            return []

    def _mark(self) -> Any:
        # A draw replaces the attributes of the sampler that it changes, and changes nothing else.
        return self._samples, dict(getattr(self._sampler, "__dict__", {}))

    def _rewind(self, mark: Any) -> None:
        self._samples, sampler = mark
        if sampler:
            vars(self._sampler).clear()
            vars(self._sampler).update(sampler)

    def batch_of(self, drawn: Drawn) -> Any:
        """Return the transformed batch of what ``draw`` returned, before it is converted for a framework."""
        return self._transformed(assemble(drawn.rows, drawn.draw, self._collate), drawn)

    # ------------------------------------------------------------------ priorities and generations

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Set the priorities of rows.

        Args:
            index: The ``index`` of a batch; or the batch itself, whose field ``priority_key`` has the priorities.
                Rows that its ``mask`` excludes, such as steps behind an episode's end, then keep their priority.
            priority: One for every index, from 0; several become one by ``priority_reduction``.
            generation: The ``generation`` of the batch, which a batch given as ``index`` has itself: rows that were
                overwritten since are skipped.

        Raises:
            ConfigError: The sampler has no priorities; or a generation, where the buffer counts none.
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
            there = meant(np.ones(index.shape, np.bool_), batch, self._masks)
            if not there.all():
                index, priority = index[there], priority[there]
                generation = None if generation is None else np.asarray(generation)[there]
        with self._lock, self._shared():
            slots, values = self._present(index, priority, generation)
            self._priority_sampler.update_priority(self._storage, slots, values)
            self._updates += 1

    def check_update(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Raise what ``update_priority`` would, and change nothing."""
        with self._lock, self._shared():
            self._check_priorities(*self._present(index, priority, generation))

    def _present(self, index: Any, priority: Any, generation: Any) -> tuple[Slots, npt.NDArray[Any]]:
        """The slots and the priorities of those rows that were not overwritten since they had this generation."""
        priority = reduced(priority, np.ndim(index), self._priority_reduction)
        self._check_process()
        self._sync()
        slots, values = to_numpy(index), np.asarray(priority)
        if generation is not None:
            # Negative numbers never were an index, which the sampler raises an error for.
            present = alike(self._generation_of(slots), generation) | (slots < 0)
            slots, values = slots[present], priorities_like(slots, values)[present]
        return slots, values

    def _check_priorities(self, slots: Slots | None, priority: npt.NDArray[Any]) -> None:
        """Raise what an update of priorities would, if the sampler can tell; ``slots`` None: of rows to be written."""
        check = getattr(self._priority_sampler, "check_update", None)
        if check is not None:
            check(self._storage, slots, priority)

    @property
    def _priority_sampler(self) -> Any:
        if not self._prioritized:
            raise ConfigError(f"update_priority: expected a sampler that knows priorities, found {self._sampler!r}")
        return self._sampler

    def generation_of(self, index: Any) -> npt.NDArray[np.int64]:
        """Return how many rows were in the places of these rows before them, with ``generations=True``.

        An index and its generation name a row for good: the row is there as long as ``generation_of(index)`` is equal.

        Args:
            index: Integers of any shape, as ``append``, ``extend`` and batches give them.

        Returns:
            int64 of the same shape; -1 where there is no row.

        Raises:
            ConfigError: The buffer counts none, or an index that is not of integers.
        """
        with self._lock, self._shared():
            return self._generation_of(index)

    def _generation_of(self, index: Any) -> npt.NDArray[np.int64]:
        if self._generations is None:
            raise ConfigError("generation: expected a buffer made with generations=True, found one that counts none")
        self._sync()
        return self._generations.of(self._storage, index)

    # ------------------------------------------------------------------ reading

    def __getitem__(self, index: Any) -> Any:
        """Rows as they are stored, without transforms.

        Args:
            index: As ``append`` and ``sample`` give it: an integer gives one row; a slice, integers of any shape, or a
                mask give rows with as many axes in front.

        Raises:
            IndexError: Out of range; also -1, the index of a row that the writer did not keep.

        Rows of a store in which an episode ends without ``done`` have a field "episode", the number of their episode:
        copied into another buffer, their episode would otherwise continue in the next one.
        """
        refuse_traced("buffer[index]")
        with self._lock, self._shared():
            slots = slots_of(index, len(self._storage))
            rows = self._rows_at(slots.reshape(1) if not slots.ndim else slots)
        return self._deliver_rows(rows if slots.ndim else row_of(rows, 0), slots.shape)

    def _deliver_rows(self, rows: Any, shape: tuple[int, ...]) -> Any:
        """Convert rows with these axes (of a ``ListStorage``, lists) for a framework; a subclass overrides it."""
        return self._deliver(rows)

    def in_order(self) -> Any:
        """Return all rows in the order in which they were written, as they are stored: ``[n, ...]``, oldest first.

        Of a ring that came round, ``buffer[:]`` has the newest rows in front of the oldest. With ``ndim=2`` rows are
        ``[time, env, ...]``, as ``extend`` takes them.

        Raises:
            ConfigError: The writer keeps no order of rows.
        """
        refuse_traced("in_order")
        with self._lock, self._shared():
            slots = self._slots_in_order()
            rows = self._rows_at(slots)
        return self._deliver_rows(rows, slots.shape)

    def _slots_in_order(self) -> Slots:
        storage = self._storage
        if not self._writer.ordered:
            raise ConfigError(f"in_order: expected a writer that keeps rows in order, found {self._writer!r:.80}")
        slots = ring_slots(storage.written - len(storage), len(storage), storage.capacity)
        return slots.reshape(-1, storage.num_envs) if storage.ndim == 2 else slots

    def _rows_at(self, slots: Slots) -> Any:
        """Rows as they are stored, with "episode" where only a store knows that an episode begins."""
        rows = self._storage.get(slots)
        if self._hides_begins() and EPISODE_FIELD not in rows:
            with suppress(MissingFieldError):
                rows = {**rows, EPISODE_FIELD: self._storage.read(EPISODE, slots)}
        return rows

    def _hides_begins(self) -> bool:
        """Whether rows are those of a store, of which a copy would not show where each episode begins."""
        snapshot = getattr(self._storage, "snapshot", None)
        if snapshot is not self._copies[0]:
            self._copies = snapshot, _hides_begins(self._storage)
        return self._copies[1]

    def rows_for(self, label: str, alignment: Alignment | None, ndim: int) -> Any:
        """All rows in order, as the storage has them, for a copy of this alignment and ``ndim``; see ``extend``."""
        with self._lock, self._shared():
            storage, slots = self._storage, self._slots_in_order()
            if alignment not in (None, storage.alignment) or ndim != storage.ndim:
                own = alignment or storage.alignment
                raise ConfigError(
                    f"{label}: expected a buffer of {own!r} rows with ndim={ndim}, found one of {storage.alignment!r} "
                    f"rows with ndim={storage.ndim}"
                )
            rows = self._rows_at(slots) if len(slots) else []
            if self._hides_begins() and EPISODE_FIELD in self.storage.snapshot.readers:
                raise DataError(
                    f"{label}: expected rows that show where their episodes begin, found episodes that only the store "
                    f"knows, and another field {EPISODE_FIELD!r}: as copies they would be one episode. Rename that "
                    "field, or draw from the store itself, in an ensemble"
                )
            return rows

    def to_store(self, columns: Mapping[FieldKey, str] | None = None, **options: Any) -> DatasetStore:
        """Copy all rows to a ``DatasetStore`` in memory, in the order of time; with ``ndim=2`` by environment.

        Args:
            columns: The column of a field where it has another name, as in ``{"obs": "observation", ("next", "done"):
                "done"}``; by default names of nested fields are joined by "_", and rows of a store have its columns.
            **options: As for ``DatasetStore``, whose alignment is that of the rows.

        Returns:
            A store. Its column "episode_step", if rows have none, counts the steps of each episode that are there.

        Raises:
            ConfigError: The writer keeps no order of rows.
            MissingFieldError, SchemaError, DataError: Errors of ``DatasetStore.extend``.
        """
        refuse_traced("to_store")
        from mouse_core.store.dataset_store import DatasetStore

        with self._lock, self._shared():
            storage: Any = self._storage
            slots = self._slots_in_order()
            order = slots.T.reshape(-1)
            rows = getattr(storage, "batch", storage.get)(order) if len(order) else None
            steps = _steps_of_episodes(storage, slots.T) if len(order) else None
        config = storage.snapshot.config.fields if hasattr(storage, "snapshot") else {}
        names: dict[FieldKey, str] = {name: field.column for name, field in config.items()} | dict(columns or {})
        made: dict[str, Any] = {}
        for key, values in flatten(rows).items() if len(order) else ():
            name = names.get(key, key if isinstance(key, str) else "_".join(map(str, key)))
            if name in made:
                raise SchemaError(f"to_store: expected columns of different names, found {name!r} twice")
            made[name] = values.tolist() if is_varying(values) else host_array(values)
        if steps is not None and "episode_step" not in made:
            made["episode_step"] = steps
        store = DatasetStore(**{"alignment": storage.alignment, **options})
        if len(order):
            store.extend(made)
        return store

    # ------------------------------------------------------------------ state

    def _own_state(self) -> dict[str, Any]:
        self._sync()
        storage, index = self._storage, self._sampler_episodes
        if hasattr(storage, "oldest_begins") and len(storage) and isinstance(index, StorageEpisodes):
            with suppress(SchemaError):  # the state keeps what only this storage knows: where episodes begin
                index.settled(storage)
        state: dict[str, Any] = {
            "kind": "buffer",
            "seed": self._seed,
            "samples": self._samples,
            "updates": self._updates,
            "writer": _shown(self._writer),
            "sampler": {"kind": type(self._sampler).__name__, "state": self._sampler.state_dict()},
            "storage": storage.state(),
        }
        if self._running:
            state["transforms"] = {number: part.state_dict() for number, part in self._running.items()}
        if self._generations is not None:
            state["generations"] = self._generations.state()
        return state

    def _load_own(self, state: Mapping[str, Any]) -> None:
        numbers = check_numbers(state, {"kind": "buffer"}, ("seed", "samples", "updates"))
        part_of({"writer": state}, "writer", {"writer": _shown(self._writer)})
        sampler = part_of(state, "sampler", {"kind": type(self._sampler).__name__})
        running = part_of(state, "transforms", {}) if "transforms" in state else {}
        if running and self._running and running.keys() != self._running.keys():
            raise StateError(f"state: expected transforms with the numbers {[*self._running]}, found {[*running]}")
        self._sync()
        counted = self._generations is not None and "generations" in state
        generations = Generations.of_state(state["generations"]) if counted else self._generations
        # A state without transforms starts their numbers again.
        loads = [(self._sampler, part_of(sampler, "state", {}))]
        loads += [(part, running.get(number, {})) for number, part in self._running.items()]
        before = [(part, part.state_dict()) for part, _ in loads]
        try:
            for part, saved in loads:
                part.load_state_dict(saved)
            self._storage.load(part_of(state, "storage", {}))
        except BaseException:
            for part, saved in before:
                part.load_state_dict(saved)
            raise
        if self._recorded is not None:
            self._recorded.forget()
        self._changes, self._heard = self._storage.changes, self._storage.written
        self._writer.reset(self._storage)
        self._reset_others()
        self._generations = generations
        self._seed, self._samples, self._updates = numbers["seed"], numbers["samples"], numbers["updates"]


class PrioritizedReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` with a ``PrioritizedSampler``.

    Args:
        alpha, beta, eps: See ``PrioritizedSampler``.
        **options: The other arguments of ``ReplayBuffer``, by name.
    """

    def __init__(self, alpha: float = 0.6, beta: Beta = 0.4, *, eps: float = 1e-8, **options: Any) -> None:
        super().__init__(sampler=PrioritizedSampler(alpha, beta, eps), **options)


def check_slices(sampler: Sampler, transforms: Sequence[Any]) -> None:
    """Raise ConfigError where transforms would take steps that lie apart for neighbours, or sum up several goals."""
    apart = getattr(sampler, "dilation", 1)
    pairing = [step for step in transforms if getattr(step, "reach", 0) or isinstance(step, ReturnsToGo)]
    if apart > 1 and pairing and "slice_id" not in getattr(sampler, "adds", ()):
        name = type(pairing[0]).__name__
        raise ConfigError(
            f"transform: expected a sampler with dilation=1 for {name}, which pairs each step with the next row, found "
            f"dilation={apart}: the rows between steps are not in the slices. Store next entries and returns with the "
            f"rows instead, or draw with dilation=1"
        )
    summing = [type(step).__name__ for step in transforms if isinstance(step, NStep | ReturnsToGo)]
    goals = any(isinstance(step, HindsightRelabel) for step in transforms)
    if goals and summing and hasattr(sampler, "sequence_length"):
        raise ConfigError(
            f"transform: expected single transitions for {summing[0]} beside HindsightRelabel, found "
            f"{type(sampler).__name__}: each step of a slice has a goal of its own, and rewards for several goals "
            "would be summed. Draw with a RandomSampler or a PrioritizedSampler"
        )


def _shown(part: Any) -> str:
    """The ``repr`` of a part, the same in every process."""
    own: Any = type(part).__repr__
    return type(part).__name__ if own is object.__repr__ else repr(part)


def _flat(leaf: Any, axes: int) -> Any:
    """A leaf, an array of any framework, with one axis in place of its first ``axes``."""
    if axes == 1:
        return leaf
    values = leaf if hasattr(leaf, "reshape") else np.asarray(leaf)
    return values.reshape((prod(values.shape[:axes]), *values.shape[axes:]))


def _steps_of_episodes(storage: Storage, slots: Slots) -> Slots | None:
    """The number of each row within its episode, as far as it is there; None where no field marks ends of episodes.

    Args:
        storage: The rows.
        slots: All slots of each stream in order, ``[env, time]``, or ``[time]`` of one.
    """
    try:
        table = StorageEpisodes().settled(storage)
    except MissingFieldError:
        return None
    steps = np.tile(np.arange(table.begin, table.end), table.num_envs)
    begin, _, _ = table.episode_of(steps, np.repeat(np.arange(table.num_envs), slots.shape[-1]))
    found: Slots = steps - np.maximum(begin, table.begin)
    return found


def _hides_begins(storage: Any) -> bool:
    """Whether the fields of the rows of a store do not show where each of its episodes begins."""
    starts = storage.snapshot.episode_starts[1:]
    around = np.stack([starts - 1, starts], axis=1).reshape(-1)

    def read(key: FieldKey) -> npt.NDArray[Any]:
        if key == EPISODE:
            raise MissingFieldError("rows: expected fields of rows, found what a store knows")
        values: npt.NDArray[Any] = storage.read(key, around)
        return values

    if not len(starts):
        return False
    try:
        marks = marks_of(find_fields(read, None, ()), read, 1)
    except MissingFieldError:
        return True
    return not marks.begins(None)[1::2].all()
