"""Episodes within a rollout: where they start, split and padded, and what came before a row.

Pure functions over the array API. Rollouts are time-major, ``[T, N, ...]``; row t of environment n has the flat number
``t * N + n``. Row t ends an episode where ``dones`` is not 0, and row t+1 then starts the next one. Trajectories are
the pieces of episodes that lie in a rollout, environment by environment, each in the order of time.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import is_torch_array

from mouse_core.dtypes import namespace
from mouse_core.errors import ConfigError, SchemaError

Array = Any


def episode_starts(dones: Array) -> Array:
    """Whether a row is the first of a trajectory.

    Args:
        dones: Not 0 where an episode ends, ``[T, N]`` or ``[T, N, 1]`` of any dtype.

    Returns:
        Bool ``[T, N]``; the first row of a rollout is always a start.

    Raises:
        SchemaError: Another shape, or no row.
    """
    if dones.ndim == 3 and dones.shape[2] == 1:
        dones = dones[:, :, 0]
    if dones.ndim != 2 or 0 in dones.shape:
        raise SchemaError(f"dones: expected [T, N] or [T, N, 1], found shape {tuple(dones.shape)}")
    xp = namespace(dones)
    ended = dones != 0
    return xp.concat([xp.ones_like(ended[:1]), ended[:-1]])


def trajectory_rows(dones: Array, *, num_trajectories: int | None = None) -> tuple[Array, Array]:
    """Which rows make up which trajectory.

    Args:
        dones: As in ``episode_starts``.
        num_trajectories: K. By default as many as there are, which under ``jax.jit`` cannot be known: there, a number
            that is large enough (``T * N`` always is); the trajectories beyond those that exist are empty.

    Returns:
        Flat row numbers ``[T, K]``, of any row beyond a trajectory's end, and bool ``[T, K]``, whether there is a row.

    Raises:
        SchemaError: As ``episode_starts``; also, outside of ``jax.jit``, a number that is too small.
        ConfigError: No number under ``jax.jit``.
    """
    starts = episode_starts(dones)
    xp = namespace(starts)
    steps, envs = starts.shape
    by_env = xp.reshape(xp.permute_dims(starts, (1, 0)), (-1,))
    place = _arange(xp, starts, steps)
    # The number of the trajectory to which each row belongs, rows of one environment after those of another.
    number = xp.cumulative_sum(xp.astype(by_env, place.dtype)) - 1
    if num_trajectories is None:
        num_trajectories = _as_known("num_trajectories", number[-1]) + 1
    else:
        _check_number(number, num_trajectories)
    bounds = xp.searchsorted(number, _arange(xp, starts, num_trajectories + 1))
    first, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    rows = xp.clip(first[None, :] + place[:, None], max=steps * envs - 1)
    return rows % steps * envs + rows // steps, place[:, None] < lengths[None, :]


def take_rows(values: Array, rows: Array, masks: Array) -> Array:
    """The rows of one field that ``trajectory_rows`` or ``history_rows`` name.

    Args:
        values: ``[T, N, ...]``.
        rows: Flat row numbers ``[A, B]``.
        masks: Whether there is such a row, bool ``[A, B]``.

    Returns:
        ``[A, B, ...]``, 0 (or False) where there is no row.
    """
    xp = namespace(values)
    flat = xp.reshape(values, (-1, *values.shape[2:]))
    taken = xp.reshape(xp.take(flat, xp.reshape(rows, (-1,)), axis=0), (*rows.shape, *values.shape[2:]))
    return xp.where(_beside(xp, masks, taken), taken, xp.zeros_like(taken[:1]))


def split_and_pad_trajectories(
    values: Array, dones: Array, *, num_trajectories: int | None = None
) -> tuple[Array, Array]:
    """Split a rollout where episodes end, and pad the trajectories to the length of the rollout.

    Args:
        values: ``[T, N, ...]``.
        dones: As in ``episode_starts``.
        num_trajectories: As in ``trajectory_rows``.

    Returns:
        Trajectories ``[T, K, ...]``, 0 beyond their ends, and masks bool ``[T, K]``, True where there is a row.

    Raises:
        SchemaError, ConfigError: Shapes that do not go together; as ``trajectory_rows``.
    """
    if tuple(values.shape[:2]) != tuple(dones.shape[:2]):
        raise SchemaError(f"values: expected [T, N, ...] as dones {tuple(dones.shape)}, found {tuple(values.shape)}")
    rows, masks = trajectory_rows(dones, num_trajectories=num_trajectories)
    return take_rows(values, rows, masks), masks


def unpad_trajectories(padded: Array, masks: Array, *, num_envs: int | None = None) -> Array:
    """Put trajectories together again: the inverse of ``split_and_pad_trajectories``.

    Args:
        padded: ``[T, K, ...]``.
        masks: Bool ``[T, K]``.
        num_envs: N. By default as many as fit, which under ``jax.jit`` cannot be known and must be given.

    Returns:
        ``[T, N, ...]``.

    Raises:
        SchemaError: Shapes that do not go together, or, outside of ``jax.jit``, a number of rows that is not T * N.
        ConfigError: No number under ``jax.jit``.
    """
    if tuple(padded.shape[:2]) != tuple(masks.shape):
        raise SchemaError(f"padded: expected [T, K, ...] as masks {tuple(masks.shape)}, found {tuple(padded.shape)}")
    xp = namespace(padded)
    steps, count = masks.shape
    place = _arange(xp, padded, steps)
    ends = xp.cumulative_sum(xp.sum(xp.astype(masks, place.dtype), axis=0))
    if num_envs is None:
        total = _as_known("num_envs", ends[-1])
        num_envs = total // steps
        if num_envs * steps != total:
            raise SchemaError(f"masks: expected a multiple of {steps} rows, the length of a rollout, found {total}")
    rows = xp.reshape(_arange(xp, padded, num_envs)[None, :] * steps + place[:, None], (-1,))
    number = xp.clip(xp.searchsorted(ends, rows, side="right"), max=count - 1)
    # How far a row lies behind the end of the trajectory before its own.
    first = xp.where(number > 0, xp.take(ends, xp.clip(number - 1, min=0)), xp.zeros_like(rows))
    flat = xp.reshape(padded, (-1, *padded.shape[2:]))
    taken = xp.take(flat, (rows - first) * count + number, axis=0)
    return xp.reshape(taken, (steps, num_envs, *padded.shape[2:]))


def history_rows(rows: Array, starts: Array, length: int) -> tuple[Array, Array]:
    """The rows that led up to some rows, within their episodes.

    Args:
        rows: Flat row numbers ``[B]``.
        starts: As ``episode_starts`` returns them, bool ``[T, N]``.
        length: H, at least 1.

    Returns:
        Flat row numbers ``[B, H]``, the oldest first and ``rows`` themselves last, and bool ``[B, H]``: whether there
        is such a row. Where there is none, the number is that of the first row of the episode in this rollout.
    """
    xp = namespace(rows)
    flat = xp.reshape(starts, (-1,))
    found, there = [rows], [xp.ones_like(rows, dtype=xp.bool)]
    for _ in range(length - 1):
        valid = there[-1] & ~xp.take(flat, found[-1])
        found.append(xp.where(valid, found[-1] - starts.shape[1], found[-1]))
        there.append(valid)
    return xp.stack(found[::-1], axis=1), xp.stack(there[::-1], axis=1)


def _arange(xp: Any, values: Array, count: int) -> Array:
    return xp.arange(count, device=values.device) if is_torch_array(values) else xp.arange(count)


def _as_known(name: str, number: Array) -> int:
    """A number of the data that makes a shape."""
    try:
        return int(number)
    except TypeError as error:  # of a number that jax.jit traces
        raise ConfigError(f"{name}: expected a number under jax.jit, where shapes are fixed, found None") from error


def _beside(xp: Any, mask: Array, values: Array) -> Array:
    """``mask`` with the dimensions of ``values``."""
    return xp.reshape(mask, (*mask.shape, *(1,) * (values.ndim - mask.ndim)))


def _check_number(number: Array, expected: int) -> None:
    try:
        found = int(number[-1]) + 1
    except TypeError:  # of a number that jax.jit traces, and that is not known yet
        return
    if found > expected:
        raise SchemaError(f"num_trajectories: expected at least {found}, found {expected}")
