"""Rollouts as a pytree: ``init``, ``append``, ``compute_returns``, ``mini_batches``: pure functions for ``jax.jit``.

Fields, formulas and, for the same seed, the order of rows are those of ``mouse_core.rollouts.RolloutStorage``. What
depends on values (whether the rollout is full, whether rewards are finite) is checked where values are known, which is
outside of ``jax.jit``; inside, a row beyond the last one is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError, MissingFieldError
from mouse_core.errors import RolloutError, RolloutFullError
from mouse_core.rollouts import MiniBatch, RolloutField, Transition, episode_starts, policy_states
from mouse_core.rollouts.fields import complete_fields
from mouse_core.rollouts.mini_batches import check_histories, cut, find_extractors
from mouse_core.rollouts.returns import normalized
from mouse_core.spec import check_count, check_unit
from mouse_jax import _philox, returns
from mouse_jax._rollout import (
    Layout,
    Rollout,
    amp_of,
    are_known,
    check_full,
    check_readable,
    checked_hidden,
    known,
    put_rows,
    row_taker,
    seed_halves,
    take_environments,
)

Batches = Iterator[MiniBatch] | tuple[MiniBatch, ...]

__all__ = [
    "Rollout",
    "advance",
    "append",
    "clear",
    "compute_returns",
    "get_statistics",
    "init",
    "mini_batch",
    "mini_batches",
    "permutation",
    "recurrent_mini_batches",
]


def init(
    num_envs: int,
    num_transitions_per_env: int,
    fields: Mapping[str, RolloutField | Sequence[int]],
    seed: int | jax.Array = 0,
    *,
    amp_cfg: Any = None,
    hidden_states: Any = None,
    hidden_axis: int | None = None,
) -> Rollout:
    """An empty rollout.

    Args:
        num_envs, num_transitions_per_env, fields, seed, amp_cfg, hidden_axis: As in
            ``mouse_core.rollouts.RolloutStorage``; ``motion_mimic_fields`` gives the fields of its preset. Every field
            is allocated, so that one that is optional needs a mask. The seed may be traced, so that ``jax.vmap`` makes
            rollouts of many seeds, each with the order of rows that it has alone; a negative one, which is refused
            where it is known, then counts modulo 2**32, or 2**64 in int64.
        hidden_states: ``(actor, critic)`` of one step, whose shapes say what to allocate; None: there are none.

    Returns:
        A pytree with memory for T steps.

    Raises:
        ConfigError: An argument that cannot be used.
        SchemaError: Hidden states of other environments.
    """
    check_count("num_envs", num_envs)
    check_count("num_transitions_per_env", num_transitions_per_env)
    completed = complete_fields(fields)
    for name, one in completed.items():
        if one.optional and not one.mask:
            raise ConfigError(f"fields[{name!r}]: expected mask=True beside optional=True, as all memory is allocated")
    halves = seed_halves(seed)
    shape, extractors = (int(num_transitions_per_env), int(num_envs)), find_extractors(amp_cfg, completed)
    layout = Layout(shape[1], shape[0], tuple(completed.items()), extractors, policy_states.check_axis(hidden_axis))

    def memory(path: str, leaf: Any) -> jax.Array:
        policy_states.check_envs(path, np.shape(leaf), layout.num_envs, layout.hidden_axis)
        return jnp.zeros((layout.num_transitions_per_env, *np.shape(leaf)), jnp.result_type(leaf))

    return Rollout(
        {name: jnp.zeros((*shape, *one.shape), one.dtype) for name, one in layout.spec.items()},
        None if policy_states.is_empty(hidden_states) else policy_states.tree_map(memory, hidden_states),
        jnp.int32(0),
        jnp.uint32(0),
        jnp.asarray(False),
        halves,
        layout,
    )


def append(rollout: Rollout, transition: Transition | Mapping[str, Any]) -> Rollout:
    """The rollout with one more step of all environments.

    Under ``jax.jit`` with the rollout donated, rows are written in place.

    Args:
        rollout: A rollout.
        transition: As in ``RolloutStorage.add_transitions``. Where ``init`` was given hidden states, None for those of
            the actor or the critic stands for zeros in the first row, or where the number of the row is traced.

    Raises:
        RolloutFullError: There is no row left; under ``jax.jit`` it is dropped instead.
        SchemaError, MissingFieldError, DataError: As in ``RolloutStorage.add_transitions``; values are checked where
            they are known and on the CPU.
    """
    layout = rollout.layout
    step = known(rollout.step)
    most = layout.num_transitions_per_env
    if step is not None and step >= most:
        raise RolloutFullError(f"append: expected at most {most} rows, found one more; clear first")
    given = layout.checks.given(transition)
    rows = layout.checks.rows(given, step)
    hidden = checked_hidden(rollout, given.get("hidden_states"), step)
    arrays, hidden = put_rows((rollout.arrays, rollout.hidden_states), (rows, hidden), rollout.step)
    return replace(rollout, arrays=arrays, hidden_states=hidden, step=rollout.step + 1, computed=jnp.asarray(False))


def clear(rollout: Rollout) -> Rollout:
    """The rollout without rows; the order of rows goes on being new in every epoch."""
    return replace(rollout, step=jnp.int32(0), computed=jnp.asarray(False))


def get_statistics(rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """The mean length of trajectories, which the end of the rollout cuts, and the mean reward, ``[]`` each.

    Raises:
        RolloutError: There is no row yet, where that is known.
    """
    if known(rollout.step) == 0:
        raise RolloutError("get_statistics: expected at least one row, found none")
    filled = jnp.arange(rollout.layout.num_transitions_per_env)[:, None] < rollout.step
    starts = episode_starts(rollout["dones"]) & filled
    rows = filled.sum() * rollout.layout.num_envs
    return rows / starts.sum(), jnp.where(filled, rollout["rewards"][:, :, 0], 0.0).sum() / rows


def compute_returns(
    rollout: Rollout,
    last_values: Any,
    gamma: Any,
    lam: Any,
    normalize_advantage: bool = True,
    time_outs: Any = None,
    final_values: Any = None,
) -> Rollout:
    """The rollout with ``returns`` and ``advantages``, by generalized advantage estimation, as a scan.

    Args:
        rollout: A full rollout.
        last_values, time_outs, final_values: As in ``RolloutStorage.compute_returns``.
        gamma, lam: Numbers from 0 to 1; may be traced.
        normalize_advantage: As there; static.

    Raises:
        RolloutError, ConfigError, SchemaError, DataError, MissingFieldError: As there, where values are known.
    """
    layout = rollout.layout
    check_full(rollout, "compute_returns")
    if "values" not in rollout.arrays:
        raise MissingFieldError(f"compute_returns: expected a field 'values', found {list(rollout.arrays)}")
    discount, lam = (
        value if isinstance(value, jax.core.Tracer) else check_unit(name, value)
        for name, value in (("gamma", gamma), ("lam", lam))
    )
    rewards, values, dones = (rollout[name] for name in ("rewards", "values", "dones"))
    ends = layout.checks.ends(values, dones, last_values, time_outs, final_values)
    last, time_outs, finals = jax.tree.map(jnp.asarray, ends)
    advantages, found = returns.gae(
        rewards, values, dones, last, discount=discount, lam=lam, time_outs=time_outs, final_values=finals
    )
    computed = {"returns": found, "advantages": normalized(advantages) if normalize_advantage else advantages}
    computed = {name: array.astype(rollout[name].dtype) for name, array in computed.items()}
    return replace(rollout, arrays={**rollout.arrays, **computed}, computed=jnp.asarray(True))


def permutation(rollout: Rollout, offset: Any = 0) -> jax.Array:
    """The order of the rows in the epoch that comes ``offset`` epochs from now, int32 ``[T * N]``.

    In a scan over epochs, whose number is ``offset``, reshape it to ``[num_mini_batches, -1]`` and scan over that with
    ``mini_batch``; then ``advance`` the rollout.
    """
    layout = rollout.layout
    epoch = rollout.epoch + jnp.asarray(offset).astype(jnp.uint32)
    return _philox.permutation(rollout.seed, epoch, layout.num_transitions_per_env * layout.num_envs)


def advance(rollout: Rollout, num_epochs: Any) -> Rollout:
    """The rollout after so many more epochs, whose orders of rows will not come again."""
    return replace(rollout, epoch=rollout.epoch + jnp.asarray(num_epochs).astype(jnp.uint32))


def mini_batch(rollout: Rollout, rows: jax.Array, *, histories: Mapping[str, int] | None = None) -> MiniBatch:
    """The mini-batch of some rows.

    Args:
        rollout: A full rollout, with returns if it has values.
        rows: Flat numbers ``step * N + env``, int32 ``[B]``.
        histories: Fields whose last H frames are delivered too, and H.

    Raises:
        RolloutError, ConfigError: As ``mini_batches``.
    """
    histories = check_histories(histories, rollout.arrays)
    check_readable(rollout, "mini_batch")
    return row_taker(rollout, histories)(rows)


def mini_batches(
    rollout: Rollout,
    num_mini_batches: int,
    num_epochs: int = 8,
    *,
    drop_last: bool = False,
    histories: Mapping[str, int] | None = None,
) -> tuple[Rollout, Batches]:
    """Mini-batches of rows, every row once in each epoch, in the order of ``RolloutStorage.mini_batch_generator``.

    ``permutation`` and ``mini_batch`` serve scans.

    Args:
        rollout: A full rollout, with returns if it has values.
        num_mini_batches, num_epochs, drop_last, histories: As there; static.

    Returns:
        The rollout after these epochs, and an iterator over the mini-batches, which are pytrees; under ``jax.jit`` a
        tuple of them.

    Raises:
        RolloutError: The rollout is not full, or has no returns, where that is known.
        ConfigError: A number out of range; a history of an unknown field.
    """
    check_count("num_epochs", num_epochs)
    histories = check_histories(histories, rollout.arrays)
    check_readable(rollout, "mini_batches")
    layout = rollout.layout
    parts = cut(layout.num_transitions_per_env * layout.num_envs, num_mini_batches, drop_last=drop_last)
    take = row_taker(rollout, histories)
    orders = (permutation(rollout, number) for number in range(num_epochs))
    return advance(rollout, num_epochs), _delivered(rollout, (take(order[part]) for order in orders for part in parts))


def recurrent_mini_batches(
    rollout: Rollout,
    num_mini_batches: int,
    num_epochs: int = 8,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_trajectories: int | None = None,
) -> tuple[Rollout, Batches]:
    """Mini-batches of trajectories, as ``RolloutStorage.recurrent_mini_batch_generator`` delivers them.

    Args:
        rollout: A full rollout, with returns if it has values.
        num_mini_batches, num_epochs, drop_last, shuffle: As there; static.
        num_trajectories: K, the most trajectories in a mini-batch; those beyond what there are are empty. None: as many
            as there are, another number in every mini-batch, each of which is compiled; and under ``jax.jit``, where
            that is not known, T times the environments.

    Returns:
        The rollout after these epochs, and an iterator over the mini-batches; under ``jax.jit`` a tuple of them.

    Raises:
        RolloutError, ConfigError: As ``mini_batches``.
    """
    check_count("num_epochs", num_epochs)
    check_readable(rollout, "recurrent_mini_batches")
    layout = rollout.layout
    parts = cut(layout.num_envs, num_mini_batches, drop_last=drop_last, what="environments")
    amp = amp_of(rollout)

    def take(envs: jax.Array) -> MiniBatch:
        most = num_trajectories
        if most is None:
            starts = episode_starts(rollout["dones"])[:, envs]
            most = starts.size if isinstance(starts, jax.core.Tracer) else int(starts.sum())
        return take_environments(
            rollout.arrays,
            envs,
            num_trajectories=most,
            amp=amp,
            hidden_states=rollout.hidden_states,
            hidden_axis=layout.hidden_axis,
        )

    def order(number: int) -> jax.Array:
        if not shuffle:
            return jnp.arange(layout.num_envs)
        return _philox.permutation(rollout.seed, rollout.epoch + jnp.uint32(number), layout.num_envs)

    orders = (order(number) for number in range(num_epochs))
    return advance(rollout, num_epochs), _delivered(rollout, (take(envs[part]) for envs in orders for part in parts))


def _delivered(rollout: Rollout, batches: Iterator[MiniBatch]) -> Batches:
    """One by one, or, where a compiled function is to return them, all at once."""
    # Under jax.vmap over seeds the seed alone may be traced.
    return batches if are_known(*jax.tree.leaves(rollout), anywhere=True) else tuple(batches)
