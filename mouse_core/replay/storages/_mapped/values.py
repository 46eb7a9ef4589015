"""What differs in length from row to row, in a mapped file that several processes write and read.

The file is a ring. Nothing is written where a value lies that a row in use has, so that a process that dies has changed
nothing; a ring that is full is copied to a longer file first, and that one counts from the next commit on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from mouse_core.replay.protocols import FieldKey
from mouse_core.replay.storages._mapped.files import Now, lengthen, map_file
from mouse_core.replay.storages._rows import RowSchema
from mouse_core.replay.storages._varying import ByteRing, Bytes, Refs, in_use, is_full, is_sparse, room_for


class MappedValues:
    """The values of a mapped buffer. The storage's lock is held around every call.

    Args:
        folder: The buffer's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ring: ByteRing | None = None
        self._of: tuple[int, int] | None = None  # generation and room of the ring
        self._begin = 0  # before it lies nothing that a row in use has

    def file(self, now: Now) -> Path:
        """Where they lie now."""
        return self._folder / f"values-{now.generation}-{now.room}"

    def _at(self, now: Now) -> ByteRing:
        if self._ring is None or self._of != (now.generation, now.room):
            if self._of is None or self._of[0] != now.generation:
                self._begin = 0
            self._ring, self._of = ByteRing(map_file(self.file(now), now.room)), (now.generation, now.room)
        return self._ring

    def keep(
        self, schema: RowSchema, arrays: Sequence[Any], now: Now, refs: Callable[[], list[Refs]]
    ) -> tuple[Sequence[npt.NDArray[Any]], Now]:
        """Rows as they lie in memory, and what is there when the values of all of them are.

        Args:
            schema: Of the rows.
            arrays: What ``RowSchema.check`` gave.
            now: What is there.
            refs: Gives where the values of the rows in use lie.
        """
        if not schema.varying:
            return arrays, now
        parts = [array for array, kind in zip(arrays, schema.fields.values(), strict=True) if kind.varies]
        values = [value for part in parts for value in part]
        coming = sum(value.size for value in values)
        self._at(now)
        if is_full(now.room, now.end - self._begin, coming):
            now = self._make_room(now, coming, refs)
        kept = iter(self._at(now).write(now.end, values).reshape(len(parts), -1, 2))
        kinds = schema.fields.values()
        rows = [next(kept) if kind.varies else array for array, kind in zip(arrays, kinds, strict=True)]
        return rows, replace(now, end=now.end + coming)

    def reserve(self, schema: RowSchema, arrays: Sequence[Any], now: Now, refs: Callable[[], list[Refs]]) -> Now:
        """What is there with room for all of these rows; see ``keep``. A full disk is found before a row is written."""
        kinds = schema.fields.values()
        values = [array for array, kind in zip(arrays, kinds, strict=True) if kind.varies]
        coming = sum(value.size for part in values for value in part)
        self._at(now)
        return self._make_room(now, coming, refs) if is_full(now.room, now.end - self._begin, coming) else now

    def _make_room(self, now: Now, coming: int, refs: Callable[[], list[Refs]]) -> Now:
        ring = self._at(now)
        begin, _ = in_use(refs(), now.end)
        later = now
        if is_full(now.room, now.end - begin, coming):
            later = replace(now, room=room_for(now.end - begin + coming))
            lengthen(self.file(later), later.room)
            self._ring = ring.move(begin, now.end, map_file(self.file(later), later.room))
            self._of = (later.generation, later.room)
        self._begin = begin
        return later

    def is_sparse(self, now: Now, refs: Callable[[], list[Refs]]) -> bool:
        """Whether most of the ring is held by what no row has any more."""
        if not is_full(now.room, now.end - self._begin, 0):
            return False
        begin, used = in_use(refs(), now.end)
        return is_sparse(now.end - begin, used)

    def read(self, refs: Refs, now: Now) -> list[Bytes]:
        """The values at ``refs``, copied."""
        ring = self._at(now)
        return [ring.read(begin, nbytes) for begin, nbytes in refs.reshape(-1, 2).tolist()]

    def columns(self, schema: RowSchema, columns: Sequence[npt.NDArray[Any]], now: Now) -> list[Any]:
        """The columns of rows as ``rows_state`` takes them."""
        kinds = zip(schema.fields.values(), columns, strict=True)
        return [self.read(column, now) if kind.varies else column for kind, column in kinds]

    def opened(self, schema: RowSchema, fields: dict[FieldKey, Any], now: Now) -> dict[FieldKey, Any]:
        """Gathered fields with their values in place of where they lie."""
        for key in schema.varying.keys() & fields.keys():
            fields[key] = schema.opened(key, fields[key], lambda refs: self.read(refs, now))
        return fields

    def forget(self) -> None:
        """Let go of the file."""
        self._ring = self._of = None

    def tidy(self, now: Now) -> None:
        """Remove the files that do not count any more."""
        for file in self._folder.glob("values-*"):
            if file != self.file(now):
                file.unlink(missing_ok=True)
