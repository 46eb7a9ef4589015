"""Which sealed groups have all the late columns that they wait for."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.locks import ProcessLock
from mouse_core.errors import DataError
from mouse_core.files.log import read_log
from mouse_core.files.writing import storing
from mouse_core.groups.arrow import declared_field, declared_values
from mouse_core.groups.columns import Columns, RolloutColumn
from mouse_core.groups.files import (
    LATE,
    STATE,
    GroupFile,
    digest_of,
    encode_table,
    read_declared,
    read_table,
    writing_options,
)
from mouse_core.groups.records import RolloutRecord, with_late
from mouse_core.groups.waiting import Unsealed

_VERSION = 1
_NOTED = b"mouse_late_version"
_FILES = b"\0"


@dataclass(frozen=True)
class Chunk:
    """Values of a late column for some rollouts.

    Args:
        column: The column.
        uids: Of the rollouts.
        values: One for each, as Arrow has them.
    """

    column: RolloutColumn
    uids: Sequence[str]
    values: pa.Array

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes."""
        return int(self.values.nbytes) + sum(map(len, self.uids))

    def rows(self) -> pa.RecordBatch:
        """Uids and values beside each other."""
        uids = pa.array(self.uids, pa.string())
        return pa.RecordBatch.from_arrays([uids, self.values], schema=late_schema(self.column))

    def take(self, rows: Sequence[int]) -> Chunk:
        """Some of them."""
        return Chunk(self.column, [self.uids[row] for row in rows], self.values.take(pa.array(rows, pa.int64())))

    def cut(self, nbytes: int) -> Iterator[Chunk]:
        """The same in chunks of about so many bytes."""
        count = max(1, -(-self.nbytes // nbytes))
        ends = [len(self.uids) * place // count for place in range(count + 1)]
        for begin, end in pairwise(ends):
            if begin < end:
                yield Chunk(self.column, self.uids[begin:end], self.values.slice(begin, end - begin))


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks of one column as one."""
    uids = [uid for chunk in chunks for uid in chunk.uids]
    return Chunk(chunks[0].column, uids, pa.concat_arrays([chunk.values for chunk in chunks]))


def late_schema(column: RolloutColumn) -> pa.Schema:
    """The columns of a file."""
    uid = pa.field("rollout_uid", pa.string(), nullable=False)
    return pa.schema([uid, declared_field(column, of_example=True)])


def values_of(column: RolloutColumn, rows: pa.Array) -> list[npt.NDArray[Any]]:
    """The values as arrays.

    Raises:
        DataError: Some are missing, or of another shape.
    """
    found = [value for value in declared_values(column, rows, of_example=True) if value is not None]
    if len(found) < len(rows):
        raise DataError(f"column {column.name!r}: expected a value for each rollout, found one without")
    return found


# ---------------------------------------------------------------------- records of the log


def encode_record(chunks: Iterable[Chunk]) -> bytes:
    """Chunks as a record of the log."""
    pieces = [bytes([_VERSION])]
    for chunk in chunks:
        name, rows = chunk.column.name.encode(), bytes(chunk.rows().serialize())
        pieces += [len(name).to_bytes(4, "little"), name, len(rows).to_bytes(8, "little"), rows]
    return b"".join(pieces)


def decode_record(record: bytes, declared: Columns, path: Path) -> list[Chunk]:
    """What ``encode_record`` wrote.

    Raises:
        DataError: Something else, or of a newer version, or of a column that was not declared; it names ``path``.
    """
    _check_version(record[:1].hex(), path)
    chunks, place = [], 1
    try:
        while place < len(record):
            size = int.from_bytes(record[place : place + 4], "little")
            name = record[place + 4 : place + 4 + size].decode()
            place += 4 + size
            size = int.from_bytes(record[place : place + 8], "little")
            column = declared[name]
            rows = pa.ipc.read_record_batch(pa.py_buffer(record[place + 8 : place + 8 + size]), late_schema(column))
            chunks.append(Chunk(column, rows.column(0).to_pylist(), rows.column(1)))
            place += 8 + size
    except (pa.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"log {path}: expected values of late columns that were declared, found: {error}") from error
    return chunks


def encode_files(paths: Iterable[Path]) -> bytes:
    """Files, by their columns, as a record of the log: without it nobody would miss one."""
    return _FILES + json.dumps([[path.parent.name, path.name] for path in paths]).encode()


def decode_files(record: bytes) -> set[tuple[str, str]] | None:
    """The columns and names of files that ``encode_files`` wrote; None: it is another record."""
    return {(column, name) for column, name in json.loads(record[1:])} if record[:1] == _FILES else None


def _check_version(said: str, path: Path) -> None:
    try:
        version = int(said, 16)
    except ValueError:
        version = 0
    if version != _VERSION:
        raise DataError(
            f"late columns {path}: expected them of version {_VERSION}, found {said!r}"
            + (": a newer release wrote them" if version > _VERSION else "")
        )


# ---------------------------------------------------------------------- files


def encode_file(chunk: Chunk, compression: str) -> tuple[str, memoryview]:
    """The name of a file, and its content."""
    rows = pa.Table.from_batches([chunk.rows()])
    options = writing_options(rows.schema, compression, Columns([chunk.column]))
    content = encode_table(rows, options, {_NOTED: f"{_VERSION:x}".encode()})
    return f"late-{digest_of(content)}.parquet", content


def late_folder(root: Path, column: RolloutColumn) -> Path:
    """Where the files of a column are."""
    return root / LATE / column.name


def late_paths(root: Path, column: RolloutColumn) -> list[Path]:
    """The files of a column."""
    folder = late_folder(root, column)
    with storing(f"folder {folder}"):
        if not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if path.suffix == ".parquet" and path.name[0] != ".")


def read_uids(path: Path) -> list[str]:
    """Whose values a file has; these are not read.

    Raises:
        DataError: It is not what was written, or of a newer version.
        StorageError: It cannot be read.
    """
    import pyarrow.parquet as pq

    with storing(f"late columns {path}"):
        source = pa.OSFile(str(path))
    try:
        with source, pq.ParquetFile(source, page_checksum_verification=True) as file:
            said = (file.metadata.metadata or {}).get(_NOTED, b"")
            _check_version(said.decode(errors="replace"), path)
            uids: list[str] = file.read(["rollout_uid"], use_threads=False).column(0).to_pylist()
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        raise DataError(f"late columns {path}: expected them as written, found damage: {error}") from error
    return uids


def read_values(path: Path, column: RolloutColumn) -> list[npt.NDArray[Any]]:
    """The values of a file.

    Raises:
        DataError: It is not what was written.
        StorageError: It cannot be read.
    """
    rows = read_table(path, late_schema(column), columns=[column.name]).column(0).combine_chunks()
    return values_of(column, rows)


def checked_chunk(column: RolloutColumn, given: Any, counts: Sequence[int] | None) -> Chunk:
    """Values by uid as a chunk.

    Args:
        column: The column.
        given: A dict of them.
        counts: How many tokens or turns each of the rollouts has; None where there is one value for a rollout.

    Raises:
        DataError: Another shape or type, or values that the dtype or the column does not have; the message names the
            rollout.
    """
    uids, items = list(given), list(given.values())
    where = f"add_column {column.name!r}"
    flat = _flat(column, items, counts)
    total = len(items) if counts is None else sum(counts)
    try:
        if flat is None:
            raise DataError(f"{where}: expected values by uid")
        flat = column.taken(flat, total, where)
    except DataError:
        # One of them is not as it should be: which one?
        own: Sequence[int | None] = [None] * len(uids) if counts is None else counts
        each = [
            column.taken(item, count, f"{where}, rollout {uid!r}")
            for uid, item, count in zip(uids, items, own, strict=True)
        ]
        flat = np.concatenate([value[None] if counts is None else value for value in each])
    kind = late_schema(column).field(1).type
    values = pa.array(flat.reshape(-1))
    if pa.types.is_list(kind):
        size = int(np.prod(column.shape))
        ends = np.cumsum([0, *(counts or [1] * len(uids))]) * size
        if ends[-1] > np.iinfo(np.int32).max:
            raise DataError(f"{where}: expected fewer than 2**31 values at once, found {ends[-1]}")
        values = pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values, type=kind)
    return Chunk(column, uids, values)


def _flat(column: RolloutColumn, items: Sequence[Any], counts: Sequence[int] | None) -> npt.NDArray[Any] | None:
    """All values behind each other, if they are as they should be or that is still to be seen."""
    try:
        if counts is None:
            flat = np.array(items)
        else:
            arrays = list(map(np.asarray, items))
            if [array.shape[:1] for array in arrays] != [(count,) for count in counts]:
                return None
            if len({array.dtype for array in arrays}) > 1:
                return None
            flat = np.concatenate(arrays)
    except (ValueError, TypeError, RuntimeError):
        return None
    flat.flags.writeable = False  # nobody else has it, so it need not be copied
    return flat


_ROWS = 32
"""A place is the number of the chunk, and behind it in so many bits the row."""
_KEPT_FILES = 2


def late_log(root: Path) -> Path:
    """The log of values that are not in files yet."""
    return root / STATE / "late.log"


class LatePlaces:
    """Where the values of late columns lie; a value is read when it is asked for. Threads may read while one adds.

    Args:
        root: The buffer's folder.
        declared: The folder's columns.
        records: Of the log.

    Attributes:
        files: Those that are there.
        unnoted: Those of them that the log does not name.

    Raises:
        DataError: A file that is gone, damage, or a newer version; the message names the file.
        StorageError: Something cannot be read.
    """

    def __init__(self, root: Path, declared: Columns, records: Iterable[bytes]) -> None:
        self.declared = declared
        self._lock = ProcessLock()
        self.places: dict[str, dict[str, int]] = {column.name: {} for column in declared.late}
        self._chunks: list[Chunk | tuple[RolloutColumn, Path] | None] = []
        self._read: OrderedDict[int, list[npt.NDArray[Any]]] = OrderedDict()
        noted = [(record, decode_files(record)) for record in records]
        self.files = [path for column in declared.late for path in late_paths(root, column)]
        known = set[tuple[str, str]]().union(*(files for _, files in noted if files is not None))
        there = {(path.parent.name, path.name) for path in self.files}
        for name in sorted(known - there):
            raise DataError(f"late columns {root.joinpath(LATE, *name)}: expected the file, whose values were noted")
        self.unnoted = [path for path in self.files if (path.parent.name, path.name) not in known]
        for path in self.files:
            self.add_file(declared[path.parent.name], path, read_uids(path))
        for record in [record for record, files in noted if files is None]:
            for chunk in decode_record(record, declared, late_log(root)):
                self.add_chunk(chunk)

    def add_file(self, column: RolloutColumn, path: Path, uids: Sequence[str]) -> None:
        """Say that a file has the values of some rollouts."""
        self._add(column.name, (column, path), uids)

    def add_chunk(self, chunk: Chunk) -> None:
        """Keep values in memory; those that are in a file already stay there."""
        places = self.places[chunk.column.name]
        if not places.keys().isdisjoint(chunk.uids):
            chunk = chunk.take([row for row, uid in enumerate(chunk.uids) if uid not in places])
        if chunk.uids:
            self._add(chunk.column.name, chunk, chunk.uids)

    def _add(self, name: str, chunk: Chunk | tuple[RolloutColumn, Path], uids: Sequence[str]) -> None:
        with self._lock:
            first = len(self._chunks) << _ROWS
            self._chunks.append(chunk)
            self.places[name].update(zip(uids, range(first, first + len(uids)), strict=True))

    def forget(self, number: int) -> None:
        """Let go of a chunk in memory whose values are in a file now."""
        with self._lock:
            self._chunks[number] = None

    def in_memory(self) -> list[tuple[int, Chunk]]:
        """The chunks that no file has, and their numbers."""
        pairs = enumerate(self._chunks)
        return [(number, chunk) for number, chunk in pairs if isinstance(chunk, Chunk)]

    def value(self, name: str, uid: str) -> npt.NDArray[Any] | None:
        """A value, if it has come.

        Raises:
            DataError: Its file is damaged; the message names it.
            StorageError: It cannot be read.
        """
        with self._lock:
            place = self.places[name].get(uid)
            return None if place is None else self._at(place >> _ROWS, place & ((1 << _ROWS) - 1))

    def _at(self, number: int, row: int) -> npt.NDArray[Any]:
        """The value in a row of a chunk."""
        values = self._read.get(number)
        if values is None:
            chunk = self._chunks[number]
            if isinstance(chunk, Chunk):
                return values_of(chunk.column, chunk.values.slice(row, 1))[0]
            assert chunk is not None  # the values of one that was forgotten have other places
            self._read[number] = values = read_values(chunk[1], chunk[0])
            # Rollouts are mostly asked for in the order in which their values came.
            if len(self._read) > _KEPT_FILES:
                self._read.popitem(last=False)
        return values[row]

    def fill(self, rollouts: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """Rollouts with the columns that have come."""
        if not self.places:
            return list(rollouts)
        return [self._filled(rollout) for rollout in rollouts]

    def _filled(self, rollout: RolloutRecord) -> RolloutRecord:
        values = {name: self.value(name, rollout.rollout_uid) for name in self.places}
        there = {name: value for name, value in values.items() if value is not None}
        if not there and "reward" not in self.places:
            return rollout
        return with_late(rollout, there, self.declared)

    def rewards(self, part: GroupFile) -> tuple[float | None, ...]:
        """What the rollouts of a group earned, as far as that is known."""
        late = [self.value("reward", uid) if "reward" in self.places else None for uid in part.uids]
        return tuple(
            own if own is not None else None if value is None else float(value)
            for own, value in zip(part.rewards, late, strict=True)
        )


class LateColumns:
    """The late columns of a folder as they are when the first of them is asked for; also in another process.

    Threads may share them.

    Args:
        root: The buffer's folder.
        places: Where they lie, if that is known: to the folder's writer.
    """

    def __init__(self, root: Path, places: LatePlaces | None = None) -> None:
        self._root, self._places = root, places
        self._lock = ProcessLock()

    def __reduce__(self) -> Any:
        return LateColumns, (self._root,)

    def fill(self, rollouts: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """Rollouts with the columns that have come.

        Raises:
            DataError: A damaged file, or one of a newer version; the message names it.
            StorageError: It cannot be read.
        """
        with self._lock:
            return self._known().fill(rollouts)

    def rewards(self, part: GroupFile) -> tuple[float | None, ...]:
        """What the rollouts of a group earned, None where that is not known yet; errors as those of ``fill``."""
        if None not in part.rewards:
            return part.rewards
        with self._lock:
            return self._known().rewards(part)

    @property
    def declared(self) -> Columns:
        """The folder's columns; errors as those of ``fill``."""
        with self._lock:
            return self._known().declared

    def values(self, name: str, uids: Sequence[str]) -> list[npt.NDArray[Any] | None]:
        """A column of some rollouts, None where it has not come; errors as those of ``fill``."""
        with self._lock:
            places = self._known()
            return [places.value(name, uid) for uid in uids]

    def _known(self) -> LatePlaces:
        if self._places is None:
            declared = read_declared(self._root)
            # The log first: what leaves it meanwhile is in a file.
            records = read_log(late_log(self._root)) if declared.late else []
            self._places = LatePlaces(self._root, declared, records)
        return self._places


@dataclass(frozen=True)
class Awaited:
    """The rollouts that a late column is awaited of.

    Args:
        uids: Of the rollouts, the sealed ones first, each in the order they came.
        oldest: When the first of them was created, in seconds since 1970; None where there are none.
    """

    uids: tuple[str, ...] = ()
    oldest: float | None = None

    def __len__(self) -> int:
        return len(self.uids)


class Readiness:
    """How many values each sealed group still waits for.

    A group waits for the late columns that had been declared when it was sealed. A reward that came with a rollout is
    there.

    Args:
        late: Where values of late columns lie.
        given_up: Uids of rollouts that nothing is awaited of.

    Attributes:
        waiting: The groups that wait, by their places in the order in which they were sealed.
        num_rollouts: How many rollouts these have.
    """

    def __init__(self, late: LatePlaces, given_up: Set[str] = frozenset()) -> None:
        self._late, self._given_up = late, given_up
        names = list(late.declared)
        self._late_from = {column.name: names.index(column.name) for column in late.declared.late}
        self.waiting: dict[int, GroupFile] = {}
        self._missing: dict[int, int] = {}
        self.num_rollouts = 0

    def awaits(self, part: GroupFile) -> list[str]:
        """The late columns that a group was to have when it was sealed."""
        return [name for name, place in self._late_from.items() if place < part.declared]

    def add(self, place: int, part: GroupFile) -> bool:
        """Take in a sealed group; whether it is ready."""
        missing = sum(len(self._lacking(part, name)) for name in self.awaits(part))
        if missing:
            self.waiting[place], self._missing[place] = part, missing
            self.num_rollouts += len(part.uids)
        return not missing

    def _lacking(self, part: GroupFile, name: str) -> list[int]:
        """Which rollouts of a group lack a column."""
        there = self._late.places[name]
        lacking = [row for row, uid in enumerate(part.uids) if uid not in there and uid not in self._given_up]
        return [row for row in lacking if part.rewards[row] is None] if name == "reward" else lacking

    def arrived(self, name: str, places: npt.NDArray[np.int64]) -> list[int]:
        """Count in values of a column.

        Args:
            name: The column.
            places: Of the groups that the rollouts are in, below 0 where they are in none; one for each value.

        Returns:
            The places of the groups that are ready with them, in the order in which they were sealed.
        """
        ready = []
        found, counts = np.unique(places[places >= 0], return_counts=True)
        for place, count in zip(found.tolist(), counts.tolist(), strict=True):
            part = self.waiting.get(place)
            if part is None or self._late_from[name] >= part.declared:
                continue
            self._missing[place] -= count
            if not self._missing[place]:
                ready.append(place)
                del self.waiting[place], self._missing[place]
                self.num_rollouts -= len(part.uids)
        return ready

    def give_up(self, uids: Sequence[str], places: Sequence[int]) -> list[int]:
        """Await nothing of some rollouts any more.

        Args:
            uids: They, which are not among those given up yet.
            places: Of the groups that they are in, below 0 where they are in none.

        Returns:
            The places of the groups that are ready with that, in the order in which they were sealed.
        """
        lacking: dict[int, int] = {}
        for uid, place in zip(uids, places, strict=True):
            if (part := self.waiting.get(place)) is not None:
                row = part.uids.index(uid)
                own = sum(row in self._lacking(part, name) for name in self.awaits(part))
                lacking[place] = lacking.get(place, 0) + own
        ready = []
        for place, count in sorted(lacking.items()):
            self._missing[place] -= count
            if not self._missing[place]:
                ready.append(place)
                self.num_rollouts -= len(self.waiting.pop(place).uids)
                del self._missing[place]
        return ready

    def awaited(self, unsealed: Iterable[Unsealed]) -> dict[str, Awaited]:
        """Whose values are awaited, by column.

        Args:
            unsealed: The rollouts whose groups are not sealed.
        """
        found: dict[str, list[tuple[str, float]]] = {name: [] for name in self._late_from}
        for _, part in sorted(self.waiting.items()):
            for name in self.awaits(part):
                found[name] += [(part.uids[row], part.created[row]) for row in self._lacking(part, name)]
        for rollout in unsealed:
            for name, rollouts in found.items():
                has_own = name == "reward" and rollout.reward is not None
                there = has_own or rollout.rollout_uid in self._late.places[name]
                if not there and rollout.rollout_uid not in self._given_up:
                    rollouts.append((rollout.rollout_uid, rollout.created))
        return {name: _awaited(rollouts) for name, rollouts in found.items()}


def _awaited(rollouts: Sequence[tuple[str, float]]) -> Awaited:
    return Awaited(tuple([uid for uid, _ in rollouts]), min((created for _, created in rollouts), default=None))
