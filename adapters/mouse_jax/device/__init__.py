"""Replay buffers on a device: a pytree, and pure functions that can run in ``jax.jit``, ``jax.lax.scan`` and
``jax.vmap``.

Draws equal the draws of ``mouse_core.replay`` if the seed, the writes and the index of the sample are the same. Indices
of rows and slices are computed with integers only, because JAX has float64 only with x64; the results equal the results
of ``mouse_core``, which are computed in float64.
"""

from mouse_core.replay.device import Layout, Slices
from mouse_jax.device.replay import (
    Replay,
    add,
    can_add,
    can_sample,
    dumps,
    from_host,
    init,
    loads,
    sample,
    sample_ensemble,
    set_priorities,
    take,
    to_host,
)

__all__ = [
    "Layout",
    "Replay",
    "Slices",
    "add",
    "can_add",
    "can_sample",
    "dumps",
    "from_host",
    "init",
    "loads",
    "sample",
    "sample_ensemble",
    "set_priorities",
    "take",
    "to_host",
]
