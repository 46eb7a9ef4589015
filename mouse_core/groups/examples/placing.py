"""Where examples stand in rows, and how their values get there."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.groups.examples.declared import Arrays
from mouse_core.groups.types.example import RLExample

FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "advantage": np.float32,
    "generator_log_probs": np.float32,
}
"""What every example has, by name."""

# Bytes of what packed rows have for each token.
_BYTES = 22
# From here on NumPy has the system give large pages, and the copies themselves are what takes long.
_MANY_BYTES = 4 << 20


class Layout:
    """Where examples stand in rows. What stands side by side is copied as it is, and what is between is filled.

    Args:
        shape: Rows, and tokens of a row.
        row_of, begin_of: Where each example begins, ``[n]``.
        taken: How many of its tokens are there, ``[n]``.
        cut: Whether some have more.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        row_of: npt.NDArray[np.int64],
        begin_of: npt.NDArray[np.int64],
        taken: npt.NDArray[np.int64],
        cut: bool,
    ) -> None:
        self._shape = shape
        begins = row_of * shape[1] + begin_of
        order = np.argsort(2 * begins + (taken > 0))  # where one without tokens stands, another may begin
        ends = begins + taken
        self._order, self._taken = order, taken
        following = np.append(begins[order][1:], shape[0] * shape[1])
        gaps = following - ends[order]
        self._gaps, self._widest = gaps, int(gaps.max())
        behind = np.flatnonzero(gaps)
        self._filled: list[int] = gaps[behind].tolist()
        self._gap_begins: list[int] = ends[order][behind].tolist()
        # The examples in their order, and the gaps behind them, which are numbered on from there: [1, 2, 0, 3] are of
        # two examples the second, a gap, the first, and another gap.
        sequence = np.empty(len(order) + len(behind), np.int64)
        is_gap = np.zeros(len(sequence), np.bool_)
        is_gap[behind + 1 + np.arange(len(behind))] = True
        sequence[is_gap], sequence[~is_gap] = len(order) + np.arange(len(behind)), order
        self._pick = itemgetter(*sequence.tolist()) if len(sequence) > 1 else tuple
        self._nothing: dict[tuple[Any, ...], list[npt.NDArray[Any]]] = {}
        self._cut = cut

    def place(self, values: Sequence[npt.NDArray[Any]], fill: float) -> npt.NDArray[Any]:
        """The first values of each example where it stands, and a fill elsewhere.

        Args:
            values: Of each example, ``[tokens, *shape]``.
            fill: A value.
        """
        inner, dtype = values[0].shape[1:], values[0].dtype
        if self._cut:
            values = [one[:size] for one, size in zip(values, self._taken.tolist(), strict=True)]
        shape = (*self._shape, *inner)
        pieces = self._pick([*values, *self._nothing_of(inner, dtype, fill)])
        return side_by_side(pieces, math.prod(shape) * dtype.itemsize).reshape(shape)

    def _nothing_of(self, inner: tuple[int, ...], dtype: np.dtype[Any], fill: float) -> list[npt.NDArray[Any]]:
        """What stands in the gaps."""
        key = (inner, dtype, float(fill))
        found = self._nothing.get(key)
        if found is None:
            widest = np.full((self._widest, *inner), fill, dtype)
            self._nothing[key] = found = [widest[:gap] for gap in self._filled]
        return found

    def place_all(self, examples: Sequence[RLExample], pad_token: int) -> Arrays:
        """What every example has where it stands."""
        # Memory that the system has just given costs as much as the copy. What has been given back once in one piece
        # malloc keeps: so the next batch takes up that of this one.
        np.empty(math.prod(self._shape) * _BYTES, np.uint8)
        columns = zip(FIELDS, zip(*map(_fields_of, examples), strict=True), strict=True)
        return {name: self.place(values, pad_token if name == "tokens" else 0) for name, values in columns}

    def repeat(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """One number of each example for each of its tokens, and 0 elsewhere, int32."""
        counts = np.empty(2 * len(self._gaps), np.int64)
        counts[::2], counts[1::2] = self._taken[self._order], self._gaps
        each = np.zeros(len(counts), np.int32)
        each[::2] = numbers[self._order]
        return np.repeat(each, counts).reshape(self._shape)

    def positions(self, begin_of: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The place of each token in its example, and 0 elsewhere, int32."""
        begins = self.repeat(begin_of)
        positions = np.subtract(np.arange(self._shape[1], dtype=np.int32), begins, out=begins)
        flat = positions.reshape(-1)
        for end, gap in zip(self._gap_begins, self._filled, strict=True):
            flat[end : end + gap] = 0
        return positions


_fields_of = attrgetter(*FIELDS)


def side_by_side(arrays: Sequence[npt.NDArray[Any]], nbytes: int) -> npt.NDArray[Any]:
    """Arrays of one dtype one behind the other, as of ``np.concatenate``.

    To join them as bytes costs less than half of what NumPy does for each of many short arrays.

    Args:
        arrays: They.
        nbytes: Of all of them.
    """
    if 0 < nbytes < _MANY_BYTES:
        pieces: Any = arrays
        try:
            return np.frombuffer(bytearray().join(pieces), arrays[0].dtype).reshape(-1, *arrays[0].shape[1:])
        except TypeError:
            pass  # one does not lie in one piece
    return np.concatenate(arrays)


def best_fit(
    sizes: npt.NDArray[np.int64], length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each example its row, where it begins there, and its number in the row from 1, each ``[n]``."""
    order = np.argsort(-sizes, kind="stable")
    fresh = length << 32
    rooms = [fresh]  # what is left in each row, times 2**32, and the row's number, in order; the last one is new
    taken = []
    for needed in (sizes[order] << 32).tolist():
        room = rooms.pop(bisect_left(rooms, needed))
        if room == fresh:
            fresh += 1
            rooms.append(fresh)
        taken.append(room)
        insort(rooms, room - needed)
    held = np.array(taken, np.int64)
    row_of, begin_of = held & 0xFFFFFFFF, length - (held >> 32)
    by_row = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of)
    segment_of = np.empty_like(row_of)
    segment_of[by_row] = np.arange(1, len(order) + 1) - np.repeat(np.cumsum(counts) - counts, counts)
    placed = np.empty((3, len(order)), np.int64)
    placed[:, order] = row_of, begin_of, segment_of
    return placed[0], placed[1], placed[2]
