"""Reads HDF5 files in a separate process.

The HDF5 library trusts the content of files: a damaged file can cause an endless loop, exhaust the memory or crash the
process. Therefore a separate process, with limits of time and memory, reads the file. If the separate process fails,
the calling process raises an error.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.child import Child
from mouse_core.errors import ConfigError
from mouse_core.files.reading import damaged

PATIENCE = 15.0
"""Largest time in seconds for one request to the HDF5 library; a request reads at most about 64 MB."""

_CHILD = Path(__file__).with_name("h5_child.py")


class H5File:
    """An HDF5 file open for reading; a context manager.

    Readers of other file types (zarr) derive from this class, and set the program that runs in the separate process.

    Args:
        path: The file.

    Raises:
        ImportError: h5py is not installed.
        ConfigError: The file does not exist.
        DataError: The file is damaged, or is not an HDF5 file.
    """

    child = _CHILD
    library = "h5py"
    called = "HDF5"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if importlib.util.find_spec(self.library) is None:
            raise ImportError(f"{self.called} files need {self.library}: pip install 'mouse-data[formats]'")
        self.check(self.path)
        self._child = Child(self.child, self.path)
        try:
            self._ask(None, f"expected {self.called} data: ")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> H5File:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading process."""
        self._child.close()

    def another(self, path: str | os.PathLike[str]) -> None:
        """Close the file, and open another file in the same reading process, because starting a process takes 0.2 s.

        Raises:
            ConfigError: The file does not exist.
            DataError: The file is damaged, or is not an HDF5 file.
        """
        self.path = os.fspath(path)
        self.check(self.path)
        self._ask({"do": "open", "path": self.path}, f"expected {self.called} data: ")

    @staticmethod
    def check(path: str) -> None:
        """Raise ConfigError if no file exists at the path."""
        if not os.path.isfile(path):
            found = "a folder" if os.path.isdir(path) else "none"
            raise ConfigError(f"{path}: expected an HDF5 file, found {found}")

    def names(self, path: str = "/") -> list[str]:
        """Return the names of the items in a group, in the order in which the file stores the items."""
        names: list[str] = self._ask({"do": "names", "path": path})[0]["names"]
        return names

    def find(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """Describe the item at each path and all items below it; descriptions do not contain the values of datasets.

        Returns:
            A tree for each path; None for a path without an item. A group has ``kind`` "group" and ``items``, a dict
                from names to descriptions; a dataset has ``kind`` ("number", "text", "ragged", "empty" or "other"),
                ``shape`` and ``dtype``; both have ``attributes``.

        Raises:
            DataError: The file is damaged, or a dataset's shape needs more bytes than are stored.
        """
        found: list[dict[str, Any] | None] = self._ask({"do": "trees", "paths": list(paths)})[0]["trees"]
        return found

    def attributes(self, items: Sequence[tuple[str, str]]) -> list[Any]:
        """Return the value of each attribute as a JSON value, or None for a missing attribute. Each of ``items`` is the
        path of an item and the name of its attribute.
        """
        found: list[Any] = self._ask({"do": "attributes", "items": [list(item) for item in items]})[0]["values_of"]
        return found

    def read(self, items: Sequence[tuple[str, int, int]]) -> list[npt.NDArray[Any]]:
        """Read rows of several datasets.

        Args:
            items: For each dataset: its path, the first row to read, and the end (the row after the last row to read).

        Returns:
            Arrays ``[n, ...]``. Texts are returned as an object array of bytes, and ragged values as an object array of
                arrays.

        Raises:
            DataError: The file is damaged.
        """
        if not items:
            return []
        answer, payload = self._ask({"do": "read", "items": [list(item) for item in items]})
        return [_array(header, parts) for header, parts in zip(answer["values"], payload, strict=True)]

    def _ask(self, request: dict[str, Any] | None, expected: str = "") -> tuple[dict[str, Any], list[list[bytearray]]]:
        if self._child.is_closed:
            raise ConfigError(f"{self.path}: the file is closed")
        try:
            header, payload = self._child.ask(request, PATIENCE)
        except TimeoutError as error:
            raise damaged(self.path, f"the {self.called} library did not answer within {PATIENCE:.0f} s") from error
        except EOFError as error:
            raise damaged(self.path, f"the {self.called} library crashed on this file (exit code {error})") from error
        if "error" in header:
            raise damaged(self.path, expected + header["error"].strip().splitlines()[0])
        return header, payload


def _array(header: dict[str, Any], parts: list[bytearray]) -> npt.NDArray[Any]:
    if header["kind"] == "number":
        return np.frombuffer(parts[0], np.dtype(header["dtype"])).reshape(header["shape"])
    lengths, joined = np.frombuffer(parts[0], np.int64), bytes(parts[1])
    values = np.empty(len(lengths), dtype=object)
    for index, stop in enumerate(np.cumsum(lengths).tolist()):
        value = joined[stop - int(lengths[index]) : stop]
        values[index] = value if header["kind"] == "text" else np.frombuffer(value, header["dtype"])
    return values


def leaves(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the path and the description of every dataset below a group, at any depth.

    Args:
        tree: A tree from ``H5File.find``.
    """
    for name, item in tree.get("items", {}).items():
        if item["kind"] == "group":
            yield from (((name, *path), part) for path, part in leaves(item))
        else:
            yield (name,), item


def import_h5py() -> Any:
    """Return the package h5py; the ImportError names the package to install."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError("HDF5 files need h5py: pip install 'mouse-data[formats]'") from error
    return h5py
