"""Shapes of values of which some dimensions may be dynamic, and the operations that change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import is_whole
from mouse_core.errors import ConfigError

Shape = tuple[int, ...]
Array = npt.NDArray[Any]
# What changes the first axes of an array, of which there are so many, and leaves those behind them as they are.
Change = Callable[[Array, int], Array]


def check_shape(shape: Any, *, where: str, dynamic: bool = True) -> Shape:
    """A shape as a tuple of integers from 0, or -1 where a dimension is dynamic; ConfigError otherwise."""
    sizes = (shape,) if is_whole(shape) else shape
    if not isinstance(sizes, str | bytes):
        try:
            sizes = tuple(sizes)
        except TypeError:
            sizes = (None,)
        if all(is_whole(size) and size >= (-1 if dynamic else 0) for size in sizes):
            return tuple(int(size) for size in sizes)
    found = "sizes from 0, or -1 where a dimension is dynamic" if dynamic else "sizes from 0"
    raise ConfigError(f"{where}: expected a shape of {found}, found {shape!r:.80}")


def is_dynamic(shape: Shape) -> bool:
    """Whether a dimension has no size of its own."""
    return -1 in shape


def fits(found: Shape, shape: Shape) -> bool:
    """Whether a shape ends in ``shape``, of which a dynamic dimension may have any size."""
    ending = found[len(found) - len(shape) :] if len(found) >= len(shape) else None
    return ending is not None and all(expected in (-1, size) for size, expected in zip(ending, shape, strict=True))


def compact(shape: Shape) -> Shape:
    """What arrays of such a shape have that hold for every size of a dynamic dimension: one value along it."""
    return tuple(1 if size == -1 else size for size in shape)


def operate(
    shape: Shape, arrays: Mapping[str, Array | None], change: Change, *, where: str
) -> tuple[Shape, dict[str, Array | None]]:
    """A shape, and arrays that begin with it, after a change.

    While the change is made, a dynamic dimension has a size that no other has, by which it is known afterwards.

    Raises:
        ConfigError: The change is not possible.
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
    """Reshapes to sizes of which one may be -1, and is then what is left; of a dynamic shape, -1 is dynamic."""
    target = check_shape(to, where="reshape")
    if not is_dynamic(shape):
        return lambda array, ndim: array.reshape(_inferred(array.shape[:ndim], target) + array.shape[ndim:])
    if sorted(size for size in shape if size == -1) != sorted(size for size in target if size == -1):
        raise ConfigError(f"reshape: expected the dynamic dimensions of {shape} to stay, found {target}")

    def change(array: Array, ndim: int) -> Array:
        dynamic = next(size for size, said in zip(array.shape, shape, strict=False) if said == -1)
        return array.reshape(tuple(dynamic if size == -1 else size for size in target) + array.shape[ndim:])

    return change


def _inferred(sizes: Shape, target: Shape) -> Shape:
    """The target with its -1 replaced by what is left of all sizes."""
    if target.count(-1) != 1:
        return target
    others = math.prod(size for size in target if size != -1)
    if not others or math.prod(sizes) % others:
        raise ValueError(f"expected sizes that divide {math.prod(sizes)} values, found {target}")
    return tuple(math.prod(sizes) // others if size == -1 else size for size in target)


def squeezed(shape: Shape, axis: int | None) -> Change:
    """Without a dimension of size 1, or without all of them."""
    if axis is None:
        axes = tuple(number for number, size in enumerate(shape) if size == 1)
    else:
        number = check_axis(axis, len(shape), where="squeeze")
        axes = (number,) if shape[number] == 1 else ()
    return lambda array, ndim: np.squeeze(array, axes)


def unsqueezed(shape: Shape, axis: int) -> Change:
    """With a dimension of size 1 more."""
    number = check_axis(axis, len(shape) + 1, where="unsqueeze")
    return lambda array, ndim: np.expand_dims(array, number)


def expanded(shape: Shape, to: Any) -> Change:
    """Repeated to a shape that ends in this one; sizes of 1 and dynamic ones may become others, -1 leaves one."""
    target = check_shape(to, where="expand")
    before = len(target) - len(shape)
    if before < 0:
        raise ConfigError(f"expand: expected at least the {len(shape)} dimensions of {shape}, found {target}")
    for size, wanted in zip(shape, target[before:], strict=True):
        if size != wanted and size not in (1, -1) and wanted != -1:
            raise ConfigError(f"expand: expected a shape that ends in {shape}, found {target}")
    given = [size == -1 and wanted != -1 for size, wanted in zip(shape, target[before:], strict=True)]

    def change(array: Array, ndim: int) -> Array:
        one = array[tuple(slice(0, 1) if has_size else slice(None) for has_size in given)]
        sizes = [size if wanted == -1 else wanted for size, wanted in zip(one.shape, target[before:], strict=False)]
        return np.broadcast_to(one, (*target[:before], *sizes, *one.shape[ndim:]))

    return change


def check_axis(axis: Any, ndim: int, *, where: str) -> int:
    """An axis as a number from 0, or ConfigError."""
    if not is_whole(axis) or not -ndim <= axis < ndim:
        raise ConfigError(f"{where}: expected an axis from {-ndim} to {ndim - 1}, found {axis!r}")
    return int(axis) % ndim


def check_index(index: Any, shape: Shape) -> tuple[Any, ...]:
    """An index as a tuple with an entry for every dimension.

    Raises:
        ConfigError: An index that no array of this shape has, or one of a dynamic dimension that is not all of it.
    """
    parts = index if isinstance(index, tuple) else (index,)
    given = [_part(part) for part in parts]
    used = sum(_width(part) for part in given)
    if used > len(shape) or sum(part is Ellipsis for part in given) > 1:
        raise ConfigError(f"index: expected at most {len(shape)} dimensions of {shape}, found {index!r:.80}")
    rest = [slice(None)] * (len(shape) - used)
    at = next((number for number, part in enumerate(given) if part is Ellipsis), len(given))
    whole = [*given[:at], *rest, *given[at + 1 :]]
    axis = 0
    for part in whole:
        width = _width(part)
        if is_dynamic(shape[axis : axis + width]) and part != slice(None):
            raise ConfigError(f"index: expected all of a dynamic dimension of {shape}, found {index!r:.80}")
        axis += width
    return tuple(whole)


def _part(part: Any) -> Any:
    if part is None or part is Ellipsis or isinstance(part, slice) or is_whole(part):
        return part
    numbers = np.asarray(part)
    if numbers.size == 0:
        numbers = numbers.astype(np.int64)
    if numbers.dtype.kind not in "biu":
        raise ConfigError(f"index: expected integers, slices, arrays of integers, or names, found {part!r:.80}")
    return numbers


def _width(part: Any) -> int:
    """How many dimensions a part of an index is about."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype.kind == "b" else 1


def uniform_value(array: Array) -> Any:
    """The value that an array has everywhere, as Python has it; None where it has several, or none."""
    if not array.size:
        return None
    first = array.flat[0]
    if any(array.strides) and not bool((array == first).all()):
        return None
    return first.item() if isinstance(first, np.generic) else first


def taken_rows(values: Any, rows: Array) -> Any:
    """Some rows of values: of arrays, and of nested dicts and tuples of them."""
    if isinstance(values, dict):
        return {name: taken_rows(one, rows) for name, one in values.items()}
    return tuple(taken_rows(one, rows) for one in values) if isinstance(values, tuple) else values[rows]
