"""Writing rows as steps of TED, a batch at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.files.writing import making
from mouse_core.formats._files.h5 import append_rows, import_h5py
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns.named import Columns
from mouse_core.formats.sources import pieces_of
from mouse_core.formats.ted.reading import Key
from mouse_core.spec import check_choice, check_list

_LAYOUTS = ("ted", "flat", "nested")
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
    check_choice("layout", layout, _LAYOUTS)
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
