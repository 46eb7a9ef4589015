"""Conversions between nested rows or batches (dicts, tuples and lists) and flat fields by name.

A tree is a leaf, or a node whose children are trees. Storages, devices, files and adapters all use this definition of a
node:

- a dict, whose children have its keys as names;
- a named tuple, whose children have the names of its fields;
- a tuple, whose children have their positions as names;
- a list that contains, at any depth, an array of one or more axes or another node. Other lists, such as lists of
  numbers or texts, are leaves;
- None, which has no children.

A dataclass is treated as a dict of its fields: ``opened`` converts a dataclass to a dict when rows are added. The name
of a leaf is its path: ``"reward"`` at the root, ``("next", "reward")`` in a nested dict, ``(0,)`` in a tuple.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_text
from mouse_core.dtypes import (
    RowError,
    arrow_to_numpy,
    check_exact,
    convert,
    is_arrow_kind,
    is_ml_float,
    is_tensor,
    named_dtype,
    number_kind,
    to_numpy,
    widened,
)
from mouse_core.errors import DataError, MissingFieldError, SchemaError

__all__ = [
    "FieldKey",
    "copied",
    "find",
    "flatten",
    "is_node",
    "is_varying",
    "map_tree",
    "nest",
    "opened",
    "stack",
    "stack_leaves",
    "structure_of",
    "unflatten",
]

FieldKey = str | tuple[str | int, ...]
"""The name of a field of a row."""

_Path = tuple[str | int, ...]

# For a field's kind, the kinds of Python numbers that it accepts.
_HELD_BY = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "c": "iuf"}


def key_of(path: _Path) -> FieldKey:
    """Return the name of the field at a path; a path of one text is abbreviated to the text."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def path_of(key: FieldKey) -> _Path:
    """Return the path of a field, as a tuple."""
    return (key,) if isinstance(key, str) else key


def is_node(tree: Any) -> bool:
    """Whether a tree is a node, not a leaf; the module's docstring defines nodes and leaves."""
    if type(tree) is np.ndarray:  # the test for Mapping below takes longer than everything else
        return False
    return isinstance(tree, Mapping | tuple) or tree is None or (isinstance(tree, list) and _holds_arrays(tree))


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _holds_arrays(items: list[Any]) -> bool:
    """Whether a list contains an array of one or more axes, a dict, a tuple or a dataclass, at any depth."""
    return any(
        _holds_arrays(item) if isinstance(item, list) else _has_parts(item)
        for item in items
        if type(item) not in _PLAIN
    )


def _has_parts(item: Any) -> bool:
    if isinstance(item, Mapping | tuple) or (is_dataclass(item) and not isinstance(item, type)):
        return True
    shape = getattr(item, "shape", ())
    return isinstance(shape, tuple) and len(shape) > 0


def children_of(node: Any) -> list[tuple[str | int, Any]]:
    """Return a pair for each child of a node, in order: the name and the child."""
    if isinstance(node, Mapping):
        return list(node.items())
    if hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    return list(enumerate(node or ()))


def rebuilt(node: Any, children: Iterable[Any]) -> Any:
    """Return a node of the same kind with other children; for any Mapping, a dict."""
    if isinstance(node, Mapping):
        return dict(zip(node.keys(), children, strict=True))  # a TensorDict does not iterate over its keys
    if isinstance(node, tuple):
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return list(children) if isinstance(node, list) else node


def flatten(tree: Any, *, leaf: Callable[[Any], bool] | None = None) -> dict[FieldKey, Any]:
    """Return the leaves of a tree by name; a tree that is a leaf has the name ``()``.

    Args:
        tree: Nested dicts, tuples and lists.
        leaf: Function that returns whether a node is treated as a leaf; by default, no node does.

    Raises:
        SchemaError: The tree has no leaf, or a dict has keys that are not text.
    """
    if leaf is None and _is_flat(tree) and all(map(is_text, tree)):
        return dict(tree)
    leaves: dict[FieldKey, Any] = {}
    _collect(tree, (), leaves, leaf)
    if not leaves:
        raise SchemaError(f"rows: expected at least one field, found {tree!r:.100}")
    return leaves


def _collect(tree: Any, path: _Path, leaves: dict[FieldKey, Any], leaf: Callable[[Any], bool] | None) -> None:
    if not is_node(tree) or (leaf is not None and leaf(tree)):
        leaves[key_of(path)] = tree
        return
    is_mapping = isinstance(tree, Mapping)
    for name, child in tree.items() if is_mapping else children_of(tree):
        if is_mapping and not is_text(name):
            raise SchemaError(f"rows: expected names of fields as Unicode text, found {name!r} in {path or 'the root'}")
        _collect(child, (*path, name), leaves, leaf)


class Leaf:
    """A leaf of a structure: the name of a field."""

    __slots__ = ("key",)

    def __init__(self, key: FieldKey) -> None:
        self.key = key

    def __repr__(self) -> str:
        return repr(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaf) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


Structure = Any
"""The nodes of a tree whose leaves are instances of ``Leaf``."""


def structure_of(tree: Any, path: _Path = (), *, leaf: Callable[[Any], bool] | None = None) -> Structure:
    """Return the tree in which each leaf is replaced by the leaf's name; see ``flatten`` for ``leaf``."""
    if not is_node(tree) or (leaf is not None and leaf(tree)):
        return Leaf(key_of(path))
    return rebuilt(tree, [structure_of(child, (*path, name), leaf=leaf) for name, child in children_of(tree)])


def unflatten(structure: Structure, fields: Mapping[FieldKey, Any]) -> Any:
    """Return the tree that has this structure and the leaves ``fields``."""
    if isinstance(structure, Leaf):
        return fields[structure.key]
    return rebuilt(structure, [unflatten(child, fields) for _, child in children_of(structure)])


def nest(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Return nested dicts from fields by name: ``{("arm", "angle"): x}`` becomes ``{"arm": {"angle": x}}``."""
    rows: dict[str, Any] = {}
    for key, leaf in fields.items():
        *outer, name = map(str, path_of(key))
        node = rows
        for step in outer:
            node = node.setdefault(step, {})
        node[name] = leaf
    return rows


def keys_of(structure: Structure) -> list[FieldKey]:
    """Return the names of the leaves of a structure, in order."""
    if isinstance(structure, Leaf):
        return [structure.key]
    return [key for _, child in children_of(structure) for key in keys_of(child)]


def structure_to_json(structure: Structure) -> Any:
    """Return a structure as a JSON value; a leaf becomes its path as a list."""
    if isinstance(structure, Leaf):
        return list(path_of(structure.key))
    if structure is None:
        return None
    children = [[name, structure_to_json(child)] for name, child in children_of(structure)]
    if isinstance(structure, Mapping):
        return {"dict": children}
    if hasattr(structure, "_fields"):
        return {"named": [type(structure).__name__, children]}
    return {"list" if isinstance(structure, list) else "tuple": [child for _, child in children]}


def structure_from_json(value: Any) -> Structure:
    """Return the structure from the result of ``structure_to_json``.

    A named tuple becomes an instance of a new class with the same name and fields (see ``named_tuple``). The original
    class is not imported, because the data must not decide which modules are imported.
    """
    if value is None:
        return None
    if isinstance(value, list):
        return Leaf(key_of(tuple(value)))
    if "dict" in value:
        return {name: structure_from_json(child) for name, child in value["dict"]}
    if "named" in value:
        name, children = value["named"]
        kind = named_tuple(str(name), tuple(str(field) for field, _ in children))
        return kind(*[structure_from_json(child) for _, child in children])
    kind = list if "list" in value else tuple
    return kind(structure_from_json(child) for child in value["list" if kind is list else "tuple"])


@lru_cache(maxsize=256)
def named_tuple(name: str, names: tuple[str, ...]) -> Any:
    """Return a class of named tuples that can be pickled; raise ValueError for invalid names."""
    make: Any = namedtuple  # the name and fields come from data, so type checkers cannot know them
    kind = make(name, names)
    kind.__reduce__ = lambda self: (_named_tuple_of, (name, names, tuple(self)))
    kind.__module__ = __name__
    return kind


def _named_tuple_of(name: str, names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return named_tuple(name, names)(*values)


def is_like(structure: Structure, other: Structure) -> bool:
    """Whether two structures have the same nodes. Two classes of named tuples are the same if they have the same name
    and the same fields.
    """
    return bool(structure_to_json(structure) == structure_to_json(other))


def map_tree(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a new tree, in which each leaf is replaced by ``change(leaf)``."""
    if type(tree) is dict:
        return {name: map_tree(change, child) for name, child in tree.items()}
    if not is_node(tree):
        return change(tree)
    return rebuilt(tree, [map_tree(change, child) for _, child in children_of(tree)])


def opened(rows: Any, lead: int, ragged: Collection[FieldKey] = (), lists: Collection[_Path] = ()) -> Any:
    """Return rows in which every list is either a node or a leaf.

    Dataclasses become dicts. A list of rows of different lengths becomes an array of objects. A list is treated as rows
    of different lengths if its field is in ``ragged``, or if its arrays differ only in the length of their first axis.

    Args:
        rows: A tree of rows.
        lead: Number of leading axes that index rows.
        ragged: The fields whose rows have different lengths.
        lists: Paths of the nodes that are lists in rows written earlier, see ``lists_of``. At these paths, a list of
            numbers is a node too.
    """
    if _is_plain(rows):
        return rows
    return _opened(rows, (), lead, {path_of(key) for key in ragged}, lists)


def lists_of(structure: Structure, path: _Path = ()) -> set[_Path]:
    """Return the paths of the nodes of a structure that are lists."""
    if isinstance(structure, Leaf):
        return set()
    below = [lists_of(child, (*path, name)) for name, child in children_of(structure)]
    return set().union(*below, [path] if isinstance(structure, list) else [])


def _is_flat(tree: Any) -> bool:
    """Whether a tree is a dict of arrays, numbers and texts, without nested nodes, as most rows are."""
    return type(tree) is dict and len(tree) > 0 and _FLAT.issuperset(map(type, tree.values()))


def _is_plain(tree: Any) -> bool:
    """Whether a tree is a dict whose values are arrays, numbers, texts or, at any depth, dicts of the same kind."""
    if type(tree) is not dict:
        return False
    others = [child for child in tree.values() if type(child) not in _FLAT]
    return not others or all(map(_is_plain, others))


_FLAT = frozenset({np.ndarray, bool, int, float, str, bytes, np.float32, np.float64, np.int64, np.bool_})


def _opened(tree: Any, path: _Path, lead: int, ragged: Collection[_Path], lists: Collection[_Path]) -> Any:
    if is_dataclass(tree) and not isinstance(tree, type) and not hasattr(tree, "dtype"):
        tree = {field.name: getattr(tree, field.name) for field in fields(tree)}
    if isinstance(tree, list) and (path in ragged or _differ(tree, lead)):
        return _rows_of(_as_rows(tree, path), lead)
    if isinstance(tree, list) and path in lists:
        tree = tuple(tree)
    if not is_node(tree):
        return _as_rows(tree, path)
    return rebuilt(tree, [_opened(child, (*path, name), lead, ragged, lists) for name, child in children_of(tree)])


def _as_rows(leaf: Any, path: _Path) -> Any:
    """Convert a leaf of pyarrow, pandas, polars or a subclass of ``np.ndarray`` to a plain array.

    Raises:
        SchemaError: The leaf is a table; its columns must be fields.
        DataError: A value is null or masked.
    """
    kind = type(leaf)
    if kind is np.ndarray:
        return leaf
    where = f"rows: field {key_of(path)!r}" if path else "rows"
    if hasattr(leaf, "columns"):
        raise SchemaError(
            f"{where}: expected an array, found {kind.__name__}; {{name: table[name]}} is a tree of arrays"
        )
    try:
        if kind is list and any(map(is_arrow_kind, {*map(type, leaf)})):
            return [arrow_to_numpy(item, row) if is_arrow_kind(type(item)) else item for row, item in enumerate(leaf)]
        if is_arrow_kind(kind):
            return arrow_to_numpy(leaf)
        return to_numpy(leaf) if isinstance(leaf, np.ndarray) or hasattr(leaf, "to_numpy") else leaf
    except RowError as error:
        raise DataError(f"{where}, row {error.row}: {error}") from error


def _differ(items: list[Any], lead: int) -> bool:
    """Whether the arrays in a list, or in its nested lists, differ only in length (the first axis), as in a ragged
    field.
    """
    values = items
    for _ in range(lead - 1):
        if not all(isinstance(item, list) for item in values):
            return False
        values = [value for item in values for value in item]
    if not lead or not values or not all(_is_value(value) for value in values):
        return False
    return differ_in_length({np.shape(value) for value in values})


def differ_in_length(shapes: set[tuple[int, ...]]) -> bool:
    """Whether shapes of rows differ in the length of their first axis only."""
    return len(shapes) > 1 and () not in shapes and len({shape[1:] for shape in shapes}) == 1


def _is_value(value: Any) -> bool:
    return hasattr(value, "shape") and not isinstance(value, Mapping | tuple)


def _rows_of(items: list[Any], lead: int) -> Any:
    """Convert values of rows, which are in lists that are nested ``lead`` levels deep, to an array of objects. The
    value of a single row (``lead`` 0) is not converted to objects.
    """
    if not lead or not is_node(items):
        arrays = all(map(_is_value, items)) and len({np.shape(item) for item in items}) == 1
        return np.stack([as_array(item, where="rows") for item in items]) if is_node(items) and arrays else items
    shape: tuple[int, ...] = ()
    values = [items]
    for _ in range(lead):
        lengths = {len(value) for value in values if isinstance(value, list)}
        if len(lengths) != 1 or not all(isinstance(value, list) for value in values):
            return items
        shape = (*shape, lengths.pop())
        values = [item for value in values for item in value]
    return object_array(values, shape)


def object_array(values: Sequence[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return values of any type as an array of objects."""
    made = np.empty(len(values), object)
    for place, value in enumerate(values):
        made[place] = value
    return made.reshape(shape)


def copied(tree: Any, within: tuple[int, ...] = ()) -> Any:
    """Return a tree with copies of its arrays, tensors and containers; other objects are shared.

    Args:
        tree: Nested dicts, lists, tuples and dataclasses.
        within: The Python ``id`` of each enclosing dataclass, with which a dataclass that contains itself is copied
            only once.
    """
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if isinstance(tree, np.ndarray):
        if not tree.dtype.hasobject:
            return tree.copy()
        return object_array([copied(value, within) for value in tree.reshape(-1)], tree.shape)
    if kind is dict or kind is list:
        return rebuilt(tree, [copied(child, within) for _, child in children_of(tree)])
    if isinstance(tree, tuple):
        children = [copied(child, within) for child in tree]
        same = all(new is old for new, old in zip(children, tree, strict=True))
        return tree if same else rebuilt(tree, children)
    if is_tensor(tree) or (hasattr(tree, "batch_dims") and hasattr(tree, "clone")):  # TensorDicts, too
        return tree.clone()
    if is_dataclass(tree) and not isinstance(tree, type) and id(tree) not in within:
        changed = {}
        for field in fields(tree):
            value = getattr(tree, field.name, None)
            new = copied(value, (*within, id(tree)))
            if new is not value:
                changed[field.name] = new
        tree = copy(tree) if changed else tree
        for name, value in changed.items():
            object.__setattr__(tree, name, value)
    return tree


def is_varying(leaf: Any) -> bool:
    """Whether a leaf of a batch is an array of objects, whose rows can have different lengths."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O"


def as_text(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert an object array of texts to a text array, which NumPy compares faster; return any other array
    unchanged.
    """
    if is_varying(values) and all(isinstance(value, str) for value in values.reshape(-1)):
        return values.astype(str)
    return values


def as_lists(batch: Any) -> Any:
    """Return a batch in which object arrays are converted to lists."""
    # In most batches every field is a plain array; testing each field for Mapping would take longer than all else.
    if type(batch) is dict:
        for leaf in batch.values():
            if type(leaf) is not np.ndarray or leaf.dtype.hasobject:
                break
        else:
            return batch
    return map_tree(lambda leaf: leaf.tolist() if is_varying(leaf) else leaf, batch)


def child_of(node: Any, name: str | int) -> Any:
    """Return the child of a node by name; raise KeyError, IndexError or TypeError if the node has no such child."""
    if isinstance(name, str) and isinstance(node, tuple):
        if name not in getattr(node, "_fields", ()):
            raise KeyError(name)
        return getattr(node, name)
    return node[name]


def find(tree: Any, key: FieldKey, *, where: str = "rows") -> Any:
    """Return the leaf or node with the name ``key`` in a tree; ``where`` is the prefix of the error text.

    Raises:
        MissingFieldError: The tree has no such leaf or node.
    """
    found = tree
    for step in path_of(key):
        try:
            found = child_of(found, step)
        except (KeyError, IndexError, TypeError) as error:
            raise MissingFieldError(f"{where}: expected a field {key!r}, found {_names(tree)}") from error
    return found


def stack(items: Sequence[Any], join: Callable[[FieldKey, list[Any]], Any] | None = None) -> Any:
    """Stack a list of trees into one tree, whose leaves have a new first axis for the items.

    Args:
        items: The trees, at least one.
        join: Function that is called with a field's name and its leaves in all items; returns the stacked leaf. By
            default ``stack_leaves``.

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
    """Stack the leaves of one field in several rows into one array; if the leaves have different lengths, the array
    contains objects.

    Python numbers and texts stay a list, because the storage decides their dtype.
    """
    if any(map(is_varying, leaves)):
        rows = [leaf if is_varying(leaf) else object_array(list(leaf), (len(leaf),)) for leaf in leaves]
        try:
            return np.stack(rows)
        except ValueError as error:
            raise DataError(
                f"rows: field {key!r}: expected equal numbers of rows in every item, found {error}"
            ) from error
    strong = next((leaf for leaf in leaves if not is_weak(leaf)), None)
    if strong is None:  # unchanged: the storage knows the dtype, and checks whether the numbers fit
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
                "ListStorage accepts any shape"
            )
        arrays.append(array)
    if len({array.shape for array in arrays}) > 1:
        return object_array(arrays, (len(arrays),))  # the storage checks whether rows may have different lengths
    return np.stack(arrays)


def _check_alike(key: FieldKey, leaves: list[Any]) -> None:
    """Raise SchemaError if some of the leaves are booleans and others are numbers."""
    if len({np.asarray(leaf).dtype.kind == "b" for leaf in leaves if not isinstance(leaf, list)}) > 1:
        raise SchemaError(f"rows: field {key!r}: expected all numbers or all booleans, found both")


def is_weak(leaf: Any) -> bool:
    """Whether a leaf is a Python number or list. Such a leaf has no dtype, and gets the dtype of its field."""
    return isinstance(leaf, bool | int | float | list) and not isinstance(leaf, np.generic)


def fit(leaf: Any, dtype: np.dtype[Any], *, where: str) -> npt.NDArray[Any]:
    """Convert a leaf to an array of ``dtype``.

    Raises:
        SchemaError: The leaf has another dtype, or is not an array of numbers or text.
        DataError: A Python number does not fit in the dtype.
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
            if is_ml_float(dtype):  # NumPy raises no overflow error for these dtypes
                return convert(np.atleast_1d(array), dtype).reshape(array.shape)
            return np.array(leaf, dtype)
    except (OverflowError, FloatingPointError, ValueError) as error:
        raise DataError(f"{where}: expected values that fit {dtype}, found {leaf!r:.60}") from error


def as_array(leaf: Any, *, where: str) -> npt.NDArray[Any]:
    """Return a leaf as an array of numbers, text or times.

    Raises:
        SchemaError: The leaf cannot be converted.
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
                raise SchemaError(
                    f"{where}: expected a dtype that NumPy supports, found {leaf.dtype}: {error}"
                ) from error
            raise SchemaError(
                f"{where}: expected an array whose rows have the same shape, found {leaf!r:.80}; if rows of a "
                f"field differ in length, "
                "declare it, as in ragged=['tokens'], or use a ListStorage"
            ) from error
    if array.dtype.hasobject or number_kind(array.dtype) == "V":
        raise SchemaError(
            f"{where}: expected numbers or text, found {type(leaf).__name__} {leaf!r:.60}; ListStorage accepts "
            f"any value"
        )
    return array


def _narrow_tensor(leaf: Any) -> npt.NDArray[Any] | None:
    """Convert a tensor of bfloat16 or 8-bit floats to NumPy, through float32; return None for other values."""
    if isinstance(leaf.dtype, np.dtype) or widened(leaf) is leaf:
        return None
    return np.asarray(widened(leaf.detach().cpu())).astype(named_dtype(str(leaf.dtype).removeprefix("torch.")))


def _names(tree: Any) -> Any:
    return list(flatten(tree)) if tree is not None and is_node(tree) and len(tree) else type(tree).__name__
