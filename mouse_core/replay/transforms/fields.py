"""Transforms of fields, such as Rename, Cast and Pad, and functions that find and replace fields of nested batches."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from array_api_compat import device

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import convert, is_tensor, may_look, namespace
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.nested import (
    child_of,
    children_of,
    find,
    flatten,
    is_node,
    is_varying,
    key_of,
    object_array,
    path_of,
    rebuilt,
)
from mouse_core.replay.protocols import TRAJ_KEYS, FieldKey
from mouse_core.spec import check_count, check_dtype, check_list

Array = Any

Path = tuple[str | int, ...]

GATHERED = ("hindsight_goal", "hindsight_drawn", "hindsight_left")
"""The names of the fields with the drawn goals of the rows of a batch, and with the mask of the rows that get a new
goal.
"""

BEFORE = "frames before "
"""The prefix of the names of the fields with earlier frames; ``CatFrames`` stacks these frames."""

BOOKKEEPING = frozenset({"index", "mask", "priority_weight", "traj_id", "slice_id", "buffer_ids", *GATHERED})
"""The fields that a sampler adds to a batch; their values come from the draw, not from stored rows."""

NEXT = "next"


def check_keys(keys: Sequence[FieldKey], *, where: str) -> tuple[FieldKey, ...]:
    """Return field names as a tuple; raise ConfigError for an invalid name."""
    keys = check_list(where, keys)
    for key in keys:
        if not (isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(name, str | int) for name in key))):
            raise ConfigError(f"{where}: expected names of fields, or tuples of names, found {key!r}")
    return keys


def at_the_root(keys: tuple[FieldKey, ...]) -> tuple[FieldKey, ...]:
    """Return ``keys`` without those fields under ``next`` that ``keys`` also contains at the root."""
    named = {path_of(key) for key in keys}
    return tuple(key for key in keys if path_of(key)[0] != NEXT or path_of(key)[1:] not in named)


def find_any(batch: Any, key: FieldKey) -> Array | None:
    """Return a field or a node (a dict or tuple of fields); None if the batch has neither."""
    node = batch
    for name in path_of(key):  # missing fields are common, and creating an error that lists all fields is slow
        try:
            node = child_of(node, name)
        except (KeyError, IndexError, TypeError):
            return None
    return node


def replaced(batch: Any, changes: Mapping[FieldKey, Array]) -> Any:
    """Return a new batch with some fields replaced; the other fields are shared with the input."""
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
    """Return the batch without a field or node; a dict that becomes empty by the removal is also removed."""
    path = path_of(key)
    parent = find(batch, path[:-1])
    if not isinstance(parent, Mapping):
        raise SchemaError(f"fields: expected {key!r} in a dict, found it in a {type(parent).__name__}")
    kept = {name: value for name, value in parent.items() if name != path[-1]}
    if len(path) == 1:
        return kept
    return replaced(batch, {path[:-1]: kept}) if kept else removed(batch, path[:-1])


def only(tree: Any, fields: Mapping[FieldKey, Array], path: Path = ()) -> Any:
    """Return the tree with only the given fields, in the same nesting; None if no given field is below ``path``.

    Raises:
        SchemaError: Some, but not all, fields of a tuple are requested.
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
    return fields.get(key_of(path))


def _kind(node: Any) -> str:
    return "list" if isinstance(node, list) else "tuple"


def place_of(batch: Any, key: FieldKey) -> FieldKey:
    """Return the key of a field of a transition: the key under ``next`` if the batch has this field, else ``key``."""
    inside = (NEXT, *path_of(key))
    return key if find_any(batch, inside) is None else inside


def steps_of(values: Array, *, where: str, key: FieldKey) -> tuple[int, int]:
    """Return the first two axes of a field of slices: the number of slices and their length."""
    if values.ndim < 2:
        # A buffer cannot read the following steps for returns, because their number is not known in advance.
        if where == "ReturnsToGo":
            otherwise = "compute returns when episodes are written, with OnWrite(ReturnsToGo(...))"
        else:
            otherwise = "give the transform to a buffer, which reads the steps that it needs"
        raise SchemaError(
            f"{where}: expected slices [B, S, ...], found {key!r} of shape {list(values.shape)}; draw "
            f"slices, or {otherwise}"
        )
    return int(values.shape[0]), int(values.shape[1])


def device_of(values: Array) -> Any:
    """Return the device of an array."""
    if is_tensor(values):
        return values.device
    return "cpu" if type(values) is np.ndarray else device(values)


def as_array(value: Any) -> Array:
    """Convert Python numbers to an array; an array is returned unchanged."""
    return value if hasattr(value, "shape") else np.asarray(value)


def on_host(values: Array) -> npt.NDArray[Any]:
    """Convert a NumPy array, or a torch tensor on any device, to a NumPy array."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def runs(values: Array, steps: tuple[int, ...]) -> bool:
    """Whether a field has a value for each of the ``steps``."""
    return tuple(getattr(values, "shape", ())[:2]) == tuple(steps)


ALIVE, TERMINAL, TRUNCATED = 0, 1, 2


def flat_flags(values: Array, steps: tuple[int, int], *, where: str, key: FieldKey) -> Array:
    """Reshape a field with one value per step, ``[N, T]`` or ``[N, T, 1]``, to ``[N, T]``."""
    if tuple(values.shape[:2]) != steps or prod(values.shape[2:]) != 1:
        raise SchemaError(f"{where}: expected {key!r} of shape {[*steps]}, found {list(values.shape)}")
    return values.reshape(steps)


def end_fields(batch: Any, done: FieldKey) -> dict[str, FieldKey]:
    """Return the fields that mark ends of episodes: ``done``, and the fields ``terminated`` and ``truncated`` on the
    same level of nesting.
    """
    found: dict[str, FieldKey] = {}
    for name, path in (
        ("done", path_of(done)),
        ("terminated", (*path_of(done)[:-1], "terminated")),
        ("truncated", (*path_of(done)[:-1], "truncated")),
    ):
        place = place_of(batch, key_of(path))
        if find_any(batch, place) is not None and place not in found.values():
            found[name] = place
    return found


def end_codes(batch: Any, done: FieldKey, *, where: str) -> Array:
    """Return the end code of each step, int8 ``[N, T]``: 0 if the episode does not end with the step, 1 if the episode
    terminates, 2 if the episode is truncated.

    ``done`` contains these codes, or is boolean. If ``done`` is boolean or missing, the fields ``terminated`` and
    ``truncated``, if present, determine the code; ``terminated`` takes precedence. If the trajectory number
    (``TRAJ_KEYS``, or the ``traj_id`` of slices) changes after a step, the step is truncated.

    Raises:
        MissingFieldError: The batch has none of the three fields, and no trajectory numbers.
        SchemaError: One of the three fields does not have a single value for each step.
        DataError: A code is not 0, 1 or 2; codes are not checked on devices, in JAX, and in code that torch compiles.
    """
    fields = end_fields(batch, done)
    if not fields:
        codes = _cut_short(batch, None)
        if codes is not None:
            return codes
        raise MissingFieldError(
            f"{where}: expected a field {done!r}, or 'terminated' and 'truncated', or the id of a trajectory, "
            f"found {list(flatten(batch))}"
        )
    shape = steps_of(find(batch, next(iter(fields.values())), where=where), where=where, key=done)
    flags = {
        name: flat_flags(find(batch, key, where=where), shape, where=where, key=key) for name, key in fields.items()
    }
    first = next(iter(flags.values()))
    xp = namespace(first)
    codes = xp.zeros(shape, dtype=xp.int8, device=device_of(first))
    if "done" in flags:
        ended = flags["done"] != 0
        coded = not xp.isdtype(flags["done"].dtype, "bool")
        codes = xp.where(ended, xp.full_like(codes, TERMINAL), codes)
        if coded:
            _check_codes(flags["done"], fields["done"], where=where)
            codes = xp.where(flags["done"] == TRUNCATED, xp.full_like(codes, TRUNCATED), codes)
        elif "terminated" in flags:  # the two flags determine the code; a set done without either flag is a truncation
            codes = xp.where(ended, xp.full_like(codes, TRUNCATED), codes)
    if "truncated" in flags:
        codes = xp.where(flags["truncated"] != 0, xp.full_like(codes, TRUNCATED), codes)
    if "terminated" in flags:
        codes = xp.where(flags["terminated"] != 0, xp.full_like(codes, TERMINAL), codes)
    return _cut_short(batch, codes)


def _check_codes(done: Array, key: FieldKey, *, where: str) -> None:
    """Raise DataError for an unknown end code."""
    if not may_look(done) or 0 in done.shape:
        return
    for code in (done.min().item(), done.max().item()):
        if not ALIVE <= code <= TRUNCATED:
            raise DataError(
                f"{where}: {key!r}: expected 0 (alive), 1 (terminal) and 2 (truncated), found {code}; convert other "
                "codes first"
            )


def _cut_short(batch: Any, codes: Array | None) -> Array | None:
    """Set the code 2 (truncated) at steps after which the trajectory number changes, and return the codes; None if
    there are neither codes nor trajectory numbers.
    """
    for key in TRAJ_KEYS:
        ids = find_any(batch, key)
        if ids is None or len(getattr(ids, "shape", ())) < 2 or prod(ids.shape[2:]) != 1:
            continue
        steps = tuple(ids.shape[:2])
        if codes is not None and tuple(codes.shape) != steps:
            continue
        ids = ids.reshape(steps)
        xp = namespace(ids)
        if codes is None:
            codes = xp.zeros(steps, dtype=xp.int8, device=device_of(ids))
        behind = xp.concat([ids[:, 1:], ids[:, -1:]], axis=1)
        codes = xp.where((behind != ids) & (codes == ALIVE), xp.full_like(codes, TRUNCATED), codes)
    return codes


def valid_steps(batch: Any, codes: Array, mask: FieldKey, *, where: str) -> Array:
    """Return the mask of existing steps, bool ``[N, T]``; if there is no mask, all steps exist."""
    xp = namespace(codes)
    found = find_any(batch, mask)
    if found is None:
        return xp.ones(codes.shape, dtype=xp.bool, device=device_of(codes))
    return flat_flags(found, tuple(codes.shape), where=where, key=mask) != 0


def beside(flags: Array, values: Array) -> Array:
    """Reshape flags ``[N, T]`` by adding axes of length 1 up to the number of axes of ``values``."""
    return flags.reshape((*flags.shape, *[1] * (values.ndim - flags.ndim)))


@dataclass(frozen=True)
class Rename:
    """Renames fields, also to another nesting level. Rows that are written under the new names are stored under the
    stored names.

    Args:
        names: A dict from stored name to new name: ``{"obs": "observation", "next_obs": ("next", "observation")}``.

    Raises:
        ConfigError: After renaming, two fields would have the same name.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: The batch already has a field with one of the new names.
    """

    names: Mapping[FieldKey, FieldKey]

    def __post_init__(self) -> None:
        names = dict(self.names)
        check_keys([*names, *names.values()], where="Rename")
        if len({path_of(new) for new in names.values()}) != len(names):
            raise ConfigError(f"Rename: expected a different name for each field, found {names}")
        vars(self).update(names=names)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the new names."""
        return _renamed(batch, {old: (new, find(batch, old, where="Rename")) for old, new in self.names.items()})

    def inverse(self, rows: Any) -> Any:
        """Return rows under the stored names; rows that already have the stored names are returned unchanged."""
        moved = {path_of(new) for new in self.names.values()}
        lacking = {new: old for old, new in self.names.items() if path_of(old) in moved or find_any(rows, old) is None}
        found = {new: (old, find_any(rows, new)) for new, old in lacking.items()}
        return _renamed(rows, {new: pair for new, pair in found.items() if pair[1] is not None})


def _renamed(batch: Any, moves: Mapping[FieldKey, tuple[FieldKey, Any]]) -> Any:
    for old in moves:
        batch = removed(batch, old)
    for old, (new, values) in moves.items():
        if find_any(batch, new) is not None:
            raise SchemaError(
                f"Rename: expected no field {new!r} as the new name of {old!r}, found this field; to remove it first, "
                f"put Exclude({new!r}) before this transform"
            )
        batch = replaced(batch, {new: values})
    return batch


@dataclass(frozen=True, init=False)
class _OfFields:
    """Base class of transforms of named fields."""

    keys: tuple[FieldKey, ...]

    def __init__(self, *keys: FieldKey) -> None:
        vars(self).update(keys=check_keys(keys, where=type(self).__name__))


class Select(_OfFields):
    """Keeps the fields ``keys`` and the sampler's fields (index, mask, priority_weight, traj_id, slice_id, buffer_ids).

    Args:
        keys: The names of fields or of nodes; a node means all fields below the node.

    Raises:
        ConfigError: A name is invalid.
        MissingFieldError: The batch lacks one of the named fields.
    """

    def __call__(self, batch: Any) -> Any:
        """Return the batch with only the kept fields, in the order of the input batch."""
        for key in self.keys:
            find(batch, key, where="Select")
        wanted = [path_of(key) for key in (*self.keys, *BOOKKEEPING)]
        fields = flatten(batch)
        kept = {key: fields[key] for key in fields if any(path_of(key)[: len(start)] == start for start in wanted)}
        return only(batch, kept) or {}


class Exclude(_OfFields):
    """Removes fields.

    Args:
        keys: The names of fields or of nodes; a node means all fields below the node.

    Raises:
        ConfigError: A name is invalid.
        MissingFieldError: The batch lacks one of the named fields.
    """

    def __call__(self, batch: Any) -> Any:
        """Return the batch without the fields ``keys``."""
        for key in self.keys:
            find(batch, key, where="Exclude")
            batch = removed(batch, key)
        return batch


@dataclass(frozen=True)
class Cast:
    """Converts the dtypes of fields. A value that the new dtype cannot represent raises DataError; floats may be
    rounded.

    Args:
        dtypes: A dict from field to the dtype of the field in delivered batches.
        stored: A dict from field to the dtype of the field in stored rows; rows are converted when they are written.
        every: A dict from stored dtype to delivered dtype, such as ``{"float64": "float32"}``, for all fields that
            ``dtypes`` does not name, except fields of the sampler.

    Raises:
        ConfigError: A dtype is not numeric.
        MissingFieldError: The batch lacks one of the named fields.
        DataError: The new dtype cannot represent a value; the message names the field. (Raised only for NumPy arrays;
            torch tensors are converted without this check.)
    """

    dtypes: Mapping[FieldKey, npt.DTypeLike] = field(default_factory=dict)
    stored: Mapping[FieldKey, npt.DTypeLike] = field(default_factory=dict)
    every: Mapping[Any, npt.DTypeLike] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made: dict[str, dict[Any, np.dtype[Any]]] = {}
        for name in ("dtypes", "stored", "every"):
            given, where = dict(getattr(self, name)), f"Cast: {name}"
            if name == "every":
                given = {check_dtype(old, where=where): new for old, new in given.items()}
            else:
                check_keys(list(given), where=where)
            made[name] = {key: check_dtype(dtype, where=f"{where}[{key!r}]") for key, dtype in given.items()}
        vars(self).update(made)
        # Also by torch's names of dtypes, because torch's compiler does not support mappings from dtypes.
        vars(self)["_every"] = {str(old): new for old, new in made["every"].items()}

    def __call__(self, batch: Any) -> Any:
        """Return the batch in the delivered dtypes."""
        changes: dict[FieldKey, Any] = {
            key: _converted(find(batch, key, where="Cast"), dtype, key) for key, dtype in self.dtypes.items()
        }
        every: dict[str, npt.DTypeLike] = vars(self)["_every"]
        if every:
            for key, values in flatten(batch).items():
                old = str(values.dtype).removeprefix("torch.")
                if key not in changes and path_of(key)[0] not in BOOKKEEPING and old in every:
                    changes[key] = _converted(values, every[old], key)
        return replaced(batch, changes)

    def inverse(self, rows: Any) -> Any:
        """Return rows in the stored dtypes."""
        changes = {
            key: _converted(as_array(find(rows, key, where="Cast")), dtype, key) for key, dtype in self.stored.items()
        }
        return replaced(rows, changes)


def _converted(values: Any, dtype: npt.DTypeLike, key: FieldKey) -> Any:
    # Tensors come first, for code that torch compiles.
    if is_tensor(values) or not isinstance(values, np.ndarray | np.generic):
        xp = namespace(values)
        return xp.astype(values, getattr(xp, np.dtype(dtype).name))
    try:
        converted = convert(np.atleast_1d(values), np.dtype(dtype))
    except ValueError as error:
        raise DataError(f"Cast: {key_of(path_of(key))!r}: {error}") from error
    return converted.reshape(values.shape)


@dataclass(frozen=True)
class Apply:
    """Applies a function to each field, for example to scale, shift or clip values, or to normalise values with
    ``mouse_core.statistics``.

    Args:
        functions: For each field, a function that takes the field's array in a batch, ``[B, ...]`` or ``[B, S, ...]``,
            and returns an array with the same number of rows.
        stored: For each field, a function that converts the field of written rows: one row from ``append`` (without a
            first axis) or many rows from ``extend``.

    Raises:
        ConfigError: A name is invalid, or a function is not callable.
        MissingFieldError: The batch, or the written rows, lack the field.
        SchemaError: A function did not return an array, or returned another number of rows.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import Apply
        >>> Apply({"reward": lambda reward: reward.clip(-1, 1)})({"reward": np.array([0.5, 3.0, -7.0])})["reward"]
        array([ 0.5,  1. , -1. ])
    """

    functions: Mapping[FieldKey, Callable[[Array], Array]] = field(default_factory=dict)
    stored: Mapping[FieldKey, Callable[[Array], Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("functions", "stored"):
            given = dict(getattr(self, name))
            check_keys(list(given), where=f"Apply: {name}")
            for key, function in given.items():
                if not callable(function):
                    raise ConfigError(f"Apply: {name}[{key!r}]: expected a function, found {function!r:.80}")
            vars(self)[name] = given

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the changed fields."""
        return replaced(batch, {key: _applied(batch, key, function) for key, function in self.functions.items()})

    def inverse(self, rows: Any) -> Any:
        """Return the rows in the form in which they are stored."""
        return replaced(rows, {key: _applied(rows, key, function) for key, function in self.stored.items()})


def _applied(batch: Any, key: FieldKey, function: Callable[[Array], Array]) -> Array:
    values = as_array(find(batch, key, where="Apply"))
    made = function(values)
    if not hasattr(made, "shape") or tuple(made.shape[:1]) != tuple(values.shape[:1]):
        found = f"shape {list(made.shape)}" if hasattr(made, "shape") else f"{made!r:.60}"
        raise SchemaError(
            f"Apply: {key_of(path_of(key))!r}: expected an array of {list(values.shape[:1])} rows, found {found}"
        )
    return made


@dataclass(frozen=True, init=False)
class Concatenate:
    """Joins fields along their last axis, for example a position and a velocity into one vector.

    A field of one number for each step counts as a vector of length 1. The steps of a batch are given by the axes of
    ``index`` and ``mask``. In a batch without ``index`` and ``mask``, the field with the most axes counts as a vector
    for each step. If all fields have only one axis, each field counts as one number for each step.

    Args:
        keys: The fields to join, in this order; all must have the same dtype.
        to: The name of the new field.
        keep: Whether the batch also keeps the joined fields.

    Raises:
        ConfigError: Fewer than two fields are given, or a name is invalid.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: The fields differ in dtype, or in more than their last axis.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import Concatenate
        >>> batch = {"place": np.zeros((2, 3)), "speed": np.ones(2), "index": np.arange(2)}
        >>> Concatenate("place", "speed", to="obs")(batch)["obs"]
        array([[0., 0., 0., 1.],
               [0., 0., 0., 1.]])
    """

    keys: tuple[FieldKey, ...]
    to: FieldKey
    keep: bool

    def __init__(self, *keys: FieldKey, to: FieldKey, keep: bool = False) -> None:
        vars(self).update(keys=check_keys(keys, where="Concatenate"), to=to, keep=keep)
        check_keys((to,), where="Concatenate: to")
        if len(keys) < 2:
            raise ConfigError(f"Concatenate: expected at least two fields, found {list(keys)}")

    def __call__(self, batch: Any) -> Any:
        """Return the batch with the new field, ``[..., n]``."""
        parts = {key: as_array(find(batch, key, where="Concatenate")) for key in self.keys}
        first = parts[self.keys[0]]
        xp = namespace(first)
        known = [values.ndim for name in ("index", "mask") if (values := find_any(batch, name)) is not None]
        lead = max(known) if known else max(1, max(values.ndim for values in parts.values()) - 1)
        wide = [values[..., None] if values.ndim == lead else values for values in parts.values()]
        for key, values in zip(self.keys, wide, strict=True):
            if tuple(values.shape[:-1]) != tuple(wide[0].shape[:-1]) or values.dtype != first.dtype:
                front = [*wide[0].shape[:-1]]
                raise SchemaError(
                    f"Concatenate: {key!r}: expected {first.dtype} {front} in front of the last axis, as "
                    f"{self.keys[0]!r} has, found {values.dtype} {list(values.shape)}"
                )
        for key in () if self.keep else self.keys:
            batch = removed(batch, key)
        return replaced(batch, {self.to: xp.concat(wide, axis=-1)})


@dataclass(frozen=True, init=False)
class Pad:
    """Pads the rows of ragged fields to equal length, and adds the mask ``<name>_mask``.

    A field of arrays ``[length, ...]`` becomes one array ``[batch, L, ...]`` with a mask, bool ``[batch, L]``. After
    padding, a batch consists only of arrays, which ``jax.jit`` and most models require. Convert text to numbers first.

    Args:
        keys: Names of fields; if no name is given, all ragged fields are padded.
        length: The padded length L; None: the length of the longest row in the batch, so batches differ in shape.
        value: The value of padded elements.
        side: The padded side: "right", after the row, or "left", before the row, as for text generation.
        truncate: Whether longer rows are cut to ``length`` at the padded side; otherwise a longer row raises DataError.

    Raises:
        ConfigError: An argument is out of range.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: A field contains text, or arrays that differ in more than their length.
        DataError: A row is longer than ``length``, or the dtype cannot represent ``value``.
    """

    keys: tuple[FieldKey, ...]
    length: int | None
    value: float
    side: Literal["left", "right"]
    truncate: bool

    def __init__(
        self,
        *keys: FieldKey,
        length: int | None = None,
        value: float = 0,
        side: Literal["left", "right"] = "right",
        truncate: bool = False,
    ) -> None:
        if length is not None:
            check_count("Pad: length", length)
        if side not in ("left", "right"):
            raise ConfigError(f"Pad: expected the side 'left' or 'right', found {side!r}")
        vars(self).update(keys=check_keys(keys, where="Pad"), length=length, value=value, side=side, truncate=truncate)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with padded arrays and their masks."""
        keys = self.keys or tuple(key for key, values in flatten(batch).items() if _is_ragged(values))
        index = find_any(batch, "index")
        lead = 1 if index is None else index.ndim
        for key in keys:
            path = path_of(key)
            if not isinstance(path[-1], str):
                raise ConfigError(
                    f"Pad: expected a key whose last part is a string, because the mask is <name>_mask, found {key!r}"
                )
            values, mask = self._padded(find(batch, key, where="Pad"), key, lead)
            batch = replaced(batch, {path: values, (*path[:-1], f"{path[-1]}_mask"): mask})
        return batch

    def _padded(self, values: Any, key: FieldKey, lead: int) -> tuple[Any, Any]:
        if not is_varying(values):  # rows that are all of one length
            if getattr(values, "ndim", 0) <= lead:
                raise SchemaError(f"Pad: {key!r}: expected rows of arrays, found {values!r:.80}")
            values = object_array(list(values.reshape(-1, *values.shape[lead:])), tuple(values.shape[:lead]))
        rows = [self._cut(_array(row, key), key) for row in values.reshape(-1)]
        length = self.length or max((len(row) for row in rows), default=0)
        first = next((row for row in rows if len(row)), rows[0])
        filled = np.empty((len(rows), length, *first.shape[1:]), first.dtype)
        try:
            filled[...] = convert(np.array([self.value]), first.dtype)
        except ValueError as error:
            raise DataError(f"Pad: {key!r}: expected a value to pad with: {error}") from error
        mask = np.zeros(filled.shape[:2], np.bool_)
        for place, row in enumerate(rows):
            if row.shape[1:] != first.shape[1:] or row.dtype != first.dtype:
                shapes = [f"{row.dtype} {list(row.shape)}" for row in (first, row)]
                raise SchemaError(f"Pad: {key!r}: expected rows that differ only in length, found {shapes}")
            there = slice(length - len(row), None) if self.side == "left" else slice(len(row))
            filled[place, there], mask[place, there] = row, True
        return filled.reshape(*values.shape, *filled.shape[1:]), mask.reshape(*values.shape, length)

    def _cut(self, row: Any, key: FieldKey) -> Any:
        if self.length is None or len(row) <= self.length:
            return row
        if not self.truncate:
            raise DataError(f"Pad: {key!r}: expected rows of length up to {self.length}, found length {len(row)}")
        return row[-self.length :] if self.side == "left" else row[: self.length]


def _array(row: Any, key: FieldKey) -> Any:
    array = np.asarray(row)
    if array.dtype.kind in "OSU" or not array.ndim:
        raise SchemaError(f"Pad: {key!r}: expected rows of numbers, found {row!r:.60}; text must become numbers first")
    return array


def _is_ragged(values: Any) -> bool:
    return is_varying(values) and all(isinstance(row, np.ndarray) for row in values.reshape(-1))


Pack = Callable[[bytes], bytes]


@dataclass(frozen=True, init=False)
class Compress:
    """Stores each row of a field as compressed bytes, in any storage, and delivers the original arrays.

    The bytes of a row are packed when the row is written. The rows of a batch are unpacked when the transforms run. In
    a ``PrefetchBatchifier``, several threads can unpack batches in parallel, because zlib releases Python's global
    lock. When rows that are already bytes are written, such as rows from ``buffer[index]``, the bytes are stored
    unchanged.

    Args:
        keys: Fields of numbers, all with the same shape and dtype.
        shape: The shape of a row, such as ``(84, 84, 3)``.
        dtype: The dtype of the fields.
        level: The compression level of zlib, 0 to 9; 1 is the fastest level that compresses.
        pack, unpack: Functions that compress and decompress bytes instead of zlib, such as ``lz4.frame.compress`` and
            ``lz4.frame.decompress``.

    Raises:
        ConfigError: No field is given, the shape or dtype is invalid, the level is out of range, or only one of the two
            functions is given.
        MissingFieldError: The batch lacks one of the named fields.
        SchemaError: Written rows have another shape or dtype.
        DataError: The bytes do not contain a row of this shape and dtype.

    Example:
        >>> import numpy as np
        >>> from mouse_core.replay import ArrayStorage, Compress, ReplayBuffer
        >>> buffer = ReplayBuffer(ArrayStorage(100), transform=Compress("pixels", shape=(64, 64)), batch_size=4)
        >>> index = buffer.extend({"pixels": np.zeros((10, 64, 64), np.uint8)})
        >>> stored, batch = buffer[0], buffer.sample()
        >>> len(stored["pixels"]), batch["pixels"].shape
        (33, (4, 64, 64))
    """

    keys: tuple[FieldKey, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pack: Pack
    unpack: Pack

    def __init__(
        self,
        *keys: FieldKey,
        shape: Sequence[int],
        dtype: npt.DTypeLike = "uint8",
        level: int = 1,
        pack: Pack | None = None,
        unpack: Pack | None = None,
    ) -> None:
        if not keys:
            raise ConfigError("Compress: expected at least one field, found none")
        if not isinstance(shape, tuple | list) or not all(is_whole(size) and size > 0 for size in shape):
            raise ConfigError(f"Compress: shape: expected positive integers, found {shape!r:.80}")
        if not is_whole(level) or not 0 <= level <= 9:
            raise ConfigError(f"Compress: level: expected 0 to 9, found {level!r}")
        if (pack is None) != (unpack is None) or not all(callable(one) for one in (pack, unpack) if one is not None):
            raise ConfigError(f"Compress: expected functions to pack and to unpack, found {pack!r} and {unpack!r}")
        vars(self).update(keys=check_keys(keys, where="Compress"), shape=tuple(map(int, shape)))
        vars(self).update(dtype=check_dtype(dtype, where="Compress: dtype"))
        vars(self).update(pack=pack or partial(zlib.compress, level=int(level)), unpack=unpack or zlib.decompress)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with arrays in place of bytes."""
        return replaced(batch, {key: self._unpacked(find(batch, key, where="Compress"), key) for key in self.keys})

    def inverse(self, rows: Any) -> Any:
        """Return rows with bytes in place of arrays."""
        return replaced(rows, {key: self._packed(find(rows, key, where="Compress"), key) for key in self.keys})

    def _packed(self, values: Any, key: FieldKey) -> Any:
        if isinstance(values, bytes) or _holds_bytes(values):
            return values
        array = on_host(values)
        lead = array.ndim - len(self.shape)
        if lead < 0 or tuple(array.shape[lead:]) != self.shape or array.dtype != self.dtype:
            raise SchemaError(
                f"Compress: {_shown(key)}: expected rows of {self.dtype} {list(self.shape)}, found {array.dtype} "
                f"{list(array.shape)}"
            )
        rows = np.ascontiguousarray(array).reshape(-1, *self.shape)
        packed = [self.pack(row.tobytes()) for row in rows]
        return packed[0] if not lead else object_array(packed, tuple(array.shape[:lead]))

    def _unpacked(self, values: Any, key: FieldKey) -> npt.NDArray[Any]:
        if not _holds_bytes(values):
            raise SchemaError(f"Compress: {_shown(key)}: expected rows of bytes, found {values!r:.60}")
        given = np.asarray(values, object) if not isinstance(values, list) else object_array(values, (len(values),))
        made = np.empty((given.size, *self.shape), self.dtype)
        size = math.prod(self.shape) * self.dtype.itemsize
        for place, packed in enumerate(given.reshape(-1)):
            try:
                row = self.unpack(bytes(packed))
            except Exception as error:
                raise DataError(f"Compress: {_shown(key)}: row {place}: expected packed bytes: {error}") from error
            if len(row) != size:
                raise DataError(f"Compress: {_shown(key)}: row {place}: expected {size} bytes, found {len(row)}")
            made[place] = np.frombuffer(row, self.dtype).reshape(self.shape)
        return made.reshape(*given.shape, *self.shape)


def _holds_bytes(values: Any) -> bool:
    """Whether the values are rows of bytes: a list of bytes, or an array of objects."""
    if isinstance(values, list):
        return bool(values) and isinstance(values[0], bytes)
    dtype = getattr(values, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.hasobject and values.size > 0 and isinstance(values.flat[0], bytes)


def _shown(key: FieldKey) -> str:
    return repr(key_of(path_of(key)))
