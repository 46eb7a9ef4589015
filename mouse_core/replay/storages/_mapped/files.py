"""The files of a mapped buffer: the head, which says what is there, and those of the rows.

All that changes stands twice in the head, and a number says which of the two counts. A change is written to the other
one and takes effect when that number is set, a single store: a process that dies in the middle has changed nothing.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import UNREADABLE
from mouse_core.columns.memory import blocks_of
from mouse_core.columns.schema import RowSchema
from mouse_core.errors import ConfigError, StateError, StorageError
from mouse_core.files.locking import this_boot
from mouse_core.files.writing import remove_leftovers, write_file
from mouse_core.replay.storages._mapped.mapping import lengthen
from mouse_core.spec import Alignment

_FORMAT = 1
# "MOUSMMP" and the format's number as a digit, read as a little-endian number.
_MAGIC = 0x00504D4D53554F4D | ord(str(_FORMAT)) << 56
_WORDS = 32
_CAPACITY, _NDIM, _ALIGNMENT, _JOURNAL, _WHICH, _MAKING, _BOOT = range(1, 8)
_COPIES, _SYNCED, _CLOSED = (8, 16), 24, 25
# How much longer files become at least, and how many places there are beyond the capacity at most.
_GROWTH, _SPARE_BYTES, _SPARE_ROWS = 1 << 16, 1 << 20, 1024
_MOST = 1 << 40  # rows that nobody has written (what counts steps has room for them), and a terabyte of room


@dataclass(frozen=True, slots=True)
class Now:
    """What is there.

    Args:
        written: Rows ever appended.
        changes: How often rows were changed otherwise.
        allocated: Rows that the files have room for.
        generation: Which files hold the rows.
        spare: Rows beyond the capacity that the files may have.
        end: Bytes ever written of what differs in length.
        room: Bytes that there is room for of it.
        summed: Of the rows written, so many have checksums, as far as they are in use.
    """

    written: int = 0
    changes: int = 0
    allocated: int = 0
    generation: int = 0
    spare: int = 0
    end: int = 0
    room: int = 0
    summed: int = 0


_VALUES = len(fields(Now))
# dataclasses.astuple copies every value deeply, which takes as long as writing a row.
_as_tuple: Callable[[Now], tuple[int, ...]] = attrgetter(*[field.name for field in fields(Now)])


class Head:
    """The head of a mapped buffer; made, if there is none, while its lock is held.

    Args:
        path: The file.
        capacity: Rows; None: as the file says.
        ndim: 1 or 2.
        outgoing: Whether rows are outgoing, 1, or arrived, 0; None: as the file says, and 1 for a new one.

    Raises:
        ConfigError: The file is of a buffer of another size, and so on; or there is none, and no capacity.
        StateError: It is damaged, or a newer release wrote it.
    """

    def __init__(self, path: Path, capacity: int | None, ndim: int, outgoing: int | None) -> None:
        if not path.exists():
            _make_head(path, capacity, ndim, outgoing)
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size != 8 * _WORDS:
                raise StateError(f"{path}: expected a head of {8 * _WORDS} bytes, found {size}")
            self._words: npt.NDArray[np.int64] = np.frombuffer(mmap.mmap(file.fileno(), size), np.int64)
            self._word = self._words.data  # for one of them this is faster
        self._check_format(path)
        found = self._words[:_JOURNAL].tolist()
        self._check(path, found[_CAPACITY])
        asked = (capacity, ndim, outgoing)
        given = [kept if one is None else one for one, kept in zip(asked, found[1:], strict=True)]
        if found[1:] != given:
            shown = f"{_shown(given)}, found {_shown(found[1:])}"
            raise ConfigError(f"{path.parent}: expected a buffer of (capacity, ndim, alignment) {shown}")
        self.capacity = int(found[_CAPACITY])
        self.alignment: Alignment = "outgoing" if found[_ALIGNMENT] else "arrived"
        self._folder = path.parent

    def _check_format(self, path: Path) -> None:
        """Raise StateError unless the format is ours, and what does not change is a buffer's."""
        found = self._words[:_JOURNAL].tolist()
        if found[0] != _MAGIC and found[0] in (_MAGIC + (step << 56) for step in range(1, 10 - _FORMAT)):
            expected = f"expected a mapped buffer of format {_FORMAT}"
            raise StateError(f"{path}: {expected}, found one that a newer release wrote")
        flags = [found[_ALIGNMENT], *self._words[[_JOURNAL, _WHICH, _MAKING]].tolist()]
        plain = found[_NDIM] in (1, 2) and all(flag in (0, 1) for flag in flags)
        if found[0] != _MAGIC or not 1 <= found[_CAPACITY] < 1 << 62 or not plain:
            raise StateError(f"{path}: expected the head of a mapped buffer, found something else")

    def _check(self, path: Path, capacity: int) -> None:
        """Raise StateError for numbers that no buffer of this capacity has."""
        now = self.now()
        numbers = _as_tuple(now)
        if (
            not 0 <= min(numbers) <= max(now.written, now.changes, now.allocated, now.generation, now.spare) < _MOST
            or now.spare > capacity
            or now.summed > now.written
            or not min(now.written, now.spare) <= now.allocated <= capacity + now.spare
        ):
            raise StateError(f"{path}: expected numbers of a buffer of {capacity} rows, found {now}")

    def now(self) -> Now:
        """What is there now."""
        begin = _COPIES[self._word[_WHICH]]
        return Now(*self._word[begin : begin + _VALUES])

    @property
    def written(self) -> int:
        """That of ``now()``, by itself."""
        return self._word[_COPIES[self._word[_WHICH]]]

    @property
    def changes(self) -> int:
        """That of ``now()``, by itself."""
        return self._word[_COPIES[self._word[_WHICH]] + 1]

    def commit(self, now: Now) -> None:
        """From now on this is there."""
        other = 1 - self._word[_WHICH]
        begin = _COPIES[other]
        self._words[begin : begin + _VALUES] = _as_tuple(now)
        self._word[_WHICH] = other

    def reclaim(self, now: Now) -> None:
        """Remove what writers that died left beside it; while the lock is held, as every writer of its files does."""
        remove_leftovers(self._folder, ["head", "schema", "journal"], only_writer=True)
        kept = (f"values-{now.generation}-{now.room}", f"sums-{now.generation}")
        for path in self._folder.iterdir():
            is_row_file = path.name.startswith(("rows-", "values-", "sums-"))
            if is_row_file and not path.name.startswith(f"rows-{now.generation}-") and path.name not in kept:
                with suppress(OSError):
                    path.unlink()
        self.making = False

    @property
    def journal(self) -> bool:
        """Whether rows are being changed in place, as the journal says."""
        return bool(self._word[_JOURNAL])

    @journal.setter
    def journal(self, there: bool) -> None:
        self._word[_JOURNAL] = there

    @property
    def making(self) -> bool:
        """Whether files are being made, or removed, that do not count: of one who died meanwhile they are left over."""
        return bool(self._word[_MAKING])

    @making.setter
    def making(self, there: bool) -> None:
        self._word[_MAKING] = there

    @property
    def synced(self) -> int:
        """How many of the rows written are known to be on the disk."""
        return min(self._word[_SYNCED], self.written)

    @synced.setter
    def synced(self, rows: int) -> None:
        self._words[_SYNCED] = rows

    @property
    def closed(self) -> bool:
        """Whether nothing was written since all was on the disk, this word too."""
        return bool(self._word[_CLOSED])

    @closed.setter
    def closed(self, there: bool) -> None:
        self._word[_CLOSED] = there

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine has not been restarted since rows were written, as far as the system says."""
        return self._word[_BOOT] in (0, this_boot())

    def settled(self) -> None:
        """The rows are in order since the machine was started."""
        self._words[_BOOT] = this_boot()


def _make_head(path: Path, capacity: int | None, ndim: int, outgoing: int | None) -> None:
    """Write the head of a buffer that has no rows yet; see ``Head``."""
    if capacity is None:
        raise ConfigError(f"capacity: expected one for a buffer that is not there yet ({path.parent}), found none")
    words = np.zeros(_WORDS, np.int64)
    words[0], words[_CAPACITY], words[_NDIM] = _MAGIC, capacity, ndim
    words[_ALIGNMENT] = 1 if outgoing is None else outgoing
    write_file(path, words.tobytes(), only_writer=True)


def _shown(values: list[int]) -> tuple[Any, ...]:
    return (values[0], values[1], "outgoing" if values[2] else "arrived")


# ---------------------------------------------------------------------- the rows


def read_schema(folder: Path, capacity: int, now: Now) -> RowSchema | None:
    """What a row looks like, as the folder says; None where it does not, and there is no room for rows.

    Raises:
        StateError: It is damaged, missing, or there are not so many rows like these as the head says.
    """
    path = folder / "schema"
    if not path.exists():
        if now.allocated:
            raise StateError(f"{path}: expected the fields of {now.allocated} rows, found no file")
        return None
    try:
        schema = RowSchema.from_json(json.loads(path.read_text()))
        for rows in (now.written, now.spare):
            if rows % schema.num_envs:
                raise ValueError(f"{schema.num_envs} environments where the head says {rows} rows")
        places = schema.whole_steps(capacity) + now.spare
        if not min(now.written, places) <= now.allocated <= places:
            raise ValueError(f"{places} places where the head says {now}")
        blocks_of(schema)
    except UNREADABLE as error:
        raise StateError(f"{path}: expected the fields of a row, found {error!r}") from error
    except OSError as error:
        raise StorageError(f"{path}: expected a file that can be read, found {error}") from error
    return schema


def row_files(folder: Path, generation: int, schema: RowSchema | None) -> list[Path]:
    """A file for each block of fields."""
    blocks = [] if schema is None else blocks_of(schema)
    return [folder / f"rows-{generation}-{number}" for number in range(len(blocks))]


def sums_file(folder: Path, generation: int) -> Path:
    """The file of the rows' checksums."""
    return folder / f"sums-{generation}"


def reserve(folder: Path, schema: RowSchema, now: Now, rows: int, capacity: int) -> Now:
    """Files with room for so many rows."""
    if rows <= now.allocated:
        return now
    sizes = [block.raw.itemsize for block in blocks_of(schema)]
    rows = min(max(rows, now.allocated + max(now.allocated // 8, _GROWTH // sum(sizes))), capacity + now.spare)
    for file, size in zip(row_files(folder, now.generation, schema), sizes, strict=True):
        lengthen(file, rows * size)
    lengthen(sums_file(folder, now.generation), rows * sum_bytes(schema))
    return replace(now, allocated=rows)


def files(folder: Path, schema: RowSchema, now: Now) -> list[Path]:
    """All files of the rows that are there."""
    values = [folder / f"values-{now.generation}-{now.room}"] if now.room else []
    return [*row_files(folder, now.generation, schema), sums_file(folder, now.generation), *values]


def lengthen_all(folder: Path, schema: RowSchema, now: Now) -> None:
    """Make files as long as they are to be that are shorter; what a crash of the machine took from them is zeros."""
    sizes = [now.allocated * block.raw.itemsize for block in blocks_of(schema)] + [now.allocated * sum_bytes(schema)]
    for file, size in zip(files(folder, schema, now), [*sizes, now.room], strict=False):
        lengthen(file, size)


def sum_bytes(schema: RowSchema) -> int:
    """Bytes of a row's checksums: one for each file of rows, and one for its values that differ in length."""
    return 8 * (len(blocks_of(schema)) + bool(schema.varying))


def cut(folder: Path, schema: RowSchema, now: Now) -> None:
    """Make the files of rows as long as they are to be."""
    sizes = [block.raw.itemsize for block in blocks_of(schema)] + [sum_bytes(schema)]
    files = [*row_files(folder, now.generation, schema), sums_file(folder, now.generation)]
    for file, size in zip(files, sizes, strict=True):
        with suppress(OSError), open(file, "r+b") as opened:
            opened.truncate(now.allocated * size)


def begun(schema: RowSchema, now: Now, capacity: int) -> Now:
    """The first write says what a row looks like, and how many places there are beyond the capacity in whole steps."""
    row = sum(block.raw.itemsize for block in blocks_of(schema))
    steps = -(-min(capacity, _SPARE_ROWS, max(1, _SPARE_BYTES // row)) // schema.num_envs)
    return replace(now, spare=steps * schema.num_envs)


def remove(folder: Path, generation: int, schema: RowSchema) -> None:
    """Remove the files of a generation."""
    for file in [*row_files(folder, generation, schema), sums_file(folder, generation)]:
        file.unlink(missing_ok=True)
