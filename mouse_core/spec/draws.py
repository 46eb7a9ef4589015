"""Random values of specs: pure functions of a key. Each value comes from its own random words.

Therefore a longer draw begins with the values of a shorter one.
"""

from __future__ import annotations

import json
import math
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import number_kind
from mouse_core.randomness import Key, Purpose, as_exponential, as_normal, check_seed

Array = npt.NDArray[Any]
_U53 = 2.0**-53
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def key_of(seed: int | Key, path: tuple[str | int, ...] = ()) -> Key:
    """Return the key of the field at a path, which depends only on the seed and the path."""
    key = seed if isinstance(seed, Key) else Key(check_seed(seed), Purpose.SPECS)
    if not path:
        return key
    name = blake2b(json.dumps(path).encode(), digest_size=8).digest()
    return key.with_call((key.call + int.from_bytes(name, "little")) % (1 << 64))


def whole_numbers(key: Key, low: Array, high: Array, shape: tuple[int, ...]) -> Array:
    """Draw integers uniformly from ``low..high``, both included, in the dtype of ``low``.

    Each comes from 128 random bits, so that probabilities differ by less than 2**-64 for any range.

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
    """Return ``floor(n * (2**64 * upper + lower) / 2**128)`` for ``n = most + 1``, which may be 2**64."""
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
        dtype: Dtype of the result, which holds the bounds exactly.
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
    # Not low + u * (high - low), where the difference of large numbers is infinite.
    return np.asarray(low * (1.0 - uniform) + high * uniform)


def _without_bounds(uniform: Array, low: Array, high: Array) -> Array:
    """Return normal numbers without finite bounds, exponential ones with one, and uniform ones with two."""
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
