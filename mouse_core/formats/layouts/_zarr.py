"""zarr groups, in folders and zip files, read by a process of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError
from mouse_core.formats._files.h5 import H5File
from mouse_core.formats._files.on_disk import ZARR, is_zarr


class ZarrTree(H5File):
    """A zarr group of version 2 or 3, open for reading.

    Args:
        path: A folder or a zip file.

    Raises:
        ImportError: The package zarr is not installed.
        ConfigError: There is no such group.
        DataError: It is damaged.
    """

    child = Path(__file__).with_name("zarr_child.py")
    library = "zarr"
    called = "zarr"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._absent: dict[str, tuple[int, int]] = {}
        super().__init__(path)

    @staticmethod
    def check(path: str) -> None:
        """Raise ConfigError where nothing of this kind can lie at a path."""
        if not is_zarr(Path(path)):
            raise ConfigError(f"{path}: expected a zarr group, a folder or zip file with {ZARR[0]} or {ZARR[1]}")

    def find(self, paths: Sequence[str]) -> list[dict[str, Any] | None]:
        """What lies at some paths; None where nothing does."""
        found = super().find(paths)
        for path, tree in zip(paths, found, strict=True):
            if tree and tree.get("absent"):
                self._absent[path] = (tree["absent"], tree["chunks"])
        return found

    @property
    def notes(self) -> list[str]:
        """What is not there of the arrays that were found: zarr writes no chunk of nothing but the fill value."""
        return [
            f"{path}: {absent} of {chunks} chunks are not there and are read as the fill value."
            for path, (absent, chunks) in self._absent.items()
        ]
