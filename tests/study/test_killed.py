"""Studies in PyTorch and JAX: killed whenever, and those of the guide."""

import sys
from pathlib import Path

import pytest

import mouse_study
from mouse_study import Study
from scripts.house import ROOT
from tests.study.killing import compare
from tests.test_docs import blocks

pytestmark = pytest.mark.slow


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_kills_change_nothing(tmp_path: Path) -> None:
    compared = compare(tmp_path, steps=80, seeds=2, seed=0)
    assert not compared.different
    assert compared.same_data
    assert compared.seeds_differ
    assert compared.equal > 4 * 80
    assert compared.studies + compared.runs > 1


@pytest.mark.long
def test_the_guides_trainings_run(tmp_path: Path) -> None:
    """Those of docs/guides/studies.md that the page itself does not run."""
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
