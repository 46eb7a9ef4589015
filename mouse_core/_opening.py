"""Opening a dataset that is named on the command line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError


@dataclass(frozen=True)
class Opened:
    """A dataset that was opened.

    Args:
        name: As it was asked for.
        parts: Its splits by name.
        seconds: What opening took.
    """

    name: str
    parts: Mapping[str, Any]
    seconds: float

    @property
    def rows(self) -> int:
        """Steps in all."""
        return sum(len(part) for part in self.parts.values())


def open_dataset(path_or_name: str, splits: Sequence[str] | None = None) -> Opened:
    """Open a dataset from disk, or from the Hub.

    Args:
        path_or_name: A folder as ``save_to_disk`` writes it, a folder of Arrow or Parquet files, one such file, or the
            name of a dataset on the Hub.
        splits: Names of the splits to take; by default all.

    Raises:
        ConfigError: Nothing that can be opened, or a split that is not there.
    """
    import datasets

    began = time.perf_counter()
    path = Path(path_or_name)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        found = datasets.load_from_disk(path_or_name)
    elif path.exists():
        found = datasets.concatenate_datasets([_open_file(file) for file in _data_files(path)])
    elif path.is_absolute() or path.suffix or path_or_name.startswith("."):
        raise ConfigError(f"dataset: expected a file, a folder or a name, found no file {path_or_name!r}")
    else:
        found = datasets.load_dataset(path_or_name)
    parts = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    for name in splits or ():
        if name not in parts:
            raise ConfigError(f"split: expected one of {list(parts)}, found {name!r}")
    parts = {name: parts[name] for name in splits} if splits else parts
    return Opened(path_or_name, parts, time.perf_counter() - began)


def _data_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted([*path.glob("*.arrow"), *path.glob("*.parquet")])
    if not files or files[0].suffix not in (".arrow", ".parquet"):
        raise ConfigError(f"dataset: expected Arrow or Parquet files, found none in {str(path)!r}")
    return files


def _open_file(file: Path) -> Any:
    import datasets

    return (
        datasets.Dataset.from_file(str(file)) if file.suffix == ".arrow" else datasets.Dataset.from_parquet(str(file))
    )
