"""MemmapStorage: rows in mapped files that several processes write and read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mouse_core.columns.memory import Columns, Refs, blocks_of, ring_pieces
from mouse_core.columns.schema import RowSchema, checked, whole
from mouse_core.errors import ConfigError, MissingFieldError, StateError, StorageError
from mouse_core.files.locking import FileLock, this_boot
from mouse_core.files.writing import make_folder, remove_leftovers, storing, sync_files, sync_folders, write_file
from mouse_core.nested import FieldKey
from mouse_core.replay.protocols import Slots
from mouse_core.replay.storages._mapped import (
    Counters,
    Head,
    MappedValues,
    RowSums,
    lengthen,
    map_file,
    num_places,
    read_journal,
    read_schema,
    row_files,
    values_file,
    write_journal,
)
from mouse_core.replay.storages.ring import RowStorage, check_put, check_slots, rows_state, slot_error, state_rows
from mouse_core.spec import Alignment, check_alignment, check_count

Int64s = npt.NDArray[np.int64]
Read = Callable[[FieldKey, int, int], npt.NDArray[Any]]


class Begins:
    """The file with what overwritten rows said; all calls are made while the folder's lock is held.

    Args:
        file: Where it lies. What it holds stands there twice, and its first word says which of the two counts.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._words: Int64s | None = None
        self._keys: list[FieldKey] = []
        self._copies = np.empty((2, 0), np.int64)  # a step, and the numbers of ``state`` there

    def of(self, schema: RowSchema, ends: Sequence[FieldKey], ids: FieldKey | None, steps: range, read: Read) -> Any:
        """Return the first step of the oldest episode of each environment, int64 ``[E]``; None if a field is not kept.

        Args:
            schema: The schema of the rows.
            ends: The fields that are not 0 where an episode ends.
            ids: The field that changes where an episode begins.
            steps: The steps that lie in the files, up to the oldest that is still there.
            read: Returns the values of a field in the steps ``first .. last``, ``[n, E]``.
        """
        keys = _keys(schema)
        if any(key not in keys for key in (*ends, *(() if ids is None else (ids,)))):
            return None
        known = self.state(schema, steps, read)
        begins = [known[keys.index(key), 0] + 1 for key in ends]
        begins += [] if ids is None else [known[keys.index(ids), 1]]
        return np.max(begins, axis=0)

    def look(self, schema: RowSchema, steps: range, read: Read) -> None:
        """Take note of the rows before the last of some steps, which are about to be overwritten."""
        self._write(schema, steps[-1], self.state(schema, steps, read))

    def looked(self, schema: RowSchema) -> int:
        """Return the first step that was not looked at."""
        return int(self._mapped(schema)[0])

    def forget(self, schema: RowSchema, step: int, saved: Int64s | None = None) -> None:
        """Keep only ``saved`` of the steps before ``step``; without it, an episode begins with ``step``."""
        self._write(schema, step, _unknown(schema, step) if saved is None else saved)

    def state(self, schema: RowSchema, steps: range, read: Read) -> Int64s:
        """Return what is known at the last of some steps, ``[fields, 2, E]``: of the steps before it."""
        first, *numbers = self._mapped(schema).tolist()
        known = np.array(numbers, np.int64).reshape(-1, 2, schema.num_envs)
        if not steps[0] <= first <= steps[-1] or (known[:, 0] >= first).any() or (known[:, 1] > first).any():
            first = steps[0]  # a crash of the machine took what was known of the steps before
            known = _unknown(schema, first)
        last = steps[-1]
        for number, key in enumerate(self._keys):
            values = read(key, first, last)
            step = np.arange(first, last + 1)[:, None]
            ended = np.where(values[:-1] != 0, step[:-1], -1).max(0, initial=-1)
            changed = np.where(values[1:] != values[:-1], step[1:], -1).max(0, initial=-1)
            known[number] = np.maximum(known[number], [ended, changed])
        return known

    def _mapped(self, schema: RowSchema) -> Int64s:
        """Return the copy that counts."""
        if self._words is None:
            self._keys = _keys(schema)
            size = 1 + 2 * schema.num_envs * len(self._keys)
            is_new = not self._file.exists()
            lengthen(self._file, 8 * (1 + 2 * size))
            self._words = map_file(self._file, 8 * (1 + 2 * size)).view(np.int64)
            self._copies = self._words[1:].reshape(2, size)
            if is_new:
                self.forget(schema, 0)
        copy: Int64s = self._copies[int(self._words[0]) & 1]
        return copy

    def _write(self, schema: RowSchema, step: int, known: Int64s) -> None:
        self._mapped(schema)
        assert self._words is not None
        other = 1 - (int(self._words[0]) & 1)
        self._copies[other] = step, *known.reshape(-1)
        self._words[0] = other


def _checked_begins(schema: RowSchema, step: int, saved: Any) -> Int64s | None:
    """Check a saved value of ``Begins.state`` for the oldest step ``step``; None if the state has none.

    Raises:
        StateError: The array does not fit the rows.
    """
    if saved is None:
        return None
    known, limit = np.asarray(saved), np.array([step, step + 1])[:, None]
    if known.dtype != np.int64 or known.shape != (len(_keys(schema)), 2, schema.num_envs) or (known >= limit).any():
        raise StateError(f"storage: begins: expected steps up to {step}, found {known.dtype} {list(known.shape)}")
    return known


def _keys(schema: RowSchema) -> list[FieldKey]:
    """Return the fields of one number a row."""
    plain = ((key, kind) for key, kind in schema.fields.items() if not kind.varies)
    return [key for key, kind in plain if kind.dtype.kind in "biuf" and np.prod(kind.shape) == 1]


def _unknown(schema: RowSchema, step: int) -> Int64s:
    return np.broadcast_to(np.array([step - 1, step])[:, None], (len(_keys(schema)), 2, schema.num_envs)).copy()


Sync = Literal["none", "flush", "append"]
# Bytes that files become longer by, at least.
_GROWTH = 1 << 16


class MemmapStorage(RowStorage):
    """Rows as nested dicts or tuples of arrays in mapped files, which several processes may write and read.

    The processes take turns. A row is whole or not there, even if its writer is killed in the middle of a write: new
    rows go to places that no row in use has (the files have a few more places than ``capacity``) and count when they
    are complete; a change in place goes to a journal first. The next process goes on from there.

    The files are about as long as the data, and exactly as long after ``close()``. A full disk is found before a row is
    written. Priorities are not shared.

    Rows outlive the process as soon as a write returns. ``flush()`` and ``close()`` give all rows checksums. Which rows
    with checksums outlive the machine depends on ``sync``:

    - ``"none"``: nothing waits for the disk. After a power cut, the rows that had reached the disk are there.
    - ``"flush"``: all rows that were written when ``flush()`` or ``close()`` returned. A crash of the machine takes
      later rows, and as many of the oldest rows, whose places the later ones took.
    - ``"append"``: every write is flushed.

    After opening, each row is compared with its checksum when it is first read. If the machine was restarted and not
    all rows are known to be on the disk, opening compares all rows: the whole ones up to the last checksum stay, and a
    warning counts the others.

    Args:
        capacity: Rows that the storage holds, as for ``ArrayStorage``; None: as many as the one at ``path``.
        path: A folder for this storage alone, made if it is missing. A storage that is there is opened, with its rows.
        ndim: 1, or 2 for ``[time, env]``.
        alignment: Which transition a row's action, reward and done belong to; None: the alignment of the storage at
            ``path``, or "outgoing" for a new one.
        ragged: Fields whose rows are arrays of differing length; see ``ArrayStorage``.
        sync: When the rows that this process writes reach the disk: "none", "flush" or "append".

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
        outgoing = None if alignment is None else int(check_alignment(alignment) == "outgoing")
        super().__init__(ndim, ragged)
        self._sync = sync
        if sync not in get_args(Sync):
            raise ConfigError(f"sync: expected one of {list(get_args(Sync))}, found {sync!r:.80}")
        self.path = path = Path(path).absolute()
        self._values, self._sums, self._begins = MappedValues(path), RowSums(), Begins(path / "begins")
        self._num_places = 0
        self._memory: Columns | None = None
        self._mapped: tuple[int, int] | None = None  # generation and rows of the memory
        with storing(f"folder {path}"):
            make_folder(path, sync=sync != "none")
            self._lock = FileLock(path / "lock")
            with self._lock:
                self._head = Head(path / "head", capacity, self._ndim, outgoing)
        with self._lock:
            if not self._head.is_of_this_boot and not self._head.closed:
                self._recover()
            now = self._catch_up()
            self._head.boot = this_boot()
            self._remove_others(now)
            places = self._places(self._slots, now)
            self._sums.watch(places[self._numbers(places, now) < now.summed], self._num_places)

    def __len__(self) -> int:
        return min(self._head.written, self.capacity)

    def __repr__(self) -> str:
        return f"MemmapStorage({len(self)} of {self.capacity} rows, {str(self.path)!r}, ndim={self._ndim})"

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = (self._head.capacity, str(self.path), self._ndim)
        return partial(MemmapStorage, *sizes, alignment=self.alignment, ragged=self._ragged, sync=self._sync), ()

    @property
    def capacity(self) -> int:
        """Rows that the storage holds; in whole time steps as soon as the environments are known."""
        return self._head.capacity - self._head.capacity % self.num_envs

    @property
    def num_envs(self) -> int:
        """Environments side by side; 1 for ``ndim=1``, and until the first write."""
        if self._schema is None and self._head.written:
            with self.lock():
                self._catch_up()
        return super().num_envs

    @property
    def alignment(self) -> Alignment:
        """The alignment: the transition that a row's action, reward and done belong to."""
        return self._head.alignment

    @property
    def written(self) -> int:
        """Rows ever appended, by any process."""
        return self._head.written

    @property
    def changes(self) -> int:
        """The number of changes to rows other than ``append``, by any process."""
        return self._head.changes

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' files."""
        now = self._head.now()
        blocks = [] if self._schema is None else blocks_of(self._schema)
        return now.allocated * sum(block.raw.itemsize for block in blocks) + now.room

    @property
    def synced(self) -> int:
        """Rows that are known to be on the disk, of all rows ever appended by any process."""
        return min(self._head.synced, self._head.written)

    def stats(self) -> dict[str, Any]:
        """``size``, ``capacity``, ``written`` and ``nbytes`` as the attributes; ``sync``; of the rows written, how many
        have checksums (``summed``) and how many are known to be on the disk (``synced``)."""
        now = self._head.now()
        known = {"size": len(self), "capacity": self.capacity, "written": now.written, "nbytes": self.nbytes}
        return {**known, "sync": self._sync, "summed": now.summed, "synced": self.synced}

    def lock(self) -> FileLock:
        """The lock to hold around a draw and its gather; every method takes it, too."""
        return self._lock

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Write rows behind the last one, over the oldest ones in a full ring; StorageError: no room on the disk."""
        with self._lock:
            now = self._writing()
            schema, arrays, n = checked(rows, self._schema, one=one, ndim=self._ndim, ragged=self._ragged)
            if not n and self._schema is None:
                return 0, 0
            memory, now = self._reserve(schema, arrays, n, now)
            first, done, places = now.written, 0, self._num_places
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
                now = now._replace(written=now.written + piece)
                self._commit(now)
                done += piece
            self._written()
            return first, n

    def _is_unlooked(self, schema: RowSchema, rows: int) -> bool:
        """Whether ``Begins`` has not looked at all of the first ``rows`` rows."""
        return self._begins.looked(schema) * schema.num_envs < rows

    def _written(self) -> None:
        if self._sync == "append":
            self.flush()

    def flush(self) -> None:
        """Give all rows checksums and, except with ``sync="none"``, wait until they are on the disk."""
        with self._lock:
            now = self._catch_up()
            if self._schema is None:
                return
            now = self._with_sums(now)
            if self._sync == "none":
                self._commit(now)
                return
            self._sync_rows(now)
            self._commit(now)
            self._head.synced = now.written
            self._sync_head()

    def check(self, rows: Any) -> None:
        """Raise the error that ``append(rows)`` raises; write nothing."""
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
                self._sync_head()
            self._apply_journal()
            self._written()

    def empty(self) -> None:
        """Forget all rows; the files keep their places."""
        with self._lock:
            now = self._writing()
            self._head.synced = 0
            if self._schema is not None:
                self._begins.forget(self._schema, 0)
            self._head.commit(now._replace(written=0, summed=0, changes=now.changes + 1))
            self._written()

    # ------------------------------------------------------------------ reading

    def get(self, slots: Slots) -> Any:
        """Return a copy of the rows in ``slots``; see ``Storage.get``."""
        with self._lock:
            now = self._catch_up()
            if self._memory is None:
                raise slot_error(slots, 0)
            check_slots(slots, len(self))
            return self._memory.get(self._checked(self._places(slots, now), now))

    def read(self, key: FieldKey, slots: Slots | slice) -> npt.NDArray[Any]:
        """Return a copy of one field of the rows in ``slots``; see ``Storage.read``."""
        with self._lock:
            now = self._catch_up()
            if self._memory is None:
                raise MissingFieldError(f"rows: expected a field {key!r}, found none")
            places = self._places(self._slots[slots] if isinstance(slots, slice) else slots, now)
            return self._memory.read(key, self._checked(places, now))

    def oldest_begins(self, ends: Sequence[FieldKey], ids: FieldKey | None) -> npt.NDArray[np.int64] | None:
        """Return the steps that began the oldest episodes, even if they are overwritten; see ``Storage``."""
        with self._lock:
            now = self._catch_up()
            if self._schema is None or now.written <= self.capacity:
                return None
            steps = self._steps_to_oldest(now)
            found: npt.NDArray[np.int64] | None = self._begins.of(self._schema, ends, ids, steps, self._read_steps)
            return found

    def verify(self) -> None:
        """Compare all rows that have checksums with them.

        Raises:
            StateError: A row is not what was written; the message names it and its file.
        """
        with self._lock:
            now = self._catch_up()
            places = self._places(self._slots, now)
            self._sums.watch(places, self._num_places)
            if self._memory is not None:
                self._checked(places, now)

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the rows, as long as the data, and their description."""
        with self._lock:
            now = self._catch_up()
            state = rows_state(self, self._schema, self._columns(now))
            if self._schema is not None and now.written > self.capacity:
                steps = self._steps_to_oldest(now)
                state["begins"] = self._begins.state(self._schema, steps, self._read_steps)
            return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the storage that ``state`` was taken from; see ``Storage.load``.

        The rows are written to new files, so that a crash leaves those that were there.
        """
        with self._lock:
            now = self._writing()
            schema, arrays, written = state_rows(self, state, self._schema)
            oldest = 0 if schema is None else (written - len(arrays[0])) // schema.num_envs
            begins = None if schema is None else _checked_begins(schema, oldest, state["begins"])
            self._head.synced = 0
            if schema is None:
                self._head.commit(now._replace(written=written, summed=written, changes=now.changes + 1))
                return
            self._replace(now, schema, arrays, written, now.changes + 1)
            self._begins.forget(schema, oldest, begins)
            self._written()

    def close(self) -> None:
        """Flush, cut the files to the length of the data, and unmap them; the next use maps them again."""
        with self._lock:
            self.flush()
            now = self._catch_up()
            if self._schema is not None:
                now = now._replace(allocated=min(now.written, self._num_places))
                self._head.commit(now)
                for file, size in self._files(self._schema, now).items():
                    with suppress(OSError), open(file, "r+b") as opened:
                        opened.truncate(size)
                if self._sync != "none":
                    self._sync_rows(now)
                    self._head.closed = True
                    self._sync_head()
            self._memory, self._mapped = None, None
            self._values.forget()

    # ---------------------------------------------------------------------- the state of the folder

    def _catch_up(self) -> Counters:
        """Catch up with the other processes, and with one that died while it changed rows."""
        now = self._head.now()
        if self._schema is None:
            self._know(read_schema(self.path, self._head.capacity, now))
        if self._schema is not None:
            self._map(now, self._schema)
        if self._head.making:
            self._remove_others(now)
        if self._head.journal:
            self._apply_journal()
        return now

    def _writing(self) -> Counters:
        """Catch up before rows are written."""
        if self._head.closed:
            self._head.closed = False
            self._sync_head()
        return self._catch_up()

    def _recover(self) -> None:
        """After a restart of the machine, keep the rows that reached the disk, up to the last one with a checksum."""
        before = self._head.now()
        schema = read_schema(self.path, self._head.capacity, before)
        if schema is None:
            return
        # What the restart cut off becomes zeros.
        for file, size in self._files(schema, before).items():
            lengthen(file, size)
        try:
            now = self._catch_up()
        except StateError:
            if not self._head.journal:
                raise
            self._head.journal = False  # it did not reach the disk: rows that were being changed have wrong checksums
            now = self._catch_up()
        numbers = np.arange(max(0, now.written - self.capacity), now.summed)
        places = numbers % self._num_places
        self._values.at(now)
        (wrong,) = np.nonzero(self._sums.wrong(places, numbers).any(axis=1))
        # Behind the last wrong one: those before it may have been overwritten by rows that did not reach the disk.
        kept = places[wrong[-1] + 1 if len(wrong) else 0 :]
        gone = len(self) - len(kept)
        if gone:
            columns = self._memory.saved(kept) if self._memory is not None else []
            self._replace(now, schema, columns, len(kept), now.changes + 1)
            self._begins.forget(schema, 0)
            warnings.warn(
                f"{self.path}: the machine was restarted before {gone} of {gone + len(kept)} rows were on the disk; "
                "they are gone (see sync= and flush())",
                UserWarning,
                stacklevel=4,
            )
            self._memory, self._mapped = None, None

    def _map(self, now: Counters, schema: RowSchema) -> Columns:
        """Return the memory of the rows' files, as long as the files are now."""
        length = (now.generation, now.allocated)
        if self._memory is None or self._mapped != length:
            *files, sums_file = row_files(self.path, schema, now.generation).items()
            self._memory = Columns.allocate(
                schema, now.allocated, lambda number, nbytes: map_file(files[number][0], nbytes), self._values
            )
            sums = map_file(sums_file[0], now.allocated * sums_file[1]).view(np.uint64)
            names = [file for file, _ in files]
            self._sums.at(names, self._memory, sums.reshape(now.allocated, sums_file[1] // 8))
            self._mapped = length
        return self._memory

    def _files(self, schema: RowSchema, now: Counters) -> dict[Path, int]:
        """Return the files of the rows that are there, and the length of each."""
        files = {file: now.allocated * size for file, size in row_files(self.path, schema, now.generation).items()}
        return {**files, values_file(self.path, now.generation, now.room): now.room} if now.room else files

    def _remove_others(self, now: Counters) -> None:
        """Remove the files of rows that do not count, and leftovers of writers that died; the caller holds the lock."""
        remove_leftovers(self.path, ["head", "schema", "journal"], only_writer=True)
        kept = (f"rows-{now.generation}-", f"sums-{now.generation}", f"values-{now.generation}-{now.room}")
        for path in self.path.iterdir():
            name = path.name
            if name.startswith(("rows-", "sums-", "values-")) and name not in kept and not name.startswith(kept[0]):
                with suppress(OSError):
                    path.unlink()
        self._head.making = False

    def _sync_rows(self, now: Counters) -> None:
        """Wait until the rows are on the disk; the head follows."""
        assert self._schema is not None
        with storing(f"rows in {self.path}"):
            sync_files([*self._files(self._schema, now)])
            sync_folders([self.path])

    def _sync_head(self) -> None:
        with storing(f"{self.path / 'head'}"):
            sync_files([self.path / "head"])

    def _commit(self, now: Counters) -> None:
        before = self._head.now()
        has_moved = (before.generation, before.room) != (now.generation, now.room)
        waits = has_moved and self._sync != "none"
        if waits:
            self._sync_rows(now)
        self._head.commit(now)
        if waits:
            self._sync_head()  # before the files that it named are removed
        if has_moved:
            self._remove_others(now)
        self._head.making = False

    def _with_sums(self, now: Counters) -> Counters:
        """Give all rows checksums, and return the counters then."""
        numbers = np.arange(max(now.summed, now.written - self.capacity), now.written)
        self._values.at(now)
        self._sums.make(numbers % self._num_places, numbers)
        return now._replace(summed=now.written)

    def _apply_journal(self) -> None:
        """Change the rows in place that the journal names; a second call changes nothing more."""
        now = self._head.now()
        places, rows = read_journal(self.path, self._memory, now.allocated)
        assert self._memory is not None
        self._memory.put(places, rows)
        numbers = self._numbers(places, now)
        self._values.at(now)
        self._sums.make(places[numbers < now.summed], numbers[numbers < now.summed])
        if self._sync != "none":
            self._sync_rows(now)
        self._head.commit(now._replace(changes=now.changes + 1))
        self._head.journal = False
        with suppress(OSError):
            (self.path / "journal").unlink()

    # ---------------------------------------------------------------------- room for rows

    def _reserve(self, schema: RowSchema, arrays: list[Any], n: int, now: Counters) -> tuple[Columns, Counters]:
        """Return the memory with room for ``n`` more rows, and the counters then; StorageError: no room on the disk."""
        now = self._lengthened(schema, now, now.written + n)
        self._save_schema(schema)
        self._map(now, schema)
        if schema.varying:
            now = self._compact(schema, now)
            self._head.making = True
            now = self._values.with_room(schema, arrays, now, self._refs)
        return self._map(now, schema), now

    def _lengthened(self, schema: RowSchema, now: Counters, rows: int) -> Counters:
        """Make the files long enough for ``rows`` rows, up to all places, and return the counters then."""
        places = self._num_places or num_places(schema, self._head.capacity)
        rows = min(rows, places)
        if rows <= now.allocated:
            return now
        files = row_files(self.path, schema, now.generation)
        least = now.allocated + max(now.allocated // 8, _GROWTH // sum(files.values()))
        rows = min(max(rows, least), places)
        for file, size in files.items():
            lengthen(file, rows * size)
        return now._replace(allocated=rows)

    def _save_schema(self, schema: RowSchema) -> None:
        if self._schema is None:
            write_file(self.path / "schema", json.dumps(schema.to_json()).encode(), only_writer=True)
            self._know(schema)

    def _know(self, schema: RowSchema | None) -> None:
        self._schema = schema
        self._num_places = 0 if schema is None else num_places(schema, self._head.capacity)

    def _compact(self, schema: RowSchema, now: Counters) -> Counters:
        """Write all rows anew if overwritten rows hold most of the values' ring, and return the counters then."""
        if schema.varying and self._values.at(now).is_sparse(self._refs):
            self._look_at_begins(now)
            self._replace(now, schema, self._columns(now), now.written, now.changes)
            now = self._catch_up()
        return now

    def _replace(self, now: Counters, schema: RowSchema, arrays: list[Any], written: int, changes: int) -> None:
        """Write rows to new files, and count these from then on."""
        self._head.making = True
        later = Counters(written, changes, 0, now.generation + 1)
        try:
            later = self._lengthened(schema, later, written)
            rows, later = self._values.kept(schema, arrays, later, list)
            self._save_schema(schema)
        except StorageError:
            self._remove_others(now)
            raise
        slots = np.arange(len(arrays[0]), dtype=np.int64)
        self._map(later, schema).put(self._places(slots, later), rows)
        self._commit(self._with_sums(later))
        self._sums.watch(slots[:0], 0)

    # ---------------------------------------------------------------------- places of rows

    @property
    def _slots(self) -> Slots:
        """All slots in use."""
        return np.arange(len(self), dtype=np.int64)

    def _places(self, slots: Slots, now: Counters) -> Slots:
        """Return the places of the rows in ``slots``."""
        if now.written <= self.capacity:
            return slots
        newest = now.written - 1
        return (newest - (newest - slots) % self.capacity) % self._num_places

    def _numbers(self, places: Slots, now: Counters) -> Slots:
        """Return the numbers of the rows at some places: of 6 places, with 9 rows written, place 1 has row 7."""
        newest = now.written - 1
        return newest - (newest - places) % self._num_places

    def _checked(self, places: Slots, now: Counters) -> Slots:
        """Return the places, after checking that the rows there are as they were written."""
        self._values.at(now)
        self._sums.check(places, lambda some: self._numbers(some, now), now.summed)
        return places

    def _columns(self, now: Counters) -> list[Any]:
        if self._memory is None:
            return []
        return self._memory.saved(self._checked(self._places(self._slots, now), now))

    def _refs(self) -> list[Refs]:
        """Return the references to the values that differ in length, of the rows in use."""
        if self._memory is None or self._schema is None:
            return []
        return self._memory.refs(self._places(self._slots, self._head.now()))

    # ---------------------------------------------------------------------- where the oldest episodes began

    def _look_at_begins(self, now: Counters) -> None:
        """Let ``Begins`` look at the rows that are out of use, before others are written over them."""
        assert self._schema is not None
        if now.written > self.capacity:
            self._begins.look(self._schema, self._steps_to_oldest(now), self._read_steps)

    def _steps_to_oldest(self, now: Counters) -> range:
        """Return the steps that lie in the files, up to the oldest one in use."""
        first = max(0, now.written - self._num_places)
        return range(first // self.num_envs, max(0, now.written - self.capacity) // self.num_envs + 1)

    def _read_steps(self, key: FieldKey, first: int, last: int) -> npt.NDArray[Any]:
        assert self._memory is not None
        places = np.arange(first * self.num_envs, (last + 1) * self.num_envs) % self._num_places
        values: npt.NDArray[Any] = self._memory.by_key[key][places].reshape(-1, self.num_envs)
        return values
