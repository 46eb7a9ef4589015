"""Where the values of batches lie, as Arrow's views.

A value of Arrow's type ``binary_view`` is 16 bytes: how many bytes it has, and where they are, as the number of a
buffer and an offset. Values of up to 12 bytes stand in the view itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._memory import octets_at, words_at
from mouse_core._pool import ALIGNMENT
from mouse_core._windows import Int64s, Windows
from mouse_core.columns import UNKNOWN, Column

# Offsets have 32 bits: memory is seen in stretches of 1 GB, each offered with the one behind it, for values that lie across.
STRETCH_BITS = 30
_INLINE = 12
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
        # Of every chunk of every column the address, and the same as a view says it.
        self._begins = np.stack([field.column.known_begins() for field in fields])
        self._words = np.full_like(self._begins, UNKNOWN)
        self._stretches: dict[int, int] = {}
        self._buffers: list[pa.Buffer] = []

    def views(self, block: Windows) -> Views | None:
        """The views of a block; None if no field has only regular chunks there."""
        pieces, bounds = block.pieces, np.asarray(block.bounds)
        chunk, row, size = _in_rows(np.searchsorted(pieces.window, bounds), pieces.chunk, pieces.row, pieces.size)
        # Beyond the second GB of a chunk an offset needs a buffer of its own.
        largest = int(np.diff(block.chunks.starts).max()) * int(self._row_bytes.max())
        giant = largest > 1 << STRETCH_BITS
        found = self._find(chunk.reshape(-1), giant)
        kept = found.min(axis=1) >= 0
        kept &= int(size.max()) * self._row_bytes <= 1 << STRETCH_BITS
        key = tuple(np.nonzero(kept)[0].tolist())
        if not key:
            return None
        begins, row_bytes = self._begins, self._row_bytes
        if len(key) < len(kept):
            found, begins, row_bytes = found[kept], begins[kept], row_bytes[kept]
        sizes = np.diff(bounds)
        missing = -(sizes[:, None] * (row_bytes * block.length)) % ALIGNMENT
        padded = int(missing.any())
        batches, values = chunk.shape
        # Size and first bytes; number of the buffer and offset.
        words = np.empty((batches, len(key), values + padded, 2), np.int64)
        np.multiply(size[:, None], row_bytes[:, None], out=words[:, :, :values, 0])
        found = found.reshape(len(key), batches, values).transpose(1, 0, 2)
        distance = row[:, None] * (row_bytes if giant else row_bytes << 32)[:, None]
        if giant:
            words[:, :, :values, 1] = self._to_words(found + distance)
        else:
            np.add(found, distance, out=words[:, :, :values, 1])
        fields = [self._fields[place] for place in key]
        _put_inline(words[:, :, :values], fields, begins, chunk, row, size)
        buffers = list(self._buffers)
        if padded:
            words[:, :, values, 0] = missing
            words[:, :, values, 1] = np.where(missing > _INLINE, len(buffers), 0)
            buffers.append(_ZEROS)
        return Views(fields, key, words, buffers, sizes.tolist())

    def _find(self, chunk: Int64s, giant: bool) -> Int64s:
        """Where each of some chunks begins in each column, int64 ``[columns, n]``; below 0: not regular."""
        found: Int64s = (self._begins if giant else self._words).take(chunk, axis=1)
        if found.min() == UNKNOWN or (found == UNKNOWN).any():
            fresh = np.unique(chunk[(found == UNKNOWN).any(axis=0)])
            for place, field in enumerate(self._fields):
                self._begins[place, fresh] = field.column.begins(fresh)
            begins = self._begins[:, fresh]
            self._words[:, fresh] = np.where(begins < 0, begins, self._to_words(begins))
            found = (self._begins if giant else self._words).take(chunk, axis=1)
        return found

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


def _in_rows(first: Int64s, chunk: Int64s, row: Int64s, size: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The pieces with a row for each batch, int64 ``[batches, most]``; pieces of no steps fill it up."""
    counts = np.diff(first)
    most = int(counts.max())
    if (counts == most).all():
        return chunk.reshape(-1, most), row.reshape(-1, most), size.reshape(-1, most)
    place = first[:-1, None] + np.arange(most)
    beyond = place >= first[1:, None]
    place[beyond] = 0
    filled = size[place]
    filled[beyond] = 0
    return chunk[place], row[place], filled


def _put_inline(
    views: npt.NDArray[np.int64],
    fields: Sequence[CopiedField],
    begins: Int64s,
    chunk: Int64s,
    row: Int64s,
    size: Int64s,
) -> None:
    """Write the bytes of short values into their views.

    Args:
        views: Int64 ``[batches, fields, values, 2]``.
        fields: The fields.
        begins: The address of every chunk, int64 ``[fields, chunks]``.
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
                addresses = begins[place, chunk[same]] + field.row_bytes * row[same]
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
