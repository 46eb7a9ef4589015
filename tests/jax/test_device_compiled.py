"""Replays within what JAX compiles: shards, modules of Flax, and loops that write in place."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mouse_jax import device
from tests.jax.test_device import same

ENVS = 4


def rows(first: int, count: int, envs: int = ENVS) -> dict[str, Any]:
    number = (first + np.arange(count)[:, None] + 1000 * np.arange(envs)).astype(np.int32)
    return {"obs": np.stack([number, -number], -1).astype(np.float32), "done": number % 3 == 0}


def made(capacity: int, envs: int = ENVS, seed: Any = 0) -> device.Replay:
    example = {"obs": jnp.zeros(2), "done": False}
    slices = device.Slices(sequence_length=2)
    return device.init(example, capacity, batch_size=8, num_envs=envs, slices=slices, seed=seed)


def step(replay: device.Replay, more: Any, number: Any) -> tuple[device.Replay, Any]:
    replay = device.add(replay, more)
    return replay, device.sample(replay, number)


alone = jax.jit(step)


@pytest.mark.slow
def test_each_shard_has_a_replay_of_its_environments() -> None:
    mesh = Mesh(np.array(jax.devices()), ("env",))
    spec = PartitionSpec("env")
    shards = len(mesh.devices)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def sharded(replays: Any, more: Any) -> Any:
        replay, batch = step(jax.tree.map(lambda leaf: leaf[0], replays), jax.tree.map(lambda leaf: leaf[0], more), 5)
        return jax.tree.map(lambda leaf: leaf[None], (replay, batch))

    replays = jax.vmap(partial(made, 16, 2))(jnp.arange(shards))
    more = jax.tree.map(lambda *parts: np.stack(parts), *(rows(100 * shard, 5, 2) for shard in range(shards)))
    placed = jax.device_put((replays, more), NamedSharding(mesh, spec))
    found, batches = sharded(*placed)
    assert all(leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim) for leaf in jax.tree.leaves(found))
    for shard in (0, shards - 1):
        one = jax.tree.map(lambda leaf, shard=shard: leaf[shard], (replays, more))
        expected = alone(*jax.device_get(one), 5)
        same(jax.tree.map(lambda leaf, shard=shard: leaf[shard], (found, batches)), expected)


@pytest.mark.slow
def test_a_replay_that_is_made_in_a_shard_takes_its_rows() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("shard",))
    slices = device.Slices(sequence_length=3)

    def filled(more: Any) -> Any:
        return device.add(device.init({"x": 0.0, "done": False}, 20, batch_size=4, num_envs=None, slices=slices), more)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("shard"), out_specs=PartitionSpec("shard"))
    def sharded(more: Any) -> Any:
        made = filled(jax.tree.map(lambda leaf: leaf[0], more))
        return jax.tree.map(lambda leaf: leaf[None], (made.rows, made.state["windows"]))

    more = {"x": jnp.arange(10.0).reshape(2, 5), "done": jnp.arange(10).reshape(2, 5) % 3 == 0}
    found, alone = sharded(more), filled(jax.tree.map(lambda leaf: leaf[1], more))
    same(jax.tree.map(lambda leaf: leaf[1], found), (alone.rows, alone.state["windows"]))


@pytest.mark.slow
def test_a_module_of_flax_holds_a_replay() -> None:
    class Agent(nnx.Module):
        def __init__(self) -> None:
            self.replay = nnx.Variable(made(16, 2))

    @nnx.jit
    def train(agent: Agent, more: Any, number: Any) -> Any:
        replay, batch = step(agent.replay.get_value(), more, number)
        agent.replay.set_value(replay)
        return batch

    agent, replay = Agent(), made(16, 2)
    for number in range(2):
        batch = train(agent, rows(5 * number, 5, 2), number)
        replay, expected = alone(replay, rows(5 * number, 5, 2), number)
        same(batch, expected)


def test_a_loop_that_writes_and_draws_copies_no_storage() -> None:
    def loop(replay: device.Replay, more: Any) -> Any:
        return jax.lax.scan(lambda carry, number: step(carry, more, number), replay, jnp.arange(3))

    replay = made(ENVS * 8192)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(replay))
    compiled = jax.jit(loop, donate_argnums=0).lower(replay, rows(0, 2)).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes
    assert memory.temp_size_in_bytes < nbytes / 20
