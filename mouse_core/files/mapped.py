"""Mapped files: room on the disk, single words, syncing, and the origin that tells a file from its copies."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any, Protocol

from mouse_core.files.checksum import checksum
from mouse_core.files.locking import this_boot
from mouse_core.files.reading import damaged
from mouse_core.files.writing import write_all

# Errors of a file system that cannot set room aside.
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_ZEROS = bytes(1 << 20)
_FENCE = threading.Lock()


def open_file(path: Path, *, create: bool = False, write: bool = True) -> int:
    """Open a file, and return its descriptor."""
    flags = os.O_RDWR if write else os.O_RDONLY
    return os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)


def set_aside(file: int, size: int, *, begin: int = 0, written: bool = False) -> None:
    """Make a file ``size`` bytes long, and reserve room on the disk for all of it.

    Without that room, a write to mapped memory ends the process.

    Args:
        file: Descriptor of the file.
        size: Length of the file then.
        begin: Length of the file now.
        written: Whether to write all bytes once. Then the file system has nothing to note when a page is first written,
            and syncing a few pages takes half as long; making the file takes as long as writing all of it.

    Raises:
        OSError: The disk is full, or the file would be longer than is allowed.
    """
    if not _reserved(file, begin, size) or written:
        os.lseek(file, begin, os.SEEK_SET)
        for at in range(begin, size, len(_ZEROS)):
            write_all(file, memoryview(_ZEROS)[: size - at])
    advise: Any = getattr(os, "posix_fadvise", None)
    if written and advise is not None:
        # The system caches written bytes in large pieces, and writes such a piece as a whole if one byte changes. It
        # caches read bytes page by page; reading ahead, no first write waits for a page.
        os.fsync(file)
        advise(file, begin, size - begin, os.POSIX_FADV_DONTNEED)
        advise(file, begin, size - begin, os.POSIX_FADV_WILLNEED)


def _reserved(file: int, begin: int, size: int) -> bool:
    """Ask the file system to reserve room; return whether it can."""
    reserve: Any = getattr(os, "posix_fallocate", None)
    if reserve is None:
        return False
    try:
        reserve(file, begin, size - begin)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def mapped(file: int, size: int, *, write: bool) -> mmap.mmap:
    """Map the first ``size`` bytes of a file."""
    return mmap.mmap(file, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)


def sync_mapped(file: int, memory: mmap.mmap) -> None:
    """Wait until the bytes of a mapped file are on the disk; raises OSError if they are not."""
    sync: Any = getattr(os, "fdatasync", None)
    if sync is None:
        memory.flush()
        sync = os.fsync
    sync(file)


def fence() -> None:
    """Let other processes see the earlier writes of this thread to memory before its later ones.

    Taking and freeing a lock does that on every processor; x86 does not need it.
    """
    for _ in range(2):
        with _FENCE:
            pass


def origin(file: int) -> int:
    """Return a number of 31 bits that differs for a copy of the file, and after a restart of the machine; 0: unknown.

    A copy that has the inode number of the removed original has the same origin, until the machine is restarted.
    """
    boot, found = this_boot(), os.fstat(file)
    return boot and max(1, checksum(f"{boot} {found.st_dev} {found.st_ino}".encode()) >> 33)


class Words(Protocol):
    """Numbers in mapped memory: ``words`` is a memoryview of int64, ``path`` the file, for messages."""

    path: Path
    words: memoryview[int]


class Word:
    """A number in mapped memory that changes with a single store: a process that dies leaves the old one or the new.

    Args:
        place: Index of the number in ``words``.
        unit: The memory holds a multiple of this prime, so that a flipped bit is found; 1: it holds the number.
    """

    def __init__(self, place: int, unit: int = 1) -> None:
        self._place, self._unit = place, unit

    def __get__(self, page: Words, kind: type[Words]) -> int:
        number = page.words[self._place]
        if self._unit == 1:
            return number
        number, rest = divmod(number, self._unit)
        if rest or number < 0:
            reason = f"expected a multiple of {self._unit} as number {self._place} of the live page, found damage"
            raise damaged(page.path, reason)
        return number

    def __set__(self, page: Words, number: int) -> None:
        page.words[self._place] = number * self._unit


def _renew_fence() -> None:
    """In a forked child: the thread that held the parent's lock may not exist there."""
    global _FENCE
    _FENCE = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_fence)
