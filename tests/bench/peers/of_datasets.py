"""What people write on `datasets` alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mouse_core.bench import Contender
from tests.bench.workloads import Task


def contenders(task: Task) -> Iterator[Contender]:
    """A slice a window as Python lists, as arrays, and LeRobot's way of one query a key."""
    yield Contender("datasets, python lists", _Lists(task))
    yield Contender("datasets, numpy format, a slice a window", _Arrays(task))
    if task.sequence_length > 1 and task.batch_size <= 32:
        yield Contender("LeRobot-style delta queries over datasets", _Deltas(task))


class _Lists:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._dataset = task.dataset.with_format(None)

    def __call__(self, number: int) -> dict[str, Any]:
        task = self._task
        if task.sequence_length == 1:
            rows = self._dataset[task.starts(task.batch_size, number).tolist()]
            return {name: np.asarray(values)[:, None] for name, values in rows.items()}
        windows = [
            self._dataset[start : start + task.sequence_length]
            for start in task.starts(task.batch_size, number).tolist()
        ]
        return {name: np.asarray([window[name] for window in windows]) for name in windows[0]}


class _Arrays:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._dataset = task.dataset.with_format("numpy")

    def __call__(self, number: int) -> dict[str, Any]:
        task = self._task
        if task.sequence_length == 1:
            rows = self._dataset[task.starts(task.batch_size, number).tolist()]
            return {name: values[:, None] for name, values in rows.items()}
        windows = [
            self._dataset[start : start + task.sequence_length]
            for start in task.starts(task.batch_size, number).tolist()
        ]
        return {name: np.stack([window[name] for window in windows]) for name in windows[0]}


class _Deltas:
    """For each item and each key a query of the rows at the wanted offsets, stacked; then the items collated."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._dataset = task.dataset.with_format("torch")

    def __call__(self, number: int) -> dict[str, Any]:
        import torch

        task = self._task
        items = []
        for start in task.starts(task.batch_size, number).tolist():
            rows = list(range(start, start + task.sequence_length))
            queried = {name: self._dataset[rows][name] for name in self._dataset.column_names}
            items.append({name: torch.stack(list(values)) for name, values in queried.items()})
        collated: dict[str, Any] = torch.utils.data.default_collate(items)
        return collated
