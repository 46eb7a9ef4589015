"""Draws without replacement: the order of rows in an epoch, and the rows of a queue."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from mouse_core.randomness import Key, Order, Purpose
from mouse_torch import _philox
from mouse_torch.device.ground.reading import Ring
from mouse_torch.tracing import is_known

SHUFFLED_UP_TO = 1 << 14
"""So many elements are shuffled outright, in ``mouse_core.randomness.Order``."""
# Its rounds where there are more, and the numbers of SplitMix64.
_ROUNDS = 8
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# Where an element is outside of so few, it is within 1 of 128 the next time; the host goes on for as long as it takes,
# which more than 8 times is once in 2**56.
_WALKS = 8


class Epoch(torch.nn.Module):
    """Position of a replay: the epoch, and the place in it.

    Args:
        device: Where that lies.
    """

    rows: torch.Tensor
    """How many rows, or slices, the epoch is over, int64 ``[]``; 0: none has begun."""
    began: torch.Tensor
    """The number of the sample with which it began, int64 ``[]``."""
    position: torch.Tensor
    """How many of them have come, int64 ``[]``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        for name in ("rows", "began", "position"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))

    def take(self, seed: torch.Tensor, number: torch.Tensor, count: torch.Tensor, size: int, most: int) -> torch.Tensor:
        """The next slots, or numbers of slices, int64 ``[size]``.

        Args:
            seed: That of the replay.
            number: That of the sample.
            count: How many rows or slices there are.
            size: How many come.
            most: How many there may be.
        """
        begins = (count != self.rows) | (count - self.position < size)
        self.began.copy_(torch.where(begins, number, self.began))
        position = torch.where(begins, 0, self.position)
        made = count.clamp(min=1)
        places = torch.minimum(position + torch.arange(size, device=seed.device), made - 1)
        found = in_order(seed, self.began, made, places, most)
        self.rows.copy_(count)
        self.position.copy_(position + size)
        return found


class Queue(torch.nn.Module):
    """Rows that a queue has not returned yet.

    Args:
        device: Where that lies.
    """

    left: torch.Tensor
    """So many, the newest, int64 ``[]``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("left", torch.zeros((), dtype=torch.int64, device=device))

    def take(self, ring: Ring, size: int, capacity: int) -> torch.Tensor:
        """The next slots, int64 ``[size]``; where there are too few rows it stays as it is."""
        oldest = ring.cursor * (capacity // ring.steps) - self.left
        slots: torch.Tensor = (oldest + torch.arange(size, device=self.left.device)) % capacity
        self.left.sub_(torch.where(self.left >= size, size, 0))
        return slots


def in_order(
    seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor, most: int
) -> torch.Tensor:
    """The elements at some positions of ``Order(Key(seed, Purpose.REPLAY, index), n)``, int64 ``[B]``.

    Args:
        seed, index: Name the order, int64 ``[]``.
        n: Number of elements, int64 ``[]``, from 1 to ``most``.
        positions: Int64 ``[B]``, each in ``[0, n)``.
        most: Elements there may be.
    """
    if is_known(positions):
        return _looked_up(seed, index, n, positions)
    if positions.device.type == "cpu":
        known: torch.Tensor = _of_order(seed, index, n, positions)
        return known
    return shuffled(seed, index, n, positions, most)


def _looked_up(seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    order = _order(int(seed.numpy()) & ((1 << 64) - 1), int(index.numpy()), int(n.numpy()))
    return torch.from_numpy(order(positions.numpy()))


@lru_cache(maxsize=16)
def _order(seed: int, index: int, n: int) -> Order:
    return Order(Key(seed, Purpose.REPLAY, index), n)


@torch.library.custom_op("mouse_torch::in_order", mutates_args=(), device_types="cpu")
def _of_order(seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return _looked_up(seed, index, n, positions)


@_of_order.register_fake
def _(seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(positions)


def shuffled(
    seed: torch.Tensor, index: torch.Tensor, n: torch.Tensor, positions: torch.Tensor, most: int
) -> torch.Tensor:
    """``in_order`` by operations of torch alone."""
    size = min(most, SHUFFLED_UP_TO)
    words = _philox.philox(seed, index, size)
    # The words of fewer elements are the first of those of more. Without a sign they are sorted as with another.
    lowest = torch.iinfo(torch.int64).max
    order = torch.where(torch.arange(size, device=n.device) < n, words ^ (-lowest - 1), lowest)
    table = order.argsort(stable=True)
    found = table.take(positions.clamp(max=size - 1))
    if most <= SHUFFLED_UP_TO:
        return found
    large = n.clamp(min=SHUFFLED_UP_TO + 1)
    rows = large.to(torch.float64).sqrt().ceil().to(torch.int64)
    columns = (large + rows - 1) // rows
    keys = _philox.philox(seed, index, _ROUNDS)
    place = positions
    for walk in range(_WALKS):
        moved = _network(place, rows, columns, keys)
        place = moved if not walk else torch.where(place >= large, moved, place)
    return torch.where(n > SHUFFLED_UP_TO, place, found)


def _network(place: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    left, right = place // columns, place % columns
    for number in range(_ROUNDS):
        if number % 2:
            right = (right + _remainder(_mixed(left, keys[number]), columns)) % columns
        else:
            left = (left + _remainder(_mixed(right, keys[number]), rows)) % rows
    return left * columns + right


def _mixed(number: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    mixed: Any = number ^ key
    for shift, factor in zip((30, 27), _MIX, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * _philox.signed(factor)
    found: torch.Tensor = mixed ^ _shifted(mixed, 31)
    return found


def _shifted(number: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted to the right without a sign."""
    return (number >> by) & ((1 << (64 - by)) - 1)


def _remainder(number: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Remainder of an unsigned 64-bit number divided by a number below 2**16."""
    above = (1 << 32) % divisor
    return (_shifted(number, 32) % divisor * above + (number & 0xFFFFFFFF) % divisor) % divisor
