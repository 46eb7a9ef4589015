"""Calls in several threads whose results come in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = min(16, max(2, os.cpu_count() or 1))
"""One a core: with more, they wait for each other longer than for files."""


def in_order(pool: ThreadPoolExecutor, call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What a function makes of every item, in order; the first error ends it.

    A few items are worked on ahead of what has been asked for, so neither items nor results pile up.

    Args:
        pool: The threads. After an error some may still be at work.
        call: The function.
        items: Taken one after the other, by whoever asks for results.
    """
    coming: deque[Future[R]] = deque()
    try:
        for item in items:
            coming.append(pool.submit(call, item))
            if len(coming) > 3 * THREADS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        for future in coming:
            future.cancel()
