"""Generations of rows: how often the row in each slot was replaced, which tells whether an index is still its row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, StateError
from mouse_core.replay.protocols import Storage, Write

Int64s = npt.NDArray[np.int64]


class Generations:
    """The generation of every slot: 0, and 1 more for each row that is written into it after the first.

    An index and its generation name a row for good. A row that is changed in place stays the same row.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)  # how many rows were written into each slot

    def wrote(self, storage: Storage, write: Write) -> None:
        """Count the rows of a write; each slot at most once, as a write has no more rows than there is room for."""
        if write.first is None or not write.slots.size:
            return
        size = int(write.slots.max()) + 1
        if size > len(self._counts):
            more = max(size, min(2 * len(self._counts), storage.capacity)) - len(self._counts)
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        self._counts[write.slots] += 1

    def reset(self, storage: Storage) -> None:
        """Count every row as replaced, as all rows may differ."""
        self._counts = self._counts + 1
        size = len(storage)
        if size > len(self._counts):
            self._counts = np.concatenate([self._counts, np.ones(size - len(self._counts), np.int64)])

    def of(self, storage: Storage, index: Any) -> Int64s:
        """The generation of the row in each slot, int64 of the same shape; -1 where there is none.

        Raises:
            ConfigError: An index that is not of integers.
        """
        slots = to_numpy(index)
        if slots.dtype.kind not in "iu" and slots.size:
            raise ConfigError(f"index: expected integers, found {slots.dtype}")
        slots = slots.astype(np.int64, copy=False)
        there = (slots >= 0) & (slots < len(storage))
        found: Int64s = np.full(slots.shape, -1, np.int64)
        found[there] = self._counts[slots[there]] - 1
        return found

    def state(self) -> dict[str, Any]:
        """The number of rows written into each slot."""
        return {"counts": self._counts.copy()}

    @staticmethod
    def of_state(state: Any) -> Generations:
        """Restore the generations of ``state``; StateError for anything else."""
        counts = np.asarray(state.get("counts")) if isinstance(state, Mapping) else np.zeros(1)
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or counts.min(initial=0) < 0:
            raise StateError(f"state: expected generations as integers [n], found {state!r:.80}")
        made = Generations()
        made._counts = counts.astype(np.int64)
        return made


def alike(found: Int64s, generation: Any) -> npt.NDArray[np.bool_]:
    """Whether rows still have the generations of ``generation``, integers of the same shape; else ConfigError."""
    named = to_numpy(generation)
    if named.shape != found.shape or (named.dtype.kind not in "iu" and named.size):
        raise ConfigError(
            f"generation: expected an integer for every index {list(found.shape)}, found {named.dtype} "
            f"{list(named.shape)}"
        )
    same: npt.NDArray[np.bool_] = (found == named) & (found >= 0)
    return same
