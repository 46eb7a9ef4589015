"""Runs of rows in which a column of a store has one value, and where the next run begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.addresses import check_rows
from mouse_core._arrow.dense import plain
from mouse_core.store._segments import Segment

Int64s = npt.NDArray[np.int64]

# Columns that say which task a row belongs to, and those that say it by number; the readers of formats add "metadata_".
TASKS = ("task", "task_index", "metadata_task", "metadata_task_index")
TASK_NUMBERS = ("task_index", "metadata_task_index")

BLOCK = 1 << 17
"""Rows that are compared together."""


def run_starts(segments: Sequence[Segment], rows: int, name: str) -> Int64s:
    """The rows at which a column's value differs from that of the row before, int64 ``[n]``, ascending.

    Args:
        segments: The segments of a store.
        rows: How many of their rows count.
        name: A column of single numbers or texts; null is a value.
    """
    return np.concatenate([np.nonzero(differs)[0] + at for _, differs, at in changes(segments, rows, name, 0)])


def is_single(data_type: pa.DataType) -> bool:
    """Whether a column of this type has one number or text for each row."""
    plain, types = _plain_type(data_type), pa.types
    return any(test(plain) for test in (types.is_primitive, types.is_string, types.is_large_string, types.is_null))


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    if isinstance(data_type, pa.BaseExtensionType):
        return _plain_type(data_type.storage_type)
    return _plain_type(data_type.value_type) if pa.types.is_dictionary(data_type) else data_type


def blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Rows ``begin .. end - 1`` in blocks: the first row of each, and the one behind its last."""
    return ((at, min(at + BLOCK, end)) for at in range(begin, end, BLOCK))


def changes(
    segments: Sequence[Segment], rows: int, name: str, first: int
) -> Iterator[tuple[pa.Array, npt.NDArray[np.bool_], int]]:
    """Yield a column from row ``first`` on in blocks: values, whether each differs from the last, and first row."""
    types = [_plain_type(segment.types[name]) for segment in segments if name in segment.types]
    wanted = next((data_type for data_type in types if not pa.types.is_null(data_type)), pa.null())
    last: pa.Array | None = None
    for segment, own, begin, end in _segments_from(segments, rows, first):
        if segment.has_indices and (column := segment.column(name)) is not None:
            check_rows(column, f"column {name!r}")
        for at, stop in blocks(begin, end):
            found = _column(segment, name, at - own, stop - own).cast(wanted)
            yield found, _differs(found, last), at
            last = found.slice(len(found) - 1)


def _differs(values: pa.Array, before: pa.Array | None) -> npt.NDArray[np.bool_]:
    """Return whether each value differs from the one before it, bool ``[n]``; null is one value, and so is NaN."""
    if pa.types.is_null(values.type):
        return np.zeros(len(values), np.bool_)
    shifted = pa.concat_arrays([values.slice(0, 1) if before is None else before, values.slice(0, len(values) - 1)])
    differs = pc.or_(pc.fill_null(pc.not_equal(values, shifted), False), pc.xor(values.is_null(), shifted.is_null()))
    if pa.types.is_floating(values.type):
        both = pc.and_(pc.fill_null(pc.is_nan(values), False), pc.fill_null(pc.is_nan(shifted), False))
        differs = pc.and_not(differs, both)
    found: npt.NDArray[np.bool_] = differs.to_numpy(zero_copy_only=False)
    return np.array(found)


def _column(segment: Segment, name: str, begin: int, end: int) -> pa.Array:
    """Return rows ``begin .. end - 1`` of a segment's column, in a plain type."""
    column = segment.column(name)
    if column is None:
        return pa.nulls(end - begin)
    if segment.has_indices:
        column = column.take(pa.array(segment.row_numbers(np.arange(begin, end))))
    else:
        column = column.slice(begin, end - begin)
        check_rows(column, f"column {name!r}, rows {begin}..{end - 1}", whole=False)
    wanted = _plain_type(column.type)
    return pa.concat_arrays([plain(chunk).cast(wanted) for chunk in column.chunks] or [pa.array([], wanted)])


def _segments_from(segments: Sequence[Segment], rows: int, first: int) -> Iterator[tuple[Segment, int, int, int]]:
    """Yield each segment with rows from ``first`` on, its first row, and the begin and end of the rows to look at."""
    begin = 0
    for segment in segments:
        end = min(begin + segment.num_rows, rows)
        if end > first:
            yield segment, begin, max(first, begin), end
        begin = end
