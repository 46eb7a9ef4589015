"""The rows of episodes, on their way into a store: aligned, in order, and ended also where an episode is broken off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from mouse_core.dtypes import convert, is_hidden, refuse_hidden, to_numpy
from mouse_core.errors import ClosedError, ConfigError, DataError, RolloutError, SchemaError
from mouse_core.record._columns import Row
from mouse_core.record._running import TRUNCATED, Running
from mouse_core.store.dataset_store import DatasetStore

ON_INTERRUPTED = ("mark", "cut")
# What becomes no better when it is tried again.
_REFUSALS = (DataError, SchemaError, RolloutError)


class Sink(Protocol):
    """Where the rows of one episode after another go."""

    def put(self, row: Row) -> None:
        """Take a row; one whose ``done`` is not 0 ends the episode."""
        ...

    def interrupt(self) -> None:
        """End the episode that is running as ``on_interrupted`` says."""
        ...

    def leave_out(self) -> None:
        """Forget the rows of the running episode that are not in the store."""
        ...

    def settle(self) -> None:
        """Write what waits of episodes that have ended: there is some only after an error of the store."""
        ...

    def forget(self) -> None:
        """Forget all rows that are not in the store."""
        ...

    def close(self) -> None:
        """No more rows come. Those that the store does not have stay in the files beside it."""
        ...


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
        """Take a row. After an error of the store it waits with the others, and is tried again with the next one."""
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
        """Write what waits."""
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

    def __init__(self, sink: Sink, alignment: str, placeholder: Row) -> None:
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
