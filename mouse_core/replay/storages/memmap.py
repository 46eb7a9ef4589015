"""MemmapStorage: rows in mapped files, which several processes write and read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import ring_pieces
from mouse_core.columns.schema import RowSchema, checked, whole
from mouse_core.errors import MissingFieldError
from mouse_core.files.locking import FileLock
from mouse_core.replay.protocols import FieldKey, Slots
from mouse_core.replay.storages._mapped import files as on_disk
from mouse_core.replay.storages._mapped.begins import checked as checked_begins
from mouse_core.replay.storages._mapped.rows import MappedRows, Sync, write_journal
from mouse_core.replay.storages.ring import check_ndim, check_put, check_slots, rows_state, slot_error, state_rows
from mouse_core.spec import Alignment, check_alignment, check_count, check_list


class MemmapStorage(MappedRows):
    """Rows as nested dicts or tuples of arrays in mapped files, of which several processes may write and read.

    The processes take turns: a row is whole or not there, also where a writer is killed in the middle of a write. Rows
    are written to places that no row in use has (the files have a few more places than ``capacity``), and count when
    they are complete; what is changed in place is written to a journal first. Whoever comes next after a crash goes on
    from there.

    The files are about as long as the data, exactly so after ``close()``; a full disk is found before a row is written.
    Priorities are not shared.

    Rows outlive the process as soon as a write returns. ``flush()`` and ``close()`` give all rows checksums, and rows
    that have some outlive the machine, as ``sync`` says:

    - ``"none"``: nothing waits for the disk. After a power cut those rows are there that had reached it.
    - ``"flush"``: all rows that were written when ``flush()`` or ``close()`` returned. A crash of the machine takes
      those that came after it, and as many of the oldest, whose places these took.
    - ``"append"``: every write is flushed.

    Whoever opens the folder has each row compared with its checksum when it first reads it. If the machine was
    restarted and not all rows are known to be on the disk, they are looked at when the folder is opened: what is whole,
    up to the last checksum, stays, and a warning says how many rows are gone.

    Args:
        capacity: Rows it holds, as for ``ArrayStorage``; None: as many as the buffer at ``path`` does.
        path: A folder of its own; made if it is not there. A buffer that is there is opened, with its rows.
        ndim: 1, or 2 for ``[time, env]``.
        alignment: Which transition a row's action, reward and done belong to; None: what the buffer at ``path`` says,
            else "outgoing".
        ragged: Fields whose rows are arrays of differing length; see ``ArrayStorage``.
        sync: When rows reach the disk, "none", "flush" or "append"; that of this process's writes.

    Raises:
        ConfigError: An argument out of range, or the buffer at ``path`` is of another size, ``ndim`` or alignment.
        StateError: Its files are damaged, which may show when a row is read; or a newer release wrote them.
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
        sync: Sync = "none",
    ) -> None:
        capacity = None if capacity is None else check_count("capacity", capacity)
        self._ndim = check_ndim(ndim)
        outgoing = None if alignment is None else int(check_alignment(alignment) == "outgoing")
        self._ragged = check_list("ragged", ragged)
        super().__init__(Path(path).absolute(), capacity, self._ndim, outgoing, sync)

    def __repr__(self) -> str:
        return f"MemmapStorage({len(self)} of {self.capacity} rows, {str(self.path)!r}, ndim={self._ndim})"

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = (self._head.capacity, str(self.path), self._ndim)
        return partial(MemmapStorage, *sizes, alignment=self.alignment, ragged=self._ragged, sync=self._sync), ()

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
    def structure(self) -> Any:
        """How rows are nested, as ``mouse_core.nested.structure_of`` says it; None before the first write."""
        return None if self._schema is None else self._schema.structure

    @property
    def ragged(self) -> tuple[FieldKey, ...]:
        """Fields that differ in length: those that were said to, and those that do since the first write."""
        return self._ragged if self._schema is None else tuple({**dict.fromkeys(self._ragged), **self._schema.varying})

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

    @property
    def synced(self) -> int:
        """Of all the rows written, how many are known to be on the disk; by whichever process."""
        return self._head.synced

    def stats(self) -> dict[str, Any]:
        """``size``, ``capacity``, ``written`` and ``nbytes`` as the attributes; ``sync``; of the rows written, how many
        have checksums (``summed``) and how many are known to be on the disk (``synced``)."""
        now = self._head.now()
        known = {"size": len(self), "capacity": self.capacity, "written": now.written, "nbytes": self.nbytes}
        return {**known, "sync": self._sync, "summed": now.summed, "synced": self.synced}

    def lock(self) -> FileLock:
        """What to hold around a draw and its gather; every method takes it too."""
        return self._lock

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Write rows behind the last, over the oldest where there is none; StorageError: no room on the disk."""
        with self._lock:
            now = self._writing()
            schema, arrays, n = checked(rows, self._schema, one=one, ndim=self._ndim, ragged=self._ragged)
            if not n and self._schema is None:
                return 0, 0
            memory, now = self._reserve(schema, arrays, n, now)
            first, done, places = now.written, 0, self.capacity + now.spare
            while done < n:
                # As many as there are places that no row in use has: of 4 rows and 2 places more, in which rows 0 to 5
                # were written, rows 2 to 5 are in use; two more rows go to the places 0 and 1, a third waits for them.
                piece = min(n - done, places - min(now.written, self.capacity))
                if now.written + piece > places and self._is_unlooked(schema, now.written + piece - places):
                    self._look_at_begins(now)
                part = arrays if piece == n else [array[done : done + piece] for array in arrays]
                rows, now = self._values.kept(schema, part, now, self._refs)
                for place, begin, count in ring_pieces(now.written, piece, places):
                    memory.write(place, rows, begin, count)
                now = replace(now, written=now.written + piece)
                self._commit(now)
                done += piece
            self._written()
            return first, n

    def _is_unlooked(self, schema: RowSchema, rows: int) -> bool:
        """Whether one of the first rows was not looked at for where its episode ends."""
        return self._begins.looked(schema) * schema.num_envs < rows

    def _written(self) -> None:
        if self._sync == "append":
            self.flush()

    def flush(self) -> None:
        """Give all rows checksums and, but for ``sync="none"``, wait until they are on the disk."""
        with self._lock:
            now = self._catch_up()
            if self._schema is None:
                return
            now = self._with_sums(now)
            if self._sync == "none":
                self._commit(now)
                return
            self._to_disk(now)
            self._commit(now)
            self._head.synced = now.written
            self._head_to_disk()

    def check(self, rows: Any) -> None:
        """Raise what ``append(rows)`` would, and write nothing."""
        with self._lock:
            self._catch_up()
            checked(rows, self._schema, one=False, ndim=self._ndim, ragged=self._ragged)

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` by ``rows``; see ``Storage.put``."""
        with self._lock:
            now = self._writing()
            if self._schema is None:
                raise slot_error(slots, 0)
            check_slots(slots, len(self))
            rows = whole(rows, self._schema, ndim=1)
            arrays, n = self._schema.check(rows, 1, 1)
            check_put(slots, n)
            now = self._compact(self._schema, now)
            self._head.making = True
            rows, now = self._values.kept(self._schema, arrays, now, self._refs)
            self._commit(now)
            write_journal(self.path, self._places(slots, now), rows, sync=self._sync != "none")
            self._head.journal = True
            if self._sync != "none":
                self._head_to_disk()
            self._apply_journal()
            self._written()

    def empty(self) -> None:
        """Forget all rows; the files keep their places."""
        with self._lock:
            now = self._writing()
            self._head.synced = 0
            if self._schema is not None:
                self._begins.forget(self._schema, 0)
            self._head.commit(replace(now, written=0, summed=0, changes=now.changes + 1))
            self._written()

    # ------------------------------------------------------------------ reading

    def get(self, slots: Slots) -> Any:
        """The rows in ``slots``, copied; see ``Storage.get``."""
        with self._lock:
            now = self._catch_up()
            if self._memory is None:
                raise slot_error(slots, 0)
            check_slots(slots, len(self))
            return self._memory.get(self._checked(self._places(slots, now), now), self._values.at(now))

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """One field of the rows in ``slots``, copied; see ``Storage.read``."""
        with self._lock:
            now = self._catch_up()
            if self._memory is None:
                raise MissingFieldError(f"rows: expected a field {key!r}, found none")
            places = self._places(self._slots[slots] if isinstance(slots, slice) else slots, now)
            return self._memory.read(key, self._checked(places, now), self._values.at(now))

    def oldest_begins(self, ends: Sequence[FieldKey], ids: FieldKey | None) -> npt.NDArray[np.int64] | None:
        """The steps with which the oldest episodes began, also where they are overwritten; see ``Storage``."""
        with self._lock:
            now = self._catch_up()
            if self._schema is None or now.written <= self.capacity:
                return None
            steps = self._steps_to_oldest(now)
            found: npt.NDArray[np.int64] | None = self._begins.of(
                self._schema, ends, ids, steps, partial(self._read_steps, now)
            )
            return found

    def verify(self) -> None:
        """Compare all rows that have checksums with them.

        Raises:
            StateError: A row is not what was written; the message names it and its file.
        """
        with self._lock:
            now = self._catch_up()
            places = self._places(self._slots, now)
            self._sums.watch(places, self.capacity + now.spare)
            if self._memory is not None:
                self._checked(places, now)

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The rows, as long as the data, and what describes them."""
        with self._lock:
            now = self._catch_up()
            state = rows_state(self, self._schema, self._columns(now))
            if self._schema is not None and now.written > self.capacity:
                steps = self._steps_to_oldest(now)
                state["begins"] = self._begins.state(self._schema, steps, partial(self._read_steps, now))
            return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what ``state`` was taken from; see ``Storage.load``.

        The rows are written to new files, so that a crash leaves those that were there.
        """
        with self._lock:
            now = self._writing()
            schema, arrays, written = state_rows(self, state, self._schema)
            oldest = 0 if schema is None else (written - len(arrays[0])) // schema.num_envs
            begins = None if schema is None else checked_begins(schema, oldest, state["begins"])
            self._head.synced = 0
            if schema is None:
                self._head.commit(replace(now, written=written, summed=written, changes=now.changes + 1))
                return
            self._replace(now, schema, arrays, written, now.changes + 1)
            self._begins.forget(schema, oldest, begins)
            self._written()

    def close(self) -> None:
        """``flush()``, cut the files to the length of the data, and let go of them; the next use opens them again."""
        with self._lock:
            self.flush()
            now = self._catch_up()
            if self._schema is not None:
                now = replace(now, allocated=min(now.written, self.capacity + now.spare))
                self._head.commit(now)
                on_disk.cut(self.path, self._schema, now)
                if self._sync != "none":
                    self._to_disk(now)
                    self._head.closed = True
                    self._head_to_disk()
            self._memory, self._mapped = None, None
            self._values.forget()
