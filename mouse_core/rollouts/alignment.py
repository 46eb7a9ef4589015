"""The transitions that returns are made of: where their episodes end, and what the rows lead to."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_jax_array

from mouse_core.dtypes import RowError, is_tensor, may_look, namespace, refuse_hidden
from mouse_core.errors import ConfigError, DataError, SchemaError

Array = Any


class Outgoing(NamedTuple):
    """Rows of alignment "arrived" as arguments for the functions of this module, one row less.

    Attributes:
        rewards, values, dones, last_values, time_outs, final_values: As in ``gae``.
        valid: Whether a row is a transition. The row of a final observation is none: what is computed for it means
            nothing, and reaches no other row.
    """

    rewards: Array
    values: Array
    dones: Array
    last_values: Array
    time_outs: Array
    final_values: Array
    valid: Array


def outgoing(rewards: Array, values: Array, dones: Array) -> Outgoing:
    """Rows of alignment "arrived", as stores hold them, as transitions.

    The reward and done of row t+1 belong to the transition that leaves row t: three rows that were reached with rewards
    ``[0, 1, 2]`` are two transitions with rewards ``[1, 2]``. As final observations are rows there, truncated episodes
    need nothing else: ``transitions = outgoing(...)._asdict(); valid = transitions.pop("valid");
    gae(**transitions, discount=0.99, lam=0.95)``.

    Args:
        rewards: Floating ``[T+1, ...]``: the reward with which row t was reached.
        values: V of the observation in row t, ``[T+1, ...]``.
        dones: 0 alive, 1 terminal, 2 truncated, ``[T+1, ...]``: whether row t is final.

    Returns:
        Transitions ``[T, ...]``.

    Raises:
        SchemaError: Shapes that differ, or fewer than two rows.
    """
    check_array("rewards", rewards)
    check_rows("values", values, rewards.shape)
    check_rows("dones", dones, rewards.shape)
    if not rewards.shape or rewards.shape[0] < 2:
        raise SchemaError(f"outgoing: rewards: expected at least two rows, found shape {tuple(rewards.shape)}")
    return Outgoing(
        rewards=rewards[1:],
        values=values[:-1],
        dones=dones[1:] != 0,
        last_values=values[-1],
        time_outs=dones[1:] == 2,
        final_values=values[1:],
        valid=dones[:-1] == 0,
    )


def following_values(
    rewards: Array, values: Array, dones: Array, last_values: Array, time_outs: Array | None, final_values: Array | None
) -> tuple[Array, Array]:
    """Where episodes end, and V', the value of what each row leads to.

    Three rows, the second of which ends an episode: with values ``[5, 6, 7]``, dones ``[0, 1, 0]`` and last value 8, V'
    is ``[6, 0, 8]``, the next row's value where that is of the same episode. If the end is a time-out, and its final
    observation is worth 9, V' is ``[6, 9, 8]``. If its code is 2 (truncated), and it is no time-out, nothing says what
    its final observation is worth: an error, or, where the codes cannot be looked at, ``[6, NaN, 8]``.

    Args:
        rewards, values, dones, last_values, time_outs, final_values: As in ``gae``.

    Returns:
        Bool ``[T, ...]``, and V' in the dtype of the values, ``[T, ...]``.

    Raises:
        SchemaError, ConfigError: As ``gae``.
    """
    check_array("rewards", rewards)
    if not rewards.shape or rewards.shape[0] < 1:
        raise SchemaError(f"rewards: expected at least one row, found shape {tuple(rewards.shape)}")
    xp = namespace(rewards)
    for name, given in (("rewards", rewards), ("values", values)):
        check_array(name, given)
        if not xp.isdtype(given.dtype, "real floating"):
            raise SchemaError(f"{name}: expected floating numbers, found {given.dtype}")
    check_rows("values", values, rewards.shape)
    check_rows("dones", dones, rewards.shape)
    check_rows("last_values", last_values, rewards.shape[1:])
    if not xp.isdtype(dones.dtype, ("bool", "integral", "real floating")):
        raise SchemaError(f"dones: expected flags or codes, found {dones.dtype}")
    check_truncation(time_outs, final_values)
    ended = dones != 0
    following = _put(xp.concat([values[1:], last_values[None]]), ended, 0.0)
    truncated = None
    if time_outs is not None and final_values is not None:
        check_rows("time_outs", time_outs, rewards.shape)
        check_rows("final_values", final_values, rewards.shape)
        truncated = xp.astype(time_outs, xp.bool, copy=False)
        ended = ended | truncated
        following = _put(following, truncated, final_values)
    if xp.isdtype(dones.dtype, "bool"):
        return ended, following
    unknown = dones == 2 if truncated is None else (dones == 2) & ~truncated
    if _is_known(unknown):
        check_codes(unknown, time_outs, where="returns")
        return ended, following
    return ended, _put(following, unknown, float("nan"))


def check_codes(unknown: Array, time_outs: Array | None, *, where: str) -> None:
    """Check that the caller gives the value of every final observation of a truncated episode.

    Args:
        unknown: Which rows have code 2 (truncated) in ``dones`` and are no time-outs, bool ``[T, ...]``.
        time_outs: As in ``gae``.
        where: The function, for the message.

    Raises:
        ConfigError: A row is unknown.
    """
    xp = namespace(unknown)
    if not bool(xp.any(unknown)):
        return
    first = int(xp.argmax(xp.astype(xp.reshape(unknown, (-1,)), xp.uint8)))
    row, *others = (int(number) for number in np.unravel_index(first, tuple(unknown.shape)))
    # The last of three axes, [T, N, 1], is the value's own.
    others = others[:-1] if len(others) > 1 and unknown.shape[-1] == 1 else others
    place = f"environment {others[0] if len(others) == 1 else others}, row {row}" if others else f"row {row}"
    wanted = "time_outs and final_values" if time_outs is None else "time_outs to be true"
    raise ConfigError(
        f"{where}: expected {wanted}, as dones say 2 (truncated) at {place}; add 1 for ends that are to count as "
        "terminations"
    )


def check_truncation(time_outs: Array | None, final_values: Array | None) -> None:
    """ConfigError if only one of the two is given."""
    if (time_outs is None) != (final_values is None):
        there, missing = ("final_values", "time_outs") if time_outs is None else ("time_outs", "final_values")
        raise ConfigError(f"{missing}: expected them together with {there}, found None")


def check_array(name: str, values: Array) -> None:
    """Raise SchemaError if ``values`` are no array, and DataError if a mask hides one of them."""
    if not hasattr(values, "shape"):
        raise SchemaError(f"{name}: expected an array, found {type(values).__name__}")
    try:
        refuse_hidden(values)
    except RowError as error:
        raise DataError(f"{name}, row {error.row}: {error}") from error


def check_factors(rewards: Array, **factors: float | Array) -> None:
    """Raise SchemaError unless each of ``factors``, as ``discount``, is a number or has the shape of the rewards.

    NumPy would repeat factors ``[T, N, 1]`` along another axis, and factors ``[N]`` along time.
    """
    for name, factor in factors.items():
        if getattr(factor, "shape", ()):
            check_rows(name, factor, rewards.shape)


def check_rows(name: str, values: Array, expected: tuple[int, ...]) -> None:
    """SchemaError if ``values`` are of another shape than the rewards say; also raises as ``check_array``."""
    check_array(name, values)
    if tuple(values.shape) != tuple(expected):
        raise SchemaError(f"{name}: expected shape {tuple(expected)} as rewards say, found {tuple(values.shape)}")


def _is_known(values: Array) -> bool:
    """Whether looking at values waits for no device, and no framework traces them."""
    if may_look(values):
        return True
    if is_tensor(values) or not is_jax_array(values):  # what torch compiles cannot ask array_api_compat
        return False
    traced = isinstance(values, sys.modules["jax"].core.Tracer)
    return not traced and all(device.platform == "cpu" for device in values.devices())


def _put(values: Array, where: Array, others: Array | float) -> Array:
    """``others`` where ``where``, else ``values``, which nobody else holds.

    Chosen, not multiplied: what is not chosen may be anything, also NaN.
    """
    if isinstance(values, np.ndarray):
        # In place: fresh memory of this size costs more than what is done with it.
        np.copyto(values, others, where=where, casting="same_kind")
        return values
    xp = namespace(values)
    return xp.where(where, xp.full_like(values, others) if isinstance(others, float) else others, values)
