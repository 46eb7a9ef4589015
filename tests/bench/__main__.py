"""Measure everything and write it down: python -m tests.bench [--quick]."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mouse_core.bench import machine
from tests.bench import (
    appends,
    around,
    counting,
    disk,
    forests,
    loaders,
    maps,
    mixtures,
    on_device,
    on_device_torch,
    parts,
    ragged,
    replay,
    rollout_groups,
    rollouts,
    texts,
    workloads,
)
from tests.bench.results import Results, Table
from tests.bench.show import page, picture, show_figures, show_table
from tests.bench.workloads import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = (
    "mouse-data", "numpy", "pyarrow", "datasets", "pillow",
    "torch", "tensordict", "torchrl", "jax", "flashbax", "grain", "cpprb",
)  # fmt: skip


def main() -> None:
    """Measure, print, and write JSON, picture and page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, in under two minutes")
    parser.add_argument("--only", default="", help="measure only what has this in its name, for example state-32")
    parser.add_argument("--data", type=Path, help="where datasets are made and kept; by default they are removed")
    parser.add_argument(
        "--out", type=Path, help="where the page goes; by default docs/, or out/bench/ if not all is run"
    )
    chosen = parser.parse_args()
    whole = not (chosen.quick or chosen.only)
    out = chosen.out or (ROOT / "docs" if whole else ROOT / "out" / "bench")
    folder = chosen.data or Path(tempfile.mkdtemp(prefix="mouse-bench-"))
    try:
        results = run(_settings(folder, quick=chosen.quick), quick=chosen.quick, only=chosen.only)
    finally:
        if chosen.data is None:
            shutil.rmtree(folder, ignore_errors=True)
    publish(results, out)


def _settings(folder: Path, *, quick: bool) -> Settings:
    cores = int(machine()["cores"])
    if quick:
        return Settings(folder, rounds=9, budget=0.3, rows=1_000_000, images=8_000, cores=cores, quick=True)
    return Settings(folder, rounds=40, budget=2.0, rows=1_000_000, images=40_000, cores=cores, quick=False)


def run(settings: Settings, *, quick: bool, only: str) -> Results:
    """Measure all workloads, or those with `only` in their names."""
    import torch
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 140
    torch.set_num_threads(1)
    results = Results(machine(), _versions(), {"quick": quick, "rounds": settings.rounds, "rows": settings.rows})
    console.print(" · ".join(f"{name}: {value}" for name, value in results.machine.items()), style="dim")
    began = time.perf_counter()

    def add(name: str, make: Callable[[], Table | list[Table]]) -> None:
        if only not in name:
            return
        made = make()
        gc.collect()  # the peers' copies of the data
        for table in made if isinstance(made, list) else [made]:
            results.tables.append(table)
            show_table(console, table)
        console.print(f"  {time.perf_counter() - began:.0f} s", style="dim")

    for size in (32, 256, 1024):
        add(f"state-{size}-64", lambda size=size: workloads.state(settings, size, 64))  # type: ignore[misc]
    add("state-256-1", lambda: workloads.state(settings, 256, 1))
    for size in (32, 256):
        add(f"parts-{size}", lambda size=size: parts.table(settings, size))  # type: ignore[misc]
    for size in (32, 256):
        add(f"mixtures-{size}", lambda size=size: mixtures.table(settings, size))  # type: ignore[misc]
        add(f"around-{size}", lambda size=size: around.table(settings, size))  # type: ignore[misc]
    for size in (32, 256):
        add(f"ragged-{size}", lambda size=size: ragged.table(settings, size))  # type: ignore[misc]
    add("around-states-256", lambda: around.table(settings, 256, around.STATES))
    add("views", lambda: workloads.views(settings))
    add("discrete", lambda: workloads.discrete(settings))
    add("wide", lambda: workloads.wide(settings))
    add("images", lambda: workloads.raw_images(settings))
    add("png-84x84", lambda: workloads.png_images(settings, 84, 84, colour=False))
    add("png-210x160", lambda: workloads.png_images(settings, 210, 160, colour=True))
    add("statistics", lambda: counting.tables(settings))
    add("appends", lambda: appends.while_sampling(settings))
    add("replay", lambda: replay.tables(settings))
    add("on-device", lambda: on_device.tables(settings))
    add("on-device-torch", lambda: on_device_torch.tables(settings))
    add("maps", lambda: maps.tables(settings))
    add("forest", lambda: forests.tables(settings))
    add("rollouts", lambda: rollouts.tables(settings))
    add("rollout-groups", lambda: rollout_groups.tables(settings))
    add("texts", lambda: texts.tables(settings))
    if only in "loaders":
        tables, figures = loaders.overheads(settings)
        results.figures += figures
        add("loaders", lambda: tables)
    if only in "fresh":
        results.figures += loaders.in_fresh_processes(settings, 1_000 if quick else 10_000)
    if only in "append-rates":
        results.figures += appends.rates(settings)
    if only in "groups-memory":
        results.figures += rollout_groups.figures(settings)
    if only in "maps-memory":
        results.figures += maps.figures(settings)
    if only in "forest-memory":
        results.figures += forests.figures(settings)
    if only in "disk":
        results.figures += disk.figures(settings)
    results.machine["load average at the end"] = machine().get("load average", "")
    results.settings["seconds"] = round(time.perf_counter() - began)
    show_figures(console, results)
    return results


def publish(results: Results, out: Path) -> None:
    """Write the page, the picture and the JSON; what `make bench-scale` found stands in the same page."""
    scale = ROOT / "docs" / "assets" / "benchmarks-scale.json"
    results.save(out / "assets" / "benchmarks.json")
    if scale.exists():
        more = Results.load(scale)
        results.tables += more.tables
        results.figures += more.figures
    (out / "benchmarks.md").write_text(page(results), encoding="utf-8")
    picture(results, out / "assets" / "benchmarks.svg")
    print(f"written to {out / 'benchmarks.md'}, with JSON and a picture in {out / 'assets'}")


def _versions() -> dict[str, str]:
    found = {"Python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    # Quiet, and no devices that peers would look for.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    main()
