"""Dtypes that JAX holds instead of 64-bit numbers, random keys and seeds, and whether values are known or traced."""

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
"""What is delivered instead of each dtype that JAX cannot hold without x64."""


def replaced_dtypes() -> dict[np.dtype[Any], np.dtype[Any]]:
    """``REPLACED_DTYPES``, or nothing where x64 is enabled: ``BatchSource(replace_dtypes=...)`` of batches for JAX.

    JAX by itself narrows silently, so that 2**40 + 5 becomes 5. A source that knows this table refuses the value.
    """
    return {} if x64_enabled() else dict(REPLACED_DTYPES)


def x64_enabled() -> bool:
    """Whether JAX holds 64-bit numbers here and now: ``jax_enable_x64``, or inside ``jax.enable_x64(True)``."""
    return bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of random keys of JAX, which are no numbers."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def as_key(value: jax.Array) -> jax.Array:
    """A random key ``[]`` for one as ``jax.random.PRNGKey`` makes them, uint32 ``[2]``; all else as it is."""
    if value.dtype != jnp.uint32 or value.ndim != 1:
        return value
    try:
        key: jax.Array = jax.random.wrap_key_data(value)
    except (TypeError, ValueError):  # other keys are the default, with other data
        return value
    return key


WIDER: Mapping[str, type[np.generic]] = MappingProxyType(
    {"int2": np.int8, "int4": np.int8, "uint2": np.uint8, "uint4": np.uint8, "float4_e2m1fn": np.float16}
)
"""In what NumPy has dtypes of less than a byte."""


def as_numbers(leaf: jax.Array) -> jax.Array:
    """Numbers that NumPy has: what ``jax.random.key_data`` gives of random keys, and at least a byte for each."""
    if is_key(leaf.dtype):
        return jax.random.key_data(leaf)
    wider = WIDER.get(str(leaf.dtype))
    return leaf if wider is None else leaf.astype(wider)


def known(value: Any) -> int | None:
    """A number, where it is not traced."""
    return None if isinstance(value, jax.core.Tracer) else int(value)


def are_known(*arrays: Any, anywhere: bool = False) -> bool:
    """Whether values can be looked at: none is traced, and all are on the host, so that no device is waited for.

    Args:
        arrays: The values.
        anywhere: Whether they may be on any device.
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
    """The halves of a seed, uint32 ``[2]``, high first; the seed, or a random key of JAX, may be traced.

    Raises:
        ConfigError: Not an integer in ``[0, 2**64)``, as far as that is known, nor a key.
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
            # JAX has 64-bit integers only where they were asked for.
            high = (seed >> 32).astype(jnp.uint32) if seed.dtype.itemsize == 8 else jnp.uint32(0)
            return jnp.stack([high, seed.astype(jnp.uint32)])
        seed = int(seed)
    seed = check_seed(seed)
    return jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
