"""Dtypes of numbers, bfloat16 and 8-bit floats included, and conversions that never lose a value silently."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError, DataError

# Each value of theirs is one of float32, too.
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

# How the names of dtypes of NumPy, torch and JAX begin, and of which kind those are.
_KINDS = {"bool": "b", "uint": "u", "int": "i", "float": "f", "bfloat": "f", "complex": "c"}


def is_ml_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a float that NumPy has from ml_dtypes: bfloat16, or one of 8 bits."""
    return dtype.kind in "Vf" and dtype.itemsize < 3 and dtype.name in _ML_FLOATS


def number_kind(dtype: np.dtype[Any]) -> str:
    """``dtype.kind``, which is "f" for bfloat16 and 8-bit floats, too."""
    return "f" if dtype.kind == "V" and is_ml_float(dtype) else dtype.kind


def kind_of(dtype: Any) -> str:
    """``number_kind`` of a dtype of NumPy, JAX or torch; "V" of one that is of no numbers."""
    # Not cached, for ``torch.compile`` warns of what is.
    if isinstance(dtype, np.dtype):
        return number_kind(dtype)
    name = str(dtype).removeprefix("torch.")
    return next((kind for beginning, kind in _KINDS.items() if name.startswith(beginning)), "V")


def namespace(values: Any) -> Any:
    """The array API's functions for an array; at once for those of NumPy, which is asked for on every batch."""
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
    """Whether it is a tensor of torch, which is not imported to tell.

    As ``array_api_compat.is_torch_array``, whose answers are cached, of which ``torch.compile`` warns a dozen times.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def may_look(values: Any) -> bool:
    """Whether looking at what an array of NumPy or torch holds waits for no device, nor breaks what torch compiles."""
    if not is_tensor(values):
        return isinstance(values, np.ndarray | np.generic)
    torch: Any = sys.modules["torch"]
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_batchedtensor(values)  # inside torch.func.vmap


@cache
def _numpy_namespace() -> Any:
    # It takes all of NumPy with it, f2py included, which importing this package does not wait for.
    import array_api_compat.numpy

    return array_api_compat.numpy


def widest(xp: Any, name: str) -> Any:
    """A dtype of an array API by name, ``"float64"`` or ``"int64"``; where it has none, as JAX without x64, the one of
    half its bits."""
    if name not in xp.__array_namespace_info__().dtypes():
        name = name.replace("64", "32")
    return getattr(xp, name)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is of booleans, integers, floats (bfloat16 and 8-bit floats, too) or complex numbers."""
    return number_kind(dtype) in "biufc"


def named_dtype(dtype: Any) -> np.dtype[Any]:
    """A NumPy dtype by what names it, also bfloat16 and 8-bit floats, where ml_dtypes is installed.

    Raises:
        TypeError: It names none, or ml_dtypes is needed and not there.
    """
    if isinstance(dtype, str) and dtype in _ML_FLOATS:
        try:
            import ml_dtypes  # it makes them known to NumPy
        except ImportError as error:
            raise TypeError(f"{dtype} needs ml_dtypes: pip install ml_dtypes") from error
        dtype = getattr(ml_dtypes, dtype)
    known: np.dtype[Any] = np.dtype(dtype)
    return known


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name from which ``named_dtype`` restores the dtype."""
    return dtype.name if is_ml_float(dtype) else dtype.str


def widened(value: Any) -> Any:
    """Narrow floats as the float32 that they are exactly; anything else as it is."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype):
        return value.astype(np.float32) if is_ml_float(dtype) else value
    name = str(dtype).removeprefix("torch.")
    return value.float() if name in _ML_FLOATS and hasattr(value, "float") else value


def largest_of(dtype: np.dtype[Any]) -> float:
    """The largest finite number of a floating dtype."""
    if not is_ml_float(dtype):
        return float(np.finfo(dtype).max)
    import ml_dtypes

    limits: Any = ml_dtypes
    return float(limits.finfo(dtype).max)


def is_hidden(value: Any) -> bool:
    """Whether a value is a null: None, a null of pyarrow, or a masked array of which nothing is to be seen."""
    if value is None or getattr(value, "is_valid", None) is False:
        return True
    return isinstance(value, np.ma.MaskedArray) and value.size > 0 and bool(value.mask.all())


_HIDDEN = "expected a value, found a masked one (filled() replaces it)"


def refuse_hidden(value: Any) -> None:
    """Raise RowError if a masked array, or one in a list, hides a value: what lies under a mask is no data."""
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
    """Whether a class is of arrays, chunked arrays or scalars of pyarrow, which is not imported to tell."""
    return kind.__module__.startswith("pyarrow.") and hasattr(kind, "validate") and hasattr(kind, "type")


def arrow_to_numpy(values: Any, row: int | None = None) -> Any:
    """An array of pyarrow as NumPy has it, of objects for lists and texts; a scalar as an item of such an array.

    NumPy alone ends the process where an offset is damaged, has NaN for a null, and reads a text's bytes as numbers.

    Args:
        values: An array, a chunked array or a scalar.
        row: The row that an error names; by default that of the value.

    Raises:
        RowError: A value is null, or lies outside of its memory.
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
    """The first row of an array of pyarrow in which a value, or an item of a list, is null."""
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
    import pyarrow.compute as pc  # for an error alone

    return int(pc.list_parent_indices(array)[item].as_py())


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """``np.asarray`` that changes no value in silence.

    Raises:
        RowError: A mask hides a value, or an integer among floats is none that float64 holds; or see
            ``arrow_to_numpy``.
    """
    refuse_hidden(value)
    array = np.asarray(arrow_to_numpy(value) if is_arrow_kind(type(value)) else value)
    if array.dtype == np.float64 and isinstance(value, list | tuple) and (np.abs(array) >= 2.0**53).any():
        check_exact_items(value)  # of integers and floats, NumPy rounds the integers
    return array


class RowError(DataError):
    """A value that its field does not allow; ``row`` counts along the first axis of what was looked at."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def is_lossless(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether every value of ``dtype`` is one of ``other``. NumPy calls integers of 64 bits in float64 safe."""
    return np.can_cast(dtype, other, "safe") and (dtype.kind not in "iu" or dtype.itemsize < 8 or other.kind != "f")


def is_beyond_floats(array: npt.NDArray[Any]) -> bool:
    """Whether integers are so large that float64 does not hold all of their size."""
    return bool(array.size) and (int(array.max()) > _EXACT or int(array.min()) < -_EXACT)


def check_exact(array: npt.NDArray[Any]) -> None:
    """Raise RowError if float64 does not hold some integer of ``array`` exactly, such as 2**53 + 1."""
    if not is_beyond_floats(array):
        return
    floats, beyond = array.astype(np.float64), 2.0 ** (64 - (array.dtype.kind == "i"))
    with np.errstate(invalid="ignore"):
        lost = (floats >= beyond) | (floats.astype(array.dtype) != array)
    _refuse(array, lost, _EXACT_NUMBERS)


_EXACT = 1 << 53
_EXACT_NUMBERS = "whole numbers that float64 holds exactly (integer dtypes hold others)"


def check_exact_items(items: Any) -> None:
    """``check_exact`` of the integers among nested lists and arrays of numbers, which NumPy made floats of."""
    for row, item in enumerate(items):
        for value in np.asarray(item, object).flat:
            if isinstance(value, int | np.integer) and int(float(value)) != int(value):
                raise RowError(row, f"expected {_EXACT_NUMBERS}, found {value}")


def convert(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``array`` in ``dtype``, the same object where nothing changes.

    Numbers may be rounded to a float that is narrower than float64. Everything else must arrive as the value it was.

    Raises:
        RowError: A value does not fit: an integer out of range, or one for a float that float64 does not hold exactly,
            a fraction or NaN for an integer dtype, a finite float that would become infinite, or anything but 0 and 1
            for a boolean.
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
        if (converted == array).all():  # most likely; otherwise what does not fit is looked for
            return converted
    if array.dtype.kind not in "biuf":
        raise RowError(0, f"expected numbers, found {array.dtype}")
    return _to_floats(array, dtype) if number_kind(dtype) == "f" else _to_integers(array, dtype)


def _to_floats(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Numbers rounded to a float dtype that may be narrower; see ``convert``."""
    if array.dtype.kind in "iu":
        check_exact(array)
    largest = largest_of(dtype)
    if -largest <= array.min() and array.max() <= largest:
        return array.astype(dtype)  # most likely; neither NaN nor infinities are among them
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    lost = ~np.isfinite(converted) & np.isfinite(array)  # some dtypes have no infinity: there it becomes NaN
    _refuse(array, lost, f"values that fit {dtype}")
    return converted


def _to_integers(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Numbers as an integer or boolean dtype that may not hold all of them; see ``convert``."""
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
    """Values of steps, ``[n, S, ...]``, in ``dtype``, written to ``out`` where that is given.

    Raises:
        RowError: As ``convert``, with the number of the step, ``window * S + step``.
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
    """``dtype`` as a NumPy dtype, or ConfigError if it is not numeric."""
    try:
        checked = named_dtype(dtype)
    except TypeError as error:
        known = f": {error}" if "ml_dtypes" in str(error) else ""
        raise ConfigError(f"{where}: expected a NumPy dtype, found {dtype!r}{known}") from error
    if number_kind(checked) not in "biuf":
        raise ConfigError(f"{where}: expected a boolean, integer or floating dtype, found {checked}")
    return checked


def replaced_by(replace_dtypes: Mapping[Any, npt.DTypeLike]) -> dict[np.dtype[Any], np.dtype[Any]]:
    """Return the replacements of dtypes that a framework lacks, as NumPy's dtypes; ConfigError if one is invalid."""
    checked = partial(check_dtype, where="replace_dtypes")
    return {checked(dtype): checked(other) for dtype, other in replace_dtypes.items()}
