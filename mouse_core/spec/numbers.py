"""Specs of numbers: with bounds, without bounds, and zeros and ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.spec.domain import Array, Shape, key_of, limits_of, real_numbers, whole_numbers
from mouse_core.spec.leaf import Leaf, as_array, count_product, leaf_dtype, leaf_shape, set_all, spread, value_at

__all__ = ["Binary", "Bounded", "Unbounded"]

_FEW = 256  # up to this many values, comparing each is faster than finding the lowest and highest


class _Box(Leaf):
    """Numbers with a lowest and a highest value at each place."""

    def _bounds(self) -> tuple[Array, Array]:
        raise NotImplementedError

    @property
    def is_discrete(self) -> bool:
        """Whether values are integers or booleans."""
        return number_kind(self.dtype) != "f"

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step; ``math.inf`` for floats, unless the bounds are equal."""
        low, high = self._bounds()
        if not self.is_discrete:
            return 1 if bool((low == high).all()) else float("inf")
        counts = np.subtract(high.astype(object), low.astype(object)) + 1
        return count_product(np.asarray(counts, dtype=object), self.shape)

    @property
    def limits(self) -> tuple[Any, Any] | None:
        """Lowest and highest value, if the domain is the same interval at every place; else None."""
        low, high = self._bounds()
        return None if any((*low.strides, *high.strides)) or not low.size else (low.flat[0].item(), high.flat[0].item())

    def _outside(self, array: Array) -> Array:
        low, high = self._bounds()
        if array.dtype != self.dtype and number_kind(array.dtype) == "f":
            if self.is_discrete:
                return np.asarray(~((array >= low) & (array <= high) & (array == np.rint(array))))
            # Compare in the less precise dtype: 0.7 in float64 is within a bound of 0.7 in float32.
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
        # Compare before the conversion: a value that does not fit the dtype is beyond a bound.
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
        low: Lowest value, or an array with one for each place; may be infinite.
        high: Highest value, or an array with one for each place; may be infinite.
        shape: Shape of a step; by default the shape of the bounds. A size of -1 is dynamic.
        dtype: Dtype of values; by default the dtype of array bounds, and float32 for Python numbers. Bounds are rounded
            to it.
        device: A label for adapters.

    Raises:
        ConfigError: A bound that is not a number or that an integer dtype does not hold, or ``low`` above ``high``.
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
            raise ConfigError(f"{where}: expected bounds of one shape, found {low.shape} and {high.shape}") from error
        shape = leaf_shape(self.shape, where=where, most_common=both)
        low, high = (_as_bound(one, dtype, where) for one in (low, high))
        if not bool((low <= high).all()):  # before they are spread over the places of an image
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
    """All numbers of a dtype, including NaN and infinities.

    Args:
        shape: Shape of a step; a size of -1 is dynamic.
        dtype: Dtype of values.
        device: A label for adapters.

    Raises:
        ConfigError: An invalid shape or dtype.
    """

    shape: Any = ()
    dtype: Any = np.float32
    device: str | None = None

    def __post_init__(self) -> None:
        dtype = leaf_dtype(self.dtype, "biuf", where="Unbounded")
        set_all(self, shape=leaf_shape(self.shape, where="Unbounded"), dtype=dtype)

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
    """Zeros and ones, as in gymnasium's ``MultiBinary``.

    Args:
        shape: Shape of a step; a size of -1 is dynamic.
        dtype: Dtype of values.
        device: A label for adapters.

    Raises:
        ConfigError: An invalid shape or dtype.
    """

    shape: Any = ()
    dtype: Any = np.bool_
    device: str | None = None

    def __post_init__(self) -> None:
        dtype = leaf_dtype(self.dtype, "biuf", where="Binary")
        set_all(self, shape=leaf_shape(self.shape, where="Binary"), dtype=dtype)

    @property
    def is_discrete(self) -> bool:
        """True, also for a floating dtype, as there are two values."""
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
    """Replace equal bounds by a repeated one, which takes less memory and is compared faster."""
    same = bounds.size > 0 and any(bounds.strides) and bool((bounds == bounds.flat[0]).all())
    return np.broadcast_to(bounds.reshape(-1)[:1].reshape(()), bounds.shape) if same else bounds


def _as_bound(array: Array, dtype: np.dtype[Any], where: str) -> Array:
    """Return a bound in the dtype of values; for an integer dtype, an infinite bound becomes the dtype's limit."""
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
        raise ConfigError(f"{where}: expected bounds that {dtype} holds, found {array.tolist()!r:.80}")
    return np.asarray(whole.astype(dtype))
