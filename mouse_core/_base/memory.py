"""Memory for batches; a block of memory is reused as soon as no array refers to the block.

New memory from the system costs a page fault for every 4 KB that is written. For batches of a megabyte and more, this
takes longer than copying the data, and ``malloc`` returns such memory as soon as a batch is dropped. A batch's memory
is reused only after all arrays of the batch are deleted, and all views and tensors that share the memory. So reuse
never changes data that is still in use.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

# Fields begin at multiples of this many bytes: JAX uses such memory without a copy.
ALIGNMENT = 64
_STRETCHES_KEPT = 4
# Below this size the kind of memory pages makes no difference.
_LARGE = 32 << 20
_POOLS_KEPT = 8
# Usual number of shared stretches of memory, even if some batches wait to be used.
_MOST_SHARED = 8


def sparse_zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of zeros for few, scattered writes. In this array, a write allocates only a page of 4 KB; in
    other large arrays, a write allocates a page of 2 MB.
    """
    zeros: npt.NDArray[Any]
    nbytes = prod((shape,) if isinstance(shape, int) else shape) * np.dtype(dtype).itemsize
    if nbytes < _LARGE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        zeros = np.zeros(shape, dtype)
    else:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        zeros = np.frombuffer(memory, dtype).reshape(shape)
    return zeros


class MemoryPool:
    """A pool of blocks of ``nbytes`` bytes; a few unused blocks are kept for reuse.

    Args:
        nbytes: Number of bytes in a block.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # A deque, not a lock: the garbage collector returns memory, possibly in the middle of ``take``.
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=_STRETCHES_KEPT)

    def take(self) -> npt.NDArray[np.uint8]:
        """Return an array uint8 ``[nbytes]``, aligned to 64 bytes. When all views of the array are deleted, the memory
        returns to the pool.
        """
        try:
            memory = self._free.pop()
        except IndexError:
            block = np.empty(self.nbytes + ALIGNMENT, np.uint8)
            begin = -block.ctypes.data % ALIGNMENT
            memory = block[begin : begin + self.nbytes]
        return np.asarray(_Lease(memory, self._free))


class _Lease:
    """The base object of the arrays in one block of memory."""

    def __init__(self, memory: npt.NDArray[np.uint8], free: deque[npt.NDArray[np.uint8]]) -> None:
        self._memory = memory
        self._free = free
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


class BatchLayout:
    """The layout of a batch's fields in one block of memory.

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
            # Taking the fields of a record array is twice as fast as creating each array.
            offsets, shapes, dtypes = zip(*self.fields.values(), strict=True)
            formats = list(zip(dtypes, shapes, strict=True))
            self._record = np.dtype(
                {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": self.nbytes}
            )

    def arrays(self, memory: Any) -> dict[str, npt.NDArray[Any]]:
        """Return the fields as arrays in ``memory``, a buffer of ``nbytes`` bytes or more."""
        return {name: values[0] for name, values in self.batches(memory, 1).items()}

    def batches(self, memory: Any, count: int) -> dict[str, npt.NDArray[Any]]:
        """Return the fields of ``count`` consecutive batches: arrays ``[count, *shape]``."""
        if self._record is None:
            return {
                name: np.ndarray((count, *shape), dtype, memory, offset, (self.nbytes, *_strides(shape, dtype)))
                for name, (offset, shape, dtype) in self.fields.items()
            }
        record: Any = np.ndarray((count,), self._record, memory)
        return {name: record[name] for name in self.fields}


def _strides(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array."""
    return tuple(dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))


class ArrayMemory:
    """Memory for new arrays; large blocks are kept for reuse.

    Args:
        least: Smallest size, in bytes, of an array that reuses memory. For smaller arrays, new memory is as fast.
    """

    def __init__(self, least: int = 1 << 17) -> None:
        self._least = least
        self._pools: dict[int, MemoryPool] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a new array like ``np.empty``."""
        nbytes = prod(shape) * dtype.itemsize
        return np.empty(shape, dtype) if nbytes < self._least else np.ndarray(shape, dtype, self._take(nbytes))

    def arrays(self, layout: BatchLayout) -> dict[str, npt.NDArray[Any]]:
        """Return arrays in one block of memory, arranged as in ``layout``; return an empty dict if separate arrays are
        as fast.
        """
        return {} if layout.nbytes < self._least else layout.arrays(self._take(layout.nbytes))

    def _take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        # Similar sizes share a pool: 1000 has the 10 bits 1111101000, and is rounded up to 1024, like 961.
        unit = max(0, nbytes.bit_length() - 4)
        nbytes = -(-nbytes >> unit) << unit
        pool = self._pools.get(nbytes)
        if pool is None:
            if len(self._pools) >= _POOLS_KEPT:
                self._pools.clear()
            pool = self._pools[nbytes] = MemoryPool(nbytes)
        return pool.take()


@lru_cache(maxsize=1024)
def known_layout(fields: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]) -> BatchLayout:
    """Return the layout of fields (name, shape, dtype); cached, since creating it takes longer than a batch."""
    return BatchLayout({name: (shape, dtype) for name, shape, dtype in fields})


def layout_of(
    names: Iterable[str],
    size: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, np.dtype[Any]],
) -> BatchLayout:
    """Return the layout of some fields in batches of ``size``, given the shapes of their steps."""
    return known_layout(tuple((name, (*size, *shapes[name]), dtypes[name]) for name in names))


class BatchMemory(ArrayMemory):
    """Manages the memory of batches: keeps memory for the next batch, and shares one block of memory among only a few
    batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: Any = None
        self._shared: list[list[weakref.ref[Any]]] = []

    def hold(self, arrays: Iterable[npt.NDArray[Any]]) -> None:
        """Keep the memory of a copied batch until the next batch is copied.

        The next batch can then reuse this memory, which is not returned to the system.
        """
        self._held = next(iter(arrays), None)

    def share(self, arrays: Iterable[npt.NDArray[Any]]) -> None:
        """Register the shared memory of batches that were copied together. The memory exists as long as any array of
        these batches.
        """
        self._shared = [*self._shared, [weakref.ref(_owner(values)) for values in arrays]]

    @property
    def is_kept(self) -> bool:
        """Whether a large amount of shared memory is still in use, for example because a caller keeps single fields of
        many batches.
        """
        self._shared = [owners for owners in self._shared if any(owner() is not None for owner in owners)]
        return len(self._shared) >= _MOST_SHARED


def _owner(values: Any) -> Any:
    """Return the object that keeps the memory of an array alive."""
    while isinstance(values, np.ndarray) and values.base is not None:
        values = values.base
    return values
