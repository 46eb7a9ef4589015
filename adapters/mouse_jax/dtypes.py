"""What JAX holds instead of 64-bit numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
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
