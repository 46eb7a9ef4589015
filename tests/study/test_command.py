"""`mouse study`, which the core finds by its entry point; and commands of packages that are not there."""

import sys
import tomllib
from pathlib import Path

import pytest

import mouse_study
from mouse_core.cli import GROUP, main
from scripts.house import ROOT
from tests.test_docs import blocks

ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a distribution that has the project's entry points, and others that are broken."""
    monkeypatch.setattr("importlib.metadata.MetadataPathFinder.invalidate_caches", lambda *_: None, raising=False)
    info = tmp_path / "site" / "others-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in ENTRY_POINTS[GROUP].items()]
    lines += ["missing = not_installed_at_all:COMMAND", "wrong = of_no_use:TEXT"]
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + "\n".join(lines) + "\n")
    (tmp_path / "site" / "of_no_use.py").write_text("TEXT = 'no'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


DECLARED = """
from mouse_study import Study, Training

def train(context):
    if context.options.get("fails"):
        raise ValueError("no")
    return Training(lambda: context.seed / 4)

study = Study("declared", {"numpy": train}, steps=3, seeds=[1, 2], variants={"good": {}, "bad": {"fails": True}})
"""


@pytest.mark.slow
def test_a_study_is_run_from_the_command_line(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (installed / "declared_for_the_command.py").write_text(DECLARED)
    out = installed / "out"
    told = ["study", str(installed / "declared_for_the_command.py"), "--out", str(out)]
    assert main([*told, "--only", "good", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"declared: 2 of 2 runs done, recorded in {out}/results.parquet",
        "same data: nothing to prove, because no variant and seed ran in two frameworks",
    ]
    assert mouse_study.read(out).series("loss")["good/numpy/2"][1].tolist() == [0.5] * 3
    assert main([*told, "--only", "good/numpy/1", "--only", "bad/*/2"]) == 1
    shown = capsys.readouterr()
    assert "declared: 1 of 2 runs done" in shown.out
    assert "bad/numpy/2: failed: ValueError: no; see " in shown.err
    assert "good/numpy/1: running" not in shown.err  # which was done
    assert main(told[:2]) == 2
    assert "expected --out FOLDER" in capsys.readouterr().err
    assert main([*told, "--only", "bat"]) == 2
    assert capsys.readouterr().err.startswith("mouse study: only: expected VARIANT/FRAMEWORK/SEED")


def test_help_lists_commands_of_other_packages(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "study train in several frameworks" in shown
    assert "missing (cannot be used: No module named 'not_installed_at_all')" in shown
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    page = blocks((ROOT / "docs" / "reference" / "command.md").read_text(encoding="utf-8"))
    shown = capsys.readouterr().out.split()
    assert shown in [block.code.split() for block in page], "the reference shows another help than there is"


def test_a_command_that_cannot_be_loaded_says_why_in_a_line(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["missing", "--some", "thing", "--help"]) == 2
    assert capsys.readouterr().err == "mouse missing: No module named 'not_installed_at_all'\n"
    assert main(["wrong"]) == 2
    assert capsys.readouterr().err == "mouse wrong: of_no_use:TEXT: expected two functions, found 'no'\n"


def test_commands_of_the_core_load_no_others(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**options: object) -> None:
        raise AssertionError("looked up entry points")

    monkeypatch.setattr("importlib.metadata.entry_points", fails)
    assert main(["inspect", str(installed / "nothing")]) == 2
    assert "mouse_study" in sys.modules  # of this test itself
