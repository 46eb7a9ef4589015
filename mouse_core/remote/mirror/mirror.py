"""The local file that caches bytes of remote objects, and the state of each process that shares the file.

Threads fetch requested pages to the file, in the order in which the pages are expected to be read.
"""

from __future__ import annotations

import copy
import heapq
import mmap
import os
import random
import shutil
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mouse_core._base.checks import check_choice, check_count
from mouse_core._base.locks import ProcessLock, forks
from mouse_core.errors import ClosedError, DataError, MouseError, StorageError
from mouse_core.files.checksum import PAGE, PageChecksums
from mouse_core.files.writing import make_folder
from mouse_core.remote.clients import ObjectInfo
from mouse_core.remote.mirror.table import (
    BLOCK,
    Counters,
    Int64s,
    Keeper,
    Known,
    Limits,
    PageSums,
    Placed,
    Places,
    Runs,
    Sharer,
    SparseFile,
    Table,
    address_of,
    ascending,
    folder_of,
    joined,
    key_of,
    longer,
    pages_of,
    pieces,
    same_pages,
    touched,
)

# Largest number of requested batches that are not read yet; beyond it, the oldest are dropped, because an abandoned
# loader never reads its batches. From 64 below this number on, ``Pace.knows`` returns True, so no further batches are
# requested.
_MOST, _FEWER, _MOST_AHEAD = 4096, 64, 1 << 18
_FAR = 4096
# Weight of the last measurement.
_WEIGHT = 0.1


class _Asked(NamedTuple):
    """A requested batch: the index of the batch, its blocks as an array and as a list, its pages, and the expected time
    of reading.
    """

    batch: int
    blocks: Int64s
    numbers: list[int]
    pages: Int64s
    when: int

    def among(self, blocks: set[int]) -> bool:
        """Whether all blocks of the batch are in ``blocks``."""
        return blocks.issuperset(self.numbers)


class Pace:
    """Determines from the read blocks which batch a process is reading, and estimates when the next batches will be
    read.

    The unit of time is one batch read by any process; ``Table.tick`` advances the time. Example: if four processes read
    equally fast, a batch that is 10 ahead of the current batch will be read in 40 units of time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[_Asked] = deque()
        # By page: the times at which requested batches read the page. None until the mirror is full, because recording
        # takes long.
        self._uses: dict[int, list[int]] | None = None
        self._at: int | None = None
        self._ticks = 1.0
        # When requested batches were last read, the number of these batches, and the number of unknown reads since
        # then.
        self._last = self._count = self._unknown = 0
        self._read: Int64s | None = None
        self.pages_ahead = 0
        """Number of requested pages that are not read yet; a page counts once for each batch that reads the page."""

    def knows(self, pages: int) -> bool:
        """Whether at least ``pages`` pages, or as many pages as can be recorded, are requested and not read yet."""
        return self.pages_ahead >= min(pages, _MOST_AHEAD) or len(self._asked) >= _MOST - _FEWER

    def ahead(self, batch: int, blocks: Int64s, pages: Int64s, now: int) -> int:
        """Register a requested batch, and return the time at which it will be read.

        Args:
            batch: The index of the batch.
            blocks: The batch's blocks, ascending, int64 ``[n]``.
            pages: The batch's pages, int64 ``[m]``.
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
        """Whether a requested batch has not been read yet; the batch is recognised by the array object of its
        blocks."""
        with self._lock:
            return any(asked.blocks is blocks for asked in self._asked)

    def read(self, blocks: Int64s, pages: Int64s, now: int) -> tuple[int, Int64s]:
        """Record that blocks (ascending, int64 ``[n]``) and pages (int64 ``[m]``) are read now.

        Returns:
            The first value is the number of batches that were read, including skipped batches, at least 1; 0 if the
            same blocks were read immediately before, for example after an eviction. The second value is the time at
            which each page will be read again, int64 ``[m]``: ``now`` if the time is unknown or ``choose`` was not
            called.
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
        """Remove the oldest requested batch, and return the index of the batch."""
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
        """Remove the requested batches that read ``blocks``, and all earlier batches; return the number of removed
        batches.

        Some batches share blocks and cannot be identified by their blocks; such batches are skipped when the next batch
        is identified.
        """
        # Requested batches before the first batch that reads only these blocks count as skipped.
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
# Number of requests for damaged bytes, which may have been damaged in transit.
_TRIES = 3


# Number of threads; most requests wait for the network, without the interpreter.
_THREADS = 16
_IDLE_SECONDS = 2.0
# Number of pages in one call of a client, fewer if the mirror is full. A block counts as at least 4 pages, because it
# is probably a separate request.
_MOST_PAGES, _FEW_PAGES, _REQUEST_PAGES = 512, 256, 4
# No more pages are fetched ahead while the pages in flight exceed 2048 and the number that arrived in 0.1 s (measured
# over 0.5 s), because urgent pages share the network.
_ON_ITS_WAY, _RATE_SECONDS, _FEW_ON_ITS_WAY = 0.1, 0.5, 2048
# Seconds between two tries if the mirror has no room, or while another process fetches the pages.
_AGAIN_SECONDS = 0.01
# How far ahead pages are fetched to a full mirror, in the table's time.
_FIRST_HORIZON, _LONGEST_HORIZON, _SHRINKING = 2.0, 4096.0, 0.95
# Pages that are read later than this time are fetched for 8 batches together, ordered by position.
_NEAR, _TOGETHER = 32, 8
# Pages in flight or not read yet are at most this part of all pages: in a mirror with room, and in a full mirror.
_ROOM_PART, _AHEAD_PART = 2, 4


@dataclass(order=True)
class Task:
    """Pages to fetch with one call of a client.

    Args:
        when: The time at which the pages are read; 0 for pages that a reader waits for.
        number: The number of the task.
        blocks: Blocks, ascending, int64 ``[n]``.
        masks: The pages of each block, int64 ``[n]``.
        urgent: Whether a reader waits for the pages.
        steal: Whether to take over pages that another process has been fetching for too long.
    """

    when: int
    number: int
    blocks: Int64s = field(compare=False)
    masks: Int64s = field(compare=False)
    urgent: bool = field(default=False, compare=False)
    steal: bool = field(default=False, compare=False)


class Fetcher:
    """The threads of a process that fetch pages. A thread ends after some seconds without a task.

    Args:
        keeper: The object that writes fetched pages to the mirror.
        pace: The record of which batches were read.
    """

    def __init__(self, keeper: Keeper, pace: Pace) -> None:
        self.keeper, self._table, self._pace = keeper, keeper.table, pace
        self._limits, self._counters = keeper.limits, keeper.counters
        lock = threading.RLock()
        self._more = threading.Condition(lock)  # notified of new tasks
        self.changed = threading.Condition(lock)
        """A condition that is notified when pages arrived or a fetch failed."""
        self.errors: dict[int, Exception] = {}
        self._asked: list[tuple[int, int, Int64s, Int64s]] = []  # tasks not fetched yet: when, number, blocks, masks
        # pages that are fetched or in flight and not read: time, number of pages
        self._begun: deque[tuple[int, int]] = deque()
        self._begun_pages = 0  # sum of the pages above
        self._heap: list[Task] = []
        self._later: list[tuple[float, Task]] = []
        self._coming = np.zeros(0, np.int64)  # queued pages of each block
        self._tasks = self._threads = self._idle = 0
        self._closed = False
        self._waiting = -1  # the last time at which the mirror had no room
        self._came: deque[tuple[float, int]] = deque()  # arrivals: time and number of pages
        self._horizon = _FIRST_HORIZON

    # ------------------------------------------------------------------ requests of readers

    def ask(self, parts: Sequence[tuple[int, Int64s, Int64s]]) -> None:
        """Fetch pages before they are read, or verify pages that another process fetched.

        Args:
            parts: For each batch, the time at which it is read, its blocks, ascending, int64 ``[n]``, and the masks of
                their pages.
        """
        with self.changed:
            for when, blocks, masks in parts:
                self._tasks += 1
                heapq.heappush(self._asked, (when, self._tasks, blocks, masks))
        self.reach()

    def reach(self) -> None:
        """Start fetching requested pages, as far ahead as is useful.

        While the mirror has room, pages are fetched ahead until they fill half of the mirror. In a full mirror, new
        pages replace other pages, and pages that arrive too early replace useful pages, so pages are fetched just in
        time. Each wait of a reader doubles the distance of readahead, up to a quarter of the mirror.
        """
        self._follow()
        with self.changed:
            is_full, until = self.keeper.is_full(), self._table.clock + self._horizon
            while self._begun and self._begun[0][0] <= self._table.clock:
                self._begun_pages -= self._begun.popleft()[1]
            while self._asked and not self._is_begun_with(_ROOM_PART):
                when = self._asked[0][0]
                tasks = len(self._heap) + len(self._later) + self._threads - self._idle
                if is_full and (when > until or tasks >= _THREADS or self._is_begun_with(_AHEAD_PART)):
                    break
                is_far = not is_full and when > self._table.clock + _NEAR
                if is_far and len(self._asked) < _TOGETHER:
                    break  # fewer and larger requests need less processor time
                self._begin(_TOGETHER if is_far else 1)

    def _begin(self, count: int) -> None:
        """Start fetching the ``count`` requests whose pages are read first; the caller holds the lock ``changed``."""
        first = [heapq.heappop(self._asked) for _ in range(count)]
        # Requests that were read meanwhile are left out.
        first = [one for one in first if one[0] > self._table.clock or self._pace.awaits(one[2])]
        for when, _, _, masks in first:
            self._begun.append((when, self._table.count(masks)))
            self._begun_pages += self._begun[-1][1]
        if not first:
            return
        blocks, masks = joined([one[2:] for one in first])
        state = self._table.state[blocks]
        wanted = masks & ~state & ~self._coming[blocks]
        self._coming[blocks] |= wanted
        some = wanted != 0
        # Pages that other processes fetched are verified before they are used.
        some[np.searchsorted(blocks, self.keeper.unverified(blocks, state, masks))] = True
        self._push(blocks[some], masks[some], first[0][0])

    def _is_begun_with(self, part: int) -> bool:
        """Whether pages that are fetched or in flight, but not read yet, fill more than 1 / ``part`` of the mirror."""
        return self._begun_pages > self._limits.pages // part

    def bring(self, blocks: Int64s, masks: Int64s) -> None:
        """Wait until pages of ``blocks`` are present; raise the error of a failed fetch."""
        self._follow()
        table, began, pushed = self._table, time.monotonic(), -np.inf
        table.ask(pages_of(blocks, masks), table.clock + 1)
        with self.changed:
            # Pages that are in flight or not fetched yet were requested too late; pages that were evicted before their
            # use were fetched too early.
            late = bool((self._coming[blocks] & masks).any() or (self._asked and self._asked[0][0] <= table.clock + 1))
            self._horizon = float(np.clip(self._horizon * (2 if late else 0.5), _FIRST_HORIZON, _LONGEST_HORIZON))
            while True:
                if self._closed:
                    raise ClosedError("cache: expected an open cache, found a closed cache")
                lacking = (masks & ~table.state[blocks]) != 0
                if not lacking.any():
                    break
                blocks, masks = blocks[lacking], masks[lacking]
                self._raise(blocks)
                now, claims = time.monotonic(), table.claim[blocks]
                # Fetch pages that no process is fetching; after a while, also pages that other processes are fetching,
                # because they may have died.
                due = claims == 0 if now - pushed > _AGAIN_SECONDS / 2 else claims < 0
                if now - pushed > 10 * _AGAIN_SECONDS:
                    due = claims >= 0
                if due.any():
                    pushed = now
                    self._push(blocks[due], masks[due], 0, urgent=True, steal=now - began > self._limits.patience)
                self.changed.wait(_AGAIN_SECONDS / 2)

    def _raise(self, blocks: Int64s) -> None:
        """Raise the error of a block; each error is raised once."""
        for block in blocks.tolist():
            error = self.errors.pop(block, None)
            if error is not None:
                for other in blocks.tolist():
                    self.errors.pop(other, None)
                try:
                    raise error
                finally:
                    del error  # the error's traceback refers to this frame

    def queued(self) -> int:
        """Return the number of requested pages that are not present yet."""
        with self.changed:
            tasks = [*self._heap, *(task for _, task in self._later)]
            wanted = [(task.blocks, task.masks) for task in tasks] + [some[2:] for some in self._asked]
        lacking = (self._table.count(masks & ~self._table.state[blocks]) for blocks, masks in wanted)
        return sum(lacking) + self.keeper.in_flight

    def in_time(self) -> None:
        """Reduce the distance of readahead, because pages arrived in time."""
        self._horizon = max(_SHRINKING * self._horizon, _FIRST_HORIZON)

    def close(self) -> None:
        """Cancel all tasks that have not started."""
        with self.changed:
            self._closed = True
            self._asked.clear()
            self._heap.clear()
            self._later.clear()
            self._more.notify_all()
            self.changed.notify_all()

    def _follow(self) -> None:
        """Extend the arrays by the blocks that were assigned to objects since the last call."""
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
        """Queue a task for each call of a client; the caller holds the lock of ``changed``."""
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
        """Return the first due task; None if the thread must end."""
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
        """Whether enough pages are in flight, so that starting further requests brings no advantage."""
        while self._came and self._came[0][0] < now - _RATE_SECONDS:
            self._came.popleft()
        rate = sum(pages for _, pages in self._came) / _RATE_SECONDS
        return self.keeper.in_flight > max(_FEW_ON_ITS_WAY, rate * _ON_ITS_WAY)

    def run(self, task: Task) -> None:
        """Fetch the missing pages of a task; an error is stored for the waiting reader."""
        held, again, has_room = task.blocks[:0], False, True
        try:
            state = self._table.state[task.blocks]
            self.keeper.verify(task.blocks[(state & task.masks) != 0])
            now = self._table.clock
            claimed = self.keeper.claim(task.blocks, task.masks, task.when, urgent=task.urgent, steal=task.steal)
            if claimed is None:
                # Later tasks find no room, either, until more pages are read.
                self._waiting, has_room = now, False
            else:
                held = claimed[0]
                if len(held):
                    self._fetch(*claimed)
            again = bool((task.masks & ~self._table.state[task.blocks]).any()) and not task.urgent
        except Exception as error:
            with self.changed:
                if isinstance(error, DataError) and len(self.keeper.known.of(task.blocks)) > 1:
                    # One of the objects is damaged; fetch each object separately to find it.
                    self._push(task.blocks, task.masks, task.when, urgent=True, alone=True)
                else:
                    if isinstance(error, MouseError):
                        # the error refers to the frames of this thread, and thus to all objects
                        error.__traceback__ = None
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
        """Fetch pages of claimed blocks."""
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
        """Fetch runs of pages and compare their checksums with the known checksums; return the bytes and the checksums.

        Raises:
            ChangedError: The version of an object has changed.
            DataError: An object is missing or damaged.
            StorageError: A request failed; a later request can succeed.
        """
        tries = 0
        while True:
            contents = self._reached(wanted, sure=tries > 0)
            checksums = wanted.checksums(contents)
            error = wanted.wrong(checksums)
            if error is None:
                return contents, checksums
            tries += 1
            self._counters.add(damaged=1, retries=tries < _TRIES)
            if tries == _TRIES:
                try:
                    raise error
                finally:
                    del error

    def _reached(self, wanted: Runs, *, sure: bool) -> list[memoryview]:
        """Return the bytes of runs of pages; requests are repeated after temporary failures.

        Digests show whether the received bytes equal the written bytes. Therefore, if the checksums of an object are
        known, the version of the object is compared only after an error (``sure``).
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
                    objects[0].error = copy.copy(error)  # without the traceback, which refers to the reader
                raise
            self._counters.add(retries=1)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _requested(self, wanted: Runs, *, sure: bool) -> list[memoryview]:
        """Return the bytes of runs of pages, from one request."""
        objects, (begins, ends) = wanted.objects, (some.tolist() for some in wanted.bytes())
        client = objects[0].client
        paths = [one.info.path for one in objects]
        versions = {one.info.path: one.info.version if sure or one.sums is None else "" for one in objects}
        ranges = zip([paths[number] for number in wanted.whose.tolist()], begins, ends, strict=True)
        contents = [memoryview(one).cast("B") for one in client.get_all(list(ranges), versions)]
        sizes = np.fromiter(map(len, contents), np.int64, len(contents))
        short = np.flatnonzero(sizes != np.subtract(ends, begins))
        if len(short):
            one = int(short[0])
            path, begin, end = paths[int(wanted.whose[one])], begins[one], ends[one]
            raise StorageError(f"{path}: expected the bytes {begin}..{end - 1}, found {sizes[one]} bytes")
        self._counters.add(fetched=int(sizes.sum()))
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


# To sort the ranges of several batches together, each batch gets an offset of this size.
_APART = 1 << 48


class Process:
    """The state of one process that shares a mirror."""

    def __init__(self, inside: Path, table: Table, file: SparseFile, memory: Any, known: Known, limits: Limits) -> None:
        self.sharer, self.counters, self.pace = Sharer(inside / "sharers"), Counters(), Pace()
        self.keeper = Keeper(table, file, memory, known, self.sharer, limits, self.counters)
        self.fetcher = Fetcher(self.keeper, self.pace)
        self._table, self._limits = table, limits
        self._forks = forks()

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Request ranges of the mirror that batches will read; see ``RemoteMemory.ask``."""
        heads = np.flatnonzero(np.append(True, batches[1:] != batches[:-1]))
        apart = np.repeat(np.arange(len(heads)) * _APART, np.diff(np.append(heads, len(batches))))
        blocks, masks = touched(begins + apart, ends + apart)
        pages = pages_of(blocks, masks)
        firsts = np.arange(len(heads) + 1) * _APART
        by_block, by_page = np.searchsorted(blocks, firsts // BLOCK), np.searchsorted(pages, firsts // PAGE)
        blocks, pages = blocks % (_APART // BLOCK), pages % (_APART // PAGE)
        parts = []
        for number, batch in enumerate(batches[heads].tolist()):
            some, few = slice(*by_block[number : number + 2]), slice(*by_page[number : number + 2])
            when = self.pace.ahead(batch, blocks[some], pages[few], self._table.clock)
            parts.append((when, blocks[some], masks[some]))
        # The first batch that reads a page is recorded last, so its time counts.
        whens = np.repeat(np.array([when for when, _, _ in parts], np.int64), np.diff(by_page))
        self._table.ask(pages[::-1], whens[::-1])
        if self.keeper.is_full():
            self.pace.choose()
        self.fetcher.ask(parts)

    def end(self) -> None:
        """Stop fetching, and remove this process from the sharers of the mirror; in a forked child, do nothing."""
        if self._forks != forks():
            return
        self.fetcher.close()
        self.sharer.leave()


# Size in bytes of one piece of a private copy.
_PIECE = 8 << 20
_LEAST_BYTES = 4 << 20
# Batches are requested ahead until their pages are 4 times the pages of the mirror. Pages that are needed later than
# all requested batches may be evicted.
_KNOWN = 4
VARIABLE = "MOUSE_CACHE"
"""Name of the environment variable with the folder of caches."""


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of caches: ``cache``, else the folder in ``MOUSE_CACHE``, else ``mouse-data`` in the system's
    cache directory.
    """
    named = cache or os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mouse-data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mouse-data"


class Mirror:
    """A local sparse file that contains remote objects one after another; pages are fetched on request.

    All processes of a machine share the file: each byte is fetched once, and no process evicts pages that another
    process reads soon. An object is identified by its content, so a changed object is stored as a new object. Later
    runs of a program use the same cache. The file is not trusted: before a process reads pages that another process
    wrote, the process compares the checksums of these pages.

    Args:
        cache: The folder, on a local disk; see ``cache_folder``. A missing folder is created.
        cache_bytes: Largest size in bytes, at least 4 MB; None: half of the free space on the disk. Above the limit,
            pages are evicted: first the pages that requested batches need latest. All pages of one batch are kept, even
            if these pages exceed ``cache_bytes``.
        fail: How long a request is repeated after a temporary failure, with growing pauses. With "raise", the request
            is repeated for ``patience`` seconds, and then the reader gets the error; with "retry", the request is
            repeated without end. On a full disk, fewer pages are kept.
        patience: How long a request is repeated if ``fail`` is "raise", in seconds.

    Raises:
        ConfigError: A limit is invalid, or the system has no file locks.
        StorageError: The folder cannot be created or written.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str] | None = None,
        *,
        cache_bytes: int | None = None,
        fail: Literal["raise", "retry"] = "raise",
        patience: float = 30.0,
    ) -> None:
        check_choice("fail", fail, ("raise", "retry"))
        if cache_bytes is not None:
            check_count("cache_bytes", cache_bytes, _LEAST_BYTES)
        self.folder = cache_folder(cache).absolute()
        self._options: dict[str, Any] = {"cache_bytes": cache_bytes, "fail": fail, "patience": patience}
        inside = folder_of(self.folder)
        try:
            make_folder(inside, sync=False)
            self._table = Table(inside)
            self._file = SparseFile(inside / "bytes")
            self._places = Places(inside / "objects")
            if cache_bytes is None:
                cache_bytes = max(_LEAST_BYTES, shutil.disk_usage(inside).free // 2 + self._table.pages * PAGE)
            self._limits = Limits(cache_bytes // PAGE, fail, patience)
            self._inside, self._lock, self._known = inside, ProcessLock(), Known()
            # The newest map, while it is in use. The map refers to the mirror, which is closed when its last user is
            # deleted.
            self._memory: mmap.mmap | None = None
            self._newest: Callable[[], _Map | None] = lambda: None
            self._processes: dict[int, Process] = {}
            self._process().sharer.remove_dead()
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cache {str(self.folder)!r}: cannot write to this folder: {error}") from error

    def add(self, client: Any, infos: Sequence[ObjectInfo], sums: Sequence[PageSums] = ()) -> list[MirrorObject]:
        """Assign positions in the mirror to objects, and return the objects; no byte is fetched.

        Args:
            client: The client of the objects.
            infos: The objects, from ``client.head``.
            sums: The source of each object's page checksums, with which fetched pages are compared; empty: pages are
                not compared.

        Raises:
            StorageError: The cache has no room for the list of objects.
        """
        known: Sequence[PageSums | None] = sums or [None] * len(infos)
        keys = [key_of(client.url, info, verified=bool(sums)) for info in infos]
        try:
            with self._lock, self._table.lock:
                self._places.follow()
                self._places.blocks = max(self._places.blocks, self._table.blocks)
                begins = self._places.place(keys, [info.size for info in infos])
                if self._places.blocks > self._table.blocks:
                    self._table.grow(self._places.blocks, lambda blocks: self._file.lengthen(blocks * BLOCK))
                self._table.follow()
                self._file.lengthen(self._table.room * BLOCK)  # another program may have removed or truncated the file
                placed = [
                    self._known.get(begin) or Placed(client, info, begin * BLOCK, key & 0xFFFFFFFF, found)
                    for begin, key, info, found in zip(begins, keys, infos, known, strict=True)
                ]
                for one in placed:
                    one.client, one.error = client, None
                self._known.add(placed)
                last = max((one.end for one in placed), default=0)
                found_map = self._map(last)
        except OSError as error:
            raise StorageError(f"cache {str(self.folder)!r}: expected free space, found {error}") from error
        return [MirrorObject(found_map, found_map.begin + one.begin, one.info) for one in placed]

    def _map(self, size: int) -> _Map:
        """Return a map of at least ``size`` bytes. Earlier maps stay valid, because addresses in these maps are in
        use.
        """
        if self._memory is None or len(self._memory) < size:
            self._memory, self._newest = self._file.map(), lambda: None
            for process in self._processes.values():
                process.keeper.memory = self._memory
        found = self._newest()
        if found is None:
            found = _Map(self, self._memory)
            self._newest = weakref.ref(found)
        return found

    def counters(self) -> dict[str, float]:
        """Return this process's counters: the sums of ``Counters``, the bytes of requested pages that have not arrived
        (``queued``), and the bytes in the cache (``kept``).
        """
        process = self._process()
        more = {"queued": process.fetcher.queued() * PAGE, "kept": self._table.pages * PAGE}
        return process.counters.said() | more

    def close(self) -> None:
        """Stop fetching. Maps stay valid until their last user is deleted."""
        for process in self._processes.values():
            process.end()

    # ------------------------------------------------------------------ for maps and objects

    def _process(self) -> Process:
        """Return the state of this process; a forked child gets a new state."""
        found = self._processes.get(forks())
        if found is None:
            with self._lock:
                found = self._processes.get(forks())
                if found is None:
                    found = Process(self._inside, self._table, self._file, self._memory, self._known, self._limits)
                    weakref.finalize(self, found.end)
                    self._processes = {forks(): found}
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Mirror, str(self.folder), **self._options), ()


class MirrorObject(NamedTuple):
    """An object in a mirror.

    Args:
        backing: The memory of the object; call its ``wait`` before bytes are copied.
        address: The address of the first byte, valid as long as ``backing`` exists.
        info: Path, size and version of the object.
    """

    backing: _Map
    address: int
    info: ObjectInfo


class _Map:
    """The mirror's file as mapped memory, a ``RemoteMemory``."""

    # Ranges with a page between them are not joined here, because the mirror joins requests.
    gap = PAGE - 1

    def __init__(self, mirror: Mirror, memory: mmap.mmap) -> None:
        self._mirror, self._table, self.memory = mirror, mirror._table, memory
        self.begin, self.size = address_of(memory), len(memory)
        self.room: int | None = mirror._limits.pages * PAGE

    def ask(self, begins: Int64s, ends: Int64s, batches: Int64s) -> None:
        """Request ranges of addresses that batches will read; see ``RemoteMemory.ask``."""
        if len(begins):
            self._mirror._process().ask(begins - self.begin, ends - self.begin, batches)

    def looks_further(self) -> bool:
        """Whether requests of later batches would improve the choice of pages to evict."""
        process = self._mirror._process()
        return process.keeper.is_full() and not process.pace.knows(_KNOWN * self._mirror._limits.pages)

    def there(self, begins: Int64s, ends: Int64s) -> bool:
        """Return whether the bytes in ranges of addresses are present."""
        process = self._mirror._process()
        if process.keeper.is_full():
            return False  # in a full mirror, each batch waits separately
        blocks, masks = touched(begins - self.begin, ends - self.begin)
        return not (masks & ~self._table.state[blocks]).any()

    def wait(self, begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Wait until the bytes in ranges of addresses are present; return a token, the argument of ``still``."""
        process, table = self._mirror._process(), self._table
        blocks, masks = touched(begins - self.begin, ends - self.begin)
        pages, waited = pages_of(blocks, masks), False
        while True:
            states = table.state[blocks]
            lacking = (masks & ~states) != 0
            if lacking.any():
                waited = True
                table.ask(pages, table.clock + 1)  # so that the other pages of these batches are not evicted
                process.fetcher.bring(blocks[lacking], masks[lacking])
                continue
            unverified = process.keeper.unverified(blocks, states, masks)
            if not len(unverified):
                break
            process.keeper.verify(unverified)
        if not len(blocks):
            return blocks, blocks, blocks
        count, again = process.pace.read(blocks, pages, table.clock)
        table.tick(count)
        table.use(pages, again)
        if not waited:
            process.fetcher.in_time()
        process.fetcher.reach()
        process.counters.add(read=len(pages) * PAGE if count else 0)
        return blocks, masks, states

    def still(self, token: Any) -> bool:
        """Return whether no page was evicted since ``wait``."""
        blocks, masks, states = token
        return bool(same_pages(self._table.state[blocks], states, masks).all())

    def read(self, begins: Int64s, ends: Int64s) -> list[bytes]:
        """Return copies of the bytes in ranges of addresses, in any order, of any objects."""
        found: list[bytes] = []
        if len(begins) and int((ends - begins).sum()) > _PIECE:
            wanted = touched(*ascending(begins - self.begin, ends - self.begin))
            self._mirror._process().fetcher.ask([(self._table.clock + 1, *wanted)])
        for first, behind in pieces(ends - begins, _PIECE):
            if int(ends[first] - begins[first]) > _PIECE:
                cuts = np.append(np.arange(begins[first], ends[first], _PIECE), ends[first])
                found.append(b"".join(self.read(cuts[:-1], cuts[1:])))
                continue
            part = list(zip(begins[first:behind].tolist(), ends[first:behind].tolist(), strict=True))
            ranges = ascending(begins[first:behind], ends[first:behind])
            while True:
                token = self.wait(*ranges)
                copies = [self.memory[begin - self.begin : end - self.begin] for begin, end in part]
                if self.still(token):
                    break
            found += copies
        return found

    def counters(self) -> dict[str, float]:
        """See ``Mirror.counters``."""
        return self._mirror.counters()
