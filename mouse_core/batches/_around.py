"""The rows around the anchors of a block: located for fields that are delivered at offsets, and put right once read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.batches._mask import as_items
from mouse_core.batches._pipeline import PlannedBlocks
from mouse_core.batches._planner import Block
from mouse_core.errors import DataError
from mouse_core.sampling.around import Anchors, Rows, rows_at, rows_of, times_of
from mouse_core.sampling.offsets import Offsets, Seconds


class AbsentAround:
    """The rows around the anchors of a block that are not there, and those to put right; stands for ``Absent``.

    Args:
        rows: What is read, and put right; counted from the first row of the block.
        bounds: The first row read of each batch, and the end.
    """

    def __init__(self, rows: Rows, bounds: npt.NDArray[np.int64]) -> None:
        self._rows, self._begins = rows, bounds.tolist()
        # Of both the first in each batch, and the end.
        self._moved: list[int] = np.searchsorted(rows.target, bounds).tolist()
        self._missing: list[int] = np.searchsorted(rows.missing, bounds).tolist()

    def there(self, number: int, count: int = 1) -> npt.NDArray[np.bool_]:
        """See ``Absent.there``: ``[runs, unit]``."""
        there = np.ones(self._begins[number + count] - self._begins[number], np.bool_)
        there[self._missing_of(number, count)] = False
        return there.reshape(-1, self._rows.unit)

    def fill(self, values: npt.NDArray[Any], number: int, fill: float | None, count: int = 1) -> None:
        """Put the rows of a field in some batches where they belong, and fill those that are missing.

        Args:
            values: What was read, ``[runs, unit, ...]``, C-contiguous.
            number: The first of these batches.
            fill: What values become for which there is no row; None: those of the row next to it.
            count: How many batches.
        """
        begin, end = self._moved[number], self._moved[number + count]
        missing = self._missing_of(number, count)
        if not values.size or (begin == end and not len(missing)):
            return
        rows = values.reshape(values.shape[0] * values.shape[1], -1)
        items = as_items(rows)
        if begin < end:
            first = self._begins[number]
            items[self._rows.target[begin:end] - first] = items.take(self._rows.source[begin:end] - first)
        if fill is not None:
            items[missing] = as_items(np.full((1, rows.shape[1]), fill, rows.dtype))[0]

    def _missing_of(self, number: int, count: int) -> npt.NDArray[np.int64]:
        """The rows of some batches that are missing, counted from their first."""
        missing = self._rows.missing[self._missing[number] : self._missing[number + count]]
        within: npt.NDArray[np.int64] = missing - self._begins[number]
        return within


@dataclass(eq=False, kw_only=True)
class BlockAround(Block):
    """The rows around the anchors of a block, as a block whose windows are the runs of rows that are read.

    Args:
        absent: What of these is not there.
        refused: What is wrong, by the number of the batch.
    """

    absent: AbsentAround  # type: ignore[assignment]
    refused: Mapping[int, str]

    def check(self, number: int) -> None:
        """Raise DataError if rows of batch ``number`` are not where time stamps must be."""
        if number in self.refused:
            raise DataError(self.refused[number])


class BlocksAround:
    """The rows around the anchors of a source's blocks; stands for ``Blocks``.

    Args:
        anchors: Where the anchors' blocks come from.
        offsets: Which rows.
        shift: How many rows after the anchor the one at offset 0 lies: 1 where a transition stands in the row that it
            leads to, else 0.
        number: Tells the blocks of several such from each other.
        single: Whether no rows are read but those that are asked for, each for itself, and not as runs.
    """

    def __init__(
        self, anchors: PlannedBlocks, offsets: Offsets, shift: int, number: int, *, single: bool = False
    ) -> None:
        self.anchors, self.offsets, self.shift, self.number, self.single = anchors, offsets, shift, number, single
        self.planner, self.begin_with, self.most = anchors.planner, 1, 0
        self._lock = ProcessLock()

    def on(self, anchors: PlannedBlocks) -> BlocksAround:
        """The same around other anchors."""
        return BlocksAround(anchors, self.offsets, self.shift, self.number, single=self.single)

    @property
    def singly(self) -> BlocksAround:
        """The same, with every row read for itself."""
        return BlocksAround(self.anchors, self.offsets, self.shift, ~self.number, single=True)

    def block_with(self, index: int) -> tuple[BlockAround, int]:
        """See ``Blocks.block_with``."""
        block, number = self.anchors.block_with(index)
        return self.around(block), number

    def behind(self, block: Block) -> BlockAround:
        """See ``Blocks.behind``."""
        return self.around(self.anchors.behind(block))

    def around(self, block: Block) -> BlockAround:
        """The rows around the anchors of a block."""
        known = block.around.get(self.number)
        if known is None:
            with self._lock:
                known = block.around.get(self.number)
                if known is None:
                    known = block.around[self.number] = self._make(block)
        assert isinstance(known, BlockAround)
        return known

    def _make(self, block: Block) -> BlockAround:
        snapshot, windows = self.planner.snapshot, block.windows
        anchors = block.anchors = Anchors.of(windows, snapshot) if block.anchors is None else block.anchors
        if isinstance(self.offsets, Seconds):
            rows = rows_at(anchors, self.offsets, self.shift, times_of(snapshot, self.offsets))
        else:
            rows = rows_of(anchors, self.offsets, self.shift, single=self.single)
        # Runs for an anchor, and for a window.
        runs = len(rows.start) // len(windows) if len(windows) else 1
        bounds = [first * runs for first in windows.bounds]
        ends = np.asarray(bounds) * rows.unit
        refused: dict[int, str] = {}
        for row, why in rows.refused:
            refused.setdefault(int(np.searchsorted(ends, row, side="right")) - 1, why)
        return BlockAround(
            first=block.first,
            end=block.end,
            step=block.step,
            kind=block.kind,
            windows=snapshot.locate(rows.start, rows.unit, bounds),
            sizes=block.sizes,
            planner=self.planner,
            absent=AbsentAround(rows, ends),
            refused=refused,
        )
