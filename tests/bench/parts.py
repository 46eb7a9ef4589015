"""Where the time of a batch goes: what cannot be saved, beside the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mouse_core import BatchSource
from mouse_core.bench import Contender, interleave
from tests.bench import generate
from tests.bench.floor import Addresses, floor, floor_name
from tests.bench.results import Table, table_of
from tests.bench.task import Task
from tests.bench.workloads import _PLANNED, Settings, dataset_folder


def table(settings: Settings, batch_size: int = 32) -> Table:
    """A batch's floor, Arrow's copy of windows whose places are known, finding these places, and all of it."""
    task = Task(
        dataset_folder(generate.STATE, settings.rows, settings),
        settings.folder,
        64,
        batch_size,
        dtypes={"obs_continuous": "float32"},
        multiple=_PLANNED // batch_size,
    )
    source, addresses = task.source(), Addresses(task.dataset)
    pieces = [addresses.pieces(source, index) for index in range(max(8, 20_480 // batch_size))]
    parts: dict[str, Callable[[int], Any]] = {
        "Arrow's cast of views that are there": _casting(task.source()),
        "planning: draws, places and views": _planning(task.source()),
        "mouse source[i]": source.__getitem__,
    }
    timings = interleave(
        [
            Contender(floor_name(), floor(pieces), "floor", multiple=task.multiple),
            *(Contender(name, call, "ours", multiple=task.multiple) for name, call in parts.items()),
        ],
        rounds=settings.rounds,
        budget_seconds=settings.budget,
    )
    return table_of(
        f"parts-{batch_size}",
        f"Where the time of a batch goes, B={batch_size}, S=64, six columns",
        timings,
        nbytes=pieces[0].nbytes,
        notes=[
            "The cast goes through one block of windows again and again, as many batches at a time as source[i] does.",
            "What source[i] takes beyond both is Python: arrays and dicts, six of the former a batch.",
        ],
    )


def _casting(source: BatchSource) -> Callable[[int], None]:
    for index in range(2 * _PLANNED // source.batch_size):  # blocks grow to their full size
        source[index]
    block: Any = source.plan(index).block
    views, together = source._pipeline._byte_views(block), block.together
    assert views is not None
    batches = len(views.sizes) // together * together
    held: list[Any] = []

    def cast(number: int) -> None:
        first = number % batches
        if first % together == 0:
            held.clear()
            held.append(views.copy(first, together))

    return cast


def _planning(source: BatchSource) -> Callable[[int], None]:
    def plan(number: int) -> None:
        block: Any = source.plan(number).block
        source._pipeline._byte_views(block)

    return plan
