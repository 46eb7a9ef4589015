"""ReplayBuffer as an actor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import mouse_ray
from mouse_core import replay
from mouse_core.replay import ArrayStorage, MemmapStorage
from tests.ray.actors import kill

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def rows(first: int, count: int) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    return {"observation": (numbers[:, None] * np.ones(3)).astype(np.float32), "reward": numbers.astype(np.float32)}


def test_batches_are_those_of_a_buffer_here() -> None:
    actor = mouse_ray.ReplayBuffer.remote(ArrayStorage(100), batch_size=8, seed=3)
    here = replay.ReplayBuffer(ArrayStorage(100), batch_size=8, seed=3)
    for first in (0, 50):
        there = ray.get(actor.extend.remote(rows(first, 50)))
        np.testing.assert_array_equal(there, here.extend(rows(first, 50)))
    for _ in range(3):
        found, expected = ray.get(actor.sample.remote()), here.sample()
        assert set(found) == set(expected)
        for name in ("observation", "reward"):
            np.testing.assert_array_equal(found[name], expected[name])
    assert ray.get(actor.size.remote()) == 100
    assert ray.get(actor.stats.remote()) == here.stats()
    state = ray.get(actor.state_dict.remote())
    after = here.sample()["reward"]
    np.testing.assert_array_equal(ray.get(actor.sample.remote())["reward"], after)
    ray.get(actor.extend.remote(rows(100, 50)))
    ray.get(actor.load_state_dict.remote(state))
    np.testing.assert_array_equal(ray.get(actor.sample.remote())["reward"], after)
    ray.kill(actor)


@pytest.mark.long
def test_mapped_rows_outlive_the_actor(tmp_path: Path) -> None:
    actor = mouse_ray.ReplayBuffer.remote(MemmapStorage(100, tmp_path / "rows"), batch_size=4)
    ray.get(actor.extend.remote(rows(0, 30)))
    kill(actor)
    assert ray.get(actor.size.remote()) == 30
    ray.get(actor.append.remote({"observation": np.ones(3, np.float32), "reward": np.float32(7)}))
    assert ray.get(actor.get.remote(30))["reward"] == 7
    assert ray.get(actor.get.remote(slice(0, 30)))["reward"].tolist() == list(range(30))
    ray.kill(actor)


@pytest.mark.long
def test_a_checkpoint_is_loaded_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "buffer.mouse"
    actor = mouse_ray.ReplayBuffer.remote(ArrayStorage(100), batch_size=4, checkpoint=file)
    ray.get(actor.extend.remote(rows(0, 30)))
    ray.get(actor.dumps.remote(file))
    ray.kill(actor)
    again = mouse_ray.ReplayBuffer.remote(ArrayStorage(100), batch_size=4, checkpoint=file)
    assert ray.get(again.size.remote()) == 30
    ray.kill(again)
