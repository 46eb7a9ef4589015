"""Functions that convert nested rows and batches between pytrees of jax.Array and trees of NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from mouse_core.dtypes import RowError, convert, is_number, refuse_hidden
from mouse_core.errors import DataError, SchemaError
from mouse_core.nested import FieldKey, flatten, is_node, is_varying, map_tree, rebuilt
from mouse_jax.dtypes import is_key, replaced_dtypes


def as_arrays(rows: Any) -> Any:
    """Convert JAX arrays in rows to NumPy arrays on the host, and dataclasses to dicts.

    Raises:
        SchemaError: Rows contain random keys, which NumPy cannot represent.
    """
    if isinstance(rows, jax.Array):
        if is_key(rows.dtype):
            raise SchemaError(
                f"rows: expected numbers, found random keys {rows.dtype}; a buffer on the host can store "
                "jax.random.key_data(keys), which are numbers; jax.random.wrap_key_data converts the numbers to keys"
            )
        return np.asarray(rows)
    if isinstance(rows, Mapping):
        return {name: as_arrays(child) for name, child in rows.items()}
    if is_dataclass(rows) and not isinstance(rows, type):
        return {field.name: as_arrays(getattr(rows, field.name)) for field in fields(rows)}
    if isinstance(rows, tuple):
        return rebuilt(rows, [as_arrays(child) for child in rows])
    if isinstance(rows, list) and rows and not isinstance(rows[0], bool | int | float):
        return [as_arrays(row) for row in rows]
    return rows


def as_jax(batch: Any, target: jax.Device | Sharding | None) -> Any:
    """Convert numeric arrays in a batch, or in rows, to JAX arrays on a device; other values are returned unchanged.

    Without x64, 64-bit numbers are converted to 32 bits. A field whose rows have different lengths becomes a list; the
    items are JAX arrays if the rows are numeric.

    Args:
        batch: Arrays. Their memory must never be modified later, because on a host, JAX arrays may share this memory.
        target: A device or a sharding; None: JAX's default device.

    Raises:
        DataError: A 64-bit number cannot be represented in 32 bits; the message names the field.
    """
    if is_tree(batch) and any(map(is_varying, flatten(batch).values())):
        return map_tree(lambda leaf: _lists(leaf, target) if is_varying(leaf) else as_jax(leaf, target), batch)
    found: dict[FieldKey, Any] = flatten(batch) if is_tree(batch) else {(): batch}
    replaced = replaced_dtypes()
    numbers = {
        key: _narrowed(np.asarray(values), replaced, key)
        for key, values in found.items()
        if isinstance(values, np.ndarray | np.generic) and is_number(values.dtype)
    }
    placed = jax.device_put(list(numbers.values()), target, may_alias=True)
    leaves: dict[FieldKey, Any] = {**found, **dict(zip(numbers, placed, strict=True))}
    if not is_tree(batch):
        return leaves[()]
    values = iter(leaves.values())
    return map_tree(lambda _: next(values), batch)


def is_tree(batch: Any) -> bool:
    """Whether a batch is a tree with nodes, not a single array or object."""
    return batch is not None and is_node(batch) and len(batch) > 0


def narrowed(batch: Any) -> Any:
    """Return the values that ``as_jax`` returns for a batch, but as NumPy arrays on the host, for a digest.

    Raises:
        DataError: A 64-bit number cannot be represented in 32 bits; the message names the field.
    """
    replaced = replaced_dtypes()
    if not replaced:
        return batch
    found: dict[FieldKey, Any] = flatten(batch) if is_tree(batch) else {(): batch}
    values = iter([_narrowed_leaf(leaf, replaced, key) for key, leaf in found.items()])
    return map_tree(lambda _: next(values), batch)


def _narrowed_leaf(leaf: Any, replaced: Mapping[np.dtype[Any], np.dtype[Any]], key: FieldKey) -> Any:
    if is_varying(leaf):
        return [_narrowed_leaf(value, replaced, key) for value in leaf]
    if isinstance(leaf, np.ndarray | np.generic) and is_number(leaf.dtype):
        try:
            refuse_hidden(leaf)
        except RowError as error:
            raise DataError(f"field {key!r}, {error}") from error
        return _narrowed(np.asarray(leaf), replaced, key)
    return leaf


def _lists(values: npt.NDArray[Any], target: jax.Device | Sharding | None) -> list[Any]:
    """Convert the values of rows one by one. A sharding is not used, because a sharding applies only to complete
    batches.
    """
    where = None if isinstance(target, Sharding) else target
    return [_lists(value, where) if is_varying(value) else as_jax(value, where) for value in values]


def _narrowed(
    values: npt.NDArray[Any], narrowed: Mapping[np.dtype[Any], np.dtype[Any]], key: FieldKey
) -> npt.NDArray[Any]:
    dtype = narrowed.get(values.dtype)
    if dtype is None:
        return values
    try:
        return convert(np.atleast_1d(values), dtype).reshape(values.shape)
    except ValueError as error:
        raise DataError(f"field {key!r}: {error}; JAX supports this dtype only if jax_enable_x64 is True") from error
