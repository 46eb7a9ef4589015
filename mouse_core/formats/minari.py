"""Reads datasets of Minari, without the package Minari.

Minari stores T+1 observations and T actions of an episode. Action t is taken on observation t, so the action moves to
row t + 1. The infos of step t arrived with observation t, so these infos stay in row t.
"""

from __future__ import annotations

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
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading
from mouse_core.formats import columns
from mouse_core.formats._files.h5 import H5File, leaves
from mouse_core.formats.base import BATCH_ROWS, RowStream, in_stored_layout
from mouse_core.formats.rows import file_batches
from mouse_core.images.pixels import decode_into
from mouse_core.metadata import DatasetMetadata
from mouse_core.nested import path_of
from mouse_core.spec import Bounded, Composite, NonTensor, from_gymnasium

__all__ = ["read_minari"]


BUDGET = 32 << 20
"""Largest size in bytes of an ``EpisodeSlice``."""

KNOWN = ("observations", "actions", "rewards", "terminations", "truncations")
"""Names of the HDF5 datasets that every episode has."""


Location = tuple[str, ...]
"""Place of an array in a dataset of Minari: the name of an entry, and the keys below it."""

Spaces = Mapping[str, Mapping[Location, Any] | None]
"""Specs of the leaves of ``observations`` and ``actions``, by the keys of each leaf; None for an unknown space."""


@dataclass
class EpisodeSlice:
    """Consecutive rows of one episode.

    Args:
        episode: Index of the episode.
        begins: Index of the first row in its episode.
        staying: Observations, infos and other values ``[n, ...]``.
        arriving: Actions, rewards, flags and further values of the transitions before the rows: n values, or n - 1 if
            the first row begins the episode.
        of_episode: The seed and the options of the episode.
    """

    episode: int
    begins: int
    staying: dict[Location, npt.NDArray[Any]]
    arriving: dict[Location, npt.NDArray[Any]]
    of_episode: dict[str, Any] = field(default_factory=dict)


def sampled(count: int, sample: int) -> list[int]:
    """Return the indices of ``sample`` evenly spaced episodes; if ``sample`` is 0, the indices of all episodes."""
    if not sample or count <= sample:
        return list(range(count))
    return sorted({index * (count - 1) // (sample - 1) for index in range(sample)})


def _leaves_of(space: Any, where: str) -> dict[Location, Any] | None:
    """Return the specs of the leaves of a space in Minari's form by their keys; None if there is no space."""
    try:
        spec = None if space is None else from_gymnasium(space, where=where)
    except ConfigError as error:
        raise DataError(str(error)) from error
    if isinstance(spec, Composite):
        return {tuple(map(str, path_of(key))): leaf for key, leaf in spec.leaves().items()}
    return None if spec is None else {(): spec}


def _leaf(location: Location, spaces: Spaces) -> tuple[Location, Any]:
    """Return the location of an array, with the keys that its space uses, and the spec of the array. If the space is
    unknown, the spec is None.

    An item of a tuple is stored under its index, or in HDF5 under ``_index_<index>``; its space uses the index.
    """
    first, *keys = location
    if first not in spaces:
        return location, None
    known = spaces[first]
    plain = tuple(key.removeprefix("_index_") for key in keys)
    if known is None:
        return (first, *plain), None
    for found in (tuple(keys), plain):
        if found in known:
            return (first, *found), known[found]
    names = ["/".join(one) for one in known]
    raise DataError(f"{'/'.join(location)}: expected one of {names[:20]}, found an array without a space")


def _ordered(values: Mapping[Location, npt.NDArray[Any]], spaces: Spaces) -> dict[Location, npt.NDArray[Any]]:
    """Return arrays in the order in which the spaces name them."""
    ranks = [(name, *keys) for name, known in spaces.items() for keys in known or ()]
    return {place: values[place] for place in (*(place for place in ranks if place in values), *values)}


def _is_picture(spec: Any) -> bool:
    """Whether Minari possibly encoded values of this spec as images."""
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
        raise DataError(f"{where}: expected a numeric array of shape {list(shape)}, found dtype {values.dtype}")
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


def _picture_bytes(spaces: Spaces) -> int:
    """Return the size of the decoded images of a step, in bytes."""
    return sum(
        math.prod(leaf.shape) for known in spaces.values() for leaf in (known or {}).values() if _is_picture(leaf)
    )


def _spec_of_columns(spaces: Spaces, schema: pa.Schema) -> Any:
    """Return the specs of the numeric columns, by column; None if no space is known."""
    specs = {}
    for entry, known in spaces.items():
        for keys, leaf in (known or {}).items():
            name = ".".join((entry.removesuffix("s"), *keys))
            if name in schema.names and (spec := _flat(leaf, schema.field(name).type)) is not None:
                specs[name] = spec
    return specs or None


def _flat(spec: Any, kind: pa.DataType) -> Any:
    """Return ``spec`` with the shape of a column's rows, or None if ``spec`` does not fit the column."""
    if isinstance(spec, NonTensor) or column_type(kind).kind not in ("scalar", "list"):
        return None
    shape = fixed_shape(kind) or (() if column_type(kind).kind == "scalar" else (math.prod(spec.shape),))
    if math.prod(shape) != math.prod(spec.shape):
        return None
    return spec if shape == spec.shape else spec.reshape(shape)


def arrow_pieces(
    path: Path, metadata: Mapping[str, Any], spaces: Spaces, *, rows: int, infos: bool, sample: int = 0
) -> Iterator[EpisodeSlice]:
    """Yield pieces of all episodes in a folder of Arrow or Parquet files; see ``h5_pieces`` for the arguments."""
    suffix = metadata["data_format"]
    for number in sampled(int(metadata.get("total_episodes", 0)), sample):
        folder = path / str(number)
        files = sorted(folder.glob(f"*.{suffix}"), key=lambda file: [*map(int, re.findall(r"\d+", file.name))])
        if not files:
            raise damaged(folder, f"expected a file *.{suffix}, found none", at=f"episode {number}")
        check_inside([*files, folder / "metadata.json"], path)
        of_episode = _episode_attributes(folder / "metadata.json")
        begins, before = 0, None
        for file in files:
            with reading(file):
                for batch in _record_batches(file, rows, _picture_bytes(spaces)):
                    piece, before = _arrow_piece(batch, number, begins, before, spaces, infos)
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


def _episode_attributes(path: Path) -> dict[str, Any]:
    """Return the seed, the options and the number of steps of an episode, if its metadata contain them."""
    if not path.exists():
        return {}
    found = read_json_object(path)
    with reading(path):
        of_episode = {key: found[key] for key in ("seed", "total_steps") if found.get(key) is not None}
        if found.get("options"):
            of_episode["options"] = json.dumps(found["options"], sort_keys=True)
        return of_episode


def _record_batches(file: Path, rows: int, decoded: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in batches of at most ``BUDGET`` bytes. ``decoded`` is the size in bytes of the decoded
    images of a row.
    """
    for batch in file_batches(file, columns.rows_at_once(decoded + 64, most=rows, budget=BUDGET)):
        step = columns.rows_at_once(columns.bytes_a_row(batch) + decoded, most=rows, budget=BUDGET)
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def _arrow_piece(
    batch: pa.RecordBatch, number: int, begins: int, before: Any, spaces: Spaces, infos: bool
) -> tuple[EpisodeSlice, Any]:
    """Return a piece of rows, and the action and results of the transition that begins at the piece's last row."""
    missing = [name for name in KNOWN if name not in batch.schema.names]
    if missing:
        raise DataError(f"expected columns {list(KNOWN)}, found no {missing} among {batch.schema.names}")
    staying, arriving, last = {}, {}, {}
    for column, array in zip(batch.schema, batch.columns, strict=True):
        if column.name == "episode_id" or (column.name == "infos" and not infos):
            continue
        for location, leaf_field, leaf in _struct_leaves((), column, array):
            place, spec = _leaf(location, spaces)
            values = _arrow_values(leaf, leaf_field, spec, place)
            if column.name not in KNOWN[1:]:
                staying[place] = values
            else:
                arriving[place] = values[:-1] if begins == 0 else np.concatenate([before[place], values[:-1]])
                last[place] = values[-1:]
    return EpisodeSlice(number, begins, _ordered(staying, spaces), _ordered(arriving, spaces)), last


def _struct_leaves(above: Location, column: pa.Field, array: Any) -> Iterator[tuple[Location, pa.Field, Any]]:
    """Yield the location, the field and the values of each leaf of a column. The column can be a nested struct."""
    location = (*above, column.name)
    if not pa.types.is_struct(column.type):
        yield location, column, array
        return
    for child, part in zip(column.type, array.flatten(), strict=True):
        yield from _struct_leaves(location, child, part)


def _arrow_values(array: Any, column: pa.Field, spec: Any, place: Location) -> npt.NDArray[Any]:
    where = "/".join(place)
    if place[0] in KNOWN and array.null_count and _texts(array.type):
        # No transition begins at an episode's last row, where texts are therefore null.
        array = array.fill_null(b"" if pa.types.is_binary(array.type) else "")
    values = columns.from_arrow(array, where=where)
    if _is_picture(spec) and place[0] == "actions" and values.dtype.kind == "O":
        values = values.copy()
        values[values == b""] = values[0]
    shape = (column.metadata or {}).get(b"shape", b"") if place[0] == "infos" else b""
    if shape:
        values = values.reshape(len(values), *(int(size) for size in shape.split(b",")))
    return shaped(values, spec, where=where)


def _texts(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type) or pa.types.is_large_string(data_type))


EPISODES_AT_ONCE = 32


def h5_pieces(
    path: Path, metadata: Mapping[str, Any], spaces: Spaces, *, rows: int, infos: bool, sample: int = 0
) -> Iterator[EpisodeSlice]:
    """Yield pieces of all episodes of an HDF5 file.

    Args:
        path: The file.
        metadata: The content of ``metadata.json``.
        spaces: The specs of ``observations`` and ``actions``.
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
                path, f"expected episodes 0..{total - 1}, found {len(numbers)}, the last {max(numbers, default=-1)}"
            )
        numbers = sampled(len(numbers), sample)
        waiting: list[tuple[_H5Episode, int, int]] = []  # short pieces of several episodes are read with one request
        size = 0
        for start in range(0, len(numbers), EPISODES_AT_ONCE):
            some = numbers[start : start + EPISODES_AT_ONCE]
            for number, tree in zip(some, file.find([f"/episode_{number}" for number in some]), strict=True):
                episode = _H5Episode(file.path, number, tree, spaces, infos)
                step = columns.rows_at_once(episode.row_bytes, most=rows)
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

    def __init__(self, path: str, number: int, tree: Any, spaces: Spaces, infos: bool) -> None:
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
        self._spaces = spaces
        rewards = parts["rewards"]
        if rewards["kind"] != "number" or len(rewards["shape"]) != 1:
            raise damaged(
                path, f"rewards: expected one number per step, found shape {rewards.get('shape')}", at=self._where
            )
        self.length = int(rewards["shape"][0])
        self._leaves: list[tuple[Location, bool]] = []  # locations, and whether the values belong to transitions
        self.row_bytes = _picture_bytes(spaces)
        self._collect({name: part for name, part in parts.items() if infos or name != "infos"})

    def _collect(self, tree: Mapping[str, Any]) -> None:
        for location, part in leaves({"items": tree}):
            first = location[0]
            if first not in (*KNOWN, "infos") and (part["kind"] == "empty" or not part["shape"]):
                continue  # a single value does not show the number of steps
            length = part["shape"][0] if part["shape"] else None
            wanted = {self.length, self.length + 1} if first not in KNOWN else {self.length + (first == "observations")}
            if length not in wanted or part["kind"] == "other":
                raise damaged(
                    self._path,
                    f"{'/'.join(location)}: expected {sorted(wanted)} rows of numbers or text for {self.length} "
                    f"rewards, found {part['kind']} {part['dtype']} {part['shape']}"
                    + ("; infos=False reads the rest" if first == "infos" else ""),
                    at=self._where,
                )
            self._leaves.append((location, length == self.length))
            width = int(np.prod(part["shape"][1:], dtype=np.float64))
            self.row_bytes += width * (np.dtype(part["dtype"]).itemsize if part["kind"] == "number" else 64)

    def items(self, begin: int, stop: int) -> list[tuple[str, int, int]]:
        """Return the arguments of ``H5File.read`` for rows ``begin .. stop - 1``.

        Example: for rows 3..5, observations 3..5 are read, but actions 2..4, because action t moves to row t + 1. Row 0
        has no action.
        """
        return [
            (f"/episode_{self._number}/{'/'.join(location)}", max(begin - moves, 0), stop - moves)
            for location, moves in self._leaves
        ]

    def piece(self, begin: int, values: list[npt.NDArray[Any]]) -> EpisodeSlice:
        """Return the piece for values whose first row has the index ``begin`` in the episode."""
        parts: tuple[dict[Location, Any], dict[Location, Any]] = ({}, {})
        with reading(self._path, at=self._where):
            for (location, moves), value in zip(self._leaves, values, strict=True):
                place, spec = _leaf(location, self._spaces)
                parts[moves][place] = shaped(value, spec, where="/".join(location))
        staying, arriving = (_ordered(part, self._spaces) for part in parts)
        return EpisodeSlice(self._number, begin, staying, arriving, self.of_episode)


_PIECES = {"hdf5": h5_pieces, "arrow": arrow_pieces, "parquet": arrow_pieces}
_SAMPLED = 32
_MAIN = "main_data.hdf5"
_MOST_JSON = 64 << 20


def read_minari(
    path: str | os.PathLike[str], *, final: str | None = None, batch_rows: int = BATCH_ROWS, infos: bool = True
) -> RowStream:
    """Read a dataset of Minari, stored as HDF5, Arrow or Parquet, as rows.

    Columns are ``action``, ``reward``, ``done`` (1 where ``terminations`` is set, 2 where only ``truncations`` is set),
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
        The rows; ``format_metadata`` is the content of ``metadata.json``, with spaces as nested mappings.

    Raises:
        ConfigError: The path has no dataset of Minari.
        DataError: A file is damaged; the message names file and episode.
        ImportError: The dataset is HDF5 and h5py is not installed.
    """
    columns.check_batch_rows(batch_rows)
    folder = _data_folder(Path(path))
    metadata: dict[str, Any] = {"data_format": "hdf5"} if folder.is_file() else _metadata(folder)
    source = folder / _MAIN if metadata["data_format"] == "hdf5" and folder.is_dir() else folder
    check_inside([folder / "metadata.json", source], Path(path))
    with reading(folder):
        names = {"observations": "observation_space", "actions": "action_space"}
        spaces = {key: _leaves_of(metadata.get(name), name) for key, name in names.items()}
    pieces = _PIECES[metadata["data_format"]]
    schema = _schema(pieces(source, metadata, spaces, rows=2, infos=infos, sample=_SAMPLED), str(source))

    def batches() -> Iterator[pa.RecordBatch]:
        held: list[pa.RecordBatch] = []
        count = 0
        for piece in pieces(source, metadata, spaces, rows=batch_rows, infos=infos):
            where = f"{source}, episode {piece.episode}"
            with reading(source, at=f"episode {piece.episode}"):
                batch = columns.to_batch(_columns(piece), schema, where=where)
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
        rows=None if steps is None or episodes is None else steps + episodes,
        notes=_notes(metadata, spaces),
        format_metadata=metadata,
        metadata=in_stored_layout(
            DatasetMetadata(
                "arrived",
                environments=_environments(metadata),
                spec=_spec_of_columns(spaces, schema),
            ),
            schema,
        ),
    )


def _environments(metadata: Mapping[str, Any]) -> list[str]:
    """Return the id of the environment, which is in a JSON text inside of the JSON metadata."""
    described = metadata.get("env_spec")
    try:
        described = json.loads(described) if isinstance(described, str) else described
    except (ValueError, RecursionError):
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


def _notes(metadata: dict[str, Any], spaces: Spaces) -> tuple[str, ...]:
    if metadata.get("jpeg_encoding", True) and _picture_bytes(spaces):
        return ("Images may have been recorded as JPEG, which is not lossless (jpeg_encoding in metadata.json).",)
    return ()


def _schema(samples: Iterator[EpisodeSlice], where: str) -> pa.Schema:
    """Return the schema of all rows.

    The schema is derived from several sampled episodes, because episodes can have different metadata.
    """
    found: dict[str, pa.DataType] = {}
    for piece in samples:
        batch = columns.to_batch(_columns(piece), None, where=f"{where}, episode {piece.episode}")
        for column in batch.schema:
            found.setdefault(column.name, column.type)
    if not found:
        raise DataError(f"{where}: expected episodes, found none")
    order = sorted(found, key=columns.is_metadata)
    return pa.schema([(name, found[name]) for name in order])


def _columns(piece: EpisodeSlice) -> Columns:
    """Return the rows of a piece."""
    results = {}
    for name in KNOWN[2:]:
        values = piece.arriving.pop((name,))
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise DataError(f"{name}: expected one number per step, found {values.dtype} {list(values.shape[1:])}")
        results[name] = values
    arriving, staying = _named(piece.arriving), _named(piece.staying)
    arriving |= {"reward": results["rewards"], "done": done_codes(results["terminations"], results["truncations"])}
    count = len(next(iter(staying.values())))
    if "seed" in piece.of_episode:
        staying["metadata_episode_seed"] = np.full(count, int(piece.of_episode["seed"]), np.int64)
    if "options" in piece.of_episode:
        staying["metadata_episode_options"] = np.full(count, piece.of_episode["options"], dtype=object)
    return episode_rows(staying, arriving, begins=piece.begins)


def _named(values: Mapping[Location, npt.NDArray[Any]]) -> Columns:
    """Return arrays by column name."""
    made: Columns = {}
    for place, array in values.items():
        whole = {"observations": "observation", "actions": "action"}.get(place[0])
        name = columns.metadata_column("/".join(place)) if whole is None else ".".join((whole, *place[1:]))
        if name in made:
            raise SchemaError(f"{name}: expected arrays of different column names, found two of this name")
        made[name] = array
    return made
