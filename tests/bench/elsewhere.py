"""Batches from an object storage that is 20 ms away: python -m tests.bench.elsewhere FOLDER.

The storage is a process of this machine: 20 ms before each answer, 80 MB/s a connection, 400 MB/s in all. Rows are of a
store in FOLDER, made where there is none: two million steps of six columns, in both layouts. The cache is empty at the
beginning of each line.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core import BatchSource, DatasetStore

_PART = 100_000
_BANDWIDTH = 400e6


def make(folder: Path, layout: str, rows: int) -> None:
    """Write a store of so many steps, if it is not there."""
    if folder.exists():
        return
    draw = np.random.default_rng(0)
    with DatasetStore.open(folder, "a", layout=layout) as store:
        for begin in range(0, rows, _PART):
            step = np.arange(begin, begin + _PART)
            store.extend(
                {
                    "action": step % 5,
                    "reward": draw.random(_PART),
                    "done": (step % 1000 == 999).astype(np.int64),
                    "episode_step": step % 1000,
                    "observation": draw.random((_PART, 17)).astype(np.float32),
                    "metadata_q_star": draw.random((_PART, 18)).astype(np.float32),
                }
            )


class Storage:
    """The process that serves a folder's files in the bucket ``data``."""

    def __init__(self, folder: Path) -> None:
        limits = ["--latency", "0.02", "--connection-bandwidth", "80e6", "--bandwidth", str(_BANDWIDTH)]
        command = [sys.executable, "-m", "tests.core.object_server", str(folder), *limits]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        endpoint = f"http://127.0.0.1:{int(self._said())}"
        self.options = {"aws_endpoint": endpoint, "aws_region": "none", "aws_skip_signature": "true"}

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


def measure(served: Storage, url: str, cache: Path, batches: int, **how: Any) -> str:
    """Batches of 32 windows of 64 steps: how many a second, requests for each, bytes sent for each delivered."""
    shutil.rmtree(cache, ignore_errors=True)
    began = time.perf_counter()
    store = DatasetStore.open(url, storage_options=served.options, cache=cache, cache_bytes=8 << 30)
    source = BatchSource(store, 64, 32, **how)
    first = source[0]
    opened = time.perf_counter() - began
    delivered = sum(values.nbytes for values in first.values())
    requests, count = served.sent()
    began, busy = time.perf_counter(), time.process_time()
    for index in range(1, batches + 1):
        source[index]
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    more_requests, more_bytes = (after - before for after, before in zip(served.sent(), (requests, count), strict=True))
    return (
        f"first batch {opened:.2f} s; {batches / seconds:.0f} batches/s, {more_requests / batches:.0f} requests and "
        f"{busy / batches * 1e3:.1f} ms of the processor for each, {more_bytes / delivered / batches:.2f} bytes sent "
        f"for each delivered, {more_bytes / seconds / _BANDWIDTH:.2f} of the link"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.elsewhere", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the stores are, or are made")
    parser.add_argument("--rows", type=int, default=2_000_000, help="steps of each")
    parser.add_argument("--batches", type=int, default=300, help="how many are measured")
    told = parser.parse_args()
    stores = told.folder / "stores"
    for layout in ("columns", "windows"):
        make(stores / layout, layout, told.rows)
    with storage(stores) as served:
        for layout in ("columns", "windows"):
            for name, how in (("exact", {}), ("blocks", {"sampling": "blocks"})):
                found = measure(served, f"s3://data/{layout}", told.folder / "cache", told.batches, **how)
                print(f"{layout}, {name}: {found}", flush=True)


if __name__ == "__main__":
    main()
