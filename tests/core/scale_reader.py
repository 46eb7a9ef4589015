"""Read a large dataset in a process that may hold only a small part of it, and report as JSON.

python -m tests.core.scale_reader FOLDER ROWS
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier
from tests.bench import generate
from tests.bench.pages import unmap_touched

DTYPES = {"obs_continuous": "float32"}
MEGABYTE = 1 << 20


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def expected(starts: np.ndarray[Any, Any], length: int) -> dict[str, np.ndarray[Any, Any]]:
    """What windows must hold, from their row numbers alone."""
    rows = (starts[:, None] + np.arange(length)).reshape(-1)
    columns = generate.rows_of(generate.STATE, rows)
    names = {"episode_step": "time", "observation": "obs_continuous", "metadata_q_star": "q_star"}
    return {
        names.get(name, name): values.reshape(len(starts), length, *values.shape[1:])
        for name, values in columns.items()
    }


def differing(batch: dict[str, np.ndarray[Any, Any]], starts: np.ndarray[Any, Any], length: int) -> list[str]:
    """Fields that do not hold what they must."""
    wanted = expected(starts, length)
    assert batch.keys() == wanted.keys()
    return [name for name, values in batch.items() if not np.array_equal(values, wanted[name])]


def main(folder: str, rows: int) -> dict[str, Any]:
    """Open, read the first batch, random windows, and an epoch that touches every row."""
    report: dict[str, Any] = {}
    dataset = datasets.load_from_disk(folder)
    gc.collect()
    unmap_touched(Path(folder))
    before = status("RssFile"), status("RssAnon")
    store = DatasetStore().from_dataset(dataset)
    source = BatchSource(store, 64, 32, seed=1, dtypes=DTYPES)
    first = source[0]
    report["touched by the first batch"] = status("RssFile") - before[0]
    report["rows"] = len(store)
    report["differing"] = differing(first, source.plan(0).starts, 64)

    # Only so much more private memory from here on; mapped files do not count.
    used = status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (used + 300 * MEGABYTE, used + 300 * MEGABYTE))

    for index in range(1, 40):
        report["differing"] += differing(source[index], source.plan(index).starts, 64)
    # Windows across record batches and across files.
    edges = np.array([999, rows // 2 - 1, rows // 2 - 63, rows - 64, 0])
    windows = source.gather(source.plan(0))  # a batch that is held meanwhile
    for edge in edges.tolist():
        batch = BatchSource(store.snapshot(edge + 64), 64, 1, sampling="last", dtypes=DTYPES)[0]
        report["differing"] += differing(batch, np.array([edge]), 64)
    report["held"] = differing(windows, source.plan(0).starts, 64)

    settled = highest = status("RssAnon")
    checksum = 0
    with PrefetchBatchifier(store, 64, 256, sampling="sequential", drop_last=False, dtypes=DTYPES) as loader:
        for number, batch in enumerate(loader):
            checksum += int(batch["time"].sum())
            if number % 20 == 0:
                highest = max(highest, status("RssAnon"))
    report["checksum"] = checksum
    report["grown in an epoch"] = highest - settled
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
