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
from mouse_core.testing import example_store
from tests.ports import free_port


def _work(rank: int, count: int, port: int, found: Any) -> None:
    """One process: its rows of three batches, by three loaders and by a source."""
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    store = example_store()
    with mouse_torch.PrefetchBatchifier(store, 8, 12, shard="auto", num_workers=1) as loader:
        ours = np.stack([loader.next_batch()["reward"].numpy() for _ in range(3)])
    with mouse_core.PrefetchBatchifier(store, 8, 12, shard="auto", num_workers=1) as loader:
        theirs = np.stack([loader.next_batch()["reward"] for _ in range(3)])
    source = mouse_core.BatchSource(store, 8, 12, shard="auto")
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, np.stack([source[index]["reward"] for index in range(3)]))
    found.put((rank, ours.tolist()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_of_a_group_have_the_batch_together(count: int) -> None:
    """Without a variable in the environment: the group alone says who they are."""
    assert "RANK" not in os.environ
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    work = torch.multiprocessing.spawn(_work, (count, free_port(), results), nprocs=count, join=False)
    parts = dict(results.get() for _ in range(count))
    while not work.join():
        pass
    source = mouse_core.BatchSource(example_store(), 8, 12)
    whole = np.stack([source[index]["reward"] for index in range(3)])
    np.testing.assert_array_equal(np.concatenate([parts[rank] for rank in range(count)], axis=1), whole)
