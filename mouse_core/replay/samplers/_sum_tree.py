"""A sum tree in NumPy: numbers under a changing set of weights, drawn in proportion to them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mouse_core.errors import ConfigError
from mouse_core.randomness import Key
from mouse_core.replay.ground.protocols import Slots

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# A node sums 16 children: 128 bytes, two cache lines. A tree twice as wide has fewer levels and costs more.
_FAN = 16
_SHIFT = 4
# The topmost level is summed up as a whole for every draw after a change; above so many nodes a level more is faster.
_TOP = 4096
_ONE = np.uint64(1)
_NONE = np.iinfo(np.uint64).max
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


class SumTree:
    """Integer weights of the numbers ``0 .. size - 1``: draws in proportion to them, their sum, the smallest above 0.

    Sums are exact: nothing drifts, and nothing depends on the order of changes or on how the tree is built. All
    operations take arrays and cost ``O(n log size)`` for ``n`` numbers.

    With 2 children a node instead of 16, the weights 3, 0, 1, 2 have the nodes 3 and 3 above them, and the total is 6.
    A random number of 3/4 looks for 4 (4.5, cut off): that is beyond the first node, so 1 is left for the second, whose
    children are 1 and 2; it is beyond the first of these, too, so number 3 is drawn.

    Args:
        size: How many numbers, at least 1. All weights are 0 at first. They must sum up to less than ``2**63``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sums: list[Int64s] = []
        # The smallest weight below each node, less one: zero, which stands for no weight, becomes the largest of all.
        # Not kept for the leaves.
        self._mins: list[Words] = []
        nodes = -(-size // _FAN) * _FAN
        self._sums.append(np.zeros(nodes, np.int64))
        while nodes > _TOP:
            nodes = -(-nodes // (_FAN * _FAN)) * _FAN
            self._sums.append(np.zeros(nodes, np.int64))
            self._mins.append(np.full(nodes, _NONE, np.uint64))
        self._cumulative: Int64s | None = None

    @property
    def weights(self) -> Int64s:
        """The weights, int64 ``[size]``; a view that must not be written to."""
        return self._sums[0][: self.size]

    @property
    def total(self) -> int:
        """The sum of all weights."""
        return int(self._sum_up()[-1])

    @property
    def smallest(self) -> int:
        """The smallest weight above zero; 0 where there is none."""
        words = self._mins[-1] if self._mins else self._sums[0].view(np.uint64) - _ONE
        return (int(words.min()) + 1) % (1 << 64)

    def set(self, numbers: Int64s, weights: Int64s | int) -> None:
        """Give ``numbers`` (int64 ``[n]``) new weights, not negative; of a number that comes twice the last counts.

        Args:
            numbers: Each in ``0 .. size - 1``.
            weights: Int64 ``[n]``, or one for all.
        """
        self._sums[0][numbers] = weights
        self._cumulative = None
        nodes = numbers
        for level in range(len(self._mins)):
            if len(nodes) * _FAN > len(self._sums[level]):
                self._add_up(level, 0, len(self._sums[level + 1]))
                continue
            nodes = nodes >> _SHIFT
            children = self._sums[level].reshape(-1, _FAN).take(nodes, axis=0)
            self._sums[level + 1][nodes] = np.add.reduce(children, axis=1)
            if level:
                words = self._mins[level - 1].reshape(-1, _FAN).take(nodes, axis=0)
            else:
                words = children.view(np.uint64) - _ONE
            self._mins[level][nodes] = np.minimum.reduce(words, axis=1)

    def fill(self, begin: int, end: int, weight: int) -> None:
        """Give the numbers ``begin .. end - 1`` one weight."""
        self._sums[0][begin:end] = weight
        self._add_up_all(begin, end)

    def assign(self, weights: Int64s) -> None:
        """Give the numbers ``0 .. len(weights) - 1`` these weights and all others 0."""
        self._sums[0][: len(weights)] = weights
        self._sums[0][len(weights) :] = 0
        self._add_up_all(0, self.size)

    def grown(self, size: int, most: int) -> SumTree:
        """A tree of so many numbers, at least as many, of which the first have the weights of these, up to ``most``."""
        tree = SumTree(size)
        tree.assign(np.minimum(self.weights, most))
        return tree

    def draw(self, words: Words) -> Int64s:
        """Numbers drawn in proportion to their weights; one of weight 0 is never drawn.

        Args:
            words: Where in the total to look, in ``2**-64`` of it, uint64 ``[n]``. The total must be above 0.

        Returns:
            int64 ``[n]``.
        """
        cumulative = self._sum_up()
        rest = _scaled(words, int(cumulative[-1]))  # what is left to look for, of each
        nodes: Int64s = cumulative[1:].searchsorted(rest, side="right")
        rest -= cumulative[nodes]
        rows = np.arange(0, len(words) * (_FAN + 1), _FAN + 1)
        sums = np.zeros((len(words), _FAN + 1), np.int64)
        flat = sums.reshape(-1)
        for level in range(len(self._mins) - 1, -1, -1):
            # The sums of the first 0, 1, .. 16 children of each node: the child is the first that ends beyond the rest.
            children = self._sums[level].reshape(-1, _FAN).take(nodes, axis=0)
            np.add.accumulate(children, axis=1, out=sums[:, 1:])
            chosen = (sums[:, 1:] > rest[:, None]).argmax(axis=1)
            rest -= flat.take(rows + chosen)
            nodes = (nodes << _SHIFT) + chosen
        return nodes

    def _sum_up(self) -> Int64s:
        """The sums of the first 0, 1, 2, ... nodes of the topmost level."""
        if self._cumulative is None:
            top = self._sums[-1]
            cumulative = np.zeros(len(top) + 1, np.int64)
            np.add.accumulate(top, out=cumulative[1:])
            self._cumulative = cumulative
        return self._cumulative

    def _add_up_all(self, begin: int, end: int) -> None:
        self._cumulative = None
        for level in range(len(self._mins)):
            begin, end = begin >> _SHIFT, -(-end >> _SHIFT)
            self._add_up(level, begin, end)

    def _add_up(self, level: int, begin: int, end: int) -> None:
        """Make the nodes ``begin .. end - 1`` above ``level`` anew from their children."""
        within = slice(begin * _FAN, end * _FAN)
        children = self._sums[level][within]
        words = self._mins[level - 1][within] if level else children.view(np.uint64) - _ONE
        parents = slice(begin, begin + len(children) // _FAN)  # the level's last nodes may have no children
        self._sums[level + 1][parents] = np.add.reduce(children.reshape(-1, _FAN), axis=1)
        self._mins[level][parents] = np.minimum.reduce(words.reshape(-1, _FAN), axis=1)


def _scaled(words: Words, total: int) -> Int64s:
    """``floor(word * total / 2**64)`` of each, int64 ``[n]``; the total is below ``2**63``."""
    high, low = np.uint64(total >> 32), np.uint64(total & 0xFFFFFFFF)
    upper, lower = words >> _HALF, words & _LOW
    # The product of halves, each of which has 64 bits with what is carried over from the one below.
    middle = upper * low + ((lower * low) >> _HALF)
    carried = (lower * high + (middle & _LOW)) >> _HALF
    product: Words = upper * high + (middle >> _HALF) + carried
    return product.view(np.int64)


def draw_slots(tree: SumTree, n: int, key: Key) -> Slots:
    """``n`` slots in proportion to a tree's weights, int64 ``[n]``.

    Raises:
        ConfigError: All weights are 0.
    """
    if not tree.total:
        raise ConfigError("sample: expected a priority above 0, found that of every row to be 0 (and eps=0)")
    return tree.draw(key.bits(n))


def importance_weights(tree: SumTree, slots: Slots, beta: float) -> npt.NDArray[np.float32]:
    """``(p_i / p_min) ** -beta`` of the ``slots``, float32 of their shape."""
    return ((tree.weights[slots] / tree.smallest) ** -beta).astype(np.float32)
