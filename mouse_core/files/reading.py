"""Reading of untrusted files, in which every error is a ``MouseError`` and names the file."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mouse_core.errors import ConfigError, DataError, MouseError, StorageError

SYSTEM_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE)
"""Error numbers of system errors that do not depend on the content of a file."""

MOST_JSON = 16 << 20
"""Largest size in bytes of a JSON file; parsing can need twenty times as much memory."""
_MOST_LEVELS = 100


def damaged(path: str | os.PathLike[str], reason: object, *, at: str = "") -> DataError:
    """Return the error for a damaged file.

    Args:
        path: The file.
        reason: The text of the message: expected and found content.
        at: The position in the file, such as an episode or an offset.
    """
    return DataError(f"{os.fspath(path)}{f', {at}' if at else ''}: {reason}")


@contextmanager
def reading(path: str | os.PathLike[str], *, at: str = "") -> Iterator[None]:
    """Context manager that converts libraries' errors about damaged bytes to a DataError that names the file.

    Args:
        path: The file that is read.
        at: The position in the file, such as an episode or an offset.

    Raises:
        DataError: A library raised an error inside the block; a DataError without the file's name gets the name as a
            prefix. DataError is also raised, before the block runs, if the file is a pipe or a device, because reading
            a pipe or device can block forever.
        ConfigError: The file is missing.
        StorageError: The system cannot read the file now, for example because too many files are open.
    """
    name = os.fspath(path)
    if _may_block(name):
        raise damaged(name, "expected a regular file, found a pipe or a device", at=at)
    try:
        with naming(name, at=at):
            yield
    except FileNotFoundError as error:
        raise ConfigError(f"{name}: expected a file or folder, found none ({error})") from error
    except (MouseError, ImportError):
        raise
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS:
            raise _unreadable(name, error, at) from error
        raise StorageError(f"{name}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # any error of a library
        raise _unreadable(name, error, at) from error


@contextmanager
def naming(name: str, *, at: str = "") -> Iterator[None]:
    """Context manager that adds the name of a file as a prefix to a DataError without the name; see ``reading``."""
    try:
        yield
    except DataError as error:
        if name in str(error):
            raise
        raise damaged(name, error, at=at) from error


def _unreadable(name: str, error: Exception, at: str) -> DataError:
    shown = str(error).strip().splitlines()
    return damaged(name, f"cannot be read: {shown[0][:500] if shown else type(error).__name__}", at=at)


def _may_block(name: str) -> bool:
    """Whether reading a file can block forever: whether the file is a pipe or a device."""
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError):
        return False  # opening it raises the error
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def check_inside(files: Iterable[Path], root: Path) -> None:
    """Raise DataError if a file of a dataset is a pipe, a device, or a link to a file outside the dataset's folder.

    An untrusted dataset can contain links to any file on this machine. In the cache of the Hub's client, where
    ``snapshots/REVISION/...`` consists of links, links to ``blobs`` of the same repository are allowed.

    Args:
        files: Files at any depth of the folder.
        root: The folder. If ``root`` is a file, it must be a regular file.
    """
    if not os.path.isdir(root):
        with reading(root):  # raises the error for a pipe
            return
    base, folders = os.path.realpath(root), dict[str, str]()
    allowed = [base, *(str(one.parent / "blobs") for one in Path(base).parents if one.name == "snapshots")]
    for file in files:
        folder, name = os.path.split(file)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        real = os.path.realpath(file) if os.path.islink(file) else os.path.join(folders[folder], name)
        if not any(os.path.commonpath([one, real]) == one for one in allowed):
            raise damaged(file, f"expected a file inside of {str(root)!r}, found a link to {real!r}")
        if _may_block(real):
            raise damaged(file, "expected a regular file, found a pipe or a device")


def read_bytes(file: Path, *, most_bytes: int = MOST_JSON) -> bytes:
    """Return the content of a file of at most ``most_bytes`` bytes.

    Raises:
        DataError: The file is larger, or is not a regular file.
    """
    with reading(file):
        if not file.is_file():
            raise damaged(file, "expected a file" if file.exists() else "expected a file, found none")
        if file.stat().st_size > most_bytes:
            raise damaged(file, f"expected at most {most_bytes} bytes, found {file.stat().st_size}")
        return file.read_bytes()


def read_json_object(file: Path, *, most_bytes: int = MOST_JSON) -> Mapping[str, Any]:
    """Return the JSON object in a file of at most ``most_bytes`` bytes.

    Raises:
        DataError: The file is damaged, does not contain a JSON object, or is not a regular file.
    """
    return json_object(file, read_bytes(file, most_bytes=most_bytes))


def yaml_object(file: Path, text: bytes) -> Mapping[str, Any]:
    """Parse a file's content as a YAML mapping.

    Raises:
        DataError: The content is not a mapping, is nested deeply, or has aliases. A text of aliases of aliases can be a
            billion times larger than the file.
    """
    import yaml  # type: ignore[import-untyped]

    with reading(file):
        depth = 0
        for event in yaml.parse(text.decode("utf-8")):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise damaged(file, f"expected YAML without aliases, found '*{event.anchor:.80}'")
            if depth > _MOST_LEVELS:
                raise damaged(file, f"expected YAML of at most {_MOST_LEVELS} levels, found more")
        found = yaml.safe_load(text.decode("utf-8"))
    if not isinstance(found, Mapping):
        raise damaged(file, f"expected a mapping, found {type(found).__name__}")
    return found


def json_object(file: Path, text: bytes) -> Mapping[str, Any]:
    """Parse a file's content as a JSON object; raise DataError if it is not a JSON object."""
    with reading(file):
        found = json.loads(text.decode("utf-8"))
    if not isinstance(found, Mapping):
        raise damaged(file, f"expected a JSON object, found {type(found).__name__}")
    return found
