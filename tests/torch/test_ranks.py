"""Loaders of several processes that find their ranks by themselves."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

import mouse_core
import mouse_torch
from mouse_core import ConfigError
from mouse_core.ranks import find_ranks
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


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_of_a_group_have_the_batch_together(count: int) -> None:
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
    "seed": "0: ranks: expected all 2 ranks to agree at the first batch, found rank 1 with seed 3 (rank 0 has 0)",
    "rows": "3: ranks: expected all 2 ranks to agree at refresh(), found rank 1 with rows 121 (rank 0 has 120)",
    "load": "4: ranks: expected all 2 ranks to agree at load_state_dict(), "
    "found rank 1 with next_index 4 (rank 0 has 3)",
    "missed": "3: ranks: expected all 2 ranks to call refresh() before batch 3, found rank 1 at batch 3 without",
}


def _disagree_in_all(rank: int, count: int) -> list[Any]:
    return [_disagree(rank, count, what) for what in TOLD]


@pytest.mark.slow
def test_processes_of_a_group_are_told_where_they_disagree() -> None:
    first, second = (dict(zip(TOLD, told, strict=True)) for told in run_ranks(_disagree_in_all, 2, 2))
    for what, said in TOLD.items():
        assert first[what].startswith(said)
    assert second == {**first, "missed": "missed"}


def _end_at_once(rank: int, folder: str) -> Any:
    """One process that ends the moment it is told, as a job does whose launcher ends with its first error."""
    try:
        with mouse_torch.PrefetchBatchifier(example_store(100), 8, 12, shard="auto", seed=rank) as loader:
            if rank:
                time.sleep(0.2)  # by which rank 0, which holds the notes, waits in ever longer pauses
            loader.next_batch()
    except Exception as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}")
    os._exit(1)


@pytest.mark.slow
def test_all_are_told_though_each_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit codes"):  # nobody is left to give a result
        run_ranks(_end_at_once, 3, str(tmp_path), seconds=30)
    told = {(tmp_path / str(rank)).read_text() for rank in range(3)}
    assert len(told) == 1, told
    assert told.pop().startswith("ConfigError: ranks: expected all 3 ranks to agree at the first batch")


def test_notes_of_another_attempt_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchrun starts processes again their store may be that of those before them."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        boards = []
        for attempt in ("0", "1"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
            board = find_ranks().board
            assert board is not None
            assert board.get("mouse/loaders/0") is None
            board.put("mouse/loaders/0", attempt)
            boards.append(board)
        assert [board.get("mouse/loaders/0") for board in boards] == ["0", "1"]
    finally:
        torch.distributed.destroy_process_group()
