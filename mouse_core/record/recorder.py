"""Recorders, which wrap environments and write every step to a store as a row; ``record`` plays and records them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mouse_core._base.progress import progress_bar
from mouse_core.errors import ConfigError, DataError
from mouse_core.record import _columns
from mouse_core.record._columns import Infos, Row, named_policy
from mouse_core.record._episodes import StoreWriter, info_column, infos_of, kept_info, kinds_of, recorder_of, reward_of
from mouse_core.spec import check_count, from_dm_env, from_gymnasium
from mouse_core.store.dataset_store import DatasetStore

if TYPE_CHECKING:
    from mouse_core.collect.client import StoreClient


class Recorder:
    """Wraps an environment, and writes every action and its result to a store as a row, when the episode has ended.

    A recorder is used like the wrapped environment: it is a ``gymnasium.Wrapper`` or a ``dm_env.Environment``::

        store = DatasetStore()
        env = Recorder(gymnasium.make("CartPole-v1"), store)

    Rows have the store's alignment. In an "arrived" store an episode of T transitions has T+1 rows, and the first row
    has a placeholder action. In an "outgoing" store, the episode has T rows, without its final observation. Columns are
    named as in ``DatasetStore.add_episode``: ``observation`` and ``action``; for nested spaces ``observation.<key>``
    and ``action.<key>``. Batches have fields with the names of these columns, in the dtype and shape of the columns.
    ``done`` is 1 if the episode terminated, and 2 if the episode was truncated but not terminated.
    ``store.metadata.recordings`` describes the environment, its spec and spaces, the versions of packages, and the
    policy.

    Rewards may be vectors. If ``terminated`` or ``truncated`` are flags of agents ``[A]``, the episode ends when its
    last agent ends, and the column ``agent_done`` has the codes of agents; see ``DatasetStore.add_episode``.

    Args:
        env: A ``gymnasium.Env`` or ``dm_env.Environment``. The recorder records the steps that ``env``, including its
            wrappers, returns.
        store: The store of the rows, in memory or on disk, empty or with rows of the same columns; or a
            ``mouse_core.collect.StoreClient``. A client receives each episode after its end, so if the process is
            killed, the current episode is lost.
        policy: The name of the policy in the store.
        infos: Names of infos to record, as columns ``info.<name>``; ``"episode/r"`` stands for
            ``info["episode"]["r"]``, the column ``info.episode.r``. In a row without the info, the column is null. An
            info whose first value is an integer and whose later values are floats needs a dtype: ``{"prob":
            "float64"}``.
        images: The format of stored images: "raw" pixels, or lossless "png".
        on_interrupted: What happens to an episode that ``reset()`` or ``close()`` interrupts. "mark": its last row is
            marked as truncated. "cut": the episode is left out.

    If the store is in a folder and the process is killed during an episode, the rows that were not yet in the store are
    kept in files in the folder. The next recorder of the store applies ``on_interrupted`` to these rows.

    The column ``metadata_episode_seed`` has the seed of the episode's reset, or null without a seed. The column exists
    only if the first episode of the store had a seed.

    Raises:
        ConfigError: The environment is of an unknown kind, its spaces cannot be stored as rows, or an option is
            unknown.
        SchemaError: The environment contradicts the columns or metadata of the store.
        DataError: In ``reset`` and ``step``: a value of the environment does not fit the columns.
        RolloutError: In ``step``: no episode is running.
    """

    def __new__(
        cls,
        env: Any,
        store: DatasetStore | StoreClient,
        *,
        policy: str | None = None,
        infos: _columns.Infos = (),
        images: str = "raw",
        on_interrupted: str = "mark",
    ) -> Recorder:
        """Create a recorder of the class for this kind of environment."""
        if cls is Recorder:
            kinds = {
                "gymnasium.Env": (_GymnasiumRecorder, "gymnasium.Wrapper"),
                "dm_env.Environment": (_DmEnvRecorder, "dm_env.Environment"),
            }
            cls = recorder_of(env, kinds, "; VectorRecorder records a gymnasium.VectorEnv")
        return super().__new__(cls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """End the recording, and close the environment. The store stays open."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Interrupt the current episode; no step is recorded before the next ``reset()``."""
        raise NotImplementedError


class _GymnasiumRecorder(Recorder):
    """A ``Recorder`` that is a ``gymnasium.Wrapper``."""

    env: Any

    def __init__(self, env: Any, store: Any, *, policy: str | None = None, **options: Any) -> None:
        wrapper: Any = super()
        wrapper.__init__(env)
        specs = from_gymnasium(env.observation_space), from_gymnasium(env.action_space)
        self._writer = StoreWriter(store, *specs, _columns.recording_of_gymnasium(env, *specs, policy), **options)
        self._episodes = self._writer.episodes()
        self._seed: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and begin an episode; a running episode is interrupted."""
        self._episodes.interrupt()
        observation, info = self.env.reset(seed=seed, options=options)
        self._seed = seed
        self._episodes.begin(self._seen(_columns.values_of(self._writer.observations, observation), info))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take an action in the environment, and record the result."""
        taken = _columns.values_of(self._writer.actions, action)  # before the environment can change it
        result: tuple[Any, Any, bool, bool, dict[str, Any]] = self.env.step(action)
        observation, reward, terminated, truncated, info = result
        seen = self._seen(_columns.values_of(self._writer.observations, observation), info)
        self._episodes.step(taken, reward_of(reward), terminated, truncated, seen)
        return result

    @property
    def is_running(self) -> bool:
        """Whether an episode has begun and not ended."""
        return self._episodes.is_running

    def _seen(self, observation: _columns.Row, info: dict[str, Any]) -> _columns.Row:
        return self._writer.seen(observation, infos_of(info, self._writer.infos), self._seed)

    def interrupt(self) -> None:
        """Interrupt the current episode."""
        self._episodes.interrupt()

    def close(self) -> None:
        """End the recording, and close the environment. The store stays open."""
        self._writer.close(self.env.close)


class _DmEnvRecorder(Recorder):
    """A ``Recorder`` that is a ``dm_env.Environment``. A last step with a discount of 0 counts as terminated."""

    def __init__(self, env: Any, store: Any, *, policy: str | None = None, **options: Any) -> None:
        self._env = env
        specs = from_dm_env(env.observation_spec()), from_dm_env(env.action_spec())
        self._writer = StoreWriter(store, *specs, _columns.recording_of_dm_env(env, *specs, policy), **options)
        self._episodes = self._writer.episodes()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self) -> Any:
        """Reset the environment and begin an episode; a running episode is interrupted."""
        self._episodes.interrupt()
        return self._recorded(self._env.reset(), None)

    def step(self, action: Any) -> Any:
        """Take an action in the environment, and record the result; after the last step of an episode, the next episode
        begins.
        """
        taken = _columns.values_of(self._writer.actions, action)  # before the environment can change it
        return self._recorded(self._env.step(action), taken)

    def _recorded(self, timestep: Any, action: Any) -> Any:
        seen = self._writer.seen(_columns.values_of(self._writer.observations, timestep.observation), {}, None)
        if timestep.first():
            self._episodes.begin(seen)
        else:
            last = timestep.last()
            self._episodes.step(action, reward_of(timestep.reward), last and timestep.discount == 0, last, seen)
        return timestep

    def observation_spec(self) -> Any:
        """Return ``observation_spec()`` of the environment."""
        return self._env.observation_spec()

    def action_spec(self) -> Any:
        """Return ``action_spec()`` of the environment."""
        return self._env.action_spec()

    def reward_spec(self) -> Any:
        """Return ``reward_spec()`` of the environment."""
        return self._env.reward_spec()

    def discount_spec(self) -> Any:
        """Return ``discount_spec()`` of the environment."""
        return self._env.discount_spec()

    def interrupt(self) -> None:
        """Interrupt the current episode."""
        self._episodes.interrupt()

    def close(self) -> None:
        """End the recording, and close the environment. The store stays open."""
        self._writer.close(self._env.close)


NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"


class VectorRecorder:
    """A ``Recorder`` for a vector of environments, a ``gymnasium.vector.VectorEnv``.

    The recorder is used like the wrapped environments, and is a ``gymnasium.vector.VectorWrapper``. All values of
    gymnasium's ``AutoresetMode`` are supported: a reset in the next step, in the same step, or by the caller::

        store = DatasetStore()
        envs = VectorRecorder(gymnasium.make_vec("CartPole-v1", num_envs=8), store)

    The rows of an episode are contiguous in the store, and episodes are in the order in which they end; the rows of an
    episode are kept in memory until the episode ends. The final observation of an episode is recorded in every mode.
    Observations have the dtypes of their space.

    Args:
        envs: The environments.
        store, policy, infos, images: See ``Recorder``.
        on_interrupted: What happens to episodes that ``reset()`` or ``close()`` interrupts. "mark": their last rows are
            marked as truncated; "cut": the episodes are left out.

    Raises:
        ConfigError, SchemaError, DataError: See ``Recorder``.
    """

    env: Any

    def __new__(cls, envs: Any, store: DatasetStore | StoreClient, **options: Any) -> VectorRecorder:
        """Create a recorder of the class for this kind of environments."""
        if cls is VectorRecorder:
            kinds = {"gymnasium.VectorEnv": (VectorRecorder, "gymnasium.vector.VectorWrapper")}
            cls = recorder_of(envs, kinds, "; Recorder records one environment")
        return super().__new__(cls)

    def __init__(
        self,
        envs: Any,
        store: DatasetStore | StoreClient,
        *,
        policy: str | None = None,
        infos: _columns.Infos = (),
        images: str = "raw",
        on_interrupted: str = "mark",
    ) -> None:
        wrapper: Any = super()
        wrapper.__init__(envs)
        self._mode = _autoreset_mode(envs)
        specs = from_gymnasium(envs.single_observation_space), from_gymnasium(envs.single_action_space)
        self._writer = StoreWriter(
            store,
            *specs,
            _columns.recording_of_gymnasium(envs, *specs, policy),
            declared=True,
            infos=infos,
            images=images,
            on_interrupted=on_interrupted,
        )
        self._episodes = [self._writer.episodes() for _ in range(envs.num_envs)]
        self._seeds: list[int | None] = [None] * envs.num_envs
        self._over = np.ones(envs.num_envs, np.bool_)  # the last step ended an episode, and no episode is running
        self._more: int | None = None  # the number of episodes that may still begin to be recorded; None: no limit

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or the environments in ``options["reset_mask"]``, and begin episodes; running
        episodes are interrupted.
        """
        masked = np.ones(len(self._episodes), np.bool_)
        if options is not None and options.get("reset_mask") is not None:
            masked = np.array(options["reset_mask"], np.bool_)  # the environment may remove it from the options
        begun = np.nonzero(masked)[0].tolist()
        for number in begun:
            self._episodes[number].interrupt()
        observations, infos = self.env.reset(seed=seed, options=options)
        for number in begun:
            self._seeds[number] = _seed_of(seed, number)
        for number in begun:
            self._begin(number, observations, infos)
        self._over[masked] = False
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take an action in every environment, and record the results."""
        running = [number for number, one in enumerate(self._episodes) if one.is_running]
        taken = {number: _columns.values_of(self._writer.actions, actions, number) for number in running}
        result: tuple[Any, Any, Any, Any, dict[str, Any]] = self.env.step(actions)
        observations, rewards, terminated, truncated, infos = result
        ended = np.logical_or(terminated, truncated)
        if ended.shape != self._over.shape:
            raise DataError(f"terminated, truncated: expected a flag for each environment, found shape {ended.shape}")
        before, self._over = self._over, ended
        for number in range(len(self._episodes)):
            over = bool(self._over[number])
            if number in taken and self._episodes[number].is_running:
                final = over and self._mode == SAME_STEP
                observed = (infos["final_obs"][number],) if final else (observations, number)
                row = _columns.values_of(self._writer.observations, *observed)
                seen = self._seen(number, row, infos, ("final_info",) if final else ())
                ends = terminated[number], truncated[number]
                self._episodes[number].step(taken[number], reward_of(rewards[number]), *ends, seen)
            # Environments that are not (or no longer) recorded also begin episodes.
            if (over and self._mode == SAME_STEP) or (before[number] and self._mode == NEXT_STEP):
                self._seeds[number] = None
                self._begin(number, observations, infos)
        return result

    def _begin(self, number: int, observations: Any, infos: dict[str, Any]) -> None:
        """Begin to record an episode of an environment with its first observation."""
        if self._more is None or self._more > 0:
            self._more = None if self._more is None else self._more - 1
            row = _columns.values_of(self._writer.observations, observations, number)
            self._episodes[number].begin(self._seen(number, row, infos))

    def _seen(self, number: int, row: Row, infos: dict[str, Any], within: Sequence[str] = ()) -> Row:
        """Return the columns of an observation and its infos, which are nested under the keys ``within``."""
        found = {
            info_column(name): kept_info(name, _info_at(infos, [*within, *name.split("/")], number), dtype)
            for name, dtype in self._writer.infos.items()
        }
        return self._writer.seen(row, found, self._seeds[number])

    @property
    def autoreset_mode(self) -> str:
        """The autoreset mode of the environments: "NextStep", "SameStep" or "Disabled"."""
        return self._mode

    def limit(self, episodes: int) -> None:
        """Record only the next ``episodes`` episodes that begin.

        Raises:
            ConfigError: ``episodes`` is not an integer of at least 0.
        """
        self._more = check_count("VectorRecorder: limit", episodes, 0)

    @property
    def left(self) -> int | None:
        """How many of the episodes that ``limit`` allows have not ended yet; None without a limit."""
        running = sum(episode.is_running for episode in self._episodes)
        return None if self._more is None else self._more + running

    def interrupt(self) -> None:
        """Interrupt the running episodes."""
        self._writer.interrupt()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self, **options: Any) -> None:
        """End the recording, and close the environments. The store stays open."""
        self._writer.close(self.env.close, **options)


def _autoreset_mode(envs: Any) -> str:
    """The autoreset mode of the environments: "NextStep", "SameStep" or "Disabled"."""
    mode = (envs.metadata or {}).get("autoreset_mode")
    mode = getattr(mode, "value", mode)
    if mode not in (NEXT_STEP, SAME_STEP, DISABLED):
        raise ConfigError(
            "VectorRecorder: expected a gymnasium.vector.AutoresetMode in envs.metadata['autoreset_mode'], found "
            f"{mode!r}"
        )
    return str(mode)


def _seed_of(seed: Any, number: int) -> int | None:
    """Return the seed of one of several environments; if a single seed was passed, gymnasium adds the index of the
    environment to this seed.
    """
    found = seed[number] if isinstance(seed, list | tuple | np.ndarray) else seed
    return None if found is None else int(found) + (0 if found is not seed else number)


def _info_at(infos: dict[str, Any], keys: Sequence[str], number: int) -> Any:
    """Return the info of one environment; None if the environment has no info of this name."""
    value: Any = infos
    for key in keys:
        if not isinstance(value, dict) or key not in value or not value.get(f"_{key}", {number: True})[number]:
            return None
        value = value[key]
    return value[number]


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
