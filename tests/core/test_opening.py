"""Recorded data of any kind that mouse view opens as a store."""

import re
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest

from mouse_core import formats
from mouse_core.cli import main
from mouse_core.view.opening import opened_store
from tests.bench import generate
from tests.core.formats.test_flat_files import logged, write_ogbench

ROWS = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate.write(generate.STATE, tmp_path_factory.mktemp("state"), ROWS)


def run(*arguments: object) -> int:
    return main(["view", "--no-browser", *map(str, arguments)])


def test_what_can_be_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = datasets.load_from_disk(str(folder))
    datasets.DatasetDict({"train": dataset, "eval": dataset.select(range(100))}).save_to_disk(str(tmp_path / "dict"))
    dataset.select(range(50)).to_parquet(str(tmp_path / "some.parquet"))
    arrow = next(folder.glob("*.arrow"))

    def rows(path: object, *splits: str, **options: str) -> int:
        with opened_store(str(path), splits=splits or None, **options) as found:
            segments = found.snapshot().segments
            # On disk, whatever it was before.
            assert all(segment.is_mapped for segment in segments) or Path(str(path)).suffix == ".parquet"
            return len(found)

    flat = write_ogbench(tmp_path / "x.npz", "raw", logged())
    assert rows(folder) == rows(arrow) == ROWS
    assert rows(tmp_path / "some.parquet") == 50
    assert rows(tmp_path / "dict") == ROWS + 100
    assert rows(tmp_path / "dict", "eval") == 100
    assert rows(flat) == rows(flat, format="ogbench") == formats.open(flat).to_table().num_rows
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": dataset} if name == "org/data" else None)
    with opened_store("org/data") as found:
        assert len(found) == ROWS


def test_a_mistyped_path_asks_no_network_and_an_error_of_the_hub_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Mock(side_effect=datasets.exceptions.DatasetNotFoundError("'org/typo' doesn't exist on the Hub\nor so"))
    monkeypatch.setattr(datasets, "load_dataset", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recordings").mkdir()
    hub = "expected a file or folder, or namespace/name of a dataset on the Hub"
    for name in ("typo", "./typo", "recordings/typo", "/typo/typo", "typo/", "org/data.parquet", "a b/c"):
        assert run(name) == 2
        assert capsys.readouterr().err.strip() == f"mouse view: {hub}, found no file {name!r}"
    asked.assert_not_called()
    assert run("org/typo") == 2
    assert capsys.readouterr().err == "mouse view: the Hub: 'org/typo' doesn't exist on the Hub\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"mouse-data \S.*\n", capsys.readouterr().out)


def test_mistakes_and_interruptions_are_told_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ((tmp_path,), "no format recognised in a folder of nothing"),
        ((folder, "--split", "eval"), "split: expected one of ['train'], found 'eval'"),
    ):
        assert run(*arguments) == 2
        shown = capsys.readouterr().err.strip()
        assert shown.startswith("mouse view: ")
        assert message in shown
        assert "\n" not in shown
    monkeypatch.setattr("mouse_core.inspect.inspect", Mock(side_effect=KeyboardInterrupt))
    assert main(["inspect", str(folder)]) == 130
    assert capsys.readouterr().err == "mouse inspect: interrupted\n"
