"""Studies in PyTorch and JAX: killed whenever, and those of the guide."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import mouse_study
from mouse_study import Study
from scripts.house import ROOT
from tests.study import networks
from tests.test_docs import blocks

pytestmark = pytest.mark.slow


def steps_of(folder: Path) -> int:
    """Steps that all runs have recorded."""
    begun = (folder / "study.json").exists()
    return sum(run.steps for run in mouse_study.collect(folder).runs) if begun else 0


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_kills_change_nothing(tmp_path: Path) -> None:
    whole = networks.study().run(tmp_path / "whole", jobs=2)
    folder = tmp_path / "killed"
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-m", "tests.study.networks", folder], cwd=ROOT)
        for kill_run in (True, False):
            before = steps_of(folder)
            while process.poll() is None and steps_of(folder) < before + 25:
                time.sleep(0.02)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]) if kill_run and children else process.pid, signal.SIGKILL)
        process.wait()
    again = networks.study().run(folder, jobs=2)
    for name in ("loss", "evaluation"):
        expected, found = whole.series(name), again.series(name)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[run][1], found[run][1]) for run in expected)
    assert [run.digest for run in whole.runs] == [run.digest for run in again.runs]
    assert len({run.digest for run in whole.runs}) == 2


@pytest.mark.long
def test_the_guides_trainings_run(tmp_path: Path) -> None:
    page = blocks((ROOT / "docs" / "guides" / "studies.md").read_text(encoding="utf-8"))
    code = "".join(block.code for block in page if "train_by_hand" in block.code or 'title="my_study.py"' in block.info)
    (tmp_path / "guide_trainings.py").write_text(code)
    declared = mouse_study.load_study(tmp_path / "guide_trainings.py")
    results = Study(
        "guide",
        {**declared.frameworks, "jax-hand": sys.modules["guide_trainings"].train_by_hand},
        steps=30,
        seeds=[3],
        variants={"wide": {"width": 256}},
        store=declared.store,
        batches=declared.batches,
    ).run(tmp_path / "out", jobs=2)
    assert {run.status for run in results.runs} == {"done"}
    assert len({run.digest for run in results.runs}) == 1
