"""Masked means of a batch whose windows are distributed over several devices or processes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from mouse_core import ConfigError


def global_mean(values: Any, mask: Any = None, *, count: Any = None, axis_name: Any = None) -> jax.Array:
    """Return the masked mean of ``values`` over the complete batch: ``sum(mask * values) / sum(mask)``.

    The mean is exact even if devices have different numbers of windows or steps, or no windows. A mean over the means
    of the devices would not be exact, because a step on a device with few steps would have more weight. With usual
    episodes, a mean of means would change the gradient by typically 1 to 3%, and at most 12%.

    In ``jax.jit``, arrays that are sharded over devices or processes (from a loader with ``sharding=``, or from
    ``jax.make_array_from_process_local_data``) count as a single batch: if ``axis_name`` is not passed, the loss and
    the gradient equal the loss and the gradient on a single device. In ``jax.pmap`` and ``jax.shard_map``, pass the
    name of the axis over which the batch is split. The loss is then the same on all devices, and
    ``jax.lax.pmean(gradient, axis_name)`` is the gradient for the complete batch. If ``jax.lax.pcast`` made the
    parameters varying, use ``psum`` for the gradient, because JAX then does not add gradients automatically.

    Args:
        values: Floats ``[b, ...]``, for example a loss for each step ``[b, S]``.
        mask: A bool mask of the values that count, or weights of the values. The mask's shape is a prefix of the shape
            of ``values``: ``[b]`` or ``[b, S]``. All other values are ignored, even NaN. None: all values count.
        count: The divisor in place of the sum of this call's mask: the sum of the masks of all micro-batches of a step,
            over all devices and processes. Each call then returns ``sum(mask * values) / count`` for its micro-batch,
            and the gradients of the micro-batches must be summed. If there is no mask, ``count`` is the number of
            elements of ``values`` in all micro-batches, over all devices and processes.
        axis_name: The name of the mapped axis, or the names of several axes, over which the batch is split; None:
            ``values`` contain the complete batch.

    Returns:
        An array ``[]`` in the dtype of ``values``, or in float32 if that dtype is narrower or is not a float dtype. If
        no value counts, the result and its gradient are 0.

    Raises:
        ConfigError: The shape of ``values`` does not begin with the shape of ``mask``.

    Example:
        >>> global_mean(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False]))
        Array(1.5, dtype=float32)
    """
    values = jnp.asarray(values)
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    weights = jnp.ones((), values.dtype) if mask is None else jnp.asarray(mask).astype(values.dtype)
    if weights.shape != values.shape[: weights.ndim]:
        raise ConfigError(
            f"mask: expected the leading axes of the shape {list(values.shape)}, found shape {list(jnp.shape(mask))}"
        )
    # The number of elements for each weight, which ``count`` does not include; 1 without a mask.
    each = 1 if mask is None else math.prod(values.shape[weights.ndim :])
    weights = jnp.broadcast_to(weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim)), values.shape)
    total = jnp.sum(jnp.where(weights != 0, values * weights, 0))
    counted = jnp.sum(weights)
    if axis_name is not None:
        lax: Any = jax.lax  # some functions of jax.lax have no types
        total, counted = lax.psum((total, counted), axis_name)
    if count is not None:
        counted = jnp.asarray(count, values.dtype) * each
    return total / jnp.where(counted != 0, counted, 1)
