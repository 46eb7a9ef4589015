"""How many modules a batch passes on its way, as CONTRIBUTING walks it: what is read to follow one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import datasets
import numpy as np

from mouse_core import BatchSource, DatasetStore

ROWS = 20_000


def modules_of(call: Callable[[], Any]) -> set[str]:
    """The modules of the core in which functions are called meanwhile, in this thread."""
    seen = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_globals.get("__name__", ""))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {name for name in seen if name.startswith("mouse_core.")}


def columns(rows: int) -> dict[str, Any]:
    number = np.arange(rows)
    done = (number % 100 == 99).astype(np.int64)
    observation = np.ones((rows, 4), np.float32)
    return {"action": number % 5, "reward": number / 7, "done": done, "observation": observation}


def test_a_batch_from_disk_passes_few_modules(tmp_path: Path) -> None:
    """The first batch, and one while a loop runs; both are converted: numbers are stored as float64."""
    made = {name: values.tolist() for name, values in columns(ROWS).items()}
    datasets.Dataset.from_dict(made).save_to_disk(tmp_path / "rows")
    store = DatasetStore(max_action_dim=5).from_dataset(datasets.load_from_disk(tmp_path / "rows"))
    source = BatchSource(store, 64, 32)
    assert len(found := modules_of(lambda: source[0])) <= 23, sorted(found)
    for index in range(1, 30):
        _ = source[index]
    assert len(found := modules_of(lambda: source[30])) <= 5, sorted(found)


def test_a_batch_after_a_refresh_passes_few_modules() -> None:
    store = DatasetStore(max_action_dim=5)
    store.extend(columns(1000))
    source = BatchSource(store, 64, 32)
    for index in range(20):
        _ = source[index]
    for number in range(1, 4):
        store.extend(columns(10))
        snapshot, before = store.snapshot(), source

        def refreshed(snapshot: Any = snapshot, before: BatchSource = before, number: int = number) -> None:
            nonlocal source
            source = before.with_snapshot(snapshot, epoch_start=20 * number)
            _ = source[20 * number]

        found = modules_of(refreshed)
        assert len(found) <= 19, sorted(found)
