"""The lower bound of the time for a batch: a plain copy of the bytes of its stored values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.gathering import ranges_of
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Ranges of bytes that are copied one after another.

    Args:
        source: Memory addresses of the ranges, uint64 ``[n]``.
        size: Sizes of the ranges in bytes, int64 ``[n]``.
    """

    source: npt.NDArray[np.uint64]
    size: Int64s

    @property
    def nbytes(self) -> int:
        """The total number of bytes."""
        return int(self.size.sum())


def pieces_of(
    snapshot: Snapshot, fields: Iterable[str], starts: Int64s, length: int, lengths: Int64s | None = None
) -> Pieces:
    """Return the byte ranges of the stored values of windows in local memory, ordered by field and then by window.

    Args:
        snapshot: The rows.
        fields: Names of fields.
        starts: The first row of each window, ``[n]``.
        length: Number of steps of a window.
        lengths: Number of existing steps of each window, ``[n]``; by default, all steps exist.
    """
    steps = np.full(len(starts), length) if lengths is None else lengths
    # Row of each present step: [10, 11, 12, 50, 51] for starts [10, 50] and 3 and 2 steps.
    rows = np.repeat(starts - np.cumsum(steps) + steps, steps) + np.arange(steps.sum())
    part = snapshot.locate(rows, 1).part(0)
    found = [ranges for name in fields for ranges in ranges_of([snapshot.readers[name].column], part)]
    begins, ends = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    cut = np.flatnonzero(begins[1:] != ends[:-1]) + 1  # rows that lie side by side are one piece
    begins, ends = begins[np.r_[0, cut]], ends[np.r_[cut - 1, -1]]
    return Pieces(begins.astype(np.uint64), ends - begins)


def plain_copies(batches: Sequence[Pieces]) -> Callable[[int], None]:
    """Return a function that takes the index of a batch (modulo the number of batches) and copies its pieces.

    Arrow copies long pieces, by a conversion from views of bytes to bytes. Arrow's views of up to ``_SHORT`` bytes
    contain the bytes instead of an address, so NumPy copies short pieces.
    """
    prepared = [(_views(batch), _short_pieces(batch)) for batch in batches]

    def copy(number: int) -> None:
        views, short = prepared[number % len(prepared)]
        if views is not None:
            views.cast(pa.large_binary())
        for elements, starts in short:
            elements[starts]

    return copy


_SHORT = 12
_STRETCH = 1 << 30


def _views(batch: Pieces) -> pa.Array | None:
    long = batch.size > _SHORT
    if not long.any():
        return None
    stretch, offset = np.divmod(batch.source[long], np.uint64(_STRETCH))
    numbers, which = np.unique(stretch, return_inverse=True)
    views = np.zeros((int(long.sum()), 4), np.int32)
    views[:, 0], views[:, 2], views[:, 3] = batch.size[long], which, offset
    stretches = [pa.foreign_buffer(int(number) * _STRETCH, 2 * _STRETCH - 1) for number in numbers.tolist()]
    return pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views), *stretches])


def _short_pieces(batch: Pieces) -> list[tuple[npt.NDArray[np.void], Int64s]]:
    prepared = []
    for size in np.unique(batch.size[batch.size <= _SHORT]).tolist():
        source = batch.source[batch.size == size]
        lowest = source.min()
        step = int(np.gcd.reduce(source - lowest)) or size
        count = int(source.max() - lowest) // step + 1
        memory = (ctypes.c_uint8 * ((count - 1) * step + size)).from_address(int(lowest))
        elements = np.ndarray((count,), np.dtype((np.void, size)), memory, strides=(step,))
        prepared.append((elements, ((source - lowest) // np.uint64(step)).astype(np.int64)))
    return prepared
