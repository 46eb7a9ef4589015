"""Steps that were taken, as columns, and as rows of TED."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.errors import StateError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.nested import FieldKey, flatten, key_of, nest, path_of

__all__ = ["Steps"]

_FORMAT = 1

Integers = npt.NDArray[np.int64]


class Steps(NamedTuple):
    """S steps.

    Attributes:
        sources, targets: Of which observations, by their place among those of the tree, int64 ``[S]``.
        counts: How often a step was taken, int64 ``[S]``.
        rewards: Its mean reward, float64 ``[S]``.
        dones: As those of edges, int8 ``[S]``.
        terminated, truncated: How often the episode terminated with it, or was truncated, int64 ``[S]``.
        fields: Actions and other fields ``[S, ...]``, those of the last time it was taken.
        actions: Which of the fields are actions.
    """

    sources: Integers
    targets: Integers
    counts: Integers
    rewards: npt.NDArray[np.float64]
    dones: npt.NDArray[np.int8]
    terminated: Integers
    truncated: Integers
    fields: dict[FieldKey, npt.NDArray[Any]]
    actions: tuple[FieldKey, ...]


def rows_of(taken: Steps, observations: Any, reward_key: FieldKey, steps: Any) -> Any:
    """Steps as rows of TED.

    Args:
        taken: The steps.
        observations: A tree of arrays, of which the steps name rows.
        reward_key: What the reward is called, in "next".
        steps: Which steps: an index of arrays.

    Returns:
        A nested dict of arrays ``[n, ...]``, with "count".
    """
    dones = taken.dones[steps]
    rows = {key: array[steps] for key, array in taken.fields.items()}
    for key, leaf in flatten(observations).items():
        rows[key] = leaf[taken.sources[steps]]
        rows["next", *path_of(key)] = leaf[taken.targets[steps]]
    rows["next", *path_of(reward_key)] = taken.rewards[steps]
    rows |= {("next", "done"): dones != 0, ("next", "terminated"): dones == 1, ("next", "truncated"): dones == 2}
    return nest(rows | {"count": taken.counts[steps]})


def as_arrays(rows: Any) -> Any:
    """Rows with lists of text or of values that differ in length as arrays, which an index picks from."""
    if isinstance(rows, dict):
        return {name: as_arrays(child) for name, child in rows.items()}
    if not isinstance(rows, list) or all(isinstance(value, str) for value in rows):
        return np.asarray(rows)
    values = np.empty(len(rows), object)
    values[:] = rows
    return values


# ---------------------------------------------------------------------- files


def write_saved(path: str | PathLike[str], kind: str, state: Mapping[str, Any]) -> None:
    """Write a forest or a tree to a checkpoint file, without pickles.

    Raises:
        StorageError: The file cannot be written.
    """
    write_checkpoint(path, {"format": _FORMAT, "kind": kind, **state})


def read_saved(path: str | PathLike[str], kind: str, names: Iterable[str]) -> dict[str, Any]:
    """Read the state that ``write_saved`` wrote, with at least these names.

    Raises:
        StateError: The file is damaged, of another kind, or of a newer version.
        StorageError: It cannot be read.
    """
    state = read_checkpoint(path)
    if state.get("kind") != kind:
        raise StateError(f"{path}: expected a saved {kind}, found {state.get('kind', 'something else')}")
    if state.get("format") != _FORMAT:
        raise StateError(f"{path}: expected a {kind} of version {_FORMAT}, found version {state.get('format')}")
    if missing := set(names) - state.keys():
        raise StateError(f"{path}: expected {sorted(missing)} in a {kind}, found {sorted(state)}")
    return state


def paths_of(keys: Iterable[FieldKey]) -> list[list[str | int]]:
    """Names of fields as JSON holds them; see ``keys_of``."""
    return [list(path_of(key)) for key in keys]


def keys_of(paths: Iterable[Iterable[str | int]]) -> tuple[FieldKey, ...]:
    """The names of fields that ``paths_of`` was given."""
    return tuple([key_of(tuple(path)) for path in paths])
