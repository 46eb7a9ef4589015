"""MemmapStorage: rows in memory-mapped files that several processes write and read.

A folder has these files, where ``G`` is the number of times that all rows were rewritten::

    lock          held around every call
    head          capacity, counters, flags
    schema        the schema of a row, as JSON
    rows-G-0      the fields of a row that lie side by side; there is one file for each block of fields
    sums-G        the checksums of each row
    values-G-R    values that differ in length, in a ring of R bytes
    journal       rows that are being changed in place

The head has two copies of all counters, each with a checksum, and one word of the head selects the valid copy. A change
is written to the invalid copy, and becomes valid when a single memory write sets that word. A process that dies before
this memory write has changed nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE, check_choice
from mouse_core.columns.memory import (
    ByteRing,
    Bytes,
    Columns,
    Refs,
    RowSchema,
    Values,
    blocks_of,
    checked,
    ring_pieces,
    varying_of,
    whole,
)
from mouse_core.errors import ConfigError, DataError, MissingFieldError, StateError, StorageError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.files.checksum import checksum
from mouse_core.files.locking import FileLock, this_boot
from mouse_core.files.mapped import Word, set_aside
from mouse_core.files.writing import make_folder, remove_leftovers, storing, sync_files, sync_folders, write_file
from mouse_core.nested import FieldKey
from mouse_core.replay.protocols import Slots
from mouse_core.replay.storages.array import RowStorage, check_put, check_slots, rows_state, slot_error, state_rows
from mouse_core.spec import Alignment, check_alignment, check_count

_FORMAT = 1
# "MOUSMMP" and the version of the format as a digit, read as a little-endian number.
_MAGIC = 0x00504D4D53554F4D | ord(str(_FORMAT)) << 56
_WORDS = 32
_CAPACITY, _NDIM, _ALIGNMENT, _JOURNAL, _WHICH, _MAKING, _BOOT = range(1, 8)
_COPIES, _SYNCED, _CLOSED = (8, 16), 24, 25
_FAILED = 28
_SUMS = (26, 27)  # the checksum of each copy of the counters; its seed is the capacity
# Largest number of places in addition to the capacity.
_SPARE_BYTES, _SPARE_ROWS = 1 << 20, 1024
_MOST = 1 << 40  # the upper limits of rows and of bytes (a terabyte)


def lengthen(path: Path, nbytes: int) -> None:
    """Extend a file to at least ``nbytes`` bytes, and allocate these bytes on the disk. Raise StorageError if the disk
    is full.
    """
    with storing(f"file {path}"), open(path, "ab") as file:
        size = os.fstat(file.fileno()).st_size
        if size < nbytes:
            set_aside(file.fileno(), nbytes, begin=size)


def map_file(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map the first bytes of a file for reading and writing.

    Raises:
        StateError: The file is too short or missing.
        StorageError: The file cannot be opened or mapped.
    """
    if not nbytes:
        return np.empty(0, np.uint8)
    try:
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size < nbytes:
                raise StateError(f"{path}: expected {nbytes} bytes, found {size}")
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except FileNotFoundError as error:
        raise StateError(f"{path}: expected a file of {nbytes} bytes, found none") from error
    except StateError:
        raise
    except (OSError, OverflowError, ValueError) as error:
        raise StorageError(f"{path}: expected {nbytes} bytes that can be mapped, found {error}") from error


# ---------------------------------------------------------------------- the head


class Counters(NamedTuple):
    """The counters in the head; all counters change in one atomic update.

    Args:
        written: Number of rows ever appended.
        changes: Number of changes to rows, not counting appends.
        allocated: Number of rows for which the files have space.
        generation: The number ``G`` in the names of the files that hold the rows.
        end: Number of bytes of ragged values ever written.
        room: Size in bytes of the ring of ragged values.
        summed: Number of rows, counted from row 0, that have checksums: the rows ``0 .. summed - 1``.
        first: The index, in the order of writing, of the oldest row that is still in the files.
    """

    written: int = 0
    changes: int = 0
    allocated: int = 0
    generation: int = 0
    end: int = 0
    room: int = 0
    summed: int = 0
    first: int = 0


class Head:
    """The head file of a folder. If the file is missing, it is created; the caller holds the folder's lock.

    Args:
        path: The path of the file.
        capacity: Capacity in rows; None: the capacity in the file.
        ndim: The number of batch axes of the rows, 1 or 2.
        outgoing: 1 for rows of the alignment "outgoing", 0 for "arrived"; None: the value in the file, or 1 for a new
            file.

    Raises:
        ConfigError: The file belongs to a storage of another size, ``ndim`` or alignment; or the file is missing and
            ``capacity`` is None.
        StateError: The file is damaged, or a newer release wrote it.
    """

    journal = Word(_JOURNAL)
    """Whether the journal contains an unfinished change in place."""

    making = Word(_MAKING)
    """Whether a process is writing or removing temporary files. If the process dies, the word stays set and the files
    remain.
    """

    synced = Word(_SYNCED)
    """The number of written rows that are known to be on disk."""

    closed = Word(_CLOSED)
    """Whether all rows and this word are on disk, and nothing was written since."""

    failed = Word(_FAILED)
    """Whether the last sync of the rows failed. The system can then count bytes as written that are not on disk."""

    boot = Word(_BOOT)
    """The identity of the machine's boot (start of the system) during which rows were last checked."""

    def __init__(self, path: Path, capacity: int | None, ndim: int, outgoing: int | None) -> None:
        self.path = path
        if not path.exists():
            if capacity is None:
                expected = f"expected a capacity, since no buffer exists at this path ({path.parent})"
                raise ConfigError(f"capacity: {expected}, found none")
            new = np.zeros(_WORDS, np.int64)
            new[:_JOURNAL] = _MAGIC, capacity, ndim, 1 if outgoing is None else outgoing
            new[_SUMS[0]] = _sum_of(memoryview(new), 0)  # type: ignore[arg-type]
            write_file(path, new.tobytes(), only_writer=True)
        size = path.stat().st_size
        if size != 8 * _WORDS:
            raise StateError(f"{path}: expected a header of {8 * _WORDS} bytes, found {size}")
        # A memoryview reads a single number faster than an array.
        self.words = memoryview(map_file(path, size).view(np.int64))  # type: ignore[arg-type]
        self._check(path)
        self.capacity = self.words[_CAPACITY]
        self.alignment: Alignment = "outgoing" if self.words[_ALIGNMENT] else "arrived"
        found, asked = self.words[_CAPACITY:_JOURNAL].tolist(), (capacity, ndim, outgoing)
        expected_numbers = [kept if one is None else one for one, kept in zip(asked, found, strict=True)]
        if found != expected_numbers:
            raise ConfigError(
                f"{path.parent}: expected a buffer of (capacity, ndim, alignment) {_shown(*expected_numbers)}, found "
                f"{_shown(*found)}"
            )

    def _check(self, path: Path) -> None:
        """Raise StateError if the content of the head file is invalid."""
        magic, capacity, ndim, *flags = self.words[: _MAKING + 1].tolist()
        if magic in (_MAGIC + (step << 56) for step in range(1, 10 - _FORMAT)):
            expected = f"expected a MemmapStorage of format {_FORMAT}"
            raise StateError(f"{path}: {expected}, found a version that a newer release wrote")
        if magic != _MAGIC or not 1 <= capacity < 1 << 62 or ndim not in (1, 2) or not {*flags} <= {0, 1}:
            raise StateError(
                f"{path}: expected the header of a MemmapStorage, found other content; the file "
                "is damaged or belongs to another program"
            )
        if _sum_of(self.words, self.words[_WHICH]) != self.words[_SUMS[self.words[_WHICH]]]:
            raise StateError(
                f"{path}: expected counters with their checksum, found other counters; the file is damaged"
            )
        now = self.now()
        most = max(now.written, now.changes, now.allocated, now.generation)
        if not 0 <= min(now) <= most < _MOST or max(now.summed, now.first) > now.written:
            raise StateError(f"{path}: expected counters that fit a buffer of {capacity} rows, found {now}")

    def now(self) -> Counters:
        """Return the current counters."""
        begin = _COPIES[self.words[_WHICH]]
        return Counters(*self.words[begin : begin + len(Counters._fields)])

    @property
    def written(self) -> int:
        """The value of ``now().written``; reading only this counter is faster than ``now()``."""
        return self.words[_COPIES[self.words[_WHICH]]]

    @property
    def changes(self) -> int:
        """The value of ``now().changes``; reading only this counter is faster than ``now()``."""
        return self.words[_COPIES[self.words[_WHICH]] + 1]

    def commit(self, now: Counters) -> None:
        """Replace all counters by ``now``."""
        other = 1 - self.words[_WHICH]
        for place, number in enumerate(now, _COPIES[other]):
            self.words[place] = number
        self.words[_SUMS[other]] = _sum_of(self.words, other)
        self.words[_WHICH] = other


def _sum_of(words: memoryview[int], which: int) -> int:
    """Return the checksum of a copy of the counters, 63 bits."""
    begin = _COPIES[which]
    return checksum(words[begin : begin + len(Counters._fields)], words[_CAPACITY]) >> 1


def _shown(capacity: int, ndim: int, outgoing: int) -> tuple[Any, ...]:
    return capacity, ndim, "outgoing" if outgoing else "arrived"


# ---------------------------------------------------------------------- the rows


def read_schema(folder: Path, capacity: int, now: Counters) -> RowSchema | None:
    """Return the schema of a row; None if no row was written yet.

    Raises:
        StateError: The file is damaged or missing, or the counters contradict the schema.
    """
    path = folder / "schema"
    if not path.exists():
        if now.allocated:
            raise StateError(f"{path}: expected the fields of {now.allocated} rows, found no file")
        return None
    try:
        schema = RowSchema.from_json(json.loads(path.read_text()))
        if now.written % schema.num_envs:
            raise ValueError(f"expected rows of {schema.num_envs} environments, found {now.written} rows")
        places = num_places(schema, capacity)
        if not min(now.written, places) <= now.allocated <= places:
            raise ValueError(
                f"expected 0..{places} allocated rows, found {now.allocated} allocated and {now.written} written rows"
            )
    except UNREADABLE as error:
        raise StateError(f"{path}: expected the fields of a row, found {error!r}") from error
    except OSError as error:
        raise StorageError(f"{path}: expected a file that can be read, found {error}") from error
    return schema


def num_places(schema: RowSchema, capacity: int) -> int:
    """Return the number of places for rows in the files. The number is larger than the capacity, so that a new row does
    not overwrite a row in use.
    """
    held, row = schema.whole_steps(capacity), sum(block.raw.itemsize for block in blocks_of(schema))
    steps = -(-min(held, _SPARE_ROWS, max(1, _SPARE_BYTES // row)) // schema.num_envs)
    return held + steps * schema.num_envs


def row_files(folder: Path, schema: RowSchema, generation: int) -> dict[Path, int]:
    """Return the files of rows, followed by the file of checksums; for each file, its path and its number of bytes per
    row.
    """
    sizes = [block.raw.itemsize for block in blocks_of(schema)]
    files = {folder / f"rows-{generation}-{number}": size for number, size in enumerate(sizes)}
    # One checksum for each file of rows, and one for the ragged values.
    return {**files, folder / f"sums-{generation}": 8 * (len(sizes) + bool(schema.varying))}


def values_file(folder: Path, generation: int | None, room: int) -> Path:
    """Return the path of the file of ragged values, a ring of ``room`` bytes."""
    return folder / f"values-{generation}-{room}"


def read_journal(
    folder: Path, memory: Columns | None, rows: int, sum_of: Callable[[Sequence[Any]], int]
) -> tuple[Slots, list[npt.NDArray[Any]], int]:
    """Return the content of the journal that ``MemmapStorage.put`` wrote: the places, the rows, and the number of bytes
    of ragged values that were written up to then.

    Args:
        folder: The folder of the storage.
        memory: The rows of the storage.
        rows: Number of rows in ``memory``.
        sum_of: A function that takes rows and returns the checksum of the ragged values to which the rows refer.

    Raises:
        StateError: The journal is damaged or missing, or does not match the rows in ``memory`` or the ragged values.
    """
    path = folder / "journal"
    try:
        journal = read_checkpoint(path)
        places = journal["places"]
        columns = [journal["columns"][str(number)] for number in range(0 if memory is None else len(memory.columns))]
        if memory is None or places.ndim != 1 or places.dtype != np.int64:
            raise ValueError("expected places as int64 [n], in a storage with rows")
        if places.size and not 0 <= places.min() <= places.max() < rows:
            raise ValueError(f"places outside of the {rows} rows")
        for column, known in zip(columns, memory.columns, strict=True):
            if column.shape != (len(places), *known.shape[1:]) or column.dtype != known.dtype:
                raise ValueError(f"a column of {column.dtype} {list(column.shape)} instead of {known.dtype}")
        end = journal["end"]
        if journal["values"] != sum_of(columns) or type(end) is not int:
            raise ValueError("other ragged values than those that were written")
    except (OSError, DataError, *UNREADABLE) as error:
        raise StateError(f"{path}: expected the rows that were being changed, found {error}") from error
    return places, columns, end


class MappedValues(Values):
    """Ragged values (rows that differ in length) in a mapped file. Callers hold the folder's lock and call ``at``
    first.

    Args:
        folder: The folder.
    """

    packs = False  # other processes may have the file mapped

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._generation: int | None = None

    def at(self, now: Counters) -> MappedValues:
        """Map the file that ``now`` describes."""
        if (self._generation, self.nbytes) != (now.generation, now.room):
            if self._generation != now.generation:
                self._begin = 0
            self._generation = now.generation
            self._ring = ByteRing(map_file(values_file(self._folder, now.generation, now.room), now.room))
        self._end = now.end
        return self

    def kept(
        self, schema: RowSchema, arrays: Sequence[Any], now: Counters, refs: Callable[[], Sequence[Refs]]
    ) -> tuple[Sequence[npt.NDArray[Any]], Counters]:
        """Write values with ``keep``; return the result of ``keep`` and the updated counters."""
        if not schema.varying:
            return arrays, now
        rows = self.at(now).keep(schema, arrays, refs)
        return rows, now._replace(end=self._end, room=self.nbytes)

    def with_room(
        self, schema: RowSchema, arrays: Sequence[Any], now: Counters, refs: Callable[[], Sequence[Refs]]
    ) -> Counters:
        """Allocate space for all given rows, so that a full disk raises StorageError before any row is written; return
        the counters.
        """
        self.at(now).reserve(sum(value.size for part in varying_of(schema, arrays) for value in part), refs)
        return now if self.nbytes == now.room else now._replace(room=self.nbytes)

    def checksum(self, schema: RowSchema, rows: Sequence[Refs], now: Counters) -> int:
        """Return the checksum of all ragged values of ``rows``; ``rows`` is a result of ``kept``."""
        if not schema.varying:
            return 0
        kinds = zip(rows, schema.fields.values(), strict=True)
        values = [value for refs, kind in kinds if kind.varies for value in self.at(now).read(refs)]
        return checksum(b"".join(value.tobytes() for value in values))

    def _memory(self, nbytes: int) -> Bytes:
        path = values_file(self._folder, self._generation, nbytes)
        lengthen(path, nbytes)
        return map_file(path, nbytes)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return values_file(self._folder, self._generation, self.nbytes)

    def forget(self) -> None:
        """Unmap the file."""
        self._generation, self._ring = None, ByteRing(np.empty(0, np.uint8))


class RowSums:
    """The checksums of rows: for each row and each file, the checksum of the row's bytes, with the row's index in the
    order of writing as seed.

    Because of this seed, a row that was stored in the place of another row is also detected. Callers hold the folder's
    lock and call ``at`` first.
    """

    def __init__(self) -> None:
        self._unread: npt.NDArray[np.bool_] | None = None  # rows from before the files were opened, not read yet

    def at(self, files: Sequence[Path], memory: Columns, sums: npt.NDArray[np.uint64]) -> None:
        """Set the rows whose checksums are computed and checked.

        Args:
            files: The files of the rows.
            memory: The rows in the files.
            sums: Memory for the checksums, uint64 ``[places, files]``; if there are ragged values, the last column is
                their checksum.
        """
        self._files, self._memory, self._sums = files, memory, sums
        self._values: Any = memory.values
        self._bytes = [memoryview(rows.view(np.uint8)) for _, rows in memory.blocks]  # type: ignore[arg-type]

    def make(self, places: Slots, numbers: Slots) -> None:
        """Write the checksum of row ``numbers[i]`` at position ``places[i]``; both int64 ``[n]``."""
        self._sums[places] = self._of(places, numbers)
        self._mark_read(places)

    def wrong(self, places: Slots, numbers: Slots) -> npt.NDArray[np.bool_]:
        """Return whether each stored checksum differs from the checksum of the row's bytes, bool ``[n, files]``."""
        wrong: npt.NDArray[np.bool_] = self._sums[places] != self._of(places, numbers)
        return wrong

    def watch(self, places: Slots, total: int) -> None:
        """Mark the rows at the given places, so that ``check`` compares a marked row with its checksum when the row is
        next read. ``total`` is the number of all places.
        """
        self._unread = None
        if len(places):
            self._unread = np.zeros(total, np.bool_)
            self._unread[places] = True

    def check(self, places: Slots, numbers: Callable[[Slots], Slots], summed: int) -> None:
        """Raise StateError, naming the row and the file, if the checksum of a row marked by ``watch`` is wrong.

        Args:
            places: Places of the rows to read.
            numbers: A function that takes places and returns the indices, in the order of writing, of the rows at these
                places.
            summed: The index of the first row without a checksum. Later rows also have no checksums, because they were
                written after the files were opened.
        """
        if self._unread is None:
            return
        flat = places.reshape(-1)
        new = np.unique(flat[self._unread[flat]])
        if not len(new):
            return
        known = new[numbers(new) < summed]
        rows, columns = np.nonzero(self.wrong(known, numbers(known)))
        if len(rows):
            file = [*self._files, self._values.path][int(columns[0])]
            row = numbers(known[rows[:1]])[0]
            raise StateError(
                f"{file}: expected row {row} to match its checksum, found damage in the row or its checksum"
            )
        self._mark_read(new)

    def _mark_read(self, places: Slots) -> None:
        if self._unread is not None:
            self._unread[places] = False
            if not self._unread.any():
                self._unread = None

    def _of(self, places: Slots, numbers: Slots) -> npt.NDArray[np.uint64]:
        seeds, found = numbers.tolist(), []
        for (block, _), content in zip(self._memory.blocks, self._bytes, strict=True):
            size = block.raw.itemsize
            begins = (places * size).tolist()
            found.append([checksum(content[at : at + size], seed) for at, seed in zip(begins, seeds, strict=True)])
        if self._memory.schema.varying:
            refs = self._memory.refs(places)
            found.append([checksum(self._values_of(refs, row), seed) for row, seed in enumerate(seeds)])
        return np.array(found, np.uint64).T

    def _values_of(self, refs: list[Refs], row: int) -> bytes:
        """Return the concatenated ragged values of a row. The result is empty if damaged references point outside the
        file.
        """
        with suppress(DataError):
            return b"".join(value.tobytes() for column in refs for value in self._values.read(column[row]))
        return b""


Sync = Literal["none", "flush", "append"]
# Least number of bytes by which a file is extended.
_GROWTH = 1 << 16


class MemmapStorage(RowStorage):
    """A storage of rows that are nested dicts or tuples of arrays, in mapped files that several processes may write and
    read.

    A lock ensures that only one process at a time writes. A row is complete or absent, even if the writing process is
    killed during the write. New rows are written to unused places (the files have a few more places than ``capacity``),
    and are counted only when they are complete. A change in place is written to a journal first; after a crash, the
    next process completes the change.

    The files are about as large as the data, and exactly as large as the data after ``close()``. A full disk raises
    StorageError before a row is written. Priorities are not shared.

    As soon as a write returns, its rows survive a crash of the process. ``flush()`` and ``close()`` compute the
    checksums of all rows. ``sync`` determines which rows with checksums survive a crash of the machine:

    - ``"none"``: no call waits for the disk. After a power cut, only the rows that had reached the disk remain.
    - ``"flush"``: all rows that were written before ``flush()`` or ``close()`` returned survive. After a crash of the
      machine, the later rows are lost, and also an equal number of the oldest rows, whose places the later rows had
      overwritten.
    - ``"append"``: every write is flushed.

    After the storage is opened, each row is compared with its checksum when the row is first read. If the machine was
    restarted and not all rows are known to be on disk, all rows are compared when the storage is opened. Undamaged rows
    up to the last row with a checksum are kept, and a warning gives the number of lost rows.

    Args:
        capacity: The largest number of rows; see ``ArrayStorage``. None: the capacity of the storage at ``path``.
        path: A folder that contains only this storage; it is created if it is missing. A storage that already exists in
            the folder is opened with its rows.
        ndim: The number of batch axes of the rows: 1, or 2 for ``[time, env]``.
        alignment: "arrived" if a row's action, reward and done led to the row's observation; "outgoing" if the action,
            reward and done follow the observation. None: the alignment of the storage at ``path``, or "outgoing" for a
            new storage.
        ragged: Fields whose rows are arrays that can differ in length; see ``ArrayStorage``.
        sync: When rows that this process writes are synced to the disk: "none", "flush" or "append", as described
            above.

    Raises:
        ConfigError: An argument is out of range, or the storage at ``path`` has another size, ``ndim`` or alignment.
        StateError: The files are damaged (also raised when a row is read), or a newer release wrote them.
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
        check_choice("sync", sync, get_args(Sync))
        self.path = path = Path(path).absolute()
        self._values, self._sums = MappedValues(path), RowSums()
        self._num_places = 0
        self._memory: Columns | None = None
        self._mapped: tuple[int, int] | None = None  # generation and rows of the memory
        with storing(f"folder {path}"):
            make_folder(path, sync=sync != "none")
            self._lock = FileLock(path / "lock")
            with self._lock:
                self._head = Head(path / "head", capacity, self.ndim, outgoing)
        with self._lock:
            if self._head.boot not in (0, this_boot()) and not self._head.closed:  # the machine was restarted
                self._recover()
            now = self._catch_up()
            self._head.boot = this_boot()
            self._remove_others(now)
            places = self._places(self._slots, now)
            self._sums.watch(places[self._numbers(places, now) < now.summed], self._num_places)

    def __len__(self) -> int:
        return min(self._head.written, self.capacity)

    def __repr__(self) -> str:
        return f"MemmapStorage({len(self)} of {self.capacity} rows, {str(self.path)!r}, ndim={self.ndim})"

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = (self._head.capacity, str(self.path), self.ndim)
        return partial(MemmapStorage, *sizes, alignment=self.alignment, ragged=self._ragged, sync=self._sync), ()

    @property
    def capacity(self) -> int:
        """The capacity in rows; after the first write, a multiple of the number of environments."""
        return self._head.capacity - self._head.capacity % self.num_envs

    @property
    def num_envs(self) -> int:
        """The number of environments; 1 for ``ndim=1``, and until the first write."""
        if self._schema is None and self._head.written:
            with self.lock():
                self._catch_up()
        return super().num_envs

    @property
    def alignment(self) -> Alignment:
        """The alignment: "arrived" if a row's action, reward and done led to the row's observation, else "outgoing"."""
        return self._head.alignment

    @property
    def written(self) -> int:
        """The number of rows ever appended by any process."""
        return self._head.written

    @property
    def changes(self) -> int:
        """The number of changes to rows by any process, not counting calls of ``append``."""
        return self._head.changes

    @property
    def nbytes(self) -> int:
        """Size of the rows' files in bytes."""
        now = self._head.now()
        blocks = [] if self._schema is None else blocks_of(self._schema)
        return now.allocated * sum(block.raw.itemsize for block in blocks) + now.room

    @property
    def synced(self) -> int:
        """The number of rows, appended by any process, that are known to be on disk."""
        return min(self._head.synced, self._head.written)

    def lock(self) -> FileLock:
        """Return the lock that the buffer holds while it draws and gathers a batch; every method of the storage also
        acquires this lock.
        """
        return self._lock

    # ------------------------------------------------------------------ writing

    def append(self, rows: Any, *, one: bool = False) -> tuple[int, int]:
        """Append rows; a full ring overwrites its oldest rows. Raise StorageError if the disk is full."""
        with self._lock:
            now = self._writing()
            schema, arrays, n = checked(rows, self._schema, one=one, ndim=self.ndim, ragged=self._ragged)
            if not n and self._schema is None:
                return 0, 0
            memory, now = self._reserve(schema, arrays, n, now)
            first, done, places = now.written, 0, self._num_places
            while done < n:
                # Rows are written in groups that fit into the unused places. Example: a capacity of 4 rows has 6
                # places. After rows 0 to 5 were written, rows 2 to 5 are in use, so two more rows go to the places 0
                # and 1; a third row must wait until they count.
                piece = min(n - done, places - min(now.written, self.capacity))
                part = arrays if piece == n else [array[done : done + piece] for array in arrays]
                rows, now = self._values.kept(schema, part, now, self._refs)
                for place, begin, count in ring_pieces(now.written, piece, places):
                    memory.write(place, rows, begin, count)
                now = now._replace(written=now.written + piece)
                self._commit(now)
                done += piece
            self._written()
            return first, n

    def _written(self) -> None:
        if self._sync == "append":
            self.flush()

    def flush(self) -> None:
        """Compute the checksums of all rows and, except with ``sync="none"``, wait until the rows are on disk."""
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
        """Raise the errors of ``append(rows)`` without writing."""
        with self._lock:
            self._catch_up()
            checked(rows, self._schema, one=False, ndim=self.ndim, ragged=self._ragged)

    def put(self, slots: Slots, rows: Any) -> None:
        """Overwrite the rows in ``slots`` with ``rows``; see ``Storage.put``."""
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
            columns = {str(at): rows[at] for at in range(len(rows))}
            values = self._values.checksum(self._schema, rows, now)
            journal = {"places": self._places(slots, now), "columns": columns, "values": values, "end": now.end}
            if self._schema.varying and self._sync != "none":
                with storing(f"{self._values.path}"):
                    sync_files([self._values.path])  # the journal refers to these values
            write_checkpoint(self.path / "journal", journal, sync=self._sync != "none", only_writer=True)
            self._head.journal = True
            if self._sync != "none":
                self._sync_head()
            self._apply_journal()
            self._written()

    def empty(self) -> None:
        """Remove all rows; the files keep their size."""
        with self._lock:
            now = self._writing()
            self._head.synced = 0
            self._head.commit(now._replace(written=0, summed=0, first=0, changes=now.changes + 1))
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

    def overwritten(self, key: FieldKey) -> npt.NDArray[Any]:
        """Return a field of the overwritten rows that are still in the files, up to the oldest time step in use; see
        ``Storage``.
        """
        with self._lock:
            now = self._catch_up()
            if self._memory is None:
                raise MissingFieldError(f"rows: expected a field {key!r}, found none")
            oldest = max(0, now.written - self.capacity)
            numbers = np.arange(max(now.first, now.written - self._num_places), oldest + self.num_envs)
            values: npt.NDArray[Any] = self._memory.by_key[key][numbers % self._num_places]
            return values

    def verify(self) -> None:
        """Compare each row that has a checksum with this checksum.

        Raises:
            StateError: A row differs from the written row; the message names the row and its file.
        """
        with self._lock:
            now = self._catch_up()
            places = self._places(self._slots, now)
            self._sums.watch(places, self._num_places)
            if self._memory is not None:
                self._checked(places, now)

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return the rows and their description; see ``Storage.state``."""
        with self._lock:
            now = self._catch_up()
            return rows_state(self, self._schema, self._columns(now))

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the rows in ``state``; see ``Storage.load``.

        The rows are written to new files, so the old files are intact after a crash.
        """
        with self._lock:
            now = self._writing()
            schema, arrays, written = state_rows(self, state, self._schema)
            self._head.synced = 0
            if schema is None:
                self._head.commit(now._replace(written=written, summed=written, first=written, changes=now.changes + 1))
                return
            self._replace(now, schema, arrays, written, now.changes + 1)
            self._written()

    def close(self) -> None:
        """Call ``flush``, shorten the files to the size of the data, and unmap the files; the next use of the storage
        maps the files again.
        """
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
        """Read the changes that other processes made, and complete a change in place whose process died."""
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
        """Call ``_catch_up``, to prepare for a write."""
        if self._head.closed:
            self._head.closed = False
            self._sync_head()
        return self._catch_up()

    def _recover(self) -> None:
        """After a restart of the machine, compare all rows with their checksums, and keep the undamaged rows up to the
        last row with a checksum.
        """
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
        # Keep the rows after the last damaged row: rows before it may have been overwritten by rows that did not reach
        # the disk.
        kept = places[wrong[-1] + 1 if len(wrong) else 0 :]
        gone = len(self) - len(kept)
        if gone:
            columns = self._memory.saved(kept) if self._memory is not None else []
            self._replace(now, schema, columns, len(kept), now.changes + 1)
            warnings.warn(
                f"{self.path}: the machine was restarted before {gone} of {gone + len(kept)} rows were on the disk; "
                "they are lost (see sync= and flush())",
                UserWarning,
                stacklevel=4,
            )
            self._memory, self._mapped = None, None

    def _map(self, now: Counters, schema: RowSchema) -> Columns:
        """Map the rows' files at their current size."""
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
        """Return the files of the current rows, and the length of each file. The result is empty if there are no
        rows.
        """
        sizes = row_files(self.path, schema, now.generation) if now.allocated else {}
        files = {file: now.allocated * size for file, size in sizes.items()}
        return {**files, values_file(self.path, now.generation, now.room): now.room} if now.room else files

    def _remove_others(self, now: Counters) -> None:
        """Remove outdated files of rows, and temporary files of writers that died; the caller holds the lock."""
        remove_leftovers(self.path, ["head", "schema", "journal"], only_writer=True)
        kept = (f"rows-{now.generation}-", f"sums-{now.generation}", f"values-{now.generation}-{now.room}")
        for path in self.path.iterdir():
            name = path.name
            if name.startswith(("rows-", "sums-", "values-")) and name not in kept and not name.startswith(kept[0]):
                with suppress(OSError):
                    path.unlink()
        self._head.making = False

    def _sync_rows(self, now: Counters) -> None:
        """Sync the rows to the disk, and then the head."""
        assert self._schema is not None
        files = self._files(self._schema, now)
        if self._head.failed:
            for file, size in files.items():
                pages = map_file(file, size)[:: mmap.PAGESIZE]
                pages[:] = pages.copy()  # the system writes all pages again
        try:
            with storing(f"rows in {self.path}"):
                sync_files([*files])
                sync_folders([self.path])
        except StorageError:
            self._head.failed = True
            raise
        self._head.failed = False

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
        """Compute the checksums of all rows, and return the updated counters."""
        numbers = np.arange(max(now.summed, now.written - self.capacity), now.written)
        self._values.at(now)
        self._sums.make(numbers % self._num_places, numbers)
        return now._replace(summed=now.written)

    def _apply_journal(self) -> None:
        """Apply the change in place that the journal contains. A second call has no further effect."""
        now = self._head.now()

        def sum_of(columns: Sequence[Any]) -> int:
            return 0 if self._schema is None else self._values.checksum(self._schema, columns, now)

        places, rows, end = read_journal(self.path, self._memory, now.allocated, sum_of)
        # After a power cut the counters can be older than the journal: later values must not overwrite its values.
        now = now._replace(end=max(now.end, end))
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
        """Extend the files for ``n`` more rows; return the mapped memory and the counters. Raise StorageError if the
        disk is full.
        """
        now = self._lengthened(schema, now, now.written + n)
        self._save_schema(schema)
        self._map(now, schema)
        if schema.varying:
            now = self._compact(schema, now)
            self._head.making = True
            now = self._values.with_room(schema, arrays, now, self._refs)
        return self._map(now, schema), now

    def _lengthened(self, schema: RowSchema, now: Counters, rows: int) -> Counters:
        """Extend the files to ``rows`` rows, or to the number of all places if this number is smaller; return the
        updated counters.
        """
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
        """Rewrite all rows if overwritten rows occupy most of the ring of ragged values; return the updated
        counters.
        """
        if schema.varying and self._values.at(now).is_sparse(self._refs):
            self._replace(now, schema, self._columns(now), now.written, now.changes)
            now = self._catch_up()
        return now

    def _replace(self, now: Counters, schema: RowSchema, arrays: list[Any], written: int, changes: int) -> None:
        """Write rows to new files, and replace the current files by the new files."""
        self._head.making = True
        later = Counters(written, changes, 0, now.generation + 1, first=written - len(arrays[0]))
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
        """Return all slots in use."""
        return np.arange(len(self), dtype=np.int64)

    def _places(self, slots: Slots, now: Counters) -> Slots:
        """Return the places of the rows in ``slots``."""
        if now.written <= self.capacity:
            return slots
        newest = now.written - 1
        return (newest - (newest - slots) % self.capacity) % self._num_places

    def _numbers(self, places: Slots, now: Counters) -> Slots:
        """Return the index, in the order of writing, of the row at each place. Example: with 6 places and 9 written
        rows, row 7 lies at place 1.
        """
        newest = now.written - 1
        return newest - (newest - places) % self._num_places

    def _checked(self, places: Slots, now: Counters) -> Slots:
        """Compare the rows at the given places with their checksums, and return the places."""
        self._values.at(now)
        self._sums.check(places, lambda some: self._numbers(some, now), now.summed)
        return places

    def _columns(self, now: Counters) -> list[Any]:
        if self._memory is None:
            return []
        return self._memory.saved(self._checked(self._places(self._slots, now), now))

    def _refs(self) -> list[Refs]:
        """Return the references to the ragged values of the rows in use."""
        if self._memory is None or self._schema is None:
            return []
        return self._memory.refs(self._places(self._slots, self._head.now()))
