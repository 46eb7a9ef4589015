"""What the LunarLander examples share: recording, playing, progress bars and the plot.

Nothing here knows PyTorch or JAX. A policy is any function from observations to actions in NumPy, so
that every example records the same steps and is judged by the same episodes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

try:
    import gymnasium as gym
    import matplotlib
    from gymnasium.envs.box2d.lunar_lander import heuristic
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:
    raise SystemExit(f"lunar_lander.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core import DatasetStore
from mouse_core.record import Recorder

ENVIRONMENT = "LunarLander-v3"
OBSERVATION_SIZE = 8  # position, velocity, angle, angular velocity, and whether each leg touches the ground
ACTIONS = 4  # nothing, left engine, main engine, right engine

#: How often the recorded pilot acts at random; episodes take these in turn.
NOISE_LEVELS = (0.0, 0.2, 0.6)

Policy = Callable[[NDArray[np.float32]], NDArray[np.integer[Any]]]
T = TypeVar("T")


def fly(environment: gym.Env[Any, Any], *, noise: float, seed: int) -> None:
    """Fly one episode with gymnasium's own heuristic pilot.

    Args:
        environment: a discrete LunarLander; a ``Recorder`` writes down every step.
        noise: probability of a uniformly random action instead of the pilot's.
        seed: of the terrain and of the noise; the same seed gives the same episode.
    """
    random = np.random.default_rng([seed, 1])  # not the environment's own stream, which starts from `seed`
    observation, _ = environment.reset(seed=seed)
    over = False
    while not over:
        if random.random() < noise:
            action = int(random.integers(ACTIONS))
        else:
            action = int(heuristic(environment, observation))  # type: ignore[no-untyped-call]
        observation, _, terminated, truncated, _ = environment.step(action)
        over = terminated or truncated


def record(*, episodes: int, seed: int) -> DatasetStore:
    """Record episodes of gymnasium's own pilot, who acts at random now and then."""
    store = DatasetStore()
    environment = Recorder(gym.make(ENVIRONMENT), store, policy="heuristic, with noise")
    for episode in progress(range(episodes), description="recording", total=episodes):
        fly(environment, noise=NOISE_LEVELS[episode % len(NOISE_LEVELS)], seed=seed * episodes + episode)
    environment.close()
    return store


def play(policy: Policy, *, episodes: int, seed: int) -> NDArray[np.float64]:
    """Play whole episodes side by side and return what each earned.

    Args:
        policy: called once a step with the observations of all episodes, float32 [episodes, 8]; returns
            their actions, integers [episodes]. Episodes keep their place, so a policy may keep a state
            for each; what it answers for an episode that has ended is ignored.
        episodes: how many.
        seed: episode i is seeded with ``seed + i``.

    Returns:
        The undiscounted return of each episode, float64 [episodes].
    """
    environments = gym.make_vec(ENVIRONMENT, num_envs=episodes, vectorization_mode="sync")
    observations, _ = environments.reset(seed=seed)
    returns = np.zeros(episodes)
    playing = np.ones(episodes, dtype=bool)
    while playing.any():
        observations, rewards, terminated, truncated, _ = environments.step(policy(observations))
        returns += np.where(playing, rewards, 0.0)
        playing &= ~(terminated | truncated)
    environments.close()
    return returns


def progress(items: Iterable[T], *, description: str, total: int) -> Iterator[T]:
    """Yield the items under a progress bar, which is drawn only where standard output is a terminal."""
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
        yield from bar.track(items, total=total, description=description)


def save_plot(path: Path, *, returns: Mapping[str, ArrayLike], losses: Mapping[str, ArrayLike]) -> None:
    """Draw the returns of episodes beside the loss curves and save the picture.

    Args:
        path: of the image; its suffix decides the format.
        returns: by name of who played, the return of each episode.
        losses: by name of the curve, the loss at each training step.
    """
    matplotlib.use("Agg")  # draws into files, and needs no screen
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.set(title="Return of each episode", ylabel="return")
    left.boxplot([np.asarray(values) for values in returns.values()], showfliers=False, widths=0.6)
    left.set_xticks(range(1, len(returns) + 1), list(returns))
    jitter = np.random.default_rng(0)  # only moves dots sideways, so that they do not hide each other
    for place, values in enumerate(returns.values(), start=1):
        heights = np.asarray(values)
        left.plot(place + jitter.uniform(-0.2, 0.2, len(heights)), heights, ".", alpha=0.3, color="C0")
    left.axhline(0.0, color="grey", linewidth=0.5)

    right.set(title="Loss while training", xlabel="training step", ylabel="loss")
    for name, values in losses.items():
        curve = np.asarray(values)
        width = max(1, len(curve) // 50)  # a running mean shows the trend under the noise of single batches
        smooth = np.convolve(curve, np.ones(width) / width, mode="valid")
        right.plot(curve, alpha=0.25, color="C0")
        right.plot(np.arange(len(smooth)) + width // 2, smooth, label=name)
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
