"""The layouts of TorchRL's TED, over nested dicts of NumPy arrays, and the ways between them.

Nothing is lost: data that a layout cannot hold are refused.
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


def _made_with_options(change: Callable[..., Any]) -> Callable[..., Any]:
    """The function; called without data it gives itself with these options, as TorchRL's hooks are made."""

    @wraps(change)
    def made(data: Mapping[str, Any] | None = None, **options: Any) -> Any:
        return partial(made, **options) if data is None else change(data, **options)

    return made


# The names are those that users of TorchRL know.
@_made_with_options
def H5Split(data: Mapping[str, Any]) -> Any:
    """The nested layout with a dict for each trajectory, as an HDF5 file has them.

    Args:
        data: As ``TED2Nested`` gives it: lists with an array for each trajectory. Without data the function itself is
            returned, as TorchRL's hooks are made.

    Returns:
        ``traj_0``, ``traj_1`` and so on, with as many digits as the last needs: nested dicts of that trajectory's
        arrays. What is no list, such as the shift, stays.

    Raises:
        SchemaError: Lists of differing length, or none.
    """
    lengths = {len(value) for value in _lists(data)}
    if len(lengths) != 1:
        raise SchemaError(f"data: expected lists of as many trajectories, found lists of {sorted(lengths) or 'none'}")
    (count,) = lengths
    digits = len(str(max(count - 1, 0)))
    names = [f"traj_{number:0{digits}d}" for number in range(count)]
    split = {name: _taken(data, number) for number, name in enumerate(names)}
    return {**split, **{name: value for name, value in data.items() if not isinstance(value, Mapping | list)}}


@_made_with_options
def H5Combine(data: Mapping[str, Any]) -> Any:
    """The nested layout again of what ``H5Split`` split, trajectories in the order of their numbers.

    Args:
        data: As ``H5Split`` gives it. Without data the function itself is returned.

    Returns:
        As ``TED2Nested`` gives it.

    Raises:
        SchemaError: No trajectories, or some that have other entries than the first.
    """
    groups = sorted((name for name in data if _GROUP.fullmatch(name)), key=lambda name: int(name[5:]))
    if not groups:
        raise SchemaError(f"data: expected trajectories 'traj_0' and so on, found {list(data)[:8]}")
    whole = _gathered([data[name] for name in groups], groups)
    return {**whole, **{name: value for name, value in data.items() if name not in set(groups)}}


def _lists(data: Mapping[str, Any]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for value in data.values():
        found += _lists(value) if isinstance(value, Mapping) else [value] if isinstance(value, list) else []
    return found


def _taken(data: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {
        name: _taken(value, number) if isinstance(value, Mapping) else value[number]
        for name, value in data.items()
        if isinstance(value, Mapping | list)
    }


def _gathered(parts: list[Mapping[str, Any]], groups: list[str]) -> dict[str, Any]:
    first = parts[0]
    for part, group in zip(parts, groups, strict=True):
        if set(part) != set(first):
            raise SchemaError(f"{group}: expected the entries of {groups[0]}, {sorted(first)}, found {sorted(part)}")
    return {
        name: _gathered([part[name] for part in parts], groups)
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
@_made_with_options
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
    """Steps as TED holds them, with every observation once: T + 1 of them for a trajectory of T steps.

    What stands at the root and in ``next`` becomes one array, a trajectory after the other, each followed by the
    ``next`` of its last step. Reward and done flags, which stand in ``next``, become arrays of one entry a step, and so
    does what stands at the root alone. A ring that is full is laid out from its oldest step on.

    Args:
        data: Nested dicts of arrays ``[n, ...]``, or ``[n, environments, ...]``, as the trailing 1 of ``done`` tells.
            Without data the function itself is returned, with these options, as TorchRL's hooks are made.
        shift: Where the ring's cursor stands: the oldest step, or, of a ring that is not full, the first unused place.
        is_full: Whether all ``n`` places are used.
        done_key: What, in ``next``, ends a trajectory.
        shift_key, is_full_key: Names for the cursor and whether the ring is full, in the result.
        done_keys: Names of done flags, which are False at the root.
        reward_keys: Names of what stands in ``next`` alone.

    Returns:
        A nested dict of arrays, and the shift, whether the ring is full, and ``_storage_shape``.

    Raises:
        SchemaError: A key that stands in ``next`` alone and is no reward, arrays of differing lengths.
        DataError: What this layout cannot hold: a done flag at the root, or a ``next`` that is not the following root
            although the trajectory goes on.
    """
    root, following = _split(data)
    done = _flag(following, done_key, "next")
    shape, n = done.shape, len(done)
    if not 0 <= shift <= n or (not is_full and not shift):
        raise SchemaError(f"shift: expected {'0' if is_full else '1'}..{n}, found {shift}")
    used = n if is_full else shift
    apart = {*map(key_of, done_keys), *map(key_of, reward_keys)}
    _check_ted(root, following, apart, shape)
    _check_no_flags(root, map(key_of, done_keys), shape, used)
    lanes = _lane(done, shape)
    order = np.roll(np.arange(n), -shift) if is_full else np.arange(n)
    flat: dict[Key, list[npt.NDArray[Any]]] = {}
    for lane in range(lanes.shape[1]):
        ends = lanes[order, lane].copy()
        ends[used - 1] = True
        for key, values in (root | {key: values for key, values in following.items() if key in apart}).items():
            mine = _lane(values, shape)[order, lane]
            if key in following and key not in apart:
                mine = _woven(mine, _lane(following[key], shape)[order, lane], ends, order[:used], key)
            flat.setdefault(key, []).append(mine)
    result = nest({key: np.concatenate(parts) for key, parts in flat.items()})
    return {**result, shift_key: shift, is_full_key: is_full, _SHAPE: tuple(shape)}


@_made_with_options
def Flat2TED(
    data: Mapping[str, Any],
    *,
    done_key: str = "done",
    shift_key: str = "shift",
    is_full_key: str = "is_full",
    done_keys: Sequence[str] = DONE_KEYS,
    reward_keys: Sequence[str] = REWARD_KEYS,
) -> Any:
    """The steps that ``TED2Flat`` laid out, each back in its place.

    Args:
        data: As ``TED2Flat`` gives it. Without data the function itself is returned, with these options.
        done_key: What ends a trajectory.
        shift_key, is_full_key: Names of the cursor and whether the ring is full; where they are missing it is full and
            begins at 0.
        done_keys: Names of done flags; at the root they become False.
        reward_keys: Names of what belongs in ``next`` alone.

    Returns:
        A nested dict of arrays. In the places of a ring that were never used, what cannot be known is 0.

    Raises:
        SchemaError: No ``done``, or an array that has neither as many entries as there are steps, nor as many as there
            are observations.
    """
    about = {name: data[name] for name in (shift_key, is_full_key, _SHAPE) if name in data}
    arrays = _leaves({name: value for name, value in data.items() if name not in about})
    done = _flag(arrays, done_key, "the data").reshape(-1)
    shape = tuple(int(size) for size in np.atleast_1d(about.get(_SHAPE, (len(done),))))
    if int(np.prod(shape)) != len(done):  # of which there are some
        raise SchemaError(f"{_SHAPE}: expected the shape of {len(done)} steps, found {shape}")
    n, lanes = shape[0], len(done) // shape[0]
    used, order = _used_places(about.get(is_full_key, True), about.get(shift_key, 0), n, shift_key)
    ends = done.reshape(lanes, n).copy()
    ends[:, used - 1] = True
    observations = len(done) + int(ends.sum())
    flags = set(map(key_of, done_keys))
    apart = {*flags, *map(key_of, reward_keys)}
    # What stands in each place of every environment, [lanes, n, ...].
    result: Arrays = {}
    for key, values in arrays.items():
        if len(values) == len(done):
            steps = values.reshape(lanes, n, *values.shape[1:])[:, order]
            result[("next", *key) if key in apart else key] = steps
            if key in flags:
                result[key] = np.zeros_like(steps)
        elif len(values) == observations:
            seen, led_to = _unwoven(values, ends)
            result[key], result["next", *key] = seen[:, order], led_to[:, order]
        else:
            raise SchemaError(
                f"{'.'.join(key)}: expected {len(done)} entries, one a step, or {observations}, one an observation, "
                f"found {len(values)}"
            )
    places = {key: np.swapaxes(values, 0, 1) for key, values in result.items()}
    return nest({key: values.reshape(*shape, *values.shape[2:]) for key, values in places.items()})


@_made_with_options
def TED2Nested(data: Mapping[str, Any], **options: Any) -> Any:
    """Steps as TED holds them, a trajectory at a time: lists with an array for each trajectory.

    Args:
        data: As for ``TED2Flat``. Without data the function itself is returned, with these options.
        **options: As for ``TED2Flat``.

    Returns:
        A nested dict of lists: ``[T + 1, ...]`` of what stands at the root and in ``next``, ``[T, ...]`` of all else;
        and the shift, whether the ring is full, and ``_storage_shape``.

    Raises:
        SchemaError, DataError: As ``TED2Flat``.
    """
    flat = TED2Flat(data, **options)
    shift_key, is_full_key = options.get("shift_key", "shift"), options.get("is_full_key", "is_full")
    about = {name: flat.pop(name) for name in (shift_key, is_full_key, _SHAPE)}
    n = about[_SHAPE][0]
    # TED2Flat writes done under the name it has in `next`.
    ends = _flag(_leaves(flat), options.get("done_key", "done"), "the data").reshape(-1, n).copy()
    used = n if about[is_full_key] else about[shift_key]
    ends[:, used - 1] = True
    widths = ends.astype(np.int64)  # an observation more where a trajectory ends
    ends[:, -1] = True
    stops = np.flatnonzero(ends.reshape(-1)) + 1
    wide_stops = np.cumsum(1 + widths.reshape(-1))[stops - 1]
    arrays = _leaves(flat)
    cut = {
        key: np.split(values, (stops if len(values) == ends.size else wide_stops)[:-1])
        for key, values in arrays.items()
    }
    return {**nest(cut), **about}


@_made_with_options
def Nested2TED(data: Mapping[str, Any], **options: Any) -> Any:
    """The steps that ``TED2Nested`` laid out, each back in its place.

    Args:
        data: As ``TED2Nested`` gives it. Without data the function itself is returned, with these options.
        **options: As for ``Flat2TED``.

    Returns:
        A nested dict of arrays.

    Raises:
        SchemaError: As ``Flat2TED``.
    """
    names = (options.get("shift_key", "shift"), options.get("is_full_key", "is_full"), _SHAPE)
    about = {name: data[name] for name in names if name in data}
    rest = {name: value for name, value in data.items() if name not in about}
    joined = nest({path: np.concatenate([np.asarray(part) for part in parts]) for path, parts in by_path(rest).items()})
    return Flat2TED({**joined, **about}, **options)


# ---------------------------------------------------------------------- helpers


def observation_rows(ends: Bools) -> Int64s:
    """Which row of the flat layout holds the observation of each step of an environment, int64 ``[n]``.

    Where a trajectory ends, a row more holds what its last step led to: for ends of 0 1 0 0 the steps' observations are
    rows 0 1 3 4, and row 2 is what the second step led to.
    """
    ended_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends)[:-1]])
    rows: Int64s = np.arange(len(ends)) + ended_before
    return rows


def _used_places(is_full: Any, shift: Any, n: int, name: str) -> tuple[int, Int64s]:
    """How many places of a ring are used, and at which step of those laid out each place stands."""
    shift = int(shift)
    used = n if is_full else shift
    if not 0 <= shift <= n or not used:
        raise SchemaError(f"{name}: expected a place in 0..{n}, found {shift}")
    return used, np.roll(np.arange(n), shift) if is_full else np.arange(n)


def _unwoven(values: npt.NDArray[Any], ends: Bools) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Of every environment, the observation of each step and what it led to, ``[lanes, n, ...]``; 0 where unknown."""
    seen, led_to = [], []
    first = 0
    for lane in ends:
        rows = observation_rows(lane)
        mine = values[first : first + len(lane) + int(lane.sum())]
        first += len(mine)
        following = mine[np.minimum(rows + 1, len(mine) - 1)]
        following[rows + 1 >= len(mine)] = 0
        seen.append(mine[rows])
        led_to.append(following)
    return np.stack(seen), np.stack(led_to)


def _woven(
    root: npt.NDArray[Any], following: npt.NDArray[Any], ends: Bools, places: Int64s, key: Key
) -> npt.NDArray[Any]:
    """A trajectory's roots and the ``next`` of its last step, one trajectory after the other.

    ``places`` are those of the steps in the ring, from the oldest one that is there on.
    """
    used = len(places)
    goes_on = ~ends[: used - 1]
    ones, others = following[: used - 1][goes_on], root[1:used][goes_on]
    if ones.shape != others.shape:
        raise SchemaError(f"{'.'.join(key)}: expected next of the root's shape {root.shape[1:]}")
    unequal = differ(ones, others)
    if unequal.any():
        row = int(np.flatnonzero(goes_on)[unequal][0])
        raise DataError(
            f"{'.'.join(key)}: expected the next of step {places[row]}, after which its trajectory goes on, to be the "
            f"root of the following step, found another value; this layout cannot hold both. If the trajectory was cut "
            f"short there, mark that step as truncated and done; write_checkpoint(..., layout='ted') holds any steps"
        )
    woven = np.zeros((len(root) + int(ends.sum()), *root.shape[1:]), root.dtype)
    rows = observation_rows(ends)
    woven[rows] = root
    woven[rows[ends] + 1] = following[ends]
    return woven


def key_of(name: str | Sequence[str]) -> Key:
    """Return the path of an entry, given as a name or as a path."""
    return (name,) if isinstance(name, str) else tuple(name)


def _split(data: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    if not isinstance(data.get("next"), Mapping):
        raise SchemaError(f"data: expected arrays by name and 'next' with some more, found {list(data)}")
    return _leaves({name: value for name, value in data.items() if name != "next"}), _leaves(data["next"])


def by_path(data: Mapping[str, Any], path: Key = ()) -> dict[Key, Any]:
    """Return the values of nested mappings by path, as ``mouse_core.nested.nest`` takes them."""
    found: dict[Key, Any] = {}
    for name, value in data.items():
        found |= by_path(value, (*path, name)) if isinstance(value, Mapping) else {(*path, name): value}
    return found


def _leaves(data: Mapping[str, Any]) -> Arrays:
    found: dict[Key, Any] = by_path(data)
    return found | {path: np.asarray(value) for path, value in found.items() if not isinstance(value, list)}


def _flag(arrays: Arrays, name: str | Sequence[str], where: str) -> Bools:
    """Done flags without the trailing 1."""
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


def _lane(values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """``[n, environments, ...]``, of one environment where there is no such dimension."""
    return values.reshape(shape[0], int(np.prod(shape[1:], dtype=np.int64)), *values.shape[len(shape) :])


def _check_ted(root: Arrays, following: Arrays, apart: set[Key], shape: tuple[int, ...]) -> None:
    for key, values in (root | {("next", *key): values for key, values in following.items()}).items():
        if values.shape[: len(shape)] != shape:
            raise SchemaError(f"{'.'.join(key)}: expected {list(shape)} steps, found shape {list(values.shape)}")
    for key in following:
        if key not in apart and key not in root:
            raise SchemaError(f"next.{'.'.join(key)}: expected it at the root too, or among reward_keys")


def _check_no_flags(root: Arrays, keys: Iterable[Key], shape: tuple[int, ...], used: int) -> None:
    for key in keys:
        if key in root and root[key].reshape(*shape, -1)[:used].any():
            raise DataError(f"{'.'.join(key)}: expected no done flag at the root of a step, found some")
