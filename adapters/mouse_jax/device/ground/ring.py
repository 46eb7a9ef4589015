"""A ring of time steps in an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def put(memory: jax.Array, rows: jax.Array, cursor: jax.Array) -> jax.Array:
    """A ring with rows written from a time step on, and round its end; in place where it may be.

    Args:
        memory: ``[T, ...]``.
        rows: ``[n, ...]``, at most T.
        cursor: The first time step, int32 ``[]``.
    """
    steps, count = memory.shape[0], rows.shape[0]
    if count == 1:
        return lax.dynamic_update_slice_in_dim(memory, rows, cursor, 0)
    places = (cursor + jnp.arange(count, dtype=jnp.int32)) % steps
    return memory.at[places].set(rows, mode="promise_in_bounds", unique_indices=True)
