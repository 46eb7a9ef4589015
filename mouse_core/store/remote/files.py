"""Remote Arrow files: their objects, the positions of record batches and columns, and segments of such files.

The bytes of an object are copied to a local mirror page by page. The trailer of a segment has the checksum of each
page, 64 KB for a segment of 64 MB, and the positions of the record batches. With the trailer, each page is compared
with its checksum when the page arrives. Trailers are cached in files.

A reader is a generator (``Asking``): the reader yields the byte ranges that it needs next, and receives the bytes of
these ranges. Many readers that each need several steps, such as a head and then values, can thus share one request per
step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from mouse_core._arrow.addresses import check_rows, list_offsets, locate_values, ranges_in
from mouse_core._arrow.column import ColumnPart
from mouse_core._arrow.column_types import column_type
from mouse_core._arrow.windows import Int64s
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.errors import DataError, StorageError
from mouse_core.files.checksum import PageChecksums
from mouse_core.files.ipc import ColumnPlace, Message, SummedFile, Trailer, read_message
from mouse_core.files.writing import make_folder, write_file
from mouse_core.remote.clients import ObjectInfo, Reaching, open_client
from mouse_core.store._segments import FileSegment, no_column
from mouse_core.store.disk.folder import Sealed

if TYPE_CHECKING:
    from mouse_core.readahead import RemoteMemory
    from mouse_core.remote.clients.objects import FolderClient
    from mouse_core.remote.mirror import Mirror, MirrorObject

# Size in bytes of each request when a complete segment is read.
_PIECE = 64 << 20


class Range(NamedTuple):
    """A range of bytes of an object: the index of the object, the first byte, and the end (one past the last byte)."""

    object: int
    begin: int
    end: int


class Place(NamedTuple):
    """A client of remote objects, and the mirror that caches their bytes.

    Args:
        client: The client, which reads and lists the objects.
        mirror: The mirror, which caches the bytes that were read.
    """

    client: FolderClient
    mirror: Mirror

    @classmethod
    def of(cls, url: str, reaching: Reaching) -> Place:
        """Return the ``Place`` of an address, without any request."""
        from mouse_core.remote.mirror import Mirror

        client = open_client(url, reaching.storage_options)
        return cls(client, Mirror(reaching.cache, cache_bytes=reaching.cache_bytes, fail=reaching.fail))


# ---------------------------------------------------------------------- checksums


class FileTrailer:
    """The trailer of a segment, read when it is first used and mapped from a file of the cache. See ``PageSums``.

    A trailer has no reference to a mirror, because the mirror's objects refer to the trailers.

    Args:
        client: The client, which reads the objects.
        folder: The folder of the cache.
        info: The size and version of the segment's object.
        sealed: The manifest's entry of the segment.
    """

    def __init__(self, client: FolderClient, folder: Path, info: ObjectInfo, sealed: Sealed) -> None:
        self._client, self._folder, self.info, self.sealed = client, folder, info, sealed
        # The content is checked, so equal names of other stores do no harm.
        self._file = folder / "trailers-1" / sealed.digest
        self._found: Trailer | None = None
        self._lock = ProcessLock()

    def __call__(self) -> PageChecksums:
        """See ``PageSums``."""
        return self.read().sums

    def read(self) -> Trailer:
        """Return the trailer; raises the errors of ``PageSums``."""
        found = self._found
        if found is None:
            with self._lock:
                found = self._here()
                if found is None:
                    try:
                        found = self._request("")
                    except DataError:
                        # The bytes may have been damaged in transit. With the version, a replaced object raises
                        # ChangedError.
                        found = self._request(self.info.version)
        return found

    def _request(self, version: str) -> Trailer:
        (content,) = self._client.get_all([self._range], {self.sealed.name: version})
        return self._keep(content)

    def find(self, others: Sequence[FileTrailer]) -> None:
        """See ``PageSums``; the trailers of several segments are requested together.

        Segments that another thread is handling are skipped.
        """
        held = []
        try:
            for one in others:
                if one._found is None and one._lock.acquire(blocking=False):
                    held.append(one)
            lacking = [one for one in held if one._here() is None]
            if len(lacking) > 1:
                with suppress(DataError):  # the owner of a missing or damaged trailer gets the error
                    contents = self._client.get_all([one._range for one in lacking], {})
                    for one, content in zip(lacking, contents, strict=True):
                        one._keep(content)
        finally:
            for one in held:
                one._lock.release()

    def named(self, message: str) -> str:
        """See ``PageSums``."""
        return f"{self._client.shown(self.info.path)}: {message}"

    @property
    def _range(self) -> tuple[str, int, int]:
        return self.sealed.name, self.sealed.body, self.sealed.bytes

    def _here(self) -> Trailer | None:
        """Return the trailer from memory or from the cache folder."""
        if self._found is None:
            # An empty file cannot be mapped, which is a ValueError.
            with suppress(OSError, ValueError, DataError), open(self._file, "rb") as stream:
                self._found = self._checked(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        return self._found

    def _keep(self, content: Any) -> Trailer:
        """Check the bytes of the trailer, write them to the cache folder, and return the trailer."""
        found = self._checked(content)
        with suppress(StorageError):  # the trailer stays in memory
            make_folder(self._file.parent, sync=False)
            write_file(self._file, bytes(content), sync=False)
        self._found = self._here() or found
        return self._found

    def _checked(self, content: Any) -> Trailer:
        return Trailer.of(self._client.shown(self.sealed.name), content, self.sealed.body, self.sealed.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileTrailer, (self._client, self._folder, self.info, self.sealed)


def check_object(client: FolderClient, info: ObjectInfo, sealed: Sealed) -> None:
    """Read a complete segment without the cache, and compare the bytes with the checksums of the segment.

    Raises:
        ChangedError: The object was replaced.
        DataError: The segment is damaged.
        StorageError: The object could not be reached.
    """
    where = client.shown(sealed.name)
    if info.size != sealed.bytes:
        raise DataError(f"{where}: expected {sealed.bytes} bytes, as written, found {info.size}")
    memory = mmap.mmap(-1, info.size)
    for begin in range(0, info.size, _PIECE):
        end = min(begin + _PIECE, info.size)
        (memory[begin:end],) = client.get_all([(sealed.name, begin, end)], {sealed.name: info.version})
    # No record batch of this file is created.
    SummedFile(where, memory, pa.schema([]), sealed.rows, sealed.step, sealed.body, sealed.digest).check_all()


T = TypeVar("T")


Asking = Generator[list[Range], Sequence[Any], T]
"""A generator that yields byte ranges, receives their bytes, and returns a value of type ``T``."""


def together(readers: Sequence[Asking[T]]) -> Asking[list[T]]:
    """Run several readers and return their results. In each round, the ranges that all readers need are requested
    together.
    """
    returned: dict[int, T] = {}
    waiting: dict[int, list[Range]] = {}
    for number, reader in enumerate(readers):
        try:
            waiting[number] = next(reader)
        except StopIteration as stop:
            returned[number] = stop.value
    while waiting:
        found = iter((yield [one for ranges in waiting.values() for one in ranges]))
        for number, ranges in list(waiting.items()):
            own = [next(found) for _ in ranges]
            try:
                waiting[number] = readers[number].send(own)
            except StopIteration as stop:
                returned[number] = stop.value
                del waiting[number]
    return [returned[number] for number in range(len(readers))]


def run(reader: Asking[T], read: Callable[[list[Range]], Sequence[Any]]) -> T:
    """Run a reader until it returns, and return its result.

    Args:
        reader: The reader.
        read: Function that returns the bytes of several ranges at once; empty and repeated ranges are not requested.
    """
    try:
        ranges = next(reader)
        while True:
            # Several columns may need the same head.
            wanted = list(dict.fromkeys(one for one in ranges if one.end > one.begin))
            found = dict(zip(wanted, read(wanted) if wanted else (), strict=True))
            ranges = reader.send([found.get(one, b"") for one in ranges])
    except StopIteration as stop:
        value: T = stop.value
        return value


class _SparseColumn:
    """Private memory for a column of a remote object; only requested bytes are filled.

    Args:
        place: The position of the column in its object.
        number: The index of the column's object.

    Raises:
        DataError: The object is damaged.
    """

    def __init__(self, place: ColumnPlace, number: int) -> None:
        self._number = number
        self.begin = min((one.begin for one in place.memory), default=0)
        end = max((one.begin + one.size for one in place.memory), default=0)
        self._memory = mmap.mmap(-1, max(1, end - self.begin))
        buffer = pa.py_buffer(self._memory)
        self.address = buffer.address
        self.array = place.array(lambda begin, end: buffer.slice(begin - self.begin, end - begin))
        try:
            self.array.validate()
        except pa.ArrowException as error:
            raise DataError(f"expected values of type {place.type}, found damaged values: {error}") from error

    def fill(self, ranges: Sequence[tuple[int, int]]) -> Asking[None]:
        """Read the bytes at ranges of addresses."""
        places = [(begin - self.address, end - self.address) for begin, end in ranges]
        size = len(self._memory)
        if any(not 0 <= begin <= end <= size for begin, end in places):
            raise DataError(
                f"expected all values in the {size} bytes of a column, found values beyond; the object is damaged"
            )
        contents = yield [Range(self._number, self.begin + begin, self.begin + end) for begin, end in places]
        for (begin, end), content in zip(places, contents, strict=True):
            self._memory[begin:end] = content


def rows_of(place: ColumnPlace, number: int, row: int, count: int) -> Asking[pa.Array]:
    """Read ``count`` rows of a column, from row ``row`` on.

    Args:
        place: The position of the column in its object.
        number: The index of the column's object.
        row: The first row.
        count: Number of rows.

    Raises:
        DataError: The object is damaged.
    """
    column = _SparseColumn(place, number)
    for ranges in ranges_in([(column.array, row, count)]):
        yield from column.fill(ranges)
    rows = column.array.slice(row, count)
    check_rows(rows, f"values of type {place.type}", whole=False)
    return rows


def lying(place: ColumnPlace, number: int) -> Asking[tuple[int, tuple[int, ...]] | None]:
    """Return the offset of a column's values in the object, and the shape of a row; ``addresses.locate_values`` does
    the same for memory.

    For lists, all list offsets of the column are read. For types without contiguous values, no byte is read.

    Returns:
        The offset of the first value in bytes (for booleans in bits) and the sizes of the lists; None if rows differ in
        length, if a row is null, or if the values are not numbers.

    Raises:
        DataError: The object is damaged.
    """
    kind = column_type(place.type)
    if kind.kind not in ("scalar", "list") or any(nulls for _, nulls in place.levels):
        return None
    column = _SparseColumn(place, number)
    try:
        for address, count, dtype in list_offsets(column.array):
            yield from column.fill([(address, address + count * dtype.itemsize)])
        located = locate_values(column.array)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"expected values of type {place.type}, found damaged values: {error}") from error
    if located is None:
        return None
    scale = 8 if kind.value_type == "bool" else 1
    return located[0] + scale * (column.begin - column.address), located[1]


def whole(place: ColumnPlace, number: int) -> Asking[pa.Array]:
    """Read a complete column."""
    wanted = [Range(number, one.begin, one.begin + one.size) for one in place.memory]
    found: Sequence[Any] = yield wanted
    by_begin = {one.begin: content for one, content in zip(place.memory, found, strict=True) if one.size}
    return place.array(lambda begin, end: pa.py_buffer(by_begin[begin]))


# Number of record batches from which on only requested batches are compared with the template's layout.
_MANY = 1 << 20


class ArrowFile:
    """A remote Arrow file whose record batches and row counts are known; the head of each record batch is read on
    demand.

    Args:
        trailer: The trailer of the segment.
        rows: Number of rows of each record batch, int64 ``[n]``.
        verify: Whether to compare the pages of the file with their checksums.
    """

    def __init__(self, trailer: FileTrailer, rows: Int64s, *, verify: bool) -> None:
        self.trailer, self.rows, self.verify = trailer, rows, verify
        self.stride = trailer.sealed.stride
        # The size and version of the object; the file ends before the trailer.
        self.info = replace(trailer.info, size=trailer.sealed.body)
        self._messages: dict[int, Message] = {}

    def template(self, batch: int) -> int:
        """Return the index of a record batch with the same layout: 0 if ``batch`` has the layout of the first batch,
        else ``batch``.
        """
        return 0 if self.stride and self.rows[batch] == self.rows[0] else batch

    def message(self, number: int, batch: int) -> Asking[Message]:
        """Read the head of a record batch.

        Args:
            number: The index of the file's object.
            batch: The index of the record batch.

        Raises:
            DataError: The file is damaged, or is not the expected file.
        """
        if batch in self._messages:
            return self._messages[batch]
        if self.template(batch) != batch:
            first = yield from self.message(number, 0)
            ahead = batch * self.stride
            return first._replace(begin=first.begin + ahead, body=first.body + ahead, end=first.end + ahead)
        footer = self.trailer.read().footer
        if len(footer) != len(self.rows):
            raise DataError(f"expected {len(self.rows)} record batches, found {len(footer)}")
        begin, body, _ = footer.span(batch)
        (content,) = yield [Range(number, begin, body)]
        found = read_message(lambda low, high: memoryview(content)[low - begin : high - begin], begin, self.info.size)
        if found is None or found.head is None or found.head.rows != self.rows[batch]:
            there = "none" if found is None or found.head is None else f"one of {found.head.rows}"
            raise DataError(f"expected a record batch of {self.rows[batch]} rows, found {there}")
        self._messages[batch] = found
        return found

    def places(self, schema: pa.Schema, number: int, batch: int) -> Asking[dict[str, ColumnPlace]]:
        """Return the position of each column in a record batch, by name; columns that only Arrow's reader can read are
        left out.
        """
        found = yield from self.message(number, batch)
        assert found.head is not None
        return found.head.columns(schema, found.body)

    def batch(self, schema: pa.Schema, number: int, batch: int) -> Asking[pa.RecordBatch]:
        """Read a complete record batch with Arrow's reader."""
        found = yield from self.message(number, batch)
        begin, end = found.begin, found.end
        if any(pa.types.is_dictionary(one.type) for one in schema):
            begin = 0  # dictionaries precede the record batches
        (content,) = yield [Range(number, begin, end)]
        try:
            if begin:
                return pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(content)), schema)
            with pa.ipc.open_stream(pa.py_buffer(memoryview(content)[8:])) as stream:
                return next(one for at, one in enumerate(stream) if at == batch)
        except (pa.ArrowException, OSError, ValueError, StopIteration) as error:
            raise DataError(f"expected a record batch, found a damaged record batch: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(ArrowFile, verify=self.verify)
        return make, (self.trailer, self.rows)


class Files:
    """Consecutive remote files of record batches; the record batches are numbered across all files.

    Args:
        place: The client and the mirror of the files.
        files: The files.
        schema: The columns of the files.
    """

    def __init__(self, place: Place, files: Sequence[ArrowFile], schema: pa.Schema) -> None:
        self._source, self.files, self.schema = place, list(files), schema
        self._first = np.cumsum([0, *(len(one.rows) for one in self.files)])
        self._places: dict[int, dict[str, ColumnPlace]] = {}
        self._batch: tuple[int, pa.RecordBatch] | None = None

    @memo
    def starts(self) -> Int64s:
        """Return the first row of every record batch, followed by the number of rows, int64 ``[batches + 1]``."""
        starts = np.empty(int(self._first[-1]) + 1, np.int64)
        starts[0] = at = 0
        # Most files have the same list; there may be tens of millions of record batches in all.
        for _, some in groupby(self.files, lambda one: id(one.rows)):
            alike = list(some)
            ends = starts[at] + np.cumsum(alike[0].rows)
            if len(ends):
                behind = at + len(alike) * len(ends)
                rows = np.arange(len(alike)) * (ends[-1] - starts[at])
                np.add.outer(rows, ends, out=starts[at + 1 : behind + 1].reshape(len(alike), -1))
                at = behind
        return starts

    @memo
    def _placed(self) -> list[MirrorObject]:
        # All files are opened together, so that they share one memory map.
        infos, sums = [one.info for one in self.files], [one.trailer for one in self.files if one.verify]
        return self._source.mirror.add(self._source.client, infos, sums)

    @property
    def backing(self) -> RemoteMemory:
        """The memory that contains the addresses that ``lying`` returns."""
        return self._placed[0].backing

    def of(self, chunk: int) -> tuple[int, int]:
        """Return the index of the file that holds a record batch, and the index of the batch in that file."""
        file = int(np.searchsorted(self._first, chunk, side="right")) - 1
        return file, chunk - int(self._first[file])

    def chunks_with(self, name: str) -> Iterator[int]:
        """Return the indices of the record batches that can have a value in a column."""
        for number, file in enumerate(self.files):
            if name not in file.trailer.sealed.nulls:
                yield from range(int(self._first[number]), int(self._first[number + 1]))

    def find_trailers(self, chunks: Iterable[int]) -> None:
        """Read the trailers of the files of several record batches with one request."""
        numbers = dict.fromkeys(self.of(chunk)[0] for chunk in chunks)
        trailers = [self.files[number].trailer for number in numbers]
        if len(trailers) > 1:
            trailers[0].find(trailers)

    def run(self, reader: Asking[Any]) -> Any:
        """Run a reader until it returns, and return its result."""
        return run(reader, self._read)

    def _read(self, ranges: Sequence[Range]) -> Sequence[Any]:
        """Read ranges of files, and return their bytes in memory that is never overwritten.

        Raises:
            ChangedError: A file was replaced.
            DataError: A file does not exist any more.
            StorageError: A file could not be reached.
        """
        first = np.array([self._placed[one.object].address for one in ranges], np.int64)
        bounds = zip(*((one.begin, one.end) for one in ranges), strict=True)
        begins, ends = (np.array(part, np.int64) for part in bounds)
        return self._placed[0].backing.read(first + begins, first + ends)

    def named(self, chunk: int, reader: Asking[Any]) -> Asking[Any]:
        """Run a reader, and add the name of the object to the errors that the reader raises."""
        where = self._source.client.shown(self.files[self.of(chunk)[0]].info.path)
        try:
            return (yield from reader)
        except DataError as error:
            if where in str(error):
                raise
            raise DataError(f"{where}: {error}") from error

    def place(self, chunk: int, name: str) -> Asking[ColumnPlace | None]:
        """Return the position of a column in a record batch; None if only Arrow's reader can read the column."""
        if chunk in self._places:
            return self._places[chunk].get(name)
        number, batch = self.of(chunk)
        file = self.files[number]
        places = yield from file.places(self.schema, number, batch)
        if file.template(batch) == batch:
            self._places[chunk] = places
        return places.get(name)

    def template(self, chunk: int) -> tuple[int, int]:
        """Return the index of a record batch with the same layout as ``chunk``, and the distance in bytes from that
        batch to ``chunk``.
        """
        number, batch = self.of(chunk)
        like = self.files[number].template(batch)
        return chunk - batch + like, (batch - like) * self.files[number].stride

    def alike(self, chunks: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """See ``ColumnPart.alike``; the batches of a file are compared with the file's first batch."""
        found = np.searchsorted(self._first, chunks, side="right") - 1
        for number in np.unique(found).tolist():
            file, first = self.files[number], int(self._first[number])
            if file.stride:
                asked = chunks[found == number] - first
                (same,) = np.nonzero(file.rows == file.rows[0]) if self._first[-1] < _MANY else (asked,)
                same = same[file.rows[same] == file.rows[0]]
                yield first, first + same, same * file.stride

    def lying(self, chunk: int, name: str) -> Asking[tuple[int, tuple[int, ...]] | None]:
        """Return the address at which a column's values begin, and the shape of a row; see the function ``lying``."""
        place = yield from self.place(chunk, name)
        if place is None:
            return None
        number = self.of(chunk)[0]
        begin = self._placed[number].address
        found = yield from lying(place, number)
        if found is None:
            return None
        scale = 8 if column_type(place.type).value_type == "bool" else 1
        return found[0] + scale * begin, found[1]

    def rows(self, chunk: int, name: str, row: int, count: int) -> Asking[pa.Array]:
        """Read rows of a column of a record batch."""
        place = yield from self.place(chunk, name)
        if place is None:
            batch = yield from self._arrow_batch(chunk)
            return batch.column(name).slice(row, count)
        return (yield from rows_of(place, self.of(chunk)[0], row, count))

    def column(self, chunk: int, name: str) -> Asking[pa.Array]:
        """Read a column of a record batch."""
        place = yield from self.place(chunk, name)
        if place is None:
            batch = yield from self._arrow_batch(chunk)
            return batch.column(name)
        return (yield from whole(place, self.of(chunk)[0]))

    def _arrow_batch(self, chunk: int) -> Asking[pa.RecordBatch]:
        """Read a record batch with Arrow's reader; the last batch is cached."""
        kept = self._batch
        if kept is not None and kept[0] == chunk:
            return kept[1]
        number, batch = self.of(chunk)
        found = yield from self.files[number].batch(self.schema, number, batch)
        self._batch = chunk, found
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self._source, self.files, self.schema)


# ---------------------------------------------------------------------- segments

# Number of heads of record batches that are read at once in a sequential search.
_LOOKED_AT = 64


class ElsewhereSegment(FileSegment):
    """A segment of the rows of remote files, with a chunk for each record batch. Creating a segment reads nothing.

    Args:
        files: The files.
        image_roots: Allowed folders for images that rows name by path.
        place: See ``Segment``.
    """

    def __init__(self, files: Files, image_roots: tuple[str, ...], place: tuple[object, int]) -> None:
        entries = [one.trailer.sealed for one in files.files]
        super().__init__(files.schema, files.starts, image_roots, place, entries)
        self.files, self.backing = files, files.backing
        # The requested columns, in a weak collection, so that their heads are read together.
        self._asked: WeakValueDictionary[str, _PartElsewhere] = WeakValueDictionary()

    @memo
    def table(self) -> pa.Table:
        """The table of steps; reads all rows."""
        names, chunks = self.files.schema.names, range(len(self.chunk_starts) - 1)
        batches = (self._read([(chunk, self.files.column(chunk, name)) for name in names]) for chunk in chunks)
        return pa.concat_tables([pa.Table.from_arrays(columns, names=names) for columns in batches])

    def column(self, name: str) -> pa.ChunkedArray | None:
        """See ``Segment``; reads the complete column."""
        if name not in self.types:
            return None
        chunks = range(len(self.chunk_starts) - 1)
        return pa.chunked_array(
            self._read([(chunk, self.files.column(chunk, name)) for chunk in chunks]), self.types[name]
        )

    def _file_part(self, name: str) -> ColumnPart:
        roots = self.image_roots if column_type(self.types[name]).is_encoded else ()
        part = _PartElsewhere(self.files, name, roots, self._asked)
        self._asked[name] = part
        return part

    def _look_for_first(self, name: str) -> tuple[int, Any] | None:
        # There may be millions of record batches, and most often the very first row has a value.
        files, several = self.files, self.files.chunks_with(name)
        groups = chain([list(islice(several, 1))], iter(lambda: list(islice(several, _LOOKED_AT)), []))
        for some in groups:
            files.find_trailers(some)
            places = self._read([(chunk, files.place(chunk, name)) for chunk in some])
            for chunk, place in zip(some, places, strict=True):
                rows, nulls = (1, 1) if place is None else place.levels[0]
                row = 0
                if nulls == rows and place is not None:
                    continue
                if nulls:
                    (column,) = self._read([(chunk, files.column(chunk, name))])
                    if column.null_count == len(column):
                        continue
                    row = int(np.argmin(column.is_null()))
                (value,) = self._read([(chunk, files.rows(chunk, name, row, 1))])
                return int(self.chunk_starts[chunk]) + row, value[0].as_py()
        return None

    def take(self, row: int, count: int = 1) -> pa.Table:
        """See ``Segment``; reads only the requested rows."""
        names = self.files.schema.names
        pieces = list(self._pieces(row, count))
        read = self._read(
            [(chunk, self.files.rows(chunk, name, first, rows)) for chunk, first, rows in pieces for name in names]
        )
        tables = [
            pa.Table.from_arrays(read[at : at + len(names)], schema=self.files.schema.remove_metadata())
            for at in range(0, len(read), max(len(names), 1))
        ]
        if not tables:
            return self.files.schema.remove_metadata().empty_table()
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables)

    def _pieces(self, row: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Return three values for each chunk that holds rows of a range: the chunk, the position in the chunk of the
        first row of the range, and the number of rows of the range in the chunk.
        """
        chunk = int(np.searchsorted(self.chunk_starts, row, side="right")) - 1
        while count > 0 and chunk < len(self.chunk_starts) - 1:
            first, end = self.chunk_starts[chunk : chunk + 2].tolist()
            there = min(count, end - row)
            yield chunk, row - first, there
            chunk, row, count = chunk + 1, row + there, count - there

    def _read(self, readers: Sequence[tuple[int, Asking[Any]]]) -> list[Any]:
        """Run the readers of several chunks, and return their results."""
        files = self.files
        found: list[Any] = files.run(together([files.named(chunk, reader) for chunk, reader in readers]))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return ElsewhereSegment, (self.files, self._named_roots, self.place)


class _PartElsewhere(ColumnPart):
    """One column of remote files.

    Args:
        files: The files.
        name: The name of the column.
        image_roots: See ``ColumnPart``.
        asked: The columns that readers have requested from the segment; the heads of these columns are read together.
    """

    def __init__(
        self,
        files: Files,
        name: str,
        image_roots: tuple[str, ...],
        asked: WeakValueDictionary[str, _PartElsewhere],
    ) -> None:
        super().__init__(no_column, files.starts, same_chunks=True, image_roots=image_roots)
        self.backing: RemoteMemory | None = files.backing
        self._files, self._name, self._asked = files, name, asked
        self._located: dict[int, tuple[int, tuple[int, ...]] | None] = {}

    def chunk(self, number: int) -> pa.Array:
        """Read the values of one record batch."""
        return self._files.run(self._files.named(number, self._files.column(number, self._name)))

    def alike(self, chunks: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """See ``ColumnPart``."""
        return self._files.alike(chunks)

    def slices(self, wanted: Sequence[tuple[int, int, int]]) -> list[pa.Array]:
        """Read rows of several chunks at once."""
        files = self._files
        readers = [files.named(chunk, files.rows(chunk, self._name, row, count)) for chunk, row, count in wanted]
        found: list[pa.Array] = files.run(together(readers))
        return found

    def locate(self, number: int) -> tuple[int, tuple[int, ...]] | None:
        """See ``ColumnPart``; reads the head of the record batch, and the offsets of lists."""
        like, ahead = self._files.template(number)
        if like not in self._located:
            self.prepare([like])
        found = self._located[like]
        if found is None or not ahead:
            return found
        scale = 8 if column_type(self._files.schema.field(self._name).type).value_type == "bool" else 1
        return found[0] + scale * ahead, found[1]

    def prepare(self, numbers: Sequence[int]) -> None:
        """Read the metadata for locating the values of ``chunks``, for all columns that are read together."""
        readers, files = [], self._files
        numbers = list(dict.fromkeys(files.template(number)[0] for number in numbers))
        for part in dict.fromkeys([self, *filter(None, (one() for one in self._asked.valuerefs()))]):
            missing = [number for number in numbers if number not in part._located]
            files.find_trailers(missing)
            readers += [files.named(number, part._locate(number)) for number in missing]
        files.run(together(readers))

    def _locate(self, number: int) -> Asking[None]:
        self._located[number] = yield from self._files.lying(number, self._name)
