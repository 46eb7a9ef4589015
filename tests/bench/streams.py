"""What others reach that stream: they read all there is in turn, and shuffle what they hold.

`datasets` reads Parquet files, and draws windows from a buffer of them. MosaicML's streaming has windows as samples.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

NAMES = {"datasets": "datasets, streaming", "mosaic": "MosaicML's streaming"}
_LENGTH, _WINDOWS = 64, 32
# Windows in a buffer from which they are drawn, and seconds for which a stream is read.
_BUFFER, _SECONDS = 256, 10.0


class Served(Protocol):
    """A storage of files; see ``elsewhere.Storage``."""

    endpoint: str

    def sent(self) -> tuple[int, int]:
        """How many requests there were so far, and how many bytes were sent."""


def make(stores: Path, tables: Iterable[pa.Table], rows: int, mosaic: str | None) -> None:
    """Write steps as others have them, if they are not there."""
    if not (stores / "parquet").exists():
        (stores / "parquet").mkdir()
        for number, table in enumerate(tables):
            pq.write_table(table, stores / "parquet" / f"{number:04d}.parquet")
    if mosaic is not None:
        subprocess.run([mosaic, "-m", "tests.bench.mosaic", "write", str(stores / "mds"), str(rows)], check=True)


def measure(served: Served, stores: Path, cache: Path, mosaic: str | None) -> Iterator[tuple[str, dict[str, float]]]:
    """Batches of 32 windows of 64 steps, from nothing on.

    Args:
        served: Serves ``stores``.
        stores: Where `make` wrote.
        cache: A folder for what came, where one is wanted.
        mosaic: A Python that has MosaicML's streaming; None: it is left out.
    """
    if find_spec("aiohttp") is None:
        print(
            f"{NAMES['datasets']}: left out, as aiohttp is not installed, by which it reads elsewhere", file=sys.stderr
        )
    else:
        before = served.sent()[1]
        found, delivered, seconds = _datasets(served.endpoint, stores / "parquet")
        yield "datasets", found | _sent(served.sent()[1] - before, delivered, seconds)
    if mosaic is not None:
        before = served.sent()[1]
        command = [mosaic, "-m", "tests.bench.mosaic", "read", str(cache), served.endpoint]
        said = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
        delivered, seconds = said.pop("delivered"), said.pop("seconds")
        yield "mosaic", said | _sent(served.sent()[1] - before, delivered, seconds)


def _sent(nbytes: int, delivered: float, seconds: float) -> dict[str, float]:
    return {"sent": nbytes / delivered, "link": nbytes / seconds / 400e6}


def _datasets(endpoint: str, folder: Path) -> tuple[dict[str, float], int, float]:
    """What is found, bytes delivered, and seconds."""
    urls = [f"{endpoint}/data/parquet/{file.name}" for file in sorted(folder.iterdir())]
    began, number, delivered, first = time.perf_counter(), 0, 0, 0.0
    rows = datasets.load_dataset("parquet", data_files=urls, split="train", streaming=True).with_format("numpy")
    for batch in rows.batch(_LENGTH).shuffle(seed=1, buffer_size=_BUFFER).batch(_WINDOWS):
        number, delivered = number + 1, delivered + sum(values.nbytes for values in batch.values())
        seconds = time.perf_counter() - began
        first = first or seconds
        if seconds > first + _SECONDS:
            break
    return {"first": first, "batches": (number - 1) / (seconds - first)}, delivered, seconds
