"""Rows of a field that are counted together: read, without those that have no value of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._base.memory import ArrayMemory
from mouse_core.spec import Field
from mouse_core.statistics._counting import Counted, Layout, count
from mouse_core.store.fields import FieldReader, bind_fields
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]

# The column that marks rows whose observation the recording lacks; so many of its rows are read together.
_MISSING = "observation_missing"
_MARKS = 1 << 18


class Block(NamedTuple):
    """Rows of a field that are counted together; ``with_nulls`` reads NaN where the field fills a null."""

    name: str
    layout: Layout
    begin: int
    end: int
    dropped: Int64s
    with_nulls: FieldReader | None


def count_block(snapshot: Snapshot, memory: ArrayMemory, block: Block) -> Counted:
    """What is counted of some rows of a snapshot, where they lie or read to memory that others had before."""
    reader = snapshot.readers[block.name]
    windows = snapshot.locate(np.array([block.begin]), block.end - block.begin).part(0)
    dtype = dtype_of(reader)
    found = reader.seen(windows, dtype)
    if found is None:
        found = reader.read(windows, dtype, memory.empty((1, windows.every.length, *reader.spec.shape), dtype))
    (rows,) = found
    if block.with_nulls is not None:
        there = ~np.isnan(block.with_nulls.read(windows, np.dtype(np.float64))[0])
        if not there.all():
            rows = np.where(there, rows.astype(np.float64), np.nan)
    first, end = np.searchsorted(block.dropped, (block.begin, block.end))
    if end > first:
        rows = np.delete(rows, block.dropped[first:end] - block.begin, axis=0)
    return count(block.layout, rows)


def dtype_of(reader: FieldReader) -> np.dtype[np.generic]:
    """What a field is read in to be counted: as it is stored, or as float64 where that cannot hold what it becomes."""
    return reader.stored_dtype(np.dtype(np.float64))


def reader_with_nulls(snapshot: Snapshot, reader: FieldReader) -> FieldReader | None:
    """What reads a field with NaN for its nulls; None where they count for nothing anyway, and of images."""
    field = reader.field
    if field.fill is None or not np.isfinite(field.fill) or field.image:
        return None
    double, shape = np.dtype(np.float64), reader.column.shape
    plain = replace(field, dtype=double, vector_dtype=None, shape=shape, dim=None, fill=np.nan, bounds=None, labels=())
    types = snapshot.config.types
    return bind_fields(snapshot.segments, {field.name: plain}, types, rows=snapshot.num_rows).get(field.name)


class Marks:
    """The rows of a snapshot in which fields have no value of their own.

    Args:
        snapshot: The rows.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._missing: tuple[int, Int64s] | None = None

    def dropped(self, name: str, begin: int) -> Int64s:
        """Those of a field, from row ``begin`` on at least, ascending."""
        snapshot = self._snapshot
        if snapshot.readers[name].field.is_of_transition:
            arrived = snapshot.alignment == "arrived" and "done" in snapshot.readers
            return snapshot.episode_starts if arrived else np.empty(0, np.int64)
        if _MISSING not in snapshot.config.types or not snapshot.readers[name].spec.column.startswith("observation"):
            return np.empty(0, np.int64)
        if self._missing is None or begin < self._missing[0]:
            self._missing = begin, self._marked(begin)
        return self._missing[1]

    def _marked(self, begin: int) -> Int64s:
        """The rows from ``begin`` on whose observation the recording lacks."""
        snapshot = self._snapshot
        said = {_MISSING: Field(_MISSING, dtype=np.int64, shape=(), fill=0)}
        types, rows = snapshot.config.types, snapshot.num_rows
        bound = bind_fields(snapshot.segments, said, types, rows=rows, budget=snapshot.budget)
        found = [np.empty(0, np.int64)]
        for first in range(begin, rows if bound else 0, _MARKS):
            windows = snapshot.locate(np.array([first]), min(_MARKS, rows - first)).part(0)
            found.append(first + np.flatnonzero(bound[_MISSING].read(windows, np.dtype(np.int64))))
        return np.concatenate(found)
