"""Files of checkpoints: a tree of plain values and arrays, checked against damage, replaced as a whole.

A file is 8 bytes that say what it is, the length of the description and its CRC-32 (little-endian, 8 and 4 bytes), the
description (JSON, where an array is its dtype, shape, place, length and CRC-32), and then the arrays' bytes, each
beginning at a multiple of 64.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.dtypes import dtype_name, named_dtype
from mouse_core.errors import StateError, StorageError
from mouse_core.files.writing import remove_leftovers, replacing, storing

_MAGIC = b"MOUSERB1"
_HEAD = struct.Struct("<8sQI")
_ALIGNMENT = 64
_PIECE = 1 << 22
_NAME = "replay.mouse"


def write_checkpoint(
    path: str | PathLike[str], state: Mapping[str, Any], *, sync: bool = True, only_writer: bool = False
) -> None:
    """Write a state to ``path``, or leave what is there.

    Args:
        path: A file; or a directory that exists, in which it is called ``replay.mouse``.
        state: Nested dicts of plain values and arrays.
        sync: Whether it must outlive a crash of the machine, not only of the process.
        only_writer: Whether nobody else may be at work in the folder. Else what dead writers left there is removed.

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
    # The places of arrays do not depend on the description, which is written behind what it describes: so a checkpoint
    # is written in one pass, and each array read once.
    described = []
    file.write(_HEAD.pack(b"\0" * 8, 0, 0))
    position = _HEAD.size
    for array in arrays:
        position += file.write(b"\0" * (-position % _ALIGNMENT))
        begin, crc = position, 0
        for piece in _pieces(array):
            position += file.write(piece)
            crc = zlib.crc32(piece, crc)
        described.append([dtype_name(array.dtype), list(array.shape), begin, position - begin, crc])
    text = json.dumps({"state": tree, "arrays": described}, allow_nan=True).encode()
    file.write(text)
    file.seek(0)
    file.write(_HEAD.pack(_MAGIC, len(text), zlib.crc32(text)))


def _pieces(array: npt.NDArray[Any]) -> Iterator[memoryview]:
    """An array's bytes in C order, a few megabytes at a time."""
    rows = array.reshape(1) if not array.ndim else array
    step = max(1, _PIECE // max(rows[:1].nbytes, 1))
    for begin in range(0, len(rows), step):
        piece = np.ascontiguousarray(rows[begin : begin + step])
        if piece.nbytes:
            yield piece.reshape(-1).view(np.uint8).data


def _described(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    if isinstance(value, Mapping):
        return {"dict": {str(name): _described(child, arrays) for name, child in value.items()}}
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    return {"value": value.item() if isinstance(value, np.generic) else value}


def read_checkpoint(path: str | PathLike[str]) -> dict[str, Any]:
    """The state in a file that ``write_checkpoint`` wrote.

    Raises:
        StateError: The file is damaged, cut short, or something else.
        StorageError: It cannot be read.
    """
    source = _file(path)
    try:
        with open(source, "rb") as file:
            return _read(file, source)
    except OSError as error:
        raise StorageError(f"checkpoint {source}: expected a file that can be read, found {error}") from error
    except UNREADABLE as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"checkpoint {source}: expected a description of arrays, found {error!r}") from error


def _read(file: BinaryIO, source: Path) -> dict[str, Any]:
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or head[:8] != _MAGIC:
        raise StateError(f"checkpoint {source}: expected the checkpoint of a replay buffer, found another file")
    _, length, crc = _HEAD.unpack(head)
    if length > size - _HEAD.size:
        raise StateError(f"checkpoint {source}: expected a description of {length} bytes, found a file of {size}")
    file.seek(size - length)
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise StateError(f"checkpoint {source}: expected its description as it was written, found it damaged or cut")
    description = json.loads(text)
    arrays = [_array(file, source, number, *entry) for number, entry in enumerate(description["arrays"])]
    state = _restored(description["state"], arrays)
    if not isinstance(state, dict):
        raise StateError(f"checkpoint {source}: expected a dict, found {type(state).__name__}")
    return state


def _array(
    file: BinaryIO, source: Path, number: int, dtype: str, shape: list[int], begin: int, nbytes: int, crc: int
) -> npt.NDArray[Any]:
    kind, end = named_dtype(dtype), os.fstat(file.fileno()).st_size
    # Before memory is asked for, since nobody vouches for these numbers.
    if (
        kind.hasobject
        or min(shape, default=0) < 0
        or prod(shape) * kind.itemsize != nbytes
        or not 0 <= begin <= end - nbytes
    ):
        raise StateError(
            f"checkpoint {source}: expected array {number} within {end} bytes, found {nbytes} bytes at {begin} for "
            f"{dtype} {shape}"
        )
    array = np.empty(shape, kind)
    flat = array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
    file.seek(begin)
    found = 0
    for place in range(0, nbytes, _PIECE):
        piece = flat[place : place + _PIECE]
        if file.readinto(piece.data) != len(piece):  # type: ignore[attr-defined]
            raise StateError(f"checkpoint {source}: expected {nbytes} bytes of array {number}, found fewer")
        found = zlib.crc32(piece.data, found)
    if found != crc:
        raise StateError(f"checkpoint {source}: expected array {number} as it was written, found it damaged")
    return array


def _restored(value: Mapping[str, Any], arrays: list[npt.NDArray[Any]]) -> Any:
    if "dict" in value:
        return {name: _restored(child, arrays) for name, child in value["dict"].items()}
    return arrays[value["array"]] if "array" in value else value["value"]


def _file(path: str | PathLike[str]) -> Path:
    place = Path(path)
    return place / _NAME if place.is_dir() else place
