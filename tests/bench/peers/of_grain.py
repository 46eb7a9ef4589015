"""grain, used as its tutorials do: records from a source, batched by grain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.bench.measuring import Contender
from tests.bench.workloads import Task


def windows(task: Task) -> Iterator[Contender]:
    """A window a record, shuffled and batched."""
    import grain

    batches = grain.MapDataset.source(_Windows(task)).seed(0).shuffle().repeat().batch(task.batch_size)
    yield Contender("grain, a window a record, batched", batches.__getitem__)


class _Windows:
    def __init__(self, task: Task) -> None:
        # Plain arrays over the mapped files: slicing a memmap is slow.
        self._arrays = {name: np.asarray(values) for name, values in task.arrays().items()}
        self._rows, self._length = task.rows, task.sequence_length

    def __len__(self) -> int:
        return self._rows - self._length + 1

    def __getitem__(self, start: int) -> dict[str, Any]:
        return {name: values[start : start + self._length] for name, values in self._arrays.items()}
