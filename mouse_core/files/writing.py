"""Writing of files and folders that are either complete or missing, even after a power cut.

A new file is written under a temporary name, synced and renamed; then its folder is synced::

    write  .saved.4711-a3f09c.partial     after a crash here, the old file and the temporary file exist
    sync   .saved.4711-a3f09c.partial
    rename it to  saved                   after a crash here, the old file or the new file exists
    sync   the folder                     from now on, the new file exists

The temporary name contains the id of the writing process, which keeps the file locked. With this lock, the next writer
can remove leftovers of ended writers, and keeps the files of a running writer. In a folder with only one writer at a
time, the temporary name is ``.saved.partial``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from mouse_core.errors import ConfigError, StorageError
from mouse_core.files.locking import is_at, lock

StrPath = str | os.PathLike[str]

# The beginning of a remote address; used as a path, it would create a local folder of that name.
_ADDRESS = re.compile(r"(s3a?|gs|az|azure|adl|abfss?|https?|hf|file):")
_LEFTOVER = re.compile(r"\.(?P<name>.+?)(\.(?P<process>\d+)-[0-9a-f]+)?\.partial")
# Errors of a system that cannot sync a folder, or does not allow opening it.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
# Above this number of files, syncing the complete file system is faster than syncing the files one by one.
_MANY = 64
_SYNCING = 8


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Context manager that converts system errors to StorageError; ``what`` is the name, for messages, of the object
    that is written or read.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{what}: cannot write or read the file: {reason}") from error


# ---------------------------------------------------------------------- one file or folder


@contextmanager
def replacing(path: StrPath, *, sync: bool = True, only_writer: bool = False) -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, the file at the temporary path replaces the file at ``path``.

    Args:
        path: The path of the file.
        sync: Whether the file must survive a crash of the machine, not only of the process.
        only_writer: Whether this process is the folder's only writer, which needs no lock.

    Raises:
        OSError: The file cannot be written; an existing file at ``path`` is unchanged.
    """
    with _beside(Path(path), folder=False, only_writer=only_writer) as partial:
        yield partial
        put_in_place(partial, path, sync=sync)


@contextmanager
def making(path: StrPath, what: str) -> Iterator[Path]:
    """Yield the path of an empty folder to write; if the block succeeds, the folder is synced and renamed to ``path``.

    Args:
        path: The final path, which must not exist. Missing parent folders are created.
        what: The text at the beginning of error messages.

    Raises:
        ConfigError: ``path`` exists, or another process is writing it.
        StorageError: The folder cannot be written; no partial content remains.
    """
    target = Path(path)
    other = remove_leftovers(target.parent, [target.name])
    check_nothing_at(target, what)
    if other is not None:
        raise ConfigError(f"{what}: expected to be the only writer of {str(target)!r}, found process {other}")
    with storing(f"{what}: {str(target)!r}"):
        make_folder(target.parent)
        with _beside(target, folder=True) as partial:
            # The folder is locked instead of a file, because some libraries lock the files that they write.
            yield partial
            put_in_place(partial, target)


def link_or_copy(source: StrPath, target: StrPath) -> None:
    """Create a hard link to a file, or a copy if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def check_nothing_at(path: Path, what: str) -> None:
    """Raise ConfigError if ``path`` exists."""
    if os.path.lexists(path):
        raise ConfigError(f"{what}: expected a path that does not exist, found {str(path)!r}")


def put_in_place(partial: StrPath, path: StrPath, *, sync: bool = True) -> None:
    """Rename a complete file or folder to its final name; an existing file is replaced."""
    if sync:
        sync_tree(partial)
    os.replace(partial, path)
    if sync:
        sync_folders([Path(path).parent])


@contextmanager
def _beside(target: Path, *, folder: bool, only_writer: bool = False) -> Iterator[Path]:
    """Yield a temporary path, in the folder of ``target``, for a file or folder. After an error, the temporary file or
    folder is removed.

    Unless the folder has only one writer, the file is created and locked first.
    """
    partial, file = (Path(beside(target)), -1) if only_writer else _begin(target, folder)
    try:
        yield partial
    except BaseException:
        remove(partial)
        raise
    finally:
        if file >= 0:
            os.close(file)


def _begin(target: Path, folder: bool) -> tuple[Path, int]:
    """Create a temporary file or folder; return its path and the descriptor that keeps it locked."""
    while True:
        partial = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(6).hex()}.partial")
        if folder:
            os.mkdir(partial)
        try:
            file = os.open(partial, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:
            if not folder:
                raise
            continue  # another process removed the file as a leftover before it was locked
        with suppress(OSError):
            lock(file, wait=True)
        if is_at(partial, file):
            return partial, file
        os.close(file)  # removed as a leftover


def write_file(path: StrPath, content: bytes | memoryview, *, sync: bool = True, only_writer: bool = False) -> None:
    """Write a file completely, or leave the existing file unchanged; see ``replacing``.

    Raises:
        StorageError: The file cannot be written.
    """
    with storing(f"file {path}"), replacing(path, sync=sync, only_writer=only_writer) as partial:
        _write_to(partial, content)


# ---------------------------------------------------------------------- many, in a folder with one writer


def beside(path: StrPath) -> str:
    """Return the temporary path of an unfinished file in a folder with a single writer."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.partial")


def write_partial(path: StrPath, content: bytes | memoryview) -> str:
    """Write a new file under a temporary name in the folder of its final path, and return that path. After an error, no
    file remains.
    """
    with _beside(Path(path), folder=False, only_writer=True) as partial:
        _write_to(partial, content)
    return str(partial)


def publish(paths: Iterable[StrPath]) -> None:
    """Rename files of ``write_partial`` to their final paths, replacing existing files."""
    for path in paths:
        os.replace(beside(path), path)


def _write_to(path: StrPath, content: bytes | memoryview) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(file, content)
    finally:
        os.close(file)


def write_all(file: int, content: bytes | memoryview) -> None:
    """Write all of ``content`` at the position of an open file."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def write_at(file: int, content: bytes, begin: int) -> None:
    """Write all of ``content`` from byte ``begin`` of an open file on."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file, rest, begin)
        rest, begin = rest[written:], begin + written


# ---------------------------------------------------------------------- leftovers


def remove(path: StrPath) -> None:
    """Remove a file, or a folder with its content, if it exists and can be removed."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        os.unlink(path)


def remove_leftovers(folder: StrPath, names: Collection[str] | None = None, *, only_writer: bool = False) -> int | None:
    """Remove unfinished files of dead writers; return the process id of a running writer, or None.

    Args:
        folder: The folder.
        names: Names of the final files; None: all names.
        only_writer: Whether this process is the only writer in the folder, so that every unfinished file is a leftover.
    """
    living = None
    try:
        found = os.listdir(folder)
    except OSError:
        return None
    for name in found:
        match = _LEFTOVER.fullmatch(name)
        if match is None or (names is not None and match["name"] not in names):
            continue
        partial = os.path.join(folder, name)
        if only_writer:
            remove(partial)
        elif _remove_unless_locked(partial) and match["process"]:
            living = int(match["process"])
    return living


def _remove_unless_locked(partial: str) -> bool:
    """Remove a file or folder unless a process has locked it; return whether it is locked. On a file system without
    locks, the file stays.
    """
    try:
        file = os.open(partial, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        free = lock(file, wait=False)
        if free:
            remove(partial)
        return not free
    except OSError:
        return False
    finally:
        os.close(file)


# ---------------------------------------------------------------------- syncing


def make_folder(path: StrPath, *, sync: bool = True) -> None:
    """Create a folder and its missing parent folders, and sync the names of the new folders.

    Raises:
        ConfigError: The path is an address.
        OSError: The folder cannot be created.
    """
    scheme = "".join(Path(path).parts[:1])
    if _ADDRESS.fullmatch(scheme):
        raise ConfigError(
            f"expected a folder of this machine to write to, found an address ({scheme}//); mouse upload sends the "
            "folder of a store to object storage, and mouse push sends rows to the Hub"
        )
    folder = Path(path).absolute()
    made = [one for one in folder.parents if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if sync:
        # The process that created the folder may have died before it synced the folder's name.
        sync_folders([folder.parent, *(one.parent for one in made)])


def sync_files(paths: Sequence[StrPath]) -> None:
    """Sync the contents of files on one file system.

    Linux can sync a complete file system at once, which is far faster than syncing many files. Syncing a file system
    also waits for the writes of other programs, so a few files are synced separately.
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
        # The system combines syncs that several threads request at the same time.
        with ThreadPoolExecutor(min(_SYNCING, len(paths))) as pool:
            list(pool.map(_sync_file, paths))


def _sync_file(path: StrPath) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folders(paths: Iterable[StrPath]) -> None:
    """Sync the names in folders, if the system can sync folders."""
    for path in dict.fromkeys(map(str, paths)):
        try:
            _sync_file(path)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise


def sync_tree(path: StrPath) -> None:
    """Sync a file, or the complete content of a folder."""
    if not os.path.isdir(path):
        sync_files([path])
        return
    inside = list(os.walk(path))
    sync_files([os.path.join(folder, name) for folder, _, names in inside for name in names])
    sync_folders(folder for folder, _, _ in reversed(inside))


def _syncfs() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None
