"""Which slices there are: counted as rows come in, and found by binary searches.

The slices of one environment are numbered by the row at which each comes into being: that is its last row, or, for the
first slice of an episode where short ones are padded, the episode's first row, for it is there from then on. So the
number of slices up to a row never changes, and slice k is the first row up to which there are k + 1. What a ring has
overwritten is taken off at sampling: of the oldest episode alone, as the others are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mouse_core.nested import FieldKey
from mouse_jax.device.ground.ring import put
from mouse_jax.device.ground.state import Episodes, Marks, Replay, Slices, one_a_row

_PARTS = 4
_BLOCK, _FEW = 32, 1 << 13


class Windows(NamedTuple):
    """Slices that were found, ``[B]`` each.

    Attributes:
        env: Their environments.
        start: Their first rows, counted from the oldest there is.
    """

    env: jax.Array
    start: jax.Array


class Table(NamedTuple):
    """What there is to choose from, ``[E]`` each.

    Attributes:
        head: The row from which on slices are looked for, counted from the oldest: the first behind the oldest
            episode; where slices begin wherever there are rows enough, the first in which one may come into being.
        of_head: How many slices of the oldest episode lie before; 0 where slices begin wherever there are rows enough.
        before: How many slices are counted before that row.
        ends: How many slices there are up to the end of each environment, in all.
    """

    head: jax.Array
    of_head: jax.Array
    before: jax.Array
    ends: jax.Array


def none(steps: int, num_envs: int, slices: Slices, marks: Marks, ids: Any, *, tiled: bool) -> Episodes:
    """Nothing is known yet; ``ids`` is the dtype of the numbers of trajectories."""
    shape = (steps, num_envs)
    return Episodes(
        jnp.zeros(shape, jnp.uint32),
        jnp.zeros(shape, jnp.uint32),
        jnp.zeros(num_envs, jnp.int32),
        jnp.ones(num_envs, jnp.bool_),
        None if ids is None else jnp.zeros(num_envs, ids),
        slices,
        marks,
        tiled,
    )


def _flags(marks: Marks, fields: Mapping[FieldKey, Any], shape: tuple[int, int]) -> tuple[jax.Array, jax.Array | None]:
    """Whether rows end their episodes, and their numbers of trajectories or None, ``[n, E]``."""
    ends = jnp.zeros(shape, jnp.bool_)
    for key in marks.ends:
        ends |= one_a_row(key, fields[key], shape) != 0
    return ends, None if marks.ids is None else one_a_row(marks.ids, fields[marks.ids], shape)


def extended(known: Episodes, fields: Mapping[FieldKey, Any], count: int, cursor: jax.Array) -> Episodes:
    """What is known with ``count`` more time steps, that are written from one on."""
    steps, num_envs = known.windows.shape
    length, every = known.slices.sequence_length, known.every
    ends, ids = _flags(known.marks, fields, (count, num_envs))
    new = jnp.concatenate([known.ended[None], ends[:-1]])
    if ids is not None and known.last_id is not None:
        new |= ids != jnp.concatenate([known.last_id[None], ids[:-1]])
    row = jnp.arange(count, dtype=jnp.int32)[:, None]
    begin = _running(jnp.max, jnp.where(new, row, -1))
    position = jnp.where(begin < 0, known.position + 1 + row, row - begin)
    # Of slices of 4 steps with a period of 3 those come into being at the positions 3, 6, 9, ..., and 9 is kept as 6.
    position = jnp.where(position < length, position, length + (position - length) % every)
    due = (position >= length - 1) & ((position - (length - 1)) % every == 0)
    if known.slices.pad is not False:
        # What is left at an episode's end is a slice, too, where they lie side by side.
        due = position % length == 0 if known.tiled else new | (due & (position >= length))
    newest = (cursor - 1) % steps
    windows, numbers = (
        put(counts, counts[newest] + _running(jnp.sum, more.astype(jnp.uint32)), cursor)
        for counts, more in ((known.windows, due), (known.numbers, new))
    )
    last_id = None if ids is None else ids[-1]
    return replace(known, windows=windows, numbers=numbers, position=position[-1], ended=ends[-1], last_id=last_id)


def _running(reduced: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
    """The sums, or the largest, of all values up to each, ``[n, E]``; those of which the largest is asked from -1 on.

    Of few each block of 32 is looked at whole, which JAX's own scans are longer about, for they take many steps.
    """
    is_sum = reduced is jnp.sum
    count, envs = values.shape
    if values.size > _FEW:
        return lax.cumsum(values) if is_sum else lax.cummax(values)
    nothing = values.dtype.type(0 if is_sum else -1)
    size = min(count, _BLOCK)
    blocks = jnp.pad(values, ((0, -count % size), (0, 0)), constant_values=nothing).reshape(-1, 1, size, envs)
    upto = jnp.tril(jnp.ones((size, size), jnp.bool_))[:, :, None]
    found = reduced(jnp.where(upto, blocks, nothing), axis=2)
    if len(found) > 1:
        ends = _running(reduced, found[:-1, -1])
        before = jnp.pad(ends, ((1, 0), (0, 0)), constant_values=nothing)[:, None]
        found = found + before if is_sum else jnp.maximum(found, before)
    return found.reshape(-1, envs)[:count]


def _slides(known: Episodes) -> bool:
    """Whether slices begin wherever there are rows enough, so that it does not matter where the oldest episode did."""
    return known.slices.pad is False and known.every == 1


def _count(known: Episodes, steps: jax.Array) -> jax.Array:
    """How many slices there are of an episode of so many steps, at least 1."""
    length, every = known.slices.sequence_length, known.every
    if known.slices.pad is False:
        return jnp.where(steps < length, 0, (steps - length) // every + 1)
    return (steps - 1) // length + 1 if known.tiled else jnp.maximum(steps - length, 0) // every + 1


def table(replay: Replay, known: Episodes) -> Table:
    """What there is to choose from."""
    size, length = replay.size, known.slices.sequence_length
    envs = jnp.arange(known.windows.shape[1], dtype=jnp.int32)
    at = _reader(replay)
    if _slides(known):
        # Slices come into being with the row length - 1 or later, counted from the oldest.
        of_head = jnp.zeros_like(envs)
        head = of_head + (length - 1)
        before = at(known.windows, head - 1, envs) if length > 1 else at(known.windows, head, envs) - 1
        there = jnp.where(size >= length, at(known.windows, size - 1, envs) - before, 0)
    else:
        oldest = at(known.numbers, jnp.zeros_like(envs), envs)
        head = search(replay, lambda row: at(known.numbers, row, envs) != oldest, jnp.zeros_like(envs))
        of_head = jnp.where(size > 0, _count(known, head), 0)
        before = at(known.windows, head - 1, envs)
        there = of_head.astype(jnp.uint32) + at(known.windows, size - 1, envs) - before
    return Table(head, of_head, before, jnp.cumsum(there.astype(jnp.int32), dtype=jnp.int32))


def find(replay: Replay, known: Episodes, found: Table, ranks: jax.Array) -> Windows:
    """The slices of these numbers among all there are, int32 ``[B]``, environment by environment."""
    length, at = known.slices.sequence_length, _reader(replay)
    env = jnp.zeros_like(ranks)
    if len(found.ends) > 1:
        env = jnp.searchsorted(found.ends, ranks, side="right").astype(jnp.int32)
        ranks = ranks - jnp.where(env > 0, found.ends[env - 1], 0)
    later = ranks - found.of_head[env]
    wanted, before = (later + 1).astype(jnp.uint32), found.before[env]
    row = search(replay, lambda row: at(known.windows, row, env) - before >= wanted, found.head[env])
    start = row - (length - 1)
    if known.tiled and known.slices.pad is not False:
        start = row
    elif known.slices.pad is not False:
        # One after the other: on a CPU what is read at the same time is divided among threads, which takes far longer.
        mine, before = lax.map(lambda looked: at(known.numbers, looked, env), jnp.stack([row, row - 1]))
        start = jnp.where(mine != before, row, start)
    if not _slides(known):
        start = jnp.where(later < 0, ranks * known.every, start)
    return Windows(env, start)


def search(replay: Replay, holds: Callable[[jax.Array], jax.Array], first: jax.Array) -> jax.Array:
    """The first row from ``first`` on for which something holds, as it does for all behind it; or how many there are.

    Each round looks at 3 rows and leaves a quarter, for what a round costs is mostly that there is one. Of 1,000 rows
    from row 0 on the first looks at the rows 255, 511 and 767, and where 511 is the first of them for which it holds,
    the next looks at 256 + 63, 256 + 127 and 256 + 191.

    Args:
        replay: Has the rows.
        holds: Says of rows, int32 ``[3, n]``, whether it holds.
        first: Int32 ``[n]``.
    """
    size, stride = replay.size, 1
    while stride * _PARTS <= replay.layout.steps:
        stride *= _PARTS
    rounds = stride.bit_length() // 2 + 1
    behind = jnp.arange(1, _PARTS, dtype=jnp.int32).reshape(-1, *[1] * first.ndim)

    # A loop, for XLA would merge the rounds into one expression, which it computes anew for every use.
    def look(number: Any, low: jax.Array) -> jax.Array:
        step = jnp.int32(stride) >> (2 * number)
        looked = low[None] + step * behind - 1
        below = (looked < size) & ~holds(jnp.minimum(looked, size - 1))
        found: jax.Array = low + step * below.sum(0, dtype=jnp.int32)
        return found

    # Within shard_map what a loop begins with varies with the shard, as what it makes does.
    low = lax.fori_loop(0, rounds, look, first + 0 * size)
    return jnp.minimum(low, size)


def slots(replay: Replay, row: jax.Array) -> jax.Array:
    """The time steps in the ring of rows counted from the oldest, each from -1 up to T - 1."""
    steps = replay.layout.steps
    slot = (replay.cursor - replay.size) % steps + row
    # Cheaper than the rest of a division.
    return jnp.where(slot >= steps, slot - steps, jnp.where(slot < 0, slot + steps, slot))


def _reader(replay: Replay) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    return lambda counts, row, env: counts.at[slots(replay, row), env].get(mode="promise_in_bounds")
