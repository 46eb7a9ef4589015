"""The rows of an episode that are not in the store yet, in files beside it: who is killed does not lose them.

In the folder of a store lie, in its folder ``recording``, two logs for each environment that is recorded. Rows are
written to one of them before they are handed to the store; after so many the other one, which is emptied first, takes
over. So at any moment the two together have the latest rows. When an episode has ended, both are empty.

The next recorder of the store finds what was left there, and appends what the store does not have of it: the last row
that the store has tells which rows these are. Such files outlive the process, not the machine.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.errors import DataError
from mouse_core.files.log import Log, read_log
from mouse_core.files.reading import reading
from mouse_core.files.writing import make_folder, remove, storing
from mouse_core.record._columns import Row
from mouse_core.spec import check_dtype
from mouse_core.store.dataset_store import DatasetStore

FOLDER = "recording"
_ROWS_OF_A_FILE = 64

_alive: weakref.WeakSet[Running] = weakref.WeakSet()


class Running:
    """The logs of one environment.

    Args:
        path: The store's folder.
        keeps_all: Whether all rows of an episode stay in the logs until it has ended, rather than the latest.
    """

    def __init__(self, path: str, *, keeps_all: bool) -> None:
        self._folder = Path(path, FOLDER)
        self.name = os.urandom(6).hex()
        self._keeps_all = keeps_all
        self._process = os.getpid()
        self._logs: list[Log] = []
        self._rows = 0  # in the log that is written to
        _alive.add(self)
        self._close = weakref.finalize(self, _remove_empty, self._logs, self._process)

    def add(self, row: Row, waiting: Sequence[Row]) -> None:
        """Write a row.

        Args:
            row: The row.
            waiting: Rows before it that the store does not have, the oldest first.

        Raises:
            StorageError: It cannot be written.
        """
        if self._process != os.getpid():
            return  # a forked child, which the store refuses
        if not self._logs:
            make_folder(self._folder, sync=False)
            self._logs += [Log(self._folder / f"{self.name}-{letter}.log") for letter in "ab"]
        if self._rows >= _ROWS_OF_A_FILE and not self._keeps_all:
            self._logs.reverse()
            self._logs[0].cut(0)
            self._rows = 0
            for before in waiting:
                self._write(before)
        self._write(row)

    def _write(self, row: Row) -> None:
        self._logs[0].append(encoded(row), sync=False)
        self._rows += 1

    def end(self) -> None:
        """The store has all rows."""
        if self._process != os.getpid():
            return
        # The older one first: alone it would look like an episode that was broken off, and be appended once more.
        for log in reversed(self._logs):
            if log.size:
                log.cut(0)
        self._rows = 0

    def close(self) -> None:
        """Nothing more is recorded: remove the files."""
        self._close()
        _alive.discard(self)


def _remove_empty(logs: list[Log], process: int) -> None:
    """Close logs, and remove those without rows."""
    for log in logs:
        log.close()
        if not log.size and process == os.getpid():
            remove(log.path)
    logs.clear()


def left_over(path: str) -> Iterator[tuple[list[Path], list[Row]]]:
    """What recorders that died left beside a store: files, and the rows in them, of one episode each, in order.

    Raises:
        DataError: A damaged file.
    """
    folder = Path(path, FOLDER)
    if not folder.is_dir():
        return
    living = {one.name for one in _alive}
    with storing(f"folder {folder}"):
        found = sorted(name for name in os.listdir(folder) if name.endswith(("-a.log", "-b.log")))
    for name in sorted({name[: -len("-a.log")] for name in found} - living):
        files = [folder / file for file in found if file[: -len("-a.log")] == name]
        rows: dict[int, Row] = {}
        for file in files:
            with reading(file):
                for record in read_log(file):
                    row = decoded(record)
                    rows[int(row["episode_step"])] = row
        steps = sorted(rows)
        # Older rows than those that were handed on are in one log only, and may be a part: what is joined counts.
        first = next((at for at in range(len(steps) - 1, 0, -1) if steps[at] != steps[at - 1] + 1), 0)
        yield files, [rows[step] for step in steps[first:]]


def missing(store: DatasetStore, rows: list[Row]) -> list[Row]:
    """Which rows of an episode a store does not have.

    Args:
        store: The store.
        rows: Rows that follow each other in the episode, to the latest.
    """
    if not rows:
        return []
    last = store[-1] if len(store) else {"done": 1, "episode_step": -1}
    first, step = rows[0]["episode_step"], last.get("episode_step", -1)
    if not last["done"]:
        there = step - first + 1  # of these rows, if it is this episode
        if there == 0 or (0 < there <= len(rows) and _equal(last, rows[there - 1])):
            return rows[there:]
    if first != 0:
        return []  # between what the store has and these, rows are missing
    # The store may have said of the last one that it was truncated, which these rows do not say yet.
    ended = [*rows[:-1], {**rows[-1], "done": rows[-1]["done"] or last["done"]}]
    there = store[len(store) - len(rows) :] if len(store) >= len(rows) else []
    return [] if there and all(map(_equal, there, ended)) else rows


def _equal(found: Mapping[str, Any], row: Row) -> bool:
    """Whether a row of a store is this one."""
    return all(name in found and _same(found[name], value) for name, value in row.items())


def _same(one: Any, other: Any) -> bool:
    if other is None or isinstance(other, str | dict):
        return bool(one == other)
    ones, others = np.asarray(one), np.asarray(other)
    return ones.shape == others.shape and bool((ones == others).all() or np.array_equal(ones, others, equal_nan=True))


# ---------------------------------------------------------------------- a row as bytes


def encoded(row: Row) -> bytes:
    """A row as JSON in a line, and behind it the bytes of its arrays and texts in their order."""
    head: dict[str, Any] = {}
    parts = []
    for name, value in row.items():
        kind = type(value)
        if kind is int or value is None or kind is bool:
            head[name] = value
        elif kind is float:
            head[name] = {"float": value.hex()}
        elif kind is dict and value.keys() == {"bytes", "path"}:  # an encoded picture
            head[name] = {"image": len(value["bytes"])}
            parts.append(value["bytes"])
        elif kind is str:
            text = value.encode()
            head[name] = {"text": len(text)}
            parts.append(text)
        else:
            array = np.asarray(value)
            if array.dtype.kind in "biuf":
                head[name] = {"dtype": array.dtype.str, "shape": array.shape}
                parts.append(array.tobytes())
            else:
                head[name] = {"json": value}
    try:
        return b"\n".join([json.dumps(head).encode(), *([b"".join(parts)] if parts else [])])
    except (TypeError, ValueError) as error:
        raise DataError(f"record: expected numbers, arrays and texts, found {row!r:.200}") from error


def decoded(record: bytes) -> Row:
    """What ``encoded`` was given.

    Raises:
        DataError: Something else.
    """
    head, _, rest = record.partition(b"\n")
    said = json.loads(head)
    if not isinstance(said, dict) or not {"reward", "done", "episode_step"} <= said.keys():
        raise DataError(f"expected a row, found {head!r:.80}")
    row: Row = {}
    for name, value in said.items():
        if not isinstance(value, dict):
            row[name] = value
        elif "json" in value:
            row[name] = value["json"]
        elif "float" in value:
            row[name] = float.fromhex(value["float"])
        elif "dtype" in value:
            dtype, shape = check_dtype(value["dtype"], where=name), tuple(value["shape"])
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            row[name] = np.frombuffer(rest[:size], dtype).reshape(shape)[()]
            rest = rest[size:]
        else:
            size = value["image"] if "image" in value else value["text"]
            row[name] = {"bytes": rest[:size], "path": None} if "image" in value else rest[:size].decode()
            rest = rest[size:]
    return row
