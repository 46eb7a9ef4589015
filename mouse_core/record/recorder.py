"""Recorder: an environment whose every step is also a row of a store."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

from mouse_core.record import _about, _columns
from mouse_core.record._episodes import RemoteStore, StoreWriter, done_code, infos_of, recorder_of, reward_of
from mouse_core.store.dataset_store import DatasetStore


class Recorder:
    """An environment that records: what it is asked and answers goes into a store, row by row.

    It is used like the environment it wraps, and is one (a ``gymnasium.Wrapper``, or a ``dm_env.Environment``)::

        store = DatasetStore()
        env = Recorder(gymnasium.make("CartPole-v1"), store)

    Rows stand in the store's alignment. In an "arrived" store an episode of T transitions is T+1 rows, of which the
    first has a placeholder action; an "outgoing" one has T rows, and not the observation that the episode ended in.
    Columns are those that ``mouse_core.formats`` gives: ``observation``, ``observation_discrete``,
    ``observation_image`` or ``observation_text``; of nested spaces ``observation_<key>`` and ``action_<key>``, each
    with a field of its name.
    ``done`` is 1 where an episode terminated, and 2 where it was only truncated. Environment, spec, spaces, versions
    and policy stand in ``store.about.recordings``.

    Args:
        env: A ``gymnasium.Env`` or ``dm_env.Environment``. What is recorded has been through the wrappers
            inside of the recorder.
        store: Where rows go: one in memory or on disk, empty or with rows of the same columns; or a
            ``mouse_core.collect.StoreClient``, to which episodes go as a whole when they have ended: of one whose
            process is killed nothing is kept.
        policy: What acts, as the store is to call it.
        infos: Names of infos to record, as columns ``metadata_infos_<name>``; ``"episode/r"`` stands for
            ``info["episode"]["r"]``. They are null in rows that came without. What is a whole number at first and
            has fractions later needs its dtype: ``{"prob": "float64"}``. True: all numbers and arrays of numbers that
            come with the first step, or with the ``reset`` before it; in a store with rows, those that it has.
        images: How pictures are stored: "raw" pixels, or "png" without loss.
        on_interrupted: What becomes of an episode that is broken off, by ``reset()`` or ``close()`` in its middle: with
            "mark" its last row says truncated, and rows enter the store as they come, all but the latest; with "cut" it
            is left out, and the rows of an episode enter the store when it has ended.

    Where the process is killed in the middle of an episode and the store lies in a folder, the next recorder of it does
    the same: the rows that the store did not have yet lie beside it.

    The seed that an episode was reset with is the column ``metadata_episode_seed``, null in episodes without; it is
    there if the first episode of the store had one.

    Raises:
        ConfigError: No such environment, spaces that cannot be rows, unknown options.
        SchemaError: Something that contradicts what is known of the store's rows.
        DataError: In ``reset`` and ``step``: what the environment gave does not fit the columns.
        RolloutError: In ``step``: no episode is running, or others append to the store in the middle of one.
    """

    def __new__(
        cls,
        env: Any,
        store: DatasetStore | RemoteStore,
        *,
        policy: str | None = None,
        infos: _about.Infos = (),
        images: str = "raw",
        on_interrupted: str = "mark",
    ) -> Recorder:
        """A recorder of the kind of environment."""
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
        """Break off the episode that is running; nothing more is recorded before the next ``reset()``."""
        raise NotImplementedError


class _GymnasiumRecorder(Recorder):
    """A ``Recorder`` that is a ``gymnasium.Wrapper``."""

    env: Any

    def __init__(self, env: Any, store: Any, *, policy: str | None = None, **options: Any) -> None:
        wrapper: Any = super()
        wrapper.__init__(env)
        seen, taken = env.observation_space, env.action_space
        self._writer = StoreWriter(
            store,
            list(_columns.parts_of_space(seen)),
            list(_columns.parts_of_space(taken)),
            _about.recording_of_gymnasium(env, seen, taken, policy),
            **options,
        )
        self._episodes = self._writer.episodes(alone=True)
        self._seed: int | None = None
        # What the first episode began with, until it is known which infos are kept.
        self._first: tuple[_columns.Row, dict[str, Any]] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; one that is running is broken off."""
        self._episodes.interrupt()
        observation, info = self.env.reset(seed=seed, options=options)
        self._seed = seed
        seen = _columns.values_of(self._writer.observations, observation)
        if self._writer.infos is None:
            self._first = seen, deepcopy(info)
        else:
            self._episodes.begin(self._seen(seen, info))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take an action, and record what it led to."""
        taken = _columns.values_of(self._writer.actions, action)  # before the environment can change it
        result: tuple[Any, Any, bool, bool, dict[str, Any]] = self.env.step(action)
        observation, reward, terminated, truncated, info = result
        if self._first is not None:
            first, self._first = self._first, None
            self._writer.choose_infos(first[1], info)
            self._episodes.begin(self._seen(*first))
        seen = self._seen(_columns.values_of(self._writer.observations, observation), info)
        self._episodes.step(taken, reward_of(reward), done_code(terminated, truncated), seen)
        return result

    def _seen(self, observation: _columns.Row, info: dict[str, Any]) -> _columns.Row:
        return self._writer.seen(observation, infos_of(info, self._writer.infos or {}), self._seed)

    def interrupt(self) -> None:
        """Break off the episode that is running."""
        self._first = None
        self._episodes.interrupt()

    def close(self) -> None:
        """End the recording, and close the environment. The store stays open."""
        self._first = None
        self._writer.close(self.env.close)


class _DmEnvRecorder(Recorder):
    """A ``Recorder`` that is a ``dm_env.Environment``. A last step with a discount of 0 is a terminal one."""

    def __init__(self, env: Any, store: Any, *, policy: str | None = None, **options: Any) -> None:
        self._env = env
        self._writer = StoreWriter(
            store,
            list(_columns.parts_of_spec(env.observation_spec())),
            list(_columns.parts_of_spec(env.action_spec())),
            _about.recording_of_dm_env(env, policy),
            **options,
        )
        self._episodes = self._writer.episodes(alone=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self) -> Any:
        """Begin an episode; one that is running is broken off."""
        self._episodes.interrupt()
        return self._recorded(self._env.reset(), None)

    def step(self, action: Any) -> Any:
        """Take an action, and record what it led to; behind the last step of an episode, the next one begins."""
        taken = _columns.values_of(self._writer.actions, action)  # before the environment can change it
        return self._recorded(self._env.step(action), taken)

    def _recorded(self, timestep: Any, action: Any) -> Any:
        seen = self._writer.seen(_columns.values_of(self._writer.observations, timestep.observation), {}, None)
        if timestep.first():
            self._episodes.begin(seen)
        else:
            last = timestep.last()
            done = done_code(last and timestep.discount == 0, last)
            self._episodes.step(action, reward_of(timestep.reward), done, seen)
        return timestep

    def observation_spec(self) -> Any:
        """Return this spec of the environment."""
        return self._env.observation_spec()

    def action_spec(self) -> Any:
        """Return this spec of the environment."""
        return self._env.action_spec()

    def reward_spec(self) -> Any:
        """Return this spec of the environment."""
        return self._env.reward_spec()

    def discount_spec(self) -> Any:
        """Return this spec of the environment."""
        return self._env.discount_spec()

    def interrupt(self) -> None:
        """Break off the episode that is running."""
        self._episodes.interrupt()

    def close(self) -> None:
        """End the recording, and close the environment. The store stays open."""
        self._writer.close(self._env.close)
