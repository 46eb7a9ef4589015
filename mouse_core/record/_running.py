"""Files beside a store with the rows of a running episode that the store lacks, so that a kill loses none.

In the folder of a store lie, in its folder ``recording``, two files for each environment that is recorded. A row is
written to one of them before it is handed to the store; after so many the other one, which is emptied first, takes
over. So at any moment the two together have the latest rows. When an episode has ended, both are empty.

With each row stands which one it will be in the store, counted over all that ever were. With rows that wait until their
episode has ended, that is known only then, and written behind them. So the next recorder knows which of the rows that
it finds the store does not have: where 1,000 were written, and the files have 998 to 1,001, it appends 1,000 and 1,001.

Rows survive the process as soon as they are written. The machine they survive in a store of ``sync="append"``, and by
chance: what is read is whole, and goes where it belongs, or is left out.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from mouse_core.errors import DataError
from mouse_core.files.log import MappedLog, read_mapped_log
from mouse_core.files.reading import reading
from mouse_core.files.writing import make_folder, remove, storing, sync_folders
from mouse_core.record._columns import Row
from mouse_core.spec import check_dtype
from mouse_core.store.dataset_store import DatasetStore

_INT, _FLOAT, _BOOL, _LENGTH = (struct.Struct(f"<{code}") for code in "qd?Q")
_IMAGE = {"bytes", "path"}


def _text(value: str) -> bytes:
    content = value.encode()
    return _LENGTH.pack(len(content)) + content


def _image(value: dict[str, Any]) -> bytes:
    if value.keys() != _IMAGE:
        raise KeyError
    return _LENGTH.pack(len(value["bytes"])) + bytes(value["bytes"])


def _json(value: Any) -> bytes:
    if _code_of(value) != "json":
        raise KeyError
    content = json.dumps(value).encode()
    return _LENGTH.pack(len(content)) + content


_WRITERS: dict[str, Callable[[Any], bytes]] = {
    "none": lambda _: b"",
    "bool": _BOOL.pack,
    "int": _INT.pack,
    "float": _FLOAT.pack,
    "array": methodcaller("tobytes"),
    "text": _text,
    "image": _image,
    "json": _json,
}
_CODES = {type(None): "none", bool: "bool", float: "float", str: "text"}


class RowEncoder:
    """Encodes rows as bytes. The head with names and types is kept from row to row, as rows mostly have the same."""

    def __init__(self) -> None:
        # Of each column: name, type, what makes bytes of its values, dtype and shape of an array.
        self._alike: list[tuple[str, Any, Callable[[Any], bytes], Any, Any]] = []
        self._head = b""

    def encoded(self, row: Row) -> bytes:
        """A row as bytes.

        Raises:
            DataError: It has something else than numbers, arrays and texts.
        """
        try:
            parts = self._parts(row)
            if parts is None:
                self._look_at(row)
                parts = self._parts(row)
            assert parts is not None
        except (TypeError, ValueError) as error:
            raise DataError(f"record: expected numbers, arrays and texts, found {row!r:.200}") from error
        return b"".join(parts)

    def _look_at(self, row: Row) -> None:
        self._alike, said = [], []
        for name, value in row.items():
            code = _code_of(value)
            dtype, shape = (value.dtype, value.shape) if code == "array" else (None, None)
            self._alike.append((name, type(value), _WRITERS[code], dtype, shape))
            said.append([name, code] if dtype is None else [name, code, dtype.str, list(value.shape)])
        self._head = json.dumps(said).encode() + b"\n"

    def _parts(self, row: Row) -> list[bytes] | None:
        """The bytes of a row in parts; None where its names or types differ from those of the kept head."""
        if len(row) != len(self._alike):
            return None
        parts = [self._head]
        try:
            for (name, value), (expected, kind, write, dtype, shape) in zip(row.items(), self._alike, strict=True):
                if type(value) is not kind or name != expected:
                    return None
                if dtype is not None and (value.dtype != dtype or value.shape != shape):
                    return None
                parts.append(write(value))
        except (struct.error, KeyError):
            return None  # more than 64 bits; a dict that is a picture where none was, or the other way round
        return parts


def _code_of(value: Any) -> str:
    """Return the name of the codec that converts a value to bytes."""
    kind = type(value)
    if kind is int:
        return "int" if -(2**63) <= value < 2**63 else "json"
    if kind is dict:
        return "image" if value.keys() == _IMAGE else "json"
    is_array = isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf"
    return "array" if is_array else _CODES.get(kind, "json")


def decoded(record: bytes) -> Row:
    """The row that ``RowEncoder.encoded`` was given.

    Raises:
        DataError: Something else.
    """
    head, _, rest = record.partition(b"\n")
    row: Row = {}
    for name, code, *more in json.loads(head):
        row[name], rest = _value(rest, name, code, more)
    if rest or not {"reward", "done", "episode_step"} <= row.keys():
        raise DataError(f"expected a row, found {head!r:.80} and {len(rest)} bytes behind it")
    return row


def _value(rest: bytes, name: str, code: str, more: list[Any]) -> tuple[Any, bytes]:
    """A value, and what stands behind it."""
    if code == "none":
        return None, rest
    if code == "bool":
        return rest[0] == 1, rest[1:]
    if code in ("int", "float"):
        (number,) = (_INT if code == "int" else _FLOAT).unpack_from(rest)
        return number, rest[8:]
    if code == "array":
        dtype, shape = check_dtype(more[0], where=name), tuple(more[1])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return np.frombuffer(rest[:size], dtype).reshape(shape)[()], rest[size:]
    (length,) = _LENGTH.unpack_from(rest)
    content, rest = rest[8 : 8 + length], rest[8 + length :]
    if code == "image":
        return {"bytes": content, "path": None}, rest
    return (content.decode() if code == "text" else json.loads(content)), rest


FOLDER = "recording"
TRUNCATED = 2
_ROWS_OF_A_FILE = 64
_NUMBER = struct.Struct("<q")
_GOING = struct.Struct("<qqq")
# What stands in place of a row's number: it waits, or this is no row, but says where rows that waited go.
_WAITS, _GOES = -1, -2
_ENDINGS = ("-a.rows", "-b.rows")
# Where whoever finds rows that waited says that they go into the store now; read last.
_FOUND = "-c.rows"

_alive: weakref.WeakSet[Running] = weakref.WeakSet()


class Running:
    """The files of one environment.

    Args:
        path: The store's folder.
        keeps_all: Whether all rows of an episode stay in the files until it has ended, rather than the latest.
        sync: Whether to wait for the disk, row by row.
    """

    def __init__(self, path: str, *, keeps_all: bool, sync: bool = False) -> None:
        self._folder = Path(path, FOLDER)
        self.name = os.urandom(6).hex()
        self._keeps_all, self._sync = keeps_all, sync
        self._process = os.getpid()
        self._files: list[MappedLog] = []
        self._rows = 0  # in the file that is written to
        self._encoded = RowEncoder().encoded
        _alive.add(self)
        self._close = weakref.finalize(self, _remove_empty, self._files, self._process)

    def add(self, row: Row, waiting: Sequence[Row] = (), number: int = _WAITS) -> None:
        """Write a row.

        Args:
            row: The row.
            waiting: Rows before it that the store does not have, the oldest first.
            number: Which one it will be in the store, of all that ever were.

        Raises:
            DataError: It has something that cannot be written.
            StorageError: It cannot be written.
        """
        if self._process != os.getpid():
            return  # a forked child, which the store refuses
        if not self._files:
            self._begin()
        if self._rows >= _ROWS_OF_A_FILE and not self._keeps_all:
            self._files.reverse()
            self._files[0].clear()
            self._rows = 0
            for before, one in enumerate(waiting, number - len(waiting)):
                self._write(one, before)
        self._write(row, number)
        if self._sync:
            self._files[0].sync()

    def _begin(self) -> None:
        make_folder(self._folder, sync=self._sync)
        self._files += [MappedLog(self._folder / f"{self.name}{ending}") for ending in _ENDINGS]
        if self._sync:
            sync_folders([self._folder])

    def _write(self, row: Row, number: int) -> None:
        self._files[0].append(_NUMBER.pack(number) + self._encoded(row))
        self._rows += 1

    def goes_to(self, number: int, begin: int, count: int) -> None:
        """Now ``count`` rows from ``begin`` on go into the store, the first as row ``number``; it has those before."""
        if self._process == os.getpid() and self._files:
            self._files[0].append(_NUMBER.pack(_GOES) + _GOING.pack(number, begin, count))
            if self._sync:
                self._files[0].sync()

    def end(self) -> None:
        """The store has all rows."""
        if self._process != os.getpid():
            return
        for file in self._files:
            if not file.is_empty:
                file.clear()
        self._rows = 0

    def close(self) -> None:
        """Stop recording and remove the files."""
        self._close()
        _alive.discard(self)


def _remove_empty(files: list[MappedLog], process: int) -> None:
    """Close files, and remove those without rows."""
    for file in files:
        file.close()
        if file.is_empty and process == os.getpid():
            remove(file.path)
    files.clear()


# ---------------------------------------------------------------------- what was left


@dataclass(frozen=True)
class LeftOver:
    """The files that a killed recorder left beside a store.

    Attributes:
        files: Its files.
        numbered: Rows by their numbers in the store.
        waited: Or rows that waited for the end of their episode.
        going: Which of these were on their way into the store: the number of the first one there, which one it is
            here, and how many they are. The store has those before.
        note: Where to write that they are.
    """

    files: list[Path]
    numbered: dict[int, Row]
    waited: list[Row]
    going: tuple[int, int, int]
    note: Path

    def missing(self, store: DatasetStore) -> list[Row]:
        """The rows that the store does not have, which follow each other."""
        written = store.written
        if self.waited:
            return self.waited[self._there(store) :]
        rows: list[Row] = []
        while written + len(rows) in self.numbered:
            rows.append(self.numbered[written + len(rows)])
        if rows and rows[0]["episode_step"]:
            last = store[-1] if len(store) else {"done": 1}
            if last["done"] or last.get("episode_step") != rows[0]["episode_step"] - 1:
                return []  # rows before them are lost
        return rows

    def goes_to(self, number: int, count: int) -> None:
        """Now the last ``count`` rows go into the store, the first as row ``number``; who dies then knows it."""
        if self.waited:
            remove(self.note)
            note = MappedLog(self.note)
            note.append(_NUMBER.pack(_GOES) + _GOING.pack(number, len(self.waited) - count, count))
            note.close()

    def _there(self, store: DatasetStore) -> int:
        """Return how many of the waiting rows the store has received."""
        number, begin, count = self.going
        there = min(count, max(0, store.written - number))
        at = number - (store.written - len(store))  # behind those that were dropped
        if there and at >= 0 and not _equal(store[at], self.waited[begin]):
            there = 0  # somebody else's
        return begin + there


def left_over(path: str) -> Iterator[LeftOver]:
    """Yield the files that killed recorders left beside a store.

    Raises:
        DataError: A damaged file.
    """
    folder = Path(path, FOLDER)
    if not folder.is_dir():
        return
    living = {one.name for one in _alive}
    with storing(f"folder {folder}"):
        found = sorted(name for name in os.listdir(folder) if name.endswith((*_ENDINGS, _FOUND)))
    for name in sorted({name[: -len(_FOUND)] for name in found} - living):
        files = [folder / file for file in found if file[: -len(_FOUND)] == name]
        numbered: dict[int, Row] = {}
        waited: list[Row] = []
        going = (0, 0, 0)
        for file in files:
            for record in read_mapped_log(file):
                with reading(file):
                    (number,) = _NUMBER.unpack_from(record)
                    if number == _GOES:
                        going = _GOING.unpack_from(record, _NUMBER.size)
                    elif number == _WAITS:
                        waited.append(decoded(record[_NUMBER.size :]))
                    else:
                        numbered[number] = decoded(record[_NUMBER.size :])
        yield LeftOver(files, numbered, waited, going, folder / f"{name}{_FOUND}")


def adopt(store: DatasetStore, *, mark: bool) -> None:
    """Append what recorders that were killed left beside a store.

    An episode that was running is truncated where it was broken off. With ``mark`` False it is left out, unless some of
    its rows are in the store.

    Raises:
        DataError: A damaged file; the message names it.
        StorageError: The rows cannot be written.
    """
    if store.path is None:
        return
    for left in left_over(store.path):
        rest = left.missing(store)
        if rest and (mark or rest[-1]["done"] or rest[0]["episode_step"]):
            for row, after in zip(rest, [*rest[1:], {"episode_step": 0}], strict=True):
                if after["episode_step"] == 0:
                    row["done"] = row["done"] or TRUNCATED
            left.goes_to(store.written, len(rest))
            store.extend([{name: row[name] for name in store.columns} for row in rest] if store.columns else rest)
            store.flush()
        for file in dict.fromkeys([*left.files, left.note]):  # the note last
            remove(file)


def _equal(found: Mapping[str, Any], row: Row) -> bool:
    """Whether a row of a store is this one, which may have been told since that it is the last of an episode."""
    return all(name in found and _same(found[name], value) for name, value in row.items() if name != "done")


def _same(one: Any, other: Any) -> bool:
    if other is None or isinstance(other, str | dict):
        return bool(one == other)
    ones, others = np.asarray(one), np.asarray(other)
    return ones.shape == others.shape and bool((ones == others).all() or np.array_equal(ones, others, equal_nan=True))
