"""Rows and batches as nested dicts and tuples: their fields by name, and back.

A tree is a dict of trees by name, a tuple (a named one, too) of trees, or a leaf: anything else. A leaf has the name of
its place: ``"reward"`` at the root, ``("next", "reward")`` where it is nested, ``(0,)`` in a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import RowError, check_exact, convert, is_ml_float, named_dtype, number_kind, to_numpy, widened
from mouse_core.errors import DataError, MissingFieldError, SchemaError

__all__ = [
    "FieldKey",
    "find",
    "flatten",
    "is_varying",
    "map_tree",
    "stack",
    "stack_leaves",
    "structure_of",
    "unflatten",
]

FieldKey = str | tuple[str | int, ...]
"""The name of a field of a row."""

_Path = tuple[str | int, ...]

# Of which kinds Python's own numbers may be for a field of each kind.
_HELD_BY = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "c": "iuf"}


def key_of(path: _Path) -> FieldKey:
    """A field's name from the steps that lead to it: a single name stands for itself."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def path_of(key: FieldKey) -> _Path:
    """The steps that lead to a field."""
    return (key,) if isinstance(key, str) else key


def flatten(tree: Any) -> dict[FieldKey, Any]:
    """The leaves of nested dicts and tuples by name; a leaf alone has the name ``()``.

    Raises:
        SchemaError: A dict with keys that are not strings, or nothing in it.
    """
    leaves: dict[FieldKey, Any] = {}
    _collect(tree, (), leaves)
    if not leaves:
        raise SchemaError(f"rows: expected at least one field, found {tree!r:.100}")
    return leaves


def _collect(tree: Any, path: _Path, leaves: dict[FieldKey, Any]) -> None:
    if type(tree) is np.ndarray:  # asking whether it is a Mapping takes longer than all the rest
        leaves[key_of(path)] = tree
    elif isinstance(tree, Mapping):
        for name, child in tree.items():
            if not isinstance(name, str):
                raise SchemaError(f"rows: expected names of fields as strings, found {name!r} in {path or 'the root'}")
            _collect(child, (*path, name), leaves)
    elif isinstance(tree, tuple):
        for number, child in enumerate(tree):
            _collect(child, (*path, number), leaves)
    else:
        leaves[key_of(path)] = tree


Structure = Any
"""A tree like the rows' whose leaves are the names of the fields, wrapped in lists so that names and nodes differ."""


def structure_of(tree: Any, path: _Path = ()) -> Structure:
    """How a tree is nested: dicts and tuples as they are, every leaf the list of the steps that lead to it."""
    if isinstance(tree, Mapping):
        return {name: structure_of(child, (*path, name)) for name, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple_like(tree, [structure_of(child, (*path, number)) for number, child in enumerate(tree)])
    return list(path)


def unflatten(structure: Structure, fields: Mapping[FieldKey, Any]) -> Any:
    """The tree of this structure whose leaves are ``fields``."""
    if isinstance(structure, dict):
        return {name: unflatten(child, fields) for name, child in structure.items()}
    if isinstance(structure, tuple):
        return tuple_like(structure, [unflatten(child, fields) for child in structure])
    return fields[key_of(tuple(structure))]


def structure_to_json(structure: Structure) -> Any:
    """A structure as JSON can hold it; named tuples become plain ones."""
    if isinstance(structure, dict):
        return {"dict": [[name, structure_to_json(child)] for name, child in structure.items()]}
    if isinstance(structure, tuple):
        return {"tuple": [structure_to_json(child) for child in structure]}
    return structure


def structure_from_json(value: Any) -> Structure:
    """A structure from what ``structure_to_json`` made of it."""
    if isinstance(value, list):
        return value
    if "dict" in value:
        return {name: structure_from_json(child) for name, child in value["dict"]}
    return tuple(structure_from_json(child) for child in value["tuple"])


def map_tree(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with every leaf changed; the containers are new."""
    if type(tree) is np.ndarray:
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: map_tree(change, child) for name, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple_like(tree, [map_tree(change, child) for child in tree])
    return change(tree)


def is_varying(leaf: Any) -> bool:
    """Whether a leaf of a batch holds values that differ in length from row to row: an array of objects."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O"


def find(tree: Any, key: FieldKey, *, where: str = "rows") -> Any:
    """The leaf or branch of a tree by its name; ``where`` says of what an error speaks.

    Raises:
        MissingFieldError: There is none.
    """
    found = tree
    for step in path_of(key):
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError) as error:
            raise MissingFieldError(f"{where}: expected a field {key!r}, found {_names(tree)}") from error
    return found


def stack(items: Sequence[Any], join: Callable[[FieldKey, list[Any]], Any] | None = None) -> Any:
    """One tree from a list of items: every leaf with the items along a new first axis.

    Args:
        items: At least one.
        join: Makes one leaf of the items' leaves of a field; by default ``stack_leaves``.

    Raises:
        SchemaError: The items are nested differently, or leaves differ in shape.
    """
    if not items:
        raise DataError("rows: expected at least one item in the list, found none")
    columns = flatten(items[0])
    parts: dict[FieldKey, list[Any]] = {key: [leaf] for key, leaf in columns.items()}
    for number, item in enumerate(items[1:], 1):
        leaves = flatten(item)
        if leaves.keys() != parts.keys():
            raise SchemaError(
                f"rows: expected the fields {list(parts)} as in the first item, found {list(leaves)} in item {number}"
            )
        for key, leaf in leaves.items():
            parts[key].append(leaf)
    join = join or stack_leaves
    return unflatten(structure_of(items[0]), {key: join(key, leaves) for key, leaves in parts.items()})


def stack_leaves(key: FieldKey, leaves: list[Any]) -> Any:
    """The leaves of a field of several rows as one array, or as a list where the storage knows what they become."""
    strong = next((leaf for leaf in leaves if not is_weak(leaf)), None)
    if strong is None:  # left as they are: whether numbers fit is for the storage to say, which knows the dtype
        _check_alike(key, leaves)
        return leaves
    if all(isinstance(leaf, str) for leaf in leaves) or all(isinstance(leaf, bytes) for leaf in leaves):
        return leaves
    first = as_array(strong, where=f"rows: field {key!r}")
    arrays = []
    for number, leaf in enumerate(leaves):
        array = fit(leaf, first.dtype, where=f"rows: field {key!r}, item {number}")
        if array.shape[1:] != first.shape[1:] or array.ndim != first.ndim:
            raise SchemaError(
                f"rows: field {key!r}: expected the shape {first.shape}, found {array.shape} in item {number}; "
                "ListStorage takes any"
            )
        arrays.append(array)
    if len({array.shape for array in arrays}) > 1:
        return arrays  # whether rows may differ in length is for the storage to say
    return np.stack(arrays)


def _check_alike(key: FieldKey, leaves: list[Any]) -> None:
    """Raise SchemaError if there are both booleans and numbers."""
    if len({np.asarray(leaf).dtype.kind == "b" for leaf in leaves if not isinstance(leaf, list)}) > 1:
        raise SchemaError(f"rows: field {key!r}: expected all numbers or all booleans, found both")


def is_weak(leaf: Any) -> bool:
    """Whether a leaf is made of Python's own numbers, which have no dtype and take that of their field."""
    return isinstance(leaf, bool | int | float | list) and not isinstance(leaf, np.generic)


def fit(leaf: Any, dtype: np.dtype[Any], *, where: str) -> npt.NDArray[Any]:
    """A leaf as an array of ``dtype``.

    Raises:
        SchemaError: It has another dtype, or none.
        DataError: Python numbers that the dtype does not hold.
    """
    array = as_array(leaf, where=where)
    if array.dtype == dtype:
        return array
    if array.dtype.newbyteorder("=") == dtype or (is_weak(leaf) and not array.size):
        return array.astype(dtype)
    if not is_weak(leaf) or array.dtype.kind not in _HELD_BY.get(number_kind(dtype), ""):
        raise SchemaError(f"{where}: expected the dtype {dtype} of the first write, found {array.dtype}")
    try:
        if number_kind(dtype) == "f" and array.dtype.kind in "iu":
            check_exact(array)
        with np.errstate(over="raise"):
            if is_ml_float(dtype):  # of which NumPy says nothing where a number becomes infinite
                return convert(np.atleast_1d(array), dtype).reshape(array.shape)
            return np.array(leaf, dtype)
    except (OverflowError, FloatingPointError, ValueError) as error:
        raise DataError(f"{where}: expected values that {dtype} holds, found {leaf!r:.60}") from error


def as_array(leaf: Any, *, where: str) -> npt.NDArray[Any]:
    """A leaf as an array of numbers, text or times.

    Raises:
        SchemaError: It is none.
    """
    if type(leaf) is np.ndarray:
        array = leaf
    else:
        try:
            small = _narrow_tensor(leaf) if hasattr(leaf, "dtype") else None
            array = to_numpy(leaf) if small is None else small
        except RowError as error:
            raise DataError(f"{where}: {error}") from error
        except (ValueError, TypeError, RuntimeError) as error:
            if hasattr(leaf, "dtype"):
                raise SchemaError(f"{where}: expected what NumPy takes, found {leaf.dtype}: {error}") from error
            raise SchemaError(
                f"{where}: expected an array of one shape, found {leaf!r:.80}; a field whose rows differ in length is "
                "declared, as in ragged=['tokens'], or kept in a ListStorage"
            ) from error
    if array.dtype.hasobject or number_kind(array.dtype) == "V":
        raise SchemaError(
            f"{where}: expected numbers or text, found {type(leaf).__name__} {leaf!r:.60}; ListStorage takes any"
        )
    return array


def _narrow_tensor(leaf: Any) -> npt.NDArray[Any] | None:
    """bfloat16 and 8-bit floats that are no NumPy array, by way of the float32 that they are; None for all others."""
    if isinstance(leaf.dtype, np.dtype) or widened(leaf) is leaf:
        return None
    return np.asarray(widened(leaf.detach().cpu())).astype(named_dtype(str(leaf.dtype).removeprefix("torch.")))


def tuple_like(original: tuple[Any, ...], children: Iterable[Any]) -> Any:
    """A tuple of the same kind, which may be a named one."""
    return type(original)(*children) if hasattr(original, "_fields") else tuple(children)


def _names(tree: Any) -> Any:
    return list(flatten(tree)) if isinstance(tree, Mapping | tuple) and len(tree) else type(tree).__name__
