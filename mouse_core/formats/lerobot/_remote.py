"""Reads remote LeRobotDatasets: the metadata when a dataset is opened, and frames when a batch needs their rows.

Parquet values are encoded, so frames are read in chunks. A chunk is decoded and converted to rows when the first of its
rows is read (as in ``store.remote.rows``). Videos are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from io import BufferedReader
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mouse_core._base.memo import memo
from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import damaged
from mouse_core.formats.base import in_stored_layout
from mouse_core.formats.columns import check_final, rows_at_once, transition_rows
from mouse_core.formats.lerobot._meta import (
    INDEX,
    Description,
    Frames,
    bytes_a_frame,
    check_action,
    column_of,
    read_description,
)
from mouse_core.remote.clients import ObjectInfo, Reaching
from mouse_core.remote.clients.objects import MissingObject
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.remote.files import ArrowFile, Objects, Place, Range
from mouse_core.store.remote.rows import DecodedFiles, FileRows, ParquetObjects, infos_of, object_stream

if TYPE_CHECKING:
    from mouse_core.remote.clients.objects import FolderClient

# Number of frames of a chunk: the rows of a record batch, or fewer if rows are large.
MOST_FRAMES, _MOST_BYTES = 8192, 16 << 20
# Largest number of frames for each byte of a file, even if all frames are equal.
_MOST_A_BYTE = 1000
_META = "meta"
# Paths of metadata files, for a server that cannot list files.
_KNOWN = ("info.json", "stats.json", "tasks.parquet", "tasks.jsonl", "episodes.jsonl")
_MOST_ASKED = 10_000


def open_at(url: str, reaching: Reaching, final: str | None, cameras: bool, **options: Any) -> DatasetStore:
    """Return a store of the dataset at an address, which downloads frames when they are read.

    Args:
        url: The address.
        reaching: The options for reaching remote objects.
        final, cameras: See ``read_lerobot``.
        **options: Options of the store.

    Raises:
        ConfigError: The format has another version, or ``final`` was not chosen.
        SchemaError: The dataset has no feature ``action``.
        DataError: A file is damaged.
        StorageError: The address could not be reached.
    """
    store, place = DatasetStore(**options), Place.of(url, reaching)
    where = place.client.url
    meta = Objects(place, described_in(place.client))
    described = read_description(_ObjectPath(meta, ""))  # type: ignore[arg-type]
    check_final(final, where=where)
    check_action(described, where)
    files = LeRobotFiles(
        place, infos_of(place.client, [file.name for file in described.episodes.files]), described, final, cameras
    )
    metadata = in_stored_layout(
        files.frames.metadata().replace(fields=files.frames.fields(files.frames.encoded)), files.schema
    )
    store._rows = FileRows(where, store._rows.schema, store._rows.budget, files, metadata)
    return store


def description_of(store: Any) -> Description:
    """Return the dataset's metadata from a store that ``open_at`` opened."""
    files: LeRobotFiles = store._rows.files
    return files.frames.described


def batches_of(store: Any, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a store that ``open_at`` opened, decoded chunk by chunk."""
    for segment in store.snapshot().segments:
        for table in segment.tables():
            yield from table.to_batches(max_chunksize=batch_rows)


def described_in(client: FolderClient) -> list[ObjectInfo]:
    """Read and check the metadata files of a remote dataset."""
    try:
        return client.listed(_META)
    except ConfigError:
        return list(_on_the_web(client))


def _on_the_web(client: FolderClient) -> Iterator[ObjectInfo]:
    """Yield metadata files on a web server: files with known names, and numbered files until a number is missing."""
    for name in _KNOWN:
        yield from _there(client, f"{_META}/{name}")
    chunk = number = 0
    for _ in range(_MOST_ASKED):
        found = _there(client, f"{_META}/episodes/chunk-{chunk:03d}/file-{number:03d}.parquet")
        if not found and not number:
            return
        yield from found
        chunk, number = (chunk, number + 1) if found else (chunk + 1, 0)


def _there(client: FolderClient, path: str) -> list[ObjectInfo]:
    """Return the object at a path, or None if it does not exist."""
    try:
        return [client.head(path)]
    except MissingObject:
        return []


class LeRobotFiles(DecodedFiles):
    """Remote files of frames, which are decoded chunk by chunk.

    Args:
        place: Client and cache of the files.
        infos: The files of frames, in the order of episodes.
        described: The metadata of the dataset.
        final, cameras: See ``read_lerobot``.
    """

    def __init__(
        self, place: Place, infos: Sequence[ObjectInfo], described: Description, final: str | None, cameras: bool
    ) -> None:
        self._again = place, infos, described, final, cameras
        self.frames = Frames(place.client.url, described, final=final, cameras=cameras, videos=False)
        # For each file, the number of its first frame among all frames, and the edges of its chunks as frame numbers in
        # the file.
        counts = np.array([len(file.rows) for file in described.episodes.files], np.int64)
        for info, count in zip(infos, counts.tolist(), strict=True):
            if count > _MOST_A_BYTE * info.size:
                where = place.client.shown(info.path)
                raise damaged(where, f"expected {count} frames, as meta/episodes has it, found {info.size} bytes")
        self._frame = np.concatenate([[0], np.cumsum(counts)])
        most = rows_at_once(bytes_a_frame(described, pictures=True), most=MOST_FRAMES, budget=_MOST_BYTES)
        self._cuts = [[*range(0, count, most), count] for count in counts.tolist()]
        # With final="mark", an episode has one more row behind its last frame.
        self._extra = described.episodes.ends[described.episodes.lengths > 0] - 1
        self._extra = self._extra[: None if final == "mark" else 0]
        files = []
        for at, info in enumerate(infos):
            edges = self._frame[at] + np.array(self._cuts[at], np.int64)
            rows = np.diff(edges) + np.diff(np.searchsorted(self._extra, edges))
            files.append(ArrowFile(info, rows))
        objects = Objects(place, infos)
        types = _types(objects)
        super().__init__(place, files, self.frames.schema(types, objects.shown(0)))

    @memo
    def _opened(self) -> ParquetObjects:
        return ParquetObjects(self.objects)

    def decode(self, chunk: int, name: str) -> pa.Array:
        """Decode numeric columns together, and each column of images separately; see ``DecodedFiles``."""
        pictures = {column_of(key): key for key in self.frames.pictures}
        if name in pictures:
            keys, names = [pictures[name]], {name}
        else:
            keys = [key for key in self.frames.stored if key not in pictures.values()]
            names = set(self.schema.names) - pictures.keys()
        columns = self._laid_out(chunk, keys)
        mine = pa.schema([field for field in self.schema if field.name in names])
        where = self.objects.shown(self.of(chunk)[0])
        made = self.frames.batch({one: columns[one] for one in mine.names}, mine, where=where)
        for other in names - {name}:
            self.kept((chunk, other), partial(made.column, other))
        return made.column(name)

    def _laid_out(self, chunk: int, keys: Sequence[str]) -> Columns:
        """Return the rows of a chunk, with the columns for some features.

        The frame before the chunk is also read, because its action belongs to the first row. The frame after the chunk
        shows whether the episode continues. The rows of these two frames are left out.
        """
        number, at = self.of(chunk)
        begin, end = self._cuts[number][at : at + 2]
        first = int(self._frame[number])
        episodes = self.frames.episodes
        (_, (step,)) = episodes.places(np.array([first + begin]))
        low, high = begin - bool(step), min(end + 1, self._cuts[number][-1])
        rows = first + np.arange(low, high)
        names = [*keys, *INDEX]
        batch = pa.record_batch([self._stored(number, name, low, high) for name in names], names=names)
        where = self.objects.shown(number)
        self.frames.check(batch, rows, where)
        place, number_of = episodes.places(rows)
        lengths = episodes.lengths[place]
        called = partial(episodes.called, rows)
        pictures = self.frames.images(batch, [key for key in keys if key in self.frames.encoded], where, called)
        found = self.frames.columns(batch, pictures, where, keys, called=called)
        part = self.frames.seen(found), self.frames.brought(found, number_of == lengths - 1), number_of == 0
        made: list[Columns] = list(transition_rows([part], final=self.frames.final, where=where))
        count = int(self.files[self.of(chunk)[0]].rows[at])
        skipped = int(bool(step))
        laid = {name: np.concatenate([one[name] for one in made])[skipped : skipped + count] for name in made[0]}
        # The frame of each row; a row that marks a missing observation counts as the frame before it.
        shown = first + np.arange(begin, end)
        ends = np.isin(shown, self._extra)
        shown, marked = np.repeat(shown, 1 + ends), np.repeat(np.zeros(len(shown), bool), 1 + ends)
        marked[np.cumsum(1 + ends)[ends] - 1] = True
        place, number_of = episodes.places(shown)
        laid["episode_step"] = number_of + marked
        laid["metadata_episode_index"] = episodes.index[place]
        return laid

    def _stored(self, number: int, name: str, low: int, high: int) -> pa.Array:
        """Return the stored values of a column for the frames ``low..high - 1`` of a file."""
        metadata = self._opened.file(number).metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        if sum(counts) != self._cuts[number][-1]:
            expected = self._cuts[number][-1]
            raise damaged(self.objects.shown(number), f"expected {expected} frames, found {sum(counts)}")
        edges = np.concatenate([[0], np.cumsum(counts)])
        groups = range(int(np.searchsorted(edges, low, side="right")) - 1, int(np.searchsorted(edges, high)))
        # The next chunk reads rows of the same row group, so it is kept.
        parts = [self.kept((number, group, name), partial(self._column, number, group, name)) for group in groups]
        found = pa.concat_arrays(parts) if len(parts) > 1 else parts[0]
        return found.slice(low - int(edges[groups[0]]), high - low)

    def _column(self, number: int, group: int, name: str) -> pa.Array:
        where = self.objects.shown(number)
        if name not in self._opened.file(number).schema_arrow.names:
            raise damaged(where, f"expected a column {name!r}, found none")
        found = self._opened.column(number, group, name)
        try:
            found.validate(full=True)
        except pa.ArrowException as error:
            raise damaged(where, f"{name}: {error}") from error
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return LeRobotFiles, self._again


def _types(objects: Objects) -> pa.Schema:
    """Return the schema of the first file of frames."""
    if not objects.infos:
        raise DataError(f"{objects.place.client.url}: expected frames, found none")
    return ParquetObjects(objects).file(0).schema_arrow


class _ObjectPath:
    """A remote object or folder with the methods of ``pathlib.Path`` that ``read_description`` calls.

    Args:
        objects: The objects.
        path: Path of the object or folder.
    """

    def __init__(self, objects: Objects, path: str) -> None:
        self._objects, self._path = objects, path
        self._numbers = {info.path: number for number, info in enumerate(objects.infos)}

    def __truediv__(self, name: str) -> _ObjectPath:
        return _ObjectPath(self._objects, f"{self._path}/{name}".lstrip("/"))

    def __fspath__(self) -> str:
        return self._objects.place.client.shown(self._path)

    __str__ = __fspath__

    def is_file(self) -> bool:
        return self._path in self._numbers

    exists = is_file

    def stat(self) -> Any:
        return SimpleNamespace(st_size=self._objects.infos[self._numbers[self._path]].size)

    def open(self, mode: str = "rb") -> BufferedReader:
        return object_stream(self._objects, self._numbers[self._path])

    def read_bytes(self) -> bytes:
        size = self.stat().st_size
        number = self._numbers[self._path]
        return bytes(self._objects.read([Range(number, 0, size)])[0]) if size else b""

    def glob(self, pattern: str) -> Iterator[_ObjectPath]:
        for path in self._numbers:
            if fnmatchcase(path, f"{self._path}/{pattern}"):
                yield _ObjectPath(self._objects, path)

    def relative_to(self, folder: _ObjectPath) -> PurePosixPath:
        return PurePosixPath(self._path).relative_to(folder._path)
