"""Files of a ``MemmapStorage``: the head, the rows with their checksums, and values that differ in length.

A folder has these files, where ``G`` counts how often all rows were written anew::

    lock          held around every call
    head          capacity, counters, flags
    schema        what a row is, as JSON
    rows-G-0      the fields of a row that lie side by side; there is one file for each block of fields
    sums-G        the checksums of each row
    values-G-R    values that differ in length, in a ring of R bytes
    begins        where the oldest episodes began, see ``Begins``
    journal       rows that are being changed in place

The head has all counters twice, and one word says which copy counts. A change goes to the other copy and takes effect
when that word is set, with a single store: a process that dies in the middle has changed nothing.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.columns.memory import ByteRing, Columns, Refs, Values, blocks_of, varying_of
from mouse_core.columns.schema import Bytes, RowSchema
from mouse_core.errors import ConfigError, DataError, StateError, StorageError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.files.checksum import checksum
from mouse_core.files.locking import this_boot
from mouse_core.files.mapped import Word, set_aside
from mouse_core.files.writing import storing, write_file
from mouse_core.replay.protocols import Slots
from mouse_core.spec import Alignment

_FORMAT = 1
# "MOUSMMP" and the format's number as a digit, read as a little-endian number.
_MAGIC = 0x00504D4D53554F4D | ord(str(_FORMAT)) << 56
_WORDS = 32
_CAPACITY, _NDIM, _ALIGNMENT, _JOURNAL, _WHICH, _MAKING, _BOOT = range(1, 8)
_COPIES, _SYNCED, _CLOSED = (8, 16), 24, 25
# Places beyond the capacity, at most.
_SPARE_BYTES, _SPARE_ROWS = 1 << 20, 1024
_MOST = 1 << 40  # more rows than anybody writes, and a terabyte of room


def lengthen(path: Path, nbytes: int) -> None:
    """Make a file at least ``nbytes`` long, with room on the disk for all of it; raises StorageError without room."""
    with storing(f"file {path}"), open(path, "ab") as file:
        size = os.fstat(file.fileno()).st_size
        if size < nbytes:
            set_aside(file.fileno(), nbytes, begin=size)


def map_file(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map the first bytes of a file for reading and writing.

    Raises:
        StateError: The file is shorter, or missing.
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
    """Numbers of the head that change together.

    Args:
        written: Rows ever appended.
        changes: How often rows were changed otherwise.
        allocated: Rows that the files have room for.
        generation: Which files hold the rows.
        end: Bytes ever written of values that differ in length.
        room: Bytes that the ring of these values has.
        summed: The rows before this one have checksums.
    """

    written: int = 0
    changes: int = 0
    allocated: int = 0
    generation: int = 0
    end: int = 0
    room: int = 0
    summed: int = 0


class Head:
    """The head of a folder of mapped rows; made, if it is missing, while the folder's lock is held.

    Args:
        path: The file.
        capacity: Rows; None: as the file says.
        ndim: 1 or 2.
        outgoing: 1 for outgoing rows, 0 for arrived ones; None: as the file says, and 1 for a new file.

    Raises:
        ConfigError: The file is of a storage of another size, ``ndim`` or alignment; or it is missing, and ``capacity``
            is None.
        StateError: The file is damaged, or a newer release wrote it.
    """

    journal = Word(_JOURNAL)
    """Whether rows are being changed in place, as the journal says."""

    making = Word(_MAKING)
    """Whether files are being made or removed that do not count: if the process dies, they are left over."""

    synced = Word(_SYNCED)
    """How many of the rows written are known to be on the disk."""

    closed = Word(_CLOSED)
    """Whether all is on the disk, this word too, and nothing was written since."""

    boot = Word(_BOOT)
    """The boot of the machine in which the rows were found in order."""

    def __init__(self, path: Path, capacity: int | None, ndim: int, outgoing: int | None) -> None:
        self.path = path
        if not path.exists():
            if capacity is None:
                expected = f"expected one for a buffer that is not there yet ({path.parent})"
                raise ConfigError(f"capacity: {expected}, found none")
            new = np.zeros(_WORDS, np.int64)
            new[: _ALIGNMENT + 1] = _MAGIC, capacity, ndim, 1 if outgoing is None else outgoing
            write_file(path, new.tobytes(), only_writer=True)
        size = path.stat().st_size
        if size != 8 * _WORDS:
            raise StateError(f"{path}: expected a head of {8 * _WORDS} bytes, found {size}")
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
        """Raise StateError for a head that no storage of this format writes."""
        magic, capacity, ndim, *flags = self.words[: _MAKING + 1].tolist()
        if magic in (_MAGIC + (step << 56) for step in range(1, 10 - _FORMAT)):
            expected = f"expected a mapped buffer of format {_FORMAT}"
            raise StateError(f"{path}: {expected}, found one that a newer release wrote")
        if magic != _MAGIC or not 1 <= capacity < 1 << 62 or ndim not in (1, 2) or not {*flags} <= {0, 1}:
            raise StateError(f"{path}: expected the head of a mapped buffer, found something else")
        now = self.now()
        most = max(now.written, now.changes, now.allocated, now.generation)
        if not 0 <= min(now) <= most < _MOST or now.summed > now.written:
            raise StateError(f"{path}: expected numbers of a buffer of {capacity} rows, found {now}")

    def now(self) -> Counters:
        """Return the counters as they are now."""
        begin = _COPIES[self.words[_WHICH]]
        return Counters(*self.words[begin : begin + len(Counters._fields)])

    @property
    def written(self) -> int:
        """``now().written``, which is faster."""
        return self.words[_COPIES[self.words[_WHICH]]]

    @property
    def changes(self) -> int:
        """``now().changes``, which is faster."""
        return self.words[_COPIES[self.words[_WHICH]] + 1]

    def commit(self, now: Counters) -> None:
        """Replace the counters."""
        other = 1 - self.words[_WHICH]
        for place, number in enumerate(now, _COPIES[other]):
            self.words[place] = number
        self.words[_WHICH] = other

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine has not been restarted since rows were written, as far as the system says."""
        return self.boot in (0, this_boot())


def _shown(capacity: int, ndim: int, outgoing: int) -> tuple[Any, ...]:
    return capacity, ndim, "outgoing" if outgoing else "arrived"


# ---------------------------------------------------------------------- the rows


def read_schema(folder: Path, capacity: int, now: Counters) -> RowSchema | None:
    """Return what a row is; None before the first row.

    Raises:
        StateError: The file is damaged or missing, or the counters do not fit rows like these.
    """
    path = folder / "schema"
    if not path.exists():
        if now.allocated:
            raise StateError(f"{path}: expected the fields of {now.allocated} rows, found no file")
        return None
    try:
        schema = RowSchema.from_json(json.loads(path.read_text()))
        if now.written % schema.num_envs:
            raise ValueError(f"{schema.num_envs} environments where the head says {now.written} rows")
        places = num_places(schema, capacity)
        if not min(now.written, places) <= now.allocated <= places:
            raise ValueError(f"{places} places where the head says {now}")
    except UNREADABLE as error:
        raise StateError(f"{path}: expected the fields of a row, found {error!r}") from error
    except OSError as error:
        raise StorageError(f"{path}: expected a file that can be read, found {error}") from error
    return schema


def num_places(schema: RowSchema, capacity: int) -> int:
    """Return how many rows the files may have: more than a storage holds, so that new rows overwrite none in use."""
    held, row = schema.whole_steps(capacity), sum(block.raw.itemsize for block in blocks_of(schema))
    steps = -(-min(held, _SPARE_ROWS, max(1, _SPARE_BYTES // row)) // schema.num_envs)
    return held + steps * schema.num_envs


def row_files(folder: Path, schema: RowSchema, generation: int) -> dict[Path, int]:
    """Return the files of rows and the file of checksums, the last, with the bytes that a row takes in each."""
    sizes = [block.raw.itemsize for block in blocks_of(schema)]
    files = {folder / f"rows-{generation}-{number}": size for number, size in enumerate(sizes)}
    # One checksum for each file of rows, and one for the values that differ in length.
    return {**files, folder / f"sums-{generation}": 8 * (len(sizes) + bool(schema.varying))}


def values_file(folder: Path, generation: int | None, room: int) -> Path:
    """Return the file of the values that differ in length, in a ring of ``room`` bytes."""
    return folder / f"values-{generation}-{room}"


def write_journal(folder: Path, places: Slots, rows: Sequence[npt.NDArray[Any]], *, sync: bool) -> None:
    """Write which rows change in place, and to what."""
    columns = {str(number): array for number, array in enumerate(rows)}
    write_checkpoint(folder / "journal", {"places": places, "columns": columns}, sync=sync, only_writer=True)


def read_journal(folder: Path, memory: Columns | None, rows: int) -> tuple[Slots, list[npt.NDArray[Any]]]:
    """Return the places and rows that ``write_journal`` wrote.

    Raises:
        StateError: The journal is damaged, missing, or of other rows than the ``rows`` rows in ``memory``.
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
    """Values that differ in length, in a mapped file. The folder's lock is held around every call; ``at`` comes first.

    Args:
        folder: The folder.
    """

    packs = False  # other processes may have the file mapped

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._generation: int | None = None

    def at(self, now: Counters) -> MappedValues:
        """Map the file that counts now."""
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
        """Return what ``keep`` returns, and the counters then."""
        if not schema.varying:
            return arrays, now
        rows = self.at(now).keep(schema, arrays, refs)
        return rows, now._replace(end=self._end, room=self.nbytes)

    def with_room(
        self, schema: RowSchema, arrays: Sequence[Any], now: Counters, refs: Callable[[], Sequence[Refs]]
    ) -> Counters:
        """Make room for all of these rows, so that a full disk is found before one is written; the counters then."""
        self.at(now).reserve(sum(value.size for part in varying_of(schema, arrays) for value in part), refs)
        return now if self.nbytes == now.room else now._replace(room=self.nbytes)

    def _memory(self, nbytes: int) -> Bytes:
        path = values_file(self._folder, self._generation, nbytes)
        lengthen(path, nbytes)
        return map_file(path, nbytes)

    @property
    def path(self) -> Path:
        """The file."""
        return values_file(self._folder, self._generation, self.nbytes)

    def forget(self) -> None:
        """Unmap the file."""
        self._generation, self._ring = None, ByteRing(np.empty(0, np.uint8))


class RowSums:
    """The checksums of rows: in each file the XXH3 of the row's bytes, with the number of the row as its seed.

    So a row in the place of another one is damage, too. The folder's lock is held around every call; ``at`` comes
    first.
    """

    def __init__(self) -> None:
        self._unread: npt.NDArray[np.bool_] | None = None  # rows from before the files were opened, not read yet

    def at(self, files: Sequence[Path], memory: Columns, sums: npt.NDArray[np.uint64]) -> None:
        """Use these rows from now on.

        Args:
            files: The files of the rows.
            memory: The rows in the files.
            sums: Memory for the checksums, uint64 ``[places, files]``, the last column for values that differ in
                length if there are any.
        """
        self._files, self._memory, self._sums = files, memory, sums
        self._values: Any = memory.values
        self._bytes = [memoryview(rows.view(np.uint8)) for _, rows in memory.blocks]  # type: ignore[arg-type]

    def make(self, places: Slots, numbers: Slots) -> None:
        """Write the checksums of the rows with these numbers at these places, int64 ``[n]``."""
        self._sums[places] = self._of(places, numbers)
        self._mark_read(places)

    def wrong(self, places: Slots, numbers: Slots) -> npt.NDArray[np.bool_]:
        """Return which checksums differ from those of the rows that are there, bool ``[n, files]``."""
        wrong: npt.NDArray[np.bool_] = self._sums[places] != self._of(places, numbers)
        return wrong

    def watch(self, places: Slots, total: int) -> None:
        """Check the rows at these places, of ``total`` places, when they are next read."""
        self._unread = None
        if len(places):
            self._unread = np.zeros(total, np.bool_)
            self._unread[places] = True

    def check(self, places: Slots, numbers: Callable[[Slots], Slots], summed: int) -> None:
        """Raise StateError, naming row and file, where a watched row is not what was written.

        Args:
            places: Places of the rows that are read.
            numbers: Returns the numbers of the rows at some places.
            summed: Rows from this number on have no checksums; they were written since the files were opened.
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
            raise StateError(f"{file}: expected row {row} as it was written, found it, or its checksum, damaged")
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
        """The values of a row one behind the other; nothing if a damaged row says where they lie."""
        with suppress(DataError):
            return b"".join(value.tobytes() for column in refs for value in self._values.read(column[row]))
        return b""
