"""Reading windows of steps out of Arrow columns, in place.

A column is a row of chunks (record batches, one after another, over all segments of a store). Where a chunk's
values begin is looked up the first time a window touches it. From then on ``ByteViews`` copies what lies there side by
side, or in a dense copy of the chunk; everything else is gathered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import copy_bits, copy_runs, element_of_all
from mouse_core._arrow.chunks import ChunkPlaces, ColumnChunks
from mouse_core._arrow.dense import dense_rows, plain
from mouse_core._arrow.dense_copies import IRREGULAR, UNKNOWN, DenseCopies
from mouse_core._arrow.windows import Int64s, WindowsPart
from mouse_core._base.checks import values_of
from mouse_core.dtypes import RowError, convert

# Chunks of more bytes are not looked through for the few rows of a window; others together, up to so many bytes.
_MOST_BYTES, _LOOKED_THROUGH = 1 << 14, 1 << 18


class Column(ColumnChunks):
    """A column over all segments of a snapshot, for gathering windows."""

    def begins(self, chunks: Int64s, rows: int = 0) -> Int64s:
        """The address of the first value of each of some chunks, or of their dense copies.

        ``IRREGULAR`` where rows do not lie side by side, ``UNKNOWN`` where a copy can be had by asking again.

        Args:
            chunks: Their numbers, ascending, int64 ``[n]``.
            rows: How many rows may be made dense.
        """
        found, budget = super().begins(chunks), self.reading.dense_budget
        (irregular,) = np.nonzero(found == IRREGULAR)
        if budget is not None and len(irregular):
            for number, begin, end in self._by_part(chunks[irregular]):
                local = chunks[irregular[begin:end]] - self._first_chunk[number]
                allowed = -(-rows * (end - begin) // len(irregular))
                part, copies = self._parts[number], self._copies(number)
                found[irregular[begin:end]] = copies.begins(local, allowed, budget, part.chunk, self._dense)
        return found

    def _dense(self, values: pa.Array) -> npt.NDArray[Any]:
        return dense_rows(values, self.shape, self._stored, fill=self.reading.fill, pad=self.reading.pad)

    def _copies(self, part_number: int) -> DenseCopies:
        return self._parts[part_number].places.copies(self.reading.copies_key, self.width * self._stored.itemsize)

    def largest(self, chunks: Int64s) -> Int64s:
        """The largest integer in each of some regular chunks, where negative ones count as the largest int64.

        So do all of a chunk that is too long to be looked through for the few rows of a batch.

        Args:
            chunks: Their numbers, ascending, int64 ``[n]``.
        """
        found = np.empty(len(chunks), np.int64)
        for number, begin, end in self._by_part(chunks):
            found[begin:end] = self._largest_in_part(number, chunks[begin:end] - self._first_chunk[number])
        return found

    def _largest_in_part(self, part_number: int, chunks: Int64s) -> Int64s:
        places = self._parts[part_number].places
        if not places.has_copies(self.reading.copies_key):
            return self._largest_in_chunks(places, chunks)
        copies = self._copies(part_number)
        copied = copies.begin[chunks] >= 0
        found = np.empty(len(chunks), np.int64)
        found[copied] = self._largest_in_chunks(copies, chunks[copied])
        found[~copied] = self._largest_in_chunks(places, chunks[~copied])
        return found

    def _largest_in_chunks(self, table: ChunkPlaces | DenseCopies, chunks: Int64s) -> Int64s:
        with table.lock:
            unknown = chunks[table.largest[chunks] == UNKNOWN]
            for rows in np.unique(table.rows[unknown]).tolist():
                same = unknown[table.rows[unknown] == rows]
                table.largest[same] = self._largest_in_runs(table.begin[same], rows * self.width)
            return table.largest[chunks]

    def _largest_in_runs(self, begin: Int64s, count: int) -> Int64s:
        """The largest of ``count`` integers from each of some addresses."""
        limit, item = np.iinfo(np.int64).max, self._stored.itemsize
        largest = np.full(len(begin), limit)
        together = _LOOKED_THROUGH // max(count * item, 1) if count * item <= _MOST_BYTES else 0
        first = element_of_all(begin, item)
        for number in range(0, len(begin), together) if together else ():
            codes = copy_runs(self._stored, first[number : number + together], count).view(f"u{item}")
            found = codes.max(axis=1, initial=0).astype(np.uint64)
            largest[number : number + together] = np.minimum(found, np.uint64(limit))
        return largest

    def gather(self, windows: WindowsPart, out: npt.NDArray[Any]) -> None:
        """Write the windows' values, whatever the chunks look like. Where they are regular, ``ByteViews`` is faster.

        Args:
            windows: Where they lie.
            out: Where to write, ``[n, S, width]`` of any dtype, C-contiguous.

        Raises:
            RowError: A value is not allowed or does not fit; its ``row`` is ``window * S + step``.
            DataError: The Arrow data is damaged.
        """
        every, whole, length = windows.every, windows.whole, windows.every.length
        steps, chosen = out.reshape(-1, self.width), whole + windows.begin
        self._gather_rows(every.chunk[chosen], every.row[chosen], whole * length, length, steps)
        if len(whole) < len(windows):
            broken = windows.broken_steps
            self._gather_rows(broken.chunk, broken.row, broken.target, 1, steps)

    # ------------------------------------------------------------------ runs of rows
    def _gather_rows(self, chunk: Int64s, row: Int64s, target: Int64s, length: int, steps: npt.NDArray[Any]) -> None:
        """Write runs of ``length`` rows to ``steps[target : target + length]``, whatever their chunks look like."""
        if not len(chunk):
            return
        first, width = self._addresses(chunk)
        regular = first >= 0
        for found in _different(width[regular]):
            (same,) = np.nonzero(regular & (width == found))
            if found > self.width or (found < self.width and self.reading.pad is None):
                wanted = "at most " * (self.reading.pad is not None) + values_of(self.width)
                raise RowError(int(target[same[0]]), f"expected {wanted}, found {found}")
            values = self._regular(first[same], row[same], length, found)
            try:
                values = convert(values.reshape(len(same) * length, found), steps.dtype).reshape(values.shape)
            except RowError as error:
                run, step = divmod(error.row, length)
                raise RowError(int(target[same[run]]) + step, str(error)) from error
            if found < self.width:
                padded = np.full((len(same), length, self.width), self.reading.pad, steps.dtype)
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
        # Rows that follow each other in source and target are one slice, and slices of one type are converted together.
        joined = (np.diff(chunk) == 0) & (np.diff(row) == length) & (np.diff(target) == length)
        begins = [0, *(np.nonzero(~joined)[0] + 1).tolist(), len(chunk)]
        slices: dict[pa.DataType, list[pa.Array]] = {}
        targets: dict[pa.DataType, list[Int64s]] = {}
        images: list[tuple[pa.Array, int, Sequence[str]]] = []
        for begin, end in pairwise(begins):
            n = (end - begin) * length
            values = plain(self._chunk_values(int(chunk[begin])).slice(int(row[begin]), n))
            if self.kind.kind == "image":
                images.append((values, int(target[begin]), self._image_roots(int(chunk[begin]))))
                continue
            slices.setdefault(values.type, []).append(values)
            targets.setdefault(values.type, []).append(np.arange(int(target[begin]), int(target[begin]) + n))
        if images:
            from mouse_core.images.rows import fill_images  # 0.5 us; the first image alone takes a hundred times that

            fill_images(images, self.shape, steps, fill=self.reading.fill, pixel=self._stored)  # type: ignore[arg-type]
        for data_type, arrays in slices.items():
            positions = np.concatenate(targets[data_type])
            try:
                steps[positions] = dense_rows(
                    pa.concat_arrays(arrays), self.shape, steps.dtype, fill=self.reading.fill, pad=self.reading.pad
                )
            except RowError as error:
                raise RowError(int(positions[error.row]), str(error)) from error


def _different(numbers: Int64s) -> list[int]:
    """The numbers there are, most often one."""
    if len(numbers) and (numbers == numbers[0]).all():
        return [int(numbers[0])]
    different: list[int] = np.unique(numbers).tolist()
    return different
