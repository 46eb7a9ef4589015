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
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.bench import history
from tests.bench.measuring import machine
from tests.bench.results import Results, Settings, Table
from tests.bench.show import page, picture, show, show_goals

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = (
    "mouse-data", "numpy", "pyarrow", "datasets", "pillow",
    "torch", "tensordict", "torchrl", "jax", "flashbax", "grain", "cpprb",
)  # fmt: skip
ASSETS, ON_DEVICE = ROOT / "docs" / "assets", "on-device"


# What is measured, by name: a module of this package, its function, and the function's arguments after the settings.
WORKS: dict[str, tuple[Any, ...]] = {
    **{f"state-{size}-64": ("workloads", "state", size, 64) for size in (32, 256, 1024)},
    "state-256-1": ("workloads", "state", 256, 1),
    **{f"parts-{size}": ("workloads", "parts", size) for size in (32, 256)},
    **{
        f"{name}-{size}": (module, function, size)
        for size in (32, 256)
        for name, module, function in (("mixtures", "workloads", "mixtures"), ("around", "around", "table"))
    },
    **{f"ragged-{size}": ("around", "ragged", size) for size in (32, 256)},
    "around-states-256": ("around", "table", 256, "-states"),
    "views": ("workloads", "views"),
    "discrete": ("workloads", "discrete"),
    "wide": ("workloads", "wide"),
    "images": ("workloads", "raw_images"),
    "png-84x84": ("workloads", "png_images", 84, 84, False),
    "png-210x160": ("workloads", "png_images", 210, 160, True),
    "statistics": ("counting", "tables"),
    "appends": ("appends", "while_sampling"),
    "replay": ("replay", "tables"),
    "on-device": ("on_device", "tables"),
    "on-device-torch": ("on_device_torch", "tables"),
    "on-device-loader": ("gpu", "figures"),
    "maps": ("maps", "tables"),
    "forest": ("forests", "tables"),
    "rollouts": ("rollouts", "tables"),
    "rollout-groups": ("rollout_groups", "tables"),
    "texts": ("texts", "tables"),
    "loaders": ("loaders", "overheads"),
    "fresh": ("loaders", "in_fresh_processes"),
    "append-rates": ("appends", "rates"),
    "groups-memory": ("rollout_groups", "figures"),
    "maps-memory": ("maps", "figures"),
    "forest-memory": ("forests", "figures"),
    "disk": ("appends", "on_disk"),
}
# What only `--scale` measures.
LARGEST: dict[str, tuple[Any, ...]] = {
    **{key: ("scale", "found", key) for key in ("scale-one-file", "scale-files")},
    "larger": ("scale", "larger_than_memory"),
    "elsewhere": ("scale", "away"),
}


def main() -> None:
    """Measure, print, and write JSON, picture and page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, in about six minutes")
    parser.add_argument("--only", default="", help="measure only what has this in its name, for example state-32")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page anew from its JSON")
    parser.add_argument("--data", type=Path, help="where datasets are made and kept; by default they are removed")
    parser.add_argument(
        "--out", type=Path, help="where the page goes; by default docs/, or out/bench/ if not all is run"
    )
    parser.add_argument("--scale", action="store_true", help="measure the largest data alone, in 27 GB of disk")
    parser.add_argument("--rows", type=int, help="steps of the largest dataset; by default a million, or 100 million")
    chosen = parser.parse_args()
    if chosen.page:
        publish(Results.load(ASSETS / "benchmarks.json"), chosen.out or ROOT / "docs")
        return
    # Quiet, and no devices that peers would look for, but where they are what is measured.
    if not chosen.only.startswith(ON_DEVICE):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    whole = not (chosen.quick or chosen.only or chosen.rows)
    out = chosen.out or (ROOT / "docs" if whole else ROOT / "out" / "bench")
    folder = chosen.data or Path(tempfile.mkdtemp(prefix="mouse-bench-"))
    rows = chosen.rows or (100_000_000 if chosen.scale else 1_000_000)
    rounds, budget, images = (9, 0.3, 8_000) if chosen.quick else (40, 2.0, 40_000)
    cores = int(machine()["cores"])
    settings = Settings(folder, rounds, budget, rows=rows, images=images, cores=cores, quick=chosen.quick)
    try:
        results = run(settings, LARGEST if chosen.scale else WORKS, chosen.only)
    finally:
        if chosen.data is None:
            shutil.rmtree(folder, ignore_errors=True)
    if chosen.scale:
        results.save(out / "assets" / "benchmarks-scale.json")
        results = Results.load(ASSETS / "benchmarks.json")
    elif whole:
        history.append(results)
    publish(results, out)


def run(settings: Settings, works: Mapping[str, tuple[Any, ...]], only: str) -> Results:
    """Measure all works, or those with `only` in their names."""
    import torch

    torch.set_num_threads(1)
    told = {"quick": settings.quick, "rounds": settings.rounds, "rows": settings.rows}
    results = Results(machine(), _versions(), told)
    if only.startswith(ON_DEVICE):
        results.machine["JAX computes on"] = _module("on_device").device_name()
        results.machine["torch computes on"] = _module("on_device_torch").device_name()
    print(" · ".join(f"{name}: {value}" for name, value in results.machine.items()))
    began = time.perf_counter()
    for name, (module, function, *arguments) in works.items():
        if only not in name:
            continue
        made = getattr(_module(module), function)(settings, *arguments)
        gc.collect()  # the peers' copies of the data
        for found in made if isinstance(made, list) else [made]:
            show(found)
            every: list[Any] = results.tables if isinstance(found, Table) else results.figures
            every.append(found)
        print(f"  {time.perf_counter() - began:.0f} s", flush=True)
    results.machine["load average at the end"] = machine().get("load average", "")
    results.settings["seconds"] = round(time.perf_counter() - began)
    show_goals(results)
    return results


def _module(name: str) -> Any:
    """A module of this package, which is imported where it is needed."""
    return importlib.import_module(f"tests.bench.{name}")


def publish(results: Results, out: Path) -> None:
    """Write the page, the picture and the JSON; other runs whose JSON lies in docs/assets stand in the same page."""
    results.save(out / "assets" / "benchmarks.json")
    for path in [*(out / "assets").glob("benchmarks-*.json"), *sorted(ASSETS.glob("benchmarks-*.json"))]:
        more = Results.load(path)
        known = {table.key for table in results.tables}
        results.tables += [noted(table, more) for table in more.tables if table.key not in known]
        results.figures += [figure for figure in more.figures if results.figure(figure.key) is None]
    (out / "benchmarks.md").write_text(page(results), encoding="utf-8")
    picture(results, out / "assets" / "benchmarks.svg")
    history.draw(out / "assets" / "benchmarks-history.svg", history.read() or [history.line_of(results, "", "")])
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
