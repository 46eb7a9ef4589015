"""Where the arrays of TED are: memory-mapped folders and groups of HDF5 files, with the same methods.

Both have ``name``, for messages; ``shapes``, ``[n, ...]`` of every entry by its path; and ``about``, the values that
are no arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from mouse_core.files.reading import check_inside, damaged, read_json_object
from mouse_core.formats._files.h5 import H5File, leaves
from mouse_core.formats.ted._tensordict import Key, read_folder


class FolderEntries:
    """A memory-mapped folder, or a TorchRL buffer's checkpoint that holds one.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        folder = path if (path / "meta.json").is_file() else path / "storage"
        check_inside([folder / "meta.json"], path)
        self._arrays, self.about = read_folder(folder)
        self.shapes = {key: array.shape for key, array in self._arrays.items()}
        # What TorchRL writes beside: how many places of the ring are used, and where its cursor stands.
        places = {"len": folder / "storage_metadata.json", "cursor": folder.parent / "writer" / "metadata.json"}
        for name, file in places.items():
            if file.is_file():
                self.about[f"_{name}"] = read_json_object(file).get(name)

    def read(self, keys: Sequence[Key], first: int, end: int) -> list[npt.NDArray[Any]]:
        """Rows ``first..end - 1`` of some entries."""
        return [self._arrays[key].read(first, end) for key in keys]

    def read_lane(
        self, keys: Sequence[Key], first: int, end: int, dimensions: int, lane: int
    ) -> list[npt.NDArray[Any]]:
        """The same of one environment, ``dimensions`` being time and those over environments."""
        return [self._arrays[key].read_lane(first, end, dimensions, lane) for key in keys]


class FileEntries:
    """A group of an HDF5 file.

    Args:
        file: The open file.
        tree: What lies in the group; see ``H5File.trees``.
        place: The group's path.
    """

    def __init__(self, file: H5File, tree: Mapping[str, Any], place: str) -> None:
        self.name = file.path
        self.shapes: dict[Key, tuple[int, ...]] = {}
        self.about: dict[str, Any] = {}
        self._file = file
        self._place = place
        for path, item in leaves(tree):
            alone = len(path) == 1
            if item["kind"] == "number" and item["shape"] and not (alone and path[0].startswith("_")):
                self.shapes[path] = tuple(item["shape"])
            elif item["kind"] == "number" and alone:
                values = file.read([(f"{place}/{path[0]}", 0, 1 << 20)])[0]
                self.about[path[0]] = values.reshape(item["shape"]).tolist()
            elif item["kind"] != "text" or item["shape"]:
                # Left out, it would be a column that vanished.
                raise damaged(
                    self.name,
                    f"{'/'.join(path)}: expected numbers for every step, found {item['kind']} {item['shape']}",
                )

    def read(self, keys: Sequence[Key], first: int, end: int) -> list[npt.NDArray[Any]]:
        """As ``FolderEntries``."""
        return self._file.read([("/".join((self._place, *key)), first, end) for key in keys])

    def read_lane(
        self, keys: Sequence[Key], first: int, end: int, dimensions: int, lane: int
    ) -> list[npt.NDArray[Any]]:
        """As ``FolderEntries``. All environments are read, for a file of chunks is."""
        return [
            values.reshape(len(values), -1, *values.shape[dimensions:])[:, lane]
            for values in self.read(keys, first, end)
        ]


Entries = FolderEntries | FileEntries
