"""Rows that do not fit in the memory that there is: the same batches, and little is read for them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DatasetStore
from tests.core.limited_reader import checksum
from tests.limited import can_limit, limited

ROWS, MEGABYTE = 370_000, 1 << 20
BATCHES = 250

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_limit(), reason="no control groups that limit memory may be made here"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 MB in one file, of 1,000 rows a record batch."""
    number, rng = np.arange(ROWS), np.random.default_rng(0)
    columns: dict[str, Any] = {
        "action": rng.integers(0, 5, ROWS),
        "reward": np.where(number % 100 == 0, 0, rng.normal(size=ROWS)).astype(np.float32),
        "done": (number % 100 == 99).astype(np.int8),
        "observation": pa.FixedSizeListArray.from_arrays(rng.random(40 * ROWS, np.float32), 40),
    }
    table, file = pa.table(columns), tmp_path_factory.mktemp("rows") / "rows.arrow"
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=1_000)
    assert file.stat().st_size > 60 * MEGABYTE
    return file


@pytest.mark.parametrize(("sampling", "most"), [("random", 4.0), ("blocks", 2.0)])
def test_batches_are_those_of_memory_without_a_limit(rows: Path, sampling: Any, most: float) -> None:
    """Windows by themselves take pages of 4 KB of each column; the system by itself reads hundreds of times that."""
    with limited(30 * MEGABYTE) as group:
        command = [sys.executable, "-m", "tests.core.limited_reader", str(rows), str(group), sampling, str(BATCHES)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    source = BatchSource(DatasetStore.open(rows), 32, 32, sampling, seed=3)
    assert found["sums"] == [checksum(source[index]) for index in range(BATCHES)]
    assert found["read"] < most * found["delivered"]
