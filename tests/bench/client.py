"""What the client of object storage does by itself: the same ranges, so many at a time, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mouse_core import DatasetStore
from mouse_core.remote.clients.objects import AT_ONCE, GROUP, FolderClient

Wanted = tuple[str, int, int]


@contextmanager
def ranges_asked() -> Iterator[list[list[Wanted]]]:
    """The calls of clients meanwhile: of each the path, first byte and end of its ranges."""
    calls: list[list[Wanted]] = []
    get_all = FolderClient.get_all

    def noted(self: FolderClient, wanted: Sequence[Wanted], versions: dict[str, str]) -> list[Any]:
        calls.append(list(wanted))
        return get_all(self, wanted, versions)

    FolderClient.get_all = noted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        FolderClient.get_all = get_all  # type: ignore[method-assign]


def alone(url: str, options: dict[str, str], cache: Path, calls: Sequence[Sequence[Wanted]]) -> tuple[float, float]:
    """Seconds, and seconds of the processor, that obstore takes for the ranges of some calls, in groups as ours are."""
    import obstore

    opened = DatasetStore.open(url, storage_options=options, cache=cache)
    # The client that ours has, so that nothing but what we do beside it differs; no part of the interface gives it.
    store = opened._rows._client._store  # type: ignore[attr-defined]
    groups: list[tuple[str, list[Wanted]]] = []
    for wanted in calls:
        by_path: dict[str, list[Wanted]] = {}
        for one in wanted:
            by_path.setdefault(one[0], []).append(one)
        groups += [(path, some[at : at + GROUP]) for path, some in by_path.items() for at in range(0, len(some), GROUP)]

    async def ask() -> None:
        turns = asyncio.Semaphore(2 * AT_ONCE // GROUP)

        async def group(path: str, some: list[Wanted]) -> None:
            async with turns:
                begins, ends = [one[1] for one in some], [one[2] for one in some]
                if len(some) == 1:
                    await obstore.get_range_async(store, path, start=begins[0], end=ends[0])
                else:
                    await obstore.get_ranges_async(store, path, starts=begins, ends=ends, coalesce=0)

        await asyncio.gather(*(group(*one) for one in groups))

    began, busy = time.perf_counter(), time.process_time()
    asyncio.run(ask())
    return time.perf_counter() - began, time.process_time() - busy
