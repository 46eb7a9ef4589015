"""Weights of rows: a sum tree of integers on the device, which draws as the sum tree on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mouse_core.replay import Priorities
from mouse_core.replay.samplers.weighing import Powers, bits_of, largest_weight, plus_bits, powers, weights_of
from mouse_torch import _philox
from mouse_torch.device.ground.kept import BufferModule, zeros
from mouse_torch.tracing import is_known

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
        rest = _philox.scaled_seen(words, int(ends[-1]))
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
        """Return the nodes of a level that count, int64 ``[m, 16]``."""
        found = self.sums[self.starts[level] :].take(rows, 0)
        return found if level or self.begins is None else found * self.begins.take(rows, 0)


def _across(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of 16 as ``[16, m]``: so NumPy sums up many side by side."""
    return np.ascontiguousarray(rows.T)


class Weights(BufferModule):
    """A tree in which a node is the sum of 16 children. Its levels lie one behind the other, in rows of 16 siblings.

    The first level has what rows of the replay weigh, by their slots; the last but one row is the root, and the last
    belongs to nobody: what is left out is written there.

    Args:
        capacity: How many slots there are.
        priorities: How priorities become weights.
        sliced: Whether only rows count at which a slice begins.
        device: Where it all lies.
    """

    sums: torch.Tensor
    """The weights and their sums, int64 ``[R, 16]``."""
    least: torch.Tensor
    """The smallest weight above 0 below each node, float32 ``[R', 16]``; of all levels but the first."""
    begins: torch.Tensor
    """Whether a slice begins at a row, bool, as the first level; others do not count."""
    largest: torch.Tensor
    """The priority of new rows, float32 ``[]``."""
    fresh: torch.Tensor
    """What they weigh, int64 ``[]``."""
    factors: torch.Tensor
    shifts: torch.Tensor
    pieces: torch.Tensor
    """See ``Powers``."""

    def __init__(self, capacity: int, priorities: Priorities, *, sliced: bool, device: torch.device) -> None:
        super().__init__()
        self.capacity, self.sliced = capacity, sliced
        self.alpha, self.beta, self.eps = float(priorities.alpha), priorities.beta, float(priorities.eps)
        # Where levels end, in rows; those of 1,000 slots have 63, 4 and 1 rows, and end at 63, 67 and 68.
        rows = -(-capacity // FAN)
        self.ends = [rows]
        while rows > 1:
            rows = -(-rows // FAN)
            self.ends.append(self.ends[-1] + rows)
        self.starts = [0, *self.ends]
        made: dict[str, torch.Tensor] = {
            "sums": zeros((self.ends[-1] + 1, FAN), torch.int64, device),
            "least": torch.full((self.ends[-1] - self.ends[0], FAN), torch.inf, dtype=torch.float32),
            "largest": torch.ones((), dtype=torch.float32),
        }
        if sliced:
            made["begins"] = torch.zeros((self.ends[0], FAN), dtype=torch.bool)
        tables, self._eps_bits = powers(self.alpha), bits_of(self.eps)
        self.bends_down, self.most = tables.bends_down, largest_weight(capacity, tables)
        made |= {name: torch.tensor(getattr(tables, name)) for name in ("factors", "shifts", "pieces")}
        for name, values in made.items():
            self.register_buffer(name, values.to(device), persistent=name not in ("factors", "shifts", "pieces"))
        self.register_buffer("fresh", self.weighed(self.largest.reshape(1))[0])

    def weighed(self, priority: torch.Tensor) -> torch.Tensor:
        """Return the integer weights of priorities, float32 ``[n]`` from 0, limited so that their sum fits."""
        tables = Powers(self.factors, self.shifts, self.pieces, self.bends_down, self.most)
        # Without the sign, which 0 may have.
        bits = priority.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
        found: torch.Tensor = weights_of(plus_bits(bits, self._eps_bits, torch), tables, torch)
        return found

    @property
    def total(self) -> torch.Tensor:
        """Return the sum of all weights, int64 ``[]``."""
        return self._root().sum()

    def _root(self) -> torch.Tensor:
        if len(self.ends) == 1:
            return self._leaves(torch.zeros(1, dtype=torch.int64, device=self.sums.device))[0]
        return self.sums[-2]

    def _leaves(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the leaves that count, int64 ``[m, 16]``."""
        found = self.sums.index_select(0, rows)
        return torch.where(self.begins.index_select(0, rows), found, 0) if self.sliced else found

    def refresh(self, nodes: torch.Tensor) -> None:
        """Sum again what is above some rows of the first level, int64 ``[m]``, of which any may come again."""
        if is_known(nodes):
            self.seen().refresh(nodes.numpy())
            return
        first = self.ends[0]
        children = self._leaves(nodes)
        total, smallest = children.sum(1), _smallest(children)
        for start in self.starts[1:-1]:
            child, nodes = nodes & (FAN - 1), nodes >> SHIFT
            rows = start + nodes
            # Where a node comes again the same is written.
            self.sums.index_put_((rows, child), total)
            self.least.index_put_((rows - first, child), smallest)
            total = self.sums.index_select(0, rows).sum(1)
            smallest = self.least.index_select(0, rows - first).amin(1)

    def seen(self) -> SeenWeights:
        """The tree, where one may look at it."""
        found = self.arrays()
        return SeenWeights(found["sums"], found["least"], found.get("begins"), self.starts)

    def drawn(self, words: torch.Tensor, beta: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots in proportion to what they weigh, int64 ``[B]``, and importance weights, float32 ``[B]``.

        Args:
            words: Random words.
            beta: The exponent of the importance weights.
        """
        if is_known(words):
            known, times = self.seen().drawn(words.numpy())
            return torch.from_numpy(known), torch.from_numpy(times) ** -beta
        root = self._root()
        rest, node = _philox.scaled(words, root.sum()), torch.zeros_like(words)
        for level in range(len(self.ends) - 1, 0, -1):
            # Where nothing weighs anything the last child is found, of which there may be no row.
            rows = (self.starts[level] + node).clamp(max=self.starts[level + 1] - 1)
            node, rest = _child(self.sums.index_select(0, rows), node, rest)
        node, _ = _child(self._leaves(node.clamp(max=self.ends[0] - 1)), node, rest)
        slots = node.clamp(max=self.capacity - 1)
        own = self.sums[_apart(slots)].to(torch.float32)
        smallest = _smallest(root[None])[0] if len(self.ends) == 1 else self.least[-1].amin()
        return slots, (own / smallest) ** -beta

    def fill(self, slots: torch.Tensor) -> None:
        """Weigh new rows; the tree is to be refreshed."""
        self.sums.index_put_(_apart(slots), self.fresh)

    def mark(self, slots: torch.Tensor, begins: torch.Tensor) -> None:
        """Say whether slices begin at some rows, none of which comes twice; the tree is to be refreshed."""
        self.begins.index_put_(_apart(slots), begins)

    def marked(self, slots: torch.Tensor) -> torch.Tensor:
        """Whether slices begin at some rows."""
        return self.begins[_apart(slots)]

    def update(self, rows: torch.Tensor, slots: torch.Tensor, priority: torch.Tensor) -> None:
        """Set priorities of some slots, float32 ``[n]``; of a slot that comes twice the last one counts.

        Args:
            rows: How many slots are in use; others are left out.
            slots: Int64 ``[n]``.
            priority: Those that are negative or NaN are left out.
        """
        there = (slots >= 0) & (slots < rows) & (priority >= 0)
        # One that is infinite is the largest number there is, for a state has none.
        priority = torch.where(there, priority, 0).clamp(max=torch.finfo(torch.float32).max)
        self.largest.copy_(torch.maximum(self.largest, priority.amax()))
        new = self.weighed(torch.cat([priority, self.largest.reshape(1)]))
        self.fresh.copy_(new[-1])
        # Of those with one slot the last is written, and the others where what belongs to nobody is.
        nowhere = (self.sums.shape[0] - 1) * FAN
        place, order = torch.where(there, slots, nowhere).sort(stable=True)
        last = torch.cat([place[1:] != place[:-1], there.new_ones(1)])
        self.sums.index_put_(_apart(torch.where(last, place, nowhere)), new.index_select(0, order))
        self.refresh(torch.where(there, slots, 0) >> SHIFT)

    def units(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the weights of the first slots as a NumPy array, int64 ``[rows]``."""
        found: npt.NDArray[np.int64] = self.sums.view(-1)[:rows].cpu().numpy().copy()
        return found

    def take(self, units: npt.NDArray[np.int64], largest: float) -> None:
        """Go on with what ``units`` said, and the priority of new rows."""
        self.sums.view(-1)[: len(units)].copy_(torch.from_numpy(units))
        self.largest.fill_(largest)
        self.fresh.copy_(self.weighed(self.largest.reshape(1))[0])
        self.refresh(torch.arange(self.ends[0], device=self.sums.device))


def _apart(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of slots and their places there.

    Each buffer is read and written in one shape: where one is viewed in another, what torch compiles copies all of it.
    """
    return slots >> SHIFT, slots & (FAN - 1)


def _smallest(weights: torch.Tensor) -> torch.Tensor:
    return torch.where(weights > 0, weights.to(torch.float32), torch.inf).amin(1)


def _child(children: torch.Tensor, node: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The child of each node in which the sum of all before it and itself passes the rest, and what is left then."""
    sums = children.cumsum(1)[:, :-1]
    passed = sums <= rest[:, None]
    # Sums do not fall, so the last that is passed is the largest.
    return node * FAN + passed.sum(1), rest - torch.where(passed, sums, 0).amax(1)


def touched(begin: torch.Tensor, count: int, capacity: int) -> torch.Tensor:
    """Rows of the first level with any of so many slots from one on, round the end of a ring; int64 ``[m]``."""
    behind = torch.arange(0, count + FAN - 1, FAN, device=begin.device).clamp(max=count - 1)
    slots = begin + behind
    # The nodes at the end of the ring and at its begin may have no slot at such a distance.
    wraps = begin + count > capacity
    last = slots[-1:] % capacity
    ends = torch.cat([torch.where(wraps, 0, last), torch.where(wraps, capacity - 1, last)])
    return torch.cat([slots % capacity, ends]) >> SHIFT
