"""Whether stretches of rows that batches are drawn from stay where they are read, until all windows of them came."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mouse_core.errors import StoreWarning
from mouse_core.readahead.room import room_for_files
from mouse_core.sampling.plan import WindowSampler, remembered
from mouse_core.store.snapshot import Snapshot

# Around a block, what it opens has a number that no kind of offsets has.
_OPENED = -1


def read_for(planner: Any, block: Any, make: type) -> Sequence[Any]:
    """See ``Planner.read``, of batches whose sampler may draw them from stretches of rows; ``make`` is ``Block``."""
    if _OPENED not in block.around:
        rows = slice(*planner.delivered(planner.sampler.batch_size))
        batches, given = range(block.first, block.end, block.step), (planner.snapshot, planner.epoch_start)
        found = planner.sampler.starts_to_read(planner.seed, batches, *given, rows=rows, begun=block.kind)
        if found is None:
            return [block]
        windows, sizes = planner.locate(found.starts, found.bounds.tolist(), None), np.diff(found.bounds).tolist()
        which = block.first, block.end, block.step, block.kind
        block.around[_OPENED] = make(*which, windows, sizes, planner, stretches=found)
    opened = block.around[_OPENED]
    return [opened] if _stays(planner.sampler, planner.snapshot, planner.shard[1]) else [opened, block]


def _stays(sampler: WindowSampler, snapshot: Snapshot, shards: int) -> bool:
    """See ``_stay``, which takes as long as some batches, and warns once."""
    return remembered(snapshot, ("opened", id(sampler), shards), lambda: _stay(sampler, snapshot, shards))


def _stay(sampler: WindowSampler, snapshot: Snapshot, shards: int) -> bool:
    """Whether what a sampler opens stays where it is read; not where nobody knows.

    What went is read again, page by page. A ``StoreWarning`` says where there is no room.
    """
    pool = None if (pool_of := getattr(sampler, "pool", None)) is None else pool_of(snapshot)
    if pool is None:
        return False
    nbytes = pool.nbytes // shards
    found = [("the cache", one.room) for one in snapshot.backings]
    if any(one.is_mapped or one.sealed_files for one in snapshot.segments):
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
