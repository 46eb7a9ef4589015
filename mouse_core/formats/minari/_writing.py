"""Write datasets that Minari loads."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.writing import making
from mouse_core.formats._files.h5 import append_rows, import_h5py
from mouse_core.formats.columns.named import MISSING, Columns, is_single
from mouse_core.formats.minari._spaces import SpaceOf, written_space
from mouse_core.formats.sources import pieces_of

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
    """Write rows as a Minari dataset in an HDF5 file, which ``minari.load_dataset`` loads, in bounded memory.

    Pictures are stored as they are, without JPEG. Metadata become infos: ``metadata_infos_<key>`` and
    ``metadata_<key>`` are ``infos[<key>]``; ``metadata_episode_seed`` is the episode's seed.

    Args:
        rows: A ``RowStream``, a ``DatasetStore``, a ``datasets.Dataset``, a ``pyarrow.Table``, or record batches.
        path: The folder of the dataset; nothing may exist there. For ``minari.load_dataset("maze/random-v0")`` it is
            ``maze/random-v0`` in the folder that the variable ``MINARI_DATASETS_PATH`` names.
        dataset_id: Id of the dataset, ending in ``-v`` and a number; by default from ``path``.
        observation_space, action_space: Spaces of gymnasium, or mappings in the form of Minari. By default the
            smallest that hold the values: ``Discrete`` for single whole numbers, ``Box`` for vectors and pictures,
            ``Text``, and ``Dict`` for columns ``observation_<key>``.
        env_spec: The ``gymnasium.envs.registration.EnvSpec`` of the environment, or its JSON.
        metadata: Further entries of ``metadata.json``: ``author``, ``description``, ``algorithm_name``.

    Returns:
        The id of the dataset.

    Raises:
        ConfigError: Something is at ``path``, another process is writing it, or Minari does not accept the id.
        StorageError: Files cannot be written; nothing is left.
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
        about: dict[str, Any] = {
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
            about["env_spec"] = env_spec if isinstance(env_spec, str) else env_spec.to_json()
        (data / "metadata.json").write_text(json.dumps(about, default=_jsonable), encoding="utf-8")
    return dataset_id


def _check_id(dataset_id: str | None, target: Path) -> str:
    if dataset_id is None:
        root = os.environ.get("MINARI_DATASETS_PATH")
        inside = root is not None and target.resolve().is_relative_to(Path(root).resolve())
        dataset_id = target.resolve().relative_to(Path(root or "").resolve()).as_posix() if inside else target.name
    if not _ID.fullmatch(dataset_id):
        raise ConfigError(
            f"dataset_id: expected (namespace/)name-v0, as Minari has it, found {dataset_id!r}; give the folder such a "
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
    names = {name: space for name, space in seen.items() if _belongs(name, prefix)}
    if is_single(names, prefix):
        return next(iter(names.values())).written()
    return {"type": "Dict", "subspaces": {name[len(prefix) + 1 :]: space.written() for name, space in names.items()}}


def _belongs(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}_")


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
        names = [name for name in columns if _belongs(name, prefix)]
        if not names:
            raise DataError(f"write_minari: expected columns of {prefix}, found {list(columns)}")
        single = is_single(names, prefix)
        for name in names:
            values = columns.pop(name)
            values = values[shift] if prefix == "action" else values
            if values.ndim == 1 and values.dtype.kind in "biu":
                values = values.astype(np.int64)
            seen.setdefault(name, SpaceOf()).see(values)
            found[path if single else f"{path}/{name[len(prefix) + 1 :]}"] = values
    for name in ("metadata_episode_seed", "metadata_episode_options"):
        columns.pop(name, None)
    for name, values in columns.items():
        found[f"infos/{name.removeprefix('metadata_').removeprefix('infos_')}"] = values
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
