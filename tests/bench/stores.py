"""Stores in folders beside stores in memory: python -m tests.bench.stores."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np

from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier
from mouse_core.record import Recorder
from mouse_core.store.disk.manifest import NAME, parse_manifest, write_manifest
from tests.bench import generate
from tests.bench.appends import rows_as_dicts

_ROWS = 20_000
_FILES = 10_000


def main() -> None:
    """Measure and print; each figure with the one that it is compared with."""
    with tempfile.TemporaryDirectory() as folder:
        _appends(Path(folder))
        _flushes(Path(folder))
        _recordings(Path(folder))
        _many_files(Path(folder) / "many")
        _follow(Path(folder) / "many")
        _grow(Path(folder) / "grown")


def _appends(folder: Path) -> None:
    rows = rows_as_dicts(2_000)
    best = {"memory": np.inf, "none": np.inf}
    for number in range(5):
        for name in best:
            store = DatasetStore()
            if name == "none":
                store = DatasetStore.open(folder / f"none{number}", "a", sync="none")
            begin = time.process_time()
            for _ in range(_ROWS // len(rows)):
                for row in rows:
                    store.append(row)
            best[name] = min(best[name], time.process_time() - begin)
            store.close()
    microseconds = {name: seconds / _ROWS * 1e6 for name, seconds in best.items()}
    print(f"append, us a row: {microseconds}, share {best['memory'] / best['none']:.2f}")


def _flushes(folder: Path) -> None:
    """A flush every 1,000 rows, beside the same appends in memory, a write and an fsync of as many bytes."""
    rows = rows_as_dicts(1_000)
    content = os.urandom(sum(values.nbytes for values in generate.rows_of(generate.STATE, np.arange(1_000)).values()))
    with DatasetStore.open(folder / "flushed", "a") as store, (folder / "bare").open("wb") as bare:
        memory = DatasetStore()
        seconds = dict.fromkeys(("flush", "bare"), 0.0)
        for _ in range(_ROWS // 1_000):
            begin = time.perf_counter()
            for row in rows:
                store.append(row)
            store.flush()
            middle = time.perf_counter()
            for row in rows:
                memory.append(row)
            bare.write(content)
            bare.flush()
            os.fsync(bare.fileno())
            seconds["flush"] += middle - begin
            seconds["bare"] += time.perf_counter() - middle
    print(f"a flush every 1,000 rows: {seconds}, share {seconds['bare'] / seconds['flush']:.2f}")


def _recordings(folder: Path) -> None:
    """Steps of an environment that does nothing, recorded in memory and in a folder, where they survive a kill."""
    best = {"memory": np.inf, "folder, cut": np.inf, "folder, mark": np.inf}
    for number in range(5):
        for name in best:
            how = name.rpartition(" ")[2]
            store = DatasetStore()
            if name != "memory":
                store = DatasetStore.open(folder / f"recorded-{how}-{number}", "a", sync="none")
            env = Recorder(_Still(), store, on_interrupted="mark" if name == "memory" else how)
            begin = time.process_time()
            for step in range(_ROWS):
                if step % 200 == 0:
                    env.reset()
                env.step(0)
            best[name] = min(best[name], time.process_time() - begin)
            env.close()
            store.close()
    print(f"recorded steps, us each: { {name: round(seconds / _ROWS * 1e6, 1) for name, seconds in best.items()} }")


class _Still(gymnasium.Env[np.ndarray, int]):
    """Nothing happens."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,))
    action_space = gymnasium.spaces.Discrete(2)
    _seen = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self._seen, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._seen, 0.0, False, False, {}


def _many_files(folder: Path) -> None:
    """100 million rows in 10,000 files, which are links to one."""
    with DatasetStore.open(folder, "a") as store:
        store.extend(generate.rows_of(generate.STATE, np.arange(10_000)))
    manifest = parse_manifest(folder / NAME, (folder / NAME).read_bytes())
    (first,) = manifest.segments
    files = [first._replace(number=first.number + 1 + number) for number in range(_FILES)]
    for one in files:
        os.link(folder / first.name, folder / one.name)
    write_manifest(folder, replace(manifest, segments=tuple(files), next_number=files[-1].number + 1))
    for _ in range(3):
        times = [time.perf_counter()]
        store = DatasetStore.open(folder)
        times.append(time.perf_counter())
        source = BatchSource(store, 64, 32)
        times.append(time.perf_counter())
        for number in range(2):
            source[number]
            times.append(time.perf_counter())
        opened, bound, batch, other = np.diff(times)
        print(f"{len(store):,} rows: open {opened:.3f} s, source {bound:.3f} s, batches {batch:.3f} and {other:.3f} s")


def _follow(folder: Path) -> None:
    """How long it takes until rows that another process flushed are in batches, of a store of many files."""
    seconds = []
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write, args=(folder, theirs))
    writer.start()
    with PrefetchBatchifier(DatasetStore.open(folder), 64, 32) as loader:
        for _ in range(80):
            ours.send(True)
            rows = ours.recv()
            times = [time.perf_counter()]
            loader.refresh()
            times.append(time.perf_counter())
            next(iter(loader))
            times.append(time.perf_counter())
            assert len(loader.source.snapshot) == rows
            seconds.append(np.diff(times))
    ours.send(False)
    writer.join()
    for name, of_all in zip(("refresh()", "the first batch"), np.transpose(seconds)[:, 1:], strict=True):
        print(f"{_FILES:,} files, {name}: median {np.median(of_all) * 1e3:.1f} ms, longest {of_all.max() * 1e3:.1f} ms")


def _write(folder: Path, asked: Connection) -> None:
    """Write rows when asked to. Files are not put together, for which 6 GB would be written."""
    rows = generate.rows_of(generate.STATE, np.arange(1_000))
    with (
        patch("mouse_core.store.disk.writing.small_run", return_value=range(0)),
        DatasetStore.open(folder, "a") as writer,
    ):
        while asked.recv():
            writer.extend(rows)
            writer.flush()
            asked.send(len(writer))


def _grow(folder: Path) -> None:
    """Batches of a loader to which 200 rows come every so many batches, beside those of one whose rows stay."""
    rows = generate.rows_of(generate.STATE, np.arange(200_000))
    few = {name: values[:200] for name, values in rows.items()}
    with DatasetStore.open(folder, "a") as writer:
        writer.extend(rows)
        writer.flush()
        reader = DatasetStore.open(folder)
        for every, workers in ((100, 0), (100, 2), (500, 0), (500, 2)):
            rounds: dict[str, list[float]] = {"growing": [], "finished": []}
            loaders = {name: PrefetchBatchifier(reader, 64, 32, num_workers=workers) for name in rounds}
            for number in range(-3, 20_000 // every):
                writer.extend(few)
                writer.flush()
                for name in sorted(loaders, reverse=bool(number % 2)):
                    begin = time.perf_counter()
                    if name == "growing":
                        loaders[name].refresh()
                    for _ in range(every):
                        loaders[name].next_batch()
                    rounds[name] += [time.perf_counter() - begin] * (number >= 0)
            for loader in loaders.values():
                loader.close()
            seconds = {name: float(np.median(of_each)) for name, of_each in rounds.items()}
            share = seconds["growing"] / seconds["finished"]
            print(f"refresh every {every} batches, {workers} workers: {seconds}, share {share:.2f}")


if __name__ == "__main__":
    main()
