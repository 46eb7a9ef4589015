"""Where the values of batches lie, as Arrow's views.

A value of Arrow's type ``binary_view`` is 16 bytes: how many bytes it has, and where they are, as the number of a
buffer and an offset. Values of up to 12 bytes stand in the view itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._memory import octets_at, words_at
from mouse_core._pool import ALIGNMENT, MemoryPool
from mouse_core._windows import Int64s, Windows
from mouse_core.columns import UNKNOWN, Column

# Offsets have 32 bits: memory is seen in stretches of 1 GB, each offered with the one behind it, as values lie across.
STRETCH_BITS = 30
_INLINE = 12
# Smaller arrays are as fast in memory of their own.
_POOL_FROM = 1 << 17
_ZEROS = pa.py_buffer(bytes(ALIGNMENT))


class CopiedField(NamedTuple):
    """A field: its name, the shape of a step, its column and dtype, and bytes of a step."""

    name: str
    shape: tuple[int, ...]
    column: Column
    dtype: np.dtype[Any]
    row_bytes: int


class Views:
    """The views of a block: batch by batch, in each field by field, in each piece by piece, and maybe some zeros.

    Args:
        fields: The fields there are, whose chunks are all regular.
        key: Which of all fields they are.
        words: The views, int64 ``[batches, fields, values, 2]``.
        buffers: What the views refer to.
        sizes: Windows of each batch.
    """

    def __init__(
        self,
        fields: list[CopiedField],
        key: tuple[int, ...],
        words: npt.NDArray[np.int64],
        buffers: Sequence[pa.Buffer],
        sizes: list[int],
    ) -> None:
        self.fields, self.key, self.sizes = fields, key, sizes
        self.words = words
        # Views of a field in a batch, and of a batch.
        self.values = words.shape[2]
        self.stride = words.shape[1] * self.values
        self.array = pa.Array.from_buffers(
            pa.binary_view(), words.size // 2, [None, pa.py_buffer(words.reshape(-1)), *buffers]
        )


class Places:
    """Where the chunks of some columns begin, looked up when a window touches them.

    Args:
        fields: Whose columns.
    """

    def __init__(self, fields: Sequence[CopiedField]) -> None:
        self._fields = fields
        self._row_bytes = np.array([field.row_bytes for field in fields], np.int64)
        # Of every chunk of every column the address, and the same as a view says it; below 0: not regular.
        self._begins = np.stack([field.column.known_begins() for field in fields])
        self._words = np.full_like(self._begins, UNKNOWN)
        self._lowest = np.full(self._words.shape[1], UNKNOWN, np.int64)
        self._stretches: dict[int, int] = {}
        self._buffers: list[pa.Buffer] = []
        self._memory = MemoryPool(0)

    def views(self, block: Windows) -> Views | None:
        """The views of a block; None if no field has only regular chunks there."""
        chunk, row, size = block.pieces
        key = self._regular(chunk, int(size.max()))
        if not key:
            return None
        # Beyond the second GB of a chunk an offset needs a buffer of its own.
        largest = int(np.diff(block.chunks.starts).max()) * int(self._row_bytes.max())
        giant = largest > 1 << STRETCH_BITS
        sizes = np.diff(block.bounds)
        row_bytes = self._row_bytes[list(key)]
        missing = -(sizes[:, None] * (row_bytes * block.length)) % ALIGNMENT
        padded = int(missing.any())
        batches, values = chunk.shape
        # Size and first bytes; number of the buffer and offset.
        words = self._empty((batches, len(key), values + padded, 2))
        equal = bool((size == size[0, 0]).all())
        for place, number in enumerate(key):
            # Field by field, so that what is worked on stays in the cache.
            nbytes, view = self._fields[number].row_bytes, words[:, place, :values]
            view[..., 0] = size[0, 0] * nbytes if equal else size * nbytes
            if block.length * nbytes <= _INLINE:
                continue
            if giant:
                view[..., 1] = self._to_words(self._begins[number].take(chunk) + row * nbytes)
            else:
                np.add(self._words[number].take(chunk), row * (nbytes << 32), out=view[..., 1])
        fields = [self._fields[number] for number in key]
        _put_inline(words[:, :, :values], fields, [self._begins[number] for number in key], chunk, row, size)
        buffers = list(self._buffers)
        if padded:
            words[:, :, values, 0] = missing
            words[:, :, values, 1] = np.where(missing > _INLINE, len(buffers), 0)
            buffers.append(_ZEROS)
        return Views(fields, key, words, buffers, sizes.tolist())

    def _regular(self, chunk: Int64s, longest: int) -> tuple[int, ...]:
        """The fields whose values lie side by side in all of some chunks, where values have so many steps at most."""
        lowest = self._lowest.take(chunk)
        if lowest.min() < 0:
            fresh = np.unique(chunk[lowest == UNKNOWN])
            if len(fresh):
                for place, field in enumerate(self._fields):
                    self._begins[place, fresh] = field.column.begins(fresh)
                begins = self._begins[:, fresh]
                self._words[:, fresh] = np.where(begins < 0, begins, self._to_words(begins))
                self._lowest[fresh] = begins.min(axis=0)
                lowest = self._lowest.take(chunk)
        kept = longest * self._row_bytes <= 1 << STRETCH_BITS
        if lowest.min() < 0:
            kept &= self._begins[:, np.unique(chunk)].min(axis=1) >= 0
        return tuple(np.nonzero(kept)[0].tolist())

    def _empty(self, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Memory for views, that of earlier ones if they are gone: fresh memory costs more than writing to it."""
        nbytes = 8 * prod(shape)
        if nbytes < _POOL_FROM:
            return np.empty(shape, np.int64)
        if not self._memory.nbytes // 2 <= nbytes <= self._memory.nbytes:
            self._memory = MemoryPool(nbytes + nbytes // 8)
        return np.ndarray(shape, np.int64, self._memory.take())

    def _to_words(self, addresses: Int64s) -> Int64s:
        """Number of the buffer and offset of some addresses, as a view has them."""
        stretch = addresses >> STRETCH_BITS
        there = np.unique(stretch)
        for place in there.tolist():
            if place >= 0 and place not in self._stretches:
                self._stretches[place] = len(self._buffers)
                # The columns keep alive what lies there.
                self._buffers.append(pa.foreign_buffer(place << STRETCH_BITS, (2 << STRETCH_BITS) - 1))
        numbers = np.array([self._stretches.get(place, 0) for place in there.tolist()])
        number = numbers[np.searchsorted(there, stretch)] if len(there) > 1 else numbers[0]
        words: Int64s = ((addresses & ((1 << STRETCH_BITS) - 1)) << 32) | number
        return words


def _put_inline(
    views: npt.NDArray[np.int64],
    fields: Sequence[CopiedField],
    begins: Sequence[Int64s],
    chunk: Int64s,
    row: Int64s,
    size: Int64s,
) -> None:
    """Write the bytes of short values into their views.

    Args:
        views: Int64 ``[batches, fields, values, 2]``.
        fields: The fields.
        begins: The address of every chunk by field, int64 ``[chunks]``.
        chunk, row, size: Where each value begins, and its steps, int64 ``[batches, values]``.
    """
    words = views.view(np.int32)
    shortest, longest = int(size.min()), int(size.max())
    most = _INLINE // min(field.row_bytes for field in fields)
    if shortest == longest:
        for place, field in enumerate(fields):
            if longest * field.row_bytes <= _INLINE:
                addresses = begins[place].take(chunk.reshape(-1)) + field.row_bytes * row.reshape(-1)
                values = _read(addresses, longest * field.row_bytes, field.dtype.itemsize)
                words[:, place, :, 1 : 1 + values.shape[1]] = values.reshape(*size.shape, -1)
        return
    batches, slots = np.nonzero((size <= most) & (size > 0))
    if not len(batches):
        return
    chunk, row, steps = chunk[batches, slots], row[batches, slots], size[batches, slots]
    for place, field in enumerate(fields):
        for count in range(1, _INLINE // field.row_bytes + 1):
            (same,) = np.nonzero(steps == count)
            if len(same):
                batch, slot = batches[same], slots[same]
                inline = np.zeros((len(same), 3), np.int32)
                addresses = begins[place][chunk[same]] + field.row_bytes * row[same]
                values = _read(addresses, count * field.row_bytes, field.dtype.itemsize)
                inline[:, : values.shape[1]] = values
                words[batch, place, slot, 1:] = inline


def _read(addresses: Int64s, size: int, itemsize: int) -> npt.NDArray[np.int32]:
    """``size`` bytes from each address, filled up to whole words, int32 ``[n, words]``."""
    if itemsize in (4, 8):
        return words_at(addresses, size, itemsize)
    octets = np.zeros((len(addresses), -(-size // 4) * 4), np.uint8)
    octets[:, :size] = octets_at(addresses, size)
    return octets.view(np.int32)
