"""Environments that keep a log of what they were asked and answered, and rows made of such logs in plain Python.

The logs are the oracle of recorders: nothing here knows how a recorder works. What a log holds is a copy, so that an
environment that uses its arrays again cannot change it.
"""

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa

from mouse_core import DatasetStore

Row = dict[str, Any]


class Logged(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keeps a log of every episode: what ``reset`` was given and gave, then the same of every ``step``."""

    def __init__(self, env: gymnasium.Env[Any, Any], logs: list[list[Any]]) -> None:
        super().__init__(env)
        self.logs = logs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        self.logs.append([copy.deepcopy((seed, observation, info))])
        return observation, info

    def step(self, action: Any) -> Any:
        kept = copy.deepcopy(action)
        observation, reward, terminated, truncated, info = super().step(action)
        self.logs[-1].append(copy.deepcopy((kept, observation, reward, terminated, truncated, info)))
        return observation, reward, terminated, truncated, info


def named(prefix: str, value: Any) -> Row:
    """Columns of an observation or action, by the rules of the documentation."""
    if isinstance(value, dict | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: one for key, item in items for name, one in named(f"{prefix}.{key}", item).items()}
    return {prefix: value if isinstance(value, str) else np.asarray(value)}


def rows_of(log: Sequence[Any], alignment: str = "arrived", infos: Sequence[str] = (), ended: bool = True) -> list[Row]:
    """An episode's log as rows; one that was not ``ended`` says in its last row that it was truncated."""
    (seed, first, first_info), *steps = log
    seen = [(first, first_info), *((observation, info) for _, observation, _, _, _, info in steps)]
    nothing = {name: blank(value) for name, value in named("action", steps[0][0]).items()} | {"reward": 0.0, "done": 0}
    brought = [
        named("action", action) | {"reward": float(reward), "done": 1 if terminated else 2 if truncated else 0}
        for action, _, reward, terminated, truncated, _ in steps
    ]
    if alignment == "arrived":
        brought = [nothing, *brought]
    else:
        seen = seen[:-1]
    rows = [
        came
        | {"episode_step": number}
        | named("observation", observation)
        | ({"metadata_episode_seed": seed} if seed is not None else {})
        | {f"info.{name}": info.get(name) for name in infos}
        for number, (came, (observation, info)) in enumerate(zip(brought, seen, strict=True))
    ]
    if not ended:
        rows[-1]["done"] = 2
    return rows


def blank(value: Any) -> Any:
    """What stands for an action where there was none."""
    return "" if isinstance(value, str) else np.zeros_like(np.asarray(value))


def check_rows(store: DatasetStore, expected: Sequence[Row]) -> None:
    """A store holds exactly these rows, in the dtypes that they came in."""
    assert len(store) == len(expected)
    for number, row in enumerate(expected):
        found = store[number]
        assert found.keys() == row.keys() or set(found) - set(row) == {"metadata_episode_seed"}, (number, found.keys())
        for name, value in row.items():
            where = f"row {number}, {name}: {found[name]!r:.80} and {value!r:.80}"
            if isinstance(value, str) or value is None:
                assert found[name] == value, where
            else:
                assert np.array_equal(np.asarray(found[name]), np.asarray(value), equal_nan=True), where
    for name, value in expected[0].items():
        if isinstance(value, np.ndarray):
            kind = store.columns[name]
            while hasattr(kind, "value_type"):
                kind = kind.value_type
            assert kind == pa.from_numpy_dtype(value.dtype), (name, kind)
