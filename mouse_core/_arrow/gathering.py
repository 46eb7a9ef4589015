"""Gathering of windows of steps from a column with chunks of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.addresses import copy_bits, copy_runs, element_of_all, flat_view, ranges_in
from mouse_core._arrow.column import Column, ColumnPart
from mouse_core._arrow.dense import IRREGULAR, plain
from mouse_core._arrow.windows import Int64s, WindowsPart
from mouse_core._base.checks import values_of
from mouse_core.dtypes import RowError, convert

# Windows of at least this many rows are copied piece by piece.
_LONG = 1024


def gather(column: Column, windows: WindowsPart, out: npt.NDArray[Any]) -> None:
    """Write the values of windows to ``out``, for chunks of any layout. For regular chunks, ``ByteViews`` is faster.

    Args:
        column: The column to read.
        windows: The positions of the windows.
        out: The array to write, ``[n, S, width]`` of any dtype, C-contiguous.

    Raises:
        RowError: A value is not allowed or does not fit; the error's ``row`` is ``window * S + step``.
        DataError: The Arrow data is damaged.
    """
    every, whole, length = windows.every, windows.whole, windows.every.length
    steps, chosen = out.reshape(-1, column.width), whole + windows.begin
    pieces = pieces_lying(column, windows, steps.dtype) if length >= _LONG else None
    if pieces is not None:
        np.concatenate(pieces, out=steps)
        return
    _gather_rows(column, every.chunk[chosen], every.row[chosen], whole * length, length, steps)
    if len(whole) < len(windows):
        broken = windows.broken_steps
        _gather_rows(column, broken.chunk, broken.row, broken.target, 1, steps)


def pieces_lying(column: Column, windows: WindowsPart, dtype: np.dtype[Any]) -> list[npt.NDArray[Any]] | None:
    """Return views of the pieces of a batch's windows, ``[n, width]`` each; None if some rows are not contiguous.

    The views are read-only, and valid as long as the column's snapshot exists.
    """
    every = windows.every
    if not 0 < len(windows) == len(every) or every.physical is not None or dtype != column.reading.dtype:
        return None
    if column.backings:
        return None  # the memory of remote rows may be reused
    chunk, row, size = (part[0] for part in every.pieces)
    first, width = column.addresses(chunk)
    if column.kind.value_type == "bool" or first.min() < 0 or (width != column.width).any():
        return None
    begins = element_of_all(first, dtype.itemsize) + row * column.width
    flat, ends = flat_view(dtype), begins + size * column.width
    pieces = zip(begins.tolist(), ends.tolist(), strict=True)
    return [flat[begin:end].reshape(-1, column.width) for begin, end in pieces]


def ranges_of(columns: Sequence[Column], windows: WindowsPart) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield the byte ranges that gathering a batch reads, as begin and end addresses, int64 ``[n]``, in any order.

    Ranges that are known without reading are yielded first. The ranges of lists and bytes are yielded last, level by
    level, because these ranges depend on the bytes of earlier ranges.
    """
    chunk, row, size = (part[windows.number] for part in windows.every.pieces)
    begins, ends, later = [], [], []
    for column in columns:
        first, width = column.addresses(chunk)
        bits = 1 if column.kind.value_type == "bool" else 8
        step = width * (1 if bits == 1 else column.reading.dtype.itemsize)
        regular = (first >= 0) & (size > 0)
        begins.append((first + row * step)[regular] * bits // 8)
        ends.append(((first + (row + size) * step)[regular] * bits + 7) // 8)
        for number, at, count in zip(*(part[first == IRREGULAR].tolist() for part in (chunk, row, size)), strict=True):
            part, local = column.part_of(number)
            if count and part.backing is None:  # remote parts fetch their ranges separately
                later.append((part.chunk(local), at, count))
    for found in ranges_in(later) if later else [[]]:
        more = np.array(found, np.int64).reshape(-1, 2)
        yield np.concatenate([*begins, more[:, 0]]), np.concatenate([*ends, more[:, 1]])
        begins, ends = [], []


def _gather_rows(
    column: Column, chunk: Int64s, row: Int64s, target: Int64s, length: int, steps: npt.NDArray[Any]
) -> None:
    """Write each run of ``length`` rows to ``steps[target : target + length]``, for chunks of any layout."""
    if not len(chunk):
        return
    first, width = column.addresses(chunk)
    regular = first >= 0
    for found in _different(width[regular]):
        (same,) = np.nonzero(regular & (width == found))
        if found > column.width or (found < column.width and column.reading.pad is None):
            wanted = "at most " * (column.reading.pad is not None) + values_of(column.width)
            raise RowError(int(target[same[0]]), f"expected {wanted}, found {found}")
        values = _regular_when_there(column, first[same], row[same], length, found)
        try:
            values = convert(values.reshape(len(same) * length, found), steps.dtype).reshape(values.shape)
        except RowError as error:
            run, step = divmod(error.row, length)
            raise RowError(int(target[same[run]]) + step, str(error)) from error
        if found < column.width:
            padded = np.full((len(same), length, column.width), column.reading.pad, steps.dtype)
            padded[:, :, :found] = values
            values = padded
        # Targets of runs are multiples of their length.
        steps.reshape(-1, length, column.width)[target[same] // length] = values
    irregular = first == IRREGULAR
    if irregular.any():
        rest = chunk[irregular], row[irregular], target[irregular], length, steps
        if not (column.kind.kind == "image" and _share_rows(column, *rest)):
            _gather_slices(column, *rest)


def _regular_when_there(column: Column, begin: Int64s, row: Int64s, length: int, width: int) -> npt.NDArray[Any]:
    if not column.backings:
        return _regular(column, begin, row, length, width)
    from mouse_core.readahead import copied_when_there  # imported only if a part is remote

    if column.kind.value_type == "bool":
        firsts = begin + row * width
        begins, ends = firsts >> 3, (firsts + length * width + 7) >> 3
    else:
        begins = begin + row * width * column.reading.dtype.itemsize
        ends = begins + length * width * column.reading.dtype.itemsize
    return copied_when_there(column.backings, begins, ends, partial(_regular, column, begin, row, length, width))


def _regular(column: Column, begin: Int64s, row: Int64s, length: int, width: int) -> npt.NDArray[Any]:
    shape = (len(begin), length, width)
    if column.kind.value_type == "bool":
        return copy_bits((begin + row * width)[:, None] + np.arange(length * width)).reshape(shape)
    first = element_of_all(begin, column.reading.dtype.itemsize) + row * width
    return copy_runs(column.reading.dtype, first, length * width).reshape(shape)


def _gather_slices(
    column: Column, chunk: Int64s, row: Int64s, target: Int64s, length: int, steps: npt.NDArray[Any]
) -> None:
    # Rows that are adjacent in source and target form one slice, and slices of one type are converted together.
    joined = (np.diff(chunk) == 0) & (np.diff(row) == length) & (np.diff(target) == length)
    begins = [0, *(np.nonzero(~joined)[0] + 1).tolist(), len(chunk)]
    slices: dict[pa.DataType, list[pa.Array]] = {}
    targets: dict[pa.DataType, list[Int64s]] = {}
    images: list[tuple[pa.Array, int, Sequence[str]]] = []
    frames: dict[Any, list[tuple[pa.Array, int, Sequence[str]]]] = {}
    wanted: dict[ColumnPart, list[tuple[int, int, int]]] = {}
    places: dict[ColumnPart, list[int]] = {}
    for begin, end in pairwise(begins):
        part, number = column.part_of(int(chunk[begin]))
        wanted.setdefault(part, []).append((number, int(row[begin]), (end - begin) * length))
        places.setdefault(part, []).append(int(target[begin]))
    for part, some in wanted.items():
        for found, place in zip(part.slices(some), places[part], strict=True):
            values = plain(found)
            if column.kind.kind == "video":
                frames.setdefault(part.videos, []).append((values, place, part.image_roots))
                continue
            if column.kind.kind == "image":
                images.append((values, place, part.image_roots))
                continue
            slices.setdefault(values.type, []).append(values)
            targets.setdefault(values.type, []).append(np.arange(place, place + len(values)))
    for videos, runs in frames.items():
        reading = column.reading
        asked = {"fill": reading.fill, "pixel": reading.dtype, "crop": reading.crop, "decoder": reading.decoder}
        videos.fill(runs, column.shape, steps, **asked)
    if images:
        from mouse_core.images.pixels import fill_images  # repeating the import takes 0.5 us

        fill_images(images, column.shape, steps, fill=column.reading.fill, pixel=column.reading.dtype)  # type: ignore[arg-type]
    for data_type, arrays in slices.items():
        positions = np.concatenate(targets[data_type])
        try:
            steps[positions] = column.dense(pa.concat_arrays(arrays), steps.dtype)
        except RowError as error:
            raise RowError(int(positions[error.row]), str(error)) from error


def _share_rows(
    column: Column, chunk: Int64s, row: Int64s, target: Int64s, length: int, steps: npt.NDArray[Any]
) -> bool:
    """Decode each row once, even if several windows contain the row; return whether windows share rows.

    Example: runs of 3 rows that begin at the rows 5 and 6 contain the rows 5, 6, 7, 6, 7, 8. Only the rows 5, 6, 7, 8
    are read; the result is copied from the positions 0, 1, 2, 1, 2, 3 of these four rows.
    """
    within = np.arange(length)
    places = np.stack([np.repeat(chunk, length), (row[:, None] + within).reshape(-1)])
    distinct, which = np.unique(places, axis=1, return_inverse=True)
    if distinct.shape[1] == places.shape[1]:
        return False
    where, which = (target[:, None] + within).reshape(-1), which.reshape(-1)
    read = np.empty((distinct.shape[1], *steps.shape[1:]), steps.dtype)
    try:
        _gather_slices(column, distinct[0], distinct[1], np.arange(len(read)), 1, read)
    except RowError as error:
        raise RowError(int(where[which == error.row][0]), str(error)) from error
    steps[where] = read[which]
    return True


def _different(numbers: Int64s) -> list[int]:
    """Return the distinct numbers; this is fast in the usual case, in which all numbers are equal."""
    if len(numbers) and (numbers == numbers[0]).all():
        return [int(numbers[0])]
    different: list[int] = np.unique(numbers).tolist()
    return different
