"""Threads that bring what is asked for into a mirror, what is read first before the rest."""

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
from typing import Any

import numpy as np

from mouse_core.errors import ClosedError, DataError, MouseError, StorageError
from mouse_core.files.checksum import PageChecksums
from mouse_core.remote.mirror.keeping import Keeper, longer
from mouse_core.remote.mirror.objects import Runs
from mouse_core.remote.mirror.pace import Pace
from mouse_core.remote.mirror.pages import Int64s, joined, pages_of, pieces

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
# What came damaged is asked for so often, as it may have been damaged on the way.
_TRIES = 3


# Most requests wait for the network, in which Python takes no part.
_THREADS = 16
_IDLE_SECONDS = 2.0
# One call of a client brings at most so many pages, fewer where something must go for them; a block counts as some, as
# it is likely a request.
_MOST_PAGES, _FEW_PAGES, _REQUEST_PAGES = 512, 256, 4
# Nothing more is begun with ahead while as much is on its way as came in so many seconds, of the last so many, but for
# so many pages: what is read first shares the network with it.
_ON_ITS_WAY, _RATE_SECONDS, _FEW_ON_ITS_WAY = 0.1, 0.5, 2048
# Who finds no room, or pages that are being fetched already, looks again.
_AGAIN_SECONDS = 0.01
# How far ahead things come where others must go for them, in the table's time.
_FIRST_HORIZON, _LONGEST_HORIZON, _SHRINKING = 2.0, 4096.0, 0.95
# What is read no sooner than that is begun with so many batches at a time, in the order in which it lies.
_NEAR, _TOGETHER = 32, 8
# What is begun with and not read yet is at most this part of all that is kept: as long as there is room, and then.
_ROOM_PART, _AHEAD_PART = 2, 4


@dataclass(order=True)
class Task:
    """Pages that are to come with one call of a client.

    Args:
        when: When they are read; what is waited for has a time before all others.
        number: Counts tasks.
        blocks: Blocks, ascending, int64 ``[n]``.
        masks: Pages of each, int64 ``[n]``.
        urgent: Whether somebody waits for them.
        steal: Whether to take over what another process has been fetching for too long.
    """

    when: int
    number: int
    blocks: Int64s = field(compare=False)
    masks: Int64s = field(compare=False)
    urgent: bool = field(default=False, compare=False)
    steal: bool = field(default=False, compare=False)


class Fetcher:
    """The threads of a process that fetch. They end when there is nothing to do for some seconds.

    Args:
        keeper: Puts into the mirror what they bring.
        pace: Knows what was read meanwhile.
    """

    def __init__(self, keeper: Keeper, pace: Pace) -> None:
        self.keeper, self._table, self._pace = keeper, keeper.table, pace
        self._limits, self._counters = keeper.limits, keeper.counters
        lock = threading.RLock()
        self._more = threading.Condition(lock)  # told when there is something to do
        self.changed = threading.Condition(lock)
        """Told when pages came, or could not."""
        self.errors: dict[int, Exception] = {}
        self._asked: list[tuple[int, int, Int64s, Int64s]] = []  # not begun with: when, number, blocks, masks
        self._begun: deque[tuple[int, int]] = deque()  # begun with and not read: when, pages
        self._begun_pages = 0  # of all of them
        self._heap: list[Task] = []
        self._later: list[tuple[float, Task]] = []
        self._coming = np.zeros(0, np.int64)  # pages of each block that are queued
        self._tasks = self._threads = self._idle = 0
        self._closed = False
        self._waiting = -1  # the time at which there was no room
        self._came: deque[tuple[float, int]] = deque()  # when pages came, and how many
        self._horizon = _FIRST_HORIZON

    # ------------------------------------------------------------------ what others ask for

    def ask(self, parts: Sequence[tuple[int, Int64s, Int64s]]) -> None:
        """Have pages of some blocks brought until a time, and looked at where another process brought them.

        Args:
            parts: Several of that: a time, blocks, ascending, int64 ``[n]``, and masks.
        """
        with self.changed:
            for when, blocks, masks in parts:
                self._tasks += 1
                heapq.heappush(self._asked, (when, self._tasks, blocks, masks))
        self.reach()

    def reach(self) -> None:
        """Begin with what was asked for, as far ahead as it pays.

        As long as there is room, that is up to half of what is kept. Then what comes takes the place of something else,
        and the earlier it comes, the sooner that has to go: so it comes just in time. Whatever had to be waited for
        doubles the time, as far as a part of all that is kept goes: of the rest what is there may have to go too soon.
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
                    break  # fewer and fuller requests take less of the processor
                self._begin(_TOGETHER if is_far else 1)

    def _begin(self, count: int) -> None:
        """Begin with so many of what was asked for, those that are read first; ``changed`` is held."""
        first = [heapq.heappop(self._asked) for _ in range(count)]
        # Without what was read meanwhile.
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
        # What others brought is looked at, too, before it is read.
        some[np.searchsorted(blocks, self.keeper.unverified(blocks, state, masks))] = True
        self._push(blocks[some], masks[some], first[0][0])

    def _is_busy(self) -> bool:
        """Whether enough is on its way, or asked for and not read yet."""
        tasks = len(self._heap) + len(self._later) + self._threads - self._idle
        return tasks >= _THREADS or self._is_begun_with(_AHEAD_PART)

    def _is_begun_with(self, part: int) -> bool:
        """Whether more than one of so many parts of all that is kept is begun with and not read yet."""
        return self._begun_pages > self._limits.pages // part

    def bring(self, blocks: Int64s, masks: Int64s) -> None:
        """Wait until pages of some blocks are there; raises what went wrong with them."""
        self._follow()
        table, began, pushed = self._table, time.monotonic(), -np.inf
        table.ask(pages_of(blocks, masks), table.clock + 1)
        with self.changed:
            # What was on its way, or not begun with, came too late; what had to go before it was read, too early.
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
                # What nobody fetches (any more), and now and then what others do, who may have died.
                due = claims == 0 if now - pushed > _AGAIN_SECONDS / 2 else claims < 0
                if now - pushed > 10 * _AGAIN_SECONDS:
                    due = claims >= 0
                if due.any():
                    pushed = now
                    self._push(blocks[due], masks[due], 0, urgent=True, steal=now - began > self._limits.patience)
                self.changed.wait(_AGAIN_SECONDS / 2)
        self._counters.add(waits=1, seconds=time.monotonic() - began)

    def _raise(self, blocks: Int64s) -> None:
        """Raise what went wrong with a block, once."""
        for block in blocks.tolist():
            error = self.errors.pop(block, None)
            if error is not None:
                for other in blocks.tolist():
                    self.errors.pop(other, None)
                try:
                    raise error
                finally:
                    del error  # whose traceback has this frame

    def queued(self) -> int:
        """Return how many pages are requested and not there yet."""
        with self.changed:
            tasks = [*self._heap, *(task for _, task in self._later)]
            wanted = [(task.blocks, task.masks) for task in tasks] + [some[2:] for some in self._asked]
        lacking = (self._table.count(masks & ~self._table.state[blocks]) for blocks, masks in wanted)
        return sum(lacking) + self.keeper.in_flight

    def in_time(self) -> None:
        """Something was there when it was to be read: less far ahead may do."""
        self._horizon = max(_SHRINKING * self._horizon, _FIRST_HORIZON)

    def close(self) -> None:
        """Begin nothing more."""
        with self.changed:
            self._closed = True
            self._asked.clear()
            self._heap.clear()
            self._later.clear()
            self._more.notify_all()
            self.changed.notify_all()

    def _follow(self) -> None:
        """Have room for blocks that objects were given meanwhile."""
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
        """Queue what is to come, a task for what one call brings; ``changed`` is held."""
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

    # ------------------------------------------------------------------ what the threads do

    def next(self) -> Task | None:
        """The task that is due first; None where this thread is to end."""
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
        """Whether so much is on its way that more would come no sooner."""
        while self._came and self._came[0][0] < now - _RATE_SECONDS:
            self._came.popleft()
        rate = sum(pages for _, pages in self._came) / _RATE_SECONDS
        return self.keeper.in_flight > max(_FEW_ON_ITS_WAY, rate * _ON_ITS_WAY)

    def run(self, task: Task) -> None:
        """Bring what is not there of a task; what went wrong is kept for whoever waits."""
        held, again, has_room = task.blocks[:0], False, True
        try:
            state = self._table.state[task.blocks]
            self.keeper.verify(task.blocks[(state & task.masks) != 0])
            now = self._table.clock
            claimed = self.keeper.claim(task.blocks, task.masks, task.when, urgent=task.urgent, steal=task.steal)
            if claimed is None:
                # What is read later finds no room either, as long as nothing more was read.
                self._waiting, has_room = now, False
            else:
                held = claimed[0]
                if len(held):
                    self._fetch(*claimed)
            again = bool((task.masks & ~self._table.state[task.blocks]).any()) and not task.urgent
        except Exception as error:
            with self.changed:
                if isinstance(error, DataError) and len(self.keeper.known.of(task.blocks)) > 1:
                    # It is wrong with one of the objects; each by itself says with which.
                    self._push(task.blocks, task.masks, task.when, urgent=True, alone=True)
                else:
                    if isinstance(error, MouseError):
                        error.__traceback__ = None  # it has this thread's frames, and they all that there is
                    self.errors.update(dict.fromkeys((held if len(held) else task.blocks).tolist(), error))
        finally:
            with self.changed:
                if len(held):
                    self._waiting = -1  # what came is not on its way any more
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
                    objects[0].error = copy.copy(error)  # it stays so; its traceback would keep whoever asked
                raise
            self._counters.add(retries=1)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _requested(self, wanted: Runs, *, sure: bool) -> list[memoryview]:
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
