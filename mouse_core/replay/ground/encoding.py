"""Values whose rows differ in length (text, bytes, ragged arrays): as bytes, and in batches as object arrays.

A batch holds them as an object array while it is transformed, which is indexed and cut like any other array. On its way
out it becomes lists; ``Pad`` makes arrays of one shape and a mask of ragged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError, SchemaError
from mouse_core.nested import as_array, fit, is_varying, map_tree
from mouse_core.nested import object_array as object_array

Bytes = npt.NDArray[np.uint8]

TEXT, BYTES, RAGGED = "text", "bytes", "ragged"


# ---------------------------------------------------------------------- which fields they are


def kind_of(leaf: Any, lead: int) -> str:
    """What the first values of a field say that it is; "" for numbers in arrays of one shape.

    Args:
        leaf: The field's values of some rows.
        lead: How many axes count rows.
    """
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSU":
        return ""
    values, shape = apart(leaf, lead)
    if len(shape) < lead or not values:
        return ""
    for kind, accepted in ((TEXT, str), (BYTES, bytes)):
        if all(isinstance(value, accepted) for value in values):
            return kind
    return RAGGED if _is_ragged(values) else ""


def _is_ragged(values: Sequence[Any]) -> bool:
    """Whether values are arrays that differ along their first axis, and in nothing else."""
    try:
        shapes = {np.shape(value) for value in values}
    except ValueError:
        return False
    return len(shapes) > 1 and () not in shapes and len({shape[1:] for shape in shapes}) == 1


def apart(leaf: Any, lead: int) -> tuple[list[Any], tuple[int, ...]]:
    """The values of a field row by row, and the shape of its first axes; fewer than ``lead`` where there are fewer."""
    shape: tuple[int, ...] = ()
    values = [leaf]
    for _ in range(lead):
        if not all(isinstance(value, list | tuple) or np.ndim(value) for value in values):
            break
        lengths = {len(value) for value in values}
        if len(lengths) > 1:
            raise DataError(f"rows: expected as many in every time step, found {sorted(lengths)}")
        shape = (*shape, lengths.pop() if lengths else 0)
        values = [item for value in values for item in value]
    return values, shape


# ---------------------------------------------------------------------- to bytes and back


def encoded(value: Any, kind: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, where: str) -> Bytes:
    """A row's value as bytes.

    Raises:
        SchemaError: It is of another kind, dtype or shape.
        DataError: Python numbers that the dtype does not hold.
    """
    if kind == TEXT:
        if not isinstance(value, str):
            raise SchemaError(f"{where}: expected text as in the first write, found {value!r:.60}")
        # A lone surrogate is no text elsewhere, but it is in Python.
        return np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
    if kind == BYTES:
        if not isinstance(value, bytes):
            raise SchemaError(f"{where}: expected bytes as in the first write, found {value!r:.60}")
        return np.frombuffer(value, np.uint8)
    array = fit(value, dtype, where=where)
    if array.ndim != 1 + len(shape) or array.shape[1:] != shape:
        axes = ", ".join(["length", *map(str, shape)])
        raise SchemaError(
            f"{where}: expected the shape [{axes}] of the first write, found {list(array.shape)}; ListStorage takes any"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def decoded(raw: Bytes, kind: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """What ``encoded`` was called on; an array lies in the memory of ``raw``. DataError: bytes that nobody encoded."""
    try:
        if kind == TEXT:
            return raw.tobytes().decode("utf-8", "surrogatepass")
        return raw.tobytes() if kind == BYTES else raw.view(dtype).reshape(-1, *shape)
    except ValueError as error:
        raise DataError(f"rows: expected the bytes of {kind}, found damaged ones: {error}") from error


# ---------------------------------------------------------------------- object arrays


def as_text(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An object array of text as an array of text, which can be compared at once; any other array as it is."""
    if is_varying(values) and all(isinstance(value, str) for value in values.reshape(-1)):
        return values.astype(str)
    return values


def as_lists(batch: Any) -> Any:
    """A batch with its object arrays as lists."""
    # Of most batches every field is a plain array; asking whether one is a Mapping takes longer than all the rest.
    if type(batch) is dict:
        for leaf in batch.values():
            if type(leaf) is not np.ndarray or leaf.dtype.hasobject:
                break
        else:
            return batch
    return map_tree(lambda leaf: leaf.tolist() if is_varying(leaf) else leaf, batch)


def padding_of(value: Any) -> Any:
    """An empty value of the kind of ``value``: what stands where a batch is padded."""
    return value[:0] if isinstance(value, str | bytes | np.ndarray) or hasattr(value, "shape") else None


def first_array(values: Sequence[Any], *, where: str) -> npt.NDArray[Any]:
    """The first of the rows' arrays with something in it, which says the dtype and the shape of an item."""
    if not values:
        raise SchemaError(f"{where}: expected at least one row, found none")
    array = as_array(next((value for value in values if np.size(value)), values[0]), where=where)
    if not array.ndim:
        raise SchemaError(f"{where}: expected rows of arrays [length, ...], found {values[0]!r:.60}")
    return array
