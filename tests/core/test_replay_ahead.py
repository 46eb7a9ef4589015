"""Single transitions of rows that store observations once, in rings that wrap, against plain lists."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, SchemaError
from mouse_core.randomness import Key, Purpose
from mouse_core.replay import (
    ArrayStorage,
    HindsightRelabel,
    NextView,
    NStep,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReturnsToGo,
    SamplerWithoutReplacement,
    SliceSampler,
)


def stream(env: int, n: int, seed: int) -> list[dict[str, Any]]:
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
        buffer.append(rows[0] if envs is None else step_of(rows))
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


@dataclass
class Looking:
    """A transform that needs the steps behind each row, and keeps what it is given."""

    reach: int
    seen: list[Any]

    def __call__(self, batch: Any) -> Any:
        self.seen.append(dict(batch))
        return batch


@given(capacity=st.integers(1, 9), envs=st.integers(1, 3), written=st.integers(1, 30), steps=st.integers(1, 12))
def test_slots_behind_a_row(capacity: int, envs: int, written: int, steps: int) -> None:
    # What a transform sees that needs the steps behind a row.
    storage = ArrayStorage(capacity * envs, 2)
    for number in range(written):
        storage.append({"x": np.arange(envs) + 1000 * number}, one=True)
    index = np.arange(len(storage))
    seen: list[Any] = []
    buffer = ReplayBuffer(storage, SamplerWithoutReplacement(shuffle=False), transform=Looking(steps, seen))
    batch = buffer.sample(len(storage))
    assert sorted(batch["index"].tolist()) == index.tolist()
    found, known, begin = seen[0]["x"], seen[0]["mask"], batch["x"]
    for row in range(len(index)):
        number, env = divmod(int(begin[row]), 1000)
        left = [1000 * later + env for later in range(number, written)][: steps + 1]
        assert found[row][known[row]].tolist() == left
        assert (found[row][~known[row]] == 1000 * (written - 1) + env).all()


def test_slices_are_left_as_they_are() -> None:
    buffer = ReplayBuffer(
        ArrayStorage(64),
        SliceSampler(sequence_length=5, end_key="done"),
        transform=[NextView(), NStep(3, 0.5)],
        batch_size=4,
    )
    done = np.zeros(40, np.int8)
    done[9::10] = 1
    buffer.extend({"x": np.arange(40), "reward": np.ones(40), "done": done})
    batch = buffer.sample()
    assert batch["x"].shape == batch["next"]["x"].shape == (4, 5)
    np.testing.assert_array_equal(batch["mask"][:, :-1], True)
    np.testing.assert_array_equal(batch["mask"][:, -1], batch["next"]["done"][:, -1] == 1)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_envs=st.integers(1, 3),
    steps=st.integers(3, 30),
    layout=st.sampled_from(["next", "outgoing", "arrived", "view"]),
    marks=st.sampled_from(["done", "ids", "both"]),
    strategy=st.sampled_from(["future", "final", "episode"]),
    horizon=st.sampled_from([None, None, 0, 3]),
    sliced=st.booleans(),
)
def test_goals_come_from_all_of_an_episode_and_from_no_other(
    seed: int, num_envs: int, steps: int, layout: str, marks: str, strategy: Any, horizon: int | None, sliced: bool
) -> None:
    rng = np.random.default_rng(seed)
    total = int(rng.integers(1, 3 * steps))
    ends = rng.random((total, num_envs)) < rng.choice([0.05, 0.3])
    number = np.arange(total * num_envs).reshape(total, num_envs)
    episode = (np.cumsum(ends, axis=0) - ends) * num_envs + np.arange(num_envs)
    achieved = number[..., None] * np.array([1.0, 10.0])
    rows: dict[str, Any] = {"achieved_goal": achieved, "desired_goal": np.full_like(achieved, -1.0)}
    rows |= {"reward": np.zeros((total, num_envs)), "action": number, "is": episode}
    if marks != "ids":
        rows["done"] = 2 * ends if marks == "done" else 2 * (ends & (rng.random(ends.shape) < 0.5))
    if marks != "done":
        rows["traj"] = episode
    if layout == "next":
        rows["next"] = {"achieved_goal": achieved + 0.25}
    takes: Any = "arrived" if layout in ("arrived", "view") else "outgoing"
    storage = ArrayStorage(steps * num_envs, ndim=2, alignment=takes)
    relabel = HindsightRelabel(
        compute_reward=lambda found, goal, batch: found[..., 0] - goal[..., 0],
        strategy=strategy,
        ratio=1.0,
        horizon=horizon,
        takes="outgoing" if layout == "view" else takes,
    )
    transforms = [NextView(takes="arrived"), relabel] if layout == "view" else relabel
    sampler = SliceSampler(sequence_length=2, pad=True) if sliced else None
    buffer = ReplayBuffer(storage, sampler, transform=transforms, batch_size=150 if sliced else 300, seed=seed)
    begin = 0
    while begin < total:
        n = int(rng.integers(1, steps + 1))
        buffer.extend({name: part(values, begin, n) for name, values in rows.items()})
        begin += n
    batch = buffer.sample()
    new = batch["relabelled"].reshape(-1)
    at = batch["achieved_goal"].reshape(-1, 2)[:, 0].astype(int)
    goal = batch["desired_goal"].reshape(-1, 2)
    reached = batch["next"]["achieved_goal"].reshape(-1, 2)[:, 0]
    reward = (batch["next"]["reward"] if "reward" in batch["next"] else batch["reward"]).reshape(-1)
    np.testing.assert_array_equal(reward[new], (reached - goal[:, 0])[new])
    assert (goal[~new] == -1).all()
    seen: dict[int, set[float]] = {}
    for place in np.flatnonzero(new).tolist():
        seen.setdefault(int(at[place]), set()).add(float(goal[place, 0]))
    alive = {int(n): int(e) for n, e in zip(number[-steps:].flat, episode[-steps:].flat, strict=True)}
    for row, goals in seen.items():
        mine = [n for n in alive if alive[n] == alive[row]]
        sources = [n for n in mine if layout == "next" or n != mine[-1]]  # a transition leaves it
        assert row in sources
        if horizon is not None:
            sources = [n for n in sources if abs(n - row) <= horizon * num_envs]
        ahead = [n for n in sources if n >= row]
        allowed = {"future": ahead, "final": ahead[-1:], "episode": sources}[strategy]
        achieves = {n + 0.25 if layout == "next" else float(n + num_envs) for n in allowed}
        assert goals <= achieves
        if not sliced and total * num_envs <= 6:  # so many draws that all of them come
            assert goals == achieves


def part(values: Any, begin: int, n: int) -> Any:
    if isinstance(values, dict):
        return {name: part(child, begin, n) for name, child in values.items()}
    return values[begin : begin + n]


def test_steps_behind_a_single_transition_get_its_goal() -> None:
    relabel = HindsightRelabel(
        compute_reward=lambda found, goal, batch: (found == goal)[..., 0].astype(np.float64), ratio=1.0
    )
    buffer = ReplayBuffer(ArrayStorage(40), transform=[relabel, NStep(3, 1.0)], batch_size=300)
    place = np.arange(40.0)[:, None]
    rows = {"achieved_goal": place, "desired_goal": place * 0 - 1, "reward": np.zeros(40)}
    buffer.extend({**rows, "done": np.arange(40) % 10 == 9, "next": {"achieved_goal": place + 1}})
    batch = buffer.sample()
    away = batch["desired_goal"][:, 0] - batch["achieved_goal"][:, 0]
    np.testing.assert_array_equal(batch["reward"], (away >= 1) & (away <= 3))
    assert away.max() == 10


@pytest.mark.parametrize("before", [[], [NextView()]])
@pytest.mark.parametrize("strategy", ["future", "random"])
def test_a_terminal_step_whose_outcome_is_not_stored_adds_no_reward_to_a_new_goal(before: Any, strategy: Any) -> None:
    """Of rows without ``next`` nothing says what the last action of an episode achieved."""
    relabel = HindsightRelabel(
        compute_reward=lambda found, goal, batch: (found == goal)[..., 0].astype(np.float64),
        ratio=1.0,
        strategy=strategy,
    )
    buffer = ReplayBuffer(ArrayStorage(40), transform=[*before, relabel, NStep(3, 1.0)], batch_size=300)
    place = np.arange(40.0)[:, None]
    done = np.arange(40) % 10 == 9
    buffer.extend({"achieved_goal": place, "desired_goal": place * 0 - 1, "reward": done * 100.0, "done": done})
    batch = buffer.sample()
    step, goal, new = batch["achieved_goal"][:, 0], batch["desired_goal"][:, 0], batch["relabelled"]
    np.testing.assert_array_equal(new, step % 10 != 9)
    np.testing.assert_array_equal(batch["steps"][new], np.minimum(3, 9 - step % 10)[new])
    reward = batch["next"]["reward"]
    np.testing.assert_array_equal(reward[new], ((goal > step) & (goal <= step + batch["steps"]))[new])
    assert (reward[~new] == 100).all()


def test_transforms_that_do_not_fit_hindsight_or_slices_are_refused() -> None:
    relabel = HindsightRelabel(compute_reward=lambda found, goal, batch: found)
    for summing in (NStep(3, 1.0), ReturnsToGo(1.0)):
        with pytest.raises(ConfigError, match=r"expected single transitions for .* together with HindsightRelabel"):
            ReplayBuffer(ArrayStorage(9), SliceSampler(sequence_length=4), transform=[relabel, summing])
    relabel = HindsightRelabel(compute_reward=lambda found, goal, batch: found)
    with pytest.raises(ConfigError, match=r"before all transforms that can change the rows"):
        ReplayBuffer(ArrayStorage(5), transform=[lambda batch: batch, relabel])
    ReplayBuffer(ArrayStorage(5), transform=[NextView(), relabel, lambda batch: batch])
    single = {"index": np.arange(3), "mask": np.ones((3, 2), bool), "desired_goal": np.zeros((3, 2, 1))}
    single |= {"done": np.zeros((3, 2)), "next": {"achieved_goal": np.zeros((3, 2, 1)), "reward": np.zeros((3, 2))}}
    with pytest.raises(SchemaError, match="expected goals from the episodes of the transitions, found none"):
        relabel(single, Key(0, Purpose.REPLAY))
    relabel = HindsightRelabel(compute_reward=lambda found, goal, batch: found)
    goals = ReplayBuffer(ArrayStorage(9), SliceSampler(sequence_length=4), transform=relabel)
    apart = ReplayBuffer(ArrayStorage(9), SliceSampler(sequence_length=4, dilation=2))
    for member, transform, text in ((goals, NStep(2, 1.0), "single transitions"), (apart, NextView(), "dilation=1")):
        for buffer in (member, ReplayBufferEnsemble(member)):
            with pytest.raises(ConfigError, match=f"transform: expected .*{text}"):
                ReplayBufferEnsemble(buffer, transform=transform)


@pytest.mark.parametrize(
    ("key", "has_done", "takes"),
    [
        *((("collector", "traj_ids"), True, "outgoing"), ("episode", False, "outgoing")),
        *(("episode", True, "arrived"), ("traj", False, "arrived")),
    ],
)
def test_transitions_end_where_the_number_of_their_trajectory_changes(key: Any, has_done: bool, takes: Any) -> None:
    number = np.arange(30) // 10
    ids = number if isinstance(key, str) else {key[1]: number}
    rows = {"x": np.arange(30.0), "reward": np.ones(30), "action": np.arange(30)}
    rows |= {key if isinstance(key, str) else key[0]: ids} | ({"done": np.zeros(30, bool)} if has_done else {})
    storage = ArrayStorage(64, alignment=takes)
    buffer = ReplayBuffer(storage, transform=[NextView(takes=takes), NStep(4, 0.5)], batch_size=200)
    buffer.extend(rows)
    batch = buffer.sample()
    x, after = batch["x"], batch["next"]["x"]
    np.testing.assert_array_equal(batch["mask"], x % 10 != 9)
    there = batch["mask"]
    target = np.minimum(x // 10 * 10 + 9, x + 4)
    np.testing.assert_array_equal(after[there], target[there])
    np.testing.assert_array_equal(batch["steps"][there], (target - x)[there])


@given(written=st.integers(1, 40), n=st.integers(1, 5), seed=st.integers(0, 100))
def test_rows_that_hold_their_next_observation(written: int, n: int, seed: int) -> None:
    buffer = ReplayBuffer(ArrayStorage(12), SamplerWithoutReplacement(), transform=NStep(n, 0.5), seed=seed)
    rows = stream(0, written, seed)
    for row in rows:
        buffer.append({**row, "next_obs": row["obs"] + 1})
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
