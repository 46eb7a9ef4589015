"""Benchmark of replay buffers in every framework, drawn directly and through a prefetching loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mouse_core.bench.advice import drawing
from mouse_core.bench.frameworks import class_of, frameworks_of
from mouse_core.bench.opening import Opened
from mouse_core.bench.own import Way, measured
from mouse_core.bench.running import BenchReport
from mouse_core.errors import ConfigError
from mouse_core.replay import ArrayStorage, ReplayBuffer, SliceSampler
from mouse_core.spec import check_count

_AT_ONCE = 4096
_PREFETCH = 4


def bench_replay(
    opened: Opened,
    *,
    capacity: int,
    batch_size: int = 32,
    sequence_length: int | None = None,
    fields: Sequence[str] | None = None,
    frameworks: Sequence[str] | None = None,
    seconds: float = 10.0,
) -> BenchReport:
    """Measure draws from a replay buffer in memory that a dataset's rows are written to.

    Args:
        opened: The dataset.
        capacity: How many rows the buffer holds; as many of the first are written, or all.
        batch_size: Rows in a batch, or slices.
        sequence_length: Steps of slices within episodes; None: single rows.
        fields: Only these; by default all.
        frameworks: Of "numpy", "torch" and "jax"; by default those that are installed.
        seconds: How long to measure, about.

    Returns:
        The report; without a floor. What is drawn ahead is of rows as they were some batches before.

    Raises:
        ConfigError: Fields that are not there, a number out of range, or a framework that is not installed.
    """
    chosen = frameworks_of(frameworks)
    storage, rate = _filled(opened, check_count("capacity", capacity), fields)
    ways = []
    for framework in chosen:
        made = _buffer(framework, storage, batch_size, sequence_length)
        ways.append(Way(f"{framework} replay, sample()", made, 0, framework))
        ways.append(Way(f"{framework} replay, drawn ahead", _loader(framework, made), 1, framework))
    batch, lines, first, _ = measured(ways, seconds)
    slices = "" if sequence_length is None else f" slices of {sequence_length} steps"
    run = f"a replay buffer of {len(storage):,} rows, B={batch_size}{slices}"
    return BenchReport(
        {"name": opened.name, "rows": opened.rows, "seconds to open": opened.seconds},
        {"run": run, "rows written a second": rate, **batch},
        lines,
        first,
        None,
        0,
        [*map(drawing, lines[::2], lines[1::2]), *opened.costs],
    )


def _filled(opened: Opened, capacity: int, fields: Sequence[str] | None) -> tuple[ArrayStorage, float]:
    """A storage with the first rows, and how many were written a second."""
    rows = ReplayBuffer(opened.to_store(), batch_size=1).storage
    count = min(capacity, len(rows))
    storage = ArrayStorage(capacity, alignment=rows.alignment)
    buffer, seconds = ReplayBuffer(storage, batch_size=1), 0.0
    for first in range(0, count, _AT_ONCE):
        part = rows.get(np.arange(first, min(first + _AT_ONCE, count)))
        if fields is not None:
            unknown = [name for name in fields if name not in part]
            if unknown:
                raise ConfigError(f"fields: expected some of {sorted(part)}, found {unknown[0]!r}")
            part = {name: part[name] for name in fields}
        began = time.perf_counter()
        buffer.extend(part)
        seconds += time.perf_counter() - began
    return storage, count / max(seconds, 1e-9)


def _buffer(framework: str, storage: ArrayStorage, batch_size: int, sequence_length: int | None) -> Callable[[], Any]:
    kind = ReplayBuffer if framework == "numpy" else class_of(framework, "ReplayBuffer")
    sampler = None if sequence_length is None else SliceSampler(sequence_length=sequence_length)
    return lambda: kind(storage, sampler, batch_size=batch_size)


def _loader(framework: str, buffer: Callable[[], Any]) -> Callable[[], Any]:
    kind = class_of(framework, "PrefetchBatchifier")
    return lambda: kind(buffer(), prefetch=_PREFETCH, num_workers=1)
