"""Remote rows, as ``DatasetStore.open`` opens them at an address: an uploaded store, Parquet files, or a saved
dataset.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import pyarrow as pa

from mouse_core._arrow.dense import DenseBudget
from mouse_core._arrow.windows import Int64s
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memo import memo
from mouse_core.errors import ConfigError, DataError, MouseError, StorageError, StoreWarning
from mouse_core.files.checksum import digest, with_digest, without_digest
from mouse_core.files.ipc import Message
from mouse_core.files.manifest import check_schema, manifest_in, schema_digest
from mouse_core.files.reading import MOST_JSON
from mouse_core.files.writing import make_folder, write_file
from mouse_core.metadata import DatasetMetadata, joined_schemas, read_metadata
from mouse_core.remote.clients import ObjectInfo, Reaching
from mouse_core.store._intake import StoreBackend, StoreSchema
from mouse_core.store.disk.folder import MOST_BYTES, NAME, Manifest, Sealed, bare_schema, check_identity, parse_manifest
from mouse_core.store.disk.rows import settled
from mouse_core.store.remote.files import (
    ArrowFile,
    Asking,
    ElsewhereSegment,
    Files,
    FileSums,
    Objects,
    Place,
    Range,
    message_at,
    name_of_sums,
    read_with,
    run,
    together,
)
from mouse_core.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mouse_core.readahead import RemoteMemory
    from mouse_core.remote.clients.objects import FolderClient

# Up to this number of files, size and version of each file are requested separately; for more files, the folder is
# listed.
_FEW = 64
# Reads of more bytes than this number take long, so they cause a warning.
_MUCH = 1 << 30


class FileRows(StoreBackend):
    """The rows of remote files; the files must not change after opening.

    Args:
        url: The address of the rows.
        told: The schema from the store's arguments, which the rows must match.
        budget: The limit of dense copies.
        files: The files.
        metadata: The metadata of the rows.
    """

    def __init__(
        self, url: str, told: StoreSchema, budget: DenseBudget, files: Files, metadata: DatasetMetadata
    ) -> None:
        super().__init__(settled(told, Manifest(metadata, (files.schema,)), url), budget, partial(_refused, url), url)
        self.files, self._arguments = files, (url, told, budget, files, metadata)
        segment = ElsewhereSegment(files, self.schema.image_roots, (object(), 0))
        self.segments[:], self.count = [segment] if segment.num_rows else [], segment.num_rows
        self.format = "parquet" if isinstance(files, _ParquetFiles) else "datasets"

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
            ConfigError: There is no store at the address.
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
                f"{self._client.url}: rows that were not sealed when the folder was copied are not there; mouse upload "
                "sends all that were flushed",
                StoreWarning,
                stacklevel=2,
            )
        if self._verify and not self._version:
            self._warn_of_wholes(manifest)
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

    def _warn_of_wholes(self, manifest: Manifest) -> None:
        """Warn if files must be read completely before their first rows can be used."""
        size = sum(sealed.bytes for sealed in manifest.segments)
        if size > _MUCH and not self._client.exists(name_of_sums(manifest.segments[-1])):
            warnings.warn(
                f"{self._client.url}: each of {len(manifest.segments):,} files, {size:,} bytes in all, is read as a "
                "whole before its first row, as no digests of its pages lie beside it; mouse upload sends them, and "
                "verify=False takes rows as they come",
                StoreWarning,
                stacklevel=2,
            )

    def _have(self, new: Sequence[Sealed]) -> None:
        """Record size and version of new files' objects, and compare them with the manifest."""
        known: dict[tuple[int, int], Int64s] = {}
        for sealed, info in zip(new, infos_of(self._client, [one.name for one in new]), strict=True):
            if info.size != sealed.bytes:
                where = self._client.shown(sealed.name)
                raise DataError(f"{where}: expected {sealed.bytes} bytes as were written, found {info.size}")
            # Most files have equal lists, so they share one list.
            alike = sealed.rows, sealed.batch_rows
            rows = known[alike] = known[alike] if alike in known else rows_of_batches(sealed)
            sums = FileSums(self._place.sums, info, sealed) if self._verify else None
            self._files[sealed] = ArrowFile(info, rows, nulls=sealed.nulls, stride=sealed.stride, sums=sums)

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiving process reads the manifest.
        return StoreRows, (self._place, self._told, self.budget, self._verify)


def rows_of_batches(sealed: Sealed) -> Int64s:
    """Return the number of rows of each record batch of a sealed segment: 700 rows in batches of 256 give 256, 256 and
    188.
    """
    if not sealed.batch_rows:
        return np.array([sealed.rows], np.int64)
    edges = np.append(np.arange(0, sealed.rows, sealed.batch_rows), sealed.rows)
    return np.diff(edges)


def read_manifest(client: FolderClient, known: str = "") -> tuple[bytes | None, str]:
    """Read a store's manifest and its version; return None if the version is ``known``.

    Raises:
        ConfigError: There is no manifest.
        StorageError: The store could not be reached.
    """
    from mouse_core.remote.clients.objects import MissingObject

    try:
        if known and client.head(NAME).version == known:
            return None, known
        return client.read(NAME, most_bytes=MOST_BYTES)
    except MissingObject as error:
        raise ConfigError(
            f"{client.url}: expected a store ({NAME}), a dataset of save_to_disk (state.json), a LeRobotDataset "
            "(meta/info.json) or Parquet files, found none; other formats are converted first (mouse convert)"
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
        f"store {url}: expected a store in a folder that was opened for writing, found a remote one; write it in a "
        "folder, and mouse upload sends what is new"
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
    """Return those of the given paths that are Parquet files of rows; see ``parquet_files``."""
    for folder in ("", "data/"):
        inside = [path for path in listed if path.startswith(folder) and "/" not in path[len(folder) :]]
        found = sorted(path for path in inside if path.endswith(SUFFIX))
        if found:
            return found
    return []


def open_parquet(place: Place, infos: Sequence[ObjectInfo]) -> tuple[DecodedFiles, DatasetMetadata]:
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
    return _ParquetFiles(place, files, bare_schema(schema)), metadata


class ParquetObjects:
    """Parquet files that are opened on demand. Recently used files stay open, and one thread at a time reads them.

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
            raise DataError(f"{where}: {name}: expected {rows} rows as its footer says, found {len(found)}")
        made = found.combine_chunks()
        return made.chunk(0) if isinstance(made, pa.ChunkedArray) else made


class DecodedFiles(Files):
    """Base class of files whose columns must be decoded; see ``Files``. Recent results of ``decode`` are cached."""

    def __init__(self, place: Place, files: Sequence[ArrowFile], schema: pa.Schema) -> None:
        super().__init__(place, files, schema)
        self._kept: OrderedDict[Any, pa.Array] = OrderedDict()
        self._kept_bytes = 0
        self._lock = ProcessLock()

    @property
    def backing(self) -> None:
        """Return None, since decoded values are in memory."""
        return None

    @property
    def fetched_by(self) -> RemoteMemory | None:
        """Return the remote memory whose fetches decoding waits for; None if files are local."""
        return self.objects.backing

    def decode(self, chunk: int, name: str) -> pa.Array:
        """Decode a column of a chunk; one thread at a time calls this method."""
        raise NotImplementedError

    def kept(self, key: Any, make: Callable[[], pa.Array]) -> pa.Array:
        """Return the array cached under a key; if it is missing, compute and cache it."""
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
        return self.kept((chunk, name), partial(self.decode, chunk, name)).slice(row, count)

    def column(self, chunk: int, name: str) -> Asking[pa.Array]:
        """See ``Files``."""
        yield from ()
        return self.kept((chunk, name), partial(self.decode, chunk, name))


class _ParquetFiles(DecodedFiles):
    """Parquet files in which each row group is a chunk."""

    @memo
    def _opened(self) -> ParquetObjects:
        return ParquetObjects(self.objects)

    def decode(self, chunk: int, name: str) -> pa.Array:
        """See ``DecodedFiles``."""
        return self._opened.column(*self.of(chunk), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ParquetFiles, (self.objects.place, self.files, self.schema)


def object_stream(objects: Objects, number: int) -> io.BufferedReader:
    """Return an object as a file with readahead, because Arrow's Parquet reader reads column chunks in small steps."""
    return io.BufferedReader(_ObjectStream(objects, number), _READ_AHEAD)


class _ObjectStream(io.RawIOBase):
    """An object as a readable, seekable file.

    Args:
        objects: The objects.
        number: The number of the object.
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


STATE, SPLITS, INFO = "state.json", "dataset_dict.json", "dataset_info.json"
LEROBOT = "meta/info.json"
# Number of heads to request at once while the distances between heads are equal.
_MOST_AHEAD = 256
# Number of files whose record batches are searched at once.
_TOGETHER = 64
_SCHEMA_BYTES, _HEAD_BYTES = 1 << 14, 1 << 12
# Record batches of differing length are searched from several positions of a file at once: at most `_MOST_PLACES`, each
# for at least `_BATCHES_EACH` batches. Batches above `_MOST_LOOKED_AT` bytes are excluded, since one batch is read to
# find each position.
_MOST_PLACES, _BATCHES_EACH, _MOST_LOOKED_AT = 32, 32, 1 << 20


def open_saved(
    place: Place, infos: Sequence[ObjectInfo], said: Mapping[str, DatasetMetadata], schemas: Mapping[str, str]
) -> tuple[Files, DatasetMetadata]:
    """Open the Arrow streams of a saved dataset; return all splits as one sequence, and their metadata.

    Args:
        place: The client and the cache of the files.
        infos: Path, size and version of the files, in order.
        said: Metadata by path, in addition to the metadata in the file's schema.
        schemas: The digest of each file's schema by path, if the writer recorded it.

    Raises:
        SchemaError: Files have different columns or contradicting metadata.
        DataError: A file is damaged.
    """
    found = indexes(place, infos)
    named = [place.client.shown(info.path) for info in infos]
    for name, info, index in zip(named, infos, found, strict=True):
        check_schema(name, schemas.get(info.path), index.schema_digest)
    schema, metadata = joined_schemas(
        (name, index.schema, said.get(info.path, DatasetMetadata()))
        for name, info, index in zip(named, infos, found, strict=True)
    )
    files = [ArrowFile(info, one.rows, one.begins) for info, one in zip(infos, found, strict=True) if len(one.rows)]
    return Files(place, files, bare_schema(schema)), metadata


_Saved = tuple[list[str], dict[str, DatasetMetadata], dict[str, str]]


def files_saved(client: FolderClient) -> _Saved | None:
    """Return the Arrow files of a saved dataset or dict of datasets, their metadata, and the recorded digests of their
    schemas.

    Return None if there is no saved dataset.

    Raises:
        ConfigError: The dataset selects its rows through an indices table.
        DataError: The dataset's own metadata are damaged.
    """
    splits = _json(client, SPLITS)
    if splits is None:
        return _files_in(client, "")
    names = _plain(splits.get("splits"), client.shown(SPLITS))
    paths, said, schemas = list[str](), dict[str, DatasetMetadata](), dict[str, str]()
    for name in names:
        found = _files_in(client, f"{name}/")
        if found is None:
            raise DataError(f"{client.shown(name)}: expected {STATE} of a split, found none")
        paths += found[0]
        said |= found[1]
        schemas |= found[2]
    return paths, said, schemas


def _files_in(client: FolderClient, folder: str) -> _Saved | None:
    state = _json(client, folder + STATE)
    if state is None:
        return None
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"{client.shown(folder)}: expected a dataset without an indices mapping; save it with flatten_indices()"
        )
    listed = state.get("_data_files")
    entries = [one.get("filename") if isinstance(one, Mapping) else None for one in listed or ()]
    paths = [folder + name for name in _plain(entries, client.shown(folder + STATE))]
    info = _json(client, folder + INFO) or {}
    metadata = read_metadata(str(info.get("description", "")), label=client.shown(folder + INFO))
    known = manifest_in(state, client.shown(folder + STATE))
    schemas = {folder + name: one.schema for name, one in known.files.items() if one.schema} if known else {}
    return paths, dict.fromkeys(paths, metadata), schemas


def _plain(names: Any, label: str) -> list[str]:
    """Check the names of files or folders; a dataset must not name files outside its folder."""
    plain = isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)
    if not plain or any(name in ("", ".", "..") or os.path.basename(name) != name or "\\" in name for name in names):
        raise DataError(f"{label}: expected names of files in the same folder, found {names!r:.200}")
    return list(names)


def _json(client: FolderClient, path: str) -> dict[str, Any] | None:
    from mouse_core.remote.clients.objects import MissingObject

    try:
        content, _ = client.read(path, most_bytes=MOST_JSON)
    except MissingObject:
        return None
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DataError(f"{client.shown(path)}: expected JSON, found {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{client.shown(path)}: expected a JSON object, found {type(found).__name__}")
    return found


# ---------------------------------------------------------------------- positions of record batches


class Index:
    """The positions of the record batches in an Arrow stream.

    Args:
        schema: The columns of the stream.
        schema_digest: The digest of the message with the schema; see ``files.manifest.schema_digest``.
        begins: The first byte of each record batch, int64 ``[n]``.
        rows: The number of rows of each record batch, int64 ``[n]``.
    """

    def __init__(self, schema: pa.Schema, schema_digest: str, begins: Int64s, rows: Int64s) -> None:
        self.schema, self.schema_digest, self.begins, self.rows = schema, schema_digest, begins, rows

    def to_bytes(self) -> bytes:
        """Return the index as bytes, which ``of_bytes`` parses."""
        file = io.BytesIO()
        schema = np.frombuffer(self.schema.serialize(), np.uint8)
        np.savez(file, schema=schema, schema_digest=self.schema_digest, begins=self.begins, rows=self.rows)
        return with_digest(file.getvalue())

    @classmethod
    def of_bytes(cls, content: bytes) -> Index | None:
        """Parse an index from the cache; return None if it is damaged."""
        bare = without_digest(content)
        if bare is None:
            return None
        with np.load(io.BytesIO(bare), allow_pickle=False) as found:
            schema = pa.ipc.read_schema(pa.py_buffer(found["schema"].tobytes()))
            return cls(schema, str(found["schema_digest"]), found["begins"], found["rows"])


def indexes(place: Place, infos: Sequence[ObjectInfo]) -> list[Index]:
    """Return the indexes of streams, from the cache or by a search; new indexes are cached."""
    folder = place.mirror.folder / "index-2"
    known = [_kept(_file_of(folder, place, info)) for info in infos]
    missing = [number for number, one in enumerate(known) if one is None]
    client = place.client

    def read(ranges: Sequence[Range]) -> Sequence[Any]:
        wanted = [(infos[one.object].path, one.begin, one.end) for one in ranges]
        return client.get_all(wanted, {infos[one.object].path: infos[one.object].version for one in ranges})

    for at in range(0, len(missing), _TOGETHER):
        some = missing[at : at + _TOGETHER]
        readers = [_named(client.shown(infos[number].path), _index_of(number, infos[number].size)) for number in some]
        for number, found in zip(some, run(together(readers), read), strict=True):
            known[number] = found
            _keep(_file_of(folder, place, infos[number]), found)
    return [one for one in known if one is not None]


def _file_of(folder: Path, place: Place, info: ObjectInfo) -> Path:
    said = "\0".join([place.client.url, info.path, info.version, str(info.size)])
    return folder / f"{digest(said.encode())}.npz"


def _kept(file: Path) -> Index | None:
    try:
        return Index.of_bytes(file.read_bytes())
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None


def _keep(file: Path, index: Index) -> None:
    try:
        make_folder(file.parent, sync=False)
        write_file(file, index.to_bytes(), sync=False)
    except StorageError:
        pass  # a damaged index is computed again


def _named(label: str, reader: Asking[Index]) -> Asking[Index]:
    try:
        return (yield from reader)
    except DataError as error:
        if label in str(error):
            raise
        raise DataError(f"{label}: {error}") from error


def _index_of(number: int, size: int) -> Asking[Index]:
    """Return the index of a stream."""
    schema, of_schema, first = yield from read_with(
        number, 0, min(size, _SCHEMA_BYTES), lambda read: _schema(read, size)
    )
    places = yield from _places(number, first, size)
    stops = [*places[1:], size]
    parts = yield from together([_lying(number, *ends, size) for ends in zip(places, stops, strict=True)])
    if any(isinstance(part, DataError) for part in parts):  # no head where one was guessed, or the stream is damaged
        parts = [(yield from _lying(number, first, size, size))]
    begins, rows = [], []
    for part in parts:
        if isinstance(part, DataError):
            raise part
        begins.append(part[0])
        rows.append(part[1])
    return Index(schema, of_schema, np.concatenate(begins), np.concatenate(rows))


def _places(number: int, first: int, size: int) -> Asking[list[int]]:
    """Return positions from which to search for record batches concurrently.

    Positions are the first batch and, in a long stream whose batches differ in length (texts, images), further
    positions throughout the stream, because the next position cannot be computed from the previous one.

    Heads of the same columns have equal lengths, and their first 8 bytes encode this length.
    """
    one = yield from _maybe(number, first, size, _HEAD_BYTES)
    two = None
    if isinstance(one, Message):
        two = yield from _maybe(number, one.end, size, _HEAD_BYTES)
    if not isinstance(one, Message) or not isinstance(two, Message) or one.head is None:
        return [first]
    stride = one.end - one.begin
    count = min(_MOST_PLACES, (size - first) // stride // _BATCHES_EACH)
    if count < 2 or stride > _MOST_LOOKED_AT or two.end - two.begin == stride:
        return [first]
    mark = b"\xff\xff\xff\xff" + (one.body - one.begin - 8).to_bytes(4, "little")
    begins = [(first + (size - first) * part // count) & ~7 for part in range(1, count)]
    places = [first]
    contents = yield [Range(number, begin, min(begin + stride + stride // 4, size)) for begin in begins]
    for begin, content in zip(begins, contents, strict=True):
        octets = bytes(content)
        at = octets.find(mark)
        while at >= 0 and at % 8:
            at = octets.find(mark, at + 1)
        if at >= 0 and begin + at > places[-1]:
            places.append(begin + at)
    return places


def _lying(number: int, first: int, stop: int, size: int) -> Asking[tuple[Int64s, Int64s] | DataError]:
    """Return the begins and row counts of the record batches from ``first`` up to ``stop``, or up to the end ``size``.

    Heads are read one by one; while their distances are equal, many are read at once.
    """
    begins: list[int] = []
    rows: list[int] = []
    begin, stride, guess, ahead = first, 0, _HEAD_BYTES, 1
    while begin < stop:
        wanted = [begin + step * stride for step in range(ahead) if step == 0 or begin + step * stride + 8 <= size]
        found = yield from together([_maybe(number, one, size, guess) for one in wanted])
        for at, message in zip(wanted, found, strict=True):
            if at != begin or begin >= stop:
                break  # the guessed positions are wrong from here on, or the search reached ``stop``
            if isinstance(message, DataError):
                return message
            if message is None:
                if begin + 8 != size:
                    return DataError(f"expected the end of the stream at byte {size}, found its end mark at {begin}")
                return np.array(begins, np.int64), np.array(rows, np.int64)
            if message.head is not None:
                begins.append(begin)
                rows.append(message.head.rows)
            guess = message.body - message.begin + 8
            ahead = min(2 * ahead, _MOST_AHEAD) if message.end - begin == stride else 1
            stride, begin = message.end - begin, message.end
    if begin != stop or stop == size:
        return DataError(f"expected the end mark of the stream before byte {size}, found none")
    return np.array(begins, np.int64), np.array(rows, np.int64)


def _maybe(number: int, begin: int, size: int, guess: int) -> Asking[Message | DataError | None]:
    """Read the message at a guessed position; return a DataError instead of raising it."""
    try:
        return (yield from message_at(number, begin, size, guess))
    except DataError as error:
        return error


def _schema(read: Any, size: int) -> tuple[pa.Schema, str, int]:
    """Read the schema at the begin of a stream; return the schema, the digest of its message, and the message's end."""
    head = bytes(read(0, 8))
    length = int.from_bytes(head[4:8], "little")
    if head[:4] != b"\xff\xff\xff\xff" or not 0 < length < size:
        raise DataError("expected a stream of Arrow, as save_to_disk writes it, found other bytes")
    try:
        content = pa.py_buffer(bytes(read(0, 8 + length)))
        schema = pa.ipc.read_schema(content)
        if any(b"ARROW:extension:name" in (field.metadata or {}) for field in schema):
            import datasets.features  # noqa: F401  which knows what these types are

            schema = pa.ipc.read_schema(content)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"expected a schema of Arrow, found a damaged one: {error}") from error
    return schema, schema_digest(content), 8 + length


def open_remote(url: str, reaching: Reaching, told: StoreBackend, verify: bool | None) -> StoreBackend:
    """Open the rows at an address and read their schema and index; see ``DatasetStore.open``.

    Args:
        url: The address of a folder, or of one Parquet file.
        reaching: The options for reaching remote objects.
        told: An empty backend with the schema and the budget from the store's arguments.
        verify: Whether to compare read bytes with the store's checksums; None: compare if checksums exist.

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
    if not file and client.exists(LEROBOT):
        raise ConfigError(
            f"{client.url}: expected a store, a saved dataset or Parquet files, found a LeRobotDataset; "
            "DatasetStore.open(url, final='drop') opens it, or final='mark'"
        )
    saved = None if file else files_saved(client)
    paths = [file] if file else [] if saved else parquet_files(client)
    if not saved and not paths:
        return StoreRows(place, schema, budget)  # the error lists the kinds of rows that were searched for
    if verify:
        what = "a dataset of save_to_disk" if saved else "Parquet files"
        raise ConfigError(
            f"{client.url}: verify=True: expected a store, whose manifest has checksums, found {what}; mouse convert "
            "makes a store of it"
        )
    if saved:
        return FileRows(client.url, schema, budget, *open_saved(place, infos_of(client, saved[0]), *saved[1:]))
    return FileRows(client.url, schema, budget, *open_parquet(place, infos_of(client, paths)))
