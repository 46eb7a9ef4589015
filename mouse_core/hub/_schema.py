"""One schema for all splits, and the rows of every store brought into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from mouse_core.errors import SchemaError
from mouse_core.formats.columns.embedding import embed, names_files, read_image

if TYPE_CHECKING:
    from datasets import Features


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
    """What a feature stores, where that is another feature's way of storing too."""
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
