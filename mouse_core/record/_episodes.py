"""The rows of episodes, on their way into a store: aligned, in order, and ended also where an episode is broken off."""

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
from mouse_core.dtypes import convert, is_hidden, refuse_hidden, to_numpy
from mouse_core.errors import ClosedError, ConfigError, DataError, RolloutError, SchemaError
from mouse_core.record import _about, _columns
from mouse_core.record._columns import Row
from mouse_core.record._running import TRUNCATED, Running, adopt
from mouse_core.spec import Alignment
from mouse_core.store.dataset_store import DatasetStore

SEED = "metadata_episode_seed"

_T = TypeVar("_T")


ON_INTERRUPTED = ("mark", "cut")
# What becomes no better when it is tried again.
_REFUSALS = (DataError, SchemaError, RolloutError)


class Direct:
    """Rows go into the store one by one, but for the last one: it waits, for it may have to say that the episode ended.

    Args:
        store: The store. Nobody else may append to it in the middle of an episode.
        running: Where rows are kept that the store does not have yet.
    """

    def __init__(self, store: DatasetStore, running: Running | None) -> None:
        self._store, self._running = store, running
        self._append = store.append
        self._waiting: list[Row] = []
        self._expected = -1  # rows that the store ever had, while an episode runs

    def put(self, row: Row) -> None:
        """Take a row; one whose ``done`` is not 0 ends the episode.

        After an error of the store the row waits with the others, and is written with the next one.
        """
        waiting = self._waiting
        waiting.append(row)
        if self._running is not None:
            self._running.add(row, waiting[:-1], self._store.written + len(waiting) - 1)
        self._write(keep=not row["done"])

    def _write(self, keep: bool) -> None:
        waiting = self._waiting
        while len(waiting) > keep:
            self._check_alone()
            self._append(waiting[0])
            row = waiting.pop(0)
            self._expected = -1 if row["done"] else self._store.written
        if not waiting and self._running is not None:
            self._running.end()

    def _check_alone(self) -> None:
        if 0 <= self._expected < self._store.written:
            raise RolloutError(
                f"record: expected nobody else to append while an episode is recorded, found {self._store.written} "
                f"rows where there were {self._expected}; on_interrupted='cut' adds whole episodes only"
            )

    def interrupt(self) -> None:
        """The row that waits says that the episode was truncated."""
        if self._waiting:
            self._waiting[-1]["done"] = TRUNCATED
            self._write(keep=False)

    def leave_out(self) -> None:
        """Forget the rows of the running episode that wait."""
        while self._waiting and not self._waiting[-1]["done"]:
            self._waiting.pop()
        if not self._waiting and self._running is not None:
            self._running.end()

    def settle(self) -> None:
        """Write the rows of ended episodes that wait after an error of the store."""
        self._write(keep=False)

    def close(self) -> None:
        """No more rows come."""
        self._waiting.clear()
        if self._running is not None:
            self._running.close()

    def forget(self) -> None:
        """Forget the rows that wait."""
        self._waiting.clear()
        self._expected = -1
        if self._running is not None:
            self._running.end()


class Whole:
    """Rows wait until their episode has ended, then all of them go into the store at once.

    Args:
        store: The store, or a client of it; others may append whole episodes to it meanwhile.
        mark: Whether an episode that is broken off is truncated there; otherwise it is left out.
        running: Where rows are kept that the store does not have yet.
    """

    def __init__(self, store: Any, *, mark: bool, running: Running | None) -> None:
        self._store, self._mark, self._running = store, mark, running
        self._columns: dict[str, list[Any]] = {}
        self._ended: list[dict[str, list[Any]]] = []  # more than one only after an error of the store
        self._taken = 0  # rows that the store has while others, behind them, wait after an error

    def put(self, row: Row) -> None:
        """Take a row."""
        columns = self._columns
        if self._running is not None:
            self._running.add(row)
        if not columns:
            self._columns = {name: [value] for name, value in row.items()}
        else:
            for name, value in row.items():
                columns[name].append(value)
        if row["done"]:
            self._end()

    def _end(self) -> None:
        self._ended.append(self._columns)
        self._columns = {}
        self.settle()

    def settle(self) -> None:
        """Write what waits of episodes that have ended."""
        while self._ended:
            rows = len(self._ended[0]["done"])
            if self._running is not None:
                self._running.goes_to(self._store.written, self._taken, rows)
            self._store.extend(self._ended[0])
            self._ended.pop(0)
            self._taken += rows
            self._forget_running()

    def _forget_running(self) -> None:
        if self._ended:
            return
        self._taken = 0
        if self._running is not None:
            self._running.end()

    def interrupt(self) -> None:
        """End the episode that is running: truncated, or left out."""
        if self._columns and self._mark:
            self._columns["done"][-1] = TRUNCATED
            self._end()
        self.leave_out()

    def leave_out(self) -> None:
        """Forget the rows of the running episode."""
        self._columns = {}
        self._forget_running()

    def close(self) -> None:
        """No more rows come."""
        self._columns, self._ended = {}, []
        if self._running is not None:
            self._running.close()

    def forget(self) -> None:
        """Forget all rows."""
        self._ended = []
        self.leave_out()


class Episodes:
    """Makes rows of what one environment hands out.

    Args:
        sink: Where they go.
        alignment: "arrived" or "outgoing".
        placeholder: The action in the first row of an "arrived" episode.
    """

    def __init__(self, sink: Direct | Whole, alignment: str, placeholder: Row) -> None:
        self._sink = sink
        self._is_outgoing = alignment == "outgoing"
        self._first = {**placeholder, "reward": 0.0, "done": 0, "episode_step": 0}
        self._seen: Row = {}
        self._step = -1

    @property
    def is_running(self) -> bool:
        """Whether an episode has begun and not ended."""
        return self._step >= 0

    def begin(self, seen: Row) -> None:
        """An episode begins.

        Args:
            seen: Columns of its first observation.
        """
        self.interrupt()
        self._step = 0
        if self._is_outgoing:
            self._seen = seen
        else:
            self._try(self._sink.put, {**self._first, **seen})

    def step(self, action: Row, reward: float, done: int, seen: Row) -> None:
        """An action was taken.

        Args:
            action: Columns of the action.
            reward: What it brought.
            done: 0, or 1 or 2 where it ended the episode.
            seen: Columns of the observation that it led to.

        Raises:
            RolloutError: No episode is running.
        """
        if self._step < 0:
            raise RolloutError("record: expected reset() before step(), found no episode that runs")
        if self._is_outgoing:
            seen, self._seen, number = self._seen, seen, self._step
        else:
            number = self._step + 1
        self._step = -1 if done else self._step + 1
        self._try(self._sink.put, {**action, "reward": reward, "done": done, "episode_step": number, **seen})

    def _try(self, write: Callable[..., None], *rows: Row) -> None:
        try:
            write(*rows)
        except _REFUSALS:
            self.forget()
            raise

    def interrupt(self) -> None:
        """Nothing more comes of the episode that is running. Without a transition it is none."""
        taken, self._step = self._step, -1
        if taken >= 0:
            self._try(self._sink.interrupt if taken else self._sink.leave_out)
        self._try(self._sink.settle)

    def close(self) -> None:
        """Nothing more is recorded. What a store that was closed before did not take stays in the files beside it.

        Raises:
            ClosedError, RolloutError: There was something; there is none when this is called again.
        """
        try:
            self.interrupt()
        except (ClosedError, *_REFUSALS):
            self._sink.close()
            raise
        self._sink.close()

    def forget(self) -> None:
        """Record nothing more of the episode that is running; what of it is in the store is broken off."""
        self._step = -1
        self._sink.forget()


def check_on_interrupted(choice: str) -> str:
    """``choice`` if it is "mark" or "cut", else ConfigError."""
    if choice not in ON_INTERRUPTED:
        raise ConfigError(f"on_interrupted: expected one of {list(ON_INTERRUPTED)}, found {choice!r}")
    return choice


def done_code(terminated: Any, truncated: Any) -> int:
    """1 where an episode terminated (also where both are set), 2 where it was truncated alone, else 0."""
    return 1 if terminated else TRUNCATED if truncated else 0


def reward_of(reward: Any) -> float:
    """A reward as a number.

    Raises:
        DataError: It is none, or several.
    """
    if type(reward) is float:
        return reward
    try:
        (number,) = convert(to_numpy(reward).reshape(-1), np.dtype(np.float64)).tolist()
        return number  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise DataError(f"reward: expected one number, found {reward!r:.80}") from error


def infos_of(info: Mapping[str, Any], infos: Mapping[str, Any]) -> Row:
    """Columns of what was asked for of an info; None where it is not there.

    Args:
        info: What came with an observation.
        infos: Dtypes by name; None: as they come.
    """
    row: Row = {}
    for name, dtype in infos.items():
        value: Any = info
        for key in name.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        row[info_column(name)] = kept_info(name, value, dtype)
    return row


def kept_info(name: str, value: Any, dtype: Any) -> Any:
    """A copy of an info; None where a mask hides it, and DataError where its dtype does not hold it."""
    if is_hidden(value):
        return None
    try:
        refuse_hidden(value)
        if dtype is not None:
            return convert(np.array(value), np.dtype(dtype))[()]
    except ValueError as error:
        raise DataError(f"info {name!r}: {error}") from error
    return value.copy() if isinstance(value, np.ndarray) else value


def info_column(name: str) -> str:
    """The name of the column of an info."""
    return "metadata_infos_" + name.replace("/", "_")


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
            sink: Direct | Whole = (
                Direct(store, running) if alone and mark else Whole(store, mark=mark, running=running)
            )
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
