"""Rows between the device and a buffer on the host, which may be of any framework, and the file that both save."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError
from mouse_core.replay import ArrayStorage, Priorities, PrioritizedSampler, ReplayBuffer
from mouse_core.replay.device import (
    check_fits,
    check_ordered,
    episodes_state,
    epoch_in,
    epoch_state,
    fill,
    left_in,
    lost_in,
    lost_of,
    queue_state,
    sampler_like,
    weights_in,
    weights_state,
)
from mouse_core.spec import check_count
from mouse_jax._rollout import are_known, seed_halves
from mouse_jax.device import _episodes, _turns
from mouse_jax.device.ground import hosting, sum_tree
from mouse_jax.device.ground.state import Epoch, Queue, Replay, as_dicts, check_one, named
from mouse_jax.device.writing import add
from mouse_jax.dtypes import WIDER, as_numbers, is_key


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
    layout = replay.layout
    check_fits(buffer, layout.capacity, layout.num_envs, "to_host")
    check_count("samples", samples, 0)
    rows = jax.tree.map(lambda leaf: np.asarray(as_numbers(leaf)), replay.rows)
    size, cursor, (high, low) = int(replay.size), int(replay.cursor), replay.seed.tolist()
    lost = _lost(replay, size, cursor)
    fill(buffer, lambda count: jax.tree.map(lambda leaf: leaf[:count], rows), size, cursor, layout.steps, lost)
    episodes = episodes_state(_sampler_state(replay, buffer), lost)
    known = {"kind": type(buffer.sampler).__name__, "state": episodes}
    state = {**buffer.state_dict(), "seed": high << 32 | low, "samples": samples, "sampler": known}
    buffer.load_state_dict(state)


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
    layout = replay.layout
    check_fits(buffer, layout.capacity, layout.num_envs, "from_host")
    check_ordered(buffer, "from_host")
    if int(replay.size):
        raise ConfigError(f"from_host: expected an empty replay, found {int(replay.size)} time steps")
    envs, steps = layout.num_envs or 1, layout.steps
    size, end = len(buffer) // envs, buffer.stats()["written"] // envs
    begin = (end - size) % steps
    made = replace(replay, cursor=jnp.int32(begin), seed=seed_halves(buffer.seed))
    if not size:
        return made
    places: Any = (begin + np.arange(size)) % steps
    if layout.num_envs is not None:
        places = places[:, None] * envs + np.arange(envs)
    rows = _as_here(made, buffer[places])
    if made.episodes is not None:
        lost = lost_in(buffer, made.episodes.slices, envs)
        if lost.any():
            known = _episodes.cut_off(made.episodes, jnp.asarray(lost, jnp.int32), named(rows))
            made = replace(made, episodes=known)
    made = add(made, rows)
    turns = None if made.turns is None else _turns_of(made, buffer)
    if turns is not None:
        made = replace(made, turns=turns)
    weighed = weights_in(buffer)
    if made.weights is not None and weighed is not None:
        made = replace(made, weights=sum_tree.of_units(made.weights, *weighed))
    return hosting.to_host(made) if layout.memory == "host" else made


def _lost(replay: Replay, size: int, cursor: int) -> Any:
    """See ``lost_in``."""
    known, layout = replay.episodes, replay.layout
    if known is None:
        return np.zeros(layout.num_envs or 1, np.int64)
    rows = (cursor - size + np.arange(size)) % layout.steps
    windows, numbers = np.asarray(known.windows)[rows], np.asarray(known.numbers)[rows]
    phases = None if known.phases is None or not size else np.asarray(known.phases)[rows[0]]
    return lost_of(known.slices, windows, numbers, np.asarray(known.made), np.asarray(known.position), phases)


def _as_here(replay: Replay, rows: Any) -> Any:
    """Rows of a buffer of any package as arrays; those of which ``as_numbers`` made something else as the replay has
    them. ``add`` says what is wrong, if any.
    """
    rows = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), as_dicts(rows))
    given, held = named(rows), named(replay.rows)
    if given.keys() != held.keys():
        return rows
    # A file names the class of a named tuple and does not have it: rows are nested as the replay's are.
    rows = jax.tree.unflatten(jax.tree.structure(replay.rows), [given[key] for key in held])

    def as_held(memory: jax.Array, given: Any) -> Any:
        if is_key(memory.dtype) and given.dtype == np.uint32:
            return jax.random.wrap_key_data(jnp.asarray(given), impl=jax.random.key_impl(memory))
        return given.astype(memory.dtype) if given.dtype == WIDER.get(str(memory.dtype)) else given

    return jax.tree.map(as_held, replay.rows, rows)


def _like(replay: Replay) -> ReplayBuffer:
    """An empty buffer on the host that draws the same."""
    layout, known, weights = replay.layout, replay.episodes, replay.weights
    storage = ArrayStorage(layout.capacity, ndim=1 if layout.num_envs is None else 2, alignment=layout.alignment)
    priorities = None
    if weights is not None:
        beta = weights.schedule or float(weights.beta)
        priorities = Priorities(alpha=float(weights.alpha), beta=beta, eps=float(weights.eps))
    order: Any = (
        "epochs" if isinstance(replay.turns, Epoch) else "queue" if isinstance(replay.turns, Queue) else "random"
    )
    return ReplayBuffer(storage, sampler_like(None if known is None else known.slices, priorities, order))


def _sampler_state(replay: Replay, buffer: ReplayBuffer) -> dict[str, Any]:
    """Return the state of a host sampler: weights and order of rows, or the class of another sampler."""
    sampler, turns, layout = buffer.sampler, replay.turns, replay.layout
    if replay.weights is not None and isinstance(sampler, PrioritizedSampler):
        return weights_state(sampler, sum_tree.units(replay.weights, len(buffer)), float(replay.weights.largest))
    if isinstance(turns, Queue):
        cursor = int(replay.cursor) * (layout.num_envs or 1)
        return queue_state(sampler, int(turns.left), len(buffer), cursor, layout.capacity, layout.batch_size)
    if isinstance(turns, Epoch):
        return epoch_state(sampler, int(turns.rows), int(turns.began), int(turns.position), layout.batch_size)
    return sampler.state_dict()


def _turns_of(replay: Replay, buffer: ReplayBuffer) -> Epoch | Queue | None:
    """Return the order of rows of a host sampler; None for another kind of sampler that has drawn nothing."""
    if isinstance(replay.turns, Queue):
        left = left_in(buffer.sampler)
        return None if left is None else Queue(jnp.int32(left))
    known = replay.episodes
    slices = 0 if known is None else int(_episodes.table(replay, known).ends[-1])
    epoch = epoch_in(buffer.sampler, slices)
    if epoch is None:
        return None
    rows, began, position = epoch
    return _turns.at(replay, jnp.int32(rows), jnp.uint32(began), jnp.int32(position))


def _check_one(replay: Replay, caller: str) -> None:
    if not are_known(replay.size, anywhere=True):
        raise ConfigError(f"{caller}: expected a replay outside of jax.jit, found one that is traced")
    check_one(replay, caller)
