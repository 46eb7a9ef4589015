"""The pages of a mirror that byte ranges touch, and the requests that fetch them.

A mirror is divided into blocks of 64 KB, and each block into 16 pages of 4 KB. Presence and eviction are tracked per
page, by one bit in the block's mask; fetches in progress are tracked per block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.files.checksum import PAGE
from mouse_core.readahead.backing import ragged

Int64s = npt.NDArray[np.int64]

PAGES = 16
BLOCK = PAGE * PAGES
ALL_PAGES = (1 << PAGES) - 1
# One request brings pages that lie so far apart, with those between them: another request would take longer.
_GAP_PAGES = 16
# A connection is slower than all together, so no request is longer.
_LONGEST_RUN = 256


def touched(begins: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """The blocks that some bytes lie in, and masks of the pages.

    Bytes 5,000 to 9,000 lie in pages 1 and 2 of block 0: its mask is 0b110. Bytes 65,540 to 65,550 lie in page 16, the
    first of block 1: its mask is 0b1.

    Args:
        begins: Where ranges of bytes begin, ascending, int64 ``[n]``.
        ends: Where they end, each behind its beginning and not behind the next one's.

    Returns:
        Blocks, ascending, int64 ``[m]``, and masks, int64 ``[m]``.
    """
    # Of ranges, and not of pages, which are many.
    first, last = begins // PAGE, (ends - 1) // PAGE
    blocks, low, high = first // PAGES, first % PAGES, last % PAGES
    more = last // PAGES - blocks
    if more.any():
        whose, number = ragged(more + 1)
        blocks = blocks[whose] + number
        low, high = np.where(number == 0, low[whose], 0), np.where(number == more[whose], high[whose], PAGES - 1)
    return _united(blocks, (2 << high) - (1 << low))


def by_block(pages: Int64s) -> tuple[Int64s, Int64s]:
    """The blocks that some pages (ascending, int64 ``[n]``) lie in, and a mask of those in each."""
    return _united(pages // PAGES, 1 << pages % PAGES)


def _united(blocks: Int64s, masks: Int64s) -> tuple[Int64s, Int64s]:
    """Each of some blocks (ascending, int64 ``[n]``) once, with all pages of its masks."""
    if len(blocks) < 2:
        return blocks, masks
    is_head = np.empty(len(blocks), np.bool_)
    is_head[0] = True
    np.not_equal(blocks[1:], blocks[:-1], out=is_head[1:])
    (heads,) = is_head.nonzero()
    return (blocks, masks) if len(heads) == len(blocks) else (blocks[heads], np.bitwise_or.reduceat(masks, heads))


def joined(parts: Sequence[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    """The blocks of several, ascending, and masks of the pages of any: 2, 0b1, and 2, 0b100 are 2 and 0b101."""
    if len(parts) == 1:
        return parts[0]
    blocks, masks = (np.concatenate(some) for some in zip(*parts, strict=True))
    order = np.argsort(blocks, kind="stable")
    return _united(blocks[order], masks[order])


def bits(masks: Int64s) -> npt.NDArray[np.bool_]:
    """Return the pages of masks, bool ``[n, 16]``."""
    each: npt.NDArray[Any] = np.unpackbits(masks.astype("<u2").view(np.uint8), bitorder="little")
    return each.view(np.bool_).reshape(-1, PAGES)


def masks_of(bits: npt.NDArray[np.bool_]) -> Int64s:
    """The masks of which ``bits`` says which pages they name, int64 ``[n]``."""
    masks: Int64s = np.packbits(bits, bitorder="little").view("<u2").astype(np.int64)
    return masks


def pages_of(blocks: Int64s, masks: Int64s) -> Int64s:
    """The pages that masks name, ascending where blocks are: of block 2 and mask 0b101, pages 32 and 34."""
    (place,) = bits(masks).reshape(-1).nonzero()
    found: Int64s = (blocks * PAGES)[place // PAGES] + place % PAGES
    return found


def runs(pages: Int64s) -> tuple[Int64s, Int64s]:
    """Return the runs that bring pages (ascending, int64 ``[n]``): first pages, and those behind the last ones.

    Pages 3, 4, 9 and 40 are two runs, 3 to 10 and 40 to 41: between 4 and 9 lie fewer than 16 pages.
    """
    ends = np.flatnonzero(np.diff(pages) > _GAP_PAGES + 1)
    firsts = pages[np.concatenate([[0], ends + 1])]
    behind = pages[np.concatenate([ends, [len(pages) - 1]])] + 1
    pieces = -((firsts - behind) // _LONGEST_RUN)
    if (pieces == 1).all():
        return firsts, behind
    run, number = ragged(pieces)
    cut = firsts[run] + number * _LONGEST_RUN
    return cut, np.minimum(cut + _LONGEST_RUN, behind[run])


def ascending(begins: Sequence[int] | Int64s, ends: Sequence[int] | Int64s) -> tuple[Int64s, Int64s]:
    """Ranges in the order in which they begin, merged where they touch; empty ones left out."""
    first, last = np.asarray(begins, np.int64), np.asarray(ends, np.int64)
    order = np.argsort(first, kind="stable")
    order = order[last[order] > first[order]]
    first, reached = first[order], np.maximum.accumulate(last[order])
    heads = np.flatnonzero(np.concatenate([[len(first) > 0], first[1:] > reached[:-1]]))
    return first[heads], np.maximum.reduceat(reached, heads) if len(heads) else heads


def pieces(sizes: Int64s, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of some sizes, by the first of them and the one behind the last, that have at most so many bytes together;
    one that has more for itself.
    """
    first = 0
    reached = np.cumsum(sizes)
    while first < len(sizes):
        before = int(reached[first] - sizes[first])
        behind = max(first + 1, int(np.searchsorted(reached, before + most, "right")))
        yield first, behind
        first = behind
