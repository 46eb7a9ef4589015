"""The episodes in a rollout: functions that find, split and pad episodes, and that return the history of a row.

Pure functions over the array API. Rollouts are time-major, ``[T, N, ...]``; row t of environment n has the flat index
``t * N + n``. If ``dones`` is not 0 in row t, row t ends an episode, and row t+1 starts the next episode. A trajectory
is the part of an episode that lies in a rollout. Trajectories are ordered by environment, then by time.

Example, to which the functions of this module refer: T = 3 steps of N = 2 environments, and an episode of environment 0
ends with step 1.

    dones                flat indices     trajectories, as columns of flat indices
    env 0  env 1         env 0  env 1     K = 3: two of environment 0, one of environment 1
      0      0             0      1         0  4  1
      1      0             2      3         2  -  3
      0      0             4      5         -  -  5
"""

from __future__ import annotations

from typing import Any

from mouse_core.dtypes import is_tensor, may_look, namespace
from mouse_core.errors import ConfigError, SchemaError

Array = Any


def episode_starts(dones: Array) -> Array:
    """Return whether each row is the first row of a trajectory.

    Args:
        dones: Nonzero where an episode ends, ``[T, N]`` or ``[T, N, 1]`` of any dtype.

    Returns:
        Bool ``[T, N]``; the first row of a rollout is always a start.

    Raises:
        SchemaError: ``dones`` has another shape or no row.
    """
    if dones.ndim == 3 and dones.shape[2] == 1:
        dones = dones[:, :, 0]
    if dones.ndim != 2 or 0 in dones.shape:
        raise SchemaError(f"dones: expected [T, N] or [T, N, 1], found shape {tuple(dones.shape)}")
    xp = namespace(dones)
    ended = dones != 0
    return xp.concat([xp.ones_like(ended[:1]), ended[:-1]])


def trajectory_rows(dones: Array, *, num_trajectories: int | None = None) -> tuple[Array, Array]:
    """Return the rows of each trajectory.

    Args:
        dones: See ``episode_starts``.
        num_trajectories: K, by default the number of trajectories in the rollout. Under ``jax.jit``, this number is
            unknown, so pass an upper limit (``T * N`` always suffices); additional trajectories are empty.

    Returns:
        Two arrays: flat row indices ``[T, K]``, which are arbitrary after a trajectory's end; and whether each row
        exists, bool ``[T, K]``.

    Raises:
        SchemaError: See ``episode_starts``; also, outside of ``jax.jit``, if ``num_trajectories`` is too small.
        ConfigError: ``num_trajectories`` is missing under ``jax.jit``.
    """
    starts = episode_starts(dones)
    xp = namespace(starts)
    steps, envs = starts.shape
    # In the order of all rows of environment 0, then of environment 1, ...: row r is step r % T of environment r // T.
    starts_by_env = xp.reshape(xp.permute_dims(starts, (1, 0)), (-1,))  # [1 0 1  1 0 0]
    step = _arange(xp, starts, steps)
    # The trajectory of each row.
    trajectory = xp.astype(starts_by_env, step.dtype).cumsum(0) - 1  # [0 0 1  2 2 2]
    if num_trajectories is None:
        num_trajectories = _as_known("num_trajectories", trajectory[-1]) + 1
    else:
        _check_number(trajectory, num_trajectories)
    bounds = xp.searchsorted(trajectory, _arange(xp, starts, num_trajectories + 1))  # [0 2 3 6]
    first, lengths = bounds[:-1], bounds[1:] - bounds[:-1]  # [0 2 3], [2 1 3]
    rows = xp.clip(first[None, :] + step[:, None], max=steps * envs - 1)  # [[0 2 3] [1 3 4] [2 4 5]]
    # Back to flat indices: row 1 is step 1 of environment 0, number 1 * N + 0 = 2.
    return rows % steps * envs + rows // steps, step[:, None] < lengths[None, :]


def take_rows(values: Array, rows: Array, masks: Array) -> Array:
    """Return a field's values at the rows that ``trajectory_rows`` or ``history_rows`` returned.

    Args:
        values: The values of a field, ``[T, N, ...]``.
        rows: Flat row indices ``[A, B]``.
        masks: Whether the row exists, bool ``[A, B]``.

    Returns:
        The values, ``[A, B, ...]``; 0 (or False) where no row exists.
    """
    xp = namespace(values)
    flat = xp.reshape(values, (-1, *values.shape[2:]))
    taken = xp.reshape(xp.take(flat, xp.reshape(rows, (-1,)), axis=0), (*rows.shape, *values.shape[2:]))
    return xp.where(_beside(xp, masks, taken), taken, xp.zeros_like(taken[:1]))


def split_and_pad_trajectories(
    values: Array, dones: Array, *, num_trajectories: int | None = None
) -> tuple[Array, Array]:
    """Split a rollout at the ends of episodes, and pad the trajectories to the length of the rollout.

    Args:
        values: The values of a field, ``[T, N, ...]``.
        dones: See ``episode_starts``.
        num_trajectories: See ``trajectory_rows``.

    Returns:
        Two arrays: trajectories ``[T, K, ...]``, with zeros after a trajectory's end; and masks, bool ``[T, K]``, which
        are True where a row exists.

    Raises:
        SchemaError, ConfigError: The shapes of ``values`` and ``dones`` do not match; see also ``trajectory_rows``.
    """
    if tuple(values.shape[:2]) != tuple(dones.shape[:2]):
        raise SchemaError(
            f"values: expected the first axes [T, N] of dones {tuple(dones.shape)}, found shape {tuple(values.shape)}"
        )
    rows, masks = trajectory_rows(dones, num_trajectories=num_trajectories)
    return take_rows(values, rows, masks), masks


def unpad_trajectories(padded: Array, masks: Array, *, num_envs: int | None = None) -> Array:
    """Join trajectories: the inverse of ``split_and_pad_trajectories``.

    Args:
        padded: Padded trajectories, ``[T, K, ...]``.
        masks: Whether each row exists, bool ``[T, K]``.
        num_envs: N. By default, N is computed from the number of existing rows, which is unknown under ``jax.jit``.

    Returns:
        ``[T, N, ...]``.

    Raises:
        SchemaError: Shapes do not match, or, outside of ``jax.jit``, the number of rows is not T * N.
        ConfigError: ``num_envs`` is missing under ``jax.jit``.
    """
    if tuple(padded.shape[:2]) != tuple(masks.shape):
        raise SchemaError(f"padded: expected [T, K, ...] as masks {tuple(masks.shape)}, found {tuple(padded.shape)}")
    xp = namespace(padded)
    steps, count = masks.shape
    step = _arange(xp, padded, steps)
    # The end of each trajectory in the order of all rows of one environment, then all rows of the next.
    ends = xp.sum(xp.astype(masks, step.dtype), axis=0).cumsum(0)  # lengths [2 1 3], ends [2 3 6]
    if num_envs is None:
        total = _as_known("num_envs", ends[-1])
        num_envs = total // steps
        if num_envs * steps != total:
            raise SchemaError(f"masks: expected a multiple of {steps} rows, the length of a rollout, found {total}")
    # For every place [T, N] of the result: its row in that order, step + environment * T.
    rows = xp.reshape(_arange(xp, padded, num_envs)[None, :] * steps + step[:, None], (-1,))  # [0 3 1 4 2 5]
    trajectory = xp.clip(xp.searchsorted(ends, rows, side="right"), max=count - 1)  # [0 2 0 2 1 2]
    # The begin of that trajectory: the end of the trajectory before it.
    first = xp.where(trajectory > 0, xp.take(ends, xp.clip(trajectory - 1, min=0)), xp.zeros_like(rows))
    flat = xp.reshape(padded, (-1, *padded.shape[2:]))
    # Row 4 is the second row of trajectory 2: step 1, number 1 * K + 2 of the padded rows.
    taken = xp.take(flat, (rows - first) * count + trajectory, axis=0)
    return xp.reshape(taken, (steps, num_envs, *padded.shape[2:]))


def history_rows(rows: Array, starts: Array, length: int) -> tuple[Array, Array]:
    """Return the history of rows: each row and the rows before it in its episode.

    In the module's example, the history of row 5 with H = 3 is ``[1, 3, 5]``. Row 4 begins an episode, so its history
    is ``[4, 4, 4]``, in which only the last element is an existing row.

    Args:
        rows: Flat row indices ``[B]``.
        starts: The result of ``episode_starts``, bool ``[T, N]``.
        length: H, at least 1.

    Returns:
        Two arrays: flat row indices ``[B, H]``, the oldest first and ``rows`` last; and whether each row exists, bool
        ``[B, H]``. A missing row is replaced by the first row of the episode in this rollout.
    """
    xp = namespace(rows)
    is_start = xp.reshape(starts, (-1,))
    # From the row itself backward: the previous step is N flat indices lower, unless the episode begins here.
    newest_first, there = [rows], [xp.ones_like(rows, dtype=xp.bool)]
    for _ in range(length - 1):
        has_one_before = there[-1] & ~xp.take(is_start, newest_first[-1])
        newest_first.append(xp.where(has_one_before, newest_first[-1] - starts.shape[1], newest_first[-1]))
        there.append(has_one_before)
    return xp.stack(newest_first[::-1], axis=1), xp.stack(there[::-1], axis=1)


def _arange(xp: Any, values: Array, count: int) -> Array:
    return xp.arange(count, device=values.device) if is_tensor(values) else xp.arange(count)


def _as_known(name: str, number: Array) -> int:
    """Convert ``number``, which determines a shape, to an int."""
    try:
        return int(number)
    except TypeError as error:  # jax.jit traces the number
        raise ConfigError(f"{name}: expected a number under jax.jit, where shapes are fixed, found None") from error


def _beside(xp: Any, mask: Array, values: Array) -> Array:
    """Return ``mask`` with as many dimensions as ``values``."""
    return xp.reshape(mask, (*mask.shape, *(1,) * (values.ndim - mask.ndim)))


def _check_number(trajectory: Array, expected: int) -> None:
    if is_tensor(trajectory) and not may_look(trajectory):
        return
    try:
        found = int(trajectory[-1]) + 1
    except TypeError:  # of a number that jax.jit traces, and that is not known yet
        return
    if found > expected:
        raise SchemaError(f"num_trajectories: expected at least {found}, found {expected}")
