"""What recorders have in common: which columns there are, what the store is told of them, and where rows go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from mouse_core.about.dataset import About
from mouse_core.about.recording import Recording
from mouse_core.errors import ConfigError
from mouse_core.record import _about, _columns
from mouse_core.record._columns import Row
from mouse_core.record._episodes import Direct, Episodes, Sink, Whole, check_on_interrupted, info_column
from mouse_core.record._running import Running, adopt
from mouse_core.spec import Alignment
from mouse_core.store.dataset_store import DatasetStore

SEED = "metadata_episode_seed"

_T = TypeVar("_T")


class RemoteStore(Protocol):
    """A store that somebody else has open, as a ``mouse_core.collect.StoreClient`` writes to it."""

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """See ``DatasetStore.columns``."""
        ...

    @property
    def alignment(self) -> Alignment:
        """See ``DatasetStore.alignment``."""
        ...

    def describe(self, about: About) -> None:
        """See ``DatasetStore.describe``."""
        ...

    def extend(self, columns: Mapping[str, Any]) -> None:
        """See ``DatasetStore.extend``."""
        ...


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
        store: DatasetStore | RemoteStore,
        observations: list[_columns.ValuePart],
        actions: list[_columns.ValuePart],
        recording: Recording,
        *,
        infos: _about.Infos = (),
        images: str = "raw",
        on_interrupted: str = "mark",
        declared: bool = False,
    ) -> None:
        if not isinstance(store, DatasetStore) and not hasattr(type(store), "describe"):
            raise ConfigError(f"record: expected a DatasetStore, or a client of one, found {type(store).__name__}")
        self.store = store
        # None: not known before the first step.
        self.infos = _about.check_infos(infos)
        self.on_interrupted = check_on_interrupted(on_interrupted)
        self.observations = _columns.observation_columns(observations, images, declared=declared)
        self.actions = _columns.action_columns(actions)
        if isinstance(store, DatasetStore):
            adopt(store, mark=self.on_interrupted == "mark")
        # None: not known before the first episode.
        self.has_seeds: bool | None = SEED in store.columns if len(store.columns) else None
        store.describe(_about.about_of(recording, self.observations, self.actions, store.alignment))
        self._episodes: list[Episodes] = []
        if isinstance(store, DatasetStore):
            store.interrupt_on_close(self)

    def episodes(self, *, alone: bool) -> Episodes:
        """A writer of episodes.

        Args:
            alone: Whether nobody else appends to the store meanwhile.
        """
        store, mark = self.store, self.on_interrupted == "mark"
        if isinstance(store, DatasetStore):
            sync = store.sync == "append"
            running = None if store.path is None or not mark else Running(store.path, keeps_all=not alone, sync=sync)
            sink: Sink = Direct(store, running) if alone and mark else Whole(store, mark=mark, running=running)
        else:
            sink = Whole(store, mark=mark, running=None)
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

    def choose_infos(self, *found: Mapping[str, Any]) -> None:
        """Keep all numbers, and arrays of them, that came with the first observations, where nobody said which.

        A store that has rows already has its columns, of which each is kept, and no others.
        """
        if self.infos is not None:
            return
        kinds: dict[str, set[str]] = {}
        for name, kind in (one for info in found for one in _about.numbers_in(info)):
            kinds.setdefault(name, set()).add(kind)
        by_column = {info_column(name): name for name in kinds}
        if columns := self.store.columns:
            prefix = info_column("")
            known = [name for name in columns if name.startswith(prefix)]
            by_column = {column: by_column.get(column, column.removeprefix(prefix)) for column in known}
        # What is 1 at first and then 0.5 has fractions.
        mixed = {name for name, of_it in kinds.items() if "f" in of_it and len(of_it) > 1}
        self.infos = {name: np.dtype(np.float64) if name in mixed else None for name in by_column.values()}


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
