"""Benchmark of the batches in a user's own run, from the loader that the run creates."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mouse_core.bench.advice import Line, drawing, workers_for_each
from mouse_core.bench.frameworks import PACKAGES
from mouse_core.bench.measuring import Contender, interleave, private_memory, steady
from mouse_core.bench.opening import Opened
from mouse_core.bench.running import BenchReport, FirstBatches, line_of
from mouse_core.errors import ConfigError

_SLOW_SECONDS = 0.03
_WAITING = 4


def bench_own(opened: Opened, make: Callable[..., Any], *, name: str, seconds: float = 10.0) -> BenchReport:
    """Measure what a function of one's own makes of a dataset: any loader, buffer or iterable, with any options.

    Args:
        opened: The dataset.
        make: Called with its store; gives something with ``next_batch()`` or ``sample()``, or to iterate over. Where
            it has a parameter ``num_workers``, it is tried with 0, 1 and 2.
        name: What to call it.
        seconds: How long to measure, about.

    Returns:
        The report; without a floor, as nothing is known of how batches are made.

    Raises:
        ConfigError: It gives something else.
    """
    tried: list[int | None] = [0, 1, 2] if "num_workers" in inspect.signature(make).parameters else [None]
    ways = [_way(opened, make, name, workers) for workers in tried]
    batch, lines, first, drawn = measured(ways, seconds)
    advice = [drawing(line) for line in lines if line.name in drawn]
    advice += workers_for_each([line for line in lines if line.name not in drawn])
    return BenchReport(
        {"name": opened.name, "rows": opened.rows, "seconds to open": opened.seconds},
        {"run": name, **batch},
        lines,
        first,
        None,
        0,
        [*advice, *opened.costs],
    )


@dataclass(frozen=True)
class Way:
    """Something that gives batches, to be made and measured.

    Args:
        name: What it is called.
        make: Makes it.
        workers: How many threads it has.
        framework: Which it is of; None: that whose package it is of.
    """

    name: str
    make: Callable[[], Any]
    workers: int | None = None
    framework: str | None = None


def _way(opened: Opened, make: Callable[..., Any], name: str, workers: int | None) -> Way:
    options = {} if workers is None else {"num_workers": workers}
    label = name if workers is None else f"{name}, num_workers={workers}"
    return Way(label, lambda: make(opened.to_store(), **options), workers)


def measured(
    ways: Sequence[Way], seconds: float
) -> tuple[dict[str, Any], list[Line], dict[str, FirstBatches], set[str]]:
    """Make some things that give batches, and measure them in turns.

    Args:
        ways: What to measure; what has ``close()`` is closed.
        seconds: How long, about.

    Returns:
        Megabytes and fields of a batch, what was measured, what the first batches cost, by name, and the names of what
        is no loader but a buffer that is drawn from.

    Raises:
        ConfigError: One gives no batches.
    """
    contenders, kinds, made, first = [], {}, [], {}
    drawn = set()
    batch: Any = None
    try:
        for way in ways:
            gc.collect()
            before, began = private_memory(), time.perf_counter()
            loader = way.make()
            made.append(loader)
            take = _taker(loader, way.name)
            if not hasattr(loader, "next_batch") and hasattr(loader, "sample"):
                drawn.add(way.name)
            batch = take(0)
            taken = time.perf_counter() - began
            each = _seconds(take)
            after = private_memory()
            grown = None if before is None or after is None else (after - before) / 1e6
            first[way.name] = FirstBatches(taken, grown, 0.0 if grown is not None else None)
            kinds[way.name] = way.framework or _framework_of(loader), way.workers or 0
            together = max(1, min(256, int(_SLOW_SECONDS / max(each, 1e-6))))
            contender = Contender(way.name, partial(_wait, take), "ours", wall=each > _SLOW_SECONDS, multiple=together)
            contenders.append(steady(contender, _WAITING) if way.workers else contender)
        rounds = max(5, min(60, int(seconds / 0.008 / len(contenders))))
        timings = interleave(contenders, rounds=rounds, budget_seconds=seconds / len(contenders))
    finally:
        for loader in made:
            close = getattr(loader, "close", None)
            if close is not None:
                close()
    fields = dict(_leaves(batch))
    nbytes = sum(int(one.nbytes) for one in fields.values())
    lines = [line_of(one, timings, kinds, nbytes) for one in timings]
    batch_of = {"megabytes": nbytes / 1e6, "fields": {key: _described(one) for key, one in fields.items()}}
    return batch_of, lines, first, drawn


def _taker(loader: Any, name: str) -> Callable[[int], Any]:
    """Return a function that takes the loader's next batch."""
    for method in ("next_batch", "sample"):
        found = getattr(loader, method, None)
        if callable(found):
            return lambda number: found()
    if isinstance(loader, Iterable):
        return partial(_next, _Again(loader), name)
    raise ConfigError(f"{name}: expected something with next_batch or sample, or to iterate over, found {loader!r:.80}")


class _Again:
    """Begins again where a thing to iterate over ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.iterator: Iterator[Any] = iter(loader)


def _next(again: _Again, name: str, number: int) -> Any:
    for _ in range(2):
        for batch in again.iterator:
            return batch
        again.iterator = iter(again.loader)
    raise ConfigError(f"{name}: expected batches, found none")


def _wait(take: Callable[[int], Any], number: int = 0) -> None:
    """Take a batch, and wait until arrays that are still being made are there."""
    for _, values in _leaves(take(number)):
        if hasattr(values, "block_until_ready"):
            values.block_until_ready()


def _seconds(take: Callable[[int], Any]) -> float:
    found = []
    for number in range(1, 3):
        began = time.perf_counter()
        take(number)
        found.append(time.perf_counter() - began)
    return min(found)


def _leaves(batch: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a batch, by name; those within others with a dot between the names."""
    if isinstance(batch, tuple | list):
        batch = {str(place): one for place, one in enumerate(batch)}
    if isinstance(batch, Mapping) or (hasattr(batch, "items") and hasattr(batch, "keys")):  # a TensorDict, say
        for name, one in batch.items():
            yield from _leaves(one, f"{prefix}{name}.")
    elif hasattr(batch, "nbytes") and hasattr(batch, "shape"):
        yield prefix.rstrip(".") or "batch", batch


def _described(array: Any) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"


def _framework_of(loader: Any) -> str:
    """The framework whose package a loader is of."""
    package = type(loader).__module__.split(".")[0]
    return next((name for name, (one, _) in PACKAGES.items() if one == package), "numpy")
