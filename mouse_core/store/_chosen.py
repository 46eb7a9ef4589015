"""Some of a segment's rows as a segment, which shares the other one's memory and what is known of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core._arrow.column import ColumnPart
from mouse_core._arrow.windows import Stretches, cut_at_stretches
from mouse_core._base.memo import memo
from mouse_core.store._segments import Segment, are_too_short


class ChosenSegment(Segment):
    """Stretches of another segment's rows, in an order of their own; nothing is copied.

    Args:
        whole: The other segment.
        firsts, sizes: Where each stretch begins in it, and how many rows it has, at least one: int64 ``[n]``.
    """

    def __init__(self, whole: Segment, firsts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        self.whole, self.firsts, self.sizes = whole, firsts, sizes
        self.begins = np.cumsum(sizes) - sizes
        self.num_rows = int(sizes.sum())
        self.origin = None
        self._first_values = {}
        self.__dict__["table"] = whole.table

    @memo
    def indices(self) -> pa.Table | None:
        """Row numbers into the table, int64; made for whoever needs them one by one."""
        return pa.table({"indices": self.row_numbers(np.arange(self.num_rows))})

    @property
    def is_picked(self) -> bool:
        """Always."""
        return True

    @memo
    def runs(self) -> Stretches | None:
        """Those stretches, cut where chunks end; None where they are so short that row numbers take less."""
        whole = self.whole.runs if self.whole.is_picked else Stretches(self.whole.chunk_starts)
        if whole is None or are_too_short(len(self.sizes), self.num_rows):
            return None
        stretch, row, size, _ = cut_at_stretches(whole, self.firsts, self.sizes)
        return Stretches(np.concatenate([[0], np.cumsum(size)]), *whole.located(stretch, row), whole.longest)

    def row_numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The table's rows behind the segment's ``rows`` (int64 ``[n]``)."""
        stretch = self.begins.searchsorted(rows, side="right") - 1
        return self.whole.row_numbers(self.firsts[stretch] + rows - self.begins[stretch])

    def part(self, name: str) -> ColumnPart:
        """One column, of which all is known that is known of the other segment's."""
        return self.whole.part(name)

    def has_value(self, name: str, rows: int) -> bool:
        """Whether some value among the first ``rows`` rows is not null."""
        return not rows or self.first_value(name, rows) is not None

    @memo
    def chunk_starts(self) -> npt.NDArray[np.int64]:
        """The first row of every chunk of the table, and the end."""
        return self.whole.chunk_starts

    @memo
    def image_roots(self) -> tuple[str, ...]:
        """Those of the other segment."""
        return self.whole.image_roots

    def _listed(self, row: int, count: int) -> list[int]:
        listed: list[int] = self.row_numbers(np.arange(row, row + count)).tolist()
        return listed

    def __reduce__(self) -> tuple[Any, ...]:
        return ChosenSegment, (self.whole, self.firsts, self.sizes)
