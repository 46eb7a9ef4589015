"""Rings of time steps in arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def put(memories: Any, rows: Any, cursor: jax.Array) -> Any:
    """Rings with rows written from a time step on, and round their end; in place where it may be.

    Args:
        memories: A tree of ``[T, ...]``.
        rows: The same tree of ``[n, ...]``, at most T.
        cursor: The first time step, int32 ``[]``.
    """
    steps, count = len(jax.tree.leaves(memories)[0]), len(jax.tree.leaves(rows)[0])
    places = (cursor + jnp.arange(count, dtype=jnp.int32)) % steps

    def written(memory: jax.Array, more: jax.Array) -> jax.Array:
        if count == 1:
            return lax.dynamic_update_slice_in_dim(memory, more, cursor, 0)
        return memory.at[places].set(more, mode="promise_in_bounds", unique_indices=True)

    return jax.tree.map(written, memories, rows)
