"""Making batches ahead in a grain pipeline, up to the device, by a few threads.

grain has the threads, the order and the buffers. What it does not have is here. An element that raises is lost to it
(and its state is then off by one), so nothing raises inside of it: every element is an outcome. Closing it waits for
whatever is being computed, and leaving it open at exit prints ``Exception ignored``, so closing is ours, too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grain

from mouse_core.errors import ClosedError

_CLOSE_SECONDS = 0.25


class GrainPrefetcher:
    """Computes ``make(i)`` for ``i = first, first + 1, ...`` ahead of the caller, who gets them in that order.

    Besides those handed out at most ``ahead + 1`` items exist at a time, those in the making included. One that is
    dropped without ``close()`` is closed by the garbage collector, and one that lives to the interpreter's exit there.

    Args:
        make: Computes an item; must be thread-safe, and must not refer to this object.
        first: The first index.
        workers: Number of threads, at least 1.
        ahead: How many items may be computed or waiting beyond the one that is asked for, at least 1.
    """

    def __init__(self, make: Callable[[int], Any], first: int, *, workers: int, ahead: int) -> None:
        self._failure: BaseException | None = None
        self._next_index = first
        self._work = _Work(make, first, workers, ahead)
        # Closed at exit: before JAX ends its backends, and before modules are taken down, when grain's closing fails.
        weakref.finalize(self, self._work.abandon).atexit = False
        atexit.register(self._work.stop)

    @property
    def next_index(self) -> int:
        """The index of the item that ``get`` gives next."""
        return self._next_index

    def get(self) -> Any:
        """The next item, waiting for it if need be.

        Raises:
            ClosedError: ``close()`` was called.
            BaseException: What ``make`` raised for this item; raised again on every later call.
        """
        if self._failure is not None:
            raise self._failure
        # Counted first: whoever is interrupted while waiting is then known to have lost an item.
        self._next_index += 1
        outcome = self._work.next()
        if isinstance(outcome, _Failed):
            self._failure = outcome.error
            raise self._failure
        if outcome is _STOPPED:
            raise ClosedError("loader: expected an open loader, found it closed")
        return outcome.value

    def close(self) -> None:
        """Stop the threads and drop what is waiting; waits for what is being made, a quarter of a second at most."""
        self._work.stop()


@dataclass(frozen=True, eq=False)
class _Made:
    """An item. A type of its own, for grain drops elements that are None."""

    value: Any


@dataclass(frozen=True, eq=False)
class _Failed:
    """What ``make`` raised. A StopIteration that grain saw would end the stream in silence."""

    error: BaseException


_STOPPED = _Made(None)
_Outcome = _Made | _Failed


class _Work:
    """What the threads share. They hold on to this, and never to the prefetcher."""

    def __init__(self, make: Callable[[int], Any], first: int, workers: int, ahead: int) -> None:
        self._make = make
        self._first = first
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._busy = 0
        self._stopped = False
        self._failed_at = sys.maxsize
        options = grain.ReadOptions(num_threads=min(workers, ahead), prefetch_buffer_size=ahead)
        self._iterator: Any = iter(grain.MapDataset.source(_Making(self)).to_iter_dataset(options))

    def next(self) -> _Outcome:
        """The next outcome in order."""
        with self._counted() as open_:
            # A reference of its own: stop() drops the other one.
            iterator = self._iterator
            outcome: _Outcome = next(iterator) if open_ else _STOPPED
        return outcome

    def outcome(self, position: int) -> _Outcome:
        """What comes of item ``first + position``; called by grain's threads."""
        with self._counted() as open_:
            # After an error nobody asks; and at exit the interpreter waits for grain's threads to empty their queue.
            if not open_ or position > self._failed_at or not threading.main_thread().is_alive():
                return _STOPPED
            try:
                return _Made(self._make(self._first + position))
            except BaseException as error:  # whatever it was, the caller must hear of it
                with self._changed:
                    self._failed_at = min(self._failed_at, position)
                return _Failed(error)

    @contextmanager
    def _counted(self) -> Iterator[bool]:
        """Whether this is still open; counts the callers inside if it is."""
        with self._changed:
            open_ = not self._stopped
            self._busy += open_
        try:
            yield open_
        finally:
            if open_:
                with self._changed:
                    self._busy -= 1
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
        atexit.unregister(self.stop)
        return True

    def _wait(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)

    def _end_later(self) -> None:
        def wait_and_end() -> None:
            self._wait(None)
            self._end()

        try:
            threading.Thread(target=wait_and_end, name="mouse-jax-close", daemon=True).start()
        except RuntimeError:
            pass  # at exit there are no new threads, and the old ones end with the process

    def _end(self) -> None:
        self._iterator.close()
        self._iterator = None


class _Making:
    """Outcomes as a source for grain, which takes an index modulo the length."""

    def __init__(self, work: _Work) -> None:
        self._work = work

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> _Outcome:
        return self._work.outcome(position)
