"""Batches from an object storage that is 20 ms away: python -m tests.bench.elsewhere FOLDER.

The storage is a process of this machine: 20 ms before each answer, 80 MB/s a connection, and 400 MB/s in all, or 125
MB/s, which is what a link of 1 Gbit/s gives. Rows are of a store in FOLDER, made where there is none: two million steps
of six columns, in both layouts. The cache is empty at the beginning of each line.

Batches are counted from where as many were asked for ahead as ever are; from blocks to where all of an epoch was asked
for. Bytes sent for each delivered are those of such an epoch as a whole, as at its beginning more come than are
delivered; delivered are those that the rows of a batch have in the store. Beside each line is what the client of the
storage takes alone for the same ranges, and what batches of the folder itself take of the processor.

Lines of Lance, which reads the same rows from the same storage, are there where it is installed; ``--lance DIRECTORY``
names one that ``pip install --target DIRECTORY pylance`` filled. Streams of `datasets` and, by ``--mosaic PYTHON``, of
MosaicML are beside them. Then come caches of parts of the data, and the first batch of 1 TB in 4,000 objects, which are
the same one under different names.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mouse_core import BatchSource, DatasetStore
from mouse_core.metadata import DatasetMetadata
from mouse_core.remote.clients.objects import AT_ONCE, GROUP, FolderClient
from mouse_core.sampling import Blocks
from mouse_core.store.disk.folder import Manifest, bare_schema, new_identity, write_manifest
from mouse_core.store.disk.segments import write_segment
from tests.bench import generate
from tests.bench.child import ask
from tests.bench.mosaic import streamed
from tests.bench.results import Figure

_PART = 100_000
# Bytes a second of all connections together, by what stands before a figure's name.
_LINKS = {"": 400e6, "gigabit-": 125e6}
# Blocks of 256 KB in a pool: the 1,024 of the default are most of this store, and few of one that is read so.
_POOL = 64
# Batches that are not counted: as many, and more, are asked for ahead, and found out how they lie.
_BEFORE = 128
_LENGTH, _WINDOWS = 64, 32
# What part of the data caches have room for, in percent; and bytes of a page.
_KEPT, _PAGE = (10, 25, 50, 75), 4096
# Those that stream, which read all there is in turn and shuffle what they hold: windows in a buffer from which they are
# drawn.
_STREAMS = {"datasets": "datasets, streaming", "mosaic": "MosaicML's streaming"}
_SHUFFLED = 256
# Objects of the largest store, and rows of each: some 256 MB.
_OBJECTS, _ROWS = 4000, 1_500_000

_Wanted = tuple[str, int, int]


def make(folder: Path, layout: str, rows: int) -> None:
    """Write a store of so many steps, if it is not there."""
    if folder.exists():
        return
    with DatasetStore.open(folder, "a", layout=layout) as store:
        for begin in range(0, rows, _PART):
            store.extend(columns(begin, _PART))


def columns(begin: int, count: int) -> dict[str, Any]:
    """Some steps."""
    return generate.rows_of(generate.STATE, np.arange(begin, begin + count))


_ROW_BYTES = sum(values.nbytes for values in columns(0, 1).values())


def as_table(made: dict[str, Any]) -> pa.Table:
    """Steps as Arrow has them."""
    lists = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        for name, values in made.items()
        if values.ndim > 1
    }
    return pa.table({name: lists.get(name, values) for name, values in made.items()})


def make_large(folder: Path, layout: str, objects: int) -> None:
    """Write a store of so many objects, all of them one file, if it is not there."""
    target, one = folder / "large" / layout, folder / f"large-{layout}"
    if target.exists():
        return
    (one / "segments").mkdir(parents=True, exist_ok=True)
    table = as_table(columns(0, _ROWS))
    sealed, schema = write_segment(one, 0, table, layout)
    (target / "segments").mkdir(parents=True)
    every = tuple(sealed._replace(number=number) for number in range(objects))
    for each in every:
        (target / each.name).symlink_to(one / sealed.name)
    manifest = Manifest(
        DatasetMetadata("arrived"), (bare_schema(schema),), segments=every, next_number=objects, identity=new_identity()
    )
    write_manifest(target, manifest)


class Storage:
    """A process that serves a folder's files in the bucket ``data`` until the end of a ``with`` block."""

    def __init__(self, folder: Path, bandwidth: float = _LINKS[""]) -> None:
        limits = ["--latency", "0.02", "--connection-bandwidth", "80e6", "--bandwidth", str(bandwidth)]
        command = [sys.executable, "-m", "tests.bench.object_storage", str(folder), *limits]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint, self.bandwidth = f"http://127.0.0.1:{int(self._said())}", bandwidth
        self.options = {"aws_endpoint": self.endpoint, "aws_region": "none", "aws_skip_signature": "true"}

    def sent(self) -> tuple[int, int]:
        """How many requests there were so far, and how many bytes were sent."""
        assert self._process.stdin is not None
        self._process.stdin.write("sent\n")
        self._process.stdin.flush()
        requests, count = map(int, self._said().split())
        return requests, count

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


def measure(served: Storage, folder: Path, cache: Path, batches: int, **how: Any) -> dict[str, float]:
    """Batches of 32 windows of 64 steps, an empty cache before them: so many exact ones, or an epoch from blocks."""
    url, whole = f"s3://data/{folder.name}", "sampling" in how
    local = _local(folder, batches, **how)
    shutil.rmtree(cache, ignore_errors=True)
    before, began = served.sent(), time.perf_counter()
    store = DatasetStore.open(url, storage_options=served.options, cache=cache, cache_bytes=8 << 30)
    source = BatchSource(store, _LENGTH, _WINDOWS, **how)
    _ = source[0]
    opened = time.perf_counter() - began
    first, behind = 1 + _BEFORE, len(source) if whole else 1 + _BEFORE + batches
    for index in range(1, first):
        _ = source[index]
    before = before if whole else served.sent()  # of all that an epoch reads, its beginning too
    with _ranges_asked() as calls:
        times = [(0, time.perf_counter(), time.process_time())]
        for index in range(first, behind):
            _ = source[index]
            times.append((len(calls), time.perf_counter(), time.process_time()))
    count = served.sent()[1] - before[1]
    # Of an epoch's last batches all is there.
    batches = next(number for number, one in enumerate(times) if one[0] == len(calls)) if whole else behind - first
    seconds, busy = (times[batches][one] - times[0][one] for one in (1, 2))
    shutil.rmtree(cache, ignore_errors=True)
    alone_seconds, alone_busy = _alone(url, served.options, cache, calls)
    asked = sum(end - begin for call in calls for _, begin, end in call)
    delivered = _ROW_BYTES * _LENGTH * _WINDOWS * (behind if whole else batches)
    return {
        "first": opened,
        "batches": batches / seconds,
        "requests": sum(map(len, calls)) / batches,
        "sent": count / delivered,
        "link": asked / seconds / served.bandwidth,
        "client-link": asked / alone_seconds / served.bandwidth,
        "of-client": alone_seconds / seconds,
        "busy": busy / batches * 1e3,
        "client-busy": alone_busy / batches * 1e3,
        "local-busy": local * 1e3,
        "times-client": (busy / batches - local) / (alone_busy / batches),
    }


@contextmanager
def _ranges_asked() -> Iterator[list[list[_Wanted]]]:
    """The calls of clients meanwhile: of each the path, first byte and end of its ranges."""
    calls: list[list[_Wanted]] = []
    get_all = FolderClient.get_all

    def noted(self: FolderClient, wanted: Sequence[_Wanted], versions: dict[str, str]) -> list[Any]:
        calls.append(list(wanted))
        return get_all(self, wanted, versions)

    FolderClient.get_all = noted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        FolderClient.get_all = get_all  # type: ignore[method-assign]


def _alone(url: str, options: dict[str, str], cache: Path, calls: Sequence[Sequence[_Wanted]]) -> tuple[float, float]:
    """Seconds, and seconds of the processor, that obstore takes for the ranges of some calls, in groups as ours are."""
    import obstore

    opened = DatasetStore.open(url, storage_options=options, cache=cache)
    # The client that ours has, so that nothing but what we do beside it differs; no part of the interface gives it.
    store = opened._rows._client._store  # type: ignore[attr-defined]
    groups: list[tuple[str, list[_Wanted]]] = []
    for wanted in calls:
        by_path: dict[str, list[_Wanted]] = {}
        for one in wanted:
            by_path.setdefault(one[0], []).append(one)
        groups += [(path, some[at : at + GROUP]) for path, some in by_path.items() for at in range(0, len(some), GROUP)]

    async def ask() -> None:
        turns = asyncio.Semaphore(2 * AT_ONCE // GROUP)

        async def group(path: str, some: list[_Wanted]) -> None:
            async with turns:
                begins, ends = [one[1] for one in some], [one[2] for one in some]
                if len(some) == 1:
                    await obstore.get_range_async(store, path, start=begins[0], end=ends[0])
                else:
                    await obstore.get_ranges_async(store, path, starts=begins, ends=ends, coalesce=0)

        await asyncio.gather(*(group(*one) for one in groups))

    began, busy = time.perf_counter(), time.process_time()
    asyncio.run(ask())
    return time.perf_counter() - began, time.process_time() - busy


def _local(folder: Path, batches: int, **how: Any) -> float:
    """Seconds of the processor that a batch of the folder itself takes."""
    source = BatchSource(DatasetStore.open(folder), _LENGTH, _WINDOWS, **how)
    for index in range(batches):
        _ = source[index]
    busy = time.process_time()
    for index in range(batches, 2 * batches):
        _ = source[index]
    return (time.process_time() - busy) / batches


def cached(served: Storage, url: str, cache: Path, nbytes: int, batches: int) -> dict[str, float]:
    """Exact random windows with a cache of so many bytes: what was in it, once it is full; and in one that lets go of
    what was read longest ago, page by page.
    """
    shutil.rmtree(cache, ignore_errors=True)
    store = DatasetStore.open(url, storage_options=served.options, cache=cache, cache_bytes=nbytes)
    source, oldest = BatchSource(store, _LENGTH, _WINDOWS, seed=1), Oldest(nbytes // _PAGE)
    (backing,) = source.snapshot.backings
    backing.wait = partial(oldest.wait, backing.wait)
    for index in range(batches):
        source[index]
    before, oldest.read, oldest.there = backing.counters(), 0, 0
    for index in range(batches, 2 * batches):
        source[index]
    read, wanted, fetched = (backing.counters()[name] - before[name] for name in ("read", "wanted", "fetched"))
    return {"hits": 1 - wanted / read, "fetched": fetched / read, "lru": oldest.there / oldest.read}


class Oldest:
    """What would be in a cache of so many pages that lets go of those read longest ago."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, dict[int, None]()
        self.read = self.there = 0

    def wait(self, wait: Callable[..., Any], begins: Any, ends: Any) -> Any:
        """Note what is read, and wait for it."""
        pairs = zip((begins // _PAGE).tolist(), ((ends - 1) // _PAGE).tolist(), strict=True)
        for page in {page for first, last in pairs for page in range(first, last + 1)}:
            self.read += 1
            if page in self._kept:
                self.there += 1
                del self._kept[page]
            elif len(self._kept) == self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[page] = None
        return wait(begins, ends)


def first_batch(served: Storage, url: str, cache: Path) -> dict[str, float]:
    """How long it takes to open a store and to have a first batch, with the cache and without."""
    shutil.rmtree(cache, ignore_errors=True)
    took = []
    for seed in (1, 1, 2):  # then the batch lies there, too; then only what was read of the store itself does
        began = time.perf_counter()
        store = DatasetStore.open(url, storage_options=served.options, cache=cache, cache_bytes=8 << 30)
        BatchSource(store, _LENGTH, _WINDOWS, seed=seed)[0]
        took.append(time.perf_counter() - began)
    return {"cold": took[0], "warm": took[2], "again": took[1]}


def lance(served: Storage, rows: int, batches: int) -> dict[str, float]:
    """Lance's ``take`` of the same windows."""
    import lance

    told = {**served.options, "allow_http": "true", "aws_access_key_id": "none", "aws_secret_access_key": "none"}
    began = time.perf_counter()
    dataset, draw = lance.dataset("s3://data/lance", storage_options=told), np.random.default_rng(1)

    def take() -> pa.Table:
        starts = draw.integers(0, rows - _LENGTH, _WINDOWS)
        return dataset.take((starts[:, None] + np.arange(_LENGTH)).reshape(-1).tolist())

    delivered, opened = take().nbytes, time.perf_counter() - began
    (_, count), began = served.sent(), time.perf_counter()
    for _ in range(batches):
        take()
    seconds, more = time.perf_counter() - began, served.sent()[1] - count
    sent, link = more / delivered / batches, more / seconds / served.bandwidth
    return {"first": opened, "batches": batches / seconds, "sent": sent, "link": link}


def _make_others(stores: Path, rows: int, mosaic: str | None) -> None:
    """Write the same steps as others have them, if they are not there and these are installed."""
    parquet, target = stores / "parquet", stores / "lance"
    missing = [name for name in ("parquet", "lance") if not (stores / name).exists()]
    for number, begin in enumerate(range(0, rows, _PART) if missing else ()):
        table = as_table(columns(begin, _PART))
        if "parquet" in missing:
            parquet.mkdir(exist_ok=True)
            pq.write_table(table, parquet / f"{number:04d}.parquet")
        if "lance" in missing and find_spec("lance") is not None:
            import lance

            lance.write_dataset(table, str(target), mode="append" if begin else "create")
    if mosaic is not None:
        ask("mosaic", "write", stores / "mds", rows, python=mosaic)


def _streams(served: Storage, stores: Path, cache: Path, mosaic: str | None) -> Iterator[tuple[str, dict[str, float]]]:
    """Batches of 32 windows of 64 steps, from nothing on, of the steps in ``stores``, which ``served`` serves."""
    reading = {"mosaic": lambda: ask("mosaic", "read", cache, served.endpoint, python=mosaic)} if mosaic else {}
    if find_spec("aiohttp") is None:
        print(f"{_STREAMS['datasets']}: left out, as aiohttp, by which it reads, is not installed", file=sys.stderr)
    else:
        reading = {"datasets": lambda: _datasets(served.endpoint, stores / "parquet"), **reading}
    for name, read in reading.items():
        before = served.sent()[1]
        found = read()
        sent, delivered, seconds = served.sent()[1] - before, found.pop("delivered"), found.pop("seconds")
        yield name, found | {"sent": sent / delivered, "link": sent / seconds / _LINKS[""]}


def _datasets(endpoint: str, folder: Path) -> dict[str, float]:
    from datasets import load_dataset

    urls = [f"{endpoint}/data/parquet/{file.name}" for file in sorted(folder.iterdir())]
    began = time.perf_counter()
    rows = load_dataset("parquet", data_files=urls, split="train", streaming=True).with_format("numpy")
    batches = rows.batch(_LENGTH).shuffle(seed=1, buffer_size=_SHUFFLED).batch(_WINDOWS)
    return streamed(began, (sum(values.nbytes for values in batch.values()) for batch in batches))


_UNITS = {
    "first": ("to the first batch", "s"),
    "batches": ("batches a second", "batches/s"),
    "requests": ("requests a batch", ""),
    "busy": ("of the processor for a batch", "ms"),
    "client-busy": ("of the processor for the requests of a batch, by obstore alone", "ms"),
    "local-busy": ("of the processor for a batch of the folder itself", "ms"),
    "times-client": ("of the processor beyond that, over obstore alone", "times"),
    "of-client": ("of how fast obstore alone gets the same ranges", ""),
    "sent": ("bytes sent for each delivered", ""),
    "link": ("of the link", ""),
    "client-link": ("of the link, by obstore alone", ""),
    "hits": ("pages that were there", ""),
    "fetched": ("bytes fetched for each byte read", ""),
    "lru": ("pages that had been there, were those let go of that were read longest ago", ""),
    "cold": ("to the first batch, no cache", "s"),
    "warm": ("to the first batch, warm index", "s"),
    "again": ("to the first batch, which is in the cache", "s"),
}


def figures(
    folder: Path, rows: int, batches: int = 300, objects: int = _OBJECTS, mosaic: str | None = None
) -> Iterator[Figure]:
    """All that is measured, line by line.

    Args:
        folder: Where the stores are, or are made.
        rows: Steps of each.
        batches: How many exact ones are measured.
        objects: How many the largest store has.
        mosaic: A Python that has MosaicML's streaming; None: it is left out.
    """
    stores, cache, ours = folder / "stores", folder / "cache", {}
    for layout in ("columns", "windows"):
        make(stores / layout, layout, rows)
        make_large(folder, layout, objects)
    _make_others(stores, rows, mosaic)
    for link, bandwidth in reversed(_LINKS.items()):
        with Storage(stores, bandwidth) as served:
            for layout in ("columns", "windows"):
                for name, how in (("exact", {}), ("blocks", {"sampling": Blocks(pool=_POOL)})):
                    ours[layout, name] = found = measure(served, stores / layout, cache, batches, **how)
                    said = f"{layout}, {name}{', a link of 1 Gbit/s' if link else ''}"
                    yield from _named(f"{link}{layout}-{name}", said, found)
    with Storage(stores) as served:
        beside = {} if find_spec("lance") is None else lance(served, rows, max(batches // 10, 1))
        yield from _named("lance", "Lance, take", beside)
        for (layout, name), found in ours.items() if beside else ():
            yield _over("lance", "Lance", f"{layout}-{name}", found, beside)
        for peer, found in _streams(served, stores, cache, mosaic):
            yield from _named(peer, f"{_STREAMS[peer]}, windows that do not overlap", found)
            yield _over(peer, _STREAMS[peer], "windows-blocks", ours["windows", "blocks"], found)
        for layout in ("columns", "windows"):
            size = sum(file.stat().st_size for file in (stores / layout / "segments").iterdir())
            for percent in _KEPT:
                found = cached(served, f"s3://data/{layout}", cache, size * percent // 100, 3 * batches)
                yield from _named(f"{layout}-{percent}", f"{layout}, a cache of {percent}% of the data", found)
    with Storage(folder / "large") as served:
        for layout in ("columns", "windows"):
            found = first_batch(served, f"s3://data/{layout}", cache)
            yield from _named(f"large-{layout}", f"{layout}, {objects} objects of 256 MB", found)
    shutil.rmtree(cache, ignore_errors=True)


def _named(key: str, what: str, found: dict[str, float]) -> Iterator[Figure]:
    for name, value in found.items():
        text, unit = _UNITS[name]
        yield Figure(f"elsewhere-{key}-{name}", f"20 ms away, {what}: {text}", value, unit)


def _over(peer: str, name: str, key: str, ours: dict[str, float], theirs: dict[str, float]) -> Figure:
    said = f"20 ms away, {key.replace('-', ', ')}: over {name}"
    return Figure(f"elsewhere-{key}-over-{peer}", said, ours["batches"] / theirs["batches"], "times")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.elsewhere", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the stores are, or are made")
    parser.add_argument("--rows", type=int, default=2_000_000, help="steps of each")
    parser.add_argument("--batches", type=int, default=300, help="how many exact ones are measured")
    parser.add_argument("--lance", type=Path, help="where Lance is installed, if not among other packages")
    parser.add_argument("--mosaic", help="a Python that has MosaicML's streaming")
    parser.add_argument("--objects", type=int, default=_OBJECTS, help="how many the largest store has")
    told = parser.parse_args()
    if told.lance is not None:
        sys.path.append(str(told.lance))
    for figure in figures(told.folder, told.rows, told.batches, told.objects, told.mosaic):
        print(f"{figure.name}: {figure.value:.2f} {figure.unit}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
