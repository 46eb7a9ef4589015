"""Where examples stand in rows, and how their values get there."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.memory import known_layout
from mouse_core.groups.examples.declared import Arrays
from mouse_core.groups.types.example import RLExample

FIELDS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "advantage": np.float32,
    "generator_log_probs": np.float32,
}
"""What every example has, by name."""


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
        order = np.lexsort((taken > 0, begins))  # where one without tokens stands, another may begin
        ends = begins + taken
        self._order, self._taken = order, taken
        following = np.append(begins[order][1:], shape[0] * shape[1])
        gaps = following - ends[order]
        self._gaps, self._widest = gaps, int(gaps.max())
        behind = np.flatnonzero(gaps)
        self._filled: list[int] = gaps[behind].tolist()
        # The examples in their order, and the gaps behind them, which are numbered on from there: [1, 3, 0, 4] are of
        # three examples the second, a gap, the first, and another gap.
        sequence = np.insert(order, behind + 1, len(order) + np.arange(len(behind)))
        self._pick = itemgetter(*sequence.tolist()) if len(sequence) > 1 else tuple
        self._nothing: dict[tuple[Any, ...], list[npt.NDArray[Any]]] = {}
        self._cut = cut

    def place(
        self, values: Sequence[npt.NDArray[Any]], fill: float, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """The first values of each example where it stands, and a fill elsewhere.

        Args:
            values: Of each example, ``[tokens, *shape]``.
            fill: A value.
            out: Where to; None: into a new array.
        """
        inner, dtype = values[0].shape[1:], values[0].dtype
        if out is None:
            out = np.empty((*self._shape, *inner), dtype)
        if self._cut:
            values = [one[:size] for one, size in zip(values, self._taken.tolist(), strict=True)]
        pieces = self._pick([*values, *self._nothing_of(inner, dtype, fill)])
        np.concatenate(pieces, out=out.reshape(-1, *inner))
        return out

    def _nothing_of(self, inner: tuple[int, ...], dtype: np.dtype[Any], fill: float) -> list[npt.NDArray[Any]]:
        """What stands in the gaps."""
        key = (inner, dtype, float(fill))
        found = self._nothing.get(key)
        if found is None:
            widest = np.full((self._widest, *inner), fill, dtype)
            self._nothing[key] = found = [widest[:gap] for gap in self._filled]
        return found

    def place_all(self, examples: Sequence[RLExample], pad_token: int, **others: type[np.generic]) -> Arrays:
        """What every example has where it stands, and room for other arrays of these dtypes.

        All lie in one stretch of memory: the next batch takes that up again, which costs a third of fresh pages.
        """
        fields = tuple((name, self._shape, np.dtype(dtype)) for name, dtype in (FIELDS | others).items())
        layout = known_layout(fields)
        arrays = layout.arrays(np.empty(layout.nbytes, np.uint8))
        for name, values in zip(FIELDS, zip(*map(_fields_of, examples), strict=True), strict=True):
            self.place(values, pad_token if name == "tokens" else 0, arrays[name])
        return arrays

    def repeat(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """One number of each example for each of its tokens, and 0 elsewhere."""
        counts = np.empty(2 * len(self._gaps), np.int64)
        counts[::2], counts[1::2] = self._taken[self._order], self._gaps
        each = np.zeros(len(counts), numbers.dtype)
        each[::2] = numbers[self._order]
        return np.repeat(each, counts).reshape(self._shape)


_fields_of = attrgetter(*FIELDS)


def best_fit(sizes: Sequence[int], length: int) -> tuple[list[int], list[int], list[int]]:
    """For each example its row, where it begins there, and its number in the row from 1."""
    rooms: list[int] = []  # what is left in each row, times 2**32, and the row's number, in order
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    held, rows, whole = [], 0, length << 32
    for needed in [sizes[place] << 32 for place in order]:
        found = bisect_left(rooms, needed)
        if found < len(rooms):
            own = rooms.pop(found)
        else:
            own, rows = whole | rows, rows + 1
        held.append(own)
        insort(rooms, own - needed)
    return _in_rows(np.array(order, np.int64), np.array(held, np.int64), length)


def _in_rows(
    order: npt.NDArray[np.int64], held: npt.NDArray[np.int64], length: int
) -> tuple[list[int], list[int], list[int]]:
    """What ``best_fit`` returns, of examples in the order in which they were placed, and the rooms that they took."""
    row_of, begin_of = held & 0xFFFFFFFF, length - (held >> 32)
    by_row = np.argsort(row_of, kind="stable")
    first = np.searchsorted(row_of[by_row], np.arange(row_of.max(initial=-1) + 1))
    segment_of = np.empty_like(row_of)
    segment_of[by_row] = np.arange(len(order)) - first[row_of[by_row]] + 1
    found = np.empty((3, len(order)), np.int64)
    found[:, order] = row_of, begin_of, segment_of
    rows, begins, segments = found.tolist()
    return rows, begins, segments
