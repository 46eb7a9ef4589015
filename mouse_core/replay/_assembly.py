"""Making a batch of gathered rows and what a sampler says about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError, MissingFieldError, SchemaError
from mouse_core.replay._sampled import Collate
from mouse_core.replay._trees import as_array, find, flatten, map_tree, path_of, stack
from mouse_core.replay.protocols import Draw, FieldKey, Slots

_STACKED = (Mapping, tuple, np.ndarray, np.generic, bool, int, float)


def assemble(rows: Any, draw: Draw, collate: Collate | None) -> dict[str, Any]:
    """A batch of ``rows`` as a storage gave them, with ``index`` and whatever else the draw says.

    Rows that are no dict become the field ``data``.

    Raises:
        SchemaError: A field of the rows has a name that the draw needs; items of a list that cannot be stacked.
    """
    if collate is not None:
        rows = collate(items_of(rows, draw.index.shape[0]))
    elif isinstance(rows, list):
        rows = _stacked(rows)
    else:  # dicts of its own for every batch: transforms may change them
        rows = dict(rows) if type(rows) is dict and not any(map(_is_branch, rows.values())) else map_tree(_same, rows)
    if draw.pad is not None and draw.mask is not None and collate is None and not isinstance(rows, list):
        _pad(rows, ~draw.mask, draw.pad)
    batch = dict(rows) if isinstance(rows, Mapping) else {"data": rows}
    added: dict[str, Any] = {"index": draw.index}
    if draw.mask is not None:
        added["mask"] = draw.mask
    if draw.priority_weight is not None:
        added["priority_weight"] = draw.priority_weight
    added |= draw.extra
    taken = batch.keys() & added.keys()
    if taken:
        raise SchemaError(
            f"sample: expected rows without the fields {sorted(taken)}, which the buffer adds to a batch; rename them"
        )
    return batch | added


def _pad(rows: Any, where: npt.NDArray[np.bool_], pad: float) -> None:
    """Overwrite what is not meant, in all fields."""
    if not where.any():
        return
    for key, leaf in flatten(rows).items():
        value: Any = pad
        if isinstance(leaf, np.ndarray):
            with np.errstate(invalid="ignore"):
                value = np.asarray(pad).astype(leaf.dtype)
            if leaf.dtype.kind in "biufc" and value != pad and (pad == pad or value == value):
                raise DataError(f"sample: field {key!r}: expected a pad that {leaf.dtype} holds, found {pad}")
        leaf[where] = value


def items_of(rows: Any, n: int) -> list[Any]:
    """Gathered rows one by one."""
    return rows if isinstance(rows, list) else [row_of(rows, number) for number in range(n)]


def row_of(rows: Any, number: int) -> Any:
    """One of gathered rows."""
    return rows[number] if isinstance(rows, list) else map_tree(lambda leaf: leaf[number], rows)


def _same(leaf: Any) -> Any:
    return leaf


def _is_branch(value: Any) -> bool:
    return type(value) is dict or isinstance(value, tuple)


def priorities_in(rows: Any, key: FieldKey, *, one: bool) -> npt.NDArray[np.float64] | None:
    """The priorities that rows to be written bring along in the field ``key``, ``[n]``; None if they have none.

    Raises:
        DataError: One of them is negative, NaN or infinite.
    """
    if isinstance(rows, list) and not one:
        found = [priorities_in(row, key, one=True) for row in rows]
        known = [part for part in found if part is not None]
        return np.concatenate(known) if known and len(known) == len(found) else None
    if not isinstance(rows, Mapping) or path_of(key)[0] not in rows:
        return None
    try:
        values = np.asarray(find(rows, key), np.float64).reshape(-1)
    except (MissingFieldError, TypeError, ValueError):
        return None
    if not (np.isfinite(values) & (values >= 0)).all():
        raise DataError(f"rows: field {key!r}: expected finite priorities from 0, found {values[:8].tolist()}")
    return values


def _stacked(items: list[Any]) -> Any:
    """Items as one tree of arrays, or, where they are objects of other kinds, as they are."""
    if items and isinstance(items[0], list):  # slices
        parts = [_stacked(item) for item in items]
        return parts if isinstance(parts[0], list) else _stacked(parts)
    if not all(isinstance(item, _STACKED) for item in items):
        return items
    return map_tree(lambda leaf: as_array(leaf, where="sample"), stack(items))


def slots_of(index: Any, size: int) -> Slots:
    """The slots that ``buffer[index]`` means: a single one ``[]`` for an integer, else ``[n]`` or ``[a, b]``.

    Args:
        index: An integer from ``-size``, a slice, integers, or a mask ``[size]``.
        size: Rows there are.

    Raises:
        IndexError: Out of range, or nothing that can be an index.
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(size), dtype=np.int64)
    found = np.asarray(index)
    if found.dtype == np.bool_:
        if found.shape != (size,):
            raise IndexError(f"index: expected a mask [{size}], as many as rows, found {list(found.shape)}")
        return np.flatnonzero(found)
    if found.dtype.kind not in "iu" and found.size:
        raise IndexError(f"index: expected integers, a slice or a mask, found {index!r:.80}")
    slots = found.astype(np.int64)
    outside = (slots < -size) | (slots >= size)
    if outside.any():
        raise IndexError(f"index: expected {-size}..{size - 1}, found {int(slots[outside].reshape(-1)[0])}")
    return np.where(slots < 0, slots + size, slots)
