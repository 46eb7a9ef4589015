"""Asking for ranges of objects until they come, and are what was written."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mouse_core.errors import DataError, StorageError
from mouse_core.remote.mirror.counters import Counters
from mouse_core.remote.mirror.keeping import Limits
from mouse_core.remote.mirror.objects import Runs
from mouse_core.remote.mirror.sums import Sums

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
# What came damaged is asked for so often, as it may have been damaged on the way.
_TRIES = 3


class Getter:
    """Asks for runs of pages, again as long as that is of use.

    Args:
        limits: How long that is.
        counters: What is counted.
        pause: Gives a function that waits some seconds, and says whether to go on; None where nobody wants more.
    """

    def __init__(self, limits: Limits, counters: Counters, pause: Callable[[], Callable[[float], bool] | None]) -> None:
        self._limits, self._counters, self._pause = limits, counters, pause

    def get(self, wanted: Runs) -> tuple[list[memoryview], Sums]:
        """The bytes of some runs of pages, and the pages' digests, held against those that are known.

        Raises:
            ChangedError: An object is another one now.
            DataError: It is not there, or not what was written.
            StorageError: It was not reached.
        """
        tries = 0
        while True:
            contents = self._reached(wanted, sure=tries > 0)
            digests = wanted.digests(contents)
            error = wanted.wrong(digests)
            if error is None:
                return contents, digests
            tries += 1
            self._counters.add(damaged=1, retries=tries < _TRIES)
            if tries == _TRIES:
                try:
                    raise error
                finally:
                    del error

    def _reached(self, wanted: Runs, *, sure: bool) -> list[memoryview]:
        """The bytes of runs of pages, asked for again as long as that is of use.

        Where digests say whether bytes are those that were written, nobody else is asked whether the object is the one
        that was opened: only once something is wrong with it (``sure``).
        """
        objects = wanted.objects
        sure = sure or all(placed.sums is None for placed in objects)
        until, pause = time.monotonic() + self._limits.patience, _FIRST_PAUSE
        while True:
            for placed in objects:
                if placed.error is not None:
                    raise copy.copy(placed.error)
            try:
                wanted.find_sums()
                return self._asked(wanted, sure=sure)
            except StorageError:
                if self._limits.fail == "raise" and time.monotonic() + pause > until:
                    raise
                wait = self._pause()
                if wait is None or not wait(pause * (0.5 + random.random())):
                    raise
            except DataError as error:
                if not sure:
                    sure = True
                    continue
                if len(objects) == 1:
                    objects[0].error = copy.copy(error)  # it stays so; its traceback would keep whoever asked
                raise
            self._counters.add(retries=1)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _asked(self, wanted: Runs, *, sure: bool) -> list[memoryview]:
        """The bytes of runs of pages, asked for once."""
        objects, (begins, ends) = wanted.objects, (some.tolist() for some in wanted.bytes())
        client: Any = objects[0].client
        paths = [one.info.path for one in objects]
        versions = {one.info.path: one.info.version if sure or one.sums is None else "" for one in objects}
        if len(objects) > 1:
            ranges = zip([paths[number] for number in wanted.whose.tolist()], begins, ends, strict=True)
            found = client.get_all(list(ranges), versions)
        else:
            found = client.get_ranges(paths[0], begins, ends, versions[paths[0]])
        contents = [memoryview(one).cast("B") for one in found]
        sizes = np.fromiter(map(len, contents), np.int64, len(contents))
        short = np.flatnonzero(sizes != np.subtract(ends, begins))
        if len(short):
            one = int(short[0])
            path, begin, end = paths[int(wanted.whose[one])], begins[one], ends[one]
            raise StorageError(f"{path}: expected the bytes {begin}..{end - 1}, found {sizes[one]} of them")
        self._counters.add(requests=len(contents), fetched=int(sizes.sum()))
        return contents
