"""Rows of a LeRobotDataset whose videos stay where they are, copied once from Parquet into a file that is mapped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError, DataError, StorageError
from mouse_core.formats._files.on_disk import kept_beside
from mouse_core.formats.base import RowStream
from mouse_core.formats.rows import read_rows

# Rows that an earlier release made otherwise are made anew.
_VERSION = 2


def kept_rows(root: Path, asked: Mapping[str, Any], read: Callable[[], RowStream]) -> Any:
    """The rows, a mapped ``datasets.Dataset``, made the first time; a table in memory where there is no room for them.

    They are kept in ".mouse" in the dataset's folder, and where that is only read in "lerobot" of the folder of caches
    (``remote.mirror.cache_folder``), by how the rows are asked for and by the sizes and times of the dataset's files.

    Args:
        root: The dataset's folder.
        asked: How they are asked for.
        read: Reads them.
    """
    asked_for = hashlib.sha256(json.dumps([_VERSION, asked], sort_keys=True).encode()).hexdigest()[:8]
    name = f"rows-{asked_for}-{_files_digest(root, videos=asked['skip_broken'])}"
    place = kept_beside(root, "lerobot") / name
    if not place.exists():
        stream = read()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            stream.write(place, videos=False)
        except (OSError, StorageError, ConfigError):  # no room, or another process is writing it just now
            return stream.to_table()
        for other in place.parent.glob(f"rows-{asked_for}-*"):
            if other.name != name:
                shutil.rmtree(other, ignore_errors=True)
    try:
        return _mapped(place)
    except (DataError, ConfigError):  # of a machine that stopped
        with suppress(OSError):
            shutil.rmtree(place)
        return read().to_table()


def _mapped(place: Path) -> Any:
    mapped = read_rows(place).mapped
    assert mapped is not None  # as it is a file of Arrow rows
    return mapped()


def _files_digest(root: Path, *, videos: bool) -> str:
    """What tells the files of frames, or of all, as they are from what they were."""
    whole = hashlib.sha256()
    for top in ("meta", "data", "videos") if videos else ("meta", "data"):
        for path, size, time in sorted(_files(root / top)):
            whole.update(f"{os.path.relpath(path, root)}\0{size}\0{time}\0".encode(errors="surrogateescape"))
    return whole.hexdigest()[:16]


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    pending: Sequence[str] = [str(folder)]
    while pending:
        folders: list[str] = []
        for one in pending:
            with suppress(FileNotFoundError), os.scandir(one) as found:
                for entry in found:
                    if entry.is_dir():
                        folders.append(entry.path)
                    elif not entry.name.endswith(".index.arrow"):
                        said = entry.stat()
                        yield entry.path, said.st_size, said.st_mtime_ns
        pending = folders
