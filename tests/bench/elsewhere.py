"""Batches from an object storage that is 20 ms away: python -m tests.bench.elsewhere FOLDER.

The storage is a process of this machine: 20 ms before each answer, 80 MB/s a connection, 400 MB/s in all. Rows are of a
store in FOLDER, made where there is none: two million steps of six columns, in both layouts. The cache is empty at the
beginning of each line.

Lines of Lance, which reads the same rows from the same storage, are there where it is installed; ``--lance DIRECTORY``
names one that ``pip install --target DIRECTORY pylance`` filled. Streams of `datasets` and, by ``--mosaic PYTHON``, of
MosaicML are beside them. Then come caches of parts of the data, and the first batch of 1 TB in 4,000 objects, which are
the same one under different names.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core import BatchSource, DatasetStore
from mouse_core.about import About
from mouse_core.prefetch.report import counters_of
from mouse_core.remote.mirror.sums import sums_of
from mouse_core.store.disk.folder import ReadFolder
from mouse_core.store.disk.manifest import Manifest, Sealed, bare_schema, new_identity, write_manifest
from mouse_core.store.disk.sealed import write_segment
from mouse_core.store.elsewhere.objects import name_of_sums, sums_as_bytes
from tests.bench import streams
from tests.bench.client import alone, ranges_asked
from tests.bench.results import Figure

_PART = 100_000
_BANDWIDTH = 400e6
_LENGTH, _WINDOWS = 64, 32
# What part of the data caches have room for, in percent; and bytes of a page.
_KEPT, _PAGE = (10, 25, 50, 75), 4096
# Objects of the largest store, and rows of each: some 256 MB.
_OBJECTS, _ROWS = 4000, 1_500_000


def make(folder: Path, layout: str, rows: int) -> None:
    """Write a store of so many steps, if it is not there."""
    if folder.exists():
        return
    draw = np.random.default_rng(0)
    with DatasetStore.open(folder, "a", layout=layout) as store:
        for begin in range(0, rows, _PART):
            store.extend(columns(draw, begin, _PART))
    for sealed in ReadFolder(folder).manifest.segments:
        note_sums(folder, sealed)


def note_sums(folder: Path, sealed: Sealed) -> None:
    """Lay the digests of a segment's pages beside it, as an upload does."""
    content = (folder / sealed.name).read_bytes()
    (folder / name_of_sums(sealed)).write_bytes(sums_as_bytes(sums_of(content), sealed))


def columns(draw: np.random.Generator, begin: int, count: int) -> dict[str, Any]:
    """Some steps."""
    step = np.arange(begin, begin + count)
    return {
        "action": step % 5,
        "reward": draw.random(count),
        "done": (step % 1000 == 999).astype(np.int64),
        "episode_step": step % 1000,
        "observation": draw.random((count, 17), np.float32),
        "metadata_q_star": draw.random((count, 18), np.float32),
    }


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
    table = as_table(columns(np.random.default_rng(0), 0, _ROWS))
    sealed, schema = write_segment(one, 0, table, layout)
    note_sums(one, sealed)
    (target / "segments").mkdir(parents=True)
    every = tuple(sealed._replace(number=number) for number in range(objects))
    for each in every:
        (target / each.name).symlink_to(one / sealed.name)
        (target / name_of_sums(each)).symlink_to(one / name_of_sums(sealed))
    manifest = Manifest(About("arrived"), (bare_schema(schema),), every, next_number=objects, identity=new_identity())
    write_manifest(target, manifest)


class Storage:
    """The process that serves a folder's files in the bucket ``data``."""

    def __init__(self, folder: Path) -> None:
        limits = ["--latency", "0.02", "--connection-bandwidth", "80e6", "--bandwidth", str(_BANDWIDTH)]
        command = [sys.executable, "-m", "tests.core.object_server", str(folder), *limits]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = f"http://127.0.0.1:{int(self._said())}"
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

    def close(self) -> None:
        """End it."""
        self._process.kill()


@contextmanager
def storage(folder: Path) -> Iterator[Storage]:
    """A storage of a folder's files."""
    served = Storage(folder)
    try:
        yield served
    finally:
        served.close()


def measure(served: Storage, url: str, cache: Path, batches: int, **how: Any) -> dict[str, float]:
    """Batches of 32 windows of 64 steps, an empty cache before them."""
    shutil.rmtree(cache, ignore_errors=True)
    began = time.perf_counter()
    store = DatasetStore.open(url, storage_options=served.options, cache=cache, cache_bytes=8 << 30)
    source = BatchSource(store, _LENGTH, _WINDOWS, **how)
    first = source[0]
    opened = time.perf_counter() - began
    delivered = sum(values.nbytes for values in first.values())
    before, began, busy = served.sent(), time.perf_counter(), time.process_time()
    with ranges_asked() as calls:
        for index in range(1, batches + 1):
            source[index]
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    requests, count = (after - earlier for after, earlier in zip(served.sent(), before, strict=True))
    alone_seconds, alone_busy = alone(url, served.options, calls)
    return {
        "first": opened,
        "batches": batches / seconds,
        "requests": requests / batches,
        "busy": busy / batches * 1e3,
        "client-busy": alone_busy / batches * 1e3,
        "of-client": alone_seconds / seconds,
        "sent": count / delivered / batches,
        "link": count / seconds / _BANDWIDTH,
    }


def cached(served: Storage, url: str, cache: Path, nbytes: int, batches: int) -> dict[str, float]:
    """Exact random windows with a cache of so many bytes: what was in it, once it is full; and in one that lets go of
    what was read longest ago, page by page.
    """
    shutil.rmtree(cache, ignore_errors=True)
    store = DatasetStore.open(url, storage_options=served.options, cache=cache, cache_bytes=nbytes)
    source, oldest = BatchSource(store, _LENGTH, _WINDOWS, seed=1), Oldest(nbytes // _PAGE)
    for backing in source.snapshot.backings:
        backing.wait = partial(oldest.wait, backing.wait)
    for index in range(batches):
        source[index]
    before, oldest.read, oldest.there = counters_of(source), 0, 0
    for index in range(batches, 2 * batches):
        source[index]
    read, wanted, fetched = (counters_of(source)[name] - before[name] for name in ("read", "wanted", "fetched"))
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


def lance(served: Storage, folder: Path, rows: int, batches: int) -> dict[str, float]:
    """Lance's ``take`` of the same windows; nothing where it is not installed."""
    try:
        lance = importlib.import_module("lance")
    except ImportError:
        return {}
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
    sent, link = more / delivered / batches, more / seconds / _BANDWIDTH
    return {"first": opened, "batches": batches / seconds, "sent": sent, "link": link}


def make_lance(target: Path, rows: int) -> None:
    """Write the same steps as Lance has them, if they are not there and it is installed."""
    try:
        lance = importlib.import_module("lance")
    except ImportError:
        return
    draw = np.random.default_rng(0)
    for begin in range(0, 0 if target.exists() else rows, _PART):
        lance.write_dataset(as_table(columns(draw, begin, _PART)), str(target), mode="append" if begin else "create")


_UNITS = {
    "first": ("to the first batch", "s"),
    "batches": ("batches a second", "batches/s"),
    "requests": ("requests a batch", ""),
    "busy": ("of the processor for a batch", "ms"),
    "client-busy": ("of the processor for the requests of a batch, by obstore alone", "ms"),
    "of-client": ("of how fast obstore alone gets the same ranges", ""),
    "sent": ("bytes sent for each delivered", ""),
    "link": ("of the link", ""),
    "hits": ("pages that were there", ""),
    "fetched": ("bytes fetched for each byte read", ""),
    "lru": ("pages that had been there, were those let go of that were read longest ago", ""),
    "cold": ("to the first batch, no cache", "s"),
    "warm": ("to the first batch, warm index", "s"),
    "again": ("to the first batch, which is in the cache", "s"),
}


def figures(
    folder: Path,
    rows: int = 2_000_000,
    batches: int = 300,
    objects: int = _OBJECTS,
    mosaic: str | None = None,
) -> Iterator[Figure]:
    """All that is measured, line by line.

    Args:
        folder: Where the stores are, or are made.
        rows: Steps of each.
        batches: How many are measured.
        objects: How many the largest store has.
        mosaic: A Python that has MosaicML's streaming; None: it is left out.
    """
    stores, cache, ours = folder / "stores", folder / "cache", {}
    for layout in ("columns", "windows"):
        make(stores / layout, layout, rows)
        make_large(folder, layout, objects)
    make_lance(stores / "lance", rows)
    draw = np.random.default_rng(0)
    streams.make(stores, (as_table(columns(draw, at, _PART)) for at in range(0, rows, _PART)), rows, mosaic)
    with storage(stores) as served:
        for layout in ("columns", "windows"):
            for name, how in (("exact", {}), ("blocks", {"sampling": "blocks"})):
                ours[layout, name] = found = measure(served, f"s3://data/{layout}", cache, batches, **how)
                yield from _named(f"{layout}-{name}", f"{layout}, {name}", found)
        beside = lance(served, folder, rows, max(batches // 10, 1))
        yield from _named("lance", "Lance, take", beside)
        for (layout, name), found in ours.items() if beside else ():
            times = found["batches"] / beside["batches"]
            yield Figure(
                f"elsewhere-{layout}-{name}-over-lance", f"20 ms away, {layout}, {name}: over Lance", times, "times"
            )
        for peer, found in streams.measure(served, stores, cache, mosaic):
            yield from _named(peer, f"{streams.NAMES[peer]}, windows that do not overlap", found)
            times, said = ours["windows", "blocks"]["batches"] / found["batches"], f"over {streams.NAMES[peer]}"
            yield Figure(
                f"elsewhere-windows-blocks-over-{peer}", f"20 ms away, windows, blocks: {said}", times, "times"
            )
        for layout in ("columns", "windows"):
            size = sum(file.stat().st_size for file in (stores / layout / "segments").iterdir())
            for percent in _KEPT:
                found = cached(served, f"s3://data/{layout}", cache, size * percent // 100, 3 * batches)
                yield from _named(f"{layout}-{percent}", f"{layout}, a cache of {percent}% of the data", found)
    with storage(folder / "large") as served:
        for layout in ("columns", "windows"):
            found = first_batch(served, f"s3://data/{layout}", cache)
            yield from _named(f"large-{layout}", f"{layout}, {objects} objects of 256 MB", found)
    shutil.rmtree(cache, ignore_errors=True)


def _named(key: str, what: str, found: dict[str, float]) -> Iterator[Figure]:
    for name, value in found.items():
        text, unit = _UNITS[name]
        yield Figure(f"elsewhere-{key}-{name}", f"20 ms away, {what}: {text}", value, unit)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.elsewhere", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the stores are, or are made")
    parser.add_argument("--rows", type=int, default=2_000_000, help="steps of each")
    parser.add_argument("--batches", type=int, default=300, help="how many are measured")
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
