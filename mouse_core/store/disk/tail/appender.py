"""Appending of rows to mapped files, each twice as large as the one before."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from mouse_core._base.locks import uninterrupted
from mouse_core.columns.appended import TailColumn
from mouse_core.columns.extent import Extent
from mouse_core.store._intake import Appender
from mouse_core.store._segments import Segment
from mouse_core.store.disk.tail.file import TailFile

# The first file of rows is small, as many stores are; each is twice as large as the one before, up to sealed segments.
_FIRST_BYTES, _FIRST_ROWS = 1 << 20, 64
# Rows of so many bytes are few pages of a file between two flushes.
_FEW_BYTES = 1 << 10
# Rows that come together are taken together, in one file, up to so many bytes.
_MOST_TOGETHER = 1 << 30


class FolderAppender(Appender):
    """The file that rows are appended to.

    Args:
        rows: Those of the folder, as its writer has them.
    """

    def __init__(self, rows: Any) -> None:
        super().__init__(rows.schema, rows.segments)
        self._all: Any = weakref.proxy(rows)
        self.tail: TailFile | None = None
        # Made for a row that may be refused.
        self._candidate: TailFile | None = None
        self._number = self._first = 0

    def segment(self) -> Segment | None:
        """The rows of the file so far."""
        if self.tail is None or not self.count:
            return None
        segment: Segment = self._all.tail_segment(self.tail, self._first)
        return segment

    def close(self) -> None:
        """Take the rows so far for a segment; other rows go into another file."""
        if self.tail is not None and self.count:
            self._all.retire(self.tail, self._first)
        elif self.tail is not None:
            # No row came, for an interrupt or a full disk.
            self._all.forget_tail(self.tail)
            self.tail.remove()
        self.tail = self._extent = None

    def drop_candidate(self) -> None:
        """Remove a file that was made for a row that was refused."""
        if self._candidate is not None:
            self._candidate.remove()
            self._candidate = None

    def _make(self, columns: Mapping[str, TailColumn], before: int, coming: int) -> Extent:
        self.drop_candidate()
        row_bytes = max(1, sum(column.row_bytes for column in columns.values()))
        most_bytes, most_rows = self._all.most_of_a_file()
        fewest = 16 if self._all.keeps_all else 1  # large rows are dropped one by one
        most = min(max(fewest, most_bytes // row_bytes), most_rows or _MOST_TOGETHER)
        usual = min(max(_FIRST_ROWS, _FIRST_BYTES // row_bytes, 2 * before), most)
        together = max(16, _MOST_TOGETHER // row_bytes) if self._all.keeps_all else most
        rows = max(usual, min(coming, together))
        self._number, path = self._all.new_tail()
        often = self._all.sync != "none" and row_bytes <= _FEW_BYTES
        self._candidate = TailFile.create(path, columns, rows, often=often)
        extent = self._candidate.extent
        extent.most_bytes, extent.keeps_together = most_bytes, self._all.keeps_all
        return extent

    def _before(self) -> list[Segment]:
        shown: list[Segment] = self._all.shown()
        return shown

    def _has_room(self, extent: Extent, coming: int) -> bool:
        # Rows that come together are in one file, so that all of them count, or none does; unless old ones are to be
        # dropped a file at a time, and these are too many for one.
        room = extent.rows - extent.count
        return room >= max(coming, 1) or (room > 0 and not self._all.keeps_all and coming > extent.rows // 2)

    def _open(self, extent: Extent) -> None:
        if extent is self._extent:
            return
        # The manifest and memory must speak of the same files, whatever comes between.
        uninterrupted(partial(self._open_new, extent))

    def _open_new(self, extent: Extent) -> None:
        tail, self._candidate = self._candidate, None
        assert tail is not None
        assert tail.extent is extent
        known = dict(self._schema.types), dict(self._schema.arrow_types)
        first = self._all.end if self._extent is None else self._first + self.count
        try:
            self._know(extent)
            self._all.name_tail(self._number, tail, self.count or None)
        except BaseException:
            self._schema.types, self._schema.arrow_types = known
            if self._all.may_name(self._number):
                tail.close()
            else:
                tail.remove()
            raise
        self.close()
        self.tail, self._extent, self._first = tail, extent, first
        self._all.drop()


class SyncedAppender(FolderAppender):
    """One that waits for the disk, row by row."""

    def append(self, row: Mapping[str, Any]) -> None:
        """Take one row."""
        super().append(row)
        self._sync()

    def extend(self, columns: Mapping[str, Any], n: int) -> None:
        """Take rows, all of them."""
        super().extend(columns, n)
        self._sync()

    def _sync(self) -> None:
        self._all.commit()
