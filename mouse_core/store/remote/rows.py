"""Remote rows, as ``DatasetStore.open`` opens them at an address: an uploaded store, or Parquet files."""

from __future__ import annotations

import io
import os
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import pyarrow as pa

from mouse_core._arrow.dense import DenseBudget
from mouse_core._arrow.windows import Int64s
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError, DataError, MouseError, StoreWarning
from mouse_core.metadata import DatasetMetadata, joined_schemas
from mouse_core.remote.clients import ObjectInfo, Reaching
from mouse_core.store._intake import StoreBackend, StoreSchema
from mouse_core.store.disk.folder import MOST_BYTES, NAME, Manifest, Sealed, bare_schema, check_identity, parse_manifest
from mouse_core.store.disk.rows import settled
from mouse_core.store.remote.files import (
    ArrowFile,
    Asking,
    ElsewhereSegment,
    Files,
    FileTrailer,
    Objects,
    Place,
    Range,
)
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.remote.clients.objects import FolderClient

# Up to this number of files, size and version of each file are requested separately; for more files, the folder is
# listed.
_FEW = 64


class FileRows(StoreBackend):
    """The rows of remote files; the files must not change after they are opened.

    Args:
        url: The address of the rows.
        told: The schema from the store's arguments, which the rows must match.
        budget: The limit of memory for dense copies.
        files: The files.
        metadata: The metadata of the rows.
    """

    format = "parquet"

    def __init__(
        self, url: str, told: StoreSchema, budget: DenseBudget, files: Files, metadata: DatasetMetadata
    ) -> None:
        super().__init__(settled(told, Manifest(metadata, (files.schema,)), url), budget, partial(_refused, url), url)
        self.files, self._arguments = files, (url, told, budget, files, metadata)
        segment = ElsewhereSegment(files, self.schema.image_roots, (object(), 0))
        self.segments[:], self.count = [segment] if segment.num_rows else [], segment.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return FileRows, self._arguments


class StoreRows(StoreBackend):
    """The rows of an uploaded store; ``snapshot`` checks for new rows.

    Args:
        place: The client and the cache of the objects.
        told: The schema from the store's arguments, which the rows must match.
        budget: The limit of memory for dense copies.
        verify: Whether to compare read bytes with checksums.
    """

    def __init__(self, place: Place, told: StoreSchema, budget: DenseBudget, verify: bool = True) -> None:
        super().__init__(told, budget, partial(_refused, place.client.url), place.client.url)
        self._place, self._client, self._told, self._verify = place, place.client, told, verify
        # See ``Segment.place``.
        self._token = object()
        self._manifest, self._version = Manifest(), ""
        self._files: dict[Sealed, ArrowFile] = {}
        # For each segment the manifest's entries, and the number of the store's rows before the segment.
        self._made: list[tuple[ElsewhereSegment, tuple[Sealed, ...], int]] = []
        self.look()

    @property
    def end(self) -> int:
        """Number of rows ever written, including dropped rows."""
        return self._manifest.dropped + self.count

    def snapshot(self) -> Snapshot:
        """See ``StoreBackend``; requests the manifest first, to include new rows."""
        self.look()
        return super().snapshot()

    def look(self) -> None:
        """Read the manifest, and update the segments if the manifest was replaced.

        Raises:
            ConfigError: The address holds no store.
            DataError: The manifest is damaged, belongs to another store, or a newer release wrote it.
            StorageError: The store could not be reached.
        """
        with self.lock:
            while True:
                content, version = read_manifest(self._client, self._version)
                if content is None:
                    return
                manifest = parse_manifest(self._client.shown(NAME), content)
                check_identity(self._client.url, self._manifest.identity, manifest.identity)
                try:
                    self._follow(manifest)
                except DataError:
                    # Files that the manifest no longer names may have been removed meanwhile.
                    if read_manifest(self._client, version)[0] is None:
                        raise
                    continue
                self._manifest, self._version = manifest, version
                return

    def _follow(self, manifest: Manifest) -> None:
        if any(tail.rows != 0 for tail in manifest.tails) and not self._version:
            warnings.warn(
                f"{self._client.url}: rows that were not sealed when the folder was copied are missing; mouse upload "
                "sends all flushed rows",
                StoreWarning,
                stacklevel=2,
            )
        schema = settled(self._told, manifest, f"store {self.path}")
        self._have([sealed for sealed in manifest.segments if sealed not in self._files])
        made, at, first = [], 0, manifest.dropped
        for segment, sealed, begin in self._made:
            if manifest.segments[at : at + len(sealed)] != sealed or begin != first:
                break
            made.append((segment, sealed, begin))
            at, first = at + len(sealed), first + segment.num_rows
        for key, some in groupby(manifest.segments[at:], _key):
            alike = tuple(some)
            # Joining keeps the number of segments small, and each row is joined few times.
            while made and len(made[-1][1]) <= len(alike) and _key(made[-1][1][0]) == key:
                _, before, first = made.pop()
                alike = (*before, *alike)
            files = Files(self._place, [self._files[one] for one in alike], manifest.schemas[key[0]])
            place = (self._token, first)
            segment = ElsewhereSegment(files, schema.image_roots, place, appended=key[1], load=key[2])
            made.append((segment, alike, first))
            first += segment.num_rows
        self._made, self.schema = made, schema
        self.segments[:] = [segment for segment, _, _ in made]
        self.count, self._kept = first - manifest.dropped, None

    def _have(self, new: Sequence[Sealed]) -> None:
        """Record the size and version of the objects of new files, and compare the sizes with the manifest."""
        known: dict[tuple[int, int], Int64s] = {}
        for sealed, info in zip(new, infos_of(self._client, [one.name for one in new]), strict=True):
            if info.size != sealed.bytes:
                where = self._client.shown(sealed.name)
                raise DataError(f"{where}: expected {sealed.bytes} bytes, as written, found {info.size}")
            # Most files have equal lists, so they share one list.
            alike = sealed.rows, sealed.batch_rows
            rows = known[alike] = known[alike] if alike in known else rows_of_batches(sealed)
            trailer = FileTrailer(self._client, self._place.mirror.folder, info, sealed)
            body = replace(info, size=sealed.body)
            self._files[sealed] = ArrowFile(body, rows, sealed.nulls, sealed.stride, trailer, verify=self._verify)

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiving process reads the manifest.
        return StoreRows, (self._place, self._told, self.budget, self._verify)


def rows_of_batches(sealed: Sealed) -> Int64s:
    """Return the number of rows of each record batch of a sealed segment: 700 rows in batches of 256 give 256, 256 and
    188.
    """
    return np.diff(np.append(np.arange(0, sealed.rows, sealed.step), sealed.rows))


def read_manifest(client: FolderClient, known: str = "") -> tuple[bytes | None, str]:
    """Read a store's manifest and its version; return None if the version is ``known``.

    Raises:
        ConfigError: The manifest does not exist.
        StorageError: The store could not be reached.
    """
    from mouse_core.remote.clients.objects import MissingObject

    try:
        if known and client.head(NAME).version == known:
            return None, known
        return client.read(NAME, most_bytes=MOST_BYTES)
    except MissingObject as error:
        raise ConfigError(
            f"{client.url}: expected a store ({NAME}) or Parquet files, found none; other formats are converted first "
            "(mouse convert)"
        ) from error


def infos_of(client: FolderClient, names: Sequence[str]) -> list[ObjectInfo]:
    """Return the current size and version of objects, in the order of ``names``."""
    if len(names) > _FEW:
        try:
            folders = {os.path.dirname(name) for name in names}
            listed = {one.path: one for folder in folders for one in client.listed(folder)}
            if all(name in listed for name in names):
                return [listed[name] for name in names]
        except ConfigError:
            pass  # a web server, which cannot list files
    return client.heads(list(names)) if names else []


def _refused(url: str) -> ConfigError:
    return ConfigError(
        f"store {url}: expected a store in a folder that was opened for writing, found a remote store; write to a "
        "folder, and mouse upload sends the new rows"
    )


def _key(sealed: Sealed) -> tuple[int, bool, int]:
    """Return a key that the files of one segment must share."""
    return sealed.schema, sealed.appended, sealed.load


# ---------------------------------------- Parquet files: a row group is a chunk, decoded when a row of it is read
#
# Parquet values are encoded, so no value can be copied from the file directly. Recently used decoded columns of row
# groups are cached in memory, and windows are cut from them. For windows at random positions, Arrow files are far
# faster.

SUFFIX = ".parquet"
# Size in bytes of each segment's cache of decoded columns.
_KEPT_BYTES = 256 << 20
# Largest sizes that a footer may claim, so that a damaged footer causes no allocation of gigabytes.
_MOST_STRING, _MOST_ITEMS = 64 << 20, 1 << 22
# Number of files that stay open, each with its readahead.
_MOST_OPEN = 64
# Size in bytes of one read from a file that is read sequentially.
_READ_AHEAD = 1 << 20


def parquet_files(client: FolderClient) -> list[str]:
    """Return the Parquet files in a folder, or in its subfolder ``data``, sorted by name; none on a web server, which
    cannot list files.
    """
    try:
        return parquet_among([one.path for one in client.listed()])
    except ConfigError:
        return []


def parquet_among(listed: Sequence[str]) -> list[str]:
    """Return the given paths that are Parquet files of rows; see ``parquet_files``."""
    for folder in ("", "data/"):
        inside = [path for path in listed if path.startswith(folder) and "/" not in path[len(folder) :]]
        found = sorted(path for path in inside if path.endswith(SUFFIX))
        if found:
            return found
    return []


def open_parquet(place: Place, infos: Sequence[ObjectInfo]) -> tuple[ParquetFiles, DatasetMetadata]:
    """Read the footers of Parquet files; return the files as one sequence, and their metadata.

    Raises:
        SchemaError: Files have different columns or contradicting metadata.
        DataError: A file is damaged.
    """
    found = ParquetObjects(Objects(place, infos))
    opened = [found.file(number) for number in range(len(infos))]
    named = [place.client.shown(info.path) for info in infos]
    schema, metadata = joined_schemas(
        (name, one.schema_arrow, DatasetMetadata()) for name, one in zip(named, opened, strict=True)
    )
    files = []
    for info, one in zip(infos, opened, strict=True):
        groups = range(one.metadata.num_row_groups)
        files.append(ArrowFile(info, np.array([one.metadata.row_group(group).num_rows for group in groups], np.int64)))
    return ParquetFiles(place, files, bare_schema(schema)), metadata


class ParquetObjects:
    """Parquet files that are opened on demand. Recently used files stay open; only one thread at a time reads the
    files.

    Args:
        objects: The objects of the files.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._files: dict[int, Any] = {}

    def file(self, number: int) -> Any:
        """Open one Parquet file and read its footer."""
        import pyarrow.parquet as pq

        if number not in self._files:
            source = pa.PythonFile(object_stream(self.objects, number), mode="r")
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
        """Return a column of a row group, decoded."""
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
            raise DataError(f"{where}: {name}: expected {rows} rows, as stated in the footer, found {len(found)}")
        made = found.combine_chunks()
        return made.chunk(0) if isinstance(made, pa.ChunkedArray) else made


class ParquetFiles(Files):
    """Parquet files in which each row group is a chunk; recently used decoded columns are cached. See ``Files``."""

    def __init__(self, place: Place, files: Sequence[ArrowFile], schema: pa.Schema) -> None:
        super().__init__(place, files, schema)
        self._kept: OrderedDict[Any, pa.Array] = OrderedDict()
        self._kept_bytes = 0
        self._lock = ProcessLock()

    @property
    def backing(self) -> None:
        """Return None, since decoded values are in memory."""
        return None

    @memo
    def _opened(self) -> ParquetObjects:
        return ParquetObjects(self.objects)

    def _column(self, chunk: int, name: str) -> pa.Array:
        """Return a decoded column of a chunk; one thread at a time decodes."""
        with self._lock:
            if (chunk, name) in self._kept:
                self._kept.move_to_end((chunk, name))
                return self._kept[chunk, name]
            made = self._kept[chunk, name] = self._opened.column(*self.of(chunk), name)
            self._kept_bytes += made.nbytes
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, gone = self._kept.popitem(last=False)
                self._kept_bytes -= gone.nbytes
            return made

    def place(self, chunk: int, name: str) -> Asking[None]:
        """Return None, because a decoded column has no position in a file."""
        yield from ()
        return None

    def lying(self, chunk: int, name: str) -> Asking[None]:
        """Return None, because a decoded column has no position in a file."""
        yield from ()
        return None

    def rows(self, chunk: int, name: str, row: int, count: int) -> Asking[pa.Array]:
        """See ``Files``."""
        yield from ()
        return self._column(chunk, name).slice(row, count)

    def column(self, chunk: int, name: str) -> Asking[pa.Array]:
        """See ``Files``."""
        yield from ()
        return self._column(chunk, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetFiles, (self.objects.place, self.files, self.schema)


def object_stream(objects: Objects, number: int) -> io.BufferedReader:
    """Return an object as a file with readahead, because Arrow's Parquet reader reads column chunks in small steps."""
    return io.BufferedReader(_ObjectStream(objects, number), _READ_AHEAD)


class _ObjectStream(io.RawIOBase):
    """An object as a readable, seekable file.

    Args:
        objects: The objects.
        number: The index of the object.
    """

    def __init__(self, objects: Objects, number: int) -> None:
        self._objects, self._number, self._at = objects, number, 0
        self._size = objects.infos[number].size

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """See ``io.IOBase``."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, target: Any) -> int:
        """See ``io.RawIOBase``."""
        begin, end = self._at, min(self._at + len(target), self._size)
        if end > begin:
            target[: end - begin] = self._objects.read([Range(self._number, begin, end)])[0]
            self._at = end
        return max(0, end - begin)


_SAVED = (
    "a folder of save_to_disk; download the folder, then call "
    "DatasetStore().from_dataset(datasets.load_from_disk(folder))"
)
OTHERS = {
    "state.json": _SAVED,
    "dataset_dict.json": _SAVED,
    "meta/info.json": "a LeRobotDataset; open its folder after a download, or lerobot:NAME, which downloads it",
}
"""Names of objects that show that an address holds another kind of rows, each with a remedy for the error message."""


def open_remote(url: str, reaching: Reaching, told: StoreBackend, verify: bool | None) -> StoreBackend:
    """Open the rows at an address and read their schema; see ``DatasetStore.open``.

    Args:
        url: The address of a folder, or of one Parquet file.
        reaching: The options for reaching remote objects.
        told: An empty backend with the schema and the budget from the store's arguments.
        verify: Whether to compare read bytes with the store's checksums; with None, bytes are compared if checksums
            exist.

    Raises:
        ConfigError: The address holds no readable rows, or `verify` is True for rows without checksums.
        DataError: The rows are damaged, or a newer release wrote them.
        StorageError: The address could not be reached.
    """
    parts, file = urlsplit(url), ""
    if parts.path.endswith(".parquet"):
        folder, _, file = parts.path.rpartition("/")
        url = urlunsplit(parts._replace(path=folder))
    place, schema, budget = Place.of(url, reaching), told.schema, told.budget
    client = place.client
    if not file and client.exists(NAME):
        return StoreRows(place, schema, budget, verify is not False)
    for name, remedy in () if file else OTHERS.items():
        if client.exists(name):
            raise ConfigError(f"{client.url}: expected a store or Parquet files, found {remedy}")
    paths = [file] if file else parquet_files(client)
    if not paths:
        return StoreRows(place, schema, budget)  # the error lists the kinds of rows that were searched for
    if verify:
        raise ConfigError(
            f"{client.url}: verify=True: expected a store, whose manifest has checksums, found Parquet files; mouse "
            "convert converts them to a store"
        )
    return FileRows(client.url, schema, budget, *open_parquet(place, infos_of(client, paths)))
