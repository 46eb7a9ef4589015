"""Copying the windows of many columns in one call.

Arrow's ``binary_view`` array says for each value how long it is and where it begins; casting it to ``binary`` copies
the values one after the other into one stretch of memory: a loop of memcpy over runs of any length, without the GIL.
So a batch is one array of views, made when its windows are located, and one cast, whatever columns, files and record
batches its windows come from. The memory is Arrow's, whose allocator keeps what it is given back, so that large batches
do not pay a page fault for every 4 KB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._convert import RowError, convert
from mouse_core._locks import ProcessLock
from mouse_core._memory import octets_at, words_at
from mouse_core._pool import ALIGNMENT, BatchLayout
from mouse_core._windows import Int64s, Windows
from mouse_core.columns import UNKNOWN, Column

# A view holds its value's place as a buffer number and a 32-bit offset: memory is seen in stretches of 1 GB, each
# offered with the one after it, as a value may lie across.
_STRETCH_BITS = 30
# Values up to this size stand in the view itself.
_INLINE = 12
# Batches that are asked for in turn are copied several at a time up to this size: a call takes 5 us, as long as copying
# 40 KB. More than this does not stay in a processor's cache.
_TOGETHER_BYTES = 1 << 20
_MOST_TOGETHER = 16
# What is converted is copied in parts that stay in a cache in between.
_PART_BYTES = 1 << 18

_ZEROS = pa.py_buffer(bytes(ALIGNMENT))

# The fields of a batch, and whether all codes in it are allowed.
_Copied = tuple[dict[str, npt.NDArray[Any]], bool]
# Numbers to check: how many, as which dtype, from which byte of a batch, and the largest allowed.
_Check = tuple[int, np.dtype[Any], int, int]


class Copier:
    """Copies batches of those columns of a source that lie in memory as plain numbers.

    Args:
        columns: The columns and the shape of a step, by field. A field with irregular chunks among the windows of a
            block is left out there.
        length: Steps in a window.
        highest: For some fields the largest value allowed, where the lowest is 0.
    """

    def __init__(
        self,
        columns: Mapping[str, tuple[Column, tuple[int, ...]]],
        length: int,
        highest: Mapping[str, int] | None = None,
    ) -> None:
        there = columns if _cast_copies() else {}
        self._fields = [
            _Field(name, shape, column.kind.dtype, column.width * column.kind.dtype.itemsize)
            for name, (column, shape) in there.items()
        ]
        self._columns = [column for column, _ in there.values()]  # they keep alive what lies at their addresses
        self._row_bytes = np.array([field.row_bytes for field in self._fields], np.int64)
        self._length = length
        self._highest = dict(highest or {})
        self._begins: Int64s | None = None
        self._layouts: dict[tuple[tuple[int, ...], int], tuple[BatchLayout, list[_Check]]] = {}
        self._lock = ProcessLock()
        self._held: pa.Buffer | None = None

    def __bool__(self) -> bool:
        return bool(self._fields)

    def take(self, block: Windows, number: int) -> _Copied:
        """Batch ``number`` of the block as ``[n, S, *shape]`` by name, and whether no value exceeds its highest.

        It lies in fresh memory, which the fields share: whoever keeps one of them keeps it all. Batches that are asked
        for in turn are copied, and kept, several at a time where they are small.
        """
        views = self._views(block)
        if not views.fields:
            return {}, True
        if views.together == 1:
            return self._copy(views, number, 1)[0]
        ready = views.ready.pop(number, None)
        if ready is None:
            with self._lock:
                ready = views.ready.pop(number, None)
                if ready is None:
                    count = min(views.together, len(views.sizes) - number) if number == views.next else 1
                    ready, *others = self._copy(views, number, count)
                    views.next = number + count
                    views.ready.update(enumerate(others, number + 1))
        return ready

    def write(self, block: Windows, number: int, name: str, out: npt.NDArray[Any]) -> bool:
        """Write a field of batch ``number`` of the block to memory of any dtype; whether that was possible.

        Args:
            block: Windows.
            number: Which batch.
            name: The field.
            out: ``[n, S, *shape]``, C-contiguous.

        Raises:
            RowError: A value does not fit; its ``row`` is ``window * S + step``.
        """
        views = self._views(block)
        for place, field in enumerate(views.fields):
            if field.name == name:
                self._write(views, number, place, field, out.reshape(-1))
                return True
        return False

    # ------------------------------------------------------------------ copying

    def _copy(self, views: _Views, number: int, count: int) -> list[_Copied]:
        n = views.sizes[number]
        try:
            layout, checks = self._layouts[views.key, n]
        except KeyError:
            layout, checks = self._layouts[views.key, n] = self._lay_out(views.fields, n)
        # Held until here, so that memory nobody else holds is free when the next is taken, and not given back to the
        # system in between.
        self._held = None
        part = views.array.slice(number * views.stride, count * views.stride)
        self._held = memory = _cast(part, layout.nbytes * count)
        clean = True
        for values, dtype, offset, highest in checks:
            code: Any = np.ndarray((count, values), dtype, memory, offset, (layout.nbytes, dtype.itemsize))
            clean = clean and np.maximum.reduce(code, axis=None) <= highest
        return [(layout.arrays(memory, batch * layout.nbytes), clean) for batch in range(count)]

    def _lay_out(self, fields: Sequence[_Field], n: int) -> tuple[BatchLayout, list[_Check]]:
        """Where the fields of ``n`` windows lie in their memory, and which of the numbers there are to be checked."""
        layout = BatchLayout({field.name: ((n, self._length, *field.shape), field.dtype) for field in fields})
        checks = []
        for name, highest in self._highest.items():
            if name in layout.fields:
                offset, shape, dtype = layout.fields[name]
                # As unsigned numbers negative ones are the largest.
                checks.append((prod(shape), np.dtype(f"u{dtype.itemsize}"), offset, highest))
        return layout, checks

    def _write(self, views: _Views, number: int, place: int, field: _Field, out: npt.NDArray[Any]) -> None:
        stride, item = views.stride // len(views.fields), field.dtype.itemsize
        first = number * views.stride + place * stride
        done, slot, total = 0, 0, out.size * item
        ends = None
        if total > _PART_BYTES:
            ends = np.cumsum(views.words[first : first + stride, 0].astype(np.int32), dtype=np.int64)
        while done < total:
            stop, end = stride, total  # the last view may hold the zeros after the field
            if ends is not None:
                stop = max(slot + 1, int(np.searchsorted(ends, done + _PART_BYTES, side="right")))
                end = min(int(ends[stop - 1]), total)
            memory = _cast(views.array.slice(first + slot, stop - slot), end - done + ALIGNMENT)
            values = np.ndarray(((end - done) // item,), field.dtype, memory)
            target = out[done // item : end // item]
            try:
                target[...] = values if np.can_cast(field.dtype, out.dtype, "safe") else convert(values, out.dtype)
            except RowError as error:
                raise RowError((done + error.row * item) // field.row_bytes, str(error)) from error
            done, slot = end, stop

    # ------------------------------------------------------------------ where values lie

    def _views(self, block: Windows) -> _Views:
        try:
            views: _Views = block.known[self]
        except KeyError:
            views = block.known[self] = self._make_views(block)
        return views

    def _make_views(self, block: Windows) -> _Views:
        """Views of all values: batch by batch, in each field by field, in each piece by piece, and maybe some zeros."""
        if not self._fields or not len(block):
            return _Views([], (), None, None, 0, [], 1)
        pieces = block.pieces
        bounds = np.asarray(block.bounds)
        chunk, row, size = _in_rows(np.searchsorted(pieces.window, bounds), pieces.chunk, pieces.row, pieces.size)
        found = self._find(chunk.reshape(-1))
        kept = found.min(axis=1) >= 0
        kept &= int(size.max()) * self._row_bytes <= 1 << _STRETCH_BITS
        places = np.nonzero(kept)[0].tolist()
        fields = [self._fields[place] for place in places]
        sizes = np.diff(bounds)
        if not fields:
            return _Views([], (), None, None, 0, sizes.tolist(), 1)
        row_bytes = self._row_bytes
        if len(fields) < len(kept):
            found, row_bytes = found[kept], row_bytes[kept]
        found += row_bytes[:, None] * row.reshape(-1)
        missing = -(sizes[:, None] * (row_bytes * self._length)) % ALIGNMENT
        padded = int(missing.any())
        batches, slots = chunk.shape
        # Size and first bytes; number of the buffer and offset.
        words = np.zeros((batches, len(fields), slots + padded, 2), np.int64)
        views, address = words[:, :, :slots], found.reshape(len(fields), batches, slots)
        np.multiply(size[:, None, :], row_bytes[:, None], out=views[..., 0])
        long = row_bytes * self._length > _INLINE
        buffers = []
        if long.any():
            part = address if long.all() else address[long]
            number, stretches = _number_stretches(part)
            number |= (part & ((1 << _STRETCH_BITS) - 1)) << 32
            views[..., 1][:, long] = number.transpose(1, 0, 2)
            # The columns keep alive what lies there.
            buffers = [pa.foreign_buffer(place << _STRETCH_BITS, (2 << _STRETCH_BITS) - 1) for place in stretches]
        _put_inline(views, address, size, fields)
        if padded:
            words[:, :, slots, 0] = missing
            words[:, :, slots, 1] = np.where(missing > _INLINE, len(buffers), 0)
            buffers.append(_ZEROS)
        words = words.reshape(-1, 2)
        array = pa.Array.from_buffers(pa.binary_view(), len(words), [None, pa.py_buffer(words), *buffers])
        batch_bytes = int((sizes[0] * self._length * row_bytes + missing[0]).sum())
        together = max(1, min(_TOGETHER_BYTES // batch_bytes, _MOST_TOGETHER, batches))
        if (sizes != sizes[0]).any():
            together = 1
        return _Views(fields, tuple(places), array, words, len(words) // batches, sizes.tolist(), together)

    def _find(self, chunk: Int64s) -> Int64s:
        """The address at which each of some chunks begins in each column, int64 ``[columns, n]``; below 0: irregular."""
        if self._begins is None:
            self._begins = np.stack([column.known_begins() for column in self._columns])
        found = self._begins.take(chunk, axis=1)
        unknown = (found == UNKNOWN).any(axis=0) if found.min() < 0 else None
        if unknown is not None and unknown.any():
            fresh = np.unique(chunk[unknown])
            for place, column in enumerate(self._columns):
                self._begins[place, fresh] = column.begins(fresh)
            found = self._begins.take(chunk, axis=1)
        return found


class _Field(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    row_bytes: int


class _Views:
    """The views of a block.

    Args:
        fields: The fields in it.
        key: Which of the copier's they are.
        array: All views.
        words: The same, int64 ``[views, 2]``.
        stride: Views of a batch.
        sizes: Windows of each batch.
        together: How many batches to copy at a time.
    """

    def __init__(
        self,
        fields: list[_Field],
        key: tuple[int, ...],
        array: pa.Array | None,
        words: npt.NDArray[np.int64] | None,
        stride: int,
        sizes: list[int],
        together: int,
    ) -> None:
        self.fields, self.key = fields, key
        self.array: Any = array
        self.words: Any = words
        self.stride, self.sizes, self.together = stride, sizes, together
        # What was copied together with a batch before: handed out once.
        self.ready: dict[int, _Copied] = {}
        self.next = 0


_CAST = pc.get_function("cast")
_TO_BINARY = pc.CastOptions(pa.binary())
_TO_LARGE_BINARY = pc.CastOptions(pa.large_binary())


def _cast(views: pa.Array, nbytes: int) -> pa.Buffer:
    """What the views show, one after the other; ``nbytes`` at most."""
    # Without the checks of Array.cast, which take as long as copying 10 KB.
    return _CAST.call([views], _TO_BINARY if nbytes < 1 << 31 else _TO_LARGE_BINARY).buffers()[2]


@lru_cache(maxsize=1)
def _cast_copies() -> bool:
    """Whether this pyarrow casts views as described above, tried on a long and a short value."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    address = letters.ctypes.data
    buffer = pa.foreign_buffer(address >> _STRETCH_BITS << _STRETCH_BITS, (2 << _STRETCH_BITS) - 1)
    views = np.array([[20, 0, 0, address & ((1 << _STRETCH_BITS) - 1)], [3, 0, 0, 0]], np.int32)
    views[1, 1:2].view(np.uint8)[:3] = letters[:3]
    try:
        cast = pa.Array.from_buffers(pa.binary_view(), 2, [None, pa.py_buffer(views), buffer])
        copied = bytes(_cast(cast, 23))[:23]
    except (pa.ArrowException, ValueError):
        return False
    return copied == b"abcdefghijklmnopqrstabc"


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


def _number_stretches(addresses: Int64s) -> tuple[Int64s, list[int]]:
    """The stretch that each address lies in, counted from 0, and the stretches' places."""
    stretch = addresses >> _STRETCH_BITS
    lowest, highest = int(stretch.min()), int(stretch.max())
    if highest - lowest < 64:
        stretch -= lowest
        return stretch, list(range(lowest, highest + 1))
    places = np.unique(stretch)  # files and the heap lie far apart
    return np.searchsorted(places, stretch), places.tolist()


def _put_inline(views: npt.NDArray[np.int64], addresses: Int64s, size: Int64s, fields: Sequence[_Field]) -> None:
    """Write the bytes of short values into their views.

    Args:
        views: Size and place of each value, int64 ``[batches, fields, most, 2]``.
        addresses: Where the values lie, int64 ``[fields, batches, most]``.
        size: Steps of each value, int64 ``[batches, most]``.
        fields: The fields.
    """
    words = views.view(np.int32)
    shortest, longest = int(size.min()), int(size.max())
    most = _INLINE // min(field.row_bytes for field in fields)
    if shortest == longest:
        for place, field in enumerate(fields):
            if longest * field.row_bytes <= _INLINE:
                values = _read(addresses[place].reshape(-1), longest * field.row_bytes, field.dtype.itemsize)
                words[:, place, :, 1 : 1 + values.shape[1]] = values.reshape(*size.shape, -1)
        return
    batches, slots = np.nonzero((size <= most) & (size > 0))
    steps = size[batches, slots]
    for place, field in enumerate(fields):
        for count in range(1, _INLINE // field.row_bytes + 1):
            (same,) = np.nonzero(steps == count)
            if len(same):
                batch, slot = batches[same], slots[same]
                inline = np.zeros((len(same), 3), np.int32)
                values = _read(addresses[place, batch, slot], count * field.row_bytes, field.dtype.itemsize)
                inline[:, : values.shape[1]] = values
                words[batch, place, slot, 1:] = inline


def _read(addresses: Int64s, size: int, itemsize: int) -> npt.NDArray[np.int32]:
    """``size`` bytes from each address, filled up to whole words, int32 ``[n, words]``."""
    if itemsize in (4, 8):
        return words_at(addresses, size, itemsize)
    octets = np.zeros((len(addresses), -(-size // 4) * 4), np.uint8)
    octets[:, :size] = octets_at(addresses, size)
    return octets.view(np.int32)
