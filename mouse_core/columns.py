"""Reading windows of steps out of Arrow columns, in place.

A column is a row of chunks (record batches, one after another, over all segments of a store). Where a chunk's
values begin is looked up the first time a window touches it. Windows are located many at a time, for several
batches at once; from then on a batch costs one gather a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._convert import RowError, convert
from mouse_core._dense import dense_rows, plain
from mouse_core._layout import ColumnType, locate_values
from mouse_core._locks import ProcessLock
from mouse_core._memory import copy_bits, copy_runs, element_of, flat_view
from mouse_core._windows import Int64s, Pieces, Windows, WindowsPart
from mouse_core.errors import DataError

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
        self.lock = ProcessLock()

    def known(self) -> tuple[Int64s, Int64s]:
        """Element and width of every chunk, as they are now."""
        with self.lock:
            return self.element.copy(), self.width.copy()


class ColumnPart(Protocol):
    """One column of one segment, as ``Column`` needs it."""

    @property
    def layout(self) -> Layout:
        """The segment's layout of this column."""
        ...

    def chunk(self, number: int) -> pa.Array:
        """The values of one chunk."""
        ...


class _Runs(NamedTuple):
    """Where a column's values of a block of windows begin, as elements.

    Args:
        first: Of every window, int64 ``[n]``; windows that are not whole have the place of another. None where all
            windows are copied in pieces.
        piece_first, piece_target, piece_size: Of every piece of the others, in elements: from where, to where in the
            block's output, how many.
    """

    first: Int64s | None
    piece_first: list[int]
    piece_target: list[int]
    piece_size: list[int]


class Column:
    """A column over all segments of a snapshot, for gathering windows.

    Args:
        name: The column's name, for messages.
        kind: Its type.
        shape: The shape of one row, images as ``(H, W, C)``.
        parts: The column in every segment.
        fill, pad: See ``spec.Field``.
    """

    def __init__(
        self,
        name: str,
        kind: ColumnType,
        shape: tuple[int, ...],
        parts: Sequence[ColumnPart],
        *,
        fill: float | None,
        pad: float | None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.shape = shape
        self.width = int(np.prod(shape, dtype=np.int64))
        self._stored = kind.dtype
        self._fill, self._pad = fill, pad
        self._parts = parts
        known_parts = [part.layout.known() for part in parts]
        self._first_chunk = np.concatenate([[0], np.cumsum([len(element) for element, _ in known_parts])]).astype(
            np.int64
        )
        self._element = np.concatenate([element for element, _ in known_parts])
        self._chunk_width = np.concatenate([width for _, width in known_parts])
        # The same for chunks as wide as the column; others count as irregular here.
        known = self._element != UNKNOWN
        self._begin = np.where(known & (self._chunk_width != self.width), IRREGULAR, self._element)
        self._lock = ProcessLock()

    def gather(
        self, windows: WindowsPart, dtype: np.dtype[Any], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """The windows' values.

        Args:
            windows: Where they lie.
            dtype: Of the result.
            out: Where to write, ``[n, S, width]`` of ``dtype``, C-contiguous; by default a fresh array.

        Returns:
            ``[n, S, width]`` of ``dtype``.

        Raises:
            RowError: A value is not allowed or does not fit ``dtype``; its ``row`` is ``window * S + step``.
            DataError: The Arrow data is damaged.
        """
        n, length = len(windows), windows.block.length
        runs = self._runs(windows.block)
        if runs is None:
            out = np.empty((n, length, self.width), dtype) if out is None else out
            self._gather_pieces(windows, out.reshape(n * length, self.width))
            return out
        if out is None and self._stored == dtype:
            flat = self._copy(runs, windows, None)
        elif np.can_cast(self._stored, dtype, "safe"):
            out = np.empty((n, length, self.width), dtype) if out is None else out
            flat = self._copy(runs, windows, out.reshape(n, length * self.width))
        else:
            flat = convert(self._copy(runs, windows, None).reshape(n * length, self.width), dtype)
            if out is not None:
                out[...] = flat.reshape(out.shape)
        return flat.reshape(n, length, self.width) if out is None else out

    def elements(self, pieces: Pieces) -> Int64s | None:
        """The elements at which pieces begin; None if some lie in chunks that are irregular."""
        first = None if self.kind.value_type == "bool" else self._begins(pieces.chunk)
        return None if first is None else first + pieces.row * self.width

    # ------------------------------------------------------------------ regular chunks: one gather

    def _runs(self, block: Windows) -> _Runs | None:
        """Where the block's windows begin; None where some chunk is irregular, or all windows are broken."""
        try:
            known: _Runs | None = block.known[self]
        except KeyError:
            known = block.known[self] = self._find_runs(block)
        return known

    def _find_runs(self, block: Windows) -> _Runs | None:
        pieces = block.pieces
        if pieces is None or self.kind.value_type == "bool":
            return None
        piece_first = self._begins(pieces.chunk)
        first = self._begins(block.chunk) if block.gathers_whole else None
        if piece_first is None or (block.gathers_whole and first is None):
            return None
        if first is not None:
            first += block.row * self.width
            if len(block.broken):
                # One gather serves all: windows that are not whole get the values of one that is, then their own.
                first[block.broken] = first[int(block.is_whole.argmax())]
        return _Runs(
            first,
            (piece_first + pieces.row * self.width).tolist(),
            (pieces.target * self.width).tolist(),
            (pieces.size * self.width).tolist(),
        )

    def _copy(self, runs: _Runs, windows: WindowsPart, out: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        run = windows.block.length * self.width
        if runs.first is not None:
            copied = copy_runs(self._stored, runs.first[windows.begin : windows.end], run, out)
        else:
            copied = np.empty((len(windows), run), self._stored) if out is None else out
        numbers = windows.pieces()
        if numbers.start < numbers.stop:
            values, flat, begin = flat_view(self._stored), copied.reshape(-1), windows.begin * run
            sizes, targets = runs.piece_size[numbers], runs.piece_target[numbers]
            for first, size, target in zip(runs.piece_first[numbers], sizes, targets, strict=True):
                flat[target - begin : target - begin + size] = values[first : first + size]
        return copied

    # ------------------------------------------------------------------ any chunks: piece by piece

    def _gather_pieces(self, windows: WindowsPart, steps: npt.NDArray[Any]) -> None:
        block, whole = windows.block, windows.whole
        chosen = whole + windows.begin
        self._gather_rows(block.chunk[chosen], block.row[chosen], whole * block.length, block.length, steps)
        if len(whole) < len(windows):
            broken = windows.broken_steps
            self._gather_rows(broken.chunk, broken.row, broken.target, 1, steps)

    def _gather_rows(self, chunk: Int64s, row: Int64s, target: Int64s, length: int, steps: npt.NDArray[Any]) -> None:
        """Write runs of ``length`` rows to ``steps[target : target + length]``, whatever their chunks look like."""
        if not len(chunk):
            return
        element, width = self._places(chunk)
        for found in np.unique(width[element >= 0]).tolist():
            (same,) = np.nonzero((element >= 0) & (width == found))
            if found > self.width or (found < self.width and self._pad is None):
                wanted = f"at most {self.width}" if self._pad is not None else str(self.width)
                raise RowError(int(target[same[0]]), f"expected {wanted} values, found {found}")
            values = self._regular(element[same], row[same], length, found)
            try:
                values = convert(values.reshape(len(same) * length, found), steps.dtype).reshape(values.shape)
            except RowError as error:
                run, step = divmod(error.row, length)
                raise RowError(int(target[same[run]]) + step, str(error)) from error
            if found < self.width:
                padded = np.full((len(same), length, self.width), self._pad, steps.dtype)
                padded[:, :, :found] = values
                values = padded
            # Targets of runs are multiples of their length.
            steps.reshape(-1, length, self.width)[target[same] // length] = values
        irregular = element == IRREGULAR
        if irregular.any():
            self._gather_irregular(chunk[irregular], row[irregular], target[irregular], length, steps)

    def _regular(self, element: Int64s, row: Int64s, length: int, width: int) -> npt.NDArray[Any]:
        first = element + row * width
        shape = (len(first), length, width)
        if self.kind.value_type == "bool":
            return copy_bits(first[:, None] + np.arange(length * width)).reshape(shape)
        return copy_runs(self._stored, first, length * width).reshape(shape)

    def _gather_irregular(
        self, chunk: Int64s, row: Int64s, target: Int64s, length: int, steps: npt.NDArray[Any]
    ) -> None:
        # Rows that follow each other in source and target are one slice, and slices of one type are converted together.
        joined = (np.diff(chunk) == 0) & (np.diff(row) == length) & (np.diff(target) == length)
        begins = [0, *(np.nonzero(~joined)[0] + 1).tolist(), len(chunk)]
        slices: dict[pa.DataType, list[pa.Array]] = {}
        targets: dict[pa.DataType, list[Int64s]] = {}
        for begin, end in pairwise(begins):
            n = (end - begin) * length
            values = plain(self._chunk_values(int(chunk[begin])).slice(int(row[begin]), n))
            slices.setdefault(values.type, []).append(values)
            targets.setdefault(values.type, []).append(np.arange(int(target[begin]), int(target[begin]) + n))
        for data_type, arrays in slices.items():
            places = np.concatenate(targets[data_type])
            try:
                steps[places] = dense_rows(
                    pa.concat_arrays(arrays), self.kind, self.shape, steps.dtype, fill=self._fill, pad=self._pad
                )
            except RowError as error:
                raise RowError(int(places[error.row]), str(error)) from error

    # ------------------------------------------------------------------ where chunks lie

    def _places(self, chunk: Int64s) -> tuple[Int64s, Int64s]:
        """The element at which each chunk's values begin, or ``IRREGULAR``, and the values in a row."""
        self._look_up_new(chunk)
        with self._lock:
            return self._element[chunk], self._chunk_width[chunk]

    def _begins(self, chunk: Int64s) -> Int64s | None:
        """The same, or None if some chunk is irregular or not as wide as the column."""
        begin = self._begin[chunk]
        if len(begin) and begin.min() < 0:
            self._look_up_new(chunk)
            begin = self._begin[chunk]
            if begin.min() < 0:
                return None
        return begin

    def _look_up_new(self, chunk: Int64s) -> None:
        for number in np.unique(chunk[self._element[chunk] == UNKNOWN]).tolist():
            self._look_up(number)

    def _look_up(self, number: int) -> None:
        part_number = int(np.searchsorted(self._first_chunk, number, side="right")) - 1
        layout = self._parts[part_number].layout
        local = number - int(self._first_chunk[part_number])
        with layout.lock:
            if layout.element[local] == UNKNOWN:
                layout.width[local], layout.element[local] = self._locate(self._chunk_values(number))
            element, width = layout.element[local], layout.width[local]
        with self._lock:
            self._chunk_width[number], self._element[number] = width, element
            self._begin[number] = element if width == self.width else IRREGULAR

    def _locate(self, values: pa.Array) -> tuple[int, int]:
        """The values in a row of a chunk and the element they begin at, ``IRREGULAR`` if rows do not lie in order."""
        try:
            located = locate_values(values)
        except ValueError as error:
            raise DataError(f"column {self.name!r}: {error}") from error
        if located is None:
            return 0, IRREGULAR
        address, shape = located
        # Rows of nested lists must have the declared shape, not only as many values.
        if len(shape) > 1 and shape != self.shape and (*shape, 1) != self.shape:
            return 0, IRREGULAR
        width = int(np.prod(shape, dtype=np.int64))
        element = address if self.kind.value_type == "bool" else element_of(address, self._stored.itemsize)
        return (0, IRREGULAR) if element is None else (width, element)

    def _chunk_values(self, number: int) -> pa.Array:
        part_number = int(np.searchsorted(self._first_chunk, number, side="right")) - 1
        return self._parts[part_number].chunk(number - int(self._first_chunk[part_number]))
