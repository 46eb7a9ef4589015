"""Memory-mapped files: reserving disk space, atomic words, syncing, and the origin, which distinguishes a file from its
copies.
"""

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

# Errors of a file system that cannot reserve space.
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_ZEROS = bytes(1 << 20)
_FENCE = threading.Lock()


def open_file(path: Path, *, create: bool = False, write: bool = True) -> int:
    """Open a file, and return its descriptor."""
    flags = os.O_RDWR if write else os.O_RDONLY
    return os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)


def set_aside(file: int, size: int, *, begin: int = 0, written: bool = False) -> None:
    """Extend a file to ``size`` bytes, and reserve disk space for all bytes.

    Without reserved space, a write to mapped memory kills the process when the disk is full.

    Args:
        file: Descriptor of the file.
        size: The new length of the file.
        begin: The present length of the file.
        written: Whether to write all bytes once. If all bytes were written, the file system updates no metadata when a
            page is first written, and syncing a few pages takes half as long. Creating the file takes as long as
            writing all its bytes.

    Raises:
        OSError: The disk is full, or the file would exceed the largest allowed length.
    """
    if not _reserved(file, begin, size) or written:
        os.lseek(file, begin, os.SEEK_SET)
        for at in range(begin, size, len(_ZEROS)):
            write_all(file, memoryview(_ZEROS)[: size - at])
    advise: Any = getattr(os, "posix_fadvise", None)
    if written and advise is not None:
        # The system caches written bytes in large pieces, and writes a complete piece if one byte changes. Bytes that
        # are read are cached page by page; with readahead, no first write waits for a page.
        os.fsync(file)
        advise(file, begin, size - begin, os.POSIX_FADV_DONTNEED)
        advise(file, begin, size - begin, os.POSIX_FADV_WILLNEED)


def _reserved(file: int, begin: int, size: int) -> bool:
    """Ask the file system to reserve space; return whether the file system supports reserving."""
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
    """Map the first ``size`` bytes of a file to memory."""
    return mmap.mmap(file, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)


def sync_mapped(file: int, memory: mmap.mmap) -> None:
    """Wait until the bytes of a mapped file are on disk; raises OSError if syncing fails."""
    sync: Any = getattr(os, "fdatasync", None)
    if sync is None:
        memory.flush()
        sync = os.fsync
    sync(file)


def fence() -> None:
    """Memory fence: other processes see the earlier memory writes of this thread before its later writes.

    Acquiring and releasing a lock has this effect on every processor; x86 processors need no fence.
    """
    for _ in range(2):
        with _FENCE:
            pass


def origin(file: int) -> int:
    """Return a number of 31 bits that changes if the file is copied or the machine is restarted; 0: unknown.

    A copy that gets the inode number of the removed original has the same origin until the machine is restarted.
    """
    boot, found = this_boot(), os.fstat(file)
    return boot and max(1, checksum(f"{boot} {found.st_dev} {found.st_ino}".encode()) >> 33)


class Words(Protocol):
    """An object with numbers in mapped memory: ``words`` is a memoryview of int64, and ``path`` is the file, for
    messages.
    """

    path: Path
    words: memoryview[int]


class Word:
    """A descriptor for a number in mapped memory. A single store instruction writes the number, so after the death of
    the process, the memory contains the old or the new number.

    Args:
        place: Index of the number in ``words``.
        unit: A prime: the memory contains the number times ``unit``, so that a flipped bit is detected; 1: the memory
            contains the number.
    """

    def __init__(self, place: int, unit: int = 1) -> None:
        self._place, self._unit = place, unit

    def __get__(self, page: Words, kind: type[Words]) -> int:
        number = page.words[self._place]
        if self._unit == 1:
            return number
        number, rest = divmod(number, self._unit)
        if rest or number < 0:
            reason = (
                f"expected a multiple of {self._unit} at index {self._place} of the mapped page, found another value"
            )
            raise damaged(page.path, reason)
        return number

    def __set__(self, page: Words, number: int) -> None:
        page.words[self._place] = number * self._unit


def _renew_fence() -> None:
    """Create a new lock in a forked child, because the thread that held the old lock may not exist in the child."""
    global _FENCE
    _FENCE = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_fence)
