"""TorchRL's replay buffers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

logging.getLogger("torchrl").setLevel(logging.ERROR)

from torchrl.data import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer  # noqa: E402
from torchrl.data.replay_buffers.samplers import RandomSampler, SliceSampler  # noqa: E402

from tests.bench.measuring import Contender, in_turn  # noqa: E402
from tests.bench.replay import BATCH, BY_PRIORITY, LENGTH, SLICES, WRITING, chunks, priorities, updated, written  # noqa: E402
from tests.bench.workloads import Task  # noqa: E402


def windows(task: Task) -> Iterator[Contender]:
    """Slices, or single transitions, from both storages."""
    length, scratch = task.sequence_length, task.scratch / "torchrl"
    shutil.rmtree(scratch, ignore_errors=True)
    for storage in (LazyMemmapStorage(task.rows, scratch_dir=str(scratch)), LazyTensorStorage(task.rows)):
        rows = TensorDict(
            {key: torch.from_numpy(np.array(values)) for key, values in task.arrays().items()}, [task.rows]
        )
        sampler = RandomSampler()
        if length > 1:
            # One trajectory, whose bounds are looked for once: the cheapest way to windows over the whole stream.
            sampler = SliceSampler(slice_len=length, traj_key="trajectory", cache_values=True, strict_length=True)
            rows["trajectory"] = torch.zeros(task.rows, dtype=torch.int64)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=task.batch_size * length)
        buffer.extend(rows)
        name = f"TorchRL {type(sampler).__name__}, {type(storage).__name__}"
        yield Contender(name, lambda number, buffer=buffer: buffer.sample())


def replay(work: str, rows: int) -> Iterator[Contender]:
    """One of the works of replay buffers."""
    storage = LazyTensorStorage(rows)
    if work in WRITING:
        call = getattr(ReplayBuffer(storage=storage), work)
        yield Contender(f"TorchRL {work}", in_turn(call, list(map(_td, written(work)))))
        return
    samplers: dict[str, Any] = {"TorchRL RandomSampler": None}
    if work in BY_PRIORITY:
        samplers = {"TorchRL PrioritizedSampler": PrioritizedSampler(rows, 0.6, 0.4)}
    elif work == "slices":
        samplers = {
            name: SliceSampler(slice_len=LENGTH, end_key="done", cache_values=cached, strict_length=True)
            for cached, name in enumerate(
                ("TorchRL SliceSampler", "TorchRL, ends cached: for data that does not change")
            )
        }
    for name, sampler in samplers.items():
        buffer = ReplayBuffer(
            storage=storage, sampler=sampler, batch_size=SLICES * LENGTH if work == "slices" else BATCH
        )
        for chunk in chunks(rows) if len(storage) < rows else ():
            part = _td(chunk)
            if work == "slices":
                part["done"] = part["done"].bool()[:, None]
            buffer.extend(part)
        if work in BY_PRIORITY:
            buffer.update_priority(torch.arange(rows), torch.from_numpy(priorities(rows)))
        if work == "updates":
            given = (list(map(torch.from_numpy, one)) for one in updated(rows))
            yield Contender(name, in_turn(buffer.update_priority, *given))
        else:
            yield Contender(name, lambda number, buffer=buffer: buffer.sample())


def _td(rows: dict[str, Any]) -> TensorDict:
    return TensorDict({name: torch.as_tensor(values) for name, values in rows.items()}, np.shape(rows["done"]))
