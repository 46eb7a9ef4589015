"""Locks between processes (``flock``), which the system releases when the holder ends for any reason.

A lock belongs to an open file or folder, so the lock of a dead process is released.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from mouse_core.errors import ConfigError

_LONGEST_NAME = 4096
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def lock(file: int, *, wait: bool) -> bool:
    """Lock an open file or folder until ``unlock`` is called or the file or folder is closed.

    Args:
        file: Descriptor of the file or folder.
        wait: Whether to wait until another holder releases the lock.

    Returns:
        Whether the file is locked now.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def unlock(file: int) -> None:
    """Release the lock of an open file."""
    fcntl.flock(file, fcntl.LOCK_UN)


def is_at(path: str | os.PathLike[str], file: int) -> bool:
    """Whether ``path`` still refers to an open file or folder."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False


class Descriptor:
    """Base class of objects that own an open file and close it. ``_file`` is the descriptor of the file, or -1 if no
    file is open."""

    _file = -1
    # Stored as a class attribute, because Python clears modules before it closes the last descriptors at exit.
    _close_file = staticmethod(os.close)

    def __init__(self, file: int = -1) -> None:
        self._file = file

    @property
    def file(self) -> int:
        """The descriptor of the file."""
        return self._file

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        # An interrupt between these lines must not close the file twice.
        file, self._file = self._file, -1
        if file >= 0:
            self._close_file(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Do not call a subclass's `close`, which may need attributes that an interrupted `__init__` did not set; other
    # files of a subclass close themselves.
    __del__ = close


def this_boot() -> int:
    """Return a positive number that changes when the machine is restarted; 0 if the system has no such number."""
    try:
        said = _asked(b"kern.bootsessionuuid") if sys.platform == "darwin" else _BOOT.read_text()
        return 1 + int(said.replace("-", "")[:15], 16)
    except (OSError, ValueError, AttributeError):
        return 0


def _asked(name: bytes) -> str:
    """Return a text value of the macOS kernel (sysctl) by name; "" if the value does not exist."""
    found, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    failed = ctypes.CDLL(None).sysctlbyname(name, found, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else found.value.decode()


def this_process() -> str:
    """Return the name of this process, for messages about locks."""
    return f"process {os.getpid()} on {os.uname().nodename}"


class Held(Descriptor):
    """A locked file that contains the name of the lock's holder. The lock is held until ``close`` or until the holder
    ends.

    A forked child that closes the file does not release the parent's lock. If the parent ends first, the lock is held
    until the child closes the file.

    Args:
        path: The file; created if it is missing.
        what: The purpose of the lock; error messages begin with this text.
        wait: Whether to wait until another holder releases the lock.

    Raises:
        ConfigError: Another process holds the lock (the message names it), or the file system has no locks.
    """

    def __init__(self, path: Path, what: str, *, wait: bool = False) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                is_free = lock(self._file, wait=wait)
            except OSError as error:
                raise ConfigError(f"{what}: expected a file system with locks (flock), found none: {error}") from error
            if not is_free or not is_at(path, self._file):
                holder = os.read(self._file, _LONGEST_NAME).decode(errors="replace") or "another process"
                raise ConfigError(f"{what}: expected to be the only writer of {str(path.parent)!r}, found {holder}")
            os.ftruncate(self._file, 0)
            os.write(self._file, this_process().encode())
        except BaseException:
            self.close()
            raise


class FileLock:
    """A reentrant lock between processes and between threads.

    Args:
        path: The file to lock; created if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self._thread = threading.RLock()
        self._depth = 0
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self._file)

    def __enter__(self) -> None:
        if self._process != os.getpid():
            # A lock belongs to the open file, which a forked child shares with its parent, so the child must open the
            # file again.
            self._close()
            self._open()
        self._thread.acquire()
        if not self._depth:
            try:
                lock(self._file, wait=True)
            except BaseException:
                self._thread.release()
                raise
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            unlock(self._file)
        self._thread.release()
