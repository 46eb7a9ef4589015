"""Batches from data that are larger than memory: python -m tests.bench.larger --data FOLDER.

Each contender is a process of its own in a control group that allows it a third of what the data take (by root, of
either version of control groups; elsewhere memory is not limited, and bytes read tell less), and begins with nothing of
the data in memory. They take turns, and in each round it is measured, too, what the disk can do: by fio where it is
installed. Figures are medians of the rounds, ratios of those within a round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.bench import generate
from tests.bench.child import ask
from tests.bench.measuring import Contender, interleave, quartiles_of
from tests.bench.pages import drop, long_reads, random_reads, read_whole
from tests.bench.results import Figure, figure_of

_LENGTH, _BATCH = 64, 32
_SECONDS, _WARM, _DISK = 5.0, 5.0, 2.0
# Batches that are timed together of data in memory, and how often.
_COUNTED, _CACHED_ROUNDS = 256, 60
_WAYS = {
    "plan": "exact random windows, asked for ahead",
    "blocks": "windows from blocks",
    "mapped": "mapped files as the system reads them",
    "images": "frames of 84x84, exact random windows",
}
# Those of others that read random windows of the same rows: of arrays that are mapped, and of files of `datasets`.
_PEERS = {
    "memmap": "numpy.memmap, indexed",
    "torchrl": "TorchRL, LazyMemmapStorage",
    "datasets": "datasets, select",
}
_ROUNDS, _PART = 3, 1 << 20


def main() -> None:
    """Write the data if they are not there, measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.larger", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="where the data are written and kept")
    parser.add_argument("--rows", type=int, default=16_000_000, help="steps of six columns, 180 bytes each")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"how many ({_ROUNDS})")
    parser.add_argument("--lance", help="a Python that has Lance, to measure its take beside ours")
    chosen = parser.parse_args()
    for figure in figures(chosen.data, chosen.rows, chosen.lance, chosen.rounds):
        print(f"{figure.name:70s} {figure.value:10.2f} {figure.unit}")


def figures(data: Path, rows: int, lance: str | None = None, rounds: int = _ROUNDS) -> Sequence[Figure]:
    """What each contender reaches, in batches a second, bytes read, and parts of what the disk can do."""
    images = data.with_name(f"{data.name}-images")
    for folder, kind, count in ((data, generate.STATE, rows), (images, generate.raw_images(84, 84), rows // 40)):
        generate.write(kind, folder, count, files=16)
    peers = [name for name in _PEERS if name == "memmap" or find_spec(name) is not None]
    pythons = dict.fromkeys([*_WAYS, *peers], sys.executable)
    for peer in ("arrays", *(["torchrl"] if "torchrl" in peers else [])):
        ask("larger", "measured", f"write-{peer}", data)
    if lance is not None:
        ask("larger", "measured", "write-lance", data, python=lance)
        pythons["lance"] = lance
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        found.append(one := {})
        for way, python in pythons.items():
            folder = images if way == "images" else data
            drop(folder)
            drop(_others(folder), "*/*")
            nbytes = sum(file.stat().st_size for file in folder.glob("*.arrow"))
            try:
                made = ask("larger", "measured", way, folder, python=python, nbytes=nbytes // 3)
                one |= {f"{way}-{name}": value for name, value in made.items()}
            except AssertionError:
                if way not in _PEERS:
                    raise
                print(f"{_PEERS[way]}: ended, perhaps as the memory was too little for it", file=sys.stderr)
        one |= ask("larger", "measured", "cached", data)
        drop(images)
        one["disk"], one["disk-slowest"] = random_reads(data, _DISK)
        one["disk-long"] = long_reads(images, _DISK)
    return [*_of_each(found, list(pythons)), *_ratios(found)]


def _of_each(found: Sequence[dict[str, float]], ways: Sequence[str]) -> list[Figure]:
    """What was measured of each contender."""
    made = []
    for way in ways:
        name, key = (_WAYS | _PEERS).get(way, "Lance, take"), f"larger-{way}"
        for end, what, unit in (
            ("batches", "", "batches/s"),
            ("slowest", ": the slowest of 1,000 batches", "ms"),
            ("read", ": read for each byte delivered", "bytes"),
        ):
            values = [one[f"{way}-{end}"] for one in found if f"{way}-{end}" in one]
            if not values:
                continue
            whole = key if end == "batches" else f"{key}-{end}"
            made.append(figure_of(whole, name + what, quartiles_of(values), unit))
    for key, name, scale, unit in (
        ("disk", "the disk: random reads of 4 KB, 32 at a time", 1e6, "MB/s"),
        ("disk-slowest", "the disk: the slowest of 1,000 of these", 1, "ms"),
        ("disk-long", "the disk: files from beginning to end", 1e6, "MB/s"),
    ):
        made.append(figure_of(f"larger-{key}", name, quartiles_of([one[key] for one in found]), unit, 1 / scale))
    return made


def _ratios(found: Sequence[dict[str, float]]) -> list[Figure]:
    """Ratios within each round."""
    made = []
    for key, over, under, name in (
        ("speedup", "plan-batches", "mapped-batches", "exact random windows, over mapped files"),
        ("over-lance", "plan-batches", "lance-batches", "exact random windows, over Lance"),
        *(
            (f"over-{way}", "plan-batches", f"{way}-batches", f"exact random windows, over {_PEERS[way]}")
            for way in _PEERS
        ),
        ("of-disk", "plan-speed", "disk", "exact random windows: of the disk's random reads"),
        ("blocks-over-exact", "blocks-batches", "plan-batches", "windows from blocks, over exact random ones"),
        ("blocks-of-disk", "blocks-speed", "disk-long", "windows from blocks: of the disk's long reads"),
        ("images-of-disk", "images-speed", "disk-long", "frames of 84x84: of the disk's long reads"),
        ("late", "plan-slowest", "disk-slowest", "exact random windows: slowest of 1,000, over the disk's"),
        (
            "cached",
            "cached-looked",
            "cached-bare",
            "exact random windows in memory: time, over those that ask for nothing",
        ),
    ):
        values = [one[over] / one[under] for one in found if under in one]
        made += [figure_of(f"larger-{key}", name, quartiles_of(values), "times")] if values else []
    return made


def measured(way: str, data: str) -> dict[str, float]:
    """What one of them finds, in a process of its own."""
    return _CHILDREN[way](Path(data))


def _ours(data: Path, way: str) -> dict[str, float]:
    from mouse_core import BatchSource, DatasetStore

    if way == "mapped":
        _never_looking().start()
    store = DatasetStore.open(data)
    sampling = "blocks" if way == "blocks" else "random"
    dtypes = {"obs_image": "uint8"} if way == "images" else {"obs_continuous": "float32"}
    source = BatchSource(store, _LENGTH, _BATCH, sampling, seed=7, dtypes=dtypes)
    return _timed(lambda index: sum(values.nbytes for values in source[index].values()))


def _never_looking() -> Any:
    """While it is entered, sources are made that never look whether their rows are in memory."""
    from mouse_core.readahead import LocalFiles

    return patch.object(LocalFiles, "of", lambda _: None)


def _cached(data: Path) -> dict[str, float]:
    """Seconds that batches take whose rows are all in memory, and of a source that never looks whether they are."""
    from mouse_core import BatchSource, DatasetStore

    def batches(source: BatchSource) -> Callable[[int], None]:
        begun = iter(range(0, 1 << 30, _COUNTED))

        def take(_: int) -> None:
            first = next(begun)
            for index in range(first, first + _COUNTED):
                _ = source[index]

        return take

    read_whole(data)
    made = []
    for context in (nullcontext(), _never_looking()):
        with context:
            made.append(BatchSource(DatasetStore.open(data), _LENGTH, _BATCH, seed=7))
            _ = made[-1][0]
    contenders = [Contender(name, batches(one)) for name, one in zip(("looked", "bare"), made, strict=True)]
    looked, bare = interleave(contenders, rounds=_CACHED_ROUNDS, budget_seconds=_SECONDS)
    return {"cached-looked": looked.median, "cached-bare": bare.median}


def _lance(data: Path) -> dict[str, float]:
    import lance

    drop(data / "rows.lance", "**/*")
    dataset = lance.dataset(str(data / "rows.lance"))
    return _timed(_taken(dataset.count_rows(), lambda rows: int(dataset.take(rows).nbytes)))


def _memmap(data: Path) -> dict[str, float]:
    arrays = [np.load(file, mmap_mode="r") for file in sorted((_others(data) / "arrays").glob("*.npy"))]
    return _timed(_taken(len(arrays[0]), lambda rows: sum(array[rows].nbytes for array in arrays)))


def _torchrl(data: Path) -> dict[str, float]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import TensorStorage

    # `LazyMemmapStorage.loads` would copy all of it into memory.
    storage = TensorStorage(TensorDict.load_memmap(_others(data) / "torchrl"))
    return _timed(_taken(len(storage), lambda rows: storage.get(torch.from_numpy(rows)).bytes()))


def _write_torchrl(data: Path) -> dict[str, float]:
    import torch
    from tensordict import TensorDict

    target = _others(data) / "torchrl"
    if not target.exists():
        arrays = {file.stem: np.load(file, mmap_mode="r+") for file in (_others(data) / "arrays").glob("*.npy")}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        TensorDict(tensors, [len(arrays["action"])]).memmap(target.with_suffix(".new"))
        target.with_suffix(".new").rename(target)
    return {}


def _datasets(data: Path) -> dict[str, float]:
    import datasets

    rows = datasets.load_from_disk(str(data)).with_format("numpy")

    def nbytes(indices: Any) -> int:
        return sum(column.nbytes for column in rows.select(indices)[:].values())

    return _timed(_taken(len(rows), nbytes))


def _others(data: Path) -> Path:
    """Where the same rows are as others have them."""
    return data.with_name(f"{data.name}-others")


def _taken(count: int, take: Callable[[Any], int]) -> Callable[[int], int]:
    """Gives the bytes of the steps of random windows of so many rows, of which ``take`` is given the numbers."""
    draw = np.random.default_rng(0)

    def of(_: int) -> int:
        starts = draw.integers(0, count - _LENGTH, _BATCH)
        return take((starts[:, None] + np.arange(_LENGTH)).reshape(-1))

    return of


def _write_arrays(data: Path) -> dict[str, float]:
    """The same rows as arrays in files."""
    import pyarrow as pa

    target = _others(data) / "arrays"
    if target.exists():
        return {}
    made = target.with_suffix(".new")
    made.mkdir(parents=True, exist_ok=True)
    streams = [pa.ipc.open_stream(pa.memory_map(str(file))) for file in data.glob("*.arrow")]
    count, arrays = sum(len(batch) for stream in streams for batch in stream), dict[str, Any]()
    for begin in range(0, count, _PART):
        for name, values in generate.rows_of(generate.STATE, np.arange(begin, min(begin + _PART, count))).items():
            if name not in arrays:
                shape = (count, *values.shape[1:])
                arrays[name] = np.lib.format.open_memmap(made / f"{name}.npy", "w+", values.dtype, shape)
            arrays[name][begin : begin + _PART] = values
    made.rename(target)
    return {}


def _write_lance(data: Path) -> dict[str, float]:
    import lance
    import pyarrow as pa

    readers = [pa.ipc.open_stream(pa.memory_map(str(file))) for file in sorted(data.glob("*.arrow"))]
    if not (data / "rows.lance").exists():
        rows = (batch.replace_schema_metadata(None) for reader in readers for batch in reader)
        lance.write_dataset(rows, str(data / "rows.lance"), schema=readers[0].schema.remove_metadata())
    return {}


_CHILDREN = {way: lambda data, way=way: _ours(data, way) for way in _WAYS}
_CHILDREN |= {"cached": _cached, "lance": _lance, "write-lance": _write_lance, "write-arrays": _write_arrays}
_CHILDREN |= {"memmap": _memmap, "torchrl": _torchrl, "write-torchrl": _write_torchrl, "datasets": _datasets}


def _timed(take: Callable[[int], int]) -> dict[str, float]:
    """How fast batches come, after some, and what is read from disks for them."""
    index, end = 0, time.perf_counter() + _WARM
    while time.perf_counter() < end:
        take(index)
        index += 1
    before, delivered, seconds = _bytes_read(), 0, []
    while sum(seconds) < _SECONDS:
        began = time.perf_counter()
        delivered += take(index)
        seconds.append(time.perf_counter() - began)
        index += 1
    read, whole = _bytes_read() - before, sum(seconds)
    return {
        "batches": len(seconds) / whole,
        "slowest": 1e3 * sorted(seconds)[int(0.999 * len(seconds))],
        "read": read / delivered,
        "speed": read / whole,
    }


def _bytes_read() -> int:
    """Bytes that this process had read from disks so far."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


if __name__ == "__main__":
    main()
