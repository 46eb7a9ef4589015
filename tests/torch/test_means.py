"""``global_mean`` over processes: loss and gradient are those of one process that has the whole batch."""

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from mouse_core import ConfigError
from mouse_torch import global_count, global_mean
from tests.several import run_ranks

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
