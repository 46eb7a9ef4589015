"""The random numbers of ``mouse_core.randomness``, computed bit-identically by JAX, also under ``jax.jit``.

Random words are uint64. JAX without x64 has no 64-bit integers, so operations on words are traced within
``jax.enable_x64``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mouse_core.randomness import Purpose

# Philox 4x64 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF = 0xFFFFFFFF

SHUFFLED_UP_TO = 1 << 14
"""The largest number of elements for which ``mouse_core.randomness.Order`` stores a complete shuffle."""
# Number of rounds of ``Order`` for more elements, and the constants of SplitMix64.
_ORDER_ROUNDS = 8
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_State = tuple[list[jax.Array], list[jax.Array]]
"""The counters and the keys between two rounds of Philox."""


def permutation(seed: jax.Array, epoch: jax.Array, n: int) -> jax.Array:
    """Return the order of ``n`` rows in an epoch, equal to ``mouse_core.rollouts.permutation``.

    Args:
        seed: The two 32-bit halves of the seed, uint32 ``[2]``, the upper half first.
        epoch: The index of the epoch, an integer ``[]`` below 2**32; can be traced.
        n: Number of rows, below 2**31.

    Returns:
        int32 ``[n]``.
    """
    last = (1 << max(n - 1, 1).bit_length()) - 1
    word = words(seed, Purpose.ROLLOUTS, epoch, n)
    with jax.enable_x64(True):
        places = jnp.uint64(last)
        ordered = jax.lax.sort((word & ~places) | jnp.arange(n, dtype=jnp.uint64))
        order: jax.Array = (ordered & places).astype(jnp.int32)
    return order


def integers(word: jax.Array, high: jax.Array) -> jax.Array:
    """Convert random words to integers in ``[0, high)``, with the same results as ``Key.integers``.

    ``Key.integers`` converts a word's upper 53 bits, m, to the float64 ``m * 2**-53``, multiplies this number by
    ``high``, and truncates the product. The float64 product is rounded to 53 bits before it is truncated. A product
    that lies less than half a unit in the last place below an integer is therefore rounded up to this integer. In
    contrast, ``integers`` computes the product exactly, and then applies the same rounding. If the product's integer
    part q has b bits, 53 - b bits remain for the fraction. Therefore the float64 product is rounded up to q + 1 if the
    fraction is at least ``1 - 2**(b - 54)``. A tie is also rounded to q + 1, because the last bit of q + 1 is 0.

    Args:
        word: The words, uint64 ``[n]``.
        high: The exclusive upper bounds, int32 ``[]`` or ``[n]``, at least 1.

    Returns:
        int32 ``[n]``.
    """
    with jax.enable_x64(True):
        factor = high.astype(jnp.uint64)
        # 2**11 * m * high: q in the upper 32 of the upper 64 bits, and then the 64 bits of the fraction.
        lower = (word & (_HALF ^ 0x7FF)) * factor
        upper = (word >> 32) * factor + (lower >> 32)
        whole, fraction = upper >> 32, (upper << 32) | (lower & _HALF)
        # 1 minus the fraction, minus 2**-64, is below 2**(b + 10 - 64) if the product is rounded up.
        near = ~fraction >> (74 - jax.lax.clz(whole))
        found: jax.Array = jnp.minimum(whole + (near == 0), factor - 1).astype(jnp.int32)
    return found


def scaled(word: jax.Array, total: jax.Array) -> jax.Array:
    """Return ``floor(word * total / 2**64)``, uint64; call it only within ``jax.enable_x64``."""
    return _upper_product(word, total >> 32, total & _HALF)


def words(seed: jax.Array, purpose: Purpose, index: jax.Array, n: int, *, call: int = 0) -> jax.Array:
    """Return ``Key(seed, purpose, index, call).bits(n)``, uint64 ``[n]``; ``index`` must be below 2**32."""
    with jax.enable_x64(True):
        blocks, number = -(-n // 4), jnp.asarray(index).astype(jnp.uint32).astype(jnp.uint64)
        none = nothing(seed[0], number).astype(jnp.uint64)
        zero = jnp.zeros(blocks, jnp.uint64) + none
        # NumPy increments the counter before it computes a block, so the first block has number 1.
        counter = [zero + jnp.arange(1, blocks + 1, dtype=jnp.uint64), zero + jnp.uint64(call), zero + number, zero]
        keys = [_joined(seed) + none, none + jnp.uint64(purpose)]
        # A loop, because XLA would merge unrolled rounds into one expression, and recompute every value for each use.
        counter, _ = jax.lax.fori_loop(0, _ROUNDS, _round, (counter, keys))
        return jnp.stack(counter, axis=1).reshape(-1)[:n]


def bits(key: jax.Array, n: int) -> jax.Array:
    """Return random words, uint64 ``[n]``, that are drawn with a random key of JAX."""
    halves = jax.random.bits(key, (2, n), jnp.uint32)
    with jax.enable_x64(True):
        return _joined(halves)


def halves_of(word: jax.Array) -> jax.Array:
    """Return the two 32-bit halves of a word ``[1]``, uint32 ``[2]``, the upper half first."""
    with jax.enable_x64(True):
        return jnp.concatenate([word >> 32, word & _HALF]).astype(jnp.uint32)


def nothing(*numbers: jax.Array) -> jax.Array:
    """Return zero, uint32 ``[]``. If one of ``numbers`` varies over shards, ``jax.shard_map`` also treats the zero as
    varying.

    The reason: in ``jax.shard_map``, the values that a loop carries must already be varying before the first iteration.
    """
    return jnp.asarray(sum(number.astype(jnp.uint32) * jnp.uint32(0) for number in numbers), jnp.uint32)


def shuffled(seed: jax.Array, purpose: Purpose, index: jax.Array, n: jax.Array, *, most: int) -> jax.Array:
    """Return all elements of an ``Order`` that stores a complete shuffle, int32 ``[min(most, 16384)]``; ``in_order``
    takes the result as ``table``.

    Args:
        seed, purpose, index: The key of the order, as in ``words``.
        n: Number of elements, int32 ``[]``, from 1 to ``most``.
        most: The largest possible ``n``.
    """
    size = min(most, SHUFFLED_UP_TO)
    place, word = jnp.arange(size, dtype=jnp.int32), words(seed, purpose, index, size)
    # A smaller ``n`` uses the first words of a larger ``n``.
    with jax.enable_x64(True):
        return jax.lax.sort((place >= n, word, place), num_keys=2, is_stable=True)[2]


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
        seed, purpose, index, n, most: See ``shuffled``.
        positions: The positions in the order, int32 ``[B]``, each in ``[0, n)``.
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
    keys = words(seed, purpose, index, _ORDER_ROUNDS)

    def two_rounds(number: jax.Array, halves: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, right = halves
        left = (left + _mixed(right, keys[2 * number], rows)) % rows
        right = (right + _mixed(left, keys[2 * number + 1], columns)) % columns
        return left, right

    def walk(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        place, outside = state
        halves = place // columns, place % columns
        left, right = jax.lax.fori_loop(0, _ORDER_ROUNDS // 2, two_rounds, halves)
        place = jnp.where(outside, left * columns + right, place)
        return place, place >= size

    none = nothing(seed[0], jnp.asarray(index), n)
    begin = positions.astype(jnp.uint32) + none, jnp.zeros(positions.shape, jnp.uint32) + none == 0
    moved, _ = jax.lax.while_loop(lambda state: state[1].any(), walk, begin)
    return jnp.where(n > SHUFFLED_UP_TO, moved.astype(jnp.int32), found)


def _mixed(number: jax.Array, key: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return the output of SplitMix64 for the state ``key ^ number``, modulo ``divisor``, uint32."""
    with jax.enable_x64(True):
        mixed = key ^ number.astype(jnp.uint64)
        for shift, factor in zip((30, 27), _MIX, strict=True):
            mixed = (mixed ^ (mixed >> shift)) * jnp.uint64(factor)
        return ((mixed ^ (mixed >> 31)) % divisor.astype(jnp.uint64)).astype(jnp.uint32)


def _joined(halves: jax.Array) -> jax.Array:
    """Return words whose halves are ``halves``, uint32 ``[2, ...]``, the upper half first."""
    return (halves[0].astype(jnp.uint64) << 32) | halves[1].astype(jnp.uint64)


def _round(_: int, state: _State) -> _State:
    counter, keys = state
    (high_0, low_0), (high_1, low_1) = (
        (_upper_product(counter[place], by >> 32, by & _HALF), counter[place] * jnp.uint64(by))
        for place, by in zip((0, 2), _MULTIPLIERS, strict=True)
    )
    mixed = [high_1 ^ counter[1] ^ keys[0], low_1, high_0 ^ counter[3] ^ keys[1], low_0]
    return mixed, [key + jnp.uint64(weyl) for key, weyl in zip(keys, _WEYL, strict=True)]


def _upper_product(number: jax.Array, high: jax.Array | int, low: jax.Array | int) -> jax.Array:
    """Return the upper 64 bits of the product of a word and ``2**32 * high + low``."""
    upper, lower = number >> 32, number & _HALF
    middle = upper * low + ((lower * low) >> 32)
    return upper * high + (middle >> 32) + ((lower * high + (middle & _HALF)) >> 32)
