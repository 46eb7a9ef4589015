"""Prioritised sampling of single rows (Schaul et al., "Prioritized Experience Replay", ICLR 2016)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.dtypes import to_numpy
from mouse_core.errors import ConfigError, RowIndexError, StateError
from mouse_core.randomness import Key
from mouse_core.replay.protocols import Draw, Slots, Storage, Write
from mouse_core.replay.samplers import weighing
from mouse_core.replay.samplers.rows import BaseSampler, rows_in
from mouse_core.spec import check_count, check_number

Int64s = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# A node sums 16 children: 128 bytes, two cache lines. A tree twice as wide has fewer levels and costs more.
_FAN = 16
_SHIFT = 4
# The topmost level is summed as a whole for every draw after a change; with more nodes another level is faster.
_TOP = 4096
_ONE = np.uint64(1)
_NONE = np.iinfo(np.uint64).max
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


class SumTree:
    """A sum tree of integer weights for the indices ``0 .. size - 1``. The tree draws indices in proportion to their
    weights, and provides the sum of all weights and the smallest positive weight.

    Sums are exact integers: they have no rounding errors, and do not depend on the order of changes or on the shape of
    the tree. All operations take arrays and cost ``O(n log size)`` for ``n`` indices.

    Example with 2 children per node instead of 16: the weights 3, 0, 1, 2 have the parents 3 and 3, and the total is 6.
    A random number of 3/4 gives the target 4 (3/4 of the total 6, rounded down). The first node covers the targets 0 to
    2, so the search continues in the second node with the rest 4 - 3 = 1. The children of the second node have the
    weights 1 and 2. The first child covers only a rest of 0, so the second child, which has index 3, is drawn.

    Args:
        size: The number of indices, at least 1. All weights are 0 at first. The sum of the weights must be less than
            ``2**63``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sums: list[Int64s] = []
        # The smallest weight below each node, minus 1 in unsigned arithmetic, so that weight 0, which is never drawn,
        # becomes the largest number. The leaves have no such array.
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
        """The weights, int64 ``[size]``, as a read-only view."""
        return self._sums[0][: self.size]

    @property
    def total(self) -> int:
        """The sum of all weights."""
        return int(self._sum_up()[-1])

    @property
    def smallest(self) -> int:
        """The smallest positive weight; 0 if all weights are 0."""
        words = self._mins[-1] if self._mins else self._sums[0].view(np.uint64) - _ONE
        return (int(words.min()) + 1) % (1 << 64)

    def set(self, numbers: Int64s, weights: Int64s | int) -> None:
        """Set the weights of the indices ``numbers`` (int64 ``[n]``); if an index occurs twice, its last weight counts.

        Args:
            numbers: Indices, ``0 <= index < size``.
            weights: Weights of at least 0, int64 ``[n]``; or one weight for all indices.
        """
        self._sums[0][numbers] = weights
        self._cumulative = None
        nodes = numbers
        for level in range(len(self._mins)):
            if len(nodes) * _FAN > len(self._sums[level]):
                self._add_up(level, 0, len(self._sums[level + 1]))
                continue
            nodes = nodes >> _SHIFT
            children = _columns(self._sums[level], nodes)
            words = _columns(self._mins[level - 1], nodes) if level else children.view(np.uint64) - _ONE
            self._sums[level + 1][nodes] = np.add.reduce(children)
            self._mins[level][nodes] = np.minimum.reduce(words)

    def fill(self, begin: int, end: int, weight: int) -> None:
        """Set the same weight for all indices ``begin .. end - 1``."""
        self._sums[0][begin:end] = weight
        self._add_up_all(begin, end)

    def assign(self, weights: Int64s) -> None:
        """Set the weights of the indices ``0 .. len(weights) - 1``; all other indices get the weight 0."""
        self._sums[0][: len(weights)] = weights
        self._sums[0][len(weights) :] = 0
        self._add_up_all(0, self.size)

    def grown(self, size: int, most: int) -> SumTree:
        """Return a larger tree for ``size`` indices with the same weights; weights above ``most`` become ``most``."""
        tree = SumTree(size)
        tree.assign(np.minimum(self.weights, most))
        return tree

    def draw(self, words: Words) -> Int64s:
        """Return indices drawn in proportion to their weights; an index with weight 0 is never drawn.

        Args:
            words: Random numbers, uint64 ``[n]``: a number w selects the position ``w * total * 2**-64`` in the
                cumulative weights. The total of the weights must be above 0.

        Returns:
            int64 ``[n]``.
        """
        cumulative = self._sum_up()
        rest = scaled(words, int(cumulative[-1]))  # the distance from the start of the found node to each target
        nodes: Int64s = cumulative[1:].searchsorted(rest, side="right")
        rest -= cumulative[nodes]
        rows = np.arange(0, len(words) * (_FAN + 1), _FAN + 1)
        sums = np.zeros((len(words), _FAN + 1), np.int64)
        flat = sums.reshape(-1)
        for level in range(len(self._mins) - 1, -1, -1):
            # The sums of the first 0, 1, ..., 16 children of each node. The chosen child is the last child in the first
            # sum above ``rest``.
            children = self._sums[level].reshape(-1, _FAN).take(nodes, axis=0)
            np.add.accumulate(children, axis=1, out=sums[:, 1:])
            chosen = (sums[:, 1:] > rest[:, None]).argmax(axis=1)
            rest -= flat.take(rows + chosen)
            nodes = (nodes << _SHIFT) + chosen
        return nodes

    def _sum_up(self) -> Int64s:
        """Return the sums of the first 0, 1, 2, ... nodes of the topmost level."""
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
        """Recompute the parents ``begin .. end - 1`` of the nodes of ``level``."""
        within = slice(begin * _FAN, end * _FAN)
        children = self._sums[level][within]
        words = self._mins[level - 1][within] if level else children.view(np.uint64) - _ONE
        parents = slice(begin, begin + len(children) // _FAN)  # the level's last nodes may have no children
        self._sums[level + 1][parents] = np.add.reduce(children.reshape(-1, _FAN), axis=1)
        self._mins[level][parents] = np.minimum.reduce(words.reshape(-1, _FAN), axis=1)


def _columns(level: npt.NDArray[Any], nodes: Int64s) -> npt.NDArray[Any]:
    """Return the children of nodes as columns, ``[16, n]``, because NumPy reduces the first axis faster than the
    second.
    """
    return np.ascontiguousarray(level.reshape(-1, _FAN).take(nodes, axis=0).T)


def scaled(words: Words, total: int) -> Int64s:
    """Return ``floor(word * total / 2**64)`` for each word, int64 ``[n]``; ``total`` must be below ``2**63``."""
    high, low = np.uint64(total >> 32), np.uint64(total & 0xFFFFFFFF)
    upper, lower = words >> _HALF, words & _LOW
    # Products of 32-bit halves; each sum with the carry of the lower product has at most 64 bits.
    middle = upper * low + ((lower * low) >> _HALF)
    carried = (lower * high + (middle & _LOW)) >> _HALF
    product: Words = upper * high + (middle >> _HALF) + carried
    return product.view(np.int64)


def draw_slots(tree: SumTree, n: int, key: Key) -> Slots:
    """Return ``n`` slots drawn in proportion to a tree's weights, int64 ``[n]``.

    Raises:
        ConfigError: All weights are 0.
    """
    if not tree.total:
        raise ConfigError("sample: expected a priority above 0, found priority 0 in every row (and eps=0)")
    return tree.draw(key.bits(n))


def importance_weights(tree: SumTree, slots: Slots, beta: float) -> npt.NDArray[np.float32]:
    """Return ``(p_i / p_min) ** -beta`` of the rows in ``slots``, float32, in the shape of ``slots``."""
    return ((tree.weights[slots] / tree.smallest) ** -beta).astype(np.float32)


Floats = npt.NDArray[np.float64]
Beta = float | Callable[[int], float]
"""A number, or a function that takes the index of the sample (0, 1, 2, ...) and returns a number."""


@dataclass(frozen=True)
class LinearSchedule:
    """A number that changes from ``start`` to ``end`` in equal steps and then stays at ``end``.

    Args:
        start: The value at sample 0.
        end: The value from sample ``samples`` on.
        samples: The number of samples over which the value changes, at least 1.

    Raises:
        ConfigError: A value is not finite, or ``samples`` is below 1.
    """

    start: float
    end: float
    samples: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise ConfigError(f"LinearSchedule: expected finite numbers, found {self.start}, {self.end}")
        check_count("LinearSchedule: samples", self.samples)

    def __call__(self, sample: Any) -> Any:
        """Return the value at ``sample``, an integer or a (possibly traced) array ``[]`` of any framework."""
        part = sample / self.samples
        return self.start + (self.end - self.start) * (
            min(part, 1.0) if isinstance(part, float) else part.clip(max=1.0)
        )


class PrioritizedSampler(BaseSampler):
    """Draws rows independently in proportion to ``p_i = (priority_i + eps) ** alpha``.

    New rows, and rows that are changed in place, get the largest priority that was ever set, at least 1. A batch also
    has importance weights ``(p_i / p_min) ** -beta``, where ``p_min`` is the smallest ``p`` of all rows, so weights are
    at most 1. A row whose ``p`` is 0 (priority and ``eps`` both 0) is never drawn and does not count for ``p_min``.

    Priorities are float32. The weight of a row is an integer: ``p_i`` in units of ``2**-24``, at least one unit. For
    ``alpha`` up to 2, the error of a weight is at most a relative ``2**-27`` plus half a unit. Weights are computed and
    summed without floats, so draws are bit-identical on every machine. The sum of all weights must be less than
    ``2**63`` units, so in a buffer of 1 million rows each ``p`` can be at most 549,755. With 10 million rows the limit
    of ``p`` is 54,975, which is a priority of 79 million for ``alpha=0.6``. If the capacity of a buffer grows, larger
    weights are reduced to the new limit.

    Args:
        alpha: The exponent of priorities, in ``[0, 8]``; with 0, all rows are equally likely.
        beta: The exponent of the importance weights, at least 0; 1 corrects the bias completely. ``beta`` is a number,
            or a function that takes the index of the buffer's sample (0, 1, 2, ...) and returns a number, such as
            ``LinearSchedule(0.4, 1.0, samples=100_000)``. The attribute ``beta`` can be set at any time.
        eps: The number that is added to every priority: 0, or in ``[2**-100, 2**100]``.
        max_priority_within_buffer: Whether new rows get the largest current priority instead of the largest priority
            ever set. With True, new rows no longer get a very large priority after that priority was lowered; the cost
            is that every update reads all priorities.

    Raises:
        ConfigError: A number is out of range.
    """

    _kinds: Mapping[str, type | str] = {"weights": "i", "max_priority": float, "beta": float}

    def __init__(
        self, alpha: float = 0.6, beta: Beta = 0.4, eps: float = 1e-8, *, max_priority_within_buffer: bool = False
    ) -> None:
        self._within = bool(max_priority_within_buffer)
        self._alpha, self._eps = weighing.check_alpha(alpha), weighing.check_eps(eps)
        self.beta = beta
        self._set_largest(1.0)
        self._tree: SumTree | None = None
        # The weights of the first rows, until the tree is created from the storage's capacity; all other rows are new.
        self._known: Int64s = np.zeros(0, np.int64)
        self._size = 0  # the number of rows with weights in the tree

    def __repr__(self) -> str:
        return f"PrioritizedSampler(alpha={self.alpha}, beta={self.beta!r}, eps={self.eps}{self._shown_within()})"

    def _shown_within(self) -> str:
        return ", max_priority_within_buffer=True" if self._within else ""

    @property
    def alpha(self) -> float:
        """The exponent of priorities."""
        return self._alpha

    @property
    def eps(self) -> float:
        """The number that is added to every priority."""
        return self._eps

    @property
    def adds(self) -> tuple[str, ...]:
        """The names of the fields that a draw adds, which rows cannot have."""
        return ("priority_weight",)

    @property
    def beta(self) -> Beta:
        """The exponent of the importance weights, or a schedule of this exponent."""
        return self._beta

    @beta.setter
    def beta(self, beta: Beta) -> None:
        self._beta = beta if callable(beta) else check_number("beta", beta)

    def _set_largest(self, largest: float) -> None:
        bits = weighing.sums_of(weighing.narrowed(np.array([largest])), self._eps)
        self._weight_of_new = int(weighing.weights_of(bits, self._powers)[0])
        self.max_priority = largest

    def _set_largest_weight(self, weight: int) -> None:
        """Set the weight of new rows to the largest current weight."""
        if not weight:  # otherwise no row would ever be drawn
            self._set_largest(1.0)
            return
        self._weight_of_new = weight
        self.max_priority = max((weight / weighing.UNIT) ** (1 / self._alpha) - self._eps, 0.0) if self._alpha else 1.0

    @property
    def _powers(self) -> weighing.Powers:
        return weighing.powers(self._alpha)

    def _most(self, capacity: int) -> int:
        """Return the largest weight of a row in a buffer of ``capacity`` rows."""
        return weighing.largest_weight(capacity, self._powers)

    def wrote(self, storage: Storage, write: Write) -> None:
        """Give the written rows the largest priority."""
        slots = write.slots
        if not len(slots) or write.keeps_priority:
            return
        tree = self._settle(storage)
        weight = min(self._weight_of_new, self._most(tree.size))
        if (np.diff(slots) == 1).all():
            tree.fill(int(slots[0]), int(slots[-1]) + 1, weight)
        else:
            tree.set(slots, weight)
        self._size = len(storage)

    def reset(self, storage: Storage) -> None:
        """Discard all priorities; all rows then count as new rows."""
        self._set_largest(1.0)
        self._tree, self._known = None, np.zeros(0, np.int64)

    def dropped(self, storage: Storage, rows: int) -> None:
        """Remove the oldest rows, and add the new rows after the remaining rows; see ``Sampler``.

        Example: three rows have the priorities 5, 1, 3. If the first row is dropped and two rows are new, the
        priorities are 1, 3, 5, 5.
        """
        self._tree, self._known = None, self._weights()[rows:].copy()
        if self._within:
            self._set_largest_weight(int(self._known.max(initial=0)))

    def _weights(self) -> Int64s:
        """Return the weights of the rows that the tree contains; all later rows count as new rows."""
        return self._known if self._tree is None else self._tree.weights[: self._size]

    def _settle(self, storage: Storage) -> SumTree:
        """Return the tree with the weights of all rows."""
        if self._tree is None or self._tree.size != storage.capacity:
            known, tree = self._weights(), SumTree(storage.capacity)
            if len(known) > tree.size:
                raise StateError(f"sampler: expected {tree.size} weights or fewer, found {len(known)}")
            most = self._most(tree.size)
            tree.assign(np.minimum(known, most))
            if len(known) < len(storage):
                tree.fill(len(known), len(storage), min(self._weight_of_new, most))
            self._tree, self._size = tree, len(storage)
        return self._tree

    def draw(self, storage: Storage, batch_size: int, key: Key) -> Draw:
        """Draw ``batch_size`` slots in proportion to their weights; the result contains importance weights, float32
        ``[batch_size]``.

        Raises:
            ConfigError: The storage is empty, all weights are 0, or the schedule returns an invalid beta.
        """
        rows_in(storage)
        tree = self._settle(storage)
        index = draw_slots(tree, batch_size, key)
        return Draw(index, priority_weight=importance_weights(tree, index, beta_at(self._beta, key.index)))

    def update_priority(self, storage: Storage, index: Slots, priority: npt.NDArray[Any]) -> None:
        """Set the priorities of rows; if a slot occurs twice, its last priority counts.

        Args:
            storage: The storage of the rows.
            index: The slots of the rows, integers of any shape, like the field ``index`` of a batch.
            priority: Numbers of at least 0, in the shape of ``index``, optionally with further axes of length 1; or one
                number for each slice, ``[B]`` or ``[B, 1]``.

        Raises:
            DataError: A priority is negative, not finite in float32, or above the limit for the capacity.
            IndexError: A slot is not in use.
            ConfigError: The shape of ``priority`` does not match the shape of ``index``, or ``index`` does not contain
                integers.

        After an error the priorities are unchanged.
        """
        slots, weights, largest = self._checked(storage, index, priority)
        tree = self._settle(storage)
        tree.set(slots, weights)
        if self._within:
            self._set_largest_weight(int(tree.weights.max()))
        elif largest > self.max_priority:
            self._set_largest(largest)

    def check_update(self, storage: Storage, index: Slots | None, priority: npt.NDArray[Any]) -> None:
        """Raise the errors of ``update_priority`` without a change; ``index`` is None for rows that are not written
        yet.
        """
        if index is None:
            weighing.weighed(np.asarray(priority), storage.capacity, self._alpha, self._eps)
        else:
            self._checked(storage, index, priority)

    def _checked(self, storage: Storage, index: Slots, priority: npt.NDArray[Any]) -> tuple[Slots, Int64s, float]:
        """Return the slots ``[n]``, weights ``[n]`` and largest priority of an update; raise the errors of
        ``update_priority``.
        """
        slots = to_numpy(index)
        if slots.dtype.kind not in "iu" and slots.size:
            raise ConfigError(f"update_priority: expected integers as index, found {slots.dtype}")
        values = weighing.priorities_like(slots, priority)
        slots, rows = slots.reshape(-1).astype(np.int64, copy=False), len(storage)
        if slots.size and not (slots.min() >= 0 and slots.max() < rows):
            outside = slots[(slots < 0) | (slots >= rows)][0]
            raise RowIndexError(f"update_priority: expected slots in 0..{rows - 1}, found {outside}")
        weights = weighing.weighed(values, storage.capacity, self._alpha, self._eps).reshape(-1)
        return slots, weights, float(values.max(initial=0))

    def weights_at(self, storage: Storage, slots: Slots | slice) -> Floats:
        """Return ``(priority + eps) ** alpha`` of the rows in ``slots``, float64 multiples of 2**-24."""
        return self._settle(storage).weights[slots] / weighing.UNIT

    def _state(self) -> dict[str, Any]:
        """The state: the weights of all rows in units, the largest priority, and beta (0 for a schedule)."""
        beta = 0.0 if callable(self._beta) else self._beta
        return {"weights": self._weights().copy(), "max_priority": self.max_priority, "beta": beta}

    def _config(self) -> dict[str, str]:
        schedule = "a schedule" if callable(self._beta) else "a number"
        shown = f"PrioritizedSampler(alpha={self.alpha}, beta={schedule}, eps={self.eps}{self._shown_within()})"
        return {"config": shown}

    def _restore(self, values: Mapping[str, Any]) -> None:
        weights = values["weights"].astype(np.int64)
        if weights.size and weights.min() < 0:
            raise StateError("sampler: expected weights that are finite and not negative")
        lowest = 0 if self._within else 1
        if values["max_priority"] < lowest:
            raise StateError(f"sampler: expected max_priority of at least {lowest}, found {values['max_priority']}")
        self._set_largest(values["max_priority"])
        if self._within and weights.size:
            self._set_largest_weight(int(weights.max()))
        self._tree, self._known = None, weights
        self._beta = self._beta if callable(self._beta) else values["beta"]


def beta_at(beta: Beta, sample: int) -> float:
    """Return the exponent of importance weights for the sample with index ``sample``.

    Raises:
        ConfigError: A schedule does not return a finite number of at least 0.
    """
    return check_number("beta", beta(sample)) if callable(beta) else beta
