"""Asking for ranges of objects until they come, and are what was written."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from mouse_core.errors import DataError, StorageError
from mouse_core.remote.mirror.counters import Counters
from mouse_core.remote.mirror.keeping import Arrival, Limits
from mouse_core.remote.mirror.objects import Placed

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

    def get(self, wanted: Sequence[tuple[Placed, int, int]]) -> list[Arrival]:
        """Some runs of pages, each held against the digests of its pages where these are known.

        Args:
            wanted: Of each the object, the first page, and the one behind the last.

        Raises:
            ChangedError: An object is another one now.
            DataError: It is not there, or not what was written.
            StorageError: It was not reached.
        """
        tries = 0
        while True:
            arrivals = [Arrival(*run, content) for run, content in zip(wanted, self._reached(wanted), strict=True)]
            known = {placed: placed.known_sums() for placed in dict.fromkeys(placed for placed, _, _ in wanted)}
            found = (known[one.placed] for one in arrivals)
            looked = (
                one.placed.wrong(sums, one.first, one.content)
                for one, sums in zip(arrivals, found, strict=True)
                if sums is not None
            )
            error = next(filter(None, looked), None)
            if error is None:
                return arrivals
            tries += 1
            self._counters.add(damaged=1, retries=tries < _TRIES)
            if tries == _TRIES:
                try:
                    raise error
                finally:
                    del error

    def _reached(self, wanted: Sequence[tuple[Placed, int, int]]) -> list[memoryview]:
        """The bytes of runs of pages, asked for again as long as that is of use."""
        objects = list(dict.fromkeys(placed for placed, _, _ in wanted))
        until, pause = time.monotonic() + self._limits.patience, _FIRST_PAUSE
        while True:
            for placed in objects:
                if placed.error is not None:
                    raise copy.copy(placed.error)
            try:
                for placed in objects:
                    placed.known_sums()
                return self._asked(wanted)
            except StorageError:
                if self._limits.fail == "raise" and time.monotonic() + pause > until:
                    raise
                wait = self._pause()
                if wait is None or not wait(pause * (0.5 + random.random())):
                    raise
            except DataError as error:
                if len(objects) == 1:
                    objects[0].error = copy.copy(error)  # it stays so; its traceback would keep whoever asked
                raise
            self._counters.add(retries=1)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _asked(self, wanted: Sequence[tuple[Placed, int, int]]) -> list[memoryview]:
        """The bytes of runs of pages, asked for once."""
        objects = list(dict.fromkeys(placed for placed, _, _ in wanted))
        ranges = [(placed.info.path, *placed.bytes_of(first, end)) for placed, first, end in wanted]
        client: Any = objects[0].client
        if len(objects) > 1:
            found = client.get_all(ranges, {placed.info.path: placed.info.version for placed in objects})
        else:
            begins, ends = [begin for _, begin, _ in ranges], [end for _, _, end in ranges]
            found = client.get_ranges(objects[0].info.path, begins, ends, objects[0].info.version)
        contents = [memoryview(one).cast("B") for one in found]
        for content, (path, begin, end) in zip(contents, ranges, strict=True):
            if len(content) != end - begin:
                raise StorageError(f"{path}: expected the bytes {begin}..{end - 1}, found {len(content)} of them")
        self._counters.add(requests=len(ranges), fetched=sum(map(len, contents)))
        return contents
