"""Files that are mapped: made as long as they will ever be, synced, told from copies of themselves."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import xxhash

_BINARY = getattr(os, "O_BINARY", 0)
# What a system says whose file system cannot set room aside.
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_ZEROS = bytes(1 << 20)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def open_file(path: Path, *, create: bool = False, write: bool = True) -> int:
    """A descriptor of a file."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | _BINARY | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)


def set_aside(file: int, size: int) -> None:
    """Make a file ``size`` bytes long, all of which the disk has room for: what is written to memory cannot fail later.

    Raises:
        OSError: The disk is full, or the file would be longer than is allowed.
    """
    reserve: Any = getattr(os, "posix_fallocate", None)
    if reserve is not None:
        try:
            reserve(file, 0, size)
            return
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
    os.lseek(file, 0, os.SEEK_SET)
    for begin in range(0, size, len(_ZEROS)):
        rest = memoryview(_ZEROS)[: size - begin]
        while rest:
            rest = rest[os.write(file, rest) :]


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


def origin(file: int) -> int:
    """What tells an open file from a copy of it, and from itself after a restart of the machine; 0: nothing does."""
    try:
        boot = _BOOT.read_text()
    except OSError:
        return 0
    found = os.fstat(file)
    return xxhash.xxh3_64_intdigest(f"{boot} {found.st_dev} {found.st_ino}".encode()) >> 1
