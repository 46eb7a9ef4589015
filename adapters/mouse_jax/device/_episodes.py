"""Slices of episodes: counted while rows are written, found by binary search.

The slices of one environment are numbered by the row at which each comes into being: that is its last row, or, for the
first slice of an episode where short ones are padded, the episode's first row, for it is there from then on. So the
number of slices before a row never changes, and slice k comes into being with the last row before which there are k.
Those of which a ring has overwritten a row are before what lies S - 1 rows behind the oldest, if its episode goes on
until there. Where short episodes are padded it may have one slice beside those that are counted behind: one that begins
with the oldest row.
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
from mouse_jax.device.ground.state import EpisodeFields, Episodes, Replay, Slices, one_a_row

_PARTS = 4


class Windows(NamedTuple):
    """Slices that were found, ``[B]`` each.

    Attributes:
        env: Their environments.
        start: Their first rows, counted from the oldest there is.
    """

    env: jax.Array
    start: jax.Array


class Table(NamedTuple):
    """Limits of the drawable slices by environment, ``[E]`` each.

    Attributes:
        head: The row, counted from the oldest, from which on slices come into being; of those that lie side by side,
            the first behind the oldest episode.
        of_head: How many slices there are that came into being before.
        before: How many slices are counted before that row.
        ends: How many slices there are up to the end of each environment, in all.
        first: The first row, counted from the oldest, at which a slice of its episode may begin.
    """

    head: jax.Array
    of_head: jax.Array
    before: jax.Array
    ends: jax.Array
    first: jax.Array


def none(steps: int, num_envs: int, slices: Slices, marks: EpisodeFields, ids: Any, *, tiled: bool) -> Episodes:
    """Nothing is known yet; ``ids`` is the dtype of the numbers of trajectories."""
    shape = (steps, num_envs)
    return Episodes(
        jnp.zeros(shape, jnp.uint32),
        jnp.zeros(shape, jnp.uint32),
        jnp.zeros(num_envs, jnp.uint32),
        jnp.zeros(num_envs, jnp.uint32),
        jnp.zeros(num_envs, jnp.int32),
        jnp.ones(num_envs, jnp.bool_),
        None if ids is None else jnp.zeros(num_envs, ids),
        jnp.zeros(shape, jnp.int32) if slices.pad is not False and not tiled and slices.period > 1 else None,
        slices,
        marks,
        tiled,
    )


def _flags(
    marks: EpisodeFields, fields: Mapping[FieldKey, Any], shape: tuple[int, int]
) -> tuple[jax.Array, jax.Array | None]:
    """Whether rows end their episodes, and their numbers of trajectories or None, ``[n, E]``."""
    ends = jnp.zeros(shape, jnp.bool_)
    for key in marks.ends:
        ends |= one_a_row(key, fields[key], shape) != 0
    return ends, None if marks.ids is None else one_a_row(marks.ids, fields[marks.ids], shape)


def extended(known: Episodes, fields: Mapping[FieldKey, Any], count: int, cursor: jax.Array) -> Episodes:
    """Return the episode numbers after a write of ``count`` more time steps."""
    num_envs = known.windows.shape[1]
    length, every = known.slices.sequence_length, known.every
    ends, ids = _flags(known.marks, fields, (count, num_envs))
    new = jnp.concatenate([known.ended[None], ends[:-1]])
    if ids is not None and known.last_id is not None:
        new |= ids != jnp.concatenate([known.last_id[None], ids[:-1]])
    row = jnp.arange(count, dtype=jnp.int32)[:, None]
    begin = lax.cummax(jnp.where(new, row, -1))
    position = _kept(jnp.where(begin < 0, known.position + 1 + row, row - begin), known)
    # Of slices of 4 steps with a period of 3 those come into being at the positions 3, 6, 9, ...
    due = (position >= length - 1) & ((position - (length - 1)) % every == 0)
    if known.slices.pad is not False:
        # What is left at an episode's end is a slice, too, where they lie side by side.
        due = position % length == 0 if known.tiled else new | (due & (position >= length))
    made, begun = (
        so_far + lax.cumsum(more.astype(jnp.uint32)) for so_far, more in ((known.made, due), (known.begun, new))
    )
    phases = None if known.phases is None else position % every
    rows = (made - due.astype(jnp.uint32), begun, phases)
    windows, numbers, phases = put((known.windows, known.numbers, known.phases), rows, cursor)
    return replace(
        known,
        windows=windows,
        numbers=numbers,
        phases=phases,
        made=made[-1],
        begun=begun[-1],
        position=position[-1],
        ended=ends[-1],
        last_id=None if ids is None else ids[-1],
    )


def cut_off(known: Episodes, lost: jax.Array, fields: Mapping[FieldKey, Any]) -> Episodes:
    """Return empty episode numbers for first rows that begin in the middle of their episodes.

    Args:
        known: Of no row.
        lost: Int32 ``[E]``.
        fields: The rows that come.
    """
    if known.last_id is not None:
        assert known.marks.ids is not None
        ids = fields[known.marks.ids]
        known = replace(known, last_id=one_a_row(known.marks.ids, ids, (ids.size // len(lost), len(lost)))[0])
    position = _kept(lost - 1, known)
    return replace(known, position=position, ended=lost == 0, begun=(lost > 0).astype(jnp.uint32))


def _kept(position: jax.Array, known: Episodes) -> jax.Array:
    """Places in episodes, without periods that tell nothing: of slices of 4 with a period of 3, 9 is kept as 6."""
    length, every = known.slices.sequence_length, known.every
    return jnp.where(position < length, position, length + (position - length) % every)


def table(replay: Replay, known: Episodes) -> Table:
    """Return the limits of the drawable slices."""
    size, length, every = replay.size, known.slices.sequence_length, known.every
    envs, padded = jnp.arange(known.windows.shape[1], dtype=jnp.int32), known.slices.pad is not False
    at, none = _reader(replay), jnp.zeros_like(envs)

    def before(row: jax.Array) -> jax.Array:
        """Number of slices before a row; without a row, the total."""
        return jnp.where(row < size, at(known.windows, jnp.minimum(row, size - 1), envs), known.made)

    def behind_oldest(most: int) -> jax.Array:
        """The first row behind the oldest episode, if it is among so many."""
        oldest = at(known.numbers, none, envs)
        return search(replay, lambda row: at(known.numbers, row, envs) != oldest, none, most)

    end = none + size
    if known.tiled or padded:
        end = behind_oldest(replay.layout.steps if known.tiled else length - 1 + every)
    head = end if known.tiled else jnp.minimum(end, length - 1)
    counted, of_head, first = before(head), none, none
    if known.phases is not None:
        first = -at(known.phases, none, envs) % every
    if known.tiled:
        of_head = -(-end // length) if padded else end // length
    elif padded:
        # If one counts there, the next before it would begin with ``first``.
        next_one = before(jnp.minimum(end, length - 1 + every))
        of_head = ((counted == next_one) & (first < end) & (size > 0)).astype(jnp.int32)
    there = of_head + (known.made - counted).astype(jnp.int32)
    return Table(head, of_head, counted, jnp.cumsum(there, dtype=jnp.int32), first)


def find(replay: Replay, known: Episodes, found: Table, ranks: jax.Array) -> Windows:
    """The slices of these numbers among all there are, int32 ``[B]``, environment by environment."""
    length, at = known.slices.sequence_length, _reader(replay)
    env = jnp.zeros_like(ranks)
    if len(found.ends) > 1:
        env = jnp.searchsorted(found.ends, ranks, side="right").astype(jnp.int32)
        ranks = ranks - jnp.where(env > 0, found.ends[env - 1], 0)
    later = ranks - found.of_head[env]
    wanted, before = (later + 1).astype(jnp.uint32), found.before[env]
    first = found.head[env] + 1
    row = search(replay, lambda row: at(known.windows, row, env) - before >= wanted, first, replay.layout.steps) - 1
    start = row - (length - 1)
    if known.tiled and known.slices.pad is not False:
        start = row
    elif known.slices.pad is not False:
        # One after the other: on a CPU what is read at the same time is divided among threads, which takes far longer.
        mine, before = lax.map(lambda looked: at(known.numbers, looked, env), jnp.stack([row, row - 1]))
        start = jnp.where(mine != before, row, start)
    if known.tiled or known.slices.pad is not False:
        start = jnp.where(later < 0, ranks * known.every if known.tiled else found.first[env], start)
    return Windows(env, start)


def search(replay: Replay, holds: Callable[[jax.Array], jax.Array], first: jax.Array, most: int) -> jax.Array:
    """The first row from ``first`` on for which something holds, as it does for all behind it; or how many there are.

    Each round looks at 3 rows and leaves a quarter, for what a round costs is mostly that there is one. Of 1,000 rows
    from row 0 on the first looks at the rows 255, 511 and 767, and where 511 is the first of them for which it holds,
    the next looks at 256 + 63, 256 + 127 and 256 + 191.

    Args:
        replay: Has the rows.
        holds: Says of rows, int32 ``[3, n]``, whether it holds.
        first: Int32 ``[n]``.
        most: How many rows from there on matter.
    """
    size, stride = replay.size, 1
    while stride * _PARTS <= min(most, replay.layout.steps):
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
