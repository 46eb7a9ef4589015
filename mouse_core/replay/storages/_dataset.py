"""A read-only storage over recorded data, and slices of recorded data as windows of a ``BatchSource``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.batches.source import BatchSource
from mouse_core.episodes import Windows
from mouse_core.errors import ConfigError, DataError, MissingFieldError, StateError
from mouse_core.metadata import joined, read_metadata
from mouse_core.randomness import Key, Purpose
from mouse_core.replay.protocols import EPISODE, Draw, FieldKey, Slots, Storage, Write
from mouse_core.replay.samplers.slices import SliceSampler
from mouse_core.replay.storages.array import check_slots
from mouse_core.sampling import Plan, RandomWindows
from mouse_core.sampling.plan import MASK
from mouse_core.spec import Alignment
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

Int64s = npt.NDArray[np.int64]

# Number of cached sources of windows.
_SOURCES_KEPT = 8
# The key of plans without augmentation; no number is drawn from it.
_KEY = Key(0, Purpose.REPLAY, 0)


class DatasetStorage:
    """A read-only storage over the rows of a snapshot; the rows are not copied. Rows have named fields in the dtypes in
    which the snapshot delivers them.

    Args:
        snapshot: The rows.
        store: The store of the snapshot, to which rows can be added; None if there is no store.
    """

    ndim = 1
    num_envs = 1
    writable = False

    def __init__(self, snapshot: Snapshot, store: Store | None = None) -> None:
        if not snapshot.num_rows:
            raise ConfigError("storage: expected rows, found an empty store")
        self.snapshot = snapshot
        self.changes = 0
        self._store = store
        self._sources: dict[int, BatchSource] = {}

    def __repr__(self) -> str:
        return f"DatasetStorage({len(self)} rows, fields={list(self.snapshot.readers)})"

    def __len__(self) -> int:
        return self.snapshot.num_rows

    @property
    def capacity(self) -> int:
        """The number of rows."""
        return self.snapshot.num_rows

    written = capacity

    @property
    def alignment(self) -> Alignment:
        """The alignment of the store."""
        return self.snapshot.alignment

    @property
    def grows(self) -> bool:
        """Whether the storage reads a store, to which rows can be added."""
        return self._store is not None

    def refresh(self) -> int:
        """Include all rows that the store has at the time of the call. If earlier rows do not keep their slots,
        ``changes`` increases.

        Returns:
            The number of oldest rows that the store dropped if the remaining rows now lie in the slots from 0 on;
            otherwise 0.

        Raises:
            ConfigError: The storage is not connected to a ``DatasetStore``.
        """
        if self._store is None:
            raise no_store_error("a snapshot, a dataset or a copy of a buffer")
        before, after = self.snapshot, self._store.snapshot()
        self._become(after)
        gone = _dropped(before, after)
        return gone if 0 < gone < before.num_rows <= gone + after.num_rows and before.spec == after.spec else 0

    def _become(self, snapshot: Snapshot) -> None:
        if snapshot is self.snapshot:
            return
        if snapshot.begins_as(self.snapshot) and snapshot.spec == self.snapshot.spec:
            self._sources = {
                length: source.with_snapshot(snapshot, epoch_start=0) for length, source in self._sources.items()
            }
        else:
            self.changes += 1
            self._sources = {}
        self.snapshot = snapshot

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Always raise ConfigError, because the storage is read-only."""
        raise ConfigError("write: expected a writable storage, found recorded data, which is read-only")

    def put(self, slots: Slots, rows: Any) -> None:
        """Always raise ConfigError, because the storage is read-only."""
        self.append(rows)

    def empty(self) -> None:
        """Always raise ConfigError, because the storage is read-only."""
        self.append(None)

    def get(self, slots: Slots) -> dict[str, npt.NDArray[Any]]:
        """Return the rows in ``slots`` in new memory; see ``Storage.get``."""
        check_slots(slots, len(self))
        if not slots.size:
            return {name: self._values(name, slots) for name in self.snapshot.readers}
        steps = slots.shape[1] if slots.ndim == 2 else 1
        if 1 < steps <= len(self):
            # Slices are read as windows from their first row on. If a slice repeats rows, as after the end of its
            # episode, they are copied from the window: the slots 7, 8, 9, 9 are its steps 0, 1, 2, 2.
            first = np.minimum(slots[:, 0], len(self) - steps)
            taken = slots - first[:, None]
            if int(taken.view(np.uint64).max()) < steps:
                # the damaged row may not be among the requested rows, so rows are then read one by one
                with suppress(DataError):
                    found = self._read(first, steps)
                    slices, places = np.nonzero(taken != np.arange(steps))
                    if len(slices):
                        for values in found.values():
                            values[slices, places] = values[slices, taken[slices, places]]
                    return found
        found = self._read(slots.reshape(-1), 1)
        return {name: values.reshape(*slots.shape, *values.shape[2:]) for name, values in found.items()}

    def _read(self, starts: Slots, length: int) -> dict[str, npt.NDArray[Any]]:
        """Return windows of ``length`` rows, ``[n, length, ...]`` in every field, in new memory."""
        source = self._sources.get(length)
        if source is None:
            if len(self._sources) >= _SOURCES_KEPT:
                self._sources.clear()
            source = self._sources[length] = BatchSource(self.snapshot, sampling=RandomWindows(length, 1))
        return source.gather(Plan(starts, length, _KEY, len(starts)))

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """Return one field of the rows in ``slots``; see ``Storage.read``."""
        rows = np.arange(len(self), dtype=np.int64)[slots] if isinstance(slots, slice) else slots
        if key == EPISODE and not {"done", "time"}.isdisjoint(self.snapshot.readers):
            return self.snapshot.episode_starts.searchsorted(rows, side="right") - 1
        if not isinstance(key, str) or key not in self.snapshot.readers:
            raise MissingFieldError(f"rows: expected a field {key!r}, found {list(self.snapshot.readers)}")
        return self._values(key, rows)

    def _values(self, name: str, slots: Slots) -> npt.NDArray[Any]:
        reader = self.snapshot.readers[name]
        if not slots.size:
            return np.empty((*slots.shape, *reader.spec.shape), reader.spec.dtype)
        # Consecutive rows are read as one window, other rows as windows of one row.
        follow = slots.ndim > 0 and bool((np.diff(slots, axis=-1) == 1).all())
        starts, length = (slots[..., 0], slots.shape[-1]) if follow else (slots, 1)
        found = self.snapshot.stored(name, starts.reshape(-1), length, reader.spec.dtype)
        return found.reshape(*slots.shape, *found.shape[1:])

    def __getstate__(self) -> dict[str, Any]:
        # A pickle does not contain the store, only the present rows.
        return {**self.__dict__, "_sources": {}, "_store": None}

    def lock(self) -> None:
        """Return None, because no process writes recorded rows."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the number of rows and the fingerprint of the rows; the state does not contain the rows."""
        return _state_of(self.snapshot)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the snapshot that ``state`` describes; it consists of the first rows of the current snapshot or of
        its store.
        """
        if not isinstance(state, Mapping) or state.get("kind") != "dataset":
            raise StateError(f"storage: expected the state of a dataset, found {state!r:.200}")
        snapshot = self._of_rows(state.get("size"))
        if dict(state) != _state_of(snapshot):
            raise StateError(
                "storage: expected the state of these rows, found a state with the same number of rows but other values"
            )
        self._become(snapshot)

    def _of_rows(self, rows: Any) -> Snapshot:
        """Return a snapshot of the first ``rows`` rows of the store or of the snapshot."""
        there = max(len(self), 0 if self._store is None else len(self._store))
        if not is_whole(rows) or not 1 <= rows <= there:
            raise StateError(f"storage: expected a state of 1 to {there} rows, found {rows!r:.80}")
        if rows > len(self) and self._store is not None:
            return self._store.snapshot(rows)
        return self.snapshot if rows == len(self) else self.snapshot.of_rows(rows)


def _state_of(snapshot: Snapshot) -> dict[str, Any]:
    return {"kind": "dataset", "size": snapshot.num_rows, "fingerprint": snapshot.fingerprint}


def _dropped(before: Snapshot, after: Snapshot) -> int:
    """Return how many of the first rows of an earlier snapshot are missing in a later snapshot of the same folder; 0 if
    this number is unknown.

    Example: if the earlier snapshot begins with row 40 and the later snapshot with row 70, the result is 30.
    """
    starts = []
    for segments in (before.segments, after.segments):
        places = [segment.place for segment in segments]
        ends = [one and (one[0], one[1] + segment.num_rows) for one, segment in zip(places, segments, strict=True)]
        if not places or places[1:] != ends[:-1]:
            return 0
        starts.append(places[0])
    was, now = starts
    return now[1] - was[1] if was and now and was[0] is now[0] else 0


def no_store_error(found: str) -> ConfigError:
    """Return the error for a buffer without a store."""
    return ConfigError(f"refresh: expected a buffer over a DatasetStore, found a buffer over {found}")


def as_storage(storage: Any) -> Storage:
    """Return a storage unchanged; wrap a store, a snapshot, a dataset or a table in a ``DatasetStorage`` of the same
    alignment.

    Raises:
        ConfigError: The argument has another type.
    """
    if isinstance(storage, Storage):
        return storage
    if isinstance(storage, Snapshot):
        return DatasetStorage(storage)
    if isinstance(storage, Store):
        return DatasetStorage(storage.snapshot(), storage)
    try:
        parts = storage if isinstance(storage, Mapping) else {"dataset": storage}
        metadata = joined((str(name), read_metadata(part, label=str(name))) for name, part in parts.items())
        return DatasetStorage(DatasetStore(alignment=metadata.alignment).from_dataset(storage).snapshot())
    except ConfigError as error:
        raise ConfigError(f"storage: expected a Storage, a DatasetStore or a dataset, found {storage!r:.80}") from error


# ---------------------------------------------------------------------- slices

# Number of cached blocks of windows that were planned together; number of steps that are planned at once.
_BLOCKS_KEPT, _STEPS_TOGETHER = 4, 1 << 14


class RecordedSlices:
    """Slices of recorded rows, read through a ``BatchSource`` whose batch ``i`` is the buffer's sample ``i``.

    Args:
        storage: The rows of a snapshot, ``storage.snapshot``.
        sampler: The sampler that draws the first rows of the slices.
    """

    def __init__(self, storage: Any, sampler: SliceSampler) -> None:
        self._storage = storage
        self._sampler = sampler
        self._sources: dict[tuple[Any, ...], BatchSource] = {}
        # Sources of an earlier snapshot, replaced when they are next used.
        self._before: dict[tuple[Any, ...], BatchSource] = {}
        self._known_whole: bool | None = None

    @property
    def _is_whole(self) -> bool:
        """Whether every slice has all its steps."""
        if self._known_whole is None:
            self._known_whole = self._sampler.is_whole(self._storage)
        return self._known_whole

    def is_for_rows(self) -> bool:
        """Whether batches of a source can be used as samples; False for padded slices of rows with a field "mask".

        Raises:
            ConfigError, MissingFieldError, SchemaError: See the sampler's ``draw``.
        """
        return self._is_whole or MASK not in self._storage.snapshot.readers

    def draw(self, batch_size: int, key: Key) -> tuple[dict[str, npt.NDArray[Any]], Draw]:
        """Return the rows of sample ``key.index``, and the draw.

        Raises:
            ConfigError, MissingFieldError, SchemaError: See the sampler's ``draw``.
        """
        source = self._source(batch_size, key)
        slices: Any = source.sampler
        try:
            rows = source[key.index]
        except DataError:
            if self._is_whole:
                raise
            draw = slices.draw(key)  # the damaged row may lie after the end of an episode
            return self._storage.get(draw.index), draw
        if not self._is_whole:
            del rows[MASK]  # which is in the draw
        return rows, slices.draw(key)

    def _source(self, batch_size: int, key: Key) -> BatchSource:
        """Return a source that contains the samples from index ``key.index`` on."""
        name = (batch_size, key.seed, self._sampler.weighting)
        source = self._sources.get(name)
        if source is None:
            if len(self._sources) >= _SOURCES_KEPT:
                self._sources.clear()
            kind, before = _Slices if self._is_whole else _PaddedSlices, self._before.pop(name, None)
            if before is None or type(before.sampler) is not kind:
                windows = kind(self._storage, self._sampler, batch_size)
                source = BatchSource(self._storage.snapshot, sampling=windows, seed=key.seed)
            else:
                before.sampler.forget()
                source = before.with_snapshot(self._storage.snapshot, epoch_start=key.index)
            self._sources[name] = source
        return source

    def wrote(self, storage: Storage, write: Write) -> None:
        """Include new rows of the store in the next samples."""
        self._before |= self._sources
        self._sources, self._known_whole = {}, None

    def reset(self, storage: Storage) -> None:
        """Discard all planned samples; each sample is planned again when it is drawn."""
        self._sources, self._before, self._known_whole = {}, {}, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}, "_before": {}}


class _Slices:
    """A ``WindowSampler`` whose windows are the slices of a buffer's samples."""

    def __init__(self, storage: Storage, sampler: SliceSampler, batch_size: int) -> None:
        self.sequence_length, self.batch_size = sampler.sequence_length, batch_size
        self._storage, self._sampler = storage, sampler
        self._planned: deque[tuple[range, Windows]] = deque(maxlen=_BLOCKS_KEPT)
        self._draws: dict[int, Draw] = {}

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return 1, because the stream has no epochs."""
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
        """Discard all planned samples; called when the store has new rows."""
        self._planned.clear()
        self._draws = {}

    def draw(self, key: Key) -> Draw:
        """Return the draw of sample ``key.index``."""
        if key.index not in self._draws:
            planned = next((block for block in self._planned if key.index in block[0]), None)
            self._draws = self._draws_from(key.index, *(planned or self._plan(key.seed, key.index, 1)))
        return self._draws.pop(key.index)

    def _draws_from(self, first: int, samples: range, windows: Windows) -> dict[int, Draw]:
        """Return the draws of the samples ``samples`` from index ``first`` on; up to ``_STEPS_TOGETHER`` steps are
        planned at once.
        """
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
    """A ``PaddedSampler`` of slices that can extend beyond the end of their episode."""

    fill = None  # batches are padded when they are assembled

    def lengths(self, starts: Int64s, snapshot: Snapshot) -> Int64s:
        """See ``PaddedSampler.lengths``."""
        episodes = self._sampler.episodes.settled(self._storage)
        _, ends, _ = episodes.episode_of(starts)
        lengths: Int64s = np.minimum(ends - starts, self.sequence_length)
        return lengths
