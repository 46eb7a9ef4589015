"""Rows in mapped files: catching up with other processes, after crashes too, checksums, and the way to the disk."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, StateError, StorageError
from mouse_core.files.locking import FileLock
from mouse_core.files.writing import storing, sync_files, sync_folders, write_file
from mouse_core.replay.ground.memory import RowMemory
from mouse_core.replay.ground.protocols import FieldKey, Slots
from mouse_core.replay.ground.schema import RowSchema
from mouse_core.replay.ground.values import Refs
from mouse_core.replay.storages._mapped import files as on_disk
from mouse_core.replay.storages._mapped.begins import Begins
from mouse_core.replay.storages._mapped.files import Head, Now
from mouse_core.replay.storages._mapped.journal import read_journal
from mouse_core.replay.storages._mapped.mapping import map_file
from mouse_core.replay.storages._mapped.sums import RowSums
from mouse_core.replay.storages._mapped.values import MappedValues

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
