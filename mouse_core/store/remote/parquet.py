"""Parquet files elsewhere: a row group is a chunk, read and decoded when a row of it is wanted.

Values of Parquet lie encoded, so that none is copied from where it lies: decoded columns of row groups are kept in
memory, the last ones used, and windows are cut from them. Where windows lie all over, Arrow files are far faster.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.dense import DenseBudget
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.about.dataset import About, joined, read_about
from mouse_core.errors import ConfigError, DataError, MouseError, SchemaError
from mouse_core.remote.client import ObjectInfo
from mouse_core.store._schema import StoreSchema
from mouse_core.store.disk.manifest import Manifest, bare_schema
from mouse_core.store.disk.reading import settled
from mouse_core.store.remote.files import ArrowFile, Asking, ElsewhereSegment, Files
from mouse_core.store.remote.objects import Objects, Place, Range
from mouse_core.store.remote.rows import ReadOnlyRows

if TYPE_CHECKING:
    from mouse_core.readahead.backing import RemoteMemory
    from mouse_core.remote.clients.objects import FolderClient

SUFFIX = ".parquet"
# Decoded columns of row groups that are kept, of each segment.
_KEPT_BYTES = 256 << 20
# What a footer may claim to hold, so that a damaged one asks for no gigabytes.
_MOST_STRING, _MOST_ITEMS = 64 << 20, 1 << 22
# Files that stay open, each with what was read ahead of it.
_MOST_OPEN = 64
# What is read at once of a file that is read from its beginning on.
_READ_AHEAD = 1 << 20


def parquet_files(client: FolderClient) -> list[str]:
    """The Parquet files in a folder, or in a folder ``data`` in it, in the order of names; none on a web server."""
    try:
        return parquet_among([one.path for one in client.listed()])
    except ConfigError:
        return []


def parquet_among(listed: Sequence[str]) -> list[str]:
    """Return the paths of Parquet files of rows; see ``parquet_files``."""
    for folder in ("", "data/"):
        inside = [path for path in listed if path.startswith(folder) and "/" not in path[len(folder) :]]
        found = sorted(path for path in inside if path.endswith(SUFFIX))
        if found:
            return found
    return []


class ParquetRows(ReadOnlyRows):
    """The rows of Parquet files, one after the other; they are what they were when they were opened.

    Args:
        place: Where the objects are.
        told: What the store was told of the rows, which are to fit.
        budget: Of the memory for dense copies.
        infos: The files, as they are now.
    """

    def __init__(self, place: Place, told: StoreSchema, budget: DenseBudget, infos: Sequence[ObjectInfo]) -> None:
        super().__init__(place.client.url, told, budget)
        self._again = place, told, budget, infos
        found = ParquetObjects(Objects(place, infos))
        opened = map(found.file, range(len(infos)))
        schemas, footers = zip(*((one.schema_arrow, one.metadata) for one in opened), strict=True)
        abouts = []
        for info, schema in zip(infos, schemas, strict=True):
            where = place.client.shown(info.path)
            if not bare_schema(schema).equals(bare_schema(schemas[0])):
                raise SchemaError(
                    f"{where}: expected the columns of {infos[0].path}, {schemas[0].names}, found {schema.names}"
                )
            abouts.append((where, read_about(schema, label=where)))
        self.schema = settled(told, Manifest(joined(abouts), (bare_schema(schemas[0]),)), str(self.path))
        files = []
        for info, said in zip(infos, footers, strict=True):
            rows = np.array([said.row_group(group).num_rows for group in range(said.num_row_groups)], np.int64)
            files.append(ArrowFile(info, rows))
        if sum(int(one.rows.sum()) for one in files):
            whole = _ParquetFiles(place, files, bare_schema(schemas[0]))
            self.segments[:] = [ElsewhereSegment(whole, self.schema.image_roots, (object(), 0))]
            self.count = self.segments[0].num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetRows, self._again


class ParquetObjects:
    """Parquet files, opened when they are asked for, of which the last ones stay open; one thread at a time reads them.

    Args:
        objects: What they lie in.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._files: dict[int, Any] = {}

    def file(self, number: int) -> Any:
        """Open one Parquet file and read its footer."""
        import pyarrow.parquet as pq

        if number not in self._files:
            source = pa.PythonFile(ObjectStream(self.objects, number), mode="r")
            try:
                self._files[number] = pq.ParquetFile(
                    source,
                    pre_buffer=False,
                    page_checksum_verification=True,
                    thrift_string_size_limit=_MOST_STRING,
                    thrift_container_size_limit=_MOST_ITEMS,
                )
            except MouseError:
                raise
            except (pa.ArrowException, OSError, ValueError) as error:
                raise DataError(f"{self.objects.shown(number)}: expected a Parquet file, found: {error}") from error
            while len(self._files) > _MOST_OPEN:
                del self._files[next(iter(self._files))]
        return self._files[number]

    def column(self, number: int, group: int, name: str) -> pa.Array:
        """A column of a row group, decoded."""
        try:
            found = self.file(number).read_row_group(group, columns=[name]).column(0)
        except MouseError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            where = self.objects.shown(number)
            raise DataError(f"{where}: expected row group {group} of column {name!r}, found: {error}") from error
        rows = self.file(number).metadata.row_group(group).num_rows
        if len(found) != rows:
            where = self.objects.shown(number)
            raise DataError(f"{where}: {name}: expected {rows} rows as its footer says, found {len(found)}")
        made = found.combine_chunks()
        return made.chunk(0) if isinstance(made, pa.ChunkedArray) else made


class DecodedFiles(Files):
    """See ``Files``; no column lies where it could be copied from. Columns of chunks that ``decode`` made are kept."""

    def __init__(self, place: Place, files: Sequence[ArrowFile], schema: pa.Schema) -> None:
        super().__init__(place, files, schema)
        self._kept: OrderedDict[Any, pa.Array] = OrderedDict()
        self._kept_bytes = 0
        self._lock = ProcessLock()

    @property
    def backing(self) -> None:
        """None: decoded values are in memory."""
        return None

    @property
    def fetched_by(self) -> RemoteMemory | None:
        """Memory whose fetches decoding waits for; None: files are local."""
        return self.objects.backing

    def decode(self, chunk: int, name: str) -> pa.Array:
        """A column of a chunk; one thread at a time calls it."""
        raise NotImplementedError

    def kept(self, key: Any, make: Callable[[], pa.Array]) -> pa.Array:
        """Return the array kept under a key; make it if it is not kept any more."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            made = self._kept[key] = make()
            self._kept_bytes += made.nbytes
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, gone = self._kept.popitem(last=False)
                self._kept_bytes -= gone.nbytes
            return made

    def place(self, chunk: int, name: str) -> Asking[None]:
        """Nowhere."""
        yield from ()
        return None

    def lying(self, chunk: int, name: str) -> Asking[None]:
        """Nowhere."""
        yield from ()
        return None

    def rows(self, chunk: int, name: str, row: int, count: int) -> Asking[pa.Array]:
        """See ``Files``."""
        yield from ()
        return self.kept((chunk, name), partial(self.decode, chunk, name)).slice(row, count)

    def column(self, chunk: int, name: str) -> Asking[pa.Array]:
        """See ``Files``."""
        yield from ()
        return self.kept((chunk, name), partial(self.decode, chunk, name))


class _ParquetFiles(DecodedFiles):
    """Row groups are chunks."""

    @memo
    def _opened(self) -> ParquetObjects:
        return ParquetObjects(self.objects)

    def decode(self, chunk: int, name: str) -> pa.Array:
        """See ``DecodedFiles``."""
        return self._opened.column(*self.of(chunk), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ParquetFiles, (self.objects.place, self.files, self.schema)


class ObjectStream(io.RawIOBase):
    """An object as a file, for Arrow's reader of Parquet.

    Args:
        objects: Some objects.
        number: Which of them.
    """

    def __init__(self, objects: Objects, number: int) -> None:
        self._objects, self._number, self._at = objects, number, 0
        self._size = objects.infos[number].size
        self._ahead, self._begin = b"", 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """See ``io.IOBase``."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def size(self) -> int:
        """Return the size of the object."""
        return self._size

    def read(self, size: int | None = -1) -> bytes:
        """See ``io.RawIOBase``."""
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        begin = min(self._at, end)
        if not self._begin <= begin <= end <= self._begin + len(self._ahead):
            # Column chunks are read in small steps.
            last = min(self._size, max(end, begin + _READ_AHEAD))
            self._ahead = bytes(self._objects.read([Range(self._number, begin, last)])[0]) if last > begin else b""
            self._begin = begin
        self._at = end
        return self._ahead[begin - self._begin : end - self._begin]


class DecodedRows(ReadOnlyRows):
    """The rows of files that are decoded; they are what they were when they were opened.

    Args:
        url: Where the rows are.
        told: What the store was told of the rows, which are to fit.
        budget: Budget of the memory for dense copies.
        files: The files.
        about: Metadata of the rows.
    """

    def __init__(self, url: str, told: StoreSchema, budget: DenseBudget, files: DecodedFiles, about: About) -> None:
        super().__init__(url, told, budget)
        self._again = url, told, budget, files, about
        self.files = files
        self.schema = settled(told, Manifest(about, (files.schema,)), url)
        self.segments[:] = [ElsewhereSegment(files, self.schema.image_roots, (object(), 0))]
        self.count = self.segments[0].num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodedRows, self._again
