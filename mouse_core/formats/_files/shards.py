"""Files of rows, each complete under its final name or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from mouse_core.about.dataset import About, with_about
from mouse_core.errors import SchemaError
from mouse_core.files.noted import note, seal
from mouse_core.files.writing import beside, put_in_place, remove
from mouse_core.formats.columns.blocks import bytes_a_row, rows_at_once

_ROW_GROUP_BYTES = 4 << 20


@dataclass(frozen=True)
class Shard:
    """A file that was written.

    Args:
        name: Its name in the working folder.
        rows: How many it holds.
        bytes: Its size.
        digest: Of its rows, as they were in the source.
        sealed: What a store's manifest says of it, if it is a segment of one.
    """

    name: str
    rows: int
    bytes: int
    digest: str
    sealed: list[Any] | None = None

    def is_in(self, work: Path) -> bool:
        """Whether it lies in the working folder, as large as it was written: a crash may have taken it along."""
        file = work / self.name
        return file.is_file() and file.stat().st_size == self.bytes


class ShardWriter:
    """Writes one shard under a name of its own, which ``finish`` changes to the shard's.

    Args:
        folder: Where.
        number: Which shard it is.
        kind: "arrow" or "parquet".
        schema: Of the file; batches are cast to it.
    """

    def __init__(self, folder: Path, number: int, kind: str, schema: pa.Schema) -> None:
        self._path = folder / f"part-{number:05d}.{kind}"
        self._partial = Path(beside(self._path))
        self._schema = schema
        self._sink = pa.OSFile(str(self._partial), "wb")
        self._writer: Any = (
            pa.ipc.new_stream(self._sink, schema)
            if kind == "arrow"
            else pq.ParquetWriter(self._sink, schema, compression="zstd", write_page_checksum=True)
        )
        self.rows = 0

    @property
    def bytes(self) -> int:
        """What was written so far."""
        return int(self._sink.tell())

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        self.rows += batch.num_rows
        table = pa.Table.from_batches([batch])
        if not table.schema.equals(self._schema, check_metadata=True):
            table = table.cast(self._schema).combine_chunks()
        if isinstance(self._writer, pq.ParquetWriter):
            # Encoding takes several times the memory of what is encoded; a piece becomes a row group.
            most = rows_at_once(bytes_a_row(table), most=max(table.num_rows, 1), budget=_ROW_GROUP_BYTES)
            for first in range(0, max(table.num_rows, 1), most):
                self._writer.write_table(table.slice(first, most))
            return
        for piece in table.to_batches():
            self._writer.write_batch(piece)

    def finish(self, digest: str) -> Shard:
        """Close the file, see to it that it is on the disk, and give it its name."""
        self._writer.close()
        self._sink.close()
        if isinstance(self._writer, pq.ParquetWriter):
            seal(self._partial)
        size = self._partial.stat().st_size
        put_in_place(self._partial, self._path)
        return Shard(self._path.name, self.rows, size, digest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._sink.closed:
            self._writer.close()
            self._sink.close()
        remove(self._partial)


def keep_only(work: Path, names: Collection[str]) -> None:
    """Remove what else an interrupted call left in its working folder."""
    kept = {Path(name).parts[0] for name in names}
    for item in work.iterdir():
        if item.name not in kept:
            remove(item)


def begin_result(work: Path) -> Path:
    """A new folder in the working folder, for what it all becomes."""
    folder = work / "result"
    remove(folder)
    folder.mkdir()
    return folder


def finish_names(work: Path, result: Path, shards: Sequence[Shard], kind: str) -> dict[str, int]:
    """Link the shards into ``result`` under the names that ``datasets`` gives them, without a copy where possible.

    Returns:
        How many rows each holds, by name.
    """
    rows = {}
    stem = "data" if kind == "arrow" else "train"
    for number, shard in enumerate(shards):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.{kind}"
        try:
            os.link(work / shard.name, result / name)
        except OSError:  # a file system without links
            shutil.copyfile(work / shard.name, result / name)
        rows[name] = shard.rows
    return rows


def dataset_schema(schema: pa.Schema, about: About, where: str) -> pa.Schema:
    """A schema as ``datasets`` has it, with what the rows say of themselves in its metadata.

    Raises:
        SchemaError: Types that it does not have; begins with ``where``.
    """
    import datasets

    try:
        known = datasets.Features.from_arrow_schema(schema).arrow_schema
    except (ValueError, TypeError, NotImplementedError, KeyError, AttributeError) as error:
        raise SchemaError(f"{where}: expected columns that datasets has types for: {error}") from error
    return with_about(known, about)


def describe(folder: Path, schema: pa.Schema, about: About, rows: Mapping[str, int], digest: str) -> None:
    """Write what ``datasets.load_from_disk`` needs beside Arrow files, and what is noted of all of them.

    Args:
        folder: Complete apart from this.
        schema: Of the files.
        about: What the dataset says of itself.
        rows: How many each file holds, by name.
        digest: Of all rows.
    """
    import datasets

    info = datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(schema))
    with_about(info, about).write_to_directory(str(folder))
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
    note(folder, rows, digest)


def merged(parts: Sequence[Path], target: Path, schema: pa.Schema) -> None:
    """Join Parquet files into one, a row group at a time."""
    with pq.ParquetWriter(str(target), schema, compression="zstd", write_page_checksum=True) as writer:
        for part in parts:
            with pq.ParquetFile(str(part), page_checksum_verification=True) as source:
                for number in range(source.num_row_groups):
                    writer.write_table(source.read_row_group(number).cast(schema))
    seal(target)
