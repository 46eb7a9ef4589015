"""RowMap for JAX, which accepts and returns pytrees of jax.Array."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding

from mouse_core import maps
from mouse_jax.placement import find_device
from mouse_jax.trees import as_arrays, as_jax


class RowMap(maps.RowMap):
    """``mouse_core.maps.RowMap`` that accepts and returns pytrees of ``jax.Array``.

    Rows are stored in the host's memory. Call the methods outside of ``jax.jit``. The ``RowMap`` classes for NumPy,
    torch and JAX assign the same indices to the same rows. Without x64 (``jax_enable_x64``), 64-bit values and indices
    have the dtypes in ``REPLACED_DTYPES``.

    Args:
        *args, **options: The arguments of ``mouse_core.maps.RowMap``: keys, values, capacity, seed.
        device: The device of results: a ``jax.Device``, a sharding, or a platform; None: JAX's default device.

    Raises:
        ConfigError: The device does not exist; see also ``mouse_core.maps.RowMap``.

    Example:
        >>> import jax.numpy as jnp
        >>> from mouse_jax import RowMap
        >>> visits = RowMap()
        >>> visits.accumulate(jnp.array([[0.5, 1.0], [2.0, 3.0], [0.5, 1.0]]), 1).tolist()
        [0, 1, 0]
        >>> visits[jnp.array([[0.5, 1.0]])].tolist()
        [2]
    """

    def __init__(self, *args: Any, device: jax.Device | Sharding | str | None = None, **options: Any) -> None:
        self._target = device if isinstance(device, Sharding) else find_device(device)
        super().__init__(*args, **options)

    @property
    def device(self) -> jax.Device | Sharding | None:
        """The device of results; None means JAX's default device."""
        return self._target

    def _accept(self, rows: Any) -> Any:
        return as_arrays(rows)

    def _deliver(self, rows: Any) -> Any:
        return as_jax(rows, self._target)
