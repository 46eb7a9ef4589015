"""The base class of all specs of values; operations on shapes; and random draws.

A spec describes the set of values that one step can have, its domain. All operations on axes (``reshape``, indexing,
...) are implemented as a ``Change``: a function that reshapes, indexes or repeats the first ``ndim`` axes of an array
and keeps all later axes. ``operate`` applies a change to a shape and to the arrays of a spec, such as bounds and masks.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import as_json, is_whole
from mouse_core.dtypes import number_kind
from mouse_core.errors import ConfigError, DataError, SpecIndexError
from mouse_core.randomness import Key, Purpose, as_exponential, as_normal, check_seed

Shape = tuple[int, ...]
Array = npt.NDArray[Any]
Change = Callable[[Array, int], Array]
"""An operation on the first axes of an array: ``change(array, ndim)``."""


def check_shape(shape: Any, *, where: str, dynamic: bool = True) -> Shape:
    """Return a shape as a tuple of sizes, in which -1 stands for a dynamic dimension; raise ConfigError for invalid
    shapes."""
    sizes = (shape,) if is_whole(shape) else shape
    if not isinstance(sizes, str | bytes):
        try:
            sizes = tuple(sizes)
        except TypeError:
            sizes = (None,)
        if all(is_whole(size) and size >= (-1 if dynamic else 0) for size in sizes):
            return tuple(int(size) for size in sizes)
    expected = "sizes of at least 0, or -1 for a dynamic dimension" if dynamic else "sizes of at least 0"
    raise ConfigError(f"{where}: expected a shape of {expected}, found {shape!r:.80}")


def is_dynamic(shape: Shape) -> bool:
    """Whether a dimension is dynamic."""
    return -1 in shape


def fits(array_shape: Shape, shape: Shape) -> bool:
    """Whether ``array_shape`` ends with ``shape``, where a dynamic dimension matches any size."""
    ending = array_shape[len(array_shape) - len(shape) :] if len(array_shape) >= len(shape) else None
    return ending is not None and all(expected in (-1, size) for size, expected in zip(ending, shape, strict=True))


def compact(shape: Shape) -> Shape:
    """Return the shape of a spec's arrays, such as bounds: size 1 along dynamic dimensions."""
    return tuple(1 if size == -1 else size for size in shape)


def operate(
    shape: Shape, arrays: Mapping[str, Array | None], change: Change, *, where: str
) -> tuple[Shape, dict[str, Array | None]]:
    """Apply a change to a shape, and to arrays whose shapes begin with this shape (size 1 along dynamic dimensions).

    During the change, each dynamic dimension has a temporary size that no other dimension has, for example 1009. In the
    result, the dimension of this size becomes dynamic again. Example: to add an axis to (-1, 3), the change is applied
    to (1009, 3) and gives (1, 1009, 3), so the result is (1, -1, 3).

    Raises:
        ConfigError: The shape does not allow the change.
    """
    stand_in = next(size for size in count(1009) if size not in shape)
    sizes = tuple(stand_in if size == -1 else size for size in shape)
    try:
        with_stand_in = change(np.broadcast_to(np.int8(0), sizes), len(sizes)).shape
        changed = {
            name: None if one is None else change(np.broadcast_to(one, (*sizes, *one.shape[len(sizes) :])), len(sizes))
            for name, one in arrays.items()
        }
    except (ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"{where}: {error}, for the shape {shape}") from error
    dynamic = is_dynamic(shape)
    result = tuple(-1 if dynamic and size == stand_in else size for size in with_stand_in)
    one_value = tuple(slice(0, 1) if size == -1 else slice(None) for size in result)
    return result, {name: None if one is None else one[one_value] for name, one in changed.items()}


def reshaped(shape: Shape, to: Any) -> Change:
    """Return the change that reshapes an array. A single size of -1 is inferred; if the shape is dynamic, each -1 is a
    dynamic dimension.
    """
    target = check_shape(to, where="reshape")
    if not is_dynamic(shape):
        return lambda array, ndim: array.reshape(_inferred(array.shape[:ndim], target) + array.shape[ndim:])
    if sorted(size for size in shape if size == -1) != sorted(size for size in target if size == -1):
        raise ConfigError(f"reshape: expected as many dynamic dimensions (-1) as in {shape}, found {target}")

    def change(array: Array, ndim: int) -> Array:
        dynamic = next(size for size, declared in zip(array.shape, shape, strict=False) if declared == -1)
        return array.reshape(tuple(dynamic if size == -1 else size for size in target) + array.shape[ndim:])

    return change


def _inferred(sizes: Shape, target: Shape) -> Shape:
    """Return the target shape, in which the inferred size replaces -1."""
    if target.count(-1) != 1:
        return target
    others = math.prod(size for size in target if size != -1)
    if not others or math.prod(sizes) % others:
        raise ValueError(f"expected {math.prod(sizes)} values, found {target}, whose sizes do not divide this number")
    return tuple(math.prod(sizes) // others if size == -1 else size for size in target)


def squeezed(shape: Shape, axis: int | None) -> Change:
    """Return the change that removes a dimension of size 1, or all dimensions of size 1."""
    if axis is None:
        axes = tuple(number for number, size in enumerate(shape) if size == 1)
    else:
        number = check_axis(axis, len(shape), where="squeeze")
        axes = (number,) if shape[number] == 1 else ()
    return lambda array, ndim: np.squeeze(array, axes)


def unsqueezed(shape: Shape, axis: int) -> Change:
    """Return the change that adds a dimension of size 1."""
    number = check_axis(axis, len(shape) + 1, where="unsqueeze")
    return lambda array, ndim: np.expand_dims(array, number)


def expanded(shape: Shape, to: Any) -> Change:
    """Return the change that repeats values, to fill a shape that ends with the shape of the values. Sizes of 1 and
    dynamic sizes can become other sizes; -1 keeps a size.
    """
    target = check_shape(to, where="expand")
    before = len(target) - len(shape)
    if before < 0:
        raise ConfigError(f"expand: expected at least the {len(shape)} dimensions of {shape}, found {target}")
    for size, wanted in zip(shape, target[before:], strict=True):
        if size != wanted and size not in (1, -1) and wanted != -1:
            raise ConfigError(f"expand: expected a shape that ends in {shape}, found {target}")
    becomes_static = [size == -1 and wanted != -1 for size, wanted in zip(shape, target[before:], strict=True)]

    def change(array: Array, ndim: int) -> Array:
        one = array[tuple(slice(0, 1) if static else slice(None) for static in becomes_static)]
        sizes = [size if wanted == -1 else wanted for size, wanted in zip(one.shape, target[before:], strict=False)]
        return np.broadcast_to(one, (*target[:before], *sizes, *one.shape[ndim:]))

    return change


def check_axis(axis: Any, ndim: int, *, where: str) -> int:
    """Return an axis as an index from 0; raise ConfigError for an axis out of range."""
    if not is_whole(axis) or not -ndim <= axis < ndim:
        raise ConfigError(f"{where}: expected an axis from {-ndim} to {ndim - 1}, found {axis!r}")
    return int(axis) % ndim


def check_index(index: Any, shape: Shape) -> tuple[Any, ...]:
    """Return an index as a tuple with an entry for every dimension.

    Raises:
        ConfigError: The shape does not allow the index, or the index selects only a part of a dynamic dimension.
    """
    parts = [_index_part(part) for part in (index if isinstance(index, tuple) else (index,))]
    used = sum(_width(part) for part in parts)
    if used > len(shape) or sum(part is Ellipsis for part in parts) > 1:
        raise ConfigError(f"index: expected at most {len(shape)} dimensions of {shape}, found {index!r:.80}")
    rest = [slice(None)] * (len(shape) - used)
    at = next((number for number, part in enumerate(parts) if part is Ellipsis), len(parts))
    whole = [*parts[:at], *rest, *parts[at + 1 :]]
    axis = 0
    for part in whole:
        width = _width(part)
        if is_dynamic(shape[axis : axis + width]) and part != slice(None):
            raise ConfigError(f"index: expected the slice : for a dynamic dimension of {shape}, found {index!r:.80}")
        axis += width
    return tuple(whole)


def _index_part(part: Any) -> Any:
    if part is None or part is Ellipsis or isinstance(part, slice) or is_whole(part):
        return part
    numbers = np.asarray(part)
    if numbers.size == 0:
        numbers = numbers.astype(np.int64)
    if numbers.dtype.kind not in "biu":
        raise ConfigError(f"index: expected integers, slices, arrays of integers, or names, found {part!r:.80}")
    return numbers


def _width(part: Any) -> int:
    """Return how many dimensions one entry of an index uses."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype.kind == "b" else 1


# ---------------------------------------------------------------------- random values
#
# Each value comes from its own random words. Therefore a longer draw begins with the values of a shorter one.

_U53 = 2.0**-53
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def key_of(seed: int | Key, path: tuple[str | int, ...] = ()) -> Key:
    """Return the random key of the field at a path; the key depends only on the seed and the path."""
    key = seed if isinstance(seed, Key) else Key(check_seed(seed), Purpose.SPECS)
    if not path:
        return key
    name = blake2b(json.dumps(path).encode(), digest_size=8).digest()
    return key.with_call((key.call + int.from_bytes(name, "little")) % (1 << 64))


def whole_numbers(key: Key, low: Array, high: Array, shape: tuple[int, ...]) -> Array:
    """Draw integers uniformly from ``low..high``, both included, in the dtype of ``low``.

    Each integer comes from 128 random bits, so that probabilities differ by less than 2**-64 for any range.

    Args:
        key: Key of the draw.
        low: Lowest values; broadcasts to ``shape``.
        high: Highest values; broadcasts to ``shape``.
        shape: Shape of the result.
    """
    words = key.bits(2 * math.prod(shape)).reshape(*shape, 2)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        values = _as_words(low) + _offsets(words[..., 0], words[..., 1], _as_words(high) - _as_words(low))
    wide = np.asarray(values).view(np.int64) if low.dtype.kind == "i" else np.asarray(values)
    return np.asarray(wide.astype(low.dtype))


def _offsets(upper: Array, lower: Array, most: Array) -> Array:
    """Return ``floor(n * (2**64 * upper + lower) / 2**128)`` for ``n = most + 1``, which can be 2**64."""
    number = most + np.uint64(1)
    part = upper * number
    carried = (part + _upper_product(lower, number)) < part
    return np.where(most == _ALL, upper, _upper_product(upper, number) + carried.astype(np.uint64))


def _as_words(numbers: Array) -> npt.NDArray[np.uint64]:
    """Return integers modulo 2**64."""
    wide = numbers.astype(np.int64).view(np.uint64) if numbers.dtype.kind == "i" else numbers.astype(np.uint64)
    return np.asarray(wide)


def _upper_product(one: Array, other: Array) -> Array:
    """Return the upper 64 bits of products of 64-bit words."""
    a, b = one >> _HALF, one & _LOW
    c, d = other >> _HALF, other & _LOW
    middle = b * c + (b * d >> _HALF)
    rest = a * d + (middle & _LOW)
    return np.asarray(a * c + (middle >> _HALF) + (rest >> _HALF))


def real_numbers(key: Key, low: Array, high: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Draw numbers uniformly from ``[low, high]``; ``Domain.sample`` defines the draw for infinite bounds.

    Args:
        key: Key of the draw.
        low: Lowest values; broadcasts to ``shape``.
        high: Highest values; broadcasts to ``shape``.
        shape: Shape of the result.
        dtype: Dtype of the result; it must represent the bounds exactly.
    """
    size = math.prod(shape)
    first, last = low.astype(np.float64), high.astype(np.float64)
    if np.isfinite(first).all() and np.isfinite(last).all():
        values = _between((key.bits(size) >> np.uint64(11)).reshape(shape) * _U53, first, last)
    else:
        uniform = (key.bits(2 * size) >> np.uint64(11)).reshape(*shape, 2) * _U53
        values = _without_bounds(uniform, first, last)
    # The sum of two products in `_between` may pass a bound; rounding to the dtype does not.
    return np.asarray(np.minimum(np.maximum(values, first), last).astype(dtype))


def _between(uniform: Array, low: Array, high: Array) -> Array:
    # Not computed as low + u * (high - low), because the difference of large numbers may be infinite.
    return np.asarray(low * (1.0 - uniform) + high * uniform)


def _without_bounds(uniform: Array, low: Array, high: Array) -> Array:
    """Return normal numbers if no bound is finite, exponential numbers if one bound is finite, and uniform numbers if
    both are finite."""
    below, above = np.isinf(low), np.isinf(high)
    first, last = np.where(below, 0.0, low), np.where(above, 0.0, high)
    decay, normal = as_exponential(uniform[..., 0]), as_normal(uniform[..., 0], uniform[..., 1])
    conditions = [below & above, below, above]
    drawn = np.select(conditions, [normal, last - decay, first + decay], _between(uniform[..., 0], first, last))
    return np.asarray(drawn)


def limits_of(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the lowest and highest value of a dtype, including infinities."""
    if number_kind(dtype) == "f":
        return -math.inf, math.inf
    if dtype.kind == "b":
        return False, True
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


VERSION = 1
"""Version of the format that ``Domain.to_json`` writes."""

MOST_VALUES = 1 << 20
"""Default limit of ``Domain.enumerate``."""


class Domain:
    """The set of values that one step can have: base class of ``Bounded``, ``Categorical``, ``Composite`` and others.

    A spec is immutable and hashable, and equals any spec with the same content. ``shape`` is the shape of one step; a
    size of -1 is dynamic, which allows any size. Values can have any number of batch axes before ``shape``: ``[*batch,
    *shape]``. Methods accept arrays of NumPy, torch and JAX in host memory. Methods return NumPy arrays; the methods of
    a ``Composite`` return nested dicts of NumPy arrays.
    """

    shape: Shape
    dtype: Any
    device: str | None

    # --- defined by every kind of spec ------------------------------------------------------------------------------

    @property
    def cardinality(self) -> int | float:
        """Number of different values of a step; ``math.inf`` for floats and for dynamic sizes."""
        raise NotImplementedError

    def _draw(self, key: Key, path: tuple[str | int, ...], batch: Shape) -> Any:
        raise NotImplementedError

    def _filled(self, number: int, batch: Shape) -> Any:
        raise NotImplementedError

    def _changed(self, change: Change, *, where: str) -> Self:
        """Apply an operation to the axes of ``shape``, and return the resulting spec."""
        raise NotImplementedError

    def _problem(self, values: Any) -> tuple[str | None, Shape | None]:
        """Return the reason why values are not in the domain (None if they are), and the batch shape of the values
        (None if unknown)."""
        raise NotImplementedError

    def _each(self, method: str, values: Any) -> Any:
        """Call a method of each spec inside this spec, with the values of that inner spec."""
        raise NotImplementedError

    def project(self, values: Any) -> Any:
        """Return the nearest values in the domain; values in the domain are returned unchanged.

        A ``Composite`` converts each field separately, and leaves out fields that it does not contain. The same holds
        for ``encode`` and ``decode``.

        Raises:
            DataError: The values have another kind or shape than the domain.
        """
        return self._each("project", values)

    def encode(self, values: Any) -> Any:
        """Convert external values to values of the domain: Python numbers, or codes for ``OneHot``.

        Raises:
            DataError: A value has no counterpart in the domain.
        """
        return self._each("encode", values)

    def decode(self, values: Any) -> Any:
        """Convert values of the domain to external values: the inverse of ``encode``.

        Raises:
            DataError: A value is not in the domain.
        """
        return self._each("decode", values)

    def enumerate(self, *, most: int = MOST_VALUES) -> Any:
        """Return all values of the domain, ``[cardinality, *shape]``; the last element varies fastest.

        Args:
            most: Highest allowed number of values.

        Raises:
            ConfigError: There are more than ``most`` values, or infinitely many.
        """
        raise NotImplementedError

    # --- common to all specs ----------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of dimensions of ``shape``."""
        return len(self.shape)

    def sample(self, seed: int | Key, batch: int | Shape = ()) -> Any:
        """Draw random values, ``[*batch, *shape]``; a seed gives the same values on all machines and in all frameworks.

        Integers and categories are uniform for any range: probabilities differ by less than 2**-64. Floats are
        uniformly distributed between finite bounds, exponentially distributed from the finite bound if the other bound
        is infinite, and normally distributed without finite bounds. The random key of a ``Composite``'s field depends
        on the field's name, so adding a field does not change other fields. A longer batch begins with the rows of a
        shorter batch.

        Args:
            seed: An integer in ``[0, 2**64)``, or a key of ``mouse_core.randomness``.
            batch: Shape of the batch.

        Raises:
            ConfigError: The seed or shape is invalid, or the spec has dynamic dimensions; call ``expand`` first.
        """
        self._check_static("sample")
        return self._draw(key_of(seed), (), check_shape(batch, where="batch", dynamic=False))

    def zeros(self, batch: int | Shape = ()) -> Any:
        """Return zeros, ``[*batch, *shape]``, even if the number 0 is not in the domain.

        Raises:
            ConfigError: The shape is invalid, or the spec has dynamic dimensions; call ``expand`` first.
        """
        self._check_static("zeros")
        return self._filled(0, check_shape(batch, where="batch", dynamic=False))

    def ones(self, batch: int | Shape = ()) -> Any:
        """Return ones, ``[*batch, *shape]``, even if the number 1 is not in the domain.

        Raises:
            ConfigError: The shape is invalid, or the spec has dynamic dimensions; call ``expand`` first.
        """
        self._check_static("ones")
        return self._filled(1, check_shape(batch, where="batch", dynamic=False))

    def why_not(self, values: Any) -> str | None:
        """Return the reason why a value is not in the domain (expected, found, and its position), or None.

        Arrays must have the dtype of the spec; Python numbers must fit this dtype. For a ``Composite``, the text names
        the field. Fields that the ``Composite`` does not contain are ignored, and all its fields must have the same
        batch shape.
        """
        return self._problem(values)[0]

    def contains(self, values: Any) -> bool:
        """Whether all values are in the domain and have its dtype and shape; ``why_not`` returns the reason if not.

        ``values in spec`` gives the same result, except that a ``Composite`` takes texts and tuples of texts as names
        of fields.
        """
        return self.why_not(values) is None

    def __contains__(self, values: object) -> bool:
        return self.contains(values)

    def check(self, values: Any, *, where: str = "") -> None:
        """Raise DataError unless all values are in the domain.

        Args:
            values: ``[*batch, *shape]``.
            where: Prefix of the message.

        Raises:
            DataError: A value is outside the domain; the message is the text that ``why_not`` returns.
        """
        reason = self.why_not(values)
        if reason is not None:
            raise DataError(f"{where}: {reason}" if where else reason)

    def reshape(self, shape: int | Shape) -> Self:
        """Return the spec in another shape; a single size of -1 is inferred.

        For a spec with dynamic dimensions, each -1 is a dynamic dimension. The last axis of ``OneHot`` and
        ``MultiOneHot`` stays the last axis.

        Raises:
            ConfigError: The number of values in the new shape differs from the number of values in ``self.shape``.
        """
        return self._changed(reshaped(self._axes(), self._free(shape, "reshape")), where="reshape")

    def squeeze(self, axis: int | None = None) -> Self:
        """Return the spec without dimension ``axis`` if this dimension has size 1; by default, without all dimensions
        of size 1.

        Raises:
            ConfigError: The axis is out of range.
        """
        return self._changed(squeezed(self._axes(), axis), where="squeeze")

    def unsqueeze(self, axis: int) -> Self:
        """Return the spec with a new dimension ``axis`` of size 1.

        Raises:
            ConfigError: The axis is out of range.
        """
        return self._changed(unsqueezed(self._axes(), axis), where="unsqueeze")

    def expand(self, shape: int | Shape) -> Self:
        """Return the spec of values that are repeated to fill a shape; the shape must end with ``self.shape``.

        Sizes of 1 and dynamic sizes can become other sizes; -1 keeps a size. The shape includes the last axis of
        ``OneHot`` and ``MultiOneHot``.

        Raises:
            ConfigError: The shape ends with other sizes.
        """
        return self._changed(expanded(self._axes(), self._free(shape, "expand")), where="expand")

    def unbind(self, axis: int = 0) -> tuple[Any, ...]:
        """Split the spec along a dimension, and return the specs, which lack this dimension; the inverse of
        ``stack_specs``.

        Raises:
            ConfigError: The axis is out of range, or the dimension is dynamic.
        """
        axes = self._axes()
        number = check_axis(axis, len(axes), where="unbind")
        if axes[number] == -1:
            raise ConfigError(f"unbind: expected a dimension of fixed size, found dimension {number} of {axes}")
        return tuple(self[(*(slice(None),) * number, place)] for place in range(axes[number]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __getitem__(self, index: Any) -> Any:
        """Return the spec of indexed values; raise SpecIndexError (a ConfigError) for an index out of range."""
        try:
            parts = check_index(index, self._axes())
            return self._changed(lambda array, ndim: array[parts], where="index")
        except ConfigError as error:
            raise SpecIndexError(*error.args) from error

    def to(self, device: object) -> Self:
        """Return the spec with another device: a label for adapters, such as "cuda:0", or None.

        Drawing, checking and projecting always run on the host, whatever the label.
        """
        return dataclasses.replace(self, device=None if device is None else str(device))  # type: ignore[type-var]

    def astype(self, dtype: Any) -> Self:
        """Return the same domain with another dtype of values.

        Raises:
            ConfigError: The dtype cannot represent all values of the domain.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the spec as a JSON object with a version, for ``from_json``.

        Raises:
            ConfigError: JSON cannot represent the example of a ``NonTensor``.
        """
        return {"version": VERSION, **content_of(self)}

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _axes(self) -> Shape:
        """Return the dimensions that operations on axes can change."""
        return self.shape

    def _check_static(self, what: str) -> None:
        if is_dynamic(self.shape):
            raise ConfigError(f"{what}: expected sizes for all dimensions, found {self.shape}; expand() sets sizes")

    def _free(self, shape: Any, where: str) -> Shape:
        """Return ``shape`` without the last axes that together form one value; raise ConfigError if these axes would
        change.
        """
        target = check_shape(shape, where=where)
        fixed = self.shape[len(self._axes()) :]
        ending = target[len(target) - len(fixed) :] if len(target) >= len(fixed) else None
        if fixed and ending != fixed and not (where == "expand" and ending == (-1,) * len(fixed)):
            raise ConfigError(f"{where}: expected a shape that ends in {fixed}, found {target}")
        return target[: len(target) - len(fixed)]


# ---------------------------------------------------------------------- JSON


def content_of(spec: Domain) -> dict[str, Any]:
    """Return the type and the attributes of a spec that are not None.

    Raises:
        ConfigError: JSON cannot represent the example of a ``NonTensor``.
    """
    content: dict[str, Any] = {"type": type(spec).__name__}
    for attribute in dataclasses.fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, attribute.name)
        if attribute.name == "example":
            _check_example(value)
        if value is not None:
            content[attribute.name] = value.tolist() if attribute.name == "mask" else as_json(value, _own)
    return content


def _check_example(example: Any) -> None:
    with suppress(TypeError, ValueError):
        if json.loads(json.dumps(example)) == example:
            return
    raise ConfigError(f"to_json: expected an example that JSON can represent, found {example!r:.80} in NonTensor")


def _own(value: Any) -> Any:
    """Return a spec or an array in its JSON form; an array whose values are all equal becomes this value. Return None
    for other attributes.
    """
    if isinstance(value, Domain):
        return content_of(value)
    if isinstance(value, np.ndarray):
        uniform = uniform_value(value) if value.size else 1  # an array without elements may have any value
        return as_json(value.tolist() if uniform is None else uniform)
    return None


def uniform_value(array: Array) -> Any:
    """Return the Python value that all elements of an array have; None if the elements differ or the array is empty."""
    if not array.size:
        return None
    first = array.flat[0]
    if any(array.strides) and not bool((array == first).all()):
        return None
    return first.item() if isinstance(first, np.generic) else first
