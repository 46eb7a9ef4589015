"""The rows around the anchors of a block: located for fields that are delivered at offsets, and put right once read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mouse_core._base.locks import ProcessLock
from mouse_core.batches._mask import as_items
from mouse_core.batches._pipeline import PlannedBlocks
from mouse_core.batches._planner import Block
from mouse_core.errors import DataError
from mouse_core.sampling.around import Anchors, Rows, rows_at, rows_of, times_of
from mouse_core.sampling.offsets import Offsets, Seconds

Int64s = npt.NDArray[np.int64]


@dataclass(eq=False, kw_only=True)
class BlockAround(Block):
    """The rows around the anchors of a block, as a block whose windows are the runs of rows that are read.

    Args:
        rows: What is put right, counted from the first row of each batch.
        moved, missing: The first of those in each batch, and the end.
        refused: What is wrong, by the number of the batch.
    """

    rows: Rows
    moved: Sequence[int]
    missing: Sequence[int]
    refused: Mapping[int, str]

    def put_right(self, values: npt.NDArray[np.generic], number: int, fill: float | None) -> None:
        """Put the rows of batch ``number`` where they belong, ``[runs, unit, ...]``, and fill those that are missing.

        Args:
            values: What was read, C-contiguous.
            number: Which of the block's batches it is.
            fill: What values become for which there is no row; None: those of the row next to it.
        """
        begin, end = self.moved[number : number + 2]
        missing = self.missing_of(number)
        if not values.size or (begin == end and (fill is None or not len(missing))):
            return
        rows = values.reshape(values.shape[0] * values.shape[1], -1)
        items = as_items(rows)
        items[self.rows.moved[begin:end]] = items.take(self.rows.source[begin:end])
        if fill is not None:
            items[missing] = as_items(np.full((1, rows.shape[1]), fill, rows.dtype))[0]

    def missing_of(self, number: int) -> Int64s:
        """The rows of batch ``number`` that are not there, counted from its first."""
        return self.rows.missing[self.missing[number] : self.missing[number + 1]]

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
    """

    def __init__(self, anchors: PlannedBlocks, offsets: Offsets, shift: int, number: int) -> None:
        self.anchors, self.offsets, self.shift, self.number = anchors, offsets, shift, number
        self.planner, self.begin_with = anchors.planner, 1
        self._lock = ProcessLock()

    def on(self, anchors: PlannedBlocks) -> BlocksAround:
        """The same around other anchors."""
        return BlocksAround(anchors, self.offsets, self.shift, self.number)

    def block_with(self, index: int) -> tuple[BlockAround, int]:
        """See ``Blocks.block_with``."""
        block, number = self.anchors.block_with(index)
        return self.around(block), number

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
            rows = rows_of(anchors, self.offsets, self.shift)
        # Runs for an anchor, and for a window.
        runs = len(rows.start) // max(1, len(windows)) if len(windows) else 1
        bounds = [first * runs for first in windows.bounds]
        ends = np.asarray(bounds) * rows.unit
        moved, missing = (np.searchsorted(found, ends) for found in (rows.moved, rows.missing))
        refused: dict[int, str] = {}
        for row, why in rows.refused:
            refused.setdefault(int(np.searchsorted(ends, row, side="right")) - 1, why)
        # From here on they are counted from the first row of each batch.
        batch = np.repeat(ends[:-1], np.diff(moved))
        kept = rows._replace(
            moved=rows.moved - batch,
            source=rows.source - batch,
            missing=rows.missing - np.repeat(ends[:-1], np.diff(missing)),
            refused=(),
        )
        return BlockAround(
            first=block.first,
            end=block.end,
            step=block.step,
            kind=block.kind,
            windows=snapshot.locate(rows.start, rows.unit, bounds),
            sizes=block.sizes,
            planner=self.planner,
            rows=kept,
            moved=moved.tolist(),
            missing=missing.tolist(),
            refused=refused,
        )
