"""Where episodes end in a batch of slices, and which steps are there at all."""

from __future__ import annotations

from math import prod
from typing import Any

from mouse_core.dtypes import may_look, namespace
from mouse_core.errors import DataError, MissingFieldError, SchemaError
from mouse_core.nested import find, key_of, path_of
from mouse_core.replay.protocols import TRAJ_KEYS, FieldKey
from mouse_core.replay.transforms._fields import device_of, find_any, leaves, place_of, steps_of

Array = Any

ALIVE, TERMINAL, TRUNCATED = 0, 1, 2


def flat_flags(values: Array, steps: tuple[int, int], *, where: str, key: FieldKey) -> Array:
    """A field of one value a step (``[N, T]`` or ``[N, T, 1]``) as ``[N, T]``."""
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
    """How each step ends its episode, int8 ``[N, T]``: 0 not at all, 1 at a terminal state, 2 cut short.

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
    """Which steps are there, bool ``[N, T]``: those of the mask, or all."""
    xp = namespace(codes)
    found = find_any(batch, mask)
    if found is None:
        return xp.ones(codes.shape, dtype=xp.bool, device=device_of(codes))
    return flat_flags(found, tuple(codes.shape), where=where, key=mask) != 0


def beside(flags: Array, values: Array) -> Array:
    """Flags ``[N, T]`` with as many further axes as ``values`` have."""
    return flags.reshape((*flags.shape, *[1] * (values.ndim - 2)))
