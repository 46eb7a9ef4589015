"""What reaches a GPU, and how long training waits for it.

Two kinds of batches, state and raw images, go through `mouse_torch.PrefetchBatchifier(device="cuda")`. The copy of a
batch to the device is compared with a plain copy of as many pinned bytes beside it, and a step that keeps the device
busy for 5 ms is taken with batches from the loader and with one that lies there already.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mouse_torch import PrefetchBatchifier
from tests.bench import generate
from tests.bench.results import Figure, Settings
from tests.bench.workloads import dataset_folder, store_of

_ROUNDS = 15
_COPIES = 20
_STEPS = 200
_STEP_SECONDS = 0.005
_WORKERS = 2


def figures(settings: Settings) -> list[Figure]:
    """Copies, waiting and throughput of both kinds of batches; nothing where there is no CUDA device."""
    if not torch.cuda.is_available():
        return []
    return [
        *_figures(settings, "state", "state, B=256, S=64", generate.STATE, 500_000, 256),
        *_figures(settings, "images", "raw images 84x84, B=32, S=64", generate.raw_images(84, 84), 20_000, 32),
    ]


def _figures(
    settings: Settings, key: str, title: str, kind: generate.Kind, rows: int, batch_size: int
) -> Iterator[Figure]:
    store, device = store_of(dataset_folder(settings, kind, rows)), torch.device("cuda")
    with PrefetchBatchifier(store, 64, batch_size, num_workers=_WORKERS, device=device) as loader:
        batch, nbytes = loader.next_batch(), loader.source.layout(batch_size, stored=True).nbytes
        loader_copy, plain_copy = _bandwidths(nbytes, device)
        delivered, step = _delivered(loader, nbytes), _busy_step(device)
        fed, alone = _steps(loader.next_batch, step), _steps(lambda: batch, step)
    for name, said, value, unit in (
        ("plain", "a plain copy of pinned memory", plain_copy / 1e9, "GB/s"),
        ("copy", "host to device, of a plain pinned copy", loader_copy / plain_copy, ""),
        ("waiting", "waiting in steps of 5 ms", 100 * max(0.0, 1 - alone / fed), "%"),
        ("delivered", "as fast as they come", delivered / 1e9, "GB/s"),
    ):
        yield Figure(f"gpu-{key}-{name}", f"on a GPU, {title}: {said}", value, unit)


def _bandwidths(nbytes: int, device: Any) -> tuple[float, float]:
    """Bytes a second of a copy as the loader makes it, and into memory that is there, in turns; medians."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)

    def timed(copy: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            copy()  # the allocator has its memory afterwards
            begin.record()
            for _ in range(_COPIES):
                copy()
            end.record()
        end.synchronize()
        return _COPIES * nbytes / (begin.elapsed_time(end) / 1e3)

    as_loader, plain = [], []
    for _ in range(_ROUNDS):
        as_loader.append(timed(lambda: host.to(device, non_blocking=True)))
        plain.append(timed(lambda: there.copy_(host, non_blocking=True)))
    return statistics.median(as_loader), statistics.median(plain)


def _delivered(loader: Any, nbytes: int) -> float:
    """Bytes a second, in their stored dtypes, if nothing is done with the batches."""
    for _ in range(8):
        loader.next_batch()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_STEPS):
        loader.next_batch()
    torch.cuda.synchronize()
    return _STEPS * nbytes / (time.perf_counter() - began)


def _busy_step(device: Any) -> Callable[[Any], None]:
    """A step that keeps the device busy for about 5 ms, and reads something of the batch."""
    left = torch.randn(2048, 2048, device=device)
    out = torch.empty_like(left)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(left, left, out=out)

    multiply(20)
    torch.cuda.synchronize()
    began = time.perf_counter()
    multiply(200)
    torch.cuda.synchronize()
    times = max(1, round(200 * _STEP_SECONDS / (time.perf_counter() - began)))
    total = torch.zeros((), device=device)

    def step(batch: Any) -> None:
        total.add_(batch["reward"].sum())
        multiply(times)

    return step


def _steps(next_batch: Callable[[], Any], step: Callable[[Any], None]) -> float:
    """Seconds a step, one after the other; each waits for the device, as a loop that logs its loss does."""
    for _ in range(8):
        step(next_batch())
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_STEPS):
        step(next_batch())
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / _STEPS
