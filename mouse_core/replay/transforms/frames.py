"""CatFrames: the last observations of an episode as one, stored once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import convert, named_dtype, namespace
from mouse_core.episodes import EpisodeIndex
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.nested import find, path_of
from mouse_core.randomness import Key
from mouse_core.replay.protocols import FieldKey, Slots, Storage
from mouse_core.replay.transforms._fields import (
    ALIVE,
    BEFORE,
    NEXT,
    at_the_root,
    check_keys,
    device_of,
    end_codes,
    find_any,
    flat_flags,
    on_host,
    removed,
    replaced,
)
from mouse_core.spec import check_count

Array = Any


@dataclass(frozen=True, init=False)
class CatFrames:
    """Makes of each observation the last ``frames`` of its episode, side by side, oldest first.

    Frames are stored once. A buffer reads those before a drawn row, or before the first of a slice, from its episode,
    as far as its rows are there; where episodes begin is known as ``SliceSampler`` knows it. Before the first frame of
    an episode there are none, and that one stands for them. What lies under ``next``, if it is there, follows the last
    frame, and changes nothing where it is named beside the root's. So the transform stands before others that change
    what it reads; only ``NextView`` and ``HindsightRelabel`` may come first, and an ``NStep`` behind it moves whole
    stacks.

    Called by itself, on slices ``[N, T]``, it knows an episode as far as the slice reaches.

    Args:
        keys: Fields of a step's shape ``[..., C]``: 4 frames of 3 channels become ``[..., 12]``.
        frames: How many, k, at least 1.
        axis: Along which of a step's axes, from the last one: -1, or -3 for images ``[C, H, W]``.
        pad: A number that stands for frames before an episode's first one, instead of that.
        done: Where episodes end, as in ``NextView``.
        mask: The field that says which steps are there.

    Raises:
        ConfigError: No fields, a number of frames below 1, or an axis that is not negative.
        MissingFieldError: Called with a batch that lacks a field.
        SchemaError: Called with a field that has no such axis.
        DataError: A ``pad`` that the field's dtype does not hold.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import CatFrames
        >>> batch = {"obs": np.arange(4).reshape(1, 4, 1), "done": np.array([[0, 1, 0, 0]])}
        >>> CatFrames("obs", frames=3)(batch)["obs"].tolist()
        [[[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 2, 3]]]
    """

    keys: tuple[FieldKey, ...]
    frames: int
    axis: int
    pad: float | None
    done: FieldKey
    mask: FieldKey

    def __init__(
        self,
        *keys: FieldKey,
        frames: int,
        axis: int = -1,
        pad: float | None = None,
        done: FieldKey = "done",
        mask: FieldKey = "mask",
    ) -> None:
        if not keys:
            raise ConfigError("CatFrames: expected at least one field, found none")
        if not is_whole(axis) or axis >= 0:
            raise ConfigError(f"CatFrames: axis: expected one counted from the last, below 0, found {axis!r}")
        frames = check_count("CatFrames: frames", frames)
        vars(self).update(keys=at_the_root(check_keys(keys, where="CatFrames")), frames=frames, axis=axis, pad=pad)
        vars(self).update(zip(("done", "mask"), check_keys((done, mask), where="CatFrames"), strict=True))

    def gather(self, storage: Storage, index: Slots, episodes: EpisodeIndex, key: Key) -> dict[str, Any]:
        """The frames before drawn rows, or before the first ones of slices; see ``Transform``.

        Returns:
            For each field ``[N, 1, k - 1, ...]``, oldest first; of slices whose steps lie apart ``[N, S, k - 1, ...]``.
        """
        if self.frames == 1:
            return {}
        step, env = episodes.steps_of(index.reshape(len(index), -1))
        if not (np.diff(step, axis=1) > 1).any():  # what lies before the others is in the slice
            step, env = step[:, :1], env[:, :1]
        begin = episodes.episode_of(step, env)[0][..., None]
        begin = np.maximum(begin, episodes.begin)
        # Of an episode that began with step 10, the 3 frames before step 12 are those of the steps 10, 10 and 11.
        wanted = step[..., None] - np.arange(self.frames - 1, 0, -1)
        rows = episodes.slots_of(np.maximum(wanted, begin), env[..., None])
        found = {}
        for name in self.keys:
            values = storage.read(name, rows)
            if self.pad is not None:
                values = values.copy()
                values[wanted < begin] = _held(self.pad, values.dtype, name)
            found[BEFORE + repr(name)] = values
        return found

    def __call__(self, batch: Any) -> Any:
        """The batch with stacks in place of frames, ``[..., k * C]``."""
        timed = _has_time(batch, self.mask)
        begins: npt.NDArray[np.int64] | None = None
        for key in self.keys:
            values = find(batch, key, where="CatFrames")
            if values.ndim - (1 + timed) < -self.axis:
                raise SchemaError(f"CatFrames: {key!r}: expected steps with an axis {self.axis}, found {values.shape}")
            before = find_any(batch, BEFORE + repr(key))
            if before is not None:
                batch = removed(batch, BEFORE + repr(key))
            if self.pad is not None:
                _held(self.pad, values.dtype, key)
            steps = values if timed else values[:, None]
            begins = self._begins(batch, tuple(steps.shape[:2]), timed) if begins is None else begins
            stacked = self._stacked(steps, begins, before)
            made = {key: stacked if timed else stacked[:, 0]}
            after = (NEXT, *path_of(key))
            following = find_any(batch, after)
            if following is not None:
                xp = namespace(following)
                later = (..., slice(values.shape[self.axis], None), *[slice(None)] * (-self.axis - 1))
                made[after] = xp.concat([made[key][later], following], axis=self.axis)
            batch = replaced(batch, made)
        return batch

    def _stacked(self, steps: Array, begins: npt.NDArray[np.int64], before: Array | None) -> Array:
        """Stacks of frames ``[N, T, ...]`` of steps, with what ``gather`` gave, if anything did."""
        xp, place = namespace(steps), device_of(steps)
        if before is not None:
            before = xp.asarray(before, device=place)
            if before.shape[1] == steps.shape[1]:  # those of every step
                return xp.concat([*(before[:, :, back] for back in range(self.frames - 1)), steps], axis=self.axis)
            before = before[:, 0]
        count, length = begins.shape
        known = 0 if before is None else before.shape[1]
        line = steps if before is None else xp.concat([before, steps], axis=1)
        rows = xp.arange(count, device=place)[:, None]
        # What an episode that begins in the slice has before its first frame, is not there; neither is what lies before
        # a slice where nobody has read it.
        first = np.where(begins > 0, begins, -known)
        parts = []
        for back in range(self.frames - 1, -1, -1):
            wanted = np.arange(length) - back
            part = line[rows, xp.asarray(np.maximum(wanted, first) + known, device=place)]
            if self.pad is not None and (wanted < first).any():
                there = (wanted >= first).reshape((count, length, *[1] * (steps.ndim - 2)))
                part = xp.where(xp.asarray(there, device=place), part, xp.full_like(part, self.pad))
            parts.append(part)
        return xp.concat(parts, axis=self.axis)

    def _begins(self, batch: Any, shape: tuple[int, int], timed: bool) -> npt.NDArray[np.int64]:
        """Return where the episode of each step begins in its slice, int64 ``[N, T]``; 0 if it began before."""
        opens = np.zeros(shape, np.bool_)
        if timed:
            try:
                opens[:, 1:] = on_host(end_codes(batch, self.done, where="CatFrames"))[:, :-1] != ALIVE
            except MissingFieldError:  # nothing says where, so that a slice is of one episode
                pass
            mask = find_any(batch, self.mask)
            if mask is not None:
                there = on_host(flat_flags(mask, shape, where="CatFrames", key=self.mask)) != 0
                opens[:, 1:] |= there[:, 1:] & ~there[:, :-1]
        return np.maximum.accumulate(np.where(opens, np.arange(shape[1]), 0), axis=1)


def _held(pad: float, dtype: Any, key: FieldKey) -> npt.NDArray[Any]:
    """The number ``[1]`` in a dtype of NumPy or torch; DataError where that does not hold it."""
    try:
        return convert(np.array([pad]), named_dtype(str(dtype).removeprefix("torch.")))
    except ValueError as error:
        raise DataError(f"CatFrames: {key!r}: expected a pad that its dtype holds: {error}") from error


def _has_time(batch: Any, mask: FieldKey) -> bool:
    """Whether a batch has an axis of time: slices, or single rows and those that were read behind them."""
    index, flags = find_any(batch, "index"), find_any(batch, mask)
    return index is None or index.ndim == 2 or (flags is not None and flags.ndim == 2)
