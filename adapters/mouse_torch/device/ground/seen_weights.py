"""A sum tree on the host, where one may look at it: NumPy computes there in a fraction of torch's time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_torch import _words

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

FAN, SHIFT = 16, 4
# A level of so many rows is summed up for every draw; of one with more, those rows are looked at that are needed.
_TOP = 256
_ONE = np.uint64(1)


class SeenWeights(NamedTuple):
    """The memory of ``Weights``, in which the same numbers are found and written.

    Attributes:
        sums: Int64 ``[R, 16]``.
        least: Float32 ``[R', 16]``.
        begins: Bool, as the first level, or None.
        starts: Where levels begin, in rows, and where the last one ends.
    """

    sums: Int64s
    least: Floats
    begins: npt.NDArray[np.bool_] | None
    starts: list[int]

    def put(self, slots: Int64s, units: Int64s) -> None:
        """Say what some slots weigh; of one that comes twice the last counts."""
        self.sums.reshape(-1)[slots] = units
        self.refresh(slots >> SHIFT)

    def refresh(self, nodes: Int64s) -> None:
        """See ``Weights.refresh``."""
        first, starts = self.starts[1], self.starts
        children = _across(self._level(0, nodes))
        # Less one: 0, which stands for no weight, becomes the largest of all.
        lowest = np.minimum.reduce(children.view(np.uint64) - _ONE, 0) + _ONE
        smallest = np.where(lowest > 0, lowest.astype(np.float32), np.float32(np.inf))
        total = np.add.reduce(children, 0)
        for level in range(1, len(starts) - 1):
            begin, end = starts[level : level + 2]
            sums, least = self.sums[begin:end], self.least[begin - first : end - first]
            # Where a node comes again the same is written.
            sums.reshape(-1)[nodes] = total
            least.reshape(-1)[nodes] = smallest
            nodes = nodes >> SHIFT
            if end - begin < len(nodes):
                nodes = np.arange(end - begin)  # each once
            total = np.add.reduce(_across(sums.take(nodes, 0)), 0)
            smallest = np.minimum.reduce(_across(least.take(nodes, 0)), 0)

    def drawn(self, words: Int64s) -> tuple[Int64s, Floats]:
        """Slots in proportion to what they weigh, int64 ``[B]``, and how many times the least that is, float32 ``[B]``.

        Args:
            words: Random words. Of the slots some weigh something.
        """
        starts = self.starts
        top = next(level for level in range(len(starts)) if starts[level + 1] - starts[level] <= _TOP)
        nodes = self._level(top, np.arange(starts[top + 1] - starts[top])).reshape(-1)
        ends = nodes.cumsum()
        rest = _words.scaled_seen(words, int(ends[-1]))
        node = ends.searchsorted(rest, "right")
        own = nodes.take(node)
        rest -= ends.take(node) - own
        # What stands before each of 16 children, and behind the last.
        before = np.zeros((len(words), FAN + 1), np.int64)
        rows = np.arange(0, before.size, FAN + 1)
        for level in range(top - 1, -1, -1):
            np.add.accumulate(self._level(level, node), 1, out=before[:, 1:])
            child = (before[:, 1:] > rest[:, None]).argmax(1)
            place = rows + child
            found = before.take(place)
            rest -= found
            own = before.take(place + 1) - found
            node = (node << SHIFT) + child
        smallest = self.least[-1].min() if len(self.least) else nodes[nodes > 0].min().astype(np.float32)
        return node, own.astype(np.float32) / smallest

    def _level(self, level: int, rows: Int64s) -> Int64s:
        """What counts of rows of a level, int64 ``[m, 16]``."""
        found = self.sums[self.starts[level] :].take(rows, 0)
        return found if level or self.begins is None else found * self.begins.take(rows, 0)


def _across(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of 16 as ``[16, m]``: so NumPy sums up many side by side."""
    return np.ascontiguousarray(rows.T)
