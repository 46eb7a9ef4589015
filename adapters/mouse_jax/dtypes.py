"""Replacements for 64-bit dtypes, conversions of random keys and seeds, and checks whether values are concrete or
traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mouse_core import ConfigError
from mouse_core.randomness import check_seed

REPLACED_DTYPES: Mapping[np.dtype[Any], np.dtype[Any]] = MappingProxyType(
    {
        np.dtype(np.int64): np.dtype(np.int32),
        np.dtype(np.uint64): np.dtype(np.uint32),
        np.dtype(np.float64): np.dtype(np.float32),
    }
)
"""A dict from each dtype that JAX lacks without x64 to the dtype that is delivered instead."""


def replaced_dtypes() -> dict[np.dtype[Any], np.dtype[Any]]:
    """Return ``REPLACED_DTYPES``, or an empty mapping with x64 enabled, for ``BatchSource(replace_dtypes=...)``.

    JAX itself converts 64-bit numbers to 32 bits without an error, so 2**40 + 5 becomes 5. A source with this mapping
    raises an error instead.
    """
    return {} if x64_enabled() else dict(REPLACED_DTYPES)


def x64_enabled() -> bool:
    """Whether JAX has 64-bit numbers in this thread, because ``jax_enable_x64`` is set or the call is inside
    ``jax.enable_x64(True)``.
    """
    return bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)


def is_key(dtype: Any) -> bool:
    """Whether a dtype is a dtype of JAX's random keys, which are not numeric."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def as_key(value: jax.Array) -> jax.Array:
    """Convert a raw key of ``jax.random.PRNGKey``, uint32 ``[2]``, to a random key ``[]``; return other values
    unchanged.
    """
    if value.dtype != jnp.uint32 or value.ndim != 1:
        return value
    try:
        key: jax.Array = jax.random.wrap_key_data(value)
    except (TypeError, ValueError):  # no data of a key of JAX's default implementation
        return value
    return key


def known(value: Any) -> int | None:
    """Return a number as an int; None if the number is traced."""
    return None if isinstance(value, jax.core.Tracer) else int(value)


def are_known(*arrays: Any, anywhere: bool = False) -> bool:
    """Whether values can be read without waiting for a device: no value is traced, and all values are on the host.

    Args:
        arrays: The values.
        anywhere: Whether values on any device are accepted, not only values on the host.
    """
    for array in arrays:
        if isinstance(array, jax.core.Tracer):
            return False
        if (
            not anywhere
            and isinstance(array, jax.Array)
            and any(device.platform != "cpu" for device in array.devices())
        ):
            return False
    return True


def seed_halves(seed: Any) -> jax.Array:
    """Return the two 32-bit halves of a seed or a random key, uint32 ``[2]``, the upper half first; the argument can be
    traced.

    Raises:
        ConfigError: The seed is neither a random key nor an integer in ``[0, 2**64)`` (the range is checked only if the
            seed is not traced).
    """
    if isinstance(seed, jax.Array):
        seed = as_key(seed)
        if is_key(seed.dtype) and not seed.ndim:
            return jax.random.bits(seed, (2,), jnp.uint32)
        if seed.ndim or not jnp.issubdtype(seed.dtype, jnp.integer):
            raise ConfigError(
                f"seed: expected an integer in [0, 2**64) or a random key, found {seed.dtype} {list(seed.shape)}"
            )
        if isinstance(seed, jax.core.Tracer):
            # JAX has 64-bit integers only with x64.
            high = (seed >> 32).astype(jnp.uint32) if seed.dtype.itemsize == 8 else jnp.uint32(0)
            return jnp.stack([high, seed.astype(jnp.uint32)])
        seed = int(seed)
    seed = check_seed(seed)
    return jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
