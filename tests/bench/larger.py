"""Batches from data that are larger than memory: python -m tests.bench.larger --data FOLDER.

Each contender is a process of its own in a control group that allows it a third of what the data take (version 1 of
control groups, by root; elsewhere memory is not limited, and bytes read tell less), and begins with nothing of the data
in memory. Beside each run small reads at random places are measured, without the page cache: what the disk can do.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.bench import generate
from tests.bench.pages import drop
from tests.bench.results import Figure

_GROUPS = Path("/sys/fs/cgroup/memory")
_LENGTH, _BATCH = 64, 32
_READERS, _READ_BYTES = 32, 4096
_SECONDS, _WARM = 6.0, 6.0
_WAYS = {
    "plan": "exact random windows, asked for ahead",
    "blocks": "windows from blocks",
    "mapped": "mapped files as the system reads them",
}


def main() -> None:
    """Write the data if they are not there, measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.larger", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="where the data are written and kept")
    parser.add_argument("--rows", type=int, default=16_000_000, help="steps of six columns, 180 bytes each")
    parser.add_argument("--lance", help="a Python that has Lance, to measure its take beside ours")
    parser.add_argument("--child", choices=[*_WAYS, "lance", "write-lance"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child is not None:
        print(json.dumps(_CHILDREN[chosen.child](chosen.data)))
        return
    for figure in figures(chosen.data, chosen.rows, chosen.lance):
        print(f"{figure.name:70s} {figure.value:10.2f} {figure.unit}")


def figures(data: Path, rows: int, lance: str | None = None) -> Sequence[Figure]:
    """What each contender reaches, in batches a second, bytes read, and parts of what the disk can do."""
    if not (data / "state.json").exists():
        generate.write(generate.STATE, data, rows, files=16)
    nbytes = sum(file.stat().st_size for file in data.glob("*.arrow"))
    found: list[Figure] = []
    pythons = dict.fromkeys(_WAYS, sys.executable)
    if lance is not None:
        _child(lance, "write-lance", data, 0)
        pythons["lance"] = lance
    for way, python in pythons.items():
        drop(data)
        got = _child(python, way, data, nbytes // 3)
        disk = _random_reads(data)
        name, key = _WAYS.get(way, "Lance, take"), f"larger-{way}"
        found.append(Figure(key, name, got["batches"], "batches/s"))
        found.append(Figure(f"{key}-slowest", f"{name}: the slowest batch of {got['count']}", got["slowest"], "ms"))
        if "read" in got:
            found.append(Figure(f"{key}-read", f"{name}: bytes read for each delivered", got["read"], ""))
            found.append(Figure(f"{key}-disk", f"{name}: of random 4 KB reads beside it", got["speed"] / disk, "times"))
    return found


def _child(python: str, way: str, data: Path, limit: int) -> dict[str, float]:
    """What a process finds that has so many bytes of memory; 0: as many as there are."""
    group = _GROUPS / f"mouse-bench-{os.getpid()}"
    limited = limit > 0 and os.access(_GROUPS, os.W_OK) and (_GROUPS / "memory.limit_in_bytes").exists()

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    if limited:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(limit))
    try:
        command = [python, "-m", "tests.bench.larger", "--child", way, "--data", str(data)]
        done = subprocess.run(command, check=True, capture_output=True, preexec_fn=enter if limited else None)
    finally:
        if limited:
            group.rmdir()
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _ours(data: Path, way: str) -> dict[str, float]:
    from mouse_core import BatchSource, formats
    from mouse_core.ahead.local import LocalFiles

    if way == "mapped":
        LocalFiles.of = classmethod(lambda *_: None)  # type: ignore[method-assign,assignment]
    store = formats.open(data).to_store()
    sampling = "blocks" if way == "blocks" else "random"
    source = BatchSource(store, _LENGTH, _BATCH, sampling, seed=7, dtypes={"obs_continuous": "float32"})
    return _measured(lambda index: sum(values.nbytes for values in source[index].values()))


def _lance(data: Path) -> dict[str, float]:
    import lance

    files = [file for file in (data / "rows.lance").rglob("*") if file.is_file()]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    dataset, draw = lance.dataset(str(data / "rows.lance")), np.random.default_rng(0)
    count = dataset.count_rows() - _LENGTH

    def take(_: int) -> int:
        starts = draw.integers(0, count, _BATCH)
        return int(dataset.take((starts[:, None] + np.arange(_LENGTH)).reshape(-1)).nbytes)

    return _measured(take)


def _write_lance(data: Path) -> dict[str, float]:
    import lance
    import pyarrow as pa

    readers = [pa.ipc.open_stream(pa.memory_map(str(file))) for file in sorted(data.glob("*.arrow"))]
    if not (data / "rows.lance").exists():
        rows = (batch.replace_schema_metadata(None) for reader in readers for batch in reader)
        lance.write_dataset(rows, str(data / "rows.lance"), schema=readers[0].schema.remove_metadata())
    return {}


_CHILDREN = {way: lambda data, way=way: _ours(data, way) for way in _WAYS}
_CHILDREN |= {"lance": _lance, "write-lance": _write_lance}


def _measured(take: object) -> dict[str, float]:
    """How fast batches come, after some, and what is read from disks for them."""
    assert callable(take)
    index, end = 0, time.perf_counter() + _WARM
    while time.perf_counter() < end:
        take(index)
        index += 1
    before, delivered, seconds = _bytes_read(), 0, []
    while sum(seconds) < _SECONDS:
        began = time.perf_counter()
        delivered += take(index)
        seconds.append(time.perf_counter() - began)
        index += 1
    read, whole = _bytes_read() - before, sum(seconds)
    return {
        "batches": len(seconds) / whole,
        "count": len(seconds),
        "slowest": 1e3 * max(seconds),
        "read": read / delivered,
        "speed": read / whole,
    }


def _bytes_read() -> int:
    """Bytes that this process had read from disks so far."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _random_reads(data: Path) -> float:
    """Bytes a second of small reads at random places by many threads, which the page cache has no part in."""
    files = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in sorted(data.glob("*.arrow"))]
    pages = [os.fstat(file).st_size // _READ_BYTES for file in files]
    end, counts = time.perf_counter() + _SECONDS / 2, []

    def read(seed: int) -> None:
        draw, memory, count = random.Random(seed), mmap.mmap(-1, _READ_BYTES), 0
        while time.perf_counter() < end:
            file = draw.randrange(len(files))
            count += os.preadv(files[file], [memory], _READ_BYTES * draw.randrange(pages[file]))
        counts.append(count)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(_READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        os.close(file)
    return sum(counts) / (_SECONDS / 2)


if __name__ == "__main__":
    main()
