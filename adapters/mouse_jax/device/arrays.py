"""Array functions of JAX for the samplers of ``mouse_core.replay.device``.

Indices are int32. Counts of rows and slices are uint32, and wrap around at 2**32. Sums of weights need 64 bits, which
JAX has only with x64. Without x64, each sum is stored as two halves of 32 bits. Operations on sums join the halves, and
are traced within ``jax.enable_x64``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mouse_core.randomness import Purpose
from mouse_core.replay.device.arrays import FAN, SHIFT, Arrays, DrawKey, Ring
from mouse_core.replay.samplers.weighing import Powers, bits_of, plus_bits, powers, weights_of
from mouse_jax import _philox
from mouse_jax.dtypes import is_key


class JaxArrays(Arrays):
    """The implementation of ``Arrays`` for JAX.

    Loops are ``lax`` loops, because XLA would merge unrolled iterations into one expression, and recompute the
    expression for every use.
    """

    where: ClassVar[Any] = staticmethod(jnp.where)
    minimum: ClassVar[Any] = staticmethod(jnp.minimum)
    maximum: ClassVar[Any] = staticmethod(jnp.maximum)
    concat: ClassVar[Any] = staticmethod(jnp.concatenate)
    cumsum: Any = staticmethod(lax.cumsum)
    running_max: Any = staticmethod(lax.cummax)
    expand: Any = staticmethod(jnp.broadcast_to)
    once: Any = staticmethod(lax.optimization_barrier)
    dtypes: ClassVar[Mapping[str, Any]] = {
        "index": jnp.int32, "count": jnp.uint32, "number": jnp.uint32, "wide": jnp.uint64, "bool": jnp.bool_,
        "float": jnp.float32,
    }  # fmt: skip
    top_rows = 1

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        """See ``Arrays``."""
        return jnp.full(shape, value, self.dtypes.get(dtype, dtype))

    def range(self, count: int) -> Any:
        """See ``Arrays``."""
        return jnp.arange(count, dtype=jnp.int32)

    def cast(self, values: Any, dtype: str) -> Any:
        """See ``Arrays``."""
        return values.astype(self.dtypes[dtype])

    def take(self, values: Any, places: Any) -> Any:
        """See ``Arrays``."""
        return values.at[places].get(mode="promise_in_bounds")

    def searchsorted(self, ends: Any, values: Any) -> Any:
        """See ``Arrays``."""
        return jnp.searchsorted(ends, values, side="right").astype(jnp.int32)

    def constant(self, name: str, values: Any) -> Any:
        """See ``Arrays``."""
        return jnp.asarray(values)

    def behind(self, values: Any, positive: Any) -> Any:
        """See ``Arrays``. The comparison makes the result depend on ``positive``, and XLA cannot remove it."""
        return jnp.where(positive < 0, 0, values)

    def loop(self, begin: int, end: int, body: Callable[[Any, Any], Any], state: Any) -> Any:
        """See ``Arrays``."""
        return lax.fori_loop(jnp.int32(begin), jnp.int32(end), body, state) if begin < end else state

    def table(self, numbers: list[int]) -> Any:
        """See ``Arrays``."""
        return jnp.asarray(numbers, jnp.int32)

    # ------------------------------------------------------------------ rings

    def slots(self, ring: Ring, row: Any) -> Any:
        """See ``Arrays``. The wrap around the ring uses a comparison, which is cheaper than the remainder of a
        division.
        """
        step = (ring.cursor - ring.size) % ring.steps + row
        return jnp.where(step >= ring.steps, step - ring.steps, jnp.where(step < 0, step + ring.steps, step))

    def write(self, memory: Any, places: Any, rows: Any) -> Any:
        """See ``Arrays``. A ``dynamic_update_slice`` of one row would copy the memory on a CPU."""
        return memory.at[places].set(rows, mode="promise_in_bounds", unique_indices=True)

    def at(self, values: Any, row: Any, column: Any) -> Any:
        """See ``Arrays``."""
        return values.at[row, column].get(mode="promise_in_bounds")

    # ------------------------------------------------------------------ random numbers

    def words(self, key: DrawKey, count: int) -> Any:
        """See ``Arrays``. ``key`` may contain a random key of JAX in place of the index of a sample."""
        if is_key(key.number.dtype):
            return _philox.bits(key.number, count)
        return _philox.words(key.seed, Purpose.REPLAY, key.number, count)

    def integers(self, words: Any, high: Any) -> Any:
        """See ``Arrays``."""
        return _philox.integers(words, jnp.maximum(high, 1))

    def scaled(self, words: Any, total: Any) -> Any:
        """See ``Arrays``. Call it only within ``wide()``."""
        return _philox.scaled(words, total)

    def no_order(self, most: int) -> dict[str, Any]:
        """Return the initial state; it is only used for an order of few elements. See ``Arrays``."""
        return {"shuffled": jnp.zeros(min(most, _philox.SHUFFLED_UP_TO), jnp.int32)}

    def in_order(
        self, key: DrawKey, n: Any, positions: Any, most: int, state: Mapping[str, Any], anew: Any
    ) -> tuple[Any, dict[str, Any]]:
        """See ``Arrays``. If the order has many elements, each position is computed separately, without the state."""
        seed, number = key
        kept = state["shuffled"] + _philox.nothing(seed[0], number, n).astype(jnp.int32)

        def shuffled() -> Any:
            return _philox.shuffled(seed, Purpose.REPLAY, number, n, most=most)

        order = lax.cond(anew & (n <= _philox.SHUFFLED_UP_TO), shuffled, lambda: kept)
        return _philox.in_order(seed, Purpose.REPLAY, number, n, positions, order, most=most), {"shuffled": order}

    # ------------------------------------------------------------------ trees of weights

    def wide(self) -> Any:
        """See ``Arrays``."""
        return jax.enable_x64(True)

    def pack(self, numbers: Any) -> Any:
        """Return 64-bit integers as two 32-bit halves, uint32 ``[..., 2]``, the lower half first."""
        return jnp.stack([numbers.astype(jnp.uint32), (numbers >> 32).astype(jnp.uint32)], -1)

    def unpack(self, memory: Any) -> Any:
        """Join 32-bit halves to uint64."""
        return (memory[..., 1].astype(jnp.uint64) << 32) | memory[..., 0].astype(jnp.uint64)

    def scatter(self, memory: Any, slots: Any, values: Any, unique: bool = False) -> Any:
        """See ``Arrays``."""
        place = memory.at[slots >> SHIFT, slots & (FAN - 1)]
        return place.set(values, mode="promise_in_bounds", unique_indices=unique)

    def overwrite(self, memory: Any, slots: Any, there: Any, values: Any) -> Any:
        """See ``Arrays``."""
        row, child = jnp.where(there, slots >> SHIFT, len(memory)), slots & (FAN - 1)
        # The largest position written to a slot is the position of the slot's last value. Example: for the slots 5, 7,
        # 5, the number 3 is written to slot 5, and 2 to slot 7, so slot 5 gets the third value.
        number = jnp.arange(1, len(slots) + 1, dtype=jnp.uint32)
        marked = memory.at[row, child, 0].set(0, mode="drop").at[row, child, 0].max(number, mode="drop")
        last = self.once(marked.at[row, child, 0].get(mode="fill", fill_value=1)) - 1
        return marked.at[row, child].set(values[last], mode="drop")

    def total(self, children: Any) -> Any:
        """See ``Arrays``."""
        return children.sum(1)

    def lowest(self, rows: Any) -> Any:
        """See ``Arrays``."""
        return rows.min(-1)

    def child(self, children: Any, rest: Any) -> tuple[Any, Any]:
        """See ``Arrays``."""
        before = total = jnp.zeros_like(rest)
        chosen = jnp.zeros(rest.shape, jnp.int32)
        for child in range(children.shape[1] - 1):
            total = total + children[:, child]
            passed = total <= rest
            chosen = chosen + passed.astype(jnp.int32)
            before = jnp.where(passed, total, before)
        return chosen, before

    def above(self, nodes: Any, count: Any) -> Any:
        """See ``Arrays``. Within a loop, ``count`` is traced, so it cannot determine a shape."""
        return nodes >> SHIFT

    def weights(self, priority: Any, alpha: float, eps: float, most: int) -> Any:
        """See ``Arrays``."""
        tables = powers(alpha)
        factors, shifts, pieces = map(jnp.asarray, (tables.factors, tables.shifts, tables.pieces))
        # The sign bit is removed, because -0.0 has a sign bit.
        bits = lax.bitcast_convert_type(priority, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
        summed = plus_bits(bits.astype(jnp.int64), bits_of(eps), jnp)
        return weights_of(summed, Powers(factors, shifts, pieces, tables.bends_down, most), jnp)

    # ------------------------------------------------------------------ to and from the host

    def to_numpy(self, values: Any, like: Any) -> Any:
        """See ``Arrays``."""
        with self.wide():
            return np.asarray(values if values.ndim == like.ndim else self.unpack(values)).astype(like.dtype)

    def from_numpy(self, values: Any, like: Any) -> Any:
        """See ``Arrays``."""
        with self.wide():
            return jnp.asarray(values if np.ndim(values) == like.ndim else self.pack(jnp.asarray(values)), like.dtype)


JAX = JaxArrays()
