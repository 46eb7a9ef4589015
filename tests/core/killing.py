"""Children that die where a test wants them to."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any


def killed_at(calls: Iterable[str], step: int, half: bool) -> None:
    """Let this process be killed at one of the calls of ``os`` that change files.

    Args:
        calls: Names in ``os``; those that the system lacks do not count, nor does an ``open`` that makes no file.
        step: At which of them, from 1.
        half: Whether half of it is done then, if it is a write.
    """
    count = 0

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            count += 1
            if count == step:
                if half and name in ("write", "pwrite"):
                    call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            # A killed process leaves what it wrote to the system, whether or not that has reached the disk.
            return None if name in ("fsync", "fdatasync") else call(*arguments, **options)

        return counted

    for name in calls:
        if hasattr(os, name):
            setattr(os, name, counting(name, getattr(os, name)))


def dies_of_threads() -> None:
    """Let an error in a thread of this process end it with 1, as one elsewhere does."""

    def died(thread: Any) -> None:
        traceback.print_exception(thread.exc_value)
        os._exit(1)

    threading.excepthook = died


def forked(work: Callable[[], None]) -> int:
    """A child that does some work and ends without any of Python's leave-taking; its process.

    It ends with 1 and says on standard error what went wrong, if something did, else with 0.
    """
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
