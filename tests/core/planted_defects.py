"""Recordings of environments, and defects that are planted in them, one at a time."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa

from mouse_core.formats.base import RowStream

Columns = dict[str, Any]
Plant = Callable[[Columns, Any], None]

TUNED_ON = (
    "CartPole-v1",
    "Pendulum-v1",
    "LunarLander-v3",
    "FrozenLake-v1",
    "CliffWalking-v1",
    "Hopper-v5",
    "Ant-v5",
    "Humanoid-v5",
    "Swimmer-v5",
    "Reacher-v5",
    "InvertedPendulum-v5",
)
HELD_OUT = (
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
    "LunarLander-v3 continuous",
    "BipedalWalker-v3",
    "Taxi-v4",
    "Blackjack-v1",
    "HalfCheetah-v5",
    "Walker2d-v5",
    "Pusher-v5",
    "HumanoidStandup-v5",
    "InvertedDoublePendulum-v5",
)
ROWS = 6000


class Linear:
    """A linear policy, the best of a few, that stands in for one that was trained; noise on request."""

    def __init__(self, space: gymnasium.Space[Any], width: int, seed: int) -> None:
        self.space, self.random = space, np.random.default_rng(seed)
        self.size = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else int(np.prod(space.shape or ()))
        self.weights = self.random.normal(size=(self.size, width + 1)) / np.sqrt(width + 1)
        self.noise = 0.0

    def __call__(self, observation: Any) -> Any:
        seen = np.append(np.tanh(np.asarray(observation, np.float64).reshape(-1)), 1.0)
        out = self.weights @ seen
        if isinstance(self.space, gymnasium.spaces.Discrete):
            return self.space.sample() if self.random.random() < self.noise else int(out.argmax())
        out = np.tanh(out) + self.noise * self.random.normal(size=self.size)
        box: Any = self.space
        return (box.low + (box.high - box.low) * np.clip((out + 1) / 2, 0, 1)).astype(box.dtype)


def record(name: str, policy: str, *, rows: int = ROWS, seed: int = 0) -> Columns:
    """Rows as stores have them ("arrived"), of whole episodes and one that is cut off by the time limit."""
    words = name.split()
    options: dict[str, Any] = {"continuous": True} if "continuous" in words else {}
    environment = gymnasium.make(words[0], **options)
    environment.action_space.seed(seed)
    steps = _Steps(environment, seed)
    width = int(np.asarray(environment.reset(seed=seed)[0]).size)
    best = _best(steps, width, seed) if policy != "random" else None
    columns = _taken(steps, policy, best, rows)
    environment.close()
    return columns


class _Steps:
    def __init__(self, environment: gymnasium.Env[Any, Any], seed: int) -> None:
        self.environment, self.seed = environment, seed

    def episode(self, act: Callable[[Any], Any], most: int) -> list[tuple[Any, Any, float, int]]:
        self.seed += 1
        observation, _ = self.environment.reset(seed=self.seed)
        none = np.zeros_like(self.environment.action_space.sample())
        found = [(none, observation, 0.0, 0)]
        while not found[-1][3]:
            action = act(observation)
            observation, reward, terminated, truncated, _ = self.environment.step(action)
            done = 1 if terminated else 2 if truncated or len(found) >= most else 0
            found.append((action, np.array(observation), float(reward), done))
        return found


def _best(steps: _Steps, width: int, seed: int) -> Linear:
    candidates = [Linear(steps.environment.action_space, width, seed + number) for number in range(8)]
    returns = [sum(reward for _, _, reward, _ in steps.episode(one, 200)) for one in candidates]
    return candidates[int(np.argmax(returns))]


def _taken(steps: _Steps, policy: str, best: Linear | None, rows: int) -> Columns:
    taken: list[tuple[Any, Any, float, int]] = []
    places: list[int] = []
    while len(taken) < rows:
        noise = {"random": 1.0, "noisy": 0.3, "trained": 0.02, "mixed": float(len(taken) < rows / 2)}[policy]
        sample = best is None or (policy == "mixed" and noise)
        act: Any = (lambda _: steps.environment.action_space.sample()) if sample else best
        if best is not None:
            best.noise = max(noise, 0.05) if policy == "mixed" else noise
        episode = steps.episode(act, 1000)
        taken += episode
        places += range(len(episode))
    actions, observations, rewards, dones = zip(*taken, strict=True)
    seen = np.stack([np.asarray(one).reshape(-1) if np.ndim(one) else np.asarray(one) for one in observations])
    name = "observation" if seen.ndim == 2 else "observation_discrete"
    return {
        "action": np.stack(actions),
        "reward": np.array(rewards),
        "done": np.array(dones),
        "episode_step": np.array(places),
        name: seen.astype(np.float32) if seen.dtype.kind == "f" else seen,
    }


def stream(columns: Columns, **options: Any) -> RowStream:
    arrays = {}
    for name, values in columns.items():
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        for size in reversed(values.shape[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        arrays[name] = flat
    table = pa.table(arrays)
    return RowStream("planted", "datasets", table.schema, lambda: iter(table.to_batches(1024)), **options)


def _starts(columns: Columns) -> Any:
    return np.flatnonzero(columns["episode_step"] == 0)


def _halved(columns: Columns) -> Any:
    """Which rows lie in every other episode."""
    return (np.cumsum(columns["episode_step"] == 0) - 1) % 2 == 1


def _seen(columns: Columns) -> Any:
    return columns["observation"]


def _liveliest(columns: Columns) -> int:
    """A dimension that does change, in most rows."""
    values = _seen(columns)
    return int(np.argmax((np.diff(values, axis=0) != 0).mean(axis=0) * (values.std(axis=0) > 1e-6)))


def rolled(columns: Columns, by: int) -> None:
    columns["action"] = np.roll(columns["action"], by, axis=0)


def half_rolled(columns: Columns, by: int) -> None:
    half = _halved(columns)
    moved = np.roll(columns["action"], by, axis=0)
    wide = half.reshape(-1, *[1] * (columns["action"].ndim - 1))
    columns["action"] = np.where(wide, moved, columns["action"])


def on_dimension(change: Callable[[Any, float], Any], rows: Callable[[int], Any] = lambda count: slice(None)) -> Plant:
    """A defect of some rows of the liveliest dimension: its values become those of a function of all of them."""

    def plant(columns: Columns, by: float) -> None:
        values, place = _seen(columns), _liveliest(columns)
        chosen = rows(len(values))
        values[chosen, place] = np.broadcast_to(change(values[:, place], by), len(values))[chosen]

    return plant


def _second_half(count: int) -> slice:
    return slice(count // 2, None)


def _away(values: Any, by: float) -> Any:
    return np.median(values) + by * np.abs(values - np.median(values)).max()


outlier = on_dimension(_away, lambda count: count // 3)


def stuck(columns: Columns, by: float) -> None:
    values, place = _seen(columns), _liveliest(columns)
    first = len(values) // 2
    values[first : first + int(by), place] = values[first, place]


def actions_times(columns: Columns, by: float) -> None:
    columns["action"] = columns["action"] * np.float32(by)


def half_actions_times(columns: Columns, by: float) -> None:
    columns["action"] = np.where(_halved(columns)[:, None], columns["action"] * np.float32(by), columns["action"])


def saturated(columns: Columns, by: float) -> None:
    action = columns["action"]
    most = np.abs(action).max(axis=0)
    columns["action"] = np.clip(action * np.float32(by), -most, most)


def constant_action(columns: Columns, by: float) -> None:
    columns["action"][:, -1] = by


def repeated_episode(columns: Columns, by: float) -> None:
    """Every fifth episode is the one before, and a little noise."""
    random = np.random.default_rng(0)
    ends = np.append(_starts(columns), len(columns["done"]))
    pieces: list[Columns] = []
    for number in range(len(ends) - 1):
        rows = slice(ends[number], ends[number + 1])
        pieces.append({name: values[rows] for name, values in columns.items()})
        if number % 5 == 1:
            again = dict(pieces[-1])
            again["observation"] = again["observation"] + by * _seen(columns).std(axis=0) * random.normal(
                size=again["observation"].shape
            )
            again["observation"] = again["observation"].astype(_seen(columns).dtype)
            pieces.append(again)
    columns.update({name: np.concatenate([piece[name] for piece in pieces]) for name in columns})


# What is done to the rows, how much of it, and the codes of which one is found.
DEFECTS: dict[str, tuple[Plant, tuple[float, ...], set[str]]] = {
    "actions a row late": (rolled, (1,), {"misaligned-actions"}),
    "actions a row early": (rolled, (-1,), {"misaligned-actions"}),
    "actions a row late in half of the episodes": (half_rolled, (1,), {"misaligned-actions"}),
    "actions a row early in half of the episodes": (half_rolled, (-1,), {"misaligned-actions"}),
    "a dimension always 0": (on_dimension(lambda values, by: 0), (0,), {"constant-places", "drift"}),
    "a dimension 0 in the second half": (on_dimension(lambda values, by: 0, _second_half), (0,), {"drift", "stuck"}),
    "a dimension out of scale": (on_dimension(np.multiply), (1e5, 1e4, 1e-5), {"scale-apart"}),
    "a dimension out of scale in the second half": (
        on_dimension(np.multiply, _second_half),
        (1e3, 1e-3),
        {"drift", "scale-apart"},
    ),
    "a dimension moved in the second half": (
        on_dimension(lambda values, by: values + by * np.diff(np.quantile(values, [0.01, 0.99])), _second_half),
        (100, 3),
        {"drift", "scale-apart"},
    ),
    "an outlier": (outlier, (1e9, 1e3, 20), {"outlier"}),
    "outliers, one in 200 rows": (
        on_dimension(lambda values, by: _away(values, -by), lambda count: slice(7, None, 200)),
        (1e9, 1e3, 20),
        {"outlier"},
    ),
    "a dimension stuck for a while": (stuck, (1000, 200), {"stuck", "drift"}),
    "actions times 255": (actions_times, (255,), {"times-255"}),
    "actions times 255 in half of the episodes": (half_actions_times, (255,), {"scale-by-episode", "drift"}),
    "actions mostly saturated": (saturated, (100, 10), {"saturated"}),
    "an action dimension never recorded": (constant_action, (0,), {"constant-action"}),
    "episodes that repeat others nearly": (
        repeated_episode,
        (0, 1e-6, 1e-4),
        {"duplicate-episodes", "near-duplicates"},
    ),
}
