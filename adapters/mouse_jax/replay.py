"""ReplayBuffer and RowMap, which accept pytrees and return pytrees of jax.Array."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
from jax.sharding import Sharding

from mouse_core import maps
from mouse_core.replay import buffer, ensemble
from mouse_jax.placement import find_device
from mouse_jax.trees import as_arrays, as_jax

Target: TypeAlias = jax.Device | Sharding | str | None


class _InJax:
    """Base class of buffers and maps that accept arrays of JAX and NumPy, and deliver results to a device."""

    _target: jax.Device | Sharding | None

    def _place(self, device: Target) -> None:
        self._target = device if isinstance(device, Sharding) else find_device(device)

    @property
    def device(self) -> jax.Device | Sharding | None:
        """The device of results; None means JAX's default device."""
        return self._target

    def _accept(self, rows: Any) -> Any:
        return as_arrays(rows)

    def _deliver(self, batch: Any) -> Any:
        return as_jax(batch, self._target)


class ReplayBuffer(_InJax, buffer.ReplayBuffer):
    """``mouse_core.replay.ReplayBuffer`` that accepts and returns pytrees of ``jax.Array``.

    Rows may be nested dicts, tuples, named tuples and dataclasses of JAX or NumPy arrays or of numbers; dataclasses are
    returned as dicts. Batches are dicts of ``jax.Array``, nested like the rows. The draws equal the draws of the NumPy
    and torch buffers with the same seed. Rows are stored in the host's memory. Every batch is gathered into new memory
    that is never modified later, because JAX arrays may share this memory.

    Without x64 (``jax_enable_x64``) 64-bit fields are converted to the dtypes in ``REPLACED_DTYPES``; a value that the
    new dtype cannot represent raises an error. Transforms are applied before this conversion, and receive NumPy arrays.

    Args:
        storage, sampler, transform, batch_size, seed, and others: The arguments of ``mouse_core.replay.ReplayBuffer``.
        device: The device of batches: a ``jax.Device``, a sharding, a platform ("cpu", "gpu"), or a platform with a
            number ("gpu:1"); None: JAX's default device.

    Raises:
        ConfigError: The device does not exist; see also ``mouse_core.replay.ReplayBuffer``.

    Example:
        >>> import jax.numpy as jnp
        >>> from mouse_core.replay import ArrayStorage
        >>> from mouse_jax import ReplayBuffer
        >>> buffer = ReplayBuffer(ArrayStorage(100), batch_size=2)
        >>> buffer.extend({"obs": jnp.ones((3, 4))}).tolist()
        [0, 1, 2]
        >>> buffer.sample()["obs"].shape
        (2, 4)
    """

    def _deliver_rows(self, rows: Any, shape: tuple[int, ...]) -> Any:
        if isinstance(rows, list) and shape:
            return [self._deliver_rows(row, shape[1:]) for row in rows]
        return self._deliver(rows)


class PrioritizedReplayBuffer(buffer.PrioritizedReplayBuffer, ReplayBuffer):
    """``mouse_core.replay.PrioritizedReplayBuffer`` that accepts and returns pytrees of ``jax.Array``.

    Args:
        alpha, beta, eps: See ``mouse_core.replay.PrioritizedSampler``.
        **options: The other arguments of ``ReplayBuffer``, by name.
    """


class ReplayBufferEnsemble(_InJax, ensemble.ReplayBufferEnsemble):
    """``mouse_core.replay.ReplayBufferEnsemble`` that returns pytrees of ``jax.Array``.

    Args:
        *buffers: Replay buffers of any package, ensembles, or data that a buffer accepts as its storage.
        device: See ``ReplayBuffer``.
        p, transform, batch_size, seed, and others: See ``mouse_core.replay.ReplayBufferEnsemble``.

    Raises:
        ConfigError: The device does not exist; see also ``mouse_core.replay.ReplayBufferEnsemble``.
    """


class RowMap(_InJax, maps.RowMap):
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

    def __init__(self, *args: Any, device: Target = None, **options: Any) -> None:
        self._place(device)
        super().__init__(*args, **options)
