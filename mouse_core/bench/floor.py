"""The least cost of copying: addresses of a table's values, and a plain copy of as many bytes.

The addresses come from pyarrow's buffers alone, independently of the code that reads batches, so that this code can
be compared with them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Stretches of bytes to copy one after another.

    Args:
        source: Addresses, uint64 ``[n]``.
        size: Bytes, int64 ``[n]``.
    """

    source: npt.NDArray[np.uint64]
    size: Int64s

    @classmethod
    def of_columns(cls, columns: Sequence[Sequence[tuple[int, int]]]) -> Pieces:
        """The pieces of several columns, ``(address, bytes)`` each, one column after another."""
        pieces = [piece for column in columns for piece in column]
        addresses, sizes = [address for address, _ in pieces], [size for _, size in pieces]
        return cls(np.array(addresses, np.uint64), np.array(sizes, np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return int(self.size.sum())


class ColumnAddresses:
    """Addresses of a column's rows by chunk, looked up on demand.

    Args:
        chunks: The column's chunks, or a function that returns a chunk by its number, if they are too many to hold.
        sizes: The number of rows of each chunk, if ``chunks`` is a function.
    """

    def __init__(
        self, chunks: Sequence[pa.Array] | Callable[[int], pa.Array], sizes: Sequence[int] | None = None
    ) -> None:
        self._chunk = chunks if callable(chunks) else chunks.__getitem__
        self._known: dict[int, tuple[int, int] | None] = {}
        if sizes is None:
            assert not callable(chunks)
            sizes = [len(chunk) for chunk in chunks]
        self.chunk_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def chunk(self, number: int) -> tuple[int, int] | None:
        """Address of a chunk's first row, and bytes a row; None where rows do not lie side by side as plain numbers."""
        if number not in self._known:
            self._known[number] = _first_row(self._chunk(number))
        return self._known[number]

    def pieces(self, starts: Int64s, length: int) -> list[tuple[int, int]] | None:
        """Address and bytes of the pieces of the windows of ``length`` rows that begin at ``starts``.

        A window that crosses chunks has a piece in each. None where a chunk is not regular.
        """
        found: list[tuple[int, int]] = []
        edges = self.chunk_starts
        firsts = (np.searchsorted(edges, starts, side="right") - 1).tolist()
        for start, first in zip(starts.tolist(), firsts, strict=True):
            row, chunk, end = start, first, start + length
            while row < end:
                stop = min(end, int(edges[chunk + 1]))
                if stop > row:
                    place = self.chunk(chunk)
                    if place is None:
                        return None
                    address, width = place
                    found.append((address + (row - int(edges[chunk])) * width, (stop - row) * width))
                    row = stop
                chunk += 1
        return found


def plain_copies(batches: Sequence[Pieces]) -> Callable[[int], None]:
    """Copies the pieces of batch ``number`` (modulo how many there are), as fast as Arrow and NumPy can.

    Arrow copies long pieces in a loop of its own, when it turns views of bytes into bytes. Views of up to
    ``_SHORT`` bytes hold the bytes themselves, so short pieces are left to NumPy.
    """
    prepared = [(_views(batch), _short_pieces(batch)) for batch in batches]

    def copy(number: int) -> None:
        views, short = prepared[number % len(prepared)]
        if views is not None:
            views.cast(pa.large_binary())
        for elements, starts in short:
            elements[starts]

    return copy


_SHORT = 12
_STRETCH = 1 << 30


def _views(batch: Pieces) -> pa.Array | None:
    long = batch.size > _SHORT
    if not long.any():
        return None
    stretch, offset = np.divmod(batch.source[long], np.uint64(_STRETCH))
    numbers, which = np.unique(stretch, return_inverse=True)
    views = np.zeros((int(long.sum()), 4), np.int32)
    views[:, 0], views[:, 2], views[:, 3] = batch.size[long], which, offset
    stretches = [pa.foreign_buffer(int(number) * _STRETCH, 2 * _STRETCH - 1) for number in numbers.tolist()]
    return pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views), *stretches])


def _short_pieces(batch: Pieces) -> list[tuple[npt.NDArray[np.void], Int64s]]:
    prepared = []
    for size in np.unique(batch.size[batch.size <= _SHORT]).tolist():
        source = batch.source[batch.size == size]
        lowest = source.min()
        step = int(np.gcd.reduce(source - lowest)) or size
        count = int(source.max() - lowest) // step + 1
        memory = (ctypes.c_uint8 * ((count - 1) * step + size)).from_address(int(lowest))
        elements = np.ndarray((count,), np.dtype((np.void, size)), memory, strides=(step,))
        prepared.append((elements, ((source - lowest) // np.uint64(step)).astype(np.int64)))
    return prepared


def _first_row(array: pa.Array) -> tuple[int, int] | None:
    rows = len(array)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        return None
    first, count = array.offset, rows
    while not pa.types.is_primitive(array.type):
        if pa.types.is_fixed_size_list(array.type):
            first, count = first * array.type.list_size, count * array.type.list_size
        elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            offsets = np.frombuffer(array.buffers()[1], np.int32 if pa.types.is_list(array.type) else np.int64)
            ends = offsets[first : first + count + 1]
            if (np.diff(ends) != ends[1] - ends[0]).any():
                return None
            first, count = int(ends[0]), int(ends[-1] - ends[0])
        else:
            return None
        array = array.values
        if array.null_count:
            return None
        first += array.offset
    if array.type.bit_width < 8:
        return None
    width = array.type.bit_width // 8
    return array.buffers()[1].address + first * width, count * width // rows
