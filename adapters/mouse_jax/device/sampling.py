"""Drawing batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mouse_core import ConfigError
from mouse_core.randomness import Purpose
from mouse_core.spec import check_count
from mouse_jax import _philox
from mouse_jax._rollout import are_known
from mouse_jax.device import _episodes
from mouse_jax.device._state import Episodes, Replay, is_key, named

_once: Callable[[Any], Any] = lax.optimization_barrier
"""What is done for each slice is not done anew for each of its steps, nor that for each value of each field."""


def can_sample(replay: Replay, min_length: Any = 1) -> jax.Array:
    """Whether there is something to draw, bool ``[]``: a row or a slice, and at least so many rows in all."""
    layout = replay.layout
    enough = replay.size * (layout.num_envs or 1) >= jnp.maximum(min_length, 1)
    if replay.episodes is not None:
        enough &= _episodes.table(replay, replay.episodes).ends[-1] > 0
    return enough


def sample(replay: Replay, index: Any, batch_size: int | None = None) -> dict[str, Any]:
    """Batch number ``index``: the same rows for the same seed, number and writes, here and on the host.

    A ``mouse_core.replay.ReplayBuffer`` of the same seed and writes gives them as its sample of this number, with a
    ``RandomSampler`` or, for slices, a ``SliceSampler``.

    Args:
        replay: A replay with rows; under ``jax.jit``, where nobody can tell, see ``can_sample``.
        index: The number of the sample, from 0, below 2**32; may be traced. Or a random key of JAX, for draws that
            nothing on the host equals.
        batch_size: Rows or slices in the batch, B; by default that of the replay.

    Returns:
        ``{field: [B, ...]}``, slices as ``[B, S, ...]``, nested as the rows are, and ``index``, int32: where the rows
        lie. Slices have ``traj_id``, where the rows have none themselves, and ``mask`` where they are padded. Rows that
        are no dict are the field ``data``. Transforms were applied.

    Raises:
        ConfigError: A number out of range; nothing to draw, where that is known.
        SchemaError, MissingFieldError: What transforms raise.
    """
    layout = replay.layout
    size = layout.batch_size if batch_size is None else check_count("batch_size", batch_size)
    if replay.cursor.ndim:
        raise ConfigError(f"sample: expected one replay, found {replay.cursor.shape[0]}; jax.vmap draws from each")
    if are_known(replay.size) and not can_sample(replay):
        known = replay.episodes
        what = "rows" if known is None else f"slices of {known.slices.sequence_length} steps in one episode"
        raise ConfigError(f"sample: expected {what}, found none among {int(replay.size)} time steps")
    return cast("dict[str, Any]", _drawn(replay, _checked(index), size))


def _checked(index: Any) -> jax.Array:
    """The number of a sample, or a key."""
    if isinstance(index, int | np.integer):
        if not 0 <= index < 1 << 32:
            raise ConfigError(f"index: expected an integer in [0, 2**32), found {index}")
        return jnp.asarray(index, jnp.uint32)
    number = jnp.asarray(index)
    if number.ndim or not (is_key(number.dtype) or jnp.issubdtype(number.dtype, jnp.integer)):
        raise ConfigError(f"index: expected an integer or a random key, found {number.dtype} {list(number.shape)}")
    return number


@partial(jax.jit, static_argnums=2)
def _drawn(replay: Replay, index: jax.Array, size: int) -> dict[str, Any]:
    known, transform = replay.episodes, replay.layout.transform
    batch = _rows(replay, index, size) if known is None else _slices(replay, known, index, size)
    return batch if transform is None else transform(batch)


def _random(replay: Replay, index: jax.Array, size: int, high: jax.Array) -> jax.Array:
    """Integers in ``[0, high)``, int32 ``[size]``."""
    if is_key(index.dtype):
        both = jax.random.bits(index, (2, size), jnp.uint32)
        words = both[0], both[1]
    else:
        words = _philox.words(replay.seed, Purpose.REPLAY, index, size)
    return _philox.integers(words, jnp.maximum(high, 1))


def _rows(replay: Replay, index: jax.Array, size: int) -> dict[str, Any]:
    layout = replay.layout
    envs, reach = layout.num_envs or 1, 0 if layout.transform is None else layout.transform.reach
    slot = _random(replay, index, size, replay.size * envs)
    step, env = slot // envs, slot % envs
    added = {"index": slot}
    if reach:
        # Rows behind each in its stream; behind the newest there is none, and it is repeated.
        age = (replay.cursor - 1 - step) % layout.steps
        behind = jnp.arange(reach + 1, dtype=jnp.int32)
        added["mask"] = behind <= age[:, None]
        step = (step[:, None] + jnp.minimum(behind, age[:, None])) % layout.steps
        env = env[:, None]
    return _batch(_taken(replay, step, env), added)


def _slices(replay: Replay, known: Episodes, index: jax.Array, size: int) -> dict[str, Any]:
    layout, slices, marks = replay.layout, known.slices, known.marks
    found = _episodes.table(replay, known)
    ranks = _random(replay, index, size, found.ends[-1])
    windows = _once(_episodes.find(replay, known, found, ranks))
    env, start = (part[:, None] for part in windows)
    offset, mask = jnp.arange(slices.sequence_length, dtype=jnp.int32), None
    if slices.pad is not False:
        count = _once(_episodes.lengths(replay, known, windows))[:, None]
        mask, offset = offset < count, jnp.minimum(offset, count - 1)
    row = start + offset
    step = _once(_episodes.slots(replay, row))
    rows, envs = _taken(replay, step, env), layout.num_envs or 1
    if mask is not None and not isinstance(slices.pad, bool):
        rows = jax.tree.map(partial(_filled, mask=mask, pad=slices.pad), rows)
    added = {"index": step * envs + env}
    if mask is not None:
        added["mask"] = mask
    if marks.numbers and marks.ids is not None:
        ids = named(replay.rows)[marks.ids]
        traj_id = ids.reshape(layout.steps, envs)[step, env]
    else:
        # As many environments apart as there are, so that no two episodes have one number.
        number = _once(known.numbers[_episodes.slots(replay, start), env])
        traj_id = (number - 1).astype(jnp.int32) * envs + env
    added["traj_id"] = jnp.broadcast_to(traj_id, row.shape)
    return _batch(rows, added)


def _filled(leaf: jax.Array, *, mask: jax.Array, pad: float) -> jax.Array:
    flags = mask.reshape((*mask.shape, *[1] * (leaf.ndim - 2)))
    return jnp.where(flags, leaf, jnp.asarray(pad, leaf.dtype))


def _taken(replay: Replay, step: jax.Array, env: jax.Array) -> Any:
    """The rows of some time steps and environments, which are all there."""
    place = (step,) if replay.layout.num_envs is None else (step, env)
    return jax.tree.map(lambda memory: memory.at[place].get(mode="promise_in_bounds"), replay.rows)


def _batch(rows: Any, added: Mapping[str, jax.Array]) -> dict[str, Any]:
    batch = dict(rows) if isinstance(rows, Mapping) else {"data": rows}
    # The rows' own numbers of trajectories pass through.
    return batch | {name: values for name, values in added.items() if name not in batch}
