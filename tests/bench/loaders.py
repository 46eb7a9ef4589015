"""What loaders add to `source[i]`, and what fresh processes say of first batches and memory."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from typing import Any

from mouse_core import DatasetStore
from tests.bench.child import ask
from tests.bench.measuring import Contender, Timing, interleave, private_memory, quartiles_of, steady
from tests.bench.results import Figure, Settings, Table, figure_of, table_of
from tests.bench.workloads import NARROW, dataset_folder, store_of

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


def overheads(settings: Settings) -> list[Table | Figure]:
    """Microseconds a batch that each loader adds, with no worker and with one."""
    return [found for framework in frameworks() for found in _overhead(settings, framework)]


def _overhead(settings: Settings, framework: str) -> list[Table | Figure]:
    store = store_of(dataset_folder(settings))
    package = importlib.import_module(PACKAGES[framework][0])

    def make(workers: int, digest: bool = False) -> Any:
        return package.PrefetchBatchifier(store, num_workers=workers, dtypes=NARROW, digest=digest)

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
    key, of = framework.lower(), dict(zip(loaders, timings[1:], strict=True))
    name = f"{framework} loader"
    return [
        table_of(f"loader-{key}", f"The {name} compared with source[i], B=32, S=64", timings),
        *(
            _added(f"{key}-loader-{workers}", f"{name}, num_workers={workers}, adds", of[workers, False], timings[0])
            for workers in (0, 1)
        ),
        _added(f"{key}-digest", f"{name}, digest=True adds", of[0, True], of[0, False]),
    ]


def _added(key: str, name: str, loader: Timing, source: Timing) -> Figure:
    return figure_of(key, name, quartiles_of(loader.seconds - source.seconds), "us a batch", 1e6)


# ---------------------------------------------------------------------- in a fresh process


def in_fresh_processes(settings: Settings) -> list[Figure]:
    """The first batch, and private memory over many, for each framework in a process of its own."""
    folder, batches = dataset_folder(settings), 1_000 if settings.quick else 10_000
    figures = []
    for framework in frameworks():
        found = ask("loaders", "report", folder, framework, batches)
        figures += [
            Figure(f"{name}-{framework.lower()}", f"{framework}: {said}", found[name], unit)
            for name, said, unit in (
                ("first", "from_dataset to the first batch", "s"),
                ("memory", "private memory added by the loader", "MB"),
                ("growth", f"growth over {batches:,} batches after that", "MB"),
                ("allowed", "allowed, prefetch x batch x 1.5 + 50 MB", "MB"),
            )
        ]
    return figures


def report(folder: str, framework: str, batches: int) -> dict[str, float]:
    """Seconds to open the dataset and to its first batch; megabytes of private memory."""
    import datasets

    package = importlib.import_module(PACKAGES[framework][0])
    began = time.perf_counter()
    dataset = datasets.load_from_disk(folder)
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
        "memory": (settled - before) / 1e6,
        "growth": (highest - settled) / 1e6,
        "allowed": (4 * nbytes * 1.5 + 50e6) / 1e6,
    }
