"""Array functions of torch for the samplers of ``mouse_core.replay.device``.

The torch functions are used on devices other than the host, and in compiled code. In eager code on the host, samplers
call NumPy functions on the memory of the tensors, because each operation then takes one third of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from mouse_core.replay.device.arrays import FAN, SHIFT, Arrays, DrawKey, Ring
from mouse_core.replay.samplers.weighing import Powers, bits_of, plus_bits, weights_of
from mouse_torch import _philox
from mouse_torch.device.fields import zeros

_constant: Any = torch.compiler.assume_constant_result
_bits_of: Callable[[float], int] = _constant(bits_of)


class TorchArrays(Arrays):
    """The implementation of ``Arrays`` for torch.

    The memory of a sum tree is always accessed in one shape, because compiled code would copy the memory to create a
    view of another shape.

    Args:
        device: The device of new arrays.
        constants: Tables of samplers by name, on this device.
    """

    where: ClassVar[Callable[..., Any]] = staticmethod(torch.where)
    minimum: ClassVar[Callable[..., Any]] = staticmethod(lambda one, other: one.clamp(max=other))
    maximum: ClassVar[Callable[..., Any]] = staticmethod(lambda one, other: one.clamp(min=other))
    concat: ClassVar[Callable[..., Any]] = staticmethod(torch.cat)
    dtypes: ClassVar[Mapping[str, Any]] = {
        "index": torch.int64, "count": torch.int64, "number": torch.int64, "wide": torch.int64, "bool": torch.bool,
        "float": torch.float32,
    }  # fmt: skip
    expand: ClassVar[Callable[..., Any]] = staticmethod(torch.broadcast_to)
    top_rows, parts = 1, 32

    def __init__(self, device: torch.device, constants: Mapping[str, Any] | None = None) -> None:
        self.device, self.constants = device, constants or {}

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        """See ``Arrays``."""
        kind = self.dtypes.get(dtype, dtype)
        kind = getattr(torch, kind) if isinstance(kind, str) else kind
        return torch.full(shape, value, device=self.device).to(kind)

    def range(self, count: int) -> Any:
        """See ``Arrays``."""
        return torch.arange(count, device=self.device)

    def cast(self, values: Any, dtype: str) -> Any:
        """See ``Arrays``."""
        return values.to(self.dtypes[dtype])

    def running_max(self, values: Any) -> Any:
        """See ``Arrays``."""
        return values.cummax(0).values

    def searchsorted(self, ends: Any, values: Any) -> Any:
        """See ``Arrays``."""
        return torch.searchsorted(ends, values, right=True)

    def constant(self, name: str, values: Any) -> Any:
        """See ``Arrays``."""
        return self.constants[name]

    # ------------------------------------------------------------------ rings

    def write(self, memory: Any, places: Any, rows: Any) -> Any:
        """See ``Arrays``."""
        return memory.index_copy_(0, places, rows)

    def slots(self, ring: Ring, row: Any) -> Any:
        """See ``Arrays``."""
        return (ring.cursor - ring.size + row) % ring.steps

    # ------------------------------------------------------------------ random numbers

    def words(self, key: DrawKey, count: int) -> Any:
        """See ``Arrays``. Words are int64 tensors with the bits of the unsigned words."""
        return _philox.words(key.seed, key.number, count)

    def integers(self, words: Any, high: Any) -> Any:
        """See ``Arrays``."""
        high = self.full((), high, "index") if isinstance(high, int) else high
        return _philox.scaled_integers(words, high.clamp(min=1))

    def scaled(self, words: Any, total: Any) -> Any:
        """See ``Arrays``."""
        return _philox.scaled(words, total)

    def in_order(
        self, key: DrawKey, n: Any, positions: Any, most: int, state: Mapping[str, Any], anew: Any
    ) -> tuple[Any, dict[str, Any]]:
        """See ``Arrays``."""
        return _philox.in_order(key.seed, key.number, n, positions, most), {}

    def to_numpy(self, values: Any, like: Any) -> Any:
        """See ``Arrays``."""
        return values.detach().cpu().numpy()

    def from_numpy(self, values: Any, like: Any) -> Any:
        """See ``Arrays``."""
        return torch.as_tensor(np.asarray(values)).to(like)

    # ------------------------------------------------------------------ trees of weights

    def take(self, values: Any, places: Any) -> Any:
        """See ``Arrays``."""
        return values.index_select(0, places)

    def at(self, values: Any, row: Any, column: Any) -> Any:
        """See ``Arrays``."""
        return values[row, column]

    def scatter(self, memory: Any, slots: Any, values: Any, unique: bool = False) -> Any:
        """See ``Arrays``."""
        return memory.index_put_((slots >> SHIFT, slots & (FAN - 1)), values)

    def overwrite(self, memory: Any, slots: Any, there: Any, values: Any) -> Any:
        """See ``Arrays``. If a slot occurs several times, its last value is written to the slot, and all other values
        are written to the last row."""
        nowhere = (len(memory) - 1) * FAN
        place, order = torch.where(there, slots, nowhere).sort(stable=True)
        last = torch.cat([place[1:] != place[:-1], there.new_ones(1)])
        return self.scatter(memory, torch.where(last, place, nowhere), values.index_select(0, order))

    def wide_memory(self, rows: int) -> Any:
        """See ``Arrays``."""
        return zeros((rows, FAN), torch.int64, self.device)

    def total(self, children: Any) -> Any:
        """See ``Arrays``."""
        return children.sum(1)

    def lowest(self, rows: Any) -> Any:
        """See ``Arrays``."""
        return rows.amin(1)

    def child(self, children: Any, rest: Any) -> tuple[Any, Any]:
        """See ``Arrays``. Running sums never decrease, so of the sums that are at most ``rest``, the last sum is the
        largest.
        """
        sums = children.cumsum(1)[:, :-1]
        passed = sums <= rest[:, None]
        return passed.sum(1), torch.where(passed, sums, 0).amax(1)

    def weights(self, priority: Any, alpha: float, eps: float, most: int) -> Any:
        """See ``Arrays``."""
        factors, shifts, pieces = (self.constants[name] for name in ("factors", "shifts", "pieces"))
        # The sign bit is removed, because 0 may be negative.
        bits = priority.view(torch.int32).to(torch.int64) & 0x7FFFFFFF
        tables = Powers(factors, shifts, pieces, bends_down=alpha < 1, most=most)
        return weights_of(plus_bits(bits, _bits_of(eps), torch), tables, torch)
