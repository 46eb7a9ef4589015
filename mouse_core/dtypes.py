"""Dtypes of numbers, including bfloat16 and 8-bit floats, and conversions that never change a value silently."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError

# float32 represents every value of these dtypes exactly.
_ML_FLOATS = frozenset(
    {
        "bfloat16",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    }
)

# Beginnings of the names of dtypes in NumPy, torch and JAX, and the kind of each.
_KINDS = {"bool": "b", "uint": "u", "int": "i", "float": "f", "bfloat": "f", "complex": "c"}


def is_ml_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a float of ml_dtypes: bfloat16, or a float of 8 bits."""
    return dtype.kind in "Vf" and dtype.itemsize < 3 and dtype.name in _ML_FLOATS


def number_kind(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.kind``; for bfloat16 and 8-bit floats, return "f"."""
    return "f" if dtype.kind == "V" and is_ml_float(dtype) else dtype.kind


def kind_of(dtype: Any) -> str:
    """Return ``number_kind`` of a dtype of NumPy, JAX or torch; "V" for a dtype that is not of numbers."""
    # Not cached, because ``torch.compile`` warns about cached functions.
    if isinstance(dtype, np.dtype):
        return number_kind(dtype)
    name = str(dtype).removeprefix("torch.")
    return next((kind for beginning, kind in _KINDS.items() if name.startswith(beginning)), "V")


def namespace(values: Any) -> Any:
    """Return the array API namespace of an array. NumPy arrays take a fast path, because this function is called for
    every batch."""
    if type(values) is np.ndarray:
        return _numpy_namespace()
    if is_tensor(values):
        import array_api_compat.torch

        return array_api_compat.torch
    from array_api_compat import array_namespace

    return array_namespace(values)


def array_like(array: Any, values: Any) -> Any:
    """Return ``array`` as an array of the framework of ``values``, on their device."""
    xp = namespace(values)
    return xp.asarray(array, device=values.device) if is_tensor(values) else xp.asarray(array)


def is_tensor(values: Any) -> bool:
    """Whether a value is a torch tensor; torch is not imported for this check.

    ``array_api_compat.is_torch_array`` gives the same result. But that function has a cache, and ``torch.compile``
    warns about functions with a cache.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def may_look(values: Any) -> bool:
    """Whether the values of an array can be read without waiting for a device and without breaking
    ``torch.compile``.
    """
    if not is_tensor(values):
        return isinstance(values, np.ndarray | np.generic)
    torch: Any = sys.modules["torch"]
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_batchedtensor(values)  # inside torch.func.vmap


@cache
def _numpy_namespace() -> Any:
    # Imported late, because it imports all of NumPy, including f2py.
    import array_api_compat.numpy

    return array_api_compat.numpy


def widest(xp: Any, name: str) -> Any:
    """Return the dtype ``"float64"`` or ``"int64"`` of an array API. If the API lacks the dtype, as in JAX without x64,
    return the dtype of 32 bits.
    """
    if name not in xp.__array_namespace_info__().dtypes():
        name = name.replace("64", "32")
    return getattr(xp, name)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is boolean, integer, floating (including bfloat16 and 8-bit floats) or complex."""
    return number_kind(dtype) in "biufc"


def named_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a name or type; bfloat16 and 8-bit floats need ml_dtypes.

    Raises:
        TypeError: There is no such dtype, or ml_dtypes is needed and not installed.
    """
    if isinstance(dtype, str) and dtype in _ML_FLOATS:
        try:
            import ml_dtypes  # its import registers the dtypes with NumPy
        except ImportError as error:
            raise TypeError(f"{dtype} needs ml_dtypes: pip install ml_dtypes") from error
        dtype = getattr(ml_dtypes, dtype)
    known: np.dtype[Any] = np.dtype(dtype)
    return known


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name from which ``named_dtype`` restores the dtype."""
    return dtype.name if is_ml_float(dtype) else dtype.str


def widened(value: Any) -> Any:
    """Convert bfloat16 and 8-bit floats to float32, without loss; return any other value unchanged."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype):
        return value.astype(np.float32) if is_ml_float(dtype) else value
    name = str(dtype).removeprefix("torch.")
    return value.float() if name in _ML_FLOATS and hasattr(value, "float") else value


def largest_of(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a floating dtype."""
    if not is_ml_float(dtype):
        return float(np.finfo(dtype).max)
    import ml_dtypes

    limits: Any = ml_dtypes
    return float(limits.finfo(dtype).max)


def is_hidden(value: Any) -> bool:
    """Whether a value is a null: None, a null of pyarrow, or a fully masked array."""
    if value is None or getattr(value, "is_valid", None) is False:
        return True
    return isinstance(value, np.ma.MaskedArray) and value.size > 0 and bool(value.mask.all())


_HIDDEN = "expected a value, found a masked value (filled() replaces it)"


def refuse_hidden(value: Any) -> None:
    """Raise RowError if a masked array, alone or in a list, has masked values; masked values are missing data."""
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            mask = np.ma.getmaskarray(value)
            row = int(mask.reshape(len(mask), -1).any(axis=1).argmax()) if mask.ndim else 0
            raise RowError(row, _HIDDEN)
    elif isinstance(value, list | tuple):
        for kind in {*map(type, value)}:
            if issubclass(kind, np.ma.MaskedArray):
                for row, item in enumerate(value):
                    if np.ma.is_masked(item):
                        raise RowError(row, _HIDDEN)
            elif is_arrow_kind(kind):
                for row, item in enumerate(value):
                    if is_arrow_kind(type(item)):
                        arrow_to_numpy(item, row)


def is_arrow_kind(kind: type) -> bool:
    """Whether a class is one of pyarrow's arrays, chunked arrays or scalars; pyarrow is not imported for this check."""
    return kind.__module__.startswith("pyarrow.") and hasattr(kind, "validate") and hasattr(kind, "type")


def arrow_to_numpy(values: Any, row: int | None = None) -> Any:
    """Convert a pyarrow array to a NumPy array, in which lists and texts are objects; convert a scalar to an item of
    such an array.

    NumPy's own conversion is not used, because it crashes the process if an offset is damaged, and converts nulls to
    NaN and texts to numbers.

    Args:
        values: An array, a chunked array or a scalar.
        row: The row that an error names; by default the row of the value.

    Raises:
        RowError: A value is null, or its bytes are outside of the array's memory.
    """
    pa: Any = sys.modules["pyarrow"]
    single = isinstance(values, pa.Scalar)
    array = pa.array([values], values.type) if single else values
    try:
        array.validate(full=True)
    except pa.ArrowException as error:
        raise RowError(row or 0, f"expected readable values, found damaged data: {error}") from error
    begin = 0
    for chunk in getattr(array, "chunks", [array]):
        null = _first_null(chunk)
        if null is not None:
            raise RowError(
                begin + null if row is None else row, "expected a value, found a null (fill_null replaces it)"
            )
        begin += len(chunk)
    found = np.asarray(array)
    return found[0] if single else found


def _first_null(array: Any) -> int | None:
    """Return the first row of a pyarrow array in which a value, or an item of a list, is null; else None."""
    pa: Any = sys.modules["pyarrow"]
    if isinstance(array, pa.ExtensionArray):
        return _first_null(array.storage)
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if array.null_count:
        return int(np.asarray(array.is_null()).argmax())
    if isinstance(array, pa.StructArray) or not hasattr(array, "flatten") or not hasattr(array.type, "value_type"):
        return None
    item = _first_null(array.flatten())
    if item is None:
        return None
    import pyarrow.compute as pc  # only for errors

    return int(pc.list_parent_indices(array)[item].as_py())


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """Convert a value with ``np.asarray``, and raise an error instead of changing values silently.

    Raises:
        RowError: A value is masked, or an integer among floats cannot be represented in float64; also see
            ``arrow_to_numpy``.
    """
    refuse_hidden(value)
    array = np.asarray(arrow_to_numpy(value) if is_arrow_kind(type(value)) else value)
    if array.dtype == np.float64 and isinstance(value, list | tuple) and (np.abs(array) >= 2.0**53).any():
        check_exact_items(value)  # NumPy rounds integers in lists that also have floats
    return array


class RowError(DataError):
    """Error for a value that its field does not allow; ``row`` is the position of the value along the first axis of the
    checked array."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def is_lossless(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether ``other`` represents every value of ``dtype``.

    NumPy wrongly treats the conversion of 64-bit integers to float64 as safe.
    """
    return np.can_cast(dtype, other, "safe") and (dtype.kind not in "iu" or dtype.itemsize < 8 or other.kind != "f")


def is_beyond_floats(array: npt.NDArray[Any]) -> bool:
    """Whether an array has integers beyond 2**53; float64 cannot represent all of these integers."""
    return bool(array.size) and (int(array.max()) > _EXACT or int(array.min()) < -_EXACT)


def check_exact(array: npt.NDArray[Any]) -> None:
    """Raise RowError if float64 cannot represent an integer of ``array`` exactly, such as 2**53 + 1."""
    if not is_beyond_floats(array):
        return
    floats, beyond = array.astype(np.float64), 2.0 ** (64 - (array.dtype.kind == "i"))
    with np.errstate(invalid="ignore"):
        lost = (floats >= beyond) | (floats.astype(array.dtype) != array)
    _refuse(array, lost, _EXACT_NUMBERS)


_EXACT = 1 << 53
_EXACT_NUMBERS = "whole numbers that float64 represents exactly (an integer dtype can represent other whole numbers)"


def check_exact_items(items: Any) -> None:
    """Raise RowError if nested lists of integers and floats contain an integer that float64 cannot represent
    exactly."""
    for row, item in enumerate(items):
        for value in np.asarray(item, object).flat:
            if isinstance(value, int | np.integer) and int(float(value)) != int(value):
                raise RowError(row, f"expected {_EXACT_NUMBERS}, found {value}")


def convert(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return ``array`` converted to ``dtype``; an array that already has this dtype is returned itself.

    Conversions to floats narrower than float64 round values. All other conversions preserve every value or raise an
    error.

    Raises:
        RowError: A value does not fit ``dtype``: an integer is out of range; an integer would become a float although
            float64 cannot represent it exactly; a fraction or NaN would become an integer; a finite float would become
            infinite; or a boolean is not 0 or 1.
    """
    if array.dtype == dtype:
        return array
    if is_ml_float(array.dtype):
        array = array.astype(np.float32)
        if array.dtype == dtype:
            return array
    if is_lossless(array.dtype, dtype) or not array.size:
        return array.astype(dtype)
    if array.dtype.kind in "biu" and dtype.kind in "iu":
        converted = array.astype(dtype)
        if (converted == array).all():  # the usual case; otherwise the value that does not fit is found below
            return converted
    if array.dtype.kind not in "biuf":
        raise RowError(0, f"expected numbers, found {array.dtype}")
    return _to_floats(array, dtype) if number_kind(dtype) == "f" else _to_integers(array, dtype)


def _to_floats(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return numbers rounded to a float dtype, which can be narrower than the dtype of the numbers; see ``convert``."""
    if array.dtype.kind in "iu":
        check_exact(array)
    largest = largest_of(dtype)
    if -largest <= array.min() and array.max() <= largest:
        return array.astype(dtype)  # the usual case: neither NaN nor infinities
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    lost = ~np.isfinite(converted) & np.isfinite(array)  # in dtypes without infinity, too large values become NaN
    _refuse(array, lost, f"values that fit {dtype}")
    return converted


def _to_integers(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Convert numbers to an integer or boolean dtype; raise RowError if the dtype cannot represent a number. See
    ``convert``.
    """
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


def convert_to(values: npt.NDArray[Any], dtype: np.dtype[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """Convert values of steps, ``[n, S, ...]``, to ``dtype``; if ``out`` is not None, write the result to ``out``.

    Raises:
        RowError: A value does not fit, as in ``convert``; ``row`` is ``window * S + step``.
    """
    if out is None or not is_lossless(values.dtype, dtype):
        steps = values.reshape(values.shape[0] * values.shape[1], -1)
        values = convert(steps, dtype).reshape(values.shape)
    if out is None:
        return values
    np.copyto(out, values)
    return out


def _refuse(array: npt.NDArray[Any], where: npt.NDArray[np.bool_], wanted: str) -> None:
    if where.any():
        position = int(where.argmax())
        row = position * len(array) // array.size if array.ndim else 0
        raise RowError(row, f"expected {wanted}, found {array.flat[position].item()}")


def check_dtype(dtype: npt.DTypeLike, *, where: str) -> np.dtype[np.generic]:
    """Return ``dtype`` as a NumPy dtype; raise ConfigError if it is not boolean, integer or floating."""
    try:
        checked = named_dtype(dtype)
    except TypeError as error:
        known = f": {error}" if "ml_dtypes" in str(error) else ""
        raise ConfigError(f"{where}: expected a NumPy dtype, found {dtype!r}{known}") from error
    if number_kind(checked) not in "biuf":
        raise ConfigError(f"{where}: expected a boolean, integer or floating dtype, found {checked}")
    return checked


def replaced_by(replace_dtypes: Mapping[Any, npt.DTypeLike]) -> dict[np.dtype[Any], np.dtype[Any]]:
    """Return the replacements of dtypes that a framework lacks, as NumPy's dtypes; raise ConfigError if a dtype is
    invalid."""
    checked = partial(check_dtype, where="replace_dtypes")
    return {checked(dtype): checked(other) for dtype, other in replace_dtypes.items()}
