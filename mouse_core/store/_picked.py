"""Rows that are found through row numbers, as a shuffle or a filter leaves them: the stretches they make up, if any."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.windows import Stretches, cut_at_stretches
from mouse_core.errors import DataError

_LOOKED_AT = 1 << 16
# Runs of rows are kept, in 24 bytes each, where they are so long on average and not more than these.
_SHORTEST_RUNS, _MOST_RUNS = 4, 1 << 21


def are_too_short(runs: int, rows: int) -> bool:
    """Whether so many runs of so many rows are kept row by row instead."""
    return runs > _MOST_RUNS or _SHORTEST_RUNS * runs > rows + _LOOKED_AT


def runs_of(numbers: pa.ChunkedArray, rows: int, chunk_starts: npt.NDArray[np.int64]) -> Stretches | None:
    """Stretches of rows whose numbers follow each other, each in one chunk; None where they are in no such order.

    Args:
        numbers: Into a table of so many ``rows``.
        rows: How many those are.
        chunk_starts: The first row of every chunk of the table, and the end.
    """
    try:
        numbers.validate()
    except pa.ArrowException:
        return None  # whoever reads the rows is told
    starts, firsts, known, last = [], [], 0, -2
    for begin in range(0, len(numbers), _LOOKED_AT):
        found = numbers.slice(begin, _LOOKED_AT).to_numpy()
        if found.dtype.kind not in "iu" or found.max() >= rows or found.min() < 0:
            return None
        found = found.astype(np.int64)
        (new,) = np.nonzero(np.diff(found, prepend=last) != 1)
        known += len(new)
        if are_too_short(known, begin + len(found)):
            return None
        starts.append(new + begin)
        firsts.append(found[new])
        last = int(found[-1])
    begins = np.concatenate([*starts, [len(numbers)]])
    chunks = Stretches(chunk_starts)
    chunk, row, size, _ = cut_at_stretches(chunks, np.concatenate(firsts), np.diff(begins))
    return Stretches(np.concatenate([[0], np.cumsum(size)]), chunk, row, chunks.longest)


def first_picked(column: pa.ChunkedArray, numbers: pa.ChunkedArray) -> int | None:
    """The first of some rows of a column whose value is not null; None where all are.

    Raises:
        DataError: Row numbers that cannot be read.
    """
    if not column.null_count:
        return 0
    there = np.asarray(column.is_valid())
    try:
        numbers.validate()
    except pa.ArrowException as error:
        raise DataError(f"dataset: expected readable indices, found damaged data: {error}") from error
    for first in range(0, len(numbers), _LOOKED_AT):
        (found,) = np.nonzero(there[numbers.slice(first, _LOOKED_AT).to_numpy()])
        if len(found):
            return first + int(found[0])
    return None
