"""Making batches ahead in a grain pipeline, up to the device, by a few threads.

grain has the threads and the buffers. What it does not have is here. An element that raises is lost to it (and its
state is then off by one), so nothing raises inside of it: every element is an outcome. Closing it waits for whatever is
being computed, and leaving it open at exit prints ``Exception ignored``, so closing is ours, too.

Each worker is an iterator of grain's that reads ahead in a thread of its own; with ``n`` of them worker ``w`` makes the
items ``w``, ``w + n``, ... in turn. grain's thread pool has to be told of every item, which takes 50 us of processor
time for each, three times as long as this.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from grain.experimental import ThreadPrefetchDatasetIterator

from mouse_core.prefetch.prefetcher import Failed, Made, Outcome, Prefetcher, outcome_of

_CLOSE_SECONDS = 0.25
# How long the interpreter's exit waits for batches in the making.
_EXIT_SECONDS = 2.0


class GrainPrefetcher(Prefetcher[Any]):
    """Computes ``make(i)`` for ``i = first, first + 1, ...`` in threads of grain's.

    Besides those handed out at most ``ahead`` items exist at a time, or two, those in the making included.

    Args:
        make: Computes an item; must be thread-safe, and must not refer to this object.
        first: The first index.
        workers: Number of threads, at least 1; more than half of ``ahead`` are not used, for each has one item in the
            making and one that waits.
        ahead: How many items may be computed or waiting beyond the one that is asked for, at least 1.
    """

    def __init__(self, make: Callable[[int], Any], first: int, *, workers: int, ahead: int) -> None:
        self._work = _Work(make, first, workers, ahead)
        super().__init__(first, self._work.next)
        weakref.finalize(self, self._work.abandon).atexit = False
        # Before JAX ends its backends, and before modules are taken down, when grain's closing fails.
        atexit.register(self._work.exit)

    @property
    def ready(self) -> int:
        """See ``Prefetcher``."""
        return self._work.ready

    def close(self) -> None:
        """Stop the threads and drop what is waiting; see ``Prefetcher``."""
        self._work.stop()


# grain drops elements that are None.
_STOPPED: Outcome[Any] = Made(None)


class _Work:
    """What the threads share. They hold on to this, and never to the prefetcher."""

    def __init__(self, make: Callable[[int], Any], first: int, workers: int, ahead: int) -> None:
        self._make = make
        self._first = first
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._busy = 0
        self._stopped = False
        self._closer: threading.Thread | None = None
        self._failed_at = sys.maxsize
        self._taken = 0
        # Each holds the items in its queue, and one that is in the making or finds no room there: ahead together.
        count = max(1, min(workers, ahead // 2))
        self._makings = [_Making(self, worker, count) for worker in range(count)]
        self._iterators = [
            ThreadPrefetchDatasetIterator(making, max(1, (ahead - 1 - worker) // count))
            for worker, making in enumerate(self._makings)
        ]
        for iterator in self._iterators:
            iterator.start_prefetch()

    def next(self) -> Outcome[Any] | None:
        """The next outcome in order; None when stopped."""
        if not self._enter():
            return None
        try:
            # References of their own: stop() drops the others.
            iterators = self._iterators
            self._taken += 1
            outcome: Outcome[Any] = next(iterators[(self._taken - 1) % len(iterators)])
            return None if outcome is _STOPPED else outcome
        finally:
            self._leave()

    def outcome(self, position: int) -> Outcome[Any]:
        """What comes of item ``first + position``; called by grain's threads."""
        if not self._enter():
            return _STOPPED
        try:
            if position > self._failed_at:  # after an error nobody asks
                return _STOPPED
            made = outcome_of(self._make, self._first + position)
            if isinstance(made, Failed):
                with self._changed:
                    self._failed_at = min(self._failed_at, position)
            return made
        finally:
            self._leave()

    @property
    def ready(self) -> int:
        """How many outcomes were made and not taken."""
        return max(0, sum(making.made for making in self._makings) - self._taken)

    def _enter(self) -> bool:
        """Whether this is still open; counts the callers inside if it is."""
        with self._changed:
            if self._stopped:
                return False
            self._busy += 1
            return True

    def _leave(self) -> None:
        with self._changed:
            self._busy -= 1
            if self._stopped:
                self._changed.notify_all()

    def stop(self) -> None:
        """End the threads and drop everything; may be called twice, and does nothing in a forked child.

        grain's own closing waits for the element being computed, however long that takes, and leaves a caller who
        waits in another thread there for ever. From here on every element is ``_STOPPED`` at once, and grain is
        closed when nobody is inside.
        """
        if self._mark_stopped():
            if self._wait(_CLOSE_SECONDS):
                self._end()
            else:
                self._end_later()

    def abandon(self) -> None:
        """The same for the garbage collector, who may call from any line of any thread: nothing is waited for."""
        if self._mark_stopped():
            self._end_later()

    def exit(self) -> None:
        """The same at the interpreter's exit, also for threads that others are about to end.

        One that comes back from compiled code after the interpreter's end is ended there, which aborts the process.
        """
        if os.getpid() == self._process:
            with self._changed:
                self._stopped = True
            if self._closer is not None:
                self._closer.join(_EXIT_SECONDS)
            elif self._wait(_EXIT_SECONDS):
                self._end()

    def _mark_stopped(self) -> bool:
        """Whether it is now for the caller to end the threads."""
        if os.getpid() != self._process:
            # Locks may have been held when the process was forked. The registration at exit keeps this alive, so that
            # the garbage collector does not close grain's iterator either.
            return False
        with self._changed:
            if self._stopped:
                return False
            self._stopped = True
        return True

    def _wait(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)

    def _end_later(self) -> None:
        def wait_and_end() -> None:
            self._wait(None)
            self._end()

        closer = threading.Thread(target=wait_and_end, name="mouse-jax-close", daemon=True)
        try:
            closer.start()
            self._closer = closer
        except RuntimeError:
            pass  # at exit there are no new threads, and the old ones end with the process

    def _end(self) -> None:
        for iterator in self._iterators:
            iterator.close()  # which waits for its thread, and may be called twice
        self._iterators = []
        atexit.unregister(self.exit)


class _Making:
    """The outcomes at every ``step``-th position, as an iterator for grain, which wants to know where it is."""

    def __init__(self, work: _Work, position: int, step: int) -> None:
        self._work = work
        self._position = position
        self._step = step

    def __iter__(self) -> _Making:
        return self

    def __next__(self) -> Outcome[Any]:
        outcome = self._work.outcome(self._position)
        self._position += self._step
        return outcome

    @property
    def made(self) -> int:
        """How many items it has made."""
        return self._position // self._step

    def get_state(self) -> int:
        return self._position

    def set_state(self, state: int) -> None:
        self._position = state
