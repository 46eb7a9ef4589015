"""Conversions between dtypes that never lose a value silently."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class RowError(ValueError):
    """A value that its field does not allow; ``row`` counts along the first axis of what was looked at."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def convert(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``array`` in ``dtype``, the same object where nothing changes.

    Numbers may be rounded to a float that is narrower. Everything else must arrive as the value it was.

    Raises:
        RowError: A value does not fit: an integer out of range, a fraction or NaN for an integer dtype, a finite
            float that would become infinite, or anything but 0 and 1 for a boolean.
    """
    if array.dtype == dtype:
        return array
    if np.can_cast(array.dtype, dtype, "safe") or not array.size:
        return array.astype(dtype)
    if array.dtype.kind in "biu" and dtype.kind in "iu":
        converted = array.astype(dtype)
        if (converted == array).all():  # most likely; otherwise what does not fit is looked for
            return converted
    if array.dtype.kind not in "biuf":
        raise RowError(0, f"expected numbers, found {array.dtype}")
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        if array.dtype.kind == "f" and -largest <= array.min() and array.max() <= largest:
            return array.astype(dtype)  # most likely; neither NaN nor infinities are among them
        with np.errstate(over="ignore"):
            converted = array.astype(dtype)
        if array.dtype.kind == "f":
            lost = np.isinf(converted) & np.isfinite(array)
            _refuse(array, lost, f"values that fit {dtype}")
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
    _refuse(array, outside, f"values {lowest}..{highest} that fit {dtype}")
    converted = array.astype(dtype)
    if array.dtype.kind == "f":
        _refuse(array, converted != array, f"whole numbers for {dtype}")
    return converted


def _refuse(array: npt.NDArray[Any], where: npt.NDArray[np.bool_], wanted: str) -> None:
    if where.any():
        place = int(where.argmax())
        raise RowError(place * len(array) // array.size, f"expected {wanted}, found {array.flat[place].item()}")
