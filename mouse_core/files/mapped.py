"""Files that are mapped: made as long as they will ever be, synced, told from copies of themselves."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any, Protocol

import xxhash

from mouse_core.files.locking import this_boot
from mouse_core.files.reading import damaged
from mouse_core.files.writing import write_all

_BINARY = getattr(os, "O_BINARY", 0)
# What a system says whose file system cannot set room aside.
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_ZEROS = bytes(1 << 20)
_FENCE = threading.Lock()


def open_file(path: Path, *, create: bool = False, write: bool = True) -> int:
    """A descriptor of a file."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | _BINARY | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)


def set_aside(file: int, size: int, *, begin: int = 0, written: bool = False) -> None:
    """Make a file ``size`` bytes long, all of which the disk has room for: a write to mapped memory that finds no room
    would end the process.

    Args:
        file: It.
        size: How long.
        begin: How long it is.
        written: Whether all of it is written once, so that the file system has nothing to note where a page is written
            for the first time. Waiting for few pages here and there takes half as long then; making the file takes
            longer, as long as writing all of it.

    Raises:
        OSError: The disk is full, or the file would be longer than is allowed.
    """
    if not _reserved(file, begin, size) or written:
        os.lseek(file, begin, os.SEEK_SET)
        for at in range(begin, size, len(_ZEROS)):
            write_all(file, memoryview(_ZEROS)[: size - at])
    advise: Any = getattr(os, "posix_fadvise", None)
    if written and advise is not None:
        # Large pieces that were written are held as such, and written as a whole if a byte changes. What is read is
        # held page by page, and read ahead, no page is waited for where it is written for the first time.
        os.fsync(file)
        advise(file, begin, size - begin, os.POSIX_FADV_DONTNEED)
        advise(file, begin, size - begin, os.POSIX_FADV_WILLNEED)


def _reserved(file: int, begin: int, size: int) -> bool:
    """Have a file system set room aside; whether it can."""
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
    """The first ``size`` bytes of a file as memory."""
    return mmap.mmap(file, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)


def sync_mapped(file: int, memory: mmap.mmap) -> None:
    """Wait until what was written to a mapped file is on the disk.

    Raises:
        OSError: It is not.
    """
    sync: Any = getattr(os, "fdatasync", None)
    if sync is None:
        memory.flush()
        sync = os.fsync
    sync(file)


def fence() -> None:
    """Have what this thread wrote to memory so far be seen by other processes before what it writes from here on.

    Taking and freeing a lock does that on every processor; x86 would not need it.
    """
    for _ in range(2):
        with _FENCE:
            pass


def origin(file: int) -> int:
    """What tells an open file from a copy of it, and from itself after a restart of the machine, in 31 bits; 0: nothing
    does.

    A copy that was given the number of the file it is a copy of, once that was removed, is not told from it until the
    machine is restarted.
    """
    boot, found = this_boot(), os.fstat(file)
    return boot and max(1, xxhash.xxh3_64_intdigest(f"{boot} {found.st_dev} {found.st_ino}".encode()) >> 33)


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
        number, rest = divmod(page.words[self._place], self._unit)
        if rest or number < 0 < self._unit - 1:
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
