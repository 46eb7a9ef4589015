"""Minari datasets, read from their files and written so that Minari loads them.

Minari keeps T+1 observations and T actions an episode. An action belongs to the observation of the same number, so it
moves to the row after it; infos are those that came with an observation, and stay.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, read_json_object
from mouse_core.formats.base import BATCH_ROWS, RowStream, damaged, reading
from mouse_core.formats.columns.blocks import check_batch_rows
from mouse_core.formats.columns.named import Columns, named_action, named_observation, to_batch
from mouse_core.formats.columns.specs import spec_of_columns
from mouse_core.formats.columns.transitions import done_codes, episode_rows
from mouse_core.formats.minari._arrow import arrow_pieces
from mouse_core.formats.minari._h5 import h5_pieces
from mouse_core.formats.minari._pieces import Piece
from mouse_core.formats.minari._spaces import is_picture, parse_space, space_leaves

_PIECES = {"hdf5": h5_pieces, "arrow": arrow_pieces, "parquet": arrow_pieces}
_SAMPLED = 32
_MAIN = "main_data.hdf5"
_MOST_JSON = 64 << 20


def read_minari(
    path: str | os.PathLike[str], *, final: str | None = None, batch_rows: int = BATCH_ROWS, infos: bool = True
) -> RowStream:
    """A Minari dataset as rows, whether it is stored as HDF5, Arrow or Parquet.

    Columns are ``action``, ``reward``, ``done`` (1 where ``terminations`` is set, 2 where only ``truncations`` is),
    ``episode_step``, and ``observation``, ``observation_discrete`` or ``observation_image``. Dict and Tuple spaces
    become ``observation_<key>`` and ``action_<key>``, nested keys joined by ``_``. Infos become
    ``metadata_infos_<key>``, null in episodes that lack them; an episode's seed and options
    ``metadata_episode_seed`` and ``metadata_episode_options`` (as JSON). Where a space is not nested, single
    fractions become vectors of one, and shapes of more than one dimension that are no picture are flattened.

    Args:
        path: The dataset's folder, the folder ``data`` in it, or an HDF5 file alone. Without ``metadata.json`` nothing
            is known of spaces, and values are taken as they are stored.
        final: Not needed, the last observations are there; accepted so that all readers take it.
        batch_rows: At most how many rows a batch has.
        infos: Whether to read infos.

    Returns:
        The rows. ``metadata`` is what ``metadata.json`` says, with spaces as nested mappings.

    Raises:
        ConfigError: No Minari dataset is there.
        DataError: A damaged file; the message names it and the episode.
        ImportError: The dataset is HDF5 and h5py is not installed.
    """
    check_batch_rows(batch_rows)
    folder = _data_folder(Path(path))
    metadata: dict[str, Any] = {"data_format": "hdf5"} if folder.is_file() else _metadata(folder)
    source = folder / _MAIN if metadata["data_format"] == "hdf5" and folder.is_dir() else folder
    check_inside([folder / "metadata.json", source], Path(path))
    spaces = {"observations": metadata.get("observation_space"), "actions": metadata.get("action_space")}
    pieces = _PIECES[metadata["data_format"]]
    schema = _schema(pieces(source, metadata, spaces, rows=2, infos=infos, sample=_SAMPLED), str(source))

    def batches() -> Iterator[pa.RecordBatch]:
        held: list[pa.RecordBatch] = []
        count = 0
        for piece in pieces(source, metadata, spaces, rows=batch_rows, infos=infos):
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
        notes=_notes(metadata, spaces),
        metadata=metadata,
        about=About(
            "arrived",
            environments=_environments(metadata),
            spec=spec_of_columns(spaces["observations"], spaces["actions"], schema),
        ),
    )


def _environments(metadata: Mapping[str, Any]) -> list[str]:
    """The id in the description of the environment, which is JSON inside of JSON."""
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
    """What ``metadata.json`` says, checked as far as it is relied upon."""
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
            metadata[name] = parse_space(metadata.get(name), where=f"{file}, {name}")
    return metadata


def _notes(metadata: dict[str, Any], spaces: dict[str, Any]) -> tuple[str, ...]:
    leaves = [leaf for space in spaces.values() if space is not None for _, leaf in space_leaves(space)]
    if metadata.get("jpeg_encoding", True) and any(is_picture(leaf, where="") for leaf in leaves):
        return ("Pictures may have been recorded as JPEG, which is not lossless (jpeg_encoding in metadata.json).",)
    return ()


def _schema(samples: Iterator[Piece], where: str) -> pa.Schema:
    """The columns of all rows, from the beginnings of some episodes: metadata that only some have are among them."""
    found: dict[str, pa.DataType] = {}
    for piece in samples:
        batch = to_batch(_columns(piece), None, where=f"{where}, episode {piece.episode}")
        for column in batch.schema:
            found.setdefault(column.name, column.type)
    if not found:
        raise DataError(f"{where}: expected episodes, found none")
    order = sorted(found, key=lambda name: name.startswith("metadata_"))
    return pa.schema([(name, found[name]) for name in order])


def _columns(piece: Piece) -> Columns:
    """The rows of a piece."""
    arriving: Columns = named_action(piece.arriving["actions"])
    for name in ("rewards", "terminations", "truncations"):
        values = piece.arriving[name]
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise DataError(f"{name}: expected one number a step, found {values.dtype} {list(values.shape[1:])}")
    arriving["reward"] = piece.arriving["rewards"]
    arriving["done"] = done_codes(piece.arriving["terminations"], piece.arriving["truncations"])
    arriving |= {_metadata_name(path): values for path, values in piece.arriving_beside.items()}
    staying = named_observation(piece.observations)
    staying |= {_metadata_name(path): values for path, values in piece.beside.items()}
    count = len(next(iter(staying.values())))
    if "seed" in piece.about:
        staying["metadata_episode_seed"] = np.full(count, int(piece.about["seed"]), np.int64)
    if "options" in piece.about:
        staying["metadata_episode_options"] = np.full(count, piece.about["options"], dtype=object)
    return episode_rows(staying, arriving, begins=piece.begins)


def _metadata_name(path: str) -> str:
    return "metadata_" + path.replace("/", "_")
