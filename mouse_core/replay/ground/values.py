"""Where the values of rows lie that differ in length: in a ring of bytes, one behind the other.

A row holds where its value begins, counted over all bytes that were ever written, and how many they are. The ring is as
long as what is in use needs, and as much again; where it is full it is looked through for what rows still have, and if
that leaves too little room, it moves to longer memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.replay.ground.encoding import Bytes, decoded, object_array
from mouse_core.replay.ground.protocols import FieldKey, ring_pieces
from mouse_core.replay.ground.schema import RowSchema

Refs = npt.NDArray[np.int64]
"""Where rows' values lie, ``[n, 2]``: the first byte among all that were ever written, and how many they are."""

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
    """Bytes of a ring in which so many are in use, and as many may come before it is looked through again."""
    return max(2 * nbytes, _LEAST_ROOM)


def _is_full(room: int, used: int, coming: int) -> bool:
    """Whether a ring is to be made anew. Looking through all rows for what is in use must not happen too often."""
    return used + coming > room or room - used < room // 8


def _is_sparse(span: int, used: int) -> bool:
    """Whether a ring is mostly holes, which rows left that were overwritten out of order."""
    return span > 4 * used + _LEAST_ROOM


def _in_use(columns: Sequence[Refs], end: int) -> tuple[int, int]:
    """The first byte that some row has, and how many bytes rows have together, by where their values lie."""
    there = [refs[refs[:, 1] > 0] for refs in columns]
    begin = min((int(refs[:, 0].min()) for refs in there if len(refs)), default=end)
    return begin, sum(int(refs[:, 1].sum()) for refs in there)


class Values:
    """The values of rows in memory, as long as there are rows."""

    packs = True
    """Whether a ring that is mostly holes is written anew; otherwise the holes stay until the rows between them go."""

    def __init__(self) -> None:
        self._ring = ByteRing(np.empty(0, np.uint8))
        self._begin = 0  # before it lies nothing that a row in use has
        self._end = 0  # behind the last byte that was ever written

    @property
    def nbytes(self) -> int:
        """Bytes of memory, used or not."""
        return self._ring.memory.size

    def keep(
        self, schema: RowSchema, arrays: Sequence[Any], refs: Callable[[], Sequence[Refs]]
    ) -> Sequence[npt.NDArray[Any]]:
        """Rows as they lie in memory: of what differs in length, where it lies.

        Args:
            schema: Of the rows.
            arrays: What ``RowSchema.check`` gave.
            refs: Gives where the values of the rows in use lie; where there are holes they are changed.
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
        """Have room for so many bytes more; ``refs`` as for ``keep``."""
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
        """Whether most of the ring is held by what no row has any more."""
        if not _is_full(self.nbytes, self._end - self._begin, 0):
            return False
        begin, used = _in_use(refs(), self._end)
        return _is_sparse(self._end - begin, used)

    def _pack(self, columns: Sequence[Refs], nbytes: int) -> None:
        """Write what rows have to other memory without holes, and say in the rows where it lies now."""
        ring, end = ByteRing(np.empty(_room_for(nbytes), np.uint8)), 0
        for refs in columns:
            refs[...] = ring.write(end, self.read(refs))
            end += int(refs[:, 1].sum())
        self._ring, self._begin, self._end = ring, 0, end

    def _memory(self, nbytes: int) -> Bytes:
        """Memory for a ring."""
        return np.empty(nbytes, np.uint8)

    def read(self, refs: Refs) -> list[Bytes]:
        """The values at ``refs``, ``[..., 2]``, copied."""
        return [self._ring.read(begin, nbytes) for begin, nbytes in refs.reshape(-1, 2).tolist()]

    def opened(self, schema: RowSchema, fields: dict[FieldKey, Any]) -> dict[FieldKey, Any]:
        """Gathered fields with their values in place of where they lie."""
        for key, kind in schema.varying.items():
            if key in fields:
                refs = fields[key]
                values = [decoded(raw, kind.varies, kind.dtype, kind.shape) for raw in self.read(refs)]
                fields[key] = object_array(values, refs.shape[:-1])
        return fields


def varying_of(schema: RowSchema, arrays: Sequence[Any]) -> list[list[Bytes]]:
    """The fields that differ in length, of those that ``RowSchema.check`` gave."""
    return [array for array, kind in zip(arrays, schema.fields.values(), strict=True) if kind.varies]
