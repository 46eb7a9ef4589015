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

from mouse_core.about.dataset import read_about
from mouse_core.errors import ConfigError, DataError, StorageError
from mouse_core.files.noted import check_bytes, noted
from mouse_core.formats._files.on_disk import kept_beside
from mouse_core.formats.base import RowStream
from mouse_core.formats.columns.blocks import blocks
from mouse_core.formats.lerobot._videos import base_of
from mouse_core.formats.rows import read_rows
from mouse_core.images.files import find_video
from mouse_core.video.index import index_video

# Rows that another version made otherwise are made anew.
_VERSION = 1


def kept_rows(root: Path, asked: Mapping[str, Any], read: Callable[[], RowStream]) -> Any:
    """The rows, a mapped ``datasets.Dataset``, made the first time; a table in memory where there is no room for them.

    They are kept in ".mouse" in the dataset's folder, and where that is only read in "lerobot" of the folder of caches
    (``remote.mirror.cache_folder``), by how the rows are asked for and by the sizes and times of the dataset's files.
    Where only those of videos have changed, and all that rows name frames of are what they were, the rows are, too.

    Args:
        root: The dataset's folder.
        asked: How they are asked for.
        read: Reads them.
    """
    asked_for = hashlib.sha256(json.dumps([_VERSION, asked], sort_keys=True).encode()).hexdigest()[:8]
    of_rows = f"rows-{asked_for}-{_files_digest(root, 'meta', 'data')}"
    place = kept_beside(root, "lerobot") / f"{of_rows}-{_files_digest(root, 'videos')}"
    if not place.exists() and not asked["skip_broken"]:  # of which frames may be there by now that were missing
        for other in place.parent.glob(f"{of_rows}-*"):
            if _has_its_videos(other, root):
                with suppress(OSError):
                    other.rename(place)
    if not place.exists():
        stream = read()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            # Files of version 2 have few rows each, and each record batch takes its time whenever it is mapped.
            stream.replace(batches=lambda: blocks(stream)).write(place, videos=False)
        except (OSError, StorageError, ConfigError):  # no room, or another process is writing it just now
            return stream.to_table()
        for other in place.parent.glob(f"rows-{asked_for}-*"):
            if other.name != place.name:
                shutil.rmtree(other, ignore_errors=True)
    try:
        return _mapped(place)
    except (DataError, ConfigError):  # of a machine that stopped, or damaged
        with suppress(OSError):
            shutil.rmtree(place)
        return read().to_table()


def _has_its_videos(place: Path, root: Path) -> bool:
    """Whether the videos that kept rows name frames of are those that they were."""
    try:
        base = os.path.realpath(base_of(root))
        listed = read_about(_mapped(place)).videos
        return all(index_video(find_video(path, [base])).digest == digest for path, digest in listed)
    except (DataError, ConfigError, ImportError):
        return False


def _mapped(place: Path) -> Any:
    """Kept rows, once all bytes are what was written: nobody else looks for damage in them."""
    about = noted(place)
    wrong = [f"{place}: expected checksums, found none"] if about is None else check_bytes(place, about, lambda _: None)
    if wrong:
        raise DataError("; ".join(wrong))
    mapped = read_rows(place).mapped
    assert mapped is not None  # as it is a file of Arrow rows
    return mapped()


def _files_digest(root: Path, *folders: str) -> str:
    """What tells the files of some folders as they are from what they were."""
    whole = hashlib.sha256()
    for folder in folders:
        for path, size, time in sorted(_files(root / folder)):
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
