"""The weights of rows: a sum tree of integers with the same draws as the sum tree on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mouse_core.replay.device.arrays import FAN, SHIFT, Arrays, DrawKey, State
from mouse_core.replay.samplers.weighing import largest_weight, powers

_LARGEST = float(np.finfo(np.float32).max)
_NO_WEIGHT = 1 << 62  # above all weights, which are at most 2**60


@dataclass(frozen=True)
class SumTree:
    """A tree in which each node is the sum of its 16 children. The levels are stored one after another, in rows of 16
    siblings.

    The first level contains the weights of the replay's rows, indexed by slot; the last level is a single row. The tree
    consists of these arrays of a state:

    - ``sums``: the weights and their sums, wide ``[R + 1, 16]``; the last row is not used;
    - ``least``: the smallest positive weight among the leaves below each node, float32 ``[R', 16]``, for all levels
      except the first;
    - ``begins``: whether a slice begins at each row, bool, in the shape of the first level; other rows are not drawn;
    - ``fresh``: the weight of new rows, wide ``[]``;
    - ``largest``: the priority of new rows, float32 ``[]``.

    Args:
        capacity: The number of slots.
        alpha, eps: The parameters of the conversion from priorities to weights; see
            ``mouse_core.replay.PrioritizedSampler``.
        sliced: Whether only rows at which a slice begins are drawn.
    """

    capacity: int
    alpha: float
    eps: float
    sliced: bool

    @cached_property
    def starts(self) -> list[int]:
        """The index of the first row of each level, followed by the total number of rows. Example: for 1,000 slots the
        levels have 63, 4 and 1 rows, so the result is 0, 63, 67, 68.
        """
        rows = -(-self.capacity // FAN)
        starts = [0, rows]
        while rows > 1:
            rows = -(-rows // FAN)
            starts.append(starts[-1] + rows)
        return starts

    def init(self, xp: Arrays) -> State:
        """Return a tree in which all weights are 0 and new rows get priority 1."""
        end, first = self.starts[-1], self.starts[1]
        state = {
            "sums": xp.wide_memory(end + 1),
            "least": xp.full((max(end - first, 1), FAN), float(_NO_WEIGHT), "float"),
        }
        if self.sliced:
            state["begins"] = xp.full((first, FAN), False, "bool")
        largest = xp.full((1,), 1, "float")
        return state | {"fresh": self._weigh(xp, largest)[0], "largest": largest[0]}

    @cached_property
    def most(self) -> int:
        """The largest weight of a row."""
        return largest_weight(self.capacity, powers(self.alpha))

    def _weigh(self, xp: Arrays, priority: Any) -> Any:
        with xp.wide():
            return xp.pack(xp.weights(priority, self.alpha, self.eps, self.most))

    def _leaves(self, xp: Arrays, state: State, rows: Any) -> Any:
        """Return rows of leaves, with weight 0 for rows that cannot be drawn, wide ``[m, 16]``; called within
        ``wide()``.
        """
        found = xp.unpack(xp.take(state["sums"], rows))
        return found * xp.take(state["begins"], rows) if self.sliced else found

    def _level(self, xp: Arrays, state: State, level: int) -> Any:
        """Return all nodes of a level, wide ``[n]``; called within the context ``wide()``."""
        begin, end = self.starts[level : level + 2]
        rows = begin + xp.range(end - begin)
        found = xp.unpack(xp.take(state["sums"], rows)) if level else self._leaves(xp, state, rows)
        return found.reshape(-1)

    def some(self, xp: Arrays, state: State) -> Any:
        """Return 1 if any weight is above 0, else 0, as an index ``[]``."""
        with xp.wide():
            found = (self._level(xp, state, len(self.starts) - 2) > 0).any()
        return xp.cast(found, "index")

    def refresh(self, xp: Arrays, state: State, nodes: Any) -> State:
        """Recompute all nodes above the changed rows ``[m]`` of the first level; a row may occur twice."""
        levels, first = len(self.starts) - 1, self.starts[1]
        if levels == 1:
            return state
        with xp.wide():
            starts = xp.table(self.starts)

            def put(level: Any, sums: Any, least: Any, nodes: Any, found: Any) -> tuple[Any, Any]:
                """Write the sums and least weights of nodes of a level; if a node occurs twice, its values are
                equal.
                """
                # All values are read before any value is written, so that a compiler can write in place.
                total, smallest = xp.once((xp.pack(found[0]), found[1]))
                sums = xp.scatter(sums, starts[level] * FAN + nodes, total)
                return sums, xp.scatter(least, (starts[level] - first) * FAN + nodes, smallest)

            def step(level: Any, kept: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                sums, least, nodes = kept
                total = xp.total(xp.unpack(xp.take(sums, starts[level] + nodes)))
                found = total, xp.lowest(xp.take(least, starts[level] - first + nodes))
                return *put(level + 1, sums, least, nodes, found), above(nodes, level + 1)

            def above(nodes: Any, level: Any) -> Any:
                return xp.above(nodes, starts[level + 1] - starts[level])

            kept = put(1, state["sums"], state["least"], nodes, _summed(xp, self._leaves(xp, state, nodes)))
            sums, least, _ = xp.loop(1, levels - 1, step, (*kept, above(nodes, 1)))
        return state | {"sums": sums, "least": least}

    def draw(self, xp: Arrays, state: State, key: DrawKey, size: int) -> tuple[Any, Any, Any]:
        """Draw ``size`` (B) slots in proportion to their weights. Return the slots, ``[B]``; the weights of these slots
        divided by the smallest weight, float32 ``[B]``; and the sum of all weights.
        """
        words, levels = xp.words(key, size), len(self.starts) - 1
        # The level at which a search begins: the root, or the lowest level of at most ``top_rows`` rows.
        top = next(level for level in range(levels) if self.starts[level + 1] - self.starts[level] <= xp.top_rows)
        with xp.wide():
            starts, nodes = xp.table(self.starts), self._level(xp, state, top)
            total = nodes.sum()
            rest = xp.scaled(words, total)
            node, before = xp.child(nodes[None], rest)

            def step(number: Any, kept: tuple[Any, Any]) -> tuple[Any, Any]:
                # If all weights are 0, the search finds the last child, which may have no row.
                node, rest = kept
                level = top - 1 - number
                rows = xp.minimum(starts[level] + node, starts[level + 1] - 1)
                child, before = xp.child(xp.unpack(xp.take(state["sums"], rows)), rest)
                return node * FAN + child, rest - before

            node, rest = xp.loop(0, top - 1, step, (node, rest - before))
            if top:
                child, _ = xp.child(self._leaves(xp, state, xp.minimum(node, self.starts[1] - 1)), rest)
                node = node * FAN + child
            slots = xp.once(xp.minimum(node, self.capacity - 1))
            own = xp.cast(xp.unpack(xp.at(state["sums"], slots >> SHIFT, slots & (FAN - 1))), "float")
            smallest = _summed(xp, nodes[None])[1][0] if levels == 1 else xp.lowest(state["least"][-1:])[0]
            times = own / smallest
            # The caller may write to the tree as soon as it has the slots. A compiler writes in place only if all reads
            # come first.
            return xp.behind(slots, times), times, total

    def update(self, xp: Arrays, state: State, rows: Any, slots: Any, priority: Any) -> State:
        """Set the priorities of slots, float32 ``[n]``; if a slot occurs twice, its last priority counts.

        Args:
            xp: The array functions of the framework.
            state: The tree.
            rows: The number of slots in use; other slots are ignored.
            slots: Indices ``[n]``.
            priority: The priorities; negative priorities and NaN are ignored.
        """
        there = (slots >= 0) & (slots < rows) & (priority >= 0)
        # Infinity becomes the largest finite number, as a state must not contain infinity.
        priority = xp.where(there, priority, 0).clip(max=_LARGEST)
        largest = xp.maximum(state["largest"], priority.max())
        new = self._weigh(xp, xp.concat([priority, largest.reshape(1)]))
        sums = xp.overwrite(state["sums"], slots, there, new[:-1])
        changed = state | {"sums": sums, "fresh": new[-1], "largest": largest}
        return self.refresh(xp, changed, xp.where(there, slots, 0) >> SHIFT)

    def assign(self, xp: Arrays, state: State, units: Any, largest: float) -> State:
        """Set the weights of the first slots to ``units``, wide ``[n]``, and the priority of new rows to
        ``largest``.
        """
        priority = xp.full((1,), largest, "float")
        sums = xp.scatter(state["sums"], xp.range(len(units)), xp.pack(units), unique=True)
        changed = state | {"sums": sums, "fresh": self._weigh(xp, priority)[0], "largest": priority[0]}
        return self.refresh(xp, changed, xp.range(self.starts[1]))


def _summed(xp: Arrays, weights: Any) -> tuple[Any, Any]:
    """Return the sum of each row of 16 weights, and the smallest positive weight of each row (2**62 if a row has no
    positive weight); called within the context ``wide()``.
    """
    return xp.total(weights), xp.cast(xp.lowest(xp.where(weights > 0, weights, _NO_WEIGHT)), "float")


def touched(xp: Arrays, begin: Any, count: int, capacity: int) -> Any:
    """Return the rows ``[m]`` of the first level that contain the ``count`` slots from ``begin`` on; these slots may
    wrap around the end of the ring.
    """
    behind = xp.minimum(xp.range(-(-(count + FAN - 1) // FAN)) * FAN, count - 1)
    slots = (begin + behind) % capacity
    # The first and last nodes of the ring may contain none of these slots.
    wraps = begin + count > capacity
    ends = xp.concat([xp.where(wraps, 0, slots[-1:]), xp.where(wraps, capacity - 1, slots[-1:])])
    return xp.concat([slots, ends]) >> SHIFT
