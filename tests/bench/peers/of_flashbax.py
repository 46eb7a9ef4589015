"""flashbax's buffers: rows as JAX arrays in memory, and jitted functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flashbax
import jax
import jax.numpy as jnp

from tests.bench.measuring import Contender
from tests.bench.replay import BATCH, BY_PRIORITY, LENGTH, SLICES, WRITING, chunks, make_rows, priorities, updated
from tests.bench.workloads import Task

_NAME = "flashbax trajectory buffer, jitted, CPU"


def empty(example: Any, rows: int, batch_size: int, length: int, *, by_priority: bool = False) -> tuple[Any, Any]:
    """A buffer for rows like one of a stream, and its state."""
    make = flashbax.make_prioritised_trajectory_buffer if by_priority else flashbax.make_trajectory_buffer
    buffer = make(
        add_batch_size=1,
        sample_batch_size=batch_size,
        sample_sequence_length=length,
        period=1,
        min_length_time_axis=length,
        max_length_time_axis=rows,
        **({"priority_exponent": 0.6} if by_priority else {}),
    )
    return buffer, buffer.init(jax.tree.map(jnp.asarray, example))


def filled(stream: Any, batch_size: int, length: int, *, by_priority: bool = False) -> tuple[Any, Any]:
    """A buffer for a stream, and its state, full to the last row but one: one more would overwrite the first."""
    example, count = jax.tree.map(lambda leaf: leaf[0], stream), len(jax.tree.leaves(stream)[0])
    buffer, state = empty(example, count, batch_size, length, by_priority=by_priority)
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[None, : count - 1]), stream)
    return buffer, jax.jit(buffer.add, donate_argnums=0)(state, rows)


def keyed(draw: Callable[[Any], Any]) -> Callable[[int], Any]:
    """A function of the number of a sample, whose key is there before."""
    keys = list(jax.random.split(jax.random.key(0), 256))
    return lambda number: jax.block_until_ready(draw(keys[number % 256]))


def windows(task: Task) -> Iterator[Contender]:
    """Windows of the buffer (JAX holds int64 as int32, so it copies fewer bytes)."""
    yield _sampling(_NAME, *filled(task.arrays(), task.batch_size, task.sequence_length))


def replay(work: str, rows: int) -> Iterator[Contender]:
    """One of the works of replay buffers."""
    if work in WRITING:
        count, name = (
            (1, "flashbax add, jitted, CPU") if work == "add" else (BATCH, "flashbax add, 256 rows, jitted, CPU")
        )
        buffer, state = empty({key: values[0] for key, values in make_rows(1).items()}, rows, 1, 1)
        some = [
            jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], make_rows(count, first=n * count)) for n in range(20)
        ]
        yield _changing(name, buffer.add, state, [(one,) for one in some])
        return
    parts = list(chunks(rows))
    stream = {name: jnp.concatenate([jnp.asarray(part[name]) for part in parts]) for name in parts[0]}
    size = (SLICES, LENGTH) if work == "slices" else (BATCH, 1)
    buffer, state = filled(stream, *size, by_priority=work in BY_PRIORITY)
    name = _NAME.replace(" buffer", " buffer, no episodes") if work == "slices" else _NAME
    if work in BY_PRIORITY:
        name = "flashbax prioritised trajectory buffer, jitted, CPU"
        known = jnp.asarray(priorities(rows - 1), jnp.float32)
        state = jax.jit(buffer.set_priorities)(state, jnp.arange(rows - 1), known)
    if work == "updates":
        index, priority = updated(rows - 1)
        given = [
            (jnp.asarray(one), jnp.asarray(other, jnp.float32)) for one, other in zip(index, priority, strict=True)
        ]
        yield _changing(name, buffer.set_priorities, state, given)
    else:
        yield _sampling(name, buffer, state)


def _sampling(name: str, buffer: Any, state: Any) -> Contender:
    sample, keys = jax.jit(buffer.sample), jax.jit(jax.random.key)
    return Contender(name, lambda number: jax.block_until_ready(sample(state, keys(number))))


def _changing(name: str, function: Any, state: Any, arguments: Sequence[tuple[Any, ...]]) -> Contender:
    """What changes the state, which is given up for the next."""
    changed = jax.jit(function, donate_argnums=0)

    def call(number: int) -> None:
        nonlocal state
        state = jax.block_until_ready(changed(state, *arguments[number % len(arguments)]))

    return Contender(name, call)
