"""The tail file: appended rows of an open store in a memory-mapped file and an objects file. One process writes; other
processes read.

Appending a row writes to the page cache without a system call, so the row survives any end of the process. The row
survives a power cut after a commit that includes the row and that waited for the disk. Each tail file is written by one
writer; the next writer seals the rows of the file.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import NUMPY_NAMES, ColumnType
from mouse_core._base.memo import memo
from mouse_core._base.memory import BatchLayout
from mouse_core.columns.appended import ColumnExtent, Extent, NumbersExtent, ObjectExtent, TailColumn
from mouse_core.errors import ConfigError, DataError, StoreWarning
from mouse_core.files.checksum import RunningChecksum, checksum
from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import Word, fence, mapped, open_file, origin, set_aside, sync_mapped
from mouse_core.files.reading import MOST_JSON, check_inside, damaged, reading
from mouse_core.files.writing import remove, storing, sync_folders, write_at

# ---------------------------------------------------------------------- the layout, and the head that describes it
#
# A file for 4 rows of a column ``x`` of int64, in pages of 4096 bytes::
#
#     page 0   head    the columns, and the number of rows that fit into the file; written once
#     page 1   place   of a commit
#     page 2   live    the numbers of rows that count and that were committed, the origin of the file
#     page 3   place   of another commit
#     page 4   blocks  the checksums of each block of rows that is full
#     page 5   rows    32 bytes of x
#
# A commit has its own page: if this page is torn, the page of the other commit is whole.

PAGE = 4096
FORMAT = 1
"""The version of the file format; a file of a newer version raises DataError."""
_MAGIC = b"mousetai"
# The magic, the version, the size of the columns' description in bytes, and its checksum.
_HEAD = struct.Struct("<8sIIQ")
# Number of entries of the live page before the entries of columns.
LIVE = 8
# Rows that share a checksum form a block of about 100 kB. One flipped bit loses all rows of its block.
_BLOCK_BYTES, _MOST_IN_A_BLOCK = 1 << 17, 1 << 10
# The ends of variable-length rows are stored as int32.
_MOST_VALUES = (1 << 31) - 1
_IDENTITY = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class ColumnBuffer:
    """One of the arrays that store a column; each array has separate checksums.

    Args:
        column: Index of the column.
        kind: "values"; "nulls", a byte for each row; "ends", the ends of variable-length rows; or "sizes", the sizes of
            objects in bytes.
        shape: Shape of the array.
        dtype: Dtype of the array.
    """

    column: int
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """Name of the array, unique in the file."""
        return f"{self.column}.{self.kind}"


@dataclass(frozen=True)
class TailLayout:
    """The layout of a tail file: the offset and shape of each array.

    Args:
        columns: The storage of each column, by name.
        rows: Capacity of the file in rows.
        identity: 16 digits that are unique to this file; the digits determine the seed of the file's checksums.
        block_rows: Number of rows that share a checksum.
        waits: Whether each commit waits until its rows are on disk.
    """

    columns: Mapping[str, TailColumn]
    rows: int
    identity: str
    block_rows: int
    waits: bool

    @memo
    def parts(self) -> tuple[ColumnBuffer, ...]:
        """The arrays that hold the rows."""
        return tuple(self._parts())

    def _parts(self) -> Iterator[ColumnBuffer]:
        for number, column in enumerate(self.columns.values()):
            if column.is_object:
                yield ColumnBuffer(number, "sizes", (self.rows,), np.dtype(np.int64))
                continue
            yield ColumnBuffer(number, "values", (self.rows * column.width,), column.kind.dtype)
            if column.nullable:
                yield ColumnBuffer(number, "nulls", (self.rows,), np.dtype(np.bool_))
            if may_differ(column):
                yield ColumnBuffer(number, "ends", (self.rows + 1,), np.dtype(np.int32))

    @memo
    def objects(self) -> tuple[TailColumn, ...]:
        """The names of the columns whose values are in the objects file."""
        return tuple(column for column in self.columns.values() if column.is_object)

    @property
    def has_objects(self) -> bool:
        """Whether any column's values are in the objects file."""
        return bool(self.objects)

    @property
    def sums(self) -> int:
        """Number of checksums of a block: one for each array, and one for the block's bytes in the objects file."""
        return len(self.parts) + self.has_objects

    @memo
    def seed(self) -> int:
        """The seed of the file's checksums, which makes the checksums of two files differ."""
        return int(self.identity, 16)

    @memo
    def description(self) -> bytes:
        """The description of the layout in the file's head, as JSON."""
        columns = {name: _described(column) for name, column in self.columns.items()}
        numbers = {"identity": self.identity, "rows": self.rows, "block_rows": self.block_rows, "waits": self.waits}
        return json.dumps({**numbers, "columns": columns}).encode()

    @property
    def place_words(self) -> int:
        """Size of a commit in words of 8 bytes. A commit consists of the number of rows, one more number for each
        column, the checksums of the block in progress, and a checksum of the commit.
        """
        return 2 + len(self.columns) + self.sums

    @property
    def blocks(self) -> int:
        """Number of blocks; the last block can be shorter."""
        return -(-self.rows // self.block_rows)

    @memo
    def memory(self) -> BatchLayout:
        """The layout of the rows' arrays in memory."""
        return BatchLayout({part.name: (part.shape, part.dtype) for part in self.parts})

    @memo
    def begins(self) -> Mapping[str, int]:
        """Offset of each array of the file, aligned to pages, and the end of the last array."""
        place, live = 8 * self.place_words, 8 * (LIVE + len(self.columns))
        sizes = {
            "head": _HEAD.size + len(self.description),
            "place": place,
            "live": live,
            "other place": place,
            "blocks": 8 * self.blocks * self.sums,
            "rows": max(PAGE, self.memory.nbytes),
        }
        begins, end = {}, 0
        for name, size in sizes.items():
            begins[name] = end
            end += -(-size // PAGE) * PAGE
        return {**begins, "end": end}

    @property
    def nbytes(self) -> int:
        """Length of the file in bytes."""
        return self.begins["end"]

    # ------------------------------------------------------------------ from and to memory

    def head(self) -> bytes:
        """Return the content of the head: the first page or pages."""
        return _HEAD.pack(_MAGIC, FORMAT, len(self.description), checksum(self.description)) + self.description

    def live(self, memory: Any) -> npt.NDArray[np.int64]:
        """Return the live page as int64 numbers: first the numbers that describe the file, then one number for each
        column."""
        return np.frombuffer(memory, np.int64, LIVE + len(self.columns), self.begins["live"])

    def places(self, memory: Any) -> list[npt.NDArray[np.uint64]]:
        """Return the two places for commits as arrays, ``[place_words]`` each."""
        begins = self.begins["place"], self.begins["other place"]
        return [np.frombuffer(memory, np.uint64, self.place_words, begin) for begin in begins]

    def table(self, memory: Any) -> npt.NDArray[np.uint64]:
        """Return the table of the checksums of full blocks, ``[blocks, sums]``."""
        words = np.frombuffer(memory, np.uint64, self.blocks * self.sums, self.begins["blocks"])
        return words.reshape(self.blocks, self.sums)

    def arrays(self, memory: Any) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the rows, by name."""
        return self.memory.arrays(memoryview(memory)[self.begins["rows"] :]) if self.parts else {}


def usual_block_rows(columns: Mapping[str, TailColumn]) -> int:
    """Return the number of rows per block in a new file: about 100 kB of rows, at most 1024 rows."""
    row_bytes = sum(column.row_bytes for column in columns.values())
    return max(16, min(_MOST_IN_A_BLOCK, _BLOCK_BYTES // max(row_bytes, 1)))


def may_differ(column: TailColumn) -> bool:
    """Whether rows of a column can differ in length; a null row has length 0."""
    if not column.shape:
        return False
    return column.nullable or (column.widths is not None and column.widths[0] != column.widths[1])


def check_rows(columns: Mapping[str, TailColumn], rows: int) -> None:
    """Raise ConfigError if no file can hold `rows` rows."""
    widest = max((column.width for column in columns.values() if column.shape and not column.is_object), default=1)
    if not 0 < rows <= _MOST_VALUES // max(widest, 1) - 1:
        raise ConfigError(f"tail: expected 1..{_MOST_VALUES // max(widest, 1) - 1} rows, found {rows}")


def read_layout(path: str, read: Callable[[int, int], bytes]) -> TailLayout:
    """Return the layout that the head of a file describes.

    Args:
        path: The file, for messages.
        read: Function that returns ``count`` bytes of the file from an offset on, or fewer bytes at the end of the
            file.

    Raises:
        DataError: The file is not a tail file, is damaged, or was written by a newer version.
    """
    head = read(0, _HEAD.size)
    if len(head) < _HEAD.size or head[:8] != _MAGIC:
        raise damaged(path, "expected a file of appended rows, found another file")
    _, version, size, expected = _HEAD.unpack(head)
    if version > FORMAT:
        raise damaged(path, f"expected format {FORMAT} or older, found {version}: a newer release wrote it")
    described = read(_HEAD.size, min(size, MOST_JSON))
    if len(described) < size or checksum(described) != expected:
        raise damaged(path, "expected the file header that was written, found a damaged header")
    said = json.loads(described)
    columns = {str(name): _column(column) for name, column in said["columns"].items()}
    rows, identity = int(said["rows"]), str(said["identity"])
    if _IDENTITY.fullmatch(identity) is None:
        raise damaged(path, f"expected an identity of 16 hexadecimal digits, found {identity!r:.40}")
    check_rows(columns, rows)
    block_rows = said["block_rows"]
    if type(block_rows) is not int or not 0 < block_rows <= _MOST_IN_A_BLOCK:
        raise damaged(path, f"expected 1..{_MOST_IN_A_BLOCK} rows for each checksum, found {block_rows!r:.40}")
    layout = TailLayout(columns, rows, identity, block_rows, bool(said["waits"]))
    if layout.description != described or not columns:
        raise damaged(path, "expected a description of columns, found other content")
    return layout


def _described(column: TailColumn) -> dict[str, Any]:
    """Return the attributes of a column that readers of the file need, as JSON."""
    kind, stored = column.kind, column.arrow_type
    schema = None if stored is None else pa.schema([pa.field("", stored)]).serialize().to_pybytes()
    return {
        "kind": [kind.kind, kind.value_type, kind.depth],
        "shape": list(map(int, column.shape)),
        "arrow_type": None if schema is None else base64.b64encode(schema).decode(),
        "widths": None if column.widths is None else list(map(int, column.widths)),
        "nullable": column.nullable,
    }


def _column(said: Mapping[str, Any]) -> TailColumn:
    kind, value_type, depth = said["kind"]
    stored = said["arrow_type"]
    if stored is not None:
        stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(stored))).field(0).type
    elif kind not in ("scalar", "list") or value_type not in NUMPY_NAMES:
        raise ValueError(f"expected numbers, found {kind} of {value_type}")
    shape, widths = said["shape"], said["widths"]
    is_shape = all(type(size) is int and 0 < size <= _MOST_VALUES for size in shape) and prod(shape) <= _MOST_VALUES
    if not is_shape or (stored is None and len(shape) != depth):
        raise ValueError(f"expected a shape of {depth} sizes, found {shape!r:.80}")
    if widths is not None and not (len(shape) == 1 and 0 <= widths[0] <= widths[1] == shape[0]):
        raise ValueError(f"expected widths up to {shape!r:.80}, found {widths!r:.80}")
    return TailColumn(
        ColumnType(str(kind), str(value_type), int(depth)),
        shape=tuple(map(int, shape)),
        arrow_type=stored,
        widths=None if widths is None else (int(widths[0]), int(widths[1])),
        nullable=bool(said["nullable"]),
    )


# ---------------------------------------------------------------------- commits
#
# Rows share checksums block by block. The checksums of a full block stand in a table, and are never written again.
# Those of the block in progress are part of the commit. So a commit of 5000 rows, in blocks of 4096 rows, has one line
# in the table, for rows 0..4095, and its own checksums for rows 4096..4999.
#
# Commits alternate between two places, so while one commit is written, the previous one is whole. Either all commits of
# a file wait for the disk, or none.
#
# The live page beside the commits holds the numbers of rows that count, and that were committed. A reader can so tell a
# commit that a crash cut off from a commit that is lost.

UNIT = 4294967291
"""A number in the live page is multiplied by this prime before it is stored, so damage can be detected. The products of
numbers below 2**31 fit in int64.
"""


class LivePage:
    """The live page: the numbers of a tail file that change with every row or commit.

    Args:
        path: The file.
        words: The page, int64.
    """

    counted = Word(0, UNIT)
    """Number of rows that were written completely."""

    origin = Word(1, UNIT)
    """The origin of the file, which a copy of the file does not share; see ``mouse_core.files.mapped.origin``."""

    committed = Word(2, UNIT)
    """Number of committed rows."""

    def __init__(self, path: Path, words: npt.NDArray[np.int64]) -> None:
        self.path, self.words = path, memoryview(words)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Commit:
    """A record of how many rows are committed, with checksums; it is stored in one of the file's two places for
    commits.

    Args:
        rows: Number of rows that were written completely.
        since: For each column, the first row whose length differs from the length of the earlier rows; see
            ``NumbersExtent``.
        sums: The current checksums of the block in progress.
    """

    rows: int
    since: npt.NDArray[np.int64]
    sums: list[int]


def write_commit(place: npt.NDArray[np.uint64], layout: TailLayout, commit: Commit) -> None:
    """Write a commit to one of the file's two places for commits."""
    words = np.empty(layout.place_words, np.uint64)
    words[0] = commit.rows
    words[1 : 1 + len(commit.since)] = commit.since.view(np.uint64)
    words[1 + len(commit.since) : -1] = commit.sums
    words[-1] = checksum(words[:-1].data, layout.seed)
    place[:] = words


def read_commits(places: Sequence[npt.NDArray[np.uint64]], layout: TailLayout, known: int = -1) -> list[Commit]:
    """Return the valid commits with more than ``known`` rows; the commit with the most rows is first."""
    found = []
    for place in places:
        words = place.copy()  # the writer may change the place meanwhile
        columns, rows = len(layout.columns), int(words[0])
        if rows <= known:
            continue
        if checksum(words[:-1].data, layout.seed) != int(words[-1]) or rows > layout.rows:
            continue
        since, sums = words[1 : 1 + columns].view(np.int64), [int(word) for word in words[1 + columns : -1]]
        found.append(Commit(rows, since, sums))
    return sorted(found, key=lambda commit: commit.rows, reverse=True)


class Sums:
    """Running checksums over the first rows of a file, extended as rows are added.

    Args:
        layout: The layout of the file.
        memory: The memory of the file.
        objects: Function that returns the bytes of the objects file between two offsets.

    Attributes:
        rows: Number of rows that the checksums cover.
        objects_end: Offset in the objects file at which the objects of the covered rows end.
    """

    def __init__(self, layout: TailLayout, memory: Any, objects: Callable[[int, int], bytes] | None = None) -> None:
        self._layout, self._objects = layout, objects
        self._bytes = memoryview(memory)[layout.begins["rows"] :]
        arrays = layout.arrays(memory)
        # Slicing bytes takes a fifth of the time of slicing arrays.
        begins = {name: begin for name, (begin, _, _) in layout.memory.fields.items()}
        widths = [column.width for column in layout.columns.values()]
        self._parts = [
            _PartPlace(
                part.kind,
                part.column,
                begins[part.name],
                part.dtype.itemsize,
                widths[part.column] if part.kind == "values" else 1,
                f"{part.column}.ends" in arrays and part.kind != "nulls",
            )
            for part in layout.parts
        ]
        self._ends = [arrays.get(f"{number}.ends") for number in range(len(layout.columns))]
        self._sizes = [arrays[part.name] for part in layout.parts if part.kind == "sizes"]
        self._states = self._new_states()
        self.rows = 0
        self.objects_end = 0

    def _new_states(self) -> list[Any]:
        return [RunningChecksum(seed=self._layout.seed) for _ in range(self._layout.sums)]

    def copy(self) -> Sums:
        """Return a copy; extending the copy does not change this object."""
        copied = Sums.__new__(Sums)
        copied.__dict__.update(self.__dict__, _states=[state.copy() for state in self._states])
        return copied

    @property
    def now(self) -> list[int]:
        """The current checksums of the block in progress."""
        return [state.intdigest() for state in self._states]

    def advance(
        self, rows: int, since: npt.NDArray[np.int64], full: Callable[[int, npt.NDArray[np.uint64]], None]
    ) -> None:
        """Extend the checksums to all rows before row ``rows``.

        Args:
            rows: Number of rows that the checksums cover afterwards.
            since: See ``Commit``.
            full: Function that is called with the index of the first full block, and the checksums of full blocks,
                uint64 ``[blocks, sums]``.
        """
        size = self._layout.block_rows
        while self.rows < rows:
            block, begun = divmod(self.rows, size)
            blocks = rows // size - block
            if blocks and not begun:
                # Checksums of whole blocks take half the time of running ones.
                full(block, self._of_blocks(block, blocks, since))
                self.rows += blocks * size
                continue
            end = min(rows, block * size + size)
            self._take(self.rows, end, since)
            self.rows = end
            if end % size == 0:
                full(block, np.array([self.now], np.uint64))
                self._states = self._new_states()

    def skip(self, rows: int) -> None:
        """Continue at row ``rows`` without checksums of the earlier rows; raises DataError if the stored sizes are
        impossible.
        """
        sizes = [sizes[self.rows : rows] for sizes in self._sizes]
        if any(some.size and not -1 <= int(some.min()) <= int(some.max()) < 1 << 40 for some in sizes):
            raise DataError("expected sizes of objects, found other values")
        self.objects_end += sum(int(np.maximum(some, 0).sum()) for some in sizes)
        self.rows, self._states = rows, self._new_states()

    def _of_blocks(self, block: int, blocks: int, since: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the checksums of full blocks, uint64 ``[blocks, sums]``."""
        digest, seed, size, data = checksum, self._layout.seed, self._layout.block_rows, self._bytes
        found = np.empty((blocks, self._layout.sums), np.uint64)
        begins = range(block * size, (block + blocks) * size, size)
        for number, part in enumerate(self._parts):
            places = [self._place_of(part, begin, begin + size, since) for begin in begins]
            found[:, number] = [digest(data[at:end], seed) for at, end in places]
        if self._objects is not None:
            found[:, -1] = [digest(self._next_objects(begin, begin + size), seed) for begin in begins]
        return found

    def _take(self, begin: int, end: int, since: npt.NDArray[np.int64]) -> None:
        for part, state in zip(self._parts, self._states, strict=False):
            first, last = self._place_of(part, begin, end, since)
            state.update(self._bytes[first:last])
        if self._objects is not None:
            self._states[-1].update(self._next_objects(begin, end))

    def _place_of(self, part: _PartPlace, begin: int, end: int, since: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Return the offsets of the start and the end of an array's values for a range of rows.

        If all rows have equal length, the array "ends" has no bytes.
        """
        if part.may_differ:
            differs, ends = int(since[part.column]) - 1, self._ends[part.column]
            if ends is not None and 0 <= differs < end:
                if part.kind == "ends":
                    begin, end = max(differs, begin) + 1, end + 1
                else:
                    begin, end = int(ends[begin]), int(ends[end])
                return part.begin + begin * part.size, part.begin + end * part.size
            if part.kind == "ends":
                return 0, 0
        return part.begin + begin * part.row_bytes, part.begin + end * part.row_bytes

    def _next_objects(self, begin: int, end: int) -> bytes:
        """Return the bytes of the objects in rows ``begin .. end - 1``."""
        assert self._objects is not None
        at = self.objects_end
        self.objects_end += sum(int(np.maximum(sizes[begin:end], 0).sum()) for sizes in self._sizes)
        return self._objects(at, self.objects_end)


class _PartPlace(NamedTuple):
    """The position of one array in a tail file, and the size of a row of this array.

    Args:
        kind, column: See ``ColumnBuffer``.
        begin: Offset of the first byte of the array.
        size: Size of a number in bytes.
        width: Number of numbers in a row.
        may_differ: Whether rows can differ in width.
    """

    kind: str
    column: int
    begin: int
    size: int
    width: int
    may_differ: bool

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.size * self.width


def check_rows_of(path: str, layout: TailLayout, table: npt.NDArray[np.uint64], sums: Sums, commit: Commit) -> Sums:
    """Check the rows of a commit that ``sums`` do not cover yet, and return the checksums of all rows of the commit.

    Raises:
        DataError: A row was damaged after it was written; the message names file, rows and column.
    """
    known, size = sums.copy(), layout.block_rows

    def check(block: int, found: npt.NDArray[np.uint64], expected: npt.NDArray[np.uint64]) -> None:
        for at, number in np.argwhere(expected != found)[:1].tolist():
            begin = (block + at) * size
            names = [*(list(layout.columns)[part.column] for part in layout.parts), "objects"]
            where = f"rows {begin}..{min(begin + size, commit.rows) - 1}, column {names[number]!r}"
            raise damaged(path, "expected the written rows, found damaged rows", at=where)

    known.advance(
        commit.rows, commit.since, lambda block, found: check(block, found, table[block : block + len(found)])
    )
    check(known.rows // size, np.array([known.now], np.uint64), np.array([commit.sums], np.uint64))
    return known


# ---------------------------------------------------------------------- the extent, and its objects
#
# The mapped file has fixed-size values. "Objects" (strings, bytes, encoded images, other Arrow values) lie in a second
# file, the objects file, row by row and in the order of the columns. The mapped file has the number of bytes of each
# object, or -1 for a null. The rows ("ab", None) and ("c", b"xyz") give the six bytes ``abcxyz`` and the sizes 2, -1
# and 1, 3.
#
# Invariant: the objects of a row are written before the number of rows includes it, so a reader never sees a row
# without its objects. If writing them fails, the extent removes the row again.

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_TEXT = (pa.types.is_string, pa.types.is_large_string)
_BINARY = (pa.types.is_binary, pa.types.is_large_binary)


def objects_path(path: Path) -> Path:
    """Return the path of the objects file of a tail file."""
    return path.with_suffix(".objects")


class ObjectsFile(Descriptor):
    """An open objects file: the bytes of all values in sequence. The caller stores the offset at which the values end.

    Args:
        path: The file.
        create: Whether to create the file.
        write: Whether to open the file for writing.
    """

    def __init__(self, path: Path, *, create: bool = False, write: bool = True) -> None:
        self.path = path
        self._file = open_file(path, create=create, write=write)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes ``begin .. end - 1`` of the file; raises DataError if the file is shorter."""
        size, pieces = os.fstat(self._file).st_size, []
        if end > size:
            raise DataError(f"{self.path}: expected {end} bytes or more, found {size}")
        while begin < end and (piece := os.pread(self._file, min(end - begin, 1 << 30), begin)):
            pieces.append(piece)
            begin += len(piece)
        return b"".join(pieces)

    def sync(self) -> None:
        """Wait until the values are on the disk; raises OSError if the disk fails."""
        getattr(os, "fdatasync", os.fsync)(self._file)


class FiledObjects(ObjectExtent):
    """The objects of one column in a tail file, with the encoded bytes of values that are not in the objects file yet.

    Args:
        column: The column and its Arrow type.
        sizes: Size of each value in bytes, int64 ``[rows]``; -1 for nulls.
        before: The values of the rows that are already in the file.
    """

    def __init__(self, column: TailColumn, sizes: npt.NDArray[np.int64], before: pa.Array) -> None:
        super().__init__(column)
        self.sizes, self._earlier = sizes, before
        self._encode = _encoder(column.arrow_type)
        self._written = 0
        self.encoded: list[bytes | None] = []
        """The encoded values that are not in the objects file yet."""

    def write(self, row: int, value: Any) -> None:
        """Set a value, and encode it for the objects file; see ``ObjectExtent.write``."""
        row -= len(self._earlier)
        super().write(row, value)
        del self.encoded[row - self._written :]
        self.encoded.append(None if value is None else self._encode(value))

    def forget(self, row: int) -> None:
        """Remove the values from ``row`` on; see ``ObjectExtent.forget``."""
        super().forget(row - len(self._earlier))
        del self.encoded[len(self._items) - self._written :]

    def written(self, begin: int, end: int) -> None:
        """Record the sizes of rows ``begin .. end - 1``, whose values were written to the objects file."""
        self.sizes[begin:end] = [-1 if value is None else len(value) for value in self.encoded]
        self._written, self.encoded = len(self._items), []

    def to_arrow(self, rows: int) -> pa.Array:
        """Return the first ``rows`` values as a new array."""
        earlier = len(self._earlier)
        if rows <= earlier:
            return self._earlier.slice(0, rows)
        later = pa.array(self._items[: rows - earlier], self.column.arrow_type)
        return pa.concat_arrays([self._earlier, later]) if earlier else later


def read_objects(
    file: ObjectsFile, layout: TailLayout, arrays: Mapping[str, Any], at: int, begin: int, end: int
) -> tuple[int, list[pa.Array]]:
    """Read the objects of rows ``begin .. end - 1``; return the offset after these objects, and an array for each
    column.

    Args:
        file: The objects file.
        layout: The layout of the rows.
        arrays: The arrays of the rows, by name.
        at: Offset in the objects file at which the objects of row ``begin`` start.
        begin: The first row.
        end: The row after the last row to read.

    Raises:
        DataError: The bytes cannot be decoded to values of these columns.
    """
    sizes = [arrays[part.name][begin:end] for part in layout.parts if part.kind == "sizes"]
    with reading(file.path):
        values = _decode_objects(file, at, layout.objects, np.stack(sizes, axis=1))
    return at + sum(int(np.maximum(column_sizes, 0).sum()) for column_sizes in sizes), values


def _decode_objects(
    file: ObjectsFile, at: int, columns: Sequence[TailColumn], table: npt.NDArray[np.int64]
) -> list[pa.Array]:
    """Decode the objects of rows from offset ``at`` on; ``table`` has the objects' sizes, ``[rows, columns]``.

    Example: the objects of two rows of two columns have the sizes 2, -1 (a null) and 1, 3. In ``content``, these
    objects begin at 0, 2, 2, 3 and end at 2, 2, 3, 6.
    """
    if not table.size:
        return [pa.array([], column.arrow_type) for column in columns]
    if table.min() < -1:
        raise DataError(f"{file.path}: expected sizes of objects, -1 or more, found {table.min()}")
    ends = np.cumsum(np.maximum(table, 0)).reshape(table.shape)
    content = memoryview(file.read(at, at + int(ends[-1, -1])))
    begins = ends - np.maximum(table, 0)
    arrays = []
    for number, column in enumerate(columns):
        present = table[:, number] >= 0
        ranges = zip(begins[:, number].tolist(), ends[:, number].tolist(), present.tolist(), strict=True)
        values = [content[begin:end] if is_present else None for begin, end, is_present in ranges]
        array = _to_arrow(values, column.arrow_type)
        array.validate(full=True)
        if array.type != column.arrow_type:
            raise DataError(f"{file.path}: expected {column.arrow_type}, found {array.type}")
        arrays.append(array)
    return arrays


# ---------------------------------------------------------------------- values as bytes


def _encoder(kind: pa.DataType) -> Callable[[Any], bytes]:
    """Return the function that encodes a value of an Arrow type as bytes."""
    if any(test(kind) for test in (*_TEXT, *_BINARY)):
        return lambda item: _plain_bytes(item, kind)
    if kind == _IMAGE:
        return _image_bytes
    return lambda item: bytes(pa.record_batch([pa.array([item], kind)], [""]).serialize())


def _plain_bytes(item: Any, kind: pa.DataType) -> bytes:
    """Encode a text or bytes object without a header."""
    if type(item) is bytes:
        return item
    return item.encode() if type(item) is str else bytes(pa.scalar(item, kind).as_buffer())


def _image_bytes(item: Mapping[str, Any]) -> bytes:
    """Encode an image as four parts: the length of the path plus 1, in 4 bytes (0: no path); the path; a byte 1 (0: no
    content); and the content.

    The image ``b"PNG"`` becomes 00 00 00 00 01 50 4e 47 without a path, and 02 00 00 00 61 01 50 4e 47 with the path
    "a".
    """
    path, content = item.get("path"), item.get("bytes")
    name = b"" if path is None else os.fspath(path).encode()
    length = (0 if path is None else len(name) + 1).to_bytes(4, "little")
    return length + name + (b"\0" if content is None else b"\1" + bytes(content))


def _to_arrow(values: Sequence[memoryview | None], kind: pa.DataType) -> pa.Array:
    """Decode encoded values to an array of an Arrow type; the inverse of ``_encoder``."""
    if any(test(kind) for test in _TEXT):
        return pa.array([None if value is None else bytes(value).decode() for value in values], kind)
    if any(test(kind) for test in _BINARY):
        return pa.array(values, kind)
    if kind == _IMAGE:
        return pa.array([None if value is None else _image_from_bytes(value) for value in values], kind)
    schema, null = pa.schema([pa.field("", kind)]), pa.nulls(1, kind)
    arrays = [null if value is None else _single_value(pa.ipc.read_record_batch(value, schema)) for value in values]
    return pa.concat_arrays(arrays)


def _single_value(batch: pa.RecordBatch) -> pa.Array:
    if batch.num_rows != 1:
        raise DataError(f"expected one value, found {batch.num_rows}")
    column = batch.column(0)
    column.validate(full=True)
    return column


def _image_from_bytes(value: memoryview) -> dict[str, Any]:
    """Decode an image; the inverse of ``_image_bytes``."""
    length = int.from_bytes(value[:4], "little")
    end = 4 + max(length - 1, 0)
    if not 4 < end + 1 <= len(value):
        raise DataError(f"expected an image, found a path of {length - 1} bytes in a value of {len(value)} bytes")
    path = bytes(value[4:end]).decode() if length else None
    return {"bytes": bytes(value[end + 1 :]) if value[end] else None, "path": path}


# ---------------------------------------------------------------------- rows


class TailExtent(Extent):
    """An extent whose rows are in a tail file and its objects file.

    Args:
        layout: The layout of the file.
        extents: The columns, as views of the file's memory.
        count: Number of rows in the file.
        told: int64 array in the mapped file to which the number of rows is written; None: no row can be appended.
        objects: The objects file, if some column has objects.
    """

    most_bytes: int | None = None
    """Size of the objects file in bytes at which the extent is full; None: no limit."""

    keeps_together = True
    """Whether all rows of one call are written to the same file, even if the objects of the rows exceed
    ``most_bytes``."""

    def __init__(
        self,
        layout: TailLayout,
        extents: dict[str, ColumnExtent],
        count: int,
        told: Any = None,
        objects: ObjectsFile | None = None,
    ) -> None:
        super().__init__(layout.columns, layout.rows, extents, count)
        if told is not None:
            self._sort()
        self._shared_count, self._objects = told, objects
        self.objects_end = 0  # offset of the objects of the next row
        self._object_columns = [extent for extent in extents.values() if isinstance(extent, FiledObjects)]

    def append(self, row: Mapping[str, Any]) -> bool:
        """Append a row, see ``Extent.append``; raises StorageError if objects of the row cannot be written."""
        if not Extent.append(self, row):
            return False
        if self._objects is not None:
            self._write_objects(self._objects, self.count - 1)
        self._shared_count[0] = self.count * UNIT
        return True

    def put(self, row: Mapping[str, Any]) -> None:
        """Append a prepared row, see ``Extent.put``; raises StorageError if objects of the row cannot be written."""
        Extent.put(self, row)
        if self._objects is not None:
            self._write_objects(self._objects, self.count - 1)
        self._shared_count[0] = self.count * UNIT

    def put_many(self, prepared: Mapping[str, Any], done: int, rows: int) -> int:
        """Append prepared rows, see ``Extent.put_many``; raises StorageError if objects cannot be written."""
        taken, step = 0, rows if self._objects is None or self.keeps_together else 1
        while taken < rows and self.count < self.rows:
            # The bytes of objects are known only after writing, and may fill the file: write 1 row, 2 rows, 4 rows.
            step = min(step, rows - taken)
            Extent.put_many(self, prepared, done + taken, step)
            if self._objects is not None:
                self._write_objects(self._objects, self.count - step)
            taken, step = taken + step, 2 * step
        self._shared_count[0] = self.count * UNIT
        return taken

    def settle(self) -> None:
        """Complete a row whose append was interrupted: write the row's objects, and write the row count into the shared
        memory of the file. On a StorageError, remove the row.
        """
        if self._objects is not None and self._object_columns[0].encoded:
            self._write_objects(self._objects, self.count)
        self._shared_count[0] = self.count * UNIT

    def _write_objects(self, file: ObjectsFile, begin: int) -> None:
        """Write the objects of the rows from ``begin`` on; if writing fails, remove these rows."""
        # After an interrupt the objects of an earlier row may not be written yet: begin with that row.
        begin = min(begin, self.count - len(self._object_columns[0].encoded))
        rows = zip(*(extent.encoded for extent in self._object_columns), strict=True)
        content = b"".join(value for row in rows for value in row if value is not None)
        try:
            with storing(f"objects {file.path}"):
                write_at(file.file, content, self.objects_end)
        except BaseException:
            self.count = begin
            for extent in self.extents.values():
                extent.forget(begin)
            raise
        for extent in self._object_columns:
            extent.written(begin, self.count)
        self.objects_end += len(content)
        if self.most_bytes is not None and self.objects_end >= self.most_bytes:
            self.rows = self.count  # the file is full


def column_extents_of(
    layout: TailLayout,
    arrays: Mapping[str, Any],
    since: npt.NDArray[np.int64],
    objects: Sequence[pa.Array],
    rows: int,
) -> dict[str, ColumnExtent]:
    """Return the columns of a mapped file, as views of its memory.

    Args:
        layout: The layout of the file.
        arrays: The arrays of the rows, by name.
        since: For each column, the first row whose length differs from the length of the earlier rows; see
            ``NumbersExtent``.
        objects: The present values of the columns with objects.
        rows: Number of rows in the file.
    """
    remaining_objects = iter(objects)
    return {
        name: FiledObjects(column, arrays[f"{number}.sizes"], next(remaining_objects))
        if column.is_object
        else NumbersExtent(
            column,
            arrays[f"{number}.values"],
            arrays.get(f"{number}.nulls"),
            arrays.get(f"{number}.ends"),
            since[number : number + 1],
            rows,
        )
        for number, (name, column) in enumerate(layout.columns.items())
    }


def check_ends(path: Path, layout: TailLayout, arrays: Mapping[str, Any], since: Any, rows: int) -> None:
    """Raise DataError if the stored ends of variable-length rows decrease, or exceed the column's values."""
    for part in layout.parts:
        if part.kind == "ends" and since[part.column]:
            ends, most = arrays[part.name][: rows + 1], len(arrays[f"{part.column}.values"])
            if ends[0] != 0 or ends[-1] > most or (ends[1:] < ends[:-1]).any():
                name = list(layout.columns)[part.column]
                raise damaged(path, f"expected rows of column {name!r} within its values, found rows outside")


class _TailMemory:
    """The memory of a tail file, as arrays.

    Args:
        path: The file.
        layout: The layout of the file.
        memory: The file, mapped.
        objects: The objects file, if some column has objects.
    """

    def __init__(self, path: Path, layout: TailLayout, memory: mmap.mmap, objects: ObjectsFile | None) -> None:
        self.path, self.layout, self._memory, self._objects = path, layout, memory, objects
        self._arrays, self._live = layout.arrays(memory), LivePage(path, layout.live(memory))
        self._places, self._table = layout.places(memory), layout.table(memory)
        self._sums = self._new_sums()

    def _new_sums(self) -> Sums:
        return Sums(self.layout, self._memory, None if self._objects is None else self._objects.read)

    def _promised(self, origin: int) -> tuple[bool, int]:
        """Return two values: whether it is certain that no written row is lost, and how many rows must be present.

        Args:
            origin: The origin of the file. If ``origin`` differs from the stored origin, the file is a copy or the
                machine was restarted. In both cases, rows of commits that did not wait for the disk can be missing.
        """
        is_same = origin != 0 and self._live.origin == origin
        return is_same, self._live.committed if is_same or self.layout.waits else 0

    def _newest(self, commits: Sequence[Commit], promise: tuple[bool, int]) -> tuple[Commit | None, Sums]:
        """Return the commit with the most rows among the commits whose rows match the checksums, and the checksums.

        Args:
            commits: The valid commits; the commit with the most rows is first.
            promise: See ``_promised``.

        Raises:
            DataError: Rows that must be present are damaged or missing.
        """
        (is_same, promised), newest, sums = promise, None, self._sums
        for commit in commits:
            try:
                newest, sums = commit, check_rows_of(str(self.path), self.layout, self._table, self._sums, commit)
                break
            except DataError:
                if is_same or commit.rows <= promised:
                    raise
        if sums.rows < promised:
            raise damaged(
                self.path,
                f"expected a commit of {promised} rows, found a commit of {sums.rows} rows; the file is damaged",
            )
        return newest, sums


class TailFile(_TailMemory, Descriptor):
    """A new file of appended rows, written by one process.

    Attributes:
        path: The file.
        extent: The extent to which rows are appended.
        committed: Number of committed rows.
    """

    extent: TailExtent

    def __init__(
        self, path: Path, opened: Descriptor, layout: TailLayout, memory: mmap.mmap, objects: ObjectsFile | None
    ) -> None:
        super().__init__(path, layout, memory, objects)
        self._since = layout.live(memory)[-len(layout.columns) :]
        self._next = self.committed = 0
        self._failed = False  # whether the last sync to the disk failed
        # From here on this object is responsible for closing the file.
        self._file, opened._file = opened._file, -1

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        columns: Mapping[str, TailColumn],
        rows: int,
        *,
        waits: bool = True,
        often: bool = False,
    ) -> TailFile:
        """Create a tail file.

        Args:
            path: The file; the objects file is created in the same folder.
            columns: The storage of each column, by name.
            rows: Capacity of the file in rows.
            waits: Whether each commit waits until its rows are on disk.
            often: Whether to optimise for frequent syncs of few rows, such as rows of 100 bytes every second: creating
                the file takes longer, and each sync takes less time.

        Raises:
            ConfigError: ``rows`` rows do not fit into one file.
            StorageError: The file cannot be created, because the disk is full or the file exists; no partial file
                remains.
        """
        path = Path(path)
        check_rows(columns, rows)
        layout = TailLayout(dict(columns), rows, os.urandom(8).hex(), usual_block_rows(columns), waits)
        with storing(f"tail {path}"):
            opened, tail = Descriptor(open_file(path, create=True)), None
            try:
                set_aside(opened.file, layout.nbytes, written=often)
                memory = mapped(opened.file, layout.nbytes, write=True)
                memory[: len(layout.head())] = layout.head()
                objects = ObjectsFile(objects_path(path), create=True) if layout.has_objects else None
                tail = cls(path, opened, layout, memory, objects)
                # The manifest may name the file from now on.
                tail._sync()
                sync_folders([path.parent])
            except BaseException:
                opened.close()
                if tail is None:
                    remove(path)
                    remove(objects_path(path))
                else:
                    tail.remove()
                raise
            tail._live.origin = origin(tail.file)
            extents = column_extents_of(layout, tail._arrays, tail._since, _no_objects(layout), 0)
            tail.extent = TailExtent(layout, extents, 0, tail._live.words, objects)
            return tail

    @property
    def nbytes(self) -> int:
        """Size of both files in bytes."""
        return self.layout.nbytes + self.extent.objects_end

    def commit(self) -> None:
        """Commit all rows with their checksums, so that readers see the rows; if commits must wait for the disk, sync
        the rows to the disk first.

        Raises:
            StorageError: The rows cannot be synced to the disk; the rows stay in the file, and the next call tries
                again.
        """
        if self.extent.count <= self.committed:
            return
        self.extent.settle()
        # After an interrupt, the next call repeats all steps below.
        rows, since, later = self.extent.count, self._since.copy(), self._sums.copy()

        def full(block: int, sums: npt.NDArray[np.uint64]) -> None:
            self._table[block : block + len(sums)] = sums

        later.advance(rows, since, full)
        self._sums = later
        fence()
        write_commit(self._places[self._next], self.layout, Commit(rows, since, self._sums.now))
        if self.layout.waits:
            with storing(f"tail {self.path}"):
                self._sync()
        fence()
        self._next = 1 - self._next
        self._live.committed = self.committed = rows

    def _sync(self) -> None:
        """Wait until all bytes are on the disk; raises OSError if the disk fails."""
        if self._failed:
            self._write_again()
        self._failed = True
        if self._objects is not None:
            self._objects.sync()
        sync_mapped(self._file, self._memory)
        self._failed = False

    def _write_again(self) -> None:
        """Write all bytes again. This is necessary because the operating system marks bytes as written even if writing
        them failed.
        """
        pages = np.frombuffer(self._memory, np.uint8)[::PAGE]
        pages[:] = pages.copy()
        if self._objects is not None:
            write_at(self._objects.file, self._objects.read(0, self.extent.objects_end), 0)
        # The system may also have dropped the pages from memory.
        now = Commit(self._sums.rows, self._since.copy(), self._sums.now)
        check_rows_of(str(self.path), self.layout, self._table, self._new_sums(), now)

    def close(self) -> None:
        """Close the files; a second call does nothing. Rows that were written completely stay in the files."""
        super().close()
        if self._objects is not None:
            self._objects.close()

    def remove(self) -> None:
        """Close and remove the files; processes that have the files open can still read the rows."""
        self.close()
        remove(self.path)
        if self._objects is not None:
            remove(self._objects.path)


def _no_objects(layout: TailLayout) -> list[pa.Array]:
    return [pa.array([], column.arrow_type) for column in layout.objects]


class TailReader(_TailMemory):
    """Reads a tail file: the committed rows while another process writes it, or all rows after the writer ended.

    Args:
        path: The file.
        identity: The identity that the head must have; "" accepts any identity.

    Attributes:
        token: Identity that all extents of this reader share. Of two extents with equal tokens, the longer extent
            begins with the rows of the shorter extent.

    Raises:
        DataError: The file is not a tail file, has another identity or a damaged head, or was written by a newer
            version.
        ConfigError: The file does not exist.
    """

    def __init__(self, path: str | os.PathLike[str], *, identity: str = "") -> None:
        path, objects = Path(path), None
        self.token = object()
        check_inside([path, objects_path(path)], path.parent)
        with reading(path):
            file = open_file(path, write=False)
            try:
                layout, memory = _map_layout(path, file, identity)
                self._origin = origin(file)
                if layout.has_objects:
                    objects = ObjectsFile(objects_path(path), write=False)
            finally:
                os.close(file)
            super().__init__(path, layout, memory, objects)
        self._since = np.zeros(len(layout.columns), np.int64)
        self._values = _no_objects(layout)

    def committed(self) -> int:
        """Check the checksums of new rows, and return the number of committed rows.

        Raises:
            DataError: Rows are damaged; the message names the file and the rows.
        """
        with reading(self.path):
            return self._look()

    def _look(self) -> int:
        # This number is read before the commits, because the writer writes it last.
        promise = is_same, promised = self._promised(self._origin)
        if promised == self._sums.rows and is_same:
            return promised
        fence()
        commits = read_commits(self._places, self.layout, self._sums.rows)
        # After a restart, a commit is whole or not; before, the writer may still wait for the disk.
        commit, sums = self._newest([one for one in commits if one.rows <= promised or not is_same], promise)
        if commit is not None:
            self._take(commit.rows, commit.since)
            self._sums = sums
        return sums.rows

    def _take(self, rows: int, since: npt.NDArray[np.int64]) -> None:
        """Accept the rows up to ``rows``; see ``Commit`` for ``since``."""
        check_ends(self.path, self.layout, self._arrays, since, rows)
        if self._objects is not None:
            begin, at = self._sums.rows, self._sums.objects_end
            _, values = read_objects(self._objects, self.layout, self._arrays, at, begin, rows)
            self._values = [pa.concat_arrays(parts) for parts in zip(self._values, values, strict=True)]
        self._since = since

    def left(self) -> int:
        """Return how many rows remain after the writer has ended; ``extent`` returns these rows.

        Normally, all rows that the writer counted remain. In a copy of the file, or after a restart of the machine,
        only the rows of the last valid commit remain.

        Raises:
            DataError: Committed rows are damaged.
        """
        with reading(self.path):
            rows, counted = self._look(), self._live.counted
            if not self._promised(self._origin)[0]:
                if counted > rows:
                    warnings.warn(
                        f"{self.path}: its last {counted - rows} rows of {counted} are dropped: the file was copied, "
                        "or the machine was restarted, and these rows have no checksum; flushed rows are kept",
                        StoreWarning,
                        stacklevel=2,
                    )
                return rows
            if not rows <= counted <= self.layout.rows:
                raise damaged(self.path, f"expected {rows}..{self.layout.rows} rows, found {counted}")
            since = self.layout.live(self._memory)[-len(self.layout.columns) :].copy()
            for before, now in zip(self._since.tolist(), since.tolist(), strict=True):
                if before != now and (before or 0 < now <= rows):
                    raise damaged(
                        self.path,
                        f"expected lengths that differ from row {before} on, found such lengths from row {now} on",
                    )
            since[since > counted] = 0
            self._take(counted, since)
            return counted

    def whole(self) -> list[range]:
        """Return the ranges of committed rows that are undamaged; afterwards ``extent`` returns these rows.

        Each returned range begins at the start of a block, and ends with the last row of a block, or with the last row
        of one of the latest commits. Example: with 5000 rows in blocks of 1024 and a flipped bit in row 1500, rows
        0..1023 and 2048..4999 are returned.
        """
        commits, sums = read_commits(self._places, self.layout), self._sums
        most, size = commits[0].rows if commits else 0, self.layout.block_rows
        stretches: list[range] = []
        parts = [[values] for values in self._values]
        for begin in range(0, most, size):
            at, end = sums.objects_end, self._whole_end(sums, begin, commits)
            if end > begin:
                gap = begin - (stretches[-1].stop if stretches else 0)
                if self._objects is not None:
                    _, values = read_objects(self._objects, self.layout, self._arrays, at, begin, end)
                    for known, some in zip(parts, values, strict=True):
                        known += [pa.nulls(gap, some.type), some]
                first = stretches.pop().start if stretches and not gap else begin
                stretches.append(range(first, end))
            try:
                sums.skip(begin + size)
            except DataError:
                break
        self._values = [pa.concat_arrays(known) for known in parts]
        if commits:
            self._since = commits[0].since
        return stretches

    def _whole_end(self, sums: Sums, begin: int, commits: Sequence[Commit]) -> int:
        """Return the index after the last of the undamaged rows in the block that begins at row ``begin``; return
        ``begin`` if the whole block is damaged.
        """
        most, full = commits[0].rows, begin + self.layout.block_rows
        block = self._table[begin // self.layout.block_rows].tolist()
        # In the block in progress, only rows that one of the last commits covers can be checked.
        ends = [Commit(full, commits[0].since, block)] if full <= most else []
        ends += [commit for commit in commits if begin < commit.rows < min(full, most + 1)]
        for end in ends:
            found, now = list[list[int]](), sums.copy()
            with suppress(DataError, OSError, ValueError):
                now.advance(end.rows, end.since, lambda _, block: found.append(block[0].tolist()))  # noqa: B023
                if (found[0] if found else now.now) == end.sums:
                    return end.rows
        return begin

    def told_of(self) -> int:
        """Return the largest number of committed rows that any readable record in the file states, including damaged
        rows.
        """
        numbers = [commit.rows for commit in read_commits(self._places, self.layout)]
        with suppress(DataError):
            numbers.append(self._live.committed)
        return min(max(numbers, default=0), self.layout.rows)

    def extent(self, rows: int) -> TailExtent:
        """Return the first ``rows`` committed rows as an extent."""
        since = np.where(self._since > rows, 0, self._since)
        extents = column_extents_of(self.layout, self._arrays, since, self._values, rows)
        extent = TailExtent(self.layout, extents, rows)
        extent.token = self.token
        return extent

    def close(self) -> None:
        """Close the files; extents that were returned stay valid."""
        if self._objects is not None:
            self._objects.close()


def _map_layout(path: Path, file: int, identity: str) -> tuple[TailLayout, mmap.mmap]:
    """Return the layout of an open file, and its memory map.

    Raises:
        DataError: The file is not a tail file, is damaged, or was written by a newer version.
    """
    size = os.fstat(file).st_size
    layout = read_layout(str(path), lambda begin, count: os.pread(file, count, begin))
    if identity and layout.identity != identity:
        raise damaged(path, f"expected the file with the identity {identity}, found {layout.identity}")
    if size != layout.nbytes:
        raise damaged(path, f"expected {layout.nbytes} bytes, found {size}")
    return layout, mapped(file, size, write=False)
