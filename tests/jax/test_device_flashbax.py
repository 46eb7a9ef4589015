"""The buffer tests of flashbax 0.1.3, for replays on the device; docs/reference/coming-from.md lists the names."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mouse_core.replay import Priorities
from mouse_jax import device

pytestmark = pytest.mark.slow
STEPS, ENVS, COUNT, LENGTH, BATCH = 16, 2, 5, 4, 64
ROW = {
    "obs": jnp.array((5, 4), jnp.float32),
    "action": jnp.ones(2, jnp.int32),
    "reward": jnp.zeros((), jnp.float16),
    "done": False,
}
PLAIN = Priorities(alpha=1, beta=1, eps=0)
KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows by priority": {"priorities": PLAIN},
    "slices by priority": {"priorities": PLAIN, "slices": device.Slices(sequence_length=LENGTH, pad=False)},
    "slices by priority with a period": {
        "priorities": PLAIN,
        "slices": device.Slices(sequence_length=LENGTH, pad=False, period=3),
    },
    "slices with a period": {"slices": device.Slices(sequence_length=LENGTH, pad=False, period=3)},
}
grow, draw = jax.jit(device.add), jax.jit(device.sample)
update = jax.jit(device.set_priorities)


@cache
def empty(kind: str) -> device.Replay:
    return device.init(ROW, STEPS * ENVS, batch_size=BATCH, num_envs=ENVS, **KINDS[kind])


@cache
def filled(kind: str) -> device.Replay:
    replay = empty(kind)
    for number in range(4):
        replay = grow(replay, rows(COUNT * number))
    return replay


def rows(first: int, count: int = COUNT) -> Any:
    """Time steps of two environments, whose rewards say their number; nothing ends."""
    number = first + np.arange(count)[:, None] + 1000 * np.arange(ENVS)
    return {
        "obs": np.stack([number, -number], -1).astype(np.float32),
        "action": np.stack([number, number], -1).astype(np.int32),
        "reward": number.astype(np.float16),
        "done": np.zeros(number.shape, np.bool_),
    }


def numbers(batch: Any) -> Any:
    return np.asarray(batch["action"][..., 0])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind.endswith("priority") else [pytest.mark.long]) for kind in KINDS]
)
def test_rows_are_added_and_sampled(kind: str) -> None:
    """Groups: add, can_sample and sample, of flat, item and trajectory buffers, in batches of sequences."""
    replay = empty(kind)
    for number in range(4):
        assert int(replay.size) < STEPS
        replay = grow(replay, rows(COUNT * number))
        assert int(replay.cursor) == COUNT * (number + 1) % STEPS
        assert bool(device.can_sample(replay, min_length=12 * ENVS)) == (COUNT * (number + 1) >= 12)
    assert int(replay.size) == STEPS
    one, other = (draw(replay, number) for number in (0, 1))
    assert (numbers(one) != numbers(other)).any()
    for name, leaf in ROW.items():
        assert one[name].dtype == jnp.asarray(leaf).dtype
        assert one[name].shape[:1] == (BATCH,)
    if "priorities" in KINDS[kind]:
        assert (np.asarray(one["priority_weight"]) > 0).all()


def test_a_whole_capacity_is_added_at_once() -> None:
    """Groups: add of as many rows as there is room for, and samples that differ with their keys."""
    replay = grow(grow(empty("rows by priority"), rows(0, STEPS)), rows(500, STEPS))
    assert int(replay.cursor) == 0
    np.testing.assert_array_equal(replay.rows["action"][..., 0], numbers(rows(500, STEPS)))
    one, other = (device.sample(replay, key) for key in jax.random.split(jax.random.key(0)))
    assert (numbers(one) != numbers(other)).any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("slices")])
def test_slices_are_those_that_there_are(kind: str) -> None:
    """Groups: no broken trajectories, which items are valid after each write, and period, with priorities too."""
    replay, period = empty(kind), KINDS[kind]["slices"].period
    for number in range(12):
        replay = grow(replay, rows(COUNT * number))
        newest = COUNT * (number + 1)
        oldest = max(0, newest - STEPS)
        found = np.concatenate([numbers(draw(replay, jnp.uint32(8 * number + again))) for again in range(8)])
        assert (np.diff(found, axis=1) == 1).all()
        begins = [begin for begin in range(0, newest - LENGTH + 1, period) if begin >= oldest]
        assert {*found[:, 0].tolist()} == {begin + 1000 * env for begin in begins for env in range(ENVS)}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("priority")])
def test_priorities_are_set(kind: str) -> None:
    """Groups: set_priorities, and of the sum tree: many are as one by one, the last counts, none of 0 is drawn."""
    replay = filled(kind)
    slots = jnp.array([3, 8, 3, 20, 9], jnp.int32)
    values = jnp.array([7.0, 2.0, 1.0, 4.0, 10_008.0])
    together = update(replay, slots, values)
    assert float(together.state["largest"]) == 10_008
    one_by_one = replay
    for place in range(5):
        one_by_one = update(one_by_one, jnp.where(jnp.arange(5) == place, slots, -1), values)
    for mine, other in zip(*map(jax.tree.leaves, (together, one_by_one)), strict=True):
        np.testing.assert_array_equal(mine, other)
    none = replay
    for first in range(0, STEPS * ENVS, 5):
        none = update(none, first + jnp.arange(5), jnp.zeros(5))
    assert not device.can_sample(none)
    drawn = {*np.asarray(draw(update(none, slots, values), 0)["index"]).reshape(BATCH, -1)[:, 0].tolist()}
    assert 9 in drawn
    assert drawn <= {3, 8, 9, 20}


def test_shares_of_a_mixture_are_exact() -> None:
    """Groups: mixed buffers, with priorities and without, jitted."""
    replays = [
        grow(empty(kind), rows(1000 * number, STEPS))
        for number, kind in enumerate(["rows", "rows by priority", "rows"])
    ]
    mixed = partial(device.sample_ensemble, batch_size=100, p=[0.2, 0.2, 0.6])
    batch = jax.jit(mixed)(replays, jax.random.key(0))
    assert np.bincount(np.asarray(batch["buffer_ids"])).tolist() == [20, 20, 60]


def test_a_queue_gives_all_that_it_was_given() -> None:
    """Groups: can_add, can_sample and sample of queues, at their fullest and where nothing divides."""
    queue = device.init(ROW, 13 * ENVS, batch_size=5 * ENVS, num_envs=ENVS, order="queue")
    taken: list[int] = []
    written = 0
    for _ in range(20):
        while device.can_add(queue, 3):
            queue = grow(queue, rows(written, 3))
            written += 3
        assert written - len(taken) > 10
        while device.can_sample(queue):
            queue, batch = device.take(queue)
            taken += numbers(batch).reshape(5, ENVS)[:, 0].tolist()
        assert written - len(taken) < 5
    assert taken == [*range(len(taken))]
    whole = device.init(ROW, 8 * ENVS, batch_size=8 * ENVS, num_envs=ENVS, order="queue")
    for number in range(3):
        assert device.can_add(whole, 8)
        whole = grow(whole, rows(8 * number, 8))
        assert not device.can_add(whole)
        whole, batch = device.take(whole)
        np.testing.assert_array_equal(numbers(batch).reshape(8, ENVS), numbers(rows(8 * number, 8)))
        assert not device.can_sample(whole)


def test_replays_lie_on_several_devices() -> None:
    """Groups: does not smoke, under jax.pmap; which is jax.shard_map now."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("device",))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("device"), out_specs=PartitionSpec("device"))
    def sharded(replays: Any, more: Any) -> Any:
        replay, more = jax.tree.map(lambda leaf: leaf[0], (replays, more))
        return jax.tree.map(lambda leaf: leaf[None], turn(replay, more))

    def turn(replay: Any, more: Any) -> Any:
        replay = grow(replay, more)
        replay = update(replay, slots, priorities)
        return replay, draw(replay, 4)

    slots, priorities = jnp.arange(5, dtype=jnp.int32), jnp.arange(5.0)
    alone = empty("rows by priority")
    replays = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), alone)
    given = replays, jax.tree.map(lambda *parts: np.stack(parts), rows(0), rows(100))
    found = sharded(*jax.device_put(given, NamedSharding(mesh, PartitionSpec("device"))))
    for mine, other in zip(*map(jax.tree.leaves, (found, turn(alone, rows(100)))), strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[1], other)
