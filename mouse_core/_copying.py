"""Copying the windows of many columns in one call.

Arrow's ``binary_view`` array says for each value how long it is and where it begins; casting it to ``binary`` copies
the values one after the other into one stretch of memory: a loop of memcpy over runs of any length, without the GIL.
So a batch is one array of views, made when its windows are located, and one cast, whatever columns, files and record
batches its windows come from. The memory is Arrow's, whose allocator keeps what it is given back, so that large batches
do not pay a page fault for every 4 KB.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
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
# Fields begin at multiples of this many bytes: JAX takes such memory over as it is.
_ALIGNMENT = 64


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
        self._layouts: dict[int, tuple[list[tuple[str, tuple[int, ...], np.dtype[Any], int]], pa.DataType]] = {}
        elements: list[Int64s] = []
        pieces = block.all_pieces
        for name, (column, shape) in columns.items():
            dtype = column.kind.dtype
            row_bytes = column.width * dtype.itemsize
            if (
                pieces is not None
                and len(pieces.size)
                and block.length * row_bytes > _INLINE
                and int(pieces.size.max()) * row_bytes <= 1 << _STRETCH_BITS
                and _cast_copies()
            ):
                found = column.elements(pieces)
                if found is not None:
                    elements.append(found)
                    self._fields.append((name, shape, dtype, row_bytes))
        if pieces is not None and self._fields:
            self._views = self._make_views(pieces, elements)

    def _make_views(self, pieces: Pieces, elements: list[Int64s]) -> pa.Array:
        """Views of all values: batch by batch, in each field by field, in each piece by piece, and some zeros."""
        fields, total = len(elements), len(pieces.size)
        steps = np.multiply(self._bounds, self._length)
        first_piece = np.searchsorted(pieces.target, steps)
        missing = [-np.diff(steps) * row_bytes % _ALIGNMENT for *_, row_bytes in self._fields]
        pads = _PADS if np.any(missing) else 0
        counts = np.diff(first_piece) + pads  # views of a field in each batch
        first = np.concatenate([[0], np.cumsum(fields * counts)])
        self._first = first.tolist()
        pieces_of = np.diff(first_piece)
        place = np.repeat(first[:-1] - first_piece[:-1], pieces_of) + np.arange(total)
        pad_place = first[:-1] + pieces_of
        views = np.zeros((int(first[-1]), 4), np.int32)  # size, first bytes, number of the buffer, offset
        places, addresses = [], []
        for (_, _, dtype, row_bytes), element, short in zip(self._fields, elements, missing, strict=True):
            places.append(place)
            addresses.append(address_of(element, dtype.itemsize))
            views[place, 0] = pieces.size * row_bytes
            # Zeros up to the next field, a few in each of some views.
            for number in range(pads):
                views[pad_place + number, 0] = np.clip(short - number * _INLINE, 0, _INLINE)
            place = place + np.repeat(counts, pieces_of)
            pad_place = pad_place + counts
        place, address = np.concatenate(places), np.concatenate(addresses)
        stretch, numbers = _number_stretches(address)
        long = views[place, 0] > _INLINE
        views[place[long], 2] = stretch[long]
        views[place[long], 3] = address[long] & ((1 << _STRETCH_BITS) - 1)
        if not long.all():
            _put_inline(views, place[~long], address[~long])
        # The columns keep alive what lies there.
        buffers = [pa.foreign_buffer(number << _STRETCH_BITS, (2 << _STRETCH_BITS) - 1) for number in numbers]
        return pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views), *buffers])

    def copy(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """The values of batch ``number`` of the block by name, ``[n, S, *shape]``, in fresh memory.

        The fields share it: whoever keeps one of them keeps it all.
        """
        if not self._fields:
            return {}
        n = self._bounds[number + 1] - self._bounds[number]
        arrays, binary = self._layouts.get(n) or self._layouts.setdefault(n, self._lay_out(n))
        begin, end = self._first[number], self._first[number + 1]
        memory = self._views.slice(begin, end - begin).cast(binary).buffers()[2]
        return {name: np.ndarray(shape, dtype, memory, offset) for name, shape, dtype, offset in arrays}

    def _lay_out(self, n: int) -> tuple[list[tuple[str, tuple[int, ...], np.dtype[Any], int]], pa.DataType]:
        """Name, shape, dtype and place of each field of ``n`` windows in their memory, and the memory's type."""
        arrays, offset = [], 0
        for name, shape, dtype, row_bytes in self._fields:
            arrays.append((name, (n, self._length, *shape), dtype, offset))
            nbytes = n * self._length * row_bytes
            offset += nbytes + -nbytes % _ALIGNMENT
        return arrays, pa.binary() if offset < 1 << 31 else pa.large_binary()


# Views that hold the zeros between two fields.
_PADS = -(-(_ALIGNMENT - 1) // _INLINE)


@lru_cache(maxsize=1)
def _cast_copies() -> bool:
    """Whether this pyarrow casts views as described above, tried on a long and a short value."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    address = letters.ctypes.data
    buffer = pa.foreign_buffer(address >> _STRETCH_BITS << _STRETCH_BITS, (2 << _STRETCH_BITS) - 1)
    views = np.array([[20, 0, 0, address & ((1 << _STRETCH_BITS) - 1)], [3, 0, 0, 0]], np.int32)
    views[1, 1:2].view(np.uint8)[:3] = letters[:3]
    try:
        cast = pa.Array.from_buffers(pa.binary_view(), 2, [None, pa.py_buffer(views), buffer]).cast(pa.binary())
        copied = bytes(cast.buffers()[2])[:23]
    except (pa.ArrowException, ValueError):
        return False
    return copied == b"abcdefghijklmnopqrstabc"


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


def _put_inline(views: npt.NDArray[np.int32], place: Int64s, addresses: Int64s) -> None:
    """Write the bytes of short values into their views."""
    sizes = views[place, 0]
    inline = np.zeros((len(place), _INLINE), np.uint8)
    for size in np.unique(sizes).tolist():
        (same,) = np.nonzero(sizes == size)
        inline[same, :size] = octets_at(addresses[same], size)
    views[place, 1:] = inline.view(np.int32)
