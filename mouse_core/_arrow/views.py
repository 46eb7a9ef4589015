"""Where the values of batches lie, as Arrow's views.

A value of Arrow's type ``binary_view`` is 16 bytes: how many bytes it has, and where they are, as the number of a
buffer and an offset. Values of up to 12 bytes stand in the view itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import element_of_all, octets_at
from mouse_core._arrow.column import Column, Growth
from mouse_core._arrow.dense_copies import UNKNOWN
from mouse_core._arrow.windows import Int64s, Windows, distinct
from mouse_core._base.memory import ALIGNMENT, MemoryPool

# Offsets have 32 bits: memory is seen in stretches of 1 GB, each offered with the one behind it, as values lie across.
STRETCH_BITS = 30
_INLINE = 12
# Smaller arrays are as fast in memory of their own.
_POOL_FROM = 1 << 17
# Chunks that may come without what is known of the others being copied.
_ROOM = 64
# A block makes at most so many times as many rows of a column dense as it reads.
_DENSE_ROWS = 8
# In place of the lowest address of a chunk: some column has values there that are not allowed.
_BEYOND = -3
# The processor knows where most pages of fewer bytes lie: on 170 MB looking ahead gains nothing, on 1.7 GB 9 per cent.
_WIDE_BYTES = 1 << 29
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
        short: By name those of them whose windows would stand in the views themselves. They have none: these are the
            elements of ``flat_view`` at which their windows begin, int64 ``[batches, n]``.
        words: The views of the others, int64 ``[batches, fields, values, 2]``.
        buffers: What the views refer to.
        sizes: Windows of each batch.
        unsure: The names of fields of which some values in these chunks may be larger than allowed.
        heads: The first byte of every value, as an element of ``flat_view``, int64 ``[batches, fields, values]``, where
            it is worth looking at them ahead.
    """

    def __init__(
        self,
        fields: list[CopiedField],
        short: dict[str, Int64s],
        words: npt.NDArray[np.int64],
        buffers: Sequence[pa.Buffer],
        sizes: list[int],
        unsure: list[str],
        heads: Int64s | None,
    ) -> None:
        self.fields, self.short, self.sizes, self.unsure = fields, short, sizes, unsure
        self.long = [field for field in fields if field.name not in short]
        self.key = tuple(field.name for field in self.long)
        self.words, self.heads = words, heads
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
        highest: For some fields the largest value allowed, where the lowest is 0.
    """

    def __init__(self, fields: Sequence[CopiedField], highest: Mapping[str, int]) -> None:
        self._fields = fields
        self._highest = {place: highest[field.name] for place, field in enumerate(fields) if field.name in highest}
        self._row_bytes = np.array([field.row_bytes for field in fields], np.int64)
        # Of every chunk, in one row, so that looking it up touches memory once: the address at which each column
        # begins, as a view says it, and the lowest of these; below 0: not regular. And the addresses themselves.
        self._begins = np.stack([field.column.known_begins() for field in fields], axis=1)
        self._words = np.full((len(self._begins), len(fields) + 1), UNKNOWN)
        self._beyond = np.zeros((len(self._begins), len(fields)), np.bool_)
        self._chunks = len(self._begins)
        # Whose the chunks are that were appended.
        self._owners: dict[int, object] = {}
        # Stretches of memory, numbered in their order here; the columns keep alive what lies there.
        self._stretches: dict[int, pa.Buffer] = {}
        self._memory = MemoryPool(0)

    def over(self, fields: Sequence[CopiedField], growth: Growth) -> Places:
        """Those of the same columns with rows appended.

        What is known of chunks that are the same is shared, which takes no time; chunks come behind it in memory that
        is there. If some chunk is another now it is copied. One thread at a time may call this and ``views``, of all
        that share it.
        """
        other: Places = object.__new__(Places)
        other.__dict__.update(self.__dict__)
        other._fields = fields
        first = self._chunks
        if growth.replaced is not None:
            first -= 1
        other._chunks = first + len(growth.appended)
        fits = other._chunks <= len(self._words) and self._is_same(growth)
        for number, segment in enumerate(growth.appended, first):
            # A dense copy has the rows that its chunk had then.
            fits = fits and all(field.column.lies_in(segment) for field in fields)
            fits = fits and self._owners.setdefault(number, segment.block) is segment.block
        if not fits:
            room = other._chunks + other._chunks // 8 + _ROOM
            other._begins = _longer(self._begins[:first], room)
            other._words = _longer(self._words[:first], room)
            other._beyond = _longer(self._beyond[:first], room)
            other._owners = {number: segment.block for number, segment in enumerate(growth.appended, first)}
        return other

    def _is_same(self, growth: Growth) -> bool:
        """Whether what is known of the last chunk holds now that it has more rows: values are where they were.

        None of the appended numbers are beyond those allowed: it was looked at when they were.
        """
        before = growth.replaced
        if before is None:
            return True
        now = growth.appended[0].places
        names = {field.column.name for field in self._fields}
        return all(name in now and before.places.get(name) == now[name] for name in names)

    def views(self, block: Windows) -> Views | None:
        """The views of a block; None if no field has only regular chunks there."""
        chunk, row, size = block.pieces
        longest = int(size.max())
        equal = bool((size == longest).all())
        begins, regular, unsure = self._find(chunk, longest, int(size.sum()))
        if not regular:
            return None
        fields = [self._fields[number] for number in regular]
        short = {}
        if equal:
            for number in regular:
                field = self._fields[number]
                if longest * field.row_bytes <= _INLINE:
                    addresses = self._begins[:, number].take(chunk)
                    addresses += field.row_bytes * row
                    short[field.name] = element_of_all(addresses, field.dtype.itemsize)
            regular = [number for number in regular if self._fields[number].name not in short]
        # Beyond the second GB of a chunk an offset needs a buffer of its own.
        largest = block.chunks.longest * int(self._row_bytes.max())
        giant = largest > 1 << STRETCH_BITS
        sizes = np.diff(block.bounds)
        row_bytes = self._row_bytes[regular]
        missing = -(sizes[:, None] * (row_bytes * block.length)) % ALIGNMENT
        padded = int(missing.any())
        batches, values = chunk.shape
        # Size and first bytes; number of the buffer and offset.
        words = self._empty((batches, len(regular), values + padded, 2))
        wide = int(block.chunks.starts[-1]) * int(row_bytes.sum()) >= _WIDE_BYTES
        heads = np.empty((batches, len(regular), values), np.int64) if wide else None
        for place, number in enumerate(regular):
            # Field by field, so that what is worked on stays in the cache.
            nbytes, view = self._fields[number].row_bytes, words[:, place, :values]
            if equal:
                view[..., 0] = longest * nbytes
            else:
                np.multiply(size, nbytes, out=view[..., 0])
            if giant:
                word = self._to_words(self._begins[chunk, number] + row * nbytes)
            else:
                word = row * (nbytes << 32)
                word += begins[..., number]
            view[..., 1] = word
            if heads is not None:
                heads[:, place] = self._to_elements(word)
        if heads is not None and not equal:
            empty, slot = np.divmod(np.flatnonzero(size == 0), values)  # what fills a batch up
            heads[empty, :, slot] = heads[empty, :, 0]
        if not short:
            self._put_inline(words, regular, chunk, row, size)
        buffers = list(self._stretches.values())
        if padded:
            words[:, :, values, 0] = missing
            words[:, :, values, 1] = np.where(missing > _INLINE, len(buffers), 0)
            buffers.append(_ZEROS)
        unsure = [field.name for field in fields if field.name in unsure]
        return Views(fields, short, words, buffers, sizes.tolist(), unsure, heads)

    def _find(self, chunk: Int64s, longest: int, rows: int) -> tuple[Int64s, list[int], list[str]]:
        """Where some chunks begin, as ``words`` has it; the fields whose values lie side by side in all of them; and
        the names of those of whose values some may not be allowed.

        Args:
            chunk: Int64 ``[batches, values]``.
            longest: The steps of the longest value.
            rows: The steps of all values.
        """
        found = self._words.take(chunk, axis=0)
        if found[..., -1].min() < 0:
            fresh = distinct(chunk[found[..., -1] == UNKNOWN], len(self._words))
            if len(fresh):
                self._look_up(fresh, _DENSE_ROWS * rows)
                found = self._words.take(chunk, axis=0)
        kept = longest * self._row_bytes <= 1 << STRETCH_BITS
        unsure: list[str] = []
        if found[..., -1].min() < 0:
            kept &= (found[..., :-1] >= 0).all(axis=(0, 1))
            unsure = [self._fields[place].name for place in self._highest if self._beyond[chunk, place].any()]
        return found, np.nonzero(kept)[0].tolist(), unsure

    def _look_up(self, fresh: Int64s, rows: int) -> None:
        """Find out about some chunks, int64 ``[n]``, ascending, and make so many rows of each column dense."""
        begins = np.stack([field.column.begins(fresh, rows) for field in self._fields], axis=1)
        for place, highest in self._highest.items():
            regular = begins[:, place] >= 0
            largest = self._fields[place].column.largest(fresh[regular])
            self._beyond[fresh[regular], place] = largest > highest
        self._begins[fresh] = begins
        self._words[fresh, :-1] = np.where(begins < 0, begins, self._to_words(begins))
        lowest = np.where(self._beyond[fresh].any(axis=1), _BEYOND, begins.min(axis=1))
        # What can still be made dense is looked up again.
        self._words[fresh, -1] = np.where((begins == UNKNOWN).any(axis=1), UNKNOWN, lowest)

    def _put_inline(
        self, words: npt.NDArray[np.int64], fields: list[int], chunk: Int64s, row: Int64s, size: Int64s
    ) -> None:
        """Write the bytes of short values, as of windows that end shortly behind a chunk's end, into their views.

        Args:
            words: The views.
            fields: The fields that have views.
            chunk, row, size: Where each value begins, and its steps, int64 ``[batches, values]``.
        """
        row_bytes = self._row_bytes[fields]
        batch, slot = np.divmod(np.flatnonzero(size <= _INLINE // row_bytes.min(initial=_INLINE)), size.shape[1])
        there = size[batch, slot] > 0
        batch, slot = batch[there], slot[there]
        nbytes = size[batch, slot, None] * row_bytes
        which, place = np.nonzero(nbytes <= _INLINE)
        if not len(which):
            return
        nbytes, batch, slot = nbytes[which, place, None], batch[which], slot[which]
        addresses = self._begins[chunk[batch, slot], np.array(fields)[place]] + row[batch, slot] * row_bytes[place]
        # The last byte stands for those behind it, of which nobody knows whether they are there.
        octets = octets_at(addresses, np.minimum(np.arange(_INLINE), nbytes - 1))
        octets[np.arange(_INLINE) >= nbytes] = 0
        words.view(np.int32)[batch, place, slot, 1:] = octets.view(np.int32)

    def _empty(self, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Memory for views, that of earlier ones if they are gone: fresh memory costs more than writing to it."""
        nbytes = 8 * prod(shape)
        if nbytes < _POOL_FROM:
            return np.empty(shape, np.int64)
        if not self._memory.nbytes // 2 <= nbytes <= self._memory.nbytes:
            self._memory = MemoryPool(nbytes + nbytes // 8)
        return np.ndarray(shape, np.int64, self._memory.take())

    def _to_elements(self, words: Int64s) -> Int64s:
        """Where the bytes are that some words of views refer to, as elements of ``flat_view``."""
        first = element_of_all(np.array(list(self._stretches)) << STRETCH_BITS, 1)
        elements: Int64s = words >> 32
        elements += first[0] if len(first) == 1 else first.take(words & 0xFFFFFFFF)
        return elements

    def _to_words(self, addresses: Int64s) -> Int64s:
        """Number of the buffer and offset of some addresses, as a view has them."""
        stretch = addresses >> STRETCH_BITS
        there = np.unique(stretch)
        for place in there.tolist():
            if place >= 0 and place not in self._stretches:
                self._stretches[place] = pa.foreign_buffer(place << STRETCH_BITS, (2 << STRETCH_BITS) - 1)
        known = {place: number for number, place in enumerate(self._stretches)}
        numbers = np.array([known.get(place, 0) for place in there.tolist()])
        number = numbers[np.searchsorted(there, stretch)] if len(there) > 1 else numbers[0]
        words: Int64s = ((addresses & ((1 << STRETCH_BITS) - 1)) << 32) | number
        return words


def _longer(rows: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """``count`` rows: those given, then some of which nothing is known."""
    more = np.empty((count, *rows.shape[1:]), rows.dtype)
    more[: len(rows)] = rows
    more[len(rows) :] = False if rows.dtype == np.bool_ else UNKNOWN
    return more
