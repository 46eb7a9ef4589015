"""Many requests at once, in one thread that waits for all of them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from mouse_core._base.locks import ProcessLock, forks
from mouse_core.errors import ForkError

AT_ONCE = 128
"""Requests that are under way together."""

_T = TypeVar("_T")


class Asking:
    """Runs requests of any number of threads, so many at a time; its thread is there from the first request on."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, ProcessLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = -1
        self._turns: asyncio.Semaphore | None = None

    def all(self, requests: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
        """What the requests give, in their order; the first error is raised, and the others are given up.

        Raises:
            ForkError: Requests were made in the process that this one was forked from. The client's threads are not
                here, and what they held when it was forked cannot be let go.
        """
        return asyncio.run_coroutine_threadsafe(self._gather(requests), self._running()).result()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is not None and self._forks != forks():
                raise ForkError(
                    f"{self._name}: expected a process that was started afresh, found one forked from a process that "
                    "had read it; start workers with the method 'spawn' or 'forkserver' "
                    "(multiprocessing_context='forkserver' of a DataLoader)"
                )
            if self._loop is None:
                self._loop, self._forks = asyncio.new_event_loop(), forks()
                self._turns = asyncio.Semaphore(AT_ONCE)
                threading.Thread(target=_run, args=(self._loop,), name="mouse-remote", daemon=True).start()
                weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop).atexit = False
            return self._loop

    async def _gather(self, requests: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
        tasks = [asyncio.ensure_future(self._in_turn(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _in_turn(self, request: Callable[[], Awaitable[_T]]) -> _T:
        assert self._turns is not None
        async with self._turns:
            return await request()

    def __reduce__(self) -> tuple[Any, ...]:
        return Asking, (self._name,)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
