"""What the fields of rows say about where episodes end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import MissingFieldError, SchemaError
from mouse_core.nested import key_of, path_of
from mouse_core.replay.ground.encoding import as_text
from mouse_core.replay.ground.protocols import END_KEYS, EPISODE, TRAJ_KEYS, FieldKey
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
class Marks:
    """What the fields of some rows say, ``[n, E]`` each; None where there is no such field."""

    ends: Bools | None
    ids: npt.NDArray[Any] | None
    other_ends: Bools | None
    other_ids: npt.NDArray[Any] | None

    def last(self) -> Marks:
        """Of the last time step alone."""
        parts = (self.ends, self.ids, self.other_ends, self.other_ids)
        return Marks(*[None if part is None else part[-1:].copy() for part in parts])


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


def contradiction(keys: Keys, marks: Marks, before: Marks | None) -> tuple[int, str] | None:
    """The first of some rows at which fields contradict each other about the begin of an episode, and how.

    Args:
        keys: The fields.
        marks: What they say of these rows.
        before: And of the time step before, if that is known.
    """
    if keys.others:
        other = None if before is None else Marks(before.other_ends, before.other_ids, None, None)
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


def marks_of(keys: Keys, read: Read, num_envs: int) -> Marks:
    """What the fields of some rows say."""

    def ids(key: FieldKey | None) -> npt.NDArray[Any] | None:
        return None if key is None else _one_a_row(key, read(key), "biufUS").reshape(-1, num_envs)

    ends, other_ends = (_flags(names, read, num_envs) for names in (keys.ends, keys.other_ends))
    return Marks(ends, ids(keys.ids), other_ends, ids(keys.other_ids))


def _flags(names: tuple[FieldKey, ...], read: Read, num_envs: int) -> Bools | None:
    found: Bools | None = None
    for key in names:
        flags = _one_a_row(key, read(key)) != 0
        found = flags if found is None else found | flags
    return None if found is None else found.reshape(-1, num_envs)


def begins(ends: Bools | None, ids: npt.NDArray[Any] | None, before: Marks | None) -> Bools:
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
