"""Damage one file at a time in copies of everything that is ours: no wrong value is silent, no process dies or hangs.

A process that reads a copy finds what was written, or raises an error or a warning of ours. ``repair`` of a store keeps
all rows of undamaged files.

    python -m tests.damage --copies 20000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core import DatasetStore, formats
from mouse_core.errors import MouseError, StoreWarning
from mouse_core.files.checkpoint import read_checkpoint
from mouse_core.files.checksum import checksum
from mouse_core.files.log import Log, read_log
from mouse_core.formats.converting import preprocess
from mouse_core.formats.verifying import verify
from mouse_core.replay import ArrayStorage, MemmapStorage, ReplayBuffer
from mouse_core.store.derived import DerivedStore, Return
from mouse_core.store.disk.checking import repair
from mouse_core.video import FrameDecoder, index_video
from mouse_study import collect
from mouse_study.results import SCHEMA, Results, Run
from mouse_study.results import read as read_results
from tests.core import groups_crash
from tests.core.damaged_files import damage
from tests.core.disk_cases import check_batches, rows_kept, rows_of, table_of
from tests.core.killing import forked
from tests.core.video_cases import write_video
from tests.study import trained

SECONDS = 30
# Rows of the first file of a store, and of both files; an episode has 7.
FIRST, ROWS = 60, 90


def _store(folder: Path, *, closes: bool = True) -> None:
    def write() -> None:
        store = DatasetStore.open(folder, "a", layout="windows" if closes else "columns")
        store.extend(rows_of("mixed", 0, FIRST))
        store.close()
        store = DatasetStore.open(folder, "a")
        store.extend(rows_of("mixed", FIRST, ROWS - FIRST))
        store.flush()
        if closes:
            store.close()

    os.waitpid(forked(write), 0)


def _written(folder: Path) -> Any:
    with DatasetStore.open(folder) as store:
        found = rows_kept(store)
        check_batches(store)
    with DatasetStore.open(folder, "a") as store:
        return [found, rows_kept(store)]


def _repaired(folder: Path) -> Any:
    done = repair(folder)
    assert not repair(folder).said, "repaired twice"
    with DatasetStore.open(folder, "a") as store:
        found = rows_kept(store)
    assert len(found) == done.rows, f"{len(found)} rows, and {done.rows} were said to be whole"
    return found


def _whole_rows(whole: Path, copy: Path) -> set[int]:
    """The rows of a store's files that are as they were, without the rest of an episode behind a gap."""
    files = sorted([*whole.glob("segments/*"), *whole.glob("tail*")])
    rows, after_gap = set[int](), False
    for part, first, stop in ((files[:1], 0, FIRST), (files[1:], FIRST, ROWS)):
        copies = [copy / file.relative_to(whole) for file in part]
        if all(now.exists() and now.read_bytes() == was.read_bytes() for was, now in zip(part, copies, strict=True)):
            rows |= {*range(-(-first // 7) * 7 if after_gap else first, stop)}
        else:
            after_gap = True
    return rows


def _saved(folder: Path) -> None:
    store = DatasetStore()
    store.extend(rows_of("numbers", 0, 200))
    store.save(folder)


def _mapped(folder: Path) -> None:
    storage = MemmapStorage(50, folder)
    storage.append({"a": np.arange(60), "text": [str(n) * (n % 5) for n in range(60)]})
    storage.close()


def _mapped_rows(folder: Path) -> Any:
    storage = MemmapStorage(None, folder)
    storage.verify()
    rows = storage.get(np.arange(len(storage)))
    return [rows["a"].tolist(), list(rows["text"])]


def _checkpoint(folder: Path) -> None:
    buffer = ReplayBuffer(ArrayStorage(50))
    buffer.extend({"a": np.arange(40), "b": np.ones((40, 3))})
    folder.mkdir()
    buffer.dumps(folder / "saved")


def _restored(folder: Path) -> Any:
    buffer = ReplayBuffer(ArrayStorage(50))
    buffer.loads(folder / "saved")
    return [buffer[:]["a"].tolist(), buffer[:]["b"].tolist()]


def _rollouts(folder: Path) -> None:
    groups_crash.run(folder, lambda *values: None)


def _grouped(folder: Path) -> Any:
    with groups_crash.opened(folder) as buffer:
        return [groups_crash.drawn(buffer), *(str(buffer.rollout(uid)) for uid in groups_crash.ROLLOUTS)]


def _log(folder: Path) -> None:
    folder.mkdir()
    with Log(folder / "log") as log:
        for number in range(20):
            log.append(bytes([number]) * number * 9, sync=number % 3 == 0)


def _results(folder: Path) -> None:
    folder.mkdir()
    run: dict[str, Any] = {"run": "a/b/0", "variant": "a", "framework": "b", "seed": 0}
    rows = [run | {"step": step, "name": "loss", "value": step / 7} for step in range(99)]
    Results("name", 99, (Run(**run, status="done", steps=99),), pa.Table.from_pylist(rows, SCHEMA)).write(
        folder / "results.parquet"
    )


def _returns(folder: Path) -> Any:
    store = DatasetStore().from_dataset(table_of("numbers", 0, 200))
    return [str(DerivedStore(store, {"return": Return()}, path=folder)[3:90])]


def _doubled(rows: dict[str, Any]) -> dict[str, Any]:
    return {"reward": 2 * rows["reward"]}


def _preprocessed(folder: Path) -> Any:
    found = preprocess(table_of("numbers", 0, 200), _doubled, folder)
    return [verify(folder).rows, formats.open(folder).digest(), found.rows]


def _study(folder: Path) -> None:
    trained.study(frameworks={"numpy": trained.train_without_batches}, seeds=[0]).run(folder, progress=False)


def _studied(folder: Path) -> Any:
    found, run = collect(folder), folder / "runs" / "default" / "numpy" / "0"
    return [str(found), found.table.to_pylist(), str(read_checkpoint(run / "checkpoint"))]


def _video(folder: Path) -> None:
    folder.mkdir()
    index_video(write_video(folder / "x.mp4"))


def _decoded(folder: Path) -> Any:
    index = index_video(folder / "x.mp4")
    frames = np.arange(0, len(index.packet), 7)
    out = np.empty((len(frames), index.height, index.width, 3), np.uint8)
    FrameDecoder().decode([index], np.zeros_like(frames), frames, out)
    return [index.digest, checksum(out.tobytes())]


OURS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "store": (_store, _written),
    "open store": (lambda folder: _store(folder, closes=False), _written),
    "saved": (_saved, lambda folder: [verify(folder).rows, formats.open(folder).digest()]),
    "mapped": (_mapped, _mapped_rows),
    "checkpoint": (_checkpoint, _restored),
    "rollouts": (_rollouts, _grouped),
    "log": (_log, lambda folder: [record.hex() for record in read_log(folder / "log")]),
    "results": (_results, lambda folder: [str(found := read_results(folder)), found.table.to_pylist()]),
    "derived": (_returns, _returns),
    "preprocessed": (_preprocessed, _preprocessed),
    "study": (_study, _studied),
    "index of a video": (_video, _decoded),
}


def outcome(read: Callable[[Path], Any], folder: Path) -> dict[str, Any]:
    """The value that a folder is read as, or an error or warning of ours, or another error."""
    signal.alarm(SECONDS)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", StoreWarning)
        try:
            found = {"value": json.loads(json.dumps(read(folder), default=str))}
        except MouseError as error:
            found = {"told": str(error)}
        except Exception as error:
            found = {"foreign": repr(error)}
    return found | ({"told": str(warned[0].message)} if warned else {})


def fault(kind: str, whole: Path, copy: Path, wanted: Any, rng: random.Random) -> str:
    """Damage a copy and read it; what is wrong with that, else an empty text."""
    read = OURS[kind][1]
    shutil.copytree(whole, copy)
    # A video has no checksums: its index is made again if the video has changed.
    what = damage(copy, rng, "*.index.arrow" if kind == "index of a video" else "*")
    needed, again = _whole_rows(whole, copy) if read is _written else set(), copy.with_name("again")
    if needed:
        shutil.copytree(copy, again)
    got = outcome(read, copy)
    if "told" not in got and got != wanted:
        return f"{what}: {'silent' if 'value' in got else got}"
    if needed:
        got = outcome(_repaired, again)
        shutil.rmtree(again)
        if not needed.issubset(got.get("value", ())):
            return f"{what}: repaired: {got}"
    return ""


def faults(kind: str, copies: int, seed: int, base: Path) -> list[str]:
    """Damage copies of a kind; the damages that were silent, killed the process or raised an error that is not ours.

    A child reads copies until one kills it; another child continues behind it.
    """
    make, read = OURS[kind]
    whole, at, found = base / "whole", base / "at", base / "found"
    make(whole)
    found.touch()

    def work(first: int) -> None:
        at.write_text(str(first))
        shutil.copytree(whole, base / f"whole {first}")
        wanted = outcome(read, base / f"whole {first}")
        assert "value" in wanted, wanted
        for number in range(first, copies):
            at.write_text(str(number))
            copy = base / str(number)
            if wrong := fault(kind, whole, copy, wanted, random.Random(f"{kind} {seed} {number}")):
                with found.open("a") as lines:
                    lines.write(f"{kind} {number}: {' '.join(wrong.split()):.400}\n")
            shutil.rmtree(copy)

    first = 0
    while first < copies and (status := os.waitpid(forked(partial(work, first)), 0)[1]):
        first = int(at.read_text()) + 1
        with found.open("a") as lines:
            lines.write(f"{kind} {first - 1}: ended with status {status}\n")
    return found.read_text().splitlines()


def main() -> int:
    """Damage copies of each kind, and print how many and what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=900, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=OURS)
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    kinds = [chosen.kind] if chosen.kind else [*OURS]
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="damage-") as base:
            found = faults(kind, chosen.copies // len(kinds), chosen.seed, Path(base))
        counts[kind] = len(found)
        sys.stderr.writelines(f"{line}\n" for line in found)
    print(json.dumps(counts))
    return bool(sum(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
