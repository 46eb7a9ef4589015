"""Worlds whose every value is known, and logs of what they returned: what readers are compared with, step by step."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pytest

from mouse_core.formats.base import episodes_of
from mouse_core.images import decode_image
from mouse_core.testing import FormatConformance


@dataclass
class Episode:
    """What an environment returned, in the order it did.

    Args:
        observations: T+1 of them.
        actions, rewards, terminated, truncated: T of each.
        infos: T+1 of them.
    """

    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.actions)

    def add(self, observation: Any, action: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> None:
        """Log a step."""
        self.observations.append(observation)
        self.actions.append(action)
        self.rewards.append(reward)
        self.terminated.append(terminated)
        self.truncated.append(truncated)
        self.infos.append(info)

    @property
    def done(self) -> int:
        return 1 if self.terminated[-1] else 2 if self.truncated[-1] else 0


class Counting(gymnasium.Env[Any, Any]):
    """Observations, actions and rewards that no two steps share; episode k ends after ``lengths[k]`` steps.

    Args:
        lengths: Transitions of each episode; negative: it is truncated there.
        kind: "vector", "discrete", "image" or "nested".
    """

    def __init__(self, lengths: Sequence[int] = (3,), kind: str = "vector") -> None:
        self.lengths = list(lengths)
        self.kind = kind
        self.episode = -1
        self.time = 0
        box = gymnasium.spaces.Box(-1e6, 1e6, (3,), np.float32)
        self.action_space: Any = gymnasium.spaces.Box(-1, 1, (2,), np.float64)
        self.observation_space: Any = box
        if kind == "discrete":
            self.observation_space = gymnasium.spaces.Discrete(100_000)
            self.action_space = gymnasium.spaces.Discrete(7)
        elif kind == "image":
            self.observation_space = gymnasium.spaces.Box(0, 255, (36, 40, 3), np.uint8)
            self.action_space = gymnasium.spaces.Discrete(7)
        elif kind == "nested":
            spaces = gymnasium.spaces
            arm = spaces.Dict({"angle": box, "grip": spaces.Discrete(100_000)})
            parts = spaces.Tuple((box, spaces.MultiBinary(4)))
            self.observation_space = spaces.Dict({"arm": arm, "parts": parts, "word": spaces.Text(8)})
            self.action_space = spaces.Dict({"move": self.action_space, "press": spaces.Discrete(7)})

    @property
    def _count(self) -> int:
        return self.episode * 1000 + self.time

    def _observe(self) -> Any:
        vector = np.array([self._count, self.episode, self.time], np.float32)
        if self.kind == "vector":
            return vector
        if self.kind == "discrete":
            return np.int64(self._count)
        if self.kind == "image":
            return np.random.default_rng(self._count).integers(0, 256, (36, 40, 3), np.uint8)
        return {
            "arm": {"angle": vector, "grip": np.int64(self._count)},
            "parts": (-vector, np.array([self.time >> bit & 1 for bit in range(4)], np.int8)),
            "word": f"s{self._count}",
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.time = 0
        return self._observe(), self._info()

    def _info(self) -> dict[str, Any]:
        return {"count": np.int64(self._count), "speed": np.array([self.time, 0.5], np.float64)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        length = self.lengths[self.episode % len(self.lengths)]
        over = self.time == abs(length)
        return self._observe(), self._count / 8, over and length > 0, over and length < 0, self._info()


def record(env: Any, episodes: int, *, seed: int = 0) -> Iterator[Episode]:
    """Play random episodes, and log what the environment returned."""
    env.action_space.seed(seed)
    for _ in range(episodes):
        log = Episode()
        observation, info = env.reset()
        log.observations.append(observation)
        log.infos.append(info)
        while not (log.actions and (log.terminated[-1] or log.truncated[-1])):
            action = env.action_space.sample()
            observation, reward, terminated, truncated, info = env.step(action)
            log.add(observation, action, reward, terminated, truncated, info)
        yield log


def suite(
    episodes: Sequence[tuple[int, int]], write: Callable[[Path], Path], read: Callable[..., Any], **more: Any
) -> Any:
    """The tests of a reader, by the rows and the last code of each episode, and what writes and reads a source."""
    members = {"episodes": tuple(episodes), "write": staticmethod(write), "read": staticmethod(read), **more}
    return type("Suite", (FormatConformance,), members)


def ends_of(lengths: Sequence[int], *, terminal: int = 1, truncated: int = 2) -> tuple[tuple[int, int], ...]:
    """The episodes of ``Counting``, and the codes that their two endings have in a format."""
    return tuple((abs(length) + 1, terminal if length > 0 else truncated) for length in lengths)


class Trap:
    """What runs a program where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch trapped",)


def leaves(prefix: str, value: Any) -> dict[str, Any]:
    """The names that nested values have as columns; written apart from the readers' own."""
    if not isinstance(value, dict | tuple):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: leaf for key, item in items for name, leaf in leaves(f"{prefix}.{key}", item).items()}


def check_rows(
    table: pa.Table, logs: Sequence[Episode], *, final: str | None = None, infos: str = "", reward_dtype: str = ""
) -> None:
    """Compare rows with logs, step by step: values, dtypes, ends of episodes, alignment.

    Args:
        table: The rows.
        logs: What the environment returned.
        final: How the reader dealt with final observations that the source lacks; None where it has them.
        infos: What the names of columns of infos begin with; empty where there are none.
        reward_dtype: The dtype of rewards, where it is known.
    """
    assert set(table.column_names) >= {"reward", "done", "episode_step"}
    assert table.schema.field("done").type == table.schema.field("episode_step").type == pa.int64()
    assert ("observation_missing" in table.column_names) == (final == "mark")
    rows = table.to_pylist()
    at = 0
    for number, log in enumerate(logs):
        count = len(log) + (final != "drop")
        for step in range(count):
            row, where = rows[at], f"episode {number}, step {step}"
            assert row["episode_step"] == step, where
            last = step == count - 1
            missing = final == "mark" and last
            if final == "mark":
                assert row["observation_missing"] == missing, where
            expected = (log.done if final != "drop" else 2 if count > 1 else 0) if last else 0
            assert row["done"] == expected, where
            for name, value in leaves("observation", log.observations[step]).items():
                if missing:
                    assert not np.any(np.asarray(row[name])), where
                else:
                    compare(row[name], value, f"{where}, {name}")
            if step:
                assert row["reward"] == log.rewards[step - 1], where
                for name, value in leaves("action", log.actions[step - 1]).items():
                    compare(row[name], value, f"{where}, {name}")
            else:
                assert row["reward"] == 0, where
                for name, value in leaves("action", log.actions[0]).items():
                    compare(row[name], np.zeros_like(value), f"{where}, {name}")
            if infos:
                for name, value in leaves(infos, log.infos[step]).items():
                    compare(row[name], value, f"{where}, {name}")
            at += 1
    assert at == len(rows)
    for prefix, value in (("observation", logs[0].observations[0]), ("action", logs[0].actions[0])):
        for name, leaf in leaves(prefix, value).items():
            if not isinstance(leaf, str) and not pa.types.is_struct(table.schema.field(name).type):
                assert innermost(table.schema.field(name).type) == pa.from_numpy_dtype(np.asarray(leaf).dtype), name
    if reward_dtype:
        assert table.schema.field("reward").type == pa.from_numpy_dtype(np.dtype(reward_dtype))


def compare(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, str):
        assert found == expected, where
    else:
        values = decode_image(found) if isinstance(found, dict) else np.asarray(found)
        assert np.array_equal(values, np.asarray(expected), equal_nan=True), where


def innermost(data_type: pa.DataType) -> pa.DataType:
    while pa.types.is_fixed_size_list(data_type) or pa.types.is_list(data_type):
        data_type = data_type.value_type
    return data_type


def rlds_episode(log: Episode, *, complete: bool = True) -> dict[str, Any]:
    """A log as an RLDS episode, by the letter of the format: the last step has an observation only.

    Args:
        log: The episode.
        complete: Whether its last observation is there; else the last step is the last action's.
    """
    steps = []
    for step in range(len(log) + complete):
        last = step == len(log)
        action, reward = (leaves_like(log.actions[0]), -77.0) if last else (log.actions[step], log.rewards[step])
        made = {"observation": log.observations[step], "action": action, "reward": np.float64(reward)}
        flags = {"is_first": step == 0, "is_last": last, "is_terminal": last and log.done == 1}
        steps.append({**made, "discount": np.float32(0.0 if last else 0.9), **flags})
    return {"steps": steps}


def leaves_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: leaves_like(item) for key, item in value.items()}
    return np.full_like(value, 3)


def write_minari(rows: Any, path: Path) -> Path:
    """Rows as Minari stores them in HDF5, without spaces; metadata become infos."""
    h5py = pytest.importorskip("h5py")
    (path / "data").mkdir(parents=True)
    steps = episodes = 0
    with h5py.File(path / "data" / "main_data.hdf5", "w", track_order=True) as file:
        for columns in episodes_of(rows):
            group = file.create_group(f"episode_{episodes}")
            done = columns.pop("done")[1:]
            group["rewards"] = columns.pop("reward")[1:]
            group["terminations"], group["truncations"] = done == 1, done == 2
            for name, values in columns.items():
                whole, *keys = name.split(".")
                group_of = {"observation": "observations", "action": "actions", "info": "infos"}
                place = group_of.get(whole, f"infos/{whole}")
                dtype = h5py.string_dtype() if values.dtype.kind in "OSU" else values.dtype
                values = values[1:] if whole == "action" else values
                group.create_dataset("/".join([place, *keys]), data=values, dtype=dtype, chunks=True)
            steps, episodes = steps + len(done), episodes + 1
    metadata = {"data_format": "hdf5", "total_steps": steps, "total_episodes": episodes}
    (path / "data" / "metadata.json").write_text(json.dumps(metadata))
    return path
