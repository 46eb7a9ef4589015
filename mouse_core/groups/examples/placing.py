"""Where examples stand in rows, and how their values get there."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
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
        self._order, self._taken = order.tolist(), taken.tolist()
        following = np.append(begins[order][1:], shape[0] * shape[1])
        gaps = following - ends[order]
        behind = np.flatnonzero(gaps)
        self._gaps, self._widest = gaps, int(gaps.max())
        self._filled = list(zip((behind + 1).tolist(), gaps[behind].tolist(), strict=True))
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
            values = [one[:size] for one, size in zip(values, self._taken, strict=True)]
        nothing = np.full((self._widest, *inner), fill, dtype)
        ordered = [values[place] for place in self._order]
        pieces: list[npt.NDArray[Any]] = []
        done = 0
        for end, gap in self._filled:
            pieces += ordered[done:end]
            pieces.append(nothing[:gap])
            done = end
        np.concatenate(pieces + ordered[done:], out=out.reshape(-1, *inner))
        return out

    def place_all(self, examples: Sequence[RLExample], pad_token: int, **others: type[np.generic]) -> Arrays:
        """What every example has where it stands, and room for other arrays of these dtypes.

        All lie in one stretch of memory: the next batch takes that up again, which costs a third of fresh pages.
        """
        fields = tuple((name, self._shape, np.dtype(dtype)) for name, dtype in (FIELDS | others).items())
        layout = known_layout(fields)
        arrays = layout.arrays(np.empty(layout.nbytes, np.uint8))
        for name in FIELDS:
            fill = pad_token if name == "tokens" else 0
            self.place([getattr(example, name) for example in examples], fill, arrays[name])
        return arrays

    def repeat(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """One number of each example for each of its tokens, and 0 elsewhere."""
        counts = np.empty(2 * len(self._gaps), np.int64)
        counts[::2], counts[1::2] = np.asarray(self._taken)[self._order], self._gaps
        each = np.zeros(len(counts), numbers.dtype)
        each[::2] = numbers[self._order]
        return np.repeat(each, counts).reshape(self._shape)


def best_fit(sizes: Sequence[int], length: int) -> tuple[list[int], list[int], list[int]]:
    """For each example its row, where it begins there, and its number in the row from 1."""
    row_of, begin_of, segment_of = [0] * len(sizes), [0] * len(sizes), [0] * len(sizes)
    rooms: list[int] = []  # what is left in each row, times 2**32, and the row's number, in order
    held: list[int] = []
    for place in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        needed = sizes[place] << 32
        found = bisect_left(rooms, needed)
        own = rooms.pop(found) if found < len(rooms) else length << 32 | len(held)
        room, row = own >> 32, own & 0xFFFFFFFF
        if row == len(held):
            held.append(0)
        held[row] += 1
        row_of[place], begin_of[place], segment_of[place] = row, length - room, held[row]
        insort(rooms, own - needed)
    return row_of, begin_of, segment_of
