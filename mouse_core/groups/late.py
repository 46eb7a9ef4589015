"""Late columns: values by rollout uid that are added after the rollouts were stored, in a log and in Parquet files.

Small amounts of values are appended to the log; large amounts are written directly to files. The log lists the files,
so that a missing file is detected. When the log is large, its values are written to files. A value is stored as a
number, or as a list if the column has a shape. A column per token or per turn stores one list with the values of all
tokens, or all turns, of the rollout.

A record of the log is an Arrow record batch with a row for each column; a row has the values or the name of a file.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._base.locks import ProcessLock
from mouse_core.errors import DataError, StorageError
from mouse_core.files.log import Log, read_log
from mouse_core.files.writing import beside, make_folder, remove_leftovers, storing, sync_files, write_partial
from mouse_core.groups.files import (
    LATE,
    STATE,
    GroupFile,
    declared_field,
    declared_values,
    encode_part,
    nested,
    read_declared,
    read_part,
    writing_files,
)
from mouse_core.groups.records import Columns, RolloutColumn, RolloutRecord, same_values, with_late
from mouse_core.groups.waiting import Unsealed

_RECORD = pa.schema([("column", pa.string()), ("values", pa.large_binary()), ("file", pa.string())])
# A place is ``chunk number << _ROWS | row``.
_ROWS = 32
_CACHED_FILES = 2
# If one call adds more bytes of a column than this number, they are written directly to a file.
_MANY_BYTES = 2**20
# Size in bytes of the log, whose values are in memory, at which its values are written to files; and approximate size
# of a file, which is read completely when one of its values is read.
_LOG_BYTES, _FILE_BYTES = 32 * 2**20, 16 * 2**20


@dataclass(frozen=True)
class Chunk:
    """Values of a late column for some rollouts.

    Args:
        column: The column.
        uids: The rollouts' uids.
        values: A value for each rollout, as Arrow.
    """

    column: RolloutColumn
    uids: Sequence[str]
    values: pa.Array

    @property
    def nbytes(self) -> int:
        """The approximate size in bytes."""
        return int(self.values.nbytes) + sum(map(len, self.uids))

    def rows(self) -> pa.RecordBatch:
        """Return a record batch with the uids and values."""
        return pa.RecordBatch.from_arrays([pa.array(self.uids, pa.string()), self.values], schema=_schema(self.column))

    def take(self, rows: Sequence[int]) -> Chunk:
        """Return the chunk of the given rows."""
        return Chunk(self.column, [self.uids[row] for row in rows], self.values.take(pa.array(rows, pa.int64())))

    def cut(self, nbytes: int) -> Iterator[Chunk]:
        """Split the values into chunks of about ``nbytes`` bytes."""
        count = max(1, -(-self.nbytes // nbytes))
        for begin, end in pairwise(len(self.uids) * place // count for place in range(count + 1)):
            if begin < end:
                yield Chunk(self.column, self.uids[begin:end], self.values.slice(begin, end - begin))


def _schema(column: RolloutColumn) -> pa.Schema:
    return pa.schema([pa.field("rollout_uid", pa.string(), nullable=False), declared_field(column, of_example=True)])


def _values_of(column: RolloutColumn, rows: pa.Array) -> list[npt.NDArray[Any]]:
    """Return values as arrays; raise DataError if a value is missing or has another shape."""
    found = [value for value in declared_values(column, rows, of_example=True) if value is not None]
    if len(found) < len(rows):
        raise DataError(f"column {column.name!r}: expected a value for each rollout, found one without")
    return found


# ---------------------------------------------------------------------- log and files


def _encode(chunks: Iterable[Chunk] = (), files: Iterable[Path] = ()) -> bytes:
    """Encode values and names of files as a record of the log."""
    rows = [(chunk.column.name, bytes(chunk.rows().serialize()), None) for chunk in chunks]
    listed = [(path.parent.name, None, path.name) for path in files]
    columns = zip(*rows, *listed, strict=True)
    return bytes(pa.record_batch(list(map(list, columns)), schema=_RECORD).serialize())


def _decode(record: bytes, declared: Columns, path: Path) -> tuple[list[Chunk], list[tuple[str, str]]]:
    """Decode a record of ``_encode``; return the values, and the columns and names of the files.

    Raises:
        DataError: The record is invalid, or a column was not declared; the message names the log, ``path``.
    """
    chunks, files = [], []
    try:
        rows = pa.ipc.read_record_batch(pa.py_buffer(record), _RECORD)
        for name, values, file in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            column = declared[name]
            if file is not None:
                files.append((name, file))
            else:
                batch = pa.ipc.read_record_batch(pa.py_buffer(values), _schema(column))
                chunks.append(Chunk(column, batch.column(0).to_pylist(), batch.column(1)))
    except (pa.ArrowException, OSError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise DataError(f"log {path}: expected values of late columns that were declared, found: {error}") from error
    return chunks, files


def _late_log(root: Path) -> Path:
    return root / STATE / "late.log"


def _late_folder(root: Path, column: RolloutColumn) -> Path:
    return root / LATE / column.name


def _late_files(root: Path, column: RolloutColumn) -> list[Path]:
    folder = _late_folder(root, column)
    with storing(f"folder {folder}"):
        if not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if path.suffix == ".parquet" and path.name[0] != ".")


def _read_uids(path: Path, column: RolloutColumn) -> list[str]:
    """Return the uids in a file, without reading its values; raises the errors of ``read_part``."""
    uids: list[str] = read_part(path, lambda found, _: _schema(column), ["rollout_uid"], whole=False)[0][0].to_pylist()
    return uids


# ---------------------------------------------------------------------- reading


class LateColumns:
    """Reads the late columns of a folder, in any process. Values that another process adds after the first read are not
    included.

    A value is read only when a caller requests it. Several threads may read while one thread adds values.

    Args:
        root: The buffer's folder.

    Attributes:
        files: The existing files.
        unlisted: The files that the log does not list.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, ProcessLock()
        self._declared: Columns | None = None
        self._places: dict[str, dict[str, int]] = {}
        self._chunks: list[Chunk | tuple[RolloutColumn, Path] | None] = []
        self._read: OrderedDict[int, list[npt.NDArray[Any]]] = OrderedDict()

    def __reduce__(self) -> Any:
        return LateColumns, (self._root,)

    def open(self, declared: Columns, records: Iterable[bytes]) -> None:
        """Build the index of all values.

        Args:
            declared: The folder's columns.
            records: The records of the log.

        Raises:
            DataError: A file is missing or damaged; the message names the file.
            StorageError: The log or a file cannot be read.
        """
        self._places = {column.name: {} for column in declared.late}
        decoded = [_decode(record, declared, _late_log(self._root)) for record in records]
        listed = {file for _, files in decoded for file in files}
        self.files = [path for column in declared.late for path in _late_files(self._root, column)]
        there = {(path.parent.name, path.name) for path in self.files}
        for missing in sorted(listed - there):
            path = self._root.joinpath(LATE, *missing)
            raise DataError(f"late columns {path}: expected the file, whose values were noted")
        self.unlisted = [path for path in self.files if (path.parent.name, path.name) not in listed]
        for path in self.files:
            column = declared[path.parent.name]
            self.add_file(column, path, _read_uids(path, column))
        for chunks, _ in decoded:
            for chunk in chunks:
                self.add_chunk(chunk)
        self._declared = declared

    @property
    def declared(self) -> Columns:
        """The declared columns of the folder; raises the errors of ``fill``."""
        return self._opened()

    def _opened(self) -> Columns:
        with self._lock:
            if self._declared is None:
                declared = read_declared(self._root)
                # The log is read first, because values that are moved out of the log meanwhile are then found in a
                # file.
                self.open(declared, read_log(_late_log(self._root)) if declared.late else [])
            assert self._declared is not None
            return self._declared

    def add_file(self, column: RolloutColumn, path: Path, uids: Sequence[str]) -> None:
        """Add a file with the values of rollouts to the index."""
        self._add(column.name, (column, path), uids)

    def add_chunk(self, chunk: Chunk) -> None:
        """Add values in memory to the index, except values that are already in a file."""
        places = self._places[chunk.column.name]
        if not places.keys().isdisjoint(chunk.uids):
            chunk = chunk.take([row for row, uid in enumerate(chunk.uids) if uid not in places])
        if chunk.uids:
            self._add(chunk.column.name, chunk, chunk.uids)

    def _add(self, name: str, chunk: Chunk | tuple[RolloutColumn, Path], uids: Sequence[str]) -> None:
        with self._lock:
            first = len(self._chunks) << _ROWS
            self._chunks.append(chunk)
            self._places[name].update(zip(uids, range(first, first + len(uids)), strict=True))

    def take_chunks(self, write: Callable[[Chunk], Any]) -> None:
        """Remove and return the values in memory, column by column, to be written to files."""
        by_column: dict[RolloutColumn, list[int]] = {}
        for number, chunk in enumerate(self._chunks):
            if isinstance(chunk, Chunk):
                by_column.setdefault(chunk.column, []).append(number)
        for column, numbers in by_column.items():
            chunks: list[Any] = [self._chunks[number] for number in numbers]
            uids = [uid for chunk in chunks for uid in chunk.uids]
            write(Chunk(column, uids, pa.concat_arrays([chunk.values for chunk in chunks])))
            with self._lock:
                for number in numbers:
                    self._chunks[number] = None

    def places(self, name: str) -> Mapping[str, int]:
        """Return the position of each value of a column by uid; the columns must be open."""
        return self._places[name]

    def value(self, name: str, uid: str) -> npt.NDArray[Any] | None:
        """Return a rollout's value of a column; None if the value has not arrived. Raises the errors of ``fill``."""
        with self._lock:
            self._opened()
            place = self._places[name].get(uid) if name in self._places else None
            if place is None:
                return None
            number, row = place >> _ROWS, place & ((1 << _ROWS) - 1)
            values = self._read.get(number)
            if values is None:
                chunk = self._chunks[number]
                if isinstance(chunk, Chunk):
                    return _values_of(chunk.column, chunk.values.slice(row, 1))[0]
                assert chunk is not None  # the values of a chunk that was dropped have other places
                column, path = chunk
                rows = read_part(path, lambda found, _: _schema(column), [name])[0].column(0).combine_chunks()
                self._read[number] = values = _values_of(column, rows)
                # Rollouts are mostly read in the order in which their values arrived.
                if len(self._read) > _CACHED_FILES:
                    self._read.popitem(last=False)
            return values[row]

    def fill(self, rollouts: Sequence[RolloutRecord]) -> list[RolloutRecord]:
        """Return the rollouts with those values of late columns that have arrived.

        Raises:
            DataError: A file is damaged; the message names it.
            StorageError: A file cannot be read.
        """
        names = [column.name for column in self.declared.late]
        return [self._filled(rollout, names) for rollout in rollouts] if names else list(rollouts)

    def _filled(self, rollout: RolloutRecord, names: Sequence[str]) -> RolloutRecord:
        values = {name: self.value(name, rollout.rollout_uid) for name in names}
        there = {name: value for name, value in values.items() if value is not None}
        return with_late(rollout, there, self.declared) if there or "reward" in names else rollout

    def rewards(self, part: GroupFile) -> tuple[float | None, ...]:
        """Return the rewards of a group's rollouts; None for a reward that has not arrived. Raises the errors of
        ``fill``.
        """
        if None not in part.rewards:
            return part.rewards
        late = [self.value("reward", uid) for uid in part.uids]
        return tuple(
            own if own is not None else None if value is None else float(value)
            for own, value in zip(part.rewards, late, strict=True)
        )


# ---------------------------------------------------------------------- writing


class LateStore(LateColumns):
    """The late columns of a folder, for its one writer.

    Args:
        root: The folder.
        declared: The declared columns of the folder.
        compression: The compression codec of pages.
        sync: Whether to wait until data are on disk.

    Raises:
        DataError: A file is damaged; the message names it.
        StorageError: A file cannot be read or written.
    """

    def __init__(self, root: Path, declared: Columns, *, compression: str, sync: bool) -> None:
        super().__init__(root)
        self._compression, self._sync = compression, sync
        for column in declared.late:
            with storing(f"folder {_late_folder(root, column)}"):
                make_folder(_late_folder(root, column), sync=sync)
            remove_leftovers(_late_folder(root, column), only_writer=True)
        self._log = Log(_late_log(root)) if declared.late else None
        try:
            self.open(declared, [] if self._log is None else self._log.records)
        except BaseException:
            self.close()
            raise
        if self._log is not None:
            self._log.records = []
            self._list([])

    def add(self, chunks: Sequence[Chunk], arrived: Callable[[Chunk], None]) -> list[int]:
        """Write values of one or several columns, except values that are already stored.

        Args:
            chunks: The values.
            arrived: A function that is called with the new values of a chunk when these values are on disk.

        Returns:
            The number of new values of each chunk.

        Raises:
            DataError: A rollout already has another value of the column; the message names the rollout. Nothing was
                written.
            StorageError: The values cannot be written; some of several chunks may have been written.
        """
        seen: set[tuple[str, str]] = set()
        for chunk in chunks if len(chunks) > 1 else ():
            for uid in chunk.uids:
                if (chunk.column.name, uid) in seen:
                    raise DataError(f"add_column {chunk.column.name!r}: expected rollout {uid!r} once, found it twice")
                seen.add((chunk.column.name, uid))
        unknown = list(map(self._unknown, chunks))
        few: list[Chunk] = []
        for chunk in unknown:
            if chunk.nbytes > _MANY_BYTES:
                self._list(self._write(chunk))
                arrived(chunk)
            elif chunk.uids:
                few.append(chunk)
        if few and self._log is not None:
            self._log.append(_encode(few), sync=self._sync)
            for chunk in few:
                self.add_chunk(chunk)
                arrived(chunk)
            # If this fails, the log still has the values, and the next call shortens it.
            with contextlib.suppress(StorageError):
                if self._log.size > _LOG_BYTES:
                    self.take_chunks(self._write)
                    # A process that reads the log now has the old file open, with all of its values.
                    self._log.rewrite([_encode(files=self.files)])
        return [len(chunk.uids) for chunk in unknown]

    def _unknown(self, chunk: Chunk) -> Chunk:
        """Return the values of a chunk that are not stored yet."""
        name = chunk.column.name
        known = list(map(self.places(name).__contains__, chunk.uids))
        if not any(known):
            return chunk
        given = _values_of(chunk.column, chunk.values)
        for row, uid in enumerate(chunk.uids):
            if known[row] and not same_values(there := self.value(name, uid), given[row]):
                shown = [np.asarray(value).reshape(-1)[:4].tolist() for value in (there, given[row])]
                raise DataError(
                    f"add_column {name!r}, rollout {uid!r}: expected the value that it has, {shown[0]}, "
                    f"found {shown[1]}"
                )
        return chunk.take([row for row, there in enumerate(known) if not there])

    def _list(self, paths: Sequence[Path]) -> None:
        """Record the names of files in the log; if writing fails, these names are recorded together with the next
        files.
        """
        self.unlisted += paths
        if self.unlisted and self._log is not None:
            with contextlib.suppress(StorageError):
                self._log.append(_encode(files=self.unlisted), sync=self._sync)
                self.unlisted.clear()

    def _write(self, chunk: Chunk) -> list[Path]:
        """Write the files of a chunk, either all or none; return their paths."""
        folder = str(_late_folder(self._root, chunk.column))
        pieces = list(chunk.cut(_FILE_BYTES))
        with writing_files(self._root, [folder], sync=self._sync) as paths:
            for piece in pieces:
                rows = pa.Table.from_batches([piece.rows()])
                name, content = encode_part(rows, self._compression, {})
                paths.append(os.path.join(folder, f"late-{name}.parquet"))
                write_partial(paths[-1], content)
            if self._sync:
                sync_files(list(map(beside, paths)))
        files = list(map(Path, paths))
        for piece, path in zip(pieces, files, strict=True):
            self.add_file(chunk.column, path, piece.uids)
        self.files += files
        return files

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


# ---------------------------------------------------------------------- checking


def checked_chunk(column: RolloutColumn, given: Any, counts: Sequence[int] | None) -> Chunk:
    """Check values by uid, and return them as a chunk.

    Args:
        column: The column.
        given: The values by uid.
        counts: The number of tokens or turns of each rollout; None for columns with one value per rollout.

    Raises:
        DataError: A value has another shape or type, or the dtype or the column does not allow the value; the message
            names the rollout.
    """
    uids, items = list(given), list(given.values())
    where = f"add_column {column.name!r}"
    flat = _flat(items, counts)
    total = len(items) if counts is None else sum(counts)
    try:
        if flat is None:
            raise DataError(f"{where}: expected values by uid")
        flat = column.taken(flat, total, where)
    except DataError:
        # Find the invalid value, for the error message.
        own: Sequence[int | None] = [None] * len(uids) if counts is None else counts
        each = [
            column.taken(item, count, f"{where}, rollout {uid!r}")
            for uid, item, count in zip(uids, items, own, strict=True)
        ]
        flat = np.concatenate([value[None] if counts is None else value for value in each])
    kind = _schema(column).field(1).type
    values = pa.array(flat.reshape(-1))
    if pa.types.is_list(kind):
        size = int(np.prod(column.shape))
        values = nested(kind, [size * count for count in counts or [1] * len(uids)], values)
    return Chunk(column, uids, values)


def _flat(items: Sequence[Any], counts: Sequence[int] | None) -> npt.NDArray[Any] | None:
    """Concatenate all values to one array; return None if this is not possible."""
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
    flat.flags.writeable = False  # no other reference exists, so it need not be copied
    return flat


# ---------------------------------------------------------------------- waiting for values


@dataclass(frozen=True)
class Awaited:
    """The rollouts that lack a value of a late column.

    Args:
        uids: The rollouts' uids: first sealed, then unsealed rollouts, each in order of arrival.
        oldest: The earliest time of creation of these rollouts, in seconds since 1970; None without rollouts.
    """

    uids: tuple[str, ...] = ()
    oldest: float | None = None

    def __len__(self) -> int:
        return len(self.uids)


class Readiness:
    """The sealed groups that wait for late columns.

    A group waits for the late columns that were declared when it was sealed. A group does not wait for the reward of a
    rollout that was added with a reward, nor for values of rollouts that were given up.

    Args:
        late: The values that have arrived.
        given_up: Uids of rollouts that were given up.

    Attributes:
        waiting: The waiting groups, by their index in the order of sealing.
        num_rollouts: The number of rollouts in the waiting groups.
    """

    def __init__(self, late: LateColumns, given_up: Set[str] = frozenset()) -> None:
        self._late, self._given_up = late, given_up
        self._late_from = {name: place for place, name in enumerate(late.declared) if late.declared[name].late}
        self.waiting: dict[int, GroupFile] = {}
        self.num_rollouts = 0

    def awaits(self, part: GroupFile) -> list[str]:
        """Return the late columns that were declared when a group was sealed."""
        return [name for name, place in self._late_from.items() if place < part.declared]

    def _lacking(self, part: GroupFile, name: str) -> list[int]:
        """Return the positions of a group's rollouts that lack a value of a column."""
        there = self._late.places(name)
        lacking = [row for row, uid in enumerate(part.uids) if uid not in there]
        if lacking and self._given_up:
            lacking = [row for row in lacking if part.uids[row] not in self._given_up]
        return [row for row in lacking if part.rewards[row] is None] if name == "reward" else lacking

    def add(self, place: int, part: GroupFile) -> bool:
        """Add a sealed group; return whether it is ready."""
        self.waiting[place] = part
        self.num_rollouts += len(part.uids)
        return bool(self.settle([place]))

    def settle(self, places: Iterable[int]) -> list[int]:
        """Return the indices of the given groups that now have all values, in the order of sealing."""
        ready = []
        for place in sorted(self.waiting.keys() & set(places)):
            part = self.waiting[place]
            if not any(self._lacking(part, name) for name in self.awaits(part)):
                ready.append(place)
                self.num_rollouts -= len(self.waiting.pop(place).uids)
        return ready

    def awaited(self, unsealed: Iterable[Unsealed]) -> dict[str, Awaited]:
        """Return the rollouts that lack a value, by column, including rollouts of ``unsealed`` groups."""
        found: dict[str, list[tuple[str, float]]] = {name: [] for name in self._late_from}
        for _, part in sorted(self.waiting.items()):
            for name in self.awaits(part):
                found[name] += [(part.uids[row], part.created[row]) for row in self._lacking(part, name)]
        for one in unsealed:
            for name, rollouts in found.items():
                has_own = name == "reward" and one.reward is not None
                there = has_own or one.rollout_uid in self._late.places(name)
                if not there and one.rollout_uid not in self._given_up:
                    rollouts.append((one.rollout_uid, one.created))
        return {
            name: Awaited(tuple([uid for uid, _ in own]), min((created for _, created in own), default=None))
            for name, own in found.items()
        }
