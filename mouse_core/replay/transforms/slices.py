"""Transforms of slices: RandomTimeCrop, BurnIn, MarkSlices, and CatFrames, which stacks each frame with the frames
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import convert, named_dtype, namespace
from mouse_core.episodes import EpisodeIndex
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.nested import find, flatten, map_tree, path_of
from mouse_core.randomness import Key
from mouse_core.replay.protocols import FieldKey, Slots, Storage
from mouse_core.replay.transforms.fields import (
    ALIVE,
    BEFORE,
    BOOKKEEPING,
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
    runs,
)
from mouse_core.spec import check_count

Array = Any


@dataclass(frozen=True)
class RandomTimeCrop:
    """Crops a random sub-trajectory of ``sequence_length`` steps from every slice, or from every row if each row is a
    trajectory.

    The first step of a crop is drawn uniformly from the steps that are followed by enough existing steps. In a slice
    with fewer than ``sequence_length`` existing steps, the crop begins at the first existing step, and the mask of the
    crop marks the existing steps. (``mouse_core.RandomCrop`` crops images.)

    Args:
        sequence_length: Number of steps of a sub-trajectory.
        mask: The field that marks the existing steps, which must be a contiguous range in each slice. If the batch
            lacks this field, all steps exist.

    Raises:
        ConfigError: The length is not a positive integer.
        SchemaError: The slices have fewer than ``sequence_length`` steps, or the mask is not a contiguous range.
    """

    sequence_length: int
    mask: FieldKey = "mask"

    random: ClassVar[bool] = True
    of_slices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("RandomTimeCrop: sequence_length", self.sequence_length)

    def __call__(self, batch: Any, key: Key) -> Any:
        """Return the batch, with fields ``[B, sequence_length, ...]`` in place of ``[B, S, ...]``."""
        steps = _steps(batch, "RandomTimeCrop")
        count, length = steps
        if length < self.sequence_length:
            raise SchemaError(
                f"RandomTimeCrop: expected slices of at least {self.sequence_length} steps, found {length}"
            )
        first, number = self._stretches(batch, steps)
        room = np.maximum(number - self.sequence_length, 0)
        begin = first + np.minimum((key.uniform(count) * (room + 1)).astype(np.int64), room)
        begin = np.minimum(begin, length - self.sequence_length)
        places = begin[:, None] + np.arange(self.sequence_length)

        def crop(values: Array) -> Array:
            xp = namespace(values)
            where = device_of(values)
            return values[xp.arange(count, device=where)[:, None], xp.asarray(places, device=where)]

        return map_tree(lambda values: crop(values) if runs(values, steps) else values, batch)

    def _stretches(self, batch: Any, steps: tuple[int, int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the first existing step of each slice, and the number of existing steps, int64 ``[N]``."""
        found = find_any(batch, self.mask)
        if found is None:
            return np.zeros(steps[0], np.int64), np.full(steps[0], steps[1])
        flags = flat_flags(found, steps, where="RandomTimeCrop", key=self.mask) != 0
        there = on_host(flags)
        first, number = there.argmax(axis=1), there.sum(axis=1)
        last = steps[1] - there[:, ::-1].argmax(axis=1)
        if ((last - first != number) & (number > 0)).any():
            row = int(((last - first != number) & (number > 0)).argmax())
            raise SchemaError(
                f"RandomTimeCrop: {self.mask!r}: expected contiguous steps in a slice, found gaps in slice {row}"
            )
        return first, number


@dataclass(frozen=True, init=False)
class MarkSlices:
    """Adds fields to the batch that mark the first and last step of each slice; stored rows are not changed.

    A recurrent network that is trained on slices resets its state at the first step of each slice. Sums along time stop
    at the last step, as at the end of an episode. ``MarkSlices(first="is_init", last=[("next", "truncated"), ("next",
    "done")])`` marks a slice like a truncated episode. Missing steps have no mark. The added fields are bool, in the
    shape of ``index``. If the batch already has a field that ``first`` or ``last`` names, the existing marks in this
    field are kept.

    Args:
        first: The field, or a list of fields, that are True in the first step of each slice.
        last: The field, or a list of fields, that are True in the last step of each slice.
        mask: The field that marks the existing steps; if the batch lacks this field, all steps exist.

    Raises:
        ConfigError: Neither ``first`` nor ``last`` names a field.
        SchemaError: The batch has single rows, or an existing field is not one bool for each step.
    """

    first: tuple[FieldKey, ...]
    last: tuple[FieldKey, ...]
    mask: FieldKey

    def __init__(
        self,
        *,
        first: FieldKey | list[FieldKey] = (),
        last: FieldKey | list[FieldKey] = (),
        mask: FieldKey = "mask",
    ) -> None:
        made = [_names(keys, name) for keys, name in ((first, "first"), (last, "last"))]
        if not any(made):
            raise ConfigError("MarkSlices: expected a field for first or for last, found none")
        vars(self).update(first=made[0], last=made[1], mask=mask)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the marks."""
        index, there, slices = (find_any(batch, key) for key in ("index", self.mask, "slice_id"))
        if index is None:
            raise MissingFieldError("MarkSlices: expected a batch with a field 'index', found none")
        if index.ndim != 2 and slices is None:
            raise SchemaError(f"MarkSlices: expected slices [B, S], found single rows {list(index.shape)}")
        xp = namespace(index)
        if slices is None or index.ndim == 2:
            meant = xp.ones_like(index, dtype=xp.bool) if there is None else there != 0
            # Example: the mask 0, 1, 1 has the running count 0, 1, 2: the first existing step has count 1, the last
            # existing step count 2.
            count = meant.cumsum(1)
            ends = [meant & (count == 1), meant & (count == count[:, -1:])]
        else:
            new, end = slices[1:] != slices[:-1], xp.ones_like(slices[:1], dtype=xp.bool)
            ends = [xp.concat([end, new]), xp.concat([new, end])]
        for keys, marks in zip((self.first, self.last), ends, strict=True):
            batch = replaced(batch, {key: self._marked(batch, key, marks) for key in keys})
        return batch

    def _marked(self, batch: Any, key: FieldKey, marks: Array) -> Array:
        """Return the marks, merged with the existing marks of the batch."""
        known = find_any(batch, key)
        if known is None:
            return marks
        if str(getattr(known, "dtype", "")).split(".")[-1] != "bool" or prod(known.shape) != prod(marks.shape):
            found = f"{getattr(known, 'dtype', type(known).__name__)} {list(getattr(known, 'shape', ()))}"
            raise SchemaError(f"MarkSlices: {key!r}: expected one bool for each step, or no such field, found {found}")
        return known | marks.reshape(tuple(known.shape))


def _names(keys: Any, name: str) -> tuple[FieldKey, ...]:
    """Convert one field or a list of fields to a tuple of fields; a tuple as argument is the name of one nested
    field.
    """
    names: list[FieldKey] = keys if isinstance(keys, list) else [keys] if keys else []
    return check_keys(names, where=f"MarkSlices: {name}")


@dataclass(frozen=True)
class BurnIn:
    """Removes the first steps of every slice; a function computes a recurrent network's initial state from these steps.

    The drawn slices must include these steps: ``SliceSampler(sequence_length=burn_in + learned)``. The function is
    called with a batch of the first ``steps`` steps, including ``mask``, and returns fields with the initial state for
    the remaining steps. (Kapturowski et al., "Recurrent experience replay in distributed reinforcement learning", ICLR
    2019.)

    The state depends on the network's weights at the time of the call. In a buffer, the function runs in the thread
    that applies the transforms, which can be a thread of a ``PrefetchBatchifier``. Without a prefetcher, batches depend
    only on the draws and the weights. The transform may also be called with a delivered batch, a dict of arrays of
    NumPy, torch or JAX.

    Args:
        function: A function that takes a batch ``[B, steps, ...]`` and returns a dict of fields ``[B, ...]``.
        steps: Number of burn-in steps, at least 1.

    Raises:
        ConfigError: ``function`` is not callable, or ``steps`` is below 1.
        SchemaError: The slices have no step after ``steps``; or the function did not return one value for each slice,
            or returned a field that the batch already has.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import BurnIn
        >>> warm = BurnIn(lambda first: {"hidden": first["obs"].sum(axis=1)}, steps=3)
        >>> batch = warm({"obs": np.arange(10).reshape(2, 5)})
        >>> batch["hidden"].tolist(), batch["obs"].tolist()
        ([3, 18], [[3, 4], [8, 9]])
    """

    function: Callable[[Any], Mapping[str, Array]]
    steps: int

    of_slices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"BurnIn: expected a function, found {self.function!r:.80}")
        check_count("BurnIn: steps", self.steps)

    def __call__(self, batch: Any) -> Any:
        """Return the batch without its first steps, with the fields that the function returned."""
        found = _steps(batch, "BurnIn")
        if found[1] <= self.steps:
            raise SchemaError(f"BurnIn: expected slices of more than {self.steps} steps, found {found[1]}")

        def part(steps: slice) -> Any:
            return map_tree(lambda values: values[:, steps] if runs(values, found) else values, batch)

        rest = part(slice(self.steps, None))
        made = self.function(part(slice(self.steps)))
        if not isinstance(made, Mapping):
            raise SchemaError(f"BurnIn: expected a dict of fields, found {type(made).__name__}")
        for name, values in made.items():
            if name in rest:
                raise SchemaError(
                    "BurnIn: expected the function to return only fields that the batch "
                    f"does not have, found {name!r} in both"
                )
            for leaf in flatten(values).values():
                if tuple(getattr(leaf, "shape", ()))[:1] != found[:1]:
                    raise SchemaError(f"BurnIn: {name!r}: expected {found[0]} rows, found {leaf!r:.60}")
        return {**rest, **made}


def _steps(batch: Any, where: str) -> tuple[int, int]:
    """Return the number of slices and their length, from the first axes of the index or, if there is no index, of all
    fields.

    If the index has single rows, each row is a trajectory, and all fields must have a time axis.
    """
    index = find_any(batch, "index")
    if index is not None and index.ndim == 2:
        return int(index.shape[0]), int(index.shape[1])
    added = () if index is None else (*BOOKKEEPING - {"mask"}, "generation")
    fields = {key: values for key, values in flatten(batch).items() if key not in added}
    shapes = {tuple(getattr(values, "shape", ())[:2]) for values in fields.values()}
    steps = {shape for shape in shapes if len(shape) == 2}
    if not steps:
        raise MissingFieldError(f"{where}: expected slices [B, S, ...], found no field with two or more axes")
    single = index is not None and (len(shapes) > 1 or {shape[0] for shape in steps} != {len(index)})
    if len(steps) > 1 or single or find_any(batch, "slice_id") is not None:
        expected = "slices [B, S, ...]" if index is None else "slices, or rows that are whole trajectories, [B, S, ...]"
        raise SchemaError(f"{where}: expected {expected} in every field, found first axes {sorted(shapes)}")
    count, length = steps.pop()
    return int(count), int(length)


@dataclass(frozen=True, init=False)
class CatFrames:
    """Replaces each observation by the last ``frames`` observations of its episode, concatenated, oldest first.

    Frames are stored once. The buffer reads the earlier frames of a drawn row, or of the first row of a slice, from the
    existing rows of the same episode. The transform finds the start of an episode as ``SliceSampler`` does. The first
    frame of an episode replaces missing frames before the start of the episode. The field under ``next`` is also
    stacked: its observation becomes the last frame of the stack under ``next``. So ``keys`` need not contain the field
    under ``next``. ``CatFrames`` must precede other transforms that change the fields ``keys``. Of these, only
    ``NextView`` and ``HindsightRelabel`` may precede ``CatFrames``. A later ``NStep`` treats each stack as one value.

    If called directly with slices ``[N, T]``, the transform uses only the steps of the slice.

    Args:
        keys: Fields with a value of the shape ``[..., C]`` for each step: 4 frames of 3 channels become one value
            ``[..., 12]``.
        frames: The number of frames, k, at least 1.
        axis: The axis along which frames are concatenated, counted from the last axis: -1, or -3 for images ``[C, H,
            W]``.
        pad: The value of missing frames before the start of an episode; None repeats the first frame.
        done: The field that marks where episodes end, as in ``NextView``.
        mask: The field that marks the existing steps.

    Raises:
        ConfigError: No field is given, the number of frames is below 1, or the axis is not negative.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: A field lacks the axis.
        DataError: The field's dtype cannot represent ``pad``.

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
            raise ConfigError(f"CatFrames: axis: expected a negative axis, found {axis!r}")
        frames = check_count("CatFrames: frames", frames)
        vars(self).update(keys=at_the_root(check_keys(keys, where="CatFrames")), frames=frames, axis=axis, pad=pad)
        vars(self).update(zip(("done", "mask"), check_keys((done, mask), where="CatFrames"), strict=True))

    def gather(self, storage: Storage, index: Slots, episodes: EpisodeIndex, key: Key) -> dict[str, Any]:
        """Return the earlier frames of drawn rows, or of the first rows of slices; see ``Transform``.

        Returns:
            An array ``[N, 1, k - 1, ...]`` for each field, oldest frame first; ``[N, S, k - 1, ...]`` for slices with a
            dilation.
        """
        if self.frames == 1:
            return {}
        step, env = episodes.steps_of(index.reshape(len(index), -1))
        if not (np.diff(step, axis=1) > 1).any():  # the slice contains the frames before all later steps
            step, env = step[:, :1], env[:, :1]
        begin = episodes.episode_of(step, env)[0][..., None]
        begin = np.maximum(begin, episodes.begin)
        # Example: in an episode that begins with step 10, the 3 frames before step 12 are the frames of the steps 10,
        # 10 and 11.
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
        """Return the batch with stacks in place of frames, ``[..., k * C]``."""
        index, flags = find_any(batch, "index"), find_any(batch, self.mask)
        # Slices, or single rows with later steps, have an axis of time.
        timed = index is None or index.ndim == 2 or (flags is not None and flags.ndim == 2)
        begins: npt.NDArray[np.int64] | None = None
        for key in self.keys:
            values = find(batch, key, where="CatFrames")
            if values.ndim - (1 + timed) < -self.axis:
                raise SchemaError(
                    f"CatFrames: {key!r}: expected steps with an axis {self.axis}, found shape {values.shape}"
                )
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
        """Return stacks of frames ``[N, T, ...]``, including the earlier frames that ``gather`` returned, if ``gather``
        was called.
        """
        xp, place = namespace(steps), device_of(steps)
        if before is not None:
            before = xp.asarray(before, device=place)
            if before.shape[1] == steps.shape[1]:  # earlier frames were read for every step
                return xp.concat([*(before[:, :, back] for back in range(self.frames - 1)), steps], axis=self.axis)
            before = before[:, 0]
        count, length = begins.shape
        known = 0 if before is None else before.shape[1]
        line = steps if before is None else xp.concat([before, steps], axis=1)
        rows = xp.arange(count, device=place)[:, None]
        # An episode that begins in the slice has no frames before its first frame. The frames before the slice exist
        # only if ``gather`` read them.
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
        """Return, for each step, the position in its slice at which the step's episode begins, int64 ``[N, T]``; 0 if
        the episode began before the slice.
        """
        opens = np.zeros(shape, np.bool_)
        if timed:
            try:
                opens[:, 1:] = on_host(end_codes(batch, self.done, where="CatFrames"))[:, :-1] != ALIVE
            except MissingFieldError:  # no field marks ends, so each slice belongs to one episode
                pass
            mask = find_any(batch, self.mask)
            if mask is not None:
                there = on_host(flat_flags(mask, shape, where="CatFrames", key=self.mask)) != 0
                opens[:, 1:] |= there[:, 1:] & ~there[:, :-1]
        return np.maximum.accumulate(np.where(opens, np.arange(shape[1]), 0), axis=1)


def _held(pad: float, dtype: Any, key: FieldKey) -> npt.NDArray[Any]:
    """Convert the number ``pad`` to an array ``[1]`` of a NumPy or torch dtype; raise DataError if the dtype cannot
    represent the number.
    """
    try:
        return convert(np.array([pad]), named_dtype(str(dtype).removeprefix("torch.")))
    except ValueError as error:
        raise DataError(f"CatFrames: {key!r}: expected a pad that its dtype can represent: {error}") from error
