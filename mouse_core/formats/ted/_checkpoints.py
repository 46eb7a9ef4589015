"""Checkpoints of TorchRL's replay buffers, in which each observation may lie once: written and read, without torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.files.writing import making
from mouse_core.formats._files.h5 import import_h5py
from mouse_core.formats.ted._layouts import DONE_KEYS, REWARD_KEYS, H5Split, TED2Flat, TED2Nested, by_path, key_of
from mouse_core.formats.ted._writing import FolderWriter
from mouse_core.formats.ted.reading import Key, environments, has_next, opened, steps_of
from mouse_core.nested import nest
from mouse_core.spec import check_choice

_LAYOUTS = ("ted", "flat", "nested", "h5")
_ABOUT = ("shift", "is_full", "_storage_shape")
# Most steps that are read at once.
_AT_ONCE = 1 << 16
_FLAGS = tuple((name,) for name in DONE_KEYS)

Arrays = dict[Key, npt.NDArray[Any]]


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
    """Write steps as the checkpoint of a TorchRL buffer, whose ``loads`` takes it.

    In "flat" (``FlatStorageCheckpointer``), "nested" (``NestedStorageCheckpointer``) and "h5"
    (``H5StorageCheckpointer``) each observation lies there once; in "ted" (``TensorStorageCheckpointer``) steps lie as
    they are. TorchRL's buffer must have that checkpointer, and ``capacity`` places. What belongs to a sampler or
    to transforms is not written.

    Args:
        steps: A replay buffer whose rows are steps of TED, which is not written to meanwhile; or nested dicts of arrays
            ``[n, ...]``, or ``[n, environments, ...]``: observations at the root and in ``next``.
        path: A new folder.
        layout: "ted", "flat", "nested" or "h5".
        capacity: How many places the buffer has, along time; by default ``n``. Of a replay buffer, its own.
        cursor: Of ``capacity`` steps, which place is written next, that of the oldest. Of a replay buffer, its own.
        batch_size: The buffer's, which ``loads`` sets; of a replay buffer, its own unless it is said.
        done_keys, reward_keys: As ``TED2Flat`` takes them, and the checkpointer of TorchRL.

    Returns:
        How many steps were written, of all environments.

    Raises:
        ConfigError: Something is at ``path``, an unknown layout, or a capacity or cursor that cannot be.
        SchemaError, DataError: As ``TED2Flat``: what the layout cannot hold.
        StorageError: It cannot be written; nothing is left then.
        ImportError: h5py is not installed, for "h5".
    """
    check_choice("layout", layout, _LAYOUTS)
    if hasattr(steps, "storage"):
        arrays, capacity, cursor = _of_storage(steps.storage)
        batch_size = batch_size or steps.batch_size
    else:
        arrays, capacity, cursor = _of_steps(steps, capacity, cursor)
    used, *lanes = _shape(arrays, "steps")
    shape, count = (capacity, *lanes), used * math.prod(lanes)
    if used < capacity:  # places that are not used hold zeros
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
        if layout == "h5":
            _write_file(storage / "checkpoint.h5", H5Split(changed), count)
        else:
            _write_folder(storage, changed, layout, shape)
            said = {"metadata": {}, "is_pytree": False, "len": count}
            (storage / "storage_metadata.json").write_text(json.dumps(said), encoding="utf-8")
        (partial / "writer").mkdir()
        said = {"cursor": cursor, "write_count": count}
        (partial / "writer" / "metadata.json").write_text(json.dumps(said), encoding="utf-8")
        said = {"batch_size": batch_size, "consume_after_n_samples": None}
        (partial / "buffer_metadata.json").write_text(json.dumps(said), encoding="utf-8")
    return count


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


# ---------------------------------------------------------------------- writing


def _of_storage(storage: Any) -> tuple[Arrays, int, int]:
    """Return the arrays of a buffer's storage by path, its capacity along time, and the place that is written next."""
    lanes, rows = storage.num_envs, len(storage)
    if not rows:
        raise ConfigError("write_checkpoint: expected steps, found an empty buffer")
    shape = (rows // lanes, lanes) if storage.ndim > 1 else (rows,)
    slots = np.arange(rows)
    if hasattr(storage, "batch"):  # a list of rows
        batch = storage.batch(slots)
        found = by_path(batch) if isinstance(batch, Mapping) else {}
    else:
        found = {(key,) if isinstance(key, str) else tuple(key): storage.read(key, slots) for key in storage.keys}
    capacity = storage.capacity // lanes
    arrays = {key: values.reshape(*shape, *values.shape[1:]) for key, values in found.items()}
    return arrays, capacity, storage.written // lanes % capacity


def _of_steps(steps: Any, capacity: int | None, cursor: int) -> tuple[Arrays, int, int]:
    """Return the arrays of steps by path, the capacity, and the place that is written next."""
    if not isinstance(steps, Mapping) or not isinstance(steps.get("next"), Mapping):
        found = list(steps) if isinstance(steps, Mapping) else type(steps).__name__
        raise SchemaError(f"steps: expected arrays by name and 'next' with some more, found {found}")
    arrays = {key: np.asarray(value) for key, value in by_path(steps).items()}
    used = _shape(arrays, "steps")[0]
    capacity = used if capacity is None else capacity
    if capacity < used:
        raise ConfigError(f"capacity: expected at least the {used} steps there are, found {capacity}")
    if not 0 <= cursor < capacity or (cursor and used < capacity):
        raise ConfigError(
            f"cursor: expected a place of a ring that is full, 0..{capacity - 1}, found {cursor} for {used} steps"
        )
    return arrays, capacity, cursor if used == capacity else used


def _write_folder(folder: Path, changed: Mapping[str, Any], layout: str, shape: tuple[int, ...]) -> None:
    others = {name: value for name, value in changed.items() if name in _ABOUT and layout != "ted"}
    others |= {"_storage_shape": list(shape)} if others else {}
    with closing(FolderWriter(folder, nested=layout == "nested")) as writer:
        for key, values in by_path({name: value for name, value in changed.items() if name not in others}).items():
            for part in values if layout == "nested" else [values]:
                writer.append(key, part, ends=True)
        writer.finish(batch=shape if layout == "ted" else (), others=others)


def _write_file(file: Path, split: Mapping[str, Any], length: int) -> None:
    with import_h5py().File(file, "w") as target:
        for name, value in {**split, "_len": length}.items():
            if isinstance(value, Mapping):
                for key, values in by_path(value).items():
                    target["/".join((name, *key))] = values
            else:
                target[name] = np.asarray(value)


def _shape(arrays: Mapping[Key, npt.NDArray[Any]], where: str) -> tuple[int, ...]:
    """``[n]``, or ``[n, environments]``: the shape of a done flag without the trailing 1."""
    flag = next((arrays["next", *key] for key in _FLAGS if ("next", *key) in arrays), None)
    if flag is None:
        raise SchemaError(f"{where}: expected next.done, found {['.'.join(key) for key in arrays]}")
    shape = flag.shape[:-1] if flag.ndim > 1 and flag.shape[-1] == 1 else flag.shape
    if not flag.size:
        raise SchemaError(f"{where}: expected steps, found none")
    for key, values in arrays.items():
        if values.shape[: len(shape)] != shape:
            raise SchemaError(f"{where}: {'.'.join(key)}: expected {list(shape)} steps, found {list(values.shape)}")
    return shape
