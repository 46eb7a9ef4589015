"""Benchmarks a dataset's batches in every installed framework, replay buffers, and loaders of the user."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mouse_core.batches.source import BatchSource
from mouse_core.bench.advice import Line, advise, drawing, workers_for_each
from mouse_core.bench.floor import pieces_of, plain_copies
from mouse_core.bench.measuring import Contender, Timing, interleave, machine, private_memory, steady
from mouse_core.bench.opening import Opened
from mouse_core.errors import ConfigError
from mouse_core.replay import ArrayStorage, ReplayBuffer, SliceSampler
from mouse_core.sampling.windows import Boundary
from mouse_core.spec import FieldSpec, check_count, check_list
from mouse_core.store.snapshot import Snapshot
from mouse_core.store.views import Store

FLOOR = "plain copy of the same bytes"
SOURCE = "source[i], no loader"
# For each framework, the package with its loader, and the module that this package needs. The core imports none of
# them.
PACKAGES = {"numpy": ("mouse_core", "numpy"), "torch": ("mouse_torch", "tensordict"), "jax": ("mouse_jax", "grain")}
_PREFETCH = 4
# Seconds from which on a batch counts as slow; fewer ways to load slow batches are tried.
_SLOW_SECONDS = 0.03
_PLANNED_WINDOWS = 32_768
_FLOOR_WINDOWS = 8192
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class FirstBatches:
    """The cost of the first batch of a loader or buffer.

    Args:
        first_seconds: Seconds from the store to the first batch.
        added_megabytes: Growth of private memory until shortly after the first batch; None if the system does not
            report it.
    """

    first_seconds: float
    added_megabytes: float | None


@dataclass(frozen=True)
class BenchReport:
    """The results of ``bench``.

    Args:
        dataset: Name and rows of the dataset, and seconds to open it.
        batch: Sequence length, batch size, megabytes delivered and stored, and dtypes by field.
        lines: One line for each way to get batches.
        first: The cost of the first batches, by name of the line.
        advice: Recommendations, one sentence each.
        decoding_share: The share of time spent decoding images; None without encoded images.
        from_disk: Pages read from disk during the measurement.
        machine: A description of the machine.
        reports: By name, each loader's report of its waiting times, in one line.
    """

    dataset: Mapping[str, Any]
    batch: Mapping[str, Any]
    lines: Sequence[Line]
    first: Mapping[str, FirstBatches]
    advice: Sequence[str]
    decoding_share: float | None = None
    from_disk: int = 0
    machine: Mapping[str, str] = field(default_factory=machine)
    reports: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return all results as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def _frameworks_of(frameworks: Sequence[str] | None) -> list[str]:
    """Return the requested frameworks, or all installed ones.

    Raises:
        ConfigError: A framework is unknown.
    """
    if frameworks is None:
        return [name for name, (_, needs) in PACKAGES.items() if importlib.util.find_spec(needs) is not None]
    frameworks = check_list("frameworks", frameworks)
    for name in frameworks:
        if name not in PACKAGES:
            raise ConfigError(f"frameworks: expected some of {list(PACKAGES)}, found {name!r}")
    return list(frameworks)


def _class_of(framework: str, name: str) -> Callable[..., Any]:
    """Return a framework's loader or buffer class; imported by name, because the core must not import frameworks.

    Raises:
        ConfigError: The framework is not installed.
    """
    try:
        made: Callable[..., Any] = getattr(importlib.import_module(PACKAGES[framework][0]), name)
    except ImportError as error:
        raise ConfigError(f"frameworks: expected {framework} to be installed: {error}") from error
    return made


# ---------------------------------------------------------------------- batches of a dataset


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
        sequence_length, batch_size, fields, dtypes, sampling, boundary, windows: The options of a loader.
        frameworks: Names among "numpy", "torch" and "jax"; by default all installed ones.
        seconds: Approximate duration of the measurement.

    Raises:
        ConfigError: A framework is unknown or not installed; or an error of ``BatchSource``.
    """
    loaders = {name: _class_of(name, "PrefetchBatchifier") for name in _frameworks_of(frameworks)}
    options: dict[str, Any] = {"sequence_length": sequence_length, "batch_size": batch_size, "fields": fields}
    options |= {"dtypes": dtypes, "sampling": sampling, "boundary": boundary, "windows": windows}
    store = opened.to_store()
    source = BatchSource(store, **options)
    delivered = sum(values.nbytes for values in source[0].values())
    stored = source.batch_size * source.sequence_length * _bytes_of_step(source.spec.values())
    each = _seconds(source.__getitem__)
    slow = each > _SLOW_SECONDS
    # Many batches are planned at a time; if this matters, they are measured together.
    planned = max(1, min(_PLANNED_WINDOWS // source.batch_size, int(_SLOW_SECONDS / each)))
    # Windows with different steps for each field have no floor.
    copies = _floor(source) if windows is None else None
    fixed = [] if copies is None else [Contender(FLOOR, copies, "floor", multiple=planned)]
    fixed.append(Contender(SOURCE, source.__getitem__, "ours", wall=slow, multiple=planned))
    prefetch, cores = 2 if slow else _PREFETCH, int(machine()["cores"])

    def way(framework: str, workers: int) -> _Way:
        def make() -> Any:
            return loaders[framework](opened.to_store(), prefetch=prefetch, num_workers=workers, **options)

        name, multiple = f"{framework} loader, num_workers={workers}", 2 * workers if slow else planned
        return _Way(name, make, workers, framework, multiple, prefetch, slow)

    ways = []
    for framework in loaders:
        tried = [0, 1, 2] if not slow else sorted({1, max(2, cores)} if framework == "numpy" else {2})
        ways += [way(framework, workers) for workers in tried]
    faults = _disk_reads()
    _, lines, first, reports, _ = _measured(ways, seconds, fixed, floor_bytes=stored, nbytes=delivered)
    faults = _disk_reads() - faults
    decoding = _decoding_share(store, source, options)
    snapshot = source.snapshot
    indexed = type(snapshot) is Snapshot and any(segment.has_indices for segment in snapshot.segments)
    return BenchReport(
        _dataset_of(opened),
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
        advise(lines, source, decoding=decoding, faults=faults, indexed=indexed, layout=opened.costs),
        decoding,
        faults,
        reports=reports,
    )


def _dataset_of(opened: Opened) -> dict[str, Any]:
    return {"name": opened.name, "rows": opened.rows, "seconds to open": opened.seconds}


def _seconds(take: Callable[[int], Any]) -> float:
    """Return the seconds of the faster of two batches."""
    found = []
    for number in (1, 2):
        began = time.perf_counter()
        take(number)
        found.append(time.perf_counter() - began)
    return min(found)


def _floor(source: BatchSource) -> Callable[[int], None] | None:
    """Return a function that copies the stored values of batches; None if these are not plain numbers in memory."""
    if type(source.snapshot) is not Snapshot:  # mixtures of stores have none
        return None
    fields = {name: spec for name, spec in source.spec.items() if spec.column}  # a mask is computed, not copied
    batches = []
    for index in range(max(4, _FLOOR_WINDOWS // source.batch_size)):
        plan = source.plan(index)
        batches.append(pieces_of(source.snapshot, fields, plan.starts, plan.length, plan.lengths))
        steps = len(plan.starts) * plan.length if plan.lengths is None else int(plan.lengths.sum())
        if batches[-1].nbytes != steps * _bytes_of_step(fields.values()):
            return None
    return plain_copies(batches)


def _line_of(timing: Timing, timings: Sequence[Timing], kinds: Mapping[str, tuple[str, int]], nbytes: int) -> Line:
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


def _bytes_of_step(specs: Iterable[FieldSpec]) -> int:
    """Return the stored bytes of a step."""
    return sum(math.prod(spec.shape) * spec.stored_dtype.itemsize for spec in specs)


def _decoding_share(store: Store, source: BatchSource, options: Mapping[str, Any]) -> float | None:
    """Return the share of a batch's time that decoding its image fields takes."""
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
    """Return the number of page faults of this process that waited for a disk."""
    if os.name != "posix":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


# ---------------------------------------------------------------------- whatever gives batches


def bench_own(opened: Opened, make: Callable[..., Any], *, name: str, seconds: float = 10.0) -> BenchReport:
    """Measure a loader, buffer or iterable that a function of the user creates from a dataset.

    Args:
        opened: The dataset.
        make: Called with the dataset's store; returns an object with ``next_batch()`` or ``sample()``, or an iterable.
            If the function has a parameter ``num_workers``, the values 0, 1 and 2 are tried.
        name: Name of the function in the report.
        seconds: Approximate duration of the measurement.

    Returns:
        The report, without a floor, because it is unknown how batches are created.

    Raises:
        ConfigError: The function returns another object.
    """
    tried: list[int | None] = [0, 1, 2] if "num_workers" in inspect.signature(make).parameters else [None]

    def way(workers: int | None) -> _Way:
        options = {} if workers is None else {"num_workers": workers}
        label = name if workers is None else f"{name}, num_workers={workers}"
        return _Way(label, lambda: make(opened.to_store(), **options), workers)

    ways = [way(workers) for workers in tried]
    batch, lines, first, reports, drawn = _measured(ways, seconds)
    advice = [drawing(line) for line in lines if line.name in drawn]
    advice += workers_for_each([line for line in lines if line.name not in drawn])
    advice += opened.costs
    return BenchReport(_dataset_of(opened), {"run": name, **batch}, lines, first, advice, reports=reports)


class _Way(NamedTuple):
    """A way to get batches.

    Args:
        name: Its name.
        make: Creates the loader, buffer or iterable.
        workers: Number of threads of the loader; None if unknown.
        framework: "numpy", "torch" or "jax"; None if unknown.
        multiple: Number of batches that are measured together; None: as many as take a short time.
        prefetch: Number of batches that a loader with threads prepares.
        wall: Whether the wall-clock time counts, as for a loader with processes; otherwise it counts only if batches
            are slow.
    """

    name: str
    make: Callable[[], Any]
    workers: int | None = None
    framework: str | None = None
    multiple: int | None = None
    prefetch: int = _PREFETCH
    wall: bool = False


def _measured(
    ways: Sequence[_Way],
    seconds: float,
    fixed: Sequence[Contender] = (),
    *,
    floor_bytes: int = 0,
    nbytes: int | None = None,
) -> tuple[dict[str, Any], list[Line], dict[str, FirstBatches], dict[str, str], set[str]]:
    """Create several ways to get batches, and measure them in turns.

    Args:
        ways: The ways; objects with ``close()`` are closed.
        seconds: The approximate duration.
        fixed: Further contenders.
        floor_bytes: Bytes of a batch of the floor.
        nbytes: Bytes of a batch; None: the bytes of the first way's batches.

    Returns:
        Megabytes and fields of a batch; the lines; by name the costs of first batches and the reports of loaders; and
        the names of the replay buffers.

    Raises:
        ConfigError: A way returns no batches.
    """
    contenders, kinds, drawn = list(fixed), dict[str, tuple[str, int]](), set[str]()
    made, first, batches = dict[str, Any](), dict[str, FirstBatches](), []
    try:
        for way in ways:
            gc.collect()
            before, began = private_memory(), time.perf_counter()
            loader = made[way.name] = way.make()
            take = _taker(loader, way.name)
            if not hasattr(loader, "next_batch") and hasattr(loader, "sample"):
                drawn.add(way.name)
            batches.append(take(0))
            taken = time.perf_counter() - began
            each = _seconds(take)
            after = private_memory()
            first[way.name] = FirstBatches(taken, None if None in (before, after) else (after - before) / 1e6)  # type: ignore[operator]
            kinds[way.name] = way.framework or _framework_of(loader), way.workers or 0
            together = way.multiple or max(1, min(256, int(_SLOW_SECONDS / max(each, 1e-6))))
            wall = way.wall or each > _SLOW_SECONDS
            contender = Contender(way.name, partial(_wait, take), "ours", wall=wall, multiple=together)
            contenders.append(steady(contender, way.prefetch) if way.workers else contender)
        started = {name: loader.report() for name, loader in made.items() if hasattr(loader, "report")}
        rounds = max(5, min(60, int(seconds / 0.008 / len(contenders))))
        timings = interleave(contenders, rounds=rounds, budget_seconds=seconds / len(contenders))
        reports = {name: (made[name].report() - report).line() for name, report in started.items()}
    finally:
        for loader in made.values():
            close = getattr(loader, "close", None)
            if close is not None:
                close()
    fields = dict(_leaves(batches[0]))
    size = sum(int(one.nbytes) for one in fields.values()) if nbytes is None else nbytes
    lines = [_line_of(one, timings, kinds, floor_bytes if one.contender.name == FLOOR else size) for one in timings]
    batch = {"megabytes": size / 1e6, "fields": {key: _described(one) for key, one in fields.items()}}
    return batch, lines, first, reports, drawn


def _taker(loader: Any, name: str) -> Callable[[int], Any]:
    """Return a function that takes the loader's next batch."""
    for method in ("next_batch", "sample"):
        found = getattr(loader, method, None)
        if callable(found):
            return lambda number: found()
    if isinstance(loader, Iterable):
        batches = _endless(loader, name)
        return lambda number: next(batches)
    raise ConfigError(f"{name}: expected something with next_batch or sample, or to iterate over, found {loader!r:.80}")


def _endless(loader: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the batches of an iterable, again and again."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError(f"{name}: expected batches, found none")


def _wait(take: Callable[[int], Any], number: int = 0) -> None:
    """Take a batch, and wait until its arrays are computed."""
    for _, values in _leaves(take(number)):
        if hasattr(values, "block_until_ready"):
            values.block_until_ready()


def _leaves(batch: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return the arrays of a batch by name; names of nested arrays are joined by dots."""
    if isinstance(batch, tuple | list):
        batch = {str(place): one for place, one in enumerate(batch)}
    if isinstance(batch, Mapping) or (hasattr(batch, "items") and hasattr(batch, "keys")):  # for example a TensorDict
        for name, one in batch.items():
            yield from _leaves(one, f"{prefix}{name}.")
    elif hasattr(batch, "nbytes") and hasattr(batch, "shape"):
        yield prefix.rstrip(".") or "batch", batch


def _described(array: Any) -> str:
    return f"{str(array.dtype).removeprefix('torch.')} {list(array.shape)}"


def _framework_of(loader: Any) -> str:
    """Return the framework whose package defines a loader."""
    package = type(loader).__module__.split(".")[0]
    return next((name for name, (one, _) in PACKAGES.items() if one == package), "numpy")


# ---------------------------------------------------------------------- replay buffers


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
    """Measure draws from a replay buffer in memory, filled with a dataset's rows.

    Args:
        opened: The dataset.
        capacity: Capacity of the buffer in rows; the first rows of the dataset are written, as many as fit.
        batch_size: Number of rows, or slices, in a batch.
        sequence_length: Number of steps of slices within episodes; None: single rows.
        fields: Names of the fields to write; by default all.
        frameworks: Names among "numpy", "torch" and "jax"; by default all installed ones.
        seconds: Approximate duration of the measurement.

    Returns:
        The report, without a floor. Batches that are drawn in advance have the rows of some batches before.

    Raises:
        ConfigError: A field does not exist, a number is out of range, or a framework is not installed.
    """
    chosen = _frameworks_of(frameworks)
    storage, rate = _filled(opened, check_count("capacity", capacity), fields)

    def ways(framework: str) -> tuple[_Way, _Way]:
        kind = ReplayBuffer if framework == "numpy" else _class_of(framework, "ReplayBuffer")
        sampler = None if sequence_length is None else SliceSampler(sequence_length=sequence_length)
        ahead = _class_of(framework, "PrefetchBatchifier")

        def make() -> Any:
            return kind(storage, sampler, batch_size=batch_size)

        return (
            _Way(f"{framework} replay, sample()", make, 0, framework),
            _Way(
                f"{framework} replay, drawn ahead",
                lambda: ahead(make(), prefetch=_PREFETCH, num_workers=1),
                1,
                framework,
            ),
        )

    every = [way for framework in chosen for way in ways(framework)]
    batch, lines, first, reports, _ = _measured(every, seconds)
    slices = "" if sequence_length is None else f" slices of {sequence_length} steps"
    run = f"a replay buffer of {len(storage):,} rows, B={batch_size}{slices}"
    advice = [*map(drawing, lines[::2], lines[1::2]), *opened.costs]
    batch |= {"run": run, "rows written a second": rate}
    return BenchReport(_dataset_of(opened), batch, lines, first, advice, reports=reports)


def _filled(opened: Opened, capacity: int, fields: Sequence[str] | None) -> tuple[ArrayStorage, float]:
    """Return a storage with the first rows, and the number of rows that were written per second."""
    rows = ReplayBuffer(opened.to_store(), batch_size=1).storage
    count = min(capacity, len(rows))
    storage = ArrayStorage(capacity, alignment=rows.alignment)
    buffer, seconds = ReplayBuffer(storage, batch_size=1), 0.0
    for first in range(0, count, _ROWS_AT_ONCE):
        part = rows.get(np.arange(first, min(first + _ROWS_AT_ONCE, count)))
        if fields is not None:
            unknown = [name for name in fields if name not in part]
            if unknown:
                raise ConfigError(f"fields: expected some of {sorted(part)}, found {unknown[0]!r}")
            part = {name: part[name] for name in fields}
        began = time.perf_counter()
        buffer.extend(part)
        seconds += time.perf_counter() - began
    return storage, count / max(seconds, 1e-9)
