"""Columns: rows in memory, of one process or mapped.

Small fields of a row lie side by side, so that reading a row touches one place; large ones lie by themselves. Values
that differ in length lie in a ring of bytes, one behind the other: a row refers to its value by the position of its
first byte, counted over all bytes ever written, and by its length. The ring is twice as long as the values in use need.
When it is full, values of rows that are gone make room; if they leave too little, the ring moves to longer memory. In a
ring of 8 bytes, of which 10 were ever written, the value (8, 2) lies in the places 0 and 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.memory import BatchLayout, MemoryPool
from mouse_core.columns.schema import FieldType, RowSchema
from mouse_core.errors import DataError, MissingFieldError
from mouse_core.nested import FieldKey, object_array, unflatten

Slots = npt.NDArray[np.int64]


def ring_slots(first: int, n: int, capacity: int) -> Slots:
    """The slots of ``n`` rows from row ``first`` on: rows 6, 7 and 8 of a ring of 8 lie in the slots 6, 7 and 0."""
    begin = first % capacity
    slots = np.arange(begin, begin + n, dtype=np.int64)
    return slots if begin + n <= capacity else slots % capacity


def ring_pieces(first: int, n: int, capacity: int) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous pieces of ``n`` rows from row ``first`` on: first slot, first row, number of rows.

    Rows 6, 7 and 8 of a ring of 8 are ``(6, 0, 2)`` and ``(0, 2, 1)``.
    """
    done = 0
    while done < n:
        slot = (first + done) % capacity
        count = min(n - done, capacity - slot)
        yield slot, done, count
        done += count


Refs = npt.NDArray[np.int64]
"""References to values, ``[n, 2]``: the position of the first byte among all ever written, and the length."""

_LEAST_ROOM = 1 << 12


class ByteRing:
    """Memory for values: of all bytes that were ever written, byte ``n`` lies in place ``n % len(memory)``."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory

    def write(self, begin: int, values: Sequence[Bytes]) -> Refs:
        """Write values one behind the other from byte ``begin`` on."""
        refs = np.empty((len(values), 2), np.int64)
        refs[:, 1] = [value.size for value in values]
        refs[:, 0] = begin + np.cumsum(refs[:, 1]) - refs[:, 1]
        if values:
            self._put(begin, values[0] if len(values) == 1 else np.concatenate(values))
        return refs

    def _put(self, begin: int, raw: Bytes) -> None:
        for place, first, count in ring_pieces(begin, raw.size, self.memory.size):
            self.memory[place : place + count] = raw[first : first + count]

    def read(self, begin: int, nbytes: int) -> Bytes:
        """Bytes, copied."""
        if not 0 <= nbytes <= self.memory.size:
            raise DataError(f"rows: expected a value of up to {self.memory.size} bytes, found one of {nbytes}")
        if not nbytes:
            return np.empty(0, np.uint8)
        place = begin % self.memory.size
        raw = self.memory[place : place + nbytes]
        return raw.copy() if raw.size == nbytes else np.concatenate([raw, self.memory[: nbytes - raw.size]])

    def move(self, begin: int, end: int, memory: Bytes) -> ByteRing:
        """The bytes from ``begin`` to ``end`` in other memory, which has room for them."""
        ring = ByteRing(memory)
        for place, first, count in ring_pieces(begin, end - begin, self.memory.size):
            ring._put(begin + first, self.memory[place : place + count])
        return ring


def _room_for(nbytes: int) -> int:
    """Return the length of a ring with ``nbytes`` in use: as many may come before the rows are searched again."""
    return max(2 * nbytes, _LEAST_ROOM)


def _is_full(room: int, used: int, coming: int) -> bool:
    """Whether a ring needs other memory; with little room left too, as searching all rows must be rare."""
    return used + coming > room or room - used < room // 8


def _is_sparse(span: int, used: int) -> bool:
    """Whether a ring is mostly holes, left by rows that were overwritten out of order."""
    return span > 4 * used + _LEAST_ROOM


def _in_use(columns: Sequence[Refs], end: int) -> tuple[int, int]:
    """Return the position of the first byte in use, and how many bytes are in use."""
    there = [refs[refs[:, 1] > 0] for refs in columns]
    begin = min((int(refs[:, 0].min()) for refs in there if len(refs)), default=end)
    return begin, sum(int(refs[:, 1].sum()) for refs in there)


class Values:
    """The values of rows that differ in length; those of rows that are gone are overwritten."""

    packs = True
    """Whether a ring of mostly holes is written anew; otherwise holes stay until the rows between them are gone."""

    def __init__(self) -> None:
        self._ring = ByteRing(np.empty(0, np.uint8))
        self._begin = 0  # the first byte that may be in use
        self._end = 0  # behind the last byte ever written

    @property
    def nbytes(self) -> int:
        """Bytes of memory, used or not."""
        return self._ring.memory.size

    def keep(
        self, schema: RowSchema, arrays: Sequence[Any], refs: Callable[[], Sequence[Refs]]
    ) -> Sequence[npt.NDArray[Any]]:
        """Write the values that differ in length, and return the arrays with references in their place.

        Args:
            schema: The schema of the rows.
            arrays: The arrays that ``RowSchema.check`` returned.
            refs: Returns the references of the rows in use, as views: packing changes them.
        """
        if not schema.varying:
            return arrays
        parts = varying_of(schema, arrays)
        # All at once: making room for one field must not take that of another, which no row has yet.
        values = parts[0] if len(parts) == 1 else [value for part in parts for value in part]
        coming = sum(value.size for value in values)
        self.reserve(coming, refs)
        kept = iter(self._ring.write(self._end, values).reshape(len(parts), -1, 2))
        self._end += coming
        kinds = schema.fields.values()
        return [next(kept) if kind.varies else array for array, kind in zip(arrays, kinds, strict=True)]

    def reserve(self, coming: int, refs: Callable[[], Sequence[Refs]]) -> None:
        """Make room for ``coming`` more bytes; ``refs`` as for ``keep``."""
        if not _is_full(self.nbytes, self._end - self._begin, coming):
            return
        columns = refs()
        begin, used = _in_use(columns, self._end)
        if self.packs and _is_sparse(self._end - begin, used):
            self._pack(columns, used + coming)
            return
        if _is_full(self.nbytes, self._end - begin, coming):
            self._ring = self._ring.move(begin, self._end, self._memory(_room_for(self._end - begin + coming)))
        self._begin = begin

    def is_sparse(self, refs: Callable[[], Sequence[Refs]]) -> bool:
        """Whether most of the ring is held by values of rows that are gone."""
        if not _is_full(self.nbytes, self._end - self._begin, 0):
            return False
        begin, used = _in_use(refs(), self._end)
        return _is_sparse(self._end - begin, used)

    def _pack(self, columns: Sequence[Refs], nbytes: int) -> None:
        """Write the values in use to other memory without holes, and update the references."""
        ring, end = ByteRing(np.empty(_room_for(nbytes), np.uint8)), 0
        for refs in columns:
            refs[...] = ring.write(end, self.read(refs))
            end += int(refs[:, 1].sum())
        self._ring, self._begin, self._end = ring, 0, end

    def _memory(self, nbytes: int) -> Bytes:
        """Memory for a ring."""
        return np.empty(nbytes, np.uint8)

    def read(self, refs: Refs) -> list[Bytes]:
        """Copy the values at ``refs``, ``[..., 2]``."""
        return [self._ring.read(begin, nbytes) for begin, nbytes in refs.reshape(-1, 2).tolist()]


def varying_of(schema: RowSchema, arrays: Sequence[Any]) -> list[list[Bytes]]:
    """Return the arrays of the fields that differ in length, among those that ``RowSchema.check`` returned."""
    return [array for array, kind in zip(arrays, schema.fields.values(), strict=True) if kind.varies]


Bytes = npt.NDArray[np.uint8]
_Scratch = tuple[npt.NDArray[Any], list[tuple[int, npt.NDArray[Any]]]]

# Fields up to this many bytes lie side by side, so that reading a row touches one place. Larger ones lie by
# themselves, where they are copied once, not twice.
_SIDE_BY_SIDE = 1024
# Rows are copied through a buffer of about this many bytes on their way into fields, as much as a cache holds.
_SCRATCH = 1 << 18
_ALIGNMENT = 64
_POOL_FROM = 1 << 20
_PLANS_KEPT = 8


class FieldBlock:
    """Fields whose values lie side by side.

    Args:
        places: The places of the fields in the schema.
        dtype: One row: a structured dtype with the fields ``f0``, ``f1``, ... in the order of ``places``.
    """

    def __init__(self, places: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.places = tuple(places)
        self.dtype = dtype
        self.raw = np.dtype((np.void, dtype.itemsize))

    def columns(self, rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """The fields' values ``[n, *shape]`` in rows of bytes ``[n]``, as views."""
        structured = rows.view(self.dtype)
        return [structured[f"f{number}"] for number in range(len(self.places))]


def blocks_of(schema: RowSchema) -> list[FieldBlock]:
    """Return the layout of the fields of a row; the same for the same schema everywhere."""
    kinds = list(schema.stored.values())
    small = [place for place, kind in enumerate(kinds) if kind.nbytes <= _SIDE_BY_SIDE]
    # Widest items first: then every field begins at a multiple of its item's size, nearly without gaps.
    small.sort(key=lambda place: -kinds[place].dtype.alignment)
    groups = ([small] if small else []) + [[place] for place in range(len(kinds)) if place not in small]
    return [_block(places, [kinds[place] for place in places]) for places in groups]


def _block(places: Sequence[int], kinds: Sequence[FieldType]) -> FieldBlock:
    offsets, end, widest = [], 0, 1
    for kind in kinds:
        alignment = kind.dtype.alignment
        end += -end % alignment
        offsets.append(end)
        end += kind.nbytes
        widest = max(widest, alignment)
    end += -end % widest
    layout: Any = {
        "names": [f"f{number}" for number in range(len(kinds))],
        "formats": [(kind.dtype, kind.shape) for kind in kinds],
        "offsets": offsets,
        "itemsize": max(end, 1),
    }
    return FieldBlock(places, np.dtype(layout))


class Columns:
    """Memory for rows of one schema.

    Args:
        schema: The schema of the rows.
        columns: Arrays ``[rows, *shape]`` in the order of its fields.
        blocks: Blocks that ``columns`` are views of, and their rows as bytes, ``[rows]``; a field that is in none is
            gathered by itself.
        values: The values of fields that differ in length, of which ``columns`` have the references.
    """

    def __init__(
        self,
        schema: RowSchema,
        columns: Sequence[npt.NDArray[Any]],
        blocks: Sequence[tuple[FieldBlock, npt.NDArray[Any]]],
        values: Values | None = None,
    ) -> None:
        self.schema = schema
        self.values = values or Values()
        self.keys: tuple[FieldKey, ...] = tuple(schema.fields)
        self.columns = list(columns)
        self.by_key: dict[FieldKey, npt.NDArray[Any]] = dict(zip(self.keys, self.columns, strict=True))
        self.blocks = list(blocks)
        self._plans: dict[tuple[int, ...], _Gather] = {}

    @classmethod
    def allocate(
        cls, schema: RowSchema, rows: int, allocate: Callable[[int, int], Bytes], values: Values | None = None
    ) -> Columns:
        """Allocate memory for ``rows`` rows; ``allocate`` returns the bytes of a block by its number and size."""
        columns: dict[int, npt.NDArray[Any]] = {}
        blocks = []
        for number, block in enumerate(blocks_of(schema)):
            raw = np.ndarray((rows,), block.raw, allocate(number, rows * block.raw.itemsize))
            columns |= zip(block.places, block.columns(raw), strict=True)
            blocks.append((block, raw))
        return cls(schema, [columns[place] for place in range(len(columns))], blocks, values)

    @classmethod
    def wrap(cls, schema: RowSchema, arrays: Sequence[npt.NDArray[Any]]) -> Columns:
        """Use existing arrays ``[rows, *shape]`` as memory."""
        blocks = []
        for place, (array, kind) in enumerate(zip(arrays, schema.stored.values(), strict=True)):
            if array.flags.c_contiguous and array.size and array.dtype == kind.dtype:
                block = _block([place], [kind])
                blocks.append((block, np.ndarray((len(array),), block.raw, array)))
        return cls(schema, arrays, blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for all rows, used or not."""
        return sum(column.nbytes for column in self.columns) + self.values.nbytes

    def write(self, begin: int, arrays: Sequence[npt.NDArray[Any]], first: int, n: int) -> None:
        """Copy rows ``first .. first + n - 1`` of ``arrays`` to the places from ``begin``."""
        for column, array in zip(self.columns, arrays, strict=True):
            column[begin : begin + n] = array[first : first + n]

    def put(self, places: Slots, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Copy the rows of ``arrays`` to ``places``."""
        for column, array in zip(self.columns, arrays, strict=True):
            column[places] = array

    def gather(self, places: Slots) -> dict[FieldKey, npt.NDArray[Any]]:
        """Copy the rows at ``places``, which the caller has checked, to arrays ``[*places.shape, *shape]``.

        The arrays are contiguous and begin at multiples of 64 bytes in fresh memory.
        """
        plan = self._plans.get(places.shape)
        if plan is None:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            plan = self._plans[places.shape] = _Gather(self, places.shape)
        return plan.run(places)

    def get(self, places: Slots) -> Any:
        """The rows at ``places`` as a tree, in fresh memory."""
        fields = self._with_values(self.gather(places))
        return fields if self.schema.plain else unflatten(self.schema.structure, fields)

    def read(self, key: FieldKey, places: Slots | slice) -> npt.NDArray[Any]:
        """One field of the rows at ``places``, or MissingFieldError."""
        try:
            column = self.by_key[key]
        except (KeyError, TypeError) as error:
            raise MissingFieldError(f"rows: expected a field {key!r}, found {list(self.by_key)}") from error
        found: npt.NDArray[Any] = self._with_values({key: column[places]})[key]
        return found

    def _with_values(self, fields: dict[FieldKey, Any]) -> dict[FieldKey, Any]:
        """Gathered fields with values in place of their references."""
        for key, kind in self.schema.varying.items():
            if key in fields:
                refs = fields[key]
                values = [kind.decode(raw) for raw in self.values.read(refs)]
                fields[key] = object_array(values, refs.shape[:-1])
        return fields

    def refs(self, places: Slots | slice) -> list[Refs]:
        """The references of the rows at ``places``, of each field that differs in length."""
        return [self.by_key[key][places] for key in self.schema.varying]

    def saved(self, places: Slots | slice) -> list[Any]:
        """Return the rows at ``places`` as ``rows_state`` takes them."""
        kinds = zip(self.schema.fields.values(), self.columns, strict=True)
        return [self.values.read(column[places]) if kind.varies else column[places] for kind, column in kinds]

    def layout(self, shape: tuple[int, ...]) -> BatchLayout:
        """Return the layout of the fields of ``shape`` rows in one stretch of memory, by their places."""
        kinds = enumerate(self.schema.stored.values())
        return BatchLayout({str(place): ((*shape, *kind.shape), kind.dtype) for place, kind in kinds})


class _Gather:
    """A plan for gathering rows at places of one shape."""

    def __init__(self, memory: Columns, shape: tuple[int, ...]) -> None:
        self._keys = memory.keys
        self._n = n = int(np.prod(shape, dtype=np.int64))
        layout = memory.layout((n,))
        self._nbytes = layout.nbytes
        self._pool = MemoryPool(layout.nbytes) if layout.nbytes >= _POOL_FROM else None
        self._targets = list(layout.fields.values())
        self._shapes = None if len(shape) == 1 else [(*shape, *flat[1:]) for _, flat, _ in self._targets]
        # Single fields: their place, bytes to take from, and what takes them. Fields side by side: bytes to take from,
        # and memory that they pass through, kept from call to call (several threads may be at it).
        self._single: list[tuple[int, npt.NDArray[Any], np.dtype[Any]]] = []
        self._side_by_side: list[tuple[npt.NDArray[Any], FieldBlock, deque[_Scratch]]] = []
        blocked: set[int] = set()
        for block, rows in memory.blocks:
            blocked |= {*block.places}
            if len(block.places) == 1:
                self._single.append((block.places[0], rows, block.raw))
            else:
                self._side_by_side.append((rows, block, deque(maxlen=2)))
        self._strided = [(place, column) for place, column in enumerate(memory.columns) if place not in blocked]

    def _scratch(self, block: FieldBlock) -> _Scratch:
        memory = np.empty(max(1, min(self._n, _SCRATCH // block.raw.itemsize)), block.raw)
        return memory, list(zip(block.places, block.columns(memory), strict=True))

    def run(self, places: Slots) -> dict[FieldKey, npt.NDArray[Any]]:
        """Gather the rows at ``places``, which have the plan's shape."""
        flat = places.reshape(-1)
        if self._pool is not None:
            memory: Bytes = self._pool.take()
            base = 0
        else:
            memory = np.empty(self._nbytes + _ALIGNMENT, np.uint8)
            base = -memory.__array_interface__["data"][0] % _ALIGNMENT
        found = [np.ndarray(shape, dtype, memory, base + offset) for offset, shape, dtype in self._targets]
        for place, rows, raw in self._single:
            if raw.itemsize * self._n:
                # "clip" takes straight into the output, "raise" would go through a copy.
                rows.take(flat, 0, np.ndarray((self._n,), raw, memory, base + self._targets[place][0]), "clip")
        for rows, block, kept in self._side_by_side:
            try:
                scratch, parts = kept.pop()
            except IndexError:
                scratch, parts = self._scratch(block)
            if len(scratch) == self._n:
                rows.take(flat, 0, scratch, "clip")
                for place, values in parts:
                    found[place][...] = values
            else:
                for begin in range(0, self._n, len(scratch)):
                    now = min(len(scratch), self._n - begin)
                    rows.take(flat[begin : begin + now], 0, scratch[:now], "clip")
                    for place, values in parts:
                        found[place][begin : begin + now] = values[:now]
            kept.append((scratch, parts))
        for place, column in self._strided:
            found[place][...] = column[flat]
        if self._shapes is not None:
            found = [values.reshape(shape) for values, shape in zip(found, self._shapes, strict=True)]
        return dict(zip(self._keys, found, strict=True))
