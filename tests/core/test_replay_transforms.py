"""Transforms of replay batches against plain loops."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.nested import flatten, map_tree
from mouse_core.randomness import Key, Purpose
from mouse_core.replay import (
    ArrayStorage,
    BurnIn,
    Cast,
    CatFrames,
    Compose,
    Exclude,
    HindsightRelabel,
    NextView,
    NStep,
    OnWrite,
    RandomTimeCrop,
    Rename,
    ReplayBuffer,
    Resize,
    ReturnsToGo,
    Select,
    ToFloatImage,
)
from mouse_core.replay.transforms.compose import delivered_alignment
from tests.raising import assert_raises

KEY = Key(3, Purpose.WINDOWS, 5)


def as_torch(batch: Any) -> Any:
    return map_tree(torch.from_numpy, batch)


def assert_equal(found: Any, wanted: Any) -> None:
    one, other = flatten(found), flatten(wanted)
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(np.asarray(one[key]), np.asarray(other[key]), err_msg=str(key), strict=True)


@st.composite
def slices(draw: st.DrawFn) -> dict[str, np.ndarray]:
    count, length = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    lengths = random.integers(1, length + 1, count)
    return {
        "obs": random.normal(size=(count, length, 2)),
        "action": random.integers(0, 4, (count, length)),
        "reward": random.normal(size=(count, length)),
        "done": random.choice([0, 0, 0, 1, 2], (count, length)),
        "mask": np.arange(length) < lengths[:, None],
    }


def episodes(batch: dict[str, np.ndarray]) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = []
    for row in range(len(batch["done"])):
        current: list[tuple[int, int]] = []
        for step in range(batch["done"].shape[1]):
            if not batch["mask"][row, step]:
                break
            current.append((row, step))
            if batch["done"][row, step]:
                found.append(current)
                current = []
        if current:
            found.append(current)
    return found


@given(batch=slices(), n=st.integers(1, 9), discount=st.sampled_from([0.0, 0.5, 0.97, 1.0]))
def test_n_step_is_the_loop(batch: dict[str, Any], n: int, discount: float) -> None:
    batch["next"] = {"obs": np.random.default_rng(0).normal(size=batch["obs"].shape)}
    batch["next_state"] = np.arange(batch["done"].size).reshape(batch["done"].shape)
    wanted = {
        name: np.zeros_like(batch["reward"], dtype)
        for name, dtype in (("reward", "f8"), ("done", "i8"), ("discount", "f4"), ("steps", "i8"))
    }
    for episode in episodes(batch):
        for number, place in enumerate(episode):
            taken = episode[number : number + n]
            wanted["reward"][place] = sum(discount**k * batch["reward"][step] for k, step in enumerate(taken))
            wanted["done"][place] = batch["done"][taken[-1]]
            wanted["discount"][place] = discount ** len(taken)
            wanted["steps"][place] = len(taken)
    found = NStep(n, discount)(batch)
    there = batch["mask"]
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype, name
        np.testing.assert_allclose(found[name][there], values[there], atol=1e-12, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(found["steps"], wanted["steps"])
    for row, step in zip(*np.nonzero(there), strict=True):
        target = step + wanted["steps"][row, step] - 1
        np.testing.assert_array_equal(found["next"]["obs"][row, step], batch["next"]["obs"][row, target])
        assert found["next_state"][row, step] == batch["next_state"][row, target]
    np.testing.assert_array_equal(found["obs"], batch["obs"])
    assert_equal(map_tree(lambda values: values.numpy(), NStep(n, discount)(as_torch(batch))), found)


@st.composite
def slices_of_agents(draw: st.DrawFn) -> dict[str, np.ndarray]:
    batch = draw(slices())
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    shape = (*batch["done"].shape, 3)
    agents = random.choice([0, 0, 0, 0, 1, 2], shape)
    for episode in episodes(batch):
        for agent in range(3):
            ended = False
            for row, step in episode:
                code = agents[row, step, agent]
                agents[row, step, agent] = 3 if ended else code
                ended = ended or code != 0
    return {**batch, "reward": random.normal(size=shape), "agent_done": agents}


@given(batch=slices_of_agents(), n=st.integers(1, 5), discount=st.sampled_from([0.5, 0.97, 1.0]))
def test_n_step_of_agents_is_the_loop(batch: dict[str, Any], n: int, discount: float) -> None:
    batch["next_state"] = np.arange(batch["done"].size).reshape(batch["done"].shape)
    found = NStep(n, discount)(batch)
    for episode in episodes(batch):
        for number, place in enumerate(episode):
            codes, total, steps = [0, 0, 0], [0.0, 0.0, 0.0], 0
            for step in episode[number : number + n]:
                for agent in range(3):
                    if steps == 0 or codes[agent] == 0:
                        there = batch["agent_done"][step][agent] != 3
                        total[agent] += discount**steps * batch["reward"][step][agent] * there
                        codes[agent] = batch["agent_done"][step][agent] or batch["done"][step]
                steps, last = steps + 1, step
                if 2 in (int(code) or int(batch["done"][step]) for code in batch["agent_done"][step]):
                    break
            np.testing.assert_allclose(found["reward"][place], total, atol=1e-12)
            assert found["agent_done"][place].tolist() == codes
            assert (found["steps"][place], found["next_state"][place]) == (steps, batch["next_state"][last])
            assert found["done"][place] == batch["done"][last]
            np.testing.assert_allclose(found["discount"][place], [discount**steps], rtol=1e-6)
    assert_equal(map_tree(lambda values: values.numpy(), NStep(n, discount)(as_torch(batch))), found)
    inside = {"done": batch["done"], "agent_done": batch["agent_done"], "reward": batch["reward"]}
    nested = NStep(n, discount)({"mask": batch["mask"], "next": inside})
    np.testing.assert_array_equal(nested["next"]["agent_done"], found["agent_done"])
    np.testing.assert_array_equal(nested["next"]["reward"], found["reward"])


@given(batch=slices_of_agents(), discount=st.sampled_from([0.5, 1.0]))
def test_returns_of_agents_are_the_loop(batch: dict[str, Any], discount: float) -> None:
    wanted = {"outgoing": np.zeros_like(batch["reward"]), "arrived": np.zeros_like(batch["reward"])}
    for episode in episodes(batch):
        for number, place in enumerate(episode):
            for agent in range(3):
                for takes, first in (("outgoing", number), ("arrived", number + 1)):
                    before = batch["agent_done"][place][agent]
                    before = before if takes == "arrived" else before == 3
                    for power, step in enumerate(episode[first:] if not before else []):
                        wanted[takes][place][agent] += discount**power * batch["reward"][step][agent]
                        if batch["agent_done"][step][agent]:
                            break
    for takes, expected in wanted.items():
        transform = ReturnsToGo(discount, takes=takes)  # type: ignore[arg-type]
        found = transform(batch)["return_to_go"]
        np.testing.assert_allclose(found, expected, atol=1e-12)
        np.testing.assert_array_equal(transform(as_torch(batch))["return_to_go"].numpy(), found)


@given(batch=slices(), n=st.integers(1, 4))
def test_vector_rewards_are_their_components(batch: dict[str, Any], n: int) -> None:
    rewards = np.stack([batch["reward"], -2 * batch["reward"]], axis=-1)
    team = np.ones((*batch["done"].shape, 5), int)  # agents with rewards of their team, whose episode ends with done
    for transform, name in ((NStep(n, 0.9), "reward"), (ReturnsToGo(0.9), "return_to_go")):
        whole = transform({**batch, "reward": rewards, "agent_done": team})[name]
        for number in range(2):
            np.testing.assert_array_equal(
                whole[..., number], transform({**batch, "reward": rewards[..., number]})[name]
            )


def test_flags_as_gymnasium_and_torchrl_give_them() -> None:
    reward = np.ones((1, 4, 1), np.float32)
    terminated = np.array([[0, 0, 0, 1]], bool)[..., None]
    truncated = np.array([[0, 1, 0, 0]], bool)[..., None]
    ted = {"next": {"reward": reward, "terminated": terminated, "truncated": truncated, "done": terminated | truncated}}
    found = NStep(2, 1.0)(ted)["next"]
    assert found["reward"].ravel().tolist() == [2, 1, 2, 1]
    assert NStep(2, 1.0)(ted)["discount"].shape == found["reward"].shape == (1, 4, 1)  # and not broadcast to [1, 4, 4]
    assert found["terminated"].ravel().tolist() == [False, False, True, True]
    assert found["truncated"].ravel().tolist() == [True, True, False, False]
    assert found["done"].all()
    gym = NStep(2, 1.0)({"reward": reward[..., 0], "terminated": terminated[..., 0], "truncated": truncated[..., 0]})
    np.testing.assert_array_equal(gym["terminated"], found["terminated"][..., 0])
    np.testing.assert_array_equal(gym["reward"], found["reward"][..., 0])
    batch = {"reward": np.array([[1.0, np.nan]]), "done": np.zeros((1, 2), int), "mask": np.array([[True, False]])}
    assert NStep(2, 0.5)(batch)["reward"][0, 0] == 1.0
    assert ReturnsToGo(0.5)(batch)["return_to_go"].tolist() == [[1.0, 0.0]]
    batch = {"reward": np.array([[1, 2]]), "done": np.zeros((1, 2), int)}
    assert NStep(2, 0.5)(batch)["reward"].dtype == np.float32


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NStep(0, 0.9), "NStep: n: expected an integer of at least 1"),
        (lambda: NStep(True, 0.9), "NStep: n: expected an integer of at least 1"),
        (lambda: NStep(2.0, 0.9), "NStep: n: expected an integer of at least 1"),
        (lambda: NStep(1, -0.1), "discount: expected a number from 0 to 1"),
        (lambda: NStep(1, True), "discount: expected a number from 0 to 1"),
        (lambda: ReturnsToGo(1.1), "discount: expected a number from 0 to 1"),
        (lambda: ReturnsToGo(float("nan")), "discount: expected a number from 0 to 1"),
        (lambda: ReturnsToGo("0.9"), "discount: expected a number from 0 to 1"),
        (lambda: HindsightRelabel(compute_reward=3), "compute_reward: expected a function"),
        (lambda: HindsightRelabel(compute_reward=negative_distance, strategy="past"), "strategy: expected one of"),
        (lambda: HindsightRelabel(compute_reward=negative_distance, ratio=1.5), "ratio: expected a number"),
        (lambda: HindsightRelabel(compute_reward=negative_distance, horizon=-1), "horizon: expected an integer"),
        (lambda: HindsightRelabel(compute_reward=negative_distance, takes="both"), "alignment: expected one of"),
        (
            lambda: HindsightRelabel(compute_reward=lambda a, b: a),
            r"compute_reward: expected a function of \(achieved_goal, desired_goal, batch\), found a function of "
            r"\(a, b\)",
        ),
        (
            lambda: HindsightRelabel(compute_reward=negative_distance, compute_done=lambda a: a),
            "compute_done: expected a function",
        ),
        (lambda: OnWrite(RandomTimeCrop(2)), "without random numbers"),
        (lambda: OnWrite(Cast(stored={"obs": "float16"})), r"found stored=\{'obs'.*leave OnWrite out"),
        (
            lambda: OnWrite(Compose(Cast({"a": "int8"}), Cast(stored={"obs": "float16"}))),
            r"found stored=\{'obs'.*leave OnWrite out",
        ),
        (lambda: OnWrite(OnWrite(Cast({"obs": "float16"}))), "remove one OnWrite"),
        (lambda: RandomTimeCrop(0), "length"),
        (lambda: Rename({"obs": "x", "index": "x"}), "a different name"),
        (lambda: Select(3.5), "expected names of fields"),
        (lambda: Compose(3), "expected transforms that can be called"),
        (lambda: Cast({"x": "object"}), "Cast"),
        (lambda: Cast(stored={"x": "nothing"}), "Cast"),
        (lambda: Cast(every={"float64": "str"}), "Cast"),
        (lambda: Resize(size=(2, 2)), "Resize"),
        (lambda: Resize("image", size=(0, 2)), "size"),
        (lambda: Resize("image", size=(2, 2), method="cubic"), "method"),
        (lambda: Resize("image", size=(4, 3), layout="WHC"), "layout: expected"),
        (lambda: ToFloatImage("image", layout="WHC"), "layout: expected"),
        (lambda: ToFloatImage("image", channels="middle"), "channels"),
        (lambda: ToFloatImage("image", dtype="uint8"), "dtype"),
    ],
)
def test_arguments_that_cannot_be(make: Any, says: str) -> None:
    assert_raises(ConfigError, says, make)


@given(batch=slices(), discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_returns_are_the_loop(batch: dict[str, Any], discount: float) -> None:
    wanted = np.zeros_like(batch["reward"])
    arrived = np.zeros_like(batch["reward"])
    for episode in episodes(batch):
        for number, place in enumerate(episode):
            wanted[place] = sum(discount**k * batch["reward"][step] for k, step in enumerate(episode[number:]))
            arrived[place] = sum(discount**k * batch["reward"][step] for k, step in enumerate(episode[number + 1 :]))
    np.testing.assert_allclose(ReturnsToGo(discount)(batch)["return_to_go"], wanted, atol=1e-12)
    found = ReturnsToGo(discount, takes="arrived")(batch)["return_to_go"]
    np.testing.assert_allclose(found, arrived, atol=1e-12)
    np.testing.assert_array_equal(
        ReturnsToGo(discount, takes="arrived")(as_torch(batch))["return_to_go"].numpy(), found
    )


def test_returns_of_episodes_as_they_are_written_and_batches_that_n_step_refuses() -> None:
    rows = {"reward": [4.0, 2.0, 8.0], "done": np.array([0, 0, 1]), "obs": np.zeros((3, 2))}
    written = OnWrite(ReturnsToGo(0.5)).inverse(rows)
    assert written["return_to_go"].tolist() == [7, 6, 8]
    assert written["obs"].shape == (3, 2)
    in_torch = OnWrite(ReturnsToGo(0.5)).inverse(
        {"reward": torch.tensor([4.0, 2.0, 8.0]), "done": torch.tensor([0, 0, 1])}
    )
    assert in_torch["return_to_go"].tolist() == [7, 6, 8]
    assert OnWrite(ReturnsToGo(0.5))({"reward": 1}) == {"reward": 1}
    assert_raises(SchemaError, "expected rows", OnWrite(ReturnsToGo()).inverse, {"reward": 1.0, "done": 0})
    with pytest.raises(SchemaError, match="as many rows as it receives"):
        OnWrite(NextView(takes="arrived")).inverse({**rows, "action": np.zeros(3)})
    assert OnWrite(Cast({"obs": "float16"})).inverse({"obs": np.ones(3)})["obs"].dtype == np.float16
    good = {"reward": np.zeros((1, 2)), "done": np.zeros((1, 2), int)}
    with pytest.raises(MissingFieldError, match=r"NStep: expected a field 'reward', found \['done'\]"):
        NStep(1, 0.5)({"done": good["done"]})
    with pytest.raises(MissingFieldError, match="expected a field 'done', or 'terminated' and 'truncated'"):
        NStep(1, 0.5)({"reward": good["reward"]})
    assert_raises(SchemaError, "expected slices", NStep(1, 0.5), {"reward": np.zeros(4), "done": np.zeros(4, int)})
    assert_raises(SchemaError, "'discount'", NStep(1, 0.5), {**good, "discount": np.zeros((1, 2))})


def episode_rows(random: np.random.Generator, length: int, code: int) -> tuple[dict[str, Any], dict[str, Any]]:
    obs = random.normal(size=(length + 1, 3))
    action, reward = random.integers(0, 4, length), random.normal(size=length)
    done = np.zeros(length, int)
    done[-1] = code
    arrived = {
        "obs": {"vector": obs},
        "action": np.concatenate([[0], action]),
        "reward": np.concatenate([[0], reward]),
        "done": np.concatenate([[0], done]),
    }
    following = {"obs": {"vector": obs[1:]}, "reward": reward, "done": done}
    return arrived, {"obs": {"vector": obs[:-1]}, "action": action, "next": following}


@pytest.mark.parametrize("code", [1, 2])
def test_rows_become_transitions(code: int) -> None:
    arrived, wanted = episode_rows(np.random.default_rng(0), 5, code)
    found = NextView(takes="arrived")(map_tree(lambda values: values[None], arrived))
    assert found.pop("mask").all()
    assert_equal(found, map_tree(lambda values: values[None], wanted))
    _, wanted = episode_rows(np.random.default_rng(0), 5, code)
    rows = {"obs": wanted["obs"], "action": wanted["action"], **{k: wanted["next"][k] for k in ("reward", "done")}}
    found = NextView()(map_tree(lambda values: values[None], rows))
    assert found["mask"].tolist() == [[True] * 4 + [code == 1]]
    assert found.keys() == {"obs", "action", "next", "mask"}
    np.testing.assert_array_equal(found["next"]["obs"]["vector"][0, :4], wanted["next"]["obs"]["vector"][:4])
    np.testing.assert_array_equal(found["next"]["obs"]["vector"][0, 4], rows["obs"]["vector"][4])
    np.testing.assert_array_equal(found["next"]["reward"][0], rows["reward"])
    assert_equal(map_tree(np.asarray, NextView()(as_torch(map_tree(lambda values: values[None], rows)))), found)


@pytest.mark.parametrize("takes", ["arrived", "outgoing"])
def test_what_follows_an_episode_is_no_next_observation(takes: Any) -> None:
    obs = np.arange(6.0)[None]
    batch = {"obs": obs, "reward": obs, "done": np.array([[0, 1, 0, 0, 2, 0]]), "action": obs, "index": obs[..., None]}
    found = NextView(takes=takes)(batch)
    if takes == "arrived":
        assert found["mask"].tolist() == [[True, False, True, True, False]]
        assert found["action"].tolist() == found["next"]["reward"].tolist() == [[1, 2, 3, 4, 5]]
    else:
        assert found["mask"].tolist() == [[True, True, True, True, False, False]]
        assert found["next"]["obs"].tolist() == [[1, 1, 3, 4, 4, 5]]
    assert "index" not in found["next"]


def test_n_steps_of_arrived_rows_are_those_of_transitions_and_masked_steps_are_none() -> None:
    arrived, ted = episode_rows(np.random.default_rng(1), 6, 1)
    slice_of = lambda rows: map_tree(lambda values: values[None], rows)  # noqa: E731
    direct = NStep(3, 0.9, takes="arrived")(slice_of(arrived))
    composed = Compose(NextView(takes="arrived"), NStep(3, 0.9))(slice_of(arrived))
    assert_equal(direct, composed)
    wanted = NStep(3, 0.9)(slice_of(ted))
    direct.pop("mask")
    assert_equal(direct, wanted)
    assert direct["next"]["done"].tolist() == [[0, 0, 0, 1, 1, 1]]
    batch = {"obs": np.arange(4.0)[None], "done": np.zeros((1, 4), int), "mask": np.array([[1, 1, 0, 0]], bool)}
    assert NextView()(batch)["mask"].tolist() == [[True, False, False, False]]
    assert NextView(takes="arrived")(batch)["mask"].tolist() == [[True, False, False]]
    batch = {"obs": (np.zeros((2, 3)), np.ones((2, 3))), "done": np.zeros((2, 3), int), "reward": np.ones((2, 3))}
    for transform in (Compose(NextView(), NStep(2, 0.5)), NextView(takes="arrived")):
        found = transform(batch)
        assert isinstance(found["obs"], tuple)
        assert isinstance(found["next"]["obs"], tuple)
    assert isinstance(Select("obs")(batch)["obs"], tuple)
    assert_raises(SchemaError, "all or none of the tuple 'obs'", Select(("obs", 1)), batch)
    batch = {"obs": np.zeros((2, 3)), "task": np.zeros((2, 3)), "done": np.zeros((2, 3), int), "slice": np.zeros(2)}
    found = NextView(keep=("task",), takes="arrived")(batch)
    assert found["next"].keys() == {"obs", "done"}
    assert found["task"].shape == (2, 2)
    assert found["slice"].shape == (2,)
    assert_raises(SchemaError, "expected rows without 'next'", NextView(), found)


def goal_batch(random: np.random.Generator) -> dict[str, Any]:
    done = np.array([[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 2, 0]])
    goals = {
        "observation": {"desired_goal": random.normal(size=(2, 6, 2)), "achieved_goal": random.normal(size=(2, 6, 2))}
    }
    return {
        **goals,
        "next": {
            "observation": {
                "desired_goal": goals["observation"]["desired_goal"] + 0.0,
                "achieved_goal": random.normal(size=(2, 6, 2)),
            },
            "reward": random.normal(size=(2, 6)).astype(np.float32),
            "done": done,
        },
        "mask": np.array([[True] * 6, [True] * 5 + [False]]),
    }


def negative_distance(achieved: Any, goal: Any, batch: Any) -> Any:
    return -((achieved - goal) ** 2).sum(-1)


GOALS: dict[str, Any] = {
    "goal": ("observation", "desired_goal"),
    "achieved": ("observation", "achieved_goal"),
    "strategy": "random",
}


def test_goals_at_random_are_what_was_achieved_anywhere_in_the_batch() -> None:
    batch = goal_batch(np.random.default_rng(0))
    achieved = batch["next"]["observation"]["achieved_goal"]
    places = [(0, step) for step in range(6)] + [(1, step) for step in range(5)]
    seen: dict[tuple[int, int], set[tuple[int, int]]] = {place: set() for place in places}
    transform = HindsightRelabel(compute_reward=negative_distance, ratio=0.8, **GOALS)
    for call in range(150):
        found = transform(batch, KEY.with_call(call))
        assert not found["relabelled"][1, 5]
        goal = found["observation"]["desired_goal"]
        np.testing.assert_array_equal(goal, found["next"]["observation"]["desired_goal"])
        for place in places:
            if not found["relabelled"][place]:
                np.testing.assert_array_equal(goal[place], batch["observation"]["desired_goal"][place])
                assert found["next"]["reward"][place] == batch["next"]["reward"][place]
                continue
            (source,) = zip(*np.nonzero((achieved == goal[place]).all(-1)), strict=True)
            seen[place].add((int(source[0]), int(source[1])))
            wanted = -((achieved[place] - goal[place]) ** 2).sum()
            assert found["next"]["reward"][place] == pytest.approx(wanted, rel=1e-6, abs=1e-12)
        assert found["next"]["reward"].dtype == np.float32
    assert all(sources == {*places} for sources in seen.values())


def test_relabelling_is_a_function_of_its_key_and_ratio_and_may_end_episodes() -> None:
    batch = goal_batch(np.random.default_rng(0))
    one = HindsightRelabel(compute_reward=negative_distance, **GOALS)
    assert_equal(one(batch, KEY), one(batch, KEY))
    with_torch = one(as_torch(batch), KEY)
    np.testing.assert_array_equal(
        with_torch["observation"]["desired_goal"].numpy(), one(batch, KEY)["observation"]["desired_goal"]
    )
    assert not HindsightRelabel(compute_reward=negative_distance, ratio=0.0, **GOALS)(batch, KEY)["relabelled"].any()
    every = HindsightRelabel(compute_reward=negative_distance, ratio=1.0, **GOALS)(batch, KEY)["relabelled"]
    np.testing.assert_array_equal(every, batch["mask"])
    batch = goal_batch(np.random.default_rng(0))
    for reached, done in ((1, [[1] * 6, [1] * 5 + [0]]), (0, [[0] * 6, [0, 0, 0, 0, 2, 0]])):
        found = HindsightRelabel(
            compute_reward=negative_distance,
            compute_done=lambda a, g, b, n=reached: np.full((2, 6), n),
            ratio=1.0,
            **GOALS,
        )(batch, KEY)
        assert found["next"]["done"].tolist() == done
    HindsightRelabel(compute_reward=lambda a, b, batch=None: a, compute_done=lambda *all_of_them: 0)
    HindsightRelabel(compute_reward=max)
    batch = goal_batch(np.random.default_rng(0))
    with pytest.raises(SchemaError, match="compute_reward: expected values of shape"):
        HindsightRelabel(compute_reward=lambda achieved, goal, batch: achieved, **GOALS)(batch, KEY)


def test_crops_are_uniform_over_what_is_there() -> None:
    count, length = 3000, 6
    step = np.broadcast_to(np.arange(length), (count, length))
    batch = {
        "step": step,
        "image": np.broadcast_to(step[..., None, None], (count, length, 2, 2)),
        "per": np.zeros(count),
    }
    batch["mask"] = step < np.where(np.arange(count) % 3, 6, 4)[:, None]
    batch["index"] = step
    found = RandomTimeCrop(3)(batch, KEY)
    assert found["per"].shape == (count,)
    assert found["image"].shape == (count, 3, 2, 2)
    np.testing.assert_array_equal(found["step"], found["step"][:, :1] + np.arange(3))
    assert found["mask"].all()
    whole = np.bincount(found["step"][np.arange(count) % 3 > 0, 0])
    assert len(whole) == 4
    assert ((whole - 500) ** 2 / 500).sum() < 16.3  # chi-square, 3 degrees of freedom, 0.1 %
    assert set(found["step"][np.arange(count) % 3 == 0, 0]) == {0, 1}
    assert_equal(map_tree(np.asarray, RandomTimeCrop(3)(as_torch(map_tree(np.array, batch)), KEY)), found)


def test_crops_of_slices_that_are_too_short() -> None:
    batch = {"step": np.array([[0, 1, 2, 3]]), "mask": np.array([[True, True, False, False]])}
    for call in range(10):
        found = RandomTimeCrop(3)(batch, KEY.with_call(call))
        assert found["step"].tolist() == [[0, 1, 2]]
        assert found["mask"].tolist() == [[True, True, False]]
    assert_raises(SchemaError, "expected slices of at least 5 steps, found 4", RandomTimeCrop(5), batch, KEY)
    with pytest.raises(SchemaError, match="contiguous steps"):
        RandomTimeCrop(2)({**batch, "mask": np.array([[True, False, True, False]])}, KEY)
    with pytest.raises(SchemaError, match="expected slices"):
        RandomTimeCrop(2)({"step": batch["step"], "index": np.zeros(3, int)}, KEY)


BATCH = {"obs": np.zeros((2, 3)), "next": {"obs": np.ones((2, 3)), "reward": np.zeros(2)}, "index": np.arange(2)}


def test_renaming_selecting_excluding_and_casting() -> None:
    rename = Rename({"obs": ("observation", "state"), ("next", "obs"): "next_obs"})
    found = rename(BATCH)
    assert list(flatten(found)) == [("next", "reward"), "index", ("observation", "state"), "next_obs"]
    assert found["next_obs"] is BATCH["next"]["obs"]
    assert flatten(rename.inverse(found)).keys() == flatten(BATCH).keys()
    assert flatten(rename.inverse(BATCH)).keys() == flatten(BATCH).keys()
    assert list(flatten(Rename({"obs": "index", "index": "obs"})(BATCH)["next"])) == ["obs", "reward"]
    assert Rename({"obs": "index", "index": "obs"})(BATCH)["obs"] is BATCH["index"]
    assert list(flatten(BATCH)) == ["obs", ("next", "obs"), ("next", "reward"), "index"]
    kept = Rename({("next", "done"): "done"})  # steps of TED have a done of their own at the root
    ted = {"done": np.zeros(2), "next": {"done": np.ones(2)}}
    assert flatten(kept.inverse(ted)).keys() == flatten(ted).keys()
    assert kept(Exclude("done")(ted))["done"].all()
    assert_raises(SchemaError, r"no field 'done' as the new name of \('next', 'done'\).*Exclude\('done'\)", kept, ted)
    assert Rename({"obs": "index", "index": "obs"}).inverse(BATCH)["obs"] is BATCH["index"]
    assert_raises(MissingFieldError, "Rename: expected a field 'action'", Rename({"action": "a"}), BATCH)
    assert_raises(SchemaError, "no field 'index'", Rename({"obs": "index"}), BATCH)
    assert list(flatten(Select(("next", "obs"))(BATCH))) == [("next", "obs"), "index"]
    assert list(flatten(Select("next", "obs")(BATCH))) == list(flatten(BATCH))
    assert list(flatten(Exclude("next")(BATCH))) == ["obs", "index"]
    assert list(flatten(Exclude(("next", "obs"), ("next", "reward"))(BATCH))) == ["obs", "index"]
    for transform in (Select("action"), Exclude(("next", "action"))):
        assert_raises(MissingFieldError, "expected a field", transform, BATCH)
    cast = Cast({"obs": "float32"}, stored={"obs": "float16"}, every={"float64": "float32"})
    found = cast(BATCH)
    assert {key: str(values.dtype) for key, values in flatten(found).items()} == {
        "obs": "float32", ("next", "obs"): "float32", ("next", "reward"): "float32", "index": "int64",
    }  # fmt: skip
    assert {str(values.dtype) for values in flatten(cast(as_torch(BATCH))).values()} == {"torch.float32", "torch.int64"}
    assert cast.inverse({"obs": 1.5})["obs"].dtype == np.float16
    assert cast.inverse({"obs": torch.ones(2)})["obs"].dtype == torch.float16
    with pytest.raises(DataError, match=r"Cast: 'x': expected values 0..255 that fit uint8, found 256"):
        Cast({"x": "uint8"})({"x": np.array([1, 256])})


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((84, 84, 1), (64, 64)),
        ((30, 41, 3), (21, 13)),
        ((30, 41, 3), (64, 64)),
        ((7, 5, 4), (1, 1)),
        ((7, 5, 4), (21, 13)),
    ],
)
def test_resizing_is_what_torch_and_pillow_do(shape: tuple[int, int, int], size: tuple[int, int]) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, *shape), dtype=np.uint8)
    found = Resize("image", size=size)({"image": pixels})["image"]
    assert found.shape == (2, 3, *size, shape[2])
    assert found.dtype == np.uint8
    flat = torch.from_numpy(pixels.reshape(6, *shape)).permute(0, 3, 1, 2).float()
    wanted = torch.nn.functional.interpolate(flat, size=size, mode="bilinear", antialias=True).permute(0, 2, 3, 1)
    exact = Resize("image", size=size)({"image": pixels.astype(np.float32)})["image"]
    np.testing.assert_allclose(exact.reshape(wanted.shape), wanted.numpy(), atol=1e-3)
    assert np.abs(found.reshape(wanted.shape) - wanted.numpy()).max() <= 0.501
    pillow = np.asarray(Image.fromarray(pixels[1, 2, :, :, 0]).resize(size[::-1], Image.Resampling.BILINEAR))
    assert np.abs(found[1, 2, :, :, 0].astype(int) - pillow).max() <= 1
    on_torch = Resize("image", size=size)({"image": torch.from_numpy(pixels)})["image"]
    assert np.abs(on_torch.numpy().astype(int) - found).max() <= 1
    nearest = Resize("image", size=size, method="nearest")({"image": pixels})["image"]
    wanted = torch.nn.functional.interpolate(flat, size=size, mode="nearest-exact").permute(0, 2, 3, 1)
    np.testing.assert_array_equal(nearest.reshape(wanted.shape), wanted.numpy())


def test_images_of_floats_and_what_is_no_image() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 6, 2), dtype=np.uint8)
    whole = Resize("image", size=(4, 3))({"image": pixels})["image"]
    assert Resize("image", size=(8, 6))({"image": pixels})["image"] is pixels
    floats = ToFloatImage("image", channels="first")({"image": whole})["image"]
    assert floats.shape == (2, 3, 2, 4, 3)
    np.testing.assert_array_equal(floats, np.moveaxis(whole.astype(np.float32) / 255, -1, -3))
    assert floats.flags.c_contiguous
    on_torch = ToFloatImage("image", channels="first")({"image": torch.from_numpy(whole)})["image"]
    np.testing.assert_array_equal(on_torch.numpy(), floats)
    assert ToFloatImage("image", dtype="float16")({"image": whole})["image"].dtype == np.float16
    assert_raises(SchemaError, "expected images", Resize("image", size=(2, 2)), {"image": np.zeros((3, 3))})
    with pytest.raises(SchemaError, match=r"expected whole numbers 0\.\.255, found float64"):
        ToFloatImage("image")({"image": np.zeros((3, 3, 1))})


def test_rows_that_are_trajectories_are_cropped_or_refused() -> None:
    def batch(*transform: Any, **more: Any) -> Any:
        buffer = ReplayBuffer(ArrayStorage(10), transform=[*transform], batch_size=6)
        step = np.arange(20) + 100 * np.arange(10)[:, None]
        buffer.extend(
            {"obs": step[..., None] * 1.0, "reward": step * 1.0, "done": step * 0, "action": step * 0, **more}
        )
        return buffer.sample()

    found = batch(RandomTimeCrop(8), BurnIn(lambda first: {"hidden": first["obs"].sum(axis=(1, 2))}, steps=5))
    assert found["obs"].shape == (6, 3, 1)
    np.testing.assert_array_equal(found["obs"][:, :, 0], found["reward"][:, :1] + np.arange(3))
    np.testing.assert_array_equal(found["reward"][:, 0] // 100, found["index"])
    np.testing.assert_array_equal(found["hidden"], 5 * found["reward"][:, 0] - 15)
    for transform in (NextView(), NStep(2, 0.5), CatFrames("obs", frames=2)):
        assert_raises(SchemaError, r"'done': expected one value per row.*complete trajectory", batch, transform)
    with pytest.raises(SchemaError, match=r"whole trajectories.*found first axes \[\(6,\), \(6, 20\)\]"):
        batch(RandomTimeCrop(4), score=np.zeros(10))  # these may be single steps of 20 numbers
    single = ReplayBuffer(ArrayStorage(10), transform=[NextView(), RandomTimeCrop(1), NStep(2, 0.5)], batch_size=6)
    single.extend(
        {"obs": np.zeros((10, 2)), "reward": np.zeros(10), "done": np.zeros(10, bool), "action": np.zeros(10)}
    )
    assert_raises(SchemaError, "RandomTimeCrop: expected slices, found single rows", single.sample)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize(("dtype", "pixel"), [(np.int32, 70_000), (np.int64, -1), (np.int8, -1), (np.int16, 256)])
def test_pixels_outside_their_range_are_no_floats(kind: Any, dtype: Any, pixel: int) -> None:
    pixels = np.full((2, 4, 3, 1), 100, dtype)
    assert np.asarray(ToFloatImage("image")({"image": kind(pixels)})["image"]).max() == np.float32(100 / 255)
    pixels[1, 2, 1, 0] = pixel
    with pytest.raises(DataError, match=f"'image': expected pixels 0..255, found {pixel}"):
        ToFloatImage("image", channels="first")({"image": kind(pixels)})


@pytest.mark.parametrize("method", ["bilinear", "nearest"])
@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (3, 8, 6), (5, 12, 8, 6)], ids=str)
def test_channels_first(shape: tuple[int, ...], method: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for transform in (Resize("image", size=(4, 3), method=method), ToFloatImage("image")):
        with pytest.raises(SchemaError, match=r"expected images \[..., H, W, C\] of 1 to 4 channels.*layout='CHW'"):
            transform({"image": pixels})
    last = np.ascontiguousarray(np.moveaxis(pixels, -3, -1))
    wanted = Resize("image", size=(4, 3), method=method, layout="HWC")({"image": last})["image"]
    for kind in (np.asarray, torch.from_numpy):
        found = Resize("image", size=(4, 3), method=method, layout="CHW")({"image": kind(pixels)})["image"]
        assert np.abs(np.asarray(found).astype(int) - np.moveaxis(wanted, -1, -3)).max() <= (kind is not np.asarray)
        floats = ToFloatImage("image", layout="CHW", channels="first")({"image": kind(pixels)})["image"]
        np.testing.assert_array_equal(np.asarray(floats), pixels.astype(np.float32) / 255)
        moved = ToFloatImage("image", layout="CHW")({"image": kind(pixels)})["image"]
        np.testing.assert_array_equal(np.asarray(moved), last.astype(np.float32) / 255)


def test_composing_and_the_random_numbers_of_each() -> None:
    double = Compose(lambda batch: {**batch, "x": batch["x"] * 2}, Compose(Rename({"x": "y"}), Select("y")))
    assert len(double.transforms) == 3
    assert double({"x": 2}) == {"y": 4}
    assert double.inverse({"y": 4}) == {"x": 4}
    undone = Compose(Cast(stored={"x": "int32"}), Rename({"x": "y"})).inverse({"y": np.int64(4)})
    assert undone["x"].dtype == np.int32
    calls = []

    class Drawing:
        random = True

        def __call__(self, batch: Any, key: Key) -> Any:
            calls.append(key)
            return batch

    both = Compose(Drawing(), lambda batch: batch, Drawing())
    assert both.random
    both({}, KEY)
    assert calls == [KEY, KEY.with_call(2)]
    assert_raises(ConfigError, "expected a Key", both, {})


def test_alignments_must_fit_and_next_stands_before_hindsight() -> None:
    assert delivered_alignment(NextView(takes="arrived"), "arrived") == "outgoing"
    assert delivered_alignment(ReturnsToGo(takes="arrived"), "arrived") == "arrived"
    assert delivered_alignment(lambda batch: batch, "arrived") == "arrived"
    assert delivered_alignment(None, "outgoing") == "outgoing"
    assert delivered_alignment(Compose(NextView(takes="arrived"), NStep(3, 0.9)), "arrived") == "outgoing"
    with pytest.raises(ConfigError, match="expected a transform for 'arrived' rows"):
        delivered_alignment(Compose(Select("x"), NStep(3, 0.9)), "arrived")
    with pytest.raises(ConfigError, match="expected a transform for 'outgoing' rows"):
        Compose(NextView(takes="arrived"), ReturnsToGo(takes="arrived"))
    # What the message says is right at once, and it names the one transform that is to be changed.
    storage = ArrayStorage(10, alignment="arrived")
    with pytest.raises(ConfigError, match="found NextView with takes='outgoing'; pass takes='arrived' to NextView, or"):
        ReplayBuffer(storage, transform=[NextView(), NStep(3, 0.9)])
    ReplayBuffer(storage, transform=[NextView(takes="arrived"), NStep(3, 0.9)])
    with pytest.raises(ConfigError, match="'outgoing' rows, the alignment that NextView delivers, found NStep with"):
        ReplayBuffer(storage, transform=[NextView(takes="arrived"), NStep(3, 0.9, takes="arrived")])
    relabel = HindsightRelabel(compute_reward=lambda achieved, goal, batch: np.zeros(achieved.shape[:2]))
    buffer = ReplayBuffer(ArrayStorage(9), transform=[relabel, NextView()], batch_size=2)
    goals = np.zeros((9, 2))
    buffer.extend({"achieved_goal": goals, "desired_goal": goals, "reward": goals[:, 0], "done": np.zeros(9, np.int8)})
    assert_raises(SchemaError, "HindsightRelabel adds this field: put NextView before", buffer.sample)


@pytest.mark.parametrize(
    "transform",
    [
        NStep(3, 0.9),
        NextView(takes="arrived"),
        ReturnsToGo(0.9),
        RandomTimeCrop(3),
        Rename({"a": "b"}),
        Cast({"a": "int8"}),
        Select("a"),
        Resize("a", size=(2, 2)),
        ToFloatImage("a"),
        OnWrite(ReturnsToGo()),
        Compose(NextView(), NStep(3, 0.9)),
        HindsightRelabel(compute_reward=negative_distance),
    ],
)
def test_transforms_pickle_and_show_what_they_are(transform: Any) -> None:
    again = pickle.loads(pickle.dumps(transform))
    assert again == transform
    assert repr(again) == repr(transform)
    assert " at 0x" not in repr(transform) or isinstance(transform, HindsightRelabel)


@pytest.mark.parametrize("transform", [NextView(), NStep(2, 0.5), ReturnsToGo(0.5)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("code", [3, -1])
def test_codes_of_ones_own_are_refused(transform: Any, code: int) -> None:
    """A task that was cut short would be taken for a terminal state, from which nothing is expected any more."""
    batch = {"obs": np.zeros((1, 3)), "action": np.zeros((1, 3)), "reward": np.ones((1, 3)), "done": np.zeros((1, 3))}
    transform(batch)
    batch["done"] = np.array([[0, code, 0]])
    assert_raises(DataError, rf"'done'.*expected 0 \(alive\), 1 \(terminal\) and 2 .*found {code};", transform, batch)
