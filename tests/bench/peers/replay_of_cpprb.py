"""cpprb's replay buffers. They know no slices."""

from __future__ import annotations

from typing import Any

import cpprb

from tests.bench.measuring import Contender
from tests.bench.replay import BATCH, chunks, make_rows, priorities, single_rows, updated

_SHAPES = {name: {"shape": values.shape[1:] or 1} for name, values in make_rows(1).items()}


def _filled(kind: Any, rows: int, **options: Any) -> Any:
    buffer = kind(rows, _SHAPES, **options)
    for chunk in chunks(rows):
        buffer.add(**chunk)
    return buffer


def prioritized(rows: int) -> Contender:
    buffer = _filled(cpprb.PrioritizedReplayBuffer, rows, alpha=0.6)
    buffer.update_priorities(list(range(rows)), priorities(rows))
    return Contender("cpprb PrioritizedReplayBuffer", lambda number: buffer.sample(BATCH, beta=0.4))


def updates(rows: int) -> Contender:
    buffer = _filled(cpprb.PrioritizedReplayBuffer, rows, alpha=0.6)
    index, priority = updated(rows)
    return Contender(
        "cpprb PrioritizedReplayBuffer",
        lambda number: buffer.update_priorities(index[number % len(index)], priority[number % len(priority)]),
    )


def uniform(rows: int) -> Contender:
    buffer = _filled(cpprb.ReplayBuffer, rows)
    return Contender("cpprb ReplayBuffer", lambda number: buffer.sample(BATCH))


def add(rows: int) -> Contender:
    buffer = cpprb.ReplayBuffer(rows, _SHAPES)
    some = single_rows()
    return Contender("cpprb add", lambda number: buffer.add(**some[number % len(some)]))


def extend(rows: int) -> Contender:
    buffer = cpprb.ReplayBuffer(rows, _SHAPES)
    some = [make_rows(BATCH, first=number * BATCH) for number in range(20)]
    return Contender("cpprb add, 256 rows", lambda number: buffer.add(**some[number % len(some)]))
