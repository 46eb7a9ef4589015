"""Reads and writes TED, the data layout of TorchRL, without torch: memory-mapped folders, HDF5 files, checkpoints.

The parts of this module in order: conversions in memory, arrays of a folder or file, steps, rows, checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import Columns, done_codes
from mouse_core.episodes import step_begins
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading
from mouse_core.files.writing import making
from mouse_core.formats import columns
from mouse_core.formats._files.h5 import H5File, import_h5py, leaves
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats.base import BATCH_ROWS, RowStream, overlapping_pieces
from mouse_core.nested import nest
from mouse_core.spec import check_choice

Key = tuple[str, ...]
Arrays = dict[Key, npt.NDArray[Any]]
Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]

DONE_KEYS = ("done", "truncated", "terminated")
REWARD_KEYS = ("reward",)
_SHAPE = "_storage_shape"
_GROUP = re.compile(r"traj_\d+")


def _partial_without_data(change: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a conversion. If the decorated conversion is called without data, it returns a function that has the
    given options bound.

    TorchRL's hooks need a function of this kind.
    """

    @wraps(change)
    def convert(data: Mapping[str, Any] | None = None, **options: Any) -> Any:
        return partial(convert, **options) if data is None else change(data, **options)

    return convert


# The names are those that users of TorchRL know.
@_partial_without_data
def H5Split(data: Mapping[str, Any]) -> Any:
    """Convert the nested layout to a dict for each trajectory; each dict becomes a group of an HDF5 file.

    Args:
        data: The result of ``TED2Nested``: lists with an array for each trajectory. Without ``data``, the function
            returns itself, as TorchRL's hooks need.

    Returns:
        A nested dict for each trajectory, by name: ``traj_0``, ``traj_1`` and so on. With more than 10 trajectories,
            the first name is ``traj_00``. Entries that are not lists, such as the shift, stay unchanged.

    Raises:
        SchemaError: The lists have different lengths, or there is no list.
    """
    lists = {path: value for path, value in by_path(data).items() if isinstance(value, list)}
    lengths = {len(value) for value in lists.values()}
    if len(lengths) != 1:
        raise SchemaError(f"data: expected lists with equal numbers of trajectories, found {sorted(lengths) or 'none'}")
    (count,) = lengths
    digits = len(str(max(count - 1, 0)))
    others = {name: value for name, value in data.items() if not isinstance(value, Mapping | list)}
    trajectories = (nest({path: value[number] for path, value in lists.items()}) for number in range(count))
    return {f"traj_{number:0{digits}d}": one for number, one in enumerate(trajectories)} | others


@_partial_without_data
def H5Combine(data: Mapping[str, Any]) -> Any:
    """Convert the result of ``H5Split`` back to the nested layout, with trajectories in the order of their numbers.

    Args:
        data: The result of ``H5Split``. Without ``data``, the function returns itself.

    Returns:
        The nested layout, as ``TED2Nested`` returns it.

    Raises:
        SchemaError: There are no trajectories, or their entries differ.
    """
    groups = _groups(data)
    if not groups:
        raise SchemaError(f"data: expected trajectories 'traj_0' and so on, found {list(data)[:8]}")
    parts = [by_path(data[name]) for name in groups]
    for part, group in zip(parts, groups, strict=True):
        if part.keys() != parts[0].keys():
            raise SchemaError(f"{group}: expected the entries of {groups[0]}, {sorted(parts[0])}, found {sorted(part)}")
    whole = nest({path: [np.asarray(part[path]) for part in parts] for path in parts[0]})
    return {**whole, **{name: value for name, value in data.items() if name not in set(groups)}}


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
    """Convert TED steps to the flat layout, which stores every observation once: T + 1 observations for T steps.

    An entry that is both at the root and in ``next`` becomes one array: for each trajectory, the values at the root of
    its steps, followed by the value in ``next`` of its last step. Other entries keep one value for each step: rewards
    and done flags, which are only in ``next``, and entries that are only at the root. A full ring is written from its
    oldest step on.

    Args:
        data: Nested dicts of arrays ``[n, ...]``, with ``done`` of shape ``[n]`` or ``[n, 1]``; or arrays
            ``[n, environments, ...]``, with ``done`` of shape ``[n, environments, 1]``. Without ``data``, the function
            returns itself with these options bound, as TorchRL's hooks need.
        shift: The position of the ring's cursor: the oldest step of a full ring, else the first unused position.
        is_full: Whether all ``n`` positions are used.
        done_key: The flag in ``next`` that ends a trajectory.
        shift_key, is_full_key: The keys under which the result contains ``shift`` and ``is_full``.
        done_keys: Names of done flags, which are False at the root.
        reward_keys: Names of the other entries that are only in ``next``.

    Returns:
        A nested dict of arrays, with ``shift``, ``is_full`` and ``_storage_shape``.

    Raises:
        SchemaError: An entry is only in ``next`` and not in ``reward_keys``, or arrays have different lengths.
        DataError: The flat layout cannot represent the data. Either a done flag is set at the root; or, inside a
            trajectory, ``next`` of a step differs from the root of the following step.
    """
    if not isinstance(data.get("next"), Mapping):
        raise SchemaError(
            f"data: expected a dict of arrays that has another dict of arrays as 'next', found {list(data)}"
        )
    root = _arrays_by_path({name: value for name, value in data.items() if name != "next"})
    following = _arrays_by_path(data["next"])
    done = _done_flags(following, _in_next(done_key))
    shape, n = done.shape, len(done)
    if not 0 <= shift <= n or (not is_full and not shift):
        raise SchemaError(f"shift: expected {'0' if is_full else '1'}..{n}, found {shift}")
    used = n if is_full else shift
    next_only = {*map(key_of, done_keys), *map(key_of, reward_keys)}
    _check_ted(root, following, next_only, shape)
    for key in map(key_of, done_keys):
        if key in root and root[key].reshape(*shape, -1)[:used].any():
            raise DataError(f"{'.'.join(key)}: expected no done flag at the root of a step, found some")
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
        data: The result of ``TED2Flat``. Without ``data``, the function returns itself with these options bound.
        done_key: The flag that ends a trajectory.
        shift_key, is_full_key: Names of ``shift`` and ``is_full``. Without these entries, the ring is full and its
            oldest step is at position 0.
        done_keys: Names of done flags; the flags at the root become False.
        reward_keys: Names of the other entries that belong only in ``next``.

    Returns:
        A nested dict of arrays. Unused positions of a ring are 0, because the flat layout has no values for them.

    Raises:
        SchemaError: The data have no entry ``done``.
        DataError: The length of an array is neither the number of steps nor the number of observations.
    """
    entries, done = _memory_entries(data, shift_key, is_full_key), _in_next(done_key)
    steps = _all_steps(entries, done=done, done_keys=done_keys, reward_keys=reward_keys)
    n, _, used, is_full = _ring(entries, _count_steps(entries, done))
    shift = entries.numbers.get("shift", 0) if is_full else 0
    # A full ring of 4 positions with the cursor at 1 was written in the order 1 2 3 0: position 0 has the last step.
    unused = {key: np.zeros((n - used, *values.shape[1:]), values.dtype) for key, values in steps.items()}
    return nest({key: np.roll(np.concatenate([values, unused[key]]), shift, axis=0) for key, values in steps.items()})


@_partial_without_data
def TED2Nested(data: Mapping[str, Any], **options: Any) -> Any:
    """Convert TED steps to the nested layout: each entry becomes a list with an array for each trajectory.

    Args:
        data: TED steps, as for ``TED2Flat``. Without ``data``, the function returns itself with these options bound.
        **options: The options of ``TED2Flat``.

    Returns:
        A nested dict of lists: arrays ``[T + 1, ...]`` for entries that are both at the root and in ``next``, ``[T,
        ...]`` for all others. The dict also has ``shift``, ``is_full`` and ``_storage_shape``.

    Raises:
        SchemaError, DataError: An error of ``TED2Flat``.
    """
    flat, names = TED2Flat(data, **options), _number_names(options)
    ends = _trajectory_ends(_memory_entries(flat, *names[:2]), _in_next(options.get("done_key", "done")))
    # At the end of a trajectory, one more observation follows. For end flags of 0 1 0 1, the trajectories stop behind 2
    # and 4 steps, and behind 3 and 6 observations. Unused positions of a ring are a trajectory without this
    # observation.
    observations = 1 + ends.astype(np.int64).reshape(-1)
    ends[:, -1] = True
    stops = np.flatnonzero(ends) + 1
    wide_stops = np.cumsum(observations)[stops - 1]
    cut = {
        key: np.split(values, (stops if len(values) == ends.size else wide_stops)[:-1])
        for key, values in by_path({name: value for name, value in flat.items() if name not in names}).items()
    }
    return {**nest(cut), **{name: flat[name] for name in names}}


@_partial_without_data
def Nested2TED(data: Mapping[str, Any], **options: Any) -> Any:
    """Convert the nested layout back to TED steps, each at its position in the ring.

    Args:
        data: The result of ``TED2Nested``. Without ``data``, the function returns itself with these options bound.
        **options: The options of ``Flat2TED``.

    Returns:
        A nested dict of arrays.

    Raises:
        SchemaError, DataError: An error of ``Flat2TED``.
    """
    numbers = {name: data[name] for name in _number_names(options) if name in data}
    rest = by_path({name: value for name, value in data.items() if name not in numbers})
    joined = nest({path: np.concatenate([np.asarray(part) for part in parts]) for path, parts in rest.items()})
    return Flat2TED({**joined, **numbers}, **options)


def _number_names(options: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the keys of the shift, of the flag for a full ring, and of the shape, in flat and nested data."""
    return options.get("shift_key", "shift"), options.get("is_full_key", "is_full"), _SHAPE


def observation_rows(ends: Bools) -> Int64s:
    """Return, for each step of an environment, the index of its observation in the flat layout, int64 ``[n]``.

    After the last step of a trajectory, one more row holds the final observation. With the end flags 0 1 0 0, the
    observations of the steps are in rows 0 1 3 4, and row 2 is the final observation of the first trajectory.
    """
    ended_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends)[:-1]])
    rows: Int64s = np.arange(len(ends)) + ended_before
    return rows


def _interleave(
    root: npt.NDArray[Any], following: npt.NDArray[Any], ends: Bools, places: Int64s, key: Key
) -> npt.NDArray[Any]:
    """Return the flat observations: for each trajectory, the values at the root, then ``next`` of the last step.

    ``places`` has the position in the ring of each used step, oldest first, for the error message.
    """
    used = len(places)
    goes_on = ~ends[: used - 1]
    next_values, following_roots = following[: used - 1][goes_on], root[1:used][goes_on]
    if next_values.shape != following_roots.shape:
        raise SchemaError(
            f"{'.'.join(key)}: expected this array in next to have the shape of the root, {root.shape[1:]}"
        )
    unequal = columns.differ(next_values, following_roots)
    if unequal.any():
        row = int(np.flatnonzero(goes_on)[unequal][0])
        raise DataError(
            f"{'.'.join(key)}: expected next of step {places[row]}, whose trajectory continues, to equal the "
            f"root of the next step, found another value; this layout cannot store both. If the trajectory was cut "
            f"short there, mark that step as truncated and done; write_checkpoint(..., layout='ted') stores any steps"
        )
    flat = np.zeros((len(root) + int(ends.sum()), *root.shape[1:]), root.dtype)
    rows = observation_rows(ends)
    flat[rows] = root
    flat[rows[ends] + 1] = following[ends]
    return flat


def key_of(name: str | Sequence[str]) -> Key:
    """Return the path of an entry: a name becomes a tuple with this name, and a path stays unchanged."""
    return (name,) if isinstance(name, str) else tuple(name)


def _in_next(name: str | Sequence[str]) -> Key:
    """Return the path of an entry within ``next``, without a leading "next"."""
    key = key_of(name)
    return key[1:] if key[0] == "next" else key


def by_path(data: Mapping[str, Any], path: Key = ()) -> dict[Key, Any]:
    """Return the values of nested mappings by path, for ``mouse_core.nested.nest``."""
    found: dict[Key, Any] = {}
    for name, value in data.items():
        found |= by_path(value, (*path, name)) if isinstance(value, Mapping) else {(*path, name): value}
    return found


def _arrays_by_path(data: Mapping[str, Any]) -> Arrays:
    return {path: np.asarray(value) for path, value in by_path(data).items()}


def _groups(names: Iterable[str]) -> list[str]:
    """Return the names of trajectories in the order of their numbers."""
    return sorted((name for name in names if _GROUP.fullmatch(name)), key=lambda name: int(name[5:]))


def _done_flags(arrays: Arrays, key: Key) -> Bools:
    """Return the done flags in ``next`` as bools, without a trailing dimension of 1."""
    if key not in arrays:
        raise SchemaError(f"{'.'.join(key)}: expected this array in next, found {_shown(arrays)}")
    values = arrays[key]
    if values.ndim > 1 and values.shape[-1] == 1:
        values = values[..., 0]
    if not values.size:
        raise SchemaError(f"{'.'.join(key)}: expected steps, found none")
    return values.astype(bool)


def _by_lane(values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Reshape an array to ``[n, environments, ...]``; a missing dimension of environments is inserted with size 1."""
    return values.reshape(shape[0], int(np.prod(shape[1:], dtype=np.int64)), *values.shape[len(shape) :])


def _check_ted(root: Arrays, following: Arrays, next_only: set[Key], shape: tuple[int, ...]) -> None:
    """Raise SchemaError if the shape of an array does not begin with ``shape``, or an entry in ``next`` is missing at
    the root.
    """
    for key, values in (root | {("next", *key): values for key, values in following.items()}).items():
        if values.shape[: len(shape)] != shape:
            raise SchemaError(f"{'.'.join(key)}: expected {list(shape)} steps, found shape {list(values.shape)}")
    for key in following:
        if key not in next_only and key not in root:
            raise SchemaError(
                f"next.{'.'.join(key)}: expected the same key at the root or in reward_keys, found neither"
            )


# ---------------------------------------------------------------------- arrays of a folder or file

_MOST_JSON = 64 << 20
_DEEPEST = 16
_DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16"),
}
_KINDS = ("tensordict._td.TensorDict", "tensordict.tensordict.TensorDict", "tensordict._tensordict.TensorDict")

Lane = tuple[int, int]
"""Selects one environment. Two numbers: the number of leading dimensions (time and environments), and the flat index of
the environment.
"""


@dataclass(frozen=True)
class Entries:
    """The arrays of a folder, of a file or of nested dicts.

    Args:
        name: The path for error messages.
        shapes: Shapes ``[n, ...]`` by path in the data.
        numbers: Numbers of a ring: ``shift``, ``is_full``, ``_storage_shape``, ``_len`` and ``_cursor``.
        read: A function that returns rows ``first..end - 1`` of some arrays, for one environment or for all.
    """

    name: str
    shapes: Mapping[Key, tuple[int, ...]]
    numbers: Mapping[str, Any]
    read: Callable[[Sequence[Key], int, int, Lane | None], list[npt.NDArray[Any]]]

    @property
    def has_next(self) -> bool:
        """Whether ``next`` of each step is stored; otherwise each observation is stored once."""
        return any(key[0] == "next" for key in self.shapes)


def _of_lane(values: Any, lane: Lane | None) -> Any:
    """Return the rows of one environment from values ``[time, environments.., ...]``."""
    if lane is None:
        return values
    dimensions, number = lane
    return values.reshape(len(values), math.prod(values.shape[1:dimensions]), *values.shape[dimensions:])[:, number]


def _memory_entries(data: Mapping[str, Any], shift_key: str, is_full_key: str) -> Entries:
    """Return the arrays of nested dicts in the flat layout."""
    names = {shift_key: "shift", is_full_key: "is_full", _SHAPE: _SHAPE}
    numbers = {names[name]: np.asarray(data[name]).tolist() for name in names if name in data}
    arrays = _arrays_by_path({name: value for name, value in data.items() if name not in names})
    shapes = {key: values.shape for key, values in arrays.items()}
    return Entries("data", shapes, numbers, lambda keys, first, end, _: [arrays[key][first:end] for key in keys])


def _folder_entries(path: Path) -> Entries:
    """Return the arrays of a memory-mapped folder, or of a TorchRL buffer's checkpoint that contains such a folder."""
    folder = path if (path / "meta.json").is_file() else path / "storage"
    check_inside([folder / "meta.json"], path)
    arrays, numbers = read_folder(folder)
    # TorchRL's own files: the number of used positions of the ring, and its cursor.
    places = {"len": folder / "storage_metadata.json", "cursor": folder.parent / "writer" / "metadata.json"}
    numbers |= {f"_{name}": read_json_object(file).get(name) for name, file in places.items() if file.is_file()}

    def read(keys: Sequence[Key], first: int, end: int, lane: Lane | None) -> list[npt.NDArray[Any]]:
        return [arrays[key].read(first, end, lane) for key in keys]

    return Entries(str(path), {key: array.shape for key, array in arrays.items()}, numbers, read)


def _file_entries(file: H5File) -> Entries:
    """Return the arrays of an HDF5 file."""
    names = file.names()
    if groups := _groups(names):
        return _nested_entries(file, groups, names)
    (tree,) = file.find(["/"])
    shapes, singles = _described(file.path, tree)
    numbers = {}
    for name, shape in singles.items():
        values = file.read([(name, 0, 1 << 20)])[0]
        numbers[name] = values.reshape(shape).tolist()

    def read(keys: Sequence[Key], first: int, end: int, lane: Lane | None) -> list[npt.NDArray[Any]]:
        # All environments are always read, because they share chunks of the file.
        return [_of_lane(values, lane) for values in file.read([("/".join(key), first, end) for key in keys])]

    return Entries(file.path, shapes, numbers, read)


def _described(where: str, tree: Any) -> tuple[dict[Key, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return two dicts: the shapes of the arrays in a tree, and the shapes of the single numbers at the root of the
    tree.
    """
    shapes: dict[Key, tuple[int, ...]] = {}
    singles: dict[str, tuple[int, ...]] = {}
    for path, item in leaves(tree):
        alone = len(path) == 1
        if item["kind"] == "number" and item["shape"] and not (alone and path[0].startswith("_")):
            shapes[path] = tuple(item["shape"])
        elif item["kind"] == "number" and alone:
            singles[path[0]] = tuple(item["shape"])
        elif item["kind"] != "text" or item["shape"]:
            # Raised here, because leaving out the value would silently leave out a column.
            raise damaged(
                where, f"{'/'.join(path)}: expected numbers for every step, found {item['kind']} {item['shape']}"
            )
    return shapes, singles


_TRAJECTORIES = 256  # groups whose descriptions are requested at once
_ITEMS = 1024  # arrays that are read with one request


def _nested_entries(file: H5File, groups: Sequence[str], names: Sequence[str]) -> Entries:
    """Return the arrays of a file with a group for each trajectory; the rows of all trajectories are joined."""
    members = file.names(groups[0])
    if "actions" in members and "done" not in members:  # trajectories of ManiSkill have the same names
        raise SchemaError(
            f"{file.path}: expected trajectories of TED, found trajectories of ManiSkill "
            f"({', '.join(sorted(members)[:8])}); format='maniskill' (--format maniskill) reads them"
        )
    numbers: dict[str, Any] = {}
    for name in {"shift", "is_full", _SHAPE, "_len"}.intersection(names):
        values = file.read([(name, 0, 16)])[0].reshape(-1).tolist()
        numbers[name] = values if name == _SHAPE else values[0]
    first_shapes: dict[Key, tuple[int, ...]] = {}
    lengths: dict[Key, list[int]] = {}
    for first in range(0, len(groups), _TRAJECTORIES):
        some = groups[first : first + _TRAJECTORIES]
        for group, tree in zip(some, file.find(some), strict=True):
            shapes, _ = _described(file.path, tree)
            steps = shapes.get(("done",), (0,))[0]
            first_shapes = first_shapes or shapes
            lengths = lengths or {key: [] for key in shapes}
            if ("done",) not in shapes or shapes.keys() != first_shapes.keys():
                raise SchemaError(
                    f"{file.path}, {group}: expected 'done' and the entries of {groups[0]}, {_shown(first_shapes)}, "
                    f"found {_shown(shapes)}"
                )
            for key, (length, *shape) in shapes.items():
                if length not in (steps, steps + 1) or tuple(shape) != first_shapes[key][1:]:
                    raise damaged(
                        file.path,
                        f"{group}/{'/'.join(key)}: expected {steps} entries, one per step, or {steps + 1}, one per "
                        f"observation, of shape {list(first_shapes[key][1:])}, found {[length, *shape]}",
                    )
                lengths[key].append(length)
    stops = {key: np.cumsum(each) for key, each in lengths.items()}

    def read(keys: Sequence[Key], first: int, end: int, lane: Lane | None) -> list[npt.NDArray[Any]]:
        items, counts = [], []
        for key in keys:
            low, high = np.searchsorted(stops[key], [first, end - 1], side="right").tolist()
            for group, length, stop in zip(
                groups[low : high + 1], lengths[key][low : high + 1], stops[key][low : high + 1].tolist(), strict=True
            ):
                begin = stop - length
                items.append((f"{group}/{'/'.join(key)}", max(first - begin, 0), min(end, stop) - begin))
            counts.append(len(items))
        parts = [part for place in range(0, len(items), _ITEMS) for part in file.read(items[place : place + _ITEMS])]
        return [np.concatenate(parts[begin:stop]) for begin, stop in pairwise([0, *counts])]

    return Entries(
        file.path, {key: (int(stops[key][-1]), *shape[1:]) for key, shape in first_shapes.items()}, numbers, read
    )


@contextmanager
def opened(root: Path) -> Iterator[Entries]:
    """Context manager that opens a folder or file, and closes it at the end.

    Args:
        root: A folder of TensorDict, the checkpoint of a TorchRL buffer, or an HDF5 file.

    Raises:
        ConfigError: The path holds data of another kind.
        SchemaError: The file has trajectories that another library wrote.
        DataError: The data are damaged.
    """
    if not root.exists():
        raise ConfigError(f"{root}: expected a file or folder, found none")
    file = root
    if root.is_dir() and not any((folder / "meta.json").is_file() for folder in (root, root / "storage")):
        # The checkpoint of a TorchRL buffer may contain an HDF5 file instead.
        candidates = (root / "storage" / "checkpoint.h5", root / "checkpoint.h5")
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            raise ConfigError(f"{root}: expected meta.json of a TensorDict, or checkpoint.h5, found neither")
        file = found
        check_inside([file], root)
    if file.is_dir():
        with reading(file):
            entries = _folder_entries(file)
        yield entries
        return
    with H5File(file) as opened_file:
        yield _file_entries(opened_file)


@dataclass(frozen=True)
class MemmapArray:
    """An entry of a memory-mapped folder: a file of rows.

    Args:
        file: The file.
        dtype: Type of the values; "bfloat16" is read as float32.
        shape: ``[n, ...]``.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self, first: int, end: int, lane: Lane | None = None) -> npt.NDArray[Any]:
        """Read rows ``first..end - 1``, for one environment or for all.

        Raises:
            DataError: The file is now shorter than its description states.
        """
        if not math.prod(self.shape):
            return self._delivered(np.zeros(self.shape, self.stored)[first:end])
        with reading(self.file):
            mapped: Any = np.memmap(self.file, self.stored, mode="r", shape=self.shape)
            return self._delivered(np.array(_of_lane(mapped, lane)[first:end]))

    @property
    def stored(self) -> np.dtype[Any]:
        """Type of the values in the file."""
        return np.dtype({"bfloat16": "uint16", "bool": "uint8"}.get(self.dtype, self.dtype)).newbyteorder("<")

    def _delivered(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.dtype == "bool":
            return np.asarray(values != 0)
        if self.dtype == "bfloat16":
            return np.asarray((values.astype(np.uint32) << 16).view(np.float32))
        return values


def read_folder(folder: Path) -> tuple[dict[Key, MemmapArray], dict[str, Any]]:
    """Return two dicts by path: the arrays of a folder, and its other values. The rows of a nested tensor are joined.

    Raises:
        DataError: A description or file is damaged or missing, or the size of a file differs from its description.
        ConfigError: The folder holds a TensorDict of another kind.
    """
    arrays: dict[Key, MemmapArray] = {}
    others: dict[str, Any] = {}
    _collect(folder, folder, (), arrays, others)
    return arrays, others


def _collect(root: Path, folder: Path, path: Key, arrays: dict[Key, MemmapArray], others: dict[str, Any]) -> None:
    """Add the content of a folder and of the folders in it to ``arrays`` and ``others``."""
    file = folder / "meta.json"
    check_inside([file, *folder.glob("*.memmap")], root)
    described = read_json_object(file, most_bytes=_MOST_JSON)
    kind = str(described.get("_type", ""))
    if "NonTensor" in kind:
        if len(path) == 1:
            # A file that is not JSON is a pickle, which is never opened, because a pickle can run code.
            others[path[0]] = described.get("data")
        return
    if not any(name in kind for name in _KINDS):
        raise ConfigError(f"{file}: expected a TensorDict, found {kind or 'no _type'}, which is not supported")
    if len(path) > _DEEPEST:
        raise damaged(file, f"expected TensorDicts nested in at most {_DEEPEST} levels, found more")
    for values in folder.glob("*.memmap"):
        if not isinstance(described.get(values.name.removesuffix(".memmap").removesuffix(".shape")), Mapping):
            raise damaged(file, f"expected a description of {values.name!r}, a file in the same folder, found none")
    for name, entry in described.items():
        if not isinstance(entry, Mapping):
            continue
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise damaged(file, f"expected the name of an entry, found {name!r}")
        if "type" in entry:
            _collect(root, folder / name, (*path, name), arrays, others)
        else:
            arrays[*path, name] = _array(folder, name, entry)


def _array(folder: Path, name: str, entry: Mapping[str, Any]) -> MemmapArray:
    file = folder / "meta.json"
    shape, dtype = _noted_shape(entry.get("shape"), file), str(entry.get("dtype")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise damaged(file, f"expected one of {sorted(_DTYPES)}, found {entry.get('dtype')!r}")
    if entry.get("is_nested"):
        shape = _joined_shape(folder, name, shape)
    return _sized(folder / f"{name}.memmap", dtype, shape)


def _joined_shape(folder: Path, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the joined rows of a nested tensor.

    For example, rows ``[2, 3]`` and ``[5, 3]`` give ``[7, 3]``.
    """
    rows, dimensions = (*shape, 0)[:2]
    if not rows or not dimensions:
        raise damaged(
            folder / "meta.json",
            f"{name}: expected the shape [rows, dimensions] of a nested tensor, found {list(shape)}",
        )
    shapes = _sized(folder / f"{name}.shape.memmap", "int64", (rows, dimensions)).read(0, rows)
    if (shapes < 0).any() or (shapes[:, 1:] != shapes[0, 1:]).any() or shapes[:, 0].astype(float).sum() > 2**48:
        raise damaged(folder / f"{name}.shape.memmap", "expected rows that differ in their first dimension only")
    return (int(shapes[:, 0].sum()), *shapes[0, 1:].tolist())


def _sized(file: Path, dtype: str, shape: tuple[int, ...]) -> MemmapArray:
    array = MemmapArray(file, dtype, shape)
    size = math.prod(shape) * array.stored.itemsize
    if size and not file.is_file():
        raise damaged(file, "expected a file, found none")
    if size and file.stat().st_size != size:
        raise damaged(file, f"expected {size} bytes for {dtype} {list(shape)}, found {file.stat().st_size}")
    return array


def _noted_shape(value: Any, file: Path) -> tuple[int, ...]:
    good = isinstance(value, list) and len(value) <= 16
    if not good or not all(type(size) is int and 0 <= size < 2**48 for size in value):
        raise damaged(file, f"expected a shape, found {value!r:.100}")
    return tuple(value)


# ---------------------------------------------------------------------- steps

_DONE = (("done",), ("terminated",), ("truncated",))
_PIECE_BYTES = 16 << 20
_AT_ONCE = 1 << 16  # largest number of steps of a block if all steps are wanted


@dataclass(frozen=True)
class StepBlock:
    """Consecutive steps of one environment.

    Args:
        root, following: Values at the root and values in ``next``; both have the same keys.
        other: Values that are only at the root or only in ``next``, by full key, and all done flags.
        begins: Mask of the steps at which a trajectory is known to begin.
    """

    root: Arrays
    following: Arrays
    other: Arrays
    begins: Bools


def steps_of(
    entries: Entries,
    *,
    batch_rows: int,
    done: Key = ("done",),
    done_keys: Sequence[str] = DONE_KEYS,
    reward_keys: Sequence[str] = REWARD_KEYS,
) -> Iterator[StepBlock]:
    """Yield all steps in the order of time, environment by environment, without unused positions.

    Args:
        entries: The open folder or file.
        batch_rows: Largest number of steps in a block.
        done: The flag that ends a trajectory, for a layout that stores each observation once.
        done_keys, reward_keys: Keys that belong in ``next``, for a layout that stores each observation once.

    Raises:
        SchemaError: The data are not steps of TED.
        DataError: The lengths of arrays contradict each other.
    """
    if entries.has_next:
        yield from _steps(entries, batch_rows)
        return
    next_only = {*map(key_of, done_keys), *map(key_of, reward_keys)}
    steps = _count_steps(entries, done)
    n, _, used, _ = _ring(entries, steps)
    if not used:
        return
    ends = _trajectory_ends(entries, done)
    both, other = _by_length(entries, steps, steps + int(ends.sum()))
    before = 0  # the number of observations of earlier environments
    for lane, lane_ends in enumerate(ends):
        rows = before + observation_rows(lane_ends)
        before += n + int(lane_ends.sum())
        begins = step_begins(lane_ends, True)
        size = _piece(entries, [*both, *other], batch_rows)
        for begin in range(0, used, size):
            end = min(begin + size, used)
            # The row after the row of a step's observation holds the observation after the step.
            here = rows[begin:end] - rows[begin]
            seen = entries.read(both, int(rows[begin]), int(rows[end - 1]) + 2, None)
            rest = entries.read(other, lane * n + begin, lane * n + end, None)
            yield StepBlock(
                {key: values[here] for key, values in zip(both, seen, strict=True)},
                {key: values[here + 1] for key, values in zip(both, seen, strict=True)},
                {("next", *key) if key in next_only else key: values for key, values in zip(other, rest, strict=True)},
                begins[begin:end],
            )


def _trajectory_ends(entries: Entries, done: Key) -> Bools:
    """Return the mask of steps that end a trajectory, ``[environments, n]``."""
    steps = _count_steps(entries, done)
    n, lanes, used, is_full = _ring(entries, steps)
    flags = entries.read([done], 0, steps, None)[0].reshape(steps, -1)
    if flags.shape[1] != 1:
        raise damaged(entries.name, f"{'.'.join(done)}: expected one flag per step, found {list(flags.shape)}")
    ends = flags.astype(bool).reshape(lanes, n)
    ends[:, (n if is_full else used) - 1] = True
    return ends


def _all_steps(
    entries: Entries, *, done_keys: Sequence[str], reward_keys: Sequence[str], done: Key = ("done",)
) -> Arrays:
    """Return all steps in the form of TED, the oldest step first: a dict from path to array ``[n, environments..,
    ...]``.
    """
    blocks = [
        *steps_of(entries, batch_rows=_AT_ONCE, done=done, done_keys=done_keys, reward_keys=reward_keys),
    ]
    if not blocks:
        raise SchemaError(f"{entries.name}: expected steps, found none")
    parts = [
        {**block.root, **{("next", *key): values for key, values in block.following.items()}, **block.other}
        for block in blocks
    ]
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    if not entries.has_next:
        flags = [key for key in map(key_of, done_keys) if ("next", *key) in arrays]
        arrays |= {key: np.zeros_like(arrays["next", *key]) for key in flags}
    outer = environments(entries)
    lanes = math.prod(outer)
    ordered = {
        key: np.swapaxes(values.reshape(lanes, len(values) // lanes, *values.shape[1:]), 0, 1)
        for key, values in arrays.items()
    }
    return {key: values.reshape(len(values), *outer, *values.shape[2:]) for key, values in ordered.items()}


def environments(entries: Entries) -> tuple[int, ...]:
    """Return the sizes of the dimensions for environments; empty if there is no such dimension."""
    if entries.has_next:
        return _steps_shape(entries.shapes, entries.name)[1:]
    shape = entries.numbers.get(_SHAPE) or [0]
    return () if isinstance(shape, int) else tuple(shape[1:])


def _steps(entries: Entries, batch_rows: int) -> Iterator[StepBlock]:
    root = {key for key in entries.shapes if key[0] != "next"}
    inside = {key[1:] for key in entries.shapes if key[0] == "next"}
    shape = _steps_shape(entries.shapes, entries.name)
    lanes = math.prod(shape[1:])
    both = sorted((root & inside).difference(_DONE))
    other = [*sorted(root.difference(both)), *(("next", *key) for key in sorted(inside.difference(both)))]
    wanted = [*both, *(("next", *key) for key in both), *other]
    ranges = _in_order(entries, shape[0] if shape else 0, lanes, _piece(entries, wanted, batch_rows))
    for lane in range(lanes):
        for number, (begin, end) in enumerate(ranges):
            read = entries.read(wanted, begin, end, (len(shape), lane))
            found = dict(zip(wanted, read, strict=True))
            yield StepBlock(
                {key: found[key] for key in both},
                {key: found["next", *key] for key in both},
                {key: found[key] for key in other},
                np.arange(end - begin) + number == 0,  # the first step of all
            )


def _steps_shape(shapes: Mapping[Key, Sequence[int]], where: str) -> tuple[int, ...]:
    """Return the shape of steps, ``[n]`` or ``[n, environments]``: the shape of a done flag without a trailing 1."""
    flag = next((("next", *key) for key in _DONE if ("next", *key) in shapes), None)
    if flag is None:
        raise SchemaError(f"{where}: expected next.done, found {_shown(shapes)}")
    shape = tuple(shapes[flag])
    shape = shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
    for key, found in shapes.items():
        if tuple(found[: len(shape)]) != shape:
            raise damaged(where, f"{'.'.join(key)}: expected {list(shape)} steps, found {list(found)}")
    return shape


def _in_order(entries: Entries, n: int, lanes: int, size: int) -> list[tuple[int, int]]:
    """Return ranges of at most ``size`` positions, from the oldest step on.

    In a full ring, the oldest step is at the cursor.

    For example, a full ring of 10 positions with the cursor at 4 and ``size`` 3 gives 4..7, 7..10, 0..3, 3..4.
    """
    numbers = entries.numbers
    # TorchRL counts the positions of all environments.
    length = _number(numbers.get("_len"), n * lanes, entries.name, "len")
    used = n if length is None else length // max(1, lanes)
    cursor = _number(numbers.get("_cursor"), n, entries.name, "cursor") or 0
    runs = [(cursor, used), (0, cursor)] if used == n and 0 < cursor < n else [(0, used)]
    return [(begin, min(begin + size, stop)) for first, stop in runs for begin in range(first, stop, size)]


def _count_steps(entries: Entries, done: Key = ("done",)) -> int:
    if done not in entries.shapes:
        wanted = f"'next', or {'.'.join(done)!r} of the flat layout"
        raise SchemaError(f"{entries.name}: expected {wanted}, found {_shown(entries.shapes)}")
    return entries.shapes[done][0]


def _ring(entries: Entries, steps: int) -> tuple[int, int, int, bool]:
    """Return four values: the number of positions of a ring for each environment, the number of environments, the
    number of used positions, and whether the ring is full.
    """
    numbers = entries.numbers
    shape = numbers.get("_storage_shape") or [steps]
    shape = [shape] if isinstance(shape, int) else list(shape)
    if not all(isinstance(size, int) and size > 0 for size in shape) or math.prod(shape) != steps:
        raise damaged(entries.name, f"_storage_shape: expected the shape of {steps} steps, found {shape!r}")
    full = bool(numbers.get("is_full", True))
    n, lanes = shape[0], steps // shape[0]
    shift = _number(numbers.get("shift"), n, entries.name, "shift")
    if shift == 0 and not full:
        raise damaged(entries.name, "shift: in a ring that is not full, expected a position of 1 or more, found 0")
    used = n if full or shift is None else shift
    length = _number(numbers.get("_len"), steps, entries.name, "len")
    return n, lanes, used if length is None else min(used, length // lanes), full


def _by_length(entries: Entries, steps: int, observations: int) -> tuple[list[Key], list[Key]]:
    """Return two groups of keys: keys with a value for each observation, and keys with a value for each step."""
    for key, (found, *_) in entries.shapes.items():
        if found not in (steps, observations):
            raise damaged(
                entries.name,
                f"{'.'.join(key)}: expected {steps} entries, one per step, or {observations}, one per observation, "
                f"found {found}",
            )
    both = [key for key, shape in entries.shapes.items() if shape[0] == observations]
    return both, [key for key in entries.shapes if key not in both]


def _piece(entries: Entries, keys: Sequence[Key], batch_rows: int) -> int:
    """Return the number of steps to read at a time: at most ``batch_rows``, and at most as many as fit into 16 MB."""
    each = sum(8 * math.prod(entries.shapes[key][1:]) for key in keys)
    return columns.rows_at_once(each, most=batch_rows, budget=_PIECE_BYTES)


def _number(value: Any, most: int, name: str, what: str) -> int | None:
    if value is not None and not (type(value) is int and 0 <= value <= most):
        raise damaged(name, f"{what}: expected a number in 0..{most}, found {json.dumps(value, default=str)[:50]}")
    return value


def _shown(keys: Iterable[Key]) -> list[str]:
    return [".".join(key) for key in keys]


# ---------------------------------------------------------------------- rows

_LOOKED_AT = 1024


def read_ted(path: str | os.PathLike[str], *, one_hot: bool | None = None, batch_rows: int = BATCH_ROWS) -> RowStream:
    """Read steps of TED: a folder that ``TensorDict.memmap`` wrote, a checkpoint of a TorchRL buffer, or an HDF5 file.

    All layouts are recognised: plain steps, the flat layout (``TED2Flat``) and the nested layout (``TED2Nested``,
    ``H5Split``). A full ring is read from its oldest step on, and unused positions are left out. Environments are read
    one after another.

    A key that is both at the root and in ``next`` belongs to the observation: ``observation`` keeps its name, and a key
    such as ``pixels`` becomes ``observation.pixels``. Other keys become ``metadata_<key>``. ``done`` is 1 where
    ``terminated`` is set, else 2 where ``truncated`` is set. Pickled values are never loaded.

    Args:
        path: The folder or file.
        one_hot: Whether to convert actions from one-hot vectors to numbers. By default, actions are converted if the
            first 1,024 actions are one-hot.
        batch_rows: Approximate number of rows of a batch.

    Raises:
        ConfigError: The path does not exist, or holds a TensorDict of an unsupported kind.
        SchemaError: The data are not steps of TED, because reward, action or done is missing; or they are trajectories
            of ManiSkill, whose groups have the same names.
        DataError: The data are damaged; the message names the file.
    """
    root = Path(path)
    with opened(root) as entries:
        first = next(steps_of(entries, batch_rows=_LOOKED_AT), None)
    if first is None:
        raise SchemaError(f"{root}: expected steps, found none")
    if one_hot is None:
        one_hot = _is_one_hot(_beside(first).get(("action",)))
    observations, arriving, begins, following = _transitions(first, True, root, one_hot)
    rows = columns.TransitionRows(final=None, where=str(root))
    return RowStream.of_columns(
        root,
        "ted",
        rows.add(observations, arriving, np.zeros(len(begins), bool), following),
        partial(_rows, root, one_hot, batch_rows),
        notes=("one-hot actions were read as the numbers of the actions",) if one_hot else (),
    )


def _rows(root: Path, one_hot: bool, batch_rows: int) -> Iterator[Columns]:
    def parts() -> Iterator[tuple[Columns, Columns, Bools, Columns]]:
        ended = True
        for block in steps_of(entries, batch_rows=batch_rows):
            part = _transitions(block, ended, root, one_hot)
            ended = bool(_ends(block, root)[-1])
            yield part

    with opened(root) as entries:
        yield from columns.transition_rows(parts(), final=None, where=str(root))


def _transitions(block: StepBlock, ended: bool, root: Path, one_hot: bool) -> tuple[Columns, Columns, Bools, Columns]:
    """Return the arguments of ``TransitionRows.add``; ``ended`` states whether the step before this block ended a
    trajectory.
    """
    beside = _beside(block)
    names = {key[0] for key in (*block.root, *beside)}
    for name in ("action", "reward"):
        if name not in names:
            raise SchemaError(f"{root}: expected {name!r} among the steps, found {_shown((*block.root, *beside))}")
    arriving: Columns = {}
    for key, values in beside.items():
        if key == ("action",):
            arriving["action"] = _numbers(values, root) if one_hot else values
        elif key == ("reward",):
            arriving["reward"] = _single(values, "reward", root)
        elif key[0] == "action":
            arriving[".".join(key)] = values
        elif key not in _DONE:
            name = "_".join(key)
            arriving[name if columns.is_metadata(name) else f"metadata_{name}"] = values
    flags, ends = _flags(block, root), _ends(block, root)
    truncated = flags.get("truncated", np.zeros_like(ends))
    arriving["done"] = done_codes(
        flags.get("terminated", ends & ~truncated), truncated if "truncated" in flags else ends
    )
    first = [name for name in ("action", "reward", "done") if name in arriving]
    ordered = {name: arriving[name] for name in (*first, *sorted(arriving.keys() - set(first)))}
    return _observed(block.root), ordered, block.begins | step_begins(ends, ended), _observed(block.following)


def _ends(block: StepBlock, root: Path) -> Bools:
    """Return a mask of steps that end a trajectory."""
    ends: Bools = np.logical_or.reduce(list(_flags(block, root).values()))
    return ends


def _flags(block: StepBlock, root: Path) -> dict[str, Bools]:
    beside = _beside(block)
    flags = {key[0]: _single(beside[key], key[0], root).astype(bool) for key in _DONE if key in beside}
    if not flags:
        raise SchemaError(f"{root}: expected next.done, found {_shown(beside)}")
    return flags


def _observed(arrays: Arrays) -> Columns:
    made: Columns = {}
    for key, values in arrays.items():
        if key == ("step_count",):
            continue  # episode_step has the same numbers
        whole = () if key[0].startswith("observation") or columns.is_metadata(key[0]) else ("observation",)
        made[".".join((*whole, *key))] = values
    return made


def _single(values: npt.NDArray[Any], name: str, root: Path) -> npt.NDArray[Any]:
    if values.size != len(values):
        raise SchemaError(f"{root}: {name}: expected one number per step, found {list(values.shape[1:])}")
    return values.reshape(len(values))


def _numbers(values: npt.NDArray[Any], root: Path) -> Int64s:
    if not _is_one_hot(values):
        raise DataError(
            f"{root}: action: expected one-hot vectors, as in the first rows, found other vectors; read them as "
            "vectors with one_hot=False"
        )
    return np.asarray(values.argmax(axis=1).astype(np.int64))


def _is_one_hot(values: npt.NDArray[Any] | None) -> bool:
    if values is None or values.ndim != 2 or values.shape[1] < 2 or values.dtype.kind not in "biu" or not len(values):
        return False
    return bool(((values == 0) | (values == 1)).all() and (values.astype(np.int64).sum(axis=1) == 1).all())


def _beside(block: StepBlock) -> Arrays:
    """Return the attribute ``other`` of a block without the done flags at the root; the leading "next" is removed from
    each key.
    """
    return {key[1:] if key[0] == "next" else key: values for key, values in block.other.items() if key not in _DONE}


_SEEN = ("observation", "metadata_", "info.", "step_count")
_SINGLE = ("reward", "done", "terminated", "truncated", "step_count")


def write_ted(stream: RowStream, path: str | os.PathLike[str]) -> int:
    """Write rows as steps of TED, for TorchRL and TensorDict.

    Observations, ``metadata_*`` and ``info.*`` are written at the root and in ``next``. The action is written at the
    root. Reward, done, terminated and truncated are written in ``next``. ``step_count`` is the index of the row in its
    episode. Encoded images are decoded. The memory use does not grow with the number of rows.

    Args:
        stream: The rows, with alignment "arrived".
        path: The folder; nothing may exist there. ``write_checkpoint(read_checkpoint(path), target, layout="h5")``
            writes the same steps to an HDF5 file.

    Returns:
        The number of steps that were written.

    Raises:
        ConfigError: ``path`` exists, has the name of a file, or another process is writing it.
        StorageError: Files cannot be written; no part of them remains.
        SchemaError: The rows have the alignment "outgoing", or a column has texts.
        DataError: Values are null, or rows differ in length. TED cannot store such rows.
    """
    check_folder_name(Path(path), wanted="the name of a folder to write")
    steps = 0
    with making(path, "write_ted") as partial, closing(FolderWriter(partial)) as writer:
        for rows, ends in _runs(stream):
            for key, values in _entries(rows, ends):
                alone = key[-1] in _SINGLE and values.ndim == 1  # in TorchRL, such values have the shape [n, 1]
                writer.append(key, values.reshape(len(values), 1) if alone else values)
            steps += len(ends) - 1
        if not steps:
            raise DataError(f"{stream.path}: expected at least one transition, found none")
        writer.finish(batch=(steps,))
    return steps


def _entries(rows: Columns, ends: Bools) -> Iterator[tuple[Key, npt.NDArray[Any]]]:
    """For some rows of an episode, yield the key of each entry, and the values to append to the entry.

    For example, rows 0 1 2 3 give three steps, from rows 0 1 2 to rows 1 2 3.
    """
    flags = {"done": ends, "terminated": rows["done"] == 1, "truncated": rows["done"] == 2}
    for name, values in rows.items():
        if name.startswith(_SEEN):
            yield (name,), values[:-1]
            yield ("next", name), values[1:]
        elif columns.belongs_to(name, "action"):
            yield (name,), values[1:]
    yield ("next", "reward"), rows["reward"][1:]
    for name, values in flags.items():
        yield ("next", name), values[1:]
        yield (name,), np.zeros(len(values) - 1, bool)


def _runs(stream: RowStream) -> Iterator[tuple[Columns, Bools]]:
    """Yield runs of at least two rows of an episode; each run begins with the last row of the run before.

    An episode of one row has no step and is left out.

    Yields:
        Pairs: some rows; and for each of these rows, whether an episode ends at the row. The last row of the stream
            ends an episode only if it has a done code, because the last episode could continue.
    """
    for name in ("action", "reward", "done"):
        if not any(columns.belongs_to(other, name) for other in stream.schema.names):
            raise SchemaError(f"{stream.path}: expected a column {name!r}, found {stream.schema.names}")
    names: set[str] = set()
    step = 0
    pieces: Iterator[Any] = chain(overlapping_pieces(stream), [None])
    for (is_new, rows), following in pairwise(pieces):
        names = names or set(rows)
        if uneven := sorted(rows.keys() ^ names):
            raise DataError(f"{stream.path}: columns {uneven}: expected values in all rows, found nulls")
        for name, values in rows.items():
            if values.dtype.kind not in "biuf":
                reason = "expected numbers, found other values; remove the column with datasets' remove_columns"
                raise SchemaError(f"{stream.path}: column {name!r}: {reason}")
        count = len(rows["done"])
        step = 0 if is_new else step - 1
        ends = rows["done"] != 0
        ends[-1] |= following is not None and following[0]
        if count > 1:
            yield rows | {"step_count": step + np.arange(count)}, ends
        step += count


class FolderWriter:
    """Writes a memory-mapped folder; ``append`` adds values to an entry.

    Args:
        folder: An existing, empty folder.
        nested: Whether entries are nested tensors, in which each piece is a row.
    """

    def __init__(self, folder: Path, *, nested: bool = False) -> None:
        self._folder, self._nested = folder, nested
        self._entries: dict[Key, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._lengths: dict[Key, list[int]] = {}  # lengths of pieces
        self._streams: dict[Key, Any] = {}

    def append(self, path: Key, values: npt.NDArray[Any]) -> None:
        """Add values to an entry."""
        if path not in self._streams:
            place = self._folder.joinpath(*path[:-1])
            place.mkdir(parents=True, exist_ok=True)
            self._streams[path] = (place / f"{path[-1]}.memmap").open("wb")
            self._entries[path] = values.dtype, values.shape[1:]
            self._lengths[path] = []
        self._streams[path].write(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).data)
        self._lengths[path].append(len(values))

    def finish(self, *, batch: tuple[int, ...], others: Mapping[str, Any] | None = None) -> None:
        """Write the descriptions."""
        self.close()
        folders: dict[Key, dict[str, Any]] = {(): {}}
        for path, (dtype, shape) in self._entries.items():
            for depth in range(1, len(path)):
                folders.setdefault(path[: depth - 1], {})[path[depth - 1]] = {"type": "TensorDict"}
                folders.setdefault(path[:depth], {})
            whole = [sum(self._lengths[path]), *shape]
            if self._nested:
                shapes = np.array([[length, *shape] for length in self._lengths[path]], "<i8")
                batch = shapes.shape[:1]
                self._folder.joinpath(*path[:-1], f"{path[-1]}.shape.memmap").write_bytes(shapes.tobytes())
                whole = list(shapes.shape)
            entry = {"device": "cpu", "shape": whole, "dtype": f"torch.{dtype.name}", "is_nested": self._nested}
            folders[path[:-1]][path[-1]] = entry
        for name, value in (others or {}).items():
            folders[()][name] = {"type": "NonTensorData"}
            kind = "<class 'tensordict.tensorclass.NonTensorData'>"
            self._describe((name,), {"_type": kind, "data": value, "_is_non_tensor": True, "_metadata": None})
        for path, entries in folders.items():
            numbers = {"shape": list(batch), "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
            self._describe(path, {**entries, **numbers})

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams.values():
            stream.close()

    def _describe(self, path: Key, entries: Mapping[str, Any]) -> None:
        place = self._folder.joinpath(*path)
        place.mkdir(parents=True, exist_ok=True)
        (place / "meta.json").write_text(json.dumps(entries), encoding="utf-8")


# ---------------------------------------------------------------------- checkpoints


def read_checkpoint(
    path: str | os.PathLike[str], *, done_keys: Sequence[str] = DONE_KEYS, reward_keys: Sequence[str] = REWARD_KEYS
) -> dict[str, Any]:
    """Read the steps of a TorchRL buffer's checkpoint, oldest first, for ``ReplayBuffer.extend``.

    Args:
        path: The folder that ``dumps`` wrote with any checkpointer, the folder of the storage in it, or an HDF5 file.
        done_keys, reward_keys: The options of the checkpointer.

    Returns:
        Nested dicts of arrays ``[n, ...]``, or ``[n, environments, ...]``, in the form of TED. Unused positions are
            left out.

    Raises:
        ConfigError: The path does not exist, or has no checkpoint.
        SchemaError: The data are not steps of TED.
        DataError: The data are damaged; the message names the file.
    """
    with opened(Path(path)) as entries:
        return nest(_all_steps(entries, done_keys=done_keys, reward_keys=reward_keys))


_LAYOUTS = ("ted", "flat", "nested", "h5")


def write_checkpoint(
    steps: Any,
    path: str | os.PathLike[str],
    *,
    layout: str = "flat",
    capacity: int | None = None,
    cursor: int = 0,
    batch_size: int | None = None,
    done_keys: Sequence[str] = DONE_KEYS,
    reward_keys: Sequence[str] = REWARD_KEYS,
) -> int:
    """Write steps as a checkpoint for the method ``loads`` of a TorchRL buffer.

    "flat" (``FlatStorageCheckpointer``), "nested" (``NestedStorageCheckpointer``) and "h5" (``H5StorageCheckpointer``)
    store each observation once; "ted" (``TensorStorageCheckpointer``) stores plain steps. The TorchRL buffer that loads
    the checkpoint must have the same checkpointer and ``capacity`` positions. The state of samplers and transforms is
    not written.

    Args:
        steps: A replay buffer with rows in the form of TED, to which no rows may be added during the call; or nested
            dicts of arrays ``[n, ...]`` or ``[n, environments, ...]``, with observations at the root and in ``next``.
        path: A new folder.
        layout: "ted", "flat", "nested" or "h5".
        capacity: Number of positions along time; by default ``n``, or the capacity of the replay buffer.
        cursor: The position of the oldest step, which is overwritten next, if there are ``capacity`` steps. For a
            replay buffer, the default is the cursor of the buffer.
        batch_size: The batch size that ``loads`` sets in the buffer; by default the batch size of the replay buffer.
        done_keys, reward_keys: The same options as for ``TED2Flat`` and TorchRL's checkpointer.

    Returns:
        The number of steps that were written, summed over environments.

    Raises:
        ConfigError: ``path`` exists, the layout is unknown, or the capacity or cursor is out of range.
        SchemaError, DataError: The layout cannot store the data, as for ``TED2Flat``.
        StorageError: Files cannot be written; no part of them remains.
        ImportError: ``layout`` is "h5", and h5py is not installed.
    """
    check_choice("layout", layout, _LAYOUTS)
    if hasattr(steps, "storage"):
        arrays, capacity, cursor = _of_storage(steps.storage)
        batch_size = batch_size or steps.batch_size
    else:
        arrays, capacity, cursor = _of_steps(steps, capacity, cursor)
    used, *lanes = _steps_shape({key: values.shape for key, values in arrays.items()}, "steps")
    shape, count = (capacity, *lanes), used * math.prod(lanes)
    if used < capacity:  # unused positions are zeros
        arrays = {
            key: np.concatenate([values, np.zeros((capacity - used, *values.shape[1:]), values.dtype)])
            for key, values in arrays.items()
        }
    elif layout != "ted" and lanes and not cursor and used > 1:
        # TorchRL's Flat2TED copies [:-cursor] of a full ring of several environments, which is empty at 0.
        arrays, cursor = {key: np.roll(values, 1, axis=0) for key, values in arrays.items()}, 1
    changed: dict[str, Any] = nest(arrays)
    if layout != "ted":
        options: dict[str, Any] = {"shift": cursor, "is_full": used == capacity}
        convert = TED2Flat if layout == "flat" else TED2Nested
        changed = convert(changed, **options, done_keys=done_keys, reward_keys=reward_keys)
    with making(Path(path), "write_checkpoint") as partial:
        storage = partial / "storage"
        storage.mkdir()
        (partial / "writer").mkdir()
        notes: dict[str, dict[str, Any]] = {
            "writer/metadata.json": {"cursor": cursor, "write_count": count},
            "buffer_metadata.json": {"batch_size": batch_size, "consume_after_n_samples": None},
        }
        if layout == "h5":
            with import_h5py().File(storage / "checkpoint.h5", "w") as file:
                for key, value in by_path(H5Split(changed) | {"_len": count}).items():
                    file["/".join(key)] = np.asarray(value)
        else:
            notes["storage/storage_metadata.json"] = {"metadata": {}, "is_pytree": False, "len": count}
            others = {} if layout == "ted" else {name: changed.pop(name) for name in ("shift", "is_full", _SHAPE)}
            with closing(FolderWriter(storage, nested=layout == "nested")) as writer:
                for key, values in by_path(changed).items():
                    for part in values if layout == "nested" else [values]:
                        writer.append(key, part)
                writer.finish(batch=shape if layout == "ted" else (), others=others)
        for name, note in notes.items():
            (partial / name).write_text(json.dumps(note), encoding="utf-8")
    return count


def _of_storage(storage: Any) -> tuple[Arrays, int, int]:
    """Return the arrays of a buffer's storage by path, its capacity along time, and the position to write next."""
    lanes, rows = storage.num_envs, len(storage)
    if not rows:
        raise ConfigError("write_checkpoint: expected steps, found an empty buffer")
    shape = (rows // lanes, lanes) if storage.ndim > 1 else (rows,)
    slots = np.arange(rows)
    if hasattr(storage, "batch"):  # the storage is a list of rows
        batch = storage.batch(slots)
        found = by_path(batch) if isinstance(batch, Mapping) else {}
    else:
        found = {key_of(key): storage.read(key, slots) for key in storage.keys}
    capacity = storage.capacity // lanes
    arrays = {key: values.reshape(*shape, *values.shape[1:]) for key, values in found.items()}
    return arrays, capacity, storage.written // lanes % capacity


def _of_steps(steps: Any, capacity: int | None, cursor: int) -> tuple[Arrays, int, int]:
    """Return three values: the arrays of steps by path, the capacity, and the position to write next."""
    if not isinstance(steps, Mapping) or not isinstance(steps.get("next"), Mapping):
        found = list(steps) if isinstance(steps, Mapping) else type(steps).__name__
        raise SchemaError(f"steps: expected a dict of arrays that has another dict of arrays as 'next', found {found}")
    arrays = {key: np.asarray(value) for key, value in by_path(steps).items()}
    used = _steps_shape({key: values.shape for key, values in arrays.items()}, "steps")[0]
    if not used:
        raise SchemaError("steps: expected steps, found none")
    capacity = used if capacity is None else capacity
    if capacity < used:
        raise ConfigError(f"capacity: expected at least {used}, the number of steps, found {capacity}")
    if not 0 <= cursor < capacity or (cursor and used < capacity):
        raise ConfigError(
            f"cursor: expected a position in a full ring, 0..{capacity - 1}, found {cursor} for {used} steps"
        )
    return arrays, capacity, cursor if used == capacity else used


__all__ = [
    "Flat2TED",
    "H5Combine",
    "H5Split",
    "Nested2TED",
    "TED2Flat",
    "TED2Nested",
    "read_checkpoint",
    "read_ted",
    "write_checkpoint",
    "write_ted",
]
