"""The index of episodes, and episodes by what is in them, against lists of rows that are looked through."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.episodes import EpisodeIndex, WindowRule
from mouse_core.errors import ConfigError, MissingFieldError
from mouse_core.replay import (
    ArrayStorage,
    HindsightRelabel,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    query,
)
from mouse_core.testing import example_store
from tests.raising import assert_raises


class Rows:
    """Every row ever written, and what follows from it by looking."""

    def __init__(self, num_envs: int, steps: int) -> None:
        self.num_envs, self.steps = num_envs, steps
        # Of each environment, for every step: whether it ends its episode, its id, whether the step before is cut off.
        self.rows: list[list[list[Any]]] = [[] for _ in range(num_envs)]

    @property
    def end(self) -> int:
        return len(self.rows[0])

    @property
    def begin(self) -> int:
        return max(0, self.end - self.steps)

    def episodes(self, env: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        begin = self.begin
        for step in range(self.begin, self.end):
            last = step + 1 == self.end
            if last or self.rows[env][step][0] or self.rows[env][step][1] != self.rows[env][step + 1][1]:
                found.append((begin, step + 1))
                begin = step + 1
        return found

    def whole_begin(self, env: int, begin: int) -> int:
        """Where the episode began of which the first step alive is this one."""
        while begin and not self.rows[env][begin - 1][0] and self.rows[env][begin - 1][1] == self.rows[env][begin][1]:
            begin -= 1
        return begin

    def windows(self, rule: WindowRule) -> list[tuple[int, int, int, int]]:
        """Environment, first step, begin and end of the episode of every window there is."""
        found = []
        for env in range(self.num_envs):
            for begin, end in self.episodes(env):
                steps = end - begin
                if rule.strict and steps < rule.length:
                    continue
                size = min(steps, rule.length)
                if rule.tiled:
                    starts = [begin + place for place in range(0, steps, rule.length)]
                    starts = [start for start in starts if not rule.strict or start + rule.length <= end]
                else:
                    whole = self.whole_begin(env, begin)
                    first = whole - min(rule.left, min(end - whole, rule.length) - 1)
                    places = [
                        place for place in range(first, end, rule.every) if place >= begin - min(rule.left, size - 1)
                    ]
                    starts = [start for start in places if start < end - size + 1 + min(rule.right, size - 1)]
                    starts = starts or ([] if rule.strict else places[:1])
                found += [(env, start, begin, end) for start in starts]
        return found


@st.composite
def rules(draw: st.DrawFn) -> WindowRule:
    length = draw(st.integers(1, 6))
    tiled = draw(st.booleans())
    side = st.just(0) if tiled else st.integers(0, length - 1)
    return WindowRule(length, draw(side), draw(side), draw(st.booleans()), tiled, every=draw(st.integers(1, 6)))


def check(episodes: EpisodeIndex, rows: Rows, rule: WindowRule) -> None:
    expected = rows.windows(rule)
    view = episodes.view(rule)
    assert view.count == len(expected)
    found = view.at(np.arange(len(expected)))
    listed = list(zip(found.env.tolist(), found.start.tolist(), found.begin.tolist(), found.end.tolist(), strict=True))
    assert listed == expected
    if not (rule.left or rule.tiled):
        for env in range(rows.num_envs):
            steps = np.arange(rows.begin, rows.end)
            whole, end, _ = episodes.episode_of(steps, env)
            begin = np.maximum(whole, rows.begin)
            begins = steps[rule.begins(steps - begin, end - begin, begin - whole)]
            assert begins.tolist() == [start for its_env, start, _, _ in expected if its_env == env]
    homes = list(dict.fromkeys((env, begin, end) for env, _, begin, end in expected))
    assert view.episode_count == len(homes)
    per_home = [[window for window in expected if (window[0], *window[2:]) == home] for home in homes]
    for place in (0.0, 0.5, 1 - 2**-53):
        chosen = view.in_episodes(np.arange(len(homes)), np.full(len(homes), place))
        listed = list(
            zip(chosen.env.tolist(), chosen.start.tolist(), chosen.begin.tolist(), chosen.end.tolist(), strict=True)
        )
        assert listed == [home[int(place * len(home))] for home in per_home]
    ids: dict[int, set[tuple[int, int, int]]] = {}
    for env, begin, end, traj_id in zip(found.env, found.begin, found.end, found.traj_id.tolist(), strict=True):
        ids.setdefault(traj_id, set()).add((int(env), int(begin), int(end)))
        if rows.rows[env][begin][1] is not None:
            assert traj_id == rows.rows[env][begin][1]
    if all(row[1] is None for env in rows.rows for row in env):
        assert all(len(homes) == 1 for homes in ids.values()), "two episodes have one id"
    longest = [end - begin for env in range(rows.num_envs) for begin, end in rows.episodes(env)]
    assert episodes.longest() == max(longest)


@given(
    data=st.data(), num_envs=st.integers(1, 3), steps=st.integers(1, 40), mode=st.sampled_from(["end", "id", "both"])
)
def test_it_knows_what_looking_at_all_rows_would_find(
    data: st.DataObject, num_envs: int, steps: int, mode: str
) -> None:
    rows, episodes = Rows(num_envs, steps), EpisodeIndex(num_envs, steps)
    bits = st.integers(0, 2**32 - 1)
    for _ in range(data.draw(st.integers(1, 8))):
        rng = np.random.default_rng(data.draw(bits))
        kind = data.draw(st.sampled_from(["one", "many", "restore"]))
        if kind in ("one", "many") or not rows.end:
            n = 1 if kind == "one" else int(rng.integers(1, steps + 1))
            for _ in range(3 if kind == "one" else 1):
                ends = rng.random((n, num_envs)) < rng.choice([0.02, 0.3, 1.0])
                last = [env[-1][1] if env and env[-1][1] is not None else 0 for env in rows.rows]
                ids = np.array(last) + np.cumsum(rng.random((n, num_envs)) < 0.2, axis=0)
                episodes.extend(None if mode == "id" else ends, None if mode == "end" else ids)
                for env in range(num_envs):
                    rows.rows[env] += [
                        [mode != "id" and bool(ends[t, env]), None if mode == "end" else int(ids[t, env])]
                        for t in range(n)
                    ]
        else:
            episodes = EpisodeIndex.of_state(episodes.state())
        check(episodes, rows, data.draw(rules()))


@pytest.mark.filterwarnings("ignore:slices")
@pytest.mark.parametrize("keys", [{}, {"end_key": "done"}, {"traj_key": "episode"}])
def test_goals_come_from_the_same_episodes_whatever_slices_are_cut_at(keys: dict[str, str]) -> None:
    rows = {"goal": np.zeros(40), "reached": np.arange(40.0), "reward": np.zeros(40)}
    rows |= {"done": np.arange(40) % 10 == 9, "episode": np.arange(40) // 5}
    relabel = HindsightRelabel(
        compute_reward=lambda reached, goal, batch: reached == goal,
        goal="goal",
        achieved="reached",
        strategy="final",
        ratio=1.0,
    )
    buffer = ReplayBuffer(ArrayStorage(40), SliceSampler(sequence_length=5, **keys), transform=relabel, batch_size=100)
    for part in range(4):
        buffer.extend({name: values[10 * part : 10 * part + 10] for name, values in rows.items()})
        batch = buffer.sample()
        new = batch["relabelled"]
        # The number of the trajectory ends an episode, too, and its last row is what was reached last.
        assert new.any()
        assert (batch["goal"][new] == batch["index"][new] // 5 * 5 + 4).all()


@pytest.mark.filterwarnings("ignore:slices")
@pytest.mark.parametrize("ids", [{}, {"traj_id": 7}], ids=["ends", "ids too"])
@pytest.mark.parametrize("kind", [SliceSampler, PrioritizedSliceSampler])
def test_an_end_that_is_set_in_place_counts(kind: Any, ids: dict[str, int]) -> None:
    buffer = ReplayBuffer(ArrayStorage(12), kind(sequence_length=3, pad=False, period=2), batch_size=64)
    for step in range(15):
        buffer.append({"x": step, "done": False, **ids})
    assert {*buffer.sample()["x"][:, 0].tolist()} == {4, 6, 8, 10, 12}
    buffer[9] = {"x": 9, "done": True, **ids}
    begins = {*buffer.sample()["x"][:, 0].tolist()}
    assert begins >= {10, 12}
    assert not begins & {8, 9}
    assert ids or begins == {4, 6, 10, 12}


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
