"""Reading TED, the format of TorchRL, without torch: steps with a root and a ``next``, in folders and HDF5 files.

All layouts of TorchRL's storages and checkpoints are read, in the order in which steps happened: steps as they are,
flat and nested (see ``_layouts``). First come the entries of folders and files, then blocks of steps, then rows.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import Columns, done_codes
from mouse_core.episodes import step_begins
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading
from mouse_core.formats._files.h5 import H5File, leaves
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.blocks import rows_at_once
from mouse_core.formats.columns.named import is_image, named_action, named_observation
from mouse_core.formats.columns.transitions import TransitionRows, transition_rows
from mouse_core.formats.ted._layouts import DONE_KEYS, REWARD_KEYS, Arrays, Key, key_of, observation_rows
from mouse_core.nested import nest

_MOST_JSON = 64 << 20
_DEEPEST = 16
_DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16"),
}
_KINDS = ("tensordict._td.TensorDict", "tensordict.tensordict.TensorDict", "tensordict._tensordict.TensorDict")

Lane = tuple[int, int]
"""How many leading dimensions are time and environments, and the number of one environment among all."""


def _of_lane(values: Any, lane: Lane | None) -> Any:
    """Return the rows of one environment, of values ``[time, environments.., ...]``."""
    if lane is None:
        return values
    dimensions, number = lane
    return values.reshape(len(values), math.prod(values.shape[1:dimensions]), *values.shape[dimensions:])[:, number]


@dataclass(frozen=True)
class MemmapArray:
    """One entry of a memory-mapped folder: rows in a file.

    Args:
        file: The file.
        dtype: Type of the values; "bfloat16" is read as float32.
        shape: ``[n, ...]``.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self, first: int, end: int, lane: Lane | None = None) -> npt.NDArray[Any]:
        """Read rows ``first..end - 1``, of one environment or of all.

        Raises:
            DataError: The file has become shorter.
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
    """Return the arrays of a folder by path (of a nested tensor its rows one after the other), and its other values.

    Raises:
        DataError: A description or file is damaged or missing, or a file has another size than described.
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
            # What is not JSON is a pickle, which is not opened: it can run code.
            others[path[0]] = described.get("data")
        return
    if not any(name in kind for name in _KINDS):
        raise ConfigError(f"{file}: expected a TensorDict, found {kind or 'no _type'}, which is not read")
    if len(path) > _DEEPEST:
        raise damaged(file, f"expected TensorDicts at most {_DEEPEST} deep")
    for values in folder.glob("*.memmap"):
        if not isinstance(described.get(values.name.removesuffix(".memmap").removesuffix(".shape")), Mapping):
            raise damaged(file, f"expected what {values.name!r} holds, which lies beside, found nothing of it")
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
    shape, dtype = _shape(entry.get("shape"), file), str(entry.get("dtype")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise damaged(file, f"expected one of {sorted(_DTYPES)}, found {entry.get('dtype')!r}")
    if entry.get("is_nested"):
        shape = _joined_shape(folder, name, shape)
    return _sized(folder / f"{name}.memmap", dtype, shape)


def _joined_shape(folder: Path, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the joined rows of a nested tensor: rows ``[2, 3]`` and ``[5, 3]`` give ``[7, 3]``."""
    rows, dimensions = (*shape, 0)[:2]
    if not rows or not dimensions:
        raise damaged(folder / "meta.json", f"{name}: expected the shape of its shapes, found {list(shape)}")
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


def _shape(value: Any, file: Path) -> tuple[int, ...]:
    good = isinstance(value, list) and len(value) <= 16
    if not good or not all(type(size) is int and 0 <= size < 2**48 for size in value):
        raise damaged(file, f"expected a shape, found {value!r:.100}")
    return tuple(value)


class FolderEntries:
    """A memory-mapped folder, or a TorchRL buffer's checkpoint that holds one.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        folder = path if (path / "meta.json").is_file() else path / "storage"
        check_inside([folder / "meta.json"], path)
        self._arrays, self.about = read_folder(folder)
        self.shapes = {key: array.shape for key, array in self._arrays.items()}
        # What TorchRL writes beside: how many places of the ring are used, and where its cursor stands.
        places = {"len": folder / "storage_metadata.json", "cursor": folder.parent / "writer" / "metadata.json"}
        for name, file in places.items():
            if file.is_file():
                self.about[f"_{name}"] = read_json_object(file).get(name)

    def read(self, keys: Sequence[Key], first: int, end: int, lane: Lane | None = None) -> list[npt.NDArray[Any]]:
        """Read rows ``first..end - 1`` of some entries, of one environment or of all."""
        return [self._arrays[key].read(first, end, lane) for key in keys]


class FileEntries:
    """A group of an HDF5 file.

    Args:
        file: The open file.
        tree: What lies in the group; see ``H5File.trees``.
        place: The group's path.
    """

    def __init__(self, file: H5File, tree: Mapping[str, Any], place: str) -> None:
        self.name = file.path
        self.shapes: dict[Key, tuple[int, ...]] = {}
        self.about: dict[str, Any] = {}
        self._file = file
        self._place = place
        for path, item in leaves(tree):
            alone = len(path) == 1
            if item["kind"] == "number" and item["shape"] and not (alone and path[0].startswith("_")):
                self.shapes[path] = tuple(item["shape"])
            elif item["kind"] == "number" and alone:
                values = file.read([(f"{place}/{path[0]}", 0, 1 << 20)])[0]
                self.about[path[0]] = values.reshape(item["shape"]).tolist()
            elif item["kind"] != "text" or item["shape"]:
                # Left out, it would be a column that vanished.
                raise damaged(
                    self.name,
                    f"{'/'.join(path)}: expected numbers for every step, found {item['kind']} {item['shape']}",
                )

    def read(self, keys: Sequence[Key], first: int, end: int, lane: Lane | None = None) -> list[npt.NDArray[Any]]:
        """See ``FolderEntries``; all environments are read, as they share the chunks of the file."""
        found = self._file.read([("/".join((self._place, *key)), first, end) for key in keys])
        return [_of_lane(values, lane) for values in found]


Entries = FolderEntries | FileEntries


class Trajectories:
    """A file of the nested layout, which has a group for each trajectory.

    Args:
        file: The open file.
        names: The names in the file.

    Attributes:
        names: Names of the groups, in order.
        shapes: Empty; each group has its own.
        about: Numbers beside the groups: ``shift``, ``is_full``, ``_storage_shape`` and ``_len``.
    """

    def __init__(self, file: H5File, names: Sequence[str]) -> None:
        self.file, self.name = file, file.path
        self.names = sorted((name for name in names if _GROUP.fullmatch(name)), key=lambda name: int(name[5:]))
        self.shapes: dict[Key, tuple[int, ...]] = {}
        self.about: dict[str, Any] = {}
        for name in {"shift", "is_full", "_storage_shape", "_len"}.intersection(names):
            values = file.read([(name, 0, 16)])[0].reshape(-1).tolist()
            self.about[name] = values if name == "_storage_shape" else values[0]


@contextmanager
def opened(root: Path) -> Iterator[Entries | Trajectories]:
    """Open a path, and close it at the end.

    Args:
        root: A folder of TensorDict, the checkpoint of a TorchRL buffer, or an HDF5 file.

    Raises:
        ConfigError: The path is none of these.
        SchemaError: The file holds trajectories of another library.
        DataError: The data are damaged.
    """
    if not root.exists():
        raise ConfigError(f"{root}: expected a file or folder, found none")
    file = root
    if root.is_dir() and not any((folder / "meta.json").is_file() for folder in (root, root / "storage")):
        # The checkpoint of a TorchRL buffer may hold an HDF5 file instead.
        candidates = (root / "storage" / "checkpoint.h5", root / "checkpoint.h5")
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            raise ConfigError(f"{root}: expected meta.json of a TensorDict, or checkpoint.h5, found neither")
        file = found
        check_inside([file], root)
    if file.is_dir():
        with reading(file):
            entries = FolderEntries(file)
        yield entries
        return
    with H5File(file) as opened_file:
        trajectories = Trajectories(opened_file, opened_file.names())
        if trajectories.names:
            _check_nested(file, opened_file.names(trajectories.names[0]))
            yield trajectories
        else:
            yield FileEntries(opened_file, opened_file.trees(["/"])[0], "")


def _check_nested(file: Path, names: Sequence[str]) -> None:
    """Raise SchemaError for trajectories of ManiSkill, whose groups have the same names."""
    if "actions" in names and "done" not in names:
        raise SchemaError(
            f"{file}: expected trajectories of TED, found those of ManiSkill ({', '.join(sorted(names)[:8])}), which "
            "format='maniskill' (--format maniskill) reads"
        )


_DONE = (("done",), ("terminated",), ("truncated",))
_PIECE_BYTES = 16 << 20
_GROUP = re.compile(r"traj_\d+")
_TRAJECTORIES = 256


@dataclass(frozen=True)
class StepBlock:
    """Consecutive steps of one environment.

    Args:
        root, following: Values at the root and in ``next``, both by the same keys.
        other: Values at one of them alone, by full key, and all done flags.
        begins: Whether a trajectory is known to begin with a step.
    """

    root: Arrays
    following: Arrays
    other: Arrays
    begins: npt.NDArray[np.bool_]


def steps_of(
    found: Entries | Trajectories, *, batch_rows: int, apart: Collection[Key] = (*_DONE, ("reward",))
) -> Iterator[StepBlock]:
    """Yield all steps in the order they happened, environment by environment, without places that were never used.

    Args:
        found: The open folder or file.
        batch_rows: Most steps of a block.
        apart: Keys that stand in ``next`` where each observation is stored once.

    Raises:
        SchemaError: No steps of TED.
        DataError: Arrays of lengths that do not go together.
    """
    if isinstance(found, Trajectories):
        blocks = _trajectories(found, batch_rows)
    elif has_next(found):
        yield from _steps(found, batch_rows)
        return
    else:
        blocks = _flat(found, batch_rows)
    for block in blocks:
        other = {("next", *key) if key in apart else key: values for key, values in block.other.items()}
        yield replace(block, other=other)


def environments(found: Entries | Trajectories) -> tuple[int, ...]:
    """Return the shape of the environments; empty for one environment."""
    if has_next(found):
        return _shape_of_steps(found)[1:]
    shape = found.about.get("_storage_shape") or [0]
    return () if isinstance(shape, int) else tuple(shape[1:])


def _trajectories(found: Trajectories, batch_rows: int) -> Iterator[StepBlock]:
    """Yield the steps of a file of the nested layout; trajectories end where the used places of an environment end."""
    places, used = None, found.about.get("_len")
    if "_storage_shape" in found.about:
        steps = math.prod(environments(found)) * int(found.about["_storage_shape"][0])
        places, _, used, _ = _ring(found, steps)
    seen = 0
    for first in range(0, len(found.names), _TRAJECTORIES):
        names = found.names[first : first + _TRAJECTORIES]
        for name, tree in zip(names, found.file.trees(names), strict=True):
            entries = FileEntries(found.file, tree, name)
            if used is None or (seen if places is None else seen % places) < used:
                yield from _trajectory(entries, batch_rows)
            seen += _count_steps(entries, "'done' in every trajectory")


def has_next(entries: Entries | Trajectories) -> bool:
    """Whether each step is stored with its ``next``; otherwise each observation is stored once."""
    return any(key[0] == "next" for key in entries.shapes)


def _steps(entries: Entries, batch_rows: int) -> Iterator[StepBlock]:
    root = {key for key in entries.shapes if key[0] != "next"}
    inside = {key[1:] for key in entries.shapes if key[0] == "next"}
    shape = _shape_of_steps(entries)
    lanes = math.prod(shape[1:])
    both = sorted((root & inside).difference(_DONE))
    other = [*sorted(root.difference(both)), *(("next", *key) for key in sorted(inside.difference(both)))]
    wanted = [*both, *(("next", *key) for key in both), *other]
    stretches = _in_order(entries, shape[0] if shape else 0, lanes, _piece(entries, wanted, batch_rows))
    for lane in range(lanes):
        for number, (begin, end) in enumerate(stretches):
            read = entries.read(wanted, begin, end, (len(shape), lane))
            found = dict(zip(wanted, read, strict=True))
            yield StepBlock(
                {key: found[key] for key in both},
                {key: found["next", *key] for key in both},
                {key: found[key] for key in other},
                np.arange(end - begin) + number == 0,  # the first step of all
            )


def _shape_of_steps(entries: Entries | Trajectories) -> tuple[int, ...]:
    """``[n]``, or ``[n, environments]``: the shape of a done flag in ``next`` without the trailing 1."""
    flag = next((key for key in _DONE if ("next", *key) in entries.shapes), None)
    if flag is None:
        raise SchemaError(f"{entries.name}: expected next.done, found {_shown(entries.shapes)}")
    shape = entries.shapes["next", *flag]
    shape = shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape
    for key, found in entries.shapes.items():
        if found[: len(shape)] != shape:
            raise damaged(entries.name, f"{'.'.join(key)}: expected {list(shape)} steps, found {list(found)}")
    return shape


def _in_order(entries: Entries, n: int, lanes: int, size: int) -> list[tuple[int, int]]:
    """Return ranges of at most ``size`` places, from the oldest step on: a full ring begins at its cursor.

    Of 10 places, all used, with the cursor at 4, in stretches of 3: 4..7, 7..10, 0..3, 3..4.
    """
    about = entries.about
    # TorchRL counts the places of all environments.
    length = _number(about.get("_len"), n * lanes, entries.name, "len")
    used = n if length is None else length // max(1, lanes)
    cursor = _number(about.get("_cursor"), n, entries.name, "cursor") or 0
    runs = [(cursor, used), (0, cursor)] if used == n and 0 < cursor < n else [(0, used)]
    return [(begin, min(begin + size, stop)) for first, stop in runs for begin in range(first, stop, size)]


def _flat(entries: Entries, batch_rows: int) -> Iterator[StepBlock]:
    steps = _count_steps(entries, "'next', or 'done' of the flat layout")
    n, lanes, used, full = _ring(entries, steps)
    if not used:
        return
    ends = _flat_ends(entries, n, lanes)
    ends[:, (n if full else used) - 1] = True
    both, other = _by_length(entries, steps, steps + int(ends.sum()))
    before = 0  # observations of the environments before
    for lane, lane_ends in enumerate(ends):
        rows = before + observation_rows(lane_ends)
        yield from _lane(entries, both, other, lane_ends[:used], rows, lane * n, batch_rows)
        before += n + int(lane_ends.sum())


def _trajectory(entries: Entries, batch_rows: int) -> Iterator[StepBlock]:
    """Yield the steps of one trajectory of the nested layout."""
    steps = _count_steps(entries, "'done' in every trajectory")
    both, other = _by_length(entries, steps, steps + 1)
    if steps and not both:
        raise damaged(entries.name, f"expected {steps + 1} observations in a trajectory, found none")
    ends = np.arange(steps) == steps - 1
    yield from _lane(entries, both, other, ends, np.arange(steps), 0, batch_rows)


def _count_steps(entries: Entries, expected: str) -> int:
    if ("done",) not in entries.shapes:
        raise SchemaError(f"{entries.name}: expected {expected}, found {_shown(entries.shapes)}")
    return entries.shapes[("done",)][0]


def _lane(
    entries: Entries,
    both: Sequence[Key],
    other: Sequence[Key],
    ends: npt.NDArray[np.bool_],
    rows: npt.NDArray[np.int64],
    first_step: int,
    batch_rows: int,
) -> Iterator[StepBlock]:
    """Yield the steps of one environment.

    Args:
        entries: The entries.
        both, other: Keys with a value for each observation, and keys with a value for each step.
        ends: Whether a trajectory ends with a step.
        rows: Number of the observation that each step leaves; the step leads to the next one.
        first_step: Number of the first step of the environment.
        batch_rows: Most steps of a block.
    """
    begins = step_begins(ends, True)
    size = _piece(entries, [*both, *other], batch_rows)
    for begin in range(0, len(ends), size):
        end = min(begin + size, len(ends))
        here = rows[begin:end] - rows[begin]
        seen = entries.read(both, int(rows[begin]), int(rows[end - 1]) + 2)
        rest = entries.read(other, first_step + begin, first_step + end)
        yield StepBlock(
            {key: values[here] for key, values in zip(both, seen, strict=True)},
            {key: values[here + 1] for key, values in zip(both, seen, strict=True)},
            dict(zip(other, rest, strict=True)),
            begins[begin:end],
        )


def _ring(entries: Entries | Trajectories, steps: int) -> tuple[int, int, int, bool]:
    """Return places of an environment, environments, used places of an environment, and whether the ring is full."""
    about = entries.about
    shape = about.get("_storage_shape") or [steps]
    shape = [shape] if isinstance(shape, int) else list(shape)
    if not all(isinstance(size, int) and size > 0 for size in shape) or math.prod(shape) != steps:
        raise damaged(entries.name, f"_storage_shape: expected the shape of {steps} steps, found {shape!r}")
    full = bool(about.get("is_full", True))
    n, lanes = shape[0], steps // shape[0]
    shift = _number(about.get("shift"), n, entries.name, "shift")
    if shift == 0 and not full:
        raise damaged(entries.name, "shift: expected a place from 1 on in a ring that is not full, found 0")
    used = n if full or shift is None else shift
    length = _number(about.get("_len"), steps, entries.name, "len")
    return n, lanes, used if length is None else min(used, length // lanes), full


def _flat_ends(entries: Entries, n: int, lanes: int) -> npt.NDArray[np.bool_]:
    """Whether a trajectory ends with a step, bool ``[lanes, n]``."""
    done = entries.read([("done",)], 0, n * lanes)[0].reshape(n * lanes, -1)
    if done.shape[1] != 1:
        raise damaged(entries.name, f"done: expected one flag a step, found {list(done.shape)}")
    return done[:, 0].astype(bool).reshape(lanes, n).copy()


def _by_length(entries: Entries, steps: int, observations: int) -> tuple[list[Key], list[Key]]:
    """Return the keys with a value for each observation, and those with a value for each step."""
    for key, (found, *_) in entries.shapes.items():
        if found not in (steps, observations):
            raise damaged(
                entries.name,
                f"{'.'.join(key)}: expected {steps} entries, one a step, or {observations}, one an observation, "
                f"found {found}",
            )
    both = [key for key, shape in entries.shapes.items() if shape[0] == observations]
    return both, [key for key in entries.shapes if key not in both]


def _piece(entries: Entries, keys: Sequence[Key], batch_rows: int) -> int:
    """Return how many steps are read at a time: at most ``batch_rows``, and at most 16 MB."""
    each = sum(8 * math.prod(entries.shapes[key][1:]) for key in keys)
    return rows_at_once(each, most=batch_rows, budget=_PIECE_BYTES)


def _number(value: Any, most: int, name: str, what: str) -> int | None:
    if value is not None and not (type(value) is int and 0 <= value <= most):
        raise damaged(name, f"{what}: expected a number in 0..{most}, found {json.dumps(value, default=str)[:50]}")
    return value


def _shown(keys: Iterable[Key]) -> list[str]:
    return [".".join(key) for key in keys]


_LOOKED_AT = 1024


def read_ted(path: str | os.PathLike[str], *, one_hot: bool | None = None, batch_rows: int = BATCH_ROWS) -> RowStream:
    """Read steps of TED: a folder that ``TensorDict.memmap`` wrote, a checkpoint of a TorchRL buffer, or an HDF5 file.

    All layouts are recognised: steps as they are, flat (``TED2Flat``) and nested (``TED2Nested``, ``H5Split``). A ring
    that is full is read from its oldest step on, and places that were never used are left out. Of several environments,
    one follows the other.

    What stands at the root and in ``next`` belongs to a row's observation: ``observation`` becomes the standard column,
    a key such as ``pixels`` becomes ``observation_pixels`` (``observation_image`` if it is the only picture). Other
    keys become ``metadata_<key>``. Done is 1 where ``terminated``, else 2 where ``truncated``. Pickled values are not
    opened.

    Args:
        path: The folder or file.
        one_hot: Whether actions are one-hot vectors and become numbers; by default if the first 1,024 are.
        batch_rows: How many rows a batch has, about.

    Raises:
        ConfigError: Nothing there, or a TensorDict of a kind that is not read.
        SchemaError: No steps of TED: no reward, action or done; or trajectories of ManiSkill, whose groups have
            the same names.
        DataError: The data are damaged; names the file.
    """
    root = Path(path)
    with opened(root) as found:
        layout = "nested" if isinstance(found, Trajectories) else "steps with next" if has_next(found) else "flat"
        first = next(steps_of(found, batch_rows=_LOOKED_AT), None)
    if first is None:
        raise SchemaError(f"{root}: expected steps, found none")
    naming = _Naming(root, first, one_hot)
    observations, following, arriving = naming.columns(first)
    rows = TransitionRows(final=None, where=str(root))
    return RowStream.of_columns(
        root,
        "ted",
        rows.add(observations, arriving, np.zeros(len(first.begins), bool), following),
        partial(_rows, root, naming, batch_rows),
        notes=("one-hot actions were read as the numbers of the actions",) if naming.one_hot else (),
        format_metadata={"layout": layout},
    )


def _rows(root: Path, naming: _Naming, batch_rows: int) -> Iterator[Columns]:
    def parts() -> Iterator[tuple[Any, ...]]:
        ended = True
        for piece in steps_of(found, batch_rows=batch_rows):
            observations, following, arriving = naming.columns(piece)
            ends = naming.ends(piece)
            begins = piece.begins | step_begins(ends, ended)
            ended = bool(ends[-1])
            yield observations, arriving, begins, following

    with opened(root) as found:
        yield from transition_rows(parts(), final=None, where=str(root))


class _Naming:
    """The column for each key.

    Args:
        root: The path of the data, for error messages.
        piece: The first steps.
        one_hot: See ``read_ted``.
    """

    def __init__(self, root: Path, piece: StepBlock, one_hot: bool | None) -> None:
        self.where = str(root)
        others = _beside(piece)
        names = {key[0] for key in (*piece.root, *others)}
        for name in ("action", "reward"):
            if name not in names:
                found = [".".join(key) for key in (*piece.root, *others)]
                raise SchemaError(f"{root}: expected {name!r} among the steps, found {found}")
        if not others.keys() & _DONE:
            raise SchemaError(f"{root}: expected next.done, found {['.'.join(key) for key in others]}")
        pictures = [key for key, values in piece.root.items() if is_image(values)]
        self._picture = pictures[0] if len(pictures) == 1 else None
        self.one_hot = _is_one_hot(others.get(("action",))) if one_hot is None else one_hot

    def columns(self, piece: StepBlock) -> tuple[Columns, Columns, Columns]:
        """Columns of the observation left, of the one arrived at, and of what arrived."""
        arriving: Columns = {}
        for key, values in _beside(piece).items():
            if key in _DONE:
                continue
            if key == ("action",):
                arriving |= named_action(self._numbers(values) if self.one_hot else values)
            elif key == ("reward",):
                arriving["reward"] = self._single(values, "reward")
            elif key[0] == "action":
                arriving["_".join(key)] = values
            else:
                name = "_".join(key)
                arriving[name if name.startswith("metadata_") else f"metadata_{name}"] = values
        flags, ended = self._flags(piece), self.ends(piece)
        truncated = flags.get("truncated", np.zeros_like(ended))
        arriving["done"] = done_codes(
            flags.get("terminated", ended & ~truncated), truncated if "truncated" in flags else ended
        )
        first = [name for name in ("action", "reward", "done") if name in arriving]
        order = {name: arriving[name] for name in (*first, *sorted(arriving.keys() - set(first)))}
        return self._seen(piece.root), self._seen(piece.following), order

    def ends(self, piece: StepBlock) -> npt.NDArray[np.bool_]:
        """Whether a trajectory ends with a step."""
        ended: npt.NDArray[np.bool_] = np.logical_or.reduce(list(self._flags(piece).values()))
        return ended

    def _flags(self, piece: StepBlock) -> dict[str, npt.NDArray[np.bool_]]:
        return {
            key[0]: self._single(values, key[0]).astype(bool) for key, values in _beside(piece).items() if key in _DONE
        }

    def _seen(self, arrays: dict[Key, npt.NDArray[Any]]) -> Columns:
        columns: Columns = {}
        for key, values in arrays.items():
            if key == ("step_count",):
                continue  # episode_step says the same
            if key == ("observation",):
                columns |= named_observation(values)
            elif key == self._picture:
                columns["observation_image"] = values
            elif key[0].startswith(("observation", "metadata")):
                columns["_".join(key)] = values
            else:
                columns["_".join(("observation", *key))] = values
        return columns

    def _single(self, values: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        if values.size != len(values):
            raise SchemaError(f"{self.where}: {name}: expected one number a step, found {list(values.shape[1:])}")
        return values.reshape(len(values))

    def _numbers(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if values.ndim != 2 or not _is_one_hot(values):
            raise DataError(
                f"{self.where}: action: expected one-hot vectors, as the first ones are, found others; read them as "
                "vectors with one_hot=False"
            )
        return np.asarray(values.argmax(axis=1).astype(np.int64))


def _is_one_hot(values: npt.NDArray[Any] | None) -> bool:
    if values is None or values.ndim != 2 or values.shape[1] < 2 or values.dtype.kind not in "biu" or not len(values):
        return False
    return bool(((values == 0) | (values == 1)).all() and (values.astype(np.int64).sum(axis=1) == 1).all())


def _beside(piece: StepBlock) -> dict[Key, npt.NDArray[Any]]:
    """Return ``other`` of a block by keys without ``next``, and without done flags at the root, which are False."""
    return {key[1:] if key[0] == "next" else key: values for key, values in piece.other.items() if key not in _DONE}


# ---------------------------------------------------------------------- checkpoints

# Most steps of a block.
_AT_ONCE = 1 << 16


def read_checkpoint(
    path: str | os.PathLike[str], *, done_keys: Sequence[str] = DONE_KEYS, reward_keys: Sequence[str] = REWARD_KEYS
) -> dict[str, Any]:
    """The steps of a TorchRL buffer's checkpoint, from the oldest to the newest, for ``ReplayBuffer.extend``.

    Args:
        path: The folder that ``dumps`` wrote, with whichever checkpointer, or its storage; or an HDF5 file.
        done_keys, reward_keys: As the checkpointer had them.

    Returns:
        Nested dicts of arrays ``[n, ...]``, or ``[n, environments, ...]``, as TED has them; places that were never
        used are left out. All of it is in memory.

    Raises:
        ConfigError: Nothing there, or no checkpoint.
        SchemaError: No steps of TED.
        DataError: The data are damaged; names the file.
    """
    root = Path(path)
    apart = {*map(key_of, done_keys), *map(key_of, reward_keys)}
    with opened(root) as found:
        outer = environments(found)
        blocks = [*steps_of(found, batch_rows=_AT_ONCE, apart=apart)]
        is_ted = has_next(found)
    if not blocks:
        raise SchemaError(f"{root}: expected steps, found none")
    parts = [
        {**block.root, **{("next", *key): values for key, values in block.following.items()}, **block.other}
        for block in blocks
    ]
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    if not is_ted:
        flags = [key for key in map(key_of, done_keys) if ("next", *key) in arrays]
        arrays |= {key: np.zeros_like(arrays["next", *key]) for key in flags}
    lanes = math.prod(outer)
    steps = len(next(iter(arrays.values()))) // lanes
    ordered = {
        key: np.swapaxes(values.reshape(lanes, steps, *values.shape[1:]), 0, 1) for key, values in arrays.items()
    }
    return nest({key: values.reshape(steps, *outer, *values.shape[2:]) for key, values in ordered.items()})
