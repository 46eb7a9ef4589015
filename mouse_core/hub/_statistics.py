"""Statistics of a dataset on the Hub: the two files of ``Statistics.save``, beside the rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mouse_core.errors import ConfigError
from mouse_core.hub._card import CONFIG, config_folder
from mouse_core.statistics import Statistics
from mouse_core.store.views import Store

# Statistics are of this split, or of all splits of a dataset that lacks it.
_OF = "train"
_FILES = ("meta/stats.json", "meta/stats.mouse")


def statistics_paths(config: str) -> tuple[str, str]:
    """Return the paths of a configuration's statistics: those of LeRobot for the default one, else beside its rows."""
    folder = "" if config == CONFIG else f"{config_folder(config)}/"
    text, more = (folder + file for file in _FILES)
    return text, more


def check_statistics(
    statistics: Statistics | None,
    splits: Mapping[str, Store | Sequence[Store]],
    rows: Mapping[str, int],
    *,
    where: str,
) -> None:
    """Raise ConfigError unless the statistics are of the pushed rows: of "train", or of all splits."""
    if statistics is None:
        return
    if not isinstance(statistics, Statistics):
        raise ConfigError(f"{where}: expected Statistics or None, found {statistics!r:.120}")
    names = [_OF] if _OF in rows else list(rows)
    count = sum(rows[name] for name in names)
    stores = [store for name in names for store in _stores_of(splits[name])]
    if statistics.rows != count or (len(stores) == 1 and not statistics.is_of(stores[0])):
        raise ConfigError(
            f"{where}: expected statistics of the {count} rows of {' and '.join(map(repr, names))}, found those of "
            f"{statistics.rows} rows" + (", of which some differ" if statistics.rows == count else "")
        )


def _stores_of(given: Store | Sequence[Store]) -> Sequence[Store]:
    return [given] if isinstance(given, Store) else given


def stale_statistics(config: str, files: Collection[str], *, kept: Collection[str]) -> list[str]:
    """Return the files with statistics of the previous push, which are stale unless the split that they are of stays.

    A file without the second one of ``Statistics.save`` was written by LeRobot, and stays.
    """
    paths = statistics_paths(config)
    return [] if _OF in kept or not set(paths) <= set(files) else list(paths)


def write_statistics(statistics: Statistics | None, config: str, folder: str) -> dict[str, str]:
    """Write the files into a new folder in ``folder``; return their local paths by path in the repository."""
    if statistics is None:
        return {}
    inside = tempfile.mkdtemp(dir=folder)
    statistics.save(inside)
    return {
        path: os.path.join(inside, *file.split("/"))
        for path, file in zip(statistics_paths(config), _FILES, strict=True)
    }


def read_statistics(
    repo_id: str, config: str, *, revision: str | None = None, token: str | bool | None = None
) -> Statistics | None:
    """Read the statistics of a configuration on the Hub or in a folder; None if it has none."""
    if os.path.isdir(repo_id):
        folder = Path(repo_id, *statistics_paths(config)[0].split("/")[:-2])
        return Statistics.load(folder) if (folder / _FILES[0]).is_file() else None
    found = [_downloaded(repo_id, path, revision, token) for path in statistics_paths(config)]
    if found[0] is None:
        return None
    with tempfile.TemporaryDirectory(prefix="mouse-statistics-") as inside:
        # In a cache they are links, and in two folders if a commit was made in between.
        (Path(inside) / "meta").mkdir()
        for file, downloaded in zip(_FILES, found, strict=True):
            if downloaded is not None:
                (Path(inside) / file).write_bytes(Path(downloaded).read_bytes())
        return Statistics.load(inside)


def _downloaded(repo_id: str, path: str, revision: str | None, token: str | bool | None) -> str | None:
    """Download a file into the user's cache and return its path; None if the repository lacks the file."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return str(hf_hub_download(repo_id, path, repo_type="dataset", revision=revision, token=token))
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            return None  # without a connection, and the dataset that was loaded before had none
        raise
    except EntryNotFoundError:
        return None
