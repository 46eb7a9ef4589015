"""Rows of any source as record batches, pieces or episodes, for the writers of formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import check_rows
from mouse_core.columns.episode_rows import Columns
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns import from_arrow
from mouse_core.metadata import read_metadata
from mouse_core.store.views import Store


def row_batches(rows: Any) -> Iterator[pa.RecordBatch]:
    """Yield rows as record batches.

    Args:
        rows: A ``RowStream``, a ``DatasetStore``, a ``datasets.Dataset``, a ``pyarrow.Table``, or record batches.

    Raises:
        ConfigError: ``rows`` is none of these.
        SchemaError: Rows whose action, reward and done belong to the transition that leaves the observation.
    """
    _check_arrived(getattr(rows, "alignment", None) or read_metadata(rows, label="rows").alignment)
    if isinstance(rows, Store):
        rows = rows.to_dataset()
    if isinstance(rows, pa.Table):
        check_rows(rows, "rows")
        yield from rows.to_batches(max_chunksize=BATCH_ROWS)
    elif hasattr(rows, "with_format") and hasattr(rows, "iter"):
        for table in rows.with_format("arrow").iter(batch_size=BATCH_ROWS):
            check_rows(table, "rows", whole=False)
            yield from table.to_batches()
    elif isinstance(rows, RowStream) or (isinstance(rows, Iterable) and not isinstance(rows, str | bytes | dict)):
        for batch in rows:
            if not isinstance(batch, pa.RecordBatch):
                raise ConfigError(f"rows: expected record batches, found {type(batch).__name__}")
            check_rows(batch, "rows", whole=False)
            _check_arrived(read_metadata(batch.schema, label="rows").alignment)
            yield batch
    else:
        raise ConfigError(
            f"rows: expected a RowStream, a DatasetStore, a datasets.Dataset or a pyarrow.Table, found "
            f"{type(rows).__name__}"
        )


def stream_of(store: Store, *, batch_rows: int = BATCH_ROWS) -> RowStream:
    """Return the rows of a store as a stream, without a copy.

    Args:
        store: The store, or a view, which has the rows of its episodes.
        batch_rows: Most rows of a batch.

    Raises:
        ConfigError: There are no rows.
    """
    dataset = store.to_dataset()

    def batches() -> Iterator[pa.RecordBatch]:
        for table in dataset.with_format("arrow").iter(batch_size=batch_rows):
            yield from table.to_batches()

    return RowStream(
        "a store",
        "datasets",
        dataset.features.arrow_schema,
        batches,
        rows=len(dataset),
        metadata=store.metadata,
    )


def in_place(stream: RowStream) -> RowStream:
    """Return the same rows with frames of videos in place of pixels, if the rows come from a dataset with videos."""
    if stream.opened is None or stream.metadata.videos:
        return stream
    store = stream.opened()
    if not store.metadata.videos:
        return stream
    made = stream_of(store)
    roots = dict.fromkeys(root for segment in store.snapshot().segments for root in segment.image_roots)
    said = {name: getattr(stream, name) for name in ("path", "format", "episodes", "notes", "metadata")}
    return made.replace(**said, opened=stream.opened, image_roots=(*roots, *stream.image_roots))


def _check_arrived(alignment: str | None) -> None:
    if alignment not in (None, "arrived"):
        raise SchemaError(f"rows: expected rows of alignment 'arrived', found {alignment!r}")


def pieces_of(rows: Any) -> Iterator[tuple[bool, Columns]]:
    """Yield rows in pieces, cut where episodes begin and where the batches of ``rows`` end.

    An episode begins where ``episode_step`` is 0, or, where that column is missing or null, after a row with ``done``.

    Yields:
        Whether an episode begins with the piece, and its columns ``[n, ...]`` without ``episode_step``, and without
        metadata that are null.

    Raises:
        ConfigError, SchemaError: As ``row_batches``.
        DataError: Values that are null or ragged.
    """
    ended = True
    for batch in row_batches(rows):
        if not batch.num_rows:
            continue
        if "done" not in batch.schema.names:
            raise DataError(f"rows: expected a column 'done', found {batch.schema.names}")
        steps = batch.column("episode_step") if "episode_step" in batch.schema.names else None
        arrays = {name: batch.column(name) for name in batch.schema.names if name != "episode_step"}
        # Metadata that only some episodes have are null in the others.
        partial = {name: arrays.pop(name) for name in list(arrays) if _is_partial(name, arrays[name])}
        columns = {name: from_arrow(array, where=f"column {name!r}") for name, array in arrays.items()}
        after = np.concatenate([[ended], columns["done"][:-1] != 0])
        begins = after if steps is None else _begins(steps, after)
        ended = bool(columns["done"][-1] != 0)
        edges = [0, *np.flatnonzero(begins).tolist(), batch.num_rows]
        for number, (start, stop) in enumerate(pairwise(edges)):
            if stop > start:
                piece = {name: values[start:stop] for name, values in columns.items()}
                yield number > 0, piece | _whole(partial, start, stop)


def episodes_of(rows: Any) -> Iterator[Columns]:
    """Yield rows as episodes, one in memory at a time; see ``pieces_of``."""
    held: list[Columns] = []
    for begins, columns in pieces_of(rows):
        if begins and held:
            yield _joined(held)
            held = []
        held.append(columns)
    if held:
        yield _joined(held)


def _whole(partial: Mapping[str, pa.Array], start: int, stop: int) -> Columns:
    """Return rows ``start..stop - 1`` of the columns that are not null in all of them."""
    parts = {name: array.slice(start, stop - start) for name, array in partial.items()}
    return {
        name: from_arrow(part, where=f"column {name!r}") for name, part in parts.items() if part.null_count < len(part)
    }


def _is_partial(name: str, array: pa.Array) -> bool:
    return name.startswith("metadata_") and (array.null_count > 0 or pa.types.is_null(array.type))


def _begins(steps: pa.Array, after: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    known = np.asarray(steps.is_valid())
    return np.where(known, np.asarray(steps.fill_null(-1)) == 0, after)


def _joined(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    uneven = {name for part in parts for name in parts[0].keys() ^ part.keys()}
    if uneven:
        raise DataError(f"columns {sorted(uneven)}: expected values in all rows of an episode, or in none")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
