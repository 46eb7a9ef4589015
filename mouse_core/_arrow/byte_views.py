"""Copying of the windows of many columns in one call.

A value of Arrow's type ``binary_view`` has 16 bytes: the length of the value, the index of the buffer that contains the
value, and the offset in this buffer. Values of up to 12 bytes are stored in the view. Casting an array of views to
``binary`` copies the values one after another to contiguous memory: a loop of memcpy over runs of any length, without
the GIL.

Therefore copying a batch needs only one array of views (``ByteViews``) and one cast, for any number of columns, files
and record batches. The array is created when the batch's windows are located. ``FieldChunks`` knows the addresses of
the chunks of all columns and creates the views. Example: 32 windows of 64 steps in two fields of 4 and 8 bytes are 64
views, of 256 and 512 bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.addresses import address_of_all, copy_runs, element_of_all, flat_view, octets_at
from mouse_core._arrow.column import Column, Growth
from mouse_core._arrow.dense import IRREGULAR, UNKNOWN
from mouse_core._arrow.windows import Int64s, Pieces, Windows, distinct
from mouse_core._base.memory import ALIGNMENT, ArrayMemory, BatchLayout, known_layout, sparse_zeros

# Offsets have 32 bits: memory is split into spans of 1 GB; each buffer includes the next span, as values may cross.
SPAN_BITS = 30
# Size in bytes of the longest value that is stored in its view.
INLINE_BYTES = 12
# A caller whose request is this number of batches ahead is one of several alternating callers.
_TURNS = 3


class CopiedField(NamedTuple):
    """A field that is copied: its name, the shape of a step, its column and dtype, the bytes of a step, and the largest
    allowed value.

    The largest allowed value is set for unsigned integers; None if all values are allowed or if other code checks the
    values.
    """

    name: str
    shape: tuple[int, ...]
    column: Column
    dtype: np.dtype[Any]
    row_bytes: int
    highest: int | None = None


class ByteViews:
    """The views of the bytes of a block of batches, ordered by batch, then field, then piece, and optionally padded
    with zeros.

    Args:
        fields: The fields whose chunks are all regular (contiguous).
        short: The fields whose windows have at most 12 bytes, by name. These fields have no views. The values of the
            dict are the indices in ``flat_view`` at which the windows begin, int64 ``[batches, n]``.
        words: The views of the other fields, int64 ``[batches, fields, values, 2]``. The first word of a view is the
            size of the value in bytes; the second word is the index of a buffer plus 2**32 times the offset in the
            buffer.
        buffers: The buffers of the views.
        sizes: Number of windows of each batch.
        length: Number of steps in a window.
        unsure: The fields that can have values above the allowed maximum in these chunks.
        padded: Number of padding values at the end, which are zeros.
        inline: Function that writes short values to the views when batches are copied; None if the views already have
            these values. Its arguments are the views, int64 ``[count, fields, values, 2]``, and the first batch.
    """

    def __init__(
        self,
        fields: Sequence[CopiedField],
        short: dict[str, Int64s],
        words: npt.NDArray[np.int64],
        buffers: Sequence[pa.Buffer],
        *,
        sizes: Sequence[int],
        length: int,
        unsure: Sequence[CopiedField],
        padded: int = 0,
        inline: Callable[[npt.NDArray[np.int64], int], None] | None = None,
    ) -> None:
        self.fields, self.short, self.sizes, self.length, self.unsure = fields, short, sizes, length, unsure
        self.long = [field for field in fields if field.name not in short]
        self.words, self._inline, self._buffers = words, inline, buffers
        # Number of a field's views in a batch, one for each piece.
        self._pieces = words.shape[2] - padded
        self._stride = words.shape[1] * words.shape[2]
        self._array = self._views(words)
        self._layouts: dict[int, BatchLayout] = {}
        # The batch after those that were last copied together, and the latest requested batch that was not among them.
        self._next_in_turn, self._latest_miss = 0, -1

    @property
    def batch_bytes(self) -> int:
        """Number of bytes of the largest batch that are copied by views."""
        return self._layout(max(self.sizes)).nbytes

    def choose_copied(self, number: int, most: int) -> tuple[int, int]:
        """Return the index of the first batch to copy and how many batches to copy, at most ``most``, when batch
        ``number`` is requested.

        Consecutive batches of equal size are copied together. Example with 8 batches together: a request for 0 copies
        0..7; the next expected request is 8, and the latest miss is 0. A request for 8 copies 8..15, and so does a
        request for 10 if other callers are about to request 8 and 9. A request for 40 copies only 40, and the latest
        miss becomes 40. A request for 41 then copies 41..48, and the next expected request is 49.
        """
        sizes = self.sizes
        for first in (self._next_in_turn, number):
            in_turn = first != number or number in (self._next_in_turn, self._latest_miss + 1)
            if in_turn and 0 <= number - first < _TURNS:
                count = 1
                while count < min(most, len(sizes) - first) and sizes[first + count] == sizes[first]:
                    count += 1
                if number < first + count:
                    self._next_in_turn, self._latest_miss = first + count, number
                    return first, count
        self._latest_miss = number
        return number, 1

    def copy(self, first: int, count: int) -> dict[str, npt.NDArray[Any]]:
        """Return batches ``first .. first + count - 1`` of equal size, ``[count, n, S, *shape]`` by field.

        All fields share one new memory block, so a reference to one field keeps the complete block alive.
        """
        n = self.sizes[first]
        found: dict[str, npt.NDArray[Any]] = {}
        if self.long:
            layout = self._layout(n)
            if self._inline is None:
                views = self._array.slice(first * self._stride, count * self._stride)
            else:
                words = self.words[first : first + count].copy()
                self._inline(words, first)
                views = self._views(words)
            found = layout.batches(_cast(views, layout.nbytes * count), count)
        if self.short:
            found = {
                field.name: found[field.name] if field.name in found else self._short(field, first, count)
                for field in self.fields
            }
        return found

    def ranges(self, first: int, count: int = 1) -> tuple[Int64s, Int64s, Int64s]:
        """Return the byte ranges that ``copy(first, count)`` reads, in any order. The result has three arrays, int64
        ``[n]``: begin addresses, end addresses, and the batch of each range, counted from ``first``.

        Short values, which are stored in the views, are left out.
        """
        words = self.words[first : first + count, :, : self._pieces].reshape(-1, 2)
        # A word has the size in its lower half; its upper half may be the first bytes of an inline value.
        sizes = words[:, 0] & 0xFFFFFFFF
        at = np.flatnonzero(sizes > (INLINE_BYTES if self._inline is None else 0))
        places, buffers = words[at, 1], np.array([buffer.address for buffer in self._buffers], np.int64)
        begins = buffers[places & 0xFFFFFFFF] + (places >> 32)
        parts = [(begins, begins + sizes[at], at // (self._pieces * self.words.shape[1]))]
        for field in self.fields if self.short else ():
            if field.name in self.short:
                elements = self.short[field.name][first : first + count]
                begins = address_of_all(elements.reshape(-1), field.dtype.itemsize)
                steps = np.array(self.sizes[first : first + count]) * self.length // elements.shape[1]
                nbytes = np.repeat(steps * field.row_bytes, elements.shape[1])
                parts.append((begins, begins + nbytes, np.repeat(np.arange(count), elements.shape[1])))
        begins, ends, numbers = (np.concatenate(some) for some in zip(*parts, strict=True))
        return begins, ends, numbers

    def allowed(self, copied: dict[str, npt.NDArray[Any]], count: int) -> npt.NDArray[np.bool_]:
        """Return whether each copied batch has no value above the allowed maximum, bool ``[count]``."""
        allowed = np.ones(count, np.bool_)
        for field in self.unsure:
            # Viewed as unsigned numbers, negative numbers are the largest.
            codes = copied[field.name].view(f"u{field.dtype.itemsize}").reshape(count, -1)
            allowed &= codes.max(axis=1, initial=0) <= field.highest
        return allowed

    def _views(self, words: npt.NDArray[np.int64]) -> pa.Array:
        """Return ``words`` as an Arrow array of views."""
        return pa.Array.from_buffers(
            pa.binary_view(), words.size // 2, [None, pa.py_buffer(words.reshape(-1)), *self._buffers]
        )

    def _short(self, field: CopiedField, first: int, count: int) -> npt.NDArray[Any]:
        """Return the windows of batches of a field without views, ``[count, n, S, *shape]``."""
        elements, n = self.short[field.name][first : first + count].reshape(-1), self.sizes[first]
        steps = count * n * self.length // len(elements)
        values = copy_runs(field.dtype, elements, steps * field.row_bytes // field.dtype.itemsize)
        return values.reshape(count, n, self.length, *field.shape)

    def _layout(self, n: int) -> BatchLayout:
        """Return the memory layout of the copied fields that have views, for ``n`` windows."""
        layout = self._layouts.get(n)
        if layout is None:
            fields = [(field.name, (n, self.length, *field.shape), field.dtype) for field in self.long]
            layout = self._layouts[n] = known_layout(tuple(fields))
        return layout


def to_words(addresses: Int64s, spans: dict[int, pa.Buffer]) -> Int64s:
    """Convert each address to the index of a buffer and an offset, in the form of a view; -1 stays negative.

    Spans have 2**30 bytes. If span 5 is buffer 0 and span 9 buffer 1, address ``9 * 2**30 + 70`` becomes
    ``70 << 32 | 1``.

    Args:
        addresses: int64 ``[n]``.
        spans: The spans in the order of their buffers; missing spans are appended.
    """
    span = addresses >> SPAN_BITS
    different = np.unique(span)
    for one in different.tolist():
        if one >= 0 and one not in spans:
            spans[one] = pa.foreign_buffer(one << SPAN_BITS, (2 << SPAN_BITS) - 1)
    buffers = {one: number for number, one in enumerate(spans)}
    numbers = np.array([buffers.get(one, 0) for one in different.tolist()], np.int64)
    number = numbers[np.searchsorted(different, span)] if len(different) != 1 else numbers[0]
    words: Int64s = ((addresses & ((1 << SPAN_BITS) - 1)) << 32) | number
    return words


_CAST = pc.get_function("cast")
_TO_BINARY = pc.CastOptions(pa.binary())
_TO_LARGE_BINARY = pc.CastOptions(pa.large_binary())


def _cast(views: pa.Array, nbytes: int) -> pa.Buffer:
    """Concatenate the bytes to which views refer, at most ``nbytes``."""
    # Without the checks of Array.cast, which take as long as copying 10 KB.
    return _CAST.call([views], _TO_BINARY if nbytes < 1 << 31 else _TO_LARGE_BINARY).buffers()[2]


@lru_cache(maxsize=1)
def cast_copies() -> bool:
    """Whether this version of pyarrow can cast ``binary_view`` to ``binary`` correctly; tested with a long and a short
    value.
    """
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    address = letters.ctypes.data
    buffer = pa.foreign_buffer(address >> SPAN_BITS << SPAN_BITS, (2 << SPAN_BITS) - 1)
    views = np.array([[20, 0, 0, address & ((1 << SPAN_BITS) - 1)], [3, 0, 0, 0]], np.int32)
    views[1, 1:2].view(np.uint8)[:3] = letters[:3]
    try:
        cast = pa.Array.from_buffers(pa.binary_view(), 2, [None, pa.py_buffer(views), buffer])
        copied = bytes(_cast(cast, 23))[:23]
    except (pa.ArrowException, ValueError):
        return False
    return copied == b"abcdefghijklmnopqrstabc"


# Number of chunks that may be added before the table of known chunks is copied.
_ROOM = 64
# Largest number of rows that a block makes dense per row that it reads.
_DENSE_ROWS = 8
# State of a chunk whose values have not been checked against their limit; different from all other states.
_UNSEEN = min(IRREGULAR, UNKNOWN) - 1
_ZEROS = pa.py_buffer(bytes(ALIGNMENT))


@dataclass
class _Table:
    """A table of the known properties of chunks, with a row for each chunk; snapshots with equal chunks share the
    table.

    Args:
        begins: The address at which each column begins, ``UNKNOWN`` or ``IRREGULAR``, int64 ``[chunks, fields]``.
        words: ``begins`` in the form of a view, followed by the chunk's state, int64 ``[chunks, fields + 1]``; with
            both in one row, a lookup touches memory once. The state is 1 if all columns are regular and all values
            allowed, else ``UNKNOWN``, ``IRREGULAR`` or ``_UNSEEN``.
        exceeds: Whether a column can have values above its maximum in the chunk, bool ``[chunks, fields]``.
        owners: The memory of appended rows, by the index of the chunk.
    """

    begins: Int64s
    words: Int64s
    exceeds: npt.NDArray[np.bool_]
    owners: dict[int, object]

    def resized(self, count: int, room: int) -> _Table:
        """Return a table for ``room`` chunks with the first ``count`` chunks; the other chunks are unknown."""
        begins, words, exceeds = (_longer(rows[:count], room) for rows in (self.begins, self.words, self.exceeds))
        return _Table(begins, words, exceeds, {})


@dataclass(frozen=True, eq=False)
class FieldChunks:
    """The chunks of fields' columns; a chunk is looked up when a window touches the chunk. Only one thread at a time
    may use this object.

    Args:
        fields: The fields.
        table: The known properties of the chunks.
        chunks: Number of existing chunks in the table.
        row_bytes: Size in bytes of one step of each field, int64 ``[fields]``.
        spans: The spans of memory, numbered in this order; the columns keep the memory alive.
        memory: The memory in which the views are allocated.
    """

    fields: Sequence[CopiedField]
    table: _Table
    chunks: int
    row_bytes: Int64s
    spans: dict[int, pa.Buffer] = dataclasses.field(default_factory=dict)
    memory: ArrayMemory = dataclasses.field(default_factory=ArrayMemory)

    @classmethod
    def of(cls, fields: Sequence[CopiedField]) -> FieldChunks:
        """Create the table for fields, with the chunks that the fields' columns have already located."""
        # Of millions of chunks, few are ever used, and zeros need no memory until they are written.
        begins = sparse_zeros((int(fields[0].column._first_chunk[-1]), len(fields)), np.int64)
        for number, one in enumerate(fields):
            if (known := one.column.begins_so_far()) is not None:
                (some,) = np.nonzero(known)
                begins[some, number] = known[some]
        words = sparse_zeros((len(begins), len(fields) + 1), np.int64)
        table = _Table(begins, words, sparse_zeros(begins.shape, np.bool_), {})
        return cls(fields, table, len(begins), np.array([one.row_bytes for one in fields], np.int64))

    def forward(self, fields: Sequence[CopiedField], growth: Growth) -> FieldChunks:
        """Return the table of the same fields for a snapshot with appended rows.

        Properties of unchanged chunks are shared, in constant time; new chunks are appended in reserved memory. If a
        chunk has changed, the table is copied.
        """
        first = self.chunks - len(growth.replaced)
        chunks, table = first + len(growth.appended), self.table
        fits = chunks <= len(table.words) and self._is_same(growth)
        for number, segment in enumerate(growth.appended, first):
            # A dense copy has only the rows that its chunk had when the copy was made.
            fits = fits and all(one.column.can_copy_from(segment) for one in fields)
            fits = fits and table.owners.setdefault(number, segment.extent) is segment.extent
        if not fits:
            table = table.resized(first, chunks + chunks // 8 + _ROOM)
            table.owners |= {number: segment.extent for number, segment in enumerate(growth.appended, first)}
        return replace(self, fields=fields, table=table, chunks=chunks)

    def _is_same(self, growth: Growth) -> bool:
        """Return whether the values of the last chunk did not move when rows were appended, so that the known
        properties of the chunk are still valid.

        Appended numbers are within the allowed range, since they were checked on append.
        """
        if not growth.replaced:
            return True
        before, now = growth.replaced[0].addresses, growth.appended[0].addresses
        names = {one.column.name for one in self.fields}
        return len(growth.replaced) == 1 and all(name in now and before.get(name) == now[name] for name in names)

    def byte_views(self, windows: Windows, *, later: bool = False) -> ByteViews | None:
        """Return the views of windows; None if, in these windows, every field has an irregular chunk.

        With ``later``, values of the windows are read only when they are copied.
        """
        pieces = windows.pieces
        longest = int(pieces.size.max())
        begins, regular, unsure = self._begins_and_fields(pieces, longest, look=not later)
        if not regular:
            return None
        fields = [self.fields[number] for number in regular]
        short = {}
        if (pieces.size == longest).all():
            short = self._short(pieces, longest, regular)
            regular = [number for number in regular if self.fields[number].name not in short]
        # Zeros after the values of a field align the values of the next field to ``ALIGNMENT``.
        sizes = np.diff(windows.bounds)
        zeros = -(sizes[:, None] * (self.row_bytes[regular] * windows.length)) % ALIGNMENT
        padded = int(zeros.any())
        batches, values = pieces.chunk.shape
        words = self.memory.empty((batches, len(regular), values + padded, 2), np.dtype(np.int64))
        # Beyond the second GB of a chunk, an offset needs a separate buffer.
        giant = windows.stretches.longest * int(self.row_bytes.max()) > 1 << SPAN_BITS
        self._write(words, pieces, begins, regular, giant=giant)
        inline = None if short else partial(self._put_inline, pieces, np.array(regular))
        if inline is not None and not later:
            inline(words, 0)
        buffers = list(self.spans.values())
        if padded:
            words[:, :, values, 0] = zeros
            words[:, :, values, 1] = np.where(zeros > INLINE_BYTES, len(buffers), 0)
            buffers.append(_ZEROS)
        return ByteViews(
            fields,
            short,
            words,
            buffers,
            sizes=sizes.tolist(),
            length=windows.length,
            unsure=[one for one in fields if one.name in unsure],
            padded=padded,
            inline=inline if later else None,
        )

    def _short(self, pieces: Pieces, steps: int, numbers: list[int]) -> dict[str, Int64s]:
        """Return where pieces of ``steps`` steps begin, for fields whose values would fit into views."""
        short = {}
        for number in numbers:
            one = self.fields[number]
            if steps * one.row_bytes <= INLINE_BYTES:
                addresses = self.table.begins[:, number].take(pieces.chunk)
                addresses += one.row_bytes * pieces.row
                short[one.name] = element_of_all(addresses, one.dtype.itemsize)
        return short

    def _write(
        self, words: npt.NDArray[np.int64], pieces: Pieces, begins: Int64s, numbers: list[int], *, giant: bool
    ) -> None:
        """Write the views of pieces to an array, int64 ``[batches, fields, values or more, 2]``.

        The offset is the upper half of a word. Example: with 8 bytes a step and a chunk at offset 100 of buffer 2, row
        5 is at offset 140: ``100 << 32 | 2`` plus ``5 * (8 << 32)`` is ``140 << 32 | 2``.
        """
        values = pieces.size.shape[1]
        for position, number in enumerate(numbers):
            # Field by field, so that the working set stays in the cache.
            row_bytes, view = self.fields[number].row_bytes, words[:, position, :values]
            np.multiply(pieces.size, row_bytes, out=view[..., 0])
            if giant:
                view[..., 1] = to_words(self.table.begins[pieces.chunk, number] + pieces.row * row_bytes, self.spans)
            else:
                word = pieces.row * (row_bytes << 32)
                word += begins[..., number]
                view[..., 1] = word

    def _begins_and_fields(self, pieces: Pieces, longest: int, *, look: bool) -> tuple[Int64s, list[int], set[str]]:
        """Return the starts of chunks in the form of ``words``, the fields that are contiguous in all chunks, and the
        unsafe fields.

        Unsafe fields, which can have values above the allowed maximum, are returned by name.

        Args:
            pieces: The pieces.
            longest: Number of steps of the longest piece.
            look: Whether reading values of chunks is allowed.
        """
        chunk = pieces.chunk
        found = self.table.words.take(chunk, axis=0)
        state = found[..., -1]
        if state.min() < 1:
            fresh = distinct(chunk[(state == UNKNOWN) | (look & (state == _UNSEEN))], len(self.table.words))
            if len(fresh):
                self._locate_chunks(fresh, _DENSE_ROWS * int(pieces.size.sum()), look=look)
                found = self.table.words.take(chunk, axis=0)
        regular = longest * self.row_bytes <= 1 << SPAN_BITS
        unsure: set[str] = set()
        if found[..., -1].min() < 1:
            touched = distinct(chunk.reshape(-1), len(self.table.words))
            regular &= (self.table.words[touched, :-1] >= 0).all(axis=0)
            exceeding = self.table.exceeds[touched].any(axis=0)
            unsure = {self.fields[number].name for number in np.nonzero(exceeding)[0].tolist()}
        return found, np.nonzero(regular)[0].tolist(), unsure

    def _locate_chunks(self, fresh: Int64s, rows: int, *, look: bool) -> None:
        """Locate chunks (int64 ``[n]``, ascending) of every field, and make at most ``rows`` rows of each column dense.

        Without ``look``, values are not read, and each chunk counts as unsafe.
        """
        table = self.table
        begins = np.stack([one.column.begins(fresh, rows) for one in self.fields], axis=1)
        for number, one in enumerate(self.fields):
            if one.highest is not None:
                regular = begins[:, number] > 0
                exceeds = one.column.largest(fresh[regular]) > one.highest if look else True
                table.exceeds[fresh[regular], number] = exceeds
        table.begins[fresh] = begins
        nowhere = begins <= 0
        table.words[fresh, :-1] = np.where(
            nowhere, IRREGULAR, to_words(np.where(nowhere, IRREGULAR, begins), self.spans)
        )
        state = np.where(nowhere.any(axis=1), IRREGULAR, 1)
        state[table.exceeds[fresh].any(axis=1)] = IRREGULAR if look else _UNSEEN
        # Chunks that can be made dense later are looked up again.
        table.words[fresh, -1] = np.where((begins == UNKNOWN).any(axis=1), UNKNOWN, state)

    def _put_inline(self, pieces: Pieces, numbers: Int64s, words: npt.NDArray[np.int64], first: int) -> None:
        """Write the bytes of short values into their views, for example in windows that end shortly after the end of a
        chunk.

        Example: for fields of 4 and 8 bytes per step, a piece of 3 steps fits into the view of the first field (12
        bytes), but not into the view of the second field (24 bytes).

        Args:
            pieces: The start and the number of steps of each value.
            numbers: The fields with views.
            words: The views of the batches from ``first`` on.
            first: The index of the first batch.
        """
        wide, (chunks, rows, sizes) = self.row_bytes[numbers], (part[first : first + len(words)] for part in pieces)
        # Fields with the same number of bytes per step have the same short values.
        for row_bytes in np.unique(wide[wide <= INLINE_BYTES]).tolist():
            (position,) = np.nonzero(wide == row_bytes)
            batch, slot = np.nonzero((sizes <= INLINE_BYTES // row_bytes) & (sizes > 0))
            if len(batch):
                chunk, row, size = (part[batch, slot][:, None] for part in (chunks, rows, sizes))
                addresses = self.table.begins[chunk, numbers[position]] + row * row_bytes
                words[batch[:, None], position, slot[:, None]] = _inline_views(addresses, size * row_bytes, row_bytes)


def _inline_views(addresses: Int64s, nbytes: Int64s, row_bytes: int) -> Int64s:
    """Return views that contain the values, int64 ``[n, fields, 2]``.

    A view is four numbers of 4 bytes: the number of bytes of the value, and three numbers with the value, padded with
    zeros. A value of 8 bytes, the numbers 5 and 7, is the view 8, 5, 7, 0, or the words ``8 | 5 << 32`` and ``7``.

    Args:
        addresses: The address of each value, int64 ``[n, fields]``.
        nbytes: The size of each value, a multiple of ``row_bytes`` up to 12, int64 ``[n, 1]``.
        row_bytes: Bytes of a step.
    """
    views = np.zeros((*addresses.shape, 2), np.int64)
    fours = views.view(np.int32)
    fours[..., 0] = nbytes
    if row_bytes % 4 == 0 and not (addresses & 3).any():
        numbers, first = flat_view(np.dtype(np.int32)), element_of_all(addresses, 4)
        for four in range(INLINE_BYTES // row_bytes * row_bytes // 4):
            # Numbers after the last number of a value are not read, because that memory may not exist; the last number
            # is repeated instead.
            found = numbers[first + np.minimum(four, nbytes // 4 - 1)]
            fours[..., 1 + four] = np.where(4 * four < nbytes, found, 0)
        return views
    within = np.minimum(np.arange(INLINE_BYTES), nbytes - 1)
    octets = octets_at(addresses.reshape(-1), np.repeat(within, addresses.shape[1], axis=0))
    octets[np.repeat(np.arange(INLINE_BYTES) >= nbytes, addresses.shape[1], axis=0)] = 0
    fours[..., 1:] = octets.view(np.int32).reshape(*addresses.shape, 3)
    return views


def _longer(rows: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return an array extended to ``count`` rows; the additional rows have undefined content."""
    more = np.empty((count, *rows.shape[1:]), rows.dtype)
    more[: len(rows)] = rows
    more[len(rows) :] = False if rows.dtype == np.bool_ else UNKNOWN
    return more
