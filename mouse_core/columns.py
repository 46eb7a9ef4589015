"""Reading windows of steps out of Arrow columns, in place.

A column is a row of chunks (record batches, one after another, over all segments of a store). Where a chunk's
values begin is looked up the first time a window touches it. From then on ``Copier`` copies what lies there side by
side; everything else is gathered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._convert import RowError, convert
from mouse_core._dense import dense_rows, plain
from mouse_core._image_rows import fill_images
from mouse_core._layout import ColumnType, locate_values
from mouse_core._locks import ProcessLock
from mouse_core._masked import MaskedChunks
from mouse_core._memo import memo
from mouse_core._memory import copy_bits, copy_runs, element_of, element_of_all
from mouse_core._windows import Int64s, WindowsPart
from mouse_core.errors import DataError

UNKNOWN = -1
IRREGULAR = -2
# So many chunks are looked up one by one.
_FEW = 8
# Chunks of more bytes are not looked through; those of fewer together.
_LOOKED_THROUGH = 1 << 18


class Layout:
    """Where the chunks of one column of one segment lie; filled in as chunks are touched, and shared by snapshots.

    Args:
        rows: The rows of each chunk, int64 ``[chunks]``.
    """

    def __init__(self, rows: Int64s) -> None:
        self.rows = rows
        self.begin = np.full(len(rows), UNKNOWN, np.int64)
        self.width = np.zeros(len(rows), np.int64)
        self.largest = np.full(len(rows), UNKNOWN, np.int64)
        self.lock = ProcessLock()

    def known(self) -> tuple[Int64s, Int64s]:
        """Where every chunk's values begin, and how many a row has, as far as that is known now."""
        with self.lock:
            return self.begin.copy(), self.width.copy()


class ColumnPart(Protocol):
    """One column of one segment, as ``Column`` needs it."""

    @property
    def layout(self) -> Layout:
        """The segment's layout of this column."""
        ...

    def chunk(self, number: int) -> pa.Array:
        """The values of one chunk."""
        ...

    def alike(self, chunks: Int64s) -> tuple[int, Int64s, npt.NDArray[np.bool_]] | None:
        """A chunk, how many bytes behind it the values of ``chunks`` lie, and for which of these that is so."""
        ...


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
        self._first_chunk = np.concatenate([[0], np.cumsum([len(begin) for begin, _ in known_parts])]).astype(np.int64)
        self._begin = np.concatenate([begin for begin, _ in known_parts])
        self._chunk_width = np.concatenate([width for _, width in known_parts])
        self._lock = ProcessLock()

    @property
    def is_plain(self) -> bool:
        """Whether its values may lie in memory as NumPy has them."""
        return self.kind.kind in ("scalar", "list") and self.kind.value_type != "bool"

    def gather(self, windows: WindowsPart, out: npt.NDArray[Any]) -> None:
        """Write the windows' values, whatever the chunks look like. Where they are regular, ``Copier`` is faster.

        Args:
            windows: Where they lie.
            out: Where to write, ``[n, S, width]`` of any dtype, C-contiguous.

        Raises:
            RowError: A value is not allowed or does not fit; its ``row`` is ``window * S + step``.
            DataError: The Arrow data is damaged.
        """
        block, whole, length = windows.block, windows.whole, windows.block.length
        steps, chosen = out.reshape(-1, self.width), whole + windows.begin
        self._gather_rows(block.chunk[chosen], block.row[chosen], whole * length, length, steps)
        if len(whole) < len(windows):
            broken = windows.broken_steps
            self._gather_rows(broken.chunk, broken.row, broken.target, 1, steps)

    def known_begins(self) -> Int64s:
        """``begins`` of all chunks, ``UNKNOWN`` for those that nobody has looked at."""
        with self._lock:
            other = (self._begin != UNKNOWN) & (self._chunk_width != self.width)
            return np.where(other, IRREGULAR, self._begin)

    def begins(self, chunks: Int64s) -> Int64s:
        """The address of the first value of each of some chunks; ``IRREGULAR`` where rows do not lie side by side."""
        begin, width = self._places(chunks)
        return np.where(width == self.width, begin, IRREGULAR)

    def largest(self, chunks: Int64s) -> Int64s:
        """The largest integer in each of some regular chunks, where negative ones count as the largest int64.

        So do all of a chunk that is too long to be looked through for the few rows of a batch.

        Args:
            chunks: Their numbers, ascending, int64 ``[n]``.
        """
        found = np.empty(len(chunks), np.int64)
        ends = np.searchsorted(chunks, self._first_chunk[1:]).tolist()
        for number, (begin, end) in enumerate(pairwise([0, *ends])):
            if begin < end:
                layout, local = self._parts[number].layout, chunks[begin:end] - self._first_chunk[number]
                with layout.lock:
                    unknown = local[layout.largest[local] == UNKNOWN]
                    for rows in np.unique(layout.rows[unknown]).tolist():
                        same = unknown[layout.rows[unknown] == rows]
                        layout.largest[same] = self._find_largest(layout.begin[same], rows * self.width)
                    found[begin:end] = layout.largest[local]
        return found

    def _find_largest(self, begin: Int64s, count: int) -> Int64s:
        """The largest of ``count`` integers from each of some addresses."""
        limit, item = np.iinfo(np.int64).max, self._stored.itemsize
        largest = np.full(len(begin), limit)
        together = _LOOKED_THROUGH // max(count * item, 1)
        first = element_of_all(begin, item)
        for place in range(0, len(begin), together) if together else ():
            codes = copy_runs(self._stored, first[place : place + together], count).view(f"u{item}")
            found = codes.max(axis=1, initial=0).astype(np.uint64)
            largest[place : place + together] = np.minimum(found, np.uint64(limit))
        return largest

    # ------------------------------------------------------------------ runs of rows
    def _gather_rows(self, chunk: Int64s, row: Int64s, target: Int64s, length: int, steps: npt.NDArray[Any]) -> None:
        """Write runs of ``length`` rows to ``steps[target : target + length]``, whatever their chunks look like."""
        if not len(chunk):
            return
        first, width = self._places(chunk)
        regular = first >= 0
        for found in _different(width[regular]):
            (same,) = np.nonzero(regular & (width == found))
            if found > self.width or (found < self.width and self._pad is None):
                wanted = f"at most {self.width}" if self._pad is not None else str(self.width)
                raise RowError(int(target[same[0]]), f"expected {wanted} values, found {found}")
            values = self._regular(first[same], row[same], length, found)
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
        irregular = first == IRREGULAR
        if irregular.any():
            self._gather_irregular(chunk[irregular], row[irregular], target[irregular], length, steps)

    def _regular(self, begin: Int64s, row: Int64s, length: int, width: int) -> npt.NDArray[Any]:
        shape = (len(begin), length, width)
        if self.kind.value_type == "bool":
            return copy_bits((begin + row * width)[:, None] + np.arange(length * width)).reshape(shape)
        first = element_of_all(begin, self._stored.itemsize) + row * width
        return copy_runs(self._stored, first, length * width).reshape(shape)

    def _gather_irregular(
        self, chunk: Int64s, row: Int64s, target: Int64s, length: int, steps: npt.NDArray[Any]
    ) -> None:
        if self.is_plain and len(self.shape) < 2:
            within = np.arange(length)
            rows = self._gather_masked(np.repeat(chunk, length), (row[:, None] + within).reshape(-1), steps.dtype)
            if rows is not None:
                steps[(target[:, None] + within).reshape(-1)] = rows
                return
        # Rows that follow each other in source and target are one slice, and slices of one type are converted together.
        joined = (np.diff(chunk) == 0) & (np.diff(row) == length) & (np.diff(target) == length)
        begins = [0, *(np.nonzero(~joined)[0] + 1).tolist(), len(chunk)]
        slices: dict[pa.DataType, list[pa.Array]] = {}
        targets: dict[pa.DataType, list[Int64s]] = {}
        images: list[tuple[pa.Array, int]] = []
        for begin, end in pairwise(begins):
            n = (end - begin) * length
            values = plain(self._chunk_values(int(chunk[begin])).slice(int(row[begin]), n))
            if self.kind.kind == "image":
                images.append((values, int(target[begin])))
                continue
            slices.setdefault(values.type, []).append(values)
            targets.setdefault(values.type, []).append(np.arange(int(target[begin]), int(target[begin]) + n))
        if images:
            fill_images(images, self.shape, steps, fill=self._fill)  # type: ignore[arg-type]
        for data_type, arrays in slices.items():
            places = np.concatenate(targets[data_type])
            try:
                steps[places] = dense_rows(
                    pa.concat_arrays(arrays), self.shape, steps.dtype, fill=self._fill, pad=self._pad
                )
            except RowError as error:
                raise RowError(int(places[error.row]), str(error)) from error

    def _gather_masked(self, chunk: Int64s, row: Int64s, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        for number in self._masked.unknown(chunk).tolist():
            try:
                self._masked.look_up(number, self._chunk_values(number))
            except pa.ArrowException as error:
                raise DataError(f"column {self.name!r}: {error}") from error
        return self._masked.gather(chunk, row, dtype)

    @memo
    def _masked(self) -> MaskedChunks:
        return MaskedChunks(len(self._begin), self._stored, self.width, fill=self._fill, pad=self._pad)

    # ------------------------------------------------------------------ where chunks lie

    def _places(self, chunk: Int64s) -> tuple[Int64s, Int64s]:
        """Where each chunk's values begin (an address; for booleans 8 times that and the bit's number), or
        ``IRREGULAR``, and the values in a row.
        """
        unknown = self._begin[chunk] == UNKNOWN
        new = np.unique(chunk[unknown]) if unknown.any() else chunk[:0]
        if len(new) > _FEW:
            ends = np.searchsorted(new, self._first_chunk[1:]).tolist()
            for number, (begin, end) in enumerate(pairwise([0, *ends])):
                if end - begin > _FEW:
                    self._look_up_alike(number, new[begin:end])
            new = new[self._begin[new] == UNKNOWN]
        for number in new.tolist():
            self._look_up(number)
        with self._lock:
            return self._begin[chunk], self._chunk_width[chunk]

    def _look_up_alike(self, part_number: int, numbers: Int64s) -> None:
        """Look up those of some chunks of one part that are laid out like one that is known."""
        part, first = self._parts[part_number], int(self._first_chunk[part_number])
        found = part.alike(numbers - first)
        if found is None:
            return
        template, distance, alike = found
        self._look_up(first + template)
        scale = 8 if self.kind.value_type == "bool" else 1
        with part.layout.lock:
            begin, width = int(part.layout.begin[template]), int(part.layout.width[template])
            alike = alike & (distance % self._stored.itemsize == 0)
            if begin < 0 or not alike.any():
                return
            numbers, begins = numbers[alike], begin + scale * distance[alike]
            part.layout.begin[numbers - first], part.layout.width[numbers - first] = begins, width
        with self._lock:
            self._begin[numbers], self._chunk_width[numbers] = begins, width

    def _look_up(self, number: int) -> None:
        part_number = int(np.searchsorted(self._first_chunk, number, side="right")) - 1
        layout = self._parts[part_number].layout
        local = number - int(self._first_chunk[part_number])
        with layout.lock:
            if layout.begin[local] == UNKNOWN:
                layout.width[local], layout.begin[local] = self._locate(self._chunk_values(number))
            begin, width = layout.begin[local], layout.width[local]
        with self._lock:
            self._chunk_width[number], self._begin[number] = width, begin

    def _locate(self, values: pa.Array) -> tuple[int, int]:
        """The values in a row of a chunk and where they begin, ``IRREGULAR`` if rows do not lie in order."""
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
        if self.kind.value_type != "bool" and element_of(address, self._stored.itemsize) is None:
            return 0, IRREGULAR
        return prod(shape), address

    def _chunk_values(self, number: int) -> pa.Array:
        part_number = int(np.searchsorted(self._first_chunk, number, side="right")) - 1
        return self._parts[part_number].chunk(number - int(self._first_chunk[part_number]))


def _different(numbers: Int64s) -> list[int]:
    """The numbers there are, most often one."""
    if len(numbers) and (numbers == numbers[0]).all():
        return [int(numbers[0])]
    different: list[int] = np.unique(numbers).tolist()
    return different
