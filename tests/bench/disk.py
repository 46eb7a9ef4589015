"""Stores on disk: rows appended beside those in memory, flushed beside a bare write, recovered beside reading once."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import DatasetStore
from mouse_core.bench import Contender, interleave
from tests.bench.results import Figure
from tests.bench.settings import Settings

_FLUSHED_ROWS = 1_000
_LOG_BYTES = 100_000_000


def columns_of(count: int) -> dict[str, Any]:
    """Rows of five fields, 44 bytes each."""
    number = np.arange(count)
    return {
        "observation": np.stack([number, number / 2, -number], 1).astype(np.float32),
        "action": number % 5,
        "reward": number / 4,
        "done": number % 2,
        "episode_step": number,
    }


def _rows(count: int) -> list[dict[str, Any]]:
    columns = columns_of(count)
    lists = {name: list(values) if values.ndim > 1 else values.tolist() for name, values in columns.items()}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def figures(settings: Settings) -> list[Figure]:
    """What writing to a folder costs, each beside what it cannot do without."""
    folder = Path(tempfile.mkdtemp(prefix="disk-", dir=settings.folder))
    try:
        return [*_appends(folder, settings), _flushes(folder, settings), _recovery(folder, settings)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _appends(folder: Path, settings: Settings) -> list[Figure]:
    """Rows appended one by one."""
    rows, memory = _rows(4_000), DatasetStore()
    with DatasetStore.open(folder / "append", "a", sync="none") as store:

        def append(to: DatasetStore) -> Callable[[int], None]:
            def call(_: int) -> None:
                for row in rows:
                    to.append(row)

            return call

        one, other = interleave(
            [Contender("in memory", append(memory)), Contender("on disk", append(store))],
            rounds=max(9, settings.rounds // 2),
            budget_seconds=settings.budget,
        )
    share = one.ratio(other)
    return [
        Figure("disk-append", "append to a folder, rows a second", len(rows) / other.median, "rows/s"),
        Figure(
            "disk-append-share", "append to a folder, share of the rate in memory", share[1], "", (share[0], share[2])
        ),
    ]


def _flushes(folder: Path, settings: Settings) -> Figure:
    """1,000 rows that are waited for, and as many bytes written and waited for, in turns."""
    columns = columns_of(_FLUSHED_ROWS)
    content = bytes(sum(values.nbytes for values in columns.values()))
    file = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT)
    shares = []
    with DatasetStore.open(folder / "flush", "a", sync="flush") as store:
        for _ in range(8 * settings.rounds):
            began = time.perf_counter()
            os.write(file, content)
            os.fsync(file)
            between = time.perf_counter()
            store.extend(columns)
            store.flush()
            shares.append((between - began) / (time.perf_counter() - between))
    os.close(file)
    return _figure("disk-flush-share", "1,000 rows extended and flushed, rate beside a bare write and fsync", shares)


def _recovery(folder: Path, settings: Settings) -> Figure:
    """A log of 100 MB that was left by a process that ended at once, opened to be written, and read once."""
    columns = columns_of(_LOG_BYTES // 44)

    def left() -> float:
        DatasetStore.open(folder / "left", "a", sync="none").extend(columns)
        return 0.0

    def opened() -> float:
        began = time.perf_counter()
        DatasetStore.open(folder / "left", "a", sync="none")
        return time.perf_counter() - began

    def read() -> float:
        log, memory = max((folder / "left").glob("*.rows")), bytearray(_LOG_BYTES + (8 << 20))
        began = time.perf_counter()
        with log.open("rb", buffering=0) as file:
            file.readinto(memory)
        return time.perf_counter() - began

    _ended(left)
    times = [_ended(opened) / _ended(read) for _ in range(max(5, settings.rounds // 4))]
    return _figure("disk-recover", "a log of 100 MB recovered, beside reading it once", times, " times")


def _ended(work: Callable[[], float]) -> float:
    """What some work gives, in a process that ends at once, as if it were killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.write(writing, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(process, 0)
    said = os.read(reading, 100)
    os.close(reading)
    return float(said)


def _figure(key: str, name: str, values: Sequence[float], unit: str = "") -> Figure:
    low, median, high = statistics.quantiles(values, n=4)
    return Figure(key, name, median, unit, (low, high))
