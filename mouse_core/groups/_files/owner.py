"""One writer for a folder: whoever opened it last."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mouse_core.errors import ClosedError, ForkError
from mouse_core.files.locking import Descriptor, lock, this_process, unlock
from mouse_core.files.writing import storing

# Bytes that the file is read to; it says who the owner is, and where.
_LONGEST = 1024


class Owner(Descriptor):
    """The right to write to a folder.

    It passes to whoever takes it last: a writer that was believed dead, and is not, finds out at its next step and
    changes nothing any more. A lock alone could not do that; it would keep the new writer out.

    Args:
        path: A file that says who the owner is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = os.getpid()
        self._token = uuid.uuid4().hex.encode()
        with storing(f"file {path}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Become the owner, once the present one has finished its step; keep all others out meanwhile."""
        lock(self._file, wait=True)
        try:
            with storing(f"file {self._path}"):
                named = self._token + b"\n" + this_process().encode()
                os.lseek(self._file, 0, os.SEEK_SET)
                os.write(self._file, named)
                os.ftruncate(self._file, len(named))
            yield
        finally:
            self._unlock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep all others out while something is written.

        Raises:
            ClosedError: Someone else has taken the folder, or it has been closed here.
            ForkError: This is a forked child.
        """
        if self._file < 0:
            raise ClosedError(f"rollout buffer: expected an open one, found {str(self._path.parent.parent)!r} closed")
        if os.getpid() != self._process:
            raise ForkError(
                f"rollout buffer: expected to be used in process {self._process}, found the forked child {os.getpid()}"
            )
        lock(self._file, wait=True)
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            token, _, owner = os.read(self._file, _LONGEST).partition(b"\n")
            if token != self._token:
                by = f", by {owner.decode(errors='replace')}" if owner else ""
                raise ClosedError(
                    f"rollout buffer: expected to own {str(self._path.parent.parent)!r}, found it opened anew since{by}"
                )
            yield
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._file >= 0:
            unlock(self._file)
