"""A sum tree on the host, where one may look at it: NumPy computes there in a fraction of torch's time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_torch import _words

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

FAN, SHIFT = 16, 4
# A level of so many rows is summed up for every draw; of one with more, those rows are looked at that are needed.
_TOP = 256


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
        children = self._leaves(nodes)
        total, smallest = np.add.reduce(children, 1), _smallest(children)
        for level in range(1, len(starts) - 1):
            begin, end = starts[level : level + 2]
            # Where a node comes again the same is written.
            self.sums[begin:end].reshape(-1)[nodes] = total
            self.least[begin - first : end - first].reshape(-1)[nodes] = smallest
            nodes = nodes >> SHIFT
            if end - begin < len(nodes):
                nodes = np.arange(end - begin)  # each once
            total = np.add.reduce(self.sums[begin:end].take(nodes, 0), 1)
            smallest = np.minimum.reduce(self.least[begin - first : end - first].take(nodes, 0), 1)

    def drawn(self, words: Int64s) -> tuple[Int64s, Floats]:
        """Slots in proportion to what they weigh, int64 ``[B]``, and how many times the least that is, float32 ``[B]``.

        Args:
            words: Random words. Of the slots some weigh something.
        """
        starts = self.starts
        top = next(level for level in range(len(starts)) if starts[level + 1] - starts[level] <= _TOP)
        level_of = np.arange(starts[top], starts[top + 1])
        nodes = (self._leaves(level_of) if not top else self.sums[starts[top] : starts[top + 1]]).reshape(-1)
        ends = nodes.cumsum()
        rest = _words.scaled_seen(words, int(ends[-1]))
        node = ends.searchsorted(rest, "right")
        own = nodes.take(node)
        rest -= ends.take(node) - own
        # What stands before each of 16 children, and before a 17th.
        before = np.zeros((len(words), FAN + 1), np.int64)
        rows = np.arange(0, before.size, FAN + 1)
        for level in range(top - 1, -1, -1):
            children = self.sums[starts[level] :].take(node, 0) if level else self._leaves(node)
            np.add.accumulate(children, 1, out=before[:, 1:])
            child = (before[:, 1:] > rest[:, None]).argmax(1)
            place = rows + child
            found = before.take(place)
            rest -= found
            node = (node << SHIFT) + child
            own = before.take(place + 1) - found
        smallest = self.least[-1].min() if len(self.least) else _smallest(nodes[None])[0]
        return node, own.astype(np.float32) / smallest

    def _leaves(self, rows: Int64s) -> Int64s:
        """What counts of rows of the first level, int64 ``[m, 16]``."""
        found = self.sums.take(rows, 0)
        return found if self.begins is None else found * self.begins.take(rows, 0)


def _smallest(weights: Int64s) -> Floats:
    found: Floats = np.where(weights > 0, weights.astype(np.float32), np.float32(np.inf)).min(1)
    return found
