"""torch's DataLoader over a map-style dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.measuring import Contender, steady
from tests.bench.workloads import Task


class _Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A window an item, sliced from mapped arrays."""

    def __init__(self, files: Mapping[str, Path], rows: int, length: int) -> None:
        self._files, self._rows, self._length = files, rows, length
        self._arrays: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._rows - self._length + 1

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        if not self._arrays:
            self._arrays = {name: np.load(path, mmap_mode="r") for name, path in self._files.items()}
        return {
            name: torch.from_numpy(values[start : start + self._length].copy()) for name, values in self._arrays.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}


def windows(task: Task) -> Iterator[Contender]:
    """A loader alone, and with two processes."""
    dataset = _Windows(task.array_files, task.rows, task.sequence_length)
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=task.batch_size,
            sampler=_Starts(len(dataset)),
            num_workers=workers,
            # A forked child of a process that runs JAX hangs.
            multiprocessing_context="spawn" if workers else None,
        )
        batches = chain.from_iterable([loader])  # which begins where the first batch is asked for
        name = f"torch DataLoader, {workers} workers" if workers else "torch DataLoader, no workers"
        contender = Contender(name, lambda number, batches=batches: next(batches), wall=workers > 0)
        yield steady(contender, 2 * workers) if workers else contender


class _Starts(torch.utils.data.Sampler[int]):
    """Random starts without end."""

    def __init__(self, high: int) -> None:
        self._high = high

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randint(self._high, (4096,)).tolist()
