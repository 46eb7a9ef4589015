"""What does not fit into memory is converted in little of it."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import formats
from tests.core.formats.recording import write_minari
from tests.programs import run_code

# In another process, whose peak is its own. The other one that reads HDF5 files counts, too.
CONVERT = """
import json, resource, sys
from mouse_core import formats
import datasets
from tests.core.peak import peak_mb
before = peak_mb()
stream = formats.open(sys.argv[1], **json.loads(sys.argv[2]))
stream.save(sys.argv[3])
print(json.dumps([before, peak_mb(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""


def convert(source: Path, target: Path, **options: Any) -> None:
    """Convert, and hold the growth of memory under a fraction of what there is to convert."""
    done = run_code(CONVERT, source, json.dumps(options), target)
    assert done.returncode == 0, done.stderr
    before, peak, children = json.loads(done.stdout)
    assert peak - before < 64, (before, peak)
    assert children < 256
    assert sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) > 110e6


@pytest.mark.slow
def test_ogbench(tmp_path: Path) -> None:
    steps = 1_000_000
    ends = np.zeros(steps, np.float32)
    ends[1000::1001] = 1
    observations = np.broadcast_to(np.arange(steps, dtype=np.float32)[:, None], (steps, 30))
    np.savez(tmp_path / "x.npz", observations=observations, actions=np.zeros((steps, 8), np.float32), terminals=ends)
    convert(tmp_path / "x.npz", tmp_path / "rows")


@pytest.mark.long
@pytest.mark.parametrize("episode", [1000, 10**9])
def test_d4rl_and_minari(episode: int, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    steps = 600_000
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for name, shape in (("observations", (steps, 40)), ("actions", (steps, 8)), ("rewards", (steps,))):
            file.create_dataset(name, shape, np.float32, chunks=(4096, *shape[1:]))
            for start in range(0, steps, 100_000):
                file[name][start : start + 100_000] = np.full((100_000, *shape[1:]), start / steps, np.float32)
        file["terminals"] = np.zeros(steps, bool)
        file["timeouts"] = np.arange(steps) % episode == episode - 1
    convert(tmp_path / "x.hdf5", tmp_path / "rows", final="drop", format="d4rl")
    write_minari(formats.open(tmp_path / "rows"), tmp_path / "again-v0")
    convert(tmp_path / "again-v0", tmp_path / "last")


@pytest.mark.long
def test_dopamine(tmp_path: Path) -> None:
    steps = 40_000
    for store, array in (
        ("observation", np.ones((steps, 84, 84), np.uint8)),
        ("action", np.zeros(steps, np.int32)),
        ("reward", np.zeros(steps, np.float32)),
        ("terminal", (np.arange(steps) % 500 == 499).astype(np.uint8)),
    ):
        with gzip.open(tmp_path / f"$store$_{store}_ckpt.0.gz", "wb", compresslevel=1) as file:
            np.save(file, array)
    convert(tmp_path, tmp_path / "rows", final="mark", batch_rows=1024)
