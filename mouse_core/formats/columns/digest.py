"""A digest of rows that does not depend on how they are cut into batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import is_list
from mouse_core._arrow.dense import plain, without_nulls
from mouse_core.errors import SchemaError


class RowDigest:
    """One digest of record batches that are added one after another.

    Args:
        schema: The columns, for a stream that may be empty; by default the columns of the first batch.
        hashed: Returns a new hash object, with ``update`` and ``digest``.
    """

    def __init__(self, schema: pa.Schema | None = None, hashed: Callable[[], Any] = hashlib.sha256) -> None:
        self._hashed = hashed
        self._columns = None if schema is None else _begun(schema, hashed)
        self.rows = 0

    def update(self, batch: pa.RecordBatch) -> None:
        """Add rows.

        Raises:
            SchemaError: The columns are not those of the rows before.
        """
        if self._columns is None:
            self._columns = _begun(batch.schema, self._hashed)
        if batch.schema.names != list(self._columns):
            raise SchemaError(f"digest: expected columns {list(self._columns)}, found {batch.schema.names}")
        for column, array in zip(self._columns.values(), batch.columns, strict=True):
            column.update(array)
        self.rows += batch.num_rows

    def hexdigest(self) -> str:
        """Return the digest of all rows so far, 64 hexadecimal digits."""
        whole = hashlib.sha256(f"{self.rows} rows;".encode())
        for name, column in (self._columns or {}).items():
            whole.update(f"{name!r} {column.kind} ".encode() + column.digest() + b";")
        return whole.hexdigest()


def _begun(schema: pa.Schema, hashed: Callable[[], Any]) -> dict[str, _ColumnDigest]:
    return {column.name: _ColumnDigest(_canonical(column.type), hashed) for column in schema}


class _ColumnDigest:
    """One level of a column: its nulls, its list lengths, and its values or the level below."""

    def __init__(self, kind: str, hashed: Callable[[], Any]) -> None:
        self.kind, self._hashed = kind, hashed
        self._values = hashed()
        self._valid = _Runs()
        self._lengths = _Runs()
        self._children: list[_ColumnDigest] = []

    def update(self, array: pa.Array) -> None:
        array = plain(array)
        if array.null_count or pa.types.is_null(array.type):
            self._valid.update(np.asarray(array.is_valid()).astype(np.int64))
            array = without_nulls(array)
        elif len(array):
            self._valid.add(1, len(array))
        if is_list(array.type):
            self._update_lists(array)
        elif pa.types.is_struct(array.type):
            for number, values in enumerate(array.flatten()):
                self._child(number, _canonical(values.type)).update(values)
        elif _is_text(array.type):
            self._update_texts(array)
        elif len(array):  # and so not of type null, whose rows are all gone
            values = array.cast(pa.uint8()) if pa.types.is_boolean(array.type) else array
            numbers = np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
            self._values.update(numbers.view(np.uint8).data)

    def _update_lists(self, array: pa.Array) -> None:
        if not pa.types.is_fixed_size_list(array.type):
            self._lengths.update(array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
        elif len(array):
            self._lengths.add(array.type.list_size, len(array))
        self._child(0, _canonical(array.type.value_type)).update(array.flatten())

    def _update_texts(self, array: pa.Array) -> None:
        self._lengths.update(pc.binary_length(array).to_numpy(zero_copy_only=False).astype(np.int64))
        wide = array.cast(pa.large_binary())
        ends = np.frombuffer(wide.buffers()[1], np.int64)[wide.offset : wide.offset + len(wide) + 1]
        if len(array) and ends[-1] > ends[0]:
            self._values.update(memoryview(wide.buffers()[2])[int(ends[0]) : int(ends[-1])])

    def _child(self, number: int, kind: str) -> _ColumnDigest:
        if number == len(self._children):
            self._children.append(_ColumnDigest(kind, self._hashed))
        return self._children[number]

    def digest(self) -> bytes:
        parts = [self._values.digest(), self._valid.digest(), self._lengths.digest()]
        parts += [child.digest() for child in self._children]
        return hashlib.sha256(b"".join(parts)).digest()


class _Runs:
    """A hash of whole numbers, taken as runs of equal numbers; a run may go on from call to call."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._open = np.zeros((1, 2), np.int64)  # the last value, and how many there are of it so far

    def add(self, value: int, count: int) -> None:
        if value == self._open[0, 0]:
            count += int(self._open[0, 1])
        elif self._open[0, 1]:
            self._flush(self._open)
        self._open = np.array([[value, count]], np.int64)

    def update(self, values: npt.NDArray[np.int64]) -> None:
        if not len(values):
            return
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])
        runs = np.stack([values[firsts], np.diff(np.append(firsts, len(values)))], axis=1)
        self.add(*runs[0].tolist())
        if len(runs) > 1:
            self._flush(self._open)
            self._flush(runs[1:-1])
            self._open = runs[-1:].copy()

    def _flush(self, runs: npt.NDArray[np.int64]) -> None:
        self._hash.update(runs.astype("<i8").tobytes())

    def digest(self) -> bytes:
        whole = self._hash.copy()
        whole.update(self._open.astype("<i8").tobytes())
        return whole.digest()


def _is_text(data_type: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(data_type) for test in tests)


def _canonical(data_type: pa.DataType) -> str:
    """Return the name of a type without its Arrow encoding: a dictionary of texts is a text."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _canonical(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return _canonical(data_type.value_type)
    if is_list(data_type):
        return f"list<{_canonical(data_type.value_type)}>"
    if pa.types.is_struct(data_type):
        inner: list[Any] = [f"{child.name}: {_canonical(child.type)}" for child in data_type]
        return f"struct<{', '.join(inner)}>"
    return str(data_type).removeprefix("large_")


class DigestedRows:
    """Reads rows in runs of any length.

    Args:
        batches: The rows.
        digest: A digest to which every row is added; None for none.
        advance: Called with the number of rows that were read.
    """

    def __init__(
        self, batches: Iterator[pa.RecordBatch], digest: RowDigest | None, advance: Callable[[int], None]
    ) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None
        self._digest = digest
        self._advance = advance

    def following(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches that come next."""
        return iter(self._take, None)

    def digest_of(self, rows: int, schema: pa.Schema) -> str:
        """Return the digest of the next ``rows`` rows, or of all that are left."""
        digest = RowDigest(schema)
        while rows and (batch := self._take(rows)) is not None:
            digest.update(batch)
            rows -= batch.num_rows
        return digest.hexdigest()

    def _take(self, most: int | None = None) -> pa.RecordBatch | None:
        """Return the next rows, up to ``most``; None at the end."""
        batch = self._rest if self._rest is not None else next(self._batches, None)
        self._rest = None
        if batch is None:
            return None
        if most is not None and most < batch.num_rows:
            batch, self._rest = batch.slice(0, most), batch.slice(most)
        if self._digest is not None:
            self._digest.update(batch)
        self._advance(batch.num_rows)
        return batch
