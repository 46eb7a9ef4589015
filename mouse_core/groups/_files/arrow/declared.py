"""Columns that were declared as Arrow arrays, and back.

The values of a token, turn or example lie flat, so that every tool reads them: those of a token column are one list a
turn, or an example, and others a number or a list each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.groups.types.columns import Columns, RolloutColumn


def stored(declared: Columns, *pers: str) -> list[RolloutColumn]:
    """Those that lie with the rollouts, in the order in which they were declared; late ones do not."""
    return [column for column in declared.values() if column.per in pers and not column.late]


def is_flat(column: RolloutColumn, *, of_example: bool = False) -> bool:
    """Whether a row has one number and no list."""
    return not column.shape and (column.per == "example" or (column.per == "turn" and not of_example))


def declared_field(column: RolloutColumn, *, of_example: bool = False) -> pa.Field:
    """How values lie: in a turn or a rollout, or, ``of_example``, in an example, which has many turns."""
    value = pa.from_numpy_dtype(np.dtype(column.dtype))
    flat = is_flat(column, of_example=of_example)
    kind = value if flat else pa.list_(pa.field("element", value, nullable=False))
    return pa.field(column.name, kind, nullable=not of_example)


def declared_array(
    column: RolloutColumn, values: Sequence[npt.NDArray[Any] | None], *, of_example: bool = False
) -> pa.Array:
    """The values of some rows, None where a row has none."""
    kind = declared_field(column, of_example=of_example).type
    missing = np.fromiter((value is None for value in values), np.bool_, len(values))
    if is_flat(column, of_example=of_example):
        flat = np.array([0 if value is None else value for value in values], column.dtype)
        return pa.array(flat, kind, mask=missing if missing.any() else None)
    there = [value.reshape(-1) for value in values if value is not None]
    inner = pa.array(np.concatenate(there) if there else np.zeros(0, column.dtype), kind.value_type)
    ends = np.cumsum([0, *(0 if value is None else value.size for value in values)])
    if ends[-1] > np.iinfo(np.int32).max:
        raise DataError(f"column {column.name!r}: expected fewer than 2**31 values at once, found {ends[-1]}")
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), inner, type=kind, mask=mask)


def declared_values(
    column: RolloutColumn, rows: pa.Array, *, of_example: bool = False
) -> list[npt.NDArray[Any] | None]:
    """The values of each row, None where it has none; they share memory with the array where that can be.

    Raises:
        DataError: They are not of the column's shape.
    """
    has = rows.is_valid().to_numpy(zero_copy_only=False)
    if is_flat(column, of_example=of_example):
        filled = rows.fill_null(pa.scalar(0, pa.int8()).cast(rows.type)) if rows.null_count else rows
        flat = filled.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
        flat.flags.writeable = False
        return [flat[row, ...] if there else None for row, there in enumerate(has.tolist())]
    offsets = rows.offsets.to_numpy()
    begin, end = int(offsets[0]), int(offsets[-1])
    values = rows.values.slice(begin, end - begin).to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    values.flags.writeable = False
    one = column.per == "example" or (column.per == "turn" and not of_example)
    shape, size = column.shape if one else (-1, *column.shape), prod(column.shape)
    found: list[npt.NDArray[Any] | None] = []
    for row, (a, b) in enumerate(pairwise((offsets - begin).tolist())):
        if has[row] and ((b - a) != size if one else (b - a) % size):
            raise DataError(f"column {column.name!r}: expected values of shape {list(column.shape)}, found {b - a}")
        found.append(values[a:b].reshape(shape) if has[row] else None)
    return found


def dicts_of(
    columns: Iterable[tuple[RolloutColumn, pa.Array]], count: int, *, of_example: bool = False
) -> list[dict[str, npt.NDArray[Any]]]:
    """What each of some rows has of columns, by name."""
    rows: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(count)]
    for column, array in columns:
        for row, value in zip(rows, declared_values(column, array, of_example=of_example), strict=True):
            if value is not None:
                row[column.name] = value
    return rows
