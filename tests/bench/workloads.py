"""The workloads: kinds of data and shapes of batches, ours beside the floor and the peers."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mouse_core import BatchSource, PrefetchBatchifier
from mouse_core.bench import Contender, interleave, steady
from tests.bench import generate
from tests.bench.floor import Addresses, check_floor, floor, floor_name
from tests.bench.peers import PEERS, peers
from tests.bench.results import Table, table_of
from tests.bench.settings import Settings
from tests.bench.task import Task

# Windows whose places are worked out for the floor, which goes through them again and again.
_FLOOR_WINDOWS = 20_480


# Ours plans so many windows together, or fewer.
_PLANNED = 32_768
# Peers that a quick run leaves out, by how their names begin; it has them all in the first table.
_SLOW = ("torch DataLoader", "LeRobot", "grain", "datasets, numpy", "TorchRL SliceSampler, LazyTensor")


def dataset_folder(kind: generate.Kind, rows: int, settings: Settings, name: str = "") -> Path:
    """A generated dataset, written on first use."""
    folder = settings.folder / f"{name or kind.name}-{rows}"
    if not (folder / "state.json").exists():
        generate.write(kind, folder, rows)
    return folder


# ---------------------------------------------------------------------- numbers


def state(settings: Settings, batch_size: int, length: int) -> Table:
    """Windows of six columns: four numbers, a vector of 17 and one of 18."""
    folder = dataset_folder(generate.STATE, settings.rows, settings)
    dtypes = {"obs_continuous": "float32"}
    task = Task(folder, settings.folder, length, batch_size, dtypes=dtypes, multiple=_PLANNED // batch_size)
    more = [_ours(task, "mouse source[i], documented dtypes (float64 observations)", stored_dtypes=False)]
    shape = f"B={batch_size}, S={length}"
    return _windows(settings, task, f"state-{batch_size}-{length}", f"State, {shape}, six columns", more)


def views(settings: Settings) -> Table:
    """Windows of a tenth of the episodes beside those of all of them."""
    folder = dataset_folder(generate.STATE, settings.rows, settings)
    task = Task(folder, settings.folder, 64, 256, dtypes={"obs_continuous": "float32"}, multiple=_PLANNED // 256)
    stores = {
        "all episodes": task.store,
        "the best tenth": task.store.best(0.1),
        "a tenth by split": task.store.split(tenth=0.1)["tenth"],
    }
    contenders = [
        Contender(
            f"mouse source[i], {name}",
            BatchSource(store, 64, 256, dtypes=task.dtypes).__getitem__,
            kind="ours",
            multiple=task.multiple,
        )
        for name, store in stores.items()
    ]
    timings = interleave(contenders, rounds=settings.rounds, budget_seconds=settings.budget)
    return table_of("views", "Views of a store, B=256, S=64, six columns", timings)


def discrete(settings: Settings) -> Table:
    """Windows of five numbers."""
    folder = dataset_folder(generate.DISCRETE, settings.rows, settings)
    task = Task(folder, settings.folder, 64, 32, multiple=_PLANNED // 32)
    return _windows(settings, task, "discrete", "Discrete, B=32, S=64, five columns of integers")


def wide(settings: Settings) -> Table:
    """Two columns out of 66."""
    kind = generate.wide(60)
    folder = dataset_folder(kind, max(50_000, settings.rows // 5), settings)
    columns = ["observation", "action"]
    dtypes = {"obs_continuous": "float32"}
    task = Task(folder, settings.folder, 64, 32, columns=columns, dtypes=dtypes, multiple=_PLANNED // 32)
    return _windows(settings, task, "wide", "Wide table, B=32, S=64, two columns of 66 are read")


def raw_images(settings: Settings) -> Table:
    """Grey frames of 84 by 84 bytes as they are."""
    folder = dataset_folder(generate.raw_images(84, 84), settings.images, settings)
    task = Task(folder, settings.folder, 64, 32, dtypes={"obs_image": "uint8"}, multiple=4)
    more = [_ours(task, "mouse source[i], documented dtypes (int64 pixels)", stored_dtypes=False)]
    return _windows(settings, task, "images", "Raw images 84x84, B=32, S=64", more)


def _windows(settings: Settings, task: Task, key: str, title: str, more: Sequence[Contender] = ()) -> Table:
    source, addresses = task.source(), Addresses(task.dataset)
    pieces = [addresses.pieces(source, index) for index in range(max(8, _FLOOR_WINDOWS // task.batch_size))]
    check_floor(source, pieces[1], 1)
    notes: list[str] = []
    contenders = [
        Contender(floor_name(), floor(pieces), kind="floor", multiple=task.multiple),
        _ours(task, "mouse source[i]"),
        *more,
        _loader(task),
        *(peer for peer in peers(task, PEERS, notes) if not _left_out(peer.name, key, settings)),
    ]
    timings = interleave(contenders, rounds=settings.rounds, budget_seconds=settings.budget)
    return table_of(key, title, timings, nbytes=pieces[0].nbytes, notes=notes)


def _left_out(name: str, key: str, settings: Settings) -> bool:
    if key == "state-32-64":
        return settings.quick and name.startswith("torch DataLoader, 2")
    return settings.quick and name.startswith(_SLOW)


def _ours(task: Task, name: str, *, stored_dtypes: bool = True) -> Contender:
    source = task.source(stored_dtypes=stored_dtypes)
    return Contender(name, source.__getitem__, kind="ours", multiple=task.multiple)


def _loader(task: Task) -> Contender:
    loader = PrefetchBatchifier(
        task.store, task.sequence_length, task.batch_size, dtypes=task.dtypes, fields=list(task.source().spec)
    )
    name = "mouse PrefetchBatchifier, 2 workers"
    return steady(Contender(name, lambda number: loader.next_batch(), "ours", multiple=task.multiple), 4)


# ---------------------------------------------------------------------- encoded images


def png_images(settings: Settings, height: int, width: int, *, colour: bool) -> Table:
    """PNG, decoded by the batch; everything by the wall clock, for decoding is spread over cores."""
    kind = generate.png_images(height, width, colour=colour)
    folder = dataset_folder(kind, max(400, settings.images // 20), settings, f"png-{height}x{width}")
    length, batch_size = 16, (4 if colour else 16) // (2 if settings.quick else 1)
    task = Task(folder, settings.folder, length, batch_size, dtypes={"obs_image": "uint8"})
    images = length * batch_size
    source = task.source()
    contenders = [
        Contender("Pillow alone, one core", _pillow(task), kind="floor", wall=True),
        Contender("mouse source[i]", source.__getitem__, kind="ours", wall=True),
    ]
    for workers in sorted({1, 2, settings.cores}):
        loader = PrefetchBatchifier(
            task.store, length, batch_size, num_workers=workers, prefetch=workers + 1, dtypes=task.dtypes
        )
        name = f"mouse PrefetchBatchifier, {workers} worker{'s' * (workers > 1)}"
        contender = Contender(name, lambda number, it=loader: it.next_batch(), "ours", wall=True, multiple=8)
        contenders.append(steady(contender, workers + 1))
    contenders.append(Contender("datasets, python rows of PIL images", _python_images(task), wall=True))
    timings = interleave(
        contenders, rounds=max(5, settings.rounds // 3), slice_seconds=0.15, budget_seconds=2 * settings.budget
    )
    title = f"PNG images {height}x{width} {'RGB' if colour else 'grey'}, B={batch_size}, S={length}"
    return table_of(f"png-{height}x{width}", title, timings, units=images, unit="images")


def _pillow(task: Task) -> Callable[[int], None]:
    from PIL import Image

    column = task.dataset.data.table.column("observation_image")
    count = task.batch_size * task.sequence_length

    def decode(number: int) -> None:
        for start in task.starts(task.batch_size, number).tolist():
            for value in column.slice(start, count // task.batch_size).to_pylist():
                np.asarray(Image.open(io.BytesIO(value["bytes"])))

    return decode


def _python_images(task: Task) -> Callable[[int], object]:
    def batch(number: int) -> object:
        return [
            [np.asarray(image) for image in task.dataset[start : start + task.sequence_length]["observation_image"]]
            for start in task.starts(task.batch_size, number).tolist()
        ]

    return batch
