"""The rows of slices that were found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mouse_jax.device import _episodes
from mouse_jax.device.ground.state import Episodes, Replay, named

_once: Callable[[Any], Any] = lax.optimization_barrier
"""What is done for each slice is not done anew for each of its steps, nor that for each value of each field."""


def taken(rows: Any, *places: jax.Array) -> Any:
    """Rows in some places, which are all there: a tree of ``[*places, ...]``.

    Args:
        rows: A tree of arrays ``[T, ...]``, or ``[T, E, ...]``.
        places: Their time steps, and of ``[T, E, ...]`` their environments, int32 of one shape.
    """
    return jax.tree.map(lambda memory: memory.at[places].get(mode="promise_in_bounds"), rows)


def taken_slices(replay: Replay, known: Episodes, windows: _episodes.Windows) -> tuple[Any, dict[str, jax.Array]]:
    """The rows of some slices, and what batches have beside them."""
    layout, marks, pad, size = replay.layout, known.marks, known.slices.pad, known.slices.sequence_length
    start, env = _once(windows.start), windows.env[:, None]
    row = start[:, None] + jnp.arange(size, dtype=jnp.int32)
    envs, one_stream = layout.num_envs or 1, layout.num_envs is None
    numbers, of_slice = known.numbers[:, 0] if one_stream else known.numbers, () if one_stream else (env,)

    def read(rows: Any) -> Any:
        """What lies in memory as rows do from the first row of each slice on; behind the newest anything."""
        places = row if pad is False else jnp.minimum(row, replay.size - 1)
        return taken(rows, _once(_episodes.slots(replay, places)), *of_slice)

    if pad is False:
        rows, number = read(replay.rows), taken(numbers, _episodes.slots(replay, start[:, None]), *of_slice)
        added = {"index": _episodes.slots(replay, row) * envs + env}
    else:
        rows, number = read(replay.rows), read(numbers)
        # Those of an episode have its number, as long as they are there.
        mask = (number == number[:, :1]) & (row < replay.size)
        last = start[:, None] + _once(mask.sum(1, dtype=jnp.int32))[:, None] - 1
        added = {"index": _episodes.slots(replay, jnp.minimum(row, last)) * envs + env, "mask": mask}
        nearest = replay.rows if pad is not True else taken(replay.rows, _episodes.slots(replay, last), *of_slice)
        rows = jax.tree.map(lambda leaf, other: _filled(leaf, mask, other, pad), rows, nearest)
    if marks.numbers and marks.ids is not None:
        ids = named(replay.rows)[marks.ids]
        traj_id = taken(ids, _episodes.slots(replay, start[:, None]), *of_slice).reshape(-1, 1)
    else:
        # As many environments apart as there are, so that no two episodes have one number.
        traj_id = (number[:, :1] - 1).astype(jnp.int32) * envs + env
    return rows, added | {"traj_id": jnp.broadcast_to(traj_id, row.shape)}


def _filled(leaf: jax.Array, mask: jax.Array, nearest: jax.Array, pad: bool | float) -> jax.Array:
    """A field of slices, with the nearest step that is there or a number in those that are not."""
    flags = mask.reshape((*mask.shape, *[1] * (leaf.ndim - 2)))
    return jnp.where(flags, leaf, nearest if pad is True else jnp.asarray(pad, leaf.dtype))
