"""Memory for batches, taken up again once nobody refers to it.

Memory fresh from the system costs a page fault for every 4 KB that is written, which for batches of a megabyte and
more takes longer than copying the data. ``malloc`` gives such memory back as soon as a batch is dropped. Keeping it is
not visible to anyone: a batch's memory is used again only after its last array is gone, views and tensors that share
it included, just as ``malloc`` would.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

# Fields begin at multiples of this many bytes: JAX takes such memory over as it is.
ALIGNMENT = 64
_KEPT = 4
# Smaller batches are as fast in memory of their own.
_POOL_FROM = 1 << 17
_POOLS_KEPT = 2


class MemoryPool:
    """Stretches of ``nbytes`` bytes, of which a few are kept when they are given back.

    Args:
        nbytes: Bytes of a stretch.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # A deque, not a lock: memory is given back by the garbage collector, possibly in the middle of ``take``.
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=_KEPT)

    def take(self) -> npt.NDArray[np.uint8]:
        """Memory, uint8 ``[nbytes]``, aligned to 64 bytes; it comes back when it and all views of it are gone."""
        try:
            memory = self._free.pop()
        except IndexError:
            block = np.empty(self.nbytes + ALIGNMENT, np.uint8)
            begin = -block.ctypes.data % ALIGNMENT
            memory = block[begin : begin + self.nbytes]
        return np.asarray(_Lease(memory, self._free))


class _Lease:
    """What arrays over a stretch of memory refer to as their base."""

    def __init__(self, memory: npt.NDArray[np.uint8], free: deque[npt.NDArray[np.uint8]]) -> None:
        self._memory = memory
        self._free = free
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


class BatchLayout:
    """Where the fields of a batch lie in one stretch of bytes.

    Args:
        fields: Shape and dtype by name.
    """

    def __init__(self, fields: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self.fields: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self.nbytes = 0
        for name, (shape, dtype) in fields.items():
            self.fields[name] = (self.nbytes, shape, dtype)
            size = prod(shape) * dtype.itemsize
            self.nbytes += size + -size % ALIGNMENT
        self._record: np.dtype[Any] | None = None
        if fields and self.nbytes < 1 << 31:
            # Taking the fields of one record is twice as fast as making an array of each.
            offsets, shapes, dtypes = zip(*self.fields.values(), strict=True)
            formats = list(zip(dtypes, shapes, strict=True))
            self._record = np.dtype(
                {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": self.nbytes}
            )

    def arrays(self, memory: Any) -> dict[str, npt.NDArray[Any]]:
        """The fields as arrays in ``memory``, a buffer of ``nbytes`` bytes or more."""
        return {name: values[0] for name, values in self.batches(memory, 1).items()}

    def batches(self, memory: Any, count: int) -> dict[str, npt.NDArray[Any]]:
        """The same for ``count`` batches that lie one after the other: arrays ``[count, *shape]``."""
        if self._record is None:
            return {
                name: np.ndarray((count, *shape), dtype, memory, offset, (self.nbytes, *_strides(shape, dtype)))
                for name, (offset, shape, dtype) in self.fields.items()
            }
        record: Any = np.ndarray((count,), self._record, memory)
        return {name: record[name] for name in self.fields}


def _strides(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Of a C-contiguous array."""
    return tuple(dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


class BatchMemory:
    """Memory for batches, kept from batch to batch where it is large."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[Any, ...], BatchLayout] = {}
        self._pools: dict[int, MemoryPool] = {}

    def take(self, fields: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> dict[str, npt.NDArray[Any]]:
        """Arrays for some fields by shape and dtype; none where fresh ones are as fast."""
        key = tuple(fields.items())
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = BatchLayout(fields)
        if layout.nbytes < _POOL_FROM:
            return {}
        pool = self._pools.get(layout.nbytes)
        if pool is None:
            if len(self._pools) >= _POOLS_KEPT:
                self._pools.clear()
            pool = self._pools[layout.nbytes] = MemoryPool(layout.nbytes)
        return layout.arrays(pool.take())
