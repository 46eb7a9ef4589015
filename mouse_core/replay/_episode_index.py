"""Keeping the episodes of a storage: which fields say where they end, and what of a write matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, MissingFieldError, SchemaError, StateError
from mouse_core.replay.episodes import Bools, Episodes, Int64s
from mouse_core.replay.protocols import FieldKey, Storage, Write

Read = Callable[[FieldKey], npt.NDArray[Any]]

# Where no key is given: the first of these groups of which a field is there; all of its fields that are there count.
_END_KEYS: tuple[tuple[FieldKey, ...], ...] = (
    (("next", "done"), ("next", "terminated"), ("next", "truncated")),
    ("done", "terminated", "truncated"),
)
_TRAJ_KEYS: tuple[FieldKey, ...] = (("collector", "traj_ids"), "episode", "traj_id")

# A scan reads so many rows at a time.
_SCANNED = 1 << 20


class EpisodeIndex:
    """The episodes of a storage under a ring, kept up to date write by write.

    Args:
        traj_key: The field with the number of each row's trajectory: an episode ends where it changes.
        end_key: The field that is not 0 in the last row of an episode.
        truncated_key: A second one.

    Without any of them ``("next", "done")``, ``("next", "terminated")`` and ``("next", "truncated")`` count, those that
    are there; else ``"done"``, ``"terminated"`` and ``"truncated"``; else ``("collector", "traj_ids")``, ``"episode"``
    or ``"traj_id"`` as numbers of trajectories.
    """

    def __init__(self, traj_key: FieldKey | None, end_key: FieldKey | None, truncated_key: FieldKey | None) -> None:
        self.keys = (traj_key, end_key, truncated_key)
        self._found: tuple[tuple[FieldKey, ...], FieldKey | None] | None = None
        self._episodes: Episodes | None = None
        self._is_whole = False

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
                episodes = self._episodes = Episodes(storage.num_envs, storage.capacity // storage.num_envs)
            if episodes is None or write.first != episodes.end * episodes.num_envs:
                self._is_whole = False  # rows came and went that nobody spoke of
                return
            episodes.extend(*self._marks(write.read, episodes.num_envs))
        except SchemaError:
            # The rows are written, and this is no time to complain: the next draw looks again.
            self._is_whole = False

    def reset(self, storage: Storage) -> None:
        """All rows may be others: look at them at the next draw."""
        self._episodes, self._is_whole, self._found = None, not len(storage), None

    def settled(self, storage: Storage) -> Episodes:
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
        return episodes

    def shown(self) -> str:
        """As it stands in the ``repr`` of a sampler."""
        names = ("traj_key", "end_key", "truncated_key")
        return ", ".join(f"{name}={key!r}" for name, key in zip(names, self.keys, strict=True))

    # ------------------------------------------------------------------ reading

    def _marks(self, read: Read, num_envs: int) -> tuple[Bools | None, Int64s | None]:
        """Whether rows end their episodes, and their trajectories' ids, ``[n, E]``; None where nothing says so."""
        if self._found is None:
            self._found = self._find(read)
        end_keys, traj_key = self._found
        ends: Bools | None = None
        for key in end_keys:
            flags = _one_a_row(key, read(key)) != 0
            ends = flags if ends is None else ends | flags
        ids = None if traj_key is None else _as_ids(traj_key, _one_a_row(traj_key, read(traj_key)))
        return (
            None if ends is None else ends.reshape(-1, num_envs),
            None if ids is None else ids.reshape(-1, num_envs),
        )

    def _find(self, read: Read) -> tuple[tuple[FieldKey, ...], FieldKey | None]:
        traj_key, *given = self.keys
        if any(key is not None for key in self.keys):
            return tuple(key for key in given if key is not None), traj_key
        for group in _END_KEYS:
            there = tuple(key for key in group if _has(read, key))
            if there:
                return there, None
        for key in _TRAJ_KEYS:
            if _has(read, key):
                return (), key
        names = [key for group in (*_END_KEYS, _TRAJ_KEYS) for key in group]
        raise MissingFieldError(
            f"slices: expected end_key=, truncated_key= or traj_key=, or one of the fields {names}; found none"
        )

    def _scan(self, storage: Storage) -> Episodes:
        num_envs = storage.num_envs
        steps, alive, end = storage.capacity // num_envs, len(storage) // num_envs, storage.written // num_envs
        known = self._episodes
        next_ids = known.next_ids if known is not None and known.num_envs == num_envs else None
        episodes = Episodes(num_envs, steps, first=end - alive, next_ids=next_ids)
        self._found = None
        step, chunk = end - alive, max(1, _SCANNED // num_envs)
        while step < end:
            begin = step % steps
            n = min(end - step, steps - begin, chunk)
            slots = slice(begin * num_envs, (begin + n) * num_envs)
            episodes.extend(*self._marks(lambda key, slots=slots: storage.read(key, slots), num_envs))  # type: ignore[misc]
            step += n
        return episodes

    def _change(self, storage: Storage, write: Write) -> None:
        """Rows that exist were written anew."""
        episodes = self._episodes
        if episodes is None:
            self._is_whole = False
            return
        num_envs = episodes.num_envs
        ends, ids = self._marks(write.read, 1)
        if ends is not None and ids is not None:
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
                episodes.change_ids(number, step[mine], ids[last[mine], 0])
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
                episodes: Episodes | None = Episodes.of_state(state)
            else:
                ids = state["next_ids"].astype(np.int64)
                episodes = Episodes(len(ids), 1, next_ids=ids) if len(ids) else None
        except (ValueError, IndexError) as error:
            raise StateError(f"sampler: {error}") from error
        self._episodes, self._is_whole, self._found = episodes, whole, None


STATE = ("steps", "counts", "begins", "ids", "ended", "next_ids")
"""The names of the arrays of a state."""


def _has(read: Read, key: FieldKey) -> bool:
    try:
        read(key)
    except SchemaError:
        return False
    return True


def _one_a_row(key: FieldKey, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise SchemaError(f"slices: {key!r}: expected numbers, found {values.dtype}")
    if values.ndim != 1:
        if values.size != len(values):
            raise SchemaError(
                f"slices: {key!r}: expected one value a row, found rows of shape {list(values.shape[1:])}"
            )
        values = values.reshape(-1)
    return values


def _as_ids(key: FieldKey, values: npt.NDArray[Any]) -> Int64s:
    ids: Int64s = values.astype(np.int64)
    if values.dtype.kind in "fu" and (ids != values).any():
        raise SchemaError(f"slices: {key!r}: expected integers, found {values[ids != values][0]}")
    return ids
