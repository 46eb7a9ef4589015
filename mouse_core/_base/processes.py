"""Calls in new worker processes; a worker process never outlives its parent process."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

from mouse_core.errors import WorkerError

T = TypeVar("T")


def results(
    call: Callable[[T], Any], items: Iterable[T], num_workers: int, what: str, *, ahead: int, in_order: bool
) -> Generator[tuple[T, Any]]:
    """Call a function with each item, and yield pairs of the item and the result; the first error ends the iterator.

    Args:
        call: The function; pickle must support the function, unless ``num_workers`` is 0.
        items: Arguments of the calls; a few arguments are taken from the iterable before their results are requested.
        num_workers: Number of processes; 0: one thread.
        what: Name of the function that needs the results; the prefix of messages.
        ahead: Largest number of calls that are waiting or running.
        in_order: Whether results are yielded in the order of the items; otherwise, each result is yielded as soon as it
            is ready.

    Raises:
        WorkerError: A process ended early.
    """
    pool: Executor
    if num_workers:
        # Processes are spawned, because forking a process with threads of Arrow or of a framework may hang.
        work = pickle.dumps(call)
        pool = ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=_begin, initargs=(work,))
        call = _run
    else:
        pool = ThreadPoolExecutor(1, f"mouse-{what}")
    left, coming = iter(items), dict[Future[Any], T]()
    try:
        while True:
            for item in islice(left, ahead - len(coming)):
                coming[pool.submit(call, item)] = item
            if not coming:
                return
            done = list(coming)[:1] if in_order else wait(coming, return_when=FIRST_COMPLETED).done
            for future in done:
                item = coming.pop(future)
                yield item, future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            f"{what}: a worker process ended early: it was killed, for example because memory was full "
            "(use fewer num_workers), or it could not start, for example because a script lacks "
            "if __name__ == '__main__': or the function is not defined in a module"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_work: Callable[[Any], Any] | None = None


def _begin(work: bytes) -> None:
    """Load the function in the new process, and make the process end when its parent ends."""
    global _work
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _work = pickle.loads(work)


def _end_with(parent: int) -> None:
    connection.wait([parent])
    os._exit(1)


def _run(item: Any) -> Any:
    if _work is None:
        raise WorkerError("expected a worker process with a loaded function, found no function")
    return _work(item)
