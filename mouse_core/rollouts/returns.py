"""Returns and advantages of rollouts: pure functions of arrays of NumPy, torch or JAX (array API).

Time is the first axis, and every row is a transition (alignment "outgoing"): row t holds the reward of the action that
was taken at observation t, whether the episode ended with this action, and the value of observation t. Arrays may have
any further axes, but all arrays of one call must have the same shape: ``[T, N]`` cannot be combined with ``[T, N, 1]``.
Results have the dtype of the arguments.

Vector rewards ``[T, N, K]`` and rewards per agent ``[T, N, A]`` require values of the same shape; returns are computed
separately for each component. ``dones``, ``time_outs``, ``ratios`` and factors of the shape ``[T, N, 1]`` apply to all
components; ``dones`` of the shape ``[T, N, A]`` end each agent separately.

Truncation is not termination. If a time limit truncates an episode, the return bootstraps from the value of the final
observation, which is not in any row. Therefore pass ``time_outs``, a mask of the truncated ends, and ``final_values``,
the values of the final observations. Without these arguments, every end counts as a termination (Pardo et al., "Time
limits in reinforcement learning", ICML 2018). Code 2 (truncated) in ``dones`` never counts as a termination: code 2
without a time-out and a final value raises ConfigError. If the codes cannot be read (in ``jax.jit``, in compiled code,
on a GPU), V' is NaN at a row with code 2 and no time-out.

In the formulas, d_t is 1 where row t ends an episode, and V'_t is the value of the observation to which row t leads:

    V'_t = V_{t+1}          if the episode continues; V_T is ``last_values``
    V'_t = final_values_t   if the episode was truncated
    V'_t = 0                if the episode terminated
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Protocol

import numpy as np
from array_api_compat import is_jax_array

from mouse_core.dtypes import RowError, is_tensor, may_look, namespace, refuse_hidden
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.spec import check_count

Array = Any


class Outgoing(NamedTuple):
    """Arguments for the functions of this module, converted from rows of alignment "arrived". The arrays have one row
    less than the original rows.

    Attributes:
        rewards, values, dones, last_values, time_outs, final_values: See ``gae``.
        valid: Whether each row is a transition. A row whose observation is the last of its episode is not a transition:
            its results have no meaning and do not affect other rows.
    """

    rewards: Array
    values: Array
    dones: Array
    last_values: Array
    time_outs: Array
    final_values: Array
    valid: Array


def outgoing(rewards: Array, values: Array, dones: Array) -> Outgoing:
    """Convert rows of alignment "arrived", as in stores, to transitions.

    The reward and done of row t+1 belong to the transition that leaves row t: three rows with the rewards ``[0, 1, 2]``
    become two transitions with the rewards ``[1, 2]``. In the alignment "arrived", final observations are stored as
    rows, so truncated episodes need no further arguments: ``transitions = outgoing(...)._asdict(); valid =
    transitions.pop("valid"); gae(**transitions, discount=0.99, lam=0.95)``.

    Args:
        rewards: The rewards of the actions that led to each row, floating-point ``[T+1, ...]``.
        values: V of the observation in row t, ``[T+1, ...]``.
        dones: The done code of each row, ``[T+1, ...]``: 0 if the episode continues, 1 if it terminates with the row, 2
            if it is truncated.

    Returns:
        Transitions ``[T, ...]``.

    Raises:
        SchemaError: Shapes differ, or the arrays have fewer than two rows.
    """
    check_array("rewards", rewards)
    check_rows("values", values, rewards.shape)
    check_rows("dones", dones, rewards.shape, shared=True)
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
    """Return where episodes end, and V', the value of the observation to which each row leads.

    Example: three rows, the second of which ends an episode, with values ``[5, 6, 7]``, dones ``[0, 1, 0]`` and last
    value 8. V' is ``[6, 0, 8]``: the next row's value, or 0 after the end of the episode. If the end is a time-out
    whose final observation has the value 9, V' is ``[6, 9, 8]``. If the end has code 2 (truncated) without a time-out,
    the value of the final observation is unknown: ConfigError is raised, or V' is ``[6, NaN, 8]`` if the codes cannot
    be read.

    Args:
        rewards, values, dones, last_values, time_outs, final_values: See ``gae``.

    Returns:
        Whether each row ends an episode, bool ``[T, ...]``; and V' in the dtype of the values, ``[T, ...]``.

    Raises:
        SchemaError, ConfigError: See ``gae``.
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
    check_rows("dones", dones, rewards.shape, shared=True)
    check_rows("last_values", last_values, rewards.shape[1:])
    if not xp.isdtype(dones.dtype, ("bool", "integral", "real floating")):
        raise SchemaError(f"dones: expected flags or codes, found {dones.dtype}")
    check_truncation(time_outs, final_values)
    ended = dones != 0
    following = _put(xp.concat([values[1:], last_values[None]]), ended, 0.0)
    truncated = None
    if time_outs is not None and final_values is not None:
        check_rows("time_outs", time_outs, rewards.shape, shared=True)
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
    """Check that the caller passes the value of the final observation of every truncated episode.

    Args:
        unknown: Whether a row has code 2 (truncated) in ``dones`` but no time-out, bool ``[T, ...]``.
        time_outs: See ``gae``.
        where: The name of the function in the message.

    Raises:
        ConfigError: ``unknown`` is True in some row.
    """
    xp = namespace(unknown)
    if not bool(xp.any(unknown)):
        return
    first = int(xp.argmax(xp.astype(xp.reshape(unknown, (-1,)), xp.uint8)))
    row, *others = (int(number) for number in np.unravel_index(first, tuple(unknown.shape)))
    # The last of three axes, [T, N, 1], is not an axis of environments.
    others = others[:-1] if len(others) > 1 and unknown.shape[-1] == 1 else others
    place = f"environment {others[0] if len(others) == 1 else others}, row {row}" if others else f"row {row}"
    wanted = "time_outs and final_values" if time_outs is None else "time_outs to be true"
    raise ConfigError(
        f"{where}: expected {wanted}, because dones are 2 (truncated) at {place}; to count an end as a "
        "termination, set its code to 1"
    )


def check_truncation(time_outs: Array | None, final_values: Array | None) -> None:
    """Raise ConfigError if only one of ``time_outs`` and ``final_values`` is given."""
    if (time_outs is None) != (final_values is None):
        there, missing = ("final_values", "time_outs") if time_outs is None else ("time_outs", "final_values")
        raise ConfigError(f"{missing}: expected values together with {there}, found None")


def check_array(name: str, values: Array) -> None:
    """Raise SchemaError if ``values`` is not an array, and DataError if a mask hides a value."""
    if not hasattr(values, "shape"):
        raise SchemaError(f"{name}: expected an array, found {type(values).__name__}")
    try:
        refuse_hidden(values)
    except RowError as error:
        raise DataError(f"{name}, row {error.row}: {error}") from error


def check_factors(rewards: Array, **factors: float | Array) -> None:
    """Raise SchemaError unless each factor, such as ``discount``, is a number or has the same shape as the rewards.

    Without this check, NumPy would broadcast factors of other shapes, for example factors ``[N]`` along the time axis.
    """
    for name, factor in factors.items():
        if getattr(factor, "shape", ()):
            check_rows(name, factor, rewards.shape, shared=True)


def check_rows(name: str, values: Array, expected: tuple[int, ...], *, shared: bool = False) -> None:
    """Raise SchemaError if the shape of ``values`` does not match the rewards; see also ``check_array``.

    Args:
        name: The name of the values in the message.
        values: ``[T, ...]``.
        expected: The shape of the rewards.
        shared: Whether values ``[T, N, 1]`` are allowed if the rewards are ``[T, N, K]``.
    """
    check_array(name, values)
    wanted, found = tuple(expected), tuple(values.shape)
    # With two axes, [T, 1] beside [T, N] would be one environment's values for all environments.
    if found != wanted and not (shared and len(wanted) > 2 and found == (*wanted[:-1], 1)):
        also = f" or {(*wanted[:-1], 1)}" if shared and len(wanted) > 2 and wanted[-1] != 1 else ""
        raise SchemaError(f"{name}: expected shape {wanted}{also} as for the rewards, found {found}")


def _is_known(values: Array) -> bool:
    """Return whether the values can be read without waiting for a device and are not traced by a framework."""
    if may_look(values):
        return True
    if is_tensor(values) or not is_jax_array(values):  # code that torch compiles cannot call array_api_compat
        return False
    traced = isinstance(values, sys.modules["jax"].core.Tracer)
    return not traced and all(device.platform == "cpu" for device in values.devices())


def _put(values: Array, where: Array, others: Array | float) -> Array:
    """Return an array with the elements of ``others`` where ``where`` is True, and of ``values`` elsewhere; ``values``
    may be modified.

    Elements are selected, not multiplied by 0 or 1, so elements that are not selected may be NaN.
    """
    if isinstance(values, np.ndarray):
        # In place: allocating new memory of this size costs more than the copy.
        np.copyto(values, others, where=where, casting="same_kind")
        return values
    xp = namespace(values)
    return xp.where(where, xp.full_like(values, others) if isinstance(others, float) else others, values)


class Recurrence(Protocol):
    """A function that computes x_t = terms_t + decays_t x_{t+1} for t = T-1, ..., 0, with x_T = last; the result is
    ``[T, ...]``.
    """

    def __call__(self, terms: Array, decays: Array, last: Array) -> Array: ...  # noqa: D102


def backward(terms: Array, decays: Array, last: Array) -> Array:
    """Compute x_t = terms_t + decays_t x_{t+1} from the last row to the first, row by row.

    Example: with terms ``[1, 2, 4]``, decays ``[0.5, 0, 0.5]`` and last 8, x_2 = 4 + 0.5 * 8 = 8,
    x_1 = 2 + 0 * 8 = 2, x_0 = 1 + 0.5 * 2 = 2. An episode ends where the decay is 0.

    ``jax.jit`` unrolls the loop to T copies of the operations; the functions of ``mouse_jax`` use a scan instead.

    Args:
        terms, decays: The arrays of terms and decays, ``[T, ...]``.
        last: The value x_T, ``[...]``.

    Returns:
        x, ``[T, ...]``.
    """
    if isinstance(terms, np.ndarray):
        # Writing into existing memory takes half the time.
        sums = np.empty(terms.shape, np.result_type(terms, decays, last))
        for row in range(len(terms) - 1, -1, -1):
            last = np.multiply(decays[row], last, out=sums[row, ...])
            last += terms[row]
        return sums
    found = []
    for row in range(terms.shape[0] - 1, -1, -1):
        last = terms[row] + decays[row] * last
        found.append(last)
    return namespace(terms).stack(found[::-1])


def gae(
    rewards: Array,
    values: Array,
    dones: Array,
    last_values: Array,
    *,
    discount: float | Array,
    lam: float | Array,
    time_outs: Array | None = None,
    final_values: Array | None = None,
    recurrence: Recurrence = backward,
) -> tuple[Array, Array]:
    """Compute generalized advantage estimates, and the corresponding returns.

    delta_t = r_t + discount V'_t - V_t;  A_t = delta_t + discount lam (1 - d_t) A_{t+1};  R_t = A_t + V_t
    (Schulman et al., "High-dimensional continuous control using generalized advantage estimation", ICLR 2016).

    Args:
        rewards: The rewards, floating-point ``[T, ...]``.
        values: V, ``[T, ...]``.
        dones: Nonzero in the last row of an episode, ``[T, ...]`` of any dtype; 2 if a time limit ended the episode.
        last_values: V of the observations after the last row, ``[...]``.
        discount: A number, or a number for each row, ``[T, ...]``.
        lam: A number, or a number for each row; with 1 the result is Monte Carlo advantages, with 0 one-step
            advantages.
        time_outs: Whether the episode is truncated at a row, bool ``[T, ...]``; pass ``time_outs`` only together with
            ``final_values``.
        final_values: V of the final observations of truncated episodes, ``[T, ...]``; only elements at rows with a
            time-out are read.
        recurrence: The function that computes the sums along time.

    Returns:
        Advantages and returns, ``[T, ...]`` each.

    Raises:
        SchemaError: Shapes differ, the arrays have no row, or rewards are not floating-point numbers.
        DataError: A mask hides a value.
        ConfigError: Only one of ``time_outs`` and ``final_values`` is given, or code 2 in ``dones`` has no time-out.

    Example:
        The episode ends with the second row: its delta is 1 + 0.5 * 0 - 2, and the third row does not affect this
        delta.

        >>> import numpy as np
        >>> from mouse_core.rollouts import gae
        >>> rewards, values, dones = np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 2.0]), np.array([0, 1, 0])
        >>> gae(rewards, values, dones, np.array(4.0), discount=0.5, lam=0.5)
        (array([-0.25, -1.  ,  1.  ]), array([1.75, 1.  , 3.  ]))
    """
    ended, following = following_values(rewards, values, dones, last_values, time_outs, final_values)
    check_factors(rewards, discount=discount, lam=lam)
    deltas = rewards + discount * following - values
    del following
    advantages = recurrence(deltas, _going_on(ended, deltas) * (discount * lam), _nothing(deltas))
    return advantages, advantages + values


def lambda_returns(
    rewards: Array,
    values: Array,
    dones: Array,
    last_values: Array,
    *,
    discount: float | Array,
    lam: float | Array,
    time_outs: Array | None = None,
    final_values: Array | None = None,
    recurrence: Recurrence = backward,
) -> Array:
    """Compute lambda-returns: weighted means of the n-step returns for all n.

    G_t = r_t + discount ((1 - lam) V'_t + lam G_{t+1}) if the episode continues, with G_T = V_T; G_t = r_t + discount
    V'_t if the episode ends (Sutton and Barto, "Reinforcement learning", 2018, section 12.1).

    Args:
        rewards, values, dones, last_values, discount, lam, time_outs, final_values, recurrence: See ``gae``.

    Returns:
        G, ``[T, ...]``.

    Raises:
        SchemaError, ConfigError: See ``gae``.
    """
    ended, following = following_values(rewards, values, dones, last_values, time_outs, final_values)
    check_factors(rewards, discount=discount, lam=lam)
    on = _going_on(ended, following)
    return recurrence(rewards + discount * (1.0 - lam * on) * following, discount * lam * on, last_values)


def n_step_returns(
    rewards: Array,
    values: Array,
    dones: Array,
    last_values: Array,
    *,
    discount: float | Array,
    n: int,
    time_outs: Array | None = None,
    final_values: Array | None = None,
) -> Array:
    """Compute n-step returns: the discounted rewards of n steps, plus the value of the observation after these steps.

    G_t = r_t + discount r_{t+1} + ... + discount^(n-1) r_{t+n-1} + discount^n V_{t+n}. If the episode ends earlier, the
    sum ends with V' of the episode's last row; at the end of the rollout, the sum ends with ``last_values`` (Sutton and
    Barto, "Reinforcement learning", 2018, section 7.1).

    Args:
        rewards, values, dones, last_values, discount, time_outs, final_values: See ``gae``.
        n: Number of steps, at least 1.

    Returns:
        G, ``[T, ...]``.

    Raises:
        SchemaError, ConfigError: See ``gae``; ConfigError also for an ``n`` below 1.

    Example:
        With ``n=2``, the first return is 1 + 0.5 * 2 + 0.25 * 8, and the second return is 2 + 0.5 * 4 + 0.25 * 16; the
        last return has only one step: 4 + 0.5 * 16.

        >>> import numpy as np
        >>> from mouse_core.rollouts import n_step_returns
        >>> rewards, values, dones = np.array([1.0, 2.0, 4.0]), np.array([8.0, 8.0, 8.0]), np.zeros(3)
        >>> n_step_returns(rewards, values, dones, np.array(16.0), discount=0.5, n=2)
        array([ 4.,  8., 12.])
    """
    check_count("n_step_returns: n", n)
    ended, following = following_values(rewards, values, dones, last_values, time_outs, final_values)
    check_factors(rewards, discount=discount)
    xp = namespace(rewards)
    # Begin with one-step returns; each round computes (k + 1)-step returns from the k-step returns of the next row.
    returns = rewards + discount * following
    for _ in range(min(n, rewards.shape[0]) - 1):
        onward = xp.concat([returns[1:], last_values[None]])
        returns = rewards + discount * xp.where(ended, following, onward)
    return returns


def discounted_returns(
    rewards: Array,
    dones: Array,
    last_values: Array | None = None,
    *,
    discount: float | Array,
    time_outs: Array | None = None,
    final_values: Array | None = None,
    recurrence: Recurrence = backward,
) -> Array:
    """Compute the discounted sum of the rewards up to the end of the episode.

    G_t = r_t + discount G_{t+1} if the episode continues, with G_T = ``last_values``; G_t = r_t + discount V'_t if the
    episode ends (Sutton and Barto, "Reinforcement learning", 2018, section 3.3).

    Args:
        rewards, dones, discount, time_outs, final_values, recurrence: See ``gae``.
        last_values: Values of the observations after the last row, ``[...]``; by default 0.

    Returns:
        G, ``[T, ...]``.

    Raises:
        SchemaError, ConfigError: See ``gae``.
    """
    last = _nothing(rewards) if last_values is None else last_values
    # Values are used only as V' at the ends of episodes.
    ended, following = following_values(rewards, rewards, dones, last, time_outs, final_values)
    check_factors(rewards, discount=discount)
    on = _going_on(ended, rewards)
    return recurrence(rewards + discount * (1.0 - on) * following, discount * on, last)


def vtrace(
    rewards: Array,
    values: Array,
    dones: Array,
    last_values: Array,
    ratios: Array,
    *,
    discount: float | Array,
    lam: float | Array = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg_rho: float = 1.0,
    time_outs: Array | None = None,
    final_values: Array | None = None,
    recurrence: Recurrence = backward,
) -> tuple[Array, Array]:
    """Compute V-trace targets and advantages for a policy (the learning policy) from rollouts of another policy (the
    acting policy).

    delta_t = min(clip_rho, ratio_t) (r_t + discount V'_t - V_t);  c_t = lam min(clip_c, ratio_t);
    v_t - V_t = delta_t + discount c_t (1 - d_t) (v_{t+1} - V_{t+1}), with v_T = V_T;
    A_t = min(clip_pg_rho, ratio_t) (r_t + discount v'_t - V_t), where v'_t is v_{t+1} if the episode continues and V'_t
    if the episode ends (Espeholt et al., "IMPALA", ICML 2018, equation 1, remark 2 and section 4.2).

    Args:
        rewards, values, dones, last_values, discount, time_outs, final_values, recurrence: See ``gae``.
        ratios: The probability of the action under the learning policy, divided by its probability under the acting
            policy, ``[T, ...]``.
        lam: A number, or a number for each row.
        clip_rho: The largest importance weight of a temporal difference; ``clip_rho`` determines for which policy the
            values are learned.
        clip_c: The largest weight by which later temporal differences are multiplied; ``clip_c`` affects the speed of
            learning.
        clip_pg_rho: The largest importance weight of an advantage.

    Returns:
        The targets v for the values, and the advantages A for the policy, ``[T, ...]`` each.

    Raises:
        SchemaError, ConfigError: See ``gae``.
    """
    ended, following = following_values(rewards, values, dones, last_values, time_outs, final_values)
    check_factors(rewards, discount=discount, lam=lam)
    check_rows("ratios", ratios, rewards.shape, shared=True)
    xp = namespace(rewards)
    deltas = xp.clip(ratios, max=clip_rho) * (rewards + discount * following - values)
    decays = discount * lam * _going_on(ended, values) * xp.clip(ratios, max=clip_c)
    targets = values + recurrence(deltas, decays, _nothing(deltas))
    onward = xp.where(ended, following, xp.concat([targets[1:], last_values[None]]))
    advantages = xp.clip(ratios, max=clip_pg_rho) * (rewards + discount * onward - values)
    return targets, advantages


def normalized(advantages: Array, *, eps: float = 1e-8, by_component: bool = False) -> Array:
    """Return (A - mean) / (std + eps), where mean and std are computed over all elements; std divides by n - 1.

    Mean and standard deviation are computed in double precision if the device supports it. For a single element the
    result is 0.

    Args:
        advantages: The advantages, floating-point ``[...]``.
        eps: The number that is added to std, so that the quotient is finite if all elements are equal.
        by_component: Whether mean and standard deviation are computed separately for each index of the last axis.

    Returns:
        An array of the same shape and dtype.
    """
    xp = namespace(advantages)
    if by_component and advantages.shape[-1] > 1:
        return xp.stack([normalized(advantages[..., k], eps=eps) for k in range(advantages.shape[-1])], axis=-1)
    flat = xp.reshape(advantages, (-1,))
    if not _lacks_float64(advantages):
        flat = xp.astype(flat, xp.float64)
    # NumPy writes to existing memory: allocating new memory of this size costs more than the computation.
    own = {"out": flat} if isinstance(flat, np.ndarray) else {}
    centred = xp.subtract(flat, xp.mean(flat), **own)
    # Not a BLAS product, which would wait for BLAS threads.
    squares = np.einsum("i,i->", centred, centred) if isinstance(centred, np.ndarray) else xp.sum(centred * centred)
    deviation = xp.sqrt(squares / max(centred.shape[0] - 1, 1))
    scaled = xp.divide(centred, deviation + eps, **own)
    return xp.reshape(xp.astype(scaled, advantages.dtype), advantages.shape)


def _going_on(ended: Array, like: Array) -> Array:
    """Return 1 - d, which is 1 where the episode continues and 0 where the episode ends, in the dtype of ``like``."""
    return namespace(like).astype(~ended, like.dtype)


def _nothing(rows: Array) -> Array:
    return namespace(rows).zeros_like(rows[0])


def _lacks_float64(values: Array) -> bool:
    """Return whether the device of ``values`` does not support double precision."""
    if is_tensor(values):
        return bool(values.device.type == "mps")
    return not isinstance(values, np.ndarray) and is_jax_array(values)
