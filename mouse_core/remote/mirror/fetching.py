"""Threads that fetch requested pages into a mirror, in the estimated order in which they will be read."""

from __future__ import annotations

import copy
import heapq
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from mouse_core.errors import ClosedError, DataError, MouseError, StorageError
from mouse_core.files.checksum import PageChecksums
from mouse_core.remote.mirror.keeping import Keeper, Runs, longer
from mouse_core.remote.mirror.table import Int64s, joined, pages_of, pieces

# Largest number of requested batches that are not read yet; those of an abandoned loader are never read.
_MOST, _MOST_AHEAD = 4096, 1 << 18
_FAR = 4096
# The next batches count as read soon.
_SOON = 64
# Weight of the last measurement.
_WEIGHT = 0.1


class _Asked(NamedTuple):
    """A requested batch: its number, its blocks, the same as a list, its pages, and when it is read."""

    batch: int
    blocks: Int64s
    numbers: list[int]
    pages: Int64s
    when: int

    def among(self, blocks: set[int]) -> bool:
        """Whether all of its blocks are among ``blocks``."""
        return blocks.issuperset(self.numbers)


class Pace:
    """Finds by the blocks that are read which batch a process reads, and so when the next ones will be read.

    ``Table.tick`` counts the batches of all processes, which is the common time. If four processes read equally fast, a
    batch that is 10 ahead of the current one will be read in 40.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[_Asked] = deque()
        # By page: the times at which requested batches read it. None until the mirror is full, as it takes long.
        self._uses: dict[int, list[int]] | None = None
        self._at: int | None = None
        self._ticks = 1.0
        # When requested batches were last read, how many, and the number of unknown reads since then.
        self._last = self._count = self._unknown = 0
        self._read: Int64s | None = None
        self.pages_ahead = 0
        """Pages requested and not read yet, counted once for each batch that reads them."""

    def blocks_soon(self) -> int:
        """Return the blocks that the next batches read, counted once for each batch."""
        with self._lock:
            return sum(len(asked.blocks) for asked in islice(self._asked, _SOON))

    def knows(self, pages: int) -> bool:
        """Whether ``pages`` pages are requested and not read yet, or the largest number that is kept."""
        return self.pages_ahead >= min(pages, _MOST_AHEAD) or len(self._asked) >= _MOST - _SOON

    def ahead(self, batch: int, blocks: Int64s, pages: Int64s, now: int) -> int:
        """Return the time at which a requested batch will be read.

        Args:
            batch: Number of the batch.
            blocks: Its blocks, ascending, int64 ``[n]``.
            pages: Its pages, int64 ``[m]``.
            now: The current time.
        """
        with self._lock:
            if self._at is None:
                self._at = batch - 1
            if len(self._asked) == _MOST:
                self._forget()
            when = now + max(1, round(min(max(batch - self._at, 1), _FAR) * self._ticks))
            self._asked.append(_Asked(batch, blocks, blocks.tolist(), pages, when))
            self.pages_ahead += len(pages)
            if self._uses is not None:
                for page in pages.tolist():
                    uses = self._uses.setdefault(page, [])
                    while uses and uses[0] <= now:
                        uses.pop(0)
                    uses.append(when)
            return when

    def choose(self) -> None:
        """Begin to record when pages will be read again."""
        if self._uses is None:
            with self._lock:
                if self._uses is None:
                    uses: dict[int, list[int]] = {}
                    for asked in self._asked:
                        for page in asked.pages.tolist():
                            uses.setdefault(page, []).append(asked.when)
                    self._uses = uses

    def awaits(self, blocks: Int64s) -> bool:
        """Whether the batch that was requested with this array object of blocks is not read yet."""
        with self._lock:
            return any(asked.blocks is blocks for asked in self._asked)

    def read(self, blocks: Int64s, pages: Int64s, now: int) -> tuple[int, Int64s]:
        """Note that blocks (ascending, int64 ``[n]``) and pages, int64 ``[m]``, are read now.

        Returns:
            The number of batches that were read, with skipped ones, at least 1; 0 if the same blocks were read just
            before, as after an eviction. And the time at which each page is read again, int64 ``[m]``: ``now`` if that
            is unknown, or ``choose`` was not called.
        """
        with self._lock:
            is_new = self._read is None or not np.array_equal(blocks, self._read)
            count, self._read = self._arrive(blocks, now) if is_new else 0, blocks
            again = np.full(len(pages), now)
            if self._uses is None:
                return count, again
            for number, page in enumerate(pages.tolist()):
                uses = self._uses.get(page)
                if uses is None:
                    continue
                while uses and uses[0] < now + count:
                    uses.pop(0)
                if uses:
                    again[number] = uses[0]
                else:
                    del self._uses[page]
            return count, again

    def _forget(self) -> int:
        """Forget the oldest requested batch, and return its number."""
        batch, _, _, pages, when = self._asked.popleft()
        self.pages_ahead -= len(pages)
        if self._uses is not None:
            for page in pages.tolist():
                uses = self._uses.get(page)
                if uses is not None:
                    if when in uses:
                        uses.remove(when)
                    if not uses:
                        del self._uses[page]
        return batch

    def _arrive(self, blocks: Int64s, now: int) -> int:
        """Forget the requested batches that read ``blocks``, and all earlier ones; return their number.

        Batches that share stretches cannot all be found by their blocks; they are skipped with the next one found.
        """
        # Batches before the first of them count as skipped.
        there = set(blocks.tolist())
        skipped = next((number for number, asked in enumerate(self._asked) if asked.among(there)), None)
        if skipped is None:
            self._unknown += 1
            return 1
        count = 0
        # Several batches may be read at once, such as 5, 6 and 7, if they were requested one after the other.
        while skipped or (self._asked and self._asked[0].among(there)):
            self._at = self._forget()
            skipped, count = max(0, skipped - 1), count + 1
        if self._count:
            took = (now - self._last - self._unknown) / self._count
            self._ticks += _WEIGHT * (max(1.0, took) - self._ticks)
        self._last, self._count, self._unknown = now, count, 0
        return count


_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
# Requests for damaged bytes, which may have been damaged on the way.
_TRIES = 3


# Most requests wait for the network, in which Python takes no part.
_THREADS = 16
_IDLE_SECONDS = 2.0
# Pages of one call of a client, fewer if the mirror is full. A block counts as 4 pages at least, as it is likely a
# request of its own.
_MOST_PAGES, _FEW_PAGES, _REQUEST_PAGES = 512, 256, 4
# While as many pages are in flight as came in 0.1 s (measured over 0.5 s), and more than 2048, no more are fetched
# ahead: urgent pages share the network with them.
_ON_ITS_WAY, _RATE_SECONDS, _FEW_ON_ITS_WAY = 0.1, 0.5, 2048
# Seconds until the next try without room, or while another process fetches the pages.
_AGAIN_SECONDS = 0.01
# How far ahead pages are fetched into a full mirror, in the table's time.
_FIRST_HORIZON, _LONGEST_HORIZON, _SHRINKING = 2.0, 4096.0, 0.95
# Pages that are read later than this are fetched for 8 batches together, in the order of their positions.
_NEAR, _TOGETHER = 32, 8
# Pages in flight or not read yet are at most this part of all pages: while there is room, and in a full mirror.
_ROOM_PART, _AHEAD_PART = 2, 4


@dataclass(order=True)
class Task:
    """Pages to fetch with one call of a client.

    Args:
        when: The time at which they are read; 0 for pages that a reader waits for.
        number: Number of the task.
        blocks: Blocks, ascending, int64 ``[n]``.
        masks: Pages of each, int64 ``[n]``.
        urgent: Whether a reader waits for them.
        steal: Whether to take over pages that another process has been fetching for too long.
    """

    when: int
    number: int
    blocks: Int64s = field(compare=False)
    masks: Int64s = field(compare=False)
    urgent: bool = field(default=False, compare=False)
    steal: bool = field(default=False, compare=False)


class Fetcher:
    """The threads of a process that fetch pages. They end after some seconds without a task.

    Args:
        keeper: Writes fetched pages into the mirror.
        pace: Knows which batches were read.
    """

    def __init__(self, keeper: Keeper, pace: Pace) -> None:
        self.keeper, self._table, self._pace = keeper, keeper.table, pace
        self._limits, self._counters = keeper.limits, keeper.counters
        lock = threading.RLock()
        self._more = threading.Condition(lock)  # notified of new tasks
        self.changed = threading.Condition(lock)
        """Notified when pages came, or failed."""
        self.errors: dict[int, Exception] = {}
        self._asked: list[tuple[int, int, Int64s, Int64s]] = []  # not fetched yet: when, number, blocks, masks
        self._begun: deque[tuple[int, int]] = deque()  # fetched or in flight, and not read: when, pages
        self._begun_pages = 0  # sum of these
        self._heap: list[Task] = []
        self._later: list[tuple[float, Task]] = []
        self._coming = np.zeros(0, np.int64)  # pages of each block that are queued
        self._tasks = self._threads = self._idle = 0
        self._closed = False
        self._waiting = -1  # the time at which there was no room
        self._came: deque[tuple[float, int]] = deque()  # when pages came, and how many
        self._horizon = _FIRST_HORIZON

    # ------------------------------------------------------------------ requests of readers

    def ask(self, parts: Sequence[tuple[int, Int64s, Int64s]]) -> None:
        """Fetch pages of some blocks until a time, or verify them if another process fetched them.

        Args:
            parts: For each batch the time, blocks, ascending, int64 ``[n]``, and masks.
        """
        with self.changed:
            for when, blocks, masks in parts:
                self._tasks += 1
                heapq.heappush(self._asked, (when, self._tasks, blocks, masks))
        self.reach()

    def reach(self) -> None:
        """Begin to fetch requested pages, as far ahead as it helps.

        While there is room, up to half of the mirror is fetched ahead. In a full mirror, new pages replace others, and
        pages that come early replace useful ones: so pages are fetched just in time. Each wait of a reader doubles how
        far ahead that is, up to a quarter of the mirror.
        """
        self._follow()
        with self.changed:
            is_full, until = self.keeper.is_full(), self._table.clock + self._horizon
            while self._begun and self._begun[0][0] <= self._table.clock:
                self._begun_pages -= self._begun.popleft()[1]
            while self._asked and not self._is_begun_with(_ROOM_PART):
                when = self._asked[0][0]
                if is_full and (when > until or self._is_busy()):
                    break
                is_far = not is_full and when > self._table.clock + _NEAR
                if is_far and len(self._asked) < _TOGETHER:
                    break  # fewer and larger requests take less processor time
                self._begin(_TOGETHER if is_far else 1)

    def _begin(self, count: int) -> None:
        """Begin to fetch the ``count`` requests that are read first; the caller holds ``changed``."""
        first = [heapq.heappop(self._asked) for _ in range(count)]
        # Requests that were read meanwhile are left out.
        first = [one for one in first if one[0] > self._table.clock or self._pace.awaits(one[2])]
        for when, _, blocks, masks in first:
            self._begun.append((when, self.keeper.pages(blocks, masks)))
            self._begun_pages += self._begun[-1][1]
        if not first:
            return
        blocks, masks = joined([one[2:] for one in first])
        state = self._table.state[blocks]
        wanted = masks & ~state & ~self._coming[blocks]
        self._coming[blocks] |= wanted
        some = wanted != 0
        # Pages that other processes fetched are verified before they are read.
        some[np.searchsorted(blocks, self.keeper.unverified(blocks, state, masks))] = True
        self._push(blocks[some], masks[some], first[0][0])

    def _is_busy(self) -> bool:
        """Whether enough pages are in flight, or fetched and not read yet."""
        tasks = len(self._heap) + len(self._later) + self._threads - self._idle
        return tasks >= _THREADS or self._is_begun_with(_AHEAD_PART)

    def _is_begun_with(self, part: int) -> bool:
        """Whether more than one ``part``-th of the mirror is fetched or in flight, and not read yet."""
        return self._begun_pages > self._limits.pages // part

    def bring(self, blocks: Int64s, masks: Int64s) -> None:
        """Wait until pages of some blocks are there; raise the error of fetching them."""
        self._follow()
        table, began, pushed = self._table, time.monotonic(), -np.inf
        table.ask(pages_of(blocks, masks), table.clock + 1)
        with self.changed:
            # Pages in flight, or not fetched yet, were too late; pages that were evicted before, too early.
            late = bool((self._coming[blocks] & masks).any() or (self._asked and self._asked[0][0] <= table.clock + 1))
            self._horizon = float(np.clip(self._horizon * (2 if late else 0.5), _FIRST_HORIZON, _LONGEST_HORIZON))
            while True:
                if self._closed:
                    raise ClosedError("cache: expected one that is open, found it closed")
                lacking = (masks & ~table.state[blocks]) != 0
                if not lacking.any():
                    break
                blocks, masks = blocks[lacking], masks[lacking]
                self._raise(blocks)
                now, claims = time.monotonic(), table.claim[blocks]
                # Pages that no process fetches; and now and then those of other processes, which may have died.
                due = claims == 0 if now - pushed > _AGAIN_SECONDS / 2 else claims < 0
                if now - pushed > 10 * _AGAIN_SECONDS:
                    due = claims >= 0
                if due.any():
                    pushed = now
                    self._push(blocks[due], masks[due], 0, urgent=True, steal=now - began > self._limits.patience)
                self.changed.wait(_AGAIN_SECONDS / 2)
        self._counters.add(waits=1, seconds=time.monotonic() - began)

    def _raise(self, blocks: Int64s) -> None:
        """Raise the error of a block, once."""
        for block in blocks.tolist():
            error = self.errors.pop(block, None)
            if error is not None:
                for other in blocks.tolist():
                    self.errors.pop(other, None)
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame

    def queued(self) -> int:
        """Return how many pages are requested and not there yet."""
        with self.changed:
            tasks = [*self._heap, *(task for _, task in self._later)]
            wanted = [(task.blocks, task.masks) for task in tasks] + [some[2:] for some in self._asked]
        lacking = (self._table.count(masks & ~self._table.state[blocks]) for blocks, masks in wanted)
        return sum(lacking) + self.keeper.in_flight

    def in_time(self) -> None:
        """Shorten how far ahead pages are fetched, as some were there in time."""
        self._horizon = max(_SHRINKING * self._horizon, _FIRST_HORIZON)

    def close(self) -> None:
        """Cancel all tasks that have not begun."""
        with self.changed:
            self._closed = True
            self._asked.clear()
            self._heap.clear()
            self._later.clear()
            self._more.notify_all()
            self.changed.notify_all()

    def _follow(self) -> None:
        """Extend the arrays to blocks that objects got meanwhile."""
        if len(self._coming) < len(self._table.rows):
            with self.changed:
                self._coming = longer(self._coming, len(self._table.rows))

    def _push(
        self,
        blocks: Int64s,
        masks: Int64s,
        when: int,
        *,
        urgent: bool = False,
        steal: bool = False,
        alone: bool = False,
    ) -> None:
        """Queue a task for each call of a client; the caller holds ``changed``."""
        if not len(blocks):
            return
        sizes = np.maximum(self._table.sizes(masks), _REQUEST_PAGES)
        most = _FEW_PAGES if self.keeper.is_full() else _MOST_PAGES
        for some in self.keeper.known.calls(blocks, alone=alone):
            for first, behind in pieces(sizes[some], most):
                part = slice(some.start + first, some.start + behind)
                self._tasks += 1
                heapq.heappush(self._heap, Task(when, self._tasks, blocks[part], masks[part], urgent, steal))
                self._start()

    def _start(self) -> None:
        if self._idle:
            self._more.notify()
        if len(self._heap) > self._idle and self._threads < _THREADS and not self._closed:
            self._threads += 1
            threading.Thread(target=_work, args=(weakref.ref(self),), name="mouse-fetch", daemon=True).start()

    # ------------------------------------------------------------------ threads

    def next(self) -> Task | None:
        """Return the first task that is due; None if the thread ends."""
        until = time.monotonic() + _IDLE_SECONDS
        with self._more:
            while not self._closed:
                now = time.monotonic()
                due = [task for at, task in self._later if at <= now]
                if due:
                    self._later = [(at, task) for at, task in self._later if at > now]
                    for task in due:
                        heapq.heappush(self._heap, task)
                has_room = self._waiting != self._table.clock
                if self._heap and (self._heap[0].urgent or (has_room and not self._is_filled(now))):
                    return heapq.heappop(self._heap)
                if now >= until:
                    break
                self._idle += 1
                soon = until if has_room or not self._heap else now + _AGAIN_SECONDS / 2
                self._more.wait(max(0.0, min([soon, *(at for at, _ in self._later)]) - now))
                self._idle -= 1
            self._threads -= 1
            return None

    def _is_filled(self, now: float) -> bool:
        """Whether so many pages are in flight that more would come no sooner."""
        while self._came and self._came[0][0] < now - _RATE_SECONDS:
            self._came.popleft()
        rate = sum(pages for _, pages in self._came) / _RATE_SECONDS
        return self.keeper.in_flight > max(_FEW_ON_ITS_WAY, rate * _ON_ITS_WAY)

    def run(self, task: Task) -> None:
        """Fetch the missing pages of a task; an error is kept for the reader that waits."""
        held, again, has_room = task.blocks[:0], False, True
        try:
            state = self._table.state[task.blocks]
            self.keeper.verify(task.blocks[(state & task.masks) != 0])
            now = self._table.clock
            claimed = self.keeper.claim(task.blocks, task.masks, task.when, urgent=task.urgent, steal=task.steal)
            if claimed is None:
                # Later tasks find no room either, until more is read.
                self._waiting, has_room = now, False
            else:
                held = claimed[0]
                if len(held):
                    self._fetch(*claimed)
            again = bool((task.masks & ~self._table.state[task.blocks]).any()) and not task.urgent
        except Exception as error:
            with self.changed:
                if isinstance(error, DataError) and len(self.keeper.known.of(task.blocks)) > 1:
                    # One of the objects is damaged; each alone shows which.
                    self._push(task.blocks, task.masks, task.when, urgent=True, alone=True)
                else:
                    if isinstance(error, MouseError):
                        error.__traceback__ = None  # it refers to the frames of this thread, and so to all objects
                    self.errors.update(dict.fromkeys((held if len(held) else task.blocks).tolist(), error))
        finally:
            with self.changed:
                if len(held):
                    self._waiting = -1  # fewer pages are in flight
                if again and not has_room and not self._closed:
                    heapq.heappush(self._heap, task)
                elif again and not self._closed:
                    self._later.append((time.monotonic() + _AGAIN_SECONDS, task))
                elif not task.urgent:
                    self._coming[task.blocks] &= ~task.masks
                self.changed.notify_all()
            self.reach()

    def _fetch(self, held: Int64s, masks: Int64s) -> None:
        """Fetch pages of blocks that are claimed."""
        try:
            wanted = Runs.of(self.keeper.known.of(held), held, masks)
            self.keeper.store(held, masks, wanted, *self._got(wanted))
        except BaseException:
            self.keeper.failed(held, masks)
            raise
        with self.changed:
            self._came.append((time.monotonic(), int(wanted.bounds[-1])))
            for block in held.tolist():
                self.errors.pop(block, None)

    def _got(self, wanted: Runs) -> tuple[list[memoryview], PageChecksums]:
        """Return the bytes of some runs of pages, and the digests of the pages, which equal the known ones.

        Raises:
            ChangedError: An object has another version now.
            DataError: An object is missing or damaged.
            StorageError: A request failed, and may succeed later.
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
        """Return the bytes of runs of pages, with repeated requests after temporary failures.

        Digests tell whether bytes are those that were written. So the version of an object with known digests is
        compared only after an error (``sure``).
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
                return self._requested(wanted, sure=sure)
            except StorageError:
                if self._limits.fail == "raise" and time.monotonic() + pause > until:
                    raise
                with self.changed:
                    is_closed = self.changed.wait_for(lambda: self._closed, pause * (0.5 + random.random()))
                if is_closed:
                    raise
            except DataError as error:
                if not sure:
                    sure = True
                    continue
                if len(objects) == 1:
                    objects[0].error = copy.copy(error)  # without its traceback, which refers to the reader
                raise
            self._counters.add(retries=1)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _requested(self, wanted: Runs, *, sure: bool) -> list[memoryview]:
        """Return the bytes of runs of pages, from one request."""
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


def _work(reference: Callable[[], Fetcher | None]) -> None:
    while True:
        fetcher = reference()
        if fetcher is None:
            return
        task = fetcher.next()
        if task is None:
            return
        fetcher.run(task)
        del fetcher, task
