"""cpprb's replay buffers: rows in memory, drawn one by one in C++. They know no windows and no slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cpprb
import numpy as np

from tests.bench.measuring import Contender, in_turn
from tests.bench.replay import BATCH, BY_PRIORITY, WRITING, chunks, make_rows, priorities, updated, written
from tests.bench.workloads import Task


def windows(task: Task) -> Iterator[Contender]:
    """Single transitions."""
    if task.sequence_length > 1:
        return
    arrays = task.arrays()
    env = {name: {"shape": values.shape[1:] or 1, "dtype": values.dtype} for name, values in arrays.items()}
    buffer = cpprb.ReplayBuffer(task.rows, env)
    for first in range(0, task.rows, 100_000):
        buffer.add(**{name: np.array(values[first : first + 100_000]) for name, values in arrays.items()})
    yield Contender("cpprb ReplayBuffer", lambda number: buffer.sample(task.batch_size))


def replay(work: str, rows: int) -> Iterator[Contender]:
    """One of the works of replay buffers."""
    if work == "slices":
        return
    kind, options = (cpprb.PrioritizedReplayBuffer, {"alpha": 0.6}) if work in BY_PRIORITY else (cpprb.ReplayBuffer, {})
    buffer: Any = kind(
        rows, {name: {"shape": values.shape[1:] or 1} for name, values in make_rows(1).items()}, **options
    )
    if work in WRITING:
        name = "cpprb add" if work == "add" else "cpprb add, 256 rows"
        yield Contender(name, in_turn(lambda some: buffer.add(**some), written(work)))
        return
    for chunk in chunks(rows):
        buffer.add(**chunk)
    if work in BY_PRIORITY:
        buffer.update_priorities(list(range(rows)), priorities(rows))
        options = {"beta": 0.4}
    setting = in_turn(buffer.update_priorities, *updated(rows)) if work == "updates" else None
    yield Contender(f"cpprb {kind.__name__}", setting or (lambda number: buffer.sample(BATCH, **options)))
