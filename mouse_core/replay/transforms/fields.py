"""Rename, Select, Exclude, Cast, Apply and Concatenate: what fields there are, in which dtypes, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import convert, is_tensor, namespace
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.nested import find, flatten, key_of, path_of
from mouse_core.replay.protocols import FieldKey
from mouse_core.replay.transforms._fields import (
    BOOKKEEPING,
    as_array,
    check_keys,
    find_any,
    leaves,
    only,
    removed,
    replaced,
)
from mouse_core.spec import check_dtype

Array = Any


@dataclass(frozen=True)
class Rename:
    """Renames fields, also from one level to another; on the way in it renames them back.

    Args:
        names: New names by the names that are stored: ``{"obs": "observation", "next_obs": ("next", "observation")}``.

    Raises:
        ConfigError: Two fields that would have one name.
        MissingFieldError: Called with a batch that lacks a field.
        SchemaError: Called with a batch that has a field of a new name already.
    """

    names: Mapping[FieldKey, FieldKey]

    def __post_init__(self) -> None:
        names = dict(self.names)
        check_keys([*names, *names.values()], where="Rename")
        if len({path_of(new) for new in names.values()}) != len(names):
            raise ConfigError(f"Rename: expected a name of its own for each field, found {names}")
        vars(self).update(names=MappingProxyType(names))

    def __call__(self, batch: Any) -> Any:
        """The batch with the new names."""
        return _renamed(batch, {old: (new, find(batch, old, where="Rename")) for old, new in self.names.items()})

    def inverse(self, rows: Any) -> Any:
        """Rows with the names that are stored; those that have them already stay, and keep fields of the new names."""
        moved = {path_of(new) for new in self.names.values()}
        lacking = {new: old for old, new in self.names.items() if path_of(old) in moved or find_any(rows, old) is None}
        found = {new: (old, find_any(rows, new)) for new, old in lacking.items()}
        return _renamed(rows, {new: pair for new, pair in found.items() if pair[1] is not None})

    def __reduce__(self) -> tuple[Any, ...]:
        return Rename, (dict(self.names),)


def _renamed(batch: Any, moves: Mapping[FieldKey, tuple[FieldKey, Any]]) -> Any:
    for old in moves:
        batch = removed(batch, old)
    for old, (new, values) in moves.items():
        if find_any(batch, new) is not None:
            raise SchemaError(
                f"Rename: expected no field {new!r} to rename {old!r} to, found one; Exclude({new!r}) before this "
                "leaves it out"
            )
        batch = replaced(batch, {new: values})
    return batch


@dataclass(frozen=True, init=False)
class _OfFields:
    """A transform of some fields, which are named one by one."""

    keys: tuple[FieldKey, ...]

    def __init__(self, *keys: FieldKey) -> None:
        vars(self).update(keys=check_keys(keys, where=type(self).__name__))


class Select(_OfFields):
    """Keeps some fields, and what the sampler added (index, mask, priority_weight, traj_id, slice_id, buffer_ids).

    Args:
        keys: Names of fields, or of nodes with all fields below.

    Raises:
        ConfigError: A name that is none.
        MissingFieldError: Called with a batch that lacks a field.
    """

    def __call__(self, batch: Any) -> Any:
        """The batch with these fields, in the order of the batch."""
        for key in self.keys:
            find(batch, key, where="Select")
        wanted = [path_of(key) for key in self.keys] + [(name,) for name in BOOKKEEPING]
        kept = {path: values for path, values in leaves(batch) if any(path[: len(start)] == start for start in wanted)}
        return only(batch, kept) or {}


class Exclude(_OfFields):
    """Leaves fields out.

    Args:
        keys: Names of fields, or of nodes with all fields below.

    Raises:
        ConfigError: A name that is none.
        MissingFieldError: Called with a batch that lacks a field.
    """

    def __call__(self, batch: Any) -> Any:
        """The batch without these fields."""
        for key in self.keys:
            find(batch, key, where="Exclude")
            batch = removed(batch, key)
        return batch


@dataclass(frozen=True)
class Cast:
    """Converts dtypes. A value that does not fit is an error, never a silent wrap; floats may be rounded.

    Args:
        dtypes: What to deliver, by field.
        stored: What to store, by field: rows are converted on their way in.
        every: What to deliver instead of a dtype, for all fields that ``dtypes`` does not name, but for those of the
            sampler: ``{"float64": "float32"}``.

    Raises:
        ConfigError: Something that is no dtype of numbers.
        MissingFieldError: Called with a batch that lacks a field.
        DataError: A value that does not fit; the message names the field. (NumPy arrays; torch converts as it does.)
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
        vars(self).update({name: MappingProxyType(dtypes) for name, dtypes in made.items()})
        # By what torch calls them, too, whose compiler follows no mapping from dtypes.
        vars(self)["_every"] = {str(old): new for old, new in made["every"].items()}

    def __call__(self, batch: Any) -> Any:
        """The batch in the dtypes to deliver."""
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
        """Rows in the dtypes to store."""
        changes = {
            key: _converted(as_array(find(rows, key, where="Cast")), dtype, key) for key, dtype in self.stored.items()
        }
        return replaced(rows, changes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Cast, (dict(self.dtypes), dict(self.stored), dict(self.every))


def _converted(values: Any, dtype: npt.DTypeLike, key: FieldKey) -> Any:
    # What torch compiles knows of tensors first.
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
    """Changes fields by a function each: a scale, an offset, a limit, or what ``mouse_core.statistics`` normalises by.

    Args:
        functions: By field: from the array of a batch, ``[B, ...]`` or ``[B, S, ...]``, to one with as many rows.
        stored: By field: what is done to rows on their way in, to one of ``append`` (without a first axis) and to many
            of ``extend`` alike.

    Raises:
        ConfigError: A name that is none, or something that cannot be called.
        MissingFieldError: Called with a batch, or rows, without the field.
        SchemaError: A function gave no array, or another number of rows.

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
            vars(self)[name] = MappingProxyType(given)

    def __call__(self, batch: Any) -> Any:
        """The batch with these fields changed."""
        return replaced(batch, {key: _applied(batch, key, function) for key, function in self.functions.items()})

    def inverse(self, rows: Any) -> Any:
        """Rows as they are stored."""
        return replaced(rows, {key: _applied(rows, key, function) for key, function in self.stored.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return Apply, (dict(self.functions), dict(self.stored))


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
    """Joins fields along their last axis into one, as a position and a velocity become one vector.

    A field of one number a step counts as a vector of one. It knows steps by the axes of ``index`` and ``mask``; in a
    batch without them the field with the most axes is of vectors, and where all have a single axis, of numbers.

    Args:
        keys: The fields, in this order, of one dtype.
        to: The name of the new one.
        keep: Whether the fields stay beside it.

    Raises:
        ConfigError: Fewer than two fields, or a name that is none.
        MissingFieldError: Called with a batch that lacks a field.
        SchemaError: Called with fields that differ in dtype, or in more than their last axis.

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
        """The batch with the new field, ``[..., n]``."""
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
