"""VectorRecorder: several environments side by side whose every step is also a row of a store."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Self

import numpy as np

from mouse_core.errors import ConfigError
from mouse_core.record import _about, _columns
from mouse_core.record._columns import Row
from mouse_core.record._episodes import (
    RemoteStore,
    StoreWriter,
    done_code,
    info_column,
    kept_info,
    recorder_of,
    reward_of,
)
from mouse_core.spec import check_count
from mouse_core.store.dataset_store import DatasetStore

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"


class VectorRecorder:
    """A vector of environments that records: ``Recorder`` for ``gymnasium.vector.VectorEnv``.

    It is used like the environments it wraps, and is a ``gymnasium.vector.VectorWrapper``; they may begin episodes by
    themselves, in the next step or in the same one, or be reset by whoever uses them (all three of gymnasium's
    ``AutoresetMode``)::

        store = DatasetStore()
        envs = VectorRecorder(gymnasium.make_vec("CartPole-v1", num_envs=8), store)

    The rows of an episode stand together in the store, in the order in which episodes end: until then they wait in
    memory. The observation that an episode ended in is among them, in every mode. Observations are kept in the dtypes
    that their space says, in which environments hand them out together.

    Args:
        envs: The environments.
        store, policy, infos, images: See ``Recorder``.
        on_interrupted: What becomes of episodes that are broken off by ``reset()`` or ``close()``: with "mark" their
            last rows say truncated, with "cut" they are left out.

    Raises:
        ConfigError, SchemaError, DataError: As ``Recorder``.
    """

    env: Any

    def __new__(cls, envs: Any, store: DatasetStore | RemoteStore, **options: Any) -> VectorRecorder:
        """Return a recorder for the kind of the environments."""
        if cls is VectorRecorder:
            kinds = {"gymnasium.VectorEnv": (VectorRecorder, "gymnasium.vector.VectorWrapper")}
            cls = recorder_of(envs, kinds, "; Recorder records one environment")
        return super().__new__(cls)

    def __init__(
        self,
        envs: Any,
        store: DatasetStore | RemoteStore,
        *,
        policy: str | None = None,
        infos: _about.Infos = (),
        images: str = "raw",
        on_interrupted: str = "mark",
    ) -> None:
        wrapper: Any = super()
        wrapper.__init__(envs)
        self._mode = _autoreset_mode(envs)
        seen, taken = envs.single_observation_space, envs.single_action_space
        self._writer = StoreWriter(
            store,
            list(_columns.parts_of_space(seen)),
            list(_columns.parts_of_space(taken)),
            _about.recording_of_gymnasium(envs, seen, taken, policy),
            declared=True,
            infos=infos,
            images=images,
            on_interrupted=on_interrupted,
        )
        self._episodes = [self._writer.episodes(alone=False) for _ in range(envs.num_envs)]
        self._seeds: list[int | None] = [None] * envs.num_envs
        self._over = np.ones(envs.num_envs, np.bool_)  # the last step ended an episode; nothing runs
        # What the first episodes began with, until it is known which infos are kept.
        self._first: tuple[list[int], Any, dict[str, Any]] | None = None
        self._more: int | None = None  # how many episodes may still begin to be recorded; None: any number

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes in all environments, or those of ``options["reset_mask"]``; those that run are broken off."""
        masked = np.ones(len(self._episodes), np.bool_)
        if options is not None and options.get("reset_mask") is not None:
            masked = np.array(options["reset_mask"], np.bool_)  # which the environment may take out of the options
        begun = np.nonzero(masked)[0].tolist()
        for number in begun:
            self._episodes[number].interrupt()
        observations, infos = self.env.reset(seed=seed, options=options)
        for number in begun:
            self._seeds[number] = _seed_of(seed, number)
        if self._writer.infos is None:
            self._hold(begun, observations, infos)
        else:
            self._begin_all(begun, observations, infos)
        self._over[masked] = False
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take an action in every environment, and record what they led to."""
        held = () if self._first is None else self._first[0]
        running = [number for number, one in enumerate(self._episodes) if one.is_running or number in held]
        taken = {number: _columns.values_at(self._writer.actions, actions, number) for number in running}
        result: tuple[Any, Any, Any, Any, dict[str, Any]] = self.env.step(actions)
        observations, rewards, terminated, truncated, infos = result
        self._begin_held(infos)
        before, self._over = self._over, np.logical_or(terminated, truncated)
        for number in range(len(self._episodes)):
            over = bool(self._over[number])
            if number in taken and self._episodes[number].is_running:
                final = over and self._mode == SAME_STEP
                done = done_code(terminated[number], truncated[number])
                seen = self._final(number, infos) if final else self._seen(number, observations, infos)
                self._episodes[number].step(taken[number], reward_of(rewards[number]), done, seen)
            # Environments that are not recorded (any more) begin episodes, too.
            if (over and self._mode == SAME_STEP) or (before[number] and self._mode == NEXT_STEP):
                self._seeds[number] = None
                self._begin(number, observations, infos)
        return result

    def _hold(self, begun: list[int], observations: Any, infos: dict[str, Any]) -> None:
        """Begin episodes once it is known which infos are kept; those that were reset before are begun with these."""
        before = [] if self._first is None else [number for number in self._first[0] if number not in begun]
        self._first = sorted([*before, *begun]), deepcopy(observations), deepcopy(infos)

    def _begin_held(self, infos: dict[str, Any]) -> None:
        """Begin the episodes that waited for the first step, which gave these infos."""
        if self._first is not None:
            first, self._first = self._first, None
            self._writer.choose_infos(first[2], infos)
            self._begin_all(*first)

    def _begin_all(self, numbers: list[int], observations: Any, infos: dict[str, Any]) -> None:
        for number in numbers:
            self._begin(number, observations, infos)

    def _begin(self, number: int, observations: Any, infos: dict[str, Any]) -> None:
        """The first observation of an environment's episode has come."""
        if self._more is None or self._more > 0:
            self._more = None if self._more is None else self._more - 1
            self._episodes[number].begin(self._seen(number, observations, infos))

    def _seen(self, number: int, observations: Any, infos: dict[str, Any]) -> Row:
        row = _columns.values_at(self._writer.observations, observations, number)
        return self._writer.seen(row, self._infos_of(number, infos, ()), self._seeds[number])

    def _final(self, number: int, infos: dict[str, Any]) -> Row:
        """The last observation of an episode that another one followed in the same step."""
        row = _columns.values_of(self._writer.observations, infos["final_obs"][number])
        return self._writer.seen(row, self._infos_of(number, infos, ("final_info",)), self._seeds[number])

    def _infos_of(self, number: int, infos: dict[str, Any], within: Sequence[str]) -> Row:
        return {
            info_column(name): kept_info(name, _info_at(infos, [*within, *name.split("/")], number), dtype)
            for name, dtype in (self._writer.infos or {}).items()
        }

    @property
    def autoreset_mode(self) -> str:
        """The autoreset mode of the environments: "NextStep", "SameStep" or "Disabled"."""
        return self._mode

    def limit(self, episodes: int) -> None:
        """Record the next ``episodes`` that begin, and no more.

        Raises:
            ConfigError: No integer from 0.
        """
        self._more = check_count("VectorRecorder: limit", episodes, 0)

    @property
    def left(self) -> int | None:
        """The number of episodes of ``limit`` that have not ended; None without a limit."""
        running = sum(episode.is_running for episode in self._episodes)
        return None if self._more is None else self._more + running

    def interrupt(self) -> None:
        """Break off the episodes that are running."""
        self._first = None
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
    """The seed of one of several environments, as gymnasium has them count up from a single one."""
    found = seed[number] if isinstance(seed, list | tuple | np.ndarray) else seed
    return None if found is None else int(found) + (0 if found is not seed else number)


def _info_at(infos: dict[str, Any], keys: Sequence[str], number: int) -> Any:
    """One environment's info; None where it has none of that name."""
    value: Any = infos
    for key in keys:
        if not isinstance(value, dict) or key not in value or not value.get(f"_{key}", {number: True})[number]:
            return None
        value = value[key]
    return value[number]
