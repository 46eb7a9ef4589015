"""What people write on `datasets` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.bench.measuring import Contender
from tests.bench.workloads import Task


def windows(task: Task) -> Iterator[Contender]:
    """A slice a window as Python lists, as arrays, and LeRobot's way of one query a key."""
    yield Contender("datasets, python lists", _slices(task, None, np.asarray))
    yield Contender("datasets, numpy format, a slice a window", _slices(task, "numpy", np.stack))
    if task.sequence_length > 1 and task.batch_size <= 32:
        yield Contender("LeRobot-style delta queries over datasets", _deltas(task))


def _slices(task: Task, form: str | None, stacked: Callable[[Any], Any]) -> Callable[[int], dict[str, Any]]:
    dataset = task.dataset.with_format(form)

    def batch(number: int) -> dict[str, Any]:
        starts = task.starts(task.batch_size, number).tolist()
        if task.sequence_length == 1:
            return {name: np.asarray(values)[:, None] for name, values in dataset[starts].items()}
        windows = [dataset[start : start + task.sequence_length] for start in starts]
        return {name: stacked([window[name] for window in windows]) for name in windows[0]}

    return batch


def _deltas(task: Task) -> Callable[[int], dict[str, Any]]:
    """For each item and each key a query of the rows at the wanted offsets, stacked; then the items collated."""
    import torch

    dataset = task.dataset.with_format("torch")

    def batch(number: int) -> dict[str, Any]:
        items = []
        for start in task.starts(task.batch_size, number).tolist():
            rows = list(range(start, start + task.sequence_length))
            queried = {name: dataset[rows][name] for name in dataset.column_names}
            items.append({name: torch.stack(list(values)) for name, values in queried.items()})
        collated: dict[str, Any] = torch.utils.data.default_collate(items)
        return collated

    return batch
