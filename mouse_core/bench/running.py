"""Benchmark of a dataset's batches in every installed framework, with recommendations."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.batches.source import BatchSource
from mouse_core.bench.advice import Line, advise
from mouse_core.bench.floor import ColumnAddresses, Pieces, plain_copies
from mouse_core.bench.frameworks import class_of, frameworks_of
from mouse_core.bench.measuring import Contender, Timing, interleave, machine, private_memory, steady
from mouse_core.bench.opening import Opened
from mouse_core.sampling.windows import Boundary
from mouse_core.store.views import Store

FLOOR = "plain copy of the same bytes"
SOURCE = "source[i], no loader"
_PREFETCH = 4
# From here on a batch counts as slow, and fewer ways to load it are tried.
_SLOW_SECONDS = 0.03
_PLANNED_WINDOWS = 32_768
_FLOOR_WINDOWS = 8192


@dataclass(frozen=True)
class FirstBatches:
    """The cost of the first batches of a framework's loader.

    Args:
        first_seconds: Seconds from ``from_dataset`` to the first batch.
        added_megabytes: Private memory added until shortly after the first batch; None if the system does not tell.
        grown_megabytes: Growth of private memory over the batches after that.
    """

    first_seconds: float
    added_megabytes: float | None
    grown_megabytes: float | None


@dataclass(frozen=True)
class BenchReport:
    """The results of ``bench``.

    Args:
        dataset: Name and rows of the dataset, and seconds to open it.
        batch: Sequence length, batch size, megabytes delivered and stored, and dtypes by field.
        lines: One line for each way to get batches.
        first: The cost of the first batches, by framework.
        decoding_share: The share of time spent decoding images; None without encoded images.
        from_disk: Pages read from disk during the measurement.
        advice: Recommendations, one sentence each.
        machine: A description of the machine.
        reports: Each loader's report of its waiting times, in one line, by name.
    """

    dataset: Mapping[str, Any]
    batch: Mapping[str, Any]
    lines: Sequence[Line]
    first: Mapping[str, FirstBatches]
    decoding_share: float | None
    from_disk: int
    advice: Sequence[str]
    machine: Mapping[str, str] = field(default_factory=machine)
    reports: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


# ---------------------------------------------------------------------- measuring


def bench(
    opened: Opened,
    *,
    sequence_length: int | None = None,
    batch_size: int = 32,
    fields: Sequence[str] | None = None,
    dtypes: Mapping[str, npt.DTypeLike] | None = None,
    frameworks: Sequence[str] | None = None,
    sampling: str = "random",
    boundary: Boundary = "stream",
    windows: Mapping[str, Sequence[int]] | None = None,
    seconds: float = 10.0,
) -> BenchReport:
    """Measure batches of a dataset.

    Args:
        opened: The dataset.
        sequence_length, batch_size, fields, dtypes, sampling, boundary, windows: As for a loader.
        frameworks: Of "numpy", "torch" and "jax"; by default those that are installed.
        seconds: How long to measure, about.

    Raises:
        ConfigError: An unknown framework or one that is not installed; else see ``BatchSource``.
    """
    loaders = {name: class_of(name, "PrefetchBatchifier") for name in frameworks_of(frameworks)}
    options: dict[str, Any] = {
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "fields": fields,
        "dtypes": dtypes,
    }
    options |= {"sampling": sampling, "boundary": boundary, "windows": windows}
    store = opened.to_store()
    source = BatchSource(store, **options)
    first = {name: _first_batches(opened, make, options, seconds / 20) for name, make in loaders.items()}
    batch = source[0]
    seconds_each = min(_seconds(source, index) for index in (1, 2))
    contenders, kinds, open_loaders = _contenders(opened, store, source, loaders, options, seconds_each)
    faults = _disk_reads()
    before = {name: loader.report() for name, loader in zip(kinds, open_loaders, strict=True)}
    rounds = max(5, int(seconds / 0.008 / len(contenders)))
    timings = interleave(contenders, rounds=min(rounds, 60), budget_seconds=seconds / len(contenders))
    faults = _disk_reads() - faults
    reports = {name: (loader.report() - before[name]).line() for name, loader in zip(kinds, open_loaders, strict=True)}
    for loader in open_loaders:
        loader.close()
    delivered, stored = sum(values.nbytes for values in batch.values()), _stored_bytes(source)
    lines = [line_of(one, timings, kinds, stored if one.contender.name == FLOOR else delivered) for one in timings]
    decoding = _decoding_share(store, source, options)
    indexed = any(part._indices is not None for part in opened.parts.values())
    return BenchReport(
        {"name": opened.name, "rows": opened.rows, "seconds to open": opened.seconds},
        {
            "sequence_length": None if windows is not None and sequence_length is None else source.sequence_length,
            "batch_size": batch_size,
            "sampling": sampling,
            "boundary": boundary,
            "windows": None if windows is None else {name: list(offsets) for name, offsets in windows.items()},
            "megabytes": delivered / 1e6,
            "megabytes stored": stored / 1e6,
            "fields": {name: f"{spec.dtype} {list(spec.shape)}" for name, spec in source.spec.items()},
        },
        lines,
        first,
        decoding,
        faults,
        advise(lines, source, decoding=decoding, faults=faults, indexed=indexed, layout=opened.costs),
        reports=reports,
    )


def _seconds(source: BatchSource, index: int) -> float:
    began = time.perf_counter()
    source[index]
    return time.perf_counter() - began


def _first_batches(
    opened: Opened, make: Callable[..., Any], options: Mapping[str, Any], seconds: float
) -> FirstBatches:
    gc.collect()
    before = private_memory()
    began = time.perf_counter()
    loader = make(opened.to_store(), prefetch=_PREFETCH, **options)
    try:
        _next_ready(loader)
        first = time.perf_counter() - began
        for _ in range(2 * _PREFETCH):
            _next_ready(loader)
        added = private_memory()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            _next_ready(loader)
        after = private_memory()
    finally:
        loader.close()
    if before is None or added is None or after is None:
        return FirstBatches(first, None, None)
    return FirstBatches(first, (added - before) / 1e6, (after - added) / 1e6)


def _next_ready(loader: Any, number: int = 0) -> None:
    """Take a batch, and wait until arrays that are still being made are there."""
    for values in loader.next_batch().values():
        if hasattr(values, "block_until_ready"):
            values.block_until_ready()


def _contenders(
    opened: Opened,
    store: Store,
    source: BatchSource,
    loaders: Mapping[str, Callable[..., Any]],
    options: Mapping[str, Any],
    seconds: float,
) -> tuple[list[Contender], dict[str, tuple[str, int]], list[Any]]:
    """Return the contenders, the framework and number of workers of each, and the loaders to close."""
    slow = seconds > _SLOW_SECONDS
    # Batches are planned many at a time; where that counts, they are measured together.
    planned = max(1, min(_PLANNED_WINDOWS // source.batch_size, int(_SLOW_SECONDS / seconds)))
    # The steps of windows by field are not those of one stretch.
    copies = _floor(opened, source) if options["windows"] is None else None
    contenders = [] if copies is None else [Contender(FLOOR, copies, "floor", multiple=planned)]
    contenders.append(Contender(SOURCE, source.__getitem__, "ours", wall=slow, multiple=planned))
    kinds: dict[str, tuple[str, int]] = {}
    made = []
    cores = int(machine()["cores"])
    for framework, make in loaders.items():
        workers_tried = [0, 1, 2] if not slow else sorted({1, max(2, cores)} if framework == "numpy" else {2})
        for workers in workers_tried:
            prefetch = 2 if slow else _PREFETCH
            loader = make(store, prefetch=prefetch, num_workers=workers, **options)
            made.append(loader)
            name = f"{framework} loader, num_workers={workers}"
            kinds[name] = framework, workers
            together = 2 * workers if slow else planned
            contender = Contender(name, partial(_next_ready, loader), "ours", wall=slow, multiple=together)
            contenders.append(steady(contender, prefetch) if workers else contender)
    return contenders, kinds, made


def _floor(opened: Opened, source: BatchSource) -> Callable[[int], None] | None:
    """Copies random windows of the stored values; None where some field's are not plain numbers side by side."""
    columns = _columns(opened, source)
    if columns is None:
        return None
    rng, rows = np.random.default_rng(0), opened.rows
    batches = []
    for _ in range(max(4, _FLOOR_WINDOWS // source.batch_size)):
        starts = rng.integers(0, rows - source.sequence_length + 1, source.batch_size)
        parts = [pieces for column in columns if (pieces := column.pieces(starts, source.sequence_length)) is not None]
        if len(parts) < len(columns):
            return None
        batches.append(Pieces.of_columns(parts))
    return plain_copies(batches)


def _columns_of_folder(source: BatchSource, names: Sequence[str]) -> list[ColumnAddresses] | None:
    segments = source.snapshot.segments  # which the source keeps where they are
    if any(name not in one.types for one in segments for name in names):
        return None
    sizes = [size for one in segments for size in np.diff(one.chunk_starts).tolist()]
    places = [(one, number) for one in segments for number in range(len(one.chunk_starts) - 1)]

    def chunk(name: str, number: int) -> Any:
        segment, local = places[number]
        return segment.part(name).chunk(local)

    return [ColumnAddresses(partial(chunk, name), sizes) for name in names]


def _columns(opened: Opened, source: BatchSource) -> list[ColumnAddresses] | None:
    """Return the addresses of each field's rows; None if a column is missing or not in local memory."""
    names = [spec.column for spec in source.spec.values() if spec.column]  # a mask is made, not copied
    if opened.folder is not None:
        return _columns_of_folder(source, names)
    tables = [part.data.table for part in opened.parts.values()]
    if not tables or any(name not in table.schema.names for table in tables for name in names):
        return None
    return [ColumnAddresses([chunk for table in tables for chunk in table.column(name).chunks]) for name in names]


def line_of(timing: Timing, timings: Sequence[Timing], kinds: Mapping[str, tuple[str, int]], nbytes: int) -> Line:
    """Return the report line of one way to get batches.

    Args:
        timing: The measurement, an element of ``timings``.
        timings: All measurements; the floor, if measured, comes first.
        kinds: Framework and number of workers by name.
        nbytes: Bytes of a batch.
    """
    framework, workers = kinds.get(timing.contender.name, ("", None))
    low, middle, high = timing.quartiles
    floor = timings[0] if timings[0].contender.kind == "floor" else None
    return Line(
        timing.contender.name,
        framework,
        workers,
        1 / middle,
        nbytes / middle / 1e9,
        None if floor is None else 1 / timing.ratio(floor)[1],
        (1e3 * low, 1e3 * middle, 1e3 * high),
    )


def _stored_bytes(source: BatchSource) -> int:
    steps = source.batch_size * source.sequence_length
    return sum(
        steps * int(np.prod(spec.shape, dtype=np.int64)) * spec.stored_dtype.itemsize for spec in source.spec.values()
    )


def _decoding_share(store: Store, source: BatchSource, options: Mapping[str, Any]) -> float | None:
    """Return the share of a batch's time that its encoded image fields cost."""
    from mouse_core._arrow.column_types import column_type

    types = {name: column_type(data_type) for name, data_type in store.columns.items()}
    read = {name: types[spec.column] for name, spec in source.spec.items() if spec.column in types}  # no masks
    plain = [name for name, kind in read.items() if not kind.is_encoded]
    if len(plain) == len(read) or not plain:
        return None if plain else 1.0
    dtypes = {name: dtype for name, dtype in (options["dtypes"] or {}).items() if name in plain}
    windows = options["windows"]
    if windows is not None:
        windows = {name: offsets for name, offsets in windows.items() if name in plain}
    without = BatchSource(store, **{**options, "fields": plain, "dtypes": dtypes, "windows": windows})
    whole, rest = interleave(
        [Contender("all", source.__getitem__), Contender("without", without.__getitem__)], rounds=5, budget_seconds=1.0
    )
    return max(0.0, 1 - rest.ratio(whole)[1])


def _disk_reads() -> int:
    """Pages that this process has waited for a disk to deliver."""
    if os.name != "posix":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
