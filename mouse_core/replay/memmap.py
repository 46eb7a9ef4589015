"""MemmapStorage: rows in mapped files, which several processes write and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, StateError, StorageError
from mouse_core.replay._checks import check_max_size, check_ndim, check_put, column_of, slot_error
from mouse_core.replay._mapped import FileLock, Head, Now, lengthen, map_file, replace_file
from mouse_core.replay._memory import RowMemory, blocks_of
from mouse_core.replay._rows import RowSchema
from mouse_core.replay._state import rows_state, state_rows
from mouse_core.replay._trees import stack, unflatten
from mouse_core.replay.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.spec import Alignment, check_alignment

_GROWTH = 1 << 16
_SPARE_BYTES = 1 << 20
_SPARE_ROWS = 1024


class MemmapStorage:
    """Rows as nested dicts or tuples of arrays in mapped files, of which several processes may write and read.

    The processes take turns: a row is whole or not there, also where a writer is killed in the middle of a write. Rows
    are written to places that no row in use has (the files have a few more places than ``max_size``), and count when
    they are complete; what is changed in place is written to a journal first. Whoever comes next after a crash goes on
    from there.

    The files are about as long as the data, exactly so after ``close()``; a full disk is found before a row is written.
    Rows outlive a process, checkpoints (``ReplayBuffer.dumps``) also the machine. Priorities are not shared.

    Args:
        max_size: Rows it holds, as for ``ArrayStorage``; None: as many as the buffer at ``path`` does.
        path: A folder of its own; made if it is not there. A buffer that is there is opened, with its rows.
        ndim: 1, or 2 for ``[time, env]``.
        alignment: Which transition a row's action, reward and done belong to.

    Raises:
        ConfigError: An argument out of range, or the buffer at ``path`` is of another size, ``ndim`` or alignment.
        StateError: Its files are damaged.
        StorageError: The folder cannot be written to (also an OSError).
    """

    writable = True

    def __init__(
        self,
        max_size: int | None,
        path: str | PathLike[str],
        ndim: int = 1,
        *,
        alignment: Alignment = "outgoing",
    ) -> None:
        capacity = None if max_size is None else check_max_size(max_size)
        self._ndim = check_ndim(ndim)
        self._alignment = check_alignment(alignment)
        self.path = Path(path).absolute()
        self._schema: RowSchema | None = None
        self._memory: RowMemory | None = None
        self._mapped: tuple[int, int] | None = None  # generation and rows of the memory
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path / "lock")
            with self._lock:
                self._head = Head(self.path / "head", capacity, self._ndim, int(alignment == "outgoing"))
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path}: expected a folder to write to, found {error}") from error
        with self.lock():
            self._know()

    def __repr__(self) -> str:
        return f"MemmapStorage({len(self)} of {self.capacity} rows, {str(self.path)!r}, ndim={self._ndim})"

    def __len__(self) -> int:
        return min(self._head.word(0), self._head.capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.capacity, str(self.path), self._ndim, self._alignment)

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
        if self._schema is None and self._head.word(0):
            with self.lock():
                self._know()
        return 1 if self._schema is None else self._schema.num_envs

    @property
    def alignment(self) -> Alignment:
        """Which transition a row's action, reward and done belong to."""
        return self._alignment

    @property
    def written(self) -> int:
        """How many rows were ever appended, by any process."""
        return self._head.word(0)

    @property
    def changes(self) -> int:
        """How often rows were changed otherwise than by ``append``, by any process."""
        return self._head.word(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' files."""
        return sum(file.stat().st_size for file in self._files(self._head.now().generation, self._schema))

    def lock(self) -> FileLock:
        """What to hold around a draw and its gather; every method takes it too."""
        return self._lock

    # ------------------------------------------------------------------ files

    def _files(self, generation: int, schema: RowSchema | None) -> list[Path]:
        blocks = [] if schema is None else blocks_of(schema)
        return [self.path / f"rows-{generation}-{number}" for number in range(len(blocks))]

    def _know(self) -> Now:
        """Catch up with the other processes, and with one that died while it changed rows."""
        now = self._head.now()
        if self._schema is None and (self.path / "schema").exists():
            try:
                schema = RowSchema.from_json(json.loads((self.path / "schema").read_text()))
            except (ValueError, KeyError, TypeError) as error:
                raise StateError(f"{self.path / 'schema'}: expected the fields of a row, found {error!r}") from error
            self._schema = schema
        if self._schema is not None and self._mapped != (now.generation, now.allocated):
            self._map(now, self._schema)
        if self._head.journal:
            self._apply_journal()
        return now

    def _map(self, now: Now, schema: RowSchema) -> RowMemory:
        files = self._files(now.generation, schema)
        memory = RowMemory.allocate(schema, now.allocated, lambda number, nbytes: map_file(files[number], nbytes))
        self._memory, self._mapped = memory, (now.generation, now.allocated)
        return memory

    def _reserve(self, schema: RowSchema, now: Now, rows: int) -> Now:
        """Files with room for so many rows."""
        if rows <= now.allocated:
            return now
        sizes = [block.raw.itemsize for block in blocks_of(schema)]
        rows = min(max(rows, now.allocated + max(now.allocated // 8, _GROWTH // sum(sizes))), self.capacity + now.spare)
        for file, size in zip(self._files(now.generation, schema), sizes, strict=True):
            lengthen(file, rows * size)
        return replace(now, allocated=rows)

    def _begin(self, schema: RowSchema, now: Now) -> Now:
        """The first write says what a row looks like, and how many places there are beyond the capacity."""
        if self.capacity % schema.num_envs:
            raise ConfigError(
                f"max_size: expected a multiple of the {schema.num_envs} environments, found {self.capacity}"
            )
        row = sum(block.raw.itemsize for block in blocks_of(schema))
        steps = -(-min(self.capacity, _SPARE_ROWS, max(1, _SPARE_BYTES // row)) // schema.num_envs)
        return replace(now, spare=steps * schema.num_envs)

    def _save_schema(self, schema: RowSchema) -> None:
        if self._schema is None:
            replace_file(self.path / "schema", json.dumps(schema.to_json()).encode())
            self._schema = schema

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Write rows behind the last, over the oldest where there is no room; see ``Storage.append``.

        Raises:
            StorageError: No room on the disk.
        """
        rows = stack(rows) if isinstance(rows, list) and not one else rows
        lead = self._ndim - 1 if one else self._ndim
        with self._lock:
            now = self._know()
            schema = RowSchema.of(rows, lead, self._ndim) if self._schema is None else self._schema
            arrays, n = schema.check(rows, lead, self._ndim)
            if not n and self._schema is None:
                return 0, 0
            if not now.spare:
                now = self._begin(schema, now)
            places = self.capacity + now.spare
            now = self._reserve(schema, now, min(now.written + n, places))
            self._save_schema(schema)
            if self._memory is None or self._mapped != (now.generation, now.allocated):
                self._map(now, schema)
            assert self._memory is not None
            first, done = now.written, 0
            while done < n:
                # As many as there are places that no row in use has.
                piece = min(n - done, places - min(now.written, self.capacity))
                place = now.written % places
                until_end = min(piece, places - place)
                self._memory.write(place, arrays, done, until_end)
                if until_end < piece:
                    self._memory.write(0, arrays, done + until_end, piece - until_end)
                now = replace(now, written=now.written + piece)
                self._head.commit(now)
                done += piece
            return first, n

    def check(self, rows: Any) -> None:
        """Raise what ``append(rows)`` would, and write nothing."""
        rows = stack(rows) if isinstance(rows, list) else rows
        with self._lock:
            self._know()
            schema = RowSchema.of(rows, self._ndim, self._ndim) if self._schema is None else self._schema
            schema.check(rows, self._ndim, self._ndim)

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` by ``rows``; see ``Storage.put``."""
        with self._lock:
            now = self._know()
            if self._schema is None or (slots.size and int(slots.view(np.uint64).max()) >= len(self)):
                raise slot_error(slots, len(self))
            arrays, n = self._schema.check(stack(rows) if isinstance(rows, list) and rows else rows, 1, 1)
            check_put(slots, n)
            columns = {str(number): array for number, array in enumerate(arrays)}
            journal = {"places": self._places(slots, now), "columns": columns}
            write_checkpoint(self.path / "journal", journal, sync=False)
            self._head.journal = True
            self._apply_journal()

    def _apply_journal(self) -> None:
        """Change rows in place as the journal says; doing so again changes nothing more."""
        assert self._memory is not None
        journal = read_checkpoint(self.path / "journal")
        self._memory.put(journal["places"], [journal["columns"][str(n)] for n in range(len(self._memory.columns))])
        now = self._head.now()
        self._head.commit(replace(now, changes=now.changes + 1))
        self._head.journal = False
        with suppress(OSError):
            (self.path / "journal").unlink()

    def empty(self) -> None:
        """Forget all rows; the files keep their places."""
        with self._lock:
            now = self._know()
            self._head.commit(replace(now, written=0, changes=now.changes + 1))

    # ------------------------------------------------------------------ reading

    def _places(self, slots: Slots, now: Now) -> Slots:
        """Where in the files the rows in ``slots`` lie."""
        if now.written <= self.capacity:
            return slots
        newest = now.written - 1
        return (newest - (newest - slots) % self.capacity) % (self.capacity + now.spare)

    def get(self, slots: Slots) -> Any:
        """The rows in ``slots``, copied; see ``Storage.get``."""
        with self._lock:
            now = self._know()
            if self._memory is None or (slots.size and int(slots.view(np.uint64).max()) >= len(self)):
                raise slot_error(slots, len(self))
            fields = self._memory.gather(self._places(slots, now))
            schema = self._memory.schema
            return fields if schema.plain else unflatten(schema.structure, fields)

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """One field of the rows in ``slots``, copied; see ``Storage.read``."""
        with self._lock:
            now = self._know()
            columns = {} if self._memory is None else self._memory.by_key
            if isinstance(slots, slice):
                slots = np.arange(len(self), dtype=np.int64)[slots]
            values: npt.NDArray[Any] = column_of(columns, key)[self._places(slots, now)]
            return values

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The rows, as long as the data, and what describes them."""
        with self._lock:
            now = self._know()
            places = self._places(np.arange(len(self), dtype=np.int64), now)
            columns = [] if self._memory is None else [column[places] for column in self._memory.columns]
            return rows_state(self, self._schema, columns)

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what ``state`` was taken from; see ``Storage.load``.

        The rows are written to new files, so that a crash leaves those that were there.
        """
        with self._lock:
            now = self._know()
            schema, arrays, written = state_rows(self, state, self._schema)
            if schema is None:
                self._head.commit(replace(now, written=written, changes=now.changes + 1))
                return
            later = Now(written, now.changes + 1, 0, now.generation + 1, now.spare)
            if not later.spare:
                later = self._begin(schema, later)
            self._remove(later.generation, schema)
            try:
                later = self._reserve(schema, later, min(written, self.capacity + later.spare))
                self._save_schema(schema)
            except StorageError:
                self._remove(later.generation, schema)
                raise
            slots = np.arange(len(arrays[0]), dtype=np.int64)
            self._map(later, schema).put(self._places(slots, later), arrays)
            self._head.commit(later)
            self._remove(now.generation, schema)

    def _remove(self, generation: int, schema: RowSchema) -> None:
        for file in self._files(generation, schema):
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Cut the files to the length of the data, and let go of them; whoever uses them again opens them again."""
        with self._lock:
            now = self._know()
            if self._schema is not None:
                rows = min(now.written, self.capacity + now.spare)
                self._head.commit(replace(now, allocated=rows))
                for file, block in zip(self._files(now.generation, self._schema), blocks_of(self._schema), strict=True):
                    with suppress(OSError), open(file, "r+b") as opened:
                        opened.truncate(rows * block.raw.itemsize)
            self._memory, self._mapped = None, None


def _reopen(capacity: int, path: str, ndim: int, alignment: Alignment) -> MemmapStorage:
    return MemmapStorage(capacity, path, ndim, alignment=alignment)
