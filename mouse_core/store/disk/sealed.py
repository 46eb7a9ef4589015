"""Sealed segments: Arrow files that are written once, and opened when somebody reads their rows.

In the layout "columns" a file has one record batch, in which all values of a column lie side by side. In the layout
"windows" it has many small ones, so that all columns of a window lie together: fewer and larger reads where rows come
from a disk, or from further away.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.addresses import check_rows
from mouse_core._arrow.windows import Int64s
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.errors import DataError
from mouse_core.files.checksum import check, digest
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.files.writing import remove, storing, sync_files, sync_folders
from mouse_core.store._segments import Segment
from mouse_core.store.disk.folder import ReadFolder
from mouse_core.store.disk.leases import Shared
from mouse_core.store.disk.manifest import Sealed, bare_schema, check_identity

if TYPE_CHECKING:  # loaded where it is used
    from mouse_core.files.ipc.summed import SummedFile

MOST_BYTES = 64 << 20
"""About how many bytes a sealed segment has, at most, unless a row has more."""

_SIZED_BY = 64

LAYOUTS = ("columns", "windows")
"""How rows lie in sealed segments."""

# Record batches that were made last are kept, so many of each file.
_KEPT = 64
# A record batch of the layout "windows" has so many bytes, about, as far as so many rows are enough, and not too many.
_BATCH_BYTES, _FEWEST_ROWS, _MOST_ROWS = 1 << 15, 128, 256


def write_segment(folder: Path, number: int, table: pa.Table, layout: str) -> tuple[Sealed, pa.Schema]:
    """Write rows as a sealed segment, and wait until it is on the disk.

    Args:
        folder: The store's.
        number: Which no file has had.
        table: The rows, at least one.
        layout: Of ``LAYOUTS``.

    Returns:
        What a manifest says of it, apart from the number of its schema, and that schema.

    Raises:
        StorageError: It cannot be written; nothing is left.
    """
    batch = one_batch(table)
    nulls = tuple(name for name, column in zip(batch.schema.names, batch.columns, strict=True) if _is_null(column))
    sealed = Sealed(number, batch.num_rows, 0, "", 0, nulls=nulls)
    if layout == "windows":
        sealed = sealed._replace(batch_rows=_rows_of_batch(batch))
    path = folder / sealed.name
    with storing(f"segment {path}"):
        try:
            sealed = _write(path, batch, sealed)
            sync_files([path])
            sync_folders([path.parent])
        except BaseException:
            remove(path)
            raise
    return sealed, batch.schema


def _write(path: Path, batch: pa.RecordBatch, sealed: Sealed) -> Sealed:
    """Write a file; what is known of it then."""
    if sealed.batch_rows:
        from mouse_core.files.ipc.summed import write_summed  # loaded where it is used

        stride, written = write_summed(path, batch, sealed.batch_rows)
        return sealed._replace(bytes=os.path.getsize(path), digest=written, stride=stride)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return sealed._replace(bytes=len(memory), digest=digest(memory))


def _rows_of_batch(batch: pa.RecordBatch) -> int:
    """How many rows a record batch of the layout "windows" has, a power of two.

    Rows of 175 bytes: 187 are 32 KB, and a record batch has 128; of 20 bytes: 256; of pictures: 128.
    """
    rows = _BATCH_BYTES // max(1, batch.nbytes // batch.num_rows)
    power = 1 << max(int(rows).bit_length() - 1, 0)
    return min(max(power, _FEWEST_ROWS), _MOST_ROWS)


def _is_null(column: pa.Array) -> bool:
    return bool(column.null_count == len(column))


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """The rows side by side, in types that every process knows."""
    columns = [_plain(column).combine_chunks() for column in table.columns]
    arrays = [column.chunk(0) if isinstance(column, pa.ChunkedArray) else column for column in columns]
    names = table.schema.names
    schema = pa.schema([pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without extension types, which only a process knows that has imported who made them."""
    storage = getattr(column.type, "storage_type", None)
    return column if storage is None else pa.chunked_array([chunk.storage for chunk in column.chunks], storage)


def pieces_of(segment: Segment, most_bytes: int = MOST_BYTES, most_rows: int | None = None) -> Iterator[pa.Table]:
    """The rows of a segment in tables, each about as large as a sealed segment is to be."""
    origin, row = segment.origin, 0
    rows = min(_SIZED_BY, most_rows or _SIZED_BY)
    while row < segment.num_rows:
        count = min(rows, segment.num_rows - row)
        if origin is not None and segment.has_indices:
            table = origin.with_format("arrow")[row : row + count]  # which knows how to pick many rows at once
            check_rows(table, f"dataset, rows {row}..{row + count - 1}", whole=False)
        else:
            table = segment.take(row, count)
        if count == rows and rows == _SIZED_BY and row == 0 and segment.num_rows > rows:
            # The first rows say how large others are.
            rows = max(1, min(most_rows or segment.num_rows, most_bytes // max(table.nbytes // count, 1)))
            continue
        if count > 1 and table.nbytes > 2 * most_bytes:
            # Larger than those before: fewer of them.
            rows = max(1, count * most_bytes // table.nbytes)
            continue
        yield table
        row += count


# ---------------------------------------------------------------------- reading


class SealedFile:
    """The file of a sealed segment, opened when its table is asked for and then held against its digest, once.

    Args:
        folder: The store's.
        sealed: What the manifest says of it.
        schema: Its columns.
        first: How many rows of the folder were before its first.
        identity: The store's; see ``Manifest``.
        verify: Whether every byte is read before any is believed, which takes as long as reading the file once.
    """

    # Keeps the file where it lies, for as long as this object may be asked for rows.
    kept: Shared | None = None

    def __init__(
        self, folder: Path, sealed: Sealed, schema: pa.Schema, first: int, identity: str = "", *, verify: bool
    ) -> None:
        self.folder, self.sealed, self.schema, self.first, self.verify = folder, sealed, schema, first, verify
        self.identity = identity
        self._lock, self._made = ProcessLock(), OrderedDict[int, pa.RecordBatch]()

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder / self.sealed.name

    @property
    def table(self) -> pa.Table:
        """Its rows, over the mapped file; of a file of many record batches made anew, for they take memory.

        Raises:
            DataError: It is not the file that was written.
        """
        if isinstance(self.opened, pa.Table):
            return self.opened
        return pa.Table.from_batches(self.opened.batches(range(len(self.opened))))

    @memo
    def opened(self) -> pa.Table | SummedFile:
        """Its rows, as a table, or in record batches that are made when they are asked for; raises as ``table``."""
        path, sealed = self.path, self.sealed
        if not path.exists():
            # The manifest that spoke of it may be an old one.
            return rows_of(self.folder, self.first, sealed.rows, self.identity, but=sealed.number)
        check_inside([path], self.folder)
        with reading(path):
            size = os.path.getsize(path)
            if size != sealed.bytes:
                raise damaged(path, f"expected {sealed.bytes} bytes as were written, found {size}")
            if sealed.batch_rows:
                with path.open("rb") as stream:
                    return self._summed(mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ))
            with pa.memory_map(str(path)) as source:
                return self._whole(source.read_buffer(size))

    def _summed(self, memory: mmap.mmap) -> SummedFile:
        from mouse_core.files.ipc.summed import SummedFile  # loaded where it is used

        sealed = self.sealed
        expected = sealed.digest if self.verify else None
        file = SummedFile(self.path, memory, self.schema, sealed.rows, sealed.batch_rows, expected)
        file.check_stride(sealed.stride)
        return file

    def _whole(self, buffer: pa.Buffer) -> pa.Table:
        """The rows of a file of one record batch."""
        sealed = self.sealed
        if self.verify:
            check(self.path, "the file", sealed.digest, digest(buffer))
        reader = pa.ipc.open_file(buffer)
        if reader.num_record_batches != 1:
            raise DataError(f"expected one record batch, found {reader.num_record_batches}")
        batch = reader.get_batch(0)
        if batch.num_rows != sealed.rows or not bare_schema(batch.schema).equals(self.schema):
            raise DataError(
                f"expected {sealed.rows} rows of the columns {self.schema.names}, found {batch.num_rows} of "
                f"{batch.schema.names}"
            )
        return pa.Table.from_batches([batch])

    def take(self, row: int, count: int) -> pa.Table:
        """Some of its rows; makes the record batches that they are in and no others."""
        if isinstance(self.opened, pa.Table):
            return self.opened.slice(row, count)
        size = self.opened.batch_rows
        numbers = range(row // size, -(-(row + count) // size)) if count else range(1)
        taken = pa.Table.from_batches(self.opened.batches(numbers))
        return taken.slice(row - numbers.start * size, count)

    def chunk(self, name: str, number: int) -> pa.Array:
        """One column of a record batch, without a copy."""
        if not isinstance(self.opened, pa.Table):
            return self._batch(number).column(name)
        size = self.sealed.batch_rows or self.sealed.rows
        return self.opened.column(name).slice(number * size, size).chunk(0)

    def _batch(self, number: int) -> pa.RecordBatch:
        """A record batch of a file of many; the last ones are kept, as one is asked for column by column."""
        with self._lock:
            if number in self._made:
                return self._made[number]
        assert not isinstance(self.opened, pa.Table)
        made = self.opened.batch(number)
        with self._lock:
            self._made[number] = made
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return made

    def strides(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """Record batches whose values lie as far from their beginning as those of the first, and how far each is from
        that, int64 ``[n]`` each: those among ``numbers``, held against their checksums, or more where nothing is.

        Of none where that is not known.
        """
        stride = self.sealed.stride
        if not stride or isinstance(self.opened, pa.Table):
            return numbers[:0], numbers[:0]
        alike = numbers if self.verify else np.arange(len(self.opened))
        alike = alike[alike < self.opened.whole]
        self.opened.check(alike)
        return alike, alike * stride

    def column(self, name: str) -> pa.ChunkedArray:
        """One of its columns."""
        if isinstance(self.opened, pa.Table):
            return self.opened.column(name)
        return pa.chunked_array([one.column(name) for one in self.opened.batches(range(len(self.opened)))])

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the file; rows do not travel.
        return partial(SealedFile, verify=self.verify), (
            self.folder,
            self.sealed,
            self.schema,
            self.first,
            self.identity,
        )


def rows_of(folder: Path, first: int, count: int, identity: str = "", *, but: int = -1) -> pa.Table:
    """Rows that lie in sealed segments by now, in one chunk.

    Args:
        folder: The store's.
        first: How many rows were before them.
        count: How many they are.
        identity: The store's; see ``Manifest``.
        but: The number of a segment that is not there.

    Raises:
        DataError: They are not all kept, or another store is there.
    """
    manifest = ReadFolder(folder).manifest
    check_identity(folder, identity, manifest.identity)
    wanted, begin, parts = f"{folder}: expected rows {first}..{first + count - 1}", manifest.dropped, []
    if first < begin:
        raise DataError(f"{wanted}, found those before {begin} dropped")
    for sealed in manifest.segments:
        low, high = max(first, begin), min(first + count, begin + sealed.rows)
        if low < high:
            if sealed.number == but:
                rows = f"{first}..{first + count - 1}"
                raise damaged(folder / sealed.name, f"expected a file with the rows {rows}, found none")
            file = SealedFile(folder, sealed, manifest.schemas[sealed.schema], begin, verify=True)
            parts.append(file.take(low - begin, high - low))
        begin += sealed.rows
    if begin < first + count:
        raise DataError(f"{wanted}, found rows up to {begin - 1}")
    return pa.concat_tables(parts).combine_chunks()
