"""What values a column of appended rows takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column_types import ColumnType
from mouse_core._base.checks import values_of
from mouse_core.dtypes import RowError, convert, is_hidden, is_ml_float, refuse_hidden, to_numpy, widened
from mouse_core.errors import DataError
from mouse_core.images.pixels import check_image, decode_image, encode_png

_BYTE = np.dtype(np.uint8)


@dataclass(frozen=True)
class TailColumn:
    """How one column of appended rows is kept.

    Args:
        kind: The column's type.
        shape: The shape of a row; ``()`` for scalars.
        arrow_type: The Arrow type of values that are kept as Python objects (strings, encoded images); else None.
        nullable: Whether None is allowed.
        widths: Narrowest and widest row allowed, both included, for vectors of one dimension.
        bounds: Lowest and highest value allowed; None: any.
        image: Whether values are images, kept as arrays of pixels.
        any_bytes: Whether bytes are any, as no field reads images from the column.
        pixel: The dtype of images' pixels.
        image_roots: Folders in which images that are named by path may lie.
        whole: Whether numbers must be whole, although the column holds floats.
        whole_floats: Whether floats that are whole go into a column of integers, as the field delivers floats.
        single: Whether a number and a vector of one value are the same.
        allowed: What values within ``bounds`` are, in words.
        domain: Which values rows may have, a spec of ``mouse_core.spec``; None: any.
        zeros: Whether a row of zeros is allowed as well, as where no action led to it.
        object_bytes: About how many bytes a Python object takes; snapshots copy those of the open extent.
    """

    kind: ColumnType
    shape: tuple[int, ...] = ()
    arrow_type: pa.DataType | None = None
    nullable: bool = False
    widths: tuple[int, int] | None = None
    bounds: tuple[int, int] | None = None
    image: bool = False
    any_bytes: bool = False
    pixel: np.dtype[Any] = _BYTE
    image_roots: tuple[str, ...] = ()
    whole: bool = False
    whole_floats: bool = False
    single: bool = False
    allowed: str = ""
    domain: Any = None
    zeros: bool = False
    object_bytes: int = 64

    @property
    def is_object(self) -> bool:
        """Whether values are kept as Python objects."""
        return self.arrow_type is not None

    @property
    def width(self) -> int:
        """Numbers in a row, at most."""
        return self.widths[1] if self.widths else prod(self.shape)

    @property
    def domain_limits(self) -> tuple[float, float] | None:
        """Between which single numbers of this column its spec allows all; None: there are no such limits."""
        spec = self.domain
        if (
            spec is None
            or not holds(spec.shape, self.shape)
            or (spec.dtype.kind != "f" and self.kind.dtype.kind == "f")
        ):
            return None
        limits: tuple[float, float] | None = spec.limits
        return limits

    @property
    def row_bytes(self) -> int:
        """About how many bytes a row takes."""
        return self.object_bytes if self.is_object else self.width * self.kind.dtype.itemsize


def at_row(row: int, check: Callable[..., Any], *arguments: Any) -> Any:
    """What a check gives; if it refuses, a RowError."""
    try:
        return check(*arguments)
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        raise RowError(row, str(error)) from error


def check_vector(value: Any, column: TailColumn) -> npt.NDArray[Any]:
    """``value`` as an array whose kind and shape fit the column, or ValueError."""
    if column.image:
        refuse_hidden(value)
        pixels = decode_image(value, dtype=column.pixel, image_roots=column.image_roots)
        value = pixels[:, :, 0] if pixels.shape == (*column.shape, 1) else pixels
    array = as_array(value)
    if column.single and array.ndim == 0:
        array = array.reshape(1)
    if column.widths is not None and array.ndim == 1:
        narrowest, widest = column.widths
        if not narrowest <= array.size <= widest:
            wanted = "" if narrowest == widest else "at most "
            raise ValueError(f"expected {wanted}{values_of(widest)}, found {array.size}")
        if not array.size:  # of which NumPy says that they are floats
            return np.empty(0, column.kind.dtype)
    elif array.shape != column.shape:
        raise ValueError(f"expected shape {list(column.shape)}, found {list(array.shape)}")
    return check_kind(array, column)


def check_object(value: Any, column: TailColumn) -> Any:
    """``value`` as an item of an ObjectExtent, or ValueError or a pyarrow error."""
    if is_hidden(value):
        if not column.nullable:
            raise ValueError("expected a value, found None")
        return None
    refuse_hidden(value)
    if column.kind.kind == "image" and not column.any_bytes:
        item = value if isinstance(value, bytes | Mapping) else encode_png(value, dtype=column.pixel)
        item = item if isinstance(item, Mapping) else {"bytes": item, "path": None}
        check_image(item, column.shape or None, dtype=column.pixel, image_roots=column.image_roots)
        return item if pa.types.is_struct(column.arrow_type) else item["bytes"]
    if column.arrow_type == pa.null():
        raise ValueError(f"expected None, found {value!r}")
    try:
        pa.scalar(value, column.arrow_type)
    except pa.ArrowInvalid as error:
        if "null" not in str(column.arrow_type):
            raise
        raise ValueError(
            f"expected {column.arrow_type}, as the first value has nothing in it, found {value!r:.80}"
        ) from error
    if column.domain is not None:
        _check_object_domain(value, column)
    return value


def _check_object_domain(value: Any, column: TailColumn) -> None:
    """Raise ValueError unless a column's spec allows a value that is kept as an object, or a spec of objects any."""
    spec = column.domain
    given = value if spec.dtype == object else _in_shape(value, spec.shape)
    reason = spec.why_not(given) if spec.dtype == object else spec.why_not_numbers(given)
    if reason is not None and not (column.zeros and not np.any(value)):
        raise ValueError(reason)


def _in_shape(value: Any, shape: tuple[int, ...]) -> Any:
    """A list in the shape of a spec that has as many values; all else as it is."""
    if not isinstance(value, list | tuple | np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of differing lengths
        return value
    return array.reshape(shape) if array.dtype.kind in "biuf" and holds(shape, array.shape) else value


def is_empty(value: Any) -> bool:
    """Whether a value says nothing of what others may be: a null, or a list of nothing else, such as ``[]``."""
    return is_hidden(value) or (isinstance(value, list | tuple) and all(map(is_empty, value)))


def as_array(value: Any) -> npt.NDArray[Any]:
    """An array of any framework, or a sequence, as NumPy's; ValueError or TypeError where it cannot be one."""
    if type(value) is np.ndarray and not is_ml_float(value.dtype):
        return value
    try:
        return to_numpy(widened(value))  # Arrow has no bfloat16 and no 8-bit floats, but all of their values
    except RuntimeError as error:  # a tensor with a gradient, an array that was donated
        raise TypeError(f"expected numbers, found {type(value).__name__}: {error}") from error


def check_kind(array: npt.NDArray[Any], column: TailColumn) -> npt.NDArray[Any]:
    """``array`` if it holds numbers of a kind that the column may take, or TypeError."""
    # Whole numbers may go to float columns, never fractions to integer columns.
    dtype = column.kind.dtype
    if array.dtype.kind == "f" and dtype.kind != "f":
        if not column.whole_floats or not (array == np.floor(array)).all():
            raise TypeError(f"expected {dtype}, found {array.dtype}; a column keeps the dtype of its first value")
    elif array.dtype.kind not in "biuf":
        raise TypeError(f"expected {dtype}, found {array.dtype}")
    return array


def check_scalar(value: Any, column: TailColumn) -> Any:
    """A number that is none of the plain types (a NumPy scalar, a 0-d array) as one."""
    if value is None:
        raise ValueError("expected a value, found None")
    if type(value) is np.bool_:
        return bool(value)
    array = as_array(value)
    if array.shape == (1,) and column.single:
        array = array.reshape(())
    if array.ndim:
        raise ValueError(f"expected a single number, found shape {list(array.shape)}")
    return convert(check_kind(array, column), column.kind.dtype)[()]


def check_values(array: npt.NDArray[Any], column: TailColumn) -> None:
    """Raise RowError if numbers, ``[n, ...]``, are not whole where they must be, or out of bounds."""
    if column.domain is not None:
        _check_domain(array, column)
    if column.whole:
        convert(array, np.dtype(np.int64))
    low, high = column.bounds or ((0, int(np.iinfo(column.pixel.name).max)) if column.image else (-inf, inf))
    if (low, high) != (-inf, inf) and array.size and not (array.min() >= low and array.max() <= high):
        place = int((~((array >= low) & (array <= high))).argmax())
        wanted = column.allowed or f"{low}..{high}"
        raise RowError(place * len(array) // array.size, f"expected {wanted}, found {array.flat[place].item()}")


def _check_domain(array: npt.NDArray[Any], column: TailColumn) -> None:
    """Raise RowError unless rows ``[n, *shape]``, or one of them, have values that the column's spec allows."""
    spec, of_row = column.domain, array.ndim - len(column.shape)
    of_spec: tuple[int, ...] = spec.shape
    shape = array.shape[of_row:]
    fits = shape == of_spec or not holds(of_spec, shape)
    rows = array if fits else array.reshape((*array.shape[:of_row], *of_spec))
    if spec.dtype == object:
        for row, value in enumerate(rows if of_row else rows[None]):
            at_row(row, _check_object_domain, value.tolist(), column)
        return
    try:
        if spec.contains_numbers(rows):
            return
        outside = ~np.atleast_1d(spec.contains_rows(rows))
    except DataError as error:
        raise RowError(0, str(error)) from error
    if outside.any() and column.zeros:
        outside &= array.reshape(len(outside), -1).any(axis=1)
    if outside.any():
        row = int(outside.argmax())
        raise RowError(row, str(spec.why_not_numbers(rows[row] if of_row else rows)))


def holds(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a row of one shape has as many values as of another."""
    return -1 not in shape and prod(shape) == prod(other)


def plain_types(dtype: np.dtype[Any]) -> frozenset[type]:
    """Types whose values a memoryview of ``dtype`` takes as they are, or refuses."""
    if dtype.kind == "b":
        return frozenset([bool, np.bool_])
    types: list[type] = [bool, int, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32]
    if dtype.kind == "f":  # which does not hold all integers of 64 bits; of ``int`` there are limits
        return frozenset([*types, float, np.float16, np.float32, np.float64])
    return frozenset([*types, np.int64, np.uint64])
