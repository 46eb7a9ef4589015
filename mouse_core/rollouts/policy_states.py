"""Hidden states of recurrent policies: arrays, or tuples, lists and dicts of arrays, in the layouts that are in common
use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mouse_core.dtypes import namespace
from mouse_core.errors import MissingFieldError, SchemaError
from mouse_core.rollouts.fields import HostArrays

Tree = Any
Array = Any


class PolicyStates:
    """Stores the hidden states of the actor and the critic for every row of a rollout.

    Args:
        num_transitions_per_env: Number of rows of a full rollout.
        num_envs: Number of environments in each row.
        arrays: The array type of the storage.
    """

    def __init__(self, num_transitions_per_env: int, num_envs: int, arrays: HostArrays) -> None:
        self._rows, self._num_envs, self._arrays = num_transitions_per_env, num_envs, arrays
        # For actor and critic each: memory, which the next rollout overwrites, and whether this rollout has states.
        self._memory: list[Tree] = [None, None]
        self._stated = [False, False]
        self._all_said = True

    @property
    def trees(self) -> tuple[Tree, Tree] | None:
        """The stored states ``(actor, critic)``, arrays ``[T, ...]``; None if no row had a state."""
        if not any(self._stated):
            return None
        actor, critic = (held if stated else None for held, stated in zip(self._memory, self._stated, strict=True))
        return actor, critic

    def clear(self) -> None:
        """Discard the states, for a new rollout."""
        self._stated = [False, False]
        # Whether all rows had ``hidden_states``, even if only (None, None).
        self._all_said = True

    def check(self, given: Any, step: int) -> list[Tree] | None:
        """Check the states of one step; return them as arrays ``[actor, critic]``, or None if the transition has no
        hidden states.

        Args:
            given: The pair of states ``(actor, critic)``, where each state is a tree or None; or None for a transition
                without hidden states.
            step: The index of the row to which the states will be written.

        Raises:
            SchemaError: ``given`` is not a pair; the number of environments, the structure, a shape or a dtype differs
                from earlier rows; or earlier rows had no hidden states.
            MissingFieldError: ``given`` is None although earlier rows had states.
        """
        said = isinstance(given, tuple | list) and len(given) == 2
        if not said and not is_empty(given):
            raise SchemaError(f"hidden_states: expected (actor, critic), found {type(given).__name__}")
        row: list[Tree] = [None, None]
        for place, states in enumerate(given if said else row):
            path = f"hidden_states[{place}]"
            if is_empty(states):
                if self._stated[place]:
                    raise MissingFieldError(f"{path}: expected a value in every row, found none in row {step}")
                continue
            row[place] = tree_map(self._as_state, states, path=path)
            if self._stated[place]:
                tree_map(_check_same, row[place], self._memory[place], path=path)
            elif not self._all_said:
                raise SchemaError(
                    f"hidden_states: expected hidden states in every row, found the first hidden states in "
                    f"row {step}; while a "
                    "policy has no state, pass (None, None)"
                )
        return row if said else None

    def write(self, row: list[Tree] | None, step: int) -> None:
        """Copy the result of ``check`` into row ``step``."""

        def copy(path: str, states: Array, memory: Array) -> None:
            memory[step] = states

        self._all_said = self._all_said and row is not None
        for place, states in enumerate(row or ()):
            if states is not None:
                if not self._stated[place]:
                    self._memory[place] = self._begun(states, self._memory[place], step)
                    self._stated[place] = True
                tree_map(copy, states, self._memory[place])

    def _as_state(self, path: str, leaf: Any) -> Array:
        made = self._arrays.array(leaf)
        check_envs(path, tuple(made.shape), self._num_envs)
        return made

    def _begun(self, states: Tree, memory: Tree, step: int) -> Tree:
        """Return memory for states; rows before ``step`` are zero. If the memory of the last rollout has the same
        shapes and dtypes, this memory is used again.
        """

        def forget(path: str, array: Array) -> Array:
            array[:step] = 0
            return array

        def make(path: str, leaf: Array) -> Array:
            return self._arrays.zeros((self._rows, *leaf.shape), leaf.dtype)

        try:
            tree_map(_check_same, states, memory)
        except SchemaError:
            return tree_map(make, states)
        return tree_map(forget, memory)


def _check_same(path: str, row: Array, array: Array) -> None:
    if row.shape != array.shape[1:] or row.dtype != array.dtype:
        raise SchemaError(
            f"{path}: expected {array.dtype} {list(array.shape[1:])} as in the earlier rows, "
            f"found {row.dtype} {list(row.shape)}"
        )


def tree_map(call: Callable[..., Any], tree: Tree, *others: Tree, path: str = "hidden_states") -> Tree:
    """Apply ``call(path, leaf, *other_leaves)`` to every array of a tree of tuples, lists and dicts; if the tree is
    None, return None.

    Raises:
        SchemaError: The trees differ in structure.
    """
    node = _node(tree)
    if any(_node(other) != node for other in others):
        raise SchemaError(f"{path}: expected {node} as in the earlier rows, found another structure")
    if tree is None:
        return None
    if isinstance(tree, dict):
        keys: Any = tree.keys()
    elif isinstance(tree, tuple | list):
        keys = range(len(tree))
    else:
        return call(path, tree, *others)
    parts = {key: tree_map(call, tree[key], *(other[key] for other in others), path=f"{path}[{key!r}]") for key in keys}
    if isinstance(tree, dict):
        return parts
    # The constructor of a named tuple takes its parts as separate arguments.
    return type(tree)(*parts.values()) if hasattr(tree, "_fields") else type(tree)(parts.values())


def _node(tree: Tree) -> str:
    """Return a description of a node; nodes of equal structure have equal descriptions."""
    if tree is None:
        return "None"
    if isinstance(tree, dict):
        return f"a dict of {sorted(tree, key=repr)}"
    return f"{len(tree)} parts" if isinstance(tree, tuple | list) else "an array"


def is_empty(tree: Tree) -> bool:
    """Return whether the tree contains no array."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return tree is None or (isinstance(tree, tuple | list) and all(is_empty(part) for part in tree))


def _env_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of the environments in a hidden state: axis 1 for three or more dimensions, ``[layers, N, ...]``;
    axis 0 for fewer dimensions, ``[N, ...]``.
    """
    return 1 if len(shape) >= 3 else 0


def check_envs(path: str, shape: tuple[int, ...], num_envs: int) -> None:
    """Raise SchemaError if a hidden state's shape does not have ``num_envs`` environments."""
    axis = _env_axis(shape)
    if len(shape) <= axis or shape[axis] != num_envs:
        raise SchemaError(
            f"{path}: expected {num_envs} environments on axis {axis}, found shape {list(shape)}; "
            "a state has the axes [N], [N, features] or [layers, N, ...]"
        )


def take(stored: Tree, rows: Array) -> Tree:
    """Return the hidden states of the given rows.

    Args:
        stored: Arrays ``[T, ...]`` that have an axis of environments.
        rows: Flat row indices ``[B]``.

    Returns:
        A tree of the same structure; in its arrays, an axis of length ``B`` for the rows replaces the axis of
        environments.
    """

    def one(path: str, leaf: Array) -> Array:
        xp = namespace(leaf)
        place = _env_axis(tuple(leaf.shape[1:]))
        # [T, layers, N, ...] becomes [T * N, layers, ...], whose rows have flat indices, and [B, layers, ...] becomes
        # [layers, B, ...].
        by_row = xp.moveaxis(leaf, place + 1, 1)
        taken = xp.take(xp.reshape(by_row, (-1, *by_row.shape[2:])), rows, axis=0)
        return xp.moveaxis(taken, 0, place)

    return tree_map(one, stored)
