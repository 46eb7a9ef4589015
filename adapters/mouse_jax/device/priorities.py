"""Saying how important rows are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError
from mouse_core.nested import as_array
from mouse_core.replay.samplers.weighing import priorities_like, weighed
from mouse_jax._rollout import are_known
from mouse_jax.device import _episodes
from mouse_jax.device.ground import hosting, sum_tree
from mouse_jax.device.ground.state import Episodes, Replay, check_one


def set_priorities(replay: Replay, indices: Any, priorities: Any) -> Replay:
    """The replay with priorities of some rows; of a row that comes twice the last one counts.

    It draws then what a ``mouse_core.replay.ReplayBuffer`` does after ``update_priority`` with the same. Compiled with
    the replay donated nothing of it is copied.

    Args:
        replay: One made with ``init(..., priorities=)``.
        indices: Their slots, integers of any shape, as ``sample`` gives them in ``index``. Under ``jax.jit`` those that
            are not in use are left out, so that ``jnp.where(batch["mask"], batch["index"], -1)`` leaves steps out that
            are not there.
        priorities: Numbers from 0, which become float32, of the same shape, also with axes of length 1 behind it, or
            one for each slice: ``[B]`` or ``[B, 1]``. Under ``jax.jit``, where nobody can tell, rows with negative ones
            and NaN keep theirs, and those that are larger than a row may have weigh as much as one may.

    Raises:
        ConfigError: A replay without priorities, shapes that do not go together, or indices that are no integers.
        DataError, IndexError: As of ``update_priority``, where values are known; a negative index is left out.
    """
    weights = replay.weights
    if weights is None:
        raise ConfigError("set_priorities: expected a replay made with priorities=, found one without")
    check_one(replay, "set_priorities")
    slots, given = (
        jnp.asarray(values if isinstance(values, jax.Array) else as_array(values, where="set_priorities"))
        for values in (indices, priorities)
    )
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ConfigError(f"set_priorities: expected integers as indices, found {slots.dtype}")
    shape = slots.shape
    # Only its shape matters here.
    places = priorities_like(np.zeros(shape, np.int8), np.arange(given.size, dtype=np.int64).reshape(given.shape))
    values = given.reshape(-1)[places].astype(jnp.float32).reshape(-1)
    slots = slots.reshape(-1).astype(jnp.int32)
    if are_known(slots, values, replay.size):
        known, rows = np.asarray(slots), int(replay.size) * (replay.layout.num_envs or 1)
        weighed(np.asarray(values)[known >= 0], weights.capacity, weights.alpha, weights.eps)
        if known.size and known.max() >= rows:
            raise IndexError(f"set_priorities: expected slots in 0..{rows - 1}, found {known.max()}")
    if not slots.size:
        return replay
    if hosting.on_host(replay):
        return cast("Replay", _set_in_place(replay, *hosting.to_host((slots, values))))
    return cast("Replay", _set(replay, slots, values))


def _updated(replay: Replay, slots: jax.Array, values: jax.Array) -> Replay:
    rows = replay.size * (replay.layout.num_envs or 1)
    assert replay.weights is not None
    return replace(replay, weights=sum_tree.updated(replay.weights, rows, slots, values))


_set = jax.jit(_updated)
_set_in_place = jax.jit(_updated, donate_argnums=0)


def written(replay: Replay, count: int) -> Replay:
    """The replay with the priorities of its newest time steps, and where slices begin since they are there."""
    if replay.weights is None:
        return replay
    return replace(replay, weights=_written(replace(replay, rows=None), count))


@partial(jax.jit, static_argnums=1)
def _written(replay: Replay, count: int) -> sum_tree.Weights:
    weights, known, layout = replay.weights, replay.episodes, replay.layout
    assert weights is not None
    envs, capacity = layout.num_envs or 1, layout.capacity
    begin = (replay.cursor - count) % layout.steps * envs
    room = capacity - begin
    behind = jnp.arange(count * envs, dtype=jnp.int32)
    weights = sum_tree.filled(weights, jnp.where(behind < room, begin + behind, behind - room))
    if known is None:
        nodes = sum_tree.touched(begin, count * envs, capacity)
    else:
        weights, nodes = _begun(replay, weights, known, count)
    return sum_tree.refreshed(weights, nodes)


def _begun(
    replay: Replay, weights: sum_tree.Weights, known: Episodes, count: int
) -> tuple[sum_tree.Weights, jax.Array]:
    """The leaves with where slices begin, and which rows of them changed.

    With so many more steps slices of S begin up to S - 1 steps before them. Where short episodes have slices, one may
    begin at one of the oldest steps that did not before: what is left of its episode has one.
    """
    assert weights.begins is not None
    layout, length = replay.layout, known.slices.sequence_length
    steps, envs, padded = layout.steps, layout.num_envs or 1, known.slices.pad is not False

    def are_whole(age: jax.Array) -> jax.Array:
        """Whether a slice that begins so many steps before the newest ends with the row that is its last one."""
        last = age - (length - 1)
        step = (replay.cursor - 1 - last) % steps
        behind = jnp.where((last > 0)[:, None], known.windows[(step + 1) % steps], known.made)
        whole = (last >= 0)[:, None] & (behind != known.windows[step])
        if padded:  # the row may begin an episode instead
            whole &= known.numbers[step] == known.numbers[(replay.cursor - 1 - age) % steps]
        return whole

    number = min(count + length - 1, steps)
    age = jnp.arange(number - 1, -1, -1, dtype=jnp.int32)
    step = (replay.cursor - 1 - age) % steps
    begins = are_whole(age)
    if padded:
        begins |= known.numbers[(step - 1) % steps] != known.numbers[step]
    begins &= (age < replay.size)[:, None]
    slots = (step[:, None] * envs + jnp.arange(envs, dtype=jnp.int32)).reshape(-1)
    nodes = sum_tree.touched(slots[0], number * envs, layout.capacity)
    flags = weights.begins.reshape(-1).at[slots].set(begins.reshape(-1), mode="promise_in_bounds", unique_indices=True)
    if padded:
        oldest, several = (replay.cursor - replay.size) % steps, min(known.every, steps)
        found = _episodes.table(replay, known)
        # What lies before the oldest row in the ring is the newest, which says nothing of where its episode begins.
        first = oldest * envs + jnp.arange(envs, dtype=jnp.int32)
        flags = flags.at[first].set(are_whole(replay.size[None] - 1)[0], mode="promise_in_bounds")
        slots = (oldest + found.first) % steps * envs + jnp.arange(envs, dtype=jnp.int32)
        begin: Any = flags[slots] | (found.of_head > 0) if known.every > 1 else True
        flags = flags.at[slots].set(begin, mode="promise_in_bounds")
        nodes = jnp.concatenate([nodes, sum_tree.touched(oldest * envs, several * envs, layout.capacity)])
    return replace(weights, begins=flags.reshape(weights.begins.shape)), nodes


def windows(replay: Replay, slots: jax.Array) -> _episodes.Windows:
    """The slices that begin in these slots."""
    steps, envs = replay.layout.steps, replay.layout.num_envs or 1
    return _episodes.Windows(slots % envs, (slots // envs - (replay.cursor - replay.size)) % steps)
