"""Rows of a framework's arrays in a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mouse_core import BatchSource, DatasetStore

ROW = {
    "action": 1,
    "reward": 0.5,
    "done": False,
    "episode_step": [0],
    "observation": [1.0, 2.0],
    "observation_discrete": [3],
}


def row_of(array: Callable[[Any], Any], **changed: Any) -> dict[str, Any]:
    """A row whose values ``array`` makes."""
    return {name: array(value) for name, value in ROW.items()} | changed


def check_arrays_are_taken(row: dict[str, Any], stack: Callable[[Sequence[Any]], Any]) -> None:
    """Two rows one by one and two at once are four steps of the same values."""
    store = DatasetStore()
    store.append(row)
    store.append(row)
    store.extend({name: stack([value, value]) for name, value in row.items()})
    batch = BatchSource(store, 4, 1)[0]
    assert {name: values.tolist() for name, values in batch.items()} == {
        "action": [[1] * 4],
        "reward": [[0.5] * 4],
        "done": [[0] * 4],
        "time": [[0] * 4],
        "obs_continuous": [[[1.0, 2.0]] * 4],
        "obs_discrete": [[3] * 4],
    }
