"""Locks that a forked child can take, and work that no signal leaves half done."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

# How many forks lie between the process that imported this module and the one that reads it.
_forks = 0
# The class of Python's own locks, which has no name of its own. What it does to take and free one is no Python code, in
# which an interrupt could come when the lock is taken and nobody has noted it, or is not yet free.
_RLock: Any = type(threading.RLock())


class ProcessLock(_RLock):  # type: ignore[misc]
    """A lock that is free in a forked child, where the thread that held the parent's does not exist."""

    def __init__(self) -> None:
        _locks.add(self)

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()


# Seconds that a thread waits for a lock before others give way; each time costs those a tenth of a millisecond.
_PATIENCE = 2e-3


class TurnLock(ProcessLock):
    """A lock for which one thread may ask again and again, and others still get it.

    Python's lock goes to whoever asks first after it is free, which is mostly the thread that freed it. A thread that
    waits says so by ``waited_for()``, and the one that asks again and again calls ``give_way()`` before it does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, float] = {}  # since when, by thread, as no two change one entry

    def __reduce__(self) -> tuple[type[TurnLock], tuple[()]]:
        return TurnLock, ()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Take the lock, before those that give way."""
        thread = threading.get_ident()
        self.waiting[thread] = time.monotonic()
        try:
            self.acquire()
        finally:
            self.waiting.pop(thread, None)
        try:
            yield
        finally:
            self.release()

    def give_way(self) -> None:
        """Let threads that have waited for some milliseconds take the lock first."""
        late = time.monotonic() - _PATIENCE
        for _ in range(20):  # at most, as one of them may be waiting for what this thread holds
            if not any(since < late for since in list(self.waiting.values())):
                return
            time.sleep(5e-5)


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def uninterrupted(work: Callable[[], _T]) -> _T:
    """Do some work to its end, though Ctrl-C or another signal whose handler raises comes meanwhile.

    Python runs such handlers in the main thread alone, so another thread does the work, and what the handler raised is
    raised when it is done. It costs some 0.1 ms. What the main thread has locked stays so, and is not to be asked for.

    Args:
        work: It.

    Returns:
        What it returns; what it raises is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    begun, done, outcome = threading.Lock(), threading.Event(), _Outcome(work)

    def run() -> None:
        if begun.acquire(blocking=False):
            try:
                outcome.value = outcome.work()
            except BaseException as error:
                outcome.error = error
            finally:
                done.set()

    try:
        threading.Thread(target=run, name="mouse-uninterrupted").start()
        done.wait()
    except BaseException as error:
        if not begun.acquire(blocking=False):
            done.wait()
            raise
        if type(error) is not RuntimeError:
            raise  # it was not begun, and is not any more
        return work()  # the interpreter ends, and starts no threads
    finally:
        # The thread may end later, or never start and stay among those of `threading` that are about to. The objects
        # that the work refers to, with their files and locks, must not stay with it.
        del outcome.work
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


class _Outcome(Generic[_T]):
    """Some work, and its result or exception."""

    value: _T
    error: BaseException | None = None

    def __init__(self, work: Callable[[], _T]) -> None:
        self.work = work


def forks() -> int:
    """Return the number of forks between the process that imported this module and this one."""
    return _forks


def is_spawning() -> bool:
    """Whether this thread is sending objects to a process that it starts, which gets copies of them."""
    context = sys.modules.get("multiprocessing.context")
    return context is not None and context.get_spawning_popen() is not None


def _forked() -> None:
    global _forks
    _forks += 1
    for lock in list(_locks):
        # The thread that forked goes on in the child, with what it holds.
        if not lock._is_owned():
            lock._at_fork_reinit()
        if isinstance(lock, TurnLock):
            lock.waiting.clear()


if hasattr(os, "register_at_fork"):  # asking for the process's number takes longer than a lock
    os.register_at_fork(after_in_child=_forked)
