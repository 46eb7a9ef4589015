"""A digest of what a loader delivers, made where batches are: the worker says what each adds to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mouse_core.batches.source import BatchSource
from mouse_core.digest import StreamDigest
from mouse_core.prefetch.prefetcher import Staged

if TYPE_CHECKING:
    from mouse_core.ranks import Ranks


def digesting(make: Callable[[int], Any], source: Any) -> Callable[[int], tuple[Any, StreamDigest]]:
    """The same function, which also says what a batch adds to the digest.

    A batch that goes to a device is digested while it is still on the host, where its maker is ``Staged``.
    """
    if isinstance(make, Staged):
        return partial(_make_staged, make, make.rows or partial(_rows, source))
    return partial(_make, make, partial(_rows, source))


def _make(make: Callable[[int], Any], rows: Callable[[int], Any], index: int) -> tuple[Any, StreamDigest]:
    made = make(index)
    return made, StreamDigest.of(index, made, rows(index))


def _make_staged(staged: Staged, rows: Callable[[int], Any], index: int) -> tuple[Any, StreamDigest]:
    gathered = staged.gather(index)
    # First the digest: what is transferred may be given away.
    digest = StreamDigest.of(index, staged.arrays(gathered), rows(index))
    return staged.transfer(gathered), digest


def _rows(source: Any, index: int) -> int | range:
    """Which rows of the whole batch those of a source are, but for one that is padded: another shard has that, too."""
    if not isinstance(source, BatchSource) or source.shard == (0, 1):
        return 0
    plan, (rank, count) = source.plan(index), source.shard
    return range(plan.first, plan.global_size * (rank + 1) // count)


def shard_of(source: Any, ranks: Ranks | None) -> tuple[int, int]:
    """Whose rows are digested: of a sharding over processes the source is that of all, and the ranks say it."""
    rank, count = getattr(source, "shard", (0, 1)) if ranks is None else ranks.shard
    return int(rank), int(count)


def state_of(digest: StreamDigest, shard: tuple[int, int]) -> dict[str, Any]:
    """The digest so far, and whose it is."""
    rank, count = shard
    return {**digest.state_dict(), "rank": rank, "ranks": count}


def restored(state: Any, shard: tuple[int, int]) -> StreamDigest:
    """The digest to go on with: that of the state where both are of one process; else one of nothing.

    Of several, none can know whether each was given a state of its own or all were given one. If some went on and
    others began again, the sum would be no stream's; so all begin again.

    Raises:
        StateError: It is none.
    """
    if state is None:
        return StreamDigest()
    found = StreamDigest.from_state(state)
    return found if (state.get("rank"), state.get("ranks")) == shard == (0, 1) else StreamDigest()
