"""The pytree of a rollout, and checks of what is added to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError, MissingFieldError, RolloutError, SchemaError, Spec
from mouse_core.randomness import check_seed
from mouse_core.rollouts import MiniBatch, RolloutField, episode_starts, policy_states
from mouse_core.rollouts.fields import HostArrays, StepChecks, stored_spec
from mouse_core.rollouts.mini_batches import (
    AmpStates,
    Extractor,
    amp_states,
    take_mini_batch,
    take_recurrent_mini_batch,
)
from mouse_jax.dtypes import as_key, is_key, replaced_dtypes

for _kind in (AmpStates, MiniBatch):
    jax.tree_util.register_dataclass(_kind, [one.name for one in dataclasses.fields(_kind)], [])


class JaxArrays(HostArrays):
    """Arrays as they are given, JAX's or NumPy's, whose values may be traced."""

    def array(self, value: Any) -> Any:
        """A value as an array."""
        return value if isinstance(value, jax.Array) else super().array(value)

    def may_look(self, array: Any) -> bool:
        """Whether values are known, and no device has to be waited for."""
        return are_known(array)


@dataclass(frozen=True)
class Layout:
    """Constants of a rollout.

    Args:
        num_envs: N.
        num_transitions_per_env: T.
        fields: Names and fields.
        extractors: The two of ``amp_cfg``, or None.
        hidden_axis: Where hidden states of one step have their environments.
    """

    num_envs: int
    num_transitions_per_env: int
    fields: tuple[tuple[str, RolloutField], ...]
    extractors: tuple[Extractor, Extractor] | None = None
    hidden_axis: int | None = None

    @property
    def checks(self) -> StepChecks:
        """Layout of a step."""
        return StepChecks(dict(self.fields), self.num_envs, self.spec, JaxArrays())

    @property
    def spec(self) -> Spec:
        """The arrays, with the dtypes in which JAX holds them."""
        replaced, spec = replaced_dtypes(), stored_spec(dict(self.fields))
        held = {name: one.replace(dtype=replaced.get(one.dtype, one.dtype)) for name, one in spec.items()}
        return Spec(held, spec.alignment, spec.batch_dims)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollout:
    """A rollout, as the functions of this module take and return it: a pytree.

    Args:
        arrays: Fields ``[T, N, ...]``, masks among them.
        hidden_states: ``(actor, critic)``, arrays ``[T, ...]``, or None.
        step: Number of rows that were added, int32 ``[]``; more than T if rows were dropped.
        epoch: Number of epochs of mini-batches that were read, uint32 ``[]``.
        computed: Whether returns belong to the rows, bool ``[]``.
        seed: The halves of the seed, uint32 ``[2]``.
        layout: What does not change; static.
    """

    arrays: dict[str, jax.Array]
    hidden_states: Any
    step: jax.Array
    epoch: jax.Array
    computed: jax.Array
    seed: jax.Array
    layout: Layout = field(metadata={"static": True})

    def __getitem__(self, name: str) -> jax.Array:
        """The array of a field, ``[T, N, ...]``."""
        try:
            return self.arrays[name]
        except KeyError:
            raise MissingFieldError(f"rollout: expected one of {list(self.arrays)}, found {name!r}") from None


def known(value: Any) -> int | None:
    """A number, where it is not traced."""
    return None if isinstance(value, jax.core.Tracer) else int(value)


def are_known(*arrays: Any, anywhere: bool = False) -> bool:
    """Whether values can be looked at: none is traced, and all are on the host, so that no device is waited for.

    Args:
        arrays: The values.
        anywhere: Whether they may be on any device.
    """
    for array in arrays:
        if isinstance(array, jax.core.Tracer):
            return False
        if (
            not anywhere
            and isinstance(array, jax.Array)
            and any(device.platform != "cpu" for device in array.devices())
        ):
            return False
    return True


def seed_halves(seed: Any) -> jax.Array:
    """The halves of a seed, uint32 ``[2]``, high first; the seed, or a random key of JAX, may be traced.

    Raises:
        ConfigError: Not an integer in ``[0, 2**64)``, as far as that is known, nor a key.
    """
    if isinstance(seed, jax.Array):
        seed = as_key(seed)
        if is_key(seed.dtype) and not seed.ndim:
            return jax.random.bits(seed, (2,), jnp.uint32)
        if seed.ndim or not jnp.issubdtype(seed.dtype, jnp.integer):
            raise ConfigError(
                f"seed: expected an integer in [0, 2**64) or a random key, found {seed.dtype} {list(seed.shape)}"
            )
        if isinstance(seed, jax.core.Tracer):
            # JAX has 64-bit integers only where they were asked for.
            high = (seed >> 32).astype(jnp.uint32) if seed.dtype.itemsize == 8 else jnp.uint32(0)
            return jnp.stack([high, seed.astype(jnp.uint32)])
        seed = int(seed)
    seed = check_seed(seed)
    return jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)


def checked_hidden(rollout: Rollout, given: Any, step: int | None) -> Any:
    """The hidden states to write, in the structure of the rollout's; None where it has none.

    Before its first step a policy has no state, and says so by (None, None): zeros.
    """
    held = rollout.hidden_states
    pair = isinstance(given, tuple | list) and len(given) == 2
    if held is None or not pair:
        if held is not None or not policy_states.is_empty(given):
            raise SchemaError("hidden_states: expected them in every row, and in init, or nowhere")
        return None

    def check(path: str, array: jax.Array, leaf: Any) -> jax.Array:
        policy_states.check_envs(path, np.shape(leaf), rollout.layout.num_envs, rollout.layout.hidden_axis)
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
                raise SchemaError(f"{path}: expected it in every row, found none in row {step}")
            row.append(policy_states.tree_map(zeros, arrays, path=path))
        else:
            row.append(policy_states.tree_map(check, arrays, states, path=path))
    # A pair of the same type, for the two are mapped over together.
    return type(held)(row)


def check_full(rollout: Rollout, caller: str) -> None:
    """RolloutError if the rollout is known to lack rows."""
    step = known(rollout.step)
    if step is not None and step != rollout.layout.num_transitions_per_env:
        raise RolloutError(f"{caller}: expected {rollout.layout.num_transitions_per_env} rows, found {step}")


def check_readable(rollout: Rollout, caller: str) -> None:
    """RolloutError if the rollout is known to lack rows, or returns."""
    check_full(rollout, caller)
    if "values" in rollout.arrays and known(rollout.computed) == 0:
        raise RolloutError(f"{caller}: expected returns, found none for these rows; compute_returns first")


def _flat(rollout: Rollout) -> dict[str, jax.Array]:
    return {name: array.reshape((-1, *array.shape[2:])) for name, array in rollout.arrays.items()}


def amp_of(rollout: Rollout) -> AmpStates | None:
    """Return the outputs of the extractors for all rows; None without extractors."""
    extractors = rollout.layout.extractors
    return None if extractors is None else amp_states(_flat(rollout), *extractors)


def row_taker(rollout: Rollout, histories: Mapping[str, int]) -> Callable[[jax.Array], MiniBatch]:
    """The function from row numbers to a mini-batch."""
    flat, starts, amp = _flat(rollout), episode_starts(rollout["dones"]), amp_of(rollout)

    def take(rows: jax.Array) -> MiniBatch:
        return take_rows(
            flat,
            rows,
            starts,
            amp=amp,
            histories=tuple(histories.items()),
            hidden_states=rollout.hidden_states,
            hidden_axis=rollout.layout.hidden_axis,
        )

    return take


@partial(jax.jit, static_argnames=("histories", "hidden_axis"))
def _take_rows(*args: Any, histories: tuple[tuple[str, int], ...], **options: Any) -> MiniBatch:
    return take_mini_batch(*args, histories=dict(histories), **options)


take_rows: Callable[..., MiniBatch] = _take_rows
"""``take_mini_batch``, compiled; ``histories`` are pairs of a field and a number of frames."""

take_environments: Callable[..., MiniBatch] = jax.jit(
    take_recurrent_mini_batch, static_argnames=("num_trajectories", "hidden_axis")
)
"""``take_recurrent_mini_batch``, compiled."""


def _put_rows(arrays: Any, rows: Any, step: jax.Array) -> Any:
    fields, hidden = arrays
    put = {
        name: fields[name].at[step].set(row.astype(fields[name].dtype), mode="drop") for name, row in rows[0].items()
    }
    return {**fields, **put}, jax.tree.map(lambda array, row: array.at[step].set(row, mode="drop"), hidden, rows[1])


put_rows: Callable[..., Any] = jax.jit(_put_rows)
"""(fields, hidden states) with the rows of one step; a step beyond the last one changes nothing."""
