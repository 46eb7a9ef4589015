"""A writer and readers of one folder at the same time, for as long as is asked, as a program of its own.

The writer appends, flushes, takes datasets, closes and opens again, keeps a number of rows, and is killed now and then.
Readers draw batches through a loader, which they refresh, and look at every value. Memory that is a process's own, its
open files and its mapped files are noted all along: in the second half they must not be more than in the first.

    python -m tests.core.store_together --seconds 1800
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import DatasetStore, PrefetchBatchifier
from tests.core.disk_cases import KINDS, leftovers, rows_of, table_of
from tests.core.killing import dies_of_threads, forked

READERS = 3
MAX_ROWS = 20_000
# What one reader's allocator and one writer's files may come to beside what they keep.
_MORE = {"megabytes": 40, "descriptors": 8, "maps": 60, "files": 40}


def own() -> dict[str, int]:
    """What this process has: megabytes of its own, descriptors, mappings of files of a store."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {
        "megabytes": int(anonymous.split()[1]) >> 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": sum("/store/" in line for line in maps),
    }


def write(folder: Path, kind: str, until: float, report: Callable[[dict[str, int]], None]) -> None:
    """Write until a moment."""
    rng = random.Random(os.getpid())
    store = DatasetStore.open(folder, "a", sync=rng.choice(("none", "flush")), max_rows=MAX_ROWS)
    number = store[-1]["number"] + 1 if len(store) else 0
    while time.time() < until:
        what = rng.random()
        count = rng.choice((1, 10, 100, 600))
        if what < 0.9:
            store.extend(rows_of(kind, number, count))
            number += count
        elif what < 0.93:
            store.from_dataset(table_of(kind, number, count))
            number += count
        elif what < 0.94:
            store.close()
            store = DatasetStore.open(folder, "a", max_rows=MAX_ROWS)
        if what > 0.5:
            store.flush()
        assert len(store) <= MAX_ROWS
        report({**own(), "rows": number, "files": sum(len(names) for _, _, names in os.walk(folder))})
        time.sleep(0.002)
    store.close()


def read(folder: Path, until: float, report: Callable[[dict[str, int]], None]) -> None:
    """Draw batches until a moment, and look at every value."""
    while not (folder / "manifest.json").exists() or not len(DatasetStore.open(folder)):
        time.sleep(0.05)
    store = DatasetStore.open(folder)
    batches, newest = 0, 0
    with PrefetchBatchifier(store, 8, 16, seed=os.getpid()) as loader:
        while time.time() < until:
            for _, batch in zip(range(5), loader, strict=False):
                number = batch["obs_continuous"][..., 0]
                assert (np.diff(number, axis=1) == 1).all(), "windows are not of rows that follow each other"
                assert (batch["reward"] * 4 == number.astype(np.float32)).all()
                assert (batch["obs_continuous"] == number[..., None] * np.array([1.0, 10.0, 0.25])).all()
                assert (batch["time"] == number % 7).all()
                newest, batches = max(newest, int(number.max())), batches + 1
            loader.refresh()
            report({**own(), "batches": batches, "rows": newest})


def _child(work: Callable[..., None], *arguments: Any, to: Path) -> int:
    """A child that reports to a file, a line at most every fifth of a second; its process."""

    def reporting() -> None:
        dies_of_threads()
        with to.open("a", encoding="utf-8", buffering=1) as lines:
            last = [0.0]

            def report(said: dict[str, int]) -> None:
                if time.time() - last[0] > 0.2:
                    last[0] = time.time()
                    lines.write(json.dumps({"at": last[0], **said}) + "\n")

            work(*arguments, report)

    return forked(reporting)


def main(root: Path, kind: str, seconds: float, kill_every: float) -> dict[str, Any]:
    """Let them run; what was found, with what is wrong under "wrong"."""
    warnings.simplefilter("ignore")
    folder, began = root / "store", time.time()
    until = began + seconds
    readers = [_child(read, folder, until, to=root / f"reader-{number}") for number in range(READERS)]
    writer, kills, wrong = _child(write, folder, kind, until, to=root / "writer-0"), 0, []
    while time.time() < until:
        time.sleep(min(kill_every, max(until - time.time(), 0)))
        if until - time.time() > 2:
            os.kill(writer, signal.SIGKILL)
            if os.waitpid(writer, 0)[1] != signal.SIGKILL:
                wrong.append("the writer ended by an error")
            kills += 1
            writer = _child(write, folder, kind, until, to=root / f"writer-{kills}")
    if os.waitpid(writer, 0)[1]:
        wrong.append("the writer ended by an error")
    for number, reader in enumerate(readers):
        if os.waitpid(reader, 0)[1]:
            wrong.append(f"reader {number} ended by an error")
    with DatasetStore.open(folder, "a", max_rows=MAX_ROWS):
        pass
    left = leftovers(folder)
    if left:
        wrong.append(f"leftovers: {left}")
    found: dict[str, Any] = {"seconds": round(time.time() - began), "kind": kind, "kills": kills, "wrong": wrong}
    for name in sorted(path.name for path in root.iterdir() if path.is_file()):
        lines = [json.loads(line) for line in (root / name).read_text(encoding="utf-8").splitlines()]
        # Of the first lines, some are of when everything was loaded.
        begun, rest = lines[len(lines) // 5 : len(lines) // 2], lines[len(lines) // 2 :]
        if len(begun) < 5:
            continue
        found[name] = {}
        for what, more in _MORE.items():
            if what in rest[0]:
                first, second = (max(line[what] for line in part) for part in (begun, rest))
                found[name][what] = [first, second]
                if second > first + more:
                    wrong.append(f"{name}: {what} grew from {first} to {second}")
        found[name] |= {what: rest[-1][what] for what in ("rows", "batches") if what in rest[-1]}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--kill-every", type=float, default=3)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = main(Path(temporary), chosen.kind, chosen.seconds, chosen.kill_every)
    print(json.dumps(result))
    sys.exit(bool(result["wrong"]))
