"""Replay buffers: write rows, sample batches, update priorities, read rows back, save and restore.

A ``ReplayBuffer`` joins four parts behind one lock: a storage holds the rows, a writer chooses the slot of each row, a
sampler chooses the rows of a batch, and transforms change the batch. ``BaseBuffer`` is the base class of buffers and
ensembles of buffers. The class numbers the batches, and saves and restores the state.

The sampler, transforms with running statistics, and the episode index keep data about every row. The buffer reports
written rows to these objects, many rows at a time: before a draw, and before an unreported row is overwritten.
``_reported`` counts the rows that were reported. Example: in a ring of 8 slots with ``_reported`` 5 and 7 rows written,
rows 5 and 6 are unreported. Writing 7 more rows would overwrite row 5 in slot 5, so rows 5 and 6 are reported first.
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
from mouse_core.digest import host_array
from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, DataError, ForkError, MissingFieldError, SchemaError, StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.nested import as_lists, copied, find, flatten, is_varying, map_tree, opened, path_of
from mouse_core.randomness import Key, Purpose, check_seed
from mouse_core.replay._assembly import (
    REDUCTIONS,
    Collate,
    assemble,
    check_names,
    count_steps,
    named_time,
    names_added,
    priorities_in,
    reduce_priorities,
    replace_fields,
    row_of,
    rows_behind,
    slots_of,
    time_first,
)
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
from mouse_core.replay.samplers.rows import RandomSampler, unmasked
from mouse_core.replay.samplers.slices import SliceSampler, SliceSampling
from mouse_core.replay.samplers.weighing import priorities_like
from mouse_core.replay.storages._dataset import DatasetStorage, RecordedSlices, as_storage, no_store_error
from mouse_core.replay.storages.list import ListStorage
from mouse_core.replay.transforms.compose import Compose, delivered_alignment
from mouse_core.replay.transforms.fields import TRUNCATED, check_keys, replaced
from mouse_core.replay.transforms.transitions import HindsightRelabel, NStep, ReturnsToGo, Transitions
from mouse_core.replay.writers import ImmutableWriter, MaxValueWriter, RoundRobinWriter, check_writer
from mouse_core.sampling.plan import remembered
from mouse_core.spec import Alignment, check_count

if TYPE_CHECKING:
    from mouse_core.store.dataset_store import DatasetStore

Int64s = npt.NDArray[np.int64]


class Generations:
    """The generation of every slot: the number of rows that were written into the slot, minus 1.

    An index and a generation together always identify the same row. A row that is changed in place keeps its
    generation.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)  # how many rows were written into each slot

    def wrote(self, storage: Storage, write: Write) -> None:
        """Increment the generations of the written slots. A slot occurs at most once in a write, because a write has at
        most ``capacity`` rows.
        """
        if write.first is not None and write.slots.size:
            self._make_room(int(write.slots.max()) + 1)
            self._counts[write.slots] += 1

    def reset(self, storage: Storage) -> None:
        """Increment the generation of every slot; called when any row may have changed."""
        self._make_room(len(storage))
        self._counts = self._counts + 1

    def _make_room(self, size: int) -> None:
        more = size - len(self._counts)
        if more > 0:  # at least twice as long, so that it is copied seldom
            self._counts = np.append(self._counts, np.zeros(max(more, len(self._counts)), np.int64))

    def of(self, storage: Storage, index: Any) -> Int64s:
        """Return the generation of the row in each slot, int64 in the shape of ``index``; -1 for a slot without a row.

        Raises:
            ConfigError: The index does not consist of integers.
        """
        slots = to_numpy(index)
        if slots.dtype.kind not in "iu" and slots.size:
            raise ConfigError(f"index: expected integers, found {slots.dtype}")
        slots = slots.astype(np.int64, copy=False)
        there = (slots >= 0) & (slots < len(storage))
        found: Int64s = np.full(slots.shape, -1, np.int64)
        found[there] = self._counts[slots[there]] - 1
        return found

    def state(self) -> dict[str, Any]:
        """The number of rows written into each slot."""
        return {"counts": self._counts.copy()}

    @staticmethod
    def of_state(state: Any) -> Generations:
        """Restore the generations from ``state``; raise StateError for an invalid state."""
        counts = np.asarray(state.get("counts")) if isinstance(state, Mapping) else np.zeros(1)
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or counts.min(initial=0) < 0:
            raise StateError(f"state: expected generations as integers [n], found {state!r:.80}")
        made = Generations()
        made._counts = counts.astype(np.int64)
        return made


def same_generation(found: Int64s, generation: Any) -> npt.NDArray[np.bool_]:
    """Return whether each row still has the given generation. Raise ConfigError unless ``generation`` contains integers
    in the shape of the index.
    """
    named = to_numpy(generation)
    if named.shape != found.shape or (named.dtype.kind not in "iu" and named.size):
        raise ConfigError(
            f"generation: expected integers of the shape of the index, {list(found.shape)}, found {named.dtype} "
            f"{list(named.shape)}"
        )
    same: npt.NDArray[np.bool_] = (found == named) & (found >= 0)
    return same


def query(
    buffer: Any,
    predicate: Callable[[Any], Any] | None = None,
    *,
    fields: Sequence[FieldKey] | None = None,
    traj_key: FieldKey | None = None,
    end_key: FieldKey | None = None,
) -> list[Slots]:
    """Return the row indices of each episode for which a predicate is true.

    ``buffer[index]`` reads an episode, ``update_priority(index, ...)`` changes its priorities, and
    ``other.extend(buffer[index])`` copies the episode. The result contains only rows that are in the buffer: in a full
    ring, the first rows of the oldest episode may be overwritten. The newest episode may be incomplete.
    (``store.where`` chooses episodes of a store.)

    Args:
        buffer: A ``ReplayBuffer`` of any package, with its rows in memory, in files, or in a store.
        predicate: A function that is called with the stored rows of each episode, ``{field: [T, ...]}``, in the form in
            which ``buffer[index]`` returns rows; the result is converted to a bool. None: all episodes.
        fields: The fields that ``predicate`` receives; by default all fields. Other fields are not read.
        traj_key, end_key: The fields that mark where episodes end; see ``SliceSampler``.

    Returns:
        A list with an array for each episode: the indices of the episode's rows from the first to the last, as a NumPy
        array int64 ``[T]``, also for buffers of other frameworks. Episodes are ordered by environment, then by time.
        The call holds the buffer's lock, so no other thread can write during the call.

    Raises:
        ConfigError: ``buffer`` is not a ``ReplayBuffer`` (for example an ensemble), or its writer does not keep rows in
            order.
        MissingFieldError: No field marks where episodes end, or the rows lack a field of ``fields``.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import ArrayStorage, ReplayBuffer, query
        >>> buffer = ReplayBuffer(ArrayStorage(100))
        >>> _ = buffer.extend({"reward": np.array([0.0, 1, 0, 5, 0]), "done": np.array([0, 1, 0, 1, 0])})
        >>> good = query(buffer, lambda episode: episode["reward"].sum() > 3)
        >>> len(good), good[0].tolist()
        (1, [2, 3])
    """
    storage, writer = getattr(buffer, "storage", None), getattr(buffer, "writer", None)
    if storage is None or writer is None:
        raise ConfigError(
            f"query: expected a replay buffer, found {buffer!r:.80}; for an ensemble, "
            "query each buffer in its attribute `buffers`"
        )
    if not writer.ordered:
        raise ConfigError(f"query: expected a writer that keeps rows in the order of writing, found {writer!r:.80}")
    if predicate is not None and not callable(predicate):
        raise ConfigError(f"query: predicate: expected a function, found {predicate!r:.80}")
    keys = None if fields is None else check_keys(fields, where="query: fields")
    with buffer._lock, buffer._shared():
        if not len(storage):
            return []
        index = StorageEpisodes(traj_key, end_key).settled(storage)
        steps = np.arange(index.begin, index.end, dtype=np.int64)
        slots = []
        for env in range(index.num_envs):
            begins, _, _ = index.episode_of(steps, env)
            runs = np.split(steps, np.flatnonzero(np.diff(begins)) + 1)
            slots += [index.slots_of(run, env) for run in runs]
        return [episode for episode in slots if predicate is None or predicate(_rows(buffer, episode, keys))]


def _rows(buffer: Any, index: Slots, keys: Sequence[FieldKey] | None) -> Any:
    """Return rows in the buffer's framework; every field is an array, also for a ``ListStorage``."""
    storage = buffer.storage
    if keys is None:
        rows = getattr(storage, "batch", storage.get)(index)
    else:
        rows = replaced({}, {key: storage.read(key, index) for key in keys})
    return buffer._deliver_rows(rows, index.shape)


EPISODE_FIELD = "episode"
"""The field, one of ``TRAJ_KEYS``, with the episode number of each row that was copied from a store."""

_MOST_UNREPORTED = 1024
"""The largest number of written rows that may be unreported to the sampler."""


@dataclass(slots=True)
class Drawn:
    """Drawn and gathered rows, from which ``finish`` makes a batch.

    Args:
        rows: The rows that the storage returned; for an ensemble, pairs of a member's index and this member's
            ``Drawn``.
        draw: The draw of the sampler; for an ensemble, the number of windows from each member.
        key: The key of the transforms' random numbers.
        settled: The statistics of each transform with running statistics, at the time of the draw; None without such
            transforms.
        last: Whether the batch is the last batch of its epoch; set only for loaders that use this value.
    """

    rows: Any
    draw: Draw
    key: Key
    settled: Mapping[str, Any] | None = None
    last: bool = False


class BaseBuffer:
    """Base class of replay buffers and ensembles of buffers, which draw numbered batches from a seed.

    The buffers of a framework override two methods: ``_accept(rows)`` converts written rows to trees of NumPy arrays,
    and ``_deliver(batch)`` converts a tree of NumPy arrays to a batch of the framework. An adapter defines both methods
    in one class; the adapter's buffer and ensemble inherit from this class.

    Args:
        transform: One callable that changes each batch, or a list of such callables.
        batch_size: The number of windows in a batch, B, if ``sample`` is called without ``batch_size``.
        seed: An integer in ``[0, 2**64)``.
        collate_fn: A function that converts a list of rows to a batch; for an ensemble, a list of the members' batches.
        alignment: The alignment of the rows before the transforms are applied.

    Raises:
        ConfigError: An argument is out of range, or a transform needs rows of another alignment.
    """

    def __init__(
        self,
        transform: Transform | Sequence[Transform] | None,
        batch_size: int | None,
        seed: int,
        collate_fn: Collate | None,
        alignment: Alignment,
    ) -> None:
        self._set_transform(transform, alignment)
        self.batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        self.seed = check_seed(seed)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn: expected a function, found {collate_fn!r}")
        self._collate = collate_fn
        self._lock = TurnLock()
        self._samples = 0

    def _place(self, device: Any) -> None:
        """Check and set the device of batches. Here only the host is valid; the classes of adapters support more
        devices.
        """
        if device is not None and str(device) != "cpu":
            raise ConfigError(f"device: expected 'cpu' or None for NumPy arrays, found {device!r}")

    def _set_transform(self, transform: Transform | Sequence[Transform] | None, alignment: Alignment) -> None:
        """Set the transforms of batches; ``alignment`` is the alignment before the transforms."""
        transforms = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
        # A single transform is also wrapped in Compose, which handles the rows that follow each drawn row.
        self._transform = Compose(*transforms) if transforms else None
        self._alignment = delivered_alignment(self._transform, alignment)

    @property
    def transform(self) -> Transform | None:
        """The transforms of batches, combined in one ``Compose``."""
        return self._transform

    @property
    def alignment(self) -> Alignment:
        """The alignment: "arrived" if a row's action, reward and done led to the row's observation, else "outgoing"."""
        return self._alignment

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last batch of its epoch; always False for a sampler with replacement."""
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of rows."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Return sizes and counters."""
        raise NotImplementedError

    # ------------------------------------------------------------------ batches

    def sample(self, batch_size: int | None = None) -> Any:
        """Return the next batch.

        Args:
            batch_size: The number of windows (single rows, or slices) in the batch; by default the ``batch_size`` of
                the buffer.

        Returns:
            A batch ``{field: [batch_size, ...]}``, or ``[B, S, ...]`` for slices, nested like the rows. The buffer
            never writes to the batch's memory again. The batch also has ``index`` and the fields that the sampler adds
            (``priority_weight``, ``mask``, ``traj_id``). If rows are not dicts, the field ``data`` contains the rows.

        Raises:
            ConfigError: No batch size is set, the buffer is empty, or a sampler without replacement has fewer rows than
                the batch.
        """
        return self.finish(self.draw(batch_size))

    def __iter__(self) -> Iterator[Any]:
        """Yield batches of ``batch_size`` windows: one epoch if the sampler draws without replacement, else an endless
        stream.

        Raises:
            ConfigError: See ``sample``.
        """
        ends = False
        while not ends:
            drawn = self.draw(None)
            ends = self.ran_out
            yield self.finish(drawn)

    def refresh(self) -> None:
        """Include the new rows of the buffer's ``DatasetStore``, so that the next sample can draw these rows.

        Earlier rows keep their ``index`` and their priorities; new rows get the largest priority, like written rows. A
        sampler without replacement starts a new epoch. If the store dropped its oldest rows, the remaining rows keep
        their priorities, and their ``index`` decreases by the number of dropped rows. Because indices can decrease,
        call ``update_priority`` for earlier batches before you call ``refresh``. If the store was cleared
        (``clear()``), all priorities are discarded. The index of the next sample does not change. Like a write, the
        call affects only later batches.

        Raises:
            ConfigError: The storage is not a store but a snapshot, a dataset or a storage of written rows; in an
                ensemble, no member has a store.
        """
        with self._lock, self._shared():
            self._refresh()

    @property
    def _grows(self) -> bool:
        """Whether the storage reads a store, which can get new rows."""
        return bool(getattr(getattr(self, "storage", None), "grows", False))

    def _refresh(self) -> None:
        """Implement ``refresh``; the caller holds the locks."""
        raise NotImplementedError

    def draw(self, batch_size: int | None = None, *, seed: int | None = None) -> Drawn:
        """Choose and gather the rows of the next batch, under the lock: the first half of ``sample``.

        Args:
            batch_size: See ``sample``.
            seed: Overrides the buffer's seed; an ensemble passes a seed to each member.

        Raises:
            ConfigError: See ``sample``.
        """
        raise NotImplementedError

    def _mark(self) -> Any:
        """Return the index of the next draw and the state of the sampler; ``_rewind`` restores both."""
        raise NotImplementedError

    def _rewind(self, mark: Any) -> None:
        """Undo the draws since ``_mark()``."""
        raise NotImplementedError

    def finish(self, drawn: Drawn) -> Any:
        """Convert a draw to a batch: the second half of ``sample``. Any thread may call ``finish``, also more than
        once.
        """
        return self._deliver(self.batch_of(drawn))

    def batch_of(self, drawn: Drawn) -> Any:
        """Return the transformed batch of a draw, not yet converted to arrays of a framework."""
        raise NotImplementedError

    def _transformed(self, batch: Any, drawn: Drawn) -> Any:
        """Apply all transforms to a batch, with the running statistics at the time of the draw."""
        if self._transform is None:
            return batch
        return self._transform.at(drawn.settled)(batch, drawn.key.with_call(TRANSFORM_CALLS))

    def _next_key(self, seed: int | None) -> Key:
        """Return the key from which the random numbers of the next sample are drawn."""
        return Key(self.seed if seed is None else seed, Purpose.REPLAY, self._samples)

    def _size(self, batch_size: int | None) -> int:
        """Return ``batch_size`` or, if ``batch_size`` is None, the batch size of the buffer; raise ConfigError if
        neither is set.
        """
        if batch_size is not None:
            return check_count("batch_size", batch_size)
        if self.batch_size is None:
            raise ConfigError("batch_size: expected a batch size as argument of this call or of the buffer, found none")
        return self.batch_size

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the state: rows, priorities, write positions and the index of the next sample. The state is as large
        as the data.

        The state consists of nested dicts of plain values and copied NumPy arrays, so later writes do not change the
        state.
        """
        with self._lock, self._shared():
            state: dict[str, Any] = copied(self._state())
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore rows, seed and the index of the next sample from ``state``; later batches are bit-identical to the
        batches that the saved buffer would draw.

        Raises:
            StateError: The state is damaged, or was saved by a buffer with another storage, sampler, writer or
                transform; the buffer is unchanged.
        """
        with self._lock, self._shared():
            self._load(state)

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save the state to a file; the file is as large as the data.

        A temporary file is written and then renamed, so the previous file is intact after a crash or if the disk is
        full.

        Args:
            path: A file; or an existing directory, in which the file ``replay.mouse`` is written.

        Raises:
            StorageError: The file cannot be written (also an OSError).
        """
        with self._lock, self._shared():
            write_checkpoint(path, self._state())

    def loads(self, path: str | PathLike[str]) -> None:
        """Restore the state that ``dumps`` saved.

        Raises:
            StateError: The file is damaged, or was saved by a buffer with another storage, sampler, writer or
                transform; the buffer is unchanged.
            StorageError: The file cannot be read (also an OSError).
        """
        self.load_state_dict(read_checkpoint(path))

    def _state(self) -> dict[str, Any]:
        """Return the state, which may share memory with the buffer."""
        raise NotImplementedError

    def _load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, or raise StateError and change nothing."""
        raise NotImplementedError

    def _shared(self) -> AbstractContextManager[Any]:
        """Return a context that holds further locks, which must be held together with the buffer's lock."""
        return nullcontext()

    # ------------------------------------------------------------------ frameworks

    def _accept(self, rows: Any) -> Any:
        """Convert rows of a framework to rows for the storage; subclasses override this method."""
        return rows

    def _deliver(self, batch: Any) -> Any:
        """Convert a batch, or rows, to arrays of a framework; subclasses override this method."""
        return as_lists(batch)


_NO_LOCK: AbstractContextManager[Any] = nullcontext()


class ReplayBuffer(BaseBuffer):
    """A replay buffer; one thread can write rows while another thread samples batches.

    All methods are thread-safe. A draw depends only on the seed, the index of the sample and the contents of the
    buffer.

    Args:
        storage: The storage of rows; by default a ``ListStorage`` of 1000 rows. A ``DatasetStore`` (see ``refresh``), a
            ``Snapshot``, a dataset or a table becomes a read-only storage.
        sampler: The sampler, which chooses the rows of a batch; by default a ``RandomSampler``.
        writer: The writer, which chooses the slots of rows; by default a ring, or an ``ImmutableWriter`` for a
            read-only storage.
        transform: A function from batch to batch, or a list of functions, which are applied in order. If a transform
            has a method ``inverse``, ``inverse`` is applied to rows before they are written. See ``Transform``.
        batch_size: The number of windows (single rows, or slices) in a batch, B, if ``sample`` is called without
            ``batch_size``.
        seed: An integer in ``[0, 2**64)``.
        collate_fn: A function that converts a list of rows to a batch; None: each field is stacked.
        priority_key: The field of a batch that ``update_priority(batch)`` reads. If a written row has this field, its
            value is the initial priority of the row.
        priority_reduction: The name of the function that reduces several priorities of a row to one: "max", "mean",
            "min", "median" or "sum". A row has several priorities, for example, if it is a trajectory with a priority
            for each step. None: several priorities of a row raise an error.
        generations: Whether batches have a field ``generation``, which contains, for each row, how many earlier rows
            were in the row's slot. ``update_priority(batch)`` then skips rows that were overwritten since the draw; see
            ``generation_of`` and ``update_if_present``.
        transitions: Whether batches contain transitions; rows may have either alignment. True adds ``Transitions`` as
            the first transform.
        device: "cpu" or None; adapters support more devices.

    Raises:
        ConfigError: Storage, sampler, writer and transforms are incompatible, or an argument is out of range.
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
        transitions: bool = False,
        device: Any = None,
    ) -> None:
        self._place(device)
        if priority_reduction not in (None, *REDUCTIONS):
            raise ConfigError(f"priority_reduction: expected one of {[*REDUCTIONS]}, found {priority_reduction!r}")
        rows = self._as_storage(storage)
        if transitions:
            others = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
            transform = [Transitions(takes=rows.alignment), *others]
        super().__init__(transform, batch_size, seed, collate_fn, rows.alignment)
        self.priority_key, self.priority_reduction = priority_key, priority_reduction
        self._generations = Generations() if generations else None
        self._updates = 0
        self._take_parts(rows, sampler, writer)

    def _as_storage(self, storage: Any) -> Storage:
        """Convert the argument ``storage`` to a storage; subclasses that keep rows on a device override this method."""
        return ListStorage() if storage is None else as_storage(storage)

    def _take_parts(self, storage: Storage, sampler: Sampler | None, writer: Writer | None) -> None:
        """Set storage, sampler and writer; raise ConfigError if they are incompatible."""
        sampler = RandomSampler() if sampler is None else sampler
        if writer is None:
            writer = RoundRobinWriter() if storage.writable else ImmutableWriter()
        if not isinstance(sampler, Sampler):
            raise ConfigError(
                f"sampler: expected a Sampler, or HostSampler(sampler) for a DeviceSampler, found {sampler!r:.80}"
            )
        if not isinstance(writer, Writer):
            raise ConfigError(f"writer: expected a Writer, found {writer!r:.80}")
        transform = self._transform
        check_writer(writer, storage, sampler, transform)
        check_slices(sampler, () if transform is None else transform.transforms)
        self._storage, self._sampler, self._writer = storage, sampler, writer
        self.prioritized = hasattr(sampler, "update_priority")
        self._inverse: Callable[[Any], Any] | None = getattr(transform, "inverse", None)
        # Without priorities and inverse transforms, dicts go to the storage unchanged.
        self._prepares_rows = self.prioritized or self._inverse is not None
        self._reach: int = getattr(transform, "reach", 0)
        self._gather = getattr(transform, "gather", None)
        self._running_transforms: dict[str, Any] = getattr(
            transform, "watchers", {}
        )  # transforms with statistics of all rows, such as a running mean
        if transform is not None and (self._gather is not None or self._running_transforms):
            transform.check_gather()
        self._reserved = names_added(sampler, self._gather is not None, self._reach, self._generations is not None)
        self._masks = "mask" in self._reserved or self._reach > 0
        # The buffer keeps an episode index if a transform needs other rows of an episode and the sampler has no index.
        self._episodes: StorageEpisodes | None = None
        if self._gather is not None or self._reach > 0:
            mine = StorageEpisodes(done=transform.done)  # type: ignore[union-attr]
            self._episodes = None if mine.is_like(self._sampler_episodes) else mine
        for part in self._running_transforms.values():
            part.watch(storage)
        self._recorded_slices: RecordedSlices | None = None
        if type(sampler) is SliceSampler and sampler.gives_windows and isinstance(storage, DatasetStorage):
            # Slices of recorded rows depend only on the index of the sample, so they can be planned before it.
            self._recorded_slices = RecordedSlices(storage, sampler)
        # Most buffers are rings of single rows in the memory of this process; ``append`` has a short path for them.
        self._is_plain_ring = type(writer) is RoundRobinWriter and storage.ndim == 1 and storage.lock() is None
        # One row less than the capacity, as rows must be reported before they are overwritten.
        self._most_unreported = min(_MOST_UNREPORTED, storage.capacity) - 1
        self._forks = forks()
        self._reported = 0
        self._changes = -1  # ``storage.changes`` at the last report; -1: the first report covers all rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_forks": forks()})

    def with_parts(self, *, storage: Any = ..., sampler: Any = ..., writer: Any = ..., transform: Any = ...) -> Self:
        """Return a buffer with some parts replaced and with the same seed, options and index of the next sample.

        If the storage is not replaced, both buffers share its rows and one lock. If the sampler (or the writer) is not
        replaced, the new buffer gets a copy of the sampler (or the writer), including priorities. After ``with_parts``,
        write through only one of the two buffers, because the other buffer does not receive the initial priorities of
        written rows. To add a transform, pass ``transform=[*buffer.transform.transforms, mine]``.

        Args:
            storage, sampler, writer, transform: The new parts; see ``ReplayBuffer``. Parts that are not passed are
                kept.

        Raises:
            ConfigError: The storage, sampler, writer and transforms are incompatible. After any error this buffer is
                unchanged.
        """
        other = object.__new__(type(self))
        with self._lock, self._shared():
            self._sync()
            vars(other).update(vars(self))
            same = storage is ... or storage is self._storage
            rows = self._storage if same else self._as_storage(storage)
            other._set_transform(self._transform if transform is ... else transform, rows.alignment)
            if same:
                other._generations = deepcopy(self._generations)
            else:
                other._generations = None if self._generations is None else Generations()
                other._lock = TurnLock()
                writer = None if writer is ... else writer
            other._take_parts(
                rows,
                deepcopy(self._sampler) if sampler is ... else sampler,
                deepcopy(self._writer) if writer is ... else writer,
            )
            if same:  # the rows there are reported
                other._reported, other._changes = self._reported, self._changes
                others = (other._writer, *other._running_transforms.values(), other._episodes)
                for part in (other._sampler if sampler is not ... else None, *others):
                    if part is not None:
                        part.reset(rows)
        return other

    # ------------------------------------------------------------------ parts

    def __repr__(self) -> str:
        parts = f"{self._storage!r}, {self.sampler!r}, {self._writer!r}"
        return f"{type(self).__name__}({parts}, seed={self.seed})"

    def __len__(self) -> int:
        """The number of rows: all time steps of all environments."""
        return len(self._storage)

    @property
    def storage(self) -> Any:
        """The storage of the rows."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """The sampler; all written rows are reported to the sampler first."""
        with self._lock, self._shared():
            self._sync()
        return self._sampler

    @property
    def writer(self) -> Writer:
        """The writer, which chooses the slots of rows."""
        return self._writer

    @property
    def generations(self) -> bool:
        """Whether batches have a field ``generation``."""
        return self._generations is not None

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last batch of its epoch; always False for a sampler with replacement."""
        return bool(getattr(self._sampler, "ran_out", False))

    def stats(self) -> dict[str, Any]:
        """Return a dict of sizes and counters:

        - ``size``, ``capacity``: number of rows, and the largest number of rows
        - ``written``: number of rows ever written
        - ``samples``: number of batches ever drawn
        - ``updates``: number of calls that updated priorities
        - ``num_envs``: number of environments
        - ``nbytes``: size of the rows in memory in bytes, if the storage counts the bytes
        - ``synced``: number of written rows that are on disk, if the storage counts these rows
        """
        with self._lock, self._shared():
            sizes = {name: getattr(self._storage, name) for name in ("capacity", "written", "num_envs")}
            found = {"size": len(self), **sizes, "samples": self._samples, "updates": self._updates}
            optional = ("nbytes", "synced")
            return found | {name: getattr(self._storage, name) for name in optional if hasattr(self._storage, name)}

    def _shared(self) -> AbstractContextManager[Any]:
        return self._storage.lock() or _NO_LOCK

    # ------------------------------------------------------------------ writing

    def append(self, row: Any) -> Any:
        """Write one row, or with ``ndim=2`` one time step of all environments.

        Args:
            row: A tree of values, or for a ``ListStorage`` any object.

        Returns:
            The index of the row, an int; -1 if the writer did not keep the row. With ``ndim=2``, the result is int64
            ``[num_envs]``.

        Raises:
            SchemaError: The structure, a dtype or a shape differs from the first write.
            DataError: The dtype of a field cannot represent a value.
            ConfigError: The buffer is read-only.

        After an error the buffer is unchanged.
        """
        if self._storage.ndim == 2:
            self._check_unnamed([row])
            return self._write(row, one=True)
        slots = self._write(row, one=True)
        return slots if isinstance(slots, int) else int(slots[0])

    def extend(self, rows: Any, *, names: Sequence[str] | None = None) -> Slots:
        """Write many rows.

        Args:
            rows: A tree (nested dicts, tuples) of arrays ``[n, ...]``, or ``[time, env, ...]`` for ``ndim=2``; a list
                of rows; or another buffer, whose rows are copied in the order of writing. A tree may name its batch
                axes, as a TensorDict can: with ``ndim=2`` the axis "time" may then have any position, and all other
                batch axes count as environments.
            names: The names of the batch axes, for ``ndim=2``, if the rows do not name these axes: for example
                ``("env", "time")``. With ``("time", "env", "agent")``, every agent of every environment is a stream.

        Returns:
            The indices of the rows, int64 ``[n]``, -1 for rows that the writer did not keep. With ``ndim=2`` the shape
            is ``[time, env]``, or consists of the named batch axes in the order of the input.

        Raises:
            SchemaError, DataError, ConfigError: See ``append``; also if ``names`` does not contain "time" exactly once.
            ConfigError: The other buffer has another alignment or ``ndim``.
            DataError: The other buffer reads a store whose rows do not mark where an episode begins, and the rows
                already have a field "episode".

        After an error the buffer is unchanged.
        """
        storage = self._storage
        if isinstance(rows, ReplayBuffer):
            rows = rows._rows_for(storage)
        grid = storage.ndim == 2
        if names is not None and (not grid or isinstance(names, str) or list(names).count("time") != 1):
            raise ConfigError(
                "names: expected names of the batch axes, including 'time', and a storage with ndim=2, found "
                f"{names!r} "
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
        """Raise SchemaError if a single time step names a time axis."""
        if any(named_time(step) is not None for step in steps):
            raise SchemaError(
                "append: expected one time step, [env, ...], found a time axis; extend accepts [env, time]"
            )

    def _write(self, rows: Any, *, one: bool) -> Any:
        """Write rows and return their slots; for a single row in a plain ring, return the slot as an int."""
        refuse_traced("append" if one else "extend")
        rows = self._accept(rows)
        if type(rows) is list and not rows and not one:
            self._check_writable()
            return np.empty(0, np.int64)
        priority = None
        if self._prepares_rows or type(rows) is not dict:
            rows, priority = self._prepare(rows, one=one)
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
            return self._write_slots(rows, priority, one=one)

    def _prepare(self, rows: Any, *, one: bool) -> tuple[Any, npt.NDArray[np.float64] | None]:
        """Convert rows to the stored form; return the rows and, for a sampler with priorities, their priorities."""
        storage = self._storage
        if not one or type(rows) is not dict or self._inverse is not None:
            rows = self._open_lists(rows, one=one)
        if self._inverse is not None:
            rows = self._inverse(rows)
        if not self.prioritized:
            return rows, None
        reduction = self.priority_reduction
        return rows, priorities_in(rows, self.priority_key, one=one, ndim=storage.ndim, reduction=reduction)

    def _open_lists(self, rows: Any, *, one: bool) -> Any:
        """Convert lists inside rows to nodes or values; see ``mouse_core.nested.opened``. For a storage of objects
        (``ListStorage``), return rows unchanged.
        """
        storage = self._storage
        if hasattr(storage, "batch"):  # a storage of any objects
            if self._inverse is not None and hasattr(storage, "check"):
                storage.check([rows] if one else rows)  # a transform would read the values under a mask
            return rows
        ragged = getattr(storage, "ragged", ())
        if isinstance(rows, list) and not one:
            return [opened(row, storage.ndim - 1, ragged) for row in rows]
        return opened(rows, storage.ndim - 1 if one else storage.ndim, ragged)

    def _append(self, row: Any) -> int:
        """Write one row to a plain ring (the fast path), and return the row's slot."""
        if forks() != self._forks:
            self._check_process()
        storage = self._storage
        if type(row) is not dict or not self._reserved.isdisjoint(row):
            check_names(row, self._reserved, one=True)
        if self._changes != storage.changes:
            self._sync()
        first = storage.append(row, one=True)[0]
        if first - self._reported >= self._most_unreported:
            self._sync()
        return first % storage.capacity

    def _write_slots(self, rows: Any, priority: npt.NDArray[np.float64] | None, *, one: bool) -> Slots:
        """Write rows through the writer, and report the rows that this write or the next write may overwrite."""
        storage, ordered = self._storage, self._writer.ordered
        if self._changes != storage.changes or not ordered:
            self._sync()
        if not one and storage.written - self._reported + count_steps(rows) * storage.num_envs > storage.capacity:
            self._sync()
        slots, kept, first = self._writer.write(storage, rows, one=one)
        if not ordered:
            self._report(kept, first)
        elif len(slots) > len(kept):
            self._report_lost(rows, len(slots) - len(kept))
        late = storage.written - self._reported >= min(self._most_unreported, storage.capacity - 1)
        if late or priority is not None or (self._running_transforms and not one):
            self._sync()
        if priority is not None:
            stored = slots >= 0
            self._sampler.update_priority(storage, slots[stored], priority[stored])  # type: ignore[attr-defined]
        return slots

    def check_extend(self, rows: Any) -> None:
        """Raise the errors of ``extend(rows)`` without writing. If the storage lacks the method ``check``, ``extend``
        may still raise further errors.
        """
        rows, priority = self._prepare(self._accept(rows), one=False)
        with self._lock, self._shared():
            self._check_process()
            self._check_writable()
            if priority is not None:
                self._check_priorities(None, priority)
            check_names(rows, self._reserved, one=False)
            if isinstance(self._writer, MaxValueWriter):
                self._writer.check(self._storage, rows)
            if hasattr(self._storage, "check"):
                self._storage.check(rows)

    def __setitem__(self, index: Any, rows: Any) -> None:
        """Overwrite stored rows in place, without inverse transforms. The next write position and the number of rows
        stay the same.

        Args:
            index: An index that ``buffer[index]`` accepts.
            rows: One row if ``index`` is an integer; else a tree of arrays whose first axes are the axes of ``index``,
                or a list of rows. A tree for all rows (``buffer[:]``) of an ``ArrayStorage`` or a ``TensorStorage`` may
                add fields; all later rows must then have these fields.

        Raises:
            IndexError: The index is out of range.
            SchemaError, DataError, ConfigError: See ``append``.
        """
        refuse_traced("buffer[index] = rows")
        rows = self._accept(rows)
        with self._lock, self._shared():
            self._check_writable()
            slots = slots_of(index, len(self))
            if slots.ndim > 1 and not isinstance(rows, list):
                rows = map_tree(lambda leaf: _flatten_axes(leaf, slots.ndim), rows)
            self._overwrite(slots.reshape(-1), rows if slots.ndim else [rows])

    def _overwrite(self, slots: Slots, rows: Any, *, keeps_priority: bool = False) -> None:
        """Overwrite the rows in ``slots``, and report the change."""
        self._check_process()
        check_names(rows, self._reserved, one=False)
        self._sync()
        self._storage.put(slots, rows)
        self._report(slots, None, keeps_priority=keeps_priority)
        self._writer.reset(self._storage)

    def update_if_present(self, index: Any, generation: Any, fields: Any) -> npt.NDArray[np.bool_]:
        """Change fields of a batch's rows in the buffer, but only of rows that were not overwritten since the draw.

        Rows keep their priorities and generations. If an index occurs twice, its last values are stored.

        Args:
            index: The ``index`` of the batch, integers of any shape.
            generation: The ``generation`` of the batch, in the shape of ``index``.
            fields: A tree of arrays with the new values; their first axes are the axes of ``index``.

        Returns:
            Whether each row was changed, bool of the shape of ``index``.

        Raises:
            MissingFieldError: The rows lack a field of ``fields``.
            SchemaError, DataError, ConfigError: See ``append`` and ``generation_of``.

        After an error the buffer is unchanged.
        """
        refuse_traced("update_if_present")
        named = to_numpy(index)
        values = {key: _flatten_axes(leaf, named.ndim) for key, leaf in flatten(self._accept(fields)).items()}
        with self._lock, self._shared():
            self._check_writable()
            present = same_generation(self._generation_of(named), generation)
            places = np.flatnonzero(present)
            if not len(places):
                return present
            self._change(named.astype(np.int64).reshape(-1)[places], values, places, present.size)
        return present

    def _change(self, slots: Slots, values: Mapping[FieldKey, Any], places: Slots, count: int) -> None:
        """Change fields of the rows in ``slots``, which keep their priorities; see ``replace_fields``."""
        rows = replace_fields(self._storage.get(slots), values, places, count)
        self._overwrite(slots, rows, keeps_priority=True)

    def end_episodes(self, done: FieldKey = "done") -> None:
        """Mark the newest row of each environment as truncated, unless this row already ends its episode.

        Call ``end_episodes`` after ``loads`` if the buffer was saved in the middle of an episode and the next row
        begins another episode. A second call changes nothing.

        Args:
            done: The field of done codes, which is set to 2; a field ``truncated`` on the same level is set to True.

        Raises:
            ConfigError: The buffer is read-only, or its writer does not keep rows in order.
            MissingFieldError: The rows have neither a field of done codes nor a field ``truncated``.
        """
        refuse_traced("end_episodes")
        with self._lock, self._shared():
            self._check_writable()
            slots = self._slots_in_order()[-1:].reshape(-1)
            if not slots.size:
                return
            fields = find_fields(lambda key: self._storage.read(key, slots), None, (), done).ends
            ends = {key: self._storage.read(key, slots) for key in fields}
            cut = [key for key in ends if path_of(key)[-1] == "truncated"]
            codes = [key for key, values in ends.items() if key not in cut and path_of(key)[-1] != "terminated"]
            codes = [key for key in codes if cut or ends[key].dtype.kind != "b"]
            if not cut and not codes:
                raise MissingFieldError(
                    f"end_episodes: expected a field {done!r} with codes, or a field 'truncated', found {[*ends]}"
                )
            places = np.flatnonzero(~np.any([values.reshape(-1) != 0 for values in ends.values()], axis=0))
            if len(places):
                changes = {key: np.full_like(ends[key], 1 if key in cut else TRUNCATED) for key in (*cut, *codes)}
                self._change(slots[places], changes, places, slots.size)

    def empty(self) -> None:
        """Remove all rows and priorities. The index of the next sample does not change.

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

        A trajectory is a tree of arrays ``[time, ...]``, a named tuple of such trees (the names become fields), or a
        list of rows. A tree of scalars is a single step, as in RLDS and TF-Agents.
        """

        def observe(trajectory: Any) -> None:
            rows = trajectory._asdict() if hasattr(trajectory, "_asdict") else trajectory
            single = not isinstance(rows, list) and any(not np.ndim(leaf) for leaf in flatten(rows).values())
            (self.append if single else self.extend)(rows)

        return observe

    def _check_writable(self) -> None:
        """Raise ConfigError if the buffer is read-only."""
        if isinstance(self._writer, ImmutableWriter):
            self._writer.write(self._storage, None)

    def _check_process(self) -> None:
        """Raise ForkError in a forked child process, because a write there would change only the child's copy of the
        rows.
        """
        if forks() != self._forks and self._storage.lock() is None:
            raise ForkError(
                "buffer: expected a change in the process that created the buffer, "
                "found a change in a forked child, which "
                "has only a copy of the rows; use a MemmapStorage(capacity, path), or create the buffer in the child"
            )

    # ------------------------------------------------------------------ reports of writes

    def _sync(self) -> None:
        """Report rows that any process has written since the last report; see ``_report``."""
        storage, written = self._storage, self._storage.written
        if self._changes != storage.changes:
            self._changes, self._reported = storage.changes, written
            self._sampler.reset(storage)
            self._writer.reset(storage)
            self._reset_others()
        elif written != self._reported:
            n = min(written - self._reported, len(storage))
            self._report(ring_slots(written - n, n, storage.capacity), written - n)

    def _report(self, slots: Slots, first: int | None, *, keeps_priority: bool = False) -> None:
        """Report rows to the sampler, the transforms and the episode index.

        Args:
            slots: The slots of the rows.
            first: The index of the first row in the order of writing; None if rows were overwritten in place.
            keeps_priority: Whether rows that were overwritten in place keep their priorities.
        """
        storage = self._storage
        if slots.size:
            write = Write(slots, first, lambda key: storage.read(key, slots), keeps_priority)
            for part in (self._sampler, *self._counters):
                part.wrote(storage, write)
        self._changes, self._reported = storage.changes, storage.written

    def _report_lost(self, rows: Any, count: int) -> None:
        """Report rows to the episode indexes that were overwritten by later rows of the same write.

        Example: of 10 rows written to a ring of 8 slots, the last 8 stay. The first 2 rows are reported by this method,
        because these rows may end episodes.
        """
        storage = self._storage
        steps = count // storage.num_envs

        def read(key: FieldKey) -> npt.NDArray[Any]:
            many = [find(row, key) for row in rows[:steps]] if isinstance(rows, list) else find(rows, key)[:steps]
            values = host_array(many)
            return values.reshape(count, *values.shape[storage.ndim :])

        for index in (self._sampler_episodes, self._episodes):
            if isinstance(index, StorageEpisodes):
                index.wrote(storage, Write(np.zeros(count, np.int64), self._reported, read))
        self._reported += count

    def _reset_others(self) -> None:
        """Reset the transforms and the episode index; both then read all rows again."""
        for part in self._counters:
            part.reset(self._storage)

    @property
    def _counters(self) -> list[Any]:
        """The objects, besides the sampler, to which writes are reported: transforms with running statistics,
        generations, planned slices, and the episode index.
        """
        optional = (self._generations, self._recorded_slices, self._episodes)
        return [*self._running_transforms.values(), *(part for part in optional if part is not None)]

    @property
    def _sampler_episodes(self) -> Any:
        """The episode index of the sampler; None if the sampler has no index."""
        return getattr(self._sampler, "episodes", None)

    def _refresh(self) -> None:
        storage: Any = self._storage
        if not hasattr(storage, "refresh"):
            raise no_store_error(f"{storage!r:.80}")
        self._sync()
        first, changes = len(storage), self._changes
        gone = storage.refresh()
        if changes != storage.changes:
            for part in self._running_transforms.values():
                part.dropped(storage, gone or first)
            if gone and hasattr(self._sampler, "dropped"):
                self._sampler.dropped(storage, gone)
                self._reset_others()
                self._changes, self._reported = storage.changes, storage.written
        self._sync()

    # ------------------------------------------------------------------ sampling

    def draw(self, batch_size: int | None = None, *, seed: int | None = None) -> Drawn:
        """Choose and gather the rows of the next batch, under the lock: the first half of ``sample``.

        Args:
            batch_size: See ``sample``.
            seed: Overrides the buffer's seed; an ensemble passes a seed to each member.

        Raises:
            ConfigError: See ``sample``.
        """
        refuse_traced("sample")
        size = self._size(batch_size)
        with self._lock.waited_for(), self._shared():
            key = self._next_key(seed)
            rows, draw = self._choose_and_gather(size, key)
            self._samples += 1
            settled = {number: part.settled(self._storage) for number, part in self._running_transforms.items()}
            return Drawn(rows, draw, key, settled or None)

    def _choose_and_gather(self, batch_size: int, key: Key) -> tuple[Any, Draw]:
        """Choose the rows of a batch and gather them."""
        storage: Any = self._storage
        self._sync()
        if not len(storage):
            raise ConfigError("sample: expected rows, found an empty buffer")
        collated, rows = self._collate is not None, None
        if self._recorded_slices is not None and not collated and self._recorded_slices.is_for_rows():
            rows, draw = self._recorded_slices.draw(batch_size, key)
        else:
            draw = self._sampler.draw(storage, batch_size, key)
        slots = draw.index
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
        """Return the episode indexes. ``rows_behind`` uses these indexes to determine which of the rows after a drawn
        row belong to the same episode. The list is empty if no field marks the ends of episodes.
        """
        indexes = [index for index in (self._episodes, self._sampler_episodes) if isinstance(index, StorageEpisodes)]
        try:
            return [index.settled(self._storage) for index in indexes]
        except MissingFieldError:  # a transform that needs the ends raises the error itself
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
        """Return the transformed batch of a draw, not yet converted to arrays of a framework."""
        return self._transformed(assemble(drawn.rows, drawn.draw, self._collate), drawn)

    # ------------------------------------------------------------------ priorities and generations

    def update_priority(self, index: Any, priority: Any = None, generation: Any = None) -> None:
        """Set the priorities of rows.

        Args:
            index: The ``index`` of a batch; or the batch, whose field ``priority_key`` has the priorities. Rows that
                the batch's ``mask`` excludes, such as steps after the end of an episode, then keep their priorities.
            priority: A number of at least 0 for every index; ``priority_reduction`` reduces several numbers to one.
            generation: The ``generation`` of the batch; rows that were overwritten since the draw are skipped. If
                ``index`` is a batch, the batch's field is used.

        Raises:
            ConfigError: The sampler has no priorities, or ``generation`` is passed to a buffer without
                ``generations=True``.
            MissingFieldError: The batch has no ``index`` or ``priority_key``.
            DataError: A priority is negative, NaN or infinite.
            IndexError: The index is out of range.

        After an error the priorities are unchanged.
        """
        refuse_traced("update_priority")
        if priority is None:
            batch = self._accept(index)
            index, priority = (find(batch, key, where="update_priority") for key in ("index", self.priority_key))
            if self.generations and generation is None:
                generation = find(batch, "generation", where="update_priority")
            index = to_numpy(index)
            priority = priorities_like(index, reduce_priorities(priority, index.ndim, self.priority_reduction))
            included = unmasked(np.ones(index.shape, np.bool_), batch, self._masks)
            if not included.all():
                index, priority = index[included], priority[included]
                generation = None if generation is None else np.asarray(generation)[included]
        with self._lock, self._shared():
            slots, values = self._not_overwritten(index, priority, generation)
            self._priority_sampler.update_priority(self._storage, slots, values)
            self._updates += 1

    def check_update(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Raise the errors of ``update_priority`` without changing priorities."""
        with self._lock, self._shared():
            self._check_priorities(*self._not_overwritten(index, priority, generation))

    def _not_overwritten(self, index: Any, priority: Any, generation: Any) -> tuple[Slots, npt.NDArray[Any]]:
        """Return the slots and priorities of the rows whose generation still equals ``generation``; of all rows if
        ``generation`` is None.
        """
        priority = reduce_priorities(priority, np.ndim(index), self.priority_reduction)
        self._check_process()
        self._sync()
        slots, values = to_numpy(index), np.asarray(priority)
        if generation is not None:
            # A negative number is kept, so that the sampler raises its IndexError.
            present = same_generation(self._generation_of(slots), generation) | (slots < 0)
            slots, values = slots[present], priorities_like(slots, values)[present]
        return slots, values

    def _check_priorities(self, slots: Slots | None, priority: npt.NDArray[Any]) -> None:
        """Raise the errors of a priority update if the sampler has a method ``check_update``. ``slots`` is None for
        rows that are not written yet.
        """
        check = getattr(self._priority_sampler, "check_update", None)
        if check is not None:
            check(self._storage, slots, priority)

    @property
    def _priority_sampler(self) -> Any:
        if not self.prioritized:
            raise ConfigError(f"update_priority: expected a sampler that uses priorities, found {self._sampler!r}")
        return self._sampler

    def generation_of(self, index: Any) -> npt.NDArray[np.int64]:
        """Return how many earlier rows were in the slot of each row; the buffer needs ``generations=True``.

        Example: in a ring of 4 slots, row 9 is the third row in slot 1, after rows 1 and 5, so its generation is 2. An
        index and a generation together identify one row. The row is in the buffer as long as ``generation_of(index)``
        does not change.

        Args:
            index: Integers of any shape, such as the results of ``append`` and ``extend``, or the field ``index`` of a
                batch.

        Returns:
            int64 of the same shape; -1 for a slot without a row.

        Raises:
            ConfigError: The buffer was created without ``generations=True``, or the index does not contain integers.
        """
        with self._lock, self._shared():
            return self._generation_of(index)

    def _generation_of(self, index: Any) -> npt.NDArray[np.int64]:
        if self._generations is None:
            raise ConfigError("generation: expected a buffer with generations=True, found generations=False")
        self._sync()
        return self._generations.of(self._storage, index)

    # ------------------------------------------------------------------ reading

    def __getitem__(self, index: Any) -> Any:
        """Return stored rows, without transforms.

        Args:
            index: An integer returns one row. A slice, a mask, or integers of any shape return rows whose first axes
                have the shape of the index. ``append`` and ``sample`` return valid integers.

        Raises:
            IndexError: The index is out of range, or is -1 (the index of a row that the writer did not keep).

        If an episode of a store ends without ``done``, the returned rows have a field "episode" with the number of
        their episode. If the rows are copied to another buffer, this field keeps two consecutive episodes separate.
        """
        refuse_traced("buffer[index]")
        with self._lock, self._shared():
            slots = slots_of(index, len(self._storage))
            rows = self._rows_at(slots.reshape(1) if not slots.ndim else slots)
        return self._deliver_rows(rows if slots.ndim else row_of(rows, 0), slots.shape)

    def _deliver_rows(self, rows: Any, shape: tuple[int, ...]) -> Any:
        """Convert rows with the leading axes ``shape`` to arrays of a framework; rows of a ``ListStorage`` are returned
        as lists. A subclass may override this method.
        """
        return self._deliver(rows)

    def in_order(self) -> Any:
        """Return all stored rows in the order of writing, oldest first: ``[n, ...]``.

        In contrast, ``buffer[:]`` returns rows in the order of the slots: in a ring that has wrapped around, the newest
        rows come before the oldest rows. With ``ndim=2`` the result has the shape ``[time, env, ...]`` and is a valid
        argument of ``extend``.

        Raises:
            ConfigError: The writer does not keep rows in order.
        """
        refuse_traced("in_order")
        with self._lock, self._shared():
            slots = self._slots_in_order()
            rows = self._rows_at(slots)
        return self._deliver_rows(rows, slots.shape)

    def _slots_in_order(self) -> Slots:
        """Return the slots of all rows, oldest first, ``[n]`` or ``[time, env]``; raise ConfigError if the writer does
        not keep rows in order.
        """
        storage = self._storage
        if not self._writer.ordered:
            raise ConfigError(f"in_order: expected a writer that keeps rows in order, found {self._writer!r:.80}")
        slots = ring_slots(storage.written - len(storage), len(storage), storage.capacity)
        return slots.reshape(-1, storage.num_envs) if storage.ndim == 2 else slots

    def _rows_at(self, slots: Slots) -> Any:
        """Return stored rows. If the rows of a store do not mark where episodes begin, add the field "episode"."""
        rows = self._storage.get(slots)
        if self._hides_begins() and EPISODE_FIELD not in rows:
            with suppress(MissingFieldError):
                rows = {**rows, EPISODE_FIELD: self._storage.read(EPISODE, slots)}
        return rows

    def _hides_begins(self) -> bool:
        """Whether the storage is a store whose columns do not show where each episode begins."""
        storage = self._storage
        if not isinstance(storage, DatasetStorage):
            return False
        return remembered(storage.snapshot, "hides begins", lambda: _hides_begins(storage))

    def _rows_for(self, other: Storage) -> Any:
        """Return all stored rows in order, for a copy to another storage; see ``extend``."""
        with self._lock, self._shared():
            storage, slots = self._storage, self._slots_in_order()
            if (other.alignment, other.ndim) != (storage.alignment, storage.ndim):
                raise ConfigError(
                    f"extend: expected a buffer with alignment={other.alignment!r} and ndim={other.ndim}, found a "
                    f"buffer with alignment={storage.alignment!r} and ndim={storage.ndim}"
                )
            rows = self._rows_at(slots) if len(slots) else []
            if self._hides_begins() and EPISODE_FIELD in self.storage.snapshot.readers:
                raise DataError(
                    "extend: expected rows with fields that mark the start of each "
                    "episode, found rows of a store without "
                    f"such fields and with another field {EPISODE_FIELD!r}: the copied "
                    "rows would be one episode. Rename "
                    f"{EPISODE_FIELD!r}, or sample the store itself, as a member of a ReplayBufferEnsemble"
                )
            return rows

    def to_store(self, columns: Mapping[FieldKey, str] | None = None, **options: Any) -> DatasetStore:
        """Copy all rows to a ``DatasetStore`` in memory, in the order of writing; with ``ndim=2``, one environment
        after another.

        Args:
            columns: A dict from field to column name, for fields whose column has a different name, such as ``{"obs":
                "observation", ("next", "done"): "done"}``. By default, the names of a nested field are joined by "_",
                and rows of a store keep the store's column names.
            **options: Options of ``DatasetStore``; ``alignment`` defaults to the alignment of the rows.

        Returns:
            A store. If rows have no field "episode_step", the store gets a column "episode_step" that counts the steps
            of each episode.

        Raises:
            ConfigError: The writer does not keep rows in order.
            MissingFieldError, SchemaError, DataError: See ``DatasetStore.extend``.
        """
        refuse_traced("to_store")
        from mouse_core.store.dataset_store import DatasetStore

        with self._lock, self._shared():
            storage: Any = self._storage
            slots = self._slots_in_order()
            order = slots.T.reshape(-1)
            rows = getattr(storage, "batch", storage.get)(order) if len(order) else None
            steps = _episode_steps(storage, slots.T) if len(order) else None
        config = storage.snapshot.config.fields if hasattr(storage, "snapshot") else {}
        names: dict[FieldKey, str] = {name: field.column for name, field in config.items()} | dict(columns or {})
        by_column: dict[str, Any] = {}
        for key, values in flatten(rows).items() if len(order) else ():
            name = names.get(key, key if isinstance(key, str) else "_".join(map(str, key)))
            if name in by_column:
                raise SchemaError(f"to_store: expected columns of different names, found {name!r} twice")
            by_column[name] = values.tolist() if is_varying(values) else host_array(values)
        if steps is not None and "episode_step" not in by_column:
            by_column["episode_step"] = steps
        store = DatasetStore(**{"alignment": storage.alignment, **options})
        if len(order):
            store.extend(by_column)
        return store

    # ------------------------------------------------------------------ state

    def _state(self) -> dict[str, Any]:
        self._sync()
        storage, index = self._storage, self._sampler_episodes
        if hasattr(storage, "indexes") and len(storage) and isinstance(index, StorageEpisodes):
            with suppress(SchemaError):  # the state keeps where episodes begin, which the rows do not show
                index.settled(storage)
        state: dict[str, Any] = {
            "kind": "buffer",
            "seed": self.seed,
            "samples": self._samples,
            "updates": self._updates,
            "writer": _stable_repr(self._writer),
            "sampler": {"kind": type(self._sampler).__name__, "state": self._sampler.state_dict()},
            "storage": storage.state(),
        }
        if self._running_transforms:
            state["transforms"] = {number: part.state_dict() for number, part in self._running_transforms.items()}
        if self._generations is not None:
            state["generations"] = self._generations.state()
        return state

    def _load(self, state: Mapping[str, Any]) -> None:
        numbers = check_numbers(state, {"kind": "buffer"}, ("seed", "samples", "updates"))
        part_of({"writer": state}, "writer", {"writer": _stable_repr(self._writer)})
        sampler = part_of(state, "sampler", {"kind": type(self._sampler).__name__})
        running = part_of(state, "transforms", {}) if "transforms" in state else {}
        if running and self._running_transforms and running.keys() != self._running_transforms.keys():
            raise StateError(
                f"state: expected statistics of the transforms {[*self._running_transforms]}, found statistics of "
                f"{[*running]}"
            )
        self._sync()
        counted = self._generations is not None and "generations" in state
        generations = Generations.of_state(state["generations"]) if counted else self._generations
        # If the state has no transforms, their running numbers start again.
        loads = [(self._sampler, part_of(sampler, "state", {}))]
        loads += [(part, running.get(number, {})) for number, part in self._running_transforms.items()]
        before = [(part, part.state_dict()) for part, _ in loads]
        try:
            for part, saved in loads:
                part.load_state_dict(saved)
            self._storage.load(part_of(state, "storage", {}))
        except BaseException:
            for part, saved in before:
                part.load_state_dict(saved)
            raise
        if isinstance(self._sampler, SliceSampling):
            self._sampler.episodes.resume(self._storage)
        self._changes, self._reported = self._storage.changes, self._storage.written
        self._writer.reset(self._storage)
        self._reset_others()
        self._generations = generations
        self.seed, self._samples, self._updates = numbers["seed"], numbers["samples"], numbers["updates"]


class PrioritizedReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` with a ``PrioritizedSampler``.

    Args:
        alpha, beta, eps: See ``PrioritizedSampler``.
        **options: Further keyword arguments of ``ReplayBuffer``.
    """

    def __init__(self, alpha: float = 0.6, beta: Beta = 0.4, *, eps: float = 1e-8, **options: Any) -> None:
        super().__init__(sampler=PrioritizedSampler(alpha, beta, eps), **options)


def check_slices(sampler: Sampler, transforms: Sequence[Any]) -> None:
    """Raise ConfigError if transforms would combine steps that are not consecutive or sum rewards of different
    goals.
    """
    dilation = getattr(sampler, "dilation", 1)
    pairing = [step for step in transforms if getattr(step, "reach", 0) or isinstance(step, ReturnsToGo)]
    if dilation > 1 and pairing and "slice_id" not in getattr(sampler, "adds", ()):
        name = type(pairing[0]).__name__
        raise ConfigError(
            f"transform: expected a sampler with dilation=1 for {name}, which pairs each step with the next row, found "
            f"dilation={dilation}: the rows between steps are not in the slices. Store next entries and returns with "
            f"the rows instead, or draw with dilation=1"
        )
    summing = [type(step).__name__ for step in transforms if isinstance(step, NStep | ReturnsToGo)]
    goals = any(isinstance(step, HindsightRelabel) for step in transforms)
    if goals and summing and hasattr(sampler, "sequence_length"):
        raise ConfigError(
            f"transform: expected single transitions for {summing[0]} together with HindsightRelabel, found "
            f"{type(sampler).__name__}: each step of a slice has a goal of its own, and rewards for several goals "
            "would be summed. Draw with a RandomSampler or a PrioritizedSampler"
        )


def _stable_repr(part: Any) -> str:
    """Return a ``repr`` that is equal in every process. A default ``repr`` contains a memory address; in this case,
    return the name of the object.
    """
    method: Any = type(part).__repr__
    return type(part).__name__ if method is object.__repr__ else repr(part)


def _flatten_axes(leaf: Any, axes: int) -> Any:
    """Join the first ``axes`` axes of an array of any framework to one axis."""
    if axes == 1:
        return leaf
    values = leaf if hasattr(leaf, "reshape") else np.asarray(leaf)
    return values.reshape((prod(values.shape[:axes]), *values.shape[axes:]))


def _episode_steps(storage: Storage, slots: Slots) -> Slots | None:
    """Return the position of each row in its episode, counted from 0; None if no field marks the ends of episodes.

    If the first rows of an episode were overwritten, the episode's oldest row in the storage has position 0.

    Args:
        storage: The storage of the rows.
        slots: All slots in the order of writing: ``[env, time]``, or ``[time]`` for a single stream.
    """
    try:
        table = StorageEpisodes().settled(storage)
    except MissingFieldError:
        return None
    steps = np.tile(np.arange(table.begin, table.end), table.num_envs)
    begin, _, _ = table.episode_of(steps, np.repeat(np.arange(table.num_envs), slots.shape[-1]))
    numbers: Slots = steps - np.maximum(begin, table.begin)
    return numbers


def _hides_begins(storage: DatasetStorage) -> bool:
    """Whether some episode of a store begins at a row that no field marks."""
    # Each begin and the row before it: for episodes that start at rows 0, 5 and 9, rows 4, 5, 8, 9.
    starts = storage.snapshot.episode_starts[1:]
    around = np.stack([starts - 1, starts], axis=1).reshape(-1)

    def read(key: FieldKey) -> npt.NDArray[Any]:
        if key == EPISODE:
            raise MissingFieldError("rows: expected only stored fields, found a field that the store computes")
        values: npt.NDArray[Any] = storage.read(key, around)
        return values

    if not len(starts):
        return False
    try:
        marks = marks_of(find_fields(read, None, ()), read, 1)
    except MissingFieldError:
        return True
    return not marks.begins(None)[1::2].all()
