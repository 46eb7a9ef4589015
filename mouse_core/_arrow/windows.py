"""The positions of windows of steps in the chunks of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._base.memo import memo

Int64s = npt.NDArray[np.int64]

# Approximate size of a window in bytes: start, stretch, chunk, row and pieces.
_WINDOW_BYTES = 64
# Number of stretches that are examined together.
_AT_ONCE = 1 << 16


class Pieces(NamedTuple):
    """Windows cut into pieces at the ends of stretches; each piece is contiguous in one chunk. The arrays have a row
    for each batch.

    Pieces are in the order of the windows' steps; batches with fewer pieces are padded with pieces of 0 steps.

    Args:
        chunk, row: The chunk, and the row in the chunk, at which each piece begins, int64 ``[batches, most]``.
        size: Number of steps of each piece, int64 ``[batches, most]``.
    """

    chunk: Int64s
    row: Int64s
    size: Int64s


class Steps(NamedTuple):
    """Single steps of windows.

    Args:
        chunk, row: The chunk, and the row in the chunk, of each step, int64 ``[n]``.
        target: The position of each step in all windows, ``window * length + step``, int64 ``[n]``.
    """

    chunk: Int64s
    row: Int64s
    target: Int64s


class Stretches:
    """Runs of rows, called stretches, each contiguous in one chunk; most stretches are complete chunks.

    Args:
        starts: The first row of every stretch, followed by the number of rows, int64 ``[stretches + 1]``.
        chunk, row: The chunk of each stretch, and the position in that chunk of the stretch's first row, int64
            ``[stretches]``; by default the stretches are the chunks.
        longest: Number of rows of the longest chunk; by default, of the longest stretch.
    """

    def __init__(
        self, starts: Int64s, chunk: Int64s | None = None, row: Int64s | None = None, longest: int | None = None
    ) -> None:
        self.starts = starts
        self.chunk, self.row = chunk, row
        # The chunks of a file have equal sizes, so a division finds the stretch: many times as fast as a search.
        found, shortest, most = [np.zeros(1, np.int64)] if len(self) else [], 1, 0
        # Processed in parts that fit into the cache, because there may be tens of millions of stretches.
        for begin in range(0, len(self), _AT_ONCE):
            sizes = np.diff(starts[begin : begin + _AT_ONCE + 2])  # and the next stretch, whose size may change
            found.append(np.flatnonzero(np.diff(sizes)) + begin + 1)
            own = sizes[:_AT_ONCE]
            shortest, most = min(shortest, int(own.min())), max(most, int(own.max()))
        self.longest = most if longest is None else longest
        first = np.concatenate(found) if found else np.zeros(0, np.int64)
        self._runs = None
        if len(self) and shortest > 0 and 4 * len(first) <= len(self) + 8:
            self._runs = (starts[first], first, starts[first + 1] - starts[first])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def find(self, rows: Int64s) -> Int64s:
        """Return the index of the stretch that contains each row."""
        if self._runs is None:
            # side="right" skips empty stretches.
            return np.searchsorted(self.starts, rows, side="right") - 1
        begin, stretch, size = self._runs
        found: Int64s
        if len(begin) == 1:
            found = rows // int(size[0])
            return found
        run = np.searchsorted(begin, rows, side="right") - 1
        found = (rows - begin[run]) // size[run]
        found += stretch[run]
        return found

    def located(self, stretch: Int64s, row: Int64s) -> tuple[Int64s, Int64s]:
        """Return, for each row, the chunk and the row in the chunk, given the stretch of each row."""
        if self.chunk is None or self.row is None:
            return stretch, row
        return self.chunk[stretch], self.row[stretch] + row


def distinct(numbers: Int64s, count: int) -> Int64s:
    """Return the distinct values of ``numbers`` in ascending order, like ``np.unique``; all numbers must be in
    ``0..count - 1``.
    """
    if 8 * len(numbers) < count:
        return np.unique(numbers)
    there = np.zeros(count, np.bool_)
    there[numbers] = True
    return np.nonzero(there)[0]


class Windows:
    """Windows of ``length`` steps that were located together; usually the windows of several batches.

    Args:
        stretches: The stretches of rows.
        rows: The snapshot's rows at which the windows begin, int64 ``[n]``.
        length: Number of steps of a window.
        bounds: The index of the first window of each batch, followed by the number of windows; by default, all windows
            are one batch.
        physical: The corresponding rows of the tables, if the tables' rows differ from the snapshot's rows: int64
            ``[n, length]``.
        lengths: Number of existing steps of each window, if windows can be shorter than ``length``: int64 ``[n]``.
    """

    def __init__(
        self,
        stretches: Stretches,
        rows: Int64s,
        length: int,
        bounds: Sequence[int] | None = None,
        physical: Int64s | None = None,
        lengths: Int64s | None = None,
    ) -> None:
        self.rows = rows
        self.bounds = (0, len(rows)) if bounds is None else bounds
        self.length = length
        self.stretches = stretches
        self.lengths = lengths
        self.physical = physical

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Return the approximate size in bytes."""
        return (_WINDOW_BYTES + (0 if self.lengths is None else self.length)) * len(self.rows)

    @property
    def planned(self) -> Windows:
        """The planned windows; for packed windows, the windows before packing."""
        return self

    def part(self, number: int) -> WindowsPart:
        """Return the windows of one batch."""
        return WindowsPart(self, number)

    @memo
    def starts(self) -> Int64s:
        """The first row of each window in the tables, int64 ``[n]``."""
        return self.rows if self.physical is None else self.physical[:, 0]

    @memo
    def stretch(self) -> Int64s:
        """The index of the stretch in which each window begins, int64 ``[n]``."""
        return self.stretches.find(self.starts)

    @memo
    def chunk(self) -> Int64s:
        """The index of the chunk in which each window begins, int64 ``[n]``."""
        return self.stretch if self.stretches.chunk is None else self.stretches.chunk[self.stretch]

    @memo
    def row(self) -> Int64s:
        """The row of that chunk at which each window begins, int64 ``[n]``."""
        row: Int64s = self.starts - self.stretches.starts[self.stretch]
        return row if self.stretches.row is None else row + self.stretches.row[self.stretch]

    @memo
    def is_whole(self) -> npt.NDArray[np.bool_]:
        """Whether each window is contiguous in one chunk, bool ``[n]``."""
        whole: npt.NDArray[np.bool_] = self.starts + self.length <= self.stretches.starts[self.stretch + 1]
        if self.physical is not None:
            whole &= (self.physical[:, 1:] - self.physical[:, :-1] == 1).all(axis=1)
        return whole

    @memo
    def pieces(self) -> Pieces:
        """Return the pieces of the windows, cut at the ends of stretches; at least one window is required."""
        if self.physical is not None and self.length > 1:
            return in_rows(*join_steps(self.steps(np.arange(len(self))), self.length), self.bounds)
        stretch, row, size = _cut(self)
        return Pieces(*self.stretches.located(stretch, row), size)

    @memo
    def there(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the steps that exist in each window, bool ``[n, length]``."""
        if self.lengths is None:
            return np.ones((len(self), self.length), np.bool_)
        there: npt.NDArray[np.bool_] = np.arange(self.length) < self.lengths[:, None]
        return there

    def forget(self) -> None:
        """Release the memory of cached results, which can be computed again."""
        for name in ("starts", "stretch", "chunk", "row", "is_whole", "pieces"):
            self.__dict__.pop(name, None)

    def steps(self, windows: Int64s) -> Steps:
        """Return the single steps of the windows."""
        within = np.arange(self.length)
        if self.physical is None:
            rows = self.starts[windows, None] + within
        else:
            rows = self.physical[windows]
        rows = rows.reshape(-1)
        stretch = self.stretches.find(rows)
        target = (windows[:, None] * self.length + within).reshape(-1)
        return Steps(*self.stretches.located(stretch, rows - self.stretches.starts[stretch]), target)


class WindowsPart:
    """The windows of one batch: a part of ``every``, whose windows were located together."""

    def __init__(self, every: Windows, number: int) -> None:
        self.every = every
        self.number = number
        self.begin, self.end = every.bounds[number], every.bounds[number + 1]

    def __len__(self) -> int:
        return self.end - self.begin

    def row_of(self, step: int) -> int:
        """Return the snapshot's row of a step; steps are counted over the part's windows."""
        window, step = divmod(step, self.every.length)
        return int(self.every.rows[self.begin + window]) + step

    @memo
    def whole(self) -> Int64s:
        """Return the indices of the windows that are contiguous in one chunk; the first window of the part is 0."""
        return np.nonzero(self.every.is_whole[self.begin : self.end])[0]

    @memo
    def broken_steps(self) -> Steps:
        """Return the steps of the windows that are not contiguous; targets are counted from the part's first window."""
        broken = np.nonzero(~self.every.is_whole[self.begin : self.end])[0] + self.begin
        steps = self.every.steps(broken)
        return steps._replace(target=steps.target - self.begin * self.every.length)


def _cut(windows: Windows) -> Pieces:
    """Return the pieces of windows of consecutive rows; ``chunk`` of the result holds the indices of stretches.

    Example: chunks have 10 rows, and windows of 4 rows begin at the rows 2, 8 and 13, in two batches with bounds 0, 2,
    3. From these rows on, 8, 2 and 7 rows remain in the chunk, so the second window is cut into pieces of 2 and 2 rows.
    The windows have 1, 2 and 1 pieces, so the batches have 3 and 1 pieces. In an array with a row of 3 positions for
    each batch, the first pieces of the windows have the positions 0, 1 and 3, the second piece of the second window has
    position 2, and the positions 4 and 5 are empty.
    """
    stretches, starts, length, sizes = windows.stretches, windows.starts, windows.length, np.diff(windows.bounds)
    stretch = windows.stretch
    row = starts - stretches.starts[stretch]
    room = stretches.starts[stretch + 1] - starts
    (broken,) = np.nonzero(room < length)
    if not len(broken) and (sizes == sizes[0]).all():
        shape = (len(sizes), -1)
        return Pieces(stretch.reshape(shape), row.reshape(shape), np.full((len(sizes), int(sizes[0])), length))
    # The rest of a cut window lies at the start of the next stretch, or in several stretches if the next stretch is too
    # short.
    rest = length - room[broken]
    after = stretches.find(starts[broken] + room[broken])
    too_short = stretches.starts[after + 1] - stretches.starts[after] < rest
    in_two, in_many = broken[~too_short], broken[too_short]
    # Stretch, row and size of each further piece, and the index in ``in_many`` of its window; usually all are empty.
    *further_pieces, which = [in_many[:0]] * 4
    if len(in_many):
        *further_pieces, which = cut_at_stretches(stretches, starts[in_many] + room[in_many], rest[too_short])
    more = np.bincount(which, minlength=len(in_many))  # number of further pieces of each cut window
    counts = np.ones(len(starts), np.int64)
    counts[in_two] = 2
    counts[in_many] += more
    position, most = _positions(counts, windows.bounds)
    # The further pieces of a window follow its first piece at distances 1, 2, ..
    others = position[in_many][which] + 1 + np.arange(len(which)) - (np.cumsum(more) - more)[which]
    second = position[in_two] + 1
    np.minimum(room, length, out=room)
    second_pieces = (after[~too_short], np.zeros(len(in_two), np.int64), rest[~too_short])
    filled = []
    for firsts, seconds, further in zip((stretch, row, room), second_pieces, further_pieces, strict=True):
        values = np.zeros(len(sizes) * most, np.int64)
        values[position] = firsts
        values[second] = seconds
        values[others] = further
        filled.append(values.reshape(len(sizes), most))
    return Pieces(*filled)


def _positions(counts: Int64s, bounds: Sequence[int]) -> tuple[Int64s, int]:
    """Return the position of each window's first piece, int64 ``[n]``, and the largest number of pieces of a batch.

    In the array of pieces, each batch has a row, whose length is this largest number of pieces. Example: the counts 1,
    2, 1 have the running sums 0, 1, 3, 4. With bounds 0, 2, 3, the batches begin at 0 and 3, so the largest batch has 3
    pieces, and the positions are 0, 1 and 3 + (3 * 1 - 3) = 3.
    """
    ends = np.concatenate([[0], np.cumsum(counts)])
    begins = ends[np.asarray(bounds)]
    most = int(np.diff(begins).max())
    shift = most * np.arange(len(bounds) - 1) - begins[:-1]
    return ends[:-1] + np.repeat(shift, np.diff(bounds)), most


def cut_at_stretches(stretches: Stretches, starts: Int64s, length: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Cut ``length`` consecutive rows from each of ``starts`` at the ends of stretches.

    Return, for each piece, the stretch, the row in the stretch, the size, and the index in ``starts``; all int64
    ``[n]``.

    Example: with stretches of 10 rows, 25 rows from row 8 on become the pieces (0, 8, 2), (1, 0, 10), (2, 0, 10) and
    (3, 0, 3).
    """
    first = stretches.find(starts)
    counts = stretches.find(starts + (length - 1)) - first + 1
    which = np.repeat(np.arange(len(starts)), counts)
    stretch = np.arange(len(which)) + (first - np.cumsum(counts) + counts)[which]
    begin = starts[which]
    end = np.minimum(begin + length[which], stretches.starts[stretch + 1])
    begin = np.maximum(begin, stretches.starts[stretch])
    there = end > begin  # empty stretches are an exception
    return stretch[there], (begin - stretches.starts[stretch])[there], (end - begin)[there], which[there]


def join_steps(steps: Steps, length: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Join single steps that are adjacent in one window to pieces."""
    joined = (np.diff(steps.chunk) == 0) & (np.diff(steps.row) == 1)
    # A window of the next batch may begin where this window ends.
    joined &= steps.target[1:] % length != 0
    begins = np.concatenate([[0], np.nonzero(~joined)[0] + 1])
    sizes = np.diff(np.concatenate([begins, [len(steps.chunk)]]))
    return steps.chunk[begins], steps.row[begins], sizes, steps.target[begins] // length


def in_rows(chunk: Int64s, row: Int64s, size: Int64s, window: Int64s, bounds: Sequence[int]) -> Pieces:
    """Arrange pieces in an array with a row for each batch, padded with pieces of 0 steps.

    Example: pieces belong to the windows 0, 1, 1, 2, and the bounds are 0, 2, 3. The batches begin with the pieces 0
    and 3, and have 3 pieces and 1 piece. The rows of the result are the pieces 0, 1, 2 and the pieces 3, 4, 5, where 4
    and 5 are padding.
    """
    first = np.searchsorted(window, np.asarray(bounds))
    counts = np.diff(first)
    most = int(counts.max())
    if (counts == most).all():
        return Pieces(chunk.reshape(-1, most), row.reshape(-1, most), size.reshape(-1, most))
    number = first[:-1, None] + np.arange(most)
    beyond = number >= first[1:, None]
    number[beyond] = 0
    filled = size[number]
    filled[beyond] = 0
    return Pieces(chunk[number], row[number], filled)
