"""Computes the digest of delivered batches. The worker that computes a batch also returns the batch's digest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mouse_core.batches.source import BatchSource
from mouse_core.digest import StreamDigest, host_array
from mouse_core.prefetch.prefetcher import Staged
from mouse_core.prefetch.source import ShardSource
from mouse_core.sampling.plan import MASK, PACKED, PaddedSampler
from mouse_core.spec import Spec

if TYPE_CHECKING:
    from mouse_core.ranks import Ranks


def digesting(make: Callable[[int], Any], source: Any) -> Callable[[int], tuple[Any, StreamDigest]]:
    """Wrap ``make`` in a function that returns each batch together with the batch's contribution to the digest.

    If the maker is ``Staged``, the digest is computed on the host, before the transfer to a device.
    """
    spec, staged = getattr(source, "spec", None), make if isinstance(make, Staged) else None
    rows_of = (staged and staged.rows) or partial(_rows, source)
    digest: Callable[[int, Any, Any], StreamDigest] = StreamDigest.of
    if isinstance(spec, Spec) and spec.is_packed:
        digest = _of_packed
    elif _masks_shares_only(source):
        digest = _of_unmasked

    def digesting_make(index: int) -> tuple[Any, StreamDigest]:
        if staged is None:
            made = make(index)
            return made, digest(index, made, rows_of(index))
        gathered = staged.gather(index)
        # Compute the digest first: the transfer may donate or reuse the arrays.
        part = digest(index, staged.arrays(gathered), rows_of(index))
        return staged.transfer(gathered), part

    return digesting_make


def _of_unmasked(index: int, batch: Any, rows: Any) -> StreamDigest:
    return StreamDigest.of(index, _unmasked(batch), rows)


def _of_packed(index: int, batch: Any, rows: int | range) -> StreamDigest:
    """Return the digest of packed windows: the sum of the digests of single windows. The positions of windows in the
    packed batch are not included.
    """
    views = batch if isinstance(batch, tuple) else (batch,)
    bounds = host_array(views[0]["cu_seqlens"]).tolist()
    fields = [name for name in views[0].keys() if name not in PACKED]  # noqa: SIM118  as in _unmasked
    first = rows if isinstance(rows, int) else rows.start
    total = StreamDigest()
    for row, (begin, end) in enumerate(pairwise(bounds), first):
        if end > begin:  # empty windows belong to another shard
            windows = tuple({name: view[name][begin:end][None] for name in fields} for view in views)
            total += StreamDigest.of(index, windows, row)
    return total


def _rows(source: Any, index: int) -> int | range:
    """Return the range of a source's rows in the batch over all shards, without a padding row that belongs to another
    shard.
    """
    if isinstance(source, ShardSource):
        return source.own_rows(index)
    if not isinstance(source, BatchSource) or source.shard == (0, 1):
        return 0
    plan, (rank, count) = source.plan(index), source.shard
    return range(plan.first, plan.global_size * (rank + 1) // count)


def _masks_shares_only(source: Any) -> bool:
    """Return whether the mask of batches marks only padding windows. A padding window is added to a shard that has
    fewer windows than other shards.

    Such a mask contains no information about other windows. If the shards divide the batches evenly, batches have no
    mask.
    """
    if isinstance(source, ShardSource):
        return source.masks_shares_only
    if not isinstance(source, BatchSource):
        return False
    has_missing_steps = isinstance(source.sampler, PaddedSampler) and source.spec.batch_dims == 2
    return source.uneven == "pad" and not has_missing_steps and not source.batch_plan.transitions


def _unmasked(batch: Any) -> Any:
    """Return a batch, or each of its views, without the mask."""
    if isinstance(batch, tuple):
        return tuple(map(_unmasked, batch))
    return {name: batch[name] for name in batch.keys() if name != MASK}  # noqa: SIM118  a TensorDict iterates over rows


def shard_of(source: Any, ranks: Ranks | None) -> tuple[int, int]:
    """Return the shard whose rows are digested. If a sharding divides batches over processes, the shard comes from
    ``ranks``, not from the source.
    """
    rank, count = getattr(source, "shard", (0, 1)) if ranks is None else ranks.shard
    return int(rank), int(count)
