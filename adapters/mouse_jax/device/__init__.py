"""Replay buffers on the device: a pytree, and pure functions for ``jax.jit``, ``jax.lax.scan`` and ``jax.vmap``.

Draws equal the draws of ``mouse_core.replay`` for the same seed, the same writes, and the same index of the sample.
Indices of rows and slices are computed only with integers. The results equal the results in float64, which JAX has only
with x64.
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
