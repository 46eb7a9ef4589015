"""Files as a release leaves them on disk, kept so that later ones can be held to reading them.

``python -m tests.core.golden_files VERSION`` makes ``tests/data/written_by_VERSION.tar.xz``, and the JSON file of what
is in it. It is run once for a release; what it made is never made again.
"""

from __future__ import annotations

import json
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
from tests.core.groups_cases import group

DATA = Path(__file__).resolve().parent.parent / "data"
ARCHIVE = DATA / "written_by_0.1.tar.xz"
LEFT: dict[str, Any] = (
    json.loads((DATA / "written_by_0.1.json").read_text(encoding="utf-8")) if ARCHIVE.exists() else {}
)
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


if __name__ == "__main__":
    archive = DATA / f"written_by_{sys.argv[1]}.tar.xz"
    if archive.exists():
        sys.exit(f"{archive} is there, and stays as it is")
    with tempfile.TemporaryDirectory() as folder:
        left = write(Path(folder))
        with tarfile.open(archive, "w:xz") as target:
            target.add(folder, arcname=".")
    archive.with_suffix("").with_suffix(".json").write_text(json.dumps(left, indent=1) + "\n", encoding="utf-8")
