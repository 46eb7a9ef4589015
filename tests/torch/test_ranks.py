"""Loaders of several processes that find their ranks by themselves."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

import mouse_core
import mouse_torch
from mouse_core import ConfigError
from mouse_core.testing import example_columns, example_store
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


def _disagree(rank: int, count: int, what: str) -> Any:
    """One process of a training loop, in which all wait for each other in each step: what it is told, and when."""
    store = example_store(100)
    options = {"seed": 3} if what == "seed" and rank == count - 1 else {}
    with mouse_torch.PrefetchBatchifier(store, 8, 12, shard="auto", **options) as loader:
        step = 0
        try:
            for step in range(6):
                if step == 3:
                    store.extend(example_columns(20 + (what == "rows" and rank == 1), first=100))
                    if what != "missed" or rank != count - 1:
                        loader.refresh()
                if step == 4 and what == "load":
                    loader.load_state_dict({**loader.state_dict(), "next_index": 3 + rank})
                loader.next_batch()
                if what == "missed" and rank == count - 1 and step == 3:
                    return "missed"  # the others are told, and nobody would come to the next collective call
                torch.distributed.all_reduce(torch.ones(1))
        except ConfigError as error:
            return f"{step}: {error}"
    return "nothing"


TOLD = {
    "nothing": "nothing",
    "seed": "0: ranks: expected all 2 to agree at the first batch, found rank 1 with seed 3 where rank 0 has 0",
    "rows": "3: ranks: expected all 2 to agree at refresh(), found rank 1 with rows 121 where rank 0 has 120",
    "load": "4: ranks: expected all 2 to agree at load_state_dict(), found rank 1 with next_index 4 where rank 0 has 3",
    "missed": "3: ranks: expected all 2 to call refresh() before batch 3, found rank 1 at batch 3 without",
}


def _disagree_in_all(rank: int, count: int) -> list[Any]:
    return [_disagree(rank, count, what) for what in TOLD]


def test_processes_of_a_group_are_told_where_they_disagree() -> None:
    first, second = (dict(zip(TOLD, told, strict=True)) for told in run_ranks(_disagree_in_all, 2, 2))
    for what, said in TOLD.items():
        assert first[what].startswith(said)
    assert second == {**first, "missed": "missed"}
