"""Single transitions of rows that store observations once, in rings that wrap, against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mouse_core.errors import ConfigError
from mouse_core.replay import (
    ArrayStorage,
    HindsightRelabel,
    MaxValueWriter,
    NextView,
    NStep,
    PrioritizedSampler,
    ReplayBuffer,
    ReturnsToGo,
    SamplerWithoutReplacement,
    SliceSampler,
)
from mouse_core.replay.ahead import look_ahead, rows_behind
from mouse_core.replay.protocols import Draw


def stream(env: int, n: int, seed: int) -> list[dict[str, Any]]:
    """Rows of one environment; an observation says which row of which environment it is."""
    random = np.random.default_rng([seed, env])
    return [
        {
            "obs": np.array([env * 10_000 + number, 0.5]),
            "action": int(random.integers(4)),
            "reward": float(random.integers(-3, 4)),
            "done": int(random.choice([0, 0, 0, 0, 1, 2])),
        }
        for number in range(n)
    ]


def step_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of all environments at one time."""
    return {
        "obs": np.stack([row["obs"] for row in rows]),
        **{name: np.array([row[name] for row in rows]) for name in ("action", "reward", "done")},
    }


def expected(rows: list[dict[str, Any]], place: int, n: int, discount: float, takes: str) -> dict[str, Any]:
    """The transition of up to n steps that begins at a row of a stream, by a plain loop; nothing if there is none."""
    transitions = []  # (reward, done, row of the next observation)
    for step in range(place, place + n):
        if takes == "arrived":
            if rows[step]["done"] or step + 1 >= len(rows):
                break
            transitions.append((rows[step + 1]["reward"], rows[step + 1]["done"], step + 1))
        else:
            done = rows[step]["done"] if step < len(rows) else 0
            if step >= len(rows) or done == 2 or (not done and step + 1 >= len(rows)):
                break
            transitions.append((rows[step]["reward"], done, None if done else step + 1))
        if transitions[-1][1]:
            break
    if not transitions:
        return {}
    target = transitions[-1][2]
    return {
        "reward": sum(discount**k * reward for k, (reward, _, _) in enumerate(transitions)),
        "done": transitions[-1][1],
        "steps": len(transitions),
        "action": rows[place + 1]["action"] if takes == "arrived" else rows[place]["action"],
        "next": None if target is None else rows[target]["obs"][0],
    }


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    envs=st.sampled_from([None, 1, 3]),
    written=st.integers(1, 40),
    n=st.integers(1, 5),
    takes=st.sampled_from(["outgoing", "arrived"]),
    prioritized=st.booleans(),
)
def test_transitions_are_those_of_the_streams(
    seed: int, envs: int | None, written: int, n: int, takes: Any, prioritized: bool
) -> None:
    length, count = 12, envs or 1
    buffer = ReplayBuffer(
        ArrayStorage(length * count, 1 if envs is None else 2, alignment=takes),
        PrioritizedSampler() if prioritized else SamplerWithoutReplacement(),
        transform=[NextView(takes=takes), NStep(n, 0.5)],
        batch_size=min(written, length) * count,
        seed=seed,
    )
    streams = [stream(env, written, seed) for env in range(count)]
    for number in range(written):
        rows = [rows[number] for rows in streams]
        buffer.add(rows[0] if envs is None else step_of(rows))
    batch = buffer.sample()
    if not prioritized:
        assert sorted(batch["index"].tolist()) == list(range(len(buffer)))
    for place in range(len(batch["index"])):
        env, number = divmod(int(batch["obs"][place, 0]), 10_000)
        assert number >= written - length
        wanted = expected(streams[env], number, n, 0.5, takes)
        if not batch["mask"][place]:
            assert not wanted
            continue
        assert batch["next"]["reward"][place] == wanted["reward"]
        assert batch["next"]["done"][place] == wanted["done"]
        assert batch["steps"][place] == wanted["steps"]
        assert batch["discount"][place] == 0.5 ** wanted["steps"]
        assert batch["action"][place] == wanted["action"]
        if wanted["next"] is not None:
            assert batch["next"]["obs"][place, 0] == wanted["next"]


@settings(max_examples=40)
@given(capacity=st.integers(1, 9), envs=st.integers(1, 3), written=st.integers(1, 30), steps=st.integers(1, 12))
def test_slots_behind_a_row(capacity: int, envs: int, written: int, steps: int) -> None:
    """What lies behind a row in its own stream, up to the newest and never across the seam."""
    storage = ArrayStorage(capacity * envs, 2)
    for number in range(written):
        storage.append({"x": np.arange(envs) + 1000 * number}, one=True)
    index = np.arange(len(storage))
    slots, known = rows_behind(index, storage, steps)
    found = storage.read("x", slots)
    begin = storage.read("x", index)
    for row in range(len(index)):
        number, env = divmod(int(begin[row]), 1000)
        left = [1000 * later + env for later in range(number, written)][: steps + 1]
        assert found[row][known[row]].tolist() == left
        assert (found[row][~known[row]] == 1000 * (written - 1) + env).all()


def test_a_mask_of_the_draw_counts() -> None:
    storage = ArrayStorage(8)
    storage.append({"x": np.arange(6)})
    draw = look_ahead(Draw(np.array([0, 4]), mask=np.array([True, False])), storage, 2)
    assert draw.index.tolist() == [[0, 1, 2], [4, 5, 5]]
    assert draw.mask is not None
    assert draw.mask.tolist() == [[True] * 3, [False] * 3]


def test_slices_are_left_as_they_are() -> None:
    buffer = ReplayBuffer(
        ArrayStorage(64),
        SliceSampler(slice_len=5, end_key="done"),
        transform=[NextView(), NStep(3, 0.5)],
        batch_size=20,
    )
    done = np.zeros(40, np.int8)
    done[9::10] = 1
    buffer.extend({"x": np.arange(40), "reward": np.ones(40), "done": done})
    batch = buffer.sample()
    assert batch["x"].shape == batch["next"]["x"].shape == (4, 5)
    np.testing.assert_array_equal(batch["mask"][:, :-1], True)
    np.testing.assert_array_equal(batch["mask"][:, -1], batch["next"]["done"][:, -1] == 1)


def test_hindsight_of_single_transitions_looks_as_far_as_it_is_told() -> None:
    relabel = HindsightRelabel(
        compute_reward=lambda achieved, goal, batch: (achieved - goal)[..., 0],
        strategy="final",
        ratio=1.0,
        horizon=6,
        takes="arrived",
    )
    buffer = ReplayBuffer(ArrayStorage(64, alignment="arrived"), transform=relabel, batch_size=64)
    done = np.zeros(30, np.int8)
    done[9::10] = 2
    place = np.arange(30.0)[:, None]
    buffer.extend(
        {"achieved_goal": place, "desired_goal": -place, "action": place[:, 0], "reward": place[:, 0], "done": done}
    )
    batch = buffer.sample()
    drawn = batch["achieved_goal"][:, 0]
    np.testing.assert_array_equal(batch["mask"], drawn % 10 != 9)
    there = batch["mask"]
    last = np.minimum(drawn // 10 * 10 + 9, drawn + 7)
    np.testing.assert_array_equal(batch["desired_goal"][there, 0], last[there])
    np.testing.assert_array_equal(batch["next"]["reward"][there], (drawn + 1 - last)[there])


def test_parts_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="keeps the order of rows"):
        ReplayBuffer(ArrayStorage(8), writer=MaxValueWriter("reward"), transform=NextView())
    with pytest.raises(ConfigError, match="takes 'arrived' rows"):
        ReplayBuffer(ArrayStorage(8, alignment="arrived"), transform=ReturnsToGo())
    assert (
        ReplayBuffer(ArrayStorage(8, alignment="arrived"), transform=NextView(takes="arrived")).alignment == "outgoing"
    )


@settings(max_examples=25)
@given(written=st.integers(1, 40), n=st.integers(1, 5), seed=st.integers(0, 100))
def test_rows_that_hold_their_next_observation(written: int, n: int, seed: int) -> None:
    """Nothing is masked: the newest row knows where it led, and the last one of an episode, too."""
    buffer = ReplayBuffer(ArrayStorage(12), SamplerWithoutReplacement(), transform=NStep(n, 0.5), seed=seed)
    rows = stream(0, written, seed)
    for row in rows:
        buffer.add({**row, "next_obs": row["obs"] + 1})
    batch = buffer.sample(len(buffer))
    assert batch["mask"].all()
    for place in range(len(buffer)):
        number = int(batch["obs"][place, 0])
        taken = rows[number : number + n]
        ends = [step for step, row in enumerate(taken) if row["done"]]
        taken = taken[: ends[0] + 1] if ends else taken
        assert batch["reward"][place] == sum(0.5**k * row["reward"] for k, row in enumerate(taken))
        assert batch["done"][place] == taken[-1]["done"]
        assert batch["steps"][place] == len(taken)
        assert batch["next_obs"][place, 0] == number + len(taken)
        assert batch["action"][place] == rows[number]["action"]
