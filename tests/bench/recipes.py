"""Random windows and single steps by public recipes, each as its users write it.

    python -m tests.bench.recipes --data /tmp/recipes --pythons /tmp/streams/bin/python .venv-lerobot/bin/python

Each recipe runs in a process of its own, of the first Python that has its package, as several need versions that
conflict. The recipes take turns, on the same steps, in files that the page cache holds. A recipe whose loader can have
workers is measured with none and with two, and the faster one counts. Time is wall-clock time, so the machine must be
idle. Windows of litdata and MosaicML's streaming do not overlap, as a sample of these formats is a window.
"""

from __future__ import annotations

import argparse
import datetime
import json
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks-recipes.md"
# This file as a module, without the folder `tests`, as some environments have another package of this name.
CHILD = "import json, os, runpy, sys; measured = runpy.run_path(sys.argv[1])['measured']\n"
CHILD += "print(measured(*json.loads(sys.argv[2])), flush=True); os._exit(0)"
# Windows and steps of a batch.
SHAPES = ((32, 64), (256, 1))
WARM, SECONDS, WORKERS, SCAN = 1.0, 2.0, 2, 16
Batches = Iterator[Any]


def arrays(folder: Path) -> dict[str, Any]:
    """The steps as mapped arrays ``[rows, ...]``."""
    return {file.stem: np.load(file, mmap_mode="r") for file in sorted((folder / "arrays-store").glob("*.npy"))}


def starts(rows: int, batch: int, length: int) -> Iterator[np.ndarray]:
    """Row numbers ``[batch * length]`` of random windows."""
    draw = np.random.default_rng(0)
    while True:
        yield (draw.integers(0, rows - length + 1, batch)[:, None] + np.arange(length)).reshape(-1)


def endless(loader: Any) -> Batches:
    """Batches of one epoch after the other."""
    return chain.from_iterable(repeat(loader))


def loaded(dataset: Any, batch: int, workers: int, **options: Any) -> Batches:
    """Batches of torch's DataLoader."""
    from torch.utils.data import DataLoader

    more = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    return endless(DataLoader(dataset, batch, num_workers=workers, **more, **options))


@cache
def beside_lerobot(name: str) -> Callable[[], Any]:
    """A function that LeRobot's tests need, too; what it holds stays."""
    function: Callable[[], Any] = runpy.run_path(str(ROOT / "tests/lerobot/environment.py"))[name]
    return function


def mouse(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """Our loader for torch, with threads."""
    from mouse_core import DatasetStore
    from mouse_torch import PrefetchBatchifier

    store = DatasetStore.open(folder / "store")
    types = {"obs_continuous": "float32"}
    loader = PrefetchBatchifier(store, length, batch, num_workers=workers, dtypes=types)
    return iter(loader.next_batch, None)


def lerobot(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """DataLoader over LeRobotDataset: a query of each key for each window."""
    reader = beside_lerobot("lerobot_dataset")()
    meta = reader("x/y", root=folder / "lerobot").meta
    numbers = ("timestamp", "frame_index", "episode_index", "index", "task_index")
    keys = [key for key in meta.features if key not in numbers]
    deltas = {key: [step / meta.fps for step in range(length)] for key in keys} if length > 1 else None
    return loaded(reader("x/y", root=folder / "lerobot", delta_timestamps=deltas), batch, workers, shuffle=True)


def torchrl(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """ReplayBuffer with SliceSampler, its bounds of trajectories in a cache, and threads that prefetch."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, RandomSampler, ReplayBuffer, SliceSampler

    steps = {name: torch.from_numpy(np.array(values)) for name, values in arrays(folder).items()}
    rows = len(steps["action"])
    steps["trajectory"] = torch.zeros(rows, dtype=torch.int64)
    slices = SliceSampler(slice_len=length, traj_key="trajectory", cache_values=True, strict_length=True)
    sampler = slices if length > 1 else RandomSampler()
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(rows), sampler=sampler, batch_size=batch * length, prefetch=workers or None
    )
    buffer.extend(TensorDict(steps, [rows]))
    return iter(buffer.sample, None)


def flashbax(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """Stoix's loop: the samples of several updates in one jitted scan, each of them summed up."""
    import jax
    import jax.numpy as jnp

    from tests.bench.peers.of_flashbax import filled

    buffer, state = filled(arrays(folder), batch, length)

    def update(total: Any, key: Any) -> tuple[Any, None]:
        drawn = buffer.sample(state, key).experience
        return total + sum(jnp.sum(values, dtype=jnp.float32) for values in drawn.values()), None

    learn = jax.jit(lambda key: jax.lax.scan(update, jnp.zeros(()), jax.random.split(key, SCAN))[0])
    for number in range(1 << 62):
        yield from repeat({"total": jax.block_until_ready(learn(jax.random.key(number)))}, SCAN)


def of_datasets(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """`datasets` with torch format, a query for each batch."""
    import datasets

    dataset = datasets.load_from_disk(str(folder / "store")).with_format("torch")
    batches = map(np.ndarray.tolist, starts(len(dataset), batch, length))
    return loaded(dataset, None, workers, sampler=batches) if workers else map(dataset.__getitem__, batches)


def litdata(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """StreamingDataLoader over chunks of windows."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    target = folder / f"litdata-{length}"
    if not target.exists():
        writer = BinaryWriter(str(target), chunk_bytes=1 << 26)
        for number, sample in enumerate(samples(folder, length)):
            writer[number] = sample
        writer.done()
        writer.merge(1)
    dataset = StreamingDataset(str(target), shuffle=True, drop_last=True)
    return endless(StreamingDataLoader(dataset, batch_size=batch, num_workers=workers))


def mosaic(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """DataLoader over MosaicML's StreamingDataset of windows."""
    beside_lerobot("load_torchvision")()
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()

    target = folder / f"mosaic-{length}"
    if not target.exists():
        first = next(samples(folder, length))
        kinds = {name: f"ndarray:{value.dtype}:{','.join(map(str, value.shape))}" for name, value in first.items()}
        with MDSWriter(out=str(target), columns=kinds) as out:
            for sample in samples(folder, length):
                out.write(sample)
    return loaded(StreamingDataset(local=str(target), shuffle=True, batch_size=batch), batch, workers)


def samples(folder: Path, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Windows one after the other, of arrays with at least one dimension."""
    steps = arrays(folder)
    for begin in range(0, len(steps["action"]) // length * length, length):
        yield {name: np.array(values[begin : begin + length]) for name, values in steps.items()}


def lance(folder: Path, batch: int, length: int, workers: int) -> Batches:
    """Lance's take of the rows of a batch, as NumPy arrays."""
    import lance as package
    import pyarrow as pa

    target = folder / "rows.lance"
    if not target.exists():
        with pa.memory_map(str(next((folder / "store").glob("*.arrow")))) as file:
            steps = pa.ipc.open_stream(file).read_all().replace_schema_metadata(None)
            package.write_dataset(steps, str(target))
    dataset = package.dataset(str(target))
    for rows in starts(dataset.count_rows(), batch, length):
        taken = dataset.take(rows)
        yield {name: flat(taken.column(name).combine_chunks()) for name in taken.column_names}


def flat(column: Any) -> Any:
    """The numbers of a column."""
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        column = column.flatten()
    return column.to_numpy()


# For each recipe: its function, its name in the table, the distribution that it needs, and numbers of workers to try.
RECIPES: dict[str, tuple[Callable[..., Batches], str, str, tuple[int, ...]]] = {
    "mouse": (mouse, "`mouse_torch.PrefetchBatchifier`", "mouse-data", (0, WORKERS)),
    "flashbax": (flashbax, "flashbax, 16 samples in a jitted scan, as in Stoix", "flashbax", (0,)),
    "torchrl": (torchrl, "TorchRL, `ReplayBuffer` with `SliceSampler`", "torchrl", (0, WORKERS)),
    "lance": (lance, "Lance, `take`", "pylance", (0,)),
    "datasets": (of_datasets, "`datasets` with torch format", "datasets", (0, WORKERS)),
    "litdata": (litdata, "litdata, `StreamingDataLoader`", "litdata", (0, WORKERS)),
    "mosaic": (mosaic, "MosaicML's streaming, `DataLoader`", "mosaicml-streaming", (0, WORKERS)),
    "lerobot": (lerobot, "LeRobot, `DataLoader` over `LeRobotDataset`", "lerobot", (0, WORKERS)),
}


def measured(folder: str, name: str, batch: int, length: int, workers: int) -> float:
    """Seconds for each batch of a recipe."""
    batches, number = RECIPES[name][0](Path(folder), batch, length, workers), 0
    first, began = next(batches), time.perf_counter()
    numbers = sum(np.asarray(values).size for values in first.values())
    expected = batch * length * sum(values[0].size for values in arrays(Path(folder)).values())
    assert name == "flashbax" or numbers >= 0.95 * expected, f"{name}: expected {expected} numbers, found {numbers}"
    together = SCAN if name == "flashbax" else 1
    while time.perf_counter() < began + WARM or number % together:
        number, _ = number + 1, next(batches)
    number, began = 0, time.perf_counter()
    while time.perf_counter() < began + SECONDS or number % together:
        number, _ = number + 1, next(batches)
    return (time.perf_counter() - began) / number


def versions(python: str) -> dict[str, str]:
    """Versions of the distributions of recipes that a Python has."""
    code = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()))"
    said = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return dict(one.split("=") for one in said.split())


def write_data(folder: Path, rows: int) -> None:
    """Write the steps for `datasets` and us, as arrays, and as a LeRobotDataset."""
    from mouse_core import DatasetStore
    from mouse_core.formats.lerobot import write_lerobot
    from tests.bench import generate
    from tests.bench.workloads import Task

    store = generate.write(generate.STATE, folder / "store", rows)
    assert Task(store, folder, 1, 1).array_files
    if not (folder / "lerobot").exists():
        write_lerobot(DatasetStore.open(store), folder / "lerobot", task="walk")


def main() -> None:
    """Write the steps, measure in turns, and print the table."""
    from tests.bench.measuring import machine

    parser = argparse.ArgumentParser(prog="python -m tests.bench.recipes", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--data", type=Path, required=True, help="where the steps are written and kept, 1 GB")
    parser.add_argument("--pythons", nargs="*", default=[], help="more Pythons, which have other packages")
    parser.add_argument("--rows", type=int, default=200_000, help="steps of six columns, 180 bytes each")
    parser.add_argument("--rounds", type=int, default=3, help="how many turns (3)")
    parser.add_argument("--page", action="store_true", help="write the table into docs/benchmarks-recipes.md")
    chosen = parser.parse_args()
    write_data(chosen.data, chosen.rows)
    found = {python: versions(python) for python in (sys.executable, *chosen.pythons)}
    places = {
        name: next((python for python, known in found.items() if needs in known), None)
        for name, (_, _, needs, _) in RECIPES.items()
    }
    runs = [
        (name, shape, workers)
        for name, (_, _, _, tried) in RECIPES.items()
        for shape in SHAPES
        for workers in tried
        if places[name]
    ]
    times: dict[Any, list[float]] = {run: [] for run in runs}
    for _ in range(chosen.rounds):
        for name, shape, workers in runs:
            asked = json.dumps([str(chosen.data.resolve()), name, *shape, workers])
            command = [str(places[name]), "-c", CHILD, __file__, asked]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
            times[name, shape, workers].append(float(said.split()[-1]))
    lines = [
        "| recipe | version |" + "".join(f" {list(shape)}, us a batch | times ours |" for shape in SHAPES),
        "| --- | --- |" + " --- | --- |" * len(SHAPES),
    ]
    for name, (_, title, needs, tried) in RECIPES.items():
        cells = [title, found[places[name] or sys.executable].get(needs, "not installed")]
        for shape in SHAPES if places[name] else ():
            best = min((times[name, shape, workers] for workers in tried), key=statistics.median)
            ours = min((times["mouse", shape, workers] for workers in (0, WORKERS)), key=statistics.median)
            ratio = statistics.median(one / other for one, other in zip(best, ours, strict=True))
            low, middle, high = (1e6 * of(best) for of in (min, statistics.median, max))
            cells += [f"{middle:,.0f} ({low:,.0f} to {high:,.0f})", f"{ratio:,.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines += ["", f"{chosen.rounds} rounds of {chosen.rows:,} steps on {datetime.date.today()}: {facts}."]
    print("\n".join(lines))
    if chosen.page:
        text = PAGE.read_text(encoding="utf-8").partition("| recipe |")[0]
        PAGE.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
