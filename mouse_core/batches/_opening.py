"""Batches that are drawn from stretches of rows, which are read as wholes when the first window of each comes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mouse_core.ahead.room import room_for_files
from mouse_core.batches._planner import Block, Planner
from mouse_core.errors import StoreWarning

# Around a block, what it opens has a number that no kind of offsets has.
_OPENED = -1


def read_with(planner: Planner, block: Block) -> Sequence[Block]:
    """What is read when each batch of a block is: the stretches that it opens, as a block of as many batches.

    Its own windows lie in these and in earlier ones, and are read again where some of that may have gone since.
    """
    if _OPENED not in block.around:
        sampler: Any = planner.sampler
        batches, rows = range(block.first, block.end, block.step), slice(*planner.delivered(sampler.batch_size))
        found = sampler.starts_to_read(
            planner.seed, batches, planner.snapshot, planner.epoch_start, rows=rows, begun=block.kind
        )
        if found:
            sizes, windows = np.diff(found[1]).tolist(), planner.locate(found[0], found[1].tolist(), None)
            block.around[_OPENED] = Block(block.first, block.end, block.step, block.kind, windows, sizes, planner)
    if _OPENED not in block.around:
        return [block]
    # Looked at once: it takes as long as some batches.
    stays = planner.__dict__.get("_stays")
    if stays is None:
        stays = planner.__dict__["_stays"] = _stay(planner)
    return [block.around[_OPENED]] if stays else [block.around[_OPENED], block]


def _stay(planner: Planner) -> bool:
    """Whether what is opened is there until all its windows came; a ``StoreWarning`` says where there is no room.

    What went is read again, page by page.
    """
    snapshot = planner.snapshot
    pool = None if (pool_of := getattr(planner.sampler, "pool", None)) is None else pool_of(snapshot)
    if pool is None:
        return False  # nobody knows
    nbytes = pool.nbytes // planner.shard[1]
    found = [("the cache", one.room) for one in snapshot.backings]
    if any(one.is_mapped or one.sealed_bytes for one in snapshot.segments):
        found.append(("memory", room_for_files()))
    short = [(room, where) for where, room in found if room is not None and room < nbytes]
    if short:
        room, where = min(short)
        more = "cache_bytes= with more" if where == "the cache" else "more memory"
        warnings.warn(
            f"sampling 'blocks': expected room for {nbytes:,} bytes, the {pool.blocks:,} blocks that windows "
            f"are drawn from at a time, found {room:,} in {where}: blocks are read again and again; have {more}, or "
            "fewer blocks by Blocks(pool=...)",
            StoreWarning,
            stacklevel=2,
        )
    return not short and not snapshot.backings  # of which others may have let go
