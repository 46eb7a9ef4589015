"""Windows in an order that reads long stretches: blocks of rows in random order, windows from a rotating pool of them.

A single window is a few kilobytes, and disks and networks read long stretches several times as fast. So several blocks,
the pool, are read as a whole, and batches take their windows from all blocks of the pool. The cost is that windows of
the same block come in neighbouring batches; ``Pool.variance`` measures it.
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

# Bytes of a block and of the whole pool by default. Part of the random stream.
_BLOCK_BYTES, _POOL_BYTES = 1 << 18, 1 << 28
# The numbers of batches for which the text of a pool reports the variance of their mean.
_SAID = (1, 8, 64, 512)
# Rows whose encoded images are read to estimate their bytes.
_SAMPLED_ROWS = 8


@dataclass(frozen=True)
class Pool:
    """The blocks from which windows are drawn, side by side, by their numbers.

    Args:
        windows: Windows of an epoch, W.
        batch_size: Windows of a batch, B.
        lanes: Blocks that are open at a time for each window of a batch.
        block: Windows of a block.
        window_rows: Rows of a window.
        window_bytes: Bytes of a window, estimated.
    """

    windows: int
    batch_size: int
    lanes: int
    block: int
    window_rows: int
    window_bytes: int

    @property
    def blocks(self) -> int:
        """Blocks that are open at a time, K: a multiple of the batch size."""
        return self.lanes * self.batch_size

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.block * self.window_rows

    @property
    def nbytes(self) -> int:
        """Estimated bytes of the open blocks; at most the bytes of all windows."""
        return min(self.blocks * self.block, self.windows) * self.window_bytes

    def variance(self, batches: int = 64, *, first: int | None = None, seed: int = 0) -> float:
        """Return the variance of the mean of ``batches`` batches, divided by that of uniform draws.

        It is the worst case: all windows of a block are alike, and blocks differ. With ``n_k`` of ``n`` windows from
        block k of J it is ``n * (A - (1 - A) / (J - 1))``, where ``A = sum(n_k ** 2) / n ** 2``: the variance of a mean
        of values that are drawn without repetition, over that of ``n`` that are drawn with it (Cochran, "Sampling
        techniques", 1977, 2.8). 1 is as good as uniform, 40 as bad as a fortieth of the windows; where all windows of
        an epoch come it is 0. Of data whose neighbouring windows are as different as others it is 1 or less anyway.

        Args:
            batches: The number of consecutive batches.
            first: The first batch; None: the batches are in the middle of the epoch.
            seed: The seed of the draws.
        """
        n = min(batches * self.batch_size, self.windows)
        middle = (self.windows - n) // 2
        begin = middle if first is None else min(first * self.batch_size, self.windows - n)
        blocks = -(-self.windows // self.block)
        if blocks == 1:
            return float(n)
        drawn = slice_sections(partial(_section, self, seed, 0, 0), begin, begin + n)
        share = float((np.bincount(drawn[0] // self.block).astype(np.float64) ** 2).sum()) / n**2
        return n * (share - (1 - share) / (blocks - 1))

    def __str__(self) -> str:
        units = (("MB", 1e6), ("KB", 1e3), ("bytes", 1))
        unit, size = next(one for one in units if self.nbytes >= 10 * one[1] or one[1] == 1)
        costs = ", ".join(f"{self.variance(batches):.1f} times ({batches})" for batches in _SAID)
        return (
            f"pool of {self.blocks:,} blocks of {self.block_rows:,} rows, {self.nbytes / size:,.0f} {unit}; where all "
            f"windows of a block are alike, the mean of so many batches varies as much as that of uniform draws {costs}"
        )


@dataclass(frozen=True)
class BlockWindows(ManyStarts):
    """Windows drawn from a rotating pool of shuffled blocks of rows; every window of an epoch comes once.

    An epoch has the windows that lie side by side from a row on that is drawn for it: with windows of 64 steps one of
    the first 64. Up to ``2 * S - 2`` rows at the two ends are in none of them. Batches are always full and go on where
    the last one stopped, as those of ``CyclicWindows``.

    Args:
        sequence_length: Steps in a window, S.
        batch_size: Windows in a batch, B; may exceed the number of windows.
        blocks: The length of blocks, and their number in the pool.
    """

    name: ClassVar = "blocks"

    sequence_length: int
    batch_size: int
    blocks: Blocks = field(default_factory=Blocks)

    def batches_per_epoch(self, snapshot: Snapshot) -> int:
        """The fewest batches in which every window occurs."""
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
            behind = epoch_start * size + epoch * pool.windows  # window 0 of the epoch, of all from batch 0 on
            batch = (windows + behind) // size
            # Who begins in the midst of a stretch has not read it: every lane comes once in a round.
            since = windows // pool.blocks - (begun * size - behind) // pool.blocks
            opens = (drawn[_PLACE] == 0) | ((since >= 0) & (since <= 1))
            batch -= batches.start
            (chosen,) = np.nonzero(opens & (batch % batches.step == 0))
            sizes = drawn[_STRETCH_SIZE, chosen]
            stretch, within = ragged(sizes)
            starts = begin + (drawn[_STRETCH, chosen][stretch] + within) * self.sequence_length
            # A window of it comes in each round, up to the last of it or of the epoch.
            rounds = windows[chosen] // pool.blocks + sizes - drawn[_PLACE, chosen]
            until = -(-(np.minimum(rounds * pool.blocks, pool.windows) + behind) // size)
            found.append((starts, sizes, batch[chosen] // batches.step, until))
        starts, sizes, opening, until = (np.concatenate(some) for some in zip(*found, strict=True))
        firsts = np.searchsorted(opening, np.arange(len(batches) + 1))
        return Stretches(starts, np.append(0, np.cumsum(sizes)), firsts, until)

    def pool(self, snapshot: Snapshot) -> Pool:
        """The pool that windows of these rows are drawn from."""
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
        """Yield the windows of some rows of batches, by epoch.

        Each item is the number of the epoch, the windows' numbers in it, the row at which its window 0 begins, and what
        ``_known`` returns for the numbers.
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
        """Return the number of windows of an epoch, which fit wherever the epoch begins."""
        whole_windows(snapshot, self.sequence_length, at_least=1)
        return max(1, (snapshot.num_rows - self.sequence_length + 1) // self.sequence_length)


def row_bytes(snapshot: Snapshot) -> float:
    """Estimate the bytes of a row, by the fields' shapes and by the encoded images of a few rows.

    The estimate depends on values alone and not on their layout on disk, as it decides which windows are drawn.
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
    """Return the bytes of an encoded image or of a list of images; 0 for an image in a file of its own."""
    if isinstance(value, dict):
        value = value.get("bytes")
    if isinstance(value, list):
        return sum(map(_encoded_bytes, value))
    return len(value) if isinstance(value, bytes) else 0


# ---------------------------------------------------------------------- the arithmetic

# Rows of the result of ``_known``: the window; the first window of its stretch, and the number of windows of the
# stretch; the number of windows of the stretch that came before.
_WINDOW, _STRETCH, _STRETCH_SIZE, _PLACE = range(4)


class _Epoch(NamedTuple):
    """The random draws of an epoch.

    Attributes:
        uniform: Draws of the first row of the epoch, and of the place where its line of windows begins, float64
            ``[2]``.
        blocks: The order of the whole blocks.
        lanes: Orders of lanes, for each window of a batch in every round.
        windows: Orders of windows, for each stretch.
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
    """Return ``_known`` of the windows of a section of an epoch."""
    numbers = np.arange(section * SECTION, min((section + 1) * SECTION, pool.windows))
    return read_only(_known(pool, seed, epoch_start, epoch, numbers))


def _known(pool: Pool, seed: int, epoch_start: int, epoch: int, number: Int64s) -> Int64s:
    """Return the windows of an epoch that come as ``number`` (int64 ``[n]``), and the stretch of each.

    It is int64 ``[4, n]``; see ``_WINDOW``.

    All blocks of the epoch one behind the other, in the order drawn, are a line of W windows. It is cut into K lanes of
    W // K windows, or one more. A round takes one window of each lane: K windows, B at a time, of which window k of a
    batch has the ``pool.lanes`` lanes from number ``k * pool.lanes`` on, in an order drawn for the round. A stretch is
    what lies in one lane of one block; its windows come in an order that is drawn, and it is read as a whole.

    Of 10 windows in blocks of 4 (0..3, 4..7, and the rest, 8 and 9), with batches of 2 and one lane for each, the line
    may be 4..7, 0..3, 8, 9. The lanes are 4, 5, 6, 7, 0 and 1, 2, 3, 8, 9, in stretches of 4 and 1, and of 3 and 2.
    With stretches in the orders 6, 4, 7, 5; 0; 2, 3, 1; 9, 8 the batches are (6, 2), (4, 3), (7, 1), (5, 9), (0, 8).

    So that not all lanes open a block in the same round, each begins somewhere in its midst and ends there: with a lane
    that begins at its third window, what comes before it comes last.
    """
    drawn, block, size, lanes = _epoch(seed, epoch_start, epoch, pool), pool.block, pool.batch_size, pool.lanes
    rounds, rest = divmod(pool.windows, pool.blocks)
    round_, turn = np.divmod(number, pool.blocks)
    turn, row = np.divmod(turn, size)
    # In the last, incomplete round of an epoch, ``more`` lanes of each window of a batch have one window more.
    more = rest // size + (row < rest % size)
    lane = drawn.lanes(round_ * size + row, np.where(round_ == rounds, more, lanes), turn)
    length = rounds + (lane < more)
    begin = row * (lanes * rounds + rest // size) + np.minimum(row, rest % size)
    begin += lane * rounds + np.minimum(lane, more)
    begin = (begin + int(drawn.uniform[1] * pool.windows)) % pool.windows
    # The number of the round in which the lane comes to the end of a block, modulo a block's length.
    turns = (lane * size + row) * block // pool.blocks
    shift = (-begin - turns) % block % length
    place = (round_ + shift) % length
    line = (begin + place) % pool.windows
    of_line = line // block
    before = line - of_line * block
    # The stretch: from where the block, the lane or its first turn begins, to where one of them ends.
    first = np.maximum(place - before, np.where(place >= shift, shift, 0))
    end = np.minimum(
        place - before + np.minimum(block, pool.windows - of_line * block), np.where(place < shift, shift, length)
    )
    place -= first
    whole = pool.windows // block
    window = np.where(of_line < whole, drawn.blocks(np.minimum(of_line, whole - 1)), whole) * block + before - place
    of_stretch = drawn.windows(line - place, end - first, place)
    return np.stack([window + of_stretch, window, end - first, place])
