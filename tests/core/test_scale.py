"""Five million steps: opened without a scan, read right anywhere, in little memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.bench import generate

pytestmark = pytest.mark.slow

ROWS = 5_000_000
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if sys.platform != "linux":
        pytest.skip("reads /proc, and limits what Linux counts as data")
    folder = tmp_path_factory.mktemp("scale")
    generate.write(generate.STATE, folder / "data", ROWS, files=2)
    size = sum(file.stat().st_size for file in (folder / "data").glob("*.arrow"))
    command = [sys.executable, "-m", "tests.core.scale_reader", str(folder / "data"), str(ROWS)]
    done = subprocess.run(command, capture_output=True, text=True)
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "size": size}


def test_windows_anywhere_are_what_the_row_numbers_say(report: dict[str, Any]) -> None:
    assert report["rows"] == ROWS
    assert report["differing"] == []
    assert report["held"] == []


def test_the_first_batch_reads_a_few_pages(report: dict[str, Any]) -> None:
    """Nothing is scanned: reading one column would touch every record batch, and Linux maps 64 KB at a touch."""
    assert report["size"] > 800 * MEGABYTE
    assert report["touched by the first batch"] < 64 * MEGABYTE < ROWS // 1000 * 65536


def test_an_epoch_streams_through_little_memory(report: dict[str, Any]) -> None:
    """Every row of a file of 840 MB was read by a process that may hold 300 MB of data more than at its start."""
    blocks = np.split(np.arange(ROWS // 64 * 64), 64)
    steps = (generate.rows_of(generate.DISCRETE, rows)["episode_step"].sum() for rows in blocks)
    assert report["checksum"] == sum(steps)
    assert report["grown in an epoch"] < 100 * MEGABYTE


def test_the_generator_says_the_same_of_a_row_wherever_it_is_asked() -> None:
    rows = np.array([0, 999, 1000, 4_999_999, 99_999_999])
    together = generate.rows_of(generate.STATE, rows)
    for place, row in enumerate(rows.tolist()):
        alone = generate.rows_of(generate.STATE, np.array([row]))
        assert all(np.array_equal(together[name][place], alone[name][0]) for name in together)


def test_the_generator_makes_episodes() -> None:
    columns = generate.rows_of(generate.STATE, np.arange(200_000))
    step, done = columns["episode_step"], columns["done"]
    ends = np.nonzero(done)[0]
    assert set(np.unique(done)) == {0, 1, 2}
    # A step follows the one before, but for an episode's first, which follows an end and holds placeholders.
    assert np.array_equal(step[1:], np.where(done[:-1] > 0, 0, step[:-1] + 1))
    firsts = step == 0
    assert not columns["action"][firsts].any()
    assert not columns["reward"][firsts].any()
    assert (step[ends[done[ends] == 2]] >= 1000).all()
    assert len(np.unique(columns["observation"][:5000], axis=0)) == 5000
