"""Files that are there whole or not at all: names that are safe in paths, writing beside, and reaching the disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache

from mouse_core.errors import StorageError

StrPath = str | os.PathLike[str]

PARTIAL = ".partial"
"""How the name of a file ends that is still being written; such names begin with a dot."""

_LONGEST = 200
_MANY = 64
_SYNCING = 8


@lru_cache(maxsize=1024)
def folder_name(environment: str) -> str:
    """A name that is safe in paths for an environment's folder, another one for every environment.

    Letters, digits, ``_``, ``-`` and inner dots stay; all else becomes ``%XX``, byte by byte.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), environment)
    if name[0] == "." or name == BATCHES:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST:
        # "%" and no hexadecimal digit after it: no other name can look like this.
        name = f"{name[:100]}%-{hashlib.sha256(environment.encode()).hexdigest()[:32]}"
    return name


BATCHES = "batches"
"""The folder of stored batches."""


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turn the system's errors into StorageError, saying what was being written or read."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{what}: expected to be able to store or read it, found: {reason}") from error


def beside(path: StrPath) -> str:
    """Where a file is while it is being written."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}{PARTIAL}")


def write_partial(path: StrPath, content: bytes | memoryview) -> str:
    """Write a new file beside where it belongs; its name there. Nothing is left after an error."""
    partial = beside(path)
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o644)
    try:
        write_all(file, content)
    except BaseException:
        os.close(file)
        remove(partial)
        raise
    os.close(file)
    return partial


def write_all(file: int, content: bytes | memoryview) -> None:
    """Write all of it at the file's position."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def publish(paths: Iterable[StrPath]) -> None:
    """Give files that were written beside their names, replacing what had them."""
    for path in paths:
        os.replace(beside(path), path)


def remove(path: StrPath) -> None:
    """Remove a file, if it is there and that can be done."""
    try:
        os.unlink(path)
    except OSError:
        pass


def remove_partial(folder: StrPath) -> None:
    """Remove the files of a folder that were never finished; only whoever writes there may do that."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name.startswith(".") and name.endswith(PARTIAL):
            remove(os.path.join(folder, name))


def sync_files(paths: Sequence[StrPath]) -> None:
    """Wait until the contents of some files of one filesystem are on the disk.

    Linux can be asked for a whole filesystem at once. For many files that is far cheaper; for a few it is not done, for
    it also waits for what others are writing.
    """
    whole = _syncfs() if len(paths) > _MANY else None
    if whole is not None:
        file = os.open(paths[0], os.O_RDONLY)
        try:
            if whole(file) == 0:
                return
        finally:
            os.close(file)
    if len(paths) == 1:
        _sync_file(paths[0])
    elif paths:
        # The system writes down together what several threads ask for at the same time.
        with ThreadPoolExecutor(min(_SYNCING, len(paths))) as pool:
            list(pool.map(_sync_file, paths))


def _sync_file(path: StrPath) -> None:
    file = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folders(paths: Iterable[StrPath]) -> None:
    """Wait until the names in some folders are on the disk."""
    if os.name != "posix":
        return
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@cache
def _syncfs() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None
