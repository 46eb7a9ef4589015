"""flashbax's buffers: rows as JAX arrays in memory, and jitted functions."""

from __future__ import annotations

from typing import Any

import flashbax
import jax
import jax.numpy as jnp

from tests.bench.measuring import Contender
from tests.bench.replay import BATCH, LENGTH, SLICES, chunks, make_rows, priorities, updated


def _rows(count: int) -> Any:
    """Rows as one stream, ``[1, count, ...]``."""
    parts = list(chunks(count))
    return {name: jnp.concatenate([jnp.asarray(part[name]) for part in parts])[None] for name in parts[0]}


def _state(buffer: Any, rows: int) -> Any:
    state = buffer.init({name: jnp.asarray(values[0]) for name, values in make_rows(1).items()})
    # One row more than was given would overwrite the first, so the buffer is full to the last but one.
    return jax.jit(buffer.add, donate_argnums=0)(state, _rows(rows - 1))


def _sampling(name: str, buffer: Any, state: Any) -> Contender:
    sample, keys = jax.jit(buffer.sample), jax.jit(jax.random.key)
    return Contender(name, lambda number: jax.block_until_ready(sample(state, keys(number))))


def _trajectories(rows: int, count: int, length: int) -> Any:
    return flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=count,
        sample_sequence_length=length,
        period=1,
        min_length_time_axis=length,
        max_length_time_axis=rows,
    )


def _by_priority(rows: int) -> tuple[Any, Any]:
    buffer = flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=BATCH,
        sample_sequence_length=1,
        period=1,
        min_length_time_axis=1,
        max_length_time_axis=rows,
        priority_exponent=0.6,
    )
    state = _state(buffer, rows)
    known = jnp.asarray(priorities(rows - 1), jnp.float32)
    return buffer, jax.jit(buffer.set_priorities)(state, jnp.arange(rows - 1), known)


def prioritized(rows: int) -> Contender:
    return _sampling("flashbax prioritised trajectory buffer, jitted, CPU", *_by_priority(rows))


def updates(rows: int) -> Contender:
    buffer, state = _by_priority(rows)
    index, priority = updated(rows - 1)
    setting = jax.jit(buffer.set_priorities, donate_argnums=0)
    places = [jnp.asarray(part) for part in index]
    values = [jnp.asarray(part, jnp.float32) for part in priority]

    def call(number: int) -> None:
        nonlocal state
        state = setting(state, places[number % len(places)], values[number % len(values)])
        jax.block_until_ready(state)

    return Contender("flashbax prioritised trajectory buffer, jitted, CPU", call)


def uniform(rows: int) -> Contender:
    buffer = _trajectories(rows, BATCH, 1)
    return _sampling("flashbax trajectory buffer, jitted, CPU", buffer, _state(buffer, rows))


def slices(rows: int) -> Contender:
    buffer = _trajectories(rows, SLICES, LENGTH)
    return _sampling("flashbax trajectory buffer, no episodes, jitted, CPU", buffer, _state(buffer, rows))


def _writing(rows: int, count: int, name: str) -> Contender:
    buffer = _trajectories(rows, 1, 1)
    state = buffer.init({key: jnp.asarray(values[0]) for key, values in make_rows(1).items()})
    adding = jax.jit(buffer.add, donate_argnums=0)
    some = [
        {key: jnp.asarray(values)[None] for key, values in make_rows(count, first=number * count).items()}
        for number in range(20)
    ]

    def call(number: int) -> None:
        nonlocal state
        state = adding(state, some[number % len(some)])
        jax.block_until_ready(state)

    return Contender(name, call)


def add(rows: int) -> Contender:
    return _writing(rows, 1, "flashbax add, jitted, CPU")


def extend(rows: int) -> Contender:
    return _writing(rows, BATCH, "flashbax add, 256 rows, jitted, CPU")
