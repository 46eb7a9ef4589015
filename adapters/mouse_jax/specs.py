"""Functions that draw values of specs as JAX arrays, and that return the shapes and dtypes of these values."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding

from mouse_core.dtypes import is_number
from mouse_core.errors import ConfigError
from mouse_core.spec import Domain
from mouse_jax.dtypes import replaced_dtypes
from mouse_jax.placement import find_target
from mouse_jax.trees import as_jax

__all__ = ["sample", "shape_dtypes"]


def shape_dtypes(spec: Domain, batch: int | tuple[int, ...] = (), *, sharding: Sharding | None = None) -> Any:
    """Return shapes and dtypes of a spec's values as ``jax.ShapeDtypeStruct``, for ``jax.eval_shape`` and orbax.

    Without x64, 64-bit dtypes are replaced by the dtypes in ``REPLACED_DTYPES``.

    Args:
        spec: The spec. For a ``Composite`` the result is nested dicts; for a ``Stacked`` whose specs differ in shape or
            fields, a tuple.
        batch: The shape of the batch; in the result, it precedes the shape of a single value.
        sharding: The sharding of all arrays.

    Raises:
        ConfigError: The spec has dynamic dimensions (call ``expand`` first to set their sizes), or the spec contains a
            ``NonTensor``, which JAX does not support.
    """
    front = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    replaced = replaced_dtypes()
    make: Any = jax.ShapeDtypeStruct

    def described(values: Any) -> Any:
        if not is_number(values.dtype):
            raise ConfigError(f"shape_dtypes: expected a spec of numbers, found {spec!r:.200}")
        return make(values.shape[1:], replaced.get(values.dtype, values.dtype), sharding=sharding)

    return jax.tree.map(described, spec.zeros((0, *front)))  # a batch of 0 rows takes no memory


def sample(
    spec: Domain,
    seed: int,
    batch: int | tuple[int, ...] = (),
    *,
    device: jax.Device | str | None = None,
    sharding: Sharding | None = None,
) -> Any:
    """Draw random values of a spec as JAX arrays, equal to the values of ``spec.sample``.

    Args:
        spec: The spec. For a ``Composite`` the result is nested dicts.
        seed: An integer in ``[0, 2**64)``.
        batch: The shape of the batch of values.
        device: The device of the arrays; by default ``spec.device``, or JAX's default device if ``spec.device`` is
            None.
        sharding: The sharding of the arrays; pass it instead of ``device``.

    Raises:
        ConfigError: An argument of ``spec.sample`` is invalid, or the device does not exist.
        DataError: A number cannot be represented in 32 bits, and x64 is not enabled.
    """
    where = device if device is not None or sharding is not None else spec.device
    return as_jax(spec.sample(seed, batch), find_target(where, sharding))
