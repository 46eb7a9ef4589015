"""Reads the folder of a store, even while another process writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from mouse_core.errors import ConfigError
from mouse_core.files.reading import reading
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns import blocks
from mouse_core.remote.clients import Reaching, is_url, public_url
from mouse_core.store.dataset_store import DatasetStore
from mouse_core.store.snapshot import Snapshot

_ROWS = 1 << 16


def read_store(path: str | os.PathLike[str], *, batch_rows: int = BATCH_ROWS, **reaching: Any) -> RowStream:
    """Read the flushed rows of a store in a folder or at an address; see ``DatasetStore.open``.

    Each file is compared with its digest before the file is opened. Every batch is validated.

    Args:
        path: The folder, or the address.
        batch_rows: Largest number of rows of a batch.
        **reaching: Arguments of ``mouse_core.remote.Reaching``, for an address.

    Raises:
        ConfigError: No store is found, or an option is unknown.
        DataError: A file is damaged or missing, or was written by a newer release.
    """
    unknown = reaching.keys() - {"verify", *Reaching.__dataclass_fields__}
    if unknown:
        raise ConfigError(f"{public_url(str(path))}: expected options of a store, found {sorted(unknown)}")
    opened = partial(DatasetStore.open, path, **reaching)
    store = opened()
    snapshot, name = store.snapshot(), public_url(str(path)) if is_url(path) else os.fspath(path)
    schema = pa.schema([pa.field(name, data_type) for name, data_type in store.columns.items()])
    return RowStream(
        path=name,
        format="store",
        schema=schema,
        batches=partial(_batches, snapshot, schema, name, batch_rows),
        rows=snapshot.num_rows,
        opened=opened,
        mapped=None if is_url(path) or not snapshot.num_rows else store.to_dataset,
        metadata=store.metadata,
    )


def _batches(snapshot: Snapshot, schema: pa.Schema, path: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
    for segment in snapshot.segments:
        # A table of many small record batches takes more memory than its rows, so it is read in pieces.
        for first in range(0, segment.num_rows, _ROWS):
            table = segment.take(first, min(_ROWS, segment.num_rows - first))
            with reading(path):
                table.validate(full=True)
                table = as_schema(table, schema)
            for block in blocks(table.to_batches()):
                yield from pa.Table.from_batches([block]).to_batches(max_chunksize=batch_rows)


def as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Convert rows to the columns and types of a schema; missing columns become null."""
    columns = []
    for field in schema:
        there = field.name in table.schema.names
        column = table.column(field.name) if there else pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        # Columns of the right type are not cast, because pyarrow's cast breaks slices of structs in which all values
        # are null.
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)
