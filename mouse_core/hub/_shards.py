"""Writing splits as Parquet shards of one schema, in memory that does not grow with the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mouse_core._arrow.addresses import check_rows
from mouse_core.about.dataset import About, with_about
from mouse_core.errors import SchemaError
from mouse_core.files.manifest import add_parquet_checksum
from mouse_core.formats.columns.blocks import bytes_a_row
from mouse_core.formats.columns.embedding import embed, names_files, read_image

if TYPE_CHECKING:
    from datasets import Dataset, Features


def unify_features(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> Features:
    """The columns of all parts under one type each, in the order in which they first appear.

    Where parts store one value type differently (lists of differing or fixed lengths, arrays and nested
    lists, labels and integers, images and binary), the plainer way is taken; a column that is null throughout
    one part takes its type from the others. Values are never converted.

    Args:
        parts: Pairs of what the part is called in messages and its ``datasets`` features.

    Raises:
        SchemaError: A column's value types differ; names the column, both parts and both types.
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
        return _common_struct(one, other)
    plain = _plain_feature(one), _plain_feature(other)
    return None if plain == (one, other) else _common_feature(*plain)


def _common_struct(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    if one.keys() != other.keys():
        return None
    common = {key: _common_feature(value, other[key]) for key, value in one.items()}
    return None if None in common.values() else common


def _plain_feature(feature: Any) -> Any:
    """Return the plain storage feature of a feature, for features that share one storage form."""
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
    """The table with every column of the schema, in its type; a column that it lacks is null.

    Images that rows name by path are embedded if they lie in ``image_roots``.
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
    """Files with their bytes inside, and of a path only the file's name.

    A path means nothing on another machine, and the folders above it are nobody's business. What a path leads
    to is embedded only if it lies where images may, and decodes as one: data that somebody else wrote may name any
    file of this machine.
    """
    files = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    files = embed(files, read, where=where, first_row=first_row)
    encoded, path = pc.struct_field(files, "bytes"), pc.struct_field(files, "path")
    parts = {"bytes": encoded, "path": pc.replace_substring_regex(path, pattern=r"^.*[/\\]", replacement="")}
    kinds = list(files.type)
    return pa.StructArray.from_arrays([parts[kind.name] for kind in kinds], fields=kinds, mask=pc.is_null(files))


# A row group is what a reader must hold at least; below a few megabytes their overhead begins to show.
_ROW_GROUP_BYTES = 32 * 2**20
_FIRST_READ = 16
_MOST_ROWS_READ = 2**13


@dataclass(frozen=True)
class SplitPiece:
    """Rows on their way into a split.

    Args:
        where: What they are called in messages: the split and, of several, the store.
        dataset: The rows.
        first_row: Where they begin in their store.
        image_roots: Folders in which images may lie that they name by path.
    """

    where: str
    dataset: Dataset
    first_row: int = 0
    image_roots: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardOptions:
    """The size limits and compression of shards."""

    max_bytes: int
    max_rows: int | None
    compression: str


@dataclass(frozen=True)
class Shard:
    """One Parquet file that was written, and where it will stand in the repository."""

    path: str
    path_in_repo: str
    num_rows: int
    file_bytes: int
    data_bytes: int


# Rows, in blocks of a bounded size.


def _blocks(parts: Sequence[SplitPiece], features: Features, target: int) -> Iterator[pa.Table]:
    """The rows of all parts in order, as tables of the one schema of about ``target`` bytes each."""
    pending: list[pa.Table] = []
    pending_bytes = 0
    for part in parts:
        rows = part.dataset.with_format("arrow")
        start, step = 0, _FIRST_READ
        while start < len(rows):
            # A shuffled dataset gives one chunk a row, which makes everything after this slow.
            table, first = rows[start : start + step], part.first_row + start
            check_rows(table, f"{part.where}, rows from {first} on", whole=False)
            table = table.combine_chunks()
            table = fit_table(table, features, where=part.where, first_row=first, image_roots=part.image_roots)
            per_row = bytes_a_row(table)
            start += table.num_rows
            # Rows can be far larger than those before them: cut what was read to size before it is kept.
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


# Shards.


def write_shards(
    parts: Sequence[SplitPiece],
    *,
    split: str,
    features: Features,
    about: About,
    folder: str,
    options: ShardOptions,
    advance: Callable[[int], None],
    prefix: str = "data",
) -> list[Shard]:
    """Write one split as Parquet files ``{split}-00000-of-00003.parquet`` and so on.

    The files carry the ``datasets`` features and what the dataset says of itself in their schema metadata and a
    checksum on every page. At most a row group (about 32 MiB, or an eighth of a shard) and what is read for it are in
    memory.

    Args:
        parts: The rows, in order.
        split: The split's name.
        features: The schema, from ``unify_features``.
        about: What the dataset says of itself.
        folder: An existing folder for the files.
        options: How they are cut and encoded.
        advance: Called with the number of rows each time some were written.
        prefix: The folder in the repository that they are for.

    Raises:
        DataError: An image file that a row refers to cannot be read.
    """
    schema = with_about(features.arrow_schema, about)
    target = max(1, min(_ROW_GROUP_BYTES, options.max_bytes // 8))
    with _ShardWriter(os.path.join(folder, split), schema, options) as writer:
        for block in _blocks(parts, features, target):
            writer.write(block.replace_schema_metadata(schema.metadata))
            advance(block.num_rows)
    count = len(writer.finished)
    names = [f"{prefix}/{split}-{index:05d}-of-{count:05d}.parquet" for index in range(count)]
    return [
        Shard(done.path, name, done.num_rows, os.path.getsize(done.path), done.data_bytes)
        for done, name in zip(writer.finished, names, strict=True)
    ]


@dataclass
class _OpenShard:
    path: str
    sink: IO[bytes]
    writer: pq.ParquetWriter
    groups: int = 0
    num_rows: int = 0
    data_bytes: int = 0


def _footer_bytes(schema: pa.Schema, groups: int) -> int:
    """About what a Parquet file has beside its pages: the schema twice, and a note on every column chunk,
    and the checksums.
    """
    return 256 + 2 * int(schema.serialize().size) + groups * sum(_leaves(field.type) for field in schema) * 320


def _leaves(kind: pa.DataType) -> int:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return sum(_leaves(kind.field(index).type) for index in range(kind.num_fields)) or 1


@dataclass
class _ShardWriter:
    """Writes blocks into one file after the other; the next begins where a limit would be passed."""

    prefix: str
    schema: pa.Schema
    options: ShardOptions
    finished: list[_OpenShard] = field(default_factory=list)
    current: _OpenShard | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def write(self, block: pa.Table) -> None:
        while block.num_rows:
            shard = self.current or self._open()
            room = block.num_rows if self.options.max_rows is None else self.options.max_rows - shard.num_rows
            # Encoded values are hardly ever larger than they were in memory, so the limit holds ahead of
            # writing.
            size = shard.sink.tell() + block.nbytes + _footer_bytes(self.schema, shard.groups + 1)
            if room <= 0 or (shard.num_rows and size > self.options.max_bytes):
                self._close()
                continue
            piece = block.slice(0, room)
            shard.writer.write_table(piece, row_group_size=piece.num_rows)
            shard.groups += 1
            shard.num_rows += piece.num_rows
            shard.data_bytes += piece.nbytes
            block = block.slice(piece.num_rows)

    def _open(self) -> _OpenShard:
        path = f"{self.prefix}-{len(self.finished):05d}.parquet"
        sink = open(path, "wb")  # noqa: SIM115 (closed by _close, which __exit__ calls)
        try:
            writer = pq.ParquetWriter(
                sink,
                self.schema,
                compression=self.options.compression,
                write_page_checksum=True,
                write_page_index=True,
                # Pages end where the content says so. Storage that deduplicates then finds the pages of the
                # last push again, and takes only what is new.
                use_content_defined_chunking=True,
            )
        except BaseException:
            sink.close()
            raise
        self.current = _OpenShard(path, sink, writer)
        return self.current

    def _close(self) -> None:
        shard, self.current = self.current, None
        if shard is not None:
            with shard.sink:
                shard.writer.close()
            add_parquet_checksum(Path(shard.path))
            self.finished.append(shard)
