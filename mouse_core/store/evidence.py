"""Whether the first rows of a dataset speak against the alignment "arrived"."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import AlignmentWarning
from mouse_core.spec import STANDARD_FIELDS, Field
from mouse_core.store._segments import Segment

# What is looked at, by field, and where rows have it that no store was asked about.
_COLUMNS = {field.name: field.column for field in STANDARD_FIELDS if field.name in ("reward", "done", "time")}
# Looking at more would make a large dataset take longer than a small one. Rows in another order lie all over the file.
_ROWS, _SCATTERED_ROWS = 4096, 64


def warn_of_rewards(segment: Segment, fields: Mapping[str, Field], where: str, *, stacklevel: int) -> None:
    """Warn where episodes begin with a reward, among the first rows: nothing had been done there yet.

    Args:
        segment: Rows of alignment "arrived".
        fields: The store's fields, by name.
        where: What to call the rows.
        stacklevel: Whose line the warning names; 1 is the caller of this function.
    """
    columns = {name: fields[name].column for name in _COLUMNS if fields[name].column in segment.table.schema.names}
    rows = _first_rows(segment, list(dict.fromkeys(columns.values())))
    _warn(rows, columns, where, in_order=segment.indices is None, stacklevel=stacklevel + 1)


def _warn(rows: pa.Table, columns: Mapping[str, str], where: str, *, in_order: bool, stacklevel: int) -> None:
    """Warn if these rows have rewards where episodes begin; ``columns`` are the names of theirs, by field."""
    found = {name: rows.column(column) for name, column in columns.items()}
    begins, rewarded = rewards_at_starts(found, in_order=in_order)
    if rewarded:
        warnings.warn(against_arrived(begins, rewarded, rows.num_rows, where), AlignmentWarning, stacklevel + 1)


class FirstRows:
    """The first rows of a stream, kept to see whether they speak against the alignment "arrived"."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take in a batch of the rows, as long as there are not enough."""
        if self._rows < _ROWS:
            self._batches.append(batch.select([name for name in _COLUMNS.values() if name in batch.schema.names]))
            self._rows += batch.num_rows

    def warn_of_rewards(self, where: str, *, stacklevel: int) -> None:
        """Warn as the function of this name does."""
        if self._batches:
            rows = pa.Table.from_batches(self._batches).slice(0, _ROWS)
            columns = {name: column for name, column in _COLUMNS.items() if column in rows.schema.names}
            _warn(rows, columns, where, in_order=True, stacklevel=stacklevel + 1)


def against_arrived(begins: int, rewarded: int, rows: int, where: str) -> str:
    """What the warning says."""
    return (
        f"{where}: rewards where episodes begin speak against the alignment 'arrived': reward is not 0 in {rewarded:,} "
        f"of the {begins:,} rows that begin an episode among the first {rows:,}; rows that hold what leaves their "
        "observation have the alignment 'outgoing', and should say so"
    )


def rewards_at_starts(columns: Mapping[str, Any], *, in_order: bool = True) -> tuple[int, int]:
    """How many rows begin an episode, and how many of these have a reward.

    Args:
        columns: "reward", and "time" or "done", as far as they are there.
        in_order: Whether rows stand as they were recorded. The first row begins an episode only if "time" says so.
    """
    values = {name: _numbers(column) for name, column in columns.items()}
    reward, time, done = values.get("reward"), values.get("time"), values.get("done")
    if reward is None or not len(reward):
        return 0, 0
    if time is not None:
        starts = time == 0
    elif done is not None and in_order:
        starts = np.append(False, done[:-1] != 0)
    else:
        return 0, 0
    return int(starts.sum()), int((np.nan_to_num(reward[starts]) != 0).sum())


def _first_rows(segment: Segment, columns: list[str]) -> pa.Table:
    table = segment.table.select(columns)
    if segment.indices is None:
        return table.slice(0, _ROWS)
    numbers = segment.indices.column(0)
    try:
        numbers.validate()
    except pa.ArrowException:
        return table.slice(0, 0)  # whoever reads the rows is told
    first = numbers.slice(0, _SCATTERED_ROWS).to_pylist()
    if not first or min(first) < 0 or max(first) >= table.num_rows:
        return table.slice(0, 0)
    return pa.concat_tables([table.slice(number, 1) for number in first])


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.float64] | None:
    """The values of a column of numbers, NaN for null; None for a column that is none, or that is damaged."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return None
    try:
        column.validate()
        values = column.cast(pa.float64(), safe=False) if not pa.types.is_floating(kind) else column
        return np.asarray(values.to_numpy(), np.float64)
    except (pa.ArrowException, ValueError):
        return None
