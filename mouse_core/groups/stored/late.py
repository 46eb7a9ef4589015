"""Columns that came later, by uid: where their values lie, and rollouts that are given them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.errors import DataError
from mouse_core.files.log import read_log
from mouse_core.groups._files.declared import read_declared
from mouse_core.groups._files.names import LATE, STATE
from mouse_core.groups._files.part import GroupFile
from mouse_core.groups.stored.chunks import (
    Chunk,
    decode_files,
    decode_record,
    late_paths,
    read_uids,
    read_values,
    values_of,
)
from mouse_core.groups.types.columns import Columns, RolloutColumn
from mouse_core.groups.types.records import RolloutRecord, with_late

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
