"""Priorities on the device in torch: the draws of the host, whatever is written and updated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mouse_core import ConfigError, DataError
from mouse_core.replay import (
    ArrayStorage,
    LinearSchedule,
    Priorities,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    Slices,
)
from mouse_torch.device import Replay
from tests.torch.test_device import ON

SEED = 2**63 + 5
BATCH = 6


def rows_of(first: int, count: int, envs: int | None) -> dict[str, Any]:
    number = first + np.arange(count)[:, None] + 1000 * np.arange(envs or 1)
    done = np.random.default_rng(3).random(4096)[number % 4096] < 0.3
    lead = (count,) if envs is None else (count, envs)
    return {"x": number.reshape(lead).astype(np.int32), "done": done.reshape(lead)}


@pytest.mark.slow
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize(
    ("steps", "envs", "count", "options"),
    [
        (11, None, 1, {}),
        (300, None, 70, {}),
        (11, None, 11, {"sequence_length": 3, "pad": False}),
        (40, None, 11, {"sequence_length": 3, "pad": False, "period": 2}),
        (23, 3, 1, {"sequence_length": 5, "pad": 0, "period": 3}),
        (23, 3, 11, {"sequence_length": 5, "pad": 0}),
    ],
)
def test_draws_are_those_of_the_host(steps: int, envs: Any, count: int, options: Any, on: str) -> None:
    """Rows are written until they have gone round, some priorities changed each time, and all samples compared."""
    given = {"alpha": 0.7, "beta": 0.6, "eps": 1e-3}
    sampler = PrioritizedSliceSampler(**given, **options) if options else PrioritizedSampler(**given)
    capacity = steps * (envs or 1)
    buffer = ReplayBuffer(ArrayStorage(capacity, ndim=1 if envs is None else 2), sampler, batch_size=BATCH, seed=SEED)
    more: dict[str, Any] = {"num_envs": envs, "seed": SEED, "device": on}
    if options:
        more["slices"] = Slices(**options)
    row = {"x": np.int32(0), "done": False}
    replay = Replay(row, capacity, batch_size=BATCH, priorities=Priorities(**given), **{"num_envs": None, **more})
    rng = np.random.default_rng(0)
    for number in range(max(12, 3 * steps // count) if count > 1 else 30):
        rows = rows_of(number * count, count, envs)
        rows_there = min((number + 1) * count, steps) * (envs or 1)
        index, values = rng.integers(0, rows_there, 12), np.float32(10.0 ** rng.uniform(-6, 4, 12))
        values[rng.random(12) < 0.2] = 0
        index[8:] = index[:4]
        replay.extend(rows)
        buffer.extend(rows)
        if replay.can_sample():
            expected, found = buffer.sample(), replay.sample()
            agree(found, expected)
            buffer.update_priority(expected["index"], expected["x"] % 7 / np.float32(3))
            replay.set_priorities(found["index"], found["x"] % 7 / 3)
        else:
            with pytest.raises(ConfigError, match="expected an episode of at least"):
                buffer.sample()
        buffer.update_priority(index, values)
        replay.set_priorities(torch.as_tensor(np.append(index, -1)), torch.as_tensor(np.append(values, 9)))
        if replay.can_sample():
            agree(replay.sample(), buffer.sample())
            agree(replay.sample(beta=torch.tensor(0.6, device=on)), buffer.sample())


def agree(found: Any, expected: Any) -> None:
    assert {*found.keys()} == {*expected}
    for name, array in expected.items():
        np.testing.assert_allclose(found[name].cpu(), array, rtol=1e-5 if name == "priority_weight" else 0)


def test_of_many_rows_those_of_the_host_come() -> None:
    """Over four levels."""
    n = 5_000
    options: dict[str, Any] = {"batch_size": 64, "seed": SEED}
    buffer = ReplayBuffer(ArrayStorage(n), PrioritizedSampler(), **options)
    replay = Replay({"x": 0.0}, n, priorities=Priorities(), **{"num_envs": None, **options})
    rng = np.random.default_rng(1)
    index, values = rng.permutation(n), rng.exponential(size=n).astype(np.float32)
    for made in (buffer, replay):
        made.extend({"x": np.arange(n, dtype=np.float32)})
    buffer.update_priority(index, values)
    replay.set_priorities(torch.as_tensor(index), torch.as_tensor(values))
    agree(replay.sample(), buffer.sample())


def made(**options: Any) -> Replay:
    given = {"batch_size": 64, "priorities": Priorities(alpha=1, beta=1, eps=0), **options}
    return Replay({"x": 0.0, "done": False}, 40, **{"num_envs": None, **given})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected order='random', found 'epochs'"):
        made(order="epochs")
    for beta in (-1, float("nan"), "x", torch.ones(2)):
        with pytest.raises(ConfigError, match=r"beta: expected a .*number from 0"):
            Priorities(beta=beta)
    plain, replay = made(priorities=None), made()
    index = torch.arange(3)
    with pytest.raises(ConfigError, match="made with priorities=, found one without"):
        plain.set_priorities(index, index)
    replay.extend({"x": torch.zeros(5), "done": torch.zeros(5) > 0})
    with pytest.raises(ConfigError, match="beta: expected a replay made with priorities"):
        plain.sample(beta=1)
    for indices, priorities, error, words in (
        (index, torch.ones(2), ConfigError, r"shape of the index \[3\], found \[2\]"),
        (index.float(), torch.ones(3), ConfigError, "integers as indices"),
        (index, -torch.ones(3), DataError, "finite priorities from 0"),
        (index + 3, torch.ones(3), IndexError, r"slots in 0\.\.4, found 5"),
    ):
        with pytest.raises(error, match=words):
            replay.set_priorities(indices, priorities)
    replay.set_priorities(torch.arange(5), torch.zeros(5))
    assert not replay.can_sample()
    with pytest.raises(ConfigError, match="rows with a priority above 0, found none among 5"):
        replay.sample()


def test_one_priority_may_stand_for_a_slice() -> None:
    replay = made(slices=Slices(sequence_length=3, pad=False))
    replay.extend({"x": torch.arange(6.0), "done": torch.zeros(6) > 0})
    replay.set_priorities(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.0], [7.0]]))
    assert set(replay.sample()["x"][:, 0].tolist()) == {2, 3}


def test_it_moves_with_its_priorities(tmp_path: Any) -> None:
    for slices in (None, Slices(sequence_length=2)):
        replay, moved = (made(slices=slices, seed=seed) for seed in (SEED, 0))
        replay.extend({"x": torch.arange(50.0)[:30], "done": torch.arange(30) % 4 == 3})
        replay.set_priorities(torch.arange(30), torch.arange(30) * 10)
        # As where nobody looks: a number that is not finite is the largest.
        replay.weights.update(replay.size, torch.tensor([7]), torch.tensor([torch.inf]))
        replay.extend({"x": torch.arange(17.0), "done": torch.arange(17) % 4 == 3})
        replay.sample()
        replay.dumps(tmp_path / "rows")
        moved.loads(tmp_path / "rows")
        for replays in (replay, moved):
            replays.extend({"x": 1.0, "done": False})
        one, other = moved.sample(), replay.sample()
        for name in ("x", "index", "priority_weight"):
            assert (one[name] == other[name]).all()


@pytest.mark.parametrize("on", ON)
def test_beta_may_be_a_schedule(on: str) -> None:
    schedule = LinearSchedule(0.0, 0.5, 2)
    row = {"x": np.int32(0), "done": False}
    replay = Replay(row, 40, batch_size=64, priorities=Priorities(alpha=1, beta=schedule, eps=0), device=on)
    buffer = ReplayBuffer(ArrayStorage(40), PrioritizedSampler(1, schedule, 0), batch_size=64, seed=0)
    for one in (replay, buffer):
        one.extend(rows_of(0, 2, None))
    buffer.update_priority(np.arange(2), np.array([1.0, 4.0]))
    replay.set_priorities(torch.arange(2), torch.tensor([1.0, 4.0]))
    moved = ReplayBuffer(ArrayStorage(40), PrioritizedSampler(1, schedule, 0), batch_size=64, seed=1)
    replay.to_host(moved)
    for number in range(4):
        weight = torch.as_tensor(buffer.sample()["priority_weight"])
        assert torch.equal(torch.as_tensor(moved.sample()["priority_weight"]), weight)
        for batch in (replay.sample(), replay.sample(number, beta=schedule)):
            torch.testing.assert_close(batch["priority_weight"].cpu(), weight)
    last = replay.sample(3, beta=lambda number: number / 3)["priority_weight"]
    torch.testing.assert_close(last.min().cpu(), torch.tensor(0.25))


def test_what_lies_under_a_mask_is_no_priority() -> None:
    replay = Replay({"x": np.float32(0)}, 8, batch_size=4, num_envs=None, priorities=Priorities())
    replay.extend({"x": np.zeros(2, np.float32)})
    hidden = np.ma.masked_array([1.0, 2.0], [True, False])
    for given in ((np.arange(2), hidden), (np.ma.masked_array([0, 1], [True, False]), [1.0, 2.0])):
        with pytest.raises(DataError, match="set_priorities: expected a value, found a masked one"):
            replay.set_priorities(*given)
