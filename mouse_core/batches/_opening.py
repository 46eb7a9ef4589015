"""Whether stretches of rows that batches are drawn from stay where they are read, until all windows of them came."""

from __future__ import annotations

import warnings

from mouse_core.ahead.room import room_for_files
from mouse_core.errors import StoreWarning
from mouse_core.sampling.plan import WindowSampler
from mouse_core.sampling.windows import remembered
from mouse_core.store.snapshot import Snapshot


def opened_for(sampler: WindowSampler, snapshot: Snapshot, shards: int) -> int:
    """See ``_stay``, which takes as long as some batches, and warns once."""
    return remembered(snapshot, ("opened", id(sampler), shards), lambda: _stay(sampler, snapshot, shards))


def _stay(sampler: WindowSampler, snapshot: Snapshot, shards: int) -> int:
    """For how many batches what a sampler opens is read, and stays where it is; 0 where it does not, or nobody knows.

    What went is read again, page by page. A ``StoreWarning`` says where there is no room.
    """
    pool = None if (pool_of := getattr(sampler, "pool", None)) is None else pool_of(snapshot)
    if pool is None:
        return 0
    nbytes = pool.nbytes // shards
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
    return 0 if short or snapshot.backings else pool.batches  # of which others may have let go
