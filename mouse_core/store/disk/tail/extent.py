"""The extent of a tail file: rows that are appended to a mapped file, which also holds the number of rows.

The mapped file has fixed-size values. "Objects" (strings, bytes, encoded images, other Arrow values) lie in a second
file, the objects file, row by row and in the order of the columns. The mapped file has the number of bytes of each
object, or -1 for a null. The rows ("ab", None) and ("c", b"xyz") give the six bytes ``abcxyz`` and the sizes 2, -1 and
1, 3.

Invariant: the objects of a row are written before the number of rows includes it, so a reader never sees a row without
its objects. If writing them fails, the extent removes the row again.
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
    """Return the path of the objects file of a tail file."""
    return path.with_suffix(".objects")


class ObjectsFile(Descriptor):
    """An open objects file: the bytes of all values in sequence. The caller keeps the offset of the end.

    Args:
        path: The file.
        create: Whether to create the file.
        write: Whether to open the file for writing.
    """

    def __init__(self, path: Path, *, create: bool = False, write: bool = True) -> None:
        self.path = path
        self._file = open_file(path, create=create, write=write)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes ``begin .. end - 1``; raises DataError if the file is shorter."""
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
    """The objects of one column, and the encoded bytes of values that are not in the objects file yet.

    Args:
        column: The column and its Arrow type.
        sizes: Bytes of each value, int64 ``[rows]``; -1 for nulls.
        before: The values of the rows that the file already has.
    """

    def __init__(self, column: TailColumn, sizes: npt.NDArray[np.int64], before: pa.Array) -> None:
        super().__init__(column)
        self.sizes, self._earlier = sizes, before
        self._encode = _encoder(column.arrow_type)
        self._written = 0
        self.encoded: list[bytes | None] = []
        """The bytes of the values that are not written yet."""

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
    """Read the objects of rows ``begin .. end - 1``; return the offset behind them, and an array for each column.

    Args:
        file: The file of objects.
        layout: The layout of the rows.
        arrays: The arrays of all parts, by name.
        at: Offset in the objects file of the objects of row ``begin``.
        begin: The first row.
        end: The row after the last.

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
    """Read the objects of rows from offset ``at`` on; ``table`` has their sizes, ``[rows, columns]``.

    The sizes 2, -1 and 1, 3 give the ends 2, 2, 3, 6 and the begins 0, 2, 2, 3 in ``content``.
    """
    if not table.size:
        return [pa.array([], column.arrow_type) for column in columns]
    if table.min() < -1:
        raise DataError(f"{file.path}: expected sizes, found {table.min()}")
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
    """Encode a text or bytes without a header."""
    if type(item) is bytes:
        return item
    return item.encode() if type(item) is str else bytes(pa.scalar(item, kind).as_buffer())


def _image_bytes(item: Mapping[str, Any]) -> bytes:
    """Encode an image: 4 bytes of path length plus 1 (0: no path), the path, a byte 1 (0: no content), the content.

    An image ``b"PNG"`` without a path is 00 00 00 00 01 50 4e 47, with the path "a" 02 00 00 00 61 01 50 4e 47.
    """
    path, content = item.get("path"), item.get("bytes")
    name = b"" if path is None else os.fspath(path).encode()
    length = (0 if path is None else len(name) + 1).to_bytes(4, "little")
    return length + name + (b"\0" if content is None else b"\1" + bytes(content))


def _to_arrow(values: Sequence[memoryview | None], kind: pa.DataType) -> pa.Array:
    """Decode the bytes of values to an array of an Arrow type; the inverse of ``_encoder``."""
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
        raise DataError(f"expected an image, found a path of {length - 1} bytes among {len(value)}")
    path = bytes(value[4:end]).decode() if length else None
    return {"bytes": bytes(value[end + 1 :]) if value[end] else None, "path": path}


# ---------------------------------------------------------------------- rows


class TailExtent(Extent):
    """An extent for the rows of a mapped file, and of its objects file.

    Args:
        layout: The layout of the file.
        extents: The columns, over the memory of the file.
        count: Number of rows that the file has.
        told: Array in the mapped file that the number of rows is written to, int64; None: no row can be appended.
        objects: The file of objects, if some column has objects.
        objects_end: Offset of the objects of the next row.
    """

    note_at: int
    """Number of rows from which on each append calls ``note``."""

    note: Callable[[], None]
    """Called after an append that reaches ``note_at``."""

    most_bytes: int | None = None
    """Bytes of objects at which the file is full; None: no limit."""

    keeps_together = True
    """Whether rows of one call stay in one file, even if their objects exceed ``most_bytes``."""

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
        self._shared_count, self._objects, self.objects_end = told, objects, objects_end
        self._object_columns = [extent for extent in extents.values() if isinstance(extent, FiledObjects)]
        self.note_at, self.note = layout.rows + 1, _note_nothing

    def append(self, row: Mapping[str, Any]) -> bool:
        """Append a row, see ``Extent.append``; raises StorageError if its objects cannot be written."""
        if not Extent.append(self, row):
            return False
        if self._objects is not None:
            self._write_objects(self._objects, self.count - 1)
        count = self.count
        self._shared_count[0] = count * UNIT
        if count >= self.note_at:
            self.note()
        return True

    def put(self, row: Mapping[str, Any]) -> None:
        """Append a prepared row, see ``Extent.put``; raises StorageError if its objects cannot be written."""
        Extent.put(self, row)
        if self._objects is not None:
            self._write_objects(self._objects, self.count - 1)
        self._shared_count[0] = self.count * UNIT
        if self.count >= self.note_at:
            self.note()

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
        if self.count >= self.note_at:
            self.note()
        return taken

    def settle(self) -> None:
        """Complete a row whose append was interrupted: write its objects and count it; StorageError removes the row."""
        if self._objects is not None and self._object_columns[0].encoded:
            self._write_objects(self._objects, self.count)
        self._shared_count[0] = self.count * UNIT

    def _write_objects(self, file: ObjectsFile, begin: int) -> None:
        """Write the objects of the rows from ``begin`` on; if that fails, remove these rows."""
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
    """Return the columns of a mapped file, as views of its memory.

    Args:
        layout: The layout of the file.
        arrays: The arrays of all parts, by name.
        since: For each column, the first row from which on rows differ in length; see ``NumbersExtent``.
        objects: The values that columns of objects already have.
        rows: Number of rows that the file has.
        known: Columns of an earlier call to reuse.
    """
    remaining_objects, known = iter(objects), known or {}
    return {
        name: known[name]
        if name in known
        else FiledObjects(column, arrays[f"{number}.sizes"], next(remaining_objects))
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
    """Raise DataError if the ends of rows of different lengths decrease, or lie outside the values of the column."""
    for part in layout.parts:
        if part.kind == "ends" and since[part.column]:
            ends, most = arrays[part.name][: rows + 1], len(arrays[f"{part.column}.values"])
            if ends[0] != 0 or ends[-1] > most or (ends[1:] < ends[:-1]).any():
                name = list(layout.columns)[part.column]
                raise damaged(path, f"expected rows of column {name!r} among its values, found others")
