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


@dataclass(eq=False, kw_only=True)
class BlockAround(Block):
    """The rows around the anchors of a block, as a block whose windows are the runs of rows that are read.

    Args:
        rows: What is read, and put right; counted from the first row of the block.
        moved: The first of the runs that are put right in each batch, and the end.
        refused: What is wrong, by the number of the batch.
    """

    rows: Rows
    moved: Sequence[int]
    refused: Mapping[int, str]

    def put_right(self, values: npt.NDArray[np.generic], number: int, fill: float | None) -> None:
        """Put the rows of batch ``number`` where they belong, ``[runs, unit, ...]``, and fill those that are missing.

        Args:
            values: What was read, C-contiguous.
            number: Which of the block's batches it is.
            fill: What values become for which there is no row; None: those of the row next to it.
        """
        begin, end = self.moved[number : number + 2]
        if not values.size or (begin == end and fill is None):
            return
        first = self.windows.bounds[number]
        rows = values.reshape(values.shape[0] * values.shape[1], -1)
        items = as_items(rows)
        if begin < end:
            # Whole runs are written as one item each.
            right = items.take(self.rows.source[begin:end] - first * self.rows.unit)
            runs = as_items(values.reshape(values.shape[0], -1))
            runs[self.rows.moved[begin:end] - first] = right.view(runs.dtype)[:, 0]
        if fill is not None:
            items[~self.there(number)] = as_items(np.full((1, rows.shape[1]), fill, rows.dtype))[0]

    def there(self, number: int) -> npt.NDArray[np.bool_]:
        """Which rows of batch ``number`` are there, ``[runs * unit]``; to be copied, as it is everybody's."""
        first, end = self.windows.bounds[number : number + 2]
        return self.rows.there[first * self.rows.unit : end * self.rows.unit]

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
        self.planner, self.begin_with = anchors.planner, 1
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
            rows=rows._replace(refused=()),
            moved=np.searchsorted(rows.moved, bounds).tolist(),
            refused=refused,
        )
