"""record: whole episodes of a policy into a store, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError
from mouse_core.record._about import Infos, named_policy
from mouse_core.record._tape import kinds_of
from mouse_core.record.recorder import Recorder
from mouse_core.record.vector import VectorRecorder
from mouse_core.spec import check_count
from mouse_core.store.dataset_store import DatasetStore


def record(
    env: Any,
    policy: Callable[[Any], Any] | None = None,
    *,
    episodes: int,
    store: DatasetStore | None = None,
    seed: int | None = None,
    infos: Infos = (),
    images: str = "raw",
    on_interrupted: str = "mark",
    name: str | None = None,
    progress: bool | None = None,
) -> DatasetStore:
    """Record whole episodes of a policy::

        store = record("CartPole-v1", policy, episodes=100, seed=0)

    Args:
        env: The id of an environment of gymnasium, a ``gymnasium.Env``, a ``gymnasium.vector.VectorEnv`` or a
            ``dm_env.Environment``. One that is made here is closed here.
        policy: From an observation to an action; of a vector, from observations to actions. By default random actions.
        episodes: How many. Of a vector's, those that begin first: taking those that end first would favour short ones.
        store: Where they go, behind the rows that are there; by default a new store in memory.
        seed: Episode i is reset with ``seed + i``; of a vector, the first episode of environment i. Random actions are
            drawn from it, too. It has no meaning for dm_env, whose environments are seeded when they are made.
        infos, images, on_interrupted: See ``Recorder``. An episode is broken off where the policy or the environment
            raises, and by Ctrl-C.
        name: What the store is to call the policy; by default its function or class.
        progress: Whether to show a bar; by default where stderr is a terminal.

    Returns:
        The store.

    Raises:
        ConfigError, SchemaError, DataError: As ``Recorder``, and ``episodes`` below 1.
    """
    check_count("record: episodes", episodes)
    made = isinstance(env, str)
    if isinstance(env, str):
        env = _made(env)
    options: dict[str, Any] = {"infos": infos, "images": images, "on_interrupted": on_interrupted}
    options |= {"policy": name or ("random" if policy is None else named_policy(policy))}
    store = DatasetStore() if store is None else store
    is_vector = "gymnasium.VectorEnv" in kinds_of(env)
    shown = sys.stderr.isatty() if progress is None else progress
    try:
        recorder: Any = (VectorRecorder if is_vector else Recorder)(env, store, **options)
        act = _random(env, seed) if policy is None else policy
        with progress_bar("recording", total=episodes, unit="episodes", enabled=shown) as advance:
            play = _play_vector if is_vector else _play_dm_env if not hasattr(env, "action_space") else _play
            try:
                play(recorder, act, episodes, seed, advance)
            finally:
                recorder.interrupt()
    finally:
        if made:
            env.close()
    return store


def _made(name: str) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError("environments by name need gymnasium: pip install gymnasium") from error
    try:
        return gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise ConfigError(f"record: expected the id of an environment, found {name!r}: {error}") from error


def _random(env: Any, seed: int | None) -> Callable[[Any], Any]:
    """A policy of random actions."""
    if hasattr(env, "action_space"):
        space = env.action_space
        space.seed(seed)
        return lambda observation: space.sample()
    raise ConfigError("record: expected a policy, found none: dm_env's specs do not say how to draw actions")


def _play(env: Any, act: Callable[[Any], Any], episodes: int, seed: int | None, advance: Callable[[int], None]) -> None:
    for episode in range(episodes):
        observation, _ = env.reset(seed=None if seed is None else seed + episode)
        over = False
        while not over:
            observation, _, terminated, truncated, _ = env.step(act(observation))
            over = bool(terminated or truncated)
        advance(1)


def _play_dm_env(
    env: Any, act: Callable[[Any], Any], episodes: int, seed: int | None, advance: Callable[[int], None]
) -> None:
    for _ in range(episodes):
        timestep = env.reset()
        while not timestep.last():
            timestep = env.step(act(timestep.observation))
        advance(1)


def _play_vector(
    envs: Any, act: Callable[[Any], Any], episodes: int, seed: int | None, advance: Callable[[int], None]
) -> None:
    envs.limit(episodes)
    observations, _ = envs.reset(seed=seed)
    left = episodes
    while left:
        observations, _, terminated, truncated, _ = envs.step(act(observations))
        over = terminated | truncated
        if envs.autoreset_mode == "Disabled" and over.any():
            reset, _ = envs.reset(options={"reset_mask": over})
            observations = reset
        before, left = left, envs.left
        advance(before - left)
