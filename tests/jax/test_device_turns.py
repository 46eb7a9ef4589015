"""Rows of which each comes once, in an epoch or in all: those of the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mouse_core import ConfigError
from mouse_core.replay import (
    ArrayStorage,
    ConsumingSampler,
    NStep,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
)
from mouse_jax import device

SEED = 2**64 - 7


def rows(first: int, count: int, envs: int | None) -> dict[str, Any]:
    number = (first + np.arange(count)[:, None] + 1000 * np.arange(envs or 1)).astype(np.int32)
    number = number if envs else number[:, 0]
    return {"number": number, "reward": number.astype(np.float32), "done": (number % 3 == 0) & (number % 4 > 0)}


def made(capacity: int, batch_size: int, envs: int | None = None, **options: Any) -> device.Replay:
    example = {"number": 0, "reward": 0.0, "done": False}
    return device.init(example, capacity, batch_size=batch_size, num_envs=envs, **{"seed": SEED, **options})


def host(capacity: int, batch_size: int, envs: int | None, sampler: Any, transform: Any = None) -> ReplayBuffer:
    storage = ArrayStorage(capacity, ndim=1 if envs is None else 2)
    return ReplayBuffer(storage, sampler, batch_size=batch_size, seed=SEED, transform=transform)


grow, take = jax.jit(device.add, donate_argnums=0), jax.jit(device.take)


def same(found: Any, expected: Any) -> None:
    """Of what was saved and loaded episodes may have other numbers."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name == "traj_id":
            continue
        np.testing.assert_array_equal(found[name], values)


TILES = {"sequence_length": 2}
SAMPLERS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "queue": ({"order": "queue"}, ConsumingSampler, {"shuffle": False, "drop_last": True}),
    "whole slices": (
        {"order": "epochs", "slices": device.Slices(**TILES, pad=False)},
        SliceSamplerWithoutReplacement,
        {**TILES, "drop_last": True, "pad": False},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["queue", pytest.param("whole slices", marks=pytest.mark.long)])
def test_what_comes_is_what_comes_on_the_host(name: str) -> None:
    """A ring of 6 time steps is filled and goes round, and is drawn from as often as there is a batch."""
    options, sampler, given = SAMPLERS[name]
    transform = NStep(2, 0.5) if name == "queue" else None
    replay = made(18, 4, 3, **options, transform=transform)
    expected = host(18, 4, 3, sampler(**given), transform)
    taken = 0
    for number in range(8):
        replay = grow(replay, rows(2 * number, 2, 3))
        expected.extend(rows(2 * number, 2, 3))
        for _ in range(4 if number in (3, 6) else 1):
            if not device.can_sample(replay):
                with pytest.raises(ConfigError):
                    expected.sample()
                break
            replay, batch = take(replay, taken)
            same(batch, expected.sample())
            taken += 1
    assert taken > 6


@pytest.mark.slow
def test_an_epoch_over_many_rows_is_that_of_the_host() -> None:
    """Many are not shuffled outright, and with 30,001 of them the grid has cells beyond."""
    number = rows(0, 30_001, None)
    replay = grow(made(40_000, 14_000, order="epochs"), number)
    expected = host(40_000, 14_000, None, SamplerWithoutReplacement(drop_last=True))
    expected.extend(number)
    for sample in range(3):
        replay, batch = device.take(replay, sample)
        same(batch, expected.sample())


def test_a_queue_gives_time_steps_of_all_environments() -> None:
    replay = grow(made(26, 10, 2, order="queue"), rows(0, 7, 2))
    assert device.can_add(replay, 6)
    assert not device.can_add(replay, 7)
    replay, batch = device.take(replay)
    assert batch["number"].reshape(5, 2).tolist() == [[step, 1000 + step] for step in range(5)]
    assert not device.can_sample(replay)


def test_a_queue_says_when_it_would_write_over_what_has_not_come() -> None:
    replay = grow(made(13, 5, order="queue"), rows(0, 12, None))
    assert device.can_add(replay)
    assert not device.can_add(replay, 3)
    replay, first = device.take(replay)
    replay, second = device.take(replay)
    assert [*first["number"], *second["number"]] == [*range(10)]
    assert not device.can_sample(replay)
    assert device.can_add(replay, 11)
    with pytest.raises(ConfigError, match="expected 5 rows for a batch in which each comes once, found 2"):
        device.take(replay)
    replay, _ = take(replay, 0)  # nobody can raise there: the two rows stay
    replay, third = device.take(grow(replay, rows(12, 3, None)))
    assert third["number"].tolist() == [10, 11, 12, 13, 14]


def test_what_cannot_be_taken_is_refused() -> None:
    for options, words in (
        ({"order": "newest"}, "order: expected one of"),
        ({"order": "queue", "slices": device.Slices(sequence_length=2)}, "or 'epochs' for slices, found 'queue'"),
        ({"order": "epochs", "slices": device.Slices(sequence_length=2, period=2)}, "period: expected 1"),
        ({"order": "epochs", "capacity": 4}, "at most the 4 rows of the capacity"),
    ):
        with pytest.raises(ConfigError, match=words):
            made(**{"capacity": 9, "batch_size": 5, **options})
    replay = grow(made(9, 5, order="epochs"), rows(0, 6, None))
    with pytest.raises(ConfigError, match="expected order='random', found 'epochs'; take"):
        device.sample(replay, 0)
    with pytest.raises(ConfigError, match="expected an integer where each row comes once"):
        device.take(replay, jax.random.key(0))
    at_random = grow(made(9, 5), rows(0, 6, None))
    assert (device.take(at_random, 3)[1]["number"] == device.sample(at_random, jnp.uint32(3))["number"]).all()
