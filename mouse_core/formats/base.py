"""The class RowStream, which every reader returns, and functions that read, write and compare rows of any source.

Writers of formats take the rows of a stream, a store, a ``datasets.Dataset`` or a table as a stream (``as_stream``), as
pieces (``pieces_of``), or as episodes (``episodes_of``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mouse_core._arrow.addresses import check_rows
from mouse_core._arrow.column_types import is_list
from mouse_core._arrow.dense import plain, without_nulls
from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import DataError, MouseError, SchemaError
from mouse_core.files.manifest import add_manifest, add_parquet_checksum
from mouse_core.files.reading import damaged, naming
from mouse_core.files.writing import check_nothing_at, link_or_copy, making, remove
from mouse_core.formats import columns
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.images.files import open_inside
from mouse_core.metadata import DatasetMetadata, features_in, read_metadata, with_metadata
from mouse_core.spec import Alignment
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.evidence import FirstRows
from mouse_core.store.fields import fields_of_steps
from mouse_core.store.views import Store
from mouse_core.video.frames import carry_videos

BATCH_ROWS = 8192
"""Default limit of the number of rows in a batch of a reader."""


@dataclass(frozen=True)
class RowStream:
    """Recorded steps as a stream of ``pyarrow.RecordBatch``. As in stores, an episode of T transitions has T+1 rows.

    Every batch has the columns ``action``, ``reward``, ``done`` (0 alive, 1 terminal, 2 truncated), ``episode_step``
    and columns of observations; all other values are in columns ``metadata_*`` and ``info.*``. Each iteration reads the
    data again.

    Args:
        path: Path of the data, or a description of data without a file.
        format: Name of the format ("minari", "rlds", ...).
        schema: Names and Arrow types of the columns of every batch.
        batches: A function that returns a new iterator over the batches.
        rows: Number of rows; None if the number is not known before reading.
        notes: Decisions of the reader, each as one sentence.
        faults: Faults of the data. Each fault has a code as in ``mouse inspect``, a severity ("error" or "warning"),
            and a sentence.
        format_metadata: Metadata of the format, under the format's own names.
        mapped: A function that returns all rows as a ``datasets.Dataset`` of memory-mapped files; None if the rows are
            not in memory-mapped files.
        opened: A function that returns a store, which reads the rows from the original files; None if no store can read
            the original files.
        metadata: The metadata that the data contain, and metadata that the reader adds. The alignment in the metadata
            is None if the data do not state it; then "arrived" is assumed.
        image_roots: Further allowed folders of images (absolute, without links): an image whose path is in a row must
            lie in one of these folders or in a folder of the data.
        noted: The digest of all rows that was recorded when the rows were written; None if no digest was recorded.
    """

    path: str
    format: str
    schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]] = field(repr=False)
    rows: int | None = None
    notes: tuple[str, ...] = ()
    faults: tuple[tuple[str, str, str], ...] = ()
    format_metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    mapped: Callable[[], Any] | None = field(default=None, repr=False)
    opened: Callable[..., DatasetStore] | None = field(default=None, repr=False)
    metadata: DatasetMetadata = field(default_factory=DatasetMetadata)
    image_roots: tuple[str, ...] = ()
    noted: str | None = None

    @classmethod
    def of_columns(
        cls,
        path: str | os.PathLike[str],
        format: str,
        first: Columns,
        rows: Callable[[], Iterable[Columns]],
        /,
        **attributes: Any,
    ) -> RowStream:
        """Return a stream for a reader that produces arrays; by default, the alignment of the rows is "arrived".

        Args:
            path, format: See the class ``RowStream``.
            first: An array ``[n, ...]`` for each column, where n can be 0; the schema of all rows is derived from
                these arrays.
            rows: A function that returns a new iterator over all rows, some rows at a time.
            **attributes: Other attributes of the stream.
        """
        schema, where = columns.schema_of(columns.ordered(first)), os.fspath(path)

        def batches() -> Iterator[pa.RecordBatch]:
            with naming(where):
                yield from columns.to_batches(rows(), schema, where=where)

        metadata = in_stored_layout(attributes.pop("metadata", DatasetMetadata("arrived")), schema)
        return cls(where, format, schema, batches, metadata=metadata, **attributes)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        object.__setattr__(self, "format_metadata", MappingProxyType(dict(self.format_metadata)))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    @property
    def alignment(self) -> Alignment:
        """The alignment of actions, rewards and done codes in the rows.

        The value is "arrived" if the metadata state no alignment.
        """
        return self.metadata.alignment or "arrived"

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """Arrow types of the columns by name."""
        return {column.name: column.type for column in self.schema}

    def replace(self, **changes: Any) -> RowStream:
        """Return a copy of the stream with changed attributes.

        A copy with new ``batches`` cannot read the files in place.
        """
        if "batches" in changes:
            changes = {"mapped": None, "opened": None, "noted": None, **changes}
        return replace(self, **changes)

    def image_folders(self) -> tuple[str, ...]:
        """Return the allowed folders of images whose paths are in rows: the folders of the data and ``image_roots``."""
        folders = list(self.image_roots)
        if os.path.exists(self.path):
            folder = self.path if os.path.isdir(self.path) else os.path.dirname(os.path.abspath(self.path))
            splits = self.format_metadata.get("splits", {}) if self.format in ("datasets", "parquet") else {}
            files = [os.path.dirname(os.path.realpath(file)) for files in splits.values() for file in files]
            folders = [os.path.realpath(folder), *files, *folders]
        return tuple(dict.fromkeys(folders))

    def watched(self, watch: Callable[[pa.RecordBatch], object]) -> RowStream:
        """Return a stream of the same rows that calls ``watch`` with each batch before it yields the batch."""

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in self:
                watch(batch)
                yield batch

        return self.replace(batches=batches, mapped=self.mapped, opened=self.opened, noted=self.noted)

    def to_table(self) -> pa.Table:
        """Return all rows, in memory, with their metadata."""
        first = FirstRows()
        return with_metadata(pa.Table.from_batches(list(self.watched(first.add)), schema=self.schema), self.metadata)

    def to_store(self, make: Callable[..., DatasetStore] = DatasetStore, /, **options: Any) -> DatasetStore:
        """Return all rows as a store: Arrow files are read in place, and other rows are loaded into memory.

        For data larger than memory, call ``save`` first, and open the folder.

        Args:
            make: The class of the store.
            **options: Options of ``DatasetStore``. The folders of the data are allowed folders of images, in addition
                to ``image_roots``.
        """
        options["image_roots"] = [*self.image_folders(), *options.get("image_roots", ())]
        if self.opened is not None and (self.rows or not self.mapped):
            opened = self.opened(**options)
            if opened.metadata.replace(dimensions=self.metadata.dimensions) == self.metadata:
                opened.format, opened.notes = self.format, self.notes
                return opened
        rows = self.mapped() if self.mapped else self.to_table()
        if read_metadata(rows) != self.metadata:
            rows = with_metadata(rows, self.metadata)
        stated = {} if self.metadata.alignment is None else {"alignment": self.alignment}
        store = make(**{**stated, **options}).from_dataset(rows)
        store.format, store.notes = self.format, self.notes
        return store

    def digest(self) -> str:
        """Return a digest of the column names, types and all values of the rows, in order; see ``rows_digest``."""
        return rows_digest(self)

    def check_digest(self, found: str) -> None:
        """Raise DataError if ``found``, the digest of all rows that were read, differs from the recorded digest."""
        if self.noted is not None and found != self.noted:
            raise damaged(self.path, f"expected rows with the digest {self.noted}, as written, found {found}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a folder that ``DatasetStore.open`` and ``datasets.load_from_disk`` open.

        At most one batch of rows is in memory at a time. The rows are written to a temporary folder, which is renamed
        to ``path`` when the folder is complete on the disk. Images that rows name by path are written into the rows.
        Videos to which rows refer become hard links in the folder, or copies if the file system has no links. Nonzero
        rewards at the first rows of episodes contradict the alignment "arrived" and cause an ``AlignmentWarning``.
        ``formats.save`` writes other formats.

        Args:
            path: The folder; nothing may exist there.

        Raises:
            ConfigError: ``path`` exists, ends in a suffix of files, or is being written by another process.
            StorageError: The folder cannot be written; a partial folder is removed.
            DataError: The source is damaged, or a row names a file that is not an image or is outside of the allowed
                folders.
        """
        target = Path(path)
        check_folder_name(target, wanted="the name of a folder to write")
        check_nothing_at(target, "save")
        schema, digest = dataset_schema(self.schema, self.metadata, self.path), RowDigest(self.schema)
        first = FirstRows()
        with making(target, "save") as partial:
            name = "data-00000-of-00001.arrow"
            with pa.OSFile(str(partial / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                for batch in embedded(self).watched(digest.update).watched(first.add):
                    writer.write_batch(batch.cast(schema) if batch.schema != schema else batch)
            self.check_digest(digest.hexdigest())
            describe(partial, schema, self.metadata, {name: digest.rows}, digest.hexdigest())
            if self.metadata.videos:
                carry_videos(self.metadata.videos, self.image_folders(), partial)
        if self.alignment == "arrived":
            first.warn_of_rewards(self.path, stacklevel=2)


def in_stored_layout(metadata: DatasetMetadata, schema: pa.Schema) -> DatasetMetadata:
    """Return metadata with which batches keep the stored names, dtypes and shapes of observations and actions.

    Args:
        metadata: The metadata to extend; existing fields are kept.
        schema: The schema of the rows.
    """
    known = {columns.MISSING, *(field.column for field in metadata.fields)}
    types = {
        column.name: column.type
        for column in schema
        if column.name not in known
        and any(columns.belongs_to(column.name, whole) for whole in ("observation", "action"))
    }
    return metadata.replace(layout="stored", fields=[*fields_of_steps(types, schema.names), *metadata.fields])


def rows_digest(batches: Any) -> str:
    """Return a digest of rows: column names in order, types, and the bits of every value.

    The digest does not depend on the division of rows into batches, or on Arrow's encoding (fixed-size or other lists,
    dictionaries, shared buffers).

    Args:
        batches: A ``RowStream``, a ``pyarrow.Table``, or record batches of one schema.

    Returns:
        64 hexadecimal digits.
    """
    digest = RowDigest(getattr(batches, "schema", None))
    for batch in batches.to_batches() if isinstance(batches, pa.Table) else batches:
        digest.update(batch)
    return digest.hexdigest()


def as_stream(rows: Any) -> RowStream:
    """Return rows as a stream.

    Args:
        rows: A ``RowStream``, a store or a view; or a ``datasets.Dataset`` or ``pyarrow.Table``, as for
            ``DatasetStore.from_dataset``.
    """
    if isinstance(rows, RowStream):
        return rows
    return stream_of(rows if isinstance(rows, Store) else DatasetStore().from_dataset(rows))


def stream_of(store: Store, *, batch_rows: int = BATCH_ROWS) -> RowStream:
    """Return the rows of a store as a stream, without a copy.

    Args:
        store: The store or view.
        batch_rows: Largest number of rows of a batch.

    Raises:
        ConfigError: The store has no rows.
    """
    dataset = store.to_dataset()

    def batches() -> Iterator[pa.RecordBatch]:
        for table in dataset.with_format("arrow").iter(batch_size=batch_rows):
            yield from table.to_batches()

    return RowStream(
        "a store",
        "datasets",
        dataset.features.arrow_schema,
        batches,
        rows=len(dataset),
        metadata=store.metadata,
        image_roots=tuple(dict.fromkeys(root for one in store.snapshot().segments for root in one.image_roots)),
    )


def pieces_of(rows: Any) -> Iterator[tuple[bool, Columns]]:
    """Yield rows in pieces: a piece ends where an episode or a batch of ``rows`` ends.

    An episode begins where ``episode_step`` is 0. Without the column ``episode_step``, or where it is null, an episode
    begins after a row with ``done``.

    Yields:
        A pair for each piece: a bool that is True if an episode begins with the piece; and a dict of the columns ``[n,
        ...]`` of the piece, without ``episode_step`` and without null metadata.

    Raises:
        SchemaError: The rows have the alignment "outgoing".
        DataError: Values are null or ragged, or rewards are vectors; other formats cannot store such values.
    """
    ended, stream = True, as_stream(rows)
    if stream.alignment != "arrived":
        raise SchemaError(f"rows: expected rows of alignment 'arrived', found {stream.alignment!r}")
    for batch in stream:
        if not batch.num_rows:
            continue
        check_rows(batch, "rows", whole=False)
        if "done" not in batch.schema.names:
            raise DataError(f"rows: expected a column 'done', found {batch.schema.names}")
        steps = batch.column("episode_step") if "episode_step" in batch.schema.names else None
        arrays = {name: batch.column(name) for name in batch.schema.names if name != "episode_step"}
        # Metadata that only some episodes have are null in the others.
        partial = {name: arrays.pop(name) for name in list(arrays) if _is_partial(name, arrays[name])}
        converted = {name: columns.from_arrow(array, where=f"column {name!r}") for name, array in arrays.items()}
        if converted.get("reward", converted["done"]).size > batch.num_rows or "agent_done" in converted:
            raise DataError(
                "rows: expected one reward and one done per step, which the written format needs, found vector "
                "rewards or the column 'agent_done'; DatasetStore.save can store such rows"
            )
        after = np.concatenate([[ended], converted["done"][:-1] != 0])
        begins = after if steps is None else _begins(steps, after)
        ended = bool(converted["done"][-1] != 0)
        edges = [0, *np.flatnonzero(begins).tolist(), batch.num_rows]
        for number, (start, stop) in enumerate(pairwise(edges)):
            if stop > start:
                piece = {name: values[start:stop] for name, values in converted.items()}
                yield number > 0, piece | _whole(partial, start, stop)


def episodes_of(rows: Any) -> Iterator[Columns]:
    """Yield rows as episodes; at most one episode is in memory at a time. See ``pieces_of``."""
    held: list[Columns] = []
    for begins, part in pieces_of(rows):
        if begins and held:
            yield _joined(held)
            held = []
        held.append(part)
    if held:
        yield _joined(held)


def overlapping_pieces(rows: Any) -> Iterator[tuple[bool, Columns]]:
    """Yield pieces of rows like ``pieces_of``, but with an overlap of one row within an episode.

    A piece that continues an episode begins with the last row of the piece before.
    """
    held: Columns = {}
    for begins, piece in pieces_of(rows):
        joint = piece if begins or not held else _joined([held, piece])
        held = {name: values[-1:] for name, values in joint.items()}
        yield joint is piece, joint


def _whole(partial: Mapping[str, pa.Array], start: int, stop: int) -> Columns:
    """Return rows ``start..stop - 1`` of the columns, without columns in which all rows are null."""
    parts = {name: array.slice(start, stop - start) for name, array in partial.items()}
    return {
        name: columns.from_arrow(part, where=f"column {name!r}")
        for name, part in parts.items()
        if part.null_count < len(part)
    }


def _is_partial(name: str, array: pa.Array) -> bool:
    return columns.is_metadata(name) and (array.null_count > 0 or pa.types.is_null(array.type))


def _begins(steps: pa.Array, after: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    known = np.asarray(steps.is_valid())
    return np.where(known, np.asarray(steps.fill_null(-1)) == 0, after)


def _joined(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    uneven = {name for part in parts for name in parts[0].keys() ^ part.keys()}
    if uneven:
        raise DataError(f"columns {sorted(uneven)}: expected values in all rows of an episode, or in none")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


_ROW_GROUP_BYTES = 4 << 20


class ShardWriter:
    """Writes rows to a new Arrow or Parquet file in a folder.

    Args:
        folder: The folder.
        number: Index of the file. The file's name also contains the process id. If an earlier process is still running,
            the two processes therefore write to different files.
        kind: "arrow" or "parquet".
        schema: Schema of the file; batches are cast to it.
    """

    def __init__(self, folder: Path, number: int, kind: str, schema: pa.Schema) -> None:
        self.name = f"part-{number:05d}-{os.getpid()}.{kind}"
        self._path, self._schema = folder / self.name, schema
        self._open = ExitStack()
        self._sink = self._open.enter_context(pa.OSFile(str(self._path), "wb"))
        self._writer: Any = (
            pa.ipc.new_stream(self._sink, schema)
            if kind == "arrow"
            else pq.ParquetWriter(self._sink, schema, compression="zstd", write_page_checksum=True)
        )
        self._open.callback(self._writer.close)

    @property
    def bytes(self) -> int:
        """The number of bytes written so far."""
        return int(self._sink.tell())

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch."""
        table = pa.Table.from_batches([batch])
        if not table.schema.equals(self._schema, check_metadata=True):
            table = table.cast(self._schema).combine_chunks()
        if isinstance(self._writer, pq.ParquetWriter):
            # Encoding needs several times the memory of the rows, so each batch becomes a row group.
            most = columns.rows_at_once(
                columns.bytes_a_row(table), most=max(table.num_rows, 1), budget=_ROW_GROUP_BYTES
            )
            for first in range(0, max(table.num_rows, 1), most):
                self._writer.write_table(table.slice(first, most))
            return
        for piece in table.to_batches():
            self._writer.write_batch(piece)

    def finish(self) -> tuple[list[str], Any]:
        """Close the file. Return the name of the file, and None in place of the ``facts`` that a writer of store
        segments returns.
        """
        self._open.close()
        if isinstance(self._writer, pq.ParquetWriter):
            add_parquet_checksum(self._path)
        return [self.name], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._open.close()
        if kind is not None:
            remove(self._path)


def link_parts(work: Path, result: Path, parts: Mapping[str, int], kind: str) -> dict[str, int]:
    """Create links to the files of rows in ``result``, with the file names that ``datasets`` uses.

    Args:
        work: The folder of the files.
        result: The empty folder in which the links are created.
        parts: Number of rows by the name of each file, in order.
        kind: "arrow" or "parquet".

    Returns:
        A dict from the new name of each file to its number of rows.
    """
    rows = {}
    stem = "data" if kind == "arrow" else "train"
    for number, (part, count) in enumerate(parts.items()):
        name = f"{stem}-{number:05d}-of-{len(parts):05d}.{kind}"
        link_or_copy(work / part, result / name)
        rows[name] = count
    return rows


def dataset_schema(schema: pa.Schema, metadata: DatasetMetadata, where: str) -> pa.Schema:
    """Convert a schema to the types of ``datasets``, and add ``metadata`` to the metadata of the schema.

    Raises:
        SchemaError: ``datasets`` has no type for a column; the message begins with ``where``.
    """
    import datasets

    try:
        converted = datasets.Features.from_arrow_schema(schema).arrow_schema
    except (ValueError, TypeError, NotImplementedError, KeyError, AttributeError) as error:
        raise SchemaError(f"{where}: expected columns of types that the library datasets supports: {error}") from error
    return with_metadata(converted, metadata)


def describe(folder: Path, schema: pa.Schema, metadata: DatasetMetadata, rows: Mapping[str, int], digest: str) -> None:
    """Write the JSON files that ``datasets.load_from_disk`` needs for Arrow files, and the folder's manifest.

    Args:
        folder: The folder with all Arrow files.
        schema: The schema of the files.
        metadata: The metadata of the dataset.
        rows: The number of rows by file name.
        digest: The digest of all rows.
    """
    import datasets

    info = datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(schema))
    with_metadata(info, metadata).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in rows],
        "_fingerprint": digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    add_manifest(folder, rows, digest)


def join_parquet_files(parts: Sequence[Path], target: Path, schema: pa.Schema) -> None:
    """Join the Parquet files ``parts`` into one new file, one row group at a time."""
    with pq.ParquetWriter(str(target), schema, compression="zstd", write_page_checksum=True) as writer:
        for part in parts:
            with pq.ParquetFile(str(part), page_checksum_verification=True) as source:
                for number in range(source.num_row_groups):
                    writer.write_table(source.read_row_group(number).cast(schema))
    add_parquet_checksum(target)


class RowDigest:
    """A digest of rows, which are added as record batches one after another.

    Args:
        schema: The schema of the rows. The default is the schema of the first batch; pass ``schema`` if there can be no
            batch.
        hashed: A function that returns a new hash object, with the methods ``update`` and ``digest``.
    """

    def __init__(self, schema: pa.Schema | None = None, hashed: Callable[[], Any] = hashlib.sha256) -> None:
        self._hashed = hashed
        self._columns = None if schema is None else _begun(schema, hashed)
        self.rows = 0

    def update(self, batch: pa.RecordBatch) -> None:
        """Add rows.

        Raises:
            SchemaError: The columns differ from the columns of the earlier rows.
        """
        if self._columns is None:
            self._columns = _begun(batch.schema, self._hashed)
        if batch.schema.names != list(self._columns):
            raise SchemaError(f"digest: expected columns {list(self._columns)}, found {batch.schema.names}")
        for column, array in zip(self._columns.values(), batch.columns, strict=True):
            column.update(array)
        self.rows += batch.num_rows

    def hexdigest(self) -> str:
        """Return the digest of all rows so far, 64 hexadecimal digits."""
        whole = hashlib.sha256(f"{self.rows} rows;".encode())
        for name, column in (self._columns or {}).items():
            whole.update(f"{name!r} {column.kind} ".encode() + column.digest() + b";")
        return whole.hexdigest()


def _begun(schema: pa.Schema, hashed: Callable[[], Any]) -> dict[str, _ColumnDigest]:
    return {column.name: _ColumnDigest(_canonical(column.type), hashed) for column in schema}


class _ColumnDigest:
    """Digest of one level of nested lists in a column.

    The digest covers nulls, list lengths, and the values or the next inner level.
    """

    def __init__(self, kind: str, hashed: Callable[[], Any]) -> None:
        self.kind, self._hashed = kind, hashed
        self._values = hashed()
        self._valid = _Changes()
        self._lengths = _Changes()
        self._children: list[_ColumnDigest] = []

    def update(self, array: pa.Array) -> None:
        array = plain(array)
        self._valid.update(np.asarray(array.is_valid()))
        if array.null_count:
            array = without_nulls(array)
        if is_list(array.type):
            self._update_lists(array)
        elif pa.types.is_struct(array.type):
            for number, values in enumerate(array.flatten()):
                self._child(number, _canonical(values.type)).update(values)
        elif _is_text(array.type):
            self._update_texts(array)
        elif len(array):  # this excludes the type null, in which every row is null
            values = array.cast(pa.uint8()) if pa.types.is_boolean(array.type) else array
            numbers = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
            self._values.update(numbers.view(np.uint8).data)

    def _update_lists(self, array: pa.Array) -> None:
        self._lengths.update(array.value_lengths().to_numpy(zero_copy_only=False))
        self._child(0, _canonical(array.type.value_type)).update(array.flatten())

    def _update_texts(self, array: pa.Array) -> None:
        self._lengths.update(pc.binary_length(array).to_numpy(zero_copy_only=False))
        wide = array.cast(pa.large_binary())
        ends = np.frombuffer(wide.buffers()[1], np.int64)[wide.offset : wide.offset + len(wide) + 1]
        if len(array) and ends[-1] > ends[0]:
            self._values.update(memoryview(wide.buffers()[2])[int(ends[0]) : int(ends[-1])])

    def _child(self, number: int, kind: str) -> _ColumnDigest:
        if number == len(self._children):
            self._children.append(_ColumnDigest(kind, self._hashed))
        return self._children[number]

    def digest(self) -> bytes:
        parts = [self._values.digest(), self._valid.digest(), self._lengths.digest()]
        parts += [child.digest() for child in self._children]
        return hashlib.sha256(b"".join(parts)).digest()


class _Changes:
    """Hashes a sequence of integers: the hash covers each integer that differs from the integer before it, and the
    position of each such integer.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._last, self._count = -1, 0

    def update(self, values: npt.NDArray[Any]) -> None:
        if len(values):
            # A mask of all pixels of a batch is large, so no array here is wider than the values.
            at = np.flatnonzero(values[1:] != values[:-1]) + 1
            at = at if values[0] == self._last else np.append(0, at)
            self._hash.update(np.stack([self._count + at, values[at]]).T.astype("<i8").tobytes())
            self._last, self._count = int(values[-1]), self._count + len(values)

    def digest(self) -> bytes:
        return self._hash.digest()


def _is_text(data_type: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(data_type) for test in tests)


def _canonical(data_type: pa.DataType) -> str:
    """Return the name of a type without its Arrow encoding.

    For example, a type of dictionary-encoded texts has the same name as a type of plain texts.
    """
    if isinstance(data_type, pa.BaseExtensionType):
        return _canonical(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return _canonical(data_type.value_type)
    if is_list(data_type):
        return f"list<{_canonical(data_type.value_type)}>"
    if pa.types.is_struct(data_type):
        inner: list[Any] = [f"{child.name}: {_canonical(child.type)}" for child in data_type]
        return f"struct<{', '.join(inner)}>"
    return str(data_type).removeprefix("large_")


_FIRST_ROWS, _MOST_ROWS = 16, 8192
_PIECE_BYTES = 16 << 20


def embedded(stream: Any, *, others: bool = True) -> Any:
    """Return the same rows; an image that a row names by path is replaced by the bytes of the image file.

    Args:
        stream: The rows.
        others: Whether a path in a column of other files than images, such as sounds, raises an error; otherwise such a
            path stays unchanged.

    Returns:
        The new stream; ``stream`` itself if no column can name files.

    Raises:
        DataError: Raised while reading: a path is outside of the allowed folders, does not exist, or is not an image.
            The message names column and row.
    """
    types = features_in(stream.schema.metadata or {})
    images = {
        column.name: types.get(column.name, {}).get("_type", "Image") == "Image"
        for column in stream.schema
        if names_files(column.type)
    }
    if not others:
        images = {name: True for name, image in images.items() if image}
    if not images:
        return stream
    roots = stream.image_folders()

    def batches() -> Iterator[pa.RecordBatch]:
        first = 0
        for batch in stream:
            yield from _pieces(batch, images, first, roots)
            first += batch.num_rows

    return stream.replace(batches=batches, mapped=stream.mapped, noted=stream.noted)


def names_files(data_type: pa.DataType) -> bool:
    """Whether values have the form ``{bytes, path}``: the bytes of a file, or the path of a file."""
    return pa.types.is_struct(data_type) and {child.name for child in data_type} == {"bytes", "path"}


def by_path(files: pa.Array) -> pa.Array:
    """Return a mask of the rows of a ``{bytes, path}`` column that have a path and no bytes."""
    return pc.and_(pc.is_null(pc.struct_field(files, "bytes")), pc.is_valid(pc.struct_field(files, "path")))


def embed(files: pa.Array, read: Callable[..., bytes], *, where: str, first_row: int) -> pa.Array:
    """Return a ``{bytes, path}`` column with the bytes of the named files.

    The paths in the column are shortened to file names.

    Args:
        files: The column.
        read: A function that takes the path of a file, and ``where`` for error messages, and returns the bytes of the
            file.
        where: Name of the column for error messages.
        first_row: Index of the first row.
    """
    rows = by_path(files)
    if not pc.any(rows).as_py():
        return files
    encoded, path = pc.struct_field(files, "bytes"), pc.struct_field(files, "path")
    values, names = encoded.to_pylist(), path.to_pylist()
    for row in pc.indices_nonzero(rows).to_pylist():
        values[row] = read(names[row], where=f"{where}, row {first_row + row}")
        names[row] = names[row].replace("\\", "/").rpartition("/")[2]
    parts = {"bytes": pa.array(values, type=encoded.type), "path": pa.array(names, type=path.type)}
    kinds = list(files.type)
    return pa.StructArray.from_arrays([parts[kind.name] for kind in kinds], fields=kinds, mask=pc.is_null(files))


def _pieces(
    batch: pa.RecordBatch, images: dict[str, bool], first_row: int, roots: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield a batch, with the bytes of its images, in pieces of bounded size.

    A batch is divided because images can be far larger than their paths.
    """
    if not any(pc.any(by_path(batch.column(name))).as_py() for name in images):
        yield batch
        return
    first, step = 0, _FIRST_ROWS
    while first < batch.num_rows:
        piece = batch.slice(first, step)
        for name, image in images.items():
            read = partial(read_image, image=image, roots=roots)
            column = embed(piece.column(name), read, where=f"column {name!r}", first_row=first_row + first)
            piece = piece.set_column(piece.schema.get_field_index(name), piece.schema.field(name), column)
        yield piece
        first += piece.num_rows
        step = int(np.clip(_PIECE_BYTES * piece.num_rows // max(1, piece.nbytes), 1, _MOST_ROWS))


def read_image(path: str, *, image: bool, roots: Sequence[str], where: str, whole: bool = False) -> bytes:
    """Return the bytes of the image file that a row names.

    Args:
        path: The path in the row.
        image: Whether the column has images. If False, DataError is raised, because only images are embedded. If True,
            DataError is raised for a file that is not an image.
        roots: Allowed folders (absolute, without links).
        where: Name of the row for error messages.
        whole: Whether to decode the complete image, not only its header.
    """
    from mouse_core.images.pixels import decode_image, image_shape

    if not image:
        raise DataError(f"{where}: expected bytes, found only a path, {path!r}; only images are embedded")
    try:
        with open_inside(path, roots) as file:
            encoded = file.read()
        try:
            (decode_image if whole else image_shape)(encoded, dtype=np.uint16)
        except MouseError as error:
            raise DataError(f"path {path!r}: {error}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: {error}") from error
    return encoded
