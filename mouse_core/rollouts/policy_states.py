"""Hidden states of recurrent policies: arrays in tuples, lists and dicts, in any of the layouts that there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from array_api_compat import array_namespace

from mouse_core.errors import ConfigError, SchemaError

Tree = Any
Array = Any


def tree_map(call: Callable[..., Any], tree: Tree, *others: Tree, path: str = "hidden_states") -> Tree:
    """``call(path, leaf, *other_leaves)`` for every array of a tree of tuples, lists and dicts; None stays.

    Raises:
        SchemaError: Another tree of a different structure.
    """
    if tree is None:
        if any(other is not None for other in others):
            raise SchemaError(f"{path}: expected None as in the rows before, found something")
        return None
    if isinstance(tree, dict):
        if any(not isinstance(other, dict) or other.keys() != tree.keys() for other in others):
            raise SchemaError(f"{path}: expected a dict of {list(tree)} as in the rows before, found another structure")
        return {
            key: tree_map(call, value, *(other[key] for other in others), path=f"{path}[{key!r}]")
            for key, value in tree.items()
        }
    if isinstance(tree, tuple | list):
        if any(not isinstance(other, tuple | list) or len(other) != len(tree) for other in others):
            raise SchemaError(f"{path}: expected {len(tree)} parts as in the rows before, found another structure")
        parts = [
            tree_map(call, value, *(other[place] for other in others), path=f"{path}[{place}]")
            for place, value in enumerate(tree)
        ]
        # A named tuple takes its parts one by one.
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if any(other is None or isinstance(other, dict | tuple | list) for other in others):
        raise SchemaError(f"{path}: expected an array as in the rows before, found another structure")
    return call(path, tree, *others)


def is_empty(tree: Tree) -> bool:
    """Whether there is no array in it."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return tree is None or (isinstance(tree, tuple | list) and all(is_empty(part) for part in tree))


def check_axis(axis: object) -> int | None:
    """``axis`` if it is None or an integer from 0, else ConfigError."""
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool) and axis >= 0):
        return axis
    raise ConfigError(f"hidden_axis: expected None or an integer from 0, found {axis!r}")


def env_axis(shape: tuple[int, ...], axis: int | None) -> int:
    """Where a hidden state has its environments: ``[layers, N, ...]`` from three dimensions on, else ``[N, ...]``."""
    return (1 if len(shape) >= 3 else 0) if axis is None else axis


def take(stored: Tree, rows: Array, axis: int | None) -> Tree:
    """The hidden states of some rows.

    Args:
        stored: Arrays ``[T, ...]`` with the environments on some axis.
        rows: Flat row numbers ``[B]``.
        axis: Of the environments within a row; see ``env_axis``.

    Returns:
        The same tree, of arrays that have ``B`` where one row has its environments.
    """

    def one(path: str, leaf: Array) -> Array:
        xp = array_namespace(leaf)
        place = env_axis(tuple(leaf.shape[1:]), axis)
        by_row = xp.moveaxis(leaf, place + 1, 1)
        taken = xp.take(xp.reshape(by_row, (-1, *by_row.shape[2:])), rows, axis=0)
        return xp.moveaxis(taken, 0, place)

    return tree_map(one, stored)
