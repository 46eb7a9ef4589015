"""Writes episodes to a store, in the store's alignment and in order, and handles interrupted episodes.

The rows of an episode are kept in memory until the episode has ended. For each recorded environment, the subfolder
``recording`` of a store has a file with the same rows, so that no row is lost if the process is killed. When the
episode has ended, a note records the index that its first row gets in the store, counted over all rows ever written to
the store. When the store has all rows, the file is emptied. With the note, the next recorder can determine which rows
of the file the store lacks. Example: according to a note, 4 rows are written to the store from row 998 on. If the store
has received 1,000 rows in total, the recorder appends the last two of the 4 rows.

Written rows survive a crash of the process. In a store with ``sync="append"``, written rows also survive a power cut;
otherwise, rows that a power cut damaged are left out.
"""

from __future__ import annotations

import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from mouse_core.columns.episode_rows import agent_codes, done_code
from mouse_core.dtypes import convert, is_hidden, refuse_hidden, to_numpy
from mouse_core.errors import ClosedError, ConfigError, DataError, RolloutError, SchemaError
from mouse_core.files.log import MappedLog, read_mapped_log
from mouse_core.files.reading import reading
from mouse_core.files.writing import make_folder, remove, storing, sync_folders
from mouse_core.metadata import Recording
from mouse_core.record import _columns
from mouse_core.record._columns import Row
from mouse_core.spec import check_choice, check_dtype
from mouse_core.store.dataset_store import DatasetStore

if TYPE_CHECKING:
    from mouse_core.collect.client import StoreClient

_IMAGE = {"bytes", "path"}
_INT, _FLOAT = struct.Struct("<q").pack, struct.Struct("<d").pack


@lru_cache(64)
def _head(columns: tuple[tuple[Any, ...], ...]) -> bytes:
    """Return the first line of an encoded row. Most rows of a recording have the same first line."""
    return json.dumps(columns).encode() + b"\n"


def encoded(row: Row) -> bytes:
    """Encode a row as bytes: a line of JSON with name, type and shape or size of each column, then the values.

    Raises:
        DataError: A value of the row is not a number, an array or a text.
    """
    columns: list[tuple[Any, ...]] = []
    values: list[bytes] = []
    try:
        for name, value in row.items():
            kind = type(value)
            column: tuple[Any, ...]
            if kind is float:
                column, content = (name, "<f8", ()), _FLOAT(value)
            elif kind is int and value.bit_length() < 64:
                column, content = (name, "<i8", ()), _INT(value)
            elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
                column, content = (name, value.dtype.str, value.shape), value.tobytes()
            else:
                is_image = kind is dict and value.keys() == _IMAGE
                content = value["bytes"] if is_image else json.dumps(value).encode()
                column = name, "image" if is_image else "json", len(content)
            columns.append(column)
            values.append(content)
        return b"".join([_head(tuple(columns)), *values])
    except (TypeError, ValueError) as error:
        raise DataError(f"record: expected numbers, arrays and texts, found {row!r:.200}") from error


def decoded(record: bytes) -> Row:
    """Decode the bytes of a row; the inverse of ``encoded``. A number becomes a scalar of NumPy.

    Raises:
        DataError: The bytes are not an encoded row.
    """
    head, _, rest = record.partition(b"\n")
    row: Row = {}
    for name, code, size in json.loads(head):
        if code in ("image", "json"):
            content = rest[:size]
            row[name] = {"bytes": content, "path": None} if code == "image" else json.loads(content)
        else:
            dtype, shape = check_dtype(code, where=name), size
            size = dtype.itemsize * math.prod(shape)
            row[name] = np.frombuffer(rest[:size], dtype).reshape(shape)[()]
        rest = rest[size:]
    if rest or not {"reward", "done", "episode_step"} <= row.keys():
        raise DataError(f"expected a row, found {head!r:.80} and {len(rest)} bytes after it")
    return row


_ENDS = ("done", "agent_done")
_FLAGS = frozenset((bool, np.bool_))
FOLDER = "recording"
TRUNCATED = 2
_GOING = struct.Struct("<qqq")
# The first byte of a record: a row, or a note on where the rows are being written.
_ROW, _GOES = b"r", b"g"
# The endings of the file of a recorder, and of the file in which the next recorder notes that it is writing the rows to
# the store; that file is read last.
_ROWS, _NOTE = "-a.rows", "-b.rows"

_alive: weakref.WeakSet[Running] = weakref.WeakSet()


class Running:
    """The recording file of one environment, with the rows of its running episode.

    Args:
        path: The folder of the store.
        sync: Whether to sync each row to the disk.
    """

    def __init__(self, path: str, *, sync: bool = False) -> None:
        self._folder = Path(path, FOLDER)
        self.name = os.urandom(6).hex()
        self._sync = sync
        self._process = os.getpid()
        self._files: list[MappedLog] = []  # one, from the first row on
        _alive.add(self)
        self._close = weakref.finalize(self, _remove_empty, self._files, self._process)

    def add(self, row: Row) -> None:
        """Write a row to the file.

        Raises:
            DataError: The row has a value that cannot be encoded.
            StorageError: The file cannot be written.
        """
        if self._process != os.getpid():
            return  # a forked child process, whose writes the store rejects
        if not self._files:
            make_folder(self._folder, sync=self._sync)
            self._files.append(MappedLog(self._folder / f"{self.name}{_ROWS}"))
            if self._sync:
                sync_folders([self._folder])
        self._write(_ROW + encoded(row))

    def _write(self, record: bytes) -> None:
        self._files[0].append(record)
        if self._sync:
            self._files[0].sync()

    def goes_to(self, number: int, begin: int, count: int) -> None:
        """Record that ``count`` rows of the file, from ``begin`` on, are being written to the store, where the first of
        these rows gets the index ``number``. The store already has the rows before ``begin``.
        """
        if self._process == os.getpid() and self._files:
            self._write(_GOES + _GOING.pack(number, begin, count))

    def end(self) -> None:
        """Empty the file, because the store has all rows."""
        if self._process == os.getpid() and self._files and not self._files[0].is_empty:
            self._files[0].clear()

    def close(self) -> None:
        """Stop recording and remove the file."""
        self._close()
        _alive.discard(self)


def _remove_empty(files: list[MappedLog], process: int) -> None:
    """Close files, and remove files without rows."""
    for file in files:
        file.close()
        if file.is_empty and process == os.getpid():
            remove(file.path)
    files.clear()


# ---------------------------------------------------------------------- what was left


@dataclass(frozen=True)
class LeftOver:
    """The rows in the recording file that a killed recorder left in a store's folder.

    Attributes:
        files: The file, and the file for notes if it exists.
        waited: All rows in the recording file.
        going: The rows that were being written to the store: the index of the first of these rows among all rows ever
            written to the store, the position of this row in ``waited``, and the number of rows. The store has the rows
            before this position.
        note: The path of the file for notes.
    """

    files: list[Path]
    waited: list[Row]
    going: tuple[int, int, int]
    note: Path

    def missing(self, store: DatasetStore) -> list[Row]:
        """Return the rows that the store does not have."""
        return self.waited[self._there(store) :] if self.waited else []

    def goes_to(self, number: int, count: int) -> None:
        """Record that the last ``count`` rows are now written to the store. The first of these rows gets the index
        ``number`` among all rows ever written to the store. If this process crashes too, the next recorder continues
        from this record.
        """
        remove(self.note)
        note = MappedLog(self.note)
        note.append(_GOES + _GOING.pack(number, len(self.waited) - count, count))
        note.close()

    def _there(self, store: DatasetStore) -> int:
        """Return how many of the rows in ``waited`` the store has received."""
        number, begin, count = self.going
        there = min(count, max(0, store.written - number))
        at = number - (store.written - len(store))  # after the dropped rows
        if there and at >= 0 and not _equal(store[at], self.waited[begin]):
            there = 0  # another writer's row
        return begin + there


def left_over(path: str) -> Iterator[LeftOver]:
    """Yield the rows that killed recorders left in the folder of a store.

    Raises:
        DataError: A file is damaged.
    """
    folder = Path(path, FOLDER)
    if not folder.is_dir():
        return
    living = {one.name for one in _alive}
    with storing(f"folder {folder}"):
        found = sorted(name for name in os.listdir(folder) if name.endswith((_ROWS, _NOTE)))
    for name in sorted({name[: -len(_NOTE)] for name in found} - living):
        files = [folder / file for file in found if file[: -len(_NOTE)] == name]
        waited: list[Row] = []
        going = (0, 0, 0)
        for file in files:
            for record in read_mapped_log(file):
                with reading(file):
                    if record[:1] == _GOES:
                        going = _GOING.unpack_from(record, 1)
                    else:
                        waited.append(decoded(record[1:]))
        yield LeftOver(files, waited, going, folder / f"{name}{_NOTE}")


def adopt(store: DatasetStore, *, mark: bool) -> None:
    """Append to a store the rows that killed recorders left in its folder.

    An interrupted episode becomes truncated at its last row. If ``mark`` is False, the interrupted episode is left out,
    unless some of its rows are in the store.

    Raises:
        DataError: A file is damaged; the message names the file.
        StorageError: The rows cannot be written.
    """
    if store.path is None:
        return
    for left in left_over(store.path):
        rest = left.missing(store)
        if rest and (mark or rest[-1]["done"] or rest[0]["episode_step"]):
            for row, after in zip(rest, [*rest[1:], {"episode_step": 0}], strict=True):
                if after["episode_step"] == 0:
                    truncate(row)
            left.goes_to(store.written, len(rest))
            store.extend([{name: row[name] for name in store.columns} for row in rest] if store.columns else rest)
            store.flush()
        for file in dict.fromkeys([*left.files, left.note]):  # the note last
            remove(file)


def truncate(row: Row) -> None:
    """Mark a row as the truncated last row of its episode, unless the row already ends the episode."""
    row["done"] = row["done"] or TRUNCATED
    if "agent_done" in row:
        row["agent_done"] = np.where(row["agent_done"] == 0, np.int8(TRUNCATED), row["agent_done"])


def _equal(found: Mapping[str, Any], row: Row) -> bool:
    """Whether a stored row equals another row; the stored row may also be marked as the last row of its episode."""
    return all(name in found and _same(found[name], value) for name, value in row.items() if name not in _ENDS)


def _same(one: Any, other: Any) -> bool:
    if other is None or isinstance(other, str | dict):
        return bool(one == other)
    ones, others = np.asarray(one), np.asarray(other)
    return ones.shape == others.shape and bool((ones == others).all() or np.array_equal(ones, others, equal_nan=True))


SEED = "metadata_episode_seed"

_T = TypeVar("_T")


ON_INTERRUPTED = ("mark", "cut")
# Errors that a second attempt would raise again.
_REFUSALS = (DataError, SchemaError, RolloutError)


class EpisodeWriter:
    """Creates the rows of one environment's episodes, and writes the rows of an ended episode to a store together.

    Args:
        store: The store, or a ``StoreClient`` of the store; other writers may append complete episodes meanwhile.
        placeholder: The action in the first row of an "arrived" episode.
        mark: Whether an interrupted episode is written as truncated; otherwise the episode is left out.
        running: The file of rows that the store does not have yet; None: no file.
    """

    def __init__(self, store: Any, placeholder: Row, *, mark: bool, running: Running | None) -> None:
        self._store, self._mark, self._running = store, mark, running
        self._is_outgoing = store.alignment == "outgoing"
        self._first = {**placeholder, "reward": 0.0, "done": 0, "episode_step": 0}
        self._seen: Row = {}
        self._step = -1
        # For agents that end separately: which agents have ended, bool ``[A]``, and whether an agent was truncated.
        self._gone: Any = None
        self._is_cut = False
        self._columns: dict[str, list[Any]] = {}  # the rows of the running episode
        self._ended: list[dict[str, list[Any]]] = []  # more than one episode only after an error of the store
        self._taken = 0  # rows that were written while later rows wait after an error
        self._unfiled: list[Row] = []  # more than the rows of one call only after an error of the file

    @property
    def is_running(self) -> bool:
        """Whether an episode is running."""
        return self._step >= 0

    def begin(self, seen: Row) -> None:
        """Begin an episode with the columns of its first observation."""
        self.interrupt()
        self._step, self._seen, self._gone, self._is_cut = 0, seen, None, False

    def step(self, action: Row, reward: Any, terminated: Any, truncated: Any, seen: Row) -> None:
        """Add a step. After a StorageError, the rows of the step are kept in memory.

        Args:
            action: The columns of the action.
            reward: The reward of the action, a number or an array.
            terminated, truncated: Flags: whether the action ended the episode; or flags ``[A]``: whether the action
                ended the episode of each agent.
            seen: The columns of the next observation.

        Raises:
            RolloutError: No episode is running.
        """
        if self._step < 0:
            raise RolloutError("record: expected reset() before step(), found no running episode")
        agents = None
        if self._gone is None and type(terminated) in _FLAGS and type(truncated) in _FLAGS:
            done = 1 if terminated else 2 if truncated else 0
        else:
            done, agents = self._ends(terminated, truncated)
        rows, step = [], self._step
        self._step = -1 if done else step + 1
        if self._is_outgoing:
            seen, self._seen = self._seen, seen
        else:
            step += 1
        row = {**action, "reward": reward, "done": done, "episode_step": step, **seen}
        if agents is not None:
            row["agent_done"] = agents
        if step == 1 and not self._is_outgoing:
            # The first row is written at the first step, because its placeholder zeros need the shapes of these values.
            arrays = ((name, row[name]) for name in ("reward", "agent_done") if isinstance(row.get(name), np.ndarray))
            rows.append({**self._first, **self._seen, **{name: np.zeros_like(one) for name, one in arrays}})
        try:
            self._put([*rows, row])
        except _REFUSALS:
            self.forget()
            raise

    def _ends(self, terminated: Any, truncated: Any) -> tuple[int, npt.NDArray[np.int8] | None]:
        """Return the done code of the episode, and the done codes of agents if they end separately."""
        given = terminated, truncated
        try:
            flags = np.broadcast_arrays(*(convert(np.reshape(one, (1, -1)), np.dtype(np.bool_)) for one in given))
            if self._gone is None and flags[0].size == 1:
                return done_code(*(one.item() for one in flags)), None
            if self._gone is None and self._step:
                raise ValueError("the earlier steps of the episode had a single flag")
            codes = agent_codes(flags[0], flags[1], self._gone)[0]
        except ValueError as error:
            raise DataError(
                "terminated, truncated: expected one flag, or a flag for each agent [A], as in earlier steps, found "
                f"{given!r:.80}: {error}"
            ) from error
        self._gone, self._is_cut = codes != 0, self._is_cut or bool((codes == TRUNCATED).any())
        over = bool(self._gone.all())
        return done_code(over and not self._is_cut, over), codes

    def _put(self, rows: Sequence[Row]) -> None:
        """Add rows of the running episode."""
        for row in rows:
            if self._running is not None:
                self._unfiled.append(row)
            if not self._columns:
                self._columns = {name: [value] for name, value in row.items()}
                continue
            columns = self._columns
            for name, value in row.items():
                columns[name].append(value)
        if rows[-1]["done"]:
            self._end()
        else:
            self._file()

    def _file(self) -> None:
        """Append to the file the rows that the file does not contain yet."""
        while self._running is not None and self._unfiled:
            self._running.add(self._unfiled[0])
            self._unfiled.pop(0)

    def _end(self) -> None:
        self._ended.append(self._columns)
        self._columns = {}
        self._settle()

    def _settle(self) -> None:
        """Write the rows of ended episodes that are still in memory after an error of the store or the file."""
        self._file()
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

    def _leave_out(self) -> None:
        """Discard the rows of the running episode."""
        self._columns, self._unfiled = {}, []
        self._forget_running()

    def interrupt(self) -> None:
        """End the running episode: write the episode as truncated, or discard the episode. An episode without a
        transition is discarded.
        """
        taken, self._step = self._step, -1
        try:
            if taken >= 0:
                if self._columns and self._mark:
                    last = {name: values[-1] for name, values in self._columns.items() if name in _ENDS}
                    truncate(last)
                    for name, value in last.items():
                        self._columns[name][-1] = value
                    self._end()
                self._leave_out()
            self._settle()
        except _REFUSALS:
            self.forget()
            raise

    def close(self) -> None:
        """End the recording. Rows that a closed store rejected stay in the recording file.

        Raises:
            ClosedError, RolloutError: Some rows were not written; a second call raises no error.
        """
        try:
            self.interrupt()
        except (ClosedError, *_REFUSALS):
            self._close()
            raise
        self._close()

    def _close(self) -> None:
        """Close the recording file, which keeps the rows that the store does not have."""
        self._columns, self._ended = {}, []
        if self._running is not None:
            self._running.close()

    def forget(self) -> None:
        """Stop recording the running episode; its rows in the store end without a done code."""
        self._step = -1
        self._ended = []
        self._leave_out()


def check_on_interrupted(choice: str) -> str:
    """Return ``choice``; raise ConfigError unless it is "mark" or "cut"."""
    check_choice("on_interrupted", choice, ON_INTERRUPTED)
    return choice


def reward_of(reward: Any) -> Any:
    """Return a reward as a float, or as an array float64 ``[K]`` for several numbers.

    Raises:
        DataError: The reward is neither a number nor an array of numbers.
    """
    if type(reward) is float:
        return reward
    try:
        numbers = convert(np.array(to_numpy(reward), ndmin=1), np.dtype(np.float64))
    except (TypeError, ValueError) as error:
        raise DataError(f"reward: expected a number or an array of numbers, found {reward!r:.80}") from error
    if not numbers.size:
        raise DataError(f"reward: expected a number or an array of numbers, found {reward!r:.80}")
    return numbers.item() if numbers.size == 1 else numbers


def infos_of(info: Mapping[str, Any], infos: Mapping[str, Any]) -> Row:
    """Return the columns of the recorded values of an info; None for a missing value.

    Args:
        info: The info of an observation.
        infos: The dtype of each info by name; None: the dtype of the value.
    """
    row: Row = {}
    for name, dtype in infos.items():
        value: Any = info
        for key in name.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        row[info_column(name)] = kept_info(name, value, dtype)
    return row


def kept_info(name: str, value: Any, dtype: Any) -> Any:
    """Return a copy of an info's value; None if a mask hides the value. Raise DataError if the dtype cannot represent
    the value.
    """
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
    """Return the column name of an info."""
    return "info." + name.replace("/", ".")


class StoreWriter:
    """Sets up a recording: the store's columns and metadata, and the writers of episodes.

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
            raise ConfigError(f"record: expected a DatasetStore or a StoreClient, found {type(store).__name__}")
        self.store = store
        self.infos = _columns.check_infos(infos)
        self.on_interrupted = check_on_interrupted(on_interrupted)
        self.observations = _columns.observation_columns(observations, images, declared=declared)
        self.actions = _columns.action_columns(actions)
        if isinstance(store, DatasetStore):
            adopt(store, mark=self.on_interrupted == "mark")
        # None: not known before the first episode.
        self.has_seeds: bool | None = SEED in store.columns if len(store.columns) else None
        store.describe(_columns.metadata_of(recording, self.observations, self.actions, store.alignment))
        self._episodes: list[EpisodeWriter] = []
        if isinstance(store, DatasetStore):
            store.interrupt_on_close(self)

    def episodes(self) -> EpisodeWriter:
        """Return a writer of episodes."""
        store, mark, running = self.store, self.on_interrupted == "mark", None
        if isinstance(store, DatasetStore) and store.path is not None and mark:
            running = Running(store.path, sync=store.sync == "append")
        self._episodes.append(EpisodeWriter(store, _columns.placeholder(self.actions), mark=mark, running=running))
        return self._episodes[-1]

    def interrupt(self) -> None:
        """Interrupt the running episodes."""
        for episodes in self._episodes:
            episodes.interrupt()

    def close(self, environment: Callable[..., Any], **options: Any) -> None:
        """End the recording, and close the environment, even if rows cannot be written."""
        with ExitStack() as ends:
            ends.callback(environment, **options)
            for episodes in reversed(self._episodes):
                ends.callback(episodes.close)

    def seen(self, observation: Row, infos: Row, seed: int | None) -> Row:
        """Return the columns of an observation, its infos and its seed."""
        if self.has_seeds is None:
            self.has_seeds = seed is not None
        if self.has_seeds:
            observation[SEED] = seed
        return observation | infos if infos else observation


def recorder_of(env: Any, recorders: Mapping[str, tuple[type[_T], str]], hint: str) -> type[_T]:
    """Return the class that records an environment. The class is derived from a class of this package and from a class
    of the environment's library.

    Args:
        env: The environment.
        recorders: For each kind of environment, such as "gymnasium.Env", the class of this package and the name of the
            library's class. The library is imported only for an environment of its kind.
        hint: The end of the error message for environments of other kinds.

    Raises:
        ConfigError: The environment is of another kind.
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
    """Return the names of an environment's base classes, such as "gymnasium.Env", without an import."""
    return {f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in type(env).__mro__}
