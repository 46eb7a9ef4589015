"""Draws batches from a replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError
from mouse_core.nested import as_array
from mouse_core.replay.device import DrawKey
from mouse_core.replay.device.samplers import ByPriority, check_left, priorities_of
from mouse_core.spec import check_count
from mouse_jax.device.arrays import JAX
from mouse_jax.device.state import Replay, check_one, on_host, put_on_device, put_on_host
from mouse_jax.dtypes import are_known, as_key, is_key


def can_sample(replay: Replay, min_length: Any = 1) -> jax.Array:
    """Return whether a batch can be drawn and the replay has ``min_length`` rows: bool ``[]``.

    A batch needs one row or slice; in the orders "epochs" and "queue", it needs ``batch_size`` rows or slices.
    """
    asked = _asked(replay), min_length
    known = are_known(*jax.tree.leaves(asked))  # also in jax.jit
    with jax.ensure_compile_time_eval() if known else nullcontext():
        return cast("jax.Array", _ready(*asked))


def _asked(replay: Replay) -> Replay:
    """Return the part of a state that determines whether a batch can be drawn; rows and seed may be traced."""
    nothing: Any = None
    return replace(replay, rows=nothing, seed=nothing)


@jax.jit
def _ready(replay: Replay, min_length: Any) -> jax.Array:
    sampler, ring = replay.layout.sampler, replay.ring
    enough = sampler.left(JAX, replay.state, ring) >= sampler.fewest(replay.layout.batch_size)
    ready: jax.Array = (ring.rows >= min_length) & enough
    return ready


def sample(replay: Replay, index: Any, batch_size: int | None = None, *, beta: Any = None) -> dict[str, Any]:
    """Return batch number ``index``, which depends only on the seed, the number and the writes.

    On the host, a ``mouse_core.replay.ReplayBuffer`` with the same seed and writes draws the same rows in its sample of
    this number. The buffer's sampler must be a ``RandomSampler`` or ``SliceSampler``; with priorities, a
    ``PrioritizedSampler`` or ``PrioritizedSliceSampler``.

    Args:
        replay: A replay with rows; under ``jax.jit``, which raises no errors, see ``can_sample``.
        index: The number of the sample, from 0, below 2**32; may be traced. Or a random key of JAX; the host cannot
            repeat such draws.
        batch_size: Number of rows or slices in the batch, B; by default the batch size of the replay.
        beta: The exponent of ``priority_weight``: a number from 0, which may be traced, or a traceable function from
            the number of the sample, such as a ``LinearSchedule``; by default the exponent of the replay.

    Returns:
        ``{field: [B, ...]}``, or ``[B, S, ...]`` for slices, nested as the rows are, after the transforms; and
        ``index``, int32, the slots of the rows. With priorities, ``priority_weight``, float32 of the same shape, is
        ``(p_i / p_min) ** -beta`` with a relative error of up to ``1e-5``. Slices also have ``traj_id`` (unless the
        rows have a field of this name), and ``mask`` if they are padded. Rows other than dicts are the field ``data``.

    Raises:
        ConfigError: A number is out of range, or values are known and no batch can be drawn.
        SchemaError, MissingFieldError: An error of a transform.
    """
    layout = replay.layout
    size = layout.batch_size if batch_size is None else check_count("batch_size", batch_size)
    if layout.sampler.order != "random":
        raise ConfigError(f"sample: expected order='random', found {layout.sampler.order!r}; take gives the next batch")
    _check(replay, "sample")
    if beta is not None and replay.beta is None:
        raise ConfigError(f"beta: expected a replay made with priorities=, found one without, and {beta!r}")
    number = checked_index(index)
    beta = layout.schedule if beta is None else beta
    if callable(beta):
        if is_key(number.dtype):
            raise ConfigError("index: expected the number of the sample, which the schedule needs, found a random key")
        beta = beta(number)
    return _batch(replay, number, beta, size)[1]


def prefetch(
    replay: Replay, numbers: Iterable[Any], batch_size: int | None = None, *, depth: int = 2
) -> Iterator[dict[str, Any]]:
    """Yield the batches with these ``numbers``, in order; later batches are started before the caller takes one.

    With ``memory="host"``, the host thus gathers and copies rows while the device computes. As ``add`` changes such a
    replay in place, call it before or after the iteration, not during it.

    Args:
        replay: A replay, outside of ``jax.jit``.
        numbers: The numbers of samples, as ``index`` in ``sample``, such as ``range(100, 150)``.
        batch_size: Rows or slices in a batch; by default the batch size of the replay.
        depth: Number of batches that are started in advance, at least 1.

    Raises:
        ConfigError: ``depth`` is below 1; else see ``sample``.

    Example:
        >>> import jax.numpy as jnp
        >>> from mouse_jax import device
        >>> replay = device.init({"reward": 0.0}, 100, batch_size=4, memory="host")
        >>> replay = device.add(replay, {"reward": jnp.ones(10)})
        >>> sum(float(batch["reward"].sum()) for batch in device.prefetch(replay, range(3)))
        12.0
    """
    check_count("depth", depth)
    return _ahead(replay, numbers, batch_size, depth)


def _ahead(replay: Replay, numbers: Iterable[Any], batch_size: int | None, depth: int) -> Iterator[dict[str, Any]]:
    begun: deque[dict[str, Any]] = deque()
    for number in numbers:
        begun.append(sample(replay, number, batch_size))
        if len(begun) > depth:
            yield begun.popleft()
    yield from begun


def take(replay: Replay, index: Any = 0) -> tuple[Replay, dict[str, Any]]:
    """Return the replay after the next batch, and this batch; for the orders "epochs" and "queue".

    The batch equals the batch of a ``mouse_core.replay.ReplayBuffer`` with the corresponding sampler. For
    ``order="epochs"`` this is ``SamplerWithoutReplacement(drop_last=True)``: an epoch ends when too few rows are left
    for a batch, or when the number of rows changes. For slices it is
    ``SliceSamplerWithoutReplacement(drop_last=True)``, and an epoch also ends with every write. For ``order="queue"``
    it is ``ConsumingSampler(shuffle=False, drop_last=True)``: the batch has the oldest rows that were not returned yet.
    With environments, rows are ordered by time step, so ``reshape(-1, num_envs, ...)`` returns ``[time, env]``; see
    ``can_add``. With ``order="random"``, the batch equals the result of ``sample``, and the replay is unchanged.

    Args:
        replay: A replay with rows for a batch; under ``jax.jit``, which raises no errors, see ``can_sample``. A queue
            with too few rows is unchanged.
        index: The number of the sample, as in ``sample``; a queue ignores it. Epochs accept no random key.

    Returns:
        The replay, and a batch as in ``sample``.

    Raises:
        ConfigError: A number is out of range, or values are known and the replay has too few rows.
        SchemaError, MissingFieldError: An error of a transform.
    """
    if replay.layout.sampler.order == "random":
        return replay, sample(replay, index)
    _check(replay, "take")
    number = checked_index(index)
    if is_key(number.dtype):
        raise ConfigError("index: expected an integer where each row comes once, found a random key")
    state, batch = _batch(replay, number, None, replay.layout.batch_size)
    return replace(replay, state={**replay.state, **state}), batch


def _batch(replay: Replay, number: jax.Array, beta: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """Return the state of the sampler after a batch, and the batch on the device."""
    if not on_host(replay):
        return cast("tuple[Any, dict[str, Any]]", _drawn(replay, number, beta, size=size))
    state, batch = _drawn(replay, *put_on_host((number, beta)), size=size)
    return state, put_on_device(batch)


@partial(jax.jit, static_argnames="size")
def _drawn(replay: Replay, number: jax.Array, beta: Any, size: int) -> tuple[Any, dict[str, Any]]:
    layout = replay.layout
    number = number if is_key(number.dtype) else number.astype(jnp.uint32)
    state, plan = layout.sampler.draw(JAX, replay.state, replay.ring, DrawKey(replay.seed, number), size)
    rows = jax.tree.map(lambda memory: memory.at[plan.read].get(mode="promise_in_bounds"), replay.rows)
    exponent = replay.beta if beta is None else jnp.asarray(beta, jnp.float32)
    batch = plan.batch(JAX, rows, exponent)
    # An unchanged state is not returned, because XLA would copy it.
    changed = {name: arrays for name, arrays in state.items() if arrays is not replay.state[name]}
    return changed, batch if layout.transform is None else layout.transform(batch)


def _check(replay: Replay, caller: str) -> None:
    """Raise ConfigError if values are known and no batch can be drawn."""
    check_one(replay, caller)
    if not are_known(*jax.tree.leaves(_asked(replay))) or bool(can_sample(replay)):
        return
    sampler, layout = replay.layout.sampler, replay.layout
    left = int(sampler.left(JAX, replay.state, replay.ring))
    check_left(sampler, left, layout.batch_size, int(replay.size), caller)


def checked_index(index: Any) -> jax.Array:
    """Return the checked number of a sample, or a random key."""
    if not hasattr(index, "dtype") or isinstance(index, np.generic):
        if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < 1 << 32:
            raise ConfigError(f"index: expected an integer in [0, 2**32) or a random key, found {index!r:.60}")
        return jnp.asarray(index, jnp.uint32)
    number = as_key(jnp.asarray(index))
    if number.ndim or not (is_key(number.dtype) or jnp.issubdtype(number.dtype, jnp.integer)):
        raise ConfigError(f"index: expected an integer or a random key, found {number.dtype} {list(number.shape)}")
    if not is_key(number.dtype) and are_known(number) and (known := int(np.asarray(number))) < 0:
        raise ConfigError(f"index: expected an integer in [0, 2**32), found {known}")
    return number


def check_transform(replay: Replay) -> None:
    """Raise the errors of transforms for a batch without values."""
    if replay.layout.transform is not None:
        outline: Any = jax.ShapeDtypeStruct
        shapes = jax.tree.map(lambda leaf: outline(leaf.shape, leaf.dtype), replay)
        size = replay.layout.batch_size
        jax.eval_shape(lambda replay, number: _drawn(replay, number, None, size=size), shapes, outline((), jnp.uint32))


def set_priorities(replay: Replay, indices: Any, priorities: Any) -> Replay:
    """Return the replay with new priorities of some rows; if a row occurs twice, its last priority counts.

    The replay then draws the same rows as a ``mouse_core.replay.ReplayBuffer`` after ``update_priority`` with the same
    arguments. Compiled with the replay donated, the call copies no part of the replay.

    Args:
        replay: A replay of ``init(..., priorities=)``.
        indices: The slots of the rows, integers of any shape, as in the field ``index`` of a batch. Under ``jax.jit``,
            unused slots are ignored. Negative slots are always ignored, so ``jnp.where(batch["mask"], batch["index"],
            -1)`` leaves out padded steps.
        priorities: Numbers from 0, converted to float32, of the same shape (further axes of length 1 are allowed); or
            one number for each slice, ``[B]`` or ``[B, 1]``. Under ``jax.jit``, which raises no errors, negative
            priorities and NaN change nothing, and too large priorities get the largest possible weight.

    Raises:
        ConfigError: The replay has no priorities, shapes do not match, or indices are not integers.
        DataError, IndexError: An error of ``update_priority``, if values are known; negative indices are ignored.
    """
    check_one(replay, "set_priorities")
    given = (
        jnp.asarray(values if isinstance(values, jax.Array) else as_array(values, where="set_priorities"))
        for values in (indices, priorities)
    )
    sampler, slots, values = priorities_of(JAX, replay.layout.sampler, *given)
    if are_known(slots, values, replay.size):
        sampler.checked(np.asarray(slots), np.asarray(values), int(replay.ring.rows))
    if not slots.size:
        return replay
    if on_host(replay):
        return cast("Replay", _set_in_place(replay, *put_on_host((slots, values))))
    return cast("Replay", _set(replay, slots, values))


def _updated(replay: Replay, slots: jax.Array, values: jax.Array) -> Replay:
    sampler = cast("ByPriority", replay.layout.sampler)
    return replace(replay, state=sampler.update(JAX, replay.state, replay.ring, slots, values))


_set = jax.jit(_updated)
_set_in_place = jax.jit(_updated, donate_argnums=0)
