"""Copying the windows of many columns in one call.

A value of Arrow's type ``binary_view`` is 16 bytes: how many bytes it has, and where they are, as the number of a
buffer and an offset. Values of up to 12 bytes stand in the view itself. Casting an array of them to ``binary`` copies
the values one after the other into one span of memory: a loop of memcpy over runs of any length, without the GIL.

So a batch is one array of views, made when its windows are located, and one cast, whatever columns, files and record
batches its windows come from. The memory is Arrow's, whose allocator keeps what it is given back, so that large batches
do not pay a page fault for every 4 KB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.addresses import address_of_all, copy_runs, flat_view
from mouse_core._arrow.column import Column
from mouse_core._arrow.windows import Int64s
from mouse_core._base.memory import BatchLayout, known_layout

# Offsets have 32 bits: memory is seen in spans of 1 GB, each offered with the one behind it, as values lie across.
SPAN_BITS = 30
# Bytes of the longest value that stands in its view.
INLINE_BYTES = 12
# Of more values it has forgotten where the first lie when the last are looked up.
_LOOKED_AHEAD = 4096
# Whoever is this much ahead of the next batch is one of several who take turns.
_TURNS = 3

_OCTET: np.dtype[Any] = np.dtype(np.uint8)


class CopiedField(NamedTuple):
    """A field: its name, the shape of a step, its column and dtype, bytes of a step, and the largest value allowed.

    That is for integers from 0, and None where all are, or where they are looked at elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    column: Column
    dtype: np.dtype[Any]
    row_bytes: int
    highest: int | None = None


class ByteViews:
    """The views of the bytes of a block: batch by batch, in each field by field, in each piece by piece, maybe zeros.

    Args:
        fields: The fields there are, whose chunks are all regular.
        short: By name those of them whose windows would stand in the views themselves. They have none: these are the
            elements of ``flat_view`` at which their windows begin, int64 ``[batches, n]``.
        words: The views of the others, int64 ``[batches, fields, values, 2]``: in the first word of each its size in
            bytes, in the second the number of a buffer and, times 2**32, the offset there.
        buffers: What the views refer to.
        sizes: Windows of each batch.
        length: Steps in a window.
        unsure: The fields of which some values in these chunks may be larger than allowed.
        heads: The first byte of every value, as an element of ``flat_view``, int64 ``[batches, fields, values]``, where
            it is worth looking at them ahead.
        padded: How many of the values, the last ones, are zeros.
        inline: Puts the bytes of short values into some of the views, where that waits until they are copied. The
            views, int64 ``[count, fields, values, 2]``, are of the batches from ``first`` on; see ``copy`` for the
            last.
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
        heads: Int64s | None,
        padded: int = 0,
        inline: Callable[[npt.NDArray[np.int64], int], None] | None = None,
    ) -> None:
        self.fields, self.short, self.sizes, self.length, self.unsure = fields, short, sizes, length, unsure
        self.long = [field for field in fields if field.name not in short]
        self.words, self.heads, self._inline, self._buffers = words, heads, inline, buffers
        # Views of a field in a batch that are of its pieces, and views of a batch.
        self._pieces = words.shape[2] - padded
        self._stride = words.shape[1] * words.shape[2]
        self._array = self._views(words)
        self._layouts: dict[int, BatchLayout] = {}
        # The number behind the batches that were copied together, and the latest one that was not among them when it
        # was asked for.
        self._next_in_turn, self._latest_miss = 0, -1

    @property
    def batch_bytes(self) -> int:
        """Bytes of the largest batch that are copied by views."""
        return self._layout(max(self.sizes)).nbytes

    def choose_copied(self, number: int, most: int) -> tuple[int, int]:
        """Which batch to copy first, and how many, ``most`` at most, where batch ``number`` is asked for.

        Those that follow each other are copied together, if they are of one size. Of 8 at a time, 0..7 are copied for
        whoever asks for 0; then the next in turn is 8 and the latest miss 0. It is 8..15 for whoever asks for 8, or for
        10 while others are about to ask for 8 and 9. Who asks for 40 gets it alone, whereby only the latest miss
        becomes 40; who asks for 41 then gets what follows, too, and the next in turn becomes 49.
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
        """The batches ``first .. first + count - 1``, which are of one size, ``[count, n, S, *shape]`` by field.

        They lie in fresh memory, which fields share: whoever keeps one of them keeps it all.
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
            if self.heads is not None and len(views) <= _LOOKED_AHEAD:
                # The processor waits for many of these loads at once, but for one after the other when it copies.
                flat_view(_OCTET).take(self.heads[first : first + count])
            found = layout.batches(_cast(views, layout.nbytes * count), count)
        if self.short:
            found = {
                field.name: found[field.name] if field.name in found else self._short(field, first, count)
                for field in self.fields
            }
        return found

    def ranges(self, first: int, count: int = 1) -> tuple[Int64s, Int64s, Int64s]:
        """Where the bytes lie that copying some batches reads: begins and ends, int64 ``[n]`` addresses, in any order,
        and of which of the batches they are, from 0 on.

        Without those of short values that stand in the views already.
        """
        words = self.words[first : first + count, :, : self._pieces].reshape(-1, 2)
        # A word holds the size in its lower half; behind it come the first bytes of a value that stands in its view.
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
        """Which of some batches, as ``copy`` gives them, have no value larger than allowed, bool ``[count]``."""
        allowed = np.ones(count, np.bool_)
        for field in self.unsure:
            # As unsigned numbers negative ones are the largest.
            codes = copied[field.name].view(f"u{field.dtype.itemsize}").reshape(count, -1)
            allowed &= codes.max(axis=1, initial=0) <= field.highest
        return allowed

    def _views(self, words: npt.NDArray[np.int64]) -> pa.Array:
        """Return ``words`` as an Arrow array of views."""
        return pa.Array.from_buffers(
            pa.binary_view(), words.size // 2, [None, pa.py_buffer(words.reshape(-1)), *self._buffers]
        )

    def _short(self, field: CopiedField, first: int, count: int) -> npt.NDArray[Any]:
        """The windows of some batches of a field without views, ``[count, n, S, *shape]``."""
        elements, n = self.short[field.name][first : first + count].reshape(-1), self.sizes[first]
        steps = count * n * self.length // len(elements)
        values = copy_runs(field.dtype, elements, steps * field.row_bytes // field.dtype.itemsize)
        return values.reshape(count, n, self.length, *field.shape)

    def _layout(self, n: int) -> BatchLayout:
        """Where the fields of ``n`` windows that have views lie in their memory."""
        layout = self._layouts.get(n)
        if layout is None:
            fields = [(field.name, (n, self.length, *field.shape), field.dtype) for field in self.long]
            layout = self._layouts[n] = known_layout(tuple(fields))
        return layout


def to_words(addresses: Int64s, spans: dict[int, pa.Buffer]) -> Int64s:
    """Number of the buffer and offset of some addresses, as a view has them; -1 stays below 0.

    Spans have 2**30 bytes. If span 5 is buffer 0 and span 9 buffer 1, address ``9 * 2**30 + 70`` becomes
    ``70 << 32 | 1``.

    Args:
        addresses: int64 ``[n]``.
        spans: The buffers of spans, numbered in their order; those that are not there come behind them.
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
    """What the views show, one after the other; ``nbytes`` at most."""
    # Without the checks of Array.cast, which take as long as copying 10 KB.
    return _CAST.call([views], _TO_BINARY if nbytes < 1 << 31 else _TO_LARGE_BINARY).buffers()[2]


@lru_cache(maxsize=1)
def cast_copies() -> bool:
    """Whether this pyarrow casts views as described above, tried on a long and a short value."""
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
