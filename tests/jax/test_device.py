"""Replay on the device: the draws of the host, under jit, scan and vmap, and written in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mouse_core import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.replay import (
    ArrayStorage,
    NextView,
    NStep,
    OnWrite,
    Priorities,
    RandomSampler,
    ReplayBuffer,
    ReturnsToGo,
    SliceSampler,
    VecNorm,
)
from mouse_core.replay.device.samplers import SliceUnits
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


def host(capacity: int, envs: int | None, sampler: Any, transform: Any = None, seed: int = SEED) -> ReplayBuffer:
    storage = ArrayStorage(capacity, ndim=1 if envs is None else 2)
    return ReplayBuffer(storage, sampler, transform=transform, batch_size=BATCH, seed=seed)


def same(found: Any, expected: Any) -> None:
    """Floats that were summed may differ in their last bits."""
    leaves, structure = jax.tree.flatten(expected)
    others, other = jax.tree.flatten(found)
    assert structure == other
    for one, leaf in zip(others, leaves, strict=True):
        np.testing.assert_allclose(one, leaf, rtol=1e-6)


def agrees_with_the_host(envs: int | None, options: dict[str, Any], transform: Any, count: int, writes: int) -> None:
    """Rows are written into a ring of 20 time steps until they have gone round twice; all samples are compared."""
    capacity = 20 * (envs or 1)
    slices = Slices(**options) if options else None
    expected = host(capacity, envs, SliceSampler(**options) if options else RandomSampler(), transform)
    replay = device.init(
        example(envs), capacity, batch_size=BATCH, num_envs=envs, slices=slices, transform=transform, seed=SEED
    )

    @partial(jax.jit, donate_argnums=0)
    def step(replay: Any, rows: Any, number: Any) -> Any:
        replay = device.add(replay, rows)
        return replay, jax.vmap(partial(device.sample, replay))(jnp.stack([2 * number, 2 * number + 1]))

    for number in range(writes):
        rows = stream(number * count, count, envs)
        expected.extend(rows)
        replay, batches = step(replay, rows, number)
        for place in range(2):
            same(jax.tree.map(lambda leaf, place=place: leaf[place], batches), expected.sample())


def later(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("envs", "count", "options", "transform"),
    [
        (3, 1, {}, [NextView(), NStep(2, 0.5)]),
        (None, 20, {"sequence_length": 1}, None),
        later(None, 20, {"sequence_length": 3, "pad": False}, None),
        later(3, 1, {"sequence_length": 1, "period": 2}, None),
        (None, 20, {"sequence_length": 3, "period": 2}, None),
        later(None, 20, {"sequence_length": 1, "pad": False, "period": 5}, None),
        (3, 1, {"sequence_length": 6}, [NextView(), NStep(2, 0.5)]),
        (None, 20, {"sequence_length": 2, "end_key": "done"}, ReturnsToGo(0.5)),
    ],
)
def test_draws_are_those_of_the_host(envs: int | None, count: int, options: Any, transform: Any) -> None:
    agrees_with_the_host(envs, options, transform, count, 45 if count == 1 else 4)


@pytest.mark.slow
def test_a_loop_that_is_compiled_whole_draws_for_each_seed_what_it_has_alone() -> None:
    transform = NStep(3, 0.5)

    def run(seed: Any) -> Any:
        replay = device.init(example(), 20, batch_size=BATCH, num_envs=None, transform=transform, seed=seed)

        def step(replay: Any, number: Any) -> Any:
            row = jax.tree.map(lambda leaf: leaf[number], rows)
            replay = device.add(replay, row)
            return replay, device.sample(replay, number)

        return jax.lax.scan(step, replay, jnp.arange(45))[1]

    rows = jax.tree.map(jnp.asarray, stream(0, 45))
    batches = jax.jit(jax.vmap(run))(jnp.arange(3))
    for seed in (0, 2):
        expected = host(20, None, RandomSampler(), transform, seed)
        for number in range(45):
            expected.append(jax.tree.map(lambda leaf, number=number: leaf[0], stream(number, 1)))
            same(jax.tree.map(lambda leaf, at=(seed, number): leaf[at], batches), expected.sample())


@pytest.mark.slow
def test_numbers_of_trajectories_end_episodes_as_on_the_host() -> None:
    ids = np.array([4, 4, 4, 9, 9, 2, 2, 2, 2, 4, 4], np.int32)
    for key, ends in (("traj_id", {}), ("episode", {}), ("episode", {"done": ids * 0}), ("mine", {"done": ids * 0})):
        rows = {"obs": np.arange(11, dtype=np.float32), key: ids, **ends}
        named = {"traj_key": "mine"} if key == "mine" else {}
        expected = host(20, None, SliceSampler(sequence_length=3, **named))
        expected.extend(rows)
        one = jax.tree.map(lambda leaf: leaf[0], rows)
        replay = device.init(
            one, 20, batch_size=BATCH, num_envs=None, slices=Slices(sequence_length=3, **named), seed=SEED
        )
        same(device.sample(device.add(replay, rows), 0), expected.sample())


@pytest.mark.slow
def test_draws_are_the_same_with_64_bits() -> None:
    with jax.enable_x64(True):
        agrees_with_the_host(3, {"sequence_length": 4}, NStep(2, 0.5), 7, 8)


def test_gradients_go_through_what_is_written_and_drawn() -> None:
    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        replay = device.add(device.init({"x": 0.0}, 9, batch_size=BATCH), {"x": scale * jnp.arange(5.0)})
        batch = device.sample(replay, 0)
        return batch["x"].sum(), batch["index"].sum()

    found, numbers = gradient(jnp.float32(3))
    assert found == numbers


@pytest.mark.parametrize("envs", [3, None])
def test_rows_are_written_in_place(envs: int | None) -> None:
    capacity = 4096 * (envs or 1)
    replay = device.init(example(envs), capacity, batch_size=BATCH, num_envs=envs, slices=Slices(sequence_length=4))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(replay.rows))
    compiled = jax.jit(device.add, donate_argnums=0).lower(replay, stream(0, 5, envs)).compile()
    memory = compiled.memory_analysis()
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
    replay = device.add(device.init(jax.tree.map(lambda leaf: leaf[0], rows), 6, batch_size=4), rows)
    batch = jax.jit(device.sample)(replay, 1)
    data, places = batch["data"], batch["index"]
    assert isinstance(data, Step)
    assert data.image.dtype == jnp.uint8
    assert data.features[0].dtype == jnp.bfloat16
    assert (data.key == keys[places]).all()
    assert (data.features[0] == rows.features[0][places]).all()


@cache
def filled() -> device.Replay:
    replay = device.init(
        {"reward": 0.0, "done": False}, 10, batch_size=4, num_envs=None, slices=Slices(sequence_length=3, pad=False)
    )
    rows = {"reward": np.arange(4, dtype=np.float32), "done": np.array([False, True, False, False])}
    return device.add(replay, rows)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="errors are raised where nothing waits for a device")
def test_there_is_something_to_sample_once_an_episode_is_long_enough() -> None:
    assert not device.can_sample(filled())
    with pytest.raises(ConfigError, match="slices of 3 steps in one episode, found none among 4 time steps"):
        device.sample(filled(), 0)
    more = device.add(filled(), {"reward": 4.0, "done": False})
    assert device.can_sample(more)
    assert not device.can_sample(more, min_length=6)
    assert device.sample(more, 0)["reward"].tolist() == [[2, 3, 4]] * 4


def test_a_random_key_draws_rows_of_its_own() -> None:
    replay = device.add(
        device.init({"reward": 0.0}, 1000, batch_size=64), {"reward": np.arange(1000, dtype=np.float32)}
    )
    one, other = (device.sample(replay, jax.random.key(number))["index"] for number in (0, 1))
    assert (one != other).any()
    assert one.min() >= 0
    assert one.max() < 1000
    assert len(set(one.tolist())) > 50
    legacy = device.sample(replay, jax.random.PRNGKey(1))["index"]
    np.testing.assert_array_equal(legacy, other)


def test_a_random_key_may_be_the_seed() -> None:
    """As scripts have it that are mapped over keys; of either kind."""
    keys = jax.random.split(jax.random.PRNGKey(3))
    seeds = jax.vmap(lambda key: init(seed=key).seed)(keys)
    assert (seeds[0] != seeds[1]).any()
    for key in (keys[1], jax.random.split(jax.random.key(3))[1]):
        np.testing.assert_array_equal(init(seed=key).seed, seeds[1])


def init(row: Any = None, **options: Any) -> device.Replay:
    given = {"capacity": 12, "batch_size": 4, **options}
    return device.init({"reward": 0.0, "done": False} if row is None else row, **{"num_envs": None, **given})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"capacity": 0}, ConfigError, "capacity: expected"),
        ({"capacity": 2**30}, ConfigError, "less than 2\\*\\*30 rows"),
        ({"num_envs": 5}, ConfigError, "a multiple of the 5 environments, found 12"),
        ({"transform": NStep(2, 0.9, takes="arrived")}, ConfigError, "takes 'outgoing' rows"),
        ({"transform": VecNorm("reward")}, ConfigError, "VecNorm.*, which keeps numbers of all rows"),
        ({"transform": OnWrite(ReturnsToGo())}, ConfigError, "which changes rows that are written"),
        ({"row": {"index": 0.0}}, SchemaError, r"without the fields \['index'\]"),
        ({"row": {"reward": "much"}}, SchemaError, "'reward': expected an array of numbers"),
        (
            {"row": {"when": np.datetime64("2000-01-01")}},
            SchemaError,
            "'when': expected an array of numbers, found date",
        ),
        ({"row": {"said": np.array(["much"])}}, SchemaError, "'said': expected an array of numbers, found <U4"),
        ({"row": {}}, SchemaError, "a row with at least one field, found {}"),
        ({"row": {"reward": 0.0}, "slices": Slices(sequence_length=3)}, MissingFieldError, "or a field 'done', found"),
        ({"slices": Slices(sequence_length=3, end_key="over")}, MissingFieldError, "found 'over'"),
        ({"slices": Slices(sequence_length=3, traj_key="reward")}, SchemaError, "expected integers as numbers of"),
        ({"slices": Slices(sequence_length=3, pad=0.5)}, ConfigError, "bool holds, as in field 'done', found 0.5"),
        ({"slices": Slices(sequence_length=13, pad=False)}, ConfigError, "at most the 12 time steps .* found 13"),
        ({"row": {"done": False}, "transform": NStep(2, 0.9)}, MissingFieldError, "NStep: expected a field 'reward'"),
        ({"row": {"reward": 0.0}, "transform": NextView()}, MissingFieldError, "NextView: expected a field 'done'"),
        (
            {"num_envs": ..., "slices": Slices(sequence_length=3)},
            ConfigError,
            "num_envs: expected .* for slices",
        ),
        ({"num_envs": ..., "transform": NextView()}, ConfigError, "num_envs: expected .* for NextView"),
        ({"seed": -1}, ConfigError, "seed: expected an integer"),
        ({"seed": jnp.zeros(3)}, ConfigError, r"or a random key, found float32 \[3\]"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        init(**options)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ({"reward": 1.0}, SchemaError, r"fields \['done', 'reward'\], found \['reward'\]"),
        (
            {"reward": np.ones((2, 2), np.float32), "done": np.zeros(2, bool)},
            SchemaError,
            r"'reward': expected \[\] for",
        ),
        ({"reward": np.ones(2, np.int32), "done": np.zeros(2, bool)}, SchemaError, "expected float32, found int32"),
        ({"reward": np.ones(2, np.float32), "done": np.zeros(3, bool)}, SchemaError, "as many rows in every field"),
        ({"reward": np.full(2, 1e300), "done": np.zeros(2, bool)}, DataError, "'reward'"),
        ({"reward": np.ones(13, np.float32), "done": np.zeros(13, bool)}, ConfigError, "at most 12 time steps at once"),
    ],
)
def test_rows_of_another_kind_are_refused(rows: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        device.add(init(), rows)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="errors are raised where nothing waits for a device")
def test_a_sample_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected rows, found none"):
        device.sample(init(), 0)
    for index, words in (
        (-1, "found -1"),
        (jnp.int32(-1), "found -1"),
        (2**32, "found 4294967296"),
        (0.5, "found 0.5"),
        (True, "found True"),
        ("x", "found 'x'"),
    ):
        with pytest.raises(ConfigError, match=words):
            device.sample(filled_rows(), index)


@pytest.mark.slow
def test_what_is_of_one_replay_refuses_several(tmp_path: Path) -> None:
    several = jax.vmap(lambda seed: init(seed=seed, priorities=Priorities()))(jnp.arange(3))
    calls: list[Callable[[], Any]] = [
        lambda: device.sample(several, 0),
        lambda: device.add(several, {"reward": 1.0, "done": False}),
        lambda: device.set_priorities(several, jnp.zeros(2, jnp.int32), jnp.ones(2)),
        lambda: device.dumps(several, tmp_path / "replay"),
        lambda: device.loads(several, tmp_path / "replay"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"expected one replay, found 3; inside of jax\.vmap each is one"):
            call()


def test_what_was_compiled_for_no_padding_is_not_run_for_a_pad_of_0() -> None:
    """Which are equal to Python."""
    for pads in ((False, 0), (1, True)):
        for pad in pads:
            replay = device.add(init(slices=Slices(sequence_length=2, pad=pad)), {"reward": 1.0, "done": False})
            units = replay.layout.sampler.units
            assert isinstance(units, SliceUnits)
            assert units.episodes.slices.pad is pad


def filled_rows() -> device.Replay:
    return device.add(init(), {"reward": 1.0, "done": False})


@pytest.mark.slow
@pytest.mark.parametrize(("count", "envs"), [(44, 2), (1_100, None), (2_998, 3)])
def test_many_rows_at_once_are_the_same_as_few_after_each_other(count: int, envs: int | None) -> None:
    """Episodes and slices are counted block by block, or where there are more by scans."""
    few, rows = 22 if count < 2_000 else 1_499, stream(0, count, envs)
    options: dict[str, Any] = {"batch_size": BATCH, "num_envs": envs, "slices": Slices(sequence_length=3)}
    at_once = device.add(device.init(example(envs), (envs or 1) * count, **{"num_envs": None, **options}), rows)
    replay = device.init(example(envs), (envs or 1) * count, **{"num_envs": None, **options})
    for first in range(0, count, few):
        replay = device.add(replay, jax.tree.map(lambda leaf, first=first: leaf[first : first + few], rows))
    same(at_once, replay)
    done = rows["done"].reshape(count, -1) != 0
    numbers = 1 + np.cumsum(np.concatenate([np.zeros_like(done[:1]), done[:-1]]), axis=0)
    assert (np.asarray(at_once.state["episodes"]["numbers"]) == numbers).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="errors are raised where nothing waits for a device")
def test_a_compiled_function_may_refer_to_a_replay() -> None:
    """Which it is not given, so that all of it is known where the function is traced."""
    empty = device.init({"obs": 0.0}, 10, batch_size=4)
    filled = device.add(empty, {"obs": jnp.ones(5)})
    assert jax.jit(lambda number: device.sample(filled, number)["obs"].sum())(3) == 4
    with pytest.raises(ConfigError, match="expected rows, found none"):
        jax.jit(lambda number: device.sample(empty, number)["obs"].sum())(3)
    mixed = jax.jit(lambda seed: device.sample_ensemble([filled, filled], 3, 8, seed=seed)["obs"].sum())
    assert mixed(1) == 8
