"""Conversion of priorities to integer weights, bit-identical in NumPy, torch and JAX.

The float result of ``x ** 0.6`` depends on the framework: NumPy and compiled JAX differ for one in five float32 values.
Sums of floats depend on their order. Therefore a priority is converted to an integer weight by integer operations only.
Sums of integers are exact, so the host and every device draw the same rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mouse_core._base.checks import check_number
from mouse_core.dtypes import kind_of, number_kind
from mouse_core.errors import ConfigError, DataError
from mouse_core.replay.protocols import Slots

Int64s = npt.NDArray[np.int64]
A = TypeVar("A")

UNIT_BITS = 24
UNIT = float(1 << UNIT_BITS)
"""The weight of a row of priority 1: 2**24 units, because weights have 24 fractional bits.

Small weights are precise enough: with alpha=0.6, a row of priority 0 and eps=1e-8 has 266 units, so rounding changes
the weight by at most 0.2%. Large weights can be represented: the weights of a buffer must sum to less than 2**63, so in
a buffer of 10 million rows, a weight can be up to 55,000 times the weight of priority 1. With alpha=0.6, this is the
weight of a priority of 79 million.
"""

LARGEST_ALPHA = 8.0
"""The largest exponent ``alpha``; with larger exponents, the powers of most priorities would exceed 64 bits."""

# Of the 23 fraction bits of a float32, the upper 7 choose a polynomial, and the lower 16 are its argument.
_PIECES, _ARGUMENT_BITS = 128, 16
_FACTOR_BITS = 30
_EPS = (2.0**-100, 2.0**100)
# Number of priorities that are converted together, so that intermediate values stay in the processor's cache.
_TOGETHER = 1 << 13


@dataclass(frozen=True, kw_only=True)
class Priorities:
    """The exponents that convert priorities to probabilities and importance weights.

    Args:
        alpha, beta, eps: See ``PrioritizedSampler``. ``beta`` may also be an array ``[]`` of a framework.

    Raises:
        ConfigError: A number is out of range.
    """

    alpha: float = 0.6
    beta: Any = 0.4
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        check_beta(self.beta)
        check_eps(self.eps)


@dataclass(frozen=True, eq=False)
class Powers:
    """Tables for powers of float32 numbers with a fixed exponent: int64 arrays of NumPy or another framework.

    For ``x = 2**(e - 127) * m``, with m from 1 to below 2, the power of x is the power of ``2**(e - 127)`` times the
    power of m. The first power is ``2**(whole + part)``, computed with ``2**part`` as a factor and ``2**whole`` as a
    shift. The second power is a polynomial. The upper 7 bits of the fraction of m select a, b and c, and the lower 16
    bits are t. The value of the polynomial is ``a + (b + c * t / 2**16) * t / 2**16``, with each product rounded down
    to an integer.

    Args:
        factors: For each e from 0 to 255, ``2**(30 + part)``, rounded to an integer; the element for e=0 is 0, because
            e=0 represents the number 0.
        shifts: For each e, the number of bits, 0 to 63, by which the product of both powers is shifted right; the
            result is a weight in half units.
        pieces: a, b and the absolute value of c, ``[3, 128]``; a has 24 to 31 fractional bits.
        bends_down: Whether the term with c is subtracted; True for exponents below 1.
        most: The largest weight; larger results are reduced to ``most``.
    """

    factors: Any
    shifts: Any
    pieces: Any
    bends_down: bool
    most: int


@lru_cache(maxsize=64)
def powers(alpha: float) -> Powers:
    """Return the tables for an exponent; the tables are equal on all machines.

    Args:
        alpha: The exponent, from 0 to 8.

    Raises:
        ConfigError: The exponent is out of range.
    """
    # decimal arithmetic has the requested precision, and rounds equally on all machines
    from decimal import Decimal, localcontext

    exponent = Decimal(check_alpha(alpha))
    bits = 31 if alpha <= 1 else 32 - math.ceil(alpha)  # fractional bits of the power of m, which is below 2**alpha
    factors, shifts = np.zeros((2, 256), np.int64)
    with localcontext() as context:
        context.prec = 40
        logarithm = Decimal(2).ln()
        for e in range(256):
            whole = math.floor(exponent * (e - 127))
            part = exponent * (e - 127) - whole
            factors[e] = round((part * logarithm).exp() * 2**_FACTOR_BITS)
            shifts[e] = min(max(_FACTOR_BITS + bits - UNIT_BITS - whole - 1, 0), 63)
        ends = [((1 + Decimal(k) / (2 * _PIECES)).ln() * exponent).exp() * 2**bits for k in range(2 * _PIECES + 1)]
        # The polynomial passes through both ends of the piece and its middle.
        known = zip(ends[:-2:2], ends[1::2], ends[2::2], strict=True)
        pieces = [
            [round(low), round(4 * middle - 3 * low - high), round(abs(2 * low - 4 * middle + 2 * high))]
            for low, middle, high in known
        ]
    if alpha > 0:
        factors[0] = 0
    # The product has at least 30 + ``bits`` bits, so the largest weight is reached with a shift of 0.
    table = np.array(pieces, np.int64).T.copy()
    for array in (factors, shifts, table):
        array.flags.writeable = False
    return Powers(factors, shifts, table, alpha < 1, 1 << (_FACTOR_BITS + bits - 1))


def weights_of(bits: Any, tables: Powers, xp: Any = np) -> Any:
    """Return ``x ** alpha`` of float32 numbers in units of ``2**-24``, for arrays of NumPy and torch.

    A weight is an integer from 1 to ``tables.most``; only the number 0 has the weight 0. With alpha 0 all weights are
    ``2**24``. The error is at most half a unit plus a relative error of ``2**-27`` for alpha up to 2, or ``2**-18`` for
    a larger alpha. With alpha 1, the weight is the number itself, rounded to the nearest unit (halves are rounded up).

    Args:
        bits: The bits of numbers of at least 0, int64 of any shape. Numbers below ``2**-126`` (subnormal, not supported
            by some devices) count as 0, and infinity counts as ``2**128``.
        tables: The result of ``powers``; for torch, the tables are tensors instead of arrays.
        xp: The namespace of the arrays.

    Returns:
        int64 of the same shape.
    """
    factor, weights = _unbounded(bits, tables)
    weights = xp.where(weights > tables.most, tables.most, weights)
    return xp.where((weights == 0) & (factor != 0), 1, weights)


def _unbounded(bits: Any, tables: Powers) -> tuple[Any, Any]:
    """Return the factors, and the weights before they are limited to ``1 .. tables.most``."""
    exponent, piece, t = bits >> 23, (bits >> _ARGUMENT_BITS) & (_PIECES - 1), bits & ((1 << _ARGUMENT_BITS) - 1)
    a, b, c = tables.pieces
    bend = (c.take(piece) * t) >> _ARGUMENT_BITS
    slope = b.take(piece) - bend if tables.bends_down else b.take(piece) + bend
    mantissa = a.take(piece) + ((slope * t) >> _ARGUMENT_BITS)
    factor = tables.factors.take(exponent)
    halves = (factor * mantissa) >> tables.shifts.take(exponent)
    return factor, (halves + 1) >> 1


def bits_of(eps: float) -> int:
    """Return the bits of ``eps`` in float32, as an integer."""
    return int(np.float32(eps).view(np.uint32))


def plus_bits(bits: A, other: int, xp: Any) -> A:
    """Return the bits of the float32 sum of two numbers, rounded to nearest, ties to even, by integer operations only.

    Floats are not used, because a compiler may fuse a multiplication and an addition and round once, where NumPy rounds
    twice.

    Args:
        bits: The bits of finite numbers of at least 0, or of infinity, in any integer dtype of at least 32 bits.
        other: The bits of a number that ``check_eps`` returned; see ``bits_of``.
        xp: The namespace of the array; it must have ``where``.
    """
    number: Any = bits
    if not other:
        return bits
    own, given = number >> 23, other >> 23
    mantissa = xp.where(own == 0, 0, (number & 0x7FFFFF) | 0x800000)
    above = own >= given
    exponent = xp.where(above, own, given)
    # Three more bits than float32 has; the last of them records whether a shift removed a set bit.
    addend = (other & 0x7FFFFF) | 0x800000
    large, small = xp.where(above, mantissa, addend) << 3, xp.where(above, addend, mantissa) << 3
    apart = exponent - xp.where(above, given, own)
    apart = xp.where(apart > 27, 27, apart)
    moved = small >> apart
    moved = moved | xp.where((moved << apart) != small, 1, 0)
    total = large + moved
    carry = total >> 27
    total = (total >> carry) | (total & carry)
    rest, total = total & 7, total >> 3
    up = xp.where((rest > 4) | ((rest == 4) & ((total & 1) == 1)), 1, 0)
    found: A = ((exponent + carry) << 23) + (total - 0x800000) + up
    return found


def sums_of(priority: npt.NDArray[np.float32], eps: float) -> Int64s:
    """Return the bits of ``priority + eps``, computed by a float addition; in NumPy the result equals the result of
    ``plus_bits``.
    """
    return (priority + np.float32(eps)).view(np.int32).astype(np.int64)


def weighed(priority: npt.NDArray[Any], capacity: int, alpha: float, eps: float) -> Int64s:
    """Convert priorities to weights, int64 in the same shape, for a buffer of ``capacity`` rows.

    Raises:
        DataError: A priority is negative, not finite in float32, or above the limit for ``capacity`` rows.
    """
    return _weighed(check_priorities(priority, capacity, alpha, eps), eps, powers(alpha))


def check_priorities(priority: npt.NDArray[Any], capacity: int, alpha: float, eps: float) -> npt.NDArray[np.float32]:
    """Return priorities as float32; raise the errors of ``weighed``."""
    narrow = narrowed(priority)
    if not narrow.size:
        return narrow
    # If any priority is NaN, the minimum is NaN, which fails every comparison.
    most, largest = narrow.max(), largest_priority(capacity, alpha, eps)
    if not (narrow.min() >= 0 and most < np.inf):
        wrong = ~((narrow >= 0) & (narrow < np.inf))
        raise _refusal("finite priorities of 0 or more", priority, wrong, alpha, eps)
    if most > largest:
        expected = f"priorities up to {largest:.6g} for a capacity of {capacity} rows"
        raise _refusal(expected, priority, narrow > largest, alpha, eps)
    return narrow


def _weighed(priority: npt.NDArray[np.float32], eps: float, tables: Powers) -> Int64s:
    """Return the result of ``weights_of`` without an exact limit: a weight above ``tables.most`` can be any number
    above ``tables.most``.
    """
    if priority.size > _TOGETHER:
        flat, found = priority.reshape(-1), np.empty(priority.size, np.int64)
        for begin in range(0, priority.size, _TOGETHER):
            part = slice(begin, begin + _TOGETHER)
            found[part] = _weighed(flat[part], eps, tables)
        return found.reshape(priority.shape)
    factor, weights = _unbounded(sums_of(priority, eps), tables)
    if not weights.all():
        weights[(weights == 0) & (factor != 0)] = 1
    made: Int64s = weights
    return made


def _refusal(expected: str, priority: Any, wrong: npt.NDArray[np.bool_], alpha: float, eps: float) -> DataError:
    place = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return DataError(
        f"update_priority: expected {expected}, found {priority[place]} at {list(map(int, place))} "
        f"(alpha={alpha}, eps={eps})"
    )


def narrowed(priority: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return priorities as float32; numbers beyond the range of float32 become infinite."""
    if priority.dtype == np.float32:
        return priority
    with np.errstate(over="ignore"):
        return priority.astype(np.float32)


def largest_weight(capacity: int, tables: Powers) -> int:
    """Return the largest weight w for which ``capacity * w`` is less than ``2**63``."""
    return min(tables.most, ((1 << 63) - 1) // capacity)


@lru_cache(maxsize=64)
def largest_priority(capacity: int, alpha: float, eps: float) -> float:
    """Return the largest float32 priority of a row in a buffer of ``capacity`` rows; see ``largest_weight``."""
    tables = powers(alpha)
    most = largest_weight(capacity, tables)
    low, high = 0, 0x7F7FFFFF  # a larger float has larger bits, and at least the same weight
    while low < high:
        middle = (low + high + 1) // 2
        weight = _weighed(np.array([middle], np.int32).view(np.float32), eps, tables)[0]
        low, high = (middle, high) if weight <= most else (low, middle - 1)
    return float(np.array(low, np.int32).view(np.float32))


def priorities_like(slots: Slots, priority: Any) -> npt.NDArray[Any]:
    """Return priorities in the shape of ``slots``. The argument may have further axes of length 1, or one number for
    each slice.

    Raises:
        DataError: The priorities are not numbers.
        ConfigError: The shape of the priorities does not match the shape of the slots.
    """
    values = np.asarray(priority)
    if number_kind(values.dtype) not in "biuf":
        raise DataError(f"update_priority: expected numbers as priority, found {values.dtype}")
    return np.broadcast_to(values.reshape(shape_like(slots.shape, values.shape)), slots.shape)


def shape_like(shape: tuple[int, ...], given: tuple[int, ...], caller: str = "update_priority") -> tuple[int, ...]:
    """Return the shape into which priorities of the shape ``given`` are reshaped, so that the priorities can be
    broadcast to ``shape``, the shape of the slots.

    Priorities may have further axes of length 1 at the end, like outputs of networks, or have one number for each
    slice. For slots ``[8, 4]``, priorities ``[8, 4, 1]`` become ``[8, 4]``, and priorities ``[8]`` become ``[8, 1]``.

    Raises:
        ConfigError: The shapes do not match.
    """
    if given[: len(shape)] == shape and math.prod(given) == math.prod(shape):
        return shape
    fits = len(given) <= len(shape) and given[:1] in ((), shape[:1])
    if not fits or any(size not in (1, other) for size, other in zip(given, shape, strict=False)):
        raise ConfigError(f"{caller}: expected priorities of the shape of the index {list(shape)}, found {list(given)}")
    return given + (1,) * (len(shape) - len(given))


def check_alpha(value: Any) -> float:
    """Return the exponent ``value``; raise ConfigError unless ``powers`` accepts ``value``."""
    alpha = check_number("alpha", value)
    if alpha > LARGEST_ALPHA:
        raise ConfigError(f"alpha: expected a number up to {LARGEST_ALPHA:g}, found {value!r}")
    return alpha


def check_beta(value: Any) -> None:
    """Raise ConfigError unless ``value`` is a number of at least 0, an array ``[]`` of floats, or a function."""
    if callable(value):
        return
    if not (hasattr(value, "dtype") and hasattr(value, "ndim")) or isinstance(value, np.generic):
        check_number("beta", value)
    elif value.ndim or kind_of(value.dtype) not in "iuf":
        raise ConfigError(f"beta: expected a number of 0 or more, found an array of {value.dtype} {list(value.shape)}")


def check_eps(value: Any) -> float:
    """Return ``value``, the number to add to priorities; raise ConfigError unless ``value`` is 0 or in ``[2**-100,
    2**100]``.
    """
    eps = check_number("eps", value)
    if eps and not _EPS[0] <= eps <= _EPS[1]:
        raise ConfigError(f"eps: expected 0 or a number from 2**-100 to 2**100, found {value!r}")
    return eps
