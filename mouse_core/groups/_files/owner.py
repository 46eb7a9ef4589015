"""One writer for a folder: whoever opened it last."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mouse_core.errors import ClosedError, ForkError
from mouse_core.groups._files.names import storing

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: two writers are not told apart there
    fcntl = None


class Owner:
    """The right to write to a folder.

    It passes to whoever takes it last: a writer that was believed dead, and is not, finds out at its next step and
    changes nothing any more. A lock alone could not do that; it would keep the new writer out.

    Args:
        path: A file that says who the owner is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._process = os.getpid()
        self._token = uuid.uuid4().hex.encode()
        with storing(f"file {path}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Become the owner, once the present one has finished its step; keep all others out meanwhile."""
        self._lock()
        try:
            with storing(f"file {self._path}"):
                os.lseek(self._file, 0, os.SEEK_SET)
                os.write(self._file, self._token)
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
        self._lock()
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            if os.read(self._file, len(self._token)) != self._token:
                raise ClosedError(
                    f"rollout buffer: expected to own {str(self._path.parent.parent)!r}, found it opened anew since"
                )
            yield
        finally:
            self._unlock()

    def close(self) -> None:
        """Give up; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _lock(self) -> None:
        if fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def _unlock(self) -> None:
        if fcntl is not None and self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
