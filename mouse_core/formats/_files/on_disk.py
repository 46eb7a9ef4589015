"""Selects the files in a folder that contain the rows of a dataset; any other data file in the folder causes an error.

If a folder has other data besides the files of one dataset, an error is raised, because the reader cannot know which
files are intended.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import check_inside, damaged, read_json_object
from mouse_core.video.index import SUFFIX as INDEX

SUFFIXES = (".arrow", ".parquet")
ZARR = (".zgroup", "zarr.json", ".zmetadata")
DREAMERV3 = re.compile(r"(\d{8}T\d{6}(?:F\d+)?)-([0-9A-Za-z]+)-([0-9A-Za-z]+)-(\d{1,9})\.npz")
"""Pattern of file names of DreamerV3's replay: time, name of the chunk, name of the next chunk, number of steps."""
MCAP, BAG = b"\x89MCAP0\r\n", "metadata.yaml"
STATE, SPLITS = "state.json", "dataset_dict.json"
# Names of shards: `train-00000-of-00002`; older ones of the Hub also end in a hash.
_SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?")
# Files with derived rows that `Dataset.map` and similar methods write beside their source.
_CACHE = re.compile(r"cache-[0-9a-f]+(_\d{5}_of_\d{5})?\.arrow")
# Recorded data of any format that is read, finished or not. Files whose names begin with a dot are no data.
_UNFINISHED = r"(\.(partial|incomplete|tmp|part|gz|zst))?"
_DATA = re.compile(
    rf"[^.].*\.((arrow|feather|ipc|parquet|pq|hdf5|h5|memmap|mcap|db3){_UNFINISHED}|(array_record|tfrecord)([.-].*)?)",
    re.IGNORECASE,
)
_SHOWN = 6
# Suffixes of files; a folder with such a name is most likely a mistake.
_FILE = re.compile(
    r"\.(7z|arrow|array_record|avro|bz2|csv|db3?|duckdb|feather|gz|h5|hdf5?|ipc|json|jsonl|lance|mat|mcap|md|memmap|mp4|ndjson|"
    r"np[yz]|orc|parquet|parq|pickle|pkl|pq|pth?|safetensors|sqlite3?|tar|tfrecord|tgz|tsv|txt|xlsx?|xml|xz|ya?ml|zip|zst)",
    re.IGNORECASE,
)


def files_by_split(root: Path) -> dict[str, list[Path]]:
    """Return the data files of every split, in order.

    Raises:
        ConfigError: The folder has no Arrow or Parquet data, or it has other data as well.
        DataError: A JSON description is damaged or refers to files outside of its folder, or shards are missing.
    """
    if root.is_file() and root.suffix in SUFFIXES:
        return {"train": [root]}
    check_inside([root / SPLITS, root / STATE], root)
    found = _saved(root) or _loose(root)
    if not found:
        raise ConfigError(f"{root}: expected Arrow or Parquet files, found none")
    files = [file for some in found.values() for file in some]
    beside = (file.with_name(name) for file in files for name in (STATE, "dataset_info.json"))
    check_inside([*files, *dict.fromkeys(beside)], root)
    described = {root} | ({root / name for name in found} if (root / SPLITS).is_file() else set())
    others = sorted(_other_data(root, set(files), described))
    if others:
        raise ConfigError(
            f"{root}: expected one dataset, found {_some(files, root)} and also {_some(others, root)}; "
            "name one of these, or move the other files elsewhere"
        )
    return found


def check_folder_name(path: Path, *, wanted: str) -> None:
    """Raise ConfigError if the path of a new folder ends in a suffix of files, such as ".parquet".

    Args:
        path: Path of the folder.
        wanted: The expected kind of name, for the message.
    """
    if _FILE.fullmatch(path.suffix):
        raise ConfigError(f"{str(path)!r}: expected {wanted}, found the name of a {path.suffix} file")


def is_there(root: Path) -> bool:
    """Whether a path has Arrow or Parquet data, even if files are missing."""
    if root.is_file():
        return root.suffix in SUFFIXES
    return any((root / name).is_file() for name in (STATE, SPLITS)) or any(_data_files(root))


def left_out(root: Path) -> list[str]:
    """Return the names of cache files in a folder: their rows were computed from the rows of the other files."""
    return sorted(file.name for file in _folder(root) if _CACHE.fullmatch(file.name))


def _saved(root: Path) -> dict[str, list[Path]]:
    """Return the files that ``save_to_disk`` wrote, by split."""
    there = [name for name in (STATE, SPLITS) if (root / name).is_file()]
    if len(there) == 2:
        raise ConfigError(
            f"{root}: expected one dataset, found {STATE} (of a dataset) and {SPLITS} (of a dict of datasets)"
        )
    if there == [SPLITS]:
        listed = read_json_object(root / SPLITS).get("splits")
        if not isinstance(listed, list) or not listed:
            raise damaged(root / SPLITS, f"expected the names of splits, found {listed!r:.200}")
        names = _plain_names(listed, root / SPLITS, "split")
        return {name: _listed(root / name, read_json_object(root / name / STATE)) for name in names}
    if there == [STATE]:
        state = read_json_object(root / STATE)
        name = state.get("_split")
        return {name if isinstance(name, str) and name else "train": _listed(root, state)}
    return {}


def _listed(folder: Path, state: Mapping[str, Any]) -> list[Path]:
    if state.get("_indices_data_files"):
        raise ConfigError(f"{folder}: expected a dataset without an indices mapping; save it with flatten_indices()")
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(entry, Mapping) for entry in listed):
        raise damaged(folder / STATE, "expected _data_files as a list of files")
    names = _plain_names([entry.get("filename") for entry in listed], folder / STATE, "file")
    for name in names:
        if not (folder / name).is_file():
            raise damaged(folder / STATE, f"expected a file {name!r}, as in the list of files, found none")
    return [folder / name for name in names]


def _loose(root: Path) -> dict[str, list[Path]]:
    """Return the Arrow or Parquet files in a folder, or in a folder ``data`` below it, by split."""
    for files in _data_files(root):
        files = [file for file in files if not _CACHE.fullmatch(file.name)] or files
        for file in files:
            if not file.is_file():
                raise damaged(file, "expected a regular file")
        return _by_name(files)
    return {}


def _data_files(root: Path) -> Iterator[list[Path]]:
    for folder in (root, root / "data"):
        named = [file for file in _folder(folder) if file.suffix in SUFFIXES and not file.name.startswith(".")]
        files = sorted(file for file in named if not _is_index(file))
        if files:
            yield files


def _by_name(files: list[Path]) -> dict[str, list[Path]]:
    """Group files by the split in their names; raise DataError if a shard of a split is missing."""
    splits: dict[str, list[Path]] = {}
    shards: dict[str, list[re.Match[str]]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.stem)
        splits.setdefault(match["split"] if match else "train", []).append(file)
        if match:
            shards.setdefault(match["split"], []).append(match)
    for split, matches in shards.items():
        counts = sorted({int(match["count"]) for match in matches})
        numbers = sorted(int(match["number"]) for match in matches)
        if len(counts) > 1 or numbers != list(range(counts[0])):
            # The files come from two writers, or are not complete: the rows would differ from the written rows.
            raise DataError(
                f"{files[0].parent}: expected files {split}-00000-of-N, {split}-00001-of-N and so on, with the same N "
                f"and no file missing, found N in {counts[:4]} and the file numbers "
                f"{numbers[:8]}{' ...' if len(numbers) > 8 else ''}"
            )
    return splits


def _folder(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _plain_names(names: list[Any], file: Path, what: str) -> list[str]:
    """Return the file names that a JSON description lists.

    Raise DataError if a name occurs twice, or is not the name of a file in the same folder.
    """
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name or "\\" in name:
            raise damaged(file, f"expected the name of a file in the same folder, found {name!r:.200}")
    if len(set(names)) < len(names):
        raise damaged(file, f"expected every {what} once, found {names!r:.200}")
    return names


def _other_data(root: Path, files: set[Path], described: set[Path]) -> Iterator[Path]:
    """Yield data files, at any depth, that are not in ``files``. Folders whose names begin with a dot are skipped."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = Path(folder)
        # Links may lead anywhere, and in circles: only files directly in a linked folder count.
        linked = [file for name in folders if (here / name).is_symlink() for file in _folder(here / name)]
        yield from (file for file in linked if file.name in (STATE, SPLITS) or _is_data(file))
        for name in names:
            saved = name in (STATE, SPLITS) and here not in described
            if here / name not in files and (saved or _is_data(here / name)):
                yield here / name


def _is_data(file: Path) -> bool:
    if file.suffix == ".npz" and not file.name.startswith("."):
        return "observations.npy" in npz_names(file)
    return bool(_DATA.fullmatch(file.name)) and not _CACHE.fullmatch(file.name) and not _is_index(file)


def _is_index(file: Path) -> bool:
    """Whether a file is the index of a video in the same folder."""
    return file.name.endswith(INDEX) and file.with_name(file.name.removesuffix(INDEX)).is_file()


def npz_names(file: Path) -> list[str]:
    """Return the names in a zip file that ``numpy.savez`` wrote; for any other file, return an empty list."""
    if not file.is_file():  # opening a pipe would block
        return []
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return []


def is_zarr(path: Path) -> bool:
    """Whether a folder or zip file is a zarr group, judged by the names in it."""
    if path.is_dir():
        return any((path / name).is_file() for name in ZARR)
    return path.suffix == ".zip" and bool(set(ZARR) & set(npz_names(path)))


def _some(files: list[Path], root: Path) -> str:
    names = [str(file.relative_to(root)) for file in files[:_SHOWN]]
    return f"{names}" + (f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else "")
