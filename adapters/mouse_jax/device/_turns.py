"""Draws without replacement: the order of rows in an epoch, and the rows of a queue."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mouse_core.randomness import Purpose
from mouse_jax import _philox
from mouse_jax.device.ground.state import Epoch, Layout, Order, Queue, Replay


def first(order: Order, layout: Layout) -> Epoch | Queue | None:
    """Nothing has come yet."""
    if order == "queue":
        return Queue(jnp.int32(0))
    if order == "epochs":
        unknown = jnp.zeros(min(layout.capacity, _philox.SHUFFLED_UP_TO), jnp.int32)
        # Each in memory of its own, for a replay that is donated.
        return Epoch(jnp.int32(0), jnp.uint32(0), jnp.int32(0), unknown)
    return None


def after(replay: Replay, index: jax.Array, rows: jax.Array) -> tuple[Epoch | Queue, jax.Array]:
    """Return the state after the next batch, and the slots or slice numbers of the batch, int32 ``[B]``.

    Where there are too few rows a queue stays as it is. ``rows`` is how many rows, or slices, there are in all.
    """
    layout, turns = replay.layout, replay.turns
    envs, size = layout.num_envs or 1, layout.batch_size
    place = jnp.arange(size, dtype=jnp.int32)
    if isinstance(turns, Queue):
        oldest = (replay.cursor * envs - turns.left) % layout.capacity
        # Round the end of the ring, of which the number of a slot must not become 2**31 on the way.
        slots = jnp.where(oldest >= layout.capacity - place, oldest - (layout.capacity - place), oldest + place)
        return Queue(jnp.where(turns.left >= size, turns.left - size, turns.left)), slots
    assert turns is not None
    begins = (rows != turns.rows) | (rows - turns.position < size)
    began = jnp.where(begins, index.astype(jnp.uint32), turns.began)
    position = jnp.where(begins, 0, turns.position)
    made = jnp.maximum(rows, 1)
    kept = turns.shuffled + _philox.nothing(replay.seed[0], began, made).astype(jnp.int32)
    # The order of many is computed place by place, without the table.
    anew = begins & (made <= _philox.SHUFFLED_UP_TO)
    shuffled = lax.cond(anew, lambda: _shuffled(replay.seed, began, made, layout.capacity), lambda: kept)
    slots = _philox.in_order(
        replay.seed,
        Purpose.REPLAY,
        began,
        made,
        jnp.minimum(position + place, made - 1),
        shuffled,
        most=layout.capacity,
    )
    return Epoch(rows, began, position + size, shuffled), slots


def at(replay: Replay, rows: jax.Array, began: jax.Array, position: jax.Array) -> Epoch:
    """An epoch over so many rows that began with a sample, and of which so many have come."""
    shuffled = _shuffled(replay.seed, began, jnp.maximum(rows, 1), replay.layout.capacity)
    return Epoch(rows, began, position, shuffled)


def _shuffled(seed: jax.Array, began: jax.Array, rows: jax.Array, capacity: int) -> jax.Array:
    return _philox.shuffled(seed, Purpose.REPLAY, began, rows, most=capacity)
