"""The function ``record``, which plays episodes of a policy and records them to a store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError
from mouse_core.record._columns import Infos, named_policy
from mouse_core.record._episodes import kinds_of
from mouse_core.record.recorder import Recorder, VectorRecorder
from mouse_core.spec import check_count
from mouse_core.store.dataset_store import DatasetStore

_SECONDS_BETWEEN_FLUSHES = 1.0


def record(
    env: Any,
    policy: Callable[[Any], Any] | None = None,
    *,
    episodes: int,
    store: Any = None,
    seed: int | None = None,
    infos: Infos = (),
    images: str = "raw",
    on_interrupted: str = "mark",
    name: str | None = None,
    progress: bool | None = None,
) -> Any:
    """Play episodes of a policy and record them to a store::

        store = record("CartPole-v1", policy, episodes=100, seed=0)

    Args:
        env: The id of an environment of gymnasium, a ``gymnasium.Env``, a ``gymnasium.vector.VectorEnv`` or a
            ``dm_env.Environment``. An environment that ``record`` creates is also closed.
        policy: A function from an observation to an action; for a vector, from observations to actions. By default
            random actions.
        episodes: The number of episodes. With a vector of environments, the episodes that begin first are recorded.
            (The episodes that end first would be shorter than average.)
        store: The store to which episodes are appended: a ``DatasetStore``, or a ``mouse_core.collect.StoreClient``; by
            default a new store in memory. A store in a folder is flushed after episodes, at most once per second, and
            at the end, so that readers see new episodes early.
        seed: Episode i is reset with ``seed + i``; for a vector, the first episode of environment i is reset with
            ``seed + i``. Random actions also depend on ``seed``. For dm_env the seed has no effect, because these
            environments are seeded at creation.
        infos, images, on_interrupted: See ``Recorder``. An error of the policy or the environment, and Ctrl-C,
            interrupt an episode.
        name: The name of the policy in the store; by default the name of the policy's function or class.
        progress: Whether to show a progress bar; by default only if stderr is a terminal.

    Returns:
        The store, or the client.

    Raises:
        ConfigError, SchemaError, DataError: An error of ``Recorder``; or ``episodes`` is below 1.
        StorageError: The rows cannot be written.
    """
    count = check_count("record: episodes", episodes)
    by_name = isinstance(env, str)
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
        with progress_bar("recording", total=count, unit="episodes", enabled=shown) as advance:
            play = _play_vector if is_vector else _play_dm_env if not hasattr(env, "action_space") else _play
            try:
                play(recorder, act, count, seed, _shown_to_readers(store, advance))
            finally:
                recorder.interrupt()
                if isinstance(store, DatasetStore):
                    store.flush()
    finally:
        if by_name:
            env.close()
    return store


def _shown_to_readers(store: Any, advance: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that calls ``advance`` and flushes the store, at most once per second. A store behind a client
    is not flushed.
    """
    if not isinstance(store, DatasetStore):
        return advance  # the process that has the store open flushes it
    flushed = float("-inf")

    def advance_and_flush(episodes: int) -> None:
        nonlocal flushed
        advance(episodes)
        if episodes and time.monotonic() - flushed >= _SECONDS_BETWEEN_FLUSHES:
            store.flush()
            flushed = time.monotonic()

    return advance_and_flush


def _made(name: str) -> Any:
    """Create a gymnasium environment by its id.

    Raises:
        ConfigError: The environment does not exist.
        ImportError: gymnasium, or a package of the environment, is not installed.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError("environments by name need gymnasium: pip install gymnasium") from error
    try:
        return gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise ConfigError(f"record: expected the id of an environment, found {name!r}: {error}") from error


def _random(env: Any, seed: int | None) -> Callable[[Any], Any]:
    """Return a policy of random actions."""
    if hasattr(env, "action_space"):
        space = env.action_space
        space.seed(seed)
        return lambda observation: space.sample()
    raise ConfigError("record: expected a policy, found none; random actions cannot be drawn from a spec of dm_env")


def _play(env: Any, act: Callable[[Any], Any], episodes: int, seed: int | None, advance: Callable[[int], None]) -> None:
    for episode in range(episodes):
        observation, _ = env.reset(seed=None if seed is None else seed + episode)
        over = False
        while not over:
            observation, *_ = env.step(act(observation))
            over = not env.is_running
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
