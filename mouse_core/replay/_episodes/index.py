"""Keeping the episodes of a storage: which fields say where they end, and what of a write matters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import ring_pieces, ring_slots
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError, StateError
from mouse_core.nested import as_text, key_of, path_of
from mouse_core.replay._episodes.ring import EpisodeRing
from mouse_core.replay.protocols import END_KEYS, EPISODE, TRAJ_KEYS, FieldKey, Storage, Write
from mouse_core.sampling.episode_table import Bools, Int64s

Read = Callable[[FieldKey], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Keys:
    """Which fields say where episodes end.

    Args:
        ends: Those that are not 0 in an episode's last row.
        ids: The one that numbers trajectories, if there is one.
        numbers: Whether ``ids`` are the numbers of episodes; otherwise they only say where one ends.
        other_ends, other_ids: Fields that were found beside those that were named: they decide nothing, and where they
            say that an episode ends, the others should.
    """

    ends: tuple[FieldKey, ...]
    ids: FieldKey | None
    numbers: bool
    other_ends: tuple[FieldKey, ...] = ()
    other_ids: FieldKey | None = None

    @property
    def cuts(self) -> bool:
        """Whether trajectories' numbers say where an episode ends, and are not its number."""
        return self.ids is not None and not self.numbers

    @property
    def others(self) -> bool:
        """Whether there are fields that decide nothing."""
        return bool(self.other_ends) or self.other_ids is not None


@dataclass(slots=True)
class EpisodeKeys:
    """What the fields of some rows say, ``[n, E]`` each; None where there is no such field."""

    ends: Bools | None
    ids: npt.NDArray[Any] | None
    other_ends: Bools | None
    other_ids: npt.NDArray[Any] | None

    def last(self) -> EpisodeKeys:
        """Of the last time step alone."""
        parts = (self.ends, self.ids, self.other_ends, self.other_ids)
        return EpisodeKeys(*[None if part is None else part[-1:].copy() for part in parts])


def find_keys(read: Read, traj_key: FieldKey | None, end_keys: tuple[FieldKey, ...], done: FieldKey = "done") -> Keys:
    """Which fields say where episodes end: those that are named, or else all that are there.

    Args:
        read: Gives their values.
        traj_key, end_keys: Those that are named.
        done: What stands where ``"done"`` does in ``END_KEYS``; "terminated" and "truncated" stand beside it.

    Raises:
        MissingFieldError: None is named, and none is there.
    """
    ends = _ends_there(read, done)
    there = [key for key in TRAJ_KEYS if _has(read, key)]
    usable = next((key for key in there if _numbers_trajectories(read(key))), None)
    if end_keys or traj_key is not None:
        others = tuple(key for key in ends if key not in end_keys)
        return Keys(end_keys, traj_key, True, others, usable if traj_key is None else None)
    if usable == EPISODE:  # the store knows what its codes of done mean
        ends = tuple(key for key in ends if key != "done")
        return Keys(ends, usable, False)
    if ends:
        return Keys(ends, usable, False)
    if there:
        return Keys((), there[0], True)
    names = [key for group in (*END_KEYS, TRAJ_KEYS) for key in group if key != EPISODE]
    raise MissingFieldError(
        f"slices: expected end_key=, truncated_key= or traj_key=, or one of the fields {names}; found none"
    )


def _ends_there(read: Read, done: FieldKey) -> tuple[FieldKey, ...]:
    """The fields that are not 0 in an episode's last row: those under ``next`` that are there, or those at the root."""
    groups = END_KEYS
    if done != "done":
        mine = (done, *(key_of((*path_of(done)[:-1], name)) for name in ("terminated", "truncated")))
        groups = (tuple(("next", *path_of(key)) for key in mine), mine)
    found = (tuple(key for key in group if _has(read, key)) for group in groups)
    return next(filter(None, found), ())


def contradiction(keys: Keys, marks: EpisodeKeys, before: EpisodeKeys | None) -> tuple[int, str] | None:
    """The first of some rows at which fields contradict each other about the begin of an episode, and how.

    Args:
        keys: The fields.
        marks: What they say of these rows.
        before: And of the time step before, if that is known.
    """
    if keys.others:
        other = None if before is None else EpisodeKeys(before.other_ends, before.other_ids, None, None)
        missed = begins(marks.other_ends, marks.other_ids, other) & ~begins(marks.ends, marks.ids, before)
        names = [*keys.other_ends, *([] if keys.other_ids is None else [keys.other_ids])]
        text = "which end_key= and traj_key= do not name: slices go across. Without them all of these fields count"
    elif keys.cuts and marks.ends is not None:
        missed = begins(marks.ends, None, before) & ~begins(None, marks.ids, before)
        names = [*keys.ends]
        text = f"and {keys.ids!r} goes on: both are taken to end episodes. end_key= or traj_key= names one of them"
    else:
        return None
    names = ["the store" if name == EPISODE else name for name in names]
    return (int(missed.reshape(-1).argmax()), f"by {names}, {text}") if missed.any() else None


def _has(read: Read, key: FieldKey) -> bool:
    try:
        read(key)
    except SchemaError:
        return False
    return True


def marks_of(keys: Keys, read: Read, num_envs: int) -> EpisodeKeys:
    """What the fields of some rows say."""

    def ids(key: FieldKey | None) -> npt.NDArray[Any] | None:
        return None if key is None else _one_a_row(key, read(key), "biufUS").reshape(-1, num_envs)

    ends, other_ends = (_flags(names, read, num_envs) for names in (keys.ends, keys.other_ends))
    return EpisodeKeys(ends, ids(keys.ids), other_ends, ids(keys.other_ids))


def _flags(names: tuple[FieldKey, ...], read: Read, num_envs: int) -> Bools | None:
    found: Bools | None = None
    for key in names:
        flags = _one_a_row(key, read(key)) != 0
        found = flags if found is None else found | flags
    return None if found is None else found.reshape(-1, num_envs)


def begins(ends: Bools | None, ids: npt.NDArray[Any] | None, before: EpisodeKeys | None) -> Bools:
    """Whether steps begin an episode by these marks, ``[n, E]``; of the first, by what was ``before``."""
    there = ids if ends is None else ends
    found = np.zeros((1, 1) if there is None else there.shape, np.bool_)
    if ends is not None:
        found[1:] = ends[:-1]
        if before is not None and before.ends is not None:
            found[0] = before.ends[-1]
    if ids is not None:
        found[1:] |= ids[1:] != ids[:-1]
        if before is not None and before.ids is not None:
            found[0] |= ids[0] != before.ids[-1]
    return found


def _numbers_trajectories(values: npt.NDArray[Any]) -> bool:
    """Whether a field that nobody named has one integer, or one text, for every row."""
    values = as_text(np.asarray(values))
    if values.size != len(values) or values.dtype.kind not in "iufUS":
        return False
    return values.dtype.kind != "f" or bool((np.floor(values) == values).all())


def _one_a_row(key: FieldKey, values: npt.NDArray[Any], kinds: str = "biuf") -> npt.NDArray[Any]:
    values = as_text(np.asarray(values))
    if values.dtype.kind not in kinds:
        raise SchemaError(f"slices: {key!r}: expected numbers, found {values.dtype}")
    if values.ndim != 1:
        if values.size != len(values):
            raise SchemaError(
                f"episodes: {key!r}: expected one value a row, found rows of shape {list(values.shape[1:])}; rows that "
                "are whole trajectories have no rows beside them to look at: RandomTimeCrop, BurnIn and ReturnsToGo "
                "take them, all else takes rows that are single steps"
            )
        values = values.reshape(-1)
    return values


def as_ids(key: FieldKey | None, values: npt.NDArray[Any]) -> Int64s:
    if values.dtype.kind not in "biuf":
        raise SchemaError(f"slices: {key!r}: expected numbers, found {values.dtype}")
    ids: Int64s = values.astype(np.int64)
    if values.dtype.kind in "fu" and (ids != values).any():
        raise SchemaError(f"slices: {key!r}: expected integers, found {values[ids != values][0]}")
    return ids


# A scan reads so many rows at a time.
_SCANNED = 1 << 20


class EpisodeIndex:
    """The episodes of a storage under a ring, kept up to date write by write.

    Args:
        traj_key: The field with the number of each row's trajectory: an episode ends where it changes.
        end_key: The field that is not 0 in the last row of an episode.
        truncated_key: A second one.
        done: What is called so in place of ``"done"``, where none of the three is given.
        warns: Whether it warns of contradictions.

    Without any of them all count that are there: ``("next", "done")``, ``("next", "terminated")`` and ``("next",
    "truncated")``, or else ``"done"``, ``"terminated"`` and ``"truncated"``; and the first of ``TRAJ_KEYS``, as numbers
    of trajectories. Where they contradict each other, or those that were named miss an end that another one has, a
    warning says so, once.
    """

    def __init__(
        self,
        traj_key: FieldKey | None = None,
        end_key: FieldKey | None = None,
        truncated_key: FieldKey | None = None,
        *,
        done: FieldKey = "done",
        warns: bool = True,
    ) -> None:
        self._done = done
        self.keys = (traj_key, end_key, truncated_key)
        self._found: Keys | None = None
        self._episodes: EpisodeRing | None = None
        self._is_whole = False
        self._before: EpisodeKeys | None = None  # the last time step known, if it must be
        self._is_loaded = False
        self._has_warned = not warns
        self._rows_looked_at = 0  # for environments that take turns

    def is_like(self, other: object) -> bool:
        """Whether another index finds the same episodes in the same rows."""
        return isinstance(other, EpisodeIndex) and (self.keys, self._done) == (other.keys, other._done)

    def wrote(self, storage: Storage, write: Write) -> None:
        """Take note of a write, in time proportional to its rows."""
        episodes = self._episodes
        if not self._is_whole or not len(write.slots):
            return
        try:
            if write.first is None:
                self._change(storage, write)
                return
            if episodes is None and not write.first:
                episodes = self._episodes = EpisodeRing(storage.num_envs, storage.capacity // storage.num_envs)
            if episodes is None or write.first != episodes.end * episodes.num_envs:
                self._is_whole = False  # rows came and went that nobody spoke of
                return
            keys = self._keys(write.read)
            if self._before is None and (keys.cuts or keys.others):
                self._before = self._read_before(storage, write.first, keys)
            self._extend(episodes, keys, marks_of(keys, write.read, episodes.num_envs))
        except SchemaError:
            # The rows are written, and this is no time to complain: the next draw looks again.
            self._is_whole = False

    def grew(self, storage: Storage) -> None:
        """There is room for more rows, and no row was overwritten so far."""
        if self._episodes is not None:
            self._episodes.steps = storage.capacity // self._episodes.num_envs

    def reset(self, storage: Storage) -> None:
        """All rows may be others: look at them at the next draw."""
        self._episodes, self._is_whole, self._found = None, not len(storage), None
        self._before, self._is_loaded = None, False

    def settled(self, storage: Storage) -> EpisodeRing:
        """The episodes of the rows there are.

        Raises:
            ConfigError: There are no rows.
            MissingFieldError: The rows have none of the fields that say where episodes end.
            SchemaError: Such a field has more than one value a row, or numbers of trajectories are no integers.
        """
        if not len(storage):
            raise ConfigError("sample: expected rows, found an empty buffer")
        episodes = self._episodes
        if not self._is_whole or episodes is None or episodes.end * episodes.num_envs != storage.written:
            episodes = self._scan(storage)
            self._episodes, self._is_whole = episodes, True
        elif self._is_loaded:
            keys = self._keys(lambda key: storage.read(key, slice(0, len(storage))))
            if keys.cuts:
                # A state that was saved when ids did not count is right only if they say the same.
                scanned = self._scan(storage)
                if not _same(scanned, episodes):
                    episodes = self._episodes = scanned
        self._is_loaded = False
        return episodes

    def coming_back(self, storage: Storage) -> FieldKey | None:
        """The field whose numbers of trajectories come back behind others, as where environments take turns in rows."""
        keys, episodes = self._found, self._episodes
        if keys is None or keys.ids is None or episodes is None or storage.ndim != 1:
            return None
        ids = marks_of(keys, lambda key: storage.read(key, slice(0, len(storage))), 1).ids
        if ids is None:
            return None
        ids = np.roll(ids[:, 0], -(episodes.begin % episodes.steps) if len(storage) == episodes.steps else 0)
        heads = ids[np.concatenate([[True], ids[1:] != ids[:-1]])]
        return keys.ids if len(np.unique(heads)) < len(heads) else None

    def warn_of_turns(self, storage: Storage) -> None:
        """Warn where slices are all too short because environments take turns in rows.

        It looks at all rows, so it looks again only when there are twice as many.
        """
        if len(storage) < 2 * self._rows_looked_at:
            return
        self._rows_looked_at = len(storage)
        again = self.coming_back(storage)
        if again is not None:
            warnings.warn(
                f"slices: expected episodes longer than a slice; {of_turns(again)}", UserWarning, stacklevel=2
            )

    def shown(self) -> str:
        """As it stands in the ``repr`` of a sampler."""
        names = ("traj_key", "end_key", "truncated_key")
        return ", ".join(f"{name}={key!r}" for name, key in zip(names, self.keys, strict=True))

    # ------------------------------------------------------------------ reading

    def _extend(self, episodes: EpisodeRing, keys: Keys, marks: EpisodeKeys) -> None:
        """Add the time steps behind the last."""
        before = self._before
        if keys.cuts or keys.others:
            self._before = marks.last()
            found = None if self._has_warned else contradiction(keys, marks, before)
            if found is not None:
                self._has_warned = True
                row = episodes.end * episodes.num_envs + found[0]
                warnings.warn(f"slices: an episode begins with row {row} {found[1]}", UserWarning, stacklevel=2)
        ends, ids = marks.ends, marks.ids
        if ids is not None and not keys.numbers:
            new = begins(None, ids, before)
            episodes.cut(new[0])
            ends = np.zeros(ids.shape, np.bool_) if ends is None else ends.copy()
            ends[:-1] |= new[1:]
            ids = None
        episodes.extend(ends, None if ids is None else as_ids(keys.ids, ids))

    def _keys(self, read: Read) -> Keys:
        if self._found is None:
            traj_key, *given = self.keys
            self._found = find_keys(read, traj_key, tuple(key for key in given if key is not None), self._done)
        return self._found

    def _scan(self, storage: Storage) -> EpisodeRing:
        num_envs = storage.num_envs
        steps, alive, end = storage.capacity // num_envs, len(storage) // num_envs, storage.written // num_envs
        known = self._episodes
        next_ids = known.next_ids if known is not None and known.num_envs == num_envs else None
        episodes = EpisodeRing(num_envs, steps, first=end - alive, next_ids=next_ids)
        self._found = self._before = None
        step, chunk = end - alive, max(1, _SCANNED // num_envs)
        while step < end:
            begin, _, n = next(ring_pieces(step, min(end - step, chunk), steps))
            slots = slice(begin * num_envs, (begin + n) * num_envs)
            read: Read = lambda key, slots=slots: storage.read(key, slots)  # type: ignore[misc] # noqa: E731
            keys = self._keys(read)
            self._extend(episodes, keys, marks_of(keys, read, num_envs))
            step += n
        ask, found = getattr(storage, "oldest_begins", None), self._found
        begins: Int64s | None = None if ask is None or found is None else ask(found.ends, found.ids)
        if begins is not None and alive == steps:
            episodes.begin_earlier(np.minimum(begins, episodes.begin))
        return episodes

    def go_on(self, other: EpisodeIndex, storage: Storage) -> None:
        """Know where the oldest episodes began if another index of the same rows does, which is up to date."""
        if not other._is_whole or other._episodes is None:
            return
        try:
            # An index that a state was loaded into finds its fields when it is asked.
            begins, mine = other.settled(storage), self.settled(storage)
        except (ConfigError, SchemaError):  # the next draw raises it
            return
        keys, theirs = self._found, other._found
        alike = keys is not None and theirs is not None and (keys.ends, keys.ids) == (theirs.ends, theirs.ids)
        if alike and mine.begin > 0:
            envs = np.arange(mine.num_envs)
            mine.begin_earlier(begins.episode_of(envs, np.full(len(envs), mine.begin))[0])

    def _read_before(self, storage: Storage, first: int, keys: Keys) -> EpisodeKeys | None:
        """The time step before row ``first``, if it is still there."""
        num_envs = storage.num_envs
        if first < num_envs or storage.written - (first - num_envs) > storage.capacity:
            return None
        slots = ring_slots(first - num_envs, num_envs, storage.capacity)
        return marks_of(keys, lambda key: storage.read(key, slots), num_envs)

    def _change(self, storage: Storage, write: Write) -> None:
        """Rows that exist were written anew."""
        episodes = self._episodes
        self._before = None
        if episodes is None:
            self._is_whole = False
            return
        num_envs = episodes.num_envs
        keys = self._keys(write.read)
        marks = marks_of(keys, write.read, 1)
        ends, ids = marks.ends, marks.ids
        if ids is not None and (ends is not None or keys.cuts):
            self._is_whole = False  # whether an id or an end made a boundary is not known
            return
        # Of a slot that comes twice the last row counts.
        slots, last = np.unique(write.slots[::-1], return_index=True)
        last = len(write.slots) - 1 - last
        step, env = np.divmod(slots, num_envs)
        step = episodes.begin + (step - episodes.begin) % episodes.steps
        order = np.lexsort((step, env))
        env, step, last = env[order], step[order], last[order]
        for number in np.unique(env).tolist():
            mine = env == number
            if ids is not None:
                episodes.change_ids(number, step[mine], as_ids(keys.ids, ids)[last[mine], 0])
            elif ends is not None:
                episodes.change_ends(number, step[mine], ends[last[mine], 0])

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Int64s]:
        """What is known about the rows: arrays ``[n]`` as long as there are episodes; of no row: empty ones."""
        episodes = self._episodes
        if self._is_whole and episodes is not None and episodes.end > episodes.begin:
            return episodes.state()
        nothing = {name: np.zeros(0, np.int64) for name in STATE}
        return nothing if episodes is None else nothing | {"next_ids": episodes.next_ids.copy()}

    def load(self, state: Mapping[str, Int64s]) -> None:
        """Know what ``state`` says; if that is nothing, look at the rows at the next draw.

        Raises:
            StateError: It is damaged; nothing has changed then.
        """
        whole = len(state["steps"]) > 0
        try:
            if whole:
                episodes: EpisodeRing | None = EpisodeRing.of_state(state)
            else:
                ids = state["next_ids"].astype(np.int64)
                episodes = EpisodeRing(len(ids), 1, next_ids=ids) if len(ids) else None
        except (ValueError, IndexError) as error:
            raise StateError(f"sampler: {error}") from error
        self._episodes, self._is_whole, self._found = episodes, whole, None
        self._before, self._is_loaded = None, whole


STATE = ("steps", "counts", "begins", "ids", "ended", "next_ids")
"""The names of the arrays of a state."""


def of_turns(key: FieldKey) -> str:
    """What to say where the numbers of trajectories in a field come back behind others."""
    return (
        f"numbers of {key!r} come back behind others: rows of several environments? A storage with ndim=2 takes "
        "[time, env], each environment a stream of its own"
    )


def _same(one: EpisodeRing, two: EpisodeRing) -> bool:
    """Whether the episodes of the rows there are begin and end alike."""
    first, second = one.state(), two.state()
    begins, others = (np.maximum(state["begins"], one.begin) for state in (first, second))
    return np.array_equal(first["counts"], second["counts"]) and np.array_equal(begins, others)
