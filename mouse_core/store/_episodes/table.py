"""The table of episodes: one row for each, counted once and counted on where rows come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.addresses import check_rows
from mouse_core._arrow.dense import plain
from mouse_core.errors import ConfigError
from mouse_core.spec import codes_called

Int64s = npt.NDArray[np.int64]

OWN = ("episode", "start", "length", "return", "done")
"""Names of the columns that every table of episodes has, before those of the rows."""

_TYPES = (pa.int64(), pa.int64(), pa.int64(), pa.float64(), pa.int64())
_SCHEMA = pa.schema(list(zip(OWN, _TYPES, strict=True)))
# So many rows are looked at together.
_BLOCK = 1 << 17
# Fields whose columns the table says itself.
_COUNTED = ("reward", "done", "time")


class _Segment(Protocol):
    """Rows that never change; see ``store._segments.Segment``."""

    num_rows: int
    has_indices: bool

    @property
    def recorded(self) -> _Segment: ...
    def begins_as(self, other: Any) -> bool: ...
    @property
    def types(self) -> dict[str, pa.DataType]: ...
    def column(self, name: str) -> pa.ChunkedArray | None: ...
    def row_numbers(self, rows: Int64s) -> Int64s: ...


class EpisodeSource(Protocol):
    """What is counted; see ``store.snapshot.Snapshot``."""

    num_rows: int

    @property
    def segments(self) -> Sequence[_Segment]: ...
    @property
    def config(self) -> Any: ...
    @property
    def alignment(self) -> str: ...
    @property
    def readers(self) -> Mapping[str, Any]: ...
    @property
    def episode_starts(self) -> Int64s: ...
    def stored(self, field: str, starts: Int64s, length: int = ..., dtype: Any = ...) -> npt.NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class Episodes:
    """The episodes of some rows.

    Args:
        table: A row for each; see ``Store.episodes``.
        rows: The rows.
        looked_at: Names of the columns that were looked at, whether or not they are in the table.
        origin: What tables have in common of which one was counted on from the other: an episode of the same number and
            length is the same in both.
    """

    table: pa.Table
    rows: EpisodeSource
    looked_at: frozenset[str]
    origin: object


def episodes_of(
    rows: EpisodeSource, before: Episodes | None = None, tasks: Mapping[int, str] | None = None
) -> Episodes:
    """The episodes of some rows.

    Args:
        rows: The rows.
        before: Those of rows that these may have grown from: what was counted then is not counted again, but for the
            episode that was the last.
        tasks: The texts of tasks, by number.

    Raises:
        DataError: A value that its field does not allow.
    """
    if not rows.num_rows:
        return Episodes(_SCHEMA.empty_table(), rows, frozenset(), object())
    if before is None or not _are_first(before.rows, rows):
        kept, origin, known = 0, object(), {}
        varying: frozenset[str] = frozenset()
    else:
        kept, origin = before.table.num_rows - 1, before.origin
        known = {name: before.table.column(name).slice(0, kept) for name in before.table.column_names}
        varying = before.looked_at - known.keys()  # within an episode, and so they do still
    starts, names = rows.episode_starts, _names(rows)
    columns: dict[str, Any] = dict(_counted(rows, starts[kept:], kept))
    columns |= {name: _values_by_episode(rows, name, starts[kept:]) for name in names if name not in varying}
    there = {name: _chunked(values) for name, values in columns.items() if values is not None}
    if known:
        there = {name: _behind(known.get(name, _chunked(pa.nulls(kept))), values) for name, values in there.items()}
    _name_tasks(there, tasks or {})
    return Episodes(pa.table(there).combine_chunks(), rows, frozenset(names), origin)


def _name_tasks(columns: dict[str, pa.ChunkedArray], tasks: Mapping[int, str]) -> None:
    """Add the texts of tasks, where there are only their numbers."""
    numbers = next((columns[name] for name in _TASK_NUMBERS if name in columns), None)
    if tasks and numbers is not None and "task" not in columns:
        columns["task"] = _chunked(pa.array([tasks.get(number) for number in numbers.to_pylist()], pa.string()))


def _are_first(before: EpisodeSource, rows: EpisodeSource) -> bool:
    """Whether these rows are those before with others behind them, read in the same way."""
    if not 0 < before.num_rows <= rows.num_rows or len(before.segments) > len(rows.segments):
        return False
    if any(before.config.fields.get(name) != rows.config.fields.get(name) for name in _COUNTED):
        return False
    # Columns that are computed are not in the table.
    recorded = ([segment.recorded for segment in one.segments] for one in (before, rows))
    *firsts, last = zip(*recorded, strict=False)
    return last[0].begins_as(last[1]) and all(one is other for one, other in firsts)


def _names(rows: EpisodeSource) -> list[str]:
    """The columns that may be the same all through an episode: numbers, texts and the like, one for each row."""
    # Those that are computed vary from row to row, and would be computed here.
    ours = {rows.config.fields[name].column for name in _COUNTED if name in rows.config.fields} | {*rows.config.made}
    found: dict[str, bool] = {}
    for segment in rows.segments:
        for name, data_type in segment.types.items():
            found[name] = found.get(name, True) and _is_single(data_type)
    return [name for name, single in found.items() if single and name not in ours and name not in OWN]


def _is_single(data_type: pa.DataType) -> bool:
    plain, types = _plain_type(data_type), pa.types
    return any(test(plain) for test in (types.is_primitive, types.is_string, types.is_large_string, types.is_null))


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    if isinstance(data_type, pa.BaseExtensionType):
        return _plain_type(data_type.storage_type)
    return _plain_type(data_type.value_type) if pa.types.is_dictionary(data_type) else data_type


# Columns that say which task a row belongs to, and those that say it by number; the readers of formats add "metadata_".
_TASKS = ("task", "task_index", "metadata_task", "metadata_task_index")
_TASK_NUMBERS = ("task_index", "metadata_task_index")


def starts_of(rows: EpisodeSource, column: str) -> Int64s:
    """The rows at which a column's value changes; see ``Snapshot.stretch_starts``."""
    types = {name: data_type for segment in rows.segments for name, data_type in segment.types.items()}
    if column:
        return np.concatenate([np.zeros(1, np.int64), _starts_in(rows, _single_column(rows, types, column))])
    ends = codes_called(rows.config.fields["done"], "task")
    name = next((name for name in _TASKS if name in types), None)
    if name is None and not ends:
        raise ConfigError(
            f"boundary: expected a column of tasks, one of {list(_TASKS)}, or codes of 'done' that are called so, "
            f"found {list(types)}; boundary=Column(name) takes any column"
        )
    starts = [np.zeros(1, np.int64)] if name is None else [np.zeros(1, np.int64), _starts_in(rows, name)]
    for at, stop in _blocks(0, rows.num_rows) if ends else ():
        done = rows.stored("done", np.array([at]), stop - at)
        starts.append(np.nonzero(np.isin(done, ends))[0] + at + 1)
    found = np.unique(np.concatenate(starts))
    return found[found < rows.num_rows]


def _starts_in(rows: EpisodeSource, column: str) -> Int64s:
    changes = [np.nonzero(differs)[0] + at for _, differs, at in _changes(rows, column, 0)]
    return np.concatenate(changes)


def _single_column(rows: EpisodeSource, types: dict[str, pa.DataType], name: str) -> str:
    """The column of that name, or that the field of that name reads, or ConfigError."""
    column = rows.config.fields[name].column if name not in types and name in rows.config.fields else name
    if column not in types or not _is_single(types[column]):
        single = [known for known, data_type in types.items() if _is_single(data_type)]
        raise ConfigError(f"boundary: expected a column of single numbers or texts among {single}, found {name!r}")
    return column


def _counted(rows: EpisodeSource, starts: Int64s, first: int) -> dict[str, npt.NDArray[Any]]:
    """What the table says of the episodes that begin at ``starts``, the first of which has number ``first``."""
    ends = np.append(starts[1:], rows.num_rows)
    done = [np.zeros(len(ends), np.int64)]  # of rows that are no steps
    if "done" in rows.readers:
        done = [rows.stored("done", ends[at : at + _BLOCK] - 1) for at in range(0, len(ends), _BLOCK)]
    return {
        "episode": np.arange(first, first + len(starts)),
        "start": starts,
        "length": ends - starts,
        "return": _returns(rows, starts),
        "done": np.concatenate(done).astype(np.int64),
    }


def _returns(rows: EpisodeSource, starts: Int64s) -> npt.NDArray[np.float64]:
    """Sums of the rewards of episodes, float64 ``[n]``, each added up row by row, wherever blocks of rows end.

    In rows that "arrived" the reward of an episode's first row is none of its own. Rewards 9, 1, 1, 9, 2 of episodes
    that begin at rows 0 and 3 sum up to 2 and 2 then, and to 11 and 11 where rows are "outgoing".
    """
    sums = np.zeros(len(starts))
    for begin, end in _blocks(int(starts[0]), rows.num_rows) if "reward" in rows.readers else ():
        reward = rows.stored("reward", np.array([begin]), end - begin, np.dtype(np.float64))
        inside = starts[starts.searchsorted(begin) : starts.searchsorted(end)]
        if rows.alignment == "arrived":
            reward[inside - begin] = 0
        # Which episode each row is in: that of the row before the block, and one more at each row that begins one.
        number = starts.searchsorted(begin) - 1 + _steps_at(inside - begin, end - begin)
        np.add.at(sums, number, reward)
    return sums


def _steps_at(places: Int64s, count: int) -> Int64s:
    """How many of some places lie at or before each of ``0 .. count - 1``: places 1, 3 of 4 give 0, 1, 1, 2."""
    there = np.zeros(count, np.int64)
    there[places] = 1
    return np.cumsum(there)


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + _BLOCK, end)) for at in range(begin, end, _BLOCK))


def _values_by_episode(rows: EpisodeSource, name: str, starts: Int64s) -> pa.ChunkedArray | None:
    """A column's value in each of the episodes that begin at ``starts``; None where one of them has several."""
    values: list[pa.Array] = []
    try:
        for found, differs, at in _changes(rows, name, int(starts[0])):
            inside = starts[starts.searchsorted(at) : starts.searchsorted(at + len(found))] - at
            differs[inside] = False
            if differs.any():
                return None
            values.append(found.take(pa.array(inside)))
    except pa.ArrowException:
        return None  # numbers in one part of the store, texts in another; or a type that cannot be compared
    return pa.chunked_array(values)


def _changes(rows: EpisodeSource, name: str, first: int) -> Iterator[tuple[pa.Array, npt.NDArray[np.bool_], int]]:
    """A column from row ``first`` on, block by block: its values, which differ from those before, and the first row."""
    types = [_plain_type(segment.types[name]) for segment in rows.segments if name in segment.types]
    wanted = next((data_type for data_type in types if not pa.types.is_null(data_type)), pa.null())
    last: pa.Array | None = None
    for segment, own, begin, end in _segments_from(rows, first):
        if segment.has_indices and (column := segment.column(name)) is not None:
            check_rows(column, f"column {name!r}")
        for at, stop in _blocks(begin, end):
            found = _column(segment, name, at - own, stop - own).cast(wanted)
            yield found, _differs(found, last), at
            last = found.slice(len(found) - 1)


def _differs(values: pa.Array, before: pa.Array | None) -> npt.NDArray[np.bool_]:
    """Whether each value is another than that before it, bool ``[n]``; null is one value, and so is NaN."""
    if pa.types.is_null(values.type):
        return np.zeros(len(values), np.bool_)
    shifted = pa.concat_arrays([values.slice(0, 1) if before is None else before, values.slice(0, len(values) - 1)])
    differs = pc.or_(pc.fill_null(pc.not_equal(values, shifted), False), pc.xor(values.is_null(), shifted.is_null()))
    if pa.types.is_floating(values.type):
        both = pc.and_(pc.fill_null(pc.is_nan(values), False), pc.fill_null(pc.is_nan(shifted), False))
        differs = pc.and_not(differs, both)
    found: npt.NDArray[np.bool_] = differs.to_numpy(zero_copy_only=False)
    return np.array(found)


def _column(segment: _Segment, name: str, begin: int, end: int) -> pa.Array:
    """Rows ``begin .. end - 1`` of one of a segment's columns, in a plain type."""
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


def _segments_from(rows: EpisodeSource, first: int) -> Iterator[tuple[_Segment, int, int, int]]:
    """Segments with rows from ``first`` on: their first row, and which rows of all to look at, begin and end."""
    begin = 0
    for segment in rows.segments:
        end = min(begin + segment.num_rows, rows.num_rows)
        if end > first:
            yield segment, begin, max(first, begin), end
        begin = end


def _chunked(values: Any) -> pa.ChunkedArray:
    return values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([pa.array(values)])


def _behind(known: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of the episodes before, and of those behind them, in one type."""
    wanted = known.type if pa.types.is_null(values.type) else values.type
    return pa.chunked_array([*known.cast(wanted).chunks, *values.cast(wanted).chunks], wanted)
