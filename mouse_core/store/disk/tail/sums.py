"""The checksums of rows: taken as rows come, held against those that were written, and which rows are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from mouse_core.errors import DataError
from mouse_core.files.reading import damaged
from mouse_core.store.disk.tail.commits import Commit
from mouse_core.store.disk.tail.layout import TailLayout


class Sums:
    """The checksums of rows as they come.

    Args:
        layout: Where they lie.
        memory: The file's.
        objects: Gives the bytes that lie in the file of objects, from one place to another.
    """

    def __init__(self, layout: TailLayout, memory: Any, objects: Callable[[int, int], bytes] | None = None) -> None:
        self._layout, self._objects = layout, objects
        self._bytes = memoryview(memory)[layout.rows_at :]
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
        self._states = self._begun()
        self.rows = 0
        self.objects_end = 0

    def _begun(self) -> list[Any]:
        return [xxhash.xxh3_64(seed=self._layout.seed) for _ in range(self._layout.sums)]

    def copy(self) -> Sums:
        """The same, to go on from here on without changing this one."""
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
        """Take the rows up to ``rows``.

        Args:
            rows: How many there are then.
            since: See ``Commit``.
            full: Is told of blocks that they fill: the number of the first, and checksums, uint64 ``[blocks, sums]``.
        """
        size = self._layout.block_rows
        while self.rows < rows:
            block, begun = divmod(self.rows, size)
            blocks = rows // size - block
            if blocks and not begun:
                # Most of many rows; a call for each checksum takes half the time of one that goes on.
                full(block, self._of_blocks(block, blocks, since))
                self.rows += blocks * size
                continue
            end = min(rows, block * size + size)
            self._take(self.rows, end, since)
            self.rows = end
            if end % size == 0:
                full(block, np.array([self.now], np.uint64))
                self._states = self._begun()

    def skip(self, rows: int) -> None:
        """Go on behind row ``rows``, whatever lies before; raises DataError if it is not known where objects do."""
        sizes = [sizes[self.rows : rows] for sizes in self._sizes]
        if any(some.size and not -1 <= int(some.min()) <= int(some.max()) < 1 << 40 for some in sizes):
            raise DataError("expected sizes of objects, found others")
        self.objects_end += sum(int(np.maximum(some, 0).sum()) for some in sizes)
        self.rows, self._states = rows, self._begun()

    def _of_blocks(self, block: int, blocks: int, since: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """The checksums of full blocks, uint64 ``[blocks, sums]``."""
        digest, seed, size, data = xxhash.xxh3_64_intdigest, self._layout.seed, self._layout.block_rows, self._bytes
        found = np.empty((blocks, self._layout.sums), np.uint64)
        begins = range(block * size, (block + blocks) * size, size)
        for number, part in enumerate(self._parts):
            if part.may_differ and 0 < since[part.column] <= begins.stop:
                places = [self._place_of(part, begin, begin + size, since) for begin in begins]
                found[:, number] = [digest(data[at:end], seed) for at, end in places]
            elif part.may_differ and part.kind == "ends":
                found[:, number] = digest(b"", seed)
            else:
                first, step = part.begin + block * size * part.row_bytes, size * part.row_bytes
                found[:, number] = [
                    digest(data[at : at + step], seed) for at in range(first, first + blocks * step, step)
                ]
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
        """From which byte to which a part of some rows lies; nowhere if that follows from the rows' numbers."""
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
        """The objects of some rows, which are the next."""
        assert self._objects is not None
        at = self.objects_end
        self.objects_end += sum(int(np.maximum(sizes[begin:end], 0).sum()) for sizes in self._sizes)
        return self._objects(at, self.objects_end)


class _PartPlace(NamedTuple):
    """Where a part lies.

    Args:
        kind, column: See ``ColumnBuffer``.
        begin: Of its first byte.
        size: How many bytes a number takes.
        width: How many numbers a row has.
        may_differ: Whether that is so only of rows of one length.
    """

    kind: str
    column: int
    begin: int
    size: int
    width: int
    may_differ: bool

    @property
    def row_bytes(self) -> int:
        """How many bytes a row takes."""
        return self.size * self.width


def check_rows_of(path: str, layout: TailLayout, table: npt.NDArray[np.uint64], sums: Sums, commit: Commit) -> Sums:
    """Read the rows of a commit that are not in ``sums`` yet; the checksums with them.

    Raises:
        DataError: They are not what was written; the message names file, rows and column.
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


def chosen_commit(
    commits: Sequence[Commit], check: Callable[[Commit], Sums], *, whole: int
) -> tuple[Commit | None, Sums | None]:
    """The commit of most rows whose rows are those that were written, and their checksums.

    Args:
        commits: Those that are whole, of most rows first.
        check: Gives the checksums of a commit's rows, or raises DataError.
        whole: Up to how many rows nothing may be missing, whatever happened to the machine.

    Raises:
        DataError: Rows are damaged of which none may be missing.
    """
    for commit in commits:
        try:
            return commit, check(commit)
        except DataError:
            if commit.rows <= whole:
                raise
    return None, None


def whole_stretches(
    layout: TailLayout, table: npt.NDArray[np.uint64], sums: Sums, commits: Sequence[Commit]
) -> list[tuple[range, int]]:
    """Which rows are whole, of those of the commit of most rows, and where the objects of each stretch of them begin.

    Of 5000 rows in blocks of 1024 with a flipped bit in row 1500, rows 0..1023 and 2048..4999.

    Args:
        layout: Where they lie.
        table: The checksums of full blocks.
        sums: Of no rows.
        commits: Those that are whole, of most rows first.
    """
    found: list[tuple[range, int]] = []
    size, most = layout.block_rows, commits[0].rows if commits else 0
    for begin in range(0, most, size):
        block, objects = begin // size, sums.objects_end
        # Of the block in progress as many rows as one of the last commits has.
        ends = [Commit(0, begin + size, commits[0].since, table[block].tolist())] if begin + size <= most else []
        ends += [commit for commit in commits if begin < commit.rows < min(begin + size, most + 1)]
        for end in ends:
            later: list[npt.NDArray[np.uint64]] = []
            now = sums.copy()
            with suppress(DataError, OSError, ValueError):
                now.advance(end.rows, end.since, partial(_keep, later))
                if (later[0].tolist() if later else now.now) == end.sums:
                    found.append((range(begin, end.rows), objects))
                    break
        try:
            sums.skip(begin + size)
        except DataError:
            break
    return found


def _keep(kept: list[npt.NDArray[np.uint64]], _: int, sums: npt.NDArray[np.uint64]) -> None:
    kept.append(sums[0])
