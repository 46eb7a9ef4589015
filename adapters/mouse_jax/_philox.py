"""The random numbers of ``mouse_core.randomness``, computed by JAX with equal bits, also under ``jax.jit``.

JAX without x64 has no 64-bit integers, so every 64-bit integer in this module is a pair of 32-bit halves (high, low).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mouse_core.randomness import Purpose

Pair = tuple[jax.Array, jax.Array]

# Philox 4x64 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10

SHUFFLED_UP_TO = 1 << 14
"""Largest number of elements for which ``mouse_core.randomness.Order`` is a stored shuffle."""
# Number of rounds of ``Order`` for more elements, and the constants of SplitMix64.
_ORDER_ROUNDS = 8
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def permutation(seed: jax.Array, epoch: jax.Array, n: int, *, call: int = 0) -> jax.Array:
    """Return the order of ``n`` rows in an epoch, equal to ``mouse_core.rollouts.permutation``.

    Args:
        seed: The halves of the seed, uint32 ``[2]``, high first.
        epoch: Integer ``[]``, below 2**32; can be traced.
        n: Number of rows, below 2**31.
        call: A number that distinguishes several orders for one epoch.

    Returns:
        int32 ``[n]``.
    """
    high, low = _bits(seed, epoch, n, call)
    last = jnp.uint32((1 << max(n - 1, 1).bit_length()) - 1)
    low = (low & ~last) | jnp.arange(n, dtype=jnp.uint32)
    _, low = jax.lax.sort((high, low), num_keys=2)
    order: jax.Array = (low & last).astype(jnp.int32)
    return order


def integers(bits: Pair, high: jax.Array) -> jax.Array:
    """Convert random words to integers in ``[0, high)``, with the same results as ``Key.integers``.

    ``Key.integers`` converts a word's upper 53 bits, m, to the float64 ``m * 2**-53``, multiplies it by ``high`` and
    truncates. The float64 product is rounded to 53 bits before it is truncated. This rounding rounds a product up to an
    integer if the product lies less than half a unit in the last place below the integer. ``integers`` computes the
    product exactly. The product's integer part q has b bits, which leaves 53 - b bits for the fraction. With 53 - b
    bits, the float64 product is rounded up to q + 1 if the fraction is at least ``1 - 2**(b - 54)``. A tie is also
    rounded to q + 1, because the last bit of q + 1 is 0.

    Args:
        bits: The two halves of the words, uint32 ``[n]`` each.
        high: Int32, ``[]`` or ``[n]``, at least 1.

    Returns:
        int32 ``[n]``.
    """
    factor = high.astype(jnp.uint32)
    # 2**11 * m * high in three words: q is the first word, the fraction is the other two.
    carry, last = _product(bits[1] & jnp.uint32(0xFFFFF800), factor)
    whole, middle = _product(bits[0], factor)
    whole, middle = _added((whole, middle), (jnp.zeros_like(whole), carry))
    # 1 minus the fraction, minus 2**-64. It is below 2**(b + 10 - 64) if the product is rounded up.
    lacking = ~middle, ~last
    shift = 42 - jax.lax.clz(whole)
    # Only the shift by less than 32 bits is used.
    near = jnp.where(shift >= 32, lacking[0] >> (shift - 32), lacking[0] | (lacking[1] >> shift))
    rounded = whole + (near == 0).astype(jnp.uint32)
    return jnp.minimum(rounded, factor - 1).astype(jnp.int32)


def words(seed: jax.Array, purpose: Purpose, index: jax.Array, n: int, *, call: int = 0) -> Pair:
    """Return ``Key(seed, purpose, index, call).bits(n)`` as 32-bit halves; ``index`` is below 2**32."""
    return _bits(seed, index, n, call, purpose)


def nothing(*numbers: jax.Array) -> jax.Array:
    """Return zero, uint32 ``[]``. If one of ``numbers`` varies over shards, ``jax.shard_map`` also treats the zero as
    varying.

    In ``jax.shard_map``, the values that a loop carries must already be varying before the first iteration.
    """
    return jnp.asarray(sum(number.astype(jnp.uint32) * jnp.uint32(0) for number in numbers), jnp.uint32)


def shuffled(seed: jax.Array, purpose: Purpose, index: jax.Array, n: jax.Array, *, most: int) -> jax.Array:
    """Return the elements of an ``Order`` that is a stored shuffle, for ``in_order``: int32 ``[min(most, 16384)]``.

    Args:
        seed, purpose, index: The key of the order, as in ``words``.
        n: Number of elements, int32 ``[]``, from 1 to ``most``.
        most: The largest possible ``n``.
    """
    size = min(most, SHUFFLED_UP_TO)
    place = jnp.arange(size, dtype=jnp.int32)
    high, low = words(seed, purpose, index, size)
    # A smaller ``n`` uses the first words of a larger ``n``.
    return jax.lax.sort((place >= n, high, low, place), num_keys=3, is_stable=True)[3]


def in_order(
    seed: jax.Array,
    purpose: Purpose,
    index: jax.Array,
    n: jax.Array,
    positions: jax.Array,
    table: jax.Array,
    *,
    most: int,
) -> jax.Array:
    """Return the elements at ``positions`` of ``Order(Key(seed, purpose, index), n)``, int32 ``[B]``.

    Args:
        seed, purpose, index, n, most: As in ``shuffled``.
        positions: Int32 ``[B]``, each in ``[0, n)``.
        table: The result of ``shuffled``.
    """
    found: jax.Array = table.at[jnp.minimum(positions, len(table) - 1)].get(mode="promise_in_bounds")
    if most <= SHUFFLED_UP_TO:
        return found
    size = jnp.maximum(n, SHUFFLED_UP_TO + 1).astype(jnp.uint32)
    # The square root, rounded up; the error of float32 is less than 2.
    near = jnp.sqrt(size.astype(jnp.float32)).astype(jnp.uint32) - 2
    rows = near + sum(((near + more) ** 2 < size).astype(jnp.uint32) for more in range(5))
    columns = (size + rows - 1) // rows
    high, low = words(seed, purpose, index, _ORDER_ROUNDS)

    def two_rounds(number: jax.Array, halves: Pair) -> Pair:
        left, right = halves
        left = (left + _remainder(_mixed(right, (high[2 * number], low[2 * number])), rows)) % rows
        right = (right + _remainder(_mixed(left, (high[2 * number + 1], low[2 * number + 1])), columns)) % columns
        return left, right

    def walk(state: Pair) -> Pair:
        place, outside = state
        halves = place // columns, place % columns
        left, right = jax.lax.fori_loop(0, _ORDER_ROUNDS // 2, two_rounds, halves)
        place = jnp.where(outside, left * columns + right, place)
        return place, place >= size

    none = nothing(seed[0], jnp.asarray(index), n)
    begin = positions.astype(jnp.uint32) + none, jnp.zeros(positions.shape, jnp.uint32) + none == 0
    moved, _ = jax.lax.while_loop(lambda state: state[1].any(), walk, begin)
    return jnp.where(n > SHUFFLED_UP_TO, moved.astype(jnp.int32), found)


def _mixed(number: jax.Array, key: Pair) -> Pair:
    mixed = key[0], key[1] ^ number
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed = _multiplied(_xor(mixed, _shifted(mixed, shift)), factor)[1]
    return _xor(mixed, _shifted(mixed, 31))


def _shifted(number: Pair, by: int) -> Pair:
    """Return a number shifted to the right by 1 to 31 bits."""
    return number[0] >> by, (number[1] >> by) | (number[0] << (32 - by))


def _remainder(number: Pair, divisor: jax.Array) -> jax.Array:
    """Return the remainder of a 64-bit number divided by a number below 2**16."""
    above = (jnp.uint32(0xFFFFFFFF) % divisor + 1) % divisor
    left: jax.Array = (number[0] % divisor * above % divisor + number[1] % divisor) % divisor
    return left


def _bits(seed: jax.Array, epoch: jax.Array, n: int, call: int, purpose: Purpose = Purpose.ROLLOUTS) -> Pair:
    """Return ``Key(seed, purpose, epoch, call).bits(n)``."""
    blocks = -(-n // 4)
    number = jnp.asarray(epoch).astype(jnp.uint32)
    none = nothing(seed[0], number)
    zero = jnp.zeros(blocks, jnp.uint32) + none
    # NumPy increments the counter before it computes a block, so the first block has number 1.
    counter: list[Pair] = [
        (zero, zero + jnp.arange(1, blocks + 1, dtype=jnp.uint32)),
        (zero + jnp.uint32(call >> 32), zero + jnp.uint32(call & 0xFFFFFFFF)),
        (zero, zero + number),
        (zero, zero),
    ]
    keys: list[Pair] = [(seed[0] + none, seed[1] + none), (none, none + jnp.uint32(purpose))]
    # A loop, because XLA would merge unrolled rounds into one expression, and recompute every value for each use.
    counter, _ = jax.lax.fori_loop(0, _ROUNDS, _round, (counter, keys))
    high, low = (jnp.stack([word[half] for word in counter], axis=1).reshape(-1)[:n] for half in (0, 1))
    return high, low


def _round(_: int, state: tuple[list[Pair], list[Pair]]) -> tuple[list[Pair], list[Pair]]:
    counter, keys = state
    high_0, low_0 = _multiplied(counter[0], _MULTIPLIERS[0])
    high_1, low_1 = _multiplied(counter[2], _MULTIPLIERS[1])
    mixed = [_xor(high_1, counter[1], keys[0]), low_1, _xor(high_0, counter[3], keys[1]), low_0]
    return mixed, [_added(key, _halves(weyl)) for key, weyl in zip(keys, _WEYL, strict=True)]


def _halves(number: int) -> Pair:
    return jnp.uint32(number >> 32), jnp.uint32(number & 0xFFFFFFFF)


def _xor(*pairs: Pair) -> Pair:
    high, low = pairs[0]
    for other_high, other_low in pairs[1:]:
        high, low = high ^ other_high, low ^ other_low
    return high, low


def _added(one: Pair, other: Pair) -> Pair:
    """Return the sum, modulo 2**64."""
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]).astype(jnp.uint32), low


def _multiplied(number: Pair, multiplier: int) -> tuple[Pair, Pair]:
    """Return the high and the low 64 bits of a product."""
    high, low = _halves(multiplier)
    lowest = _product(number[1], low)
    middle, other = _product(number[1], high), _product(number[0], low)
    highest = _product(number[0], high)
    zero = jnp.zeros_like(number[0])
    carried = _added((zero, lowest[0]), (zero, middle[1]))
    carried = _added(carried, (zero, other[1]))
    top = _added(highest, (zero, middle[0]))
    top = _added(top, (zero, other[0]))
    top = _added(top, (zero, carried[0]))
    return top, (carried[1], lowest[1])


def _product(one: jax.Array, other: jax.Array) -> Pair:
    """Return the 64 bits of a product of 32-bit numbers, computed from products of 16-bit numbers."""
    half = jnp.uint32(0xFFFF)
    one_high, one_low, other_high, other_low = one >> 16, one & half, other >> 16, other & half
    low = one_low * other_low
    middle = one_high * other_low + (low >> 16)
    crossed = one_low * other_high + (middle & half)
    return one_high * other_high + (middle >> 16) + (crossed >> 16), (crossed << 16) | (low & half)
