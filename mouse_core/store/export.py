"""Turning a store back into a ``datasets.Dataset``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.layout import ColumnType, column_type
from mouse_core.about.dataset import About, read_about, with_about
from mouse_core.errors import ConfigError, DataError
from mouse_core.images.pixels import encode_png
from mouse_core.store._schema import StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.snapshot import Snapshot


def to_dataset(snapshot: Snapshot, types: Mapping[str, pa.DataType], about: About) -> Any:
    """The snapshot's rows as one dataset; see ``DatasetStore.to_dataset``.

    Args:
        snapshot: The rows.
        types: The Arrow types of all columns, in their order.
        about: What the dataset is to say of itself.

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
        if origin is not None and with_about(origin.features, About()) == features:
            parts.append(origin)
        else:
            parts.append(_with_features(segment, features))
    # Parts that say different things do not go together, as datasets sees it; all of it is said once, of the whole.
    dataset = parts[0] if len(parts) == 1 else datasets.concatenate_datasets([_saying_nothing(part) for part in parts])
    return dataset if read_about(dataset) == about else with_about(dataset, about)


def _saying_nothing(dataset: Any) -> Any:
    return with_about(dataset, About()) if read_about(dataset) else dataset


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
    return with_about(datasets.Features(features), About())


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
                encode = partial(encode_png, dtype=field.pixel_dtype, image_roots=schema.image_roots)
                encoded = [None if value is None else encode(value) for value in values]
                columns[name] = pa.array(encoded, pa.binary())
            else:
                storage = getattr(known, "storage_type", known)
                if storage is not None and pa.types.is_dictionary(storage):
                    storage = storage.value_type
                made = [_plain(value) for value in values]
                if field.shape == () and storage is not None:
                    kind = column_type(storage)
                    made = [_single(value, kind) for value in made]
                columns[name] = pa.array(made, storage)
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise DataError(f"{field.name}: {error} (column {name!r})") from error
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"encode_hf_rows: expected columns of one length, found {lengths}")
    return pa.table(columns)


def _plain(value: Any) -> Any:
    """Arrays of more than one dimension as nested lists, which is how Arrow takes them."""
    return value.tolist() if getattr(value, "ndim", 0) > 1 else value


def _single(value: Any, kind: ColumnType) -> Any:
    """A number, or a vector of one value, as a column of numbers or of such vectors has it; a flag as 0 or 1."""
    if value is None or isinstance(value, str) or np.shape(value) not in ((), (1,)):
        return value
    number = value if np.ndim(value) == 0 else value[0]
    if isinstance(number, bool | np.bool_) and kind.value_type not in ("bool", ""):
        number = int(number)
    return [number] if kind.depth == 1 else number
