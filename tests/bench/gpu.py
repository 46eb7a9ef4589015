"""What reaches a GPU, and how long training waits for it: python -m tests.bench.gpu.

Two kinds of batches, state and raw images, go through `mouse_torch.PrefetchBatchifier(device="cuda")`. The copy of a
batch to the device is compared with a plain copy of as many pinned bytes beside it, and a step that keeps the device
busy for 5 ms is taken with batches from the loader and with one that lies there already. Written to
docs/benchmarks-gpu.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mouse_core import DatasetStore
from tests.bench import generate
from tests.bench.measuring import machine

ROOT = Path(__file__).resolve().parent.parent.parent
_ROUNDS = 15
_COPIES = 20
_STEPS = 200
_STEP_SECONDS = 0.005


def main() -> None:
    """Measure, print, and write the page."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="num_workers of the loader")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks-gpu.md")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; nothing was measured")
    folder = Path(tempfile.mkdtemp(prefix="mouse-gpu-"))
    try:
        lines = [
            *_lines("state, B=256, S=64", generate.STATE, 500_000, 256, folder, chosen.workers),
            *_lines("raw images 84x84, B=32, S=64", generate.raw_images(84, 84), 20_000, 32, folder, chosen.workers),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    page = _page(lines, chosen.workers)
    print(page)
    chosen.out.write_text(page, encoding="utf-8")


def _lines(title: str, kind: generate.Kind, rows: int, batch_size: int, folder: Path, workers: int) -> list[str]:
    """Rows of the table for one kind of data."""
    import datasets
    import torch

    from mouse_torch import PrefetchBatchifier

    data = folder / title.split(",")[0].replace(" ", "-")
    generate.write(kind, data, rows)
    store = DatasetStore().from_dataset(datasets.load_from_disk(str(data)))
    device = torch.device("cuda")
    with PrefetchBatchifier(store, 64, batch_size, num_workers=workers, device=device) as loader:
        batch = loader.next_batch()
        nbytes = loader.source.layout(batch_size, stored=True).nbytes
        loader_copy, plain_copy = _bandwidths(nbytes, device)
        delivered = _delivered(loader, nbytes)
        step = _busy_step(device)
        fed, alone = _steps(loader.next_batch, step), _steps(lambda: batch, step)
    waiting = max(0.0, 1 - alone / fed)
    return [
        f"| {title} | host to device, of a plain pinned copy | at least 90% | {loader_copy / plain_copy:.0%} "
        f"({loader_copy / 1e9:.1f} of {plain_copy / 1e9:.1f} GB/s) | {_yes(loader_copy >= 0.9 * plain_copy)} |",
        f"| {title} | waiting in steps of 5 ms | under 1% | {waiting:.2%} "
        f"({1e3 * fed:.3f} beside {1e3 * alone:.3f} ms) "
        f"| {_yes(waiting < 0.01)} |",
        f"| {title} | as fast as they come | | {delivered / 1e9:.1f} GB/s, {delivered / nbytes:,.0f} batches/s | |",
    ]


def _bandwidths(nbytes: int, device: Any) -> tuple[float, float]:
    """Bytes a second of a copy as the loader makes it, and into memory that is there, in turns; medians."""
    import torch

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
    import torch

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
    import torch

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
    import torch

    for _ in range(8):
        step(next_batch())
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_STEPS):
        step(next_batch())
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / _STEPS


def _yes(met: bool) -> str:
    return "yes" if met else "**no**"


def _page(lines: list[str], workers: int) -> str:
    import torch

    about = " · ".join(f"{name}: {value}" for name, value in machine().items())
    head = [
        "# Benchmarks on a GPU",
        "",
        f"{torch.cuda.get_device_name()} · CUDA {torch.version.cuda} · torch {torch.__version__} · {about}",
        "",
        f'Written by `python -m tests.bench.gpu`; `PrefetchBatchifier(device="cuda", num_workers={workers})`.',
        "",
        "| work | what | goal | found | met |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *lines, ""])


if __name__ == "__main__":
    main()
