"""Which pages of a dataset's files are in memory: all, or none."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

_MADV_DONTNEED = 4


def read_whole(folder: Path) -> None:
    """Bring every page of a dataset's files into the page cache."""
    buffer: Any = memoryview(bytearray(1 << 24))
    for file in sorted(folder.glob("*.arrow")):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while os.readv(descriptor, [buffer]):
                pass
        finally:
            os.close(descriptor)


def unmap_touched(folder: Path) -> None:
    """Forget, in this process, the pages of mapped files that were touched so far (Linux)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if str(folder) in line and line.endswith(".arrow"):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


def drop(folder: Path, pattern: str = "*.arrow") -> None:
    """Have the pages of a dataset's files dropped from the page cache, also those that this process has mapped."""
    unmap_touched(folder)
    for file in sorted(one for one in folder.glob(pattern) if one.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only clean pages are dropped
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
