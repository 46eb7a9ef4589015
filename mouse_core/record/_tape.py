"""What recorders have in common: which columns there are, what the store is told of them, and where rows go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from mouse_core.about.recording import Recording
from mouse_core.errors import ConfigError
from mouse_core.record import _about, _columns
from mouse_core.record._columns import Row
from mouse_core.record._episodes import Direct, Episodes, Sink, Whole, check_on_interrupted
from mouse_core.record._running import Running, adopt
from mouse_core.store.dataset_store import DatasetStore

SEED = "metadata_episode_seed"

_T = TypeVar("_T")


class Tape:
    """What recorders of one environment share: columns, and what the store is told.

    Args:
        store, infos, images, on_interrupted: See ``Recorder``.
        observations, actions: Parts of the spaces.
        recording: What to say of the rows.
        declared: Whether observations are kept in the dtypes that their space says.
    """

    def __init__(
        self,
        store: DatasetStore,
        observations: list[_columns.Part],
        actions: list[_columns.Part],
        recording: Recording,
        *,
        infos: _about.Infos = (),
        images: str = "raw",
        on_interrupted: str = "mark",
        declared: bool = False,
    ) -> None:
        if not isinstance(store, DatasetStore):
            raise ConfigError(f"record: expected a DatasetStore, found {type(store).__name__}")
        self.store = store
        self.infos = _about.check_infos(infos)
        self.on_interrupted = check_on_interrupted(on_interrupted)
        self.observations = _columns.observation_columns(observations, images, declared=declared)
        self.actions = _columns.action_columns(actions)
        adopt(store, mark=self.on_interrupted == "mark")
        # None: not known before the first episode.
        self.has_seeds: bool | None = SEED in store.columns if len(store.columns) else None
        store.describe(_about.about_of(recording, self.observations, self.actions))
        self._episodes: list[Episodes] = []
        store.break_off(self)

    def episodes(self, *, alone: bool) -> Episodes:
        """A writer of episodes.

        Args:
            alone: Whether nobody else appends to the store meanwhile.
        """
        mark, path = self.on_interrupted == "mark", self.store.path
        sync = self.store.sync == "append"
        running = None if path is None or not mark else Running(path, keeps_all=not alone, sync=sync)
        sink: Sink = Direct(self.store, running) if alone and mark else Whole(self.store, mark=mark, running=running)
        self._episodes.append(Episodes(sink, self.store.alignment, _columns.placeholder(self.actions)))
        return self._episodes[-1]

    def interrupt(self) -> None:
        """Break off the episodes that are running."""
        for episodes in self._episodes:
            episodes.interrupt()

    def close(self, environment: Callable[..., Any], **options: Any) -> None:
        """End the recording, and close what is recorded, also where something cannot be written."""
        with ExitStack() as ends:
            ends.callback(environment, **options)
            for episodes in reversed(self._episodes):
                ends.callback(episodes.close)

    def seen(self, observation: Row, infos: Row, seed: int | None) -> Row:
        """Columns of an observation with what else stands in its row."""
        if self.has_seeds is None:
            self.has_seeds = seed is not None
        if self.has_seeds:
            observation[SEED] = seed
        return observation | infos if infos else observation


def recorder_of(env: Any, recorders: Mapping[str, tuple[type[_T], str]], hint: str) -> type[_T]:
    """The class that records an environment: ours, which is also the one that the environment's library asks for.

    Args:
        env: The environment.
        recorders: By what an environment is ("gymnasium.Env"): our class, and the class of the library that it is to
            be. The library is imported here, where there is such an environment.
        hint: What is said of others.

    Raises:
        ConfigError: There is none.
    """
    found = kinds_of(env)
    for kind, (ours, theirs) in recorders.items():
        if kind in found:
            either: Any = ours
            joined: type[_T] = _joined(either, theirs)
            return joined
    raise ConfigError(f"expected {' or '.join(recorders)}, found {type(env).__name__}{hint}")


@cache
def _joined(ours: Any, theirs: str) -> Any:
    module, _, name = theirs.rpartition(".")
    base = getattr(import_module(module), name)
    return type(ours.__name__.lstrip("_"), (ours, base), {"__module__": ours.__module__, "__doc__": ours.__doc__})


def kinds_of(env: Any) -> set[str]:
    """What an environment is, such as "gymnasium.Env", found without an import."""
    return {f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in type(env).__mro__}
