"""The stream of rows that every reader of a format returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError
from mouse_core.files.reading import damaged
from mouse_core.files.writing import check_nothing_at, making
from mouse_core.formats._files.on_disk import check_folder_name
from mouse_core.formats._files.shards import dataset_schema, describe
from mouse_core.formats.columns.digest import RowDigest
from mouse_core.formats.columns.embedding import embedded
from mouse_core.formats.columns.named import ordered, schema_of, to_batches
from mouse_core.metadata import DatasetMetadata, read_metadata, with_metadata
from mouse_core.spec import Alignment
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.evidence import FirstRows
from mouse_core.video.frames import carry_videos

BATCH_ROWS = 8192
"""Most rows of a batch of a reader by default."""


@dataclass(frozen=True)
class RowStream:
    """Recorded steps as a stream of ``pyarrow.RecordBatch``, in the convention of stores: T transitions are T+1 rows.

    Every batch has the columns ``action``, ``reward``, ``done`` (0 alive, 1 terminal, 2 truncated), ``episode_step``
    and columns of observations; all other values are in columns ``metadata_*``. Iterating again reads again.

    Args:
        path: Path of the data, or a description of data that lie in no file.
        format: Name of the format ("minari", "rlds", ...).
        schema: Names and Arrow types of the columns of every batch.
        batches: Returns a new iterator over the batches.
        alignment: Which transition a row's action, reward and done belong to.
        episodes: Number of episodes, if the format says it.
        rows: Number of rows, if it is known before reading.
        notes: Decisions of the reader, a sentence each.
        faults: Faults of the data: for each a code of ``mouse inspect``, "error" or "warning", and a sentence.
        mended: Returns the same rows without the episodes that cannot be read, which ``faults`` name; None if the
            reader does not look for them.
        format_metadata: Metadata in the words of the format.
        mapped: Returns all rows as a ``datasets.Dataset`` of mapped files; None if no such files exist.
        opened: Returns all rows as a store that reads them in place; None if no store can.
        metadata: The metadata in the data, and what the reader adds. Its alignment is None where "arrived" is only an
            assumption.
        image_roots: Folders (absolute, without links) in which images may lie that rows name by path, beside those that
            the data lie in.
        noted: Digest of all rows from the time they were written; None if none was noted.
    """

    path: str
    format: str
    schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]] = field(repr=False)
    alignment: Alignment = "arrived"
    episodes: int | None = None
    rows: int | None = None
    notes: tuple[str, ...] = ()
    faults: tuple[tuple[str, str, str], ...] = ()
    mended: Callable[[], RowStream] | None = field(default=None, repr=False)
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
        """Return the stream of a reader that lays rows out as arrays; by default their alignment is "arrived".

        Args:
            path, format: See the class.
            first: Some rows, or none, which have the columns of all rows.
            rows: Returns a new iterator over all rows, a few at a time.
            **attributes: Other attributes of the stream.
        """
        schema, where = schema_of(ordered(first)), os.fspath(path)
        batches = lambda: to_batches(rows(), schema, where=where)  # noqa: E731
        return cls(where, format, schema, batches, **{"metadata": DatasetMetadata("arrived"), **attributes})

    def __post_init__(self) -> None:
        if self.metadata.alignment is None and self.alignment != "arrived":
            object.__setattr__(self, "metadata", self.metadata.replace(alignment=self.alignment))
        if self.metadata.alignment not in (None, self.alignment):
            raise ConfigError(
                f"alignment: expected {self.metadata.alignment!r} as the metadata says, found {self.alignment!r}"
            )
        object.__setattr__(self, "path", os.fspath(self.path))
        object.__setattr__(self, "format_metadata", MappingProxyType(dict(self.format_metadata)))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """Arrow types of the columns by name."""
        return {column.name: column.type for column in self.schema}

    def replace(self, **changes: Any) -> RowStream:
        """Return the stream with some attributes changed; with new batches it loses its ways to the files on disk.

        A new alignment becomes part of the metadata.
        """
        if "alignment" in changes and "metadata" not in changes:
            changes["metadata"] = self.metadata.replace(alignment=changes["alignment"])
        if "batches" in changes:
            changes = {"mapped": None, "opened": None, "mended": None, "noted": None, **changes}
        return replace(self, **changes)

    def image_folders(self) -> tuple[str, ...]:
        """Return the folders in which images that rows name by path may lie: those of the data, and ``image_roots``."""
        folders = list(self.image_roots)
        if os.path.exists(self.path):
            folder = self.path if os.path.isdir(self.path) else os.path.dirname(os.path.abspath(self.path))
            splits = self.format_metadata.get("splits", {}) if self.format in ("datasets", "parquet") else {}
            files = [os.path.dirname(os.path.realpath(file)) for files in splits.values() for file in files]
            folders = [os.path.realpath(folder), *files, *folders]
        return tuple(dict.fromkeys(folders))

    def watched(self, watch: Callable[[pa.RecordBatch], object]) -> RowStream:
        """Return the same stream; it calls ``watch`` with each batch before it yields the batch."""

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
        """Return all rows as a store: by reference to Arrow files as ``datasets`` writes them, else in memory.

        For data larger than memory, use ``write`` first, and open the folder.

        Args:
            make: The class of the store.
            **options: Options of ``DatasetStore``. Images that rows name by path may lie in the folders of the data and
                in ``image_roots``.
        """
        options["image_roots"] = [*self.image_folders(), *options.get("image_roots", ())]
        if self.opened is not None and (self.rows or not self.mapped):
            opened = self.opened(**options)
            said = opened.metadata
            # A store with videos in place has fields of its own for them.
            known = {"fields": self.metadata.fields} if said.videos else {}
            if said.replace(videos=(), dimensions=self.metadata.dimensions, **known) == self.metadata:
                return opened
        rows = self.mapped() if self.mapped else self.to_table()
        if read_metadata(rows) != self.metadata:
            rows = with_metadata(rows, self.metadata)
        stated = {} if self.metadata.alignment is None else {"alignment": self.alignment}
        return make(**{**stated, **options}).from_dataset(rows)

    def digest(self) -> str:
        """Return a digest of names, types and all values, in order; see ``rows_digest``."""
        return rows_digest(self)

    def check_digest(self, found: str) -> None:
        """Raise DataError unless ``found``, the digest of all rows that were read, equals the noted digest."""
        if self.noted is not None and found != self.noted:
            raise damaged(self.path, f"expected rows with the digest {self.noted} as were written, found {found}")

    def write(self, path: str | os.PathLike[str], *, videos: bool = True) -> str:
        """Write all rows to a folder that ``datasets.load_from_disk`` opens, one batch in memory at a time.

        The folder appears when it is complete, and on the disk. Images that rows name by path are written into the
        rows. Rewards where episodes begin, which speak against the alignment "arrived", are an ``AlignmentWarning``.

        Args:
            path: The folder; nothing may exist there.
            videos: Whether to put the videos of which rows name frames into the folder: as links, or copies where the
                file system has no links. Otherwise opening the folder needs ``image_roots``.

        Returns:
            The digest of the rows; see ``rows_digest``.

        Raises:
            ConfigError: Something is at ``path``, it has the name of a file, or another process is writing it.
            StorageError: It cannot be written; nothing is left then.
            DataError: The source is damaged, or a row names an image that is none or lies in no folder in which it may.
        """
        target = Path(path)
        check_folder_name(target, wanted="the name of a folder to write")
        check_nothing_at(target, "write")
        schema, digest = dataset_schema(self.schema, self.metadata, self.path), RowDigest(self.schema)
        first = FirstRows()
        with making(target, "write") as partial:
            name = "data-00000-of-00001.arrow"
            with pa.OSFile(str(partial / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                for batch in embedded(self).watched(digest.update).watched(first.add):
                    writer.write_batch(batch.cast(schema) if batch.schema != schema else batch)
            self.check_digest(digest.hexdigest())
            describe(partial, schema, self.metadata, {name: digest.rows}, digest.hexdigest())
            if videos and self.metadata.videos:
                carry_videos(self.metadata.videos, self.image_folders(), partial)
        if self.alignment == "arrived":
            first.warn_of_rewards(self.path, stacklevel=2)
        return digest.hexdigest()


def rows_digest(batches: Any) -> str:
    """Return a digest of rows: column names in their order, types, and every value to the last bit.

    The digest does not depend on how rows are cut into batches, nor on how Arrow encodes them (fixed-size or other
    lists, dictionaries, shared buffers).

    Args:
        batches: A ``RowStream``, a ``pyarrow.Table``, or record batches of one schema.

    Returns:
        64 hexadecimal digits.
    """
    digest = RowDigest(getattr(batches, "schema", None))
    for batch in batches.to_batches() if isinstance(batches, pa.Table) else batches:
        digest.update(batch)
    return digest.hexdigest()
