"""Locks that a forked child can take."""

from __future__ import annotations

import os
import sys
import threading

# How many forks lie between the process that imported this module and the one that reads it.
_forks = 0


class ProcessLock:
    """A lock that is new in a forked child, where the thread that held the parent's does not exist."""

    def __init__(self) -> None:
        self._locks = {_forks: threading.RLock()}

    def mine(self) -> threading.RLock:
        """The lock of this process, for whoever takes it so often that the way through here counts."""
        # setdefault is one step, also when two threads of a child come here first.
        return self._locks.get(_forks) or self._locks.setdefault(_forks, threading.RLock())

    def __enter__(self) -> None:
        self.mine().acquire()

    def __exit__(self, *details: object) -> None:
        self._locks[_forks].release()

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()


def forks() -> int:
    """How many forks lie between the process that imported this module and this one."""
    return _forks


def is_spawning() -> bool:
    """Whether this thread is sending objects to a process that it starts, which gets copies of them."""
    context = sys.modules.get("multiprocessing.context")
    return context is not None and context.get_spawning_popen() is not None


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # asking for the process's number takes longer than a lock
    os.register_at_fork(after_in_child=_forked)
