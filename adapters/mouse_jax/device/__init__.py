"""Replay on the device: a pytree, and pure functions of it for ``jax.jit``, ``jax.lax.scan`` and ``jax.vmap``.

What is drawn is what ``mouse_core.replay`` draws for the same seed, writes and number of the sample. Numbers of rows
and slices are computed with integers alone, as float64 would have them, which JAX has only with x64.
"""

from mouse_jax.device._state import Layout, Replay, Slices
from mouse_jax.device.sampling import can_sample, sample
from mouse_jax.device.writing import add, init

__all__ = ["Layout", "Replay", "Slices", "add", "can_sample", "init", "sample"]
