"""The same windows over 100 million steps: python -m tests.bench.scale.

Two datasets of six columns in 1,000-row record batches: ten million steps in one file, and a hundred million in 64
files. Written to a folder with 27 GB to spare, measured with their pages cached and from a cold page cache, and put
into docs/assets/benchmarks-scale.json and the page that `make bench` writes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mouse_core import BatchSource, DatasetStore
from tests.bench import elsewhere, generate, larger
from tests.bench.child import ask
from tests.bench.floor import check_floor, floor, floor_name, pieces
from tests.bench.measuring import interleave, machine, quartiles_of
from tests.bench.pages import drop, read_whole
from tests.bench.results import Figure, Results, Table, contenders, figure_of, table_of
from tests.bench.show import page, picture, show, show_goals
from tests.bench.workloads import NARROW

ROOT = Path(__file__).resolve().parent.parent.parent
ASSETS = ROOT / "docs" / "assets"
_ROUNDS = 40
_COLD_BATCHES = 320
_TOGETHER = 32


@dataclass(frozen=True)
class Size:
    """A dataset: the key and title of its table, its steps and files."""

    key: str
    title: str
    rows: int
    files: int


def sizes(rows: int) -> Sequence[Size]:
    """One file, and 64 files of ten times as much."""
    return (
        Size("scale-one-file", f"{rows // 10:,} steps in one file of {rows // 10_000:,} record batches", rows // 10, 1),
        Size("scale-files", f"{rows:,} steps in 64 files, {rows // 1000:,} record batches", rows, 64),
    )


def main() -> None:
    """Write the datasets, measure, print, and put it into the documentation."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=100_000_000, help="steps of the larger dataset")
    parser.add_argument(
        "--data", type=Path, help="where the datasets are written and kept; by default they are removed"
    )
    parser.add_argument("--out", type=Path, help="where the results go; by default docs/, or out/bench/ for fewer rows")
    chosen = parser.parse_args()
    folder = chosen.data or Path(tempfile.mkdtemp(prefix="mouse-scale-"))
    out = chosen.out or (ROOT / "docs" if chosen.rows >= 100_000_000 else ROOT / "out" / "bench")
    try:
        results = run(folder, chosen.rows)
    finally:
        if chosen.data is None:
            shutil.rmtree(folder, ignore_errors=True)
    results.save(out / "assets" / "benchmarks-scale.json")
    found = out / "assets" / "benchmarks.json"
    if found.exists():
        whole = Results.load(found)
        whole.tables += results.tables
        whole.figures += results.figures
        (out / "benchmarks.md").write_text(page(whole), encoding="utf-8")
        picture(whole, out / "assets" / "benchmarks.svg")


def run(folder: Path, rows: int) -> Results:
    """Write what is not there yet, and measure it."""
    results = Results(machine(), {}, {"rows": rows})
    for size in sizes(rows):
        data = folder / f"{size.key}-{size.rows}"
        _need(folder, size)
        began = time.perf_counter()
        generate.write(generate.STATE, data, size.rows, files=size.files)
        print(f"{data.name}: written in {time.perf_counter() - began:.0f} s", flush=True)
        results.figures += _cold(data, size)
        results.figures += _first(data, size)
        results.tables += [_warm(data, size, batch_size) for batch_size in (32, 256)]
        for table in results.tables[-2:]:
            show(table)
        drop(data)
    results.figures += larger.figures(folder / f"larger-{rows // 6}", rows // 6)
    results.figures += elsewhere.figures(folder / f"elsewhere-{rows // 50}", rows // 50)
    for figure in results.figures:
        show(figure)
    show_goals(results)
    return results


def _need(folder: Path, size: Size) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = size.rows * 170, shutil.disk_usage(folder).free
    if free < needed:
        sys.exit(
            f"{folder}: needs {needed / 1e9:.0f} GB, found {free / 1e9:.0f} GB free; choose another place by --data"
        )


# ---------------------------------------------------------------------- measuring


def _warm(data: Path, size: Size, batch_size: int) -> Table:
    """Ours and the floor over the same windows, whose pages were all read once."""
    import datasets

    read_whole(data)
    dataset = datasets.load_from_disk(str(data))
    source = BatchSource(DatasetStore().from_dataset(dataset), 64, batch_size, dtypes=NARROW)
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
    timings = interleave(of, rounds=_ROUNDS, budget_seconds=4.0)
    key = size.key if batch_size == 32 else f"{size.key}-{batch_size}"
    notes = [
        "All pages of the files are in the page cache of the operating system. The times of new windows include the "
        "lookup of record batches that were not read before."
    ]
    return table_of(key, f"{size.title}, B={batch_size}, S=64", timings, nbytes=copied[0].nbytes, notes=notes)


def _cold(data: Path, size: Size) -> list[Figure]:
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
    return [
        Figure(f"{size.key}-cold-first", f"{size.rows:,} steps, cold: from_dataset to the first batch", first, "s"),
        figure_of(
            f"{size.key}-cold", f"{size.rows:,} steps, cold: a batch B=32, S=64", quartiles_of(seconds), "ms", 1e3
        ),
    ]


def _first(data: Path, size: Size) -> list[Figure]:
    """The first batch in a fresh process, with pages cached, and its private memory."""
    read_whole(data)
    found = ask("loaders", "report", data, "NumPy", 1_000)
    key, name = "scale" if size.files > 1 else size.key, f"{size.rows:,} steps"
    return [
        Figure(f"{key}-{what}", f"{name}: {said}", found[what], unit)
        for what, said, unit in (
            ("open", "datasets.load_from_disk", "s"),
            ("first", "from_dataset to the first batch", "s"),
            ("memory", "private memory added by the loader", "MB"),
            ("growth", "growth over 1,000 batches after that", "MB"),
        )
    ]


if __name__ == "__main__":
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    main()
