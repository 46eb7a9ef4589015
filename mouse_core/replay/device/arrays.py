"""The functions over arrays that a device replay needs of a framework; here those of NumPy.

A framework subclasses ``Arrays`` and overrides what NumPy does in another way. No rule of sampling is in any of them:
``episodes``, ``sum_tree`` and ``samplers`` call them and hold the rules.

Indices have the framework's own width: int64 in NumPy and torch, int32 in JAX, which counts rows and slices modulo
2**32. So counts are compared by their differences, never by themselves. Weights are "wide": integers of 64 bits, which
``unpack`` reads from memory and ``pack`` writes, within ``wide()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mouse_core.nested import FieldKey, flatten, structure_of, unflatten
from mouse_core.randomness import Key, Order, Purpose
from mouse_core.replay.samplers import weighing

_ELEVEN = np.uint64(11)
FAN, SHIFT = 16, 4
"""A node of a tree of weights has 16 children."""


class DrawKey(NamedTuple):
    """The name of a sample, of which its random numbers are a function.

    Attributes:
        seed: The seed of the replay, as the framework keeps it.
        number: The number of the sample, an integer ``[]`` of the framework.
    """

    seed: Any
    number: Any


class Ring(NamedTuple):
    """The time steps of a ring. Rows are counted from the oldest: row 0 is the oldest, row ``size - 1`` the newest.

    Attributes:
        cursor: The time step that is written next, ``[]``.
        size: How many time steps there are, ``[]``.
        steps: How many fit, T.
        num_envs: Environments side by side, or None for one stream.
    """

    cursor: Any
    size: Any
    steps: int
    num_envs: int | None

    @property
    def envs(self) -> int:
        """Number of streams, E."""
        return self.num_envs or 1

    @property
    def rows(self) -> Any:
        """Number of rows of all environments, ``[]``."""
        return self.size if self.num_envs is None else self.size * self.num_envs

    @property
    def capacity(self) -> int:
        """Number of rows that fit."""
        return self.steps * self.envs


class Arrays:
    """NumPy's functions.

    Args:
        constants: Tables of samplers by name, which a framework may keep on its device.
    """

    where: ClassVar[Callable[..., Any]] = staticmethod(np.where)
    minimum: ClassVar[Callable[..., Any]] = staticmethod(np.minimum)
    maximum: ClassVar[Callable[..., Any]] = staticmethod(np.maximum)
    concat: ClassVar[Callable[..., Any]] = staticmethod(np.concatenate)
    dtypes: ClassVar[Mapping[str, Any]] = {
        "index": np.int64, "count": np.int64, "number": np.int64, "wide": np.int64, "bool": np.bool_,
        "float": np.float32,
    }  # fmt: skip
    top_rows = 256
    """A level of a tree with so many rows of 16 or fewer is summed up for every draw; a search begins there."""

    def __init__(self, constants: Mapping[str, Any] | None = None) -> None:
        self.constants = constants or {}

    # ------------------------------------------------------------------ making and changing arrays

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        """An array of one value; ``dtype`` is a name in ``dtypes`` or one of the framework."""
        return np.full(shape, value, self.dtypes.get(dtype, dtype) if isinstance(dtype, str) else dtype)

    def range(self, count: int) -> Any:
        """Indices ``0 .. count - 1``."""
        return np.arange(count)

    def cast(self, values: Any, dtype: str) -> Any:
        """Values in a dtype of ``dtypes``."""
        return np.asarray(values, self.dtypes[dtype])

    def cumsum(self, values: Any) -> Any:
        """Running sums along the first axis, in the same dtype."""
        return values.cumsum(0)

    def running_max(self, values: Any) -> Any:
        """Running maxima along the first axis."""
        return np.maximum.accumulate(values, 0)

    def count_true(self, flags: Any) -> Any:
        """Number of True along the last axis, indices."""
        return np.count_nonzero(flags, -1)

    def expand(self, values: Any, shape: tuple[int, ...]) -> Any:
        """Values broadcast to a shape."""
        return np.broadcast_to(values, shape)

    def take(self, values: Any, places: Any) -> Any:
        """Elements of ``[n]`` at some places."""
        return values.take(places)

    def searchsorted(self, ends: Any, values: Any) -> Any:
        """The first of ascending ends ``[E]`` that is larger than each value."""
        return ends.searchsorted(values, "right")

    def one_by_one(self, function: Callable[[Any], Any], arrays: Sequence[Any]) -> Sequence[Any]:
        """A function of each of several arrays, one after another."""
        return [function(array) for array in arrays]

    def constant(self, name: str, values: Any) -> Any:
        """A table of integers of 64 bits that never changes; within ``wide``."""
        return values

    def by_name(self, rows: Any) -> Mapping[FieldKey, Any]:
        """Leaves of a tree of rows by name."""
        return flatten(rows)

    def map_leaves(self, function: Callable[..., Any], *rows: Any) -> Any:
        """The first of several trees of rows with one structure, with a function of the leaves of all."""
        leaves = [flatten(tree) for tree in rows]
        found = {key: function(*(tree[key] for tree in leaves)) for key in leaves[0]}
        return unflatten(structure_of(rows[0]), found)

    def once(self, values: Any) -> Any:
        """Arrays, a tuple of them or one, which compilers compute before they use them."""
        return values

    def behind(self, values: Any, positive: Any) -> Any:
        """Indices, which compilers hand out when numbers from 0 were computed; the result does not depend on them."""
        return values

    def loop(self, begin: int, end: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        """``state = body(number, state)`` for each number."""
        for number in range(begin, end):
            state = body(number, state)
        return state

    def table(self, numbers: list[int]) -> Any:
        """Integers that the number of a ``loop`` may be the index of."""
        return numbers

    # ------------------------------------------------------------------ rings

    def places(self, cursor: Any, count: int, steps: int) -> Any:
        """The places of ``count`` time steps from the cursor on, for ``write``."""
        return (cursor + np.arange(count)) % steps

    def write(self, memory: Any, places: Any, rows: Any) -> Any:
        """Memory ``[T, ...]`` with rows ``[n, ...]`` at places, each of which comes once; in place where possible."""
        memory[places] = rows
        return memory

    def at(self, counts: Any, step: Any, env: Any) -> Any:
        """Elements of ``[T, E]``."""
        envs = counts.shape[1]
        return counts.take(step if envs == 1 else step * envs + env)

    def addresses(self, step: Any, env: Any, num_envs: int | None) -> tuple[Any, Any]:
        """Where rows lie: for the function that gathers them, and the slots ``step * num_envs + env``."""
        slots = step if num_envs is None or num_envs == 1 else step * num_envs + env
        return slots, slots

    def row_addresses(self, slots: Any, num_envs: int | None) -> Any:
        """Slots ``[B]`` in the form in which ``addresses`` gives them for the function that gathers rows."""
        return slots

    def search(self, ring: Ring, counts: Any, env: Any, base: Any, more: Any, first: Any, rows: int) -> Any:
        """The first row at which a count is ``base + more + 1`` or larger; the number of rows where there is none.

        Args:
            ring: Where the rows are.
            counts: Counts that do not fall from row to row, ``[T, E]``.
            env: The environment of each search, ``[n]``.
            base, more: Counts, ``[n]``.
            first: A row that is not behind the one that is sought, ``[n]``.
            rows: From there on so many rows may have to be looked at.
        """
        most = base + more
        if counts.shape[1] > 1:
            return narrow(self, ring, lambda row: self.at(counts, self.slots(ring, row), env) <= most, first, rows, 8)
        line, oldest = counts[:, 0], ring.cursor - ring.size
        if oldest >= 0:
            return line[oldest : ring.cursor].searchsorted(most, "right")
        # What was written before the ring went round, and what since then.
        found = line[oldest + ring.steps :].searchsorted(most, "right")
        return found + line[: ring.cursor].searchsorted(most, "right")

    def slots(self, ring: Ring, row: Any) -> Any:
        """The time steps of rows counted from the oldest, -1 included."""
        # Cheaper than the rest of a division. Of a ring that went round, -1 may stay -1, which NumPy reads alike.
        step = ring.cursor - ring.size + row
        return np.where(step < 0, step + ring.steps, step)

    # ------------------------------------------------------------------ random numbers

    def words(self, key: DrawKey, count: int) -> Any:
        """Random words of 64 bits, ``[count]``, in the form that ``integers`` and ``scaled`` take."""
        return _key(key).bits(count)

    def integers(self, words: Any, high: Any) -> Any:
        """Words as indices in ``[0, high)``, as ``Key.integers`` makes them; ``high`` from 0, which gives 0."""
        drawn = (words >> _ELEVEN).astype(np.float64)
        drawn *= int(high) * 2.0**-53  # of less than 2**53 none is rounded up to high
        return drawn.astype(np.int64)

    def scaled(self, words: Any, total: Any) -> Any:
        """``floor(word * total / 2**64)``, wide."""
        high, low = (np.uint64(half) for half in divmod(int(total), 1 << 32))
        upper, lower = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
        middle = upper * low + (lower * low >> np.uint64(32))
        carried = (lower * high + (middle & np.uint64(0xFFFFFFFF))) >> np.uint64(32)
        return (upper * high + (middle >> np.uint64(32)) + carried).view(np.int64)

    def upper_bits(self, words: Any) -> Any:
        """The upper 53 bits of words, wide."""
        return (words >> np.uint64(11)).astype(np.int64)

    def no_order(self, most: int) -> dict[str, Any]:
        """State that ``in_order`` keeps from draw to draw, of an order of at most so many elements."""
        return {}

    def to_numpy(self, values: Any, like: Any) -> Any:
        """An array of the state as NumPy has it, where ``like`` is NumPy's array of no rows."""
        return values

    def from_numpy(self, values: Any, like: Any) -> Any:
        """An array of NumPy's state as the framework has it, where ``like`` is its array of no rows."""
        return values

    def in_order(
        self, key: DrawKey, n: Any, positions: Any, most: int, state: Mapping[str, Any], anew: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The elements at some positions of ``Order(key, n)``, and the state that it keeps.

        Args:
            key: Names the order.
            n: Number of elements, from 1 to ``most``.
            positions: Indices in ``[0, n)``.
            most: Elements there may be.
            state: What ``no_order`` or this function gave.
            anew: Whether the order is another than that of the state.
        """
        return _order(int(key.seed), int(key.number), int(n))(positions), {}

    # ------------------------------------------------------------------ trees of weights

    def wide(self) -> AbstractContextManager[Any]:
        """A context in which integers of 64 bits are computed with."""
        return nullcontext()

    def pack(self, numbers: Any) -> Any:
        """Wide numbers as they lie in memory."""
        return numbers

    def unpack(self, memory: Any) -> Any:
        """Wide numbers that lie in memory."""
        return memory

    def children(self, memory: Any, rows: Any) -> Any:
        """Rows of 16 siblings, ``[m, 16]``, of memory ``[R, 16]``."""
        return memory[rows] if isinstance(rows, slice) else memory.take(rows, 0)

    def leaf(self, memory: Any, slots: Any) -> Any:
        """Elements of ``[R, 16]`` by their numbers."""
        return memory.reshape(-1).take(slots)

    def scatter(self, memory: Any, slots: Any, values: Any, unique: bool = False) -> Any:
        """Memory ``[R, 16]`` with values at some numbers; where one comes twice, both values are equal."""
        memory.reshape(-1)[slots] = values
        return memory

    def overwrite(self, memory: Any, slots: Any, there: Any, values: Any) -> Any:
        """Memory ``[R, 16]`` with values at some numbers; of a number that comes twice the last value counts.

        Args:
            memory: Made with ``wide_memory``.
            slots: Int ``[n]``.
            there: Which of them are written, bool ``[n]``.
            values: As ``pack`` gives them, ``[n]``.
        """
        if not there.all():
            slots, values = slots[there], values[there]
        return self.scatter(memory, slots, values)

    def wide_memory(self, rows: int) -> Any:
        """Memory of at least so many rows of 16 wide zeros."""
        return self.full((rows, FAN), 0, "wide")

    def summed(self, children: Any) -> tuple[Any, Any]:
        """Sums of rows of 16 weights, wide ``[m]``, and the least of each above 0, float32 ``[m]``, or infinity."""
        across = np.ascontiguousarray(children.T)  # so NumPy adds many side by side
        # Less one: 0, which stands for no weight, becomes the largest of all.
        lowest = np.minimum.reduce(across.view(np.uint64) - np.uint64(1), 0) + np.uint64(1)
        smallest = np.where(lowest > 0, lowest.astype(np.float32), np.float32(np.inf))
        return np.add.reduce(across, 0), smallest

    def total(self, children: Any) -> Any:
        """Sums of rows of 16 weights, wide ``[m]``."""
        return np.add.reduce(np.ascontiguousarray(children.T), 0)

    def lowest(self, rows: Any) -> Any:
        """Smallest of each row of 16 floats."""
        return np.minimum.reduce(np.ascontiguousarray(rows.T), 0)

    def child(self, children: Any, rest: Any) -> tuple[Any, Any]:
        """In each row of weights ``[m, k]``, the first place up to which the sum exceeds ``rest``, or the last place.

        Returns:
            The places, and the sums of all weights before them.
        """
        before = np.zeros((len(children), children.shape[1] + 1), np.int64)
        np.add.accumulate(children, 1, out=before[:, 1:])
        found = (before[:, 1:] > rest[:, None]).argmax(1)
        return found, before.reshape(-1).take(np.arange(0, before.size, before.shape[1]) + found)

    def among(self, weights: Any, rest: Any) -> tuple[Any, Any]:
        """``child`` of one row of weights ``[k]`` for many numbers."""
        ends = weights.cumsum()
        found = np.minimum(ends.searchsorted(rest, "right"), len(ends) - 1)
        return found, ends.take(found) - weights.take(found)

    def above(self, nodes: Any, count: int) -> Any:
        """The rows of 16 that nodes are in, of ``count`` rows, in any number; an integer says all ``count`` rows."""
        return count if isinstance(nodes, int) or count < len(nodes) else nodes >> SHIFT

    def offset(self, nodes: Any, begin: Any) -> Any:
        """Nodes, or rows as ``above`` gives them, counted from another begin."""
        return slice(begin, begin + nodes) if isinstance(nodes, int) else begin + nodes

    def weights(self, priority: Any, alpha: float, eps: float, most: int) -> Any:
        """Weights of priorities, float32 ``[n]`` from 0, wide, at most ``most`` each; see ``weighing.weights_of``."""
        return np.minimum(weighing._weighed(priority, eps, weighing.powers(alpha)), most)


def narrow(xp: Arrays, ring: Ring, below: Callable[[Any], Any], first: Any, most: int, parts: int) -> Any:
    """The first row from ``first`` on for which ``below`` is False, as it is for all behind it; or how many there are.

    Each round looks at ``parts - 1`` rows and leaves one part, for what a round costs is mostly that there is one. With
    32 parts of 1,000 rows from row 0 on the first looks at the rows 31, 63, ..., and where 511 is the first of them for
    which it is False, the next looks at 480, 481, ..., 510.

    Args:
        xp: Functions over arrays.
        ring: Where the rows are.
        below: A function of rows ``[parts - 1, n]``.
        first: Rows, ``[n]``.
        most: How many rows may have to be looked at.
        parts: How many parts a round leaves one of.
    """
    stride = 1
    while stride * parts <= most:
        stride *= parts
    last, low = ring.size - 1, first
    while stride:
        looked = low + (xp.range(parts - 1) + 1)[:, None] * stride - 1
        low = low + ((looked <= last) & below(xp.minimum(looked, last))).sum(0) * stride
        stride //= parts
    return xp.minimum(low, ring.size)


def _key(key: DrawKey) -> Key:
    return Key(int(key.seed) & ((1 << 64) - 1), Purpose.REPLAY, int(key.number))


@lru_cache(maxsize=16)
def _order(seed: int, number: int, n: int) -> Order:
    return Order(_key(DrawKey(seed, number)), n)
