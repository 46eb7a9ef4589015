"""Rows appended in memory and to a folder, and batches drawn meanwhile; a log flushed and recovered."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import BatchSource, DatasetStore
from mouse_core.collect import StoreClient, StoreServer
from tests.bench import generate
from tests.bench.measuring import Contender, interleave
from tests.bench.results import Figure, Settings, Table, compare, contenders
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

    def extend(number: int) -> None:
        DatasetStore().extend(columns)

    def copy(number: int) -> None:
        for name, values in columns.items():
            np.copyto(copies[name], values)

    def through_a_server(number: int) -> None:
        with StoreServer(DatasetStore()) as server, StoreClient(server.address, "bench") as client:
            for begin in range(0, _ROWS, 1_000):
                client.extend({name: values[begin : begin + 1_000] for name, values in columns.items()})

    def in_thousands(number: int) -> None:
        store = DatasetStore()
        for begin in range(0, _ROWS, 1_000):
            store.extend({name: values[begin : begin + 1_000] for name, values in columns.items()})

    calls = {"append": append, "extend": extend, "copy": copy, "server": through_a_server, "thousands": in_thousands}
    one, many, plain, sent, here = interleave(
        contenders(calls), rounds=max(7, settings.rounds // 4), budget_seconds=settings.budget
    )
    share, of_extend = plain.ratio(many), here.ratio(sent)
    return [
        Figure("append", "append, rows a second", 20_000 / one.median, "rows/s"),
        Figure("extend", "extend, rows a second", _ROWS / many.median, "rows/s"),
        Figure("extend-bytes", "extend, bandwidth", nbytes / many.median / 1e9, "GB/s"),
        Figure("copy-bytes", "NumPy copying the same arrays to allocated memory", nbytes / plain.median / 1e9, "GB/s"),
        Figure("extend-share", "extend, share of NumPy's copy bandwidth", share[1], "", (share[0], share[2])),
        Figure("server", "extend through a StoreServer by 1,000 rows, rows a second", _ROWS / sent.median, "rows/s"),
        Figure(
            "server-share",
            "StoreServer, share of the rate of extend in place",
            of_extend[1],
            "",
            (of_extend[0], of_extend[2]),
        ),
    ]


def while_sampling(settings: Settings) -> list[Table]:
    """Batches drawn alone, between appends, and while a process or a thread appends without a pause."""
    folder, rows, title = dataset_folder(settings), _rows(2_000), "Batches B=32, S=64"
    rounds = max(7, settings.rounds // 2)

    def store() -> DatasetStore:
        made = store_of(folder)
        made.extend(_columns(20_000))
        return made

    def source(made: DatasetStore) -> BatchSource:
        return BatchSource(made, 64, 32, dtypes=NARROW)

    between = {every: _Between(store(), source, rows, every) for every in (0, 1_000, _APPENDS_A_BATCH)}
    alternating = [
        Contender("sampling alone", source(store()).__getitem__, "floor", multiple=128),
        Contender(f"{_APPENDS_A_BATCH} appends alone", _Appends(store(), rows), multiple=128),
        *(
            Contender(f"between {_APPENDS_A_BATCH} appends, {_fresh(every)}", call, "ours", multiple=128)
            for every, call in between.items()
        ),
    ]
    notes = [f"Times include appending {_APPENDS_A_BATCH} rows of six columns before each batch."]
    name = f"{title}, alternating with appends by the same thread"
    first = compare(settings, "appends", name, alternating, rounds=rounds, notes=notes)
    with _process() as process, _thread(store(), rows) as thread:
        beside = [
            Contender("sampling alone", source(store()).__getitem__, "floor", wall=True, multiple=128),
            Contender("while a process appends", source(store()).__getitem__, "ours", True, 0, 128, *process),
            Contender("while a thread appends", source(store()).__getitem__, "ours", True, 0, 128, *thread),
        ]
        notes = [
            "Times are wall-clock times while another thread or process appends without pauses.",
            "An appending thread of the same process holds the interpreter lock (GIL), so sampling waits for the lock.",
        ]
        name = f"{title}, while another thread or process appends"
        return [first, compare(settings, "appends-beside", name, beside, rounds=rounds, notes=notes)]


def _fresh(every: int) -> str:
    return f"seen every {every} rows" if every else "not seen yet"


class _Appends:
    def __init__(self, store: DatasetStore, rows: list[dict[str, Any]]) -> None:
        self.store, self._rows, self._next = store, rows, 0

    def __call__(self, number: int) -> None:
        append, rows = self.store.append, self._rows
        for _ in range(_APPENDS_A_BATCH):
            append(rows[self._next])
            self._next = (self._next + 1) % len(rows)


class _Between:
    """Appends some rows, then draws a batch; the new rows are among those drawn from after every so many."""

    def __init__(
        self,
        store: DatasetStore,
        make: Callable[[DatasetStore], BatchSource],
        rows: list[dict[str, Any]],
        every: int,
    ) -> None:
        self._appends = _Appends(store, rows)
        self._source = make(store)
        self._every, self._since = every, 0

    def __call__(self, number: int) -> object:
        self._appends(number)
        self._since += _APPENDS_A_BATCH
        if self._every and self._since >= self._every:
            self._since = 0
            snapshot = self._appends.store.snapshot()
            self._source = self._source.with_snapshot(snapshot, epoch_start=0)
        return self._source[number]


_Hooks = tuple[Callable[[], None], Callable[[], None]]


@contextmanager
def _thread(store: DatasetStore, rows: list[dict[str, Any]]) -> Iterator[_Hooks]:
    """Before and after a slice: let a thread append, and stop it."""
    go, ended = threading.Event(), threading.Event()

    def work() -> None:
        appends = _Appends(store, rows)
        while not ended.is_set():
            go.wait()
            appends(0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield go.set, go.clear
    finally:
        ended.set()
        go.set()
        thread.join()


@contextmanager
def _process() -> Iterator[_Hooks]:
    """The same with a process, that appends to a store of its own."""
    context = multiprocessing.get_context("spawn")
    go, ready = context.Event(), context.Event()
    process = context.Process(target=_append_for_ever, args=(go, ready), daemon=True)
    process.start()
    ready.wait()
    try:
        yield go.set, go.clear
    finally:
        process.terminate()
        process.join()


def _append_for_ever(go: Any, ready: Any) -> None:
    rows = _rows(2_000)
    appends = _Appends(DatasetStore(), rows)
    ready.set()
    while True:
        go.wait()
        if len(appends.store) > 1_000_000:
            appends = _Appends(DatasetStore(), rows)
        appends(0)


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
    share = one.ratio(other)
    return [
        Figure("disk-append", "append to a folder, rows a second", len(rows) / other.median, "rows/s"),
        Figure(
            "disk-append-share", "append to a folder, share of the rate in memory", share[1], "", (share[0], share[2])
        ),
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
    return _figure("disk-flush-share", "1,000 rows extended and flushed, rate beside a bare write and fsync", shares)


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
    return _figure("disk-recover", "a log of 100 MB recovered, relative to reading it once", times, " times")


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


def _figure(key: str, name: str, values: Sequence[float], unit: str = "") -> Figure:
    low, median, high = statistics.quantiles(values, n=4)
    return Figure(key, name, median, unit, (low, high))
