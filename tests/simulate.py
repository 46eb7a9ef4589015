"""Simulated worlds in which files, disks, clocks, networks and processes fail; a seed replays a world.

A world is a folder with one durable object: a log, a store, a store that clients share over a network, mapped rows, a
buffer of rollouts, or a cache of remote objects. The first process makes random calls. Meanwhile a second process reads
the folder; where only one process may write, the second process also tries to write, which must raise ConfigError. A
plan chooses the system calls of the first process that fail:

    kill, half    the process is killed at the call, or after half of the bytes of a write
    stop          the process is killed some lines of Python later, such as between two writes to mapped memory
    power         the power is cut: of the bytes and names that were not synced, some are lost, torn or out of order
    full          the disk is full for some calls
    error         the call fails with EIO
    unsynced      the next sync of a file or folder fails with EIO
    short         a write writes half of its bytes, as after a signal

The clock jumps, and messages to a shared store are lost, doubled and delayed. When the first process ends, the second
process compares the folder with the promises of docs/guides/store-on-disk.md. The next life of the first process
continues with the folder, until the world has had a fault and 200 operations. An operation is a system call that
changes files, so that a fault can strike there. A call that only writes to mapped memory or reads is an operation, too.

    python -m tests.simulate --seed 7                  one world; a broken promise is shortened and traced
    python -m tests.simulate --worlds 20000 --jobs 2   many worlds; prints the seeds that break a promise
"""

from __future__ import annotations

import argparse
import errno
import gc
import itertools
import json
import math
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mouse_core import ConfigError, DataError, DatasetStore, StateError, StorageError
from mouse_core.collect.shared import SharedStore
from mouse_core.collect.wire import encoded
from mouse_core.files import locking, writing
from mouse_core.files.log import Log, follow_log, read_log
from mouse_core.groups import stored, waiting
from mouse_core.remote.mirror import Mirror, MirrorObject
from mouse_core.replay import MemmapStorage
from tests.core import groups_crash, store_crash
from tests.core.disk_cases import KINDS as ROWS
from tests.core.disk_cases import numbers_in
from tests.core.killing import forked
from tests.core.mirror_cases import Objects, read
from tests.core.power_cut import Disk, write_tree

WRITES = ("write", "pwrite")
GROWS = ("write", "open", "mkdir", "posix_fallocate", "link")
CALLS = (*GROWS, "pwrite", "ftruncate", "fsync", "fdatasync", "replace", "rename", "unlink", "rmdir")
SYNCS = ("fsync", "fdatasync")
FAULTS = ("kill", "half", "stop", "power", "power", "full", "error", "unsynced", "short")
"""A power cut is twice as likely, since it is where most mistakes show."""
KILLED, CUT = 9, 10
"""Exit codes of a life that a fault ended."""
OPERATIONS = 200
"""Least number of operations of a world."""
LIFE = 200
"""Number of operations of a life without a deadly fault."""
SECONDS = 30
BLOCK = 20
"""Worlds that a process runs before it reports."""
FOLDERS = "/dev/shm" if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm") else None
"""Where the folders of worlds are: in memory if possible; None: the folder for temporary files."""
FULL_FOR = 12
"""Calls for which a disk is full."""


@dataclass(frozen=True)
class Plan:
    """The faults of one life.

    Args:
        seed: The seed of the random choices of the process.
        faults: The faults; each strikes the first possible call after its number of operations.
        looks: The numbers of operations after which the second process reads.
    """

    seed: int
    faults: list[tuple[int, str]]
    looks: frozenset[int]


class Start:
    """The number of the machine's start, in the place of a file of the system.

    Args:
        total: Shared between processes; the third number is the number of the start.
    """

    def __init__(self, total: NDArray[np.int64]) -> None:
        self._total = total

    def read_text(self) -> str:
        """Return the number as the system writes it."""
        return f"{self._total[2]:015x}"


class Pool(ThreadPoolExecutor):
    """A pool without threads, whose calls are made at once, in an order that a seed chooses.

    A life then depends less on the system's scheduler, and starts no threads, which take longer than the calls.
    """

    rng = random.Random(0)

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(call(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future

    def map(self, call: Callable[..., Any], *iterables: Any, **options: Any) -> Iterator[Any]:
        calls = list(zip(*iterables, strict=False))
        futures = {at: self.submit(call, *calls[at]) for at in self.rng.sample(range(len(calls)), len(calls))}
        return (futures[at].result() for at in range(len(calls)))


def prepare(total: NDArray[np.int64], seed: int) -> None:
    """Let this process read the number of the machine's start from ``total``, and use no pools of threads."""
    locking._BOOT = Start(total)
    Pool.rng = random.Random(seed)
    for module in (writing, stored, waiting):
        module.ThreadPoolExecutor = Pool
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


class System:
    """The calls of ``os`` of a process, with the faults of a plan.

    Args:
        plan: The faults.
        root: The folder whose files a power cut hits.
        total: Shared between processes: the numbers of operations and of faults, and of the machine's start.
        look: Lets the other process look; None: ``is_due`` is set instead.
        trace: Takes a line for each call; None: no trace.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        total: NDArray[np.int64],
        look: Callable[[], None] | None,
        trace: Callable[[str], None] | None,
    ) -> None:
        self.plan, self.root, self.total, self.trace = plan, root, total, trace
        self.look, self.is_due = look, False
        self.faults = sorted(plan.faults, reverse=True)
        self.disk = Disk(root) if any(fault == "power" for _, fault in plan.faults) else None
        self.count = self.full_until = 0
        self._rng, self._time, self._jump = random.Random(plan.seed), time.time, 0.0
        self._thread, self._lock, self._is_over = threading.get_ident(), threading.RLock(), False

    def install(self) -> None:
        """Replace the calls of ``os`` in this process."""
        for name in CALLS:
            setattr(os, name, partial(self._call, name, getattr(os, name)))
        time.time = self._clock

    def counts(self) -> None:
        """Count an operation."""
        self.count += 1
        self.total[0] += 1

    def _clock(self) -> float:
        if self._rng.random() < 0.02:
            self._jump = self._rng.uniform(-1e5, 1e5)
        return self._time() + self._jump

    def _stop_after(self, lines: int) -> None:
        """Kill this process after ``lines`` more lines of the core, in functions that are called from now on."""

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if "mouse_core" not in frame.f_code.co_filename:
                return None
            lines -= event == "line"
            if lines < 0:
                os._exit(KILLED)
            return trace

        sys.settrace(trace)

    def _can(self, fault: str, name: str, arguments: tuple[Any, ...]) -> bool:
        """Return whether a fault can strike a call."""
        if fault in ("half", "short"):
            return name in WRITES and len(arguments[1]) > 1
        if fault == "unsynced":
            return name in SYNCS
        return fault != "full" or self._grows(name, arguments)

    def _grows(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Return whether a call needs more space on the disk."""
        if name in ("pwrite", "ftruncate"):
            end = arguments[1] if name == "ftruncate" else arguments[2] + len(arguments[1])
            return end > os.fstat(arguments[0]).st_size
        return name in GROWS

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if name == "open" and not arguments[1] & os.O_CREAT:
            return call(*arguments, **options)
        # Once the power is cut, no other thread brings anything to the disk.
        with self._lock:
            done = self._fail_or_do(name, call, *arguments, **options)
        if self.count in self.plan.looks and threading.get_ident() == self._thread:
            self.is_due = self.look is None
            if self.look:
                self.look()
        return done

    def _fail_or_do(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._is_over:
            return call(*arguments, **options)
        self.counts()
        fault = ""
        if self.faults and self.faults[-1][0] <= self.count and self._can(self.faults[-1][1], name, arguments):
            fault = self.faults.pop()[1]
            self.total[1] += 1
        if self.trace:
            self.trace(f"  {self.count}: {name} {str(arguments)[:110]}{f'  <- {fault}' if fault else ''}")

        def half() -> Any:
            return call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], *arguments[2:])

        if fault in ("kill", "half"):
            if fault == "half":
                half()
            os._exit(KILLED)
        if fault == "stop":
            self._stop_after(self._rng.randrange(1000))
        if fault == "power" and self.disk:
            left, self._is_over = self.disk.left(self._rng), True
            write_tree(self.root.with_name("cut"), left)
            os._exit(CUT)
        if fault == "full":
            self.full_until = self.count + FULL_FOR
        if self.count < self.full_until and self._grows(name, arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault in ("error", "unsynced"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "short":
            return half()
        done = call(*arguments, **options)
        if name in SYNCS and self.disk:
            self.disk.sync(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        return done


Say = Callable[..., None]


@dataclass
class World:
    """A durable object in a folder, and its promises. Subclasses define the calls and the checks.

    Args:
        options: The options with which the object is opened.
        known: The state after the lives before: JSON values.
    """

    options: dict[str, Any]
    known: dict[str, Any] = field(default_factory=dict)

    FAULTS = FAULTS
    LOCKS = False
    """Whether a call holds a lock that the other process needs; the other process then looks between two calls."""

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        """Return a new world."""
        raise NotImplementedError

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[bool]:
        """Make a random call before each next value; the value is whether no other process may write."""
        raise NotImplementedError

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        """Raise AssertionError if a promise is broken; return ``known`` for the next life.

        Args:
            folder: The folder after the life.
            said: The reports of the life, in order.
            cut: Whether the power was cut, so that only synced rows are promised.
        """
        raise NotImplementedError

    def reader(self, folder: Path) -> Callable[[], None]:
        """Return the function with which the other process looks."""
        return lambda: None

    def writer(self, folder: Path) -> Any:
        """Open the folder to write; the other process tries this while no other process may write."""
        raise NotImplementedError


class OfLog(World):
    """A log of numbered records."""

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({}, {"first": 0, "acknowledged": 0, "synced": 0, "begun": 0})

    @staticmethod
    def record(number: int) -> bytes:
        return number.to_bytes(4, "little") * (1 + number * 7 % 50)

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[bool]:
        log, number = Log(folder / "log"), self.known["begun"]
        number = self._numbers(log.records).stop or number
        while True:
            yield False
            what = rng.choices(("append", "rewrite", "reopen"), (86, 6, 8))[0]
            if what == "append":
                sync = rng.random() < 0.3
                say("begins", number + 1)
                try:
                    log.append(self.record(number), sync=sync)
                except StorageError as error:
                    if error.__cause__ is None or error.__cause__.__context__:
                        raise  # a second error, which kept the log from being cut
                    found = self._numbers(read_log(folder / "log")).stop
                    assert found in (0, number), f"after an error the log is changed: {found}, before {number}"
                    if rng.random() < 0.5:
                        raise
                    continue
                number += 1
                say("appended", number, sync)
            elif what == "rewrite":
                records = read_log(folder / "log")
                if len(records) > 1:
                    rest = records[len(records) // 2 :]
                    say("drops", self._numbers(rest).start)
                    log.rewrite(rest)
                    say("rewritten", self._numbers(rest).start, number)
            else:
                log.close()
                log = Log(folder / "log")
                assert self._numbers(log.records).stop in (0, number)

    def _numbers(self, records: list[bytes]) -> range:
        found = [int.from_bytes(record[:4], "little") for record in records]
        first = found[0] if found else 0
        assert records == [self.record(number) for number in range(first, first + len(found))], "torn: wrong records"
        return range(first, first + len(found))

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        known, dropping = self.known, self.known["first"]
        for what, value, *more in said:
            if what == "begins":
                known["begun"] = value
            elif what == "appended":
                known["acknowledged"] = value
                known["synced"] = value if more[0] else known["synced"]
            elif what == "drops":
                dropping = value
            else:
                known["first"], known["synced"] = value, more[0]
        early = self._numbers(read_log(folder / "log"))
        log = Log(folder / "log")
        found = self._numbers(log.records)
        log.close()
        assert early == found, f"lost: {early} for a reader, {found} for a writer"
        least = known["synced" if cut else "acknowledged"]
        assert not least or found.stop >= least, f"lost: {found} of {least}"
        assert found.stop <= known["begun"], f"torn: {found}, begun {known['begun']}"
        assert not found or found.start in (known["first"], dropping), f"{found}, first {known['first']} or {dropping}"
        first = found.start if found else known["begun"]
        return {"first": first, "acknowledged": found.stop, "synced": found.stop, "begun": known["begun"]}

    def reader(self, folder: Path) -> Callable[[], None]:
        def look() -> None:
            if (folder / "log").exists():
                self._numbers(follow_log(folder / "log")[0])

        return look


class OfPages(OfLog):
    """A log whose records take up to three pages, so that a power cut can lose a page within a record."""

    @staticmethod
    def record(number: int) -> bytes:
        return number.to_bytes(4, "little") * (1 + number * 700 % 3001)


class OfStore(World):
    """A store of numbered rows."""

    FAULTS = (*FAULTS, "unsynced", "unsynced")  # of the calls of a store, few are syncs

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        life = store_crash.Life(rng.choice(ROWS), store_crash.options(rng))
        if "max_rows" in life.options or rng.random() < 0.2:
            life.options["max_rows"] = rng.choice((20, 100))
        return cls({}, asdict(life))

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[bool]:
        life = store_crash.Life(**self.known)
        program = store_crash.Program(folder, life, rng, say, following=life.begun, counts=(1, 5, 40), saves=False)
        while True:
            yield program.store is not None and not program.closing
            try:
                program.call()
            except StorageError:
                if rng.random() < 0.5:
                    raise  # else the same store goes on
            finally:  # after an error and a clear, the next program cannot read the next number from the store
                self.known["begun"] = max(self.known["begun"], program.following)

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        life = store_crash.Life(**self.known)
        for line in said:
            life.hears(line)
        if cut:
            life.flushed = life.flushed if life.options["sync"] != "none" else 0
            life.acknowledged = life.flushed
            life.saving.clear()  # a saved dataset is synced; an unfinished save may be there in part under another name
        if not (folder / "manifest.json").exists():
            assert not life.acknowledged, "lost: the manifest"
            shutil.rmtree(folder, ignore_errors=True)
            return asdict(replace(life, acknowledged=0, flushed=0, saving={}))
        return asdict(store_crash.next_life(life, store_crash.check(folder, life, briefly=life.begun % 6 > 0)))

    def reader(self, folder: Path) -> Callable[[], None]:
        store: DatasetStore | None = None
        had_rows = False

        def look() -> None:
            nonlocal store, had_rows
            if store is None and (folder / "manifest.json").exists():
                store = DatasetStore.open(folder)
            if store is not None:
                try:
                    had_rows = len(numbers_in(store)) > 0 or had_rows
                except DataError as error:
                    if had_rows or "another store" not in str(error):
                        raise
                    store = None  # a writer failed to create the store, and the next writer created it again

        return look

    def writer(self, folder: Path) -> Any:
        return DatasetStore.open(folder, "a")


class OfClients(World):
    """A store that two clients write to over a network that loses, doubles and delays messages."""

    FAULTS = OfStore.FAULTS

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({"sync": rng.choice(store_crash.SYNC)}, {"acknowledged": {}, "flushed": {}})

    @staticmethod
    def rows(client: str, number: int) -> dict[str, Any]:
        count = 1 + number * 5 % 9
        columns = {"client": [client] * count, "number": np.arange(count) + 100 * number}
        return columns | {"action": np.zeros(count), "reward": np.zeros(count), "done": np.zeros(count, np.int64)}

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[bool]:
        store = DatasetStore.open(folder, "a", **self.options)
        shared, late_messages = SharedStore(store), list[tuple[dict[str, Any], memoryview]]()
        tokens, counts = dict[str, str](), dict[str, int]()

        def hello(client: str) -> None:
            tokens[client] = str(rng.random())
            counts[client] = shared.answer(
                {"call": "hello", "client": client, "token": tokens[client]}, memoryview(b"")
            )["count"]

        for client in ("one", "two"):
            hello(client)
        while True:
            yield True
            client, what = rng.choice(("one", "two")), rng.random()
            if what < 0.05:
                shared.flush()
                say("flushed", dict(counts))
            elif what < 0.1:
                hello(client)
            elif what < 0.13:
                shared.close()
                store.close()
                store = DatasetStore.open(folder, "a", **self.options)
                shared = SharedStore(store)
                for name in tokens:
                    hello(name)
            elif what < 0.25 and late_messages:
                shared.answer(*rng.choice(late_messages))  # again, long after
            else:
                number = counts[client] + 1
                described, parts = encoded(self.rows(client, number))
                call = {"call": "write", "client": client, "token": tokens[client], "number": number}
                message = (call | {"columns": described}, memoryview(b"".join(parts)))
                late_messages[:-8] = []
                late_messages.append(message)
                fate = rng.random()
                if fate < 0.1:
                    continue  # lost on the way
                answer = shared.answer(*message)
                if fate < 0.2:
                    answer = shared.answer(*message)  # twice
                if fate < 0.3:
                    continue  # the answer is lost, and the client repeats the write
                if answer.get("error") not in (None, "StorageError"):
                    raise AssertionError(f"refused: {answer}")
                if "error" not in answer:
                    counts[client] = number
                    say("acknowledged", client, number)

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        known = self.known
        for what, *values in said:
            if what == "acknowledged":
                known["acknowledged"][values[0]] = values[1]
                if self.options["sync"] == "append":
                    known["flushed"][values[0]] = values[1]
            elif self.options["sync"] != "none":
                known["flushed"] |= {
                    name: max(count, known["flushed"].get(name, 0)) for name, count in values[0].items()
                }
        promised = known["flushed" if cut else "acknowledged"]
        if not (folder / "manifest.json").exists():
            assert not any(promised.values()), "lost: the manifest"
            shutil.rmtree(folder, ignore_errors=True)
            return {"acknowledged": {}, "flushed": {}}
        with DatasetStore.open(folder, "a", **self.options) as store:
            shared = SharedStore(store)
            counts = shared.counts
            found = store.snapshot().rows(range(len(store))) if len(store) else {"client": [], "number": []}
            shared.close()
        for client in ("one", "two"):
            count = counts.get(client, 0)
            assert count >= promised.get(client, 0), f"lost: {client} has {count} of {promised}"
            there = [n for name, n in zip(found["client"], found["number"], strict=True) if name == client]
            whole = [n for number in range(1, count + 2) for n in self.rows(client, number)["number"].tolist()]
            least = len(whole) - len(self.rows(client, count + 1)["number"])
            assert there == whole[: len(there)], f"torn: rows of {client} twice, lost or out of order: {there[-9:]}"
            assert len(there) >= least, f"lost: {client} has {len(there)} of {least} rows of {count} writes"
        return {"acknowledged": counts, "flushed": counts}

    def writer(self, folder: Path) -> Any:
        return DatasetStore.open(folder, "a")


class OfMemmap(World):
    """Mapped rows; the oldest rows are overwritten."""

    CAPACITY = 37
    FAULTS = (*FAULTS, "stop", "stop")  # few system calls are made between two writes to mapped memory
    LOCKS = True
    START: ClassVar = {"written": [0], "flushed": 0, "offset": 0}

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({"sync": rng.choice(("none", "flush", "append"))}, cls.START | {"versions": []})

    @staticmethod
    def rows(first: int, count: int, version: int = 0) -> dict[str, Any]:
        number = np.arange(first, first + count)
        texts = [f"{n} " * ((n + version) % 6) for n in number.tolist()]
        return {"a": number, "b": np.stack([number * 0.5 + version, number * 2.0], 1), "text": texts}

    def _opened(self, folder: Path) -> MemmapStorage:
        return MemmapStorage(self.CAPACITY, folder, **self.options)

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[bool]:
        storage, offset = self._opened(folder), self.known["offset"]
        while True:
            yield False
            what = rng.choices(("append", "put", "flush", "reopen"), (60, 30, 5, 5))[0]
            written = storage.written + offset
            if what == "append":
                count = rng.randint(1, 12)
                say("begins", written + count)
                storage.append(self.rows(written, count))
                say("written", storage.written + offset)
            elif what == "put" and len(storage):
                slots = np.unique([rng.randrange(len(storage)) for _ in range(3)])
                numbers, version = storage.read("a", slots).tolist(), rng.randrange(1, 100)
                rows = [self.rows(number, 1, version) for number in numbers]
                say("puts", numbers, version)
                storage.put(slots, {name: [row[name][0] for row in rows] for name in ("a", "b", "text")})
                say("put", numbers, version)
            elif what == "flush":
                storage.flush()
                say("flushed", written)
            elif what == "reopen":
                storage.close()
                say("flushed", written)
                storage = self._opened(folder)

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        possible, flushed = set(self.known["written"]), self.known["flushed"]
        begun = max(possible)
        versions = {number: {version} for number, version in self.known["versions"]}
        for what, value, *more in said:
            if what in ("puts", "put"):
                for number in value:
                    before = versions.get(number, {0}) if what == "puts" else set[int]()
                    versions[number] = before | set(more)
                continue
            if what == "flushed" or (what == "written" and self.options["sync"] == "append"):
                flushed = value
            if what != "flushed":
                possible = {value} if what == "written" else possible | {value}
                begun = max(begun, value)
        promised = flushed if self.options["sync"] != "none" else 0
        try:
            storage = self._opened(folder)
            there = self._look(storage)
        except StateError as error:
            if promised or not cut:
                raise AssertionError(f"lost: {promised} rows were synced") from error
            shutil.rmtree(folder)
            return self.START | {"versions": []}
        written, numbers = storage.written, range(min(there, default=0), max(there, default=-1) + 1)
        storage.close()
        for number, version in there.items():
            is_known = version in versions.get(number, {0}) or cut  # of puts, a power cut leaves any
            assert is_known, f"lost: row {number} has version {version}, not {versions.get(number, 0)}"
        if cut:
            # Later rows took the places of the oldest rows, and an earlier power cut lost the rows before the offset.
            least = range(max(self.known["offset"], begun - self.CAPACITY), promised)
            assert set(least) <= set(numbers), f"lost: {numbers}, and {least} were synced"
            assert numbers.stop <= begun, f"torn: {numbers} of {begun}"
        else:
            stop = written + self.known["offset"]
            assert stop in possible, f"lost: {stop} of {possible}"
            assert numbers == range(stop - min(written, self.CAPACITY), stop), f"lost: {numbers} of {stop}"
        stop = numbers.stop if numbers else written
        known = [[number, version] for number, version in there.items() if version]
        return {"written": [stop], "flushed": stop, "offset": stop - written, "versions": known}

    def reader(self, folder: Path) -> Callable[[], None]:
        storage: MemmapStorage | None = None

        def look() -> None:
            nonlocal storage
            if storage is None and (folder / "head").exists():
                storage = self._opened(folder)
            if storage is not None:
                self._look(storage)

        return look

    def _look(self, storage: MemmapStorage) -> dict[int, int]:
        """Return the versions of the rows by number; each row is as it was written."""
        with storage.lock():
            rows = storage.get(np.arange(len(storage))) if len(storage) else {"a": []}
        numbers = np.asarray(rows["a"]).tolist()
        first = min(numbers, default=0)
        assert sorted(numbers) == [*range(first, first + len(numbers))], f"torn: {numbers}"
        found = {}
        for at, number in enumerate(numbers):
            half, double = rows["b"][at].tolist()
            found[number] = version = int(half - number * 0.5)
            assert (half, double) == (number * 0.5 + version, number * 2), f"torn: row {number}"
            assert rows["text"][at] == f"{number} " * ((number + version) % 6), f"torn: row {number}"
        return found


class OfCache(World):
    """A cache of remote objects that two processes share; requests fail, and pages are damaged between two lives."""

    BYTES = 4 << 20
    FAULTS = tuple(fault for fault in FAULTS if fault != "power")  # a cache promises only that wrong bytes are found
    LOCKS = True

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({"seed": rng.getrandbits(16)})

    def _opened(self, folder: Path) -> tuple[Mirror, Objects, list[MirrorObject]]:
        mirror = Mirror(folder, cache_bytes=self.BYTES, patience=0.1)
        objects = Objects(count=3, size=self.BYTES // 2, seed=self.options["seed"])
        return mirror, objects, mirror.add(objects, objects.infos())

    def _look(self, objects: Objects, there: list[MirrorObject], rng: random.Random) -> None:
        number, begin = rng.randrange(3), rng.randrange(self.BYTES // 2 - 60_000)
        end = begin + rng.choice((10, 5000, 60_000))
        assert read(there[number], begin, end) == objects.piece(number, begin, end), f"torn: {begin}..{end}"

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[bool]:
        mirror, objects, there = self._opened(folder)
        while True:
            yield False
            what = rng.random()
            if what < 0.05:
                mirror.close()
                mirror, objects, there = self._opened(folder)
                continue
            if what < 0.1:
                objects.failures.append(StorageError("503"))
            self._look(objects, there, rng)

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        rng = random.Random(len(said))
        if not self.known:
            mirror, objects, there = self._opened(folder)
            for _ in range(9):
                self._look(objects, there, rng)
            assert not mirror.counters()["damaged"], "torn: the cache has other checksums than bytes"
            mirror.close()
        for path in folder.glob("*/bytes"):
            with path.open("r+b") as file:
                for _ in range(9):
                    file.seek(rng.randrange(self.BYTES))
                    file.write(rng.choice((bytes(4096), b"\xff", rng.randbytes(99))))
        mirror, objects, there = self._opened(folder)
        for _ in range(9):
            self._look(objects, there, rng)
        mirror.close()
        return {"is_damaged": True}

    def reader(self, folder: Path) -> Callable[[], None]:
        _, objects, there = self._opened(folder)
        return partial(self._look, objects, there, random.Random(0))


class OfRollouts(World):
    """A buffer of rollouts."""

    ROLLOUTS: ClassVar = {f"r{number}": groups_crash.rollout(number) for number in range(50)}

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({}, {"said": []})

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[bool]:
        buffer = groups_crash.opened(folder, sync=True)
        following, most = sum(map(buffer.__contains__, self.ROLLOUTS)), len(self.ROLLOUTS)
        while True:
            yield False
            what = rng.choices(("add", "batch", "flush", "reopen"), (60, 20, 4, 10))[0]
            if what == "reopen":
                buffer.close()
                buffer = groups_crash.opened(folder, sync=True)
            elif what == "batch":
                said = groups_crash.act(buffer, what, rng.randint(1, 5))
                say(what, said)
            elif what == "flush":
                say(what, groups_crash.act(buffer, what, None))
            else:
                # New rollouts in order, and an earlier rollout again; in the end all rollouts are there.
                numbers = list(range(following, min(following + rng.randint(1, 6), most)))
                numbers += [rng.randrange(min(following + 1, most))]
                before = [uid in buffer for uid in self.ROLLOUTS]
                try:
                    say(what, groups_crash.act(buffer, what, numbers))
                except StorageError:
                    if rng.random() < 0.5:
                        buffer.close()
                        buffer = groups_crash.opened(folder, sync=True)
                    assert before == [uid in buffer for uid in self.ROLLOUTS], "after an error rollouts are there"
                    continue
                following = max(following, max(numbers) + 1)

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        said = [*self.known["said"], *map(tuple, said)]
        some = itertools.islice(self.ROLLOUTS.items(), len(said) % 4, None, 4)
        groups_crash.check(folder, said, dict(some))
        return {"said": said}


KINDS = {
    "log": OfLog,
    "pages": OfPages,
    "store": OfStore,
    "clients": OfClients,
    "memmap": OfMemmap,
    "rollouts": OfRollouts,
    "cache": OfCache,
}
SHARES = ["log"] * 3 + ["pages"] * 5 + ["clients"] * 3 + ["memmap"] * 5 + ["store"] * 2 + ["rollouts", "cache"]
"""The kinds of 20 worlds. Worlds that take a fifth of the time of others are more frequent."""


def plan_of(rng: random.Random, faults_of_kind: Sequence[str]) -> Plan:
    """Return the faults of a life."""
    faults = [(int(rng.expovariate(1 / 100)) + 1, rng.choice(faults_of_kind)) for _ in range(rng.choice((1, 1, 1, 2)))]
    looks = frozenset(int(rng.expovariate(1 / 60)) + 1 for _ in range(4))
    return Plan(rng.getrandbits(32), faults, looks)


class OtherProcess:
    """A process that looks at the folder of a world while a life goes on, and then checks it.

    The process serves one world after another, because a fork takes as long as the checks of a small world.

    Args:
        total: Shared with the lives: the numbers of operations, of faults and of the machine's start.
    """

    def __init__(self, total: NDArray[np.int64]) -> None:
        (self._asked, self._ask), (self._told, self._tell) = os.pipe(), os.pipe()
        self.total, self._base, self._world = total, Path(), World({})
        self._pid = forked(self._work)
        os.close(self._asked)
        os.close(self._tell)

    def begin(self, kind: str, world: World, base: Path) -> None:
        """Serve another world from now on.

        Args:
            kind: A key of ``KINDS``.
            world: The world.
            base: The folder with the world's folder and with what a life said.
        """
        self._base = base
        self.looks()("n", json.dumps([kind, asdict(world), str(base)]))

    def _work(self) -> None:
        prepare(self.total, 0)
        os.close(self._ask)
        os.close(self._told)
        look = None
        while asked := os.read(self._asked, 16):
            signal.alarm(SECONDS)
            what = asked[-1:]
            if what == b"n":
                look = None
                kind, values, base = json.loads(os.read(self._asked, 1 << 16))
                self._world, self._base = KINDS[kind](**values), Path(base)
            elif what == b"r":
                look = look or self._world.reader(self._base / "root" / "it")
                look()
            elif what == b"w":
                with suppress(ConfigError):
                    self._world.writer(self._base / "root" / "it")
                    raise AssertionError("two processes have the folder open to write")
            else:
                look = None
                gc.collect()
                self._check(cut=what == b"p")
            signal.alarm(0)
            os.write(self._tell, asked)

    def _check(self, *, cut: bool) -> None:
        lines = [json.loads(line) for line in (self._base / "said").read_text().splitlines()]
        try:
            found = {"known": self._world.check(self._base / "root" / "it", lines, cut=cut)}
        except BaseException as error:
            (self._base / "known").write_text(json.dumps({"fault": f"{type(error).__name__}: {error}"}))
            raise
        (self._base / "known").write_text(json.dumps(found))
        self._world = replace(self._world, **json.loads(json.dumps(found)))

    def check(self, *, cut: bool) -> dict[str, Any]:
        """Let this process check the folder after a life; return ``known`` for the next life.

        Args:
            cut: Whether the power was cut.

        Raises:
            AssertionError: A promise is broken.
        """
        known = self._base / "known"
        known.write_text("{}")
        try:
            self.looks()("p" if cut else "c")
        except AssertionError as error:
            raise AssertionError(json.loads(known.read_text()).get("fault", str(error))) from error
        return json.loads(known.read_text())["known"]

    def looks(self) -> Callable[..., None]:
        """Return the function that asks the process to look ("r") or to try to write ("w"), and waits for the answer.

        Raises:
            AssertionError: This process died.
        """
        write, read, life, count = os.write, os.read, b"%8d" % os.getpid(), itertools.count()

        def look(what: str = "r", content: str = "") -> None:
            asked = life + b"%7d" % next(count) + what.encode()
            answer = b""
            with suppress(BrokenPipeError):
                write(self._ask, asked + content.encode())
                # If another thread killed a life that waited here, the answer to that life is still in the pipe.
                while (answer := read(self._told, 16)) not in (asked, b""):
                    pass
            assert answer, "the process that looked at the folder died, see above"

        return look

    def end(self) -> None:
        """End the process."""
        os.close(self._ask)
        os.close(self._told)
        os.waitpid(self._pid, 0)


_others = list[OtherProcess]()


def other_process() -> OtherProcess:
    """Return the other process of this process; start it if there is none."""
    if not _others:
        _others.append(OtherProcess(np.frombuffer(mmap.mmap(-1, 24), np.int64)))
    return _others[0]


def end_other_process() -> None:
    """End the other process of this process, if there is one."""
    while _others:
        _others.pop().end()


def live(
    world: World,
    base: Path,
    plan: Plan,
    look: Callable[..., None],
    total: NDArray[np.int64],
    most: int,
    *,
    trace: bool,
) -> None:
    """Run one life of about ``most`` operations; the process is a child for this life."""
    write, file = os.write, os.open(base / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def note(line: str) -> None:
        write(2, f"{line}\n".encode())

    def say(*values: Any) -> None:
        write(file, (json.dumps(values) + "\n").encode())
        if trace:
            note(f"{json.dumps(values):.150}")

    system = System(plan, base / "root", total, None if world.LOCKS else look, note if trace else None)
    system.install()
    rng, chance, before, failures = random.Random(plan.seed), random.Random(plan.seed), 0, 0
    while failures < 20:
        try:
            for is_alone in world.steps(base / "root" / "it", rng, say):
                if system.count == before:
                    system.counts()
                before = system.count
                if system.is_due:
                    system.is_due = False
                    look()
                if is_alone and chance.random() < 0.01:
                    look("w")
                if system.count >= most:
                    return
        except StorageError as error:
            failures += 1
            if trace:
                note(str(error))
        gc.collect()  # the process continues with another object; the failed object is collected, without close
        look()
        if chance.random() < 0.3:
            return  # like a program that ends at an error


def fault_of(seed: int, *, kind: str | None = None, operations: int = OPERATIONS, trace: bool = False) -> str:
    """Run the world of a seed; return the broken promise, or "" if there is none."""
    rng = random.Random(seed)
    share = rng.choice(SHARES)
    kind = kind or share
    world = KINDS[kind].drawn(rng)
    base = Path(tempfile.mkdtemp(prefix="world-", dir=FOLDERS))
    root = base / "root"
    (root / "it").mkdir(parents=True)
    other = other_process()
    total, is_broken = other.total, True
    total[:] = 0, 0, 1
    try:
        other.begin(kind, world, base)
        for at in itertools.count():
            left = int(operations - total[0])
            if left <= 0 and total[1]:
                is_broken = False
                return ""
            plan, most = plan_of(rng, world.FAULTS), min(LIFE, left) if left > 0 else LIFE
            if trace:
                print(f"life {at} of {kind} {world.options}: {plan}", file=sys.stderr)

            def work(world: World = world, plan: Plan = plan, most: int = most) -> None:
                signal.alarm(SECONDS)
                prepare(total, plan.seed)
                live(world, base, plan, other.looks(), total, most, trace=trace)

            code = os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])
            if code not in (0, KILLED, CUT):
                return f"life {at}: the process ended with {code}, see above"
            if code == CUT:
                shutil.rmtree(root)
                (base / "cut").rename(root)
                total[2] += 1
            try:
                world = replace(world, known=other.check(cut=code == CUT))
            except AssertionError as error:
                return f"life {at}: {error}"
        raise AssertionError
    finally:
        if is_broken:
            end_other_process()  # the other process has ended, or waits in the middle of a call
        shutil.rmtree(base, ignore_errors=True)


def shortened(seed: int, *, kind: str | None, operations: int) -> int:
    """Return a smaller number of operations with which the seed still breaks a promise."""
    low = 0
    while low + 1 < operations:
        half = (low + operations) // 2
        low, operations = (low, half) if fault_of(seed, kind=kind, operations=half) else (half, operations)
    return operations


def warm() -> None:
    """Make the slow first calls before the first fork."""
    warnings.simplefilter("ignore")
    signal.alarm(SECONDS)
    for name, kind in KINDS.items():
        base = Path(tempfile.mkdtemp(prefix=f"world-{name}-"))
        (base / "it").mkdir()
        rng = random.Random(0)
        world, said = kind.drawn(rng), list[list[Any]]()
        steps = world.steps(base / "it", rng, lambda *values, said=said: said.append(json.loads(json.dumps(values))))
        for _ in range(40):
            next(steps)
        world.reader(base / "it")()
        del steps
        world.check(base / "it", said, cut=False)
        shutil.rmtree(base, ignore_errors=True)
    deadline = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    signal.alarm(0)
    gc.collect()
    gc.disable()
    gc.freeze()  # a child that collected these objects would copy all their pages


def some(seeds: range, kind: str | None, operations: int, *, first: bool) -> list[tuple[int, str]]:
    """Return the seeds whose worlds break a promise, each with the promise."""
    found = []
    for seed in seeds:
        if fault := fault_of(seed, kind=kind, operations=operations):
            found.append((seed, fault))
            print(f"{seed}: {fault}", file=sys.stderr, flush=True)
            if first:
                break
    return found


def main() -> int:
    """Run the requested worlds; return 1 if a world broke a promise, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, default=1, help="how many seeds from --seed on")
    parser.add_argument("--kind", choices=KINDS, help="only worlds of this kind; by default the seed chooses")
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="operations of a world at least")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time")
    parser.add_argument("--first", action="store_true", help="end when worlds broke a promise")
    chosen = parser.parse_args()
    # Else pyarrow imports pandas, which doubles the time of each fork.
    sys.modules["pandas"] = ModuleType("pandas")
    sys.modules["pandas"].__dict__["__version__"] = "0"
    options = {"kind": chosen.kind, "operations": chosen.operations}
    if chosen.worlds == 1:
        warm()
        fault = fault_of(chosen.seed, **options)
        if fault:
            operations = shortened(chosen.seed, **options)
            fault_of(chosen.seed, kind=chosen.kind, operations=operations, trace=True)
            words = f"--seed {chosen.seed} --operations {operations}"
            words += f" --kind {chosen.kind}" if chosen.kind else ""
            print(f"{fault}\nrepeat: python -m tests.simulate {words}")
        return bool(fault)
    began, end = time.monotonic(), chosen.seed + chosen.worlds
    blocks = [range(at, min(at + BLOCK, end)) for at in range(chosen.seed, end, BLOCK)]
    found, done = list[tuple[int, str]](), 0
    with ProcessPoolExecutor(chosen.jobs, initializer=warm) as pool:
        for seeds, broken in zip(blocks, pool.map(partial(some, **options, first=chosen.first), blocks), strict=True):
            found, done = found + broken, done + len(seeds)
            took = time.monotonic() - began
            print(f"{done} worlds, {len(found)} broke a promise, {took:.0f} s", file=sys.stderr, flush=True)
            if took > chosen.seconds or (chosen.first and found):
                pool.shutdown(wait=False, cancel_futures=True)
                break
    counts = Counter(fault.split(":")[1].strip()[:40] for _, fault in found)
    first = f"{found[0][0]}: {found[0][1]}" if found else ""
    print(json.dumps({"worlds": done, "broken": [seed for seed, _ in found], "faults": counts, "first": first}))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
