"""The base of specs of one array."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

import numpy as np

from mouse_core._base.checks import is_whole
from mouse_core.dtypes import RowError, convert, is_number, named_dtype, number_kind, refuse_hidden, to_numpy
from mouse_core.errors import ConfigError, DataError
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
    operate,
    uniform_value,
)


class Leaf(Domain):
    """A spec of one array: a frozen dataclass with ``shape``, ``dtype`` and ``device``."""

    # Names of attributes that are arrays whose shape begins with the axes of ``shape``.
    _ARRAYS: ClassVar[tuple[str, ...]] = ()

    # --- defined by every kind of leaf ------------------------------------------------------------------------------

    def _outside(self, array: Array) -> Array:
        """Return a mask of the values outside the domain, ``[*batch, *shape]``, or without some of the last axes."""
        raise NotImplementedError

    def _expected(self, place: tuple[int, ...]) -> str:
        """Describe the expected value at a place of a step, for messages."""
        raise NotImplementedError

    def _nearest(self, array: Array) -> Array:
        """Return the nearest values in the domain, in its dtype."""
        raise NotImplementedError

    def _alternatives(self) -> list[Array]:
        """Return the allowed values of each place of a step, place by place."""
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
            ConfigError: A dtype that does not hold the domain.
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
        """Lowest and highest value, if the domain is the same interval at every place; else None."""
        return None

    def contains_numbers(self, values: Any) -> bool:
        """Whether the domain contains all numbers, of any dtype; raises DataError for values that are not numbers."""
        return self._are_inside(self._as_array(values, any_numbers=True))

    def contains_rows(self, values: Any) -> Array:
        """Return which rows are in the domain, for numbers of any dtype: booleans ``[*batch]``.

        Args:
            values: ``[*batch, *shape]``.

        Raises:
            DataError: Values that are not numbers, or another shape.
        """
        return self._fits_by_row(self._as_array(values, any_numbers=True))

    def why_not_numbers(self, values: Any) -> str | None:
        """Return why some number is not in the domain, or None; like ``why_not``, for numbers of any dtype."""
        try:
            return self._why_not(self._as_array(values, any_numbers=True))
        except DataError as error:
            return str(error)

    def project(self, values: Any) -> Any:
        """Return the nearest values in the domain, ``[*batch, *shape]`` in its dtype, for numbers of any dtype.

        Raises:
            DataError: Values that are not numbers, or another shape.
        """
        return self._nearest(self._as_array(values, any_numbers=True))

    def encode(self, values: Any) -> Any:
        """Convert numbers of any dtype to the dtype of the domain.

        Raises:
            DataError: Values outside the domain, or values that its dtype does not hold.
        """
        array = self._converted(self._as_array(values, any_numbers=True))
        self.check(array)
        return array

    def decode(self, values: Any) -> Any:
        """Check that values are in the domain and return them unchanged.

        Raises:
            DataError: A value outside the domain.
        """
        self.check(values)
        return self._as_array(values)

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all values of the domain, ``[cardinality, *shape]``; the last element varies fastest.

        Args:
            most: Highest allowed number of values.

        Raises:
            ConfigError: More than ``most`` values, or infinitely many.
        """
        number = check_most(self, most)
        values = self._alternatives()
        # Of places with 2 and 3 values, step 4 has value 1 at the first place and value 1 at the second.
        places = np.unravel_index(np.arange(number), [len(one) for one in values]) if values else ()
        columns = [one[rows] for one, rows in zip(values, places, strict=True)]
        stacked = np.stack(columns, -1) if columns else np.empty((number, 0))
        return stacked.reshape(number, *self.shape).astype(self.dtype)

    def _as_array(self, values: Any, *, any_numbers: bool = False) -> Array:
        """Return values as an array in the domain's dtype, or in any; raises DataError for another dtype or shape."""
        try:
            array = as_array(values)
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"expected numbers in the host's memory, found {values!r:.80} ({error})") from error
        if not is_number(array.dtype):
            raise DataError(f"expected numbers, {self.dtype}, found {values!r:.80}")
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
        """Return which rows are in the domain, ``[*batch]``."""
        outside = self._outside(array)
        rows = array.ndim - len(self.shape)
        return np.asarray(~outside.any(axis=tuple(range(rows, outside.ndim))))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return all(alike(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        # The first values of arrays suffice. Equal numbers have equal hashes, also 0.0 and -0.0.
        arrays = [getattr(self, name) for name in self._ARRAYS]
        firsts = tuple(tuple(one.flat[:8].tolist()) for one in arrays if isinstance(one, np.ndarray))
        return hash((type(self).__name__, self.shape, str(self.dtype), self.device, firsts))

    def __reduce__(self) -> Any:
        # Through the constructor, as arrays from a pickle would be writable.
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
    """Return a dtype of one of ``kinds`` ("biuf") in native byte order; raises ConfigError for others."""
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
    """Return values as an array for every place of a shape, private to the spec; raises ConfigError for others."""
    array = np.asarray(values)
    if array.flags.writeable and array.ndim:
        array = array.copy()
    try:
        result: Array = np.broadcast_to(array, compact(shape))
    except ValueError as error:
        raise ConfigError(f"{where}: expected values for the shape {shape}, found {array.shape}") from error
    return result


def as_array(values: Any) -> Array:
    """Return values as an array, lists of large integers as uint64.

    NumPy converts ``[0, 2**64 - 1]`` to float64, which does not hold the second number.

    Raises:
        RowError: A mask hides a value, or a value of pyarrow is null.
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
    """Return the checked shape of a leaf; ``most_common`` for None."""
    return most_common if shape is None else check_shape(shape, where=where)


def value_at(array: Array, place: tuple[int, ...]) -> Any:
    """Return the value for a place of a step, from an array of ``spread``."""
    value = array[tuple(min(number, size - 1) for number, size in zip(place, array.shape, strict=False))]
    return value.item() if isinstance(value, np.generic) else value


def check_most(spec: Domain, most: int) -> int:
    """Return the number of values of a domain; raises ConfigError for more than ``most``."""
    number = spec.cardinality
    if isinstance(number, float) or number > most:
        raise ConfigError(f"enumerate: expected at most {most} values, found {number} of {spec!r:.200}")
    return number


def count_product(counts: Array, shape: Shape) -> int | float:
    """Return the product of the numbers of values at each place of a step."""
    if is_dynamic(shape):
        return math.inf
    uniform = uniform_value(counts)
    if uniform is not None:
        product: int = int(uniform) ** math.prod(shape)
        return product
    return math.prod(int(count) for count in np.broadcast_to(counts, shape).flat)


def alike(one: Any, other: Any) -> bool:
    """Whether two attributes have the same type and value."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one is not None and other is not None and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def shown(value: Any) -> str:
    """Format an attribute or a value of data for a message."""
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, np.ndarray):
        uniform = uniform_value(value) if value.ndim else value.item()
        return f"{value.tolist()!r:.120}" if uniform is None else repr(uniform)
    return f"{value.item() if isinstance(value, np.generic) else value!r:.120}"
