"""Replay buffers of JAX: pytrees in and out, narrowed with a check, in memory of their own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import mouse_core.replay as core
from mouse_core.errors import DataError, SchemaError
from mouse_core.replay import ArrayStorage, Compose, NextView, NStep
from mouse_jax import PrefetchBatchifier, PrioritizedReplayBuffer, ReplayBuffer


def rows(n: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    done = np.zeros(n, np.int8)
    done[9::10] = 1
    return {
        "obs": {"vector": random.normal(size=(n, 3)).astype(np.float32), "pair": (np.arange(n), random.normal(size=n))},
        "action": random.integers(0, 4, n),
        "reward": random.normal(size=n).astype(np.float32),
        "done": done,
    }


@struct.dataclass
class Transition:
    obs: jax.Array
    reward: jax.Array


class Pair(NamedTuple):
    obs: jax.Array
    reward: jax.Array


def test_rows_of_any_kind_can_be_written() -> None:
    obs, reward = jnp.ones((3, 2)), jnp.arange(3.0)
    buffer = ReplayBuffer(ArrayStorage(20), batch_size=4)
    assert buffer.extend(Transition(obs, reward)).tolist() == [0, 1, 2]
    assert buffer.append({"obs": obs[0], "reward": reward[1]}) == 3
    assert buffer.append({"obs": np.ones(2, np.float32), "reward": 5.0}) == 4
    assert buffer.extend([Transition(obs[0], reward[2])]).tolist() == [5]
    found = buffer.sample()
    assert found.keys() == {"obs", "reward", "index"}
    assert float(buffer[jnp.int32(4)]["reward"]) == 5.0
    buffer[0] = Transition(obs[0], jnp.float32(7.0))
    assert float(buffer[0]["reward"]) == 7.0
    pairs = ReplayBuffer(ArrayStorage(20), batch_size=4)
    pairs.extend(Pair(obs, reward))
    assert isinstance(pairs.sample()["data"], Pair)
    assert isinstance(pairs[1], Pair)
    with pytest.raises(SchemaError, match="rows"):
        buffer.append({"obs": obs[0]})
    listed = ReplayBuffer(core.ListStorage(10))
    listed.extend({"obs": jnp.arange(10.0).reshape(5, 2)})
    assert all(isinstance(row["obs"], jax.Array) for row in [listed[0], *listed[:], *listed[np.array([[1], [2]])][1]])
    assert [row["obs"].tolist() for row in listed[1:3]] == [[2, 3], [4, 5]]
    wide = ReplayBuffer(ArrayStorage(4), batch_size=2)
    wide.extend({"x": np.array([2**40 + 5])})
    with pytest.raises(DataError, match=r"field 'x': expected values .* that fit int32, found 1099511627781"):
        wide.sample()
    with jax.enable_x64(True):
        assert wide.sample()["x"].tolist() == [2**40 + 5] * 2


def test_batches_go_into_jit() -> None:
    buffer = PrioritizedReplayBuffer(
        storage=ArrayStorage(64), batch_size=8, transform=Compose(NextView(), NStep(3, 0.9)), seed=1
    )
    buffer.extend(rows(30))

    @jax.jit
    def error(batch: dict[str, Any]) -> jax.Array:
        target = batch["next"]["reward"] + batch["discount"] * (batch["next"]["done"] != 1)
        return jnp.abs(target - batch["obs"]["vector"].sum(-1)) * batch["mask"]

    for _ in range(3):
        batch = buffer.sample()
        buffer.update_priority(batch["index"], error(batch))
    assert buffer.stats()["updates"] == 3


def test_devices() -> None:
    device = jax.devices()[1]
    buffer = ReplayBuffer(ArrayStorage(8), batch_size=4, device=device)
    buffer.extend({"x": np.arange(5.0, dtype=np.float32)})
    assert buffer.sample()["x"].devices() == {device}
    assert buffer.device == device
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    buffer = ReplayBuffer(ArrayStorage(8), batch_size=4, device=sharding)
    buffer.extend({"x": np.arange(5.0, dtype=np.float32)})
    assert buffer.sample()["x"].sharding == sharding
    with PrefetchBatchifier(buffer) as loader:  # where the buffer has them
        assert loader.next_batch()["x"].sharding == sharding
    plain = core.ReplayBuffer(ArrayStorage(arrays={"x": np.arange(5.0, dtype=np.float32)}), batch_size=4)
    with PrefetchBatchifier(plain, sharding=sharding) as loader:
        assert loader.next_batch()["x"].sharding == sharding
    with PrefetchBatchifier(plain, device="cpu:3") as loader:
        assert loader.next_batch()["x"].devices() == {jax.devices()[3]}
    assert ReplayBuffer(device="cpu:2").device == jax.devices()[2]


@pytest.mark.parametrize("storage", [core.ListStorage, core.ArrayStorage])
def test_rows_of_differing_length_are_lists_or_padded(storage: Any) -> None:
    buffer = ReplayBuffer(storage(9), batch_size=5)
    buffer.extend([{"x": jnp.arange(n), "text": "t" * n, "n": n} for n in range(4)])
    batch = buffer.sample()
    assert [x.tolist() for x in batch["x"]] == [list(range(n)) for n in batch["n"].tolist()]
    assert all(isinstance(x, jax.Array) for x in batch["x"])
    assert batch["text"] == ["t" * n for n in batch["n"].tolist()]
    words = ReplayBuffer(core.ListStorage(5), batch_size=2)
    words.extend(["a", "b"])
    assert {*words.sample()["data"]} <= {"a", "b"}
    padded = ReplayBuffer(buffer.storage, transform=[core.Pad("x", length=4), core.Exclude("text")], batch_size=5)
    total = jax.jit(lambda batch: (batch["x"] * batch["x_mask"]).sum(1))(padded.sample())
    assert total.shape == (5,)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_come_back_as_they_are(name: str) -> None:
    given = jnp.linspace(-2, 2, 24).reshape(8, 3).astype(name)
    buffer = ReplayBuffer(ArrayStorage(9), batch_size=6)
    buffer.extend({"x": given, "n": jnp.arange(8)})
    batch = buffer.sample()
    assert batch["x"].dtype == given.dtype
    assert np.asarray(batch["x"]).tobytes() == np.asarray(given)[np.asarray(batch["n"])].tobytes()
    with PrefetchBatchifier(buffer, num_workers=0) as loader:
        assert loader.next_batch()["x"].dtype == given.dtype
