"""Several processes of torch: means over them, and loaders that find their ranks by themselves."""

import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import mouse_core
import mouse_torch
from mouse_core import ConfigError
from mouse_core.ranks import find_ranks
from mouse_core.testing import example_columns, example_store
from mouse_torch import global_count, global_mean
from tests.ranks import run_ranks

SEEDS = range(4)


def ragged(seed: int, windows: int = 11, steps: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs ``[windows, steps, 3]``, targets, and which steps are there: none of the first windows."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, steps + 1, windows)
    lengths[: windows // 2] = 0
    there = torch.from_numpy(np.arange(steps) < lengths[:, None])
    inputs, targets = generator.normal(size=(windows, steps, 3)), generator.normal(size=(windows, steps))
    targets[~there.numpy()] = np.nan
    return torch.from_numpy(inputs), torch.from_numpy(targets), there


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def errors(net: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    return (net(inputs)[..., 0] - torch.where(there, targets, 0)) ** 2


def gradient(net: torch.nn.Module) -> list[float]:
    return torch.cat([values.grad.reshape(-1) for values in net.parameters()]).tolist()  # type: ignore[union-attr]


def of_one_process(seed: int) -> tuple[float, list[float]]:
    """The loss and its gradient, in plain words: the sum over steps that are there, divided by their number."""
    net, (inputs, targets, there) = model(), ragged(seed)
    loss = errors(net, inputs, targets, there)[there].sum() / int(there.sum())
    loss.backward()
    return loss.item(), gradient(net)


def _work(rank: int, count: int) -> Any:
    results = []
    for seed in SEEDS:
        net = DistributedDataParallel(model())
        parts = [part[11 * rank // count : 11 * (rank + 1) // count] for part in ragged(seed)]
        loss = global_mean(errors(net, *parts), parts[2])
        loss.backward()
        summed = model()
        global_mean(errors(summed, *parts), parts[2], averaged=False).backward()
        for values in summed.parameters():
            torch.distributed.all_reduce(values.grad)
        nothing = global_mean(errors(summed, *parts), torch.zeros_like(parts[2]))
        nothing.backward()
        results.append((loss.item(), gradient(net), gradient(summed), nothing.item()))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_processes_have_the_loss_and_the_gradient_of_one(count: int) -> None:
    found = run_ranks(_work, count, count)
    assert not any(bool(there[: 11 // count].any()) for _, _, there in map(ragged, SEEDS))  # the first process
    for number, seed in enumerate(SEEDS):
        loss, expected = of_one_process(seed)
        for rank in range(count):
            theirs, averaged, summed, nothing = found[rank][number]
            assert math.isclose(theirs, loss, rel_tol=1e-12)
            np.testing.assert_allclose(averaged, expected, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(summed, expected, rtol=1e-9, atol=1e-12)
            assert nothing == 0.0


def _accumulate(rank: int, count: int) -> Any:
    """Two micro-batches of a process, of which the first has no step in the first process, and one infinite loss."""
    results = []
    for seed in SEEDS:
        net = DistributedDataParallel(model())
        parts = [part[11 * rank // count : 11 * (rank + 1) // count] for part in ragged(seed)]
        real, value = global_count(parts[2]), 0.0
        for number, cut in enumerate([slice(0, 2), slice(2, None)]):
            micro = [part[cut] for part in parts]
            with net.no_sync() if number == 0 else nullcontext():
                loss = global_mean(errors(net, *micro), micro[2], count=real)
                loss.backward()
            value += loss.item()
        endless = torch.tensor([math.inf if rank == 0 else 1.0], requires_grad=True)
        mean = global_mean(endless)
        mean.backward()
        results.append((value, gradient(net), [mean.item(), *endless.grad.tolist()]))  # type: ignore[union-attr]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_accumulated_gradients_are_those_of_one_process(count: int) -> None:
    found = run_ranks(_accumulate, count, count)
    for number, seed in enumerate(SEEDS):
        loss, expected = of_one_process(seed)
        for rank in range(count):
            value, accumulated, endless = found[rank][number]
            assert math.isclose(value, loss, rel_tol=1e-12)
            np.testing.assert_allclose(accumulated, expected, rtol=1e-9, atol=1e-12)
            assert endless == [math.inf, 1.0]


def test_a_count_is_that_of_all_masks() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]])
    assert global_count(mask) == global_count(mask[:1], mask[1:]) == int(mask.sum())
    with pytest.raises(ConfigError, match="masks: expected one or more"):
        global_count()


def test_one_process_needs_no_group() -> None:
    for seed in SEEDS:
        net, (inputs, targets, there) = model(), ragged(seed)
        loss = global_mean(errors(net, inputs, targets, there), there)
        loss.backward()
        expected, wanted = of_one_process(seed)
        assert math.isclose(loss.item(), expected, rel_tol=1e-12)
        np.testing.assert_allclose(gradient(net), wanted, rtol=1e-9, atol=1e-12)


def _load(rank: int) -> Any:
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
    parts = run_ranks(_load, count)
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
    with pytest.raises(AssertionError, match="on 3 ranks"):  # nobody is left to give a result
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
