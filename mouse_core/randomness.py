"""Random numbers as a pure function of ``(seed, purpose, index, call)``, without hidden state.

The bits come from Philox 4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) as NumPy
implements it. A counter-based generator is a function from (key, counter) to bits, so any batch can be drawn without
drawing the batches before it. Only the generator's raw 64-bit outputs are used. The methods of
``numpy.random.Generator`` are not used, because NumPy can change their results between versions; only functions of the
user receive a ``Generator``.

Numbers that are computed from the bits are also the same on every machine. The logarithms, sines and powers that NumPy
and the C library compute can differ in the last bit between processors. So only sums, products, quotients and square
roots are used, because IEEE 754 defines how these are rounded.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError

_U53 = 2.0**-53
_ELEVEN = np.uint64(11)
_WORD = 1 << 64
# Largest number of elements for which an order is a stored shuffle, in which every permutation is equally likely.
_SHUFFLE_UP_TO = 1 << 14
_ROUNDS = 8
# Up to this number, normal numbers are computed one by one in Python, which is faster and gives the same bits.
_FEW = 8
_LN2 = 0.6931471805599453
_HALF_SQRT = 0.7071067811865476

_scratch = threading.local()


class Purpose(IntEnum):
    """The purposes of random numbers; different purposes never share bits.

    The values are part of the random stream: new purposes get new values, and old values never change.
    """

    WINDOWS = 1
    EPOCH = 2
    AUGMENT = 3
    REPLAY = 4
    ROLLOUTS = 5
    GROUPS = 6
    BOOTSTRAP = 7
    MIXTURES = 8
    SPLIT = 9
    MAP = 10
    LENGTHS = 11
    BLOCKS = 12
    SPECS = 13
    HASHES = 14


def check_seed(seed: object) -> int:
    """Return ``seed`` as an int, or raise ConfigError if it is not an integer in ``[0, 2**64)``."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ConfigError(f"seed: expected an integer in [0, 2**64), found {seed!r}")
    if not 0 <= int(seed) < _WORD:
        raise ConfigError(f"seed: expected an integer in [0, 2**64), found {int(seed)}")
    return int(seed)


@dataclass(frozen=True, slots=True)
class Key:
    """The name of a stream of random numbers. A key has no state: two draws from the same key give the same numbers.

    Args:
        seed: The user's seed, in ``[0, 2**64)``.
        purpose: The purpose of the numbers.
        index: An index in ``[0, 2**64)``, usually the index of a batch.
        call: A number in ``[0, 2**64)`` that distinguishes several draws for the same index.
    """

    seed: int
    purpose: Purpose
    index: int = 0
    call: int = 0

    def with_call(self, call: int) -> Key:
        """Return the key of another draw for the same index."""
        return Key(self.seed, self.purpose, self.index, call)

    def bits(self, n: int, first: int = 0) -> npt.NDArray[np.uint64]:
        """Return the ``n`` random 64-bit words ``first .. first + n - 1`` of the key, uint64 ``[n]``; earlier words are
        not computed."""
        # Setting the state of a kept generator takes 2 us, creating a generator 9 us.
        generator, state = _kept_generator()
        # Set number by number, as an array would take 1 us more; the last number of the counter stays 0.
        key, counter = state["state"]["key"], state["state"]["counter"]
        key[0], key[1] = self.seed, self.purpose
        # One count of the counter gives four words.
        counter[0], counter[1], counter[2] = first // 4, self.call, self.index
        generator.state = cast("Any", state)
        drawn: npt.NDArray[np.uint64] = generator.random_raw(first % 4 + n)[first % 4 :]
        return drawn

    def generator(self) -> np.random.Generator:
        """Return a new generator for functions of the user; the generator draws from the words that ``bits`` returns.

        The words are the same in every version of NumPy, but the methods of ``numpy.random.Generator`` can compute
        other results from the words in other versions.
        """
        # With only ``key=``, NumPy would request entropy from the system, which is slow and would make
        # ``Generator.spawn`` random.
        _make_key_words_known()
        counter = np.array([0, self.call, self.index, 0], np.uint64)
        return np.random.Generator(np.random.Philox(cast("Any", _KeyWords(self.seed, int(self.purpose))), counter))

    def uniform(self, n: int, first: int = 0) -> npt.NDArray[np.float64]:
        """Return the numbers ``first .. first + n - 1`` of the key, uniform on ``[0, 1)`` with 53 random bits, float64
        ``[n]``."""
        drawn = (self.bits(n, first) >> _ELEVEN).astype(np.float64)
        drawn *= _U53
        return drawn

    def integers(self, high: int, n: int) -> npt.NDArray[np.int64]:
        """Return ``n`` integers uniform on ``[0, high)``, int64 ``[n]``; the bias is below ``high * 2**-53``."""
        if high > 1 << 53:
            return as_integers(self.uniform(n), high)
        # No result equals high: for the largest number, 1 - 2**-53, the product is below high by more than half a
        # rounding step. The factor 2**-53 is exact, so both factors may be applied at once.
        drawn = (self.bits(n) >> _ELEVEN).astype(np.float64)
        drawn *= high * _U53
        return drawn.astype(np.int64)

    def normal(self, n: int) -> npt.NDArray[np.float64]:
        """Return ``n`` standard normal numbers, float64 ``[n]``; see ``as_normal``."""
        pairs = self.uniform(2 * n)
        if n > _FEW:
            return np.asarray(as_normal(pairs[:n], pairs[n:]))
        one, other = pairs[:n].tolist(), pairs[n:].tolist()
        return np.array([as_normal(*pair, xp=math) for pair in zip(one, other, strict=True)], np.float64)


class _KeyWords:
    """The key of a Philox generator in the form of a NumPy seed sequence; it cannot spawn children."""

    def __init__(self, *words: int) -> None:
        self._words = np.array(words, np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        """Return the words of the key. NumPy requests exactly the number of words that the key has."""
        return self._words


@cache
def _make_key_words_known() -> None:
    """Register ``_KeyWords`` as a seed sequence at its first use, because ``numpy.random`` is slow to import."""
    np.random.bit_generator.ISeedSequence.register(_KeyWords)


def as_integers(uniform: npt.NDArray[np.float64], high: int) -> npt.NDArray[np.int64]:
    """Convert numbers uniform on ``[0, 1)`` to integers uniform on ``[0, high)``; see ``Key.integers``."""
    return np.minimum((uniform * high).astype(np.int64), high - 1)


def as_exponential(uniform: Any, *, xp: Any = np) -> Any:
    """Convert numbers uniform on ``[0, 1)`` to exponentially distributed numbers of rate 1; the results are equal on
    every machine.

    Args:
        uniform: Multiples of ``2**-53``, float64 of any shape, or a float.
        xp: ``numpy``, or ``math`` for a float.

    Returns:
        Numbers of at least 0, in the same shape, with a relative error up to ``4e-16``.
    """
    mantissa, exponent = xp.frexp(1.0 - uniform)
    # Mantissas lie between sqrt(1/2) and sqrt(2), so that logarithms of numbers near 1 are exact to the last bits.
    low = mantissa < _HALF_SQRT
    mantissa, exponent = mantissa * (1 + low), exponent - (1 * low)
    # -log(m) is twice the inverse hyperbolic tangent of this quotient.
    ratio = (1.0 - mantissa) / (1.0 + mantissa)
    return ratio * _polynomial(ratio * ratio, _ATANH) - exponent * _LN2


def as_normal(uniform: Any, other: Any, *, xp: Any = np) -> Any:
    """Convert each pair of numbers uniform on ``[0, 1)`` to a standard normal number; the results are equal on every
    machine.

    The result is the first of the two numbers that Box and Muller (1958) define, ``sqrt(-2 log(1 - uniform)) * cos(2 pi
    other)``, with an error up to ``1e-15``.

    Args:
        uniform: As for ``as_exponential``.
        other: The second number of each pair, in the shape of ``uniform``.
        xp: ``numpy``, or ``math`` for floats.
    """
    # cos(2 pi x) is sin(2 pi (|x - 1/2| - 1/4)): for x of 0.1 or 0.9, the sine of 0.15 turns.
    turns = abs(other - 0.5) - 0.25
    return xp.sqrt(2.0 * as_exponential(uniform, xp=xp)) * (turns * _polynomial(turns * turns, _SINE))


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    value = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        value = (value + coefficient) * x
    return value + coefficients[0]


def _of_sine() -> tuple[float, ...]:
    """Return the Taylor coefficients of ``sin(2 pi x) / x`` in ``x * x``; up to x = 1/4 the error is below 1e-17."""
    found = [2.0 * math.pi]
    for power in range(2, 24, 2):
        found.append(-found[-1] * (4.0 * math.pi * math.pi) / (power * (power + 1)))
    return tuple(found)


# Taylor coefficients of 2 atanh(x) / x in x * x; for x up to 0.172 the remainder is below 1e-18.
_ATANH = tuple(2.0 / power for power in range(1, 24, 2))
_SINE = _of_sine()


def _kept_generator() -> tuple[np.random.Philox, dict[str, Any]]:
    """Return this thread's Philox generator, and a state dict that the caller overwrites; every draw first sets the
    state of the generator.
    """
    try:
        kept: tuple[np.random.Philox, dict[str, Any]] = _scratch.philox
    except AttributeError:
        generator = np.random.Philox(key=0)
        state: dict[str, Any] = dict(cast("dict[str, Any]", generator.state))
        kept = _scratch.philox = (generator, state)
    return kept


class Order:
    """A seeded permutation of ``range(n)`` that is computed, not stored.

    Above 16,384 elements, the permutation is a Feistel network on a grid of about ``sqrt(n) x sqrt(n)`` cells (Luby and
    Rackoff, 1988; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), with cycle walking for the few
    cells beyond ``n``. The network needs no memory, and computes any position in constant time. Up to 16,384 elements,
    the permutation is a stored shuffle.

    Args:
        key: The key of the permutation.
        n: Number of elements, at least 1.
    """

    def __init__(self, key: Key, n: int) -> None:
        self.n = n
        self._table: npt.NDArray[np.int64] | None = None
        if n <= _SHUFFLE_UP_TO:
            self._table = np.argsort(key.bits(n), kind="stable")
        else:
            self._rows = int(np.ceil(np.sqrt(n)))
            self._columns = -(-n // self._rows)
            self._keys = key.bits(_ROUNDS)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the elements at ``positions`` (int64, each in ``[0, n)``), int64 of the same shape."""
        if self._table is not None:
            return self._table[positions]
        moved = self._network(positions)
        outside = moved >= self.n
        while outside.any():
            moved[outside] = self._network(moved[outside])
            outside = moved >= self.n
        return moved

    def _network(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left, right = np.divmod(positions.astype(np.uint64), columns)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mix(left, key) % columns) % columns
            else:
                left = (left + _mix(right, key) % rows) % rows
        return (left * columns + right).astype(np.int64)


class Orders:
    """Many seeded permutations, computed element by element; permutation k reorders ``range(sizes[k])``.

    Each permutation is computed by the Feistel network of ``Order`` on a small grid; k is an additional input of the
    hash. Among many permutations of a few elements, the frequencies of the possible orders differ by at most about 2%.

    Args:
        key: The common key of the permutations.
    """

    def __init__(self, key: Key) -> None:
        self._keys = key.bits(_ROUNDS)

    def __call__(
        self, numbers: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return, for each of ``n`` pairs of a permutation and a position, the element at the position, int64 ``[n]``.

        Args:
            numbers: The index k of each permutation, int64 ``[n]``, in ``[0, 2**40)``.
            sizes: Number of elements of each permutation, int64 ``[n]``, at least 1. For one index k, the number must
                be the same in all calls.
            positions: Int64 ``[n]``, each in ``[0, sizes)``.
        """
        moved = self._network(numbers, sizes, positions)
        (outside,) = np.nonzero(moved >= sizes)
        while len(outside):
            moved[outside] = self._network(numbers[outside], sizes[outside], moved[outside])
            outside = outside[moved[outside] >= sizes[outside]]
        return moved

    def _network(
        self, numbers: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        side = np.ceil(np.sqrt(sizes))
        rows, columns = side.astype(np.uint64), np.ceil(sizes / side).astype(np.uint64)
        left, right = np.divmod(positions.astype(np.uint64), columns)
        named = numbers.astype(np.uint64) << np.uint64(24)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _wrapped(right + _below(_mix(named | left, key), columns), columns)
            else:
                left = _wrapped(left + _below(_mix(named | right, key), rows), rows)
        return (left * columns + right).astype(np.int64)


def _below(words: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Convert random words to integers in ``[0, high)``, for ``high`` up to 2**32; three times as fast as ``%``."""
    return ((words >> np.uint64(32)) * high) >> np.uint64(32)


def _wrapped(numbers: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the remainder modulo ``high`` of numbers in ``[0, 2 * high)``."""
    return np.where(numbers >= high, numbers - high, numbers)


def _mix(words: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of ``words`` and ``key``: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    mixed = words ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
