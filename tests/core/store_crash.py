"""Kill processes that write to stores on disk, at any moment, and check the folders that they leave.

A life is a forked child that opens a folder and makes random calls: append, extend, flush, from_dataset, clear, save
and close. The child reports each call that has returned. After some milliseconds the child receives a signal, at
any line; ``tests.simulate`` kills at system calls instead. Most signals are SIGKILL, after which Python runs
no handlers. After SIGINT the child continues with the same store, as in an interactive session; after SIGTERM the
child closes the store. Each folder has several lives, and after each life another process checks the folder.

    python -m tests.core.store_crash --kills 10000
"""

import argparse
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mouse_core import DatasetStore, formats
from tests.core.disk_cases import KINDS, check_batches, leftovers, numbers_in, row_of, rows_of, table_of
from tests.core.killing import dies_of_threads, forked

SYNC = ("none", "flush", "append")
SIGNALS = {signal.SIGKILL: "kills", signal.SIGINT: "interrupts", signal.SIGTERM: "terminations"}
"""The signals, and the names under which their numbers are printed."""
LIVES = 6
"""Number of lives of a folder, at most."""
SECONDS = 120
"""A child that takes longer has hung."""


@dataclass
class Life:
    """The rows that a folder must have and may have. Rows are numbered.

    Args:
        kind: A kind of ``disk_cases.KINDS``.
        options: The options of ``DatasetStore.open``.
        acknowledged: The number after the last row whose call has returned.
        flushed: The number after the last row that was flushed or synced.
        begun: The number after the last row of any call.
        lowest: The lowest number that must be there after the last ``clear``.
        clearing: Whether a ``clear`` has begun and has not returned.
        saving: The folders of ``save``, each with its number of rows; None until ``save`` has returned.
    """

    kind: str
    options: dict[str, Any]
    acknowledged: int = 0
    flushed: int = 0
    begun: int = 0
    lowest: int = 0
    clearing: bool = False
    saving: dict[str, int | None] = field(default_factory=dict)

    def hears(self, said: list[Any]) -> None:
        what, value = said
        if what == "begins":
            self.begun = max(self.begun, value)
        elif what == "acknowledged":
            self.acknowledged = value
            if self.options["sync"] == "append":
                self.flushed = value
        elif what == "flushed":
            self.flushed = value
        elif what == "clearing":
            self.clearing = True
        elif what == "cleared":
            self.clearing, self.lowest = False, value
        elif what == "saving":
            self.saving[value] = None
        elif what == "saved":
            self.saving[value[0]] = value[1]


class Terminated(BaseException):
    """The exception of the handler of SIGTERM."""


@dataclass
class Program:
    """A program that makes random calls on a store, and reports when calls begin and return."""

    folder: Path
    life: Life
    rng: random.Random
    say: Callable[[str, Any], None]
    store: DatasetStore | None = None
    closing: bool = False
    saved: int = 0
    following: int = 0
    counts: Sequence[int] = (4, 10, 60, 300)
    saves: bool = True  # a save takes ten times as long as any other call

    def run(self, calls: int) -> None:
        """Make ``calls`` random calls; after an interrupt, make some more with the same store."""
        try:
            self._calls(calls)
        except KeyboardInterrupt:
            pass
        except Terminated:
            self._look()
            self._close()
            return
        else:
            return
        # Not in the handler: while an exception is handled, its traceback keeps objects alive.
        self._calls(calls // 4)

    def _open(self) -> DatasetStore:
        if self.closing:
            self._close()
        if self.store is None:
            self.store = DatasetStore.open(self.folder, "a", **self.life.options)
            self.say("opened", len(self.store))
        self._look()
        return self.store

    def _close(self) -> None:
        if self.store is not None:
            self.closing = True
            self.store.close()
            self.say("flushed", self.following)
            self.store, self.closing = None, False

    def _look(self) -> None:
        """Read the number of the next row from the store: of an interrupted call all rows are there, or none."""
        if self.store is not None and not self.closing and len(self.store):
            self.following = int(self.store[-1]["number"]) + 1

    def _calls(self, calls: int) -> None:
        for _ in range(calls):
            self.call()
        self._close()

    def call(self) -> None:
        """Call a random method of the store; open the store if it is not open."""
        life, rng, say, store = self.life, self.rng, self.say, self._open()
        calls = ("append", "extend", "flush", "reopen", "dataset", "clear", "read", "save")
        what = rng.choices(calls, (40, 30, 12, 5, 4, 1, 3, self.saves))[0]
        if what == "append" and not store.columns:
            what = "extend"  # a single row may have a null or an empty list, which have no type
        if what == "append":
            for _ in range(rng.randint(1, 20)):
                say("begins", self.following + 1)
                store.append(row_of(life.kind, self.following))
                self.following += 1
                say("acknowledged", self.following)
        elif what in ("extend", "dataset"):
            count = rng.choice(self.counts)
            say("begins", self.following + count)
            if what == "extend":
                store.extend(rows_of(life.kind, self.following, count))
            else:
                store.from_dataset(table_of(life.kind, self.following, count))
            self.following += count
            say("acknowledged", self.following)
        elif what == "flush":
            store.flush()
            say("flushed", self.following)
        elif what == "reopen":
            self._close()
        elif what == "clear":
            say("clearing", self.following)
            store.clear()
            say("cleared", self.following)
        elif what == "save" and len(store):
            self.saved += 1
            target = f"{self.folder}.saved-{os.getpid()}-{self.saved}-{rng.getrandbits(32)}"
            say("saving", target)
            store.save(target)
            say("saved", [target, len(store)])
        elif what == "read":
            check_batches(store, seed=self.following)


def _terminated(*_: Any) -> None:
    raise Terminated


def begin(folder: Path, life: Life, told: Path, seed: int) -> int:
    def work() -> None:
        signal.alarm(SECONDS)
        dies_of_threads()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _terminated)
        write = os.write

        def say(*values: Any) -> None:
            write(file, (json.dumps(values) + "\n").encode())

        program = Program(folder, life, random.Random(seed), say, following=life.begun)
        try:
            file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            program.run(60)
        except (KeyboardInterrupt, Terminated):
            pass  # before it had begun
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    return forked(work)


def check(folder: Path, life: Life, *, briefly: bool = False) -> range:
    """Check that acknowledged rows are there once and unchanged, for a reader and the next writer.

    With ``briefly``, check only for the writer.
    """
    # Before the manifest has its name, no call has returned.
    readable = (folder / "manifest.json").exists()
    assert readable or not life.acknowledged, "refused: there is no manifest"
    early = DatasetStore.open(folder) if readable and not briefly else None
    if early is not None:
        _compare(numbers_in(early), life, life.flushed, "a reader")
        check_batches(early)
        had = early.snapshot()
    before = None if early is None else len(early)
    store = DatasetStore.open(folder, "a", **life.options)
    found = numbers_in(store)
    _compare(found, life, life.acknowledged, "the next writer")
    check_batches(store)
    store.close()
    if briefly:
        assert not leftovers(folder), f"leftovers: {leftovers(folder)}"
        return found
    with DatasetStore.open(folder) as late:
        closed = numbers_in(late)
        assert closed == found or (closed.stop == found.stop and "max_rows" in life.options), (
            f"lost: {closed} instead of {found} after closing"
        )
    if early is not None and before:
        # The reader's rows are still there for the reader, although other files have the rows by now.
        first = had.rows([0])["number"][0]
        assert had.rows(range(before))["number"] == [*range(first, first + before)], "lost: rows of a reader"
        assert numbers_in(early) == closed, "lost: what a reader sees later"
        del had
    del early
    with DatasetStore.open(folder, "a", **life.options):
        pass
    left = leftovers(folder)
    assert not left, f"leftovers: {left}"
    for target, rows in life.saving.items():
        there = Path(target).exists()
        assert there or rows is None, f"lost: {target} was saved"
        if there:
            assert rows in (None, formats.open(target).rows), f"torn: {target}"
            assert DatasetStore.open(target)[-1] is not None
        assert not list(folder.parent.glob(f".{Path(target).name}.*")) or rows is None
    return closed


def _compare(found: range, life: Life, acknowledged: int, who: str) -> None:
    """Compare the numbers of the rows with the numbers that must and may be there."""
    if not len(found):
        nothing = life.lowest if not life.clearing else life.begun
        assert acknowledged <= nothing, f"lost: all up to {acknowledged} for {who}"
        return
    assert found.stop >= acknowledged, f"lost: {found.stop}..{acknowledged - 1} for {who}"
    assert found.stop <= life.begun, f"torn: {found} though only rows below {life.begun} were begun, for {who}"
    limit = life.options.get("max_rows")
    if limit is None:
        lowest = life.lowest
        assert found.start <= lowest or life.clearing, f"lost: {lowest}..{found.start - 1} for {who}"
    else:
        kept = min(limit // 2, acknowledged - life.lowest)
        assert len(found) >= kept or life.clearing, f"lost: {found} of {kept} that stay, for {who}"
    assert found.start >= life.lowest or who == "a reader" or life.clearing, f"repeated: {found} after a clear"


def next_life(life: Life, found: range) -> Life:
    """Return the state after recovery: exactly the rows that are there now are promised."""
    found = found or range(life.begun, life.begun)
    return Life(life.kind, life.options, found.stop, found.stop, max(found.stop, life.begun), found.start)


def options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"sync": rng.choice(SYNC)}
    if rng.random() < 0.3:
        options["layout"] = rng.choice(("columns", "windows"))
    if rng.random() < 0.3:
        options["max_rows"] = rng.choice((200, 1000))
    return options


def main(root: Path, kills: int, seed: int, *, keep: bool = False, show: bool = False) -> Counter[str]:
    """Kill until there were ``kills`` kills; return the numbers of kills and of each fault."""
    warnings.simplefilter("ignore")
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    import datasets

    datasets.disable_progress_bars()
    # Slow first calls are made before the first fork; their threads end before the fork.
    for kind in KINDS:
        warm = Life(kind, {"sync": "none"})
        Program(root / f"warm-{kind}", warm, random.Random(1), lambda *values: None).run(40)
        check(root / f"warm-{kind}", Life(kind, {"sync": "none"}, begun=10**9, clearing=True))
    deadline = time.monotonic() + 20
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    counts: Counter[str] = Counter()
    rng, number = random.Random(seed), 0
    while counts["kills"] < kills:
        number += 1
        folder = root / str(number) / "store"
        folder.parent.mkdir()
        life = Life(rng.choice(KINDS), options(rng))
        for at in range(LIVES):
            fault = _one(folder, life, rng, counts, at)
            if fault:
                counts[fault.split(":")[0]] += 1
                print(f"folder {number}, life {at}, {life.options}: {fault}", file=sys.stderr, flush=True)
                break
            if counts["kills"] >= kills:
                break
            life = _known(folder, life, root / str(number) / "known")
        else:
            fault = ""
        if not (keep and fault):
            shutil.rmtree(folder.parent, ignore_errors=True)
        if show and number % 50 == 0:
            print(dict(counts), file=sys.stderr, flush=True)
    return counts


def _one(folder: Path, life: Life, rng: random.Random, counts: Counter[str], at: int) -> str:
    """Run one life, and check the folder after it; return the fault, or "" if there is none."""
    told, said = folder.parent / f"told-{at}", folder.parent / f"fault-{at}"
    pid = begin(folder, life, told, rng.getrandbits(32))
    wait, begun = rng.random() * 0.06, time.monotonic()
    sent = rng.choices(list(SIGNALS), (4, 1, 1))[0]
    while not told.exists() and time.monotonic() - begun < 2:  # the wait begins with the first call
        time.sleep(0.001)
    time.sleep(wait)
    os.kill(pid, sent)  # until it is waited for, a child that has ended keeps its number
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and status:
        return "refused: the child ended by an error, see above"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        return f"signal: the child ended by signal {os.WTERMSIG(status)}"
    counts["kills" if status or sent != signal.SIGKILL else "ends"] += 1
    counts[SIGNALS[sent]] += sent != signal.SIGKILL
    for line in told.read_text().splitlines() if told.exists() else ():
        life.hears(json.loads(line))

    def checked() -> None:
        signal.alarm(SECONDS)
        dies_of_threads()
        try:
            check(folder, life)
        except BaseException as error:
            said.write_text(str(error) if isinstance(error, AssertionError) else f"refused: {error!r}")
            raise

    status = os.waitpid(forked(checked), 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal: the check ended by signal {os.WTERMSIG(status)}"
    if said.exists():
        return said.read_text()
    return "refused: a thread of the check ended by an error, see above" if status else ""


def _known(folder: Path, life: Life, file: Path) -> Life:
    """Return the state for the next life, which another process reads from the folder."""

    def work() -> None:
        with DatasetStore.open(folder) as store:
            known = next_life(life, numbers_in(store))
        file.write_text(json.dumps([known.acknowledged, known.begun, known.lowest]))

    os.waitpid(forked(work), 0)
    acknowledged, begun, lowest = json.loads(file.read_text())
    return Life(life.kind, life.options, acknowledged, acknowledged, begun, lowest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where faulty folders are kept; by default they are removed")
    chosen = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        base = chosen.folder or Path(temporary)
        base.mkdir(exist_ok=True)
        found = main(base, chosen.kills, chosen.seed, keep=chosen.folder is not None, show=True)
    print(json.dumps({**found, "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(bool(found.keys() - {*SIGNALS.values(), "ends"}))
