"""flashbax's trajectory buffer: all rows as JAX arrays in memory, sampled by a jitted function."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.measuring import Contender
from tests.bench.workloads import Task


def contenders(task: Task) -> Iterator[Contender]:
    """Windows of the buffer (JAX holds int64 as int32, so it copies fewer bytes)."""
    import flashbax
    import jax
    import jax.numpy as jnp

    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=task.batch_size,
        sample_sequence_length=task.sequence_length,
        period=1,
        min_length_time_axis=task.sequence_length,
        max_length_time_axis=task.rows,
    )
    arrays = task.arrays()
    empty = buffer.init({name: jnp.asarray(values[0]) for name, values in arrays.items()})
    # One row more than was given would overwrite the first, so the buffer is full to the last but one.
    rows = {name: jnp.asarray(values[None, : task.rows - 1]) for name, values in arrays.items()}
    state = jax.jit(buffer.add, donate_argnums=0)(empty, rows)
    sample, keys = jax.jit(buffer.sample), jax.jit(lambda number: jax.random.key(number))
    name = "flashbax trajectory buffer, jitted, CPU"
    yield Contender(name, lambda number: jax.block_until_ready(sample(state, keys(number))))
