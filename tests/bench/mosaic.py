"""Windows of steps as MosaicML's streaming has them.

It wants other versions of what the project needs, so it runs in an environment of its own (``pip install
mosaicml-streaming``), and imports nothing of the project. A sample is a window of 64 steps; windows do not overlap, and
the order is the package's own shuffling.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

_LENGTH, _WINDOWS, _SECONDS = 64, 32, 10.0
_COLUMNS = {"action": 1, "reward": 1, "done": 1, "episode_step": 1, "observation": 17, "metadata_q_star": 18}


def write(folder: str, rows: int) -> None:
    """Write so many made-up steps, if they are not there."""
    from streaming import MDSWriter

    if (Path(folder) / "index.json").exists():
        return
    kinds = {name: "int64" if name in ("action", "done", "episode_step") else "float32" for name in _COLUMNS}
    kinds["reward"] = "float64"
    columns = {name: f"ndarray:{kinds[name]}:{_LENGTH},{width}" for name, width in _COLUMNS.items()}
    draw = np.random.default_rng(0)
    with MDSWriter(out=folder, columns=columns) as out:
        for _ in range(rows // _LENGTH):
            out.write({name: draw.random((_LENGTH, width)).astype(kinds[name]) for name, width in _COLUMNS.items()})


def read(folder: str, endpoint: str) -> dict[str, float]:
    """Batches of 32 windows from an empty folder on, no window twice."""
    from streaming import StreamingDataset

    os.environ |= {"S3_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()

    def sizes() -> Iterator[int]:
        there = StreamingDataset(remote="s3://data/mds", local=folder, shuffle=True, batch_size=_WINDOWS)
        samples = iter(there)  # once through: then it has them on disk
        while len(batch := list(islice(samples, _WINDOWS))) == _WINDOWS:
            yield sum(np.stack([one[name] for one in batch]).nbytes for name in _COLUMNS)

    return streamed(began, sizes())


def streamed(began: float, sizes: Iterator[int]) -> dict[str, float]:
    """How fast batches of these sizes come for some seconds, and how many bytes, since the beginning."""
    number, delivered, first, seconds = 0, 0, 0.0, 0.0
    for size in sizes:
        number, delivered, seconds = number + 1, delivered + size, time.perf_counter() - began
        first = first or seconds
        if seconds > first + _SECONDS:
            break
    return {"first": first, "batches": (number - 1) / (seconds - first), "delivered": delivered, "seconds": seconds}
