"""MemmapStorage: rows in mapped files, which several processes write and read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import MissingFieldError, StorageError
from mouse_core.files.locking import FileLock
from mouse_core.files.writing import storing, write_file
from mouse_core.replay.ground.memory import RowMemory, blocks_of
from mouse_core.replay.ground.protocols import FieldKey, Slots, ring_pieces
from mouse_core.replay.ground.schema import RowSchema, checked
from mouse_core.replay.ground.state import rows_state, state_rows
from mouse_core.replay.ground.values import Refs
from mouse_core.replay.storages._mapped import files as on_disk
from mouse_core.replay.storages._mapped.files import Head, Now, map_file
from mouse_core.replay.storages._mapped.values import MappedValues
from mouse_core.replay.storages.ring import check_ndim, check_put, check_slots, slot_error
from mouse_core.spec import Alignment, check_alignment, check_count, check_list
from mouse_core.trees import stack


class MemmapStorage:
    """Rows as nested dicts or tuples of arrays in mapped files, of which several processes may write and read.

    The processes take turns: a row is whole or not there, also where a writer is killed in the middle of a write. Rows
    are written to places that no row in use has (the files have a few more places than ``capacity``), and count when
    they are complete; what is changed in place is written to a journal first. Whoever comes next after a crash goes on
    from there.

    The files are about as long as the data, exactly so after ``close()``; a full disk is found before a row is written.
    Rows outlive a process, checkpoints (``ReplayBuffer.dumps``) also the machine. Priorities are not shared.

    Args:
        capacity: Rows it holds, as for ``ArrayStorage``; None: as many as the buffer at ``path`` does.
        path: A folder of its own; made if it is not there. A buffer that is there is opened, with its rows.
        ndim: 1, or 2 for ``[time, env]``.
        alignment: Which transition a row's action, reward and done belong to; None: what the buffer at ``path`` says,
            else "outgoing".
        ragged: Fields whose rows are arrays of differing length; see ``ArrayStorage``.

    Raises:
        ConfigError: An argument out of range, or the buffer at ``path`` is of another size, ``ndim`` or alignment.
        StateError: Its files are damaged.
        StorageError: The folder cannot be written to (also an OSError).
    """

    writable = True

    def __init__(
        self,
        capacity: int | None,
        path: str | PathLike[str],
        ndim: int = 1,
        *,
        alignment: Alignment | None = None,
        ragged: Iterable[FieldKey] = (),
    ) -> None:
        capacity = None if capacity is None else check_count("capacity", capacity)
        self._ndim = check_ndim(ndim)
        outgoing = None if alignment is None else int(check_alignment(alignment) == "outgoing")
        self._ragged = check_list("ragged", ragged)
        self.path = Path(path).absolute()
        self._values = MappedValues(self.path)
        self._schema: RowSchema | None = None
        self._memory: RowMemory | None = None
        self._mapped: tuple[int, int] | None = None  # generation and rows of the memory
        with storing(f"folder {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path / "lock")
            with self._lock:
                self._head = Head(self.path / "head", capacity, self._ndim, outgoing)
        with self.lock():
            self._head.reclaim(self._catch_up())

    def __repr__(self) -> str:
        return f"MemmapStorage({len(self)} of {self.capacity} rows, {str(self.path)!r}, ndim={self._ndim})"

    def __len__(self) -> int:
        return min(self._head.written, self._head.capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = (self.capacity, str(self.path), self._ndim)
        return partial(MemmapStorage, *sizes, alignment=self.alignment, ragged=self._ragged), ()

    @property
    def capacity(self) -> int:
        """How many rows it can hold."""
        return self._head.capacity

    @property
    def ndim(self) -> int:
        """1, or 2 for ``[time, env]``."""
        return self._ndim

    @property
    def num_envs(self) -> int:
        """Environments side by side; 1 for ``ndim=1``, and until the first write."""
        if self._schema is None and self._head.written:
            with self.lock():
                self._catch_up()
        return 1 if self._schema is None else self._schema.num_envs

    @property
    def alignment(self) -> Alignment:
        """Which transition a row's action, reward and done belong to."""
        return self._head.alignment

    @property
    def written(self) -> int:
        """How many rows were ever appended, by any process."""
        return self._head.written

    @property
    def changes(self) -> int:
        """How often rows were changed otherwise than by ``append``, by any process."""
        return self._head.changes

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' files."""
        now = self._head.now()
        files = on_disk.row_files(self.path, now.generation, self._schema)
        return sum(file.stat().st_size for file in files) + now.room

    def lock(self) -> FileLock:
        """What to hold around a draw and its gather; every method takes it too."""
        return self._lock

    def _catch_up(self) -> Now:
        """Catch up with the other processes, and with one that died while it changed rows."""
        now = self._head.now()
        if self._schema is None:
            self._schema = on_disk.read_schema(self.path, self.capacity, now)
        if self._schema is not None:
            self._map(now, self._schema)
        if self._head.journal:
            self._apply_journal()
        return now

    def _map(self, now: Now, schema: RowSchema) -> RowMemory:
        """The memory of the rows' files as long as they are now."""
        length = (now.generation, now.allocated)
        if self._memory is None or self._mapped != length:
            files = on_disk.row_files(self.path, now.generation, schema)
            mapped = RowMemory.allocate(schema, now.allocated, lambda number, nbytes: map_file(files[number], nbytes))
            self._memory, self._mapped = mapped, length
        return self._memory

    def _save_schema(self, schema: RowSchema) -> None:
        if self._schema is None:
            write_file(self.path / "schema", json.dumps(schema.to_json()).encode(), only_writer=True)
            self._schema = schema

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Write rows behind the last, over the oldest where there is none; StorageError: no room on the disk."""
        with self._lock:
            now = self._catch_up()
            schema, arrays, n = checked(rows, self._schema, one=one, ndim=self._ndim, ragged=self._ragged)
            if not n and self._schema is None:
                return 0, 0
            memory, now = self._reserve(schema, arrays, n, now)
            first, done, places = now.written, 0, self.capacity + now.spare
            while done < n:
                # As many as there are places that no row in use has: of 4 rows and 2 places more, in which rows 0 to 5
                # were written, rows 2 to 5 are in use; two more rows go to the places 0 and 1, a third waits for them.
                piece = min(n - done, places - min(now.written, self.capacity))
                part = arrays if piece == n else [array[done : done + piece] for array in arrays]
                rows, now = self._values.kept(schema, part, now, self._refs)
                for place, begin, count in ring_pieces(now.written, piece, places):
                    memory.write(place, rows, begin, count)
                now = replace(now, written=now.written + piece)
                self._commit(now)
                done += piece
            return first, n

    def _reserve(self, schema: RowSchema, arrays: list[Any], n: int, now: Now) -> tuple[RowMemory, Now]:
        """Mapped files with room for ``n`` rows more, and what is there then; StorageError: no room on the disk."""
        if not now.spare:
            now = on_disk.begun(schema, now, self.capacity)
        places = self.capacity + now.spare
        now = on_disk.reserve(self.path, schema, now, min(now.written + n, places), self.capacity)
        self._save_schema(schema)
        self._map(now, schema)
        if schema.varying:
            now = self._compact(schema, now)
            now = self._values.with_room(schema, arrays, now, self._refs)
        return self._map(now, schema), now

    def _commit(self, now: Now) -> None:
        before = self._head.now()
        self._head.commit(now)
        if (before.generation, before.room) != (now.generation, now.room):
            self._values.tidy(now)

    def _refs(self) -> list[Refs]:
        """Where the values lie that differ in length, of the rows in use."""
        if self._memory is None or self._schema is None:
            return []
        places = self._places(self._slots, self._head.now())
        return [self._memory.by_key[key][places] for key in self._schema.varying]

    def _compact(self, schema: RowSchema, now: Now) -> Now:
        """Write all rows anew where most of what their values take is held by none of them."""
        if schema.varying and self._values.at(now).is_sparse(self._refs):
            self._replace(now, schema, self._columns(now), now.written, now.changes)
            now = self._catch_up()
        return now

    def check(self, rows: Any) -> None:
        """Raise what ``append(rows)`` would, and write nothing."""
        with self._lock:
            self._catch_up()
            checked(rows, self._schema, one=False, ndim=self._ndim, ragged=self._ragged)

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` by ``rows``; see ``Storage.put``."""
        with self._lock:
            now = self._catch_up()
            if self._schema is None:
                raise slot_error(slots, 0)
            check_slots(slots, len(self))
            arrays, n = self._schema.check(stack(rows) if isinstance(rows, list) and rows else rows, 1, 1)
            check_put(slots, n)
            now = self._compact(self._schema, now)
            rows, now = self._values.kept(self._schema, arrays, now, self._refs)
            self._commit(now)
            on_disk.write_journal(self.path, self._places(slots, now), rows)
            self._head.journal = True
            self._apply_journal()

    def _apply_journal(self) -> None:
        """Change rows in place as the journal says; doing so again changes nothing more."""
        now = self._head.now()
        journal = on_disk.read_journal(self.path, self._memory, now.allocated)
        assert self._memory is not None
        self._memory.put(*journal)
        self._head.commit(replace(now, changes=now.changes + 1))
        self._head.journal = False
        with suppress(OSError):
            (self.path / "journal").unlink()

    def empty(self) -> None:
        """Forget all rows; the files keep their places."""
        with self._lock:
            now = self._catch_up()
            self._head.commit(replace(now, written=0, changes=now.changes + 1))

    # ------------------------------------------------------------------ reading

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

    def get(self, slots: Slots) -> Any:
        """The rows in ``slots``, copied; see ``Storage.get``."""
        with self._lock:
            now = self._catch_up()
            if self._memory is None:
                raise slot_error(slots, 0)
            check_slots(slots, len(self))
            return self._memory.get(self._places(slots, now), self._values.at(now))

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """One field of the rows in ``slots``, copied; see ``Storage.read``."""
        with self._lock:
            now = self._catch_up()
            if self._memory is None:
                raise MissingFieldError(f"rows: expected a field {key!r}, found none")
            places = self._places(self._slots[slots] if isinstance(slots, slice) else slots, now)
            return self._memory.read(key, places, self._values.at(now))

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The rows, as long as the data, and what describes them."""
        with self._lock:
            return rows_state(self, self._schema, self._columns(self._catch_up()))

    def _columns(self, now: Now) -> list[Any]:
        if self._memory is None:
            return []
        return self._memory.saved(self._places(self._slots, now), self._values.at(now))

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what ``state`` was taken from; see ``Storage.load``.

        The rows are written to new files, so that a crash leaves those that were there.
        """
        with self._lock:
            now = self._catch_up()
            schema, arrays, written = state_rows(self, state, self._schema)
            if schema is None:
                self._head.commit(replace(now, written=written, changes=now.changes + 1))
                return
            self._replace(now, schema, arrays, written, now.changes + 1)

    def _replace(self, now: Now, schema: RowSchema, arrays: list[Any], written: int, changes: int) -> None:
        later = Now(written, changes, 0, now.generation + 1, now.spare)
        if not later.spare:
            later = on_disk.begun(schema, later, self.capacity)
        on_disk.remove(self.path, later.generation, schema)
        try:
            later = on_disk.reserve(self.path, schema, later, min(written, self.capacity + later.spare), self.capacity)
            rows, later = self._values.kept(schema, arrays, later, list)
            self._save_schema(schema)
        except StorageError:
            on_disk.remove(self.path, later.generation, schema)
            raise
        slots = np.arange(len(arrays[0]), dtype=np.int64)
        self._map(later, schema).put(self._places(slots, later), rows)
        self._commit(later)
        on_disk.remove(self.path, now.generation, schema)

    def close(self) -> None:
        """Cut the files to the length of the data, and let go of them; whoever uses them again opens them again."""
        with self._lock:
            now = self._catch_up()
            if self._schema is not None:
                rows = min(now.written, self.capacity + now.spare)
                self._head.commit(replace(now, allocated=rows))
                for file, block in zip(
                    on_disk.row_files(self.path, now.generation, self._schema), blocks_of(self._schema), strict=True
                ):
                    with suppress(OSError), open(file, "r+b") as opened:
                        opened.truncate(rows * block.raw.itemsize)
            self._memory, self._mapped = None, None
            self._values.forget()
