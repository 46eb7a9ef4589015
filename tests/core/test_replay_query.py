"""Episodes of buffers by what is in them, against a loop over rows."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, MissingFieldError
from mouse_core.replay import (
    ArrayStorage,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    query,
)
from mouse_core.testing import example_store
from tests.raising import assert_raises


@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 12), st.integers(0, 99))
def test_episodes_are_those_of_a_loop(steps: int, envs: int, room: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    ends, reward = random.random((steps, envs)) < 0.3, random.integers(0, 5, (steps, envs)) * 1.0
    buffer = ReplayBuffer(ArrayStorage(room * envs, ndim=2))
    for begin in range(0, steps, room):
        part = slice(begin, begin + room)
        buffer.extend({"reward": reward[part], "done": ends[part]})
    wanted = []
    for env in range(envs):
        episode: list[int] = []
        for step in range(max(0, steps - room), steps):
            episode.append(step)
            if ends[step, env] or step == steps - 1:
                if reward[episode, env].sum() > 3:
                    wanted.append([step % room * envs + env for step in episode])
                episode = []
    seen = []

    def good(episode: Any) -> Any:
        seen.append(set(episode))
        return episode["reward"].sum() > 3

    assert [index.tolist() for index in query(buffer, good, fields=["reward"])] == wanted
    assert all(fields == {"reward"} for fields in seen)
    every = np.concatenate(query(buffer))
    assert sorted(every.tolist()) == list(range(len(buffer)))


def rows(n: int) -> dict[str, Any]:
    number = np.arange(n)
    return {"x": number, "next": {"reward": number * 1.0}, "episode": number // 7}


@pytest.mark.parametrize("kind", ["array", "list", "memmap", "torch", "tensors", "jax"])
def test_whatever_storage_and_framework(kind: str, tmp_path: Any) -> None:
    if kind == "jax":
        import mouse_jax

        buffer: Any = mouse_jax.ReplayBuffer(ArrayStorage(60))
    elif kind in ("torch", "tensors"):
        import mouse_torch

        buffer = mouse_torch.ReplayBuffer(ArrayStorage(60) if kind == "torch" else mouse_torch.TensorStorage(60))
    else:
        storage: Any = {
            "array": ArrayStorage,
            "list": ListStorage,
            "memmap": lambda n: MemmapStorage(n, tmp_path / "m"),
        }
        buffer = ReplayBuffer(storage[kind](60))
    buffer.extend(rows(50))
    for fields in (None, [("next", "reward")]):
        found = query(buffer, lambda episode: (episode["next"]["reward"] > 40).any(), fields=fields)
        assert [index.tolist() for index in found] == [[*range(35, 42)], [*range(42, 49)], [49]]
    kept = type(buffer)(ArrayStorage(60))
    kept.extend(buffer[np.concatenate(found)])
    assert len(kept) == 15


def test_episodes_of_a_store_by_their_steps_and_what_has_none() -> None:
    store = example_store(200)
    found = query(ReplayBuffer(store), lambda episode: len(episode["reward"]) > 8, fields=["reward"])
    view = store.where(start=[int(index[0]) for index in found])
    assert view.episodes == store.where(length=(9, None)).episodes
    assert len(view) == sum(map(len, found)) > 0
    assert query(ReplayBuffer(ArrayStorage(9))) == []
    plain = ReplayBuffer(ArrayStorage(9))
    plain.extend({"x": np.arange(3)})
    assert_raises(MissingFieldError, "expected", query, plain)
    assert_raises(ConfigError, "expected a replay buffer", query, ReplayBufferEnsemble(plain))
    with pytest.raises(ConfigError, match="in the order of writing"):
        query(ReplayBuffer(ArrayStorage(9), writer=MaxValueWriter("x")))
    ended = ReplayBuffer(ArrayStorage(9))
    ended.extend({"x": np.arange(3), "last": np.array([0, 1, 0])})
    assert [index.tolist() for index in query(ended, end_key="last")] == [[0, 1], [2]]
    assert_raises(MissingFieldError, "'y'", query, ended, bool, fields=["y"], end_key="last")
    assert_raises(ConfigError, "expected a function", query, ended, 3, end_key="last")
