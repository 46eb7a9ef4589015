"""Replays in the host's memory, of which batches go to a device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mouse_core import ConfigError
from mouse_core.replay import Priorities
from mouse_jax import device


def rows(first: int, count: int) -> dict[str, Any]:
    number = np.arange(first, first + count, dtype=np.int32)
    return {"number": number, "done": number % 4 == 0}


def made(memory: Any, **options: Any) -> device.Replay:
    given = {"batch_size": 5, "slices": device.Slices(sequence_length=3), "seed": 7, **options}
    return device.init({"number": 0, "done": False}, 20, memory=memory, **{"num_envs": None, **given})


def where(tree: Any) -> set[Any]:
    return {one for leaf in jax.tree.leaves(tree) for one in leaf.devices()}


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.slow
def test_rows_stay_on_the_host_and_batches_go_to_the_device() -> None:
    """Of four devices of the CPU the first stands for the host, where there is no other kind."""
    host, target = jax.devices("cpu")[0], jax.devices()[-1]
    plain = made("device")
    grow = jax.jit(device.add)
    with jax.default_device(target):
        replay = made("host")
        for number in range(3):
            written = rows(10 * number, 10)
            plain = jax.block_until_ready(grow(plain, written))
            # JAX may read NumPy's memory where it lies, so that what it is given here is nobody else's.
            given = jax.device_put(rows(10 * number, 10), target) if number else written
            before, replay = replay, device.add(replay, given)
            written["number"][:] = -1  # it is the caller's again
            assert before.rows["number"].is_deleted()  # written in place
            assert where(replay) == {host}
            numbers = range(4 * number, 4 * number + 4)
            for index, batch in zip(numbers, device.prefetch(replay, numbers, depth=2), strict=True):
                assert where(batch) == {target}
                same(batch, device.sample(plain, index))


def test_rows_that_come_once_lie_on_the_host_too() -> None:
    replay = device.add(made("host", slices=None, order="queue"), rows(0, 12))
    replay, first = device.take(replay)
    replay, second = device.take(device.add(replay, rows(12, 1)))
    assert [*first["number"], *second["number"]] == [*range(10)]


@pytest.mark.slow
def test_priorities_lie_on_the_host_too() -> None:
    replay = device.add(made("host", slices=None, priorities=Priorities(), batch_size=64), rows(0, 20))
    replay = device.set_priorities(replay, [3], [1e6])
    assert (np.asarray(device.sample(replay, 0)["index"]) == 3).mean() > 0.9


def test_what_cannot_lie_there_is_refused() -> None:
    for options, words in (({"memory": "disk"}, "'device', 'host'"), ({"memory": "host"}, "inside of")):
        with pytest.raises(ConfigError, match=words):
            jax.vmap(lambda seed, options=options: made(**options, seed=seed))(jnp.arange(2))
    with pytest.raises(ConfigError, match="depth: expected"):
        device.prefetch(made("device"), range(3), depth=0)
