"""Replays move between the device and buffers of NumPy, torch and JAX, and go on with the same draws."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch

import mouse_jax
import mouse_torch
import mouse_torch.device
from mouse_core import ConfigError, SchemaError, StateError, replay
from mouse_core.replay import ArrayStorage, RandomSampler, SliceSampler
from mouse_jax import device

SEED = 2**63 + 12345
BATCH = 6


def rows(first: int, count: int, envs: int | None) -> dict[str, Any]:
    """Rows that depend on their numbers alone."""
    number = (first + np.arange(count)[:, None] + 1000 * np.arange(envs or 1)).astype(np.int32)
    number = number if envs else number[:, 0]
    return {
        "obs": {"x": number, "y": np.stack([number, -number], -1).astype(np.uint8)},
        "half": jnp.asarray(number, jnp.bfloat16),
        "done": np.random.default_rng(7).random(4096)[number % 1000] < 0.25,
    }


def made(envs: int | None, seed: int = SEED) -> device.Replay:
    lead = 0 if envs is None else (0, 0)
    slices = None if envs is None else device.Slices(sequence_length=4, pad=1, period=3)
    example = jax.tree.map(lambda leaf: leaf[lead], rows(0, 1, envs))
    return device.init(example, 20 * (envs or 1), batch_size=BATCH, num_envs=envs, slices=slices, seed=seed)


def buffer(package: Any, envs: int | None, seed: int = 0) -> Any:
    sampler = RandomSampler() if envs is None else SliceSampler(sequence_length=4, pad=1, period=3)
    storage = ArrayStorage(20 * (envs or 1), ndim=1 if envs is None else 2)
    return package.ReplayBuffer(storage, sampler, batch_size=BATCH, seed=seed)


def same(found: Any, expected: dict[str, Any]) -> None:
    """Of what was saved and loaded episodes may have other numbers."""
    found = found if isinstance(found, dict) else found.to_dict()
    assert found.keys() == expected.keys()
    for name in ("x", "y"):
        np.testing.assert_array_equal(found["obs"][name], expected["obs"][name])
    for name in {*expected} - {"obs", "traj_id"}:
        values = found[name].float().numpy() if hasattr(found[name], "float") else found[name]
        np.testing.assert_array_equal(np.asarray(values, np.float32), np.asarray(expected[name], np.float32))


grow = jax.jit(device.add)
draw = jax.jit(device.sample)


@pytest.mark.parametrize(("envs", "writes"), [(3, 6), pytest.param(None, 4, marks=pytest.mark.slow)])
def test_one_file_serves_device_numpy_torch_and_jax(envs: int | None, writes: int, tmp_path: Path) -> None:
    state = made(envs)
    for number in range(writes):
        state = grow(state, rows(number * 4, 4, envs))
    device.dumps(state, tmp_path / "device", samples=2)
    more = rows(writes * 4, 4, envs)
    expected = [draw(grow(state, more), number) for number in (2, 3)]
    for name, package in (("numpy", replay), ("torch", mouse_torch), ("jax", mouse_jax)):
        moved = buffer(package, envs)
        moved.loads(tmp_path / "device")
        moved.dumps(tmp_path / name)
        moved.extend(more)
        for batch in expected:
            same(moved.sample(), batch)
        back, samples = device.loads(made(envs, seed=1), tmp_path / name)
        assert samples == 2
        same(draw(grow(back, more), samples), expected[0])


def test_a_buffer_on_the_host_is_filled_and_read_directly() -> None:
    state = grow(made(None), rows(0, 4, None))
    held = device.to_host(state)
    same(held.sample(), draw(state, 0))
    held.extend(rows(4, 18, None))
    same(draw(device.from_host(made(None), held), 1), held.sample())


def test_a_file_goes_to_torch_and_back(tmp_path: Path) -> None:
    one = {"four": np.uint8(0), "half": jnp.bfloat16(0)}
    numbers = {"four": np.arange(6, dtype=np.uint8), "half": jnp.arange(6, dtype=jnp.bfloat16)}
    state = device.add(device.init(one, 8, batch_size=4, num_envs=None), numbers)
    device.dumps(state, tmp_path / "jax")
    example = {"four": np.uint8(0), "half": torch.zeros((), dtype=torch.bfloat16)}
    moved = mouse_torch.device.Replay(example, 8, batch_size=4, num_envs=None)
    held = moved.to_host()
    held.loads(tmp_path / "jax")
    moved.from_host(held)
    moved.to_host().dumps(tmp_path / "torch")
    back, _ = device.loads(device.init(one, 8, batch_size=4, num_envs=None), tmp_path / "torch")
    batch, other = device.sample(back, 0), moved.sample()
    for name in one:
        assert (np.asarray(batch[name], np.float32) == batch["index"]).all()
        assert (other[name].float() == other["index"]).all()
    with pytest.raises(ConfigError, match="an empty replay, found 6 time steps"):
        moved.from_host(held)


@pytest.mark.slow
def test_an_episode_cut_off_in_torch_is_counted_on() -> None:
    slices: Any = {"sequence_length": 2, "period": 3, "traj_key": "run"}
    held = mouse_torch.ReplayBuffer(ArrayStorage(6), SliceSampler(**slices), batch_size=8)
    state = device.init({"run": np.int32(0)}, 6, batch_size=8, num_envs=None, slices=device.Slices(**slices))
    held.extend({"run": np.full(6, 7, np.int32)})
    held.extend({"run": np.array([7, 7, 8], np.int32)})
    index = draw(device.from_host(state, held), 0)["index"]
    np.testing.assert_array_equal(index, held.sample()["index"])
    assert {*np.asarray(index)[:, 0].tolist()} == {0, 2, 3}


@pytest.mark.slow
def test_orbax_saves_and_restores_the_pytree(tmp_path: Path) -> None:
    one = {"key": jax.random.key(0), "reward": 0.0}
    options = {"batch_size": 4, "priorities": replay.Priorities()}
    state = jax.vmap(lambda seed: device.init(one, 8, seed=seed, **{"num_envs": None, **options}))(jnp.arange(2))
    given = {"key": jax.random.split(jax.random.key(5), (2, 3)), "reward": jnp.ones((2, 3))}
    state = jax.vmap(device.add)(state, given)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "replay", state)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "replay", jax.tree.map(jnp.zeros_like, state))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for one_leaf, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert (one_leaf == leaf).all()


def test_what_does_not_fit_is_not_moved(tmp_path: Path) -> None:
    empty = device.init({"reward": 0.0}, 12, batch_size=1, num_envs=None)
    state = device.add(empty, {"reward": 1.0})
    for storage in (ArrayStorage(11), ArrayStorage(12, ndim=2)):
        with pytest.raises(ConfigError, match="capacity 12 and ndim 1, of 1 environments"):
            device.from_host(empty, replay.ReplayBuffer(storage))
    held = device.to_host(state)
    with pytest.raises(ConfigError, match="an empty replay, found 1 time steps"):
        device.from_host(state, held)
    with pytest.raises(ConfigError, match="expected one replay, found 2 replays"):
        device.to_host(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state))
    with pytest.raises(ConfigError, match="a replay outside of"):
        jax.eval_shape(device.to_host, state)
    held.dumps(tmp_path / "rows")
    for other, error, words in (
        (device.init({"reward": 0.0}, 11, batch_size=1, num_envs=None), StateError, "capacity"),
        (device.init({"reward": 0.0}, 12, batch_size=1, num_envs=None, alignment="arrived"), StateError, "alignment"),
        (device.init({"reward": 0}, 12, batch_size=1, num_envs=None), SchemaError, "expected int32, found float32"),
    ):
        with pytest.raises(error, match=words):
            device.loads(other, tmp_path / "rows")
