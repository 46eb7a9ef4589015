"""Files and folders that are whole or not there, also where the machine loses power in the middle.

What is being written stands beside its place, reaches the disk, takes its name, and then the name reaches the disk::

    write  .saved.4711-a3f09c.partial     a crash here leaves the old file, and this one
    sync   .saved.4711-a3f09c.partial
    rename it to  saved                   a crash here leaves the old file or the new one
    sync   the folder                     from here on it is the new one

The number is the writing process's, which keeps what it writes locked. So the next writer knows what was left over, and
removes it, from what another one is still at work on. Where a folder has one writer at a time, ``.saved.partial`` will
do.
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

# What an address begins with; as the path of a folder it would make one of that name here.
_ADDRESS = re.compile(r"(s3a?|gs|az|azure|adl|abfss?|https?|hf|file):")
_LEFTOVER = re.compile(r"\.(?P<name>.+?)(\.(?P<process>\d+)-[0-9a-f]+)?\.partial")
# What a system says that cannot sync a folder, or does not let us open it for that.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
# From so many files on it is cheaper to sync the whole file system than one after the other.
_MANY = 64
_SYNCING = 8


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turn the system's errors into StorageError, saying what was being written or read."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{what}: expected to be able to store or read it, found: {reason}") from error


# ---------------------------------------------------------------------- one file or folder


@contextmanager
def replacing(path: StrPath, *, sync: bool = True, only_writer: bool = False) -> Iterator[Path]:
    """Yield a temporary path; on success, the file written there replaces the file at ``path``.

    Args:
        path: The path of the file.
        sync: Whether the file must survive a crash of the machine, not only of the process.
        only_writer: Whether this is the folder's only writer, which needs no lock.

    Raises:
        OSError: The file cannot be written; the old file at ``path`` is unchanged.
    """
    with _beside(Path(path), folder=False, only_writer=only_writer) as partial:
        yield partial
        put_in_place(partial, path, sync=sync)


@contextmanager
def making(path: StrPath, what: str, *, folder: bool = True) -> Iterator[Path]:
    """An empty folder (or file) to write, which is at ``path`` when all of it is on the disk.

    Args:
        path: Where nothing is yet. Folders above it are made.
        what: What is being done; begins messages.
        folder: Whether it is a folder.

    Raises:
        ConfigError: Something is there, or another process is at work on it.
        StorageError: It cannot be written; nothing is left.
    """
    target = Path(path)
    other = remove_leftovers(target.parent, [target.name])
    check_nothing_at(target, what)
    if other is not None:
        raise ConfigError(f"{what}: expected to be the only writer of {str(target)!r}, found process {other}")
    with storing(f"{what}: {str(target)!r}"):
        make_folder(target.parent)
        with _beside(target, folder=True) as partial:
            # The lock is the folder's: some libraries lock the files that they write themselves.
            inside = partial if folder else partial / target.name
            yield inside
            put_in_place(inside, target)
            remove(partial)


def link_or_copy(source: StrPath, target: StrPath) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def check_nothing_at(path: Path, what: str) -> None:
    """Raise ConfigError if something is at ``path``."""
    if os.path.lexists(path):
        raise ConfigError(f"{what}: expected a path where nothing is, found {str(path)!r}")


def put_in_place(partial: StrPath, path: StrPath, *, sync: bool = True) -> None:
    """Give a file or folder that is complete its name, replacing a file that has it."""
    if sync:
        sync_tree(partial)
    os.replace(partial, path)
    if sync:
        sync_folders([Path(path).parent])


@contextmanager
def _beside(target: Path, *, folder: bool, only_writer: bool = False) -> Iterator[Path]:
    """Yield a path beside ``target`` for a file or folder, which is removed after an error.

    It is made, and locked for as long as it is being written, unless nobody else may be at work in the folder.
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
    """Make a new file or folder; return it with the descriptor that keeps it locked."""
    while True:
        partial = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(6).hex()}.partial")
        if folder:
            os.mkdir(partial)
        try:
            file = os.open(partial, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:
            if not folder:
                raise
            continue  # taken for left over between its making and its lock
        with suppress(OSError):
            lock(file, wait=True)
        if is_at(partial, file):
            return partial, file
        os.close(file)  # a file that was


def write_file(path: StrPath, content: bytes | memoryview, *, sync: bool = True, only_writer: bool = False) -> None:
    """Write a whole file, or leave the one that is there; see ``replacing``.

    Raises:
        StorageError: It cannot be written.
    """
    with storing(f"file {path}"), replacing(path, sync=sync, only_writer=only_writer) as partial:
        _write_to(partial, content)


# ---------------------------------------------------------------------- many, in a folder with one writer


def beside(path: StrPath) -> str:
    """Return the path of an unfinished file in a folder with a single writer."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.partial")


def write_partial(path: StrPath, content: bytes | memoryview) -> str:
    """Write a new file beside where it belongs; its name there. Nothing is left after an error."""
    with _beside(Path(path), folder=False, only_writer=True) as partial:
        _write_to(partial, content)
    return str(partial)


def publish(paths: Iterable[StrPath]) -> None:
    """Give files that were written beside their names, replacing what had them."""
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


# ---------------------------------------------------------------------- what is left over


def remove(path: StrPath) -> None:
    """Remove a file, or a folder with all that is in it, if it is there and that can be done."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        os.unlink(path)


def remove_leftovers(folder: StrPath, names: Collection[str] | None = None, *, only_writer: bool = False) -> int | None:
    """Remove what writers that died were writing; the process of one that lives, if there is one.

    Args:
        folder: Where it is.
        names: What they were writing; None: anything.
        only_writer: Whether this process is the only writer in the folder, so that every unfinished file is left over.
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
    """Remove a file or folder that no process has locked; return whether one has. Without locks, it stays."""
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


# ---------------------------------------------------------------------- reaching the disk


def make_folder(path: StrPath, *, sync: bool = True) -> None:
    """Make a folder and those above it, where they are missing, and wait until their names are on the disk.

    Raises:
        ConfigError: It is an address.
        OSError: It cannot be made.
    """
    scheme = "".join(Path(path).parts[:1])
    if _ADDRESS.fullmatch(scheme):
        raise ConfigError(
            f"expected a folder of this machine to write to, found an address ({scheme}//); mouse upload sends the "
            "folder of a store to object storage, and mouse push rows to the Hub"
        )
    folder = Path(path).absolute()
    made = [one for one in folder.parents if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if sync:
        # A process that made it may have died before it got so far.
        sync_folders([folder.parent, *(one.parent for one in made)])


def sync_files(paths: Sequence[StrPath]) -> None:
    """Wait until the contents of some files of one file system are on the disk.

    Linux can be asked for a whole file system at once. For many files that is far cheaper; for a few it is not done,
    for it also waits for what others are writing.
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
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folders(paths: Iterable[StrPath]) -> None:
    """Wait until the names in some folders are on the disk, where the system can sync folders."""
    for path in dict.fromkeys(map(str, paths)):
        try:
            _sync_file(path)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise


def sync_tree(path: StrPath) -> None:
    """Wait until a file, or all that is in a folder, is on the disk."""
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
