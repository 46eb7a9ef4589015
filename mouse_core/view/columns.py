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
from mouse_core.store.fields import stored_types
from mouse_core.store.snapshot import Snapshot

Floats = npt.NDArray[np.float64]


def kind_of(kind: ColumnType) -> str:
    """Return how a column is displayed: as "numbers", "image" or "text"."""
    if kind.kind in ("image", "video") or (kind.kind == "list" and kind.depth in (2, 3) and kind.value_type == "uint8"):
        return "image"
    return "numbers" if kind.kind in ("scalar", "list") else "text"


def described(snapshot: Snapshot, dimensions: Mapping[str, Sequence[str]] | None = None) -> list[dict[str, Any]]:
    """Return the name, type, kind, width and dimension names of every column; columns of standard fields come first.

    Args:
        snapshot: The rows.
        dimensions: Names of dimensions, by column. The names of a column are ignored if there are more or fewer names
            than dimensions.
    """
    types = stored_types(snapshot.segments)
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
    """Whether a column has placeholder values, which have no meaning, in rows without a recorded observation."""
    own = name.removeprefix("metadata_").removeprefix("info.")
    beside = own != name and not travels_with_action(own)
    return MISSING in stored_types(snapshot.segments) and name != MISSING and (beside or name.startswith("observation"))


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
