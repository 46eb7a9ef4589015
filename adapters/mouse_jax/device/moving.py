"""Copies rows between a replay on a device and a buffer on the host; saves and loads files of both."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError
from mouse_core.nested import flatten, map_tree, structure_of, unflatten
from mouse_core.replay import ReplayBuffer
from mouse_core.replay.device import moving
from mouse_core.spec import check_count
from mouse_jax.device.arrays import JAX
from mouse_jax.device.state import Replay, as_dicts, check_one, put_on_host
from mouse_jax.device.writing import accepted
from mouse_jax.dtypes import WIDER, are_known, as_numbers, is_key, seed_halves


def dumps(replay: Replay, path: str | PathLike[str], *, samples: int = 0) -> None:
    """Save a replay to a file that ``loads`` and buffers on the host load, in the format of ``ReplayBuffer.dumps``.

    Args:
        replay: A replay, outside of ``jax.jit``. From replays of many seeds,
            ``jax.tree.map(lambda leaf: leaf[3], replay)`` selects the fourth.
        path: A file; or an existing directory, in which the file ``replay.mouse`` is written.
        samples: The number of the next sample, with which a buffer on the host continues.

    Raises:
        ConfigError: ``replay`` is several replays, or is traced.
        StorageError: The file cannot be written (also an OSError).
    """
    _check_one(replay, "dumps")
    buffer = _like(replay)
    to_host(replay, buffer, samples=samples)
    buffer.dumps(path)


def loads(replay: Replay, path: str | PathLike[str]) -> tuple[Replay, int]:
    """Return a replay with the rows of a file, and the number of the next sample.

    Args:
        replay: An empty replay with the options of the saved replay; outside of ``jax.jit``.
        path: A file of ``dumps``, or of a buffer of any package with an ``ArrayStorage`` and the corresponding sampler.

    Raises:
        ConfigError: ``replay`` is not empty, is several replays, or is traced.
        SchemaError, DataError: The rows do not fit the replay; see ``add``.
        StateError: The file is damaged, or the saved buffer has other parts.
        StorageError: The file cannot be read (also an OSError).
    """
    _check_one(replay, "loads")
    buffer = _like(replay)
    buffer.loads(path)
    return from_host(replay, buffer), buffer.stats()["samples"]


def to_host(replay: Replay, buffer: ReplayBuffer, *, samples: int = 0) -> None:
    """Copy all rows to an empty buffer, which then draws the same batches as the replay.

    Each row keeps its slot, and the buffer gets the replay's seed. Episodes may have other numbers (``traj_id``).
    Random keys are converted by ``jax.random.key_data`` to uint32, and dtypes of less than a byte, such as int4, to one
    byte.

    Args:
        replay: A replay, outside of ``jax.jit``.
        buffer: An empty buffer of any package and of the same capacity, with environments over a storage with
            ``ndim=2``; its sampler and transforms stay.
        samples: The number of the buffer's next sample.

    Raises:
        ConfigError: The buffer is not empty, or has another capacity or ``ndim``; or ``replay`` is several replays, or
            is traced.
    """
    _check_one(replay, "to_host")
    check_count("samples", samples, 0)
    high, low = replay.seed.tolist()
    rows = jax.tree.map(lambda leaf: np.asarray(as_numbers(leaf)), replay.rows)
    moving.to_host(replay.layout, JAX, replay.state, replay.ring, rows, buffer, high << 32 | low, samples)


def from_host(replay: Replay, buffer: ReplayBuffer) -> Replay:
    """Return the replay with all rows of a buffer; it then draws the same samples as the buffer.

    Each row keeps its slot, and the replay gets the buffer's seed; ``buffer.stats()["samples"]`` is the number of the
    buffer's next sample. Episodes may have other numbers (``traj_id``).

    Args:
        replay: An empty replay, outside of ``jax.jit``; its sampler and transforms stay.
        buffer: A buffer of any package and of the same capacity, with environments over a storage with ``ndim=2``.

    Raises:
        ConfigError: The replay is not empty, has another capacity, is several replays, or is traced; or the order of
            the buffer's rows is unknown.
        SchemaError, DataError: The rows do not fit the replay; see ``add``.
    """
    _check_one(replay, "from_host")
    seed = seed_halves(buffer.seed)
    ring, rows = moving.rows_from_host(replay.ring, buffer)
    made = replace(replay, cursor=jnp.int32(ring.cursor), size=jnp.int32(ring.size), seed=seed)
    if not ring.size:
        return made
    rows, _ = accepted(replay, _as_here(replay, rows))
    fields = {key: np.asarray(as_numbers(leaf)) for key, leaf in flatten(rows).items()}
    begin = jnp.int32((ring.cursor - ring.size) % ring.steps)
    memory = jax.tree.map(lambda memory, more: JAX.write(memory, begin, jnp.asarray(more)), replay.rows, rows)
    state = moving.state_from_host(replay.layout.sampler, JAX, replay.state, ring, fields, buffer, seed)
    made = replace(made, rows=memory, state=state)
    return put_on_host(made) if replay.layout.memory == "host" else made


def _as_here(replay: Replay, rows: Any) -> Any:
    """Convert rows of a buffer to arrays; dtypes that ``as_numbers`` changed become the dtypes of the replay again."""
    rows = map_tree(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), as_dicts(rows))
    given, held = flatten(rows), flatten(replay.rows)
    if given.keys() != held.keys():
        return rows

    def as_held(memory: jax.Array, given: Any) -> Any:
        if is_key(memory.dtype) and given.dtype == np.uint32:
            return jax.random.wrap_key_data(jnp.asarray(given), impl=jax.random.key_impl(memory))
        return given.astype(memory.dtype) if given.dtype == WIDER.get(str(memory.dtype)) else given

    # A file has only the name of a named tuple's class; the class itself comes from the replay.
    return unflatten(structure_of(replay.rows), {key: as_held(memory, given[key]) for key, memory in held.items()})


def _like(replay: Replay) -> ReplayBuffer:
    """Return an empty buffer on the host that draws the same batches."""
    layout = replay.layout
    beta = None if replay.beta is None else layout.schedule or float(replay.beta)
    return moving.buffer_like(layout, beta)


def _check_one(replay: Replay, caller: str) -> None:
    if not are_known(replay.size, anywhere=True):
        raise ConfigError(f"{caller}: expected a replay outside of jax.jit, found one that is traced")
    check_one(replay, caller)
