"""Reading a tail file that another process may be writing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import DataError
from mouse_core.files.mapped import fence, open_file, origin
from mouse_core.files.reading import check_inside, reading
from mouse_core.store._tail.columns import ColumnExtent
from mouse_core.store.disk.tail.commits import (
    COMMITTED,
    COUNTED,
    ORIGIN,
    SYNCED,
    check_not_fewer,
    read_commits,
    told,
)
from mouse_core.store.disk.tail.extent import TailExtent, check_ends, column_extents_of, read_objects_of
from mouse_core.store.disk.tail.file import map_layout
from mouse_core.store.disk.tail.objects import ObjectsFile, objects_path
from mouse_core.store.disk.tail.sums import Sums, check_rows_of, chosen_commit, whole_stretches

_NO_NULLS = np.zeros(0, np.bool_)


class TailReader:
    """The rows of a tail file that were committed; nothing is written to it.

    Args:
        path: The file.
        image_roots: Folders in which images that are named by path may lie.
        identity: What its head must say that no other file's does; "" is any.

    Attributes:
        token: Stands for the file: extents of the same reader have the same first rows.

    Raises:
        DataError: It is no such file, or another one, or a newer version wrote it, or its head is damaged.
        ConfigError: It is not there.
    """

    def __init__(self, path: str | os.PathLike[str], image_roots: tuple[str, ...] = (), *, identity: str = "") -> None:
        self.path = Path(path)
        self.token = object()
        self._objects: ObjectsFile | None = None
        check_inside([self.path, objects_path(self.path)], self.path.parent)
        with reading(self.path):
            file = open_file(self.path, write=False)
            try:
                self.layout, memory = map_layout(self.path, file, image_roots, identity, write=False)
                self._origin = origin(file)
                if self.layout.has_objects:
                    self._objects = ObjectsFile(objects_path(self.path), write=False)
            finally:
                os.close(file)
            self._live, self._places = self.layout.live(memory), self.layout.places(memory)
            self._arrays, self._table = self.layout.arrays(memory), self.layout.table(memory)
            self._sums = Sums(self.layout, memory, None if self._objects is None else self._objects.read)
            self._since = np.zeros(len(self.layout.columns), np.int64)
            self._values = [pa.array([], column.arrow_type) for column in self.layout.objects]
        self._nulls = [self._arrays.get(f"{number}.nulls", _NO_NULLS) for number in range(len(self.layout.columns))]
        # The columns that ``extent`` made last, of how many rows, and from which row on theirs differed in length.
        self._made: tuple[int, npt.NDArray[np.int64], dict[str, ColumnExtent]] = 0, self._since, {}

    def committed(self) -> int:
        """How many rows were committed so far; costs what is new of them, whose checksums are checked.

        Raises:
            DataError: Rows are damaged; the message names the file and the rows.
        """
        with reading(self.path):
            return self._look()

    def _look(self) -> int:
        name, layout, live = str(self.path), self.layout, self._live
        same = self._origin != 0 and told(name, live, ORIGIN) == self._origin
        # Before the commits: these are written first.
        synced = told(name, live, SYNCED)
        told_of = max(synced, told(name, live, COMMITTED)) if same else synced
        if told_of == self._sums.rows and same:
            return told_of
        fence()
        shown = [
            commit
            for commit in read_commits(self._places, layout, self._sums.rows)
            # After a restart nobody waits any more.
            if commit.rows <= synced or not commit.waited or not same
        ]
        commit, sums = chosen_commit(
            shown,
            lambda found: check_rows_of(name, layout, self._table, self._sums, found),
            whole=layout.rows if same else synced,
        )
        if commit is not None and sums is not None:
            check_ends(self.path, layout, self._arrays, commit.since, commit.rows)
            if self._objects is not None:
                begin, at = self._sums.rows, self._sums.objects_end
                _, values = read_objects_of(self._objects, layout, self._arrays, at, begin, commit.rows)
                self._values = [pa.concat_arrays(parts) for parts in zip(self._values, values, strict=True)]
            self._sums, self._since = sums, commit.since
        check_not_fewer(name, self._sums.rows, told_of)
        return self._sums.rows

    def whole(self) -> list[range]:
        """Which rows are whole, of those that were committed; a stretch of them begins and ends with a block, or ends
        with one of the last commits.

        From here on ``extent`` has them; what lies between must not be believed.
        """
        commits = read_commits(self._places, self.layout)
        stretches: list[range] = []
        parts = [[values] for values in self._values]
        for rows, at in whole_stretches(self.layout, self._table, self._sums, commits):
            gap = rows.start - (stretches[-1].stop if stretches else 0)
            if self._objects is not None:
                _, values = read_objects_of(self._objects, self.layout, self._arrays, at, rows.start, rows.stop)
                for known, some in zip(parts, values, strict=True):
                    known += [pa.nulls(gap, some.type), some]
            if stretches and not gap:
                rows = range(stretches.pop().start, rows.stop)
            stretches.append(rows)
        self._values = [pa.concat_arrays(known) for known in parts]
        if commits:
            self._since = commits[0].since
        return stretches

    def told_of(self) -> int:
        """How many rows were committed, or seem to have been, be they whole or not."""
        numbers = [commit.rows for commit in read_commits(self._places, self.layout)]
        with suppress(DataError):
            numbers.append(told(str(self.path), self._live, COMMITTED))
        return min(max(numbers, default=0), self.layout.rows)

    def not_flushed(self) -> int:
        """How many rows were written behind those ``committed`` speaks of; 0 for a copy, of which that is not known."""
        with reading(self.path):
            if self._origin == 0 or told(str(self.path), self._live, ORIGIN) != self._origin:
                return 0
            written = min(told(str(self.path), self._live, COUNTED), self.layout.rows)
            return max(0, written - self._look())

    def extent(self, rows: int) -> TailExtent:
        """The first ``rows`` rows, of those ``committed`` spoke of."""
        since = np.where(self._since > rows, 0, self._since)
        extents = column_extents_of(self.layout, self._arrays, since, self._values, rows, self._same(since, rows))
        self._made = rows, since, extents
        extent = TailExtent(self.layout, extents, rows)
        extent.token = self.token
        return extent

    def _same(self, since: npt.NDArray[np.int64], rows: int) -> dict[str, ColumnExtent]:
        """The columns that were made last and are the same with other rows: no null came, nor the first of another
        length.
        """
        before, then, known = self._made
        return {
            name: known[name]
            for (name, column), nulls, now, was in zip(
                self.layout.columns.items(), self._nulls, since.tolist(), then.tolist(), strict=True
            )
            if name in known and not column.is_object and now == was and not nulls[before:rows].any()
        }

    def close(self) -> None:
        """Let go of the files; what was read of them stays."""
        if self._objects is not None:
            self._objects.close()
