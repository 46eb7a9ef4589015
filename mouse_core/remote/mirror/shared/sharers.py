"""The processes that share a mirror: each has a number, which is known to be free when it has ended, however it did."""

from __future__ import annotations

import os
import random
import time
import weakref
from contextlib import suppress
from pathlib import Path

from mouse_core.files.locking import Descriptor, is_at, lock

# For so long what was found of another process is taken to hold.
_SECONDS = 0.05


class Sharer(Descriptor):
    """A process that shares a mirror, by a locked file whose name is its number.

    A forked child lets go of its parent's: it would keep the lock of a parent that ended.

    Args:
        folder: Where the files of all sharers are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked: dict[int, float] = {}
        folder.mkdir(exist_ok=True)
        while True:
            self.number = random.SystemRandom().getrandbits(62) + 1
            self._path = folder / f"{self.number:x}"
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
            lock(self._file, wait=True)
            if is_at(self._path, self._file):  # nobody took it for one that was left behind
                break
            self.close()
        _MINE.add(self)

    def lives(self, number: int) -> bool:
        """Whether the process with a number has not ended; what it left is removed otherwise."""
        if number == self.number:
            return True
        now = time.monotonic()
        if now - self._looked.get(number, -_SECONDS) < _SECONDS:
            return True
        path = self._folder / f"{number:x}"
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            self._looked.pop(number, None)
            return False
        try:
            if lock(file, wait=False) is False:
                self._looked[number] = now
                return True
            path.unlink(missing_ok=True)
        finally:
            os.close(file)
        self._looked.pop(number, None)
        return False

    def remove_dead(self) -> None:
        """Remove what processes left that were killed."""
        for path in self._folder.iterdir():
            with suppress(ValueError):
                self.lives(int(path.name, 16))

    def leave(self) -> None:
        """Be a sharer no more."""
        if self._file >= 0:
            with suppress(OSError):
                self._path.unlink()
            self.close()


_MINE: weakref.WeakSet[Sharer] = weakref.WeakSet()


def _forked() -> None:
    for sharer in list(_MINE):
        sharer.close()
    _MINE.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
