"""Rows appended in memory and to a folder, and batches drawn meanwhile; a log flushed and recovered."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import BatchSource, DatasetStore
from mouse_core.collect import StoreClient, StoreServer
from tests.bench import generate
from tests.bench.measuring import Contender, interleave, quartiles_of
from tests.bench.results import Figure, Settings, Table, compare, contenders, figure_of
from tests.bench.workloads import NARROW, dataset_folder, store_of

_ROWS = 100_000
_APPENDS_A_BATCH = 32
_FLUSHED_ROWS = 1_000
_LOG_BYTES, _ROW_BYTES = 100_000_000, 168


def _columns(count: int) -> dict[str, Any]:
    return generate.rows_of(generate.STATE, np.arange(count))


def _rows(count: int) -> list[dict[str, Any]]:
    """Rows as an environment loop has them."""
    columns = _columns(count)
    lists = {name: list(values) if values.ndim > 1 else values.tolist() for name, values in columns.items()}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def rates(settings: Settings) -> list[Figure]:
    """Rows a second by `append`, and the bandwidth of `extend` beside that of a plain copy.

    The copy goes to memory that is there already: a copy into fresh arrays takes once as long and once four times as
    long, by what ``malloc`` happens to have given back.
    """
    columns = _columns(_ROWS)
    rows = _rows(5_000)
    nbytes = sum(values.nbytes for values in columns.values())
    copies = {name: values.copy() for name, values in columns.items()}

    def append(number: int) -> None:
        store = DatasetStore()
        for _ in range(4):
            for row in rows:
                store.append(row)

    def copy(number: int) -> None:
        for name, values in columns.items():
            np.copyto(copies[name], values)

    def in_thousands(store: Any) -> None:
        for begin in range(0, _ROWS, 1_000):
            store.extend({name: values[begin : begin + 1_000] for name, values in columns.items()})

    def through_a_server(number: int) -> None:
        with StoreServer(DatasetStore()) as server, StoreClient(server.address, "bench") as client:
            in_thousands(client)

    calls: dict[str, Callable[[int], None]] = {
        "append": append,
        "extend": lambda number: DatasetStore().extend(columns),
        "copy": copy,
        "server": through_a_server,
        "thousands": lambda number: in_thousands(DatasetStore()),
    }
    one, many, plain, sent, here = interleave(
        contenders(calls), rounds=max(7, settings.rounds // 4), budget_seconds=settings.budget
    )
    return [
        Figure("append", "append, rows a second", 20_000 / one.median, "rows/s"),
        Figure("extend", "extend, rows a second", _ROWS / many.median, "rows/s"),
        Figure("extend-bytes", "extend, bandwidth", nbytes / many.median / 1e9, "GB/s"),
        Figure("copy-bytes", "NumPy copying the same arrays to allocated memory", nbytes / plain.median / 1e9, "GB/s"),
        figure_of("extend-share", "extend, share of NumPy's copy bandwidth", plain.ratio(many)),
        Figure("server", "extend through a StoreServer by 1,000 rows, rows a second", _ROWS / sent.median, "rows/s"),
        figure_of("server-share", "StoreServer, share of the rate of extend in place", here.ratio(sent)),
    ]


def while_sampling(settings: Settings) -> list[Table]:
    """Batches drawn alone, between appends, and while a process or a thread appends without a pause."""
    folder, rows, title = dataset_folder(settings), _rows(2_000), "Batches B=32, S=64"

    def store() -> DatasetStore:
        made = store_of(folder)
        made.extend(_columns(20_000))
        return made

    calls = {
        "sampling alone": _source(store()).__getitem__,
        f"{_APPENDS_A_BATCH} appends alone": _appending(store(), rows),
    }
    for every in (0, 1_000, _APPENDS_A_BATCH):
        seen = f"seen every {every} rows" if every else "not seen yet"
        calls[f"between {_APPENDS_A_BATCH} appends, {seen}"] = _between(store(), rows, every)
    floor, appends, *between = contenders(calls, first="floor", multiple=128)
    alternating = [floor, appends, *(replace(one, kind="ours") for one in between)]
    turns: dict[str, Any] = {"rounds": max(7, settings.rounds // 2)}
    notes = [f"Times include appending {_APPENDS_A_BATCH} rows of six columns before each batch."]
    name = f"{title}, alternating with appends by the same thread"
    first = compare(settings, "appends", name, alternating, **turns, notes=notes)
    spawning = multiprocessing.get_context("spawn")
    with _meanwhile(spawning, spawning.Process) as process, _meanwhile(threading, threading.Thread) as thread:
        beside = [
            Contender("sampling alone", _source(store()).__getitem__, "floor", wall=True, multiple=128),
            Contender("while a process appends", _source(store()).__getitem__, "ours", True, 0, 128, *process),
            Contender("while a thread appends", _source(store()).__getitem__, "ours", True, 0, 128, *thread),
        ]
        notes = [
            "Times are wall-clock times while another thread or process appends without pauses.",
            "An appending thread of the same process holds the interpreter lock (GIL), so sampling waits for the lock.",
        ]
        name = f"{title}, while another thread or process appends"
        return [first, compare(settings, "appends-beside", name, beside, **turns, notes=notes)]


def _source(store: DatasetStore) -> BatchSource:
    return BatchSource(store, 64, 32, dtypes=NARROW)


def _appending(store: DatasetStore, rows: list[dict[str, Any]]) -> Callable[[int], Any]:
    """Appends some rows."""
    following = cycle(rows)

    def append(number: int) -> None:
        for row in islice(following, _APPENDS_A_BATCH):
            store.append(row)

    return append


def _between(store: DatasetStore, rows: list[dict[str, Any]], every: int) -> Callable[[int], Any]:
    """Appends some rows, then draws a batch; the new rows are among those drawn from after every so many."""
    append, source, since = _appending(store, rows), _source(store), 0

    def draw(number: int) -> Any:
        nonlocal source, since
        append(number)
        since += _APPENDS_A_BATCH
        if every and since >= every:
            since, source = 0, source.with_snapshot(store.snapshot(), epoch_start=0)
        return source[number]

    return draw


@contextmanager
def _meanwhile(of: Any, worker: Any) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Before and after a slice: let a thread or a process append to a store of its own, and stop it."""
    go, ready, ended = of.Event(), of.Event(), of.Event()
    work = worker(target=_append, args=(go, ready, ended), daemon=True)
    work.start()
    ready.wait()
    try:
        yield go.set, go.clear
    finally:
        ended.set()
        go.set()
        work.join()


def _append(go: Any, ready: Any, ended: Any) -> None:
    rows = _rows(2_000)
    ready.set()
    while not ended.is_set():
        store = DatasetStore()
        append = _appending(store, rows)
        while len(store) < 1_000_000 and not ended.is_set():
            go.wait()
            append(0)


# ---------------------------------------------------------------------- folders


def on_disk(settings: Settings) -> list[Figure]:
    """What writing to a folder costs, each beside what it cannot do without."""
    folder = Path(tempfile.mkdtemp(prefix="disk-", dir=settings.folder))
    try:
        return [*_appends(folder, settings), _flushes(folder, settings), _recovery(folder, settings)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _appends(folder: Path, settings: Settings) -> list[Figure]:
    """Rows appended one by one."""
    rows, memory = _rows(4_000), DatasetStore()

    def append(to: DatasetStore, _: int) -> None:
        for row in rows:
            to.append(row)

    with DatasetStore.open(folder / "append", "a", sync="none") as store:
        calls = {"in memory": partial(append, memory), "on disk": partial(append, store)}
        one, other = interleave(contenders(calls), rounds=max(9, settings.rounds // 2), budget_seconds=settings.budget)
    return [
        Figure("disk-append", "append to a folder, rows a second", len(rows) / other.median, "rows/s"),
        figure_of("disk-append-share", "append to a folder, share of the rate in memory", one.ratio(other)),
    ]


def _flushes(folder: Path, settings: Settings) -> Figure:
    """1,000 rows that are waited for, and as many bytes written and waited for, in turns."""
    columns = _columns(_FLUSHED_ROWS)
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
    name = "1,000 rows extended and flushed, rate beside a bare write and fsync"
    return figure_of("disk-flush-share", name, quartiles_of(shares))


def _recovery(folder: Path, settings: Settings) -> Figure:
    """A log of 100 MB that was left by a process that ends at once, read once, and opened to be written."""
    columns = _columns(_LOG_BYTES // _ROW_BYTES)

    def left(at: Path) -> float:
        DatasetStore.open(at, "a", sync="none").extend(columns)
        return 0.0

    def read(at: Path) -> float:
        (log,), memory = at.glob("*.rows"), bytearray(_LOG_BYTES + (8 << 20))
        began = time.perf_counter()
        with log.open("rb", buffering=0) as file:
            file.readinto(memory)
        return time.perf_counter() - began

    def opened(at: Path) -> float:
        began = time.perf_counter()
        DatasetStore.open(at, "a", sync="none")
        return time.perf_counter() - began

    times = []
    for number in range(max(5, settings.rounds // 4)):
        at = folder / f"left-{number}"
        _, once, whole = (_ended(partial(work, at)) for work in (left, read, opened))
        times.append(whole / once)
        shutil.rmtree(at)  # opening wrote the rows of the log to segments
    name = "a log of 100 MB recovered, relative to reading it once"
    return figure_of("disk-recover", name, quartiles_of(times), " times")


def _ended(work: Callable[[], float]) -> float:
    """What some work gives, in a process that ends at once, as if it were killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.write(writing, repr(work()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(process, 0)
    said = os.read(reading, 100)
    os.close(reading)
    return float(said)
