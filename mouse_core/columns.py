"""Reading windows of steps out of Arrow columns, in place.

A column is a row of chunks (record batches, one after another, over all segments of a store). Where a chunk's
values begin is looked up the first time a window touches it; from then on a batch of windows costs one binary
search, shared by all columns, and one gather a column.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._dense import RowError, dense_rows
from mouse_core._layout import ColumnType, locate_values
from mouse_core._memory import copy_bits, copy_runs, element_of, flat_view

UNKNOWN = -1
IRREGULAR = -2


class Layout:
    """Where the chunks of one column of one segment lie; filled in as chunks are touched, and shared by snapshots.

    Args:
        chunks: Number of chunks.
    """

    def __init__(self, chunks: int) -> None:
        self.element = np.full(chunks, UNKNOWN, np.int64)
        self.width = np.zeros(chunks, np.int64)


class Windows:
    """Where windows of ``length`` consecutive steps lie: which chunk, and which row in it.

    Args:
        chunk_starts: The first row of every chunk, and the end, int64 ``[chunks + 1]``.
        starts: The first physical row of every window, int64 ``[n]``.
        length: Steps in a window.
        scattered: Physical rows of the windows, int64 ``[n, length]``, where some are not consecutive; or None.
    """

    def __init__(
        self,
        chunk_starts: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        length: int,
        scattered: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.count = len(starts)
        self.length = length
        self.chunk, self.row = _find(chunk_starts, starts)
        whole = starts + length <= chunk_starts[self.chunk + 1]
        if scattered is not None:
            whole &= (scattered[:, 1:] - scattered[:, :-1] == 1).all(axis=1)
        self.all_whole = bool(whole.all())
        if not self.all_whole:
            (self.whole,) = np.nonzero(whole)
            (self.broken,) = np.nonzero(~whole)
            if scattered is None:
                self.pieces = _cut_at_chunks(chunk_starts, starts[self.broken], self.broken, length)
            else:
                self.pieces = _join_steps(chunk_starts, scattered[self.broken], self.broken)

    @cached_property
    def are_long(self) -> bool:
        """Whether pieces are best copied one by one: a copy costs about as much as gathering 32 single steps."""
        return len(self.pieces.length) * 32 <= len(self.broken) * self.length

    @cached_property
    def steps(self) -> Pieces:
        """The pieces of broken windows, cut into single steps."""
        pieces = self.pieces
        total = int(pieces.length.sum())
        within = np.arange(total) - np.repeat(np.cumsum(pieces.length) - pieces.length, pieces.length)
        return Pieces(
            np.repeat(pieces.chunk, pieces.length),
            np.repeat(pieces.row, pieces.length) + within,
            np.repeat(pieces.target, pieces.length) + within,
            np.ones(total, np.int64),
        )


class Pieces(NamedTuple):
    """Stretches of broken windows that each lie side by side in one chunk.

    Args:
        chunk, row: Where each begins, int64 ``[p]``.
        target: The step it begins at, counted over all windows: ``window * length + step``, int64 ``[p]``.
        length: Its steps, int64 ``[p]``.
    """

    chunk: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


def _cut_at_chunks(
    chunk_starts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], windows: npt.NDArray[np.int64], length: int
) -> Pieces:
    """The pieces of windows of consecutive rows, one for every chunk they touch."""
    first = np.searchsorted(chunk_starts, starts, side="right") - 1
    last = np.searchsorted(chunk_starts, starts + (length - 1), side="right") - 1
    counts = last - first + 1
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(starts)), counts)
    chunk = np.arange(int(ends[-1])) + (first - ends + counts)[owner]
    begin = np.maximum(starts[owner], chunk_starts[chunk])
    size = np.minimum(starts[owner] + length, chunk_starts[chunk + 1]) - begin
    target = windows[owner] * length + begin - starts[owner]
    return Pieces(chunk, begin - chunk_starts[chunk], target, size)  # empty chunks give empty pieces


def _join_steps(
    chunk_starts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], windows: npt.NDArray[np.int64]
) -> Pieces:
    """The pieces of windows of any rows, ``[n, length]``."""
    length = rows.shape[1]
    chunk, row = _find(chunk_starts, rows.reshape(-1))
    target = (windows[:, None] * length + np.arange(length)).reshape(-1)
    joined = (np.diff(chunk) == 0) & (np.diff(row) == 1) & (np.diff(target) == 1)
    begins = np.concatenate([[0], np.nonzero(~joined)[0] + 1])
    sizes = np.diff(np.concatenate([begins, [len(chunk)]]))
    return Pieces(chunk[begins], row[begins], target[begins], sizes)


def _find(
    chunk_starts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    # side="right" steps over empty chunks.
    chunk = np.searchsorted(chunk_starts, rows, side="right") - 1
    return chunk, rows - chunk_starts[chunk]


class ColumnPart(Protocol):
    """One column of one segment, as ``Column`` needs it."""

    @property
    def layout(self) -> Layout:
        """The segment's layout of this column."""
        ...

    def chunk(self, number: int) -> pa.Array:
        """The values of one chunk."""
        ...


class Column:
    """A column over all segments of a snapshot, for gathering windows.

    Args:
        kind: The column's type.
        shape: The shape of one row, images as ``(H, W, C)``.
        parts: The column in every segment.
        dtype: What windows are gathered as: the stored dtype, or one it is converted to on the way.
        fill, pad: See ``spec.Field``.
    """

    def __init__(
        self,
        kind: ColumnType,
        shape: tuple[int, ...],
        parts: Sequence[ColumnPart],
        *,
        dtype: np.dtype[np.generic],
        fill: float | None,
        pad: float | None,
    ) -> None:
        self.kind = kind
        self.shape = shape
        self.width = int(np.prod(shape, dtype=np.int64))
        self.dtype = dtype
        self._stored = dtype if kind.kind == "null" else kind.dtype
        self._fill, self._pad = fill, pad
        self._parts = parts
        sizes = [len(part.layout.element) for part in parts]
        self._first_chunk = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._element = np.concatenate([part.layout.element for part in parts] or [np.zeros(0, np.int64)])
        self._chunk_width = np.concatenate([part.layout.width for part in parts] or [np.zeros(0, np.int64)])
        known = self._element != UNKNOWN
        self._uniform = bool((self._chunk_width[known] == self.width).all() and (self._element[known] >= 0).all())
        self._lock = threading.Lock()

    def gather(self, windows: Windows, out: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.generic]:
        """The windows' values.

        Args:
            windows: Where they lie.
            out: Where to write them, C-contiguous ``[n, S, width]``; by default a fresh array.

        Returns:
            ``[n, S, width]`` of ``dtype``.

        Raises:
            RowError: A value is not allowed; its ``row`` is ``window * S + step``.
            FloatingPointError: A value does not fit ``dtype`` (under ``np.errstate(over="raise", invalid="raise")``).
        """
        shape = (windows.count, windows.length, self.width)
        element = self._elements(windows.chunk)
        pieces = None if windows.all_whole else self._elements(windows.pieces.chunk)
        if self._uniform and self.kind.value_type != "bool" and (windows.all_whole or len(windows.whole)):
            run = windows.length * self.width
            first = element + windows.row * self.width
            if pieces is not None:
                # One gather for all: broken windows first get the values of a whole one, then their own.
                first[windows.broken] = first[windows.whole[0]]
            if out is not None or self._stored != self.dtype:
                out = np.empty(shape, self.dtype) if out is None else out
                copy_runs(self._stored, first, run, out.reshape(windows.count, run))
            else:
                out = copy_runs(self._stored, first, run).reshape(shape)
            if pieces is not None:
                self._copy_pieces(pieces, windows, out)
            return out
        out = np.empty(shape, self.dtype) if out is None else out
        steps = out.reshape(windows.count * windows.length, self.width)
        runs = np.arange(windows.count) if windows.all_whole else windows.whole
        self._gather_runs(windows.chunk[runs], windows.row[runs], runs * windows.length, windows.length, steps)
        if not windows.all_whole:
            self._gather_runs(windows.steps.chunk, windows.steps.row, windows.steps.target, 1, steps)
        return out

    def _copy_pieces(self, element: npt.NDArray[np.int64], windows: Windows, out: npt.NDArray[np.generic]) -> None:
        """Copy the pieces of broken windows, whose chunks begin at ``element``, to their places."""
        steps = out.reshape(windows.count * windows.length, self.width)
        pieces = windows.pieces
        if windows.are_long:
            flat = flat_view(self._stored)
            first = (element + pieces.row * self.width).tolist()
            for begin, target, size in zip(first, pieces.target.tolist(), pieces.length.tolist(), strict=True):
                values = flat[begin : begin + size * self.width]
                steps[target : target + size] = values.reshape(size, self.width)
        else:
            single = windows.steps
            first = self._elements(single.chunk) + single.row * self.width
            steps[single.target] = copy_runs(self._stored, first, self.width)

    def _gather_runs(
        self,
        chunk: npt.NDArray[np.int64],
        row: npt.NDArray[np.int64],
        target: npt.NDArray[np.int64],
        length: int,
        steps: npt.NDArray[np.generic],
    ) -> None:
        """Write runs of ``length`` rows to ``steps[target : target + length]``, whatever their chunks look like."""
        if not len(chunk):
            return
        element = self._elements(chunk)
        width = self._chunk_width[chunk]
        for found in np.unique(width[element >= 0]).tolist():
            (same,) = np.nonzero((element >= 0) & (width == found))
            if found > self.width or (found < self.width and self._pad is None):
                wanted = f"at most {self.width}" if self._pad is not None else str(self.width)
                raise RowError(int(target[same[0]]), f"expected {wanted} values, found {found}")
            values = self._regular(element[same], row[same], length, found)
            if found < self.width:
                padded = np.full((len(same), length, self.width), self._pad, steps.dtype)
                padded[:, :, :found] = values
                values = padded
            # Targets of runs are multiples of their length.
            steps.reshape(-1, length, self.width)[target[same] // length] = values
        irregular = element == IRREGULAR
        if irregular.any():
            self._gather_irregular(chunk[irregular], row[irregular], target[irregular], length, steps)

    def _regular(
        self, element: npt.NDArray[np.int64], row: npt.NDArray[np.int64], length: int, width: int
    ) -> npt.NDArray[np.generic]:
        first = element + row * width
        shape = (len(first), length, width)
        if self.kind.value_type == "bool":
            return copy_bits(first[:, None] + np.arange(length * width)).reshape(shape)
        return copy_runs(self._stored, first, length * width).reshape(shape)

    def _gather_irregular(
        self,
        chunk: npt.NDArray[np.int64],
        row: npt.NDArray[np.int64],
        target: npt.NDArray[np.int64],
        length: int,
        steps: npt.NDArray[np.generic],
    ) -> None:
        # Rows that follow each other in source and target are converted together.
        joined = (np.diff(chunk) == 0) & (np.diff(row) == length) & (np.diff(target) == length)
        begins = np.concatenate([[0], np.nonzero(~joined)[0] + 1, [len(chunk)]]).tolist()
        for begin, end in itertools.pairwise(begins):
            n = (end - begin) * length
            first = int(target[begin])
            values = self._chunk_values(int(chunk[begin])).slice(int(row[begin]), n)
            try:
                steps[first : first + n] = dense_rows(
                    values, self.kind, self.shape, self.dtype, fill=self._fill, pad=self._pad
                )
            except RowError as error:
                raise RowError(first + max(error.row, 0), str(error)) from error

    def _elements(self, chunk: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The element at which each chunk's values begin, or ``IRREGULAR``; looks up those not seen before."""
        element = self._element[chunk]
        if len(element) and element.min() < 0 and (element == UNKNOWN).any():
            for number in np.unique(chunk[element == UNKNOWN]).tolist():
                self._look_up(number)
            element = self._element[chunk]
        return element

    def _look_up(self, number: int) -> None:
        part_number = int(np.searchsorted(self._first_chunk, number, side="right")) - 1
        layout = self._parts[part_number].layout
        local = number - int(self._first_chunk[part_number])
        with self._lock:
            if layout.element[local] == UNKNOWN:
                element, width = self._locate(self._chunk_values(number))
                layout.width[local] = width
                layout.element[local] = element
            self._chunk_width[number] = layout.width[local]
            if layout.element[local] < 0 or layout.width[local] != self.width:
                self._uniform = False
            # Last: whoever sees the element finds the rest in place.
            self._element[number] = layout.element[local]

    def _locate(self, values: pa.Array) -> tuple[int, int]:
        located = locate_values(values)
        if located is None:
            return IRREGULAR, 0
        address, shape = located
        # Rows of nested lists must have the declared shape, not only as many values.
        if len(shape) > 1 and shape != self.shape and (*shape, 1) != self.shape:
            return IRREGULAR, 0
        width = int(np.prod(shape, dtype=np.int64))
        element = address if self.kind.value_type == "bool" else element_of(address, self._stored.itemsize)
        return (IRREGULAR, 0) if element is None else (element, width)

    def _chunk_values(self, number: int) -> pa.Array:
        part_number = int(np.searchsorted(self._first_chunk, number, side="right")) - 1
        return self._parts[part_number].chunk(number - int(self._first_chunk[part_number]))
