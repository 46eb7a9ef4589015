"""Reads and writes datasets of Minari, without the package Minari.

Minari stores T+1 observations and T actions of an episode. Action t is taken on observation t, so the action moves to
row t + 1. Infos t arrived with observation t, so they stay in row t.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import column_type, fixed_shape
from mouse_core.columns.episode_rows import Columns, done_codes, episode_rows
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading
from mouse_core.files.writing import making
from mouse_core.formats._files.h5 import H5File, append_rows, import_h5py, leaves
from mouse_core.formats.base import BATCH_ROWS, RowStream, in_stored_layout, pieces_of
from mouse_core.formats.columns import (
    MISSING,
    belongs_to,
    bytes_a_row,
    check_batch_rows,
    from_arrow,
    is_metadata,
    is_single,
    keys_of,
    metadata_column,
    named,
    nested,
    rows_at_once,
    to_batch,
)
from mouse_core.formats.rlds import at
from mouse_core.formats.rows import file_batches
from mouse_core.images.pixels import decode_into
from mouse_core.metadata import DatasetMetadata
from mouse_core.nested import path_of
from mouse_core.spec import Bounded, Composite, NonTensor, from_gymnasium
from mouse_core.spec.spaces import SPACES

__all__ = ["read_minari", "write_minari"]


def written_space(space: Any) -> dict[str, Any]:
    """Convert a space of gymnasium to Minari's form of a space. A mapping that already has this form is copied.

    Raises:
        ConfigError: Minari does not support this kind of space.
    """
    if isinstance(space, Mapping) and not hasattr(space, "spaces"):  # gymnasium's Dict is also a mapping
        return dict(space)
    kind = type(space).__name__
    if kind == "Box":
        found: dict[str, Any] = {"dtype": str(space.dtype), "shape": list(space.shape)}
        found |= {"low": space.low.tolist(), "high": space.high.tolist()}
    elif kind == "Discrete":
        found = {"dtype": "int64", "start": int(space.start), "n": int(space.n)}
    elif kind == "MultiDiscrete":
        found = {"dtype": str(space.dtype), "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    elif kind == "MultiBinary":
        found = {"n": space.n if isinstance(space.n, int) else [int(size) for size in space.n]}
    elif kind == "Text":
        found = {"max_length": space.max_length, "min_length": space.min_length, "charset": space.characters}
    elif kind == "Dict":
        found = {"subspaces": {name: written_space(part) for name, part in space.spaces.items()}}
    elif kind == "Tuple":
        found = {"subspaces": [written_space(part) for part in space.spaces]}
    else:
        raise ConfigError(f"space: expected one of {list(SPACES)}, found {kind}")
    return {"type": kind, **found}


class SpaceOf:
    """Computes the smallest space that contains all values of a column, which are added piece by piece."""

    def __init__(self) -> None:
        self._low: float | int | None = None
        self._high: float | int | None = None
        self._first: npt.NDArray[Any] | None = None
        self._characters: set[str] = set()
        self._longest = 1

    def see(self, values: npt.NDArray[Any]) -> None:
        """Add values ``[n, ...]``."""
        if not len(values):
            return
        self._first = values[:1]
        if values.dtype.kind in "OSU":
            texts = {value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values}
            self._characters.update(*texts)
            self._longest = max(self._longest, *(len(text) for text in texts))
        elif values.dtype.kind in "biu" and values.size:
            low, high = int(values.min()), int(values.max())
            self._low = low if self._low is None else min(low, int(self._low))
            self._high = high if self._high is None else max(high, int(self._high))

    def written(self) -> dict[str, Any]:
        """Return the space of the values, in Minari's form."""
        if self._first is None:
            raise DataError("space: expected values, found none")
        dtype, shape = self._first.dtype, self._first.shape[1:]
        if dtype.kind in "OSU":
            characters = "".join(sorted(self._characters)) or " "
            return {"type": "Text", "max_length": self._longest, "min_length": 0, "charset": characters}
        low, high = self._low or 0, self._high or 0
        if not shape and dtype.kind in "biu":
            start = min(int(low), 0)
            return {"type": "Discrete", "dtype": "int64", "start": start, "n": int(high) - start + 1}
        if dtype.kind == "f":
            bounds: tuple[Any, Any] = (-np.inf, np.inf)
        elif dtype == np.uint8:
            bounds = (0, 255)
        elif dtype.kind == "b":
            bounds = (0, 1)
        else:
            bounds = (int(low), int(high))
        lowest, highest = (np.full(shape, bound).tolist() for bound in bounds)
        name = "int8" if dtype.kind == "b" else str(dtype)
        return {"type": "Box", "dtype": name, "shape": list(shape), "low": lowest, "high": highest}


_VERSION = "0.5.3"
_ID = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")


def write_minari(
    rows: Any,
    path: str | os.PathLike[str],
    *,
    dataset_id: str | None = None,
    observation_space: Any = None,
    action_space: Any = None,
    env_spec: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """Write rows as a Minari dataset in an HDF5 file, for ``minari.load_dataset``, in bounded memory.

    Images are stored unchanged, without JPEG. ``info.<key>`` and ``metadata_<key>`` become ``infos[<key>]``;
    ``metadata_episode_seed`` is the episode's seed.

    Args:
        rows: A ``RowStream``, a ``DatasetStore``, a ``datasets.Dataset``, a ``pyarrow.Table``, or record batches.
        path: The folder of the dataset; nothing may exist there. ``minari.load_dataset("maze/random-v0")`` opens the
            folder ``maze/random-v0`` in the folder that the environment variable ``MINARI_DATASETS_PATH`` names.
        dataset_id: Id of the dataset, which ends in ``-v`` and a number; by default derived from ``path``.
        observation_space, action_space: Spaces of gymnasium, or mappings in Minari's form of a space. By default the
            smallest spaces that contain the values: ``Discrete`` for single integers, ``Box`` for vectors and images,
            ``Text``, and ``Dict`` for columns ``observation.<key>``.
        env_spec: The ``gymnasium.envs.registration.EnvSpec`` of the environment, or its JSON.
        metadata: Further entries of ``metadata.json``: ``author``, ``description``, ``algorithm_name``.

    Returns:
        The id of the dataset.

    Raises:
        ConfigError: ``path`` exists, another process is writing it, or Minari does not accept the id.
        StorageError: Files cannot be written; partial files are removed.
        DataError: Rows are null or marked as missing.
        ImportError: h5py is not installed.
    """
    target = Path(path)
    dataset_id = _check_id(dataset_id, target)
    with making(target, "write_minari") as partial:
        data = partial / "data"
        data.mkdir()
        counts, seen = _write_hdf5(rows, data)
        if not counts[0]:
            raise DataError("write_minari: expected rows, found none")
        size = sum(file.stat().st_size for file in data.rglob("*") if file.is_file())
        content: dict[str, Any] = {
            **(metadata or {}),
            "total_episodes": counts[0],
            "total_steps": counts[1],
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "observation_space": json.dumps(_space(observation_space, seen, "observation")),
            "action_space": json.dumps(_space(action_space, seen, "action")),
            "dataset_id": dataset_id,
            "dataset_size": round(size / 1e6, 1),
            "minari_version": _minari_version(),
        }
        if env_spec is not None:
            content["env_spec"] = env_spec if isinstance(env_spec, str) else env_spec.to_json()
        (data / "metadata.json").write_text(json.dumps(content, default=_jsonable), encoding="utf-8")
    return dataset_id


def _check_id(dataset_id: str | None, target: Path) -> str:
    if dataset_id is None:
        root = os.environ.get("MINARI_DATASETS_PATH")
        inside = root is not None and target.resolve().is_relative_to(Path(root).resolve())
        dataset_id = target.resolve().relative_to(Path(root or "").resolve()).as_posix() if inside else target.name
    if not _ID.fullmatch(dataset_id):
        raise ConfigError(
            f"dataset_id: expected (namespace/)name-v0, as in Minari, found {dataset_id!r}; give the folder such a "
            "name, or pass dataset_id"
        )
    return dataset_id


def _minari_version() -> str:
    try:
        return importlib.metadata.version("minari")
    except importlib.metadata.PackageNotFoundError:
        return _VERSION


def _jsonable(value: Any) -> Any:
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _space(given: Any, seen: dict[str, SpaceOf], prefix: str) -> dict[str, Any]:
    if given is not None:
        return written_space(given)
    return _written(nested({name: space for name, space in seen.items() if belongs_to(name, prefix)}, prefix))


def _written(spaces: Any) -> dict[str, Any]:
    """Return the nested spaces of values, in Minari's form."""
    if isinstance(spaces, SpaceOf):
        return spaces.written()
    return {"type": "Dict", "subspaces": {name: _written(space) for name, space in spaces.items()}}


def _values(columns: Columns, *, begins: bool, seen: dict[str, SpaceOf]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays to write for a piece of an episode, by path."""
    columns = dict(columns)
    if columns.pop(MISSING, np.zeros(1)).any():
        raise DataError("write_minari: expected all observations, found rows marked as missing; read with final='drop'")
    shift = slice(1, None) if begins else slice(None)
    done = columns.pop("done")[shift]
    found: dict[str, npt.NDArray[Any]] = {
        "terminations": done == 1,
        "truncations": done == 2,
        "rewards": columns.pop("reward")[shift],
    }
    for prefix, path in (("observation", "observations"), ("action", "actions")):
        names = [name for name in columns if belongs_to(name, prefix)]
        if not names:
            raise DataError(f"write_minari: expected columns of {prefix}, found {list(columns)}")
        single = is_single(names, prefix)
        for name in names:
            values = columns.pop(name)
            values = values[shift] if prefix == "action" else values
            if values.ndim == 1 and values.dtype.kind in "biu":
                values = values.astype(np.int64)
            seen.setdefault(name, SpaceOf()).see(values)
            found["/".join((path, *([] if single else keys_of(name, prefix))))] = values
    for name in ("metadata_episode_seed", "metadata_episode_options"):
        columns.pop(name, None)
    for name, values in columns.items():
        key = name.removeprefix("info.").replace(".", "/") if name.startswith("info.") else name
        found[f"infos/{key.removeprefix('metadata_')}"] = values
    return found


def _write_hdf5(rows: Any, data: Path) -> tuple[tuple[int, int], dict[str, SpaceOf]]:
    h5py = import_h5py()
    seen: dict[str, SpaceOf] = {}
    episodes = steps = 0
    group: Any = None
    with h5py.File(data / "main_data.hdf5", "w", track_order=True) as file:
        for begins, columns in pieces_of(rows):
            begins = begins or group is None
            values = _values(columns, begins=begins, seen=seen)
            if begins:
                group = file.create_group(f"episode_{episodes}")
                group.attrs["id"] = episodes
                group.attrs["total_steps"] = 0
                if "metadata_episode_seed" in columns:
                    group.attrs["seed"] = int(columns["metadata_episode_seed"][0])
                episodes += 1
            for path, array in values.items():
                append_rows(group, path, array)
            steps += len(values["rewards"])
            group.attrs["total_steps"] += len(values["rewards"])
    return (episodes, steps), seen


BUDGET = 32 << 20
"""Largest number of bytes in a piece."""

KNOWN = ("observations", "actions", "rewards", "terminations", "truncations")
"""Names of the HDF5 datasets that every episode has."""


@dataclass
class EpisodeSlice:
    """Consecutive rows of one episode.

    Args:
        episode: Index of the episode.
        begins: Index of the first row in its episode.
        observations: Observations ``[n, ...]``, nested like the space.
        arriving: ``actions``, ``rewards``, ``terminations`` and ``truncations`` of the transitions before the rows: n
            values, or n - 1 if the first row begins the episode.
        beside: Infos and other values by path, ``[n, ...]``.
        arriving_beside: Infos and other values by path, one for each transition.
        of_episode: The seed and the options of the episode.
    """

    episode: int
    begins: int
    observations: Any
    arriving: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    arriving_beside: dict[str, Any] = field(default_factory=dict)
    of_episode: dict[str, Any] = field(default_factory=dict)


def sampled(count: int, sample: int) -> list[int]:
    """Return the indices of ``sample`` evenly spaced episodes; if ``sample`` is 0, the indices of all episodes."""
    if not sample or count <= sample:
        return list(range(count))
    return sorted({index * (count - 1) // (sample - 1) for index in range(sample)})


def _spec_of(space: Any, where: str) -> Any:
    """Convert a space in Minari's form to a spec, and None to None; raise DataError for another form."""
    try:
        return None if space is None else from_gymnasium(space, where=where)
    except ConfigError as error:
        raise DataError(str(error)) from error


def _part_of(spec: Any, name: str, where: str) -> Any:
    """Return one entry of the spec of a nested space; None if the spec is unknown."""
    entries = spec.entries if isinstance(spec, Composite) else {}
    if spec is not None and name not in entries:
        raise DataError(f"{where}: expected one of {list(entries)[:20]}, found {name!r}")
    return entries.get(name)


def _is_picture(spec: Any) -> bool:
    """Whether Minari may have encoded values of this spec as images."""
    return isinstance(spec, Bounded) and spec.dtype == np.uint8 and len(spec.shape) in (2, 3)


def shaped(values: npt.NDArray[Any], spec: Any, *, where: str) -> npt.NDArray[Any]:
    """Return the stored values of a leaf in the shape of its spec; encoded images are decoded.

    Raises:
        DataError: The values do not belong to the space.
    """
    if spec is None:
        return plain_text(values)
    if isinstance(spec, NonTensor):
        if values.dtype.kind not in "OSU":
            raise DataError(f"{where}: expected text, found {values.dtype}")
        return plain_text(values)
    shape = spec.shape
    encoded = values.dtype.kind == "O" or (values.ndim == 2 and values.shape[1] != math.prod(shape))
    if encoded and _is_picture(spec):
        return _pictures(values, shape, where)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{where}: expected numbers of shape {list(shape)}, found {values.dtype}")
    if values.shape[1:] != shape:
        if math.prod(values.shape[1:]) != math.prod(shape):
            raise DataError(f"{where}: expected values of shape {list(shape)}, found {list(values.shape[1:])}")
        return values.reshape(len(values), *shape)
    return values


def _pictures(values: npt.NDArray[Any], shape: tuple[int, ...], where: str) -> npt.NDArray[np.uint8]:
    frames = np.empty((len(values), *shape), np.uint8)
    wanted = (*shape, 1)[:3]
    for index, encoded in enumerate(values):
        data = encoded if isinstance(encoded, bytes) else encoded.tobytes()
        try:
            decode_into(data, frames[index].reshape(wanted))
        except ValueError as error:
            raise DataError(f"{where}, step {index}: {error}") from error
    return frames


def plain_text(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert texts of fixed width to an array of objects; return other values unchanged."""
    if values.dtype.kind == "S":
        return values.astype(object)
    return values


def _leaves_of(specs: Mapping[str, Any]) -> list[Any]:
    """Return the specs of all leaves in the specs of spaces."""
    known = [spec for spec in specs.values() if spec is not None]
    return [leaf for spec in known for leaf in (spec.leaves().values() if isinstance(spec, Composite) else [spec])]


def picture_bytes(specs: Mapping[str, Any]) -> int:
    """Return the size of the decoded images of a step, in bytes."""
    return sum(math.prod(leaf.shape) for leaf in _leaves_of(specs) if _is_picture(leaf))


def spec_of_columns(observations: Any, actions: Any, schema: pa.Schema) -> Any:
    """Return the specs of the numeric columns, by column; None if no space is known.

    Args:
        observations, actions: Specs of the spaces; None if not known.
        schema: Schema of the rows.
    """
    found: dict[str, Any] = {}
    for name, spec in (("observation", observations), ("action", actions)):
        if isinstance(spec, Composite):
            found |= {".".join((name, *map(str, path_of(key)))): leaf for key, leaf in spec.leaves().items()}
        elif spec is not None:
            found[name] = spec
    specs = {name: _flat(leaf, schema.field(name).type) for name, leaf in found.items() if name in schema.names}
    return {name: leaf for name, leaf in specs.items() if leaf is not None} or None


def _flat(spec: Any, kind: pa.DataType) -> Any:
    """Return a spec with the shape of a column's rows; None if the spec does not fit the column."""
    if isinstance(spec, NonTensor) or column_type(kind).kind not in ("scalar", "list"):
        return None
    shape = fixed_shape(kind) or (() if column_type(kind).kind == "scalar" else (math.prod(spec.shape),))
    if math.prod(shape) != math.prod(spec.shape):
        return None
    return spec if shape == spec.shape else spec.reshape(shape)


def arrow_pieces(
    path: Path, metadata: Mapping[str, Any], specs: Mapping[str, Any], *, rows: int, infos: bool, sample: int = 0
) -> Iterator[EpisodeSlice]:
    """Yield pieces of all episodes in a folder of Arrow or Parquet files, with the arguments of ``h5_pieces``."""
    suffix = metadata["data_format"]
    for number in sampled(int(metadata.get("total_episodes", 0)), sample):
        folder = path / str(number)
        files = sorted(folder.glob(f"*.{suffix}"), key=lambda file: [*map(int, re.findall(r"\d+", file.name))])
        if not files:
            raise damaged(folder, f"expected a file *.{suffix}, found none", at=f"episode {number}")
        check_inside([*files, folder / "metadata.json"], path)
        of_episode = _of_episode(folder / "metadata.json")
        begins, before = 0, None
        for file in files:
            with reading(file):
                for batch in _record_batches(file, rows, picture_bytes(specs)):
                    piece, before = _arrow_piece(batch, number, begins, before, specs, infos)
                    begins += batch.num_rows
                    piece.of_episode = of_episode
                    yield piece
                    if sample:
                        break
            if sample:
                break
        total = of_episode.pop("total_steps", None)
        if not sample and total is not None and begins != total + 1:
            raise damaged(folder, f"expected {total} steps, found {begins - 1}", at=f"episode {number}")


def _of_episode(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found = read_json_object(path)
    with reading(path):
        of_episode = {key: found[key] for key in ("seed", "total_steps") if found.get(key) is not None}
        if found.get("options"):
            of_episode["options"] = json.dumps(found["options"], sort_keys=True)
        return of_episode


def _record_batches(file: Path, rows: int, decoded: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in batches of at most ``BUDGET`` bytes. The images of a row take ``decoded`` bytes."""
    for batch in file_batches(file, rows_at_once(decoded + 64, most=rows, budget=BUDGET)):
        step = rows_at_once(bytes_a_row(batch) + decoded, most=rows, budget=BUDGET)
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def _arrow_piece(
    batch: pa.RecordBatch, number: int, begins: int, before: Any, specs: Mapping[str, Any], infos: bool
) -> tuple[EpisodeSlice, Any]:
    """Return a piece, and the action and results of the transition that begins at the piece's last row."""
    missing = [name for name in KNOWN if name not in batch.schema.names]
    if missing:
        raise DataError(f"expected columns {list(KNOWN)}, found no {missing} among {batch.schema.names}")
    values = {name: _arrow_values(batch.column(name), specs.get(name), name) for name in KNOWN}
    observations = values.pop("observations")
    arriving = {
        name: at(value, slice(None, -1)) if begins == 0 else _shift(before[name], value)
        for name, value in values.items()
    }
    last = {name: at(value, slice(-1, None)) for name, value in values.items()}
    beside: dict[str, Any] = {}
    if infos and "infos" in batch.schema.names:
        _infos(batch.column("infos"), "infos", beside)
    for name in batch.schema.names:
        if name not in KNOWN and name not in ("infos", "episode_id"):
            beside[name] = from_arrow(batch.column(name), where=name)
    return EpisodeSlice(number, begins, observations, arriving, beside), last


def _arrow_values(array: Any, spec: Any, where: str) -> Any:
    if pa.types.is_struct(array.type):
        parts = {}
        for child, part in zip(array.type, array.flatten(), strict=True):
            here = f"{where}/{child.name}"
            parts[child.name] = _arrow_values(part, _part_of(spec, child.name, here), here)
        return parts
    if array.null_count and _texts(array.type):
        # Values of the transition that begins at a row have a placeholder in an episode's last row; for texts, null.
        array = array.fill_null(b"" if pa.types.is_binary(array.type) else "")
    values = from_arrow(array, where=where)
    if _is_picture(spec) and where.startswith("actions") and values.dtype.kind == "O":
        values = values.copy()
        values[values == b""] = values[0]
    return shaped(values, spec, where=where)


def _texts(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type) or pa.types.is_large_string(data_type))


def _infos(array: Any, path: str, found: dict[str, Any]) -> None:
    for child, part in zip(array.type, array.flatten(), strict=True):
        here = f"{path}/{child.name}"
        if pa.types.is_struct(child.type):
            _infos(part, here, found)
            continue
        values = from_arrow(part, where=here)
        shape = (child.metadata or {}).get(b"shape", b"").split(b",")
        if shape != [b""]:
            values = values.reshape(len(values), *(int(size) for size in shape))
        found[here] = values


def _shift(before: Any, value: Any) -> Any:
    """Move nested values to the next row; ``before`` becomes the first row."""
    if isinstance(value, Mapping):
        return {name: _shift(before[name], item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_shift(one, item) for one, item in zip(before, value, strict=True))
    return np.concatenate([before, value[:-1]])


EPISODES_AT_ONCE = 32


def h5_pieces(
    path: Path, metadata: Mapping[str, Any], specs: Mapping[str, Any], *, rows: int, infos: bool, sample: int = 0
) -> Iterator[EpisodeSlice]:
    """Yield pieces of all episodes of an HDF5 file.

    Args:
        path: The file.
        metadata: The content of ``metadata.json``.
        specs: The specs of ``observations`` and ``actions``; None if unknown.
        rows: Largest number of rows of a piece.
        infos: Whether to read infos.
        sample: Number of evenly spaced episodes, of which only the first rows are read. With 0, all rows of all
            episodes are read.
    """
    with H5File(path) as file:
        numbers = sorted(int(match[1]) for name in file.names() if (match := re.fullmatch(r"episode_(\d{1,15})", name)))
        total = metadata.get("total_episodes", len(numbers))
        if numbers != list(range(len(numbers))) or len(numbers) != total:
            raise damaged(
                path, f"expected episodes 0..{total - 1}, found {len(numbers)} up to {max(numbers, default=-1)}"
            )
        numbers = sampled(len(numbers), sample)
        waiting: list[tuple[_H5Episode, int, int]] = []  # short pieces of several episodes are read with one request
        size = 0
        for start in range(0, len(numbers), EPISODES_AT_ONCE):
            some = numbers[start : start + EPISODES_AT_ONCE]
            for number, tree in zip(some, file.trees([f"/episode_{number}" for number in some]), strict=True):
                episode = _H5Episode(file.path, number, tree, specs, infos)
                step = rows_at_once(episode.row_bytes, most=rows)
                for begin in range(0, 1 if sample else episode.length + 1, step):
                    stop = min(begin + step, episode.length + 1)
                    waiting.append((episode, begin, stop))
                    size += (stop - begin) * episode.row_bytes
                    if size >= BUDGET // 2:
                        yield from _h5_read(file, waiting)
                        waiting, size = [], 0
        yield from _h5_read(file, waiting)


def _h5_read(file: H5File, waiting: list[tuple[_H5Episode, int, int]]) -> Iterator[EpisodeSlice]:
    asked = [episode.items(begin, stop) for episode, begin, stop in waiting]
    values = iter(file.read([item for items in asked for item in items]))
    for (episode, begin, _), items in zip(waiting, asked, strict=True):
        yield episode.piece(begin, list(islice(values, len(items))))


class _H5Episode:
    """The HDF5 datasets of an episode: their paths, and how many rows each has."""

    def __init__(self, path: str, number: int, tree: dict[str, Any], specs: Mapping[str, Any], infos: bool) -> None:
        self._path = path
        self._number = number
        self._where = f"episode {number}"
        parts = tree.get("items", {})
        missing = [name for name in KNOWN if name not in parts]
        if missing:
            raise damaged(path, f"expected {list(KNOWN)}, found no {missing} among {list(parts)}", at=self._where)
        self.of_episode = {key: value for key, value in tree["attributes"].items() if key == "seed"}
        options = {key[8:]: value for key, value in tree["attributes"].items() if key.startswith("options/")}
        if options:
            self.of_episode["options"] = json.dumps(options, sort_keys=True)
        self._tree = {name: part for name, part in parts.items() if infos or name != "infos"}
        self._specs = specs
        rewards = parts["rewards"]
        if rewards["kind"] != "number" or len(rewards["shape"]) != 1:
            raise damaged(
                path, f"rewards: expected one number a step, found shape {rewards.get('shape')}", at=self._where
            )
        self.length = int(rewards["shape"][0])
        self._leaves: list[tuple[str, dict[str, Any], int]] = []
        self.row_bytes = picture_bytes(specs)
        self._collect()

    def _collect(self) -> None:
        for path, part in leaves({"items": self._tree}):
            here, first = f"/{'/'.join(path)}", path[0]
            if first not in (*KNOWN, "infos") and (part["kind"] == "empty" or not part["shape"]):
                continue  # a single value does not show the number of steps
            length = part["shape"][0] if part["shape"] else None
            wanted = {self.length, self.length + 1} if first not in KNOWN else {self.length + (first == "observations")}
            if length not in wanted or part["kind"] == "other":
                raise damaged(
                    self._path,
                    f"{here[1:]}: expected {sorted(wanted)} rows of numbers or text for {self.length} rewards, "
                    f"found {part['kind']} {part['dtype']} {part['shape']}"
                    + ("; infos=False reads the rest" if first == "infos" else ""),
                    at=self._where,
                )
            self._leaves.append((here, part, length))
            width = int(np.prod(part["shape"][1:], dtype=np.float64))
            self.row_bytes += width * (np.dtype(part["dtype"]).itemsize if part["kind"] == "number" else 64)

    def items(self, begin: int, stop: int) -> list[tuple[str, int, int]]:
        """Return the arguments of ``H5File.read`` for rows ``begin .. stop - 1``."""
        shifts = [(path, length == self.length) for path, _, length in self._leaves]
        return [(f"/episode_{self._number}{path}", max(begin - shift, 0), stop - shift) for path, shift in shifts]

    def piece(self, begin: int, values: list[npt.NDArray[Any]]) -> EpisodeSlice:
        """Return the piece for values that were read from row ``begin`` on."""
        by_path = {path: value for (path, _, _), value in zip(self._leaves, values, strict=True)}
        shifted = {path for path, _, length in self._leaves if length == self.length}
        with reading(self._path, at=self._where):
            nested = {key: _nested(self._tree[key], by_path, f"/{key}", self._specs.get(key)) for key in KNOWN}
        parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for path, value in by_path.items():
            if path.split("/")[1] not in KNOWN:
                parts[path in shifted][path[1:]] = plain_text(value)
        observations = nested.pop("observations")
        return EpisodeSlice(self._number, begin, observations, nested, *parts, self.of_episode)


def _nested(tree: Mapping[str, Any], values: Mapping[str, Any], path: str, spec: Any) -> Any:
    """Return the values of a subtree, nested like the spec. Groups ``_index_<i>`` become the items of a tuple."""
    if tree["kind"] == "group":
        parts, entries = {}, spec.entries if isinstance(spec, Composite) else {}
        for name, item in tree["items"].items():
            index = name if name in entries else name.removeprefix("_index_")
            here = f"{path}/{name}"
            parts[index] = _nested(item, values, here, _part_of(spec, index, here))
        if spec is None and parts and all(name.startswith("_index_") for name in tree["items"]):
            return tuple(parts[str(index)] for index in range(len(parts)))
        return {name: parts[name] for name in entries if name in parts} | parts
    if path not in values:
        raise DataError(f"{path[1:]}: expected one value per step, found a single value")
    return shaped(values[path], spec, where=path[1:])


_PIECES = {"hdf5": h5_pieces, "arrow": arrow_pieces, "parquet": arrow_pieces}
_SAMPLED = 32
_MAIN = "main_data.hdf5"
_MOST_JSON = 64 << 20


def read_minari(
    path: str | os.PathLike[str], *, final: str | None = None, batch_rows: int = BATCH_ROWS, infos: bool = True
) -> RowStream:
    """Read a dataset of Minari, stored as HDF5, Arrow or Parquet, as rows.

    Columns are ``action``, ``reward``, ``done`` (1 where ``terminations`` is set, 2 where only ``truncations`` is),
    ``episode_step``, and ``observation``. Dict and Tuple spaces become ``observation.<key>`` and ``action.<key>``.
    Infos become ``info.<key>``, which is null in episodes without infos. The seed and the options of an episode become
    ``metadata_episode_seed`` and ``metadata_episode_options`` (as JSON).

    Args:
        path: The folder of the dataset, the folder ``data`` in it, or a single HDF5 file. Without ``metadata.json`` the
            spaces are unknown, and values keep their stored form.
        final: Has no effect, because the last observations are stored.
        batch_rows: Largest number of rows of a batch.
        infos: Whether to read infos.

    Returns:
        The rows; ``metadata`` is the content of ``metadata.json``, with spaces as nested mappings.

    Raises:
        ConfigError: The path has no dataset of Minari.
        DataError: A file is damaged; the message names file and episode.
        ImportError: The dataset is HDF5 and h5py is not installed.
    """
    check_batch_rows(batch_rows)
    folder = _data_folder(Path(path))
    metadata: dict[str, Any] = {"data_format": "hdf5"} if folder.is_file() else _metadata(folder)
    source = folder / _MAIN if metadata["data_format"] == "hdf5" and folder.is_dir() else folder
    check_inside([folder / "metadata.json", source], Path(path))
    with reading(folder):
        names = {"observations": "observation_space", "actions": "action_space"}
        specs = {key: _spec_of(metadata.get(name), name) for key, name in names.items()}
    pieces = _PIECES[metadata["data_format"]]
    schema = _schema(pieces(source, metadata, specs, rows=2, infos=infos, sample=_SAMPLED), str(source))

    def batches() -> Iterator[pa.RecordBatch]:
        held: list[pa.RecordBatch] = []
        count = 0
        for piece in pieces(source, metadata, specs, rows=batch_rows, infos=infos):
            where = f"{source}, episode {piece.episode}"
            with reading(source, at=f"episode {piece.episode}"):
                batch = to_batch(_columns(piece), schema, where=where)
            if count and count + batch.num_rows > batch_rows:
                yield pa.concat_batches(held)
                held, count = [], 0
            held.append(batch)
            count += batch.num_rows
        if held:
            yield pa.concat_batches(held)

    steps, episodes = metadata.get("total_steps"), metadata.get("total_episodes")
    return RowStream(
        os.fspath(path),
        "minari",
        schema,
        batches,
        episodes=episodes,
        rows=None if steps is None or episodes is None else steps + episodes,
        notes=_notes(metadata, specs),
        format_metadata=metadata,
        metadata=in_stored_layout(
            DatasetMetadata(
                "arrived",
                environments=_environments(metadata),
                spec=spec_of_columns(specs["observations"], specs["actions"], schema),
            ),
            schema,
        ),
    )


def _environments(metadata: Mapping[str, Any]) -> list[str]:
    """Return the id of the environment, which is in a JSON text inside of the JSON metadata."""
    described = metadata.get("env_spec")
    try:
        described = json.loads(described) if isinstance(described, str) else described
    except ValueError:
        return []
    name = described.get("id") if isinstance(described, Mapping) else None
    return [name] if isinstance(name, str) else []


def _data_folder(path: Path) -> Path:
    for folder in (path / "data", path, path.parent):
        if (folder / "metadata.json").is_file():
            return folder
    if path.is_file():
        return path
    raise ConfigError(f"{path}: expected a Minari dataset (a folder with data/metadata.json), found none")


def _metadata(folder: Path) -> dict[str, Any]:
    """Return the content of ``metadata.json`` after checking the entries that the reader uses."""
    file = folder / "metadata.json"
    metadata = {"data_format": "hdf5", **read_json_object(file, most_bytes=_MOST_JSON)}
    with reading(file):
        if metadata["data_format"] not in _PIECES:
            raise damaged(file, f"data_format: expected one of {list(_PIECES)}, found {metadata['data_format']!r}")
        for name in ("total_episodes", "total_steps"):
            value = metadata.get(name)
            if value is not None and not (type(value) is int and 0 <= value < 2**48):
                raise damaged(file, f"{name}: expected a count, found {value!r}")
        for name in ("observation_space", "action_space"):
            space = metadata.get(name)
            metadata[name] = json.loads(space) if isinstance(space, str) else space
    return metadata


def _notes(metadata: dict[str, Any], specs: dict[str, Any]) -> tuple[str, ...]:
    if metadata.get("jpeg_encoding", True) and any(map(_is_picture, _leaves_of(specs))):
        return ("Pictures may have been recorded as JPEG, which is not lossless (jpeg_encoding in metadata.json).",)
    return ()


def _schema(samples: Iterator[EpisodeSlice], where: str) -> pa.Schema:
    """Return the schema of all rows.

    The schema is derived from several sampled episodes, because episodes may have different metadata.
    """
    found: dict[str, pa.DataType] = {}
    for piece in samples:
        batch = to_batch(_columns(piece), None, where=f"{where}, episode {piece.episode}")
        for column in batch.schema:
            found.setdefault(column.name, column.type)
    if not found:
        raise DataError(f"{where}: expected episodes, found none")
    order = sorted(found, key=is_metadata)
    return pa.schema([(name, found[name]) for name in order])


def _columns(piece: EpisodeSlice) -> Columns:
    """Return the rows of a piece."""
    arriving: Columns = named("action", piece.arriving["actions"])
    for name in ("rewards", "terminations", "truncations"):
        values = piece.arriving[name]
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise DataError(f"{name}: expected one number a step, found {values.dtype} {list(values.shape[1:])}")
    arriving["reward"] = piece.arriving["rewards"]
    arriving["done"] = done_codes(piece.arriving["terminations"], piece.arriving["truncations"])
    arriving |= {metadata_column(path): values for path, values in piece.arriving_beside.items()}
    staying = named("observation", piece.observations)
    staying |= {metadata_column(path): values for path, values in piece.beside.items()}
    count = len(next(iter(staying.values())))
    if "seed" in piece.of_episode:
        staying["metadata_episode_seed"] = np.full(count, int(piece.of_episode["seed"]), np.int64)
    if "options" in piece.of_episode:
        staying["metadata_episode_options"] = np.full(count, piece.of_episode["options"], dtype=object)
    return episode_rows(staying, arriving, begins=piece.begins)
