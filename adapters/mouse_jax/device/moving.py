"""Rows between the device and a buffer on the host, which may be of any framework, and the file that both save."""

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
    """Save a replay to a file that buffers on the host load, as ``loads`` does: the format of ``ReplayBuffer.dumps``.

    Args:
        replay: A replay, outside of ``jax.jit``. Of one for each of many seeds,
            ``jax.tree.map(lambda leaf: leaf[3], replay)`` is the fourth.
        path: A file; or a directory that exists, in which it is called ``replay.mouse``.
        samples: The number of the next sample, with which a buffer on the host goes on.

    Raises:
        ConfigError: Several replays, or one that is traced.
        StorageError: The file cannot be written (also an OSError).
    """
    _check_one(replay, "dumps")
    buffer = _like(replay)
    to_host(replay, buffer, samples=samples)
    buffer.dumps(path)


def loads(replay: Replay, path: str | PathLike[str]) -> tuple[Replay, int]:
    """A replay with the rows of a file, and the number of the sample that comes next.

    Args:
        replay: An empty one, made as that one was that was saved; outside of ``jax.jit``.
        path: What ``dumps`` wrote, here or of a buffer on the host of any package, over an ``ArrayStorage`` and with
            the sampler that draws the same.

    Raises:
        ConfigError: A replay that is not empty; several, or one that is traced.
        SchemaError, DataError: Rows of another kind; see ``add``.
        StateError: The file is damaged, or of other parts.
        StorageError: It cannot be read (also an OSError).
    """
    _check_one(replay, "loads")
    buffer = _like(replay)
    buffer.loads(path)
    return from_host(replay, buffer), buffer.stats()["samples"]


def to_host(replay: Replay, buffer: ReplayBuffer, *, samples: int = 0) -> None:
    """Put all rows into an empty buffer, which then draws what the replay would.

    Each row lies in the same place, and the buffer takes the seed over. Episodes may have other numbers (``traj_id``).
    Random keys are there what ``jax.random.key_data`` gives, uint32, and what has less than a byte, as int4, has one.

    Args:
        replay: A replay, outside of ``jax.jit``.
        buffer: An empty one of any package and of the same capacity, with environments over a storage with ``ndim=2``;
            its sampler and transforms are its own.
        samples: The number of the buffer's next sample.

    Raises:
        ConfigError: A buffer that is not empty, or of another capacity or ``ndim``; several replays, or one that is
            traced.
    """
    _check_one(replay, "to_host")
    check_count("samples", samples, 0)
    high, low = replay.seed.tolist()
    rows = jax.tree.map(lambda leaf: np.asarray(as_numbers(leaf)), replay.rows)
    moving.to_host(replay.layout, JAX, replay.state, replay.ring, rows, buffer, high << 32 | low, samples)


def from_host(replay: Replay, buffer: ReplayBuffer) -> Replay:
    """The replay with all rows of a buffer, whose sample of any number is what it draws from then on.

    Each row lies in the same place, and the replay takes the seed over; ``buffer.stats()["samples"]`` is the number of
    the buffer's next sample. Episodes may have other numbers (``traj_id``).

    Args:
        replay: An empty one, outside of ``jax.jit``; what it draws and its transforms are its own.
        buffer: One of any package and of the same capacity, with environments over a storage with ``ndim=2``.

    Raises:
        ConfigError: A replay that is not empty, or of another capacity; a buffer whose rows lie in no order; several
            replays, or one that is traced.
        SchemaError, DataError: Rows of another kind; see ``add``.
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
    """Rows of a buffer as arrays, in the dtypes of the replay where ``as_numbers`` changed them."""
    rows = map_tree(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), as_dicts(rows))
    given, held = flatten(rows), flatten(replay.rows)
    if given.keys() != held.keys():
        return rows

    def as_held(memory: jax.Array, given: Any) -> Any:
        if is_key(memory.dtype) and given.dtype == np.uint32:
            return jax.random.wrap_key_data(jnp.asarray(given), impl=jax.random.key_impl(memory))
        return given.astype(memory.dtype) if given.dtype == WIDER.get(str(memory.dtype)) else given

    # A file has the name of a class of named tuples, and the replay has the class.
    return unflatten(structure_of(replay.rows), {key: as_held(memory, given[key]) for key, memory in held.items()})


def _like(replay: Replay) -> ReplayBuffer:
    """An empty buffer on the host that draws the same."""
    layout = replay.layout
    beta = None if replay.beta is None else layout.schedule or float(replay.beta)
    return moving.buffer_like(layout, beta)


def _check_one(replay: Replay, caller: str) -> None:
    if not are_known(replay.size, anywhere=True):
        raise ConfigError(f"{caller}: expected a replay outside of jax.jit, found one that is traced")
    check_one(replay, caller)
