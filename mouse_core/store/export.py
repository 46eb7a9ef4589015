"""Convert a store to a ``datasets.Dataset``, and rows of ``datasets`` to Arrow tables."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.addresses import check_rows
from mouse_core._arrow.column_types import ColumnType, column_type
from mouse_core.columns.appended import fitter
from mouse_core.dtypes import is_hidden
from mouse_core.errors import ConfigError, DataError, SchemaError, StoreWarning
from mouse_core.images.pixels import encode_png
from mouse_core.metadata import DatasetMetadata, read_metadata, with_metadata
from mouse_core.spec import Field
from mouse_core.store._intake import StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store.snapshot import Snapshot


def to_dataset(snapshot: Snapshot, types: Mapping[str, pa.DataType], metadata: DatasetMetadata) -> Any:
    """Return the rows of a snapshot as one dataset; see ``DatasetStore.to_dataset``.

    Args:
        snapshot: The rows.
        types: The Arrow types of all columns, in their order.
        metadata: The metadata of the dataset.

    Raises:
        ConfigError: The snapshot is empty.
        DataError: A list or text column is damaged; reading it would crash the process.
    """
    import datasets

    if not snapshot.num_rows:
        raise ConfigError("to_dataset: expected a store with rows, found an empty store")
    joins = snapshot.unseen_joins()
    if joins:
        warn_of_joins("to_dataset", joins, stacklevel=4)
    origins = [segment.origin for segment in snapshot.segments]
    features = _features(snapshot, types)
    parts = []
    for segment, origin in zip(snapshot.segments, origins, strict=True):
        if origin is not None and with_metadata(origin.features, DatasetMetadata()) == features:
            check_rows(origin.data.table, "to_dataset")
            parts.append(origin)
        else:
            parts.append(_with_features(segment, features))
    # ``datasets`` concatenates only datasets with equal metadata, so the metadata of each are removed, and the result
    # gets `metadata`.
    dataset = (
        parts[0]
        if len(parts) == 1
        else datasets.concatenate_datasets(
            [with_metadata(one, DatasetMetadata()) if read_metadata(one) else one for one in parts]
        )
    )
    return dataset if read_metadata(dataset) == metadata else with_metadata(dataset, metadata)


def warn_of_joins(label: str, rows: Sequence[int], stacklevel: int) -> None:
    """Warn that a dataset will join episodes: an episode begins at each of ``rows``, but no column marks these rows."""
    warnings.warn(
        f"{label}: the new dataset joins two episodes at row {rows[0]}"
        f"{f', and at {len(rows) - 1} other rows' if len(rows) > 1 else ''}: the second episode comes from another "
        "dataset, and no column marks the first row of this episode. Add a column 'episode_step', or set "
        "done to 2 in the row before",
        StoreWarning,
        stacklevel=stacklevel,
    )


def _features(snapshot: Snapshot, types: Mapping[str, pa.DataType]) -> Any:
    """Return the ``datasets`` features of all columns. The feature of a column is the feature that a dataset declares;
    if no dataset declares the column, the feature is derived from the Arrow type.
    """
    import datasets

    features = {}
    for name, data_type in types.items():
        declared = _declared_feature(snapshot, name)
        features[name] = _feature_from_type(snapshot, name, data_type) if declared is None else declared
    return with_metadata(datasets.Features(features), DatasetMetadata())


def _declared_feature(snapshot: Snapshot, name: str) -> Any:
    """Return the declared feature of a column, from the first dataset that has values of the column; None if no dataset
    declares the column.
    """
    for segment in snapshot.segments:
        declared = {} if segment.origin is None else segment.origin.features
        if name in declared and column_type(segment.types[name]).kind != "null":
            return declared[name]
    return None


def _feature_from_type(snapshot: Snapshot, name: str, data_type: pa.DataType) -> Any:
    """Return the ``datasets`` feature for an Arrow type, or an image feature if a field reads the column as images."""
    import datasets

    kind = column_type(data_type)
    shapes = [reader.spec.image_shape for reader in snapshot.readers.values() if reader.spec.column == name]
    image_shape = shapes[0] if shapes else None
    if image_shape is not None and kind.kind == "image":
        return datasets.Image()
    if image_shape is not None and kind.depth == 2:
        return datasets.Array2D(shape=image_shape[:2], dtype=kind.value_type)
    if image_shape is not None and kind.depth == 3:
        return datasets.Array3D(shape=image_shape, dtype=kind.value_type)
    try:
        return datasets.Features.from_arrow_schema(pa.schema([pa.field(name, data_type)]))[name]
    except (ValueError, NotImplementedError) as error:
        raise SchemaError(
            f"column {name!r}: expected a type that the library datasets supports, found {data_type}: {error}"
        ) from error


def _with_features(segment: Segment, features: Any) -> Any:
    """Return a segment as a dataset of exactly the given features: columns are cast, and missing columns are filled
    with nulls.
    """
    import datasets
    from datasets.table import InMemoryTable, cast_table_to_features

    table = segment.table
    check_rows(table, "to_dataset")
    for name, data_type in zip(features.arrow_schema.names, features.arrow_schema.types, strict=True):
        if name not in table.schema.names:
            table = table.append_column(name, pa.nulls(table.num_rows, data_type))
    table = cast_table_to_features(table.select(list(features)), features)
    dataset = datasets.Dataset(InMemoryTable(table), info=datasets.DatasetInfo(features=features))
    if segment.indices is not None:
        dataset = dataset.select(segment.indices.column(0).to_numpy())
    return dataset


def rows_to_table(batch: Mapping[str, Sequence[Any]], schema: StoreSchema) -> pa.Table:
    """Convert lists of values, as ``datasets`` yields them by column, to an Arrow table of the columns that fields
    read.

    Raises:
        DataError: A column has values of several types, or an image cannot be read.
    """
    columns = {}
    for name, values in batch.items():
        field = schema.by_column.get(name)
        if field is None:
            continue
        try:
            columns[name] = _arrow_column(values, field, schema.columns().get(name), schema.image_roots)
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise DataError(f"{field.name}: {error} (column {name!r})") from error
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"encode_hf_rows: expected columns of equal length, found {lengths}")
    return pa.table(columns)


def _arrow_column(
    values: Sequence[Any], field: Field, known: pa.DataType | None, image_roots: tuple[str, ...]
) -> pa.Array:
    """Convert values to an Arrow array of the type ``known``, or of an inferred type if ``known`` is None. Images are
    encoded as PNG.
    """
    if field.image and (known is None or column_type(known).kind == "image"):
        encode = partial(encode_png, dtype=field.pixel_dtype, image_roots=image_roots)
        return pa.array([None if value is None else encode(value) for value in values], pa.binary())
    if known is None or column_type(known).kind == "null":
        # For arrays of several dimensions, Arrow accepts only nested lists.
        return pa.array([value.tolist() if getattr(value, "ndim", 0) > 1 else value for value in values])
    kind, fit = column_type(known), fitter(known)
    items = [_as_number_or_vector(value, kind) if field.shape == () else value for value in values]
    return pa.array(
        [None if is_hidden(value) else fit(value) for value in items], getattr(known, "storage_type", known)
    )


def _as_number_or_vector(value: Any, kind: ColumnType) -> Any:
    """Convert a value to the form of its column: 3 to [3] in a column of lists, [3] to 3 in a column of numbers.

    A bool becomes 0 or 1 in a column of numbers.
    """
    if value is None or isinstance(value, str) or np.shape(value) not in ((), (1,)):
        return value
    number = value if np.ndim(value) == 0 else value[0]
    if isinstance(number, bool | np.bool_) and kind.value_type not in ("bool", ""):
        number = int(number)
    return [number] if kind.depth == 1 else number
