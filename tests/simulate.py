"""Simulated worlds in which files, disks, clocks, networks and processes fail; a seed replays a world.

A world is a folder with one durable thing: a log, a store, a store that clients share over a network, mapped rows, or a
buffer of rollouts. One process makes random calls, and a second process reads the folder while a call is going on. A
plan says which system calls of the first process go wrong:

    kill, half    the process is killed at the call, or after half of the bytes of a write
    power         the power is cut: of the bytes and names that were not synced, some are lost, torn or out of order
    full          the disk is full for some calls
    error         the call fails with EIO
    short         a write writes half of its bytes, as after a signal

The clock jumps, and messages to a shared store are lost, doubled and delayed. After each of its three lives, another
process compares the folder with the promises of docs/guides/store-on-disk.md, and the next life goes on from there.

    python -m tests.simulate --seed 7                  one world; a broken promise is reduced to few steps and traced
    python -m tests.simulate --worlds 20000 --jobs 2   many worlds; prints the seeds that break a promise
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import DatasetStore, StateError, StorageError
from mouse_core.collect.shared import SharedStore
from mouse_core.collect.wire import encoded
from mouse_core.files import locking
from mouse_core.files.log import Log, follow_log, read_log
from mouse_core.replay import MemmapStorage
from tests.core import groups_crash, store_crash
from tests.core.disk_cases import KINDS as ROWS
from tests.core.disk_cases import numbers_in
from tests.core.killing import forked
from tests.core.power_cut import Disk, write_tree

WRITES = ("write", "pwrite")
GROWS = (*WRITES, "open", "mkdir", "ftruncate", "posix_fallocate", "link")
CALLS = (*GROWS, "fsync", "fdatasync", "replace", "rename", "unlink", "rmdir")
FAULTS = ("kill", "half", "power", "full", "error", "short")
KILLED, CUT = 9, 10
"""How a life ends that a fault ended."""
LIVES, STEPS, SECONDS = 3, 70, 60
BLOCK = 50
"""Worlds that a process runs before it reports."""
FULL_FOR = 12
"""Calls for which a disk is full."""


@dataclass(frozen=True)
class Plan:
    """What goes wrong in one life.

    Args:
        seed: Of the random choices of the process.
        steps: How many calls it makes.
        faults: The fault at each system call, counted from 1.
        looks: The system calls after which the second process reads.
    """

    seed: int
    steps: int
    faults: dict[int, str]
    looks: frozenset[int]


class System:
    """The calls of ``os`` of a process, with the faults of a plan.

    Args:
        plan: The faults.
        root: The folder whose files a power cut hits.
        look: Lets the other process look.
        trace: Takes a line for each call; None: nobody asks.
    """

    def __init__(self, plan: Plan, root: Path, look: Callable[[], None], trace: Callable[[str], None] | None) -> None:
        self.plan, self.root, self.look, self.trace = plan, root, look, trace
        self.disk, self.count, self.full_until = Disk(root), 0, 0
        self._rng, self._time, self._jump = random.Random(plan.seed), time.time, 0.0
        self._thread = threading.get_ident()

    def install(self) -> None:
        """From now on, calls of this process fail."""
        for name in CALLS:
            setattr(os, name, partial(self._call, name, getattr(os, name)))
        time.time = self._clock

    def _clock(self) -> float:
        if self._rng.random() < 0.02:
            self._jump = self._rng.uniform(-1e5, 1e5)
        return self._time() + self._jump

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if name == "open" and not arguments[1] & os.O_CREAT:
            return call(*arguments, **options)
        self.count += 1
        fault = self.plan.faults.get(self.count)
        if self.trace:
            self.trace(f"  {self.count}: {name} {str(arguments)[:110]}{f'  <- {fault}' if fault else ''}")

        def half() -> Any:
            return call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], *arguments[2:])

        if fault in ("kill", "half"):
            if fault == "half" and name in WRITES:
                half()
            os._exit(KILLED)
        if fault == "power":
            write_tree(self.root.with_name("cut"), self.disk.left(self._rng))
            os._exit(CUT)
        if fault == "full":
            self.full_until = self.count + FULL_FOR
        if name in GROWS and self.count < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "short" and name in WRITES and len(arguments[1]) > 1:
            return half()
        done = call(*arguments, **options)
        if name in ("fsync", "fdatasync"):
            self.disk.sync(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        if self.count in self.plan.looks and threading.get_ident() == self._thread:
            self.look()
        return done


Say = Callable[..., None]


@dataclass
class World:
    """Something durable in a folder, and what has been promised of it. Subclasses say what is done and what must hold.

    Args:
        options: How it is opened.
        known: What a life knows from those before it: JSON values.
    """

    options: dict[str, Any]
    known: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        """A new world."""
        raise NotImplementedError

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[None]:
        """Do something by chance for each value that is asked for."""
        raise NotImplementedError

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        """Raise AssertionError if a promise is broken; return what is known from now on.

        Args:
            folder: As it was left.
            said: What the life said, in order.
            cut: Whether the power was cut, so that only what was synced is promised.
        """
        raise NotImplementedError

    def reader(self, folder: Path) -> Callable[[], None]:
        """What the other process does when it looks."""
        return lambda: None


class OfLog(World):
    """A log of numbered records."""

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({}, {"first": 0, "acknowledged": 0, "synced": 0, "begun": 0})

    @staticmethod
    def record(number: int) -> bytes:
        return number.to_bytes(4, "little") * (1 + number * 7 % 50)

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[None]:
        log, number = Log(folder / "log"), self.known["begun"]
        number = self._numbers(log.records).stop or number
        while True:
            yield
            what = rng.choices(("append", "rewrite", "reopen"), (90, 2, 8))[0]
            if what == "append":
                sync = rng.random() < 0.3
                say("begins", number + 1)
                log.append(self.record(number), sync=sync)
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


class OfStore(World):
    """A store of numbered rows."""

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        life = store_crash.Life(rng.choice(ROWS), store_crash.options(rng))
        return cls({}, asdict(life))

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[None]:
        life = store_crash.Life(**self.known)
        program = store_crash.Program(folder, life, rng, say, following=life.begun)
        while True:
            yield
            program.call()

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        life = store_crash.Life(**self.known)
        for line in said:
            life.hears(line)
        if cut:
            life.flushed = life.flushed if life.options["sync"] != "none" else 0
            life.acknowledged = life.flushed
            life.saving.clear()  # a saved dataset is synced; what was begun may be there in part under another name
        if not (folder / "manifest.json").exists():
            assert not life.acknowledged, "lost: the manifest"
            shutil.rmtree(folder, ignore_errors=True)
            return asdict(replace(life, acknowledged=0, flushed=0, saving={}))
        store_crash.check(folder, life)
        return asdict(store_crash.next_life(folder, life))

    def reader(self, folder: Path) -> Callable[[], None]:
        store: DatasetStore | None = None

        def look() -> None:
            nonlocal store
            if store is None and (folder / "manifest.json").exists():
                store = DatasetStore.open(folder)
            if store is not None:
                numbers_in(store)

        return look


class OfClients(World):
    """A store that two clients write to over a network that loses, doubles and delays messages."""

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({"sync": rng.choice(store_crash.SYNC)}, {"acknowledged": {}, "flushed": {}})

    @staticmethod
    def rows(client: str, number: int) -> dict[str, Any]:
        count = 1 + number * 5 % 9
        columns = {"client": [client] * count, "number": np.arange(count) + 100 * number}
        return columns | {"action": np.zeros(count), "reward": np.zeros(count), "done": np.zeros(count, np.int64)}

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[None]:
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
            yield
            client, what = rng.choice(("one", "two")), rng.random()
            if what < 0.05:
                shared.flush()
                say("flushed", dict(counts))
            elif what < 0.1:
                hello(client)
            elif what < 0.15:
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


class OfMemmap(World):
    """Mapped rows; the oldest rows are overwritten. Each call holds a lock, so no reader looks during a call."""

    CAPACITY = 37

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({}, {"written": [0]})

    @staticmethod
    def rows(first: int, count: int) -> dict[str, Any]:
        number = np.arange(first, first + count)
        texts = [f"{n} " * (n % 6) for n in number.tolist()]
        return {"a": number, "b": np.stack([number * 0.5, number * 2.0], 1), "text": texts}

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[None]:
        storage = MemmapStorage(self.CAPACITY, folder)
        while True:
            yield
            what = rng.choices(("append", "put", "flush", "reopen"), (70, 20, 5, 5))[0]
            written = storage.written
            if what == "append":
                count = rng.randint(1, 12)
                say("begins", written + count)
                storage.append(self.rows(written, count))
                say("written", storage.written)
            elif what == "put" and written:
                slots = np.unique([rng.randrange(len(storage)) for _ in range(3)])
                numbers = storage.read("a", slots)
                rows = [self.rows(int(number), 1) for number in numbers]
                storage.put(slots, {name: [*map(lambda row: row[name][0], rows)] for name in ("a", "b", "text")})  # noqa: C417
            elif what == "flush":
                storage.flush()
            elif what == "reopen":
                storage.close()
                storage = MemmapStorage(self.CAPACITY, folder)

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        possible = set(self.known["written"])
        for what, value in said:
            possible = {value} if what == "written" else possible | {value}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                storage = MemmapStorage(self.CAPACITY, folder)
                self._look(storage)
            except StateError:
                assert cut, "lost: refused though the machine was not restarted"
                shutil.rmtree(folder)
                return {"written": [0]}
        assert cut or storage.written in possible, f"lost: {storage.written} of {possible}"
        written = storage.written
        storage.close()
        return {"written": [written]}

    def _look(self, storage: MemmapStorage) -> None:
        with storage.lock():
            written, rows = storage.written, storage.get(np.arange(len(storage))) if len(storage) else {"a": []}
        numbers = np.asarray(rows["a"]).tolist()
        assert sorted(numbers) == [*range(written - len(numbers), written)], f"torn: {numbers} of {written}"
        for at, number in enumerate(numbers):
            wanted = self.rows(number, 1)
            assert rows["b"][at].tolist() == wanted["b"][0].tolist(), f"torn: row {number}"
            assert rows["text"][at] == wanted["text"][0], f"torn: row {number}"


class OfRollouts(World):
    """A buffer of rollouts."""

    @classmethod
    def drawn(cls, rng: random.Random) -> World:
        return cls({}, {"said": []})

    def steps(self, folder: Path, rng: random.Random, say: Say) -> Iterator[None]:
        buffer = groups_crash.opened(folder, sync=True)
        while True:
            yield
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
                numbers = rng.sample(groups_crash.FIRST, rng.randint(1, 6))
                say(what, groups_crash.act(buffer, what, numbers))

    def check(self, folder: Path, said: list[Any], *, cut: bool) -> dict[str, Any]:
        said = [*self.known["said"], *map(tuple, said)]
        groups_crash.check(folder, said)
        return {"said": said}


KINDS = {"log": OfLog, "store": OfStore, "clients": OfClients, "memmap": OfMemmap, "rollouts": OfRollouts}


def plan_of(rng: random.Random, steps: int) -> Plan:
    """What goes wrong in a life."""
    faults = {int(rng.expovariate(1 / 60)) + 1: rng.choice(FAULTS) for _ in range(rng.choice((1, 1, 2, 3)))}
    looks = frozenset(int(rng.expovariate(1 / 100)) + 1 for _ in range(4))
    return Plan(rng.getrandbits(32), steps, faults, looks)


def other_process(look: Callable[[], None]) -> Callable[[], None]:
    """Start a process that looks whenever the returned function is called, which waits for it."""
    (asked, ask), (told, tell) = os.pipe(), os.pipe()

    def work() -> None:
        os.close(ask)
        while os.read(asked, 1):
            look()
            os.write(tell, b".")

    forked(work)
    os.close(asked)
    os.close(tell)
    write, read = os.write, os.read

    def wait() -> None:
        write(ask, b"?")
        if not read(told, 1):
            raise AssertionError("the process that looked at the folder died, see above")

    return wait


def live(world: World, folder: Path, plan: Plan, said: Path, *, trace: bool) -> None:
    """One life, in a process of its own."""
    signal.alarm(SECONDS)
    write, file = os.write, os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def note(line: str) -> None:
        write(2, f"{line}\n".encode())

    def say(*values: Any) -> None:
        write(file, (json.dumps(values) + "\n").encode())
        if trace:
            note(f"{json.dumps(values):.150}")

    System(plan, folder.parent, other_process(world.reader(folder)), note if trace else None).install()
    rng, done, failures = random.Random(plan.seed), 0, 0
    while done < plan.steps and failures < 20:
        try:
            for _ in world.steps(folder, rng, say):
                done += 1
                if done == plan.steps:
                    return
        except StorageError as error:
            failures += 1
            if trace:
                note(str(error))
        gc.collect()  # the same process goes on with another object; the failed one is not closed, but it is gone


def fault_of(seed: int, *, kind: str | None = None, lives: int = LIVES, steps: int = STEPS, trace: bool = False) -> str:
    """Run the world of a seed; return the promise that it broke, or ""."""
    rng = random.Random(seed)
    name = rng.choice([*KINDS])
    world = KINDS[kind or name].drawn(rng)
    base = Path(tempfile.mkdtemp(prefix="world-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    boot, root, said, known = base / "boot", base / "root", base / "said", base / "known"
    try:
        (root / "it").mkdir(parents=True)
        boot.write_text(f"{1:015x}")
        for at in range(lives):
            plan = plan_of(rng, steps)
            if trace:
                print(f"life {at} of {kind or name} {world.options}: {plan}", file=sys.stderr)

            def lived(world: World = world, plan: Plan = plan) -> None:
                locking._BOOT = boot
                live(world, root / "it", plan, said, trace=trace)

            status = os.waitpid(forked(lived), 0)[1]
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, KILLED, CUT):
                return f"life {at}: the process ended with {code}, see above"
            if code == CUT:
                shutil.rmtree(root)
                (base / "cut").rename(root)
                boot.write_text(f"{at + 2:015x}")
            lines = [json.loads(line) for line in said.read_text().splitlines()]

            def checked(world: World = world, lines: list[Any] = lines, cut: bool = code == CUT) -> None:
                signal.alarm(SECONDS)
                locking._BOOT = boot
                try:
                    known.write_text(json.dumps({"known": world.check(root / "it", lines, cut=cut)}))
                except BaseException as error:
                    known.write_text(json.dumps({"fault": f"{type(error).__name__}: {error}"}))
                    raise

            status = os.waitpid(forked(checked), 0)[1]
            found = json.loads(known.read_text())
            if status or "fault" in found:
                return f"life {at}: {found.get('fault', f'the check ended with {status}')}"
            world = replace(world, known=found["known"])
        return ""
    finally:
        shutil.rmtree(base, ignore_errors=True)


def shortened(seed: int, *, kind: str | None, lives: int, steps: int) -> tuple[int, int]:
    """Fewer lives and steps with which the same seed still breaks a promise."""
    broken = partial(fault_of, seed, kind=kind)
    lives = next((fewer for fewer in range(1, lives) if broken(lives=fewer, steps=steps)), lives)
    low = 0
    while low + 1 < steps:
        half = (low + steps) // 2
        low, steps = (low, half) if broken(lives=lives, steps=half) else (half, steps)
    return lives, steps


def warm() -> None:
    """Do what is slow the first time before the first fork."""
    import datasets

    datasets.disable_progress_bars()
    warnings.simplefilter("ignore")
    for name, kind in KINDS.items():
        base = Path(tempfile.mkdtemp(prefix=f"world-{name}-"))
        (base / "it").mkdir()
        rng = random.Random(0)
        steps = kind.drawn(rng).steps(base / "it", rng, lambda *values: None)
        for _ in range(40):
            next(steps)
        del steps
        shutil.rmtree(base, ignore_errors=True)
    deadline = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)


def some(seeds: range, kind: str | None, lives: int, steps: int) -> list[tuple[int, str]]:
    """The seeds of these whose worlds break a promise, each with the promise."""
    warm()
    found = []
    for seed in seeds:
        if fault := fault_of(seed, kind=kind, lives=lives, steps=steps):
            found.append((seed, fault))
            print(f"{seed}: {fault}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run the worlds that the arguments ask for; 1 if one broke a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, default=1, help="how many seeds from --seed on")
    parser.add_argument("--kind", choices=KINDS, help="only worlds of this kind; by default the seed chooses")
    parser.add_argument("--lives", type=int, default=LIVES)
    parser.add_argument("--steps", type=int, default=STEPS, help="calls in each life")
    parser.add_argument("--jobs", type=int, default=1)
    chosen = parser.parse_args()
    options = {"kind": chosen.kind, "lives": chosen.lives, "steps": chosen.steps}
    if chosen.worlds == 1:
        warm()
        fault = fault_of(chosen.seed, **options)
        if fault:
            lives, steps = shortened(chosen.seed, **options)
            fault_of(chosen.seed, kind=chosen.kind, lives=lives, steps=steps, trace=True)
            words = f"--seed {chosen.seed} --lives {lives} --steps {steps}"
            words += f" --kind {chosen.kind}" if chosen.kind else ""
            print(f"{fault}\nrepeat: python -m tests.simulate {words}")
        return bool(fault)
    began, end = time.monotonic(), chosen.seed + chosen.worlds
    blocks = [range(at, min(at + BLOCK, end)) for at in range(chosen.seed, end, BLOCK)]
    found, done = list[tuple[int, str]](), 0
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for seeds, broken in zip(blocks, pool.map(partial(some, **options), blocks), strict=True):
            found, done = found + broken, done + len(seeds)
            took = time.monotonic() - began
            print(f"{done} worlds, {len(found)} broke a promise, {took:.0f} s", file=sys.stderr, flush=True)
    counts = Counter(fault.split(":")[1].strip()[:40] for _, fault in found)
    print(json.dumps({"worlds": done, "broken": [seed for seed, _ in found], "faults": counts}))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
