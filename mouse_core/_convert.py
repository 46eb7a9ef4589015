"""Conversions between dtypes that never lose a value silently."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def convert(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``array`` in ``dtype``, the same object where nothing changes.

    Floats may be rounded to a narrower float. Everything else must arrive as the value it was.

    Raises:
        ValueError: A value does not fit: an integer out of range, a fraction or NaN for an integer dtype, a finite
            float that would become infinite, or anything but 0 and 1 for a boolean.
    """
    if array.dtype == dtype:
        return array
    if np.can_cast(array.dtype, dtype, "safe") or not array.size:
        return array.astype(dtype)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"expected numbers, found {array.dtype}")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            converted = array.astype(dtype)
        if array.dtype.kind == "f":
            lost = np.isinf(converted) & np.isfinite(array)
            if lost.any():
                raise ValueError(f"expected values that fit {dtype}, found {_first(array, lost)}")
        return converted
    if dtype.kind == "b":
        lowest, highest = 0, 1
    else:
        limits = np.iinfo(dtype)
        lowest, highest = int(limits.min), int(limits.max)
    if array.dtype.kind == "f":
        array = array.astype(np.float64)  # float16 cannot be compared with such limits
    # Written so that NaN counts as outside. Above 2**53 float limits round up, hence the strict comparison.
    beyond = array > highest if array.dtype.kind != "f" else array >= float(highest) + (highest < 2**53)
    outside = ~(array >= lowest) | beyond
    if outside.any():
        raise ValueError(f"expected values {lowest}..{highest} that fit {dtype}, found {_first(array, outside)}")
    converted = array.astype(dtype)
    if array.dtype.kind == "f":
        fractions = converted != array
        if fractions.any():
            raise ValueError(f"expected whole numbers for {dtype}, found {_first(array, fractions)}")
    return converted


def _first(array: npt.NDArray[Any], where: npt.NDArray[np.bool_]) -> Any:
    return array[where].flat[0].item()
