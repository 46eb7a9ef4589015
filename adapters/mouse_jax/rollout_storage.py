"""Rollouts as pytrees, and pure functions that can run in ``jax.jit``: ``init``, ``append``, ``compute_returns``,
``mini_batches``.

Fields and formulas are the same as in ``mouse_core.rollouts.RolloutStorage``; for the same seed, the order of rows is
also the same. Checks of values (whether the rollout is full, whether rewards are finite) run only outside of
``jax.jit``, where values are concrete. Inside ``jax.jit``, steps after the first T steps are dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError, MissingFieldError, RolloutError, SchemaError, Spec
from mouse_core.errors import RolloutFullError
from mouse_core.rollouts import MiniBatch, RolloutField, Transition, episode_starts, policy_states
from mouse_core.rollouts.fields import HostArrays, StepChecks, complete_fields, stored_spec
from mouse_core.rollouts.mini_batches import (
    AmpStates,
    Extractor,
    amp_states,
    check_histories,
    cut,
    find_extractors,
    take_mini_batch,
    take_recurrent_mini_batch,
)
from mouse_core.rollouts.returns import normalized
from mouse_core.spec import check_count, check_unit
from mouse_jax import _philox, returns
from mouse_jax.dtypes import are_known, known, replaced_dtypes, seed_halves

for _kind in (AmpStates, MiniBatch):
    jax.tree_util.register_dataclass(_kind, [one.name for one in dataclasses.fields(_kind)], [])


class JaxArrays(HostArrays):
    """Gives access to arrays of JAX or NumPy without a conversion; the values of the arrays can be traced."""

    def array(self, value: Any) -> Any:
        """Return a value as an array."""
        return value if isinstance(value, jax.Array) else super().array(value)

    def may_look(self, array: Any) -> bool:
        """Whether values are not traced, and can be read without waiting for a device."""
        return are_known(array)


@dataclass(frozen=True)
class Layout:
    """The constants of a rollout.

    Args:
        num_envs: The number of environments, N.
        num_transitions_per_env: The number of steps, T.
        fields: The fields by name.
        extractors: The two extractors of ``amp_cfg``, or None.
    """

    num_envs: int
    num_transitions_per_env: int
    fields: tuple[tuple[str, RolloutField], ...]
    extractors: tuple[Extractor, Extractor] | None = None

    @property
    def checks(self) -> StepChecks:
        """The object that checks the fields of a step."""
        return StepChecks(dict(self.fields), self.num_envs, self.spec, JaxArrays())

    @property
    def spec(self) -> Spec:
        """The spec of the arrays; dtypes that JAX lacks are replaced."""
        replaced, spec = replaced_dtypes(), stored_spec(dict(self.fields))
        held = {name: one.replace(dtype=replaced.get(one.dtype, one.dtype)) for name, one in spec.items()}
        return Spec(held, spec.alignment, spec.batch_dims)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollout:
    """A rollout, the pytree that the functions of this module take and return.

    Args:
        arrays: Fields ``[T, N, ...]``, including masks.
        hidden_states: ``(actor, critic)``, arrays ``[T, ...]``, or None.
        step: The number of rows that were appended, int32 ``[]``; larger than T if rows were dropped.
        epoch: The number of epochs of mini-batches that were read, uint32 ``[]``.
        computed: Whether returns were computed for the current rows, bool ``[]``.
        seed: The two 32-bit halves of the seed, uint32 ``[2]``, the upper half first.
        layout: The constants, which are static in ``jax.jit``.
    """

    arrays: dict[str, jax.Array]
    hidden_states: Any
    step: jax.Array
    epoch: jax.Array
    computed: jax.Array
    seed: jax.Array
    layout: Layout = field(metadata={"static": True})

    def __getitem__(self, name: str) -> jax.Array:
        """Return the array of a field, ``[T, N, ...]``."""
        try:
            return self.arrays[name]
        except KeyError:
            raise MissingFieldError(f"rollout: expected one of {list(self.arrays)}, found {name!r}") from None


def checked_hidden(rollout: Rollout, given: Any, step: int | None) -> Any:
    """Return the hidden states to write, nested like the rollout's hidden states; None if the rollout has no hidden
    states.

    ``(None, None)`` means states of zeros, as before the first step of a policy.
    """
    held = rollout.hidden_states
    pair = isinstance(given, tuple | list) and len(given) == 2
    if held is None or not pair:
        if held is not None or not policy_states.is_empty(given):
            raise SchemaError("hidden_states: expected states both in init and in every row, or in neither")
        return None

    def check(path: str, array: jax.Array, leaf: Any) -> jax.Array:
        policy_states.check_envs(path, np.shape(leaf), rollout.layout.num_envs)
        if np.shape(leaf) != array.shape[1:]:
            raise SchemaError(f"{path}: expected shape {list(array.shape[1:])}, found {list(np.shape(leaf))}")
        return jnp.asarray(leaf, array.dtype)

    def zeros(path: str, array: jax.Array) -> jax.Array:
        return jnp.zeros_like(array[0])

    row = []
    for place, (arrays, states) in enumerate(zip(held, given, strict=True)):
        path = f"hidden_states[{place}]"
        if policy_states.is_empty(states) and not policy_states.is_empty(arrays):
            if step:
                raise SchemaError(f"{path}: expected a value in every row, found none in row {step}")
            row.append(policy_states.tree_map(zeros, arrays, path=path))
        else:
            row.append(policy_states.tree_map(check, arrays, states, path=path))
    # The result has the type of the rollout's pair, because one ``tree.map`` runs over the result and that pair.
    return type(held)(row)


def check_full(rollout: Rollout, caller: str) -> None:
    """Raise RolloutError if the rollout is not full. Do nothing if values are traced."""
    step = known(rollout.step)
    if step is not None and step != rollout.layout.num_transitions_per_env:
        raise RolloutError(f"{caller}: expected {rollout.layout.num_transitions_per_env} rows, found {step}")


def check_readable(rollout: Rollout, caller: str) -> None:
    """Raise RolloutError if the rollout is not full or lacks returns. Do nothing if values are traced."""
    check_full(rollout, caller)
    if "values" in rollout.arrays and known(rollout.computed) == 0:
        raise RolloutError(f"{caller}: expected returns, found none for these rows; call compute_returns first")


def _flat(rollout: Rollout) -> dict[str, jax.Array]:
    return {name: array.reshape((-1, *array.shape[2:])) for name, array in rollout.arrays.items()}


def amp_of(rollout: Rollout) -> AmpStates | None:
    """Return the outputs of the AMP extractors for all rows; None if there are no extractors."""
    extractors = rollout.layout.extractors
    return None if extractors is None else amp_states(_flat(rollout), *extractors)


def row_taker(rollout: Rollout, histories: Mapping[str, int]) -> Callable[[jax.Array], MiniBatch]:
    """Return a function that creates a mini-batch from indices of rows."""
    flat, starts, amp = _flat(rollout), episode_starts(rollout["dones"]), amp_of(rollout)

    def take(rows: jax.Array) -> MiniBatch:
        return take_rows(
            flat,
            rows,
            starts,
            amp=amp,
            histories=tuple(histories.items()),
            hidden_states=rollout.hidden_states,
        )

    return take


@partial(jax.jit, static_argnames="histories")
def _take_rows(*args: Any, histories: tuple[tuple[str, int], ...], **options: Any) -> MiniBatch:
    return take_mini_batch(*args, histories=dict(histories), **options)


take_rows: Callable[..., MiniBatch] = _take_rows
"""``take_mini_batch``, compiled; ``histories`` are pairs of a field and a number of frames."""

take_environments: Callable[..., MiniBatch] = jax.jit(take_recurrent_mini_batch, static_argnames="num_trajectories")
"""``take_recurrent_mini_batch``, compiled."""


def _put_rows(arrays: Any, rows: Any, step: jax.Array) -> Any:
    fields, hidden = arrays
    put = {
        name: fields[name].at[step].set(row.astype(fields[name].dtype), mode="drop") for name, row in rows[0].items()
    }
    return {**fields, **put}, jax.tree.map(lambda array, row: array.at[step].set(row, mode="drop"), hidden, rows[1])


put_rows: Callable[..., Any] = jax.jit(_put_rows)
"""Write the rows of one step, and return the fields and hidden states; a step after the first T steps changes
nothing.
"""


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
) -> Rollout:
    """Create an empty rollout.

    Args:
        num_envs, num_transitions_per_env, fields, seed, amp_cfg: The same arguments as in
            ``mouse_core.rollouts.RolloutStorage``; ``motion_mimic_fields`` returns the fields of
            ``RolloutStorage.motion_mimic``. Memory for every field is allocated in advance, so each optional field
            needs a mask that marks missing values. The seed can be traced: ``jax.vmap`` then creates rollouts for many
            seeds, and each rollout has the same order of rows as a single rollout with its seed. A negative seed raises
            an error, unless the seed is traced; a traced seed is taken modulo 2**32, or 2**64 for int64.
        hidden_states: The hidden states ``(actor, critic)`` of one step, whose shapes and dtypes are allocated for all
            steps; None: the rollout has no hidden states.

    Returns:
        A pytree with memory for T steps.

    Raises:
        ConfigError: An argument is invalid.
        SchemaError: ``hidden_states`` have a number of environments other than ``num_envs``.
    """
    check_count("num_envs", num_envs)
    check_count("num_transitions_per_env", num_transitions_per_env)
    completed = complete_fields(fields)
    for name, one in completed.items():
        if one.optional and not one.mask:
            raise ConfigError(
                f"fields[{name!r}]: when optional=True, expected mask=True, since memory is "
                f"allocated in advance and the mask marks missing values"
            )
    halves = seed_halves(seed)
    shape, extractors = (int(num_transitions_per_env), int(num_envs)), find_extractors(amp_cfg, completed)
    layout = Layout(shape[1], shape[0], tuple(completed.items()), extractors)

    def memory(path: str, leaf: Any) -> jax.Array:
        policy_states.check_envs(path, np.shape(leaf), layout.num_envs)
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
    """Append one step of all environments, and return the rollout.

    If the call is compiled by ``jax.jit`` with the rollout donated, rows are written in place.

    Args:
        rollout: A rollout.
        transition: The transition, as in ``RolloutStorage.add_transitions``. If the rollout has hidden states, None in
            place of the actor's or critic's states means zeros; None is allowed only in the first row, or if the index
            of the row is traced.

    Raises:
        RolloutFullError: The rollout is full; under ``jax.jit`` the step is dropped instead.
        SchemaError, MissingFieldError, DataError: See ``RolloutStorage.add_transitions``; values are checked only if
            they are on the CPU and not traced.
    """
    layout = rollout.layout
    step = known(rollout.step)
    most = layout.num_transitions_per_env
    if step is not None and step >= most:
        raise RolloutFullError(f"append: expected at most {most} rows, found one more row; call clear first")
    given = layout.checks.given(transition)
    rows = layout.checks.rows(given, step)
    hidden = checked_hidden(rollout, given.get("hidden_states"), step)
    arrays, hidden = put_rows((rollout.arrays, rollout.hidden_states), (rows, hidden), rollout.step)
    return replace(rollout, arrays=arrays, hidden_states=hidden, step=rollout.step + 1, computed=jnp.asarray(False))


def clear(rollout: Rollout) -> Rollout:
    """Return the rollout without rows. The count of epochs is not reset, so later epochs have new orders of rows."""
    return replace(rollout, step=jnp.int32(0), computed=jnp.asarray(False))


def get_statistics(rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """Return the mean length of trajectories, ``[]``, and the mean reward, ``[]`` or ``[K]``.

    The end of the rollout also ends a trajectory.

    Raises:
        RolloutError: The rollout has no rows (checked only if the number of rows is not traced).
    """
    if known(rollout.step) == 0:
        raise RolloutError("get_statistics: expected at least one row, found none")
    filled = jnp.arange(rollout.layout.num_transitions_per_env)[:, None] < rollout.step
    starts = episode_starts(rollout["dones"]) & filled
    rows, rewards = filled.sum() * rollout.layout.num_envs, rollout["rewards"]
    mean = jnp.where(filled[..., None], rewards, 0.0).sum((0, 1)) / rows
    return rows / starts.sum(), mean[0] if mean.size == 1 else mean


def compute_returns(
    rollout: Rollout,
    last_values: Any,
    gamma: Any,
    lam: Any,
    normalize_advantage: bool = True,
    time_outs: Any = None,
    final_values: Any = None,
) -> Rollout:
    """Return the rollout with ``returns`` and ``advantages`` by generalized advantage estimation, computed in a scan.

    Args:
        rollout: A full rollout.
        last_values, time_outs, final_values: The same arguments as in ``RolloutStorage.compute_returns``.
        gamma, lam: Numbers from 0 to 1; can be traced.
        normalize_advantage: The same option as in ``RolloutStorage.compute_returns``; static in ``jax.jit``.

    Raises:
        RolloutError, ConfigError, SchemaError, DataError, MissingFieldError: See ``RolloutStorage.compute_returns``;
            raised only if the values are not traced.
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
    advantages = normalized(advantages, by_component=True) if normalize_advantage else advantages
    computed = {"returns": found, "advantages": advantages}
    computed = {name: array.astype(rollout[name].dtype) for name, array in computed.items()}
    return replace(rollout, arrays={**rollout.arrays, **computed}, computed=jnp.asarray(True))


def permutation(rollout: Rollout, offset: Any = 0) -> jax.Array:
    """Return the order of the rows in the epoch that comes ``offset`` epochs after the current epoch, int32 ``[T *
    N]``.

    In a scan over epochs, pass the index of the epoch (from 0) as ``offset``, reshape the order to ``[num_mini_batches,
    -1]``, and call ``mini_batch`` in a scan over the rows of the reshaped order. After the last epoch, call
    ``advance``.
    """
    layout = rollout.layout
    epoch = rollout.epoch + jnp.asarray(offset).astype(jnp.uint32)
    return _philox.permutation(rollout.seed, epoch, layout.num_transitions_per_env * layout.num_envs)


def advance(rollout: Rollout, num_epochs: Any) -> Rollout:
    """Return the rollout with the count of epochs increased by ``num_epochs``, so that the orders of rows of these
    epochs are not used again.
    """
    return replace(rollout, epoch=rollout.epoch + jnp.asarray(num_epochs).astype(jnp.uint32))


def mini_batch(rollout: Rollout, rows: jax.Array, *, histories: Mapping[str, int] | None = None) -> MiniBatch:
    """Return the mini-batch of ``rows``.

    Args:
        rollout: A full rollout; if the rollout has the field ``values``, its returns must be computed.
        rows: Flat indices of rows, ``step * N + env``, int32 ``[B]``.
        histories: A dict from field to a number of frames H; the mini-batch also contains the last H frames of these
            fields.

    Raises:
        RolloutError, ConfigError: See ``mini_batches``.
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
    """Return mini-batches that contain every row once per epoch, in the order of
    ``RolloutStorage.mini_batch_generator``.

    For scans, use ``permutation`` and ``mini_batch``.

    Args:
        rollout: A full rollout; if the rollout has the field ``values``, its returns must be computed.
        num_mini_batches, num_epochs, drop_last, histories: The same options as in
            ``RolloutStorage.mini_batch_generator``; static in ``jax.jit``.

    Returns:
        The rollout after these epochs, and an iterator over the mini-batches, which are pytrees; under ``jax.jit``, a
        tuple of the mini-batches instead of the iterator.

    Raises:
        RolloutError: The rollout is not full or lacks returns (checked only for values that are not traced).
        ConfigError: A number is out of range, or ``histories`` names an unknown field.
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
    """Return mini-batches of trajectories, equal to the mini-batches of
    ``RolloutStorage.recurrent_mini_batch_generator``.

    Args:
        rollout: A full rollout; if the rollout has the field ``values``, its returns must be computed.
        num_mini_batches, num_epochs, drop_last, shuffle: The same options as in
            ``RolloutStorage.recurrent_mini_batch_generator``; static in ``jax.jit``.
        num_trajectories: The number of trajectories in a mini-batch, K; additional trajectories are empty. None means
            the actual number of trajectories, which differs between mini-batches, so code is compiled for each
            mini-batch. Under ``jax.jit``, the actual number is unknown, and None means T times the number of
            environments.

    Returns:
        The rollout after these epochs, and an iterator over the mini-batches; under ``jax.jit``, a tuple of the
        mini-batches instead of the iterator.

    Raises:
        RolloutError, ConfigError: See ``mini_batches``.
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
        )

    def order(number: int) -> jax.Array:
        if not shuffle:
            return jnp.arange(layout.num_envs)
        return _philox.permutation(rollout.seed, rollout.epoch + jnp.uint32(number), layout.num_envs)

    orders = (order(number) for number in range(num_epochs))
    return advance(rollout, num_epochs), _delivered(rollout, (take(envs[part]) for envs in orders for part in parts))


def _delivered(rollout: Rollout, batches: Iterator[MiniBatch]) -> Batches:
    """Return an iterator over the mini-batches, or, under ``jax.jit``, a tuple of all mini-batches."""
    # Under jax.vmap over seeds, the seed may be the only traced value.
    return batches if are_known(*jax.tree.leaves(rollout), anywhere=True) else tuple(batches)
