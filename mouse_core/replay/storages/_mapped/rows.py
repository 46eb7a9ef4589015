"""Rows in mapped files: catching up with other processes, after crashes too, checksums, and the way to the disk."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from mouse_core._base.checks import UNREADABLE
from mouse_core.columns.memory import ByteRing, FieldBlock, Refs, RowMemory, Values, varying_of
from mouse_core.columns.schema import Bytes, RowSchema
from mouse_core.errors import ConfigError, DataError, StateError, StorageError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.files.locking import FileLock
from mouse_core.files.writing import storing, sync_files, sync_folders, write_file
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.replay.storages._mapped import files as on_disk
from mouse_core.replay.storages._mapped.begins import Begins
from mouse_core.replay.storages._mapped.files import Head, Now
from mouse_core.replay.storages._mapped.mapping import lengthen, map_file


def write_journal(folder: Path, places: Slots, rows: Sequence[npt.NDArray[Any]], *, sync: bool) -> None:
    """Say what rows are to be changed in place, and to what."""
    columns = {str(number): array for number, array in enumerate(rows)}
    write_checkpoint(folder / "journal", {"places": places, "columns": columns}, sync=sync, only_writer=True)


def read_journal(folder: Path, memory: RowMemory | None, rows: int) -> tuple[Slots, list[npt.NDArray[Any]]]:
    """What ``write_journal`` was called with: places among ``rows``, and what belongs there.

    Raises:
        StateError: It is damaged, missing, or of other rows.
    """
    path = folder / "journal"
    try:
        journal = read_checkpoint(path)
        places = journal["places"]
        columns = [journal["columns"][str(number)] for number in range(0 if memory is None else len(memory.columns))]
        if memory is None or places.ndim != 1 or places.dtype != np.int64:
            raise ValueError("places of no rows")
        if places.size and not 0 <= places.min() <= places.max() < rows:
            raise ValueError(f"places beyond {rows} rows")
        for column, known in zip(columns, memory.columns, strict=True):
            if column.shape != (len(places), *known.shape[1:]) or column.dtype != known.dtype:
                raise ValueError(f"{column.dtype} {list(column.shape)} where {known.dtype} belongs")
    except (OSError, *UNREADABLE) as error:
        raise StateError(f"{path}: expected the rows that were being changed, found {error}") from error
    return places, columns


class MappedValues(Values):
    """The values of a mapped buffer. The storage's lock is held around every call, and ``at`` comes before all others.

    Args:
        folder: The buffer's.
    """

    packs = False  # the file may be mapped elsewhere

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._generation: int | None = None

    def at(self, now: Now) -> MappedValues:
        """These values as they are now."""
        if (self._generation, self.nbytes) != (now.generation, now.room):
            if self._generation != now.generation:
                self._begin = 0
            self._ring = ByteRing(map_file(self._file(now.generation, now.room), now.room))
            self._generation = now.generation
        self._end = now.end
        return self

    def kept(
        self, schema: RowSchema, arrays: Sequence[Any], now: Now, refs: Callable[[], Sequence[Refs]]
    ) -> tuple[Sequence[npt.NDArray[Any]], Now]:
        """What ``keep`` gives, and what is there then."""
        if not schema.varying:
            return arrays, now
        rows = self.at(now).keep(schema, arrays, refs)
        return rows, replace(now, end=self._end, room=self.nbytes)

    def with_room(self, schema: RowSchema, arrays: Sequence[Any], now: Now, refs: Callable[[], Sequence[Refs]]) -> Now:
        """What is there with room for all of these rows: a full disk is found before one of them is written."""
        self.at(now).reserve(sum(value.size for part in varying_of(schema, arrays) for value in part), refs)
        return now if self.nbytes == now.room else replace(now, room=self.nbytes)

    def _file(self, generation: int | None, room: int) -> Path:
        return self._folder / f"values-{generation}-{room}"

    def _memory(self, nbytes: int) -> Bytes:
        path = self._file(self._generation, nbytes)
        lengthen(path, nbytes)
        return map_file(path, nbytes)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file(self._generation, self.nbytes)

    def forget(self) -> None:
        """Let go of the file."""
        self._generation, self._ring = None, ByteRing(np.empty(0, np.uint8))

    def tidy(self, now: Now) -> None:
        """Remove the files that do not count any more."""
        for file in self._folder.glob("values-*"):
            if file != self._file(now.generation, now.room):
                file.unlink(missing_ok=True)


Sums = npt.NDArray[np.uint64]

_WEIGHED = 512  # rows of up to so many bytes in a file are weighed, longer ones hashed
_TOGETHER = 1 << 19  # about so many bytes at a time, which stay close to the processor
_WEIGHTS = np.array([xxhash.xxh3_64_intdigest(bytes([word])) | 1 for word in range(_WEIGHED // 4)], np.uint64)
_OF_NUMBER = np.uint64(0x9E3779B97F4A7C15)
_UPPER = np.uint64(32)


class RowSums:
    """The checksums of rows in mapped files. The storage's lock is held around every call, and ``at`` comes first."""

    def __init__(self) -> None:
        self._unseen: npt.NDArray[np.bool_] | None = None  # what was there when the files were opened, and not read yet

    def at(self, files: Sequence[Path], memory: RowMemory, values: MappedValues, sums: Sums) -> None:
        """Be those of these rows.

        Args:
            files: The files of the rows.
            memory: The rows in them.
            values: What differs in length.
            sums: Memory for the checksums, uint64 ``[places, files]``, the last column for ``values`` where there are.
        """
        self._files, self._memory, self._values, self._sums = list(files), memory, values, sums

    def make(self, places: Slots, numbers: Slots) -> None:
        """Keep the checksums of the rows with these numbers at these places, int64 ``[n]``."""
        for some in self._pieces(places):
            self._sums[places[some]] = self._of(places[some], numbers[some])
        self._saw(places)

    def wrong(self, places: Slots, numbers: Slots) -> npt.NDArray[np.bool_]:
        """Which checksums are not those of the rows that are there, bool ``[n, files]``."""
        found = np.zeros((len(places), self._sums.shape[1]), np.bool_)
        for some in self._pieces(places):
            found[some] = self._sums[places[some]] != self._of(places[some], numbers[some])
        return found

    def watch(self, places: Slots, total: int) -> None:
        """From now on look at these, of ``total`` places, when they are read for the first time."""
        self._unseen = None
        if len(places):
            self._unseen = np.zeros(total, np.bool_)
            self._unseen[places] = True

    def check(self, places: Slots, numbers: Callable[[Slots], Slots], summed: int) -> None:
        """Raise StateError, naming row and file, where a row that is read for the first time is not what was written.

        Args:
            places: Of the rows that are read.
            numbers: Which rows lie in some places.
            summed: Rows from this number on have no checksums; they were written since the files were opened.
        """
        if self._unseen is None:
            return
        flat = places.reshape(-1)
        new = np.unique(flat[self._unseen[flat]])
        if not len(new):
            return
        known = new[numbers(new) < summed]
        rows, columns = np.nonzero(self.wrong(known, numbers(known)))
        if len(rows):
            file = dict(enumerate(self._files)).get(int(columns[0]), self._values.path)
            row = numbers(known[rows[:1]])[0]
            raise StateError(f"{file}: expected row {row} as it was written, found it, or its checksum, damaged")
        self._saw(new)

    def _saw(self, places: Slots) -> None:
        if self._unseen is not None:
            self._unseen[places] = False
            if not self._unseen.any():
                self._unseen = None

    def _pieces(self, places: Slots) -> list[slice]:
        step = max(1, _TOGETHER // sum(block.raw.itemsize for block, _ in self._memory.blocks))
        return [slice(begin, begin + step) for begin in range(0, len(places), step)]

    def _of(self, places: Slots, numbers: Slots) -> Sums:
        found = np.empty((len(places), self._sums.shape[1]), np.uint64)
        for column, (block, rows) in enumerate(self._memory.blocks):
            found[:, column] = _sums_of(block, rows, places)
        varying = self._memory.schema.varying
        if varying:
            # The values of a row one behind the other: where each of them lies is in its file of rows.
            refs = [self._memory.by_key[key][places] for key in varying]
            for row in range(len(places)):
                digest = xxhash.xxh3_64()
                with suppress(DataError):  # a place that is none, in a damaged row
                    for value in (value for column in refs for value in self._values.read(column[row])):
                        digest.update(value.data)
                found[row, -1] = digest.intdigest()
        found += (numbers.astype(np.uint64) * _OF_NUMBER)[:, None]
        return found


def _sums_of(block: FieldBlock, rows: npt.NDArray[np.void], places: Slots) -> Sums:
    """The checksums of the bytes of rows in one file, uint64 ``[n]``, without their numbers."""
    size = block.raw.itemsize
    # Rows that lie side by side are looked at where they lie.
    begin, end = int(places[0]), int(places[-1]) + 1
    follow = end - begin == len(places) and bool((np.diff(places) == 1).all())
    raw = rows[begin:end] if follow else rows[places]
    if size > _WEIGHED:
        every = raw.view(np.uint8).data
        hashes = [xxhash.xxh3_64_intdigest(every[at : at + size]) for at in range(0, size * len(places), size)]
        return np.array(hashes, np.uint64)
    taken = raw.view(np.uint8).reshape(-1, size)
    if size % 4:
        taken = np.pad(taken, ((0, 0), (0, -size % 4)))
    words = taken.view(np.uint32).astype(np.uint64)
    return (words @ _WEIGHTS[: words.shape[1]]) >> _UPPER


Sync = Literal["none", "flush", "append"]


class MappedRows:
    """The files of a ``MemmapStorage``, whose lock is held around every call.

    Args:
        path: The folder.
        capacity, ndim, outgoing: See ``Head``.
        sync: See ``MemmapStorage``.

    Raises:
        ConfigError, StateError, StorageError: See ``MemmapStorage``.
    """

    def __init__(self, path: Path, capacity: int | None, ndim: int, outgoing: int | None, sync: Sync) -> None:
        if sync not in get_args(Sync):
            raise ConfigError(f"sync: expected one of {list(get_args(Sync))}, found {sync!r:.80}")
        self.path = path
        self._sync = sync
        self._values = MappedValues(path)
        self._sums = RowSums()
        self._begins = Begins(path / "begins")
        self._schema: RowSchema | None = None
        self._memory: RowMemory | None = None
        self._mapped: tuple[int, int] | None = None  # generation and rows of the memory
        with storing(f"folder {path}"):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path / "lock")
            with self._lock:
                self._head = Head(path / "head", capacity, ndim, outgoing)
        with self._lock:
            self._begin()

    def __len__(self) -> int:
        return min(self._head.written, self.capacity)

    @property
    def capacity(self) -> int:
        """How many rows it can hold; in whole time steps as soon as the environments are known."""
        if self._schema is None and self._head.written:
            with self._lock:
                self._catch_up()
        return self._head.capacity - self._head.capacity % (1 if self._schema is None else self._schema.num_envs)

    def _catch_up(self) -> Now:
        """Catch up with the other processes, and with one that died while it changed rows."""
        now = self._head.now()
        if self._schema is None:
            self._schema = on_disk.read_schema(self.path, self._head.capacity, now)
        if self._schema is not None:
            self._map(now, self._schema)
        if self._head.making:
            self._head.reclaim(now)
        if self._head.journal:
            self._apply_journal()
        return now

    def _writing(self) -> Now:
        """Catch up, before something is written."""
        if self._head.closed:
            self._head.closed = False
            self._head_to_disk()
        return self._catch_up()

    def _begin(self) -> None:
        """Open the folder: what is there is as it was left, or after a restart of the machine what is whole of it."""
        if not self._head.is_of_this_boot and not self._head.closed:
            self._recover()
        now = self._catch_up()
        self._head.settled()
        self._head.reclaim(now)
        places = self._places(self._slots, now)
        self._sums.watch(places[self._numbers(places, now) < now.summed], self.capacity + now.spare)

    def _recover(self) -> None:
        """Keep the rows that reached the disk, up to the last one with a checksum."""
        before = self._head.now()
        schema = on_disk.read_schema(self.path, self._head.capacity, before)
        if schema is None:
            return
        on_disk.lengthen_all(self.path, schema, before)
        try:
            now = self._catch_up()
        except StateError:
            if not self._head.journal:
                raise
            self._head.journal = False  # it did not reach the disk: rows that were being changed have wrong checksums
            now = self._catch_up()
        numbers = np.arange(max(0, now.written - self.capacity), now.summed)
        places = numbers % (self.capacity + now.spare)
        self._values.at(now)
        (wrong,) = np.nonzero(self._sums.wrong(places, numbers).any(axis=1))
        # Behind the last wrong one: those before it may have been overwritten by rows that did not reach the disk.
        kept = places[wrong[-1] + 1 if len(wrong) else 0 :]
        gone = len(self) - len(kept)
        if gone:
            columns = self._memory.saved(kept, self._values.at(now)) if self._memory is not None else []
            self._replace(now, schema, columns, len(kept), now.changes + 1)
            self._begins.forget(schema, 0)
            warnings.warn(
                f"{self.path}: the machine was restarted before {gone} of {gone + len(kept)} rows were on the disk; "
                "they are gone (see sync= and flush())",
                UserWarning,
                stacklevel=4,
            )
            self._memory, self._mapped = None, None

    def _map(self, now: Now, schema: RowSchema) -> RowMemory:
        """The memory of the rows' files as long as they are now."""
        length = (now.generation, now.allocated)
        if self._memory is None or self._mapped != length:
            files = on_disk.row_files(self.path, now.generation, schema)
            mapped = RowMemory.allocate(schema, now.allocated, lambda number, nbytes: map_file(files[number], nbytes))
            of_row = on_disk.sum_bytes(schema)
            sums = map_file(on_disk.sums_file(self.path, now.generation), now.allocated * of_row)
            self._sums.at(files, mapped, self._values, sums.view(np.uint64).reshape(now.allocated, of_row // 8))
            self._memory, self._mapped = mapped, length
        return self._memory

    def _save_schema(self, schema: RowSchema) -> None:
        if self._schema is None:
            write_file(self.path / "schema", json.dumps(schema.to_json()).encode(), only_writer=True)
            self._schema = schema

    def _with_sums(self, now: Now) -> Now:
        """What is there when all rows have checksums."""
        numbers = np.arange(max(now.summed, now.written - self.capacity), now.written)
        self._values.at(now)
        self._sums.make(numbers % (self.capacity + now.spare), numbers)
        return replace(now, summed=now.written)

    def _numbers(self, places: Slots, now: Now) -> Slots:
        """Which rows lie at some places: of 4 rows and 2 places more, with 9 rows written, place 1 has row 7."""
        newest = now.written - 1
        return newest - (newest - places) % (self.capacity + now.spare)

    def _to_disk(self, now: Now) -> None:
        """Wait until the rows are on the disk, not yet the head that says so."""
        assert self._schema is not None
        with storing(f"rows in {self.path}"):
            sync_files(on_disk.files(self.path, self._schema, now))
            sync_folders([self.path])

    def _head_to_disk(self) -> None:
        with storing(f"{self.path / 'head'}"):
            sync_files([self.path / "head"])

    def _reserve(self, schema: RowSchema, arrays: list[Any], n: int, now: Now) -> tuple[RowMemory, Now]:
        """Mapped files with room for ``n`` rows more, and what is there then; StorageError: no room on the disk."""
        capacity = schema.whole_steps(self._head.capacity)
        if not now.spare:
            now = on_disk.begun(schema, now, capacity)
        now = on_disk.reserve(self.path, schema, now, min(now.written + n, capacity + now.spare), capacity)
        self._save_schema(schema)
        self._map(now, schema)
        if schema.varying:
            now = self._compact(schema, now)
            self._head.making = True
            now = self._values.with_room(schema, arrays, now, self._refs)
        return self._map(now, schema), now

    def _commit(self, now: Now) -> None:
        before = self._head.now()
        moved = (before.generation, before.room) != (now.generation, now.room)
        if moved and self._sync != "none":
            self._to_disk(now)
        self._head.commit(now)
        if moved:
            self._values.tidy(now)
        if self._head.making:
            self._head.making = False

    def _refs(self) -> list[Refs]:
        """Where the values lie that differ in length, of the rows in use."""
        if self._memory is None or self._schema is None:
            return []
        places = self._places(self._slots, self._head.now())
        return [self._memory.by_key[key][places] for key in self._schema.varying]

    def _look_at_begins(self, now: Now) -> None:
        """Take note of what rows say of episodes that are no longer in use, before others are written over them."""
        assert self._schema is not None
        if now.written > self.capacity:
            self._begins.look(self._schema, self._steps_to_oldest(now), partial(self._read_steps, now))

    def _steps_to_oldest(self, now: Now) -> range:
        """The steps that lie in the files, up to the oldest that is in use."""
        num_envs = 1 if self._schema is None else self._schema.num_envs
        first = max(0, now.written - self.capacity - now.spare)
        return range(first // num_envs, max(0, now.written - self.capacity) // num_envs + 1)

    def _read_steps(self, now: Now, key: FieldKey, first: int, last: int) -> npt.NDArray[Any]:
        assert self._memory is not None
        assert self._schema is not None
        num_envs = self._schema.num_envs
        places = np.arange(first * num_envs, (last + 1) * num_envs) % (self.capacity + now.spare)
        values: npt.NDArray[Any] = self._memory.by_key[key][places].reshape(-1, num_envs)
        return values

    def _compact(self, schema: RowSchema, now: Now) -> Now:
        """Write all rows anew where most of what their values take is held by none of them."""
        if schema.varying and self._values.at(now).is_sparse(self._refs):
            self._look_at_begins(now)
            self._replace(now, schema, self._columns(now), now.written, now.changes)
            now = self._catch_up()
        return now

    def _apply_journal(self) -> None:
        """Change rows in place as the journal says; doing so again changes nothing more."""
        now = self._head.now()
        places, rows = read_journal(self.path, self._memory, now.allocated)
        assert self._memory is not None
        self._memory.put(places, rows)
        numbers = self._numbers(places, now)
        self._values.at(now)
        self._sums.make(places[numbers < now.summed], numbers[numbers < now.summed])
        if self._sync != "none":
            self._to_disk(now)
        self._head.commit(replace(now, changes=now.changes + 1))
        self._head.journal = False
        with suppress(OSError):
            (self.path / "journal").unlink()

    @property
    def _slots(self) -> Slots:
        """All slots in use."""
        return np.arange(len(self), dtype=np.int64)

    def _places(self, slots: Slots, now: Now) -> Slots:
        """Where in the files the rows in ``slots`` lie."""
        if now.written <= self.capacity:
            return slots
        newest = now.written - 1
        return (newest - (newest - slots) % self.capacity) % (self.capacity + now.spare)

    def _checked(self, places: Slots, now: Now) -> Slots:
        """The places, if the rows there are what was written."""
        self._values.at(now)
        self._sums.check(places, lambda some: self._numbers(some, now), now.summed)
        return places

    def _columns(self, now: Now) -> list[Any]:
        if self._memory is None:
            return []
        return self._memory.saved(self._checked(self._places(self._slots, now), now), self._values.at(now))

    def _replace(self, now: Now, schema: RowSchema, arrays: list[Any], written: int, changes: int) -> None:
        self._head.making = True
        later = Now(written, changes, 0, now.generation + 1, now.spare)
        capacity = schema.whole_steps(self._head.capacity)
        if not later.spare:
            later = on_disk.begun(schema, later, capacity)
        on_disk.remove(self.path, later.generation, schema)
        try:
            later = on_disk.reserve(self.path, schema, later, min(written, capacity + later.spare), capacity)
            rows, later = self._values.kept(schema, arrays, later, list)
            self._save_schema(schema)
        except StorageError:
            on_disk.remove(self.path, later.generation, schema)
            raise
        slots = np.arange(len(arrays[0]), dtype=np.int64)
        self._map(later, schema).put(self._places(slots, later), rows)
        later = self._with_sums(later)
        self._commit(later)
        self._sums.watch(slots[:0], 0)
        on_disk.remove(self.path, now.generation, schema)
        self._head.making = False
