"""The layout of a tail file, and the head that describes it.

A file for 4 rows of a column ``x`` of int64, in pages of 4096 bytes::

    page 0   head    what the columns are, how many rows the file has room for; written once
    page 1   place   of a commit that waits for the disk
    page 2   live    how many rows count, the origin of the file; places of two commits that do not wait
    page 3   place   of another commit that waits for the disk
    page 4   blocks  the checksums of each block of rows that is full
    page 5   rows    32 bytes of x

All that changes with every commit lies side by side, so that the disk writes one page. A commit that waits for the disk
has a page of its own: if this page is torn, the other one is whole.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import NUMPY_NAMES, ColumnType
from mouse_core._base.memo import memo
from mouse_core._base.memory import BatchLayout
from mouse_core.columns.appended import TailColumn
from mouse_core.errors import ConfigError
from mouse_core.files.checksum import checksum
from mouse_core.files.reading import MOST_JSON, damaged

PAGE = 4096
FORMAT = 1
"""The version of the format; a file of a newer one is refused."""
_MAGIC = b"mousetai"
# The magic, the version, how many bytes describe the columns, and their checksum.
_HEAD = struct.Struct("<8sIIQ")
# Numbers of the live page before those of the columns.
LIVE = 8
# Rows that share a checksum, which one flipped bit costs: some 100 kB.
_BLOCK_BYTES, _MOST_IN_A_BLOCK = 1 << 17, 1 << 10
# Where rows of an array end is kept in int32.
_MOST_VALUES = (1 << 31) - 1
# Attributes of a column that stand in the head as they are.
_PLAIN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("nullable", "image", "whole", "single"), bool),
    "allowed": str,
    "object_bytes": int,
}
_IDENTITY = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class ColumnBuffer:
    """An array of a column, with checksums of its own.

    Args:
        column: Number of the column.
        kind: "values", "nulls" (a byte a row), "ends" (of rows that differ in length), "sizes" (of objects, in bytes).
        shape: Shape of the array.
        dtype: Dtype of the array.
    """

    column: int
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """Name of the array among all."""
        return f"{self.column}.{self.kind}"


@dataclass(frozen=True)
class TailLayout:
    """The layout of a tail file: what lies where.

    Args:
        columns: How each column is kept, by name.
        rows: Rows that the file has room for.
        identity: 16 digits that no other file has; the seed of checksums.
        block_rows: Rows that share a checksum.
    """

    columns: Mapping[str, TailColumn]
    rows: int
    identity: str
    block_rows: int

    @memo
    def parts(self) -> tuple[ColumnBuffer, ...]:
        """The arrays that the rows lie in."""
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
        """The columns whose values lie in a file of their own."""
        return tuple(column for column in self.columns.values() if column.is_object)

    @property
    def has_objects(self) -> bool:
        """Whether some column's values lie in a file of their own."""
        return bool(self.objects)

    @property
    def sums(self) -> int:
        """Checksums of a block: one for each part, and one for its bytes in the file of objects."""
        return len(self.parts) + self.has_objects

    @memo
    def seed(self) -> int:
        """The seed of checksums, so that those of another file differ."""
        return int(self.identity, 16)

    @memo
    def description(self) -> bytes:
        """The content of the head, as JSON."""
        columns = {name: _described(column) for name, column in self.columns.items()}
        numbers = {"identity": self.identity, "rows": self.rows, "block_rows": self.block_rows}
        return json.dumps({**numbers, "columns": columns}).encode()

    @property
    def place_words(self) -> int:
        """Words of 8 bytes that a commit takes: its rows, a number for each column, the checksums of the
        block in progress, and its own checksum.
        """
        return 2 + len(self.columns) + self.sums

    @property
    def blocks(self) -> int:
        """Number of blocks; the last one may be shorter."""
        return -(-self.rows // self.block_rows)

    @memo
    def memory(self) -> BatchLayout:
        """The layout of the arrays among the rows."""
        return BatchLayout({part.name: (part.shape, part.dtype) for part in self.parts})

    @memo
    def begins(self) -> Mapping[str, int]:
        """Offset of each part of the file, in whole pages, and of its end."""
        place, live = 8 * self.place_words, 8 * (LIVE + len(self.columns))
        sizes = {
            "head": _HEAD.size + len(self.description),
            "synced place": place,
            "live": live + 2 * place,
            "other synced place": place,
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
        """Length of the file."""
        return self.begins["end"]

    # ------------------------------------------------------------------ from and to memory

    def head(self) -> bytes:
        """Return the content of the first page or pages."""
        return _HEAD.pack(_MAGIC, FORMAT, len(self.description), checksum(self.description)) + self.description

    def live(self, memory: Any) -> npt.NDArray[np.int64]:
        """Return the numbers of the live page; the last ones are those of the columns."""
        return np.frombuffer(memory, np.int64, LIVE + len(self.columns), self.begins["live"])

    def places(self, memory: Any) -> list[npt.NDArray[np.uint64]]:
        """Return the places of commits, each ``[place_words]``: two that do not wait for the disk, two that do."""
        first = self.begins["live"] + 8 * (LIVE + len(self.columns))
        synced = self.begins["synced place"], self.begins["other synced place"]
        places = first, first + 8 * self.place_words, *synced
        return [np.frombuffer(memory, np.uint64, self.place_words, begin) for begin in places]

    def table(self, memory: Any) -> npt.NDArray[np.uint64]:
        """Return the checksums of full blocks, ``[blocks, sums]``."""
        words = np.frombuffer(memory, np.uint64, self.blocks * self.sums, self.begins["blocks"])
        return words.reshape(self.blocks, self.sums)

    def arrays(self, memory: Any) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of all parts, by name."""
        return self.memory.arrays(memoryview(memory)[self.begins["rows"] :]) if self.parts else {}


def usual_block_rows(columns: Mapping[str, TailColumn]) -> int:
    """Return how many rows share a checksum in a new file: some 100 kB, and 1024 rows at most."""
    row_bytes = sum(column.row_bytes for column in columns.values())
    return max(16, min(_MOST_IN_A_BLOCK, _BLOCK_BYTES // max(row_bytes, 1)))


def may_differ(column: TailColumn) -> bool:
    """Whether rows of a column may differ in length; a null has none."""
    if not column.shape:
        return False
    return column.nullable or (column.widths is not None and column.widths[0] != column.widths[1])


def check_rows(columns: Mapping[str, TailColumn], rows: int) -> None:
    """Raise ConfigError if there cannot be room for so many rows."""
    widest = max((column.width for column in columns.values() if column.shape and not column.is_object), default=1)
    if not 0 < rows <= _MOST_VALUES // max(widest, 1) - 1:
        raise ConfigError(f"tail: expected 1..{_MOST_VALUES // max(widest, 1) - 1} rows, found {rows}")


def read_layout(path: str, read: Callable[[int, int], bytes], image_roots: tuple[str, ...] = ()) -> TailLayout:
    """Return the layout that the head of a file describes.

    Args:
        path: The file, for messages.
        read: Returns ``count`` bytes of the file from an offset on, or fewer at its end.
        image_roots: Folders in which images that are named by path may lie.

    Raises:
        DataError: The file is no tail file, or is damaged, or a newer version wrote it.
    """
    head = read(0, _HEAD.size)
    if len(head) < _HEAD.size or head[:8] != _MAGIC:
        raise damaged(path, "expected a tail of appended rows, found something else")
    _, version, size, expected = _HEAD.unpack(head)
    if version > FORMAT:
        raise damaged(path, f"expected format {FORMAT} or older, found {version}: a newer release wrote it")
    described = read(_HEAD.size, min(size, MOST_JSON))
    if len(described) < size or checksum(described) != expected:
        raise damaged(path, "expected a head as it was written, found damage")
    said = json.loads(described)
    columns = {str(name): _column(column, image_roots) for name, column in said["columns"].items()}
    rows, identity = int(said["rows"]), str(said["identity"])
    if _IDENTITY.fullmatch(identity) is None:
        raise damaged(path, f"expected an identity of 16 hexadecimal digits, found {identity!r:.40}")
    check_rows(columns, rows)
    block_rows = said["block_rows"]
    if type(block_rows) is not int or not 0 < block_rows <= _MOST_IN_A_BLOCK:
        raise damaged(path, f"expected 1..{_MOST_IN_A_BLOCK} rows with one checksum, found {block_rows!r:.40}")
    layout = TailLayout(columns, rows, identity, block_rows)
    if layout.description != described or not columns:
        raise damaged(path, "expected a description of columns, found another")
    return layout


def _described(column: TailColumn) -> dict[str, Any]:
    kind, stored = column.kind, column.arrow_type
    schema = None if stored is None else pa.schema([pa.field("", stored)]).serialize().to_pybytes()
    return {
        "kind": [kind.kind, kind.value_type, kind.depth],
        "shape": list(map(int, column.shape)),
        "arrow_type": None if schema is None else base64.b64encode(schema).decode(),
        "widths": None if column.widths is None else list(map(int, column.widths)),
        "bounds": None if column.bounds is None else [_plain(bound) for bound in column.bounds],
        "pixel": column.pixel.name,
        **{name: kind(getattr(column, name)) for name, kind in _PLAIN.items()},
    }


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number


def _column(said: Mapping[str, Any], image_roots: tuple[str, ...]) -> TailColumn:
    kind, value_type, depth = said["kind"]
    stored = said["arrow_type"]
    if stored is not None:
        stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(stored))).field(0).type
    elif kind not in ("scalar", "list") or value_type not in NUMPY_NAMES:
        raise ValueError(f"expected numbers, found {kind} of {value_type}")
    shape, widths, bounds = said["shape"], said["widths"], said["bounds"]
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
        bounds=None if bounds is None else (bounds[0], bounds[1]),
        pixel=np.dtype(str(said["pixel"])),
        image_roots=image_roots,
        **{name: kind(said[name]) for name, kind in _PLAIN.items()},
    )
