"""Copying the windows of many columns in one call.

Arrow's ``binary_view`` array says for each value how long it is and where it begins; casting it to ``binary`` copies
the values one after the other into one stretch of memory: a loop of memcpy over runs of any length, without the GIL.
So a batch is one array of views, made when its windows are located, and one cast, whatever columns, files and record
batches its windows come from. The memory is Arrow's, whose allocator keeps what it is given back, so that large batches
do not pay a page fault for every 4 KB.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mouse_core._arrow.addresses import copy_runs, flat_view
from mouse_core._arrow.column import Column, Growth
from mouse_core._arrow.views import STRETCH_BITS, CopiedField, Places, Views
from mouse_core._arrow.windows import Windows
from mouse_core._base.locks import ProcessLock
from mouse_core._base.memory import ALIGNMENT, BatchLayout
from mouse_core.dtypes import RowError, convert
from mouse_core.errors import DataError

# Batches that are asked for in turn are copied several at a time up to this size: a call takes 5 us, as long as copying
# 40 KB, and making the arrays of one batch as long as those of three.
_TOGETHER_BYTES = 6 << 20
_MOST_TOGETHER = 64
# The memory of batches that were copied together is alive as long as one array of them is. So many of these are usual,
# also where batches wait to be used. Beyond that somebody keeps fields, and batches are copied one by one.
_MOST_ALIVE = 8
# Of more values it has forgotten where the first lie when the last are looked up.
_LOOKED_AHEAD = 4096
# Whoever is this much ahead of the next batch is one of several who take turns.
_AHEAD = 3
# What is converted is copied in parts that stay in a cache in between.
_PART_BYTES = 1 << 18

_OCTET: np.dtype[Any] = np.dtype(np.uint8)

# The fields of a batch, and whether all codes in it are allowed.
_Copied = tuple[dict[str, npt.NDArray[Any]], bool]


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
            CopiedField(name, shape, column, column.kind.dtype, column.width * column.kind.dtype.itemsize)
            for name, (column, shape) in there.items()
        ]
        self._places: Places | None = None
        self._length = length
        self._highest = dict(highest or {})
        self._layouts: dict[tuple[tuple[str, ...], int], BatchLayout] = {}
        self._lock = ProcessLock()
        self._preparing = ProcessLock()
        self._held: pa.Buffer | None = None
        self._alive: list[list[weakref.ref[Any]]] = []

    def over(self, columns: Mapping[str, Column], growth: Growth) -> Copier:
        """The same for a snapshot with rows appended."""
        other: Copier = object.__new__(Copier)
        other.__dict__.update(self.__dict__)
        other._fields = [field._replace(column=columns[field.name]) for field in self._fields]
        with self._preparing:  # which both have from now on
            other._places = None if self._places is None else self._places.over(other._fields, growth)
        other._lock = ProcessLock()
        return other

    def __len__(self) -> int:
        return len(self._fields)

    def take(self, block: Windows, number: int) -> _Copied:
        """Batch ``number`` of the block as ``[n, S, *shape]`` by name, and whether no value exceeds its highest.

        It lies in fresh memory, which the fields share: whoever keeps one of them keeps it all. Batches that are asked
        for in turn are copied, and kept, several at a time where they are small, unless much such memory is alive.
        """
        known = self._block(block)
        if known.views is None:
            return {}, True
        if known.together == 1:
            return self._copy(known.views, number, 1)[0]
        ready = known.ready.pop(number, None)
        if ready is None:
            with self._lock:
                ready = known.ready.pop(number, None)
                if ready is None:
                    self._alive = [group for group in self._alive if any(memory() is not None for memory in group)]
                    most = known.together if len(self._alive) < _MOST_ALIVE else 1
                    first, count = known.choose(number, most)
                    copied = dict(enumerate(self._copy(known.views, first, count), first))
                    ready = copied.pop(number)
                    known.ready.update(copied)
        return ready

    def together(self, block: Windows) -> int:
        """How many batches of the block are copied at a time where they are asked for in turn."""
        return self._block(block).together

    def others(self, block: Windows) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]]]]:
        """The batches of the block that were copied together with what was taken, each once; none if they lack fields.

        Those with a value above its highest are left out.
        """
        known = self._block(block)
        if known.views is not None and len(known.views.fields) == len(self):
            while known.ready:
                try:
                    number, (batch, clean) = known.ready.popitem()
                except KeyError:  # another thread has it
                    return
                if clean:
                    yield number, batch

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
        views = self._block(block).views
        for place, field in enumerate(views.long if views is not None else ()):
            if views is not None and field.name == name:
                self._write(views, number, place, field, out.reshape(-1))
                return True
        for field in views.fields if views is not None else ():
            if views is not None and field.name == name:
                _put(self._short(views, number, 1, field).reshape(-1), out.reshape(-1), field)
                return True
        return False

    # ------------------------------------------------------------------ copying

    def _copy(self, views: Views, number: int, count: int) -> list[_Copied]:
        n = views.sizes[number]
        found: dict[str, npt.NDArray[Any]] = {}
        if views.long:
            layout = self._layout(views, n)
            # Held until here, so that memory nobody else holds is free when the next is taken, and not given back to
            # the system in between.
            self._held = None
            part = views.array.slice(number * views.stride, count * views.stride)
            if views.heads is not None and len(part) <= _LOOKED_AHEAD:
                # The processor waits for many of these loads at once, but for one after the other when it copies.
                flat_view(_OCTET).take(views.heads[number : number + count])
            self._held = memory = _cast(part, layout.nbytes * count)
            found = layout.batches(memory, count)
        if views.short:
            for field in views.fields:
                if field.name in views.short:
                    found[field.name] = self._short(views, number, count, field)
            found = {field.name: found[field.name] for field in views.fields}
        if count > 1:
            self._alive = [*self._alive, [weakref.ref(owner) for owner in map(_owner, found.values())]]
        clean = True
        for name in views.unsure:
            # As unsigned numbers negative ones are the largest.
            codes = found[name].view(f"u{found[name].itemsize}")
            clean = clean and bool(np.maximum.reduce(codes, axis=None, initial=0) <= self._highest[name])
        return [(dict(zip(found, batch, strict=False)), clean) for batch in zip(*found.values(), strict=True)]

    def _short(self, views: Views, number: int, count: int, field: CopiedField) -> npt.NDArray[Any]:
        """The windows of some batches of a field without views, ``[count, n, S, *shape]``."""
        elements = views.short[field.name][number : number + count]
        steps = views.sizes[number] * self._length // elements.shape[1]
        values = copy_runs(field.dtype, elements.reshape(-1), steps * field.row_bytes // field.dtype.itemsize)
        return values.reshape(count, views.sizes[number], self._length, *field.shape)

    def _layout(self, views: Views, n: int) -> BatchLayout:
        """Where the fields of ``n`` windows that have views lie in their memory."""
        layout = self._layouts.get((views.key, n))
        if layout is None:
            layout = BatchLayout({field.name: ((n, self._length, *field.shape), field.dtype) for field in views.long})
            self._layouts[views.key, n] = layout
        return layout

    def _write(self, views: Views, number: int, place: int, field: CopiedField, out: npt.NDArray[Any]) -> None:
        item = field.dtype.itemsize
        first = number * views.stride + place * views.values
        done, slot, total = 0, 0, out.size * item
        ends = None
        if total > _PART_BYTES:
            ends = np.cumsum(views.words[number, place, :, 0].astype(np.int32), dtype=np.int64)
        while done < total:
            stop, end = views.values, total  # the last view may hold the zeros after the field
            if ends is not None:
                stop = max(slot + 1, int(np.searchsorted(ends, done + _PART_BYTES, side="right")))
                end = min(int(ends[stop - 1]), total)
            memory = _cast(views.array.slice(first + slot, stop - slot), end - done + ALIGNMENT)
            values = np.ndarray(((end - done) // item,), field.dtype, memory)
            _put(values, out[done // item : end // item], field, done // item)
            done, slot = end, stop

    def _block(self, block: Windows) -> _Block:
        try:
            known: _Block = block.known[self]
        except KeyError:
            # One thread at a time: it fills tables that others would read half filled.
            with self._preparing:
                known = block.known.get(self) or self._prepare(block)
                block.known[self] = known
        return known

    def _prepare(self, block: Windows) -> _Block:
        if self._places is None and self._fields:
            self._places = Places(self._fields, self._highest)
        try:
            views = self._places.views(block) if self._places is not None and len(block) else None
        except DataError:
            views = None  # some chunk is damaged: whoever reads it is told
        together = 1
        if views is not None:
            nbytes = self._layout(views, max(views.sizes)).nbytes
            together = max(1, min(_TOGETHER_BYTES // max(nbytes, 1), _MOST_TOGETHER, len(views.sizes)))
            if len(views.fields) == len(self):
                block.forget()
        return _Block(views, together)


def _put(values: npt.NDArray[Any], out: npt.NDArray[Any], field: CopiedField, first: int = 0) -> None:
    """Write values to memory of any dtype; errors count rows from ``first`` values before."""
    try:
        out[...] = values if np.can_cast(field.dtype, out.dtype, "safe") else convert(values, out.dtype)
    except RowError as error:
        raise RowError((first + error.row) * field.dtype.itemsize // field.row_bytes, str(error)) from error


class _Block:
    """What is known of a block.

    Args:
        views: Of its values; None if there is nothing to copy.
        together: How many batches to copy at a time.
    """

    def __init__(self, views: Views | None, together: int) -> None:
        self.views = views
        self.together = together
        # What was copied together with a batch before: handed out once.
        self.ready: dict[int, _Copied] = {}
        # Behind the batches that were copied together, and the latest that was not among them when it was asked for.
        self._next = 0
        self._latest = -1
        self.nbytes = 0 if views is None else views.words.nbytes

    def choose(self, number: int, most: int) -> tuple[int, int]:
        """Which batch to copy first, and how many, ``most`` at most, where one is asked for."""
        sizes = [] if self.views is None else self.views.sizes
        for first in (self._next, number):
            if 0 <= number - first < _AHEAD and (first != number or number in (self._next, self._latest + 1)):
                count = 1
                while count < min(most, len(sizes) - first) and sizes[first + count] == sizes[first]:
                    count += 1
                if number < first + count:
                    self._next, self._latest = first + count, number
                    return first, count
        self._latest = number
        return number, 1


def _owner(values: Any) -> Any:
    """What keeps the memory of an array alive."""
    while isinstance(values, np.ndarray) and values.base is not None:
        values = values.base
    return values


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
    buffer = pa.foreign_buffer(address >> STRETCH_BITS << STRETCH_BITS, (2 << STRETCH_BITS) - 1)
    views = np.array([[20, 0, 0, address & ((1 << STRETCH_BITS) - 1)], [3, 0, 0, 0]], np.int32)
    views[1, 1:2].view(np.uint8)[:3] = letters[:3]
    try:
        cast = pa.Array.from_buffers(pa.binary_view(), 2, [None, pa.py_buffer(views), buffer])
        copied = bytes(_cast(cast, 23))[:23]
    except (pa.ArrowException, ValueError):
        return False
    return copied == b"abcdefghijklmnopqrstabc"
