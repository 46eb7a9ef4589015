"""Segments over the files of a store's folder: one sealed file, many sealed files, or the open tail file.

A sealed file is an Arrow file that is written once and opened when its rows are read. In the layout "columns" a file
has one record batch, in which all values of a column are contiguous. In the layout "windows" a file has many small
record batches, so all columns of a window are stored close together. Reading a window then needs fewer and larger reads
from disk or remote storage.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.addresses import check_rows
from mouse_core._arrow.column import ColumnPart
from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.windows import Int64s
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.columns.appended import Extent
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.ipc import SummedFile, write_summed
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.files.writing import remove, storing, sync_files, sync_folders
from mouse_core.store._segments import FileSegment, Segment, no_column
from mouse_core.store.disk.folder import Lease, ReadFolder, Sealed, Shared, check_identity
from mouse_core.store.disk.tail import TailReader

MOST_BYTES = 64 << 20
"""Approximate largest size of a sealed segment in bytes; a single row can be larger."""

_SIZED_BY = 64

LAYOUTS = ("columns", "windows")
"""Layouts of the rows in sealed segments."""

# Number of recently used record batches that are cached for each file.
_KEPT = 64
# The target size of a record batch of the layout "windows" in bytes, and the least and the largest number of its rows.
_BATCH_BYTES, _FEWEST_ROWS, _MOST_ROWS = 1 << 15, 128, 256


def write_segment(folder: Path, number: int, table: pa.Table, layout: str) -> tuple[Sealed, pa.Schema]:
    """Write rows as a sealed segment, and wait until the file is on disk.

    Args:
        folder: The store's folder.
        number: A new file number.
        table: The rows, at least one.
        layout: One of ``LAYOUTS``.

    Returns:
        The manifest's entry of the segment, without the index of the schema; and the schema.

    Raises:
        StorageError: The file cannot be written; no partial file remains.
    """
    batch = one_batch(table)
    nulls = tuple(name for name in batch.schema.names if batch.column(name).null_count == batch.num_rows)
    sealed = Sealed(number, batch.num_rows, 0, "", 0, nulls=nulls)
    if layout == "windows":
        sealed = sealed._replace(batch_rows=_rows_of_batch(batch))
    path = folder / sealed.name
    with storing(f"segment {path}"):
        try:
            body, stride, digest = write_summed(path, batch, sealed.step)
            sync_files([path])
            sync_folders([path.parent])
        except BaseException:
            remove(path)
            raise
    stride = stride if sealed.batch_rows else 0
    return sealed._replace(bytes=os.path.getsize(path), digest=digest, stride=stride, body=body), batch.schema


def _rows_of_batch(batch: pa.RecordBatch) -> int:
    """Return the number of rows per record batch in the layout "windows", which is a power of two.

    Example: 187 rows of 175 bytes fill 32 KB, so a record batch has 128 rows. Rows of 20 bytes give 256; rows with
    images give 128.
    """
    rows = _BATCH_BYTES // max(1, batch.nbytes // batch.num_rows)
    power = 1 << max(int(rows).bit_length() - 1, 0)
    return min(max(power, _FEWEST_ROWS), _MOST_ROWS)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Convert the table to one record batch without extension types."""
    columns = [_plain(column).combine_chunks() for column in table.columns]
    arrays = [column.chunk(0) if isinstance(column, pa.ChunkedArray) else column for column in columns]
    names = table.schema.names
    schema = pa.schema([pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column in its storage type, because a process can read an extension type only if the library that
    defines the type is imported."""
    storage = getattr(column.type, "storage_type", None)
    return column if storage is None else pa.chunked_array([chunk.storage for chunk in column.chunks], storage)


def pieces_of(segment: Segment, most_bytes: int = MOST_BYTES, most_rows: int | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a segment as tables of about the size of a sealed segment."""
    origin, row = segment.origin, 0
    rows = min(_SIZED_BY, most_rows or _SIZED_BY)
    while row < segment.num_rows:
        count = min(rows, segment.num_rows - row)
        if origin is not None and segment.has_indices:
            table = origin.with_format("arrow")[row : row + count]  # which picks many rows at once
            check_rows(table, f"dataset, rows {row}..{row + count - 1}", whole=False)
        else:
            table = segment.take(row, count)
        if count == rows and rows == _SIZED_BY and row == 0 and segment.num_rows > rows:
            # The first rows give an estimate of the size of the others.
            rows = max(1, min(most_rows or segment.num_rows, most_bytes // max(table.nbytes // count, 1)))
            continue
        if count > 1 and table.nbytes > 2 * most_bytes:
            # The rows are larger than estimated: take fewer rows.
            rows = max(1, count * most_bytes // table.nbytes)
            continue
        yield table
        row += count


# ---------------------------------------------------------------------- reading


class SealedFile:
    """The file of a sealed segment, which is opened when rows are first read.

    Args:
        folder: The store's folder.
        sealed: The manifest's entry of the file.
        schema: The columns of the file.
        first: Number of rows of the folder before the file's first row.
        identity: The identity of the store, as in its manifest.
        verify: Whether to compare the pages of a record batch with their checksums before the first use.
    """

    # The lease that keeps the file on disk while this object exists.
    kept: Shared | None = None
    # The first address and the size of the mapped file, once it was opened.
    mapped: tuple[int, int] | None = None

    def __init__(
        self, folder: Path, sealed: Sealed, schema: pa.Schema, first: int, identity: str = "", *, verify: bool
    ) -> None:
        self.folder, self.sealed, self.schema, self.first, self.verify = folder, sealed, schema, first, verify
        self.identity = identity
        self._lock, self._made = ProcessLock(), OrderedDict[int, pa.RecordBatch]()

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.folder / self.sealed.name

    @property
    def table(self) -> pa.Table:
        """The segment's rows, as a table over the mapped file; created again at each access, to save memory.

        Raises:
            DataError: The file's content differs from the written content.
        """
        return pa.Table.from_batches(self._batches(range(-(-self.sealed.rows // self.sealed.step))))

    @memo
    def opened(self) -> pa.Table | SummedFile:
        """Return the mapped file; if the file was removed, return the rows from newer files as a table. Raises the
        errors of ``table``.
        """
        path, sealed = self.path, self.sealed
        if not path.exists():
            # The file was removed: the entry comes from an old manifest.
            return rows_of(self.folder, self.first, sealed.rows, self.identity, but=sealed.number)
        check_inside([path], self.folder)
        with reading(path):
            size = os.path.getsize(path)
            if size != sealed.bytes:
                raise damaged(path, f"expected {sealed.bytes} bytes, as written, found {size}")
            memory: Any
            if sealed.batch_rows:
                with path.open("rb") as stream:
                    memory = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
            else:  # all columns are read from the start to the end, so the kernel's own readahead helps
                with pa.memory_map(str(path)) as source:
                    memory = source.read_buffer(size)
            expected = sealed.digest if self.verify else None
            opened = SummedFile(path, memory, self.schema, sealed.rows, sealed.step, sealed.body, expected)
            opened.check_stride(sealed.stride)
        self.mapped = opened.buffer.address, opened.buffer.size
        return opened

    def take(self, row: int, count: int) -> pa.Table:
        """Return ``count`` rows from ``row`` on; only the record batches with these rows are created."""
        size = self.sealed.step
        numbers = range(row // size, -(-(row + count) // size)) if count else range(1)
        return pa.Table.from_batches(self._batches(numbers)).slice(row - numbers.start * size, count)

    def chunk(self, name: str, number: int) -> pa.Array:
        """Return one column of a record batch, without a copy. Recently used batches are cached, because columns are
        requested one by one.
        """
        with self._lock:
            found = self._made.get(number)
        if found is None:
            (found,) = self._batches(range(number, number + 1))
            with self._lock:
                self._made[number] = found
                if len(self._made) > _KEPT:
                    self._made.popitem(last=False)
        return found.column(name)

    def _batches(self, numbers: range) -> list[pa.RecordBatch]:
        """Return some of the file's record batches."""
        opened, size = self.opened, self.sealed.step
        if isinstance(opened, pa.Table):
            return [opened.slice(number * size, size).to_batches()[0] for number in numbers]
        return opened.batches(numbers)

    def strides(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """Return two arrays, int64 ``[n]``: the indices of the record batches that have the layout of the first batch,
        and the distance of each of these batches from the first batch in bytes.

        If checksums are compared, the result contains only batches of ``numbers`` that were checked; else the result
        can contain other batches too. Both arrays are empty if the distances are unknown.
        """
        stride = self.sealed.stride
        if not stride or isinstance(self.opened, pa.Table):
            return numbers[:0], numbers[:0]
        alike = numbers if self.verify else np.arange(len(self.opened))
        alike = alike[alike < self.opened.whole]
        self.opened.check(alike)
        return alike, alike * stride

    def __reduce__(self) -> tuple[Any, ...]:
        # Rows are not pickled: the receiving process opens the file.
        make = partial(SealedFile, verify=self.verify)
        return make, (self.folder, self.sealed, self.schema, self.first, self.identity)


def rows_of(folder: Path, first: int, count: int, identity: str = "", *, but: int = -1) -> pa.Table:
    """Return rows of a folder as one chunk; the rows are read from the folder's current sealed segments.

    Args:
        folder: The store's folder.
        first: Number of rows of the folder before the first returned row.
        count: Number of rows to return.
        identity: The identity of the store, as in its manifest.
        but: The file number of a segment whose file is missing.

    Raises:
        DataError: Some of the requested rows were dropped or are in the missing file, or the folder holds another
            store.
    """
    manifest = ReadFolder(folder).manifest
    check_identity(folder, identity, manifest.identity)
    wanted, begin, parts = f"{folder}: expected rows {first}..{first + count - 1}", manifest.dropped, []
    if first < begin:
        raise DataError(f"{wanted}, found only rows from {begin} on; earlier rows were dropped")
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


FEWEST = 64
"""Smallest number of sealed files that are joined to one segment.

If there are fewer files, each file is a segment. In the layout "windows", in which a file has many record batches, two
files are enough for a joined segment. The chunks of joined files are recorded only once.
"""


class TailSegment(Segment):
    """A segment of the rows that a tail file had when the segment was created."""

    # The lease that keeps the file on disk for other processes.
    lease = Lease()
    _source: tuple[Path, str, int, str, str]
    _show: Callable[[], None] | None = None

    @classmethod
    def of(
        cls,
        extent: Extent,
        image_roots: tuple[str, ...],
        place: tuple[object, int],
        source: tuple[Path, str, int, str, str],
        show: Callable[[], None] | None = None,
        lease: Lease | None = None,
    ) -> TailSegment:
        """Return the present rows of an extent.

        Args:
            extent: The extent.
            image_roots: See ``Segment``.
            place: See ``Segment``.
            source: The folder, the file's name, the number of the folder's rows before the file, and the identities of
                file and store.
            show: Function that makes the rows visible to other processes.
            lease: The lease on a state of the folder that names the file.
        """
        segment = cls.of_extent(extent, image_roots)
        assert isinstance(segment, TailSegment)
        segment.place, segment._source, segment._show = place, source, show
        if lease is not None:
            segment.lease = lease
        return segment

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiving process opens this file, or the sealed file that holds the rows by then.
        if self._show is not None:
            self._show()
        return rows_at, (self._source, self.num_rows, self._named_roots)


def rows_at(source: tuple[Path, str, int, str, str], count: int, image_roots: tuple[str, ...]) -> Segment:
    """Return rows of a folder from the tail file, or from sealed segments if the tail was sealed.

    Args:
        source: See ``TailSegment.of``.
        count: Number of rows.
        image_roots: See ``Segment``.

    Raises:
        DataError: The rows were dropped.
    """
    folder, name, first, file_identity, identity = source
    try:
        tail = TailReader(folder / name, identity=file_identity)
        if tail.committed() >= count:
            return TailSegment.of(tail.extent(count), image_roots, (tail.token, first), source)
    except (ConfigError, DataError):
        pass  # the file was sealed since, or the folder holds another store
    segment = Segment(rows_of(folder, first, count, identity), image_roots=image_roots)
    segment.extent = object()  # appended rows, which continue the rows before
    return segment


class PartOfFiles(ColumnPart):
    """One column of several files; access to a chunk opens the chunk's file and creates its record batch.

    Args:
        files: The files, not the segment, because a reference to the segment would keep files mapped for too long.
        first: The index of the first chunk of each file, int64 ``[files]``.
        name: The name of the column.
        segment: The segment of the column.
    """

    few = 1

    def __init__(self, files: Sequence[SealedFile], first: Int64s, name: str, segment: Segment) -> None:
        is_image = column_type(segment.types[name]).is_encoded
        roots = segment.image_roots if is_image else ()
        super().__init__(no_column, segment.chunk_starts, same_chunks=True, image_roots=roots)
        self._files, self._first, self._name = files, first, name
        self.videos = segment._videos

    def _of(self, chunk: int) -> int:
        """Return the index of the file that holds a chunk."""
        return int(np.searchsorted(self._first, chunk, side="right")) - 1

    def chunk(self, number: int) -> pa.Array:
        """See ``ColumnPart``."""
        file = self._of(number)
        return self._files[file].chunk(self._name, number - int(self._first[file]))

    def alike(self, chunks: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """See ``ColumnPart``; returns the chunks of each file."""
        ends = np.searchsorted(chunks, [*self._first[1:], len(self._starts) - 1])
        for file, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
            if begin < end:
                first = int(self._first[file])
                there, distance = self._files[file].strides(chunks[begin:end] - first)
                if len(there):
                    yield first, there + first, distance


class SealedSegment(FileSegment):
    """A segment of the rows of consecutive sealed files. Creating the segment opens no file.

    A segment can have ten thousand files; work that a loader does once per segment is then done once for all these
    files.

    Args:
        files: The files, with the same columns.
        image_roots: Allowed folders of videos, and of images that rows name by path.
        folder: Identity of the store's folder; see ``Segment``.
        videos: The videos that rows refer to, if any.
    """

    def __init__(
        self,
        files: Sequence[SealedFile],
        image_roots: tuple[str, ...],
        folder: object,
        videos: Any = None,
    ) -> None:
        self.sealed_files, self._folder, self._videos = list(files), folder, videos
        first, sizes = files[0], [file.sealed.rows for file in files]
        steps = [file.sealed.step for file in files]
        # The first row of each file, and the number of rows; the first chunk of each file, and the number of chunks.
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self._first_chunk = np.cumsum([0, *map(lambda rows, step: -(-rows // step), sizes, steps)], dtype=np.int64)
        starts = self._starts
        if self._first_chunk[-1] > len(files):
            parts = map(np.arange, self._starts[:-1], self._starts[1:], steps)
            starts = np.concatenate([*parts, self._starts[-1:]])
        super().__init__(first.schema, starts, image_roots, (folder, first.first), [file.sealed for file in files])

    @property
    def table(self) -> pa.Table:
        """The table of steps; opens every file."""
        return pa.concat_tables([file.table for file in self.sealed_files])

    def column(self, name: str) -> pa.ChunkedArray | None:
        """See ``Segment``; opens every file."""
        if name not in self.types:
            return None
        return pa.chunked_array([chunk for file in self.sealed_files for chunk in file.table.column(name).chunks])

    def _file_part(self, name: str) -> ColumnPart:
        return PartOfFiles(self.sealed_files, self._first_chunk[:-1], name, self)

    def _find_first(self, name: str) -> int | None:
        for number, file in enumerate(self.sealed_files):
            # A column that is null throughout a file is skipped.
            first_chunk, end = self._first_chunk[number : number + 2].tolist()
            for chunk in range(first_chunk, end) if name not in file.sealed.nulls else ():
                values = file.chunk(name, chunk - first_chunk)
                if values.null_count < len(values):
                    return int(self.chunk_starts[chunk] + np.argmin(values.is_null()))
        return None

    def _slice(self, row: int, count: int) -> pa.Table:
        number, parts = int(np.searchsorted(self._starts, row, side="right")) - 1, []
        while count > 0:
            first, end = self._starts[number : number + 2].tolist()
            there = min(count, end - row)
            parts.append(self.sealed_files[number].take(row - first, there))
            number, row, count = number + 1, row + there, count - there
        return parts[0] if len(parts) == 1 else pa.concat_tables(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return SealedSegment, (self.sealed_files, self._named_roots, self._folder, self._videos)


def together(segments: Sequence[Segment], before: Sequence[Segment] = ()) -> list[Segment]:
    """Join consecutive sealed files to larger segments, and return all segments.

    A new file stays a separate segment until enough new files exist for a joined segment. A new joined segment includes
    the preceding joined segments that are not larger than the new segment. As a result, the number of segments stays
    small, and each row is joined only a few times.

    Args:
        segments: A segment for each file.
        before: The segments of several files in the previous result; segments with equal files are reused.
    """
    made: list[Segment] = []
    at = 0
    for one in before:
        if [file for other in segments[at : at + len(one.sealed_files)] for file in other.sealed_files] != (
            one.sealed_files
        ):
            break
        made.append(one)
        at += len(one.sealed_files)
    for key, some in groupby(segments[at:], _alike):
        alike = list(some)
        files = [file for other in alike for file in other.sealed_files]
        if key is None or len(files) < (2 if key[-1] else FEWEST):
            made += alike
            continue
        first = alike[0]
        while made and len(made[-1].sealed_files) > 1 and len(made[-1].sealed_files) <= len(files):
            if _alike(made[-1]) != key:
                break
            first = made.pop()
            files = [*first.sealed_files, *files]
        assert isinstance(first, SealedSegment)
        made.append(SealedSegment(files, first.image_roots, first._folder, first._videos))
    return made


def _alike(segment: Segment) -> tuple[int, bool, int, bool] | None:
    """Return a key; only segments with equal keys are joined. The last item of the key is whether a file can have many
    record batches.
    """
    if not segment.sealed_files:
        return None
    sealed: Sealed = segment.sealed_files[0].sealed
    return sealed.schema, sealed.appended, sealed.load, sealed.batch_rows > 0
