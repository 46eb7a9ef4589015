"""Datasets elsewhere that ``save_to_disk`` wrote: which files, and where their record batches lie."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.dense import DenseBudget
from mouse_core._arrow.windows import Int64s
from mouse_core.about.dataset import About, joined, read_about
from mouse_core.errors import ConfigError, DataError, SchemaError, StorageError
from mouse_core.files.checksum import digest, with_digest, without_digest
from mouse_core.files.ipc.batches import Message
from mouse_core.files.manifest import check_schema, manifest_in, schema_digest
from mouse_core.files.reading import MOST_JSON
from mouse_core.files.writing import make_folder, write_file
from mouse_core.remote.client import ObjectInfo
from mouse_core.store._schema import StoreSchema
from mouse_core.store.disk.manifest import Manifest, bare_schema
from mouse_core.store.disk.reading import settled
from mouse_core.store.remote.files import (
    ArrowFile,
    Asking,
    ElsewhereSegment,
    Files,
    message_at,
    read_with,
    run,
    together,
)
from mouse_core.store.remote.objects import Place, Range
from mouse_core.store.remote.rows import ReadOnlyRows

if TYPE_CHECKING:
    from mouse_core.remote.clients.objects import FolderClient

STATE, SPLITS, INFO = "state.json", "dataset_dict.json", "dataset_info.json"
LEROBOT = "meta/info.json"
# Heads that are looked for at once, where those before were as far from each other.
_MOST_AHEAD = 256
# Files whose record batches are looked for at once.
_TOGETHER = 64
_SCHEMA_BYTES, _HEAD_BYTES = 1 << 14, 1 << 12
# Record batches of differing length are looked for from so many places of a file at once, so many or more from each;
# not where they have more bytes than so many, as one of them is read to find each place.
_MOST_PLACES, _BATCHES_EACH, _MOST_LOOKED_AT = 32, 32, 1 << 20


class SavedRows(ReadOnlyRows):
    """Rows of a dataset, all splits one after the other; they are what they were when they were opened.

    Args:
        place: Where the objects are.
        told: What the store was told of the rows, which are to fit.
        budget: Of the memory for dense copies.
        infos: The Arrow files, streams all of them, in their order, as they are now.
        said: What is said of each beside what its schema says.
        schemas: The digest of the schema of each, as far as it was noted when the file was written.
    """

    def __init__(
        self,
        place: Place,
        told: StoreSchema,
        budget: DenseBudget,
        infos: Sequence[ObjectInfo],
        said: Mapping[str, About],
        schemas: Mapping[str, str],
    ) -> None:
        super().__init__(place.client.url, told, budget)
        self._again = place, told, budget, infos, said, schemas
        found = indexes(place, infos)
        schema = bare_schema(found[0].schema)
        abouts = []
        for info, index in zip(infos, found, strict=True):
            where = place.client.shown(info.path)
            check_schema(where, schemas.get(info.path), index.schema_digest)
            if not bare_schema(index.schema).equals(schema):
                raise SchemaError(
                    f"{where}: expected the columns of {infos[0].path}, {schema.names}, found {index.schema.names}"
                )
            about = joined([(where, read_about(index.schema, label=where)), (where, said.get(info.path, About()))])
            abouts.append((where, about))
        about = joined(abouts)
        self.schema = settled(told, Manifest(about, (schema,)), str(self.path))
        files = [ArrowFile(info, one.rows, one.begins) for info, one in zip(infos, found, strict=True) if len(one.rows)]
        if files:
            place_of_rows = (object(), 0)
            segment = ElsewhereSegment(Files(place, files, schema), self.schema.image_roots, place_of_rows)
            self.segments[:] = [segment]
            self.count = segment.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedRows, self._again


_Saved = tuple[list[str], dict[str, About], dict[str, str]]


def files_saved(client: FolderClient) -> _Saved | None:
    """The Arrow files that a saved dataset, or a dict of them, names, what is said of each, and what is noted of their
    schemas; None: there is none.

    Raises:
        ConfigError: Its rows are found through row numbers.
        DataError: What it says of itself is damaged.
    """
    splits = _json(client, SPLITS)
    if splits is None:
        return _files_in(client, "")
    names = _plain(splits.get("splits"), client.shown(SPLITS))
    paths, said, schemas = list[str](), dict[str, About](), dict[str, str]()
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
    about = read_about(str(info.get("description", "")), label=client.shown(folder + INFO))
    known = manifest_in(state, client.shown(folder + STATE))
    schemas = {folder + name: one.schema for name, one in known.files.items() if one.schema} if known else {}
    return paths, dict.fromkeys(paths, about), schemas


def _plain(names: Any, label: str) -> list[str]:
    """Names of files or folders; a dataset must not reach for anything outside of its folder."""
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


# ---------------------------------------------------------------------- where record batches lie


class Index:
    """The positions of the record batches in a stream.

    Args:
        schema: Its columns.
        schema_digest: The digest of the schema's message; see ``files.manifest.schema_digest``.
        begins: The first byte of each record batch, int64 ``[n]``.
        rows: The number of rows of each record batch, int64 ``[n]``.
    """

    def __init__(self, schema: pa.Schema, schema_digest: str, begins: Int64s, rows: Int64s) -> None:
        self.schema, self.schema_digest, self.begins, self.rows = schema, schema_digest, begins, rows

    def to_bytes(self) -> bytes:
        """Return the bytes that ``of_bytes`` takes."""
        file = io.BytesIO()
        schema = np.frombuffer(self.schema.serialize(), np.uint8)
        np.savez(file, schema=schema, schema_digest=self.schema_digest, begins=self.begins, rows=self.rows)
        return with_digest(file.getvalue())

    @classmethod
    def of_bytes(cls, content: bytes) -> Index | None:
        """An index that was kept; None where it is damaged."""
        bare = without_digest(content)
        if bare is None:
            return None
        with np.load(io.BytesIO(bare), allow_pickle=False) as found:
            schema = pa.ipc.read_schema(pa.py_buffer(found["schema"].tobytes()))
            return cls(schema, str(found["schema_digest"]), found["begins"], found["rows"])


def indexes(place: Place, infos: Sequence[ObjectInfo]) -> list[Index]:
    """The indexes of streams: those that the cache has, and others, which it has from then on."""
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
        pass  # it is found again


def _named(label: str, reader: Asking[Index]) -> Asking[Index]:
    try:
        return (yield from reader)
    except DataError as error:
        if label in str(error):
            raise
        raise DataError(f"{label}: {error}") from error


def _index_of(number: int, size: int) -> Asking[Index]:
    """The index of a stream."""
    schema, of_schema, first = yield from read_with(
        number, 0, min(size, _SCHEMA_BYTES), lambda read: _schema(read, size)
    )
    places = yield from _places(number, first, size)
    stops = [*places[1:], size]
    parts = yield from together([_lying(number, *ends, size) for ends in zip(places, stops, strict=True)])
    if any(isinstance(part, DataError) for part in parts):  # what looked like a head was none, or it is damaged
        parts = [(yield from _lying(number, first, size, size))]
    begins, rows = [], []
    for part in parts:
        if isinstance(part, DataError):
            raise part
        begins.append(part[0])
        rows.append(part[1])
    return Index(schema, of_schema, np.concatenate(begins), np.concatenate(rows))


def _places(number: int, first: int, size: int) -> Asking[list[int]]:
    """Return positions from which to search for record batches concurrently: the first, and others throughout a long
    stream whose batches differ in length, as those of texts and pictures do. No position is known from the one before
    it.

    Heads of the same columns are of the same length, which their first 8 bytes say.
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
    """Return the begins and row counts of record batches from ``first`` on, up to one at ``stop`` or the stream's end
    at ``size``. Heads are read one by one, and many at once while their distances are equal.
    """
    begins: list[int] = []
    rows: list[int] = []
    begin, stride, guess, ahead = first, 0, _HEAD_BYTES, 1
    while begin < stop:
        wanted = [begin + step * stride for step in range(ahead) if step == 0 or begin + step * stride + 8 <= size]
        found = yield from together([_maybe(number, one, size, guess) for one in wanted])
        for at, message in zip(wanted, found, strict=True):
            if at != begin or begin >= stop:
                break  # those before went another way, or came to the end
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
    """A message where there may be one."""
    try:
        return (yield from message_at(number, begin, size, guess))
    except DataError as error:
        return error


def _schema(read: Any, size: int) -> tuple[pa.Schema, str, int]:
    """The schema that a stream begins with, the digest of its message, and where that ends."""
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
