"""A digest of what a loader delivers, made where batches are: the worker says what each adds to it."""

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


_Digest = Callable[[int, Any, Any], StreamDigest]


def digesting(make: Callable[[int], Any], source: Any) -> Callable[[int], tuple[Any, StreamDigest]]:
    """Wrap ``make`` to also return each batch's share of the digest.

    A batch that goes to a device is digested while it is still on the host, where its maker is ``Staged``.
    """
    spec = getattr(source, "spec", None)
    digest: _Digest = partial(_whole, _masks_shares_only(source))
    if isinstance(spec, Spec) and spec.is_packed:
        digest = _of_packed
    if isinstance(make, Staged):
        return partial(_make_staged, make, make.rows or partial(_rows, source), digest)
    return partial(_make, make, partial(_rows, source), digest)


def _make(make: Callable[[int], Any], rows: Callable[[int], Any], digest: _Digest, index: int) -> Any:
    made = make(index)
    return made, digest(index, made, rows(index))


def _make_staged(staged: Staged, rows: Callable[[int], Any], digest: _Digest, index: int) -> Any:
    gathered = staged.gather(index)
    # First the digest: what is transferred may be given away.
    batch = staged.arrays(gathered)
    said = digest(index, batch, rows(index))
    return staged.transfer(gathered), said


def _whole(unmasked: bool, index: int, batch: Any, rows: Any) -> StreamDigest:
    return StreamDigest.of(index, _unmasked(batch) if unmasked else batch, rows)


def _of_packed(index: int, batch: Any, rows: int | range) -> StreamDigest:
    """The digest of packed windows, each as if it were alone: of its steps, and not of where they lie in the batch."""
    views = batch if isinstance(batch, tuple) else (batch,)
    bounds = host_array(views[0]["cu_seqlens"]).tolist()
    fields = [name for name in views[0].keys() if name not in PACKED]  # noqa: SIM118  as in _unmasked
    first = rows if isinstance(rows, int) else rows.start
    total = StreamDigest()
    for row, (begin, end) in enumerate(pairwise(bounds), first):
        if end > begin:  # others are another shard's
            windows = tuple({name: view[name][begin:end][None] for name in fields} for view in views)
            total += StreamDigest.of(index, windows, row)
    return total


def _rows(source: Any, index: int) -> int | range:
    """Return a source's rows of the whole batch, without a padding row, which another shard has too."""
    if isinstance(source, ShardSource):
        return source.own_rows(index)
    if not isinstance(source, BatchSource) or source.shard == (0, 1):
        return 0
    plan, (rank, count) = source.plan(index), source.shard
    return range(plan.first, plan.global_size * (rank + 1) // count)


def _masks_shares_only(source: Any) -> bool:
    """Whether batches have a mask only to say which window fills up an uneven share.

    Of windows that count it says nothing, and a stream that is shared evenly, or not at all, has none.
    """
    if isinstance(source, ShardSource):
        return source.masks_shares_only
    if not isinstance(source, BatchSource):
        return False
    has_missing_steps = isinstance(source.sampler, PaddedSampler) and source.spec.batch_dims == 2
    return source.uneven == "pad" and not has_missing_steps and not source.batch_plan.transitions


def _unmasked(batch: Any) -> Any:
    """A batch, or its views, without the mask."""
    if isinstance(batch, tuple):
        return tuple(map(_unmasked, batch))
    return {name: batch[name] for name in batch.keys() if name != MASK}  # noqa: SIM118  a TensorDict iterates over rows


def shard_of(source: Any, ranks: Ranks | None) -> tuple[int, int]:
    """Whose rows are digested: of a sharding over processes the source is that of all, and the ranks say it."""
    rank, count = getattr(source, "shard", (0, 1)) if ranks is None else ranks.shard
    return int(rank), int(count)
