"""Block sampling: windows are drawn from a pool of row blocks that changes gradually, so that reads are long and
sequential.

A window has only a few kilobytes, and disks and networks read long ranges several times as fast. Therefore complete
blocks are read into a pool, and batches take their windows from all blocks in the pool. The disadvantage is that
windows of one block are delivered in neighbouring batches. ``Pool.variance`` measures this correlation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.episodes import ragged
from mouse_core.randomness import Key, Order, Orders, Purpose
from mouse_core.sampling.plan import (
    SECTION,
    Blocks,
    ManyStarts,
    Stretches,
    cut_at_epochs,
    numbers_of_rows,
    read_only,
    remembered,
    slice_sections,
    whole_windows,
)
from mouse_core.store.snapshot import Snapshot

Int64s = npt.NDArray[np.int64]

# Default sizes in bytes of a block and of the pool. They affect the random stream.
_BLOCK_BYTES, _POOL_BYTES = 1 << 18, 1 << 28
# Number of rows whose encoded images are read to estimate their size.
_SAMPLED_ROWS = 8


@dataclass(frozen=True)
class Pool:
    """The pool of blocks from which windows are drawn. Windows do not overlap, and have the indices 0, 1, 2, ...

    Args:
        windows: Number of windows in an epoch, W.
        batch_size: Number of windows in a batch, B.
        lanes: Number of lanes for each window of a batch; each lane has one open block.
        block: Number of windows in a block.
        window_rows: Number of rows in a window.
        window_bytes: Estimated bytes of a window.
    """

    windows: int
    batch_size: int
    lanes: int
    block: int
    window_rows: int
    window_bytes: int

    @property
    def blocks(self) -> int:
        """Number of blocks that are open at the same time, K: a multiple of the batch size."""
        return self.lanes * self.batch_size

    @property
    def block_rows(self) -> int:
        """Number of rows in a block."""
        return self.block * self.window_rows

    @property
    def nbytes(self) -> int:
        """Estimated size of the open blocks in bytes; at most the size of all windows of an epoch."""
        return min(self.blocks * self.block, self.windows) * self.window_bytes

    def variance(self, batches: int = 64) -> float:
        """Return the variance of the mean over ``batches`` batches from the middle of an epoch, divided by the variance
        of the mean with uniform draws.

        The result holds for the worst case: all windows of a block are equal, and the blocks differ. If ``n_k`` of
        ``n`` windows belong to block k of J, the ratio is ``n * (A - (1 - A) / (J - 1))``, where ``A = sum(n_k ** 2) /
        n ** 2``. The numerator is the variance of a mean of values that are drawn without replacement. The denominator
        is the variance of a mean of ``n`` values that are drawn with replacement (Cochran, "Sampling techniques", 1977,
        2.8). With a result of 1, the mean varies as much as with uniform draws. With a result of 40, the mean varies as
        much as the mean of ``n / 40`` uniformly drawn windows. For all windows of an epoch, the result is 0. If
        neighbouring windows differ as much as distant windows, the actual ratio is 1 or less.

        Args:
            batches: Number of consecutive batches.
        """
        n = min(batches * self.batch_size, self.windows)
        begin = (self.windows - n) // 2
        blocks = -(-self.windows // self.block)
        if blocks == 1:
            return float(n)
        drawn = slice_sections(partial(_section, self, 0, 0, 0), begin, begin + n)
        share = float((np.bincount(drawn[0] // self.block).astype(np.float64) ** 2).sum()) / n**2
        return n * (share - (1 - share) / (blocks - 1))


@dataclass(frozen=True)
class BlockWindows(ManyStarts):
    """Samples windows from a gradually changing pool of shuffled row blocks; each epoch contains every window once.

    The windows of an epoch are consecutive, without overlap. The first row of the first window is drawn anew for each
    epoch: with windows of 64 steps, this row is one of the rows 0..63. Up to ``2 * S - 2`` rows at both ends are not in
    any window. Batches are always full; a batch continues where the previous batch ended, also across epochs, as in
    ``CyclicWindows``.

    Args:
        sequence_length: Number of steps in a window, S.
        batch_size: Number of windows in a batch, B; may exceed the number of windows in an epoch.
        blocks: The length of the blocks, and the number of blocks in the pool.
    """

    name: ClassVar = "blocks"

    sequence_length: int
    batch_size: int
    blocks: Blocks = field(default_factory=Blocks)

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """Return the smallest number of consecutive batches that together contain every window."""
        return -(-self._windows(snapshot) // self.batch_size)

    def starts_of_many(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Int64s:
        """See ``ManyStarts.starts_of_many``."""
        parts = self._parts(seed, first, count, snapshot, epoch_start, rows)
        starts = np.concatenate([begin + drawn[_WINDOW] * self.sequence_length for _, _, begin, drawn in parts])
        return starts.reshape(count, rows.stop - rows.start)

    def starts_to_read(
        self, seed: int, batches: range, snapshot: Snapshot, epoch_start: int, *, rows: slice, begun: int
    ) -> Stretches:
        """See ``ReadsBlocks.starts_to_read``."""
        size, pool, found = self.batch_size, self.pool(snapshot), []
        rows = slice(*rows.indices(size))
        for epoch, windows, begin, drawn in self._parts(
            seed, batches[0], batches[-1] - batches[0] + 1, snapshot, epoch_start, rows
        ):
            # the number of the epoch's first window, counted from batch 0
            behind = epoch_start * size + epoch * pool.windows
            batch = (windows + behind) // size
            # A reader that begins in the middle of a stretch has not read the stretch yet. A round has each lane once.
            since = windows // pool.blocks - (begun * size - behind) // pool.blocks
            opens = (drawn[_PLACE] == 0) | ((since >= 0) & (since <= 1))
            batch -= batches.start
            (chosen,) = np.nonzero(opens & (batch % batches.step == 0))
            sizes = drawn[_STRETCH_SIZE, chosen]
            stretch, within = ragged(sizes)
            starts = begin + (drawn[_STRETCH, chosen][stretch] + within) * self.sequence_length
            # Each round has one window of the stretch, up to the last window of the stretch or of the epoch.
            rounds = windows[chosen] // pool.blocks + sizes - drawn[_PLACE, chosen]
            until = -(-(np.minimum(rounds * pool.blocks, pool.windows) + behind) // size)
            found.append((starts, sizes, batch[chosen] // batches.step, until))
        starts, sizes, opening, until = (np.concatenate(some) for some in zip(*found, strict=True))
        firsts = np.searchsorted(opening, np.arange(len(batches) + 1))
        return Stretches(starts, np.append(0, np.cumsum(sizes)), firsts, until)

    def pool(self, snapshot: Snapshot) -> Pool:
        """Return the pool from which windows of the snapshot are drawn."""
        rows_of = getattr(snapshot, "rows_of", snapshot)
        return remembered(rows_of, (self, snapshot.num_rows), lambda: self._pool(snapshot, rows_of))

    def _pool(self, snapshot: Snapshot, rows_of: Snapshot) -> Pool:
        windows, size = self._windows(snapshot), self.batch_size
        length = getattr(snapshot, "window_rows", self.sequence_length)
        nbytes = max(1, int(length * row_bytes(rows_of)))
        lanes = max(1, round((self.blocks.pool or _POOL_BYTES // max(_BLOCK_BYTES, nbytes)) / size))
        rows, places = self.blocks.rows, lanes * size
        block = min(_BLOCK_BYTES, _POOL_BYTES // places) // nbytes if rows is None else rows // length
        return Pool(windows, size, lanes, max(1, min(block, windows // places)), length, nbytes)

    def _parts(
        self, seed: int, first: int, count: int, snapshot: Snapshot, epoch_start: int, rows: slice
    ) -> Iterator[tuple[int, Int64s, int, Int64s]]:
        """Yield the windows ``rows`` of ``count`` batches, split by epoch.

        Each item contains the index of the epoch, the positions of the windows in the order of that epoch, the first
        row of window 0, and the result of ``_known`` for these positions.
        """
        pool, length, size = self.pool(snapshot), self.sequence_length, self.batch_size
        places = min(length, snapshot.num_rows - pool.windows * length + 1)
        whole = rows == slice(0, size)
        begin, windows = (first - epoch_start) * size, count * size
        numbers = None if whole else numbers_of_rows(first - epoch_start, count, size, rows).reshape(-1)
        for epoch, number, end in cut_at_epochs(begin, windows, pool.windows):
            if numbers is None:
                some = np.arange(number, end)
                drawn = slice_sections(partial(_section, pool, seed, epoch_start, epoch), number, end)
            else:
                some = numbers - epoch * pool.windows
                some = some[(some >= number) & (some < end)]
                drawn = _known(pool, seed, epoch_start, epoch, some)
            yield epoch, some, int(_epoch(seed, epoch_start, epoch, pool).uniform[0] * places), drawn

    def _windows(self, snapshot: Snapshot) -> int:
        """Return the number of windows in an epoch: the largest number that is possible for every first row."""
        whole_windows(snapshot, self.sequence_length, at_least=1)
        return max(1, (snapshot.num_rows - self.sequence_length + 1) // self.sequence_length)


def row_bytes(snapshot: Snapshot) -> float:
    """Estimate the size of a row in bytes from the fields' shapes and the encoded images of a few rows.

    The estimate affects the choice of windows. Therefore the estimate depends only on the values, not on how the values
    are stored on disk.
    """
    types = snapshot.config.types
    readers = {reader.spec.column: reader for reader in snapshot.readers.values()}
    images = {name for name in readers if types[name].is_encoded}
    plain = readers.keys() - images
    known = float(sum(prod(readers[name].spec.shape) * types[name].dtype.itemsize for name in plain))
    if images:
        rows = np.unique(np.linspace(0, snapshot.num_rows - 1, _SAMPLED_ROWS).astype(np.int64)).tolist()
        values = [value for row in rows for column in snapshot.rows([row], images).values() for value in column]
        known += sum(map(_encoded_bytes, values)) / len(rows)
    return known


def _encoded_bytes(value: Any) -> int:
    """Return the size in bytes of an encoded image or of a list of images; 0 for an image in a separate file."""
    if isinstance(value, dict):
        value = value.get("bytes")
    if isinstance(value, list):
        return sum(map(_encoded_bytes, value))
    return len(value) if isinstance(value, bytes) else 0


# ---------------------------------------------------------------------- the arithmetic

# Rows of the result of ``_known``: the window; the first window of its stretch; the number of windows in the stretch;
# the number of earlier windows of the same stretch.
_WINDOW, _STRETCH, _STRETCH_SIZE, _PLACE = range(4)


class _Epoch(NamedTuple):
    """The random draws of an epoch.

    Attributes:
        uniform: Two random numbers, float64 ``[2]``: for the first row of the epoch, and for the first window in the
            epoch's line of windows.
        blocks: The random order of the complete blocks.
        lanes: The random orders, in each round, of the lanes of each window of a batch.
        windows: The random orders of the windows in each stretch.
    """

    uniform: npt.NDArray[np.float64]
    blocks: Order
    lanes: Orders
    windows: Orders


@lru_cache(maxsize=8)
def _epoch(seed: int, epoch_start: int, epoch: int, pool: Pool) -> _Epoch:
    key = Key(seed, Purpose.BLOCKS, epoch_start, call=4 * epoch)
    order = Order(key.with_call(4 * epoch + 1), max(1, pool.windows // pool.block))
    return _Epoch(key.uniform(2), order, Orders(key.with_call(4 * epoch + 2)), Orders(key.with_call(4 * epoch + 3)))


@lru_cache(maxsize=16)
def _section(pool: Pool, seed: int, epoch_start: int, epoch: int, section: int) -> Int64s:
    """Return ``_known`` for the positions of one section of an epoch."""
    numbers = np.arange(section * SECTION, min((section + 1) * SECTION, pool.windows))
    return read_only(_known(pool, seed, epoch_start, epoch, numbers))


def _known(pool: Pool, seed: int, epoch_start: int, epoch: int, number: Int64s) -> Int64s:
    """Return the windows at the positions ``number`` (int64 ``[n]``) of an epoch's order, and the stretch of each
    window.

    The result is int64 ``[4, n]``; see ``_WINDOW``.

    All blocks of the epoch, concatenated in their random order, form a line of W windows. The line is cut into K lanes,
    each of W // K or W // K + 1 windows. In a round, one window is taken from each of the K lanes; each batch gets B of
    these windows. Window k of a batch uses the ``pool.lanes`` lanes from index ``k * pool.lanes`` on, in a random order
    for each round. A stretch is the intersection of a lane and a block. A stretch is read completely, and its windows
    are used in a random order.

    Example: 10 windows in blocks of 4 (0..3, 4..7, and the rest, 8 and 9), batches of 2, one lane for each window of a
    batch. The line may be 4..7, 0..3, 8, 9. The first lane is 4, 5, 6, 7, 0, with stretches of 4 and 1 windows; the
    second lane is 1, 2, 3, 8, 9, with stretches of 3 and 2 windows. If the random orders of the stretches are 6, 4, 7,
    5; 0; 2, 3, 1; and 9, 8, the batches are (6, 2), (4, 3), (7, 1), (5, 9), (0, 8).

    If all lanes opened a block in the same round, many reads would occur at the same time. Therefore each lane begins
    at a different position and wraps around: a lane that begins at its third window ends with its first two windows.
    """
    drawn, block, size, lanes = _epoch(seed, epoch_start, epoch, pool), pool.block, pool.batch_size, pool.lanes
    rounds, rest = divmod(pool.windows, pool.blocks)
    round_, turn = np.divmod(number, pool.blocks)
    turn, row = np.divmod(turn, size)
    # In the last, incomplete round of an epoch, ``more`` lanes of each window of a batch have one additional window.
    more = rest // size + (row < rest % size)
    lane = drawn.lanes(round_ * size + row, np.where(round_ == rounds, more, lanes), turn)
    length = rounds + (lane < more)
    begin = row * (lanes * rounds + rest // size) + np.minimum(row, rest % size)
    begin += lane * rounds + np.minimum(lane, more)
    begin = (begin + int(drawn.uniform[1] * pool.windows)) % pool.windows
    # The round in which the lane reaches the end of a block, modulo the length of a block.
    turns = (lane * size + row) * block // pool.blocks
    shift = (-begin - turns) % block % length
    place = (round_ + shift) % length
    line = (begin + place) % pool.windows
    of_line = line // block
    before = line - of_line * block
    # The stretch begins where the block, the lane or its first part begins, and ends where one of them ends.
    first = np.maximum(place - before, np.where(place >= shift, shift, 0))
    end = np.minimum(
        place - before + np.minimum(block, pool.windows - of_line * block), np.where(place < shift, shift, length)
    )
    place -= first
    whole = pool.windows // block
    window = np.where(of_line < whole, drawn.blocks(np.minimum(of_line, whole - 1)), whole) * block + before - place
    of_stretch = drawn.windows(line - place, end - first, place)
    return np.stack([window + of_stretch, window, end - first, place])
