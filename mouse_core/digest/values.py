"""What counts as the same value in arrays of all frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import is_ml_float


def canonical(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values in the narrowest of the dtypes that count, little-endian, with one NaN.

    An integer becomes int32 where all values of the array fit, else int64, else uint64; a float float32 where that
    loses nothing, else float64.
    """
    kind = values.dtype.kind
    if is_ml_float(values.dtype):
        values, kind = values.astype(np.float32), "f"
    if kind == "b":
        return values.astype("|b1", copy=False)
    if kind in "iu":
        return _canonical_integers(values)
    if kind == "f":
        return _canonical_floats(values)
    return values


def _canonical_integers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    for dtype in ("<i4", "<i8"):
        limits = np.iinfo(dtype)
        if not values.size or (values.min() >= limits.min and values.max() <= limits.max):
            return values.astype(dtype)
    return values.astype("<u8")


def _canonical_floats(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype("<f4")
    if narrow.size and not ((narrow == values) | np.isnan(values)).all():
        narrow = values.astype("<f8")
    make_one_nan(narrow)
    return narrow


def as_arrays(batch: Any) -> dict[str, npt.NDArray[Any]]:
    """A batch of any framework (a dict, a TensorDict, or another mapping) as NumPy arrays by name."""
    return {name: as_numpy(batch[name]) for name in batch.keys()}  # noqa: SIM118  a TensorDict iterates over its rows


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """An array or tensor of any framework as a NumPy array, copied from its device if need be.

    Raises:
        TypeError: It knows none of ``__array__``, ``__dlpack__`` and torch's ``detach().cpu()``.
    """
    array = host_array(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"expected an array of numbers, found {type(values).__name__} ({array.dtype})")
    return array


def host_array(values: Any) -> npt.NDArray[Any]:
    """An array or tensor of any framework as NumPy has it, of numbers or not, copied from its device if need be."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if not hasattr(values, "__array__") and hasattr(values, "__dlpack__"):
        return np.from_dlpack(values)
    return np.asarray(values)


def make_one_nan(values: npt.NDArray[Any]) -> None:
    """Make all NaNs of some floats one, where they lie."""
    # The least of values is NaN if one of them is, and that is faster than to ask each.
    if values.size and np.isnan(values.min()):
        values[np.isnan(values)] = np.nan
