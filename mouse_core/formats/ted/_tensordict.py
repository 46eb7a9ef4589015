"""TensorDict's memory-mapped folders, read and written as the plain files that they are; needs no torch.

A folder holds ``meta.json``, which says of every entry its dtype and shape, a file ``NAME.memmap`` with its bytes
in C order, and a folder for each entry that is a TensorDict itself. A nested tensor's rows lie one after the other,
their shapes in ``NAME.shape.memmap``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.files.reading import check_inside, damaged, read_json_object, reading

_MOST_JSON = 64 << 20
_DEEPEST = 16
_DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16"),
}
_KINDS = ("tensordict._td.TensorDict", "tensordict.tensordict.TensorDict", "tensordict._tensordict.TensorDict")

Key = tuple[str, ...]


@dataclass(frozen=True)
class MemmapArray:
    """One entry: rows in a file, read when asked for.

    Args:
        file: The file.
        dtype: Of the values; "bfloat16" is read as float32.
        shape: ``[n, ...]``.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self, first: int, end: int) -> npt.NDArray[Any]:
        """Rows ``first..end - 1``.

        Raises:
            DataError: The file has become shorter.
        """
        count = max(end - first, 0)
        width = math.prod(self.shape[1:])
        with reading(self.file):
            values = np.fromfile(self.file, self.stored, count * width, offset=first * width * self.stored.itemsize)
        if values.size != count * width:
            raise damaged(self.file, f"expected rows up to {end}, found its end before")
        return self._delivered(values).reshape(count, *self.shape[1:])

    def read_lane(self, first: int, end: int, dimensions: int, lane: int) -> npt.NDArray[Any]:
        """The same of one lane: rows are ``[..., *rest]`` with so many leading dimensions, of which all but the first
        are lanes. Only the lane's values are read."""
        if not math.prod(self.shape):
            return self.read(first, end).reshape(end - first, -1, *self.shape[dimensions:])[:, 0]
        with reading(self.file):
            mapped: Any = np.memmap(self.file, self.stored, mode="r", shape=self.shape)
            lanes = mapped.reshape(self.shape[0], -1, *self.shape[dimensions:])
            return self._delivered(np.array(lanes[first:end, lane]))

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype in the file."""
        return np.dtype({"bfloat16": "uint16", "bool": "uint8"}.get(self.dtype, self.dtype)).newbyteorder("<")

    def _delivered(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.dtype == "bool":
            return np.asarray(values != 0)
        if self.dtype == "bfloat16":
            return np.asarray((values.astype(np.uint32) << 16).view(np.float32))
        return values


def read_folder(folder: Path) -> tuple[dict[Key, MemmapArray], dict[str, Any]]:
    """The arrays of a folder by path, of a nested tensor its rows one after the other; and its values that are none.

    Raises:
        DataError: A description or file that is damaged or missing, or a file that is not as long as it should be.
        ConfigError: A TensorDict of a kind that is not read.
    """
    arrays: dict[Key, MemmapArray] = {}
    others: dict[str, Any] = {}
    _collect(folder, folder, (), arrays, others)
    return arrays, others


def _collect(root: Path, folder: Path, path: Key, arrays: dict[Key, MemmapArray], others: dict[str, Any]) -> None:
    """Put what a folder and those in it hold into ``arrays`` and ``others``."""
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
    """The shape of a nested tensor's rows one after the other: of rows ``[2, 3]`` and ``[5, 3]`` it is ``[7, 3]``."""
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


# ---------------------------------------------------------------------- writing


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
