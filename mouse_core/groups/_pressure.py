"""Producers wait while there are more rollouts than batches are made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from mouse_core._base.locks import ProcessLock
from mouse_core.errors import ConfigError, TimedOutError
from mouse_core.groups.making.protocol import BatchMaker
from mouse_core.spec import check_count

# Who waits looks so often whether the buffer is still the folder's: whoever takes it over can wake nobody here.
_LOOK_SECONDS = 0.5


class Pressure:
    """Keeps producers from running ahead, and never from what a batch lacks.

    Args:
        limit: How many rollouts may be ahead; None: any number.
        maker: What batches are made by.
        lock: The buffer's.

    Raises:
        ConfigError: There is a limit and no maker that says how many examples a batch could be made of.
    """

    def __init__(self, limit: int | None, maker: BatchMaker | None, lock: ProcessLock) -> None:
        self.limit = None if limit is None else check_count("max_ahead", limit)
        self._maker = maker
        if self.limit is not None and not hasattr(maker, "available"):
            raise ConfigError(f"max_ahead: expected a batch_maker with an attribute 'available', found {maker!r:.100}")
        self._changed = threading.Condition(lock)
        self._lacking = False

    def ahead(self, waiting: int) -> int:
        """Rollouts that the maker has not been given, so many, and examples that batches could be made of."""
        with self._changed:
            return waiting + int(getattr(self._maker, "available", 0))

    def hold(
        self,
        timeout: float | None,
        step: Callable[[], AbstractContextManager[None]],
        counts: Callable[[], tuple[int, int]],
    ) -> None:
        """Wait until there is room.

        Args:
            timeout: Seconds; None: as long as it takes.
            step: Entered to see an error where the buffer is not the folder's any more.
            counts: How many rollouts the batch maker has not been given, and how many of these wait for late columns.

        Raises:
            TimedOutError: There was no room in time.
        """
        if self.limit is None:
            return
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise ConfigError(f"timeout: expected seconds, at least 0, or None, found {timeout!r}")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while (ahead := self._too_many(*counts())) is not None:
                left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimedOutError(
                        f"add_rollouts: expected room within {timeout:g} s, found {ahead} rollouts ahead of "
                        f"max_ahead {self.limit}; batches make room, and nothing was added"
                    )
                with step():
                    pass
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _too_many(self, waiting: int, late: int) -> int | None:
        """How many are ahead, if there are enough, and the last batch that was asked for was made.

        What waits for late columns goes on to be bounded when it was not: more rollouts are not what it lacks.
        """
        if self.limit is None or (self._lacking and late < self.limit):
            return None
        ahead = self.ahead(waiting)
        return ahead if ahead >= self.limit else None

    def asked(self, *, made: bool) -> None:
        """A batch was asked for. Until one is made nobody waits: what is ahead is not what that batch lacks."""
        self._lacking = not made
        self.wake()

    def wake(self) -> None:
        """Let those that wait look again."""
        with self._changed:
            self._changed.notify_all()
