"""Detects contradictions in rows: rewards that contradict the alignment "arrived", and flags that contradict done
codes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.dtypes import is_hidden
from mouse_core.episodes import step_begins
from mouse_core.errors import AlignmentWarning, DataError
from mouse_core.spec import STANDARD_FIELDS, Field
from mouse_core.store._segments import Segment

if TYPE_CHECKING:
    from mouse_core.columns.appended import Extent

# The inspected fields, and their default columns.
_COLUMNS = {field.name: field.column for field in STANDARD_FIELDS if field.name in ("reward", "done", "time")}
# The number of inspected rows is limited, so that large datasets take no longer. Of shuffled rows, which lie all over
# the file, fewer are inspected.
_ROWS, _SCATTERED_ROWS = 4096, 64
# Number of appended rows that are inspected.
_APPENDED_ROWS = 1024


def warn_of_rewards(segment: Segment, fields: Mapping[str, Field], label: str, *, stacklevel: int) -> None:
    """Inspect the first rows of a segment, and warn if the first row of an episode has a reward: no action precedes
    this row, so the reward cannot belong to an action.

    Args:
        segment: The rows, of alignment "arrived".
        fields: The store's fields, by name.
        label: The name of the rows in the message.
        stacklevel: The stack level of the warning; 1 is the caller of this function.
    """
    columns = {name: fields[name].column for name in _COLUMNS if fields[name].column in segment.table.schema.names}
    rows = _first_rows(segment, list(dict.fromkeys(columns.values())))
    _warn(rows, columns, label, in_order=segment.indices is None, stacklevel=stacklevel + 1)


def warn_of_appended(extent: Extent, fields: Mapping[str, Field], label: str, *, stacklevel: int) -> bool:
    """Inspect appended rows as ``warn_of_rewards`` inspects a segment; return True if later rows need no inspection."""
    columns = {name: fields[name].column for name in _COLUMNS if fields[name].column in extent.extents}
    count = min(extent.count, _APPENDED_ROWS)
    rows = pa.table({column: extent.extents[column].to_arrow(count) for column in columns.values()})
    return _warn(rows, columns, label, in_order=True, stacklevel=stacklevel + 1) or count == _APPENDED_ROWS


def _warn(rows: pa.Table, columns: Mapping[str, str], label: str, *, in_order: bool, stacklevel: int) -> bool:
    """Warn if the first rows of episodes have rewards; return whether rewards were found.

    Args:
        rows: The rows.
        columns: The column of each inspected field.
        label, stacklevel: See ``warn_of_rewards``.
        in_order: Whether the rows are in recorded order.
    """
    found = {name: rows.column(column) for name, column in columns.items()}
    begins, rewarded = _rewards_at_starts(found, in_order=in_order)
    if rewarded:
        warnings.warn(
            f"{label}: the rewards of first rows contradict the alignment 'arrived': reward is not 0 in "
            f"{rewarded:,} of the {begins:,} rows that begin an episode among the first {rows.num_rows:,}; if each "
            "row holds the transition that leaves its observation, set alignment='outgoing' in their metadata",
            AlignmentWarning,
            stacklevel + 1,
        )
    return rewarded > 0


class FirstRows:
    """Inspects a stream of rows: the first rows for rewards that contradict "arrived", all rows for flags that
    contradict done codes.
    """

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._rows = self._seen = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Inspect a batch of rows.

        Raises:
            DataError: Done codes contradict the flags in the same rows.
        """
        before = self._seen
        check_flags(batch, "done", lambda row: f"at row {before + row}")
        self._seen += batch.num_rows
        if self._rows < _ROWS:
            self._batches.append(batch.select([name for name in _COLUMNS.values() if name in batch.schema.names]))
            self._rows += batch.num_rows

    def warn_of_rewards(self, label: str, *, stacklevel: int) -> None:
        """Warn about rewards in the rows that were added so far; see the function ``warn_of_rewards``."""
        if self._batches:
            rows = pa.Table.from_batches(self._batches).slice(0, _ROWS)
            columns = {name: column for name, column in _COLUMNS.items() if column in rows.schema.names}
            _warn(rows, columns, label, in_order=True, stacklevel=stacklevel + 1)


# ---------------------------------------------------------------------- done codes beside flags

# Names of flag columns that rows may have in addition to the done code: terminated, truncated.
_FLAGS = (
    ("terminated", "truncated"),
    ("terminations", "truncations"),
    ("terminateds", "truncateds"),
    ("terminals", "timeouts"),
    ("terminal", "timeout"),
)


def flags_in(names: Container[object]) -> tuple[str, str] | None:
    """Return the names of the two columns with the flags terminated and truncated, if rows have both columns."""
    return next((pair for pair in _FLAGS if pair[0] in names and pair[1] in names), None)


def contradicted(done: Any, terminated: Any, truncated: Any) -> npt.NDArray[np.bool_]:
    """Return the rows whose flags contradict the done code; a null flag contradicts no done code."""
    codes, ended, cut = map(_floats, (done, terminated, truncated))
    wanted = np.where(ended != 0, 1, np.where(cut != 0, 2, 0))
    known: npt.NDArray[np.bool_] = np.isfinite(codes) & np.isfinite(ended) & np.isfinite(cut)
    differs: npt.NDArray[np.bool_] = known & (codes != wanted)
    return differs


def _floats(values: Any) -> npt.NDArray[np.float64]:
    """Return a column as floats, one number for each row, with NaN for null; raise TypeError or ValueError if the
    column has other values.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        values = _numbers(values)
        if values is None:
            raise TypeError("expected numbers")
    elif type(values) is not np.ndarray or values.dtype.kind not in "biuf":
        values = np.asarray([np.nan if is_hidden(value) else value for value in values], np.float64)
    if values.size != len(values):
        raise TypeError("expected one number for each row")  # vector rewards, flags of agents
    return np.asarray(values.reshape(-1), np.float64)


def check_flags(columns: Mapping[str, Any] | pa.RecordBatch, done: str, label: Callable[[int], str]) -> None:
    """Raise DataError if done codes contradict the flags in the same rows.

    Args:
        columns: The columns of the done codes and the flags; columns that do not hold numbers are ignored.
        done: The column of done codes.
        label: Function that takes the position of a row, and returns the row's name for the message.
    """
    names = columns.schema.names if isinstance(columns, pa.RecordBatch) else columns
    flags = flags_in(names)
    if flags is None or done not in names:
        return
    found = [columns[name] for name in (done, *flags)]
    try:
        wrong = contradicted(*found)
    except (TypeError, ValueError):
        return
    if wrong.any():
        row = int(wrong.argmax())
        code, ended, cut = (int(_floats(column[row : row + 1])[0]) for column in found)
        raise DataError(
            f"column {done!r}: expected {1 if ended else 2 if cut else 0} where {flags[0]!r} is {bool(ended)} and "
            f"{flags[1]!r} {bool(cut)}, found {code} {label(row)}; a done code is 1 if terminated else 2 if truncated "
            "else 0"
        )


def check_flags_of(segment: Segment, done: str, label: str) -> None:
    """Check a dataset like ``check_flags``: the first rows, and if flags are boolean, also every row in which a flag is
    set.
    """
    names = segment.table.schema.names
    flags = flags_in(names)
    if flags is None or done not in names:
        return
    columns = [done, *flags]
    rows = _first_rows(segment, columns)
    check_flags(dict(zip(columns, rows.columns, strict=True)), done, lambda row: f"at row {row} of {label}")
    if segment.indices is not None or not all(segment.types[name] == pa.bool_() for name in flags):
        return
    import pyarrow.compute as pc  # slow to load, and few datasets have such columns

    ended, cut = (segment.table.column(name) for name in flags)
    numbers = pc.indices_nonzero(pc.or_(ended, cut).combine_chunks())
    marked = {name: segment.table.column(name).take(numbers) for name in columns}
    check_flags(marked, done, lambda row: f"at row {numbers[row].as_py()} of {label}")


def _rewards_at_starts(columns: Mapping[str, pa.ChunkedArray], *, in_order: bool) -> tuple[int, int]:
    """Return the number of rows that begin an episode, and the number of these rows whose reward is not 0.

    Args:
        columns: The columns of "reward", and of "time" or "done", if they exist.
        in_order: Whether the rows are in recorded order. The first row counts as the start of an episode only if "time"
            is 0 in this row.
    """
    reward, time, done = (_numbers(columns[name]) if name in columns else None for name in ("reward", "time", "done"))
    if reward is None or not len(reward):
        return 0, 0
    if time is not None:
        starts = time == 0
    elif done is not None and in_order:
        starts = step_begins(done != 0)
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
        return table.slice(0, 0)  # reading the rows raises the error
    first = numbers.slice(0, _SCATTERED_ROWS).to_pylist()
    if not first or min(first) < 0 or max(first) >= table.num_rows:
        return table.slice(0, 0)
    return pa.concat_tables([table.slice(number, 1) for number in first])


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.float64] | None:
    """Return the values of a column of numbers, NaN for null; None if the column has other values or is damaged."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return None
    try:
        column.validate()
        values = column.cast(pa.float64(), safe=False) if not pa.types.is_floating(kind) else column
        return np.asarray(values, np.float64)
    except (pa.ArrowException, ValueError):
        return None
