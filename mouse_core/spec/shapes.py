"""Shapes with dynamic dimensions, and operations on their axes.

An operation is a ``Change``: a function that reshapes, indexes or repeats the first ``ndim`` axes of an array and keeps
the axes behind them. ``operate`` applies it to a shape and to the arrays of a spec, such as bounds and masks.
"""

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
Change = Callable[[Array, int], Array]
"""An operation on the first axes of an array: ``change(array, ndim)``."""


def check_shape(shape: Any, *, where: str, dynamic: bool = True) -> Shape:
    """Return a shape as a tuple of sizes from 0, or -1 for dynamic dimensions; raises ConfigError for others."""
    sizes = (shape,) if is_whole(shape) else shape
    if not isinstance(sizes, str | bytes):
        try:
            sizes = tuple(sizes)
        except TypeError:
            sizes = (None,)
        if all(is_whole(size) and size >= (-1 if dynamic else 0) for size in sizes):
            return tuple(int(size) for size in sizes)
    expected = "sizes from 0, or -1 where a dimension is dynamic" if dynamic else "sizes from 0"
    raise ConfigError(f"{where}: expected a shape of {expected}, found {shape!r:.80}")


def is_dynamic(shape: Shape) -> bool:
    """Whether a dimension is dynamic."""
    return -1 in shape


def fits(array_shape: Shape, shape: Shape) -> bool:
    """Whether ``array_shape`` ends in ``shape``, where a dynamic dimension takes any size."""
    ending = array_shape[len(array_shape) - len(shape) :] if len(array_shape) >= len(shape) else None
    return ending is not None and all(expected in (-1, size) for size, expected in zip(ending, shape, strict=True))


def compact(shape: Shape) -> Shape:
    """Return the shape of a spec's arrays, such as bounds: size 1 along dynamic dimensions."""
    return tuple(1 if size == -1 else size for size in shape)


def operate(
    shape: Shape, arrays: Mapping[str, Array | None], change: Change, *, where: str
) -> tuple[Shape, dict[str, Array | None]]:
    """Apply a change to a shape, and to arrays whose shapes begin with it (size 1 along dynamic dimensions).

    During the change, a dynamic dimension has a size that no other dimension has, 1009 for example. In the result,
    the dimension of this size is the dynamic one: with a new axis, (1009, 3) becomes (1, 1009, 3), and so (1, -1, 3).

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
    """Reshape: one size of -1 is inferred; for a dynamic shape, each -1 is a dynamic dimension."""
    target = check_shape(to, where="reshape")
    if not is_dynamic(shape):
        return lambda array, ndim: array.reshape(_inferred(array.shape[:ndim], target) + array.shape[ndim:])
    if sorted(size for size in shape if size == -1) != sorted(size for size in target if size == -1):
        raise ConfigError(f"reshape: expected the dynamic dimensions of {shape} to stay, found {target}")

    def change(array: Array, ndim: int) -> Array:
        dynamic = next(size for size, declared in zip(array.shape, shape, strict=False) if declared == -1)
        return array.reshape(tuple(dynamic if size == -1 else size for size in target) + array.shape[ndim:])

    return change


def _inferred(sizes: Shape, target: Shape) -> Shape:
    """Return the target with -1 replaced by the inferred size."""
    if target.count(-1) != 1:
        return target
    others = math.prod(size for size in target if size != -1)
    if not others or math.prod(sizes) % others:
        raise ValueError(f"expected sizes that divide {math.prod(sizes)} values, found {target}")
    return tuple(math.prod(sizes) // others if size == -1 else size for size in target)


def squeezed(shape: Shape, axis: int | None) -> Change:
    """Remove a dimension of size 1, or all of them."""
    if axis is None:
        axes = tuple(number for number, size in enumerate(shape) if size == 1)
    else:
        number = check_axis(axis, len(shape), where="squeeze")
        axes = (number,) if shape[number] == 1 else ()
    return lambda array, ndim: np.squeeze(array, axes)


def unsqueezed(shape: Shape, axis: int) -> Change:
    """Add a dimension of size 1."""
    number = check_axis(axis, len(shape) + 1, where="unsqueeze")
    return lambda array, ndim: np.expand_dims(array, number)


def expanded(shape: Shape, to: Any) -> Change:
    """Repeat to a shape that ends in this one; sizes of 1 and dynamic sizes may change, -1 keeps a size."""
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
    """Return an axis as a number from 0; raises ConfigError for an axis out of range."""
    if not is_whole(axis) or not -ndim <= axis < ndim:
        raise ConfigError(f"{where}: expected an axis from {-ndim} to {ndim - 1}, found {axis!r}")
    return int(axis) % ndim


def check_index(index: Any, shape: Shape) -> tuple[Any, ...]:
    """Return an index as a tuple with an entry for every dimension.

    Raises:
        ConfigError: An index that the shape does not allow, or one that takes only a part of a dynamic dimension.
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
            raise ConfigError(f"index: expected all of a dynamic dimension of {shape}, found {index!r:.80}")
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
    """Return the number of dimensions that a part of an index uses."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and part.dtype.kind == "b" else 1
