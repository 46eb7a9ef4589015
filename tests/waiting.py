"""Waiting for what another thread does, without a guess at how long it takes."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def wait_until(reached: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it came true before a generous time was over."""
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def together(works: Sequence[Callable[[], Any]]) -> None:
    """Call functions in threads that begin at the same moment; raise the first error of any."""
    begin = threading.Barrier(len(works))

    def begun(work: Callable[[], Any]) -> None:
        begin.wait()
        work()

    with ThreadPoolExecutor(len(works)) as threads:
        for ended in [threads.submit(begun, work) for work in works]:
            ended.result()
