"""Priorities on the device: the draws of the host, whatever is written and updated."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mouse_core import ConfigError, DataError, SchemaError
from mouse_core.replay import (
    ArrayStorage,
    LinearSchedule,
    Priorities,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
)
from mouse_jax import device
from mouse_jax.device import Slices

SEED = 2**63 + 5
BATCH = 6


def rows_of(first: int, count: int, envs: int | None) -> dict[str, Any]:
    number = first + np.arange(count)[:, None] + 1000 * np.arange(envs or 1)
    done = np.random.default_rng(3).random(4096)[number % 4096] < 0.3
    lead = (count,) if envs is None else (count, envs)
    return {"x": number.reshape(lead).astype(np.int32), "done": done.reshape(lead)}


def follows_the_host(steps: int, envs: int | None, options: dict[str, Any], count: int, turns: int) -> None:
    """Rows are written until they have gone round, some priorities changed each time, and all samples compared."""
    given = {"alpha": 0.7, "beta": 0.6, "eps": 1e-3}
    sampler = PrioritizedSliceSampler(**given, **options) if options else PrioritizedSampler(**given)
    capacity = steps * (envs or 1)
    buffer = ReplayBuffer(ArrayStorage(capacity, ndim=1 if envs is None else 2), sampler, batch_size=BATCH, seed=SEED)
    replay = device.init(
        {"x": np.int32(0), "done": False},
        capacity,
        batch_size=BATCH,
        num_envs=envs,
        slices=Slices(**options) if options else None,
        priorities=Priorities(**given),
        seed=SEED,
    )

    @partial(jax.jit, donate_argnums=0)
    def step(replay: Any, rows: Any, number: Any, index: Any, values: Any) -> Any:
        replay = device.add(replay, rows)
        ready, batch = device.can_sample(replay), device.sample(replay, number)
        replay = device.set_priorities(replay, jnp.where(ready, batch["index"], -1), batch["x"] % 7 / 3)
        replay = device.set_priorities(replay, index, values)
        return replay, ready, (batch, device.sample(replay, number + 1))

    rng = np.random.default_rng(0)
    for number in range(turns):
        rows = rows_of(number * count, count, envs)
        rows_there = min((number + 1) * count, steps) * (envs or 1)
        index, values = rng.integers(0, rows_there, 12), np.float32(10.0 ** rng.uniform(-6, 4, 12))
        values[rng.random(12) < 0.2] = 0
        index[8:] = index[:4]
        samples = buffer.stats()["samples"]
        replay, ready, batches = step(
            replay, rows, samples, np.append(index, [-1, capacity]), np.append(values, [9, 9])
        )
        buffer.extend(rows)
        if not ready:
            with pytest.raises(ConfigError, match="expected an episode of at least"):
                buffer.sample()
            buffer.update_priority(index, values)
            continue
        for place, batch in enumerate(batches):
            expected = buffer.sample()
            assert batch.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_allclose(batch[name], array, rtol=1e-5 if name == "priority_weight" else 0)
            if not place:
                buffer.update_priority(expected["index"], expected["x"] % 7 / np.float32(3))
                buffer.update_priority(index, values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "envs", "count", "options"),
    [
        (11, None, 1, {}),
        pytest.param(300, None, 5, {"sequence_length": 1}, marks=pytest.mark.long),
        pytest.param(300, None, 11, {"sequence_length": 3, "pad": False, "period": 2}, marks=pytest.mark.long),
        (23, 3, 1, {"sequence_length": 5, "pad": 0, "period": 3}),
    ],
)
def test_draws_are_those_of_the_host_everywhere(steps: int, envs: Any, count: int, options: Any) -> None:
    follows_the_host(steps, envs, options, count, 30)


def made(capacity: int = 40, **options: Any) -> device.Replay:
    given = {"batch_size": 64, "priorities": Priorities(alpha=1, beta=1, eps=0), **options}
    return device.init({"x": np.int32(0), "done": False}, capacity, **{"num_envs": None, **given})


@pytest.mark.slow
def test_a_loop_over_seeds_draws_for_each_what_it_has_alone() -> None:
    rows = jax.tree.map(jnp.asarray, rows_of(0, 30, None))

    def run(seed: Any) -> Any:
        replay = made(20, seed=seed, slices=Slices(sequence_length=2, period=3))

        def step(replay: Any, number: Any) -> Any:
            replay = device.add(replay, jax.tree.map(lambda leaf: leaf[number], rows))
            batch = device.sample(replay, number)
            return device.set_priorities(replay, batch["index"], (batch["x"][:, 0] + number) % 5 + 1), batch

        return jax.lax.scan(step, replay, jnp.arange(30))[1]

    batches = jax.jit(jax.vmap(run))(jnp.arange(2))
    sampler = PrioritizedSliceSampler(1, 1, 0, sequence_length=2, period=3)
    buffer = ReplayBuffer(ArrayStorage(20), sampler, batch_size=64, seed=1)
    for number in range(30):
        buffer.extend(jax.tree.map(lambda leaf, at=number: np.asarray(leaf[at : at + 1]), rows))
        batch = buffer.sample()
        for name, array in batch.items():
            np.testing.assert_allclose(batches[name][1, number], array, rtol=1e-5)
        buffer.update_priority(batch["index"], (batch["x"][:, 0] + number) % 5 + 1)


@pytest.mark.slow
def test_the_tree_is_written_in_place() -> None:
    """Also where it was drawn from before, and importance weights are looked at afterwards."""

    def step(replay: Any, number: Any, priorities: Any) -> Any:
        batch = device.sample(replay, number)
        return device.set_priorities(replay, batch["index"], priorities), batch

    replay = made(1 << 20)
    given = replay, jnp.uint32(0), np.ones(64, np.float32)
    memory = jax.jit(step, donate_argnums=0).lower(*given).compile().memory_analysis()
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(replay))
    assert memory.alias_size_in_bytes > nbytes - 100
    assert memory.temp_size_in_bytes < nbytes / 20


@pytest.mark.slow
@pytest.mark.parametrize("slices", [None, pytest.param(Slices(sequence_length=3), marks=pytest.mark.long)])
def test_priorities_move_to_the_host_and_back(slices: Any, tmp_path: Any) -> None:
    replay = device.add(device.add(made(30, slices=slices, seed=9), rows_of(0, 20, None)), rows_of(20, 20, None))
    replay = device.set_priorities(replay, np.arange(30), np.arange(30) / 7)
    device.dumps(replay, tmp_path / "replay", samples=4)
    again, samples = device.loads(made(30, slices=slices), tmp_path / "replay")
    batch, other = (device.sample(device.add(each, rows_of(40, 20, None)), samples) for each in (replay, again))
    np.testing.assert_array_equal(batch["index"], other["index"])
    np.testing.assert_array_equal(batch["priority_weight"], other["priority_weight"])
    assert samples == 4
    assert float(again.state["weights"]["largest"]) == pytest.approx(29 / 7)


@pytest.mark.slow
def test_a_few_units_are_drawn_exactly() -> None:
    """Where a random number often falls on the end of a row."""
    priorities = np.arange(600) % 3 / 2**24
    replay = device.set_priorities(device.add(made(600), rows_of(0, 600, None)), np.arange(600), priorities)
    buffer = ReplayBuffer(ArrayStorage(600), PrioritizedSampler(1, 1, 0), batch_size=2000, seed=0)
    buffer.extend(rows_of(0, 600, None))
    buffer.update_priority(np.arange(600), priorities)
    drawn = jax.jit(lambda: device.sample(replay, 0, 2000))()  # of a replay that is known
    np.testing.assert_array_equal(drawn["index"], buffer.sample()["index"])


@pytest.mark.long
def test_beta_may_change_with_each_sample() -> None:
    replay = device.set_priorities(device.add(made(), rows_of(0, 2, None)), [0, 1], [1.0, 4.0])
    for beta in (0.0, 0.5):
        batch = jax.jit(device.sample)(replay, 0, beta=beta)
        np.testing.assert_allclose(batch["priority_weight"], np.where(batch["index"] == 0, 1, 4.0**-beta), rtol=1e-5)
    schedule = LinearSchedule(0.0, 0.5, 2)
    replay = device.add(made(priorities=Priorities(alpha=1, beta=schedule, eps=0)), rows_of(0, 2, None))
    replay = device.set_priorities(replay, [0, 1], [1.0, 4.0])
    sampler = PrioritizedSampler(1, schedule, 0)
    buffer = ReplayBuffer(ArrayStorage(40), sampler, batch_size=64, seed=0)
    buffer.extend(rows_of(0, 2, None))
    buffer.update_priority(np.arange(2), np.array([1.0, 4.0]))
    for number in range(4):
        weight = buffer.sample()["priority_weight"]
        for batch in (jax.jit(device.sample)(replay, number), device.sample(replay, number, beta=schedule)):
            np.testing.assert_allclose(batch["priority_weight"], weight, rtol=1e-5)
    last = device.sample(replay, 3, beta=lambda number: number / 3)["priority_weight"]
    np.testing.assert_allclose(last.min(), 0.25, rtol=1e-5)
    with pytest.raises(ConfigError, match="which the schedule needs"):
        device.sample(replay, jax.random.key(0))
    with pytest.raises(ConfigError, match="beta: expected a replay made with priorities="):
        device.sample(device.add(made(priorities=None), rows_of(0, 2, None)), 0, beta=0.5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="errors are raised where nothing waits for a device")
@pytest.mark.slow
def test_what_nobody_can_draw_by_is_left_out_or_refused() -> None:
    replay = device.add(made(), rows_of(0, 4, None))
    for index, values, error, words in (
        ([0], [-1.0], DataError, "finite priorities from 0, found -1"),
        ([0], [np.nan], DataError, "finite priorities from 0, found nan"),
        ([0], [1e15], DataError, "priorities up to .* of 40 rows"),
        ([4], [1.0], IndexError, "slots in 0..3, found 4"),
        ([0.0], [1.0], ConfigError, "expected integers"),
        ([0, 1], [1.0], ConfigError, "shape of the index"),
    ):
        with pytest.raises(error, match=words):
            device.set_priorities(replay, np.array(index), np.array(values))
    index, values = jnp.array([0, 0, 1, 1, 2, 3]), jnp.array([3.0, np.nan, 1.0, 0.0, -1.0, np.inf])
    replay = jax.jit(device.set_priorities)(replay, index, values)
    assert set(device.sample(replay, 0)["index"].tolist()) == {3}  # which weighs as much as a row may
    device.to_host(replay, ReplayBuffer(ArrayStorage(40), PrioritizedSampler(1, 1, 0)))  # whose priorities are finite
    replay = device.set_priorities(replay, [3], [0.0])
    assert set(device.sample(replay, 0)["index"].tolist()) == {0, 2}
    nothing = device.set_priorities(replay, [0, 2], [0, 0])
    assert not device.can_sample(nothing)
    with pytest.raises(ConfigError, match="rows with a priority above 0, found none"):
        device.sample(nothing, 0)
    with pytest.raises(ConfigError, match="made with priorities=, found one without"):
        device.set_priorities(made(priorities=None), [0], [1.0])
    with pytest.raises(ConfigError, match="priorities: expected order='random'"):
        made(order="epochs", batch_size=4)
    with pytest.raises(SchemaError, match="priority_weight"):
        device.init({"priority_weight": 0.0}, 4, batch_size=2, priorities=Priorities())


@pytest.mark.long
def test_draws_are_the_same_with_64_bits() -> None:
    with jax.enable_x64(True):
        follows_the_host(45, 2, {"sequence_length": 4}, 13, 3)


@pytest.mark.slow
def test_a_replay_in_the_hosts_memory_has_priorities_too() -> None:
    replay = device.add(made(memory="host"), rows_of(0, 20, None))
    replay = device.set_priorities(replay, [3], [1e6])
    assert (np.asarray(device.sample(replay, 0)["index"]) == 3).mean() > 0.9


def test_what_lies_under_a_mask_is_no_row_and_no_priority() -> None:
    replay = device.init({"x": np.float32(0)}, 8, batch_size=4, num_envs=None, priorities=Priorities())
    hidden = np.ma.masked_array([1.0, 2.0], [True, False], np.float32)
    with pytest.raises(DataError, match="field 'x', expected a value, found a masked one"):
        device.add(replay, {"x": hidden})
    replay = device.add(replay, {"x": np.zeros(2, np.float32)})
    for given in ((np.arange(2), hidden), (np.ma.masked_array([0, 1], [True, False]), [1.0, 2.0])):
        with pytest.raises(DataError, match="set_priorities: expected a value, found a masked one"):
            device.set_priorities(replay, *given)
