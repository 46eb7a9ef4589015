"""Numbers of rows, looked up in a ring of them by binary searches.

Where one may look at them NumPy computes, of which an operation takes a third of the time of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


class Ring(NamedTuple):
    """Return the slots of rows in the ring.

    Attributes:
        cursor: The time step that is written next, int64 ``[]``; of a ring that is seen an integer.
        size: Time steps there are, as the cursor.
        steps: How many fit.
    """

    cursor: Any
    size: Any
    steps: int

    @property
    def oldest(self) -> Any:
        """The time step of the oldest, less ``steps`` where the ring went round."""
        return self.cursor - self.size

    @property
    def is_seen(self) -> bool:
        """Whether numbers are integers, and what is found with them NumPy's."""
        return isinstance(self.size, int)

    def range(self, *bounds: int) -> Any:
        """``arange``, of the kind of its numbers."""
        return np.arange(*bounds) if self.is_seen else torch.arange(*bounds, device=self.size.device)

    def minimum(self, one: Any, other: Any) -> Any:
        """Return the values of one number per row."""
        return np.minimum(one, other) if self.is_seen else torch.minimum(one, other)

    def slots(self, row: Any) -> Any:
        """The time steps of rows counted from the oldest, which may be -1."""
        slot = row + self.oldest
        if not self.is_seen:
            return slot % self.steps
        # Cheaper than the rest of a division.
        return np.where(slot < 0, slot + self.steps, slot)


def seen_ring(cursor: int, size: int, steps: int) -> Ring:
    """A ring of which one knows where the rows are."""
    # So that a row less than the oldest is a place, too, counted from the end where it is below 0.
    return Ring(cursor or (steps if size == steps else 0), size, steps)


class Reading(NamedTuple):
    """Counts of rows in a ring, tensors, or NumPy's where the ring is seen; called, it reads them.

    Attributes:
        ring: Where the rows are.
        windows: How many slices there are before a row in its environment, int64 ``[T, E]``.
        numbers: How many episodes there are up to a row, itself included, int64 ``[T, E]``.
        made: How many slices there are in all, int64 ``[E]``.
        phases: The steps from the last row at which a slice may begin to each row, ``[T, E]``; None: not counted.
    """

    ring: Ring
    windows: Any
    numbers: Any
    made: Any
    phases: Any

    def __call__(self, counts: Any, row: Any, env: Any) -> Any:
        """Return the values of rows by their distance from the oldest, -1 included, in some environments."""
        # From the end on where it is below 0, as NumPy counts; that of all environments is where that of one is.
        slot = row + self.ring.oldest if self.ring.is_seen else self.ring.slots(row)
        envs = counts.shape[1]
        return counts.take(slot if envs == 1 else slot * envs + env)

    def before(self, row: Any, env: Any) -> Any:
        """Number of slices before rows, over all environments; without rows, the total."""
        size = self.ring.size
        return self.where(row < size, self(self.windows, row.clip(max=size - 1), env), self.made)

    @property
    def where(self) -> Callable[..., Any]:
        """``where``, of the kind of these counts."""
        return np.where if self.ring.is_seen else torch.where

    @property
    def searchsorted(self) -> Callable[..., Any]:
        """``searchsorted``, of the kind of these counts."""
        return np.searchsorted if self.ring.is_seen else torch.searchsorted

    def beyond(self, counts: Any, env: Any, most: Any, first: Any, rows: int) -> Any:
        """The first row up to which more than so much is counted in its environment, or how many rows there are.

        Args:
            counts: ``windows`` or ``numbers``.
            env: Int64 ``[n]``.
            most: Int64 ``[n]``.
            first: From which row on there is more, at the earliest, int64 ``[n]``.
            rows: How many from there on may have to be looked at.
        """
        ring = self.ring
        if not ring.is_seen or counts.shape[1] > 1:
            return search(ring, lambda row: self(counts, row, env) <= most, first, rows)
        line = counts[:, 0]
        if ring.oldest >= 0:
            return line[ring.oldest : ring.cursor].searchsorted(most, "right")
        # What was written before the ring went round, and what since then.
        return line[ring.oldest :].searchsorted(most, "right") + line[: ring.cursor].searchsorted(most, "right")


def search(ring: Ring, before: Callable[[Any], Any], first: Any, most: int) -> Any:
    """The first row from ``first`` on for which something does not hold, nor for any behind; or how many there are.

    Each round looks at 31 rows and leaves a 32nd, for what a round costs is mostly that there is one. Of 1,000 rows
    from row 0 on the first looks at the rows 31, 63, ..., and where 511 is the first of them for which it does not, the
    next looks at 480, 481, ..., 510. NumPy, of which a round costs less, looks at 7.

    Args:
        ring: Where the rows are.
        before: Says of rows, int64 ``[31, n]``, whether it holds.
        first: Int64 ``[n]``.
        most: How many rows may have to be looked at.
    """
    parts, stride = 8 if ring.is_seen else 32, 1
    while stride * parts <= most:
        stride *= parts
    last, low = ring.size - 1, first
    while stride:
        behind = ring.range(stride - 1, (parts - 1) * stride, stride)
        looked = low + behind[:, None]
        below = (looked <= last) & before(ring.minimum(looked, last))
        low = low + below.sum(0) * stride
        stride //= parts
    return ring.minimum(low, ring.size)
