"""Writing episodes to a store: rows in its alignment and in order, with an end also where an episode breaks off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mouse_core.dtypes import convert, is_hidden, refuse_hidden, to_numpy
from mouse_core.errors import ClosedError, ConfigError, DataError, RolloutError, SchemaError
from mouse_core.metadata import Recording
from mouse_core.record import _columns
from mouse_core.record._columns import Row
from mouse_core.record._running import TRUNCATED, Running, adopt
from mouse_core.spec import check_choice
from mouse_core.store.dataset_store import DatasetStore

if TYPE_CHECKING:
    from mouse_core.collect.client import StoreClient

SEED = "metadata_episode_seed"

_T = TypeVar("_T")


ON_INTERRUPTED = ("mark", "cut")
# Errors that a second try would raise again.
_REFUSALS = (DataError, SchemaError, RolloutError)


class StepSink:
    """Writes rows one by one. The last row waits, as its ``done`` may change when the episode breaks off.

    Args:
        store: The store. No other writer may append to it in the middle of an episode.
        running: The files of rows that the store does not have yet; None: no files.
    """

    def __init__(self, store: DatasetStore, running: Running | None) -> None:
        self._store, self._running = store, running
        self._append = store.append
        self._waiting: list[Row] = []
        self._expected = -1  # rows ever written to the store, while an episode runs

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
        """Mark the row that waits as truncated, and write it."""
        if self._waiting:
            self._waiting[-1]["done"] = TRUNCATED
            self._write(keep=False)

    def leave_out(self) -> None:
        """Forget the waiting rows of the running episode."""
        while self._waiting and not self._waiting[-1]["done"]:
            self._waiting.pop()
        if not self._waiting and self._running is not None:
            self._running.end()

    def settle(self) -> None:
        """Write the rows of ended episodes that wait after an error of the store."""
        self._write(keep=False)

    def close(self) -> None:
        """Leave the rows that the store does not have in the files beside it."""
        self._waiting.clear()
        if self._running is not None:
            self._running.close()

    def forget(self) -> None:
        """Forget all waiting rows."""
        self._waiting.clear()
        self._expected = -1
        if self._running is not None:
            self._running.end()


class EpisodeSink:
    """Writes the rows of an episode at once, when it has ended.

    Args:
        store: The store, or a client of it; other writers may append whole episodes to it meanwhile.
        mark: Whether an episode that breaks off is written as truncated; otherwise it is left out.
        running: The files of rows that the store does not have yet; None: no files.
    """

    def __init__(self, store: Any, *, mark: bool, running: Running | None) -> None:
        self._store, self._mark, self._running = store, mark, running
        self._columns: dict[str, list[Any]] = {}
        self._ended: list[dict[str, list[Any]]] = []  # more than one only after an error of the store
        self._taken = 0  # rows written while later ones wait after an error

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
        """Write the rows of ended episodes that wait after an error of the store."""
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
        """End the running episode: write it as truncated, or leave it out."""
        if self._columns and self._mark:
            self._columns["done"][-1] = TRUNCATED
            self._end()
        self.leave_out()

    def leave_out(self) -> None:
        """Forget the rows of the running episode."""
        self._columns = {}
        self._forget_running()

    def close(self) -> None:
        """Leave the rows that the store does not have in the files beside it."""
        self._columns, self._ended = {}, []
        if self._running is not None:
            self._running.close()

    def forget(self) -> None:
        """Forget all rows."""
        self._ended = []
        self.leave_out()


class EpisodeWriter:
    """Makes the rows of one environment's episodes.

    Args:
        sink: Writes the rows.
        alignment: "arrived" or "outgoing".
        placeholder: The action in the first row of an "arrived" episode.
    """

    def __init__(self, sink: StepSink | EpisodeSink, alignment: str, placeholder: Row) -> None:
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
        """Begin an episode.

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
        """Add a step.

        Args:
            action: Columns of the action.
            reward: The reward of the action.
            done: 0, or 1 or 2 where the action ended the episode.
            seen: Columns of the observation that followed.

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
        """Break off the running episode; one without a transition is left out."""
        taken, self._step = self._step, -1
        if taken >= 0:
            self._try(self._sink.interrupt if taken else self._sink.leave_out)
        self._try(self._sink.settle)

    def close(self) -> None:
        """End the recording. Rows that a closed store did not take stay in the files beside it.

        Raises:
            ClosedError, RolloutError: Some rows were not written; a second call raises nothing.
        """
        try:
            self.interrupt()
        except (ClosedError, *_REFUSALS):
            self._sink.close()
            raise
        self._sink.close()

    def forget(self) -> None:
        """Stop recording the running episode, whose rows in the store break off."""
        self._step = -1
        self._sink.forget()


def check_on_interrupted(choice: str) -> str:
    """``choice`` if it is "mark" or "cut", else ConfigError."""
    check_choice("on_interrupted", choice, ON_INTERRUPTED)
    return choice


def reward_of(reward: Any) -> float:
    """A reward as a number.

    Raises:
        DataError: No number, or several.
    """
    if type(reward) is float:
        return reward
    try:
        (number,) = convert(to_numpy(reward).reshape(-1), np.dtype(np.float64)).tolist()
        return number  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise DataError(f"reward: expected one number, found {reward!r:.80}") from error


def infos_of(info: Mapping[str, Any], infos: Mapping[str, Any]) -> Row:
    """The columns of the recorded parts of an info; None for a part that is missing.

    Args:
        info: The info of an observation.
        infos: Dtypes by name; None: the dtype of each value.
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


class StoreWriter:
    """The columns of a recording, and the writers of its episodes.

    Args:
        store, infos, images, on_interrupted: See ``Recorder``.
        observations, actions: The specs of an observation and an action.
        recording: Metadata of the rows.
        declared: Whether observations are stored in the dtypes of their space.
    """

    def __init__(
        self,
        store: DatasetStore | StoreClient,
        observations: Any,
        actions: Any,
        recording: Recording,
        *,
        infos: _columns.Infos = (),
        images: str = "raw",
        on_interrupted: str = "mark",
        declared: bool = False,
    ) -> None:
        if not isinstance(store, DatasetStore) and not hasattr(type(store), "describe"):
            raise ConfigError(f"record: expected a DatasetStore, or a client of one, found {type(store).__name__}")
        self.store = store
        # None: unknown before the first step.
        self.infos = _columns.check_infos(infos)
        self.on_interrupted = check_on_interrupted(on_interrupted)
        self.observations = _columns.observation_columns(observations, images, declared=declared)
        self.actions = _columns.action_columns(actions)
        if isinstance(store, DatasetStore):
            adopt(store, mark=self.on_interrupted == "mark")
        # None: unknown before the first episode.
        self.has_seeds: bool | None = SEED in store.columns if len(store.columns) else None
        store.describe(_columns.metadata_of(recording, self.observations, self.actions, store.alignment))
        self._episodes: list[EpisodeWriter] = []
        if isinstance(store, DatasetStore):
            store.interrupt_on_close(self)

    def episodes(self, *, alone: bool) -> EpisodeWriter:
        """Return a writer of episodes.

        Args:
            alone: Whether no other writer appends to the store meanwhile.
        """
        store, mark = self.store, self.on_interrupted == "mark"
        if isinstance(store, DatasetStore):
            sync = store.sync == "append"
            running = None if store.path is None or not mark else Running(store.path, keeps_all=not alone, sync=sync)
            sink: StepSink | EpisodeSink = (
                StepSink(store, running) if alone and mark else EpisodeSink(store, mark=mark, running=running)
            )
        else:
            sink = EpisodeSink(store, mark=mark, running=None)
        self._episodes.append(EpisodeWriter(sink, self.store.alignment, _columns.placeholder(self.actions)))
        return self._episodes[-1]

    def interrupt(self) -> None:
        """Break off the running episodes."""
        for episodes in self._episodes:
            episodes.interrupt()

    def close(self, environment: Callable[..., Any], **options: Any) -> None:
        """End the recording, and close the environment, also where rows cannot be written."""
        with ExitStack() as ends:
            ends.callback(environment, **options)
            for episodes in reversed(self._episodes):
                ends.callback(episodes.close)

    def seen(self, observation: Row, infos: Row, seed: int | None) -> Row:
        """Columns of an observation, with those of its infos and its seed."""
        if self.has_seeds is None:
            self.has_seeds = seed is not None
        if self.has_seeds:
            observation[SEED] = seed
        return observation | infos if infos else observation

    def choose_infos(self, *found: Mapping[str, Any]) -> None:
        """Record all numbers, and arrays of numbers, of the first infos, where ``infos`` is True.

        A store that has rows keeps the columns that it has.
        """
        if self.infos is not None:
            return
        kinds: dict[str, set[str]] = {}
        for name, kind in (one for info in found for one in _columns.numbers_in(info)):
            kinds.setdefault(name, set()).add(kind)
        by_column = {info_column(name): name for name in kinds}
        if columns := self.store.columns:
            prefix = info_column("")
            known = [name for name in columns if name.startswith(prefix)]
            by_column = {column: by_column.get(column, column.removeprefix(prefix)) for column in known}
        # A value that is 1 at first and 0.5 later is a float.
        mixed = {name for name, of_it in kinds.items() if "f" in of_it and len(of_it) > 1}
        self.infos = {name: np.dtype(np.float64) if name in mixed else None for name in by_column.values()}


def recorder_of(env: Any, recorders: Mapping[str, tuple[type[_T], str]], hint: str) -> type[_T]:
    """The class that records an environment: ours, derived also from the wrapper class of the environment's library.

    Args:
        env: The environment.
        recorders: By the kind of environment ("gymnasium.Env"): our class, and the name of the library's class. The
            library is imported here, where such an environment exists.
        hint: The end of the message for other environments.

    Raises:
        ConfigError: An environment of another kind.
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
    """The kinds of an environment, such as "gymnasium.Env", found without an import."""
    return {f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in type(env).__mro__}
