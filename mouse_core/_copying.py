"""Copying the windows of many columns in one call.

Arrow's ``binary_view`` array says for each value how long it is and where it begins; casting it to ``binary`` copies
the values one after the other into one stretch of memory: a loop of memcpy over runs of any length, without the GIL.
So a batch is one array of views, made when its windows are located, and one cast, whatever columns, files and record
batches its windows come from. The memory is Arrow's, whose allocator keeps what it is given back, so that large batches
do not pay a page fault for every 4 KB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._memory import address_of, octets_at
from mouse_core._windows import Int64s, Pieces, Windows
from mouse_core.columns import Column

# A view holds its value's place as a buffer number and a 32-bit offset: memory is seen in stretches of 1 GB, each
# offered with the one after it, as a value may lie across.
_STRETCH_BITS = 30
# Values up to this size stand in the view itself.
_INLINE = 12


class CopyPlan:
    """What to copy for the batches of a block, for those columns that lie in memory as they are delivered.

    Args:
        block: The windows of all its batches.
        columns: Candidates, and the shape of a step, by name. Those with irregular chunks among these windows, and
            those with so little in a window that gathering is faster, are left out.
    """

    def __init__(self, block: Windows, columns: Mapping[str, tuple[Column, tuple[int, ...]]]) -> None:
        self._length = block.length
        self._bounds = block.bounds
        # Name, shape of a step, dtype, and bytes of a step.
        self._fields: list[tuple[str, tuple[int, ...], np.dtype[Any], int]] = []
        elements: list[Int64s] = []
        pieces = block.all_pieces
        # Wide dtypes first: then each field begins at a multiple of its item size.
        for name, (column, shape) in sorted(columns.items(), key=lambda item: -item[1][0].kind.dtype.itemsize):
            dtype = column.kind.dtype
            if pieces is not None and block.length * column.width * dtype.itemsize > _INLINE:
                found = column.elements(pieces)
                if found is not None:
                    elements.append(found)
                    self._fields.append((name, shape, dtype, column.width * dtype.itemsize))
        if pieces is not None and self._fields:
            self._views = self._make_views(pieces, elements)

    def _make_views(self, pieces: Pieces, elements: list[Int64s]) -> pa.Array:
        """Views of all values: batch by batch, in each field by field, in each piece by piece."""
        fields, total = len(elements), len(pieces.size)
        first_piece = np.searchsorted(pieces.target, np.multiply(self._bounds, self._length))
        self._first = (fields * first_piece).tolist()
        counts = np.diff(first_piece)
        place = np.repeat((fields - 1) * first_piece[:-1], counts) + np.arange(total)
        step = np.repeat(counts, counts)
        views = np.zeros((fields * total, 4), np.int32)  # size, first bytes, number of the buffer, offset
        addresses = np.empty(fields * total, np.int64)
        for (_, _, dtype, row_bytes), element in zip(self._fields, elements, strict=True):
            address = address_of(element, dtype.itemsize)
            addresses[place] = address
            views[place, 0] = pieces.size * row_bytes
            place += step
        stretch, numbers = _number_stretches(addresses)
        views[:, 2] = stretch
        views[:, 3] = addresses & ((1 << _STRETCH_BITS) - 1)
        if min(row_bytes for *_, row_bytes in self._fields) * int(pieces.size.min()) <= _INLINE:
            _put_inline(views, addresses)
        # The columns keep alive what lies there.
        buffers = [pa.foreign_buffer(number << _STRETCH_BITS, (2 << _STRETCH_BITS) - 1) for number in numbers]
        return pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views), *buffers])

    def copy(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """The values of batch ``number`` of the block by name, ``[n, S, *shape]``, in fresh memory."""
        if not self._fields:
            return {}
        begin, end = self._first[number], self._first[number + 1]
        n = self._bounds[number + 1] - self._bounds[number]
        steps = n * self._length
        total = steps * sum(row_bytes for *_, row_bytes in self._fields)
        copied = self._views.slice(begin, end - begin).cast(pa.binary() if total < 1 << 31 else pa.large_binary())
        memory = copied.buffers()[2]
        values, offset = {}, 0
        for name, shape, dtype, row_bytes in self._fields:
            values[name] = np.ndarray((n, self._length, *shape), dtype, memory, offset)
            offset += steps * row_bytes
        return values


def _number_stretches(addresses: Int64s) -> tuple[Int64s, list[int]]:
    """The stretch that each address lies in, counted from 0, and the stretches' places."""
    stretch = addresses >> _STRETCH_BITS
    lowest = int(stretch.min())
    span = int(stretch.max()) - lowest + 1
    if span > 4096:  # files and the heap lie far apart
        places, numbers = np.unique(stretch, return_inverse=True)
        return numbers, places.tolist()
    stretch -= lowest
    there = np.zeros(span, np.bool_)
    there[stretch] = True
    numbers = np.cumsum(there) - 1
    return numbers[stretch] if span > 1 else stretch, (np.nonzero(there)[0] + lowest).tolist()


def _put_inline(views: npt.NDArray[np.int32], addresses: Int64s) -> None:
    """Write the bytes of short values into their views."""
    (short,) = np.nonzero(views[:, 0] <= _INLINE)
    sizes = views[short, 0]
    inline = np.zeros((len(short), _INLINE), np.uint8)
    for size in np.unique(sizes).tolist():
        (same,) = np.nonzero(sizes == size)
        inline[same, :size] = octets_at(addresses[short[same]], size)
    views[short, 1:] = inline.view(np.int32)
