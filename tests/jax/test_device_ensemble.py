"""Batches of several replays on the device are those of an ensemble on the host."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from mouse_core import ConfigError, SchemaError
from mouse_core.replay import ArrayStorage, ReplayBuffer, ReplayBufferEnsemble, Schedule, SliceSampler
from mouse_jax import device

SEED = 2**63 + 5


def rows(first: int, count: int) -> dict[str, Any]:
    number = np.arange(first, first + count, dtype=np.int32)
    return {"obs": {"x": number}, "done": number % 5 == 0}


@cache
def members() -> tuple[list[device.Replay], list[ReplayBuffer]]:
    """Two of slices, of which the second has no mask, as nothing is padded."""
    replays, buffers = [], []
    for number, padding in enumerate((True, False)):
        one = {"obs": {"x": 0}, "done": False}
        slices = device.Slices(sequence_length=3, pad=padding)
        written = rows(1000 * number, 11 + number)
        replays.append(grow(device.init(one, 20, batch_size=1, num_envs=None, slices=slices), written))
        buffers.append(ReplayBuffer(ArrayStorage(20), SliceSampler(sequence_length=3, pad=padding)))
        buffers[-1].extend(written)
    return replays, buffers


grow = jax.jit(device.add)


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    np.testing.assert_array_equal(found["obs"]["x"], expected["obs"]["x"])
    for name in found.keys() - {"obs"}:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.slow
def test_batches_are_those_of_the_host() -> None:
    """Shares of 3.5 and 1.5 rows are rounded by the same random numbers; from batch 8 on one has no weight."""
    schedule = Schedule({0: [7, 3], 4: [3, 7], 8: [1, 0]})
    replays, buffers = members()
    ensemble = ReplayBufferEnsemble(*buffers, p=schedule, batch_size=5, seed=SEED)
    draw = jax.jit(partial(device.sample_ensemble, batch_size=5, p=schedule, seed=SEED))
    of_first = []
    for number in range(9):
        batch = draw(replays, number)
        same(batch, ensemble.sample())
        of_first.append(int((batch["buffer_ids"][:, 0] == 0).sum()))
    assert {*of_first[:4]} == {3, 4}
    assert {*of_first[4:8]} == {1, 2}
    assert of_first[8] == 5


@pytest.mark.slow
def test_what_cannot_be_mixed_is_refused() -> None:
    replays, _ = members()
    empty, another = (device.init({name: 0.0}, 4, batch_size=1) for name in ("reward", "cost"))
    others = [grow(empty, {"reward": 1.0}), grow(another, {"cost": 1.0})]
    for given, index, options, error, words in (
        ([], 0, {}, ConfigError, "at least one"),
        (replays, 0, {"p": [1]}, ConfigError, "expected 2 weights"),
        (replays, -1, {}, ConfigError, "found -1"),
        (replays, jax.random.key(0), {"p": Schedule({0: [1, 1], 5: [1, 2]})}, ConfigError, "the schedule needs"),
        (others, 0, {}, SchemaError, "replay 1: expected the fields"),
        ([others[0], empty], 0, {}, ConfigError, "expected rows, found none"),
    ):
        with pytest.raises(error, match=words):
            device.sample_ensemble(given, index, 4, **options)
