"""Writing TED without torch: rows as steps, and steps as checkpoints of TorchRL's replay buffers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.writing import making
from mouse_core.formats._files.h5 import append_rows, import_h5py
from mouse_core.formats.base import RowStream
from mouse_core.formats.sources import pieces_of
from mouse_core.formats.ted._layouts import DONE_KEYS, REWARD_KEYS, H5Split, Key, TED2Flat, TED2Nested, by_path
from mouse_core.nested import nest
from mouse_core.spec import check_choice, check_list

_ROW_LAYOUTS = ("ted", "flat", "nested")
_NEEDED = ("reward", "done", "episode_step")
_SEEN = ("observation", "metadata_", "step_count")
_SINGLE = ("reward", "done", "terminated", "truncated", "step_count")


def write_ted(
    stream: RowStream,
    path: str | os.PathLike[str],
    *,
    layout: str = "ted",
    columns: Sequence[str] | None = None,
) -> int:
    """Write rows as steps of TED that TorchRL and TensorDict load, in memory that does not grow with them.

    Observations and ``metadata_*`` stand at the root and in ``next``; the action at the root; reward, done, terminated
    and truncated in ``next``; ``step_count`` is the row's number in its episode. Encoded images are decoded.

    Args:
        stream: The rows, of alignment "arrived".
        path: A folder, or an HDF5 file if the name ends in ``.h5`` or ``.hdf5``. There must be nothing yet.
        layout: "ted" (steps as they are), "flat" (every observation once) or "nested" (a trajectory at a time).
        columns: The columns to write besides action, reward and done; by default all.

    Returns:
        How many steps were written.

    Raises:
        ConfigError: Something is at ``path``, another process is writing it, or an unknown layout.
        StorageError: It cannot be written; nothing is left then.
        SchemaError: Rows of the other alignment, or a column of texts.
        DataError: Nulls, rows of different lengths, or an episode that goes on after a done code, in a layout that
            cannot hold it.
    """
    target = Path(path)
    check_choice("layout", layout, _ROW_LAYOUTS)
    columns = None if columns is None else check_list("columns", columns)
    is_file = target.suffix in (".h5", ".hdf5")
    with (
        making(target, "write_ted", folder=not is_file) as partial,
        closing((_FileWriter if is_file else FolderWriter)(partial, nested=layout == "nested")) as writer,
    ):
        return _write(stream, writer, layout, columns)


def _write(stream: RowStream, writer: FolderWriter | _FileWriter, layout: str, columns: Sequence[str] | None) -> int:
    steps = 0
    for rows, begins, ends, is_last in _runs(stream, columns):
        done, goes_on = rows["done"] != 0, slice(1, -1 if ends else None)
        if layout != "ted" and done[goes_on].any():
            raise DataError(f"{stream.path}: expected episodes that end where done says so, found one that goes on")
        done[-1] |= ends and not is_last  # the last episode may go on
        flags = {
            "reward": rows["reward"],
            "done": done,
            "terminated": rows["done"] == 1,
            "truncated": rows["done"] == 2,
        }
        for path, values in _entries(rows, flags, layout, begins):
            writer.append(path, _shaped(path, values), ends=ends)
        steps += len(done) - 1
    if not steps:
        raise DataError(f"{stream.path}: expected at least one transition, found none")
    others = {} if layout == "ted" else {"is_full": True, "shift": 0, "_storage_shape": [steps]}
    writer.finish(batch=(steps,) if layout == "ted" else (), others=others)
    return steps


def _entries(rows: Columns, flags: Columns, layout: str, begins: bool) -> Iterator[tuple[Key, npt.NDArray[Any]]]:
    """Yield the entries that rows add to, and their values there.

    Of the rows 0 1 2 3, three steps lead from rows 0 1 2 to rows 1 2 3. The layouts "flat" and "nested" have each
    observation once: of all four rows if these begin an episode, else row 0 was written before.
    """
    for name, values in rows.items():
        if name.startswith(_SEEN):
            if layout == "ted":
                yield (name,), values[:-1]
                yield ("next", name), values[1:]
            else:
                yield (name,), values if begins else values[1:]
    for name, values in rows.items():
        if name == "action" or name.startswith("action_"):
            yield (name,), values[1:]
    for name, values in flags.items():
        yield ("next", name) if layout == "ted" else (name,), values[1:]
        if layout == "ted" and name != "reward":
            yield (name,), np.zeros(len(values) - 1, bool)


def _shaped(key: Key, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values as TorchRL has them: with a trailing 1 where a step has one number."""
    return values.reshape(len(values), 1) if key[-1] in _SINGLE and values.ndim == 1 else values


def _runs(stream: RowStream, columns: Sequence[str] | None) -> Iterator[tuple[Columns, bool, bool, bool]]:
    """Yield runs of at least two rows of an episode, of which the first is the last of the run before.

    An episode of one row has no step, and is left out.

    Yields:
        The rows, whether the episode begins with the first, whether it ends with the last, and whether the stream does.
    """
    held: Columns = {}
    names: set[str] = set()
    begins = True
    pieces: Iterator[Any] = chain(pieces_of(_chosen(stream, columns)), [None])
    for (is_new, piece), following in pairwise(pieces):
        if is_new:
            held, begins = {}, True
        names = names or set(piece)
        if uneven := sorted(piece.keys() ^ names):
            raise DataError(f"{stream.path}: columns {uneven}: expected values in all rows, found nulls")
        for name, values in piece.items():
            if values.dtype.kind not in "biuf":
                reason = "expected numbers, found others; columns= says what to write"
                raise SchemaError(f"{stream.path}: column {name!r}: {reason}")
        step = held["step_count"][-1] + 1 if held else 0
        piece["step_count"] = step + np.arange(len(piece["done"]))
        rows = {name: np.concatenate([held[name], values]) if held else values for name, values in piece.items()}
        if len(rows["done"]) > 1:
            yield rows, begins, following is None or following[0], following is None
            begins = False
        held = {name: values[-1:] for name, values in rows.items()}


def _chosen(stream: RowStream, columns: Sequence[str] | None) -> RowStream:
    """Return the stream with the columns that are written."""
    names = stream.schema.names
    for name in ("action", "reward", "done"):
        if name not in names and not any(other.startswith(f"{name}_") for other in names):
            raise SchemaError(f"{stream.path}: expected a column {name!r}, found {names}")
    for name in columns or ():
        if name not in names:
            raise ConfigError(f"columns: expected some of {names}, found {name!r}")
    if columns is None:
        return stream
    chosen = [name for name in names if name in (*columns, *_NEEDED) or name.startswith("action")]
    return stream.replace(batches=lambda: (batch.select(chosen) for batch in stream))


# ---------------------------------------------------------------------- files


class FolderWriter:
    """Writes a folder, entry by entry, a piece at a time.

    Args:
        folder: An existing, empty folder.
        nested: Whether entries are nested tensors, with a row for each trajectory.
    """

    def __init__(self, folder: Path, *, nested: bool) -> None:
        self._folder, self._nested = folder, nested
        self._entries: dict[Key, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._lengths: dict[Key, list[int]] = {}  # of trajectories; the last is the one that goes on
        self._streams: dict[Key, Any] = {}

    def append(self, path: Key, values: npt.NDArray[Any], *, ends: bool) -> None:
        """Add values to an entry; ``ends`` tells whether a trajectory ends with them."""
        if path not in self._streams:
            place = self._folder.joinpath(*path[:-1])
            place.mkdir(parents=True, exist_ok=True)
            self._streams[path] = (place / f"{path[-1]}.memmap").open("wb")
            self._entries[path] = values.dtype, values.shape[1:]
            self._lengths[path] = [0]
        self._streams[path].write(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).data)
        self._lengths[path][-1] += len(values)
        if ends:
            self._lengths[path].append(0)

    def finish(self, *, batch: tuple[int, ...], others: Mapping[str, Any]) -> None:
        """Write the descriptions."""
        self.close()
        folders: dict[Key, dict[str, Any]] = {(): {}}
        for path, (dtype, shape) in self._entries.items():
            for depth in range(1, len(path)):
                folders.setdefault(path[: depth - 1], {})[path[depth - 1]] = {"type": "TensorDict"}
                folders.setdefault(path[:depth], {})
            whole = [sum(self._lengths[path]), *shape]
            if self._nested:
                shapes = np.array([[length, *shape] for length in self._lengths[path][:-1]], "<i8")
                batch = shapes.shape[:1]
                self._folder.joinpath(*path[:-1], f"{path[-1]}.shape.memmap").write_bytes(shapes.tobytes())
                whole = list(shapes.shape)
            entry = {"device": "cpu", "shape": whole, "dtype": f"torch.{dtype.name}", "is_nested": self._nested}
            folders[path[:-1]][path[-1]] = entry
        for name, value in others.items():
            folders[()][name] = {"type": "NonTensorData"}
            kind = "<class 'tensordict.tensorclass.NonTensorData'>"
            self._describe((name,), {"_type": kind, "data": value, "_is_non_tensor": True, "_metadata": None})
        for path, entries in folders.items():
            about = {"shape": list(batch), "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
            self._describe(path, {**entries, **about})

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams.values():
            stream.close()

    def _describe(self, path: Key, entries: Mapping[str, Any]) -> None:
        place = self._folder.joinpath(*path)
        place.mkdir(parents=True, exist_ok=True)
        (place / "meta.json").write_text(json.dumps(entries), encoding="utf-8")


class _FileWriter:
    """Writes an HDF5 file, entry by entry, a piece at a time.

    Args:
        path: The file.
        nested: Whether each trajectory has a group of its own.
    """

    def __init__(self, path: Path, *, nested: bool) -> None:
        self._file, self._nested = import_h5py().File(path, "w"), nested
        self._run: dict[Key, list[npt.NDArray[Any]]] = {}
        self._ended: dict[Key, int] = {}

    def append(self, path: Key, values: npt.NDArray[Any], *, ends: bool) -> None:
        """Add values to an entry, which stay in memory until they are a chunk, or a trajectory."""
        self._run.setdefault(path, []).append(values)
        if self._nested and ends:
            number = self._ended.get(path, 0)
            self._ended[path] = number + 1
            self._flush(path, f"traj_{number:09d}/")
        elif not self._nested and sum(part.nbytes for part in self._run[path]) > 1 << 20:
            self._flush(path)

    def _flush(self, path: Key, group: str = "") -> None:
        append_rows(self._file, group + "/".join(path), np.concatenate(self._run.pop(path)))

    def finish(self, *, batch: tuple[int, ...], others: Mapping[str, Any]) -> None:
        """Write the values that are still in memory."""
        for path in list(self._run):
            self._flush(path)
        for name, value in others.items():
            self._file[name] = np.asarray(value)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_LAYOUTS = ("ted", "flat", "nested", "h5")
_ABOUT = ("shift", "is_full", "_storage_shape")
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
