"""Measure everything and write it down: python -m tests.bench [--quick].

Replay on devices is measured on a GPU, where JAX or torch has one: python -m tests.bench --only on-device. Nothing else
is imported for it than what is compared. Its JSON, as docs/assets/benchmarks-on-device.json, becomes part of the page.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mouse_core.bench import machine
from tests.bench.results import Results, Table
from tests.bench.settings import Settings
from tests.bench.show import console_or_none, page, picture, show_figures, show_table, show_text

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = (
    "mouse-data", "numpy", "pyarrow", "datasets", "pillow",
    "torch", "tensordict", "torchrl", "jax", "flashbax", "grain", "cpprb",
)  # fmt: skip
ON_DEVICE = "on-device"


class _Work:
    """The modules of this package, each imported when it is needed."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"tests.bench.{name}")


def main() -> None:
    """Measure, print, and write JSON, picture and page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, in under two minutes")
    parser.add_argument("--only", default="", help="measure only what has this in its name, for example state-32")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page anew from its JSON")
    parser.add_argument("--data", type=Path, help="where datasets are made and kept; by default they are removed")
    parser.add_argument(
        "--out", type=Path, help="where the page goes; by default docs/, or out/bench/ if not all is run"
    )
    chosen = parser.parse_args()
    if chosen.page:
        publish(Results.load(ROOT / "docs" / "assets" / "benchmarks.json"), chosen.out or ROOT / "docs")
        return
    # Quiet, and no devices that peers would look for, but where they are what is measured.
    if not chosen.only.startswith(ON_DEVICE):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
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

    console, work = console_or_none(), _Work()
    torch.set_num_threads(1)
    results = Results(machine(), _versions(), {"quick": quick, "rounds": settings.rounds, "rows": settings.rows})
    if only.startswith(ON_DEVICE):
        results.machine["JAX computes on"] = work.on_device.device_name()
        results.machine["torch computes on"] = work.on_device_torch.device_name()
    show_text(console, " · ".join(f"{name}: {value}" for name, value in results.machine.items()))
    began = time.perf_counter()

    def add(name: str, make: Callable[[], Table | list[Table]]) -> None:
        if only not in name:
            return
        made = make()
        gc.collect()  # the peers' copies of the data
        for table in made if isinstance(made, list) else [made]:
            results.tables.append(table)
            show_table(console, table)
        show_text(console, f"  {time.perf_counter() - began:.0f} s")

    for size in (32, 256, 1024):
        add(f"state-{size}-64", lambda size=size: work.workloads.state(settings, size, 64))  # type: ignore[misc]
    add("state-256-1", lambda: work.workloads.state(settings, 256, 1))
    for size in (32, 256):
        add(f"parts-{size}", lambda size=size: work.parts.table(settings, size))  # type: ignore[misc]
    for size in (32, 256):
        add(f"mixtures-{size}", lambda size=size: work.mixtures.table(settings, size))  # type: ignore[misc]
        add(f"around-{size}", lambda size=size: work.around.table(settings, size))  # type: ignore[misc]
    for size in (32, 256):
        add(f"ragged-{size}", lambda size=size: work.ragged.table(settings, size))  # type: ignore[misc]
    add("around-states-256", lambda: work.around.table(settings, 256, work.around.STATES))
    add("views", lambda: work.workloads.views(settings))
    add("discrete", lambda: work.workloads.discrete(settings))
    add("wide", lambda: work.workloads.wide(settings))
    add("images", lambda: work.workloads.raw_images(settings))
    add("png-84x84", lambda: work.workloads.png_images(settings, 84, 84, colour=False))
    add("png-210x160", lambda: work.workloads.png_images(settings, 210, 160, colour=True))
    add("statistics", lambda: work.counting.tables(settings))
    add("appends", lambda: work.appends.while_sampling(settings))
    add("replay", lambda: work.replay.tables(settings))
    add("on-device", lambda: work.on_device.tables(settings))
    add("on-device-torch", lambda: work.on_device_torch.tables(settings))
    add("maps", lambda: work.maps.tables(settings))
    add("forest", lambda: work.forests.tables(settings))
    add("rollouts", lambda: work.rollouts.tables(settings))
    add("rollout-groups", lambda: work.rollout_groups.tables(settings))
    add("texts", lambda: work.texts.tables(settings))
    if only in "loaders":
        tables, figures = work.loaders.overheads(settings)
        results.figures += figures
        add("loaders", lambda: tables)
    if only in "fresh":
        results.figures += work.loaders.in_fresh_processes(settings, 1_000 if quick else 10_000)
    if only in "append-rates":
        results.figures += work.appends.rates(settings)
    if only in "groups-memory":
        results.figures += work.rollout_groups.figures(settings)
    if only in "maps-memory":
        results.figures += work.maps.figures(settings)
    if only in "forest-memory":
        results.figures += work.forests.figures(settings)
    if only in "disk":
        results.figures += work.disk.figures(settings)
    results.machine["load average at the end"] = machine().get("load average", "")
    results.settings["seconds"] = round(time.perf_counter() - began)
    show_figures(console, results)
    return results


def publish(results: Results, out: Path) -> None:
    """Write the page, the picture and the JSON; other runs whose JSON lies in docs/assets stand in the same page."""
    results.save(out / "assets" / "benchmarks.json")
    for path in sorted((ROOT / "docs" / "assets").glob("benchmarks-*.json")):
        more = Results.load(path)
        known = {table.key for table in results.tables}
        results.tables += [noted(table, more) for table in more.tables if table.key not in known]
        results.figures += [figure for figure in more.figures if results.figure(figure.key) is None]
    (out / "benchmarks.md").write_text(page(results), encoding="utf-8")
    picture(results, out / "assets" / "benchmarks.svg")
    print(f"written to {out / 'benchmarks.md'}, with JSON and a picture in {out / 'assets'}")


def noted(table: Table, run: Results) -> Table:
    """A table of another run, which says with what it was measured."""
    if not table.key.startswith(ON_DEVICE):
        return table
    used = {name: run.versions.get(name) for name in ("torch", "torchrl", "jax", "flashbax")}
    shown = ", ".join(f"{name} {value}" for name, value in used.items() if value not in (None, "not installed"))
    return replace(table, notes=[*table.notes, f"in a run of its own, on {run.machine.get('processor', '?')}: {shown}"])


def _versions() -> dict[str, str]:
    found = {"Python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    main()
