"""Sealed segments: Arrow files of one record batch each, written once and opened when somebody reads their rows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._base.memo import memo
from mouse_core.errors import DataError
from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import remove, storing, sync_files, sync_folders
from mouse_core.store._segments import Segment
from mouse_core.store.disk.folder import ReadFolder
from mouse_core.store.disk.leases import Lease
from mouse_core.store.disk.manifest import Sealed, bare_schema, check_identity

MOST_BYTES = 64 << 20
"""About how many bytes a sealed segment has, at most, unless a row has more."""

_SIZED_BY = 64


def digest_of(memory: Any) -> str:
    """The digest of some bytes, 32 hexadecimal digits; 64 MB take 3 ms where they are in memory."""
    import xxhash  # which comes with datasets

    return xxhash.xxh3_128_hexdigest(memory)


# ---------------------------------------------------------------------- writing


def write_segment(folder: Path, number: int, table: pa.Table) -> tuple[Sealed, pa.Schema]:
    """Write rows as a sealed segment, and wait until it is on the disk.

    Args:
        folder: The store's.
        number: Which no file has had.
        table: The rows, at least one.

    Returns:
        What a manifest says of it, apart from the number of its schema, and that schema.

    Raises:
        StorageError: It cannot be written; nothing is left.
    """
    batch = _one_batch(table)
    nulls = tuple(name for name, column in zip(batch.schema.names, batch.columns, strict=True) if _is_null(column))
    sealed = Sealed(number, batch.num_rows, 0, "", 0, nulls=nulls)
    path = folder / sealed.name
    with storing(f"segment {path}"):
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch)
            sync_files([path])
            sync_folders([path.parent])
            with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                sealed = sealed._replace(bytes=len(memory), digest=digest_of(memory))
        except BaseException:
            remove(path)
            raise
    return sealed, batch.schema


def _is_null(column: pa.Array) -> bool:
    return bool(column.null_count == len(column))


def _one_batch(table: pa.Table) -> pa.RecordBatch:
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
        if origin is not None and segment.is_picked:
            table = origin.with_format("arrow")[row : row + count]  # which knows how to pick many rows at once
        else:
            table = segment.take(row, count)
        if count == rows and rows == _SIZED_BY and row == 0 and segment.num_rows > rows:
            # The first rows say how large others are.
            rows = max(1, min(most_rows or segment.num_rows, most_bytes // max(table.nbytes // count, 1)))
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

    # Keeps the file where it lies, for as long as this object may be asked for rows. One for all that have none.
    lease = Lease()

    def __init__(
        self, folder: Path, sealed: Sealed, schema: pa.Schema, first: int, identity: str = "", *, verify: bool
    ) -> None:
        self.folder, self.sealed, self.schema, self.first, self.verify = folder, sealed, schema, first, verify
        self.identity = identity

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder / self.sealed.name

    @memo
    def table(self) -> pa.Table:
        """Its rows, over the mapped file.

        Raises:
            DataError: It is not the file that was written.
        """
        path, sealed = self.path, self.sealed
        if not path.exists():
            # The manifest that spoke of it may be an old one.
            return rows_of(self.folder, self.first, sealed.rows, self.identity, but=sealed.number)
        with reading(path):
            size = os.path.getsize(path)
            if size != sealed.bytes:
                raise damaged(path, f"expected {sealed.bytes} bytes as were written, found {size}")
            with pa.memory_map(str(path)) as source:
                buffer = source.read_buffer(size)
            if self.verify and digest_of(buffer) != sealed.digest:
                raise damaged(path, f"expected the digest {sealed.digest}, found {digest_of(buffer)}; it is damaged")
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

    def column(self, name: str) -> pa.ChunkedArray:
        """One of its columns."""
        return self.table.column(name)

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
            parts.append(file.table.slice(low - begin, high - low))
        begin += sealed.rows
    if begin < first + count:
        raise DataError(f"{wanted}, found rows up to {begin - 1}")
    return pa.concat_tables(parts).combine_chunks()


class SealedSegment(Segment):
    """The rows of a sealed file, in one chunk; making one opens nothing.

    Args:
        file: The file.
        image_roots: Folders in which images that rows name by path may lie.
        folder: What stands for the store's folder; see ``Segment.place``.
    """

    def __init__(self, file: SealedFile, image_roots: tuple[str, ...], folder: object) -> None:
        self.file, self.num_rows, self.place = file, file.sealed.rows, (folder, file.first)
        self.extent = object() if file.sealed.appended else None
        self._named_roots = image_roots
        self._parts, self._first_values = {}, {}
        self.__dict__.update(chunk_starts=np.array([0, self.num_rows]), _same_chunks=True, _is_mapped=False)

    @memo
    def table(self) -> pa.Table:
        """The steps."""
        return self.file.table

    @memo
    def types(self) -> dict[str, pa.DataType]:
        """Arrow types by column name."""
        return dict(zip(self.file.schema.names, self.file.schema.types, strict=True))

    def first_value(self, name: str, rows: int) -> tuple[int, Any] | None:
        """See ``Segment``; a column that is known to be null throughout is not looked into."""
        return None if name in self.file.sealed.nulls else super().first_value(name, rows)

    def has_value(self, name: str, rows: int) -> bool:
        """See ``Segment``; whether all values of a column are null is known of the whole file."""
        if rows != self.num_rows or name not in self.types:
            return super().has_value(name, rows)
        return name not in self.file.sealed.nulls

    @memo
    def _make_columns(self) -> dict[str, Callable[[], pa.ChunkedArray]]:  # type: ignore[override]
        # Of the file, not of the segment: a part that refers to its segment would keep the file mapped for too long.
        return {name: partial(self.file.column, name) for name in self.file.schema.names}

    def __reduce__(self) -> tuple[Any, ...]:
        return SealedSegment, (self.file, self._named_roots, self.place)
