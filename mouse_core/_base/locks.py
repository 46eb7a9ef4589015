"""Locks that are free in a forked child process, and calls that no signal interrupts."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

# Number of forks between the process that imported this module and the process that reads it.
_forks = 0
# The class of Python's own locks, which has no public name. Its methods are not Python code, so that no interrupt can
# occur between taking the lock and recording its owner, or before the lock is free again.
_RLock: Any = type(threading.RLock())


class ProcessLock(_RLock):  # type: ignore[misc]
    """A lock that is free in a forked child process, even if a thread of the parent process had locked it at the
    fork."""

    def __init__(self) -> None:
        _locks.add(self)

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()


# Seconds that a thread waits for a lock before other threads yield to it; yielding costs them 0.1 ms.
_PATIENCE = 2e-3


class TurnLock(ProcessLock):
    """A lock that one thread can take repeatedly without starving other threads.

    A free Python lock is given to the first thread that requests the lock; usually this is the thread that released the
    lock. A waiting thread takes the lock with ``waited_for()``; the thread that takes the lock repeatedly calls
    ``give_way()`` each time before it takes the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, float] = {}  # start of the wait, by thread; each thread changes only its own entry

    def __reduce__(self) -> tuple[type[TurnLock], tuple[()]]:
        return TurnLock, ()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Take the lock, with priority over threads that call ``give_way``."""
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
        for _ in range(20):  # bounded, because a waiting thread may need something that this thread holds
            if not any(since < late for since in list(self.waiting.values())):
                return
            time.sleep(5e-5)


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def uninterrupted(work: Callable[[], _T]) -> _T:
    """Call ``work`` and let it finish, even if the handler of Ctrl-C or another signal raises an exception meanwhile.

    Python runs signal handlers only in the main thread, so another thread calls ``work``. An exception of the handler
    is raised after ``work`` has returned. The call costs about 0.1 ms. ``work`` must not take a lock that the main
    thread has locked.

    Args:
        work: The function.

    Returns:
        The result of ``work``. An exception that ``work`` raises is raised again.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return work()
    # Only functions in C are called: an interrupt between two lines of `threading.Event` would leave its lock in the
    # wrong state.
    begun, done, outcome = threading.Lock(), SimpleQueue[None](), _Outcome(work)

    def run() -> None:
        if begun.acquire(blocking=False):
            try:
                outcome.value = outcome.work()
            except BaseException as error:
                outcome.error = error
            finally:
                done.put(None)
                done.put(None)  # an interrupt may come when the first lock is taken; the caller then waits once more

    try:
        start_new_thread(run, ())
        done.get()
    except BaseException as error:
        if not begun.acquire(blocking=False):
            done.get()
            raise
        if type(error) is not RuntimeError:
            raise  # the work has not started, and will not start
        return work()  # the interpreter is shutting down and starts no threads
    finally:
        # The thread may end later, or never start but stay registered in `threading`. So it must not keep the objects
        # of the work, with their files and locks, alive.
        del outcome.work
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


class _Outcome(Generic[_T]):
    """A function to call, and its result or exception."""

    value: _T
    error: BaseException | None = None

    def __init__(self, work: Callable[[], _T]) -> None:
        self.work = work


def forks() -> int:
    """Return how many times a process was forked from the process that imported this module down to the current
    process.
    """
    return _forks


def is_spawning() -> bool:
    """Return whether this thread is pickling objects for a process that it spawns."""
    context = sys.modules.get("multiprocessing.context")
    return context is not None and context.get_spawning_popen() is not None


def _forked() -> None:
    global _forks
    _forks += 1
    for lock in list(_locks):
        # In the child, the thread that called fork continues, with the locks that it holds.
        if not lock._is_owned():
            lock._at_fork_reinit()
        if isinstance(lock, TurnLock):
            lock.waiting.clear()


if hasattr(os, "register_at_fork"):  # comparing process ids would take longer than a lock
    os.register_at_fork(after_in_child=_forked)
