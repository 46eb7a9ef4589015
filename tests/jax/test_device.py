"""Replay on the device: the draws of the host, under jit, scan and vmap, and written in place."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mouse_core import ConfigError, SchemaError
from mouse_core.replay import LinearSchedule, NStep, Priorities, Schedule
from mouse_core.testing.replay.devices import Setup
from mouse_jax import device
from mouse_jax.device import Slices

SEED = 2**63 + 12345
BATCH = 8


def stream(first: int, count: int, envs: int | None = None) -> dict[str, Any]:
    """Rows of episodes of 1 to some 20 steps, which depend on their numbers alone."""
    number = first + np.arange(count)[:, None] + 100_000 * np.arange(envs or 1)
    done = np.random.default_rng(7).random(4096)[(number + 5 * (number // 100_000)) % 4096] < 0.25
    lead = (count,) if envs is None else (count, envs)
    return {
        "obs": {
            "x": number.reshape(lead).astype(np.int32),
            "y": np.stack([number, -number], -1).reshape(*lead, 2) * 1.0,
        },
        "reward": (number % 7).reshape(lead).astype(np.float32),
        "done": done.reshape(lead).astype(np.int8),
    }


def example(envs: int | None = None) -> Any:
    return jax.tree.map(lambda leaf: leaf[0] if envs is None else leaf[0, 0], stream(0, 1, envs))


def same(found: Any, expected: Any) -> None:
    """Floats that were summed may differ in their last bits."""
    leaves, structure = jax.tree.flatten(expected)
    others, other = jax.tree.flatten(found)
    assert structure == other
    for one, leaf in zip(others, leaves, strict=True):
        np.testing.assert_allclose(one, leaf, rtol=1e-6)


@pytest.mark.slow
def test_a_loop_that_is_compiled_whole_draws_for_each_seed_what_it_has_alone() -> None:
    setups = [
        Setup(transform=NStep(3, 0.5)),
        Setup(priorities=Priorities(alpha=1, beta=1, eps=0), slices={"sequence_length": 2, "period": 3}),
    ]
    rows = jax.tree.map(jnp.asarray, stream(0, 45))

    def run(setup: Setup, seed: Any) -> Any:
        options = setup.options(seed)
        slices = options.pop("slices") and Slices(**setup.slices)
        replay = device.init(example(), setup.steps, slices=slices, **options)

        def step(replay: Any, number: Any) -> Any:
            replay = device.add(replay, jax.tree.map(lambda leaf: leaf[number], rows))
            batch = device.sample(replay, number)
            if setup.priorities is not None:
                replay = device.set_priorities(replay, batch["index"], batch["obs"]["x"] % 5 + 1)
            return replay, batch

        return jax.lax.scan(step, replay, jnp.arange(45))[1]

    for setup in setups:
        batches = jax.jit(jax.vmap(partial(run, setup)))(jnp.arange(3))
        for seed in (0, 2):
            expected = setup.host(seed)
            for number in range(45):
                expected.append(jax.tree.map(lambda leaf: leaf[0], stream(number, 1)))
                batch = expected.sample()
                same(jax.tree.map(lambda leaf, at=(seed, number): leaf[at], batches), batch)
                if setup.priorities is not None:
                    expected.update_priority(batch["index"], batch["obs"]["x"] % 5 + 1)


def test_gradients_go_through_what_is_written_and_drawn() -> None:
    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        replay = device.add(device.init({"x": 0.0}, 9, batch_size=BATCH, num_envs=None), {"x": scale * jnp.arange(5.0)})
        batch = device.sample(replay, 0)
        return batch["x"].sum(), batch["index"].sum()

    found, numbers = gradient(jnp.float32(3))
    assert found == numbers


def test_rows_are_written_in_place() -> None:
    replay = device.init(example(), 4096, batch_size=BATCH, num_envs=None, slices=Slices(sequence_length=4))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(replay.rows))
    is_in_place(device.add, nbytes, replay, stream(0, 5))


@pytest.mark.slow
def test_the_tree_of_priorities_is_written_in_place() -> None:
    def step(replay: Any, number: Any, priorities: Any) -> Any:
        batch = device.sample(replay, number)
        return device.set_priorities(replay, batch["index"], priorities), batch

    replay = init(capacity=1 << 20, batch_size=64, priorities=Priorities())
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(replay)) - 100
    is_in_place(step, nbytes, replay, jnp.uint32(0), np.ones(64, np.float32))


def is_in_place(function: Any, nbytes: int, *given: Any) -> None:
    memory: Any = jax.jit(function, donate_argnums=0).lower(*given).compile().memory_analysis()
    assert memory.alias_size_in_bytes > nbytes
    assert memory.temp_size_in_bytes < nbytes / 20


def test_environments_stay_on_their_devices() -> None:
    mesh = Mesh(np.array(jax.devices()), ("env",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "env"))
    replay = device.init({"obs": jnp.zeros(2)}, 32, batch_size=BATCH, num_envs=4)
    rows = {"obs": jnp.arange(24.0).reshape(3, 4, 2)}
    placed = jax.device_put(replay, jax.tree.map(lambda leaf: sharding if leaf.ndim > 1 else None, replay))
    found = jax.jit(device.add)(placed, jax.device_put(rows, sharding))
    assert found.rows["obs"].sharding.is_equivalent_to(sharding, 3)
    same(found.rows, jax.jit(device.add)(replay, rows).rows)


class Step(NamedTuple):
    image: Any
    features: Any
    key: Any


def test_fields_of_any_dtype() -> None:
    keys = jax.random.split(jax.random.key(3), 5)
    rows = Step(jnp.full((5, 2, 2), 200, jnp.uint8), (jnp.arange(5, dtype=jnp.bfloat16), jnp.arange(5) > 2), keys)
    replay = device.add(device.init(jax.tree.map(lambda leaf: leaf[0], rows), 6, batch_size=4, num_envs=None), rows)
    batch = jax.jit(device.sample)(replay, 1)
    data, places = batch["data"], batch["index"]
    assert isinstance(data, Step)
    assert data.image.dtype == jnp.uint8
    assert data.features[0].dtype == jnp.bfloat16
    assert (data.key == keys[places]).all()
    assert (data.features[0] == rows.features[0][places]).all()


def test_a_random_key_draws_rows_of_its_own_and_may_be_the_seed() -> None:
    replay = device.add(
        device.init({"reward": 0.0}, 1000, batch_size=64, num_envs=None), {"reward": np.arange(1000, dtype=np.float32)}
    )
    one, other = (device.sample(replay, jax.random.key(number))["index"] for number in (0, 1))
    assert (one != other).any()
    assert one.min() >= 0
    assert one.max() < 1000
    assert len(set(one.tolist())) > 50
    legacy = device.sample(replay, jax.random.PRNGKey(1))["index"]
    np.testing.assert_array_equal(legacy, other)
    # It may be the seed, as in scripts that are mapped over keys; of either kind.
    keys = jax.random.split(jax.random.PRNGKey(3))
    seeds = jax.vmap(lambda key: init(seed=key).seed)(keys)
    assert (seeds[0] != seeds[1]).any()
    for key in (keys[1], jax.random.split(jax.random.key(3))[1]):
        np.testing.assert_array_equal(init(seed=key).seed, seeds[1])
    for options, error, words in (
        ({"row": {"said": np.array(["much"])}}, SchemaError, "'said': expected an array of numbers, found <U4"),
        ({"seed": jnp.zeros(3)}, ConfigError, r"or a random key, found float32 \[3\]"),
    ):
        with pytest.raises(error, match=words):
            init(**options)


def init(row: Any = None, **options: Any) -> device.Replay:
    given = {"capacity": 12, "batch_size": 4, **options}
    return device.init({"reward": 0.0, "done": False} if row is None else row, **{"num_envs": None, **given})


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="errors are raised where nothing waits for a device")
def test_a_sample_that_cannot_be_is_refused() -> None:
    rows = {"reward": np.ones(6, np.float32), "done": np.zeros(6, np.bool_)}
    at_random, epochs, queue = (device.add(init(order=order), rows) for order in ("random", "epochs", "queue"))
    for index in (jnp.int32(-1), 2**32):
        with pytest.raises(ConfigError, match=r"found (-1|4294967296)"):
            device.sample(at_random, index)
    with pytest.raises(ConfigError, match="expected order='random', found 'epochs'; to draw"):
        device.sample(epochs, 0)
    with pytest.raises(ConfigError, match="expected an integer, since each row is drawn once"):
        device.take(epochs, jax.random.key(0))
    schedule = device.add(init(priorities=Priorities(beta=LinearSchedule(0, 1, 2))), rows)
    with pytest.raises(ConfigError, match="since the schedule depends on it"):
        device.sample(schedule, jax.random.key(0))
    same(device.take(at_random, 3)[1], device.sample(at_random, jnp.uint32(3)))
    queue, _ = device.take(queue)
    left, _ = jax.jit(device.take)(queue)  # where nothing is raised, the two rows stay
    same(left, queue)


@pytest.mark.slow
def test_what_is_of_one_replay_refuses_several() -> None:
    several = jax.vmap(lambda seed: init(seed=seed, priorities=Priorities()))(jnp.arange(3))
    calls: list[Callable[[], Any]] = [
        lambda: device.sample(several, 0),
        lambda: device.add(several, {"reward": 1.0, "done": False}),
        lambda: device.set_priorities(several, jnp.zeros(2, jnp.int32), jnp.ones(2)),
        lambda: device.to_host(several),
        lambda: device.from_host(several, device.to_host(init())),
    ]
    for call in calls:
        with pytest.raises(
            ConfigError, match=r"expected one replay, found 3 replays; call the function inside of jax\.vmap"
        ):
            call()


def test_what_was_compiled_for_no_padding_is_not_run_for_a_pad_of_0() -> None:
    """Which are equal to Python, as 1 and True are; slices are part of the layout, for which JAX compiles."""
    assert len({Slices(sequence_length=2, pad=pad) for pad in (False, 0, 1, True)}) == 4
    assert init(slices=Slices(sequence_length=2)).layout == init(slices=Slices(sequence_length=2)).layout


@pytest.mark.slow
@pytest.mark.parametrize(("count", "envs"), [(44, 2), (1_100, None), (2_998, 3)])
def test_many_rows_at_once_are_the_same_as_few_after_each_other(count: int, envs: int | None) -> None:
    few, rows = 22 if count < 2_000 else 1_499, stream(0, count, envs)
    options: dict[str, Any] = {"batch_size": BATCH, "num_envs": envs, "slices": Slices(sequence_length=3)}
    at_once = device.add(device.init(example(envs), (envs or 1) * count, **{"num_envs": None, **options}), rows)
    replay = device.init(example(envs), (envs or 1) * count, **{"num_envs": None, **options})
    for first in range(0, count, few):
        replay = device.add(replay, jax.tree.map(lambda leaf, first=first: leaf[first : first + few], rows))
    same(at_once, replay)
    expected = Setup(steps=count, num_envs=envs, slices={"sequence_length": 3}).host(0)
    expected.extend(rows)
    same(device.sample(at_once, 0), expected.sample())


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="errors are raised where nothing waits for a device")
def test_a_compiled_function_may_refer_to_a_replay() -> None:
    empty = device.init({"obs": 0.0}, 10, batch_size=4, num_envs=None)
    filled = device.add(empty, {"obs": jnp.ones(5)})
    assert jax.jit(lambda number: device.sample(filled, number)["obs"].sum())(3) == 4
    with pytest.raises(ConfigError, match="expected rows, found none"):
        jax.jit(lambda number: device.sample(empty, number)["obs"].sum())(3)
    mixed = jax.jit(lambda seed: device.sample_ensemble([filled, filled], 3, 8, seed=seed)["obs"].sum())
    assert mixed(1) == 8


@pytest.mark.slow
def test_replays_that_cannot_be_mixed_are_refused() -> None:
    empty, another = (device.init({name: 0.0}, 4, batch_size=1, num_envs=None) for name in ("reward", "cost"))
    one, other = device.add(empty, {"reward": 1.0}), device.add(another, {"cost": 1.0})
    for given, index, options, error, words in (
        ([], 0, {}, ConfigError, "at least one"),
        ([one, one], 0, {"p": [1]}, ConfigError, "expected 2 weights"),
        ([one, one], -1, {}, ConfigError, "found -1"),
        (
            [one, one],
            jax.random.key(0),
            {"p": Schedule({0: [1, 1], 5: [1, 2]})},
            ConfigError,
            "the schedule depends on it",
        ),
        ([one, other], 0, {}, SchemaError, "buffer 1: expected the field"),
        ([one, empty], 0, {}, ConfigError, "expected rows, found none"),
    ):
        with pytest.raises(error, match=words):
            device.sample_ensemble(given, index, 4, **options)


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
