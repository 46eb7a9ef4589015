"""Loaders of several processes that find their ranks by themselves."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import mouse_core
import mouse_torch
from mouse_core.testing import example_store
from tests.several import run_ranks


def _work(rank: int) -> Any:
    """One process: its rows of three batches, by two loaders and by a source."""
    store = example_store()
    with mouse_torch.PrefetchBatchifier(store, 8, 12, shard="auto", num_workers=1) as loader:
        ours = np.stack([loader.next_batch()["reward"].numpy() for _ in range(3)])
    with mouse_core.PrefetchBatchifier(store, 8, 12, shard="auto", num_workers=1) as loader:
        theirs = np.stack([loader.next_batch()["reward"] for _ in range(3)])
    source = mouse_core.BatchSource(store, 8, 12, shard="auto")
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, np.stack([source[index]["reward"] for index in range(3)]))
    return ours.tolist()


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_of_a_group_have_the_batch_together(count: int) -> None:
    """Without a variable in the environment: the group alone says who they are."""
    assert "RANK" not in os.environ
    parts = run_ranks(_work, count)
    source = mouse_core.BatchSource(example_store(), 8, 12)
    whole = np.stack([source[index]["reward"] for index in range(3)])
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
