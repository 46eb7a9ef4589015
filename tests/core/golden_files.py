"""Files as a release leaves them on disk, kept so that later ones can be held to reading them.

``python -m tests.core.golden_files written_by_VERSION`` makes ``tests/data/written_by_VERSION.tar.xz``, and the JSON
file of what is in it; ``store_format_NUMBER`` does so of stores in folders. It is run once for a release, or a
format of stores; what it made is never made again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from mouse_core import BatchSource, DatasetStore, formats
from mouse_core.formats.converting import convert
from mouse_core.groups import GrpoBatchMaker, RolloutBuffer
from mouse_core.replay import MemmapStorage, ReplayBuffer
from mouse_core.testing import stream_digest
from tests.core import golden
from tests.core.disk_cases import KINDS, numbers_in, rows_of, table_of
from tests.core.groups_cases import group
from tests.core.killing import forked

DATA = Path(__file__).resolve().parent.parent / "data"
ARCHIVE = DATA / "written_by_0.1.tar.xz"
# Rows of a dataset in the stores of each format, and the layout of those that have one.
FORMATS: dict[int, tuple[int, Any]] = {1: (60, None), 2: (600, "windows")}
STORES = {version: DATA / f"store_format_{version}.tar.xz" for version in FORMATS}


def left_in(archive: Path) -> dict[str, Any]:
    """What is in an archive; nothing where it is not made yet."""
    said = archive.with_suffix("").with_suffix(".json")
    return json.loads(said.read_text(encoding="utf-8")) if archive.exists() else {}


LEFT, LEFT_STORES = left_in(ARCHIVE), {version: left_in(archive) for version, archive in STORES.items()}
FIELDS = ("action", "reward", "done", "time", "q_star", "obs_continuous", "obs_discrete")


def group_batch(examples: Any) -> str:
    """A digest of what examples hold."""
    return stream_digest(
        [
            {
                "tokens": one.tokens,
                "mask": one.loss_mask,
                "advantage": one.advantage,
                "log_probs": one.generator_log_probs,
            }
            for one in examples
        ],
        len(examples),
    )


def write(folder: Path) -> dict[str, Any]:
    """Write one of each kind of file; what is in them."""
    left: dict[str, Any] = {"fields": FIELDS}
    made = DatasetStore()
    made.extend(golden.columns(100))
    made.to_dataset().save_to_disk(str(folder / "saved"))
    outgoing = DatasetStore(alignment="outgoing")
    outgoing.extend({name: values for name, values in golden.columns(100).items() if name != "observation_image"})
    outgoing.to_dataset().save_to_disk(str(folder / "outgoing"))
    for target, options in (("converted", {}), ("converted.parquet", {}), ("parts", {"to": "parquet"})):
        convert(formats.open(folder / "saved"), folder / target, **options)  # type: ignore[arg-type]
    for name in ("saved", "outgoing", "converted", "parts", "converted.parquet"):
        store = formats.open(folder / name).to_store()
        left[name] = stream_digest(BatchSource(store, 9, 8, fields=list(FIELDS)), 20)
    golden.buffer_state().dumps(folder / "buffer.checkpoint")
    rows = MemmapStorage(60, folder / "rows")
    ReplayBuffer(rows).extend(golden.transitions(100))
    rows.close()
    with RolloutBuffer(folder / "groups", group_size=4, batch_maker=GrpoBatchMaker(rng_seed=0)) as buffer:
        buffer.add_rollouts([*group(0), *group(4, example="other"), *group(8, 3, example="third")])
        batch = buffer.create_and_store_batch(6)
        assert batch is not None
        left["batch"] = group_batch(buffer.read_batch(batch))
        left["uids"] = sorted(one.rollout_uid for one in buffer.rollouts())
    return left


def store_digest(store: DatasetStore) -> str:
    """A digest of batches of every field of a store."""
    return stream_digest(BatchSource(store, 9, 8), 20)


def write_stores(folder: Path, version: int) -> dict[str, Any]:
    """Write stores of a format with files of every kind, as a process leaves them that is killed; what is in them.

    Each has rows that were dropped, sealed rows that were appended, others of a dataset, and a file of appended rows
    with several commits, in blocks of checksums that are full and one that is not.
    """
    left: dict[str, Any] = {}
    rows, layout = FORMATS[version]
    for kind in KINDS:
        path = folder / kind

        def work(path: Path = path, kind: str = kind) -> None:
            for first, count in ((0, 90), (90, 300)):
                with DatasetStore.open(path, "a", max_rows=200) as store:
                    store.extend(rows_of(kind, first, count))
            with DatasetStore.open(path, "a", layout=layout) as store:
                store.from_dataset(table_of(kind, 390, rows))
            store = DatasetStore.open(path, "a", sync="flush")
            for first, count in ((390 + rows, 50), (440 + rows, 1500)):
                store.extend(rows_of(kind, first, count))
                store.flush()

        os.waitpid(forked(work), 0)
        (path / "lock").write_text("process 1 on another machine")
        with tempfile.TemporaryDirectory() as other:
            shutil.copytree(path, Path(other) / "store")
            store = DatasetStore.open(Path(other) / "store")
            found = numbers_in(store)
            files = sorted(str(one.relative_to(path)) for one in path.rglob("*") if one.is_file())
            left[kind] = {"rows": [found.start, found.stop], "digest": store_digest(store), "files": files}
    return left


if __name__ == "__main__":
    archive = DATA / f"{sys.argv[1]}.tar.xz"
    _, _, version = sys.argv[1].partition("store_format_")
    if archive.exists():
        sys.exit(f"{archive} is there, and stays as it is")
    with tempfile.TemporaryDirectory() as folder:
        left = write_stores(Path(folder), int(version)) if version else write(Path(folder))
        with tarfile.open(archive, "w:xz") as target:
            target.add(folder, arcname=".")
    archive.with_suffix("").with_suffix(".json").write_text(json.dumps(left, indent=1) + "\n", encoding="utf-8")
