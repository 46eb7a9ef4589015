"""The file of a mirror's bytes: as long as all objects together, with room on the disk for what was written only."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.files.checksum import PAGE
from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import open_file
from mouse_core.remote.mirror.shared.pages import Int64s

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MACOS_PUNCH = 99
# Give room back, and keep the size.
_LINUX_PUNCH = 3


class SparseFile(Descriptor):
    """A file with holes.

    Args:
        path: The file, made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, create=not path.exists())

    @property
    def size(self) -> int:
        """Bytes from its beginning to its end, holes among them."""
        return os.fstat(self._file).st_size

    def lengthen(self, size: int) -> None:
        """Make it so long; what is new is one hole."""
        os.ftruncate(self._file, max(size, self.size))

    def map(self) -> mmap.mmap:
        """All of it as memory, which sees what is written later; nothing is read ahead."""
        # Written to by nobody, but the system lets go of parts of writable maps only.
        memory = mmap.mmap(self._file, self.size)
        if hasattr(memory, "madvise"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_RANDOM)
        return memory

    def write(self, parts: list[tuple[memoryview, int]]) -> None:
        """Write some bytes, each at a place; what was written is taken out of the list.

        Raises:
            OSError: There is no room.
        """
        while parts:
            content, begin = parts.pop()
            try:
                written = os.pwrite(self._file, content, begin)
            except OSError:
                parts.append((content, begin))
                raise
            if written < len(content):
                parts.append((content[written:], begin + written))

    def empty(self, pages: Int64s) -> None:
        """Give back the room of some pages (ascending, int64 ``[n]``), where the system can; they are zeros then."""
        if not len(pages):
            return
        heads = np.concatenate([[0], np.flatnonzero(np.diff(pages) > 1) + 1])
        behind = np.concatenate([heads[1:], [len(pages)]])
        for first, last in zip(pages[heads].tolist(), pages[behind - 1].tolist(), strict=True):
            self._punch(first * PAGE, (last + 1 - first) * PAGE)

    def _punch(self, begin: int, size: int) -> None:
        # Where the system cannot, the room is used when the page comes again.
        if sys.platform == "linux":
            if (punch := _fallocate()) is not None:
                # Memory's own advice takes no parts of pages, which are longer than these on some machines.
                punch(self._file, _LINUX_PUNCH, begin, size)
        elif sys.platform == "darwin":
            import fcntl

            with suppress(OSError):
                fcntl.fcntl(self._file, _MACOS_PUNCH, struct.pack("IIqq", 0, 0, begin, size))


@cache
def _fallocate() -> Any:
    """The system's call that sets room aside and gives it back; None where there is none."""
    library = ctypes.CDLL(None)
    found = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def is_full(error: OSError) -> bool:
    """Whether a file could not be written for lack of room."""
    return error.errno in _FULL


def address_of(memory: mmap.mmap) -> int:
    """Where mapped memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
