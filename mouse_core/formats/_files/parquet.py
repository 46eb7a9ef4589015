"""Parquet files, read without trusting them: checksums are verified, claims are bounded, batches validated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mouse_core._arrow.column_types import column_type, fixed_shape
from mouse_core.files.reading import damaged, reading

# Limits of the sizes in a Parquet footer, so that a damaged footer allocates no gigabytes.
_MOST_STRING = 64 << 20
_MOST_ITEMS = 1 << 22
# A field of Thrift's compact protocol: a 32-bit number, one field after the one before.
_I32 = 0x15
# Decoding lists of Parquet takes many times the memory of what they hold.
_DECODED_BYTES = 4 << 20


def open_parquet(file: Path) -> pq.ParquetFile:
    """Open a Parquet file, or a remote one that has ``open`` as paths do, with limits on the sizes in its footer."""
    return pq.ParquetFile(
        str(file) if isinstance(file, Path) else pa.PythonFile(file.open("rb"), mode="r"),
        page_checksum_verification=True,
        thrift_string_size_limit=_MOST_STRING,
        thrift_container_size_limit=_MOST_ITEMS,
    )


def has_checksums(file: Path) -> bool:
    """Whether pages carry checksums, judged by the first page of every column.

    The head of a page begins with its kind and its two sizes, a byte and a number of varying length each; the field of
    the checksum, where there is one, comes next and begins with the same byte (Thrift's compact protocol).
    """
    with reading(file), open_parquet(file) as opened, file.open("rb") as stream:
        if not opened.metadata.num_row_groups:
            return False
        group = opened.metadata.row_group(0)
        for number in range(group.num_columns):
            column = group.column(number)
            begins = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            stream.seek(begins)
            head = iter(stream.read(64))
            for _ in range(3):
                if next(head, 0) != _I32:
                    return False
                while next(head, 0) >= 0x80:
                    pass
            if next(head, 0) != _I32:
                return False
        return bool(group.num_columns)


def parquet_batches(file: Path, batch_rows: int, *, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the validated record batches of a Parquet file.

    Args:
        file: The file.
        batch_rows: Most rows of a batch; batches of large rows have fewer.
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
            raise damaged(file, f"expected {metadata.num_rows} rows as its footer says, found {seen}")


def _least_bytes(schema: pa.Schema) -> int:
    """Return the least memory of a row in bytes, from the types; Parquet may store it in far less."""
    known = ((fixed_shape(data_type), column_type(data_type)) for data_type in schema.types)
    return sum(
        math.prod(shape) * kind.dtype.itemsize
        for shape, kind in known
        if shape is not None and kind.kind in ("scalar", "list")
    )
