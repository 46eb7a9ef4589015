"""The episodes of a storage: the fields that mark where episodes end, and the episode index, updated by writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import ring_pieces, ring_slots
from mouse_core.episodes import Bools, EpisodeIndex, Int64s, step_begins
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError, StateError
from mouse_core.nested import as_text, key_of, path_of
from mouse_core.replay.protocols import END_KEYS, EPISODE, TRAJ_KEYS, FieldKey, Storage, Write

Read = Callable[[FieldKey], npt.NDArray[Any]]


class EpisodeFields(NamedTuple):
    """The fields that mark where episodes end.

    Attributes:
        ends: The fields that are nonzero in an episode's last row.
        ids: The field that numbers trajectories; None if no such field is used.
        numbers: Whether batches contain the values of ``ids`` as trajectory numbers; if not, a change of ``ids`` only
            marks the end of an episode.
        other_ends, other_ids: Known fields that the caller did not name. If these fields end an episode at a row where
            the named fields do not, a warning names the row; otherwise these fields are ignored.
    """

    ends: tuple[FieldKey, ...]
    ids: FieldKey | None
    numbers: bool
    other_ends: tuple[FieldKey, ...] = ()
    other_ids: FieldKey | None = None

    @property
    def cuts(self) -> bool:
        """Whether ``ids`` only mark where an episode ends."""
        return self.ids is not None and not self.numbers

    @property
    def others(self) -> bool:
        """Whether there are fields whose values are only compared with the other fields, for warnings."""
        return bool(self.other_ends) or self.other_ids is not None


class Marks(NamedTuple):
    """The values of the fields that mark where episodes end, one array ``[n, E]`` per field; None for a missing
    field.
    """

    ends: Bools | None
    ids: npt.NDArray[Any] | None
    other_ends: Bools | None = None
    other_ids: npt.NDArray[Any] | None = None

    def last(self) -> Marks:
        """The values of the last time step."""
        return Marks(*[None if values is None else values[-1:].copy() for values in self])

    def others(self) -> Marks:
        """The values of the fields that are only compared with the other fields, for warnings."""
        return Marks(self.other_ends, self.other_ids)

    def begins(self, before: Marks | None) -> Bools:
        """Whether each step begins an episode, ``[n, E]``; ``before`` contains the values of the previous time step."""
        end = None if before is None or before.ends is None or self.ends is None else before.ends[-1]
        identity = None if before is None or before.ids is None else before.ids[-1]
        return step_begins(self.ends, end, ids=self.ids, id_before=identity)


def find_fields(
    read: Read, traj_key: FieldKey | None, end_keys: tuple[FieldKey, ...], done: FieldKey = "done"
) -> EpisodeFields:
    """Return the fields that mark where episodes end: the fields that the caller names, or all known fields if the
    caller names none.

    Args:
        read: A function that takes a field's name and returns the field's values.
        traj_key, end_keys: The named fields.
        done: The field of done codes. If it is not ``"done"``, ``END_KEYS`` are not used, but this field and the fields
            "terminated" and "truncated" on the same level of nesting.

    Raises:
        MissingFieldError: The caller names no field, and the rows have no field of ``END_KEYS`` or ``TRAJ_KEYS``.
    """
    ends = _ends_there(read, done)
    there = [key for key in TRAJ_KEYS if _has(read, key)]
    usable = next((key for key in there if _numbers_trajectories(read(key))), None)
    if end_keys or traj_key is not None:
        others = tuple(key for key in ends if key not in end_keys)
        return EpisodeFields(end_keys, traj_key, True, others, usable if traj_key is None else None)
    if usable == EPISODE:  # the store knows what its codes of done mean
        return EpisodeFields(tuple(key for key in ends if key != "done"), usable, False)
    if ends:
        return EpisodeFields(ends, usable, False)
    if there:
        return EpisodeFields((), there[0], True)
    names = [key for group in (*END_KEYS, TRAJ_KEYS) for key in group if key != EPISODE]
    raise MissingFieldError(
        f"slices: expected end_key=, truncated_key= or traj_key=, or one of the fields {names}; found none"
    )


def _ends_there(read: Read, done: FieldKey) -> tuple[FieldKey, ...]:
    """Return the known fields that are nonzero in an episode's last row: fields under ``next``, or fields at the root
    if there are none under ``next``.
    """
    groups = END_KEYS
    if done != "done":
        mine = (done, *(key_of((*path_of(done)[:-1], name)) for name in ("terminated", "truncated")))
        groups = (tuple(("next", *path_of(key)) for key in mine), mine)
    found = (tuple(key for key in group if _has(read, key)) for group in groups)
    return next(filter(None, found), ())


def _contradiction(fields: EpisodeFields, marks: Marks, before: Marks | None) -> tuple[int, str] | None:
    """Return the first step at which the fields disagree on whether an episode begins, and a text that names these
    fields.
    """
    if fields.others:
        other = None if before is None else before.others()
        missed = marks.others().begins(other) & ~marks.begins(before)
        names = [*fields.other_ends, *([] if fields.other_ids is None else [fields.other_ids])]
        text = (
            "which end_key= and traj_key= do not name, so slices can cross this row; without end_key= and "
            "traj_key=, all of these fields are used"
        )
    elif fields.cuts and marks.ends is not None:
        missed = Marks(marks.ends, None).begins(before) & ~Marks(None, marks.ids).begins(before)
        names = [*fields.ends]
        text = (
            f"but {fields.ids!r} does not change; both mark episode ends unless "
            "end_key= or traj_key= selects one of them"
        )
    else:
        return None
    names = ["the store" if name == EPISODE else name for name in names]
    return (int(missed.reshape(-1).argmax()), f"according to {names}, {text}") if missed.any() else None


def _has(read: Read, key: FieldKey) -> bool:
    try:
        read(key)
    except SchemaError:
        return False
    return True


def marks_of(fields: EpisodeFields, read: Read, num_envs: int) -> Marks:
    """Return the values of the fields in the given rows."""

    def ends(keys: tuple[FieldKey, ...]) -> Bools | None:
        flags = [_one_a_row(key, read(key)) != 0 for key in keys]
        return np.logical_or.reduce(flags).reshape(-1, num_envs) if flags else None

    def ids(key: FieldKey | None) -> npt.NDArray[Any] | None:
        return None if key is None else _one_a_row(key, read(key), "biufUS").reshape(-1, num_envs)

    return Marks(ends(fields.ends), ids(fields.ids), ends(fields.other_ends), ids(fields.other_ids))


def _numbers_trajectories(values: npt.NDArray[Any]) -> bool:
    """Whether a field has one integer or one text for every row, so that it can number trajectories. Called for fields
    that the caller did not name.
    """
    values = as_text(np.asarray(values))
    if values.size != len(values) or values.dtype.kind not in "iufUS":
        return False
    return values.dtype.kind != "f" or bool((np.floor(values) == values).all())


def _one_a_row(key: FieldKey, values: npt.NDArray[Any], kinds: str = "biuf") -> npt.NDArray[Any]:
    values = as_text(np.asarray(values))
    if values.dtype.kind not in kinds:
        raise SchemaError(f"slices: {key!r}: expected numbers, found {values.dtype}")
    if values.size != len(values):
        raise SchemaError(
            f"episodes: {key!r}: expected one value per row, found rows of shape {list(values.shape[1:])}; if each "
            "row is a complete trajectory, use only RandomTimeCrop, BurnIn and ReturnsToGo, because all other "
            "transforms need rows that are single steps; store the ends of agents in a field 'agent_done'"
        )
    return values.reshape(-1)


def _as_ids(key: FieldKey | None, values: npt.NDArray[Any]) -> Int64s:
    if values.dtype.kind not in "biuf":
        raise SchemaError(f"slices: {key!r}: expected numbers, found {values.dtype}")
    ids: Int64s = values.astype(np.int64)
    if values.dtype.kind in "fu" and (ids != values).any():
        raise SchemaError(f"slices: {key!r}: expected integers, found {values[ids != values][0]}")
    return ids


# Rows that a scan reads at a time.
_SCANNED = 1 << 20


class StorageEpisodes:
    """The episode index of a ring of rows, updated with each write.

    Args:
        traj_key: The field with the number of each row's trajectory: an episode ends where this number changes.
        end_key: The field that is nonzero in the last row of an episode.
        truncated_key: A second field that is nonzero in the last row of an episode.
        done: The field that is used instead of ``"done"`` if none of the three arguments above is given.

    If none of the three arguments is given, all known fields of the rows count: ``("next", "done")``, ``("next",
    "terminated")`` and ``("next", "truncated")``, or, if the rows have none of these, ``"done"``, ``"terminated"`` and
    ``"truncated"``. The first existing field of ``TRAJ_KEYS`` also counts, as the number of the trajectory. One warning
    is raised if the fields contradict each other, or if the named fields miss an end that another field marks.
    """

    def __init__(
        self,
        traj_key: FieldKey | None = None,
        end_key: FieldKey | None = None,
        truncated_key: FieldKey | None = None,
        *,
        done: FieldKey = "done",
    ) -> None:
        self._done = done
        self.keys = (traj_key, end_key, truncated_key)
        self._found: EpisodeFields | None = None
        self._episodes: EpisodeIndex | None = None
        self._is_whole = False
        self._changes = -1  # ``storage.changes`` that the index is of
        self._before: Marks | None = None  # marks of the last indexed time step, if they are needed
        self._has_warned = False
        self._rows_looked_at = 0  # for rows of alternating environments

    def is_like(self, other: object) -> bool:
        """Whether another index has the same arguments and the same rows as this index, and therefore the same
        episodes.
        """
        return isinstance(other, StorageEpisodes) and (self.keys, self._done) == (other.keys, other._done)

    def wrote(self, storage: Storage, write: Write) -> None:
        """Update the index with a write, in time proportional to the number of written rows."""
        episodes = self._episodes
        if not self._is_whole or not len(write.slots):
            return
        try:
            if write.first is None:
                self._change(write)
                self._is_of(storage)
                return
            if episodes is None and not write.first:
                episodes = self._episodes = EpisodeIndex(storage.num_envs, storage.capacity // storage.num_envs)
            if episodes is None or write.first != episodes.end * episodes.num_envs:
                self._is_whole = False  # rows were written and overwritten without a report
                return
            episodes.steps = storage.capacity // episodes.num_envs  # the capacity grows with the rows of a store
            fields = self._fields(write.read)
            if self._before is None and (fields.cuts or fields.others):
                self._before = self._read_before(storage, write.first, fields)
            self._extend(episodes, fields, marks_of(fields, write.read, episodes.num_envs))
            self._is_of(storage)
        except SchemaError:
            # The rows are already written, so raise no error here: the next draw reads them again and raises it.
            self._is_whole = False

    def resume(self, storage: Storage) -> None:
        """Read the episode fields of the newest time step of a loaded storage now, because a later write of a full ring
        would overwrite this time step. If the storage has no rows, indexing begins with the first written row.
        """
        if not storage.written and self._episodes is None:
            self._is_whole = True
        if not self._is_whole or not len(storage):
            return
        slots = ring_slots(storage.written - storage.num_envs, storage.num_envs, storage.capacity)
        try:
            fields = self._fields(lambda key: storage.read(key, slots))
            self._before = self._read_before(storage, storage.written, fields) if fields.cuts or fields.others else None
            self._is_of(storage)
        except SchemaError:
            self._is_whole = False  # the next draw raises it

    def reset(self, storage: Storage) -> None:
        """Mark the index as stale; the next draw rebuilds it."""
        self._episodes, self._is_whole, self._found = None, not len(storage), None
        self._before = None

    def settled(self, storage: Storage) -> EpisodeIndex:
        """Return the index of the episodes of all rows.

        Raises:
            ConfigError: The storage has no rows.
            MissingFieldError: The rows have none of the fields that mark where episodes end.
            SchemaError: A field that marks ends has several values for each row, or trajectory numbers are not
                integers.
        """
        if not len(storage):
            raise ConfigError("sample: expected rows, found an empty buffer")
        episodes = self._episodes
        if not self._is_whole or episodes is None or episodes.end * episodes.num_envs != storage.written:
            episodes = self._scan(storage)
            self._episodes, self._is_whole = episodes, True
            self._is_of(storage)
        return episodes

    def recurring_ids(self, storage: Storage) -> FieldKey | None:
        """Return the field in which a trajectory number occurs again after other numbers, as happens if rows of several
        environments alternate; None if there is no such field.
        """
        fields, episodes = self._found, self._episodes
        if fields is None or fields.ids is None or episodes is None or storage.ndim != 1:
            return None
        ids = marks_of(fields, lambda key: storage.read(key, slice(0, len(storage))), 1).ids
        if ids is None:
            return None
        ids = np.roll(ids[:, 0], -(episodes.begin % episodes.steps) if len(storage) == episodes.steps else 0)
        heads = ids[np.concatenate([[True], ids[1:] != ids[:-1]])]
        return fields.ids if len(np.unique(heads)) < len(heads) else None

    def warn_of_alternating_rows(self, storage: Storage) -> None:
        """Warn if all slices are too short because rows of several environments alternate.

        The check reads all rows, so it is repeated only when the number of rows has doubled.
        """
        if len(storage) < 2 * self._rows_looked_at:
            return
        self._rows_looked_at = len(storage)
        again = self.recurring_ids(storage)
        if again is not None:
            warnings.warn(
                f"slices: expected episodes longer than a slice; {recurrence_hint(again)}", UserWarning, stacklevel=2
            )

    def shown(self) -> str:
        """Return the named keys for the ``repr`` of a sampler."""
        names = ("traj_key", "end_key", "truncated_key")
        return ", ".join(f"{name}={key!r}" for name, key in zip(names, self.keys, strict=True))

    # ------------------------------------------------------------------ reading

    def _extend(self, episodes: EpisodeIndex, fields: EpisodeFields, marks: Marks) -> None:
        """Add the time steps after the last indexed time step to the index."""
        before = self._before
        if fields.cuts or fields.others:
            self._before = marks.last()
            found = None if self._has_warned else _contradiction(fields, marks, before)
            if found is not None:
                self._has_warned = True
                row = episodes.end * episodes.num_envs + found[0]
                warnings.warn(f"slices: row {row} begins an episode {found[1]}", UserWarning, stacklevel=2)
        ends, ids = marks.ends, marks.ids
        if ids is not None and not fields.numbers:
            new = Marks(None, ids).begins(before)
            episodes.cut(new[0])
            ends = np.zeros(ids.shape, np.bool_) if ends is None else ends.copy()
            ends[:-1] |= new[1:]
            ids = None
        episodes.extend(ends, None if ids is None else _as_ids(fields.ids, ids))

    def _fields(self, read: Read) -> EpisodeFields:
        if self._found is None:
            traj_key, *given = self.keys
            self._found = find_fields(read, traj_key, tuple(key for key in given if key is not None), self._done)
        return self._found

    def _scan(self, storage: Storage) -> EpisodeIndex:
        num_envs = storage.num_envs
        steps, alive, end = storage.capacity // num_envs, len(storage) // num_envs, storage.written // num_envs
        known = self._episodes
        next_ids = known.next_ids if known is not None and known.num_envs == num_envs else None
        episodes = EpisodeIndex(num_envs, steps, first=end - alive, next_ids=next_ids)
        self._found = self._before = None
        step, chunk = end - alive, max(1, _SCANNED // num_envs)
        while step < end:
            begin, _, n = next(ring_pieces(step, min(end - step, chunk), steps))
            slots = slice(begin * num_envs, (begin + n) * num_envs)
            read: Read = lambda key, slots=slots: storage.read(key, slots)  # type: ignore[misc] # noqa: E731
            fields = self._fields(read)
            self._extend(episodes, fields, marks_of(fields, read, num_envs))
            step += n
        begins = self._known_begins(storage, episodes)
        if begins and alive == steps:
            episodes.begin_earlier(np.minimum.reduce(begins))
        return episodes

    def _is_of(self, storage: Storage) -> None:
        """Record that the index is up to date, so that other indexes of the same rows can copy from this index."""
        self._changes = storage.changes
        known: set[Any] = getattr(storage, "indexes", set())
        known.add(self)

    def _known_begins(self, storage: Storage, episodes: EpisodeIndex) -> list[Int64s]:
        """Return the first step of each environment's oldest episode, in arrays ``[E]``. The steps are copied from
        other indexes of the same rows, and from this index if it became stale because rows were changed in place.
        """
        fields, oldest, num_envs = self._found, episodes.begin, episodes.num_envs
        if fields is None:
            return []
        known = [] if fields.ids is not None else [self._episodes]
        for index in getattr(storage, "indexes", ()):
            theirs, is_current = index._found, index._is_whole and index._changes == storage.changes
            if is_current and theirs is not None and (theirs.ends, theirs.ids) == (fields.ends, fields.ids):
                known.append(index._episodes)
        found: list[Int64s] = [
            one.episode_of(np.full(num_envs, oldest), np.arange(num_envs))[0]
            for one in known
            if one is not None and one.num_envs == num_envs and one.begin <= oldest < one.end
        ]
        read = getattr(storage, "overwritten", None)
        if read is not None:
            with suppress(SchemaError):
                new = marks_of(fields, read, num_envs).begins(None)
                new[0] = True
                found.append(oldest - new[::-1].argmax(axis=0))
        return found

    def _read_before(self, storage: Storage, first: int, fields: EpisodeFields) -> Marks | None:
        """Return the values of the episode fields at the time step before row ``first``, if this time step still
        exists.
        """
        num_envs = storage.num_envs
        if first < num_envs or storage.written - (first - num_envs) > storage.capacity:
            return None
        slots = ring_slots(first - num_envs, num_envs, storage.capacity)
        return marks_of(fields, lambda key: storage.read(key, slots), num_envs)

    def _change(self, write: Write) -> None:
        """After rows were changed in place, mark the index as stale if the ends of episodes may have changed."""
        episodes, fields = self._episodes, self._fields(write.read)
        marks, self._before = marks_of(fields, write.read, 1), None
        if episodes is None or (marks.ids is not None and (marks.ends is not None or fields.cuts)):
            self._is_whole = False  # of ids and ends together, it is unknown which of both began an episode
            return
        step, env = episodes.steps_of(write.slots)
        if marks.ids is not None:
            same = _as_ids(fields.ids, marks.ids)[:, 0] == episodes.episode_of(step, env)[2]
        else:
            same = marks.ends is None or marks.ends[:, 0] == episodes.ends(step, env)
        self._is_whole = bool(np.all(same))

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Int64s]:
        """Return the state of the index: arrays ``[n]`` for n episodes. The state is empty if there are no rows."""
        episodes = self._episodes
        if self._is_whole and episodes is not None and episodes.end > episodes.begin:
            return episodes.state()
        nothing = {name: np.zeros(0, np.int64) for name in STATE}
        return nothing if episodes is None else nothing | {"next_ids": episodes.next_ids.copy()}

    def load(self, state: Mapping[str, Int64s]) -> None:
        """Restore ``state``. If the state is empty, the next draw builds the index from the rows.

        Raises:
            StateError: The state is damaged; the index is unchanged.
        """
        whole = len(state["steps"]) > 0
        try:
            if whole:
                episodes: EpisodeIndex | None = EpisodeIndex.of_state(state)
            else:
                ids = state["next_ids"].astype(np.int64)
                episodes = EpisodeIndex(len(ids), 1, next_ids=ids) if len(ids) else None
        except (ValueError, IndexError) as error:
            raise StateError(f"sampler: {error}") from error
        self._episodes, self._is_whole, self._found = episodes, whole, None
        self._before = None


STATE = ("steps", "counts", "begins", "ids", "ended", "next_ids")
"""The names of the arrays of a state."""


def recurrence_hint(key: FieldKey) -> str:
    """Return the hint of an error or warning about a field whose trajectory numbers recur after other numbers."""
    return (
        f"values of {key!r} recur after other values: do rows of several environments "
        "alternate? A storage with ndim=2 takes "
        "[time, env] and keeps environments apart"
    )
