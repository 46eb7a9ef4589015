"""Readers say which state of a folder they look at, so that its writer keeps the files of that state for them.

A reader that opened a manifest may open the files that it names much later, when a batch needs their rows. A writer
that drops old rows, or puts one file in the place of several, removes a file only when nobody looks at a state any more
that named it. States are numbered by ``next_number`` of their manifests, which grows whenever a file is dropped::

    state 7 names the files 4, 5, 6     a reader locks byte 7 of the file "readers"
    state 9 names the file 8            which is 4, 5 and 6 in one; they can be needed in states 5..7, 6..7 and 7..7,
                                        and byte 7 is locked, so these three stay
    the reader looks again              it locks byte 9 and lets go of byte 7: they are removed

The locks are shared and belong to open files (``F_OFD_SETLK`` of Linux), so that the system frees them when their
holder ends, however it ends, and a read-only folder will do. Where a system has none, files are removed at once, and a
reader that comes too late is told so.
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

from mouse_core.files.locking import Descriptor
from mouse_core.files.writing import remove, storing

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

READERS = "readers"
"""Of the file in a store's folder."""

# Of Linux: type, whence, start, length, process. 16 bits, 16 bits, then as the machine aligns 64 bits.
_LOCK = "hhqqi4x"
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def _can_lock() -> bool:
    return fcntl is not None and hasattr(fcntl, "F_OFD_SETLK")


class Lease(Descriptor):
    """That somebody looks at one state of a folder, for as long as this object lives.

    A forked child has it too, and keeps it as long as it lives itself.

    Args:
        folder: The store's; None: nobody looks at anything.
        state: ``next_number`` of its manifest.
    """

    def __init__(self, folder: Path | None = None, state: int = 0) -> None:
        if folder is not None and _can_lock():
            # Readers of a folder that was made elsewhere, or is copied, are no worse off than without locks.
            try:
                self._file = os.open(folder / READERS, os.O_RDONLY | _BINARY)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_RDLCK, os.SEEK_SET, state, 1, 0))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # without a lease rows may be dropped under a reader
                    with storing(f"store {folder}"):
                        raise

    def __reduce__(self) -> tuple[Any, ...]:
        # Files stay for another process as long as whoever sent it there keeps what it sent.
        return Lease, ()


class Shared:
    """A lease that the files of one state share: whoever looks at a later state has another for all of them at once.

    Args:
        lease: The first.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease


class Leases(Descriptor):
    """Who looks at a folder, as its one writer asks.

    Args:
        folder: The store's. The file that readers lock is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / READERS, os.O_RDWR | os.O_CREAT | _BINARY, 0o644)

    def is_free(self, first: int, last: int) -> bool:
        """Whether nobody looks at a state among ``first``..``last``."""
        if first > last or not _can_lock():
            return True
        try:
            asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, first, last + 1 - first, 0)
            found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        except OSError:  # a file system without such locks
            return True
        return bool(struct.unpack(_LOCK, found)[0] == fcntl.F_UNLCK)


class Unneeded:
    """Files that the manifest does not name any more, each kept as long as a reader may need it.

    Args:
        folder: The store's.
    """

    def __init__(self, folder: Path) -> None:
        self._leases = Leases(folder)
        self._files: dict[Path, tuple[int, int]] = {}

    def add(self, file: Path, number: int, state: int) -> None:
        """Have a file removed.

        Args:
            file: The file.
            number: Its own; states up to that did not name it.
            state: The last that did.
        """
        self._files.setdefault(file, (number + 1, state))

    def remove_free(self) -> None:
        """Remove those that nobody needs."""
        for file, states in list(self._files.items()):
            if self._leases.is_free(*states):
                remove(file)
                del self._files[file]

    def forget(self) -> None:
        """Have none of them removed: where the folder was, another writer may have files of the same names."""
        self._files.clear()

    def close(self) -> None:
        """Remove what nobody needs; the next writer sees to the rest."""
        self.remove_free()
        self._leases.close()
