"""Where the arrays of TED are: memory-mapped folders and groups of HDF5 files, by the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from mouse_core.formats._files.h5 import H5File
from mouse_core.formats.base import damaged
from mouse_core.formats.ted._tensordict import read_folder, read_json

Key = tuple[str, ...]


class Entries(Protocol):
    """Where arrays are."""

    name: str

    def shape(self, key: Key) -> tuple[int, ...]:
        """``[n, ...]`` of an entry."""
        ...

    def keys(self) -> Sequence[Key]:
        """All entries."""
        ...

    def read(self, keys: Sequence[Key], first: int, end: int) -> list[npt.NDArray[Any]]:
        """Rows ``first..end - 1`` of some entries."""
        ...

    def read_lane(
        self, keys: Sequence[Key], first: int, end: int, dimensions: int, lane: int
    ) -> list[npt.NDArray[Any]]:
        """The same of one environment, ``dimensions`` being time and those over environments."""
        ...

    def about(self) -> Mapping[str, Any]:
        """Values that are no arrays."""
        ...


class FolderEntries:
    """A memory-mapped folder, or a TorchRL buffer's checkpoint that holds one.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        folder = path if (path / "meta.json").is_file() else path / "storage"
        self._found = read_folder(folder)
        self._about = {key[0]: value for key, value in self._found.others.items() if len(key) == 1}
        self._about["_batch"] = self._found.batch
        # What TorchRL writes beside: how many places of the ring are used, and where its cursor stands.
        if (folder / "storage_metadata.json").is_file():
            self._about["_len"] = read_json(folder / "storage_metadata.json").get("len")
        if (folder.parent / "writer" / "metadata.json").is_file():
            self._about["_cursor"] = read_json(folder.parent / "writer" / "metadata.json").get("cursor")

    def keys(self) -> Sequence[Key]:
        """See ``Entries``."""
        return list(self._found.arrays)

    def shape(self, key: Key) -> tuple[int, ...]:
        """See ``Entries``."""
        return self._found.arrays[key].shape

    def read(self, keys: Sequence[Key], first: int, end: int) -> list[npt.NDArray[Any]]:
        """See ``Entries``."""
        return [self._found.arrays[key].read(first, end) for key in keys]

    def read_lane(
        self, keys: Sequence[Key], first: int, end: int, dimensions: int, lane: int
    ) -> list[npt.NDArray[Any]]:
        """See ``Entries``."""
        return [self._found.arrays[key].read_lane(first, end, dimensions, lane) for key in keys]

    def about(self) -> Mapping[str, Any]:
        """See ``Entries``."""
        return self._about


class FileEntries:
    """A group of an HDF5 file.

    Args:
        file: The open file.
        tree: What lies in the group; see ``H5File.trees``.
        place: The group's path.
    """

    def __init__(self, file: H5File, tree: Mapping[str, Any], place: str) -> None:
        self.name = file.path
        self._file = file
        self._place = place
        self._found: dict[Key, Mapping[str, Any]] = {}
        self._about: dict[str, Any] = {}
        self._collect(tree, ())

    def _collect(self, tree: Mapping[str, Any], path: Key) -> None:
        for name, item in tree.get("items", {}).items():
            if item["kind"] == "group":
                self._collect(item, (*path, name))
            elif item["kind"] == "number" and (item["shape"] and (path or not name.startswith("_"))):
                self._found[*path, name] = item
            elif item["kind"] == "number" and not path:
                values = self._file.read([(f"{self._place}/{name}", 0, 1 << 20)])[0]
                self._about[name] = values.reshape(item["shape"]).tolist()
            elif item["kind"] != "text" or item["shape"]:
                # Left out, it would be a column that vanished.
                raise damaged(
                    self.name,
                    f"{'/'.join((*path, name))}: expected numbers for every step, found {item['kind']} {item['shape']}",
                )

    def keys(self) -> Sequence[Key]:
        """See ``Entries``."""
        return list(self._found)

    def shape(self, key: Key) -> tuple[int, ...]:
        """See ``Entries``."""
        return tuple(self._found[key]["shape"])

    def read(self, keys: Sequence[Key], first: int, end: int) -> list[npt.NDArray[Any]]:
        """See ``Entries``."""
        return self._file.read([("/".join((self._place, *key)), first, end) for key in keys])

    def read_lane(
        self, keys: Sequence[Key], first: int, end: int, dimensions: int, lane: int
    ) -> list[npt.NDArray[Any]]:
        """See ``Entries``. All environments are read, for a file of chunks is."""
        return [
            values.reshape(len(values), -1, *values.shape[dimensions:])[:, lane]
            for values in self.read(keys, first, end)
        ]

    def about(self) -> Mapping[str, Any]:
        """See ``Entries``."""
        return self._about
