"""The workloads: kinds of data and shapes of batches, ours beside the floor and the peers."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier
from mouse_core.mixtures import Mixture
from tests.bench import generate
from tests.bench.floor import check_floor, floor, floor_name
from tests.bench.floor import pieces as pieces_of_batch
from tests.bench.measuring import Contender, steady
from tests.bench.results import Settings, Table, compare, contenders, peers

PEERS = ("of_datasets", "of_torchrl", "of_torch", "of_flashbax", "of_cpprb", "of_grain")
NARROW = {"obs_continuous": "float32"}
# Windows whose places are worked out for the floor, which goes through them again and again.
_FLOOR_WINDOWS = 20_480
# Ours plans so many windows together, or fewer.
_PLANNED = 32_768
# Peers that a quick run leaves out, by how their names begin; it has them all in the first table.
_SLOW = ("torch DataLoader", "LeRobot", "grain", "datasets, numpy", "TorchRL SliceSampler, LazyTensor")
_MEMBERS = 8


@dataclass(frozen=True)
class Task:
    """Batches of `batch_size` random windows of `sequence_length` steps over one dataset."""

    folder: Path  # as `datasets.load_from_disk` reads it
    scratch: Path  # for the copies that peers need
    sequence_length: int
    batch_size: int
    columns: Sequence[str] | None = None  # those to deliver; by default all
    dtypes: Mapping[str, str] = field(default_factory=dict)  # the stored ones, where ours would be wider
    multiple: int = 1  # batches that ours may plan together, and which are therefore measured together

    @cached_property
    def dataset(self) -> Any:
        """The dataset, of the chosen columns."""
        import datasets

        dataset = datasets.load_from_disk(str(self.folder))
        return dataset if self.columns is None else dataset.select_columns(list(self.columns))

    @cached_property
    def store(self) -> DatasetStore:
        """Ours, over the whole dataset."""
        return store_of(self.folder)

    def source(self, *, stored_dtypes: bool = True) -> BatchSource:
        """Ours, delivering the stored dtypes or the documented ones."""
        names = None
        if self.columns is not None:
            every = self.store.snapshot().spec.values()
            names = [spec.name for spec in every if spec.column in self.columns]
        dtypes = self.dtypes if stored_dtypes else None
        return BatchSource(self.store, self.sequence_length, self.batch_size, fields=names, dtypes=dtypes)

    @property
    def rows(self) -> int:
        """Steps in the dataset."""
        return len(self.dataset)

    @cached_property
    def array_files(self) -> dict[str, Path]:
        """The columns as .npy files `[rows, ...]`, for peers that read arrays."""
        folder = self.scratch / f"arrays-{self.folder.name}"
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for name in self.dataset.column_names:
            files[name] = folder / f"{name}.npy"
            if not files[name].exists():
                np.save(files[name], _column_array(self.dataset, name))
        return files

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The same, mapped."""
        return {name: np.load(path, mmap_mode="r") for name, path in self.array_files.items()}

    def starts(self, count: int, seed: int) -> npt.NDArray[np.int64]:
        """`count` random windows, for peers that do not draw them themselves."""
        return np.random.default_rng(seed).integers(0, self.rows - self.sequence_length + 1, count)


def _column_array(dataset: Any, name: str) -> npt.NDArray[Any]:
    """A column of equally long rows as one array `[rows, ...]`."""
    array = dataset.data.table.column(name).combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    shape: list[int] = [len(array)]
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    while pa.types.is_list(array.type):
        shape.append(len(array.values) // len(array))
        array = array.flatten()
    return np.asarray(array).reshape(shape)


def store_of(folder: Path) -> DatasetStore:
    """Ours over a dataset that lies in a folder."""
    import datasets

    return DatasetStore().from_dataset(datasets.load_from_disk(str(folder)))


def dataset_folder(settings: Settings, kind: generate.Kind = generate.STATE, rows: int = 0, name: str = "") -> Path:
    """A generated dataset, written on first use; by default of all the steps of the datasets of numbers."""
    rows = rows or settings.rows
    return generate.write(kind, settings.folder / f"{name or kind.name}-{rows}", rows)


def _state(settings: Settings, batch_size: int, length: int = 64) -> Task:
    together = _PLANNED // batch_size
    return Task(dataset_folder(settings), settings.folder, length, batch_size, dtypes=NARROW, multiple=together)


# ---------------------------------------------------------------------- numbers


def state(settings: Settings, batch_size: int, length: int) -> Table:
    """Windows of six columns: four numbers, a vector of 17 and one of 18."""
    title = f"State, B={batch_size}, S={length}, six columns"
    wide = "documented dtypes (float64 observations)"
    return _windows(settings, _state(settings, batch_size, length), f"state-{batch_size}-{length}", title, wide)


def views(settings: Settings) -> Table:
    """Windows of a tenth of the episodes beside those of all of them."""
    task = _state(settings, 256)
    stores = {
        "all episodes": task.store,
        "the best tenth": task.store.best(0.1),
        "a tenth by split": task.store.split(tenth=0.1)["tenth"],
    }
    calls = {
        f"mouse source[i], {name}": BatchSource(store, 64, 256, dtypes=NARROW).__getitem__
        for name, store in stores.items()
    }
    of = contenders(calls, multiple=task.multiple)
    return compare(settings, "views", "Views of a store, B=256, S=64, six columns", of)


def discrete(settings: Settings) -> Table:
    """Windows of five numbers."""
    task = Task(dataset_folder(settings, generate.DISCRETE), settings.folder, 64, 32, multiple=_PLANNED // 32)
    return _windows(settings, task, "discrete", "Discrete, B=32, S=64, five columns of integers")


def wide(settings: Settings) -> Table:
    """Two columns out of 66."""
    folder = dataset_folder(settings, generate.wide(60), max(50_000, settings.rows // 5))
    columns = ["observation", "action"]
    task = Task(folder, settings.folder, 64, 32, columns, NARROW, _PLANNED // 32)
    return _windows(settings, task, "wide", "Wide table, B=32, S=64, two columns of 66 are read")


def raw_images(settings: Settings) -> Table:
    """Grey frames of 84 by 84 bytes as they are."""
    folder = dataset_folder(settings, generate.raw_images(84, 84), settings.images)
    task = Task(folder, settings.folder, 64, 32, dtypes={"obs_image": "uint8"}, multiple=4)
    title = "Raw images 84x84, B=32, S=64"
    return _windows(settings, task, "images", title, "documented dtypes (int64 pixels)")


def _windows(settings: Settings, task: Task, key: str, title: str, documented: str = "") -> Table:
    """Ours, in the stored dtypes and perhaps in the documented ones, beside the floor and the peers."""
    source, pieces = _floor_of(task)
    calls: dict[str, Callable[[int], Any]] = {floor_name(): floor(pieces), "mouse source[i]": source.__getitem__}
    if documented:
        calls[f"mouse source[i], {documented}"] = task.source(stored_dtypes=False).__getitem__
    loader = PrefetchBatchifier(
        task.store, task.sequence_length, task.batch_size, dtypes=task.dtypes, fields=list(source.spec)
    )
    calls["mouse PrefetchBatchifier, 2 workers"] = lambda number: loader.next_batch()
    *ours, last = contenders(calls, first="floor", multiple=task.multiple)
    found = [one for one in peers(PEERS, "windows", task) if isinstance(one, str) or _takes_part(one, key, settings)]
    return compare(settings, key, title, [*ours, steady(last, 4), *found], nbytes=pieces[0].nbytes)


def _floor_of(task: Task) -> tuple[BatchSource, list[Any]]:
    """Ours, and the pieces of memory that its batches consist of."""
    source = task.source()
    pieces = [pieces_of_batch(source, index) for index in range(max(8, _FLOOR_WINDOWS // task.batch_size))]
    check_floor(source, pieces[1], 1)
    return source, pieces


def _takes_part(peer: Contender, key: str, settings: Settings) -> bool:
    slow: str | tuple[str, ...] = "torch DataLoader, 2" if key == "state-32-64" else _SLOW
    return not (settings.quick and peer.name.startswith(slow))


# ---------------------------------------------------------------------- encoded images


def png_images(settings: Settings, height: int, width: int, colour: bool) -> Table:
    """PNG, decoded by the batch; everything by the wall clock, as threads decode on several cores."""
    kind = generate.png_images(height, width, colour=colour)
    folder = dataset_folder(settings, kind, max(400, settings.images // 20), f"png-{height}x{width}")
    length, batch_size = 16, (4 if colour else 16) // (2 if settings.quick else 1)
    task = Task(folder, settings.folder, length, batch_size, dtypes={"obs_image": "uint8"})
    calls = {"Pillow alone, one core": _pillow(task), "mouse source[i]": task.source().__getitem__}
    of = contenders(calls, first="floor", wall=True)
    for workers in sorted({1, 2, settings.cores}):
        loader = PrefetchBatchifier(
            task.store, length, batch_size, num_workers=workers, prefetch=workers + 1, dtypes=task.dtypes
        )
        name = f"mouse PrefetchBatchifier, {workers} worker{'s' * (workers > 1)}"
        contender = Contender(name, lambda number, it=loader: it.next_batch(), "ours", wall=True, multiple=8)
        of.append(steady(contender, workers + 1))
    of.append(Contender("datasets, python rows of PIL images", _python_images(task), wall=True))
    title = f"PNG images {height}x{width} {'RGB' if colour else 'grey'}, B={batch_size}, S={length}"
    turns: dict[str, Any] = {"rounds": max(5, settings.rounds // 3), "slice_seconds": 0.15, "budget": 2}
    return compare(settings, f"png-{height}x{width}", title, of, **turns, units=length * batch_size, unit="images")


def _pillow(task: Task) -> Callable[[int], None]:
    from PIL import Image

    column = task.dataset.data.table.column("observation_image")

    def decode(number: int) -> None:
        for start in task.starts(task.batch_size, number).tolist():
            for value in column.slice(start, task.sequence_length).to_pylist():
                np.asarray(Image.open(io.BytesIO(value["bytes"])))

    return decode


def _python_images(task: Task) -> Callable[[int], object]:
    def batch(number: int) -> object:
        return [
            [np.asarray(image) for image in task.dataset[start : start + task.sequence_length]["observation_image"]]
            for start in task.starts(task.batch_size, number).tolist()
        ]

    return batch


# ---------------------------------------------------------------------- parts of a batch, several stores


def parts(settings: Settings, batch_size: int) -> Table:
    """A batch's floor, Arrow's copy of windows whose places are known, finding these places, and all of it."""
    task = _state(settings, batch_size)
    source, pieces = _floor_of(task)
    calls = {
        floor_name(): floor(pieces),
        "Arrow's cast of existing views": _casting(task.source()),
        "planning: draws, locations and views": _planning(task.source()),
        "mouse source[i]": source.__getitem__,
    }
    notes = [
        "The row of Arrow's cast measures the conversion of the same windows in every turn. Like source[i], a cast "
        "converts several batches at once.",
        "The remaining time of source[i] is spent in Python, which creates a dict and six arrays for each batch.",
    ]
    title = f"Where the time of a batch goes, B={batch_size}, S=64, six columns"
    of = contenders(calls, first="floor", kind="ours", multiple=task.multiple)
    return compare(settings, f"parts-{batch_size}", title, of, notes=notes, nbytes=pieces[0].nbytes)


def _casting(source: BatchSource) -> Callable[[int], None]:
    for index in range(2 * _PLANNED // source.batch_size):  # blocks grow to their full size
        source[index]
    block: Any = source.plan(index).block
    views, together = source._pipeline._byte_views(block), block.together
    assert views is not None
    batches = len(views.sizes) // together * together
    held: list[Any] = []

    def cast(number: int) -> None:
        first = number % batches
        if first % together == 0:
            held.clear()
            held.append(views.copy(first, together))

    return cast


def _planning(source: BatchSource) -> Callable[[int], None]:
    def plan(number: int) -> None:
        block: Any = source.plan(number).block
        source._pipeline._byte_views(block)

    return plan


def mixtures(settings: Settings, batch_size: int) -> Table:
    """A batch of a mixture of stores, each an eighth of a dataset's rows, and one of a store of all of them."""
    dataset = _state(settings, batch_size).dataset
    rows = len(dataset) // _MEMBERS
    eighths = [dataset.select(range(number * rows, (number + 1) * rows)) for number in range(_MEMBERS)]
    members, whole = [DatasetStore().from_dataset(one) for one in eighths], DatasetStore()
    for one in eighths:
        whole.from_dataset(one)
    stores: Iterable[tuple[str, Any]] = (
        ("one store", whole),
        ("a mixture of 8", Mixture(members, field=None)),
        ("a mixture of 8, and which", Mixture(members)),
    )
    calls = {name: BatchSource(store, 64, batch_size, dtypes=NARROW).__getitem__ for name, store in stores}
    of = contenders(calls, first="floor", kind="ours", multiple=max(1, _PLANNED // batch_size))
    title = f"A mixture of {_MEMBERS} stores, B={batch_size}, S=64"
    notes = ["In rows marked `and which`, batches also have a field that names the member of each window."]
    return compare(settings, f"mixtures-{batch_size}", title, of, notes=notes)
