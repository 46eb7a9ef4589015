"""One block of rows: read, given to a function, and written to a file of its own, here or in another process."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.about.dataset import About, with_about
from mouse_core.errors import AlignmentWarning, DataError, MouseError, WorkerError
from mouse_core.files.writing import storing
from mouse_core.formats._files.shards import Shard, ShardWriter, dataset_schema
from mouse_core.formats.base import BATCH_ROWS, RowStream
from mouse_core.formats.columns.digest import RowDigest
from mouse_core.formats.columns.embedding import embedded
from mouse_core.formats.columns.named import Columns, from_arrow, to_arrow
from mouse_core.store.snapshot import Snapshot

Block: TypeAlias = "tuple[Shard, pa.Schema, str]"
"""The file of a block, the schema of what was made, and a digest of what it was made of."""


@dataclass(frozen=True)
class Work:
    """What is done with every block.

    Args:
        snapshot: The rows.
        schema: Of the columns that all of them have, whatever part of the store they lie in.
        function: Pickled.
        columns: Those that it is given; None: all.
        about: What the new rows say of themselves.
        folder: Where files are written.
    """

    snapshot: Snapshot
    schema: pa.Schema
    function: bytes
    columns: tuple[str, ...] | None
    about: About
    folder: Path

    def run(self, number: int, begin: int, end: int, made: pa.Schema | None) -> Block:
        """Rows ``begin .. end - 1`` of the source as file ``number``; see ``Block``.

        Args:
            number: Which block it is.
            begin, end: Its rows.
            made: The schema that the first block came to have; None for the first block.

        Raises:
            WorkerError: The function raises an error.
            DataError: Rows that it cannot be given, or what it returns is no columns of these rows.
            StorageError: It cannot be written.
        """
        where = f"preprocess: rows {begin}..{end - 1}"
        source = stored_rows(self.snapshot, begin, end, self.schema)
        table = _with_images(source, self.snapshot, where)
        given = {name: _values(table, name, where) for name in self.columns or table.schema.names}
        function = pickle.loads(self.function)
        try:
            returned = function(dict(given))
        except Exception as error:  # of code that is not ours
            raise WorkerError(f"{where}: the function raised {type(error).__name__}: {error}") from error
        table = _replaced(table, given, returned, where)
        if made is not None and table.schema != made:
            raise DataError(f"{where}: expected columns as the first rows have them, {_in_words(made, table.schema)}")
        if made is None:
            _check_opens(table, self.about, where)
        return self._write(number, table), table.schema, contents(source)

    def _write(self, number: int, table: pa.Table) -> Shard:
        # A process that is left behind by one that was killed may still be writing.
        own = self.folder / f"process-{os.getpid()}"
        with storing(f"preprocess: {str(self.folder)!r}"):
            own.mkdir(exist_ok=True)
            try:
                with ShardWriter(
                    own, number, "arrow", dataset_schema(table.schema, self.about, "preprocess")
                ) as writer:
                    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                        writer.write(batch)
                    shard = writer.finish(contents(table))
                os.replace(own / shard.name, self.folder / shard.name)
            finally:
                shutil.rmtree(own, ignore_errors=True)
        return shard


def stored_rows(snapshot: Snapshot, begin: int, end: int, schema: pa.Schema) -> pa.Table:
    """Rows ``begin .. end - 1`` as a table in one piece; columns that a part of the store lacks are null in it."""
    parts, first = [], 0
    for segment in snapshot.segments:
        low, high = max(begin - first, 0), min(end - first, segment.num_rows)
        first += segment.num_rows
        if low >= high:
            continue
        table = segment.take(low, high - low)
        parts.append(pa.table([_column(table, field) for field in schema], schema=schema))
    return pa.concat_tables(parts).combine_chunks()


def contents(table: pa.Table) -> str:
    """A digest of what some rows hold, whatever Arrow's encoding of them; of images by path, of the path."""
    digest = quick_digest(table.schema)
    for batch in table.to_batches():
        digest.update(batch)
    return digest.hexdigest()


def quick_digest(schema: pa.Schema) -> RowDigest:
    """What tells rows from others that came by chance, many times as fast as SHA-256."""
    import xxhash

    return RowDigest(schema, xxhash.xxh3_128)


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name not in table.schema.names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(field.name)
    # Not cast where nothing changes: pyarrow's cast breaks slices of structs that hold nulls throughout.
    return column if column.type == field.type else column.cast(field.type)


def _with_images(table: pa.Table, snapshot: Snapshot, where: str) -> pa.Table:
    """The rows with the images that they name by path, which means nothing elsewhere."""
    roots = tuple(dict.fromkeys(root for segment in snapshot.segments for root in segment.image_roots))
    stream = RowStream(where, "rows", table.schema, lambda: iter(table.to_batches()), image_roots=roots)
    inside = embedded(stream)
    return table if inside is stream else pa.Table.from_batches(list(inside), table.schema).combine_chunks()


def _values(table: pa.Table, name: str, where: str) -> npt.NDArray[Any]:
    try:
        values = from_arrow(table.column(name), where=f"{where}: column {name!r}")
    except MouseError as error:
        raise DataError(f"{error}; columns=[...] names those that the function is given") from error
    # Changes in place would be lost for some types and not for others, as what comes back untouched stays as stored.
    values.flags.writeable = False
    return values


def _replaced(table: pa.Table, given: Columns, returned: Any, where: str) -> pa.Table:
    """The rows with the columns that a function returned in their places, or behind the others."""
    if not isinstance(returned, Mapping):
        raise DataError(f"{where}: expected a function that returns a dict of columns, found {returned!r:.80}")
    for name, values in returned.items():
        if not isinstance(name, str):
            raise DataError(f"{where}: expected names of columns, found {name!r:.80}")
        place = table.schema.get_field_index(name)
        if values is None:
            table = table.remove_column(place) if place >= 0 else table
        elif values is not given.get(name):  # what comes back untouched stays as it is stored
            array = np.asarray(values)
            if array.shape[:1] != (table.num_rows,):
                raise DataError(
                    f"{where}: expected {table.num_rows} rows of column {name!r}, as many as the function was given, "
                    f"found an array of shape {list(array.shape)}"
                )
            column = to_arrow(array, where=f"{where}: column {name!r}")
            table = table.append_column(name, column) if place < 0 else table.set_column(place, name, column)
    return table


def _check_opens(table: pa.Table, about: About, where: str) -> None:
    """Raise the error with which a store refuses such rows, before all of them are made."""
    from mouse_core.store.dataset_store import DatasetStore

    if {"action", "reward", "done"} <= {*table.schema.names}:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AlignmentWarning)  # the source has said it, where it was opened
                store = DatasetStore(alignment=about.alignment).from_dataset(with_about(table, about))
            len(store.snapshot().spec)
        except MouseError as error:
            raise DataError(f"{where}: expected rows that a store takes: {error}") from error


def _in_words(wanted: pa.Schema, found: pa.Schema) -> str:
    types = {field.name: field.type for field in wanted}, {field.name: field.type for field in found}
    differing = [name for name in dict.fromkeys([*types[0], *types[1]]) if types[0].get(name) != types[1].get(name)]
    name = differing[0] if differing else wanted.names[0]
    return f"{name!r} of {types[0].get(name, 'no values')}, found {types[1].get(name, 'none')}"


# ---------------------------------------------------------------------- in another process

_work: Work | None = None


def begin_worker(work: bytes) -> None:
    """In a new process: keep what is done, and end with the process that began it, however that ends."""
    global _work
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _work = pickle.loads(work)


def _end_with(parent: int) -> None:
    connection.wait([parent])
    os._exit(1)


def run_block(number: int, begin: int, end: int, made: pa.Schema | None) -> Block:
    """``Work.run`` of what this process was begun with."""
    assert _work is not None
    return _work.run(number, begin, end, made)
