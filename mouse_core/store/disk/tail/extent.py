"""An extent whose memory is a mapped file; the count of rows stands in the same file.

Values that are no numbers (strings, bytes, encoded images, whatever else Arrow holds) lie in a file beside the rows.
They are written row by row, in the order of the columns, before the row that has them counts. The length of each value
stands with the rows; -1 is a null. So of the rows ("ab", None) and ("c", b"xyz") there are six bytes,
``abcxyz``, and the sizes 2, -1 and 1, 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.columns.appended import TailColumn
from mouse_core.columns.extent import ColumnExtent, Extent, NumbersExtent, ObjectExtent
from mouse_core.errors import DataError
from mouse_core.files.locking import Descriptor
from mouse_core.files.mapped import open_file
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import storing, write_at
from mouse_core.store.disk.tail.commits import UNIT
from mouse_core.store.disk.tail.layout import TailLayout

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_TEXT = (pa.types.is_string, pa.types.is_large_string)
_BINARY = (pa.types.is_binary, pa.types.is_large_binary)


def objects_path(path: Path) -> Path:
    """Where the values of a tail file's objects are."""
    return path.with_suffix(".objects")


class ObjectsFile(Descriptor):
    """The values, one behind the other; whoever opened it says where they end.

    Args:
        path: The file.
        create: Whether there is none yet.
        write: Whether it is written to.
    """

    def __init__(self, path: Path, *, create: bool = False, write: bool = True) -> None:
        self.path = path
        self._file = open_file(path, create=create, write=write)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from one offset to another; raises DataError where the file is shorter."""
        size, found = os.fstat(self._file).st_size, []
        if end > size:
            raise DataError(f"{self.path}: expected {end} bytes or more, found {size}")
        while begin < end and (piece := os.pread(self._file, min(end - begin, 1 << 30), begin)):
            found.append(piece)
            begin += len(piece)
        return b"".join(found)

    def sync(self) -> None:
        """Wait until the values are on the disk; raises OSError if they are not."""
        getattr(os, "fdatasync", os.fsync)(self._file)


class FiledObjects(ObjectExtent):
    """Objects of one column, and the bytes of those that are not written yet.

    Args:
        column: How the values are kept.
        sizes: Bytes of each value, int64 ``[rows]``; -1 for nulls.
        before: The values of the rows that are there.
    """

    def __init__(self, column: TailColumn, sizes: npt.NDArray[np.int64], before: pa.Array) -> None:
        super().__init__(column)
        self.sizes, self._before = sizes, before
        self._encode = _encoder(column.arrow_type)
        self._written = 0
        self.encoded: list[bytes | None] = []
        """The bytes of the values that are not written yet."""

    def write(self, row: int, value: Any) -> None:
        """As for any column of objects."""
        row -= len(self._before)
        super().write(row, value)
        del self.encoded[row - self._written :]
        self.encoded.append(None if value is None else self._encode(value))

    def forget(self, row: int) -> None:
        """As for any column of objects."""
        super().forget(row - len(self._before))
        del self.encoded[len(self._items) - self._written :]

    def written(self, begin: int, end: int) -> None:
        """Note that the values of rows ``begin .. end - 1`` are written."""
        self.sizes[begin:end] = [-1 if value is None else len(value) for value in self.encoded]
        self._written, self.encoded = len(self._items), []

    def to_arrow(self, rows: int) -> pa.Array:
        """The first ``rows`` values, copied."""
        before = len(self._before)
        if rows <= before:
            return self._before.slice(0, rows)
        later = pa.array(self._items[: rows - before], self.column.arrow_type)
        return pa.concat_arrays([self._before, later]) if before else later


def read_objects(
    file: ObjectsFile, layout: TailLayout, arrays: Mapping[str, Any], at: int, begin: int, end: int
) -> tuple[int, list[pa.Array]]:
    """Return the offset behind the objects of some rows, and the objects by column.

    Args:
        file: The file of objects.
        layout: The layout of the rows.
        arrays: The arrays of all parts, by name.
        at: Offset of the objects of row ``begin``.
        begin: The first row.
        end: The row after the last.

    Raises:
        DataError: The bytes are no such values.
    """
    sizes = [arrays[part.name][begin:end] for part in layout.parts if part.kind == "sizes"]
    with reading(file.path):
        values = _objects(file, at, layout.objects, np.stack(sizes, axis=1))
    return at + sum(int(np.maximum(some, 0).sum()) for some in sizes), values


def _objects(file: ObjectsFile, at: int, columns: Sequence[TailColumn], table: npt.NDArray[np.int64]) -> list[pa.Array]:
    if not table.size:
        return [pa.array([], column.arrow_type) for column in columns]
    if table.min() < -1:
        raise DataError(f"{file.path}: expected sizes, found {table.min()}")
    ends = np.cumsum(np.maximum(table, 0)).reshape(table.shape)
    content = memoryview(file.read(at, at + int(ends[-1, -1])))
    begins = ends - np.maximum(table, 0)
    arrays = []
    for number, column in enumerate(columns):
        there = table[:, number] >= 0
        places = zip(begins[:, number].tolist(), ends[:, number].tolist(), there.tolist(), strict=True)
        values = [content[begin:end] if is_there else None for begin, end, is_there in places]
        array = _decoded(values, column.arrow_type)
        array.validate(full=True)
        if array.type != column.arrow_type:
            raise DataError(f"{file.path}: expected {column.arrow_type}, found {array.type}")
        arrays.append(array)
    return arrays


# ---------------------------------------------------------------------- values as bytes


def _encoder(kind: pa.DataType) -> Callable[[Any], bytes]:
    """How values of a type become bytes."""
    if any(test(kind) for test in (*_TEXT, *_BINARY)):
        return lambda item: _plain_bytes(item, kind)
    if kind == _IMAGE:
        return _image_bytes
    return lambda item: bytes(pa.record_batch([pa.array([item], kind)], [""]).serialize())


def _plain_bytes(item: Any, kind: pa.DataType) -> bytes:
    if type(item) is bytes:
        return item
    return item.encode() if type(item) is str else bytes(pa.scalar(item, kind).as_buffer())


def _image_bytes(item: Mapping[str, Any]) -> bytes:
    """An image as the length of its path, 4 bytes, the path, and its content; lengths count from 1, 0 is none.

    A picture ``b"PNG"`` without a path: 00 00 00 00 01 50 4e 47.
    """
    path, content = item.get("path"), item.get("bytes")
    name = b"" if path is None else os.fspath(path).encode()
    length = (0 if path is None else len(name) + 1).to_bytes(4, "little")
    return length + name + (b"\0" if content is None else b"\1" + bytes(content))


def _decoded(values: Sequence[memoryview | None], kind: pa.DataType) -> pa.Array:
    if any(test(kind) for test in _TEXT):
        return pa.array([None if value is None else bytes(value).decode() for value in values], kind)
    if any(test(kind) for test in _BINARY):
        return pa.array(values, kind)
    if kind == _IMAGE:
        return pa.array([None if value is None else _image(value) for value in values], kind)
    schema, nothing = pa.schema([pa.field("", kind)]), pa.nulls(1, kind)
    batches = [nothing if value is None else _one(pa.ipc.read_record_batch(value, schema)) for value in values]
    return pa.concat_arrays(batches)


def _one(batch: pa.RecordBatch) -> pa.Array:
    if batch.num_rows != 1:
        raise DataError(f"expected one value, found {batch.num_rows}")
    column = batch.column(0)
    column.validate(full=True)
    return column


def _image(value: memoryview) -> dict[str, Any]:
    length = int.from_bytes(value[:4], "little")
    end = 4 + max(length - 1, 0)
    if not 4 < end + 1 <= len(value):
        raise DataError(f"expected an image, found a path of {length - 1} bytes among {len(value)}")
    path = bytes(value[4:end]).decode() if length else None
    return {"bytes": bytes(value[end + 1 :]) if value[end] else None, "path": path}


# ---------------------------------------------------------------------- rows


class TailExtent(Extent):
    """Room for rows in a mapped file.

    Args:
        layout: The layout of the file.
        extents: The columns, over the memory of the file.
        count: Rows that are there.
        told: Memory that the count is written to, int64; None: the extent takes no row.
        objects: The file of objects, if some column has objects.
        objects_end: Offset of the objects of the next row.
    """

    note_at: int
    """Rows from which on ``note`` is called."""

    note: Callable[[], None]

    most_bytes: int | None = None
    """Bytes of objects from which on the file takes no more rows; None: their bytes do not count."""

    keeps_together = True
    """Whether rows that come together are in one file, however many bytes their objects have."""

    def __init__(
        self,
        layout: TailLayout,
        extents: dict[str, ColumnExtent],
        count: int,
        told: Any = None,
        objects: ObjectsFile | None = None,
        objects_end: int = 0,
    ) -> None:
        super().__init__(layout.columns, layout.rows, extents, count)
        if told is not None:
            self._sort()
        self._told, self._objects, self.objects_end = told, objects, objects_end
        self._filed = [extent for extent in extents.values() if isinstance(extent, FiledObjects)]
        self.note_at, self.note = layout.rows + 1, _note_nothing

    def append(self, row: Mapping[str, Any]) -> bool:
        """As for any extent; raises StorageError where objects cannot be written."""
        if not Extent.append(self, row):
            return False
        if self._objects is not None:
            self._write_objects(self._objects, self.count - 1)
        count = self.count
        self._told[0] = count * UNIT
        if count >= self.note_at:
            self.note()
        return True

    def put(self, row: Mapping[str, Any]) -> None:
        """As for any extent; raises StorageError where objects cannot be written."""
        Extent.put(self, row)
        if self._objects is not None:
            self._write_objects(self._objects, self.count - 1)
        self._told[0] = self.count * UNIT
        if self.count >= self.note_at:
            self.note()

    def put_many(self, prepared: Mapping[str, Any], done: int, rows: int) -> int:
        """As for any extent; raises StorageError where objects cannot be written."""
        taken, some = 0, rows if self._objects is None or self.keeps_together else 1
        while taken < rows and self.count < self.rows:
            # How many bytes their objects have is known once they are written: 1 row, 2 rows, 4 rows.
            some = min(some, rows - taken)
            Extent.put_many(self, prepared, done + taken, some)
            if self._objects is not None:
                self._write_objects(self._objects, self.count - some)
            taken, some = taken + some, 2 * some
        self._told[0] = self.count * UNIT
        if self.count >= self.note_at:
            self.note()
        return taken

    def settle(self) -> None:
        """Count all rows, also one after which an interrupt came at once; a StorageError takes that row back."""
        if self._objects is not None and self._filed[0].encoded:
            self._write_objects(self._objects, self.count)
        self._told[0] = self.count * UNIT

    def _write_objects(self, file: ObjectsFile, begin: int) -> None:
        """Write the objects of the rows from ``begin`` on, or take these rows back."""
        # Those of a row before it may not be written, where an interrupt came between.
        begin = min(begin, self.count - len(self._filed[0].encoded))
        rows = zip(*(extent.encoded for extent in self._filed), strict=True)
        content = b"".join(value for row in rows for value in row if value is not None)
        try:
            with storing(f"objects {file.path}"):
                write_at(file.file, content, self.objects_end)
        except BaseException:
            self.count = begin
            for extent in self.extents.values():
                extent.forget(begin)
            raise
        for extent in self._filed:
            extent.written(begin, self.count)
        self.objects_end += len(content)
        if self.most_bytes is not None and self.objects_end >= self.most_bytes:
            self.rows = self.count  # there is no room for more


def _note_nothing() -> None:
    """Do nothing."""


def column_extents_of(
    layout: TailLayout,
    arrays: Mapping[str, Any],
    since: npt.NDArray[np.int64],
    objects: Sequence[pa.Array],
    rows: int,
    known: Mapping[str, ColumnExtent] | None = None,
) -> dict[str, ColumnExtent]:
    """Return the columns of a file, over its memory.

    Args:
        layout: The layout of the file.
        arrays: The arrays of all parts, by name.
        since: For each column, from which row on rows differ in length; see ``NumbersExtent``.
        objects: The values of columns of objects so far.
        rows: Rows that are there.
        known: Columns from an earlier call that are the same with these rows.
    """
    filed, known = iter(objects), known or {}
    return {
        name: known[name]
        if name in known
        else FiledObjects(column, arrays[f"{number}.sizes"], next(filed))
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
    """Raise DataError if rows that differ in length lie elsewhere than among the values."""
    for part in layout.parts:
        if part.kind == "ends" and since[part.column]:
            ends, most = arrays[part.name][: rows + 1], len(arrays[f"{part.column}.values"])
            if ends[0] != 0 or ends[-1] > most or (ends[1:] < ends[:-1]).any():
                name = list(layout.columns)[part.column]
                raise damaged(path, f"expected rows of column {name!r} among its values, found others")
