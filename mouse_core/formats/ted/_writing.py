"""Writing rows as steps of TED, a batch at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.writing import making
from mouse_core.formats._files.h5 import append_rows, import_h5py
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns.values import read_values
from mouse_core.formats.ted._reading import Key
from mouse_core.images.pixels import decode_image
from mouse_core.spec import check_list

_LAYOUTS = ("ted", "flat", "nested")
_NEEDED = ("reward", "done", "episode_step")
_SEEN = ("observation", "metadata_", "episode_step")
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
        SchemaError: Rows of the other alignment, or a column that tensors cannot hold: texts, nulls, rows of differing
            length.
        DataError: An episode that goes on after a done code, in a layout that cannot hold it.
    """
    target = Path(path)
    if layout not in _LAYOUTS:
        raise ConfigError(f"layout: expected one of {list(_LAYOUTS)}, found {layout!r}")
    columns = None if columns is None else check_list("columns", columns)
    if stream.alignment != "arrived":
        raise SchemaError(f"write_ted: expected rows of alignment 'arrived', found {stream.alignment!r}")
    is_file = target.suffix in (".h5", ".hdf5")
    with making(target, "write_ted", folder=not is_file) as partial:
        writer: FolderWriter | _FileWriter = _FileWriter(partial) if is_file else FolderWriter(partial)
        try:
            steps = _write(stream, writer, layout, columns)
        finally:
            writer.close()
    return steps


def _write(stream: RowStream, writer: FolderWriter | _FileWriter, layout: str, columns: Sequence[str] | None) -> int:
    steps = 0
    for rows, start, final in _with_neighbours(stream, columns):
        # Row 0 was written before, unless it is the first of all; the last row's successor is not known. Of two
        # episodes of two transitions, with start 1 0 0 1 0 0, steps lead to rows 1 2 4 5, and rows 2 and 5 are ends.
        here = np.arange(int(rows["_written"][0]), len(start) - (not final))
        follows = np.append(start[1:], final)
        transition = here[~start[here]]
        boundary = ~start & follows
        ends = rows["done"] != 0
        if layout != "ted" and (ends & ~boundary & ~start)[here].any():
            raise DataError(f"{stream.path}: expected episodes that end where done says so, found one that goes on")
        flags = {
            "reward": rows["reward"],
            "done": ends | (~start & np.append(start[1:], False)),  # the last episode may go on
            "terminated": rows["done"] == 1,
            "truncated": rows["done"] == 2,
        }
        steps += len(transition)
        parts = _Parts(
            {_key(name): values for name, values in rows.items() if name.startswith(_SEEN)},
            {_key(name): values for name, values in rows.items() if name == "action" or name.startswith("action_")},
            {_key(name): values for name, values in flags.items()},
            # A row that begins an episode of nothing else belongs to no step.
            here[~(start & follows)[here]],
            transition,
            boundary,
        )
        {"ted": _add_steps, "flat": _add_flat, "nested": _add_nested}[layout](writer, parts)
    if not steps:
        raise DataError(f"{stream.path}: expected at least one transition, found none")
    others = {} if layout == "ted" else {"is_full": True, "shift": 0, "_storage_shape": [steps]}
    writer.finish(batch=(steps,) if layout == "ted" else (), others=others, nested=layout == "nested")
    return steps


@dataclass(frozen=True)
class _Parts:
    """Rows on their way into a layout, with their neighbours.

    Args:
        seen, action, flags: Values by column, a row each: what belongs to the observation, to the action, and what
            stands in ``next`` alone.
        kept: Numbers of the rows to write.
        transition: Of those that a step leads to.
        boundary: Whether an episode ends with a row.
    """

    seen: dict[Key, npt.NDArray[Any]]
    action: dict[Key, npt.NDArray[Any]]
    flags: dict[Key, npt.NDArray[Any]]
    kept: npt.NDArray[np.int64]
    transition: npt.NDArray[np.int64]
    boundary: npt.NDArray[np.bool_]


def _key(column: str) -> Key:
    return ("step_count" if column == "episode_step" else column,)


def _add_steps(writer: FolderWriter | _FileWriter, parts: _Parts) -> None:
    for key, values in parts.seen.items():
        writer.append(key, _shaped(key, values[parts.transition - 1]))
        writer.append(("next", *key), _shaped(key, values[parts.transition]))
    for key, values in parts.action.items():
        writer.append(key, values[parts.transition])
    for key, values in parts.flags.items():
        writer.append(("next", *key), _shaped(key, values[parts.transition]))
        if key != ("reward",):
            writer.append(key, _shaped(key, np.zeros(len(parts.transition), bool)))


def _add_flat(writer: FolderWriter | _FileWriter, parts: _Parts) -> None:
    for key, values in parts.seen.items():
        writer.append(key, _shaped(key, values[parts.kept]))
    for key, values in (parts.action | parts.flags).items():
        writer.append(key, _shaped(key, values[parts.transition]))


def _add_nested(writer: FolderWriter | _FileWriter, parts: _Parts) -> None:
    for keys, chosen in ((parts.seen, parts.kept), (parts.action | parts.flags, parts.transition)):
        stops = np.flatnonzero(parts.boundary[chosen]) + 1
        for key, values in keys.items():
            runs = np.split(_shaped(key, values[chosen]), stops)
            for number, run in enumerate(runs):
                ended = number < len(runs) - 1
                if ended or len(run):
                    writer.append(key, run, row_ends=ended)


def _shaped(key: Key, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values as TorchRL has them: with a trailing 1 where a step has one number."""
    return values.reshape(len(values), 1) if key[-1] in _SINGLE and values.ndim == 1 else values


# ---------------------------------------------------------------------- rows


def _with_neighbours(
    stream: RowStream, columns: Sequence[str] | None
) -> Iterator[tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.bool_], bool]]:
    """Batches with the row before theirs and the one after, whether an episode begins with a row, and if they end."""
    held: dict[str, npt.NDArray[Any]] | None = None
    for batch in stream:
        if not batch.num_rows:
            continue
        rows = _arrays(batch, columns, stream.path)
        rows["_written"] = np.zeros(batch.num_rows, bool)
        rows["_start"] = _starts(rows, held)
        if held is None:
            rows["_start"][0] = True
        else:
            rows = {name: np.concatenate([held[name], values]) for name, values in rows.items()}
        if len(rows["done"]) > 1:
            yield rows, rows["_start"], False
            held = {name: values[-2:].copy() for name, values in rows.items()}
            held["_written"] = np.array([True, False])
        else:
            held = rows
    if held is not None:
        yield held, held["_start"], True


def _starts(rows: dict[str, npt.NDArray[Any]], held: dict[str, npt.NDArray[Any]] | None) -> npt.NDArray[np.bool_]:
    if "episode_step" in rows:
        return np.asarray(rows["episode_step"] == 0)
    start = np.concatenate([[held is None or bool(held["done"][-1])], rows["done"][:-1] != 0])
    return np.asarray(start, bool)


def _arrays(batch: pa.RecordBatch, columns: Sequence[str] | None, where: str) -> dict[str, npt.NDArray[Any]]:
    names = batch.schema.names
    for name in ("action", "reward", "done"):
        if name not in names and not any(other.startswith(f"{name}_") for other in names):
            raise SchemaError(f"{where}: expected a column {name!r}, found {names}")
    for name in columns or ():
        if name not in names:
            raise ConfigError(f"columns: expected some of {names}, found {name!r}")
    if columns is not None:
        names = [name for name in names if name in (*columns, *_NEEDED) or name.startswith("action")]
    return {name: _column(batch.column(name), name, where) for name in names}


def _column(array: pa.Array, name: str, where: str) -> npt.NDArray[Any]:
    values = read_values(array)
    if values.kind.kind == "image":
        return np.stack([_pixels(value.as_py(), name, where) for value in values.array])
    if values.numbers is None or values.shape is None:
        raise SchemaError(
            f"{where}: column {name!r}: expected numbers of one shape without nulls, found {array.type}; "
            "columns= says what to write"
        )
    return values.numbers


def _pixels(value: Any, name: str, where: str) -> npt.NDArray[np.uint8]:
    try:
        return decode_image(value)
    except ValueError as error:
        raise DataError(f"{where}: column {name!r}: {error}") from error


# ---------------------------------------------------------------------- files


class FolderWriter:
    """Writes a folder, entry by entry, a piece at a time.

    Args:
        folder: An existing, empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[Key, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._rows: dict[Key, int] = {}
        self._lengths: dict[Key, list[int]] = {}
        self._streams: dict[Key, Any] = {}

    def append(self, path: Key, values: npt.NDArray[Any], *, row_ends: bool = False) -> None:
        """Add rows to an entry; with ``row_ends`` they complete a row of a nested tensor."""
        if path not in self._streams:
            place = self._folder.joinpath(*path[:-1])
            place.mkdir(parents=True, exist_ok=True)
            self._streams[path] = (place / f"{path[-1]}.memmap").open("wb")
            self._entries[path] = values.dtype, values.shape[1:]
            self._rows[path] = 0
        self._streams[path].write(np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False).data)
        self._rows[path] += len(values)
        if row_ends:
            self._lengths.setdefault(path, []).append(self._rows[path] - sum(self._lengths.get(path, ())))

    def finish(self, *, batch: tuple[int, ...], others: Mapping[str, Any], nested: bool = False) -> None:
        """Write the descriptions."""
        self.close()
        folders: dict[Key, dict[str, Any]] = {(): {}}
        for path, (dtype, shape) in self._entries.items():
            for depth in range(1, len(path)):
                folders.setdefault(path[: depth - 1], {})[path[depth - 1]] = {"type": "TensorDict"}
                folders.setdefault(path[:depth], {})
            whole = [self._rows[path], *shape]
            if nested:
                lengths = self._lengths.get(path, [])
                rest = self._rows[path] - sum(lengths)
                lengths = [*lengths, rest] if rest else lengths  # what came last has not ended
                batch = (len(lengths),)
                shapes = np.array([[length, *shape] for length in lengths], "<i8")
                self._folder.joinpath(*path[:-1], f"{path[-1]}.shape.memmap").write_bytes(shapes.tobytes())
                whole = list(shapes.shape)
            entry = {"device": "cpu", "shape": whole, "dtype": f"torch.{dtype.name}", "is_nested": nested}
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
    """

    def __init__(self, path: Path) -> None:
        self._file = import_h5py().File(path, "w")
        self._run: dict[Key, list[npt.NDArray[Any]]] = {}
        self._ended: dict[Key, int] = {}

    def append(self, path: Key, values: npt.NDArray[Any], *, row_ends: bool = False) -> None:
        """Add rows to an entry, which are kept in memory until they are a chunk, or a trajectory."""
        self._run.setdefault(path, []).append(values)
        if row_ends:
            number = self._ended.get(path, 0)
            self._ended[path] = number + 1
            self._file["/".join((f"traj_{number:09d}", *path))] = np.concatenate(self._run.pop(path))
        elif sum(part.nbytes for part in self._run[path]) > 1 << 20 and not self._ended:
            self._flush(path)

    def _flush(self, path: Key) -> None:
        append_rows(self._file, "/".join(path), np.concatenate(self._run.pop(path)))

    def finish(self, *, batch: tuple[int, ...], others: dict[str, Any], nested: bool = False) -> None:
        """Write what is left."""
        for path in list(self._run):
            if nested:
                self.append(path, self._run[path][-1][:0], row_ends=True)
            else:
                self._flush(path)
        for name, value in others.items():
            self._file[name] = np.asarray(value)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
