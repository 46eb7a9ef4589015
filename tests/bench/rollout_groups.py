"""Rollouts of language models: taken in, sealed and written beside plain files; batches beside their copy."""

from __future__ import annotations

import itertools
import os
import shutil
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from mouse_core.files.writing import sync_files
from mouse_core.groups import (
    GrpoBatchMaker,
    RolloutBuffer,
    RolloutRecord,
    Turn,
    concatenate,
    make_examples,
    pack,
    pad,
)
from mouse_core.groups.files import encode_part
from tests.bench.results import Figure, Settings, Table, compare, contenders

TOKENS = 512
GROUP = 8
_PROMPT = 128
_AT_ONCE = 4096


def make_rollouts(count: int, answers: int = 64) -> list[RolloutRecord]:
    """Rollouts of 512 tokens, eight for each problem, with so many different answers; others are shared."""
    random = np.random.default_rng(0)
    prompts = [Turn("What is it?", "user", random.integers(0, 50_000, _PROMPT)) for _ in range(64)]
    given = [_answer(random, TOKENS - _PROMPT, "An answer. " * 40) for _ in range(answers)]
    return [_rollout(number, prompts[number // GROUP % 64], given[number % answers]) for number in range(count)]


def _answer(random: np.random.Generator, size: int, text: str = "") -> Turn:
    return Turn(text, "assistant", random.integers(0, 50_000, size), -random.random(size))


def _rollout(number: int, *turns: Turn) -> RolloutRecord:
    return RolloutRecord("math", str(number // GROUP), "1", f"r{number}", turns, number % 3)


def tables(settings: Settings) -> list[Table]:
    """All of it."""
    return [_writing(settings), _opening(settings), _drawing(settings), _packing(settings)]


def figures(settings: Settings) -> list[Figure]:
    """Memory where ten times as many rollouts wait as may be in it: those that may, and the index of all."""
    room, folder = 16 << 20, settings.folder / "rollout-groups-memory"
    shutil.rmtree(folder, ignore_errors=True)
    random, many = np.random.default_rng(0), GROUP * 32

    def add(made: RolloutBuffer, first: int) -> None:
        made.add_rollouts(_rollout(number, _answer(random, TOKENS)) for number in range(first, first + many))

    with RolloutBuffer(folder / "first", GROUP, sync=False) as made:
        add(made, 0)  # imports what it needs
    tracemalloc.start()
    with RolloutBuffer(folder, GROUP, batch_maker=GrpoBatchMaker(), memory_bytes=room, sync=False) as made:
        before, most = tracemalloc.get_traced_memory()[0], 0
        for first in range(0, 10 * room // (8 * TOKENS), many):
            add(made, first)
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
        assert made.num_ahead >= 9 * room // (8 * TOKENS), "all of them wait"
    tracemalloc.stop()
    shutil.rmtree(folder)
    name = "memory, as a multiple of memory_bytes, while ten times memory_bytes wait"
    return [Figure("groups-memory", name, most / room, "")]


def _written(folder: Path, rollouts: Sequence[RolloutRecord]) -> list[Path]:
    """The files into which a buffer writes these rollouts."""
    with RolloutBuffer(folder, GROUP, sync=False) as made:
        made.add_rollouts(rollouts)
        return list(dict.fromkeys(stored.path for stored in made.rollouts().groups))


def _on_disk(
    settings: Settings, key: str, title: str, calls: Mapping[str, Callable[[int], Any]], note: str, budget: float
) -> Table:
    return compare(
        settings,
        key,
        f"Rollout groups: {title}",
        contenders(calls, first="floor", wall=True),
        rounds=max(5, settings.rounds // 5),
        budget=budget,
        units=_AT_ONCE,
        unit="rollouts",
        notes=[f"Times are wall-clock times. {note}"],
    )


def _writing(settings: Settings) -> Table:
    rollouts = make_rollouts(_AT_ONCE, answers=_AT_ONCE)
    folder = settings.folder / "rollout-groups"
    folders = (folder / str(number) for number in itertools.count())
    paths = _written(next(folders), rollouts)
    contents = [path.read_bytes() for path in paths]
    encoded = [pq.ParquetFile(path).read() for path in paths]
    whole, groups = b"".join(contents), _AT_ONCE // GROUP
    a_group = [whole[len(whole) * n // groups : len(whole) * (n + 1) // groups] for n in range(groups)]
    threads = ThreadPoolExecutor(settings.cores)

    def add(number: int, *, sync: bool = True) -> None:
        with RolloutBuffer(next(folders), GROUP, sync=sync) as made:
            made.add_rollouts(rollouts)

    def files(contents: list[bytes], number: int) -> None:
        root = next(folders)
        root.mkdir(parents=True)
        _plain_files(root, contents)

    calls: dict[str, Callable[[int], Any]] = {
        "the same bytes in a file a group, synced and renamed": partial(files, a_group),
        f"the same bytes in {len(contents)} files, as mouse writes them": partial(files, contents),
        f"pyarrow encoding the same files, {settings.cores} threads": lambda number: list(
            threads.map(lambda rows: encode_part(rows, "zstd", {}), encoded)
        ),
        "mouse add_rollouts": add,
        "mouse add_rollouts, sync=False": partial(add, sync=False),
    }
    title = f"{_AT_ONCE:,} rollouts of {TOKENS} tokens added, sealed and written, {GROUP} a group"
    note = "pyarrow encodes the tables in memory and writes no file."
    table = _on_disk(settings, "groups-write", title, calls, note, 3)
    # Not between rounds: for a minute ext4 passes over the inodes that were freed whenever a file is made, and that
    # takes several times as long as making it.
    shutil.rmtree(folder, ignore_errors=True)
    return table


def _plain_files(root: Path, contents: list[bytes]) -> None:
    paths = [root / f"{number}.partial" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(file, content)
        os.close(file)
    sync_files(paths)
    for path in paths:
        os.replace(path, path.with_suffix(".parquet"))


def _opening(settings: Settings) -> Table:
    folder = settings.folder / "rollout-groups-opened"
    paths = _written(folder, make_rollouts(_AT_ONCE))

    def files(number: int) -> None:
        for path in paths:
            pq.ParquetFile(path).read(use_threads=False)

    calls: dict[str, Callable[[int], Any]] = {
        "pyarrow reading the files one after the other": files,
        "mouse RolloutBuffer, all may be drawn": lambda number: RolloutBuffer(
            folder, GROUP, batch_maker=GrpoBatchMaker()
        ).close(),
        "mouse RolloutBuffer, without batches": lambda number: RolloutBuffer(folder, GROUP).close(),
    }
    title = f"a folder of {_AT_ONCE:,} rollouts of {TOKENS} tokens, {GROUP} a group, opened again"
    note = "In all rows except the first row, digests and page checksums are verified."
    table = _on_disk(settings, "groups-open", title, calls, note, 2)
    shutil.rmtree(folder)
    return table


def _drawing(settings: Settings) -> Table:
    count, size = (20_000, 1024) if settings.quick else (100_000, 1024)
    maker = GrpoBatchMaker(max_uses=10**9)
    for rollout in make_rollouts(count):
        maker.add_rollout(rollout)
    batch = maker.create_batch(size) or []
    calls: dict[str, Callable[[int], Any]] = {
        "NumPy copying the same examples": lambda number: _copied(batch),
        "mouse create_batch": lambda number: maker.create_batch(size),
    }
    title = f"Rollout groups: a batch of {size:,} of {count:,} rollouts"
    return compare(settings, "groups-draw", title, contenders(calls, first="floor"))


def _copied(examples: Sequence[Any]) -> list[Any]:
    names = ("tokens", "loss_mask", "advantage", "generator_log_probs")
    return [np.concatenate([getattr(example, name) for example in examples]) for name in names]


def _packing(settings: Settings) -> Table:
    random = np.random.default_rng(0)
    sizes = random.integers(100, 900, 512).tolist()
    rollouts = [_rollout(number, _answer(random, size)) for number, size in enumerate(sizes)]
    examples = make_examples(rollouts, np.ones(len(rollouts)))
    calls: dict[str, Callable[[int], Any]] = {
        "np.concatenate of the same four fields": lambda number: _copied(examples),
        "mouse pack, rows of 2,048": lambda number: pack(examples, 2048),
        "mouse pad, rows of the longest": lambda number: pad(examples),
        "mouse concatenate": lambda number: concatenate(examples),
    }
    title = f"Rollout groups: 512 examples of 100 to 900 tokens, {sum(sizes):,} tokens in total"
    return compare(settings, "groups-pack", title, contenders(calls, first="floor"))
