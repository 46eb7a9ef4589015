"""A storage, a writer and a sampler, kept in step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import part_of
from mouse_core._base.locks import forks
from mouse_core.batches.source import BatchSource
from mouse_core.columns.memory import ring_slots
from mouse_core.digest.values import host_array
from mouse_core.dtypes import to_numpy
from mouse_core.episodes import EpisodeIndex, Windows
from mouse_core.errors import ConfigError, DataError, ForkError, MissingFieldError, SchemaError, StateError
from mouse_core.nested import find, flatten
from mouse_core.randomness import Key, Purpose
from mouse_core.replay._assembly import check_names, names_added, rows_behind, shown
from mouse_core.replay.generations import Generations, alike
from mouse_core.replay.protocols import Draw, FieldKey, Sampler, Slots, Storage, Write, Writer
from mouse_core.replay.samplers.episodes import StorageEpisodes
from mouse_core.replay.samplers.rows import RandomSampler
from mouse_core.replay.samplers.slices import SliceSampler
from mouse_core.replay.samplers.weighing import priorities_like
from mouse_core.replay.storages._dataset import DatasetStorage, no_store
from mouse_core.replay.storages.ring import check_part
from mouse_core.replay.transforms.hindsight import HindsightRelabel
from mouse_core.replay.transforms.transitions import NStep, ReturnsToGo
from mouse_core.replay.writers import ImmutableWriter, RoundRobinWriter, check_rows, check_writer
from mouse_core.sampling.plan import MASK
from mouse_core.store.snapshot import Snapshot


def tell(part: Any, storage: Storage, write: Write) -> None:
    """Tell a sampler, or what else is told of writes, of one; rows of a store are more than there was room for."""
    if not hasattr(storage, "refresh"):
        part.wrote(storage, write)
    elif hasattr(part, "grew"):
        part.grew(storage)
        part.wrote(storage, write)
    else:
        part.reset(storage)


class Watchers:
    """Those of a buffer's transforms that have a ``settled``, by their numbers; see ``Transform``.

    Args:
        transform: The buffer's transforms, composed; None: none.
        storage: Its rows.

    Raises:
        ConfigError: One of them belongs to another storage.
    """

    def __init__(self, transform: Any, storage: Storage) -> None:
        self._parts: dict[str, Any] = dict(getattr(transform, "watchers", {}))
        for part in self._parts.values():
            part.watch(storage)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def wrote(self, storage: Storage, write: Write) -> None:
        """Rows were written."""
        for part in self._parts.values():
            part.wrote(storage, write)

    def reset(self, storage: Storage) -> None:
        """The rows may all be others."""
        for part in self._parts.values():
            part.reset(storage)

    def grew(self, storage: Storage) -> None:
        """There is room for more rows, of which ``wrote`` tells."""

    def dropped(self, storage: Storage, rows: int) -> None:
        """The first rows are gone."""
        for part in self._parts.values():
            part.dropped(storage, rows)

    def settled(self, storage: Storage) -> dict[str, Any] | None:
        """What the transforms are at this draw, by their numbers; None: there are none that change."""
        return {number: part.settled(storage) for number, part in self._parts.items()} or None

    def state(self) -> dict[str, Any]:
        """``{"transforms": ...}``, or nothing where there are none."""
        states = {number: part.state_dict() for number, part in self._parts.items()}
        return {"transforms": states} if states else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; with one that has nothing of these, begin anew.

        Raises:
            StateError: It is of other transforms, or damaged; nothing has changed then.
        """
        states = part_of(state, "transforms", {}) if "transforms" in state else {}
        if states and self._parts and states.keys() != self._parts.keys():
            raise StateError(f"state: expected transforms with the numbers {[*self._parts]}, found {[*states]}")
        before = {number: part.state_dict() for number, part in self._parts.items()}
        try:
            for number, part in self._parts.items():
                part.load_state_dict(states.get(number, {}))
        except BaseException:
            for number, part in self._parts.items():
                part.load_state_dict(before[number])
            raise


Int64s = npt.NDArray[np.int64]

_SOURCES_KEPT = 4
# So many blocks of windows that were planned together are kept, and so many steps are numbered at once.
_BLOCKS_KEPT, _STEPS_TOGETHER = 4, 1 << 14


class RecordedSlices:
    """Batches of recorded rows by the number of the sample, as ``BatchSource`` gives them by their index.

    Args:
        storage: The rows of a snapshot, ``storage.snapshot``.
        sampler: Says where slices begin.
    """

    def __init__(self, storage: Any, sampler: SliceSampler) -> None:
        self._storage = storage
        self._sampler = sampler
        self._sources: dict[tuple[Any, ...], BatchSource] = {}
        # Those of fewer rows, of which others are made when they are asked for, and the number of the first sample.
        self._before: dict[tuple[Any, ...], BatchSource] = {}
        self._first_sample = 0
        self._known_whole: bool | None = None

    @property
    def _is_whole(self) -> bool:
        """Whether no slice lacks steps."""
        if self._known_whole is None:
            self._known_whole = self._sampler.is_whole(self._storage)
        return self._known_whole

    def is_for_rows(self) -> bool:
        """Whether it draws what the sampler does; not from rows with a field of their own that is called as the mask.

        Raises:
            ConfigError, MissingFieldError, SchemaError: As the sampler's ``draw``.
        """
        return self._is_whole or MASK not in self._storage.snapshot.readers

    def draw(self, batch_size: int, key: Key) -> tuple[dict[str, npt.NDArray[Any]], Draw]:
        """The rows of the sample that ``key`` names, and what the sampler says of them.

        Raises:
            ConfigError, MissingFieldError, SchemaError: As the sampler's ``draw``.
        """
        source = self._source(batch_size, key.seed)
        slices: Any = source.sampler
        try:
            rows = source[key.index]
        except DataError:
            if self._is_whole:
                raise
            draw = slices.draw(key)  # it may be in a row behind the end of an episode
            return self._storage.get(draw.index), draw
        if not self._is_whole:
            del rows[MASK]  # the draw has it
        return rows, slices.draw(key)

    def _source(self, batch_size: int, seed: int) -> BatchSource:
        name = (batch_size, seed, self._sampler.weighting)
        source = self._sources.get(name)
        if source is None:
            if len(self._sources) >= _SOURCES_KEPT:
                self._sources.clear()
            source = self._sources[name] = self._made(name, batch_size, seed)
        return source

    def _made(self, name: tuple[Any, ...], batch_size: int, seed: int) -> BatchSource:
        kind = _Slices if self._is_whole else _PaddedSlices
        before = self._before.pop(name, None)
        if before is None or type(before.sampler) is not kind:
            windows = kind(self._storage, self._sampler, batch_size)
            return BatchSource(self._storage.snapshot, sampling=windows, seed=seed)
        before.sampler.forget()
        return before.with_snapshot(self._storage.snapshot, epoch_start=self._first_sample)

    def grew(self, sample: int | None) -> None:
        """There are more rows from sample number ``sample`` on, behind those that there were; None: nobody knows."""
        if sample is None:
            self.forget()
            return
        self._before |= self._sources
        self._sources, self._first_sample, self._known_whole = {}, sample, None

    def forget(self) -> None:
        """Ask the sampler anew."""
        self._sources.clear()
        self._before.clear()
        self._known_whole = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}, "_before": {}}


class _Slices:
    """The slices of a buffer's samples as the windows of batches; see ``WindowSampler``."""

    def __init__(self, storage: Storage, sampler: SliceSampler, batch_size: int) -> None:
        self.sequence_length, self.batch_size = sampler.sequence_length, batch_size
        self._storage, self._sampler = storage, sampler
        self._planned: deque[tuple[range, Windows]] = deque(maxlen=_BLOCKS_KEPT)
        self._draws: dict[int, Draw] = {}

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Nothing ends."""
        return 1

    def starts(self, seed: int, index: int, snapshot: Snapshot, epoch_start: int) -> Int64s:
        """See ``WindowSampler.starts``."""
        return self._plan(seed, index, 1)[1].start

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        return self._plan(seed, first, count)[1].start.reshape(count, -1)[:, rows]

    def _plan(self, seed: int, first: int, count: int) -> tuple[range, Windows]:
        """Draw the windows of ``count`` samples together."""
        samples = range(first, first + count)
        keys = [Key(seed, Purpose.REPLAY, sample) for sample in samples]
        planned = samples, self._sampler.windows(self._storage, self.batch_size, keys)
        self._planned.append(planned)
        return planned

    def forget(self) -> None:
        """Plan anew: there are more rows."""
        self._planned.clear()
        self._draws = {}

    def draw(self, key: Key) -> Draw:
        """What the sampler says of the sample that ``key`` names."""
        if key.index not in self._draws:
            planned = next((block for block in self._planned if key.index in block[0]), None)
            self._draws = self._draws_from(key.index, *(planned or self._plan(key.seed, key.index, 1)))
        return self._draws.pop(key.index)

    def _draws_from(self, first: int, samples: range, windows: Windows) -> dict[int, Draw]:
        """The draws of ``samples`` from number ``first`` on, as many as are small together."""
        size = self.batch_size
        count = min(samples.stop - first, max(1, _STEPS_TOGETHER // (size * self.sequence_length)))
        begin = (first - samples.start) * size
        some = Windows(*[column[begin : begin + count * size] for column in windows])
        draw = self._sampler.draw_of(some, self._sampler.episodes.settled(self._storage), self._storage)
        return {first + number: _part(draw, slice(number * size, (number + 1) * size)) for number in range(count)}


def _part(draw: Draw, windows: slice) -> Draw:
    mask = None if draw.mask is None else draw.mask[windows]
    return Draw(draw.index[windows], mask, pad=draw.pad, extra={"traj_id": draw.extra["traj_id"][windows]})


class _PaddedSlices(_Slices):
    """The same where some lack steps behind the end of their episode; see ``PaddedSampler``."""

    fill = None  # batches are padded when they are assembled

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """See ``PaddedSampler.lengths``."""
        episodes = self._sampler.episodes.settled(self._storage)
        _, ends, _ = episodes.episode_of(starts)
        lengths: Int64s = np.minimum(ends - starts, self.sequence_length)
        return lengths


_NOTHING: AbstractContextManager[Any] = nullcontext()
# So many single rows may be written before the sampler is told of them, all at once.
_MOST_UNTOLD = 1024


class BufferCore:
    """What a buffer is made of. The buffer's lock and ``shared()`` are held around every other call.

    Args:
        storage, sampler, writer: See ``ReplayBuffer``.
        transform: What needs rows behind those that are drawn, if anything does.
        generations: Whether it is counted how often the row in each slot was replaced.

    Raises:
        ConfigError: Parts that do not go together.
    """

    def __init__(
        self, storage: Storage, sampler: Sampler | None, writer: Writer | None, transform: Any, generations: bool
    ) -> None:
        self.storage = storage
        self.generations = Generations() if generations else None
        self.sampler: Sampler = check_part("sampler", RandomSampler() if sampler is None else sampler, Sampler)
        if writer is None:
            writer = RoundRobinWriter() if self.storage.writable else ImmutableWriter()
        self.writer: Writer = check_part("writer", writer, Writer)
        check_writer(self.writer, storage, self.sampler, transform)
        self.prioritized = hasattr(self.sampler, "update_priority")
        check_slices(self.sampler, [] if transform is None else transform.transforms)
        self._reach: int = getattr(transform, "reach", 0)
        self._gather = getattr(transform, "gather", None)
        if self._gather is not None or getattr(transform, "watchers", None):
            transform.check_gather()
        self._reserved = names_added(self.sampler, self._gather is not None, self._reach, generations)
        self.masks = "mask" in self._reserved or self._reach > 0
        # The episodes of the rows, where a transform needs other rows of them and the sampler does not know them.
        self._looks = self._gather is not None or self._reach > 0
        self._own_episodes = StorageEpisodes(done=transform.done) if self._looks else None
        ring = storage.writable and storage.lock() is None and not hasattr(storage, "batch")
        if ring and not hasattr(self.sampler, "episodes"):
            # A sampler of slices that comes later asks where the oldest episodes of the ring began.
            self._own_episodes = self._own_episodes or StorageEpisodes(warns=False)
        if self._own_episodes is not None and self._own_episodes.is_like(self._of_sampler):
            self._own_episodes = None
        self._watchers = Watchers(transform, storage)
        self._recorded: RecordedSlices | None = None
        if type(self.sampler) is SliceSampler and self.sampler.gives_windows and isinstance(storage, DatasetStorage):
            # Slices of recorded rows that are windows depend on the number of the sample alone.
            self._recorded = RecordedSlices(storage, self.sampler)
        # A ring of single rows that nobody else writes is the commonest by far, and written to without detours.
        self.plain_ring = type(writer) is RoundRobinWriter and storage.ndim == 1 and storage.lock() is None
        self._capacity = storage.capacity
        # One less than all: who counts rows must hear of each before it is overwritten.
        self._most_untold = min(_MOST_UNTOLD, self._capacity) - 1
        self._forks = forks()
        # How many rows were written, and changes made, when the sampler was told last; it begins by looking at all.
        self._told = self._own_told = 0
        self._changes = -1

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update({"generations": None, **kept, "_forks": forks()})

    @property
    def _listeners(self) -> list[Any]:
        """Who is told of writes beside the sampler."""
        parts = (self._watchers, self.generations)
        return [part for part in parts if part is not None]

    def _reset_listeners(self) -> None:
        for part in self._listeners:
            part.reset(self.storage)
        if self._own_episodes is not None:
            self._own_episodes.reset(self.storage)
            self._own_told = self.storage.written

    def settled(self) -> dict[str, Any] | None:
        """What the transforms are that keep numbers of all rows, for the batch that was drawn last."""
        return self._watchers.settled(self.storage)

    @property
    def _of_sampler(self) -> Any:
        """The episodes that the sampler keeps, if it does."""
        return getattr(self.sampler, "episodes", None)

    def _episodes_around(self) -> list[EpisodeIndex]:
        """The episodes that rows behind a drawn one must lie in; none where no field says where episodes end."""
        indexes = [index for index in (self._own_episodes, self._of_sampler) if isinstance(index, StorageEpisodes)]
        try:
            return [index.settled(self.storage) for index in indexes]
        except MissingFieldError:  # the transform raises it too, if it needs to know
            return []

    def shared(self) -> AbstractContextManager[Any]:
        """What to hold where other processes write the storage too."""
        return self.storage.lock() or _NOTHING

    # ------------------------------------------------------------------ writing

    def _check_process(self) -> None:
        """Raise ForkError where a forked child changes what it has a copy of."""
        if forks() != self._forks and self.storage.lock() is None:
            raise ForkError(
                "buffer: expected to be changed in the process that made it, found a forked child, which has a copy of "
                "its rows; give processes a MemmapStorage(capacity, path), or make the buffer in the child"
            )

    def check_write(self, rows: Any, priority: npt.NDArray[np.float64] | None) -> None:
        """Raise what a write of many rows would, as far as that is known without it."""
        self._check_process()
        self.check_writable()
        if priority is not None:
            self.check_update(None, priority)
        check_names(rows, self._reserved, one=False)
        check_rows(self.writer, self.storage, rows)

    def write(self, rows: Any, priority: npt.NDArray[np.float64] | None, *, one: bool) -> Slots:
        """Write rows, with the priorities they begin with if they have any; see ``Writer.write``."""
        self._check_process()
        if priority is not None:
            self.check_update(None, np.asarray(priority))
        check_names(rows, self._reserved, one=one)
        if self._changes != self.storage.changes or not one:
            self.sync()
            if not one and self._own_episodes is not None:
                leaf = rows if isinstance(rows, list) else next(iter(flatten(rows).values()), ())
                steps = len(leaf) if isinstance(leaf, list | tuple) or np.ndim(leaf) > 0 else 0
                if self.storage.written - self._own_told + steps * self.storage.num_envs > self.storage.capacity:
                    self._tell_own()
        slots, written, first = self.writer.write(self.storage, rows, one=one)
        if self.writer.ordered and len(slots) > len(written):
            self._tell_of_lost(rows, len(slots) - len(written))
        late = self.storage.written - self._told >= min(self._most_untold, self.storage.capacity - 1)
        if not self.writer.ordered or (first == self._told and not one):
            self._tell(Write(written, first, self._reader(written)))
        elif not one or priority is not None or late:
            self.sync()
        if priority is not None:
            kept = slots >= 0
            self._priority_sampler.update_priority(self.storage, slots[kept], priority[kept])
        return slots

    def append(self, row: Any) -> int:
        """Write one row to a plain ring, and return its slot."""
        if forks() != self._forks:
            self._check_process()
        storage = self.storage
        if type(row) is not dict or not self._reserved.isdisjoint(row):
            check_names(row, self._reserved, one=True)
        if self._changes != storage.changes:
            self.sync()
        first = storage.append(row, one=True)[0]
        if first - self._told >= self._most_untold:
            self.sync()
        return first % self._capacity

    def check_writable(self) -> None:
        """Raise ConfigError where rows must not be written."""
        if isinstance(self.writer, ImmutableWriter):
            self.writer.write(self.storage, None)

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite rows in place."""
        self._check_process()
        check_names(rows, self._reserved, one=False)
        self.sync()
        self._tell_own()
        self.storage.put(slots, rows)
        self._tell(Write(slots, None, self._reader(slots)))
        self.writer.reset(self.storage)

    def empty(self) -> None:
        """Forget all rows and priorities."""
        self.check_writable()
        self._check_process()
        self.storage.empty()
        self.sync()

    def refresh(self, sample: int) -> None:
        """Take later rows of a store over, before sample number ``sample`` is drawn."""
        storage: Any = self.storage
        if not hasattr(storage, "refresh"):
            raise no_store(f"{storage!r:.80}")
        self.sync()
        first, changes = len(storage), self._changes
        gone = storage.refresh()
        if changes != storage.changes:
            self._watchers.dropped(storage, gone or first)
            if gone:
                self._drop(gone)
        self.sync(sample)

    def _drop(self, rows: int) -> None:
        """Tell whoever keeps priorities that the first rows are gone."""
        if self._recorded is not None:
            self._recorded.forget()
        if not hasattr(self.sampler, "dropped"):
            return
        self.sampler.dropped(self.storage, rows)
        self._reset_listeners()
        self._changes, self._told = self.storage.changes, self.storage.written

    def sync(self, sample: int | None = None) -> None:
        """Tell the sampler of what was written, here or elsewhere, since it was told last; before this sample."""
        written = self.storage.written
        if self._changes != self.storage.changes:
            if self._recorded is not None:
                self._recorded.forget()
            self._changes, self._told = self.storage.changes, written
            for part in (self.sampler, self.writer):
                part.reset(self.storage)
            self._reset_listeners()
        elif written != self._told:
            n = min(written - self._told, len(self.storage))
            slots = ring_slots(written - n, n, self.storage.capacity)
            if self._recorded is not None:
                self._recorded.grew(sample)
            self._tell(Write(slots, written - n, self._reader(slots)))

    def _tell(self, write: Write) -> None:
        """Tell whoever keeps episodes or priorities of a write."""
        if write.slots.size:
            for part in (self.sampler, *self._listeners):
                tell(part, self.storage, write)
            if self._own_episodes is not None and write.first is None:
                tell(self._own_episodes, self.storage, write)
            elif self.storage.written - self._own_told >= self._most_untold:
                self._tell_own()
        self._changes, self._told = self.storage.changes, self.storage.written

    def _tell_own(self) -> None:
        """Tell the episodes that a transform needs of the rows since the last time: at a draw, or when many came."""
        written = self.storage.written
        if self._own_episodes is not None and written != self._own_told:
            n = min(written - self._own_told, len(self.storage))
            slots = ring_slots(written - n, n, self.storage.capacity)
            tell(self._own_episodes, self.storage, Write(slots, written - n, self._reader(slots)))
        self._own_told = written

    def _tell_of_lost(self, rows: Any, count: int) -> None:
        """Tell who keeps episodes of the first of many rows, which the last of them overwrote at once."""
        steps = count // self.storage.num_envs

        def read(key: FieldKey) -> npt.NDArray[Any]:
            many = [find(row, key) for row in rows[:steps]] if isinstance(rows, list) else find(rows, key)[:steps]
            values = host_array(many)
            return values.reshape(count, *values.shape[self.storage.ndim :])

        lost = Write(np.zeros(count, np.int64), self._told, read)
        for index in (self._of_sampler, self._own_episodes):
            if isinstance(index, StorageEpisodes):
                index.wrote(self.storage, lost)
        self._own_told += count

    def _reader(self, slots: Slots) -> Callable[[FieldKey], npt.NDArray[Any]]:
        return lambda key: self.storage.read(key, slots)

    # ------------------------------------------------------------------ sampling

    def draw(self, batch_size: int, key: Key, *, items: bool = False) -> tuple[Any, Draw]:
        """Choose rows and gather them; ``items``: a list of them, where the storage has rows as objects."""
        self.sync(key.index)
        if not len(self.storage):
            raise ConfigError("sample: expected rows, found an empty buffer")
        if self._recorded is not None and not items and self._recorded.is_for_rows():
            rows, draw = self._recorded.draw(batch_size, key)
        else:
            rows, draw = None, self.sampler.draw(self.storage, batch_size, key)
        slots = draw.index
        if self._looks:
            self._tell_own()
        if self._gather is not None:
            episodes = self._own_episodes or self._of_sampler
            draw.extra = {**draw.extra, **self._gather(self.storage, slots, episodes.settled(self.storage), key)}
        if self.generations is not None:
            draw.extra = {**draw.extra, "generation": self.generations.of(self.storage, slots)}
        if self._reach and slots.ndim == 1:
            slots, draw.mask = rows_behind(slots, self.storage, self._reach, self._episodes_around())
        if rows is not None:
            return rows, draw
        gather = self.storage.get if items else getattr(self.storage, "batch", self.storage.get)
        return gather(slots), draw

    def mark(self) -> dict[str, Any]:
        """Where the sampler's draws are, to go back there; draws replace what they change and change nothing else."""
        return dict(getattr(self.sampler, "__dict__", {}))

    def rewind(self, mark: dict[str, Any]) -> None:
        """Go back to where ``mark()`` was called, with only draws in between."""
        if mark:
            vars(self.sampler).clear()
            vars(self.sampler).update(mark)

    def update_priority(self, index: Any, priority: Any, generation: Any = None, *, check: bool = False) -> None:
        """Tell the sampler how important rows are, those of them that are still there; ``check``: only raise."""
        self._check_process()
        self.sync()
        slots, values = to_numpy(index), np.asarray(priority)
        if generation is not None:
            # What is negative never was an index, which the sampler says.
            present = alike(self.generation_of(slots), generation) | (slots < 0)
            slots, values = slots[present], priorities_like(slots, values)[present]
        if check:
            self.check_update(slots, values)
        else:
            self._priority_sampler.update_priority(self.storage, slots, values)

    def check_update(self, slots: Slots | None, priority: npt.NDArray[Any]) -> None:
        """Raise what an update of priorities would, if the sampler can tell; ``slots`` None: of rows to be written."""
        check = getattr(self._priority_sampler, "check_update", None)
        if check is not None:
            check(self.storage, slots, priority)

    def generation_of(self, index: Any) -> npt.NDArray[np.int64]:
        """How often the rows in these slots were replaced; -1 where there is none."""
        if self.generations is None:
            raise ConfigError("generation: expected a buffer made with generations=True, found one that counts none")
        self.sync()
        return self.generations.of(self.storage, index)

    def go_on(self, before: BufferCore, *, same_sampler: bool) -> None:
        """Take the place of other parts of the same storage, which were told of all that was written."""
        self._changes, self._told = before._changes, before._told
        self.generations = deepcopy(before.generations)
        if not same_sampler:
            self.sampler.reset(self.storage)
        for part in (self.writer, self._own_episodes, self._watchers):
            if part is not None:
                part.reset(self.storage)
        self._own_told = self._told
        before._tell_own()
        mine = self._of_sampler
        for index in (before._own_episodes, before._of_sampler):
            if isinstance(mine, StorageEpisodes) and isinstance(index, StorageEpisodes) and not same_sampler:
                mine.go_on(index, self.storage)

    @property
    def _priority_sampler(self) -> Any:
        if not self.prioritized:
            raise ConfigError(f"update_priority: expected a sampler that knows priorities, found {self.sampler!r}")
        return self.sampler

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """All there is; arrays may be views."""
        self.sync()
        index = self._of_sampler
        if hasattr(self.storage, "oldest_begins") and len(self.storage) and isinstance(index, StorageEpisodes):
            with suppress(SchemaError):  # what only this storage knows of episodes goes with the state
                index.settled(self.storage)
        return {
            "writer": shown(self.writer),
            "sampler": {"kind": type(self.sampler).__name__, "state": self.sampler.state_dict()},
            "storage": self.storage.state(),
            **self._watchers.state(),
            **({} if self.generations is None else {"generations": self.generations.state()}),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, or raise StateError and stay as before."""
        part_of({"writer": state}, "writer", {"writer": shown(self.writer)})
        sampler = part_of(state, "sampler", {"kind": type(self.sampler).__name__})
        self.sync()
        counted = self.generations is not None and "generations" in state
        saved = Generations.of_state(state["generations"]) if counted else None
        before, known = self.sampler.state_dict(), self._watchers.state()
        self.sampler.load_state_dict(part_of(sampler, "state", {}))
        try:
            self._watchers.load(state)
            self.storage.load(part_of(state, "storage", {}))
        except BaseException:
            self.sampler.load_state_dict(before)
            self._watchers.load(known)
            raise
        if self._recorded is not None:
            self._recorded.forget()
        self._changes, self._told = self.storage.changes, self.storage.written
        self.writer.reset(self.storage)
        self._reset_listeners()
        if saved is not None:
            self.generations = saved


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
