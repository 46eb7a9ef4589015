"""The file of a mirror's bytes: as long as all objects together, with room on the disk for what was written only."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import open_file
from mouse_core.remote.mirror.pages import BLOCK, Int64s

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MACOS_PUNCH = 99


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

    def write(self, content: memoryview, begin: int) -> None:
        """Write some bytes at a place.

        Raises:
            OSError: There is no room.
        """
        while content:
            written = os.pwrite(self._file, content, begin)
            content, begin = content[written:], begin + written

    def empty(self, memory: mmap.mmap, blocks: Int64s) -> None:
        """Give back the room of some blocks (ascending, int64 ``[n]``), where the system can; they are zeros then."""
        if not len(blocks):
            return
        heads = np.concatenate([[0], np.flatnonzero(np.diff(blocks) > 1) + 1])
        behind = np.concatenate([heads[1:], [len(blocks)]])
        for first, last in zip(blocks[heads].tolist(), blocks[behind - 1].tolist(), strict=True):
            self._punch(memory, first * BLOCK, (last + 1 - first) * BLOCK)

    def _punch(self, memory: mmap.mmap, begin: int, size: int) -> None:
        remove: Any = getattr(mmap, "MADV_REMOVE", None)
        with suppress(OSError):  # where the file system cannot, the room is used when the block comes again
            if remove is not None:
                memory.madvise(remove, begin, size)
            elif sys.platform == "darwin":
                import fcntl

                fcntl.fcntl(self._file, _MACOS_PUNCH, struct.pack("IIqq", 0, 0, begin, size))


def is_full(error: OSError) -> bool:
    """Whether a file could not be written for lack of room."""
    return error.errno in _FULL


def address_of(memory: mmap.mmap) -> int:
    """Where mapped memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
