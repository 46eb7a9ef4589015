"""The array functions that a device replay needs from a framework, implemented in NumPy.

An adapter subclasses ``Arrays`` and overrides the functions that its framework implements differently. The rules of
sampling are in ``units``, ``sum_tree`` and ``samplers``, which call these functions.

Indices are int64 in NumPy and torch, and int32 in JAX. With int32, counts of rows and slices overflow and wrap around
at 2**32, so two counts are compared by their difference. Weights are "wide": 64-bit integers, which ``unpack`` reads
from memory and ``pack`` writes to memory, within the context ``wide()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mouse_core.nested import FieldKey
from mouse_core.randomness import Key, Purpose
from mouse_core.replay.samplers import weighing
from mouse_core.replay.samplers.priorities import scaled
from mouse_core.replay.samplers.rows import order_of

_ELEVEN = np.uint64(11)
FAN, SHIFT = 16, 4
"""``FAN``: the number of children of each node of a tree of weights, 16, which equals ``2**SHIFT``."""
State = dict[str, Any]
"""The state of a sampler: arrays by name."""
Read = Callable[[FieldKey], Any]
"""A function that returns the values of a field."""


class DrawKey(NamedTuple):
    """The key of a sample, which determines its random numbers.

    Attributes:
        seed: The seed of the replay, in the framework's representation.
        number: The index of the sample, an integer ``[]`` of the framework.
    """

    seed: Any
    number: Any


class Ring(NamedTuple):
    """The position and size of a ring of time steps. Row 0 is the oldest row, and row ``size - 1`` is the newest.

    Attributes:
        cursor: The position of the time step that is written next, ``[]``.
        size: The number of time steps in the ring, ``[]``.
        steps: The capacity in time steps, T.
        num_envs: The number of parallel environments, or None for one stream.
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
        """The capacity in rows."""
        return self.steps * self.envs

    def slots_of(self, step: Any, env: Any) -> Any:
        """Return the slots of rows from their positions along the axes of time and of environments."""
        return step if self.envs == 1 else step * self.envs + env

    def split(self, slots: Any) -> tuple[Any, Any]:
        """Return the positions of slots along the axes of time and of environments."""
        return (slots, slots * 0) if self.envs == 1 else (slots // self.envs, slots % self.envs)

    def after(self, xp: Arrays, count: int) -> Ring:
        """Return the ring after a write of ``count`` time steps."""
        cursor, size = (self.cursor + count) % self.steps, xp.minimum(self.size + count, self.steps)
        return self._replace(cursor=cursor, size=size)


class Arrays:
    """The array functions, implemented in NumPy.

    "Array" means the framework's array type. This includes arrays of shape ``[]``; in place of such an array the host
    may pass an int. The representation of random words depends on the framework, so only the methods ``integers``
    and ``scaled`` read random words. Arrays must also support operators, slices, ``sum`` and
    ``reshape``.

    - ``where(condition, one, other)``, where ``one`` or ``other`` may be a number.
    - ``minimum(one, other)`` and ``maximum(one, other)`` of an array and an array or int.
    - ``concat(arrays)``, which joins a list of arrays along the first axis.
    - The methods below take arrays unless stated otherwise; counts and shapes are ints.
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
    """A draw from a tree begins at the lowest level that has at most ``top_rows`` rows of 16 nodes."""
    parts = 8
    """The number of parts into which each round of ``search`` divides the remaining rows; a power of 2."""

    # ------------------------------------------------------------------ making and changing arrays

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        """Return an array filled with one value; ``dtype`` is a name in ``dtypes``, or a dtype of the framework."""
        return np.full(shape, value, self.dtypes.get(dtype, dtype))

    def range(self, count: int) -> Any:
        """Return the indices ``0 .. count - 1``."""
        return np.arange(count)

    def cast(self, values: Any, dtype: str) -> Any:
        """Convert values to a dtype of ``dtypes``."""
        return np.asarray(values, self.dtypes[dtype])

    def cumsum(self, values: Any) -> Any:
        """Return running sums along the first axis, in the same dtype."""
        return values.cumsum(0)

    def running_max(self, values: Any) -> Any:
        """Return running maxima along the first axis."""
        return np.maximum.accumulate(values, 0)

    def expand(self, values: Any, shape: tuple[int, ...]) -> Any:
        """Broadcast values to a shape."""
        return np.broadcast_to(values, shape)

    def take(self, values: Any, places: Any) -> Any:
        """Return the elements at the positions ``[n]`` of the first axis."""
        return values.take(places, 0)

    def searchsorted(self, ends: Any, values: Any) -> Any:
        """Return, for each value, the position of the first of the ascending ends ``[E]`` that is larger than the
        value.
        """
        return ends.searchsorted(values, "right")

    def constant(self, name: str, values: Any) -> Any:
        """Convert a constant table of 64-bit integers to an array; called within the context ``wide()``."""
        return values

    def once(self, values: Any) -> Any:
        """Return ``values``, an array or a tuple of arrays, such that a compiler computes the values exactly once,
        before any use.
        """
        return values

    def behind(self, values: Any, positive: Any) -> Any:
        """Return the indices ``values`` unchanged, such that a compiler computes ``positive`` (numbers of at least 0)
        before the indices.
        """
        return values

    def loop(self, begin: int, end: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        """Run ``state = body(number, state)`` for ``number`` from ``begin`` to ``end - 1``, and return the last
        state.
        """
        for number in range(begin, end):
            state = body(number, state)
        return state

    def table(self, numbers: list[int]) -> Any:
        """Convert a list of integers to an object that can be indexed with the ``number`` that ``loop`` passes to its
        body.
        """
        return numbers

    # ------------------------------------------------------------------ rings

    def places(self, cursor: Any, count: int, steps: int) -> Any:
        """Return the positions of ``count`` time steps from ``cursor`` on, for ``write``."""
        return (cursor + self.range(count)) % steps

    def write(self, memory: Any, places: Any, rows: Any) -> Any:
        """Write rows ``[n, ...]`` to distinct positions of memory ``[T, ...]``, in place where possible; return the
        memory.
        """
        memory[places] = rows
        return memory

    def at(self, values: Any, row: Any, column: Any) -> Any:
        """Return the elements of an array ``[T, E]`` or ``[R, 16]`` at the given indices along both axes."""
        columns = values.shape[1]
        return values.take(row if columns == 1 else row * columns + column)

    def search(self, ring: Ring, counts: Any, env: Any, most: Any, first: Any, rows: int) -> Any:
        """Return, for each search, the first row whose count is above ``most``; the number of rows if no row has a
        larger count.

        Each round reads the counts of ``parts - 1`` rows and keeps one of ``parts`` parts. Several rows are read per
        round because a round costs more than reading its rows. Example: with 32 parts, 1,000 rows and ``first`` 0, the
        first round reads the rows 31, 63, ... If row 511 is the first of these rows with a larger count, the second
        round reads the rows 480, 481, ..., 510.

        Args:
            ring: The time steps of the ring.
            counts: Counts that do not decrease from row to row, ``[T, E]``.
            env: The environment of each search, ``[n]``.
            most: The count of each search; the result is the first row with a larger count, ``[n]``.
            first: A row at or before the result, ``[n]``.
            rows: The largest distance from ``first`` to the result.
        """
        oldest, line = ring.cursor - ring.size, counts[:, 0]
        if counts.shape[1] == 1 and isinstance(counts, np.ndarray):
            if oldest >= 0:
                return line[oldest : ring.cursor].searchsorted(most, "right")
            # The older rows lie at the end of the ring, and the newer rows at its start.
            found = line[oldest + ring.steps :].searchsorted(most, "right")
            return found + line[: ring.cursor].searchsorted(most, "right")
        bits, rounds = self.parts.bit_length() - 1, 0
        while self.parts ** (rounds + 1) <= min(rows, ring.steps):
            rounds += 1
        behind = (self.range(self.parts - 1) + 1)[:, None]

        def narrow(number: Any, low: Any) -> Any:
            stride = (1 << bits * rounds) >> (bits * number)
            looked = low + behind * stride - 1
            count = self.at(counts, self.slots(ring, self.minimum(looked, ring.size - 1)), env)
            below = (looked < ring.size) & (self.cast(count - most, "index") <= 0)
            return low + self.cast(below.sum(0), "index") * stride

        return self.minimum(self.loop(0, rounds + 1, narrow, first), ring.size)

    def slots(self, ring: Ring, row: Any) -> Any:
        """Return the slots of rows whose indices are counted from the oldest row; index -1 is also valid."""
        # A comparison is cheaper than a remainder. In a full ring, row -1 becomes position -1, which NumPy reads as the
        # last position.
        step = ring.cursor - ring.size + row
        return np.where(step < 0, step + ring.steps, step)

    # ------------------------------------------------------------------ random numbers

    def words(self, key: DrawKey, count: int) -> Any:
        """Return random words of 64 bits, ``[count]``, in the representation that ``integers`` and ``scaled`` read.

        The words are a function of the key: a second call gives the same words. For two random numbers per row, use one
        call ``words(key, 2 * size)``, then ``integers(words, 2)[:size]`` and ``integers(words, high)[size:]``.
        """
        return _key(key).bits(count)

    def integers(self, words: Any, high: Any) -> Any:
        """Convert random words to indices in ``[0, high)``, like ``Key.integers``.

        Args:
            words: The complete result of one call of ``words``, ``[n]``.
            high: An int, an array ``[]``, or an array ``[n]`` with a bound for each word. Each bound is at least 0; for
                the bound 0, the index is 0.
        """
        drawn = (words >> _ELEVEN).astype(np.float64)
        # A product with an int is faster than a product with a NumPy number. For ``high`` below 2**53, no product is
        # rounded up to ``high``.
        drawn *= (high if getattr(high, "ndim", 0) else int(high)) * 2.0**-53
        return drawn.astype(np.int64)

    def scaled(self, words: Any, total: Any) -> Any:
        """Return ``floor(word * total / 2**64)`` for each word, as wide integers."""
        return scaled(words, int(total))

    def no_order(self, most: int) -> dict[str, Any]:
        """Return the initial state of ``in_order`` for orders of up to ``most`` elements."""
        return {}

    def to_numpy(self, values: Any, like: Any) -> Any:
        """Convert an array of a state to NumPy; ``like`` is the same array of an empty state in NumPy."""
        return values

    def from_numpy(self, values: Any, like: Any) -> Any:
        """Convert an array of a state from NumPy; ``like`` is the same array of an empty state in the framework."""
        return values

    def in_order(
        self, key: DrawKey, n: Any, positions: Any, most: int, state: Mapping[str, Any], anew: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the elements at the positions of ``Order(key, n)``, and the next state.

        Args:
            key: The key of the order.
            n: Number of elements, from 1 to ``most``.
            positions: Positions in the order, each in ``[0, n)``.
            most: The largest number of elements.
            state: The result of ``no_order``, or the state that the previous call returned.
            anew: Whether a new order begins, different from the order in the state.
        """
        return order_of(_key(key), int(n))(positions), {}

    # ------------------------------------------------------------------ trees of weights

    def wide(self) -> AbstractContextManager[Any]:
        """Return a context in which the framework computes with 64-bit integers."""
        return nullcontext()

    def pack(self, numbers: Any) -> Any:
        """Convert wide numbers to the representation in which they are stored."""
        return numbers

    def unpack(self, memory: Any) -> Any:
        """Convert stored numbers to wide numbers."""
        return memory

    def scatter(self, memory: Any, slots: Any, values: Any, unique: bool = False) -> Any:
        """Write values to slots of memory ``[R, 16]``; if a slot occurs twice, its values must be equal."""
        memory.reshape(-1)[slots] = values
        return memory

    def overwrite(self, memory: Any, slots: Any, there: Any, values: Any) -> Any:
        """Write values to slots of memory ``[R, 16]``; if a slot occurs twice, its last value is written.

        Args:
            memory: Memory whose last row has no slots, so that any values may be written to this row.
            slots: Int ``[n]``.
            there: Whether each value is written, bool ``[n]``.
            values: Values in the representation that ``pack`` returns, ``[n]``.
        """
        if not there.all():
            slots, values = slots[there], values[there]
        return self.scatter(memory, slots, values)

    def wide_memory(self, rows: int) -> Any:
        """Return memory of ``rows`` rows of 16 wide zeros."""
        with self.wide():
            return self.pack(self.full((rows, FAN), 0, "wide"))

    def total(self, children: Any) -> Any:
        """Return the sum of each row of 16 weights, wide ``[m]``."""
        return np.add.reduce(np.ascontiguousarray(children.T), 0)

    def lowest(self, rows: Any) -> Any:
        """Return the smallest number of each row of 16 numbers, ``[m]``."""
        return np.minimum.reduce(np.ascontiguousarray(rows.T), 0)

    def child(self, children: Any, rest: Any) -> tuple[Any, Any]:
        """Return the first position at which the running sum of weights exceeds ``rest``; the last position if none
        does.

        Args:
            children: Weights, ``[n, k]``; or ``[1, k]`` if all searches use the same weights.
            rest: The numbers to search for, ``[n]``.

        Returns:
            The positions, and the sum of all weights before each position.
        """
        if len(children) == 1:
            ends = children[0].cumsum()
            found = np.minimum(ends.searchsorted(rest, "right"), len(ends) - 1)
            return found, ends.take(found) - children[0].take(found)
        before = np.zeros((len(children), children.shape[1] + 1), np.int64)
        np.add.accumulate(children, 1, out=before[:, 1:])
        found = (before[:, 1:] > rest[:, None]).argmax(1)
        return found, before.reshape(-1).take(np.arange(0, before.size, before.shape[1]) + found)

    def above(self, nodes: Any, count: Any) -> Any:
        """Return the indices of the rows (of 16 nodes) that contain the given nodes. If more nodes are given than the
        level has rows (``count``), return the indices of all rows of the level.
        """
        return self.range(count) if count < len(nodes) else nodes >> SHIFT

    def weights(self, priority: Any, alpha: float, eps: float, most: int) -> Any:
        """Convert priorities (float32 ``[n]``, at least 0) to 64-bit weights of at most ``most``; see
        ``weighing.weights_of``.
        """
        return np.minimum(weighing._weighed(priority, eps, weighing.powers(alpha)), most)


def _key(key: DrawKey) -> Key:
    return Key(int(key.seed) & ((1 << 64) - 1), Purpose.REPLAY, int(key.number))
