"""Checkpoint files: a tree of plain values and arrays, with checksums; a file is always replaced completely.

A file has three parts:

- a head: 8 magic bytes, then the length of the description (8 bytes) and its checksum (8 bytes), both little-endian;
- the bytes of each array, aligned to 64 bytes;
- the description, JSON: the tree, and for each array its dtype, shape, position, length and checksum.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.dtypes import dtype_name, named_dtype
from mouse_core.errors import DataError, StateError, StorageError
from mouse_core.files.checksum import RunningChecksum, check, checksum
from mouse_core.files.writing import remove_leftovers, replacing, storing

_MAGIC = b"MOUSERB1"
_HEAD = struct.Struct("<8sQQ")
_ALIGNMENT = 64
_PIECE = 1 << 22
_NAME = "replay.mouse"


def write_checkpoint(
    path: str | PathLike[str], state: Mapping[str, Any], *, sync: bool = True, only_writer: bool = False
) -> None:
    """Write a state to ``path``; after an error, an existing file is unchanged.

    Args:
        path: A file, or an existing directory, in which the file ``replay.mouse`` is written.
        state: Nested dicts of plain values and arrays.
        sync: Whether the file must survive a crash of the machine, not only of the process.
        only_writer: Whether no other process writes to the folder. If False, unfinished files of dead writers are
            removed.

    Raises:
        StorageError: The file cannot be written.
    """
    target = _file(path)
    with storing(f"checkpoint {target}"):
        if not only_writer:
            remove_leftovers(target.parent, [target.name])
        with replacing(target, sync=sync, only_writer=only_writer) as partial, open(partial, "wb") as file:
            _write(file, state)


def _write(file: BinaryIO, state: Mapping[str, Any]) -> None:
    arrays: list[npt.NDArray[Any]] = []
    tree = _described(state, arrays)
    # The description is written last, because the positions of arrays do not depend on it. So a checkpoint is written
    # in one pass that reads each array once.
    entries = []
    file.write(_HEAD.pack(b"\0" * 8, 0, 0))
    position = _HEAD.size
    for array in arrays:
        position += file.write(b"\0" * (-position % _ALIGNMENT))
        begin, running = position, RunningChecksum()
        for piece in _pieces(array):
            position += file.write(piece)
            running.update(piece)
        entries.append([dtype_name(array.dtype), list(array.shape), begin, position - begin, running.intdigest()])
    text = json.dumps({"state": tree, "arrays": entries}, allow_nan=True).encode()
    file.write(text)
    file.seek(0)
    file.write(_HEAD.pack(_MAGIC, len(text), checksum(text)))


def _pieces(array: npt.NDArray[Any]) -> Iterator[memoryview]:
    """Yield the bytes of an array in C order, a few megabytes at a time."""
    rows = array.reshape(1) if not array.ndim else array
    step = max(1, _PIECE // max(rows[:1].nbytes, 1))
    for begin in range(0, len(rows), step):
        piece = np.ascontiguousarray(rows[begin : begin + step])
        if piece.nbytes:
            yield piece.reshape(-1).view(np.uint8).data


def _described(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    """Return the JSON description of a tree, and append the tree's arrays to ``arrays``."""
    if isinstance(value, Mapping):
        return {"dict": {str(name): _described(child, arrays) for name, child in value.items()}}
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    return {"value": value.item() if isinstance(value, np.generic) else value}


def read_checkpoint(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the state in a file that ``write_checkpoint`` wrote.

    Raises:
        StateError: The file is damaged, truncated, or not a checkpoint.
        StorageError: The file cannot be read.
    """
    source = _file(path)
    try:
        with open(source, "rb") as file:
            return _read(file, source)
    except OSError as error:
        raise StorageError(f"checkpoint {source}: cannot be read: {error}") from error
    except UNREADABLE as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"checkpoint {source}: cannot decode its description: {error!r}") from error


def _read(file: BinaryIO, source: Path) -> dict[str, Any]:
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or head[:8] != _MAGIC:
        raise StateError(f"checkpoint {source}: expected a checkpoint, found another file")
    _, length, expected = _HEAD.unpack(head)
    if length > size - _HEAD.size:
        raise StateError(f"checkpoint {source}: expected a description of {length} bytes, found a file of {size} bytes")
    file.seek(size - length)
    text = file.read(length)
    _check(source, "its description", expected, checksum(text))
    description = json.loads(text)
    arrays = [_array(file, source, number, *entry) for number, entry in enumerate(description["arrays"])]
    state = _restored(description["state"], arrays)
    if not isinstance(state, dict):
        raise StateError(f"checkpoint {source}: expected a dict, found {type(state).__name__}")
    return state


def _array(
    file: BinaryIO, source: Path, number: int, dtype: str, shape: list[int], begin: int, nbytes: int, expected: int
) -> npt.NDArray[Any]:
    kind, end = named_dtype(dtype), os.fstat(file.fileno()).st_size
    # Check untrusted sizes before allocating memory.
    if (
        kind.hasobject
        or min(shape, default=0) < 0
        or prod(shape) * kind.itemsize != nbytes
        or not 0 <= begin <= end - nbytes
    ):
        raise StateError(
            f"checkpoint {source}: expected array {number} to end at byte {end} or earlier, found {nbytes} bytes "
            f"from byte {begin} on, for {dtype} {shape}"
        )
    array = np.empty(shape, kind)
    flat = array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
    file.seek(begin)
    running = RunningChecksum()
    for start in range(0, nbytes, _PIECE):
        piece = flat[start : start + _PIECE]
        if file.readinto(piece.data) != len(piece):  # type: ignore[attr-defined]
            raise StateError(f"checkpoint {source}: expected {nbytes} bytes of array {number}, found fewer")
        running.update(piece.data)
    _check(source, f"array {number}", expected, running.intdigest())
    return array


def _check(source: Path, unit: str, expected: int, found: int) -> None:
    """Raise StateError unless a part of the file has the checksum that was written."""
    try:
        check(f"checkpoint {source}", unit, expected, found)
    except DataError as error:
        raise StateError(str(error)) from None


def _restored(value: Mapping[str, Any], arrays: list[npt.NDArray[Any]]) -> Any:
    if "dict" in value:
        return {name: _restored(child, arrays) for name, child in value["dict"].items()}
    return arrays[value["array"]] if "array" in value else value["value"]


def _file(path: str | PathLike[str]) -> Path:
    """Return the path of the file; ``path`` can be its directory."""
    file = Path(path)
    return file / _NAME if file.is_dir() else file
