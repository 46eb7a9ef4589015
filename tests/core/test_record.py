"""Recorders against logs kept by hand beside the environment; see `record_cases`."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pytest

from mouse_core import (
    BatchSource,
    ClosedError,
    ConfigError,
    DataError,
    DatasetStore,
    RolloutError,
    SchemaError,
    StorageError,
)
from mouse_core.files.log import MappedLog
from mouse_core.metadata import DatasetMetadata, read_metadata
from mouse_core.record import Recorder, VectorRecorder, record
from mouse_core.spec import Categorical, from_gymnasium, from_json
from tests.core.formats.recording import Counting
from tests.core.record_cases import Logged, Row, check_rows, rows_of

MODES = list(gym.vector.AutoresetMode)
LENGTHS = [3, -2, 1, -5, 4, -1]


def made(name: str) -> gym.Env[Any, Any]:
    """An environment, or a test that is skipped where its simulator is not installed."""
    if name.startswith("ALE/"):
        ale_py = pytest.importorskip("ale_py")
        gym.register_envs(ale_py)
    if name.startswith("HalfCheetah"):
        pytest.importorskip("mujoco")
        pytest.importorskip("imageio")
    return gym.make(name, max_episode_steps=10 if name.startswith("ALE/") else 30)


def play(env: Any, episodes: int, seed: int | None = 0) -> None:
    env.action_space.seed(seed)
    for episode in range(episodes):
        env.reset(seed=None if seed is None else seed + episode)
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            over = terminated or truncated


def all_rows(logs: list[list[Any]], **options: Any) -> list[Row]:
    return [row for log in logs for row in rows_of(log, **options)]


REAL = ["CartPole-v1", "LunarLander-v3", "FrozenLake-v1", "HalfCheetah-v5", "ALE/Breakout-v5"]
INFOS: dict[str, Any] = {
    "FrozenLake-v1": {"prob": "float64"},
    "HalfCheetah-v5": ["x_position", "reward_ctrl"],
    "ALE/Breakout-v5": ["lives"],
}


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
@pytest.mark.parametrize("name", REAL)
def test_rows_are_those_of_the_log(name: str, alignment: Any) -> None:
    logs: list[list[Any]] = []
    store = DatasetStore(alignment=alignment)
    infos = INFOS.get(name, [])
    play(Recorder(Logged(made(name), logs), store, infos=infos), 3)
    assert [log[1:] for log in logs if not log[1:]] == []
    check_rows(store, all_rows(logs, alignment=alignment, infos=infos))
    assert store.snapshot().alignment == store.metadata.alignment == alignment


@pytest.mark.parametrize(
    ("name", "mode"), [*(("CartPole-v1", mode) for mode in MODES), *zip(REAL[1:], MODES[::-1] * 2, strict=False)]
)
def test_rows_of_a_vector_are_those_of_the_logs(name: str, mode: Any) -> None:
    made(name).close()
    logs: list[list[list[Any]]] = [[], [], []]
    # Where an info is a whole number at first, gymnasium cuts the fractions of the others in a vector.
    infos = [] if name == "FrozenLake-v1" else INFOS.get(name, [])
    envs = gym.vector.SyncVectorEnv([lambda log=log: Logged(made(name), log) for log in logs], autoreset_mode=mode)
    store = record(envs, episodes=7, seed=5, infos=infos)
    check_vector(store, logs, episodes=7, infos=infos)


class Told(gym.Wrapper[Any, Any, Any, Any]):
    """With other infos: a whole number at first, a text, and lists of texts of which the first are empty."""

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {"lake": {"prob": 1}, "name": "a", "tags": []}

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        self.steps = getattr(self, "steps", 0) + 1
        return *result, {"lake": {"prob": 0.5}, "name": "b", "tags": [["b"] * (self.steps % 2), []][self.steps < 3]}


def test_lists_of_texts_that_are_empty_at_first() -> None:
    store = DatasetStore()
    play(Recorder(Told(Counting([8], "vector")), store, infos=["tags"]), 1, seed=None)
    assert [row["info.tags"] for row in store] == [[], [], [], ["b"], [], ["b"], [], ["b"], []]


class Frames(gym.Env[Any, Any]):
    """Observations of a dtype and a shape: at step t all of them are ``first + t``."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, dtype: Any, shape: tuple[int, ...], first: int = 0, given: Any = None) -> None:
        low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if np.dtype(dtype).kind != "f" else (-1e9, 1e9)
        self.observation_space = gym.spaces.Box(low, high, shape, dtype)
        self.first, self.given, self.steps = first, given or dtype, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.full(self.observation_space.shape, self.first, self.given), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full_like(self.observation_space.low, self.first + self.steps), 0.5, self.steps == 3, False, {}


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(("dtype", "shape", "first"), [("int64", (2,), 1764345600123456789), ("uint8", (4, 8, 8), 0)])
def test_observations_keep_their_dtype(vector: bool, dtype: str, shape: tuple[int, ...], first: int) -> None:
    store = DatasetStore()
    make = partial(Frames, dtype, shape, first)
    if vector:
        envs = gym.vector.SyncVectorEnv([make, make])
        with VectorRecorder(envs, store) as recorder:
            recorder.reset(seed=0)
            for _ in range(3):
                recorder.step(np.zeros(2, np.int64))
    else:
        record(make(), store=store, episodes=2, seed=0)
    assert [row["observation"] for row in store] == [np.full(shape, first + step).tolist() for step in range(4)] * 2
    observations = BatchSource(store, 4, 1)[0]["observation"]
    assert observations.dtype == dtype
    assert observations.shape == (1, 4, *shape)


def test_an_environment_that_begins_with_zeros_of_another_dtype() -> None:
    rows = record(Frames("float32", (2,), given="int64"), episodes=1, seed=0)
    assert rows.columns["observation"] == pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (gym.spaces.MultiDiscrete([3, 3]), np.array([0.7, 2.0])),
        (gym.spaces.MultiBinary(2), np.array([0, 256])),
        (gym.spaces.Box(-1, 1, (2,), np.float32), np.array([1e300, 0.0])),
    ],
)
def test_an_action_that_its_space_does_not_hold_is_refused(space: Any, action: Any) -> None:
    frames = Frames("float32", (2,))
    frames.action_space = space
    env = Recorder(frames, DatasetStore())
    env.reset(seed=0)
    with pytest.raises(DataError, match=r"column 'action': expected .*found"):
        env.step(action)


MASKED = np.ma.masked_array(np.zeros((8, 8), np.uint8), np.eye(8))
TOO_LARGE = [2**53 + 1, np.int64(2**60 + 1), "1.5", []]
INFOS_BEYOND = [("int32", 0.5), ("uint8", np.array([300])), ("float32", 2**53 + 1)]


@pytest.mark.parametrize(
    ("step", "options", "says"),
    [
        *(({"reward": reward}, {}, "reward: expected a number") for reward in TOO_LARGE),
        *(({"info": {"x": value}}, {"infos": {"x": dtype}}, "info 'x': expected") for dtype, value in INFOS_BEYOND),
        *(({"observation": MASKED}, {"images": images}, r"observation.*masked") for images in ("raw", "png")),
    ],
)
def test_a_step_that_its_columns_do_not_hold_is_refused(step: Any, options: Any, says: str) -> None:
    env = Recorder(Frames("uint8", (8, 8)), DatasetStore(), **options)
    given = {"observation": np.zeros((8, 8), np.uint8), "reward": 0.0, "info": {}, **step}
    env.env.step = lambda _: (given["observation"], given["reward"], False, False, given["info"])  # type: ignore[method-assign]
    env.reset(seed=0)
    with pytest.raises(DataError, match=says):
        env.step(0)


class Team(gym.Env[Any, Any]):
    """Two agents: the first terminates after two steps, the second after `length` steps, or is truncated there."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2, 3), np.float32)
    action_space = gym.spaces.MultiDiscrete([4, 4])

    def __init__(self, length: int = 4, sticky: bool = True, cut: bool = False, flags: Any = np.array) -> None:
        self.length, self.sticky, self.cut, self.flags = length, sticky, cut, flags

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros((2, 3), np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        first = self.time >= 2 if self.sticky else self.time == 2
        last = self.time == self.length
        ends = [first, last and not self.cut], [False, last and self.cut]
        observation = np.full((2, 3), self.time, np.float32)
        return observation, np.array([self.time, -self.time]), *map(self.flags, ends), {}


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
@pytest.mark.parametrize(("sticky", "cut"), [(True, False), (False, True)])
@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
def test_agents_that_end_one_by_one(
    alignment: Any, sticky: bool, cut: bool, on_interrupted: str, tmp_path: Path
) -> None:
    with DatasetStore.open(tmp_path / "store", "a", alignment=alignment) as store:
        record(Team(sticky=sticky, cut=cut), episodes=2, seed=0, store=store, on_interrupted=on_interrupted)
        with Recorder(Team(sticky=sticky, cut=cut), store, on_interrupted=on_interrupted) as env:
            env.reset(seed=2)
            for _ in range(3):
                env.step(np.zeros(2, int))
        rows = store[:]
    nothing = [([0, 0], [0, 0], 0)] if alignment == "arrived" else []
    last = ([4, -4], [3, 2 if cut else 1], 2 if cut else 1)
    whole = [*nothing, ([1, -1], [0, 0], 0), ([2, -2], [1, 0], 0), ([3, -3], [3, 0], 0), last]
    broken = [*whole[:-2], ([3, -3], [3, 2], 2)] if on_interrupted == "mark" else []
    assert [(row["reward"], row["agent_done"], row["done"]) for row in rows] == [*whole, *whole, *broken]
    assert [row["episode_step"] for row in rows[: len(whole)]] == [*range(len(whole))]
    batch = BatchSource(store, None, 16, transitions=True)[0]
    for reward, agents, before in zip(batch["reward"], batch["agent_done"], batch["observation"], strict=True):
        assert reward[0] == before[0, 0] + 1
        assert (reward.tolist(), agents.tolist()) in [one[:2] for one in (*whole, *broken)]


@pytest.mark.parametrize("flags", [lambda one: dict(enumerate(one)), lambda one: [*one, True], any])
def test_flags_that_change_their_kind_are_refused(flags: Any) -> None:
    """No flags at all, another number of agents, and flags of agents behind a flag of the episode."""
    team = Team()
    with Recorder(team, DatasetStore()) as env:
        env.reset(seed=0)
        team.flags = any if flags is any else np.array
        env.step(np.zeros(2, int))
        team.flags = np.array if flags is any else flags
        with pytest.raises(DataError, match="terminated, truncated: expected one flag, or a flag for each agent"):
            env.step(np.zeros(2, int))


@pytest.mark.parametrize("mode", MODES)
def test_vector_rewards_of_a_vector(mode: Any) -> None:
    class Objectives(Counting):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, np.array([reward, -reward]), *rest

    class Envs(gym.vector.SyncVectorEnv):
        """As those of mo-gymnasium: rewards `[N, K]`."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._rewards = np.zeros((self.num_envs, 2))

    store, single = DatasetStore(), DatasetStore()
    for rows, env in ((store, Objectives), (single, Counting)):
        envs = (Envs if env is Objectives else gym.vector.SyncVectorEnv)(
            [lambda env=env: env(LENGTHS)] * 2, autoreset_mode=mode
        )  # type: ignore[misc]
        record(envs, episodes=5, seed=0, store=rows)
    rewards = [row["reward"] for row in single[:]]
    assert [row["reward"] for row in store[:]] == [[reward, -reward] for reward in rewards]
    assert BatchSource(store, 2, 3)[0]["reward"].shape == (3, 2, 2)


@pytest.mark.parametrize("key", ["image", "discrete", "missing"])
@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        gym.spaces.Box(0, 1, (8, 8, 3), np.float32),
        gym.spaces.Box(0, 255, (4, 8, 8), np.uint8),
        gym.spaces.Discrete(4),
        gym.spaces.Box(-1, 1, (3,), np.float32),
    ],
)
def test_parts_keep_their_names_dtypes_and_shapes(key: str, space: Any) -> None:
    env = Frames("uint8", (2,))
    env.observation_space = gym.spaces.Dict({key: space})
    env.reset = lambda **_: (env.observation_space.sample(), {})  # type: ignore[method-assign]
    env.step = lambda _: (env.observation_space.sample(), 0.0, True, False, {})  # type: ignore[method-assign]
    store = record(env, episodes=2)
    column = f"observation.{key}"
    assert [name for name in store.columns if name.startswith("observation")] == [column]
    values = BatchSource(store, 2, 2)[0][column]
    assert values.dtype == space.dtype
    assert values.shape == (2, 2, *space.shape)


def test_rows_added_to_a_dataset_of_mouse_keep_its_fields() -> None:
    columns: dict[str, Any] = {"action": [0, 1], "reward": [0.0, 1.0], "done": [0, 1], "episode_step": [0, 1]}
    columns["observation"] = [[0.5] * 4] * 2
    store = DatasetStore().from_dataset(pa.table(columns))
    fields = list(BatchSource(store, 2, 1).spec)
    record("CartPole-v1", episodes=1, store=store)
    assert list(BatchSource(store, 2, 1).spec) == fields
    assert BatchSource(store, 2, 1, layout="stored")[0]["observation"].shape == (1, 2, 4)


def check_vector(store: DatasetStore, logs: list[list[list[Any]]], *, episodes: int, infos: Any = ()) -> None:
    """The store has the episodes that began first, each once and whole, whatever their order."""
    table = store.episodes
    assert table.num_rows == episodes
    played: dict[str, list[list[Row]]] = {}
    for rows in (rows_of(log, infos=infos) for several in logs for log in several if len(log) > 1):
        if rows[-1]["done"]:
            played.setdefault(key_of(rows), []).append(rows)
    found = []
    for start, length in zip(table["start"].to_pylist(), table["length"].to_pylist(), strict=True):
        found += played[key_of(store[start : start + length])].pop()
    check_rows(store, found)


def key_of(rows: list[Row]) -> str:
    """What tells an episode from others: its rewards and actions, and the sums of its observations."""
    names = sorted(name for name in rows[0] if name.startswith(("observation", "action")))
    numbers = [name for name in names if not isinstance(rows[0][name], str)]
    sums = [[float(np.asarray(row[name], np.float64).sum()) for row in rows] for name in numbers]
    return repr(([row["reward"] for row in rows], sums))


@pytest.mark.parametrize("kind", ["vector", "discrete", "image", "nested"])
@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
def test_every_kind_of_space(kind: str, alignment: Any, on_interrupted: str) -> None:
    logs: list[list[Any]] = []
    store = DatasetStore(alignment=alignment)
    env = Recorder(Logged(Counting(LENGTHS, kind), logs), store, on_interrupted=on_interrupted, infos=["count"])
    play(env, len(LENGTHS), seed=None)
    check_rows(store, all_rows(logs, alignment=alignment, infos=["count"]))
    assert [abs(length) for length in LENGTHS] == [len(log) - 1 for log in logs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["vector", "discrete", "image", "nested"])
def test_every_kind_of_space_in_a_vector(kind: str, mode: Any) -> None:
    logs: list[list[list[Any]]] = [[], []]
    worlds = [Counting(LENGTHS, kind), Counting([-3, 2, 6, 1], kind)]
    worlds[1].episode = 11  # of which the other sees nothing
    envs = gym.vector.SyncVectorEnv(
        [lambda pair=pair: Logged(*pair) for pair in zip(worlds, logs, strict=True)], autoreset_mode=mode
    )
    store = record(envs, episodes=9, infos=["count", "speed"])
    check_vector(store, logs, episodes=9, infos=["count", "speed"])


def test_a_vector_in_other_processes(tmp_path: Path) -> None:
    """Where observations lie in memory that is used again, and final ones come through a pipe."""
    envs = gym.make_vec(
        "CartPole-v1", 2, vectorization_mode="async", vector_kwargs={"autoreset_mode": "SameStep", "copy": False}
    )
    store = record(envs, lambda observations: np.array([0, 1]), episodes=4, seed=2)
    envs.close()
    alone = DatasetStore()
    for seed, action in ((2, 0), (3, 1)):
        env = Recorder(gym.make("CartPole-v1"), alone)
        env.reset(seed=seed)
        while not any(env.step(action)[2:4]):
            pass
    firsts = [row for row in range(4) if store.episodes["metadata_episode_seed"][row].as_py() is not None]
    assert len(firsts) == 2
    for number, seed in enumerate((2, 3)):
        here = store.where(metadata_episode_seed=seed)
        there = alone.where(metadata_episode_seed=seed)
        assert here[:] == there[:], number


def test_pictures_as_png() -> None:
    logs: list[list[Any]] = []
    raw, png = DatasetStore(), DatasetStore()
    play(Recorder(Logged(Counting([3, -2], "image"), logs), raw), 2, seed=1)
    play(Recorder(Counting([3, -2], "image"), png, images="png"), 2, seed=1)
    assert str(png.columns["observation"]).startswith("struct<bytes: binary")
    pixels = [
        BatchSource(store, sequence_length=7, batch_size=1, sampling="last")[0]["observation"] for store in (raw, png)
    ]
    assert np.array_equal(*pixels)
    assert pixels[0].dtype == np.uint8


def test_parts_of_nested_spaces_are_fields() -> None:
    store = DatasetStore()
    play(Recorder(Counting([4, 4], "nested"), store), 2)
    batch = BatchSource(store, sequence_length=5, batch_size=2)[0]
    assert {name: values.shape[2:] for name, values in batch.items()} == {
        "reward": (),
        "done": (),
        "time": (),
        "observation.arm.angle": (3,),
        "observation.arm.grip": (),
        "observation.parts.0": (3,),
        "observation.parts.1": (4,),
        "action.move": (2,),
        "action.press": (),
    }
    again = DatasetStore().from_dataset(store.to_dataset())
    assert BatchSource(again, sequence_length=5, batch_size=2)[0].keys() == batch.keys()


def test_what_was_recorded_travels(tmp_path: Path) -> None:
    store = record("CartPole-v1", episodes=2, seed=0)
    (said,) = store.metadata.recordings
    assert (said.environment, said.policy) == ("CartPole-v1", "random")
    assert said.spec["max_episode_steps"] == 500
    assert from_json(said.action_space) == Categorical(2)
    assert from_json(said.observation_space) == from_gymnasium(gym.make("CartPole-v1").observation_space)
    assert {"gymnasium", "numpy", "python"} <= said.versions.keys()
    assert store.metadata.environments == ("CartPole-v1",)
    assert store.metadata.max_action_dim == 2
    assert DatasetMetadata.from_json(store.metadata.to_json()) == store.metadata

    store.to_dataset().to_parquet(tmp_path / "rows.parquet")
    import datasets

    loaded = datasets.load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"), split="train")
    assert read_metadata(loaded).recordings == (said,)
    assert DatasetStore().from_dataset(loaded).metadata.recordings == (said,)
    assert store.metadata.to_json()["version"] == 1


def test_the_same_recording_is_said_once() -> None:
    store = DatasetStore()
    for seed in (0, 0, 1):
        record("CartPole-v1", episodes=1, seed=seed, store=store)
    record("CartPole-v1", lambda observation: 0, episodes=1, store=store, name="left")
    assert [item.policy for item in store.metadata.recordings] == ["random", "left"]
    assert store.metadata.environments == ("CartPole-v1",)


def test_seeds_give_the_episodes_again() -> None:
    store = record("CartPole-v1", lambda observation: int(observation[2] > 0), episodes=5, seed=10)
    assert store.episodes["metadata_episode_seed"].to_pylist() == [10, 11, 12, 13, 14]
    again = record("CartPole-v1", lambda observation: int(observation[2] > 0), episodes=1, seed=13)
    assert again[:] == store.where(metadata_episode_seed=13)[:]
    assert record("CartPole-v1", episodes=3, seed=4)[:] == record("CartPole-v1", episodes=3, seed=4)[:]


@pytest.mark.parametrize("alignment", ["arrived", "outgoing"])
@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
@pytest.mark.parametrize("how", ["reset", "close", "interrupt"])
def test_an_episode_that_is_broken_off(how: str, on_interrupted: str, alignment: Any) -> None:
    logs: list[list[Any]] = []
    store = DatasetStore(alignment=alignment)
    env = Recorder(Logged(Counting([9, 2]), logs), store, on_interrupted=on_interrupted)
    env.reset()
    for _ in range(4):
        env.step(env.action_space.sample())
    getattr(env, how)()
    if how == "close":
        assert len(store) == (len(rows_of(logs[0], alignment)) if on_interrupted == "mark" else 0)
        return
    play(env, 1, seed=None)  # the reset in here leaves an episode behind that has no transition
    kept = rows_of(logs[0], alignment, ended=False) if on_interrupted == "mark" else []
    check_rows(store, kept + rows_of(logs[-1], alignment))


@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
def test_episodes_of_a_vector_that_are_broken_off(on_interrupted: str) -> None:
    logs: list[list[list[Any]]] = [[], []]
    lengths = iter([[2, 9], [5]])
    envs = VectorRecorder(
        gym.vector.SyncVectorEnv([lambda log=log: Logged(Counting(next(lengths)), log) for log in logs]),
        store := DatasetStore(),
        on_interrupted=on_interrupted,
    )
    envs.reset()
    for _ in range(4):
        envs.step(envs.action_space.sample())
    envs.close()
    whole, broken, other = rows_of(logs[0][0]), rows_of(logs[0][1], ended=False), rows_of(logs[1][0], ended=False)
    check_rows(store, whole + (broken + other if on_interrupted == "mark" else []))


class Ending(gym.Wrapper[Any, Any, Any, Any]):
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_a_store_that_is_closed_first_has_what_was_recorded(kind: str, on_interrupted: str, tmp_path: Path) -> None:
    logs: list[list[list[Any]]] = [[], []]
    worlds = [Ending(Logged(Counting([9]), log)) for log in logs]
    count = 1 if kind == "single" else 2
    env: Any
    with suppress(KeyboardInterrupt), DatasetStore.open(tmp_path, "a") as store:
        if kind == "single":
            env = Recorder(worlds[0], store, on_interrupted=on_interrupted)
        else:
            envs = gym.vector.SyncVectorEnv([lambda one=one: one for one in worlds])
            env = VectorRecorder(envs, store, on_interrupted=on_interrupted)
        env.reset()
        for _ in range(4):
            env.step(env.action_space.sample())
        raise KeyboardInterrupt
    for _ in range(2):
        env.close()
    assert all(world.closed for world in worlds[:count])
    kept = [row for (log,) in logs[:count] for row in rows_of(log, ended=False)] if on_interrupted == "mark" else []
    reader = DatasetStore.open(tmp_path)
    assert len(reader) == len(kept)
    if kept:
        check_rows(reader, kept)


def test_what_a_closed_store_does_not_take_waits_for_the_next_recorder(tmp_path: Path) -> None:
    log: list[Any] = []
    world = Ending(Logged(Counting([9]), log))
    with DatasetStore.open(tmp_path, "a") as store:
        env: Any = Recorder(world, store)
    env.reset()
    env.step(env.action_space.sample())
    with pytest.raises(ClosedError, match="expected an open store"):
        env.close()
    assert world.closed == 1
    env.close()  # nothing waits any more
    with DatasetStore.open(tmp_path, "a") as store:
        Recorder(Counting([9]), store).close()
        check_rows(store, rows_of(log[0], ended=False))


def test_recorders_are_closed_at_the_end_of_a_with_block(tmp_path: Path) -> None:
    worlds = [Ending(Counting([9])) for _ in range(2)]
    with DatasetStore.open(tmp_path, "a") as store:
        with Recorder(worlds[0], store) as env:
            env.reset()
            env.step(env.action_space.sample())
        with VectorRecorder(gym.vector.SyncVectorEnv([lambda: worlds[1]]), store) as envs:
            envs.reset()
            envs.step(envs.action_space.sample())
        assert [world.closed for world in worlds] == [1, 1]
        assert [row["done"] for row in store] == [0, 2, 0, 2]


@pytest.mark.parametrize("vector", [False, True])
def test_readers_see_episodes_while_others_are_recorded(vector: bool, tmp_path: Path) -> None:
    envs = [Counting(lengths) for lengths in ([3, 2, 4], [5, 3, 2])]
    env: Any = gym.vector.SyncVectorEnv([lambda: envs[0], lambda: envs[1]]) if vector else envs[0]
    seen = []

    with DatasetStore.open(tmp_path, "a") as store:

        def policy(observation: Any) -> Any:
            reader = DatasetStore.open(tmp_path)
            seen.append(reader.episodes["done"].to_pylist() if len(reader) else [])
            return env.action_space.sample()

        record(env, policy, episodes=3, store=store)
        at_the_end = DatasetStore.open(tmp_path)
        assert at_the_end[:] == store[:]
        assert at_the_end.episodes.num_rows == 3
    whole = [done for episodes in seen for done in episodes]
    assert whole
    assert 0 not in whole


def test_what_a_policy_raises_leaves_whole_episodes() -> None:
    asked = 0

    def policy(observation: Any) -> int:
        nonlocal asked
        asked += 1
        if asked > 30:
            raise KeyboardInterrupt
        return asked % 2

    store = DatasetStore()
    with pytest.raises(KeyboardInterrupt):
        record("CartPole-v1", policy, episodes=50, store=store, seed=0)
    assert len(store) == 30 + store.episodes.num_rows
    assert store.episodes["done"].to_pylist()[-1] == 2


def test_what_cannot_be_recorded_is_refused() -> None:
    cart, deep, twice = gym.make("CartPole-v1"), Counting(), Counting()
    deep.observation_space = gym.spaces.Dict({"a": gym.spaces.Sequence(gym.spaces.Discrete(3))})
    twice.observation_space = gym.spaces.Dict({"a.b": gym.spaces.Text(3), "a": gym.spaces.Dict(b=gym.spaces.Text(3))})
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: Recorder(3, DatasetStore()), r"expected gymnasium\.Env or dm_env\.Environment, found int"),
        (lambda: Recorder(gym.make_vec("CartPole-v1", 2), DatasetStore()), "VectorRecorder records a gymnasium"),
        (lambda: VectorRecorder(cart, DatasetStore()), "Recorder records one environment"),
        (lambda: Recorder(cart, []), "expected a DatasetStore or a StoreClient, found list"),  # type: ignore[arg-type]
        (lambda: Recorder(cart, DatasetStore(), infos="x_position"), "infos: expected names of infos, found 'x_pos"),
        (lambda: Recorder(cart, DatasetStore(), images="jpeg"), "images: expected one of"),
        (lambda: Recorder(cart, DatasetStore(), on_interrupted="keep"), "on_interrupted: expected one of"),
        (lambda: record("CartPole-v77", episodes=1), "expected the id of an environment, found 'CartPole-v77'"),
        (lambda: record("CartPole-v1", episodes=0), "episodes: expected an integer of at least 1, found 0"),
        (lambda: Recorder(deep, DatasetStore()), r"space/a: expected one of .*, found Sequence"),
        (
            lambda: Recorder(twice, DatasetStore()),
            "observation.a.b: when keys are joined by '.', two parts of a step get this name",
        ),
    ]
    for make, says in refused:
        with pytest.raises(ConfigError, match=says):
            make()


def test_a_store_of_something_else_is_refused_and_stays_as_it_was() -> None:
    store = DatasetStore(max_action_dim=2)
    record("CartPole-v1", episodes=1, store=store)
    rows, metadata = len(store), store.metadata
    with pytest.raises(SchemaError, match="max_action_dim: expected at least 4"):
        Recorder(gym.make("LunarLander-v3"), store)
    assert (len(store), store.metadata) == (rows, metadata)
    other = record("CartPole-v1", episodes=1)
    found = r"found 2 in the rows before \(CartPole-v1\) and 3 in describe \(Acrobot-v1\)"
    with pytest.raises(SchemaError, match=found):
        Recorder(gym.make("Acrobot-v1"), other)
    env = Recorder(Counting([2], "vector"), other)
    with pytest.raises(DataError):
        play(env, 1)
    assert len(other.episodes) == 1


def test_steps_out_of_turn_are_refused() -> None:
    env = Recorder(Counting([2]), store := DatasetStore())
    with pytest.raises(RolloutError, match=r"expected reset\(\) before step\(\)"):
        env.step(env.action_space.sample())
    play(env, 1)
    with pytest.raises(RolloutError, match=r"expected reset\(\) before step\(\)"):
        env.step(env.action_space.sample())
    assert len(store) == 3


@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
def test_several_recorders_add_whole_episodes_to_one_store(on_interrupted: str) -> None:
    store = DatasetStore()
    whole = [Recorder(Counting([length]), store, on_interrupted=on_interrupted) for length in (5, 3)]
    for env in whole:
        env.reset()
    for _ in range(3):
        for env in whole:
            env.step(env.action_space.sample())
    for _ in range(2):
        whole[0].step(whole[0].action_space.sample())
    assert store.episodes["length"].to_pylist() == [4, 6]


@pytest.mark.parametrize("on_interrupted", ["mark", "cut"])
def test_rows_wait_while_the_store_cannot_be_written(on_interrupted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: what could not be written is written later, and nothing is missing between."""
    logs: list[list[Any]] = []
    store = DatasetStore()
    full = 0

    def failing(write: Callable[[Any], None]) -> Callable[[Any], None]:
        def tried(rows: Any) -> None:
            nonlocal full
            full += 1
            if full % 3 == 1:
                raise OSError(28, "No space left on device")
            write(rows)

        return tried

    for name in ("append", "extend"):
        monkeypatch.setattr(store, name, failing(getattr(store, name)))
    sink = Recorder(Logged(Counting([6, 6]), logs), store, on_interrupted=on_interrupted)
    for _ in range(2):
        sink.reset()
        over = False
        while not over:
            try:
                *_, terminated, truncated, _ = sink.step(sink.action_space.sample())
                over = terminated or truncated
            except OSError:
                over = len(logs[-1]) == 7
    sink.close()
    assert full
    check_rows(store, all_rows(logs))


def test_rows_wait_while_the_recording_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[list[Any]] = []
    tries = 0
    append = MappedLog.append

    def failing(log: MappedLog, record: bytes) -> None:
        nonlocal tries
        tries += 1
        if tries % 3 == 1:
            raise StorageError(28, "No space left on device")
        append(log, record)

    monkeypatch.setattr(MappedLog, "append", failing)
    with DatasetStore.open(tmp_path / "store", "a") as store:
        env = Recorder(Logged(Counting([6, 1, 6]), logs), store)
        for _ in range(4):
            over = True
            while over:
                with suppress(StorageError):
                    env.reset()
                    over = False
            while not over:
                try:
                    *_, terminated, truncated, _ = env.step(env.action_space.sample())
                    over = terminated or truncated
                except StorageError:
                    over = logs[-1][-1][3] or logs[-1][-1][4]
        over = True
        while over:
            with suppress(StorageError):
                env.close()
                over = False
        check_rows(store, all_rows(logs))
    assert not list((tmp_path / "store" / "recording").glob("*"))


def test_an_environment_of_dm_env() -> None:
    dm_env = pytest.importorskip("dm_env")

    class Walk(dm_env.Environment):  # type: ignore[misc, name-defined]
        """Terminal after four steps, truncated after three in every other episode."""

        def __init__(self) -> None:
            self.episode, self.time, self.log = -1, 0, []

        def reset(self) -> Any:
            self.episode, self.time = self.episode + 1, 0
            self.log.append([(None, self._see(), {})])
            return dm_env.restart(self._see())

        def step(self, action: Any) -> Any:
            if self.log and len(self.log[-1]) > (4 - self.episode % 2):
                return self.reset()
            self.time += 1
            over = self.time == 4 - self.episode % 2
            end = over and self.episode % 2 == 0
            self.log[-1].append((np.array(action), self._see(), self.time / 4, end, over and not end, {}))
            if end:
                return dm_env.termination(self.time / 4, self._see())
            return (dm_env.truncation if over else dm_env.transition)(self.time / 4, self._see())

        def _see(self) -> Any:
            return {"place": np.array([self.time, self.episode], np.float64), "code": np.int32(self.time)}

        def observation_spec(self) -> Any:
            place = dm_env.specs.Array((2,), np.float64)
            return {"place": place, "code": dm_env.specs.DiscreteArray(5, np.int32)}

        def action_spec(self) -> Any:
            return dm_env.specs.BoundedArray((2,), np.float32, -1, 1)

    walk = Walk()
    env = Recorder(walk, store := DatasetStore())
    assert isinstance(env, dm_env.Environment)
    env.reset()
    for number in range(17):  # which begins episodes by itself
        env.step(np.float32([number, 0.5]))
    check_rows(store, all_rows(walk.log[:-1]) + rows_of(walk.log[-1])[: len(store) - len(all_rows(walk.log[:-1]))])
    assert store.metadata.recordings[0].environment == "Walk"
    recorded = record(Walk(), lambda observation: np.zeros(2), episodes=3)
    assert recorded.episodes["done"].to_pylist() == [1, 2, 1]


def test_a_task_of_dm_control() -> None:
    suite = pytest.importorskip("dm_control.suite")
    store = record(
        suite.load("cartpole", "swingup", task_kwargs={"random": 0}), lambda observation: np.zeros(1), episodes=1
    )
    assert len(store) == 1001
    assert store[-1]["done"] == 2
    assert len(store[0]["observation.position"]) == 3
