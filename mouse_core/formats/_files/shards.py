"""Write Arrow and Parquet files of rows, and the JSON files that ``datasets.load_from_disk`` needs beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from mouse_core.errors import SchemaError
from mouse_core.files.manifest import add_manifest, add_parquet_checksum
from mouse_core.files.writing import link_or_copy, remove
from mouse_core.formats.columns.blocks import bytes_a_row, rows_at_once
from mouse_core.metadata import DatasetMetadata, with_metadata

_ROW_GROUP_BYTES = 4 << 20


class ShardWriter:
    """Writes rows to a new Arrow or Parquet file in a folder.

    Args:
        folder: The folder.
        number: Number of the file. The name of the file also has the process id, so that a process that survived an
            interruption writes to another file.
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
            # Encoding needs several times the memory of the rows, so each piece of the table becomes a row group.
            most = rows_at_once(bytes_a_row(table), most=max(table.num_rows, 1), budget=_ROW_GROUP_BYTES)
            for first in range(0, max(table.num_rows, 1), most):
                self._writer.write_table(table.slice(first, most))
            return
        for piece in table.to_batches():
            self._writer.write_batch(piece)

    def finish(self) -> tuple[list[str], Any]:
        """Close the file; return its name, and None: shards record no facts in the job."""
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
    """Link files of rows into ``result`` under the names that ``datasets`` gives them.

    Args:
        work: The folder of the files.
        result: The empty folder to link into.
        parts: Number of rows by the name of each file, in order.
        kind: "arrow" or "parquet".

    Returns:
        Number of rows by new name.
    """
    rows = {}
    stem = "data" if kind == "arrow" else "train"
    for number, (part, count) in enumerate(parts.items()):
        name = f"{stem}-{number:05d}-of-{len(parts):05d}.{kind}"
        link_or_copy(work / part, result / name)
        rows[name] = count
    return rows


def dataset_schema(schema: pa.Schema, metadata: DatasetMetadata, where: str) -> pa.Schema:
    """Return a schema in the types of ``datasets``, with ``metadata`` in its metadata.

    Raises:
        SchemaError: ``datasets`` has no such type; the message begins with ``where``.
    """
    import datasets

    try:
        converted = datasets.Features.from_arrow_schema(schema).arrow_schema
    except (ValueError, TypeError, NotImplementedError, KeyError, AttributeError) as error:
        raise SchemaError(f"{where}: expected columns that datasets has types for: {error}") from error
    return with_metadata(converted, metadata)


def describe(folder: Path, schema: pa.Schema, metadata: DatasetMetadata, rows: Mapping[str, int], digest: str) -> None:
    """Write the JSON files that ``datasets.load_from_disk`` needs beside Arrow files, and the manifest of the folder.

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
