"""Rows as trees: counting and checking those that are written, and making a batch of those that a sampler drew."""

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
from mouse_core.replay.transforms._fields import GATHERED

Collate = Callable[[Sequence[Any]], Any]
"""Makes a batch of the list of rows, or an ensemble's batch of its members' batches."""

OWN = "traj_id"
"""The only field of a draw that rows may have themselves."""

REDUCTIONS = ("max", "mean", "min", "median", "sum")
"""Reductions of several priorities, or ranks, of a row to one."""

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
    else:
        rows = map_tree(lambda leaf: leaf, rows)  # new dicts for every batch, as transforms may change them
    if draw.pad is not None and draw.mask is not None and collate is None and not isinstance(rows, list):
        _pad(rows, ~draw.mask, draw.pad)
    batch = dict(rows) if isinstance(rows, Mapping) else {"data": rows}
    added: dict[str, Any] = {"index": draw.index}
    if draw.mask is not None:
        added["mask"] = draw.mask
    if draw.priority_weight is not None:
        added["priority_weight"] = draw.priority_weight
    added |= draw.extra
    if OWN in batch:  # the rows' own numbers of trajectories pass through
        added.pop(OWN, None)
    if not batch.keys().isdisjoint(added):
        raise reserved_error("sample", batch.keys() & added.keys())
    batch |= added
    return batch


def rows_behind(
    index: Slots, storage: Storage, steps: int, episodes: Sequence[EpisodeIndex] = ()
) -> tuple[Slots, npt.NDArray[np.bool_]]:
    """The slots of rows and of the ``steps`` rows behind each in its stream.

    Nothing is read across the write seam: behind the newest row of a stream there is nothing, however old the rows are
    that lie there. Of a ring of 8 slots with 11 rows written the newest, row 10, lies in slot 2, and slot 1 has row 9,
    of age 1: with 2 steps behind it are the slots 1, 2, and 2 again, which is not there.

    Args:
        index: Slots that were drawn, int64 ``[batch]``.
        storage: Its rows.
        steps: How many rows behind each.
        episodes: Indexes of the episodes; a row behind another counts only if each index has both in one episode.

    Returns:
        Slots, int64 ``[batch, 1 + steps]``, and which of them count, bool of the same shape. Beyond the newest row its
        slot is repeated.
    """
    written, capacity, stride = storage.written, storage.capacity, storage.num_envs
    # Row n lies in slot n % capacity, and the newest is row written - 1.
    age = (written - 1 - index) % capacity
    offset = np.minimum(np.arange(steps + 1) * stride, age[:, None] // stride * stride)
    known = np.arange(steps + 1) * stride <= age[:, None]
    for one in episodes:
        step, env = one.steps_of(index)
        _, end, _ = one.episode_of(step, env)
        known &= np.arange(steps + 1) < (end - step)[:, None]
    return (index[:, None] + offset) % capacity, known


def names_added(sampler: Any, gathers: bool, reach: int, generations: bool) -> frozenset[str]:
    """The fields of a batch that rows cannot have, as far as they are known before the first draw."""
    names = {"index", *getattr(sampler, "adds", ()), *(GATHERED if gathers else ()), *(["generation"] * generations)}
    if reach and not sampler.needs_order:
        names.add("mask")  # of the rows that are read behind single ones
    return frozenset(names)


def check_names(rows: Any, reserved: frozenset[str], *, one: bool) -> None:
    """Raise SchemaError where rows to be written have fields that the buffer adds to every batch.

    Args:
        rows: As for ``Storage.append``.
        reserved: The names of those fields.
        one: Whether ``rows`` is a single row, or for ``ndim=2`` a single time step.
    """
    for row in rows if isinstance(rows, list) and not one else (rows,):
        if isinstance(row, Mapping) and not reserved.isdisjoint(row):
            raise reserved_error("rows", reserved & row.keys())


def reserved_error(where: str, taken: Collection[str]) -> SchemaError:
    """The error for rows with fields that the buffer adds."""
    return SchemaError(
        f"{where}: expected rows without the fields {sorted(taken)}, which the buffer adds to a batch; rename them"
    )


def _pad(rows: Any, where: npt.NDArray[np.bool_], pad: float) -> None:
    """Overwrite what is not meant, in all fields."""
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
                raise DataError(f"sample: field {key!r}: expected a pad that {leaf.dtype} holds, found {pad}")
        leaf[where] = value


def items_of(rows: Any, n: int) -> list[Any]:
    """Gathered rows one by one."""
    return rows if isinstance(rows, list) else [row_of(rows, number) for number in range(n)]


def row_of(rows: Any, number: int) -> Any:
    """Return one of the gathered rows."""
    return rows[number] if isinstance(rows, list) else map_tree(lambda leaf: leaf[number], rows)


def count_steps(rows: Any) -> int:
    """The number of rows in ``rows``, of time steps for ``ndim=2``, or more where a list could be either."""
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
    """The priorities that rows to be written bring along in the field ``key``, ``[n]``; None if they have none.

    Args:
        rows: As for ``Storage.append``.
        key: The field.
        one: Whether ``rows`` is a single row, or for ``ndim=2`` a single time step.
        ndim: That of the storage.
        reduction: What makes one of several for a row; None: these are refused.

    Raises:
        DataError: One of them is negative, NaN or infinite, or no number; some rows have one, and others have not.
        SchemaError: More than one for a row.
    """
    if isinstance(rows, list) and not one:
        found = [priorities_in(row, key, one=True, ndim=ndim, reduction=reduction) for row in rows]
        return _priorities_of(found, key)
    values = _numbers_in(rows, key)
    if values is None:
        return None
    axes: tuple[str, ...] = ("time", "env") if ndim == 2 else ("n",)
    axes = axes[1:] if one else axes
    values = reduced(values, len(axes), reduction)
    if values.ndim < len(axes) or prod(values.shape[len(axes) :]) != 1:
        wanted = f"[{', '.join(axes)}]" if axes else "a number"
        raise SchemaError(
            f"rows: field {key!r}: expected one priority for each row, {wanted}, found the shape {list(values.shape)}; "
            'priority_reduction="max" takes their maximum, or name another priority_key'
        )
    values = values.astype(np.float64).reshape(-1)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise DataError(f"rows: field {key!r}: expected finite priorities from 0, found {values[:8].tolist()}")
    return values


def reduced(values: Any, axes: int, reduction: str | None) -> npt.NDArray[Any]:
    """Numbers with several for each row as one for each, as ``[n, steps]`` becomes ``[n]``.

    Args:
        values: They; the first ``axes`` axes count rows.
        axes: How many.
        reduction: One of ``REDUCTIONS``; None: they stay as they are.
    """
    numbers: npt.NDArray[Any] = as_array(values, where="priority")
    several = prod(numbers.shape[axes:])
    if reduction is None or numbers.ndim <= axes or several <= 1 or number_kind(numbers.dtype) not in "biuf":
        return numbers
    wide = numbers.astype(np.float64).reshape(*numbers.shape[:axes], several)
    made: npt.NDArray[Any] = getattr(np, reduction)(wide, axis=-1)
    return made


def patched(rows: Any, values: Mapping[FieldKey, Any], places: Slots, count: int) -> Any:
    """Rows with some of their fields changed.

    Args:
        rows: As a storage gave them.
        values: The fields, ``[count, ...]`` each.
        places: Which of the values are meant for the rows.
        count: How many values of a field are expected.

    Raises:
        MissingFieldError: A field that the rows do not have.
        DataError: Another number of values.
    """
    for key, leaf in values.items():
        if not hasattr(leaf, "__len__") or len(leaf) != count:
            found = len(leaf) if hasattr(leaf, "__len__") else repr(leaf)
            raise DataError(f"update_if_present: field {key!r}: expected {count} values, one an index, found {found}")
    if isinstance(rows, list):
        changes = ({key: leaf[place] for key, leaf in values.items()} for place in places.tolist())
        return [_with_fields(row, change) for row, change in zip(rows, changes, strict=True)]
    taken = {
        key: [leaf[place] for place in places.tolist()] if isinstance(leaf, list) else leaf[places]
        for key, leaf in values.items()
    }
    return _with_fields(rows, taken)


def _with_fields(rows: Any, changes: Mapping[FieldKey, Any]) -> Any:
    fields = flatten(rows)
    for key in changes:
        if key not in fields:
            raise MissingFieldError(f"update_if_present: expected one of {list(fields)}, found the field {key!r}")
    return unflatten(structure_of(rows), {**fields, **changes})


def _priorities_of(found: list[npt.NDArray[np.float64] | None], key: FieldKey) -> npt.NDArray[np.float64] | None:
    """The priorities of a list of rows, of which all have one, or none has."""
    known = [part for part in found if part is not None]
    if known and len(known) < len(found):
        lacking = next(number for number, part in enumerate(found) if part is None)
        raise DataError(f"rows: field {key!r}: expected a priority in every row or none, found none in {lacking}")
    return np.concatenate(known) if known else None


def _numbers_in(rows: Any, key: FieldKey) -> npt.NDArray[Any] | None:
    """A field of numbers of a tree; None where it is not there."""
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


def _stacked(items: list[Any]) -> Any:
    """Items as one tree of arrays, or, where they are objects of other kinds, as they are."""
    if items and isinstance(items[0], list):  # slices
        parts = [_stacked(item) for item in items]
        return parts if isinstance(parts[0], list) else _stacked(parts)
    if not all(isinstance(item, _STACKED) for item in items):
        return items
    return map_tree(lambda leaf: as_array(leaf, where="sample"), stack(items))


def named_time(rows: Any) -> tuple[int, int] | None:
    """Return the batch axis of ``rows`` called "time", and the number of batch axes, if rows name their axes.

    TensorDicts name them: TorchRL's collectors return ``[env, time]``.
    """
    if type(rows) is dict or type(rows) is np.ndarray:  # most rows are, and have no names
        return None
    names = getattr(rows, "names", None)
    if not isinstance(names, list | tuple) or not all(name is None or isinstance(name, str) for name in names):
        return None
    return (names.index("time"), len(names)) if "time" in names else None


def time_first(rows: Any, axis: int, axes: int) -> tuple[Any, tuple[int, ...]]:
    """Rows as ``[time, env, ...]``, and the lengths of their batch axes with time in front.

    Args:
        rows: A tree of arrays or tensors.
        axis: Which of their first ``axes`` axes is time; all the others are environments, of which there may be none.
        axes: How many batch axes there are.
    """
    lengths: set[tuple[int, ...]] = set()

    def moved(leaf: Any) -> Any:
        values = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        if values.ndim < axes:
            raise SchemaError(f"rows: expected {axes} batch axes in every field, found the shape {list(values.shape)}")
        order = (axis, *(place for place in range(values.ndim) if place != axis))
        turned = namespace(values).permute_dims(values, order)
        lengths.add(tuple(turned.shape[:axes]))
        return turned.reshape((turned.shape[0], prod(turned.shape[1:axes]), *turned.shape[axes:]))

    made = map_tree(moved, rows)
    if len(lengths) != 1:
        raise DataError(f"rows: expected the same batch axes in every field, found {sorted(lengths)}")
    return made, lengths.pop()


def slots_of(index: Any, size: int) -> Slots:
    """The slots that ``buffer[index]`` means: a single one ``[]`` for an integer, else ``[n]`` or ``[a, b]``.

    Args:
        index: An integer from 0, a slice, ``...`` for all rows, integers, or a mask ``[size]``.
        size: Rows there are.

    Raises:
        RowIndexError: Out of range, or nothing that can be an index (also an IndexError). Negative integers are
            refused: -1 is what ``append`` and ``extend`` give for a row that was not kept, and reads no other row.
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
            raise RowIndexError(f"index: expected a mask [{size}], as many as rows, found {list(found.shape)}")
        return np.flatnonzero(found)
    if found.dtype.kind not in "iu" and found.size:
        hint = f"; the field of all rows is buffer[:][{index!r:.40}]" if isinstance(index, str) else ""
        raise RowIndexError(f"index: expected integers, a slice or a mask, found {index!r:.80}{hint}")
    slots = found.astype(np.int64)
    outside = (slots < 0) | (slots >= size)
    if outside.any():
        first = int(slots[outside].reshape(-1)[0])
        hint = (
            "; -1 is given for a row that was not kept (leave it out, as in index[index >= 0]), and the last slot is "
            "buffer[len(buffer) - 1]"
        )
        raise RowIndexError(
            f"index: expected {f'0..{size - 1}' if size else 'rows'}, found {first if size else 'an empty buffer'}"
            f"{hint if first < 0 else ''}"
        )
    return slots
