"""Commits: how many rows of a tail file count, and checksums that show whether the rows are as they were written.

Rows share checksums block by block. The checksums of a full block stand in a table, and are never written again. Those
of the block in progress are part of the commit. So a commit of 5000 rows, in blocks of 4096 rows, has one line in the
table, for rows 0..4095, and checksums of its own for rows 4096..4999.

There are four places for commits. Commits that wait for the disk take turns in two, the others in the other two: so
while one is written, the last one of its kind is whole, and none that has reached the disk is lost to one that may not.

The live page beside the commits says how many rows count, were committed, and are known to be on the disk. So a commit
that is missing was either cut off by a crash, or is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.files.checksum import RunningChecksum, checksum
from mouse_core.files.mapped import Word
from mouse_core.files.reading import damaged
from mouse_core.store.disk.tail.layout import TailLayout

UNIT = 4294967291
"""The prime whose multiples stand in the live page; its product with a number below it is an int64."""

# Of each kind of commit there are two places.
_EACH = 2


class LivePage:
    """The numbers of a tail file that change with every row or commit.

    Args:
        path: The file.
        words: The page, int64.
    """

    counted = Word(0, UNIT)
    """Rows that count."""

    origin = Word(1, UNIT)
    """The origin of the file, which tells it from a copy; see ``mouse_core.files.mapped.origin``."""

    synced = Word(2, UNIT)
    """Rows that are on the disk."""

    committed = Word(3, UNIT)
    """Rows that were committed."""

    def __init__(self, path: Path, words: npt.NDArray[np.int64]) -> None:
        self.path, self.words = path, memoryview(words)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Commit:
    """A commit, as it stands in one of the places.

    Args:
        rows: Rows that count.
        since: For each column, from which row on rows differ in length; see ``NumbersExtent``.
        sums: The checksums of the block in progress.
        place: Number of the place.
    """

    rows: int
    since: npt.NDArray[np.int64]
    sums: list[int]
    place: int = 0

    @property
    def waited(self) -> bool:
        """Whether the commit waited for the disk."""
        return self.place >= _EACH


def next_places(commits: Sequence[Commit], rows: int, synced: int) -> list[int]:
    """Return the places of the next commits: of one that does not wait for the disk, and of one that does.

    Until the next commit is whole, the best one of its kind stays in the other place.

    Args:
        commits: The commits that are whole, of most rows first.
        rows: Rows of the best commit that does not wait.
        synced: Rows of the best commit that waits: if it has more rows, the disk may not have them.
    """
    places = [0, _EACH]
    for waits, most in ((False, rows), (True, synced)):
        best = next((commit for commit in commits if commit.waited == waits and commit.rows <= most), None)
        if best is not None:
            places[waits] = place_after(best.place)
    return places


def place_after(place: int) -> int:
    """Return the other place of the same kind."""
    return place ^ 1


def write_commit(place: npt.NDArray[np.uint64], layout: TailLayout, commit: Commit) -> None:
    """Write a commit to a place."""
    words = np.empty(layout.place_words, np.uint64)
    words[0] = commit.rows
    words[1 : 1 + len(commit.since)] = commit.since.view(np.uint64)
    words[1 + len(commit.since) : -1] = commit.sums
    words[-1] = checksum(words[:-1].data, layout.seed)
    place[:] = words


def read_commits(places: Sequence[npt.NDArray[np.uint64]], layout: TailLayout, known: int = -1) -> list[Commit]:
    """Return the whole commits of more than ``known`` rows, the one of most rows first."""
    found = []
    for number, place in enumerate(places):
        words = place.copy()  # the writer may change the place meanwhile
        columns, rows = len(layout.columns), int(words[0])
        if rows <= known:
            continue
        if checksum(words[:-1].data, layout.seed) != int(words[-1]) or rows > layout.rows:
            continue
        since, sums = words[1 : 1 + columns].view(np.int64), [int(word) for word in words[1 + columns : -1]]
        found.append(Commit(rows, since, sums, number))
    return sorted(found, key=lambda commit: commit.rows, reverse=True)


class Sums:
    """The checksums of the first rows of a file, which advance as rows come.

    Args:
        layout: The layout of the file.
        memory: The memory of the file.
        objects: Returns the bytes of the file of objects from one offset to another.

    Attributes:
        rows: Rows that the checksums cover.
        objects_end: Offset behind the objects of these rows.
    """

    def __init__(self, layout: TailLayout, memory: Any, objects: Callable[[int, int], bytes] | None = None) -> None:
        self._layout, self._objects = layout, objects
        self._bytes = memoryview(memory)[layout.begins["rows"] :]
        arrays = layout.arrays(memory)
        # Slicing bytes takes a fifth of the time of slicing arrays.
        begins = {name: begin for name, (begin, _, _) in layout.memory.fields.items()}
        widths = [column.width for column in layout.columns.values()]
        self._parts = [
            _PartPlace(
                part.kind,
                part.column,
                begins[part.name],
                part.dtype.itemsize,
                widths[part.column] if part.kind == "values" else 1,
                f"{part.column}.ends" in arrays and part.kind != "nulls",
            )
            for part in layout.parts
        ]
        self._ends = [arrays.get(f"{number}.ends") for number in range(len(layout.columns))]
        self._sizes = [arrays[part.name] for part in layout.parts if part.kind == "sizes"]
        self._states = self._new_states()
        self.rows = 0
        self.objects_end = 0

    def _new_states(self) -> list[Any]:
        return [RunningChecksum(seed=self._layout.seed) for _ in range(self._layout.sums)]

    def copy(self) -> Sums:
        """Return a copy, which advances by itself."""
        copied = Sums.__new__(Sums)
        copied.__dict__.update(self.__dict__, _states=[state.copy() for state in self._states])
        return copied

    @property
    def now(self) -> list[int]:
        """The checksums of the block in progress."""
        return [state.intdigest() for state in self._states]

    def advance(
        self, rows: int, since: npt.NDArray[np.int64], full: Callable[[int, npt.NDArray[np.uint64]], None]
    ) -> None:
        """Cover the rows before row ``rows``.

        Args:
            rows: Rows that are covered then.
            since: See ``Commit``.
            full: Called with the number of the first full block, and the checksums of full blocks, uint64
                ``[blocks, sums]``.
        """
        size = self._layout.block_rows
        while self.rows < rows:
            block, begun = divmod(self.rows, size)
            blocks = rows // size - block
            if blocks and not begun:
                # Checksums of whole blocks take half the time of running ones.
                full(block, self._of_blocks(block, blocks, since))
                self.rows += blocks * size
                continue
            end = min(rows, block * size + size)
            self._take(self.rows, end, since)
            self.rows = end
            if end % size == 0:
                full(block, np.array([self.now], np.uint64))
                self._states = self._new_states()

    def skip(self, rows: int) -> None:
        """Go on behind row ``rows`` without covering rows before it; raises DataError for impossible sizes."""
        sizes = [sizes[self.rows : rows] for sizes in self._sizes]
        if any(some.size and not -1 <= int(some.min()) <= int(some.max()) < 1 << 40 for some in sizes):
            raise DataError("expected sizes of objects, found others")
        self.objects_end += sum(int(np.maximum(some, 0).sum()) for some in sizes)
        self.rows, self._states = rows, self._new_states()

    def _of_blocks(self, block: int, blocks: int, since: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the checksums of full blocks, uint64 ``[blocks, sums]``."""
        digest, seed, size, data = checksum, self._layout.seed, self._layout.block_rows, self._bytes
        found = np.empty((blocks, self._layout.sums), np.uint64)
        begins = range(block * size, (block + blocks) * size, size)
        for number, part in enumerate(self._parts):
            places = [self._place_of(part, begin, begin + size, since) for begin in begins]
            found[:, number] = [digest(data[at:end], seed) for at, end in places]
        if self._objects is not None:
            found[:, -1] = [digest(self._next_objects(begin, begin + size), seed) for begin in begins]
        return found

    def _take(self, begin: int, end: int, since: npt.NDArray[np.int64]) -> None:
        for part, state in zip(self._parts, self._states, strict=False):
            first, last = self._place_of(part, begin, end, since)
            state.update(self._bytes[first:last])
        if self._objects is not None:
            self._states[-1].update(self._next_objects(begin, end))

    def _place_of(self, part: _PartPlace, begin: int, end: int, since: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Return the first byte of a part of some rows, and the one behind the last.

        Where all rows have one length, the part that says where rows end has no bytes.
        """
        if part.may_differ:
            differs, ends = int(since[part.column]) - 1, self._ends[part.column]
            if ends is not None and 0 <= differs < end:
                if part.kind == "ends":
                    begin, end = max(differs, begin) + 1, end + 1
                else:
                    begin, end = int(ends[begin]), int(ends[end])
                return part.begin + begin * part.size, part.begin + end * part.size
            if part.kind == "ends":
                return 0, 0
        return part.begin + begin * part.row_bytes, part.begin + end * part.row_bytes

    def _next_objects(self, begin: int, end: int) -> bytes:
        """Return the objects of the next rows."""
        assert self._objects is not None
        at = self.objects_end
        self.objects_end += sum(int(np.maximum(sizes[begin:end], 0).sum()) for sizes in self._sizes)
        return self._objects(at, self.objects_end)


class _PartPlace(NamedTuple):
    """The place of a part among the rows.

    Args:
        kind, column: See ``ColumnBuffer``.
        begin: Offset of its first byte.
        size: Bytes of a number.
        width: Numbers of a row.
        may_differ: Whether rows may have other widths.
    """

    kind: str
    column: int
    begin: int
    size: int
    width: int
    may_differ: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.size * self.width


def check_rows_of(path: str, layout: TailLayout, table: npt.NDArray[np.uint64], sums: Sums, commit: Commit) -> Sums:
    """Read the rows of a commit that ``sums`` do not cover yet, and return the checksums that cover them.

    Raises:
        DataError: The rows are not what was written; the message names file, rows and column.
    """
    known, size = sums.copy(), layout.block_rows

    def check(block: int, found: npt.NDArray[np.uint64], expected: npt.NDArray[np.uint64]) -> None:
        for at, number in np.argwhere(expected != found)[:1].tolist():
            begin = (block + at) * size
            names = [*(list(layout.columns)[part.column] for part in layout.parts), "objects"]
            where = f"rows {begin}..{min(begin + size, commit.rows) - 1}, column {names[number]!r}"
            raise damaged(path, "expected the rows that were written, found damage", at=where)

    known.advance(
        commit.rows, commit.since, lambda block, found: check(block, found, table[block : block + len(found)])
    )
    check(known.rows // size, np.array([known.now], np.uint64), np.array([commit.sums], np.uint64))
    return known
