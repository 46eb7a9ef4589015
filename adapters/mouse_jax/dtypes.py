"""Dtypes that JAX holds instead of 64-bit numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
