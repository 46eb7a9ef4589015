"""The random numbers of ``mouse_core.randomness`` as tensors, for a sample index that is on the device.

torch cannot compute with unsigned 64-bit integers, so random words are int64. Sums and products of int64 wrap around to
the same bits; only right shifts, and the upper halves of products, need special operations.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from mouse_core.randomness import Key, Purpose
from mouse_core.replay.samplers.priorities import scaled as exactly_scaled
from mouse_core.replay.samplers.rows import order_of
from mouse_torch.placement import is_known

# Philox 4x64 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF, _ALL, _LOWEST = 0xFFFFFFFF, (1 << 64) - 1, -(1 << 63)

SHUFFLED_UP_TO = 1 << 14
"""The largest number of elements for which ``mouse_core.randomness.Order`` stores a complete shuffle."""
# Number of rounds of ``Order`` for more elements, and the constants of SplitMix64.
_SWAPS = 8
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# An element outside of the range is permuted again; it is outside again with a probability below 1/128. The host
# repeats this without limit. The probability of more than 8 repetitions is below 2**-56.
_WALKS = 8


def words(seed: Any, index: Any, n: int, purpose: Purpose = Purpose.REPLAY) -> torch.Tensor:
    """Return ``Key(seed, purpose, index).bits(n)`` as a tensor, int64 ``[n]``.

    On the host, NumPy computes the words, because NumPy is fastest. On other devices, torch computes the words by about
    400 operations on ``n / 4`` numbers, and fuses these operations into one.

    Args:
        seed: The 64 bits of the seed, int64 ``[]``: a tensor, or a NumPy array if values can be read.
        index: The index of the sample, int64 ``[]``: a tensor on the same device, or a NumPy array.
        n: Number of words.
        purpose: The purpose of the words.
    """
    if isinstance(index, np.ndarray) or is_known(index):
        return torch.from_numpy(_key(seed, index, purpose).bits(n).view("int64"))
    if index.device.type == "cpu":
        known: torch.Tensor = _of_number(seed, index, n, int(purpose))
        return known
    if index.device.type == "meta" or torch.compiler.is_compiling():
        return philox(seed, index, n, purpose)
    made: torch.Tensor = _fused()(_keys(seed, purpose), index, _numbers(index, n))
    return made[:n]


def permutation(seed: torch.Tensor, epoch: torch.Tensor, n: int) -> torch.Tensor:
    """Return ``mouse_core.rollouts.permutation(seed, epoch, n)`` as a tensor, int64 ``[n]``.

    Args:
        seed: The 64 bits of the seed, int64 ``[]``.
        epoch: The index of the epoch, int64 ``[]`` on the same device.
        n: Number of elements.
    """
    places = (1 << max(n - 1, 1).bit_length()) - 1
    word = (words(seed, epoch, n, Purpose.ROLLOUTS) & ~places) | torch.arange(n, device=epoch.device)
    # With the sign bit flipped, signed words are sorted like unsigned words.
    ordered = (word ^ _LOWEST).sort().values ^ _LOWEST
    return ordered & places


def _key(seed: Any, index: Any, purpose: Purpose) -> Key:
    # ``item`` is not used, because it would wait for the device.
    known = (int(number if isinstance(number, np.ndarray) else number.numpy()) for number in (seed, index))
    return Key(next(known) & _ALL, purpose, next(known))


@torch.library.custom_op("mouse_torch::words", mutates_args=(), device_types="cpu")
def _of_number(seed: torch.Tensor, index: torch.Tensor, n: int, purpose: int) -> torch.Tensor:
    return torch.from_numpy(_key(seed, index, Purpose(purpose)).bits(n).view("int64"))


@_of_number.register_fake
def _(seed: torch.Tensor, index: torch.Tensor, n: int, purpose: int) -> torch.Tensor:
    return index.new_empty(n)


@torch.library.custom_op("mouse_torch::counted", mutates_args=())
def _counted(index: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the integers ``1 .. blocks``, computed such that the compiler Inductor does not know their range. If
    Inductor knew the range, Inductor would compute in 32 bits on CUDA.
    """
    return torch.arange(1, blocks + 1, device=index.device)


@_counted.register_fake
def _(index: torch.Tensor, blocks: int) -> torch.Tensor:
    return index.new_empty(blocks)


def _numbers(index: torch.Tensor, n: int) -> torch.Tensor:
    """Return the Philox counters of all blocks of 4 words.

    NumPy increments the counter before it computes, so the first counter is 1.
    """
    blocks = -(-n // 4)
    if torch.compiler.is_compiling():
        counted: torch.Tensor = _counted(index, blocks)
        return counted
    return torch.arange(1, blocks + 1, device=index.device)


def philox(seed: torch.Tensor, index: torch.Tensor, n: int, purpose: Purpose = Purpose.REPLAY) -> torch.Tensor:
    """Return the result of ``words``, computed only with torch operations."""
    return _blocks(_keys(seed, purpose), index, _numbers(index, n))[:n]


def _keys(seed: torch.Tensor, purpose: Purpose) -> list[torch.Tensor]:
    return [seed, torch.full((), int(purpose), device=seed.device)]


@cache
def _fused() -> Any:
    return torch.compile(_blocks, fullgraph=True)


def _blocks(keys: list[torch.Tensor], index: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    counter: list[Any] = [numbers, 0, index, 0]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _multiplied(counter[place], by) for place, by in zip((0, 2), _MULTIPLIERS, strict=True)
        )
        counter = [high_1 ^ counter[1] ^ keys[0], low_1, high_0 ^ counter[3] ^ keys[1], low_0]
        keys = [key + signed(weyl) for key, weyl in zip(keys, _WEYL, strict=True)]
    return torch.stack(counter, 1).reshape(-1)


def signed(word: int) -> int:
    """Return the signed integer with the 64 bits of ``word``."""
    return word - (1 << 64) if word >> 63 else word


def _multiplied(number: Any, by: int) -> tuple[Any, Any]:
    """Return the high and the low 64 bits of unsigned products."""
    return _high(number, by >> 32, by & _HALF), number * signed(by)


def _upper(number: Any) -> Any:
    """Return the upper 32 bits of a 64-bit integer."""
    return (number >> 32) & _HALF


def _high(number: Any, upper: Any, lower: Any) -> Any:
    high, low = _upper(number), number & _HALF
    middle = high * lower + _upper(low * lower)
    return high * upper + _upper(middle) + _upper(low * upper + (middle & _HALF))


def scaled(word: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return ``floor(word * total / 2**64)`` for each word, int64 ``[n]``; ``total`` is at least 0, int64 ``[]``."""
    if is_known(word):
        return _scaled_known(word, total)
    # Inductor must not compile this for the host, because in C++ products that wrap around are undefined.
    made: torch.Tensor = _scaled(word, total) if word.device.type == "cpu" else _high(word, total >> 32, total & _HALF)
    return made


def _scaled_known(word: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(exactly_scaled(word.numpy().view(np.uint64), int(total.numpy())))


@torch.library.custom_op("mouse_torch::scaled", mutates_args=(), device_types="cpu")
def _scaled(word: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return _scaled_known(word, total)


@_scaled.register_fake
def _(word: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(word)


def scaled_integers(word: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Convert random words to integers in ``[0, high)``, as ``Key.integers`` does; ``high``, ``[]`` or ``[n]``, must be
    above 0.
    """
    uniform = ((word >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
    return torch.minimum((uniform * high).to(torch.int64), high - 1)


def in_order(
    seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor, most: int
) -> torch.Tensor:
    """Return the elements at ``positions`` of ``Order(Key(seed, Purpose.REPLAY, index), n)``, int64 ``[B]``.

    Args:
        seed, index: The seed and the index of the order, int64 ``[]``.
        n: Number of elements, int64 ``[]``, from 1 to ``most``.
        positions: The positions in the order, int64 ``[B]``, each in ``[0, n)``.
        most: The largest possible ``n``.
    """
    if is_known(positions):
        return _looked_up(seed, index, n, positions)
    if positions.device.type == "cpu":
        known: torch.Tensor = _of_order(seed, index, n, positions)
        return known
    return shuffled(seed, index, n, positions, most)


def _looked_up(seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    order = order_of(_key(seed, index, Purpose.REPLAY), int(n.numpy()))
    return torch.from_numpy(order(positions.numpy()))


@torch.library.custom_op("mouse_torch::in_order", mutates_args=(), device_types="cpu")
def _of_order(seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return _looked_up(seed, index, n, positions)


@_of_order.register_fake
def _(seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(positions)


def shuffled(
    seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor, most: int
) -> torch.Tensor:
    """Return the result of ``in_order``, computed only with torch operations."""
    size = min(most, SHUFFLED_UP_TO)
    words = philox(seed, index, size)
    # A smaller ``n`` uses the first words of a larger ``n``. With the sign bit flipped, signed words are sorted like
    # unsigned words.
    lowest = torch.iinfo(torch.int64).max
    order = torch.where(torch.arange(size, device=n.device) < n, words ^ (-lowest - 1), lowest)
    table = order.argsort(stable=True)
    found = table.take(positions.clamp(max=size - 1))
    if most <= SHUFFLED_UP_TO:
        return found
    large = n.clamp(min=SHUFFLED_UP_TO + 1)
    rows = large.to(torch.float64).sqrt().ceil().to(torch.int64)
    columns = (large + rows - 1) // rows
    keys = philox(seed, index, _SWAPS)
    place = positions
    for walk in range(_WALKS):
        moved = _network(place, rows, columns, keys)
        place = moved if not walk else torch.where(place >= large, moved, place)
    return torch.where(n > SHUFFLED_UP_TO, place, found)


def _network(place: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    left, right = place // columns, place % columns
    for number in range(_SWAPS):
        if number % 2:
            right = (right + _remainder(_mixed(left, keys[number]), columns)) % columns
        else:
            left = (left + _remainder(_mixed(right, keys[number]), rows)) % rows
    return left * columns + right


def _mixed(number: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    mixed: Any = number ^ key
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * signed(factor)
    found: torch.Tensor = mixed ^ _shifted(mixed, 31)
    return found


def _shifted(number: torch.Tensor, by: int) -> torch.Tensor:
    """Shift unsigned numbers to the right by ``by`` bits."""
    return (number >> by) & ((1 << (64 - by)) - 1)


def _remainder(number: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Return the remainder of unsigned 64-bit numbers divided by a number below 2**16."""
    above = (1 << 32) % divisor
    return (_shifted(number, 32) % divisor * above + (number & 0xFFFFFFFF) % divisor) % divisor
