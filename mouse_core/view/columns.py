"""Reads values of columns for display: numbers by dimension, images and texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.column_types import ColumnType, column_type, fixed_shape, is_list
from mouse_core._arrow.dense import plain
from mouse_core.formats.columns import MISSING, travels_with_action
from mouse_core.store.snapshot import Snapshot

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

_COUNTED = ("reward", "done", "time")
# Column of task numbers, and the name of the column with the texts of tasks.
_TASK_NUMBERS = ("task_index", "metadata_task_index")
_TASK = "task"
# Number of rows whose values are looked up together; it limits the cost for tables of many chunks.
_ROWS = 1 << 20


def kind_of(kind: ColumnType) -> str:
    """Return how a column is displayed: as "numbers", "image" or "text"."""
    if kind.kind in ("image", "video") or (kind.kind == "list" and kind.depth in (2, 3) and kind.value_type == "uint8"):
        return "image"
    return "numbers" if kind.kind in ("scalar", "list") else "text"


def columns_of(snapshot: Snapshot) -> dict[str, pa.DataType]:
    """Return the Arrow types of a snapshot's columns. A type comes from the first segment with values in the column."""
    found: dict[str, pa.DataType] = {}
    for segment in snapshot.segments:
        for name, data_type in segment.types.items():
            if name not in found or pa.types.is_null(found[name]):
                found[name] = data_type
    return found


def described(snapshot: Snapshot, dimensions: Mapping[str, Sequence[str]] | None = None) -> list[dict[str, Any]]:
    """Return the name, type, kind, width and dimension names of every column; columns of standard fields come first.

    Args:
        snapshot: The rows.
        dimensions: Names of dimensions, by column. Names are ignored if there are more or fewer names than dimensions.
    """
    types = columns_of(snapshot)
    fields = {reader.spec.column: reader for reader in snapshot.readers.values()}
    first = [name for name in ("reward", "action", "observation") if name in types]
    ordered = [*first, *(name for name in fields if name in types and name not in first)]
    ordered += [name for name in types if name not in ordered]
    found = []
    for name in ordered:
        kind = kind_of(column_type(types[name]))
        shape = fixed_shape(types[name])
        if kind == "numbers" and shape is None and name in fields:
            shape = tuple(fields[name].spec.shape)
        if kind == "numbers" and shape is None:
            rows = read_numbers(snapshot, name, 0, min(snapshot.num_rows, 1))
            shape = (rows.shape[1],)
        names = list((dimensions or {}).get(name, ()))
        found.append(
            {
                "name": name,
                "type": str(types[name])[:120],
                "kind": kind,
                "shape": list(shape or ()),
                "width": prod(shape or ()) if kind == "numbers" else 0,
                "names": names if len(names) == prod(shape or ()) else [],
            }
        )
    for name, reader in snapshot.readers.items():
        # Fields of images without a column of images, such as frames of videos.
        if reader.spec.image_shape is not None and not any(
            one["name"] == reader.spec.column and one["kind"] == "image" for one in found
        ):
            found.append({"name": name, "type": "image", "kind": "image", "shape": [], "width": 0, "names": []})
    return found


# ---------------------------------------------------------------------- rows


def tables(snapshot: Snapshot, begin: int, end: int) -> Iterator[pa.Table]:
    """Yield rows ``begin .. end - 1`` as tables, one for each segment."""
    at = 0
    for segment in snapshot.segments:
        first, last = max(begin - at, 0), min(end - at, segment.num_rows)
        if first < last:
            yield segment.take(first, last - first)
        at += segment.num_rows


def read_numbers(snapshot: Snapshot, name: str, begin: int, end: int) -> Floats:
    """Return a column of numbers in rows ``begin .. end - 1``, float64 ``[n, width]``; missing values are NaN.

    Placeholder values in rows without a recorded observation also become NaN. The width equals the length of the
    longest row.
    """
    found = _read(snapshot, name, begin, end)
    if is_filler(snapshot, name):
        found[_read(snapshot, MISSING, begin, end)[:, 0] == 1] = np.nan
    return found


def read_dimensions(snapshot: Snapshot, name: str, dims: Sequence[int], start: int, first: int, last: int) -> Floats:
    """Return some dimensions of a column in the steps ``first .. last - 1``, ``[n, dims]``; step 0 is the row
    ``start``. A dimension that does not exist is NaN in every step.
    """
    values = read_numbers(snapshot, name, start + first, start + last)
    wanted = np.asarray(dims)
    found = np.full((len(values), len(wanted)), np.nan)
    exists = wanted < values.shape[1]
    found[:, exists] = values[:, wanted[exists]]
    return found


def is_filler(snapshot: Snapshot, name: str) -> bool:
    """Whether a column has meaningless placeholder values in rows without a recorded observation."""
    own = name.removeprefix("metadata_").removeprefix("info.")
    beside = own != name and not travels_with_action(own)
    return MISSING in columns_of(snapshot) and name != MISSING and (beside or name.startswith("observation"))


def _read(snapshot: Snapshot, name: str, begin: int, end: int) -> Floats:
    parts: list[Floats] = []
    for table in tables(snapshot, begin, end):
        if name not in table.schema.names:
            parts.append(np.full((table.num_rows, 1), np.nan))
            continue
        parts += [_as_numbers(chunk) for chunk in table.column(name).chunks if len(chunk)]
    width = max((part.shape[1] for part in parts), default=0)
    found = np.full((sum(len(part) for part in parts), width), np.nan)
    at = 0
    for part in parts:
        found[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return found


def _as_numbers(array: pa.Array) -> Floats:
    """Convert a column of numbers or nested lists of numbers to ``[n, width]``; nulls and missing values become NaN.

    For example, ``[[1, 2], null]`` and ``[[3]]`` become the rows ``[1, 2]`` and ``[3, NaN]``.
    """
    array = plain(array)
    ends = np.arange(len(array) + 1)  # first value of each row among the values of the innermost lists
    while is_list(array.type):
        counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[ends]
        array = plain(array.flatten())
    lengths = np.diff(ends)
    width = int(lengths.max(initial=0))
    found = np.full((len(lengths), width), np.nan)
    found[np.arange(width) < lengths[:, None]] = _scalars(array)
    return found


def _scalars(array: pa.Array) -> Floats:
    """Convert a one-dimensional array to float64; nulls and values that are not numbers become NaN."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return np.full(len(array), np.nan)
    return array.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- single values


def single_columns(snapshot: Snapshot, tasks: Mapping[int, str]) -> list[str]:
    """Return the columns with a single number or text per row, except columns that define episodes; add "task"."""
    types = columns_of(snapshot)
    fields = snapshot.config.fields
    ours = {fields[name].column for name in _COUNTED if name in fields} | {"episode", "start", "length", "return"}
    found = [name for name, data_type in types.items() if name not in ours and _is_single(data_type)]
    if tasks and _TASK not in types and any(name in types for name in _TASK_NUMBERS):
        found.insert(0, _TASK)
    return found


def _is_single(data_type: pa.DataType) -> bool:
    while isinstance(data_type, pa.BaseExtensionType):
        data_type = data_type.storage_type
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(test(data_type) for test in tests)


class Singles:
    """Reads and caches values of columns that have a single value per row.

    Args:
        tasks: The texts of tasks, by number.
    """

    def __init__(self, tasks: Mapping[int, str]) -> None:
        self._tasks = tasks
        self._known: dict[str, tuple[Int64s, npt.NDArray[Any]]] = {}

    def of_all(self, snapshot: Snapshot, name: str, rows: Int64s) -> npt.NDArray[Any]:
        """Return the values at ascending ``rows`` ``[n]``; values that an earlier call read are not read again."""
        before, values = self._known.get(name, (np.zeros(0, np.int64), None))
        same = min(len(before), len(rows))
        kept = same if np.array_equal(before[:same], rows[:same]) else max(same - 1, 0)
        if kept and not np.array_equal(before[:kept], rows[:kept]):
            kept = 0
        more = self.of_some(snapshot, name, rows[kept:])
        if values is not None and kept:
            kinds = {values.dtype, more.dtype}
            more = np.concatenate([values[:kept], more], dtype=object if len(kinds) > 1 else None)
        self._known[name] = (rows, more)
        return more

    def of_some(self, snapshot: Snapshot, name: str, rows: Int64s) -> npt.NDArray[Any]:
        """Return the values at ``rows``, which may have any order: float64, or an array of texts and None."""
        types = columns_of(snapshot)
        if name == _TASK and name not in types:
            number = next(one for one in _TASK_NUMBERS if one in types)
            numbers = self.of_some(snapshot, number, rows)
            texts = [self._tasks.get(int(one)) if one == one else None for one in numbers.tolist()]
            return np.array(texts, object)
        order = np.argsort(rows, kind="stable")
        parts = [_at(segment, name, inside) for segment, inside in _by_segment(snapshot, rows[order])]
        is_text = any(part.dtype == object for part in parts)
        found = np.empty(len(rows), object if is_text else np.float64)
        if parts:
            found[order] = np.concatenate([_texts(part) if is_text else part for part in parts])
        return found


def _texts(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype == object:
        return values
    return np.array([None if value != value else str(value) for value in values.tolist()], object)


def _by_segment(snapshot: Snapshot, rows: Int64s) -> Iterator[tuple[Any, Int64s]]:
    """Yield, for ascending row numbers, a segment and the indices of some of the rows in the segment; neighbouring rows
    are yielded together.
    """
    begin = 0
    for segment in snapshot.segments:
        end = begin + segment.num_rows
        inside = rows[rows.searchsorted(begin) : rows.searchsorted(end)] - begin
        for at in range(0, segment.num_rows, _ROWS) if len(inside) else ():
            some = inside[inside.searchsorted(at) : inside.searchsorted(at + _ROWS)]
            if len(some):
                yield segment, some
        begin = end


def _at(segment: Any, name: str, rows: Int64s) -> npt.NDArray[Any]:
    column = segment.column(name)
    if column is None:
        return np.full(len(rows), np.nan)
    if segment.has_indices:
        rows = segment.row_numbers(rows)
    low, high = int(rows.min()), int(rows.max()) + 1
    near = column.slice(low, high - low)
    array = pa.concat_arrays([plain(chunk) for chunk in near.chunks]) if near.num_chunks > 1 else plain(near.chunk(0))
    array = array.take(pa.array(rows - low))
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return np.array(array.to_pylist(), object)
    return _scalars(array)
