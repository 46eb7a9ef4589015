"""What loaders add to `source[i]`, and what fresh processes say of first batches and memory."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mouse_core import DatasetStore
from mouse_core.bench import Contender, Timing, interleave, private_memory, steady
from tests.bench import generate
from tests.bench.results import Figure, Table, table_of
from tests.bench.settings import Settings
from tests.bench.workloads import dataset_folder

PACKAGES = {"NumPy": ("mouse_core", "numpy"), "torch": ("mouse_torch", "torch"), "JAX": ("mouse_jax", "jax")}


def frameworks() -> list[str]:
    """Names of the frameworks that are installed."""
    return [name for name, (_, needs) in PACKAGES.items() if importlib.util.find_spec(needs) is not None]


def ready(batch: Any) -> Any:
    """The batch, waiting for arrays that are still being made."""
    for values in batch.values():
        if hasattr(values, "block_until_ready"):
            values.block_until_ready()
    return batch


def overheads(settings: Settings) -> tuple[list[Table], list[Figure]]:
    """Microseconds a batch that each loader adds, with no worker and with one."""
    tables, figures = [], []
    for framework in frameworks():
        table, found = _overhead(settings, framework)
        tables.append(table)
        figures += found
    return tables, figures


def _overhead(settings: Settings, framework: str) -> tuple[Table, list[Figure]]:
    import datasets

    folder = dataset_folder(generate.STATE, settings.rows, settings)
    store = DatasetStore().from_dataset(datasets.load_from_disk(str(folder)))
    package = importlib.import_module(PACKAGES[framework][0])

    def make(workers: int, digest: bool = False) -> Any:
        dtypes = {"obs_continuous": "float32"}
        return package.PrefetchBatchifier(store, num_workers=workers, dtypes=dtypes, digest=digest)

    loaders = {(workers, digest): make(workers, digest) for digest in (False, True) for workers in (0, 1)}
    source = make(0).source
    contenders = [Contender("source[i]", source.__getitem__, "floor", multiple=128)]
    for (workers, digest), loader in loaders.items():
        name = f"{framework} loader, {workers} worker{'s' * (workers != 1)}{', digest' * digest}"
        contender = Contender(name, lambda number, it=loader: ready(it.next_batch()), "ours", multiple=128)
        contenders.append(steady(contender, 4) if workers else contender)
    timings = interleave(contenders, rounds=settings.rounds, budget_seconds=settings.budget)
    for loader in loaders.values():
        loader.close()
    key = framework.lower()
    of = dict(zip(loaders, timings[1:], strict=True))
    figures = [
        _added(
            f"{key}-loader-{workers}",
            f"{framework} loader, num_workers={workers}, adds",
            of[workers, False],
            timings[0],
        )
        for workers in (0, 1)
    ]
    figures.append(_added(f"{key}-digest", f"{framework} loader, digest=True adds", of[0, True], of[0, False]))
    return table_of(f"loader-{key}", f"The {framework} loader beside source[i], B=32, S=64", timings), figures


def _added(key: str, name: str, loader: Timing, source: Timing) -> Figure:
    difference = Timing(loader.contender, loader.seconds - source.seconds, loader.wall).quartiles
    low, middle, high = (1e6 * value for value in difference)
    return Figure(key, name, middle, "us a batch", (low, high))


# ---------------------------------------------------------------------- in a fresh process


def in_fresh_processes(settings: Settings, batches: int) -> list[Figure]:
    """The first batch, and private memory over many, for each framework in a process of its own."""
    folder = dataset_folder(generate.STATE, settings.rows, settings)
    figures: list[Figure] = []
    for framework in frameworks():
        found = fresh_report(folder, framework, batches)
        key = framework.lower()
        figures += [
            Figure(f"first-{key}", f"{framework}: from_dataset to the first batch", found["first"], "s"),
            Figure(f"memory-{key}", f"{framework}: private memory added by the loader", found["added"], "MB"),
            Figure(f"growth-{key}", f"{framework}: growth over {batches:,} batches after that", found["growth"], "MB"),
            Figure(f"allowed-{key}", f"{framework}: allowed, prefetch x batch x 1.5 + 50 MB", found["allowed"], "MB"),
        ]
    return figures


def fresh_report(folder: Path, framework: str, batches: int) -> dict[str, float]:
    """What `report` finds in a process that does nothing else."""
    command = [sys.executable, "-m", "tests.bench.loaders", str(folder), framework, str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(folder: Path, framework: str, batches: int) -> dict[str, float]:
    """Seconds to open the dataset and to its first batch; megabytes of private memory."""
    import datasets

    package = importlib.import_module(PACKAGES[framework][0])
    began = time.perf_counter()
    dataset = datasets.load_from_disk(str(folder))
    opened = time.perf_counter()
    store = DatasetStore().from_dataset(dataset)
    gc.collect()
    before = private_memory() or 0
    loader = package.PrefetchBatchifier(store, prefetch=4)
    ready(loader.next_batch())
    first = time.perf_counter()
    for _ in range(100):
        batch = ready(loader.next_batch())
    nbytes = sum(values.nbytes for values in batch.values())
    settled = private_memory() or 0
    highest = settled
    for number in range(batches):
        ready(loader.next_batch())
        if number % 50 == 0:
            highest = max(highest, private_memory() or 0)
    return {
        "open": opened - began,
        "first": first - opened,
        "added": (settled - before) / 1e6,
        "growth": (highest - settled) / 1e6,
        "allowed": (4 * nbytes * 1.5 + 50e6) / 1e6,
    }


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
