"""Many requests at once, in one thread that waits for all of them."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from mouse_core._base.locks import ProcessLock, forks
from mouse_core.errors import ClosedError, ForkError

AT_ONCE = 128
"""Requests that are under way together."""

GROUP = 10
"""Ranges that obstore asks for together in one call; of calls with several, so many fewer are under way."""

# How long to wait for requests that were given up, for the client's own threads behind them, and for those that have
# told what a request gave.
_SECONDS, _NOTICED, _TOLD = 2.0, 0.4, 0.01

_T = TypeVar("_T")
# How many forks lay between the first process and the one in which the client's threads began: one set for all clients.
_begun: list[int] = []


def is_forked() -> bool:
    """Whether this process was forked from one that had made requests, whose threads it lacks."""
    return bool(_begun) and _begun[0] != forks()


class Asking:
    """Runs requests of any number of threads, so many at a time; its thread is there from the first request on."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, ProcessLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forks = -1
        # Those that wait for their turn, and those that are under way.
        self._tasks: tuple[set[Any], set[Any]] = (set(), set())
        # Set when the program ends: whoever asks for more from then on is refused.
        self._ended = threading.Event()
        # One for each thread that tells the loop something now.
        self._telling: list[None] = []
        self._turns: tuple[asyncio.Semaphore, asyncio.Semaphore] | None = None

    def all(self, requests: Sequence[Callable[[], Awaitable[_T]]], *, in_groups: bool = False) -> list[_T]:
        """What the requests give, in their order; the first error is raised, and the others are given up.

        Args:
            requests: Them.
            in_groups: Whether each of them is one of up to ``GROUP`` ranges.

        Raises:
            ForkError: Requests were made in the process that this one was forked from; see ``helping``.
        """
        loop = self._running()
        try:
            return asyncio.run_coroutine_threadsafe(self._gather(requests, int(in_groups)), loop).result()
        except (CancelledError, asyncio.CancelledError, RuntimeError) as error:
            if loop.is_running() and not isinstance(error, CancelledError | asyncio.CancelledError):
                raise
            raise ClosedError(f"{self._name}: the program ends, and reads nothing more") from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if is_forked():
                raise ForkError(f"{self._name}: expected a process of which no parent had made requests, found another")
            if self._loop is None:
                self._loop, self._forks = _counted(asyncio.new_event_loop(), self._telling), forks()
                _begun[:] = _begun or [self._forks]
                self._turns = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(2 * AT_ONCE // GROUP)
                threading.Thread(target=_run, args=(self._loop,), name="mouse-remote", daemon=True).start()
                weakref.finalize(self, _end, self._loop, self._forks, self._tasks, self._ended, self._telling)
            return self._loop

    async def _gather(self, requests: Sequence[Callable[[], Awaitable[_T]]], turns: int) -> list[_T]:
        tasks = [asyncio.ensure_future(self._in_turn(request, turns)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _in_turn(self, request: Callable[[], Awaitable[_T]], turns: int) -> _T:
        assert self._turns is not None
        if self._ended.is_set():
            raise asyncio.CancelledError
        waiting, under_way = self._tasks
        task = asyncio.current_task()
        waiting.add(task)
        try:
            async with self._turns[turns]:
                waiting.discard(task)
                under_way.add(task)
                return await request()
        finally:
            waiting.discard(task)
            under_way.discard(task)
            del task  # which knows what was raised, and that this frame

    def __reduce__(self) -> tuple[Any, ...]:
        return Asking, (self._name,)


def _counted(loop: asyncio.AbstractEventLoop, telling: list[None]) -> asyncio.AbstractEventLoop:
    """The loop, with an entry in ``telling`` for each thread that is in its ``call_soon_threadsafe``.

    The client's threads call it with what a request gave. It wakes the loop before it returns: the program may have its
    result, and end, while the thread that brought it is still there, and waits for the interpreter.
    """
    tell = loop.call_soon_threadsafe

    def call_soon_threadsafe(*arguments: Any, **how: Any) -> asyncio.Handle:
        telling.append(None)
        try:
            return tell(*arguments, **how)
        finally:
            telling.pop()

    loop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[assignment, method-assign]
    return loop


def _end(
    loop: asyncio.AbstractEventLoop,
    known: int,
    tasks: tuple[set[Any], set[Any]],
    ended: threading.Event,
    telling: list[None],
) -> None:
    """Give up what is under way, and wait until the client has noticed: its threads must not come back to an
    interpreter that has ended, neither for what was given up nor from telling what was asked for last.
    """
    if known != forks() or not loop.is_running():
        return
    if asyncio._get_running_loop() is loop:  # the last who had it was a request
        loop.stop()
        return
    ended.set()
    with suppress(Exception):
        asyncio.run_coroutine_threadsafe(_give_up(*tasks), loop).result(_SECONDS + 1)
    latest = time.monotonic() + _SECONDS
    while telling and time.monotonic() < latest:
        time.sleep(_TOLD)
    time.sleep(_TOLD)  # from the last line of Python that they run to where they need no interpreter
    loop.call_soon_threadsafe(loop.stop)


async def _give_up(waiting: Any, under_way: Any) -> None:
    # The client's own threads come back once for each that is given up.
    left = [task for task in under_way if not task.done()]
    for task in list(waiting):
        task.cancel()
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_SECONDS)
        await asyncio.sleep(_NOTICED)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
