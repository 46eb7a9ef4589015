"""Files of a store's folder as segments: sealed ones, many sealed ones together, and one that rows are appended to.

A sealed file is an Arrow file that is written once and opened when its rows are read. In the layout "columns" a file
has one record batch, in which all values of a column lie side by side. In the layout "windows" it has many small ones,
so that all columns of a window lie together: fewer and larger reads where rows come from a disk, or from further away.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from mouse_core.files.checksum import check, digest
from mouse_core.files.reading import check_inside, damaged, reading
from mouse_core.files.writing import remove, storing, sync_files, sync_folders
from mouse_core.store._segments import FileSegment, Segment, no_column
from mouse_core.store.disk.folder import Lease, ReadFolder, Sealed, Shared, bare_schema, check_identity
from mouse_core.store.disk.tail import TailReader

if TYPE_CHECKING:
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
    nulls = tuple(name for name in batch.schema.names if batch.column(name).null_count == batch.num_rows)
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
    """Return the rows per record batch in the layout "windows", a power of two.

    Of rows of 175 bytes, 187 fill 32 KB, so a record batch has 128; for 20 bytes it has 256, for pictures 128.
    """
    rows = _BATCH_BYTES // max(1, batch.nbytes // batch.num_rows)
    power = 1 << max(int(rows).bit_length() - 1, 0)
    return min(max(power, _FEWEST_ROWS), _MOST_ROWS)


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
        identity: The identity in the store's manifest.
        verify: Whether every byte is read before any is believed, which takes as long as reading the file once.
    """

    # Keeps the file where it lies, for as long as this object may be asked for rows.
    kept: Shared | None = None
    # The first address and the bytes of the mapped file, once it was opened.
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
        """The segment's rows over the mapped file; many record batches are rebuilt at each access to save memory.

        Raises:
            DataError: The file differs from the one that was written.
        """
        if isinstance(self.opened, pa.Table):
            return self.opened
        return pa.Table.from_batches(self.opened.batches(range(len(self.opened))))

    @memo
    def opened(self) -> pa.Table | SummedFile:
        """The segment's rows, as a table or as record batches that are created on demand; raises as ``table``."""
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
                    memory = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
                buffer, opened = pa.py_buffer(memory), self._summed(memory)
            else:
                with pa.memory_map(str(path)) as source:
                    buffer = source.read_buffer(size)
                opened = self._whole(buffer)
        self.mapped = buffer.address, buffer.size
        return opened

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
        """Return one of the segment's columns."""
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
        identity: The identity in the store's manifest.
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


FEWEST = 64
"""Sealed files that are one segment together, at least; fewer are a segment each, but for those of many record batches,
of which two are one: what is known of their chunks is kept once.
"""


class TailSegment(Segment):
    """Rows of a file that is appended to, as many as there were."""

    # Keeps the file where it lies, for other processes that open it later.
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
        """The rows that an extent has now.

        Args:
            extent: It.
            image_roots: See ``Segment``.
            place: See ``Segment``.
            source: The folder, the name of the file, how many rows of the folder were before its first, and the
                identities of file and store.
            show: Lets other processes see the rows.
            lease: Of the state of the folder that names the file.
        """
        segment = cls.of_extent(extent, image_roots)
        assert isinstance(segment, TailSegment)
        segment.place, segment._source, segment._show = place, source, show
        if lease is not None:
            segment.lease = lease
        return segment

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the file, or the one that has the rows by then.
        if self._show is not None:
            self._show()
        return rows_at, (self._source, self.num_rows, self._named_roots)


def rows_at(source: tuple[Path, str, int, str, str], count: int, image_roots: tuple[str, ...]) -> Segment:
    """Rows of a folder, wherever they lie by now.

    Args:
        source: See ``TailSegment.of``.
        count: How many they are.
        image_roots: See ``Segment``.

    Raises:
        DataError: They are not kept any more.
    """
    folder, name, first, file_identity, identity = source
    try:
        tail = TailReader(folder / name, identity=file_identity)
        if tail.committed() >= count:
            return TailSegment.of(tail.extent(count), image_roots, (tail.token, first), source)
    except (ConfigError, DataError):
        pass  # it was sealed since, or another store is there
    segment = Segment(rows_of(folder, first, count, identity), image_roots=image_roots)
    segment.extent = object()  # appended rows, which go on from those before
    return segment


class PartOfFiles(ColumnPart):
    """One column of some files; a file is opened, and a record batch made, when a chunk of it is touched.

    Args:
        files: The files. A part that refers to its segment would keep files mapped for too long.
        first: The number of the first chunk of each, int64 ``[files]``.
        name: The column's.
        segment: Which it is a part of.
    """

    few = 1

    def __init__(self, files: Sequence[SealedFile], first: Int64s, name: str, segment: Segment) -> None:
        is_image = column_type(segment.types[name]).is_encoded
        roots = segment.image_roots if is_image else ()
        super().__init__(no_column, segment.chunk_starts, same_chunks=True, image_roots=roots)
        self._files, self._first, self._name = files, first, name
        self.videos = segment._videos

    def _of(self, chunk: int) -> int:
        """Return the number of the file that a chunk is in."""
        return int(np.searchsorted(self._first, chunk, side="right")) - 1

    def chunk(self, number: int) -> pa.Array:
        """See ``ColumnPart``."""
        file = self._of(number)
        return self._files[file].chunk(self._name, number - int(self._first[file]))

    def alike(self, chunks: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """See ``ColumnPart``; those of each file."""
        ends = np.searchsorted(chunks, [*self._first[1:], len(self._starts) - 1])
        for file, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
            if begin < end:
                first = int(self._first[file])
                there, distance = self._files[file].strides(chunks[begin:end] - first)
                if len(there):
                    yield first, there + first, distance


class SealedSegment(FileSegment):
    """The rows of sealed files that follow each other; making one opens no file.

    What a loader does once for every segment, it does once for the ten thousand files of such a segment.

    Args:
        files: The files, with the same columns.
        image_roots: Folders in which images that rows name by path may lie, and videos.
        folder: Stands for the store's folder; see ``Segment.place``.
        videos: The videos that frames refer to, if there are any.
        earlier: Segments that may have some of these files: what they know of the places of values is taken over.
    """

    def __init__(
        self,
        files: Sequence[SealedFile],
        image_roots: tuple[str, ...],
        folder: object,
        videos: Any = None,
        earlier: Sequence[SealedSegment] = (),
    ) -> None:
        self.sealed_files, self._folder, self._videos = list(files), folder, videos
        first, sizes = files[0], [file.sealed.rows for file in files]
        steps = [file.sealed.batch_rows or file.sealed.rows for file in files]
        # The first row of each file, and the end; the first chunk of each file, and the number of chunks.
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)
        self._first_chunk = np.cumsum([0, *map(lambda rows, step: -(-rows // step), sizes, steps)], dtype=np.int64)
        starts = self._starts
        if self._first_chunk[-1] > len(files):
            parts = map(np.arange, self._starts[:-1], self._starts[1:], steps)
            starts = np.concatenate([*parts, self._starts[-1:]])
        options: dict[str, Any] = {"appended": first.sealed.appended, "load": first.sealed.load}
        super().__init__(first.schema, starts, image_roots, (folder, first.first), **options)
        for other in earlier:
            self._take_over(other)

    def _take_over(self, other: SealedSegment) -> None:
        """Take over what another segment knows of common files."""
        numbers = {id(file): number for number, file in enumerate(self.sealed_files)}
        common = [(theirs, numbers[id(file)]) for theirs, file in enumerate(other.sealed_files) if id(file) in numbers]
        theirs, ours = np.array(common, np.int64).reshape(-1, 2).T
        if len(self.chunk_starts) > len(self.sealed_files) + 1:
            theirs, ours = _chunks_of(other._first_chunk, theirs), _chunks_of(self._first_chunk, ours)
        for name, part in list(other._parts.items()):
            known = self.part(name)
            with part.lock:
                for table in {"begin", "width", "largest"} & part.__dict__.keys():
                    getattr(known, table)[ours] = getattr(part, table)[theirs]

    @property
    def table(self) -> pa.Table:
        """The steps; opens every file."""
        return pa.concat_tables([file.table for file in self.sealed_files])

    def column(self, name: str) -> pa.ChunkedArray | None:
        """See ``Segment``; opens every file."""
        if name not in self.types:
            return None
        return pa.chunked_array([chunk for file in self.sealed_files for chunk in file.column(name).chunks])

    def _file_part(self, name: str) -> ColumnPart:
        return PartOfFiles(self.sealed_files, self._first_chunk[:-1], name, self)

    def _find_first(self, name: str) -> int | None:
        for number, file in enumerate(self.sealed_files):
            # A column that is known to be null throughout a file is not looked into.
            first_chunk, end = self._first_chunk[number : number + 2].tolist()
            for chunk in range(first_chunk, end) if name not in file.sealed.nulls else ():
                values = file.chunk(name, chunk - first_chunk)
                if values.null_count < len(values):
                    return int(self.chunk_starts[chunk] + np.argmin(values.is_null()))
        return None

    def has_value(self, name: str, rows: int) -> bool:
        """See ``Segment``; whether all values of a column are null is known of whole files."""
        if rows != self.num_rows or name not in self.types:
            return super().has_value(name, rows)
        return any(name not in file.sealed.nulls for file in self.sealed_files)

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


def _chunks_of(first: Int64s, files: Int64s) -> Int64s:
    """Return the chunks of some files; if theirs begin at 0, 3, 5 and 9, files 1 and 2 have 3, 4, 5, 6, 7, 8."""
    parts = [np.arange(first[file], first[file + 1]) for file in files.tolist()]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def together(segments: Sequence[Segment], before: Sequence[Segment] = ()) -> list[Segment]:
    """Return segments, where many sealed files that follow each other are one segment.

    New files are segments of their own, until there are enough of them for one more. Such a one takes in those before
    it that are not larger, so that there are few, and a row is taken into another one few times.

    Args:
        segments: A segment for each file.
        before: The result for the segments that there were earlier; segments of equal files are used again.
    """
    earlier = [one for one in before if isinstance(one, SealedSegment) and len(one.sealed_files) > 1]
    made: list[Segment] = []
    at = 0
    for one in earlier:
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
        made.append(SealedSegment(files, first.image_roots, first._folder, first._videos, earlier))
    return made


def _alike(segment: Segment) -> tuple[int, bool, int, bool] | None:
    """Return the key that segments share that can be one; last, whether they have many record batches."""
    if not segment.sealed_files:
        return None
    sealed: Sealed = segment.sealed_files[0].sealed
    return sealed.schema, sealed.appended, sealed.load, sealed.batch_rows > 0
