"""Where windows of steps lie among the chunks of a table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core._memo import memo

Int64s = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Stretches of windows that each lie side by side in one chunk.

    Args:
        chunk, row: Where each begins, int64 ``[p]``.
        target: The step it begins at, counted over all windows: ``window * length + step``, int64 ``[p]``.
        size: Its steps, int64 ``[p]``.
    """

    chunk: Int64s
    row: Int64s
    target: Int64s
    size: Int64s


class Chunks:
    """Where the chunks of a table begin.

    Args:
        starts: The first row of every chunk, and the end, int64 ``[chunks + 1]``.
    """

    def __init__(self, starts: Int64s) -> None:
        self.starts = starts
        sizes = np.diff(starts)
        equal = len(sizes) > 0 and sizes[0] > 0 and (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]
        self._size = int(sizes[0]) if equal else 0

    def find(self, rows: Int64s) -> Int64s:
        """The chunk of each row."""
        if self._size:
            return rows // self._size  # eight times as fast as a search; files have chunks of one size
        # side="right" steps over empty chunks.
        return np.searchsorted(self.starts, rows, side="right") - 1


class Windows:
    """Windows of ``length`` steps, located together; usually those of several batches.

    Args:
        chunks: Where chunks begin.
        rows: The snapshot's rows at which the windows begin, int64 ``[n]``.
        length: Steps in a window.
        bounds: The first window of each batch, and the end; by default all are one batch.
        physical: The rows of the tables behind, where they are others: int64 ``[n, length]``.
    """

    def __init__(
        self,
        chunks: Chunks,
        rows: Int64s,
        length: int,
        bounds: Sequence[int] | None = None,
        physical: Int64s | None = None,
    ) -> None:
        self.rows = rows
        self.bounds = (0, len(rows)) if bounds is None else bounds
        self.length = length
        self.chunks = chunks
        self._physical = physical
        self._starts = rows if physical is None else physical[:, 0]
        self.chunk = chunks.find(self._starts)
        self.row = self._starts - chunks.starts[self.chunk]
        whole = self._starts + length <= chunks.starts[self.chunk + 1]
        if physical is not None:
            whole &= (physical[:, 1:] - physical[:, :-1] == 1).all(axis=1)
        self.is_whole = whole
        (self.broken,) = np.nonzero(~whole)
        # What columns know about these windows; see columns.Column.
        self.known: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, number: int) -> WindowsPart:
        """The windows of one of the batches."""
        return WindowsPart(self, number)

    @property
    def gathers_whole(self) -> bool:
        """Whether whole windows are gathered together, and only the others in pieces."""
        return 2 * len(self.broken) <= len(self)

    @memo
    def pieces(self) -> Pieces | None:
        """The windows that are not whole, or all if those are the most, cut where one stretch ends; None if stretches
        are so short that single steps are better.
        """
        windows = self.broken if self.gathers_whole else np.arange(len(self))
        if not len(windows) or not len(self):
            nothing = np.zeros(0, np.int64)
            return Pieces(nothing, nothing, nothing, nothing)
        if self._physical is not None:
            pieces = _join_steps(self.steps(windows), self.length)
        else:
            pieces = _cut_at_chunks(self.chunks, self._starts[windows], windows, self.length)
        # Copying a piece costs about as much as gathering 32 single steps of a few numbers.
        return pieces if len(pieces.size) * 32 <= len(windows) * self.length else None

    @memo
    def all_pieces(self) -> Pieces | None:
        """Those of all windows in the order of their targets, whole windows as one; None as in ``pieces``."""
        if self.pieces is None or not self.gathers_whole or not len(self):
            return self.pieces
        if self._physical is None:
            return _cut_at_chunks(self.chunks, self._starts, np.arange(len(self)), self.length)
        (whole,) = np.nonzero(self.is_whole)
        size = np.full(len(whole), self.length)
        parts = Pieces(self.chunk[whole], self.row[whole], whole * self.length, size)
        joined = Pieces(*(np.concatenate(both) for both in zip(parts, self.pieces, strict=True)))
        order = np.argsort(joined.target)
        return Pieces(*(values[order] for values in joined))

    @memo
    def piece_owners(self) -> list[int]:
        """The window that each piece belongs to, in ascending order."""
        return [] if self.pieces is None else (self.pieces.target // self.length).tolist()

    def steps(self, windows: Int64s) -> Pieces:
        """All steps of some windows as pieces of one."""
        within = np.arange(self.length)
        if self._physical is None:
            rows = self._starts[windows, None] + within
        else:
            rows = self._physical[windows]
        rows = rows.reshape(-1)
        chunk = self.chunks.find(rows)
        row = rows - self.chunks.starts[chunk]
        target = (windows[:, None] * self.length + within).reshape(-1)
        return Pieces(chunk, row, target, np.ones(len(chunk), np.int64))


class WindowsPart:
    """The windows of one batch of a block."""

    def __init__(self, block: Windows, number: int) -> None:
        self.block = block
        self.number = number
        self.begin, self.end = block.bounds[number], block.bounds[number + 1]

    def __len__(self) -> int:
        return self.end - self.begin

    def row_of(self, step: int) -> int:
        """The snapshot's row of a step, counted over the part's windows."""
        window, step = divmod(step, self.block.length)
        return int(self.block.rows[self.begin + window]) + step

    def pieces(self) -> slice:
        """Which of the block's pieces belong to windows in this part."""
        owners = self.block.piece_owners
        return slice(bisect_left(owners, self.begin), bisect_left(owners, self.end))

    @memo
    def whole(self) -> Int64s:
        """The windows that lie in one chunk, counted from the part's first."""
        return np.nonzero(self.block.is_whole[self.begin : self.end])[0]

    @memo
    def broken_steps(self) -> Pieces:
        """The steps of the other windows; targets are counted from the part's first window."""
        broken = np.nonzero(~self.block.is_whole[self.begin : self.end])[0] + self.begin
        steps = self.block.steps(broken)
        return steps._replace(target=steps.target - self.begin * self.block.length)


def _cut_at_chunks(chunks: Chunks, starts: Int64s, windows: Int64s, length: int) -> Pieces:
    """The pieces of windows of consecutive rows, one for every chunk they touch."""
    first, last = chunks.find(starts), chunks.find(starts + (length - 1))
    counts = last - first + 1
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(starts)), counts)
    chunk = np.arange(int(ends[-1])) + (first - ends + counts)[owner]
    begin = np.maximum(starts[owner], chunks.starts[chunk])
    size = np.minimum(starts[owner] + length, chunks.starts[chunk + 1]) - begin
    target = windows[owner] * length + begin - starts[owner]
    there = size > 0  # not so for empty chunks
    return Pieces(chunk[there], (begin - chunks.starts[chunk])[there], target[there], size[there])


def _join_steps(steps: Pieces, length: int) -> Pieces:
    """Single steps joined to pieces where they lie side by side in one window."""
    joined = (np.diff(steps.chunk) == 0) & (np.diff(steps.row) == 1) & (np.diff(steps.target) == 1)
    # A window of the next batch may begin where this one ends.
    joined &= steps.target[1:] % length != 0
    begins = np.concatenate([[0], np.nonzero(~joined)[0] + 1])
    sizes = np.diff(np.concatenate([begins, [len(steps.chunk)]]))
    return Pieces(steps.chunk[begins], steps.row[begins], steps.target[begins], sizes)
