"""Damage one file at a time in copies of everything that is ours: no wrong value is silent, no process dies or hangs.

Each copy is read by a process of its own. It finds what was written, or raises an error or a warning of ours.

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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core import DatasetStore, formats
from mouse_core.errors import MouseError, StoreWarning
from mouse_core.files.log import Log, read_log
from mouse_core.formats.verifying import verify
from mouse_core.replay import ArrayStorage, MemmapStorage, ReplayBuffer
from mouse_core.store.derived import DerivedStore, Return
from mouse_study.results import SCHEMA, Results, Run
from mouse_study.results import read as read_results
from tests.core import groups_crash
from tests.core.disk_cases import rows_kept, rows_of, table_of
from tests.core.killing import forked

SECONDS = 30
WAYS = ("flip", "cut", "zero", "double", "swap", "remove")


def damage(folder: Path, rng: random.Random) -> str:
    """Damage a file of a folder, or exchange two files of a kind; return what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path, way = rng.choice(files), rng.choice(WAYS)
    content = bytearray(path.read_bytes())
    at = rng.choice((rng.randrange(len(content)), rng.randrange(min(len(content), 3000))))
    if way == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del content[at:]
    elif way == "zero":
        end = at + rng.choice((1, 64, 4096))
        content[at:end] = bytes(len(content[at:end]))
    elif way == "double":
        content[at:at] = content[at : at + rng.choice((8, 4096, len(content)))]
    elif way == "swap":
        other = rng.choice([one for one in files if one.suffix == path.suffix])
        content[:], was = other.read_bytes(), bytes(content)
        other.write_bytes(was)
    path.write_bytes(content)
    if way == "remove":
        path.unlink()
    return f"{way} {path.relative_to(folder)} at {at}"


def _store(folder: Path, *, closes: bool = True) -> None:
    def write() -> None:
        store = DatasetStore.open(folder, "a")
        store.extend(rows_of("mixed", 0, 200))
        store.close()
        store = DatasetStore.open(folder, "a")
        store.extend(rows_of("mixed", 200, 100))
        store.flush()
        if closes:
            store.close()

    os.waitpid(forked(write), 0)


def _written(folder: Path) -> Any:
    with DatasetStore.open(folder, "a") as store:
        return rows_kept(store)


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
}


def outcome(read: Callable[[Path], Any], folder: Path, said: Path) -> dict[str, Any]:
    """Read a folder in a process of its own; the value, or an error or warning of ours, or how the process ended."""

    def work() -> None:
        signal.alarm(SECONDS)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", StoreWarning)
            try:
                found = {"value": read(folder)}
            except MouseError as error:
                found = {"told": str(error)}
        found |= {"told": str(warned[0].message)} if warned else {}
        said.write_text(json.dumps(found, default=str))

    said.write_text("{}")
    status = os.waitpid(forked(work), 0)[1]
    return {"ended": status} if status else json.loads(said.read_text())


def faults(kind: str, copies: int, seed: int, base: Path) -> list[str]:
    """Damage copies of a kind; the damages that were silent, killed the process or raised an error that is not ours."""
    make, read = OURS[kind]
    whole, copy, rng = base / "whole", base / "copy", random.Random(f"{kind} {seed}")
    make(whole)
    shutil.copytree(whole, copy)
    wanted, found = outcome(read, copy, base / "said"), []
    assert "value" in wanted, wanted
    for number in range(copies):
        shutil.rmtree(copy)
        shutil.copytree(whole, copy)
        what = damage(copy, rng)
        got = outcome(read, copy, base / "said")
        if "told" not in got and got != wanted:
            found.append(f"{kind} {number}: {what}: {str(got)[:200] if 'ended' in got else 'silent'}")
            print(found[-1], file=sys.stderr, flush=True)
    return found


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
            counts[kind] = len(faults(kind, chosen.copies // len(kinds), chosen.seed, Path(base)))
    print(json.dumps(counts))
    return bool(sum(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
