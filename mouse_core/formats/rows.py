"""Reads datasets on disk, Arrow files and Parquet files as rows, and validates every batch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mouse_core._arrow.column_types import column_type, fixed_shape
from mouse_core._base.threads import in_order
from mouse_core.errors import DataError, SchemaError
from mouse_core.files import arrow
from mouse_core.files.manifest import check_counts, check_parquet_checksum, check_schemas, read_manifest
from mouse_core.files.reading import damaged, read_json_object, reading
from mouse_core.formats._files.on_disk import STATE, files_by_split, left_out
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns import bytes_a_row, rows_at_once
from mouse_core.metadata import DatasetMetadata, joined_schemas, read_metadata
from mouse_core.spec import check_choice

# Limits of the sizes in a Parquet footer, so that a damaged footer does not allocate gigabytes.
_MOST_STRING = 64 << 20
_MOST_ITEMS = 1 << 22
# Decoding lists of Parquet takes many times the memory of their values.
_DECODED_BYTES = 4 << 20


def open_parquet(file: Path) -> pq.ParquetFile:
    """Open a Parquet file, or a remote object with a method ``open``; limit the sizes of items in the footer."""
    return pq.ParquetFile(
        str(file) if isinstance(file, Path) else pa.PythonFile(file.open("rb"), mode="r"),
        page_checksum_verification=True,
        thrift_string_size_limit=_MOST_STRING,
        thrift_container_size_limit=_MOST_ITEMS,
    )


def parquet_batches(file: Path, batch_rows: int, *, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the validated record batches of a Parquet file.

    Args:
        file: The file.
        batch_rows: Largest number of rows of a batch; if rows are large, batches have fewer rows.
        columns: Names of the columns to read; by default all.

    Raises:
        DataError: The file is damaged, or lacks a column.
    """
    with reading(file):
        source = open_parquet(file)
        for name in columns or ():
            if name not in source.schema_arrow.names:
                raise damaged(file, f"expected a column {name!r}, found {source.schema_arrow.names[:40]}")
        metadata = source.metadata
        stored = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        each = max(1, stored // max(1, metadata.num_rows), _least_bytes(source.schema_arrow))
        batches = source.iter_batches(
            batch_size=max(1, min(batch_rows, _DECODED_BYTES // each)), columns=columns, use_threads=False
        )
    with source:
        seen = 0
        while True:
            with reading(file, at=f"row {seen}"):
                batch = next(batches, None)
                if batch is None:
                    break
                batch.validate(full=True)
            seen += batch.num_rows
            yield batch
        if seen != metadata.num_rows:
            raise damaged(file, f"expected {metadata.num_rows} rows as stated in its footer, found {seen}")


def _least_bytes(schema: pa.Schema) -> int:
    """Return the smallest possible size of a row in memory in bytes, computed from the types of its columns.

    In a Parquet file, a row can be far smaller.
    """
    known = ((fixed_shape(data_type), column_type(data_type)) for data_type in schema.types)
    return sum(
        math.prod(shape) * kind.dtype.itemsize
        for shape, kind in known
        if shape is not None and kind.kind in ("scalar", "list")
    )


_INFO = "dataset_info.json"
# A stored batch may have any size; the reader yields pieces of about this many bytes.
_BATCH_BYTES = 16 << 20
# Number of files that are opened at once: each read of a record batch waits for the disk.
_AT_ONCE = 8


def read_rows(
    path: str | os.PathLike[str], *, splits: Sequence[str] | None = None, batch_rows: int = BATCH_ROWS
) -> RowStream:
    """Read a folder that ``save_to_disk`` wrote, an Arrow or Parquet file, or a folder of such files.

    Every record batch is validated before use. For Parquet files, page checksums are verified if they exist. The
    checksum of the footer, which this library writes, is also verified. The schema of an Arrow file is compared with
    the recorded schema beside it. Arrow files have no checksums of values. So a damaged value is not detected if it is
    still a valid value.

    Args:
        path: The file or folder. A folder has splits if its files, or the files in its folder ``data``, have names such
            as ``train-00000-of-00002.parquet``.
        splits: Names of the splits to read, in this order; by default all.
        batch_rows: Largest number of rows of a batch.

    Raises:
        ConfigError: The path or a split does not exist, the path has no Arrow or Parquet data, or a folder has other
            data besides one dataset. Without this error, the other data would be left out silently.
        DataError: A file is damaged, or its rows differ from the recorded checksums; shards are missing; or a dataset
            refers to files outside of its folder.
        SchemaError: The columns or the metadata of files contradict each other.
    """
    root = Path(path)
    found = files_by_split(root)
    files = _files_of(found, splits, root)
    check_schemas(files)
    schema, metadata = joined_schemas((str(file), _schema_of(file), _description_of(file)) for file in files)
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # these reads wait for the disk at the same time
        counts = dict(zip(files, in_order(pool, _count, files), strict=True))
    check_counts(counts)
    derived = left_out(root)
    is_mapped = all(file.suffix == ".arrow" and arrow.is_stream(file) for file in files)
    return RowStream(
        path=str(root),
        format="datasets" if any(file.suffix == ".arrow" for file in files) else "parquet",
        schema=schema,
        batches=partial(_batches, files, schema, batch_rows),
        rows=sum(counts.values()),
        format_metadata={
            "splits": {name: [str(file) for file in found[name]] for name in found},
            "split_rows": {name: sum(counts[file] for file in found[name]) for name in splits or found},
        },
        notes=(f"Left out, as datasets derived it from other rows: {', '.join(derived)}.",) if derived else (),
        mapped=partial(_mapped, files) if is_mapped else None,
        metadata=metadata,
        noted=_noted(files, whole=not splits),
    )


def _noted(files: Sequence[Path], *, whole: bool) -> str | None:
    """Return the recorded digest of all rows if ``files`` are all data files of a folder, else None."""
    folder, *others = {file.parent for file in files}
    metadata = None if others or not whole else read_manifest(folder)
    return None if metadata is None else metadata.digest


def _files_of(found: Mapping[str, Sequence[Path]], splits: Sequence[str] | None, root: Path) -> list[Path]:
    for name in splits or ():
        check_choice("split", name, found)
    files = [file for name in splits or found for file in found[name]]
    if not files:
        raise damaged(root, f"expected files of rows, found none in the splits {list(splits or found)}")
    return files


# ---------------------------------------------------------------------- by reference


def _mapped(files: Sequence[Path]) -> Any:
    """Return the memory-mapped files as a ``datasets.Dataset``, which equals the result of ``load_from_disk``."""
    import datasets

    folder = files[0].parent
    with reading(folder):
        info = datasets.DatasetInfo()
        if (folder / STATE).is_file() and (folder / _INFO).is_file():
            info = datasets.DatasetInfo.from_dict(dict(read_json_object(folder / _INFO)))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            rows = list(in_order(pool, arrow.table_of, files))
        tables = [datasets.table.MemoryMappedTable(each, str(file)) for each, file in zip(rows, files, strict=True)]
        return datasets.Dataset(datasets.table.concat_tables(tables), info=info)


# ---------------------------------------------------------------------- schemas


def _schema_of(file: Path) -> pa.Schema:
    with reading(file):
        if file.suffix == ".parquet":
            check_parquet_checksum(file)
            schema = open_parquet(file).schema_arrow
        else:
            schema = arrow.schema_of(file)
        str(schema)  # names that are not valid text raise the error here
        if len(set(schema.names)) < len(schema.names):
            raise SchemaError(f"{file}: expected columns of different names, found {schema.names}")
    return schema


def _description_of(file: Path) -> DatasetMetadata:
    """For an Arrow file, return the metadata of its dataset, which the JSON description beside the file contains."""
    info = file.parent / _INFO
    described = read_json_object(info) if file.suffix == ".arrow" and info.is_file() else {}
    return read_metadata(str(described.get("description", "")), label=str(info))


# ---------------------------------------------------------------------- rows


def _batches(files: Sequence[Path], schema: pa.Schema, batch_rows: int) -> Iterator[pa.RecordBatch]:
    for file in files:
        for batch in file_batches(file, batch_rows):
            if not batch.schema.equals(schema):
                batch = pa.RecordBatch.from_arrays(batch.columns, schema=schema)
            yield from _pieces(batch, batch_rows)


def file_batches(file: Path, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the validated record batches of an Arrow or Parquet file.

    Args:
        file: The file.
        batch_rows: Largest number of rows of a Parquet batch; batches of Arrow files are yielded as they are stored.

    Raises:
        DataError: The file is damaged or truncated, or has bytes after its end mark.
    """
    if file.suffix == ".parquet":
        yield from parquet_batches(file, batch_rows)
        return
    for number, (read, release) in enumerate(arrow.batches(file)):
        batch = read()
        if batch is None:
            return
        with reading(file, at=f"record batch {number}"):
            batch.validate(full=True)
            # Columns of type null take no memory for any length.
            if batch.num_rows > 1 << 32 and all(map(pa.types.is_null, batch.schema.types)):
                raise DataError(f"expected rows with values, found {batch.num_rows} rows of nulls")
        yield batch
        release(batch.nbytes)


def _pieces(batch: pa.RecordBatch, batch_rows: int) -> Iterator[pa.RecordBatch]:
    most = rows_at_once(bytes_a_row(batch), most=batch_rows, budget=_BATCH_BYTES)
    for first in range(0, batch.num_rows, most):
        yield batch.slice(first, most)


def _count(file: Path) -> int:
    if file.suffix == ".parquet":
        with reading(file):
            return int(open_parquet(file).metadata.num_rows)
    return arrow.count_rows(file)
