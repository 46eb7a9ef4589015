"""RowMap for JAX: pytrees of jax.Array in and out."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from mouse_core import maps
from mouse_jax.placement import find_device
from mouse_jax.trees import as_arrays, as_jax


class RowMap(maps.RowMap):
    """``mouse_core.maps.RowMap`` that takes and gives pytrees of ``jax.Array``.

    Rows lie in the host's memory, and calls are made outside of ``jax.jit``. The same rows have the same indices in
    NumPy and torch. Without x64 (``jax_enable_x64``) 64-bit values and indices come as ``REPLACED_DTYPES`` says.

    Args:
        *args, **options: As ``mouse_core.maps.RowMap`` takes them: keys, values, capacity, full, storage, seed.
        device: Where results arrive: a ``jax.Device``, a sharding, or a platform; None: JAX's default device.

    Raises:
        ConfigError: A device that is not there; else see ``mouse_core.maps.RowMap``.

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
        """Device of results; None is JAX's default device."""
        return self._target

    def index(self, rows: Any) -> Any:
        """The index of each row; see the core's."""
        return as_jax(super().index(rows), self._target)

    def extend(self, rows: Any, values: Any = None) -> Any:
        """Write values under rows, and give the index of each; see the core's."""
        return as_jax(super().extend(rows, values), self._target)

    def accumulate(self, rows: Any, values: Any, how: np.ufunc = np.add) -> Any:
        """Add values to those that stand under rows, and give the index of each; see the core's."""
        return as_jax(super().accumulate(rows, values, how), self._target)

    def _accept(self, rows: Any) -> Any:
        return as_arrays(rows)

    def _deliver(self, rows: Any) -> Any:
        return as_jax(rows, self._target)
