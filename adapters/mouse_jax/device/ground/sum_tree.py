"""Weights of rows: a sum tree of integers on the device, which draws as the sum tree on the host.

Sums need 64 bits, which JAX has only with x64. So they lie in memory as halves of 32 bits, and are put together within
``jax.enable_x64``, which holds for the operations that are traced in it, whatever JAX is set to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from mouse_core.replay import LinearSchedule, Priorities
from mouse_core.replay.samplers.weighing import Powers, largest_weight, plus, powers, weights_of
from mouse_jax._philox import Pair

_FAN, _SHIFT = 16, 4
_once: Callable[[Any], Any] = lax.optimization_barrier


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """A tree in which a node is the sum of 16 children. Its levels lie one behind the other, in rows of 16 siblings.

    The first level has what rows of the replay weigh, by their slots; the last one is a single row.

    Args:
        sums: The weights and their sums, uint32 ``[R, 16, 2]``: the lower half of each, and the upper one.
        least: The smallest weight above 0 below each node, float32 ``[R', 16]``; of all levels but the first, at
            least a row.
        begins: Whether a slice begins at a row, bool, as the first level; others do not count. None: all do.
        fresh: What new rows weigh, uint32 ``[2]``.
        largest: The priority of new rows, float32 ``[]``.
        beta: The exponent of importance weights, float32 ``[]``; that of the first sample where there is a schedule.
        alpha, eps: See ``mouse_core.replay.PrioritizedSampler``; static.
        schedule: The exponent as a function of the number of the sample, or None; static.
        capacity: How many slots there are; static.
    """

    sums: jax.Array
    least: jax.Array
    begins: jax.Array | None
    fresh: jax.Array
    largest: jax.Array
    beta: jax.Array
    alpha: float = field(metadata={"static": True})
    eps: float = field(metadata={"static": True})
    schedule: Callable[[Any], Any] | None = field(metadata={"static": True})
    capacity: int = field(metadata={"static": True})


def _ends(capacity: int) -> list[int]:
    """Ends of levels, in rows: the levels of 1,000 slots have 63, 4 and 1 rows, and end at 63, 67 and 68."""
    rows = -(-capacity // _FAN)
    ends = [rows]
    while rows > 1:
        rows = -(-rows // _FAN)
        ends.append(ends[-1] + rows)
    return ends


def none(capacity: int, priorities: Priorities, *, sliced: bool) -> Weights:
    """No row weighs anything, and new ones have priority 1."""
    ends = _ends(capacity)
    alpha, eps, beta = float(priorities.alpha), float(priorities.eps), priorities.beta
    made = Weights(
        jnp.zeros((ends[-1], _FAN, 2), jnp.uint32),
        # Of a single level it has nothing to say, and yet a row: orbax saves no empty arrays.
        jnp.full((max(ends[-1] - ends[0], 1), _FAN), jnp.inf, jnp.float32),
        jnp.zeros((ends[0], _FAN), jnp.bool_) if sliced else None,
        jnp.zeros(2, jnp.uint32),
        jnp.float32(1),
        jnp.asarray(beta(0) if callable(beta) else beta, jnp.float32),
        alpha,
        eps,
        beta if callable(beta) else None,
        capacity,
    )
    return replace(made, fresh=_weighed(made, jnp.ones(1, jnp.float32))[0])


def scheduled(beta: Callable[[Any], Any], number: jax.Array) -> Any:
    """The exponent for a sample whose number may be traced, of which a ``LinearSchedule`` itself knows nothing."""
    if isinstance(beta, LinearSchedule):
        return beta.start + (beta.end - beta.start) * jnp.minimum(number / beta.samples, 1.0)
    return beta(number)


def there_are(weights: Weights) -> jax.Array:
    """Whether any weight is above 0, bool ``[]``."""
    some = (weights.sums[-1] != 0).any(-1)
    if weights.begins is not None and len(weights.sums) == 1:
        some &= weights.begins[0]
    return some.any()


def _weighed(weights: Weights, priority: jax.Array) -> jax.Array:
    """Return the integer weights, uint32 ``[n, 2]``, of priorities, float32 ``[n]`` from 0; their sum fits."""
    tables = powers(weights.alpha)
    bits = lax.bitcast_convert_type(priority, jnp.uint32)
    with jax.enable_x64(True):
        factors, shifts, pieces = map(jnp.asarray, (tables.factors, tables.shifts, tables.pieces))
        most = largest_weight(weights.capacity, tables)
        on_device = Powers(factors, shifts, pieces, tables.bends_down, most)
        # Without the sign, which 0 may have.
        summed = plus((bits & jnp.uint32(0x7FFFFFFF)).astype(jnp.int64), weights.eps, jnp)
        return _halved(weights_of(summed, on_device, jnp))


def _joined(halves: jax.Array) -> jax.Array:
    """Halves ``[..., 2]`` as uint64; within ``jax.enable_x64``."""

    def shifted(halves: jax.Array) -> jax.Array:
        return (halves[..., 1].astype(jnp.uint64) << 32) | halves[..., 0].astype(jnp.uint64)

    def as_they_lie(halves: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(halves, jnp.uint64)

    # Twice as fast, but what TPUs have instead of 64 bits does not know it.
    found: jax.Array = lax.platform_dependent(halves, tpu=shifted, default=as_they_lie)
    return found


def _halved(number: jax.Array) -> jax.Array:
    """Integers of 64 bits as halves, uint32 ``[..., 2]``; within ``jax.enable_x64``."""
    return jnp.stack([number.astype(jnp.uint32), (number >> 32).astype(jnp.uint32)], -1)


def _leaves(weights: Weights, rows: jax.Array) -> jax.Array:
    """Return the leaves that count, uint64 ``[m, 16]``; within ``jax.enable_x64``."""
    found = _joined(_part(weights.sums, rows))
    return found if weights.begins is None else jnp.where(_part(weights.begins, rows), found, 0)


def _part(memory: jax.Array, rows: jax.Array) -> jax.Array:
    return memory.at[rows].get(mode="promise_in_bounds")


def _smallest(weights: jax.Array) -> jax.Array:
    return jnp.where(weights > 0, weights.astype(jnp.float32), jnp.float32(jnp.inf)).min(-1)


def refreshed(weights: Weights, nodes: jax.Array) -> Weights:
    """The tree after changes in rows of its first level, int32 ``[m]``, of which any may come again."""
    ends = _ends(weights.capacity)
    if len(ends) == 1:
        return weights
    with jax.enable_x64(True):
        starts = jnp.asarray([0, *ends], jnp.int32)
        leaves = _leaves(weights, nodes)
        made = _put(weights.sums, weights.least, ends, nodes, jnp.int32(ends[0]), leaves.sum(1), _smallest(leaves))

        # A loop, for XLA would merge levels into one expression, in which it computes all of them anew for every use.
        def step(level: Any, state: Any) -> Any:
            sums, least, nodes = state
            rows = starts[level] + nodes
            total, smallest = _joined(_part(sums, rows)).sum(1), _part(least, rows - ends[0]).min(1)
            return *_put(sums, least, ends, nodes, starts[level + 1], total, smallest), nodes >> _SHIFT

        sums, least, _ = lax.fori_loop(jnp.int32(1), jnp.int32(len(ends) - 1), step, (*made, nodes >> _SHIFT))
    return replace(weights, sums=sums, least=least)


def _put(
    sums: jax.Array,
    least: jax.Array,
    ends: list[int],
    nodes: jax.Array,
    start: jax.Array,
    total: jax.Array,
    smallest: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Both with what is below some nodes of the level that begins at a row."""
    # All is read before anything is written, which can be done in place then.
    halves, smallest = _once((_halved(total), smallest))
    row, child = start + (nodes >> _SHIFT), nodes & (_FAN - 1)
    sums = sums.at[row, child].set(halves, mode="promise_in_bounds")
    return sums, least.at[row - ends[0], child].set(smallest, mode="promise_in_bounds")


def drawn(weights: Weights, words: Pair, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slots in proportion to what they weigh, int32 ``[B]``, and importance weights, float32 ``[B]``.

    Args:
        weights: Of which some are above 0.
        words: Random words.
        beta: The exponent of the importance weights.
    """
    with jax.enable_x64(True):
        ends = _ends(weights.capacity)
        root = _leaves(weights, jnp.zeros(1, jnp.int32)) if len(ends) == 1 else _joined(weights.sums[-1:])
        rest = _scaled(words, root.sum())
        # Within shard_map what a loop begins with varies with the shard, as what it makes does.
        node = (rest & 0).astype(jnp.int32)
        starts = jnp.asarray([0, *ends], jnp.int32)

        def step(number: Any, state: Any) -> Any:
            # Where nothing weighs anything the last child is found, of which there may be no row.
            node, rest = state
            level = len(ends) - 1 - number
            rows = jnp.minimum(starts[level] + node, starts[level + 1] - 1)
            return _child(_joined(_part(weights.sums, rows)), node, rest)

        node, rest = lax.fori_loop(jnp.int32(0), jnp.int32(len(ends) - 1), step, (node, rest))
        node, _ = _child(_leaves(weights, jnp.minimum(node, ends[0] - 1)), node, rest)
        slots = _once(jnp.minimum(node, weights.capacity - 1))
        own = _joined(weights.sums.at[slots >> _SHIFT, slots & (_FAN - 1)].get(mode="promise_in_bounds"))
        smallest = _smallest(root[0]) if len(ends) == 1 else weights.least[-1].min()
        importance = (own.astype(jnp.float32) / smallest) ** -jnp.asarray(beta, jnp.float32)
        # Who has the slots, and may write to the tree, has them when all was read: XLA would copy the tree else. It
        # does not know that no weight is negative.
        return jnp.where(importance < 0, 0, slots), importance


def _child(children: jax.Array, node: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The child of each node in which the sum of all before it and itself passes the rest, and what is left then."""
    before = total = jnp.zeros_like(rest)
    chosen = jnp.zeros_like(node)
    for child in range(_FAN - 1):
        total = total + children[:, child]
        passed = total <= rest
        chosen = chosen + passed.astype(jnp.int32)
        before = jnp.where(passed, total, before)
    return node * _FAN + chosen, rest - before


def _scaled(words: Pair, total: jax.Array) -> jax.Array:
    """``floor(word * total / 2**64)`` of each, uint64 ``[B]``; within ``jax.enable_x64``."""
    upper, lower = (half.astype(jnp.uint64) for half in words)
    high, low = total >> 32, total & 0xFFFFFFFF
    middle = upper * low + ((lower * low) >> 32)
    return upper * high + (middle >> 32) + ((lower * high + (middle & 0xFFFFFFFF)) >> 32)


def touched(begin: jax.Array, count: int, capacity: int) -> jax.Array:
    """Rows of the first level with any of so many slots from one on, round the end of a ring; int32 ``[m]``."""
    behind = jnp.concatenate([jnp.arange(0, count, _FAN, dtype=jnp.int32), jnp.full(1, count - 1, jnp.int32)])
    room = capacity - begin
    slots = jnp.where(behind < room, begin + behind, behind - room)
    # The nodes at the end of the ring and at its begin may have no slot at such a distance.
    ends = jnp.where(count > room, jnp.array([0, capacity - 1], jnp.int32), slots[-1])
    return jnp.concatenate([slots, ends]) >> _SHIFT


def filled(weights: Weights, slots: jax.Array) -> Weights:
    """The leaves with new rows in some slots, none of which comes twice; the tree is to be refreshed."""
    new = jnp.broadcast_to(weights.fresh, (len(slots), 2))
    place = slots >> _SHIFT, slots & (_FAN - 1)
    return replace(weights, sums=weights.sums.at[place].set(new, mode="promise_in_bounds", unique_indices=True))


def updated(weights: Weights, rows: jax.Array, slots: jax.Array, priority: jax.Array) -> Weights:
    """The tree with priorities of some slots, float32 ``[n]``; of a slot that comes twice the last one counts.

    Args:
        weights: The tree.
        rows: How many slots are in use; others are left out.
        slots: Int32 ``[n]``.
        priority: Those that are negative or NaN are left out.
    """
    there = (slots >= 0) & (slots < rows) & (priority >= 0)
    # One that is infinite is the largest number there is, for a state has none.
    priority = jnp.minimum(jnp.where(there, priority, 0), float(np.finfo(np.float32).max))
    largest = jnp.maximum(weights.largest, priority.max(initial=0))
    new = _weighed(weights, jnp.append(priority, largest))
    row, child = jnp.where(there, slots >> _SHIFT, len(weights.sums)), slots & (_FAN - 1)
    # The last of those with one slot: each says its number there, and the largest is what is left.
    number = jnp.arange(1, len(slots) + 1, dtype=jnp.uint32)
    marked = weights.sums.at[row, child, 0].set(0, mode="drop").at[row, child, 0].max(number, mode="drop")
    last = _once(marked.at[row, child, 0].get(mode="fill", fill_value=1)) - 1
    sums = marked.at[row, child].set(new[last], mode="drop")
    made = replace(weights, sums=sums, fresh=new[-1], largest=largest)
    return refreshed(made, jnp.where(there, slots, 0) >> _SHIFT)


def units(weights: Weights, rows: int) -> npt.NDArray[np.int64]:
    """Return the weights of the first slots as a NumPy array, int64 ``[rows]``."""
    leaves = np.asarray(weights.sums).reshape(-1, 2)[:rows].astype(np.int64)
    return leaves[:, 0] | (leaves[:, 1] << 32)


def of_units(weights: Weights, given: npt.NDArray[np.int64], largest: float) -> Weights:
    """The tree with what ``units`` said, and the priority of new rows."""
    count = _ends(weights.capacity)[0]
    known = np.zeros((count * _FAN, 2), np.uint32)
    known[: len(given), 0], known[: len(given), 1] = given & 0xFFFFFFFF, given >> 32
    return cast("Weights", _of_halves(weights, known.reshape(count, _FAN, 2), np.float32(largest)))


@jax.jit
def _of_halves(weights: Weights, known: jax.Array, largest: jax.Array) -> Weights:
    sums = weights.sums.at[: len(known)].set(known)
    made = replace(weights, sums=sums, fresh=_weighed(weights, largest[None])[0], largest=largest)
    return refreshed(made, jnp.arange(len(known), dtype=jnp.int32))
