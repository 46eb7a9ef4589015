"""Files as memory: with room on the disk for all of it, and mapped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mouse_core.errors import StateError, StorageError
from mouse_core.files.mapped import set_aside


def lengthen(path: Path, nbytes: int) -> None:
    """Make a file at least so long, with room on the disk for all of it.

    Raises:
        StorageError: There is no room.
    """
    try:
        with open(path, "ab") as file:
            size = os.fstat(file.fileno()).st_size
            if size >= nbytes:
                return
            set_aside(file.fileno(), nbytes, begin=size)
    except OSError as error:
        raise StorageError(f"{path}: expected room for {nbytes} bytes, found {error}") from error


def map_file(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    """The first bytes of a file, mapped for reading and writing.

    Raises:
        StateError: The file is shorter, or missing.
        StorageError: It cannot be opened or mapped.
    """
    if not nbytes:
        return np.empty(0, np.uint8)
    try:
        return _mapped(path, nbytes)
    except FileNotFoundError as error:
        raise StateError(f"{path}: expected a file of {nbytes} bytes, found none") from error
    except (OSError, OverflowError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise StorageError(f"{path}: expected {nbytes} bytes that can be mapped, found {error}") from error


def _mapped(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size < nbytes:
            raise StateError(f"{path}: expected {nbytes} bytes, found {size}")
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
