"""Waiting for what another thread does, without a guess at how long it takes."""

import time
from collections.abc import Callable


def wait_until(reached: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it came true before a generous time was over."""
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
