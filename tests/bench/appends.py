"""Rows appended one by one and many at once, and batches drawn meanwhile."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mouse_core import BatchSource, DatasetStore
from mouse_core.bench import Contender, interleave
from mouse_core.collect import StoreClient, StoreServer
from tests.bench import generate
from tests.bench.results import Figure, Table, table_of
from tests.bench.settings import Settings
from tests.bench.workloads import dataset_folder

_ROWS = 100_000
_APPENDS_A_BATCH = 32


def rows_as_dicts(count: int) -> list[dict[str, Any]]:
    """Rows as an environment loop has them."""
    columns = generate.rows_of(generate.STATE, np.arange(count))
    lists = {name: list(values) if values.ndim > 1 else values.tolist() for name, values in columns.items()}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def rates(settings: Settings) -> list[Figure]:
    """Rows a second by `append`, and the bandwidth of `extend` beside that of a plain copy.

    The copy goes to memory that is there already: a copy into fresh arrays takes once as long and once four times as
    long, by what ``malloc`` happens to have given back.
    """
    columns = generate.rows_of(generate.STATE, np.arange(_ROWS))
    rows = rows_as_dicts(5_000)
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

    one, many, plain, sent, here = interleave(
        [
            Contender("append", append),
            Contender("extend", extend),
            Contender("copy", copy),
            Contender("server", through_a_server),
            Contender("thousands", in_thousands),
        ],
        rounds=max(7, settings.rounds // 4),
        budget_seconds=settings.budget,
    )
    share, of_extend = plain.ratio(many), here.ratio(sent)
    return [
        Figure("append", "append, rows a second", 20_000 / one.median, "rows/s"),
        Figure("extend", "extend, rows a second", _ROWS / many.median, "rows/s"),
        Figure("extend-bytes", "extend, bandwidth", nbytes / many.median / 1e9, "GB/s"),
        Figure(
            "copy-bytes", "NumPy copying the same arrays to memory that is there", nbytes / plain.median / 1e9, "GB/s"
        ),
        Figure("extend-share", "extend, share of that copy's bandwidth", share[1], "", (share[0], share[2])),
        Figure("server", "extend through a StoreServer by 1,000 rows, rows a second", _ROWS / sent.median, "rows/s"),
        Figure("server-share", "that beside extend in place", of_extend[1], "", (of_extend[0], of_extend[2])),
    ]


def while_sampling(settings: Settings) -> list[Table]:
    """Batches drawn alone, between appends, and while a process or a thread appends without a pause."""
    import datasets

    folder = dataset_folder(generate.STATE, settings.rows, settings)
    rows = rows_as_dicts(2_000)

    def store() -> DatasetStore:
        made = DatasetStore().from_dataset(datasets.load_from_disk(str(folder)))
        made.extend(generate.rows_of(generate.STATE, np.arange(20_000)))
        return made

    def source(made: DatasetStore) -> BatchSource:
        return BatchSource(made, 64, 32, dtypes={"obs_continuous": "float32"})

    between = {every: _Between(store(), source, rows, every) for every in (0, 1_000, _APPENDS_A_BATCH)}
    alternating = interleave(
        [
            Contender("sampling alone", source(store()).__getitem__, "floor", multiple=128),
            Contender(f"{_APPENDS_A_BATCH} appends alone", _Appends(store(), rows), multiple=128),
            *(
                Contender(f"between {_APPENDS_A_BATCH} appends, {_fresh(every)}", call, "ours", multiple=128)
                for every, call in between.items()
            ),
        ],
        rounds=max(7, settings.rounds // 2),
        budget_seconds=settings.budget,
    )
    with _process() as process, _thread(store(), rows) as thread:
        beside = interleave(
            [
                Contender("sampling alone", source(store()).__getitem__, "floor", wall=True, multiple=128),
                Contender("while a process appends", source(store()).__getitem__, "ours", True, 0, 128, *process),
                Contender("while a thread appends", source(store()).__getitem__, "ours", True, 0, 128, *thread),
            ],
            rounds=max(7, settings.rounds // 2),
            budget_seconds=settings.budget,
        )
    title = "Batches B=32, S=64"
    return [
        table_of(
            "appends",
            f"{title}, and rows appended by the same thread",
            alternating,
            notes=[f"A batch after {_APPENDS_A_BATCH} appended rows of six columns; times include the appending."],
        ),
        table_of(
            "appends-beside",
            f"{title}, while others append",
            beside,
            notes=[
                "By the wall clock, with an appender that never pauses.",
                "A thread of the same interpreter holds its lock, so sampling has to wait for it.",
            ],
        ),
    ]


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
    rows = rows_as_dicts(2_000)
    appends = _Appends(DatasetStore(), rows)
    ready.set()
    while True:
        go.wait()
        if len(appends.store) > 1_000_000:
            appends = _Appends(DatasetStore(), rows)
        appends(0)
