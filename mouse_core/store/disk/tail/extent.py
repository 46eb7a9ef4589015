"""An extent whose memory is a mapped file, and which says in the same file how many rows there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.files.reading import damaged, reading
from mouse_core.files.writing import storing
from mouse_core.store._tail.columns import ColumnExtent, numbers_extent
from mouse_core.store._tail.rows import Extent
from mouse_core.store.disk.tail.commits import UNIT
from mouse_core.store.disk.tail.layout import TailLayout
from mouse_core.store.disk.tail.objects import FiledObjects, ObjectsFile, read_objects


class TailExtent(Extent):
    """Room for rows in a mapped file, and how many there are in the same file.

    Args:
        layout: Where what lies.
        extents: The columns, over the file's memory.
        count: Rows that are there.
        told: Where the count stands, int64 ``[1]``; None: nobody is told, and no row is taken.
        objects: Where objects lie, if some column has them.
        objects_end: Where those of the next row begin.
    """

    note_at: int
    """From how many rows on ``note`` is to be called."""

    note: Callable[[], None]

    most_bytes: int | None = None
    """From how many bytes of objects on the file takes no more rows; None: their bytes do not count."""

    keeps_together = True
    """Whether rows that come together are in one file, however many bytes their objects have."""

    def __init__(
        self,
        layout: TailLayout,
        extents: dict[str, ColumnExtent],
        count: int,
        told: Any = None,
        objects: ObjectsFile | None = None,
        objects_end: int = 0,
    ) -> None:
        self._hold(layout.columns, layout.rows, extents, count)
        if told is not None:
            self._sort()
        self._told, self._objects, self.objects_end = told, objects, objects_end
        self._filed = [extent for extent in extents.values() if isinstance(extent, FiledObjects)]
        self.note_at, self.note = layout.rows + 1, _note_nothing

    def append(self, row: Mapping[str, Any]) -> bool:
        """As for any extent; raises StorageError where objects cannot be written."""
        if not Extent.append(self, row):
            return False
        if self._objects is not None:
            self._write_objects(self._objects, self.count - 1)
            self._end_when_full()
        count = self.count
        self._told[0] = count * UNIT
        if count >= self.note_at:
            self.note()
        return True

    def put(self, row: Mapping[str, Any]) -> None:
        """As for any extent; raises StorageError where objects cannot be written."""
        Extent.put(self, row)
        if self._objects is not None:
            self._write_objects(self._objects, self.count - 1)
            self._end_when_full()
        self._told[0] = self.count * UNIT
        if self.count >= self.note_at:
            self.note()

    def put_many(self, prepared: Mapping[str, Any], done: int, rows: int) -> int:
        """As for any extent; raises StorageError where objects cannot be written."""
        taken, some = 0, rows if self._objects is None or self.keeps_together else 1
        while taken < rows and self.count < self.rows:
            # How many bytes their objects have is known once they are written: 1 row, 2 rows, 4 rows.
            some = min(some, rows - taken)
            Extent.put_many(self, prepared, done + taken, some)
            if self._objects is not None:
                self._write_objects(self._objects, self.count - some)
                self._end_when_full()
            taken, some = taken + some, 2 * some
        self._told[0] = self.count * UNIT
        if self.count >= self.note_at:
            self.note()
        return taken

    def _end_when_full(self) -> None:
        """Have no room for more rows where the objects have all bytes that they may have."""
        if self.most_bytes is not None and self.objects_end >= self.most_bytes:
            self.rows = self.count

    def settle(self) -> None:
        """Tell of all rows, also of one after which an interrupt came at once; StorageError takes it back."""
        if self._objects is not None and self._filed[0].encoded:
            self._write_objects(self._objects, self.count)
        self._told[0] = self.count * UNIT

    def _write_objects(self, file: ObjectsFile, begin: int) -> None:
        """Write the objects of the rows from ``begin`` on, or take these rows back."""
        # Those of a row before it may not be written, where an interrupt came between.
        begin = min(begin, self.count - len(self._filed[0].encoded))
        rows = zip(*(extent.encoded for extent in self._filed), strict=True)
        content = b"".join(value for row in rows for value in row if value is not None)
        try:
            with storing(f"objects {file.path}"):
                file.write(content, self.objects_end)
        except BaseException:
            self.count = begin
            for extent in self.extents.values():
                extent.forget(begin)
            raise
        for extent in self._filed:
            extent.written(begin, self.count)
        self.objects_end += len(content)


def _note_nothing() -> None:
    """Nobody wants to know."""


def column_extents_of(
    layout: TailLayout,
    arrays: Mapping[str, Any],
    since: npt.NDArray[np.int64],
    objects: Sequence[pa.Array],
    rows: int,
    known: Mapping[str, ColumnExtent] | None = None,
) -> dict[str, ColumnExtent]:
    """The columns of a file over its memory.

    Args:
        layout: Where what lies.
        arrays: The arrays of all parts, by name.
        since: From which row on rows of a column differ in length; see ``ColumnRoom``.
        objects: The values of columns of objects so far.
        rows: How many rows are there.
        known: Columns that were made of it before, and are the same with these rows.
    """
    filed, known = iter(objects), known or {}
    return {
        name: known[name]
        if name in known
        else FiledObjects(column, arrays[f"{number}.sizes"], next(filed))
        if column.is_object
        else numbers_extent(column, layout.room(number, arrays, since), rows)
        for number, (name, column) in enumerate(layout.columns.items())
    }


def read_objects_of(
    file: ObjectsFile, layout: TailLayout, arrays: Mapping[str, Any], at: int, begin: int, end: int
) -> tuple[int, list[pa.Array]]:
    """Where the objects of some rows end, and these, by column.

    Args:
        file: Where they are.
        layout: Where the sizes lie.
        arrays: The arrays of all parts, by name.
        at: Where those of the first row begin.
        begin: The first row.
        end: The row after the last.

    Raises:
        DataError: They are no such values.
    """
    sizes = [arrays[part.name][begin:end] for part in layout.parts if part.kind == "sizes"]
    with reading(file.path):
        values = read_objects(file, at, layout.objects, sizes)
    return at + sum(int(np.maximum(some, 0).sum()) for some in sizes), values


def check_ends(path: Path, layout: TailLayout, arrays: Mapping[str, Any], since: Any, rows: int) -> None:
    """Raise DataError if rows that differ in length lie elsewhere than among the values."""
    for part in layout.parts:
        if part.kind == "ends" and since[part.column]:
            ends, most = arrays[part.name][: rows + 1], len(arrays[f"{part.column}.values"])
            if ends[0] != 0 or ends[-1] > most or (ends[1:] < ends[:-1]).any():
                name = list(layout.columns)[part.column]
                raise damaged(path, f"expected rows of column {name!r} among its values, found others")
