"""Taking appended rows into blocks: all of a row or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core.dtypes import RowError
from mouse_core.errors import DataError
from mouse_core.spec import FieldSpec
from mouse_core.store._schema import REFUSALS, StoreSchema
from mouse_core.store._segments import Segment
from mouse_core.store._tail.columns import ColumnBlock
from mouse_core.store._tail.rows import Block, Refused, prepare
from mouse_core.store.snapshot import Snapshot


class Appender:
    """The open block of a store.

    Args:
        schema: The store's schema, which learns the columns of the first row.
        segments: The store's segments; a block that is full becomes another.
    """

    def __init__(self, schema: StoreSchema, segments: list[Segment]) -> None:
        self._schema = schema
        self._segments = segments
        self._block: Block | None = None

    @property
    def count(self) -> int:
        """Rows in the open block."""
        return 0 if self._block is None else self._block.count

    def segment(self) -> Segment | None:
        """The rows of the open block; rows that come later do not show in it."""
        if self._block is None or not self._block.count:
            return None
        return self._block.to_segment(self._schema.image_roots)

    def close(self) -> None:
        """Seal the open block; the next row opens another, of columns that may have been learnt since."""
        segment = self.segment()
        self._block = None
        if segment is not None:
            segment.seal()
            self._segments.append(segment)

    def append(self, row: Mapping[str, Any]) -> None:
        """Take one row; see ``DatasetStore.append``."""
        block = self._block
        if block is not None and block.count < block.rows and block.append(row):
            return
        if block is None or block.count == block.rows or row.keys() != block.columns.keys():
            block = self._block_for(row)
        try:
            block.put(row)
        except Refused as refused:
            if not self._learn(block, row):
                raise self._refused(refused.name, refused.__cause__) from refused.__cause__
            return
        if block is not self._block:
            self._open(block)

    def extend(self, columns: Mapping[str, Any], n: int) -> None:
        """Take ``n`` rows, column by column; see ``DatasetStore.extend``."""
        block = self._block_for({name: _first_known(values) for name, values in columns.items()}, n)
        try:
            prepared = self._prepare(block, columns)
        except DataError:
            # The first value of a column that was all null so far: keep the column from here on as that value says.
            learnt = self._relearnt(block, {name: _first_known(values) for name, values in columns.items()}, n)
            if learnt is None:
                raise
            block = learnt
            prepared = self._prepare(block, columns)
        if block is not self._block:
            self._open(block)
        done = 0
        while done < n:
            if block.count == block.rows:
                block = Block(block.columns, block.rows, n - done)
                self._open(block)
            rows = min(n - done, block.rows - block.count)
            block.put_many(prepared, done, rows)
            done += rows

    def _prepare(self, block: Block, columns: Mapping[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = {}
        for name, column in block.columns.items():
            try:
                prepared[name] = prepare(columns[name], column)
            except RowError as error:
                raise self._refused(name, error, error.row) from error
            except REFUSALS as error:
                raise DataError(f"column {name!r}: {error}") from error
        return prepared

    def _block_for(self, row: Mapping[str, Any], coming: int = 0) -> Block:
        """The block that ``row`` goes to: the open one, or a new one that is to be opened once the row is in it."""
        self._schema.check_names(row)
        if self._block is None:
            return Block(self._schema.tail_columns(row, self._spec(), self._rows()), 0, coming)
        if self._block.count == self._block.rows:
            return Block(self._block.columns, self._block.rows, coming)
        return self._block

    def _learn(self, block: Block, row: Mapping[str, Any]) -> bool:
        """Try again a row with the first value of a column that was all null so far; whether it was taken."""
        learnt = self._relearnt(block, row)
        if learnt is None:
            return False
        try:
            learnt.put(row)
        except Refused as refused:
            raise self._refused(refused.name, refused.__cause__) from refused.__cause__
        self._open(learnt)
        return True

    def _relearnt(self, block: Block, row: Mapping[str, Any], coming: int = 0) -> Block | None:
        fresh = {name for name, column in block.columns.items() if column.kind.kind == "null" and row[name] is not None}
        if not fresh:
            return None
        columns = self._schema.tail_columns(row, self._spec(), self._rows())
        kept = {name: columns[name] if name in fresh else column for name, column in block.columns.items()}
        return Block(kept, 0, coming)

    def _open(self, block: Block) -> None:
        if self._block is not None and self._block is not block:
            self.close()
        self._block = block
        for name, column in block.blocks.items():
            self._schema.learn(name, block.columns[name].kind, partial(_arrow_type, column))

    def _rows(self) -> int:
        return sum(segment.num_rows for segment in self._segments) + self.count

    def _spec(self) -> Mapping[str, FieldSpec]:
        """The specs of the fields there are in the rows before."""
        if not self._segments:
            return {}
        segment = self.segment()
        segments = self._segments if segment is None else [*self._segments, segment]
        return Snapshot(segments, self._schema.config()).spec

    def _refused(self, name: str, error: BaseException | None, row: int = 0) -> DataError:
        return DataError(f"column {name!r}: {error} at row {self._rows() + row}")


def _arrow_type(column: ColumnBlock) -> pa.DataType:
    return column.to_arrow(0).type


def _first_known(values: Any) -> Any:
    """The first value that is not None, to infer a type from."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values[0]
    return next((value for value in values if value is not None), None)
