"""Specs of one array: numbers, categories as codes or one-hot vectors, objects, and unions of several specs.

``Leaf`` is the base class of these specs. A subclass defines four operations: mark the values outside its domain,
return the nearest value in the domain, draw random values, and list the allowed values of each element.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import RowError, convert, is_number, named_dtype, number_kind, refuse_hidden, to_numpy
from mouse_core.errors import ConfigError, DataError
from mouse_core.randomness import Key
from mouse_core.spec.domain import (
    MOST_VALUES,
    Array,
    Change,
    Domain,
    Shape,
    check_shape,
    compact,
    fits,
    is_dynamic,
    key_of,
    limits_of,
    operate,
    real_numbers,
    uniform_value,
    whole_numbers,
)

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Choice",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Unbounded",
]


class Leaf(Domain):
    """A spec of one array: a frozen dataclass with ``shape``, ``dtype`` and ``device``."""

    # Names of attributes that are arrays whose shape begins with the axes of ``shape``.
    _ARRAYS: ClassVar[tuple[str, ...]] = ()

    # --- defined by every kind of leaf ------------------------------------------------------------------------------

    def _outside(self, array: Array) -> Array:
        """Return a mask of the values outside the domain, ``[*batch, *shape]``. If several elements form one value, the
        mask can lack the axes of these elements.
        """
        raise NotImplementedError

    def _expected(self, place: tuple[int, ...]) -> str:
        """Describe the expected value of an element of a step, for messages."""
        raise NotImplementedError

    def _nearest(self, array: Array) -> Array:
        """Return the nearest values in the domain, in the dtype of the domain."""
        raise NotImplementedError

    def _alternatives(self) -> list[Array]:
        """Return the arrays of allowed values, one array for each element of a step."""
        raise NotImplementedError

    # --- common to all leaves ---------------------------------------------------------------------------------------

    def _filled(self, number: int, batch: Shape) -> Array:
        return np.full((*batch, *self.shape), number, self.dtype)

    def _changed(self, change: Change, *, where: str) -> Self:
        axes = self._axes()
        arrays = {name: getattr(self, name) for name in self._ARRAYS}
        shape, changed = operate(axes, arrays, change, where=where)
        new: Any = dataclasses.replace(self, shape=(*shape, *self.shape[len(axes) :]), **changed)  # type: ignore[type-var]
        return new  # type: ignore[no-any-return]

    def astype(self, dtype: Any) -> Self:
        """Return the same domain with another dtype of values.

        Raises:
            ConfigError: The dtype cannot represent all values of the domain.
        """
        return dataclasses.replace(self, dtype=dtype)  # type: ignore[type-var]

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        try:
            array = self._as_array(values)
        except DataError as error:
            return str(error), None
        return self._why_not(array), array.shape[: array.ndim - len(self.shape)]

    @property
    def limits(self) -> tuple[Any, Any] | None:
        """Lowest and highest value, if every element has the same interval as its domain; else None."""
        return None

    def contains_numbers(self, values: Any) -> bool:
        """Whether all given numbers, of any dtype, are in the domain; raise DataError for values that are not
        numbers.
        """
        return self._are_inside(self._as_array(values, any_numbers=True))

    def contains_rows(self, values: Any) -> Array:
        """Return a mask of the rows in the domain, bool ``[*batch]``, for numbers of any dtype.

        Args:
            values: ``[*batch, *shape]``.

        Raises:
            DataError: The values are not numbers, or have another shape.
        """
        return self._fits_by_row(self._as_array(values, any_numbers=True))

    def why_not_numbers(self, values: Any) -> str | None:
        """Return the reason why a number is not in the domain, or None if all numbers are in the domain. Unlike
        ``why_not``, this method accepts numbers of any dtype.
        """
        try:
            return self._why_not(self._as_array(values, any_numbers=True))
        except DataError as error:
            return str(error)

    def project(self, values: Any) -> Any:
        """Return the values in the domain that are nearest to numbers of any dtype: ``[*batch, *shape]``, in the
        domain's dtype.

        Raises:
            DataError: The values are not numbers, or have another shape.
        """
        return self._nearest(self._as_array(values, any_numbers=True))

    def encode(self, values: Any) -> Any:
        """Convert numbers of any dtype to the dtype of the domain.

        Raises:
            DataError: A value is outside the domain, or the domain's dtype cannot represent it.
        """
        array = self._converted(self._as_array(values, any_numbers=True))
        self.check(array)
        return array

    def decode(self, values: Any) -> Any:
        """Check that values are in the domain and return them unchanged.

        Raises:
            DataError: A value is outside the domain.
        """
        self.check(values)
        return self._as_array(values)

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all values of the domain, ``[cardinality, *shape]``; the last element varies fastest.

        Args:
            most: Highest allowed number of values.

        Raises:
            ConfigError: There are more than ``most`` values, or infinitely many.
        """
        number = check_most(self, most)
        values = self._alternatives()
        # Example: with elements of 2 and 3 values, step 4 has value 1 for the first and value 1 for the second element.
        places = np.unravel_index(np.arange(number), [len(one) for one in values]) if values else ()
        columns = [one[rows] for one, rows in zip(values, places, strict=True)]
        stacked = np.stack(columns, -1) if columns else np.empty((number, 0))
        return stacked.reshape(number, *self.shape).astype(self.dtype)

    def _as_array(self, values: Any, *, any_numbers: bool = False) -> Array:
        """Return values as an array, in the domain's dtype or, if allowed, in any dtype; raise DataError if the values
        do not fit.
        """
        try:
            array = as_array(values)
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"expected numbers in the host's memory, found {values!r:.80} ({error})") from error
        if not is_number(array.dtype):
            raise DataError(f"expected numbers of dtype {self.dtype}, found {values!r:.80}")
        if not any_numbers and array.dtype != self.dtype:
            if hasattr(values, "dtype"):
                raise DataError(f"expected {self.dtype}, found {array.dtype}")
            array = self._converted(array)
        if not fits(array.shape, self.shape):
            raise DataError(f"expected a shape that ends in {self.shape}, found {array.shape}")
        return array

    def _converted(self, array: Array) -> Array:
        try:
            return convert(np.atleast_1d(array), self.dtype).reshape(array.shape)
        except RowError as error:
            raise DataError(str(error)) from error

    def _why_not(self, array: Array) -> str | None:
        outside = self._outside(array)
        if not outside.any():
            return None
        first = tuple(int(number) for number in np.argwhere(outside)[0]) if outside.ndim else ()
        rows = array.ndim - len(self.shape)
        row, place = first[:rows], first[rows:]
        where = f"row {row[0] if len(row) == 1 else row}: " if row else ""
        at = f" at {list(place)}" if place else ""
        return f"{where}expected {self._expected(place)}, found {array[first].tolist()!r:.120}{at}"

    def _are_inside(self, array: Array) -> bool:
        return not self._outside(array).any()

    def _fits_by_row(self, array: Array) -> Array:
        """Return a mask of the rows in the domain, ``[*batch]``."""
        outside = self._outside(array)
        rows = array.ndim - len(self.shape)
        return np.asarray(~outside.any(axis=tuple(range(rows, outside.ndim))))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return all(alike(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        # Only the first values of arrays are hashed. Equal numbers have equal hashes, also 0.0 and -0.0.
        arrays = [getattr(self, name) for name in self._ARRAYS]
        firsts = tuple(tuple(one.flat[:8].tolist()) for one in arrays if isinstance(one, np.ndarray))
        return hash((type(self).__name__, self.shape, str(self.dtype), self.device, firsts))

    def __reduce__(self) -> Any:
        # Created by the constructor, because arrays from a pickle would be writable.
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                parts.append(f"{field.name}={shown(value)}")
        return f"{type(self).__name__}({', '.join(parts)})"


def set_all(spec: Leaf, **values: Any) -> None:
    """Set the checked attributes of a frozen spec in ``__post_init__``."""
    device = getattr(spec, "device", None)
    values["device"] = None if device is None else str(device)
    for name, value in values.items():
        object.__setattr__(spec, name, value)


def leaf_dtype(dtype: Any, kinds: str, *, where: str) -> np.dtype[Any]:
    """Return a dtype of one of ``kinds`` ("biuf") in native byte order; raise ConfigError for other dtypes."""
    try:
        checked = named_dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"{where}: expected a NumPy dtype, found {dtype!r} ({error})") from error
    if number_kind(checked) not in kinds:
        words = {"b": "boolean", "i": "integer", "f": "floating"}
        expected = " or ".join(words[kind] for kind in kinds if kind in words)
        raise ConfigError(f"{where}: expected a {expected} dtype, found {checked}")
    return checked if checked.isnative else checked.newbyteorder("=")


def spread(values: Any, shape: Shape, *, where: str) -> Array:
    """Return values broadcast to ``shape``, as a copy unless the values are read-only; raise ConfigError if the values
    do not fit.
    """
    array = np.asarray(values)
    if array.flags.writeable and array.ndim:
        array = array.copy()
    try:
        result: Array = np.broadcast_to(array, compact(shape))
    except ValueError as error:
        raise ConfigError(
            f"{where}: expected values that broadcast to the shape {shape}, found {array.shape}"
        ) from error
    return result


def as_array(values: Any) -> Array:
    """Return values as an array; lists of large integers become uint64.

    NumPy would convert ``[0, 2**64 - 1]`` to float64, which cannot represent the second number.

    Raises:
        RowError: A value is masked, or a value of pyarrow is null.
    """
    if not isinstance(values, list | tuple):
        return to_numpy(values)
    refuse_hidden(values)
    array = np.asarray(values)
    if array.dtype.kind == "f" and (array >= 2.0**63).any():
        exact = np.asarray(values, object)
        if exact.size and all(is_whole(one) and one >= 0 for one in exact.flat):
            return exact.astype(np.uint64)
    return array


def leaf_shape(shape: Any, *, where: str, most_common: Shape = ()) -> Shape:
    """Check and return the shape of a leaf spec; if the shape is None, return ``most_common``."""
    return most_common if shape is None else check_shape(shape, where=where)


def value_at(array: Array, place: tuple[int, ...]) -> Any:
    """Return the value for an element of a step, from an array that ``spread`` returned."""
    value = array[tuple(min(number, size - 1) for number, size in zip(place, array.shape, strict=False))]
    return value.item() if isinstance(value, np.generic) else value


def check_most(spec: Domain, most: int) -> int:
    """Return the number of values in a domain; raise ConfigError for more than ``most`` values."""
    number = spec.cardinality
    if isinstance(number, float) or number > most:
        raise ConfigError(f"enumerate: expected at most {most} values, found {number} of {spec!r:.200}")
    return number


def count_product(counts: Array, shape: Shape) -> int | float:
    """Return the number of different values of a step: the product over its elements."""
    if is_dynamic(shape):
        return math.inf
    uniform = uniform_value(counts)
    if uniform is not None:
        product: int = int(uniform) ** math.prod(shape)
        return product
    return math.prod(int(count) for count in np.broadcast_to(counts, shape).flat)


def alike(one: Any, other: Any) -> bool:
    """Whether two values of an attribute have the same type and are equal."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one is not None and other is not None and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def shown(value: Any) -> str:
    """Format an attribute of a spec, or a data value, for a message."""
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, np.ndarray):
        uniform = uniform_value(value) if value.ndim else value.item()
        return f"{value.tolist()!r:.120}" if uniform is None else repr(uniform)
    return f"{value.item() if isinstance(value, np.generic) else value!r:.120}"


@dataclass(frozen=True, eq=False, repr=False)
class NonTensor(Leaf):
    """The spec of any objects, such as texts.

    If ``shape`` is ``()``, a value is any object, and a batch is a list or an array of objects. If ``shape`` has
    dimensions, values are arrays of objects.

    Args:
        shape: Shape of a step; a size of -1 is dynamic.
        example: The value that ``sample``, ``zeros`` and ``ones`` return; by default None.
        device: A label for adapters.

    Raises:
        ConfigError: The shape is invalid.
    """

    shape: Any = ()
    example: Any = None
    device: str | None = None

    def __post_init__(self) -> None:
        set_all(self, shape=leaf_shape(self.shape, where="NonTensor"))

    @property
    def dtype(self) -> Any:
        """NumPy's dtype of objects."""
        return np.dtype(object)

    @property
    def cardinality(self) -> int | float:
        """``math.inf``: there are infinitely many objects."""
        return math.inf

    def astype(self, dtype: Any) -> Self:
        """Return the spec unchanged, because objects have no other dtype."""
        return self

    def project(self, values: Any) -> Any:
        """Check the shape of values and return them unchanged; ``encode`` and ``decode`` do the same.

        Raises:
            DataError: The values have another shape.
        """
        self.check(values)
        return values

    encode = project
    decode = project

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Raise ConfigError, because there are infinitely many objects.

        Args:
            most: Highest allowed number of values; has no effect.

        Raises:
            ConfigError: Always.
        """
        return check_most(self, most)

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        try:
            self._as_array(values)
        except DataError as error:
            return str(error), None
        has_batch = self.shape and hasattr(values, "shape")
        return None, tuple(values.shape[: len(values.shape) - len(self.shape)]) if has_batch else None

    def _as_array(self, values: Any, *, any_numbers: bool = False) -> Any:
        if not self.shape:
            return values
        shape = tuple(values.shape) if hasattr(values, "shape") else _nested_sizes(values, len(self.shape))
        if not fits(shape, self.shape):
            raise DataError(f"expected a shape that ends in {self.shape}, found {shape}")
        return values

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        return self._filled(0, batch)

    def _filled(self, number: int, batch: Shape) -> Any:
        shape = (*batch, *self.shape)
        if not shape:
            return self.example
        values = np.empty(shape, object)
        for place in np.ndindex(shape):
            values[place] = self.example
        return values

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.shape, self.device))


def _nested_sizes(values: Any, most: int) -> tuple[int, ...]:
    """Return the sizes of nested lists, at most ``most`` levels deep."""
    sizes: tuple[int, ...] = ()
    while isinstance(values, list | tuple) and len(sizes) < most:
        sizes += (len(values),)
        values = values[0] if values else None
    return sizes


_FEW = 256  # number of values up to which comparing each one is faster than finding the lowest and highest


class _Box(Leaf):
    """Numbers with a lowest and a highest value for each element."""

    def __post_init__(self) -> None:
        where = type(self).__name__
        dtype = leaf_dtype(self.dtype, "biuf", where=where)
        set_all(self, shape=leaf_shape(self.shape, where=where), dtype=dtype)

    def _bounds(self) -> tuple[Array, Array]:
        raise NotImplementedError

    @property
    def is_discrete(self) -> bool:
        """Whether values are integers or booleans."""
        return number_kind(self.dtype) != "f"

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step; ``math.inf`` for floats, unless the lower and the upper bound are
        equal.
        """
        low, high = self._bounds()
        if not self.is_discrete:
            return 1 if bool((low == high).all()) else float("inf")
        counts = np.subtract(high.astype(object), low.astype(object)) + 1
        return count_product(np.asarray(counts, dtype=object), self.shape)

    @property
    def limits(self) -> tuple[Any, Any] | None:
        """Lowest and highest value, if every element has the same interval as its domain; else None."""
        low, high = self._bounds()
        return None if any((*low.strides, *high.strides)) or not low.size else (low.flat[0].item(), high.flat[0].item())

    def _outside(self, array: Array) -> Array:
        low, high = self._bounds()
        if array.dtype != self.dtype and number_kind(array.dtype) == "f":
            if self.is_discrete:
                return np.asarray(~((array >= low) & (array <= high) & (array == np.rint(array))))
            # Compared in the less precise dtype, so that 0.7 in float64 is within a bound of 0.7 in float32.
            with np.errstate(over="ignore"):
                if array.dtype.itemsize > self.dtype.itemsize:
                    array = array.astype(self.dtype)
                else:
                    low, high = low.astype(array.dtype), high.astype(array.dtype)
        return np.asarray(~((array >= low) & (array <= high)))

    def _are_inside(self, array: Array) -> bool:
        if array.size > _FEW and self.limits is not None and not (self.is_discrete and number_kind(array.dtype) == "f"):
            ends = np.array([array.min(), array.max()], array.dtype)  # both are NaN if any value is
            array = ends.reshape(2, *(1,) * len(self.shape))
        return super()._are_inside(array)

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Array:
        low, high = self._bounds()
        shape = (*batch, *self.shape)
        if not self.is_discrete:
            return real_numbers(key_of(key, path), low, high, shape, self.dtype)
        if self.dtype.kind == "b":
            low, high = low.astype(np.uint8), high.astype(np.uint8)
        return whole_numbers(key_of(key, path), low, high, shape).astype(self.dtype)

    def _nearest(self, array: Array) -> Array:
        low, high = self._bounds()
        if array.dtype == self.dtype and self.is_discrete:
            return np.asarray(np.minimum(np.maximum(array, low), high))
        # Compared before the conversion, because a value that does not fit the dtype is beyond a bound.
        wide = np.asarray(array, np.float64) if number_kind(array.dtype) == "f" else array
        if self.is_discrete and wide.dtype.kind == "f":
            wide = np.rint(wide)
        if wide.dtype.kind == "f":
            wide = np.where(np.isnan(wide), 0.0, wide)
        below, above = wide <= low, wide >= high
        inside = np.where(below | above, 0, wide).astype(self.dtype)
        return np.asarray(np.where(below, low, np.where(above, high, inside)).astype(self.dtype))

    def _alternatives(self) -> list[Array]:
        low, high = (np.broadcast_to(one, self.shape).ravel().tolist() for one in self._bounds())
        return [
            np.array([first + step for step in range(int(last - first) + 1)], self.dtype)
            for first, last in zip(low, high, strict=True)
        ]


@dataclass(frozen=True, eq=False, repr=False)
class Bounded(_Box):
    """Numbers between two bounds, both included: floats or integers, depending on ``dtype``.

    Args:
        low: Lowest value, or an array with the lowest value of each element. Infinite values are allowed.
        high: Highest value, or an array with the highest value of each element. Infinite values are allowed.
        shape: Shape of a step; by default the shape of the bounds. A size of -1 is dynamic.
        dtype: Dtype of values; by default the dtype of array bounds, and float32 for Python numbers. Bounds are rounded
            to this dtype.
        device: A label for adapters.

    Raises:
        ConfigError: A bound is not a number, or does not fit an integer dtype, or ``low`` is above ``high``.
    """

    low: Any
    high: Any
    shape: Any = None
    dtype: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("low", "high")

    def __post_init__(self) -> None:
        where = "Bounded"
        low, high = (_as_numbers(value, where) for value in (self.low, self.high))
        dtype: Any = self.dtype
        if dtype is None:
            given = [one.dtype for one in (self.low, self.high) if isinstance(one, np.ndarray | np.generic)]
            dtype = np.result_type(*given) if given else np.float32
        dtype = leaf_dtype(dtype, "biuf", where=where)
        try:
            both = np.broadcast_shapes(low.shape, high.shape)
        except ValueError as error:
            raise ConfigError(
                f"{where}: expected bounds of the same shape, found {low.shape} and {high.shape}"
            ) from error
        shape = leaf_shape(self.shape, where=where, most_common=both)
        low, high = (_as_bound(one, dtype, where) for one in (low, high))
        if not bool((low <= high).all()):  # before they are repeated for all pixels of an image
            raise ConfigError(f"{where}: expected low to be at most high, found {self.low!r:.80} and {self.high!r:.80}")
        low, high = (_compact(spread(one, shape, where=where)) for one in (low, high))
        set_all(self, low=low, high=high, shape=shape, dtype=dtype)

    def _bounds(self) -> tuple[Array, Array]:
        return self.low, self.high

    def _expected(self, place: tuple[int, ...]) -> str:
        low, high = value_at(self.low, place), value_at(self.high, place)
        return (
            f"a whole number from {int(low)} to {int(high)}" if self.is_discrete else f"a number from {low} to {high}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Unbounded(_Box):
    """The spec of all numbers of a dtype, including NaN and infinities.

    Args:
        shape: Shape of a step; a size of -1 is dynamic.
        dtype: Dtype of values.
        device: A label for adapters.

    Raises:
        ConfigError: The shape or dtype is invalid.
    """

    shape: Any = ()
    dtype: Any = np.float32
    device: str | None = None

    def _bounds(self) -> tuple[Array, Array]:
        low, high = limits_of(self.dtype)
        dtype = self.dtype if self.is_discrete else np.float64  # some 8-bit floats have no infinity
        return np.array(low, dtype), np.array(high, dtype)

    def _outside(self, array: Array) -> Array:
        if not self.is_discrete or array.dtype == self.dtype:
            return np.zeros(array.shape[: array.ndim - len(self.shape)], bool)
        return super()._outside(array)

    def _are_inside(self, array: Array) -> bool:
        return not self.is_discrete or array.dtype == self.dtype or super()._are_inside(array)

    def _expected(self, place: tuple[int, ...]) -> str:
        return "a whole number from {:d} to {:d}".format(*limits_of(self.dtype))

    def _nearest(self, array: Array) -> Array:
        if array.dtype == self.dtype:
            return array
        if not self.is_discrete:
            with np.errstate(over="ignore"):
                return np.asarray(array.astype(self.dtype))
        return super()._nearest(array)


@dataclass(frozen=True, eq=False, repr=False)
class Binary(_Box):
    """The spec of zeros and ones, as in gymnasium's ``MultiBinary``.

    Args:
        shape: Shape of a step; a size of -1 is dynamic.
        dtype: Dtype of values.
        device: A label for adapters.

    Raises:
        ConfigError: The shape or dtype is invalid.
    """

    shape: Any = ()
    dtype: Any = np.bool_
    device: str | None = None

    @property
    def is_discrete(self) -> bool:
        """True, even for a floating dtype, because 0 and 1 are the only values."""
        return True

    def _bounds(self) -> tuple[Array, Array]:
        return np.array(0, np.uint8), np.array(1, np.uint8)

    def _outside(self, array: Array) -> Array:
        return np.asarray((array != 0) & (array != 1))

    def _nearest(self, array: Array) -> Array:
        return np.asarray((array > 0.5).astype(self.dtype))

    def _expected(self, place: tuple[int, ...]) -> str:
        return "0 or 1"


def _as_numbers(value: Any, where: str) -> Array:
    try:
        array = as_array(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{where}: expected bounds as numbers, found {value!r:.80}") from error
    if number_kind(array.dtype) not in "biuf":
        raise ConfigError(f"{where}: expected bounds as numbers, found {value!r:.80}")
    if number_kind(array.dtype) == "f" and bool(np.isnan(array.astype(np.float64)).any()):
        raise ConfigError(f"{where}: expected bounds as numbers, found NaN in {value!r:.80}")
    return array


def _compact(bounds: Array) -> Array:
    """If all elements have the same bound, store the bound only once; this takes less memory, and bounds are compared
    faster.
    """
    same = bounds.size > 0 and any(bounds.strides) and bool((bounds == bounds.flat[0]).all())
    return np.broadcast_to(bounds.reshape(-1)[:1].reshape(()), bounds.shape) if same else bounds


def _as_bound(array: Array, dtype: np.dtype[Any], where: str) -> Array:
    """Return a bound in the dtype of values. For an integer dtype, an infinite bound becomes the lowest or highest
    number of the dtype.
    """
    if number_kind(dtype) == "f":
        with np.errstate(over="ignore"):
            return np.asarray(array.astype(dtype))
    lowest, highest = limits_of(dtype)
    if array.dtype.kind == "f":
        infinite = np.isinf(array)
        if bool((array[~infinite] != np.rint(array[~infinite])).any()):
            raise ConfigError(f"{where}: expected whole numbers as bounds of {dtype}, found {array.tolist()!r:.80}")
        whole = np.where(infinite, 0, array).astype(object)
        whole = np.array([int(one) for one in whole.ravel()], object).reshape(array.shape)
        whole = np.where(infinite, np.where(array > 0, highest, lowest), whole)
    else:
        whole = array.astype(object)
    if bool(((whole < lowest) | (whole > highest)).any()):
        raise ConfigError(f"{where}: expected bounds that {dtype} can represent, found {array.tolist()!r:.80}")
    return np.asarray(whole.astype(dtype))


class _Categories(Leaf):
    """Base class of specs of categories; a mask can exclude categories."""

    mask: Any
    nvec: Any

    def with_mask(self, mask: Any) -> Self:
        """Return the spec with another mask.

        Args:
            mask: The mask, as in the constructor; None allows all codes.

        Raises:
            ConfigError: The mask has another shape, or an element has no allowed code.
        """
        return replace(self, mask=mask)  # type: ignore[type-var]


class _Codes(_Categories):
    """Base class of specs in which each element is a code, counted from 0."""

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step: the product over its elements."""
        counts = self.nvec if self.mask is None else self.mask.sum(-1)
        return count_product(np.asarray(counts), self.shape)

    @property
    def limits(self) -> tuple[Any, Any] | None:
        """Lowest and highest code; None if there is a mask, or if elements have different numbers of codes."""
        same = uniform_value(self.nvec) if self.mask is None else None
        return None if same is None else (0, same - 1)

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Array:
        shape = (*batch, *self.shape)
        counts = np.asarray(self.nvec if self.mask is None else self.mask.sum(-1), np.int64)
        drawn = whole_numbers(key_of(key, path), np.zeros_like(counts), counts - 1, shape)
        return (drawn if self.mask is None else _code_of_rank(self.mask, drawn)).astype(self.dtype)

    def _outside(self, array: Array) -> Array:
        outside = (array < 0) | (array >= self.nvec)
        if number_kind(array.dtype) == "f":
            outside |= array != np.rint(array)
        return np.asarray(outside if self.mask is None else outside | ~_allowed(self.mask, array))

    def _nearest(self, array: Array) -> Array:
        codes = np.rint(array) if array.dtype.kind == "f" else array
        codes = np.nan_to_num(codes) if codes.dtype.kind == "f" else codes
        codes = np.minimum(np.maximum(codes, 0), self.nvec - 1).astype(np.int64)
        return (codes if self.mask is None else _nearest_code(self.mask, codes)).astype(self.dtype)

    def _expected(self, place: tuple[int, ...]) -> str:
        if self.mask is None:
            return f"a code from 0 to {value_at(self.nvec, place) - 1}"
        return f"one of the codes {shown(np.flatnonzero(value_at(self.mask, place)))}"

    def _alternatives(self) -> list[Array]:
        if self.mask is None:
            return [np.arange(number) for number in np.broadcast_to(self.nvec, self.shape).flat]
        masks = np.broadcast_to(self.mask, (*self.shape, self.mask.shape[-1]))
        return [np.flatnonzero(one) for one in masks.reshape(-1, masks.shape[-1])]


@dataclass(frozen=True, eq=False, repr=False)
class Categorical(_Codes):
    """The spec of codes from 0 to ``n - 1``, as in gymnasium's ``Discrete``.

    Args:
        n: Number of codes.
        shape: Shape of a step, in which each element is a code; a size of -1 is dynamic.
        dtype: Dtype of codes: an integer dtype, or booleans for two codes.
        mask: Mask of allowed codes, bool ``[*shape, n]``, or ``[n]`` for all elements; by default all codes.
        device: A label for adapters.

    Raises:
        ConfigError: A number, shape or dtype is invalid, or an element has no allowed code.
    """

    n: int
    shape: Any = ()
    dtype: Any = np.int64
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        n = _check_n(self.n, "Categorical")
        shape = leaf_shape(self.shape, where="Categorical")
        dtype = _code_dtype(self.dtype, n, "Categorical")
        set_all(self, n=n, shape=shape, dtype=dtype, mask=_check_mask(self.mask, (*shape, n), "Categorical"))

    @property
    def nvec(self) -> Any:
        """Number of codes, as an array."""
        return np.array(self.n, np.int64)

    def one_hot(self, dtype: Any = np.bool_) -> OneHot:
        """Return the spec of the same categories, represented as one-hot vectors ``[*shape, n]``."""
        return OneHot(self.n, (*self.shape, self.n), dtype, self.mask, self.device)


@dataclass(frozen=True, eq=False, repr=False)
class MultiCategorical(_Codes):
    """The spec of vectors of codes, as in gymnasium's ``MultiDiscrete``; each element of the vector has its own number
    of codes.

    Args:
        nvec: Number of codes of each element. If ``shape`` has more leading dimensions than ``nvec``, ``nvec`` is
            repeated along them.
        shape: Shape of a step; by default the shape of ``nvec``. A size of -1 is dynamic.
        dtype: Dtype of codes: an integer dtype.
        mask: Mask of allowed codes, bool ``[*shape[:-1], sum(nvec)]``, concatenated over the last axis of ``shape``; or
            ``[*shape, max(nvec)]``, like the attribute ``mask``. By default all codes are allowed.
        device: A label for adapters.

    Raises:
        ConfigError: A number, shape or dtype is invalid, or an element has no allowed code.
    """

    nvec: Any
    shape: Any = None
    dtype: Any = np.int64
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("nvec", "mask")

    def __post_init__(self) -> None:
        where = "MultiCategorical"
        numbers = _check_nvec(self.nvec, where)
        shape = leaf_shape(self.shape, where=where, most_common=numbers.shape)
        nvec = spread(numbers, shape, where=where)
        most = int(nvec.max()) if nvec.size else 1
        dtype = _code_dtype(self.dtype, most, where)
        mask = self.mask
        if mask is not None:
            mask = _padded_mask(_as_booleans(mask, where), nvec, most, where=where)
            mask = _check_mask(mask, (*shape, most), where)
        set_all(self, nvec=nvec, shape=shape, dtype=dtype, mask=mask)

    def one_hot(self, dtype: Any = np.bool_) -> MultiOneHot:
        """Return the spec of the same categories, represented as concatenated one-hot vectors ``[*shape[:-1],
        sum(nvec)]``.

        Raises:
            ConfigError: The numbers of codes differ between rows of ``nvec``.
        """
        rows = self.nvec.reshape(-1, self.nvec.shape[-1]) if self.nvec.ndim else self.nvec.reshape(1, 0)
        if not rows.size or not bool((rows == rows[0]).all()):
            raise ConfigError(f"one_hot: expected equal nvec in every row, found {shown(self.nvec)}")
        numbers = tuple(rows[0].tolist())
        mask = self.mask
        if mask is not None:
            mask = np.concatenate([mask[..., place, :n] for place, n in enumerate(numbers)], -1)
        return MultiOneHot(numbers, (*self.shape[:-1], sum(numbers)), dtype, mask, self.device)


class _Hot(_Categories):
    """Base class of specs of concatenated one-hot vectors; vector k has ``nvec[k]`` values."""

    def categorical(self) -> Any:
        """Return the spec of the same categories, represented as codes."""
        raise NotImplementedError

    def _hot(self, codes: Array) -> Array:
        """Convert codes of ``categorical``, ``[..., k]``, to vectors ``[..., sum(nvec)]``."""
        begins = np.concatenate([[0], np.cumsum(self.nvec)[:-1]]).astype(np.int64)
        hot = np.zeros((*codes.shape[:-1], sum(self.nvec)), self.dtype)
        np.put_along_axis(hot, codes.astype(np.int64) + begins, 1, -1)
        return hot

    def _codes(self, hot: Array) -> Array:
        """Convert vectors to codes of ``categorical``."""
        return np.stack([part.argmax(-1) for part in np.split(hot, np.cumsum(self.nvec)[:-1], -1)], -1)

    def _axes(self) -> Shape:
        return self.shape[:-1]

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step."""
        number: int | float = self.categorical().cardinality
        return number

    def encode(self, values: Any) -> Any:
        """Convert codes to one-hot vectors.

        Args:
            values: Codes of ``categorical()``, of any integer dtype.

        Raises:
            DataError: A code is outside the domain.
        """
        return self._hot(self.categorical().encode(values))

    def decode(self, values: Any) -> Any:
        """Convert one-hot vectors to codes, in int64.

        Raises:
            DataError: A vector is outside the domain.
        """
        self.check(values)
        return self._codes(self._as_array(values))

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all values of the domain, ``[cardinality, *shape]``, in the order of their codes.

        Args:
            most: Highest allowed number of values.

        Raises:
            ConfigError: There are more than ``most`` values, or infinitely many.
        """
        check_most(self, most)
        return self._hot(self.categorical().enumerate(most=most))

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Array:
        return self._hot(self.categorical()._draw(key, path, batch))

    def _outside(self, array: Array) -> Array:
        hot = array != 0
        outside = ((array != 0) & (array != 1)).any(-1)
        begin = 0
        for number in self.nvec:
            outside |= hot[..., begin : begin + number].sum(-1) != 1
            begin += number
        return np.asarray(outside if self.mask is None else outside | (hot & ~self.mask).any(-1))

    def _nearest(self, array: Array) -> Array:
        inside = ~self._outside(array)
        values = np.nan_to_num(array.astype(np.float64), posinf=np.finfo(np.float64).max)
        if self.mask is not None:
            values = np.where(self.mask, values, -np.inf)
        return np.where(inside[..., None], array, self._hot(self._codes(values))).astype(self.dtype)

    def _expected(self, place: tuple[int, ...]) -> str:
        numbers = list(self.nvec)
        one = f"one 1 among {numbers[0]} zeros" if len(numbers) == 1 else f"one 1 in each part, {numbers}"
        if self.mask is not None:
            one += f", where the mask {shown(np.asarray(value_at(self.mask, place)))} is true"
        return one


@dataclass(frozen=True, eq=False, repr=False)
class OneHot(_Hot):
    """The spec of one-hot vectors: one of ``n`` values is 1, and all others are 0.

    Args:
        n: Number of values of a vector.
        shape: Shape of a step, ``[..., n]``; by default ``[n]``. A size of -1 before the last axis is dynamic.
        dtype: Dtype of values.
        mask: Mask of the values that may be 1, bool of ``shape``, or ``[n]`` for all vectors; by default all values.
        device: A label for adapters.

    Raises:
        ConfigError: A number, shape or dtype is invalid, or a vector has no value that may be 1.
    """

    n: int
    shape: Any = None
    dtype: Any = np.bool_
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        n = _check_n(self.n, "OneHot")
        shape = _hot_shape(self.shape, n, "OneHot")
        dtype = leaf_dtype(self.dtype, "biuf", where="OneHot")
        set_all(self, n=n, shape=shape, dtype=dtype, mask=_check_mask(self.mask, shape, "OneHot"))

    @property
    def nvec(self) -> Any:
        """Number of values of the vector, as a tuple of one number; see ``MultiOneHot``."""
        return (self.n,)

    def categorical(self, dtype: Any = np.int64) -> Categorical:
        """Return the spec of the same categories, represented as codes of shape ``shape[:-1]``."""
        return Categorical(self.n, self.shape[:-1], dtype, self.mask, self.device)

    def _hot(self, codes: Array) -> Array:
        return super()._hot(codes[..., None])

    def _codes(self, hot: Array) -> Array:
        return np.asarray(hot.argmax(-1))


@dataclass(frozen=True, eq=False, repr=False)
class MultiOneHot(_Hot):
    """The spec of concatenated one-hot vectors.

    Args:
        nvec: Number of values of each one-hot vector.
        shape: Shape of a step, ``[..., sum(nvec)]``; by default ``[sum(nvec)]``. A size of -1 before the last axis is
            dynamic.
        dtype: Dtype of values.
        mask: Mask of the values that may be 1, bool of ``shape``, or ``[sum(nvec)]`` for all vectors; by default all
            values.
        device: A label for adapters.

    Raises:
        ConfigError: A number, shape or dtype is invalid, or a one-hot vector has no value that may be 1.
    """

    nvec: Any
    shape: Any = None
    dtype: Any = np.bool_
    mask: Any = None
    device: str | None = None

    _ARRAYS: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        where = "MultiOneHot"
        numbers = _check_nvec(self.nvec, where)
        if numbers.ndim != 1 or not numbers.size:
            raise ConfigError(f"{where}: expected nvec as a list of numbers, found {self.nvec!r:.80}")
        nvec = tuple(numbers.tolist())
        shape = _hot_shape(self.shape, sum(nvec), where)
        dtype = leaf_dtype(self.dtype, "biuf", where=where)
        set_all(self, nvec=nvec, shape=shape, dtype=dtype, mask=_check_mask(self.mask, shape, where))
        if self.mask is not None:
            self.categorical()  # raises ConfigError if a vector has no value that may be 1

    def categorical(self, dtype: Any = np.int64) -> MultiCategorical:
        """Return the spec of the same categories, represented as codes of shape ``[*shape[:-1], len(nvec)]``."""
        shape = (*self.shape[:-1], len(self.nvec))
        return MultiCategorical(np.array(self.nvec), shape, dtype, self.mask, self.device)


# --- codes and masks as arrays ----------------------------------------------------------------------------------------


def _allowed(mask: Array, codes: Array) -> Array:
    """Return a mask of the codes that ``mask``, ``[..., n]``, allows; codes outside ``0..n - 1`` are not allowed."""
    n = mask.shape[-1]
    inside = (codes >= 0) & (codes < n)
    numbers = np.where(inside, codes, 0).astype(np.int64)
    whole = np.broadcast_to(mask, (*numbers.shape, n))
    return np.asarray(np.take_along_axis(whole, numbers[..., None], -1)[..., 0] & inside)


def _code_of_rank(mask: Array, ranks: Array) -> Array:
    """Return the allowed code with a given rank (from 0) among the allowed codes: with the mask ``[False, True,
    True]``, rank 1 is code 2."""
    return np.asarray((mask.cumsum(-1) > ranks[..., None]).argmax(-1))


def _nearest_code(mask: Array, codes: Array) -> Array:
    """Return the nearest allowed code for each code; if two allowed codes are equally near, return the lower code."""
    n = mask.shape[-1]
    numbers = np.arange(n)
    before = np.maximum.accumulate(np.where(mask, numbers, -2 * n), -1)
    after = np.minimum.accumulate(np.where(mask, numbers, 3 * n)[..., ::-1], -1)[..., ::-1]
    nearest = np.where(numbers - before <= after - numbers, before, after)
    whole = np.broadcast_to(nearest, (*codes.shape, n))
    return np.asarray(np.take_along_axis(whole, codes[..., None], -1)[..., 0])


def _padded_mask(mask: Array, nvec: Array, most: int, *, where: str) -> Array:
    """Convert a mask ``[..., sum(nvec)]`` to shape ``[..., k, most]``. In a mask that has this shape already, only the
    entries beyond the number of codes are set to False.
    """
    if mask.ndim > 1 and mask.shape[-2:] == (*nvec.shape[-1:], most):
        return mask & (np.arange(most) < nvec[..., None])
    rows = nvec.reshape(-1, nvec.shape[-1]) if nvec.ndim else nvec.reshape(1, 1)
    if not bool((rows == rows[0]).all()) or mask.shape[-1] != rows[0].sum():
        raise ConfigError(
            f"{where}: expected a mask of {int(rows[0].sum())} booleans, or of {most} booleans for each code, "
            f"found {mask.shape}"
        )
    padded = np.zeros((*mask.shape[:-1], rows.shape[1], most), bool)
    begin = 0
    for place, number in enumerate(rows[0]):
        padded[..., place, :number] = mask[..., begin : begin + number]
        begin += number
    return padded if nvec.ndim else padded[..., 0, :]


def _check_n(n: Any, where: str) -> int:
    """Return the number of codes; raise ConfigError unless it is an integer of at least 1."""
    if not is_whole(n) or n < 1:
        raise ConfigError(f"{where}: expected n as an integer of at least 1, found {n!r:.80}")
    return int(n)


def _check_nvec(nvec: Any, where: str) -> Array:
    """Return ``nvec`` as an array; raise ConfigError unless all its values are integers of at least 1."""
    try:
        numbers = np.asarray(nvec)
    except ValueError as error:
        raise ConfigError(f"{where}: expected nvec as integers of at least 1, found {nvec!r:.80}") from error
    if numbers.dtype.kind not in "iu" or bool((numbers < 1).any()):
        raise ConfigError(f"{where}: expected nvec as integers of at least 1, found {nvec!r:.80}")
    return numbers.astype(np.int64)


def _code_dtype(dtype: Any, most: int, where: str) -> np.dtype[Any]:
    """Return a dtype; raise ConfigError unless it can represent ``most`` codes."""
    checked = leaf_dtype(dtype, "biu", where=where)
    highest = 1 if checked.kind == "b" else int(np.iinfo(checked).max)
    if most - 1 > highest:
        raise ConfigError(f"{where}: expected a dtype that can represent {most - 1}, found {checked}")
    return checked


def _hot_shape(shape: Any, n: int, where: str) -> Shape:
    """Return a shape; raise ConfigError unless its last size is the number of codes."""
    checked = leaf_shape(shape, where=where, most_common=(n,))
    if not checked or checked[-1] != n:
        raise ConfigError(f"{where}: expected a shape that ends in {n}, found {checked}")
    return checked


def _as_booleans(mask: Any, where: str) -> Array:
    """Return a mask as an array; raise ConfigError unless it has booleans."""
    array = np.asarray(mask)
    if array.dtype.kind != "b" or not array.ndim:
        raise ConfigError(f"{where}: expected a mask of booleans, found {mask!r:.80}")
    return array


def _check_mask(mask: Any, shape: Shape, where: str) -> Array | None:
    """Return a mask for every element, or None if ``mask`` is None or there are no elements; raise ConfigError if an
    element has no allowed code.
    """
    if mask is None:
        return None
    array = spread(_as_booleans(mask, where), shape, where=f"{where}: mask")
    if not bool(array.any(-1).all()):
        raise ConfigError(f"{where}: expected a mask that allows a choice at every position, found {shown(array)}")
    return array if array.size else None


@dataclass(frozen=True, eq=False, repr=False)
class Choice(Leaf):
    """The union of several specs: the value of each row is in at least one of the specs.

    A ``NonTensor`` in ``choices`` allows only one value: its example.

    Args:
        choices: One or more specs, each of one array. All specs must have the same shape and dtype.
        device: A label for adapters.

    Raises:
        ConfigError: There is no spec, an object is not a spec of one array, or specs have different shapes or dtypes.
    """

    choices: Any
    device: str | None = None

    def __post_init__(self) -> None:
        choices = self.choices
        if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
            raise ConfigError(f"Choice: expected a list of specs, found {choices!r:.80}")
        for one in choices:
            if not isinstance(one, Leaf):
                raise ConfigError(f"Choice: expected specs of one array, found {one!r:.80}")
            if one.shape != choices[0].shape or one.dtype != choices[0].dtype:
                raise ConfigError(
                    f"Choice: expected specs of {choices[0].dtype} and the shape {choices[0].shape}, found {one!r:.80}"
                )
        set_all(self, choices=tuple(choices))

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        """The shape of a step."""
        shape: Shape = self.choices[0].shape
        return shape

    @property
    def dtype(self) -> Any:
        """The dtype of values."""
        return self.choices[0].dtype

    @property
    def cardinality(self) -> int | float:
        """Number of values of all choices; a value that several choices contain is counted once for each of these
        choices.
        """
        return sum(1 if isinstance(one, NonTensor) else one.cardinality for one in self.choices)

    def astype(self, dtype: Any) -> Self:
        """Return the same choices with another dtype of values.

        Raises:
            ConfigError: The dtype cannot represent all values of a choice.
        """
        return replace(self, choices=tuple(one.astype(dtype) for one in self.choices))

    def to(self, device: object) -> Self:
        """Return the spec with another device: a label for adapters."""
        return replace(super().to(device), choices=tuple(one.to(device) for one in self.choices))

    def project(self, values: Any) -> Any:
        """Return, for each row, the nearest value in any of the choices; a value that is in a choice is returned
        unchanged.

        Raises:
            DataError: The values have another kind or shape than the choices, or an object equals none of the choices.
        """
        if self._is_of_objects:
            self.check(values)
            return values
        array = self.choices[0]._as_array(values, any_numbers=True)
        axes = tuple(range(array.ndim - len(self.shape), array.ndim))
        nearest = [one._nearest(array) for one in self.choices]
        distances = np.stack([np.abs(one.astype(np.float64) - array.astype(np.float64)).sum(axes) for one in nearest])
        return self._picked(np.nan_to_num(distances).argmin(0), nearest)

    def encode(self, values: Any) -> Any:
        """Check that each row is in at least one choice, and return the values unchanged; ``decode`` does the same.

        Raises:
            DataError: A value is in no choice.
        """
        self.check(values)
        return values if self._is_of_objects else self.choices[0]._as_array(values)

    decode = encode

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all values of the first choice, then all values of the second choice, and so on.

        Args:
            most: Highest allowed number of values.

        Raises:
            ConfigError: There are more than ``most`` values, or infinitely many.
        """
        check_most(self, most)
        parts = [one._filled(0, (1,)) if isinstance(one, NonTensor) else one.enumerate() for one in self.choices]
        return np.concatenate(parts)

    @property
    def _is_of_objects(self) -> bool:
        return bool(self.dtype == object)

    def _numbers(self, values: Any) -> Array:
        """Return the index of each row's choice; raise DataError for a row that no choice contains."""
        if self._is_of_objects:
            numbers = self._numbers_of_objects(values)
        else:
            array = self.choices[0]._as_array(values, any_numbers=True)
            inside = np.stack([one._fits_by_row(array) for one in self.choices])
            numbers = np.where(inside.any(0), inside.argmax(0), -1)
        if (numbers < 0).any():
            row = np.argwhere(numbers < 0)[0].tolist() if numbers.ndim else []
            where = f"row {row[0] if len(row) == 1 else tuple(row)}: " if row else ""
            value = np.asarray(values, self.dtype)[tuple(row)]
            raise DataError(f"{where}expected one of {list(self.choices)!r:.200}, found {shown(value)}")
        return numbers

    def _numbers_of_objects(self, values: Any) -> Array:
        examples = [one.example for one in self.choices]
        is_batch = isinstance(values, list) or (isinstance(values, np.ndarray) and values.ndim > 0)
        items = list(np.asarray(values, object).flat) if is_batch else [values]
        numbers = [next((k for k, one in enumerate(examples) if alike(one, item)), -1) for item in items]
        return np.array(numbers, np.int64).reshape(np.shape(values) if is_batch else ())

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        try:
            numbers = self._numbers(values if self._is_of_objects else self.choices[0]._as_array(values))
        except DataError as error:
            return str(error), None
        return None, None if self._is_of_objects else numbers.shape

    def _why_not(self, array: Array) -> str | None:
        try:
            self._numbers(array)
        except DataError as error:
            return str(error)
        return None

    def _as_array(self, values: Any, *, any_numbers: bool = False) -> Any:
        return self.choices[0]._as_array(values, any_numbers=any_numbers)

    def _fits_by_row(self, array: Array) -> Array:
        return np.asarray(np.stack([one._fits_by_row(array) for one in self.choices]).any(0))

    def _outside(self, array: Array) -> Array:
        return ~self._fits_by_row(array)

    def _nearest(self, array: Array) -> Array:
        projected: Array = self.project(array)
        return projected

    def _picked(self, numbers: Array, alternatives: list[Array]) -> Array:
        """Return an array whose row r is row r of ``alternatives[numbers[r]]``."""
        picked = np.zeros_like(alternatives[0])
        for number, values in enumerate(alternatives):
            chosen = (numbers == number).reshape(numbers.shape + (1,) * (picked.ndim - numbers.ndim))
            picked = np.where(chosen, values, picked)
        return picked.astype(self.dtype)

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        most = np.array(len(self.choices) - 1)
        numbers = whole_numbers(key_of(key, (*path, "choice")), np.zeros_like(most), most, batch)
        drawn = [one._draw(key, (*path, number), batch) for number, one in enumerate(self.choices)]
        return drawn[int(numbers)] if not batch else self._picked(numbers, drawn)

    def _filled(self, number: int, batch: Shape) -> Any:
        return self.choices[0]._filled(number, batch)

    def _changed(self, change: Change, *, where: str) -> Self:
        if len({one._axes() for one in self.choices}) > 1:
            raise ConfigError(f"{where}: expected choices with the same axes, found {self!r:.200}")
        return replace(self, choices=tuple(one._changed(change, where=where) for one in self.choices))

    def _axes(self) -> Shape:
        axes: Shape = self.choices[0]._axes()
        return axes

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.choices, self.device))
