"""Loaders of every framework over a store in a folder that grows: the same batches, in worker processes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mouse_jax
import mouse_torch
from mouse_core import DatasetStore, PrefetchBatchifier
from mouse_core.testing import example_store


def as_arrays(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(batch[name]) for name in batch.keys()}  # noqa: SIM118


def test_batches_are_the_same_in_every_framework(tmp_path: Path) -> None:
    rows = example_store(rows=600)[:]
    with DatasetStore.open(tmp_path / "store", "a") as writer:
        writer.extend(rows[:400])
        writer.flush()
        loaders: list[Any] = [
            kind(DatasetStore.open(tmp_path / "store"), 8, 4, seed=3, dtypes={"obs_continuous": "float32"})
            for kind in (PrefetchBatchifier, mouse_torch.PrefetchBatchifier, mouse_jax.PrefetchBatchifier)
        ]
        for more in (rows[400:], []):
            core, *others = (as_arrays(next(iter(loader))) for loader in loaders)
            for other in others:
                assert core.keys() == other.keys()
                for name, values in core.items():
                    assert np.array_equal(values, other[name]), name
            writer.extend(more)
            writer.flush()
            for loader in loaders:
                loader.refresh()
        for loader in loaders:
            assert loader.state_dict()["rows"] == 600
            loader.close()
