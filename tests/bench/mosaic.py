"""Windows of steps as MosaicML's streaming has them: python -m tests.bench.mosaic write|read FOLDER ENDPOINT.

It wants other versions of what the project needs, so it runs in an environment of its own (``pip install
mosaicml-streaming``), and imports nothing of the project. A sample is a window of 64 steps; windows do not overlap, and
the order is the package's own shuffling. ``read`` prints what ``tests.bench.streams`` asks for.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

_LENGTH, _WINDOWS, _SECONDS = 64, 32, 10.0
_COLUMNS = {"action": 1, "reward": 1, "done": 1, "episode_step": 1, "observation": 17, "metadata_q_star": 18}


def write(folder: Path, rows: int) -> None:
    """Write so many made-up steps, if they are not there."""
    from streaming import MDSWriter

    if (folder / "index.json").exists():
        return
    kinds = {name: "int64" if name in ("action", "done", "episode_step") else "float32" for name in _COLUMNS}
    kinds["reward"] = "float64"
    columns = {name: f"ndarray:{kinds[name]}:{_LENGTH},{width}" for name, width in _COLUMNS.items()}
    draw = np.random.default_rng(0)
    with MDSWriter(out=str(folder), columns=columns) as out:
        for _ in range(rows // _LENGTH):
            out.write({name: draw.random((_LENGTH, width)).astype(kinds[name]) for name, width in _COLUMNS.items()})


def read(folder: Path, endpoint: str) -> dict[str, float]:
    """Batches of 32 windows from an empty folder on, for some seconds, and no window twice."""
    from streaming import StreamingDataset

    os.environ |= {"S3_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    shutil.rmtree(folder, ignore_errors=True)
    began, number, delivered, first = time.perf_counter(), 0, 0, 0.0
    there = StreamingDataset(remote="s3://data/mds", local=str(folder), shuffle=True, batch_size=_WINDOWS)
    batch: list[dict[str, np.ndarray]] = []
    for sample in there:  # once through: then it has them on disk
        batch.append(sample)
        if len(batch) < _WINDOWS:
            continue
        delivered += sum(np.stack([one[name] for one in batch]).nbytes for name in _COLUMNS)
        batch, number, seconds = [], number + 1, time.perf_counter() - began
        first = first or seconds
        if seconds > first + _SECONDS:
            break
    speed = (number - 1) / (seconds - first)
    return {"first": first, "batches": speed, "delivered": delivered, "seconds": seconds}


def main() -> None:
    """Write, or measure and print."""
    way, folder, told = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if way == "write":
        write(folder, int(told))
    else:
        print(json.dumps(read(folder, told)), flush=True)
        os._exit(0)  # its threads go on


if __name__ == "__main__":
    main()
