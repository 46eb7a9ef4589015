"""Rows as trees: checking and counting rows before a write, and assembling a batch from drawn rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import RowError, is_number, namespace, number_kind, to_numpy
from mouse_core.episodes import EpisodeIndex
from mouse_core.errors import DataError, MissingFieldError, RowIndexError, SchemaError
from mouse_core.nested import (
    as_array,
    children_of,
    find,
    flatten,
    is_node,
    is_varying,
    map_tree,
    path_of,
    stack,
    structure_of,
    unflatten,
)
from mouse_core.replay.protocols import Draw, FieldKey, Slots, Storage
from mouse_core.replay.transforms.fields import GATHERED

Collate = Callable[[Sequence[Any]], Any]
"""A function that converts a list of rows to a batch; for an ensemble, a list of the members' batches."""

_TRAJECTORY_ID = "traj_id"
"""The name of the field of trajectory numbers. If both a draw and the stored rows have this field, the batch gets the
stored field.
"""

REDUCTIONS = ("max", "mean", "min", "median", "sum")
"""Names of the functions that reduce several priorities (or ranks) of a row to one."""

_STACKABLE = (Mapping, tuple, np.ndarray, np.generic, bool, int, float)


def assemble(rows: Any, draw: Draw, collate: Collate | None) -> dict[str, Any]:
    """Return a batch: the fields of ``rows``, which the storage returned, and ``index`` and the other fields of the
    draw.

    If the rows are not a dict, they become the field ``data``.

    Raises:
        SchemaError: A field of the rows has the name of a field of the draw, or the items of a list of rows cannot be
            stacked.
    """
    if collate is not None:
        rows = collate(rows if isinstance(rows, list) else [row_of(rows, at) for at in range(draw.index.shape[0])])
    elif isinstance(rows, list):
        rows = _stack_items(rows)
    else:
        rows = map_tree(lambda leaf: leaf, rows)  # new dicts for every batch, as transforms may change them
    if draw.pad is not None and draw.mask is not None and collate is None and not isinstance(rows, list):
        _fill_masked(rows, ~draw.mask, draw.pad)
    batch = dict(rows) if isinstance(rows, Mapping) else {"data": rows}
    added: dict[str, Any] = {"index": draw.index}
    if draw.mask is not None:
        added["mask"] = draw.mask
    if draw.priority_weight is not None:
        added["priority_weight"] = draw.priority_weight
    added |= draw.extra
    if _TRAJECTORY_ID in batch:  # the trajectory numbers of the rows replace those of the draw
        added.pop(_TRAJECTORY_ID, None)
    if not batch.keys().isdisjoint(added):
        raise reserved_error("sample", batch.keys() & added.keys())
    batch |= added
    return batch


def rows_behind(
    index: Slots, storage: Storage, steps: int, episodes: Sequence[EpisodeIndex] = ()
) -> tuple[Slots, npt.NDArray[np.bool_]]:
    """Return the slots of drawn rows, and the slots of the ``steps`` rows that follow each drawn row in its stream.

    In a ring, the slot after the newest row holds the oldest row, which is not a following row. Example: after 11 rows
    were written to a ring of 8 slots, the newest row, row 10, lies in slot 2, and row 9 in slot 1. For the drawn slot 1
    and ``steps`` 2, the result is the slots 1, 2, 2 with the mask True, True, False.

    Args:
        index: The drawn slots, int64 ``[batch]``.
        storage: The storage of the rows.
        steps: The number of following rows for each drawn row.
        episodes: Episode indexes; a following row is valid only if, in every index, the following row and the drawn row
            lie in the same episode.

    Returns:
        Slots, int64 ``[batch, 1 + steps]``, and a mask of the valid slots, bool of the same shape. For a following row
        that does not exist, the slot of the newest row is returned.
    """
    written, capacity, stride = storage.written, storage.capacity, storage.num_envs
    # Row n lies in slot n % capacity, and the newest is row written - 1.
    age = (written - 1 - index) % capacity
    offset = np.minimum(np.arange(steps + 1) * stride, age[:, None] // stride * stride)
    known = np.arange(steps + 1) * stride <= age[:, None]
    for episode_index in episodes:
        step, env = episode_index.steps_of(index)
        _, end, _ = episode_index.episode_of(step, env)
        known &= np.arange(steps + 1) < (end - step)[:, None]
    return (index[:, None] + offset) % capacity, known


def names_added(sampler: Any, gathers: bool, reach: int, generations: bool) -> frozenset[str]:
    """Return the names of the fields that the buffer adds to batches and that rows therefore cannot have."""
    names = {"index", *getattr(sampler, "adds", ()), *(GATHERED if gathers else ()), *(["generation"] * generations)}
    if reach and not sampler.needs_order:
        names.add("mask")  # marks which of the rows that follow a single row count
    return frozenset(names)


def check_names(rows: Any, reserved: frozenset[str], *, one: bool) -> None:
    """Raise SchemaError if rows that will be written have fields that the buffer adds to every batch.

    Args:
        rows: The rows; see ``Storage.append``.
        reserved: The names of the added fields.
        one: Whether ``rows`` is a single row, or for ``ndim=2`` a single time step.
    """
    for row in rows if isinstance(rows, list) and not one else (rows,):
        if isinstance(row, Mapping) and not reserved.isdisjoint(row):
            raise reserved_error("rows", reserved & row.keys())


def reserved_error(where: str, taken: Collection[str]) -> SchemaError:
    """Return the SchemaError for rows that have fields that the buffer adds."""
    return SchemaError(
        f"{where}: expected rows without the fields {sorted(taken)}, which the buffer adds to a batch; rename them"
    )


def _fill_masked(rows: Any, where: npt.NDArray[np.bool_], pad: float) -> None:
    """Overwrite all fields with ``pad`` where the mask ``where`` is True; fields of texts or of arrays that vary in
    shape get empty values.
    """
    if not where.any():
        return
    for key, leaf in flatten(rows).items():
        value: Any = pad
        if is_varying(leaf):
            first = leaf.reshape(-1)[0]
            empty = first[:0] if isinstance(first, str | bytes) or hasattr(first, "shape") else None
            for place in np.argwhere(where).tolist():
                leaf[tuple(place)] = empty
            continue
        if isinstance(leaf, np.ndarray):
            with np.errstate(invalid="ignore"):
                value = np.asarray(pad).astype(leaf.dtype)
            if is_number(leaf.dtype) and value != pad and (pad == pad or value == value):
                raise DataError(f"sample: field {key!r}: expected a pad that {leaf.dtype} can represent, found {pad}")
        leaf[where] = value


def row_of(rows: Any, number: int) -> Any:
    """Return row ``number`` of gathered rows."""
    return rows[number] if isinstance(rows, list) else map_tree(lambda leaf: leaf[number], rows)


def count_steps(rows: Any) -> int:
    """Return the number of rows (with ``ndim=2``: of time steps) in ``rows``, or an upper limit of this number.

    A list inside ``rows`` can be a field with one value for each row, or a node of several fields. Both cases are
    counted, and the larger count is returned.
    """
    if isinstance(rows, list):
        return len(rows)
    count = 0
    while is_node(rows):
        children = children_of(rows)
        if not children:
            return count
        if isinstance(rows, list):  # rows of differing length, or a node of several fields
            count = max(count, len(children))
        rows = children[0][1]
    try:
        return max(count, len(rows))
    except TypeError:
        return count


def priorities_in(
    rows: Any, key: FieldKey, *, one: bool, ndim: int = 1, reduction: str | None = None
) -> npt.NDArray[np.float64] | None:
    """Return the priorities ``[n]`` in the field ``key`` of rows that will be written; None if no row has the field.

    Args:
        rows: The rows; see ``Storage.append``.
        key: The field of priorities.
        one: Whether ``rows`` is a single row, or for ``ndim=2`` a single time step.
        ndim: The attribute ``ndim`` of the storage.
        reduction: The function, one of ``REDUCTIONS``, that reduces several priorities of a row to one; None: several
            priorities of a row raise SchemaError.

    Raises:
        DataError: A priority is negative, NaN, infinite or not a number, or only some rows have a priority.
        SchemaError: A row has several priorities.
    """
    if isinstance(rows, list) and not one:
        found = [priorities_in(row, key, one=True, ndim=ndim, reduction=reduction) for row in rows]
        return _join_priorities(found, key)
    values = _numeric_field(rows, key)
    if values is None:
        return None
    axes: tuple[str, ...] = ("time", "env") if ndim == 2 else ("n",)
    axes = axes[1:] if one else axes
    values = reduce_priorities(values, len(axes), reduction)
    if values.ndim < len(axes) or prod(values.shape[len(axes) :]) != 1:
        wanted = f"[{', '.join(axes)}]" if axes else "a number"
        raise SchemaError(
            f"rows: field {key!r}: expected one priority for each row, {wanted}, found the shape {list(values.shape)}; "
            'to reduce several priorities to one, pass priority_reduction="max", or pass another priority_key'
        )
    values = values.astype(np.float64).reshape(-1)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise DataError(f"rows: field {key!r}: expected finite priorities of 0 or more, found {values[:8].tolist()}")
    return values


def reduce_priorities(values: Any, axes: int, reduction: str | None) -> npt.NDArray[Any]:
    """Reduce several numbers per row to one number per row: ``[n, steps]`` becomes ``[n]``.

    Args:
        values: The numbers; the first ``axes`` axes are axes of rows, and all later axes are reduced.
        axes: The number of leading axes that are axes of rows.
        reduction: One of ``REDUCTIONS``; None: the numbers are unchanged.
    """
    numbers: npt.NDArray[Any] = as_array(values, where="priority")
    several = prod(numbers.shape[axes:])
    if reduction is None or numbers.ndim <= axes or several <= 1 or number_kind(numbers.dtype) not in "biuf":
        return numbers
    by_row = numbers.astype(np.float64).reshape(*numbers.shape[:axes], several)
    one_each: npt.NDArray[Any] = getattr(np, reduction)(by_row, axis=-1)
    return one_each


def replace_fields(rows: Any, values: Mapping[FieldKey, Any], places: Slots, count: int) -> Any:
    """Return rows with some fields replaced.

    Args:
        rows: The rows, as the storage returned them.
        values: The new values by field, ``[count, ...]`` each.
        places: For each row, the position of its new value in ``values``: row 0 gets the value at ``places[0]``.
        count: The number of values of each field.

    Raises:
        MissingFieldError: The rows lack a field of ``values``.
        DataError: A field does not have ``count`` values.
    """
    for key, leaf in values.items():
        if not hasattr(leaf, "__len__") or len(leaf) != count:
            found = len(leaf) if hasattr(leaf, "__len__") else repr(leaf)
            raise DataError(
                f"update_if_present: field {key!r}: expected {count} values, one for each index, found {found}"
            )
    if isinstance(rows, list):
        changes = ({key: leaf[place] for key, leaf in values.items()} for place in places.tolist())
        return [_with_fields(row, change) for row, change in zip(rows, changes, strict=True)]
    selected = {
        key: [leaf[place] for place in places.tolist()] if isinstance(leaf, list) else leaf[places]
        for key, leaf in values.items()
    }
    return _with_fields(rows, selected)


def _with_fields(rows: Any, changes: Mapping[FieldKey, Any]) -> Any:
    """Return a copy of a tree in which the leaves named in ``changes`` have the values from ``changes``."""
    fields = flatten(rows)
    for key in changes:
        if key not in fields:
            raise MissingFieldError(f"update_if_present: expected one of {list(fields)}, found the field {key!r}")
    return unflatten(structure_of(rows), {**fields, **changes})


def _join_priorities(found: list[npt.NDArray[np.float64] | None], key: FieldKey) -> npt.NDArray[np.float64] | None:
    """Join the priorities of single rows. Return None if no row has a priority; raise DataError if only some rows have
    a priority.
    """
    present = [priority for priority in found if priority is not None]
    if present and len(present) < len(found):
        lacking = next(number for number, priority in enumerate(found) if priority is None)
        raise DataError(
            f"rows: field {key!r}: expected a priority either in all rows or in no "
            f"row, found no priority in row {lacking}"
        )
    return np.concatenate(present) if present else None


def _numeric_field(rows: Any, key: FieldKey) -> npt.NDArray[Any] | None:
    """Return a field of a tree as a numeric array, or None if the tree lacks the field; raise DataError if the values
    are not numeric.
    """
    if not is_node(rows) or path_of(key)[0] not in dict(children_of(rows)):
        return None
    try:
        values = to_numpy(find(rows, key))
        if number_kind(values.dtype) not in "biuf":
            raise ValueError(f"{values.dtype}")
    except MissingFieldError:
        return None
    except (TypeError, ValueError) as error:
        raise DataError(f"rows: field {key!r}: expected one priority for each row, found {error}") from error
    return values


def _stack_items(items: list[Any]) -> Any:
    """Stack a list of items to one tree of arrays; return the list unchanged if an item cannot be stacked, such as an
    object.
    """
    if items and isinstance(items[0], list):  # slices: lists of rows
        slices = [_stack_items(item) for item in items]
        return slices if isinstance(slices[0], list) else _stack_items(slices)
    if not all(isinstance(item, _STACKABLE) for item in items):
        return items
    return map_tree(lambda leaf: as_array(leaf, where="sample"), stack(items))


def named_time(rows: Any) -> tuple[int, int] | None:
    """Return the position of the batch axis "time" and the number of batch axes; None if ``rows`` do not name their
    batch axes.

    TensorDicts may name their axes. Example: TorchRL's collectors have the axes ``[env, time]``, so the result is (1,
    2).
    """
    if type(rows) is dict or type(rows) is np.ndarray:  # most rows are, and have no names
        return None
    names = getattr(rows, "names", None)
    if not isinstance(names, list | tuple) or not all(name is None or isinstance(name, str) for name in names):
        return None
    return (names.index("time"), len(names)) if "time" in names else None


def time_first(rows: Any, axis: int, axes: int) -> tuple[Any, tuple[int, ...]]:
    """Return rows in the shape ``[time, env, ...]``, and the lengths of the batch axes with the time axis first.

    Example: arrays ``[env, agent, time, ...]`` of lengths 2, 3, 5 (``axis`` is 2, ``axes`` is 3) become ``[5, 6,
    ...]``, and the returned lengths are (5, 2, 3).

    Args:
        rows: A tree of arrays or tensors.
        axis: The position of the time axis. The other batch axes are joined to one axis of environments.
        axes: The number of batch axes.
    """
    lengths: set[tuple[int, ...]] = set()

    def move_time_first(leaf: Any) -> Any:
        values = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        if values.ndim < axes:
            raise SchemaError(f"rows: expected {axes} batch axes in every field, found the shape {list(values.shape)}")
        order = (axis, *(place for place in range(values.ndim) if place != axis))
        turned = namespace(values).permute_dims(values, order)
        lengths.add(tuple(turned.shape[:axes]))
        return turned.reshape((turned.shape[0], prod(turned.shape[1:axes]), *turned.shape[axes:]))

    tree = map_tree(move_time_first, rows)
    if len(lengths) != 1:
        raise DataError(f"rows: expected the same batch axes in every field, found {sorted(lengths)}")
    return tree, lengths.pop()


def slots_of(index: Any, size: int) -> Slots:
    """Return the slots that ``buffer[index]`` reads, of shape ``[]`` for an integer, else ``[n]`` or ``[a, b]``.

    Args:
        index: An integer of at least 0, a slice, ``...`` for all rows, integers, or a mask ``[size]``.
        size: The number of rows.

    Raises:
        RowIndexError: The index is out of range or has an invalid type (also an IndexError). Negative integers are out
            of range: ``append`` and ``extend`` return -1 for a row that was not kept, and -1 must not read another row.
    """
    if index is Ellipsis:
        index = slice(None)
    if isinstance(index, slice):
        return np.arange(*index.indices(size), dtype=np.int64)
    try:
        found = to_numpy(index)
    except RowError as error:
        raise RowIndexError(f"index: {error}") from error
    except (ValueError, TypeError) as error:
        raise RowIndexError(f"index: expected integers, a slice or a mask, found {index!r:.80}") from error
    if found.dtype == np.bool_:
        if found.shape != (size,):
            raise RowIndexError(f"index: expected a mask [{size}], one value for each row, found {list(found.shape)}")
        return np.flatnonzero(found)
    if found.dtype.kind not in "iu" and found.size:
        hint = f"; buffer[:][{index!r:.40}] is the field of all rows" if isinstance(index, str) else ""
        raise RowIndexError(f"index: expected integers, a slice or a mask, found {index!r:.80}{hint}")
    slots = found.astype(np.int64)
    outside = (slots < 0) | (slots >= size)
    if outside.any():
        first = int(slots[outside].reshape(-1)[0])
        hint = (
            "; append and extend return -1 for a row that was not kept: leave it out, as "
            "in index[index >= 0]; the last slot is "
            "buffer[len(buffer) - 1]"
        )
        raise RowIndexError(
            f"index: expected {f'0..{size - 1}' if size else 'rows'}, found {first if size else 'an empty buffer'}"
            f"{hint if first < 0 else ''}"
        )
    return slots
