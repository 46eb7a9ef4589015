"""Conversions between the layouts of TED, TorchRL's format of episode data, over nested dicts of NumPy arrays.

TED holds a step as a root (its observation, action) and ``next`` (reward, done, the observation that follows). Inside
a trajectory the ``next`` of a step equals the root of the following step. The flat layout stores each observation once.
The trajectory with the roots a, b and the ``next`` b, c becomes a, b, c: 3 observations for 2 steps.
The nested layout is the flat layout with one array for each trajectory. ``H5Split`` gives each trajectory its own dict.
A conversion loses nothing: it raises an error for data that the target layout cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError, SchemaError
from mouse_core.formats.columns.transitions import differ
from mouse_core.nested import nest

_GROUP = re.compile(r"traj_(\d+)")


def _partial_without_data(change: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a conversion: without data it returns itself with the options bound, as TorchRL's hooks need it."""

    @wraps(change)
    def convert(data: Mapping[str, Any] | None = None, **options: Any) -> Any:
        return partial(convert, **options) if data is None else change(data, **options)

    return convert


# The names are those that users of TorchRL know.
@_partial_without_data
def H5Split(data: Mapping[str, Any]) -> Any:
    """Convert the nested layout to one dict for each trajectory, the groups of an HDF5 file.

    Args:
        data: The result of ``TED2Nested``: lists with an array for each trajectory. Without data the function itself
            is returned, as TorchRL's hooks need it.

    Returns:
        The nested dict of each trajectory by name: ``traj_0``, ``traj_1`` and so on; with 11 trajectories ``traj_00``.
        Entries that are not lists, such as the shift, stay unchanged.

    Raises:
        SchemaError: The lists have different lengths, or there is no list.
    """
    lengths = {len(value) for value in _all_lists(data)}
    if len(lengths) != 1:
        raise SchemaError(f"data: expected lists of as many trajectories, found lists of {sorted(lengths) or 'none'}")
    (count,) = lengths
    digits = len(str(max(count - 1, 0)))
    names = [f"traj_{number:0{digits}d}" for number in range(count)]
    split = {name: _trajectory_at(data, number) for number, name in enumerate(names)}
    return {**split, **{name: value for name, value in data.items() if not isinstance(value, Mapping | list)}}


@_partial_without_data
def H5Combine(data: Mapping[str, Any]) -> Any:
    """Convert the result of ``H5Split`` back to the nested layout, trajectories in the order of their numbers.

    Args:
        data: The result of ``H5Split``. Without data the function itself is returned.

    Returns:
        The nested layout, as from ``TED2Nested``.

    Raises:
        SchemaError: There are no trajectories, or their entries differ.
    """
    groups = sorted((name for name in data if _GROUP.fullmatch(name)), key=lambda name: int(name[5:]))
    if not groups:
        raise SchemaError(f"data: expected trajectories 'traj_0' and so on, found {list(data)[:8]}")
    whole = _joined_trajectories([data[name] for name in groups], groups)
    return {**whole, **{name: value for name, value in data.items() if name not in set(groups)}}


def _all_lists(data: Mapping[str, Any]) -> list[list[Any]]:
    """Return all lists in nested mappings."""
    found: list[list[Any]] = []
    for value in data.values():
        found += _all_lists(value) if isinstance(value, Mapping) else [value] if isinstance(value, list) else []
    return found


def _trajectory_at(data: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return item ``number`` of each list in nested mappings; other values are left out."""
    return {
        name: _trajectory_at(value, number) if isinstance(value, Mapping) else value[number]
        for name, value in data.items()
        if isinstance(value, Mapping | list)
    }


def _joined_trajectories(parts: list[Mapping[str, Any]], groups: list[str]) -> dict[str, Any]:
    """Return nested mappings with lists of the trajectories' arrays; ``groups`` names each of ``parts`` for errors."""
    first = parts[0]
    for part, group in zip(parts, groups, strict=True):
        if set(part) != set(first):
            raise SchemaError(f"{group}: expected the entries of {groups[0]}, {sorted(first)}, found {sorted(part)}")
    return {
        name: _joined_trajectories([part[name] for part in parts], groups)
        if isinstance(value, Mapping)
        else [np.asarray(part[name]) for part in parts]
        for name, value in first.items()
    }


DONE_KEYS = ("done", "truncated", "terminated")
REWARD_KEYS = ("reward",)
_SHAPE = "_storage_shape"

Key = tuple[str, ...]
Arrays = dict[Key, npt.NDArray[Any]]
Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


# The names are those that users of TorchRL know.
@_partial_without_data
def TED2Flat(
    data: Mapping[str, Any],
    *,
    shift: int = 0,
    is_full: bool = True,
    done_key: str = "done",
    shift_key: str = "shift",
    is_full_key: str = "is_full",
    done_keys: Sequence[str] = DONE_KEYS,
    reward_keys: Sequence[str] = REWARD_KEYS,
) -> Any:
    """Convert TED steps to the flat layout, with every observation once: T + 1 observations for T steps.

    An entry that the root and ``next`` both have becomes one array: trajectory after trajectory, each followed by the
    ``next`` of its last step. Rewards and done flags, which only ``next`` has, and entries that only the root has keep
    one value for each step. A full ring is written from its oldest step on.

    Args:
        data: Nested dicts of arrays ``[n, ...]``, with ``done`` of shape ``[n]`` or ``[n, 1]``; or arrays
            ``[n, environments, ...]``, with ``done`` of shape ``[n, environments, 1]``. Without data the function
            itself is returned with these options, as TorchRL's hooks need it.
        shift: The position of the ring's cursor: the oldest step of a full ring, else the first unused position.
        is_full: Whether all ``n`` positions are used.
        done_key: The flag in ``next`` that ends a trajectory.
        shift_key, is_full_key: Names for the cursor and whether the ring is full, in the result.
        done_keys: Names of done flags, which are False at the root.
        reward_keys: Names of the other entries that only ``next`` has.

    Returns:
        A nested dict of arrays, with the shift, whether the ring is full, and ``_storage_shape``.

    Raises:
        SchemaError: Only ``next`` has an entry that is not in `reward_keys`, or lengths of arrays differ.
        DataError: The flat layout cannot hold the data: a done flag is set at the root, or inside a trajectory a
            ``next`` differs from the following root.
    """
    root, following = _root_and_next(data)
    done = _done_flags(following, done_key, "next")
    shape, n = done.shape, len(done)
    if not 0 <= shift <= n or (not is_full and not shift):
        raise SchemaError(f"shift: expected {'0' if is_full else '1'}..{n}, found {shift}")
    used = n if is_full else shift
    next_only = {*map(key_of, done_keys), *map(key_of, reward_keys)}
    _check_ted(root, following, next_only, shape)
    _check_no_flags(root, map(key_of, done_keys), shape, used)
    lanes = _by_lane(done, shape)
    order = np.roll(np.arange(n), -shift) if is_full else np.arange(n)
    flat: dict[Key, list[npt.NDArray[Any]]] = {}
    for lane in range(lanes.shape[1]):
        ends = lanes[order, lane].copy()
        ends[used - 1] = True
        for key, values in (root | {key: values for key, values in following.items() if key in next_only}).items():
            lane_values = _by_lane(values, shape)[order, lane]
            if key in following and key not in next_only:
                lane_values = _interleave(
                    lane_values, _by_lane(following[key], shape)[order, lane], ends, order[:used], key
                )
            flat.setdefault(key, []).append(lane_values)
    result = nest({key: np.concatenate(parts) for key, parts in flat.items()})
    return {**result, shift_key: shift, is_full_key: is_full, _SHAPE: tuple(shape)}


@_partial_without_data
def Flat2TED(
    data: Mapping[str, Any],
    *,
    done_key: str = "done",
    shift_key: str = "shift",
    is_full_key: str = "is_full",
    done_keys: Sequence[str] = DONE_KEYS,
    reward_keys: Sequence[str] = REWARD_KEYS,
) -> Any:
    """Convert the flat layout back to TED steps, each at its position in the ring.

    Args:
        data: The result of ``TED2Flat``. Without data the function itself is returned with these options.
        done_key: The flag that ends a trajectory.
        shift_key, is_full_key: Names of the cursor and whether the ring is full; without them the ring is full and
            begins at 0.
        done_keys: Names of done flags; at the root they become False.
        reward_keys: Names of the other entries that belong in ``next`` only.

    Returns:
        A nested dict of arrays. Unused positions of a ring have 0 where the flat layout has no value.

    Raises:
        SchemaError: There is no ``done``, or an array has another length than the number of steps or observations.
    """
    about = {name: data[name] for name in (shift_key, is_full_key, _SHAPE) if name in data}
    arrays = _arrays_by_path({name: value for name, value in data.items() if name not in about})
    done = _done_flags(arrays, done_key, "the data").reshape(-1)
    shape = tuple(int(size) for size in np.atleast_1d(about.get(_SHAPE, (len(done),))))
    if int(np.prod(shape)) != len(done):
        raise SchemaError(f"{_SHAPE}: expected the shape of {len(done)} steps, found {shape}")
    n, lanes = shape[0], len(done) // shape[0]
    used, order = _used_places(about.get(is_full_key, True), about.get(shift_key, 0), n, shift_key)
    ends = done.reshape(lanes, n).copy()
    ends[:, used - 1] = True
    observations = len(done) + int(ends.sum())
    flags = set(map(key_of, done_keys))
    next_only = {*flags, *map(key_of, reward_keys)}
    # The values at each position of every environment, [lanes, n, ...].
    result: Arrays = {}
    for key, values in arrays.items():
        if len(values) == len(done):
            steps = values.reshape(lanes, n, *values.shape[1:])[:, order]
            result[("next", *key) if key in next_only else key] = steps
            if key in flags:
                result[key] = np.zeros_like(steps)
        elif len(values) == observations:
            current, next_values = _deinterleave(values, ends)
            result[key], result["next", *key] = current[:, order], next_values[:, order]
        else:
            raise SchemaError(
                f"{'.'.join(key)}: expected {len(done)} entries, one a step, or {observations}, one an observation, "
                f"found {len(values)}"
            )
    places = {key: np.swapaxes(values, 0, 1) for key, values in result.items()}
    return nest({key: values.reshape(*shape, *values.shape[2:]) for key, values in places.items()})


@_partial_without_data
def TED2Nested(data: Mapping[str, Any], **options: Any) -> Any:
    """Convert TED steps to the nested layout: lists with one array for each trajectory.

    Args:
        data: TED steps, as for ``TED2Flat``. Without data the function itself is returned with these options.
        **options: The options of ``TED2Flat``.

    Returns:
        A nested dict of lists: arrays ``[T + 1, ...]`` for entries that the root and ``next`` both have, ``[T, ...]``
        for all others. The shift, whether the ring is full, and ``_storage_shape`` are added.

    Raises:
        SchemaError, DataError: Errors of ``TED2Flat``.
    """
    flat = TED2Flat(data, **options)
    shift_key, is_full_key = options.get("shift_key", "shift"), options.get("is_full_key", "is_full")
    about = {name: flat.pop(name) for name in (shift_key, is_full_key, _SHAPE)}
    n = about[_SHAPE][0]
    # TED2Flat writes done under the name it has in `next`.
    ends = _done_flags(_arrays_by_path(flat), options.get("done_key", "done"), "the data").reshape(-1, n).copy()
    used = n if about[is_full_key] else about[shift_key]
    ends[:, used - 1] = True
    # Where a trajectory ends, one more observation follows. For ends of 0 1 0 1 the trajectories stop behind steps
    # 2 and 4, and behind observations 3 and 6.
    extra_observations = ends.astype(np.int64)
    ends[:, -1] = True
    stops = np.flatnonzero(ends.reshape(-1)) + 1
    wide_stops = np.cumsum(1 + extra_observations.reshape(-1))[stops - 1]
    arrays = _arrays_by_path(flat)
    cut = {
        key: np.split(values, (stops if len(values) == ends.size else wide_stops)[:-1])
        for key, values in arrays.items()
    }
    return {**nest(cut), **about}


@_partial_without_data
def Nested2TED(data: Mapping[str, Any], **options: Any) -> Any:
    """Convert the nested layout back to TED steps, each at its position in the ring.

    Args:
        data: The result of ``TED2Nested``. Without data the function itself is returned with these options.
        **options: The options of ``Flat2TED``.

    Returns:
        A nested dict of arrays.

    Raises:
        SchemaError: Errors of ``Flat2TED``.
    """
    names = (options.get("shift_key", "shift"), options.get("is_full_key", "is_full"), _SHAPE)
    about = {name: data[name] for name in names if name in data}
    rest = {name: value for name, value in data.items() if name not in about}
    joined = nest({path: np.concatenate([np.asarray(part) for part in parts]) for path, parts in by_path(rest).items()})
    return Flat2TED({**joined, **about}, **options)


# ---------------------------------------------------------------------- helpers


def observation_rows(ends: Bools) -> Int64s:
    """Return the row of the flat layout with the observation of each step of an environment, int64 ``[n]``.

    Behind the last step of a trajectory one more row holds its final observation. For ends of 0 1 0 0 the observations
    of the steps are rows 0 1 3 4, and row 2 is the final observation of the first trajectory.
    """
    ended_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends)[:-1]])
    rows: Int64s = np.arange(len(ends)) + ended_before
    return rows


def _used_places(is_full: Any, shift: Any, n: int, name: str) -> tuple[int, Int64s]:
    """Return the number of used positions of a ring, and for each position the number of its step in flat order.

    A full ring of 4 with the cursor at 1 was written in the order 1 2 3 0, so its positions have the steps 3 0 1 2.
    """
    shift = int(shift)
    used = n if is_full else shift
    if not 0 <= shift <= n or not used:
        raise SchemaError(f"{name}: expected a place in 0..{n}, found {shift}")
    return used, np.roll(np.arange(n), shift) if is_full else np.arange(n)


def _deinterleave(values: npt.NDArray[Any], ends: Bools) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Split flat observations into those of each step and the next ones, ``[lanes, n, ...]``; 0 where none follows."""
    current, next_values = [], []
    first = 0
    for lane in ends:
        rows = observation_rows(lane)
        lane_values = values[first : first + len(lane) + int(lane.sum())]
        first += len(lane_values)
        following = lane_values[np.minimum(rows + 1, len(lane_values) - 1)]
        following[rows + 1 >= len(lane_values)] = 0
        current.append(lane_values[rows])
        next_values.append(following)
    return np.stack(current), np.stack(next_values)


def _interleave(
    root: npt.NDArray[Any], following: npt.NDArray[Any], ends: Bools, places: Int64s, key: Key
) -> npt.NDArray[Any]:
    """Return the flat observations: the roots of each trajectory, followed by the ``next`` of its last step.

    ``places`` has the position in the ring of each used step, oldest first, for the error message.
    """
    used = len(places)
    goes_on = ~ends[: used - 1]
    next_values, following_roots = following[: used - 1][goes_on], root[1:used][goes_on]
    if next_values.shape != following_roots.shape:
        raise SchemaError(f"{'.'.join(key)}: expected next of the root's shape {root.shape[1:]}")
    unequal = differ(next_values, following_roots)
    if unequal.any():
        row = int(np.flatnonzero(goes_on)[unequal][0])
        raise DataError(
            f"{'.'.join(key)}: expected the next of step {places[row]}, after which its trajectory goes on, to be the "
            f"root of the following step, found another value; this layout cannot hold both. If the trajectory was cut "
            f"short there, mark that step as truncated and done; write_checkpoint(..., layout='ted') holds any steps"
        )
    flat = np.zeros((len(root) + int(ends.sum()), *root.shape[1:]), root.dtype)
    rows = observation_rows(ends)
    flat[rows] = root
    flat[rows[ends] + 1] = following[ends]
    return flat


def key_of(name: str | Sequence[str]) -> Key:
    """Convert the name of an entry to a path of one name; a path stays as it is."""
    return (name,) if isinstance(name, str) else tuple(name)


def _root_and_next(data: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """Return the arrays at the root, and those in ``next``, by path."""
    if not isinstance(data.get("next"), Mapping):
        raise SchemaError(f"data: expected arrays by name and 'next' with some more, found {list(data)}")
    return _arrays_by_path({name: value for name, value in data.items() if name != "next"}), _arrays_by_path(
        data["next"]
    )


def by_path(data: Mapping[str, Any], path: Key = ()) -> dict[Key, Any]:
    """Return the values of nested mappings by path, as ``mouse_core.nested.nest`` takes them."""
    found: dict[Key, Any] = {}
    for name, value in data.items():
        found |= by_path(value, (*path, name)) if isinstance(value, Mapping) else {(*path, name): value}
    return found


def _arrays_by_path(data: Mapping[str, Any]) -> Arrays:
    """Return the arrays of nested mappings by path; lists stay lists."""
    found: dict[Key, Any] = by_path(data)
    return found | {path: np.asarray(value) for path, value in found.items() if not isinstance(value, list)}


def _done_flags(arrays: Arrays, name: str | Sequence[str], where: str) -> Bools:
    """Return the done flags as bools, without a trailing dimension of 1; ``where`` names the data for errors."""
    key = key_of(name)
    key = key[1:] if key[0] == "next" and key not in arrays else key
    if key not in arrays:
        raise SchemaError(f"{'.'.join(key)}: expected it in {where}, found {['.'.join(other) for other in arrays]}")
    values = np.asarray(arrays[key])
    if values.ndim > 1 and values.shape[-1] == 1:
        values = values[..., 0]
    if not values.size:
        raise SchemaError(f"{'.'.join(key)}: expected steps, found none")
    return values.astype(bool)


def _by_lane(values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Reshape to ``[n, environments, ...]``; without a dimension of environments there is one."""
    return values.reshape(shape[0], int(np.prod(shape[1:], dtype=np.int64)), *values.shape[len(shape) :])


def _check_ted(root: Arrays, following: Arrays, next_only: set[Key], shape: tuple[int, ...]) -> None:
    """Raise SchemaError if arrays are not of ``shape``, or an entry of ``next`` lacks its root."""
    for key, values in (root | {("next", *key): values for key, values in following.items()}).items():
        if values.shape[: len(shape)] != shape:
            raise SchemaError(f"{'.'.join(key)}: expected {list(shape)} steps, found shape {list(values.shape)}")
    for key in following:
        if key not in next_only and key not in root:
            raise SchemaError(f"next.{'.'.join(key)}: expected it at the root too, or among reward_keys")


def _check_no_flags(root: Arrays, keys: Iterable[Key], shape: tuple[int, ...], used: int) -> None:
    """Raise DataError if a used step has a done flag at the root."""
    for key in keys:
        if key in root and root[key].reshape(*shape, -1)[:used].any():
            raise DataError(f"{'.'.join(key)}: expected no done flag at the root of a step, found some")
