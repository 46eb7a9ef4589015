"""Fields of nested batches: finding, replacing and removing them, and which of them run along time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import device

from mouse_core.dtypes import is_tensor
from mouse_core.errors import ConfigError, SchemaError
from mouse_core.nested import child_of, children_of, find, flatten, is_node, key_of, path_of, rebuilt
from mouse_core.replay.protocols import FieldKey
from mouse_core.spec import check_list

Array = Any
Path = tuple[str | int, ...]

GATHERED = ("hindsight_goal", "hindsight_drawn", "hindsight_left")
"""Goals for the rows of a batch that were drawn with it, and which rows are to get one."""

BEFORE = "frames before "
"""What the names of fields begin with that hold the frames before the rows of a batch, until they are stacked."""

BOOKKEEPING = frozenset({"index", "mask", "priority_weight", "traj_id", "slice_id", "buffer_ids", *GATHERED})
"""What a sampler adds to a batch: it belongs to a drawn step and is no part of the row."""

NEXT = "next"


def check_keys(keys: Sequence[FieldKey], *, where: str) -> tuple[FieldKey, ...]:
    """Field names as a tuple, or ConfigError for what is none."""
    keys = check_list(where, keys)
    for key in keys:
        if not (isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(name, str | int) for name in key))):
            raise ConfigError(f"{where}: expected names of fields, or tuples of names, found {key!r}")
    return keys


def at_the_root(keys: tuple[FieldKey, ...]) -> tuple[FieldKey, ...]:
    """Fields without those under ``next`` that follow one at the root which is named as well."""
    named = {path_of(key) for key in keys}
    return tuple(key for key in keys if path_of(key)[0] != NEXT or path_of(key)[1:] not in named)


def leaves(batch: Any) -> list[tuple[Path, Array]]:
    """The fields of a batch with the paths that lead to them, in order."""
    return [(path_of(key), values) for key, values in flatten(batch).items()]


def find_any(batch: Any, key: FieldKey) -> Array | None:
    """A field, or a node above fields; None where there is none."""
    node = batch
    for name in path_of(key):  # misses are common, and an error that says what is there takes long
        try:
            node = child_of(node, name)
        except (KeyError, IndexError, TypeError):
            return None
    return node


def replaced(batch: Any, changes: Mapping[FieldKey, Array]) -> Any:
    """The batch with some fields set; the one that is given is not changed, and other fields are shared with it."""
    for key, values in changes.items():
        batch = _with(batch, path_of(key), values)
    return batch


def _with(node: Any, path: Path, values: Array) -> Any:
    if not path:
        return values
    name, rest = path[0], path[1:]
    if isinstance(node, tuple | list):
        children = children_of(node)
        if name not in dict(children):
            raise SchemaError(f"fields: expected one of {[*dict(children)]} in a {_kind(node)}, found {name!r}")
        return rebuilt(node, [_with(item, rest, values) if place == name else item for place, item in children])
    if not isinstance(node, Mapping):
        raise SchemaError(f"fields: expected a dict to put {name!r} in, found {type(node).__name__}")
    return {**node, name: _with(node.get(name, {}), rest, values)}


def removed(batch: Any, key: FieldKey) -> Any:
    """The batch without a field or node; a dict that becomes empty goes, too."""
    path = path_of(key)
    parent = find(batch, path[:-1])
    if not isinstance(parent, Mapping):
        raise SchemaError(f"fields: expected {key!r} in a dict, found it in a {type(parent).__name__}")
    kept = {name: value for name, value in parent.items() if name != path[-1]}
    if len(path) == 1:
        return kept
    return replaced(batch, {path[:-1]: kept}) if kept else removed(batch, path[:-1])


def only(tree: Any, fields: Mapping[Path, Array], path: Path = ()) -> Any:
    """What a tree that lies at ``path`` has of these fields, nested as it is; None where it has none.

    Raises:
        SchemaError: Some of a tuple's fields, and not all.
    """
    if isinstance(tree, Mapping):
        children = {name: only(child, fields, (*path, name)) for name, child in tree.items()}
        return {name: child for name, child in children.items() if child is not None} or None
    if is_node(tree):
        items = [only(child, fields, (*path, place)) for place, child in children_of(tree)]
        left_out = sum(item is None for item in items)
        if 0 < left_out < len(items):
            kind = _kind(tree)
            raise SchemaError(f"fields: expected all or none of the {kind} {key_of(path)!r}, found {left_out} left out")
        return None if left_out or not items else rebuilt(tree, items)
    return fields.get(path)


def _kind(node: Any) -> str:
    return "list" if isinstance(node, list) else "tuple"


def place_of(batch: Any, key: FieldKey) -> FieldKey:
    """Where a field that belongs to a transition stands: in ``next`` if it is there, or else as it is named."""
    inside = (NEXT, *path_of(key))
    return key if find_any(batch, inside) is None else inside


def steps_of(values: Array, *, where: str, key: FieldKey) -> tuple[int, int]:
    """The first two axes of a field of slices: how many they are, and how long."""
    if values.ndim < 2:
        # How far returns reach is not known beforehand, so that a buffer cannot read the steps for them.
        if where == "ReturnsToGo":
            otherwise = "sum when episodes are written: OnWrite(ReturnsToGo(...))"
        else:
            otherwise = "give the transform to a buffer, which reads the steps that it needs"
        raise SchemaError(
            f"{where}: expected slices [B, S, ...], found {key!r} of shape {list(values.shape)}; draw "
            f"slices, or {otherwise}"
        )
    return int(values.shape[0]), int(values.shape[1])


def device_of(values: Array) -> Any:
    """The device of an array."""
    if is_tensor(values):
        return values.device
    return "cpu" if type(values) is np.ndarray else device(values)


def as_array(value: Any) -> Array:
    """Python's own numbers as an array; an array stays what it is."""
    return value if hasattr(value, "shape") else np.asarray(value)


def on_host(values: Array) -> npt.NDArray[Any]:
    """An array of NumPy or torch, on whatever device, as one of NumPy."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def runs(values: Array, steps: tuple[int, ...]) -> bool:
    """Whether a field has a value for every step."""
    return tuple(getattr(values, "shape", ())[:2]) == tuple(steps)
