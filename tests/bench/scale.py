"""The same windows over 100 million steps.

Two datasets of six columns in 1,000-row record batches: ten million steps in one file, and a hundred million in 64
files; measured with their pages cached and from a cold page cache.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from mouse_core import BatchSource, DatasetStore
from tests.bench import elsewhere, generate, larger
from tests.bench.child import ask
from tests.bench.floor import check_floor, floor, floor_name, pieces
from tests.bench.measuring import interleave, quartiles_of
from tests.bench.pages import drop, read_whole
from tests.bench.results import Figure, Settings, Table, contenders, figure_of, table_of
from tests.bench.workloads import NARROW, store_of

_COLD_BATCHES = 320
_TOGETHER = 32


def found(settings: Settings, key: str) -> list[Table | Figure]:
    """All about one of the two datasets, which is written if it is not there."""
    rows, files = (settings.rows // 10, 1) if key == "scale-one-file" else (settings.rows, 64)
    data, began = settings.folder / f"{key}-{rows}", time.perf_counter()
    _need(settings.folder, rows)
    generate.write(generate.STATE, data, rows, files=files)
    print(f"{data.name}: written in {time.perf_counter() - began:.0f} s", flush=True)
    of = f"{rows:,} steps in " + (f"one file of {rows // 1000:,}" if files == 1 else f"64 files, {rows // 1000:,}")
    measured: list[Table | Figure] = [*_cold(data, key, rows), *_first(data, key if files == 1 else "scale", rows)]
    for batch_size in (32, 256):
        whole = key if batch_size == 32 else f"{key}-{batch_size}"
        measured.append(_warm(settings, data, whole, f"{of} record batches, B={batch_size}, S=64", batch_size))
    drop(data)
    return measured


def larger_than_memory(settings: Settings) -> list[Figure]:
    """Data that are larger than memory."""
    rows = settings.rows // 6
    return larger.figures(settings.folder / f"larger-{rows}", rows)


def away(settings: Settings) -> list[Figure]:
    """Data on an object storage that is 20 ms away."""
    rows = settings.rows // 50
    return list(elsewhere.figures(settings.folder / f"elsewhere-{rows}", rows))


def _need(folder: Path, rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = rows * 170, shutil.disk_usage(folder).free
    if free < needed:
        sys.exit(
            f"{folder}: needs {needed / 1e9:.0f} GB, found {free / 1e9:.0f} GB free; choose another place by --data"
        )


# ---------------------------------------------------------------------- measuring


def _warm(settings: Settings, data: Path, key: str, title: str, batch_size: int) -> Table:
    """Ours and the floor over the same windows, whose pages were all read once."""
    read_whole(data)
    source = BatchSource(store_of(data), 64, batch_size, dtypes=NARROW)
    # More than ours plans together and keeps, so that it has to plan them again and again.
    count = 131_072 // batch_size
    copied = [pieces(source, index) for index in range(count)]
    check_floor(source, copied[1], 1)
    calls = {
        floor_name(): floor(copied),
        # The same batches again and again, as the floor has them: other windows would be in other states of cache.
        "mouse source[i]": lambda number: source[number % count],
        "mouse source[i], new windows in every batch": source.__getitem__,
    }
    of = contenders(calls, first="floor", multiple=max(1, 32_768 // batch_size))
    notes = [
        "All pages of the files are in the page cache of the operating system. The times of new windows include the "
        "lookup of record batches that were not read before."
    ]
    timings = interleave(of, rounds=settings.rounds, budget_seconds=2 * settings.budget)
    return table_of(key, title, timings, nbytes=copied[0].nbytes, notes=notes)


def _cold(data: Path, key: str, rows: int) -> list[Figure]:
    """Batches whose pages are not in the page cache."""
    import datasets

    dataset = datasets.load_from_disk(str(data))
    drop(data)  # after opening, which looks at the head of every record batch
    began = time.perf_counter()
    source = BatchSource(DatasetStore().from_dataset(dataset), 64, 32, dtypes=NARROW, seed=9)
    source[0]
    first = time.perf_counter() - began
    seconds = []
    for first_of_turn in range(1, _COLD_BATCHES, _TOGETHER):
        # Batches that are asked for in turn may be copied together.
        began = time.perf_counter()
        for index in range(first_of_turn, first_of_turn + _TOGETHER):
            source[index]
        seconds.append((time.perf_counter() - began) / _TOGETHER)
    name = f"{rows:,} steps, cold"
    return [
        Figure(f"{key}-cold-first", f"{name}: from_dataset to the first batch", first, "s"),
        figure_of(f"{key}-cold", f"{name}: a batch B=32, S=64", quartiles_of(seconds), "ms", 1e3),
    ]


def _first(data: Path, key: str, rows: int) -> list[Figure]:
    """The first batch in a fresh process, with pages cached, and its private memory."""
    read_whole(data)
    said = ask("loaders", "report", data, "NumPy", 1_000)
    return [
        Figure(f"{key}-{what}", f"{rows:,} steps: {name}", said[what], unit)
        for what, name, unit in (
            ("open", "datasets.load_from_disk", "s"),
            ("first", "from_dataset to the first batch", "s"),
            ("memory", "private memory added by the loader", "MB"),
            ("growth", "growth over 1,000 batches after that", "MB"),
        )
    ]
