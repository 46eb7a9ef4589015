"""Reading files that nobody vouches for: whatever goes wrong is one of our errors and names the file."""

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

OF_THE_SYSTEM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE)
"""Numbers of errors that a system raises where it cannot read a file, and that say nothing of the file's content."""

MOST_JSON = 16 << 20
"""Bytes that a description may take: parsing may need twenty times as many."""


def damaged(path: str | os.PathLike[str], reason: object, *, at: str = "") -> DataError:
    """The error for a file that cannot be what it claims to be.

    Args:
        path: The file.
        reason: What was expected and what was found.
        at: Where in the file: an episode, an offset.
    """
    return DataError(f"{os.fspath(path)}{f', {at}' if at else ''}: {reason}")


@contextmanager
def reading(path: str | os.PathLike[str], *, at: str = "") -> Iterator[None]:
    """Turn whatever a library raises over damaged bytes into a DataError that names the file.

    Args:
        path: The file being read.
        at: Where in the file: an episode, an offset.

    Raises:
        DataError: Anything but our own errors was raised inside; those pass, with the file's name put before them if
            it is not in them. Or it is a pipe or a device, which might never answer; nothing is done inside then.
        ConfigError: The file is not there.
        StorageError: The system cannot read the file now, as where too many files are open.
    """
    name = os.fspath(path)
    if _may_wait(name):
        raise damaged(name, "expected a regular file, found a pipe or a device", at=at)
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"{name}: expected a file or folder, found none ({error})") from error
    except DataError as error:
        if name in str(error):
            raise
        raise damaged(name, error, at=at) from error
    except (MouseError, ImportError):
        raise
    except OSError as error:
        if error.errno not in OF_THE_SYSTEM:
            raise _unreadable(name, error, at) from error
        raise StorageError(f"{name}: expected to be able to read it, found: {error.strerror or error}") from error
    except Exception as error:  # whatever it is that a library stumbles over
        raise _unreadable(name, error, at) from error


def _unreadable(name: str, error: Exception, at: str) -> DataError:
    shown = str(error).strip().splitlines()
    return damaged(name, f"cannot be read: {shown[0] if shown else type(error).__name__}", at=at)


def _may_wait(name: str) -> bool:
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError):
        return False  # whoever opens it is told
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def check_inside(files: Iterable[Path], root: Path) -> None:
    """Raise DataError where a file of a dataset is a pipe, a device, or a link that leads out of the dataset's folder.

    A dataset that somebody else wrote may hold links to anything on this machine. Links to ``blobs`` of the same
    repository are allowed in the cache of the Hub's client, where ``snapshots/REVISION/...`` consists of such links.

    Args:
        files: Files at any depth of the folder.
        root: The folder. Where it is a file itself, that it is a regular one is all that is checked.
    """
    if not os.path.isdir(root):
        with reading(root):  # which does not wait for a pipe
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
        if _may_wait(real):
            raise damaged(file, "expected a regular file, found a pipe or a device")


def read_bytes(file: Path, *, most_bytes: int = MOST_JSON) -> bytes:
    """Return the content of a file of at most ``most_bytes`` bytes.

    Raises:
        DataError: The file is larger, or no regular file.
    """
    with reading(file):
        if not file.is_file():
            raise damaged(file, "expected a file" if file.exists() else "expected a file, found none")
        if file.stat().st_size > most_bytes:
            raise damaged(file, f"expected at most {most_bytes} bytes, found {file.stat().st_size}")
        return file.read_bytes()


def read_json_object(file: Path, *, most_bytes: int = MOST_JSON) -> Mapping[str, Any]:
    """A JSON object, of a file of at most so many bytes.

    Raises:
        DataError: The file is damaged, holds something else, or is no regular file.
    """
    return json_object(file, read_bytes(file, most_bytes=most_bytes))


def json_object(file: Path, text: bytes) -> Mapping[str, Any]:
    """The JSON object that was read of a file; DataError where it is none."""
    with reading(file):
        found = json.loads(text.decode("utf-8"))
    if not isinstance(found, Mapping):
        raise damaged(file, f"expected a JSON object, found {type(found).__name__}")
    return found
