"""Reading a tail file that another process may be writing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mouse_core.files.reading import reading
from mouse_core.store._tail.columns import ColumnExtent, numbers_extent
from mouse_core.store.disk.tail.commits import Sums, check_rows_of, chosen_commit
from mouse_core.store.disk.tail.file import TailExtent, check_ends, map_layout
from mouse_core.store.disk.tail.mapping import open_file, origin


class TailReader:
    """The rows of a tail file that were committed; nothing is written to it.

    Args:
        path: The file.

    Attributes:
        token: Stands for the file: extents of the same reader have the same first rows.

    Raises:
        DataError: It is no such file, or a newer version wrote it, or its head is damaged.
        ConfigError: It is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.token = object()
        with reading(self.path):
            file = open_file(self.path, write=False)
            try:
                self.layout, memory = map_layout(self.path, file, write=False)
                self._origin = origin(file)
            finally:
                os.close(file)
        self._live, self._places = self.layout.live(memory), self.layout.slots(memory)
        self._arrays, self._table = self.layout.arrays(memory), self.layout.table(memory)
        self._sums = Sums(self.layout, self._arrays)
        self._since = np.zeros(len(self.layout.columns), np.int64)

    def committed(self) -> int:
        """How many rows were committed so far; costs what is new of them, whose checksums are checked.

        Raises:
            DataError: Rows are damaged; the message names the file and the rows.
        """
        name, layout = str(self.path), self.layout
        same = self._origin != 0 and int(self._live[1]) == self._origin
        commit, sums = chosen_commit(
            layout,
            self._places,
            lambda found: check_rows_of(name, layout, self._table, self._sums, found),
            same=same,
            shown=self._sums.rows + 1,
        )
        if commit is not None and sums is not None:
            check_ends(self.path, layout, self._arrays, commit.since, commit.rows)
            self._sums, self._since = sums, commit.since
        return self._sums.rows

    def extent(self, rows: int) -> TailExtent:
        """The first ``rows`` rows, of those ``committed`` spoke of."""
        since = np.where(self._since > rows, 0, self._since)
        rooms = self.layout.rooms(self._arrays, since)
        extents: dict[str, ColumnExtent] = {
            name: numbers_extent(self.layout.columns[name], room, rows) for name, room in rooms.items()
        }
        extent = TailExtent(self.layout, extents, None, rows)
        extent.token = self.token
        return extent
