"""Arrays beside those of a batch, over the array API."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import is_numpy_array, is_torch_array

from mouse_core.dtypes import namespace
from mouse_core.errors import SchemaError

Array = Any


def check_rows(field: str, values: Array, *expected: int) -> None:
    """Raise SchemaError unless an array's first axes are as long as expected."""
    if values.ndim < 2 or tuple(values.shape[: len(expected)]) != expected:
        wanted = ", ".join(str(size) for size in expected)
        raise SchemaError(
            f"augment: {field}: expected [{wanted}, ...] as it was drawn for, found shape {tuple(values.shape)}"
        )


def beside(array: Array, values: Array) -> Array:
    """``array``, where ``values`` are and of their kind."""
    if is_numpy_array(values):
        return np.asarray(array)
    if is_torch_array(values):
        return namespace(values).asarray(array, device=values.device)
    return namespace(values).asarray(array)


def arange(xp: Any, values: Array, count: int) -> Array:
    """``0..count - 1`` in default integers, where ``values`` are."""
    return xp.arange(count, device=values.device) if is_torch_array(values) else xp.arange(count)
