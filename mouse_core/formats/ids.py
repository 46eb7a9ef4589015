"""Ids of datasets: the library that names a dataset, and the folder of the dataset in the cache of that library."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mouse_core.errors import ConfigError, MouseError

__all__ = ["ID_SCHEMES", "is_id", "located"]

# Packages whose errors are about the way to a server.
_NETWORK = ("google", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub", "requests", "urllib3")


@contextmanager
def _downloading(name: str, whom: str, *, where: str, by_hand: str, install: str) -> Iterator[Any]:
    """Yield the library that downloads a dataset: its prints go to stderr, and its errors become one line each.

    Args:
        name: Name of the module.
        whom: Name of the library in messages.
        where: The dataset, and where it was looked for.
        by_hand: The command that downloads the dataset.
        install: Arguments of ``pip install`` for the library and what it needs.

    Raises:
        ConfigError: The library raises an error, or its server cannot be reached.
        ImportError: The library, or another one that it needs, is not installed.
    """
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{where}; to download it: pip install {install} ({error})") from error
    try:
        with redirect_stdout(sys.stderr):  # what a command prints may be read by a program
            yield library
    except MouseError:
        raise
    except ImportError as error:
        needs = f"{whom} misses something to download it: pip install {install} ({_line(error)})"
        raise ImportError(f"{where}; {needs}") from error
    except Exception as error:
        known = isinstance(error, OSError | ValueError | LookupError | AssertionError)
        if not known and type(error).__module__.split(".")[0] not in _NETWORK:
            raise
        raise ConfigError(
            f"{where}, and {whom} did not download it: {_line(error)}; where there is a connection, {by_hand}"
        ) from error


def _line(error: Exception) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".;")[:300] if lines else type(error).__name__


def _hub_folder(name: str, *, scheme: str = "hf", cache: Path | None = None) -> Path:
    """Return the folder of a dataset of the Hub, with all its files; see ``located``.

    Args:
        name: Name of the dataset, with or without ``@revision``.
        scheme: The beginning of the id.
        cache: Folder to look in and to download to, unless the cache of the client has the dataset.
    """
    repo_id, at, revision = name.partition("@")
    if repo_id.count("/") > 1 or ":" in name:
        raise ConfigError(f"{scheme}:{name}: expected namespace/name, or namespace/name@revision, found {name!r:.200}")
    where = f"{scheme}:{name}: not whole in the Hub's cache"
    by_hand, install = f"`hf download --repo-type dataset {repo_id}` does", "'mouse-data[remote]'"
    with _downloading("huggingface_hub", "the Hub", where=where, by_hand=by_hand, install=install) as hub:
        if (Path(hub.constants.HF_HUB_CACHE) / f"datasets--{repo_id.replace('/', '--')}").is_dir():
            cache = None
        return Path(
            hub.snapshot_download(
                repo_id, repo_type="dataset", revision=revision if at else None, cache_dir=cache and str(cache)
            )
        )


def _lerobot_folder(name: str) -> Path:
    """Return the folder of a LeRobotDataset, in LeRobot's folder or in the cache of the Hub."""
    said = os.environ.get("HF_LEROBOT_HOME")
    home = Path(said) if said else Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "lerobot"
    if "@" not in name and (home / name / "meta" / "info.json").is_file():
        return home / name
    return _hub_folder(name, scheme="lerobot", cache=home / "hub")


_MINARI_VERSION = re.compile(r"-v\d+$")


def _minari_folder(name: str) -> Path:
    """Return the folder of a dataset of Minari; see ``located``."""
    said = os.environ.get("MINARI_DATASETS_PATH")
    folder = (Path(said) if said else Path.home() / ".minari" / "datasets") / name
    if not (folder / "data").exists():
        if not _MINARI_VERSION.search(name):  # Minari has no newest one to choose
            raise ConfigError(
                f"minari:{name}: not in {folder}; to download it: expected a version behind the name, as in {name}-v0"
            )
        where, by_hand = f"minari:{name}: not in {folder}", f"`minari download {name}` does"
        with _downloading("minari", "Minari", where=where, by_hand=by_hand, install="'minari[hf,hdf5]'") as minari:
            minari.download_dataset(name)
    return folder


_VERSION = re.compile(r"\d+\.\d+\.\d+")


def _tfds_folder(name: str) -> Path:
    """Return the folder of a dataset of TFDS, of several versions the newest; see ``located``."""
    said = os.environ.get("TFDS_DATA_DIR")
    root = Path(said) if said else Path.home() / "tensorflow_datasets"
    plain, _, version = name.partition(":")
    folder = root / plain / version
    if (found := _prepared(folder)) is not None:
        return found
    where, by_hand = f"tfds:{name}: not in {folder}", f"`tfds build {plain}`, or tfds.load of it, does"
    install = "tensorflow tensorflow-datasets"
    with _downloading("tensorflow_datasets", "TFDS", where=where, by_hand=by_hand, install=install) as tfds:
        builder = tfds.builder(name, data_dir=str(root))
        builder.download_and_prepare()
        return Path(builder.data_dir)


def _prepared(folder: Path) -> Path | None:
    """Return this folder if it holds a version, else the newest version in it, or None."""
    if (folder / "features.json").is_file():
        return folder
    versions = [file.parent for file in folder.glob("*/features.json") if _VERSION.fullmatch(file.parent.name)]
    return max(versions, key=lambda path: tuple(map(int, path.name.split("."))), default=None)


ID_SCHEMES: Mapping[str, str] = MappingProxyType(
    {
        "minari": "minari:D4RL/pointmaze/umaze-v2, a dataset of Minari",
        "lerobot": "lerobot:namespace/name, with @revision behind it or not, a LeRobotDataset on the Hub",
        "hf": "hf:namespace/name, with @revision behind it or not, any dataset of the Hub whose format is read",
        "tfds": "tfds:name, tfds:name/config or tfds:name/config:1.0.0, an RLDS dataset of TFDS",
    }
)
"""What ids begin with, each with an example and what it names."""

_FOLDERS = {"minari": _minari_folder, "lerobot": _lerobot_folder, "hf": _hub_folder, "tfds": _tfds_folder}
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)*([:@][\w./+-]+)?")


def is_id(source: Any) -> bool:
    """Whether a source is the id of a dataset: a text that begins with one of ``ID_SCHEMES`` and a colon.

    A text with ``//`` behind the colon is an address, and a ``Path`` is always a path.
    """
    if not isinstance(source, str):
        return False
    scheme, colon, name = source.partition(":")
    return bool(colon) and scheme in ID_SCHEMES and not name.startswith("//")


def located(source: str) -> tuple[Path, str | None]:
    """Return the folder of a dataset, and the name of its format unless that is still to be recognised.

    The folder lies in the cache of the library that names the dataset; the library downloads it if it is not there.

    Args:
        source: An id, for which ``is_id`` is true.

    Raises:
        ConfigError: The name is not one of that library; a file or folder has the name of the id; or the dataset is not
            in the cache and was not downloaded: the message says where it was looked for, and why.
        ImportError: The dataset is not in the cache, and the library is not installed; the message says what to
            install.
    """
    scheme, _, name = source.partition(":")
    if not _NAME.fullmatch(name) or ".." in re.split(r"[/:@]", name):
        raise ConfigError(f"{source}: expected an id as {ID_SCHEMES[scheme]}, found {name!r:.200}")
    if os.path.lexists(source):
        raise ConfigError(
            f"{source}: expected a dataset's id or a path, found what may be both: a file or folder has this name; "
            f"{os.path.join('.', source)!r} is the path"
        )
    return _FOLDERS[scheme](name), None if scheme == "hf" else scheme
