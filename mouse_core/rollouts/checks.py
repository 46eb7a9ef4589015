"""Checks of what is given to a rollout storage, over the array API."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mouse_core.dtypes import is_ml_float, number_kind
from mouse_core.errors import ConfigError, DataError, MissingFieldError, SchemaError
from mouse_core.rollouts.fields import COLUMNS, RolloutField

Array = Any
_KINDS = ("bool", "integral", "real floating")
_STORED_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2}


def drop_stand_ins(given: dict[str, Any], held: Container[str]) -> None:
    """Forget privileged observations that are the observations, where a storage has no field for them.

    Training code without privileged observations gives its observations twice; the critic then sees those.
    """
    for name in ("observations", "reference_observations", "reference_observations_mask"):
        privileged = f"privileged_{name}"
        if privileged not in held and name in given and given.get(privileged) is given[name]:
            del given[privileged]


def check_names(given: Mapping[str, Any], fields: Mapping[str, RolloutField]) -> None:
    """Errors for names that are not there, and for required fields that are missing."""
    masks = [f"{name}_mask" for name, field in fields.items() if field.mask]
    for name in given:
        if name not in fields and name not in masks and name != "hidden_states":
            raise SchemaError(f"add_transitions: expected fields {[*fields, *masks]}, found also {name!r}")
    missing = [name for name, field in fields.items() if name not in given and not field.optional]
    if missing:
        raise MissingFieldError(
            f"add_transitions: expected fields {list(fields)}, found {list(given)}: {missing} missing"
        )


def split_mask(name: str, value: Any, mask: Any) -> tuple[Any, Any]:
    """The data and the mask of a field that has one, which may come together, as ``(data, mask)``."""
    if isinstance(value, tuple) and len(value) == 2:
        if mask is not None:
            raise SchemaError(f"{name}: expected one mask, found {name}_mask beside (data, mask)")
        return value
    if value is None and mask is not None:
        raise MissingFieldError(f"add_transitions: expected {name} with {name}_mask, found the mask alone")
    return value, mask


def check_shape(name: str, value: Array, expected: tuple[int, ...]) -> Array:
    """``value`` in its shape; ``[..., 1]`` may come as ``[...]``."""
    if tuple(value.shape) == expected:
        return value
    column = len(expected) > 1 and expected[-1] == 1
    if column and tuple(value.shape) == expected[:-1]:
        return array_namespace(value).reshape(value, expected)
    also = f" or {list(expected[:-1])}" if column else ""
    raise SchemaError(f"{name}: expected shape {list(expected)}{also}, found {list(value.shape)}")


def is_of(value: Array, kind: str | tuple[str, ...]) -> bool:
    """Whether an array is of a kind that the array API names; NumPy does not know what bfloat16 is."""
    if isinstance(value.dtype, np.dtype) and is_ml_float(value.dtype):
        return "real floating" in kind
    return bool(array_namespace(value).isdtype(value.dtype, kind))


def check_dtype(name: str, value: Array, dtype: np.dtype[Any], *, on_host: bool) -> None:
    """Errors for values that a dtype cannot hold: fractions in integers, and, on the host, numbers too large."""
    xp = array_namespace(value)
    kind = next((place for place, kind in enumerate(_KINDS) if is_of(value, kind)), len(_KINDS))
    # Done codes may be of any kind, as long as they are 0, 1 or 2.
    if name != "dones" and kind > _STORED_KINDS[number_kind(dtype)]:
        raise SchemaError(f"{name}: expected {dtype}, found {value.dtype}")
    if kind == 1 and dtype.kind in "iu" and on_host and 0 not in value.shape:
        bounds, least, most = np.iinfo(dtype), int(xp.min(value)), int(xp.max(value))
        if least < bounds.min or most > bounds.max:
            found = least if least < bounds.min else most
            raise DataError(f"{name}: expected {bounds.min}..{bounds.max} ({dtype}), found {found}")


def check_values(name: str, value: Array, *, largest_done: int = 2, step: int | None = None) -> None:
    """DataError for numbers that are not finite in the fields that returns are made of, and for unknown done codes."""
    if name not in COLUMNS:
        return
    xp = array_namespace(value)
    if name == "dones":
        if not xp.isdtype(value.dtype, "bool"):
            wanted = "0 (alive), 1 (terminal) or 2 (truncated)" if largest_done == 2 else "0 or 1"
            refuse(name, value, (value == 0) | (value == 1) | (value == largest_done), wanted, step)
        return
    refuse(name, value, xp.isfinite(value), "finite numbers", step)


def refuse(name: str, value: Array, good: Array, wanted: str, step: int | None = None) -> None:
    """DataError that names the first value that is not good; ``[N, 1]`` of one step, or ``[T, N, 1]``."""
    xp = array_namespace(good)
    if bool(xp.all(good)):
        return
    place = int(xp.argmin(xp.astype(xp.reshape(good, (-1,)), xp.uint8)))
    found = xp.reshape(value, (-1,))[place]
    found = found.item() if hasattr(found, "item") else found
    envs = value.shape[-2]
    row = place // envs if step is None and value.ndim == 3 else step
    where = f"environment {place % envs}" + ("" if row is None else f", row {row}")
    raise DataError(f"{name}: expected {wanted}, found {found} at {where}")


def check_ends(dones: Array, last_values: Array, time_outs: Array | None, final_values: Array | None) -> None:
    """See that what returns are made of at the ends of episodes and of the rollout is there, and finite.

    Raises:
        ConfigError: Truncated episodes without the values of their final observations.
        DataError: A time-out where no episode ends, or a value that is needed and not finite.
    """
    xp = array_namespace(dones)
    if time_outs is None or final_values is None:
        truncated = dones == 2
        if bool(xp.any(truncated)):
            row, env = divmod(int(xp.argmax(xp.astype(xp.reshape(truncated, (-1,)), xp.uint8))), dones.shape[1])
            raise ConfigError(
                "compute_returns: expected time_outs and final_values, as dones say 2 (truncated) at "
                f"environment {env}, row {row}; add 1 for ends that are to count as terminations"
            )
    else:
        refuse("time_outs", time_outs, ~time_outs | (dones != 0), "one only where dones say that an episode ends")
        refuse("final_values", final_values, ~time_outs | xp.isfinite(final_values), "finite numbers at time_outs")
    refuse("last_values", last_values, (dones[-1] != 0) | xp.isfinite(last_values), "finite numbers")


def check_unit(where: str, value: Any) -> float:
    """``value`` as a float, or ConfigError if it is not a number from 0 to 1."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise ConfigError(f"{where}: expected a number from 0 to 1, found {value!r}")
    return number
