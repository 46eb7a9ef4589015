"""Turning a store back into a ``datasets.Dataset``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from mouse_core._layout import column_type
from mouse_core._schema import StoreSchema
from mouse_core._segments import Segment
from mouse_core.errors import ConfigError, DataError
from mouse_core.images import encode_png
from mouse_core.snapshot import Snapshot

_MARK = "mouse_alignment: "


def to_dataset(snapshot: Snapshot, types: Mapping[str, pa.DataType]) -> Any:
    """The snapshot's rows as one dataset; see ``DatasetStore.to_dataset``.

    Args:
        snapshot: The rows.
        types: The Arrow types of all columns, in their order.

    Raises:
        ConfigError: There are no rows.
    """
    import datasets

    if not snapshot.num_rows:
        raise ConfigError("to_dataset: expected a store with rows, found an empty one")
    origins = [segment.origin for segment in snapshot.segments]
    features = _features(snapshot, types)
    parts = []
    for segment, origin in zip(snapshot.segments, origins, strict=True):
        if origin is not None and origin.features == features:
            parts.append(origin)
        else:
            parts.append(_with_features(segment, features))
    dataset = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    return dataset if snapshot.alignment == "arrived" else _marked(dataset, snapshot.alignment)


def _marked(dataset: Any, alignment: str) -> Any:
    """The dataset with its alignment in its description, which saving and loading keep."""
    marked = copy.copy(dataset)
    marked._info = dataset.info.copy()
    if declared_alignment(dataset) is None:
        marked._info.description = f"{dataset.info.description}\n{_MARK}{alignment}".strip()
    return marked


def declared_alignment(part: Any) -> str | None:
    """The alignment that a dataset's description, or the metadata of a table, says it has."""
    if isinstance(part, pa.Table):
        found = (part.schema.metadata or {}).get(b"mouse_alignment")
        return None if found is None else found.decode()
    lines = str(getattr(getattr(part, "info", None), "description", "") or "").splitlines()
    return next((line[len(_MARK) :].strip() for line in lines if line.startswith(_MARK)), None)


def _features(snapshot: Snapshot, types: Mapping[str, pa.DataType]) -> Any:
    """The features of all columns: as the first dataset that has them declares them, else from the Arrow type."""
    import datasets

    features = {}
    for name, data_type in types.items():
        declared = [
            segment.origin.features[name]
            for segment in snapshot.segments
            if segment.origin is not None
            and name in segment.origin.features
            and column_type(segment.types[name]).kind != "null"
        ]
        reader = next((reader for reader in snapshot.readers.values() if reader.spec.column == name), None)
        image_shape = reader.spec.image_shape if reader is not None else None
        if declared:
            features[name] = declared[0]
        elif column_type(data_type).kind == "image" and image_shape is not None:
            features[name] = datasets.Image()
        elif image_shape is not None and column_type(data_type).depth in (2, 3):
            array = datasets.Array2D if column_type(data_type).depth == 2 else datasets.Array3D
            shape = image_shape[:2] if column_type(data_type).depth == 2 else image_shape
            features[name] = array(shape=shape, dtype=column_type(data_type).value_type)
        else:
            schema = pa.schema([pa.field(name, data_type)])
            features[name] = datasets.Features.from_arrow_schema(schema)[name]
    return datasets.Features(features)


def _with_features(segment: Segment, features: Any) -> Any:
    """A segment as a dataset of exactly these features: columns cast chunk by chunk, missing ones null."""
    import datasets
    from datasets.table import InMemoryTable, cast_table_to_features

    table = segment.table
    for name, data_type in zip(features.arrow_schema.names, features.arrow_schema.types, strict=True):
        if name not in table.schema.names:
            table = table.append_column(name, pa.nulls(table.num_rows, data_type))
    table = cast_table_to_features(table.select(list(features)), features)
    dataset = datasets.Dataset(InMemoryTable(table), info=datasets.DatasetInfo(features=features))
    if segment.origin is not None and segment.indices is not None:
        dataset = dataset.select(segment.indices.column(0).to_numpy())
    return dataset


def rows_to_table(batch: Mapping[str, Sequence[Any]], schema: StoreSchema) -> pa.Table:
    """Values by column, as ``datasets`` yields them, as a table of the columns that the schema's fields read.

    Raises:
        DataError: A column whose values are of no one type, or an image that cannot be read.
    """
    columns = {}
    for name, values in batch.items():
        field = schema.by_column.get(name)
        if field is None:
            continue
        known = schema.arrow_types.get(name)
        try:
            if field.image and (known is None or column_type(known).kind == "image"):
                encoded = [None if value is None else encode_png(value) for value in values]
                columns[name] = pa.array(encoded, pa.binary())
            else:
                storage = getattr(known, "storage_type", known)
                if storage is not None and pa.types.is_dictionary(storage):
                    storage = storage.value_type
                columns[name] = pa.array([_plain(value) for value in values], storage)
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise DataError(f"{field.name}: {error} (column {name!r})") from error
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"encode_hf_rows: expected columns of one length, found {lengths}")
    return pa.table(columns)


def _plain(value: Any) -> Any:
    """Arrays of more than one dimension as nested lists, which is how Arrow takes them."""
    return value.tolist() if getattr(value, "ndim", 0) > 1 else value
