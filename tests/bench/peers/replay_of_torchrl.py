"""TorchRL's replay buffers over tensors in memory."""

from __future__ import annotations

import logging
from typing import Any

import torch
from tensordict import TensorDict

logging.getLogger("torchrl").setLevel(logging.ERROR)

from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer  # noqa: E402
from torchrl.data.replay_buffers.samplers import SliceSampler  # noqa: E402

from tests.bench.measuring import Contender  # noqa: E402
from tests.bench.replay import BATCH, LENGTH, SLICES, chunks, make_rows, priorities, single_rows, updated  # noqa: E402


def _td(rows: dict[str, Any]) -> TensorDict:
    return TensorDict({name: torch.from_numpy(values) for name, values in rows.items()}, [len(rows["done"])])


def _filled(rows: int, sampler: Any, batch_size: int) -> Any:
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=batch_size)
    for chunk in chunks(rows):
        buffer.extend(_td(chunk))
    return buffer


def prioritized(rows: int) -> Contender:
    buffer = _filled(rows, PrioritizedSampler(rows, 0.6, 0.4), BATCH)
    buffer.update_priority(torch.arange(rows), torch.from_numpy(priorities(rows)))
    return Contender("TorchRL PrioritizedSampler", lambda number: buffer.sample())


def updates(rows: int) -> Contender:
    buffer = _filled(rows, PrioritizedSampler(rows, 0.6, 0.4), BATCH)
    index, priority = (torch.from_numpy(values) for values in updated(rows))
    return Contender(
        "TorchRL PrioritizedSampler",
        lambda number: buffer.update_priority(index[number % len(index)], priority[number % len(priority)]),
    )


def uniform(rows: int) -> Contender:
    buffer = _filled(rows, None, BATCH)
    return Contender("TorchRL RandomSampler", lambda number: buffer.sample())


def slices(rows: int) -> list[Contender]:
    storage = LazyTensorStorage(rows)
    found = []
    for cached, name in (
        (False, "TorchRL SliceSampler"),
        (True, "TorchRL, ends cached: for data that does not change"),
    ):
        sampler = SliceSampler(slice_len=LENGTH, end_key="done", cache_values=cached, strict_length=True)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=SLICES * LENGTH)
        if not found:
            for chunk in chunks(rows):
                part = _td(chunk)
                part["done"] = part["done"].bool()[:, None]
                buffer.extend(part)
        found.append(Contender(name, lambda number, buffer=buffer: buffer.sample()))
    return found


def add(rows: int) -> Contender:
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows))
    some = [TensorDict({name: torch.as_tensor(value) for name, value in row.items()}, []) for row in single_rows()]
    return Contender("TorchRL add", lambda number: buffer.add(some[number % len(some)]))


def extend(rows: int) -> Contender:
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows))
    some = [_td(make_rows(BATCH, first=number * BATCH)) for number in range(20)]
    return Contender("TorchRL extend", lambda number: buffer.extend(some[number % len(some)]))
