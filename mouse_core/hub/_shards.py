"""Writes splits as Parquet shards with a common schema, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mouse_core._arrow.addresses import check_rows
from mouse_core.errors import SchemaError
from mouse_core.files.manifest import add_parquet_checksum
from mouse_core.formats.base import embed, names_files, read_image
from mouse_core.formats.columns import bytes_a_row
from mouse_core.metadata import DatasetMetadata, with_metadata

if TYPE_CHECKING:
    from datasets import Dataset, Features


def unify_features(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> Features:
    """Return the columns of all parts in order of first appearance, with a common type for each column.

    If parts store the same value type in different forms (lists of varying or fixed lengths, arrays or nested lists,
    labels or integers, images or binary), the plainer form is used. If a column is null in all rows of a part, its type
    comes from the other parts. Values are never converted.

    Args:
        parts: For each part (rows of a store): the name of the part in error messages, and its ``datasets`` features.

    Raises:
        SchemaError: A column's value types differ; the message names the column, both parts and both types.
    """
    from datasets import Features

    unified: dict[str, Any] = {}
    first: dict[str, str] = {}
    for where, features in parts:
        for name, feature in features.items():
            if name not in unified:
                unified[name], first[name] = feature, where
                continue
            common = _common_feature(unified[name], feature)
            if common is None:
                raise SchemaError(
                    f"column {name!r}: expected one value type, found {unified[name]} in {first[name]}"
                    f" and {feature} in {where}"
                )
            unified[name] = common
    return Features(unified)


def _common_feature(one: Any, other: Any) -> Any | None:
    from datasets import Image, List, Value

    if one == other:
        return one
    if Value("null") in (one, other):
        return other if one == Value("null") else one
    images = sum(isinstance(feature, Image) for feature in (one, other))
    if images and (images == 2 or Value("binary") in (one, other)):
        return Image()
    if isinstance(one, List) and isinstance(other, List):
        inner = _common_feature(one.feature, other.feature)
        return None if inner is None else List(inner, length=one.length if one.length == other.length else -1)
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return None
        common = {key: _common_feature(value, other[key]) for key, value in one.items()}
        return None if None in common.values() else common
    plain = _plain_feature(one), _plain_feature(other)
    return None if plain == (one, other) else _common_feature(*plain)


def _plain_feature(feature: Any) -> Any:
    """Return a feature without its special type, so that features with the same stored values are equal."""
    from datasets import Array2D, Array3D, ClassLabel, LargeList, List, Value

    if isinstance(feature, Array2D | Array3D):
        plain: Any = Value(feature.dtype)
        for _ in feature.shape:
            plain = List(plain)
        return plain
    if isinstance(feature, LargeList):
        return List(feature.feature)
    if isinstance(feature, ClassLabel):
        return Value(feature.dtype)
    return feature


def fit_table(
    table: pa.Table, features: Features, *, where: str, first_row: int, image_roots: Sequence[str] = ()
) -> pa.Table:
    """Convert a table to the columns and types of ``features``; missing columns become null.

    Images whose paths are in rows are embedded if they lie in ``image_roots``.
    """
    from datasets import Features, Image
    from datasets.table import cast_table_to_features

    columns = []
    for column in features.arrow_schema:
        if column.name not in table.column_names:
            columns.append(_nulls(table.num_rows, column.type))
            continue
        values = table[column.name]
        if values.type != column.type:
            wanted = Features({column.name: features[column.name]})
            values = cast_table_to_features(pa.table({column.name: values}), wanted)[column.name]
        if names_files(column.type):
            image = isinstance(features[column.name], Image | dict)
            label = f"column {column.name!r} of {where}"
            read = partial(read_image, image=image, roots=image_roots, whole=True)
            values = _embed_files(values, read, where=label, first_row=first_row)
        columns.append(values)
    return pa.Table.from_arrays(columns, schema=features.arrow_schema)


def _nulls(length: int, kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.nulls(length, kind.storage_type))
    return pa.nulls(length, kind)


def _embed_files(column: pa.ChunkedArray, read: Callable[..., bytes], *, where: str, first_row: int) -> pa.Array:
    """Return a ``{bytes, path}`` column with the bytes of all files; paths are shortened to file names.

    A path is useless on another machine. ``read`` accepts only images in allowed folders, because untrusted data can
    name any file of this machine.
    """
    files = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    files = embed(files, read, where=where, first_row=first_row)
    encoded, path = pc.struct_field(files, "bytes"), pc.struct_field(files, "path")
    parts = {"bytes": encoded, "path": pc.replace_substring_regex(path, pattern=r"^.*[/\\]", replacement="")}
    kinds = list(files.type)
    return pa.StructArray.from_arrays([parts[kind.name] for kind in kinds], fields=kinds, mask=pc.is_null(files))


# A reader keeps at least one row group in memory. Row groups below a few megabytes have a noticeable overhead.
_ROW_GROUP_BYTES = 32 * 2**20
_FIRST_READ = 16
_MOST_ROWS_READ = 2**13


@dataclass(frozen=True)
class SplitPiece:
    """Rows of a store that belong to a split.

    Args:
        where: Name of the rows in error messages: the split, and the store if there are several stores.
        dataset: The rows.
        first_row: Index of the first row in its store.
        image_roots: Allowed folders of images whose paths are in rows.
    """

    where: str
    dataset: Dataset
    first_row: int = 0
    image_roots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shard:
    """A Parquet file that was written, and its path in the repository."""

    path: str
    path_in_repo: str
    num_rows: int
    file_bytes: int
    data_bytes: int


def _blocks(parts: Sequence[SplitPiece], features: Features, target: int) -> Iterator[pa.Table]:
    """Yield the rows of all parts in order, as tables with the schema ``features`` and about ``target`` bytes each."""
    pending: list[pa.Table] = []
    pending_bytes = 0
    for part in parts:
        rows = part.dataset.with_format("arrow")
        start, step = 0, _FIRST_READ
        while start < len(rows):
            # A shuffled dataset has one chunk for each row; so many chunks are slow to process.
            table, first = rows[start : start + step], part.first_row + start
            check_rows(table, f"{part.where}, rows from {first} on", whole=False)
            table = table.combine_chunks()
            table = fit_table(table, features, where=part.where, first_row=first, image_roots=part.image_roots)
            per_row = bytes_a_row(table)
            start += table.num_rows
            # Rows can be far larger than the rows before them, so the table is cut to size.
            size = max(1, target // per_row)
            for piece in (table.slice(first, size) for first in range(0, table.num_rows, size)):
                pending.append(piece)
                pending_bytes += piece.nbytes
                if pending_bytes >= target:
                    yield pa.concat_tables(pending)
                    pending, pending_bytes = [], 0
            room = max(1, (target - pending_bytes) // per_row)
            step = min(room, 4 * step, _MOST_ROWS_READ)
    if pending:
        yield pa.concat_tables(pending)


def write_shards(
    parts: Sequence[SplitPiece],
    *,
    split: str,
    features: Features,
    metadata: DatasetMetadata,
    folder: str,
    max_bytes: int,
    max_rows: int | None = None,
    advance: Callable[[int], None],
    prefix: str = "data",
) -> list[Shard]:
    """Write a split as Parquet files ``{split}-00000-of-00003.parquet`` and so on.

    The schema metadata of the files hold the ``datasets`` features and the metadata of the dataset; every page has a
    checksum. Memory holds at most a row group (about 32 MiB, or 1/8 of a shard) and the rows that are read for the row
    group.

    Args:
        parts: The rows, in order.
        split: The split's name.
        features: The schema, from ``unify_features``.
        metadata: The metadata of the dataset.
        folder: An existing folder for the files.
        max_bytes: Largest size of a file in bytes; a single row that is larger gets a separate file.
        max_rows: Largest number of rows of a file; None for no limit.
        advance: A function for progress; it is called with the number of rows in each block after the block was
            written.
        prefix: The folder of the files in the repository.

    Raises:
        DataError: An image file that a row refers to cannot be read.
    """
    schema = with_metadata(features.arrow_schema, metadata)

    def blocks() -> Iterator[pa.Table]:
        for block in _blocks(parts, features, max(1, min(_ROW_GROUP_BYTES, max_bytes // 8))):
            yield block.replace_schema_metadata(schema.metadata)
            advance(block.num_rows)

    written = _write_files(blocks(), os.path.join(folder, split), schema, max_bytes, max_rows)
    return [
        Shard(
            str(path),
            f"{prefix}/{split}-{index:05d}-of-{len(written):05d}.parquet",
            rows,
            path.stat().st_size,
            data_bytes,
        )
        for index, (path, rows, data_bytes) in enumerate(written)
    ]


def _write_files(
    blocks: Iterator[pa.Table], prefix: str, schema: pa.Schema, max_bytes: int, max_rows: int | None
) -> list[tuple[Path, int, int]]:
    """Write each block as a row group of a Parquet file; begin a new file before a size limit would be exceeded.

    Returns:
        For each file: the path, the number of rows, and the size of the rows in memory in bytes.
    """
    finished: list[tuple[Path, int, int]] = []
    block = next(blocks, None)
    while block is not None:
        path = Path(f"{prefix}-{len(finished):05d}.parquet")
        groups = rows = data_bytes = 0
        with (
            path.open("wb") as sink,
            pq.ParquetWriter(
                sink,
                schema,
                compression="zstd",
                write_page_checksum=True,
                write_page_index=True,
                # The content determines where pages end. So storage with deduplication recognises the pages of the last
                # push, and stores only new pages.
                use_content_defined_chunking=True,
            ) as writer,
        ):
            while block is not None:
                room = block.num_rows if max_rows is None else max_rows - rows
                # Encoded values are hardly ever larger than the same values in memory.
                size = sink.tell() + block.nbytes + _footer_bytes(schema, groups + 1)
                if room <= 0 or (rows and size > max_bytes):
                    break
                piece, block = block.slice(0, room), block.slice(room)
                writer.write_table(piece, row_group_size=piece.num_rows)
                groups, rows, data_bytes = groups + 1, rows + piece.num_rows, data_bytes + piece.nbytes
                block = block if block.num_rows else next(blocks, None)
        add_parquet_checksum(path)
        finished.append((path, rows, data_bytes))
    return finished


def _footer_bytes(schema: pa.Schema, groups: int) -> int:
    """Return the approximate size of a Parquet file without pages: the schema (stored twice) and the chunk headers."""
    return 256 + 2 * int(schema.serialize().size) + groups * sum(_leaves(field.type) for field in schema) * 320


def _leaves(kind: pa.DataType) -> int:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return sum(_leaves(kind.field(index).type) for index in range(kind.num_fields)) or 1
