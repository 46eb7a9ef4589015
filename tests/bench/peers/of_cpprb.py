"""cpprb's replay buffer: rows in memory, drawn one by one in C++. It has no windows, so it takes part for S=1 alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.bench.measuring import Contender
from tests.bench.workloads import Task


def contenders(task: Task) -> Iterator[Contender]:
    """Single transitions."""
    if task.sequence_length > 1:
        return
    import cpprb

    arrays = task.arrays()
    env = {name: {"shape": values.shape[1:] or 1, "dtype": values.dtype} for name, values in arrays.items()}
    buffer = cpprb.ReplayBuffer(task.rows, env)
    for first in range(0, task.rows, 100_000):
        buffer.add(**{name: np.array(values[first : first + 100_000]) for name, values in arrays.items()})
    yield Contender("cpprb ReplayBuffer", lambda number: buffer.sample(task.batch_size))
