"""What samplers without replacement have in common: which of so many rows, or slices, an epoch has left."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mouse_core.randomness import Key, Order

Int64s = npt.NDArray[np.int64]


class Epochs:
    """Epochs over ``0 .. total - 1``, each in an order of its own.

    Args:
        drop_last: Whether what does not fill a batch at the end of an epoch is left out.
        shuffle: Whether an epoch has an order of its own; otherwise the numbers ascend.
    """

    def __init__(self, drop_last: bool, shuffle: bool) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._begin(0)

    @property
    def ran_out(self) -> bool:
        """Whether the last draw was the last of its epoch, if the next one asks for as much."""
        return self._ran_out

    def _begin(self, index: int) -> None:
        """Begin an epoch with the draw of this index."""
        self._began, self._position, self._ran_out = index, 0, False

    def _is_over(self, total: int, count: int) -> bool:
        """Whether an epoch over ``total`` has nothing left for a batch of ``count``."""
        return total - self._position < (count if self.drop_last else 1)

    def _take(self, key: Key, total: int, count: int) -> Int64s:
        """The next ``count`` numbers of the epoch, or those left of it."""
        ranks = np.arange(self._position, min(self._position + count, total))
        self._position += len(ranks)
        self._ran_out = self._is_over(total, count)
        return _order(replace(key, index=self._began), total)(ranks) if self.shuffle else ranks

    def _go_on(self, began: int, position: int, ran_out: int) -> None:
        """Be where a state says."""
        self._began, self._position, self._ran_out = began, position, bool(ran_out)


@lru_cache(maxsize=16)
def _order(key: Key, total: int) -> Order:
    return Order(key, total)
