"""Fields of nested batches: finding, replacing, removing them, and where episodes end in slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import device

from mouse_core.dtypes import is_tensor, may_look, namespace
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.nested import child_of, children_of, find, flatten, is_node, key_of, path_of, rebuilt
from mouse_core.replay.protocols import TRAJ_KEYS, FieldKey
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
    """Return a field, or a node above fields, or None."""
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
    """Return the part of a tree at ``path`` that has these fields, nested as it is; None if it has none.

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
    """Return the key of a field of a transition: under ``next`` if it exists there, or else as it is named."""
    inside = (NEXT, *path_of(key))
    return key if find_any(batch, inside) is None else inside


def steps_of(values: Array, *, where: str, key: FieldKey) -> tuple[int, int]:
    """Return the first two axes of a field of slices: their number and their length."""
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


ALIVE, TERMINAL, TRUNCATED = 0, 1, 2


def flat_flags(values: Array, steps: tuple[int, int], *, where: str, key: FieldKey) -> Array:
    """Return a field of one value a step (``[N, T]`` or ``[N, T, 1]``) as ``[N, T]``."""
    if tuple(values.shape[:2]) != steps or prod(values.shape[2:]) != 1:
        raise SchemaError(f"{where}: expected {key!r} of shape {[*steps]}, found {list(values.shape)}")
    return values.reshape(steps)


def end_fields(batch: Any, done: FieldKey) -> dict[str, FieldKey]:
    """The fields that say how an episode ends: ``done``, and ``terminated`` and ``truncated`` beside it."""
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
    """Return how each step ends its episode, int8 ``[N, T]``: 0 not at all, 1 at a terminal state, 2 cut short.

    ``done`` holds these codes, or is boolean. Where ``terminated`` and ``truncated`` stand beside it, they say which of
    the two a boolean ``done`` means (a step that is both is terminal), and ``done`` may be missing. Where the number of
    the trajectory changes behind a step (``TRAJ_KEYS``, or the ``traj_id`` of slices), it was cut short there.

    Raises:
        MissingFieldError: Neither one of the three nor a number of trajectories is there.
        SchemaError: One of the three is not a single value a step.
        DataError: Another code; arrays on a device, of JAX, or in what torch compiles are not looked at.
    """
    fields = end_fields(batch, done)
    if not fields:
        codes = _cut_short(batch, None)
        if codes is not None:
            return codes
        there = [key_of(path) for path, _ in leaves(batch)]
        raise MissingFieldError(
            f"{where}: expected a field {done!r}, or 'terminated' and 'truncated', or the number of a trajectory, "
            f"found {there}"
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
        elif "terminated" in flags:  # the two flags decide; done alone, where neither is set, is an end by force
            codes = xp.where(ended, xp.full_like(codes, TRUNCATED), codes)
    if "truncated" in flags:
        codes = xp.where(flags["truncated"] != 0, xp.full_like(codes, TRUNCATED), codes)
    if "terminated" in flags:
        codes = xp.where(flags["terminated"] != 0, xp.full_like(codes, TERMINAL), codes)
    return _cut_short(batch, codes)


def _check_codes(done: Array, key: FieldKey, *, where: str) -> None:
    """Raise DataError for a code of one's own, which would be taken for a terminal state."""
    if not may_look(done) or 0 in done.shape:
        return
    for code in (done.min().item(), done.max().item()):
        if not ALIVE <= code <= TRUNCATED:
            raise DataError(
                f"{where}: {key!r}: expected 0 (alive), 1 (terminal) and 2 (truncated), found {code}; a function "
                "before this transform says which of them it is"
            )


def _cut_short(batch: Any, codes: Array | None) -> Array | None:
    """The codes with an end where the number of the trajectory changes; None: without codes, and no number is there."""
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
    """Return which steps exist, bool ``[N, T]``: those of the mask, or all."""
    xp = namespace(codes)
    found = find_any(batch, mask)
    if found is None:
        return xp.ones(codes.shape, dtype=xp.bool, device=device_of(codes))
    return flat_flags(found, tuple(codes.shape), where=where, key=mask) != 0


def beside(flags: Array, values: Array) -> Array:
    """Flags ``[N, T]`` with as many further axes as ``values`` have."""
    return flags.reshape((*flags.shape, *[1] * (values.ndim - 2)))
