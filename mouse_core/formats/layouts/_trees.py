"""Trees of groups and arrays in HDF5 files, zarr groups and npz files, open for reading."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.formats._files.h5 import H5File
from mouse_core.formats._files.npz import NpzTree
from mouse_core.formats._files.on_disk import ZARR, is_zarr

HDF5 = (".hdf5", ".h5")


class Tree(Protocol):
    """An open file or folder of groups and arrays; ``H5File`` has these methods."""

    path: str

    def names(self, path: str = "/") -> list[str]:
        """Names of the groups and arrays in a group."""

    def find(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """Description of the group or array at each path; None if nothing lies there."""

    def attributes(self, items: Sequence[tuple[str, str]]) -> list[Any]:
        """Attributes of groups, by path and name; None for an attribute that does not exist."""

    def read(self, items: Sequence[tuple[str, int, int]]) -> list[npt.NDArray[Any]]:
        """Read rows ``[first, stop)`` of several arrays."""

    def close(self) -> None:
        """Close the file."""


class ZarrTree(H5File):
    """A zarr group of version 2 or 3, open for reading.

    Args:
        path: A folder or a zip file.

    Raises:
        ImportError: The package zarr is not installed.
        ConfigError: The group does not exist.
        DataError: The group is damaged.
    """

    child = Path(__file__).with_name("zarr_child.py")
    library = "zarr"
    called = "zarr"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._absent: dict[str, tuple[int, int]] = {}
        super().__init__(path)

    @staticmethod
    def check(path: str) -> None:
        """Raise ConfigError if the path holds no zarr group."""
        if not is_zarr(Path(path)):
            raise ConfigError(f"{path}: expected a zarr group, a folder or zip file with {ZARR[0]} or {ZARR[1]}")

    def find(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """Description of the group or array at each path; None if nothing lies there."""
        found = super().find(paths)
        for path, tree in zip(paths, found, strict=True):
            if tree and tree.get("absent"):
                self._absent[path] = (tree["absent"], tree["chunks"])
        return found

    @property
    def notes(self) -> list[str]:
        """Notes on missing chunks of the arrays that ``find`` returned; zarr writes no chunk of fill values."""
        return [
            f"{path}: {absent} of {chunks} chunks are not there and are read as the fill value."
            for path, (absent, chunks) in self._absent.items()
        ]


def _open(path: Path) -> Any:
    if is_zarr(path):
        return ZarrTree(path)
    is_npz = path.suffix == ".npz" or (path.suffix not in HDF5 and zipfile.is_zipfile(path))
    return NpzTree(path) if is_npz else H5File(path)


def open_each(files: Sequence[Path]) -> Generator[Tree]:
    """Open the files in turn; a file stays open until the next one is requested."""
    with ExitStack() as stack:
        file: Any = None
        for path in files:
            if type(file) is H5File and path.suffix in HDF5:
                file.another(path)
            else:
                stack.close()
                file = stack.enter_context(closing(_open(path)))
            yield file
