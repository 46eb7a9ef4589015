"""Rows of JAX arrays in a store."""

from __future__ import annotations

import jax.numpy as jnp

from tests.core.appending_cases import check_arrays_are_taken, row_of


def test_arrays_of_the_cpu_are_taken() -> None:
    row = row_of(jnp.array, episode_step=jnp.array([0], dtype=jnp.int32))
    check_arrays_are_taken(row, jnp.stack)
